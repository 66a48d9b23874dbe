"""Groups that span several steps (rollout.partial): which begin, which enter a step, and what a checkpoint stores.

The groups of a run form one queue, in the order of their numbers. Their questions and seeds are the same as without
rollout.partial. A step takes the next groups in that order, and ends once they are complete. Meanwhile
`groups_in_flight` groups, including those, are being sampled, so that free slots are used. Unfinished groups continue
in the next step, with its weights, from where they stopped.

    step 1    [0 1 2 3] 4 5 6 7          in flight 8, a step takes 4
    step 2              [4 5 6 7] 8 9 10 11

A group therefore enters the step in which it would have been sampled otherwise, however long it takes, so no length is
favoured. Its first token is at most in_flight / questions_per_step - 1 updates old, rounded up, which is at most
`max_staleness`. Which weights sample a token depends on counts of decode steps; if a server or a tool answers, also on
the time of its answer.

With run.async (asynchronous.py) a step's groups are complete one step before they are trained, and a checkpoint
contains them. Without rollout.partial no other groups are being sampled: in_flight is questions_per_step.

With grpo.refill a group is scored once it is complete. A group without a signal is set aside, the group with the next
number takes its place in the step, and another group begins at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.records import read_records, write_records
from thresher.engine.rollout.rollout import Group, Reply, RolloutClock, Written
from thresher.engine.scoring.score import Scored
from thresher.retrieval.passages import Passage
from thresher.retrieval.retriever import Hit

FILE = "unfinished.jsonl"  # name in a checkpoint
LEARN_NOTHING = "continue from another checkpoint with --resume --resume-from STEP"


@dataclass(slots=True)
class Queue:
    """Groups that have begun and that no step has taken, by number. next: the lowest number that no step has taken.
    scored: the scored ones of these groups. counted: counts of the groups that the next step takes, if these are
    complete (run.async)."""

    next: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    scored: dict[int, list[Scored]] = field(default_factory=dict)
    counted: "Counted | None" = None

    def copied(self) -> "Queue":
        """Return a copy that can be continued without changing this queue."""
        groups = {number: _copied(group) for number, group in self.groups.items()}
        return Queue(self.next, groups, dict(self.scored))

    def records(self) -> list[dict[str, Any]]:
        """Return the queue as JSON records: first `next` and the counts, then the groups in order."""
        head: dict[str, Any] = {"next": self.next}
        if self.counted is not None:
            head["counted"] = asdict(self.counted)
        return [head] + [
            {
                "group": number,
                "question": group.question.id,
                "version": group.version,
                "log": [[key, *_packed(reply)] for key, reply in group.log],
                "drawn": {key: _packed(drawn)[1] for key, drawn in group.drawn.items()},
            }
            for number, group in sorted(self.groups.items())
        ]


@dataclass(slots=True)
class Counted:
    """Counts of the rollout that completed a step's groups, which a replay of their logs does not give.

    gap, gap_largest: sum and largest of |log-prob at sampling - log-prob by the update's forward| over `gap_tokens`
    tokens, with the weights that sampled them.
    """

    clock: RolloutClock
    cut_passages: int
    gap_tokens: int = 0
    gap: float = 0.0
    gap_largest: float = 0.0


class Taking:
    """The groups that a step takes from the queue, as they become complete.

    count: number of groups to take. in_flight: number of groups being sampled. most: number of groups to look at,
    including those set aside. last: number of all groups; None: unlimited.
    """

    def __init__(self, queue: Queue, count: int, in_flight: int, most: int, last: int | None = None) -> None:
        self.queue, self.count, self.in_flight, self.most, self.last = queue, count, in_flight, most, last
        self.following = max(queue.groups, default=queue.next - 1) + 1  # the number of the next group to begin
        self.without_signal: set[int] = set()

    def looked_at(self) -> list[int]:
        """Return the numbers of the complete groups before the first incomplete one, up to the step's limit."""
        found: list[int] = []
        with_signal = 0
        for number in range(self.queue.next, self.following):
            group = self.queue.groups[number]
            if group.trajectories is None or with_signal == self.count or len(found) == self.most:
                break
            found.append(number)
            with_signal += number not in self.without_signal
        return found

    def over(self) -> bool:
        """Return whether the step has its groups."""
        found = self.looked_at()
        return len(found) == self.most or len(set(found) - self.without_signal) == self.count

    def due(self) -> range:
        """Return the numbers of the groups to begin now, and count them as begun."""
        # A step looks at `most` groups; groups after these would be older than others when a step takes them.
        ahead = max(self.in_flight, min(self.in_flight + len(self.without_signal), self.most))
        stop = self.queue.next + ahead
        numbers = range(self.following, max(stop if self.last is None else min(stop, self.last), self.following))
        self.following = numbers.stop
        return numbers

    def take(self) -> tuple[dict[int, Group], list[Group]]:
        """Take the step's groups from the queue, in order; return them and the groups that are set aside. If too few
        have a signal, groups without one are taken in place of the missing ones."""
        found = self.looked_at()
        chosen = [number for number in found if number not in self.without_signal]
        spare = [number for number in found if number in self.without_signal]
        chosen = sorted(chosen + spare[: self.count - len(chosen)])
        looked_at = {number: self.queue.groups.pop(number) for number in found}
        self.queue.next = found[-1] + 1
        return {number: looked_at.pop(number) for number in chosen}, list(looked_at.values())


