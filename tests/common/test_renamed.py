"""Tests of old names that a user's own file may import."""

from importlib import import_module

import pytest

RENAMED = [
    ("engine.episode", "Tools", "engine.episode.EpisodeConfig"),
    ("engine.episode", "Reprefill", "engine.episode.BranchPrompt"),
    ("engine.episode", "Kept", "engine.episode.KeptSpan"),
    ("engine.episode", "Fork", "engine.episode.SpawnBranches"),
    ("engine.episode", "Call", "engine.episode.SubCall"),
    ("rewards", "Attempt", "rewards.reward.RewardInput"),
    ("rewards", "Piece", "rewards.reward.TextSegment"),
    ("rewards.attempt", "Attempt", "rewards.reward.RewardInput"),
    ("rewards.attempt", "RewardInput", "rewards.reward.RewardInput"),
    ("rewards.result", "RewardResult", "rewards.reward.RewardResult"),
    ("rewards.transcript", "Piece", "rewards.reward.TextSegment"),
    ("rewards.transcript", "Source", "rewards.reward.Source"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_works_and_says_the_new_one(module: str, old: str, new: str) -> None:
    home, name = f"thresher.{new}".rsplit(".", 1)
    found = import_module(f"thresher.{module}")
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is now thresher\.{new}$"):
        assert getattr(found, old) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(found, "Nothing")  # noqa: B009
