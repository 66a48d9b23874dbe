"""The gated part of Qwen2's MLP.

y = silu(g) * u          g, u = halves of the fused gate-and-up projection   (Shazeer 2020, SwiGLU)
"""

import torch

UNCUT = 32_768  # elements; torch cuts a longer elementwise loop on a CPU among its threads, wherever that falls


def silu_gate(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`[T, 2I]` -> `[T, I]`: silu of the first half times the second.

    Without gradients a row's bits do not depend on T: a cut inside a row would move elements from silu's vector loop
    to its scalar one, which differ in the last bit, so long inputs go through it a few whole rows at a time.
    """
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    rows = max(1, UNCUT // gate_TI.shape[1])
    if len(gate_TI) <= rows or gate_TI.is_cuda or torch.is_grad_enabled():
        return torch.nn.functional.silu(gate_TI) * up_TI
    return torch.cat([torch.nn.functional.silu(part) for part in gate_TI.split(rows)]) * up_TI
