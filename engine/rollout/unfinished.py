"""Play groups on that outlive a rollout, for rollout.partial.

What an unfinished group keeps is its log: all that was written, found and returned for it, and what had been drawn of
the turns that were under way. The next rollout plays the group from its beginning and takes each answer from the log
until there is none; what has been drawn is prefilled again, under the new weights. A killed run goes on in the same
way, from the logs of its checkpoint, and so with the same bits.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from thresher.engine.decoding.scheduler import SamplingParams
from thresher.engine.rollout.rollout import DecoderWriter, Group, Play, Rollout, RolloutClock, Sample, Written
from thresher.engine.rollout.trees import TreeShape


def play_on(
    rollout: Rollout,
    groups: Sequence[Group],
    temperature: float,
    version: int,
    more: Callable[[list[Group]], Sequence[Group] | None],
    shape: TreeShape | None = None,
    keep: bool = False,
) -> None:
    """Play unfinished groups on, and new ones, until `more` returns None; they keep what they have come to.

    version: of the weights, which every token drawn now tells (`Segment.versions`). more: is called at each step with
    the groups that are complete since its last call, and returns those to begin. shape: of the trees of each group.
    keep: leave keys and values to the next call, which uses them if nothing was decoded in between and `rollout.kept`
    still is the pool.
    """
    clock, decoder = RolloutClock(), rollout.decoder
    rollout.clock, started = clock, time.perf_counter()
    decoder.begin(rollout.limits.max_context, clock, rollout.kept if rollout.kept is decoder.pool else None)
    with ExitStack() as stack:
        writer = LastingWriter(decoder, SamplingParams(temperature=temperature), {}, version)
        play = LastingPlay(rollout, writer, stack, shape)
        for group in groups:
            play.go_on(group)
        ended, begun = 0, sum(len(group.jobs) for group in groups)
        while (new := more(play.take_complete())) is not None:
            play.begin_groups(new)
            begun += sum(len(group.jobs) for group in new)
            ended += len(play.take_ended())
            rollout.under_way = (ended, begun)
            play.step()
        play.interrupt()
    rollout.under_way = None
    rollout.kept = decoder.pool if keep else None
    decoder.end(keep)
    clock.total = time.perf_counter() - started


class LastingWriter(DecoderWriter):
    """A DecoderWriter that takes what an earlier rollout wrote, and leaves what a later one is to finish."""

    def supply(self, sample: Sample, written: Written) -> None:
        """Take a turn that an earlier rollout wrote, or what it scored, in place of writing it."""
        sequence = self.begun.pop(sample).sequence
        sequence.ids.extend(written.ids)
        sequence.carried = len(sequence.ids) - 1  # the last was drawn, and not fed

    def supply_beginning(self, sample: Sample, drawn: Written) -> None:
        """Take what an earlier rollout drew of the turn that has been begun."""
        turn = self.begun[sample]
        turn.sequence.carried = len(turn.sequence.ids) + len(drawn.ids) - 1
        self.begun[sample] = turn._replace(drawn=drawn)

    def interrupt(self) -> list[tuple[Sample, Written]]:
        """Stop writing; return the turns that have ended since the last step. `unfinished` has the others."""
        return self._ended_turns(self.decoder.interrupt())

    def unfinished(self) -> list[tuple[Sample, Written]]:
        """Return what has been drawn of each turn that was interrupted. What was scored of a text is dropped: it is
        scored by one version of the weights."""
        found = [
            (sample, self._written(sequence, drawn))
            for sequence, (sample, drawn) in self.writing.items()
            if not sequence.scored_from
        ]
        found += [(sample, turn.drawn) for sample, turn in self.begun.items()]
        return [(sample, drawn) for sample, drawn in found if drawn.ids]


class LastingPlay(Play):
    """A Play of groups that may have begun in an earlier rollout, and may end in a later one."""

    writer: LastingWriter

    def go_on(self, group: Group) -> None:
        """Play an unfinished group to where it was, by its log."""
        log, drawn = group.log, group.drawn
        group.log, group.drawn, group.samples, group.branches, group.playing = [], {}, {}, [], 0
        self.replaying, self.clock = True, RolloutClock()  # what is played again does not count again
        self.begin_groups([group])
        for key, answer in log:
            sample = group.samples[key]
            if isinstance(answer, Written):
                self.writer.supply(sample, answer)
                self.serve_written([(sample, answer)])
            elif isinstance(answer, list):
                self.serve([(sample, self.note_found(sample, self.queries.pop(key), answer))])
            else:
                self.serve([(sample, self.note_tool(sample, answer))])
        self.replaying, self.clock = False, self.runner.clock
        for key, beginning in drawn.items():
            self.writer.supply_beginning(group.samples[key], beginning)

    def interrupt(self) -> None:
        """Stop writing, and leave each group with its log. Searches and calls of tools are waited for."""
        self.serve_written(self.writer.interrupt())
        while self.asked or self.search is not None or self.runner.tools.waiting:
            self.search_beside(wait=True)
            if self.runner.tools.waiting:
                self.serve(self.tool_results(wait=True))
        for sample, beginning in self.writer.unfinished():
            sample.group.drawn[sample.key] = beginning
