"""The engine: from questions to trajectories to gradients, one folder per stage.

A new stage is a new folder. Names that users import are here; those that need torch are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from thresher.engine.decoding.stop_tags import Hit, TagMatcher

if TYPE_CHECKING:
    from thresher.engine.decoding.generator import GenerateRequest, GenerateResult, Generator
    from thresher.engine.grpo import GRPO

__all__ = ["GRPO", "GenerateRequest", "GenerateResult", "Generator", "Hit", "TagMatcher"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "GRPO":
        from thresher.engine.grpo import GRPO

        return GRPO
    from thresher.engine.decoding import generator

    return getattr(generator, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
