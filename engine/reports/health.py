"""Verdict on a run: conditions in which GRPO learns nothing or collapses, found in the records of metrics.jsonl.

A condition computes one value per step (larger is worse) and has a limit. It holds if the mean over the last WINDOW
steps is at least the limit. It began in the first window since which all window means reach the limit, at the first
step of that window with a value at or above it. Values and limits were checked against the demo and 12 runs of
SmolLM2-135M with search (docs/results/smollm2.md): the runs that learn reach no limit at any step; 2 of the 6 runs with
shuffled rewards do. The conditions on stale tokens were checked against small runs with rollout.partial. There is
deliberately no score and no list of passed checks.
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

WINDOW = 8  # steps: with 8 questions each, 64 groups; in shorter windows, healthy runs come near the limit of groups
SOLVED = 0.9  # exact match of sampled answers at or above which there may be nothing left to learn

Value = Callable[[Record], float | None]
Limit = Callable[[float], float]  # computes the limit from the mean of the reference window
Shows = Callable[[Record, Mapping[str, Array]], Any]  # trajectory, its token_stats.py values -> how clearly it shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition to check for. against: the window that the limit is computed from, the first or the one with the
    least mean. cause: the likely cause. advice: what to change, by recipe keys. healthy_if_solved: the condition is no
    fault if the sampled answers are right."""

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
    """A condition that holds. example: where a trajectory that shows it is stored, "" if there is none."""

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
        """Return cause, advice and example as sentences."""
        seen = f" See {self.example}." if self.example else ""
        return f"Likely cause: {self.cause}. To change: {self.advice}.{seen}"


def _dead(groups: int) -> Value:
    def share(record: Record) -> float | None:
        dead = record.get("zero_advantage_groups")
        return None if dead is None else float(dead / groups)

    return share


def _no_gradient(record: Record) -> float | None:
    if "grad_norm" not in record:  # the step trained on no group
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
    """Return the share of clipped tokens if the ratio is taken against log-probs of several versions of the weights."""
    known = record.get("staleness_mean") and "importance_mean" not in record
    return record.get("clipped") if known else None


def _ineffective(record: Record) -> float | None:
    effective = record.get("importance_effective")
    return None if effective is None or not record.get("staleness_mean") else float(1 - effective)


def _negative(key: str) -> Value:
    return lambda record: None if record.get(key) is None else -record[key]


