"""AdamW whose moments are held otherwise than torch holds them: in 8 bits, in CPU memory, or both.

The weights are worked on some rows at a time: the rows' moments are brought to the weights' device as float32, torch's
own fused AdamW steps them, and the moments are put away again. No more than those is ever there. With float32 moments
every value goes through the arithmetic of `torch.optim.AdamW`, and the bits are the same; the 8-bit ones are
quantised after the step, which itself takes the exact values (Dettmers et al. 2021, section 2; moments.py).

Matrices have 8-bit moments; vectors, which are norms and biases, keep float32 ones (in the paper: whatever has fewer
than 4,096 values). Rows of a parameter are independent of each other, so a rank that holds some of them
(engine/parallel) steps them as they would be stepped where all are together.
Deliberately absent: moments that travel while other rows are stepped; the copies wait for each other.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thresher.common.errors import UserError
from thresher.engine.optim.moments import blocks_of, dequantise, quantise

AT_A_TIME = 1 << 22  # values worked on, whole rows: 16 MiB in float32
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # and whether it has a sign


class PartwiseAdamW(torch.optim.Optimizer):
    """AdamW over dense float32 vectors and matrices. eight_bit: moments in 8 bits; storage: the device
    where they lie, None: that of the weights. In CPU memory, beside weights on CUDA, they are pinned."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        eight_bit: bool,
        storage: torch.device | None = None,
    ) -> None:
        self.eight_bit, self.storage = eight_bit, storage
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def state_like(self, param: Tensor, device: torch.device | str = "meta") -> dict[str, Tensor]:
        """A parameter's state before its first step, by name; on "meta" its shapes and dtypes alone."""
        eight_bit = self.eight_bit and param.dim() > 1
        pinned = torch.device(device).type == "cpu" and param.device.type == "cuda"

        def zeros(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(tuple(shape), dtype=dtype, device=device, pin_memory=pinned)

        state = {"step": torch.zeros((), dtype=torch.float32, device=device if str(device) == "meta" else param.device)}
        for name, _ in MOMENTS:
            state[name] = zeros(param.shape, torch.uint8 if eight_bit else torch.float32)
            if eight_bit:
                state[f"{name}_scale"] = zeros([len(param), blocks_of(param.shape[1])], torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The states alone, by the parameters' numbers, with the bits they have; torch's would make them float32."""
        params = [param for group in self.param_groups for param in group["params"]]
        for number, saved in state_dict["state"].items():
            param = params[number]
            self.state[param] = self.state_like(param, self.storage or param.device)
            for name, value in self.state[param].items():
                if name not in saved:
                    raise UserError(
                        f"the saved moments have no {name}; give the optim.optimizer_state_dtype they were saved with"
                    )
                value.copy_(saved[name])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step on the gradients that there are. closure: torch's signature has it; None."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param not in self.state:
                    self.state[param] = self.state_like(param, self.storage or param.device)
                state = self.state[param]
                rows = max(AT_A_TIME // max(param[:1].numel(), 1), 1)
                for start in range(0, len(param), rows):
                    self._step_rows(group, param, state, slice(start, start + rows))
                state["step"] += 1
        cuda = {param.device for param in self.state if param.device.type == "cuda"} if self.storage else ()
        for device in cuda:
            torch.cuda.current_stream(device).synchronize()  # or a checkpoint would read what is still under way

    def _step_rows(self, group: dict[str, Any], param: Tensor, state: dict[str, Tensor], rows: slice) -> None:
        moments = [_take(state, name, signed, rows, param.device) for name, signed in MOMENTS]
        adamw(
            [param[rows]],
            [cast(Tensor, param.grad)[rows]],
            moments[:1],
            moments[1:],
            [],
            [state["step"].clone()],  # which it counts up, each time that it is called
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for (name, signed), moment in zip(MOMENTS, moments, strict=True):
            _put(state, name, signed, rows, moment)


def _take(state: dict[str, Tensor], name: str, signed: bool, rows: slice, device: torch.device) -> Tensor:
    """Some rows of a moment on `device`, float32; the state's own memory where it is that already."""
    held = state[name][rows].to(device, non_blocking=True)
    if held.dtype == torch.float32:
        return held
    return dequantise(held, state[f"{name}_scale"][rows].to(device, non_blocking=True), signed)


def _put(state: dict[str, Tensor], name: str, signed: bool, rows: slice, moment: Tensor) -> None:
    held = state[name][rows]
    if held.dtype == torch.float32:
        if held.data_ptr() != moment.data_ptr() or held.device != moment.device:
            held.copy_(moment, non_blocking=True)
        return
    codes, scale = quantise(moment, signed)
    held.copy_(codes, non_blocking=True)
    state[f"{name}_scale"][rows].copy_(scale, non_blocking=True)
