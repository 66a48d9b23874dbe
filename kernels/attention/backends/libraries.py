"""Libraries that compute attention over whole packed sequences on CUDA, each loaded as a `TrainingAttention`.

    flash-attn      version 2 (package flash-attn) and 3 (flash_attn_interface, built for Hopper); their backward adds
                    in no fixed order, so the bits of two runs differ
    varlen_attn     FlashAttention that comes with torch 2.11 and later; key/value heads are shared from 2.12 on
    SDPA            pads to the longest sequence; its math kernel, which holds all scores, runs only on request
    xformers        float32 too; with gradients the key/value heads are repeated

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from thresher.kernels.attention.varlen import TrainingAttention, Varlen, varlen_attention

GET_FLASH2 = "pip install flash-attn --no-build-isolation, which builds it with nvcc"
GET_FLASH3 = "python setup.py install in the folder hopper of flash-attention's sources"
GET_TORCH = 'pip install "torch>=2.11"'
GET_XFORMERS = "pip install xformers"
FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
MATH = (SDPBackend.MATH,)


class Unserved(Exception):
    """A library is missing, or does not serve. Its text follows the word "which"."""


def load_part(library: str, get: str, module: str, name: str) -> Any:
    """Load `name` of a module of `library`.

    Unserved, with `get` as the way to install it, if it is missing; Unserved with the reason if it does not load."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        top = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == top:
            raise Unserved(f"needs {library}, which is not installed ({get})") from None
        raise Unserved(f"needs {library}, which does not load here ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, cut to 200 characters; its class if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def repeat_heads(x_TKD: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [T, K, D] for each of N query heads, [T, N, D]: head n has those of n // (N / K).

    Its backward is a sum over the group, without atomic additions."""
    count, kv_heads, dim = x_TKD.shape
    if heads == kv_heads:
        return x_TKD
    return x_TKD[:, :, None].expand(count, kv_heads, heads // kv_heads, dim).reshape(count, heads, dim)


def load_flash2() -> TrainingAttention:
    """Load FlashAttention-2; Unserved without it."""
    return _adapter(load_part("the package flash-attn", GET_FLASH2, "flash_attn", "flash_attn_varlen_func"))


def load_flash3() -> TrainingAttention:
    """Load FlashAttention-3; Unserved without it."""
    return _adapter(load_part("FlashAttention-3", GET_FLASH3, "flash_attn_interface", "flash_attn_varlen_func"))


def _adapter(flash_attn_varlen_func: Any) -> TrainingAttention:
    def flash_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
        found = flash_attn_varlen_func(
            q_TND,
            k_TKD,
            v_TKD,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.longest,
            max_seqlen_k=layout.longest,
            causal=True,
        )
        out_TND: Tensor = found[0] if isinstance(found, tuple) else found
        return out_TND

    return flash_attention


def load_sdpa(kernels: Sequence[SDPBackend] = FUSED) -> TrainingAttention:
    """Return padded SDPA by one of these kernels; a call that none of them serves raises RuntimeError."""
    allowed = list(kernels)

    def sdpa_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
        heads = q_TND.shape[1]
        with sdpa_kernel(allowed):
            return varlen_attention(q_TND, repeat_heads(k_TKD, heads), repeat_heads(v_TKD, heads), layout)

    return sdpa_attention


def load_torch_varlen() -> TrainingAttention:
    """Load torch's varlen_attn; Unserved if this torch has none, or one without a causal window."""
    varlen_attn = load_part("torch's varlen_attn", GET_TORCH, "torch.nn.attention.varlen", "varlen_attn")
    takes = signature(varlen_attn).parameters
    if "window_size" not in takes:
        raise Unserved(
            f"needs torch's varlen_attn with window_size, which torch {torch.__version__} lacks ({GET_TORCH})"
        )
    grouped = "enable_gqa" in takes

    def torch_varlen_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
        heads, shared = q_TND.shape[1], q_TND.shape[1] != k_TKD.shape[1]
        if shared and not grouped:
            k_TKD, v_TKD = repeat_heads(k_TKD, heads), repeat_heads(v_TKD, heads)
        out_TND: Tensor = varlen_attn(
            q_TND,
            k_TKD,
            v_TKD,
            layout.cu_seqlens,
            layout.cu_seqlens,
            layout.longest,
            layout.longest,
            window_size=(-1, 0),
            **({"enable_gqa": True} if shared and grouped else {}),
        )
        return out_TND

    return torch_varlen_attention


def load_xformers() -> TrainingAttention:
    """Load xformers, which chooses among its kernels; Unserved without the package."""
    package = ("the package xformers", GET_XFORMERS)
    attend = load_part(*package, "xformers.ops", "memory_efficient_attention")
    causal_mask = load_part(*package, "xformers.ops.fmha.attn_bias", "BlockDiagonalCausalMask")

    def xformers_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
        mask = layout.once("xformers", lambda: causal_mask.from_seqlens(layout.lengths, device=layout.device))
        count, heads, dim = q_TND.shape
        kv_heads = k_TKD.shape[1]
        if heads == kv_heads or any(x.requires_grad for x in (q_TND, k_TKD, v_TKD)):
            q, k, v = q_TND, repeat_heads(k_TKD, heads), repeat_heads(v_TKD, heads)
        else:
            grouped = (count, kv_heads, heads // kv_heads, dim)
            q, k, v = q_TND.view(grouped), k_TKD[:, :, None].expand(grouped), v_TKD[:, :, None].expand(grouped)
        out: Tensor = attend(q[None], k[None], v[None], attn_bias=mask)
        return out.reshape(count, heads, dim)

    return xformers_attention
