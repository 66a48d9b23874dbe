"""Tests of the attention library adapters. On a CPU they run on stand-ins with the libraries' own parameters, against
the reference in float64, values and gradients; an installed library is also compared with its stand-in."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import backend_fakes
import pytest
import torch
from backend_fakes import FAKES, BlockDiagonalCausalMask, install
from torch import Tensor
from torch.nn.attention import SDPBackend

from thresher.kernels.attention import varlen
from thresher.kernels.attention.backends import libraries
from thresher.kernels.attention.backends.choice import try_attention
from thresher.kernels.attention.backends.libraries import (
    Unserved,
    load_flash2,
    load_flash3,
    load_part,
    load_torch_varlen,
    load_xformers,
    repeat_heads,
)
from thresher.kernels.attention.varlen import TrainingAttention, Varlen, varlen_attention

LOADERS: dict[str, Callable[[], TrainingAttention]] = {
    "varlen_211": load_torch_varlen,
    "varlen_212": load_torch_varlen,
    "flash2": load_flash2,
    "flash3": load_flash3,
    "flash3_early": load_flash3,
    "xformers": load_xformers,
}
HEADS = [(1, 1, 8), (6, 6, 16), (4, 2, 24), (14, 2, 64)]  # query heads, key/value heads, head dimension
LENGTHS = [[1], [5, 1, 1, 20], [33, 64, 7]]


def projected(heads: tuple[int, int, int], count: int) -> Tensor:
    """Return a layer's fused projection, [T, N + 2K, D]: q, k and v are views of it, none of them contiguous."""
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, query_heads + 2 * kv_heads, dim, generator=generator, dtype=torch.float64) * 1.5


def run(attend: TrainingAttention, qkv: Tensor, kv_heads: int, layout: Varlen) -> Tensor:
    heads = qkv.shape[1] - 2 * kv_heads
    q_TND, k_TKD, v_TKD = qkv.split([heads, kv_heads, kv_heads], 1)
    return attend(q_TND, k_TKD, v_TKD, layout)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_an_adapter_is_the_reference(
    name: str, heads: tuple[int, int, int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, name)
    attend, layout = LOADERS[name](), Varlen(lengths)
    qkv = projected(heads, sum(lengths)).requires_grad_()
    weights_TND = torch.randn(sum(lengths), heads[0], heads[2], generator=torch.Generator().manual_seed(1)).double()
    results = []
    for one in (attend, varlen_attention):
        out = run(one, qkv, heads[1], layout)
        results.append((out, *torch.autograd.grad((out * weights_TND).sum(), qkv)))
    for got, truth in zip(*results, strict=True):
        # Each value is a sum of at most 64 terms of order 1; a gradient has about 64 x 7 more terms.
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            torch.testing.assert_close(run(attend, qkv.detach(), heads[1], layout), results[1][0], rtol=0, atol=1e-13)


def test_a_layout_says_where_sequences_begin() -> None:
    layout = Varlen([3, 1, 2])
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 6] and layout.cu_seqlens.dtype == torch.int32
    assert layout.longest == 3 and type(layout.longest) is int
    assert [layout.once("a", lambda: [1]) for _ in range(2)] == [[1], [1]] and layout.once("b", lambda: 2) == 2


def test_a_layout_first_used_in_inference_may_be_trained_with() -> None:
    layout = Varlen([2, 3])
    with torch.inference_mode():
        run(varlen_attention, projected((2, 1, 8), 5), 1, layout)
        assert not layout.once("made", lambda: torch.ones(1)).is_inference()
    qkv = projected((2, 1, 8), 5).requires_grad_()
    assert torch.autograd.grad(run(varlen_attention, qkv, 1, layout).sum(), qkv)[0].isfinite().all()


# --- xformers: groups are a fifth dimension when there is no backward; one mask per forward


def test_xformers_groups_heads_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "xformers")
    attend, layout = load_xformers(), Varlen([4, 3])
    qkv = projected((4, 2, 8), 7)
    before = BlockDiagonalCausalMask.made
    backend_fakes.ranks.clear()
    run(attend, qkv, 2, layout)
    run(attend, qkv.requires_grad_(), 2, layout)
    run(attend, projected((2, 2, 8), 7), 2, layout)  # equal numbers of heads: nothing to group
    assert backend_fakes.ranks == [5, 4, 4]
    assert BlockDiagonalCausalMask.made == before + 1
    run(attend, qkv, 2, Varlen([7]))
    assert BlockDiagonalCausalMask.made == before + 2


