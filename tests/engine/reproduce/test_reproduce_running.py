"""`thresher reproduce` as it runs: killed, next to another process, in a folder with earlier output, and refused. A
command here writes only the last file of the real one."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thresher.common import locks
from thresher.common.errors import UserError
from thresher.engine.reproduce import run
from thresher.engine.reproduce.manifest import ServedModel, read_manifest
from thresher.engine.reproduce.pipelines import Command, ExperimentRun, Scale, experiment_runs
from thresher.engine.reproduce.run import check_folder, locked, reproduce
from thresher.engine.world.stages import RECIPES

Run = Callable[[list[str]], None]


class Killed(Exception):
    pass


def table(out: Path, run_command: Run, *, seeds: Sequence[int] = (0,), overrides: Sequence[str] = ()) -> Any:
    """Reproduce Eval-RAR's T2 in the invented world."""
    return reproduce("eval_rar", ["T2"], Scale("world", seeds, tuple(overrides)), out, run_command)["T2"]


def killed_until_done(paper: str, name: str, scale: Scale, out: Path, run_command: Run) -> tuple[Any, list[list[str]]]:
    """Kill the process after every command and start it again; return the table and the commands that ran."""
    ran: list[list[str]] = []

    def killed(words: list[str]) -> None:
        ran.append(words)
        run_command(words)
        raise Killed

    for _ in range(30):
        try:
            return reproduce(paper, [name], scale, out, killed)[name], ran
        except Killed:
            continue
    raise AssertionError("it never ends")


def test_killed_at_every_command_it_goes_on_and_does_nothing_twice(tmp_path: Path, run_command: Run) -> None:
    found, ran = killed_until_done("eval_rar", "T2", Scale("world", (0, 1)), tmp_path, run_command)
    # The world; two bases; a training and an evaluation for each of two methods and two seeds.
    assert len(ran) == len({words[words.index("--out") + 1] for words in ran}) == 2 + 2 * 3 + 2 * 2 * 2
    with_reward, without = found["rows"]
    found_em = with_reward["ours"]["em"]["nq"]
    assert [found_em[key] for key in ("mean", "deviation", "seeds", "questions")] == [1.0, 0.0, [1.0, 1.0], 10]
    assert (found_em["difference"], found_em["differences"]) == (0.5, [0.5, 0.5])
    assert (found_em["p"], found_em["test"]) == (0.5, "exact sign test over seeds")  # both of two patterns of one sign
    assert found_em["low"] == found_em["high"] == 0.5
    assert without["ours"]["em"]["hotpotqa"]["mean"] == 0.0 and "p" not in without["ours"]["em"]["hotpotqa"]
    page = (tmp_path / "eval_rar-T2.md").read_text()
    assert "\nSeeds: 2.\n" in page
    assert "| Eval-RAR (base) | .471 | 1.000 ± .000 | 0.5 | .412 | .000 ± .000 | 1 |" in page
    assert "a sign flip test over 2 seeds in pairs; with 2 seeds no p is below 0.5.\n" in page and "†" not in page
    assert json.loads((tmp_path / "eval_rar-T2.json").read_text()) == found


