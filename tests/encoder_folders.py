"""Model folders with random weights, as `transformers` writes them, for the tests of encoders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from thresher.common.errors import UserError

TEXTS = [
    "The mayor of the city was born by the river.",
    "a",
    "",
    "Reiß das Étui, 東京! [SEP] q??",
    "river city " * 40,
    "the mayor, the city, the river: born 1994",
    "x" * 150,
]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:.,?!'-éß東京"
WORDS = ["the", "city", "river", "mayor", "born", "query", "passage", "##ing", "##ed", "##s"]
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
# XLM-R's vocabulary of sentence pieces.
XLM_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
XLM_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:.,?!'-"
XLM_PIECES = [
    *XLM_LETTERS,
    *(f"▁{letter}" for letter in XLM_LETTERS),
    *("▁", "▁the", "▁city", "▁river", "ing", "or", "ay"),
]


SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 70,
    "initializer_range": 0.3,  # large, so that a wrong piece is noticed and attention is not flat
}
DISTILBERT_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 70,
    "initializer_range": 0.3,
}


def bert_config(**changes: Any) -> transformers.BertConfig:
    return transformers.BertConfig(**{**SIZES, **changes})


def random_model(kind: type[Any], config: Any, seed: int = 0) -> Any:
    """Return a model of transformers with all parameters random: its own initialisation has biases 0 and norms 1."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def save_tokenizer(folder: Path, **settings: Any) -> None:
    """Write vocab.txt, tokenizer.json and tokenizer_config.json of the vocabulary above."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY) + "\n", "utf-8")
    transformers.BertTokenizerFast(str(vocabulary), **settings).save_pretrained(folder)


def save_model(folder: Path, model: Any | None = None, **tokenizer: Any) -> Path:
    """Write a folder with weights, config and tokenizer; of a BERT unless another model is given."""
    model = random_model(transformers.BertModel, bert_config()) if model is None else model
    model.save_pretrained(folder)
    save_tokenizer(folder, **tokenizer)
    return folder


def save_xlm_roberta(folder: Path, kind: type[Any], **changes: Any) -> tuple[Path, Any]:
    """Write a folder of an XLM-R with its own kind of tokenizer; return it and the model."""
    sizes = SIZES | {"vocab_size": len(XLM_SPECIAL) + len(XLM_PIECES) + 1}
    config = transformers.XLMRobertaConfig(**sizes, type_vocab_size=1, pad_token_id=1, **changes)
    model = random_model(kind, config)
    model.save_pretrained(folder)
    pieces = [*((token, 0.0) for token in XLM_SPECIAL), *((piece, -2.0 + len(piece) / 4) for piece in XLM_PIECES)]
    transformers.XLMRobertaTokenizer(vocab=pieces).save_pretrained(folder)
    return folder, model


NLI = {0: "contradiction", 1: "entailment", 2: "neutral"}
DEBERTA_PIECES = ["▁the", "▁city", "▁river", "▁mayor", "ing", "▁", *LETTERS]
DEBERTA_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
DEBERTA_SIZES: dict[str, Any] = {
    **SIZES,
    "vocab_size": len(DEBERTA_SPECIAL) + len(DEBERTA_PIECES) + 8,
    "pad_token_id": 0,
    "type_vocab_size": 0,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_buckets": 8,  # far fewer than the 70 distances
}


def deberta(**changes: Any) -> Any:
    config = transformers.DebertaV2Config(**DEBERTA_SIZES | {"id2label": NLI} | changes)
    return random_model(transformers.DebertaV2ForSequenceClassification, config)


def save_classifier(folder: Path, model: Any) -> Path:
    """Write weights, config and tokenizer; DeBERTa's tokenizer has sentence pieces."""
    if model.config.model_type != "deberta-v2":
        return save_model(folder, model)
    model.save_pretrained(folder)
    pieces = [
        *((token, 0.0) for token in DEBERTA_SPECIAL),
        *((piece, -float(len(piece) < 3)) for piece in DEBERTA_PIECES),
    ]
    transformers.DebertaV2Tokenizer(vocab=pieces, unk_id=3).save_pretrained(folder)
    return folder


def edit(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy the folder with a changed config.json; `...` removes a key."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))
    return target


def write(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def lay_out(
    folder: Path,
    *kinds: str,
    pooling: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
    sentence: dict[str, Any] | None = None,
) -> Path:
    """Write the files of sentence-transformers around a model: modules.json with `kinds`, and the three configs."""
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    records = [
        {"idx": i, "name": str(i), "path": places[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write(folder / "modules.json", records)
    mean = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write(folder / "1_Pooling" / "config.json", mean if pooling is None else pooling)
    if top is not None:
        write(folder / "config_sentence_transformers.json", top)
    if sentence is not None:
        write(folder / "sentence_bert_config.json", sentence)
    return folder


def dpr_pair(folder: Path) -> Path:
    config = transformers.DPRConfig(**SIZES)
    question = random_model(transformers.DPRQuestionEncoder, config, seed=1)
    save_model(folder / "question_encoder", question)
    save_model(folder / "ctx_encoder", random_model(transformers.DPRContextEncoder, config, seed=2))
    return folder


def check_near(found: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor) -> None:
    """Check that the error of a float32 forward is at most four times that of the float32 reference, as norms over all
    numbers, plus 32 roundings, about ten for each of three layers.

    truth: in float64, one row per text; rows differ by a hundred times as much, so that a wrong text would be noticed.
    """
    limit = 4 * (reference.double() - truth).norm() + 2**-19 * truth.norm()
    assert (truth - truth.mean(0)).norm() > 100 * limit
    assert found.shape == truth.shape
    assert (found.double() - truth).norm() <= limit


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
