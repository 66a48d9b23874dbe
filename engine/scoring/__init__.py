"""Scoring: from a trajectory to an attempt, through judges, to a reward.
Comes in: engine/config, engine/episode.py, engine/protocol, engine/systems, policy, retrieval/data, retrieval/encoders,
retrieval/questions.py, retrieval/serving, rewards.
"""
