"""Tests of the per-token surrogate objective: KL values, derivatives and expectations, exponent caps, clipping."""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import Case, run
from torch import Tensor

from thresher.kernels import grpo_loss
from thresher.kernels.objective import CHOICES, ESTIMATORS, LossResult, kl_coefficient, kl_values


def rows_at(logp: float, count: int = 1, dtype: torch.dtype = torch.float32) -> Case:
    """Return rows whose target has log-prob log(1/2): two columns, equal logits. Tests set old and ref."""
    ones = torch.ones(count, dtype=dtype)
    return Case(
        torch.ones(count, 4, dtype=dtype), torch.full((2, 4), 0.1, dtype=dtype),
        torch.zeros(count, dtype=torch.int64), ones * logp, ones, ones, ones * logp,
    )  # fmt: skip


def test_kl_values_at_minus_ten() -> None:
    logp = math.log(0.5)
    case = replace(rows_at(logp), ref=torch.tensor([logp + 10.0]))
    result = grpo_loss(*case.arguments, ref_logprobs_T=case.ref)
    assert result.kl["k1"].item() == pytest.approx(-10.0, rel=1e-6)
    assert result.kl["k2"].item() == pytest.approx(50.0, rel=1e-6)
    assert result.kl["k3"].item() == pytest.approx(22015.4658, rel=1e-5)
    assert result.kl["k3_ratio"].item() == pytest.approx(22015.4658, rel=1e-5)
    assert result.capped == 0


def test_k3_stays_exact_near_zero_in_float32() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-5])
    exact = (-d.double()).expm1() + d.double()
    values = kl_values(d, torch.ones(3))["k3"].double()
    # expm1, about -d, is off by one unit in its last place; the sum is exact. An exp near 1 would be off by 2^-24.
    assert ((values - exact).abs() <= 2**-22 * d.double().abs()).all()


def test_coefficients_are_the_derivatives() -> None:
    d = torch.linspace(-12, 12, 41, dtype=torch.float64)
    old = torch.linspace(1, -1, 41, dtype=torch.float64)
    for name in ESTIMATORS:
        logp = torch.zeros(41, dtype=torch.float64, requires_grad=True)
        value = kl_values(logp + d, (logp + old).exp())[name]
        (slope,) = torch.autograd.grad(value.sum(), logp)
        torch.testing.assert_close(kl_coefficient(name, d, old.exp()), slope, rtol=1e-9, atol=1e-9)
    assert (kl_coefficient("none", d, old) == 0).all()


def test_exponents_are_capped_counted_and_keep_their_gradient() -> None:
    logp = math.log(0.5)
    case = rows_at(logp, count=5)
    # k3 overflows; the ratio does (negative advantage: not clipped); both; neither; a masked row
    case = replace(
        case,
        ref=torch.tensor([logp + 300, logp, logp + 1e4, logp, logp + 300]),
        old=torch.tensor([logp, logp - 300, logp - 1e4, logp, logp - 300]),
        advantages=torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0]),
        weights=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
    )
    cap = math.exp(80)
    for kl in CHOICES:
        for dual_clip in (None, 3.0):
            found = run(case, kl_value=kl, beta=0.5, entropy_coef=0.1, dual_clip=dual_clip)
            assert found["result"].capped == 3
            for name in ("loss", "hidden_grad", "head_grad", "ratios", "logprobs", *ESTIMATORS):
                assert found[name].isfinite().all(), (kl, name)
    assert found["ratios"][1].item() == pytest.approx(cap, rel=1e-5)
    assert found["k3"][0].item() == pytest.approx(cap, rel=1e-5)
    # dloss/dlogp is the capped value, not 0; hidden is the first unit vector and dlogp/dz_target is 1 - 1/2
    for index, options, slope in ((0, {"kl_value": "k3", "beta": 1.0}, -cap), (1, {}, cap)):
        head = torch.full((2, 4), 0.1).requires_grad_()
        one = [values[index : index + 1] for values in (case.targets, case.old, case.advantages)]
        ref = case.ref[index : index + 1]
        grpo_loss(torch.eye(4)[:1], head, *one, torch.ones(1), ref_logprobs_T=ref, **options).loss.backward()
        assert head.grad is not None and head.grad[0, 0].item() == pytest.approx(0.5 * slope, rel=1e-5)


