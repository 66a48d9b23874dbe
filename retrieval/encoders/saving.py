"""A trained encoder into a folder of its own, as `load_encoder` and sentence-transformers read it.

Deliberately absent: pooler and heads that lay beside the transformer, which no vector is made with, and pairs.
"""

import shutil
from pathlib import Path

from thresher.policy.weights import write_weights
from thresher.retrieval.encoders.bert import tensors_of
from thresher.retrieval.encoders.learned import LearnedEncoder
from thresher.retrieval.encoders.settings import write_settings

# What is taken over as it is, where it is there: sizes and tokenizer.
_COPIED = ("config.json", "tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")


def save_encoder(encoder: LearnedEncoder, folder: Path) -> None:
    """Writes weights, config, tokenizer and settings into the existing, empty `folder`. UserError for a pair of
    transformers, for weights that are not finite, and where the disk is full."""
    tower = encoder.tower
    for name in _COPIED:
        if (tower.folder / name).is_file():
            shutil.copyfile(tower.folder / name, folder / name)
    write_settings(folder, encoder.settings, encoder.dim)
    write_weights(folder, {name: tensor.contiguous() for name, tensor in tensors_of(tower.bert).items()})
