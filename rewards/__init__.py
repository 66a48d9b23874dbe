"""Rewards as pure functions of a transcript and the gold answers: tags, text measures, statistics, group advantages.

This package imports neither torch nor any folder except common. The reward of a paper is a file in papers/.
"""

from typing import TYPE_CHECKING

from thresher.common.errors import UserError
from thresher.common.renamed import moved_module, renamed
from thresher.rewards.advantages import group_advantages
from thresher.rewards.measures import (
    answer_measures,
    answer_recalled,
    char_f1,
    compression_ratio,
    ndcg_at,
    recall_at,
    relevance_scores,
    sub_em,
)
from thresher.rewards.papers.arena import arena_reward, naive_reward, parse_indices
from thresher.rewards.papers.evinote import evinote_claims, evinote_reward
from thresher.rewards.papers.eviomni import eviomni_reward
from thresher.rewards.papers.igpo import igpo_reward
from thresher.rewards.papers.search import autorefine_reward, eval_rar_reward, search_r1_reward, tree_grpo_reward
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment, count_words
from thresher.rewards.tags import blocks, escape_tags, final_answer, outline, tag_sequence, tag_strings
from thresher.rewards.text import contains_answer, exact_match, f1_score, normalize_answer

__all__ = [
    "RewardInput",
    "RewardResult",
    "Source",
    "TextSegment",
    "UserError",
    "answer_measures",
    "answer_recalled",
    "arena_reward",
    "autorefine_reward",
    "blocks",
    "char_f1",
    "compression_ratio",
    "contains_answer",
    "count_words",
    "escape_tags",
    "eval_rar_reward",
    "evinote_claims",
    "evinote_reward",
    "eviomni_reward",
    "exact_match",
    "f1_score",
    "final_answer",
    "group_advantages",
    "igpo_reward",
    "naive_reward",
    "ndcg_at",
    "normalize_answer",
    "outline",
    "parse_indices",
    "recall_at",
    "relevance_scores",
    "search_r1_reward",
    "sub_em",
    "tag_sequence",
    "tag_strings",
    "tree_grpo_reward",
]


if not TYPE_CHECKING:  # with which a type checker would accept any name
    _OLD = {"Attempt": RewardInput, "Piece": TextSegment}
    __getattr__ = renamed(__name__, _OLD)
    moved_module(f"{__name__}.attempt", {"Attempt": RewardInput, "RewardInput": RewardInput})
    moved_module(f"{__name__}.result", {"RewardResult": RewardResult})
    moved_module(f"{__name__}.transcript", _OLD | {"Source": Source, "TextSegment": TextSegment})
