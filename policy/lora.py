"""Low-rank adapters (LoRA; Hu et al. 2021): y = W x + (alpha / r) B A x, of which only A and B are trained.

A is initialised uniformly in +-1/sqrt(in) (Kaiming's rule as PEFT applies it), as a function of the seed, and B with 0.
The sum is never merged while a run samples or trains. With the adapters off, the forward therefore equals the base
model's to the bit, which gives GRPO's reference without a second model. On export the product is added to the weights,
and the adapters are saved next to them under PEFT's names. A and B are float32, because a step of 1e-6 would not change
a bfloat16, and are cast on use. There is no dropout, because rollout and update would differ, and there are no adapters
on embedding, head and norms. Axes: T packed tokens; R rank, I inputs and O outputs of a linear map (stored optimiser
states use `a_RI`, `b_OR`).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from thresher.common.errors import UserError
from thresher.common.files import atomic_path, atomic_write_text, check_file, read_json_object
from thresher.policy.weights import save_tensors

# The linear maps of a layer: their names in a recipe, and their modules in Hugging Face's layers. A layer has some.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "linear_qkv": "linear_attn.in_proj_qkv",
    "linear_z": "linear_attn.in_proj_z",
    "linear_b": "linear_attn.in_proj_b",
    "linear_a": "linear_attn.in_proj_a",
    "linear_out": "linear_attn.out_proj",
}
TARGETS = tuple(MODULES)
FOLDER = "adapter"  # next to model.safetensors, in a subfolder: transformers would apply it to the merged weights again
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# With 2 to 4 inputs, a CPU matmul with several threads is not batch-invariant even where it is with 8.
RANK_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Settings that determine fresh adapters. UserError for an impossible rank, alpha or target."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise UserError(f"lora: expected a rank of at least 1 and an alpha > 0, got {self.rank} and {self.alpha}")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise UserError(f"lora: targets are {list(self.targets)}; expected some of {', '.join(TARGETS)}, each once")


class Adapter(nn.Module):
    """A and B of one linear map."""

    def __init__(self, outputs: int, inputs: int, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = settings.alpha / settings.rank
        a_RI = torch.empty(settings.rank, inputs).uniform_(-1.0, 1.0, generator=generator) / math.sqrt(inputs)
        self.a_RI = nn.Parameter(a_RI)
        self.b_OR = nn.Parameter(torch.zeros(outputs, settings.rank))

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the adapter's addition to the map's output, [T, O], in the dtype of x."""
        missing = -len(self.a_RI) % RANK_STEP
        a_RI, b_OR = self.a_RI.to(x_TI.dtype), self.b_OR.to(x_TI.dtype)
        if missing:
            a_RI, b_OR = F.pad(a_RI, (0, 0, 0, missing)), F.pad(b_OR, (0, missing))
        return F.linear(F.linear(x_TI, a_RI) * self.scale, b_OR)

    @torch.no_grad()
    def product(self) -> torch.Tensor:
        """Return (alpha / r) B A, [O, I], which merging adds to the weight."""
        return (self.b_OR @ self.a_RI) * self.scale


class LayerAdapters(nn.Module):
    """The adapters of one layer."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, int]], settings: LoraSettings, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.on = True
        self.shapes = shapes  # (outputs, inputs) of each linear map
        self.by_target = nn.ModuleDict(
            {
                target: Adapter(*self.shapes[target], settings, generator)
                for target in settings.targets
                if target in self.shapes
            }
        )

    def forward(self, x_TI: torch.Tensor, y_TO: torch.Tensor, targets: Sequence[str]) -> torch.Tensor:
        """Return y, the concatenated outputs of the maps `targets`, plus those of their adapters."""
        if not self.on or not any(target in self.by_target for target in targets):
            return y_TO
        parts = y_TO.split([self.shapes[target][0] for target in targets], dim=-1)
        moved = [
            part + self.by_target[target](x_TI) if target in self.by_target else part
            for target, part in zip(targets, parts, strict=True)
        ]
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim=-1)


class AdaptedLayer(Protocol):
    """Interface of a layer that this file needs; implemented in layers.py, which imports this file."""

    adapters: LayerAdapters | None

    def hf_views(self) -> dict[str, torch.Tensor]: ...


class AdaptedPolicy(Protocol):
    """Interface of a policy that this file needs; implemented in model.py, which imports this file."""

    lora: LoraSettings | None

    @property
    def prefix(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def decoder_layers(self) -> Iterator[AdaptedLayer]: ...
    def requires_grad_(self, requires_grad: bool = True) -> Any: ...


def linear_shapes(layer: AdaptedLayer) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear map of a layer."""
    views = layer.hf_views()
    shapes = {}
    for target, module in MODULES.items():
        if (view := views.get(f"{module}.weight")) is not None:
            outputs, inputs = view.shape
            shapes[target] = (outputs, inputs)
    return shapes


