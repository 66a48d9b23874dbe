"""The persistent kernel gives the plain one's bits, tile for tile; on a GPU, where TMA can be had, within rounding."""

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from interpreter import DEVICE
from loss_cases import make_case, on_grid

from thresher.kernels.head_tiling import HOPPER, PERSISTENT, capability

pytest.importorskip("triton")

from thresher.kernels import head_backend as backend
from thresher.kernels.autotune_cache import takes_descriptors

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy, on lanes that are masked

CUDA = torch.cuda.is_available()
without_tma = pytest.mark.skipif(CUDA and capability(torch.device(DEVICE)) < 90, reason="TMA came with sm_90")


def small_launches() -> dict[str, Callable[[], None]]:
    return {"part of a tile": lambda: check(3, 64, 40), "more tiles than programs": lambda: check(130, 64, 600)}


def check(T: int, H: int, V: int) -> None:
    """Log-probs, entropies and the stored distribution against float64."""
    case = make_case(T, H=H, V=V, seed=T, scale=0.3)
    hidden, head = case.hidden.to(DEVICE, torch.bfloat16), case.head.to(DEVICE, torch.bfloat16)
    targets = case.targets.to(DEVICE)
    with patch.object(backend, "tiling_for", lambda _: PERSISTENT):
        made = backend.TritonHead(head, 0.7, T)
        logprobs, entropy, exps = made.exps(hidden, targets, case.old.to(DEVICE, torch.float32))
    true_RV = torch.log_softmax(hidden.double() @ head.double().t() / 0.7, 1)
    # A logit is a sum of H float32 products, a log-prob one of V exponentials; what is stored is rounded to bfloat16.
    budget = 2**-24 * (4 * H + V)
    torch.testing.assert_close(logprobs.double(), true_RV.gather(1, targets[:, None])[:, 0], rtol=0, atol=budget)
    torch.testing.assert_close(entropy.double(), -(true_RV.exp() * true_RV).sum(1), rtol=0, atol=budget)
    logp_RV = exps.exps_RV[:, :V].double().log() - exps.log_normaliser_R.double()[:, None]
    torch.testing.assert_close(logp_RV, true_RV, rtol=0, atol=2**-8 + budget)


@without_tma
@pytest.mark.parametrize(("T", "H", "V"), [(1, 64, 40), (300, 72, 601), (130, 128, 1281)])
@pytest.mark.fast_cases(1)
def test_bits_of_the_plain_kernel(T: int, H: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(T, H=H, V=V, seed=T, scale=0.3)
    case = case if CUDA else on_grid(case)
    hidden, head = case.hidden.to(DEVICE, torch.bfloat16), case.head.to(DEVICE, torch.bfloat16)
    targets = case.targets.to(DEVICE)
    guess = case.old.to(DEVICE, torch.float32) + 100.0 * (torch.arange(T, device=DEVICE) == T // 2)
    found = []
    for tiling in (HOPPER, PERSISTENT):
        monkeypatch.setattr(backend, "tiling_for", lambda _, chosen=tiling: chosen)
        made = backend.TritonHead(head, 0.7, T)
        made.exps_MV = head.new_full((T, made.exps_stride), math.nan)
        logprobs, entropy, exps = made.exps(hidden, targets, guess)
        found.append((logprobs, entropy, exps.log_normaliser_R, exps.exps_RV))
    for one, other in zip(*found, strict=True):
        if CUDA:  # another order of the same sums
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-4)
        else:
            assert torch.equal(one, other)


def test_which_heads_a_descriptor_can_describe() -> None:
    head = torch.zeros(100, 64, dtype=torch.bfloat16)
    assert takes_descriptors(head) and takes_descriptors(head[3:70])
    assert not any(map(takes_descriptors, (head.float(), head[:, 1:], head[:, :60], head.t(), head[:, ::2])))
