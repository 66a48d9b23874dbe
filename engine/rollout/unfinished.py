"""Continue groups that outlive a rollout, for rollout.partial.

An unfinished group keeps its log, which holds all turns, search hits and results for it, and the tokens drawn so far of
turns in progress. The next rollout plays the group from its beginning and takes each reply from the log while there
are any; the tokens drawn so far are prefilled again, under the new weights. A killed run continues in the same way from
the logs of its checkpoint, and therefore with the same bits.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.records import read_records
from thresher.engine.decoding.scheduler import SamplingParams, TokenSequence
from thresher.engine.rollout.rollout import (
    DecoderWriter,
    Group,
    Play,
    QueuedTurn,
    Reply,
    Rollout,
    RolloutClock,
    Sample,
    Written,
)
from thresher.engine.rollout.trees import TreeShape
from thresher.engine.store.run_folder import TRAJECTORY, check_shape, step_of

OF_THE_SAME = "name a run of the same recipe with rollout.partial and run.keep_trajectories = 1"


def play_on(
    rollout: Rollout,
    groups: Sequence[Group],
    temperature: float,
    version: int,
    more: Callable[[list[Group]], Sequence[Group] | None],
    shape: TreeShape | None = None,
    keep: bool = False,
    recorded: "RecordedDraws | None" = None,
) -> None:
    """Play unfinished groups and new ones until `more` returns None; groups keep their progress.

    version: version of the weights, recorded for every token drawn now (`Segment.versions`). more: called at each step
    with the groups completed since its last call; it returns the groups to begin. shape: shape of the trees of each
    group. keep: leave keys and values to the next call, which uses them if nothing was decoded in between and
    `rollout.kept` still is the pool. recorded: makes each sample draw as many tokens as in another run, however long a
    server or a tool takes; the rollout then lasts until they have.
    """
    clock, decoder = RolloutClock(), rollout.decoder
    rollout.clock, started = clock, time.perf_counter()
    decoder.begin(rollout.limits.max_context, clock, rollout.kept if rollout.kept is decoder.pool else None)
    with ExitStack() as stack:
        draw = SamplingParams(temperature=temperature)
        writer = LastingWriter(decoder, draw, {}, version)
        if recorded is not None:
            writer = ReplayingWriter(decoder, draw, {}, version, recorded=recorded)
        play = LastingPlay(rollout, writer, stack, shape)
        for group in groups:
            play.go_on(group)
        ended, begun = 0, sum(len(group.jobs) for group in groups)
        while (new := more(play.take_complete())) is not None or (recorded is not None and play.active):
            play.begin_groups(new or ())
            if recorded is not None and not play.active:
                raise UserError(f"--replay {recorded.run}: its trajectories are not those of this run; {OF_THE_SAME}")
            begun += sum(len(group.jobs) for group in new or ())
            ended += len(play.take_ended())
            rollout.under_way = (ended, begun)
            play.step()
        play.interrupt()
    rollout.under_way = None
    rollout.kept = decoder.pool if keep else None
    decoder.end(keep)
    clock.total = time.perf_counter() - started


class LastingWriter(DecoderWriter):
    """DecoderWriter that accepts turns from an earlier rollout, and leaves unfinished turns to a later one."""

    def supply(self, sample: Sample, written: Written) -> None:
        """Accept a turn or scores from an earlier rollout instead of computing them."""
        sequence = self.queued.pop(sample).sequence
        sequence.ids.extend(written.ids)
        sequence.carried = len(sequence.ids) - 1  # the last one was drawn and not fed

    def supply_beginning(self, sample: Sample, drawn: Written) -> None:
        """Accept the tokens that an earlier rollout drew of the turn that has begun."""
        turn = self.queued[sample]
        turn.sequence.carried = len(turn.sequence.ids) + len(drawn.ids) - 1
        self.queued[sample] = turn._replace(drawn=drawn)

    def interrupt(self) -> list[tuple[Sample, Written]]:
        """Stop writing; return the turns that have ended since the last step. `unfinished` returns the others."""
        return self._ended_turns(self.decoder.interrupt())

    def unfinished(self) -> list[tuple[Sample, Written]]:
        """Return the tokens drawn so far of each interrupted turn. Scores of an unfinished text are dropped, because
        one version of the weights scores a text."""
        found = [
            (sample, self._written(sequence, drawn))
            for sequence, (sample, drawn) in self.writing.items()
            if not sequence.scored_from
        ]
        found += [(sample, turn.drawn) for sample, turn in self.queued.items()]
        return [(sample, drawn) for sample, drawn in found if drawn.ids]


class ReplayingWriter(LastingWriter):
    """LastingWriter under which each sample draws as many tokens as in another run. held: turns of samples that have
    drawn all of these."""

    def __init__(self, *setting: Any, recorded: "RecordedDraws") -> None:
        super().__init__(*setting)
        self.recorded = recorded
        self.held: dict[Sample, QueuedTurn] = {}
        self.cut: dict[Sample, QueuedTurn] = {}  # turns whose room was reduced, as they were before
        self.drawn: Counter[Sample] = Counter()

    def unfinished(self) -> list[tuple[Sample, Written]]:
        self.queued |= self.held
        return super().unfinished()

    def _submit_turns(self) -> None:
        assert self.version is not None
        for sample, turn in list(self.queued.items()):
            left = self.recorded.count(sample, self.version) - self.drawn[sample]
            if turn.sequence.scored_from or turn.room - len(turn.drawn.ids) <= left:
                continue
            if left:
                self.cut[sample], self.queued[sample] = turn, turn._replace(room=len(turn.drawn.ids) + left)
            else:
                self.held[sample] = self.queued.pop(sample)
        super()._submit_turns()

    def _ended_turns(self, sequences: Sequence[TokenSequence]) -> list[tuple[Sample, Written]]:
        before = {self.writing[sequence][0]: len(self.writing[sequence][1].ids) for sequence in sequences}
        ended = super()._ended_turns(sequences)
        for sample, written in ended:
            self.drawn[sample] += len(written.ids) - before[sample]
        for sample, written in ended:
            if (turn := self.cut.pop(sample, None)) is not None and written.full:
                self.held[sample] = turn._replace(drawn=replace(written, full=False))
        return [(sample, written) for sample, written in ended if sample not in self.held]


class RecordedDraws:
    """Number of tokens that each sample of a stored run drew under each version of the weights.

    run: folder of the run, with the trajectories of all `steps`. UserError if they record no versions.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self._counts: Counter[tuple[int, int, str, int]] = Counter()  # by step, group, key and version
        files = sorted((self.run / "trajectories").glob("step_*.jsonl"))
        by_step = {step: file for file in files if (step := step_of(file.stem)) is not None}
        self.steps = max(by_step, default=1)
        if missing := [step for step in range(1, self.steps + 1) if step not in by_step]:
            raise UserError(f"--replay {run}: it has no trajectories of step {missing[0]}; {OF_THE_SAME}")
        for step, file in by_step.items():
            for number, record in read_records(file):
                check_shape(record, TRAJECTORY, f"{file}:{number}")
                self._add(step, record, f"{file}:{number}")

    def count(self, sample: Sample, version: int) -> int:
        """Return the number of tokens that a sample draws under these weights; 0 for one that the run does not have."""
        return self._counts[sample.group.step or 0, sample.job.group, sample.key, version]

    def _add(self, step: int, record: Mapping[str, Any], where: str) -> None:
        if record.get("scores"):
            raise UserError(f"{where}: --replay: a text was scored, but the weights that scored it are not stored")
        key, inherited = str(record.get("sample", 0)), (record.get("forked") or (0, 0))[1]
        turns = [segment for segment in record["segments"] if segment["source"] == "policy"][inherited:]
        parts = {key: turns} | {f"{key}/{name}": part for name, part in (record.get("branches") or {}).items()}
        for name, segments in parts.items():
            for segment in (one for one in segments if one["source"] == "policy" and one.get("ids")):
                try:
                    for version, count in segment["versions"]:
                        self._counts[step, record.get("group", 0), name, version] += count
                except (KeyError, TypeError, ValueError):
                    raise UserError(f"{where}: a turn has no versions of the weights; {OF_THE_SAME}") from None


