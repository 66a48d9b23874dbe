"""Decoding on a GPU: the same loop, arranged so that the GPU need not wait for the host.

    prefill    new rows of prompts and of appended text, all but a sequence's last token: one forward, nothing is drawn
    decode     a row for every sequence that writes: feed its last token, draw the next. One function of buffers that
               stay where they are (`BucketStep`), so on CUDA one graph
    receive    what the step before drew: a row of (id, log-prob, code) a sequence, copied to the host meanwhile

A decode step is launched before the one before it has been read: it takes its tokens from the device's own arrays. So
where a turn turns out to have ended, one token too many has been drawn; it is discarded and counted. Its key was never
written, and the ended turn's last token, which was fed with it, is where it belongs.

    launch n     known += 1, room -= 1: a token is there, though the host has not seen it
    receive n    ids and log-probs to the host's mirror; turns end; of those that ended launch n + 1 is taken back

The rest, who runs, blocks, prefixes, preemption, is decoder.py's. Sequences whose prompts share blocks read them once
where that pays (kernels/attention/cached.py).

Deliberately absent: drafts, whose look-up would have to wait for the last token's id.

Axes: N sequences of a decode step, padded to a bucket of B; P blocks of a sequence; G groups that share a prefix, of M
members; H hidden, V vocabulary, L tokens of a lane.
"""

import time
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.kv_cache import DeviceKV, DeviceStep, PagedKV, check_page_size
from thresher.engine.decoding.lanes import Lanes, StopBank
from thresher.engine.decoding.sequences import TokenSequence
from thresher.kernels import sampling
from thresher.kernels.attention.backends.choice import Backend, load_attention
from thresher.kernels.attention.cached import DecodeRows, SharedPrefix, decode_attention, prefix_pays
from thresher.kernels.attention.paged import Ints, Pieces
from thresher.kernels.drawing.rules import DrawRules
from thresher.kernels.elementwise.layers import rotate_and_store
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

MEMBERS = 16  # of a group that shares a prefix; a larger one is several groups
KV_SHARE = 0.85  # of the free memory of a GPU; the rest is for what a forward needs
IN_THE_AIR = 2  # steps that may be under way: buffers that the host fills or reads alternate


@dataclass(slots=True)
class Flight:
    """A decode step that was launched and not yet read. position_N: of the tokens that it draws. alive_N: sequences
    that still want theirs; last_N: those whose turn has no room for another."""

    lane_N: Ints
    position_N: Ints
    alive_N: Bools
    last_N: Bools
    packed_B3: torch.Tensor
    done: "torch.cuda.Event | None"

    def read(self) -> tuple[Ints, npt.NDArray[np.float32], Ints]:
        """ids, log-probs and codes [N], once they are there."""
        if self.done is not None:
            self.done.synchronize()
        rows: Int32s = self.packed_B3.numpy()[: len(self.lane_N)]
        return rows[:, 0].astype(np.int64), rows[:, 1].copy().view(np.float32), rows[:, 2].astype(np.int64)


