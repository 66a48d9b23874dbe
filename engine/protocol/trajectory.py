"""A trajectory: one sample of a question, as segments of token ids with their sources.

Text is decoded from tokens and never encoded back, so training uses exactly the tokens that were sampled. The loss
mask, the stops, the actions and the answer follow from the segments. `check_trajectory` states the invariants.

A PROMPT segment begins a context: the segments before it are no longer in the context. Most trajectories are one
context; one that folds has several. `contexts` splits them, and `trained_contexts` returns what an update trains: each
sampled token once, in the context in which it was sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.reward import Source, TextSegment


@dataclass(slots=True)
class Segment:
    """Token ids from one source. `logprobs` holds, for POLICY only, each id's log-probability when it was sampled.

    `stop` is the tag that ended a POLICY turn (None if it ended otherwise). `trailing` is the number of bytes of the
    last token after that tag: the token is kept whole, and its trailing bytes stay in the turn. `edges` are the numbers
    of ids at the beginning and end of RETRIEVED or FEEDBACK that belong to template text. `versions` is used for POLICY
    if several weights may have drawn it (rollout.partial): (version, number of ids) in order. A version is the number
    of steps that the weights had learned.
    """

    source: Source
    ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    stop: str | None = None
    trailing: int = 0
    edges: tuple[int, int] = (0, 0)
    versions: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Trajectory:
    """One sampled answer to one question.

    segments: all contexts in order; each begins with a PROMPT segment.
    reason: why it ended: "answered" | "turns" | "turn_tokens" | "tokens" | "context" | "ended".
    branches: text of the policy in branches and calls. Not in ids(); in the loss only if the branch is `trained`.
    tools: each call of a tool with its result, in order: name, arguments, text, error.
    scores: each text that was scored, in order: context (template text after the present context; None: a separate
    one), text, logprobs (one per token, in nats), and turns, the number of POLICY segments before it.
    from_api: a server wrote the turns and returned neither ids nor log-probs; ids are those of the returned text.
    forked: (sample, turns): it continues from the end of that sample's turn number `turns`, in the same group. Its
    first `turns` POLICY segments are copies, trained in the sample that wrote them: that sample, or one from which
    that sample continued. None: all segments are its own.
    trained: of a branch: tokens sampled in it are in the loss; if it was taken over (`forked`), they are in the loss
    of the sample that wrote it.
    """

    question_id: str
    group: int
    sample: int
    segments: list[Segment] = field(default_factory=list)
    reason: str = ""
    searches: list[dict[str, Any]] = field(default_factory=list)
    branches: dict[str, "Trajectory"] = field(default_factory=dict)
    from_api: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    forked: tuple[int, int] | None = None
    trained: bool = False
    scores: list[dict[str, Any]] = field(default_factory=list)

    @property
    def in_loss(self) -> bool:
        """Return whether this branch is trained as a branch of its trajectory."""
        return self.trained and self.forked is None

    def ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.ids]

    def __len__(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    def policy_positions(self) -> list[int]:
        """Return the positions in `ids()` of the tokens that the policy sampled. `trained_contexts` lists those in the
        loss."""
        rows: list[int] = []
        at = 0
        for segment in self.segments:
            if segment.source is Source.POLICY:
                rows.extend(range(at, at + len(segment.ids)))
            at += len(segment.ids)
        return rows

    def policy_ids(self) -> list[int]:
        return [token for segment in self.segments if segment.source is Source.POLICY for token in segment.ids]

    def policy_logprobs(self) -> list[float]:
        return [value for segment in self.segments for value in segment.logprobs]

    def count(self, source: Source) -> int:
        return sum(len(segment.ids) for segment in self.segments if segment.source is source)

    def pieces(self, tokenizer: Tokenizer) -> list[TextSegment]:
        """Return the segments in the form that rewards read: bytes with their sources."""
        return [TextSegment(segment.source, tokenizer.decode_bytes(segment.ids)) for segment in self.segments]

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the record for the run folder: the text of every segment, and the exact ids if they are known."""
        record = {
            "id": self.question_id,
            "group": self.group,
            "sample": self.sample,
            "reason": self.reason,
            "searches": self.searches,
            "segments": self._segments(tokenizer),
        }
        if self.tools:
            record["tools"] = self.tools
        if self.scores:
            record["scores"] = self.scores
        if self.branches:
            record["branches"] = {name: branch._segments(tokenizer) for name, branch in self.branches.items()}
        if trained := [name for name, branch in self.branches.items() if branch.in_loss]:
            record["trained_branches"] = trained
        if self.forked is not None:
            record["forked"] = list(self.forked)
        return record

    def _segments(self, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return [
            {"source": str(segment.source), "text": tokenizer.decode(segment.ids)}
            | ({} if self.from_api else {"ids": segment.ids})
            | ({"versions": [list(run) for run in segment.versions]} if segment.versions else {})
            for segment in self.segments
        ]


def are_scores(found: Any) -> bool:
    """Return whether a value read from a file is a list of scores as in `Trajectory.scores`."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return isinstance(found, list) and all(
        isinstance(score, dict)
        and score.keys() == {"context", "text", "turns", "logprobs"}
        and isinstance(score["context"], str | None)
        and isinstance(score["text"], str)
        and type(score["turns"]) is int
        and isinstance(score["logprobs"], list)
        and all(map(number, score["logprobs"]))
        for score in found
    )


def turns(trajectory: Trajectory) -> Iterator[Segment]:
    """Yield the policy's turns, in order."""
    return (segment for segment in trajectory.segments if segment.source is Source.POLICY)


def contexts(trajectory: Trajectory) -> list[list[Segment]]:
    """Return the segments of each context of a trajectory, in order."""
    found: list[list[Segment]] = []
    for segment in trajectory.segments:
        if segment.source is Source.PROMPT or not found:
            found.append([])
        found[-1].append(segment)
    return found


def present_ids(trajectory: Trajectory) -> list[int]:
    """Return the ids of the trajectory's present context, which is its last."""
    return [token for segment in contexts(trajectory)[-1] for token in segment.ids]


@dataclass(frozen=True, slots=True)
class TrainedContext:
    """A context with its trained tokens: their positions in `ids`, and their log-probs when they were sampled. branch:
    name of the branch; None: a context of the trajectory itself. versions: of the weights that drew the tokens, as in
    Segment."""

    ids: list[int]
    positions: list[int]
    logprobs: list[float]
    branch: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)

    def drawn_before(self, version: int) -> int:
        """Return the number of trained tokens that older weights than this version drew; they come first."""
        return sum(count for drawn_by, count in self.versions if drawn_by < version)


