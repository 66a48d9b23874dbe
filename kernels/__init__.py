"""What is computed on tensors: loss, log-probs, attention, sampling, the parts of a layer. Maths on top of each file.

What may come in: a function of tensors with a reference to be held to. No file here imports from another room.

    loss.py        GRPO's loss, whole: where to begin; objective.py: its part after the vocabulary, and KL
    logprob.py     the head's forward alone; matmul.py: the three products with the head; checks.py: what is refused
    coefficients_triton.py, head/    the same two stages in Triton
    attention/     whole sequences for training, new tokens against the KV cache for generation; backends/: by libraries
    elementwise/   norms, rotation, gate; in Triton each is one kernel
    launch/        finds every *_triton.py, and what each is compiled for (docs/add/kernel.md adds one); who is served
    sampling.py    hidden states to a token; drawing/: by what rules, with what noise, and how on a GPU and on a CPU
"""

from thresher.kernels.logprob import token_logprobs
from thresher.kernels.loss import grpo_loss

__all__ = ["grpo_loss", "token_logprobs"]
