"""Trajectories with their rewards, packed into the micro-batches of one optimiser step.

    A[i]  = (R[i] - mean_G R) / (max(std_G R, floor) + eps)                 a group's samples; rewards/advantages.py has
                                                                            other baselines and scales
    w[i]  = 1 / (N |y_i|)  |  1 / sum_i |y_i|  |  1 / (N c)               "trajectory" | "token" | "constant"

N counts all trajectories of the optimiser step, including those of groups without a signal unless
`grpo.count_zero_advantage_groups` is off; sums are over all of them, on all ranks. There is no loss mask: y_i are the
tokens that the policy sampled, in all of the trajectory's trained contexts (`trained_contexts` of
engine/protocol/trajectory.py). Each context is a separate sequence here. |y_i| counts all turns and trained calls of
trajectory i, including those that it took over from another sample; each sampled token is in one sequence, with the
|y_i| of the sample that wrote it.

The token at position p is predicted by row p - 1. Only rows whose next token was sampled enter the loss; all others
never reach the LM head. `pack` puts sequences of similar length together. `pack_shared` computes common prefixes once.
It makes a trie of token segments and finds the cheapest set of shared segments, exactly, by dynamic programming:

    cost = tokens computed + MERGE_COST x rows below a shared segment, for each such segment above them
                           + NODE_COST x shared segments

in units of one token's computation in all layers. A shared segment saves its tokens for all but one of its members, and
every row below it merges one more part of attention. If no set is cheaper than sharing nothing, nothing is shared. Both
constants were measured on a CPU with the demo's model, which is narrow: the wider a model, the less a merge costs
compared with a token.

Axes: T packed tokens, R rows in the loss, H hidden, L tokens of a sequence, S sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.engine.config.sections import GrpoSection
from thresher.engine.protocol.trajectory import Trajectory, inherited_trained_tokens, trained_contexts
from thresher.kernels.attention.parts import AttentionWithLSE
from thresher.kernels.attention.prefix import ForestKernels, PrefixForest
from thresher.kernels.attention.varlen import TrainingAttention, Varlen
from thresher.rewards.advantages import advantages_by_group

MERGE_COST = 0.1
NODE_COST = 64.0

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# --- From trajectories to sequences


@dataclass(frozen=True, slots=True)
class LossNormalizer:
    """Denominators of an optimiser step's token weights: numbers of its trajectories and of their sampled tokens."""

    trajectories: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to train on: its ids, and the loss's inputs for the trained ones (at `positions`, each >= 1)."""

    ids: list[int]
    positions: list[int]
    old_logprobs: list[float]
    advantage: float | list[float]  # one per trained token, or one for all
    weight: float  # of each trained token in the loss
    importance: list[float] | None = None  # factors of the trained tokens' advantages; None: 1
    key: tuple[int, int] = (0, 0)  # group and sample of its trajectory
    context: int = 0  # its number among the trained contexts of its trajectory
    stale: int = 0  # leading trained tokens sampled by earlier weights; 0 without partial rollouts and run.async


def grpo_advantages(rewards: Sequence[float], groups: Sequence[int], grpo: GrpoSection) -> list[float]:
    """Return the advantage of each reward, by the recipe's rule. groups: the group of each reward."""
    return advantages_by_group(
        rewards,
        groups,
        baseline=grpo.baseline,
        scale=grpo.scale,
        std_floor=grpo.std_floor,
        sample_std=grpo.sample_std,
        eps=grpo.std_eps,
    )


def normalizer_of(trajectories: Sequence[Trajectory]) -> LossNormalizer:
    """Return the normalizer of an optimiser step that has exactly these trajectories."""
    trained = [context for trajectory in trajectories for context in trained_contexts(trajectory)]
    inherited = sum(map(inherited_trained_tokens, trajectories))
    return LossNormalizer(len(trajectories), sum(len(context.positions) for context in trained) + inherited)


