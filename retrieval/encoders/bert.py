"""BERT from scratch: config, transformer, weights in. The whole family that encodes text for retrieval is this file.

    x   = LN(word[ids] + position + type)                                       (Devlin et al. 2019)
    x   = LN(x + W_o softmax(q k^T / sqrt(D)) v)        every token sees every token that the mask lets in
    x   = LN(x + W_down gelu(W_up x))                   the norm stands behind the sum ("post-LN")

BERT, MiniLM, E5, BGE and DPR's two halves differ in sizes and in the prefix of their tensors' names; DistilBERT (Sanh
et al. 2019) has other names and no types; RoBERTa and XLM-R (Liu et al. 2019, Conneau et al. 2020) count positions from
the one behind their padding token's. Query, key and value projections are one parameter here.

Padding takes part in nothing: no token attends to it, so a row's result changes by rounding at most. On a CPU in
float32 it is independent of batch composition, to the bit, as long as T is the same multiple of `LENGTH_STEP` and the
BLAS is batch-invariant (docs/design.md, "Rollout").

Deliberately absent: dropout, pooler and task heads (their tensors are passed over; whoever needs a head puts it on top
of `Bert.forward`), relative positions, cross attention, and pytorch_model.bin, which can run code when it is opened.

Axes: B texts, T padded length, H hidden, N heads, D head dimension, I intermediate, W rows of a table
(docs/notation.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.common.errors import UserError
from thresher.common.files import read_json_object
from thresher.kernels.matmul import ROW_MULTIPLE
from thresher.policy.config import LARGEST_SIZE
from thresher.policy.weights import build_unallocated, read_weights, tensor_shapes

# So rows of a matmul come in multiples in which a BLAS may be batch-invariant; attention's are at a fixed length.
LENGTH_STEP = ROW_MULTIPLE


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}

# model_type -> our field: its key. DistilBERT's epsilon is fixed in its definition.
_BERT_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "types": "type_vocab_size",
}
_DISTILBERT_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "max_positions": "max_position_embeddings",
}
ROBERTAS = ("roberta", "xlm-roberta")
_KEYS = {
    "bert": _BERT_KEYS,
    "dpr": _BERT_KEYS,
    "distilbert": _DISTILBERT_KEYS,
    **dict.fromkeys(ROBERTAS, _BERT_KEYS),
}
# RoBERTa's padding token has id 1, and the rows of positions up to it hold nothing.
_ROBERTA_PADDING = 1
_DISTILBERT_EPSILON = 1e-12

# Names of a layer's tensors, in the order of `_layer_views`.
_BERT_LAYER = (
    "encoder.layer.{}.",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT_LAYER = (
    "transformer.layer.{}.",
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)
_PREFIXES = ("", "bert.", "distilbert.", "roberta.", "question_encoder.bert_model.", "ctx_encoder.bert_model.")
_FIRST = "embeddings.word_embeddings.weight"
# What may lie beside the encoder: a counter, the pooler, and heads of other tasks.
_PASSED_OVER = ("embeddings.position_ids", "pooler.")
_HEADS = (
    "cls.",
    "lm_head.",
    "classifier.",
    "pre_classifier.",
    "qa_outputs.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
)
# The first BERT's files call a norm's weight gamma and its bias beta.
_OLD_ENDS = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes and constants of one encoder; UserError when they do not fit each other.

    `max_positions` is the length of the longest text. `types` is 0 where there are no token types (DistilBERT).
    `architecture` is the class that config.json names, empty if none: it tells DPR's halves apart.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    max_positions: int
    types: int = 0
    epsilon: float
    activation: str

    @property
    def first_position(self) -> int:
        """The row of the table of positions that a text's first token gets."""
        return _ROBERTA_PADDING + 1 if self.model_type in ROBERTAS else 0

    def __post_init__(self) -> None:
        if self.max_positions < 1:
            raise UserError(f"max_position_embeddings leaves {self.max_positions} positions; fetch the file again")
        if self.hidden_size % self.heads:
            raise UserError(
                f"the hidden size {self.hidden_size} is not a multiple of the {self.heads} attention heads; "
                "correct one of them"
            )


