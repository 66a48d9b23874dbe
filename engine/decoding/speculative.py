"""Drafts: guesses of a sequence's next tokens, looked up in earlier text, for all slots at once.

A token is argmax(z / T + noise(seed, position, token)), and the noise is a pure function. A draft is therefore verified
by equality: one forward feeds the last token and k drafts, a token is drawn at each row, and drafts are accepted up to
the first that differs. If the BLAS is batch-invariant (docs/design.md), drafts change no token and no log-prob. A draft
continues an earlier occurrence of the sequence's last tokens, in earlier text for the same question or in its own.

With "auto", a forward of n sequences with drafts is taken to cost, in forwards without drafts,

    1 + drafting + c(n) x drafts / n        c(n) = row + row_each n         (Costs)

p is the share of drafts of a kind that were accepted so far; the i-th draft of a slot is used with probability p^i. A
slot gets as many drafts as have p^i > c(n). No drafts are used if all of them save less than `drafting`. After PATIENCE
such steps, drafts are looked up every PAUSE steps only. No clock takes part in these decisions. A GPU computes as many
rows for each slot as for the slot with the most drafts. Slots therefore get at most the number in STACKED that gives
the most tokens per unit of time.

Axes: B slots, L tokens of a sequence, N slots that decode, K drafts of a slot.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Speculate = Literal["auto"] | int

MOST = 8  # limit of drafts per slot
TURN_END = -1  # in earlier ids, after the last token of a turn
WINDOW = 4096  # number of tokens searched: the last ones of the longest slot's source
STACKED = (1, 2, 4, 8)  # numbers of drafts for which a GPU has a decode step
PATIENCE, PAUSE = 4, 16  # after PATIENCE steps in which drafts did not pay, look up every PAUSE steps
# Kinds of drafts: after 4 or 2 equal tokens in earlier text, after 3 in the sequence's own context.
EARLIER_4, EARLIER_2, OWN_3 = range(3)
BEGIN = ((9.0, 1.0), (3.0, 1.0), (1.0, 1.0))  # initial counts of accepted and of rejected drafts, for each kind


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost that drafts add to a forward of n sequences, in forwards: drafting + (row / n + row_each) x rows. stacked:
    whether every slot has as many rows as the slot with the most."""

    drafting: float
    row: float
    row_each: float
    stacked: bool = False


ON_CPU = Costs(0.25, 0.1, 0.0014)  # as measured (docs/internals/log.md)
BYTES_PER_S = 2.0e12  # memory bandwidth of an A100 with 80 GB, the slowest GPU considered
# bfloat16 operations per byte of an A100: with fewer rows, reading the weights takes longer than using them.
ROWS_FREE = 150
HOST_S = 1e-3  # host time of a step: bookkeeping and look-up, which need the last tokens; the GPU waits meanwhile


def gpu_costs(weight_bytes: int, state_bytes: int = 0) -> Costs:
    """Return the costs on a GPU, derived by arithmetic; they are not measured yet. A forward takes as long as reading
    its weights. Each further row adds 1 / ROWS_FREE of that, and the time to write the states after it. A step with
    drafts is not launched ahead, so the host's time is added."""
    row_each = 1 / ROWS_FREE + state_bytes / weight_bytes
    return Costs(HOST_S * BYTES_PER_S / weight_bytes, 0.0, row_each, stacked=True)


@dataclass(slots=True)
class Drafts:
    """Drafts of each slot: ids_NK, of which the first count_N are valid."""

    ids_NK: Ints
    count_N: Ints


