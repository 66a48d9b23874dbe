"""Building blocks of all pages about a run: its records, its stored steps, excerpts of trajectories, templates.

Excerpts are plain data; the page and the terminal apply the colors.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from thresher.common.console import shown as shown_number
from thresher.common.console import visible
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.store.run_folder import RunFolder, expected_steps, step_folders, step_of, tokens_spent
from thresher.engine.systems import load_system
from thresher.rewards.reward import Source

Record = Mapping[str, Any]
ENDINGS = {  # Trajectory.reason -> its description; "answered" has none
    "turns": "turn limit",
    "turn_tokens": "turn too long",
    "tokens": "token limit",
    "context": "context full",
    "ended": "text ended",
}


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run folder. summary: {} before the run ends. start: the last line of starts.jsonl, {} for a run
    of an earlier version, which has no such file."""

    folder: RunFolder
    recipe: Recipe
    records: list[dict[str, Any]]
    summary: Record
    start: Record

    @classmethod
    def read(cls, path: str | Path, unverified: bool = False) -> "RunRecords":
        """Read a run. Raise UserError if the folder is not a run, or if a file in it is malformed or, unless
        `unverified`, fails verification."""
        folder, recipe = open_run(path, unverified)
        records, starts = folder.metrics(), folder.starts()
        if any("restart" in record for record in records):
            raise UserError(
                f"{folder.path}: expected a run of thresher train, got that of a thresher sft that is not finished; "
                "its metrics.jsonl has the loss of each step"
            )
        start = starts[-1] if starts else {}
        return RunRecords(folder=folder, recipe=recipe, records=records, summary=folder.summary() or {}, start=start)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "eval" not in record]

    @property
    def evals(self) -> list[tuple[int, Record]]:
        """Return (step, measures) of each evaluation."""
        return [(record["step"], record["eval"] or {}) for record in self.records if "eval" in record]

    @property
    def last_step(self) -> int:
        """Return the last recorded step, 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def expected_steps(self) -> int:
        """Return the number of steps that the run will have, from its recipe and its token budget."""
        return expected_steps(self.recipe.run, self.last_step, tokens_spent(self.steps))

    def rate(self, tokens: str, seconds: str, last: int = 0) -> float | None:
        """Return the tokens per second over the last steps (0: over all steps), None if no time was recorded."""
        steps = self.steps[-last:]
        spent = sum(record.get(seconds) or 0.0 for record in steps)
        return sum(record.get(tokens) or 0 for record in steps) / spent if spent else None


def open_run(path: str | Path, unverified: bool = False) -> tuple[RunFolder, Recipe]:
    """Return a run folder opened for reading, and its recipe. Raise UserError if the folder is not a run."""
    run = RunFolder.existing(path, unverified=unverified)
    return run, load_recipe(run.recipe_file)


def step_files(folder: Path) -> dict[int, Path]:
    """Return the JSONL files of steps in a folder, sorted by step."""
    found = ((step_of(path.stem), path) for path in folder.glob("step_*.jsonl"))
    return dict(sorted((step, path) for step, path in found if step is not None))


def model_folders(run: RunFolder, recipe: Recipe) -> list[Path]:
    """Return the folders that may hold the run's model: its checkpoints, newest first, then the initial model."""
    return [*reversed(step_folders(run.checkpoints)), Path(recipe.model.path)]


def steps_in_words(steps: Sequence[int]) -> str:
    """Return the list of steps in words: all if they are few, "10 to 800, every 10" if evenly spaced; "" for none."""
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    if len(steps) <= 8 or len(gaps) > 1:
        return ", ".join([*map(str, steps[:20]), *(["…"] if len(steps) > 21 else []), *map(str, steps[20:][-1:])])
    return f"{steps[0]} to {steps[-1]}" + (f", every {gap}" if (gap := gaps.pop()) > 1 else "")


def duration(seconds: float) -> str:
    """Return a duration in words: seconds, minutes and seconds, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def page_template(name: str) -> jinja2.Template:
    """Return a template of this folder that escapes inserted values and raises an error for missing ones."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(page_part),
    )
    environment.filters["number"] = shown_number
    return environment.get_template(name)


