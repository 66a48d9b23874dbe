"""Rotary position embedding (Su et al. 2021, equation 34), in the half-split layout of Qwen2.

    angle[t, i] = position[t] * theta^(-2i/D)            i in 0 .. D/2 - 1
    (a, b) = halves of x        y = (a cos - b sin, b cos + a sin)

Axes: T tokens, H heads, D head dimension. Angles are made in float32; cos and sin are cast to x's dtype.
"""

import torch


def rope_table(positions_T: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin of every angle: positions [T] int -> [2, T, 1, D/2] in `dtype`, made once a forward and shared
    by the layers."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angle = positions_T.float()[:, None] / theta**exponent
    return torch.stack([angle.cos(), angle.sin()])[:, :, None, :].to(dtype)


def rotate(x_THD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn `x_THD` [T, H, D] by the angles of `table` (from `rope_table`); returns [T, H, D]."""
    cos, sin = table[0], table[1]
    a, b = x_THD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
