"""Tests of rotation and KV write in one kernel: against float64 and torch's own bits; written and unwritten memory.

On a CUDA device the compiled kernels run, otherwise Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import DEVICE, GuardedMemory, between_nans, drawn
from torch import Tensor

from thresher.kernels.layers import rope_table, rotate, rotate_and_store, rotated_heads

pytest.importorskip("triton")

from thresher.kernels.rope_triton import fused_rotate_and_store, fused_rotated_heads

pytestmark = pytest.mark.usefixtures("rounds_to_nearest")

# query heads, key/value heads, head dimension, slots; the last two have more heads than a program processes
SHAPES = [(1, 1, 2, 1), (3, 1, 10, 3), (2, 2, 64, 8), (14, 2, 64, 16), (5, 1, 24, 4), (28, 4, 8, 16), (20, 7, 6, 5)]
DTYPES = [torch.float32, torch.bfloat16]
BLOCKS = 6


def caches(K: int, S: int, D: int, dtype: torch.dtype, apart: bool) -> tuple[Tensor, Tensor]:
    """Return keys and values of NaN, as one tensor with alternating blocks, or as two tensors."""
    if apart:
        return tuple(torch.full((BLOCKS, K, S, D), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))  # type: ignore[return-value]
    both = torch.full((BLOCKS, 2, K, S, D), torch.nan, dtype=dtype, device=DEVICE)
    return both[:, 0], both[:, 1]


def arguments(T: int, shape: tuple[int, int, int, int], dtype: torch.dtype, apart: bool) -> dict[str, Any]:
    """Return the kernel's arguments; rows go to distinct slots in any order, and every third row goes nowhere."""
    N, K, D, S = shape
    order = torch.randperm(BLOCKS * S, generator=torch.Generator().manual_seed(T))[:T].to(torch.int32)
    k_PKSD, v_PKSD = caches(K, S, D, dtype, apart)
    positions_T = torch.randint(0, 3000, (T,), generator=torch.Generator().manual_seed(T))
    return {
        "qkv_TMD": drawn(T, N + 2 * K, D, seed=T, dtype=dtype),
        "rope": between_nans(rope_table(positions_T, D, 1e4, dtype)),
        "kv_heads": K,
        "k_PKSD": k_PKSD,
        "v_PKSD": v_PKSD,
        "block_T": torch.where(torch.arange(T) % 3 == 2, -1, order // S).to(DEVICE, torch.int32),
        "offset_T": (order % S).to(DEVICE),
    }


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "k_PKSD": given["k_PKSD"].clone(), "v_PKSD": given["v_PKSD"].clone()}


def check(given: dict[str, Any], q_TND: Tensor) -> None:
    """Check that q, k and v are within two roundings of float64 where they were written, and all else is still NaN."""
    qkv, k_PKSD = given["qkv_TMD"], given["k_PKSD"]
    N, K, dtype = q_TND.shape[1], given["kv_heads"], qkv.dtype
    assert q_TND.is_contiguous() and q_TND.dtype == dtype
    true_TMD = rotate(qkv[:, : N + K].double(), given["rope"].double())
    cos, sin = given["rope"].double().abs()
    a, b = qkv[:, : N + K].double().abs().chunk(2, -1)
    # each product is rounded, and so is their sum
    budget = torch.cat([a * cos + b * sin, b * cos + a * sin], -1) * torch.finfo(dtype).eps * 1.01

    expected_k, expected_v = (torch.full_like(k_PKSD, torch.nan) for _ in range(2))
    for row, (block, slot) in enumerate(zip(given["block_T"].tolist(), given["offset_T"].tolist(), strict=True)):
        assert ((q_TND[row].double() - true_TMD[row, :N]).abs() <= budget[row, :N]).all()  # bound: two roundings
        if block >= 0:
            ours_KD = k_PKSD[block, :, slot]
            assert ((ours_KD.double() - true_TMD[row, N:]).abs() <= budget[row, N:]).all()  # bound: two roundings
            expected_k[block, :, slot] = ours_KD
            expected_v[block, :, slot] = qkv[row, N + K :]
    for cache, expected in ((k_PKSD, expected_k), (given["v_PKSD"], expected_v)):
        assert torch.equal(cache.isnan(), expected.isnan())  # only the rows' own slots are written
        assert torch.equal(cache.nan_to_num(7.0), expected.nan_to_num(7.0))


