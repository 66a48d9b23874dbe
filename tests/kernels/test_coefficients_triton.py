"""Tests of the loss with its Triton backend, head and coefficients: against float64, and against the torch backend.

On a CUDA device the compiled kernels run. Otherwise Triton's interpreter runs the same source on a CPU; it shows
neither races nor limits of shared memory.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter import bfloat16_to_nearest
from loss_cases import Case, assert_same_bits, bfloat16_budget, brute, float32_budget, make_case, on_grid, run
from torch import Tensor

from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.objective import CHOICES, EXP_CAP

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NAMES = ("loss", "logprobs", "ratios", "entropy", "hidden_grad", "head_grad")


def triton(case: Case, **options: Any) -> dict[str, Any]:
    """Call `run` with the Triton backend on the device, and return its results on the CPU."""
    there = Case(*(tensor.to(DEVICE) for tensor in case.__dict__.values()))
    found = run(there, backend="triton", **options)
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def assert_within_float32(case: Case, **options: Any) -> None:
    """Compare with float64: the norm of the error over a whole tensor must be within float32's budget."""
    exact = {name: value for name, value in options.items() if name != "chunk_rows"}
    # old and reference log-probs of this temperature; otherwise single ratios would dominate everything
    shift = brute(case, **exact)["logprobs"] - brute(case)["logprobs"]
    case = replace(case, old=case.old + shift, ref=case.ref + shift)
    truth, budget = brute(case, **exact), float32_budget(case, **exact)
    ours = triton(case.to(torch.float32), **options)
    for name in NAMES:
        assert ours[name].isfinite().all(), name
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name


# The options vary with the lengths, so that the table stays small.
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.2, "kl_value": "k2"},
        {"beta": 0.2, "kl_value": "k3", "dual_clip": 1.5, "temperature": 0.7, "clip_high": 0.28},
        {"entropy_coef": 0.1, "temperature": 1.3},
        {"beta": 0.1, "kl_value": "k3_ratio", "entropy_coef": -0.05, "vocab_size": 260},
    ],
    ids=("k2", "k3, dual clip", "entropy", "k3_ratio, entropy, padded"),
)
@pytest.mark.parametrize("T", [1, 63, 100, 1025])
@pytest.mark.fast_cases(3)
def test_values_and_gradients(T: int, options: dict[str, Any]) -> None:
    case = make_case(T, H=20, V=300 if T < 1000 else 130, seed=T)
    if "vocab_size" in options:
        size = options["vocab_size"] = min(260, len(case.head) - 3)
        case = replace(case, targets=case.targets % size)
    if T == 1:
        case = replace(case, weights=torch.ones(1, dtype=torch.float64), advantages=-torch.ones(1, dtype=torch.float64))
    assert_within_float32(case, chunk_rows=None if T < 1000 else 200, **options)


@pytest.mark.parametrize("kl_gradient", CHOICES)
def test_every_kl_gradient_against_the_torch_backend(kl_gradient: str) -> None:
    case = make_case(70, seed=CHOICES.index(kl_gradient))
    options: dict[str, Any] = {"kl_value": "k3", "kl_gradient": kl_gradient, "beta": 0.3, "dual_clip": 2.0}
    truth, budget, case = brute(case, **options), float32_budget(case, **options), case.to(torch.float32)
    ours, torchs = triton(case, **options), run(case, backend="torch", **options)
    for name in ("logprobs", "hidden_grad", "head_grad", "loss"):
        for found in (ours, torchs):
            assert (found[name].double() - truth[name]).norm() <= budget[name], name
    assert torch.equal(ours["result"].clipped.cpu(), torchs["result"].clipped)
    assert ours["result"].capped.item() == torchs["result"].capped.item()


@pytest.mark.parametrize("scale", [3.0, 300.0])  # 300 reaches logits of +-1e4
def test_extreme_logits(scale: float) -> None:
    case = make_case(90, H=64, V=400, seed=5, scale=scale)
    logits = case.hidden @ case.head.t()
    assert scale < 100 or logits.abs().max() > 3e3
    case = replace(case, weights=case.weights / 90)
    assert_within_float32(case, beta=0.1, kl_value="k2", entropy_coef=0.01)


