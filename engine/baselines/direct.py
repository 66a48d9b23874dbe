"""Direct inference: the question, and the answer from the model's own knowledge."""

from thresher.engine.baselines.common import Options, answer_reward, built_in, one_turn
from thresher.engine.episode import System, pair_tags

__all__ = ["Options", "system"]


def system(options: Options) -> System:
    return System(
        name="direct",
        tags=pair_tags("answer"),
        episode=one_turn(),
        reward=answer_reward,
        template=built_in("direct", options),
        preset={"rollout": {"max_turns": 1}},
    )