# --- SDPA: only the kernels that were named, and no groups, which the memory-efficient kernel does not support


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sdpa_takes_only_the_kernels_that_it_may(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> Tensor:
        flags.append((torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        assert q.shape == k.shape == v.shape and kwargs == {"is_causal": True, "enable_gqa": False}
        return real(q, k, v, is_causal=True)

    qkv, layout = projected((4, 2, 8), 9).to(dtype).requires_grad_(), Varlen([6, 3])
    exact = qkv.detach().double().requires_grad_()
    truth = run(varlen_attention, exact, 2, layout)
    truth_grad = torch.autograd.grad(truth.sum(), exact)[0]
    monkeypatch.setattr(varlen.F, "scaled_dot_product_attention", watched)
    for attend in (libraries.load_sdpa(), libraries.load_sdpa(libraries.MATH)):
        out = run(attend, qkv, 2, layout)
        # A sum of 8 terms is off by 8 roundings of eps / 2, and a gradient is two such sums in sequence.
        assert (out - truth).norm() <= 4 * torch.finfo(dtype).eps * truth.norm()
        grad = torch.autograd.grad(out.sum(), qkv)[0]
        assert (grad - truth_grad).norm() <= 8 * torch.finfo(dtype).eps * truth_grad.norm()
    assert flags == [(False, True), (True, False)]
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
    with pytest.raises(RuntimeError):  # a CPU has no memory-efficient kernel
        run(libraries.load_sdpa([SDPBackend.EFFICIENT_ATTENTION]), qkv.detach(), 2, layout)


def test_heads_are_repeated_in_groups() -> None:
    x_TKD = torch.arange(6.0).view(1, 3, 2).requires_grad_()
    assert torch.equal(repeat_heads(x_TKD, 6), x_TKD.repeat_interleave(2, 1))
    assert repeat_heads(x_TKD, 3) is x_TKD
    grad = torch.autograd.grad((repeat_heads(x_TKD, 6) * torch.arange(12.0).view(1, 6, 2)).sum(), x_TKD)[0]
    assert grad.tolist() == [[[2, 4], [10, 12], [18, 20]]]


# --- Checks of the installed libraries


def parameters(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    found = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in found]


def missing(real: Callable[..., object], recorded: Callable[..., object]) -> list[object]:
    """Return the stand-in's parameters that the library lacks or orders differently; the library may have more."""
    there = [parameter for parameter in parameters(real) if parameter in parameters(recorded)]
    absent: list[object] = [parameter for parameter in parameters(recorded) if parameter not in there]
    return absent if absent or there == parameters(recorded) else ["another order"]


def test_the_test_of_parameters_can_tell() -> None:
    assert missing(lambda a, b, c=1: 0, lambda a, c=1: 0) == []
    assert missing(lambda a, c=2: 0, lambda a, c=1: 0) == [("c", inspect.Parameter.POSITIONAL_OR_KEYWORD, 1)]
    assert missing(lambda b, a: 0, lambda a, b: 0) == ["another order"]


def test_torch_has_the_parameters_that_its_stand_in_has() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert missing(varlen_attn, FAKES["varlen_211"]) == []
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        assert missing(varlen_attn, FAKES["varlen_212"]) == []
    else:
        assert torch.__version__.startswith("2.11.")


def test_flash_attn_has_the_parameters_that_its_stand_in_has() -> None:
    module = pytest.importorskip("flash_attn", exc_type=ImportError)
    assert missing(module.flash_attn_varlen_func, FAKES["flash2"]) == []


def test_flash_attention_3_has_the_parameters_that_its_stand_in_has() -> None:
    module = pytest.importorskip("flash_attn_interface", exc_type=ImportError)
    assert missing(module.flash_attn_varlen_func, FAKES["flash3"]) == []


def test_xformers_has_the_parameters_that_its_stand_in_has() -> None:
    ops = pytest.importorskip("xformers.ops", exc_type=ImportError)
    bias = pytest.importorskip("xformers.ops.fmha.attn_bias")
    assert missing(ops.memory_efficient_attention, FAKES["xformers"]) == []
    real, fake = bias.BlockDiagonalCausalMask, BlockDiagonalCausalMask
    assert missing(real.from_seqlens, fake.from_seqlens) == []
    mask = real.from_seqlens([2, 3], device=torch.device("cpu")).materialize((5, 5))
    sequence_T = torch.tensor([0, 0, 1, 1, 1])
    seen_TT = (sequence_T[:, None] == sequence_T).tril()
    assert torch.equal(mask, torch.zeros(5, 5).masked_fill(~seen_TT, -torch.inf))
    if not torch.cuda.is_available():  # without a GPU it checks its arguments first and looks for a kernel afterwards
        for wanted in (False, True):
            with pytest.raises(NotImplementedError, match="No operator found"):
                run(load_xformers(), projected((4, 2, 8), 5).requires_grad_(wanted), 2, Varlen([2, 3]))


@pytest.mark.parametrize("heads", [(4, 2, 24), (6, 6, 16)], ids=str)
def test_torch_takes_what_its_adapter_hands_it(heads: tuple[int, int, int]) -> None:
    """torch's operator on meta tensors accepts the adapter's arguments, and its backward returns the right shape."""
    layout = Varlen([5, 3], "meta")
    qkv = projected(heads, 8).to("meta", torch.bfloat16).requires_grad_()
    out = run(load_torch_varlen(), qkv, heads[1], layout)
    assert out.shape == (8, heads[0], heads[2]) and out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("load", [load_torch_varlen, load_flash2, load_flash3, load_xformers, libraries.load_sdpa])
@pytest.mark.parametrize("heads", [(14, 2, 64), (12, 2, 128)], ids=str)
def test_a_library_on_a_gpu(load: Callable[[], TrainingAttention], heads: tuple[int, int, int]) -> None:
    """In bfloat16 the error over all values, and over all gradients, is at most twice that of torch's math kernel."""
    try:
        attend = load()
    except Unserved as error:
        pytest.skip(str(error))
    lengths = [100, 1, 257, 64]
    low = projected(heads, sum(lengths)).to("cuda", torch.bfloat16)
    weights_TND = torch.randn(sum(lengths), heads[0], heads[2], generator=torch.Generator().manual_seed(1)).to(low)
    found = []
    for one, qkv in ((attend, low), (libraries.load_sdpa(libraries.MATH), low), (varlen_attention, low.double())):
        qkv = qkv.clone().requires_grad_()
        out = run(one, qkv, heads[1], Varlen(lengths, "cuda"))
        found.append((out, *torch.autograd.grad((out * weights_TND.to(out)).sum(), qkv)))
    for got, own, truth in zip(*found, strict=True):
        assert (got.double() - truth).norm() <= 2 * (own.double() - truth).norm()


# --- Libraries that are missing or do not load


def test_what_is_absent_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for load, text in (
        (load_flash2, "needs the package flash-attn, which is not installed (pip install flash-attn "),
        (load_flash3, "needs FlashAttention-3, which is not installed (python setup.py install"),
        (load_xformers, "needs the package xformers, which is not installed (pip install xformers)"),
        (load_torch_varlen, 'needs torch\'s varlen_attn, which is not installed (pip install "torch>=2.11")'),
    ):
        with pytest.raises(Unserved) as error:
            load()
        assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file\\nand more')", "libcudart.so.12: cannot"),
        ("import module_that_is_nowhere", "No module named 'module_that_is_nowhere'"),
        ("raise OSError", "OSError"),
        ("other = 1", "has no attribute 'part'"),
    ],
)
def test_what_does_not_load_says_why(source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library_of_the_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unserved) as error:
        load_part("a library", "get it", "library_of_the_test", "part")
    monkeypatch.delitem(sys.modules, "library_of_the_test", raising=False)
    text = str(error.value)
    assert text.startswith("needs a library, which does not load here (") and reason in text and "\n" not in text


def test_a_torch_without_a_causal_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):  # type: ignore[no-untyped-def]
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    with pytest.raises(Unserved, match="window_size"):
        load_torch_varlen()


