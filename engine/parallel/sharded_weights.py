"""`TrainedWeights` of which every rank holds some rows (shards.py): the same sum of gradients, made by all.

Backward puts the gradients into the shards, summed over the ranks, all but the head's. The loss adds that one up in a
buffer of [V, H], which is whole on each rank and is summed over them once a step; a tied embedding gets its other half
from backward.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from thresher.engine.config.sections import OptimSection
from thresher.engine.optim.master_weights import make_optimizer
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.parallel.shards import all_rows, free_outside, local, on_first, rows_of, whole_weights
from thresher.policy.model import Policy


class LocalRows(nn.Module):
    """The rows of a sharded policy's parameters that lie here, as plain parameters under the policy's names. They share
    its memory, so that a step of an optimiser on them is a step of the policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.by_name = {
            name: nn.Parameter(local(parameter), requires_grad=parameter.requires_grad)
            for name, parameter in policy.named_parameters()
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.by_name.items()


class ShardedWeights:
    """policy: sharded, its shards float32 (those of a frozen base in the dtype of the computation). rollout_policy: a
    whole one of the same shapes, which holds memory only within `rolling_out`. reference: sharded too, `policy` itself
    where that has adapters, or None."""

    def __init__(
        self, policy: Policy, rollout_policy: Policy, reference: Policy | None, optim: OptimSection, ranks: Ranks
    ) -> None:
        self.policy, self.rollout_policy, self.optim, self.ranks = policy, rollout_policy, optim, ranks
        self.sharded = dict(policy.named_parameters())
        self.rows = LocalRows(policy)
        self.module: nn.Module = self.rows
        self.gathers = [policy] if reference is None else [policy, reference]
        self.head_name = "embed_VH" if policy.untied_head_VH is None else "untied_head_VH"
        self._head_grad_VH: Tensor | None = None

    def rolling_out(self) -> AbstractContextManager[None]:
        return whole_weights(self.rollout_policy, self.policy)

    def most(self, count: int) -> int:
        return self.ranks.most(count)

    def head_gradient(self) -> Tensor | None:
        head_VH = self.policy.head_VH  # whole, since a forward has just gathered it
        if head_VH.requires_grad and self._head_grad_VH is None:
            self._head_grad_VH = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device)
        return self._head_grad_VH

    def collect(self) -> None:
        """Backward has done it."""

    @torch.no_grad()
    def complete(self) -> None:
        for name, parameter in self.sharded.items():
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                self.rows.by_name[name].grad = local(grad)
        if self._head_grad_VH is not None:
            self._add_summed(self.head_name, self._head_grad_VH)
            self._head_grad_VH = None

    def _add_summed(self, name: str, grad: Tensor) -> None:
        """Add to a parameter's gradient the sum over the ranks of `grad`, which has all of its rows."""
        sharded, rows = self.sharded[name], self.rows.by_name[name]
        assert isinstance(sharded, DTensor)
        summands = DTensor.from_local(grad, sharded.device_mesh, [Partial()], run_check=False)
        summed = local(summands.redistribute(placements=[Shard(0)])).to(rows.device)
        rows.grad = summed if rows.grad is None else rows.grad.add_(summed)

    @torch.no_grad()
    def clip(self, largest: float) -> float:
        """As torch's, of the gradients of all ranks."""
        grads = [rows.grad for rows in self.rows.parameters() if rows.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        torch.distributed.all_reduce(squares)
        norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.rows.parameters(), largest, norm.float())
        return float(norm)

    def refresh(self) -> None:
        """Rows that were stepped are the policy's own; what a forward has left gathered is of before."""
        for policy in self.gathers:
            free_outside(policy)

    def whole(self, optimizer: torch.optim.Optimizer) -> tuple[Policy, torch.optim.Optimizer] | None:
        """Gathered parameter by parameter, into rank 0's CPU memory. Every rank has state of the same parameters, empty
        shards included, or the collectives in this loop would not meet."""
        policy = on_first(self.policy, self.ranks)
        copy = None if policy is None else make_optimizer(policy, self.optim, self.optim.lr)
        into = {} if policy is None else dict(policy.named_parameters())
        for name, rows in self.rows.by_name.items():
            for what, here in optimizer.state.get(rows, {}).items():
                state = all_rows(here, self.sharded[name]) if here.dim() else here  # a count is one already
                if copy is not None:
                    copy.state[into[name]][what] = state.cpu()
        return None if policy is None or copy is None else (policy, copy)

    def held_here(self, name: str, state: Tensor) -> Tensor:
        """This rank's rows; what has another number of rows, as a count has none, is left as it is."""
        if not state.dim() or len(state) != len(self.sharded[name]):
            return state
        return state[rows_of(len(state), self.ranks)].clone()

    def buffers(self) -> list[Tensor]:
        return [] if self._head_grad_VH is None else [self._head_grad_VH]
