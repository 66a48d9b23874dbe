"""From a policy and questions to trajectories and a table of measures, and two such tables compared.
Imports: engine/assemble.py, engine/baselines, engine/config, engine/console.py, engine/episode.py, engine/parallel,
engine/protocol, engine/rollout, engine/scoring, engine/store, engine/systems, policy, retrieval/data,
retrieval/indexes, retrieval/questions.py, retrieval/retriever.py, rewards, rewards/papers.

A metric that every system shares, or another way to read two runs; a paper's own reward stays in rewards/papers.
"""