@pytest.mark.parametrize("wrong", [25.0, -25.0, 31.0, -31.0, 200.0, -200.0, 1e4, -1e4])
@pytest.mark.fast_cases(2)
def test_a_wrong_guess_of_the_log_prob_is_corrected(wrong: float) -> None:
    """The old log-prob sets the offset of the exponentials; the result is the same if it is far off."""
    case = make_case(300, H=24, V=200, seed=3)
    # With the policy gradient switched off the old log-prob affects nothing but the offset.
    case = replace(case, advantages=torch.zeros(300), weights=case.weights + 0.1)
    one_row = torch.arange(300) == 140
    ours = triton(replace(case, old=case.old + wrong * one_row).to(torch.float32), beta=0.5, kl_value="k2")
    truth, budget = brute(case, beta=0.5, kl_value="k2"), float32_budget(case, beta=0.5, kl_value="k2")
    for name in ("logprobs", "entropy", "hidden_grad", "head_grad"):
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e4])
@pytest.mark.fast_cases(1)
def test_masked_rows_are_left_out_whatever_they_hold(poison: float) -> None:
    case = make_case(100, seed=2).to(torch.float32)
    masked = case.weights == 0
    assert 5 < masked.sum() < 95
    options: dict[str, Any] = {"beta": 0.2, "entropy_coef": 0.1, "chunk_rows": 24}
    filled = {
        name: torch.where(masked if getattr(case, name).dim() == 1 else masked[:, None], poison, getattr(case, name))
        for name in ("hidden", "old", "advantages", "ref")
    }
    poisoned = replace(case, **filled, targets=torch.where(masked, -100, case.targets))
    clean, found = triton(case, **options), triton(poisoned, **options)
    assert_same_bits(found, clean)
    assert (found["hidden_grad"][masked] == 0).all() and (found["logprobs"][masked] == 0).all()


@pytest.mark.parametrize("T", [0, 1, 40])
def test_all_rows_masked(T: int) -> None:
    case = replace(make_case(T), weights=torch.zeros(T, dtype=torch.float64))
    found = triton(case.to(torch.float32), beta=0.1)
    assert found["loss"] == 0 and (found["head_grad"] == 0).all() and (found["hidden_grad"] == 0).all()


def test_columns_beyond_the_vocabulary_do_not_exist() -> None:
    case = make_case(70, V=41).to(torch.float32)
    padded = replace(case, head=torch.cat([case.head, torch.full((9, 16), math.nan)]))
    found, plain = triton(padded, vocab_size=41, beta=0.1), triton(case, beta=0.1)
    assert (found["head_grad"][41:] == 0).all()
    assert_same_bits(found | {"head_grad": found["head_grad"][:41]}, plain)


