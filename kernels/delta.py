"""The gated delta rule: linear attention whose state forgets, and corrects what it holds. Recurrence, and by chunks.

A head has a state S [D, E], which maps a key to the value that was stored for it. With decay_t = log of a factor in
(0, 1] and beta_t in [0, 1]:

    S'  = exp(decay_t) S_{t-1}
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T          the value under k_t moves towards v_t
    o_t = S_t^T q_t / sqrt(D)

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, equation 10.) `reference_gated_delta` is that. By chunks of C
tokens it becomes products of matrices (the same paper, section 3.3; the WY form of Bischof and Van Loan 1987). With
c_i the sum of the decays of a chunk up to token i, and S the state before it:

    A_ij = beta_i exp(c_i - c_j) k_i . k_j   for j < i, else 0
    u, w = (1 + A)^-1 [beta v, beta exp(c) k]         one triangular solve, independent of S
    x    = u - w S                                    the corrections that the chunk stores
    o_i  = exp(c_i) S^T q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) x_j
    S   <- exp(c_C) S + sum_j exp(c_C - c_j) k_j x_j^T

No exponent is above 0, so nothing overflows. A product of decays may underflow to 0: what it multiplies is forgotten,
in the recurrence too. Sums c are float64, since a difference of two float32 sums near -100 would be off by 1e-5.

Sequences are packed, each with a state before and after it, and gradients pass through both: a sequence that begins as
another ended takes its state. Chunks of all sequences are computed together, and the scan takes the n-th of each.

Deliberately absent, so far: a Triton kernel, a backward of its own (autograd keeps the products of every chunk), and
the step of one token.

Axes: T tokens of all sequences, B sequences, K query and key heads, V value heads (V / K to a key head, side by side),
D dimension of a key, E of a value; X chunks, C tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64


def gated_delta(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    initial_state_BVDE: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return (o [T, V, E] in v's dtype, the states after the sequences [B, V, D, E], float32).

    q, k: already normalised, where the model does so; any float dtype. decay: natural logs, at most 0. cu_seqlens:
    B + 1 bounds of the sequences, from 0 to T. initial_state: before each sequence; None: zeros. chunk: tokens that are
    computed together; it changes the result by rounding alone. Computed in float32, in float64 where v is. Raises
    ValueError for shapes that do not go together.
    """
    bounds = _bounds(cu_seqlens, q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, initial_state_BVDE)
    (T, V, E), (K, D) = v_TVE.shape, k_TKD.shape[1:]
    dtype = torch.promote_types(v_TVE.dtype, torch.float32)
    plan = _plan(bounds, chunk, v_TVE.device)

    def chunked(x: Tensor, to: torch.dtype = dtype) -> Tensor:
        """Return [T, heads, ..] as [X, heads, C, ..], rows of zeros behind a sequence's last token."""
        filled = torch.cat([x.to(to), x.new_zeros(1, *x.shape[1:], dtype=to)])
        return filled[plan.row_XC].transpose(1, 2)

    def by_value_head(x_XKCN: Tensor) -> Tensor:
        return x_XKCN.repeat_interleave(V // K, 1)

    q_XKCD, k_XKCD = chunked(q_TKD) * D**-0.5, chunked(k_TKD)
    k_XVCD, beta_XVC1 = by_value_head(k_XKCD), chunked(beta_TV)[..., None]
    sum_XVC = chunked(decay_TV, torch.float64).cumsum(2)
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=v_TVE.device).triu(1)
    between_XVCC = (sum_XVC[..., :, None] - sum_XVC[..., None, :]).to(dtype).masked_fill_(later_CC, -torch.inf).exp_()
    since_XVC1, left_XVC1 = (x.to(dtype).exp()[..., None] for x in (sum_XVC, sum_XVC[..., -1:] - sum_XVC))
    solved = torch.linalg.solve_triangular(
        by_value_head(k_XKCD @ k_XKCD.mT) * between_XVCC * beta_XVC1,  # of which the part below the diagonal is read
        beta_XVC1 * torch.cat([chunked(v_TVE), since_XVC1 * k_XVCD], -1),
        upper=False,
        unitriangular=True,
    )
    u_XVCE, w_XVCD = solved.split((E, D), -1)
    within_XVCC = by_value_head(q_XKCD @ k_XKCD.mT) * between_XVCC
    q_XVCD, k_XVCD = by_value_head(q_XKCD) * since_XVC1, k_XVCD * left_XVC1

    count = len(bounds) - 1
    if initial_state_BVDE is None:
        initial_state_BVDE = v_TVE.new_zeros(count, V, D, E, dtype=dtype)
    state_BVDE = initial_state_BVDE.to(dtype)[plan.by_length_B]
    out, ended = [], []
    whole_XV11 = since_XVC1[:, :, -1:]
    by_step = (x.split(plan.chunks) for x in (u_XVCE, w_XVCD, q_XVCD, k_XVCD, within_XVCC, whole_XV11))
    for u_BVCE, w_BVCD, q_BVCD, k_BVCD, within_BVCC, whole_BV11 in zip(*by_step, strict=True):
        goes_on = len(u_BVCE)
        ended.append(state_BVDE[goes_on:])
        state_BVDE = state_BVDE[:goes_on]
        x_BVCE = u_BVCE - w_BVCD @ state_BVDE
        out.append(q_BVCD @ state_BVDE + within_BVCC @ x_BVCE)
        state_BVDE = whole_BV11 * state_BVDE + k_BVCD.mT @ x_BVCE
    final_BVDE = torch.cat([state_BVDE, *reversed(ended)])[plan.by_length_B.argsort()]
    if not out:
        return v_TVE.new_zeros(T, V, E), final_BVDE
    out_TVE = torch.cat(out).transpose(1, 2).flatten(0, 1)[plan.place_T]
    return out_TVE.to(v_TVE.dtype), final_BVDE


