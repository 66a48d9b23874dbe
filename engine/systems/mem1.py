"""MEM1 (Zhou et al. 2025, arXiv:2506.15841): an agent whose context keeps only its last turn and the passages found.

    question  ->  <think>state</think> <search>query</search>
    question, last turn, <information>passages</information>  ->  <think>state</think> <search>query</search>
    ..                                                        ->  <think>state</think> <answer>..</answer>

The thought is the internal state, <IS> in the paper and <think> in its code. It must repeat all information of the last
state and the new passages that is still needed, because the context is folded after every search. A turn that neither
searches nor answers gets a line of feedback, and the context continues. The last of `max_turns` turns may only answer;
passages are shown with the number of turns left (`count_turns`), as in the code.

    reward = EM(answer, golds)

The paper trains one sequence with the positions of the whole sequence, and a 2-D attention mask hides pruned text from
later tokens. Here each context is a separate sequence, at the positions at which it was sampled, so a token has the
same log-prob in the update as when it was sampled.

Preset: the code's script, k 3, 128 questions per step in two updates of 64, 6 turns of 1,000 tokens, passages of 1,000,
KL 1e-3, lr 1e-6, warm-up over .05 of the steps. It trains by PPO with a critic, one sample per question; the group of 8
is [assumed]. Not implemented: tasks composed of several questions, on which the paper trains.
"""

from dataclasses import dataclass
from pathlib import Path

from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Feedback,
    Fold,
    Generate,
    KeptSpan,
    Prompt,
    Retrieved,
    Search,
    System,
    pair_tags,
    read_preset,
    read_template,
)
from thresher.engine.systems.search_r1 import AFTER, BEFORE, INVALID, reward
from thresher.retrieval.questions import Question


@dataclass(frozen=True, kw_only=True)
class Options:
    """fold: off keeps all turns in one context, which is Search-R1 with MEM1's prompt. count_turns: show the number of
    turns left with the passages."""

    fold: bool = True
    count_turns: bool = True


def system(options: Options) -> System:
    def episode(question: Question, config: EpisodeConfig) -> Episode:
        yield Prompt(config.template, question.question)
        end = 0  # of the last turn, as an offset in the bytes of all turns
        for left in reversed(range(config.max_turns)):
            turn = yield Generate(stop=("</search>", "</answer>"))
            start, end = end, end + len(turn.text)
            if turn.stopped_at("</answer>") and turn.inside("answer"):
                return "answered"
            if left == 0:
                break
            if not (turn.stopped_at("</search>") and (query := turn.inside("search"))):
                yield Feedback(INVALID)
                continue
            hits = yield Search(query)
            if options.fold:
                yield Fold(BranchPrompt(Prompt(config.template, question.question), (KeptSpan(start, end),)))
            turns = "1 turn is left: answer in it." if left == 1 else f"{left} turns are left."
            yield Retrieved(hits, f"{BEFORE}{turns}\n" if options.count_turns else BEFORE, AFTER)
        return "turns"

    return System(
        name="mem1",
        tags=pair_tags("think", "search", "information", "answer"),
        episode=episode,
        reward=reward,
        template=read_template(Path(__file__).with_name("mem1.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
    )
