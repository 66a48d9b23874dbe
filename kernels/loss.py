"""GRPO's loss from hidden states: LM head, log-prob, ratio, clip, KL and entropy in one pass.

    z = X W^T / temperature, p = softmax(z), l_t = log p[t, y_t], r_t = exp(l_t - old_t), d_t = l_t - ref_t
    loss = sum_t w_t (-min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) + beta KL(d_t, r_t) - entropy_coef H_t)
    dual clip c > 1, where A_t < 0: max(min(..), c A_t) instead of min(..)
    dloss/dl_t = w_t (beta c_KL - r_t A_t), without the second term where clipped; c_KL: the table in objective.py
    dloss/dz_tv = dloss/dl_t ([v = y_t] - p_tv) + w_t entropy_coef p_tv (log p_tv + H_t)
    dX = dz W / temperature, dW = dz^T X / temperature
    GRPO: Shao et al. 2024, eq. 3; asymmetric clip: Yu et al. 2025 (DAPO); dual clip: Ye et al. 2020, eq. 5
    other surrogates J(r_t, A_t) instead of min(..): objective.py

The logits of a chunk of rows are computed once: logits, dX, dW are three matmuls (6THV). The forward pass computes the
gradients; backward only scales them. Rows of weight 0 are dropped before the head. Rows known to have no gradient go
last, forward only. `TorchLoss` here and `TritonLoss` of coefficients_triton.py compute a chunk's log-probs and logit
gradients. The caller folds aggregation (1/|y|, token mean) into the weights. A surrogate that needs whole sequences
(GSPO, a user's own) adds a pass of log-probs before the chunks, 2THV more.

Axes: T tokens, R unmasked rows (or a chunk of them), M a padded chunk, H hidden width, V vocabulary
(docs/notation.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thresher.kernels.logprob import TorchHead, chunk_size, reference_token_logprobs
from thresher.kernels.objective import (
    PER_TOKEN,
    LogitGradient,
    LossBackend,
    LossResult,
    LossRows,
    LossSettings,
    Objective,
    assemble,
    logit_coefficients,
    slopes,
)
from thresher.kernels.operands import (
    RowCheck,
    add_head_product,
    any_bad,
    blas_ready,
    check_head,
    check_rows,
    compute_dtype,
    fill_rows,
    head_checks,
    hidden_product,
    on_device,
    raise_first,
    resolve_backend,
    scale_rows,
    stored_columns,
)

# old log-probs, advantages, weights, reference log-probs, sequence, turn: one number per row
_Vectors = tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def reference_grpo_loss(
    hidden_TH: Tensor,
    lm_head_VH: Tensor,
    targets_T: Tensor,
    old_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    ref_logprobs_T: Tensor | None = None,
    sequence_T: Tensor | None = None,
    turn_T: Tensor | None = None,
    vocab_size: int | None = None,
    **settings: Any,
) -> LossResult:
    """Compute the loss in plain torch, without checks, for tests and for reading.

    It materialises [R, V] and leaves the gradient to autograd. Arguments as `grpo_loss`; float64 stays float64."""
    chosen = LossSettings(**settings)
    index_R = weights_T.nonzero()[:, 0]
    vectors: _Vectors = (old_logprobs_T, advantages_T, weights_T, ref_logprobs_T, sequence_T, turn_T)
    rows = _gather_rows(index_R, targets_T, vectors, compute_dtype(hidden_TH))
    logprobs_R, entropy_R = reference_token_logprobs(
        hidden_TH[index_R], lm_head_VH, rows.targets_R, temperature=chosen.temperature, vocab_size=vocab_size
    )
    return assemble(logprobs_R, entropy_R, rows, chosen)


def _gather_rows(index_R: Tensor | None, targets_T: Tensor, vectors: _Vectors, dtype: torch.dtype) -> LossRows:
    """Return the rows of `index_R`, in that order (None: all rows, in the order of the inputs), as dense tensors."""

    def gather(values_T: Tensor) -> Tensor:
        return values_T.contiguous() if index_R is None else values_T.index_select(0, index_R)

    *floats, sequence_T, turn_T = vectors
    old_R, advantages_R, weights_R, ref_R = (
        None if values_T is None else gather(values_T.detach()).to(dtype) for values_T in floats
    )
    assert advantages_R is not None and weights_R is not None
    sequence_R, turn_R = (None if values_T is None else gather(values_T).long() for values_T in (sequence_T, turn_T))
    targets_R, length = gather(targets_T).long(), len(targets_T)
    return LossRows(index_R, targets_R, old_R, advantages_R, weights_R, ref_R, sequence_R, turn_R, length=length)


def _choose_rows(
    hidden_TH: Tensor,
    targets_T: Tensor,
    vectors: _Vectors,
    columns: int,
    settings: LossSettings,
    padding_UH: Tensor,
    deferred_checks: Sequence[list[RowCheck]],
) -> tuple[LossRows, int, bool]:
    """Return the unmasked rows (those with a gradient first), how many have one, and whether padding_UH is finite.

    The errors of `deferred_checks` are raised first, then those of this call's data. The call's one host sync is here
    (a user's objective is checked in another): flags and counts are copied to the host together.
    """
    dtype = compute_dtype(hidden_TH)
    old_T, advantages_T, weights_T, ref_T, sequence_T, turn_T = vectors
    exact_weights_T = weights_T.to(dtype)
    unmasked_T = exact_weights_T != 0
    checks = head_checks(hidden_TH, targets_T, columns)
    for name, values_T in (("old_logprobs_T", old_T), ("advantages_T", advantages_T), ("ref_logprobs_T", ref_T)):
        if values_T is not None:
            checks.append(RowCheck(name, ~values_T.to(dtype).isfinite(), values_T, "a finite number"))
    for name, numbers_T, least in (("sequence_T", sequence_T, 0), ("turn_T", turn_T, -1)):
        if numbers_T is not None:
            outside_T = (numbers_T < least) | (numbers_T >= len(targets_T))
            checks.append(RowCheck(name, outside_T, numbers_T, f"a number from {least} to {len(targets_T) - 1}"))
    checks = [check._replace(bad_T=check.bad_T & unmasked_T) for check in checks]
    bad_T = ~((exact_weights_T >= 0) & exact_weights_T.isfinite())
    checks.append(RowCheck("weights_T", bad_T, weights_T, "a finite number of at least 0"))

    masked_T = ~unmasked_T
    idle_T = masked_T if settings.every_row_has_gradient else masked_T | (advantages_T == 0)
    finite = padding_UH.detach().isfinite().all().long()
    calls = [*deferred_checks, checks]
    flags = (any_bad(call).long() for call in calls)
    finite, idle, masked, *bad = torch.stack((finite, idle_T.sum(), masked_T.sum(), *flags)).tolist()
    for call, has_bad in zip(calls, bad, strict=True):
        if has_bad:
            raise_first(call)
    if not idle:
        return _gather_rows(None, targets_T, vectors, dtype), len(targets_T), bool(finite)
    order_T = torch.sort(idle_T.to(torch.uint8) + masked_T.to(torch.uint8), stable=True).indices
    rows = _gather_rows(order_T[: len(targets_T) - masked], targets_T, vectors, dtype)
    return rows, len(targets_T) - idle, bool(finite)


class TorchLoss(TorchHead):
    """The torch backend: turns the chunk's probabilities in place into the gradient of its logits."""

    def __init__(self, lm_head_VH: Tensor, settings: LossSettings, rows: int) -> None:
        super().__init__(lm_head_VH, settings.temperature, rows)
        self.settings = settings

    def gradient(self, rows_RH: Tensor, part: LossRows) -> LogitGradient:
        done = self.token_rows(fill_rows(rows_RH, self.lm_head_VH), part.targets_R)
        on_target_R, on_probs_R, on_plogp_R = logit_coefficients(done.logprobs_R, done.entropy_R, part, self.settings)
        targets_R1 = part.targets_R[:, None]
        if on_plogp_R is None:
            # c ([v = y] - p) = -c (p - [v = y]): one number per row changes, the factor goes to the narrow operands.
            dlogits_RV = done.probs_RV.scatter_(1, targets_R1, torch.expm1(done.logprobs_R)[:, None])
            return LogitGradient(done.logprobs_R, done.entropy_R, dlogits_RV, factor_R=-on_target_R)
        # p log p = p (z - m) - p log_sum
        dlogits_RV = done.probs_RV.mul_((on_probs_R - on_plogp_R * done.log_sum_R)[:, None])
        dlogits_RV.addcmul_(done.pz_RV, on_plogp_R[:, None])
        # One target per row: read, add, write is deterministic on every device, unlike scatter_add_.
        dlogits_RV.scatter_(1, targets_R1, dlogits_RV.gather(1, targets_R1) + on_target_R[:, None])
        return LogitGradient(done.logprobs_R, done.entropy_R, dlogits_RV, None)


def _padded(backend: str, lm_head_VH: Tensor, columns: int) -> int:
    """Return the number of columns of logits, at least `columns`, that the matmuls with dlogits run over.

    A matmul over an odd number of columns cannot use the tensor cores' aligned kernels. The Triton backend stores zeros
    up to the next multiple. They are included if the head has rows for them: see `grpo_loss`, vocab_size.
    """
    padded = stored_columns(columns)
    return padded if backend == "triton" and padded <= len(lm_head_VH) else columns


def _make_backend(backend: str, head_VH: Tensor, columns: int, settings: LossSettings, rows: int) -> LossBackend:
    """Make the backend. head_VH: the rows of token ids that exist, then rows that are multiplied by zeros."""
    if backend == "triton":
        from thresher.kernels.coefficients_triton import TritonLoss  # triton is not installed everywhere

        return TritonLoss(head_VH[:columns], settings, rows, len(head_VH))
    return TorchLoss(head_VH, settings, rows)


def _run_chunks(
    backend: LossBackend,
    hidden_TH: Tensor,
    head_VH: Tensor,
    rows: LossRows,
    grad_rows: int,
    chunk_rows: int,
    hidden_grad_TH: Tensor | None,
    head_grad_VH: Tensor | None,
    add_to_head_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs_R, entropy_R, logit_gradients_R) of all rows, and write the gradients.

    The first `grad_rows` rows write their rows of hidden_grad_TH, and add to head_grad_VH or overwrite it, where
    these are given. The logit gradients of the other rows are 0."""
    count = len(rows)
    logprobs_R, entropy_R, logit_gradients_R = hidden_TH.new_zeros((3, count), dtype=compute_dtype(hidden_TH))

    def run(chunk: slice) -> None:  # a function, so that a chunk's temporaries are freed before the next chunk
        part = rows.part(chunk)
        index_R = part.index_R
        rows_RH = hidden_TH[chunk].contiguous() if index_R is None else hidden_TH.index_select(0, index_R)
        if chunk.start >= grad_rows:
            logprobs_R[chunk], entropy_R[chunk] = backend.logprobs(rows_RH, part.targets_R)
            return
        done = backend.gradient(rows_RH, part)
        logprobs_R[chunk], entropy_R[chunk] = done.logprobs_R, done.entropy_R
        logit_gradients_R[chunk] = done.dlogits_RV.gather(1, part.targets_R[:, None])[:, 0]
        if done.factor_R is not None:
            logit_gradients_R[chunk] *= done.factor_R
        if hidden_grad_TH is not None:
            grad_RH = hidden_product(done.dlogits_RV, head_VH)
            grad_RH = grad_RH if done.factor_R is None else grad_RH.mul_(done.factor_R[:, None])
            if index_R is None:
                hidden_grad_TH[chunk] = grad_RH
            else:
                hidden_grad_TH.index_copy_(0, index_R, grad_RH.to(hidden_grad_TH.dtype))
            del grad_RH
        if head_grad_VH is not None:
            keep = add_to_head_grad or chunk.start > 0
            add_head_product(head_grad_VH, done.dlogits_RV, scale_rows(rows_RH, done.factor_R), keep)

    for start in range(0, grad_rows, chunk_rows):
        run(slice(start, min(start + chunk_rows, grad_rows)))
    for start in range(grad_rows, count, chunk_rows):
        run(slice(start, min(start + chunk_rows, count)))
    return logprobs_R, entropy_R, logit_gradients_R


class _WithGradients(torch.autograd.Function):
    """Attaches the gradients that were computed with a loss to it; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        lm_head_VH: Tensor,
        loss: Tensor,
        hidden_grad_TH: Tensor | None,
        head_grad_VH: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden_grad_TH, head_grad_VH)
        ctx.hidden_dtype, ctx.head_dtype = hidden_TH.dtype, lm_head_VH.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_TH, head_grad_VH = ctx.saved_tensors
        return (
            # In float32: float16 cannot hold a loss scale of 65,536, and bfloat16 not 1/3.
            None if hidden_grad_TH is None else (hidden_grad_TH.to(grad.dtype) * grad).to(ctx.hidden_dtype),
            # Rounded while it is stored, so that no second float32 [V, H] is written and read.
            None
            if head_grad_VH is None
            else torch.mul(head_grad_VH, grad, out=torch.empty_like(head_grad_VH, dtype=ctx.head_dtype)),
            None,
            None,
            None,
        )


