"""The entailment judge, a local model: the probability that a text (the premise) makes a claim (the hypothesis) true.

A reward that needs one (EviNote-RAG's) is handed the number, so judges live in the engine and rewards stay pure. A
judge is a trained classifier, from a folder of weights, or, where none is given, the overlap of words: a stand-in that
lets a run and its tests work without weights. It is no measure of entailment, can be beaten by a list of names that
holds the answer, and says what it is by its name, which belongs in every output that holds its numbers.

What was judged is remembered by the two texts' digest: samples of one question write the same note often enough, and a
probability does not depend on the pairs beside it (on CUDA but for rounding, see retrieval/encoders/classifier.py).

Deliberately absent: the claims themselves, which are the system's business (`System.claims`), and verdicts of a chat
model (engine/scoring/verdicts.py).
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch

from thresher.common import console
from thresher.engine.config.sections import JudgeSection
from thresher.retrieval.encoders.classifier import load_classifier
from thresher.rewards.papers.evinote import CLAIM

Pair = tuple[str, str]

_OF_A_QUESTION = CLAIM.partition("{gold}")[2].partition("{question}")[0]  # between answer and question
_WORD = re.compile(r"\w+")
_NEGATIONS = frozenset(["no", "not", "never", "none", "nobody", "nothing", "neither", "nor", "without", "cannot"])
# Words that say nothing of what a claim is about. "answer" is one, for every claim of the form "X is the answer to 'Q'"
# holds it and no note has to.
_FUNCTION_WORDS = frozenset(
    _WORD.findall(
        """
        a an the this that these those and or as of in on at to for from by with there answer
        is are was were be been being am do does did has have had
        it its he his she her they them their who whom whose what which when where why how
        """
    )
)


class EntailmentJudge(Protocol):
    """name: what to call it in outputs."""

    @property
    def name(self) -> str: ...

    def probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        """P(premise entails hypothesis), in [0, 1], for each (premise, hypothesis)."""
        ...


class LexicalJudge:
    """The stand-in: the share of the hypothesis's words that the premise holds, squared, and halved where one of the
    two denies and the other does not.

    Of a claim "X is the answer to 'Q'" that is times the share of X's own words, those that are not in Q: a note that
    repeats the question has said nothing, and gets 0. So does every note where X has no word of its own, as in "Which
    is larger, X or Y?".

    Words of grammar and negations do not count, unless the hypothesis has no others. The square tells "nearly all" from
    "most", which the share alone puts side by side. An empty premise or hypothesis gives 0.
    """

    name = "lexical overlap (stand-in for an entailment classifier)"

    def probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        return [_overlap(premise, hypothesis) for premise, hypothesis in pairs]


def _overlap(premise: str, hypothesis: str) -> float:
    has, claimed = _words(premise), _words(hypothesis)
    wanted = _counted(claimed)
    if not wanted:
        return 0.0
    share = (len(wanted & has) / len(wanted)) ** 2
    answer, of_a_question, question = hypothesis.partition(_OF_A_QUESTION)
    if of_a_question:
        own = _counted(_words(answer)) - _words(question)
        share *= len(own & has) / max(1, len(own))
    return share * (1.0 if has.isdisjoint(_NEGATIONS) == claimed.isdisjoint(_NEGATIONS) else 0.5)


def _counted(words: set[str]) -> set[str]:
    return words - _FUNCTION_WORDS - _NEGATIONS or words


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower().replace("’", "'").replace("n't", " not")))


class ModelJudge:
    """An NLI classifier of the BERT family. `cut` counts the pairs so far whose premise lost its end to `max_tokens`.

    Arguments as `load_classifier`; UserError as there, and for a classifier in whose labels entailment cannot be found.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        labels: Sequence[str] | None = None,
        max_tokens: int | None = None,
        batch_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._classifier = load_classifier(
            folder, labels=labels, max_tokens=max_tokens, batch_tokens=batch_tokens, device=device
        )
        self._entailment = self._classifier.entailment
        self.name = f"entailment by {Path(folder).name}"

    @property
    def cut(self) -> int:
        return self._classifier.cut

    def probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        """As EntailmentJudge; all pairs of a call share batches. UserError as `Classifier.logits`."""
        with console.stage("claims", len(pairs)) as line:
            logits_BO = self._classifier.logits(pairs, lambda done: line.at(done, str))
        found: list[float] = logits_BO.softmax(-1)[:, self._entailment].tolist()
        return found


class RememberingJudge:
    """Another judge behind a memory of the last `size` pairs; equal pairs of one call are judged once.

    hits: pairs answered without the judge, since the beginning.
    """

    def __init__(self, judge: EntailmentJudge, size: int) -> None:
        self.judge = judge
        self.hits = 0
        self._size = size
        self._known: OrderedDict[bytes, float] = OrderedDict()

    @property
    def name(self) -> str:
        return self.judge.name

    def probabilities(self, pairs: Sequence[Pair]) -> list[float]:
        keys = [_digest(pair) for pair in pairs]
        fresh = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._known}
        found = {key: self._known[key] for key in keys if key not in fresh}
        if fresh:
            found |= zip(fresh, self.judge.probabilities(list(fresh.values())), strict=True)
        self.hits += len(pairs) - len(fresh)
        for key in found:
            self._known[key] = found[key]
            self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)
        return [found[key] for key in keys]


def _digest(pair: Pair) -> bytes:
    """16 bytes for a pair, so that memory is bounded whatever the texts' length; half a UTF-16 pair is let pass."""
    premise, hypothesis = (text.encode("utf-8", "surrogatepass") for text in pair)
    return blake2b(len(premise).to_bytes(8, "little") + premise + hypothesis, digest_size=16).digest()


def load_judge(section: JudgeSection) -> EntailmentJudge:
    """The judge of a recipe's [judge]: a classifier where `entailment` names its folder, else the stand-in, which needs
    no memory."""
    if section.entailment is None:
        return LexicalJudge()
    judge = ModelJudge(
        section.entailment,
        labels=section.labels,
        max_tokens=section.max_tokens,
        batch_tokens=section.batch_tokens,
        device=section.device,
    )
    return RememberingJudge(judge, section.cache_size) if section.cache_size else judge
