"""Decoding on a GPU: the same loop, arranged so that the GPU need not wait for the host.

    draft      where guesses pay: read what is under way, and look up what may come next (drafts.py)
    prefill    new rows of prompts and of appended text, all but a sequence's last token: one forward, nothing is drawn
    launch     a row for every sequence that writes, and one for each draft: feed its last token and the drafts, draw
               behind each, keep what stands. One function of buffers that stay where they are (bucket_step.py), so on
               CUDA one graph
    receive    what the step before drew: a row of ids, log-probs and a code a sequence, copied to the host meanwhile

Without drafts a step is launched before the one before it has been read: it takes its tokens from the device's own
arrays. So where a turn turns out to have ended, one token too many has been drawn; it is discarded and counted. Its key
was never written, and the ended turn's last token, which was fed with it, is where it belongs.

    launch n     known += 1, room -= 1: a token is there, though the host has not seen it
    receive n    ids and log-probs to the host's mirror; turns end; of those that ended launch n + 1 is taken back

Guesses follow from the last token, and how many stand is known only from the step that verified them. So a step is
read before the next is launched where it has drafts, or where the next is to have some; whether it is follows from
counts alone (Drafter.looks). The GPU waits for the host then, which the costs of a draft account for.

    receive n    with drafts: known += those that came true, room -= as many

The rest, who runs, blocks, prefixes, preemption, is decoder.py's. Sequences whose prompts share blocks read them once
where that pays (kernels/attention/cached.py).

Axes: N sequences of a decode step, Q rows of a sequence, K drafts, P blocks of a sequence, L tokens of a lane.
"""

import time
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from thresher.engine.decoding.bucket_step import BucketStep, Flight, bucket_of, drafts_bucket, shared_prefixes
from thresher.engine.decoding.cache.kv_cache import DeviceKV, DeviceStep, PagedKV, check_page_size
from thresher.engine.decoding.clock import DecodeClock, Lap
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.decoding.drafts import Costs, gpu_costs
from thresher.engine.decoding.sequences import TokenSequence
from thresher.engine.machine import cpu_memory
from thresher.kernels.attention.backends.choice import Backend, load_attention
from thresher.kernels.attention.paged import Ints, Pieces
from thresher.kernels.sampling import SamplingTensors
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

KV_SHARE = 0.85  # of the free memory of a GPU; the rest is for what a forward needs


