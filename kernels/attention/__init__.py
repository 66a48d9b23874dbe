"""Attention in two forms that share one mathematics: whole sequences for training, new rows against a cache.
Imports: kernels/elementwise.

    varlen.py   sequences packed one after the other, differentiable: the update
    paged.py    rows against keys and values in blocks: the rollout
    backends/   the first by a library on CUDA, and the choice among them
"""
