"""An untrained search loop: Search-R1's protocol with a model that never learned it.

The option `prompt` is "search_r1", that system's own template, or "search_o1", which asks a model that reasons at
length to do so freely and to search the moment it is unsure, within a number of searches, as Search-o1 (Li et al. 2025)
does. What that paper adds between search and context, a reading of the documents by the model, is `thresher extract
--loop agentic`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in, with_examples
from thresher.engine.episode import System
from thresher.engine.systems import load_system


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    prompt: Literal["search_r1", "search_o1"] = "search_r1"


def system(options: Options) -> System:
    base = load_system("search_r1", {})
    return replace(
        base,
        name="search_loop",
        reward=answer_reward,
        template=with_examples(base.template, options)
        if options.prompt == "search_r1"
        else built_in("search_o1", options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 5}},
    )