def trained_contexts(trajectory: Trajectory) -> list[TrainedContext]:
    """Return the contexts that an update trains: those of the trajectory, then its trained branches, in order. A
    context without a trained token is left out. Turns that another sample wrote (`forked`) are context only."""
    inherited = trajectory.forked[1] if trajectory.forked else 0
    found = []
    for segments in contexts(trajectory):
        found.append(_trained(segments, inherited))
        inherited = max(inherited - sum(segment.source is Source.POLICY for segment in segments), 0)
    for name, branch in trajectory.branches.items():
        if branch.in_loss:
            found.append(_trained(branch.segments, 0, name))
    return [context for context in found if context.positions]


def inherited_tokens(trajectory: Trajectory) -> int:
    """Return the number of sampled tokens in turns that another sample wrote (`forked`)."""
    count = trajectory.forked[1] if trajectory.forked else 0
    return sum(len(turn.ids) for turn in islice(turns(trajectory), count))


def sampled_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens sampled for a trajectory and its branches, without inherited ones."""
    own = [trajectory, *(branch for branch in trajectory.branches.values() if branch.forked is None)]
    return sum(one.count(Source.POLICY) for one in own) - inherited_tokens(trajectory)


def inherited_trained_tokens(trajectory: Trajectory) -> int:
    """Return the number of inherited tokens that another sample trains, in turns and in trained calls."""
    calls = (branch for branch in trajectory.branches.values() if branch.trained)
    return inherited_tokens(trajectory) + sum(map(inherited_tokens, calls))


def _trained(segments: list[Segment], inherited: int, branch: str | None = None) -> TrainedContext:
    """Return the context of these segments. inherited: number of turns at its beginning that are not trained."""
    context = TrainedContext([], [], [], branch)
    for segment in segments:
        if segment.source is Source.POLICY:
            inherited -= 1
            if inherited < 0:
                at = len(context.ids)
                context.positions.extend(range(at, at + len(segment.ids)))
                context.logprobs.extend(segment.logprobs)
                context.versions.extend(segment.versions)
        context.ids.extend(segment.ids)
    return context


def trailing_bytes(segment: Segment, tokenizer: Tokenizer) -> bytes:
    """Return the bytes of the segment's last token after its stop tag. They begin the next turn's text if nothing is
    appended before it."""
    return tokenizer.decode_bytes(segment.ids[-1:])[-segment.trailing :] if segment.trailing else b""


def check_trajectory(
    trajectory: Trajectory, tokenizer: Tokenizer, tags: tuple[str, ...], max_context: int
) -> list[str]:
    """Return the faults of a trajectory, one sentence each; the list is empty if every invariant holds.

    1. It begins with a PROMPT, each of its contexts fits `max_context`, and every id belongs to the tokenizer.
    2. Every sampled id, and no other, has a log-probability, which is at most 0; turns that a server wrote have none.
    3. A turn that stopped at a tag ends `trailing` bytes after the first occurrence of that tag. The tag may begin in
       the trailing bytes of the turn before (`Turn` of engine/episode.py).
    4. No RETRIEVED or FEEDBACK segment holds a control token outside its template text.
    5. A RETRIEVED segment holds no tag except the one pair that wraps it; a FEEDBACK segment holds none.
    6. Every score has a log-prob, which is at most 0, for each token of its text.
    """
    wrong: list[str] = []
    segments = trajectory.segments
    if not segments or segments[0].source is not Source.PROMPT:
        wrong.append("it does not begin with a prompt")
    lengths = [sum(len(segment.ids) for segment in context) for context in contexts(trajectory)]
    for number, length in enumerate(lengths, 1):
        if length > max_context:
            which = f" of its context {number}" if len(lengths) > 1 else ""
            wrong.append(f"{length} tokens{which} exceed the context of {max_context}")
    control = set(tokenizer.added_tokens.values())
    for number, segment in enumerate(segments):
        name = f"segment {number} ({segment.source})"
        if not all(0 <= token < tokenizer.vocab_size for token in segment.ids):
            wrong.append(f"{name} has an id outside the tokenizer")
            continue
        sampled = segment.source is Source.POLICY and not trajectory.from_api
        if len(segment.logprobs) != (len(segment.ids) if sampled else 0):
            wrong.append(f"{name} has {len(segment.logprobs)} log-probs for {len(segment.ids)} ids")
        if any(not value <= 1e-6 for value in segment.logprobs):
            wrong.append(f"{name} has a log-prob above 0")
        text = tokenizer.decode_bytes(segment.ids)
        if segment.stop is not None:
            stop = segment.stop.encode("utf-8", "surrogatepass")
            lead = trailing_bytes(segments[number - 1], tokenizer) if number else b""
            start = len(lead + text) - segment.trailing - len(stop)
            first = max(len(lead) - len(stop) + 1, 0)  # a tag that is all within the lead does not stop the turn
            last = tokenizer.token_bytes(segment.ids[-1]) if segment.ids else b""
            if start < first or (lead + text).find(stop, first) != start or segment.trailing >= len(last):
                wrong.append(f"{name} did not end at its first {segment.stop}")
        if segment.source in (Source.RETRIEVED, Source.FEEDBACK):
            before, after = segment.edges
            if control.intersection(segment.ids[before : max(len(segment.ids) - after, 0)]):
                wrong.append(f"{name} contains a control token")
            # The template may have tags around the text; stored segments without edges have one pair.
            allowed = 1 if segment.source is Source.RETRIEVED and segment.edges == (0, 0) else 0
            inner = tokenizer.decode_bytes(segment.ids[before : max(len(segment.ids) - after, 0)])
            counts = {tag: inner.count(tag.encode()) for tag in tags}
            if any(count > allowed for count in counts.values()) or sum(counts.values()) > 2 * allowed:
                wrong.append(f"{name} contains tags of its own: {counts}")
    for number, score in enumerate(trajectory.scores):
        values = score["logprobs"]
        if len(values) != len(tokenizer.encode(score["text"])) or any(not value <= 1e-6 for value in values):
            wrong.append(f"score {number} does not have a log-prob of at most 0 for each token of its text")
    return wrong
