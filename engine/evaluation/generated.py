"""What an evaluation has generated: a trajectory a line, written to be read back by the command that goes on.

What is read may have been damaged since, and nothing that was sampled can be guessed: a line is as it was written, or
the command ends in a sentence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.protocol.trajectory import Segment, Trajectory, check_trajectory
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.transcript import Source

REMEDY = "delete this line and those behind it, and they are generated again"


@dataclass(frozen=True, slots=True)
class Generated:
    """A trajectory; of the passages found or given, which hold a gold; and its shares of what is known of its part as a
    whole: the rollout's seconds, and the branches that found no room in the context."""

    trajectory: Trajectory
    seconds: float
    relevant: list[bool]
    branches_without_room: float = 0.0


def check_generated(
    entries: Sequence[Generated], tokenizer: Tokenizer, tags: tuple[str, ...], max_context: int, path: Path
) -> None:
    """UserError, naming the line, where a trajectory, or a branch of it, breaks an invariant."""
    for number, entry in enumerate(entries, 1):
        for one in (entry.trajectory, *entry.trajectory.branches.values()):
            if wrong := check_trajectory(one, tokenizer, tags, max_context):
                raise UserError(f"{path}:{number}: {'; '.join(wrong)}; {REMEDY}")


def write_generated(entry: Generated) -> dict[str, Any]:
    """Return the record of an entry."""
    return asdict(entry) | {"trajectory": _stored(entry.trajectory)}


def _stored(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory's record, in which `from_api` has its first name, "elsewhere"."""
    record = asdict(trajectory)
    record["branches"] = {name: _stored(branch) for name, branch in trajectory.branches.items()}
    record["elsewhere"] = record.pop("from_api")
    return record


def read_generated(record: Mapping[str, Any], where: str) -> Generated:
    """The entry of a record. UserError, starting with `where`, for one that was not written so."""
    try:
        record = {key: value for key, value in record.items() if key != "check"}  # a digest of an earlier version
        entry = Generated(**{**record, "trajectory": _trajectory(record["trajectory"])})
        numbers = (entry.seconds, entry.branches_without_room)
        if not all(isinstance(x, int | float) and 0 <= x < math.inf for x in numbers):
            raise ValueError("a number of seconds or branches")
        if not isinstance(entry.relevant, list) or not all(isinstance(x, bool) for x in entry.relevant):
            raise ValueError("relevant")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{where}: no trajectory as it was written ({type(error).__name__}: {error}); {REMEDY}"
        ) from None
    return entry


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    """ValueError, TypeError or KeyError where the record is not one of `asdict`; check_trajectory does the rest."""
    fields = {"from_api" if key == "elsewhere" else key: value for key, value in record.items()}
    segments = [_segment(segment) for segment in fields.pop("segments")]
    branches = {name: _trajectory(branch) for name, branch in fields.pop("branches").items()}
    trajectory = Trajectory(**fields, segments=segments, branches=branches)
    texts = (trajectory.question_id, trajectory.reason, *branches)
    if not all(isinstance(text, str) for text in texts) or not all(map(_whole, (trajectory.group, trajectory.sample))):
        raise TypeError("the question's id, the reason, a group or a sample's number")
    if not isinstance(trajectory.searches, list):
        raise TypeError("searches")
    for search in trajectory.searches:
        if not isinstance(search, dict) or not isinstance(search["query"], str):
            raise TypeError("a search's query")
    return trajectory


def _segment(record: Mapping[str, Any]) -> Segment:
    segment = Segment(**{**record, "source": Source(record["source"])})
    if not isinstance(segment.ids, list) or not all(map(_whole, segment.ids)):
        raise TypeError("token ids")
    if not isinstance(segment.logprobs, list) or not all(isinstance(x, float | int) for x in segment.logprobs):
        raise TypeError("log-probs")
    if not (segment.stop is None or (isinstance(segment.stop, str) and segment.stop)) or not _whole(segment.trailing):
        raise TypeError("a segment's end")
    return segment


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
