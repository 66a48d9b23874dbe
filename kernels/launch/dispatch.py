"""Which tensors Triton's kernels serve, and what a launcher asks of them before it hands out their addresses.

Deliberately absent: Triton, which is imported by whoever launches.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)


def uses_triton(tensor: Tensor) -> bool:
    """Whether `tensor` goes to a Triton kernel: bfloat16 or float32 on a GPU, where Triton is installed."""
    return tensor.is_cuda and tensor.dtype in DTYPES and _installed()


@lru_cache
def _installed() -> bool:
    return find_spec("triton") is not None


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes a CUDA tensor's device the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless it is bfloat16 or float32."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected bfloat16 or float32")


def check_dense(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless `tensor` is dense and has this shape, dtype and device."""
    if tensor.shape != torch.Size(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected dense {tuple(shape)}"
        )
    if tensor.dtype != dtype or tensor.device != device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; expected {dtype} on {device}")
