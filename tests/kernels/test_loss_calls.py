"""Tests of grpo_loss as a call: backward, buffers, work and memory, equal bits, backends, autocast."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_rows
from loss_cases import Operations, assert_close, assert_same_bits, brute, make_case, run
from torch import Tensor

from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.objective import ESTIMATORS, LossResult


@pytest.mark.parametrize("upstream", [0.0, 1.0, -3.7, 65536.0])
def test_any_upstream_scale(upstream: float) -> None:
    case = make_case(50)
    assert_close(run(case, upstream=upstream, beta=0.1), brute(case, upstream=upstream, beta=0.1))


def test_the_upstream_scale_is_not_rounded_to_the_hidden_states_dtype() -> None:
    case = make_case(30)
    for dtype, upstream in ((torch.float16, 65536.0), (torch.bfloat16, 1 / 3)):
        low = replace(case.to(torch.float32), hidden=case.hidden.to(dtype), head=case.head.to(dtype))
        low = replace(low, weights=low.weights / 100)
        truth = brute(low, upstream=upstream)
        found = run(low, upstream=upstream)
        for name in ("hidden_grad", "head_grad"):
            error = (found[name].double() - truth[name]).norm()
            assert error <= torch.finfo(dtype).eps / 2 * truth[name].norm(), name  # bound: a value is rounded once


def test_a_loss_scale_saves_small_gradients_of_float16() -> None:
    case = make_case(30).to(torch.float32)
    low = replace(case, hidden=case.hidden.half(), head=case.head.half(), weights=case.weights / 1e6)
    truth, found = brute(low, upstream=65536.0), run(low, upstream=65536.0)
    error = (found["hidden_grad"].double() - truth["hidden_grad"]).norm()
    assert error <= torch.finfo(torch.float16).eps / 2 * truth["hidden_grad"].norm()


def test_backward_twice_and_two_losses_in_one_graph() -> None:
    case = make_case(30)
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    first = grpo_loss(hidden, head, *case.arguments[2:])
    second = grpo_loss(hidden * 1.0, head, *case.arguments[2:], entropy_coef=0.1)
    total = 2.0 * first.loss - 0.5 * second.loss
    total.backward(retain_graph=True)
    total.backward()
    a, b = brute(case), brute(case, entropy_coef=0.1)
    for leaf, name in ((hidden, "hidden_grad"), (head, "head_grad")):
        torch.testing.assert_close(leaf.grad, 2 * (2.0 * a[name] - 0.5 * b[name]), rtol=1e-10, atol=1e-10)


def test_given_a_buffer_the_head_gradient_is_added_to_it() -> None:
    case = make_case(100, V=41).to(torch.float32)
    options: dict[str, Any] = {"beta": 0.2, "entropy_coef": 0.1, "chunk_rows": 33, "vocab_size": 41}
    case = replace(case, head=torch.cat([case.head, torch.full((3, 16), math.nan)]))
    ordinary = run(case, **options)
    for requires_grad in (True, False):
        hidden = case.hidden.clone().requires_grad_()
        head = case.head.clone().requires_grad_(requires_grad)
        buffer = torch.zeros(44, 16)
        result = grpo_loss(
            hidden, head, *case.arguments[2:], ref_logprobs_T=case.ref, lm_head_grad_VH=buffer, **options
        )
        assert not result.loss.requires_grad and torch.equal(result.loss, ordinary["loss"])
        assert torch.equal(buffer, ordinary["head_grad"]) and torch.equal(
            result.hidden_grad_TH, ordinary["hidden_grad"]
        )
        hidden.backward(result.hidden_grad_TH)
        assert torch.equal(hidden.grad, ordinary["hidden_grad"]) and head.grad is None
    held = torch.full((44, 16), 7.0)
    grpo_loss(hidden, head, *case.arguments[2:], ref_logprobs_T=case.ref, lm_head_grad_VH=held, **options)
    rounded = 100 * 2**-24 * held.abs().max()  # at most one addition per row, in any order
    torch.testing.assert_close(held - 7.0, ordinary["head_grad"], rtol=0, atol=rounded.item())
    assert (held[41:] == 7.0).all()


def test_work_is_done_only_where_a_gradient_is_wanted() -> None:
    case = replace(make_case(64).to(torch.float32), weights=torch.ones(64))
    case = replace(case, advantages=torch.where(case.advantages == 0, 1.0, case.advantages))

    def matmuls(hidden_grad: bool, head_grad: bool, grad: bool = True, **options: Any) -> tuple[int, LossResult]:
        hidden, head = (case.hidden.clone().requires_grad_(hidden_grad), case.head.clone().requires_grad_(head_grad))
        with Operations() as operations, contextlib.nullcontext() if grad else torch.no_grad():
            result = grpo_loss(hidden, head, *case.arguments[2:], **options)
        return operations.matmuls(), result

    assert matmuls(True, True)[0] == 3
    assert matmuls(True, False)[0] == 2
    assert matmuls(False, True)[0] == 2
    for count, result in (matmuls(False, False), matmuls(True, True, grad=False)):
        assert count == 1 and not result.loss.requires_grad
    assert matmuls(True, False, lm_head_grad_VH=torch.zeros(50, 16))[0] == 3
    buffer = torch.zeros(50, 16)
    count, result = matmuls(False, False, lm_head_grad_VH=buffer)
    assert count == 2 and result.hidden_grad_TH is None and (buffer != 0).any()
    # half of the rows have no advantage: a chunk with three matmuls, and one with a forward only
    case = replace(case, advantages=torch.where(torch.arange(64) % 2 == 0, 0.0, case.advantages))
    assert matmuls(True, True)[0] == 4
    assert matmuls(True, True, beta=0.1, ref_logprobs_T=case.ref)[0] == 3
    assert matmuls(True, True, beta=0.1, ref_logprobs_T=case.ref, kl_gradient="none")[0] == 4
    assert matmuls(True, True, entropy_coef=0.1)[0] == 3


def test_memory_is_bounded_by_the_chunk_and_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(400, H=8, V=200).to(torch.float32)
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    waits = []
    real = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: waits.append(1) or real(self))
    with Operations() as operations:
        grpo_loss(hidden, head, *case.arguments[2:], ref_logprobs_T=case.ref, beta=0.1, chunk_rows=32)
    assert operations.largest == 2 * 32 * 200
    syncing = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
    assert not [name for name in operations.counts if any(word in name for word in syncing)]
    assert len(waits) == 1
    of_T = torch.arange(400) // 8
    for options in ({"surrogate": "gspo"}, {"surrogate": "gmpo"}, {"guard": 0.2}):
        with Operations() as operations:
            grpo_loss(hidden, head, *case.arguments[2:], sequence_T=of_T, turn_T=of_T, **options)  # type: ignore[arg-type]
        assert not [name for name in operations.counts if any(word in name for word in syncing)], options
    assert len(waits) == 4


def test_a_million_rows() -> None:
    T = 1_000_000
    noise = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(T, 2, generator=noise), torch.randn(3, 2, generator=noise)
    vectors = [torch.full((T,), value) for value in (-1.0, 1.0, 1.0 / T)]
    targets = torch.randint(0, 3, (T,), generator=noise)
    result = grpo_loss(hidden, head.requires_grad_(), targets, *vectors)
    logits = (hidden @ head.detach().t()).double()
    logp = torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
    ratio = (logp + 1.0).exp()
    assert result.loss.item() == pytest.approx(-ratio.clamp(max=1.2).mean().item(), rel=1e-5)
    result.loss.backward()
    coefficient = torch.where(ratio > 1.2, 0.0, -ratio / T)
    dlogits = coefficient[:, None] * (torch.nn.functional.one_hot(targets, 3) - torch.softmax(logits, 1))
    # A sequential sum of T terms: each partial sum is at most the sum of all sizes, and is rounded. 3 deviations.
    off = 2.0**-24 * T**0.5 * (dlogits.abs().t() @ hidden.double().abs()).norm()
    assert (head.grad.double() - dlogits.t() @ hidden.double()).norm() <= 3 * off


def test_same_inputs_same_bits() -> None:
    case = make_case(1025, H=96, V=600).to(torch.float32)
    options: dict[str, Any] = {"beta": 0.1, "kl_value": "k3_ratio", "entropy_coef": 0.01, "temperature": 0.9}
    assert_same_bits(run(case, **options), run(case, **options))


def test_metrics_without_reference_and_without_grad() -> None:
    case = make_case(30).to(torch.float32)
    result = grpo_loss(*case.arguments)
    assert result.kl == {} and result.hidden_grad_TH is None
    hidden = case.hidden.clone().requires_grad_()
    trained = grpo_loss(hidden, case.head, *case.arguments[2:], ref_logprobs_T=case.ref)
    assert set(trained.kl) == set(ESTIMATORS)
    for values in (
        trained.logprobs,
        trained.ratios,
        trained.entropy,
        trained.clipped,
        trained.capped,
        *trained.kl.values(),
    ):
        assert not values.requires_grad
    assert trained.loss.requires_grad and trained.clipped.dtype == torch.bool and trained.capped.dtype == torch.int64
    assert torch.equal(trained.loss.detach(), result.loss)


def test_autocast_does_not_reach_inside() -> None:
    case = make_case(40).to(torch.float32)
    plain = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(run(case), plain)


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(40)
    assert torch.equal(grpo_loss(*case.arguments, backend="torch").loss, grpo_loss(*case.arguments).loss)
    with pytest.raises(ValueError, match=r"hidden_TH has dtype torch.float64; expected bfloat16 or float32"):
        grpo_loss(*case.arguments, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="hidden_TH is on cpu; expected cuda for backend 'triton'"):
        grpo_loss(*case.to(torch.float32).arguments, backend="triton")


def test_forward_bits_are_those_of_token_logprobs() -> None:
    case = make_case(300, H=96, V=600).to(torch.float32)
    present = case.weights != 0
    # some rows are dropped, and those of advantage 0 go last: neither changes the bits of a row
    needs_invariant_rows([(600, 96)], most=304)
    result = grpo_loss(case.hidden.requires_grad_(), *case.arguments[1:], temperature=0.9, chunk_rows=64)
    logprobs, entropy = token_logprobs(case.hidden, case.head, case.targets, temperature=0.9, chunk_rows=64)
    assert torch.equal(result.logprobs[present], logprobs[present])
    assert torch.equal(result.entropy[present], entropy[present])


def test_without_old_logprobs_the_policy_is_its_own_old_policy():
    torch.manual_seed(3)
    hidden, head = torch.randn(9, 6, dtype=torch.float64, requires_grad=True), torch.randn(11, 6, dtype=torch.float64)
    targets, advantages, weights = torch.randint(11, (9,)), torch.randn(9).double(), torch.rand(9).double()
    weights[2] = 0
    own, _ = token_logprobs(hidden, head, targets)
    given = grpo_loss(hidden, head, targets, own, advantages, weights)
    (expected,) = torch.autograd.grad(given.loss, hidden)
    implied = grpo_loss(hidden, head, targets, None, advantages, weights)
    (actual,) = torch.autograd.grad(implied.loss, hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert implied.loss == given.loss and (implied.ratios[weights > 0] == 1).all()
    # With advantages of 1 the gradient is that of the cross-entropy.
    loss = grpo_loss(hidden, head, targets, None, torch.ones(9).double(), weights).loss
    (sft,) = torch.autograd.grad(loss, hidden)
    nll = (torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none") * weights).sum()
    (brute,) = torch.autograd.grad(nll, hidden)
    torch.testing.assert_close(sft, brute, rtol=1e-10, atol=1e-14)
