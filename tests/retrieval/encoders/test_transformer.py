"""Test the BERT family and DeBERTa against `transformers` with random weights, the effect of padding and of other
rows, and refusals.

The models are tiny, but chosen to reveal errors: three layers, wide weights, no bias at 0 and no norm at 1.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import torch
import transformers
from batch_invariance import needs_invariant_rows, weight_shapes
from safetensors.torch import load_file, save_file
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from thresher.retrieval.encoders.heads import load_classifier
from thresher.retrieval.encoders.transformer import (
    LENGTH_STEP,
    Bert,
    buckets,
    load_bert,
    load_deberta,
    read_bert_config,
    read_deberta_config,
)

LENGTHS = [48, 33, 17, 2, 1]
# Bound on the difference of two float32 forwards: 128 roundings, 2^-22 each, of values up to 4 after a LayerNorm.
ROUNDINGS = 2**-15
DISTILBERT = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES)


def roberta(kind: type[Any] = transformers.RobertaConfig) -> Any:
    return kind(**folders.SIZES, type_vocab_size=1, pad_token_id=1)


MODELS: dict[str, tuple[type[Any], Callable[[], Any]]] = {
    "bert": (transformers.BertModel, folders.bert_config),
    "bert-tanh": (transformers.BertModel, lambda: folders.bert_config(hidden_act="gelu_new")),
    "bert-relu": (transformers.BertModel, lambda: folders.bert_config(hidden_act="relu", layer_norm_eps=1e-5)),
    "masked-lm": (transformers.BertForMaskedLM, folders.bert_config),
    "classifier": (transformers.BertForSequenceClassification, folders.bert_config),
    "distilbert": (transformers.DistilBertModel, lambda: DISTILBERT),
    "distilbert-classifier": (transformers.DistilBertForSequenceClassification, lambda: DISTILBERT),
    "dpr-question": (transformers.DPRQuestionEncoder, lambda: transformers.DPRConfig(**folders.SIZES)),
    "dpr-passage": (transformers.DPRContextEncoder, lambda: transformers.DPRConfig(**folders.SIZES)),
    "roberta": (transformers.RobertaModel, roberta),
    "roberta-masked-lm": (transformers.RobertaForMaskedLM, roberta),
    "xlm-r-tokens": (transformers.XLMRobertaForTokenClassification, lambda: roberta(transformers.XLMRobertaConfig)),
}


def inputs(lengths: list[int] = LENGTHS, width: int | None = None, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    width = width or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(5, len(folders.VOCABULARY), (len(lengths), width), generator=generator)
    return ids_BT, torch.arange(width) < torch.tensor(lengths)[:, None]


def theirs(model: Any, ids_BT: torch.Tensor, mask_BT: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(input_ids=ids_BT, attention_mask=mask_BT.long(), output_hidden_states=True, **more)
    hidden_BTH: torch.Tensor = found.hidden_states[-1]
    return hidden_BTH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a plain BERT, whose pooler has a tensor that the encoder does not."""
    folders.random_model(transformers.BertModel, folders.bert_config()).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    model = folders.random_model(kind, config())
    model.save_pretrained(tmp_path)
    # The longest text fills the position table, whose first two rows RoBERTa does not use.
    longest = read_bert_config(tmp_path).max_positions
    assert longest == folders.SIZES["max_position_embeddings"] - (2 if "roberta" in model.config.model_type else 0)
    ids_BT, mask_BT = inputs([longest, *LENGTHS])
    ours_BTH, theirs_BTH = load_bert(tmp_path)(ids_BT, mask_BT), theirs(model, ids_BT, mask_BT)
    assert theirs_BTH[mask_BT].std(0).min() > 100 * ROUNDINGS  # the states differ enough to compare
    torch.testing.assert_close(ours_BTH[mask_BT], theirs_BTH[mask_BT], rtol=0, atol=ROUNDINGS)


def test_token_types(folder: Path) -> None:
    ids_BT, mask_BT = inputs()
    types_BT = (torch.arange(ids_BT.shape[1]) > 5).long().expand_as(ids_BT)
    expected_BTH = theirs(
        transformers.BertModel.from_pretrained(folder).eval(), ids_BT, mask_BT, token_type_ids=types_BT
    )
    bert = load_bert(folder)
    torch.testing.assert_close(bert(ids_BT, mask_BT, types_BT)[mask_BT], expected_BTH[mask_BT], rtol=0, atol=ROUNDINGS)
    assert (bert(ids_BT, mask_BT)[mask_BT] - expected_BTH[mask_BT]).abs().max() > 100 * ROUNDINGS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_worse_than_that_of_transformers(folder: Path, dtype: torch.dtype) -> None:
    """The reference is float64; the bound follows from the error of `transformers` in the same dtype."""
    ids_BT, mask_BT = inputs()
    model = transformers.BertModel.from_pretrained(folder).eval()
    truth = load_bert(folder, torch.float64)(ids_BT, mask_BT)[mask_BT]
    torch.testing.assert_close(truth, theirs(model.double(), ids_BT, mask_BT)[mask_BT], rtol=0, atol=1e-10)
    bert = load_bert(folder, dtype)
    model = transformers.BertModel.from_pretrained(folder).to(dtype).eval()
    ours, other = bert(ids_BT, mask_BT)[mask_BT], theirs(model, ids_BT, mask_BT)[mask_BT]
    assert ours.dtype == dtype
    roundings = torch.finfo(dtype).eps * truth.norm()  # two per value, in case the other library's error is small
    assert (ours.double() - truth).norm() <= 4 * (other.double() - truth).norm() + roundings


