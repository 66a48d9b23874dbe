"""Encoders: from text to vectors, learned or lexical, and the classifiers for pairs of texts.
Comes in: policy, rewards.
"""