def test_huge_coefficients_never_become_nan() -> None:
    logp = math.log(0.5)
    case = replace(
        rows_at(logp), old=torch.tensor([logp - 200]), ref=torch.tensor([logp + 1e4]), advantages=torch.tensor([-1e6])
    )
    for kl in CHOICES:
        found = run(case, kl_value=kl, beta=1e3)
        assert found["hidden_grad"].isfinite().all() and found["head_grad"].isfinite().all()
        assert not found["loss"].isnan()


def test_clipped_says_which_rows_lost_their_gradient() -> None:
    logp = math.log(0.5)
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 3.5, 3.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    case = rows_at(logp, count=8, dtype=torch.float64)
    case = replace(case, old=logp - ratios.log(), advantages=advantages)
    assert run(case)["result"].clipped.tolist() == [True, False, False, True, False, False, True, False]
    dual = run(case, dual_clip=3.0)
    assert dual["result"].clipped.tolist() == [True, False, False, True, False, True, True, False]
    assert dual["loss"].item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 1.1 - 3.0 + 1.2))


def expected_gradient(kl: str, behaviour: Tensor, logits: Tensor, ref: Tensor) -> Tensor:
    """Return the gradient of E_behaviour[KL estimator] with respect to the logits, by enumeration: one row for every
    token, weighted by its probability under the behaviour policy."""
    V = len(logits)
    hidden = torch.ones(V, 1, dtype=torch.float64)
    head = logits[:, None].clone().requires_grad_()
    grpo_loss(
        hidden, head, torch.arange(V), behaviour.log(), torch.zeros(V, dtype=torch.float64), behaviour,
        ref_logprobs_T=ref, kl_value="none", kl_gradient=kl, beta=1.0, chunk_rows=4,
    ).loss.backward()  # fmt: skip
    return head.grad[:, 0]


def test_expected_gradients_against_exact_reverse_kl() -> None:
    noise = torch.Generator().manual_seed(4)
    logits, other, behind = torch.randn(3, 11, generator=noise, dtype=torch.float64).mul(1.5).unbind()
    ref, behaviour = torch.log_softmax(other, 0), torch.softmax(behind, 0)
    policy = torch.softmax(logits, 0)
    leaf = logits.clone().requires_grad_()
    logp = torch.log_softmax(leaf, 0)
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), leaf, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), leaf)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(expected_gradient("k2", policy, logits, ref), reverse, **close)
    torch.testing.assert_close(expected_gradient("k3_ratio", policy, logits, ref), reverse, **close)
    torch.testing.assert_close(expected_gradient("k3_ratio", behaviour, logits, ref), reverse, **close)
    torch.testing.assert_close(expected_gradient("k3", policy, logits, ref), forward, **close)
    torch.testing.assert_close(expected_gradient("k1", policy, logits, ref), torch.zeros_like(ref), **close)
    # the biased estimators are biased, by far more than the errors of the others
    assert (expected_gradient("k2", behaviour, logits, ref) - reverse).abs().max() > 1e-6
    assert (forward - reverse).abs().max() > 1e-6


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_the_clips_border_keeps_its_gradient(advantage: float) -> None:
    """With clips of 0 the whole first update is on the border: every ratio is 1."""
    case = rows_at(0.0)
    hidden = case.hidden.requires_grad_()
    head = case.head + torch.tensor([[0.0], [0.1]])  # otherwise the hidden state would not affect the log-prob

    def loss(old: Tensor | None) -> LossResult:
        advantages = torch.tensor([advantage])
        return grpo_loss(hidden, head, case.targets, old, advantages, case.weights, clip_low=0.0, clip_high=0.0)

    for old in (None, loss(None).logprobs):
        hidden.grad = None
        result = loss(old)
        result.loss.backward()
        assert result.ratios.item() == 1.0 and not result.clipped.any()
        assert hidden.grad is not None and bool((hidden.grad * advantage > 0).all())