def build_train_sequences(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | list[float]],
    grpo: GrpoSection,
    totals: LossNormalizer | None = None,
    weights_version: int = 0,
) -> list[TrainSequence]:
    """Return the sequences to train on, one per trained context, with the weight of their tokens in the loss.

    advantages: of each trajectory, or of each of its trained tokens, all contexts in order. totals: of the optimiser
    step; None: it has no other trajectories. weights_version: the first version with the weights that are to be trained
    (`Segment`).
    """
    totals = totals or normalizer_of(trajectories)
    weight_of = {
        "trajectory": lambda count: 1.0 / (totals.trajectories * count),
        "token": lambda count: 1.0 / totals.tokens,
        "constant": lambda count: 1.0 / (totals.trajectories * (grpo.aggregation_constant or 1.0)),
    }[grpo.aggregation]
    sequences = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        trained = trained_contexts(trajectory)
        if not trained or (grpo.drop_zero_advantage and not np.any(advantage)):
            continue
        ends = list(accumulate(len(context.positions) for context in trained))
        if isinstance(advantage, list) and len(advantage) != ends[-1]:
            raise ValueError(f"{len(advantage)} advantages for {ends[-1]} trained tokens")
        for number, (context, end) in enumerate(zip(trained, ends, strict=True)):
            start = end - len(context.positions)
            sequences.append(
                TrainSequence(
                    ids=context.ids,
                    positions=context.positions,
                    old_logprobs=context.logprobs,
                    advantage=advantage[start:end] if isinstance(advantage, list) else advantage,
                    weight=weight_of(ends[-1] + inherited_trained_tokens(trajectory)),
                    key=(trajectory.group, trajectory.sample),
                    context=number,
                    stale=context.drawn_before(weights_version),
                )
            )
    return sequences


# --- From sequences to batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences packed for one forward. rows_R points into the T packed tokens, at the token before each target.

    tokens: number of tokens of the sequences. Of these T are computed, fewer if sequences share prefixes. rounds:
    indices of the R rows, such that no row occurs twice in a round; empty if no row occurs twice at all.
    """

    ids_T: torch.Tensor
    layout: Varlen | PrefixForest
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    old_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor  # times the importance weight, if there is one
    weights_R: torch.Tensor
    sequence_R: torch.Tensor  # index of the row's sequence in `members`
    turn_R: torch.Tensor  # number of its turn, a run of sampled tokens, within the micro-batch
    fresh_R: torch.Tensor  # whether the weights that are trained sampled it, not earlier ones
    members: list[int]  # numbers of the sequences, in the order packed
    tokens: int
    rounds: list[torch.Tensor] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return len(self.ids_T)

    def pick(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the rows in the loss, [R, H]. The gradient of a row that several sequences share
        is their sum, in one order."""
        if not self.rounds:
            return hidden_TH.index_select(0, self.rows_R)
        hidden_RH: torch.Tensor = _PickRounds.apply(hidden_TH, self.rows_R, self.rounds)
        return hidden_RH


class _PickRounds(torch.autograd.Function):
    """index_select whose backward adds one round after another; index_add_ on CUDA adds repeated rows in any order."""

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


class _Arrays(NamedTuple):
    """A sequence to train on, as arrays: its ids [L], and positions, log-probs and advantages of its trained tokens."""

    ids_L: Ints
    positions_R: Ints
    old_logprobs_R: Floats
    advantages_R: Floats
    weight: float
    stale: int

    @property
    def fed_L(self) -> Ints:
        """Return the ids without the last, which predicts no trained token."""
        return self.ids_L[:-1]


def _arrays(sequences: Sequence[TrainSequence]) -> dict[int, _Arrays]:
    """Return the sequences that have trained tokens, by their numbers."""
    return {
        n: _Arrays(
            np.array(one.ids, np.int64),
            np.array(one.positions, np.int64),
            np.array(one.old_logprobs, np.float64),
            np.broadcast_to(np.array(one.advantage, np.float64), len(one.positions))
            * (1.0 if one.importance is None else np.array(one.importance)),
            one.weight,
            one.stale,
        )
        for n, one in enumerate(sequences)
        if one.positions
    }


