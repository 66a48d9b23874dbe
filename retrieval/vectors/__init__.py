"""Rows of numbers: files of them, exact and approximate search over them, with FAISS underneath.

May come in from below: policy, rewards, and of retrieval data and encoders."""