# --- The trial of a backend


def test_a_trial_passes_what_is_right() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for gradients in (False, True):
            try_attention(varlen_attention, torch.device("cpu"), dtype, 24, gradients)


@pytest.mark.parametrize("wrong", ["bounds", "causality", "groups", "nothing", "nan"])
def test_a_trial_finds_what_is_wrong(wrong: str) -> None:
    def attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
        if wrong == "bounds":
            return varlen_attention(q_TND, k_TKD, v_TKD, Varlen([sum(layout.lengths)]))
        if wrong == "causality":
            flipped = varlen_attention(q_TND.flip(0), k_TKD.flip(0), v_TKD.flip(0), Varlen(layout.lengths[::-1]))
            return flipped.flip(0)
        if wrong == "groups":
            return varlen_attention(q_TND, k_TKD, v_TKD, layout) * torch.tensor([1.0, 0.0])[:, None].to(v_TKD)
        return torch.zeros_like(q_TND) if wrong == "nothing" else torch.full_like(q_TND, float("nan"))

    with pytest.raises(Unserved, match="in a test with known attention"):
        try_attention(attend, torch.device("cpu"), torch.bfloat16, 16, False)


def test_a_trial_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    try_attention(varlen_attention, torch.device("cpu"), torch.float32, 8, True)
    assert torch.equal(torch.get_rng_state(), before)
