"""Weights sharded over ranks by torch's fully_shard (FSDP2; Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277): each
rank holds a range of the rows of each parameter.

    forward     layer by layer: gather its parameters in the dtype of the computation, compute, free them again
    backward    the same, last layer first; then its gradients are summed over the ranks, each keeping its own rows
    head        the loss accumulates its gradient in a buffer of [V, H], whole on each rank, summed over ranks once per
                step; a tied embedding gets its other half from backward
    optimiser   on the shards, as on any parameters
    rollout     a whole copy in the dtype of the computation, gathered when a rollout begins and freed when it ends:
                decoding reads every weight once per token, and a captured graph holds their addresses

Rows are divided as torch.chunk does: ceil(rows / N) to each rank until none is left, so a short vector may have no rows
on the last ranks. Shards may be in CPU memory: each is then copied to the device before it is gathered, and its
gradient is copied back after the sum.

Deliberately absent: shards within one machine that are replicated across machines, and sharding within a layer.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Shard

from thresher.engine.config.sections import OptimSection
from thresher.engine.optim.master_weights import TrainedWeights, make_optimizer
from thresher.engine.parallel.ranks import Ranks
from thresher.policy.families import load_layer_class
from thresher.policy.lora import LoraSettings, add_lora
from thresher.policy.model import Policy, hf_views
from thresher.policy.weights import read_weights


class LocalRows(nn.Module):
    """This rank's rows of a sharded policy's parameters, as plain parameters under the policy's names. They share its
    memory, so an optimiser that steps them steps the policy."""

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


class ShardedWeights(TrainedWeights):
    """Weights of which each rank trains some rows.

    policy: sharded, with float32 shards (those of a frozen base in the dtype of the computation). rollout_policy: a
    whole one of the same shapes, which has memory only within `rolling_out`. reference: sharded too, `policy` itself if
    that has adapters, or None.
    """

    def __init__(
        self, policy: Policy, rollout_policy: Policy, reference: Policy | None, optim: OptimSection, ranks: Ranks
    ) -> None:
        self.rows = LocalRows(policy)
        super().__init__(policy, rollout_policy, self.rows)
        self.optim, self.ranks = optim, ranks
        self.sharded = dict(policy.named_parameters())
        self.gathers = [policy] if reference is None else [policy, reference]
        self.head_name = "embed_VH" if policy.untied_head_VH is None else "untied_head_VH"
        self._head_grad_VH: Tensor | None = None

    def rolling_out(self) -> AbstractContextManager[None]:
        return whole_weights(self.rollout_policy, self.policy)

    def max_over_ranks(self, count: int) -> int:
        return self.ranks.all_reduce_max(count)

    def head_gradient(self) -> Tensor | None:
        head_VH = self.policy.head_VH  # whole, since a forward has just gathered it
        if head_VH.requires_grad and self._head_grad_VH is None:
            self._head_grad_VH = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device)
        return self._head_grad_VH

    @torch.no_grad()
    def complete(self) -> None:
        for name, parameter in self.sharded.items():
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                self.rows.by_name[name].grad = local(grad)
        if self._head_grad_VH is None:
            return
        sharded, rows = self.sharded[self.head_name], self.rows.by_name[self.head_name]
        assert isinstance(sharded, DTensor)
        summands = DTensor.from_local(self._head_grad_VH, sharded.device_mesh, [Partial()], run_check=False)
        summed = local(summands.redistribute(placements=[Shard(0)])).to(rows.device)
        rows.grad = summed if rows.grad is None else rows.grad.add_(summed)
        self._head_grad_VH = None

    @torch.no_grad()
    def clip(self, largest: float) -> float:
        grads = [rows.grad for rows in self.rows.parameters() if rows.grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        torch.distributed.all_reduce(squares, group=self.ranks.group)
        norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.rows.parameters(), largest, norm.float())
        return float(norm)

    def refresh(self) -> None:
        """Free the parameters outside of the layers, which a forward has left gathered. The rows that the optimiser
        stepped are the policy's own, so nothing is copied."""
        for policy in self.gathers:
            assert isinstance(policy, FSDPModule)
            policy.reshard()

    def whole(self, optimizer: torch.optim.Optimizer) -> tuple[Policy, torch.optim.Optimizer] | None:
        """Gather parameter by parameter, into rank 0's CPU memory. Every rank must have state of the same parameters,
        empty shards included, since each takes part in every collective of this loop."""
        self.refresh()  # a forward since the last step has left parameters gathered
        policy = gather_on_main(self.policy, self.ranks)
        copy = None if policy is None else make_optimizer(policy, self.optim, self.optim.lr)
        into = {} if policy is None else dict(policy.named_parameters())
        for name, rows in self.rows.by_name.items():
            for what, here in optimizer.state.get(rows, {}).items():
                state = all_rows(here, self.sharded[name]) if here.dim() else here  # a count is whole already
                if copy is not None:
                    copy.state[into[name]][what] = state.cpu()
        return None if policy is None or copy is None else (policy, copy)

    def rows_here(self, name: str, state: Tensor) -> Tensor:
        """Return this rank's rows of `state`, or `state` itself if it is a count or has another number of rows."""
        if not state.dim() or len(state) != len(self.sharded[name]):
            return state
        return state[rows_of(len(state), self.ranks)].clone()

    def buffers(self) -> list[Tensor]:
        return [] if self._head_grad_VH is None else [self._head_grad_VH]


