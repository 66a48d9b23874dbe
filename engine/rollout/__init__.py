"""Sampling: episodes run side by side, with the scheduler, the KV cache and its blocks, and stop tags.
Imports: engine/episode.py, engine/protocol, kernels, policy, retrieval/questions.py, retrieval/retriever.py, rewards.
"""
