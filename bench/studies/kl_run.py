"""`thresher study kl --run`: the KL estimators on the tokens that a run stored, without a model.

It reads the steps whose trajectories and token statistics are kept (engine/store/token_stats.py). For each token that
was in the update, in float64:

    d = log pi - log ref    recomputed - reference
    r = pi / pi_old         exp(recomputed - sampled); pi_old sampled the token, also with grpo.tis_level
    A                       the token's advantage, or its trajectory's
    value, c                kl_values and kl_coefficient of kernels/objective.py

The figures of a step, and of all steps together, for each estimator:

    mean, standard_error    over tokens; of the mean, over trajectories n, because tokens of one are not independent:
                            sqrt(N / (N - 1) sum_n (sum of value - mean over n's tokens)^2) / P
    variance                of the value, over tokens
    c_mean, c_largest       of |c|
    c_largest_1_percent     the share of the sum of |c| in the largest 1% of the tokens
    pull_median, _largest   of beta |c| / |A|, over the tokens whose A is not 0

A run's values are at the weights that its own estimator led to. The effect of another estimator has to be measured by
training (kl.py).

    kl_run.json, kl_run.png

Axes: N trajectories, P their tokens in updates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thresher.bench.studies.runs import check_out, write_json
from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.reports.pages import open_run, step_files, steps_in_words
from thresher.engine.reports.token_view import policy_counts
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.store.token_stats import read_token_stats
from thresher.kernels.objective import ESTIMATORS, capped_exp, kl_coefficient, kl_values

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of updates, [P], with trajectories concatenated. d_P, log_ratio_P: nats. advantage_P: nan if not
    stored. owner_P: the number of the trajectory, from 0, among those that have a token."""

    d_P: Floats
    log_ratio_P: Floats
    advantage_P: Floats
    owner_P: npt.NDArray[np.int64]


def stored_tokens(run: RunFolder, path: Path) -> Tokens | None:
    """Return the tokens of a step's file of trajectories; None if no log-probs of a reference are stored with it. Raise
    UserError for files that are damaged or do not belong together."""
    records = list(run.stored_trajectories(path))
    stats = read_token_stats(path.with_suffix(".safetensors"), *policy_counts(records))
    if stats is None:
        return None
    parts = []
    for record, entry in zip(records, stats, strict=True):
        values = {name: value.astype(np.float64) for name, value in entry.values.items()}
        if "reference" not in values:
            return None
        whole = math.nan if record.get("advantage") is None else record["advantage"]
        advantage_P = values.get("advantage", np.full(len(values["sampled"]), whole))
        d_P, log_ratio_P = (values["recomputed"] - values[name] for name in ("reference", "sampled"))
        trained_P = ~np.isnan(d_P)
        if trained_P.any():
            owner_P = np.zeros(trained_P.sum(), np.int64)
            parts.append(Tokens(d_P[trained_P], log_ratio_P[trained_P], advantage_P[trained_P], owner_P))
    return joined(parts) if parts else None


def joined(parts: list[Tokens]) -> Tokens:
    """Return the tokens of all parts, which have different trajectories."""
    starts = np.cumsum([0, *(part.owner_P[-1] + 1 for part in parts[:-1])])
    return Tokens(
        np.concatenate([part.d_P for part in parts]),
        np.concatenate([part.log_ratio_P for part in parts]),
        np.concatenate([part.advantage_P for part in parts]),
        np.concatenate([part.owner_P + start for part, start in zip(parts, starts, strict=True)]),
    )


def figures_of(tokens: Tokens, beta: float) -> dict[str, Any]:
    """Return the figures of these tokens; null if undefined, such as a standard error of one trajectory."""
    d_P, ratio_P = torch.from_numpy(tokens.d_P), capped_exp(torch.from_numpy(tokens.log_ratio_P))
    values = kl_values(d_P, ratio_P)
    return {
        "tokens": len(d_P),
        "trajectories": int(tokens.owner_P[-1]) + 1,
        "d_mean": float(tokens.d_P.mean()),
        "d_std": float(tokens.d_P.std()),
        "d_largest": float(np.abs(tokens.d_P).max()),
        "log_ratio_largest": float(np.abs(tokens.log_ratio_P).max()),
        "advantage_0_share": float((tokens.advantage_P == 0).mean()),
        "estimators": {
            name: _estimator(values[name].numpy(), np.abs(kl_coefficient(name, d_P, ratio_P).numpy()), tokens, beta)
            for name in ESTIMATORS
        },
    }


