"""Tests of libraries that compute attention in parts, on a CPU with stand-ins that have the real parameters: the layout
passed to them, values and gradients, and the message for a library that has no parts."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from backend_fakes import ANYTHING, FLASH, stand_in

from thresher.kernels.attention.backends import parts
from thresher.kernels.attention.backends.choice import Backend
from thresher.kernels.attention.backends.libraries import Unserved
from thresher.kernels.attention.backends.parts import LibraryParts, load_forest_attention, load_partial_attention
from thresher.kernels.attention.parts import MatmulAttention, SegmentPairs, cpu_attention
from thresher.kernels.attention.prefix import PrefixForest, prefix_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FOREST = [5, 3, 2, 4, 1, 6, 2], [-1, 0, 1, 1, 0, -1, 5]
PLAIN = MatmulAttention()


def as_part(cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, causal: bool) -> SegmentPairs:
    """Return the layout that a library was given, after the library's own checks."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    runs_q, runs_k = list(pairwise(cu_q.tolist())), list(pairwise(cu_k.tolist()))
    assert max_q == max(b - a for a, b in runs_q) and max_k == max(b - a for a, b in runs_k)
    assert not causal or runs_q == runs_k
    return SegmentPairs(runs_q, runs_k, causal, CPU)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: SegmentPairs) -> tuple[torch.Tensor, torch.Tensor]:
    assert q.dtype == k.dtype == v.dtype and all(x.stride(-1) == 1 for x in (q, k, v))
    out_TND, lse_TN = PLAIN.forward(q, k, v, part)
    return out_TND, lse_TN.t().contiguous()


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: SegmentPairs,
) -> list[torch.Tensor]:
    assert grad.shape == q.shape == out.shape and lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    assert grad.dtype == out.dtype == q.dtype and lse.dtype == torch.promote_types(q.dtype, torch.float32)
    return [x.to(q.dtype) for x in PLAIN.backward(grad, q, k, v, out, lse.t(), part)]


def forward(arguments: dict[str, Any]) -> tuple[Any, ...]:
    q, k, v, *runs = list(arguments.values())[:7]
    assert arguments.get("softmax_scale") in (None, pytest.approx(q.shape[-1] ** -0.5))
    causal = arguments["causal"] if "causal" in arguments else arguments["is_causal"]
    return *attend(q, k, v, as_part(*runs, causal)), None, None


def backward(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    assert arguments["rng_state"].dtype == torch.uint64 and arguments["rng_state"].shape == (2,)
    assert arguments["unused"].numel() == 0
    *tensors, cu_q, cu_k, max_q, max_k, _, causal = list(arguments.values())[:12]
    return tuple(gradients(*tensors, as_part(cu_q, cu_k, max_q, max_k, causal)))


def backward_into(arguments: dict[str, Any]) -> None:
    *tensors, dq, dk, dv, cu_q, cu_k, max_q, max_k, _, scale, causal = list(arguments.values())[:16]
    assert scale == pytest.approx(tensors[1].shape[-1] ** -0.5)
    found = gradients(*tensors, as_part(cu_q, cu_k, max_q, max_k, causal))
    for into, x in zip((dq, dk, dv), found, strict=True):
        assert into.is_contiguous()
        into.copy_(x)


CUMULATIVE = "cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal"
aten_forward = stand_in(
    f"query, key, value, {CUMULATIVE}, return_debug_mask, *, scale=None, window_size_left=None, "
    "window_size_right=None, seqused_k=None, alibi_slopes=None",
    lambda arguments: (*forward(arguments), None),
    dropout_p=0.0,
    return_debug_mask=False,
)
aten_backward = stand_in(
    f"grad_out, query, key, value, out, logsumexp, {CUMULATIVE}, rng_state, unused, *, scale=None, "
    "window_size_left=None, window_size_right=None",
    backward,
    dropout_p=0.0,
)
flash_forward = stand_in(
    f"{FLASH}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
    forward,
    dropout_p=0.0,
)
flash_backward = stand_in(
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
    "softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, "
    "rng_state=None, zero_tensors=False",
    backward_into,
    dropout_p=0.0,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=ANYTHING,
)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-ins in place of the libraries, and run trials on "cuda" on the CPU."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    module: Any = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = flash_forward, flash_backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    real = parts.try_parts

    def on_the_cpu(attention: Any, device: torch.device, *rest: Any) -> None:
        assert device == CUDA
        real(attention, CPU, *rest)

    monkeypatch.setattr(parts, "try_parts", on_the_cpu)


def result(layout: PrefixForest) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(FOREST[0]), 8, 16, generator=noise, dtype=torch.float64)
    grad = torch.randn(sum(FOREST[0]), 4, 16, generator=noise, dtype=torch.float64)
    leaves = [x.detach().requires_grad_() for x in qkv.split([4, 2, 2], 1)]
    out = prefix_attention(*leaves, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["varlen", "flash2"])
