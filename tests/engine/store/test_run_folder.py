"""Run folders: never half-made, never mixed up, truncated to a checkpoint's step, one writer at a time."""

import errno
import math
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from stored_cases import stored

from thresher.common import records as records_module
from thresher.common.errors import UserError
from thresher.common.files import Unwritable
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sections import GrpoSection, ModelSection, OptimSection, RunSection
from thresher.engine.store.run_folder import RunFolder, read_metrics, step_name, step_of

RECIPE = Recipe(model=ModelSection(path="m"))
OTHER = replace(RECIPE, grpo=GrpoSection(beta=0.5))


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_create_makes_a_whole_folder_and_its_parents(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs" / "a", RECIPE) as run:
        assert tree(run.path) == [".lock", "checkpoints", "evaluations", "plots", "recipe.toml", "trajectories"]
        assert load_recipe(run.recipe_file) == RECIPE
        assert tree(tmp_path / "runs")[0] == "a"  # nothing else next to it


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_create_refuses_what_exists_and_leaves_it_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    {"folder": path.mkdir, "file": path.touch, "dangling link": lambda: path.symlink_to("nowhere")}[kind]()
    before = tree(tmp_path)
    assert refusal(RunFolder.create, path, RECIPE) == (
        f"{path}: the run folder exists already; resume it, or choose another"
    )
    assert tree(tmp_path) == before


def test_create_leaves_nothing_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Recipe, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recipe, "write", fail)
    said = refusal(RunFolder.create, tmp_path / "run", RECIPE)
    assert "run: cannot be written (No space left on device); make room" in said
    assert tree(tmp_path) == []


def test_create_under_a_file_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "run: cannot be written (File exists); choose another path" in refusal(
        RunFolder.create, tmp_path / "file" / "run", RECIPE
    )
    assert tree(tmp_path) == ["file"]


def test_resume_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": 1, "reward": 0.5})
    longer = replace(RECIPE, run=RunSection(steps=999), model=ModelSection(path="m", device="cuda"))
    with RunFolder.resume(tmp_path / "run", longer) as run:
        assert load_recipe(run.recipe_file) == RECIPE
        run.truncate_after(1)
        assert load_recipe(run.recipe_file) == longer
        run.append_metrics({"step": 2, "reward": 0.6})
        assert read_metrics(run.path) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]


@pytest.mark.parametrize("optim", [OptimSection(schedule="cosine"), OptimSection(warmup_ratio=0.1)])
def test_a_schedule_is_not_stretched_by_going_on_for_longer(tmp_path: Path, optim: OptimSection) -> None:
    recipe = replace(RECIPE, optim=optim)
    RunFolder.create(tmp_path / "run", recipe).close()
    stored = (tmp_path / "run" / "recipe.toml").read_bytes()
    longer = replace(recipe, run=replace(recipe.run, steps=recipe.run.steps + 1))
    message = refusal(RunFolder.resume, tmp_path / "run", longer)
    assert f"optim.schedule = {optim.schedule}, optim.warmup_ratio = {optim.warmup_ratio:g} (set by" in message
    assert f"the {recipe.run.steps} steps that it was scheduled for, now {recipe.run.steps + 1}; resume" in message
    assert (tmp_path / "run" / "recipe.toml").read_bytes() == stored
    RunFolder.resume(tmp_path / "run", recipe).close()


def test_a_warm_up_keeps_its_length_where_a_run_goes_on_for_longer(tmp_path: Path) -> None:
    recipe = replace(RECIPE, optim=OptimSection(warmup_ratio=0.1))
    RunFolder.create(tmp_path / "run", recipe).close()
    for more in (1, 2):  # with the recipe that it began with, each time
        longer = replace(recipe, run=RunSection(steps=recipe.run.steps + more))
        continued = longer.going_on(load_recipe(tmp_path / "run" / "recipe.toml"))
        assert continued.optim.schedule_steps == continued.scheduled_steps() == recipe.run.steps
        RunFolder.resume(tmp_path / "run", continued).close()
    same = replace(recipe, run=RunSection(save_every=7))
    assert same.going_on(recipe) is same

    # A schedule that falls to 0 is neither cut off nor stretched.
    falling = OptimSection(schedule="linear")
    assert replace(longer, optim=falling).going_on(replace(recipe, optim=falling)).optim == falling
    message = refusal(lambda: replace(longer, optim=replace(falling, schedule_steps=99)))
    assert message == (
        'optim.schedule_steps: expected at least run.steps = 102 with schedule = "linear", because the learning '
        "rate is 0 from there on, got 99"
    )