class Drafter:
    """Look-up of drafts. speculate: "auto", or the number of drafts for every slot that has any. counts: accepted and
    rejected drafts of each kind since the first step of a rollout, so that a resumed run uses the same drafts."""

    def __init__(self, speculate: Speculate, slots: int, length: int, costs: Costs = ON_CPU) -> None:
        self.speculate, self.costs = speculate, costs
        self.earlier_BL = np.full((slots, length), -1, np.int64)
        self.earlier_B = np.zeros(slots, np.int64)  # lengths
        self.kind_B = np.zeros(slots, np.int64)  # of the last drafts
        self.steps = self.refused = 0
        self.counts = np.array(BEGIN)

    def open(self, slot: int, earlier: "Int32s | None") -> None:
        """Begin a sequence in the slot. earlier: ids that it may repeat, with TURN_END after each turn."""
        self.earlier_B[slot] = 0
        if earlier is not None:
            ids = earlier[: self.earlier_BL.shape[1]]
            self.earlier_BL[slot, : len(ids)] = ids
            self.earlier_B[slot] = len(ids)

    def looks(self, sequences: int) -> bool:
        """Return whether drafts are looked up in this step, in which `sequences` decode. Call it once per step. The
        answer does not depend on any token."""
        self.steps += 1
        wanted = any(self._drafts_wanted(kind, sequences) for kind in range(len(BEGIN)))
        return wanted and (self.refused <= PATIENCE or self.steps % PAUSE == 0)

    def draft(self, tokens_BL: Ints, known_B: Ints, slot_N: Ints, most_N: Ints) -> Drafts | None:
        """Return drafts for slots that decode, at most `most_N` each; None if no drafts pay."""
        wanted = [self._drafts_wanted(kind, len(slot_N)) for kind in range(len(BEGIN))]
        known_N = known_B[slot_N]
        found_N, kind_N = np.full(len(slot_N), -1), np.zeros(len(slot_N), np.int64)
        from_earlier_N = np.zeros(len(slot_N), bool)
        for kind, tokens in ((EARLIER_4, 4), (EARLIER_2, 2), (OWN_3, 3)):
            left = np.flatnonzero(found_N < 0)
            if not wanted[kind] or not len(left):
                continue
            own = kind == OWN_3
            slots = slot_N[left]
            source, length = (tokens_BL, known_N[left]) if own else (self.earlier_BL, self.earlier_B[slots])
            place = _nearest(source, slots, length, tokens_BL, known_N[left], tokens)
            found_N[left], kind_N[left] = place, kind
            from_earlier_N[left] = not own
        length_N = np.where(from_earlier_N, self.earlier_B[slot_N], known_N)
        count_N = np.minimum(np.array(wanted)[kind_N], np.minimum(length_N - 1 - found_N, most_N))
        count_N = np.where(found_N < 0, 0, np.maximum(count_N, 0))
        at_NK = np.minimum(found_N[:, None] + 1 + np.arange(int(count_N.max())), tokens_BL.shape[1] - 1)
        own_NK, earlier_NK = tokens_BL[slot_N[:, None], at_NK], self.earlier_BL[slot_N[:, None], at_NK]
        ids_NK = np.where(from_earlier_N[:, None], earlier_NK, own_NK)
        left_NK = np.where(ids_NK == TURN_END, np.arange(ids_NK.shape[1]), MOST)
        count_N = np.minimum(count_N, left_NK.min(1, initial=MOST))
        count_N = np.minimum(count_N, self._most_that_pay(count_N, kind_N))
        if not count_N.any():
            return None
        self.kind_B[slot_N] = kind_N
        return Drafts(ids_NK[:, : int(count_N.max())], count_N)

    def note(self, slot_N: Ints, drafted_N: Ints, taken_N: Ints) -> None:
        """Add the slots' accepted and rejected drafts to `counts`."""
        np.add.at(self.counts[:, 0], self.kind_B[slot_N], taken_N)
        np.add.at(self.counts[:, 1], self.kind_B[slot_N], taken_N < drafted_N)

    def _drafts_wanted(self, kind: int, sequences: int) -> int:
        if self.speculate != "auto":
            return min(self.speculate, MOST)
        return int((self._chances(kind) > self.costs.row + self.costs.row_each * sequences).sum())

    def _chances(self, kind: int) -> Floats:
        """Return the probabilities that the 1st, 2nd .. draft is used."""
        yes, no = self.counts[kind]
        chances: Floats = (yes / (yes + no)) ** np.arange(1, MOST + 1)
        return chances

    def _most_that_pay(self, count_N: Ints, kind_N: Ints) -> int:
        """Return the limit of drafts per slot with which a forward is likely to give the most tokens per unit of time;
        0 if no drafts are worth their cost."""
        if self.speculate != "auto":
            return MOST
        used = np.concatenate([np.zeros((len(BEGIN), 1)), [np.cumsum(self._chances(x)) for x in range(len(BEGIN))]], 1)
        sequences, costs = len(count_N), self.costs
        most, best = 0, float(sequences)
        for cap in STACKED if costs.stacked else (MOST,):
            some_N = np.minimum(count_N, cap)
            rows = sequences * cap if costs.stacked else int(some_N.sum())
            time = 1 + costs.drafting + (costs.row / sequences + costs.row_each) * rows
            written = (sequences + float(used[kind_N, some_N].sum())) / time
            if written > best:
                most, best = cap, written
        self.refused = 0 if most else self.refused + 1
        return most


def _nearest(source_BL: Ints, slot_N: Ints, length_N: Ints, tokens_BL: Ints, known_N: Ints, tokens: int) -> Ints:
    """Return where in each slot's source its last `tokens` tokens end, before the source's last token; -1: nowhere. Of
    several places it takes the nearest to the slot's own length, which in its own context is the latest."""
    longest = int(length_N.max(initial=0))
    first = max(longest - WINDOW, 0)
    if longest - first < tokens + 1 or int(known_N.min()) < tokens:
        return np.full(len(slot_N), -1)
    rows = source_BL[slot_N, first:longest]
    place = np.arange(first + tokens - 1, longest)
    same = place < length_N[:, None] - 1
    for back in range(tokens):
        last_N = tokens_BL[slot_N, known_N - 1 - back]
        same &= rows[:, tokens - 1 - back : rows.shape[1] - back] == last_N[:, None]
    found = same.any(1)
    slot_N, at = np.full(len(slot_N), -1), np.flatnonzero(found)
    away = np.where(same[at], np.abs(place - known_N[at, None]), np.iinfo(np.int64).max)
    slot_N[at] = place[away.argmin(1)]
    return slot_N
