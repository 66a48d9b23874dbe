"""Old log-probs recomputed by the update, and the importance weights between them and the rollout's log-probs.

    w_t = pi_old(y_t) / pi_rollout(y_t) = exp(l_t - m_t)                      "token"
    w   = prod_t w_t = exp(sum_t (l_t - m_t)), of a context, for its tokens  "sequence"
    truncate   min(w, cap)                       TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
                                                 Off-Policy RL Training"; cap 2 there
    mask       w if floor <= w <= cap, else 0    IcePop (Ling Team 2025), by token; verl's rollout correction, both

l_t is the log-prob of a sampled token under the weights of the rollout, computed by the update before its first step;
m_t is the log-prob recorded when the token was sampled. In one dtype with the same kernels they are equal up to
rounding. Where they are not, the ratio of the surrogate is taken against l_t, and w multiplies the advantage, that is
the whole surrogate term: w min(r A, clip(r) A). KL and entropy keep their weight, and so does the aggregation: a masked
token counts in |y|.

A step's record has the mean and the largest of the weights before they are bounded, the share that is bounded, and the
effective sample share (sum w)^2 / (n sum w^2) over n tokens or sequences (Kish 1965; 1 is the best). Each rank sums
over its own trajectories, and rank 0 adds the sums. Exponents are capped at 80.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing import TrainSequence
from thresher.engine.training.update import Updater

EXP_CAP = 80.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSums:
    """Sums of one rank's importance weights before they are bounded. count: number of tokens or sequences."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    bounded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLogprobs:
    """Results of the forward before a step's first update, on one rank. The gap is between its log-probs and the
    rollout's, in nats, over the tokens sampled with the same weights. The sums of the importance weights are 0 without
    weights."""

    tokens: int
    gap: float  # sum of the absolute values, over tokens
    gap_largest: float
    seconds: float
    weights: WeightSums


def recomputed_logprobs_record(ranks: Sequence[RecomputedLogprobs]) -> dict[str, float]:
    """Return the entries of a step's record from the results of all ranks."""
    weights = [found.weights for found in ranks]
    count, squares = sum(w.count for w in weights), math.fsum(w.squares for w in weights)
    total = math.fsum(w.total for w in weights)
    record = {"recompute_seconds": max(found.seconds for found in ranks)}
    tokens, gap = sum(found.tokens for found in ranks), math.fsum(found.gap for found in ranks)
    record |= gap_entries(tokens, gap, max(found.gap_largest for found in ranks))
    if not count:
        return record
    return record | {
        "importance_mean": total / count,
        "importance_max": max(w.largest for w in weights),
        "importance_bounded": sum(w.bounded for w in weights) / count,
        "importance_effective": total**2 / (count * squares) if squares else 0.0,
    }


def gap_entries(tokens: int, total: float, largest: float) -> dict[str, float]:
    """Return the entries of a record on the gap between recorded and recomputed log-probs; {} for no tokens. They are
    the mean over `tokens`, from their sum `total`, and the largest, in nats."""
    return {"logprob_gap": total / tokens, "logprob_gap_max": largest} if tokens else {}


def logprob_gaps(sequences: Sequence[TrainSequence], computed: Sequence[Sequence[float]]) -> list[float]:
    """Return the distance between recorded and computed log-prob of each token that is not stale."""
    return [
        abs(now - then)
        for one, logprobs in zip(sequences, computed, strict=True)
        for now, then in list(zip(logprobs, one.old_logprobs, strict=True))[one.stale :]
    ]


def recompute_logprobs(
    updater: Updater, by_update: Sequence[list[TrainSequence]], grpo: GrpoSection, temperature: float
) -> tuple[list[list[TrainSequence]], RecomputedLogprobs]:
    """Recompute the old log-probs of each optimiser step's sequences with the current policy. Return the sequences with
    them, and with importance weights if the recipe has them, and the statistics."""
    started = time.perf_counter()
    sequences = [one for of_update in by_update for one in of_update]
    rollout = [one.old_logprobs for one in sequences]
    # Each update's separately, packed as the update packs them: before the first one, a ratio is then 1 to the bit.
    own = [values for of_update in by_update for values in updater.logprobs(of_update, temperature)]
    gaps = logprob_gaps(sequences, own)
    weights, sums = importance_weights(own, rollout, grpo)
    renewed = iter(
        replace(one, old_logprobs=mine, importance=weight)
        for one, mine, weight in zip(sequences, own, weights, strict=True)
    )
    return [[next(renewed) for _ in of_update] for of_update in by_update], RecomputedLogprobs(
        tokens=len(gaps),
        gap=math.fsum(gaps),
        gap_largest=max(gaps, default=0.0),
        seconds=time.perf_counter() - started,
        weights=sums,
    )


def importance_weights(
    own: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]], grpo: GrpoSection
) -> tuple[list[list[float] | None], WeightSums]:
    """Return the importance weight of each token, and the sums of the unbounded weights. None: the recipe has no
    weights. own, rollout: the tokens' log-probs by the update and by the rollout."""
    if grpo.tis_level == "none":
        return [None] * len(own), WeightSums()
    logs = [[now - then for now, then in zip(*pair, strict=True)] for pair in zip(own, rollout, strict=True)]
    if grpo.tis_level == "sequence":
        logs = [[math.fsum(values)] for values in logs if values]
    raw = [[math.exp(min(value, EXP_CAP)) for value in values] for values in logs]
    bounded = [[_bounded(w, grpo) for w in values] for values in raw]
    if grpo.tis_level == "sequence":
        of_sequence = iter(bounded)
        bounded = [next(of_sequence) * len(values) if values else [] for values in own]
    return list(bounded), _sums([w for values in raw for w in values], grpo)


def _bounded(w: float, grpo: GrpoSection) -> float:
    if grpo.tis_rule == "truncate":
        return min(w, grpo.tis_cap)
    floor = 1.0 / grpo.tis_cap if grpo.tis_floor is None else grpo.tis_floor
    return w if floor <= w <= grpo.tis_cap else 0.0


def _sums(raw: list[float], grpo: GrpoSection) -> WeightSums:
    return WeightSums(
        count=len(raw),
        total=math.fsum(raw),
        squares=math.fsum(w * w for w in raw),
        largest=max(raw, default=0.0),
        bounded=sum(_bounded(w, grpo) != w for w in raw),
    )
