"""From rewarded trajectories to one optimiser step.

    A[i]  = (R[i] - mean_G R) / max(std_G R, floor)                       a group's samples, see rewards/advantages.py
    w[i]  = 1 / (N |y_i|)  |  1 / sum_i |y_i|  |  1 / (N c)               "trajectory" | "token" | "constant"
    loss  = sum_i w[i] sum_{t in y_i} ( -min(r A, clip(r) A) + beta KL )   y_i: the tokens that the policy sampled

N counts all trajectories of the optimiser step, those of groups without a signal included. The loss itself is
kernels/loss.py; this file makes its inputs, calls it once a micro-batch and steps the optimiser. There is no loss mask
to carry: rows come from the segments' sources (Trajectory.policy_positions).

A row predicts the token after it: the token at position p is predicted by row p - 1. Only rows whose next token was
sampled by the policy enter the loss; all others never reach the LM head. Sequences of like length are packed together.
Axes: T packed tokens, R rows in the loss, H hidden, V vocabulary.
"""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.parallel.ranks import ALONE, Ranks
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.store.checkpoint import SavablePolicy, load_optimizer
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.attention.backends.choice import load_attention, resolve_attention
from thresher.kernels.attention.varlen import TrainingAttention, Varlen
from thresher.kernels.objective import kl_coefficient
from thresher.policy.model import Policy
from thresher.rewards.advantages import group_advantages
from thresher.rewards.errors import UserError


def choose_attention(optim: OptimSection, policy: Policy) -> TrainingAttention:
    """What computes the attention of this policy's forwards and backwards. UserError where that does not serve here."""
    try:
        return load_attention(
            resolve_attention(optim.attention, policy.device, policy.dtype, policy.config.head_dim, "training")
        )
    except ValueError as error:
        raise UserError(f"optim.{error}") from None


def advantages(rewards: Sequence[float], groups: Sequence[int], grpo: GrpoSection) -> list[float]:
    """Each trajectory's advantage within its group (members may lie anywhere in the sequence)."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = [0.0] * len(rewards)
    for numbers in members.values():
        values = group_advantages([rewards[n] for n in numbers], std_floor=grpo.std_floor, sample_std=grpo.sample_std)
        for n, value in zip(numbers, values, strict=True):
            result[n] = value
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One sequence to train on: its ids, and for the trained ones (at `positions`, each >= 1) what the loss needs."""

    ids: list[int]
    positions: list[int]
    old_logprobs: list[float]
    advantage: float
    weight: float  # of each of its trained tokens in the loss


