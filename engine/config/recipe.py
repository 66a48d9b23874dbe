"""The recipe: everything that determines a run, read from one TOML file. Its sections are in sections.py.

    recipe = load_recipe("recipes/demo/recipe.toml", ["run.seed=1", "grpo.kl_value=k2"])

Paths are relative to the current directory. Sections that only some commands use (data, retrieval, system, sft) may be
absent; a command asks for one with `recipe.need(DataSection)`.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from thresher.common.errors import UserError
from thresher.common.files import MOST_TEXT, atomic_write_text, read_bytes
from thresher.engine.config.objectives import CLIPPED, OBJECTIVES, surrogate_name
from thresher.engine.config.renamed import current_override, current_tables
from thresher.engine.config.sections import (
    DataSection,
    GrpoSection,
    JudgeSection,
    LoraSection,
    ModelSection,
    OptimSection,
    RetrievalSection,
    RolloutSection,
    RunSection,
    SftSection,
    SystemSection,
    ToolSection,
)
from thresher.engine.config.tables import (
    FieldError,
    Section,
    Unfit,
    check_key,
    from_dict,
    hints,
    plain,
    section_in,
    shown,
    to_toml,
    toml_key,
)

S = TypeVar("S", bound=Section)
FOLDER = Path(str(files("thresher.recipes")))
SHIPPED = ", or the name of one that came with Thresher (thresher recipe --list)"

# Keys that a resumed run may change: the files it keeps, its machine, the addresses of its servers, and its length if
# no step's learning rate depends on it (Recipe.scheduled_steps).
MAY_CHANGE = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "run": "steps token_budget save_every keep_checkpoints best_metric keep_trajectories token_stats_mib threads "
        "verify trackers",
        "sft": "save_every",
        "model": "device",
        "rollout": "attention kv_tokens share_prefix num_draft_tokens",
        "grpo": "reference",
        "optim": "attention share_prefix checkpoint_activations offload micro_batch_tokens loss_workspace_bytes "
        "schedule_steps",
        "retrieval": "url timeout patience",
        "judge": "device batch_tokens cache_size url key_env timeout retry_seconds concurrency replies",
    }.items()
    for key in keys.split()
)
TOOL = re.compile(r"tools\.[^.]+\.(url|chat_url|concurrency)")  # keys of a tool that a resumed run may change
# Keys that determine where and in which batches a rollout is computed, but not its trajectories.
COMPUTING_KEYS = (
    "model.device",
    *(f"rollout.{key}" for key in ("max_num_seqs", "kv_block_size", "kv_tokens", "attention", "num_draft_tokens")),
)


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """All sections. Made by `load_recipe` or `from_dict(Recipe, table, where)`."""

    model: ModelSection
    data: DataSection | None = None
    retrieval: RetrievalSection | None = None
    system: SystemSection | None = None
    tools: dict[str, ToolSection] | None = None
    rollout: RolloutSection = field(default_factory=RolloutSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    optim: OptimSection = field(default_factory=OptimSection)
    run: RunSection = field(default_factory=RunSection)
    sft: SftSection | None = None
    lora: LoraSection | None = None
    judge: JudgeSection = field(default_factory=JudgeSection)

    def check(self) -> None:
        groups = self.rollout.questions_per_step
        if self.grpo.updates_per_batch > groups:
            raise FieldError(
                "grpo.updates_per_batch",
                f"expected at most rollout.questions_per_step = {groups}, because a group is not split,"
                f" got {self.grpo.updates_per_batch}",
            )
        if self.grpo.refill and self.rollout.tools_replay is not None:
            raise FieldError(
                "rollout.tools_replay", "expected none with grpo.refill = true, because groups set aside are not stored"
            )
        if self.grpo.refill and (self.rollout.partial or self.run.async_):
            for key in ("baseline", "scale"):
                if getattr(self.grpo, key) == "batch":
                    raise FieldError(
                        f"grpo.{key}",
                        "expected a value other than batch with grpo.refill and rollout.partial or run.async, because "
                        "a group is judged before its batch is complete",
                    )
        if self.run.async_ and self.rollout.tools_replay is not None:
            raise FieldError(
                "rollout.tools_replay",
                "expected none with run.async = true, because the groups after the last step are not stored",
            )
        if self.run.token_budget is not None and self.optim.schedule != "constant":
            raise FieldError(
                "optim.schedule",
                'expected "constant" with run.token_budget, because the number of steps is not known in advance, got '
                f"{shown(self.optim.schedule)}",
            )
        if self.run.token_budget is not None and self.run.async_:
            raise FieldError(
                "run.token_budget",
                "expected none with run.async = true, because the next rollout begins before a step's tokens are "
                "counted",
            )
        stale = (self.rollout.partial or self.run.async_) and self.grpo.old_logprobs == "rollout"
        if self.grpo.guard != "none" and self.grpo.updates_per_batch * self.grpo.epochs_per_batch == 1 and not stale:
            raise FieldError(
                "grpo.updates_per_batch",
                f'expected 2 or more with grpo.guard = "{self.grpo.guard}", which acts on what an earlier update of '
                "the batch made less likely, got 1",
            )
        if self.grpo.overlong_tokens > self.rollout.policy_tokens:
            raise FieldError(
                "grpo.overlong_tokens",
                f"expected at most the {self.rollout.policy_tokens} tokens that a trajectory may have, got "
                f"{self.grpo.overlong_tokens}",
            )
        if (self.rollout.trees > 0) != (self.grpo.advantage == "tree"):
            expected = '"tree" with rollout.trees > 0' if self.rollout.trees else "another value with rollout.trees = 0"
            raise FieldError("grpo.advantage", f"expected {expected}, got {shown(self.grpo.advantage)}")
        for name, tool in (self.tools or {}).items():
            if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
                raise FieldError(
                    f"tools.{name}", "expected a name of at most 64 letters, digits, _ and -; give it another"
                )
            if (tool.max_tokens or 0) > (most := self.rollout.max_passage_tokens):
                raise FieldError(
                    f"tools.{name}.max_tokens",
                    f"expected at most rollout.max_passage_tokens = {most}, to which all retrieved text is cut, got "
                    f"{tool.max_tokens}",
                )
        if self.grpo.reference == "cpu" and self.lora is not None:
            raise FieldError(
                "grpo.reference",
                'expected "auto" with [lora], because the reference is the policy itself with adapters off',
            )
        if self.optim.offload == "masters" and (self.lora is not None or self.model.dtype == "float32"):
            without = "[lora]" if self.lora is not None else 'model.dtype = "float32"'
            raise FieldError(
                "optim.offload",
                f'expected "none" or "moments" with {without}, because the policy\'s own weights are trained and '
                "there are no masters",
            )
        if self.optim.schedule != "constant" and (self.optim.schedule_steps or self.run.steps) < self.run.steps:
            raise FieldError(
                "optim.schedule_steps",
                f"expected at least run.steps = {self.run.steps} with schedule = {shown(self.optim.schedule)}, "
                f"because the learning rate is 0 from there on, got {self.optim.schedule_steps}",
            )

    def scheduled_steps(self) -> int | None:
        """Return the number of steps of the learning rate's schedule; None if the rate is constant."""
        if self.optim.schedule == "constant" and self.optim.warmup_ratio == 0:
            return None
        return self.optim.schedule_steps or self.run.steps

    def going_on(self, stored: "Recipe") -> "Recipe":
        """Return this recipe for a run begun with `stored`. With a constant schedule the warm-up keeps its length in
        steps even if run.steps has changed, unless this recipe sets `schedule_steps`."""
        began = stored.scheduled_steps()
        if self.optim.schedule != "constant" or self.optim.schedule_steps is not None:
            return self
        if began is None or self.scheduled_steps() in (None, began):
            return self
        return replace(self, optim=replace(self.optim, schedule_steps=began))

    def need(self, kind: type[S]) -> S:
        """Return the section of this class. UserError if the recipe has none."""
        name = next(name for name, hint in hints(type(self)).items() if section_in(hint) is kind)
        section = getattr(self, name)
        if not isinstance(section, kind):
            raise UserError(f"the recipe has no section [{name}], which this command needs; add it with {kind.wants()}")
        return section

    def running_at_most(self, count: int) -> "Recipe":
        """Return the recipe with at most `count` sequences at once."""
        return replace(self, rollout=replace(self.rollout, max_num_seqs=min(self.rollout.max_num_seqs, count)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain tables for TOML: tuples become lists, and None values are left out."""
        tables: dict[str, Any] = plain(self)
        return tables

    def to_toml(self) -> str:
        """Return the recipe, including defaults, as a TOML file from which `load_recipe` reads an equal recipe."""
        return to_toml(self.to_dict())

    def write(self, path: str | Path) -> None:
        """Write `to_toml()` to a file, whole or not at all."""
        atomic_write_text(path, self.to_toml())

    def keys(self) -> dict[str, Any]:
        """Return dotted key -> value for all values that are not None, including defaults."""
        return dict(_leaves(self.to_dict()))

    def digest(self) -> str:
        """Return the SHA-256, in hex, of all keys that a resumed run must not change (all but MAY_CHANGE)."""
        return hashlib.sha256(json.dumps(self._fixed(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: "Recipe") -> list[str]:
        """Return "section.key is A, not B" for each key that makes the digests differ; A is the value here."""
        ours, theirs = self._fixed(), other._fixed()
        return [
            f"{key} is {shown(ours.get(key), 'unset')}, not {shown(theirs.get(key), 'unset')}"
            for key in {**ours, **theirs}
            # Compared as text, because 1, 1.0 and true are equal in Python but may be different options of a system.
            if json.dumps(ours.get(key)) != json.dumps(theirs.get(key))
        ]

    def _fixed(self) -> dict[str, Any]:
        fixed = {key: value for key, value in self.keys().items() if key not in MAY_CHANGE and not TOOL.fullmatch(key)}
        if (targets := fixed.get("lora.targets")) is not None:
            # Older defaults lack these targets, which came with new layers; adapters are checked against a checkpoint.
            fixed["lora.targets"] = [target for target in targets if not target.startswith("linear_")]
        if any(tool.noise is not None and len(set(tool.noise)) > 1 for tool in (self.tools or {}).values()):
            fixed["run.steps"] = self.run.steps  # because the noise rises over them
        if self.rollout.stale_cache:  # a checkpoint clears the cache
            fixing = ("steps", "token_budget", "save_every", "best_metric")
            fixed |= {f"run.{key}": getattr(self.run, key) for key in fixing}
        if self.rollout.partial:  # keys that determine in which decoding step a token is sampled
            fixed |= {f"rollout.{key}": getattr(self.rollout, key) for key in ("kv_tokens", "num_draft_tokens")}
        return fixed


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        dotted = prefix + toml_key(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    preset: Callable[[str], dict[str, dict[str, Any]]] | None = None,
) -> Recipe:
    """Read a recipe from a TOML file, or by the name of a shipped one; then apply overrides, in order.

    overrides: "section.key=value". A value is read as TOML or, if that fails, as a bare string; an empty value removes
    the key. preset: maps the name of the recipe's system to values for keys that are not set. UserError for an absent
    or malformed file, an unknown key, and a value of the wrong type or out of range.
    """
    return make_recipe(read_tables(path), str(path), overrides, preset)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file without checking them. path: as in `find_recipe`."""
    path = find_recipe(path)
    if path.is_dir():
        found = min(path.glob("*.toml"), default=None)  # in the folder of a run or of recipes
        inside = "" if found is None else f", such as {found}"
        raise UserError(f"{path}: is a folder; give the path of a recipe in TOML{inside}")
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file; give the path of a recipe in TOML{SHIPPED}")
    try:
        return current_tables(tomllib.loads(read_bytes(path, MOST_TEXT, stream=True).decode("utf-8-sig")), str(path))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a recipe in TOML, but {error}; fix the file") from None


def make_recipe(
    tables: dict[str, Any],
    where: str,
    overrides: Sequence[str] = (),
    preset: Callable[[str], dict[str, dict[str, Any]]] | None = None,
) -> Recipe:
    """Return the recipe of tables, which are modified in place. where: their name in errors. Else as `load_recipe`."""
    overrides = [current_override(text) for text in overrides]
    flags = {override(tables, text): None for text in overrides}  # in their order
    for key in flags:
        check_key(Recipe, key)
    section, set_by_file = tables.get("system"), dict(_table(tables, "grpo"))
    if preset is not None and isinstance(section, dict) and isinstance(section.get("name"), str):
        for name, values in current_tables(dict(preset(section["name"])), f"preset of {section['name']}").items():
            if isinstance(tables.setdefault(name, {}), dict):
                tables[name] = values | tables[name]
    _preset_objective(tables, set_by_file)
    return from_dict(Recipe, tables, where, flags=flags)


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    found = tables.get(name)
    return found if isinstance(found, dict) else {}


def _preset_objective(tables: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Put the keys of the recipe's objective into [grpo]. They override a system's preset but not the keys in `chosen`.
    If the objective divides by a constant, that is the largest number of policy tokens of a trajectory."""
    grpo = _table(tables, "grpo")
    name = grpo.get("objective", GrpoSection.objective)
    if isinstance(name, str) and "dual_clip" not in chosen and surrogate_name(name) not in CLIPPED:
        grpo.pop("dual_clip", None)  # from a system's preset
    if not isinstance(name, str) or name not in OBJECTIVES:
        return
    presets = OBJECTIVES[name].grpo
    grpo.update(presets | chosen)
    if presets.get("aggregation") == "constant" == grpo["aggregation"]:
        rollout = {"max_context": RolloutSection.max_context} | _table(tables, "rollout")
        grpo.setdefault("aggregation_constant", rollout.get("max_policy_tokens") or rollout["max_context"])


# Overrides of `--set`.


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return "key=value" strings as a table; values are read as TOML or as bare strings."""
    table: dict[str, Any] = {}
    for text in texts:
        key, equals, written = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected key=value")
        if written.strip():
            table[key.strip()] = _value(written.strip())
        else:
            table.pop(key.strip(), None)
    return table


def override(table: dict[str, Any], text: str) -> str:
    """Set "section.key=value" in nested tables, and return the dotted key. "section.key=" or "section=" removes the key
    or section."""
    dotted, equals, written = text.partition("=")
    path = [part.strip() for part in dotted.split(".")]
    if equals and all(path) and not written.strip():
        _remove(table, path)
        return ".".join(path)
    if not equals or len(path) < 2 or not all(path):
        raise UserError(f"--set {text}: expected section.key=value, such as run.seed=1")
    for parent in path[:-1]:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {text}: {parent} is not a table in the recipe; expected section.key=value")
    table[path[-1]] = _value(written.strip())
    return ".".join(path)


def _remove(table: dict[str, Any], path: Sequence[str]) -> None:
    for parent in path[:-1]:
        table = table.get(parent, {})
        if not isinstance(table, dict):
            return
    table.pop(path[-1], None)


def _value(written: str) -> Any:
    try:
        (value,) = tomllib.loads(f"value = {written}").values()
        return plain(value)
    except (ValueError, RecursionError, Unfit):  # Unfit: a date in TOML, but possibly the name of a folder
        return written


# Recipes that are shipped with Thresher.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRecipe:
    """A recipe shipped with Thresher. about: the first sentence of its head. system, model: as named in it."""

    name: str
    path: Path
    about: str
    system: str | None
    model: str


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all shipped recipes, sorted by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*/*.toml"))]


def find_recipe(path: str | Path) -> Path:
    """Return `path` or, if nothing exists there, the shipped recipe of that name."""
    path = Path(path)
    return path if os.path.exists(path) else _shipped(path) or path


def shipped_recipe(name: str | Path) -> Path:
    """Return the file of the shipped recipe of that name. UserError if there is none."""
    if (found := _shipped(Path(name))) is None:
        names = [recipe.name for recipe in shipped_recipes()]
        close = get_close_matches(str(name), names, 1)
        hint = f"did you mean {close[0]}?" if close else "thresher recipe --list shows them"
        raise UserError(f"{name}: no recipe of this name came with Thresher; {hint}")
    return found


def _shipped(name: Path) -> Path | None:
    parts = name.parts[1:] if name.parts[:1] == ("recipes",) else name.parts
    wanted = FOLDER.joinpath(*parts)
    return wanted if len(parts) == 2 and wanted.suffix == ".toml" and ".." not in parts and wanted.is_file() else None


def _read(path: Path) -> ShippedRecipe:
    text = path.read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    head = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    return ShippedRecipe(
        name=path.relative_to(FOLDER).as_posix(),
        path=path,
        about=" ".join(head).partition(". ")[0].rstrip("."),
        system=tables.get("system", {}).get("name"),
        model=tables["model"]["path"],
    )
