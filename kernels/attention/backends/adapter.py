"""Common code of the adapters to libraries of attention.

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

from importlib import import_module
from typing import Any

import torch


class Unserved(Exception):
    """A library cannot be had, or does not serve. Its text follows the word "which"."""


def load_part(library: str, get: str, module: str, name: str) -> Any:
    """`name` of a module of `library`. Unserved, saying how to `get` it, where it is not installed; Unserved with the
    reason where it is and does not load."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        top = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == top:
            raise Unserved(f"needs {library}, which is not installed ({get})") from None
        raise Unserved(f"needs {library}, which does not load here ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut to what a sentence can hold; its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def repeat_heads(x_TKD: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [T, K, D] as each of N query heads sees them, [T, N, D]: head n's lie at n // (N / K). Its
    backward is a sum over the group, without atomic additions."""
    count, kv_heads, dim = x_TKD.shape
    if heads == kv_heads:
        return x_TKD
    return x_TKD[:, :, None].expand(count, kv_heads, heads // kv_heads, dim).reshape(count, heads, dim)
