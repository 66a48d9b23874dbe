"""Conversion of a GGUF file (llama.cpp's format) into a model folder.

The package `gguf` parses the file and dequantises its tensors. This module renames them, undoes llama.cpp's order of
the rows of q and k in Llama's files, and writes config.json, tokenizer.json and the chat template as publishers do.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from thresher.common.errors import UserError
from thresher.common.files import check_file, staged_folder
from thresher.kernels.layers import wavelengths
from thresher.policy.config import ModelConfig, RopeScaling, config_from_dict, write_config
from thresher.policy.model import Policy, hf_views
from thresher.policy.tokenizer import QWEN_WORDS, Tokenizer
from thresher.policy.weights import build_unallocated, write_weights

Value = TypeVar("Value")
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # general.architecture, which is config.json's model_type too
_PARAMETERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Word splitting of the tokenizers that `tokenizer.ggml.pre` names, as published: the pattern, and whether a word that
# is a token bypasses the merges (`ignore_merges`). None: GPT-2's own pattern, with each digit separate.
_PRE_TOKENIZERS: dict[str, tuple[str | None, bool]] = {
    "smollm": (None, False),
    "qwen2": (QWEN_WORDS, False),
    "deepseek-r1-qwen": (QWEN_WORDS, False),
    "llama-bpe": (QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), True),
}
_CONTROL, _UNUSED = 3, 5  # values of tokenizer.ggml.token_type; 1 is an ordinary token, 4 one that a user added
_ORDINARY = (1, 6)  # 6: a byte
# A GGUF file has Llama 3's RoPE scaling as one divisor per frequency. These are the scalings of Meta's releases.
_SCALINGS = (RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32.0, 1.0, 4.0, 8192))


def import_gguf(path: str | Path, out: str | Path, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Convert the GGUF file `path` to a model folder `out`, which must not exist; return a summary of the file.

    The weights are dequantised and rounded to `dtype`; all of them are in memory at once. UserError for a file that is
    not GGUF or is incomplete, and for an unknown architecture, tensor type, tokenizer or scaling, which it names.
    """
    path = Path(path)
    reader = _open(path)
    fields = _Fields(path, reader)
    architecture = fields.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{path}: general.architecture is {architecture!r}, expected one of {known}; use another file")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, architecture, tensors)
    tokenizer = _tokenizer(fields, config)
    expected = _expected_shapes(config, path, len(tensors))
    weights = {}
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        if (known := _parameter(name)) not in expected:
            raise UserError(f"{path}: tensor {name} is not part of a {architecture} model; use another file")
        found = _dequantise(path, tensor)
        if found.shape != expected[known]:
            raise UserError(f"{path}: tensor {name} has shape {list(found.shape)}, expected {list(expected[known])}")
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            found = _half_rows(found, config.head_dim)
        weights[known] = found.to(dtype)
    if missing := sorted(expected.keys() - weights.keys()):
        raise UserError(f"{path}: the tensor of {missing[0]} is missing; fetch the file again")
    with staged_folder(out) as folder:
        write_weights(folder, weights)
        write_config(config, folder, str(dtype).removeprefix("torch."))
        tokenizer.save(folder)
    return {
        "architecture": architecture,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "tensor types": ", ".join(sorted({tensor.tensor_type.name for tensor in tensors.values()})),
        "tokens": len(tokenizer),
        "chat template": "yes" if tokenizer.chat_template else "no",
    }


class _Fields:
    """Metadata of a GGUF file; `path` names it in errors."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._fields = reader.fields

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """Return the value of `key`. UserError if it is absent without a default, or is not of the type `kind`."""
        if key not in self._fields and default is not None:
            return default
        found = self._fields[key].contents() if key in self._fields else None
        if kind is float and isinstance(found, int):
            found = float(found)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise UserError(
                f"{self.path}: {key} is {str(found)[:40]!r}, expected {kind.__name__}; fetch the file again"
            )
        return found

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        return self.get(key, kind) if key in self._fields else None


def _open(path: Path) -> Any:
    """Return the package's reader of the file. UserError unless it is a complete GGUF file."""
    try:
        import gguf
    except ImportError:
        raise UserError("import-gguf needs the package gguf; install it: pip install 'thresher[gguf]'") from None
    check_file(path)
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{path}: not a GGUF file, which begins with the letters GGUF; give another file")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the package checks little, so a damaged file may raise any exception
        raise UserError(
            f"{path}: truncated, damaged, or of a kind that the package gguf does not know ({type(error).__name__}: "
            f"{error}); fetch the file again"
        ) from None


