"""The tensors of the KV cache, and the view of one forward on them, for a CPU (Paged) and for a GPU (Device).

A `PagedKV` has, for each layer with attention, keys [P, K, D, S] and values [P, K, S, D]: blocks, key/value heads, head
dimension, slots of a block. A BLAS multiplies them in this layout (kernels/attention/paged_cpu.py). A `DeviceKV` has
both as [P, K, S, D], the layout of the kernels (paged_cuda.py). `DeltaStates` has, for each layer with the gated delta
rule and each slot, a ring of states and a ring of rows before the convolution; it also has snapshots. `PagedStep` and
`DeviceStep` are the layout of a forward. Called, they rotate, write keys and values of the new rows to their slots, and
attend; `delta` computes the rule and writes to the rings.
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
from thresher.kernels.attention.paged_cuda import prefill_attention
from thresher.kernels.attention.rows import PrefillRows
from thresher.kernels.attention.tiles import row_tile
from thresher.kernels.attention.varlen import TrainingAttention, Varlen
from thresher.kernels.delta.layer import DeltaInputs
from thresher.kernels.delta.rule import ChunkPlan
from thresher.kernels.delta.steps import DeltaRuns, Rings, delta_prefill, delta_runs, delta_steps
from thresher.kernels.layers import rotate_and_store, rotated_heads
from thresher.kernels.operands import ROW_MULTIPLE
from thresher.policy.config import ModelConfig


def check_block_size(block_size: int) -> None:
    """Raise UserError for a number of slots that softmax would treat differently (paged_cpu.py, SLOT_STEP)."""
    if block_size < 1 or block_size % SLOT_STEP:
        raise UserError(f"rollout.kv_block_size is {block_size}; expected a multiple of {SLOT_STEP}, such as 64")


class DeltaStates:
    """States of all layers with the gated delta rule. `slots` sequences have rings (kernels/delta/steps.py) of states
    [L, B, R, V, D, E] and of rows before the convolution [L, B, M, C]. `snapshots` prefixes, for reuse by other
    sequences, have the state and the last W - 1 rows. ring: R, one more than the tokens that may be taken back."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        snapshots: int,
        ring: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        assert config.delta is not None
        shape, layers = config.delta, config.delta_layers
        sizes = shape.num_value_heads, shape.key_head_dim, shape.value_head_dim
        wide = torch.promote_types(dtype, torch.float32)
        self.ring, self.width = ring, shape.conv_kernel_dim
        self.reach, self.held = self.width - 1, ring + self.width - 1
        # Not filled, so that on a CPU it takes no memory before use: `begin` writes the values that are read first.
        self.state_LBRVDE = torch.empty(layers, slots, ring, *sizes, dtype=wide, device=device)
        self.rows_LBMC = torch.empty(layers, slots, self.held, shape.channels, dtype=dtype, device=device)
        self.kept_state = torch.empty(layers, snapshots, *sizes, dtype=wide, device=device)
        self.kept_rows = torch.empty(layers, snapshots, self.reach, shape.channels, dtype=dtype, device=device)
        self.tensors = [self.state_LBRVDE, self.rows_LBMC, self.kept_state, self.kept_rows]
        for x in self.tensors[:2]:
            x[:, -1] = 0  # of the spare slot, from which padding rows begin

    def layer(self, number: int) -> Rings:
        return Rings(self.state_LBRVDE[number], self.rows_LBMC[number])

    def begin(self, slot: int, tokens: int, snapshot: int | None) -> None:
        """Begin a sequence after its first `tokens` tokens, from the states in `snapshot`; at 0 there is none."""
        state_LVDE = self.state_LBRVDE[:, slot, tokens % self.ring]
        if snapshot is None:
            assert tokens == 0
            state_LVDE.zero_()
            return
        state_LVDE.copy_(self.kept_state[:, snapshot])
        for back, place in enumerate(self._places(tokens)):
            self.rows_LBMC[:, slot, place] = self.kept_rows[:, snapshot, back]

    def save(self, slot: int, tokens: int, snapshot: int) -> None:
        """Store the states of a sequence after its first `tokens` tokens in a snapshot."""
        self.kept_state[:, snapshot] = self.state_LBRVDE[:, slot, tokens % self.ring]
        for back, place in enumerate(self._places(tokens)):
            self.kept_rows[:, snapshot, back] = self.rows_LBMC[:, slot, place]

    def runs(self, runs: QueryRuns, rows: int, device: torch.device, last_only: bool = False) -> DeltaRuns:
        """Return the layout of a step's runs, with `rows` rows including padding. last_only: as in `delta_runs`."""
        sizes = self.ring, self.width
        return delta_runs(runs.slot_N, runs.start_N, runs.count_N, runs.row_N, rows, sizes, device, last_only)

    def _places(self, tokens: int) -> list[int]:
        """Return the places in the ring of the last W - 1 rows before position `tokens`."""
        return [position % self.held for position in range(tokens - self.reach, tokens)]

    @staticmethod
    def bytes_needed(config: ModelConfig, item_size: int, ring: int = 1) -> int:
        """Return the bytes of one sequence."""
        shape = config.delta
        if shape is None:
            return 0
        state = ring * shape.num_value_heads * shape.key_head_dim * shape.value_head_dim * max(item_size, 4)
        return config.delta_layers * (state + (ring + shape.conv_kernel_dim - 1) * shape.channels * item_size)


