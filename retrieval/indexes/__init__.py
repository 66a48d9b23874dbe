"""Searching: flat and approximate vectors, BM25 and hybrids, and the index folder they lie in.
Comes in: policy, retrieval/building, retrieval/data, retrieval/encoders, retrieval/retriever.py, rewards.
"""
