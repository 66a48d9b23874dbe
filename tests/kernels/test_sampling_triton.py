"""Tests of drawing fused with the head, against float64 and the torch path: tokens where rounding cannot decide,
log-probs within rounding, ties, bits of the noise, and memory next to the tensors."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from interpreter import DEVICE, approximate_functions, poisoned_memory
from torch import Tensor

from thresher.kernels.noise import uniform_noise
from thresher.kernels.sampling import SamplingTensors, head_logits, sample, sample_from_head

pytest.importorskip("triton")

import triton
import triton.language as tl

from thresher.kernels import sampling_triton
from thresher.kernels.sampling_triton import (
    AMPERE,
    FLOAT32,
    HOPPER,
    DrawTiling,
    _inverse_minus_log,
    _minus_log,
    _row_words,
    _token_word,
    _uniform,
    draw_fused,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*(encountered|All-NaN).*:RuntimeWarning")  # numpy, on what is masked

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
EPS = 2.0**-24  # the largest relative error of a float32 operation
VOCABULARY = 151_665
SEEDS = [0, 1, 5, 2**31, 2**32 - 1, 2**40 + 3, 2**63 - 1, 0x5DEECE66D1234567, -1, -(2**63)]
POSITIONS = [0, 1, 6, 7, 2**20, 2**31 - 2, 4000, 17, 2**31 - 2, 3]


def tensor(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def dtype_for(tiling: DrawTiling) -> torch.dtype:
    """Return the dtype of a GPU's tiling: float32 would spill in those of bfloat16. The interpreter takes any."""
    return torch.float32 if DEVICE == "cpu" or tiling in FLOAT32 else torch.bfloat16


def rules_of(temperature_B: Tensor) -> SamplingTensors:
    count = len(temperature_B)
    off = (torch.zeros(count, dtype=torch.int64), torch.ones(count), torch.zeros(count))
    host = [x.cpu().numpy() for x in (temperature_B, *off)]
    return SamplingTensors.of(temperature_B, *(x.to(DEVICE) for x in off), host=host)


