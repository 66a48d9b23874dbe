"""The engine: from questions to trajectories to gradients, a room for each stage.

A new stage may come in as a room; two names that users import, and that need no torch, are here.
"""

from thresher.engine.rollout.stop_tags import Hit, TagMatcher

__all__ = ["Hit", "TagMatcher"]
