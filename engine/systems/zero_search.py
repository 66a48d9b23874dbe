"""ZeroSearch (Sun et al. 2025, arXiv:2505.04588): Search-R1's loop; in training a chat model answers the searches.

    <think>..</think> <search>query</search>  ->  the tool `search`: documents, useful or noisy
        ->  <information>documents</information>  ->  ..  ->  <answer>..</answer>

    reward = F1(answer, golds)

The tool is the recipe's [tools.search]: a chat model (`chat_url`), or a function that stands in for one. Its `noise` is
the curriculum, p_s and p_e (engine/rollout/simulated_search.py has the equation); in the paper's code it runs from 0 to
.5. Prompt and tags are Search-R1's, so a trained model can search a real index with `--system search_r1`.

Preset, from its code's script: G 5, 64 questions per step, lr 1e-6 with a warm-up over .95 of the steps, k3 with beta
1e-3, 5 searches and a turn that may only answer, turns of 500 tokens; 3,000 for all [assumed]. Its 320 trajectories are
split into mini-batches of 256; here there is one update per step. Fine-tuning of the simulator is not implemented: name
a tuned model, and its prompt in the tool's `template`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thresher.engine.episode import System, pair_tags, read_preset, read_template
from thresher.engine.systems.search_r1 import search_loop
from thresher.rewards.papers.search import zero_search_reward
from thresher.rewards.reward import RewardInput, RewardResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """answer_after_searches: as in Search-R1."""

    answer_after_searches: bool = True


def reward(attempt: RewardInput) -> RewardResult:
    return zero_search_reward(attempt.pieces, attempt.golds)


def system(options: Options) -> System:
    return System(
        name="zero_search",
        tags=pair_tags("think", "search", "information", "answer"),
        episode=partial(search_loop, answer_after_searches=options.answer_after_searches, tool="search"),
        reward=reward,
        template=read_template(Path(__file__).with_name("search_r1.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        searches=False,
        tools=("search",),
    )
