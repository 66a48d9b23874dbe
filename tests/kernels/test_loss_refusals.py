"""Tests of the inputs that grpo_loss refuses: ValueError, naming the argument and the first offending index."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import make_case
from torch import Tensor

from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.operands import NotFinite, RowCheck, raise_deferred


def set_row(values: Tensor, row: int, bad: float) -> Tensor:
    changed = values.clone()
    changed[row] = bad
    return changed


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("targets", 50, r"targets_T\[7\] is 50, not a token id from 0 to 49"),
        ("targets", -1, r"targets_T\[7\] is -1"),
        ("weights", -0.5, r"weights_T\[7\] is -0.5, not a finite number of at least 0"),
        ("weights", math.nan, r"weights_T\[7\] is nan"),
        ("weights", math.inf, r"weights_T\[7\] is inf"),
        ("old", math.nan, r"old_logprobs_T\[7\] is nan, not a finite number"),
        ("old", -math.inf, r"old_logprobs_T\[7\] is -inf"),
        ("advantages", math.nan, r"advantages_T\[7\] is nan"),
        ("ref", math.inf, r"ref_logprobs_T\[7\] is inf"),
        ("hidden", math.nan, r"hidden_TH\[7\] is not"),
        ("hidden", -math.inf, r"hidden_TH\[7\] is not"),
    ],
)
def test_bad_data_names_argument_and_first_index(name: str, bad: float, words: str) -> None:
    case = make_case(40)
    case = replace(case, weights=set_row(case.weights.clamp(min=0.1), 3, 0.0))
    case = replace(case, **{name: set_row(set_row(getattr(case, name), 7, bad), 20, bad)})
    buffer = torch.zeros_like(case.head)
    with pytest.raises(ValueError, match=words):
        grpo_loss(case.hidden.requires_grad_(), *case.arguments[1:], ref_logprobs_T=case.ref, lm_head_grad_VH=buffer)
    assert (buffer == 0).all()


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("targets", 50, r"targets_T\[7\] is 50, not a token id"),
        ("targets", -1, r"targets_T\[7\] is -1"),
        ("hidden", math.nan, r"hidden_TH\[7\] is not"),
    ],
)
def test_what_log_probs_found_is_raised_later(name: str, bad: float, words: str) -> None:
    """The loss raises it before checking its own data, which NaN log-probs are part of; or `raise_deferred` does."""
    case = make_case(40)
    wrong = replace(case, **{name: set_row(getattr(case, name), 7, bad)})
    checks: list[list[RowCheck]] = []
    ref, _ = token_logprobs(case.hidden, case.head, case.targets, defer_checks_to=checks)
    assert torch.equal(ref, token_logprobs(case.hidden, case.head, case.targets)[0])
    raise_deferred(checks)
    ref, _ = token_logprobs(wrong.hidden, wrong.head, wrong.targets, defer_checks_to=checks)
    expected = NotFinite if name == "hidden" else ValueError
    with pytest.raises(expected, match=words):
        raise_deferred(checks)
    with pytest.raises(expected, match=words):
        grpo_loss(*case.arguments, ref_logprobs_T=ref, deferred_checks=checks)
    raise_deferred([])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.zeros(4)}, r"hidden_TH has shape \(4,\)"),
        ({"hidden": torch.zeros(40, 16, dtype=torch.int64)}, "hidden_TH has dtype torch.int64"),
        ({"head": torch.zeros(50, 16)}, "lm_head_VH has dtype torch.float32; expected hidden_TH's torch.float64"),
        ({"head": torch.zeros(50, 15, dtype=torch.float64)}, "lm_head_VH has width 15; expected hidden_TH's 16"),
        ({"head": torch.zeros(50, 16, dtype=torch.float64, device="meta")}, "lm_head_VH is on meta"),
        ({"targets": torch.zeros(40)}, "targets_T has dtype torch.float32"),
        ({"targets": torch.zeros(39, dtype=torch.int64)}, r"targets_T has shape \(39,\); expected \(40,\)"),
        ({"old": torch.zeros(40, 1)}, r"old_logprobs_T has shape \(40, 1\)"),
        ({"advantages": torch.zeros(40, dtype=torch.int64)}, "advantages_T has dtype torch.int64"),
        ({"weights": torch.zeros(41)}, r"weights_T has shape \(41,\)"),
        ({"ref": torch.zeros(1)}, r"ref_logprobs_T has shape \(1,\)"),
    ],
)
def test_bad_shapes_dtypes_and_devices(change: dict[str, Tensor], words: str) -> None:
    case = replace(make_case(40), **change)
    with pytest.raises(ValueError, match=words):
        grpo_loss(*case.arguments, ref_logprobs_T=case.ref)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"temperature": value}, re.escape(f"temperature is {value}; expected"))
            for value in (1e-300, 1e-40, 1e38, 1e300)
        ),
        ({"clip_high": 1e308}, r"clip_high is 1e\+308; expected a finite number of at least 0, within float32"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a finite number above 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"clip_low": -0.1}, "clip_low is -0.1; expected a finite number of at least 0"),
        ({"clip_high": math.inf}, "clip_high is inf"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; expected a finite number above 1"),
        ({"beta": -1.0}, "beta is -1.0"),
        ({"beta": 0.1}, "beta is 0.1 but ref_logprobs_T is None"),
        ({"entropy_coef": math.inf}, "entropy_coef is inf; expected a finite number"),
        ({"kl_value": "k4"}, "kl_value is 'k4'; expected one of k1, k2, k3, k3_ratio, none"),
        ({"kl_gradient": "kl"}, "kl_gradient is 'kl'"),
        ({"vocab_size": 51}, "vocab_size is 51; expected 1 to lm_head_VH's 50 rows"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"workspace_bytes": 0}, "workspace_bytes is 0; expected at least 1, or None"),
        ({"workspace_bytes": 5, "chunk_rows": 7}, "chunk_rows is 7 and workspace_bytes is 5; expected one of the two"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        (
            {"lm_head_grad_VH": torch.zeros(50, 16)},
            r"lm_head_grad_VH is torch.float32 \(50, 16\) on cpu; expected torch.float64",
        ),
        ({"lm_head_grad_VH": torch.zeros(50, 8, dtype=torch.float64)}, r"expected torch.float64 \(50, 16\) on cpu"),
    ],
    ids=str,
)
def test_bad_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grpo_loss(*make_case(40).arguments, **options)
