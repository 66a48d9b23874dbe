"""Corpora, questions, encoders and indexes: from a query to the passages that may answer it.

Rooms, each importing from those before it: encoders and passages.py; corpus.py and questions.py; datasets and
retriever.py; indexes; building and serving. From outside: policy, rewards.
"""
