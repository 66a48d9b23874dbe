"""The cases of `thresher bench loss`, and the float64 truth that each contender is compared with.

A case resembles a training batch. Rows lean towards their target by a random amount, so that log-probs range from a
guess to near certainty, and logits up to about 20. Old and reference log-probs are scattered around the new ones. There
is one advantage per sequence, of either sign, and a mask of runs. The loss is GRPO's with k3, averaged over the
unmasked tokens, which every peer implements (called "dapo" there). The truth is computed separately here, in float64,
without any of our kernels. Each ratio is at least MARGIN away from the clip, in nats, so that rounding cannot change
its side.

Axes: T tokens, B sequences, Q tokens of a sequence, R unmasked rows, E sampled rows, F sampled columns, H hidden width,
V vocabulary (docs/notation.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH, BETA = 0.2, 0.28, 0.04
LOGIT_STD, LARGEST_LEAN = 2.5, 2.5  # a lean of a adds about a * LOGIT_STD**2 to the target's logit
RATIO_STD, MARGIN = 0.15, 0.07  # nats; MARGIN is half a bfloat16 step of a logit near 20
SEQUENCE = 1024  # tokens of a sequence, or a quarter of the batch if that is less
RUN = 48  # approximate tokens in a run of the mask
SAMPLED_ROWS, SAMPLED_COLUMNS = 64, 128
TRUTH_BYTES = 512 * 2**20  # one buffer of a block of rows in float64
# Vocabulary -> rows of the head, if it has more rows than tokens exist: Qwen2.5's and its tokenizer's. Ours gets all
# rows and the number of columns; a peer gets only the existing rows, in the same memory.
HEAD_ROWS = {151_665: 151_936}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShape:
    """One case. density: percentage of active (unmasked) rows."""

    tokens: int
    hidden: int
    vocab: int
    density: int

    @property
    def active(self) -> int:
        return max(self.tokens * self.density // 100, 1)

    @property
    def sequences(self) -> int:
        """Return B, the largest divisor of the tokens that is at most the number that SEQUENCE implies."""
        wanted = max(self.tokens // SEQUENCE, 4)
        return max(count for count in range(1, wanted + 1) if self.tokens % count == 0)

    @property
    def head_rows(self) -> int:
        return HEAD_ROWS.get(self.vocab, self.vocab)

    @property
    def flops(self) -> int:
        """Return the operations of the three matmuls that any forward and backward needs, over the unmasked rows."""
        return 6 * self.active * self.hidden * self.vocab

    def __str__(self) -> str:
        return f"H {self.hidden:,}, V {self.vocab:,}, T {self.tokens:,}, {self.density}% active"


@dataclass(frozen=True, slots=True, eq=False)
class LossCase:
    """The tensors of one case. hidden_TH, head_VH and whole_head are leaves that require gradients; the others are
    float32 or int64. whole_head: [shape.head_rows, H], whose first V rows share the memory of head_VH.

    weights_T is 1/R at unmasked rows and 0 elsewhere; under the mask, old and reference log-probs are 0.
    """

    shape: LossShape
    hidden_TH: Tensor
    head_VH: Tensor
    whole_head: Tensor
    targets_T: Tensor
    mask_T: Tensor
    old_T: Tensor
    ref_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    index_R: Tensor

    @property
    def device(self) -> torch.device:
        return self.hidden_TH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_TH.dtype

    @property
    def advantages_B(self) -> Tensor:
        return self.sequences(self.advantages_T)[:, 0].contiguous()

    def sequences(self, values: Tensor) -> Tensor:
        """Return [T, ..] as [B, Q, ..]."""
        return values.view(self.shape.sequences, -1, *values.shape[1:])

    def drop_gradients(self) -> None:
        self.hidden_TH.grad = self.head_VH.grad = self.whole_head.grad = None


def make_case(shape: LossShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LossCase:
    """Make the case's tensors, identical for the same arguments on the same kind of device."""
    noise = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=noise, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=noise, device=device)

    whole_head = (normal(shape.head_rows, shape.hidden) * (LOGIT_STD / math.sqrt(shape.hidden))).to(dtype)
    head_VH = whole_head[: shape.vocab]
    targets_T = torch.randint(shape.vocab, (shape.tokens,), generator=noise, device=device)
    lean_T = LARGEST_LEAN * uniform(shape.tokens)
    hidden_TH = normal(shape.tokens, shape.hidden)
    # In parts, because a float32 copy of the head's rows is as large as the hidden states.
    for part in torch.arange(shape.tokens, device=device).split(4096):
        hidden_TH[part] += lean_T[part, None] * head_VH[targets_T[part]].float()
    hidden_TH = hidden_TH.to(dtype)
    mask_T = _mask(uniform(shape.tokens), shape.active)
    index_R = mask_T.nonzero()[:, 0]
    logprobs_R = torch.cat([part_R for part_R, _ in _logprobs(hidden_TH, head_VH, targets_T, index_R, torch.float32)])

    def spread(values_R: Tensor) -> Tensor:
        return torch.zeros(shape.tokens, device=device).index_copy_(0, index_R, values_R)

    old_T = spread(logprobs_R - _away_from_clip(RATIO_STD * normal(shape.active)))
    ref_T = spread(logprobs_R - RATIO_STD * normal(shape.active))
    advantages_T = normal(shape.sequences).repeat_interleave(shape.tokens // shape.sequences)
    return LossCase(
        shape,
        hidden_TH.requires_grad_(),
        head_VH.requires_grad_(),
        whole_head.detach().requires_grad_(),
        targets_T,
        mask_T,
        old_T,
        ref_T,
        advantages_T,
        mask_T.float() / shape.active,
        index_R,
    )


def _mask(noise_T: Tensor, active: int) -> Tensor:
    """Return a mask of `active` rows, in runs: where the moving mean of noise is largest."""
    width = min(RUN, len(noise_T))
    smooth_T = torch.nn.functional.avg_pool1d(noise_T[None], width, 1, width // 2)[0, : len(noise_T)]
    return torch.zeros_like(noise_T, dtype=torch.bool).index_fill_(0, smooth_T.topk(active).indices, True)


def _away_from_clip(log_ratios_R: Tensor) -> Tensor:
    for edge in (math.log(1 - CLIP_LOW), math.log(1 + CLIP_HIGH)):
        offset_R = log_ratios_R - edge
        log_ratios_R = torch.where(offset_R.abs() < MARGIN, edge + offset_R.sign() * MARGIN, log_ratios_R)
    return log_ratios_R


def objective(logprobs_R: Tensor, old_R: Tensor, ref_R: Tensor, advantages_R: Tensor, weights_R: Tensor) -> Tensor:
    """Return GRPO's loss of every row, [R], from its log-prob, in plain torch: for some peers, and the truth."""
    ratios_R = (logprobs_R - old_R).exp()
    clipped_R = ratios_R.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_R = torch.minimum(ratios_R * advantages_R, clipped_R * advantages_R)
    log_ref_ratio_R = logprobs_R - ref_R
    kl_R = torch.expm1(-log_ref_ratio_R) + log_ref_ratio_R
    return weights_R * (BETA * kl_R - gain_R)


def _logprobs(
    hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, index_R: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (log-probs, log-sum-exps) of the rows `index_R`, computed in `dtype`, a part at a time."""
    head_VH = head_VH.detach().to(dtype)
    for part in index_R.split(max(TRUTH_BYTES // (8 * len(head_VH)), 1)):
        logits_RV = hidden_TH.detach()[part].to(dtype) @ head_VH.t()
        lse_R = logits_RV.logsumexp(1)
        yield logits_RV.gather(1, targets_T[part][:, None])[:, 0] - lse_R, lse_R


@dataclass(frozen=True, slots=True, eq=False)
class LossTruth:
    """Exact figures of a case, in float64. loss_scale: the sum of the rows' absolute losses, which partly cancel."""

    loss: float
    loss_scale: float
    index_R: Tensor  # indices of the unmasked rows
    logprobs_R: Tensor
    rows_E: Tensor  # indices of the sampled rows in hidden_TH
    hidden_grad_EH: Tensor
    columns_F: Tensor
    head_grad_FH: Tensor


@dataclass(frozen=True, slots=True)
class LossOutcome:
    """The results of one forward and backward. logprobs: of all or of the unmasked rows; None if a peer has none."""

    loss: Tensor
    logprobs: Tensor | None
    hidden_grad_TH: Tensor
    head_grad_VH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors against float64. loss: relative to the sum of the rows' absolute losses; logprob: largest, in nats;
    gradients: Frobenius norm of the difference / norm of the truth, over the sampled rows."""

    loss: float
    logprob: float | None
    hidden_grad: float
    head_grad: float

    def worse_than(self, logprob: float, gradient: float) -> list[str]:
        """Return the names of errors beyond their limit (`gradient` also for the loss); NaN is beyond any limit."""
        limits = {"loss": gradient, "logprob": logprob, "hidden_grad": gradient, "head_grad": gradient}
        values = {name: getattr(self, name) for name in limits}
        return [name for name, limit in limits.items() if values[name] is not None and not values[name] <= limit]


def truth_of(case: LossCase, seed: int = 1) -> LossTruth:
    """Compute the exact figures: two passes over the vocabulary for some rows, one for the others."""
    noise = torch.Generator().manual_seed(seed)
    hidden_TH, head_VH, index_R = case.hidden_TH.detach(), case.head_VH.detach(), case.index_R
    parts = list(_logprobs(hidden_TH, head_VH, case.targets_T, index_R, torch.float64))
    logprobs_R = torch.cat([part_R for part_R, _ in parts]).requires_grad_()
    lse_R = torch.cat([part_R for _, part_R in parts])
    vectors = (vector_T[index_R].double() for vector_T in (case.old_T, case.ref_T, case.advantages_T, case.weights_T))
    losses_R = objective(logprobs_R, *vectors)
    (coefficients_R,) = torch.autograd.grad(losses_R.sum(), logprobs_R)
    losses_R = losses_R.detach()

    targets_R = case.targets_T[index_R]
    pick_E = torch.randperm(len(index_R), generator=noise)[:SAMPLED_ROWS].to(case.device)
    head64_VH = head_VH.double()
    dlogits_EV = (hidden_TH[index_R[pick_E]].double() @ head64_VH.t() - lse_R[pick_E, None]).exp_().neg_()
    dlogits_EV.scatter_add_(1, targets_R[pick_E, None], dlogits_EV.new_ones(len(pick_E), 1))
    hidden_grad_EH = (dlogits_EV * coefficients_R[pick_E, None]) @ head64_VH
    del dlogits_EV, head64_VH

    # Half of the columns are targets of some row, half are random.
    some_F = torch.randperm(case.shape.vocab, generator=noise)[: SAMPLED_COLUMNS // 2].to(case.device)
    columns_F = torch.cat((targets_R[:: max(len(targets_R) // (SAMPLED_COLUMNS // 2), 1)], some_F)).unique()
    rows_RH = hidden_TH[index_R].double()
    dlogits_RF = (rows_RH @ head_VH[columns_F].double().t() - lse_R[:, None]).exp_().neg_()
    dlogits_RF += targets_R[:, None] == columns_F
    return LossTruth(
        loss=float(losses_R.sum()),
        loss_scale=float(losses_R.abs().sum()),
        index_R=index_R,
        logprobs_R=logprobs_R.detach(),
        rows_E=index_R[pick_E],
        hidden_grad_EH=hidden_grad_EH,
        columns_F=columns_F,
        head_grad_FH=(dlogits_RF * coefficients_R[:, None]).t() @ rows_RH,
    )


def errors_of(outcome: LossOutcome, truth: LossTruth) -> Errors:
    logprob = None
    if outcome.logprobs is not None:
        all_rows = len(outcome.logprobs) != len(truth.index_R)
        found_R = outcome.logprobs[truth.index_R] if all_rows else outcome.logprobs
        logprob = float((found_R.detach().double() - truth.logprobs_R).abs().max())
    return Errors(
        loss=abs(float(outcome.loss.detach()) - truth.loss) / truth.loss_scale,
        logprob=logprob,
        hidden_grad=_distance(outcome.hidden_grad_TH[truth.rows_E], truth.hidden_grad_EH),
        head_grad=_distance(outcome.head_grad_VH[truth.columns_F], truth.head_grad_FH),
    )


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().double() - truth).norm() / truth.norm())
