"""Training data of compressors: sentences, chosen by how much each helps to answer the question.

FilCo (Wang et al. 2023, "Learning to Filter Context for Retrieval-Augmented Generation", arXiv:2311.08377, section
2.2): the sentences that a filter learns to write, by one of three measures of how a sentence t helps to answer q by o.

    inclusion   t holds a gold answer                                         every such sentence
    overlap     F1 of the words of t and o                                    the best, if it is above 0
    cxmi        log p(o | t, q) - log p(o | q), under a generator             the best, if it is above 0

The paper uses inclusion for NQ and TriviaQA and cxmi for HotpotQA. The sentences of all passages are considered
together [assumed: its code has one passage at a time, the papers that compare with it five]. If no sentence helps, the
target is empty. The thresholds are those of its code.

RECOMP (Xu, Shi and Choi 2024, arXiv:2310.04408, section 3.1): the sentence that helps most, and those that help less.

    p = argmax_s log p(o | s, q),    N = {s : log p(o | s, q) < log p(o | p, q) - margin}

A question whose N is empty has no record; p need not help more than no sentence [assumed]. A record is a line of JSON,
{"id", "question", "positive", "negatives"}. o is the first gold answer [assumed]. The generator's prompt is that of the
baseline `evidence`, with the sentence as the only passage, or without passages.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.jsonl import Record, checked_string, id_field, iter_jsonl, json_kind, string_field
from thresher.engine.assemble import check_fit
from thresher.engine.baselines.common import BARE, TAGGED, Options, built_in
from thresher.engine.compressors.compressors import Likelihood, lines, sentence_texts
from thresher.engine.config.sections import RetrievalSection
from thresher.engine.episode import Prompt, pair_tags
from thresher.engine.protocol.prompts import Renderer
from thresher.policy.model import load_policy
from thresher.policy.tokenizer import load_tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.tags import escape_tags
from thresher.rewards.text import contains_answer, f1_score

TAGS = pair_tags("answer")
MARGIN = 1.0  # in nats [assumed]


class AnswerLikelihood:
    """Likelihood of answers under a generator, in float32 on a CPU and bfloat16 on CUDA. Its chat template is used, if
    it has one. tagged: the answer is between answer tags. UserError for a folder without such a model."""

    def __init__(self, folder: str | Path, device: str = "cpu", tagged: bool = True) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device is cuda, but torch sees no CUDA device; use cpu")
        self._folder, self._tagged = folder, tagged
        tokenizer = load_tokenizer(folder)
        policy = load_policy(folder, torch.bfloat16 if device == "cuda" else torch.float32, device)
        check_fit(policy.requires_grad_(False), tokenizer, folder)
        self._likelihood = Likelihood(policy, tokenizer)
        template = built_in("passages", Options(), passages=True)
        self._template = template if tagged else template.replace(TAGGED, BARE)
        self._renderer = Renderer(
            tokenizer=tokenizer,
            tags=TAGS,
            k=1,
            chat=tokenizer.chat_template is not None,
            max_passage_tokens=sys.maxsize,  # longer prompts than the context are refused below
            passage_format=RetrievalSection().passage_format,
        )

    def logprobs(self, question: Question, texts: Sequence[str]) -> list[float]:
        """Return log p(first gold answer | text, question) for each text, in nats; an empty text means no passage.
        UserError for a sequence longer than the model's context."""
        gold = question.golds[0]
        answer = f"<answer> {escape_tags(gold, TAGS)} </answer>" if self._tagged else gold
        target = self._renderer.tokenizer.encode(answer)
        sequences = []
        for text in texts:
            passages = (Passage("evidence", "", text),) if text else ()
            ids = [*self._renderer.prompt(Prompt(self._template, question.question, passages)), *target]
            if len(ids) > self._likelihood.longest:
                raise UserError(
                    f"question {question.id}: with a sentence of its passages and its answer it takes {len(ids):,} "
                    f"tokens, more than the {self._likelihood.longest:,} positions of {self._folder}; drop it, or use "
                    "another model"
                )
            sequences.append((ids, list(range(len(ids) - len(target), len(ids)))))
        return [sum(values) for values in self._likelihood.logprobs(sequences)]


def silver_evidence(
    questions: Sequence[Question],
    measure: str,
    model: str | Path | None = None,
    device: str = "cpu",
    tagged: bool = True,
) -> dict[str, str]:
    """Return question id -> the sentences that help by `measure`, one line per passage that has any. Every question
    must have an answer and passages. model: the generator of cxmi."""
    likelihood = None if model is None else AnswerLikelihood(model, device, tagged)
    found = {}
    with console.progress_line("sentences", len(questions)) as line:
        for done, question in enumerate(questions, 1):
            parts = [sentence_texts(passage.text) for passage in question.passages]
            helps = iter(_helpful(question, [text for part in parts for text in part], measure, likelihood))
            found[question.id] = lines([[text for text in part if next(helps)] for part in parts])
            line.to(done, "")
    return found


def _helpful(question: Question, texts: Sequence[str], measure: str, likelihood: AnswerLikelihood | None) -> list[bool]:
    """Mark the sentences that help; of equally good ones the first."""
    if measure == "inclusion":
        return [contains_answer(text, question.golds) for text in texts]
    if measure == "overlap":
        scores = [f1_score(text, question.golds) for text in texts]
    else:
        assert measure == "cxmi" and likelihood is not None
        base, *given = likelihood.logprobs(question, ["", *texts])
        scores = [value - base for value in given]
    best = max(range(len(texts)), key=lambda number: scores[number])
    return [number == best and scores[number] > 0 for number in range(len(texts))]


@dataclass(frozen=True, slots=True)
class Contrast:
    """A question, the sentence that helps most, and at least one that helps less."""

    id: str
    question: str
    positive: str
    negatives: tuple[str, ...]

    def to_dict(self) -> Record:
        return asdict(self) | {"negatives": list(self.negatives)}


def make_contrasts(
    questions: Sequence[Question], model: str | Path, margin: float, device: str = "cpu", tagged: bool = True
) -> dict[str, Contrast]:
    """Return question id -> record, for questions with a sentence more than `margin` nats below the best.

    Every question must have an answer and passages. model: the generator. device, tagged: as in `AnswerLikelihood`.
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
    """Return the records of a file, at least two because one is held out. UserError names the line of a bad one."""
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
