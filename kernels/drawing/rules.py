"""How each row of a batch draws: temperature, then top-k, then top-p, then min-p.

A filter keeps the logits from some value up, so equal ones stand or fall together, and what a row keeps depends on that
row alone. All three at once are therefore one number a row, its cutoff.

Axes: B sequences that draw a token, V vocabulary (docs/notation.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TINY = np.finfo(np.float32).tiny  # the smallest normal number; its reciprocal is normal, too
_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class DrawRules:
    """One entry a row, on the logits' device, and what the host knows of all rows without asking the device.

    top-k keeps the k largest logits; top-p the fewest of these, largest first, that have p of their probability; min-p
    those with min_p of the largest probability. The largest logit is always kept.
    """

    temperature_B: Tensor  # float32; 0: greedy
    top_k_B: Tensor  # int64; 0: off
    top_p_B: Tensor  # float32; 1: off
    min_p_B: Tensor  # float32; 0: off
    temperature: float | None  # every row's; None: they may differ
    filtered: bool  # whether any row may have a filter

    @classmethod
    def uniform(cls, temperature: float, count: int, device: torch.device | str = "cpu") -> "DrawRules":
        """`count` rows of one temperature, without filters."""
        _check(np.array([temperature]), np.zeros(1), np.ones(1), np.zeros(1))
        temperature_B, top_k_B, top_p_B, min_p_B = (
            torch.full((1,), value, dtype=dtype, device=device).expand(count)
            for value, dtype in zip((temperature, 0, 1, 0), _DTYPES, strict=True)
        )
        return cls(temperature_B, top_k_B, top_p_B, min_p_B, temperature=float(temperature), filtered=False)

    @classmethod
    def of(
        cls,
        temperature_B: Tensor,
        top_k_B: Tensor,
        top_p_B: Tensor,
        min_p_B: Tensor,
        host: Sequence[npt.NDArray[Any]] | None = None,
    ) -> "DrawRules":
        """Rows that differ. host: the same four as arrays, which are looked at in the tensors' place; needed unless
        these are on a CPU."""
        tensors = (temperature_B, top_k_B, top_p_B, min_p_B)
        if tuple(x.dtype for x in tensors) != _DTYPES:
            raise ValueError(f"rules are {list(_DTYPES)}, not {[x.dtype for x in tensors]}")
        if temperature_B.dim() != 1 or len({(x.shape, x.device) for x in tensors}) != 1:
            shapes = [f"{tuple(x.shape)} on {x.device}" for x in tensors]
            raise ValueError(f"rules are four vectors of one length on one device, not {shapes}")
        if host is None:
            if temperature_B.device.type != "cpu":
                raise ValueError(f"rules on {temperature_B.device} need `host`, the same four as arrays")
            host = [x.numpy() for x in tensors]
        if [x.shape for x in host] != [tuple(temperature_B.shape)] * 4:
            raise ValueError(f"`host` has shapes {[x.shape for x in host]}, the rules {tuple(temperature_B.shape)}")
        temperature, top_k, top_p, min_p = host
        _check(temperature, top_k, top_p, min_p)
        alike = len(temperature) > 0 and bool((temperature == temperature[0]).all())
        filtered = bool((top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any())
        one = float(temperature[0]) if alike else None
        return cls(temperature_B, top_k_B, top_p_B, min_p_B, temperature=one, filtered=filtered)

    def __len__(self) -> int:
        return len(self.temperature_B)

    def take(self, index_B: Tensor) -> "DrawRules":
        """The rules of these rows (int64); a row may be named more than once."""
        tensors = (self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)
        alike = self.temperature is not None and not self.filtered  # then nothing need be gathered
        temperature_B, top_k_B, top_p_B, min_p_B = (
            x[:1].expand(len(index_B)) if alike else x.index_select(0, index_B) for x in tensors
        )
        return DrawRules(temperature_B, top_k_B, top_p_B, min_p_B, self.temperature, self.filtered)

    @property
    def divisor_B(self) -> Tensor | None:
        """The temperature, with 1 for greedy rows; None: no row's logits are divided."""
        if self.temperature is not None:
            return None if self.temperature in (0.0, 1.0) else self.temperature_B
        return torch.where(self.temperature_B > 0, self.temperature_B, 1.0)

    @property
    def filtered_B(self) -> Tensor:
        """Which rows have a filter that matters: greedy ones have none, for every filter keeps the largest."""
        on_B = (self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0)
        return on_B & (self.temperature_B > 0)


def divides_in_float32(temperature: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether logits can be divided by these: the float32 value and its reciprocal are normal numbers, above 0."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        rounded = temperature.astype(np.float32)
        fits: npt.NDArray[np.bool_] = (rounded >= TINY) & (1 / rounded >= TINY)
    return fits


def _check(
    temperature: npt.NDArray[Any], top_k: npt.NDArray[Any], top_p: npt.NDArray[Any], min_p: npt.NDArray[Any]
) -> None:
    divides = (temperature == 0) | divides_in_float32(temperature)
    for name, values, right, wanted in (
        ("temperature", temperature, divides, "0, or a normal float32 number whose reciprocal is one"),
        ("top_k", top_k, top_k >= 0, "0 or more"),
        ("top_p", top_p, (top_p >= TINY) & (top_p <= 1), "above 0 in float32 and at most 1"),
        ("min_p", min_p, (min_p >= 0) & (min_p <= 1), "from 0 to 1"),
    ):
        if not right.all():
            raise ValueError(f"{name} is {values[~right][0]}; it has to be {wanted}")


def cutoffs(z_BV: Tensor, rules: DrawRules) -> Tensor:
    """The smallest logit that each row's filters keep, [B]: one of the row's own, so that comparing with it is exact.
    z_BV: logits / temperature."""
    if z_BV.device.type == "cpu":  # to sort a row of 151,936 takes torch 20 ms and NumPy .4
        sorted_BV = torch.from_numpy(np.sort(z_BV.numpy(), axis=1)).flip(1)
    else:
        sorted_BV = z_BV.sort(dim=1, descending=True).values
    columns = z_BV.shape[1]
    k_B = torch.where(rules.top_k_B > 0, rules.top_k_B, columns).clamp(max=columns)
    kept_BV = sorted_BV >= sorted_BV.gather(1, k_B[:, None] - 1)
    weight_BV = (sorted_BV.double() - sorted_BV[:, :1].double()).exp_()  # p / the largest p
    mass_BV = (weight_BV * kept_BV).cumsum(1)
    top_p_B1 = rules.top_p_B[:, None].double()
    # A column is needed as long as those before it have not reached p; the first always is.
    kept_BV[:, 1:] &= (mass_BV[:, :-1] < top_p_B1 * mass_BV[:, -1:]) | (top_p_B1 == 1)
    kept_BV &= weight_BV >= rules.min_p_B[:, None].double()
    last_B = kept_BV.sum(1).clamp_(min=1) - 1
    return sorted_BV.gather(1, last_B[:, None])[:, 0]
