"""Old names that a user's own file may import."""

import pytest

import thresher.engine.episode as episode
import thresher.rewards as rewards
import thresher.rewards.attempt as attempt
import thresher.rewards.transcript as transcript

RENAMED = [
    (episode, "Tools", "EpisodeConfig"),
    (episode, "Reprefill", "BranchPrompt"),
    (episode, "Kept", "KeptSpan"),
    (episode, "Fork", "SpawnBranches"),
    (episode, "Call", "SubCall"),
    (rewards, "Attempt", "RewardInput"),
    (rewards, "Piece", "TextSegment"),
    (attempt, "Attempt", "RewardInput"),
    (transcript, "Piece", "TextSegment"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_works_and_says_the_new_one(module: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is now called {new}$"):
        assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(module, "Nothing")  # noqa: B009
