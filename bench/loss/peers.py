"""Who `thresher bench loss` measures: ours, plain torch in three forms, and the kernels of other libraries.

Each is a `Contender`: what it is called, what it computes, where it runs, and a function that takes a case's tensors
and returns a call without arguments, one forward and backward. Libraries are imported when they are prepared, and only
if they are there. What a peer leaves to its caller is done around it in plain torch, so that every call ends with the
same three results: the loss, the hidden states' gradient and the head's.

Columns that do not exist: ours is told how many do; a peer, which cannot be, is given the rows of those alone.

Rows outside the mask: who takes log-probs is given the unmasked rows alone, picked inside the call; who takes a mask is
given the mask. A TRL or Liger user would call them so.

Deliberately absent: tuning of peers beyond what their documentation names.

Axes: T tokens, B sequences, Q tokens of a sequence, R unmasked rows, H hidden width, V vocabulary (docs/notation.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.bench.loss.cases import BETA, CLIP_HIGH, CLIP_LOW, LossCase, LossOutcome, objective
from thresher.bench.machine import package_version
from thresher.kernels import grpo_loss
from thresher.kernels.matmul import compute_dtype

Run = Callable[[], LossOutcome]
Prepare = Callable[[LossCase, int | None], Run]
HEAD_TO_LOSS, LOGPROBS, FROM_LOGITS = "all of it", "head and log-prob; the rest in torch", "all after the head"
TRL_COLUMNS = 32768  # the vocabulary chunk of TRL's own trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """computes: which part is the contender's own. package: what must be installed, None for torch alone. dtypes,
    cuda_only: where it runs. prepare(case, chunk_rows or None for the default) -> Run."""

    name: str
    computes: str
    prepare: Prepare
    ours: bool = False
    package: str | None = None
    cuda_only: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    @property
    def version(self) -> str | None:
        return package_version(self.package or "torch")

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run here, in one sentence; None where it can."""
        if self.cuda_only and device.type != "cuda":
            return "It runs on CUDA only."
        if self.package is not None and find_spec(self.package.replace("-", "_")) is None:
            return f"{self.package} is not installed; pip install {self.package} brings it."
        if dtype not in self.dtypes:
            return f"It does not take {str(dtype).removeprefix('torch.')}."
        return None


