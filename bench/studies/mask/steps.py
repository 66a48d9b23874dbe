"""The four treatments of `thresher study mask`, and one training step under each.

    in the loss   every retrieved token is a target too, with its trajectory's advantage and an old log-prob that a
                  forward had to make, for nobody sampled it: training without a mask
    zeroed        the same rows go through the head, and what comes of the retrieved ones is multiplied away: the usual
                  way to mask a loss
    masked        rows that predict a retrieved token never reach the head: what Thresher does
    removed       the retrieved tokens are cut out of the input and the rest is prefilled afresh, positions closed up:
                  a hard mask

All four go through the product's own packing, forward and loss kernel, so that they differ in their rows and in nothing
else. The kernel drops a row of weight 0 before the head; "zeroed" therefore gives the retrieved rows `FAINT` of their
weight: all of the work is done, and what it adds to the gradient is below float32's rounding. A row keeps one weight
under every treatment (1/(N |y|) where the recipe says so, |y| being the sampled tokens), so that the gradient "in the
loss" minus that of "masked" is the retrieved rows' own. Old log-probs are the policy's own under the same treatment:
every ratio is 1 and nothing is clipped.

Deliberately absent: the KL term and the entropy bonus; an optimiser step; a loss or a mask of the study's own making.
Axes: T packed tokens, R rows at the head, H hidden.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from thresher.bench.studies.mask.batch import Subject, retrieved_rows, without_retrieved
from thresher.bench.studies.mask.peak_memory import peak_bytes
from thresher.engine.packing import Batch, TrainSequence, build_train_sequences, pack
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.objective import LossResult
from thresher.policy.model import Policy

TREATMENTS = {"in_loss": "in the loss", "zeroed": "zeroed", "masked": "masked", "removed": "removed"}
FAINT = 1e-10  # of a row's weight: below half a unit in the last place of float32 (6e-8), far above its denormals


@dataclass(frozen=True, slots=True)
class Treated:
    """A treatment's items, the batches that they are packed into, and for each batch [R] bool: which rows' targets the
    policy sampled."""

    items: list[TrainSequence]
    batches: list[Batch]
    sampled: list[Tensor]

    @property
    def rows(self) -> int:
        return sum(len(batch.rows_R) for batch in self.batches)

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    def weighted(self, *, retrieved: float, sampled: float = 1.0) -> "Treated":
        """The same with the weights of both kinds of rows multiplied; a factor of 0 drops them."""
        batches = [
            replace(batch, weights_R=batch.weights_R * torch.where(sampled_R, sampled, retrieved))
            for batch, sampled_R in zip(self.batches, self.sampled, strict=True)
        ]
        return replace(self, batches=batches)


@dataclass(slots=True)
class StepClock:
    """Milliseconds of each part, one entry a step."""

    forward: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def step(self) -> list[float]:
        return [sum(parts) for parts in zip(self.forward, self.head, self.backward, strict=True)]

    def medians(self) -> dict[str, float]:
        parts = ("forward", "head", "backward", "step")
        return {f"{name}_ms": median(getattr(self, name)) for name in parts}


def treat(name: str, subject: Subject) -> Treated:
    """The subject's trajectories under one treatment, packed, with the policy's own log-probs as the old ones."""
    trajectories = subject.trajectories
    if name == "removed":
        trajectories = [without_retrieved(trajectory) for trajectory in trajectories]
    items = build_train_sequences(trajectories, subject.advantages, subject.grpo)
    sampled = [set(item.positions) for item in items]
    if name in ("in_loss", "zeroed"):
        items = [
            replace(item, positions=sorted(item.positions + retrieved_rows(trajectory)))
            for item, trajectory in zip(items, trajectories, strict=True)
        ]
    device = subject.policy.device
    batches = []
    for batch in pack(items, subject.micro_batch_tokens, device):
        with torch.no_grad():
            old_R, _ = token_logprobs(
                _rows(subject.policy, batch),
                subject.policy.head_VH,
                batch.targets_R,
                temperature=subject.temperature,
                vocab_size=subject.vocab_size,
            )
        batches.append(replace(batch, old_logprobs_R=old_R))
    flags = [[row in sampled[n] for n in batch.items for row in items[n].positions] for batch in batches]
    treated = Treated(items, batches, [torch.tensor(flags_R, device=device) for flags_R in flags])
    return treated.weighted(retrieved=FAINT) if name == "zeroed" else treated


def _rows(policy: Policy, batch: Batch) -> Tensor:
    return policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout).index_select(0, batch.rows_R)


def head_loss(subject: Subject, rows_RH: Tensor, batch: Batch, chunk_rows: int | None = None) -> LossResult:
    """The loss of some rows; the head's gradient goes into its buffer, as in training."""
    head_VH, grpo = subject.policy.head_VH, subject.grpo
    return grpo_loss(
        rows_RH,
        head_VH,
        batch.targets_R,
        batch.old_logprobs_R,
        batch.advantages_R,
        batch.weights_R,
        temperature=subject.temperature,
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        dual_clip=grpo.dual_clip,
        vocab_size=subject.vocab_size,
        chunk_rows=chunk_rows,
        lm_head_grad_VH=head_VH.grad,
    )


