"""`thresher sft`: supervised fine-tuning, and what a person sees of it. The work is engine/training/sft_run.py's."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.cli import flags
from thresher.engine import console
from thresher.rewards.errors import UserError

if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe

HELP = "supervised fine-tuning, of all weights or of adapters"
PLACE = 20
EXAMPLE = "thresher sft recipe.toml --out models/warm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_recipe(parser)
    parser.add_argument("--out", required=True, help="model folder to write")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.parallel.ranks import joined

    with joined() as ranks:
        if ranks.several:
            raise UserError(f"sft trains in one process, and torchrun has started {ranks.count}; leave torchrun out")
    run_sft(flags.read_recipe(options), Path(options.out))


def run_sft(recipe: "Recipe", out: Path) -> None:
    """Fine-tune `model.path`, all of it or adapters; `out` becomes a model folder with its measurements beside."""
    from thresher.engine.config.sections import SftSection
    from thresher.engine.training.sft_data import say_unused
    from thresher.engine.training.sft_run import load_fine_tuning
    from thresher.policy.files import need_room

    sft = recipe.need(SftSection)
    if out.exists():
        raise UserError(f"{out}: exists already; choose another folder for the model")
    tuning = load_fine_tuning(recipe)
    need_room(out, tuning.saved_bytes, "the model")
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
            line.to(record["step"], text)

        figures = tuning.train(watch)
    tuning.save(out, figures)
    console.figures(f"sft: model in {out}", figures)
    say_unused(tuning.unused, tuning.questions, out / "unused.jsonl")
    if not figures["passed"]:
        console.console.print(
            f"The gate was not reached: {copying[-1]:.0%} of the names were copied right, {sft.gate:.0%} wanted. "
            "The model is written all the same; GRPO may learn little from it. Try more sft.steps or another run.seed."
        )
