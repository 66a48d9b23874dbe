"""Fields that several commands share: numbers with bounds, and flags that mean the same everywhere."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from thresher.cli.parser import POSITIONAL, REPEATED, Command
from thresher.common.errors import UserError
from thresher.engine.config.sampling import BOUNDS

if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe

Number = TypeVar("Number", int, float)
T = TypeVar("T")


def checked(kind: Callable[[str], Number], expected: str, fits: Callable[[Number], bool]) -> Callable[[str], Number]:
    """Return a converter: `kind` reads the text, `fits` bounds the value, `expected` describes what is allowed."""

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return convert


Count = Annotated[int, checked(int, "a whole number of at least 1", lambda value: 1 <= value < 2**63)]
Natural = Annotated[int, checked(int, "a whole number of at least 0", lambda value: 0 <= value < 2**63)]
Integer = Annotated[int, checked(int, "a whole number", lambda value: -(2**63) <= value < 2**63)]
Seed = Annotated[int, checked(int, "a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)]
Port = Annotated[int, checked(int, "a whole number from 0 to 65535", lambda value: 0 <= value <= 65_535)]
Samples = Annotated[int, checked(int, BOUNDS["n"].words, BOUNDS["n"].admits)]
Seconds = Annotated[float, checked(float, "a number of at least 0", lambda value: value >= 0)]  # inf: without end
Float = Annotated[float, checked(float, "a number", lambda value: value == value)]
Positive = Annotated[float, checked(float, "a number above 0", lambda value: 0 < value < math.inf)]
Temperature = Annotated[float, checked(float, BOUNDS["temperature"].words, BOUNDS["temperature"].admits)]

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Prompt = Literal["raw", "chat"]
Texts = list[str]

OVERRIDE = "override a key of the recipe; an empty value removes the key, so that its default holds; may be repeated"
ALLOW_KEY = "allow the recipe's judge.key_env to send this environment variable's key to this host, and to no other"
Overrides = Annotated[Texts, REPEATED, "SECTION.KEY=VALUE", OVERRIDE]
ModelDevice = Annotated[Device | None, "device of the model; short for --set model.device=; default: the recipe's"]
SearchParameters = Annotated[
    Texts,
    REPEATED,
    "NAME=VALUE",
    "search parameter, such as nprobe=64; may be repeated; default: as tuned by the build",
]
Unverified = Annotated[bool, "read records even if they do not match their checksums"]
Verify = Annotated[bool, "--no-verify", "skip the check of the index against its hashes"]


def key_at(text: str) -> str:
    """Read "VARIABLE@HOST[:PORT]"; the host is made lower case."""
    variable, at, host = text.rpartition("@")
    if not (variable and at and host) or "/" in host:
        raise ArgumentTypeError(f"expected VARIABLE@HOST such as OPENAI_API_KEY@api.openai.com, got {text}")
    return f"{variable}@{host.lower()}"


AllowKey = Annotated[Texts, REPEATED, key_at, "VARIABLE@HOST[:PORT]", ALLOW_KEY]


def overrides(set: Texts, device: str | None) -> Texts:
    """Return the assignments of `--set`, then that of `--device`."""
    return [*set, *([] if device is None else [f"model.device={device}"])]


def fill(kind: type[T], command: Command, **more: Any) -> T:
    """Return a dataclass of `kind`, with the command's flags of the same names, and `more`."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(command).items() if name in names} | more)


def pick(command: Command, names: str) -> dict[str, Any]:
    """Return the values of these flags by name, for keyword arguments."""
    return {name: getattr(command, name) for name in names.split()}


class OfRecipe(Command):
    """Flags of a command that takes a recipe."""

    recipe: Annotated[str, POSITIONAL, "recipe (TOML file); docs/recipe.md lists its keys"]
    set: Overrides = []
    device: ModelDevice = None

    def read_recipe(self) -> "Recipe":
        from thresher.engine.assemble import read_run_recipe

        return read_run_recipe(self.recipe, overrides(self.set, self.device))


@contextmanager
def resumable(resume: bool, from_step: int | None, folder: Path) -> Iterator[None]:
    """Have an interrupt say which step is saved, and the command that goes on. UserError for --resume-from without
    --resume.

    Once the run has gone back to that step, the command leaves --resume-from out, or it would lose what was learned
    since.
    """
    from thresher.common import signals
    from thresher.engine.store.run_folder import count_starts, saved_so_far

    if from_step is not None and not resume:
        raise UserError("--resume-from is for going back in an existing run; give it with --resume")
    starts = count_starts(folder)

    def spent() -> str:
        return "--resume-from" if count_starts(folder) > starts else ""

    with signals.on_interrupt(lambda: saved_so_far(folder), "--resume", spent):
        yield