def _config(fields: _Fields, architecture: str, tensors: Mapping[str, Any]) -> ModelConfig:
    def size(key: str) -> int:
        return fields.get(f"{architecture}.{key}", int)

    def constant(key: str) -> float:
        return float(
            str(np.float32(fields.get(f"{architecture}.{key}", float)))
        )  # 1e-05, as published, not its float32

    heads, width = size("attention.head_count"), size("embedding_length")
    head_dim = fields.get(f"{architecture}.attention.key_length", int, width // max(heads, 1))
    if (rotated := fields.get(f"{architecture}.rope.dimension_count", int, head_dim)) != head_dim:
        raise UserError(
            f"{fields.path}: {architecture}.rope.dimension_count is {rotated}, only {head_dim} is supported"
        )
    if (kind := fields.get(f"{architecture}.rope.scaling.type", str, "none")) != "none":
        raise UserError(
            f"{fields.path}: {architecture}.rope.scaling.type is {kind!r}, expected 'none'; use another file"
        )
    for key in ("attention.sliding_window", "expert_count"):
        if value := fields.get(f"{architecture}.{key}", int, 0):
            raise UserError(f"{fields.path}: {architecture}.{key} is {value}, expected 0; use another file")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{fields.path}: the tensor token_embd.weight is missing; fetch the file again")
    base = constant("rope.freq_base")
    ids = "tokenizer.ggml"
    ends = [fields.optional(f"{ids}.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    config: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": width,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": constant("attention.layer_norm_rms_epsilon"),
        "rope_theta": base,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)) or None,
        "bos_token_id": fields.optional(f"{ids}.bos_token_id", int),
        "pad_token_id": fields.optional(f"{ids}.padding_token_id", int),
    }
    if "rope_freqs.weight" in tensors:
        divisors = _dequantise(fields.path, tensors["rope_freqs.weight"])
        scaling = next((s for s in _SCALINGS if _is_scaling(s, divisors, head_dim, base)), None)
        if scaling is None:
            raise UserError(
                f"{fields.path}: rope_freqs.weight is not the scaling of Llama 3.1 or 3.2; use another file"
            )
        config["rope_scaling"] = {"rope_type": "llama3", **scaling._asdict()}
    return config_from_dict(config, str(fields.path))


def _is_scaling(scaling: RopeScaling, divisors: torch.Tensor, head_dim: int, base: float) -> bool:
    """Return whether the divisors of the angles [D/2], float32 in the file, are those of `scaling`. The largest divisor
    is the factor, so two scalings differ by far more than rounding."""
    plain, scaled = (wavelengths(head_dim, base, divisors.device, s) for s in (None, scaling))
    return divisors.shape == plain.shape and torch.allclose(scaled / plain, divisors, rtol=1e-4)


def _expected_shapes(config: ModelConfig, path: Path, tensors: int) -> dict[str, torch.Size]:
    policy = build_unallocated(lambda: Policy(config), config.num_hidden_layers, range(tensors), path)
    return {name: view.shape for name, view in hf_views(policy).items()}


def _parameter(name: str) -> str:
    """Return Hugging Face's name of the tensor `name`; the name itself if it is not known."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _PARAMETERS:
        return name
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{_PARAMETERS[found[2]]}.{found[3]}"


def _dequantise(path: Path, tensor: Any) -> torch.Tensor:
    """Return the tensor in float32. UserError for a type that the package does not dequantise."""
    from gguf.quants import dequantize

    try:
        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    except NotImplementedError:
        raise UserError(
            f"{path}: tensor {tensor.name} is of the type {tensor.tensor_type.name}, which the package gguf does not "
            "dequantise; use a file of another type, such as Q8_0"
        ) from None


def _half_rows(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of q or k in the order that rotates halves of a head; llama.cpp puts pairs in adjacent rows."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(fields: _Fields, config: ModelConfig) -> Tokenizer:
    """Return the tokenizer with its chat template. UserError unless it is byte-level BPE with a known pattern."""
    ids = "tokenizer.ggml"
    kind, pre = fields.get(f"{ids}.model", str), fields.get(f"{ids}.pre", str, "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{fields.path}: the tokenizer is {kind!r} with {ids}.pre {pre!r}, expected 'gpt2' with one of "
            f"{', '.join(_PRE_TOKENIZERS)}; use another file"
        )
    tokens, types = fields.get(f"{ids}.tokens", list), fields.get(f"{ids}.token_type", list)
    merges = fields.get(f"{ids}.merges", list)
    if not len(tokens) == len(types) == config.vocab_size:
        raise UserError(
            f"{fields.path}: {len(tokens)} tokens with {len(types)} types, but the head has {config.vocab_size} rows; "
            "fetch the file again"
        )
    while types and types[-1] == _UNUSED:  # rows of the head beyond the tokenizer
        tokens, types = tokens[:-1], types[:-1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, "special": kind == _CONTROL, **flags}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in _ORDINARY
    ]
    pattern, ignore_merges = _PRE_TOKENIZERS[pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    words: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if pattern is not None:
        words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    data = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pattern == QWEN_WORDS else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    named = {"bos_token": config.bos_token_id, "eos_token": fields.optional(f"{ids}.eos_token_id", int)}
    named["pad_token"] = config.pad_token_id
    settings = {name: tokens[i] for name, i in named.items() if i is not None}
    settings["add_bos_token"] = fields.get(f"{ids}.add_bos_token", bool, pre == "llama-bpe")
    companions = {"tokenizer_config.json": _json(settings)}
    if (template := fields.optional("tokenizer.chat_template", str)) is not None:
        companions["chat_template.jinja"] = template.encode()
    return Tokenizer(_json(data), str(fields.path), companions)


def _json(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False, indent=1).encode()
