"""Shared by the tests of attention to a KV cache in blocks: sequences in poisoned blocks, expected rows, error budgets.

All unwritten memory is NaN: blocks that no sequence owns, slots after a sequence's last key, rows of q that do not
exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from attention_cases import make_qkv, variances
from torch import Tensor

from thresher.kernels.attention.rows import DecodeRows, PrefillRows, SharedPrefix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVIATIONS = 3  # as in attention_cases.py
POWER = (
    2  # a GPU's power of two is off by 2^-22 of itself, four times what `variances` allows for; the rest outweighs it
)


@dataclass(frozen=True)
class Judged:
    """Expected rows, and the square of each one's allowed error."""

    right: Tensor  # [.., N, D] float64
    squares: Tensor  # [..]

    def holds(self, found: Tensor) -> None:
        """Check unmasked rows together and each alone; a row without a budget must be zeros."""
        errors = (found.double().cpu() - self.right).square().sum((-1, -2))
        assert found.isfinite().all()
        assert (errors[self.squares == 0] == 0).all()
        budget = (DEVIATIONS * POWER) ** 2
        assert errors.sum() <= budget * self.squares.sum()
        assert (errors <= 4 * budget * self.squares).all()

    def holds_in_bfloat16(self, found: Tensor) -> None:
        """Check all rows together, from rounded inputs. A probability and a result are each rounded by at most 2^-9."""
        assert found.dtype == torch.bfloat16
        assert (found.double().cpu() - self.right).norm() <= 2**-8 * DEVIATIONS * self.right.norm()


