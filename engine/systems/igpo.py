"""IGPO (Wang et al. 2025): Search-R1's loop; a turn is rewarded by the increase in the gold answer's probability.

    <think>..</think> <search>query</search>  ->  <information>passages</information>  ->  ..  ->  <answer>..</answer>

Before each turn the first gold answer is scored after an `<answer>` that the engine writes; neither stays in the
context (`Score`). Formulas are in rewards/papers/igpo.py. `grpo.advantage = "turn"` trains on the rewards of turns:

    A_t = sum_{k>=t} gamma^(k-t) r_k - the same of the group's others at turn t, a stopped one counting 0

The paper sums z-scores of the group's r_k (gains and outcomes together; in the script of its code separately). This
penalises a trajectory for continuing by the mean gain of later turns, which is biased (rewards/credit.py).

Preset, from its script: 10 turns, G 16, 32 questions per step in one update, lr 1e-6, k3 with beta 1e-3, gamma 1,
temperature 1, turns of 2,000 tokens, a context of 32,768, eps .2; 3 passages [assumed: it searches the web].
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thresher.engine.episode import (
    Episode,
    EpisodeConfig,
    Generate,
    Score,
    System,
    pair_tags,
    read_preset,
    read_template,
)
from thresher.engine.systems.search_r1 import search_loop
from thresher.retrieval.questions import Question
from thresher.rewards.papers.igpo import Gain, igpo_reward

OPENING = "\n<answer>"


@dataclass(frozen=True, kw_only=True)
class Options:
    """gain: reward of a turn, the difference of probabilities (the paper) or of log-probs (its code's script). score:
    off: the gold answer is not scored and turns have no gain, so a server can generate the turns too."""

    gain: Gain = "probability"
    score: bool = True


def scored_loop(question: Question, config: EpisodeConfig) -> Episode:
    """Yield the requests of Search-R1's episode, with a Score of the gold answer before each turn. There is no Score
    for a question without gold answers."""
    loop, answer = search_loop(question, config), None
    while True:
        try:
            request = loop.send(answer)
        except StopIteration as stop:
            return str(stop.value)
        if isinstance(request, Generate) and question.golds:
            yield Score(OPENING, f" {question.golds[0]}")
        answer = yield request


def system(options: Options) -> System:
    return System(
        name="igpo",
        tags=pair_tags("think", "search", "information", "answer"),
        episode=scored_loop if options.score else search_loop,
        reward=partial(igpo_reward, gain=options.gain),
        template=read_template(Path(__file__).with_name("search_r1.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
    )