class LastingPlay(Play):
    """A Play of groups that may have begun in an earlier rollout, and may end in a later one."""

    writer: LastingWriter

    def __init__(self, *setting: Any) -> None:
        super().__init__(*setting)
        self.complete: list[Group] = []  # since the last `take_complete`

    def log_reply(self, sample: Sample, reply: Reply) -> None:
        sample.group.log.append((sample.key, reply))

    def end_group(self, group: Group) -> None:
        self.complete.append(group)

    def take_complete(self) -> list[Group]:
        """Return the groups whose samples have all ended since the last call."""
        complete, self.complete = self.complete, []
        return complete

    def go_on(self, group: Group) -> None:
        """Bring an unfinished group to its last state by its log. UserError if the episode makes another request."""
        log, drawn = group.log, group.drawn
        group.log, group.drawn, group.samples, group.branches, group.playing = [], {}, {}, [], 0
        self.replaying, self.clock = True, RolloutClock()  # replayed work does not count again
        self.begin_groups([group])
        for key, reply in log:
            sample = self._waiting(group, key, reply)
            if isinstance(reply, Written):
                self.writer.supply(sample, reply)
                self.serve_written([(sample, reply)])
            elif isinstance(reply, list):
                self.serve([(sample, self.note_found(sample, self.queries.pop(key), reply))])
            else:
                self.serve([(sample, self.note_tool(sample, reply))])
        self.replaying, self.clock = False, self.runner.clock
        for key, beginning in drawn.items():
            self.writer.supply_beginning(self._waiting(group, key, beginning), beginning)

    def _waiting(self, group: Group, key: str, reply: Reply) -> Sample:
        """Return the sample that waits for a reply of this kind. UserError if there is none."""
        sample = group.samples.get(key)
        if sample is not None and not sample.trajectory.reason:
            turn, searches = self.writer.queued.get(sample), key in self.queries
            if isinstance(reply, Written):
                fits = turn is not None and bool(turn.sequence.scored_from) is not bool(reply.ids)
            else:
                fits = turn is None and searches is isinstance(reply, list)
            if fits:
                return sample
        raise UserError(
            f"{self.runner.system.name}: question {group.question.id}: the episode requested something else when it "
            "was sent the same again, so what an earlier rollout began cannot continue; make it a function of what it "
            "is sent, or set rollout.partial = false (a changed unfinished.jsonl of a checkpoint causes this, too)"
        )

    def interrupt(self) -> None:
        """Stop writing, and leave each group with its log, after waiting for running searches and calls of tools."""
        self.serve_written(self.writer.interrupt())
        while self.asked or self.search is not None or self.runner.tools.waiting:
            self.search_beside(wait=True)
            if self.runner.tools.waiting:
                self.serve(self.tool_results(wait=True))
        for sample, beginning in self.writer.unfinished():
            sample.group.drawn[sample.key] = beginning
