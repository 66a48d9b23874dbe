"""Tests of the choice of attention library. The GPU is faked: libraries are stand-ins, and trials run on the CPU."""

from typing import Any

import pytest
import torch
from backend_fakes import flash_attn_varlen_func, install
from torch import Tensor

from thresher.kernels.attention.backends import choice, libraries
from thresher.kernels.attention.backends.choice import LIBRARIES, Backend, Purpose, load_attention, resolve_attention
from thresher.kernels.attention.varlen import Varlen, varlen_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
ALL = ("varlen_212", "flash3", "flash2", "xformers")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials on "cuda" on the CPU, where SDPA has one fused kernel, flash, for any head size and dtype."""
    real = choice.try_attention

    def on_the_cpu(attend: Any, device: torch.device, *rest: Any) -> None:
        assert device == CUDA
        real(attend, CPU, *rest)

    monkeypatch.setattr(choice, "try_attention", on_the_cpu)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())  # Triton is installed


def no_fused_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        return libraries.load_sdpa([libraries.SDPBackend.EFFICIENT_ATTENTION])  # which no CPU has

    monkeypatch.setitem(LIBRARIES, "sdpa", choice.Library(load, aligned=False))


def message(name: str, device: torch.device, dtype: torch.dtype, dim: int, purpose: Purpose) -> str:
    with pytest.raises(ValueError) as error:
        resolve_attention(name, device, dtype, dim, purpose)
    text = str(error.value)
    assert text.startswith("attention is ") and "\n" not in text and not text.endswith(".")
    return text


@pytest.mark.parametrize("purpose", ["training", "rollout"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_on_a_cpu_there_is_torch(dtype: torch.dtype, purpose: Purpose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(monkeypatch, *ALL)
    for name in ("auto", "torch"):
        assert resolve_attention(name, CPU, dtype, 10, purpose) == "torch"
    assert load_attention("torch") is varlen_attention
    for name in ("flash", "xformers"):
        told = message(name, CPU, dtype, 64, purpose)
        assert told == f'attention is "{name}", which needs CUDA (the model is on cpu); set it to "auto" or "torch"'
    expected = "needs CUDA (the model is on cpu)" if purpose == "rollout" else "serves rollouts and has no backward"
    assert message("triton", CPU, dtype, 64, purpose) == (
        f'attention is "triton", which {expected}; set it to "auto" or "torch"'
    )


def test_what_is_missing_is_named_beside_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    told = message("flash", CPU, BF16, 64, "training")
    assert "needs CUDA (the model is on cpu) and needs the package flash-attn, which is not installed (pip" in told
    assert "the package xformers, which is not installed (pip install xformers)" in message(
        "xformers", CPU, BF16, 64, "rollout"
    )


def test_another_name_is_refused() -> None:
    assert message("shared", CPU, FP32, 64, "rollout") == (
        'attention is \'shared\'; expected "auto" or "torch" or "triton" or "flash" or "xformers"'
    )
    with pytest.raises(ValueError, match='attention is "triton"; expected one of torch, varlen'):
        load_attention("triton")


@pytest.mark.parametrize(
    ("there", "low", "single"),
    [
        (ALL, "varlen", "xformers"),
        (("flash2", "xformers", "flash3"), "flash3", "xformers"),
        (("xformers", "flash2"), "flash2", "xformers"),
        (("xformers",), "xformers", "xformers"),
        ((), "sdpa", "sdpa"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_first_that_is_there(
    there: tuple[str, ...], low: Backend, single: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *there)
    assert resolve_attention("auto", CUDA, BF16, 64, "training") == low
    assert resolve_attention("auto", CUDA, FP32, 64, "training") == single
    layout = Varlen([3, 2])
    qkv = torch.randn(3, 5, 2, 64, dtype=torch.float64)
    for backend in (low, single):
        torch.testing.assert_close(load_attention(backend)(*qkv, layout), varlen_attention(*qkv, layout))


@pytest.mark.usefixtures("gpu")
def test_torch_and_flash_are_the_best_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *ALL)
    assert resolve_attention("torch", CUDA, BF16, 64, "training") == "varlen"
    assert resolve_attention("torch", CUDA, BF16, 20, "training") == "sdpa"
    assert resolve_attention("torch", CUDA, FP32, 64, "training") == "sdpa"
    assert resolve_attention("flash", CUDA, BF16, 64, "training") == "flash3"
    assert resolve_attention("xformers", CUDA, FP32, 4, "training") == "xformers"
    install(monkeypatch, "flash2")
    assert resolve_attention("flash", CUDA, BF16, 64, "training") == "flash2"
    assert resolve_attention("torch", CUDA, BF16, 64, "training") == "sdpa"


@pytest.mark.usefixtures("gpu")
def test_the_math_kernel_runs_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    no_fused_sdpa(monkeypatch)
    for dtype, advice in ((FP32, 'set model.dtype to "bfloat16", or set it to "torch"'), (BF16, 'set it to "torch"')):
        told = message("auto", CUDA, dtype, 20, "training")
        assert "a head size of 20" in told and "only SDPA's math kernel is left" in told and "No viable" in told
        assert told.endswith(f"; {advice} to use that kernel anyway")
        assert resolve_attention("torch", CUDA, dtype, 20, "training") == "math"


@pytest.mark.usefixtures("gpu")
def test_what_a_library_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *ALL)
    assert "which serves bfloat16 and float16, not float32; set" in message("flash", CUDA, FP32, 64, "training")
    for dim in (20, 264):
        told = message("flash", CUDA, BF16, dim, "training")
        assert f"which serves head sizes that are multiples of 8 up to 256, not {dim}; set" in told
    assert "serves head sizes that are multiples of 4, not 6; set" in message("xformers", CUDA, FP32, 6, "training")
    assert resolve_attention("auto", CUDA, BF16, 264, "training") == "xformers"
    assert "serves rollouts and has no backward" in message("triton", CUDA, BF16, 64, "training")


@pytest.mark.usefixtures("gpu")
def test_what_does_not_run_here_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def built_for_another_gpu(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ..")

    def shifted(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return flash_attn_varlen_func(q, *args, **kwargs).roll(1, 0)

    install(monkeypatch, "flash2", "flash3", "xformers")
    monkeypatch.setattr("flash_attn_interface.flash_attn_varlen_func", built_for_another_gpu)
    assert resolve_attention("flash", CUDA, BF16, 64, "training") == "flash2"
    monkeypatch.setattr("flash_attn.flash_attn_varlen_func", shifted)
    assert "which is off by" in message("flash", CUDA, BF16, 64, "training")
    assert resolve_attention("auto", CUDA, BF16, 64, "training") == "xformers"
    install(monkeypatch, "flash3")  # flash-attn is missing: the message is about the installed library
    monkeypatch.setattr("flash_attn_interface.flash_attn_varlen_func", built_for_another_gpu)
    told = message("flash", CUDA, BF16, 64, "training")
    assert "which does not run here with a head size of 64 in bfloat16 (CUDA error: no kernel image" in told
    assert "Compile with" not in told


@pytest.mark.usefixtures("gpu")
def test_a_backward_is_tried_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_only(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if q.requires_grad:
            raise NotImplementedError("no backward on this GPU")
        return flash_attn_varlen_func(q, *args, **kwargs)

    install(monkeypatch, "flash2")
    monkeypatch.setattr("flash_attn.flash_attn_varlen_func", forward_only)
    assert resolve_attention("flash", CUDA, BF16, 64, "rollout") == "flash2"
    assert "(no backward on this GPU)" in message("flash", CUDA, BF16, 64, "training")


@pytest.mark.usefixtures("gpu")
def test_rollouts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *ALL)
    for dtype in (BF16, FP32):
        assert resolve_attention("auto", CUDA, dtype, 128, "rollout") == "triton"
        assert resolve_attention("triton", CUDA, dtype, 128, "rollout") == "triton"
        assert resolve_attention("torch", CUDA, dtype, 128, "rollout") == "torch"
    assert resolve_attention("flash", CUDA, BF16, 128, "rollout") == "flash3"
    assert resolve_attention("xformers", CUDA, FP32, 128, "rollout") == "xformers"
    assert resolve_attention("auto", CUDA, BF16, 24, "rollout") == "torch"
    assert "which serves head sizes of 16, 32, 64, 128, 256, not 24" in message("triton", CUDA, BF16, 24, "rollout")
    assert resolve_attention("auto", CUDA, BF16, 128, "rollout", per_kv=8) == "triton"
    assert resolve_attention("auto", CUDA, BF16, 128, "rollout", per_kv=16) == "torch"
    with pytest.raises(ValueError, match="serves up to 8 query heads per key/value head, not 16; set it to"):
        resolve_attention("triton", CUDA, BF16, 128, "rollout", per_kv=16)
    assert "which needs Triton to decode, and Triton serves head sizes of" in message(
        "flash", CUDA, BF16, 24, "rollout"
    )
    assert "which serves bfloat16 and float16 and float32, not float64" in message(
        "triton", CUDA, torch.float64, 64, "rollout"
    )
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert resolve_attention("auto", CUDA, BF16, 128, "rollout") == "torch"
    assert "needs triton, which is not installed (pip install triton)" in message("triton", CUDA, BF16, 128, "rollout")
    assert "needs Triton to decode, and Triton needs triton" in message("xformers", CUDA, BF16, 128, "rollout")


def test_triton_may_be_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_attention("triton", CPU, FP32, 64, "rollout") == "triton"
    assert resolve_attention("auto", CPU, FP32, 64, "rollout") == "torch"