def _check_buffer(buffer_VH: Tensor, lm_head_VH: Tensor) -> None:
    dtype = compute_dtype(lm_head_VH)
    fits = buffer_VH.shape == lm_head_VH.shape and buffer_VH.device == lm_head_VH.device
    if not fits or buffer_VH.dtype != dtype:
        raise ValueError(
            f"lm_head_grad_VH is {buffer_VH.dtype} {tuple(buffer_VH.shape)} on {buffer_VH.device}; "
            f"expected {dtype} {tuple(lm_head_VH.shape)} on {lm_head_VH.device}"
        )


def grpo_loss(
    hidden_TH: Tensor,
    lm_head_VH: Tensor,
    targets_T: Tensor,
    old_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    ref_logprobs_T: Tensor | None = None,
    temperature: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_value: str = "k3",
    kl_gradient: str | None = None,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    surrogate: str | Objective = "clip",
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    divergence: float = 0.15,
    guard: float = 0.0,
    guard_zero: bool = True,
    sequence_T: Tensor | None = None,
    turn_T: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    lm_head_grad_VH: Tensor | None = None,
    deferred_checks: Sequence[list[RowCheck]] = (),
) -> LossResult:
    """Compute loss = sum_t weights_t * (-min(r A, clip(r) A) + beta * KL_t - entropy_coef * H_t), in nats.

    hidden_TH [T, H] and lm_head_VH [V, H]: same dtype (float32, bfloat16, float16, float64) and device, any
    strides. targets_T: [T] int64 or int32. old_logprobs_T, advantages_T, weights_T, ref_logprobs_T: [T],
    floating; they get no gradient. A row of weight 0 is masked: none of its other values is read.
    old_logprobs_T None: the policy is its own old policy, every ratio is 1 and the gradient that of -A log pi; with
    advantages of 1 it is the gradient of supervised fine-tuning, whose loss is then -(weights * logprobs).sum().
    temperature: divides the logits. clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high].
    dual_clip: c > 1, or None.
    surrogate: one of objective.SURROGATES, or a function as that file describes it; those of whole sequences need
    sequence_T, [T] int64 or int32, the number of each token's sequence, from 0 and below T. clip_low, clip_high: of
    clip, cispo, gspo and gmpo. dual_clip: of clip and gspo. tau_positive, tau_negative: of sapo. divergence: delta of
    dppo. guard: lambda of LLDS, which needs turn_T, [T] int64 or int32, the number of each token's turn, from 0 and
    below T, or -1 for a token that is not guarded. guard_zero: tokens of advantage 0 are guarded, too.
    kl_value, kl_gradient: "k1", "k2", "k3", "k3_ratio" or "none"; the estimator whose value is in the loss,
    and the one whose gradient is taken (None: the same one). beta > 0 needs ref_logprobs_T.
    vocab_size: token ids from there on do not exist. Their rows of the head change no result and get no gradient. The
    torch backend does not read them. The Triton backend reads those up to the next multiple of 64 columns, if the
    head has them all and all are finite, because a matmul is faster over whole multiples: their dloss/dlogits is 0.
    chunk_rows: rows that are processed at a time; None: at most what fits in workspace_bytes.
    workspace_bytes: of a chunk's buffers; None: 256 MiB on a CPU, 560 on CUDA. Every chunk reads and writes dW once,
    so 1.2 GiB, 3 chunks of 8,192 rows instead of 5, take less time on CUDA if that memory is available.
    backend: "torch"; "triton" for bfloat16 or float32 on CUDA; "auto": Triton for bfloat16 on CUDA, else torch.

    The loss is differentiable in hidden and head, for any upstream scale. An input that needs no gradient costs
    no matmul; under `torch.no_grad()` the call is forward only. Given lm_head_grad_VH (float32 [V, H], the
    head's own gradient buffer), dW is added to it in the call, the loss is detached, and the caller runs
    `hidden_TH.backward(result.hidden_grad_TH)`; any scale then belongs in weights_T.
    deferred_checks: checks that `token_logprobs` left to its caller; their errors are raised first, in this call's
    one sync.

    Raises ValueError naming the argument, and the first offending index: shapes, dtypes or devices that do
    not fit, a target outside the vocabulary, a negative weight, a number that is not finite in an unmasked row
    (before anything is added to lm_head_grad_VH). The head itself is not checked: a NaN there is a NaN in
    the loss.
    """
    settings = LossSettings(
        temperature=temperature,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl_value=kl_value,
        kl_gradient=kl_gradient,
        beta=beta,
        entropy_coef=entropy_coef,
        surrogate=surrogate,
        tau_positive=tau_positive,
        tau_negative=tau_negative,
        divergence=divergence,
        guard=guard,
        guard_zero=guard_zero,
    )
    columns = check_head(hidden_TH, lm_head_VH, targets_T, vocab_size, chunk_rows)
    backend = resolve_backend(backend, hidden_TH)
    vectors: _Vectors = (old_logprobs_T, advantages_T, weights_T, ref_logprobs_T, sequence_T, turn_T)
    names = ("old_logprobs_T", "advantages_T", "weights_T", "ref_logprobs_T")
    for name, values_T in zip(names, vectors, strict=False):
        if values_T is not None:
            check_rows(name, values_T, hidden_TH)
    needed = {"sequence_T": settings.surrogate not in PER_TOKEN, "turn_T": guard > 0}
    for name, numbers_T in (("sequence_T", sequence_T), ("turn_T", turn_T)):
        if numbers_T is None and needed[name]:
            raise ValueError(f"{name} is None; expected numbers [T] with surrogate = {surrogate!r} and guard = {guard}")
        if numbers_T is not None:
            check_rows(name, numbers_T, hidden_TH, (torch.int64, torch.int32))
    if beta and ref_logprobs_T is None:
        raise ValueError(f"beta is {beta} but ref_logprobs_T is None; expected reference log-probs, or beta 0")
    if lm_head_grad_VH is not None:
        _check_buffer(lm_head_grad_VH, lm_head_VH)
    grad_mode = torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast(hidden_TH.device.type, enabled=False), on_device(hidden_TH):
        padded = _padded(backend, lm_head_VH, columns)
        rows, grad_rows, finite = _choose_rows(
            hidden_TH, targets_T, vectors, columns, settings, lm_head_VH[columns:padded], deferred_checks
        )
        padded = padded if finite else columns
        hidden_grad_TH = None
        if grad_mode and hidden_TH.requires_grad:
            # A gradient below float16's smallest number must survive until backward scales it.
            scaled_later = hidden_TH.dtype == torch.float16 and lm_head_grad_VH is None
            hidden_grad_TH = torch.zeros_like(hidden_TH, dtype=torch.float32 if scaled_later else None)
        head_grad_VH = lm_head_grad_VH if grad_mode else None
        if grad_mode and lm_head_VH.requires_grad and lm_head_grad_VH is None:
            head_grad_VH = torch.empty_like(lm_head_VH, dtype=compute_dtype(lm_head_VH))
            # The first chunk overwrites its columns, so only the rest is filled with zeros.
            head_grad_VH[columns if grad_rows else 0 :] = 0
        forward_only = hidden_grad_TH is None and head_grad_VH is None
        if forward_only:
            # Without gradients, splitting the rows into two kinds would only add a chunk.
            grad_rows = 0
        head_VH = blas_ready(lm_head_VH[:padded])
        most_rows = max(grad_rows, len(rows) - grad_rows)
        rows_at_once = chunk_size(chunk_rows, workspace_bytes, backend, head_VH[:columns], most_rows)
        made = _make_backend(backend, head_VH, columns, settings, rows_at_once)
        if not settings.per_token and grad_rows:
            logprobs_R, *_ = _run_chunks(made, hidden_TH, head_VH, rows, 0, rows_at_once, None, None, False)
            rows = replace(rows, slopes_R=slopes(logprobs_R, rows, settings))
        logprobs_R, entropy_R, logit_gradients_R = _run_chunks(
            made,
            hidden_TH,
            head_VH,
            rows,
            grad_rows,
            rows_at_once,
            hidden_grad_TH,
            None if head_grad_VH is None else head_grad_VH[:padded],
            add_to_head_grad=lm_head_grad_VH is not None,
        )
        of_logits_R = None if forward_only else logit_gradients_R
        result = assemble(logprobs_R, entropy_R, rows, settings, of_logits_R)
    if lm_head_grad_VH is not None:
        return replace(result, hidden_grad_TH=hidden_grad_TH)
    if forward_only:
        return result
    return replace(result, loss=_WithGradients.apply(hidden_TH, lm_head_VH, result.loss, hidden_grad_TH, head_grad_VH))
