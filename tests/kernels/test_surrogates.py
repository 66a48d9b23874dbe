"""Tests of surrogates other than the clip: each against its paper's formula over whole sequences, through log_softmax
in float64; both backends; user-defined objectives; and refused arguments."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_cases import Case, make_case
from surrogate_cases import BY_HAND, DELTA, HIGH, LOW
from torch import Tensor

from thresher.kernels import grpo_loss
from thresher.kernels.loss import reference_grpo_loss
from thresher.kernels.objective import SURROGATES, LossRows, LossSettings, slopes

LENGTHS = (7, 1, 20, 12, 30)
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

Rows = tuple[Tensor, Tensor, Tensor]  # log-probs, old log-probs and advantages of one sequence's rows in the loss


def case_of(seed: int = 0) -> Case:
    """Return rows of five sequences of different lengths, some masked and some of advantage 0; ratios of .3 to 3."""
    return make_case(sum(LENGTHS), seed=seed)


def by_hand(case: Case, objective: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    hidden, head = (x.clone().requires_grad_() for x in (case.hidden, case.head))
    logits = hidden @ head.t()
    logits.retain_grad()
    logp = torch.log_softmax(logits, 1).gather(1, case.targets[:, None])[:, 0]
    loss = torch.zeros((), dtype=torch.float64)
    for number in range(len(LENGTHS)):
        rows = (number == SEQUENCE) & (case.weights != 0)
        if rows.any():
            loss = loss - (case.weights[rows] * objective(logp[rows], case.old[rows], case.advantages[rows])).sum()
    loss.backward()
    assert hidden.grad is not None and head.grad is not None and logits.grad is not None
    own = logits.grad.gather(1, case.targets[:, None])[:, 0]
    return {"loss": loss.detach(), "hidden_grad": hidden.grad, "head_grad": head.grad, "logit_gradients": own}


def ours(case: Case, surrogate: Any, loss: Callable[..., Any] = grpo_loss, **options: Any) -> dict[str, Tensor]:
    hidden, head = (x.clone().requires_grad_() for x in (case.hidden, case.head))
    logits = hidden @ head.t() if loss is reference_grpo_loss else None  # hidden states of an identity head
    if logits is not None:
        logits.retain_grad()
    result = loss(
        hidden if logits is None else logits,
        head if logits is None else torch.eye(len(head), dtype=head.dtype),
        *case.arguments[2:],
        ref_logprobs_T=case.ref,
        sequence_T=SEQUENCE,
        surrogate=surrogate,
        **{"clip_low": LOW, "clip_high": HIGH, "divergence": DELTA} | options,
    )
    result.loss.backward()
    assert hidden.grad is not None and head.grad is not None
    own = result.logit_gradients if logits is None else logits.grad.gather(1, case.targets[:, None])[:, 0]
    return {"loss": result.loss.detach(), "hidden_grad": hidden.grad, "head_grad": head.grad, "logit_gradients": own}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name].double() - value).norm()) for name, value in truth.items()}


def test_each_has_a_formula_here() -> None:
    assert BY_HAND.keys() == set(SURROGATES)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("chunk_rows", [None, 9])
def test_it_is_its_formula_in_float64(name: str, chunk_rows: int | None) -> None:
    for seed in range(3):
        case = case_of(seed)
        truth = by_hand(case, BY_HAND[name])
        for found in (ours(case, name, chunk_rows=chunk_rows), ours(case, name, reference_grpo_loss)):
            for of, error in errors(found, truth).items():
                assert error <= 1e-12 * max(float(truth[of].norm()), 1.0), (of, seed)


def test_each_limits_another_row() -> None:
    """No two of them have the same gradient here, so that a name without effect would be noticed."""
    case = case_of()
    found = [ours(case, name)["head_grad"] for name in SURROGATES]
    for n, one in enumerate(found):
        assert all(float((one - other).norm()) > 1e-3 for other in found[:n])


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes
def test_the_triton_backend_is_as_near_to_float64_as_the_torch_backend(name: str) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = case_of()
    options: dict[str, Any] = {"beta": 0.1, "kl_value": "k2", "entropy_coef": 0.05 if name == "gspo" else 0.0}
    truth = ours(exact, name, **options)
    narrow = exact.to(torch.float32)
    plain = errors(ours(narrow, name, backend="torch", **options), truth)
    there = Case(*(x.to(device) for x in narrow.__dict__.values()))
    found = ours(there, name, backend="triton", chunk_rows=32, **options)
    for of, error in errors({key: value.cpu() for key, value in found.items()}, truth).items():
        assert error <= 3 * (plain[of] + 2**-23 * float(truth[of].norm())), of


PEERS = json.loads(Path(__file__).with_name("objective_peers.json").read_text())


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: case["id"])
def test_gradients_are_those_of_peers(case: dict[str, Any]) -> None:
    """Of the log-probs of a few short sequences, with gaps for tool output. The numbers are results of TRL's, verl's,
    Liger's, OpenRLHF's and the papers' own functions, run in float64; `of` names version and function."""
    given = PEERS["inputs"][case["input"]]
    mask, new, old = (torch.tensor(given[key], dtype=torch.float64) for key in ("mask", "new_logps", "old_logps"))
    A = torch.tensor(given["advantages"], dtype=torch.float64)[:, None] * mask
    if "advantages_per_token" in given:
        A = torch.tensor(given["advantages_per_token"], dtype=torch.float64)
    n, B = mask.sum(1, keepdim=True), len(mask)
    weights = {"token": 1 / mask.sum(), "sequence": 1 / (n * B), "sum": 1.0 / B, "16": 1.0 / (16 * B)}[
        case["mean_over"]
    ]
    rows = mask > 0
    turn = torch.cumsum(rows.int().diff(dim=1, prepend=torch.zeros(B, 1, dtype=torch.int)).clamp(min=0).flatten(), 0)
    inputs = LossRows(
        None,
        torch.zeros(int(mask.sum()), dtype=torch.int64),
        old[rows],
        A[rows],
        (mask * weights)[rows],
        None,
        torch.arange(B)[:, None].expand_as(mask)[rows],
        turn.view_as(mask)[rows].long() - 1,
    )
    if guard := case["settings"].get("guard"):  # the peer's number is the guard's term alone
        settings = LossSettings(guard=guard, surrogate="reinforce")
        slope = slopes(new[rows], inputs, settings) - slopes(new[rows], inputs, LossSettings(surrogate="reinforce"))
    else:
        slope = slopes(new[rows], inputs, LossSettings(**case["settings"]))
    found = torch.zeros_like(mask).masked_scatter(rows, -slope * inputs.weights_R)
    wanted = torch.tensor(case["gradient"], dtype=torch.float64)
    # Some add 1e-8 to counts, and in one a temperature of 1.05 is a float32.
    assert float((found - wanted).norm()) <= 1e-7 * float(wanted.norm())


