"""What an episode becomes in tokens: passages cut to fit, text encoded, segments with their sources.
Imports: engine/episode.py, policy, retrieval/data, retrieval/questions.py, retrieval/retriever.py, rewards.

Whatever decides which tokens a model sees may come in; nothing that computes with a model.
"""
