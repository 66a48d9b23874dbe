"""Choice of the library that computes attention. It is chosen and tried once, when a run is set up.

    choice      training: whole sequences, with gradients        rollout: prompts and new tokens, against a cache
    auto        the first that serves of varlen_attn,            Triton's kernels where they serve, else torch
                flash-attn, xformers and fused SDPA
    torch       varlen_attn, else SDPA, its math kernel too      paged_cpu.py's products
    triton      refused: its kernels have no backward            Triton's kernels
    flash       FlashAttention-3, else 2                         the same for fresh prompts, Triton for later tokens
    xformers    xformers                                         the same for fresh prompts, Triton for later tokens

On a CPU both are torch: `varlen_attention` in training, paged_cpu.py in a rollout; another choice is refused.

A dtype or head size that a library does not support by its documentation is refused with a message. Everything else is
tried on two short sequences whose attention is known, with a backward if one will be needed. A library built for
another GPU or another torch is therefore detected before anything is computed or written, and "auto" tries the next.
Triton's rollout kernels are not tried: `thresher bench compile` shows that each fits on an A100 and an H100.

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from thresher.kernels.attention.backends.libraries import (
    MATH,
    Unserved,
    first_line,
    load_flash2,
    load_flash3,
    load_sdpa,
    load_torch_varlen,
    load_xformers,
)
from thresher.kernels.attention.paged_cuda import MOST_PER_KV
from thresher.kernels.attention.varlen import TrainingAttention, Varlen, varlen_attention

Choice = Literal["auto", "torch", "triton", "flash", "xformers"]
Purpose = Literal["training", "rollout"]
# "torch" is `varlen_attention` in training, paged_cpu.py in rollouts; "sdpa" is SDPA's fused kernels, "math" its last.
Backend = Literal["torch", "varlen", "sdpa", "math", "flash2", "flash3", "xformers", "triton"]

LOW = (torch.bfloat16, torch.float16)
ALIGNED = 16  # a head's row has a multiple of this many bytes, in flash-attn and in CUTLASS's kernels
TRITON_DTYPES = (*LOW, torch.float32)
TRITON_HEADS = (16, 32, 64, 128, 256)  # a tile's width is a power of two, and tl.dot needs at least 16

# In order of preference. SDPA is last because it pads.
SERVING: dict[str, tuple[Backend, ...]] = {
    "auto": ("varlen", "flash3", "flash2", "xformers", "sdpa"),
    "torch": ("varlen", "sdpa", "math"),
    "flash": ("flash3", "flash2"),
    "xformers": ("xformers",),
}


@dataclass(frozen=True, slots=True)
class Library:
    """Properties of a backend that are known before it is tried. largest: the largest head size, None for no bound."""

    load: Callable[[], TrainingAttention]
    dtypes: tuple[torch.dtype, ...] = (*LOW, torch.float32)
    largest: int | None = None
    aligned: bool = True


LIBRARIES: dict[Backend, Library] = {
    "torch": Library(lambda: varlen_attention, aligned=False),
    "varlen": Library(load_torch_varlen, LOW, 256),
    "flash3": Library(load_flash3, LOW, 256),
    "flash2": Library(load_flash2, LOW, 256),
    "xformers": Library(load_xformers),
    "sdpa": Library(load_sdpa, aligned=False),
    "math": Library(partial(load_sdpa, MATH), aligned=False),
}


def load_attention(backend: Backend) -> TrainingAttention:
    """Load the function of a backend that `resolve_attention` chose.

    It takes whole packed sequences, with or without gradients. ValueError for "triton", which has none."""
    if backend not in LIBRARIES:
        raise ValueError(f'attention is "{backend}"; expected one of {", ".join(LIBRARIES)}')
    return LIBRARIES[backend].load()


def resolve_attention(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, purpose: Purpose, per_kv: int = 1
) -> Backend:
    """Return the backend for a choice. ValueError if it does not serve. per_kv: query heads of a key/value head.

    The message is one sentence that begins with "attention is"; the caller may prefix a key ("optim.")."""
    if name not in get_args(Choice):
        known = " or ".join(f'"{choice}"' for choice in get_args(Choice))
        raise ValueError(f"attention is {name!r}; expected {known}")
    if purpose == "training":
        return _for_training(name, device, dtype, head_dim)
    return _for_rollout(name, device, dtype, head_dim, per_kv)


def _for_training(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    if name == "triton":
        raise _refused(name, "serves rollouts and has no backward")
    if device.type != "cuda" and name in ("auto", "torch"):
        return "torch"
    chosen, reasons = _first_serving(SERVING[name], device, dtype, head_dim, gradients=True)
    if chosen is not None:
        return chosen
    if name != "auto":
        raise _refused(name, _telling(reasons))
    low = 'set model.dtype to "bfloat16", or ' if dtype == torch.float32 else ""
    raise ValueError(
        f'attention is "auto", and for a head size of {head_dim} in {_named(dtype)} only SDPA\'s math kernel is left, '
        f"which stores the scores of all pairs of positions, because fused SDPA {reasons[-1]}; {low}set it to "
        '"torch" to use that kernel anyway'
    )


def _for_rollout(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, per_kv: int) -> Backend:
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return "torch"
    triton = _triton_reason(device, dtype, head_dim, per_kv)
    if name in ("auto", "triton"):
        if triton is None:
            return "triton"
        if name == "auto":
            return "torch"
        raise _refused(name, triton)
    chosen, reasons = _first_serving(SERVING[name], device, dtype, head_dim, gradients=False)
    if chosen is None:
        raise _refused(name, _telling(reasons))
    if triton is not None:
        raise _refused(name, f"needs Triton to decode, and Triton {triton}")
    return chosen


def _refused(name: str, why: str) -> ValueError:
    others = '"auto"' if name == "torch" else '"auto" or "torch"'
    return ValueError(f'attention is "{name}", which {why}; set it to {others}')


def _named(*dtypes: torch.dtype) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _telling(reasons: Sequence[str]) -> str:
    """Return the reason of the last candidate that is installed, or of the last candidate if none is."""
    installed = [reason for reason in reasons if "not installed" not in reason]
    return (installed or list(reasons))[-1]


def _first_serving(
    candidates: Sequence[Backend], device: torch.device, dtype: torch.dtype, head_dim: int, gradients: bool
) -> tuple[Backend | None, list[str]]:
    """Return the first candidate that serves, and why those before it do not."""
    reasons: list[str] = []
    for backend in candidates:
        reason = _reason(backend, device, dtype, head_dim, gradients)
        if reason is None:
            return backend, reasons
        reasons.append(reason)
    return None, reasons


def _reason(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, gradients: bool) -> str | None:
    """Return why a backend does not serve, as text that follows the word "which"; None if it does."""
    library = LIBRARIES[backend]
    if device.type != "cuda":
        where = f"needs CUDA (the model is on {device.type})"
        try:
            library.load()
        except Unserved as error:
            return f"{where} and {error}"
        return where
    if dtype not in library.dtypes:
        return f"serves {_named(*library.dtypes)}, not {_named(dtype)}"
    multiple = ALIGNED // dtype.itemsize
    if (library.aligned and head_dim % multiple) or head_dim > (library.largest or head_dim):
        most = f" up to {library.largest}" if library.largest else ""
        return f"serves head sizes that are multiples of {multiple}{most}, not {head_dim}"
    try:
        attend = library.load()
        try_attention(attend, device, dtype, head_dim, gradients)
    except Unserved as error:
        return str(error)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError) as error:
        return f"does not run here with a head size of {head_dim} in {_named(dtype)} ({first_line(error)})"
    return None


def try_attention(
    attend: TrainingAttention, device: torch.device, dtype: torch.dtype, head_dim: int, gradients: bool
) -> None:
    """Try a library on two short sequences with two query heads per key head, whose attention is known.

    With equal scores a row is the mean of the values up to it; for values 0, 1, 2 .. that is half its position.
    Unserved if the result differs; exceptions of the library are not caught."""
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        layout = Varlen([17, 3], device)
        v_TKD = layout.positions_T[:, None, None].expand(-1, 1, head_dim).to(dtype)
        q_TND, k_TKD = v_TKD.new_ones(20, 2, head_dim), v_TKD.new_ones(20, 1, head_dim)
        q_TND, k_TKD, v_TKD = (x.contiguous().requires_grad_(gradients) for x in (q_TND, k_TKD, v_TKD))
        out_TND = attend(q_TND, k_TKD, v_TKD, layout)
        if gradients:
            torch.autograd.grad(out_TND.sum(), (q_TND, k_TKD, v_TKD))
        half_T = layout.positions_T.double() / 2
        off_TND = (out_TND.detach().double() - half_T[:, None, None]).abs()
        if not bool((off_TND <= 0.02 * (1 + half_T[:, None, None])).all()):
            raise Unserved(f"is off by {float(off_TND.max()):.3g} in a test with known attention")


def _triton_reason(device: torch.device, dtype: torch.dtype, head_dim: int, per_kv: int) -> str | None:
    """Return why Triton's rollout kernels do not serve, as text that follows the word "which"; None if they do."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs CUDA (the model is on {device.type})"
    if find_spec("triton") is None:
        return "needs triton, which is not installed (pip install triton)"
    if dtype not in TRITON_DTYPES:
        return f"serves {_named(*TRITON_DTYPES)}, not {_named(dtype)}"
    if head_dim not in TRITON_HEADS:
        return f"serves head sizes of {', '.join(map(str, TRITON_HEADS))}, not {head_dim}"
    if per_kv > MOST_PER_KV:
        return f"serves up to {MOST_PER_KV} query heads per key/value head, not {per_kv}"
    return None
