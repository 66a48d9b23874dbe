"""`thresher eval` from flags to table: how the recipe is decided, and what a whole evaluation writes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluate_cases import SAID, SHORT, recipe_from, refusal, searching_flags, write_asked
from stored_cases import stored

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.baselines import load_baseline
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.evaluation.metrics import figures_of, markdown, rows_of
from thresher.engine.evaluation.run import rewarded_by
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.systems import load_system
from thresher.retrieval.questions import Question, passage_record
from thresher.rewards.text import contains_answer


@pytest.fixture
def asked(tmp_path: Path, tiny_questions: list[Question]) -> Path:
    return write_asked(tmp_path, tiny_questions)


@pytest.fixture
def searching(tiny_model_folder: Path, tiny_index_folder: Path, asked: Path) -> list[str]:
    return searching_flags(tiny_model_folder, tiny_index_folder, asked)


# from flags to a recipe


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
    plain = recipe_from(str(file))
    assert plain.retrieval and (plain.retrieval.index, plain.retrieval.k, plain.run.seed) == ("here", 9, 4)
    assert plain.retrieval.passage_format.startswith("[{number}]")  # from arena's preset
    recipe = recipe_from(
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
    same = recipe_from(str(file), "--system", "arena").system
    assert same and (same.template, same.options) == ("mine.txt", {"max_indices": 3})
    other = recipe_from(str(file), "--system", "search_r1", "--set", "system.options.answer_after_searches=false")
    assert other.system and (other.system.name, other.system.template) == ("search_r1", None)
    assert other.system.options == {"answer_after_searches": False}
    assert other.retrieval and other.retrieval.k == 3 and other.rollout.max_turns == 5  # from its own preset
    baseline = recipe_from(str(file), "--baseline", "naive_rag")
    assert baseline.system and (baseline.system.name, baseline.system.template) == ("naive_rag", None)
    assert baseline.rollout.max_turns == 1


def test_without_a_file_the_flags_must_say_enough(tiny_model_folder: Path) -> None:
    model = str(tiny_model_folder)
    recipe = recipe_from("--model", model, "--system", "evinote")
    assert recipe.rollout.max_context == 2048  # the model's, which is too short for 6,144
    assert recipe.rollout.max_turn_tokens == 500  # as in training, not the default of 256
    # What a baseline leaves open is taken from the system that it replaces.
    beside = recipe_from("--model", model, "--system", "arena", "--baseline", "direct")
    assert beside.retrieval and beside.retrieval.k == 10 and beside.rollout.max_turns == 1
    for arguments, what in (
        (("--system", "arena"), "no model; give --model FOLDER"),
        (("--model", model), "no system; give --system NAME"),
        (("--model", model, "--system", "arenas"), "arenas"),
        (("--model", model, "--baseline", "cots"), "cots"),
        (("--model", model, "--system", "arena", "--set", "rollout=3"), "rollout"),
    ):
        with pytest.raises(UserError, match=what):
            recipe_from(*arguments)


# a whole evaluation


def test_an_evaluation_from_flags_alone(searching: list[str], tmp_path: Path, capsys: Any, script: Any) -> None:
    script(SAID)
    out = tmp_path / "out"
    assert cli.run([*searching, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        *(".lock", "metrics.json", "settings.json", "table.md", "trajectories.jsonl")
    ]
    metrics = json.loads((out / "metrics.json").read_text())
    records = stored(out / "trajectories.jsonl")
    assert metrics["questions"] == len(records) == 7 and metrics["system"] == "search_r1"
    for name in ("em", "searches", "response_tokens"):
        assert metrics[name] == pytest.approx(sum(record["measures"][name] for record in records) / 7)
        low, high = metrics["intervals"][name]
        assert low <= metrics[name] <= high
    assert metrics["searches"] == sum(len(record["searches"]) for record in records) / 7 == 6 / 7
    assert metrics["counted"]["recall@5"] == sum(bool(record["searches"]) for record in records) == 4
    assert metrics["seconds_per_question"] == pytest.approx(metrics["seconds"] / 7) and metrics["batch"] == 7
    table = (out / "table.md").read_text()
    assert "- Passages: 2 a search, from " in table and "a question, at most 7 at once, float32 on cpu" in table
    assert f"| Valid searches | `searches` | {metrics['searches']:.2f} |" in table
    assert "│ em " in capsys.readouterr().out
    assert "exists already; choose another folder" in refusal(capsys, *searching, "--out", str(out))


def test_what_was_retrieved_is_ranked_over_all_searches(searching: list[str], tmp_path: Path, script: Any) -> None:
    """Checked against the passages of the corpus: best first, search after search, none twice."""
    script(SAID)
    out = tmp_path / "out"
    assert cli.run([*searching, "--out", str(out)]) == 0
    index = Path(searching[searching.index("--index") + 1])
    texts = {
        record["id"]: record["text"]
        for record in map(json.loads, (index.parent / "corpus.jsonl").open(encoding="utf-8"))
    }
    seen = 0
    for record in stored(out / "trajectories.jsonl"):
        ids = dict.fromkeys(id_ for search in record["searches"] for id_ in search["passages"])
        holds = [record["golden_answers"][0] in texts[id_] for id_ in ids]
        measures = record["measures"]
        assert measures.get("recall@5") == (float(any(holds[:5])) if holds else None)
        assert measures.get("recall_passages") == (float(any(holds)) if holds else None)
        seen += bool(holds)
    assert seen == 4


def test_documents_that_questions_name_are_looked_for_in_what_searches_found(
    searching: list[str], asked: Path, tmp_path: Path, script: Any
) -> None:
    def evaluated(name: str) -> list[dict[str, Any]]:
        script(SAID)
        assert cli.run([*searching, "--out", str(tmp_path / name)]) == 0
        return stored(tmp_path / name / "trajectories.jsonl")

    found = [[id_ for search in record["searches"] for id_ in search["passages"]] for record in evaluated("before")]
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    named = [[ids[-1] if ids else "other", "absent"] for ids in found]
    records = [{**line, "metadata": {"evidence_docs": ids}} for line, ids in zip(lines, named, strict=True)]
    asked.write_text("".join(json.dumps(record) + "\n" for record in records))
    shares = [record["measures"]["recall_evidence_docs"] for record in evaluated("after")]
    assert shares == [0.5 if ids else 0.0 for ids in found] and shares.count(0.5) == 4
    assert json.loads((tmp_path / "after" / "metrics.json").read_text())["recall_evidence_docs"] == pytest.approx(2 / 7)


def with_given(asked: Path, tiny_index: Any) -> Path:
    """Write three passages per question, the last of them gold."""
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
    # Noise comes from the corpus. Without one, the seven questions have too few irrelevant passages for each other.
    noise = [*arena, "--questions", str(given), "--distractors", "2", "--out", str(tmp_path / "2")]
    assert "of 2 irrelevant passages among 21; ask for less noise" in refusal(capsys, *noise)
    assert cli.run([*noise, "--index", str(tiny_index_folder)]) == 0
    clean, noisy = (stored(tmp_path / name / "trajectories.jsonl") for name in "02")
    for before, after in zip(clean, noisy, strict=True):
        assert len(before["passages"]) == 3 and len(after["passages"]) == 5
        kept = [passage for passage in after["passages"] if passage in before["passages"]]
        assert kept == before["passages"]
        (place,) = after["gold_indices"]
        assert after["passages"][place - 1] == before["passages"][2]
        assert before["measures"]["recall@5"] == 1.0 and before["measures"]["ndcg@5"] == 0.5  # at rank 3
    assert json.loads((tmp_path / "2" / "metrics.json").read_text())["noise"] == 2
    # If passages do not fit, the table says so, and the passages as shown are stored and measured.
    tight = [*arena, "--questions", str(given), "--set", "rollout.max_passage_tokens=36"]
    capsys.readouterr()
    assert cli.run([*tight, "--out", str(tmp_path / "tight")]) == 0
    sentence = "7 of 7 questions had passages cut to 36 tokens; raise rollout.max_passage_tokens"
    assert f"eval: {sentence}" in " ".join(capsys.readouterr().out.split())
    assert f"- Passages cut: {sentence}" in (tmp_path / "tight" / "table.md").read_text()
    metrics = json.loads((tmp_path / "tight" / "metrics.json").read_text())
    shown = stored(tmp_path / "tight" / "trajectories.jsonl")
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
        capsys, *search, "--distractors", "1", "--index", str(tiny_index_folder), "--out", "x"
    )
    assert "no index or server to search" in refusal(
        capsys, *arena, "--questions", str(asked), "--out", str(tmp_path / "x")
    )
    assert not (tmp_path / "x").exists()


def test_the_table_counts_questions_without_gold_indices(
    tiny_model_folder: Path, asked: Path, tiny_index: Any, tmp_path: Path
) -> None:
    given = with_given(asked, tiny_index)
    records = [json.loads(line) for line in given.read_text().splitlines()]
    for record in records[:2]:
        del record["gold_indices"]
    given.write_text("".join(json.dumps(record) + "\n" for record in records))
    for system, counted in (("arena", True), ("eviomni", False)):
        command = ["eval", "--model", str(tiny_model_folder), "--system", system, *SHORT, "--questions", str(given)]
        assert cli.run([*command, "--limit", "3", "--out", str(tmp_path / system)]) == 0
        page = (tmp_path / system / "table.md").read_text()
        assert ("- Gold passages: unknown for 2 of 3 questions, which earn nothing for naming some" in page) == counted


GOLDLESS = """def short(text):
    return -float(len(text))


