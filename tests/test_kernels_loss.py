"""grpo_loss against float64 brute force: values, gradients, masks, limits and refusals."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, Operations, assert_close, assert_same_bits, brute, float32_budget, make_case, run
from torch import Tensor

from thresher.kernels import grpo_loss, matmul, token_logprobs
from thresher.kernels.kl import CHOICES, ESTIMATORS, kl_coefficient, kl_values
from thresher.kernels.loss import reference_grpo_loss
from thresher.kernels.objective import LossResult


# Every value with every gradient; the other settings vary along, so that the table stays small.
@pytest.mark.parametrize("kl_gradient", [None, *CHOICES])
@pytest.mark.parametrize("kl_value", CHOICES)
def test_every_kl_pair(kl_value: str, kl_gradient: str | None) -> None:
    case = make_case(63, seed=len(kl_value) + 7 * CHOICES.index(kl_gradient or "none"))
    options = {
        "kl_value": kl_value,
        "kl_gradient": kl_gradient,
        "beta": 0.3,
        "temperature": 1.0 if kl_gradient else 0.7,
    }
    assert_close(run(case, chunk_rows=17, **options), brute(case, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "entropy_coef": 0.05},
        {"entropy_coef": -0.5},
        {"clip_low": 0.1, "clip_high": 0.28},
        {"clip_low": 0.0, "clip_high": 0.0},
        {"clip_low": 1.5, "clip_high": 3.0},
        {"dual_clip": 1.3},
        {"dual_clip": 3.0, "clip_low": 0.3, "beta": 0.1, "kl_value": "k2"},
        {"dual_clip": 1.05, "clip_high": 0.5, "entropy_coef": 0.1, "beta": 0.2, "temperature": 0.8},
        {"vocab_size": 37, "temperature": 1.2, "entropy_coef": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [1, 63, 100, 1025])
def test_options_and_ragged_lengths(T: int, options: dict[str, Any]) -> None:
    case = make_case(T, seed=T)
    if "vocab_size" in options:
        case = replace(case, targets=case.targets % options["vocab_size"])
    # 48 divides none of the lengths; the default puts all rows in one chunk or two
    for chunk_rows in (48, None):
        assert_close(run(case, chunk_rows=chunk_rows, **options), brute(case, **options))


@given(
    T=st.integers(1, 70),
    H=st.integers(1, 9),
    V=st.integers(1, 40),
    chunk_rows=st.integers(1, 80),
    seed=st.integers(0, 10**6),
    kl=st.tuples(st.sampled_from(CHOICES), st.sampled_from(CHOICES)),
    beta=st.sampled_from([0.0, 0.5]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    dual_clip=st.sampled_from([None, 1.5]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_shape_chunk_and_setting(
    T: int, H: int, V: int, chunk_rows: int, seed: int, kl: Any, **options: Any
) -> None:
    case = make_case(T, H, V, seed=seed)
    options |= {"kl_value": kl[0], "kl_gradient": kl[1]}
    truth = brute(case, **options)
    assert_close(run(case, chunk_rows=chunk_rows, **options), truth)
    reference = reference_grpo_loss(*case.arguments, ref_logprobs_T=case.ref, **options)
    assert_close(
        {"loss": reference.loss, "logprobs": reference.logprobs, **reference.kl},
        {name: truth[name] for name in ("loss", "logprobs", *ESTIMATORS)},
    )


def test_reference_gradients_equal_the_chunked_ones() -> None:
    case = make_case(40)
    options: dict[str, Any] = {
        "kl_value": "k3",
        "kl_gradient": "k2",
        "beta": 0.3,
        "entropy_coef": 0.1,
        "dual_clip": 2.0,
    }
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    result = reference_grpo_loss(hidden, head, *case.arguments[2:], ref_logprobs_T=case.ref, **options)
    result.loss.backward()
    found = run(case, chunk_rows=9, **options)
    assert_close(found, {"hidden_grad": hidden.grad, "head_grad": head.grad, "loss": result.loss.detach()})
    assert torch.equal(found["result"].clipped, result.clipped)


@pytest.mark.parametrize("kl", [*ESTIMATORS, "none"])
def test_gradcheck(kl: str) -> None:
    case = make_case(6, H=3, V=5, seed=3)
    assert (case.weights != 0).sum() > 3

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        return grpo_loss(
            hidden, head, *case.arguments[2:], ref_logprobs_T=case.ref, kl_value=kl, beta=0.4,
            entropy_coef=0.1, temperature=0.9, chunk_rows=4,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, (case.hidden.requires_grad_(), case.head.requires_grad_()))


# At scale 300 logits reach +-1e4, where float32 keeps three decimals: the budget knows.
@pytest.mark.parametrize(
    ("T", "H", "V", "scale"),
    [(100, 96, 600, 0.3), (63, 64, 1000, 1.0), (257, 33, 151, 0.5), (64, 64, 300, 300.0)],
)
def test_float32_error_is_within_its_budget(T: int, H: int, V: int, scale: float) -> None:
    case = make_case(T, H, V, seed=5, scale=scale, spread=0.2).to(torch.float32)
    if scale > 100:
        assert (case.hidden @ case.head.t()).abs().max() > 8e3
    options: dict[str, Any] = {"beta": 0.1, "kl_value": "k2", "entropy_coef": 0.01, "temperature": 0.9}
    # the log-probs above are those of temperature 1; at .9 the ratios spread further, at scale 300 very far
    case = replace(case, old=(base := brute(case, **options)["logprobs"]).float() + 0.1, ref=base.float() - 0.1)
    truth, budget, ours = brute(case, **options), float32_budget(case, **options), run(case, chunk_rows=48, **options)
    for name in ("logprobs", "entropy", "hidden_grad", "head_grad", "loss"):
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name
        assert ours[name].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_keep_float32_log_probs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # blocks of 64 columns, so that the head is brought to float32 in several pieces, the last one ragged
    monkeypatch.setattr(matmul, "BLOCK_BYTES", 64 * 4 * 96)
    case = make_case(100, H=96, V=601, seed=1)
    case = replace(case, hidden=case.hidden.to(dtype), head=case.head.to(dtype), weights=case.weights / 100)
    truth = brute(case, beta=0.1, entropy_coef=0.01)
    budget = float32_budget(case, beta=0.1, entropy_coef=0.01)
    case = replace(case, old=case.old.float(), advantages=case.advantages.float(), ref=case.ref.float())
    ours = run(case, chunk_rows=33, beta=0.1, entropy_coef=0.01)
    assert ours["logprobs"].dtype == torch.float32 and ours["hidden_grad"].dtype == ours["head_grad"].dtype == dtype
    for name in ("logprobs", "entropy"):
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name
        assert (ours[name].double() - truth[name]).abs().max() <= 1e-3, name
    for name in ("hidden_grad", "head_grad"):
        # float32 inside, rounded once to the inputs' dtype at the end
        unit = torch.finfo(dtype).eps * truth[name].abs() + 1e-7
        assert ((ours[name].double() - truth[name]).abs() <= unit).all(), name


def test_the_path_of_mixed_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path for bfloat16, on a CPU, with the matmul it relies on stood in for."""
    real_mm, real_addmm = torch.mm, torch.addmm

    def mixed(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out_dtype is not None:
            assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
            a, b = a.float(), b.float()
        return real_mm(a, b) if out is None else real_mm(a, b, out=out)

    def mixed_add(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, beta: int, out: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and c.dtype == out_dtype == torch.float32
        return real_addmm(c, a.float(), b.float(), beta=beta, out=out)

    monkeypatch.setattr(matmul, "mixed_matmul", lambda tensor: tensor.dtype == torch.bfloat16)
    monkeypatch.setattr(matmul, "BLOCK_BYTES", 64 * 4 * 32)
    monkeypatch.setattr(torch, "mm", mixed)
    monkeypatch.setattr(torch, "addmm", mixed_add)
    case = make_case(100, H=32, V=301)
    case = replace(case, hidden=case.hidden.bfloat16(), head=case.head.bfloat16())
    truth, ours = brute(case, beta=0.1), run(case, chunk_rows=33, beta=0.1)
    assert (ours["logprobs"] - truth["logprobs"]).abs().max() < 1e-5
    for name in ("hidden_grad", "head_grad"):
        # the logits' gradients are bfloat16 operands here: relative error 2^-9 each, averaged out by the sum
        assert (ours[name] - truth[name]).norm() < 4e-3 * truth[name].norm(), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_torch_face_on_cuda(dtype: torch.dtype) -> None:
    case = make_case(1025, H=128, V=1000)
    case = replace(case, hidden=case.hidden.to(dtype), head=case.head.to(dtype))
    truth = brute(case, beta=0.1)
    ours = run(Case(*(tensor.cuda() for tensor in case.__dict__.values())), chunk_rows=300, beta=0.1)
    assert (ours["logprobs"].cpu() - truth["logprobs"]).abs().max() < 1e-3
    for name in ("hidden_grad", "head_grad"):
        assert (ours[name].cpu() - truth[name]).norm() < 5e-3 * truth[name].norm(), name


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_masked_rows_are_absent_whatever_they_hold(poison: float) -> None:
    case = make_case(100, seed=2).to(torch.float32)
    masked = case.weights == 0
    assert 5 < masked.sum() < 95
    options: dict[str, Any] = {"beta": 0.2, "kl_value": "k3", "entropy_coef": 0.1, "chunk_rows": 24}
    clean = run(case, **options)
    filled = {
        name: torch.where(masked if getattr(case, name).dim() == 1 else masked[:, None], poison, getattr(case, name))
        for name in ("hidden", "old", "advantages", "ref")
    }
    poisoned = run(replace(case, targets=torch.where(masked, -100, case.targets), **filled), **options)
    assert_same_bits(poisoned, clean)
    assert (poisoned["hidden_grad"][masked] == 0).all() and (poisoned["hidden_grad"][~masked] != 0).any(1).all()
    for name in ("logprobs", "ratios", "entropy", *ESTIMATORS):
        assert (poisoned[name][masked] == 0).all(), name
    assert not poisoned["result"].clipped[masked].any()
    # and absent means: the loss of the other rows alone
    kept = Case(**{n: t if n == "head" else t[~masked] for n, t in case.__dict__.items()})
    alone = run(kept, **options)
    assert_same_bits(
        {"head_grad": clean["head_grad"], "loss": clean["loss"]}, {k: alone[k] for k in ("head_grad", "loss")}
    )
    assert torch.equal(clean["hidden_grad"][~masked], alone["hidden_grad"])


@pytest.mark.parametrize("T", [0, 1, 40])
def test_no_rows_that_count(T: int) -> None:
    case = replace(make_case(T), weights=torch.zeros(T, dtype=torch.float64))
    found = run(case, beta=0.1)
    assert found["loss"] == 0 and found["result"].capped == 0
    assert torch.equal(found["hidden_grad"], torch.zeros(T, 16, dtype=torch.float64))
    assert torch.equal(found["head_grad"], torch.zeros(50, 16, dtype=torch.float64))
    assert found["logprobs"].shape == found["result"].clipped.shape == (T,)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_columns_beyond_the_vocabulary_do_not_exist(garbage: float) -> None:
    case = make_case(60, V=37).to(torch.float32)
    padded = replace(case, head=torch.cat([case.head, torch.full((11, 16), garbage)]))
    options: dict[str, Any] = {"beta": 0.1, "entropy_coef": 0.1, "chunk_rows": 24}
    exact, found = run(case, **options), run(padded, vocab_size=37, **options)
    assert torch.equal(found["head_grad"][37:], torch.zeros(11, 16))
    found["head_grad"] = found["head_grad"][:37]
    assert_same_bits(found, exact)


def test_strides_do_not_matter() -> None:
    case = make_case(70, H=12, V=31)
    T, H = case.hidden.shape
    wide = torch.full((31, 2 * H), math.nan, dtype=torch.float64)
    wide[:, ::2] = case.head
    tall = torch.full((T * 3, 2), math.nan, dtype=torch.float64)
    tall[::3, 1] = case.ref
    strided = replace(
        case,
        hidden=case.hidden.t().contiguous().t(),
        head=wide[:, ::2],
        targets=case.targets.repeat_interleave(2)[::2],
        old=torch.stack([case.old, case.old], 1)[:, 0],
        advantages=torch.tensor(0.7, dtype=torch.float64).expand(T),
        ref=tall[::3, 1],
    )
    assert not any(getattr(strided, name).is_contiguous() for name in ("hidden", "head", "old", "ref"))
    hidden, head = (t.detach().requires_grad_() for t in (strided.hidden, strided.head))
    buffer = torch.zeros(H, 31, dtype=torch.float64).t()
    options: dict[str, Any] = {
        "beta": 0.1,
        "entropy_coef": 0.1,
        "ref_logprobs_T": strided.ref,
        "chunk_rows": 13,
    }
    grpo_loss(hidden, head, *strided.arguments[2:], **options).loss.backward()
    result = grpo_loss(hidden, head, *strided.arguments[2:], lm_head_grad_VH=buffer, **options)
    truth = brute(strided, beta=0.1, entropy_coef=0.1)
    assert_close(
        {"hidden_grad": hidden.grad, "head_grad": head.grad},
        {k: truth[k] for k in ("hidden_grad", "head_grad")},
    )
    assert_close(
        {"hidden_grad": result.hidden_grad_TH, "head_grad": buffer},
        {k: truth[k] for k in ("hidden_grad", "head_grad")},
    )


def rows_at(logp: float, count: int = 1, dtype: torch.dtype = torch.float32) -> Case:
    """Rows whose target has log-prob log(1/2): two columns, equal logits. Tests place old and ref."""
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
    assert ((values - exact).abs() <= 1e-3 * exact).all()


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
    # k3 explodes; the ratio does (negative advantage: not clipped); both; neither; one that is masked
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
        rows_at(logp),
        old=torch.tensor([logp - 200]),
        ref=torch.tensor([logp + 1e4]),
        advantages=torch.tensor([-1e6]),
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
            assert error <= torch.finfo(dtype).eps / 2 * truth[name].norm(), name


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
    torch.testing.assert_close(held - 7.0, ordinary["head_grad"], rtol=1e-5, atol=4e-6)
    assert (held[41:] == 7.0).all()


def test_work_is_done_only_where_a_gradient_is_wanted() -> None:
    case = replace(make_case(64).to(torch.float32), weights=torch.ones(64))
    case = replace(case, advantages=torch.where(case.advantages == 0, 1.0, case.advantages))

    def matmuls(hidden_grad: bool, head_grad: bool, grad: bool = True, **options: Any) -> tuple[int, LossResult]:
        hidden, head = (
            case.hidden.clone().requires_grad_(hidden_grad),
            case.head.clone().requires_grad_(head_grad),
        )
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
    # half the rows without advantage: a chunk of three matmuls and one forward only
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
    torch.testing.assert_close(head.grad.double(), dlogits.t() @ hidden.double(), rtol=1e-4, atol=1e-6)


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


def expected_gradient(kl: str, behaviour: Tensor, logits: Tensor, ref: Tensor) -> Tensor:
    """Gradient of E_behaviour[KL estimator] by the logits, by enumeration: a row for every token, weighted by
    its probability under the behaviour policy."""
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
    # the biased ones are biased
    assert (expected_gradient("k2", behaviour, logits, ref) - reverse).abs().max() > 0.05
    assert (forward - reverse).abs().max() > 0.05


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
    # rows are dropped, and those of advantage 0 go last: neither changes the bits of a row
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
    # With advantages of 1 it is the gradient of the cross-entropy.
    loss = grpo_loss(hidden, head, targets, None, torch.ones(9).double(), weights).loss
    (sft,) = torch.autograd.grad(loss, hidden)
    nll = (torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none") * weights).sum()
    (brute,) = torch.autograd.grad(nll, hidden)
    torch.testing.assert_close(sft, brute, rtol=1e-10, atol=1e-14)
