"""The objective that the weights and ratios of stale tokens optimise, by enumeration in float64.

A policy is a table of logits over three tokens for each state, where a state is the tokens so far; token 0 or the third
token ends a sequence. So all 15 sequences are known, and an expectation over them is a sum. Token t of a sequence is
drawn by version drawn_by[t] of the policy, b(y) = prod_t b_t(y_t | y_<t), and version 2 is trained. Weights are those
of the product (engine/training/importance.py); log-probs and gradients of the table are those of its kernels, with the
table as head and unit vectors as hidden states. The truth is computed separately below, state by state.

Errors, in units u = 2^-53: a log-prob, of 9 nats at most, is off by 16 u, the roundings of the log-sum-exp and of the
difference. A sequence's weight is the exponential of six of them and their sum, off by 120 u of itself; a probability
of the behaviour, of three, by 90 u. A term of a gradient has ten more roundings, and a sum of 41 rows adds 41 u of its
terms' absolute values. The truth is no more exact, so the limit is twice as much, 512 u.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from thresher.engine.config.sections import GrpoSection
from thresher.engine.training.importance import importance_weights
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.objective import LossResult

Ids = tuple[int, ...]
V, LONGEST, CURRENT = 3, 3, 2
UNITS = 512 * 2.0**-53
MIXED = [(0, 2, 2), (0, 0, 2), (0, 1, 2), (1, 1, 1), (2, 2, 0)]
UNBOUNDED = {"tis_cap": 1e300}
NO_CLIP = {"clip_low": 1.0, "clip_high": 1e30}


def all_sequences(prefix: Ids = ()) -> Iterator[Ids]:
    for token in range(V):
        done = (*prefix, token)
        if token == 0 or len(done) == LONGEST:
            yield done
        else:
            yield from all_sequences(done)


SEQUENCES = list(all_sequences())
STATES = list(dict.fromkeys(y[:t] for y in SEQUENCES for t in range(len(y))))
# The best token depends on those before it, so that states and continuations matter.
REWARDS = {y: ((3 * y[0] + 5 * y[-1] + 2 * len(y)) % 7) / 4 for y in SEQUENCES}


def make_versions() -> list[Tensor]:
    """Return three versions of the table, [V, S], each a step from the one before. The scenario is the same for every
    seed of torch's generators: clips and bounds bind in it."""
    normal = Random(8).gauss
    first, *steps = (
        torch.tensor([[normal() for _ in STATES] for _ in range(V)], dtype=torch.float64) for _ in range(3)
    )
    return [first, first + 0.6 * steps[0], first + 0.6 * (steps[0] + steps[1])]


VERSIONS = make_versions()


def log_policy(table_VS: Tensor, state: Ids, token: int) -> Tensor:
    return torch.log_softmax(table_VS[:, STATES.index(state)], 0)[token]


def probability(drawn_by: Ids, y: Ids, begin: int = 0) -> float:
    """Return the probability of a sequence's tokens from `begin` on, given those before."""
    log = sum(float(log_policy(VERSIONS[drawn_by[t]], y[:t], y[t])) for t in range(begin, len(y)))
    return float(torch.tensor(log, dtype=torch.float64).exp())


# --- The product's computation


class Rows(NamedTuple):
    """Every token of every sequence. recorded: log-probs by the version that drew it; own: by the current version."""

    hidden_TS: Tensor
    targets_T: Tensor
    recorded: list[list[float]]
    own: list[list[float]]


def product_logprobs(version: int) -> list[list[float]]:
    """Return the log-probs of all sequences' tokens by a version, computed by the head's kernel."""
    hidden_TS, targets_T = rows_of_the_head()
    flat = token_logprobs(hidden_TS, VERSIONS[version], targets_T)[0].tolist()
    taken = iter(flat)
    return [[next(taken) for _ in y] for y in SEQUENCES]


def rows_of_the_head() -> tuple[Tensor, Tensor]:
    places = [STATES.index(y[:t]) for y in SEQUENCES for t in range(len(y))]
    return torch.eye(len(STATES), dtype=torch.float64)[places], torch.tensor([token for y in SEQUENCES for token in y])


def rollout(drawn_by: Ids) -> Rows:
    by_version = [product_logprobs(version) for version in range(len(VERSIONS))]
    recorded = [[by_version[drawn_by[t]][n][t] for t in range(len(y))] for n, y in enumerate(SEQUENCES)]
    return Rows(*rows_of_the_head(), recorded, by_version[CURRENT])


