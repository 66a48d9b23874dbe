"""From a policy and questions to trajectories and a table of measures, and two such tables compared.

A metric that every system shares, or another way to read two runs; a paper's own reward stays in rewards/papers.
"""
