"""The policy: a decoder-only transformer; layers.py has the layers of each family.

One forward serves rollout and training. The location of keys, values and states is an argument: a layer calls `layout`
once with its new q, k and v, or `layout.delta` with the inputs of its convolution. A layout is either for whole
sequences, with gradients (`Varlen`, or `PrefixForest` if they share prefixes), or one step's view of the cache
(engine/decoding/kv_cache.py, decoder_cuda.py). Parameters may be fused; Hugging Face's names are views of them
(`hf_views`), so loading and saving use the same table. Axes: T packed tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from thresher.common.errors import UserError, shown
from thresher.common.files import as_path
from thresher.common.hashes import check_hashes
from thresher.kernels.attention.backends.choice import Backend, Purpose, resolve_attention
from thresher.kernels.attention.varlen import Varlen
from thresher.kernels.layers import add_norm, linear, rope_table
from thresher.policy.config import CONFIG_FILES, FULL, ModelConfig, read_config, write_config
from thresher.policy.families import find_family, load_layer_class
from thresher.policy.layers import Layer, Layout
from thresher.policy.lora import FOLDER, LoraSettings, merged_weights, save_adapters
from thresher.policy.weights import build_unallocated, read_weights, tensor_shapes, write_weights


class Policy(nn.Module):
    """A language model over packed tokens, created by `load_policy` or `init_policy`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lora: LoraSettings | None = None  # of the adapters, if lora.py has added some to the layers
        self.folder: Path | None = None  # the folder that `load_policy` read, for messages
        self.layer_class = layer_class = load_layer_class(config.model_type)
        self.rotary_dim = config.rotary_dim
        self.embed_VH = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(layer_class.make(config, number) for number in range(config.num_hidden_layers))
        kinds = config.layer_types or (FULL,) * config.num_hidden_layers
        self.numbers = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]  # among those of its type
        self.norm = layer_class.make_norm(config.hidden_size)
        self.kept: dict[str, torch.Tensor] = {}  # unused weights of its folder, memory-mapped
        self.untied_head_VH = (
            None if config.tie_word_embeddings else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        )

    @property
    def head_VH(self) -> torch.Tensor:
        """Return the LM head [V, H]; the embedding itself if they are tied."""
        return self.embed_VH if self.untied_head_VH is None else self.untied_head_VH

    @property
    def prefix(self) -> str:
        """Return the prefix of Hugging Face's names, except the head's."""
        return find_family(self.config.model_type).prefix

    @property
    def device(self) -> torch.device:
        return self.embed_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VH.dtype

    def decoder_layers(self) -> Iterator[Layer]:
        """Yield the layers in order, typed."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Disable the adapters inside the context, so that the policy computes the same as its base."""
        found = [layer.adapters for layer in self.decoder_layers() if layer.adapters is not None]
        before = [adapters.on for adapters in found]
        for adapters in found:
            adapters.on = False
        try:
            yield
        finally:
            for adapters, on in zip(found, before, strict=True):
                adapters.on = on

    def rope(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the rotations of these positions [T], the argument `rope` of every layer."""
        config = self.config
        return rope_table(positions_T, self.rotary_dim, config.rope_theta, self.dtype, config.rope_scaling)

    def final_norm(self, x_TH: torch.Tensor, addend_TH: torch.Tensor | None, norm_H: torch.Tensor) -> torch.Tensor:
        """Return the hidden states from the stream after the last layer. norm_H: the weight `norm`, or its copy."""
        return add_norm(x_TH, addend_TH, self.layer_class.gain(norm_H), self.config.rms_norm_eps)[1]

    def hidden(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, layout: Layout, checkpoint_activations: bool = False
    ) -> torch.Tensor:
        """Map packed ids [T] int64 and their positions [T] int64 to hidden states after the last norm [T, H].

        checkpoint_activations: keep only the input of each layer for the backward, and recompute the layer there
        (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174). `layout` is then called
        twice per layer.
        """
        rope = self.rope(positions_T)
        x_TH, addend_TH = F.embedding(ids_T, self.embed_VH), None
        for index, layer in zip(self.numbers, self.layers, strict=True):
            if checkpoint_activations and torch.is_grad_enabled():
                arguments = (layer, x_TH, addend_TH, rope, layout, index)
                x_TH, addend_TH = checkpoint(*arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TH, addend_TH = layer(x_TH, addend_TH, rope, layout, index)
        return self.final_norm(x_TH, addend_TH, self.norm)

    def logits(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Map one sequence of ids [T] to logits [T, V]. For inspection and tests: training never materialises them."""
        ids_T = torch.as_tensor(ids_T, dtype=torch.int64, device=self.device)
        layout = Varlen([len(ids_T)], self.device)
        return linear(self.hidden(ids_T, layout.positions_T, layout), self.head_VH)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, path: str | Path) -> None:
        """Write config.json, generation_config.json and model.safetensors in Hugging Face's layout. Adapters are merged
        into the weights, in float32, and also written to a subfolder."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if self.lora is None:
            write_weights(folder, hf_views(self) | self.kept)
        else:
            write_weights(folder, merged_weights(self, hf_views(self)) | self.kept)
            save_adapters(self, folder / FOLDER)
        write_config(self.config, folder, str(self.embed_VH.dtype).removeprefix("torch."))


def hf_views(policy: Policy) -> dict[str, torch.Tensor]:
    """Return tensors that share the policy's memory (slices of fused projections included) by Hugging Face's names."""
    prefix = policy.prefix
    views = {f"{prefix}embed_tokens.weight": policy.embed_VH.data, f"{prefix}norm.weight": policy.norm.data}
    if policy.untied_head_VH is not None:
        views["lm_head.weight"] = policy.untied_head_VH.data
    for index, layer in enumerate(policy.decoder_layers()):
        views |= {f"{prefix}layers.{index}.{name}": view for name, view in layer.hf_views().items()}
    return views


def attention_backend(policy: Policy, choice: str, purpose: Purpose, section: str = "") -> Backend:
    """Return the backend that computes a policy's attention. UserError, with `section` ("optim.") before its key, if
    the choice cannot be used here. On CUDA a library is tried out, which takes a moment."""
    config = policy.config
    per_kv = config.num_attention_heads // config.num_key_value_heads
    try:
        return resolve_attention(choice, policy.device, policy.dtype, config.head_dim, purpose, per_kv)
    except ValueError as error:
        raise UserError(f"{section}{error}") from None


def load_policy(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", verify: bool = True
) -> Policy:
    """Read a model from a folder of config.json and safetensors. UserError, naming file and tensor, unless names and
    shapes match the config exactly. verify: check the folder's hashes, if there are any."""
    _check_placement(dtype, device)
    folder = as_path(path)
    if verify:
        check_hashes(folder, CONFIG_FILES)
    config = read_config(folder)
    layers, found = config.num_hidden_layers, tensor_shapes(folder)
    policy = build_unallocated(lambda: Policy(config), layers, found, folder / CONFIG_FILES[0]).to(dtype)
    # Some tools write a copy of the tied head; it is accepted if it equals the embedding.
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {name: view.shape for name, view in hf_views(policy).items()}
    kept = kept_shapes(config, found)
    # Shapes are checked against the files before memory is allocated for the sizes in config.json.
    weights = read_weights(folder, shapes | kept, optional=optional, verify=verify)
    views = hf_views(policy.to_empty(device=device))
    for name, tensor in weights:
        if name in views:
            views[name].copy_(tensor)
        elif name in kept:
            policy.kept[name] = tensor
    policy.folder = folder
    return policy


