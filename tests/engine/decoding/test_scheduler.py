"""The scheduler with a real block pool: oldest first, no starvation, no sequence computes what another is about to."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.decoding.blocks import BlockPool
from thresher.engine.decoding.scheduler import SamplingParams, Scheduler, SharedPrompt, TokenSequence


class Simulation:
    """The decoder's use of scheduler and pool, without a model. In every step each running sequence is fed up to `rows`
    tokens, and one that has been fed completely writes one more."""

    def __init__(self, pool: BlockPool, max_running: int, reuse: bool = True, rows: int = 100) -> None:
        self.pool, self.rows = pool, rows
        self.scheduler = Scheduler(pool, max_running, reuse)
        self.blocks: dict[TokenSequence, list[int]] = {}
        self.cached: dict[TokenSequence, int] = {}
        self.admitted: list[TokenSequence] = []
        self.preempted: list[TokenSequence] = []
        self.computed = 0

    def submit(self, ids: list[int], room: int, prompt: SharedPrompt | None = None) -> TokenSequence:
        sequence = TokenSequence(prompt or SharedPrompt(ids), 0, SamplingParams())
        sequence.writing, sequence.room = True, room
        self.scheduler.submit(sequence)
        return sequence

    def admit(self) -> list[TokenSequence]:
        new = []
        for admitted in self.scheduler.admit():
            sequence = admitted.sequence
            assert sequence not in self.blocks and len(admitted.blocks) == self.pool.blocks_for(len(sequence.ids))
            self.blocks[sequence], self.cached[sequence] = admitted.blocks, admitted.cached
            if not sequence.begun:
                sequence.begun, sequence.prompt.waiting = True, sequence.prompt.waiting - 1
            new.append(sequence)
        self.admitted += new
        return new

    def leave(self, sequence: TokenSequence) -> None:
        self.scheduler.leave(sequence, self.cached.pop(sequence), self.blocks.pop(sequence), keep=False)

    def release(self, sequence: TokenSequence) -> None:
        self.scheduler.running.remove(sequence)
        self.leave(sequence)

    def step(self) -> list[TokenSequence]:
        """Take a step; return the sequences that have used up their room. They keep running."""
        self.admit()
        while self.wanted() > self.pool.num_free:
            oldest = self.scheduler.running[0]
            sequence = self.scheduler.preempt()
            assert sequence is not oldest, "the oldest can always go on"
            self.leave(sequence)
            self.preempted.append(sequence)
        over = []
        for sequence in self.scheduler.running:
            fed = min(self.rows, len(sequence.ids) - self.cached[sequence])
            self.cached[sequence] += fed
            self.computed += fed
            blocks = self.blocks[sequence]
            blocks += self.pool.allocate(max(self.pool.blocks_for(self.cached[sequence]) - len(blocks), 0)).tolist()
            if self.cached[sequence] >= len(sequence.prompt.ids):
                sequence.prompt.filling = False
            if self.cached[sequence] == len(sequence.ids):
                if self.scheduler.reuse and sequence.prompt.waiting and len(sequence.ids) == len(sequence.prompt.ids):
                    sequence.prompt.hidden_H = "computed"  # type: ignore[assignment]
                self.scheduler.mark_computed(sequence, self.cached[sequence])
                if sequence.writing:
                    sequence.ids.append(7)
                    sequence.room -= 1
                    if not sequence.room:
                        sequence.writing = False
                        over.append(sequence)
        return over

    def wanted(self) -> int:
        return sum(
            max(self.pool.blocks_for(min(self.cached[one] + self.rows, len(one.ids))) - len(self.blocks[one]), 0)
            for one in self.scheduler.running
        )

    def check(self) -> None:
        ages = [[one.number for one in line] for line in (self.scheduler.running, self.scheduler.waiting)]
        assert all(numbers == sorted(numbers) for numbers in ages)
        assert len(self.scheduler.running) <= self.scheduler.max_running
        assert set(self.scheduler.running) == set(self.blocks) and not set(self.blocks) & set(self.scheduler.waiting)
        owned = {block for blocks in self.blocks.values() for block in blocks}
        assert self.pool.num_free + len(owned) == self.pool.num_blocks - 1


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.data())
def test_everybody_comes_to_an_end_and_in_time(data: st.DataObject) -> None:
    """The pool ranges from enough for the longest sequence alone to plenty; requests come at any time, some alike."""
    page, rows = data.draw(st.integers(1, 5), label="page"), data.draw(st.integers(1, 20), label="rows")
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=9))
    longest = max(prompt + room for prompt, room in lengths)
    pool = BlockPool(1 + -(-longest // page) + data.draw(st.integers(0, 25), label="spare blocks"), page)
    simulation = Simulation(pool, data.draw(st.integers(1, 6), label="running"), data.draw(st.booleans()), rows)
    rng = Random(data.draw(st.integers(0, 999), label="seed"))
    coming = [([rng.choice((1, 1, 1, 2)) for _ in range(prompt)], room) for prompt, room in lengths]
    unfinished: list[TokenSequence] = []
    # The oldest is never preempted, so each sequence takes at most its own steps once it is the oldest.
    steps = sum(-(-prompt // rows) + 1 + room for prompt, room in lengths) + len(lengths)
    while coming or unfinished:
        if coming and (not unfinished or rng.random() < 0.5):
            unfinished.append(simulation.submit(*coming.pop(0)))
        for sequence in simulation.step():
            simulation.release(sequence)
            unfinished.remove(sequence)
        simulation.check()
        steps -= 1
        assert steps >= 0, "somebody starves"
    assert pool.num_free == pool.num_blocks - 1 and not simulation.scheduler.waiting


def test_the_first_in_line_is_not_overtaken_for_want_of_room() -> None:
    """A sequence needs its blocks, plus one for every running sequence. The short one after it would fit, but waits. A
    lone sequence needs only its own blocks."""
    lone = Simulation(BlockPool(1 + 4, 4), 10)
    assert [lone.submit([1] * 16, 1)] == lone.admit()
    simulation = Simulation(BlockPool(1 + 8, 4), 10)
    first, long, _ = (simulation.submit([n] * length, 5) for n, length in enumerate((16, 16, 4)))
    assert simulation.admit() == [first] and simulation.pool.num_free == 4
    simulation.release(first)
    assert simulation.admit()[0] is long


def test_what_is_shared_takes_no_room_but_idle_blocks_that_are_shared_do() -> None:
    simulation = Simulation(BlockPool(1 + 5, 4), 10)
    first = simulation.submit([1] * 16, 1)
    simulation.step()
    second = simulation.submit([1] * 17, 5)
    assert simulation.admit() == [], "it shares 4 blocks, takes the fifth, and none is left for the first"
    simulation.release(first)
    assert simulation.admit() == [second] and simulation.pool.num_free == 0
    simulation = Simulation(BlockPool(1 + 6, 4), 10)
    first = simulation.submit([1] * 16, 1)
    simulation.step()
    simulation.release(first)
    other = simulation.submit([2] * 4, 9)
    assert simulation.admit() == [other] and simulation.pool.num_free == 5
    simulation.submit([1] * 17, 5)
    assert simulation.admit() == [], "4 shared, one taken and none for the other"


def test_a_prompt_that_another_is_computing_is_waited_for() -> None:
    """A sequence with another prefix is admitted meanwhile."""
    simulation = Simulation(BlockPool(100, 4), 10, rows=6)
    prompt = SharedPrompt([1] * 16)
    siblings = [simulation.submit([], 5, prompt) for _ in range(3)]
    longer, other = simulation.submit([1] * 20, 5), simulation.submit([2] * 4, 5)
    assert simulation.admit() == [siblings[0], other]
    assert simulation.scheduler.waiting == [*siblings[1:], longer], "those that were passed over stay where they were"
    simulation.step()
    simulation.step()
    assert simulation.scheduler.running == [siblings[0], other]
    simulation.step()
    computed = simulation.computed
    assert simulation.admit() == [*siblings[1:], longer]
    first, *others = (set(simulation.blocks[one]) for one in (*siblings, longer))
    assert all(first <= blocks for blocks in others) and simulation.cached[longer] == 16
    simulation.step()
    assert simulation.computed == computed + len([siblings[0], other]) + 4, "of the siblings nothing"


def test_a_whole_prompt_is_taken_over_only_with_its_hidden_state() -> None:
    """The first token is drawn from that state; without it, the prompt's last token is computed again."""
    simulation = Simulation(BlockPool(100, 4), 10)
    prompt = SharedPrompt([1] * 8)
    simulation.submit([], 5, prompt)
    simulation.step()
    second = simulation.submit([], 5, prompt)
    simulation.admit()
    assert simulation.cached[second] == 7, "nobody was waiting when the first one had it"
    third = simulation.submit([], 5, prompt)
    assert simulation.admit() == []
    simulation.step()
    assert simulation.admit() == [third] and simulation.cached[third] == 8
    simulation.submit([*prompt.ids, 7, 7], 5)
    simulation.step()
    third.ids[8:] = [7]
    simulation.release(third)
    simulation.scheduler.submit(third)
    simulation.admit()
    assert simulation.cached[third] == 8, "of nine, which are known as well"
