"""Verdict on a run: conditions in which GRPO learns nothing or collapses, found in the records of metrics.jsonl.

A condition has a value for each step, of which larger is worse, and a limit. It holds while the mean over the last
WINDOW steps is at least the limit, and began at the first step of the first such window whose own value is. Values and
limits were held against the demo and 12 runs of SmolLM2-135M that searches (docs/results/smollm2.md): those that learn
reach no limit at any step, of the 6 with shuffled rewards two do. Those of stale tokens were held against tiny runs
with rollout.partial. Deliberately absent: a score, and what has passed.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from thresher.common.errors import UserError
from thresher.engine.reports.pages import Record, RunRecords, is_right, step_files
from thresher.engine.reports.token_view import policy_counts
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.store.token_stats import Array, read_token_stats

WINDOW = 8  # steps: with 8 questions each, 64 groups; shorter windows of healthy runs come near the limit of groups
SOLVED = 0.9  # exact match of sampled answers from which a policy may have nothing left to learn

Value = Callable[[Record], float | None]
Limit = Callable[[float], float]  # from the mean that the value is held against
Shows = Callable[[Record, Mapping[str, Array]], Any]  # of a trajectory and its token_stats.py values: larger shows more


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition to look for. against: the window that its limit follows from, the first or the one of the least mean.
    cause: its likely one. advice: what to change, by keys of the recipe. healthy_if_solved: it is no fault where the
    sampled answers are right."""

    name: str
    value: Value
    limit: Limit
    cause: str
    advice: str
    shows: Shows
    against: Literal["start", "best"] = "start"
    healthy_if_solved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A condition that holds. example: where a trajectory that shows it is stored, "" where none is."""

    name: str
    since_step: int
    cause: str
    advice: str
    example: str = ""

    @property
    def short(self) -> str:
        return f"{self.name} since step {self.since_step}"

    @property
    def explanation(self) -> str:
        """Cause, advice and example, as sentences."""
        seen = f" See {self.example}." if self.example else ""
        return f"Likely cause: {self.cause}. To change: {self.advice}.{seen}"


def _dead(groups: int) -> Value:
    def share(record: Record) -> float | None:
        dead = record.get("zero_advantage_groups")
        return None if dead is None else float(dead / groups)

    return share


def _no_gradient(record: Record) -> float | None:
    if "grad_norm" not in record:  # no group of the step was trained on
        return float(record["train_tokens"] == 0) if "train_tokens" in record else None
    norm = record["grad_norm"]
    return None if norm is None else float(norm < 1e-6)


def _unformed(record: Record) -> float | None:
    answered, actions = record.get("answered"), record.get("actions")
    if answered is None:
        return None
    return max(1.0 - float(answered), (record.get("invalid_actions") or 0.0) / actions if actions else 0.0)


def _entropy(record: Record) -> float | None:
    entropy, tokens = record.get("entropy"), record.get("response_tokens")
    return None if entropy is None or tokens is None else float(-entropy * tokens)


def _cut(record: Record) -> float | None:
    reasons, questions = record.get("reasons"), record.get("questions")
    if reasons is None or not questions:
        return None
    return float(sum(reasons.get(name, 0) for name in ("turn_tokens", "tokens", "context")) / questions)


def _stale_clipped(record: Record) -> float | None:
    """Return the share of clipped tokens, where the ratio is taken against log-probs of several versions."""
    known = record.get("staleness_mean") and "importance_mean" not in record
    return record.get("clipped") if known else None


def _ineffective(record: Record) -> float | None:
    effective = record.get("importance_effective")
    return None if effective is None or not record.get("staleness_mean") else float(1 - effective)


def _negative(key: str) -> Value:
    return lambda record: None if record.get(key) is None else -record[key]


def conditions(groups: int) -> tuple[Condition, ...]:
    """Return the conditions to look for in a run of so many groups a step."""
    return (
        Condition(
            name="dead groups",
            value=_dead(groups),
            # A step learns from less than a tenth of its samples. Healthy runs with sparse rewards: up to .85.
            limit=lambda _: 0.9,
            cause="all samples of nearly every group get the same reward, as where no sample is right",
            advice="raise rollout.group_size, take questions in data.train that are sometimes answered, or warm the "
            "model up with thresher sft",
            shows=lambda record, _: record.get("advantage") == 0,
            healthy_if_solved=True,
        ),
        Condition(
            name="gradient 0",
            value=_no_gradient,
            limit=lambda _: 1.0,  # each of the steps, with a norm below what is left by rounding
            cause="no trajectory has an advantage, and no KL or entropy term adds a gradient",
            advice="raise rollout.group_size, or reward what differs within a group (system.name, system.options)",
            shows=lambda record, _: record.get("advantage") == 0,
            healthy_if_solved=True,
        ),
        Condition(
            name="format not obeyed",
            value=_unformed,
            limit=lambda _: 0.9,  # of the trajectories without an answer, or of the actions invalid
            cause="the model does not know the form that the prompt asks for, or is cut before it answers",
            advice='warm the model up with thresher sft, set model.prompt = "chat" for an instruct model, or raise '
            "rollout.max_turn_tokens",
            shows=lambda record, _: (record.get("answer") is None, _count(record, "feedback")),
        ),
        Condition(
            name="entropy gone",
            value=_entropy,
            # Entropy of a whole response: at .5 nats a group draws from e^.5 = 1.6 texts. Healthy runs: from 1.3 on.
            limit=lambda _: -0.5,
            cause="the updates have sharpened the policy until the samples of a group are copies of one another",
            advice="begin again from an earlier checkpoint (model.path) with a lower optim.lr, a higher "
            "rollout.temperature or grpo.clip_high, or grpo.entropy_coef above 0",
            shows=lambda _, values: -_mean(values, "entropy"),
            healthy_if_solved=True,
        ),
        Condition(
            name="length running away",
            value=_cut,
            # The share cut at a limit of tokens, for a mean length hides the tail. One that was as high at the start is
            # a limit too low for the task, and is found as a format that is not obeyed. Healthy runs: below .06.
            limit=lambda start: max(0.3, start + 0.2),
            cause='long texts cost nothing, and with grpo.aggregation = "trajectory" a token of a long '
            "wrong text weighs less",
            advice='set grpo.aggregation = "token" or "constant", lower optim.lr, or raise rollout.max_turn_tokens and '
            "rollout.max_context if the task needs the room",
            shows=lambda record, _: sum(policy_counts([record])[0]),
        ),
        Condition(
            name="searches collapsing",
            value=_negative("searches"),
            # A policy may learn to do without every other search; below a third it answers from memory.
            limit=lambda start: start / 3 if start <= -0.5 else math.inf,
            cause="searching earns nothing, as the passages do not hold the answers or the reward needs none",
            advice="read what is found and change retrieval.index, retrieval.k or data.train; a lower optim.lr or a "
            "higher grpo.beta delays it",
            shows=lambda record, _: -len(record.get("searches") or ()),
        ),
        Condition(
            name="right answers less likely",
            value=_negative("right_logprob"),
            # Twice the nats a token of the best window, and .05 more, for near 0 a factor is noise. "Lazy likelihood
            # displacement", Deng et al. 2025, "On GRPO Collapse in Search-R1", arXiv:2512.04220.
            limit=lambda best: max(2 * best, best + 0.05),
            against="best",
            cause="updates against wrong samples push down the tokens that right ones share with them, which ends in "
            "collapse",
            advice="begin again from a checkpoint before it (model.path) with a lower optim.lr, a higher grpo.beta or "
            "more rollout.questions_per_step",
            shows=lambda record, values: (is_right(record), -_mean(values, "sampled")),
        ),
        Condition(
            name="rollout and update apart",
            value=lambda record: record.get("logprob_gap"),
            # Mean of |difference|. float32 has 1e-6, bfloat16 up to .007. Three times the start is growth; a gap of .1
            # from the start on is half of the way to the clip at .2.
            limit=lambda start: min(max(0.02, 3 * start), 0.1),
            cause="the update computes other log-probs than the rollout did, by kernels, dtype or older weights",
            advice='set grpo.old_logprobs = "recomputed" and grpo.tis_level = "token", model.dtype = "float32", or '
            "fewer grpo.updates_per_batch",
            shows=lambda _, values: _mean(values, "recomputed", "sampled"),
        ),
        Condition(
            name="stale tokens clipped",
            value=_stale_clipped,
            # Small runs with rollout.partial: up to .02, at five times the learning rate .08.
            limit=lambda _: 0.05,
            cause="the weights have moved away from those that drew the stale tokens, whose gradient the clip removes",
            advice='set grpo.old_logprobs = "recomputed" and grpo.tis_level = "token", or lower optim.lr or '
            "rollout.max_staleness",
            shows=lambda _, values: _mean(values, "clipped"),
        ),
        Condition(
            name="few stale samples count",
            value=_ineffective,
            # The effective share of the weights, (sum w)^2 / (n sum w^2). The same runs: from .95 on by token, from .7
            # on by sequence, and at five times the learning rate .85 and .3.
            limit=lambda _: 0.5,
            cause="a few samples or tokens have nearly all of the importance weight, for the weights have moved away "
            "from those that drew the others",
            advice='lower optim.lr or rollout.max_staleness, or set grpo.tis_level = "token"',
            shows=lambda _, values: _mean(values, "recomputed", "sampled"),
        ),
    )


def _count(record: Record, source: str) -> int:
    return sum(segment.get("source") == source for segment in record.get("segments") or ())


def _mean(values: Mapping[str, Array], name: str, other: str | None = None) -> float:
    """Return the mean of a trajectory's values, or of their distance to others; 0 where none is stored."""
    if name not in values:
        return 0.0
    of_tokens = values[name].astype(np.float64)
    if other is not None:
        of_tokens = np.abs(of_tokens - values[other])
    known = of_tokens[np.isfinite(of_tokens)]
    return float(known.mean()) if len(known) else 0.0


