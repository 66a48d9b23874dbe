"""What several commands' flags have in common: number converters with bounds, and flags that mean the same everywhere.

A converter is a `type` of argparse, named after what it lets through: argparse puts its sentence behind the flag's name
and ends with status 2, also for what is no number at all.

Deliberately absent: flags and bounds that only one command has, which stand in its file.
"""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from thresher.common.errors import UserError
from thresher.engine.config.sampling import BOUNDS

if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe

Number = TypeVar("Number", int, float)
ALLOW_KEY = "let the recipe's judge.key_env send this environment variable's key to this host, and to no other"
OVERRIDE = "override the recipe; nothing behind = takes the key out of it, so that its default holds; may be repeated"


def checked(kind: Callable[[str], Number], expected: str, fits: Callable[[Number], bool]) -> Callable[[str], Number]:
    """A converter: `kind` reads the text, `fits` bounds what it read, `expected` is what to say otherwise."""

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return convert


count = checked(int, "a whole number of at least 1", lambda value: 1 <= value < 2**63)
natural = checked(int, "a whole number of at least 0", lambda value: 0 <= value < 2**63)
integer = checked(int, "a whole number", lambda value: -(2**63) <= value < 2**63)
seed = checked(int, "a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)
percent = checked(int, "a whole number from 1 to 100", lambda value: 1 <= value <= 100)
share = checked(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
seconds = checked(float, "a number of at least 0", lambda value: value >= 0)  # inf: without end
number = checked(float, "a number", lambda value: value == value)
positive = checked(float, "a number above 0", lambda value: 0 < value < math.inf)
temperature, top_p, min_p = (
    checked(float, BOUNDS[name].words, BOUNDS[name].admits) for name in ("temperature", "top_p", "min_p")
)
samples = checked(int, BOUNDS["n"].words, BOUNDS["n"].admits)


def add_set(parser: ArgumentParser, metavar: str = "SECTION.KEY=VALUE", text: str = OVERRIDE) -> None:
    """`--set`, which may be repeated: a list of assignments."""
    parser.add_argument("--set", action="append", default=[], metavar=metavar, help=text)


def add_resume(parser: ArgumentParser, run: str) -> None:
    """Add `--resume` and `--resume-from`, which `resumable` reads, for commands that write checkpoints. run: whose
    checkpoints, in words."""
    parser.add_argument("--resume", action="store_true", help=f"go on from the {run}'s last checkpoint")
    parser.add_argument(
        "--resume-from",
        dest="from_step",
        type=natural,
        metavar="STEP",
        help="with --resume: go back to this step's checkpoint, and delete what came after it; 0: the beginning",
    )


@contextmanager
def resumable(options: Namespace, folder: Path) -> Iterator[None]:
    """An interrupt inside says up to which step the run in `folder` is saved, and the command that goes on. UserError
    for --resume-from without --resume.

    Once the run has gone back to the step of --resume-from, that command has no --resume-from, or it
    would lose what was learned since."""
    from thresher.common import signals
    from thresher.engine.store.run_folder import count_starts, saved_so_far

    if options.from_step is not None and not options.resume:
        raise UserError("--resume-from is for going back in a run that is there; give it with --resume")
    starts = count_starts(folder)

    def spent() -> str:
        return "--resume-from" if count_starts(folder) > starts else ""

    with signals.keeping(lambda: saved_so_far(folder), "--resume", spent):
        yield


def add_model_device(parser: ArgumentParser) -> None:
    """`--device`, where a recipe has the key as well: see `overrides`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="short for --set model.device=; default: the recipe's"
    )


def overrides(options: Namespace) -> list[str]:
    """The assignments of `--set`, and of `--device` behind them."""
    return [*options.set, *([] if options.device is None else [f"model.device={options.device}"])]


def add_recipe(parser: ArgumentParser) -> None:
    """A recipe's file, and what overrides it: see `read_recipe`."""
    parser.add_argument("recipe", help="TOML file; docs/recipe.md has its keys")
    add_set(parser)
    add_model_device(parser)


def read_recipe(options: Namespace) -> "Recipe":
    """The recipe that `add_recipe`'s flags name."""
    from thresher.engine.assemble import read_run_recipe

    return read_run_recipe(options.recipe, overrides(options))


def add_allow_key(parser: ArgumentParser, text: str = ALLOW_KEY) -> None:
    """`--allow-key`, which may be repeated: a list of "VARIABLE@HOST"."""
    parser.add_argument(
        "--allow-key", type=_key_at, action="append", default=[], metavar="VARIABLE@HOST[:PORT]", help=text
    )


def _key_at(text: str) -> str:
    variable, at, host = text.rpartition("@")
    if not (variable and at and host) or "/" in host:
        raise ArgumentTypeError(f"expected VARIABLE@HOST such as OPENAI_API_KEY@api.openai.com, got {text}")
    return f"{variable}@{host.lower()}"


def add_index_search(parser: ArgumentParser) -> None:
    """Which index is asked, and how: of `index search` and of `index check`."""
    parser.add_argument("--index", required=True, metavar="DIR", help="folder that `thresher index build` wrote")
    parser.add_argument("--k", type=count, default=5, help="passages of a question")
    add_set(parser, "NAME=VALUE", "a parameter of the search, such as nprobe=64; default: what the build measured")
    parser.add_argument("--gpu", action="store_true", help="lists on all GPUs, in float16")
    add_no_verify(parser)


def add_unverified(parser: ArgumentParser) -> None:
    """`--unverified`, for commands that read what others have stored."""
    parser.add_argument(
        "--unverified", action="store_true", help="read records that are not as they were written, by their checksums"
    )


def add_no_verify(parser: ArgumentParser) -> None:
    """`--no-verify`, for commands that read an index without a recipe (there: run.verify)."""
    parser.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not hold the index against its hashes"
    )
