"""Corpora, questions, encoders and indexes: from a query to the passages that may answer it.
Comes in: retrieval/data, rewards.

Start with data/corpus.py and questions.py for the files, retriever.py and indexes/index.py for searching,
building/commands.py for what the command line does.
"""
