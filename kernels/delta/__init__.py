"""The gated delta rule, linear attention with a state, and the operations around it in a layer.

rule.py    the recurrence, and the chunked form, forward and backward; a sequence may begin where another ended
layer.py   the operations around the rule: causal convolution, gates, norms
steps.py   a rollout's new rows against the states in the cache
rule_triton.py, layer_triton.py, steps_triton.py: the same three on a GPU
"""

from thresher.kernels.delta.rule import gated_delta, reference_gated_delta

__all__ = ["gated_delta", "reference_gated_delta"]
