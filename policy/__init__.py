"""Model folders: config, weights, transformer, adapters and tokenizer. Nothing here samples or trains.

    from thresher.policy import load_policy, load_tokenizer

The names below are imported on first access, because importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thresher.policy.config import ModelConfig
    from thresher.policy.model import Policy, init_policy, load_policy
    from thresher.policy.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ModelConfig", "Policy", "Tokenizer", "init_policy", "load_policy", "load_tokenizer"]

_HOME = {
    "ModelConfig": "config",
    "Policy": "model",
    "init_policy": "model",
    "load_policy": "model",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
