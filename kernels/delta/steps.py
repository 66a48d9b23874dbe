"""The gated delta rule of a rollout: new rows against the states in a cache, token by token.

With a = exp(decay), S the state before a token, and (k^T S, q^T S) from one product:

    x = beta (v - a k^T S)        o = (a q^T S + (q . k) x) / sqrt(D)        S <- a S + k x^T

(The recurrence of rule.py, S read once and written once.) A row's bits depend only on its own sequence, whether decoded
or prefilled, and in any pieces (CPU, float32). Chunks are therefore not used there. The convolution's sum has a fixed
order.

A slot of the cache has a ring of R states: the state after n tokens is at n mod R. A token that is fed a second time
reads the same state again. Rejected drafts need no rollback, because the next row reads the state after the last
accepted token. The rows before the convolution are in a ring of M = R + W - 1.

Axes: T rows of the step, N runs of rows, one per sequence, Q rows of a run, J the W - 1 rows before it, X a list over
several runs, B slots of the cache, R states and M rows of a slot's rings, C channels, W tokens that the convolution
sees, K query and key heads, V value heads, D dimension of a key, E of a value.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.kernels.delta.layer import DeltaInputs, uncut
from thresher.kernels.delta.rule import ChunkPlan, gated_delta_planned, sent
from thresher.kernels.layers import uses_triton

Ints = npt.NDArray[np.int64]


class Rings(NamedTuple):
    """One layer's states [B, R, V, D, E], float32, and rows before the convolution [B, M, C]."""

    state_BRVDE: Tensor
    rows_BMC: Tensor


@dataclass(frozen=True, slots=True)
class DeltaRuns:
    """Runs of a step, the longest first. All tensors are int64; places are indices of the flat rings.

    read_N, write_N: places of the state before and after each run. begin_X: places of the W - 1 rows before each run;
    seen_X1 (bool): which of them exist. window_WT: for each row the rows that it sees, as indices into those, followed
    by the step's rows. from_X: rows of the step that the ring keeps; into_X: their places. order_X: rows sorted by
    place in their run; counts: rows at each place. inner[place]: runs whose state after that row is also kept, and its
    places. given_N: index of the caller's n-th run in this order.
    """

    read_N: Tensor
    write_N: Tensor
    begin_X: Tensor
    seen_X1: Tensor
    window_WT: Tensor
    from_X: Tensor
    into_X: Tensor
    order_X: Tensor
    counts: list[int]
    inner: dict[int, tuple[Tensor, Tensor]]
    given_N: Tensor


def delta_runs(
    slot_N: Ints,
    start_N: Ints,
    count_N: Ints,
    row_N: Ints,
    rows: int,
    sizes: tuple[int, int],
    device: torch.device,
    last_only: bool = False,
) -> DeltaRuns:
    """Lay out runs of `count_N` rows from position `start_N` on, which begin at `row_N` of a step's `rows`.

    Rows of no run may have any value. sizes: R and W. last_only: keep only the state after the last row of a run."""
    order_N = np.argsort(-count_N, kind="stable")
    slot_N, start_N, count_N, row_N = slot_N[order_N], start_N[order_N], count_N[order_N], row_N[order_N]
    (ring, width), runs = sizes, len(slot_N)
    reach, held = width - 1, ring + width - 1
    run_X = np.repeat(np.arange(runs), count_N)
    within_X = np.arange(len(run_X)) - np.repeat(np.cumsum(count_N) - count_N, count_N)
    position_X, row_X = start_N[run_X] + within_X, row_N[run_X] + within_X

    before_NJ = start_N[:, None] - reach + np.arange(reach)
    begin_NJ = slot_N[:, None] * held + before_NJ % held
    window_WT = np.zeros((width, rows), np.int64)
    for back in range(width):
        offset_X = within_X - back
        from_ring_X = run_X * reach + reach + offset_X
        window_WT[width - 1 - back, row_X] = np.where(offset_X < 0, from_ring_X, runs * reach + row_X - back)
    last_X = within_X >= count_N[run_X] - held
    inner = {}
    kept = 1 if last_only else ring
    for place in np.unique(count_N - 1 - np.arange(1, kept)[:, None]):  # the last R rows of each run, except its last
        if place >= 0:
            some = np.flatnonzero((count_N - 1 > place) & (count_N - ring <= place))
            into = slot_N[some] * ring + (start_N[some] + place + 1) % ring
            inner[int(place)] = sent(torch.from_numpy(some), device), sent(torch.from_numpy(into), device)
    read_N, write_N = (slot_N * ring + at_N % ring for at_N in (start_N, start_N + count_N))
    into_X = (slot_N[run_X] * held + position_X % held)[last_X]
    order_X = row_X[np.lexsort((run_X, within_X))]

    def put(x: npt.NDArray[np.generic]) -> Tensor:
        return sent(torch.from_numpy(x), device)

    return DeltaRuns(
        put(read_N),
        put(write_N),
        put(begin_NJ.reshape(-1)),
        put(before_NJ.reshape(-1, 1) >= 0),
        put(window_WT),
        put(row_X[last_X]),
        put(into_X),
        put(order_X),
        np.bincount(within_X).tolist(),
        inner,
        put(np.argsort(order_N)),
    )


