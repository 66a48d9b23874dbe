"""A run's curves as plain data: what the papers' figures show, and where the time went.

`charts_of` turns metrics records into charts: a title, a caption, series of numbers. A value that is missing or null (a
number that was not finite) is a gap in its curve; a curve without any value is left out, and so is a chart without a
curve. engine/reporting/plots.py draws them.

Deliberately absent: any choice of what a measure means, and smoothing of the numbers, which is the drawing's business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]

BLUE, ORANGE, GREEN, PURPLE, RED, GREY, SKY = (
    "#2f6db5",
    "#d9661f",
    "#2f9270",
    "#8759b0",
    "#c23b3b",
    "#8b929c",
    "#8fbbe6",
)
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
SAMPLED, HELD_OUT = "sampled, training questions", "greedy, held-out questions"
ENDINGS = {  # as Trajectory.reason has them
    "turns": ("turn limit", BLUE),
    "turn_tokens": ("turn too long", ORANGE),
    "tokens": ("token limit", PURPLE),
    "context": ("context full", RED),
    "ended": ("text ended", GREY),
}


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: steps [n] ascending, values [n] with nan for a gap. `dots` marks every point and smooths none.
    spread [n]: the deviation over runs of which `values` are the means, drawn as a band, on a log axis as far below the
    mean as above; None for one run."""

    label: str
    color: str
    steps: Floats
    values: Floats
    dots: bool = False
    spread: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over steps that share an axis. `name` is the file's, `stacked` draws filled layers, `rule` a dashed
    line."""

    name: str
    title: str
    caption: str
    series: tuple[Series, ...]
    percent: bool = False
    log: bool = False
    stacked: bool = False
    rule: tuple[float, str] | None = None


def charts_of(
    records: Sequence[Record], *, kl_value: str, beta: float, max_grad_norm: float, groups: int
) -> list[Chart]:
    """The charts that these metrics records fill, in the order of reading.

    kl_value, beta, max_grad_norm: the recipe's, for captions and for the line at which gradients are clipped.
    groups: questions of a step, of which `zero_advantage_groups` counts some.
    """
    steps = [record for record in records if "eval" not in record]
    evals = [{"step": record["step"], **(record["eval"] or {})} for record in records if "eval" in record]

    def line(key: str, label: str, color: str) -> Series:
        return _series(steps, lambda record: _number(record, key), label, color)

    def per_step(top: str, bottom: str, label: str, color: str) -> Series:
        return _series(steps, lambda record: _ratio(_number(record, top), _number(record, bottom)), label, color)

    def both(key: str) -> tuple[Series, ...]:
        held_out = _series(evals, lambda record: _number(record, key), HELD_OUT, ORANGE, dots=True)
        return line(key, SAMPLED, BLUE), held_out

    return _filled(
        [
            *_learning(line, both, kl_value, beta),
            *_own(steps, evals, both),
            *_health(steps, line, max_grad_norm, groups),
            *_speed(line, per_step),
        ]
    )


Line = Callable[[str, str, str], Series]


def _learning(line: Line, both: Callable[[str], tuple[Series, ...]], kl_value: str, beta: float) -> list[Chart]:
    kl = (
        f"The recipe adds {beta:g} × {kl_value} to the loss."
        if beta > 0 and kl_value != "none"
        else "The recipe's loss has none."
    )
    return [
        Chart(
            name="reward",
            title="Reward",
            caption="Mean reward of a trajectory. The advantage of a sample is its reward against its group's mean.",
            series=both("reward"),
        ),
        Chart(
            name="em",
            title="Exact match",
            caption="Share of right answers. Greedy answers jump when the likeliest choice flips at one point of an"
            " episode; sampled answers show the probabilities moving underneath.",
            series=both("em"),
            percent=True,
        ),
        Chart(
            name="kl",
            title="KL to the reference, by estimator",
            caption="Means over sampled tokens of d = log p - log p_ref: k1 = d, unbiased, and of either sign;"
            f" k2 = d²/2; k3 = e^(-d) - 1 + d. {kl}",
            series=(line("kl_k1", "k1", BLUE), line("kl_k2", "k2", ORANGE), line("kl_k3", "k3", GREEN)),
        ),
        Chart(
            name="kl_largest",
            title="KL of a single token, largest",
            caption="Over a step's sampled tokens: the value that the loss adds (before β), and |dKL/d log p|, the"
            " coefficient of the token's gradient. k3's coefficient is e^(-d) - 1 and explodes where the policy"
            " samples what it has nearly given up; k2's is d.",
            series=(line("kl_largest", "value", BLUE), line("kl_coefficient_largest", "coefficient", ORANGE)),
            log=True,
        ),
        Chart(
            name="length",
            title="Response length (tokens)",
            caption="Tokens that the policy wrote in a trajectory, all its turns together; retrieved text not counted.",
            series=both("response_tokens"),
        ),
        Chart(
            name="searches",
            title="Valid searches per trajectory",
            caption="Searches that held a query and were answered with passages.",
            series=both("searches"),
        ),
        Chart(
            name="entropy",
            title="Entropy (nats per sampled token)",
            caption="Of the policy's next-token distribution, over the tokens that it sampled.",
            series=(line("entropy", "entropy", BLUE),),
        ),
    ]


def _own(steps: Sequence[Record], evals: Sequence[Record], both: Callable[[str], tuple[Series, ...]]) -> list[Chart]:
    """What the run's system has of its own: its reward's parts, and measures of what it writes between its tags.

    Parts that are named after another (answer, answer_full, answer_evidence) share a chart with it; one that leaves
    [0, 1] (a bonus, a count) has one to itself; the rest share one.
    """
    names = list(dict.fromkeys(name for record in (*steps, *evals) for name in record.get("parts") or {}))
    large = {name for name in names if any(_part(name, record) > 1 for record in (*steps, *evals))}
    families = {first: [name for name in names if name == first or name.startswith(f"{first}_")] for first in names}
    charts: dict[str, list[str]] = {}
    for name in names:
        first = next((first for first, members in families.items() if len(members) > 1 and name in members), None)
        alone = name if name in large else ""
        charts.setdefault(alone if first is None else first, []).append(name)
    drawn = []
    for key, members in charts.items() if len(names) > 1 else ():  # a single part is the reward
        title = "Parts of the reward" if not key and len(members) > 1 else f"Reward's part: {key or members[0]}"
        drawn.append(
            Chart(
                name=f"parts_{key}" if key else "parts",
                title=title,
                caption="Means over trajectories, as the system's reward has them, before any weight.",
                series=_part_series(steps, evals, members),
            )
        )
    recalls = {"recall_evidence": "evidence", "recall_rationale": "rationale", "recall_notes": "notes"}
    recalls |= {"recall_evaluation": "evaluations", "recall_analysis": "analysis"}
    return [
        *drawn,
        Chart(
            name="compression",
            title="Compression ratio",
            caption="Length of the passages over that of the evidence, by question; those without evidence left out.",
            series=both("compression"),
        ),
        Chart(
            name="recall",
            title="Answer recall",
            caption="Share of trajectories in which a gold answer stands in the text. Sampled, training questions.",
            series=tuple(
                _series(steps, partial(_number, key=key), label, color)
                for (key, label), color in zip(recalls.items(), PALETTE, strict=False)
            ),
            percent=True,
        ),
    ]


def _part_series(steps: Sequence[Record], evals: Sequence[Record], names: Sequence[str]) -> tuple[Series, ...]:
    """A curve for each part of the sampled trajectories; of a single part those of the evaluations too."""
    if len(names) > 1:
        return tuple(
            _series(steps, partial(_part, name), name, PALETTE[place % len(PALETTE)])
            for place, name in enumerate(names)
        )
    sampled = _series(steps, partial(_part, names[0]), SAMPLED, BLUE)
    return sampled, _series(evals, partial(_part, names[0]), HELD_OUT, ORANGE, dots=True)


def _part(name: str, record: Record) -> float:
    parts = record.get("parts")
    return _number(parts, name) if isinstance(parts, Mapping) else float("nan")


def _health(steps: Sequence[Record], line: Line, max_grad_norm: float, groups: int) -> list[Chart]:
    rule = (max_grad_norm, f"clipped to {max_grad_norm:g}") if np.isfinite(max_grad_norm) else None
    return [
        Chart(
            name="zero_advantage",
            title="Groups without a signal",
            caption="Share of groups whose samples all got the same reward: all advantages are 0, and the group teaches"
            " nothing. High at both ends: nothing right yet, or everything.",
            series=(
                _series(
                    steps, lambda record: _ratio(_number(record, "zero_advantage_groups"), groups), "groups", PURPLE
                ),
            ),
            percent=True,
        ),
        Chart(
            name="grad_norm",
            title="Gradient norm",
            caption="Before clipping, over all weights.",
            series=(line("grad_norm", "norm", BLUE),),
            rule=rule,
        ),
        Chart(
            name="logprob_gap",
            title="Log-prob gap, sampling to training",
            caption="|log p when sampled - log p when trained| of the same token under the same weights: it should be"
            " rounding and no more. If it grows, sampler and trainer disagree. (With several updates a batch, the mean"
            " also holds what the earlier ones changed.)",
            series=(line("logprob_gap_max", "largest", RED), line("logprob_gap", "mean", BLUE)),
            log=True,
        ),
        Chart(
            name="unanswered",
            title="Trajectories without an answer",
            caption="Share that ended otherwise than by answering, by what ended them.",
            series=tuple(
                _series(steps, partial(_reason_share, reason), label, color)
                for reason, (label, color) in ENDINGS.items()
                if any(_reason_share(reason, record) > 0 for record in steps)
            ),
            percent=True,
            stacked=True,
        ),
    ]


def _speed(line: Line, per_step: Callable[[str, str, str, str], Series]) -> list[Chart]:
    parts = (
        ("update", "update", GREEN),
        ("decode", "decode", BLUE),
        ("prefill", "prefill", SKY),
        ("search", "search", ORANGE),
        ("host", "host", GREY),
        ("reward", "reward", PURPLE),
    )
    return [
        Chart(
            name="tokens_per_s",
            title="Tokens per second",
            caption="Rollout: tokens sampled per second of rollout, searches included. Update: tokens of packed"
            " trajectories (prompts and passages too) per second of update.",
            series=(
                per_step("sampled_tokens", "rollout_seconds", "rollout", BLUE),
                per_step("train_tokens", "update_seconds", "update", GREEN),
            ),
        ),
        Chart(
            name="time",
            title="Seconds per step",
            caption="Rollout is decode + prefill + search + host (everything in Python around them); then the rewards"
            " and the update (reference, forward, backward, optimiser).",
            series=tuple(line(f"{key}_seconds", label, color) for key, label, color in parts),
            stacked=True,
        ),
    ]


def _series(
    records: Sequence[Record], value: Callable[[Record], float], label: str, color: str, dots: bool = False
) -> Series:
    steps = np.array([record["step"] for record in records], np.float64)
    return Series(label, color, steps, np.array([value(record) for record in records], np.float64), dots)


def _filled(charts: Sequence[Chart]) -> list[Chart]:
    """The charts with a value in them, each without its empty curves (0 or less is empty on a log axis)."""
    kept = []
    for chart in charts:
        drawn = []
        for series in chart.series:
            hidden = series.values <= 0 if chart.log else np.zeros(len(series.values), bool)
            values = np.where(hidden, np.nan, series.values)
            if np.isfinite(values).any():
                drawn.append(replace(series, values=values))
        if drawn:
            kept.append(replace(chart, series=tuple(drawn)))
    return kept


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else float("nan")


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else float("nan")


def _reason_share(reason: str, record: Record) -> float:
    reasons = record.get("reasons")
    count = reasons.get(reason, 0) if isinstance(reasons, Mapping) else 0
    return _ratio(float(count), _number(record, "questions"))
