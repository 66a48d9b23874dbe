"""Rollouts with unequal sample lengths, by counting: busy slots, staleness, tokens prefilled again, seconds.

The rollout of step s trains on the next Q groups of G samples, in the order in which groups are started. Up to F groups
are started and not yet trained on (F = Q without `rollout.partial`), so the rollout of step s may start groups up to
s Q + F - 1. A free slot takes the next sample. Each busy slot draws one token per decode step, and the rollout ends
with the decode step in which its own Q groups are complete. Unfinished samples keep their slots.

Updates stop the count of decode steps, so the whole run is one queue of S servers, first come, first served, in which
group g arrives when rollout max(0, ceil((g - F + 1) / Q)) begins. Hence (Kiefer and Wolfowitz 1955, "On the theory of
queues with many servers": starts are monotone in arrivals, services and servers) the decode steps until the end of any
step never grow with F or S, and never shrink with a length. A token is at most floor((F - 1) / Q) updates old when it
is trained on. With F < 2 Q the last 2 Q - F groups of a step start in its own rollout, which is at least as long as
their longest sample. Not counted: searches and judges, for which slots wait, drafts, trees, refilled groups, and a full
KV cache.
"""

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from heapq import heapreplace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean

from thresher.common.errors import UserError
from thresher.common.records import ON_PURPOSE, read_records
from thresher.engine.planning.memory import PlanSetting
from thresher.engine.planning.time import (
    DecodeShape,
    DeviceRates,
    link_rate,
    predicted_decode_s,
    predicted_prefill_s,
    rates_of_item,
    sent_bytes,
)
from thresher.engine.store.run_folder import TRAJECTORY, check_shape
from thresher.policy.config import ModelConfig

SIGMA = 0.9  # assumed standard deviation of the logarithm of sample lengths
MEAN_SHARE = 0.3  # assumed mean length, as a share of a sample's limit
POPULATION = 4096  # number of quantiles that represent a distribution
STEPS = 32  # number of steps that counts are taken over


