"""Self-information against float64 logits of whole texts, and what is kept by it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from thresher.common.errors import UserError
from thresher.engine.refiners.selective_context import SelectiveContext
from thresher.engine.refiners.spans import most, sentences
from thresher.retrieval.data.formats import Passage
from thresher.retrieval.questions import Question

if TYPE_CHECKING:
    from thresher.policy.model import Policy
    from thresher.policy.tokenizer import Tokenizer

TEXTS = (
    "Anna Bell has birthplace Carl Dorn. Ida Jones has rival Mia Noor. Zürich – 東京!",
    "Eva Frost has spouse Karl Lund. Karl Lund has mayor Otto Pike.",
    "One",
)
QUESTION = Question("q0", "Who?", ("Carl Dorn",), passages=tuple(Passage(str(n), "", t) for n, t in enumerate(TEXTS)))


def exact(policy: Policy, begin: int, ids: list[int], vocab: int) -> list[float]:
    """-log p of each id behind `begin`, in float64."""
    with torch.no_grad():
        logits_TV = deepcopy(policy).double().logits(torch.tensor([begin, *ids]))[:-1, :vocab]
    return [-float(row_V.log_softmax(0)[token]) for row_V, token in zip(logits_TV, ids, strict=True)]


def test_self_information_is_that_of_float64(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    begin = tiny_policy.config.eos_token_ids[0]
    ids = [tiny_tokenizer.encode(text) for text in TEXTS]
    found = SelectiveContext(tiny_policy, tiny_tokenizer, 0.5, "token").self_information([*ids, []])
    truth = [exact(tiny_policy, begin, one, tiny_tokenizer.vocab_size) for one in ids]
    assert [len(one) for one in found] == [len(one) for one in ids] + [0]
    ours_T, truth_T = (torch.tensor([value for one in x for value in one]).double() for x in (found, truth))
    # Log-probs of float32 hidden states: a hundred roundings of logits of up to |z|.
    assert truth_T.std() > 0.5
    assert (ours_T - truth_T).abs().max() <= 100 * 2**-24 * truth_T.abs().max()


def test_what_is_longer_than_the_context_is_read_in_stretches(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refiner = SelectiveContext(tiny_policy, tiny_tokenizer, 0.5, "token")
    ids = tiny_tokenizer.encode(TEXTS[0])
    monkeypatch.setattr(refiner._likelihood, "longest", 11)
    (found,) = refiner.self_information([ids])
    parts = refiner.self_information([ids[start : start + 10] for start in range(0, len(ids), 10)])
    assert len(ids) > 20 and found == pytest.approx([value for part in parts for value in part], abs=1e-5)


@pytest.mark.parametrize("keep", [0.2, 0.6])
def test_sentences_and_tokens_that_are_kept(tiny_policy: Policy, tiny_tokenizer: Tokenizer, keep: float) -> None:
    """By hand: a sentence's score is the mean over the tokens that end in it, and all passages are one pool."""
    begin, vocab = tiny_policy.config.eos_token_ids[0], tiny_tokenizer.vocab_size
    scores, units, tokens, pieces = [], [], [], []
    for number, text in enumerate(TEXTS):
        ids = tiny_tokenizer.encode(text)
        information = exact(tiny_policy, begin, ids, vocab)
        tokens += information
        pieces += [(number, tiny_tokenizer.token_bytes(token)) for token in ids]
        at, owner = 0, []
        for token in ids:
            at += len(tiny_tokenizer.token_bytes(token))
            owner.append(next(n for n, (_, end) in enumerate(sentences(text)) if at <= len(text[:end].encode())))
        for place, (start, end) in enumerate(sentences(text)):
            own = [value for value, n in zip(information, owner, strict=True) if n == place]
            scores.append(sum(own) / len(own))
            units.append((number, text[start:end].strip()))
    for unit, values, found in (("sentence", scores, units), ("token", tokens, None)):
        kept = most(values, keep)
        expected = []
        for number in range(len(TEXTS)):
            if found is not None:
                line = " ".join(text for (n, text), k in zip(found, kept, strict=True) if k and n == number)
            else:
                joined = b"".join(piece for (n, piece), k in zip(pieces, kept, strict=True) if k and n == number)
                line = joined.decode("utf-8", "ignore").strip()
            expected += [line] if line else []
        refiner = SelectiveContext(tiny_policy, tiny_tokenizer, keep, unit)  # type: ignore[arg-type]
        bare = replace(QUESTION, passages=())
        assert refiner.refine([QUESTION, bare, QUESTION]) == ["\n".join(expected), "", "\n".join(expected)]


def test_everything_can_be_kept_and_what_nothing_precedes_is_refused(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    for unit in ("sentence", "token"):
        refiner = SelectiveContext(tiny_policy, tiny_tokenizer, 1.0, unit)  # type: ignore[arg-type]
        assert refiner.refine([QUESTION]) == ["\n".join(TEXTS)]
    assert refiner.count_tokens(TEXTS) == [len(tiny_tokenizer.encode(text)) for text in TEXTS]
    nameless = deepcopy(tiny_policy)
    nameless.config = tiny_policy.config.replace(eos_token_ids=())
    with pytest.raises(UserError, match="selective-context: the model names no token that begins or ends a text"):
        SelectiveContext(nameless, tiny_tokenizer, 0.5, "token")
