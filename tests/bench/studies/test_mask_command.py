"""`thresher study mask`: on a scripted batch, on a run, and on one that cannot be studied."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_cases import stored

from thresher.bench.studies import mask
from thresher.bench.studies.mask import TREATMENTS
from thresher.cli import main as cli
from thresher.common.records import write_records
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.training.train import train
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of two points and one repeat."""
    monkeypatch.setattr(mask, "SHARES", (0.4, 0.8))
    monkeypatch.setattr(mask, "SWEEP_REPEATS", 1)


def check_folder(out: Path) -> dict[str, Any]:
    assert sorted(path.name for path in out.iterdir()) == ["mask.json", "mask.png"]
    assert (out / "mask.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    figures: dict[str, Any] = json.loads((out / "mask.json").read_text())
    treatments = figures["treatments"]
    assert list(treatments) == list(TREATMENTS)
    tokens = figures["batch"]["tokens"]
    assert treatments["masked"]["rows"] == treatments["removed"]["rows"] == tokens["policy"]
    assert treatments["in_loss"]["rows"] == treatments["zeroed"]["rows"] == tokens["policy"] + tokens["retrieved"]
    assert treatments["masked"]["tokens"] - treatments["removed"]["tokens"] == tokens["retrieved"]
    assert treatments["zeroed"]["gradient"]["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert treatments["in_loss"]["head_at_once_mib"] > treatments["masked"]["head_at_once_mib"] > 0
    assert treatments["masked"]["step_mib"] > treatments["masked"]["head_mib"] > 0
    assert treatments["in_loss"]["kinds"]["retrieved"]["push"] > 0.01
    assert figures["poison_changes_nothing"] is True
    assert [round(point["retrieved_share"], 1) for point in figures["sweep"]] == [0.4, 0.8]
    return figures


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_the_command_on_a_scripted_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["study", "mask", "--limit", "6", "--repeats", "1", "--seed", "3", "--out", str(tmp_path / "out")]
    assert cli.run(arguments) == 0
    check_folder(tmp_path / "out")
    printed = capsys.readouterr().out
    assert "rows at the head" in printed and "keep every bit" in printed
    assert cli.run(arguments) == 2
    assert (
        capsys.readouterr().err == f"thresher: {tmp_path / 'out'}: exists already; choose another folder with --out\n"
    )


@pytest.mark.slow
def test_a_scripted_batch_is_a_function_of_its_seed() -> None:
    one, again, other = (mask.scripted(seed, 4, "cpu") for seed in (1, 1, 2))
    assert one.trajectories == again.trajectories != other.trajectories
    assert torch.equal(one.policy.embed_VH, again.policy.embed_VH)
    assert one.advantages == [-1.0, 1.0, -1.0, 1.0]


@pytest.fixture(scope="module")
def run_folder(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_policy: Callable[..., Policy],
    tiny_tokenizer: Tokenizer,
    tiny_index_folder: Path,
    tiny_questions: list[Question],
) -> Path:
    """Train two steps, and write advantages into the last, for every other group: what a policy says may earn none."""
    folder = tmp_path_factory.mktemp("study")
    make_tiny_policy().save(folder / "model")
    tiny_tokenizer.save(folder / "model")
    (folder / "prompt.txt").write_text("<search> or <answer>: {question}\n")
    records = [
        {"id": q.id, "question": q.question, "golden_answers": ["Anna Bell", "Eva Frost"]} for q in tiny_questions
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tables = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "retrieval": {"index": str(tiny_index_folder), "k": 2, "passage_format": "{text}"},
        "system": {"name": "eval_rar", "template": str(folder / "prompt.txt")},
        "rollout": {
            "group_size": 4,
            "questions_per_step": 6,
            "max_turns": 3,
            "max_turn_tokens": 40,
            "max_context": 240,
            "max_passage_tokens": 40,
        },
        "grpo": {"beta": 0.0, "drop_zero_advantage": True},
        "optim": {"lr": 1e-3, "micro_batch_tokens": 800},
        "run": {"steps": 2, "save_every": 2},
    }
    train(from_dict(Recipe, tables, "test"), folder / "grpo")
    path = folder / "grpo/trajectories/step_000002.jsonl"
    records = stored(path)
    for record in records:
        record["advantage"] = record["group"] % 2 * (record["sample"] - 1.5)
    write_records(path, records)
    return folder


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_the_command_on_a_run(run_folder: Path, tmp_path: Path) -> None:
    """Named by the folder around it, as `thresher demo` leaves it."""
    common = ["study", "mask", "--limit", "10", "--repeats", "1", "--run"]
    assert cli.run([*common, str(run_folder), "--out", str(tmp_path / "a")]) == 0
    figures = check_folder(tmp_path / "a")
    assert figures["batch"]["trajectories"] == 10
    assert figures["batch"]["from"] == f"step 2 of {run_folder / 'grpo'}, weights of step 2"


def test_a_run_s_trajectories_come_with_their_signal_first(run_folder: Path) -> None:
    lines = stored(run_folder / "grpo/trajectories/step_000002.jsonl")
    subject = mask.stored(run_folder / "grpo", 1000, "cpu")
    assert len(subject.trajectories) == len(lines) == 24
    by_place = {(line["group"], line["sample"]): line for line in lines}
    signal = []
    for trajectory, advantage in zip(subject.trajectories, subject.advantages, strict=True):
        line = by_place[trajectory.group, trajectory.sample]
        assert trajectory.ids() == [token for part in line["segments"] for token in part["ids"]]
        assert advantage == line["advantage"]
        signal.append(any(other["advantage"] for other in lines if other["group"] == trajectory.group))
    assert signal == [True] * 12 + [False] * 12


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes every stored trajectory of the last step."""

    def apply(run: Path) -> None:
        path = run / "trajectories" / "step_000002.jsonl"
        records = stored(path)
        for record in records:
            change(record)
        write_records(path, records)

    return apply


def remove(pattern: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        for path in sorted(run.glob(pattern), reverse=True):
            path.unlink()

    return apply


def keep_no_passage(record: dict[str, Any]) -> None:
    record["segments"] = [part for part in record["segments"] if part["source"] != "retrieved"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (remove("recipe.toml"), "is not a run folder (it has no recipe.toml)"),
        (remove("checkpoints/*/state.json"), "checkpoints: holds no checkpoint"),
        (remove("trajectories/*"), "trajectories: holds no trajectories; train with run.keep_trajectories=1"),
        (rewrite(lambda record: record.pop("advantage")), "step_000002.jsonl:1: expected a trajectory as training"),
        (rewrite(lambda record: record.update(advantage=0.0)), "no trajectory has an advantage"),
        (rewrite(lambda record: record["segments"].pop(0)), "step_000002.jsonl:1: expected ids below"),
        (rewrite(lambda record: record["segments"][0]["ids"].append(10**6)), "jsonl:1: expected ids below"),
        (rewrite(keep_no_passage), "nothing in it was retrieved"),
    ],
)
@pytest.mark.filterwarnings("ignore:checkpoint passed over")
def test_a_run_that_cannot_be_studied(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    sentence: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder / "grpo", run)
    damage(run)
    capsys.readouterr()
    assert cli.run(["study", "mask", "--run", str(run), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"thresher: {run}") and sentence in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()