def make_items(
    trajectories: Sequence[Trajectory], advantage: Sequence[float], grpo: GrpoSection, ranks: Ranks = ALONE
) -> list[Item]:
    """Trajectories with their advantages and the weight of each of their tokens, as the aggregation has it over what
    all ranks make items of."""
    positions = [trajectory.policy_positions() for trajectory in trajectories]
    count, total = ranks.total(len(trajectories), sum(map(len, positions)))
    weights = {
        "trajectory": lambda n: 1.0 / (count * len(positions[n])),
        "token": lambda n: 1.0 / total,
        "constant": lambda n: 1.0 / (count * (grpo.aggregation_constant or 1.0)),
    }[grpo.aggregation]
    return [
        Item(
            ids=trajectory.ids(),
            positions=positions[n],
            old_logprobs=trajectory.policy_logprobs(),
            advantage=advantage[n],
            weight=weights(n),
        )
        for n, trajectory in enumerate(trajectories)
        if positions[n] and not (grpo.drop_zero_advantage and advantage[n] == 0.0)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Several items packed. rows_R points into the T packed tokens, at the token before each target."""

    ids_T: torch.Tensor
    layout: Varlen
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    old_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    weights_R: torch.Tensor
    items: list[int]  # which items, in the order packed

    @property
    def tokens(self) -> int:
        return len(self.ids_T)


def pack(
    items: Sequence[Item],
    micro_batch_tokens: int,
    device: torch.device | str = "cpu",
    attention: TrainingAttention | None = None,
) -> list[Batch]:
    """Sort by length and cut into batches of at most `micro_batch_tokens` tokens, padding counted (always >= 1 item).

    The last token of a sequence predicts nothing that is trained and is left out. Items that train nothing are dropped.
    attention: from `choose_attention`; None: `varlen_attention`, which runs everywhere.
    """
    order = sorted((n for n, item in enumerate(items) if item.positions), key=lambda n: (-len(items[n].ids), n))
    batches: list[list[int]] = []
    for n in order:
        if batches and len(items[batches[-1][0]].ids) * (len(batches[-1]) + 1) <= micro_batch_tokens:
            batches[-1].append(n)
        else:
            batches.append([n])
    return [_batch([items[n] for n in members], members, device, attention) for members in batches]


def _batch(
    items: list[Item], members: list[int], device: torch.device | str, attention: TrainingAttention | None
) -> Batch:
    ids: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    for item in items:
        start = len(ids)
        rows.extend(start + position - 1 for position in item.positions)
        targets.extend(item.ids[position] for position in item.positions)
        ids.extend(item.ids[:-1])

    def per_row(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        ids_T=torch.tensor(ids, device=device),
        layout=Varlen([len(item.ids) - 1 for item in items], device, attention),
        rows_R=torch.tensor(rows, device=device),
        targets_R=torch.tensor(targets, device=device),
        old_logprobs_R=per_row([value for item in items for value in item.old_logprobs]),
        advantages_R=per_row([item.advantage for item in items for _ in item.positions]),
        weights_R=per_row([item.weight for item in items for _ in item.positions]),
        items=members,
    )


@dataclass(slots=True)
class UpdateStats:
    """What one optimiser step did; `sums` and `largest` (of the absolute values) are over the `rows` tokens in the
    loss."""

    tokens: int = 0
    rows: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    capped: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def record(
        self, loss: torch.Tensor, capped: torch.Tensor, sums: dict[str, torch.Tensor], largest: dict[str, torch.Tensor]
    ) -> None:
        """Add a batch's figures. All come to the host together: each trip of its own would make it wait for the GPU."""
        scalars = [loss, capped, *(value_R.double().sum() for value_R in sums.values())]
        scalars += [value_R.abs().max() for value_R in largest.values()]
        loss_value, capped_value, *values = torch.stack([scalar.double() for scalar in scalars]).tolist()
        self.loss += loss_value
        self.capped += int(capped_value)
        for name, value in zip(sums, values, strict=False):
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in zip(largest, values[len(sums) :], strict=True):
            self.largest[name] = max(self.largest.get(name, 0.0), value)


class Updater:
    """The optimiser and its schedule around one policy. `reference` may be None where beta is 0; it is asked with its
    adapters off, so that a policy with adapters is its own reference.

    `master` holds the weights that are trained, always float32: the policy itself where it computes in float32, else a
    model of its own, from which the policy is refreshed after every step (at lr 1e-6 a bfloat16 weight would not move).
    """

    def __init__(
        self,
        policy: Policy,
        master: nn.Module,
        reference: Policy | None,
        optim: OptimSection,
        grpo: GrpoSection,
        vocab_size: int,
        total_steps: int,
    ) -> None:
        self.policy, self.master, self.reference, self.optim, self.grpo = policy, master, reference, optim, grpo
        self.vocab_size, self.total_steps = vocab_size, total_steps
        self.attention = choose_attention(optim, policy)
        self.optimizer = make_optimizer(master, optim, optim.lr)

    def update(self, items: Sequence[Item], step: int, temperature: float) -> UpdateStats:
        """One optimiser step on all items; `step` counts from 0 and sets the learning rate. Returns what happened."""
        started = time.perf_counter()
        stats = UpdateStats()
        batches = pack(items, self.optim.micro_batch_tokens, self.policy.device, self.attention)
        lacking = self._lacking(len(batches))
        for batch in batches:
            self._backward(batch, temperature, stats)
        for _ in range(lacking):
            self._empty_pass()
        stats.lr = scheduled_lr(self.optim.lr, self.optim.schedule, self.optim.warmup_ratio, step, self.total_steps)
        stats.grad_norm = self._step(stats.lr)
        stats.seconds = time.perf_counter() - started
        return stats

    # What is otherwise where every rank holds a share of the weights: sharded_update.py.

    def rolling_out(self) -> AbstractContextManager[None]:
        """Within it the rollout's policy has the trained weights."""
        return nullcontext()

    def savable(self) -> tuple[SavablePolicy, torch.optim.Optimizer] | None:
        """The trained weights and the optimiser's state, whole, on the rank that saves them; None elsewhere."""
        assert isinstance(self.master, Policy)
        return self.master, self.optimizer

    def load_moments(self, checkpoint: Path) -> None:
        """Put a checkpoint's moments and step counts into the optimiser."""
        load_optimizer(checkpoint, self.optimizer, self.master.named_parameters())

    def _head_gradient(self) -> torch.Tensor | None:
        """Where the loss adds up the head's gradient [V, H]; None where the head is not trained."""
        assert isinstance(self.master, Policy)
        head_VH = self.master.head_VH
        if head_VH.requires_grad and head_VH.grad is None:
            head_VH.grad = torch.zeros_like(head_VH)
        return head_VH.grad

    def _lacking(self, batches: int) -> int:
        """How many micro-batches fewer than another rank this one has, with so many."""
        return 0

    def _empty_pass(self) -> None:
        """Take part in a forward and a backward without a micro-batch of one's own."""

    def _step(self, lr: float) -> float:
        """Step the trained weights on the policy's gradients; returns their norm before clipping."""
        norm = step_optimizer(self.master, self.optimizer, self.optim, lr)
        if self.master is not self.policy:
            with torch.no_grad():
                for parameter, trained in zip(self.policy.parameters(), self.master.parameters(), strict=True):
                    parameter.copy_(trained)
        return norm

    def _collect_gradients(self) -> None:
        """Add a low-precision policy's gradients to its masters', in float32, batch by batch."""
        if self.master is self.policy:
            return
        for parameter, trained in zip(self.policy.parameters(), self.master.parameters(), strict=True):
            if parameter.grad is not None:
                grad = parameter.grad.float()
                trained.grad = grad if trained.grad is None else trained.grad.add_(grad)
                parameter.grad = None

    def _backward(self, batch: Batch, temperature: float, stats: UpdateStats) -> None:
        reference_logprobs = None
        if self.reference is not None:
            with torch.no_grad(), self.reference.adapters_off():
                hidden_TH = self.reference.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)
                reference_logprobs, _ = token_logprobs(
                    hidden_TH.index_select(0, batch.rows_R),
                    self.reference.head_VH,
                    batch.targets_R,
                    temperature=temperature,
                    vocab_size=self.vocab_size,
                    workspace_bytes=self.optim.loss_workspace_bytes,
                )
        hidden_TH = self.policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)
        hidden_RH = hidden_TH.index_select(0, batch.rows_R)
        head_grad_VH = self._head_gradient()
        grpo = self.grpo
        # The kernel calls these R rows its T tokens: whatever is masked was left out above, by `rows_R`.
        result = grpo_loss(
            hidden_RH,
            self.policy.head_VH,
            batch.targets_R,
            batch.old_logprobs_R,
            batch.advantages_R,
            batch.weights_R,
            ref_logprobs_T=reference_logprobs,
            temperature=temperature,
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            dual_clip=grpo.dual_clip,
            kl_value=grpo.kl_value,
            kl_gradient=grpo.kl_gradient,
            beta=grpo.beta if self.reference is not None else 0.0,
            entropy_coef=grpo.entropy_coef,
            vocab_size=self.vocab_size,
            workspace_bytes=self.optim.loss_workspace_bytes,
            lm_head_grad_VH=head_grad_VH,
        )
        if head_grad_VH is not None:
            # The head's gradient lies already in the trained weights' own buffer, which saves a second one of [V, H].
            hidden_RH.backward(result.hidden_grad_TH)
        else:
            result.loss.backward()
        self._collect_gradients()
        stats.tokens += batch.tokens
        stats.rows += len(batch.rows_R)
        gap_R = (result.logprobs - batch.old_logprobs_R).abs()
        sums = {"entropy": result.entropy, "clipped": result.clipped, "ratio": result.ratios, "logprob_gap": gap_R}
        largest = {"logprob_gap_max": gap_R}
        if reference_logprobs is not None:
            sums |= {f"kl_{name}": result.kl[name] for name in ("k1", "k2", "k3")}
            log_ref_ratio_R = result.logprobs - reference_logprobs
            estimator = grpo.kl_gradient or grpo.kl_value
            largest["kl_coefficient_largest"] = kl_coefficient(estimator, log_ref_ratio_R, result.ratios)
            if grpo.kl_value != "none":
                largest["kl_largest"] = result.kl[grpo.kl_value]
        stats.record(result.loss.detach(), result.capped, sums, largest)


def make_optimizer(policy: nn.Module, optim: OptimSection, lr: float) -> torch.optim.AdamW:
    """AdamW over all weights that are trained; norms and biases are not decayed."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() > 1]
    other = [p for p in trained if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": other, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True)


def step_optimizer(policy: nn.Module, optimizer: torch.optim.Optimizer, optim: OptimSection, lr: float) -> float:
    """Clip the gradient to `optim.max_grad_norm`, step at `lr`; returns the norm before clipping."""
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), optim.max_grad_norm))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def scheduled_lr(lr: float, schedule: str, warmup_ratio: float, step: int, total_steps: int) -> float:
    """Linear warm-up over `warmup_ratio` of the steps, then constant, or linear or cosine down to 0 after the last."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    if schedule == "linear":
        return lr * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return lr
