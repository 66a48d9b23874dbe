"""The engine: from questions to trajectories to gradients, a room for each stage.
Imports: engine/config, engine/protocol, engine/rollout, engine/scoring, engine/systems, policy, retrieval/data,
retrieval/indexes, retrieval/questions.py, retrieval/retriever.py, retrieval/serving, rewards.

A new stage may come in as a room; two names that users import, and that need no torch, are here.
"""

from thresher.engine.rollout.stop_tags import Hit, TagMatcher

__all__ = ["Hit", "TagMatcher"]
