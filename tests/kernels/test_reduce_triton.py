"""The tiles' sums brought together: against float64, in any number of tiles, with offsets that were off."""

import math
from collections.abc import Callable

import pytest
import torch
from interpreter import DEVICE

pytest.importorskip("triton")

from thresher.kernels.reduce_triton import SLACK, launch_reduce

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy, on lanes that are masked

COLUMNS = 8


def small_launches() -> dict[str, Callable[[], None]]:
    return {
        "one tile": lambda: check(rows=1, tiles=1),
        "ragged": lambda: check(rows=17, tiles=65),
        "programs that set one flag": lambda: check(rows=60, tiles=5, again_rows=64),
    }


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (17, 63), (64, 65), (100, 200)])
@pytest.mark.parametrize("again_rows", [16, 64])
def test_against_float64(rows: int, tiles: int, again_rows: int) -> None:
    check(rows, tiles, again_rows)


def check(rows: int, tiles: int, again_rows: int = 16) -> None:
    """One launch, whose first row and last one have a wrong offset."""
    noise = torch.Generator().manual_seed(rows)
    z = 6 * torch.randn(rows, tiles, COLUMNS, generator=noise, dtype=torch.float64)  # logits in powers of two
    targets = torch.randint(tiles * COLUMNS, (rows,), generator=noise)
    nats = z.flatten(1) * math.log(2)
    logp = torch.log_softmax(nats, 1)
    m = z.amax(2, keepdim=True)
    e = torch.exp2(z - m)
    parts = torch.stack([m[:, :, 0], e.sum(2), (e * (z - m)).sum(2)]).transpose(1, 2).contiguous()
    y = (z - m).flatten(1).gather(1, targets[:, None])[:, 0]
    wrong = torch.zeros(rows, dtype=torch.float64)
    wrong[0], wrong[-1] = -1.01 * SLACK, math.nan if rows > 1 else 1.01 * SLACK
    offsets = ((nats.logsumexp(1) + wrong) / math.log(2)).to(DEVICE, torch.float32)
    found = torch.full((3, rows), math.nan, device=DEVICE)
    again = torch.zeros(-(-rows // again_rows), dtype=torch.int32, device=DEVICE)
    tensors = [tensor.to(DEVICE, torch.float32) for tensor in (parts, y)]
    launch_reduce(
        tensors[0].flatten(), targets.to(DEVICE), tensors[1], offsets, again, *found, tiles, True, COLUMNS, again_rows
    )
    logprobs, entropy, log_normaliser = found.cpu().double()
    # A result passes through some 16 sums and differences of logits, a power of two and a logarithm, which a GPU has
    # to 2^-22, and a sum over the tiles.
    budget = 2**-24 * (16 * float(z.abs().max()) + 64 + tiles)
    torch.testing.assert_close(logprobs, logp.gather(1, targets[:, None])[:, 0], rtol=0, atol=budget)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(1), rtol=0, atol=budget)
    # A corrected offset is the log-sum-exp itself, up to what its rounding took, which the normaliser keeps.
    corrected = offsets.cpu().double() * math.log(2) + log_normaliser
    torch.testing.assert_close(corrected, nats.logsumexp(1), rtol=0, atol=budget)
    assert (log_normaliser.abs() < SLACK).all() and (log_normaliser[[0, -1]].abs() < 1e-5).all()
    expected = torch.zeros_like(again).index_fill_(0, torch.tensor([0, len(again) - 1], device=DEVICE), 1)
    assert torch.equal(again, expected)
