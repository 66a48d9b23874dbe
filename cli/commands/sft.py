"""`thresher sft`: supervised fine-tuning, and what a person sees of it. The work is engine/training/sft_run.py's."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.store.run_folder import sft_folder

if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe

HELP = "supervised fine-tuning, of all weights or of adapters"
PLACE = 20
EXAMPLE = "thresher sft recipe.toml --out models/warm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_recipe(parser)
    parser.add_argument("--out", required=True, help="model folder to write")
    flags.add_resume(parser, "unfinished run")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.parallel.ranks import joined

    with joined() as ranks:
        if ranks.several:
            raise UserError(f"sft trains in one process, and torchrun has started {ranks.count}; leave torchrun out")
    with flags.resumable(options, sft_folder(options.out)):
        run_sft(flags.read_recipe(options), Path(options.out), options.resume, options.from_step)


def run_sft(recipe: "Recipe", out: Path, resume: bool = False, from_step: int | None = None) -> None:
    """Fine-tune `model.path`, all of it or adapters; `out` becomes a model folder with its measurements beside."""
    from thresher.engine.config.sections import SftSection
    from thresher.engine.training.sft_data import say_unused
    from thresher.engine.training.sft_run import check_out, load_fine_tuning

    sft = recipe.need(SftSection)
    check_out(out, resume)
    tuning = load_fine_tuning(recipe)
    console.announce(
        f"sft: {len(tuning.trainer.training):,} transcripts to train on, {len(tuning.trainer.held_out):,} held out, "
        f"{tuning.trained:,} parameters, at most {sft.steps} steps"
    )
    copying: list[float] = []  # as often as it was measured
    with console.progress_line("sft", sft.steps) as line:

        def watch(record: dict[str, Any]) -> None:
            if "copying" in record:
                copying.append(record["copying"])
            text = f"loss {record['loss']:.3f}" + (f"  names copied right {copying[-1]:.0%}" if copying else "")
            if line.done == 0:
                line.from_before(record["step"] - 1)  # of a run that is resumed
            line.to(record["step"], text)

        figures = tuning.run(out, watch, resume, from_step)
    console.figures(f"sft: model in {out}", figures)
    say_unused(tuning.unused, tuning.questions, out / "unused.jsonl")
    if not figures["passed"]:
        console.console.print(
            f"The gate was not reached: {figures['names copied right']:.0%} of the names were copied right, "
            f"{sft.stop_at_copy_accuracy:.0%} wanted. The model is written all the same; GRPO may learn little from "
            "it. Try more sft.steps or another run.seed."
        )
