"""Old log-probs from the update's own forward, and their importance weights against the rollout's: by hand, and in the
gradient."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_norms import off
from logprob_cases import assert_logprobs_are_fresh
from model_cases import make_config

from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import TrainSequence, pack
from thresher.engine.training.importance import (
    RecomputedLogprobs,
    WeightSums,
    importance_weights,
    recompute_logprobs,
    recomputed_logprobs_record,
)
from thresher.engine.training.update import Updater
from thresher.policy.model import Policy, init_policy

# w by token: 3, .5 | 1 | .1, 4; by sequence: 1.5, 1, .4
ROLLOUT = [[-1.0, -2.0], [-0.5], [-1.0, -1.0]]
OWN = [[-1.0 + math.log(3), -2.0 + math.log(0.5)], [-0.5], [-1.0 + math.log(0.1), -1.0 + math.log(4)]]


def corrected(importance: str, **settings: Any) -> GrpoSection:
    return GrpoSection(beta=0.0, old_logprobs="recomputed", tis_level=importance, **settings)  # type: ignore[arg-type]


def figures(*ranks: WeightSums) -> dict[str, float]:
    """Return the record's figures on the weights of these ranks."""
    found = [RecomputedLogprobs(tokens=1, gap=0.0, gap_largest=0.0, seconds=0.0, weights=sums) for sums in ranks]
    return {name: value for name, value in recomputed_logprobs_record(found).items() if name.startswith("importance")}


@pytest.mark.parametrize(
    ("grpo", "expected", "bounded"),
    [
        (corrected("token"), [[2, 0.5], [1], [0.1, 2]], 2 / 5),
        (corrected("token", tis_cap=3.5), [[3, 0.5], [1], [0.1, 3.5]], 1 / 5),
        (corrected("token", tis_rule="mask", tis_cap=3.5), [[3, 0.5], [1], [0, 0]], 2 / 5),
        (corrected("token", tis_rule="mask", tis_floor=0.6), [[0, 0], [1], [0, 0]], 4 / 5),
        (corrected("sequence"), [[1.5, 1.5], [1], [0.4, 0.4]], 0),
        (corrected("sequence", tis_cap=1.2), [[1.2, 1.2], [1], [0.4, 0.4]], 1 / 3),
        (corrected("sequence", tis_rule="mask"), [[1.5, 1.5], [1], [0, 0]], 1 / 3),
    ],
)
def test_weights_by_hand(grpo: GrpoSection, expected: list[list[float]], bounded: float) -> None:
    weights, sums = importance_weights(OWN, ROLLOUT, grpo)
    assert [pytest.approx(row) for row in expected] == weights
    of_ranks = [importance_weights(OWN[a:b], ROLLOUT[a:b], grpo)[1] for a, b in ((0, 1), (1, 3), (3, 3))]
    raw = [3, 0.5, 1, 0.1, 4] if grpo.tis_level == "token" else [1.5, 1, 0.4]
    wanted = {
        "importance_mean": sum(raw) / len(raw),
        "importance_max": max(raw),
        "importance_bounded": bounded,
        "importance_effective": sum(raw) ** 2 / len(raw) / sum(w * w for w in raw),
    }
    assert figures(sums) == pytest.approx(wanted) and figures(*of_ranks) == pytest.approx(wanted)


def test_weights_that_nobody_wants_and_weights_without_end() -> None:
    assert importance_weights(OWN, ROLLOUT, GrpoSection()) == ([None] * 3, WeightSums())
    assert importance_weights([], [], corrected("token")) == ([], WeightSums())
    assert figures(WeightSums(), WeightSums()) == {}
    weights, sums = importance_weights([[0.0] * 3, []], [[-600.0] * 3, []], corrected("sequence"))
    assert weights == [[2.0] * 3, []] and math.isfinite(figures(sums)["importance_effective"])