def corrected(level: str, **settings: Any) -> GrpoSection:
    return GrpoSection(beta=0.0, old_logprobs="recomputed", tis_level=level, **settings)  # type: ignore[arg-type]


def weights_of(own: list[list[float]], recorded: list[list[float]], grpo: GrpoSection) -> list[list[float]]:
    weights, _ = importance_weights(own, recorded, grpo)
    return [weight for weight in weights if weight is not None]


def tokens(values: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=torch.float64)


def advantages(baseline: float) -> Tensor:
    return tokens([[REWARDS[y] - baseline] * len(y) for y in SEQUENCES])


def expected_step(
    drawn_by: Ids, rows: Rows, old: list[list[float]], weighted_T: Tensor, table_VS: Tensor, **options: Any
) -> tuple[Tensor, LossResult]:
    """Return minus the gradient of the loss by the table, in expectation over the behaviour, and the loss's result.

    weighted_T: the advantage of each token times its importance weight, as packing.py makes it.
    """
    table_VS = table_VS.clone().requires_grad_()
    shares_T = tokens([[probability(drawn_by, y)] * len(y) for y in SEQUENCES])
    result = grpo_loss(rows.hidden_TS, table_VS, rows.targets_T, tokens(old), weighted_T, shares_T, **options)
    result.loss.backward()
    assert table_VS.grad is not None
    return -table_VS.grad, result


def corrected_step(drawn_by: Ids, grpo: GrpoSection, baseline: float = 0.0) -> Tensor:
    """Return the expected step of a first update with recomputed old log-probs, in which no ratio is clipped."""
    rows = rollout(drawn_by)
    weighted_T = tokens(weights_of(rows.own, rows.recorded, grpo)) * advantages(baseline)
    step, result = expected_step(drawn_by, rows, rows.own, weighted_T, VERSIONS[CURRENT])
    assert not result.clipped.any()
    return step


# --- The truth, computed separately


def gradient(value: Callable[[Tensor], Tensor]) -> Tensor:
    table_VS = VERSIONS[CURRENT].clone().requires_grad_()
    return torch.autograd.grad(value(table_VS), table_VS)[0]


def sequence_sum(coefficient: Callable[[Ids], float]) -> Tensor:
    """Return the gradient of sum_y coefficient(y) pi(y)."""

    def value(table_VS: Tensor) -> Tensor:
        logs = {y: sum(log_policy(table_VS, y[:t], y[t]) for t in range(len(y))) for y in SEQUENCES}
        return torch.stack([coefficient(y) * torch.as_tensor(log).exp() for y, log in logs.items()]).sum()

    return gradient(value)


TRUTH = sequence_sum(lambda y: REWARDS[y])


def action_value(drawn_by: Ids, taken: Ids) -> float:
    """Return Q(s, a): the expected reward after the tokens `taken`, if the behaviour continues."""
    behind = [y for y in SEQUENCES if y[: len(taken)] == taken]
    return sum(probability(drawn_by, y, len(taken)) * REWARDS[y] for y in behind)


def token_sum(
    drawn_by: Ids, coefficient: Callable[[float], float] = lambda ratio: 1.0, baseline: float = 0.0
) -> Tensor:
    """Return the gradient of sum_s d(s) sum_a coefficient(w) pi(a|s) (Q(s, a) - baseline). States and continuations are
    the behaviour's, each token is the policy's. coefficient: of the weight w = pi(a|s) / b(a|s)."""

    def value(table_VS: Tensor) -> Tensor:
        terms = []
        for state in STATES:
            for action in range(V):
                behaviour = log_policy(VERSIONS[drawn_by[len(state)]], state, action)
                weight = float((log_policy(VERSIONS[CURRENT], state, action) - behaviour).exp())
                worth = probability(drawn_by, state) * (action_value(drawn_by, (*state, action)) - baseline)
                terms.append(coefficient(weight) * worth * log_policy(table_VS, state, action).exp())
        return torch.stack(terms).sum()

    return gradient(value)


