"""R1, the search papers' baseline: GRPO on questions alone, with nothing to read and nothing to search.

    question  ->  <think>..</think> <answer>..</answer>

    reward = EM(answer, golds)

Prompt and episode are those of naive_grpo with `passages` off; reward and preset are Search-R1's (eps .2, G 5, lr 1e-6,
k3 with beta 1e-3, 512 questions a step in two updates of 256), so that the two differ by the searches alone. ARENA's
baseline of this kind is naive_grpo itself.
"""

from dataclasses import dataclass, replace

from thresher.engine.episode import System
from thresher.engine.systems import naive_grpo, search_r1


@dataclass(frozen=True, kw_only=True)
class Options:
    """It has no switches."""


def system(options: Options) -> System:
    closed = naive_grpo.system(naive_grpo.Options(passages=False))
    preset = {section: dict(values) for section, values in search_r1.system(search_r1.Options()).preset.items()}
    preset["rollout"]["max_turns"] = 1
    return replace(closed, name="r1", reward=search_r1.reward, preset=preset)
