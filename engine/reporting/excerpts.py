"""Trajectories for a person to read: which of a run's to show, and what in them to colour.

Chosen are a few of the last evaluation that differ in what they took (two searches, one, a wrong answer), each beside
the first evaluation's trajectory on the same question. What comes out is plain data: the page and the terminal colour
it, each in its way.

Deliberately absent: judging. Blocks are cut as the eye sees them; what counted is in the record (reward, parts,
answer).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.common.console import visible
from thresher.engine.config.recipe import Recipe
from thresher.engine.store.run_folder import RunFolder, step_of
from thresher.engine.systems import load_system
from thresher.rewards.transcript import Source

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of text to colour: a tag itself, or what stands in the span it opened ("" outside of all)."""

    text: str
    is_tag: bool
    span: str


@dataclass(frozen=True, slots=True)
class Part:
    """A segment to show: who wrote it, and its lines; each span of the policy's begins a line of its own."""

    source: Source
    lines: list[list[Chunk]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A trajectory to show: where it comes from, what came of it, and all that followed the prompt. `answer` is None
    without one; a reward that was not finite is None too."""

    label: str
    right: bool
    reward: float | None
    searches: int
    answer: str | None
    reason: str
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Example:
    """A question and one or two trajectories on it, the last of them the later; all greedy, or all sampled."""

    question: str
    golds: list[str]
    prompt: str
    greedy: bool
    excerpts: list[Excerpt]

    @property
    def has_feedback(self) -> bool:
        return any(part.source is Source.FEEDBACK for excerpt in self.excerpts for part in excerpt.parts)


def examples_of(run: RunFolder, recipe: Recipe, count: int, limit: int) -> list[Example]:
    """Up to `count` examples from the last evaluation, in segments of at most `limit` characters.

    A run without evaluations shows what it last sampled, and one without either shows none. UserError for a malformed
    line.
    """
    evaluations = _step_files(run.evaluations)
    paths = evaluations or _step_files(run.trajectories)[-1:]
    if not paths:
        return []
    tags = load_system(recipe.system.name, recipe.system.options).tags if recipe.system else ()
    before = {record.get("id"): record for record in _trajectories(run, paths[0])} if len(paths) > 1 else {}
    right_before = {key for key, record in before.items() if is_right(record)}
    examples = []
    for record in choose(list(_trajectories(run, paths[-1])), right_before, count):
        shown: list[tuple[Record, Path]] = [(before[record["id"]], paths[0])] if record.get("id") in before else []
        shown.append((record, paths[-1]))
        examples.append(
            Example(
                visible(record.get("question", "")),
                [visible(gold) for gold in record.get("golden_answers") or []],
                "".join(
                    visible(s.get("text", "")) for s in record.get("segments") or [] if s.get("source") == "prompt"
                ),
                bool(evaluations),
                [_excerpt(old, f"step {step_of(path.stem)}", tags, limit) for old, path in shown],
            )
        )
    return examples


def choose(records: Sequence[Record], right_before: set[Any], count: int) -> list[Record]:
    """Records to show: right with several searches, right with one, wrong; then others, until there are `count`.

    Of each sort the first that was not right before, or else the first; no question twice.
    """

    def searches(record: Record) -> int:
        return len(record.get("searches") or [])

    sorts = [
        [record for record in records if is_right(record) and searches(record) > 1],
        [record for record in records if is_right(record) and searches(record) == 1],
        [record for record in records if not is_right(record)],
        *([list(records)] * count),
    ]
    chosen: dict[Any, Record] = {}
    for candidates in sorts:
        new = [record for record in candidates if record.get("id") not in chosen]
        if new and len(chosen) < count:
            record = next((r for r in new if r.get("id") not in right_before), new[0])
            chosen[record.get("id")] = record
    return list(chosen.values())


def is_right(record: Record) -> bool:
    return bool((record.get("parts") or {}).get("em"))


def _excerpt(record: Record, label: str, tags: Sequence[str], limit: int) -> Excerpt:
    segments = record.get("segments") or []
    answer = record.get("answer")
    return Excerpt(
        label=label,
        right=is_right(record),
        reward=record.get("reward"),
        searches=len(record.get("searches") or []),
        answer=None if answer is None else visible(answer),
        reason=visible(record.get("reason", "")),
        parts=parts_of(segments, tags, limit),
    )


def parts_of(segments: Sequence[Record], tags: Sequence[str], limit: int) -> list[Part]:
    """Segments after the prompt, cut into chunks to colour; a segment of more than `limit` characters is shortened.

    A span is what follows an opening tag until any closing one, as a reader sees it; rewards parse for themselves.
    """
    pattern = re.compile(f"({'|'.join(map(re.escape, tags)) or '(?!)'})")
    span = ""
    parts: list[Part] = []
    for segment in segments:
        source, text = segment.get("source", ""), visible(segment.get("text", "")).strip("\n")
        if source not in list(Source) or source == Source.PROMPT or not text:
            continue
        if len(text) > limit:
            text = f"{text[:limit]} … ({len(text) - limit:,} characters more)"
        lines: list[list[Chunk]] = [[]]
        for piece in filter(None, pattern.split(text)):
            name = piece.strip("</>") if piece in tags else ""
            opens = bool(name) and not piece.startswith("</")
            if opens and source == Source.POLICY and any(chunk.text.strip() for chunk in lines[-1]):
                lines.append([])
            lines[-1].append(Chunk(piece, bool(name), name or span))
            if name:
                span = name if opens else ""
        parts.append(Part(Source(source), lines))
    return parts


def _step_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*.jsonl") if step_of(path.stem) is not None)


def _trajectories(run: RunFolder, path: Path) -> Iterator[dict[str, Any]]:
    """The trajectories of a file, without their token ids, which are most of it and not shown."""
    for record in run.stored_trajectories(path):
        for segment in record.get("segments") or []:
            segment.pop("ids", None)
        yield record