def load_sharded(
    folder: str | Path,
    like: Policy,
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    trained: bool,
    in_cpu_memory: bool = False,
    verify: bool = True,
) -> Policy:
    """Load the model in `folder`, sharded over ranks. It computes on the device and in the dtype of `like`; the shards
    are of `dtype`, on that device or in CPU memory.

    like: a whole policy of the same config; its adapters, if any, are sharded too, and only they are trained. Every
    rank reads the files layer by layer and keeps its rows. verify: check the files against their hashes. Errors as in
    `load_policy`.
    """
    lora = like.lora
    policy = _empty(like, dtype, lora)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(trained and (lora is None or ".adapters." in name))
    shapes = {name: view.shape for name, view in hf_views(policy).items()}
    _shard(policy, like.dtype, like.device, ranks, in_cpu_memory)
    optional = {"lm_head.weight"} if like.config.tie_word_embeddings else set[str]()
    policy.kept = dict(like.kept)
    shapes |= {name: tensor.shape for name, tensor in policy.kept.items()}
    tensors = dict(read_weights(folder, shapes, optional=optional, verify=verify))  # mapped, not yet read
    _fill(policy, tensors, dtype, ranks)
    if lora is not None:
        whole = dict(like.named_parameters())
        for name, parameter in policy.named_parameters():
            if ".adapters." in name:
                _put(parameter, whole[name].detach(), ranks)
    return policy


def _empty(like: Policy, dtype: torch.dtype, lora: LoraSettings | None) -> Policy:
    """Return a policy of the same shapes on the meta device."""
    with torch.device("meta"):
        policy = Policy(like.config)
    policy = policy.to(dtype)
    if lora is not None:
        add_lora(policy, **asdict(lora))
    return policy


def _shard(policy: Policy, compute: torch.dtype, device: torch.device, ranks: Ranks, in_cpu_memory: bool) -> None:
    """Shard every layer, and then the parameters outside of layers: embedding, last norm, head."""
    if ranks.group is None:
        mesh = init_device_mesh(device.type, (ranks.count,))
    else:
        mesh = DeviceMesh.from_group(ranks.group, device.type)
    # Sums of gradients are float32; a layer's inputs (rotations among them) stay in their dtype.
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.promote_types(compute, torch.float32), cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if in_cpu_memory else OffloadPolicy()
    for module in (*policy.layers, policy):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        assert isinstance(module, FSDPModule)
        # The loss's weights count all ranks' trajectories: gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum, which gloo supports too
    register_fsdp_forward_method(policy, "hidden")
    policy.to_empty(device="cpu" if in_cpu_memory else device)


@torch.no_grad()
def _fill(policy: Policy, tensors: Mapping[str, Tensor], dtype: torch.dtype, ranks: Ranks) -> None:
    """Copy this rank's rows of the files' tensors into its shards, with one layer in memory at a time."""
    outside = Policy(policy.config.replace(num_hidden_layers=0)).to(dtype)
    for name, view in hf_views(outside).items():
        view.copy_(tensors[name])
    for name, parameter in outside.named_parameters():
        _put(policy.get_parameter(name), parameter, ranks)
    layer_class = load_layer_class(policy.config.model_type)
    for index, layer in enumerate(policy.decoder_layers()):
        whole = layer_class.make(policy.config, index).to(dtype)
        for name, view in whole.hf_views().items():
            view.copy_(tensors[f"{policy.prefix}layers.{index}.{name}"])
        for name, parameter in whole.named_parameters():
            _put(layer.get_parameter(name), parameter, ranks)


def rows_of(total: int, ranks: Ranks) -> slice:
    """Return this rank's rows of a parameter of `total` rows."""
    each = -(-total // ranks.count)
    return slice(min(ranks.rank * each, total), min((ranks.rank + 1) * each, total))


@torch.no_grad()
def _put(parameter: Tensor, whole: Tensor, ranks: Ranks) -> None:
    local(parameter).copy_(whole[rows_of(len(whole), ranks)])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, sharing its memory; the tensor itself where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part.detach()


def all_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Gather the rows of all ranks on every rank, on its device. like: the sharded tensor that the rows belong to, or
    whose optimiser state they are."""
    assert isinstance(like, DTensor)
    shape = torch.Size((len(like), *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh = like.device_mesh
    here = rows.to(mesh.device_type)
    whole: Tensor = DTensor.from_local(
        here, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return whole


def gather_rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather all rows of a sharded tensor on every rank, cast to `dtype` before the collective."""
    return all_rows(local(tensor).to(dtype), tensor)


@contextmanager
def whole_weights(copy: Policy, sharded: Policy) -> Iterator[None]:
    """Fill `copy`, a policy of the same shapes, with the sharded weights within the block; then free its memory."""
    storages = [parameter.data.untyped_storage() for parameter in copy.parameters()]
    with torch.no_grad():
        for parameter, part, storage in zip(copy.parameters(), sharded.parameters(), storages, strict=True):
            storage.resize_(parameter.nbytes)
            parameter.data.copy_(gather_rows(part, parameter.dtype))
    try:
        yield
    finally:
        for storage in storages:
            storage.resize_(0)


@torch.no_grad()
def gather_on_main(sharded: Policy, ranks: Ranks) -> Policy | None:
    """Return the whole policy on rank 0's CPU, to be saved; None elsewhere."""
    policy = _empty(sharded, sharded.dtype, sharded.lora).to_empty(device="cpu") if ranks.is_main else None
    into = {} if policy is None else dict(policy.named_parameters())
    for name, parameter in sharded.named_parameters():
        value = gather_rows(parameter, parameter.dtype)
        if ranks.is_main:
            into[name].data.copy_(value)
            into[name].requires_grad_(parameter.requires_grad)
    if policy is not None:
        policy.kept = sharded.kept
    return policy
