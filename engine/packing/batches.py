"""Trajectories with their rewards, packed into the micro-batches of one optimiser step.

    A[i]  = (R[i] - mean_G R) / max(std_G R, floor)                       a group's samples, see rewards/advantages.py
    w[i]  = 1 / (N |y_i|)  |  1 / sum_i |y_i|  |  1 / (N c)               "trajectory" | "token" | "constant"

N counts all trajectories of the optimiser step, also those of groups without a signal; sums are over all of them, on
whichever rank they are. There is no loss mask: y_i are the tokens that the policy sampled
(`Trajectory.policy_positions`).

The token at position p is predicted by row p - 1. Only rows whose next token was sampled enter the loss; all others
never reach the LM head. `pack` puts sequences of like length together, `pack_shared` groups of a common beginning
(prefix_trie.py).

Axes: T packed tokens, R rows in the loss, H hidden.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing.prefix_trie import build_trie, cut_group, in_order, shared_groups
from thresher.engine.protocol.trajectory import Trajectory
from thresher.kernels.attention.parts import PartialAttention
from thresher.kernels.attention.prefix import PrefixForest
from thresher.kernels.attention.varlen import TrainingAttention, Varlen
from thresher.rewards.advantages import group_advantages


@dataclass(frozen=True, slots=True)
class LossNormalizer:
    """What the weights of an optimiser step's tokens are shares of: its trajectories, and their sampled tokens."""

    trajectories: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to train on: its ids, and for the trained ones (at `positions`, each >= 1) what the loss needs."""

    ids: list[int]
    positions: list[int]
    old_logprobs: list[float]
    advantage: float
    weight: float  # of each of its trained tokens in the loss
    importance: list[float] | None = None  # what multiplies the advantage of each; None: 1
    key: tuple[int, int] = (0, 0)  # group and sample of its trajectory

    def advantages(self) -> list[float]:
        """Of each of its trained tokens."""
        return [self.advantage * w for w in self.importance or [1.0] * len(self.positions)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Several items packed. rows_R points into the T packed tokens, at the token before each target.

    tokens: of the items, of which T are computed: fewer where they share their beginnings. rounds: places among the R
    rows, such that no row comes twice in a round; none where no row comes twice at all.
    """

    ids_T: torch.Tensor
    layout: Varlen | PrefixForest
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    old_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    weights_R: torch.Tensor
    items: list[int]  # which items, in the order packed
    tokens: int
    rounds: list[torch.Tensor] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return len(self.ids_T)

    def pick(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The hidden states of the rows in the loss, [R, H]; the gradient of a row that several items share is their
        sum, in one order."""
        if not self.rounds:
            return hidden_TH.index_select(0, self.rows_R)
        hidden_RH: torch.Tensor = _PickRounds.apply(hidden_TH, self.rows_R, self.rounds)
        return hidden_RH


class _PickRounds(torch.autograd.Function):
    """index_select whose backward adds a round after the other: index_add_ on CUDA adds up repeated rows in any
    order."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: torch.Tensor, rows_R: torch.Tensor, rounds: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(rows_R)
        ctx.rounds, ctx.count = rounds, len(hidden_TH)
        return hidden_TH.index_select(0, rows_R)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows_R,), grad_RH = ctx.saved_tensors, grads[0]
        grad_TH = grad_RH.new_zeros(ctx.count, grad_RH.shape[1])
        for places in ctx.rounds:
            grad_TH.index_add_(0, rows_R[places], grad_RH[places])
        return grad_TH, None, None


def pack(
    items: Sequence[TrainSequence],
    micro_batch_tokens: int,
    device: torch.device | str = "cpu",
    attention: TrainingAttention | None = None,
) -> list[Batch]:
    """Sort by length and cut into batches of at most `micro_batch_tokens` tokens, padding counted (always >= 1 item).

    The last token of a sequence predicts nothing that is trained and is left out. Items that train nothing are dropped.
    attention: from training/attention.py; None: `varlen_attention`, which runs everywhere.
    """
    order = sorted((n for n, item in enumerate(items) if item.positions), key=lambda n: (-len(items[n].ids), n))
    batches: list[list[int]] = []
    for n in order:
        if batches and len(items[batches[-1][0]].ids) * (len(batches[-1]) + 1) <= micro_batch_tokens:
            batches[-1].append(n)
        else:
            batches.append([n])
    return [_batch(items, members, device, attention) for members in batches]


def _batch(
    items: Sequence[TrainSequence], members: list[int], device: torch.device | str, attention: TrainingAttention | None
) -> Batch:
    ids: list[int] = []
    rows: list[int] = []
    for n in members:
        rows.extend(len(ids) + position - 1 for position in items[n].positions)
        ids.extend(items[n].ids[:-1])
    layout = Varlen([len(items[n].ids) - 1 for n in members], device, attention)
    return _assembled(items, members, ids, rows, layout)


def idle_batch(device: torch.device | str = "cpu", attention: TrainingAttention | None = None) -> Batch:
    """A token that belongs to no item, in a row of weight 0: what a rank feeds that has to take part in the others'
    forwards and backwards, and has nothing of its own."""
    item = TrainSequence(ids=[0, 0], positions=[1], old_logprobs=[0.0], advantage=0.0, weight=0.0)
    return replace(_batch([item], [0], device, attention), items=[], tokens=0)


