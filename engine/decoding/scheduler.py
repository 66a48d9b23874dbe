"""Who runs: admission and preemption. Pure bookkeeping, no tensors.

Sequences wait in the order in which they were handed in. One is let in when a lane is free and the pool has room for
what it holds so far; then it grows. When the pool is full, the youngest of all that run waits again: its tokens are
kept, its blocks given up (their content may still be found when it comes back), and nothing of its result changes.
Of the sequences that run the oldest can always go on, for the pool holds the longest that was accepted; so there is no
deadlock, and every sequence comes to its end.

A sequence whose beginning another is about to compute is passed over until that has been done.
"""

import bisect
from collections.abc import Iterator
from operator import attrgetter

from thresher.engine.decoding.cache.blocks import BlockPool, Prefix
from thresher.engine.decoding.sequences import TokenSequence


class Scheduler:
    """Admission, oldest first. `reuse` off: nothing that another sequence computed is used."""

    def __init__(self, pool: BlockPool, max_running: int, reuse: bool = True) -> None:
        self.pool, self.max_running, self.reuse = pool, max_running, reuse
        self.running: list[TokenSequence] = []  # by age
        self.waiting: list[TokenSequence] = []  # by age
        self.preemptions = 0
        self._number = 0

    def submit(self, sequence: TokenSequence) -> None:
        """A new sequence, or one that has something to do again after it was preempted while it had nothing."""
        if sequence.number < 0:
            sequence.number = self._number
            sequence.prompt.waiting += 1
            self._number += 1
        bisect.insort(self.waiting, sequence, key=attrgetter("number"))

    def admit(self) -> Iterator[tuple[TokenSequence, Prefix, int]]:
        """Sequences that begin now, each with what is known of it and how many blocks it is to take. The caller takes
        them before it asks for the next."""
        passed: list[TokenSequence] = []
        while self.waiting and len(self.running) < self.max_running and len(passed) < self.max_running:
            sequence = self.waiting[0]
            if sequence.prompt.filling:
                passed.append(self.waiting.pop(0))
                continue
            prefix = self._prefix(sequence)
            blocks = self.pool.blocks_for(len(sequence.ids)) - len(prefix.blocks)
            if prefix.wait:
                passed.append(self.waiting.pop(0))
                continue
            # A block for each that may need one soon, or the next step would have to send one of them back.
            growing = sum(one.grows for one in self.running)
            idle = int((self.pool.owners_P[prefix.blocks] == 0).sum())
            if self.running and self.pool.free - idle < blocks + growing:
                break
            held = self.pool.blocks_for(len(sequence.ids))
            sequence.grows = sequence.most is None or self.pool.blocks_for(sequence.most) > held
            self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=attrgetter("number"))
            yield sequence, prefix, blocks
        self.waiting[:0] = passed

    def _prefix(self, sequence: TokenSequence) -> Prefix:
        if not self.reuse:
            return Prefix([], self.pool.root)
        # All of it is of use only where the last token's hidden state is known as well.
        whole = sequence.prompt.hidden_H is not None and len(sequence.ids) == len(sequence.prompt.ids)
        return self.pool.match(sequence.ids, len(sequence.ids) - (0 if whole else 1))

    def preempt(self) -> TokenSequence:
        """The youngest, which gives its blocks up; it waits again if it has something to write."""
        sequence = self.running.pop()
        self.preemptions += 1
        if sequence.writing:
            self.submit(sequence)
        return sequence