def add_lora(
    policy: AdaptedPolicy, *, rank: int, alpha: float, targets: Sequence[str] = TARGETS, seed: int = 0
) -> LoraSettings:
    """Add new adapters (float32, or float64 on a float64 policy) to every layer; from then on only they are trained.

    UserError for invalid settings, ValueError for a policy that already has adapters.
    """
    if policy.lora is not None:
        raise ValueError("the policy has adapters already")
    settings = LoraSettings(rank=rank, alpha=alpha, targets=tuple(targets), seed=seed)
    has = {target for layer in policy.decoder_layers() for target in linear_shapes(layer)}
    if not has & set(settings.targets):
        raise UserError(
            f"lora: targets are {list(targets)}, but the model has none; expected some of {', '.join(sorted(has))}"
        )
    generator = torch.Generator().manual_seed(seed)
    policy.requires_grad_(False)
    dtype = torch.promote_types(policy.dtype, torch.float32)
    for layer in policy.decoder_layers():
        layer.adapters = LayerAdapters(linear_shapes(layer), settings, generator).to(policy.device, dtype)
    policy.lora = settings
    return settings


def adapters(policy: AdaptedPolicy) -> Iterator[tuple[str, Adapter]]:
    """Yield Hugging Face's name of each adapted linear map ("model.layers.0.self_attn.q_proj"), and its adapter."""
    for index, layer in enumerate(policy.decoder_layers()):
        if layer.adapters is not None:
            for target, adapter in layer.adapters.by_target.items():
                assert isinstance(adapter, Adapter)
                yield f"{policy.prefix}layers.{index}.{MODULES[target]}", adapter


def merged_weights(policy: AdaptedPolicy, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights `views`, by Hugging Face's names, plus the adapters' products. They are on the CPU in float32
    (float64 for a float64 policy), so that small products are not lost on a bfloat16 base."""
    dtype = torch.promote_types(policy.dtype, torch.float32)
    merged = {name: view.to("cpu", dtype) for name, view in views.items()}
    for name, adapter in adapters(policy):
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + adapter.product().cpu()
    return merged


def save_adapters(policy: AdaptedPolicy, folder: str | Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors in PEFT's format to `folder` (created if absent).
    ValueError for a policy without adapters."""
    settings, folder = _settings_of(policy), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": _modules(policy, settings),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    with atomic_path(folder / WEIGHTS) as temporary:
        save_tensors(temporary, {name: value.detach().cpu() for name, value in _tensors(policy).items()})
    atomic_write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def load_adapters(policy: AdaptedPolicy, folder: str | Path) -> None:
    """Load the files of `save_adapters` into the adapters of `policy`. UserError for absent or other adapters,
    ValueError for a policy without any."""
    from safetensors import SafetensorError, safe_open

    settings, folder = _settings_of(policy), Path(folder)
    config = read_json_object(folder / CONFIG)
    for key, expected in (("r", settings.rank), ("lora_alpha", settings.alpha)):
        if config.get(key) != expected:
            raise UserError(
                f"{folder / CONFIG}: {key} is {config.get(key)!r}, the recipe's [lora] says {expected}; "
                "use the recipe that these adapters were trained with"
            )
    tensors = _tensors(policy)
    check_file(folder / WEIGHTS)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            saved = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({error}); use another checkpoint") from None
    for name in sorted(tensors.keys() | saved.keys()):
        if name not in tensors or name not in saved or tensors[name].shape != saved[name].shape:
            raise UserError(
                f"{folder / WEIGHTS}: tensor {name} does not match the model and the recipe's [lora]; "
                "use the model and the recipe that these adapters were trained with"
            )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def _modules(policy: AdaptedPolicy, settings: LoraSettings) -> list[str]:
    """Return the last parts of the names of the linear maps that have adapters."""
    found = {name.rpartition(".")[2] for name, _ in adapters(policy)}
    names = (MODULES[target].rpartition(".")[2] for target in settings.targets)
    return [name for name in names if name in found]


def _settings_of(policy: AdaptedPolicy) -> LoraSettings:
    if policy.lora is None:
        raise ValueError("the policy has no adapters; add them with add_lora(policy, rank=.., alpha=..)")
    return policy.lora


def _tensors(policy: AdaptedPolicy) -> dict[str, torch.Tensor]:
    """Return A and B of each adapter by PEFT's names."""
    return {
        f"base_model.model.{name}.lora_{letter}.weight": value
        for name, adapter in adapters(policy)
        for letter, value in (("A", adapter.a_RI), ("B", adapter.b_OR))
    }