def test_what_another_process_makes_is_waited_for_while_there_is_other_work(
    tmp_path: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT", 0.0)
    manifest = read_manifest("eval_rar")
    training = experiment_runs(manifest, manifest.tables["T2"], Scale("world"), tmp_path)[0].before[-1]
    ran: list[str] = []
    other = ExitStack()
    assert other.enter_context(locked(training, tmp_path))

    def noting(words: list[str]) -> None:
        ran.append(words[words.index("--out") + 1])
        run_command(words)
        if len(ran) == 5 + 2:  # all commands that need not wait for the other process: the base, the other row
            run_command(list(training.words))
            other.close()

    found = table(tmp_path, noting)
    assert str(training.folder) not in ran and len(ran) == 5 + 2 + 1  # the base; one training; two evaluations
    assert [row["ours"]["em"]["nq"]["mean"] for row in found["rows"]] == [1.0, 0.5]


def test_an_output_belongs_to_its_command_and_recipe(
    tmp_path: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, ran = tmp_path / "runs", list[list[str]]()  # also the name of a folder in it
    table(Path("runs"), run_command)
    table(out, ran.append)
    assert not ran  # the folder is the same however it is written
    table(out, ran.append, seeds=(0, 1))
    assert ran and not any("seed0" in word for words in ran for word in words)

    def refused(problem: str, *overrides: str) -> None:
        with pytest.raises(UserError, match=problem):
            table(out, run_command, overrides=overrides)

    refused(
        r"runs/eval_rar-seed0: was made with less, but now there is grpo\.beta=0\.1; choose another --out",
        "grpo.beta=0.1",
    )
    ran.clear()
    for wrong, problem in (
        ("run.bogus=3", r"--set run\.bogus: unknown key"),
        ("run.steps=abc", r"--set run\.steps: expected"),
        ("bogus", "--set bogus: expected"),
        ("grop.beta=1", r"--set grop\.beta: unknown key; did you mean grpo"),
    ):
        with pytest.raises(UserError, match=problem):
            table(out.with_name("new"), ran.append, overrides=(wrong,))
    assert not ran and not out.with_name("new").exists(), "it is refused before anything runs"
    # A system's preset makes two updates per batch, which the guard needs.
    words = ["train", str(RECIPES / "search_r1" / "laptop.toml"), "--set", "grpo.guard=llds"]
    command = Command(tuple(words), tmp_path / "one")
    run._check_overrides([SimpleNamespace(every=lambda: [command])])  # type: ignore[list-item]
    assert run._keyed(["eval", "--limit", "5", "--quiet", "--n", "2"]) == {
        "eval": "",
        "--limit": "5",
        "--quiet": "",
        "--n": "2",
    }
    assert run._keyed(["--a", "1", "--b", "2"]) != run._keyed(["--a", "2", "--b", "1"])
    (out / "commands" / "runs-eval_rar-seed0" / "command.json").write_text('{"words": null}')
    refused(r"command\.json: expected the words of a command; delete it")
    monkeypatch.setattr(run, "_keys", lambda recipe: "other")
    refused(r"world/recite0: was made when recipes/world/base\.toml had other keys")


@pytest.mark.parametrize("finished", [True, False])
def test_what_another_process_makes_meanwhile_with_other_flags_is_refused(
    finished: bool, tmp_path: Path, run_command: Run
) -> None:
    manifest = read_manifest("eval_rar")
    scale = Scale("world", overrides=("grpo.beta=0.1",))
    training = experiment_runs(manifest, manifest.tables["T2"], scale, tmp_path)[0].before[-1]
    ran: list[list[str]] = []

    def beside_another(words: list[str]) -> None:
        ran.append(words)
        run_command(words)
        if len(ran) == 1:  # the world, which both share
            with locked(training, tmp_path):
                run_command(list(training.words)) if finished else training.folder.mkdir(parents=True)

    with pytest.raises(UserError, match=r"runs/eval_rar-seed0: was made with grpo\.beta=0\.1, but now there is less"):
        table(tmp_path, beside_another)
    assert all(words[0] not in ("train", "eval") for words in ran) and not (tmp_path / "eval_rar-T2.md").exists()
    record = json.loads((tmp_path / "commands" / "runs-eval_rar-seed0" / "command.json").read_text())
    assert "grpo.beta=0.1" in record["words"]
    own = experiment_runs(manifest, manifest.tables["T2"], Scale("world"), tmp_path)[0].before[-1]
    with pytest.raises(UserError, match="was made with"), locked(own, tmp_path):
        pass


def test_a_table_has_no_output_of_other_flags_by_a_command_that_this_process_cannot_run(
    tmp_path: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the other process has the address of GPT-4o."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/hotpotqa_dev500.jsonl").write_text("{}")
    manifest, out = read_manifest("arena"), Path("out")
    served = {name: ServedModel("http://h:1", name) for name in ("gpt-4o", "deepseek-r1")}
    other = Scale("paper", overrides=("judge.model=m",), servers=served)
    answering = experiment_runs(manifest, manifest.tables["T5"], other, out)[0].columns["hotpotqa"][0]

    def beside_another(words: list[str]) -> None:
        run_command(words)
        with locked(answering, out):
            run_command(list(answering.words))

    own = Scale("paper", servers={"deepseek-r1": served["deepseek-r1"]})
    with pytest.raises(UserError, match=r"gpt_4o-hotpotqa-seed0: was made with --set judge\.model=m, but now"):
        reproduce("arena", ["T5"], own, out, beside_another)


def test_overrides_have_no_order_and_those_that_nothing_reads_are_named(
    tmp_path: Path, run_command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ["run.steps=2", "optim.lr=1"]
    found = table(tmp_path, run_command, overrides=[*two, "sft.batch=2"])
    assert found["overrides"] == two
    assert "nothing that these tables run reads --set sft.batch=2" in capsys.readouterr().out
    table(tmp_path, run_command, overrides=two[::-1])
    with pytest.raises(UserError, match=r"made with optim\.lr=1, but now there is optim\.lr=2;"):
        table(tmp_path, run_command, overrides=[*two, "optim.lr=2"])


def test_behind_an_extraction_that_was_refused_nothing_of_its_column_runs(tmp_path: Path, run_command: Run) -> None:
    ran: list[str] = []

    def refusing(words: list[str]) -> None:
        ran.append(words[0])
        if words[0] == "extract":
            raise OSError("no space left on device")
        run_command(words)

    with pytest.raises(UserError, match=r"thresher extract .* was refused \(OSError: no space left"):
        reproduce("eviomni", ["own"], Scale("world"), tmp_path, refusing)
    assert ran.count("extract") == 1 and ran.count("eval") == 1  # only the own answers


def test_what_is_refused_is_said_and_the_rest_runs(
    tmp_path: Path, run_command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(words: list[str]) -> None:
        if words[0] == "train" and any("without_evaluation" in word for word in words):
            raise UserError("no model asks: name one")
        run_command(words)

    said = r"thresher train .*recipe\.toml .. was refused \(no model asks: name one\); fix"
    with pytest.raises(UserError, match=said):
        table(tmp_path, refusing)
    assert "left out: no model asks" in capsys.readouterr().out
    with pytest.raises(UserError, match="runs/eval_rar-seed0: was made with less"):  # and not what was refused
        table(tmp_path, refusing, overrides=["judge.url=http://x", "judge.model=m"])
    manifest = read_manifest("eval_rar")
    other = Scale("world", overrides=("judge.url=x", "judge.model=m"))
    (_, cell) = experiment_runs(manifest, manifest.tables["T2"], other, tmp_path)
    assert (tmp_path / "commands" / "runs-without_evaluation-seed0").is_dir()
    check_folder([ExperimentRun(cell.row, cell.seed, cell.before)], tmp_path)
    with_reward, without = json.loads((tmp_path / "eval_rar-T2.json").read_text())["rows"]
    assert with_reward["ours"]["em"]["nq"]["mean"] == 1.0 and "em" not in without["ours"]
    page = (tmp_path / "eval_rar-T2.md").read_text()
    assert page.endswith("\n- w/o evaluation reward (base): refused, no model asks: name one\n")


def test_a_chain_shares_its_stages_survives_kills_and_is_measured_as_one(tmp_path: Path, run_command: Run) -> None:
    """A training whose evidence a generator reads, and its own answers; for T3 six trainings with one generator."""
    found, ran = killed_until_done("eviomni", "own", Scale("world"), tmp_path, run_command)
    lines = [" ".join(words) for words in ran]
    # After the base's five commands.
    assert [words[0] for words in ran[5:]] == ["train", "sft", "extract", "eval", "eval"] and len(ran) == 10
    manifest = read_manifest("eviomni")
    cells = experiment_runs(manifest, manifest.tables["T3"], Scale("world"), tmp_path)
    shared = dict.fromkeys(" ".join(command.words) for cell in cells for command in cell.before)
    assert len(shared) == 5 + 6 + 1 and set(shared) >= {line for line in lines if line.startswith(("train", "sft"))}
    generator = next(line for line in lines if "tunings/generator" in line and line.startswith("sft"))
    reading = next(line for line in lines if "--baseline evidence" in line)
    prompt, evidence = tmp_path / "world" / "qa.txt", tmp_path / "evidence" / "eviomni-seed0.jsonl"
    assert f"sft.data={tmp_path}/world/data/given_warmup.jsonl" in generator and "sft.steps=1500" in generator
    assert f"sft.template={prompt}" in generator and f"system.template={prompt}" in reading
    assert f"system.options.file={evidence}" in reading and any(line.endswith(f"--out {evidence}") for line in lines)
    ours = found["rows"][0]["ours"]  # answers of the generator, compression of the extraction
    assert ours["em"]["nq"]["mean"] == 1.0 and ours["compression"]["hotpotqa"]["mean"] == 4.0