def test_old_names_and_what_lies_beside_the_encoder(folder: Path) -> None:
    """The first BERT's files have gamma and beta, the positions in int64, heads, and a prefix."""
    before = load_bert(folder)
    assert any(name.startswith("pooler.") for name in load_file(folder / "model.safetensors"))

    def old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        new = {
            "bert."
            + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()
        }
        assert sum(name.endswith(("gamma", "beta")) for name in new) == 14
        more = {"bert.embeddings.position_ids": torch.arange(70)[None], "cls.seq_relationship.bias": torch.zeros(2)}
        return new | more

    rewrite(folder, old)
    after = load_bert(folder)
    for (name, was), now in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(was, now), name


@pytest.fixture
def bert(folder: Path) -> Bert:
    return load_bert(folder)


def test_padding_is_never_read(bert: Bert) -> None:
    ids_BT, mask_BT = inputs()
    other_BT = torch.where(mask_BT, ids_BT, inputs(seed=2)[0])
    assert not torch.equal(ids_BT, other_BT)
    assert torch.equal(bert(ids_BT, mask_BT)[mask_BT], bert(other_BT, mask_BT)[mask_BT])


@pytest.mark.parametrize("width", [48, 70, 80])
def test_padding_changes_a_row_by_rounding_at_most(bert: Bert, width: int) -> None:
    """A width of 80 exceeds the model's 70 positions."""
    ids_BT, mask_BT = inputs(width=width)
    hidden_BTH = bert(ids_BT, mask_BT)
    for row, length in enumerate(LENGTHS):
        alone_1TH = bert(ids_BT[row : row + 1, :length], mask_BT[row : row + 1, :length])
        torch.testing.assert_close(hidden_BTH[row, :length], alone_1TH[0], rtol=0, atol=ROUNDINGS)


@pytest.mark.parametrize("width", [LENGTH_STEP, 3 * LENGTH_STEP, 5 * LENGTH_STEP])
def test_a_text_is_independent_of_batch_composition(bert: Bert, width: int) -> None:
    needs_invariant_rows(weight_shapes(bert), most=40 * width)
    lengths = [1 + (7 * row) % width for row in range(40)]
    ids_BT, mask_BT = inputs(lengths, width)
    hidden_BTH = bert(ids_BT, mask_BT)
    for rows in ([3], [39, 3], [3, 5, 3], list(range(3, 20))):
        found_BTH = bert(ids_BT[rows], mask_BT[rows])
        for place, row in enumerate(rows):
            assert torch.equal(found_BTH[place, : lengths[row]], hidden_BTH[row, : lengths[row]]), (rows, row)


def test_no_gradients_unless_asked_for(bert: Bert) -> None:
    assert not any(parameter.requires_grad for parameter in bert.parameters())
    bert.requires_grad_(True)
    bert(*inputs())[:, 0].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in bert.parameters())


