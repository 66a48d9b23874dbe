"""The engine: from questions to trajectories to gradients.
Comes in: engine/config, engine/protocol, engine/rollout, engine/scoring, engine/systems, policy, retrieval/data,
retrieval/indexes, retrieval/questions.py, retrieval/retriever.py, retrieval/serving, rewards.

Names that need no torch are imported here.
"""

from thresher.engine.rollout.stop_tags import Hit, TagMatcher

__all__ = ["Hit", "TagMatcher"]
