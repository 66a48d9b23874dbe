"""Compressors of `thresher extract --refiner`, with their options.

    filco              a policy writes the sentences that help, by filco.txt      engine/extraction/extractor.py
    selective-context  units of highest self-information under a policy           compressors.py
    recomp             sentences whose vectors are nearest to the question's      compressors.py
    llmlingua-2        words that a classifier of tokens keeps                    compressors.py

This file does not import torch, because the command line imports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from thresher.common.errors import UserError
from thresher.retrieval.questions import Question

Name = Literal["filco", "selective-context", "recomp", "llmlingua-2"]
Unit = Literal["sentence", "token"]
NAMES: tuple[Name, ...] = ("filco", "selective-context", "recomp", "llmlingua-2")
UNITS: tuple[Unit, ...] = ("sentence", "token")
MEASURES = ("inclusion", "overlap", "cxmi")  # measures by which FilCo's sentences are chosen: training_data.py
FILCO_TEMPLATE = Path(__file__).with_name("filco.txt")

# Option -> the compressors that have it, and their default.
_OPTIONS: dict[str, dict[str, object]] = {
    "keep": {"selective-context": 0.5, "llmlingua-2": 0.5},
    "unit": {"selective-context": "sentence"},
    "sentences": {"recomp": 1},
}


@dataclass(frozen=True, kw_only=True)
class CompressorOptions:
    """A compressor with its options; None for options that it does not have. Made by `compressor_options`.

    keep: share of the units to keep, in (0, 1]. unit: of selective-context. sentences: number that recomp keeps.
    """

    name: Name
    keep: float | None = None
    unit: Unit | None = None
    sentences: int | None = None

    @property
    def writes(self) -> bool:
        """Return True if a policy generates the evidence; else parts of the passages are kept unchanged."""
        return self.name == "filco"

    @property
    def of_encoder(self) -> bool:
        """Return True if the model is an encoder and not a policy."""
        return self.name in ("recomp", "llmlingua-2")


def compressor_options(
    name: Name | None, *, keep: float | None = None, unit: Unit | None = None, sentences: int | None = None
) -> CompressorOptions | None:
    """Return the compressor with defaults filled in, or None if none is named. UserError for an option that it does
    not have."""
    options: dict[str, object] = {"keep": keep, "unit": unit, "sentences": sentences}
    for key, value in options.items():
        having = _OPTIONS[key]
        if value is not None and name not in having:
            raise UserError(f"--{key} is for --refiner {' or '.join(having)}; name it, or leave --{key} out")
        if value is None and name is not None:
            options[key] = having.get(name)
    return None if name is None else CompressorOptions(name=name, **options)  # type: ignore[arg-type]


class Compressor(Protocol):
    def compress(self, questions: Sequence[Question]) -> list[str]:
        """Return the kept parts of the passages of each question, in order, one line per passage."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the length of each text in tokens of this compressor."""
