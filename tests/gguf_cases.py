"""GGUF files of small models, written with the package gguf in the layout of llama.cpp's converter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import make_config, stir
from tokenizer_cases import TEXTS

from thresher.policy.model import Policy, hf_views
from thresher.policy.tokenizer import Tokenizer, train_bpe

CHAT = (
    "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for Hugging Face's parameter `name`."""
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[module]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def make_model(architecture: str, **changes: Any) -> tuple[Policy, Tokenizer]:
    tokenizer = train_bpe(TEXTS, 300, ("<|start|>", "<|end|>"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(tokenizer), "head_dim": 16, **changes}
    policy = Policy(make_config(model_type=architecture, **sizes))
    return stir(policy), tokenizer


def write_gguf(
    path: Path,
    policy: Policy,
    tokenizer: Tokenizer,
    kind: str = "F32",
    pre: str = "qwen2",
    fields: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    unused: int = 0,
) -> Path:
    """Write the model to `path`, its matrices in the type `kind`; `fields` and `tensors` are added. The last `unused`
    rows of the head have no token."""
    gguf = pytest.importorskip("gguf")
    config, name = policy.config, policy.config.model_type
    writer = gguf.GGUFWriter(path, name)
    sizes = {
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.rms_norm_eps,
    }
    for key, value in sizes.items():
        getattr(writer, f"add_{key}")(value)
    letters = {byte: letter for letter, byte in _letters().items()}
    tokens = ["".join(letters[byte] for byte in tokenizer.token_bytes(i)) for i in range(len(tokenizer))]
    types = [1] * len(tokens)
    for content, token in tokenizer.added_tokens.items():
        tokens[token], types[token] = content, 3
    tokens += [f"[PAD{i}]" for i in range(unused)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types + [5] * unused)
    writer.add_token_merges(_merges(tokenizer))
    writer.add_eos_token_id(tokenizer.added_tokens["<|end|>"])
    writer.add_bos_token_id(tokenizer.added_tokens["<|start|>"])
    writer.add_chat_template(CHAT)
    for key, value in (fields or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for parameter, view in {**hf_views(policy), **(tensors or {})}.items():
        data = view.clone()
        if name == "llama" and parameter.endswith(("q_proj.weight", "k_proj.weight")):
            rows, columns = data.shape  # pairs that are rotated together are adjacent
            data = data.view(rows // config.head_dim, 2, config.head_dim // 2, columns).transpose(1, 2).reshape_as(data)
        to = gguf.GGMLQuantizationType[kind if data.dim() == 2 else "F32"]
        found = gguf.quants.quantize(data.numpy(), to)
        writer.add_tensor(parameter if parameter in (tensors or {}) else gguf_name(parameter), found, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _letters() -> dict[str, int]:
    from thresher.policy.tokenizer import _BYTE_OF_LETTER

    return _BYTE_OF_LETTER


def _merges(tokenizer: Tokenizer) -> list[str]:
    import json

    return [" ".join(merge) for merge in json.loads(tokenizer._json)["model"]["merges"]]