class BucketStep:
    """One decode step of up to `size` sequences as a function of buffers: `load` fills them, `run` is pure on the
    device, `launch` runs it (as a graph on CUDA) and has the result copied. Rows that fill it up write to the spare
    lane and to no block."""

    def __init__(
        self, size: int, policy: Policy, columns: int, cache: DeviceKV, lanes: Lanes, stops: StopBank, shares: bool
    ) -> None:
        self.size, self.policy, self.columns, self.cache = size, policy, columns, cache
        self.lanes, self.stops, self.rules = lanes, stops, lanes.rules
        device, blocks = policy.device, lanes.table_BP.shape[1]
        self.groups = max(size // 2, 1) if shares else 0
        shapes = {
            "lane": (size,),
            "start": (size,),
            "count": (size,),
            "first": (size,),
            "table": (size, blocks),
            "prefix": (self.groups, blocks),
            "length": (self.groups,),
            "members": (self.groups, MEMBERS),
        }
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self.sent = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.staging = [torch.zeros(self.sent.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_THE_AIR)]
        self.packed_B3 = torch.zeros(size, 3, dtype=torch.int32, device=device)
        self.received = [torch.zeros(size, 3, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_THE_AIR)]
        self.turn = 0
        self.shapes, self.sizes = shapes, list(sizes.values())
        self.inputs = dict(zip(shapes, self._views(self.sent), strict=True))
        self.rows = DecodeRows(
            self.inputs["table"],
            self.inputs["start"],
            self.inputs["count"],
            self.inputs["first"] if shares else None,
            SharedPrefix(self.inputs["prefix"], self.inputs["length"], self.inputs["members"]) if shares else None,
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def load(self, lane_N: Ints, start_N: Ints, table_NP: Ints, prefix: "Prefixes | None") -> None:
        """What the host has to say of a step's sequences, in one copy. start_N: the positions that they feed."""
        count = len(lane_N)
        self.turn = (self.turn + 1) % IN_THE_AIR
        staging = self.staging[self.turn]
        lane, start, live, first, table, prefix_GP, length, members = (x.numpy() for x in self._views(staging))
        staging.zero_()
        lane[:] = self.lanes.spare
        lane[:count], start[:count], live[:count], table[:count] = lane_N, start_N, 1, table_NP
        if prefix is not None:
            groups = len(prefix.length_G)
            first[:count] = prefix.first_N
            members[:] = -1
            prefix_GP[:groups], length[:groups], members[:groups] = prefix.table_GP, prefix.length_G, prefix.members_GM
        self.sent.copy_(staging, non_blocking=True)

    def run(self) -> None:
        """Feed every lane's last token, draw the next, put it away. Reads and writes buffers, nothing else."""
        lanes, start = self.lanes, self.inputs["start"]
        lane_B, position_B = self.inputs["lane"].long(), start.long()
        slots, live_B = self.cache.slots, self.inputs["count"]
        block_B = self.inputs["table"].gather(1, (position_B // slots)[:, None])[:, 0]
        self.block_B = torch.where(live_B > 0, block_B, -1)
        self.slot_B = start % slots
        hidden_BH = self.policy.hidden(lanes.tokens_BL[lane_B, position_B], position_B, self._attend)
        head_VH = self.policy.head_VH[: self.columns]
        seeds_B, rules = lanes.seeds_B[lane_B], self.rules.take(lane_B)
        ids_B, logprobs_B = sampling.draw_from_head(hidden_BH, head_VH, seeds_B, position_B + 1, rules)
        lanes.tokens_BL[lane_B, position_B + 1] = ids_B
        state_B, code_B = self.stops.advance(lanes.state_B[lane_B], ids_B)
        lanes.state_B[lane_B] = state_B
        packed = (ids_B.int(), logprobs_B.float().view(torch.int32), code_B.int())
        torch.stack(packed, 1, out=self.packed_B3)

    def _attend(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        k_PKSD, v_PKSD = self.cache.k_LPKSD[layer], self.cache.v_LPKSD[layer]
        q_BND = rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, self.block_B, self.slot_B)
        return decode_attention(q_BND[:, None], k_PKSD, v_PKSD, self.rows)[:, 0]

    def launch(self) -> tuple[torch.Tensor, "torch.cuda.Event | None"]:
        """(where the packed rows will be, the event that says so)."""
        received, done = self.received[self.turn], None
        if self.policy.device.type != "cuda":
            self.run()
            received.copy_(self.packed_B3)
            return received, None
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        received.copy_(self.packed_B3, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return received, done

    def capture(self, pool: Any) -> None:
        """Make `run` a CUDA graph. Whatever the buffers hold is fed to the spare lane meanwhile."""
        self.staging[self.turn].zero_()
        self.staging[self.turn][: self.size] = self.lanes.spare
        self.sent.copy_(self.staging[self.turn])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets libraries allocate what they keep
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.run()


@dataclass(slots=True)
class Prefixes:
    """Groups of a step's sequences that share their first blocks. first_N: where a sequence's own keys begin."""

    first_N: Ints
    table_GP: Ints
    length_G: Ints
    members_GM: Ints


def bucket_of(count: int) -> int:
    """The size of the bucket for so many sequences: powers of two up to 16, then multiples of 16."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


def shared_prefixes(table_NP: Ints, blocks_N: Ints, slots: int) -> Prefixes | None:
    """Which of a step's sequences share the first blocks_N of their blocks with others, where to read those once pays.
    table_NP: their blocks. A block that several hold stands for all that lies before it, too."""
    index_N = np.flatnonzero(blocks_N > 0)
    if not len(index_N):
        return None
    last_block, group_N = np.unique(table_NP[index_N, blocks_N[index_N] - 1], return_inverse=True)
    first_N = np.zeros(len(blocks_N), np.int64)
    tables, lengths, members = [], [], []
    for group in range(len(last_block)):
        of_group = index_N[group_N == group]
        length = int(blocks_N[of_group[0]]) * slots
        if not prefix_pays(length, len(of_group)):
            continue
        first_N[of_group] = length
        for begin in range(0, len(of_group), MEMBERS):
            some = of_group[begin : begin + MEMBERS]
            tables.append(table_NP[some[0]])
            lengths.append(length)
            members.append(np.pad(some, (0, MEMBERS - len(some)), constant_values=-1))
    if not tables:
        return None
    return Prefixes(first_N, np.stack(tables), np.array(lengths), np.stack(members))


def make_decoder(policy: Policy, tokenizer: Tokenizer, attention: Backend = "torch", **options: Any) -> Decoder:
    """The decoder for an attention backend (kernels/attention/backends/choice.py); options: as `Decoder` has them."""
    if attention == "torch":
        return Decoder(policy, tokenizer, **options)
    return DeviceDecoder(policy, tokenizer, prefill=attention, **options)


class DeviceDecoder(Decoder):
    """`Decoder` whose steps are launched ahead of what is read back. Its results are those of `Decoder` up to rounding:
    the kernels add in another order."""

    def __init__(self, *arguments: Any, prefill: Backend = "triton", **options: Any) -> None:
        """prefill: who computes attention within fresh prompts; new rows over a history are Triton's."""
        self.fresh = None if prefill == "triton" else load_attention(prefill)
        self.wanted_blocks = 0  # known once it is made; memory is taken by `begin`
        super().__init__(*arguments, **{**options, "speculate": 0})
        check_page_size(self.page_size)
        self.wanted_blocks = self.num_blocks

    def held(self) -> list[torch.Tensor]:
        return [self.cache.k_LPKSD, self.cache.v_LPKSD] if isinstance(self.cache, DeviceKV) else []

    def end(self) -> None:
        """Give the cache's memory back, and what was captured with it; `begin` takes as much as there is then."""
        self._steps.clear()
        self.cache = None

    def _open_cache(self) -> None:
        if self.cache is None and self.wanted_blocks:
            policy, self.num_blocks = self.policy, self._planned_blocks()
            self.cache = DeviceKV(policy.config, self.num_blocks, self.page_size, policy.dtype, policy.device)

    def _start_over(self, longest: int, clock: DecodeClock) -> None:
        super()._start_over(longest, clock)
        self._flight: Flight | None = None
        self._ended: list[TokenSequence] = []  # since the last step, when somebody had to go
        self._new_ids: list[tuple[TokenSequence, list[int]]] = []
        self._steps: dict[tuple[int, bool], BucketStep] = {}
        self._made_for: tuple[DrawRules, int] | None = None  # rules, and the version of the stop tables
        self._pool = torch.cuda.graph_pool_handle() if self.policy.device.type == "cuda" else None

    def _cache(self) -> DeviceKV:
        assert isinstance(self.cache, DeviceKV)
        return self.cache

    def _planned_blocks(self) -> int:
        """Those that were asked for, or on CUDA as many as KV_SHARE of the free memory holds."""
        device = self.policy.device
        if device.type != "cuda":
            return self.wanted_blocks
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + reserved
        a_block = PagedKV.bytes_needed(self.policy.config, 1, self.page_size, self.policy.dtype.itemsize)
        return min(self.wanted_blocks, int(KV_SHARE * free) // a_block)

    def _make_lanes(self, longest: int, blocks: int) -> Lanes:
        return Lanes(self.max_running, longest, blocks, self.policy.device, mirror=True)

    @property
    def idle(self) -> bool:
        return super().idle and self._flight is None and not self._ended

    @torch.inference_mode()
    def step(self) -> list[TokenSequence]:
        """Launch what is to be computed, then read what the step before has drawn; the sequences whose turn has ended,
        the oldest first."""
        started, self._busy = time.perf_counter(), 0.0
        self._new_ids = []
        self._admit()
        runs = self._make_room()
        decodes = self.lanes.known_B[runs.table_N] == self.lanes.cached_B[runs.table_N] + 1
        self._prefill(runs[np.flatnonzero(~decodes)])
        flight = self._flight
        self._flight = self._launch(runs.table_N[decodes])
        ended = [*self._ended, *(self._receive(flight) if flight is not None else ())]
        self._ended = []
        self.clock.host += time.perf_counter() - started - self._busy
        return sorted(ended, key=attrgetter("number"))

    def new_ids(self) -> list[tuple[TokenSequence, list[int]]]:
        """What the last step read back."""
        return self._new_ids

    # --- Who runs

    def _wanted_rows(self, lane_N: Ints) -> Ints:
        """A prompt and appended text but for the last token, which is fed by the step that draws."""
        missing_N = self.lanes.known_B[lane_N] - self.lanes.cached_B[lane_N]
        return np.where(missing_N == 1, self.lanes.room_B[lane_N] > 0, missing_N - 1).astype(np.int64)

    def _give_way(self) -> bool:
        """Nobody goes while a token of its own is under way."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._ended += self._receive(flight)
        return flight is not None

    def _leave(self, sequence: TokenSequence, keep: bool) -> None:
        if self._flight is not None:
            self._flight.alive_N &= self._flight.lane_N != sequence.lane
        super()._leave(sequence, keep)

    # --- Prefill

    def _prefill(self, runs: Pieces) -> None:
        """Keys and values of new rows; nothing is drawn."""
        if len(runs.table_N):
            started = time.perf_counter()
            step = DeviceStep(self._cache(), self.lanes.table_BP, runs, self.policy.device, self.fresh)
            self.policy.hidden(self.lanes.tokens_BL[step.lane_T, step.positions_T], step.positions_T, step)
            self.lanes.cached_B[runs.table_N] += runs.count_N
            rows = int(runs.count_N.sum())
            self._count_prefilled(runs)
            self.clock.prefilled_tokens += rows
            self.clock.forward_rows += rows
            self.clock.forwards += 1
            self.clock.prefill += time.perf_counter() - started
            self._busy += time.perf_counter() - started
        for sequence in self._prefilling:
            if self._mark_ready(sequence) >= len(sequence.prompt.ids) - 1:
                sequence.prompt.filling = False

    # --- Decode

    def _launch(self, lane_N: Ints) -> Flight | None:
        """Feed these lanes' last tokens and draw the next, as far as the host is concerned at once."""
        if not len(lane_N):
            return None
        started, lanes = time.perf_counter(), self.lanes
        table_NP = lanes.table_BP[lane_N]
        prefix = None
        if self.share_prefix:
            # In no longer a prefix than lies before the first new row, whose block is its own.
            blocks_N = np.minimum(lanes.prompt_B[lane_N], lanes.cached_B[lane_N]) // self.page_size
            prefix = shared_prefixes(table_NP, blocks_N, self.page_size)
        step = self._step_for(bucket_of(len(lane_N)), prefix is not None)
        step.load(lane_N, lanes.cached_B[lane_N], table_NP, prefix)
        packed_B3, done = step.launch()
        lanes.known_B[lane_N] += 1
        lanes.cached_B[lane_N] += 1
        lanes.room_B[lane_N] -= 1
        if self._prefilling:
            self._end_prefills(lane_N)
        self.clock.forwards += 1
        self.clock.forward_rows += len(lane_N)
        self.clock.decode += time.perf_counter() - started
        self._busy += time.perf_counter() - started
        return Flight(
            lane_N,
            lanes.known_B[lane_N] - 1,
            np.ones(len(lane_N), bool),
            lanes.room_B[lane_N] == 0,
            packed_B3,
            done,
        )

    def _end_prefills(self, lane_N: Ints) -> None:
        """The last token of a prompt, or of appended text, is prefilled by the step that draws behind it."""
        launched = set(lane_N.tolist())
        for sequence in (one for one in self._prefilling if one.lane in launched):
            self._mark_ready(sequence)
            sequence.prefilled += 1
            self.clock.prefilled_tokens += 1
        self._prefilling = [one for one in self._prefilling if one.lane not in launched]

    def _step_for(self, size: int, shares: bool) -> BucketStep:
        made_for = (self.lanes.rules, self.stops.version)
        if self._made_for is None or self._made_for[0] is not made_for[0] or self._made_for[1] != made_for[1]:
            self._steps, self._made_for = {}, made_for
        if (size, shares) not in self._steps:
            step = BucketStep(
                size, self.policy, self.tokenizer.vocab_size, self._cache(), self.lanes, self.stops, shares
            )
            if self._pool is not None and not self.lanes.rules.filtered:
                step.capture(self._pool)
            self._steps[size, shares] = step
        return self._steps[size, shares]

    def _receive(self, flight: Flight) -> list[TokenSequence]:
        """What a step drew, to the host; the sequences whose turn it ended."""
        started, lanes, alive_N = time.perf_counter(), self.lanes, flight.alive_N
        ids_N, logprobs_N, code_N = flight.read()
        ids_N, logprobs_N, code_N = ids_N[alive_N], logprobs_N[alive_N], code_N[alive_N]
        self.clock.decode += time.perf_counter() - started
        self._busy += time.perf_counter() - started
        lane_N = flight.lane_N[alive_N]
        lanes.note_drawn(lane_N, flight.position_N[alive_N], ids_N, logprobs_N)
        self.clock.sampled_tokens += len(lane_N)
        self.clock.discarded_tokens += len(alive_N) - len(lane_N)
        self._new_ids += [
            (self._of_lane[lane], [token]) for lane, token in zip(lane_N.tolist(), ids_N.tolist(), strict=True)
        ]
        over_N = (code_N > 0) | flight.last_N[alive_N]
        self._take_back(lane_N[over_N])
        return [self._end_turn(int(lane), int(code)) for lane, code in zip(lane_N[over_N], code_N[over_N], strict=True)]

    def _take_back(self, ended_N: Ints) -> None:
        """The token too many, of lanes whose turn has turned out to be over."""
        if self._flight is None or not len(ended_N):
            return
        again_N = np.isin(self._flight.lane_N, ended_N) & self._flight.alive_N
        self._flight.alive_N[again_N] = False
        lane_N = self._flight.lane_N[again_N]
        self.lanes.known_B[lane_N] -= 1
        self.lanes.cached_B[lane_N] -= 1
