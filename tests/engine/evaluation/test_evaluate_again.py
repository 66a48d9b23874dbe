"""`thresher eval` when interrupted: what a kill leaves, which judges it asks, which checkpoint it takes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluate_cases import PROMPT, SAID, recipe_from, refusal, searching_flags, write_asked
from rollout_cases import EOS
from stored_cases import reweighted, stored

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.common.hashes import text_digest
from thresher.common.records import RecordLog, read_object
from thresher.engine import assemble
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.evaluation.metrics import measures_of
from thresher.engine.evaluation.run import (
    EvalFolder,
    EvalOptions,
    Generated,
    check_generated,
    read_generated,
    settings_of,
)
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.scoring.score import score
from thresher.engine.store.run_folder import RunFolder, best_checkpoint, evaluations_by_dev
from thresher.engine.systems import load_system
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source


@pytest.fixture
def asked(tmp_path: Path, tiny_questions: list[Question]) -> Path:
    return write_asked(tmp_path, tiny_questions)


@pytest.fixture
def searching(tiny_model_folder: Path, tiny_index_folder: Path, asked: Path) -> list[str]:
    return searching_flags(tiny_model_folder, tiny_index_folder, asked)


def results(out: Path) -> dict[str, Any]:
    """Return all results that must not depend on time or on whether the evaluation was interrupted."""
    metrics = json.loads((out / "metrics.json").read_text())
    timed = ("seconds", "seconds_per_question", "latency", "batch", "digest")
    return {
        "trajectories": (out / "trajectories.jsonl").read_text(),
        "metrics": {key: value for key, value in metrics.items() if key not in timed},
    }


# what a kill leaves


def cut_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise KeyboardInterrupt once `parts` parts are on disk."""
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
@pytest.mark.fast_cases(1)
def test_a_killed_evaluation_goes_on_to_the_same_end(
    searching: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, temperature: str
) -> None:
    command = [*searching, "--temperature", temperature, "--set", "rollout.max_num_seqs=1", "--seed", "3"]
    assert cli.run([*command, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        cut_after(2, patch)
        assert cli.run([*command, "--out", str(tmp_path / "cut")]) == 130
    left = tmp_path / "cut" / "generated.jsonl"
    assert len(left.read_text().splitlines()) == 4 and not (tmp_path / "cut" / "metrics.json").exists()
    with left.open("a") as file:
        file.write('{"trajectory": {"ques')  # as left by a kill in the middle of a line
    # Another question, seed or system makes another evaluation; a different batch size does not.
    other = [*command, "--limit", "6"]
    assert "unfinished evaluation with limit = nothing, not 6" in refusal(
        capsys, *other, "--out", str(tmp_path / "cut")
    )
    asked: list[int] = []
    run = Rollout.run

    def counted(self: Rollout, jobs: Any, *more: Any, **options: Any) -> Any:
        asked.append(len(jobs))
        return run(self, jobs, *more, **options)

    monkeypatch.setattr(Rollout, "run", counted)
    wider = [*command, "--set", "rollout.max_num_seqs=2"]
    assert cli.run([*wider, "--out", str(tmp_path / "cut")]) == 0
    assert asked == [3]  # the remaining questions, none twice
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


def test_an_interrupt_after_the_end_deletes_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), EvalFolder.open(tmp_path / "out", {"seed": 1}) as folder:
        folder.append([])
        folder.finish([], "table", {"em": 1.0})
        raise KeyboardInterrupt
    assert read_object(tmp_path / "out" / "metrics.json")["em"] == 1.0


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


# judges


class Chat:
    """A chat model that accepts only the first question's answer, and fails at a call if told to."""

    name = "verdict of a stub"

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]:
        if self.fails:
            raise UserError("http://judge: stayed away for 300 s")
        return [place == 0 for place in range(len(cases))]


