"""A model in float64 throughout, the truth for other dtypes; and the relative error of other results.

Without `exact_norms`, `rms_norm` (kernels/layers.py) computes its mean in float32 in any dtype.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch

from thresher.kernels import layers


@contextmanager
def exact_norms() -> Iterator[None]:
    """Compute norms of float64 rows in float64; others are unchanged."""
    plain = layers.rms_norm

    def norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        if x_TH.dtype != torch.float64:
            return plain(x_TH, weight_H, eps)
        return torch.nn.functional.rms_norm(x_TH, weight_H.shape, weight_H, eps)

    with patch.object(layers, "rms_norm", norm):
        yield


def off(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference over all tensors of `truth`, relative to the norm of the truth."""
    difference = sum(float((found[name].double().cpu() - x.double()).square().sum()) for name, x in truth.items())
    return (difference / sum(float(x.double().square().sum()) for x in truth.values())) ** 0.5
