"""An untrained search loop: Search-R1's protocol with a model that never learned it."""

from dataclasses import replace

from thresher.engine.baselines.common import Options, answer_reward, with_examples
from thresher.engine.episode import System
from thresher.engine.systems import load_system

__all__ = ["Options", "system"]


def system(options: Options) -> System:
    base = load_system("search_r1", {})
    return replace(
        base,
        name="search_loop",
        reward=answer_reward,
        template=with_examples(base.template, options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 5}},
    )