def small_launches() -> dict[str, Callable[[], None]]:
    def launch(T: int, shape: tuple[int, int, int, int], dtype: torch.dtype, apart: bool) -> None:
        given = arguments(T, shape, dtype, apart)
        check(given, fused_rotate_and_store(**given))

    def train() -> None:
        table = rope_table(torch.arange(5), 4, 1e4, torch.bfloat16)  # four of six dimensions are rotated
        outputs = fused_rotated_heads(drawn(5, 34, 6, seed=0, dtype=torch.bfloat16).requires_grad_(), table, 7)
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    return {
        "ragged": lambda: launch(7, (3, 1, 10, 3), torch.float32, False),
        "more heads than a program takes": lambda: launch(5, (20, 7, 6, 5), torch.bfloat16, True),
        "heads for training, and their gradient": train,
    }


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in turn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.fast_cases(3)
def test_queries_keys_and_values(
    shape: tuple[int, int, int, int], dtype: torch.dtype, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for T in (1, min(11, BLOCKS * shape[3])):
        given = arguments(T, shape, dtype, apart)
        with monkeypatch.context() as patched:
            memory = GuardedMemory(patched)
            q_TND = fused_rotate_and_store(**given)
        memory.check()
        check(given, q_TND)


@pytest.mark.parametrize("shape", [(14, 2, 64, 16), (3, 1, 10, 3)], ids=str)
def test_in_bfloat16_it_has_the_bits_of_torch(shape: tuple[int, int, int, int]) -> None:
    """A rollout caches what the update computes."""
    given = arguments(13, shape, torch.bfloat16, True)
    theirs = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in copied(given).items()}
    q_TND, theirs_TND = fused_rotate_and_store(**given), rotate_and_store(**theirs)
    assert torch.equal(q_TND.cpu(), theirs_TND) and theirs_TND.isfinite().all()
    for name in ("k_PKSD", "v_PKSD"):
        assert torch.equal(given[name].cpu().nan_to_num(7.0), theirs[name].nan_to_num(7.0))
        assert theirs[name].isfinite().any()


@pytest.mark.fast_cases(2, gpu=8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(14, 2, 64), (3, 1, 10), (20, 7, 6), (1, 1, 2)], ids=str)
def test_heads_for_training_have_the_bits_of_torch_and_so_has_their_gradient(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    N, K, D = shape
    positions_T = torch.randint(0, 3000, (13,), generator=torch.Generator().manual_seed(0))
    qkv_TMD = drawn(13, N + 2 * K, D, seed=0, dtype=dtype).requires_grad_()
    table = between_nans(rope_table(positions_T, D, 1e4, dtype))
    grads = [drawn(13, heads, D, seed=heads, dtype=dtype) for heads in (N, K, K)]
    with monkeypatch.context() as patched:
        memory = GuardedMemory(patched)
        outputs = fused_rotated_heads(qkv_TMD, table, K)
        found = [*outputs, *torch.autograd.grad(outputs, qkv_TMD, grads)]
    memory.check()
    on_cpu = qkv_TMD.detach().cpu().requires_grad_()
    outputs = rotated_heads(on_cpu, table.cpu(), K)
    expected = [*outputs, *torch.autograd.grad(outputs, on_cpu, [grad.cpu() for grad in grads])]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_contiguous() and torch.equal(ours.cpu(), theirs) and theirs.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(64, 16), (10, 4), (24, 18)])