def usual_chunk(case: LossCase, chunk_rows: int | None) -> int:
    """Rows of a chunk for the chunked naive form and for bare matmuls: the ones named, or what suits the device."""
    fitting = max(2**27 // (4 * case.shape.vocab), 16)
    usual = 2048 if case.device.type == "cuda" else min(fitting, 1024)
    return min(chunk_rows or usual, case.shape.active)


def _our_arguments(case: LossCase, chunk_rows: int | None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    tensors = (case.hidden_TH, case.whole_head, case.targets_T, case.old_T, case.advantages_T, case.weights_T)
    options = {"ref_logprobs_T": case.ref_T, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "kl_value": "k3"}
    return tensors, {**options, "beta": BETA, "chunk_rows": chunk_rows, "vocab_size": case.shape.vocab}


def _ours(backend: str) -> Prepare:
    def prepare(case: LossCase, chunk_rows: int | None) -> Run:
        tensors, options = _our_arguments(case, chunk_rows)

        def run() -> LossOutcome:
            result = grpo_loss(*tensors, **options, backend=backend)
            result.loss.backward()
            assert case.hidden_TH.grad is not None and case.whole_head.grad is not None
            return LossOutcome(result.loss, result.logprobs, case.hidden_TH.grad, case.whole_head.grad)

        return run

    return prepare


def _ours_into_buffer(case: LossCase, chunk_rows: int | None) -> Run:
    """As our trainer calls it: the head's gradient is added to the float32 buffer that the optimiser reads."""
    tensors, options = _our_arguments(case, chunk_rows)
    buffer_VH = torch.zeros_like(case.whole_head, dtype=compute_dtype(case.head_VH)).detach()

    def run() -> LossOutcome:
        result = grpo_loss(*tensors, **options, lm_head_grad_VH=buffer_VH)
        assert result.hidden_grad_TH is not None
        # In training the states are no leaf, and backward would pass this on without making a copy of it.
        case.hidden_TH.grad = result.hidden_grad_TH
        return LossOutcome(result.loss, result.logprobs, result.hidden_grad_TH, buffer_VH)

    return run


def _outcome(case: LossCase, loss: Tensor, logprobs: Tensor | None) -> LossOutcome:
    assert case.hidden_TH.grad is not None and case.head_VH.grad is not None
    return LossOutcome(loss, logprobs, case.hidden_TH.grad, case.head_VH.grad)


def _vectors(case: LossCase) -> tuple[Tensor, ...]:
    return tuple(values_T[case.index_R] for values_T in (case.old_T, case.ref_T, case.advantages_T, case.weights_T))


def _from_logprobs(case: LossCase, logprobs_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    """A run of a peer that makes log-probs [R] of hidden states [R, H], head and targets [R]."""
    vectors, targets_R = _vectors(case), case.targets_T[case.index_R]

    def run() -> LossOutcome:
        logprobs_R = logprobs_of(case.hidden_TH[case.mask_T], case.head_VH, targets_R)
        loss = objective(logprobs_R, *vectors).sum()
        loss.backward()
        return _outcome(case, loss, logprobs_R)

    return run


def naive_logprobs(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
    """The line that everyone writes first: all logits, in float32 once they are there."""
    return -F.cross_entropy((hidden_RH @ head_VH.t()).float(), targets_R, reduction="none")


def _naive(case: LossCase, chunk_rows: int | None) -> Run:
    return _from_logprobs(case, naive_logprobs)


def _compiled(case: LossCase, chunk_rows: int | None) -> Run:
    compiled = torch.compile(naive_logprobs)

    def logprobs_of(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
        # The number of unmasked rows changes from batch to batch; the model's widths do not.
        torch._dynamo.maybe_mark_dynamic(hidden_RH, 0)
        torch._dynamo.maybe_mark_dynamic(targets_R, 0)
        logprobs_R: Tensor = compiled(hidden_RH, head_VH, targets_R)
        return logprobs_R

    return _from_logprobs(case, logprobs_of)


def _chunked(case: LossCase, chunk_rows: int | None) -> Run:
    """The same line on some rows at a time, each chunk's gradient taken before the next chunk's logits are made."""
    vectors, targets_R = _vectors(case), case.targets_T[case.index_R]
    rows = usual_chunk(case, chunk_rows)

    def run() -> LossOutcome:
        total, kept = torch.zeros((), device=case.device), []
        rows_RH = case.hidden_TH.detach()[case.mask_T]
        grad_RH = torch.empty_like(rows_RH)
        for start in range(0, len(targets_R), rows):
            part = slice(start, start + rows)
            part_RH = rows_RH[part].requires_grad_()
            logprobs_R = naive_logprobs(part_RH, case.head_VH, targets_R[part])
            loss = objective(logprobs_R, *(values_R[part] for values_R in vectors)).sum()
            loss.backward()
            assert part_RH.grad is not None
            grad_RH[part] = part_RH.grad
            total += loss.detach()
            kept.append(logprobs_R.detach())
        case.hidden_TH.grad = torch.zeros_like(case.hidden_TH).index_copy_(0, case.index_R, grad_RH)
        return _outcome(case, total, torch.cat(kept))

    return run


def _liger_fused(tf32: bool) -> Prepare:
    def prepare(case: LossCase, chunk_rows: int | None) -> Run:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss_of = LigerFusedLinearGRPOLoss(
            beta=BETA,
            # It compiles the part after the log-probs. On a CPU that part is small and g++ slow.
            compiled=case.device.type == "cuda",
            use_ref_model=True,
            chunk_size=1,
            epsilon_low=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            loss_type="dapo",
            temperature=1.0,
        )
        ids_BQ, mask_BQ = case.sequences(case.targets_T), case.sequences(case.mask_T.float())
        old_BQ, ref_BQ, advantages_B = case.sequences(case.old_T), case.sequences(case.ref_T), case.advantages_B

        def run() -> LossOutcome:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            try:
                loss, _ = loss_of(
                    case.sequences(case.hidden_TH),
                    case.head_VH,
                    ids_BQ,
                    mask_BQ,
                    advantages_B,
                    ref_per_token_logps=ref_BQ,
                    old_per_token_logps=old_BQ,
                )
                loss.backward()
            finally:
                torch.set_float32_matmul_precision(before)
            return _outcome(case, loss, None)

        return run

    return prepare


def _liger_triton(case: LossCase, chunk_rows: int | None) -> Run:
    """It takes logits of Q + 1 positions and ignores the last, so each sequence gets one more row, of zeros."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    padded_BQH = F.pad(case.sequences(case.hidden_TH.detach()), (0, 0, 0, 1)).requires_grad_()
    ids_BQ, mask_BQ = case.sequences(case.targets_T), case.sequences(case.mask_T.float())
    old_BQ, ref_BQ, advantages_B = case.sequences(case.old_T), case.sequences(case.ref_T), case.advantages_B

    def run() -> LossOutcome:
        padded_BQH.grad = None
        loss, _ = triton_grpo_loss(
            padded_BQH @ case.head_VH.t(),
            old_BQ,
            ref_BQ,
            ids_BQ,
            advantages_B,
            completion_mask=mask_BQ,
            temperature=1.0,
            beta=BETA,
            eps_low=CLIP_LOW,
            eps_high=CLIP_HIGH,
            inplace=True,
            loss_type="dapo",
            reduce=True,
        )
        loss.backward()
        assert padded_BQH.grad is not None and case.head_VH.grad is not None
        return LossOutcome(loss, None, padded_BQH.grad[:, :-1].flatten(0, 1), case.head_VH.grad)

    return run


def _trl(case: LossCase, chunk_rows: int | None) -> Run:
    from trl.kernels import ChunkedLogProbFunction

    columns = min(TRL_COLUMNS, case.shape.vocab)

    def logprobs_of(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
        # Entropy, for its trainer logs it; ours makes it too.
        found = ChunkedLogProbFunction.apply(hidden_RH, head_VH, None, targets_R, 1.0, columns, None, 1.0, ("entropy",))
        logprobs_R: Tensor = found[0]
        return logprobs_R

    return _from_logprobs(case, logprobs_of)


def _cce(case: LossCase, chunk_rows: int | None) -> Run:
    from cut_cross_entropy import linear_cross_entropy

    def logprobs_of(hidden_RH: Tensor, head_VH: Tensor, targets_R: Tensor) -> Tensor:
        losses_R: Tensor = linear_cross_entropy(hidden_RH, head_VH, targets_R, reduction="none", filter_eps=None)
        return -losses_R

    return _from_logprobs(case, logprobs_of)


OURS = (
    Contender(name="ours", computes=HEAD_TO_LOSS, prepare=_ours("auto"), ours=True),
    Contender(name="ours, in place", computes=HEAD_TO_LOSS, prepare=_ours_into_buffer, ours=True),
)
OURS_IN_TORCH = Contender(name="ours, torch backend", computes=HEAD_TO_LOSS, prepare=_ours("torch"), ours=True)
PEERS = {
    "naive": Contender(name="naive", computes=LOGPROBS, prepare=_naive),
    "chunked": Contender(name="naive, chunked", computes=HEAD_TO_LOSS, prepare=_chunked),
    "compiled": Contender(name="naive, compiled", computes=LOGPROBS, prepare=_compiled),
    "liger": Contender(
        name="Liger fused", computes=HEAD_TO_LOSS, prepare=_liger_fused(tf32=False), package="liger-kernel"
    ),
    "liger-tf32": Contender(
        name="Liger fused, TF32",
        computes=HEAD_TO_LOSS,
        prepare=_liger_fused(tf32=True),
        cuda_only=True,
        package="liger-kernel",
    ),
    "liger-triton": Contender(
        name="Liger triton", computes=FROM_LOGITS, prepare=_liger_triton, cuda_only=True, package="liger-kernel"
    ),
    "trl": Contender(name="TRL chunked", computes=LOGPROBS, prepare=_trl, package="trl"),
    "cce": Contender(
        name="CCE",
        computes=LOGPROBS,
        prepare=_cce,
        package="cut-cross-entropy",
        cuda_only=True,
        dtypes=(torch.bfloat16,),
    ),
}


def contenders(device: torch.device, chosen: list[str]) -> list[Contender]:
    """Ours first, then the peers of these names."""
    own = [*OURS, OURS_IN_TORCH] if device.type == "cuda" else list(OURS)
    return own + [PEERS[name] for name in chosen]
