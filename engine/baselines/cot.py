"""Chain of thought (Wei et al. 2022), without examples unless some are given: step by step, then the answer.

Closed-book as in Search-R1's and Eval-RAR's tables; with `passages`, over documents as in EviOmni's.
"""

from dataclasses import dataclass

from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in, one_turn
from thresher.engine.episode import System, pair_tags


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """passages: show the question's passages, or those retrieved for it."""

    passages: bool = False


def system(options: Options) -> System:
    tags = pair_tags("think", "answer")
    if not options.passages:
        return System(
            name="cot",
            tags=tags,
            episode=one_turn(),
            reward=answer_reward,
            template=built_in("cot", options),
            preset={"rollout": {"max_turns": 1}},
        )
    return System(
        name="cot",
        tags=tags,
        episode=one_turn(lambda question: question.passages),
        reward=answer_reward,
        template=built_in("cot_passages", options, passages=True),
        preset={"retrieval": {"k": 5}, "rollout": {"max_turns": 1, "max_passage_tokens": 3072}},
        given_passages=True,
    )
