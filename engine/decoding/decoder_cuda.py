"""Decoding on a GPU: the loop of decoder.py, with steps launched ahead so that the GPU does not wait for the host.

    draft      if drafts pay: read the pending step, and look up drafts (speculative.py)
    prefill    new rows of prompts and of appended text, except a sequence's last token: one forward, no draw. Few rows
               wait for the next fourth step, because they take as long as many. A graph where launches take most of
               the time. Log-probs of scored ids are computed next
    launch     feed the last token and the drafts of each sequence in a turn, draw after each of them, accept: a
               function of fixed buffers (`BucketStep`), on CUDA one graph
    receive    read the previous step: one row of ids, log-probs and a code per sequence; then the scores

Without drafts a step is launched before the previous one has been read. It takes its tokens from the device's arrays. A
turn that has ended therefore gets one token too many, which is discarded and counted; its key was never written.

    launch n     known += 1, room -= 1: the token exists, though the host has not seen it
    receive n    ids and log-probs go to the host's mirror; turns end; launch n + 1 is taken back for these

With drafts a step is read before the next is launched, because drafts depend on the last token; `Drafter.looks` decides
from counts alone. Then `receive n` also adds the accepted drafts to `known`.

Axes: N sequences of a decode step, B those of its bucket with padding, Q rows of a sequence, K drafts, P blocks of a
sequence, L tokens of a slot; g groups that share blocks, G these groups split into groups of MEMBERS, X the members in
a list.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from thresher.common.machine import cpu_memory
from thresher.engine.decoding.batch_state import (
    BatchState,
    Bools,
    Drawn,
    DrawnRows,
    StopTables,
    count_accepted,
    drawn_width,
    pack_drawn,
    to_pinned,
)
from thresher.engine.decoding.blocks import BlockPool
from thresher.engine.decoding.decoder import FORWARD_ROWS, DecodeClock, Decoder, DeviceTimer, Scores, states_bytes
from thresher.engine.decoding.kv_cache import DeltaStates, DeviceKV, DeviceStep, PagedKV, check_block_size, prefill_rows
from thresher.engine.decoding.scheduler import TokenSequence
from thresher.engine.decoding.speculative import STACKED, Costs, gpu_costs
from thresher.kernels import sampling
from thresher.kernels.attention.backends.choice import Backend, load_attention
from thresher.kernels.attention.paged_cpu import Ints, QueryRuns
from thresher.kernels.attention.paged_cuda import decode_attention, prefill_attention
from thresher.kernels.attention.rows import DecodeRows, PrefillRows, SharedPrefix, prefix_pays
from thresher.kernels.delta.layer import DeltaInputs
from thresher.kernels.delta.steps import NextRows, delta_next
from thresher.kernels.layers import rotate_and_store
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

# Size, drafts, shares; and the two host values of `SamplingTensors` that decide which kernels are launched: the common
# temperature of the rows, and whether any row is filtered.
StepKey = tuple[int, int, bool, float | None, bool]
KV_SHARE = 0.85  # share of the free memory of a GPU; the rest is for the forward
# In steps, while others decode and new rows are few. Counted, not timed, so that a run repeats bit for bit.
PREFILL_EVERY = 4
FEW_ROWS = FORWARD_ROWS // 2
PREFILL_ROWS = (128, 256, 512, 1024, 2048)  # row buckets of the forwards that are captured as graphs
PREFILL_RUNS = 32  # limit of sequences in such a forward
# Limit of rows times weights of such a forward. Above it a GPU is busy for longer (5 ms at 500 TFLOP/s) than launches
# take, and would spend that time on padding rows too.
PREFILL_WORK = 1.25e12
KEPT_SHARE = 0.8  # share of a GPU's memory: a cache that fits in it together with the memory of updates stays allocated


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, or the machine's memory that this process may use at most."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else cpu_memory()[0]


def memory_left(device: torch.device) -> str:
    """Describe how much memory is free, and on a GPU which programs hold the rest."""
    said = f"{free_memory(device) / 2**30:.3g} GiB are free"
    if device.type != "cuda":
        return said
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    return said + (
        f" (of {total / 2**30:.3g} on {device} torch holds {ours / 2**30:.3g} here, other programs and libraries "
        f"{(total - free - ours) / 2**30:.3g})"
    )


def make_decoder(policy: Policy, tokenizer: Tokenizer, attention: Backend = "torch", **options: Any) -> Decoder:
    """Return the decoder of an attention backend (kernels/attention/backends/choice.py). options: as in `Decoder`."""
    if attention == "torch":
        return Decoder(policy, tokenizer, **options)
    return DeviceDecoder(policy, tokenizer, prefill=attention, **options)


class DeviceDecoder(Decoder):
    """`Decoder` that launches steps before earlier ones are read back. Its results are those of `Decoder` up to
    rounding, because the kernels add in another order."""

    launches_ahead = True

    def __init__(self, policy: Policy, tokenizer: Tokenizer, *, prefill: Backend = "triton", **options: Any) -> None:
        """Set up the decoder. prefill: attention backend within fresh prompts; Triton computes rows after a history."""
        self.fresh = None if prefill == "triton" else load_attention(prefill)
        self._weights = sum(weight.numel() for weight in policy.parameters())
        self.wanted_blocks = 0  # set at the end of __init__; `begin` takes the memory
        self.keeps = False  # whether cache and graphs outlive `end`
        self._update_bytes = 0  # peak memory of the updates so far, without the cache
        self._trained: tuple[int, ...] = ()  # versions of the weights at the last `end`
        self._steps: dict[StepKey, BucketStep] = {}
        self._prefills: dict[int, PrefillStep] = {}  # by rows
        self._pool: Any = None  # of their graphs
        self._addresses: list[int] = []  # of the weights and the cache, which the graphs read
        self._stops_version = 0
        self._last_batch: BatchState | None = None
        super().__init__(policy, tokenizer, **options)
        check_block_size(self.block_size)
        self.wanted_blocks = self.num_blocks

    def end(self, keep: bool = False) -> None:
        """Free the cache and the captured graphs, which `begin` then makes anew. They are kept if an update has shown
        that there is room for them, or if `keep` is set."""
        device = self.policy.device
        if not (self.keeps or keep):
            self._drop()
        if device.type == "cuda":
            self._trained = self._versions()
            torch.cuda.reset_peak_memory_stats(device)

    def _drop(self) -> None:
        self._forget_steps()
        self.cache = None

    def _forget_steps(self) -> None:
        """Drop the steps. A graph pool ends with its last graph, so the next graphs need a new one."""
        self._steps, self._prefills = {}, {}
        self._pool = torch.cuda.graph_pool_handle() if self.policy.device.type == "cuda" else None

    def _open_cache(self) -> None:
        if not self.wanted_blocks:
            return
        policy = self.policy
        if self.cache is None:
            self.num_blocks = self._planned_blocks()
            sizes = self.num_blocks, self.block_size
            self.cache = DeviceKV(policy.config, *sizes, policy.dtype, policy.device, self._make_states())
        self.keeps = policy.device.type != "cuda" or self._has_room()

    def _has_room(self) -> bool:
        """Return whether the cache fits together with the memory of updates; False before the first update."""
        device, held = self.policy.device, sum(x.nbytes for x in self.held())
        if self._trained not in ((), self._versions()):
            others = held if self.keeps else 0
            self._update_bytes = max(self._update_bytes, torch.cuda.max_memory_allocated(device) - others)
        room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return 0 < self._update_bytes <= KEPT_SHARE * room - held

    def _versions(self) -> tuple[int, ...]:
        """Return the number of changes of each weight; it differs if an update ran in between."""
        return tuple(parameter._version for parameter in self.policy.parameters())

    def _start_over(self, longest: int, clock: DecodeClock, kept: BlockPool | None = None) -> None:
        super()._start_over(longest, clock, kept)
        self._pending: PendingStep | None = None
        self._scores: list[Scores] = []  # launched and not yet read
        self._steps_begun = 0
        self._ended: list[TokenSequence] = []  # in this step
        self._new_ids: list[tuple[TokenSequence, list[int]]] = []
        # An update writes the weights in place, so these change only if memory was freed or moved.
        read = [*self.policy.parameters(), *self.policy.buffers(), *self.held()]
        addresses = [x.data_ptr() for x in read]
        if addresses != self._addresses:
            self._forget_steps()
            self._addresses = addresses

    def _make_batch(self, longest: int, blocks: int) -> BatchState:
        """Return the last run's arrays, cleared, if they are long enough (the graphs read them); else new ones."""
        batch = self._last_batch
        if batch is None or longest > batch.length or blocks > batch.table_BP.shape[1]:
            self._forget_steps()
            batch = self._last_batch = super()._make_batch(longest, blocks)
        batch.clear()
        return batch

    def _cache(self) -> DeviceKV:
        assert isinstance(self.cache, DeviceKV)
        return self.cache

    def _planned_blocks(self) -> int:
        """Return the requested number of blocks; on CUDA at most as many as fit into KV_SHARE of the free memory."""
        device = self.policy.device
        if device.type != "cuda":
            return self.wanted_blocks
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + reserved
        config, item = self.policy.config, self.policy.dtype.itemsize
        states = states_bytes(config, item, self.max_running, self.ring)
        a_block = max(PagedKV.bytes_needed(config, 1, self.block_size, item), 1)
        return max(min(self.wanted_blocks, (int(KV_SHARE * free) - states) // a_block), 1)

    @property
    def idle(self) -> bool:
        return super().idle and self._pending is None

    @property
    def takes_text(self) -> bool:
        return self._steps_begun % PREFILL_EVERY == 0

    @torch.inference_mode()
    def step(self) -> list[TokenSequence]:
        """Launch a step, then read the previous one; return the sequences whose turn has ended, the oldest first."""
        started, self._busy = time.perf_counter(), 0.0
        self._new_ids, self._ended = [], []
        self._admit()
        self._look_up_drafts()
        runs = self._schedule_rows()
        decodes = self.batch.known_B[runs.slot_N] == self.batch.cached_B[runs.slot_N] + 1
        new = runs[np.flatnonzero(~decodes)]
        scores, self._scores = self._scores, []
        if self.takes_text or not decodes.any() or new.count_N.sum() > FEW_ROWS:
            self._prefill(new)
        self._mark_prefilled()
        self._steps_begun += 1
        before, self._pending = self._pending, self._launch(runs.slot_N[decodes])
        self._receive(before)
        self._ended += self._read_scores(scores)
        self.clock.host += time.perf_counter() - started - self._busy
        return sorted(self._ended, key=attrgetter("number"))

    def new_ids(self) -> list[tuple[TokenSequence, list[int]]]:
        """Return the ids that the last step read back, by sequence."""
        return self._new_ids

    # --- Admission and preemption

    def _wanted_rows(self, slot_N: Ints) -> Ints:
        """Return the rows of prompts and appended text without the last token, which the decode step feeds."""
        missing_N = self.batch.known_B[slot_N] - self.batch.cached_B[slot_N]
        return np.where(missing_N == 1, self.batch.room_B[slot_N] > 0, missing_N - 1).astype(np.int64)

    def _give_way(self) -> bool:
        """Drop drafts, or else read the pending step, so that no sequence with pending results is preempted."""
        return super()._give_way() or self._receive_pending()

    def _receive_pending(self) -> bool:
        """Read the pending step and scores; return whether there were any."""
        pending, self._pending = self._pending, None
        scores, self._scores = self._scores, []
        self._receive(pending)
        self._ended += self._read_scores(scores)
        return pending is not None or bool(scores)

    def _received(self) -> list[TokenSequence]:
        self._ended = []
        self._receive_pending()
        return sorted(self._ended, key=attrgetter("number"))

    def _leave(self, sequence: TokenSequence, keep: bool) -> None:
        if self._pending is not None:
            self._pending.alive_N &= self._pending.slot_N != sequence.slot
        super()._leave(sequence, keep)

    # --- Drafts

    def _draft_costs(self) -> Costs:
        weights = sum(weight.numel() * weight.element_size() for weight in self.policy.parameters())
        return gpu_costs(weights, DeltaStates.bytes_needed(self.policy.config, self.policy.dtype.itemsize, 1))

    def _look_up_drafts(self) -> None:
        if self._pending is not None and self._pending.drafts:
            self._receive_pending()
        super()._look_up_drafts()

    def _before_look_up(self, slot_N: Ints) -> Ints:
        return self._may_draft() if self._receive_pending() else slot_N

    # --- Prefill

    def _prefill(self, runs: QueryRuns) -> None:
        """Compute keys and values of new rows, and log-probs of scored ids. Nothing is drawn."""
        if not len(runs.slot_N):
            return
        rows = int(runs.count_N.sum())
        step = self._prefill_step_for(rows, runs)
        with DeviceTimer(self.policy.device) as lap:
            if step is None:
                eager = DeviceStep(self._cache(), self.batch.table_BP, runs, self.policy.device, self.fresh)
                ids_T = self.batch.tokens_BL[eager.slot_T, eager.positions_T]
                hidden_TH = self.policy.hidden(ids_T, eager.positions_T, eager)
            else:
                step.load(runs)
                step.play()
                hidden_TH = step.hidden_TH
        self.batch.cached_B[runs.slot_N] += runs.count_N
        self._count_prefilled(runs)
        self.clock.prefilled_tokens += rows
        self.clock.forward_rows += rows
        self.clock.forwards += 1
        self._timers.append((lap, 1.0))
        self._busy += lap.host
        self._scores += self._score(runs, hidden_TH)

    def _prefill_step_for(self, rows: int, runs: QueryRuns) -> PrefillStep | None:
        """Return the step of the smallest bucket that holds these rows. None if there are too many rows for one, if
        launches are the smaller part of their time, if another backend computes them, or if layers have states."""
        size = next((size for size in PREFILL_ROWS if rows <= size), None)
        if self.has_states:
            return None  # the steps of such layers depend on the runs' lengths
        if size is None or size * self._weights > PREFILL_WORK or len(runs.slot_N) > PREFILL_RUNS:
            return None
        if self.fresh is not None and not runs.start_N.any():
            return None
        if size not in self._prefills:
            self._prefills[size] = PrefillStep(size, self.policy, self._cache(), self.batch, self._pool)
        return self._prefills[size]

    def _mark_prefilled(self) -> None:
        """Let others use the cached blocks. No sequence waits for a prompt that lacks only its last token."""
        for sequence in self._prefilling:
            if self._mark_ready(sequence) >= len(sequence.prompt.ids) - 1 and not self.has_states:
                sequence.prompt.filling = False

    # --- Decode

    def _launch(self, slot_N: Ints) -> PendingStep | None:
        """Feed these slots' last tokens and drafts, and draw. The host counts one token for each immediately."""
        if not len(slot_N):
            return None
        batch, drafted_N = self.batch, self.batch.drafted_B[slot_N]
        drafts = drafts_bucket(int(drafted_N.max()))
        table_NP, prefix = batch.table_BP[slot_N], None
        if self.share_prefix:
            # The prefix ends before the first new row, whose block belongs to its sequence.
            blocks_N = np.minimum(batch.prompt_B[slot_N], batch.cached_B[slot_N]) // self.block_size
            prefix = shared_prefixes(table_NP, blocks_N, self.block_size)
        step = self._step_for(bucket_of(len(slot_N)), drafts, prefix is not None)
        step.load(slot_N, batch.cached_B[slot_N], table_NP, prefix, batch.drafts_of(slot_N, drafts), drafted_N)
        with DeviceTimer(self.policy.device) as lap:
            rows = step.launch()
        self._busy += lap.host
        laps, self._timers = [*self._timers, (lap, 0.0)], []
        position_N = batch.known_B[slot_N]
        batch.known_B[slot_N] += 1
        batch.cached_B[slot_N] += 1
        batch.room_B[slot_N] -= 1
        if self._prefilling:
            self._end_prefills(slot_N)
        self.clock.forwards += 1
        self.clock.forward_rows += len(slot_N) + int(drafted_N.sum())
        self.clock.count_step(len(slot_N), self.max_running)
        return PendingStep(slot_N, position_N, drafted_N, np.ones(len(slot_N), bool), batch.room_B[slot_N], rows, laps)

    def _end_prefills(self, slot_N: Ints) -> None:
        """Count the last token of a prompt or of appended text as prefilled, by the step that draws after it."""
        launched = set(slot_N.tolist())
        for sequence in (one for one in self._prefilling if one.slot in launched):
            cached, prompt = self._mark_ready(sequence), sequence.prompt
            if self.has_states and cached >= len(prompt.ids):
                prompt.filling = False
                if prompt.waiting and cached == len(prompt.ids):
                    # Other sequences feed the last token themselves; the ring still has the state before it.
                    self._keep_states(sequence, prompt.ids[:-1])
            sequence.prefilled += 1
            self.clock.prefilled_tokens += 1
        self._prefilling = [one for one in self._prefilling if one.slot not in launched]

    def _step_for(self, size: int, drafts: int, shares: bool) -> BucketStep:
        if self.stops.version != self._stops_version:
            self._forget_steps()
            self._stops_version = self.stops.version
        key = (size, drafts, shares, self.batch.rules.temperature, self.batch.rules.filtered)
        if key not in self._steps:
            self._steps[key] = BucketStep(
                size,
                drafts,
                shares,
                self.policy,
                self.vocab_size,
                cache=self._cache(),
                batch=self.batch,
                stops=self.stops,
                pool=self._pool,
            )
        return self._steps[key]

    def _receive(self, pending: PendingStep | None) -> None:
        """Read a step's draws back to the host, and end the turns that they complete."""
        if pending is None:
            return
        batch, alive_N = self.batch, pending.alive_N
        started = time.perf_counter()
        drawn = pending.read()
        self._busy += time.perf_counter() - started
        self.clock.add(pending.laps)
        self.clock.discarded_tokens += int(drawn.taken_N[~alive_N].sum())
        drawn, slot_N, drafted_N = drawn.of(alive_N), pending.slot_N[alive_N], pending.drafted_N[alive_N]
        self._check_finite(drawn.code_N)
        row, column = np.nonzero(drawn.accepted_NQ)
        position = pending.position_N[alive_N][row] + column
        batch.note_drawn(slot_N[row], position, drawn.ids_NQ[row, column], drawn.logprobs_NQ[row, column])
        self.clock.sampled_tokens += int(drawn.taken_N.sum())
        if pending.drafts:
            accepted_N = drawn.taken_N - 1
            batch.known_B[slot_N] += accepted_N
            batch.cached_B[slot_N] += accepted_N  # rows of rejected drafts are overwritten
            batch.room_B[slot_N] -= accepted_N
            self._count_drafts(slot_N, drafted_N, accepted_N)
        self._new_ids += [
            (self._sequence_in[slot], ids[:taken])
            for slot, ids, taken in zip(*(x.tolist() for x in (slot_N, drawn.ids_NQ, drawn.taken_N)), strict=True)
        ]
        over_N = (drawn.code_N > 0) | (pending.room_N[alive_N] == drawn.taken_N - 1)
        self._take_back(slot_N[over_N])
        self._ended += [
            self._end_turn(int(slot), int(code))
            for slot, code in zip(slot_N[over_N], drawn.code_N[over_N], strict=True)
        ]

    def _take_back(self, ended_N: Ints) -> None:
        """Discard the pending token of slots whose turn is over."""
        if self._pending is None or not len(ended_N):
            return
        again_N = np.isin(self._pending.slot_N, ended_N) & self._pending.alive_N
        self._pending.alive_N[again_N] = False
        slot_N = self._pending.slot_N[again_N]
        self.batch.known_B[slot_N] -= 1
        self.batch.cached_B[slot_N] -= 1


MEMBERS = 16  # limit of a group that shares a prefix; a larger one is split
IN_FLIGHT = 2  # steps that may be pending; the buffers that the host fills or reads alternate


@dataclass(slots=True)
class PendingStep:
    """A decode step that was launched and not yet read. position_N: position of the first token that each sequence
    draws. drafted_N: number of drafts fed. alive_N: whether the sequence still needs its token. room_N: tokens left in
    the turn after the first. laps: timers of forwards since the previous step, and of this one (DecodeClock.add)."""

    slot_N: Ints
    position_N: Ints
    drafted_N: Ints
    alive_N: Bools
    room_N: Ints
    rows: DrawnRows
    laps: list[tuple[DeviceTimer, float]]

    @property
    def drafts(self) -> bool:
        """Return whether the number of drawn tokens is unknown until they have been read."""
        return bool(self.drafted_N.any())

    def read(self) -> Drawn:
        """Return the step's draws, after waiting for their copy to the host."""
        return self.rows.read(len(self.slot_N))


class StaticStep:
    """Work on the device as a function of tensors at fixed addresses: weights, cache, the batch's arrays, and `inputs`,
    which the host fills in one copy to `sent`. `play` runs it. On CUDA it is a graph from use number `captured_at` on,
    with the same bits."""

    captured_at = 2  # the first use compiles kernels, and libraries allocate their lasting memory

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], policy: Policy, cache: DeviceKV, batch: BatchState, pool: Any
    ) -> None:
        """Allocate the buffers. pool: memory pool of graphs; None: no graph is captured."""
        self.policy, self.cache, self.batch, self.pool, self.uses = policy, cache, batch, pool, 0
        self.shapes, self.sizes = shapes, [int(np.prod(shape)) for shape in shapes.values()]
        self.sent = torch.zeros(sum(self.sizes), dtype=torch.int32, device=policy.device)
        self.inputs = dict(zip(shapes, self.views(self.sent), strict=True))
        self.graph: torch.cuda.CUDAGraph | None = None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def run(self) -> None:
        raise NotImplementedError

    def play(self) -> None:
        self.uses += 1
        if self.uses == self.captured_at and self.pool is not None:
            self._capture()
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()

    def _capture(self) -> None:
        """Capture `run` as a CUDA graph. Nothing is computed: earlier uses have compiled its kernels."""
        self.graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection could free another graph's memory, which a capture forbids
        try:
            with torch.cuda.graph(self.graph, pool=self.pool):
                self.run()
        finally:
            if collects:
                gc.enable()


