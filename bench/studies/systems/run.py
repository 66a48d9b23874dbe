"""`thresher study systems`: does every system learn? From one base a seed, ARENA from its own, beside a control.

    world/   the world once; once a seed base0, base1 .. and numbered0 ..   engine/world/stages.py
    runs/    arena-seed0/ .. arena-control-seed0/ ..                   ordinary run folders
    curves.png, table.md, systems.json

The base knows the form of all protocols and hardly what to look for (engine/world/files.py). ARENA's
goes on from there: it names passages by their numbers, which the shared one cannot (files.py). The control of a
system is the same run with its rewards shuffled within each group: the same rewards, for the wrong samples, carry no
signal. What is finished in the folder is not done again, and a run that was killed goes on.

Deliberately absent: a setting of its own for each system. One recipe (recipes/world) serves them all, so that what
differs between two curves is the protocol and its reward, and ARENA's base; a system's preset fills what that recipe
leaves open.
"""

import json
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.store.run_folder import RunFolder, read_metrics, to_be_resumed
from thresher.engine.training.train import Progress, train
from thresher.engine.world.files import GIVEN, SEARCHING, template
from thresher.engine.world.stages import (
    JUDGED,
    NUMBERED,
    RECIPE,
    base_folder,
    world_paths,
    world_questions,
    world_stages,
)

