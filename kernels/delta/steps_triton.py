"""The rows of a decode step (steps.py, `delta_next`) in Triton, in two launches.

    rows    convolution, silu, length 1: q, k and v of the new rows; the ring of rows
    step    S <- exp(decay) S, x = beta (v - S^T k), o = (S^T q + (q . k) x) / sqrt(D), S <- S + k x^T; the ring of
            states

A program of `rows` has the channels of one head of one sequence. It writes rows at positions start .. start + count - 1
and reads those at start - W + 1 .. start - 1. The two have no place of the ring in common, because it has M = R + W - 1
and count is at most R.

A program of `step` has some columns of one head's state, of one sequence. It takes up to R new rows: it reads the state
once, and writes a state after each row.

Axes: N sequences, T = N times the most rows of one, B slots, R states and M rows of a slot's rings, C channels, W
tokens that the convolution sees, K key heads, V value heads, D dimension of a key, E of a value.
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.delta.layer import UNIT_EPS, DeltaInputs
from thresher.kernels.delta.layer_triton import channels_of
from thresher.kernels.operands import on_device
from thresher.kernels.registry import Specialisation

# Columns of a state, warps of its program, and registers of a thread. Chosen by compiled code among 2 or 4 warps and
# 32, 64 or 128 columns: the most bytes in flight (6 programs, 96 KiB per multiprocessor) with nearly the fewest
# instructions. Not measured.
COLUMNS = 32
WARPS = 2
REGISTERS = 168


@triton.jit(do_not_specialize=["most"])
def _delta_rows_kernel(
    mixed_ptr,  # [T, C] bf16 or fp32
    conv_ptr,  # [C, W] the same
    slot_ptr,  # [N] int64
    start_ptr,  # [N] int64
    count_ptr,  # [N] int64
    rows_ptr,  # [B, M, C] mixed's dtype, read and written
    qkv_ptr,  # [T, C] the same, written: q, k and v
    stride,  # of mixed's rows
    most,  # rows of a sequence
    eps,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head, run = tl.program_id(0), tl.program_id(1)
    M: tl.constexpr = R + W - 1
    slot, start, count = tl.load(slot_ptr + run), tl.load(start_ptr + run), tl.load(count_ptr + run)
    channel, there = channels_of(head, K, D, E, WIDTH)
    first = run.to(tl.int64) * most
    ring = rows_ptr + slot * (M * C) + channel
    for place in range(tl.minimum(count, most).to(tl.int32)):
        y = tl.zeros((WIDTH,), tl.float32)
        for back in tl.static_range(W - 1, -1, -1):
            at = place - back
            weight = tl.load(conv_ptr + channel * W + (W - 1 - back), mask=there, other=0.0).to(tl.float32)
            now = tl.load(mixed_ptr + (first + at) * stride + channel, mask=there & (at >= 0), other=0.0)
            held = tl.load(ring + (start + at + M) % M * C, mask=there & (at < 0) & (start + at >= 0), other=0.0)
            y += weight * (now.to(tl.float32) + held.to(tl.float32))
        x = y / (1.0 + tl.exp(-y))
        if head < 2 * K:
            x *= tl.rsqrt(tl.sum(x * x, 0) + eps)
        tl.store(qkv_ptr + (first + place) * C + channel, x.to(qkv_ptr.dtype.element_ty), mask=there)
        tl.store(ring + (start + place) % M * C, now, mask=there)


@triton.jit(do_not_specialize=["most", "per_key"])
def _delta_step_kernel(
    qkv_ptr,  # [T, C] bf16 or fp32: q, k and v
    decay_ptr,  # [T, V] fp32
    beta_ptr,  # [T, V] fp32
    slot_ptr,  # [N] int64
    start_ptr,  # [N] int64
    count_ptr,  # [N] int64
    state_ptr,  # [B, R, V, D, E] fp32, read and written
    o_ptr,  # [T, V, E] qkv's dtype, written
    most,  # rows of a sequence
    per_key,  # value heads of a key head
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    run = tl.program_id(2)
    slot, start, count = tl.load(slot_ptr + run), tl.load(start_ptr + run), tl.load(count_ptr + run)
    depth = tl.arange(0, WIDTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = head * (D * E) + depth[:, None] * E + column[None, :]
    inside = (depth < D)[:, None] & (column < E)[None, :]
    states = state_ptr + slot * (R * heads * (D * E))
    state = tl.load(states + start % R * (heads * (D * E)) + at, mask=inside & (count > 0), other=0.0)
    first = run.to(tl.int64) * most
    query = qkv_ptr + first * C + head // per_key * D + depth
    value = qkv_ptr + first * C + 2 * (heads // per_key) * D + head * E + column
    for place in range(most):
        gates = (first + place) * heads + head
        live = place < count
        q = tl.load(query, mask=(depth < D) & live, other=0.0).to(tl.float32)
        k = tl.load(query + heads // per_key * D, mask=(depth < D) & live, other=0.0).to(tl.float32)
        v = tl.load(value, mask=(column < E) & live, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + gates, mask=live, other=0.0)
        state *= tl.exp(tl.load(decay_ptr + gates, mask=live, other=0.0))
        x = beta * (v - tl.sum(k[:, None] * state, 0))
        o = scale * (tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * x)
        state += k[:, None] * x[None, :]
        tl.store(o_ptr + gates * E + column, o.to(o_ptr.dtype.element_ty), mask=column < E)
        behind = states + (start + place + 1) % R * (heads * (D * E)) + at
        tl.store(behind, state, mask=inside & live)
        query += C
        value += C


def fused_next(
    inputs: DeltaInputs,
    state_BRVDE: Tensor,
    rows_BMC: Tensor,
    slot_N: Tensor,
    start_N: Tensor,
    count_N: Tensor,
    most: int,
) -> Tensor:
    """Compute `delta_next` of steps.py: o [T, V, E], 0 for rows beyond a sequence's count, which leave no state.

    count: at most R. int64.
    """
    ring, heads, D, E = state_BRVDE.shape[1:]
    assert most <= ring and inputs.mixed_TC.stride(1) == 1
    assert all(x.is_contiguous() for x in (inputs.conv_CW, inputs.decay_TV, inputs.beta_TV, state_BRVDE, rows_BMC))
    (channels, width), K = inputs.conv_CW.shape, inputs.key_heads
    o_TVE = torch.empty((len(inputs.mixed_TC), heads, E), dtype=inputs.mixed_TC.dtype, device=state_BRVDE.device)
    qkv_TC = torch.empty((len(inputs.mixed_TC), channels), dtype=inputs.mixed_TC.dtype, device=state_BRVDE.device)
    with on_device(state_BRVDE):
        _delta_rows_kernel[(2 * K + heads, len(slot_N))](
            inputs.mixed_TC,
            inputs.conv_CW,
            slot_N,
            start_N,
            count_N,
            rows_BMC,
            qkv_TC,
            inputs.mixed_TC.stride(0),
            most,
            UNIT_EPS,
            C=channels,
            W=width,
            R=ring,
            K=K,
            D=D,
            E=E,
            WIDTH=triton.next_power_of_2(max(D, E)),
            num_warps=1,
        )
        _delta_step_kernel[(triton.cdiv(E, COLUMNS), heads, len(slot_N))](
            qkv_TC,
            inputs.decay_TV,
            inputs.beta_TV,
            slot_N,
            start_N,
            count_N,
            state_BRVDE,
            o_TVE,
            most,
            heads // K,
            D**-0.5,
            C=channels,
            R=ring,
            D=D,
            E=E,
            WIDTH=triton.next_power_of_2(D),
            COLUMNS=COLUMNS,
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
    return o_TVE


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations for the heads of Qwen3.5 0.8B and 27B, with and without drafts.

    States are read 16 bytes at a time, channels, which are few, less."""
    made = []
    for heads, ring in ((16, 2), (16, 5), (48, 2)):
        types = dict.fromkeys(("mixed", "conv", "rows", "qkv", "o"), "bf16") | dict.fromkeys(
            ("slot", "start", "count"), "i64"
        )
        constants = {
            "C": (32 + heads) * 128,
            "W": 4,
            "R": ring,
            "K": 16,
            "D": 128,
            "E": 128,
            "WIDTH": 128,
            "COLUMNS": COLUMNS,
        }
        for name, kernel, warps, registers in (
            ("rows", _delta_rows_kernel, 1, None),
            ("step", _delta_step_kernel, WARPS, REGISTERS),
        ):
            own = {x: constants[x] for x in kernel.arg_names if x in constants}
            signature = {
                x: "*" + types.get(x.removesuffix("_ptr"), "fp32") if x.endswith("_ptr") else "i32"
                for x in kernel.arg_names
                if x not in own
            }
            signature |= {x: "fp32" for x in ("eps", "scale") if x in signature}
            made.append(
                Specialisation(
                    name=f"delta {name} bf16, {heads} heads, {ring} states",
                    kernel=kernel,
                    signature=signature,
                    constants=own,
                    aligned=tuple(x for x in signature if x.endswith(("_ptr", "stride"))),
                    num_warps=warps,
                    maxnreg=registers,
                )
            )
    return tuple(made)
