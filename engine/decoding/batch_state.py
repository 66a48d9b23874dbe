"""State of the running sequences, in arrays that are allocated once.

A running sequence has a slot, which is one row of every array. A step reads the arrays and writes its changes into
them; no array is built from a list of sequences. The host changes a slot when its sequence begins, ends, or gets text
that it did not sample.

    on the host (numpy), derived from its own actions        on the policy's device
    known_B    number of tokens of the sequence              tokens_BL    token ids
    cached_B   number of tokens in the KV cache              logprobs_BL  of sampled tokens; empty with a mirror
    table_BP   its blocks, blocks_B of them, then 0          seeds_B      seeds of the noise
    room_B     tokens left in the turn; 0: no turn           state_B      states of the stop automaton
    prompt_B   number of tokens of its prompt                temperature, top_k, top_p, min_p _B

    known = cached        the last token's hidden state is available: a token can be drawn
    known = cached + 1    the last token was drawn or appended, and is fed next
    known > cached + 1    a prompt or appended text has to be prefilled

drafted_B is the number of drafts after the known tokens in this step (speculative.py). tried_B and taken_B count the
drafts and the accepted drafts since the slot was opened. Ids, seeds and states that the host writes are copied to the
device together, in `send`, because a separate copy of each would make the host wait until the device is idle.

`StopTables` holds the stop automata of all slots; `accept_tokens` writes the tokens that a step has drawn.

Axes: B slots, L tokens of a sequence, P blocks of a sequence, N slots that draw in this step, C columns of the stop
tables, V vocabulary, X a list over several slots.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from thresher.engine.decoding.scheduler import SamplingParams, TokenSequence
from thresher.engine.decoding.stop_tags import Hit, TagMatcher
from thresher.kernels.attention.paged_cpu import places
from thresher.kernels.sampling import SamplingTensors
from thresher.policy.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
AnyInts = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

RULES = (torch.float32, torch.int64, torch.float32, torch.float32)  # temperature, top-k, top-p, min-p
NOT_FINITE = -1  # a code in addition to those of `StopTables.advance`: the token's log-prob is NaN or infinite


class BatchState:
    """Arrays for `slots` sequences of up to `length` tokens in up to `blocks` blocks, and a spare slot for padding
    rows.

    mirror: the host has its own copy of ids and log-probs, which `note_drawn` fills.
    """

    def __init__(self, slots: int, length: int, blocks: int, device: torch.device, mirror: bool = False) -> None:
        self.device, self.length, self.spare = device, max(length, 2), slots
        length, slots = self.length, slots + 1
        self.known_B, self.cached_B, self.room_B, self.blocks_B = (np.zeros(slots, np.int64) for _ in range(4))
        self.drafted_B, self.tried_B, self.taken_B = (np.zeros(slots, np.int64) for _ in range(3))
        self.prompt_B = np.zeros(slots, np.int64)
        self.table_BP = np.zeros((slots, blocks), np.int64)
        sizes = [slots * length, slots, slots]
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        tokens, self.seeds_B, self.state_B = self._all.split(sizes)
        self.tokens_BL = tokens.view(slots, length)
        self.logprobs_BL = torch.zeros(slots, 0 if mirror else length, device=device)
        self._seeds, self._states = (sum(sizes[:count]) for count in (1, 2))  # offsets in _all
        # The host writes here: on a CPU into _all itself, because a numpy call costs less than a torch call; otherwise
        # into an image, from which `send` copies the places in _unsent.
        self._has_image = mirror or device.type != "cpu"
        self._host = np.zeros(sum(sizes), np.int64) if self._has_image else self._all.numpy()
        self._unsent: list[Ints] = []
        # The host reads here: on a GPU without a mirror, from the GPU's own tensors.
        self._mirrors = mirror
        self._tokens: Any = self._host[: sizes[0]].reshape(slots, length)
        self._logprobs: Any
        if mirror:
            self._logprobs = np.zeros((slots, length), np.float32)
        elif device.type == "cpu":
            self._logprobs = self.logprobs_BL.numpy()
        else:
            self._tokens, self._logprobs = self.tokens_BL, self.logprobs_BL
        self.draws: list[SamplingParams] = [SamplingParams()] * slots
        self._rules_B = [torch.zeros(slots, dtype=kind, device=device) for kind in RULES]
        self.rules = self._rules()
        self._free = list(range(slots - 2, -1, -1))

    def clear(self) -> None:
        """Free all slots. The tensors stay in place, and the sampling settings are kept."""
        counts_B = (self.known_B, self.cached_B, self.room_B, self.blocks_B, self.drafted_B, self.tried_B, self.taken_B)
        for array in (*counts_B, self.prompt_B, self.table_BP):
            array[:] = 0
        self._unsent = []
        self._free = list(range(self.spare - 1, -1, -1))

    def open(self, sequence: TokenSequence, cached: int, blocks: Sequence[int]) -> int:
        """Assign a slot to `sequence`; its first `cached` tokens are already in `blocks`."""
        slot = sequence.slot = self._free.pop()
        self.known_B[slot] = self.cached_B[slot] = 0
        self.append(slot, sequence.ids)
        self.cached_B[slot], self.blocks_B[slot] = cached, len(blocks)
        self.table_BP[slot, : len(blocks)] = blocks
        self.prompt_B[slot] = len(sequence.prompt.ids)
        self._write(self._seeds + slot, [sequence.seed])
        if self.draws[slot] != sequence.draw:
            # Free slots take the same settings, because rows with equal settings cost less to sample.
            free = {*self._free, self.spare}
            self.draws = [sequence.draw if x in free or x == slot else draw for x, draw in enumerate(self.draws)]
            self.rules = self._rules()
        if sequence.writing:
            done = len(sequence.ids) - sequence.turn_start
            self.room_B[slot] = sequence.room - done
            self._write(self._states + slot, [sequence.stop_state])
            if done:
                values = np.array(sequence.logprobs, np.float32)
                on_host = isinstance(self._logprobs, np.ndarray)
                turn = slice(sequence.turn_start, len(sequence.ids))
                self._logprobs[slot, turn] = values if on_host else to_device(values, self.device)
        return slot

    def begin_turn(self, sequence: TokenSequence) -> None:
        self.room_B[sequence.slot] = sequence.room
        self._write(self._states + sequence.slot, [sequence.stop_state])

    def send(self) -> None:
        """Copy the host's writes to the device without blocking. The next forward or draw reads them there."""
        if self._unsent:
            place_X = np.concatenate(self._unsent)
            sent_2X = to_device(np.stack([place_X, self._host[place_X]]), self.device)
            self._all[sent_2X[0]] = sent_2X[1]  # a repeated place has the same value each time
            self._unsent.clear()

    def _write(self, place: int, values: Sequence[int]) -> None:
        """Write ids, seeds or states into _all from this place on."""
        end = place + len(values)
        self._host[place:end] = values
        if self._has_image:
            self._unsent.append(np.arange(place, end))

    def put_drafts(self, slot_N: Ints, ids_NK: Ints, count_N: Ints) -> None:
        """Put the first `count_N` drafts of each slot after its known tokens, to be fed with them."""
        self.drafted_B[slot_N] = count_N
        row, column = np.nonzero(np.arange(ids_NK.shape[1]) < count_N[:, None])
        self.host_tokens()[slot_N[row], self.known_B[slot_N[row]] + column] = ids_NK[row, column]

    def drafts_of(self, slot_N: Ints, most: int) -> Ints:
        """Return the drafts after the known tokens, [N, most]; entries after a slot's last draft are arbitrary ids."""
        place_NK = self.known_B[slot_N, None] + np.arange(most)
        drafts_NK: Ints = self.host_tokens()[slot_N[:, None], np.minimum(place_NK, self.length - 1)]
        return drafts_NK

    def host_tokens(self) -> Ints:
        """Return tokens_BL as a host array: the mirror, or on a CPU the tensor's own memory."""
        assert isinstance(self._tokens, np.ndarray)
        return self._tokens

    def close(self, sequence: TokenSequence) -> None:
        """Free the slot. The tokens of an unfinished turn go to the sequence, which may be admitted again."""
        slot = sequence.slot
        if sequence.writing:
            self.read_turn(sequence)
            self.send()
            sequence.stop_state = int(self.state_B[slot])
        sequence.drafted += int(self.tried_B[slot])
        sequence.accepted += int(self.taken_B[slot])
        self.tried_B[slot] = self.taken_B[slot] = self.drafted_B[slot] = 0
        self.table_BP[slot, : self.blocks_B[slot]] = 0
        self.known_B[slot] = self.cached_B[slot] = self.room_B[slot] = self.blocks_B[slot] = 0
        self._free.append(slot)
        sequence.slot = -1

    def append(self, slot: int, ids: Sequence[int]) -> None:
        known = int(self.known_B[slot])
        if known + len(ids) > self.length:
            raise ValueError(f"{known + len(ids)} tokens in a slot of {self.length}")
        self._write(slot * self.length + known, ids)
        self.known_B[slot] = known + len(ids)

    def note_drawn(self, slot_N: Ints, position_N: Ints, ids_N: Ints, logprobs_N: Floats) -> None:
        """Write the tokens drawn at these positions into the mirror, after they have been read back."""
        assert self._mirrors
        self._tokens[slot_N, position_N] = ids_N
        self._logprobs[slot_N, position_N] = logprobs_N

    def newest(self, slot: int, count: int) -> list[int]:
        """Return the last `count` ids of the slot."""
        known = int(self.known_B[slot])
        ids: list[int] = self._tokens[slot, known - count : known].tolist()
        return ids

    def read_turn(self, sequence: TokenSequence) -> None:
        """Copy the turn's ids and log-probs so far into the sequence."""
        turn = slice(sequence.turn_start, int(self.known_B[sequence.slot]))
        sequence.ids[sequence.turn_start :] = self._tokens[sequence.slot, turn].tolist()
        sequence.logprobs = self._logprobs[sequence.slot, turn].tolist()

    def extend(self, slots_N: Ints, blocks_N: Ints, pool_take: Ints) -> None:
        """Append `blocks_N` new blocks, taken from `pool_take`, to each slot's table."""
        slot_X = np.repeat(slots_N, blocks_N)
        place_X = np.arange(len(pool_take)) - np.repeat(np.cumsum(blocks_N) - blocks_N, blocks_N)
        self.table_BP[slot_X, self.blocks_B[slot_X] + place_X] = pool_take
        self.blocks_B[slots_N] += blocks_N

    def blocks_of(self, sequence: TokenSequence) -> list[int]:
        slot = sequence.slot
        blocks: list[int] = self.table_BP[slot, : self.blocks_B[slot]].tolist()
        return blocks

    def _rules(self) -> SamplingTensors:
        """Write the slots' sampling settings into the tensors that captured steps read."""
        columns = zip(*((one.temperature, one.top_k, one.top_p, one.min_p) for one in self.draws), strict=True)
        kinds = (np.float32, np.int64, np.float32, np.float32)
        host = tuple(map(np.array, columns, kinds))
        for held_B, values_B in zip(self._rules_B, host, strict=True):
            held_B.copy_(to_device(values_B, self.device))
        temperature_B, top_k_B, top_p_B, min_p_B = self._rules_B
        return SamplingTensors.of(temperature_B, top_k_B, top_p_B, min_p_B, host=host)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a GPU without blocking; on a CPU the tensor shares the array's memory."""
    return to_pinned(values, device).to(device, non_blocking=True)


