"""The Triton face of the loss and of the log-prob: against float64, and against the torch face.

On a CUDA device the compiled kernels run. Elsewhere Triton's interpreter runs the same source on a CPU; it shows
neither races nor limits of shared memory, and it does not round stores of bfloat16 to nearest, so what is said there
of bfloat16 is that the path is right, not how exact it is.
"""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import Case, assert_same_bits, brute, float32_budget, make_case, run

from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.kl import CHOICES, EXP_CAP

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy, on lanes that are masked

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NAMES = ("loss", "logprobs", "ratios", "entropy", "hidden_grad", "head_grad")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def triton(case: Case, **options: Any) -> dict[str, Any]:
    """`run` with the Triton face on the device, its results brought back."""
    there = Case(*(tensor.to(DEVICE) for tensor in case.__dict__.values()))
    found = run(there, backend="triton", **options)
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def assert_within_float32(case: Case, **options: Any) -> None:
    """float64 is the truth, and an error, its norm over a whole tensor, may be what float32 must be granted."""
    exact = {name: value for name, value in options.items() if name != "chunk_rows"}
    # old and reference log-probs of this temperature, or single ratios would decide everything
    shift = brute(case, **exact)["logprobs"] - brute(case)["logprobs"]
    case = replace(case, old=case.old + shift, ref=case.ref + shift)
    truth, budget = brute(case, **exact), float32_budget(case, **exact)
    ours = triton(case.to(torch.float32), **options)
    for name in NAMES:
        assert ours[name].isfinite().all(), name
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name


# The options vary along with the lengths, so that the table stays small.
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
def test_values_and_gradients(T: int, options: dict[str, Any]) -> None:
    case = make_case(T, H=20, V=300 if T < 1000 else 130, seed=T)
    if "vocab_size" in options:
        size = options["vocab_size"] = min(260, len(case.head) - 3)
        case = replace(case, targets=case.targets % size)
    if T == 1:
        case = replace(case, weights=torch.ones(1, dtype=torch.float64), advantages=-torch.ones(1, dtype=torch.float64))
    assert_within_float32(case, chunk_rows=None if T < 1000 else 200, **options)


@pytest.mark.parametrize("kl_gradient", CHOICES)
def test_every_kl_gradient_in_the_torch_faces_words(kl_gradient: str) -> None:
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
    assert scale < 100 or logits.abs().max() > 8e3
    case = replace(case, weights=case.weights / 90)
    assert_within_float32(case, beta=0.1, kl_value="k2", entropy_coef=0.01)


@pytest.mark.parametrize("wrong", [25.0, -25.0, 31.0, -31.0, 200.0, -200.0, 1e4, -1e4])
def test_a_wrong_guess_of_the_log_prob_is_mended(wrong: float) -> None:
    """The old log-prob places the exponentials; where it is far off the result is the same."""
    case = make_case(300, H=24, V=200, seed=3)
    # With the policy gradient switched off the old log-prob has no say but in the placing.
    case = replace(case, advantages=torch.zeros(300), weights=case.weights + 0.1)
    one_row = torch.arange(300) == 140
    ours = triton(replace(case, old=case.old + wrong * one_row).to(torch.float32), beta=0.5, kl_value="k2")
    truth, budget = brute(case, beta=0.5, kl_value="k2"), float32_budget(case, beta=0.5, kl_value="k2")
    for name in ("logprobs", "entropy", "hidden_grad", "head_grad"):
        assert (ours[name].double() - truth[name]).norm() <= budget[name], name


def test_without_old_log_probs_improbable_targets_are_mended() -> None:
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


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e4])
def test_masked_rows_are_absent_whatever_they_hold(poison: float) -> None:
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
def test_no_rows_that_count(T: int) -> None:
    case = replace(make_case(T), weights=torch.zeros(T, dtype=torch.float64))
    found = triton(case.to(torch.float32), beta=0.1)
    assert found["loss"] == 0 and (found["head_grad"] == 0).all() and (found["hidden_grad"] == 0).all()