def pack(
    sequences: Sequence[TrainSequence],
    micro_batch_tokens: int,
    device: torch.device | str = "cpu",
    attention: TrainingAttention | None = None,
) -> list[MicroBatch]:
    """Sort by length and cut into micro-batches of at most `micro_batch_tokens` tokens with padding (or one sequence).

    The last token of a sequence predicts no trained token and is left out, as are sequences without trained tokens.
    attention: from `choose_attention`; None: `varlen_attention`, which runs everywhere.
    """
    return _pack(_arrays(sequences), micro_batch_tokens, device, attention)


def _pack(
    arrays: dict[int, _Arrays], budget: int, device: torch.device | str, attention: TrainingAttention | None
) -> list[MicroBatch]:
    batches: list[list[int]] = []
    for n in sorted(arrays, key=lambda n: (-len(arrays[n].ids_L), n)):
        if batches and len(arrays[batches[-1][0]].ids_L) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(n)
        else:
            batches.append([n])
    return [_varlen_batch({n: arrays[n] for n in members}, device, attention) for members in batches]


def _varlen_batch(
    chosen: dict[int, _Arrays], device: torch.device | str, attention: TrainingAttention | None
) -> MicroBatch:
    lengths = [len(one.fed_L) for one in chosen.values()]
    starts = np.cumsum(lengths) - lengths
    rows = [start + one.positions_R - 1 for start, one in zip(starts, chosen.values(), strict=True)]
    ids_T = np.concatenate([one.fed_L for one in chosen.values()])
    return _assembled(chosen, ids_T, np.concatenate(rows), Varlen(lengths, device, attention))


def idle_batch(device: torch.device | str = "cpu", attention: TrainingAttention | None = None) -> MicroBatch:
    """Return a micro-batch without sequences. Its forward and backward change nothing: its one row has the weight 0."""
    nothing = TrainSequence(ids=[0, 0], positions=[1], old_logprobs=[0.0], advantage=0.0, weight=0.0)
    return replace(_varlen_batch(_arrays([nothing]), device, attention), members=[], tokens=0)


def pack_shared(
    sequences: Sequence[TrainSequence],
    micro_batch_tokens: int,
    device: torch.device | str = "cpu",
    attention: TrainingAttention | None = None,
    prefix_attention: AttentionWithLSE | ForestKernels | None = None,
) -> list[MicroBatch]:
    """Pack common prefixes once where that is cheaper, and the other sequences by `pack`.

    Sequences that share a prefix are adjacent, and micro-batches of at most `micro_batch_tokens` computed tokens are
    cut between such groups. A larger group is cut by members, with its prefix repeated.
    prefix_attention: attention over segments that share prefixes, from `choose_sharing`; None: the CPU's.
    """
    arrays = _arrays(sequences)
    order = in_order({n: one.fed_L for n, one in arrays.items()})
    ordered = OrderedIds.of([arrays[n].fed_L for n in order])
    batches: list[list[int]] = []
    room = 0
    for group in shared_groups(ordered):
        for run in cut_group(ordered.run(group.start, group.stop), micro_batch_tokens):
            start, stop = group.start + run.start, group.start + run.stop
            members = ordered.run(start, stop)
            if not shared_groups(members):
                continue
            size = build_trie(members).tokens
            if size > room:
                batches.append([])
                room = micro_batch_tokens
            batches[-1].extend(order[start:stop])
            room -= size
    packed = [_shared_batch({n: arrays.pop(n) for n in members}, device, prefix_attention) for members in batches]
    return packed + _pack(arrays, micro_batch_tokens, device, attention)


def _shared_batch(
    chosen: dict[int, _Arrays],
    device: torch.device | str,
    prefix_attention: AttentionWithLSE | ForestKernels | None,
) -> MicroBatch:
    ordered = OrderedIds.of([one.fed_L for one in chosen.values()])
    trie = build_trie(ordered)
    rows = [trie.rows(m, one.positions_R - 1) for m, one in enumerate(chosen.values())]
    layout = PrefixForest(trie.lengths, trie.parents, device, prefix_attention)
    return _assembled(chosen, trie.ids(ordered), np.concatenate(rows), layout)


