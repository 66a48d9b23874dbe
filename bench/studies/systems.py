"""`thresher study systems`: does every system learn? Runs from one base per seed, with a control (ARENA from its own).

    thresher study systems --system search_r1 --system gigpo --base 0 --seeds 0 1 --controls 0 1

    world/   the world once; per seed base0, base1 .. and numbered0 .. engine/world/stages.py
    runs/    arena-seed0/ .. arena-control-seed0/ ..                   ordinary run folders
    curves.png, table.md, systems.json

The base knows the format of all protocols but hardly what to search for (engine/world/files.py). ARENA's base continues
from it: it names passages by their numbers, which the shared one cannot. The control of a system is the same run with
its rewards shuffled within each group, which removes the signal. One recipe (recipes/world) is used for all systems, so
that two curves differ only by the protocol and its reward, and ARENA's base; a preset fills in what that recipe does
not set. With --base all seeds start from one base, so that they differ in the questions' order and in sampling.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from thresher.bench.studies.runs import StudyRun, check_folder, check_out, head_of, run_stages, train_all, write_json
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.assemble import read_run_recipe
from thresher.engine.store.run_folder import RunFolder, read_metrics
from thresher.engine.world.files import GIVEN, SAME_FORM, SEARCHING, template
from thresher.engine.world.stages import (
    JUDGED,
    NUMBERED,
    RECIPE,
    base_folder,
    world_paths,
    world_questions,
    world_stages,
)
from thresher.rewards.statistics import Difference, compare_seeds, least_p

SYSTEMS = (*SEARCHING, *GIVEN)
KNOWN = (*SYSTEMS, *SAME_FORM)
# The measure of a system's own claim, in addition to reward and EM: key of the evaluation's record, and its name.
CLAIMS = {
    "search_r1": ("searches", "searches"),
    "eval_rar": ("recall_evaluation", "gold in evaluate"),
    "evinote": ("entailment", "entailment"),
    "eviomni": ("compression", "compression"),
    "arena": ("relevance", "relevance"),
    "naive_grpo": ("format", "format"),
}
CLAIMS |= {system: CLAIMS[form] for system, form in SAME_FORM.items()}
CLAIMS["zero_search"] = ("f1", "F1")  # its searches are calls of a tool
# Settings that a system needs in addition to the recipe (groups of 8); {world}: the folder of the world.
NEEDS = {
    "tree_grpo": ["rollout.tree_nodes=3"],
    "mem1": ["system.options.count_turns=false"],  # the base was not trained on the count lines
    "zero_search": ["tools.search.function={world}/data/search.py:search", "tools.search.noise=[0.0, 0.5]"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRun(StudyRun):
    """One training run of a system, or of its control."""

    system: str
    control: bool


def run_study(
    out: Path,
    systems: Sequence[str],
    seeds: Sequence[int],
    controls: Sequence[int] | None,
    overrides: Sequence[str],
    run_command: Callable[[list[str]], None],
    allow_keys: Collection[str] = (),
    base: int | None = None,
) -> None:
    """Write the whole study into the folder `out`. controls: seeds that get a control; None: the first. overrides: of
    the recipe. run_command: run a command from its arguments, for the shared world. allow_keys: as in `train`. base:
    seed of the base that all runs start from; None: each seed has its own."""
    check_out(out)
    if unknown := [name for name in systems if name not in KNOWN]:
        raise UserError(f"--system {unknown[0]}: the invented world has no form of it; choose from {', '.join(KNOWN)}")
    out.mkdir(parents=True, exist_ok=True)
    world = out / "world"
    systems, seeds = list(dict.fromkeys(systems)), sorted(set(seeds))
    controls = seeds[:1] if controls is None else controls
    if other := sorted(set(controls) - set(seeds)):
        raise UserError(f"--controls {other[0]}: expected one of --seeds, {', '.join(map(str, seeds))}; add it there")
    for seed in seeds if base is None else [base]:
        make_world(world, seed, systems, run_command)
    cases = make_cases(out, systems, seeds, set(controls), overrides, base)
    for case in cases:
        check_folder(case)
    console.console.print(f"study systems: {len(cases)} runs from the bases in {world}, into {out}")
    started = time.perf_counter()
    train_all(cases, "study systems", lambda one: f"reward {one['reward']:.3f}  EM {one['em']:.3f}", allow_keys)
    from thresher.bench.plots import draw_systems  # importing matplotlib takes a second

    records = {case.name: read_metrics(case.folder) for case in cases}
    rows = [summary_of(case, records[case.name]) for case in cases]
    draw_systems(rows, records, CLAIMS, out / "curves.png")
    text = markdown(rows)
    atomic_write_text(out / "table.md", text)
    found = {"recipe": cases[0].recipe.to_dict(), "runs": rows, "seconds": time.perf_counter() - started}
    write_json(out / "systems.json", found)
    console.console.print(text, markup=False)


def make_world(world: Path, seed: int, systems: Collection[str], run_command: Callable[[list[str]], None]) -> None:
    judged = any(system in JUDGED for system in systems)
    bases = dict.fromkeys(map(base_of, systems))
    stages = dict.fromkeys(tuple(words) for base in bases for words in world_stages(world, seed, judged, base))
    run_stages(stages, run_command)


def base_of(system: str) -> str:
    return "numbered" if system in NUMBERED else "shared"


def make_cases(
    out: Path,
    systems: Sequence[str],
    seeds: Sequence[int],
    controls: set[int],
    overrides: Sequence[str],
    base: int | None = None,
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
                        f"model.path={base_folder(out / 'world', base_of(system), seed if base is None else base)}",
                        *world_paths(out / "world", system, base_of(system)),
                        # The curves are of the held-out questions: no checkpoint is chosen by them.
                        f"data.dev={world_questions(out / 'world', system, 'test')}",
                        f"system.name={system}",
                        f"system.template={prompt}",
                        f"run.seed={seed}",
                        *(one.format(world=out / "world") for one in NEEDS.get(system, ())),
                        *(["grpo.shuffle_rewards=true"] if control else []),
                        *overrides,
                    ],
                )
                folder = out / "runs" / f"{system}{'-control' if control else ''}-seed{seed}"
                name = f"{system}{' control' if control else ''} seed {seed}"
                one = SystemRun(name=name, system=system, seed=seed, control=control, folder=folder, recipe=recipe)
                cases.append(one)
    return cases


def summary_of(case: SystemRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run in one record, with its first and last greedy evaluation on the held-out questions."""
    evals = [record["eval"] for record in records if "eval" in record]
    key, _ = CLAIMS[case.system]
    run = RunFolder(case.folder)
    row = head_of(run)
    row |= {"name": case.name, "system": case.system, "seed": case.seed, "control": case.control}
    row["steps"] = sum("eval" not in record for record in records)
    row["sampled_tokens"] = sum(record.get("sampled_tokens", 0) for record in records)
    for name in ("reward", "em", "f1", key):
        row[f"{name}_before"], row[f"{name}_after"] = measure(evals[0], name), measure(evals[-1], name)
    row["seconds"] = (run.summary() or {})["seconds"]
    return row


