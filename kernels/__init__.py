"""Computations on tensors: loss, log-probs, attention, sampling, the parts of a layer. Each file begins with its maths.

New files: a function of tensors with a reference to be held to. No file here imports from another room.

    loss.py        GRPO's loss, whole: where to begin; objective.py: its part after the vocabulary, and KL
    logprob.py     the head's forward alone; operands.py: what is refused, and the three products with the head
    head_triton.py, coefficients_triton.py    the same two stages in Triton, and the choice of who computes the first
    layers.py      norms, rotation, gate; in Triton each is one kernel
    sampling.py    hidden states to a token; noise.py: the noise of a token; sampling_triton.py: on a GPU
    delta/         the gated delta rule, linear attention with a state: by chunks, and token by token
    attention/     whole sequences for training, new tokens against the KV cache for generation; backends/: by libraries
    registry.py    finds every *_triton.py, and what each is compiled for (docs/add/kernel.md adds one)
"""

from thresher.kernels.delta import gated_delta
from thresher.kernels.logprob import token_logprobs
from thresher.kernels.loss import grpo_loss

__all__ = ["gated_delta", "grpo_loss", "token_logprobs"]
