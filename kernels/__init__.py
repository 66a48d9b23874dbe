"""Computations on tensors: loss, log-probs, attention, sampling, layer operations. Each file begins with its maths.

A new file has a function of tensors and a reference to compare it with. Files here import only from each other and
from `common`.

    loss.py        the whole GRPO loss, the file to begin with; objective.py: its part after the vocabulary, and KL
    logprob.py     the head's forward alone; operands.py: checks of the operands, and the three products with the head
    head_triton.py, coefficients_triton.py    the same two stages in Triton
    layers.py      norms, rotation, gate; in Triton each is one kernel
    sampling.py    from hidden states to tokens; noise.py: the noise of a token; sampling_triton.py: sampling on a GPU
    delta/         the gated delta rule, linear attention with a state: in chunks, and token by token
    attention/     whole sequences for training, new tokens against the KV cache for generation; backends/: libraries
    registry.py    finds every *_triton.py and what it is compiled for (docs/add/kernel.md describes how to add one)
"""

from thresher.kernels.delta import gated_delta
from thresher.kernels.logprob import token_logprobs
from thresher.kernels.loss import grpo_loss

__all__ = ["gated_delta", "grpo_loss", "token_logprobs"]