@dataclass(frozen=True)
class NextRows:
    """Up to `most` rows of each sequence, at most R, stored sequence by sequence; device tensors [N], int64.

    Rows beyond a sequence's count belong to no sequence. spare: the slot of no sequence. sizes: R and W."""

    slot_N: Tensor
    start_N: Tensor
    count_N: Tensor
    spare: int
    sizes: tuple[int, int]
    most: int

    @cached_property
    def runs(self) -> DeltaRuns:
        """Lay out the rows as `delta_runs` does; rows of no run write to the spare slot."""
        slot_N1, start_N1, count_N1 = (x[:, None] for x in (self.slot_N, self.start_N, self.count_N))
        (ring, width), spare, most = self.sizes, self.spare, self.most
        device, runs, reach, held = slot_N1.device, len(slot_N1), width - 1, ring + width - 1
        place_Q, reach_J = torch.arange(most, device=device), torch.arange(reach, device=device)
        run_N1 = torch.arange(runs, device=device)[:, None]
        before_NJ = start_N1 - reach + reach_J
        there_NQ = place_Q < count_N1
        state_NQ = torch.where(there_NQ, slot_N1 * ring + (start_N1 + place_Q + 1) % ring, spare * ring)
        into_NQ = torch.where(there_NQ, slot_N1 * held + (start_N1 + place_Q) % held, spare * held)
        row_NQ = run_N1 * most + place_Q
        window_WT = [
            torch.where(place_Q < back, run_N1 * reach + reach + place_Q - back, runs * reach + row_NQ - back).flatten()
            for back in reversed(range(width))
        ]
        return DeltaRuns(
            (slot_N1 * ring + start_N1 % ring)[:, 0],
            state_NQ[:, -1],
            (slot_N1 * held + before_NJ % held).flatten(),
            before_NJ.reshape(-1, 1) >= 0,
            torch.stack(window_WT),
            row_NQ.flatten(),
            into_NQ.flatten(),
            row_NQ.T.flatten(),
            [runs] * most,
            {place: (run_N1[:, 0], state_NQ[:, place]) for place in range(most - 1)},
            given_N=run_N1[:, 0],
        )


def delta_next(inputs: DeltaInputs, rings: Rings, rows: NextRows) -> Tensor:
    """Compute `delta_steps` for the rows of a decode step on a GPU."""
    if not uses_triton(inputs.mixed_TC):
        return delta_steps(inputs, rings, rows.runs)
    from thresher.kernels.delta.steps_triton import fused_next

    return fused_next(inputs, *rings, rows.slot_N, rows.start_N, rows.count_N, rows.most)