def conditions(groups: int) -> tuple[Condition, ...]:
    """Return the conditions to check in a run with `groups` groups per step."""
    return (
        Condition(
            name="dead groups",
            value=_dead(groups),
            # A step learns from less than a tenth of its samples. Healthy runs with sparse rewards: up to .85.
            limit=lambda _: 0.9,
            cause="all samples of nearly every group get the same reward, for example because no sample is correct",
            advice="raise rollout.group_size, use training questions that the model sometimes answers, or warm the "
            "model up with thresher sft",
            shows=lambda record, _: record.get("advantage") == 0,
            healthy_if_solved=True,
        ),
        Condition(
            name="gradient 0",
            value=_no_gradient,
            limit=lambda _: 1.0,  # every step of the window has a norm at rounding level
            cause="no trajectory has an advantage, and no KL or entropy term adds a gradient",
            advice="raise rollout.group_size, or choose a reward that differs within a group (system.name, "
            "system.options)",
            shows=lambda record, _: record.get("advantage") == 0,
            healthy_if_solved=True,
        ),
        Condition(
            name="format not obeyed",
            value=_unformed,
            limit=lambda _: 0.9,  # share of trajectories without an answer, or share of invalid actions
            cause="the model does not follow the format of the prompt, or reaches a token limit before it answers",
            advice='warm the model up with thresher sft, set model.prompt = "chat" for an instruct model, or raise '
            "rollout.max_turn_tokens",
            shows=lambda record, _: (record.get("answer") is None, _count(record, "feedback")),
        ),
        Condition(
            name="entropy gone",
            value=_entropy,
            # Entropy of a whole response: at .5 nats a group draws from e^.5 = 1.6 texts. Healthy runs: 1.3 and more.
            limit=lambda _: -0.5,
            cause="the updates have sharpened the policy until the samples of a group are copies of each other",
            advice="start again from an earlier checkpoint (model.path) with a lower optim.lr, a higher "
            "rollout.temperature or grpo.clip_high, or grpo.entropy_coef above 0",
            shows=lambda _, values: -_mean(values, "entropy"),
            healthy_if_solved=True,
        ),
        Condition(
            name="length running away",
            value=_cut,
            # The share cut at a token limit, because a mean length hides the tail. If it is as high at the start, the
            # limit is too low for the task, which "format not obeyed" reports. Healthy runs: below .06.
            limit=lambda start: max(0.3, start + 0.2),
            cause='long texts are not penalised, and with grpo.aggregation = "trajectory" a token of a long '
            "wrong text has less weight",
            advice='set grpo.aggregation = "token" or "constant", lower optim.lr, or raise rollout.max_turn_tokens and '
            "rollout.max_context if the task needs the room",
            shows=lambda record, _: sum(policy_counts([record])[0]),
        ),
        Condition(
            name="searches collapsing",
            value=_negative("searches"),
            # A policy may learn to skip every second search; below a third it answers from memory.
            limit=lambda start: start / 3 if start <= -0.5 else math.inf,
            cause="searches do not raise the reward, because the passages lack the answers or the reward "
            "does not need them",
            advice="read the retrieved passages and change retrieval.index, retrieval.k or data.train; a lower "
            "optim.lr or a higher grpo.beta delays it",
            shows=lambda record, _: -len(record.get("searches") or ()),
        ),
        Condition(
            name="right answers less likely",
            value=_negative("right_logprob"),
            # Twice the nats per token of the best window plus .05, because a factor near 0 is noise. "Lazy likelihood
            # displacement", Deng et al. 2025, "On GRPO Collapse in Search-R1", arXiv:2512.04220.
            limit=lambda best: max(2 * best, best + 0.05),
            against="best",
            cause="updates on wrong samples make the tokens that they share with correct ones less likely, which "
            "ends in collapse",
            advice="start again from an earlier checkpoint (model.path) with a lower optim.lr, a higher grpo.beta or "
            "more rollout.questions_per_step",
            shows=lambda record, values: (is_right(record), -_mean(values, "sampled")),
        ),
        Condition(
            name="rollout and update apart",
            value=lambda record: record.get("logprob_gap"),
            # Mean of |difference|. float32 has 1e-6, bfloat16 up to .007. Three times the start is growth; a constant
            # gap of .1 is half of the way to the clip at .2.
            limit=lambda start: min(max(0.02, 3 * start), 0.1),
            cause="the log-probs of the update differ from those of the rollout, because of kernels, dtype or older "
            "weights",
            advice='set grpo.old_logprobs = "recomputed" and grpo.tis_level = "token", model.dtype = "float32", or '
            "fewer grpo.updates_per_batch",
            shows=lambda _, values: _mean(values, "recomputed", "sampled"),
        ),
        Condition(
            name="stale tokens clipped",
            value=_stale_clipped,
            # Small runs with rollout.partial: up to .02; .08 at five times the learning rate.
            limit=lambda _: 0.05,
            cause="the weights have moved away from those that sampled the stale tokens, so the clip removes their "
            "gradient",
            advice='set grpo.old_logprobs = "recomputed" and grpo.tis_level = "token", or lower optim.lr or '
            "rollout.max_staleness",
            shows=lambda _, values: _mean(values, "clipped"),
        ),
        Condition(
            name="few stale samples count",
            value=_ineffective,
            # The effective share of the weights, (sum w)^2 / (n sum w^2). Same runs: .95 or more per token, .7 or more
            # per sequence; .85 and .3 at five times the learning rate.
            limit=lambda _: 0.5,
            cause="a few samples or tokens have nearly all of the importance weight, because the weights have moved "
            "away from those that sampled the others",
            advice='lower optim.lr or rollout.max_staleness, or set grpo.tis_level = "token"',
            shows=lambda _, values: _mean(values, "recomputed", "sampled"),
        ),
    )


def _count(record: Record, source: str) -> int:
    return sum(segment.get("source") == source for segment in record.get("segments") or ())


def _mean(values: Mapping[str, Array], name: str, other: str | None = None) -> float:
    """Return the mean of a trajectory's values, or of their distance to `other`; 0 if they are not stored."""
    if name not in values:
        return 0.0
    of_tokens = values[name].astype(np.float64)
    if other is not None:
        of_tokens = np.abs(of_tokens - values[other])
    known = of_tokens[np.isfinite(of_tokens)]
    return float(known.mean()) if len(known) else 0.0


def findings(records: Sequence[Record], groups: int) -> list[Finding] | None:
    """Return the conditions that hold at the last step, or None before step WINDOW (too early to tell). records: those
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
    """Return the step at which a condition that holds at the end began; None if it does not hold or is unknown."""
    last = list(itertools.islice(_known(condition, reversed(steps)), WINDOW))
    if len(last) < WINDOW:
        return None
    # Read all steps only for conditions that need them: this runs after each step, also in long healthy runs.
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
    """Yield (step, value) of the steps that have a value."""
    values = ((record["step"], condition.value(record)) for record in steps)
    return ((step, value) for step, value in values if value is not None)


def _means(known: Sequence[tuple[int, float]]) -> list[float]:
    """Return the means over each WINDOW consecutive steps."""
    means: list[float] = np.convolve([value for _, value in known], np.full(WINDOW, 1 / WINDOW), "valid").tolist()
    return means


def short_verdict(found: Sequence[Finding] | None) -> str:
    """Return a one-line verdict: "healthy", or the conditions that hold; "" if it is too early to tell."""
    return "" if found is None else ", ".join(finding.short for finding in found) or "healthy"


def health_of(run: RunRecords) -> list[Finding] | None:
    """Return the `findings` of a run folder, each with an example trajectory if one of its steps is stored."""
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


@lru_cache(maxsize=64)  # a view that polls every second reads each file once
def _example(path: Path, stamp: int, unverified: bool, name: str) -> str:
    """Return the place of the trajectory in a step's file that shows a condition most; "" if it cannot be read."""
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
