"""The refiners of `thresher extract --refiner`, and what each may be told.

    eviomni            a policy writes rationale and evidence                     engine/extraction/extractor.py
    filco              a policy writes the sentences that help                    the same, in the prompt of filco.txt
    selective-context  units of most self-information under a policy              selective_context.py
    recomp             sentences whose vectors are next to the question's         recomp.py
    llmlingua-2        words that a classifier of tokens keeps                    llmlingua2.py

Deliberately absent: torch, for the command line reads this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from thresher.retrieval.questions import Question
from thresher.rewards.errors import UserError

Name = Literal["eviomni", "filco", "selective-context", "recomp", "llmlingua-2"]
Unit = Literal["sentence", "token"]
NAMES: tuple[Name, ...] = ("eviomni", "filco", "selective-context", "recomp", "llmlingua-2")
UNITS: tuple[Unit, ...] = ("sentence", "token")
WRITE = ("eviomni", "filco")  # by a policy, in a prompt
OF_A_POLICY = (*WRITE, "selective-context")
FILCO_TEMPLATE = Path(__file__).with_name("filco.txt")

# Option -> the refiners that have it, and their default.
_OPTIONS: dict[str, dict[str, object]] = {
    "keep": {"selective-context": 0.5, "llmlingua-2": 0.5},
    "unit": {"selective-context": "sentence"},
    "sentences": {"recomp": 1},
}


@dataclass(frozen=True, kw_only=True)
class Refining:
    """A refiner with its options, None for those that it does not have; made by `refining`.

    keep: share of the units that are kept, in (0, 1]. unit: of selective-context. sentences: how many, of recomp.
    """

    name: Name = "eviomni"
    keep: float | None = None
    unit: Unit | None = None
    sentences: int | None = None


def refining(
    name: Name, *, keep: float | None = None, unit: Unit | None = None, sentences: int | None = None
) -> Refining:
    """The refiner with its defaults filled in. UserError for an option that it does not have."""
    options: dict[str, object] = {"keep": keep, "unit": unit, "sentences": sentences}
    for key, value in options.items():
        having = _OPTIONS[key]
        if value is not None and name not in having:
            raise UserError(f"--{key} is for --refiner {' or '.join(having)}, not {name}; leave it out")
        if value is None:
            options[key] = having.get(name)
    return Refining(name=name, **options)  # type: ignore[arg-type]


class Refiner(Protocol):
    def refine(self, questions: Sequence[Question]) -> list[str]:
        """What is kept of each question's passages, in their order; they keep a line each."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """The length of each text, in the tokens that this refiner reads."""