def page_part(name: str) -> str:
    """Return the text of a file in this folder."""
    return files("thresher.engine.reports").joinpath(name).read_text(encoding="utf-8")


# Excerpts


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of one color: a tag, or text in the span that a tag opened. span: the tag's name, "" outside of any span."""

    text: str
    is_tag: bool
    span: str


@dataclass(frozen=True, slots=True)
class Part:
    """A segment to show. In policy segments, every span starts on its own line."""

    source: Source
    lines: list[list[Chunk]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A trajectory to show, without its prompt. answer: None if there is none. reward: None if it was not finite."""

    label: str
    right: bool
    reward: float | None
    searches: int
    answer: str | None
    reason: str
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Example:
    """A question with one or two trajectories, the later one last; all greedy, or all sampled."""

    question: str
    golds: list[str]
    prompt: str
    greedy: bool
    excerpts: list[Excerpt]

    @property
    def has_feedback(self) -> bool:
        return any(part.source is Source.FEEDBACK for excerpt in self.excerpts for part in excerpt.parts)


def examples_of(run: RunFolder, recipe: Recipe, count: int, limit: int) -> list[Example]:
    """Return up to `count` examples of the last evaluation, each next to the first evaluation's on the same question.

    limit: maximum characters of a segment. Without evaluations, the examples come from the last stored step. Raise
    UserError for a malformed line.
    """
    evaluations = step_files(run.evaluations)
    files = list((evaluations or step_files(run.trajectories)).items())
    if not files:
        return []
    tags = tags_of(recipe)
    (first, earlier), (last, later) = files[0], files[-1]
    compared = evaluations and first != last
    before = {record.get("id"): record for record in _trajectories(run, earlier)} if compared else {}
    right_before = {key for key, record in before.items() if is_right(record)}
    examples = []
    for record in choose(list(_trajectories(run, later)), right_before, count):
        shown: list[tuple[int, Record]] = [(first, before[record["id"]])] if record.get("id") in before else []
        shown.append((last, record))
        prompt = (s.get("text", "") for s in record.get("segments") or [] if s.get("source") == "prompt")
        examples.append(
            Example(
                visible(record.get("question", "")),
                [visible(gold) for gold in record.get("golden_answers") or []],
                "".join(map(visible, prompt)),
                bool(evaluations),
                [_excerpt(one, f"step {step}", tags, limit) for step, one in shown],
            )
        )
    return examples


def tags_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the tags of the recipe's system."""
    return load_system(recipe.system.name, recipe.system.options).tags if recipe.system else ()


def choose(records: Sequence[Record], right_before: set[Any], count: int) -> list[Record]:
    """Choose records to show: right with several searches, right with one, wrong; then others, up to `count`.

    In each category, take the first record that was not right before, or else the first. No question appears twice.
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
    answer = record.get("answer")
    return Excerpt(
        label=label,
        right=is_right(record),
        reward=record.get("reward"),
        searches=len(record.get("searches") or []),
        answer=None if answer is None else visible(answer),
        reason=visible(record.get("reason", "")),
        parts=parts_of(record.get("segments") or [], tags, limit),
    )


def parts_of(segments: Sequence[Record], tags: Sequence[str], limit: int) -> list[Part]:
    """Cut the segments after the prompt into chunks to color, and shorten those of more than `limit` characters.

    A later prompt, which starts a new context, is replaced by the number of that context. A span is the text after an
    opening tag up to any closing tag, as a reader sees it; rewards have their own parser.
    """
    pattern = re.compile(f"({'|'.join(map(re.escape, tags)) or '(?!)'})")
    span = ""
    parts: list[Part] = []
    contexts = 0
    for segment in segments:
        source, text = segment.get("source", ""), visible(segment.get("text", "")).strip("\n")
        if source == Source.PROMPT:
            contexts, span = contexts + 1, ""
            if contexts > 1:
                parts.append(Part(Source.PROMPT, [[Chunk(f"folded: context {contexts} begins here", False, "")]]))
            continue
        if source not in list(Source) or not text:
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


def _trajectories(run: RunFolder, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the trajectories of a file without their token ids, which take most of its bytes."""
    for record in run.stored_trajectories(path):
        for segment in record.get("segments") or []:
            segment.pop("ids", None)
        yield record
