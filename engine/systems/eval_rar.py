"""Eval-RAR: Search-R1's loop, in which the model must evaluate what it retrieved before it goes on.

    <think>..</think> <search>query</search>  ->  <information>passages</information>
        ->  <evaluate>what settles the question, or what is still missing</evaluate>  ->  ..  ->  <answer>..</answer>

A turn ends at </search> or </answer> (the paper's Algorithm 1 prints the opening tags; the closing ones are meant). A
turn that does neither gets a line of feedback. N turns, whatever they hold [assumed 5: four searches, then one that
evaluates and answers].

    reward = 1    if EM(answer, golds)
             .1   else if a gold occurs in an <evaluate> span
             0    else

Preset: eps .2, G 5, lr 1e-6, k3 [assumed] with beta 1e-3, temperature 1 [assumed], 512 questions a step, 3 passages,
turns of 500 tokens, 2,048 for all [assumed]. The paper follows Search-R1 in what it does not print: two updates of 256
questions a step, and the warm-up of the lr over .285 of the steps, are those of Search-R1's script [assumed].
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
    """Switches of the reward: `evaluation_reward` off is the paper's ablation; the others are the points where the
    released code and the equation disagree (see rewards/papers/search.py). separate_evaluation: what came back is
    evaluated in a turn of its own, which ends at </evaluate> (or answers) and counts as none of the N."""

    evaluation_reward: bool = True
    count_before_search: bool = True
    require_answer: bool = False
    substring: bool = False
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
