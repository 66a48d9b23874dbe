"""Tensors of the gated delta rule, as a layer makes them, and results with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

K, V, D, E = 2, 4, 8, 6


def drawn(
    lengths: Sequence[int],
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    forgets: float = 1.0,
    width: int = D,
    device: str = "cpu",
    values: int = E,
) -> tuple[list[Tensor], list[int], Tensor]:
    """Return (q, k, v, decay, beta), bounds and states: keys of length 1, beta in (0, 1). bfloat16 applies to q, k and
    v. width, values: dimensions of a key and a value."""
    noise, total = torch.Generator().manual_seed(seed), sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(total, K, width), dim=-1) for _ in range(2))
    v, decay, beta = normal(total, V, values), -forgets * normal(total, V).exp(), normal(total, V).sigmoid()
    state = normal(len(lengths), V, width, values)
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    tensors = [*(x.to(device, dtype) for x in (q, k, v)), *(x.to(device, wide) for x in (decay, beta))]
    return tensors, bounds, state.to(device, wide)


def gradients(function: Any, tensors: list[Tensor], bounds: list[int], state: Tensor, **options: Any) -> list[Tensor]:
    """Return results and gradients of a function of both of them."""
    leaves = [x.clone().requires_grad_(True) for x in (*tensors, state)]
    out, final = function(*leaves[:5], bounds, leaves[5], **options)
    noise = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=noise, dtype=torch.float64).to(x) for x in (out, final)]
    ((out * weights[0]).sum() + (final * weights[1]).sum()).backward()
    return [out.detach(), final.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