def test_a_judge_that_fails_costs_no_trajectory_and_scores_none(
    searching: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, script: Any
) -> None:
    script({number: texts if number in (2, 5) else [EOS] * 6 for number, texts in SAID.items()})
    chat = Chat(fails=True)
    monkeypatch.setattr(assemble, "load_verdicts", lambda section, keys, say: chat)
    command = [*searching, "--judge-url", "http://judge", "--judge-model", "stub", "--out", str(tmp_path / "out")]
    message = refusal(capsys, *command)
    assert "stayed away" in message and "the same command goes on from there" in message
    assert not (tmp_path / "out" / "metrics.json").exists()
    assert not (tmp_path / "out" / "trajectories.jsonl").exists()
    chat.fails = False
    monkeypatch.setattr(Rollout, "run", lambda *_, **__: pytest.fail("generated again"))
    assert cli.run(command) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    records = stored(tmp_path / "out" / "trajectories.jsonl")
    assert [number for number, record in enumerate(records) if record["answer"]] == [2, 5]
    assert metrics["verdict"] == pytest.approx(1 / 7) and metrics["verdict_judge"] == "verdict of a stub"
    assert [record["measures"]["verdict"] for record in records] == [0, 0, 1, 0, 0, 0, 0]
    assert "- Answers judged by: verdict of a stub" in (tmp_path / "out" / "table.md").read_text()


