"""Simulated search engine, as in ZeroSearch (Sun et al. 2025, arXiv:2505.04588): a chat model writes useful or noisy
documents for a query, and a curriculum makes noisy ones more frequent.

    p(i) = p_s + (b^(i/m) - 1) / (b - 1) * (p_e - p_s)        noisy at step i of m; b = 4

As in the paper's code, all documents of a call are of one kind, and the prompt contains the question and its first gold
answer. Outside training steps p is p_e, so that evaluations of one run are comparable.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from thresher.common.errors import UserError
from thresher.common.files import read_text

TEMPERATURE = 0.8  # of the chat model, as in the paper's code
DOCUMENT_TOKENS = 512  # that it may write, if the tool has no limit of its own
PLACES = ("query", "quality", "question", "answer")
TEMPLATE = """\
Act as a web search engine. Write the five documents that it finds for the query below, one a line, numbered Doc 1: to \
Doc 5:, of about 30 words each, and nothing else.

Somebody searches in order to answer this question: {question}
The right answer, which only you know, is: {answer}
The documents must be {quality}. Useful documents state what the query asks for, as far as it leads to the answer. \
Noisy documents are about the query's subject too, but nothing in them helps to find the answer.

Query: {query}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Probability of noise, from `start` to `end` over `steps` steps; base 1: linear."""

    start: float
    end: float
    base: float
    steps: int
    seed: int

    def probability(self, step: int | None) -> float:
        """Return p of a training step, counted from 1; None: outside training steps."""
        share = 1.0 if step is None else min(step / max(self.steps, 1), 1.0)
        rate = math.log(self.base)
        risen = math.expm1(share * rate) / math.expm1(rate) if rate else share
        return (1.0 - risen) * self.start + risen * self.end

    def noisy(self, step: int | None, question_id: str, sample: int, number: int) -> bool:
        """Return whether a call returns noise, as a function of the arguments and of the seed."""
        return Random(repr((self.seed, step, question_id, sample, number))).random() < self.probability(step)


def read_search_prompt(path: str | None) -> str:
    """Return the prompt of a file, or the built-in one. UserError unless it has places for query and quality."""
    if path is None:
        return TEMPLATE
    text = read_text(path)
    if missing := [name for name in PLACES[:2] if f"{{{name}}}" not in text]:
        raise UserError(
            f"{path}: the prompt of a simulated search has no {{{missing[0]}}}; it needs {{query}} and {{quality}}, "
            "which becomes useful or noisy, and may have {question} and {answer}"
        )
    return text


def search_prompt(template: str, query: str, question: str, golds: Sequence[str], noisy: bool) -> str:
    """Return a template with its places filled in one pass, so that a place named in a query stays text."""
    values = (query, "noisy" if noisy else "useful", question, golds[0] if golds else "not known")
    filled = dict(zip(PLACES, values, strict=True))
    return re.sub("{(" + "|".join(PLACES) + ")}", lambda place: filled[place[1]], template)
