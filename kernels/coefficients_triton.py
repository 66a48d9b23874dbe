"""`logit_coefficients` of objective.py in Triton: a row's coefficient, applied to its exps.

    p_v = e_v / S, S = e^log_normaliser                                        the exps of head_triton.py
    dz_v = c ([v = y] - p_v) = -(c / S) (e_v - S [v = y]),  c = on_target of objective.py
    with entropy: dz_v = on_target [v = y] + p_v (on_probs + on_plogp log p_v)

Without an entropy bonus, one store at the target, e_y - S = S (p_y - 1), turns the exps into their own gradient, and
the factor -c / S is applied to the matmuls' narrow operands. With one, each exp is rewritten.

Axes: R rows of a chunk, V vocabulary (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.head_triton import Exps, TritonHead
from thresher.kernels.objective import BOUND, EXP_CAP, LogitGradient, LossRows, LossSettings, target_coefficients
from thresher.kernels.operands import stored_columns
from thresher.kernels.registry import ProgramWork, Specialisation

ROWS, COLUMNS = 64, 4096
_NARROW = [
    f"{name}_ptr"
    for name in ("logprobs", "log_normaliser", "targets", "old", "advantages", "weights", "ref", "factors")
]
_CAP = tl.constexpr(EXP_CAP)
_BOUND = tl.constexpr(BOUND)


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _expm1(x):
    """Compute e^x - 1 without cancellation near 0: eight terms of its series up to |x| = .35."""
    near = _clamp(x, -0.35, 0.35)
    series = 1.0 + near / 8.0
    for k in tl.static_range(7, 1, -1):
        series = 1.0 + near / k * series
    return tl.where(tl.abs(x) <= 0.35, near * series, tl.exp(x) - 1.0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_NARROW)
def _coefficients_kernel(
    logprobs_ptr,  # [R] fp32
    log_normaliser_ptr,  # [R] fp32
    targets_ptr,  # [R] int64
    old_ptr,  # [R] fp32, read if HAS_OLD
    advantages_ptr,  # [R] fp32
    weights_ptr,  # [R] fp32
    ref_ptr,  # [R] fp32, read if KL is an estimator
    exps_ptr,  # [R, V] bf16 or fp32, columns padded: the target's is overwritten, unless ENTROPY
    factors_ptr,  # [R] fp32, written: -c / S, or c if ENTROPY
    count,  # R
    exps_stride_r,
    low,  # 1 - clip_low
    high,  # 1 + clip_high
    dual,  # dual clip, infinity for none
    beta,
    scale,  # 1 / temperature
    KL: tl.constexpr,
    HAS_OLD: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < count
    logprob = tl.load(logprobs_ptr + row, mask=present, other=0.0)
    advantage = tl.load(advantages_ptr + row, mask=present, other=0.0)
    if HAS_OLD:
        ratio = tl.exp(tl.minimum(logprob - tl.load(old_ptr + row, mask=present, other=0.0), _CAP))
    else:
        ratio = tl.full((ROWS,), 1.0, tl.float32)
    negative = advantage < 0
    clipped = tl.where(advantage > 0, ratio > high, negative & ((ratio < low) | (ratio > dual)))
    c = tl.where(clipped, 0.0, -ratio * advantage)
    if KL != "none":
        d = logprob - tl.load(ref_ptr + row, mask=present, other=0.0)
        if KL == "k1":
            kl = tl.full((ROWS,), 1.0, tl.float32)
        elif KL == "k2":
            kl = d
        elif KL == "k3":
            kl = -_expm1(tl.minimum(-d, _CAP))
        else:
            kl = _clamp(ratio * d, -_BOUND, _BOUND)
        c += beta * kl
    c = _clamp(c * (tl.load(weights_ptr + row, mask=present, other=0.0) * scale), -_BOUND, _BOUND)
    if ENTROPY:
        tl.store(factors_ptr + row, c, mask=present)
    else:
        normaliser = tl.exp(tl.load(log_normaliser_ptr + row, mask=present, other=0.0))
        tl.store(factors_ptr + row, _clamp(-c / normaliser, -_BOUND, _BOUND), mask=present)
        target = tl.load(targets_ptr + row, mask=present, other=0)
        at_target = (normaliser * _expm1(logprob)).to(exps_ptr.dtype.element_ty)
        tl.store(exps_ptr + row.to(tl.int64) * exps_stride_r + target, at_target, mask=present)


@triton.jit(do_not_specialize_on_alignment=[*_NARROW, "entropy_ptr"])
def _entropy_kernel(
    exps_ptr,  # [R, STORED] bf16 or fp32: e, overwritten by dz
    factors_ptr,  # [R] fp32: c, the target's coefficient
    log_normaliser_ptr,  # [R] fp32
    logprobs_ptr,  # [R] fp32
    entropy_ptr,  # [R] fp32
    weights_ptr,  # [R] fp32
    targets_ptr,  # [R] int64
    exps_stride_r,
    coefficient,  # entropy_coef / temperature
    STORED: tl.constexpr,  # columns, including the padding, where e = 0
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    log_normaliser = tl.load(log_normaliser_ptr + row)
    on_target = tl.load(factors_ptr + row)
    on_plogp = coefficient * tl.load(weights_ptr + row)
    on_probs = on_plogp * tl.load(entropy_ptr + row) - on_target
    logprob = tl.load(logprobs_ptr + row)
    at_target = on_target + tl.exp(logprob) * (on_probs + on_plogp * logprob)
    target = tl.load(targets_ptr + row)
    for start in range(0, STORED, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        ptrs = exps_ptr + row * exps_stride_r + column
        e = tl.load(ptrs, mask=column < STORED, other=0.0).to(tl.float32)
        # A probability that is rounded to 0 contributes 0, not 0 times infinity.
        logp = tl.log(tl.where(e > 0, e, 1.0)) - log_normaliser
        dz = tl.exp(logp) * (on_probs + on_plogp * logp)
        dz = tl.where(e > 0, dz, 0.0)
        dz = tl.where(column == target, at_target, dz)
        tl.store(ptrs, dz.to(exps_ptr.dtype.element_ty), mask=column < STORED)


class TritonLoss(TritonHead):
    """TritonHead, and the gradient of the loss by its logits: LossBackend of objective.py.

    columns: how many the returned gradient has, V or, padded with zeros, up to `stored_columns(V)`; None: V.
    """

    def __init__(self, lm_head_VH: Tensor, settings: LossSettings, rows: int, columns: int | None = None) -> None:
        super().__init__(lm_head_VH, settings.temperature, rows)
        self.settings = settings
        self.columns = len(lm_head_VH) if columns is None else columns

    def gradient(self, rows_RH: Tensor, part: LossRows) -> LogitGradient:
        logprobs_R, entropy_R, exps = self.exps(rows_RH, part.targets_R, part.old_R)
        factor_R = self._coefficients(logprobs_R, exps, part)
        if not self.settings.entropy_coef:
            return LogitGradient(logprobs_R, entropy_R, exps.exps_RV[:, : self.columns], factor_R)
        _entropy_kernel[(len(logprobs_R),)](
            exps.exps_RV,
            factor_R,
            exps.log_normaliser_R,
            logprobs_R,
            entropy_R,
            part.weights_R,
            part.targets_R,
            exps.exps_RV.stride(0),
            self.settings.entropy_coef / self.settings.temperature,
            STORED=exps.exps_RV.shape[1],
            COLUMNS=COLUMNS,
        )
        return LogitGradient(logprobs_R, entropy_R, exps.exps_RV[:, : self.columns], None)

    def _coefficients(self, logprobs_R: Tensor, exps: Exps, part: LossRows) -> Tensor:
        """Return the factor of each row; without an entropy bonus, turn the exps into their own gradient."""
        settings, old_R, advantages_R = self.settings, part.old_R, part.advantages_R
        estimator = settings.gradient_estimator
        if settings.surrogate != "clip" or part.slopes_R is not None:
            # torch computes the coefficients, in a few small launches per chunk. The kernel applies them like those of
            # -A log pi.
            advantages_R, old_R, estimator = -target_coefficients(logprobs_R, part, settings), None, "none"
        factor_R = torch.empty_like(logprobs_R)
        _coefficients_kernel[(triton.cdiv(len(factor_R), ROWS),)](
            logprobs_R,
            exps.log_normaliser_R,
            part.targets_R,
            logprobs_R if old_R is None else old_R,
            advantages_R,
            part.weights_R,
            logprobs_R if part.ref_R is None else part.ref_R,
            exps.exps_RV,
            factor_R,
            len(factor_R),
            exps.exps_RV.stride(0),
            1.0 - settings.clip_low,
            1.0 + settings.clip_high,
            float("inf") if settings.dual_clip is None else settings.dual_clip,
            settings.beta,
            1.0 / settings.temperature,
            KL=estimator,
            HAS_OLD=old_R is not None,
            ENTROPY=bool(settings.entropy_coef),
            ROWS=ROWS,
        )
        return factor_R


def specialisations() -> tuple[Specialisation, ...]:
    """Return a specialisation per KL gradient and the entropy's pass, for bfloat16 exps of Qwen2.5's vocabulary."""
    pointers = ("logprobs", "log_normaliser", "targets", "old", "advantages", "weights", "ref", "exps", "factors")
    types = {"targets": "*i64", "exps": "*bf16"}
    signature = {f"{name}_ptr": types.get(name, "*fp32") for name in pointers} | {
        "count": "i32",
        "exps_stride_r": "i32",
    }
    scalars: dict[str, Any] = dict.fromkeys(("low", "high", "dual", "beta", "scale"), "fp32")
    coefficients = tuple(
        Specialisation(
            name=f"coefficients {estimator}",
            kernel=_coefficients_kernel,
            signature=signature | scalars,
            constants={"KL": estimator, "HAS_OLD": True, "ENTROPY": False, "ROWS": ROWS},
            aligned=("exps_ptr", "exps_stride_r"),
        )
        for estimator in ("none", "k1", "k2", "k3", "k3_ratio")
    )
    order = ("exps", "factors", "log_normaliser", "logprobs", "entropy", "weights", "targets")
    entropy = Specialisation(
        name="entropy gradient",
        kernel=_entropy_kernel,
        signature={f"{name}_ptr": types.get(name, "*fp32") for name in order}
        | {"exps_stride_r": "i32", "coefficient": "fp32"},
        constants={"STORED": stored_columns(151_665), "COLUMNS": COLUMNS},
        aligned=("exps_ptr", "exps_stride_r"),
        wide=True,
        tile_bytes=2 * COLUMNS,
        work=ProgramWork(flops=0, bytes=4 * 151_936, trips=triton.cdiv(151_936, COLUMNS)),
    )
    return (*coefficients, entropy)