def test_columns_beyond_the_vocabulary_do_not_exist() -> None:
    case = make_case(70, V=41).to(torch.float32)
    padded = replace(case, head=torch.cat([case.head, torch.full((9, 16), math.nan)]))
    found, plain = triton(padded, vocab_size=41, beta=0.1), triton(case, beta=0.1)
    assert (found["head_grad"][41:] == 0).all()
    assert_same_bits(found | {"head_grad": found["head_grad"][:41]}, plain)


@pytest.mark.parametrize("masked", [True, False])
def test_strides_do_not_matter(masked: bool) -> None:
    case = make_case(70, H=80, V=31, scale=0.2).to(torch.float32)  # several steps along H
    if not masked:  # then nothing is gathered, and rows are worked on where they lie
        case = replace(case, weights=case.weights + 0.1)
    plain = triton(case, beta=0.1)

    def spread(values: torch.Tensor, step: int) -> torch.Tensor:
        return values.repeat_interleave(step, -1)[..., ::step]

    views = {name: spread(getattr(case, name), step) for step, name in enumerate(case.__dict__, 2) if name != "head"}
    for head in (case.head.t().contiguous().t(), spread(case.head, 3), case.head.repeat(1, 2)[:, :80]):
        there = replace(case, **views, head=head)
        assert not all(tensor.is_contiguous() for tensor in there.__dict__.values())
        found = triton(there, beta=0.1)
        for name in ("loss", "logprobs", "hidden_grad", "head_grad"):
            torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)


def test_log_probs_of_strided_and_expanded_inputs() -> None:
    case = make_case(70, H=20, V=31).to(torch.float32)
    hidden, head, targets = (tensor.to(DEVICE) for tensor in case.arguments[:3])
    plain = token_logprobs(hidden, head, targets, backend="triton")
    spread = token_logprobs(hidden, head, torch.stack([targets, targets * 0], 1)[:, 0], backend="triton", chunk_rows=9)
    assert torch.equal(spread[0], plain[0]) and torch.equal(spread[1], plain[1])
    ones = torch.ones(1, device=DEVICE)
    for advantages, weights in ((ones.expand(70), ones.expand(70)), (torch.ones(70, device=DEVICE),) * 2):
        result = grpo_loss(hidden, head, targets, plain[0], advantages, weights, backend="triton")
        assert result.loss.item() == pytest.approx(-70.0, rel=1e-5)


def test_more_columns_than_one_block_of_tiles_reduces() -> None:
    case = make_case(20, H=16, V=9000, seed=8)
    assert_within_float32(case, beta=0.1, kl_value="k2", entropy_coef=0.1)


def test_near_certainty_and_near_the_reference_nothing_cancels() -> None:
    """1 - p_y of 1e-5, and k3 at d of 1e-4: float32 would lose most of either if it were written e^x - 1."""
    case = make_case(40, H=8, V=6, seed=1, spread=1e-4)
    head = torch.zeros(6, 8, dtype=torch.float64)
    head[0, 0] = 13.0
    hidden = torch.cat([torch.ones(40, 1, dtype=torch.float64), case.hidden[:, 1:] * 0.01], 1)
    logp = torch.log_softmax(hidden @ head.t(), 1)[:, 0]
    case = replace(case, hidden=hidden, head=head, targets=torch.zeros(40, dtype=torch.int64))
    case = replace(case, old=logp, ref=logp - 1e-4, advantages=-torch.ones(40), weights=case.weights + 0.1)
    found, truth = triton(case.to(torch.float32), beta=1.0), brute(case, beta=1.0)
    relative = (found["head_grad"][0].double() - truth["head_grad"][0]).norm() / truth["head_grad"][0].norm()
    assert relative < 2e-2  # the logits' own rounding, 13 * 2^-24, is 1e-6 of 1 and a hundredth of 1 - p here
    case = replace(case, advantages=torch.zeros(40), head=head * 0, ref=logp * 0 - math.log(6) - 1e-4)
    case = replace(case, old=logp * 0 - math.log(6))
    found, truth = triton(case.to(torch.float32), beta=1.0), brute(case, beta=1.0)
    # d is the difference of two numbers near log 6, whose float32 neighbours are 1.2e-3 of it away: three of those
    assert (found["head_grad"].double() - truth["head_grad"]).norm() < 4e-3 * truth["head_grad"].norm()