SYSTEMS = (*SEARCHING, *GIVEN)
# What a system's own claim is measured by, beside reward and EM: a key of the evaluation's record, and what to call it.
CLAIMS = {
    "search_r1": ("searches", "searches"),
    "eval_rar": ("recall_evaluation", "gold in evaluate"),
    "evinote": ("entailment", "entailment"),
    "eviomni": ("compression", "compression"),
    "arena": ("relevance", "relevance"),
    "naive_grpo": ("format", "format"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRun:
    """One training run of the study."""

    system: str
    seed: int
    control: bool
    folder: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.system}{' control' if self.control else ''} seed {self.seed}"


def run_study(
    out: Path,
    systems: Sequence[str],
    seeds: Sequence[int],
    controls: Sequence[int],
    overrides: Sequence[str],
    run_command: Callable[[list[str]], None],
    allow_keys: Collection[str] = (),
) -> None:
    """The whole study into the folder `out`. `controls` are the seeds that get a control, `overrides` of the recipe;
    `run_command` runs a command from its arguments, for the shared world; `allow_keys` as `train` has them."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file of that name is in the way; choose another folder with --out")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise UserError(f"--system {unknown[0]}: the invented world has no form of it; choose of {', '.join(SYSTEMS)}")
    out.mkdir(parents=True, exist_ok=True)
    world = out / "world"
    seeds = sorted(set(seeds))
    for seed in seeds:
        make_world(world, seed, systems, run_command)
    cases = make_cases(out, systems, seeds, set(controls), overrides)
    for case in cases:
        check_folder(case)
    console.console.print(f"study systems: {len(cases)} runs from the bases in {world}, into {out}")
    started = time.perf_counter()
    train_all(cases, allow_keys)
    from thresher.bench.studies.systems.plot import draw_curves  # matplotlib takes a second

    records = {case.name: read_metrics(case.folder) for case in cases}
    rows = [summary_of(case, records[case.name]) for case in cases]
    draw_curves(rows, records, CLAIMS, out / "curves.png")
    text = markdown(rows)
    atomic_write_text(out / "table.md", text)
    found = {"recipe": cases[0].recipe.to_dict(), "runs": rows, "seconds": time.perf_counter() - started}
    atomic_write_text(out / "systems.json", json.dumps(found, indent=2) + "\n")
    console.console.print(text, markup=False)


def make_world(world: Path, seed: int, systems: Collection[str], run_command: Callable[[list[str]], None]) -> None:
    judged = any(system in JUDGED for system in systems)
    bases = dict.fromkeys(map(base_of, systems))
    for typed in dict.fromkeys(tuple(words) for base in bases for words in world_stages(world, seed, judged, base)):
        into = Path(typed[typed.index("--out") + 1])
        if into.exists():
            continue
        words = [*typed, *(["--resume"] if to_be_resumed(typed[0], into) else [])]
        console.console.print(f"$ thresher {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
        run_command(words)


def base_of(system: str) -> str:
    return "numbered" if system in NUMBERED else "shared"


def make_cases(
    out: Path, systems: Sequence[str], seeds: Sequence[int], controls: set[int], overrides: Sequence[str]
) -> list[SystemRun]:
    cases = []
    for system in systems:
        prompt = out / "world" / f"{system}.txt"
        atomic_write_text(prompt, template(system))
        for seed in seeds:
            for control in (False, True) if seed in controls else (False,):
                recipe = read_run_recipe(
                    RECIPE,
                    [
                        f"model.path={base_folder(out / 'world', base_of(system), seed)}",
                        *world_paths(out / "world", system, base_of(system)),
                        # The curves are of the held-out questions: no checkpoint is chosen by them.
                        f"data.dev={world_questions(out / 'world', system, 'test')}",
                        f"system.name={system}",
                        f"system.template={prompt}",
                        f"run.seed={seed}",
                        *(["grpo.shuffle_rewards=true"] if control else []),
                        *overrides,
                    ],
                )
                folder = out / "runs" / f"{system}{'-control' if control else ''}-seed{seed}"
                cases.append(SystemRun(system=system, seed=seed, control=control, folder=folder, recipe=recipe))
    return cases


def check_folder(case: SystemRun) -> None:
    """UserError if the run's folder was made by a study with other settings."""
    path = case.folder / "recipe.toml"
    if path.exists() and (differences := load_recipe(path).differences(case.recipe)):
        raise UserError(
            f"{case.folder}: the run there belongs to a study with other settings ({differences[0]}); give those, or "
            "another --out"
        )


def train_all(cases: Sequence[SystemRun], allow_keys: Collection[str] = ()) -> None:
    """Train what is not trained yet."""
    total = sum(case.recipe.run.steps for case in cases)
    before = 0
    with console.progress_line("study systems", total) as line:
        for case in cases:
            if not (case.folder / "summary.json").exists():
                _train(case, before, line, allow_keys)
            before += case.recipe.run.steps
            line.to(before, f"{case.name}  finished")


def _train(case: SystemRun, before: int, line: console.Line, allow_keys: Collection[str]) -> None:
    def watch(progress: Progress) -> None:
        if "eval" not in progress.record:
            record = progress.record
            line.to(before + progress.step, f"{case.name}  reward {record['reward']:.3f}  EM {record['em']:.3f}")

    train(case.recipe, case.folder, case.folder.exists(), watch, allow_keys=allow_keys)


def summary_of(case: SystemRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run in one record: its first and last evaluation on the held-out questions, greedy."""
    evals = [record["eval"] for record in records if "eval" in record]
    key, _ = CLAIMS[case.system]
    row: dict[str, Any] = {"name": case.name, "system": case.system, "seed": case.seed, "control": case.control}
    for name in ("reward", "em", "f1", key):
        row[f"{name}_before"], row[f"{name}_after"] = measure(evals[0], name), measure(evals[-1], name)
    row["seconds"] = (RunFolder(case.folder).summary() or {})["seconds"]
    return row


def measure(evaluation: Mapping[str, Any], name: str) -> float | None:
    """A measure of an evaluation, or else a part of its system's reward."""
    value: float | None = evaluation.get(name, evaluation["parts"].get(name))
    return value


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each system and its control: means over seeds, before and after, with the seeds' own EM."""
    lines = [
        "| system | seeds | reward | EM | EM of each seed | its own claim | seconds a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for system in dict.fromkeys(row["system"] for row in rows):
        for control in (False, True):
            group = [row for row in rows if row["system"] == system and row["control"] == control]
            if group:
                key, claim = CLAIMS[system]
                each = ", ".join(f"{row['em_after']:.3f}" for row in group)
                name = f"{system}, shuffled rewards" if control else system
                lines.append(
                    f"| {name} | {len(group)} | {_change(group, 'reward')} | "
                    f"{_change(group, 'em')} | {each} | {claim} {_change(group, key)} | "
                    f"{mean(row['seconds'] for row in group):.0f} |"
                )
    return "\n".join(lines) + "\n"


def _change(group: Sequence[Mapping[str, Any]], key: str) -> str:
    before, after = ([row[f"{key}_{when}"] for row in group] for when in ("before", "after"))
    if any(value is None for value in (*before, *after)):
        return "-"
    return f"{mean(before):.3f} → {mean(after):.3f}"