@dataclass(slots=True)
class RolloutCounts:
    """Counts of the rollouts of `steps` steps.

    batches: (busy slots, busy slots per group) -> decode steps. staleness: updates between sampling and training of a
    token -> tokens trained in these steps. positions: sum over sampled tokens of the sample's tokens up to it. prompts:
    groups started. tokens_again, prompts_again: samples' own tokens, and groups' prompts, that are prefilled again
    because older weights computed their keys and values.
    """

    steps: int = 0
    batches: Counter[tuple[int, int]] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    positions: int = 0
    prompts: int = 0
    tokens_again: int = 0
    prompts_again: int = 0

    def __add__(self, other: "RolloutCounts") -> "RolloutCounts":
        names = (one.name for one in fields(RolloutCounts))
        return RolloutCounts(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def decode_steps(self) -> int:
        return self.batches.total()

    @property
    def drawn(self) -> int:
        """Return the number of sampled tokens."""
        return sum(busy * count for (busy, _), count in self.batches.items())

    @property
    def mean_busy(self) -> float:
        """Return the mean number of busy slots per decode step; 0 without decode steps."""
        return self.drawn / max(self.decode_steps, 1)

    @property
    def mean_staleness(self) -> float:
        """Return the mean staleness of trained tokens, in updates."""
        return sum(age * tokens for age, tokens in self.staleness.items()) / max(self.staleness.total(), 1)


@dataclass(frozen=True, slots=True)
class Queue:
    """The part of a recipe that the count needs. group: samples per group. questions: groups per step. in_flight:
    maximum groups started and not yet trained on. slots: maximum samples decoded at once."""

    group: int
    questions: int
    in_flight: int
    slots: int

    def __post_init__(self) -> None:
        if min(self.group, self.questions, self.slots) < 1 or self.in_flight < self.questions:
            raise ValueError(f"expected counts >= 1 and in_flight >= questions, got {self}")


def count_rollouts(lengths: Sequence[int], queue: Queue) -> list[RolloutCounts]:
    """Return the counts of each step of a run, from idle slots to the last group. lengths: tokens drawn per sample,
    with the samples of a group in a row. Raise ValueError for lengths below 1 and for an incomplete last step."""
    a_step = queue.group * queue.questions
    if not lengths or len(lengths) % a_step or min(lengths) < 1:
        raise ValueError(f"expected lengths >= 1 of whole steps of {a_step} samples, got {len(lengths)}")
    spans, ends = _schedule(lengths, queue)
    found = [RolloutCounts(steps=1) for _ in ends]
    busy, groups = Counter[int](), Counter[int]()  # decode step -> change at its start
    for first in range(0, len(spans), queue.group):
        step, covered = first // a_step, 0
        drawing: set[int] = set()  # rollouts that draw tokens of the group
        for start, end in spans[first : first + queue.group]:
            busy[start] += 1
            busy[end] -= 1
            if end > covered:  # starts are in order, so the parts [max(start, covered), end) are the group's union
                groups[max(start, covered)] += 1
                groups[end] -= 1
                covered = end
            drawn = 0
            while start + drawn < end:
                rollout = bisect_right(ends, start + drawn)
                until = min(end, ends[rollout]) - start
                found[step].staleness[step - rollout] += until - drawn
                found[rollout].positions += (until * (until + 1) - drawn * (drawn + 1)) // 2
                found[rollout].tokens_again += drawn
                drawing.add(rollout)
                drawn = until
        for rollout in drawing:
            found[rollout].prompts_again += 1
        found[min(drawing)].prompts_again -= 1
        found[min(drawing)].prompts += 1
    slots = drawing_groups = 0
    for begin, end in pairwise(sorted({*busy, *groups, *ends})):
        slots, drawing_groups = slots + busy[begin], drawing_groups + groups[begin]
        a_group = max(round(slots / drawing_groups), 1)
        found[bisect_right(ends, begin)].batches[slots, a_group] += end - begin
    return found


def _schedule(lengths: Sequence[int], queue: Queue) -> tuple[list[tuple[int, int]], list[int]]:
    """Return ([begin, end) of each sample, the end of each step's rollout), in decode steps."""
    free = [0] * queue.slots  # a heap of the times at which slots become free
    spans: list[tuple[int, int]] = []
    ends: list[int] = []
    for group in range(len(lengths) // queue.group):
        rollout = max(0, -((queue.in_flight - group - 1) // queue.questions))
        arrives = ends[rollout - 1] if rollout else 0
        for length in lengths[group * queue.group : (group + 1) * queue.group]:
            start = max(arrives, free[0])
            heapreplace(free, start + length)
            spans.append((start, start + length))
        if (group + 1) % queue.questions == 0:
            last = max(end for _, end in spans[-queue.questions * queue.group :])
            ends.append(max(last, ends[-1] if ends else 0))
    return spans, ends


def tail_lengths(
    mean: float = 300.0, longest: int = 1000, sigma: float = SIGMA, samples: int = POPULATION
) -> list[int]:
    """Return sample lengths, longest first: quantiles of a lognormal distribution, none over `longest`. sigma: standard
    deviation of the logarithm. The lengths are scaled so that their mean is near `mean`."""
    quantiles = [math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / samples)) for i in range(samples)]
    low, high = 0.0, longest / quantiles[0]
    for _ in range(50):
        scale = (low + high) / 2
        found = fmean(min(scale * q, longest) for q in quantiles)
        low, high = (scale, high) if found < mean else (low, scale)
    return [max(round(min(high * q, longest)), 1) for q in reversed(quantiles)]


def lengths_of_run(lengths: Sequence[int], samples: int) -> list[int]:
    """Return a length for each sample of a run, with the samples of a group in a row. All of the lengths come in a
    random order, then all of them in another one. The orders are the same in every call. The lengths of a group are
    independent of each other."""
    order, pool, found = random.Random(0), list(lengths), list[int]()
    while len(found) < samples:
        order.shuffle(pool)
        found += pool
    return found[:samples]


def usual_rollouts(lengths: Sequence[int], queue: Queue, steps: int = STEPS) -> RolloutCounts:
    """Return the counts of `steps` steps in the middle of a run with these sample lengths, by `lengths_of_run`."""
    around = 2 * -(-queue.in_flight // queue.questions)
    run = lengths_of_run(lengths, (steps + 2 * around) * queue.group * queue.questions)
    return sum(count_rollouts(run, queue)[around:-around], RolloutCounts())


def predicted_rollout_s(
    config: ModelConfig,
    counts: RolloutCounts,
    prompt: int,
    rates: DeviceRates,
    a_token: float = 1.0,
    stale_cache: bool = False,
) -> float:
    """Return the predicted seconds of a rollout with its prefills, as the mean over the counted ones.

    prompt: tokens shared by a group. a_token: positions of a sample's own per token that it draws, more than 1 if
    searches add some. stale_cache: nothing is prefilled again. All decode steps use the mean of own positions, because
    their time is linear in it.
    """
    own = max(round(a_token * counts.positions / max(counts.drawn, 1)), 1)
    decoding = sum(
        many * predicted_decode_s(config, DecodeShape(batch=busy, group=group, shared=prompt, own=own), rates)
        for (busy, group), many in counts.batches.items()
    )
    fed = (a_token - 1) * counts.drawn + prompt * counts.prompts
    fed += 0 if stale_cache else tokens_again(counts, prompt, a_token)
    return (decoding + predicted_prefill_s(config, fed, rates)) / counts.steps


def tokens_again(counts: RolloutCounts, prompt: int, a_token: float = 1.0) -> float:
    """Return the number of tokens that are prefilled again because older weights computed their keys and values."""
    return a_token * counts.tokens_again + prompt * counts.prompts_again


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRollout:
    """The mean rollout of a step on one GPU. in_flight: maximum groups started and not yet trained on. busy: slots per
    decode step. staleness, max_staleness: of trained tokens, in updates. tokens_again: tokens prefilled again."""

    in_flight: int
    seconds: float
    decode_steps: float
    busy: float
    staleness: float
    max_staleness: int
    tokens_again: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Rollouts of samples with `mean` tokens in the mean and `longest` at most. sigma: of the assumed lognormal
    distribution; None: the lengths were given. slots: maximum samples decoded at once. whole: without rollout.partial.
    partial: with it, by the recipe's settings, or by the defaults if the recipe has it off."""

    mean: float
    longest: int
    sigma: float | None
    slots: int
    whole: PredictedRollout
    partial: PredictedRollout


def predicted_tail(
    config: ModelConfig, s: PlanSetting, rates: DeviceRates, lengths: Sequence[int] | None = None
) -> Tail:
    """Return the predicted rollouts of a recipe. lengths: tokens drawn per sample; None: a lognormal distribution with
    `SIGMA` and a mean of `MEAN_SHARE` times the maximum of a sample."""
    links, own_rates = link_rate(rates, s.gpus), rates_of_item(rates, s.item)
    sending = 0.0 if links is None else sent_bytes(config, s)["rollout"] / links
    a_token = s.own / s.sampled
    sigma = SIGMA if lengths is None else None
    taken = tail_lengths(MEAN_SHARE * s.sampled, s.sampled) if lengths is None else lengths
    taken = [min(max(length, 1), s.sampled) for length in taken]

    def predicted(in_flight: int, stale_cache: bool = False) -> PredictedRollout:
        counts = usual_rollouts(taken, Queue(s.rollout.group_size, s.groups, in_flight, s.rollout.max_num_seqs))
        return PredictedRollout(
            in_flight=in_flight,
            seconds=sending + predicted_rollout_s(config, counts, s.prompt, own_rates, a_token, stale_cache),
            decode_steps=counts.decode_steps / counts.steps,
            busy=counts.mean_busy,
            staleness=counts.mean_staleness,
            max_staleness=max(counts.staleness),
            tokens_again=0.0 if stale_cache else tokens_again(counts, s.prompt, a_token) / counts.steps,
        )

    in_flight = s.groups_in_flight if s.rollout.partial else 2 * s.groups
    return Tail(
        mean=fmean(taken),
        longest=max(taken),
        sigma=sigma,
        slots=s.rollout.max_num_seqs,
        whole=predicted(s.groups),
        partial=predicted(in_flight, s.rollout.stale_cache),
    )


def read_lengths(path: str | Path) -> list[int]:
    """Return the number of policy tokens of each stored trajectory in a file. UserError if there are none, or only
    text."""
    found = []
    for number, record in read_records(path, remedy=ON_PURPOSE):
        check_shape(record, TRAJECTORY, f"{path}:{number}")
        turns = [one for one in record.get("segments") or [] if one.get("source") == "policy"]
        if not all("ids" in turn for turn in turns):
            raise UserError(f"{path}:{number}: expected segments with ids, as a rollout of the policy stores them")
        found.append(sum(len(turn["ids"]) for turn in turns))
    if not any(found):
        raise UserError(f"{path}: expected trajectories in which the policy wrote something")
    return found
