"""Trajectories into packed batches: sequences of like length side by side, no row for what is not in the loss.

A row predicts the token after it. The rows that enter the loss are those whose next token was sampled by the policy;
all others never reach the LM head.
Axes: T packed tokens, R rows in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thresher.kernels.attention import Varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One sequence to train on: its ids, and for the trained ones (positions `rows`, each >= 1) what the loss needs."""

    ids: list[int]
    rows: list[int]
    old_logprobs: list[float]
    advantage: float
    weight: float  # of each of its rows in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Several items packed. rows_R points into the T packed tokens, at the token before each target."""

    ids_T: torch.Tensor
    layout: Varlen
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    old_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    weights_R: torch.Tensor
    items: list[int]  # which items, in the order packed

    @property
    def tokens(self) -> int:
        return len(self.ids_T)


def pack(items: Sequence[Item], micro_batch_tokens: int, device: torch.device | str = "cpu") -> list[Batch]:
    """Sort by length and cut into batches of at most `micro_batch_tokens` tokens, padding counted (always >= 1 item).

    The last token of a sequence predicts nothing that is trained and is left out. Items without rows are dropped.
    """
    order = sorted((n for n, item in enumerate(items) if item.rows), key=lambda n: (-len(items[n].ids), n))
    batches: list[list[int]] = []
    for n in order:
        if batches and len(items[batches[-1][0]].ids) * (len(batches[-1]) + 1) <= micro_batch_tokens:
            batches[-1].append(n)
        else:
            batches.append([n])
    return [_batch([items[n] for n in members], members, device) for members in batches]


def _batch(items: list[Item], members: list[int], device: torch.device | str) -> Batch:
    ids: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    for item in items:
        start = len(ids)
        rows.extend(start + row - 1 for row in item.rows)
        targets.extend(item.ids[row] for row in item.rows)
        ids.extend(item.ids[:-1])

    def per_row(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        ids_T=torch.tensor(ids, device=device),
        layout=Varlen([len(item.ids) - 1 for item in items], device),
        rows_R=torch.tensor(rows, device=device),
        targets_R=torch.tensor(targets, device=device),
        old_logprobs_R=per_row([value for item in items for value in item.old_logprobs]),
        advantages_R=per_row([item.advantage for item in items for _ in item.rows]),
        weights_R=per_row([item.weight for item in items for _ in item.rows]),
        items=members,
    )