def limit(drawn_by: Ids, baseline: float = 0.0) -> float:
    """Return the largest rounding error of an entry of an expected step. It is UNITS times all its terms' absolute
    values, each at most b(y) w |A|, where w is the larger of a sequence's and a token's."""
    rows, total = rollout(drawn_by), 0.0
    levels = [weights_of(rows.own, rows.recorded, corrected(name, **UNBOUNDED)) for name in ("token", "sequence")]
    for y, of_tokens, of_sequence in zip(SEQUENCES, *levels, strict=True):
        largest = max(1.0, *of_tokens, *of_sequence)
        total += len(y) * probability(drawn_by, y) * largest * abs(REWARDS[y] - baseline)
    return UNITS * total


def assert_equal(found: Tensor, expected: Tensor, most: float) -> None:
    assert float((found - expected).abs().max()) <= most  # bound: derived at the top of the file


def assert_differs(found: Tensor, expected: Tensor) -> None:
    """A bias is a share of the gradient, far larger than rounding."""
    assert float((found - expected).norm()) > 0.01 * float(expected.norm())


# --- (a), (e): sequence weights


@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("drawn_by", MIXED)
def test_sequence_weights_give_the_policy_gradient(drawn_by: Ids, baseline: float) -> None:
    """Unbounded weights do so for any mixture of versions; without them the gradient is that of E_b[A log pi(y)]."""
    step = corrected_step(drawn_by, corrected("sequence", **UNBOUNDED), baseline)
    assert_equal(step, TRUTH, limit(drawn_by, baseline))
    rows = rollout(drawn_by)
    unweighted, _ = expected_step(drawn_by, rows, rows.own, advantages(baseline), VERSIONS[CURRENT])
    own = {y: probability((CURRENT,) * LONGEST, y) for y in SEQUENCES}  # the gradient of log pi is that of pi / own
    on_policy = sequence_sum(lambda y: probability(drawn_by, y) / own[y] * (REWARDS[y] - baseline))
    assert_equal(unweighted, on_policy, limit(drawn_by, baseline))
    assert_differs(unweighted, TRUTH)


@pytest.mark.parametrize("drawn_by", [(0, 2, 2), (0, 0, 2), (0, 1, 2)])
@pytest.mark.parametrize("version", [0, 2])
def test_one_version_for_a_mixed_sequence_is_wrong(drawn_by: Ids, version: int) -> None:
    """Weights against the log-probs of one version for all tokens are biased, whether the first or the last version.
    They give the gradient of E_b[pi(y)/b'(y) A] at pi: the bias is that of the enumeration."""
    rows = rollout(drawn_by)
    weights = weights_of(rows.own, product_logprobs(version), corrected("sequence", **UNBOUNDED))
    step, _ = expected_step(drawn_by, rows, rows.own, tokens(weights) * advantages(0.0), VERSIONS[CURRENT])
    as_one = (version,) * LONGEST
    most = limit(drawn_by) + limit(as_one) * max(probability(drawn_by, y) / probability(as_one, y) for y in SEQUENCES)
    assert_equal(step, sequence_sum(lambda y: REWARDS[y] * probability(drawn_by, y) / probability(as_one, y)), most)
    assert_differs(step, TRUTH)
    if version == CURRENT:  # the weights do not show it
        assert weights == [[1.0] * len(y) for y in SEQUENCES]


# --- (b): token weights


@pytest.mark.parametrize("drawn_by", MIXED)
def test_token_weights_take_states_and_continuations_from_the_behaviour(drawn_by: Ids) -> None:
    step = corrected_step(drawn_by, corrected("token", **UNBOUNDED))
    assert_equal(step, token_sum(drawn_by), limit(drawn_by))
    assert_differs(step, TRUTH)


def test_token_weights_are_exact_for_one_token_alone() -> None:
    """A stale first token leaves the rest on policy: its own gradient, that of the first state, is exact. A stale last
    token leaves the states on policy: the gradient of the last states is exact."""
    first, last = STATES.index(()), [n for n, state in enumerate(STATES) if len(state) == LONGEST - 1]
    step = corrected_step((0, 2, 2), corrected("token", **UNBOUNDED))
    assert_equal(step[:, first], TRUTH[:, first], limit((0, 2, 2)))
    assert_differs(step[:, last], TRUTH[:, last])
    step = corrected_step((2, 2, 0), corrected("token", **UNBOUNDED))
    assert_equal(step[:, last], TRUTH[:, last], limit((2, 2, 0)))
    assert_differs(step[:, first], TRUTH[:, first])


