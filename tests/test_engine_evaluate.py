"""`thresher eval` from flags to table: what decides the recipe, what a kill leaves, and whom it asks.

And what a step of training is given: its questions and its seeds.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thresher.engine import assemble, cli
from thresher.engine.baselines import load_baseline
from thresher.engine.best import best_checkpoint, steps_by_dev
from thresher.engine.evalfolder import EvalFolder, Generated
from thresher.engine.evalrun import Asked, rewarded_by, settings_of
from thresher.engine.evaltable import figures_of, markdown, rows_of
from thresher.engine.evaluating import eval_arguments, eval_recipe
from thresher.engine.recipe import Recipe
from thresher.engine.rollout import Rollout
from thresher.engine.runfolder import RunFolder
from thresher.engine.systems import load_system
from thresher.engine.tables import from_dict
from thresher.engine.train import questions_of_step, seed_of
from thresher.engine.trajectory import Segment, Trajectory
from thresher.retrieval.questions import Question, passage_record, question_record
from thresher.rewards.errors import UserError
from thresher.rewards.text import contains_answer
from thresher.rewards.transcript import Source

SHORT = ("--set", "rollout.max_turn_tokens=40", "--set", "rollout.max_context=900")
PROMPT = "<search> or <answer>: {question}\n"  # which the tiny policy was taught to go on from


@pytest.fixture
def asked(tmp_path: Path, tiny_questions: list[Question]) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question_record(question)) + "\n" for question in tiny_questions[:7]))
    return path


@pytest.fixture
def searching(tiny_model_folder: Path, tiny_index_folder: Path, asked: Path) -> list[str]:
    """An evaluation that only wants an --out, of a policy that searches and answers at times."""
    template = asked.with_name("prompt.txt")
    template.write_text(PROMPT)
    flags = ["--model", str(tiny_model_folder), "--index", str(tiny_index_folder), "--k", "2"]
    prompt = ["--set", f"system.template={template}", "--set", "rollout.max_policy_tokens=80"]
    return ["eval", *flags, "--system", "search_r1", "--questions", str(asked), *SHORT, *prompt]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert cli.run(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("thresher: ") and error.count("\n") == 1
    return error


def results(out: Path) -> dict[str, Any]:
    """All that must not depend on time, nor on whether the evaluation was cut off."""
    metrics = json.loads((out / "metrics.json").read_text())
    timed = ("seconds", "seconds_per_question", "latency", "batch")
    return {
        "trajectories": (out / "trajectories.jsonl").read_text(),
        "metrics": {key: value for key, value in metrics.items() if key not in timed},
    }


# what an evaluation is told


def told(*arguments: str) -> Recipe:
    parser = argparse.ArgumentParser()
    eval_arguments(parser)
    return eval_recipe(parser.parse_args([*arguments, "--out", "o"]))[0]


RECIPE = """
[model]
path = "nowhere"
[system]
name = "arena"
template = "mine.txt"
options = {{ max_indices = 3 }}
[retrieval]
{retrieval}
[rollout]
max_context = 700
[run]
seed = 4
"""


def test_flags_win_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(RECIPE.format(retrieval='index = "here"\nk = 9'))
    plain = told(str(file))
    assert plain.retrieval and (plain.retrieval.index, plain.retrieval.k, plain.run.seed) == ("here", 9, 4)
    assert plain.retrieval.passage_format.startswith("[{number}]")  # of arena's preset
    recipe = told(
        *(str(file), "--model", "m", "--url", "http://x", "--k", "4", "--seed", "5", "--prompt", "chat"),
        *("--entailment", "nli", "--judge-url", "http://y", "--judge-model", "big", "--set", "retrieval.k=6"),
    )
    assert recipe.retrieval and recipe.retrieval.index is None and recipe.retrieval.url == "http://x"
    assert (recipe.retrieval.k, recipe.run.seed, recipe.model.path, recipe.model.prompt) == (6, 5, "m", "chat")
    assert (recipe.judge.entailment, recipe.judge.url, recipe.judge.model) == ("nli", "http://y", "big")
    assert recipe.system and recipe.system.options == {"max_indices": 3}


def test_another_system_leaves_the_files_template_and_switches_behind(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(RECIPE.format(retrieval='index = "here"'))
    same = told(str(file), "--system", "arena").system
    assert same and (same.template, same.options) == ("mine.txt", {"max_indices": 3})
    other = told(str(file), "--system", "search_r1", "--set", "system.options.answer_after_searches=false")
    assert other.system and (other.system.name, other.system.template) == ("search_r1", None)
    assert other.system.options == {"answer_after_searches": False}
    assert other.retrieval and other.retrieval.k == 3 and other.rollout.max_turns == 5  # of its own preset
    baseline = told(str(file), "--baseline", "naive_rag")
    assert baseline.system and (baseline.system.name, baseline.system.template) == ("naive_rag", None)
    assert baseline.rollout.max_turns == 1


def test_without_a_file_the_flags_must_say_enough(tiny_model_folder: Path) -> None:
    model = str(tiny_model_folder)
    recipe = told("--model", model, "--system", "evinote")
    assert recipe.rollout.max_context == 2048  # the model's, which has no room for 6,144
    assert recipe.rollout.max_turn_tokens == 500  # as in training, not the 256 of a recipe that says nothing
    # What a baseline leaves open is as in the system that it stands in for.
    beside = told("--model", model, "--system", "arena", "--baseline", "direct")
    assert beside.retrieval and beside.retrieval.k == 10 and beside.rollout.max_turns == 1
    for arguments, what in (
        (("--system", "arena"), "no model; give --model FOLDER"),
        (("--model", model), "no system; give --system NAME"),
        (("--model", model, "--system", "arenas"), "arenas"),
        (("--model", model, "--baseline", "cots"), "cots"),
        (("--model", model, "--system", "arena", "--set", "rollout=3"), "rollout"),
    ):
        with pytest.raises(UserError, match=what):
            told(*arguments)


# an evaluation, whole


def test_an_evaluation_from_flags_alone(searching: list[str], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert cli.run([*searching, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        *(".lock", "metrics.json", "settings.json", "table.md", "trajectories.jsonl")
    ]
    metrics = json.loads((out / "metrics.json").read_text())
    records = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert metrics["questions"] == len(records) == 7 and metrics["system"] == "search_r1"
    for name in ("em", "searches", "response_tokens"):
        assert metrics[name] == pytest.approx(sum(record["measures"][name] for record in records) / 7)
        low, high = metrics["intervals"][name]
        assert low <= metrics[name] <= high
    assert metrics["searches"] == sum(len(record["searches"]) for record in records) / 7 > 0
    assert metrics["counted"]["recall@5"] == sum(bool(record["searches"]) for record in records)
    assert metrics["seconds_per_question"] == pytest.approx(metrics["seconds"] / 7) and metrics["batch"] == 7
    table = (out / "table.md").read_text()
    assert "- Passages: 2 a search, from " in table and "a question, at most 7 at once, float32 on cpu" in table
    assert f"| Valid searches | `searches` | {metrics['searches']:.2f} |" in table
    assert "│ em " in capsys.readouterr().out
    assert "exists already; choose another folder" in refusal(capsys, *searching, "--out", str(out))


def test_what_was_retrieved_is_ranked_over_all_searches(searching: list[str], tmp_path: Path) -> None:
    """Against the passages of the corpus itself: best first, search after search, none twice."""
    out = tmp_path / "out"
    assert cli.run([*searching, "--out", str(out)]) == 0
    index = Path(searching[searching.index("--index") + 1])
    texts = {
        record["id"]: record["text"]
        for record in map(json.loads, (index.parent / "corpus.jsonl").open(encoding="utf-8"))
    }
    seen = 0
    for record in map(json.loads, (out / "trajectories.jsonl").open(encoding="utf-8")):
        ids = dict.fromkeys(id_ for search in record["searches"] for id_ in search["passages"])
        holds = [record["golden_answers"][0] in texts[id_] for id_ in ids]
        measures = record["measures"]
        assert measures.get("recall@5") == (float(any(holds[:5])) if holds else None)
        assert measures.get("recall_passages") == (float(any(holds)) if holds else None)
        seen += bool(holds)
    assert seen


def with_given(asked: Path, tiny_index: Any) -> Path:
    """Three passages a question, the last of them gold."""
    path = asked.with_name("given.jsonl")
    lines = []
    for line in asked.read_text().splitlines():
        record = json.loads(line)
        gold = next(p for p in tiny_index.corpus if record["golden_answers"][0] in p.text)
        others = [p for p in tiny_index.corpus if record["golden_answers"][0] not in p.text][:2]
        given = [passage_record(passage) for passage in (*others, gold)]
        lines.append(json.dumps({**record, "passages": given, "gold_indices": [3]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_given_passages_and_noise(
    tiny_model_folder: Path, tiny_index_folder: Path, asked: Path, tiny_index: Any, tmp_path: Path, capsys: Any
) -> None:
    given = with_given(asked, tiny_index)
    arena = ["eval", "--model", str(tiny_model_folder), "--system", "arena", *SHORT]
    assert cli.run([*arena, "--questions", str(given), "--out", str(tmp_path / "0")]) == 0
    # The corpus is where noise comes from. Without one, seven questions have nothing irrelevant enough for each other.
    noise = [*arena, "--questions", str(given), "--noise", "2", "--out", str(tmp_path / "2")]
    assert "of 2 irrelevant passages among 21; ask for less noise" in refusal(capsys, *noise)
    assert cli.run([*noise, "--index", str(tiny_index_folder)]) == 0
    clean, noisy = (
        [json.loads(line) for line in (tmp_path / name / "trajectories.jsonl").read_text().splitlines()]
        for name in "02"
    )
    for before, after in zip(clean, noisy, strict=True):
        assert len(before["passages"]) == 3 and len(after["passages"]) == 5
        kept = [passage for passage in after["passages"] if passage in before["passages"]]
        assert kept == before["passages"]
        (place,) = after["gold_indices"]
        assert after["passages"][place - 1] == before["passages"][2]
        assert before["measures"]["recall@5"] == 1.0 and before["measures"]["ndcg@5"] == 0.5  # at rank 3
    assert json.loads((tmp_path / "2" / "metrics.json").read_text())["noise"] == 2
    # Where they do not fit, the table says so, and what is stored and measured is what was shown.
    tight = [*arena, "--questions", str(given), "--set", "rollout.max_passage_tokens=36"]
    capsys.readouterr()
    assert cli.run([*tight, "--out", str(tmp_path / "tight")]) == 0
    sentence = "7 of 7 questions had passages cut to 36 tokens; raise rollout.max_passage_tokens"
    assert f"eval: {sentence}" in " ".join(capsys.readouterr().out.split())
    assert f"- Passages cut: {sentence}" in (tmp_path / "tight" / "table.md").read_text()
    metrics = json.loads((tmp_path / "tight" / "metrics.json").read_text())
    shown = [json.loads(line) for line in (tmp_path / "tight" / "trajectories.jsonl").read_text().splitlines()]
    lost = 0
    for whole, entry in zip(clean, shown, strict=True):
        prompt = entry["segments"][0]["text"]
        for number, (before, after) in enumerate(zip(whole["passages"], entry["passages"], strict=True), start=1):
            assert (
                before["text"].startswith(after["text"]) and f"[{number}] {after['title']}: {after['text']}" in prompt
            )
            lost += before["text"] != after["text"]
        holds = [contains_answer(passage["text"], entry["golden_answers"]) for passage in entry["passages"]]
        assert entry["measures"]["recall_passages"] == float(any(holds))
    assert (metrics["cut_questions"], metrics["cut_passages"]) == (7, lost) and lost >= 7
    clean_figures = json.loads((tmp_path / "0" / "metrics.json").read_text())
    assert clean_figures["cut_passages"] == 0 and clean_figures["cut"] is None
    search = ["eval", "--model", str(tiny_model_folder), "--system", "search_r1", "--questions", str(given)]
    assert "that of search_r1 shows none" in refusal(
        capsys, *search, "--noise", "1", "--index", str(tiny_index_folder), "--out", "x"
    )
    assert "nowhere to search" in refusal(capsys, *arena, "--questions", str(asked), "--out", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_the_table_counts_questions_without_gold_indices(
    tiny_model_folder: Path, asked: Path, tiny_index: Any, tmp_path: Path
) -> None:
    given = with_given(asked, tiny_index)
    records = [json.loads(line) for line in given.read_text().splitlines()]
    for record in records[:2]:
        del record["gold_indices"]
    given.write_text("".join(json.dumps(record) + "\n" for record in records))
    for system, told in (("arena", True), ("eviomni", False)):
        command = ["eval", "--model", str(tiny_model_folder), "--system", system, *SHORT, "--questions", str(given)]
        assert cli.run([*command, "--limit", "3", "--out", str(tmp_path / system)]) == 0
        page = (tmp_path / system / "table.md").read_text()
        assert ("- Gold passages: unknown for 2 of 3 questions, to which naming some earns nothing" in page) == told


def test_what_found_no_room_and_which_switches_were_set_is_told(
    tiny_model_folder: Path, asked: Path, tiny_index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Rollout.run

    def crowded(self: Rollout, *arguments: Any) -> Any:
        done = run(self, *arguments)
        self.clock.branches_without_room = 2
        return done

    monkeypatch.setattr(Rollout, "run", crowded)
    command = ["eval", "--model", str(tiny_model_folder), "--system", "eviomni", *SHORT, "--limit", "3"]
    command += ["--questions", str(with_given(asked, tiny_index)), "--set", "system.options.rationale=false"]
    assert cli.run([*command, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["branches_without_room"] == 2
    page = (tmp_path / "out" / "table.md").read_text()
    assert "- Branches: 2 found no room in rollout.max_context" in page and "- Options: rationale = False" in page


def test_the_reward_is_told_by_function_and_switches() -> None:
    def told(name: str, baseline: bool = False, **options: Any) -> str:
        system = load_baseline(name, options) if baseline else load_system(name, options)
        return rewarded_by(SimpleNamespace(system=system, system_digest=None))  # type: ignore[arg-type]

    assert told("lear") == told("eviomni") != told("eviomni", tau=0.2)
    assert told("arena") != told("arena", accuracy="f1") and told("evinote") == told("evinote_code")
    assert told("eval_rar") != told("eval_rar", substring=True)
    assert told("cot", baseline=True) == told("search_loop", baseline=True) != told("search_r1")


def test_a_baseline_in_the_systems_place(tiny_model_folder: Path, asked: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ["eval", "--model", str(tiny_model_folder), "--questions", str(asked), *SHORT, "--system", "search_r1"]
    assert cli.run([*flags, "--baseline", "direct", "--limit", "2", "--out", str(tmp_path / "out")]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["baseline"], metrics["system"], metrics["retrieval"]) == ("direct", None, None)
    assert metrics["questions"] == 2 and "recall@5" not in metrics
    assert "- Baseline: direct" in (tmp_path / "out" / "table.md").read_text()
    line = "eval: baseline direct answers; of search_r1 only the preset counts, and fills what is left open"
    assert line in capsys.readouterr().out
    assert "system.options.file=FILE, which thresher extract wrote" in refusal(
        capsys, *flags, "--baseline", "evidence", "--out", str(tmp_path / "x")
    )


# what a kill leaves


def cut_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once so many parts are on the disk."""
    done = 0
    append = EvalFolder.append

    def cut(self: EvalFolder, entries: Sequence[Generated]) -> None:
        nonlocal done
        append(self, entries)
        done += 1
        if done == parts:
            raise KeyboardInterrupt

    monkeypatch.setattr(EvalFolder, "append", cut)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_killed_evaluation_goes_on_to_the_same_end(
    searching: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, temperature: str
) -> None:
    command = [*searching, "--temperature", temperature, "--set", "rollout.max_running=1", "--seed", "3"]
    assert cli.run([*command, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        cut_after(2, patch)
        assert cli.run([*command, "--out", str(tmp_path / "cut")]) == 130
    left = tmp_path / "cut" / "generated.jsonl"
    assert len(left.read_text().splitlines()) == 4 and not (tmp_path / "cut" / "metrics.json").exists()
    with left.open("a") as file:
        file.write('{"trajectory": {"ques')  # what a kill in the middle of a line leaves
    # Another question, seed or system is another evaluation; a faster machine is not.
    other = [*command, "--limit", "6"]
    assert "unfinished evaluation with limit = nothing, not 6" in refusal(
        capsys, *other, "--out", str(tmp_path / "cut")
    )
    asked: list[int] = []
    run = Rollout.run
    monkeypatch.setattr(Rollout, "run", lambda self, jobs, *more: asked.append(len(jobs)) or run(self, jobs, *more))
    wider = [*command, "--set", "rollout.max_running=2"]
    assert cli.run([*wider, "--out", str(tmp_path / "cut")]) == 0
    assert asked == [3]  # the rest, and nothing twice
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    assert not left.exists()


def test_questions_that_changed_are_another_evaluation(
    searching: list[str], asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with monkeypatch.context() as patch:
        cut_after(1, patch)
        assert cli.run([*searching, "--out", str(tmp_path / "out")]) == 130
    asked.write_text(asked.read_text().replace("What", "Which"))
    assert "with the questions' content = " in refusal(capsys, *searching, "--out", str(tmp_path / "out"))


def test_two_processes_do_not_write_to_one_evaluation(tmp_path: Path) -> None:
    with (
        EvalFolder.open(tmp_path / "out", {"seed": 1}),
        pytest.raises(UserError, match="is writing to this folder"),
    ):
        EvalFolder.open(tmp_path / "out", {"seed": 1})
    with EvalFolder.open(tmp_path / "out", {"seed": 1}) as folder:
        segment = Segment(Source.POLICY, [1, 2], [-0.5, 0.0], "</a>", 1)
        branch = Trajectory("q", 0, 0, [Segment(Source.PROMPT, [3])], "ended")
        entry = Generated(Trajectory("q", 4, 0, [segment], "turns", [{"query": "x"}], {"full": branch}), 0.25, [True])
        folder.append([entry])
        assert folder.generated() == [entry]


# whom it asks


class Chat:
    """A chat model that says yes to the first question's answer alone, and fails at a call when told to."""

    name = "verdict of a stub"

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]:
        if self.fails:
            raise UserError("http://judge: stayed away for 300 s")
        return [place == 0 for place in range(len(cases))]


def test_a_judge_that_fails_costs_no_trajectory_and_scores_none(
    searching: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    chat = Chat(fails=True)
    monkeypatch.setattr(assemble, "load_verdicts", lambda section, say: chat)
    command = [*searching, "--judge-url", "http://judge", "--judge-model", "stub", "--out", str(tmp_path / "out")]
    message = refusal(capsys, *command)
    assert "stayed away" in message and "the same command goes on from there" in message
    assert not (tmp_path / "out" / "metrics.json").exists()
    assert not (tmp_path / "out" / "trajectories.jsonl").exists()
    chat.fails = False
    monkeypatch.setattr(Rollout, "run", lambda *_: pytest.fail("generated again"))
    assert cli.run(command) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    answers = [record["answer"] for record in records]
    assert sum(map(bool, answers)) > 1  # or the mean below says nothing
    assert metrics["verdict"] == pytest.approx(1 / 7) and metrics["verdict_judge"] == "verdict of a stub"
    assert [record["measures"]["verdict"] for record in records].index(1.0) == [bool(a) for a in answers].index(True)
    assert "- Answers judged by: verdict of a stub" in (tmp_path / "out" / "table.md").read_text()


def test_arena_is_evaluated_though_nobody_knows_the_gold_passages_and_says_so(
    searching: list[str], asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.with_name("prompt.txt").write_text("{passages} " + PROMPT)
    command = ["arena" if word == "search_r1" else word for word in searching]
    assert cli.run([*command, "--out", str(tmp_path / "out")]) == 0
    assert f"{asked}: 7 of 7 questions do not tell which of their passages are gold" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["parts"]["relevance"] == 0


def test_an_evaluation_does_not_go_on_with_a_system_file_that_changed(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("one = 1\n")
    recipe = from_dict(Recipe, {"model": {"path": "m"}, "system": {"name": str(own)}}, "test")
    with EvalFolder.open(tmp_path / "out", settings_of(recipe, Asked(), "q", [])):
        pass
    EvalFolder.check(tmp_path / "out", settings_of(recipe, Asked(), "q", []))
    own.write_text("one = 2\n")
    with pytest.raises(UserError, match="unfinished evaluation with the system file's content ="):
        EvalFolder.check(tmp_path / "out", settings_of(recipe, Asked(), "q", []))


def test_a_judge_that_cannot_be_had_leaves_no_folder(searching: list[str], tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "out")]
    url = ["--judge-url", "http://127.0.0.1:1", "--judge-model", "m"]
    assert "is not set" in refusal(capsys, *searching, *url, "--set", "judge.key_env=NO_SUCH_KEY_HERE", *out)
    assert "[judge] model" in refusal(capsys, *searching, *url[:2], *out)
    evinote = ["evinote" if word == "search_r1" else word for word in searching]
    assert "nowhere" in refusal(capsys, *evinote, "--entailment", str(tmp_path / "nowhere"), *out)
    assert not (tmp_path / "out").exists()
    # One that is away is found out later, and costs nothing that was generated.
    assert "the same command goes on" in refusal(capsys, *searching, *url, "--set", "judge.patience=0", *out)
    assert len((tmp_path / "out" / "generated.jsonl").read_text().splitlines()) == 7


def test_the_stand_in_for_entailment_is_named(searching: list[str], tmp_path: Path) -> None:
    command = ["evinote" if word == "search_r1" else word for word in searching]
    assert cli.run([*command, "--limit", "2", "--out", str(tmp_path / "out")]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "stand-in" in metrics["entailment_judge"] and "entailment" in metrics
    assert "stand-in" in (tmp_path / "out" / "table.md").read_text()


# the best checkpoint


def test_the_best_checkpoint_is_chosen_on_dev(tmp_path: Path, tiny_questions: list[Question]) -> None:
    def evaluated(step: int, em: float | None, f1: float | None = 0.0) -> dict[str, Any]:
        return {"step": step, "eval": {"em": em, "f1": f1}}

    records = [evaluated(0, 0.1), {"step": 1, "em": 0.9}, evaluated(10, 0.5, 0.6), evaluated(20, 0.5, 0.7)]
    records += [evaluated(30, 0.5, 0.7), evaluated(40, None)]
    assert [step for step, _ in steps_by_dev(records)] == [20, 30, 10, 0]
    model = tmp_path / "model"
    table = {"model": {"path": str(model)}, "system": {"name": "arena"}}
    with RunFolder.create(tmp_path / "run", from_dict(Recipe, table, "")) as run:
        with pytest.raises(UserError, match="no evaluation to choose by"):
            best_checkpoint(tmp_path / "run")
        for record in records:
            run.append_metrics(record)
        with pytest.raises(UserError, match=r"no checkpoint of an evaluated step is kept \(the best was step 20\)"):
            best_checkpoint(tmp_path / "run")
        model.mkdir()
        best = best_checkpoint(tmp_path / "run")
        assert (best.path, best.step, best.em, best.lost) == (model, 0, 0.1, 20)
        (run.checkpoints / "step_000030").mkdir()
        assert best_checkpoint(tmp_path / "run").step == 30
        (run.checkpoints / "step_000020").mkdir()
        best = best_checkpoint(tmp_path / "run")
        assert (best.path, best.step, best.lost) == (run.checkpoints / "step_000020", 20, None)
    recipe = told("--best", str(tmp_path / "run"))
    assert recipe.model.path == str(best.path) and recipe.system and recipe.system.name == "arena"
    with pytest.raises(UserError, match="is not a run folder"):
        best_checkpoint(model)


# the table


def test_a_table_by_hand() -> None:
    measures: list[dict[str, float | None]] = [{"em": 1.0, "compression": None}, {"em": 0.0, "compression": 4.0}]
    figures = figures_of(measures, [{"format": 1.0}, {"format": 1.0}])
    assert (figures["em"], figures["compression"], figures["parts"]) == (0.5, 4.0, {"format": 1.0})
    assert figures["intervals"] == {"em": [0.0, 1.0], "compression": [4.0, 4.0], "parts.format": [1.0, 1.0]}
    assert figures["counted"] == {"compression": 1}
    assert rows_of(figures) == [
        ("em", "50.0%", "0.0% to 100.0%", 2),
        ("compression", "4.00", "4.00 to 4.00", 1),
        ("parts.format", "1.00", "1.00 to 1.00", 2),
    ]
    page = markdown("a | b", figures | {"model": "x | y\nz", "temperature": 0.0, "seed": None})
    assert "- Model: x \\| y z\n" in page and "- Temperature: 0\n" in page and "Seed" not in page
    assert "| Compression ratio | `compression` | 4.00 | 4.00 to 4.00 | 1 |" in page


# what a step of training is given


def test_questions_of_a_step_come_once_in_every_pass() -> None:
    questions = [Question(str(number), "?", ("a",)) for number in range(10)]
    asked = [q.id for step in range(1, 11) for q in questions_of_step(questions, 4, 7, step)]
    passes = [asked[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(part) == sorted(q.id for q in questions) for part in passes)
    assert len({tuple(part) for part in passes}) == 4  # each in an order of its own
    again = [q.id for q in questions_of_step(questions, 4, 7, 3)]
    assert again == asked[8:12] != [q.id for q in questions_of_step(questions, 4, 8, 3)]
    assert [q.id for q in questions_of_step(questions[:2], 5, 0, 1)].count("0") in (2, 3)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(0, 1, 2, 3) == 3252311618909706447
    assert len({seed_of(*parts) for parts in ((1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0))}) == 5
    assert all(0 <= seed_of(number) < 2**63 for number in range(100))
