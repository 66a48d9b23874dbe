"""Rows of numbers: files of them, exact and approximate search over them, with FAISS underneath.

May come in: policy, rewards; of retrieval, encoders for the type of a vector.
"""
