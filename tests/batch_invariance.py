"""Probes of this machine's matmuls for batch invariance, for tests that require equal bits of code built on them.

A sample has the same bits in any batch wherever the BLAS gives a row the same bits in every batch of a multiple of
ROW_MULTIPLE rows (docs/design.md, "Rollout"). That is a property of the BLAS, the CPU, the shape and the number of
threads, not of this code. Therefore such a test first probes `linear` itself, with the shapes that it is about to use:
if the answer is no, it skips and names the switch that helps; if it is yes, only equal bits pass.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import nn

from thresher.kernels.attention.paged_cpu import PIECE, SHARED_ROWS
from thresher.kernels.attention.tiles import row_tile
from thresher.kernels.layers import linear
from thresher.kernels.operands import ROW_MULTIPLE

# test_bits_settings.py searches for it among the reasons of skipped tests.
NOT_INVARIANT = "the BLAS is not batch-invariant here"
SWITCH = "on an Intel CPU it is with MKL_CBWR=AUTO,STRICT in the environment before torch is imported"
Shape = tuple[int, int]


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batches(most: int) -> list[int]:
    """Return multiples of ROW_MULTIPLE: all up to 256 rows, then increasingly sparse ones."""
    counts = list(range(ROW_MULTIPLE, min(most, 256) + 1, ROW_MULTIPLE))
    while counts[-1] < most:
        counts.append(min(int(counts[-1] * 1.3), most) // ROW_MULTIPLE * ROW_MULTIPLE)
    return counts


@cache
def _rows(shape: Shape, threads: int, most: int, dtype: torch.dtype) -> bool:
    outputs, inputs = shape
    most = -(-most // ROW_MULTIPLE) * ROW_MULTIPLE
    generator = torch.Generator().manual_seed(0)
    weight_OI, bias_O, x_TI = (
        torch.randn(size, generator=generator, dtype=dtype) for size in ((outputs, inputs), (outputs,), (most, inputs))
    )
    places_T = torch.randperm(most, generator=generator)
    with using_threads(threads):
        for bias in (None, bias_O):
            alone_TO = torch.cat([linear(rows, weight_OI, bias) for rows in x_TI.split(ROW_MULTIPLE)])
            if not all(torch.equal(linear(x_TI[:count], weight_OI, bias), alone_TO[:count]) for count in batches(most)):
                return False
            for count in (ROW_MULTIPLE, min(5 * ROW_MULTIPLE, most), most):
                if not torch.equal(linear(x_TI[places_T[:count]], weight_OI, bias), alone_TO[places_T[:count]]):
                    return False
    return True


def rows_are_batch_invariant(
    shapes: Iterable[Shape], threads: int | None = None, most: int = 1024, dtype: torch.dtype = torch.float32
) -> bool:
    """Return whether `linear` with weights of these shapes, (outputs, inputs), gives a row the same bits at any place
    of any batch of a multiple of ROW_MULTIPLE rows, up to `most`."""
    threads = torch.get_num_threads() if threads is None else threads
    return all(_rows(shape, threads, most, dtype) for shape in sorted(set(shapes)))


@cache
def _batched(inner: int, outer: int, tile: int, most: int, threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    matrices = 12
    x = torch.randn(matrices, most, inner, generator=generator)
    y = torch.randn(matrices, inner, outer, generator=generator)
    counts = sorted({tile, 2 * tile, 3 * tile, 5 * tile, min(64, most), most})
    with using_threads(threads):
        tiles = x.view(-1, tile, inner)
        alone = torch.bmm(tiles, y.repeat_interleave(most // tile, 0)).view(matrices, most, outer)
        for rows in counts:
            for first, last, at in ((0, 2, 0), (3, 6, most - rows), (0, 12, (most - rows) // 2)):
                product = torch.bmm(x[first:last, at : at + rows].contiguous(), y[first:last])
                if not torch.equal(product, alone[first:last, at : at + rows]):
                    return False
    return True


def attention_is_batch_invariant(heads: int, kv_heads: int, dim: int, threads: int | None = None) -> bool:
    """Return the same for the batched matmuls of `paged_attention`, rows times a block's keys [D, S] and weights times
    its values [S, D]: whether a row's bits depend on the number of other rows, in multiples of row_tile, or of
    matrices. A single matrix, which the kernel duplicates, is not probed."""
    threads = torch.get_num_threads() if threads is None else threads
    with using_threads(threads):
        tiles = [(slots, row_tile(dim, slots, torch.float32, torch.device("cpu"))) for slots in (16, 32, 64)]
    most = max(PIECE * heads // kv_heads, SHARED_ROWS)
    return all(
        _batched(inner, outer, tile, -(-most // tile) * tile, threads)
        for slots, tile in tiles
        for inner, outer in ((dim, slots), (slots, dim))
    )


def weight_shapes(*modules: nn.Module) -> set[Shape]:
    """Return (outputs, inputs) of every matrix, a head or embedding included; adapters' ranks are padded to 8."""
    shapes = set()
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                outputs, inputs = parameter.shape
                if name.endswith(".a_RI") or name == "a_RI":
                    outputs += -outputs % 8
                if name.endswith(".b_OR") or name == "b_OR":
                    inputs += -inputs % 8
                shapes.add((outputs, inputs))
    return shapes


def skip_unless(invariant: bool, what: str, threads: int | None = None) -> None:
    """Skip the test if a probe failed."""
    if not invariant:
        threads = torch.get_num_threads() if threads is None else threads
        pytest.skip(f"{NOT_INVARIANT} ({what}, {threads} threads); {SWITCH}")


def needs_invariant_rows(
    shapes: Iterable[Shape], threads: int | None = None, most: int = 1024, dtype: torch.dtype = torch.float32
) -> None:
    """Skip the test if matmuls with such weights are not batch-invariant."""
    shapes = set(shapes)
    skip_unless(rows_are_batch_invariant(shapes, threads, most, dtype), f"weights {sorted(shapes)}", threads)


def needs_invariant_attention(heads: int, kv_heads: int, dim: int, threads: int | None = None) -> None:
    """Skip the test if paged attention's batched matmuls are not batch-invariant."""
    invariant = attention_is_batch_invariant(heads, kv_heads, dim, threads)
    skip_unless(invariant, f"attention of {heads} heads, {kv_heads} with keys, dimension {dim}", threads)


def needs_invariant_policy(policy: nn.Module, threads: int | None = None, most: int = 1280) -> None:
    """Skip the test if a rollout of this policy cannot be batch-invariant, because its matmuls are not."""
    config = policy.config
    for dtype in {torch.float32, policy.dtype}:  # heads and attention multiply in float32
        needs_invariant_rows(weight_shapes(policy), threads, most, dtype)
    needs_invariant_attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, threads)
