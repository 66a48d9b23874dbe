"""Tests of the head in Triton by itself: wrong guesses of offsets, strides, chunks, real shapes.

test_coefficients_triton.py tests its results within the loss, and says what the interpreter cannot show.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import brute, float32_budget, make_case, on_grid
from torch import Tensor

from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.head_tiling import BFLOAT16, HOPPER, Tiling, even_rows

pytest.importorskip("triton")

from thresher.kernels.head_triton import SLACK, TritonHead, launch_reduce

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def test_without_old_log_probs_the_offsets_of_improbable_targets_are_corrected() -> None:
    case = make_case(100, H=24, V=200, seed=3, scale=8.0)
    hidden, head, targets, _, _, weights = case.arguments
    ones = torch.ones(100, dtype=torch.float64)
    grads = {}
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        leaf = hidden.to(DEVICE, dtype, copy=True).requires_grad_()
        vectors = [values.to(DEVICE, dtype) for values in (ones, weights)]
        result = grpo_loss(leaf, head.to(DEVICE, dtype), targets.to(DEVICE), None, *vectors, backend=backend)
        assert result.logprobs.min() < -60  # further off than the slack allows
        result.loss.backward()
        grads[backend, dtype] = leaf.grad.double()
    error = (grads["triton", torch.float32] - grads["torch", torch.float64]).norm()
    own = replace(case, old=brute(case)["logprobs"], advantages=ones)
    assert error <= float32_budget(own)["hidden_grad"]


def test_log_probs_of_strided_and_expanded_inputs() -> None:
    case = make_case(70, H=20, V=31).to(torch.float32)
    case = on_grid(case) if DEVICE == "cpu" else case
    hidden, head, targets = (tensor.to(DEVICE) for tensor in case.arguments[:3])
    plain = token_logprobs(hidden, head, targets, backend="triton")
    spread = token_logprobs(hidden, head, torch.stack([targets, targets * 0], 1)[:, 0], backend="triton", chunk_rows=9)
    assert torch.equal(spread[0], plain[0]) and torch.equal(spread[1], plain[1])
    ones = torch.ones(1, device=DEVICE)
    for advantages, weights in ((ones.expand(70), ones.expand(70)), (torch.ones(70, device=DEVICE),) * 2):
        result = grpo_loss(hidden, head, targets, plain[0], advantages, weights, backend="triton")
        assert result.loss.item() == pytest.approx(-70.0, rel=1e-5)


def test_a_guess_that_is_no_number_is_corrected() -> None:
    hidden, head, targets = (tensor.to(DEVICE) for tensor in make_case(9, V=30).to(torch.float32).arguments[:3])
    guess = torch.full((9,), math.nan, device=DEVICE)
    for temperature in (1.0, 0.5):
        _, _, exps = TritonHead(head, temperature, 9).exps(hidden, targets, guess)
        probs = exps.exps_RV[:, :30] * torch.exp(-exps.log_normaliser_R)[:, None]
        torch.testing.assert_close(probs, torch.softmax(hidden @ head.t() / temperature, 1))
        assert exps.exps_RV.shape == (9, 64) and (exps.exps_RV[:, 30:] == 0).all()


@pytest.mark.parametrize("V", [30, 64, 300, 513])  # tiles of 64 columns: part of one, one, part of the last, one of it
@pytest.mark.parametrize("wrong", [0.0, 1e3], ids=["guessed", "again"])
@pytest.mark.fast_cases(3)
def test_columns_beyond_the_vocabulary_are_stored_as_zeros(V: int, wrong: float) -> None:
    hidden, head, targets = (tensor.to(DEVICE) for tensor in make_case(70, V=V).to(torch.float32).arguments[:3])
    backend = TritonHead(head, 1.0, 70)
    backend.exps_MV = torch.full((70, backend.exps_stride), math.nan, device=DEVICE)
    truth = torch.log_softmax(hidden.double() @ head.double().t(), 1)
    guess = truth.gather(1, targets[:, None])[:, 0].float() + wrong * (torch.arange(70, device=DEVICE) == 5)
    _, _, exps = backend.exps(hidden, targets, guess)
    assert exps.exps_RV.shape == (70, math.ceil(V / 64) * 64) and (exps.exps_RV[:, V:] == 0).all()
    logp = exps.exps_RV[:, :V].double().log() - exps.log_normaliser_R.double()[:, None]
    torch.testing.assert_close(logp, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("H", [896, 3584])
@pytest.mark.parametrize("mebibytes", [150, 560, 1229])
@pytest.mark.parametrize("tiling", [BFLOAT16, HOPPER], ids=["sm_80", "sm_90"])
def test_even_chunks_within_the_budget(H: int, mebibytes: int, tiling: Tiling) -> None:
    head = torch.empty(151_665, H, dtype=torch.bfloat16, device="meta")
    rows = even_rows(head, tiling, mebibytes * 2**20, 8192)
    tiles = math.ceil(151_665 / tiling.columns)
    assert rows % 128 == 0 and rows * (2 * 151_680 + 12 * tiles + 12 * H) < mebibytes * 2**20
    chunks = math.ceil(8192 / rows)
    assert (rows - 128) * chunks < 8192  # no smaller chunk would give as few chunks
    assert mebibytes < 1229 or chunks == 3
    assert even_rows(head, tiling, mebibytes * 2**20, 50) == 50 and even_rows(head, tiling, 1, 8192) == 128


@pytest.fixture
def _memory_returned() -> Iterator[None]:
    """Return the GPU's cached memory after the test."""
    yield
    torch.cuda.empty_cache()


