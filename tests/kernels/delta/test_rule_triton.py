"""Tests of the gated delta rule's kernels against the recurrence in float64: results, gradients, forests, given states;
written memory; bits.

On a CUDA device the compiled kernels run, otherwise Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from delta_cases import E, V, drawn, gradients
from interpreter import DEVICE, GuardedMemory, bfloat16_to_nearest
from torch import Tensor

pytest.importorskip("triton")

from thresher.kernels import gated_delta
from thresher.kernels.delta import reference_gated_delta, rule, rule_triton
from thresher.kernels.delta.rule import ChunkPlan, gated_delta_forest

pytestmark = [
    pytest.mark.usefixtures("rounds_to_nearest"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # numpy, on rows behind a segment
]

# On a GPU, dimensions that the kernels support there.
WIDTH, VALUES = (8, E) if DEVICE == "cpu" else (32, 32)
given = partial(drawn, device=DEVICE, width=WIDTH, values=VALUES)

# Relative to a whole tensor's norm. Between inputs and a result there are about eight products whose operands are
# rounded to bfloat16, by 2^-9 at most; in float32 a decay's gradient is a difference of sums over a chunk's tokens.
LIMITS = {torch.float32: 32 * 2**-24, torch.bfloat16: 8 * 2**-9}


@contextmanager
def kernels_used() -> Iterator[None]:
    with patch.object(rule, "uses_triton", lambda x: x.dtype != torch.float64), bfloat16_to_nearest():
        yield


def check(
    lengths: tuple[int, ...], dtype: torch.dtype, forgets: float = 1.0, width: int = WIDTH, values: int = VALUES
) -> list[Tensor]:
    """Compare results and gradients with the recurrence on the same inputs; return them."""
    tensors, bounds, state = given(lengths, 0, dtype, forgets, width=width, values=values)
    truth = gradients(reference_gated_delta, [x.double() for x in tensors], bounds, state.double())
    with kernels_used():
        found = gradients(gated_delta, tensors, bounds, state)
    for ours, true in zip(found, truth, strict=True):
        assert ours.dtype in (dtype, torch.float32)
        assert float((ours.double() - true).norm()) <= LIMITS[dtype] * float(true.norm())
    return found


def small_launches() -> dict[str, Callable[[], object]]:
    return {
        "a chunk and another's beginning": lambda: check((70, 0, 3), torch.float32),
        "keys wider than a tile's least": lambda: check((20,), torch.float32, width=24),
        "bfloat16": lambda: check((5, 3), torch.bfloat16, forgets=0.1),
        "three chunks and a branch": lambda: check_forest((130, 2), (-1, 0)),
        "a forest": lambda: check_forest((3, 1, 2), (-1, 0, 0)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "forgets"),
    [
        ((0, 1, 65), 1.0),
        pytest.param((64, 63), 0.1, marks=pytest.mark.slow),
        pytest.param((140, 2), 0.01, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results_and_gradients(lengths: tuple[int, ...], forgets: float, dtype: torch.dtype) -> None:
    check(lengths, dtype, forgets)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes minutes, and its tiles are not the compiler's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", rule_triton.DIMS)
def test_all_that_is_served(dim: int, dtype: torch.dtype) -> None:
    """Every dimension that the kernels are launched with, a model's 128 among them, works over several chunks, and the
    bits repeat."""
    first = check((200, 1, 70), dtype, 0.1, dim, dim)
    for _ in range(10):
        again = check((200, 1, 70), dtype, 0.1, dim, dim)
        assert all(torch.equal(ours, before) for ours, before in zip(again, first, strict=True))


def test_keys_that_are_all_alike() -> None:
    """Equal keys make a chunk's system as far from the identity as possible: A is 1 everywhere below the diagonal."""
    tensors, bounds, state = given((100,), dtype=torch.float32)
    tensors[1] = torch.nn.functional.normalize(torch.ones_like(tensors[1]), dim=-1)
    tensors[3], tensors[4] = torch.zeros_like(tensors[3]), torch.ones_like(tensors[4])
    truth = gradients(reference_gated_delta, [x.double() for x in tensors], bounds, state.double())
    with kernels_used():
        found = gradients(gated_delta, tensors, bounds, state)
    for ours, true in zip(found, truth, strict=True):
        # A chunk's solve cancels the sum over its tokens: a factor of 16, the tokens of a block.
        assert float((ours.double() - true).norm()) <= 16 * LIMITS[torch.float32] * max(float(true.norm()), 1.0)


@pytest.mark.fast_cases(0, gpu=1)
def test_nothing_overflows_where_all_is_forgotten() -> None:
    tensors, bounds, state = given((70,), dtype=torch.float32)
    tensors[3] = torch.full_like(tensors[3], -1e4)
    with kernels_used():
        assert all(bool(x.isfinite().all()) for x in gradients(gated_delta, tensors, bounds, state))


def check_forest(
    lengths: tuple[int, ...], parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch | None = None
) -> None:
    """Compare a forest with its root-to-leaf sequences, each computed alone: o of each segment, and gradients."""
    tensors, bounds, _ = given(lengths, dtype=torch.float32)
    weight = torch.randn(sum(lengths), V, VALUES, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    wide = [x.double().requires_grad_(True) for x in tensors]
    parts = []
    for n in range(len(lengths)):
        line = [n]
        while parents[line[0]] >= 0:
            line.insert(0, parents[line[0]])
        rows = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in line]).to(DEVICE)
        out, _ = reference_gated_delta(*(x[rows] for x in wide), [0, len(rows)])
        parts.append(out[len(rows) - lengths[n] :])
    truth = torch.cat(parts)
    (truth * weight).sum().backward()
    leaves = [x.clone().requires_grad_(True) for x in tensors]
    memory = None if monkeypatch is None else GuardedMemory(monkeypatch)
    with kernels_used():
        out = gated_delta_forest(*leaves, ChunkPlan(bounds, parents, torch.device(DEVICE)))
        (out * weight).sum().backward()
    if memory is not None:
        memory.check()
    for ours, true in zip([out, *(x.grad for x in leaves)], [truth, *(x.grad for x in wide)], strict=True):
        assert ours is not None and true is not None
        difference = (ours.detach().double() - true.detach()).norm()
        assert float(difference) <= LIMITS[torch.float32] * float(true.detach().norm())