@pytest.mark.usefixtures("libraries")
def test_a_library_computes_parts(backend: Backend, dtype: torch.dtype) -> None:
    attention = load_partial_attention(backend, CUDA, dtype, 64)
    assert attention.by_level
    found = result(PrefixForest(*FOREST, attention=attention))
    for got, expected in zip(found, result(PrefixForest(*FOREST)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    depths = PrefixForest(*FOREST, attention=attention).parts
    assert [part.causal for part in depths] == [True, False, False]  # three levels, three calls


def test_on_a_cpu_there_is_no_library() -> None:
    assert load_partial_attention("torch", CPU, torch.float32, 10) is cpu_attention()


def reason(backend: Backend, dtype: torch.dtype = torch.bfloat16) -> str:
    with pytest.raises(Unserved) as error:
        load_partial_attention(backend, CUDA, dtype, 64)
    return str(error.value)


@pytest.mark.usefixtures("libraries")
def test_what_has_no_parts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("flash3", "xformers", "sdpa", "math"):
        assert reason(backend) == "gives no log-sum-exp, or has no backward that takes one"  # type: ignore[arg-type]
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    assert reason("flash2").startswith("needs the package flash-attn, which is not installed")


def no_kernel(*given: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device\nand more")


def shifted(*given: Any) -> Any:
    out, *rest = aten_forward(*given)
    return out.roll(1, 0), *rest


def one_too_large(*given: Any) -> Any:
    out, lse, *rest = aten_forward(*given)
    return out, lse + 1, *rest


def another_signature(query: Any, key: Any, value: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (no_kernel, "does not run in parts here (no kernel image is available for execution on the device)"),
        (shifted, "is off by"),
        (one_too_large, "is off by"),
        (another_signature, "does not run in parts here (another_signature() takes 3 positional arguments"),
    ],
)
@pytest.mark.usefixtures("libraries")
def test_a_library_is_tried(broken: Callable[..., Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", broken)
    assert reason("varlen").startswith(expected)


def loaded_forest(dtype: torch.dtype, dim: int) -> Any:
    return load_forest_attention("varlen", CUDA, dtype, dim)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(("off", "expected"), [(0.0, None), (0.1, "is off by"), (None, "no assembler")])
@pytest.mark.usefixtures("libraries")
def test_kernels_that_fail_their_trial_give_way(
    off: float | None, expected: str | None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    from thresher.kernels.attention.forest_triton import TritonForest

    def played(self: TritonForest, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PrefixForest) -> Any:
        if off is None:
            raise OSError("no assembler\nand more")
        return prefix_attention(q, k, v, PrefixForest(layout.lengths, layout.parents)) * (1 + off)

    monkeypatch.setattr(TritonForest, "attend", played)
    found = loaded_forest(torch.bfloat16, 64)
    told = [str(one.message) for one in recwarn if "forest" in str(one.message)]
    if expected is None:
        assert isinstance(found, TritonForest) and not told
    else:
        assert isinstance(found, LibraryParts) and len(told) == 1
        assert (
            told[0].startswith(f"attention over a forest in Triton does not run ({expected}") and "more" not in told[0]
        )
    for unserved in ((torch.float16, 64), (torch.bfloat16, 264)):
        assert isinstance(loaded_forest(*unserved), LibraryParts)


@pytest.mark.parametrize(
    ("name", "fake"), [("_flash_attention_forward", aten_forward), ("_flash_attention_backward", aten_backward)]
)
def test_the_stand_ins_have_torchs_own_parameters(name: str, fake: Callable[..., Any]) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    real = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    parameters = signature(fake).parameters.values()
    assert [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD] == real
    named = {argument.name for argument in schema.arguments if argument.kwarg_only}
    assert {p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY} <= named