def read_bert_config(folder: str | Path) -> BertConfig:
    """Reads config.json of a model folder.

    UserError naming file and key: absent, malformed, a missing size, or a kind of model, activation or position that is
    not the BERT family's.
    """
    path = Path(folder) / "config.json"
    record = read_json_object(path)
    model_type = record.get("model_type")
    if model_type not in _KEYS:
        raise UserError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(_KEYS)}; "
            "use an encoder of the BERT family"
        )
    sizes = {field: _size(record, key, path) for field, key in _KEYS[model_type].items()}
    if model_type in ROBERTAS:
        sizes["max_positions"] -= _ROBERTA_PADDING + 1
    activation = record.get("activation" if model_type == "distilbert" else "hidden_act")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"{path}: the activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}; use another encoder"
        )
    _refuse_unsupported(record, path)
    epsilon = _DISTILBERT_EPSILON if model_type == "distilbert" else record.get("layer_norm_eps")
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise UserError(
            f"{path}: layer_norm_eps is {epsilon!r}, expected a positive number below 1; fetch the file again"
        )
    named = record.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    try:
        return BertConfig(
            model_type=model_type, architecture=architecture, epsilon=float(epsilon), activation=activation, **sizes
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_unsupported(record: Mapping[str, Any], path: Path) -> None:
    """UserError for every feature that would silently change what the model computes."""
    wanted: dict[str, tuple[Any, ...]] = {
        "position_embedding_type": (None, "absolute"),
        "is_decoder": (None, False),
        "add_cross_attention": (None, False),
        "projection_dim": (None, 0),
        "quantization_config": (None,),
        "embedding_size": (None, record.get("hidden_size")),
    }
    if record["model_type"] in ROBERTAS:
        wanted["pad_token_id"] = (None, _ROBERTA_PADDING)
    for key, accepted in wanted.items():
        if record.get(key) not in accepted:
            raise UserError(f"{path}: {key} is {record[key]!r}, expected {accepted[-1]!r}; use an encoder without it")


def _size(record: Mapping[str, Any], key: str, path: Path) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise UserError(
            f"{path}: {key} is {value!r}, expected a positive integer up to {LARGEST_SIZE:,}; add it or fetch the file "
            "again"
        )
    return value


class _Norm(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.epsilon = config.epsilon

    def forward(self, x_BTH: Tensor) -> Tensor:
        return F.layer_norm(x_BTH, self.weight.shape, self.weight, self.bias, self.epsilon)


class BertLayer(nn.Module):
    """Attention and a two-layer MLP, each added to the stream and normed."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads = config.heads
        self.activation = ACTIVATIONS[config.activation]
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_norm = _Norm(config)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.mlp_norm = _Norm(config)

    def forward(self, x_BTH: Tensor, mask_B11T: Tensor) -> Tensor:
        """x_BTH -> the same shape; mask_B11T: bool, false where nobody may look."""
        q_BNTD, k_BNTD, v_BNTD = self.qkv(x_BTH).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o_BNTD = F.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, attn_mask=mask_B11T)
        x_BTH = self.attention_norm(x_BTH + self.out(o_BNTD.transpose(1, 2).flatten(2)))
        mlp_BTH: Tensor = self.mlp_norm(x_BTH + self.down(self.activation(self.up(x_BTH))))
        return mlp_BTH


class Bert(nn.Module):
    """The encoder without a head. Make one with `load_bert`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.words_VH = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        rows = config.first_position + config.max_positions
        self.positions_WH = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.types_WH = nn.Parameter(torch.empty(config.types, config.hidden_size)) if config.types else None
        self.norm = _Norm(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.layers))

    @property
    def device(self) -> torch.device:
        return self.words_VH.device

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        """Hidden states of the last layer, [B, T, H] in the weights' dtype.

        ids_BT: int64, padding may be any token. mask_BT: bool, true for tokens, of which every row has one, padding on
        the right. types_BT: int64, the segment of each token, 0 everywhere if None; of no effect for DistilBERT.
        What stands at padded places is no result. T may exceed `max_positions` by padding alone.
        """
        length = ids_BT.shape[1]
        # Padding to a fixed step may reach past the last position; what it reads there is masked.
        position_T = torch.arange(length, device=self.device).clamp_(max=self.config.max_positions - 1)
        position_T += self.config.first_position
        sum_BTH = F.embedding(ids_BT, self.words_VH) + self.positions_WH[position_T]
        if self.types_WH is not None:
            sum_BTH = sum_BTH + (self.types_WH[0] if types_BT is None else F.embedding(types_BT, self.types_WH))
        x_BTH: Tensor = self.norm(sum_BTH)
        mask_B11T = mask_BT[:, None, None, :]
        for layer in self.layers:
            x_BTH = layer(x_BTH, mask_B11T)
        return x_BTH

    def padded(self, rows: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
        """`forward` of ids of unequal lengths, at least one each, padded to `length`: (hidden_BTH, mask_BT)."""
        ids_BT = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows]).to(self.device)
        lengths_B1 = torch.tensor([[len(row)] for row in rows]).to(self.device)
        mask_BT = torch.arange(length, device=self.device) < lengths_B1
        return self(ids_BT, mask_BT), mask_BT


