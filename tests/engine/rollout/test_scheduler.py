"""The scheduler with a real block pool: its promises are kept, nobody overtakes, everybody finishes."""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.rollout.kv_cache import BlockPool, BlockTable
from thresher.engine.rollout.scheduler import Group, Scheduler
from thresher.rewards.errors import UserError


def make_groups(prompts: list[int], members: list[int]) -> list[Group]:
    return [
        Group(number, prompt, deque(range(count)))
        for number, (prompt, count) in enumerate(zip(prompts, members, strict=True))
    ]


class Simulation:
    """What the rollout does with the pool: a prompt per group, a fork per sample, growth up to the context."""

    def __init__(self, groups: list[Group], num_blocks: int, page_size: int, max_running: int, context: int) -> None:
        self.pool = BlockPool(num_blocks, page_size)
        self.scheduler = Scheduler(groups, self.pool, max_running, context)
        self.max_running, self.context = max_running, context
        self.prompts: dict[int, BlockTable] = {}
        self.samples: list[tuple[Group, int, BlockTable]] = []
        self.started: list[tuple[int, int]] = []

    def admit(self) -> None:
        for group, member in self.scheduler.admit():
            if group.number not in self.prompts:
                self.prompts[group.number] = BlockTable()
                self.pool.extend(self.prompts[group.number], group.prompt_tokens)
            self.samples.append((group, member, self.pool.fork(self.prompts[group.number])))
            self.started.append((group.number, member))

    def grow(self, rng: Random) -> None:
        """Some samples grow, some to the very end of the context; a promise broken here empties the pool."""
        for _, _, table in self.samples:
            room = self.context - table.length
            self.pool.extend(table, rng.choice((0, min(1, room), rng.randint(0, room), room)))

    def finish(self, rng: Random) -> None:
        for _ in range(rng.randint(1, len(self.samples))):
            group, member, table = self.samples.pop(rng.randrange(len(self.samples)))
            self.pool.release(table)
            last = self.scheduler.finish(group, member)
            assert last == group.done
            if last:
                self.pool.release(self.prompts.pop(group.number))
            self.check()

    def check(self) -> None:
        used = self.pool.num_blocks - 1 - self.pool.free
        assert used <= self.scheduler.promised <= self.pool.num_blocks - 1
        assert self.scheduler.running == len(self.samples) <= self.max_running


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.data())
def test_promises_are_kept_and_everybody_finishes_in_turn(data: st.DataObject) -> None:
    page = data.draw(st.integers(1, 6), label="page")
    context = data.draw(st.integers(2, 40), label="context")
    prompts = data.draw(st.lists(st.integers(1, context - 1), min_size=1, max_size=6), label="prompts")
    members = [data.draw(st.integers(1, 5)) for _ in prompts]
    # From the least that is not refused to plenty.
    least = max(-(-context // page) - prompt // page + -(-prompt // page) for prompt in prompts)
    blocks = 1 + least + data.draw(st.integers(0, 40), label="spare blocks")
    simulation = Simulation(
        make_groups(prompts, members), blocks, page, data.draw(st.integers(1, 8), label="running"), context
    )
    rng = Random(data.draw(st.integers(0, 999), label="seed"))
    rounds = 0
    while not simulation.scheduler.idle:
        rounds += 1
        simulation.admit()
        assert simulation.samples, "nobody runs and nobody may start"
        simulation.check()
        simulation.grow(rng)
        simulation.check()
        simulation.finish(rng)
    assert simulation.started == [(group, member) for group, count in enumerate(members) for member in range(count)]
    assert rounds <= sum(members)
    assert simulation.scheduler.promised == simulation.scheduler.running == 0
    assert simulation.pool.free == blocks - 1


def started(scheduler: Scheduler) -> list[tuple[int, int]]:
    return [(group.number, member) for group, member in scheduler.admit()]


def test_siblings_share_their_prompt() -> None:
    """Context 32, blocks of 8, a prompt of 20: 2 full blocks and 4 slots. The prompt takes 3 blocks; each sample, which
    shares the 2 full ones, may come to need 2 more."""
    pool = BlockPool(1 + 3 + 2 * 2, 8)
    scheduler = Scheduler(make_groups([20], [4]), pool, 10, 32)
    (group, _), (_, member) = scheduler.admit()
    assert scheduler.promised == 7 and member == 1 and scheduler.admit() == []
    assert not scheduler.finish(group, 0)
    assert started(scheduler) == [(0, 2)]
    assert not scheduler.finish(group, 1) and not scheduler.finish(group, 2)
    assert started(scheduler) == [(0, 3)]
    assert scheduler.finish(group, 3) and scheduler.promised == 0 and scheduler.idle


def test_the_first_in_line_is_not_overtaken() -> None:
    """The second question is longer than what is left; the third would fit, and still waits."""
    pool = BlockPool(1 + 8, 8)
    groups = make_groups([8, 16, 8], [1, 1, 1])
    scheduler = Scheduler(groups, pool, 10, 32)
    assert started(scheduler) == [(0, 0), (1, 0)]  # 1 + 3, then 2 + 2
    pool = BlockPool(1 + 7, 8)
    groups = make_groups([8, 16, 31], [1, 1, 1])
    scheduler = Scheduler(groups, pool, 10, 32)
    assert started(scheduler) == [(0, 0)] and started(scheduler) == []
    scheduler.finish(groups[0], 0)
    assert started(scheduler) == [(1, 0)]


def test_no_more_run_than_may() -> None:
    groups = make_groups([4, 4], [3, 3])
    scheduler = Scheduler(groups, BlockPool(500, 4), 4, 16)
    assert started(scheduler) == [(0, 0), (0, 1), (0, 2), (1, 0)] and started(scheduler) == []
    scheduler.finish(groups[0], 1)
    scheduler.finish(groups[1], 0)
    assert started(scheduler) == [(1, 1), (1, 2)]
    assert not scheduler.idle


def test_no_groups_are_idle() -> None:
    scheduler = Scheduler([], BlockPool(4, 4), 4, 16)
    assert scheduler.idle and scheduler.admit() == []


def test_a_pool_that_could_never_hold_a_sample_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"KV cache of 4 blocks is too small for a sample of 32 tokens"):
        Scheduler(make_groups([5], [1]), BlockPool(1 + 4, 8), 1, 32)
    Scheduler(make_groups([5], [1]), BlockPool(1 + 5, 8), 1, 32)