@pytest.mark.parametrize("beyond", [1.0, 1e30, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.fast_cases(3)
def test_rows_beyond_the_vocabulary_change_nothing_where_the_matmuls_are_padded(
    beyond: float, entropy_coef: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thresher.kernels import loss as loss_module

    widths = []
    real = loss_module.hidden_product
    monkeypatch.setattr(loss_module, "hidden_product", lambda e, head: widths.append(len(head)) or real(e, head))
    case = make_case(70, V=41)
    truth = brute(case, beta=0.1, entropy_coef=entropy_coef)
    budget = float32_budget(case, beta=0.1, entropy_coef=entropy_coef)
    case = case.to(torch.float32)
    rest = torch.ones(29, 16)
    rest[22, 3] = beyond  # row 63: the last one that is multiplied by zeros
    hidden, head, *vectors = (
        tensor.to(DEVICE) for tensor in replace(case, head=torch.cat([case.head, rest])).arguments
    )
    buffer = torch.full((70, 16), 7.0, device=DEVICE)
    result = grpo_loss(
        hidden.requires_grad_(),
        head,
        *vectors,
        ref_logprobs_T=case.ref.to(DEVICE),
        beta=0.1,
        entropy_coef=entropy_coef,
        vocab_size=41,
        lm_head_grad_VH=buffer,
        chunk_rows=24,
        backend="triton",
    )
    assert set(widths) == {64 if math.isfinite(beyond) else 41}
    assert (buffer[41:] == 7.0).all()
    assert result.hidden_grad_TH is not None
    for name, found in (("hidden_grad", result.hidden_grad_TH), ("head_grad", buffer[:41] - 7.0)):
        rounded = 70 * 2**-23 * truth[name].numel() ** 0.5 if name == "head_grad" else 0.0  # 7 + x is rounded
        assert (found.cpu().double() - truth[name]).norm() <= budget[name] + rounded, name
    assert (result.logprobs.cpu().double() - truth["logprobs"]).norm() <= budget["logprobs"]


@pytest.mark.parametrize("masked", [True, False])
def test_strides_do_not_matter(masked: bool) -> None:
    case = make_case(70, H=80, V=31, scale=0.2).to(torch.float32)  # several steps along H
    if not masked:  # then nothing is gathered, and rows are worked on where they lie
        case = replace(case, weights=case.weights + 0.1)
    plain = triton(case, beta=0.1)

    def spread(values: Tensor, step: int) -> Tensor:
        return values.repeat_interleave(step, -1)[..., ::step]

    views = {name: spread(getattr(case, name), step) for step, name in enumerate(case.__dict__, 2) if name != "head"}
    for head in (case.head.t().contiguous().t(), spread(case.head, 3), case.head.repeat(1, 2)[:, :80]):
        there = replace(case, **views, head=head)
        assert not all(tensor.is_contiguous() for tensor in there.__dict__.values())
        found = triton(there, beta=0.1)
        for name in ("loss", "logprobs", "hidden_grad", "head_grad"):
            torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_more_columns_than_one_block_of_tiles_reduces() -> None:
    case = make_case(20, H=16, V=9000, seed=8)
    assert_within_float32(case, beta=0.1, kl_value="k2", entropy_coef=0.1)


def test_near_certainty_and_near_the_reference_nothing_cancels() -> None:
    """1 - p_y of 1e-5, and k3 at d of 1e-4: float32 would lose most of either if it were computed as e^x - 1."""
    case = make_case(40, H=8, V=6, seed=1, spread=1e-4)
    head = torch.zeros(6, 8, dtype=torch.float64)
    head[0, 0] = 13.0
    hidden = torch.cat([torch.ones(40, 1, dtype=torch.float64), case.hidden[:, 1:] * 0.01], 1)
    logp = torch.log_softmax(hidden @ head.t(), 1)[:, 0]
    case = replace(case, hidden=hidden, head=head, targets=torch.zeros(40, dtype=torch.int64))
    case = replace(case, old=logp, ref=logp - 1e-4, advantages=-torch.ones(40), weights=case.weights + 0.1)
    found, truth = triton(case.to(torch.float32), beta=1.0), brute(case, beta=1.0)
    relative = (found["head_grad"][0].double() - truth["head_grad"][0]).norm() / truth["head_grad"][0].norm()
    # A GPU's 2^x has a relative error of 2^-22, its log2, near 1, of 2^-22; a sum near 1 adds 2^-24. 1 - p is 1.1e-5.
    assert relative < 2**-22 * (1 + math.log(2) + 0.25) / -math.expm1(float(logp.mean()))
    case = replace(case, advantages=torch.zeros(40), head=head * 0, ref=logp * 0 - math.log(6) - 1e-4)
    case = replace(case, old=logp * 0 - math.log(6))
    found, truth = triton(case.to(torch.float32), beta=1.0), brute(case, beta=1.0)
    # d is the difference of two numbers near log 6: three roundings, and a GPU's log2. k3 is half of its square.
    off = math.log(6) * (2**-22 + 3 * 2**-24) / 1e-4
    for name, limit in (("head_grad", off), ("k3", 2 * off)):
        assert (found[name].double() - truth[name]).norm() < limit * truth[name].norm(), name


def test_probabilities_that_underflow_add_nothing_to_the_entropys_gradient() -> None:
    case = make_case(40, H=16, V=80, seed=2, scale=60.0)
    assert (torch.softmax((case.hidden @ case.head.t()).float(), 1) == 0).any()
    truth, budget = brute(case, entropy_coef=0.5), float32_budget(case, entropy_coef=0.5)
    for found in (triton(case.to(torch.float32), entropy_coef=0.5), run(case.to(torch.float32), entropy_coef=0.5)):
        for name in ("hidden_grad", "head_grad"):
            assert (found[name].double() - truth[name]).norm() <= budget[name], name


def test_an_exploding_coefficient_stays_finite_whatever_the_guess() -> None:
    case = make_case(6, V=9, spread=0.0).to(torch.float32)
    case = replace(case, weights=torch.ones(6), old=case.old - 20.0, ref=case.ref + 300.0)
    found = triton(case, kl_value="k3", beta=0.5)
    assert found["hidden_grad"].isfinite().all() and found["head_grad"].isfinite().all()


def test_one_row_with_a_gradient_does_not_make_chunks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from thresher.kernels import head_triton as backend

    launches = []
    real = backend.launch_head
    monkeypatch.setattr(backend, "launch_head", lambda *a: launches.append(len(a[0])) or real(*a))
    case = make_case(300, V=20).to(torch.float32)
    advantages = torch.zeros(300).index_fill_(0, torch.tensor([7]), -1.0)
    triton(replace(case, advantages=advantages, weights=torch.ones(300)))
    assert sorted(launches) == [1, 299]  # the row with a gradient, and all others


def test_the_head_gradient_is_added_to_a_buffer() -> None:
    case = make_case(150, V=41).to(torch.float32)
    ordinary = triton(case, beta=0.2, chunk_rows=64)
    hidden, head, *rest = (tensor.to(DEVICE) for tensor in case.arguments)
    buffer = torch.full((41, 16), 7.0, device=DEVICE)
    options: dict[str, Any] = {"ref_logprobs_T": case.ref.to(DEVICE), "beta": 0.2, "chunk_rows": 64}
    result = grpo_loss(hidden.requires_grad_(), head, *rest, lm_head_grad_VH=buffer, backend="triton", **options)
    assert not result.loss.requires_grad
    rounded = 150 * 2**-24 * buffer.abs().max()  # at most one addition per row, in any order
    torch.testing.assert_close(buffer.cpu() - 7.0, ordinary["head_grad"], rtol=0, atol=rounded.item())
    assert torch.equal(result.hidden_grad_TH.cpu(), ordinary["hidden_grad"])


@pytest.mark.fast_cases(0, gpu=1)
def test_bits() -> None:
    """Equal inputs give equal bits; log-probs have the loss's bits; dropped rows and chunks change none."""
    case = make_case(200, H=48, V=300).to(torch.float32)
    case = case if CUDA else on_grid(case)
    case = replace(case, old=case.old + torch.linspace(-60, 60, 200))  # some offsets are corrected
    options: dict[str, Any] = {"beta": 0.1, "temperature": 0.9}
    first = triton(case, chunk_rows=70, **options)
    assert_same_bits(triton(case, chunk_rows=70, **options), first)
    there = [tensor.to(DEVICE) for tensor in case.arguments[:3]]
    for chunk_rows in (70, 200, None):
        logprobs, entropy = token_logprobs(*there, temperature=0.9, chunk_rows=chunk_rows, backend="triton")
        present = case.weights != 0
        assert torch.equal(logprobs.cpu()[present], first["logprobs"][present])
        assert torch.equal(entropy.cpu()[present], first["entropy"][present])


def test_exponents_are_capped_and_stay_finite() -> None:
    case = make_case(8, V=6, spread=0.0).to(torch.float32)
    case = replace(case, weights=torch.ones(8), advantages=-torch.ones(8))
    case = replace(case, ref=case.ref + 300, old=torch.where(torch.arange(8) < 4, case.old, case.old - 300))
    for kl in CHOICES:
        options: dict[str, Any] = {"kl_value": kl, "beta": 0.5}
        ours, torchs = triton(case, **options), run(case, backend="torch", **options)
        assert ours["result"].capped.item() == 8
        for name in ("loss", "hidden_grad", "head_grad"):
            assert ours[name].isfinite().all(), (kl, name)
        scale = torchs["hidden_grad"].abs().max()
        torch.testing.assert_close(ours["hidden_grad"] / scale, torchs["hidden_grad"] / scale, rtol=1e-4, atol=1e-5)
    assert torchs["ratios"].max().item() == pytest.approx(math.exp(EXP_CAP), rel=1e-5)


@pytest.mark.parametrize(("H", "V"), [(96, 601), (100, 130)])
def test_bfloat16(H: int, V: int) -> None:
    case = make_case(100, H=H, V=V, seed=1, scale=0.3)
    case = replace(case, weights=case.weights / 100)
    low = replace(case, hidden=case.hidden.bfloat16(), head=case.head.bfloat16())
    truth = brute(replace(low, hidden=low.hidden.double(), head=low.head.double()), beta=0.1)
    vectors = {name: getattr(case, name).float() for name in ("old", "advantages", "weights", "ref")}
    with bfloat16_to_nearest():
        ours = triton(replace(low, **vectors), beta=0.1)
    assert ours["logprobs"].dtype == torch.float32 and ours["hidden_grad"].dtype == torch.bfloat16
    for name in ("logprobs", "entropy"):
        assert (ours[name].double() - truth[name]).abs().max() < 1e-3, name
    budget = bfloat16_budget(low, beta=0.1)
    for name in ("hidden_grad", "head_grad"):
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name
