"""`thresher train`: GRPO into a run folder, with a line that moves. The work is engine/training/train.py's."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.common import console

if TYPE_CHECKING:
    from thresher.engine.parallel.ranks import Ranks
    from thresher.engine.training.train import Progress

HELP = "GRPO"
PLACE = 30
EXAMPLE = "thresher train recipe.toml --out runs/first --set run.steps=50"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_recipe(parser)
    parser.add_argument("--out", required=True, help="run folder to write")
    flags.add_resume(parser, "run folder")
    flags.add_allow_key(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.parallel.ranks import joined

    with flags.resumable(options, Path(options.out)), joined() as ranks:
        _train(options, ranks)


def _train(options: argparse.Namespace, ranks: "Ranks") -> None:
    from thresher.engine.training.train import train

    recipe = flags.read_recipe(options)
    greedy: list[float] = []
    with console.progress_line("train", recipe.run.steps) as line:

        def watch(progress: "Progress") -> None:
            record = progress.record
            if line.done == 0 and progress.step:
                line.from_before(progress.step - 1)  # of a run that is resumed
            if "eval" in record:
                greedy.append(record["eval"]["em"])
                if progress.step == 0:
                    line.to(0, f"before: EM {greedy[-1]:.3f} (greedy, {record['eval']['questions']} questions)")
                return
            text = f"reward {record['reward']:.3f}  EM {record['em']:.3f}"
            text += f"  greedy {greedy[-1]:.3f}" if greedy else ""
            text += f"  log-prob gap {record['logprob_gap_max']:.0e}" if "logprob_gap_max" in record else "  no update"
            line.to(progress.step, text)

        summary = train(recipe, options.out, options.resume, watch, ranks, options.from_step, options.allow_key)
    console.figures(f"train: run in {options.out}", summary)
