"""Selective Context: what a language model would have guessed is left out.

    I(x_t) = -log p(x_t | x_<t),    I(unit) = mean of I over its tokens,    kept: I(unit) >= the (1 - keep) quantile

(Li et al. 2023, "Compressing Context to Enhance Inference Efficiency of Large Language Models", arXiv:2310.06201,
equations 1 to 3.) The question plays no part. Units are sentences or tokens, of all passages of a question together.

Where paper and code differ: the paper sums a unit's tokens, which keeps the long ones; the mean is its code's, and
ours. Its code reads each sentence by itself; here, as the paper has it, a token's condition is its passage up to there
[assumed: each passage is a text of its own, behind the token that begins a text, or one that ends one].

Deliberately absent: phrases, the paper's best unit, which take a parser of noun phrases.
"""

from collections.abc import Sequence
from itertools import accumulate

from thresher.common.errors import UserError
from thresher.engine.refiners.kinds import Unit
from thresher.engine.refiners.likelihood import Likelihood
from thresher.engine.refiners.spans import lines, most, sentences
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question


class SelectiveContext:
    """Under a policy, see the top of this file. UserError for a policy with no token that begins or ends a text."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer, keep: float, unit: Unit) -> None:
        self._likelihood, self._tokenizer = Likelihood(policy, tokenizer), tokenizer
        self._keep, self._unit = keep, unit
        self._begin = list(tokenizer.begin_ids)
        if not self._begin:
            config = policy.config
            marks = [config.bos_token_id, *config.eos_token_ids]
            self._begin = [token for token in marks if token is not None][:1]
        if not self._begin:
            raise UserError(
                "selective-context: the model names no token that begins or ends a text (bos_token_id, eos_token_id), "
                "so a passage's first token has nothing to follow; add one to its config.json"
            )

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._tokenizer.encode_batch(texts)]

    def refine(self, questions: Sequence[Question]) -> list[str]:
        texts = [passage.text for question in questions for passage in question.passages]
        encoded = iter(self._tokenizer.encode_batch(texts))
        ids = [[next(encoded) for _ in question.passages] for question in questions]
        flat = iter(self.self_information([one for passages in ids for one in passages]))
        return [
            self._kept(question, passages, [next(flat) for _ in passages])
            for question, passages in zip(questions, ids, strict=True)
        ]

    def self_information(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of each text's tokens, in nats. What is longer than the policy's context is read in stretches of that."""
        room = self._likelihood.longest - len(self._begin)
        sequences, owners = [], []
        for number, ids in enumerate(texts):
            for start in range(0, len(ids), room):
                sequence = [*self._begin, *ids[start : start + room]]
                sequences.append((sequence, list(range(len(self._begin), len(sequence)))))
                owners.append(number)
        found: list[list[float]] = [[] for _ in texts]
        for number, logprobs in zip(owners, self._likelihood.logprobs(sequences), strict=True):
            found[number] += [-value for value in logprobs]
        return found

    def _kept(self, question: Question, ids: list[list[int]], information: list[list[float]]) -> str:
        if self._unit == "token":
            keep = iter(most([value for values in information for value in values], self._keep))
            kept = ([token for token in one if next(keep)] for one in ids)
            return lines([[self._tokenizer.decode_bytes(one).decode("utf-8", "ignore")] for one in kept])
        spans = [sentences(passage.text) for passage in question.passages]
        scores = [
            self._of_sentences(passage.text, *parts)
            for passage, parts in zip(question.passages, zip(spans, ids, information, strict=True), strict=True)
        ]
        keep = iter(most([score for values in scores for score in values], self._keep))
        return lines(
            [
                [passage.text[start:end] for start, end in found if next(keep)]
                for passage, found in zip(question.passages, spans, strict=True)
            ]
        )

    def _of_sentences(
        self, text: str, spans: list[tuple[int, int]], ids: list[int], information: list[float]
    ) -> list[float]:
        """The mean over the tokens whose last byte lies in each span; 0 for a span without one."""
        ends = list(accumulate(len(self._tokenizer.token_bytes(token)) for token in ids))
        means, first = [], 0
        for _, end in spans:
            limit, behind = len(text[:end].encode("utf-8", "replace")), first
            while behind < len(ends) and ends[behind] <= limit:
                behind += 1
            means.append(sum(information[first:behind]) / max(behind - first, 1))
            first = behind
        return means
