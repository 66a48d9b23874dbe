"""Tests of grpo_loss against a brute-force float64 loss: values, gradients, low precision, masks, strides."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Case, assert_close, assert_same_bits, bfloat16_budget, brute, float32_budget, make_case, run
from torch import Tensor

from thresher.kernels import grpo_loss, operands
from thresher.kernels.loss import reference_grpo_loss
from thresher.kernels.objective import CHOICES, ESTIMATORS


# Every value with every gradient; the other settings vary with them, so that the table stays small.
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
    # 48 divides none of the lengths; by default all rows fit in one or two chunks
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


# At scale 300 logits reach +-1e4, where float32 keeps three decimals; the budget accounts for it.
@pytest.mark.parametrize("onednn", [False, True], ids=["MKL", "oneDNN"])
@pytest.mark.parametrize(
    ("T", "H", "V", "scale"), [(100, 96, 600, 0.3), (63, 64, 1000, 1.0), (257, 33, 151, 0.5), (64, 64, 300, 300.0)]
)
def test_float32_error_is_within_its_budget(
    T: int, H: int, V: int, scale: float, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(operands, "ONEDNN_FROM", 0)
    monkeypatch.setattr(operands, "onednn_is_faster", lambda right_KN: onednn)
    monkeypatch.setattr(operands, "COLUMNS_AT_A_TIME", 128)
    case = make_case(T, H, V, seed=5, scale=scale, spread=0.2).to(torch.float32)
    if scale > 100:
        assert (case.hidden @ case.head.t()).abs().max() > 3e3
    options: dict[str, Any] = {"beta": 0.1, "kl_value": "k2", "entropy_coef": 0.01, "temperature": 0.9}
    # the case's log-probs are those of temperature 1; at .9 ratios spread further, at scale 300 very far
    case = replace(case, old=(base := brute(case, **options)["logprobs"]).float() + 0.1, ref=base.float() - 0.1)
    truth, budget, ours = brute(case, **options), float32_budget(case, **options), run(case, chunk_rows=48, **options)
    for name in ("logprobs", "entropy", "hidden_grad", "head_grad", "loss"):
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name
        assert ours[name].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_keep_float32_log_probs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # slabs of 64 columns, so that the head is converted to float32 in several pieces, the last one ragged
    monkeypatch.setattr(operands, "SLAB_BYTES", 64 * 4 * 96)
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
        assert ((ours[name].double() - truth[name]).abs() <= unit).all(), name  # bound: half of it, and float32's


def test_the_path_of_mixed_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path for bfloat16 runs on a CPU, with a stand-in for the mixed-precision matmul."""
    real_mm, real_addmm = torch.mm, torch.addmm

    def mixed(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out_dtype is not None:
            assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
            a, b = a.float(), b.float()
        return real_mm(a, b) if out is None else real_mm(a, b, out=out)

    def mixed_add(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, beta: int, out: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and c.dtype == out_dtype == torch.float32
        return real_addmm(c, a.float(), b.float(), beta=beta, out=out)

    monkeypatch.setattr(operands, "mixed_matmul", lambda tensor: tensor.dtype == torch.bfloat16)
    monkeypatch.setattr(operands, "SLAB_BYTES", 64 * 4 * 32)
    monkeypatch.setattr(torch, "mm", mixed)
    monkeypatch.setattr(torch, "addmm", mixed_add)
    case = make_case(100, H=32, V=301)
    case = replace(case, hidden=case.hidden.bfloat16(), head=case.head.bfloat16())
    truth, ours = brute(case, beta=0.1), run(case, chunk_rows=33, beta=0.1)
    budget = bfloat16_budget(case, beta=0.1)
    assert (ours["logprobs"] - truth["logprobs"]).abs().max() < 1e-5
    for name in ("hidden_grad", "head_grad"):
        assert (ours[name] - truth[name]).norm() <= budget[name], name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_torch_backend_on_cuda(dtype: torch.dtype) -> None:
    case = make_case(1025, H=128, V=1000)
    case = replace(case, hidden=case.hidden.to(dtype), head=case.head.to(dtype))
    truth = brute(case, beta=0.1)
    ours = run(Case(*(tensor.cuda() for tensor in case.__dict__.values())), chunk_rows=300, beta=0.1)
    assert (ours["logprobs"].cpu() - truth["logprobs"]).abs().max() < 1e-3
    for name in ("hidden_grad", "head_grad"):
        assert (ours[name].cpu() - truth[name]).norm() < 5e-3 * truth[name].norm(), name


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_masked_rows_are_left_out_whatever_they_hold(poison: float) -> None:
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
    # the result is the loss of the other rows alone
    kept = Case(**{n: t if n == "head" else t[~masked] for n, t in case.__dict__.items()})
    alone = run(kept, **options)
    assert_same_bits(
        {"head_grad": clean["head_grad"], "loss": clean["loss"]}, {k: alone[k] for k in ("head_grad", "loss")}
    )
    assert torch.equal(clean["hidden_grad"][~masked], alone["hidden_grad"])


@pytest.mark.parametrize("T", [0, 1, 40])
def test_all_rows_masked(T: int) -> None:
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
    options: dict[str, Any] = {"beta": 0.1, "entropy_coef": 0.1, "ref_logprobs_T": strided.ref, "chunk_rows": 13}
    grpo_loss(hidden, head, *strided.arguments[2:], **options).loss.backward()
    result = grpo_loss(hidden, head, *strided.arguments[2:], lm_head_grad_VH=buffer, **options)
    truth = brute(strided, beta=0.1, entropy_coef=0.1)
    assert_close(
        {"hidden_grad": hidden.grad, "head_grad": head.grad}, {k: truth[k] for k in ("hidden_grad", "head_grad")}
    )
    assert_close(
        {"hidden_grad": result.hidden_grad_TH, "head_grad": buffer}, {k: truth[k] for k in ("hidden_grad", "head_grad")}
    )
