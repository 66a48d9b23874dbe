"""Each paper's reward, one file a paper or family of papers.

A new paper's reward may come in as a file: `RewardInput` in, `RewardResult` out, no model and no randomness of its own.
"""
