"""The formulas of the token page, run in node, are those of the kernels."""

import base64
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from browser import run_page

from thresher.engine.reports.pages import page_part
from thresher.kernels.loss import reference_grpo_loss
from thresher.kernels.objective import (
    ESTIMATORS,
    LossRows,
    LossSettings,
    capped_exp,
    clipped_objective,
    kl_coefficient,
    kl_values,
)

# Both sides of the cap at 80, both signs, sizes at which exp(-d) - 1 loses its digits, and float16's largest.
LOG_RATIOS = [0.0, 1e-7, -1e-7, 1e-3, -1e-3, 0.2, -0.2, 1.0, -1.0, 10.0, -10.0, 79.9, 80.0, 80.1, -79.9, -80.0, -80.1]
LOG_RATIOS += [65504.0, -65504.0]


def formulas(expression: str, *given: object) -> Any:
    """The value of a JavaScript expression over FORMULAS and `given`."""
    scenario = f"const given = {json.dumps(given)}; return ({expression})(...given);"
    return run_page("", scenario, scripts=[page_part("token_formulas.js")])


def close(found: object, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(np.array(found, float), expected.numpy(), rtol=1e-13, atol=0)


def test_ratios_and_kl_are_the_kernels() -> None:
    d = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    found = formulas("(all) => all.map(FORMULAS.ratioOf)", LOG_RATIOS)
    close(found, capped_exp(d))
    found = formulas("(all) => all.map((d) => Object.values(FORMULAS.estimators).map((f) => f(d)))", LOG_RATIOS)
    values = kl_values(d, torch.ones_like(d))
    close(found, torch.stack([values[name] for name in ("k1", "k2", "k3")], 1))


@pytest.mark.parametrize("name", (*ESTIMATORS, "none"))
def test_kl_coefficients_are_the_kernels(name: str) -> None:
    pairs = list(itertools.product(LOG_RATIOS, (0.0, 0.5, 1.0, 2.0, math.exp(80))))
    d, ratio = torch.tensor(pairs, dtype=torch.float64).T
    found = formulas("(name, pairs) => pairs.map(([d, r]) => FORMULAS.coefficients[name](d, r))", name, pairs)
    close(found, kl_coefficient(name, d, ratio))


def test_the_surrogate_at_the_clips_borders() -> None:
    """Against autograd of the clipped objective, which clips by itself; the page is told what was clipped."""
    settings = LossSettings(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    ratios = [0.1, 0.8 - 1e-9, 0.8, 0.8 + 1e-9, 1.0, 1.3 - 1e-9, 1.3 + 1e-9, 2.0, 3.0 - 1e-9, 3.0 + 1e-9, 1e30]
    cases = torch.tensor(list(itertools.product(ratios, (-2.0, -0.5, 0.0, 0.5, 2.0))), dtype=torch.float64)
    ratio_R, advantages_R = cases.T
    logprobs_R = ratio_R.log().requires_grad_()
    zeros_R = torch.zeros_like(ratio_R)
    rows = LossRows(None, zeros_R.long(), zeros_R, advantages_R, zeros_R + 1, None)
    _, objective_R, clipped_R = clipped_objective(logprobs_R, rows, settings)
    objective_R.sum().backward()
    given = [*zip(ratio_R.tolist(), advantages_R.tolist(), clipped_R.tolist(), strict=True)]
    found = formulas("(all) => all.map((one) => FORMULAS.surrogate(...one))", given)
    assert logprobs_R.grad is not None and 0 < int(clipped_R.sum()) < len(given)
    np.testing.assert_allclose(found, logprobs_R.grad.numpy(), rtol=1e-12)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One setting of the loss, as kernels/loss.py and as the page have it."""

    kl: str = "none"
    beta: float = 0.0
    entropy: float = 0.0
    per_trajectory: bool = True
    temperature: float = 1.0

    @property
    def page(self) -> dict[str, Any]:
        names = ("kl", "beta", "entropy", "per_trajectory")
        return {name: getattr(self, name) for name in names}


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(per_trajectory=False, temperature=0.7),
        *(Objective(kl=name, beta=0.3) for name in ESTIMATORS),
        Objective(kl="k2", beta=0.5, entropy=0.1, temperature=1.6),
        Objective(entropy=-0.2),
    ],
    ids=lambda objective: f"{objective.kl}-{objective.entropy}-{objective.temperature}",
)
def test_the_gradient_that_is_shown_is_the_losss(objective: Objective) -> None:
    """Autograd's derivative of the loss by each token's own logit (after the temperature), sign turned round."""
    tokens, columns = 7, 5
    draw = torch.Generator().manual_seed(3)
    logits_TV = torch.randn(tokens, columns, generator=draw, dtype=torch.float64) * 2
    logits_TV[0, 0], logits_TV[1, 0] = 60.0, -60.0  # a token that is sure, and one that is all but impossible
    targets_T = torch.tensor([0, 0, 1, 2, 3, 4, 1])
    logprobs_T = (logits_TV / objective.temperature).log_softmax(1)[torch.arange(tokens), targets_T]
    drift_T = torch.tensor([0.0, 0.1, 0.5, -0.5, 0.15, -0.2, 0.3], dtype=torch.float64)
    advantages_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, 2.0, -2.0], dtype=torch.float64)
    d_T = torch.tensor([0.0, 2.0, -2.0, 0.3, -0.3, 85.0, -3.0], dtype=torch.float64)
    weight = 1 / tokens if objective.per_trajectory else 1.0
    hidden_TV = logits_TV.clone().requires_grad_()
    # With the unit matrix as its head, the model's hidden states are its logits.
    result = reference_grpo_loss(
        hidden_TV,
        torch.eye(columns, dtype=torch.float64),
        targets_T,
        logprobs_T - drift_T,
        advantages_T,
        torch.full((tokens,), weight, dtype=torch.float64),
        ref_logprobs_T=(logprobs_T - d_T) if objective.beta else None,
        kl_value=objective.kl,
        beta=objective.beta,
        entropy_coef=objective.entropy,
        temperature=objective.temperature,
    )
    result.loss.backward()
    assert hidden_TV.grad is not None and 0 < int(result.clipped.sum()) < tokens
    given = [
        {
            "logprob": logprobs_T[t].item(),
            "ratio": result.ratios[t].item(),
            "advantage": advantages_T[t].item(),
            "clipped": bool(result.clipped[t]),
            "d": d_T[t].item() if objective.beta else None,
            "entropy": result.entropy[t].item(),
            "tokens": tokens,
        }
        for t in range(tokens)
    ]
    found = formulas("(all, O) => all.map((one) => FORMULAS.logitGradient(one, O))", given, objective.page)
    expected_T = -hidden_TV.grad[torch.arange(tokens), targets_T] * objective.temperature
    np.testing.assert_allclose(found, expected_T.numpy(), rtol=1e-9, atol=1e-15)


def test_halves_are_numpys() -> None:
    bits = np.arange(2**16, dtype="<u2")
    text = base64.b64encode(bits.tobytes()).decode()
    found = np.array(formulas("(text) => [...FORMULAS.halves(text)]", text), float)  # JSON has null for NaN
    expected = bits.view("<f2").astype(float)
    np.testing.assert_array_equal(found, np.where(np.isfinite(expected), expected, np.nan))


def test_colours_are_full_at_the_99th_percentile() -> None:
    sizes = [abs(math.sin(n)) for n in range(1, 301)]
    at = "(sizes, ...rest) => { const { full, largest } = FORMULAS.fullScale(sizes, ...rest); return [full, largest]; }"
    percentile = np.quantile(sizes, 0.99, method="lower")
    assert formulas(at, sizes) == [percentile, max(sizes)]
    assert formulas(at, sizes, None, 1) == [max(sizes), max(sizes)]
    assert formulas(at, sizes, 5.0) == [5.0, max(sizes)]
    assert formulas(at, []) == [1, 0]
    given = [0.0, 0.015, 0.016, -0.5, 1.0, -7.0]
    shown = formulas("(all) => all.map((v) => FORMULAS.opacity(v, 1))", given)
    assert shown == pytest.approx([0.0, 0.0, 0.0812, 0.42, 0.77, 0.77])
