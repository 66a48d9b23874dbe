"""`thresher recipe`: a recipe with all that it leaves open filled in, and what a key means.

The keys are engine/config/reference.py's.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.engine import console
from thresher.rewards.errors import UserError

if TYPE_CHECKING:
    from thresher.engine.config.reference import Key

HELP = "a recipe resolved, or what a key of it means"
PLACE = 28
EXAMPLE = "thresher recipe --explain rollout.group_size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", metavar="RECIPE", help="print the recipe with --set, its system's preset and defaults")
    what.add_argument("--explain", metavar="KEY", help="a key such as rollout.group_size or group_size, or a section")
    what.add_argument("--reference", action="store_true", help="print docs/recipe.md: every key, as Markdown")
    flags.add_set(parser)
    flags.add_model_device(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.config.recipe import load_recipe
    from thresher.engine.config.reference import explain, keys_of, markdown
    from thresher.engine.systems import NAMES, load_system

    changes = flags.overrides(options)
    if options.show is not None:
        recipe = load_recipe(options.show, changes, preset=lambda name: load_system(name, {}).preset)
        print(recipe.to_toml(), end="")
        console.answer(recipe.to_dict())
        return
    if changes:
        raise UserError("recipe: --set and --device are for --show RECIPE; leave them out")
    keys = keys_of({name: load_system(name, {}).preset for name in NAMES})
    if options.reference:
        print(markdown(keys), end="")
    else:
        keys = explain(keys, options.explain)
        print("\n\n".join(map(_explained, keys)))
    console.answer({"keys": [asdict(key) for key in keys]})


def _explained(key: "Key") -> str:
    from thresher.engine.config.reference import by_value

    lines = [key.dotted, f"  {key.meaning}", f"  default: {key.default}", f"  takes: {key.takes}"]
    lines += [f"  preset {value}: {', '.join(systems)}" for value, systems in by_value(key).items()]
    return "\n".join(lines)
