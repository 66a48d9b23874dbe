"""Log-probs of texts that somebody else wrote, under a policy: of chosen tokens of whole sequences, without gradients.

Deliberately absent: sampling, and log-probs of what was sampled, which a rollout records itself.
"""

from collections.abc import Sequence

import torch

from thresher.common.errors import UserError
from thresher.engine.packing import TrainSequence, pack
from thresher.kernels.attention.backends.choice import load_attention, resolve_attention
from thresher.kernels.logprob import token_logprobs
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}  # of one forward


class Likelihood:
    """A policy that says how likely tokens are. UserError where no attention serves it here."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.longest = policy.config.max_position_embeddings
        try:
            backend = resolve_attention("auto", policy.device, policy.dtype, policy.config.head_dim, "training")
        except ValueError as error:
            raise UserError(str(error)) from None
        self._attention = load_attention(backend)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """(ids, positions) -> the log-prob of the id at each of the positions, in nats, given all ids before it.

        Positions ascend and are 1 or more; a sequence is no longer than the policy's context. Greedy in nothing: the
        distribution is that of temperature 1 over the tokenizer's ids.
        """
        items = [
            TrainSequence(ids=ids, positions=positions, old_logprobs=[0.0] * len(positions), advantage=0.0, weight=0.0)
            for ids, positions in sequences
        ]
        found: list[list[float]] = [[] for _ in sequences]
        policy = self.policy
        for batch in pack(items, BATCH_TOKENS[policy.device.type], policy.device, self._attention):
            hidden_TH = policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)
            logprobs_R, _ = token_logprobs(
                batch.pick(hidden_TH), policy.head_VH, batch.targets_R, vocab_size=self.tokenizer.vocab_size
            )
            values = logprobs_R.tolist()
            for number in batch.items:
                count = len(items[number].positions)
                found[number], values = values[:count], values[count:]
        return found
