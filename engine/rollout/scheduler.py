"""Who may run: pure bookkeeping, no tensors.

Questions wait in order. A question's group is let in when its prompt and at least one of its samples fit; its other
samples follow as room appears. Room is promised by the worst case (a sample may grow to the whole context), so a
running sample is never evicted and its result never depends on who else is running. That wastes some memory; in
exchange there is nothing to preempt, recompute or deadlock.

Invariant: the blocks promised never exceed the pool, and no more than `max_running` samples run.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thresher.rewards.errors import UserError

if TYPE_CHECKING:
    from thresher.engine.rollout.kv_cache import BlockPool  # which loads torch; this file needs none


@dataclass(slots=True)
class Group:
    """The samples of one question, which share its prompt's blocks. Members are named by their index."""

    number: int
    prompt_tokens: int
    waiting: deque[int]
    running: set[int] = field(default_factory=set)
    started: bool = False

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running


class Scheduler:
    """Admission by promised blocks, first come first served."""

    def __init__(self, groups: list[Group], pool: "BlockPool", max_running: int, max_context: int) -> None:
        self._queue = deque(groups)
        self._pool = pool
        self._max_running = max_running
        self._max_context = max_context
        self.promised = 0
        self.running = 0
        for group in groups:
            if self._prompt_need(group) + self._member_need(group) > pool.num_blocks - 1:
                raise UserError(
                    f"the KV cache of {pool.num_blocks - 1} blocks is too small for a sample of {max_context} tokens; "
                    "raise rollout.max_running or lower rollout.max_context"
                )

    def _prompt_need(self, group: Group) -> int:
        return self._pool.blocks_for(group.prompt_tokens)

    def _member_need(self, group: Group) -> int:
        # Full prompt blocks are shared; the partly filled last one is copied at the first write.
        return self._pool.blocks_for(self._max_context) - group.prompt_tokens // self._pool.page_size

    def admit(self) -> list[tuple[Group, int]]:
        """The (group, member) pairs that start now. A group's prompt is to be prefilled with its first member."""
        admitted: list[tuple[Group, int]] = []
        while self._queue and self.running < self._max_running:
            group = self._queue[0]
            need = self._member_need(group) + (0 if group.started else self._prompt_need(group))
            if self.promised + need > self._pool.num_blocks - 1:
                break
            group.started = True
            member = group.waiting.popleft()
            group.running.add(member)
            self.promised += need
            self.running += 1
            admitted.append((group, member))
            if not group.waiting:
                self._queue.popleft()
        return admitted

    def finish(self, group: Group, member: int) -> bool:
        """A sample has ended and its blocks are back. True if it was its group's last: the prompt may go, too."""
        group.running.remove(member)
        self.running -= 1
        self.promised -= self._member_need(group)
        if group.done:
            self.promised -= self._prompt_need(group)
        return group.done

    @property
    def idle(self) -> bool:
        return not self._queue and self.running == 0