def test_resume_refuses_another_recipe_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder.create(path, RECIPE).close()
    stored = (path / "recipe.toml").read_bytes()
    assert refusal(RunFolder.resume, path, OTHER) == (
        f"{path}: the run folder belongs to another recipe (grpo.beta is 0.001, not 0.5); resume with its own"
        " recipe.toml, or choose another folder"
    )
    foreign = Recipe(
        model=ModelSection(path="x", prompt="chat", dtype="bfloat16"),
        run=RunSection(seed=1),
        grpo=GrpoSection(beta=0.5),
    )
    assert "not 0.5 and 1 more)" not in refusal(RunFolder.resume, path, foreign)
    assert " and 2 more)" in refusal(RunFolder.resume, path, foreign)
    assert (path / "recipe.toml").read_bytes() == stored
    RunFolder.resume(path, RECIPE).close()  # the refusals have also released the lock


def test_resume_refuses_what_is_no_run_folder(tmp_path: Path) -> None:
    assert "the run folder does not exist" in refusal(RunFolder.resume, tmp_path / "none", RECIPE)
    assert "is not a run folder (it has no recipe.toml)" in refusal(RunFolder.resume, tmp_path, RECIPE)
    assert tree(tmp_path) == []
    (tmp_path / "demo" / "grpo").mkdir(parents=True)
    (tmp_path / "demo" / "grpo" / "recipe.toml").touch()
    assert refusal(RunFolder.existing, tmp_path / "demo").endswith(f"; name one in it: {tmp_path}/demo/grpo")


