"""Rewards of the search loops.

They are Search-R1 (exact match), ZeroSearch (F1), Eval-RAR (exact match, .1 for evaluating), AutoRefine (F1, .1 for
refining) and Tree-GRPO (exact match and form).

All consider the episode up to its final answer and read only POLICY segments, so an `<answer>gold</answer>` in a
passage or in the prompt earns nothing. A gold copied from a passage into an `<evaluate>` span does earn .1. Only
Tree-GRPO rewards the form.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from thresher.rewards.measures import answer_measures
from thresher.rewards.reward import RewardResult, Source, TextSegment
from thresher.rewards.tags import TagSpan, blocks, final_answer, up_to_answer
from thresher.rewards.text import Golds, contains_answer

EVALUATION_REWARD = REFINEMENT_REWARD = 0.1
_INSIDE = rb"(?:(?!</?(?:think|search|information|answer)>).)*+"
_TURN = re.compile(
    rb"\s*+<think>%b</think>\s*+<(search|answer)>%b</\1>(?:\s|<\|im_end\|>|<\|endoftext\|>)*+" % (_INSIDE, _INSIDE),
    re.DOTALL,
)


def valid_searches(pieces: Sequence[TextSegment]) -> list[TagSpan]:
    """Return the policy's closed `<search>` spans that contain a query, before the end of the episode."""
    return [span for span in blocks(up_to_answer(pieces), "search") if span.text]


def search_r1_reward(pieces: Sequence[TextSegment], golds: Golds) -> RewardResult:
    """Return Search-R1's reward: 1 if the final answer equals any gold after normalisation, else 0.

    Parts: answer (the reward), and the measures em, f1, answered (an `<answer>` was closed), searches (valid ones).
    """
    answer = final_answer(pieces)
    parts = _answer_parts(pieces, golds, answer)
    return RewardResult(float(parts["answer"]), parts, answer)


def zero_search_reward(pieces: Sequence[TextSegment], golds: Golds) -> RewardResult:
    """Return ZeroSearch's reward: F1 of the final answer. Parts: as `search_r1_reward`, with the F1 as answer."""
    answer = final_answer(pieces)
    parts = _answer_parts(pieces, golds, answer)
    parts["answer"] = float(parts["f1"])
    return RewardResult(float(parts["answer"]), parts, answer)


def eval_rar_reward(
    pieces: Sequence[TextSegment],
    golds: Golds,
    *,
    evaluation_reward: bool = True,
    count_before_search: bool = True,
    require_answer: bool = False,
    substring: bool = True,
) -> RewardResult:
    """Return Eval-RAR's reward (Eq. 5): 1 if the final answer equals a gold; else .1 if evaluations have one; else 0.

    As in Eqs. 3 and 4, the `<evaluate>` spans are concatenated, and a gold counts if it is a substring of that text:
    "art" is in "party", "no" in "know", "New York" in "New" and "York". Both are normalised, as for exact match, and a
    space is put between spans [assumed]. `substring=False`: each span is searched separately, for whole tokens and
    never for yes and no (see `contains_answer`).
    `evaluation_reward=False` is the paper's ablation (exact match only); `count_before_search=False` leaves out spans
    before the first valid search; `require_answer` gives 0 without a closed `<answer>`, as the released code does.

    Parts: answer (1 or 0) and evaluation (.1 or 0, for any answer), the larger of which is the reward. Measures: those
    of `search_r1_reward`, evaluations (closed spans that count), evaluate_contains (they contain a gold).
    """
    answer = final_answer(pieces)
    parts = _answer_parts(pieces, golds, answer)
    spans = blocks(up_to_answer(pieces), "evaluate")
    if not count_before_search:
        searches = valid_searches(pieces)
        spans = [span for span in spans if searches and span.start >= searches[0].end]
    texts = [span.text for span in spans]
    texts = [" ".join(texts)] if substring and texts else texts
    contains = any(contains_answer(text, golds, substring=substring) for text in texts)
    earns = evaluation_reward and contains and (answer is not None or not require_answer)
    parts |= {"evaluation": EVALUATION_REWARD if earns else 0.0}
    parts |= {"evaluations": len(spans), "evaluate_contains": contains}
    return RewardResult(max(float(parts["answer"]), float(parts["evaluation"])), parts, answer)


def autorefine_reward(
    pieces: Sequence[TextSegment],
    golds: Golds,
    *,
    accuracy: Literal["f1", "em"] = "f1",
    refinement_reward: bool = True,
    require_answer: bool = False,
    substring: bool = False,
) -> RewardResult:
    """Return AutoRefine's reward: the answer's F1 (or EM) if above 0; else .1 if a `<refine>` span has a gold; else 0.

    Each span is searched separately, for whole tokens and never for yes and no; `substring` as in `contains_answer`.
    `require_answer` is as in `eval_rar_reward`. `refinement_reward=False` is the ablation without retrieval rewards.

    Parts: answer (F1 or EM) and refinement (.1 or 0, for any answer). Measures: those of `search_r1_reward`,
    refinements (closed spans), refine_contains (one of them contains a gold).
    """
    answer = final_answer(pieces)
    parts = _answer_parts(pieces, golds, answer)
    parts["answer"] = float(parts[accuracy])
    spans = blocks(up_to_answer(pieces), "refine")
    contains = any(contains_answer(span.text, golds, substring=substring) for span in spans)
    earns = refinement_reward and contains and (answer is not None or not require_answer)
    parts |= {"refinement": REFINEMENT_REWARD if earns else 0.0}
    parts |= {"refinements": len(spans), "refine_contains": contains}
    return RewardResult(float(parts["answer"]) or float(parts["refinement"]), parts, answer)


def in_form(pieces: Sequence[TextSegment]) -> bool:
    """Return whether every turn is a thought and a search, and the last one a thought and an answer. Each is between
    its tags with only white space around, and only passages are between the turns."""
    begun = [piece for piece in pieces if piece.source is not Source.PROMPT]
    if any(piece.source is Source.FEEDBACK for piece in begun):
        return False
    turns = [
        _TURN.fullmatch(b"".join(piece.text for piece in own))
        for source, own in groupby(begun, lambda piece: piece.source)
        if source is Source.POLICY
    ]
    actions = [turn and turn[1] for turn in turns]
    return actions[-1:] == [b"answer"] and set(actions[:-1]) <= {b"search"}


def tree_grpo_reward(pieces: Sequence[TextSegment], golds: Golds, *, format_reward: bool = True) -> RewardResult:
    """Return Tree-GRPO's reward, as in its released code. It is 1 if the final answer equals any gold (.8 out of form);
    .2 for another answer (.1 out of form); 0 without an answer. `format_reward=False` is exact match alone.

    Parts: answer (1 or 0, for exact match) and format (1 or 0, see `in_form`). Measures: those of `search_r1_reward`.
    """
    answer = final_answer(pieces)
    parts = _answer_parts(pieces, golds, answer)
    formed = in_form(pieces)
    if not format_reward:
        reward = float(parts["answer"])
    elif parts["answer"]:
        reward = 1.0 if formed else 0.8
    else:
        reward = 0.0 if answer is None else 0.2 if formed else 0.1
    return RewardResult(reward, parts | {"format": float(formed)}, answer)


def _answer_parts(pieces: Sequence[TextSegment], golds: Golds, answer: str | None) -> dict[str, float | int | bool]:
    measures = answer_measures(answer, golds)
    return {"answer": float(measures["em"]), **measures, "searches": len(valid_searches(pieces))}
