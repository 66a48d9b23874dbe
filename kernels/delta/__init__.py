"""The gated delta rule: linear attention with a state; and what surrounds it in a layer.

rule.py    the recurrence, and by chunks, forward and backward, over sequences that may begin where others ended
layer.py   what a layer does between its projections: causal convolution, gates, norms, the rule
steps.py   the rows of a rollout's step against the states that a cache holds
rule_triton.py and steps_triton.py: both on a GPU
"""

from thresher.kernels.delta.rule import gated_delta, reference_gated_delta

__all__ = ["gated_delta", "reference_gated_delta"]
