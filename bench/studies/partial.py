"""`thresher study partial`: does a policy learn as well from partial rollouts? Search-R1 in the invented world.

    thresher study partial --seeds 0 1 2

    world/      the world, and the base that all runs start from         engine/world/stages.py
    runs/       whole-rollout-seed0/ .. stale3-recomputed-seed2/ ..      ordinary run folders
    table.md, partial.json

Each seed has six settings. Rollouts are whole, or partial (rollout.partial) with a maximum staleness of 1 and of 3; the
last has so many slots that no sample waits, which makes most tokens as stale as allowed. Each has old log-probs as
recorded, and recomputed with token weights. Runs of a seed have the same questions in the same steps, and samples with
the same seeds; they differ in the weights that sample a token and in its loss. Where nothing is stale, the two
objectives are equal up to rounding, so their difference shows the effect of rounding alone on a seed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher.bench.studies.runs import StudyRun, check_folder, check_out, head_of, train_all, write_json
from thresher.bench.studies.systems import make_cases, make_world
from thresher.common import console
from thresher.common.files import atomic_write_text
from thresher.engine.store.run_folder import RunFolder, read_metrics
from thresher.rewards.statistics import compare_seeds, least_p, seed_interval

SYSTEM = "search_r1"
LENGTH = ("run.steps=24", "run.eval_every=8")
# stale3 has a slot for each sample that may have started, the others one for each sample of a step.
ROLLOUTS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "stale1": ("rollout.partial=true", "rollout.max_staleness=1"),
    "stale3": ("rollout.partial=true", "rollout.max_staleness=3", "rollout.max_num_seqs=512"),
}
OBJECTIVES = {
    "rollout": ("grpo.old_logprobs=rollout",),
    "recomputed": ("grpo.old_logprobs=recomputed", "grpo.tis_level=token", "grpo.tis_rule=truncate"),
}
LAST = 8  # number of last steps for the mean reward


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRun(StudyRun):
    """One training run: a name of ROLLOUTS and one of OBJECTIVES."""

    rollout: str
    objective: str


def run_study(
    out: Path,
    seeds: Sequence[int],
    base: int,
    overrides: Sequence[str],
    run_command: Callable[[list[str]], None],
) -> None:
    """Write the whole study into the folder `out`. base: seed of the base that all runs start from. overrides: of the
    recipe. run_command: run a command of the world from its arguments."""
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    make_world(out / "world", base, [SYSTEM], run_command)
    cases = cases_of(out, sorted(set(seeds)), base, overrides)
    for case in cases:
        check_folder(case)
    console.console.print(f"study partial: {len(cases)} runs from one base, into {out}")
    started = time.perf_counter()
    train_all(cases, "study partial", lambda one: f"reward {one['reward']:.3f}  EM {one['em']:.3f}")
    rows = [summary_of(case, read_metrics(case.folder)) for case in cases]
    text = markdown(rows)
    atomic_write_text(out / "table.md", text)
    found = {"recipe": cases[0].recipe.to_dict(), "runs": rows, "seconds": time.perf_counter() - started}
    write_json(out / "partial.json", found)
    console.console.print(text, markup=False, soft_wrap=True)


def cases_of(out: Path, seeds: Sequence[int], base: int, overrides: Sequence[str]) -> list[PartialRun]:
    """Return every run, in training order: all settings of a seed, then the next seed's."""
    return [
        PartialRun(
            name=f"{rollout} {objective} seed {case.seed}",
            rollout=rollout,
            objective=objective,
            seed=case.seed,
            folder=out / "runs" / f"{rollout}-{objective}-seed{case.seed}",
            recipe=case.recipe,
        )
        for seed in seeds
        for rollout, kept in ROLLOUTS.items()
        for objective, weighed in OBJECTIVES.items()
        for case in make_cases(out, [SYSTEM], [seed], set(), [*LENGTH, *kept, *weighed, *overrides], base)
    ]