def test_config_of_distilbert(shared_data: Path, tmp_path: Path) -> None:
    shutil.copy(shared_data / "encoders" / "distilbert-base-uncased.config.json", tmp_path / "config.json")
    config = read_bert_config(tmp_path)
    assert (config.model_type, config.hidden_size, config.layers, config.types) == ("distilbert", 768, 6, 0)
    assert (config.heads, config.intermediate_size, config.epsilon, config.activation) == (12, 3072, 1e-12, "gelu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "electra"}, "model_type is 'electra', expected one of bert, dpr, distilbert, roberta"),
        ({"model_type": "xlm-roberta"}, "pad_token_id is 0, expected 1"),
        ({"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 2}, "leaves 0 positions"),
        ({"model_type": ...}, "model_type is None"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish', expected one of gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', expected 'absolute'"),
        ({"is_decoder": True}, "is_decoder is True, expected False"),
        ({"projection_dim": 128}, "projection_dim is 128, expected 0"),
        ({"embedding_size": 16}, "embedding_size is 16, expected 32"),
        ({"hidden_size": ...}, "hidden_size is None, expected an integer from 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected an integer from 1"),
        ({"vocab_size": 12.5}, "vocab_size is 12.5, expected an integer from 1"),
        ({"num_attention_heads": 5}, "32 is not a multiple of the 5 attention heads"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps is 'small', expected a positive number"),
        ({"num_hidden_layers": 4}, "tensor encoder.layer.3.attention.self.query.weight is missing"),
        ({"num_hidden_layers": 2}, "tensor encoder.layer.2.attention.output.LayerNorm.bias is not part of the model"),
        ({"vocab_size": 7}, "the config specifies [7, 32]"),
    ],
)
def test_a_config_of_another_kind_or_model_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    refused(folders.edit(folder, tmp_path / "changed", **changes), said)


def refused(folder: Path, said: str) -> None:
    found = folders.refusal(lambda: load_bert(folder))
    assert said in found and str(folder) in found


def test_weights_that_do_not_fit_are_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    rewrite(folder, lambda tensors: tensors | {"encoder.extra": torch.zeros(2)})
    refused(folder, "tensor encoder.extra is not part of the model")
    rewrite(
        folder,
        lambda tensors: {
            name: value
            for name, value in tensors.items()
            if "layer.1.output.dense.b" not in name and name != "encoder.extra"
        },
    )
    refused(folder, "tensor encoder.layer.1.output.dense.bias is missing")
    rewrite(folder, lambda tensors: {name: value.long() for name, value in tensors.items()})
    refused(folder, "is missing")
    (folder / "model.safetensors").write_bytes(whole[:-100])
    refused(folder, "truncated inside tensor")
    (folder / "model.safetensors").write_bytes(whole)
    rewrite(folder, lambda tensors: tensors | {"embeddings.LayerNorm.bias": torch.zeros(32, dtype=torch.int64)})
    refused(folder, "tensor embeddings.LayerNorm.bias is I64, only F32, BF16, F16 are supported")
    rewrite(folder, lambda tensors: {"other." + name: value for name, value in tensors.items()})
    refused(folder, "tensor embeddings.word_embeddings.weight is missing")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "convert it once: AutoModel.from_pretrained(folder).save_pretrained(folder) of transformers")


# DeBERTa


@pytest.mark.parametrize(("span", "farthest"), [(256, 512), (8, 70), (16, 40), (512, 0)])
def test_buckets_are_those_of_transformers(span: int, farthest: int) -> None:
    length = 700  # beyond the farthest
    place_T = torch.arange(length)
    states = torch.empty(1, length, 1)
    expected_TT = build_relative_position(states, states, span if farthest else -1, farthest or -1)[0]
    found_TT = buckets(place_T[:, None] - place_T, span, farthest)
    assert torch.equal(found_TT, (expected_TT + span).clamp(0, 2 * span - 1))
    assert torch.equal(
        (found_TT - span)[1:, 0].clamp(max=span - 1), -(found_TT - span)[0, 1:].clamp(min=1 - span)
    )  # an odd function


def test_deberta_in_float64_is_theirs_but_for_rounding(tmp_path: Path) -> None:
    """Heads have 12 dimensions, because their scale is a float32 square root, which is exact for 3 * 12."""
    model = folders.deberta(conv_kernel_size=3, conv_act="gelu", hidden_size=48)
    folders.save_classifier(tmp_path, model)
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(4, 40, (5, 48), generator=generator)
    mask_BT = torch.arange(48) < torch.tensor([48, 33, 17, 2, 1])[:, None]
    with torch.no_grad():
        expected_BTH = model.double().deberta(ids_BT, mask_BT.long()).last_hidden_state
    found_BTH = load_deberta(tmp_path, torch.float64)(ids_BT, mask_BT)
    torch.testing.assert_close(found_BTH[mask_BT], expected_BTH[mask_BT], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deberta"}, "model_type is 'deberta', expected 'deberta-v2'"),
        ({"relative_attention": False}, "relative_attention is False, expected True"),
        ({"pos_att_type": ["c2p"]}, "pos_att_type is ['c2p'], expected 'p2c|c2p'"),
        ({"pos_att_type": ...}, "pos_att_type is None"),
        ({"embedding_size": 16}, "embedding_size is 16, expected 32"),
        ({"attention_head_size": 16}, "attention_head_size is 16, expected 8"),
        ({"num_attention_heads": 5}, "32 is not a multiple of the 5 attention heads"),
        ({"position_buckets": "8"}, "position_buckets is '8', expected an integer from -1 to"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish', expected one of gelu"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0, expected a positive number"),
    ],
)
def test_a_deberta_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folders.save_classifier(tmp_path / "a", folders.deberta())
    found = folders.refusal(lambda: read_deberta_config(folders.edit(tmp_path / "a", tmp_path / "b", **changes)))
    assert said in found and "config.json" in found


def test_a_deberta_whose_tensors_do_not_fit_its_config(tmp_path: Path) -> None:
    folders.save_classifier(tmp_path / "a", folders.deberta())
    for changes, said in (
        ({"position_buckets": 9}, "tensor deberta.encoder.rel_embeddings.weight"),
        ({"share_att_key": False}, "tensor deberta.encoder.layer.0.attention.self.pos_key_proj.weight is missing"),
        ({"pooler_hidden_act": "tanh"}, "pooler_hidden_act is 'tanh'"),
    ):
        copy = folders.edit(tmp_path / "a", tmp_path / next(iter(changes)), **changes)
        assert said in folders.refusal(lambda copy=copy: load_classifier(copy))
    said = folders.refusal(lambda: load_bert(tmp_path / "a"))
    assert "model_type is 'deberta-v2', expected one of bert" in said