def load_bert(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Bert:
    """Reads an encoder from a folder of config.json and safetensors, without gradients.

    Tensors may stand under `bert.`, `distilbert.`, `roberta.`, DPR's prefixes or none; pooler and heads are left.
    UserError naming file and tensor for one that is missing, of another shape, or not part of such a model.
    """
    folder = Path(folder)
    config = read_bert_config(folder)
    found = tensor_shapes(folder)
    prefix = next((prefix for prefix in _PREFIXES if prefix + _FIRST in found), "")
    bert = build_unallocated(lambda: Bert(config), config.layers, found, folder / "config.json").to(dtype)
    bert.requires_grad_(False)
    shapes = {_name_in(found, prefix + name): view.shape for name, view in tensors_of(bert).items()}
    beside = {name for name in found if name.removeprefix(prefix).startswith(_PASSED_OVER) or name.startswith(_HEADS)}
    weights = read_weights(folder, shapes, optional=beside)
    views = dict(zip(shapes, tensors_of(bert.to_empty(device=device)).values(), strict=True))
    for name, tensor in weights:
        views[name].copy_(tensor)
    return bert.eval()


def _name_in(found: Mapping[str, torch.Size], name: str) -> str:
    old = next((name.removesuffix(end) + old for end, old in _OLD_ENDS.items() if name.endswith(end)), name)
    return old if name not in found and old in found else name


def tensors_of(bert: Bert) -> dict[str, Tensor]:
    """Hugging Face's names, without a prefix -> tensors that share the model's memory."""
    views = {
        _FIRST: bert.words_VH.data,
        "embeddings.position_embeddings.weight": bert.positions_WH.data,
        "embeddings.LayerNorm.weight": bert.norm.weight.data,
        "embeddings.LayerNorm.bias": bert.norm.bias.data,
    }
    if bert.types_WH is not None:
        views["embeddings.token_type_embeddings.weight"] = bert.types_WH.data
    names = _DISTILBERT_LAYER if bert.config.model_type == "distilbert" else _BERT_LAYER
    for number, layer in enumerate(bert.layers):
        views |= _layer_views(layer, names[0].format(number), names[1:])
    return views


def _layer_views(layer: nn.Module, start: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    assert isinstance(layer, BertLayer)
    pieces = zip(layer.qkv.weight.data.chunk(3), layer.qkv.bias.data.chunk(3), strict=True)
    parts = (layer.out, layer.attention_norm, layer.up, layer.down, layer.mlp_norm)
    pairs = [*pieces, *((part.weight.data, part.bias.data) for part in parts)]
    views = {}
    for name, (weight, bias) in zip(names, pairs, strict=True):
        views[f"{start}{name}.weight"], views[f"{start}{name}.bias"] = weight, bias
    return views