def _assembled(chosen: dict[int, _Arrays], ids_T: Ints, rows_R: Ints, layout: Varlen | PrefixForest) -> MicroBatch:
    device, arrays = layout.device, list(chosen.values())
    positions = [one.positions_R for one in arrays]

    def per_row(values: list[Floats]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.float32)).to(device)

    return MicroBatch(
        ids_T=torch.from_numpy(ids_T).to(device),
        layout=layout,
        rows_R=torch.from_numpy(rows_R).to(device),
        targets_R=torch.from_numpy(np.concatenate([one.ids_L[one.positions_R] for one in arrays])).to(device),
        old_logprobs_R=per_row([one.old_logprobs_R for one in arrays]),
        advantages_R=per_row([one.advantages_R for one in arrays]),
        weights_R=per_row([np.full(len(one.positions_R), one.weight) for one in arrays]),
        sequence_R=torch.from_numpy(np.repeat(np.arange(len(arrays)), list(map(len, positions)))).to(device),
        turn_R=torch.from_numpy(_turns(positions)).to(device),
        fresh_R=torch.from_numpy(np.concatenate([np.arange(len(one.positions_R)) >= one.stale for one in arrays])).to(
            device
        ),
        members=list(chosen),
        tokens=sum(len(one.fed_L) for one in arrays),
        rounds=[torch.from_numpy(places).to(device) for places in _rounds(rows_R)],
    )


def _turns(positions: Sequence[Ints]) -> Ints:
    """Return the number of each row's turn. A turn begins with a sequence, and after a token that was not sampled."""
    begins = [np.diff(one, prepend=one[:1] - 2) != 1 for one in positions]
    return np.cumsum(np.concatenate(begins)) - 1


def _rounds(rows_R: Ints) -> list[Ints]:
    """Return the indices of rows by how often the same row occurred before; none if no row occurs twice."""
    order_R = np.argsort(rows_R, kind="stable")
    ordered_R = rows_R[order_R]
    first_R = np.searchsorted(ordered_R, ordered_R)  # of each run of equal rows
    before_R = np.empty_like(rows_R)
    before_R[order_R] = np.arange(len(rows_R)) - first_R
    rounds = int(before_R.max()) + 1
    return [np.flatnonzero(before_R == number) for number in range(rounds)] if rounds > 1 else []


# --- Common prefixes of sequences


@dataclass(frozen=True, slots=True)
class OrderedIds:
    """Sequences sorted by their ids, so that neighbours share the longest prefixes and a group is contiguous.

    common: for each but the last, the length of the longest common prefix with the next.
    """

    sequences: list[Ints]
    common: list[int]

    @classmethod
    def of(cls, sequences: Sequence[Ints]) -> "OrderedIds":
        """Return the `OrderedIds` of sequences that are sorted already (`in_order`)."""
        return cls(list(sequences), [common_length(a, b) for a, b in pairwise(sequences)])

    def __len__(self) -> int:
        return len(self.sequences)

    def run(self, start: int, stop: int) -> "OrderedIds":
        """Return the sequences from `start` to `stop`."""
        return OrderedIds(self.sequences[start:stop], self.common[start : stop - 1])


@dataclass(slots=True)
class Branching:
    """Members [start, stop) of the order, whose longest common prefix has `length` tokens.

    below: the branchings within it, in order. shared: whether its tokens, from the shared branching above it on, form a
    separate segment.
    """

    length: int
    start: int
    stop: int
    below: list["Branching"] = field(default_factory=list)
    shared: bool = False


@dataclass(slots=True)
class PrefixTrie:
    """Segments in preorder: (sequence that it was taken from, begin, end) of each, lengths, parents (-1: a root).

    pieces[m]: (position, row) at which each segment of the m-th sequence begins. tokens: number of tokens of all
    segments.
    """

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    pieces: list[list[tuple[int, int]]] = field(default_factory=list)
    tokens: int = 0

    def ids(self, ordered: OrderedIds) -> Ints:
        """Return the segments' token ids, concatenated."""
        return np.concatenate([ordered.sequences[member][begin:end] for member, begin, end in self.segments])

    def rows(self, member: int, positions: Ints) -> Ints:
        """Return the rows of these positions of a sequence."""
        begin, row = np.array(self.pieces[member], np.int64).T
        piece = np.searchsorted(begin, positions, "right") - 1
        rows: Ints = row[piece] + positions - begin[piece]
        return rows

    def add(self, member: int, begin: int, end: int, parent: int, members: range) -> int:
        """Add a segment of `members`; return its number."""
        for each in members:
            self.pieces[each].append((begin, self.tokens))
        self.segments.append((member, begin, end))
        self.lengths.append(end - begin)
        self.parents.append(parent)
        self.tokens += end - begin
        return len(self.lengths) - 1