def test_arena_is_evaluated_though_nobody_knows_the_gold_passages_and_says_so(
    searching: list[str], asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.with_name("prompt.txt").write_text("{passages} " + PROMPT)
    command = ["arena" if word == "search_r1" else word for word in searching]
    assert cli.run([*command, "--out", str(tmp_path / "out")]) == 0
    assert f"{asked}: 7 of 7 questions do not say which of their passages are gold" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["parts"]["relevance"] == 0


def test_an_evaluation_does_not_go_on_with_a_system_file_that_changed(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("one = 1\n")
    recipe = from_dict(Recipe, {"model": {"path": "m"}, "system": {"name": str(own)}}, "test")
    with EvalFolder.open(tmp_path / "out", settings_of(recipe, EvalOptions(), "q", [])):
        pass
    EvalFolder.check(tmp_path / "out", settings_of(recipe, EvalOptions(), "q", []))
    own.write_text("one = 2\n")
    with pytest.raises(UserError, match="unfinished evaluation with the system file's content ="):
        EvalFolder.check(tmp_path / "out", settings_of(recipe, EvalOptions(), "q", []))


def test_an_evaluation_does_not_go_on_with_another_prompt(
    searching: list[str], asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    command = [*searching, "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        cut_after(1, patch)
        assert cli.run(command) == 130
    template, settings = asked.with_name("prompt.txt"), tmp_path / "out" / "settings.json"
    template.write_text("Please. " + template.read_text())
    assert cli.run(command) == 2
    assert "unfinished evaluation with the template's content =" in capsys.readouterr().err
    # The content of other files that a prompt is made of is in no setting, and the prompts differ all the same.
    kept = json.loads(settings.read_text())
    kept["the template's content"] = text_digest(template)
    settings.write_text(json.dumps(kept))
    assert cli.run(command) == 2
    assert "out: the prompt of question q0 is now another" in capsys.readouterr().err


def test_an_evaluation_does_not_go_on_with_other_weights_or_another_index_in_their_place(
    tiny_model_folder: Path, tiny_index_folder: Path, tmp_path: Path
) -> None:
    model, index = reweighted(tiny_model_folder, tmp_path / "m", by=0.0), tmp_path / "index"
    shutil.copytree(tiny_index_folder, index)
    tables = {"model": {"path": str(model)}, "retrieval": {"index": str(index)}, "system": {"name": "search_r1"}}
    recipe = from_dict(Recipe, tables, "test")

    def check() -> None:
        EvalFolder.check(tmp_path / "out", settings_of(recipe, EvalOptions(), "q", []))

    with EvalFolder.open(tmp_path / "out", settings_of(recipe, EvalOptions(), "q", [])):
        pass
    check()
    whole = (index / "manifest.json").read_text()
    (index / "manifest.json").write_text(whole + "\n")
    with pytest.raises(UserError, match="unfinished evaluation with the index's content ="):
        check()
    (index / "manifest.json").write_text(whole)
    reweighted(tiny_model_folder, model)
    with pytest.raises(UserError, match="unfinished evaluation with the model's content ="):
        check()


def test_a_judge_that_cannot_be_had_leaves_no_folder(searching: list[str], tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "out")]
    url = ["--judge-url", "http://127.0.0.1:1", "--judge-model", "m"]
    key = ["--set", "judge.key_env=NO_SUCH_KEY_HERE"]
    assert "allow it, if that is what you want, with --allow-key NO_SUCH_KEY_HERE@127.0.0.1:1" in refusal(
        capsys, *searching, *url, *key, *out
    )
    allowed = ["--allow-key", "NO_SUCH_KEY_HERE@127.0.0.1:1"]
    assert "is not set" in refusal(capsys, *searching, *url, *key, *allowed, *out)
    assert "[judge] model" in refusal(capsys, *searching, *url[:2], *out)
    evinote = ["evinote" if word == "search_r1" else word for word in searching]
    assert "nowhere" in refusal(capsys, *evinote, "--entailment", str(tmp_path / "nowhere"), *out)
    assert not (tmp_path / "out").exists()
    # A server that cannot be reached is noticed later, and no generated trajectory is lost.
    assert "the same command goes on" in refusal(capsys, *searching, *url, "--set", "judge.retry_seconds=0", *out)
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
    assert [record["step"] for record in evaluations_by_dev(records)] == [20, 30, 10, 0]
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
        assert (best.path, best.step, best.metric, best.value, best.lost) == (model, 0, "em", 0.1, 20)
        (run.checkpoints / "step_000030").mkdir()
        assert best_checkpoint(tmp_path / "run").step == 30
        (run.checkpoints / "step_000020").mkdir()
        best = best_checkpoint(tmp_path / "run")
        assert (best.path, best.step, best.lost) == (run.checkpoints / "step_000020", 20, None)
    recipe = recipe_from("--best-of", str(tmp_path / "run"))
    assert recipe.model.path == str(best.path) and recipe.system and recipe.system.name == "arena"
    with pytest.raises(UserError, match="is not a run folder"):
        best_checkpoint(model)


def damages(line: str) -> list[str]:
    """Return a line of generated.jsonl, damaged in each of its values and keys, as by a flipped bit or an edit."""
    found = [line[: len(line) // 2], line.replace('"policy"', '"nobody"'), "[]", "null", line[:-1], "{}"]

    def walk(value: Any, put: Any) -> None:
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in list(children):
            for bad in (None, "x", -7, 10**30, float("nan"), [None], {"x": 1}, True):
                if type(bad) is not type(child) or bad != bad or isinstance(child, int):
                    value[key] = bad
                    found.append(put())
            value[key] = child
            walk(child, put)
        if isinstance(value, dict):
            for key in list(value):
                child = value.pop(key)
                found.append(put())
                value[key] = child

    record = json.loads(line)
    walk(record, lambda: json.dumps(record))
    return found


@pytest.mark.slow
def test_a_damaged_line_ends_in_a_sentence_or_in_a_whole_trajectory(
    searching: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_tokenizer: Tokenizer,
    tiny_questions: list[Question],
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        cut_after(1, patch)
        assert cli.run([*searching, "--out", str(out)]) == 130
    kept = out / "generated.jsonl"
    first, *rest = kept.read_text().splitlines()
    system, refused = load_system("search_r1", {}), 0
    rollout: Any = SimpleNamespace(tokenizer=tiny_tokenizer, system=system, limits=SimpleNamespace(max_context=4096))
    bare = json.dumps({key: value for key, value in json.loads(first).items() if key != "checksum"})
    many = damages(bare)  # as an earlier version wrote it; lines written now have a checksum

    def read(line: str) -> Generated:
        kept.write_text(line + "\n")
        ((number, record),) = RecordLog(kept).recover()
        return read_generated(record, f"{kept}:{number}")

    whole = read(first)
    assert read(bare) == read(json.dumps(json.loads(bare) | {"check": "0123456789abcdef"})) == whole
    for damaged in damages(first):
        try:
            assert read(damaged) == whole
        except UserError as error:
            assert str(error).startswith(f"{kept}:1: "), error
    for damaged in many:
        try:
            entry = read(damaged)
            check_generated([entry], rollout, kept)
            scored = score(tiny_questions[:1], [entry.trajectory], system, tiny_tokenizer)
            assert measures_of(scored[0], system.tags)["searches"] >= 0
        except UserError as error:
            assert str(error).startswith(f"{kept}:1: "), error
            refused += 1
    assert refused > 0.6 * len(many)
    kept.write_text("\n".join([first, rest[0].replace('"ids"', '"idx"')]) + "\n")
    with (
        pytest.raises(UserError, match=rf"^{kept}:2: does not follow from .*; delete this line and those after"),
        EvalFolder.open(out, json.loads((out / "settings.json").read_text())) as folder,
    ):
        folder.generated()
    assert kept.exists(), "an evaluation that cannot go on is not deleted"