@needs_cuda
@pytest.mark.parametrize("H", [896, 1536, 2048, 3584])
@pytest.mark.usefixtures("_memory_returned")
def test_real_shapes(H: int) -> None:
    """Qwen2.5's vocabulary and widths: errors against float64, compared with torch's in bfloat16; the workspace."""
    T, V, columns = 8192, 151_936, 151_665
    noise = torch.Generator("cuda").manual_seed(H)
    hidden = torch.randn(T, H, device="cuda", generator=noise).bfloat16().requires_grad_()
    head = (torch.randn(V, H, device="cuda", generator=noise) * 2.5 * H**-0.5).bfloat16()
    targets = torch.randint(0, columns, (T,), device="cuda", generator=noise)
    logp, _ = token_logprobs(hidden, head, targets, vocab_size=columns)
    vectors = {
        "old": logp + 0.1 * torch.randn(T, device="cuda", generator=noise),
        "advantages": torch.randn(T, device="cuda", generator=noise),
        "weights": torch.full((T,), 1 / T, device="cuda"),
    }
    options: dict[str, Any] = {"clip_low": 0.9, "clip_high": 10.0, "vocab_size": columns}

    def call(chunk_rows: int | None) -> tuple[Tensor, Tensor, int]:
        """Return dX, dW and the bytes of further memory."""
        buffer = torch.zeros(V, H, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() + 2 * hidden.numel()
        result = grpo_loss(
            hidden, head, targets, *vectors.values(), **options, chunk_rows=chunk_rows, lm_head_grad_VH=buffer
        )
        assert torch.equal(result.logprobs, logp)
        return result.hidden_grad_TH, buffer, torch.cuda.max_memory_allocated() - before

    call(320)  # cuBLAS allocates its own workspace once
    _, _, small = call(320)
    assert small < 150 * 2**20
    hidden_grad, head_grad, workspace = call(None)
    assert workspace < 600 * 2**20
    again = call(None)
    assert torch.equal(again[0], hidden_grad) and torch.equal(again[1], head_grad)
    assert (head_grad[columns:] == 0).all() and head_grad.isfinite().all()

    # dX of some rows, and dW of some columns, in float64; torch's own rounds the logits' gradient to bfloat16 once
    rows, some = torch.arange(0, T, 64, device="cuda"), torch.arange(0, columns, 2000, device="cuda")
    coefficient = -(logp.double() - vectors["old"].double()).exp() * vectors["advantages"].double() / T
    log_total = torch.empty(T, dtype=torch.float64, device="cuda")
    for start in range(0, T, 512):
        log_total[start : start + 512] = (
            hidden[start : start + 512].detach().double() @ head[:columns].double().t()
        ).logsumexp(1)
    x = hidden.detach()
    true_logp = (x.double() * head[targets].double()).sum(1) - log_total
    assert (logp - true_logp).abs().max() < 1e-3

    def dlogits(picked: Tensor, columns_of: Tensor) -> Tensor:
        p = (x[picked].double() @ head[columns_of].double().t() - log_total[picked, None]).exp()
        return coefficient[picked, None] * ((targets[picked, None] == columns_of).double() - p)

    everything = torch.arange(columns, device="cuda")
    dz = dlogits(rows, everything)
    truth, torchs = dz @ head[:columns].double(), (dz.bfloat16() @ head[:columns]).double()
    assert (hidden_grad[rows].double() - truth).norm() <= 2 * (torchs - truth).norm()
    dz = dlogits(torch.arange(T, device="cuda"), some)
    truth, torchs = dz.t() @ x.double(), (dz.bfloat16().t() @ x).double()
    assert (head_grad[some].double() - truth).norm() <= 2 * (torchs - truth).norm()


COLUMNS = 8


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (17, 63), (64, 65), (100, 200)])
@pytest.mark.parametrize("again_rows", [16, 64])
def test_the_reduction_against_float64(rows: int, tiles: int, again_rows: int) -> None:
    check_reduction(rows, tiles, again_rows)


def check_reduction(rows: int, tiles: int, again_rows: int = 16) -> None:
    """Check one launch whose first and last rows have a wrong offset."""
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
        tensors[0].flatten(),
        targets.to(DEVICE),
        tensors[1],
        offsets,
        again,
        tuple(found),
        tiles,
        True,
        COLUMNS,
        again_rows,
    )
    logprobs, entropy, log_normaliser = found.cpu().double()
    # A result passes through about 16 sums and differences of logits, a power of two and a logarithm, which a GPU
    # computes to 2^-22, and a sum over the tiles.
    budget = 2**-24 * (16 * float(z.abs().max()) + 64 + tiles)
    torch.testing.assert_close(logprobs, logp.gather(1, targets[:, None])[:, 0], rtol=0, atol=budget)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(1), rtol=0, atol=budget)
    # A corrected offset is the log-sum-exp itself, up to its rounding, which the normaliser keeps.
    corrected = offsets.cpu().double() * math.log(2) + log_normaliser
    torch.testing.assert_close(corrected, nats.logsumexp(1), rtol=0, atol=budget)
    assert (log_normaliser.abs() < SLACK).all() and (log_normaliser[[0, -1]].abs() < 1e-5).all()
    expected = torch.zeros_like(again).index_fill_(0, torch.tensor([0, len(again) - 1], device=DEVICE), 1)
    assert torch.equal(again, expected)