def kept_shapes(config: ModelConfig, found: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Return the tensors of a folder, with shapes, that are not used in computation and are written back on saving."""
    return {name: shape for name, shape in found.items() if name.startswith(find_family(config.model_type).kept)}


def _check_placement(dtype: object, device: object) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UserError(f"dtype is {shown(dtype)}; expected a floating dtype of torch, such as torch.bfloat16")
    try:
        torch.empty(0, device=torch.device(device))  # type: ignore[call-overload]
    except (RuntimeError, TypeError, AssertionError, ValueError):
        raise UserError(f'device is {shown(device)}; expected "cpu", or a device that torch sees') from None


def init_policy(
    config: ModelConfig, seed: int, *, embedding_std: float | None = None, zero_outputs: bool = False
) -> Policy:
    """Create a policy with weights from the seed: normal(0, initializer_range), zero biases, unit norms.

    embedding_std: for the embeddings, in place of initializer_range. zero_outputs: the projections into the residual
    stream are 0, so that every layer is the identity at first. Small models then learn to copy from shuffled passages,
    which they hardly do otherwise (docs/internals/log.md).
    """
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(config)
    with torch.no_grad():
        for name, parameter in sorted(policy.named_parameters()):
            if parameter.dim() == 2:
                own_std = embedding_std if name == "embed_VH" else None
                parameter.normal_(0.0, own_std or config.initializer_range, generator=generator)
                if zero_outputs and name.endswith(("o_weight", "out_weight", "down_weight")):
                    parameter.zero_()
    return policy