class PrefillStep(StaticStep):
    """Prefill of up to `rows` new rows of up to PREFILL_RUNS sequences: `DeviceStep` with fixed buffers. Nothing is
    drawn. hidden_TH: hidden states of the rows, until the next step runs."""

    captured_at = 16  # a capture takes the time that about forty replays save
    hidden_TH: torch.Tensor

    def __init__(self, rows: int, policy: Policy, cache: DeviceKV, batch: BatchState, pool: Any = None) -> None:
        runs, blocks = PREFILL_RUNS, batch.table_BP.shape[1]
        super().__init__({"rows": (4, rows), "about": (3, runs), "table": (runs, blocks)}, policy, cache, batch, pool)
        row_N, start_N, count_N = self.inputs["about"]
        self.rows = PrefillRows(self.inputs["table"], row_N, start_N, count_N, longest=rows)

    def load(self, runs: QueryRuns) -> None:
        """Copy the inputs to the device. Padding rows belong to no run, and their keys are not stored."""
        numbers = np.zeros(sum(self.sizes), np.int32)
        rows_4T, about_3N, table_NP = (x.numpy() for x in self.views(torch.from_numpy(numbers)))
        rows, count = int(runs.count_N.sum()), len(runs.slot_N)
        rows_4T[0], rows_4T[2] = self.batch.spare, -1
        rows_4T[:, :rows] = prefill_rows(self.batch.table_BP, runs, self.cache.block_size)
        about_3N[:, :count] = np.cumsum(runs.count_N) - runs.count_N, runs.start_N, runs.count_N
        table_NP[:count] = self.batch.table_BP[runs.slot_N]
        self.sent.copy_(to_pinned(numbers, self.policy.device), non_blocking=True)

    def run(self) -> None:
        slot_T, position_T, *_ = self.inputs["rows"]
        self.hidden_TH = self.policy.hidden(self.batch.tokens_BL[slot_T, position_T], position_T, self)

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        _, _, block_T, offset_T = self.inputs["rows"]
        q_TND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, block_T, offset_T)
        return prefill_attention(q_TND, k_PKSD, v_PKSD, self.rows)


