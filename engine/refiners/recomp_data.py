"""What RECOMP's extractive compressor is trained on: the sentence that helps most to answer, and those that help less.

    p = argmax_s log p(o | s, q),    N = {s : log p(o | s, q) < log p(o | p, q) - margin}

(Xu, Shi and Choi 2024, "RECOMP", arXiv:2310.04408, section 3.1.) s are the sentences of all passages of the question q,
o is its first gold answer [assumed], p(o | s, q) that of a generator in the prompt of `AnswerLikelihood`. A question
without such N has no record; whether p helps more than no sentence is not asked [assumed]. Which of N are shown in
training is recomp_train.py's business.

A record is a line of JSON, {"id", "question", "positive", "negatives"}.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import Record, checked_string, id_field, iter_jsonl, json_kind, string_field
from thresher.engine.refiners.silver import AnswerLikelihood
from thresher.engine.refiners.spans import sentence_texts
from thresher.retrieval.questions import Question

MARGIN = 1.0  # in nats [assumed]


@dataclass(frozen=True, slots=True)
class Contrast:
    """A question, the sentence that helps most, and at least one that helps less."""

    id: str
    question: str
    positive: str
    negatives: tuple[str, ...]

    def to_dict(self) -> Record:
        return {"id": self.id, "question": self.question, "positive": self.positive, "negatives": list(self.negatives)}


def make_contrasts(
    questions: Sequence[Question], model: str | Path, margin: float, device: str = "cpu", tagged: bool = True
) -> dict[str, Contrast]:
    """Question id -> its record, for those where a sentence falls short of the best by more than `margin` nats.

    Every question has an answer and passages. model: the generator; device and tagged as `AnswerLikelihood` has them.
    """
    likelihood = AnswerLikelihood(model, device, tagged)
    found = {}
    with console.progress_line("sentences", len(questions)) as line:
        for done, question in enumerate(questions, 1):
            split = (text for passage in question.passages for text in sentence_texts(passage.text))
            texts = [text for text in dict.fromkeys(split) if text]
            values = likelihood.logprobs(question, texts)
            best = max(values, default=0.0)
            negatives = tuple(text for text, value in zip(texts, values, strict=True) if value < best - margin)
            if negatives:
                positive = texts[values.index(best)]
                found[question.id] = Contrast(question.id, question.question, positive, negatives)
            line.to(done, "")
    return found


def read_contrasts(path: str | Path) -> list[Contrast]:
    """The records of a file, two or more, since one is held out. UserError names the line of one that is no such
    record."""
    found = [_contrast(record, row, f"{path}:{row}") for row, record in iter_jsonl(path)]
    if len(found) < 2:
        raise UserError(f"{path}: expected 2 records or more, found {len(found)}; give more questions to data sft")
    return found


def _contrast(record: Record, row: int, where: str) -> Contrast:
    listed = record.get("negatives")
    if not isinstance(listed, list) or not listed:
        kind = "an empty list" if listed == [] else json_kind(listed)
        raise UserError(f'{where}: expected a list of sentences under "negatives", found {kind}; fix this record')
    positive = string_field(record, "positive", where)
    negatives = tuple(checked_string(text, f'{where}: a sentence of "negatives"') for text in listed)
    if positive in negatives:
        raise UserError(f'{where}: the positive sentence is among the "negatives" as well; take it out of one of them')
    return Contrast(id_field(record, row, where), string_field(record, "question", where), positive, negatives)
