"""What an episode says, as tokens: messages, passages and tags rendered, and the trajectory that comes of it.
Comes in: engine/episode.py, policy, retrieval/data, retrieval/questions.py, retrieval/retriever.py, rewards.
"""