def reference_gated_delta(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    initial_state_BVDE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `gated_delta` does, token by token, in the tensors' own dtype."""
    bounds = _bounds(cu_seqlens, q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, initial_state_BVDE)
    (V, E), (K, D) = v_TVE.shape[1:], k_TKD.shape[1:]
    q_TVD, k_TVD = (x.repeat_interleave(V // K, 1) for x in (q_TKD * D**-0.5, k_TKD))
    out, final = [v_TVE.new_zeros(0, V, E)], [v_TVE.new_zeros(0, V, D, E)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        state = v_TVE.new_zeros(V, D, E) if initial_state_BVDE is None else initial_state_BVDE[number]
        for t in range(start, stop):
            state = decay_TV[t, :, None, None].exp() * state
            correction_VE = v_TVE[t] - torch.einsum("vde,vd->ve", state, k_TVD[t])
            state = state + torch.einsum("vd,ve->vde", beta_TV[t, :, None] * k_TVD[t], correction_VE)
            out.append(torch.einsum("vde,vd->ve", state, q_TVD[t])[None])
        final.append(state[None])
    return torch.cat(out), torch.cat(final)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Chunks of packed sequences: the first of every sequence, then the second of all that have one, and so on. Of
    those of one step the longest sequence's comes first.

    row_XC: the tokens of each chunk, T where it has fewer. place_T: where each token is in row_XC, flattened. chunks:
    their number in each step of the scan. by_length_B: the sequences, the longest first.
    """

    row_XC: Tensor
    place_T: Tensor
    chunks: list[int]
    by_length_B: Tensor


def _plan(bounds: Sequence[int], chunk: int, device: torch.device) -> _Plan:
    total, starts = bounds[-1], bounds[:-1]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    order = sorted(range(len(starts)), key=lambda n: -lengths[n])
    steps = [
        [(starts[n] + begin, bounds[n + 1]) for n in order if lengths[n] > begin]
        for begin in range(0, max(lengths, default=0), chunk)
    ]
    begins = [one for step in steps for one in step]
    first_X1, stop_X1 = torch.tensor(begins, dtype=torch.int64).view(-1, 2).split(1, 1)
    row_XC = first_X1 + torch.arange(chunk)
    row_XC = torch.where(row_XC < stop_X1, row_XC, total)
    place_T = torch.empty(total + 1, dtype=torch.int64)
    place_T[row_XC.flatten()] = torch.arange(row_XC.numel())
    put = (x.to(device) for x in (row_XC, place_T[:total], torch.tensor(order, dtype=torch.int64)))
    rows, places, by_length = put
    return _Plan(rows, places, [len(step) for step in steps], by_length)


def _bounds(
    cu_seqlens: Tensor | Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
) -> list[int]:
    """Return the sequences' bounds. ValueError where something does not fit the rest."""
    bounds = [int(bound) for bound in cu_seqlens]
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [T, K, D] twice, [T, V, E]"
        )
    (T, K, D), (V, E) = k.shape, v.shape[1:]
    if len(v) != T or V % K or decay.shape != (T, V) or beta.shape != (T, V):
        raise ValueError(
            f"v {list(v.shape)}, decay {list(decay.shape)}, beta {list(beta.shape)} beside k {list(k.shape)}; expected "
            "[T, V, E], [T, V] and [T, V], V a multiple of K"
        )
    if not bounds or bounds[0] != 0 or bounds[-1] != T or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens is {bounds}; expected bounds that rise from 0 to {T}")
    if state is not None and state.shape != (len(bounds) - 1, V, D, E):
        raise ValueError(f"initial_state is {list(state.shape)}; expected {[len(bounds) - 1, V, D, E]}")
    return bounds
