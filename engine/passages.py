"""The passages that a prompt shows: those that came with the question, or those that a search for it finds.

Systems that answer in a single pass read their passages in the prompt, before anything is sampled. So this happens once
per question, before a rollout, and all samples of the question see the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from thresher.retrieval.formats import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever
from thresher.rewards.errors import UserError
from thresher.rewards.text import contains_answer


def with_passages(questions: Sequence[Question], retriever: Retriever | None, k: int) -> list[Question]:
    """The questions, those without passages given the `k` best that one call of the retriever finds.

    What is retrieved has no gold indices. UserError for a question without passages where there is no retriever.
    """
    bare = [question for question in questions if not question.passages]
    if not bare:
        return list(questions)
    if retriever is None:
        raise UserError(
            f"question {bare[0].id} comes with no passages, and there is nowhere to search for them; give questions "
            "with passages, or an index (retrieval.index, --index) or a server (retrieval.url)"
        )
    found = iter(retriever.search([question.question for question in bare], k))
    return [
        question if question.passages else replace(question, passages=tuple(hit.passage for hit in next(found)))
        for question in questions
    ]


def with_noise(questions: Sequence[Question], pool: Sequence[Passage], count: int, seed: int) -> list[Question]:
    """EviOmni's noise test: `count` irrelevant passages more for each question, at places drawn by (seed, question).

    Irrelevant is a passage of `pool` that the question does not show yet and that holds none of its gold answers. Gold
    indices follow their passages. UserError where the pool has too few.
    """
    return [_noisy(question, pool, count, seed) for question in questions] if count else list(questions)


def _noisy(question: Question, pool: Sequence[Passage], count: int, seed: int) -> Question:
    rng = Random(f"noise {seed} {question.id}")
    shown = {passage.text for passage in question.passages}
    added: list[Passage] = []
    for _ in range(100 * count):  # drawn rather than filtered: the pool may be all of Wikipedia
        if len(added) == count:
            break
        passage = pool[rng.randrange(len(pool))] if pool else None
        if passage and passage.text not in shown and not contains_answer(passage.text, question.golds):
            added.append(passage)
            shown.add(passage.text)
    if len(added) < count:
        raise UserError(
            f"question {question.id}: found only {len(added)} of {count} irrelevant passages among {len(pool)}; "
            "ask for less noise, or draw from a larger corpus"
        )
    gold = set(question.gold_indices or ())
    entries = [(passage, number in gold) for number, passage in enumerate(question.passages, start=1)]
    for passage in added:
        entries.insert(rng.randrange(len(entries) + 1), (passage, False))
    return replace(
        question,
        passages=tuple(passage for passage, _ in entries),
        gold_indices=None
        if question.gold_indices is None
        else tuple(number for number, (_, is_gold) in enumerate(entries, start=1) if is_gold),
    )
