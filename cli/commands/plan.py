"""`thresher plan`: what a run of a recipe would take of a GPU, or of this machine's memory, before anything is loaded.

The arithmetic is engine/planning/plan.py's.
"""

import argparse
import re
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.common import console

if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe
    from thresher.engine.planning.plan import Plan
    from thresher.engine.planning.time import DeviceRates
    from thresher.policy.config import ModelConfig

HELP = "the memory and the time of a training run, before anything is loaded"
PLACE = 25
EXAMPLE = "thresher plan --recipe recipes/eval_rar/qwen2.5-3b.toml --model models/Qwen2.5-3B-Instruct --chip H100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR|CONFIG", help="model folder or config.json; default: the recipe's")
    parser.add_argument("--recipe", required=True, help="TOML file")
    flags.add_set(parser)
    flags.add_model_device(parser)
    parser.add_argument("--gpu-memory", metavar="SIZE", help="such as 80GB; default: the chip's, or this machine's")
    parser.add_argument("--gpus", type=flags.count, default=1, help="that share the weights; default: 1")
    parser.add_argument("--chip", help="such as H100: its memory, and its rates for the seconds of a step")
    parser.add_argument("--measure", action="store_true", help="this machine's rates, measured in a second")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.assemble import read_run_recipe
    from thresher.engine.planning.plan import plan

    recipe = read_run_recipe(options.recipe, flags.overrides(options))
    config = _config(recipe.model.path if options.model is None else options.model)
    rates, memory = _rates(options, recipe), _memory(options, recipe)
    found = plan(config, recipe, options.gpus, memory, rates)
    console.answer(found.to_dict())
    _print(found)


def _config(model: str) -> "ModelConfig":
    """Of a model folder, or of a config.json. No weights are looked at."""
    from pathlib import Path

    from thresher.common.files import read_json_object
    from thresher.policy.config import config_from_dict, read_config

    path = Path(model)
    return config_from_dict(read_json_object(path), str(path)) if path.is_file() else read_config(path)


def _rates(options: argparse.Namespace, recipe: "Recipe") -> "DeviceRates | None":
    """The chip's that was named, or this machine's."""
    import torch

    from thresher.common.errors import UserError
    from thresher.engine.planning.time import CHIPS

    if options.chip is not None:
        if options.chip not in CHIPS:
            raise UserError(f"--chip {options.chip}: expected one of {', '.join(CHIPS)}")
        if options.measure:
            raise UserError("--measure: expected either --chip or --measure, got both")
        if recipe.model.device != "cuda":
            raise UserError("--chip: expected a recipe with model.device = cuda; add --device cuda")
        # A data sheet's rate is that of bfloat16's products.
        return CHIPS[options.chip] if recipe.model.dtype == "bfloat16" else None
    if not options.measure:
        return None
    from thresher.bench.harness import measure_rates

    if recipe.model.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--measure: torch sees no CUDA device; name a chip, such as --chip H100")
    return measure_rates(torch.device(recipe.model.device))


def _memory(options: argparse.Namespace, recipe: "Recipe") -> int:
    import torch

    from thresher.common.errors import UserError
    from thresher.common.machine import cpu_memory
    from thresher.engine.planning.time import CHIPS
    from thresher.retrieval.indexes.kinds import parse_memory

    if options.gpu_memory is not None:
        if not re.search(r"[A-Za-z]\s*$", options.gpu_memory):
            raise UserError(f"--gpu-memory {options.gpu_memory}: expected a size with its unit, such as 80GB or 40GiB")
        return parse_memory(options.gpu_memory)
    if options.chip is not None:
        return int(CHIPS[options.chip].memory)
    if recipe.model.device == "cpu":
        return cpu_memory()[0]
    if not torch.cuda.is_available():
        raise UserError("--gpu-memory: torch sees no CUDA device; expected a size such as 80GB, or --chip H100")
    return int(torch.cuda.mem_get_info()[1])


def _print(found: "Plan") -> None:
    from rich import box
    from rich.table import Table

    from thresher.engine.planning.plan import GB

    of = "" if found.gpus == 1 else f", on each of {found.gpus} GPUs"
    drawn = Table(
        title=f"GB by part and phase{of}; the peak is in: {found.peak}", title_justify="left", box=box.SIMPLE_HEAD
    )
    for number, column in enumerate(["part", *found.phases]):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=True)

    def row(name: str, values: list[int]) -> None:
        drawn.add_row(name, *(f"{value / GB:.1f}" if value else "" for value in values))

    for name in (name for name in found.parts if any(parts[name] for parts in found.phases.values())):
        row(name, [parts[name] for parts in found.phases.values()])
    row("all", [sum(parts.values()) for parts in found.phases.values()])
    console.draw(drawn)
    for line in _lines(found):
        console.console.print(line, soft_wrap=True, markup=False)


def _lines(found: "Plan") -> list[str]:
    """What there is to say below the table."""
    from thresher.engine.planning.plan import GB

    assert found.memory_bytes is not None
    verdict = "fits" if found.fits else "does not fit"
    lines = [f"{found.total_bytes / GB:.1f} GB of {found.memory_bytes / GB:.1f}: it {verdict}"]
    lines += found.advice
    if found.largest:
        bounds = {name: f" ({why})" for name, why in found.bounds.items()}
        each = (f"{name} = {value:,}{bounds.get(name, '')}" for name, value in found.largest.items())
        lines.append("largest that fit, each alone: " + ", ".join(each))
    if found.host:
        lines.append("in the machine's memory: " + ", ".join(f"{k} {v / GB:.1f} GB" for k, v in found.host.items()))
    if found.checkpointed:
        lines.append("activations are computed anew in the backward")
    if found.gpus > 1:
        lines.append("several GPUs: torchrun --nproc-per-node N (docs/scale.md), on which nothing was measured")
    if found.seconds is not None:
        rollout, update = found.seconds["rollout"], found.seconds["update"]
        sent = "" if found.gpus == 1 else ", without what they send each other"
        if found.links is not None:
            sent = f", linked at {found.links / GB:.0f} GB/s a direction as in one machine"
        lines.append(
            f"predicted, with every trajectory at its limits: {found.seconds_per_step:.3g} s a step, "
            f"rollout {rollout:.3g}, update {update:.3g}{sent}; nothing was run"
        )
    return lines
