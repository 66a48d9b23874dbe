"""`thresher extract`: a trained extractor or an agent turns passages into evidence, question by question.
Comes in: engine/assemble.py, engine/baselines, engine/config, engine/episode.py, engine/protocol, engine/rollout,
engine/scoring, engine/store, policy, retrieval/data, retrieval/questions.py, retrieval/retriever.py, rewards,
rewards/papers.
"""
