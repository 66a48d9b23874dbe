"""Full passages: all that came with the question, in their order, and the answer from them; nothing is picked out."""

from thresher.engine.baselines.common import Options, answer_reward, built_in, one_turn
from thresher.engine.episode import System, pair_tags

__all__ = ["Options", "system"]


def system(options: Options) -> System:
    return System(
        name="full_passages",
        tags=pair_tags("answer"),
        episode=one_turn(lambda question: question.passages),
        reward=answer_reward,
        template=built_in("passages", options, passages=True),
        preset={"retrieval": {"k": 5}, "rollout": {"max_turns": 1, "max_passage_tokens": 3072}},
        given_passages=True,
    )
