"""`thresher recipe`: the recipes that came with Thresher, one with all that it leaves open filled in, what a key means.

The keys are engine/config/reference.py's.
"""

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

if TYPE_CHECKING:
    from thresher.engine.config.reference import Key

HELP = "the recipes that are there, one resolved or copied, or what a key means"
PLACE = 28
EXAMPLE = "thresher recipe --explain rollout.group_size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--show", metavar="RECIPE", help="print the recipe with --set, its system's preset and defaults")
    what.add_argument("--explain", metavar="KEY", help="a key such as rollout.group_size or group_size, or a section")
    what.add_argument("--list", action="store_true", help="the recipes that came with Thresher")
    what.add_argument("--new", metavar="RECIPE", help="copy one of them to --out, comments included, to be changed")
    what.add_argument("--reference", action="store_true", help="print docs/recipe.md: every key, as Markdown")
    parser.add_argument("--out", metavar="FILE", help="with --new: the file to write")
    flags.add_set(parser)
    flags.add_model_device(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.config.recipe import load_recipe
    from thresher.engine.config.reference import explain, keys_of, markdown
    from thresher.engine.config.shipped import shipped_recipes
    from thresher.engine.systems import NAMES, load_system

    changes = flags.overrides(options)
    if (options.out is None) != (options.new is None):
        raise UserError("recipe: --new RECIPE and --out FILE go together; give both or neither")
    if options.show is not None:
        recipe = load_recipe(options.show, changes, preset=lambda name: load_system(name, {}).preset)
        print(recipe.to_toml(), end="")
        console.answer(recipe.to_dict())
        return
    if changes:
        raise UserError("recipe: --set and --device are for --show RECIPE; leave them out")
    if options.list:
        columns = ("recipe", "system", "model", "what it is")
        found = [(recipe.name, recipe.system, recipe.model, recipe.about) for recipe in shipped_recipes()]
        console.table(
            "recipes that came with Thresher: each can be named wherever a recipe is asked for", columns, found
        )
        return
    if options.new is not None:
        _copy(options.new, Path(options.out))
        return
    keys = keys_of({name: load_system(name, {}).preset for name in NAMES})
    if options.reference:
        print(markdown(keys), end="")
    else:
        keys = explain(keys, options.explain)
        print("\n\n".join(map(_explained, keys)))
    console.answer({"keys": [asdict(key) for key in keys]})


def _copy(name: str, out: Path) -> None:
    """Write the recipe `name` to a new file."""
    from thresher.common.files import atomic_write_text
    from thresher.engine.config.shipped import shipped_recipe

    source = shipped_recipe(name)
    if os.path.lexists(out):
        raise UserError(f"--out {out}: exists already; choose another file, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out, source.read_text(encoding="utf-8"))
    console.console.print(
        f"recipe: {name} is copied to {out}; thresher recipe --show {out} fills in what it leaves open"
    )


def _explained(key: "Key") -> str:
    from thresher.engine.config.reference import by_value

    lines = [key.dotted, f"  {key.meaning}", f"  default: {key.default}", f"  takes: {key.takes}"]
    lines += [f"  preset {value}: {', '.join(systems)}" for value, systems in by_value(key).items()]
    return "\n".join(lines)