def free_memory(device: torch.device) -> int:
    """Bytes: what is free of a CUDA device, or all that this process may have of the machine's."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else cpu_memory()[0]


def make_decoder(policy: Policy, tokenizer: Tokenizer, attention: Backend = "torch", **options: Any) -> Decoder:
    """The decoder for an attention backend (kernels/attention/backends/choice.py); options: as `Decoder` has them."""
    if attention == "torch":
        return Decoder(policy, tokenizer, **options)
    return DeviceDecoder(policy, tokenizer, prefill=attention, **options)


class DeviceDecoder(Decoder):
    """`Decoder` whose steps are launched ahead of what is read back. Its results are those of `Decoder` up to rounding:
    the kernels add in another order."""

    mirrors = True

    def __init__(self, *arguments: Any, prefill: Backend = "triton", **options: Any) -> None:
        """prefill: who computes attention within fresh prompts; new rows over a history are Triton's."""
        self.fresh = None if prefill == "triton" else load_attention(prefill)
        self.wanted_blocks = 0  # known once it is made; memory is taken by `begin`
        super().__init__(*arguments, **options)
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
        self._ended: list[TokenSequence] = []  # in this step
        self._new_ids: list[tuple[TokenSequence, list[int]]] = []
        self._steps: dict[tuple[int, int, bool], BucketStep] = {}
        self._made_for: tuple[SamplingTensors, int] | None = None  # rules, and the version of the stop tables
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

    @property
    def idle(self) -> bool:
        return super().idle and self._flight is None

    @torch.inference_mode()
    def step(self) -> list[TokenSequence]:
        """Launch what is to be computed, then read what the step before has drawn; the sequences whose turn has ended,
        the oldest first."""
        started, self._busy = time.perf_counter(), 0.0
        self._new_ids, self._ended = [], []
        self._admit()
        self._draft()
        runs = self._make_room()
        decodes = self.lanes.known_B[runs.table_N] == self.lanes.cached_B[runs.table_N] + 1
        self._prefill(runs[np.flatnonzero(~decodes)])
        before, self._flight = self._flight, self._launch(runs.table_N[decodes])
        self._receive(before)
        self.clock.host += time.perf_counter() - started - self._busy
        return sorted(self._ended, key=attrgetter("number"))

    def new_ids(self) -> list[tuple[TokenSequence, list[int]]]:
        """What the last step read back."""
        return self._new_ids

    # --- Who runs

    def _wanted_rows(self, lane_N: Ints) -> Ints:
        """A prompt and appended text but for the last token, which is fed by the step that draws."""
        missing_N = self.lanes.known_B[lane_N] - self.lanes.cached_B[lane_N]
        return np.where(missing_N == 1, self.lanes.room_B[lane_N] > 0, missing_N - 1).astype(np.int64)

    def _give_way(self) -> bool:
        """Guesses go first; and nobody goes while a token of its own is under way."""
        return super()._give_way() or self._land()

    def _land(self) -> bool:
        """Read what is under way, if anything is, before more is launched."""
        flight, self._flight = self._flight, None
        self._receive(flight)
        return flight is not None

    def _leave(self, sequence: TokenSequence, keep: bool) -> None:
        if self._flight is not None:
            self._flight.alive_N &= self._flight.lane_N != sequence.lane
        super()._leave(sequence, keep)

    # --- Drafts

    def _draft_costs(self) -> Costs:
        return gpu_costs(sum(weight.numel() * weight.element_size() for weight in self.policy.parameters()))

    def _draft(self) -> None:
        if self._flight is not None and self._flight.drafts:
            self._land()
        super()._draft()

    def _before_look_up(self, lane_N: Ints) -> Ints:
        return self._may_draft() if self._land() else lane_N

    # --- Prefill

    def _prefill(self, runs: Pieces) -> None:
        """Keys and values of new rows; nothing is drawn."""
        if len(runs.table_N):
            step = DeviceStep(self._cache(), self.lanes.table_BP, runs, self.policy.device, self.fresh)
            with Lap(self.policy.device) as lap:
                self.policy.hidden(self.lanes.tokens_BL[step.lane_T, step.positions_T], step.positions_T, step)
            self.lanes.cached_B[runs.table_N] += runs.count_N
            rows = int(runs.count_N.sum())
            self._count_prefilled(runs)
            self.clock.prefilled_tokens += rows
            self.clock.forward_rows += rows
            self.clock.forwards += 1
            self._laps.append((lap, 1.0))
            self._busy += lap.host
        for sequence in self._prefilling:
            if self._mark_ready(sequence) >= len(sequence.prompt.ids) - 1:
                sequence.prompt.filling = False

    # --- Decode

    def _launch(self, lane_N: Ints) -> Flight | None:
        """Feed these lanes' last tokens and drafts, and draw; as far as the host is concerned a token each at once."""
        if not len(lane_N):
            return None
        lanes, drafted_N = self.lanes, self.lanes.drafted_B[lane_N]
        drafts = drafts_bucket(int(drafted_N.max()))
        table_NP, prefix = lanes.table_BP[lane_N], None
        if self.share_prefix:
            # In no longer a prefix than lies before the first new row, whose block is its own.
            blocks_N = np.minimum(lanes.prompt_B[lane_N], lanes.cached_B[lane_N]) // self.page_size
            prefix = shared_prefixes(table_NP, blocks_N, self.page_size)
        step = self._step_for(bucket_of(len(lane_N)), drafts, prefix is not None)
        step.load(lane_N, lanes.cached_B[lane_N], table_NP, prefix, lanes.drafts_of(lane_N, drafts), drafted_N)
        with Lap(self.policy.device) as lap:
            rows = step.launch()
        self._busy += lap.host
        laps, self._laps = [*self._laps, (lap, 0.0)], []
        position_N = lanes.known_B[lane_N]
        lanes.known_B[lane_N] += 1
        lanes.cached_B[lane_N] += 1
        lanes.room_B[lane_N] -= 1
        if self._prefilling:
            self._end_prefills(lane_N)
        self.clock.forwards += 1
        self.clock.forward_rows += len(lane_N) + int(drafted_N.sum())
        return Flight(lane_N, position_N, drafted_N, np.ones(len(lane_N), bool), lanes.room_B[lane_N], rows, laps)

    def _end_prefills(self, lane_N: Ints) -> None:
        """The last token of a prompt, or of appended text, is prefilled by the step that draws behind it."""
        launched = set(lane_N.tolist())
        for sequence in (one for one in self._prefilling if one.lane in launched):
            self._mark_ready(sequence)
            sequence.prefilled += 1
            self.clock.prefilled_tokens += 1
        self._prefilling = [one for one in self._prefilling if one.lane not in launched]

    def _step_for(self, size: int, drafts: int, shares: bool) -> BucketStep:
        made_for = (self.lanes.rules, self.stops.version)
        if self._made_for is None or self._made_for[0] is not made_for[0] or self._made_for[1] != made_for[1]:
            self._steps, self._made_for = {}, made_for
        if (size, drafts, shares) not in self._steps:
            step = BucketStep(
                size,
                drafts,
                shares,
                policy=self.policy,
                columns=self.tokenizer.vocab_size,
                cache=self._cache(),
                lanes=self.lanes,
                stops=self.stops,
            )
            if self._pool is not None and not self.lanes.rules.filtered:
                step.capture(self._pool)
            self._steps[size, drafts, shares] = step
        return self._steps[size, drafts, shares]

    def _receive(self, flight: Flight | None) -> None:
        """What a step drew, to the host; turns that it ended are over."""
        if flight is None:
            return
        lanes, alive_N = self.lanes, flight.alive_N
        started = time.perf_counter()
        drawn = flight.read()
        self._busy += time.perf_counter() - started
        self.clock.add(flight.laps)
        self.clock.discarded_tokens += int(drawn.taken_N[~alive_N].sum())
        drawn, lane_N, drafted_N = drawn.of(alive_N), flight.lane_N[alive_N], flight.drafted_N[alive_N]
        self._check_finite(drawn.code_N)
        row, column = np.nonzero(drawn.stands_NQ)
        position = flight.position_N[alive_N][row] + column
        lanes.note_drawn(lane_N[row], position, drawn.ids_NQ[row, column], drawn.logprobs_NQ[row, column])
        self.clock.sampled_tokens += int(drawn.taken_N.sum())
        if flight.drafts:
            accepted_N = drawn.taken_N - 1
            lanes.known_B[lane_N] += accepted_N
            lanes.cached_B[lane_N] += accepted_N  # rows of drafts that did not come true are written anew
            lanes.room_B[lane_N] -= accepted_N
            self._count_drafts(lane_N, drafted_N, accepted_N)
        self._new_ids += [
            (self._of_lane[lane], ids[:taken])
            for lane, ids, taken in zip(*(x.tolist() for x in (lane_N, drawn.ids_NQ, drawn.taken_N)), strict=True)
        ]
        over_N = (drawn.code_N > 0) | (flight.room_N[alive_N] == drawn.taken_N - 1)
        self._take_back(lane_N[over_N])
        self._ended += [
            self._end_turn(int(lane), int(code))
            for lane, code in zip(lane_N[over_N], drawn.code_N[over_N], strict=True)
        ]

    def _take_back(self, ended_N: Ints) -> None:
        """The token too many, of lanes whose turn has turned out to be over."""
        if self._flight is None or not len(ended_N):
            return
        again_N = np.isin(self._flight.lane_N, ended_N) & self._flight.alive_N
        self._flight.alive_N[again_N] = False
        lane_N = self._flight.lane_N[again_N]
        self.lanes.known_B[lane_N] -= 1
        self.lanes.cached_B[lane_N] -= 1