def asked(text, target):
    return float(target in text)
"""


def test_questions_without_gold_answers(
    searching: list[str], tiny_model_folder: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [json.loads(line) for line in asked.read_text().splitlines()][:3]
    for record in records:
        record["target"] = record["question"][0]
    del records[0]["golden_answers"], records[1]["golden_answers"]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "mine.py").write_text(GOLDLESS)

    def evaluated(out: str, *command: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        command = tuple("bare.jsonl" if word == str(asked) else word for word in command)
        assert cli.run([*command, "--out", out]) == 0
        page = (tmp_path / out / "table.md").read_text()
        return (
            json.loads((tmp_path / out / "metrics.json").read_text()),
            stored(tmp_path / out / "trajectories.jsonl"),
            page,
        )

    # A reward that needs golds counts only for the one question that has some; counts of actions cover all questions.
    figures, entries, page = evaluated("search", *searching)
    assert [entry["reward"] is None for entry in entries] == [True, True, False]
    assert [bool(entry["parts"]) for entry in entries] == [False, False, True]
    counts = {key: count for key, _, _, count in rows_of(figures)}
    assert counts["reward"] == counts["em"] == counts["contains"] == counts["parts.answer"] == 1
    assert counts["response_tokens"] == counts["answered"] == counts["searches"] == 3
    assert not {"em", "recall_passages"} & entries[0]["measures"].keys()
    line = "- Gold answers: missing for 2 of 3 questions, which count in no measure against them"
    assert f"{line} nor in the reward\n" in page
    # A reward that needs no golds counts for all questions, and evaluations by it compare.
    (tmp_path / "r.toml").write_text(
        f'[model]\npath = "{tiny_model_folder}"\n[rollout]\nmax_context = 200\nmax_turn_tokens = 4\n[system]\n'
        'name = "plain"\noptions = { rewards = ["mine.py:short", "mine.py:asked"], weights = [1.0, 0.5] }\n'
    )
    plain = ["eval", "r.toml", "--questions", str(asked)]
    figures, entries, page = evaluated("plain", *plain)
    assert all(e["reward"] == e["parts"]["short"] + 0.5 * e["parts"]["asked"] < 0 for e in entries)
    assert figures["reward"] == pytest.approx(sum(entry["reward"] for entry in entries) / 3)
    assert "em" not in figures and f"{line}\n" in page
    evaluated("again", *plain, "--temperature", "1", "--seed", "4")
    assert cli.run(["compare", "plain", "again", "--out", "both"]) == 0
    assert "reward" in json.loads((tmp_path / "both" / "compare.json").read_text())["differences"]
    (tmp_path / "mine.py").write_text(GOLDLESS.replace("-float", "2 - float"))
    other, _, _ = evaluated("other", *plain)
    assert other["rewarded_by"] != figures["rewarded_by"]


def test_what_found_no_room_and_which_switches_were_set_is_reported(
    tiny_model_folder: Path, asked: Path, tiny_index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Rollout.run

    def without_room(self: Rollout, *arguments: Any, **options: Any) -> Any:
        done = run(self, *arguments, **options)
        self.clock.branches_without_room = 2
        return done

    monkeypatch.setattr(Rollout, "run", without_room)
    command = ["eval", "--model", str(tiny_model_folder), "--system", "eviomni", *SHORT, "--limit", "3"]
    command += ["--questions", str(with_given(asked, tiny_index)), "--set", "system.options.rationale=false"]
    assert cli.run([*command, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["branches_without_room"] == 2
    page = (tmp_path / "out" / "table.md").read_text()
    assert "- Branches: 2 did not fit into rollout.max_context" in page and "- Options: rationale = False" in page


def test_the_reward_is_named_by_function_and_switches() -> None:
    def named(name: str, baseline: bool = False, **options: Any) -> str:
        system = load_baseline(name, options) if baseline else load_system(name, options)
        return rewarded_by(SimpleNamespace(system=system, system_digest=None))  # type: ignore[arg-type]

    assert named("lear") == named("eviomni") != named("eviomni", tau=0.2)
    assert named("eviomni").startswith("thresher.rewards.eviomni.eviomni_reward, {")  # as older evaluations store it
    assert named("arena") != named("arena", accuracy="f1") and named("evinote") != named("evinote_code")
    assert named("evinote", marks="code") == named("evinote_code") and named("r1") != named("naive_grpo")
    assert named("eval_rar") != named("eval_rar", substring=False)
    assert named("cot", baseline=True) == named("search_loop", baseline=True) != named("search_r1")


def test_a_baseline_in_the_systems_place(tiny_model_folder: Path, asked: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ["eval", "--model", str(tiny_model_folder), "--questions", str(asked), *SHORT, "--system", "search_r1"]
    assert cli.run([*flags, "--baseline", "direct", "--limit", "2", "--out", str(tmp_path / "out")]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["baseline"], metrics["system"], metrics["retrieval"]) == ("direct", None, None)
    assert metrics["questions"] == 2 and "recall@5" not in metrics
    assert "- Baseline: direct" in (tmp_path / "out" / "table.md").read_text()
    line = "eval: baseline direct answers; only the preset of search_r1 is used, for keys that are left open"
    assert line in capsys.readouterr().out
    assert "system.options.file=FILE, which thresher extract wrote" in refusal(
        capsys, *flags, "--baseline", "evidence", "--out", str(tmp_path / "x")
    )


# the table


def test_a_table_by_hand() -> None:
    measures: list[dict[str, float | None]] = [{"em": 1.0, "compression": None}, {"em": 0.0, "compression": 4.0}]
    figures = figures_of(measures, [{"format": 1.0}, {"format": 1.0}])
    assert (figures["em"], figures["compression"], figures["parts"]) == (0.5, 4.0, {"format": 1.0})
    # Wilson's interval of 1 of 2; none of a single value, which a bootstrap could only draw again.
    assert figures["intervals"] == {"em": pytest.approx([0.0945, 0.9055], abs=1e-4)}
    assert figures["counted"] == {"compression": 1}
    assert rows_of(figures) == [
        ("em", "50.0%", "9.5% to 90.5%", 2),
        ("compression", "4.00", "-", 1),
        ("parts.format", "1.00", "-", 2),
    ]
    assert figures["deviations"] == {}  # none for a single length
    lengths: list[dict[str, float | None]] = [{"tokens": 3.0}, {"tokens": 7.0}, {"tokens": None}]
    deviating = figures_of(lengths, [{}, {}, {}])
    assert deviating["deviations"] == {"tokens": pytest.approx(8**0.5)}
    assert "\nStandard deviations over questions: `tokens` 2.83.\n" in markdown("x", deviating)
    page = markdown("a | b", figures | {"model": "x | y\nz", "temperature": 0.0, "seed": None})
    assert "- Model: x \\| y z\n" in page and "- Temperature: 0\n" in page and "Seed" not in page
    assert "| Compression ratio | `compression` | 4.00 | - | 1 |" in page


def test_every_seed_of_a_sampled_evaluation_has_noise_of_its_own(tiny_questions: list[Question]) -> None:
    """No sample under one seed occurs under another, and a part of an evaluation draws the same as the whole."""
    of_seed = [[job.seed for job in jobs_of(tiny_questions, 0.7, seed)] for seed in range(20)]
    assert len({seed for seeds in of_seed for seed in seeds}) == 20 * len(tiny_questions)
    for first in (3, len(tiny_questions) - 1):
        assert [job.seed for job in jobs_of(tiny_questions[first:], 0.7, 4, first)] == of_seed[4][first:]
    greedy = [[job.seed for job in jobs_of(tiny_questions, 0.0, seed)] for seed in range(3)]
    assert greedy == [list(range(len(tiny_questions)))] * 3