def test_probabilities_that_underflow_add_nothing_to_the_entropys_gradient() -> None:
    case = make_case(40, H=16, V=80, seed=2, scale=60.0)
    assert (torch.softmax((case.hidden @ case.head.t()).float(), 1) == 0).any()
    truth, budget = brute(case, entropy_coef=0.5), float32_budget(case, entropy_coef=0.5)
    for found in (triton(case.to(torch.float32), entropy_coef=0.5), run(case.to(torch.float32), entropy_coef=0.5)):
        for name in ("hidden_grad", "head_grad"):
            assert (found[name].double() - truth[name]).norm() <= budget[name], name


def test_a_guess_that_is_no_number_is_mended() -> None:
    from thresher.kernels.head import TritonHead

    hidden, head, targets = (tensor.to(DEVICE) for tensor in make_case(9, V=30).to(torch.float32).arguments[:3])
    guess = torch.full((9,), math.nan, device=DEVICE)
    for temperature in (1.0, 0.5):
        _, _, exps = TritonHead(head, temperature, 9).exps(hidden, targets, guess)
        probs = exps.exps_NV * torch.exp(-exps.log_mass_N)[:, None]
        torch.testing.assert_close(probs, torch.softmax(hidden @ head.t() / temperature, 1))


def test_an_exploding_coefficient_stays_finite_whatever_the_guess() -> None:
    case = make_case(6, V=9, spread=0.0).to(torch.float32)
    case = replace(case, weights=torch.ones(6), old=case.old - 20.0, ref=case.ref + 300.0)
    found = triton(case, kl_value="k3", beta=0.5)
    assert found["hidden_grad"].isfinite().all() and found["head_grad"].isfinite().all()


def test_one_row_with_a_gradient_does_not_make_chunks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from thresher.kernels import head as head_module

    launches = []
    real = head_module.launch_head
    monkeypatch.setattr(head_module, "launch_head", lambda *a: launches.append(len(a[0])) or real(*a))
    case = make_case(300, V=20).to(torch.float32)
    advantages = torch.zeros(300).index_fill_(0, torch.tensor([7]), -1.0)
    triton(replace(case, advantages=advantages, weights=torch.ones(300)))
    assert sorted(launches) == [1, 1, 299]  # the row with a gradient, its retry that finds nothing to do, all others


@pytest.mark.parametrize("H", [896, 3584])
@pytest.mark.parametrize("mebibytes", [150, 560])
def test_even_chunks_within_the_budget(H: int, mebibytes: int) -> None:
    from thresher.kernels.tiling import even_rows

    head = torch.empty(151_936, H, dtype=torch.bfloat16, device="meta")
    rows = even_rows(head, mebibytes * 2**20, 8192)
    tiles = 151_936 / 128
    assert rows % 128 == 0 and rows * (2 * 151_936 + 12 * tiles + 12 * H) < mebibytes * 2**20
    chunks = math.ceil(8192 / rows)
    assert (rows - 128) * chunks < 8192  # no smaller chunk would do in as many
    assert even_rows(head, mebibytes * 2**20, 50) == 50 and even_rows(head, 1, 8192) == 128


def test_the_head_gradient_is_added_to_a_buffer() -> None:
    case = make_case(150, V=41).to(torch.float32)
    ordinary = triton(case, beta=0.2, chunk_rows=64)
    hidden, head, *rest = (tensor.to(DEVICE) for tensor in case.arguments)
    buffer = torch.full((41, 16), 7.0, device=DEVICE)
    options: dict[str, Any] = {"ref_logprobs_T": case.ref.to(DEVICE), "beta": 0.2, "chunk_rows": 64}
    result = grpo_loss(hidden.requires_grad_(), head, *rest, lm_head_grad_VH=buffer, backend="triton", **options)
    assert not result.loss.requires_grad
    torch.testing.assert_close(buffer.cpu() - 7.0, ordinary["head_grad"], rtol=1e-5, atol=4e-6)
    assert torch.equal(result.hidden_grad_TH.cpu(), ordinary["hidden_grad"])


