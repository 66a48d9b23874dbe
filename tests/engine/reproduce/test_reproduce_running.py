"""`thresher reproduce` as it runs: killed, beside another process, in a folder with a past, and refused. Here a command
writes what the real one writes last."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from thresher.common.errors import UserError
from thresher.engine.reproduce import run
from thresher.engine.reproduce.manifest import read_manifest
from thresher.engine.reproduce.pipelines import ExperimentRun, Scale, experiment_runs
from thresher.engine.reproduce.run import check_folder, locked, reproduce


class Killed(Exception):
    pass


def test_killed_at_every_command_it_goes_on_and_does_nothing_twice(
    tmp_path: Path, run_command: Callable[[list[str]], None]
) -> None:
    ran: list[str] = []

    def killed(words: list[str]) -> None:
        ran.append(f"{words[0]} {words[words.index('--out') + 1]}")
        run_command(words)
        raise Killed

    for _ in range(30):
        try:
            found = reproduce("eval_rar", ["T2"], Scale("world", (0, 1)), tmp_path, killed)
            break
        except Killed:
            continue
    assert (
        len(ran) == len(set(ran)) == 2 + 2 * 3 + 2 * 2 * 2
    )  # world; two bases; two methods, two seeds, train and eval
    with_reward, without = found["T2"]["rows"]
    found_em = with_reward["ours"]["em"]["nq"]
    assert [found_em[key] for key in ("mean", "deviation", "seeds", "questions")] == [1.0, 0.0, [1.0, 1.0], 10]
    assert (found_em["difference"], found_em["differences"]) == (0.5, [0.5, 0.5])
    assert (found_em["p"], found_em["test"]) == (pytest.approx(2 / 2**5), "exact sign test")
    assert found_em["low"] <= 0.5 <= found_em["high"]
    assert without["ours"]["em"]["hotpotqa"]["mean"] == 0.0 and "p" not in without["ours"]["em"]["hotpotqa"]
    page = (tmp_path / "eval_rar-T2.md").read_text()
    assert "\nSeeds: 2.\n" in page
    assert "| Eval-RAR (base) | .471 | 1.000 ± .000 | 0.062 | .412 | .000 ± .000 | 1 |" in page
    assert json.loads((tmp_path / "eval_rar-T2.json").read_text()) == found["T2"]


def test_what_another_process_makes_is_waited_for_while_there_is_other_work(
    tmp_path: Path, run_command: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WAIT", 0.0)
    first, *_ = experiment_runs(
        read_manifest("eval_rar"), read_manifest("eval_rar").tables["T2"], Scale("world"), tmp_path
    )
    training = first.before[-1]
    ran: list[str] = []
    other = ExitStack()
    assert other.enter_context(locked(training, tmp_path))

    def noting(words: list[str]) -> None:
        ran.append(words[words.index("--out") + 1])
        run_command(words)
        if len(ran) == 5 + 2:  # all but what waits for the other process: the base, the other row
            run_command(list(training.words))
            other.close()

    found = reproduce("eval_rar", ["T2"], Scale("world"), tmp_path, noting)
    assert str(training.folder) not in ran and len(ran) == 5 + 2 + 1  # the base; a training; two evaluations
    assert [row["ours"]["em"]["nq"]["mean"] for row in found["T2"]["rows"]] == [1.0, 0.5]


def test_what_another_command_made_is_not_taken_for_its_own(
    tmp_path: Path, run_command: Callable[[list[str]], None]
) -> None:
    reproduce("eval_rar", ["T2"], Scale("world"), tmp_path, run_command)
    ran: list[list[str]] = []
    reproduce("eval_rar", ["T2"], Scale("world", (0, 1)), tmp_path, ran.append)
    assert ran and not any("seed0" in word for words in ran for word in words)
    changed = Scale("world", overrides=("grpo.beta=0.1",))
    expected = r"runs/eval_rar-seed0: was made with less, where now there is grpo\.beta=0\.1; choose another --out"
    with pytest.raises(UserError, match=expected):
        reproduce("eval_rar", ["T2"], changed, tmp_path, run_command)


def test_a_folder_is_itself_however_it_is_spelled_and_a_recipe_that_changed_is_named(
    tmp_path: Path, run_command: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reproduce("eval_rar", ["T2"], Scale("world"), Path("out"), run_command)
    ran: list[list[str]] = []
    reproduce("eval_rar", ["T2"], Scale("world"), tmp_path / "out", ran.append)
    assert not ran
    monkeypatch.setattr(run, "_keys", lambda recipe: "other")
    with pytest.raises(UserError, match=r"world/recite0: was made when recipes/world/base\.toml had other keys"):
        reproduce("eval_rar", ["T2"], Scale("world"), tmp_path / "out", ran.append)


def test_a_record_that_is_none_is_reported_and_overrides_have_no_order(
    tmp_path: Path, run_command: Callable[[list[str]], None]
) -> None:
    first, again = (
        Scale("world", overrides=texts) for texts in (("run.steps=2", "optim.lr=1"), ("optim.lr=1", "run.steps=2"))
    )
    reproduce("eval_rar", ["T2"], first, tmp_path, run_command)
    reproduce("eval_rar", ["T2"], again, tmp_path, run_command)
    later = Scale("world", overrides=("run.steps=2", "optim.lr=1", "optim.lr=2"))
    with pytest.raises(UserError, match=r"made with optim\.lr=1, where now there is optim\.lr=2;"):
        reproduce("eval_rar", ["T2"], later, tmp_path, run_command)
    record = tmp_path / "commands" / "runs-eval_rar-seed0" / "command.json"
    record.write_text('{"words": null}')
    with pytest.raises(UserError, match=r"command\.json: expected the words of a command; delete it"):
        reproduce("eval_rar", ["T2"], again, tmp_path, run_command)


def test_behind_an_extraction_that_was_refused_nothing_of_its_column_runs(
    tmp_path: Path, run_command: Callable[[list[str]], None]
) -> None:
    ran: list[str] = []

    def refusing(words: list[str]) -> None:
        ran.append(words[0])
        if words[0] == "extract":
            raise OSError("no space left on device")
        run_command(words)

    with pytest.raises(UserError, match=r"thresher extract .* was refused \(OSError: no space left"):
        reproduce("eviomni", ["own"], Scale("world"), tmp_path, refusing)
    assert ran.count("extract") == 1 and ran.count("eval") == 1  # own answers alone


def test_an_override_that_nothing_reads_is_named_and_in_no_table(
    tmp_path: Path, run_command: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    found = reproduce(
        "eval_rar", ["T2"], Scale("world", overrides=("run.steps=2", "sft.batch=2")), tmp_path, run_command
    )
    assert found["T2"]["overrides"] == ["run.steps=2"]
    assert "nothing that these tables run reads --set sft.batch=2" in capsys.readouterr().out


def test_what_is_refused_is_said_and_the_rest_runs(
    tmp_path: Path, run_command: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(words: list[str]) -> None:
        if words[0] == "train" and any("without_evaluation" in word for word in words):
            raise UserError("no model asks: name one")
        run_command(words)

    with pytest.raises(
        UserError, match=r"thresher train .*recipe\.toml .. was refused \(no model asks: name one\); mend"
    ):
        reproduce("eval_rar", ["T2"], Scale("world"), tmp_path, refusing)
    assert "left out, for no model asks" in capsys.readouterr().out
    with pytest.raises(UserError, match="runs/eval_rar-seed0: was made with less"):  # and not what was refused
        reproduce("eval_rar", ["T2"], Scale("world", overrides=("judge.url=http://x",)), tmp_path, refusing)
    manifest = read_manifest("eval_rar")
    (_, cell) = experiment_runs(manifest, manifest.tables["T2"], Scale("world", overrides=("judge.url=x",)), tmp_path)
    assert (tmp_path / "commands" / "runs-without_evaluation-seed0").is_dir()
    check_folder([ExperimentRun(cell.row, cell.seed, cell.before)], tmp_path)
    with_reward, without = json.loads((tmp_path / "eval_rar-T2.json").read_text())["rows"]
    assert with_reward["ours"]["em"]["nq"]["mean"] == 1.0 and "em" not in without["ours"]
    said = (tmp_path / "eval_rar-T2.md").read_text()
    assert said.endswith("\n- w/o evaluation reward (base): refused, no model asks: name one\n")


def test_a_chain_shares_its_stages_survives_kills_and_is_measured_as_one(
    tmp_path: Path, run_command: Callable[[list[str]], None]
) -> None:
    """A training whose evidence a generator reads, and its own answers; and of T3 six trainings with one generator."""
    ran: list[tuple[str, str]] = []

    def killed(words: list[str]) -> None:
        ran.append((words[0], " ".join(words)))
        run_command(words)
        raise Killed

    for _ in range(20):
        try:
            found = reproduce("eviomni", ["own"], Scale("world"), tmp_path, killed)
            break
        except Killed:
            continue
    names = [name for name, _ in ran]
    assert names[5:] == ["train", "sft", "extract", "eval", "eval"] and len(names) == 10  # behind the base's five
    manifest = read_manifest("eviomni")
    cells = experiment_runs(manifest, manifest.tables["T3"], Scale("world"), tmp_path)
    shared = dict.fromkeys(" ".join(command.words) for cell in cells for command in cell.before)
    assert len(shared) == 5 + 6 + 1 and set(shared) >= {line for name, line in ran if name in ("train", "sft")}
    generator = next(line for name, line in ran if "tunings/generator" in line and name == "sft")
    reading = next(line for name, line in ran if name == "eval" and "--baseline evidence" in line)
    prompt = f"{tmp_path / 'world' / 'qa.txt'}"
    assert f"sft.template={prompt}" in generator and f"system.template={prompt}" in reading
    evidence = tmp_path / "evidence" / "eviomni-seed0.jsonl"
    assert f"system.options.file={evidence}" in reading and f"--out {evidence}" in " ".join(line for _, line in ran)
    ours = found["own"]["rows"][0]["ours"]  # answers of the generator, compression of the extraction
    assert ours["em"]["nq"]["mean"] == 1.0 and ours["compression"]["hotpotqa"]["mean"] == 4.0
