"""Evaluation: trajectories of a policy for given questions, tables of measures, and comparisons of two such tables.

Metrics that all systems share belong here, and comparisons of runs; the reward of a paper belongs in rewards/papers.
"""
