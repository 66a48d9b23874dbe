"""Kernels: each file holds the maths, a plain-torch reference and the backends that run it.
Comes in: nothing.
"""

from thresher.kernels.logprob import token_logprobs
from thresher.kernels.loss import grpo_loss

__all__ = ["grpo_loss", "token_logprobs"]
