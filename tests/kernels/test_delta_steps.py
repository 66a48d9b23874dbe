"""Tests of the gated delta rule in a rollout: bits do not depend on how rows are split over steps; states of rejected
rows are discarded; chunked and token by token, the results are the recurrence's."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from thresher.kernels.delta.layer import DeltaInputs, Spans, delta_attention
from thresher.kernels.delta.rule import ChunkPlan, reference_gated_delta
from thresher.kernels.delta.steps import NextRows, Rings, delta_prefill, delta_runs, delta_steps

K, V, D, E, WIDTH, RING = 2, 4, 8, 6, 4, 3
CHANNELS = 2 * K * D + V * E
CPU = torch.device("cpu")


def drawn(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    found = normal(rows, CHANNELS), normal(CHANNELS, WIDTH), -normal(rows, V).exp() * 0.1, normal(rows, V).sigmoid()
    return DeltaInputs(*(x.to(dtype) for x in found), K, D)


def rows_of(inputs: DeltaInputs, index: Tensor) -> DeltaInputs:
    tensors = (inputs.mixed_TC[index], inputs.conv_CW, inputs.decay_TV[index], inputs.beta_TV[index])
    return DeltaInputs(*tensors, inputs.key_heads, inputs.key_dim)


def rings(slots: int, dtype: torch.dtype = torch.float32, ring: int = RING) -> Rings:
    # A slot's earlier contents must not matter, except the state that a sequence starts with.
    state = torch.full((slots, ring, V, D, E), 7.0, dtype=dtype)
    state[:, 0] = 0
    return Rings(state, torch.full((slots, ring + WIDTH - 1, CHANNELS), 9.0, dtype=dtype))


def run(inputs: DeltaInputs, held: Rings, *runs: tuple[int, int, int]) -> Tensor:
    """Feed (slot, start, count) runs, packed, followed by padding rows."""
    slot_N, start_N, count_N = (np.array(x) for x in zip(*runs, strict=True))
    laid = delta_runs(slot_N, start_N, count_N, np.cumsum(count_N) - count_N, len(inputs.mixed_TC), (RING, WIDTH), CPU)
    return delta_steps(inputs, held, laid)


def expected(inputs: DeltaInputs, lengths: list[int]) -> Tensor:
    """Compute the result with the recurrence and torch's own convolution, in the inputs' dtype."""
    bounds = [0, *np.cumsum(lengths).tolist()]
    mixed = [
        torch.nn.functional.conv1d(
            torch.nn.functional.pad(inputs.mixed_TC[a:b].T, (WIDTH - 1, 0))[None],
            inputs.conv_CW[:, None],
            groups=CHANNELS,
        )[0].T
        for a, b in pairwise(bounds)
    ]
    q, k, v = inputs.heads(torch.nn.functional.silu(torch.cat(mixed)))
    return reference_gated_delta(q, k, v, inputs.decay_TV, inputs.beta_TV, bounds)[0]


def test_in_one_piece_it_is_the_recurrence_and_so_is_the_chunked_form() -> None:
    """In float64: about a hundred roundings of values of about 1."""
    lengths = [5, 1, 70, 3]
    inputs = drawn(sum(lengths), dtype=torch.float64)
    wanted = expected(inputs, lengths)
    held = rings(6, torch.float64)
    starts = [(slot, 0, count) for slot, count in zip((3, 0, 4, 1), lengths, strict=True)]
    found = run(inputs, held, *starts)
    assert float((found - wanted).abs().max()) <= 1e-12
    spans = Spans(lengths, [-1] * 4, CPU)
    assert float((delta_attention(inputs, spans) - wanted).abs().max()) <= 1e-12
    # A chunked prefill leaves the same rings.
    again = rings(6, torch.float64)
    slot_N, start_N, count_N = (np.array(x) for x in zip(*starts, strict=True))
    laid = delta_runs(slot_N, start_N, count_N, np.cumsum(count_N) - count_N, len(wanted), (RING, WIDTH), CPU)
    plan = ChunkPlan([0, *np.cumsum(lengths).tolist()], None, CPU)
    assert float((delta_prefill(inputs, again, laid, plan) - wanted).abs().max()) <= 1e-12
    for slot, _, count in starts:
        assert torch.allclose(again.state_BRVDE[slot, count % RING], held.state_BRVDE[slot, count % RING], atol=1e-12)
    assert torch.equal(again.rows_BMC, held.rows_BMC)


@pytest.mark.parametrize("seed", range(3))
def test_no_bit_depends_on_the_pieces_nor_on_others(seed: int) -> None:
    """Three sequences are fed in random pieces, packed in random order and followed by padding rows."""
    rng, lengths = Random(seed), [40, 23, 31]
    bounds = [0, *np.cumsum(lengths).tolist()]
    inputs = drawn(sum(lengths) + 16, seed)
    wanted = [run(rows_of(inputs, torch.arange(a, b)), rings(1), (0, 0, b - a))[: b - a] for a, b in pairwise(bounds)]
    held, fed, found = rings(4), [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
    while fed != lengths:
        some = [n for n in rng.sample(range(3), rng.randint(1, 3)) if fed[n] < lengths[n]]
        if not some:
            continue
        counts = [rng.randint(1, min(lengths[n] - fed[n], 9)) for n in some]
        index = [
            torch.arange(bounds[n] + fed[n], bounds[n] + fed[n] + count) for n, count in zip(some, counts, strict=True)
        ]
        filling = torch.arange(sum(lengths), sum(lengths) + -sum(counts) % 16)
        out = run(
            rows_of(inputs, torch.cat([*index, filling])),
            held,
            *((n + 1, fed[n], count) for n, count in zip(some, counts, strict=True)),
        )
        for n, count, part in zip(some, counts, out.split([*counts, len(filling)]), strict=False):
            found[n].append(part)
            fed[n] += count
    for parts, exact in zip(found, wanted, strict=True):
        assert torch.equal(torch.cat(parts), exact)


def test_rows_that_were_not_taken_are_forgotten() -> None:
    """Up to R rows are fed, and the next step continues after any of them, or feeds the last one again."""
    inputs = drawn(120)  # rows from 40 on are wrong drafts
    wanted = run(inputs, rings(1), (0, 0, 40))
    held, at, rng = rings(1), 0, Random(0)
    while at < 40:
        count = min(rng.randint(1, RING), 40 - at)
        taken = rng.randint(1, count)
        rows = torch.cat([torch.arange(at, at + taken), torch.arange(40 + at + taken, 40 + at + 16)])
        out = run(rows_of(inputs, rows), held, (0, at, count))
        assert torch.equal(out[:taken], wanted[at : at + taken])
        at += taken


@pytest.mark.parametrize("most", [1, 3])
def test_the_layout_of_a_gpus_step_is_the_hosts(most: int) -> None:
    """Rings and results of `NextRows`, which a graph computes, equal those of `delta_runs`; padding writes to the spare
    slot."""
    slot_N, start_N, count_N = np.array([2, 0, 3]), np.array([7, 0, 20]), np.array([most, 1, min(most, 2)])
    spare, held = 4, [rings(5), rings(5)]
    noise = torch.Generator().manual_seed(3)
    for each in held:
        each.state_BRVDE.copy_(torch.randn(each.state_BRVDE.shape, generator=noise.manual_seed(3)))
    inputs = drawn(4 * most)
    columns = (torch.from_numpy(np.append(x, fill)) for x, fill in ((slot_N, spare), (start_N, 0), (count_N, 0)))
    laid = NextRows(*columns, spare, (RING, WIDTH), most).runs
    found = delta_steps(inputs, held[0], laid).view(4, most, V, E)
    host = delta_runs(slot_N, start_N, count_N, np.arange(3) * most, 4 * most, (RING, WIDTH), CPU)
    wanted = delta_steps(inputs, held[1], host).view(4, most, V, E)
    for n, count in enumerate(count_N):
        assert torch.equal(found[n, :count], wanted[n, :count])
    for ours, theirs in zip(held[0], held[1], strict=True):
        assert torch.equal(ours[:spare], theirs[:spare])
