"""Attention over a forest (prefix.py) on CUDA: by our kernels (forest_triton.py), else in parts by a library.

A library's parts need its forward with a log-sum-exp, and a backward that takes one.

The libraries' public functions do not expose these (autograd saves them). The functions below them are used instead:

    varlen   torch's aten._flash_attention_forward and _backward, which varlen_attn calls
    flash2   flash_attn.flash_attn_interface._flash_attn_varlen_forward and _backward

FlashAttention-3 and SDPA's fused kernels change theirs from release to release, xformers pads its log-sum-exp, and the
math kernel has none: with these, prefixes are not shared. All are private functions, so a library is tried before it is
used, on a forest whose output and gradients are known.

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from thresher.kernels.attention.backends.choice import Backend
from thresher.kernels.attention.backends.libraries import GET_FLASH2, Unserved, first_line, load_part
from thresher.kernels.attention.parts import AttentionWithLSE, MatmulAttention, SegmentPairs, cpu_attention
from thresher.kernels.attention.prefix import ForestKernels, PrefixForest, prefix_attention

Tensors = tuple[Tensor, ...]
OFF_BY = 0.02  # the largest relative error of a norm in a trial; bfloat16 rounds by 2^-9


class LibraryParts:
    """A library's varlen forward and backward, whose log-sum-exp is [N, T], as an `AttentionWithLSE`."""

    by_level = True

    def __init__(self, forward: Callable[..., Tensors], backward: Callable[..., Tensors]) -> None:
        self._forward, self._backward = forward, backward

    def forward(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, part: SegmentPairs) -> tuple[Tensor, Tensor]:
        out_TND, lse_NT = self._forward(q_TND, k_TKD, v_TKD, part)
        return out_TND, lse_NT.t().contiguous()

    def backward(
        self,
        grad_TND: Tensor,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        lse_TN: Tensor,
        part: SegmentPairs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_TND, dk_TKD, dv_TKD = self._backward(grad_TND, q_TND, k_TKD, v_TKD, out_TND, lse_TN.t().contiguous(), part)
        return dq_TND, dk_TKD, dv_TKD


def load_torch_parts() -> AttentionWithLSE:
    """Load torch's flash attention for CUDA; Unserved if this torch has none by that name."""
    try:
        forward = torch.ops.aten._flash_attention_forward
        backward = torch.ops.aten._flash_attention_backward
    except AttributeError:
        raise Unserved(f"needs torch's _flash_attention_forward, which torch {torch.__version__} lacks") from None

    def attend(q: Tensor, k: Tensor, v: Tensor, part: SegmentPairs) -> Tensors:
        found: Tensors = forward(q, k, v, part.cu_q, part.cu_k, *_longest(part), 0.0, part.causal, False)
        return found[0], found[1]

    def gradients(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: SegmentPairs
    ) -> Tensors:
        # The state of dropout's generator, and an unused tensor: there is no dropout.
        state = part.once("state", lambda: torch.zeros(2, dtype=torch.uint64, device=part.device))
        unused = part.once("unused", lambda: torch.empty(0, device=part.device))
        lengths = (part.cu_q, part.cu_k, *_longest(part))
        found: Tensors = backward(grad, q, k, v, out, lse, *lengths, 0.0, part.causal, state, unused)
        return found

    return LibraryParts(attend, gradients)


def load_flash2_parts() -> AttentionWithLSE:
    """Load the parts of flash-attn 2; Unserved without it."""

    def load(name: str) -> Any:
        return load_part("the package flash-attn", GET_FLASH2, "flash_attn.flash_attn_interface", name)

    forward, backward = load("_flash_attn_varlen_forward"), load("_flash_attn_varlen_backward")

    def known(q: Tensor, part: SegmentPairs) -> dict[str, Any]:
        longest_q, longest_k = _longest(part)
        return {
            "cu_seqlens_q": part.cu_q,
            "cu_seqlens_k": part.cu_k,
            "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_k,
            "dropout_p": 0.0,
            "softmax_scale": q.shape[-1] ** -0.5,
            "causal": part.causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        }

    def attend(q: Tensor, k: Tensor, v: Tensor, part: SegmentPairs) -> Tensors:
        found: Tensors = forward(q=q, k=k, v=v, **known(q, part))
        return found[0], found[1]

    def gradients(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: SegmentPairs
    ) -> Tensors:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        given = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
        backward(**given, dq=dq, dk=dk, dv=dv, **known(q, part), deterministic=False)
        return dq, dk, dv

    return LibraryParts(attend, gradients)


LOADERS: dict[Backend, Callable[[], AttentionWithLSE]] = {
    "torch": cpu_attention,
    "varlen": load_torch_parts,
    "flash2": load_flash2_parts,
}


def load_partial_attention(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionWithLSE:
    """Load parts by the library that `resolve_attention` chose for whole sequences.

    Unserved, with a text that follows the word "which", if it has none or they do not run here."""
    if backend not in LOADERS:
        raise Unserved("gives no log-sum-exp, or has no backward that takes one")
    attention = LOADERS[backend]()
    if backend == "torch":
        return attention
    try:
        try_parts(attention, device, dtype, head_dim)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise Unserved(f"does not run in parts here ({first_line(error)})") from error
    return attention


def load_forest_attention(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionWithLSE | ForestKernels:
    """Load our kernels for a whole forest on CUDA, tried before they are used; else `load_partial_attention`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from thresher.kernels.attention.forest_triton import TritonForest, is_served

        if is_served(dtype, head_dim):
            try:
                try_parts(TritonForest(), device, dtype, head_dim)
                return TritonForest()
            except Exception as error:  # a compiler may raise anything
                warnings.warn(f"attention over a forest in Triton does not run ({first_line(error)})", stacklevel=2)
    return load_partial_attention(backend, device, dtype, head_dim)


def try_parts(
    attention: AttentionWithLSE | ForestKernels, device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Try parts on two trees, one of them three segments deep, with two query heads per key head.

    Unserved if output or gradients differ from those of products in float32. Exceptions of the library are not caught.
    """
    lengths, parents = [9, 3, 17, 1, 5, 4, 6], [-1, 0, 1, 1, 0, -1, 5]
    noise = torch.Generator().manual_seed(0)
    given = [torch.randn(sum(lengths), heads, head_dim, generator=noise) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (x.to(device, dtype) for x in given)
    results = []
    with torch.inference_mode(False), torch.enable_grad():
        for by in (attention, MatmulAttention()):
            wide = dtype if by is attention else torch.float32
            leaves = tuple(x.to(wide, copy=True).requires_grad_() for x in (q, k, v))
            out_TND = prefix_attention(leaves[0], leaves[1], leaves[2], PrefixForest(lengths, parents, device, by))
            results.append([out_TND.detach(), *torch.autograd.grad(out_TND, leaves, grad.to(wide))])
    for found, expected in zip(*results, strict=True):
        off = float((found.float() - expected).norm() / expected.norm())
        if not off <= OFF_BY:
            raise Unserved(f"is off by {off:.3g} in a test of attention in parts")


def _longest(part: SegmentPairs) -> tuple[int, int]:
    return max(part.lengths_q), max(part.lengths_k)