class CachedCase:
    """Sequences with known q, k and v in randomly assigned blocks; the last rows of each sequence are the new ones.

    heads: (N, K, D). groups: (length of the common prefix, numbers of the sequences that share it).
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        slots: int,
        lengths: Sequence[int],
        groups: Sequence[tuple[int, Sequence[int]]] = (),
        seed: int = 0,
    ) -> None:
        self.heads, self.slots, self.lengths, self.groups = heads, slots, list(lengths), list(groups)
        _, K, D = heads
        needs = [-(-max(length, 1) // slots) for length in lengths]
        shared = [length // slots for length, _ in groups]
        count = 2 + sum(needs) + sum(shared)
        free = list(range(1, count))
        Random(seed).shuffle(free)
        # Keys and values of a block are adjacent, so that the stride between blocks of either is larger than necessary.
        cache = torch.full((count, 2, K, slots, D), torch.nan)
        self.k_PKSD, self.v_PKSD = cache[:, 0], cache[:, 1]
        self.qkv = [make_qkv(*heads, max(length, 1), seed=seed + number) for number, length in enumerate(lengths)]
        self.table_BP = torch.zeros(len(needs), max(needs), dtype=torch.int32)
        self.prefix_blocks = []
        prefix_of: dict[int, list[int]] = {}
        for number, (length, members) in enumerate(groups):
            assert length % slots == 0
            blocks, free = free[: shared[number]], free[shared[number] :]
            self.prefix_blocks.append(blocks)
            _, k, v = make_qkv(*heads, length, seed=seed + 1000 + number)
            for member in members:
                self.qkv[member][1][:length], self.qkv[member][2][:length] = k, v
                prefix_of[member] = blocks
        for number, need in enumerate(needs):
            common = prefix_of.get(number, [])
            own, free = free[: need - len(common)], free[need - len(common) :]
            self.table_BP[number, :need] = torch.tensor([*common, *own])
            self._write(number)
        self.spare = free[0]  # full of NaN

    def _write(self, number: int) -> None:
        length, table = self.lengths[number], self.table_BP[number].long()
        position = torch.arange(length)
        block, slot = table[position // self.slots], position % self.slots
        _, k, v = self.qkv[number]
        self.k_PKSD[block, :, slot], self.v_PKSD[block, :, slot] = k[:length], v[:length]

    def rounded(self, q_scale: float = 1.0) -> "CachedCase":
        """Round q times q_scale, k and v to bfloat16, in place."""
        self.qkv = [tuple(x.bfloat16().float() for x in (q_scale * q, k, v)) for q, k, v in self.qkv]  # type: ignore[misc]
        for number in range(len(self.lengths)):
            self._write(number)
        return self

    def judge(self, number: int, rows: slice) -> Judged:
        """Return a sequence's expected rows."""
        q, k, v = self.qkv[number]
        inputs = (x.double().transpose(0, 1)[None] for x in (q, k, v))
        right = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        return Judged(right[rows], variances((q, k, v), [len(q)])[0][rows])

    def decode(self, counts: Sequence[int], queries: int, share: bool = False) -> tuple[Tensor, DecodeRows, Judged]:
        """Return the last `counts` rows of each sequence, in slots for `queries`. share: with the groups' prefixes."""
        B, (N, _, D) = len(counts), self.heads
        q_BQND = torch.full((B, queries, N, D), torch.nan)
        right, squares = torch.zeros(B, queries, N, D, dtype=torch.float64), torch.zeros(B, queries).double()
        start = []
        for number, count in enumerate(counts):
            rows = slice(self.lengths[number] - count, self.lengths[number])
            start.append(rows.start)
            if count:
                q_BQND[number, :count] = self.qkv[number][0][rows]
                judged = self.judge(number, rows)
                right[number, :count], squares[number, :count] = judged.right, judged.squares
        first, prefix = [0] * B, None
        if share:
            prefix = self._prefix()
            for length, members in self.groups:
                for member in members:
                    first[member] = length
        rows_of = DecodeRows(
            self.table_BP.to(DEVICE),
            ints(start),
            ints(counts),
            ints(first) if share else None,
            prefix,
        )
        return q_BQND.to(DEVICE), rows_of, Judged(right, squares)

    def _prefix(self) -> SharedPrefix:
        """Return the groups, and one more that no longer exists: length 0, and the first one's members."""
        G, most = len(self.groups) + 1, max(len(members) for _, members in self.groups) + 1
        table_GP = torch.full((G, max(map(len, self.prefix_blocks)) + 1), self.spare, dtype=torch.int32)
        members_GM = torch.full((G, most), -1, dtype=torch.int32)
        for number, (_, members) in enumerate(self.groups):
            table_GP[number, : len(self.prefix_blocks[number])] = torch.tensor(self.prefix_blocks[number])
            members_GM[number, : len(members)] = torch.tensor(list(members))
        members_GM[-1] = members_GM[0]
        length_G = ints([*(length for length, _ in self.groups), 0])
        return SharedPrefix(table_GP.to(DEVICE), length_G, members_GM.to(DEVICE))

    def prefill(self, counts: Sequence[int], gap: int = 2) -> tuple[Tensor, PrefillRows, Judged]:
        """Return the last `counts` rows of each sequence, runs in any order, with padding rows around each run."""
        N, _, D = self.heads
        T = sum(counts) + gap * (len(counts) + 1)
        q_TND = torch.full((T, N, D), torch.nan)
        right, squares = torch.zeros(T, N, D, dtype=torch.float64), torch.zeros(T).double()
        start, row_of, at = [0] * len(counts), [0] * len(counts), gap
        for number in Random(1).sample(range(len(counts)), len(counts)):
            count, length = counts[number], self.lengths[number]
            rows, place = slice(length - count, length), slice(at, at + count)
            start[number], row_of[number] = rows.start, at
            q_TND[place] = self.qkv[number][0][rows]
            judged = self.judge(number, rows)
            right[place], squares[place] = judged.right, judged.squares
            at += count + gap
        rows_of = PrefillRows(self.table_BP.to(DEVICE), ints(row_of), ints(start), ints(counts), max(counts))
        return q_TND.to(DEVICE), rows_of, Judged(right, squares)

    def caches(self) -> tuple[Tensor, Tensor]:
        """Return k and v on the device, with the same strides."""
        both = torch.stack([self.k_PKSD, self.v_PKSD], 1).to(DEVICE)
        return both[:, 0], both[:, 1]


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)