def to_pinned(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a pinned copy, from which a GPU copies without blocking. torch keeps its memory until the copy is done. On
    a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class StopTables:
    """Tables of several TagMatchers in one, so that sequences with different stops advance in one look-up.

    The states of all matchers are numbered consecutively. State 0 has no stops. `advance` returns a code for every
    token: 0 continues, 1 is the end of text, c + 1 is a hit with the matcher's code c. A token that is both is a hit.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], device: torch.device) -> None:
        self.tokenizer, self.device, self.version = tokenizer, device, 0  # version: of the tables' memory
        self._starts: dict[tuple[str, ...], int] = {(): 0}
        self._matchers: dict[tuple[str, ...], TagMatcher] = {}
        columns_V = np.zeros((1, tokenizer.vocab_size), np.int64)
        none = np.zeros((1, 1), np.int64)
        self._parts: list[tuple[AnyInts, AnyInts, AnyInts]] = [(columns_V, none, none)]
        eos_V = np.zeros(tokenizer.vocab_size, np.int64)
        eos_V[[token for token in eos_ids if token < tokenizer.vocab_size]] = 1
        self._eos_V = to_device(eos_V, device)
        self._lay()

    def start(self, stop: tuple[str, ...], lead: bytes = b"") -> int:
        """Return the state before a turn's first token. lead: bytes with which its text begins."""
        if stop not in self._starts:
            matcher = self._matchers[stop] = TagMatcher(self.tokenizer, stop)
            first = self._starts[stop] = sum(len(next_AC) for _, next_AC, _ in self._parts)
            columns_V, next_AC, code_AC = matcher.tables()
            # A matcher's integer type fits its own states only; here states are numbered over all matchers.
            self._parts.append((columns_V[None], next_AC.astype(np.int64) + first, code_AC))
            self._lay()
        return self._starts[stop] + (self._matchers[stop].start(lead) if stop else 0)

    def behind(self, stop: tuple[str, ...], lead: bytes, ids: Sequence[int]) -> int:
        """Return the state of a turn after these ids, none of which ended it."""
        state = self.start(stop, lead)
        if not stop or not ids:
            return state
        columns_V, next_AC, _ = self._matchers[stop].tables()
        first = self._starts[stop]
        for token in ids:
            state = first + int(next_AC[state - first, columns_V[token]])
        return state

    def advance(self, state_N: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states and codes after one more token per sequence, int64 [N]."""
        at_N = self._base_A[state_N] + self._columns_XV[self._matcher_A[state_N], ids_N]
        code_N = self._code[at_N]
        return self._next[at_N], torch.where(code_N > 0, code_N + 1, self._eos_V[ids_N])

    def hit(self, stop: tuple[str, ...], code: int, token: int) -> Hit | None:
        """Return the hit that a code of `advance` means; None for the end of text."""
        return self._matchers[stop].hit(code - 1, token) if code > 1 else None

    def _lay(self) -> None:
        def put(parts: Sequence[AnyInts]) -> torch.Tensor:
            return to_device(np.concatenate(parts).astype(np.int64), self.device)

        columns, nexts, codes = zip(*self._parts, strict=True)
        sizes = [table.shape for table in nexts]
        self._columns_XV = to_device(np.concatenate(columns).astype(np.int32), self.device)
        self.version += 1
        self._next, self._code = (put([table.reshape(-1) for table in tables]) for tables in (nexts, codes))
        self._matcher_A = put([np.full(states, number) for number, (states, _) in enumerate(sizes)])
        width_A = np.repeat([width for _, width in sizes], [states for states, _ in sizes])
        self._base_A = put([np.cumsum(width_A) - width_A])


# --- The tokens that a step has drawn, and their acceptance


class Drawn(NamedTuple):
    """Tokens that a step has drawn for each sequence, on the host: ids and log-probs of its rows, the code of
    `advance_checked` for the last accepted token, and the number of accepted tokens."""

    ids_NQ: Ints
    logprobs_NQ: npt.NDArray[np.float32]
    code_N: Ints
    taken_N: Ints

    def of(self, some_N: Bools) -> "Drawn":
        """Return the draws of these sequences."""
        return Drawn(self.ids_NQ[some_N], self.logprobs_NQ[some_N], self.code_N[some_N], self.taken_N[some_N])

    @property
    def accepted_NQ(self) -> Bools:
        accepted: Bools = np.arange(self.ids_NQ.shape[1]) < self.taken_N[:, None]
        return accepted


class DrawnRows(NamedTuple):
    """`Drawn` during its copy to the host: one row of `pack_drawn` per sequence, and padding. done: the end of the
    copy, None on a CPU."""

    rows_BX: torch.Tensor
    done: "torch.cuda.Event | None"

    def read(self, count: int) -> Drawn:
        """Return the draws of the first `count` sequences, after waiting for the copy."""
        if self.done is not None:
            self.done.synchronize()
        columns_XN = np.ascontiguousarray(self.rows_BX.numpy()[:count].T)
        code_N, taken_N = columns_XN[:2].astype(np.int64)
        ids_QN, logprobs_QN = np.split(columns_XN[2:], 2)
        return Drawn(ids_QN.T.astype(np.int64), logprobs_QN.view(np.float32).T, code_N, taken_N)


def drawn_width(rows: int) -> int:
    """Return the length of a row of `pack_drawn` for a sequence with `rows` rows."""
    return 2 + 2 * rows


def pack_drawn(
    ids_NQ: torch.Tensor, logprobs_NQ: torch.Tensor, code_N: torch.Tensor, taken_N: torch.Tensor, out_NX: torch.Tensor
) -> None:
    """Write one int32 row per sequence: code, taken, ids (below 2^31), and the bits of the log-probs."""
    columns = (code_N.int()[:, None], taken_N.int()[:, None], ids_NQ.int(), logprobs_NQ.float().view(torch.int32))
    torch.cat(columns, 1, out=out_NX)


def advance_checked(
    stops: StopTables, state_N: torch.Tensor, ids_N: torch.Tensor, logprobs_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `StopTables.advance`, and return the code NOT_FINITE where the drawn token's log-prob is not finite.

    A logit of NaN or +inf makes the log-prob of its row NaN, and so does a row in which all logits are -inf. A logit of
    -inf next to finite ones is a masked column. The code is read back in any case, so the check costs no transfer.
    """
    state_N, code_N = stops.advance(state_N, ids_N)
    return state_N, torch.where(logprobs_N > -torch.inf, code_N, NOT_FINITE)  # False for NaN, too


def count_accepted(
    stops: StopTables,
    state_N: torch.Tensor,
    ids_NQ: torch.Tensor,
    logprobs_NQ: torch.Tensor,
    drafts_NK: torch.Tensor,
    drafted_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the states after the last accepted token, its codes, and the numbers of accepted tokens, int64 [N].
    ids_NQ: ids drawn after the known tokens and after each draft. drafted_N: number of drafts of each sequence."""
    state_N, code_N = advance_checked(stops, state_N, ids_NQ[:, 0], logprobs_NQ[:, 0])
    taken_N = torch.ones_like(code_N)
    if not drafts_NK.shape[1]:
        return state_N, code_N, taken_N
    true_NK = ids_NQ[:, :-1] == drafts_NK
    true_NK &= torch.arange(drafts_NK.shape[1], device=drafted_N.device) < drafted_N[:, None]
    alive_N = code_N == 0
    for column in range(drafts_NK.shape[1]):
        alive_N = alive_N & true_NK[:, column]
        next_N, found_N = advance_checked(stops, state_N, ids_NQ[:, column + 1], logprobs_NQ[:, column + 1])
        state_N, code_N = torch.where(alive_N, next_N, state_N), torch.where(alive_N, found_N, code_N)
        taken_N = taken_N + alive_N
        alive_N = alive_N & (code_N == 0)
    return state_N, code_N, taken_N


def accept_tokens(
    batch: BatchState, stops: StopTables, slot_N: Ints, drafted_N: Ints, ids_F: torch.Tensor, logprobs_F: torch.Tensor
) -> tuple[Ints, Ints]:
    """Write the accepted ids, their log-probs and stop states into the slots. Return for each sequence the code of
    `advance_checked` for its last token, and the number of accepted tokens.

    Between the ends of turns this is the only place where a step reads back from the device, in one copy.
    """
    first_N, known_N, left_N, slot = (
        torch.from_numpy(x).to(batch.device)
        for x in (np.cumsum(1 + drafted_N) - 1 - drafted_N, batch.known_B[slot_N], drafted_N, slot_N)
    )
    if not drafted_N.any():
        batch.tokens_BL[slot, known_N] = ids_F
        batch.logprobs_BL[slot, known_N] = logprobs_F.float()
        batch.state_B[slot], code_N = advance_checked(stops, batch.state_B[slot], ids_F, logprobs_F)
        return code_N.cpu().numpy(), np.ones_like(slot_N)
    # A sequence with fewer drafts repeats its last row; no draft is compared there.
    column_NQ = torch.arange(int(drafted_N.max()) + 1, device=batch.device).minimum(left_N[:, None])
    row_NQ, place_NQ, slot_N1 = first_N[:, None] + column_NQ, known_N[:, None] + column_NQ, slot[:, None]
    ids_NQ, logprobs_NQ = ids_F[row_NQ], logprobs_F[row_NQ].float()
    drafts_NK = batch.tokens_BL[slot_N1, place_NQ[:, :-1]]
    batch.state_B[slot], code_N, taken_N = count_accepted(
        stops, batch.state_B[slot], ids_NQ, logprobs_NQ, drafts_NK, left_N
    )
    # Rejected tokens are also written, and overwritten before they are read.
    batch.tokens_BL[slot_N1, place_NQ] = ids_NQ
    batch.logprobs_BL[slot_N1, place_NQ] = logprobs_NQ
    codes, taken = torch.stack([code_N, taken_N]).cpu().numpy()
    return codes, taken


def with_drafts(first_N: Ints, drafted_N: Ints) -> Ints:
    """Return [F]: first, first + 1, .., first + drafted of each sequence."""
    if not drafted_N.any():
        return first_N
    return np.repeat(first_N, 1 + drafted_N) + places(1 + drafted_N)
