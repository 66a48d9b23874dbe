"""`thresher study mask`: what masking of retrieved tokens costs, and what it does to the gradient.
Imports: engine/config, engine/console.py, engine/episode.py, engine/packing, engine/protocol, engine/reporting,
engine/store, engine/synthetic, kernels, policy, retrieval/data, rewards.
"""