def findings(records: Sequence[Record], groups: int) -> list[Finding] | None:
    """Return the conditions that hold at the last step; None before step WINDOW, which is too early to tell. records:
    of metrics.jsonl. groups: rollout.questions_per_step."""
    steps = [record for record in records if "eval" not in record]
    if len(steps) < WINDOW:
        return None
    solved = sum(record.get("em") or 0.0 for record in steps[-WINDOW:]) / WINDOW >= SOLVED
    found = []
    for condition in conditions(groups):
        since = None if solved and condition.healthy_if_solved else _since(condition, steps)
        if since is not None:
            found.append(Finding(name=condition.name, since_step=since, cause=condition.cause, advice=condition.advice))
    return found


def _since(condition: Condition, steps: Sequence[Record]) -> int | None:
    """Return the step at which a condition began that holds at the end; None where it does not, or is not known."""
    last = list(itertools.islice(_known(condition, reversed(steps)), WINDOW))
    if len(last) < WINDOW:
        return None
    # All steps are read only for what needs them: a long run that is healthy is asked after each step.
    begun = _known(condition, steps)
    means = _means(list(begun if condition.against == "best" else itertools.islice(begun, WINDOW)))
    limit = condition.limit(min(means))
    if not sum(value for _, value in last) / WINDOW >= limit:
        return None
    known = list(_known(condition, steps))
    means = _means(known)
    first = len(means) - 1
    while first and means[first - 1] >= limit:
        first -= 1
    window = known[first : first + WINDOW]
    return next((step for step, value in window if value >= limit), window[-1][0])