def test_bits() -> None:
    """Equal inputs give equal bits; the log-prob's are the loss's; dropped rows and chunks change none."""
    case = make_case(300, H=48, V=500).to(torch.float32)
    case = replace(case, old=case.old + torch.linspace(-60, 60, 300))  # some rows are mended
    options: dict[str, Any] = {"beta": 0.1, "temperature": 0.9}
    first = triton(case, chunk_rows=100, **options)
    assert_same_bits(triton(case, chunk_rows=100, **options), first)
    there = [tensor.to(DEVICE) for tensor in case.arguments[:3]]
    for chunk_rows in (100, 300, None):
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
    ours = triton(replace(low, **vectors), beta=0.1)
    assert ours["logprobs"].dtype == torch.float32 and ours["hidden_grad"].dtype == torch.bfloat16
    for name in ("logprobs", "entropy"):
        assert (ours[name].double() - truth[name]).abs().max() < 1e-3, name
    # A probability and a scaled row are rounded to bfloat16, 2^-9 each; the interpreter cuts off instead, 2^-8.
    allowed = 2**-8 if CUDA else 2**-6
    for name in ("hidden_grad", "head_grad"):
        assert (ours[name].double() - truth[name]).norm() < allowed * truth[name].norm(), name


@needs_cuda
@pytest.mark.parametrize("H", [896, 1536, 2048, 3584])
def test_real_shapes(H: int) -> None:
    """Qwen2.5's vocabulary and widths: errors against float64, judged by torch's own in bfloat16, and the workspace."""
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

    def call(chunk_rows: int | None) -> tuple[torch.Tensor, torch.Tensor, int]:
        """dX, dW and the bytes beside them."""
        buffer = torch.zeros(V, H, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() + 2 * hidden.numel()
        result = grpo_loss(
            hidden, head, targets, *vectors.values(), **options, chunk_rows=chunk_rows, lm_head_grad_VH=buffer
        )
        assert torch.equal(result.logprobs, logp)
        return result.hidden_grad_TH, buffer, torch.cuda.max_memory_allocated() - before

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

    def dlogits(picked: torch.Tensor, columns_of: torch.Tensor) -> torch.Tensor:
        p = (x[picked].double() @ head[columns_of].double().t() - log_total[picked, None]).exp()
        return coefficient[picked, None] * ((targets[picked, None] == columns_of).double() - p)

    everything = torch.arange(columns, device="cuda")
    dz = dlogits(rows, everything)
    truth, torchs = dz @ head[:columns].double(), (dz.bfloat16() @ head[:columns]).double()
    assert (hidden_grad[rows].double() - truth).norm() <= 2 * (torchs - truth).norm()
    dz = dlogits(torch.arange(T, device="cuda"), some)
    truth, torchs = dz.t() @ x.double(), (dz.bfloat16().t() @ x).double()
    assert (head_grad[some].double() - truth).norm() <= 2 * (torchs - truth).norm()


LENGTHS = """
import torch, triton
from triton.backends.compiler import GPUTarget
from thresher.kernels import coefficients, head

class Driver:  # enough of one to ask the launcher what it would compile, without a GPU
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
seen = {}
def count(kernel):
    def run(*arguments, grid=None, warmup=None, **options):
        binder = kernel.device_caches[0][-1]
        bound, specialisation, chosen = binder(*arguments, **options)
        seen.setdefault(kernel.fn.__name__, set()).add(str(specialisation) + str(sorted(chosen.items())))
    kernel.run = run
for kernel in (head._head_kernel, head._reduce_kernel, coefficients._coefficients_kernel):
    count(kernel)
from thresher.kernels import objective
settings = objective.LossSettings(beta=0.1)
w = torch.randn(500, 20)
for n in (1, 16, 63, 64, 1000):
    vector = torch.rand(n)
    targets = torch.zeros(n, dtype=torch.int64)
    rows = objective.LossRows(targets, targets, vector, vector, vector, vector)
    coefficients.TritonLoss(w, settings, 1000).gradient(torch.randn(n, 20), rows)
    head.TritonHead(w, 1.0, n).logprobs(torch.randn(n, 20), targets)
print({name: len(kinds) for name, kinds in seen.items()})
"""


def test_five_lengths_share_one_specialisation() -> None:
    import os

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LENGTHS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({"_head_kernel": 1, "_reduce_kernel": 1, "_coefficients_kernel": 1})
