"""The training runs of a study, in ordinary run folders. Finished runs are not repeated; a killed run continues.

A study of a pretrained model uses its `ModelRecipe` in place of the demo's world.
"""

import itertools
import json
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.assemble import RunContext, load_questions, load_retrieval, load_run_context, read_run_recipe
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.store.run_folder import RunFolder, to_be_resumed
from thresher.engine.training.step import Diverged
from thresher.engine.training.train import Progress, train
from thresher.engine.world.stages import below_gate
from thresher.retrieval.questions import Question

HEAD = ("commit", "machine", "torch")  # of a run's start


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One training run. Runs of a study differ in `seed` and in the fields of a subclass."""

    name: str
    seed: int
    folder: Path
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A recipe, and a model folder that replaces the recipe's own. overrides: of the recipe, as of `--set`."""

    path: str
    model: str | None = None
    overrides: Sequence[str] = ()

    def read(self, *own: str) -> Recipe:
        """Return the recipe with a study's own assignments. UserError for an override of an assigned key."""
        model = [] if self.model is None else [f"model.path={self.model}"]
        taken = {text.partition("=")[0].strip() for text in (*model, *own)}
        for text in self.overrides:
            if (key := text.partition("=")[0].strip()) in taken:
                raise UserError(f"--set {text}: the study itself sets {key}; leave it out")
        return read_run_recipe(self.path, [*model, *self.overrides, *own])


@dataclass(frozen=True, slots=True)
class Task:
    """The loaded parts of a recipe that are needed to sample trajectories."""

    context: RunContext
    questions: list[Question]
    held_out: list[Question]
    rollout: Rollout


def load_task(recipe: Recipe) -> Task:
    """Load model, index and questions. UserError if they do not fit together."""
    context = load_run_context(recipe)
    rollout = context.rollout(load_retrieval(recipe, context.system))
    questions, held_out = load_questions(recipe, context.system)
    rollout.check_prompts(itertools.chain(questions, held_out))
    return Task(context, questions, held_out, rollout)


def check_out(out: Path) -> None:
    """Raise UserError if the study's folder is an existing file."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file of that name is in the way; choose another folder with --out")


def check_folder(case: StudyRun, longer: bool = False) -> None:
    """Raise UserError if the run's folder was made by a study with other settings. longer: a run may be continued to
    more steps or tokens, which otherwise would be compared with shorter ones."""
    path = case.folder / "recipe.toml"
    if not path.exists():
        return
    found = load_recipe(path)
    lengths = [(key, getattr(found.run, key), getattr(case.recipe.run, key)) for key in ("steps", "token_budget")]
    differences = [f"run.{key} is {there}, not {here}" for key, there, here in lengths if there != here and not longer]
    if differences := differences + found.differences(case.recipe):
        raise UserError(
            f"{case.folder}: the run there belongs to a study with other settings ({differences[0]}); give those, or "
            "another --out"
        )


def is_made(command: str, into: Path) -> bool:
    """Return whether a command has written all of its folder."""
    return (into / "summary.json" if command == "train" else into).exists()


def head_of(run: RunFolder) -> dict[str, Any]:
    """Return the entries of a row about commit, machine and libraries; the different values of several starts are
    joined by commas."""
    starts = list(run.starts())
    values = {name: list(dict.fromkeys(start.get(name) for start in starts)) or [None] for name in HEAD}
    joined = {name: ", ".join(map(str, found)) if len(found) > 1 else found[0] for name, found in values.items()}
    return {"at": starts[0].get("at") if starts else None, **joined}


def run_stages(stages: Iterable[Sequence[str]], run_command: Callable[[list[str]], None]) -> None:
    """Run the commands, each given by its words, whose --out does not exist; resume a killed one. Name the models that
    ended below their gate, those made before among them."""
    below = []
    for typed in stages:
        into = Path(typed[typed.index("--out") + 1])
        if not is_made(typed[0], into):
            words = [*typed, *(["--resume"] if to_be_resumed(typed[0], into) else [])]
            console.console.print(f"$ thresher {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
            run_command(words)
        if typed[0] == "sft" and (missed := below_gate(into)):
            below.append(missed)
    if below:
        console.note(f"fine-tuned models that ended below their gate: {', '.join(below)}")


def train_all(
    cases: Sequence[StudyRun],
    title: str,
    say: Callable[[Mapping[str, Any]], str],
    allow_keys: Collection[str] = (),
    may_diverge: bool = False,
) -> dict[str, str]:
    """Train the unfinished runs. say: describe a step's record for the progress line.

    If runs `may_diverge`, return run name -> why it stopped early: numbers that were not finite.
    """
    stopped: dict[str, str] = {}
    before = 0
    with console.progress_line(title, sum(case.recipe.run.steps for case in cases)) as line:
        for case in cases:

            def watch(progress: Progress, case: StudyRun = case, before: int = before) -> None:
                if progress.record and "eval" not in progress.record:
                    line.to(before + progress.step, f"{case.name}  {say(progress.record)}")

            try:
                if not (case.folder / "summary.json").exists():
                    train(case.recipe, case.folder, case.folder.exists(), watch, allow_keys=allow_keys)
            except Diverged as error:
                if not may_diverge:
                    raise
                stopped[case.name] = str(error)
            before += case.recipe.run.steps
            line.to(before, f"{case.name}  finished")
    return stopped


def write_json(path: Path, value: Any) -> None:
    atomic_write_text(path, json.dumps(value, indent=2) + "\n")