def _copied(group: Group) -> Group:
    return replace(group, log=list(group.log), drawn=dict(group.drawn))


# --- Queues in a checkpoint


@dataclass(frozen=True, slots=True)
class SavedQueues:
    """The queues of all ranks, for a checkpoint: by rank, the result of `Queue.records`."""

    ranks: Sequence[list[dict[str, Any]]]

    def save(self, path: Path) -> None:
        write_records(path / FILE, self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        for rank, records in enumerate(self.ranks):
            yield from ({"rank": rank, **record} for record in records)


def read_queue(path: Path, rank: int, ranks: int) -> tuple[Queue, dict[int, Mapping[str, Any]]]:
    """Read a rank's queue, without its groups, and the groups' records by number from a checkpoint's folder. UserError
    if the file is absent, or was saved by another number of ranks."""
    file = path / FILE
    if not file.is_file():
        raise UserError(
            f"{file}: no such file, but a run with rollout.partial or run.async keeps its groups there; {LEARN_NOTHING}"
        )
    queues: dict[int, Queue] = {}
    groups: dict[int, Mapping[str, Any]] = {}
    for number, record in read_records(file):
        try:
            if "next" in record:
                counted = record.get("counted")
                if counted is not None:
                    counted = Counted(**{**counted, "clock": RolloutClock(**counted["clock"])})
                queues[int(record["rank"])] = Queue(int(record["next"]), counted=counted)
            elif record["rank"] == rank:
                groups[int(record["group"])] = {**record, "where": f"{file}:{number}"}
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{file}:{number}: expected a group of the run; {LEARN_NOTHING}") from None
    if len(queues) != ranks:
        raise UserError(
            f"{file}: was saved by {len(queues)} ranks, and now there are {ranks}; with rollout.partial or run.async, "
            "resume a run with the same number"
        )
    return queues[rank], groups


def restore(group: Group, record: Mapping[str, Any]) -> Group:
    """Restore a group's log from its record in a checkpoint. Playing the log brings the group to where it was, a
    complete one to its end."""
    if record.get("question") != group.question.id:
        raise UserError(
            f"{record['where']}: expected a group of question {group.question.id}, found {record.get('question')}; "
            "resume with the data.train that the run began with"
        )
    try:
        group.log = [(str(key), _unpacked(kind, value)) for key, kind, value in record["log"]]
        group.drawn = {str(key): _written(value) for key, value in record["drawn"].items()}
        group.version = int(record["version"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{record['where']}: expected the log of a group; {LEARN_NOTHING}") from None
    return group


def _packed(reply: Reply) -> tuple[str, Any]:
    if isinstance(reply, Written):
        runs = [list(run) for run in reply.versions]
        values = {"ids": reply.ids, "logprobs": list(reply.logprobs), "stop": reply.stop, "full": reply.full}
        return "written", values | {"trailing": reply.trailing.hex(), "versions": runs}
    if isinstance(reply, list):
        passages = [(hit.row, hit.score, hit.passage) for hit in reply]
        return "found", [[row, score, one.id, one.title, one.text] for row, score, one in passages]
    return "tool", reply


def _unpacked(kind: str, value: Any) -> Reply:
    if kind == "written":
        return _written(value)
    if kind == "found":
        return [Hit(row, Passage(*passage), score) for row, score, *passage in value]
    if not isinstance(value["text"], str) or not isinstance(value["error"], bool):
        raise TypeError
    return dict(value)


def _written(value: Mapping[str, Any]) -> Written:
    return Written(
        list(value["ids"]),
        list(value["logprobs"]),
        value["stop"],
        bytes.fromhex(value["trailing"]),
        value["full"],
        [(version, count) for version, count in value["versions"]],
    )
