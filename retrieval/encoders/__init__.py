"""Texts to vectors, and pairs of texts to classes: hashed words, models of the BERT family, their tokenizers.

May come in: policy, rewards; no other room of retrieval.
"""
