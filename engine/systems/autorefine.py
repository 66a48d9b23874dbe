"""AutoRefine (Shi et al. 2025): Search-R1's loop, with a refinement of the retrieved documents after each search.

    <think>..</think> <search>query</search>  ->  <documents>passages</documents>
        ->  <refine>what of them is of use</refine>  ->  ..  ->  <answer>..</answer>

A turn ends at </search> or </answer>: 5 searches, then one turn that may only answer (its code). A turn that neither
searches nor answers counts as a turn and gets a line of feedback, as in Search-R1.

    reward = F1(answer, golds)    if it is more than 0      (`accuracy` = "em": exact match)
             .1                   else if a gold occurs in a <refine> span
             0                    else

Preset: 3 passages, G 5, 256 questions per step in one update, lr 1e-6, k3 with beta 1e-3, temperature 1, turns of 512
tokens, a search's passages cut to 512, a context of 7,168 (all from its script), eps .2 [assumed], 3,072 tokens for all
turns [assumed].
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from thresher.engine.episode import System, pair_tags, read_preset, read_template
from thresher.engine.systems.search_r1 import search_loop
from thresher.rewards.papers.search import autorefine_reward
from thresher.rewards.reward import RewardInput, RewardResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """accuracy: reward of the answer, F1 or exact match. The other three are the ablation without the .1, and the
    points where the released code and the equation differ (see rewards/papers/search.py)."""

    accuracy: Literal["f1", "em"] = "f1"
    refinement_reward: bool = True
    require_answer: bool = False
    substring: bool = False


def reward(attempt: RewardInput, **switches: Any) -> RewardResult:
    return autorefine_reward(attempt.pieces, attempt.golds, **switches)


def system(options: Options) -> System:
    return System(
        name="autorefine",
        tags=pair_tags("think", "search", "documents", "refine", "answer"),
        episode=partial(search_loop, around=("\n\n<documents>", "</documents>\n\n")),
        reward=partial(reward, **asdict(options)),
        template=read_template(Path(__file__).with_name("autorefine.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        searches=True,
    )