def pack_shared(
    items: Sequence[TrainSequence],
    micro_batch_tokens: int,
    device: torch.device | str = "cpu",
    attention: TrainingAttention | None = None,
    partial: PartialAttention | None = None,
) -> list[Batch]:
    """As `pack`, but what items have in common at their beginnings is packed once where that is worth it
    (prefix_trie.py); the rest, and all where nothing is, is packed by `pack`.

    Items that share lie together, and batches of at most `micro_batch_tokens` computed tokens are cut between such
    groups. A group that is larger is cut by members, its prefix repeated.
    partial: from training/attention.py; None: the CPU's.
    """
    order = [n for n, item in enumerate(items) if item.positions]
    order = [order[n] for n in in_order([items[n].ids[:-1] for n in order])]
    fed = {n: items[n].ids[:-1] for n in order}
    batches: list[list[int]] = []
    room = 0
    for group in shared_groups([fed[n] for n in order]):
        for run in cut_group([fed[order[at]] for at in group], micro_batch_tokens):
            members = [order[group[at]] for at in run]
            sequences = [fed[n] for n in members]
            if not shared_groups(sequences):
                continue
            size = len(build_trie(sequences).ids)
            if size > room:
                batches.append([])
                room = micro_batch_tokens
            batches[-1].extend(members)
            room -= size
    together = {n for members in batches for n in members}
    alone = [n for n in range(len(items)) if n not in together]
    rest = pack([items[n] for n in alone], micro_batch_tokens, device, attention)
    return [
        *(_shared_batch(items, members, [fed[n] for n in members], device, partial) for members in batches),
        *(replace(batch, items=[alone[n] for n in batch.items]) for batch in rest),
    ]


def _shared_batch(
    items: Sequence[TrainSequence],
    members: list[int],
    sequences: list[list[int]],
    device: torch.device | str,
    partial: PartialAttention | None,
) -> Batch:
    trie = build_trie(sequences)
    rows: list[int] = []
    for m, n in enumerate(members):
        rows.extend(trie.rows(m, [position - 1 for position in items[n].positions]))
    layout = PrefixForest(trie.lengths, trie.parents, device, partial)
    return _assembled(items, members, trie.ids, rows, layout)


def _assembled(
    items: Sequence[TrainSequence], members: list[int], ids: list[int], rows: list[int], layout: Varlen | PrefixForest
) -> Batch:
    device = layout.device
    chosen = [items[n] for n in members]

    def per_row(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        ids_T=torch.tensor(ids, device=device),
        layout=layout,
        rows_R=torch.tensor(rows, device=device),
        targets_R=torch.tensor([item.ids[position] for item in chosen for position in item.positions], device=device),
        old_logprobs_R=per_row([value for item in chosen for value in item.old_logprobs]),
        advantages_R=per_row([value for item in chosen for value in item.advantages()]),
        weights_R=per_row([item.weight for item in chosen for _ in item.positions]),
        items=members,
        tokens=sum(len(item.ids) - 1 for item in chosen),
        rounds=[torch.tensor(places, device=device) for places in _rounds(rows)],
    )


def _rounds(rows: list[int]) -> list[list[int]]:
    """Places of rows by how often their row came before; none if none comes twice."""
    seen: Counter[int] = Counter()
    rounds: list[list[int]] = []
    for place, row in enumerate(rows):
        if seen[row] == len(rounds):
            rounds.append([])
        rounds[seen[row]].append(place)
        seen[row] += 1
    return rounds if len(rounds) > 1 else []


def normalizer_of(trajectories: Sequence[Trajectory]) -> LossNormalizer:
    """Those of an optimiser step that has these trajectories and no other."""
    return LossNormalizer(len(trajectories), sum(len(trajectory.policy_positions()) for trajectory in trajectories))


def advantages(rewards: Sequence[float], groups: Sequence[int], grpo: GrpoSection) -> list[float]:
    """Each trajectory's advantage within its group (members may lie anywhere in the sequence)."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = [0.0] * len(rewards)
    for numbers in members.values():
        values = group_advantages(
            [rewards[n] for n in numbers], std_floor=grpo.std_floor, sample_std=grpo.sample_std, eps=grpo.std_eps
        )
        for n, value in zip(numbers, values, strict=True):
            result[n] = value
    return result


def build_train_sequences(
    trajectories: Sequence[Trajectory],
    advantage: Sequence[float],
    grpo: GrpoSection,
    totals: LossNormalizer | None = None,
) -> list[TrainSequence]:
    """Trajectories with their advantages and the weight of each of their tokens, as the aggregation has it. totals: of
    the optimiser step; None: it has these trajectories alone."""
    positions = [trajectory.policy_positions() for trajectory in trajectories]
    totals = totals or LossNormalizer(len(trajectories), sum(map(len, positions)))
    weights = {
        "trajectory": lambda n: 1.0 / (totals.trajectories * len(positions[n])),
        "token": lambda n: 1.0 / totals.tokens,
        "constant": lambda n: 1.0 / (totals.trajectories * (grpo.aggregation_constant or 1.0)),
    }[grpo.aggregation]
    return [
        TrainSequence(
            ids=trajectory.ids(),
            positions=positions[n],
            old_logprobs=trajectory.policy_logprobs(),
            advantage=advantage[n],
            weight=weights(n),
            key=(trajectory.group, trajectory.sample),
        )
        for n, trajectory in enumerate(trajectories)
        if positions[n] and not (grpo.drop_zero_advantage and advantage[n] == 0.0)
    ]
