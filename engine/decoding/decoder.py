"""Decoding of many sequences, one forward at a time (continuous batching).

A step is one forward. It feeds every running sequence the token that it drew last, or as much of a prompt or of
appended text as the step has rows for. Then every sequence that is in a turn and has been fed completely draws a token.
The state is in arrays (batch_state.py). Between the ends of turns there is no loop over sequences, and one small tensor
is read back.

    begin_turn(sequence, stop, room)    begin a turn, of a new sequence or between two turns; or continue a turn
    step() -> sequences                 run a step; return the sequences whose turn has ended
    append(sequence, ids)               append text that the sequence did not sample, between two turns
    score(sequence)                     compute log-probs of given ids; `step` returns it as if its turn had ended
    release(sequence)                   end the sequence
    interrupt()                         end all sequences; tokens drawn so far are stored on them

A sequence's tokens and log-probs do not depend on the others: its noise is a function of its seed and position, and a
row of the forward is batch-invariant, decoded or prefilled (CPU, float32; kernels/attention/paged_cpu.py).

Axes: T rows of a step, N sequences that draw, L tokens of a sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from thresher.common.errors import UserError
from thresher.engine.decoding.batch_state import (
    NOT_FINITE,
    BatchState,
    StopTables,
    accept_tokens,
    to_device,
    with_drafts,
)
from thresher.engine.decoding.blocks import BlockPool
from thresher.engine.decoding.kv_cache import DeltaStates, DeviceKV, PagedKV, PagedStep
from thresher.engine.decoding.scheduler import TokenSequence, start_scheduler
from thresher.engine.decoding.speculative import MOST, ON_CPU, Costs, Drafter, Speculate
from thresher.kernels import sampling
from thresher.kernels.attention.paged_cpu import Ints, QueryRuns
from thresher.kernels.logprob import token_logprobs
from thresher.policy.config import ModelConfig
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

SLOTS_A_SNAPSHOT = 4  # slots per snapshot of states: groups have 4 samples or more
STATE_DRAFTS = 3  # limit of drafts of a sequence with states: each draft needs another state
FORWARD_ROWS = 2048  # of one forward: decoding rows, then as many rows of prompts as fit


def snapshots_of(max_running: int) -> int:
    """Return the number of prefixes whose states are kept for reuse."""
    return max(max_running // SLOTS_A_SNAPSHOT, 2)


def ring_of(drafts: bool, launches_ahead: bool) -> int:
    """Return the number of states per slot: one for each token that a step may reach. A GPU needs one more, because the
    previous step may be taken back, and because the states of a prompt are kept without its last token."""
    return 1 + (STATE_DRAFTS if drafts else 0) + int(launches_ahead)


def states_bytes(config: ModelConfig, item_size: int, max_running: int, ring: int) -> int:
    """Return the bytes of the states of all slots, the spare one included, and of snapshots; 0 if there are none."""
    slot, snapshot = (DeltaStates.bytes_needed(config, item_size, states) for states in (ring, 1))
    return (max_running + 1) * slot + snapshots_of(max_running) * snapshot


class NotFiniteDraw(UserError):
    """Error for a token that was drawn from logits with NaN or infinity."""


class Decoder:
    """Decoder of sequences. It is reusable: `begin` drops the cache's contents, but not its memory on a CPU.

    max_running: number of sequences that run at once. num_blocks: blocks of the cache, block 0 included. reuse:
    sequences reuse prefixes that others computed; if off, everything is computed anew. share_prefix: sequences share
    the products with the keys that they share. Neither changes a result.
    """

    # Whether a step is launched before the previous one is read, and the host keeps its own ids and log-probs.
    launches_ahead = False

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        num_blocks: int,
        block_size: int,
        max_running: int,
        reuse: bool = True,
        share_prefix: bool = True,
        speculate: Speculate = 0,
    ) -> None:
        self.policy, self.reuse, self.share_prefix = policy, reuse, share_prefix
        self.vocab_size = tokenizer.vocab_size  # the head may be wider
        self.num_blocks, self.block_size, self.max_running = num_blocks, block_size, max_running
        # Look-ups of drafts read the slots' ids on the host.
        self.speculate: Speculate = speculate if self.launches_ahead or policy.device.type == "cpu" else 0
        self.has_states = policy.config.delta_layers > 0
        self.most_drafts = STATE_DRAFTS if self.has_states else MOST
        self.ring, self.snapshots = ring_of(bool(self.speculate), self.launches_ahead), snapshots_of(max_running)
        self.drafter: Drafter | None = None
        self.cache: PagedKV | DeviceKV | None = None
        self.head_VH: torch.Tensor | None = None
        self.stops = StopTables(tokenizer, policy.config.eos_token_ids, policy.device)
        self._open_cache()
        self._start_over(self.block_size, DecodeClock())

    def held(self) -> list[torch.Tensor]:
        """Return the cache's tensors; an empty list if there is no cache now."""
        return [] if self.cache is None else self.cache.tensors

    def end(self, keep: bool = False) -> None:
        """Free memory for the update, when nothing runs. On a CPU the cache is kept, because filling it takes time.
        keep: also keep all that `begin` needs to continue with the pool."""
        self.cache = self.cache if keep or self.policy.device.type == "cpu" else None
        self.head_VH = None

    def begin(self, longest: int, clock: DecodeClock, kept: BlockPool | None = None) -> None:
        """Start over with an empty cache, for sequences of at most `longest` tokens. UserError if one does not fit.
        kept: the decoder's own pool, if nothing has run since `end(keep=True)`; its contents are then used."""
        self._open_cache()
        self._start_over(longest, clock, kept)

    def _start_over(self, longest: int, clock: DecodeClock, kept: BlockPool | None = None) -> None:
        self.clock = clock
        self.head_VH = sampling.head_to_multiply(self.policy.head_VH[: self.vocab_size])
        snapshots = self.snapshots if self.has_states else None
        self.scheduler = start_scheduler(
            self.num_blocks, self.block_size, longest, self.max_running, self.reuse, snapshots, kept
        )
        self.pool, blocks = self.scheduler.pool, -(-longest // self.block_size)
        self.batch = self._make_batch(longest, blocks)
        if self.speculate:
            # As long as the arrays, which may be those of an earlier, longer run.
            self.drafter = Drafter(self.speculate, self.max_running, self.batch.length, self._draft_costs())
        self._timers: list[tuple[DeviceTimer, float]] = []  # of forwards, not yet read; the share of prefill in each
        self._sequence_in: dict[int, TokenSequence] = {}
        self._slots_N: Ints | None = None  # of the running sequences, by age; None: outdated
        self._prefilling: list[TokenSequence] = []
        self._scoring: list[TokenSequence] = []  # running sequences with missing log-probs
        self._from_prompt: list[TokenSequence] = []  # fully cached; they draw from their prompt's last hidden state
        self._busy = 0.0
        self._sampled: tuple[Ints, Ints] | None = None  # by the last step: slots, and number of tokens of each

    def _make_batch(self, longest: int, blocks: int) -> BatchState:
        return BatchState(self.max_running, longest, blocks, self.policy.device, self.launches_ahead)

    def _draft_costs(self) -> Costs:
        return ON_CPU

    def _open_cache(self) -> None:
        policy = self.policy
        if self.cache is None:
            sizes = self.num_blocks, self.block_size
            self.cache = PagedKV(policy.config, *sizes, policy.dtype, policy.device, self._make_states())

    def _make_states(self) -> DeltaStates | None:
        """Return the states of all slots, the spare one included, and of snapshots; None if no layer has states."""
        policy = self.policy
        if not self.has_states:
            return None
        slots = self.max_running + 1
        return DeltaStates(policy.config, slots, self.snapshots, self.ring, policy.dtype, policy.device)

    @property
    def idle(self) -> bool:
        """Return whether no sequence is in a turn, is scored or waits."""
        return not self.scheduler.waiting and not self._scoring and not self.batch.room_B.any()

    @property
    def takes_text(self) -> bool:
        """Return whether the next step feeds text that is appended before it, instead of a later step."""
        return True

    # --- Requests of the caller

    def begin_turn(
        self,
        sequence: TokenSequence,
        stop: tuple[str, ...],
        room: int,
        lead: bytes = b"",
        drawn: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> None:
        """Begin a turn, which ends at a stop, at the end of text, or after `room` tokens (at least one). lead: bytes of
        the previous token that belong to this turn's text, in which a stop may begin. drawn: ids and log-probs of the
        turn that an earlier rollout drew; they count towards `room`."""
        ids, logprobs = drawn
        sequence.stop, sequence.room, sequence.writing = stop, room, True
        sequence.turn_start, sequence.logprobs = len(sequence.ids), list(logprobs)
        sequence.ids.extend(ids)
        sequence.stop_state = self.stops.behind(stop, lead, ids)
        if sequence.slot >= 0:
            self.batch.begin_turn(sequence)
        else:
            self.scheduler.submit(sequence)

    def append(self, sequence: TokenSequence, ids: Sequence[int]) -> None:
        """Append text that the sequence did not sample, between two turns."""
        sequence.ids.extend(ids)
        if sequence.slot >= 0:
            if sequence not in self._prefilling:
                self._prefilling.append(sequence)
                # Its last token was drawn but not yet fed. It is fed with the text and does not count as prefill.
                sequence.prefilled -= int(self.batch.known_B[sequence.slot] > self.batch.cached_B[sequence.slot])
            self.batch.append(sequence.slot, ids)

    def score(self, sequence: TokenSequence) -> None:
        """Compute the log-probs of a new sequence's ids from `scored_from` (at least 1) on. They are taken under
        softmax(z / temperature) of all columns (greedy: at temperature 1, as those of drawn tokens). Nothing is drawn.
        `step` returns the sequence once its `logprobs` are complete, and the caller releases it."""
        self.scheduler.submit(sequence)

    def release(self, sequence: TokenSequence, keep: bool = False) -> None:
        """Remove a sequence and free its blocks. keep: leave them in the tree for others with the same prefix."""
        if sequence.slot >= 0:
            self.scheduler.running.remove(sequence)
            self._leave(sequence, keep)
        elif sequence in self.scheduler.waiting:
            self.scheduler.waiting.remove(sequence)

    def keep_states(self, sequence: TokenSequence) -> None:
        """Keep the states after the computed tokens of a sequence, between two turns, for others with the same prefix.
        Keys and values of all its tokens are kept by `release`; a model without states needs nothing else."""
        if self.has_states and sequence.slot >= 0:
            ids = sequence.ids[: int(self.batch.cached_B[sequence.slot])]
            self.scheduler.keep(sequence, ids, self.batch.blocks_of(sequence))
            self._keep_states(sequence, ids)

    def interrupt(self) -> list[TokenSequence]:
        """Release all sequences with the tokens drawn so far; return those whose turn has ended since the last step.
        The pool keeps their blocks in its tree; the caller calls `end` next."""
        ended = self._received()
        for sequence in [*self.scheduler.running]:
            self.release(sequence, keep=True)
        self.scheduler.waiting.clear()
        return ended

    def _received(self) -> list[TokenSequence]:
        """Return the sequences whose turn has ended in steps that were launched and not yet read."""
        return []

    def new_ids(self) -> list[tuple[TokenSequence, list[int]]]:
        """Return the ids that the last step drew, by sequence. Call it before any sequence is released."""
        if self._sampled is None:
            return []
        return [
            (self._sequence_in[slot], self.batch.newest(slot, taken))
            for slot, taken in zip(*(x.tolist() for x in self._sampled), strict=True)
        ]

    @torch.inference_mode()
    def step(self) -> list[TokenSequence]:
        """Run one forward and one draw; return the sequences whose turn has ended, the oldest first."""
        started, self._busy = time.perf_counter(), 0.0
        self._admit()
        self._look_up_drafts()
        runs = self._schedule_rows()
        hidden_TH = self._forward(runs)
        self._finish_prefills(runs, hidden_TH)
        ended = self._read_scores(self._score(runs, hidden_TH))
        ended = sorted([*ended, *self._sample_and_end_turns(runs, hidden_TH)], key=attrgetter("number"))
        self.clock.host += time.perf_counter() - started - self._busy
        return ended

    # --- Admission and preemption

    def _admit(self) -> None:
        for admitted in self.scheduler.admit():
            sequence, cached = admitted.sequence, admitted.cached
            if admitted.copy is not None:
                assert self.cache is not None
                self.cache.copy(*admitted.copy)
            slot = self.batch.open(sequence, cached, admitted.blocks)
            if self.cache is not None and self.cache.states is not None:
                self.cache.states.begin(slot, cached, admitted.snapshot)
            if self.drafter is not None:
                self.drafter.open(slot, sequence.earlier)
            self._sequence_in[slot], self._slots_N = sequence, None
            if not sequence.begun:
                sequence.begun = True
                sequence.prompt.waiting -= 1
                self.clock.shared_tokens += cached
                self.clock.tokens_recomputed += max(sequence.carried - cached, 0)
            (self._from_prompt if cached == len(sequence.ids) else self._prefilling).append(sequence)
            if sequence.unscored:
                self._scoring.append(sequence)
        self.batch.send()

    def _leave(self, sequence: TokenSequence, keep: bool) -> None:
        slot, blocks = sequence.slot, self.batch.blocks_of(sequence)
        cached = int(self.batch.cached_B[slot])
        self.batch.close(sequence)
        self.scheduler.leave(sequence, cached, blocks, keep)
        if keep and not sequence.scored_from:  # no sequence begins with a scored text
            self._keep_states(sequence, sequence.ids[:cached], slot)
        del self._sequence_in[slot]
        self._slots_N = None
        for listed in (self._prefilling, self._from_prompt, self._scoring):
            if sequence in listed:
                listed.remove(sequence)

    def _keep_states(self, sequence: TokenSequence, ids: Sequence[int], slot: int | None = None) -> None:
        """Keep the states of the sequence's slot, which are those after `ids`, for others with this prefix. slot: the
        slot that it had, if it has left."""
        if self.has_states and self.reuse and (number := self.pool.keep_state(ids, sequence.version)) is not None:
            assert self.cache is not None and self.cache.states is not None
            self.cache.states.save(sequence.slot if slot is None else slot, len(ids), number)

    def _schedule_rows(self) -> QueryRuns:
        """Return the rows to feed for each running sequence in this step, and allocate blocks for them. The youngest
        sequences are preempted while there are too few blocks."""
        while True:
            runs = self._runs()
            wanted_N = -(-(runs.start_N + runs.count_N) // self.block_size) - self.batch.blocks_B[runs.slot_N]
            wanted_N = np.maximum(wanted_N, 0)
            blocks = self.scheduler.allocate(int(wanted_N.sum()))
            if blocks is not None:
                break
            if self._give_way():
                continue
            self._leave(self.scheduler.preempt(), keep=True)
            self.clock.preemptions += 1
        if len(blocks):
            self.batch.extend(runs.slot_N, wanted_N, blocks)
        return runs

    def _give_way(self) -> bool:
        """Drop the drafts; return whether there were any. If so, the caller retries before it preempts a sequence."""
        any_drafts, self.batch.drafted_B[:] = bool(self.batch.drafted_B.any()), 0
        return any_drafts

    def _runs(self) -> QueryRuns:
        """Return the new rows, up to the limit of a forward: tokens of decoding sequences, then prompts and appended
        text, the oldest first. A run ends where its states are to be kept."""
        slot_N = self._slot_order()
        start_N = self.batch.cached_B[slot_N]
        count_N = self._wanted_rows(slot_N)
        for sequence in self._scoring if self.has_states else ():
            if (before := sequence.keep_at - self.batch.cached_B[sequence.slot]) > 0:
                count_N[slot_N == sequence.slot] = before
        order, long = np.argsort(count_N > 1, kind="stable"), int((count_N > 1).sum())
        count_N += self.batch.drafted_B[slot_N]
        slot_N, start_N, count_N = slot_N[order], start_N[order], count_N[order]
        decoding = int(count_N[: len(order) - long].sum())
        # Prefills get some rows even if decoding alone fills the forward.
        left_N = max(FORWARD_ROWS, decoding + len(slot_N)) - (np.cumsum(count_N) - count_N)
        count_N = np.clip(count_N, 0, np.maximum(left_N, 0))
        some = count_N > 0
        slot_N, start_N, count_N = slot_N[some], start_N[some], count_N[some]
        return QueryRuns(slot_N, start_N, count_N, np.cumsum(count_N) - count_N)

    def _wanted_rows(self, slot_N: Ints) -> Ints:
        """Return the number of tokens that each slot has yet to be fed. Between turns the last token is not fed: its
        hidden state lasts for one step only, so the step that draws the next turn's first token feeds it. The last
        token of a scored sequence is not fed either, because it predicts no requested id."""
        batch = self.batch
        return batch.known_B[slot_N] - batch.cached_B[slot_N] - (batch.room_B[slot_N] == 0)  # type: ignore[no-any-return]

    def _slot_order(self) -> Ints:
        """Return the slots of the running sequences, by age."""
        if self._slots_N is None:
            self._slots_N = np.array([sequence.slot for sequence in self.scheduler.running], np.int64)
        return self._slots_N

    # --- Forward and draw

    def _forward(self, runs: QueryRuns) -> torch.Tensor | None:
        """Return the hidden states [T, H] of the rows, and write their keys and values into the cache."""
        rows = int(runs.count_N.sum())
        if not rows:
            return None
        assert isinstance(self.cache, PagedKV)
        step = PagedStep(self.cache, self.batch.table_BP, runs, share=self.share_prefix)
        with DeviceTimer(self.policy.device) as lap:
            ids_T = self.batch.tokens_BL[step.slot_T, step.positions_T]
            hidden_TH = self.policy.hidden(ids_T, step.positions_T, step)
        self.batch.cached_B[runs.slot_N] += runs.count_N
        self._busy += lap.host
        prefilled = self._count_prefilled(runs)
        self._timers.append((lap, prefilled / rows))  # the time of a mixed forward is divided by rows
        self.clock.prefilled_tokens += prefilled
        self.clock.forward_rows += rows
        self.clock.forwards += 1
        return hidden_TH

    def _count_prefilled(self, runs: QueryRuns) -> int:
        if not self._prefilling:
            return 0
        count_of = dict(zip(runs.slot_N.tolist(), runs.count_N.tolist(), strict=True))
        for sequence in self._prefilling:
            sequence.prefilled += count_of.get(sequence.slot, 0)
        return sum(count_of.get(sequence.slot, 0) for sequence in self._prefilling)

    def _finish_prefills(self, runs: QueryRuns, hidden_TH: torch.Tensor | None) -> None:
        """Mark nodes of the prefix tree as ready. All sequences that share a complete prompt get its last hidden state,
        and they begin in this step."""
        complete = False
        for sequence in self._prefilling:
            cached = self._mark_ready(sequence)
            prompt = sequence.prompt
            if cached >= len(prompt.ids):
                prompt.filling = False
            if self.reuse and prompt.waiting and cached == len(sequence.ids) == len(prompt.ids):
                (run,) = np.flatnonzero(runs.slot_N == sequence.slot)
                assert hidden_TH is not None
                # A copy, because a row of hidden_TH itself would keep all of it alive.
                prompt.hidden_H = hidden_TH[int(runs.row_N[run] + runs.count_N[run]) - 1].clone()
                self._keep_states(sequence, prompt.ids)
                complete = True
        still = self.batch.cached_B < self.batch.known_B
        self._prefilling = [sequence for sequence in self._prefilling if still[sequence.slot]]
        if complete:
            self._admit()

    def _mark_ready(self, sequence: TokenSequence) -> int:
        """Let others use the sequence's cached blocks; return the number of its cached tokens."""
        cached = int(self.batch.cached_B[sequence.slot])
        self.scheduler.mark_computed(sequence, cached)
        return cached

    def _score(self, runs: QueryRuns, hidden_TH: torch.Tensor | None) -> list[Scores]:
        """Launch the log-probs of the scored ids that the step's rows predict. Each temperature takes one product with
        the head for all sequences. States are kept of a sequence whose run ends at `keep_at`. hidden_TH: hidden states
        of the rows, run after run."""
        found: dict[float, list[tuple[TokenSequence, Ints]]] = {}
        row_N = np.cumsum(runs.count_N) - runs.count_N
        for sequence in self._scoring:
            for run in np.flatnonzero(runs.slot_N == sequence.slot):
                if runs.start_N[run] + runs.count_N[run] == sequence.keep_at:
                    self.keep_states(sequence)
                # A row predicts the next id.
                place_R = int(runs.start_N[run]) + 1 + np.arange(runs.count_N[run])
                row_R = np.arange(row_N[run], row_N[run] + len(place_R))
                about_3R = np.stack([row_R, np.full_like(row_R, sequence.slot), place_R])
                about_3R = about_3R[:, place_R >= sequence.scored_from]
                if about_3R.size:
                    found.setdefault(sequence.draw.temperature or 1.0, []).append((sequence, about_3R))
        return [self._launch_scores(temperature, some, hidden_TH) for temperature, some in found.items()]

    def _launch_scores(
        self, temperature: float, some: Sequence[tuple[TokenSequence, Ints]], hidden_TH: torch.Tensor | None
    ) -> Scores:
        """Launch log-probs at one temperature. some: sequences with rows, slots and positions of their ids, [3, R]."""
        assert hidden_TH is not None and self.head_VH is not None
        with DeviceTimer(self.policy.device) as lap:
            row_R, slot_R, place_R = to_device(np.concatenate([at for _, at in some], 1), self.policy.device)
            rows_RH, ids_R = hidden_TH[row_R].to(self.head_VH.dtype), self.batch.tokens_BL[slot_R, place_R]
            # They are checked for finite values after they have been read.
            logprobs_R, _ = token_logprobs(rows_RH, self.head_VH, ids_R, temperature=temperature, defer_checks_to=[])
            cuda = logprobs_R.is_cuda
            received_R = torch.empty(logprobs_R.shape, dtype=logprobs_R.dtype, pin_memory=cuda)
            received_R.copy_(logprobs_R, non_blocking=True)
        self._timers.append((lap, 1.0))
        self._busy += lap.host
        done = torch.cuda.Event() if cuda else None
        if done is not None:
            done.record()
        return Scores([(sequence, at.shape[1]) for sequence, at in some], received_R, done)

    def _read_scores(self, scores: Sequence[Scores]) -> list[TokenSequence]:
        """Append log-probs to their sequences; return the sequences whose log-probs are complete."""
        ended = []
        for one in scores:
            for sequence, values in one.read():
                self._check_finite(np.where(np.isfinite(values), 0, NOT_FINITE))
                sequence.logprobs += values
                if not sequence.unscored:
                    self._scoring.remove(sequence)
                    ended.append(sequence)
        return ended

    def _look_up_drafts(self) -> None:
        """Look up drafts for the slots that decode, if drafts pay."""
        batch = self.batch
        batch.drafted_B[:] = 0
        if self.drafter is None:
            return
        slot_N = self._may_draft()
        if not len(slot_N) or not self.drafter.looks(len(slot_N)):
            return
        slot_N = self._before_look_up(slot_N)
        if len(slot_N):
            most_N = np.minimum(batch.room_B[slot_N] - 1, self.most_drafts)
            drafts = self.drafter.draft(batch.host_tokens(), batch.known_B, slot_N, most_N)
            if drafts is not None:
                batch.put_drafts(slot_N, drafts.ids_NK, drafts.count_N)

    def _may_draft(self) -> Ints:
        """Return the slots that decode and have room for more than the next token."""
        batch, slot_N = self.batch, self._slot_order()
        may_N = (batch.known_B[slot_N] == batch.cached_B[slot_N] + 1) & (batch.room_B[slot_N] > 1)
        return slot_N[np.flatnonzero(may_N)]

    def _before_look_up(self, slot_N: Ints) -> Ints:
        """Return the slots that may draft, after all drawn tokens are known; here they always are."""
        return slot_N

    def _sample_and_end_turns(self, runs: QueryRuns, hidden_TH: torch.Tensor | None) -> list[TokenSequence]:
        """Draw a token for every sequence that is in a turn and completely fed, and one more for each accepted draft.
        Return the sequences whose turn has ended."""
        batch = self.batch
        fed_N = runs.slot_N
        due_N = batch.cached_B[fed_N] == batch.known_B[fed_N] + batch.drafted_B[fed_N]
        due_N &= batch.room_B[fed_N] > 0
        slot_N, last_N = fed_N[due_N], (runs.row_N + runs.count_N - 1)[due_N]
        drafted_N = batch.drafted_B[slot_N]
        hidden = []
        if hidden_TH is not None:
            row_F = with_drafts(last_N - drafted_N, drafted_N)
            hidden.append(hidden_TH.index_select(0, torch.from_numpy(row_F).to(batch.device)))
        if self._from_prompt:
            slot_N = np.concatenate([slot_N, [sequence.slot for sequence in self._from_prompt]])
            drafted_N = np.concatenate([drafted_N, np.zeros(len(self._from_prompt), np.int64)])
            hidden.append(torch.stack([one.prompt.last_hidden_H for one in self._from_prompt]))
            self._from_prompt = []
        self._sampled = None
        if not len(slot_N):
            return []
        self.clock.count_step(len(slot_N), self.max_running)
        with DeviceTimer(self.policy.device) as lap:
            code_N, taken_N = self._sample_rows(torch.cat(hidden), slot_N, drafted_N)
        self._check_finite(code_N)
        self._timers.append((lap, 0.0))
        self._busy += lap.host
        self.clock.add(self._timers)
        self._timers = []
        self._sampled = slot_N, taken_N
        self._advance_slots(slot_N, drafted_N, taken_N)
        over = (code_N > 0) | (batch.room_B[slot_N] == 0)
        ended = [self._end_turn(int(slot), int(code)) for slot, code in zip(slot_N[over], code_N[over], strict=True)]
        return sorted(ended, key=attrgetter("number"))

    def _sample_rows(self, hidden_FH: torch.Tensor, slot_N: Ints, drafted_N: Ints) -> tuple[Ints, Ints]:
        """Draw at every row and store the accepted tokens. Return for each sequence the code of its turn's end (0: the
        turn continues) and the number of accepted tokens. F: rows, 1 + drafts of each sequence."""
        batch = self.batch
        rows = (np.repeat(slot_N, 1 + drafted_N), with_drafts(batch.known_B[slot_N], drafted_N))
        slot_F, position_F = (torch.from_numpy(x).to(batch.device) for x in rows)
        assert self.head_VH is not None
        rules = batch.rules.take(slot_F)
        ids_F, logprobs_F = sampling.sample_from_head(hidden_FH, self.head_VH, batch.seeds_B[slot_F], position_F, rules)
        return accept_tokens(batch, self.stops, slot_N, drafted_N, ids_F, logprobs_F)

    def _check_finite(self, code_N: Ints) -> None:
        """Raise NotFiniteDraw if a token was drawn, or an id scored, from logits that are not finite."""
        if not (code_N == NOT_FINITE).any():
            return
        self.end()
        self.cache = None  # on a CPU `end` keeps it, with NaN in slots that attention multiplies by 0
        raise NotFiniteDraw(
            f"{self.policy.folder or 'the policy'}: the log-prob of a token is not finite, so its logits hold "
            "NaN or infinity; check the weights, config.json (rope_theta, rms_norm_eps) and the temperature"
        )

    def _advance_slots(self, slot_N: Ints, drafted_N: Ints, taken_N: Ints) -> None:
        """Add the accepted tokens to the known ones, and subtract them from the room of their turns."""
        batch = self.batch
        batch.known_B[slot_N] += taken_N
        batch.room_B[slot_N] -= taken_N
        self.clock.sampled_tokens += int(taken_N.sum())
        if drafted_N.any():
            batch.cached_B[slot_N] = batch.known_B[slot_N] - 1  # rows of rejected drafts are overwritten
            self._count_drafts(slot_N, drafted_N, taken_N - 1)

    def _count_drafts(self, slot_N: Ints, drafted_N: Ints, accepted_N: Ints) -> None:
        """Count the drafts that were fed and those that were accepted."""
        assert self.drafter is not None
        self.batch.tried_B[slot_N] += drafted_N
        self.batch.taken_B[slot_N] += accepted_N
        self.clock.drafted_tokens += int(drafted_N.sum())
        self.clock.accepted_tokens += int(accepted_N.sum())
        some = drafted_N > 0
        self.drafter.note(slot_N[some], drafted_N[some], accepted_N[some])

    def _end_turn(self, slot: int, code: int) -> TokenSequence:
        sequence = self._sequence_in[slot]
        self.batch.read_turn(sequence)
        self.batch.room_B[slot] = 0
        sequence.writing = False
        sequence.hit = self.stops.hit(sequence.stop, code, sequence.ids[-1])
        sequence.finish = "stop" if sequence.hit else "eos" if code else "length"
        return sequence


class Scores(NamedTuple):
    """Log-probs of given ids during their copy to the host, sequence after sequence. counts: their number per sequence.
    done: the end of the copy, None on a CPU."""

    counts: list[tuple[TokenSequence, int]]
    logprobs_R: torch.Tensor
    done: torch.cuda.Event | None

    def read(self) -> list[tuple[TokenSequence, list[float]]]:
        """Return each sequence's log-probs, after waiting for the copy."""
        if self.done is not None:
            self.done.synchronize()
        parts = self.logprobs_R.split([count for _, count in self.counts])
        return [(sequence, part.tolist()) for (sequence, _), part in zip(self.counts, parts, strict=True)]


class DeviceTimer:
    """Timer of the work that a `with` block launches.

    host: seconds until all of it was launched. seconds(): duration of the work, on CUDA measured by two events on its
    stream; this waits until the work is done.
    """

    __slots__ = ("_events", "host")

    def __init__(self, device: torch.device) -> None:
        self.host = 0.0
        cuda = device.type == "cuda"
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else ()

    def __enter__(self) -> DeviceTimer:
        for event in self._events[:1]:
            event.record()
        self.host -= time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.host += time.perf_counter()
        for event in self._events[1:]:
            event.record()

    def seconds(self) -> float:
        """Return the seconds of the work; on a CPU those of the host."""
        if not self._events:
            return self.host
        begun, ended = self._events
        ended.synchronize()
        milliseconds: float = begun.elapsed_time(ended)
        return milliseconds / 1000


@dataclass(slots=True)
class DecodeClock:
    """Time spent in decoding, in seconds, and counts of the work done.

    prefill, decode: of the forwards; draws count as `decode`. host: in the decoder's own Python code around them. On
    CUDA the first two are measured on the GPU (`DeviceTimer`), which works in parallel with the host, so the three may
    add up to more than the elapsed time, `total`. rest: see the property. prefilled_tokens: rows of prompts and of
    appended text, recomputed ones included. shared_tokens: rows that another sequence had computed. discarded_tokens:
    tokens drawn for a turn that had ended. drafted_tokens: drafts that were fed. accepted_tokens: drafts that were
    accepted. tokens_recomputed: tokens prefilled again for sequences that an earlier rollout began. slots, busy_slots:
    over all steps in which tokens were drawn, the number of slots and the number of those that drew.
    """

    decode: float = 0.0
    prefill: float = 0.0
    host: float = 0.0
    total: float = 0.0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    forwards: int = 0
    forward_rows: int = 0
    discarded_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tokens_recomputed: int = 0
    slots: int = 0
    busy_slots: int = 0

    def count_step(self, busy: int, slots: int) -> None:
        """Count a step in which `busy` of the slots draw."""
        self.busy_slots += busy
        self.slots += slots

    @property
    def rest(self) -> float:
        """Return the part of `total` outside prefill and decode, in seconds; on CUDA, the time in which the GPU was
        idle."""
        return max(self.total - self.decode - self.prefill, 0.0)

    def add(self, laps: Iterable[tuple[DeviceTimer, float]]) -> None:
        """Add the time of finished forwards and draws, each with its share of prefill."""
        for lap, prefilled in laps:
            seconds = lap.seconds()
            self.prefill += seconds * prefilled
            self.decode += seconds * (1 - prefilled)
