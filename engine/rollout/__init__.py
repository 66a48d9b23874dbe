"""Rollout: episodes run side by side, on the decoder. Branches of a trajectory, and its calls.
Imports: engine/console.py, engine/decoding, engine/episode.py, engine/protocol, kernels/attention/backends, policy,
retrieval/indexes, retrieval/questions.py, retrieval/retriever.py, retrieval/serving, rewards.
"""
