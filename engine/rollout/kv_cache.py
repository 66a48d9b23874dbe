"""The KV cache in blocks: who owns which (no tensors), the tensors, and one forward's view of them.

A sequence owns a list of blocks, each of `page_size` slots. Several may own the same block: the samples of one question
share their prompt's. A block with more than one owner is never written; whoever has to, gets a copy.
Invariant, after every operation of the pool: free + blocks with owners = total, and no count of owners is negative.
Block 0 belongs to nobody: rows that pad a batch are written there.

A `PagedKV` holds, for each layer, [K, P, S, D]: key/value heads, blocks, slots of a block, head dimension. Everything
in it was computed from one version of the weights; a rollout starts from an empty pool. `PagedStep` is the `attend`
argument of one forward: it writes the new rows' keys and values to their slots and attends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from thresher.kernels.attention import KEY_STEP, ROW_STEP, PagedGroup, paged_attention
from thresher.kernels.matmul import ROW_MULTIPLE
from thresher.policy.config import ModelConfig
from thresher.rewards.errors import UserError

CHUNK = 1024  # a longer input enters the cache in several forwards, cut at multiples of this from its own start


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks in order, and how many of their slots are filled."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class BlockPool:
    """A fixed number of blocks, handed out and taken back. Which block is handed out changes no result."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        if num_blocks < 2 or page_size < 1:
            raise ValueError(f"a pool needs at least 2 blocks of at least 1 slot, got {num_blocks} of {page_size}")
        self.page_size = page_size
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second owner of everything in `table`; nothing is copied until one of them writes."""
        for block in table.blocks:
            self._owners[block] += 1
        return BlockTable(list(table.blocks), table.length)

    def extend(self, table: BlockTable, tokens: int) -> list[tuple[int, int]]:
        """Make room for `tokens` more and count them as filled. Returns the (from, to) block copies to make first."""
        copies = []
        if tokens > 0 and table.length % self.page_size and self._owners[table.blocks[-1]] > 1:
            shared = table.blocks[-1]
            table.blocks[-1] = self._take()
            self._owners[shared] -= 1
            copies.append((shared, table.blocks[-1]))
        table.length += tokens
        while len(table.blocks) * self.page_size < table.length:
            table.blocks.append(self._take())
        return copies

    def release(self, table: BlockTable) -> None:
        for block in table.blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)
        table.blocks.clear()
        table.length = 0

    def _take(self) -> int:
        if not self._free:
            raise RuntimeError("the block pool is empty: the scheduler promised more blocks than there are")
        block = self._free.pop()
        self._owners[block] = 1
        return block


@dataclass(frozen=True, slots=True)
class NewRows:
    """Tokens of one sequence that enter the cache in this forward, at positions start .. start + len(ids) - 1."""

    ids: list[int]
    start: int
    blocks: list[int]


Owner = TypeVar("Owner")


@dataclass(slots=True)
class ForwardBatch(Generic[Owner]):
    """What enters the cache in one forward, and whose it is."""

    pool: BlockPool
    items: list[NewRows] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, owner: Owner, table: BlockTable, ids: list[int]) -> list[int]:
        """Take in the first chunk of `ids`, making room for it; returns the rest, for the next forward."""
        chunk, start = ids[:CHUNK], table.length
        self.block_copies.extend(self.pool.extend(table, len(chunk)))
        self.items.append(NewRows(chunk, start, table.blocks))
        self.owners.append(owner)
        return ids[CHUNK:]


class PagedKV:
    """The tensors. `copy` follows the block pool's copy-on-write orders."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if KEY_STEP % page_size:
            raise UserError(f"rollout.page_size is {page_size}; expected a divisor of {KEY_STEP}, such as 16")
        shape = (config.num_hidden_layers, config.num_key_value_heads, num_blocks, page_size, config.head_dim)
        self.page_size = page_size
        # Zeros, not empty: masked slots are multiplied by an exact 0, which NaN would survive.
        self.k_LKPSD = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LKPSD = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_needed(config: ModelConfig, num_blocks: int, page_size: int, item_size: int) -> int:
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return per_token * num_blocks * page_size * item_size

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each."""
        if not copies:
            return
        source, target = (torch.tensor(side, device=self.k_LKPSD.device) for side in zip(*copies, strict=True))
        self.k_LKPSD[:, :, target] = self.k_LKPSD[:, :, source]
        self.v_LKPSD[:, :, target] = self.v_LKPSD[:, :, source]


class PagedStep:
    """One forward's new rows, laid out: `ids_T`, `positions_T`, and, as a callable, `attend`.

    Rows lie sequence after sequence and are padded to a multiple of ROW_MULTIPLE, in which a CPU's matmul is
    batch-invariant (kernels/matmul.py), with rows that write to block 0.
    `last_rows` gives, for each sequence, the row of its last new token.
    """

    def __init__(self, cache: PagedKV, items: Sequence[NewRows]) -> None:
        self.cache = cache
        size, device = cache.page_size, cache.k_LKPSD.device
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        self.last_rows: list[int] = []
        shapes: dict[tuple[int, int], list[tuple[int, NewRows]]] = {}
        for item in items:
            count, first = len(item.ids), len(ids)
            ids.extend(item.ids)
            positions.extend(range(item.start, item.start + count))
            slots.extend(item.blocks[at // size] * size + at % size for at in range(item.start, item.start + count))
            self.last_rows.append(len(ids) - 1)
            rows = 1 if count == 1 else -(-count // ROW_STEP) * ROW_STEP
            keys = -(-(item.start + count) // KEY_STEP) * KEY_STEP
            shapes.setdefault((rows, keys), []).append((first, item))
        padding = -len(ids) % ROW_MULTIPLE
        self.ids_T = torch.tensor(ids + [0] * padding, device=device)
        self.positions_T = torch.tensor(positions + [0] * padding, device=device)
        self.slots_T = torch.tensor(slots + [at % size for at in range(padding)], device=device)
        self.groups = [self._group(shape, members, device) for shape, members in shapes.items()]

    def _group(self, shape: tuple[int, int], members: list[tuple[int, NewRows]], device: torch.device) -> PagedGroup:
        rows, keys = shape
        blocks = keys // self.cache.page_size
        row: list[list[int]] = []
        position: list[list[int]] = []
        table: list[list[int]] = []
        out: list[int] = []
        take: list[int] = []
        for number, (first, item) in enumerate(members):
            count = len(item.ids)
            padding = rows - count
            row.append([*range(first, first + count), *[first + count - 1] * padding])
            position.append([*range(item.start, item.start + count), *[item.start + count - 1] * padding])
            table.append(item.blocks[:blocks] + [0] * (blocks - len(item.blocks)))
            out.extend(range(first, first + count))
            take.extend(range(number * rows, number * rows + count))
        tensors = (torch.tensor(x, dtype=torch.int64, device=device) for x in (row, position, table, out, take))
        return PagedGroup(*tensors)

    def __call__(self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        k_KPSD, v_KPSD = self.cache.k_LKPSD[layer], self.cache.v_LKPSD[layer]
        k_KPSD.flatten(1, 2).index_copy_(1, self.slots_T, k_TKD.transpose(0, 1))
        v_KPSD.flatten(1, 2).index_copy_(1, self.slots_T, v_TKD.transpose(0, 1))
        return paged_attention(q_TND, k_KPSD, v_KPSD, self.groups)
