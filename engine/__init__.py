"""The engine: from questions to trajectories to gradients. Names that need no torch are imported here."""

from thresher.engine.rollout.stop_tags import Hit, TagMatcher

__all__ = ["Hit", "TagMatcher"]