def _known(condition: Condition, steps: Iterable[Record]) -> Iterator[tuple[int, float]]:
    """Yield the steps that have a value, with it."""
    values = ((record["step"], condition.value(record)) for record in steps)
    return ((step, value) for step, value in values if value is not None)


def _means(known: Sequence[tuple[int, float]]) -> list[float]:
    """Return the mean over each WINDOW steps."""
    means: list[float] = np.convolve([value for _, value in known], np.full(WINDOW, 1 / WINDOW), "valid").tolist()
    return means


def short_verdict(found: Sequence[Finding] | None) -> str:
    """Return a verdict for a line: "healthy", or the conditions that hold; "" where it is too early to tell."""
    return "" if found is None else ", ".join(finding.short for finding in found) or "healthy"


def health_of(run: RunRecords) -> list[Finding] | None:
    """Return `findings` of a run folder, each with a trajectory that shows it where those of its steps are stored."""
    found = findings(run.records, run.recipe.rollout.questions_per_step)
    if not found:
        return found
    stored = step_files(run.folder.trajectories)
    result = []
    for finding in found:
        path = next((path for step, path in stored.items() if step >= finding.since_step), None)
        if path is not None:
            example = _example(path, path.stat().st_mtime_ns, run.folder.unverified, finding.name)
            finding = replace(finding, example=example)
        result.append(finding)
    return result


@lru_cache(maxsize=64)  # a view that looks every second reads each file once
def _example(path: Path, stamp: int, unverified: bool, name: str) -> str:
    """Return the place of the trajectory in a step's file that shows a condition most; "" where it cannot be read."""
    shows = next(condition.shows for condition in conditions(1) if condition.name == name)
    try:
        records = list(RunFolder(path.parent.parent, unverified=unverified).stored_trajectories(path))
        stats = read_token_stats(path.with_suffix(".safetensors"), *policy_counts(records), unverified=unverified)
    except (UserError, OSError):
        return ""
    if not records:
        return ""
    at = max(range(len(records)), key=lambda n: shows(records[n], stats[n].values if stats else {}))
    group, sample = records[at].get("group"), records[at].get("sample")
    return f"{path.parent.name}/{path.name}, line {at + 1} (group {group}, sample {sample})"