def in_order(sequences: dict[int, Ints]) -> list[int]:
    """Return the numbers of the sequences in the order of their ids, and of the numbers for equal ids."""
    # Big-endian bytes have the order of the ids from 0 to 2^32 - 1, and are compared at once.
    return sorted(sequences, key=lambda n: (sequences[n].astype(">u4").tobytes(), n))


def shared_groups(ordered: OrderedIds) -> list[range]:
    """Return the runs of sequences with a prefix worth sharing; each is a tree of `build_trie`."""
    return [range(top.start, top.stop) for top in _tops(ordered)]


def cut_group(ordered: OrderedIds, budget: int) -> list[range]:
    """Cut a group into runs whose tries have at most `budget` tokens (or one member), prefix included. A run before the
    last ends in its second half, where neighbours share the least."""
    cuts: list[range] = []
    start = 0
    while start < len(ordered):
        sizes = [len(ordered.sequences[start])]  # for the first 1, 2, .. members; at most the tokens computed
        for after, shared in zip(ordered.sequences[start + 1 :], ordered.common[start:], strict=True):
            sizes.append(sizes[-1] + len(after) - shared)
            if sizes[-1] > budget:
                break
        fits = max(1, sum(size <= budget for size in sizes))
        while fits > 1 and build_trie(ordered.run(start, start + fits)).tokens > budget:
            fits -= 1
        if start + fits < len(ordered):
            cuts_at = ordered.common[start:]  # at n - 1: of the last of n members and the next one
            late = [n for n in range(1, fits) if 2 * sizes[n - 1] >= sizes[fits - 1]]
            for n in sorted(late, key=lambda n: (cuts_at[n - 1], -n)):
                if cuts_at[n - 1] >= cuts_at[fits - 1]:
                    break
                # For fewer members less may be worth sharing, so that they have more tokens.
                if build_trie(ordered.run(start, start + n)).tokens <= budget:
                    fits = n
                    break
        cuts.append(range(start, start + fits))
        start += fits
    return cuts


def group_tokens(prompt: int, own: int, members: int) -> int:
    """Return the largest number of tokens computed for a group. Its members have a common prompt of at most `prompt`
    tokens, and continue with `own` others each. The largest number comes from the whole prompt once, or from a prompt
    that is just not worth sharing, once per member."""
    if members == 1:
        return prompt + own
    apart = min(prompt, int(_price(members * own) / (members - 1)))
    return max(prompt + members * own, members * (apart + own))


def worth_sharing(prompt: int, own: int, members: int) -> bool:
    """Return whether the prompt of a group of `members`, with `own` tokens each after it, is a separate segment."""
    return (members - 1) * prompt > _price(members * own)


def build_trie(ordered: OrderedIds) -> PrefixTrie:
    """Return the trie of sequences, none empty. Prefixes that are not worth sharing are repeated for each sequence."""
    trie = PrefixTrie(pieces=[[] for _ in ordered.sequences])
    tops = {top.start: top for top in _tops(ordered)}
    at = 0
    while at < len(ordered):
        if at in tops:
            _grow(trie, ordered, tops[at])
            at = tops[at].stop
        else:
            trie.add(at, 0, len(ordered.sequences[at]), -1, range(at, at + 1))
            at += 1
    return trie


def common_length(a: Ints, b: Ints) -> int:
    """Return the length of the longest common prefix."""
    least = min(len(a), len(b))
    differs = a[:least] != b[:least]
    at = int(differs.argmax()) if least else 0
    return at if least and differs[at] else least