class _KVCache:
    """Keys and values of all attention layers, in blocks of `block_size` slots, and states of layers with states."""

    def __init__(self, block_size: int, states: DeltaStates | None) -> None:
        check_block_size(block_size)
        self.block_size, self.states = block_size, states
        self.blocks: list[torch.Tensor] = []  # keys and values, [layers, blocks, ..]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.blocks + ([] if self.states is None else self.states.tensors)

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block."""
        for x in self.blocks:
            x[:, target] = x[:, source]


class PagedKV(_KVCache):
    """The cache that `PagedStep` reads."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        states: DeltaStates | None = None,
    ) -> None:
        super().__init__(block_size, states)
        layers, kv_heads, dim = config.attention_layers, config.num_key_value_heads, config.head_dim
        tile = row_tile(dim, block_size, dtype, torch.device(device))
        self.shape = CacheShape(config.num_attention_heads, kv_heads, block_size, tile)
        # Zeros, not empty: masked slots are multiplied by an exact 0, and NaN times 0 would stay NaN.
        self.k_LPKDS = torch.zeros(layers, num_blocks, kv_heads, dim, block_size, dtype=dtype, device=device)
        self.v_LPKSD = torch.zeros(layers, num_blocks, kv_heads, block_size, dim, dtype=dtype, device=device)
        self.blocks = [self.k_LPKDS, self.v_LPKSD]

    @staticmethod
    def bytes_needed(config: ModelConfig, num_blocks: int, block_size: int, item_size: int) -> int:
        per_token = 2 * config.attention_layers * config.num_key_value_heads * config.head_dim
        return per_token * num_blocks * block_size * item_size


class PagedStep:
    """The new rows of one forward: slot_T (rows of `table_BP`), positions_T, and attention as a callable.

    Rows are ordered by sequence. They are padded to a multiple of ROW_MULTIPLE, with which a CPU's matmul is
    batch-invariant (kernels/operands.py); padding rows write to block 0. rows: the number without padding.
    """

    def __init__(self, cache: PagedKV, table_BP: npt.NDArray[np.int64], runs: QueryRuns, *, share: bool = True) -> None:
        self.cache = cache
        size, device = cache.shape.block_size, cache.k_LPKDS.device
        rows_4T = prefill_rows(table_BP, runs, size)
        self.rows = rows_4T.shape[1]
        filling_4T = np.zeros((4, -self.rows % ROW_MULTIPLE), rows_4T.dtype)
        filling_4T[3] = np.arange(filling_4T.shape[1]) % size
        sent_4T = torch.from_numpy(np.concatenate([rows_4T, filling_4T], 1)).to(device)
        self.slot_T, self.positions_T, self.block_T, self.offset_T = sent_4T.unbind()
        self.buckets = paged_buckets(table_BP, runs, cache.shape, device, share=share)
        self.delta_runs = None if cache.states is None else cache.states.runs(runs, len(self.slot_T), device)

    def delta(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        assert self.cache.states is not None and self.delta_runs is not None
        return delta_steps(inputs, self.cache.states.layer(layer), self.delta_runs)

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        q_TND, k_TKD, v_TKD = rotated_heads(qkv_TMD, rope, kv_heads)
        k_PKDS, v_PKSD = self.cache.k_LPKDS[layer], self.cache.v_LPKSD[layer]
        k_PKDS[self.block_T, :, :, self.offset_T] = k_TKD
        v_PKSD[self.block_T, :, self.offset_T] = v_TKD
        return paged_attention(q_TND, k_PKDS, v_PKSD, self.buckets)


class DeviceKV(_KVCache):
    """The cache that `DeviceStep` and the decode steps of decoder_cuda.py read."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: DeltaStates | None = None,
    ) -> None:
        super().__init__(block_size, states)
        shape = (config.attention_layers, num_blocks, config.num_key_value_heads, block_size, config.head_dim)
        # Not filled: the kernels read no slot that was not written.
        self.k_LPKSD, self.v_LPKSD = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.blocks = [self.k_LPKSD, self.v_LPKSD]


def prefill_rows(table_BP: Ints, runs: QueryRuns, block_size: int) -> Ints:
    """Return the slot, position, block and offset in the block of each new row, [4, T]."""
    position_T = np.repeat(runs.start_N, runs.count_N) + places(runs.count_N)
    slot_T = np.repeat(runs.slot_N, runs.count_N)
    number_T, offset_T = np.divmod(position_T, block_size)
    return np.stack([slot_T, position_T, table_BP[slot_T, number_T], offset_T])


class DeviceStep:
    """New rows of prompts and of appended text, on a GPU: slot_T, positions_T, and attention as a callable.

    The host sends all inputs in one copy of int32. fresh: computes attention if every run begins at position 0, so that
    its keys are those of its own rows.
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
        numbers = np.concatenate([rows.ravel(), about.ravel(), table_BP[runs.slot_N, :blocks].ravel()])
        sent = to_device(numbers.astype(np.int32), device)
        count = len(runs.slot_N)
        rows_4T, about_3N, table = sent.split([rows.size, about.size, count * blocks])
        self.slot_T, self.positions_T, self.block_T, self.offset_T = rows_4T.view(4, -1)
        row_N, start_N, count_N = about_3N.view(3, count)
        self.rows = PrefillRows(table.view(count, blocks), row_N, start_N, count_N, int(runs.count_N.max()))
        if cache.states is not None:
            packed = QueryRuns(runs.slot_N, runs.start_N, runs.count_N, about[0])
            self.delta_runs = cache.states.runs(packed, len(self.slot_T), device, last_only=True)
            self.delta_plan = ChunkPlan([0, *np.cumsum(runs.count_N).tolist()], None, device)

    def delta(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        assert self.cache.states is not None
        return delta_prefill(inputs, self.cache.states.layer(layer), self.delta_runs, self.delta_plan)

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        q_TND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, self.block_T, self.offset_T)
        if self.fresh is not None and self.layout is not None:
            return self.fresh(*rotated_heads(qkv_TMD, rope, kv_heads), self.layout)
        return prefill_attention(q_TND, k_PKSD, v_PKSD, self.rows)