@pytest.mark.parametrize("zero", [True, False])
def test_the_guard_holds_what_was_right(zero: bool) -> None:
    """Computed by hand: the loss is 0 except for the guard, of turns 0 (falls overall), 1 (rises), 2 (belongs to a
    wrong answer) and 3 (as good as the group)."""
    hidden, head = torch.zeros(6, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    logp, old = -math.log(2), torch.tensor([-0.5, -0.9, -0.9, -0.6, -0.1, -0.4], dtype=torch.float64)
    advantages = torch.tensor([1e-30, 0.0, 1e-30, 1e-30, -1e-30, 0.0], dtype=torch.float64)
    leaf = hidden.requires_grad_()
    result = grpo_loss(
        leaf,
        head,
        torch.zeros(6, dtype=torch.int64),
        old,
        advantages,
        torch.full((6,), 0.5, dtype=torch.float64),
        turn_T=torch.tensor([0, 1, 1, 0, 2, 3]),
        guard=0.2,
        guard_zero=zero,
    )
    fallen = torch.tensor([-0.5 - logp, 0, 0, -0.6 - logp, 0, (-0.4 - logp) * zero], dtype=torch.float64)
    assert result.loss.item() == pytest.approx(0.5 * 0.2 * float(fallen.sum()), rel=1e-12)
    result.loss.backward()
    assert leaf.grad is not None and (leaf.grad[:, 0] < 0).tolist() == [True, False, False, True, False, zero]
    assert result.logit_gradients is not None and torch.equal(result.logit_gradients, leaf.grad[:, 0])


def test_beta_and_entropy_are_added_whatever_the_surrogate() -> None:
    case = case_of()
    terms = {"beta": 0.3, "kl_value": "k3_ratio", "entropy_coef": 0.1}
    without = ours(replace(case, advantages=torch.zeros_like(case.advantages)), "clip", **terms)
    for name in ("cispo", "gspo"):
        alone, both = ours(case, name), ours(case, name, **terms)
        for of, value in both.items():
            assert float((value - alone[of] - without[of]).norm()) <= 1e-12 * float(value.norm()), of


def ppo_of_my_own(
    logprobs: Tensor, old: Tensor, ref: Tensor | None, advantages: Tensor, mask: Tensor, sequence: Tensor
) -> Tensor:
    assert mask.dtype == torch.bool and mask.all() and int(sequence.max()) < len(LENGTHS) and ref is not None
    return -BY_HAND["clip"](logprobs, old, advantages)


def test_an_objective_of_ones_own() -> None:
    case = case_of()
    truth = ours(case, "clip")
    for found in (ours(case, ppo_of_my_own, chunk_rows=9), ours(case, ppo_of_my_own, reference_grpo_loss)):
        for of, error in errors(found, truth).items():
            assert error <= 1e-12 * max(float(truth[of].norm()), 1.0)

    def weighted(logprobs: Tensor, old: Tensor, ref: Any, advantages: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
        """Couple all rows, so that a row's gradient contains other rows' weights."""
        return logprobs * logprobs.mean() * advantages

    # ranks with fewer micro-batches than others fill up with one whose weights are all 0
    assert not ours(replace(case, weights=torch.zeros_like(case.weights)), ppo_of_my_own)["hidden_grad"].any()

    found, reference = ours(case, weighted), ours(case, weighted, reference_grpo_loss)
    for of, error in errors(found, reference).items():
        assert error <= 1e-12 * max(float(reference[of].norm()), 1.0)


@pytest.mark.parametrize(
    ("objective", "why"),
    [
        (lambda logp, *_: logp.mean(), r"<lambda> returned a tensor of shape \[\]; expected the loss of each row"),
        (lambda logp, *_: 3.0, r"returned 'float'; expected the loss"),
        (lambda logp, *_: logp / 0.0, r"returned -inf for row 0; expected finite numbers"),
        (lambda logp, old, ref, A, *_: A, "does not depend on the log-probs"),
        (lambda logp, *_: (logp - logp.detach()).sqrt(), "the objective's gradient is not finite"),
    ],
)
def test_an_objective_that_cannot_be(objective: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ours(case_of(), objective)


def test_what_is_refused() -> None:
    case = case_of()
    for options, why in (
        ({"surrogate": "ppo"}, "surrogate is 'ppo'; expected one of clip, reinforce, "),
        ({"surrogate": "gspo"}, r"sequence_T is None; expected numbers \[T\] with surrogate = 'gspo' and guard = 0.0"),
        ({"guard": 0.2}, r"turn_T is None; expected numbers \[T\] with surrogate = 'clip' and guard = 0.2"),
        ({"surrogate": "gspo", "sequence_T": SEQUENCE[:3]}, r"sequence_T has shape \(3,\); expected"),
        ({"surrogate": "gspo", "sequence_T": SEQUENCE.float()}, "sequence_T has dtype torch.float32"),
        ({"surrogate": "gspo", "sequence_T": SEQUENCE - 1}, r"sequence_T\[0\] is -1, not a number from 0 to"),
        ({"surrogate": "gspo", "sequence_T": SEQUENCE + 2**40}, r"sequence_T\[0\] is 1099511627776, not"),
        ({"guard": 0.2, "turn_T": SEQUENCE - 2}, r"turn_T\[0\] is -2, not a number from -1 to"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "is 3.0 with surrogate = 'cispo'; only clip and gspo use it"),
        ({"surrogate": "sapo", "tau_positive": 0.0}, "tau_positive is 0.0"),
        ({"surrogate": "dppo_tv", "divergence": -1.0}, "divergence is -1.0"),
    ):
        with pytest.raises(ValueError, match=why):
            grpo_loss(*case.arguments, **options)