def _estimator(value_P: Floats, size_P: Floats, tokens: Tokens, beta: float) -> dict[str, float | None]:
    """Return one estimator's figures. size_P: |c|."""
    mean, total, count = value_P.mean(), size_P.sum(), len(value_P)
    of_trajectories_N = np.bincount(tokens.owner_P, value_P - mean)
    N = len(of_trajectories_N)
    most = math.ceil(count / 100)
    moved_P = np.abs(tokens.advantage_P) > 0  # not if it is nan
    pull_P = beta * size_P[moved_P] / np.abs(tokens.advantage_P[moved_P])
    return {
        "mean": float(mean),
        "standard_error": math.sqrt(N / (N - 1) * (of_trajectories_N**2).sum()) / count if N > 1 else None,
        "variance": float(value_P.var()),
        "c_mean": float(total / count),
        "c_largest": float(size_P.max()),
        "c_largest_1_percent": float(np.partition(size_P, count - most)[-most:].sum() / total) if total else None,
        "pull_median": float(np.median(pull_P)) if len(pull_P) else None,
        "pull_largest": float(pull_P.max()) if len(pull_P) else None,
    }


def run_study_of_run(out: Path, folder: str) -> None:
    """Write the study of a run's stored tokens into the folder `out`. Raise UserError if no step has any."""
    check_out(out)
    run, recipe = open_run(folder)
    grpo, section = recipe.grpo, recipe.run
    found = {step: stored_tokens(run, path) for step, path in step_files(run.trajectories).items()}
    steps = {step: tokens for step, tokens in found.items() if tokens is not None}
    if not steps:
        raise UserError(
            f"{run.path}: none of its {len(found)} stored steps has log-probs of a reference; train a run with "
            f"grpo.beta > 0 (here {grpo.beta:g}), run.token_stats_mib > 0 (here {section.token_stats_mib}) and "
            f"run.keep_trajectories >= 1 (here {section.keep_trajectories})"
        )
    rows = [{"step": step, **figures_of(tokens, grpo.beta)} for step, tokens in steps.items()]
    every = joined(list(steps.values()))
    overall, left_out = figures_of(every, grpo.beta), [step for step in found if step not in steps]
    gradient = grpo.kl_gradient or grpo.kl_value
    settings = {"run": str(run.path), "beta": grpo.beta, "kl_value": grpo.kl_value, "kl_gradient": gradient}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "kl_run.json", {"settings": settings, "all": overall, "steps": rows, "left_out": left_out})
    from thresher.bench.plots import draw_kl_run  # importing matplotlib takes a second, after the checks

    draw_kl_run(rows, every.d_P, out / "kl_run.png")
    print_figures(overall, settings, steps_in_words(list(steps)))
    if left_out:
        console.console.print(f"Left out: steps {steps_in_words(left_out)}, without log-probs of a reference.")
    console.console.print(f"Picture and figures of each step are in {out}", markup=False, soft_wrap=True)


def print_figures(figures: Mapping[str, Any], settings: Mapping[str, Any], steps: str) -> None:
    """Print the figures of all steps together."""
    console.table(
        f"{settings['run']}, steps {steps}: {figures['tokens']:,} tokens of {figures['trajectories']:,} trajectories",
        ("", "value", "± s.e.", "variance", "mean |c|", "largest", "share of 1%", "β|c|/|A|", "largest"),
        [(name, *found.values()) for name, found in figures["estimators"].items()],
    )
    console.console.print(
        f"d: mean {figures['d_mean']:.3g}, standard deviation {figures['d_std']:.3g}, largest |d| "
        f"{figures['d_largest']:.3g}; largest |log pi/pi_old| {figures['log_ratio_largest']:.3g}. "
        f"{figures['advantage_0_share']:.0%} of the tokens have advantage 0; β|c|/|A| is the median of the others. "
        f"The run's loss has the value of {settings['kl_value']} and the gradient of {settings['kl_gradient']}, "
        f"beta {settings['beta']:g}.",
        markup=False,
        soft_wrap=True,
    )