class Case:
    """Operands of a draw, and its expected results in float64. Three temperatures and greedy rows alternate."""

    def __init__(self, count: int, columns: int, width: int = 64, dtype: torch.dtype = torch.float32) -> None:
        noise = torch.Generator(DEVICE).manual_seed(1000 * count + columns)  # a CPU takes seconds for a real head
        hidden_BH, head_VH = (torch.randn(n, width, generator=noise, device=DEVICE) for n in (count, columns + 7))
        self.hidden_BH = hidden_BH.to(DEVICE, dtype)
        self.head_VH = head_VH.mul_(3 * width**-0.5).to(DEVICE, dtype)[:columns]  # a model's head has more columns, too
        self.seeds_B = torch.randint(0, 2**63 - 1, (count,), generator=noise, device=DEVICE)
        self.positions_B = torch.randint(0, 2**31 - 1, (count,), generator=noise, device=DEVICE)
        self.temperature_B = tensor([1.0, 0.0, 0.6, 1.7]).repeat(count // 4 + 1)[:count].contiguous()

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.hidden_BH, self.head_VH, self.seeds_B, self.positions_B, self.temperature_B

    def draw(self) -> tuple[Tensor, Tensor]:
        return draw_fused(*self.arguments)

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores and log-probs [B, V] in float64, and the allowed error of a logit [B]."""
        x_BH, products = self.hidden_BH.double(), []
        for part_VH in self.head_VH.split(2**14):  # a real head takes gigabytes in float64
            w_HV = part_VH.double().t()
            # A sum of H products, then two roundings of the temperature's reciprocal and product.
            products.append((x_BH @ w_HV, (x_BH.abs() @ w_HV.abs()).amax(1)))
        z_BV, size_B = torch.cat([z for z, _ in products], 1), torch.stack([size for _, size in products]).amax(0)
        noisy_B = self.temperature_B > 0
        divisor_B = torch.where(noisy_B, self.temperature_B, 1.0).double()
        z_BV = z_BV / divisor_B[:, None]
        u_BV = uniform_noise(self.seeds_B, self.positions_B, len(self.head_VH)).double()
        scores_BV = z_BV - (-u_BV.log()).log() * noisy_B[:, None]
        return scores_BV, z_BV.log_softmax(1), (x_BH.shape[1] + 3) * EPS * size_B / divisor_B

    def check(self, ids_B: Tensor, logprobs_B: Tensor) -> None:
        scores_BV, logp_BV, off_B = self.truth()
        assert ids_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
        columns = scores_BV.shape[1]
        # A score's own rounding: exponential, logarithms and quotient of numbers around it; a GPU's exponential is off
        # by about 2^-22.
        rounding_B = EPS * (16 + 4 * scores_BV.abs().amax(1))
        best_B2, best_ids_B2 = scores_BV.topk(min(2, columns), 1)
        decided_B = best_B2[:, 0] - best_B2[:, -1] > 2 * (off_B + rounding_B) if columns > 1 else best_B2[:, 0] > 0
        # The best two differ by less than x, here up to .08 at a width of 3,584, with a probability of about x.
        assert columns == 1 or (~decided_B).sum() <= 1 + len(decided_B) // 5, "the test decides nothing"
        assert torch.equal(ids_B[decided_B], best_ids_B2[:, 0][decided_B])
        found_B = scores_BV.gather(1, ids_B[:, None])[:, 0]
        assert ((best_B2[:, 0] - found_B) <= 2 * (off_B + rounding_B)).all()
        # Two logits' errors, and a sum of positive numbers, each an exponential.
        budget_B = 2 * off_B + rounding_B + EPS * (columns + 8)
        error_B = (logprobs_B.double() - logp_BV.gather(1, ids_B[:, None])[:, 0]).abs()
        assert (error_B <= budget_B).all()


def small_launches() -> dict[str, Callable[[], None]]:
    def check(count: int, columns: int, tiling: DrawTiling, dtype: torch.dtype = torch.float32) -> None:
        case = Case(count, columns, width=16, dtype=dtype)
        with (
            patch.object(sampling_triton, "REDUCE_TILES", 2),
            patch.object(sampling_triton, "draw_tilings", lambda *_: (tiling,)),
        ):
            case.check(*case.draw())

    return {
        "one token": lambda: check(1, 1, FLOAT32[0]),
        "more tiles than the reduction takes at once": lambda: check(17, 150, FLOAT32[0]),
        "two tiles of rows, in parts": lambda: check(66, 130, AMPERE[2], torch.bfloat16),
    }


@pytest.fixture
def use_tiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(tiling: DrawTiling) -> None:
        monkeypatch.setattr(sampling_triton, "draw_tilings", lambda *_: (tiling,))

    return use


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "columns"), [(1, 300), (3, 129), (16, 128), (17, 517), (33, 127), (64, 1), (130, 301)]
)
@pytest.mark.fast_cases(5)
def test_tokens_and_log_probs_are_those_of_float64(count: int, columns: int, dtype: torch.dtype) -> None:
    case = Case(count, columns, dtype=dtype)
    ids_B, logprobs_B = case.draw()
    case.check(ids_B, logprobs_B)
    rules, draws = rules_of(case.temperature_B), case.arguments[2:4]
    assert torch.equal(sample_from_head(case.hidden_BH, case.head_VH, *draws, rules, "triton")[0], ids_B)
    stored_ids_B, stored_logprobs_B = sample_from_head(case.hidden_BH, case.head_VH, *draws, rules, "torch")
    case.check(stored_ids_B, stored_logprobs_B)  # both have the same budget


@pytest.mark.parametrize("tiling", sorted({*AMPERE, *HOPPER, *FLOAT32}, key=repr), ids=lambda one: f"{one.rows}")
@pytest.mark.fast_cases(3)
def test_every_tiling_draws_the_same(tiling: DrawTiling, use_tiling: Any) -> None:
    use_tiling(tiling)
    case = Case(21, 300, width=48, dtype=dtype_for(tiling))
    case.check(*case.draw())


@pytest.mark.parametrize("columns", [256, 257, 700])
@pytest.mark.fast_cases(1)
def test_more_column_tiles_than_the_reduction_takes_at_once(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_triton, "REDUCE_TILES", 2)
    case = Case(17, columns, width=16)
    case.check(*case.draw())


def test_one_temperature_for_all_rows_is_not_copied() -> None:
    case = Case(19, 200)
    for temperature in (0.0, 0.8):
        case.temperature_B = torch.full((19,), temperature, device=DEVICE)
        whole = case.draw()
        case.temperature_B = SamplingTensors.uniform(temperature, 19, DEVICE).temperature_B
        assert case.temperature_B.stride() == (0,)
        spread = case.draw()
        assert torch.equal(whole[0], spread[0]) and torch.equal(whole[1], spread[1])


@pytest.mark.parametrize("tiling", [AMPERE[0], AMPERE[3], HOPPER[3]], ids=["16 rows", "2 parts", "4 parts"])
@pytest.mark.fast_cases(1)
def test_of_equal_logits_the_lowest_id_wins(
    tiling: DrawTiling, use_tiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are exact integers; the largest occurs several times, in one part of a tile, in halves, or in tiles."""
    use_tiling(tiling)
    monkeypatch.setattr(sampling_triton, "REDUCE_TILES", 2)
    draw = Random(0)
    count, columns, width = 40, 400, 16
    head_VH = torch.zeros(columns, width)
    hidden_BH = torch.zeros(count, width)
    firsts = []
    for row in range(count):
        places = sorted(draw.sample(range(columns), draw.randrange(1, 6)))
        firsts.append(places[0])
        # Row r reads bit pattern r of the head: six columns of ones and minus ones.
        hidden_BH[row, :6] = torch.tensor([1.0 if row >> bit & 1 else -1.0 for bit in range(6)])
        head_VH[places, :6] = hidden_BH[row, :6]
    logits_BV = hidden_BH @ head_VH.t()
    first_B = (logits_BV == logits_BV.amax(1, keepdim=True)).float().argmax(1)
    assert ((logits_BV == logits_BV.amax(1, keepdim=True)).sum(1) > 1).sum() > count // 2
    zeros_B = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    greedy_B = torch.zeros(count, device=DEVICE)
    hidden_BH, head_VH = (x.to(DEVICE, dtype_for(tiling)) for x in (hidden_BH, head_VH))
    ids_B, _ = draw_fused(hidden_BH, head_VH, zeros_B, zeros_B, greedy_B)
    assert torch.equal(ids_B.cpu(), first_B)
    ids_B, logprobs_B = draw_fused(hidden_BH * 0, head_VH, zeros_B, zeros_B, greedy_B)
    assert not ids_B.any()
    torch.testing.assert_close(logprobs_B.cpu(), torch.full((count,), -torch.tensor(400.0).log()), rtol=1e-6, atol=0)


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, u_ptr, first, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    low, high = _row_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    tl.store(u_ptr + row * TOKENS + token, _uniform(low, high, _token_word(first + token)))


@triton.jit
def _minus_log_kernel(u_ptr, t_ptr, inverse_ptr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(u_ptr + at)
    tl.store(t_ptr + at, _minus_log(u))
    tl.store(inverse_ptr + at, _inverse_minus_log(u, INTERPRETED))


@pytest.mark.parametrize("first", [0, 70_001, VOCABULARY - 512])
def test_the_noise_has_the_bits_of_the_hash(first: int) -> None:
    noise = torch.Generator().manual_seed(first)
    seeds_B = torch.cat([torch.tensor(SEEDS), torch.randint(-(2**63), 2**63 - 1, (40,), generator=noise)]).to(DEVICE)
    positions_B = torch.cat([torch.tensor(POSITIONS), torch.randint(0, 2**31 - 1, (40,), generator=noise)]).to(DEVICE)
    found_BV = torch.full((len(seeds_B), 512), torch.nan, device=DEVICE)
    _noise_kernel[(len(seeds_B),)](seeds_B, positions_B, found_BV, first, TOKENS=512)
    assert torch.equal(found_BV, uniform_noise(seeds_B, positions_B, VOCABULARY)[:, first : first + 512])


@pytest.mark.slow
def test_the_clock_of_every_u_is_right_to_the_last_bits() -> None:
    """For all 2^23 values, also near 1, where the largest noise comes from; the inverse within the error of a GPU's
    one-instruction logarithm."""
    u = torch.arange(2**23, dtype=torch.int32, device=DEVICE).float().add_(0.5).mul_(2.0**-23)
    found, inverse = torch.full_like(u, torch.nan), torch.full_like(u, torch.nan)
    block = 2**18 if DEVICE == "cpu" else 2**10  # few programs to interpret, a small one to compile
    _minus_log_kernel[(2**23 // block,)](u, found, inverse, BLOCK=block, INTERPRETED=DEVICE == "cpu")
    expected = torch.where(u > 0.5, -torch.log1p(u.double() - 1), -u.double().log())
    assert ((found.double() - expected).abs() / expected).max() < 3 * EPS
    assert (inverse.double() * expected - 1).abs().max() < 10 * EPS


@pytest.mark.fast_cases(0, gpu=1)
def test_what_memory_held_changes_no_bit() -> None:
    case = Case(130, 301)
    expected = case.draw()
    with poisoned_memory(lowest=True):
        found = case.draw()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rows_beside_the_operands_are_not_read() -> None:
    """The head's columns beyond the tokenizer, and hidden states after the batch, would win or spoil all rows."""
    case = Case(9, 130)
    plain = case.draw()
    head_VH = torch.cat([case.head_VH, torch.full((9, 64), torch.inf, device=DEVICE)])
    hidden_BH = torch.cat([case.hidden_BH, torch.full((9, 64), torch.nan, device=DEVICE)])
    case.head_VH, case.hidden_BH = head_VH[:130], hidden_BH[:9]
    assert all(torch.equal(a, b) for a, b in zip(case.draw(), plain, strict=True))
    spread_VH = torch.full((130, 96), torch.nan, device=DEVICE)
    spread_VH[:, :64] = case.head_VH
    case.head_VH, case.hidden_BH = spread_VH[:, :64], case.hidden_BH.t().contiguous().t()
    assert all(torch.equal(a, b) for a, b in zip(case.draw(), plain, strict=True))


def test_a_logit_that_is_not_finite_spoils_its_own_row_alone() -> None:
    case = Case(12, 300)
    plain_ids_B, plain_logprobs_B = case.draw()
    for bad, rows in ((torch.nan, (0, 1, 2)), (torch.inf, (4, 5))):
        case.hidden_BH[list(rows)] = bad
    ids_B, logprobs_B = case.draw()
    bad_B = torch.zeros(12, dtype=torch.bool, device=DEVICE)
    bad_B[[0, 1, 2, 4, 5]] = True
    assert logprobs_B[bad_B].isnan().all() and ((ids_B >= 0) & (ids_B < 300)).all()
    assert torch.equal(ids_B[~bad_B], plain_ids_B[~bad_B]) and torch.equal(logprobs_B[~bad_B], plain_logprobs_B[~bad_B])


def test_a_token_that_is_sure_has_a_log_prob_of_0_at_most() -> None:
    """Even if its logit is large. A sum of z and a logarithm, near 60, would be rounded by up to 4e-6."""
    case = Case(400, 300, width=16)
    case.temperature_B.fill_(0.9)
    case.hidden_BH[:] = 1.0
    case.hidden_BH[:, 0] = torch.linspace(30, 60, 400)
    case.head_VH.mul_(0.01)
    case.head_VH[17, 0] = 1.0
    with approximate_functions() if DEVICE == "cpu" else nullcontext():
        ids_B, logprobs_B = case.draw()
    assert (ids_B == 17).all()
    assert (case.truth()[1][:, 17] > -1e-6).all()
    assert (logprobs_B <= 0).all() and (logprobs_B > -2e-6).all()


def test_columns_of_minus_infinity_are_never_drawn() -> None:
    """One whole tile and parts of others are -inf."""
    case = Case(8, 400, width=16)
    case.hidden_BH[:] = case.hidden_BH.abs() + 0.1
    case.head_VH[:200] = -torch.inf
    case.head_VH[300:] = -torch.inf
    ids_B, logprobs_B = case.draw()
    assert ((ids_B >= 200) & (ids_B < 300)).all() and logprobs_B.isfinite().all()
    case.head_VH = case.head_VH[200:300]
    logits_BV = head_logits(case.hidden_BH, case.head_VH)
    alone_ids_B, alone_logprobs_B = sample(logits_BV, case.seeds_B, case.positions_B, rules_of(case.temperature_B))
    greedy_B = case.temperature_B == 0
    assert torch.equal(ids_B[greedy_B] - 200, alone_ids_B[greedy_B])
    torch.testing.assert_close(logprobs_B[greedy_B], alone_logprobs_B[greedy_B], rtol=1e-5, atol=1e-5)


@pytest.fixture
def _memory_returned() -> Iterator[None]:
    """Return the GPU's cached memory after the test."""
    yield
    torch.cuda.empty_cache()


@needs_cuda
@pytest.mark.parametrize("width", [896, 1536, 2048, 3584])
@pytest.mark.parametrize("count", [1, 24, 64, 256])
@pytest.mark.usefixtures("_memory_returned")
def test_real_shapes(count: int, width: int) -> None:
    """With Qwen2.5's widths and its tokenizer's columns; the only memory used is the parts of the tiles."""
    case = Case(count, VOCABULARY, width, torch.bfloat16)
    case.draw()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = case.draw()
    assert torch.cuda.max_memory_allocated() - before < 20 * (VOCABULARY // 128 + 1) * (count + 128) + 2**20
    case.check(*found)


@needs_cuda
def test_a_graph_holds_a_draw() -> None:
    case = Case(64, 5000, 128, torch.bfloat16)
    rules, side = rules_of(case.temperature_B), torch.cuda.Stream()
    arguments = (*case.arguments[:4], rules)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sample_from_head(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids_B, logprobs_B = sample_from_head(*arguments)
    for _ in range(3):
        case.hidden_BH.neg_()
        case.seeds_B.add_(1)
        graph.replay()
        expected = case.draw()
        assert torch.equal(ids_B, expected[0]) and torch.equal(logprobs_B, expected[1])


def test_no_rows() -> None:
    case = Case(2, 40)
    ids_B, logprobs_B = draw_fused(case.hidden_BH[:0], case.head_VH, *(x[:0] for x in case.arguments[2:]))
    assert ids_B.shape == logprobs_B.shape == (0,) and ids_B.dtype == torch.int64


def test_rows_with_filters_are_drawn_from_stored_logits() -> None:
    case = Case(10, 200)
    top_k_B = torch.full((10,), 3, dtype=torch.int64)
    on_cpu = (case.temperature_B.cpu(), top_k_B, torch.full((10,), 0.9), torch.zeros(10))
    rules = SamplingTensors.of(*(x.to(DEVICE) for x in on_cpu), host=[x.numpy() for x in on_cpu])
    found = sample_from_head(case.hidden_BH, case.head_VH, case.seeds_B, case.positions_B, rules, "triton")
    logits_BV = head_logits(case.hidden_BH, case.head_VH)
    stored = sample(logits_BV, case.seeds_B, case.positions_B, rules)
    assert torch.equal(found[0], stored[0]) and torch.equal(found[1], stored[1])
    assert (logits_BV.topk(3, 1).indices == found[0][:, None]).any(1).all()


def test_on_a_cpu_nothing_but_stored_logits_is_asked_for() -> None:
    """It has the bits of `sample(head_logits(..))`, at any width, although Triton's interpreter is available."""
    for width in (64, 20):
        hidden_BH, head_VH = torch.randn(5, width), torch.randn(90, width)
        at_B, rules = torch.arange(5), SamplingTensors.uniform(0.9, 5)
        found = sample_from_head(hidden_BH, head_VH, at_B, at_B, rules)
        stored = sample(head_logits(hidden_BH, head_VH), at_B, at_B, rules)
        assert torch.equal(found[0], stored[0]) and torch.equal(found[1], stored[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 16, dtype=torch.float16)}, "bfloat16 or float32, not .*float16"),
        ({"hidden": torch.zeros(3, 20), "head": torch.zeros(9, 20)}, "multiple of 16, not 20"),
        ({"head": torch.zeros(9, 32)}, r"head is \[V, 16\]"),
        ({"head": torch.zeros(0, 16)}, r"head is \[V, 16\]"),
        ({"head": torch.zeros(9, 16, dtype=torch.bfloat16)}, r"of torch.float32 .* not .*bfloat16"),
        ({"head": torch.zeros(16, 9).t()}, r"dense rows .* strides \(1, 9\)"),
        ({"seeds": torch.zeros(3, dtype=torch.int32)}, r"seeds are \(3,\) of torch.int64"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, r"positions are \(3,\)"),
        ({"temperatures": torch.zeros(3, dtype=torch.float64)}, "temperatures are .*float32"),
        ({"temperatures": torch.zeros(3, device="meta")}, "temperatures are .* on meta"),
    ],
)
def test_what_is_refused(change: dict[str, Tensor], message: str) -> None:
    given = {
        "hidden": torch.zeros(3, 16),
        "head": torch.zeros(9, 16),
        "seeds": torch.zeros(3, dtype=torch.int64),
        "positions": torch.zeros(3, dtype=torch.int64),
        "temperatures": torch.zeros(3),
    }
    with pytest.raises(ValueError, match=message):
        draw_fused(*{**given, **change}.values())
