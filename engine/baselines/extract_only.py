"""Extract-only: evidence from the passages without a rationale before it, then the answer from it.

It is the vanilla evidence that EviOmni's and LEAR's empirical study holds rational evidence against (Table 1): the same
prompt and the same tags less the reasoning. There its evidence has 100 tokens at most (`thresher extract
--evidence-tokens 100`).
"""

from thresher.engine.baselines.common import Options, answer_reward, built_in
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, System, pair_tags
from thresher.retrieval.questions import Question

__all__ = ["Options", "system"]


def episode(question: Question, tools: EpisodeConfig) -> Episode:
    yield Prompt(tools.template, question.question, question.passages)
    turn = yield Generate(stop=("</extract>",))
    if not turn.stopped_at("</extract>"):
        return "ended"
    turn = yield Generate(stop=("</answer>",))
    return "answered" if turn.inside("answer") else "ended"


def system(options: Options) -> System:
    return System(
        name="extract_only",
        tags=pair_tags("extract", "answer"),
        episode=episode,
        reward=answer_reward,
        template=built_in("extract_only", options, passages=True),
        preset={"retrieval": {"k": 5}, "rollout": {"max_turns": 2, "max_passage_tokens": 3072}},
        given_passages=True,
    )
