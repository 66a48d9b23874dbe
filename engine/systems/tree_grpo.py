"""Tree-GRPO (Ji et al. 2025, arXiv 2509.21240): Search-R1's loop, sampled as trees and credited by their nodes.

    <think>..</think> <search>query</search>  ->  <information>passages</information>  ->  ..  ->  <answer>..</answer>

    M trees per question, each begun by one sample. L times N nodes of each are drawn, and a sample continues from each
    of them to its end: M (1 + N L) leaves. The advantage of a turn is the mean over the leaves below it of

        A = (R - mean_tree R) / std_tree R  +  (R - mean_all R) / std_all R

The trees are `rollout.trees` M and `rollout.tree_nodes` N (engine/rollout/trees.py), the advantage is `grpo.advantage =
"tree"` (rewards/credit.py); both work for any system.

    reward = 1 | .8   EM(answer, golds), in form | out of form       .2 | .1   another answer       0   none

In form: each turn is a thought and a search, the last a thought and an answer. Preset: the released code's script (M 2,
N 2, L 1; 512 questions per step in eight updates; lr 1e-6, warm-up over .285 of the steps; three searches and a turn
that may only answer; turns of 500 tokens; mean over tokens, the dual clip at 3 and the entropy's weight .001 of its
configuration; deviations divide by n - 1). 2,048 tokens for all turns [assumed]. The code samples with top-p .95; here
there is no top-p, because log-probs would then belong to another distribution.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thresher.engine.episode import System, pair_tags, read_preset, read_template
from thresher.engine.systems.search_r1 import search_loop
from thresher.rewards.papers.search import tree_grpo_reward
from thresher.rewards.reward import RewardInput, RewardResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """format_reward: the form counts; off: exact match alone."""

    format_reward: bool = True


def reward(attempt: RewardInput, format_reward: bool) -> RewardResult:
    return tree_grpo_reward(attempt.pieces, attempt.golds, format_reward=format_reward)


def system(options: Options) -> System:
    return System(
        name="tree_grpo",
        tags=pair_tags("think", "search", "information", "answer"),
        episode=search_loop,
        reward=partial(reward, format_reward=options.format_reward),
        template=read_template(Path(__file__).with_name("search_r1.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
    )
