"""Evaluation: greedy episodes over held-out questions, shared metrics, tables, paired comparisons.
Comes in: engine/assemble.py, engine/baselines, engine/config, engine/console.py, engine/episode.py, engine/protocol,
engine/rollout, engine/scoring, engine/store, engine/systems, policy, retrieval/data, retrieval/questions.py,
retrieval/retriever.py, rewards, rewards/papers.
"""
