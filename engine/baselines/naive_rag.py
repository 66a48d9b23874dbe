"""Naive RAG: the k best passages for the question, and the answer from them.

Retrieval comes before the prompt, with the question as its query. Of passages that came with the question the first k
are shown: the best ones where a retriever put them there, any others where a data set mixed them (`full_passages` is
the baseline for those).
"""

from dataclasses import dataclass

from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in, one_turn
from thresher.engine.config.tables import Count
from thresher.engine.episode import System, pair_tags


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """k: passages shown, at most."""

    k: Count = 5


def system(options: Options) -> System:
    return System(
        name="naive_rag",
        tags=pair_tags("answer"),
        episode=one_turn(lambda question: question.passages[: options.k]),
        reward=answer_reward,
        template=built_in("passages", options, passages=True),
        preset={"retrieval": {"k": options.k}, "rollout": {"max_turns": 1, "max_passage_tokens": 3072}},
        given_passages=True,
    )
