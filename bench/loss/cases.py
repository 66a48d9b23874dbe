"""What `thresher bench loss` feeds every contender, and the float64 truth that each is held to.

A case looks like a training batch: rows of hidden states that lean towards their target by a random amount, so that
log-probs run from a guess to near certainty and logits up to about 20; old and reference log-probs scattered around the
new ones; one advantage a sequence, of either sign; a mask of runs. The loss is GRPO's with k3 in it, averaged over the
active tokens, because that is the one every peer has ("dapo" in their words).

The truth is written out here once more, in float64 and from nothing of ours: the log-prob and the coefficient of every
active row, and from these the loss, the gradient of some hidden rows and of some rows of the head. A ratio stands at
least MARGIN away from the clip, in nats: which side of it a row falls on is no matter of rounding, and gradients can be
compared.

Deliberately absent: entropy, dual clip and other KL estimators, which the peers do not share; the tests hold those.

Legend: T tokens, B sequences, L tokens of a sequence, N active rows, S sampled rows, C sampled columns, H hidden width,
V vocabulary.
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
RUN = 48  # tokens that a stretch of the mask has, roughly
SAMPLED_ROWS, SAMPLED_COLUMNS = 64, 128
TRUTH_BYTES = 512 * 2**20  # one buffer of a block of rows in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One case. density: the share of active rows, in percent."""

    tokens: int
    hidden: int
    vocab: int
    density: int

    @property
    def active(self) -> int:
        return max(self.tokens * self.density // 100, 1)

    @property
    def sequences(self) -> int:
        """B: the number of sequences that divides the tokens and is nearest below what SEQUENCE asks for."""
        wanted = max(self.tokens // SEQUENCE, 4)
        return max(count for count in range(1, wanted + 1) if self.tokens % count == 0)

    @property
    def flops(self) -> int:
        """Of the three matmuls that a forward and a backward cannot do without, over the active rows."""
        return 6 * self.active * self.hidden * self.vocab

    def __str__(self) -> str:
        return f"H {self.hidden:,}, V {self.vocab:,}, T {self.tokens:,}, {self.density}% active"


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The tensors of one case. hidden_TH and head_VH are leaves that want gradients; the others are float32 or int64.

    weights_T is 1/N at active rows and 0 elsewhere; under the mask, old and reference log-probs are 0.
    """

    shape: Shape
    hidden_TH: Tensor
    head_VH: Tensor
    targets_T: Tensor
    mask_T: Tensor
    old_T: Tensor
    ref_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    index_N: Tensor

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
        """[T, ..] as [B, L, ..]."""
        return values.view(self.shape.sequences, -1, *values.shape[1:])

    def drop_gradients(self) -> None:
        self.hidden_TH.grad = self.head_VH.grad = None


def make_case(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Case:
    """The case's tensors, the same for the same arguments on the same kind of device."""
    noise = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=noise, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=noise, device=device)

    head_VH = (normal(shape.vocab, shape.hidden) * (LOGIT_STD / math.sqrt(shape.hidden))).to(dtype)
    targets_T = torch.randint(shape.vocab, (shape.tokens,), generator=noise, device=device)
    lean_T = LARGEST_LEAN * uniform(shape.tokens)
    hidden_TH = normal(shape.tokens, shape.hidden)
    # In parts, for a float32 copy of the head's rows is as large as the hidden states.
    for part in torch.arange(shape.tokens, device=device).split(4096):
        hidden_TH[part] += lean_T[part, None] * head_VH[targets_T[part]].float()
    hidden_TH = hidden_TH.to(dtype)
    mask_T = _mask(uniform(shape.tokens), shape.active)
    index_N = mask_T.nonzero()[:, 0]
    logprobs_N = torch.cat([part_N for part_N, _ in _logprobs(hidden_TH, head_VH, targets_T, index_N, torch.float32)])

    def spread(values_N: Tensor) -> Tensor:
        return torch.zeros(shape.tokens, device=device).index_copy_(0, index_N, values_N)

    old_T = spread(logprobs_N - _away_from_clip(RATIO_STD * normal(shape.active)))
    ref_T = spread(logprobs_N - RATIO_STD * normal(shape.active))
    advantages_T = normal(shape.sequences).repeat_interleave(shape.tokens // shape.sequences)
    return Case(
        shape,
        hidden_TH.requires_grad_(),
        head_VH.requires_grad_(),
        targets_T,
        mask_T,
        old_T,
        ref_T,
        advantages_T,
        mask_T.float() / shape.active,
        index_N,
    )


def _mask(noise_T: Tensor, active: int) -> Tensor:
    """`active` rows, in runs: where the moving mean of noise is largest."""
    width = min(RUN, len(noise_T))
    smooth_T = torch.nn.functional.avg_pool1d(noise_T[None], width, 1, width // 2)[0, : len(noise_T)]
    return torch.zeros_like(noise_T, dtype=torch.bool).index_fill_(0, smooth_T.topk(active).indices, True)


def _away_from_clip(log_ratios_N: Tensor) -> Tensor:
    for edge in (math.log(1 - CLIP_LOW), math.log(1 + CLIP_HIGH)):
        offset_N = log_ratios_N - edge
        log_ratios_N = torch.where(offset_N.abs() < MARGIN, edge + offset_N.sign() * MARGIN, log_ratios_N)
    return log_ratios_N


def objective(logprobs_N: Tensor, old_N: Tensor, ref_N: Tensor, advantages_N: Tensor, weights_N: Tensor) -> Tensor:
    """GRPO's loss of every row, [N], from its log-prob, in plain torch: for peers that end there, and for the truth."""
    ratios_N = (logprobs_N - old_N).exp()
    clipped_N = ratios_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_N = torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)
    log_ref_ratio_N = logprobs_N - ref_N
    kl_N = torch.expm1(-log_ref_ratio_N) + log_ref_ratio_N
    return weights_N * (BETA * kl_N - gain_N)


def _logprobs(
    hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, index_N: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """(log-probs, log-sum-exps) of the rows `index_N`, computed in `dtype`, a part at a time."""
    head_VH = head_VH.detach().to(dtype)
    for part in index_N.split(max(TRUTH_BYTES // (8 * len(head_VH)), 1)):
        logits_NV = hidden_TH.detach()[part].to(dtype) @ head_VH.t()
        lse_N = logits_NV.logsumexp(1)
        yield logits_NV.gather(1, targets_T[part][:, None])[:, 0] - lse_N, lse_N


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Float64, from the case's own numbers. loss_scale: the sum of the rows' absolute losses, which cancel."""

    loss: float
    loss_scale: float
    index_N: Tensor  # where the active rows stand
    logprobs_N: Tensor
    rows_S: Tensor  # where the sampled rows stand in hidden_TH
    hidden_grad_SH: Tensor
    columns_C: Tensor
    head_grad_CH: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one forward and backward left. logprobs: of all rows or of the active ones; None where a peer has none."""

    loss: Tensor
    logprobs: Tensor | None
    hidden_grad_TH: Tensor
    head_grad_VH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Against float64. loss: relative to the sum of the rows' absolute losses; logprob: largest, in nats; gradients:
    Frobenius norm of the difference by that of the truth, over the sampled rows."""

    loss: float
    logprob: float | None
    hidden_grad: float
    head_grad: float

    def worse_than(self, logprob: float, gradient: float) -> list[str]:
        """The names of those beyond their limit (`gradient` is also the loss's); NaN is beyond any."""
        limits = {"loss": gradient, "logprob": logprob, "hidden_grad": gradient, "head_grad": gradient}
        values = {name: getattr(self, name) for name in limits}
        return [name for name, limit in limits.items() if values[name] is not None and not values[name] <= limit]


def truth_of(case: Case, seed: int = 1) -> Truth:
    """The exact figures: two passes over the vocabulary for some rows, one for the others."""
    noise = torch.Generator().manual_seed(seed)
    hidden_TH, head_VH, index_N = case.hidden_TH.detach(), case.head_VH.detach(), case.index_N
    parts = list(_logprobs(hidden_TH, head_VH, case.targets_T, index_N, torch.float64))
    logprobs_N = torch.cat([part_N for part_N, _ in parts]).requires_grad_()
    lse_N = torch.cat([part_N for _, part_N in parts])
    vectors = (vector_T[index_N].double() for vector_T in (case.old_T, case.ref_T, case.advantages_T, case.weights_T))
    losses_N = objective(logprobs_N, *vectors)
    (coefficients_N,) = torch.autograd.grad(losses_N.sum(), logprobs_N)
    losses_N = losses_N.detach()

    targets_N = case.targets_T[index_N]
    pick_S = torch.randperm(len(index_N), generator=noise)[:SAMPLED_ROWS].to(case.device)
    head64_VH = head_VH.double()
    dlogits_SV = (hidden_TH[index_N[pick_S]].double() @ head64_VH.t() - lse_N[pick_S, None]).exp_().neg_()
    dlogits_SV.scatter_add_(1, targets_N[pick_S, None], dlogits_SV.new_ones(len(pick_S), 1))
    hidden_grad_SH = (dlogits_SV * coefficients_N[pick_S, None]) @ head64_VH
    del dlogits_SV, head64_VH

    # Half of the columns are targets of some row, half are any.
    some_C = torch.randperm(case.shape.vocab, generator=noise)[: SAMPLED_COLUMNS // 2].to(case.device)
    columns_C = torch.cat((targets_N[:: max(len(targets_N) // (SAMPLED_COLUMNS // 2), 1)], some_C)).unique()
    rows_NH = hidden_TH[index_N].double()
    dlogits_NC = (rows_NH @ head_VH[columns_C].double().t() - lse_N[:, None]).exp_().neg_()
    dlogits_NC += targets_N[:, None] == columns_C
    return Truth(
        loss=float(losses_N.sum()),
        loss_scale=float(losses_N.abs().sum()),
        index_N=index_N,
        logprobs_N=logprobs_N.detach(),
        rows_S=index_N[pick_S],
        hidden_grad_SH=hidden_grad_SH,
        columns_C=columns_C,
        head_grad_CH=(dlogits_NC * coefficients_N[:, None]).t() @ rows_NH,
    )


def errors_of(outcome: Outcome, truth: Truth) -> Errors:
    logprob = None
    if outcome.logprobs is not None:
        all_rows = len(outcome.logprobs) != len(truth.index_N)
        found_N = outcome.logprobs[truth.index_N] if all_rows else outcome.logprobs
        logprob = float((found_N.detach().double() - truth.logprobs_N).abs().max())
    return Errors(
        loss=abs(float(outcome.loss.detach()) - truth.loss) / truth.loss_scale,
        logprob=logprob,
        hidden_grad=_distance(outcome.hidden_grad_TH[truth.rows_S], truth.hidden_grad_SH),
        head_grad=_distance(outcome.head_grad_VH[truth.columns_C], truth.head_grad_CH),
    )


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().double() - truth).norm() / truth.norm())