def test_a_share_of_a_head_is_turned_as_torch_does(dim: int, turned: int, dtype: torch.dtype) -> None:
    """In the cache, in training and in the gradient the bits are equal, also in float32 where no product is fused."""
    given = arguments(7, (3, 1, dim, 3), dtype, True)
    given["rope"] = between_nans(rope_table(torch.arange(7) * 300, turned, 1e4, dtype))
    theirs = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in copied(given).items()}
    found, expected = [fused_rotate_and_store(**given)], [rotate_and_store(**theirs)]
    for name in ("k_PKSD", "v_PKSD"):
        found.append(given[name].nan_to_num(7.0))
        expected.append(theirs[name].nan_to_num(7.0))
    grads = [drawn(7, heads, dim, seed=heads, dtype=dtype) for heads in (3, 1, 1)]
    for function, given_here, into in ((fused_rotated_heads, given, found), (rotated_heads, theirs, expected)):
        leaf = given_here["qkv_TMD"].detach().requires_grad_()
        outputs = function(leaf, given_here["rope"], 1)
        into += [*outputs, *torch.autograd.grad(outputs, leaf, [x.to(leaf.device) for x in grads])]
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), wanted) and wanted.isfinite().all()


def test_a_row_of_nans_stays_in_its_place() -> None:
    given = arguments(4, (3, 1, 10, 3), torch.float32, True)
    clean = copied(given)
    q_TND = fused_rotate_and_store(**clean)
    given["qkv_TMD"] = given["qkv_TMD"].clone()
    given["qkv_TMD"][1] = torch.nan
    found_TND = fused_rotate_and_store(**given)
    others = [0, 2, 3]
    assert torch.equal(found_TND[others], q_TND[others]) and found_TND[1].isnan().all()
    block, slot = int(given["block_T"][1]), int(given["offset_T"][1])
    for name in ("k_PKSD", "v_PKSD"):
        assert clean[name][block, :, slot].isfinite().all()
        clean[name][block, :, slot] = torch.nan
        assert torch.equal(given[name].nan_to_num(7.0), clean[name].nan_to_num(7.0))


def test_no_rows() -> None:
    given = arguments(0, (3, 1, 10, 3), torch.float32, True)
    assert fused_rotate_and_store(**given).shape == (0, 3, 10) and given["k_PKSD"].isnan().all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"qkv_TMD": torch.ones(2, 5, 4).half()}, "qkv_TMD has dtype torch.float16; expected bfloat16 or float32"),
        ({"qkv_TMD": torch.ones(2, 20)}, r"qkv_TMD has shape \(2, 20\) for 1 key/value heads; expected \[T, N \+ 2K"),
        ({"kv_heads": 3}, r"qkv_TMD has shape \(2, 5, 4\) for 3 key/value heads"),
        ({"qkv_TMD": torch.ones(2, 4, 5).transpose(1, 2)}, r"qkv_TMD has shape .*; expected dense \(2, 5, 4\)"),
        ({"rope": torch.ones(2, 3, 1, 2)}, r"rope has shape .*; expected dense \(2, 2, 1, 2\)"),
        ({"block_T": torch.zeros(2)}, "block_T is torch.float32 on .*; expected torch.int32"),
        ({"offset_T": torch.zeros(3, dtype=torch.int32)}, r"offset_T has shape .*; expected dense \(2,\)"),
        ({"k_PKSD": torch.ones(2, 1, 4, 3).transpose(2, 3)}, r"a block of k_PKSD has shape .*; expected dense"),
        ({"v_PKSD": torch.ones(2, 2, 3, 4)}, r"a block of v_PKSD has shape .*; expected dense \(1, 1, 3, 4\)"),
        ({"k_PKSD": torch.ones(4)}, "a block of k_PKSD has shape"),
    ],
)
def test_refusals(change: dict[str, Any], complaint: str) -> None:
    fine = {
        "qkv_TMD": torch.ones(2, 5, 4),
        "rope": torch.ones(2, 2, 1, 2),
        "kv_heads": 1,
        "k_PKSD": torch.ones(2, 1, 3, 4),
        "v_PKSD": torch.ones(2, 1, 3, 4),
        "block_T": torch.zeros(2, dtype=torch.int32),
        "offset_T": torch.zeros(2, dtype=torch.int32),
    }
    there = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in {**fine, **change}.items()}
    with pytest.raises(ValueError, match=complaint):
        fused_rotate_and_store(**there)
