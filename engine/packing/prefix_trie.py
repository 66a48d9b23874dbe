"""What sequences have in common at their beginnings, as a trie of token segments: each is computed once.

    cost = tokens computed + MERGE_COST x rows below a shared segment, for each such segment above them
                           + NODE_COST x shared segments

in units of one token's way through all layers. A shared segment saves its tokens for all but one of its members, and
every row below it merges one part of attention more. Of all sets of shared segments the cheapest is taken, exactly, by
dynamic programming; where none is cheaper than sharing nothing, nothing is shared. Both constants were measured on a
CPU with the demo's model, which is narrow: the wider a model, the less a merge is worth beside a token.

Sequences stand in the order of their ids, so that neighbours share the most and a group lies together.
Pure Python: no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MERGE_COST = 0.1
NODE_COST = 64.0

Ids = Sequence[int]


@dataclass(slots=True)
class Branching:
    """Members [start, stop) of the order have their first `length` tokens in common, and no more.

    below: the branchings within it, in order. shared: whether its tokens, from the shared branching above it on, are a
    segment of their own.
    """

    length: int
    start: int
    stop: int
    below: list["Branching"] = field(default_factory=list)
    shared: bool = False


@dataclass(slots=True)
class PrefixTrie:
    """Segments in preorder: token ids one behind the other, lengths, parents (-1: a root).

    pieces[m]: of the m-th sequence, (position, row) where each of its segments begins.
    """

    ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    pieces: list[list[tuple[int, int]]] = field(default_factory=list)

    def rows(self, member: int, positions: Sequence[int]) -> list[int]:
        """Where these positions of a sequence lie, which must ascend."""
        found: list[int] = []
        pieces = self.pieces[member]
        piece = 0
        for position in positions:
            while piece + 1 < len(pieces) and pieces[piece + 1][0] <= position:
                piece += 1
            found.append(pieces[piece][1] + position - pieces[piece][0])
        return found


def in_order(sequences: Sequence[Ids]) -> list[int]:
    """The numbers of the sequences in the order of their ids, equal ones in their own."""
    return sorted(range(len(sequences)), key=lambda n: (sequences[n], n))


def shared_groups(sequences: Sequence[Ids]) -> list[range]:
    """Of sequences in order, the runs of those that share something worth it; each is a tree of `build_trie`."""
    return [range(top.start, top.stop) for top in _tops(sequences)]


def cut_group(sequences: Sequence[Ids], budget: int) -> list[range]:
    """A group in order cut into runs whose tries have at most `budget` tokens (or one member), each with the prefix
    that it needs. A run that could go on ends behind its middle, where neighbours share the least."""
    cuts: list[range] = []
    start = 0
    while start < len(sequences):
        sizes = [len(sequences[start])]  # with the first so many members; at most what is computed
        for a, b in pairwise(sequences[start:]):
            sizes.append(sizes[-1] + len(b) - common(a, b))
            if sizes[-1] > budget:
                break
        fits = max(1, sum(size <= budget for size in sizes))
        while fits > 1 and len(build_trie(sequences[start : start + fits]).ids) > budget:
            fits -= 1
        if start + fits < len(sequences):
            late = [n for n in range(1, fits) if 2 * sizes[n - 1] >= sizes[fits - 1]]
            late.sort(key=lambda n: (common(sequences[start + n - 1], sequences[start + n]), -n))
            least = common(sequences[start + fits - 1], sequences[start + fits])
            for n in late:  # of fewer members less may be worth sharing, so that they are more tokens
                if common(sequences[start + n - 1], sequences[start + n]) >= least:
                    break
                if len(build_trie(sequences[start : start + n]).ids) <= budget:
                    fits = n
                    break
        cuts.append(range(start, start + fits))
        start += fits
    return cuts


def group_tokens(prompt: int, own: int, members: int) -> int:
    """The most tokens that are computed of a group whose members begin with at most `prompt` tokens in common, the same
    for all, and go on with `own` others each: the whole prompt once, or a prompt that is not quite worth sharing for
    each of them."""
    if members == 1:
        return prompt + own
    apart = min(prompt, int(_price(members * own) / (members - 1)))
    return max(prompt + members * own, members * (apart + own))


def worth_sharing(prompt: int, own: int, members: int) -> bool:
    """Whether such a group's whole prompt is a segment of its own."""
    return (members - 1) * prompt > _price(members * own)