# --- (c): the ratio against the behaviour


@pytest.mark.parametrize("drawn_by", MIXED)
def test_the_rollouts_ratio_is_the_token_weight_until_a_clip_binds(drawn_by: Ids) -> None:
    rows = rollout(drawn_by)
    step, result = expected_step(drawn_by, rows, rows.recorded, advantages(0.7), VERSIONS[CURRENT], **NO_CLIP)
    assert not result.clipped.any()
    assert_equal(step, corrected_step(drawn_by, corrected("token", **UNBOUNDED), 0.7), limit(drawn_by, 0.7))
    # The clip removes the terms of the tokens that it binds, and nothing else.
    bounded, result = expected_step(drawn_by, rows, rows.recorded, advantages(0.7), VERSIONS[CURRENT])
    ratios_T, A_T = tokens(rows.own).sub(tokens(rows.recorded)).exp(), advantages(0.7)
    binds_T = ((A_T > 0) & (ratios_T > 1.2)) | ((A_T < 0) & (ratios_T < 0.8))
    assert torch.equal(result.clipped, binds_T) and binds_T.any()
    taken, _ = expected_step(drawn_by, rows, rows.recorded, A_T * binds_T, VERSIONS[CURRENT], **NO_CLIP)
    assert_equal(step - bounded, taken, 2 * limit(drawn_by, 0.7))


@pytest.mark.parametrize("drawn_by", MIXED)
def test_the_proximal_policy_cancels_until_a_clip_binds(drawn_by: Ids) -> None:
    """At a later update, with a token's weight pi_prox / b and the ratio pi / pi_prox, the product is pi / b."""
    rows, later = rollout(drawn_by), VERSIONS[CURRENT] + 0.3 * VERSIONS[0]
    weighted_T = tokens(weights_of(rows.own, rows.recorded, corrected("token", **UNBOUNDED))) * advantages(0.0)
    decoupled, result = expected_step(drawn_by, rows, rows.own, weighted_T, later, **NO_CLIP)
    joint, other = expected_step(drawn_by, rows, rows.recorded, advantages(0.0), later, **NO_CLIP)
    largest = max(float(result.ratios.max()), 1.0)
    assert_equal(decoupled, joint, largest * limit(drawn_by))
    # A clip around pi_prox binds other tokens than one around the behaviour.
    _, result = expected_step(drawn_by, rows, rows.own, weighted_T, later)
    _, other = expected_step(drawn_by, rows, rows.recorded, advantages(0.0), later)
    assert not torch.equal(result.clipped, other.clipped)


# --- (d): bounds


CAP = 1.5
BOUNDS: dict[str, Callable[[float], float]] = {
    "truncate": lambda w: min(w, CAP),
    "mask": lambda w: w if 1 / CAP <= w <= CAP else 0.0,
}


@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("rule", BOUNDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("drawn_by", [(0, 1, 2), (1, 1, 1)])
def test_bounded_weights_and_their_bias(drawn_by: Ids, level: str, rule: str, baseline: float) -> None:
    """A term keeps the share bounded(w) / w. A baseline then matters, because the shares differ between the tokens from
    which it is subtracted."""
    rows, bound = rollout(drawn_by), BOUNDS[rule]
    grpo = corrected(level, tis_cap=CAP, tis_rule=rule)
    raw = weights_of(rows.own, rows.recorded, corrected(level, **UNBOUNDED))
    weights, sums = importance_weights(rows.own, rows.recorded, grpo)
    assert weights == [[bound(w) for w in values] for values in raw]
    assert 0 < sums.bounded < sums.count
    step = corrected_step(drawn_by, grpo, baseline)
    if level == "token":
        expected = token_sum(drawn_by, lambda w: bound(w) / w, baseline)
        exact = token_sum(drawn_by)
    else:
        w_of = {y: probability((CURRENT,) * LONGEST, y) / probability(drawn_by, y) for y in SEQUENCES}
        expected = sequence_sum(lambda y: bound(w_of[y]) / w_of[y] * (REWARDS[y] - baseline))
        exact = TRUTH
    assert_equal(step, expected, limit(drawn_by, baseline))
    assert_differs(step, exact)
    if baseline:
        assert_differs(step, corrected_step(drawn_by, grpo))
