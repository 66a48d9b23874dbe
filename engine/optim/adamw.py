"""AdamW with moments stored differently than in torch: in 8 bits, in CPU memory, or both.

The weights are stepped some rows at a time: the rows' moments are copied to the weights' device as float32, torch's own
fused AdamW steps them, and the moments are stored again. On CUDA the moments of the next rows are meanwhile copied from
CPU memory, and those of the previous rows back (`travelling`); at most three such parts are on the device. With float32
moments every value goes through the arithmetic of `torch.optim.AdamW`, and the bits are the same. 8-bit moments are
quantised after the step, which itself uses the exact values (Dettmers et al. 2021, section 2; below).

Matrices have 8-bit moments; vectors, which are norms and biases, keep float32 ones (in the paper: tensors with fewer
than 4,096 values). Rows of a parameter are independent of each other, so a rank that holds some of them
(engine/parallel) steps them exactly as one process with all rows does.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thresher.common.errors import UserError

AT_A_TIME = 1 << 22  # values stepped at once, in whole rows: 16 MiB in float32
BLOCK = 256  # values per scale
DECADES = 7
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # name, and whether it has a sign
BUFFERS = 3  # buffers for parts on a GPU: one is filled, one stepped, one emptied


class PartwiseAdamW(torch.optim.Optimizer):
    """AdamW over dense float32 vectors and matrices. eight_bit: store moments in 8 bits. storage: the device that
    stores them; None: that of the weights. In CPU memory they are pinned if the weights are on CUDA."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        eight_bit: bool,
        storage: torch.device | None = None,
    ) -> None:
        self.eight_bit, self.storage = eight_bit, storage
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def state_like(self, param: Tensor, device: torch.device | str = "meta") -> dict[str, Tensor]:
        """Return a parameter's state before its first step, by name; on "meta" only its shapes and dtypes."""
        eight_bit = self.eight_bit and param.dim() > 1
        pinned = torch.device(device).type == "cpu" and param.device.type == "cuda"

        def zeros(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(tuple(shape), dtype=dtype, device=device, pin_memory=pinned)

        state = {"step": torch.zeros((), dtype=torch.float32, device=device if str(device) == "meta" else param.device)}
        for name, _ in MOMENTS:
            state[name] = zeros(param.shape, torch.uint8 if eight_bit else torch.float32)
            if eight_bit:
                state[f"{name}_scale"] = zeros([len(param), blocks_of(param.shape[1])], torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load only the states, by parameter number, bit for bit; torch's own method would cast them to float32."""
        params = [param for group in self.param_groups for param in group["params"]]
        for number, saved in state_dict["state"].items():
            param = params[number]
            self.state[param] = self.state_like(param, self.storage or param.device)
            for name, value in self.state[param].items():
                if name not in saved:
                    raise UserError(
                        f"the saved moments have no {name}; give the optim.optimizer_state_dtype they were saved with"
                    )
                value.copy_(saved[name])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. closure: part of torch's signature, must be None."""
        assert closure is None
        stepped = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        parts = []  # (settings, weights, gradient, step count), and the stored moments
        for group, param in stepped:
            if param not in self.state:
                self.state[param] = self.state_like(param, self.storage or param.device)
            state, size = self.state[param], max(AT_A_TIME // max(param[:1].numel(), 1), 1)
            stored = [state[name] for name in state if name != "step"]
            for start in range(0, len(param), size):
                rows = slice(start, start + size)
                of = group, param[rows], cast(Tensor, param.grad)[rows], state["step"]
                parts.append((of, [moment[rows] for moment in stored]))
        if parts:
            # strict: the last part is stored when the next one is requested
            here = travelling([stored for _, stored in parts], parts[0][0][1].device)
            for (of, _), brought in zip(parts, here, strict=True):
                _step_rows(*of, brought)
        for _, param in stepped:
            self.state[param]["step"] += 1


def _step_rows(group: dict[str, Any], rows: Tensor, grad: Tensor, step: Tensor, stored: Sequence[Tensor]) -> None:
    """Step some rows. stored: their moments' tensors, as in `state_like`, on the rows' device."""
    each = len(stored) // len(MOMENTS)
    held = [stored[number * each : (number + 1) * each] for number in range(len(MOMENTS))]
    moments = [
        one[0] if each == 1 else dequantise(one[0], one[1], signed)
        for one, (_, signed) in zip(held, MOMENTS, strict=True)
    ]
    adamw(
        [rows],
        [grad],
        moments[:1],
        moments[1:],
        [],
        [step.clone()],  # a copy, because each call increments it
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if each > 1:
        for one, moment, (_, signed) in zip(held, moments, MOMENTS, strict=True):
            for kept, value in zip(one, quantise(moment, signed), strict=True):
                kept.copy_(value)


def travelling(parts: Sequence[Sequence[Tensor]], device: torch.device) -> Iterator[Sequence[Tensor]]:
    """Yield each part, a few tensors, on `device`, and store the caller's changes.

    Tensors that are on the device already are yielded themselves. From pinned CPU memory to CUDA each part goes through
    one of BUFFERS buffers: while one is stepped, the next is copied in and the previous one out, on two additional
    streams. At the end everything is stored.
    """
    if all(tensor.device.type == device.type for part in parts for tensor in part):
        yield from parts
        return
    size = max(sum(_aligned(tensor) for tensor in part) for part in parts)
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
    work = torch.cuda.current_stream(device)
    coming, going = torch.cuda.Stream(device), torch.cuda.Stream(device)
    coming.wait_stream(work)  # earlier work on the buffers' memory may still run
    emptied: list[torch.cuda.Event] = []

    def fill(number: int) -> tuple[list[Tensor], torch.cuda.Event]:
        buffer, views, at = buffers[number % BUFFERS], list[Tensor](), 0
        with torch.cuda.stream(coming):
            if number >= BUFFERS:
                coming.wait_event(emptied[number - BUFFERS])
            for tensor in parts[number]:
                views.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                views[-1].copy_(tensor, non_blocking=True)
                at += _aligned(tensor)
            return views, coming.record_event()

    ahead = fill(0)
    for number, part in enumerate(parts):
        views, filled = ahead
        if number + 1 < len(parts):
            ahead = fill(number + 1)
        work.wait_event(filled)
        yield views
        going.wait_stream(work)
        with torch.cuda.stream(going):
            for tensor, view in zip(part, views, strict=True):
                tensor.copy_(view, non_blocking=True)
            emptied.append(going.record_event())
    work.wait_stream(going)
    work.synchronize()  # otherwise a checkpoint would read copies in progress


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 256) * 256


# --- Moments in 8 bits: blocks of 256 values, each a code of a fixed table times the block's largest magnitude
#
#     x[r, c] = table[code[r, c]] * scale[r, c // 256],   scale = max |x| of the block (float32)
#
# A block lies within one row of its matrix, and the last block of a row may have fewer values. So some rows of a matrix
# have the same codes and scales as within the whole matrix, on one rank or on several.
#
# The table is that of dynamic quantisation (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
# arXiv:2110.02861, sections 1.3 and 2.2): seven decades below 1, the higher ones in more steps. With a sign, for the
# first moment, decade e (1 the lowest) has 2^(e - 1) values of either sign, the middles of as many equal parts of
# [.1, 1] 10^(e - 7); without, for the second moment, twice as many. An error is at most half a part: .9 / 128 of the
# block's largest magnitude with a sign and .9 / 256 without. In a lower decade, which has fewer steps, it is a larger
# part of the value.
#
# Differences from the paper: blocks of 256 values, not 2,048 (their scales take 1.6%); blocks that end with their row;
# and a second moment's table without 0, because a moment rounded to 0 would leave only eps in the denominator.
# Axes: R rows of C values, B blocks of a row.


@cache
def code_table(signed: bool) -> Tensor:
    """Return the values of the codes, ascending, float32: 256 in [-1, 1] with a sign, 255 in (0, 1] without."""
    values = [torch.ones(1, dtype=torch.float64)]
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - DECADES + 1)
        values += [middles, -middles] if signed else [middles]
    if signed:
        values.append(torch.zeros(1, dtype=torch.float64))
    return torch.cat(values).sort().values.float()


@cache
def _on(device: torch.device, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table, the edges between codes, and the counts of edges below. The edges are followed by an inf. The
    counts are, for the upper 17 bits of every float32 (sign, exponent, 8 of the mantissa), of the edges below all
    numbers with these bits."""
    table = code_table(signed)
    edges = (table[1:] + table[:-1]) / 2
    bits = torch.arange(1 << 17, dtype=torch.int64) << 15
    ends = torch.stack([bits, bits + 0x7FFF])
    ends = torch.where(ends < 1 << 31, ends, ends - (1 << 32)).to(torch.int32).view(torch.float32)
    below = torch.bucketize(ends.nan_to_num(0.0).amin(0), edges, out_int32=True)
    return table.to(device), torch.cat([edges, torch.tensor([torch.inf])]).to(device), below.to(device)


def blocks_of(columns: int) -> int:
    """Return the number of scales of a row of `columns` values."""
    return -(-columns // BLOCK)


def quantise(x_RC: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise x [R, C] float32, not negative unless `signed`. Return codes [R, C] uint8 and scales [R, blocks_of(C)]
    float32. Takes a few times the memory of x."""
    rows, columns = x_RC.shape
    width = min(BLOCK, columns)
    missing = -columns % width
    padded = torch.nn.functional.pad(x_RC, (0, missing)) if missing else x_RC
    blocks = padded.view(rows, -1, width)
    scale_RB = blocks.abs().amax(2)
    _, edges, below = _on(x_RC.device, signed)
    # A block of zeros has the scale 0, with which every code means 0.
    parts = (blocks / scale_RB.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).view(-1)
    # Numbers whose upper 17 bits agree are .4% apart and edges .7%, so at most one edge lies between them. A search
    # would take several times as long.
    codes = below.index_select(0, (parts.view(torch.int32) >> 15) & 0x1FFFF)
    codes += parts > edges.index_select(0, codes)
    return codes.view(rows, -1)[:, :columns].to(torch.uint8), scale_RB


def dequantise(codes_RC: Tensor, scale_RB: Tensor, signed: bool) -> Tensor:
    """Dequantise codes [R, C] uint8 with scales [R, blocks_of(C)] to [R, C] float32."""
    table, _, _ = _on(codes_RC.device, signed)
    columns = codes_RC.shape[1]
    values = table.index_select(0, codes_RC.reshape(-1).int()).view(codes_RC.shape)
    return values * scale_RB.repeat_interleave(min(BLOCK, columns), 1)[:, :columns]
