"""The demo of a pretrained model: what it shows at its end, and the questions from a user's file that it starts with.

Both come from files: the first and last evaluation of a training have the same questions, each with its greedy answer.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher.common.console import visible
from thresher.common.errors import UserError
from thresher.common.files import staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.engine.store.run_folder import RunFolder
from thresher.retrieval.datasets.convert import MixSource, convert
from thresher.retrieval.questions import question_record, read_questions

HELD_OUT = 500  # held-out questions of a file
TO_TRAIN = 320  # minimum number of the others: as many as recipes/smollm2/read.toml uses in its steps
TRANSCRIPTS, SHOWN_CHARS = 6, 300
FIRST_QUESTIONS = (
    f"Below are the first {TRANSCRIPTS} held-out questions, none of them picked, each with the passages that it needs, "
    "and with the greedy answers before the first step and after the last."
)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A held-out question, the passages that its answer needs (shortened), and its greedy answers."""

    question: str
    read: str
    before: str
    after: str
    golds: tuple[str, ...]

    def __str__(self) -> str:
        lines = {"Question": self.question, "Read": self.read, "Before": self.before, "After": self.after}
        return "\n".join([*(f"{name}: {text}" for name, text in lines.items()), f"Gold: {' | '.join(self.golds)}"])


def transcripts(run: Path) -> list[Transcript]:
    """Return the first questions of a run's evaluations, in file order: they are not selected by their answers."""
    return [
        Transcript(
            question=_line(after["question"]),
            read=_read(after),
            before=_line(before["answer"] or "nothing"),
            after=_line(after["answer"] or "nothing"),
            golds=tuple(map(_line, after["golden_answers"])),
        )
        for before, after in islice(_evaluated(run), TRANSCRIPTS)
    ]


def measures_before_after(run: Path) -> list[tuple[Any, ...]]:
    """Return rows (which questions, how many, EM before, EM after, F1 before, F1 after). The first row is of all
    questions. If the numbers of needed passages are known and differ, there is one row for each."""
    pairs = list(_evaluated(run))
    needs = [len(after.get("gold_indices") or ()) for _, after in pairs]
    rows = [("all", pairs)]
    if all(needs) and len(set(needs)) > 1:
        for number in sorted(set(needs)):
            those = [pair for pair, need in zip(pairs, needs, strict=True) if need == number]
            rows.append((f"{number} passage{'s' if number > 1 else ''} needed", those))
    return [
        (name, len(of), *(fmean(pair[when]["parts"][key] for pair in of) for key in ("em", "f1") for when in (0, 1)))
        for name, of in rows
    ]


def learning_curve(run: Path) -> list[tuple[int, float, float]]:
    """Return rows (step, EM, F1) of a run's evaluations."""
    records = RunFolder.existing(run).metrics()
    return [(one["step"], one["eval"]["em"], one["eval"]["f1"]) for one in records if "eval" in one]


def split_questions(path: str, out: Path, seed: int) -> None:
    """Split a file of questions into test.jsonl and train.jsonl in the new folder `out`. test.jsonl has HELD_OUT random
    questions, train.jsonl the others. The file may have any format of `data convert`. UserError if there are too few
    questions, or if some have no passages."""
    with staged_folder(out) as staged:
        everything = staged / "all.jsonl"
        convert([MixSource(paths=(Path(path),))], everything, seed=seed)
        found = read_questions(everything)
        everything.unlink()
        if bare := sum(not question.passages for question in found):
            raise UserError(
                f"{path}: {bare:,} of {len(found):,} questions have no passages to read the answer in; expected all to "
                "bring theirs, as DPR's or HotpotQA's files do"
            )
        test = found[:HELD_OUT]
        asked = {question.question for question in test}
        train = [question for question in found[HELD_OUT:] if question.question not in asked]
        if len(train) < TO_TRAIN:
            raise UserError(
                f"{path}: holds {len(found):,} questions with {len(train):,} to train on beside {HELD_OUT} held-out "
                f"ones; expected at least {HELD_OUT + TO_TRAIN} different ones"
            )
        for name, questions in (("train", train), ("test", test)):
            write_jsonl(staged / f"{name}.jsonl", map(question_record, questions))


def _evaluated(run: Path) -> Iterator[tuple[Record, Record]]:
    """Yield (first, last) of each question: its records in the run's first and last evaluation."""
    folder = RunFolder.existing(run)
    files = sorted(folder.evaluations.glob("step_*.jsonl"))
    yield from zip(folder.stored_trajectories(files[0]), folder.stored_trajectories(files[-1]), strict=True)


def _read(record: Record) -> str:
    needed = record.get("gold_indices") or [1]
    texts = (_line(record["passages"][number - 1]["text"]) for number in needed)
    return " / ".join(textwrap.shorten(text, SHOWN_CHARS // len(needed), placeholder=" …") for text in texts)


def _line(text: str) -> str:
    """Return an untrusted text on one line, without characters that could act on a terminal."""
    return visible(" ".join(text.split()))
