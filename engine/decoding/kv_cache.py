"""The tensors of the KV cache, and one forward's view of them, for a CPU (Paged) and for a GPU (Device).

A `PagedKV` has for each layer keys [P, K, D, S] and values [P, K, S, D]: blocks, key/value heads, head dimension, slots
of a block; a BLAS multiplies them as they are (kernels/attention/paged_cpu.py). A `DeviceKV` has both as [P, K, S, D],
as the kernels read them (paged_cuda.py). `PagedStep` and `DeviceStep` are the `attend` argument of a forward: they
rotate, write the new rows' keys and values to their slots, and attend.
"""

import numpy as np
import numpy.typing as npt
import torch

from thresher.common.errors import UserError
from thresher.engine.decoding.batch_state import to_device
from thresher.kernels.attention.paged_cpu import (
    SLOT_STEP,
    CacheShape,
    Ints,
    QueryRuns,
    paged_attention,
    paged_buckets,
    places,
)
from thresher.kernels.attention.paged_cuda import PrefillRows, prefill_attention
from thresher.kernels.attention.tiles import row_tile
from thresher.kernels.attention.varlen import TrainingAttention, Varlen
from thresher.kernels.layers import rotate_and_store, rotated_heads
from thresher.kernels.operands import ROW_MULTIPLE
from thresher.policy.config import ModelConfig


def check_page_size(page_size: int) -> None:
    """Raise UserError for a number of slots that softmax would treat differently (paged_cpu.py, SLOT_STEP)."""
    if page_size < 1 or page_size % SLOT_STEP:
        raise UserError(f"rollout.kv_block_size is {page_size}; expected a multiple of {SLOT_STEP}, such as 64")


class _KVCache:
    """Keys and values of all layers, in blocks of `block_size` slots."""

    def __init__(self, page_size: int) -> None:
        check_page_size(page_size)
        self.block_size = page_size
        self.tensors: list[torch.Tensor] = []  # keys and values, [layers, blocks, ..]

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block."""
        for x in self.tensors:
            x[:, target] = x[:, source]


class PagedKV(_KVCache):
    """The cache that `PagedStep` reads."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(page_size)
        layers, kv_heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        tile = row_tile(dim, page_size, dtype, torch.device(device))
        self.shape = CacheShape(config.num_attention_heads, kv_heads, page_size, tile)
        # Zeros, not empty: masked slots are multiplied by an exact 0, which NaN would survive.
        self.k_LPKDS = torch.zeros(layers, num_blocks, kv_heads, dim, page_size, dtype=dtype, device=device)
        self.v_LPKSD = torch.zeros(layers, num_blocks, kv_heads, page_size, dim, dtype=dtype, device=device)
        self.tensors = [self.k_LPKDS, self.v_LPKSD]

    @staticmethod
    def bytes_needed(config: ModelConfig, num_blocks: int, page_size: int, item_size: int) -> int:
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return per_token * num_blocks * page_size * item_size


class PagedStep:
    """The new rows of one forward: slot_T (rows of `table_BP`), positions_T, and, as a callable, `attend`.

    Rows lie sequence after sequence. They are padded to a multiple of ROW_MULTIPLE, in which a CPU's matmul is
    batch-invariant (kernels/operands.py), with rows that write to block 0. rows: the number without padding.
    """

    def __init__(
        self, cache: PagedKV, table_BP: npt.NDArray[np.int64], runs: QueryRuns, shared_P: npt.NDArray[np.bool_] | None
    ) -> None:
        self.cache = cache
        size, device = cache.shape.slots, cache.k_LPKDS.device
        position_T = np.repeat(runs.start_N, runs.count_N) + places(runs.count_N)
        slot_T = np.repeat(runs.table_N, runs.count_N)
        self.rows = len(position_T)
        filling = np.arange(-self.rows % ROW_MULTIPLE)
        block_T = np.concatenate([table_BP[slot_T, position_T // size], np.zeros_like(filling)])
        offset_T = np.concatenate([position_T % size, filling % size])
        position_T = np.concatenate([position_T, np.zeros_like(filling)])
        slot_T = np.concatenate([slot_T, np.zeros_like(filling)])
        put = (torch.from_numpy(x).to(device) for x in (slot_T, position_T, block_T, offset_T))
        self.slot_T, self.positions_T, self.block_T, self.offset_T = put
        self.buckets = paged_buckets(table_BP, runs, cache.shape, device, shared_P)

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        q_TND, k_TKD, v_TKD = rotated_heads(qkv_TMD, rope, kv_heads)
        k_PKDS, v_PKSD = self.cache.k_LPKDS[layer], self.cache.v_LPKSD[layer]
        k_PKDS[self.block_T, :, :, self.offset_T] = k_TKD
        v_PKSD[self.block_T, :, self.offset_T] = v_TKD
        return paged_attention(q_TND, k_PKDS, v_PKSD, self.buckets)


class DeviceKV(_KVCache):
    """The cache that `DeviceStep` and the decode steps of decoder_cuda.py read."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(page_size)
        shape = (config.num_hidden_layers, num_blocks, config.num_key_value_heads, page_size, config.head_dim)
        # Not filled: the kernels read no slot that was not written.
        self.k_LPKSD, self.v_LPKSD = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.tensors = [self.k_LPKSD, self.v_LPKSD]


def prefill_rows(table_BP: Ints, runs: QueryRuns, block_size: int) -> Ints:
    """Return slot, position, block and offset in it of each new row, [4, T]."""
    position_T = np.repeat(runs.start_N, runs.count_N) + places(runs.count_N)
    slot_T = np.repeat(runs.table_N, runs.count_N)
    number_T, offset_T = np.divmod(position_T, block_size)
    return np.stack([slot_T, position_T, table_BP[slot_T, number_T], offset_T])


class DeviceStep:
    """New rows of prompts and of appended text, on a GPU: slot_T, positions_T, and, as a callable, `attend`.

    The host sends everything in one copy of int32. fresh: computes attention where every run begins at position 0, so
    that its keys are its own rows'.
    """

    def __init__(
        self,
        cache: DeviceKV,
        table_BP: Ints,
        runs: QueryRuns,
        device: torch.device,
        fresh: TrainingAttention | None = None,
    ) -> None:
        self.cache = cache
        self.fresh = None if runs.start_N.any() else fresh
        self.layout = None if self.fresh is None else Varlen(runs.count_N.tolist(), device)
        blocks = int((runs.start_N + runs.count_N - 1).max()) // cache.block_size + 1
        rows = prefill_rows(table_BP, runs, cache.block_size)
        about = np.stack([np.cumsum(runs.count_N) - runs.count_N, runs.start_N, runs.count_N])
        numbers = np.concatenate([rows.ravel(), about.ravel(), table_BP[runs.table_N, :blocks].ravel()])
        sent = to_device(numbers.astype(np.int32), device)
        count = len(runs.table_N)
        rows_4T, about_3N, table = sent.split([rows.size, about.size, count * blocks])
        self.slot_T, self.positions_T, self.block_T, self.offset_T = rows_4T.view(4, -1)
        row_N, start_N, count_N = about_3N.view(3, count)
        self.rows = PrefillRows(table.view(count, blocks), row_N, start_N, count_N, int(runs.count_N.max()))

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        q_TND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, self.block_T, self.offset_T)
        if self.fresh is not None and self.layout is not None:
            return self.fresh(*rotated_heads(qkv_TMD, rope, kv_heads), self.layout)
        return prefill_attention(q_TND, k_PKSD, v_PKSD, self.rows)