class BucketStep(StaticStep):
    """Decode step of up to `size` sequences with up to `drafts` drafts each. `load` fills the buffers; `launch` runs it
    and copies the result."""

    def __init__(
        self,
        size: int,
        drafts: int,
        shares: bool,
        policy: Policy,
        columns: int,
        *,
        cache: DeviceKV,
        batch: BatchState,
        stops: StopTables,
        pool: Any = None,
    ) -> None:
        self.size, self.columns, self.stops, self.rules = size, columns, stops, batch.rules
        device, blocks = policy.device, batch.table_BP.shape[1]
        self.groups = max(size // 2, 1) if shares else 0
        shapes = {
            "slot": (size,),
            "start": (size,),
            "count": (size,),
            "first": (size,),
            "table": (size, blocks),
            "prefix": (self.groups, blocks),
            "length": (self.groups,),
            "members": (self.groups, MEMBERS),
            "drafts": (size, drafts),
        }
        super().__init__(shapes, policy, cache, batch, pool)

        def buffers(like: torch.Tensor) -> list[torch.Tensor]:
            pinned = device.type == "cuda"
            return [torch.zeros(like.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]

        self.packed_BX = torch.zeros(size, drawn_width(1 + drafts), dtype=torch.int32, device=device)
        self.staging, self.received = buffers(self.sent), buffers(self.packed_BX)
        self.turn = 0
        self.row_Q = torch.arange(1 + drafts, device=device)
        self.rows = DecodeRows(
            self.inputs["table"],
            self.inputs["start"],
            self.inputs["count"],
            self.inputs["first"] if shares else None,
            SharedPrefix(self.inputs["prefix"], self.inputs["length"], self.inputs["members"]) if shares else None,
        )

    def load(
        self, slot_N: Ints, start_N: Ints, table_NP: Ints, prefix: Prefixes | None, drafts_NK: Ints, drafted_N: Ints
    ) -> None:
        """Copy the inputs of a step to the device, in one copy. start_N: positions of the sequences' last tokens, which
        are fed. drafts_NK: drafts, of which the first drafted_N of a sequence are valid."""
        count = len(slot_N)
        self.turn = (self.turn + 1) % IN_FLIGHT
        staging = self.staging[self.turn]
        slot, start, rows, first, table, prefix_GP, length, members, drafts = (x.numpy() for x in self.views(staging))
        staging.zero_()
        slot[:] = self.batch.spare
        slot[:count], start[:count], rows[:count], table[:count] = slot_N, start_N, 1 + drafted_N, table_NP
        drafts[:count] = drafts_NK
        if prefix is not None:
            groups = len(prefix.length_G)
            first[:count] = prefix.first_N
            members[:] = -1
            prefix_GP[:groups], length[:groups], members[:groups] = prefix.table_GP, prefix.length_G, prefix.members_GM
        self.sent.copy_(staging, non_blocking=True)

    def run(self) -> None:
        """Run the forward, draw, and store the accepted tokens. It reads and writes only buffers."""
        batch, row_Q = self.batch, self.row_Q
        slot_B1, start_B1, count_B1 = (self.inputs[name].long()[:, None] for name in ("slot", "start", "count"))
        drafts_BK = self.inputs["drafts"].long()
        # Rows beyond those of a sequence repeat the position of its last row.
        position_BQ = start_B1 + torch.minimum(row_Q, (count_B1 - 1).clamp_(min=0))
        block_BQ = self.inputs["table"].gather(1, position_BQ // self.cache.block_size)
        self.block_T = torch.where(row_Q < count_B1, block_BQ, -1).view(-1)
        self.offset_T = (position_BQ % self.cache.block_size).int().view(-1)
        ids_BQ = torch.cat([batch.tokens_BL[slot_B1, start_B1], drafts_BK], 1)
        slot_T, position_T = slot_B1.expand(-1, len(row_Q)).reshape(-1), position_BQ.view(-1)
        if self.cache.states is not None:
            sizes = self.cache.states.ring, self.cache.states.width
            slot_B, start_B, count_B = (x[:, 0] for x in (slot_B1, start_B1, count_B1))
            self.delta_rows = NextRows(slot_B, start_B, count_B, batch.spare, sizes, len(row_Q))
        hidden_TH = self.policy.hidden(ids_BQ.view(-1), position_T, self)
        head_VH = self.policy.head_VH[: self.columns]
        seeds_T, rules = batch.seeds_B[slot_T], self.rules.take(slot_T)
        # The noise is that of the drawn token's position.
        ids_T, logprobs_T = sampling.sample_from_head(hidden_TH, head_VH, seeds_T, position_T + 1, rules)
        ids_BQ, slot_B = ids_T.view(-1, len(row_Q)), slot_B1[:, 0]
        logprobs_BQ, state_B = logprobs_T.view_as(ids_BQ), batch.state_B[slot_B]
        state_B, code_B, taken_B = count_accepted(
            self.stops, state_B, ids_BQ, logprobs_BQ, drafts_BK, count_B1[:, 0] - 1
        )
        batch.state_B[slot_B] = state_B
        batch.tokens_BL[torch.where(row_Q < taken_B[:, None], slot_B1, batch.spare), position_BQ + 1] = ids_BQ
        pack_drawn(ids_BQ, logprobs_BQ, code_B, taken_B, self.packed_BX)

    def delta(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        assert self.cache.states is not None
        return delta_next(inputs, self.cache.states.layer(layer), self.delta_rows)

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        q_TND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, self.block_T, self.offset_T)
        q_BQND = q_TND.unflatten(0, (self.size, len(self.row_Q)))
        return decode_attention(q_BQND, k_PKSD, v_PKSD, self.rows).flatten(0, 1)

    def launch(self) -> DrawnRows:
        """Run the step and return its draws, whose copy to the host may not have finished."""
        received = self.received[self.turn]
        self.play()
        received.copy_(self.packed_BX, non_blocking=True)
        if self.policy.device.type != "cuda":
            return DrawnRows(received, None)
        done = torch.cuda.Event()
        done.record()
        return DrawnRows(received, done)


@dataclass(slots=True)
class Prefixes:
    """Groups of a step's sequences with the same first blocks. first_N: position at which a sequence's own keys
    begin."""

    first_N: Ints
    table_GP: Ints
    length_G: Ints
    members_GM: Ints


def bucket_of(count: int) -> int:
    """Return the bucket size for `count` sequences: a power of two up to 16, then a multiple of 16."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


def drafts_bucket(most: int) -> int:
    """Return the smallest number of drafts that has a step and is at least `most`."""
    return next(size for size in (0, *STACKED) if size >= most)


def shared_prefixes(table_NP: Ints, blocks_N: Ints, slots: int) -> Prefixes | None:
    """Group a step's sequences that share the first blocks_N of their blocks, if reading those once pays; None: no
    group. table_NP: the sequences' blocks. Sequences with a block in common share all blocks before it."""
    index_N = np.flatnonzero(blocks_N > 0)
    last_N = table_NP[index_N, blocks_N[index_N] - 1]
    _, one_g, group_N, size_g = np.unique(last_N, return_index=True, return_inverse=True, return_counts=True)
    length_g = blocks_N[index_N[one_g]] * slots
    pays_g = size_g > 1
    pays_g[pays_g] = [
        prefix_pays(*each) for each in zip(length_g[pays_g].tolist(), size_g[pays_g].tolist(), strict=True)
    ]
    if not pays_g.any():
        return None
    # Members of the groups that pay, group by group, and the place of each in its group.
    order_X = np.argsort(group_N, kind="stable")
    place_X = np.arange(len(order_X)) - np.repeat(np.cumsum(size_g) - size_g, size_g)
    some_X = pays_g[group_N[order_X]]
    order_X, place_X = order_X[some_X], place_X[some_X]
    first_N = np.zeros(len(blocks_N), np.int64)
    first_N[index_N[order_X]] = length_g[group_N[order_X]]
    rows_g = np.where(pays_g, -(-size_g // MEMBERS), 0)
    row_X = (np.cumsum(rows_g) - rows_g)[group_N[order_X]] + place_X // MEMBERS
    members_GM = np.full((int(rows_g.sum()), MEMBERS), -1, np.int64)
    members_GM[row_X, place_X % MEMBERS] = index_N[order_X]
    return Prefixes(first_N, table_NP[members_GM[:, 0]], np.repeat(length_g, rows_g), members_GM)
