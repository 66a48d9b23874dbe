"""The optimiser of a recipe, one step of it, and the learning rate of a step.

    optimizer_state_dtype
                   offload         weights that are trained    moments                       stepped
    float32        none            on the device               on the device                 there, by torch's AdamW
    float32        moments         on the device               in CPU memory, pinned         there, some rows at a time
    float32        masters         in CPU memory               in CPU memory                 there, by torch's AdamW
    8bit           any of them     as above                    as above, in 8 bits           where the weights are

Of several ranks each has its rows of the weights, and does the same with them. Where the weights lie is decided by
whoever loads them (training/weights.py).
"""

import math

import torch
from torch import nn

from thresher.engine.config.sections import OptimSection
from thresher.engine.optim.adamw import PartwiseAdamW


def make_optimizer(trained: nn.Module, optim: OptimSection, lr: float) -> torch.optim.Optimizer:
    """AdamW over all weights that are trained; norms and biases are not decayed."""
    learning = [p for p in trained.parameters() if p.requires_grad]
    decayed = [p for p in learning if p.dim() > 1]
    other = [p for p in learning if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": other, "weight_decay": 0.0}]
    # Masters are in CPU memory already; what has none, as SFT, keeps its weights and sends its moments there.
    there = optim.offload == "moments" or (optim.offload == "masters" and any(p.device.type != "cpu" for p in learning))
    if optim.optimizer_state_dtype == "float32" and not there:
        return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True)
    storage = torch.device("cpu") if there else None
    return PartwiseAdamW(
        groups, lr, optim.betas, optim.eps, eight_bit=optim.optimizer_state_dtype == "8bit", storage=storage
    )


def step_optimizer(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Step at `lr` on the gradients that there are, and give them up."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def scheduled_lr(lr: float, schedule: str, warmup_ratio: float, step: int, total_steps: int) -> float:
    """Linear warm-up over `warmup_ratio` of the steps, then constant, or linear or cosine down to 0 after the last.
    Steps are the optimiser's, counted from 0."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    if schedule == "linear":
        return lr * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return lr