def clear(policy: Policy) -> None:
    """No gradients but zeros for the head, which the loss adds to."""
    policy.zero_grad(set_to_none=True)
    policy.head_VH.grad = torch.zeros_like(policy.head_VH)


def run_step(subject: Subject, batches: Iterable[Batch], clock: StepClock | None = None) -> list[LossResult]:
    """Forward, head with loss, and backward of all batches; leaves the gradients on the policy."""
    policy = subject.policy
    clear(policy)
    spent, results = [0.0, 0.0, 0.0], []
    for batch in batches:
        marks = [_now(policy.device)]
        hidden_TH = policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)
        marks.append(_now(policy.device))
        rows_RH = hidden_TH.index_select(0, batch.rows_R)
        result = head_loss(subject, rows_RH, batch)
        marks.append(_now(policy.device))
        rows_RH.backward(result.hidden_grad_TH)
        marks.append(_now(policy.device))
        spent = [total + 1e3 * (end - start) for total, (start, end) in zip(spent, pairwise(marks), strict=True)]
        results.append(result)
    if clock is not None:
        for times, value in zip((clock.forward, clock.head, clock.backward), spent, strict=True):
            times.append(value)
    return results


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(
    subject: Subject, treated: Mapping[str, Treated], repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, StepClock]:
    """`repeats` steps of each treatment, turn and turn about, after one that does not count."""
    clocks = {name: StepClock() for name in treated}
    for counts, name in turns(list(treated), repeats):
        run_step(subject, treated[name].batches, clocks[name] if counts else None)
        tick()
    return clocks


def timed_heads(
    subject: Subject, treated: Mapping[str, Treated], repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of head and loss alone, from hidden states that are made once."""
    calls = {name: [head_call(subject, batch, None) for batch in one.batches] for name, one in treated.items()}
    spent: dict[str, list[float]] = {name: [] for name in treated}
    clear(subject.policy)
    for counts, name in turns(list(treated), repeats):
        start = _now(subject.policy.device)
        for call in calls[name]:
            call()
        if counts:
            spent[name].append(1e3 * (_now(subject.policy.device) - start))
        tick()
    return {name: median(times) for name, times in spent.items()}


def turns(names: Sequence[str], repeats: int) -> Iterator[tuple[bool, str]]:
    """Every name once a round, each round beginning with another; (whether it counts, name). Round 0 does not."""
    for number in range(repeats + 1):
        first = number % len(names)
        yield from ((number > 0, name) for name in (*names[first:], *names[:first]))


def head_call(subject: Subject, batch: Batch, chunk_rows: int | None) -> Callable[[], None]:
    """Head and loss of one batch alone, ready to be called: the gather of its rows, and both gradients."""
    with torch.no_grad():
        hidden_TH = subject.policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)

    def call() -> None:
        head_loss(subject, hidden_TH.index_select(0, batch.rows_R).requires_grad_(), batch, chunk_rows)

    return call


def head_peak(subject: Subject, treated: Treated, at_once: bool) -> int:
    """Peak bytes of head and loss alone, over the batches. at_once: all logits of a batch in one chunk."""
    clear(subject.policy)
    return max(
        peak_bytes(head_call(subject, batch, len(batch.rows_R) if at_once else None), subject.policy.device)
        for batch in treated.batches
    )
