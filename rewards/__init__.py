"""Rewards as pure functions of a transcript and the gold answers: text measures, tags, advantages.

Imports neither torch nor any other folder, so that everything above may use it.
"""

from thresher.rewards.advantages import group_advantages
from thresher.rewards.errors import UserError
from thresher.rewards.result import RewardResult
from thresher.rewards.search import eval_rar_reward, search_r1_reward
from thresher.rewards.tags import blocks, final_answer, neutralise, tag_sequence, tag_strings
from thresher.rewards.text import contains_answer, exact_match, f1_score, normalize_answer
from thresher.rewards.transcript import Piece, Source

__all__ = [
    "Piece",
    "RewardResult",
    "Source",
    "UserError",
    "blocks",
    "contains_answer",
    "eval_rar_reward",
    "exact_match",
    "f1_score",
    "final_answer",
    "group_advantages",
    "neutralise",
    "normalize_answer",
    "search_r1_reward",
    "tag_sequence",
    "tag_strings",
]