def _grow(trie: PrefixTrie, ordered: OrderedIds, top: Branching) -> None:
    """Add the segments of a shared branching and of all below it. It uses a stack, because a chain of prefixes may be
    long."""
    todo: list[tuple[Branching | int, int, int]] = [(top, 0, -1)]  # a branching or one member, tokens above, parent
    while todo:
        node, depth, parent = todo.pop()
        if isinstance(node, int):
            length = len(ordered.sequences[node])
            if length > depth:
                trie.add(node, depth, length, parent, range(node, node + 1))
            continue
        if node.shared:
            members = range(node.start, node.stop)
            parent = trie.add(node.start, depth, node.length, parent, members)
            depth = node.length
        todo.extend((child, depth, parent) for child in reversed(list(_children(node))))


def _children(node: Branching) -> Iterator[Branching | int]:
    at = node.start
    for child in node.below:
        yield from range(at, child.start)
        yield child
        at = child.stop
    yield from range(at, node.stop)


def _tops(ordered: OrderedIds) -> list[Branching]:
    """Return the uppermost shared branchings."""
    tops: list[Branching] = []
    for tree in _branchings(ordered):
        _choose(tree, ordered)
        todo = [tree]
        while todo:
            node = todo.pop()
            if node.shared:
                tops.append(node)
            else:
                todo.extend(reversed(node.below))
    return sorted(tops, key=lambda top: top.start)


def _branchings(ordered: OrderedIds) -> list[Branching]:
    """Return all branchings of sorted sequences, as trees. Each is an interval of equal prefixes (Abouelhoda et al.
    2004, "Replacing suffix trees with enhanced suffix arrays", algorithm 4.4)."""
    trees: list[Branching] = []
    stack: list[Branching] = []  # open, lengths ascending
    for place, length in enumerate([*ordered.common, 0]):
        start, last = place, None
        while stack and stack[-1].length > length:
            closed = stack.pop()
            closed.stop = place + 1
            if last is not None:
                closed.below.append(last)
            start, last = closed.start, closed
            if stack and stack[-1].length >= length:
                stack[-1].below.append(closed)
                last = None
        if length and not (stack and stack[-1].length == length):
            stack.append(Branching(length, start, 0, [] if last is None else [last]))
        elif last is not None:
            trees.append(last)
    return trees


def _price(rows: int) -> float:
    """Return the cost of a shared segment in addition to its tokens, with `rows` rows below it."""
    return NODE_COST + MERGE_COST * rows


def _choose(tree: Branching, ordered: OrderedIds) -> None:
    """Mark the branchings of a tree whose sharing costs least."""
    lengths = [len(ids) for ids in ordered.sequences]
    above: list[tuple[Branching, list[int]]] = []  # from the root on, each with the depths at which it may begin
    todo: list[tuple[Branching, list[int]]] = [(tree, [0])]
    while todo:
        node, depths = todo.pop()
        above.append((node, depths))
        todo.extend((child, [*depths, node.length]) for child in node.below)
    costs: dict[int, list[float]] = {}  # lowest cost of a branching, by the depth at which it begins
    cheaper: dict[int, list[bool]] = {}  # and whether sharing it is cheaper
    for node, depths in reversed(above):
        singles = [lengths[child] for child in _children(node) if isinstance(child, int)]
        rows = sum(lengths[n] - node.length for n in range(node.start, node.stop))

        def split(depth: int, at: int, node: Branching = node, singles: list[int] = singles) -> float:
            """Return the cost of its separate parts, each from `depth` on, the depth numbered `at`."""
            return sum(singles) - len(singles) * depth + sum(costs[id(child)][at] for child in node.below)

        once = node.length + _price(rows) + split(node.length, len(depths))
        apart = [split(depth, at) for at, depth in enumerate(depths)]
        costs[id(node)] = [min(once - depth, cost) for depth, cost in zip(depths, apart, strict=True)]
        cheaper[id(node)] = [once - depth < cost for depth, cost in zip(depths, apart, strict=True)]
    chosen: list[tuple[Branching, int, int]] = [(tree, 0, 1)]  # with its depth's number, and how many depths it has
    while chosen:
        node, at, count = chosen.pop()
        node.shared = cheaper[id(node)][at]
        chosen.extend((child, count if node.shared else at, count + 1) for child in node.below)
