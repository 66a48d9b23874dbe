"""`thresher init`: a model folder with random weights, from a config and a tokenizer.

The config is any config.json of a supported family, with optional overrides of its keys. The tokenizer is read from a
folder, or trained on the strings of JSONL files. Alternatively, add layers on top of a trained model.
"""

import tomllib
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from thresher.common.errors import UserError
from thresher.common.files import read_json_object, staged_folder
from thresher.common.hashes import write_hashes
from thresher.common.jsonl import iter_jsonl
from thresher.engine.assemble import check_fit
from thresher.policy.config import LARGEST_LAYERS, config_from_dict, known_keys
from thresher.policy.model import Policy, init_policy, load_policy
from thresher.policy.tokenizer import Tokenizer, load_tokenizer, train_bpe

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # 256 bytes and the end-of-text token
ROUND = 16  # a trained vocabulary is padded to a multiple of this, as in real models


def initialise(
    config_path: str | Path,
    out: str | Path,
    *,
    tokenizer_path: str | Path | None = None,
    train_on: Sequence[str | Path] = (),
    vocab_size: int = 1024,
    overrides: Sequence[str] = (),
    seed: int = 0,
    embedding_std: float | None = None,
    zero_outputs: bool = False,
) -> dict[str, Any]:
    """Write a model folder; return its sizes. Give exactly one of tokenizer_path and train_on."""
    if (tokenizer_path is None) == (not train_on):
        raise UserError("init: expected exactly one of --tokenizer FOLDER and --train-tokenizer FILES")
    whole = read_json_object(Path(config_path))
    # The text part of a model of text and images is nested.
    table = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    changes = [_override(text) for text in overrides]
    known = {*table, *known_keys()}
    for key, _ in changes:
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "write one of its keys, such as num_hidden_layers=2"
            raise UserError(f"--set {key}: {config_path} has no such key, and nothing reads it; {hint}")
    table.update(changes)
    if tokenizer_path is not None:
        tokenizer = load_tokenizer(tokenizer_path)
    else:
        if vocab_size < SMALLEST:
            raise UserError(
                f"init: --vocab-size is {vocab_size}; expected at least {SMALLEST}, because there are 256 bytes"
            )
        tokenizer = train_bpe(_strings(train_on), vocab_size, [END_OF_TEXT])
        table["vocab_size"] = -(-tokenizer.vocab_size // ROUND) * ROUND
        table["eos_token_id"] = table["bos_token_id"] = table["pad_token_id"] = tokenizer.token_id(END_OF_TEXT)
    types, layers = table.get("layer_types"), table.get("num_hidden_layers")
    if isinstance(types, list) and types and isinstance(layers, int) and "layer_types" not in dict(changes):
        # One entry per layer: for another number of layers, the pattern is cut or repeated.
        table["layer_types"] = list(islice(cycle(types), min(layers, LARGEST_LAYERS)))
    config = config_from_dict(whole, str(config_path))
    policy = init_policy(config, seed, embedding_std=embedding_std, zero_outputs=zero_outputs)
    return write_model(policy, tokenizer, out) | {"seed": seed}


def add_layers(model: str | Path, count: int, out: str | Path, *, seed: int = 0) -> dict[str, Any]:
    """Write a model folder with `count` more layers on top of a model; return its sizes.

    The new layers start as the identity (their projections into the residual stream are 0), so the output is unchanged.
    """
    old = load_policy(model)
    config = old.config.replace(num_hidden_layers=old.config.num_hidden_layers + count)
    policy = init_policy(config, seed, zero_outputs=True)
    policy.kept = old.kept
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if (trained := dict(old.named_parameters()).get(name)) is not None:
                parameter.copy_(trained)
    return write_model(policy, load_tokenizer(model), out) | {"seed": seed}


def write_model(policy: Policy, tokenizer: Tokenizer, out: str | Path) -> dict[str, Any]:
    """Write a model folder atomically; return its sizes."""
    config = policy.config
    check_fit(policy, tokenizer, out)
    with staged_folder(out) as staged:
        policy.save(staged)
        tokenizer.save(staged)
        write_hashes(staged)
    return {
        "parameters": policy.parameter_count(),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tokenizer_tokens": tokenizer.vocab_size,
    }


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text}: expected key=value with a key of config.json, such as num_hidden_layers=2")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _strings(paths: Sequence[str | Path]) -> Iterator[str]:
    """Yield every string of every record, depth first: texts, titles, questions, segments."""
    for path in paths:
        for _, record in iter_jsonl(path):
            yield from _leaves(record)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
