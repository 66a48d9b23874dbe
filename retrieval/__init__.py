"""Corpora, questions, encoders and indexes: from a query to the passages that may answer it.

Rooms, each importing from those before it: data, then questions.py and retriever.py, then datasets; encoders, vectors,
indexes, building; serving, whose client and wire need data and retriever.py alone. From outside: policy, rewards.
"""