def delta_steps(inputs: DeltaInputs, rings: Rings, runs: DeltaRuns) -> Tensor:
    """Return o [T, V, E] in the model's dtype, zeros for rows of no run, and update the rings in place."""
    wide = rings.state_BRVDE.dtype
    q_TKD, k_TKD, v_TVE = (x.to(wide) for x in inputs.heads(_convolved(inputs, rings.rows_BMC, runs)))
    heads, (K, D) = v_TVE.shape[1], k_TKD.shape[1:]
    q_TVD, k_TVD = (x.repeat_interleave(heads // K, 1) if heads > K else x for x in (q_TKD, k_TKD))
    keep_TV11 = uncut(torch.exp, inputs.decay_TV)[..., None, None]
    both_TV2D = torch.stack([k_TVD, q_TVD], 2)
    match_TV1 = (q_TVD * k_TVD).sum(-1, keepdim=True)
    states = rings.state_BRVDE.flatten(0, 1)
    state_NVDE = states.index_select(0, runs.read_N)
    rows = (both_TV2D, v_TVE, keep_TV11, inputs.beta_TV[..., None], match_TV1)
    by_place = (x.index_select(0, runs.order_X).split(runs.counts) for x in rows)
    parts = []
    for place, (both, v, keep, beta, match) in enumerate(zip(*by_place, strict=True)):
        state = state_NVDE[: len(v)]
        read = _products(both.flatten(0, 1), state.flatten(0, 1)).view(*v.shape[:2], 2, -1) * keep
        x = beta * (v - read[:, :, 0])
        parts.append((read[:, :, 1] + match * x) * D**-0.5)
        state.mul_(keep).addcmul_(both[:, :, 0, :, None], x[:, :, None])
        if place in runs.inner:
            some, into = runs.inner[place]
            states.index_copy_(0, into, state.index_select(0, some))
    out_TVE = torch.zeros_like(v_TVE)
    if parts:
        out_TVE.index_copy_(0, runs.order_X, torch.cat(parts))
        states.index_copy_(0, runs.write_N, state_NVDE)
    return out_TVE.to(inputs.mixed_TC.dtype)


def delta_prefill(inputs: DeltaInputs, rings: Rings, runs: DeltaRuns, plan: ChunkPlan) -> Tensor:
    """Compute `delta_steps` by chunks, which is faster on a GPU, for runs of which only the last state is kept.

    No token is drawn after any of their rows. plan: of the runs in the caller's order, contiguous from row 0 on."""
    q_TKD, k_TKD, v_TVE = inputs.heads(_convolved(inputs, rings.rows_BMC, runs))
    states = rings.state_BRVDE.flatten(0, 1)
    before_NVDE = states.index_select(0, runs.read_N.index_select(0, runs.given_N))
    out_TVE, after_NVDE = gated_delta_planned(q_TKD, k_TKD, v_TVE, inputs.decay_TV, inputs.beta_TV, before_NVDE, plan)
    states.index_copy_(0, runs.write_N.index_select(0, runs.given_N), after_NVDE)
    return out_TVE


def _products(left_X2D: Tensor, right_XDE: Tensor) -> Tensor:
    """Compute torch.bmm with bits that do not depend on X: torch uses another routine for a single matrix."""
    if len(left_X2D) > 1:
        return torch.bmm(left_X2D, right_XDE)
    return torch.bmm(left_X2D.expand(2, -1, -1), right_XDE.expand(2, -1, -1))[:1]


def _convolved(inputs: DeltaInputs, rows_BMC: Tensor, runs: DeltaRuns) -> Tensor:
    """Return silu of the convolution, [T, C] in float32, and update the ring of rows."""
    ring_XC = rows_BMC.flatten(0, 1)
    begin_XC = ring_XC.index_select(0, runs.begin_X).masked_fill_(~runs.seen_X1, 0)  # whatever was stored there
    source_XC = torch.cat([begin_XC, inputs.mixed_TC])
    ring_XC.index_copy_(0, runs.into_X, inputs.mixed_TC.index_select(0, runs.from_X))
    wide = torch.promote_types(source_XC.dtype, torch.float32)
    weight_WC = inputs.conv_CW.to(wide).T
    total_TC = source_XC.index_select(0, runs.window_WT[0]).to(wide) * weight_WC[0]
    for window_T, weight_C in zip(runs.window_WT[1:], weight_WC[1:], strict=True):
        # Two operations, because a fused one would round differently where a vector ends.
        total_TC = total_TC + source_XC.index_select(0, window_T).to(wide) * weight_C
    return uncut(F.silu, total_TC)