def test_resume_names_the_key_of_a_recipe_it_cannot_read(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", RECIPE).close()
    (tmp_path / "run" / "recipe.toml").write_text('[model]\npath = "m"\n[grpo]\nbta = 1\n')
    assert "recipe.toml: [grpo] bta: unknown key; did you mean beta?" in refusal(
        RunFolder.resume, tmp_path / "run", RECIPE
    )


def test_resume_restores_folders_that_a_copy_lost(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", RECIPE).close()
    for name in ("trajectories", "checkpoints", "plots"):
        (tmp_path / "run" / name).rmdir()
    with RunFolder.resume(tmp_path / "run", RECIPE) as run:
        run.truncate_after(0)
        assert run.trajectories.is_dir() and run.checkpoints.is_dir() and run.plots.is_dir()
        assert not run.metrics_file.exists()


def test_only_one_writer_at_a_time(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", RECIPE)
    stored = run.recipe_file.read_bytes()
    message = refusal(RunFolder.resume, tmp_path / "run", replace(RECIPE, run=RunSection(steps=5)))
    assert message.startswith(f"{tmp_path / 'run'}: process ")
    assert message.endswith(" is writing to this folder; wait for it to end")
    assert run.recipe_file.read_bytes() == stored
    run.close()
    run.close()
    RunFolder.resume(tmp_path / "run", RECIPE).close()


HOLDER = """
import sys
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import ModelSection
from thresher.engine.store.run_folder import RunFolder
run = RunFolder.create(sys.argv[1], Recipe(model=ModelSection(path="m")))
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        assert f"process {holder.pid} is writing" in refusal(RunFolder.resume, tmp_path / "run", RECIPE)
    finally:
        holder.kill()
        holder.communicate()
    with RunFolder.resume(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": 1})


def test_metrics_are_plain_json_lines(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        assert read_metrics(run.path) == []
        run.append_metrics({"step": 1, "loss": 0.1 + 0.2, "wait_policy": "é\n\udcff"})
        run.append_metrics({"step": 2, "loss": math.nan, "by_epoch": [{"loss": math.inf}], "n": np.float32(0.5)})
        lines = run.metrics_file.read_text(encoding="utf-8").splitlines()
        plain = [line.rpartition(', "checksum": ')[0] for line in lines]
        assert plain[0] == '{"step": 1, "loss": 0.30000000000000004, "wait_policy": "é\\n\\udcff"'
        assert plain[1] == '{"step": 2, "loss": null, "by_epoch": [{"loss": null}], "n": 0.5'
        assert read_metrics(run.metrics_file)[0] == {"step": 1, "loss": 0.1 + 0.2, "wait_policy": "é\n\udcff"}
        for record in ({"loss": 1.0}, {"step": "1"}, {"step": None}):
            with pytest.raises(ValueError, match='integer "step"'):
                run.append_metrics(record)
        assert len(RunFolder(run.path).metrics()) == 2  # reading needs no lock


@pytest.mark.parametrize(
    ("tail", "steps"),
    [
        (b"", [1, 2]),
        (b'{"step": 3, "rew', [1, 2]),
        (b'{"step": 3, "reward": "\xc3', [1, 2]),
        (b'{"step": 3', [1, 2]),
        (b"3", [1, 2]),
        (b'{"step": 3}', [1, 2, 3]),  # complete, only the line end is missing
    ],
)
def test_a_half_written_last_line_is_dropped(tmp_path: Path, tail: bytes, steps: list[int]) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.metrics_file.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == steps
    with RunFolder.resume(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": 4})
        assert [record["step"] for record in stored(run.metrics_file)] == [
            *steps,
            4,
        ]


@pytest.mark.parametrize("line", [b"{", b"[1]", b"{}", b'{"step": 1.5}', b"\xff"])
def test_any_other_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    assert refusal(read_metrics, path).startswith(f"{path}:2: ")


def test_trajectories_are_whole_or_absent(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        path = run.write_trajectories(10, ({"id": str(n), "logprobs": [-math.inf, -0.5]} for n in range(2)))
        assert path == run.path / "trajectories" / "step_000010.jsonl"
        assert stored(path) == [
            {"id": "0", "logprobs": [None, -0.5]},
            {"id": "1", "logprobs": [None, -0.5]},
        ]

        def breaks() -> Any:
            yield {"id": "0"}
            raise RuntimeError("killed")

        with pytest.raises(RuntimeError):
            run.write_trajectories(10, breaks())
        with pytest.raises(RuntimeError):
            run.write_trajectories(11, breaks())
        assert tree(run.trajectories) == ["step_000010.jsonl"] and len(stored(path)) == 2


def test_truncate_after_forgets_what_came_later(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        for step in (0, 5, 10, 10, 11, 12):
            run.append_metrics({"step": step, "x": step / 3})
        for step in (5, 10, 11, 1_000_000):
            run.write_trajectories(step, [{"step": step}])
            run.write_evaluation(step, [{"step": step}])
            (run.checkpoints / step_name(step)).mkdir()
        (run.checkpoints / "mine").mkdir()
        for name in (f".{step_name(11)}.tmp", step_name(11)):  # a kill left the first; the second was saved later
            (run.checkpoints / name).mkdir(exist_ok=True)
            (run.checkpoints / name / "model.safetensors").touch()
        for name in ("notes.txt", ".step_000012.jsonl.0a1b2c3d.tmp", "step_000011.safetensors"):
            (run.trajectories / name).touch()
        (run.path / ".summary.json.0a1b2c3d.tmp").touch()
        kept = b"".join(run.metrics_file.read_bytes().splitlines(keepends=True)[:4])
    with RunFolder.resume(tmp_path / "run", RECIPE) as run:
        run.truncate_after(10)
        assert run.metrics_file.read_bytes() == kept
        assert tree(run.trajectories) == ["notes.txt", "step_000005.jsonl", "step_000010.jsonl"]
        assert tree(run.evaluations) == ["step_000005.jsonl", "step_000010.jsonl"]
        assert tree(run.checkpoints) == ["mine", "step_000005", "step_000010"]
        assert not list(run.path.glob("*.tmp"))
        run.truncate_after(10)
        assert run.metrics_file.read_bytes() == kept
        run.write_summary({"em_after": 0.5})
        run.truncate_after(10)
        assert run.summary() is not None
        run.truncate_after(-1)
        assert (
            run.summary() is None and run.metrics_file.read_bytes() == b"" and tree(run.trajectories) == ["notes.txt"]
        )


def test_metrics_of_a_checkpoint_are_those_that_it_was_saved_with(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        for record in ({"step": 0, "eval": {"em": 0.5}}, {"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}):
            run.append_metrics(record)
        mark = run.metrics_mark()
        whole = run.metrics_file.read_bytes()
        lines = whole.splitlines(keepends=True)
        for behind in ({"step": 2, "eval": {"em": 1.0}}, {"step": 3, "reward": 1.0}):  # cut off by a kill, and later
            run.check_metrics(2, mark)
            run.append_metrics(behind)
        run.check_metrics(2, mark)
        run.check_metrics(2, None)  # a checkpoint of an earlier version
        for damaged in (whole * 2, b"".join(lines[1:]), whole.replace(b"0.25", b"0.75"), whole + lines[2]):
            run.metrics_file.write_bytes(damaged)
            assert "put a copy back, or go back to a checkpoint with --resume --resume-from STEP" in refusal(
                run.check_metrics, 2, mark
            )
        for cut in (b"", lines[0], b"".join(lines[:2])):
            run.metrics_file.write_bytes(cut)
            message = refusal(run.check_metrics, 2, mark)
            assert "metrics.jsonl: its records up to step 2 are not the 3 " in message
            assert "with --resume --resume-from 2" in message
    with RunFolder.resume(
        tmp_path / "run", RECIPE, unverified=True
    ) as run:  # as `--resume-from 2` continues with the remaining records
        run.append_start({"step": 2, "metrics": {"records": "2", "sha256": 1}})
        run.append_start({"step": 2, "metrics": 3})
        run.append_start({"step": 2, "metrics": run.metrics_mark()})
        run.check_metrics(2, mark)
        kept = run.starts_file.read_bytes()
        run.starts_file.write_bytes(kept[:-9])
        assert "are not the 3 " in refusal(run.check_metrics, 2, mark)
        run.starts_file.write_bytes(kept)
        run.metrics_file.write_bytes(lines[0])
        assert "are not the 3 " in refusal(RunFolder(run.path).check_metrics, 2, mark)


def test_what_a_run_knows_of_its_metrics_is_what_the_file_holds(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        for step in range(4):
            run.append_metrics(
                {"step": step, "eval": {"em": math.nan if step else 0.5}} if step % 2 else {"step": step}
            )
            again = RunFolder(run.path)
            assert again.metrics_mark() == run.metrics_mark() and run.metrics_mark()["records"] == step + 1
        run.truncate_after(1)
        assert run.metrics_mark() == RunFolder(run.path).metrics_mark() != again.metrics_mark()


def test_a_file_that_is_taken_away_is_not_begun_anew(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": 1})
        whole = run.metrics_file.read_bytes()
        for damage, word in ((b"", "changed"), (whole * 2, "changed"), (None, "deleted")):
            run.metrics_file.unlink() if damage is None else run.metrics_file.write_bytes(damage)
            assert f"metrics.jsonl: was {word} by another program while" in refusal(run.append_metrics, {"step": 2})
            assert f"metrics.jsonl: was {word} by another program while" in refusal(run.write_summary, {})
        assert not run.metrics_file.exists() and not run.summary_file.exists()


def test_a_checkpoint_that_is_lost_is_noticed(tmp_path: Path) -> None:
    every = RECIPE.run.save_every
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": every, "reward": 0.5})
        run.check_checkpoints(0)  # killed before it was saved
        run.append_metrics({"step": every + 1, "reward": 0.5})
        assert f"that of step {every} is lost; put it back, or go back with --resume --resume-from 0" in refusal(
            run.check_checkpoints, 0
        )
        run.check_checkpoints(every)


def test_a_resume_that_is_killed_while_it_loads_changes_nothing(tmp_path: Path) -> None:
    """A smaller period of checkpoints holds for later steps only."""
    often = replace(RECIPE, run=replace(RECIPE.run, save_every=2))
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        for step in range(1, 6):
            run.append_metrics({"step": step, "reward": 0.5})
    RunFolder.resume(tmp_path / "run", often).close()  # killed before anything is truncated
    RunFolder(tmp_path / "run").check_checkpoints(0)
    with RunFolder.resume(tmp_path / "run", often) as run:
        run.truncate_after(-1)
        assert load_recipe(run.recipe_file).run.save_every == 2 and run.metrics() == []


def test_a_full_disk_leaves_a_closed_file_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": 1, "reward": 0.5})
        run.write_summary({})
    closed, append = run.metrics_file.read_bytes(), records_module.append_bytes

    def full(path: Path, data: bytes) -> None:
        monkeypatch.setattr(records_module, "append_bytes", append)
        append(path, data[:7])
        raise Unwritable(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(records_module, "append_bytes", full)
    with RunFolder.resume(tmp_path / "run", RECIPE) as run, pytest.raises(Unwritable):
        run.append_metrics({"step": 2, "reward": 0.5})
    assert run.metrics_file.read_bytes() == closed
    with RunFolder.resume(tmp_path / "run", RECIPE) as run:
        run.append_metrics({"step": 2, "reward": 0.6})
        assert len(run.metrics()) == 2


def test_summary(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.write_summary({"em_before": 0.25, "em_after": math.nan})
        metrics = {"records": 0, "sha256": sha256().hexdigest()}
        assert run.summary() == {"em_before": 0.25, "em_after": None, "metrics": metrics}


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "step_000000"), (10, "step_000010"), (999_999, "step_999999"), (1_234_567, "step_1234567")],
)
def test_step_names(step: int, name: str) -> None:
    assert step_name(step) == name and step_of(name) == step


@pytest.mark.parametrize(
    "name", ["step_10", "step_0000010", "step_00001x", ".step_000010", "step_000010.tmp", "step_-00010", ""]
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_of(name) is None
