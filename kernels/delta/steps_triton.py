"""steps.py's next rows of a GPU's decode step in Triton, in one launch: convolution, silu, length 1, rule, both rings.

A program has some columns of a head's state of one sequence, and up to R rows of it: it reads the state once, and
writes one behind each row. It computes its head's q and k itself, which is W products for each of their channels.

Rows at positions start .. start + count - 1 are written where those at start - W + 1 .. start - 1 do not lie, for count
is at most R and the ring of rows has R + W - 1 places. So no program reads what another writes.

Axes: N sequences, T = N times the most rows of one, B slots, R states and M rows of a slot's rings, C channels, W
tokens that the convolution sees, V value heads, D dimension of a key, E of a value.
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.delta.layer import UNIT_EPS, DeltaInputs
from thresher.kernels.operands import on_device
from thresher.kernels.registry import Specialisation

COLUMNS = 32  # of a state


@triton.jit
def _convolved(
    mixed_ptr,  # [rows, ..] of the sequence, from the step's first on
    rows_ptr,  # [M, C] of its ring
    conv_ptr,  # [C, W]
    place,  # of the row among the step's
    start,  # position of the step's first
    channel,  # [..]
    there,  # [..]: which channels exist
    stride,
    C: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
):
    """(silu of the convolution [..], in float32; what the row has)"""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(W - 1, -1, -1):
        at = place - back
        weight = tl.load(conv_ptr + channel * W + (W - 1 - back), mask=there, other=0.0).to(tl.float32)
        now = tl.load(mixed_ptr + at * stride + channel, mask=there & (at >= 0), other=0.0)
        before = rows_ptr + (start + at + M) % M * C + channel
        held = tl.load(before, mask=there & (at < 0) & (start + at >= 0), other=0.0)
        total += weight * (now.to(tl.float32) + held.to(tl.float32))
    return total / (1.0 + tl.exp(-total)), now


@triton.jit(do_not_specialize=["most", "per_key"])
def _delta_step_kernel(
    mixed_ptr,  # [T, C] bf16 or fp32
    conv_ptr,  # [C, W] the same
    decay_ptr,  # [T, V] fp32
    beta_ptr,  # [T, V] fp32
    slot_ptr,  # [N] int64
    start_ptr,  # [N] int64
    count_ptr,  # [N] int64
    state_ptr,  # [B, R, V, D, E] fp32, read and written
    rows_ptr,  # [B, M, C] mixed's dtype, read and written
    o_ptr,  # [T, V, E] mixed's dtype, written
    stride,  # of mixed's rows
    most,  # rows of a sequence
    per_key,  # value heads of a key head
    eps,
    scale,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    run = tl.program_id(2)
    M: tl.constexpr = R + W - 1
    slot, start, count = tl.load(slot_ptr + run), tl.load(start_ptr + run), tl.load(count_ptr + run)
    depth = tl.arange(0, WIDTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists, there = depth < D, column < E
    q_channel = head // per_key * D + depth
    k_channel = heads // per_key * D + q_channel
    v_channel = 2 * (heads // per_key) * D + head * E + column
    keeps_keys = (
        exists & (tl.program_id(0) == 0) & (head % per_key == 0)
    )  # of the programs that have this key head, one
    first = run.to(tl.int64) * most
    mixed, ring = mixed_ptr + first * stride, rows_ptr + slot * (M * C)
    at = head * (D * E) + depth[:, None] * E + column[None, :]
    inside = exists[:, None] & there[None, :]
    states = state_ptr + slot * (R * heads * (D * E))
    state = tl.load(states + start % R * (heads * (D * E)) + at, mask=inside & (count > 0), other=0.0)
    for place in range(most):
        gates = (first + place) * heads + head
        live = place < count
        q, q_row = _convolved(mixed, ring, conv_ptr, place, start, q_channel, exists & live, stride, C, W, M)
        k, k_row = _convolved(mixed, ring, conv_ptr, place, start, k_channel, exists & live, stride, C, W, M)
        v, v_row = _convolved(mixed, ring, conv_ptr, place, start, v_channel, there & live, stride, C, W, M)
        q = (q * tl.rsqrt(tl.sum(q * q, 0) + eps)).to(mixed_ptr.dtype.element_ty).to(tl.float32)
        k = (k * tl.rsqrt(tl.sum(k * k, 0) + eps)).to(mixed_ptr.dtype.element_ty).to(tl.float32)
        v = v.to(mixed_ptr.dtype.element_ty).to(tl.float32)
        state *= tl.exp(tl.load(decay_ptr + gates, mask=live, other=0.0))
        beta = tl.load(beta_ptr + gates, mask=live, other=0.0)
        x = beta * (v - tl.sum(k[:, None] * state, 0))
        state += k[:, None] * x[None, :]
        o = tl.sum(q[:, None] * state, 0) * scale
        tl.store(o_ptr + gates * E + column, o.to(o_ptr.dtype.element_ty), mask=there)
        behind = states + (start + place + 1) % R * (heads * (D * E)) + at
        tl.store(behind, state, mask=inside & live)
        kept = ring + (start + place) % M * C
        tl.store(kept + q_channel, q_row, mask=keeps_keys & live)
        tl.store(kept + k_channel, k_row, mask=keeps_keys & live)
        tl.store(kept + v_channel, v_row, mask=there & live)


def fused_next(
    inputs: DeltaInputs,
    state_BRVDE: Tensor,
    rows_BMC: Tensor,
    slot_N: Tensor,
    start_N: Tensor,
    count_N: Tensor,
    most: int,
) -> Tensor:
    """As steps.py's `delta_next`: o [T, V, E], 0 for rows beyond a sequence's own, of which nothing is kept.

    count: at most R. int64.
    """
    ring, heads, D, E = state_BRVDE.shape[1:]
    channels, width = inputs.conv_CW.shape
    o_TVE = torch.empty((len(inputs.mixed_TC), heads, E), dtype=inputs.mixed_TC.dtype, device=state_BRVDE.device)
    with on_device(state_BRVDE):
        _delta_step_kernel[(triton.cdiv(E, COLUMNS), heads, len(slot_N))](
            inputs.mixed_TC,
            inputs.conv_CW,
            inputs.decay_TV,
            inputs.beta_TV,
            slot_N,
            start_N,
            count_N,
            state_BRVDE,
            rows_BMC,
            o_TVE,
            inputs.mixed_TC.stride(0),
            most,
            heads // inputs.key_heads,
            UNIT_EPS,
            D**-0.5,
            C=channels,
            W=width,
            R=ring,
            D=D,
            E=E,
            WIDTH=triton.next_power_of_2(D),
            COLUMNS=COLUMNS,
        )
    return o_TVE


def specialisations() -> tuple[Specialisation, ...]:
    """Qwen3.5's heads: of 0.8B's channels and 27B's, with drafts and without. The states are read 16 bytes at a time,
    the channels, which are few, less."""
    pointers = ("mixed", "conv", "decay", "beta", "slot", "start", "count", "state", "rows", "o")
    types = dict.fromkeys(("mixed", "conv", "rows", "o"), "bf16") | dict.fromkeys(("slot", "start", "count"), "i64")
    return tuple(
        Specialisation(
            name=f"delta step bf16, {channels:,} channels, {ring} states",
            kernel=_delta_step_kernel,
            signature={f"{x}_ptr": "*" + types.get(x, "fp32") for x in pointers}
            | {"stride": "i32", "most": "i32", "per_key": "i32", "eps": "fp32", "scale": "fp32"},
            constants={"C": channels, "W": 4, "R": ring, "D": 128, "E": 128, "WIDTH": 128, "COLUMNS": COLUMNS},
            aligned=(*(f"{x}_ptr" for x in pointers), "stride"),
        )
        for channels, ring in ((6144, 2), (6144, 5), (10_240, 2))
    )
