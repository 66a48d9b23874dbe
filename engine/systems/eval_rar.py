"""Eval-RAR: Search-R1's loop, in which the model must evaluate the retrieved passages after each search.

    <think>..</think> <search>query</search>  ->  <information>passages</information>
        ->  <evaluate>what settles the question, or what is still missing</evaluate>  ->  ..  ->  <answer>..</answer>

A turn ends at </search> or </answer> (the paper's Algorithm 1 prints the opening tags; the closing ones are meant). In
lines 17 and 18 of Algorithm 1 the evaluation is sampled separately and is not one of the N steps; here the next turn
begins with it, unless `separate_evaluation` is set. A turn that neither searches nor answers gets a line of feedback.
There are N turns of any kind [assumed 5: four searches, then one that evaluates and answers].

    reward = 1    if EM(answer, golds)
             .1   else if a gold is a substring of the <evaluate> spans, concatenated (Eqs. 3 and 4)
             0    else

Preset: eps .2, G 5, lr 1e-6, k3 [assumed] with beta 1e-3, temperature 1 [assumed], 512 questions per step, 3 passages,
turns of 500 tokens, 2,048 for all [assumed]. The paper follows Search-R1 where it states no value: two updates of 256
questions per step, and the lr warm-up over .285 of the steps, are those of Search-R1's script [assumed].
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from thresher.engine.episode import System, pair_tags, read_preset, read_template
from thresher.engine.systems.search_r1 import search_loop
from thresher.rewards.papers.search import eval_rar_reward
from thresher.rewards.reward import RewardInput, RewardResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """Switches of the reward and the loop. `evaluation_reward` off is the paper's ablation; with the defaults of
    the next three the equations hold (see rewards/papers/search.py). separate_evaluation: passages are evaluated in a
    separate turn, which ends at </evaluate> (or answers) and does not count among the N."""

    evaluation_reward: bool = True
    count_before_search: bool = True
    require_answer: bool = False
    substring: bool = True
    separate_evaluation: bool = False


def reward(attempt: RewardInput, **switches: bool) -> RewardResult:
    return eval_rar_reward(attempt.pieces, attempt.golds, **switches)


def system(options: Options) -> System:
    switches = asdict(options)
    del switches["separate_evaluation"]
    return System(
        name="eval_rar",
        tags=pair_tags("think", "search", "information", "evaluate", "answer"),
        episode=partial(search_loop, behind_information="</evaluate>" if options.separate_evaluation else None),
        reward=partial(reward, **switches),
        template=read_template(Path(__file__).with_name("eval_rar.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
    )
