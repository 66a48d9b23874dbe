"""Table of the model families: their names in config.json, and their layer classes. A layer class is imported on first
use, so that reading the table does not need torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeGuard

from thresher.common.errors import UserError


@dataclass(frozen=True, slots=True)
class Family:
    """A family. architecture: its name in config.json. models: its common name. layer: the layer class in `module`.

    prefix: of the names of the transformer's weights, except the head's. kept: prefixes of weights that are not used in
    computation and are kept unchanged. in_text_config: config.json has the shape under `text_config`.
    """

    architecture: str
    models: str
    layer: str
    module: str = "thresher.policy.layers"
    prefix: str = "model."
    kept: tuple[str, ...] = ()
    in_text_config: bool = False


# Keyed by config.json's model_type.
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", models="Qwen2 / Qwen2.5", layer="Qwen2Layer"),
    "qwen3": Family("Qwen3ForCausalLM", models="Qwen3", layer="Qwen3Layer"),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        models="Qwen3.5",
        layer="Qwen35Layer",
        module="thresher.policy.qwen35",
        prefix="model.language_model.",
        kept=("model.visual.", "mtp."),
        in_text_config=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        models="Qwen3.5 (text)",
        layer="Qwen35Layer",
        module="thresher.policy.qwen35",
        kept=("mtp.",),
    ),
    "llama": Family("LlamaForCausalLM", models="Llama 3", layer="LlamaLayer"),
}


def find_family(model_type: object) -> Family:
    """Return the family with this model_type; UserError, listing all of them, if there is none."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise UserError(f"model_type is {model_type!r}, expected one of {known}; {_use_another()}")
    return FAMILIES[model_type]


def infer_model_type(table: Mapping[str, Any]) -> str:
    """Return the model_type of a parsed config.json, else its architecture's. UserError for none, or two different."""
    architectures = table.get("architectures")
    known = {family.architecture: name for name, family in FAMILIES.items()}
    named = [known[name] for name in architectures if name in known] if _is_names(architectures) else []
    if architectures is not None and not named:
        raise UserError(f"architectures is {architectures!r}, expected one of {', '.join(known)}; {_use_another()}")
    model_type = table.get("model_type", named[0] if named else None)
    family = find_family(model_type)
    if named and model_type not in named:
        raise UserError(
            f"architectures is {architectures!r} but model_type is {model_type!r}, whose architecture is "
            f"{family.architecture}; correct one of them"
        )
    return str(model_type)


def load_layer_class(model_type: str) -> type[Any]:
    """Import the family's layer, a subclass of `thresher.policy.layers.Layer`."""
    family = find_family(model_type)
    layer: type[Any] = getattr(import_module(family.module), family.layer)
    return layer


def _use_another() -> str:
    return f"use a {' or '.join(family.models for family in FAMILIES.values())} model"


def _is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