@pytest.mark.fast_cases(0, gpu=1)
def test_a_forest_is_its_sequences_and_writes_all_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees, with a branch of a branch and a segment longer than a chunk."""
    check_forest((5, 66, 3, 4, 1), (-1, 0, 1, 0, -1), monkeypatch)


@pytest.mark.fast_cases(0, gpu=1)
def test_heads_and_sequences_have_their_own_bits() -> None:
    tensors, bounds, state = given((20, 9), dtype=torch.bfloat16)
    with kernels_used():
        together = gradients(gated_delta, tensors, bounds, state)
        spoilt = [x.clone() for x in tensors]
        spoilt[2][:20] = torch.nan
        found = gradients(gated_delta, spoilt, bounds, state)
        with patch.dict(rule.WORKSPACE_BYTES, {DEVICE: 1}):  # one key head at a time
            parted = gradients(gated_delta, tensors, bounds, state)
    for whole, other, part in zip(together, found, parted, strict=True):
        own = slice(1, 2) if len(whole) == 2 else slice(20, None)
        assert torch.equal(whole[own], other[own])
        assert torch.equal(whole, part)


def test_lists_of_a_forest() -> None:
    """Segments are sorted by depth, longest first; each parent's state has its own slot; children keep their order."""
    lists = rule_triton.make_lists([0, 5, 75, 78, 98, 99], [-1, 0, 0, 1, -1], 64, torch.device("cpu"))
    assert lists.depths == [2, 2, 1] and lists.left == 2
    assert lists.sequence_S.tolist() == [0, 4, 1, 2, 3]
    assert lists.chunk_X2.tolist() == [[0, 5], [98, 99], [5, 69], [69, 75], [75, 78], [78, 98]]
    assert lists.segment_S4.tolist() == [[0, 1, -1, 0], [1, 2, -1, -1], [2, 4, 0, 1], [4, 5, 0, -1], [5, 6, 1, -1]]
    found = [lists.child_S[a:b].tolist() for a, b in lists.children_S2.tolist()]
    assert found == [[2, 3], [], [4], [], []]


def test_what_is_not_served_goes_to_torch() -> None:
    def served(keys: int, values: int, *dtypes: torch.dtype) -> bool:
        dims = (keys, keys, values)
        return rule_triton.is_served(*(torch.ones(3, 2, n, dtype=x) for n, x in zip(dims, dtypes, strict=True)))

    bf16, fp32 = torch.bfloat16, torch.float32
    for compiled in (True, False):
        with patch.object(rule_triton, "INTERPRETED", not compiled):
            assert served(128, 128, bf16, bf16, bf16) and served(32, 32, fp32, fp32, fp32)
            assert not served(200, 128, bf16, bf16, bf16) and not served(128, 128, bf16, bf16, fp32)
            # These shapes gave wrong results on an H200.
            assert served(16, 16, bf16, bf16, bf16) is served(128, 8, bf16, bf16, bf16) is not compiled


def test_no_tokens() -> None:
    tensors, _, state = given((0, 0), dtype=torch.float32)
    with kernels_used():
        out, final, *slopes = gradients(gated_delta, tensors, [0, 0, 0], state)
    assert out.shape == (0, V, VALUES) and torch.equal(final, state)
    assert [len(x) for x in slopes] == [0, 0, 0, 0, 0, 2]


@pytest.mark.fast_cases(0, gpu=1)
def test_states_and_gates_of_any_strides() -> None:
    """The initial state's and a gradient's heads are not dense; one gate is not float32; heads run one at a time."""
    tensors, bounds, state = given((20, 9), dtype=torch.float32)
    tensors[4] = tensors[4].bfloat16()
    with kernels_used():
        plain = gradients(gated_delta, tensors, bounds, state)
        turned = gradients(gated_delta, tensors, bounds, state.transpose(0, 1).contiguous().transpose(0, 1))
        with patch.dict(rule.WORKSPACE_BYTES, {DEVICE: 1}):
            parted = gradients(gated_delta, tensors, bounds, state)
        leaf = state.clone().requires_grad_(True)
        gated_delta(*tensors, bounds, leaf)[1].sum(1).square().sum().backward()
        same = state.clone().requires_grad_(True)
        final_BVDE = gated_delta(*tensors, bounds, same)[1]
        final_BVDE.backward(2 * final_BVDE.detach().sum(1, keepdim=True).repeat(1, V, 1, 1))  # the same, dense
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, turned, parted, strict=True))
    assert leaf.grad is not None and same.grad is not None
    assert float((leaf.grad - same.grad).norm()) <= 1e-5 * float(leaf.grad.norm())


def test_strides_are_read() -> None:
    """v and the gates are views of wider rows, as the layer passes them."""
    tensors, bounds, state = given((20,), dtype=torch.float32)

    def wider(x: Tensor) -> Tensor:
        return torch.cat([torch.full_like(x, np.nan), x], 1)[:, x.shape[1] :]

    with kernels_used():
        plain = gated_delta(*tensors, bounds, state)
        found = gated_delta(*map(wider, tensors), bounds, state)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