def summary_of(case: PartialRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run in one record. EM is greedy, on the held-out questions; the rest is of the training samples.

    "reward": mean of the last `LAST` steps; "response_tokens": mean over steps; "slots_busy": over the steps in which a
    token was drawn; "staleness": shares of the trained tokens with 0, 1, .. updates; "recomputed_share": tokens
    prefilled again / sampled tokens.
    """
    steps = [record for record in records if "eval" not in record]
    evals = [record["eval"] for record in records if "eval" in record]
    run = RunFolder(case.folder)
    # Whole rollouts have no such metric: all of their tokens are drawn by the weights that they train.
    ages = [step.get("staleness_tokens", [step["loss_tokens"]]) for step in steps]
    counts = [sum(column) for column in zip_longest(*ages, fillvalue=0)]
    sampled = sum(step["sampled_tokens"] for step in steps)
    return {
        **head_of(run),
        "study": "partial",
        "name": case.name,
        "rollout": case.rollout,
        "objective": case.objective,
        "seed": case.seed,
        "steps": len(steps),
        "em": [one["em"] for one in evals],
        "reward": fmean(step["reward"] for step in steps[-LAST:]),
        "response_tokens": fmean(step["response_tokens"] for step in steps),
        "staleness": [count / max(sum(counts), 1) for count in counts],
        "slots_busy": fmean(step["slots_busy"] for step in steps if step["slots_busy"]),
        "recomputed_share": sum(step["tokens_recomputed"] for step in steps) / sampled,
        "sampled_tokens": sampled,
        "forwards": sum(step["forwards"] for step in steps),
        "rollout_seconds": sum(step["rollout_seconds"] for step in steps),
        "seconds": (run.summary() or {})["seconds"],
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a line for each setting. It has the EM of each seed, and EM minus that of whole rollouts with
    the same objective and seed."""
    lines = [
        "| rollouts | old log-probs | EM of each seed | mean | minus whole, p | reward | tokens a sample "
        "| staleness 0, 1, .. | slots busy | prefilled again | forwards |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for objective in OBJECTIVES:
        whole = [row["em"][-1] for row in rows if (row["rollout"], row["objective"]) == ("whole", objective)]
        for rollout in ROLLOUTS:
            group = [row for row in rows if (row["rollout"], row["objective"]) == (rollout, objective)]
            last = [row["em"][-1] for row in group]
            means = {
                key: fmean(row[key] for row in group)
                for key in ("reward", "response_tokens", "slots_busy", "recomputed_share", "forwards")
            }
            ages = zip_longest(*(row["staleness"] for row in group), fillvalue=0.0)
            lines.append(
                f"| {rollout} | {objective} | {', '.join(f'{em:.3f}' for em in last)} | {seed_interval(last)} | "
                f"{'-' if rollout == 'whole' else less_whole(whole, last)} | {means['reward']:.3f} | "
                f"{means['response_tokens']:.1f} | {', '.join(f'{fmean(age):.0%}' for age in ages)} | "
                f"{means['slots_busy']:.0%} | {means['recomputed_share']:.0%} | {means['forwards']:,.0f} |"
            )
    seeds = len({row["seed"] for row in rows})
    if seeds > 1:
        lines += [
            "",
            "Minus whole: EM minus that of the same seed and objective with whole rollouts, the mean with Student's "
            f"95% interval, and p of a two-sided sign flip test, over seeds. With {seeds} seeds no p is below "
            f"{least_p(seeds):.3g}.",
        ]
    return "\n".join(lines) + "\n"


def less_whole(whole: Sequence[float], partial: Sequence[float]) -> str:
    """Return in words the difference of the second minus the first, seed by seed."""
    found = compare_seeds(whole, partial)
    if found.high is None:
        return f"{found.difference:+.3f}"
    return f"{found.difference:+.3f} ± {found.high - found.difference:.3f}, {found.p:.3g}"
