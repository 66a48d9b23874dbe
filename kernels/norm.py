"""RMSNorm.

    y = w * x / sqrt(mean_H(x^2) + eps)          (Zhang and Sennrich 2019, equation 4)

The mean is taken in float32 whatever the dtype of x, and the weight is applied after the cast back, as Qwen2 does.
"""

import torch


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row of `x_TH` [T, H] (float32 or bfloat16) by its root mean square; returns [T, H] in x's
    dtype."""
    if x_TH.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    x = x_TH.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight_H * x.to(x_TH.dtype)
