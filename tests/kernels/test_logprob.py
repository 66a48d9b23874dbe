"""Tests of token_logprobs against float64, and of the bits that it shares with the loss."""

import math
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_rows
from loss_cases import Case, float32_budget
from torch import Tensor

from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.logprob import WORKSPACE_BYTES, chunk_size, default_chunk_rows, reference_token_logprobs


def make(
    T: int, H: int = 96, V: int = 600, dtype: torch.dtype = torch.float32, scale: float = 0.3
) -> tuple[Tensor, ...]:
    noise = torch.Generator().manual_seed(T + H + V)
    hidden = torch.randn(T, H, generator=noise, dtype=torch.float64)
    head = torch.randn(V, H, generator=noise, dtype=torch.float64) * scale
    return hidden.to(dtype), head.to(dtype), torch.randint(0, V, (T,), generator=noise)


def exact(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ head.double().t() / temperature
    lse = logits.logsumexp(1)
    entropy = lse - (torch.softmax(logits, 1) * logits).sum(1)
    return logits[torch.arange(len(targets)), targets] - lse, entropy


@pytest.mark.parametrize("T", [0, 1, 63, 100, 1025])
@pytest.mark.parametrize(("chunk_rows", "temperature"), [(None, 1.0), (1, 0.5), (48, 1.3), (5000, 1.0)])
def test_values(T: int, chunk_rows: int | None, temperature: float) -> None:
    hidden, head, targets = make(T, H=16, V=50, dtype=torch.float64)
    found = token_logprobs(hidden, head, targets, temperature=temperature, chunk_rows=chunk_rows)
    for ours, truth in zip(found, exact(hidden, head, targets, temperature), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11)
    for ours, reference in zip(
        found, reference_token_logprobs(hidden, head, targets, temperature=temperature), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-11)


# 300 reaches logits of +-1e4
@pytest.mark.parametrize("scale", [0.3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.fast_cases(5)
def test_error_is_within_float32s_budget(dtype: torch.dtype, scale: float) -> None:
    hidden, head, targets = make(200, dtype=dtype, scale=scale)
    ours = token_logprobs(hidden, head, targets, chunk_rows=64)
    truth = exact(hidden, head, targets)
    zeros = torch.zeros(200, dtype=torch.float64)
    budget = float32_budget(Case(hidden, head, targets, zeros, zeros, zeros + 1, zeros))
    for mine, name, true in zip(ours, ("logprobs", "entropy"), truth, strict=True):
        assert mine.dtype == torch.float32 and mine.isfinite().all()
        assert (mine - true).norm() <= budget[name], name
    if scale < 100:
        assert (ours[0] - truth[0]).abs().max() < 1e-3


@pytest.mark.bits
@pytest.mark.parametrize(("H", "V"), [(96, 600), (64, 597), (33, 151), (8, 5), (128, 1001)])
def test_bits_of_a_row_depend_on_nothing_but_the_row(H: int, V: int) -> None:
    needs_invariant_rows([(V, H)], most=304)
    hidden, head, targets = make(300, H, V)
    batch = token_logprobs(hidden, head, targets)
    for rows in (slice(0, 1), slice(17, 18), slice(299, 300), slice(40, 63), slice(5, 205)):
        alone = token_logprobs(hidden[rows], head, targets[rows])
        assert torch.equal(alone[0], batch[0][rows]) and torch.equal(alone[1], batch[1][rows])
    for chunk_rows in (1, 7, 16, 100):
        chunked = token_logprobs(hidden, head, targets, chunk_rows=chunk_rows)
        assert torch.equal(chunked[0], batch[0]) and torch.equal(chunked[1], batch[1])
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    turned = token_logprobs(hidden[:288].t().contiguous().t(), head, targets[:288])
    assert torch.equal(turned[0], batch[0][:288]) and torch.equal(turned[1], batch[1][:288])
    moved = token_logprobs(hidden[shuffled], head, targets[shuffled])
    assert torch.equal(moved[0], batch[0][shuffled]) and torch.equal(moved[1], batch[1][shuffled])


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_rows", [None, 1, 50, 64])
def test_bits_are_those_of_the_loss(dtype: torch.dtype, chunk_rows: int | None) -> None:
    hidden, head, targets = make(130, dtype=dtype)
    needs_invariant_rows([(590, 96)], most=144, dtype=torch.promote_types(dtype, torch.float32))
    options: dict[str, Any] = {"temperature": 1.1, "vocab_size": 590, "chunk_rows": chunk_rows}
    targets = targets % 590
    logprobs, entropy = token_logprobs(hidden, head, targets, **options)
    # a third of the rows has no advantage and is processed last
    advantages = torch.arange(130.0) % 3
    result = grpo_loss(hidden.requires_grad_(), head, targets, logprobs, advantages, torch.ones(130), **options)
    assert torch.equal(result.logprobs, logprobs) and torch.equal(result.entropy, entropy)
    assert torch.equal(result.ratios, torch.ones_like(logprobs))


def test_padded_columns_strides_and_int32_targets() -> None:
    hidden, head, targets = make(70, H=12, V=31, dtype=torch.float64)
    padded = torch.cat([head, torch.full((9, 12), math.nan, dtype=torch.float64)])
    wide = torch.full((40, 36), math.nan, dtype=torch.float64)
    wide[:, ::3] = padded
    spread_targets = targets.int().repeat_interleave(2)[::2]
    found = token_logprobs(hidden.t().contiguous().t(), wide[:, ::3], spread_targets, vocab_size=31, chunk_rows=9)
    for ours, truth in zip(found, exact(hidden, head, targets), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11)


def test_no_gradient_and_a_certain_token() -> None:
    hidden, head, targets = make(20)
    logprobs, entropy = token_logprobs(hidden.requires_grad_(), head.requires_grad_(), targets)
    assert not logprobs.requires_grad and not entropy.requires_grad
    # one column: probability 1, no entropy
    logprobs, entropy = token_logprobs(hidden, head, torch.zeros(20, dtype=torch.int64), vocab_size=1)
    assert torch.equal(logprobs, torch.zeros(20)) and torch.equal(entropy.abs(), torch.zeros(20))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": (3, 600)}, r"targets_T\[3\] is 600, not a token id from 0 to 599"),
        ({"targets": (3, -2)}, r"targets_T\[3\] is -2"),
        ({"hidden": (3, math.nan)}, r"hidden_TH\[3\] is not"),
        ({"hidden": (3, math.inf)}, r"hidden_TH\[3\] is not"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"vocab_size": 601}, "vocab_size is 601"),
        ({"chunk_rows": -1}, "chunk_rows is -1"),
        ({"workspace_bytes": -1}, "workspace_bytes is -1"),
        ({"backend": "numpy"}, "backend is 'numpy'"),
    ],
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    hidden, head, targets = make(20)
    for name, tensor in (("hidden", hidden), ("targets", targets)):
        if name in change:
            row, bad = change.pop(name)
            tensor[row], tensor[11] = bad, bad
    with pytest.raises(ValueError, match=words):
        token_logprobs(hidden, head, targets, **change)
    if not change:
        return
    with pytest.raises(ValueError, match="expected bfloat16 or float32 for backend 'triton'"):
        token_logprobs(hidden.double(), head.double(), targets, backend="triton")


# a small vocabulary gets the most rows, a larger one those of 64 MiB, Qwen's 208 in 256 MiB, a huge one the fewest
def test_a_workspace_bounds_the_chunk() -> None:
    head = torch.empty(151_936, 8, device="meta")
    budgets = (2**20, 2**24, 2**25, 2**26, None, 2**30)
    sizes = [chunk_size(None, budget, "torch", head, 4096) for budget in budgets]
    # rows of 8 x 151,936 bytes; 16 at least; beyond the size of a cache a CPU gets no faster
    assert sizes == [16, 16, 16, 48, 208, 208]


@pytest.mark.parametrize(("columns", "rows"), [(600, 1024), (20000, 416), (32768, 256), (151936, 208), (5_000_000, 16)])
def test_default_chunk(columns: int, rows: int) -> None:
    assert default_chunk_rows(WORKSPACE_BYTES["cpu"], columns, 8) == rows
