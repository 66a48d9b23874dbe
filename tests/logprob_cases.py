"""Comparison of recorded log-probs with a forward over the finished sequence."""

from collections.abc import Iterable, Sequence
from copy import deepcopy

import torch
from exact_norms import exact_norms

from thresher.policy.model import Policy

# Ids, the places of the sampled tokens in them, their log-probs, and the temperature.
Written = tuple[Sequence[int], Sequence[int], Sequence[float], float]


@torch.no_grad()
@exact_norms()
def assert_logprobs_are_fresh(policy: Policy, vocab: int, sequences: Iterable[Written]) -> None:
    """Compare recorded log-probs, and those of a fresh forward, with the same weights' in float64.

    The error of the recorded ones may be four times that of the fresh forward over all its columns, as root mean
    squares. That of n values out of so many is larger by up to 3 / sqrt(n), four standard deviations.
    """
    exact = deepcopy(policy).double()
    errors, own = [], []
    for ids, places, recorded, temperature in sequences:
        ids_T, rows = torch.tensor(ids), torch.tensor(places, dtype=torch.int64)
        truth_TV, fresh_TV = (
            torch.log_softmax(model.logits(ids_T)[rows - 1, :vocab].to(dtype) / temperature, -1).double()
            for model, dtype in ((exact, torch.float64), (policy, torch.float32))
        )
        errors.append(torch.tensor(recorded, dtype=torch.float64) - truth_TV.gather(1, ids_T[rows][:, None])[:, 0])
        own.append((fresh_TV - truth_TV).flatten())
    error, of_fresh = (float(torch.cat(parts).square().mean().sqrt()) for parts in (errors, own))
    assert error <= 4 * (1 + 3 / sum(map(len, errors)) ** 0.5) * of_fresh
