"""Rewards of the papers, one file per paper or family of papers.

Each is a function from `RewardInput` to `RewardResult`, without a model and without its own randomness.
"""
