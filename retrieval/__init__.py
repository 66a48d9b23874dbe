"""Corpora, questions, encoders and indexes: from a query to the passages that may answer it.

In order of imports: encoders and passages.py; corpus.py and questions.py; datasets and retriever.py; indexes; building
and serving.
"""
