"""The table of question sets: what each is called, what its records look like, and which reader takes them.

`fits` says whether a reader can take a record, `looks` whether the record is more likely this flavour than one further
down; `detect` takes the first that looks so. A file named as one flavour whose records are another's is refused with
the name of that other: read anyway, HotpotQA's context, say, would quietly end up in the metadata.

To add one: write a function Row -> Question beside the others, and give it a line here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.jsonl import Record
from thresher.retrieval.datasets.containers import iter_rows
from thresher.retrieval.datasets.multihop import read_2wiki, read_hotpotqa, read_musique
from thresher.retrieval.datasets.results import read_dpr, read_flashrag, read_native, read_verl
from thresher.retrieval.datasets.row import Row
from thresher.retrieval.datasets.short import (
    read_bamboogle,
    read_plain,
    read_popqa,
    read_triviaqa,
    read_triviaqa_hub,
)
from thresher.retrieval.questions import GOLD_KEYS, Question

# What the richer sets keep beside the question and its answers, and what ours does.
RICHER = ("context", "paragraphs", "ctxs", "possible_answers", "reward_model")
GIVEN = ("passages", "gold_indices")
TEXT_KEYS = ("text", "contents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavour:
    """One way in which questions are published. title: its name in a sentence."""

    name: str
    title: str
    read: Callable[[Row], Question]
    fits: Callable[[Record], bool]
    looks: Callable[[Record], bool] | None = None

    def claims(self, record: Record) -> bool:
        return self.fits(record) and (self.looks is None or self.looks(record))


def _asks(record: Record) -> bool:
    return "question" in record


FLAVOURS = (
    Flavour(
        name="native",
        title="our own records",
        read=read_native,
        fits=lambda r: _asks(r) and _has_answer(r) and not _has(r, RICHER),
        looks=lambda r: _has(r, GIVEN),
    ),
    Flavour(
        name="verl",
        title="verl's training rows",
        read=read_verl,
        fits=lambda r: isinstance(r.get("reward_model"), dict) and "ground_truth" in r["reward_model"],
    ),
    Flavour(
        name="2wiki",
        title="2WikiMultiHopQA",
        read=read_2wiki,
        fits=lambda r: _asks(r) and "evidences" in r and isinstance(r.get("context"), list | dict | str),
    ),
    Flavour(
        name="hotpotqa",
        title="HotpotQA as its authors publish it (lists of pairs)",
        read=read_hotpotqa,
        fits=lambda r: _asks(r) and "evidences" not in r and isinstance(r.get("context"), list),
    ),
    Flavour(
        name="hotpotqa-hub",
        title="HotpotQA from the hub (objects of lists)",
        read=read_hotpotqa,
        fits=lambda r: _asks(r) and "evidences" not in r and isinstance(r.get("context"), dict),
    ),
    Flavour(
        name="musique",
        title="MuSiQue",
        read=read_musique,
        fits=lambda r: _asks(r) and isinstance(r.get("paragraphs"), list | str),
    ),
    Flavour(
        name="dpr",
        title="DPR's retrieval results",
        read=read_dpr,
        fits=lambda r: _asks(r) and isinstance(r.get("ctxs"), list),
    ),
    Flavour(
        name="triviaqa",
        title="TriviaQA as its authors publish it",
        read=read_triviaqa,
        fits=lambda r: "Question" in r and "QuestionId" in r,
    ),
    Flavour(
        name="triviaqa-hub",
        title="TriviaQA from the hub",
        read=read_triviaqa_hub,
        fits=lambda r: _asks(r) and isinstance(r.get("answer"), dict),
    ),
    Flavour(
        name="popqa",
        title="PopQA",
        read=read_popqa,
        fits=lambda r: _asks(r) and "possible_answers" in r,
    ),
    Flavour(
        name="flashrag",
        title="FlashRAG's questions",
        read=read_flashrag,
        fits=lambda r: _asks(r) and "golden_answers" in r and not _has(r, GIVEN),
    ),
    Flavour(
        name="bamboogle",
        title="Bamboogle",
        read=read_bamboogle,
        fits=lambda r: _is_short(r, "Question", "Answer") or (_is_short(r, "question", "answer") and _is_bare(r)),
        looks=lambda r: "Question" in r,
    ),
    Flavour(
        name="nq-open",
        title="NQ-open",
        read=read_plain,
        fits=lambda r: _asks(r) and isinstance(r.get("answer"), list) and _is_bare(r),
        looks=lambda r: r.keys() <= {"id", "_id", "question", "answer"},
    ),
    Flavour(
        name="plain",
        title="plain questions and answers",
        read=read_plain,
        fits=lambda r: _asks(r) and _has_answer(r) and _is_bare(r),
    ),
)
NAMES = tuple(flavour.name for flavour in FLAVOURS)


def find_flavour(name: str) -> Flavour:
    """The flavour called `name`. UserError for another."""
    for flavour in FLAVOURS:
        if flavour.name == name:
            return flavour
    near = get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose auto or one of {', '.join(NAMES)}"
    raise UserError(f"unknown format {name!r}; {hint}")


def detect(path: str | Path) -> Flavour:
    """The flavour that the first record of `path` looks like. UserError when it looks like none, and when the file is
    absent, malformed or empty."""
    where, record = next(iter_rows(path), (None, None))
    if where is None or record is None:
        raise UserError(f"{path}: holds no questions; expected at least one")
    flavour = flavour_of(record)
    if flavour is None:
        raise UserError(f"{where}: {_unlike(record)}")
    return flavour


def flavour_of(record: Record) -> Flavour | None:
    """The flavour that a record looks like, None where it looks like none."""
    return next((flavour for flavour in FLAVOURS if flavour.claims(record)), None)


def require(flavour: Flavour, record: Record, where: str) -> None:
    """UserError, starting with `where`, if `record` is no `flavour`; it says what it looks like instead."""
    if flavour.fits(record):
        return
    other = flavour_of(record)
    if other is None:
        raise UserError(f"{where}: {_unlike(record, flavour)}")
    raise UserError(
        f"{where}: expected {flavour.title}, and this record looks like {other.title}; give --format {other.name} for "
        "such a file"
    )


def _unlike(record: Record, flavour: Flavour | None = None) -> str:
    keys = ", ".join(sorted(str(key) for key in record)[:8]) or "none"
    if not _asks(record) and any(key in record for key in TEXT_KEYS):
        return f"a passage of a corpus (keys: {keys}), and no question; give the file that holds the questions"
    expected = "no question set in a known format" if flavour is None else f"not {flavour.title}"
    return (
        f"{expected} (keys: {keys}); the formats are {', '.join(NAMES)}, so convert the file to one of them, the "
        f'simplest being {{"id", "question", "golden_answers": [..]}}'
    )


def _has_answer(record: Record) -> bool:
    return any(isinstance(record.get(key), str | list) for key in GOLD_KEYS)


def _is_short(record: Record, question: str, answer: str) -> bool:
    return question in record and isinstance(record.get(answer), str)


def _is_bare(record: Record) -> bool:
    return not _has(record, (*RICHER, *GIVEN))


def _has(record: Record, keys: tuple[str, ...]) -> bool:
    return any(key in record for key in keys)
