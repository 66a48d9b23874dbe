"""The gated part of Qwen2's MLP.

y = silu(g) * u          g, u = halves of the fused gate-and-up projection   (Shazeer 2020, SwiGLU)
"""

import torch


def silu_gate(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`[T, 2I]` -> `[T, I]`: silu of the first half times the second."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TI) * up_TI
