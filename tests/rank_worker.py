"""One rank in the tests of several ranks. Run as a script, once per process, in one of two ways:

    python rank_worker.py SCENARIOS RANK       several runs in order, each in a separate process group
    torchrun rank_worker.py WHAT train ...     `thresher train ...`, in which rank 1 meets WHAT in step 2

SCENARIOS: JSON, a list of {"ranks", "port", "recipe", "out", "resume", "mine": {rank: overrides}, "from": a run to copy
to `out` without its checkpoint of step 2, "copied": another scenario's run to copy to it, "interrupted": the rank that
gets SIGTERM in its third rollout, "struck": [rank, a key of PLACES, n, "SIGKILL", "SIGTERM" or "error"]: the event at
the rank's n-th call there}.
A process whose rank is not below "ranks" skips a scenario. An exception is written to OUT.RANK.error, and the changed
paths in OUT to OUT.RANK.changed.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from thresher.cli.main import main
from thresher.cli.process import leave
from thresher.common.errors import UserError
from thresher.common.signals import Interrupted, handle_signals
from thresher.engine.config.recipe import load_recipe
from thresher.engine.parallel import ranks as ranks_module
from thresher.engine.parallel.ranks import joined
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.store.run_folder import saved_so_far
from thresher.engine.training import step as step_module
from thresher.engine.training import train as train_module
from thresher.engine.training.step import GrpoStep, StepResult

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}
PLACES: dict[str, tuple[Any, str]] = {
    "sample": (GrpoStep, "sample"),
    "learn": (GrpoStep, "learn"),
    "evaluate": (train_module, "evaluate"),
    "save": (train_module, "save_checkpoint"),
}
changed: list[str] = []


def note_change(event: str, arguments: tuple[Any, ...]) -> None:
    """Record paths that this process makes, opens to write, renames or removes, as an audit hook."""
    if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE):
        changed.extend(os.fspath(path) for path in arguments if isinstance(path, str | Path))


def play(scenario: dict[str, Any], rank: int) -> None:
    """Run one scenario."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(scenario["ranks"]),
        "LOCAL_WORLD_SIZE": str(scenario["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(scenario["port"]),
    }
    out = Path(scenario["out"])
    changed.clear()
    if rank == 0 and "from" in scenario:  # the others wait for rank 0 to join them
        copy_until_step_1(Path(scenario["from"]), out)
    if rank == 0 and "copied" in scenario:
        shutil.copytree(out.with_name(scenario["copied"]), out)
    recipe = load_recipe(scenario["recipe"], scenario.get("mine", {}).get(str(rank), []))
    run, play_on = Rollout.run, step_module.play_on
    if scenario.get("interrupted") == rank:
        interrupt_rollout(3)
    before = {place: getattr(*named) for place, named in PLACES.items()}
    if "struck" in scenario and scenario["struck"][0] == rank:
        strike(*scenario["struck"][1:])
    try:
        with handle_signals(), joined() as ranks:
            train_module.train(recipe, out, scenario.get("resume", False), ranks=ranks)
    except (Exception, SystemExit, Interrupted) as error:
        Rollout.run, step_module.play_on = run, play_on  # type: ignore[method-assign]
        if isinstance(error, Interrupted):
            Path(f"{out}.kept").write_text(str(saved_so_far(out)))
        Path(f"{out}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
        torch.distributed.destroy_process_group()
    for place, named in PLACES.items():
        setattr(*named, before[place])
    here = sorted({path for path in changed if path == str(out) or path.startswith(f"{out}/")})
    Path(f"{out}.{rank}.changed").write_text("\n".join(here))


def copy_until_step_1(source: Path, out: Path) -> None:
    """Copy a run as it was before its checkpoint of step 2."""
    shutil.copytree(source, out)
    shutil.rmtree(out / "checkpoints" / "step_000002")


def interrupt_rollout(number: int) -> None:
    """Send SIGTERM to this process when it starts the rollout with this number."""
    calls = [0]

    def interrupting(run: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return run(*arguments, **options)

        return interrupted

    Rollout.run = interrupting(Rollout.run)  # type: ignore[method-assign]
    step_module.play_on = interrupting(step_module.play_on)


def strike(place: str, number: int, what: str) -> None:
    """Send a signal or raise an error at the call of `place` with this number."""
    wanted, calls = getattr(*PLACES[place]), [0]

    def struck(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and what == "error":
            raise UserError("questions.jsonl: line 7 is on fire; put it out")
        if calls[0] == number:
            os.kill(os.getpid(), getattr(signal, what))
        return wanted(*arguments, **options)

    setattr(*PLACES[place], struck)


def play_all(file: str, rank: int) -> None:
    ranks_module._LAST_WORDS = 0.0  # type: ignore[attr-defined]
    sys.addaudithook(note_change)
    for scenario in json.loads(Path(file).read_text()):
        if rank < scenario["ranks"]:
            play(scenario, rank)


def fail_in_step_2(what: str) -> None:
    """Kill rank 1, or raise an input error in it, in the rollout of step 2: after all ranks have met for its weights,
    and rank 0 has saved step 1."""
    collect = GrpoStep.collect

    def fail(*_: Any, **__: Any) -> None:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("questions.jsonl: line 7 is on fire; put it out")

    def failing(self: GrpoStep, number: int) -> StepResult:
        if number == 2:
            self.rollout.run = fail  # type: ignore[method-assign,assignment]
        return collect(self, number)

    GrpoStep.collect = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        play_all(sys.argv[1], int(sys.argv[2]))
        leave(0)
    else:
        if os.environ["RANK"] == "1":
            fail_in_step_2(sys.argv[1])
        main(sys.argv[2:])