def measure(evaluation: Mapping[str, Any], name: str) -> float | None:
    """Return a measure of an evaluation, or else a part of its system's reward."""
    value: float | None = evaluation.get(name, evaluation["parts"].get(name))
    return value


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table: a line for each system and its control, with means over seeds. It has the EM of each seed, and
    the EM minus the control's."""
    lines = [
        "| system | seeds | reward | EM | EM of each seed | minus shuffled, p | its own claim | steps | sampled tokens "
        "| seconds a run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    most = 0
    for system in dict.fromkeys(row["system"] for row in rows):
        for control in (False, True):
            group = [row for row in rows if row["system"] == system and row["control"] == control]
            if group:
                less = None if control else less_control(rows, system)
                most = max(most, less.count if less else 0)
                key, claim = CLAIMS[system]
                each = ", ".join(f"{row['em_after']:.3f}" for row in group)
                name = f"{system}, shuffled rewards" if control else system
                steps = ", ".join(map(str, dict.fromkeys(row["steps"] for row in group)))
                tokens, seconds = (mean(row[what] for row in group) for what in ("sampled_tokens", "seconds"))
                lines.append(
                    f"| {name} | {len(group)} | {_change(group, 'reward')} | "
                    f"{_change(group, 'em')} | {each} | {_in_words(less)} | {claim} {_change(group, key)} | "
                    f"{steps} | {tokens:,.0f} | {seconds:.0f} |"
                )
    if most > 1:
        lines += [
            "",
            "Minus shuffled: EM minus that of the same seed with shuffled rewards, the mean with Student's 95% "
            f"interval, and p of a two-sided sign flip test, over seeds. With {most} seeds no p is below "
            f"{least_p(most):.3g}.",
        ]
    return "\n".join(lines) + "\n"


def less_control(rows: Sequence[Mapping[str, Any]], system: str) -> Difference | None:
    """Return a system's last EM minus its control's, over the seeds that have both; None if there are none."""
    after = {(row["control"], row["seed"]): row["em_after"] for row in rows if row["system"] == system}
    seeds = [seed for control, seed in after if control and (False, seed) in after]
    return compare_seeds(*([after[control, seed] for seed in seeds] for control in (True, False))) if seeds else None


def _in_words(found: Difference | None) -> str:
    if found is None:
        return "-"
    if found.high is None:
        return f"{found.difference:+.3f}"
    return f"{found.difference:+.3f} ± {found.high - found.difference:.3f}, {found.p:.3g}"


def _change(group: Sequence[Mapping[str, Any]], key: str) -> str:
    before, after = ([row[f"{key}_{when}"] for row in group] for when in ("before", "after"))
    if any(value is None for value in (*before, *after)):
        return "-"
    return f"{mean(before):.3f} → {mean(after):.3f}"