def build_trie(sequences: Sequence[Ids]) -> PrefixTrie:
    """The trie of sequences in order, none empty. What is not worth sharing is there for each."""
    trie = PrefixTrie(pieces=[[] for _ in sequences])
    tops = {top.start: top for top in _tops(sequences)}
    at = 0
    while at < len(sequences):
        if at in tops:
            _grow(trie, sequences, tops[at])
            at = tops[at].stop
        else:
            _segment(trie, sequences[at], 0, len(sequences[at]), -1, range(at, at + 1))
            at += 1
    return trie


def common(a: Ids, b: Ids) -> int:
    """Tokens of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _segment(trie: PrefixTrie, ids: Ids, begin: int, end: int, parent: int, members: range) -> int:
    for member in members:
        trie.pieces[member].append((begin, len(trie.ids)))
    trie.lengths.append(end - begin)
    trie.parents.append(parent)
    trie.ids.extend(ids[begin:end])
    return len(trie.lengths) - 1


def _grow(trie: PrefixTrie, sequences: Sequence[Ids], top: Branching) -> None:
    """The segments of a shared branching and of all below it. A stack, for a chain of prefixes may be long."""
    todo: list[tuple[Branching | int, int, int]] = [(top, 0, -1)]  # a branching or one member, tokens above, parent
    while todo:
        node, depth, parent = todo.pop()
        if isinstance(node, int):
            if len(sequences[node]) > depth:
                _segment(trie, sequences[node], depth, len(sequences[node]), parent, range(node, node + 1))
            continue
        if node.shared:
            members = range(node.start, node.stop)
            parent = _segment(trie, sequences[node.start], depth, node.length, parent, members)
            depth = node.length
        todo.extend((child, depth, parent) for child in reversed(list(_children(node))))


def _children(node: Branching) -> Iterator[Branching | int]:
    at = node.start
    for child in node.below:
        yield from range(at, child.start)
        yield child
        at = child.stop
    yield from range(at, node.stop)


def _tops(sequences: Sequence[Ids]) -> list[Branching]:
    """The uppermost shared branchings."""
    tops: list[Branching] = []
    for tree in _branchings(sequences):
        _choose(tree, sequences)
        todo = [tree]
        while todo:
            node = todo.pop()
            if node.shared:
                tops.append(node)
            else:
                todo.extend(reversed(node.below))
    return sorted(tops, key=lambda top: top.start)


def _branchings(sequences: Sequence[Ids]) -> list[Branching]:
    """All branchings of sequences in order, as trees: an interval of equal beginnings each (Abouelhoda et al. 2004,
    "Replacing suffix trees with enhanced suffix arrays", algorithm 4.4)."""
    trees: list[Branching] = []
    stack: list[Branching] = []  # open, lengths ascending
    shared = [common(a, b) for a, b in pairwise(sequences)]
    for place, length in enumerate([*shared, 0]):
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
    """What a shared segment costs beside its tokens, with so many rows below it."""
    return NODE_COST + MERGE_COST * rows


def _choose(tree: Branching, sequences: Sequence[Ids]) -> None:
    """Mark the branchings of a tree whose sharing costs least."""
    above: list[tuple[Branching, list[int]]] = []  # from the root on, with the depths at which it may begin
    todo: list[tuple[Branching, list[int]]] = [(tree, [0])]
    while todo:
        node, depths = todo.pop()
        above.append((node, depths))
        todo.extend((child, [*depths, node.length]) for child in node.below)
    costs: dict[int, list[float]] = {}  # of a branching, by the depth at which it begins: the least
    cheaper: dict[int, list[bool]] = {}  # and whether sharing it is
    for node, depths in reversed(above):
        singles = [len(sequences[child]) for child in _children(node) if isinstance(child, int)]
        rows = sum(len(sequences[n]) - node.length for n in range(node.start, node.stop))

        def split(depth: int, at: int, node: Branching = node, singles: list[int] = singles) -> float:
            """Its parts by themselves, each from `depth` on, the depth numbered `at`."""
            return sum(singles) - len(singles) * depth + sum(costs[id(child)][at] for child in node.below)

        once = node.length + _price(rows) + split(node.length, len(depths))
        apart = [split(depth, at) for at, depth in enumerate(depths)]
        costs[id(node)] = [min(once - depth, cost) for depth, cost in zip(depths, apart, strict=True)]
        cheaper[id(node)] = [once - depth < cost for depth, cost in zip(depths, apart, strict=True)]
    chosen: list[tuple[Branching, int, int]] = [(tree, 0, 1)]  # with the depth at which it begins, and how many it has
    while chosen:
        node, at, count = chosen.pop()
        node.shared = cheaper[id(node)][at]
        chosen.extend((child, count if node.shared else at, count + 1) for child in node.below)