def sampled(policy: Policy, noise: float) -> list[TrainSequence]:
    """Return random sequences whose rollout log-probs are the policy's plus normal noise."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for length, advantage in ((9, 1.0), (17, -0.6), (12, 0.3)):
        ids = torch.randint(1, 29, (length,), generator=generator)
        own = own_logprobs(policy, ids).detach()
        old = (own + noise * torch.randn(len(own), generator=generator)).tolist()
        places, weight = list(range(4, length)), 1 / 3 / (length - 4)
        items.append(
            TrainSequence(ids=ids.tolist(), positions=places, old_logprobs=old, advantage=advantage, weight=weight)
        )
    return items


def own_logprobs(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    logits = policy.logits(ids)[3:-1, :29] / 0.8
    return torch.log_softmax(logits, -1).gather(1, ids[4:, None])[:, 0]


def updater_of(weights: MasterWeights | Policy, grpo: GrpoSection, **optim: Any) -> Updater:
    weights = MasterWeights(weights) if isinstance(weights, Policy) else weights
    return Updater(weights, None, OptimSection(**optim), grpo, 29, 9)


@pytest.mark.parametrize("budget", [1, 25, 1000])
def test_log_probs_come_back_in_the_order_of_the_items(make_tiny_policy: Callable[..., Policy], budget: int) -> None:
    policy = make_tiny_policy().requires_grad_(True)
    items = sampled(policy, 0.2)
    items.insert(1, replace(items[0], positions=[], old_logprobs=[]))
    found = updater_of(policy, GrpoSection(beta=0.0), micro_batch_tokens=budget).logprobs(items, 0.8)
    assert found.pop(1) == []
    del items[1]
    written = [(item.ids, item.positions, row, 0.8) for item, row in zip(items, found, strict=True)]
    assert_logprobs_are_fresh(policy, 29, written)
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("grpo", [corrected("token", tis_cap=1.1), corrected("sequence"), corrected("none")])
def test_the_gradient_is_weighted_and_taken_from_the_recomputed(
    make_tiny_policy: Callable[..., Policy], gradients: dict[str, torch.Tensor], grpo: GrpoSection
) -> None:
    policy = make_tiny_policy().double().requires_grad_(True)
    items = sampled(policy, 0.3)
    updater = updater_of(policy, grpo)
    (renewed, none), found = recompute_logprobs(updater, [items, []], grpo, 0.8)
    assert none == []
    loss, ratios, gaps = torch.zeros((), dtype=torch.float64), 0.0, []
    for item, new in zip(items, renewed, strict=True):
        gaps += [abs(a - b) for a, b in zip(item.old_logprobs, new.old_logprobs, strict=True)]
        own = own_logprobs(policy, torch.tensor(item.ids))
        log_w = own.detach() - torch.tensor(item.old_logprobs, dtype=torch.float64)
        w = {
            "token": log_w.exp().clamp(max=1.1),
            "sequence": log_w.sum().exp().clamp(max=2.0).expand_as(log_w),
            "none": torch.ones_like(log_w),
        }[grpo.tis_level]
        # A row's values, its old log-prob included, are rounded to float32; otherwise ratios are 1 and not clipped.
        weight, ratio = torch.tensor(item.weight).double(), (own - own.detach().float()).exp()
        loss = loss - weight * ((w * item.advantage).float() * ratio).sum()
        ratios += float(ratio.detach().sum())
    assert recomputed_logprobs_record([found])["logprob_gap"] == pytest.approx(sum(gaps) / len(gaps))
    assert found.gap_largest == max(gaps) > 0.3
    expected = torch.autograd.grad(loss, list(policy.parameters()))
    stats = updater.update(renewed, 0, 0.8)
    # Ten thousand roundings of float64, for some thousand products and sums per row.
    assert stats is not None and stats.loss == pytest.approx(float(loss.detach()), rel=1e-12, abs=1e-12)
    assert stats.sums["ratio"] == pytest.approx(ratios, rel=1e-12) and stats.sums["clipped"] == 0
    for gradient, wanted in zip(gradients.values(), expected, strict=True):
        assert (gradient - wanted).norm() <= 1e-12 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_to_the_same_gradient(gradients: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Weights are global, so the cut into micro-batches changes only roundings. Compared with the float64 gradient of
    the same weights, no cut is further off than four times the error of one micro-batch, plus four roundings.

    The weights are random, so that no row has most of the gradient; nothing is clipped, because a rounding may cross a
    clip's bound.
    """
    master = init_policy(make_config(vocab_size=40), 0)
    items, grpo = sampled(master, 0.1), GrpoSection(beta=0.0, clip_low=0.99, clip_high=50.0)
    policy = master if dtype == torch.float32 else deepcopy(master).to(dtype)
    updater_of(MasterWeights(deepcopy(policy).double()), grpo).update(items, 0, 0.8)
    truth, errors = dict(gradients), []
    assert {gradient.dtype for gradient in truth.values()} == {torch.float64}
    assert [len(pack(items, budget)) for budget in (1000, 30, 1)] == [1, 2, 3]
    for budget in (1000, 30, 1):
        updater_of(MasterWeights(policy, master), grpo, micro_batch_tokens=budget).update(items, 0, 0.8)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        errors.append(off(gradients, truth))
    assert max(errors) <= 4 * errors[0] + 2**-22 and errors[0] < 0.25
