"""A trained extractor put to use: evidence from passages, read by other models or inside an agent's searches.
Imports: engine/assemble.py, engine/baselines, engine/config, engine/episode.py, engine/protocol, engine/refiners,
engine/rollout, engine/scoring, engine/store, engine/systems, policy, retrieval/data, retrieval/questions.py,
retrieval/retriever.py, rewards.

Another loop around an extractor may come in; how one is trained is its system's business.
"""
