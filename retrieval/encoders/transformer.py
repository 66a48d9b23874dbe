"""Encoders of the BERT family and DeBERTa versions 2 and 3, from scratch: config, transformer, loading of weights.

    x = LN(word[ids] + position + type)                                         (Devlin et al. 2019)
    x = LN(x + W_o softmax(q k^T / sqrt(D)) v)          every token attends to every token that the mask allows
    x = LN(x + W_down gelu(W_up x))                     the norm follows the sum ("post-LN")

DeBERTa (He et al. 2020, 2021) has, instead of q k^T / sqrt(D),

    score(i, j) = (q_i k_j  +  q_i r^K_d(i,j)  +  r^Q_d(i,j) k_j) / sqrt(3 D)         content and position disentangled
    d(i, j)     = S + bucket(i - j), within [0, 2S)                                   rows of a table r of 2S positions
    r^K, r^Q    = the table, projected as the content is, or by separate projections

bucket keeps distances up to S/2 and puts longer ones in logarithmic bins. It is odd, so both terms look up the same
row. Version 2 adds a convolution over the embeddings after the first layer. DistilBERT (Sanh et al. 2019) has other
names and no types. RoBERTa and XLM-R (Liu et al. 2019, Conneau et al. 2020) number positions from 1 + the id of their
padding token. Padding changes a result by rounding at most. On a CPU in float32, BERT's is independent of batch
composition to the bit, if T is the same multiple of `LENGTH_STEP` and the BLAS is batch-invariant.

Axes: B texts, T padded length, H hidden, N heads, D head dimension, I intermediate, W rows of a table
(docs/notation.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.common.errors import UserError
from thresher.common.files import read_json_object
from thresher.kernels.layers import linear
from thresher.kernels.operands import ROW_MULTIPLE
from thresher.policy.config import LARGEST_SIZE
from thresher.policy.weights import build_unallocated, read_weights, tensor_shapes

C = TypeVar("C", bound="BertConfig")

# The number of rows of a matmul is a multiple for which a BLAS may be batch-invariant; attention has a fixed length.
LENGTH_STEP = ROW_MULTIPLE


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
_CONV_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "tanh": torch.tanh}

# For each model_type: our field -> its key in config.json.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
_BERT_KEYS = {**_SIZES, "types": "type_vocab_size"}
_DISTILBERT_KEYS = {
    **_SIZES,
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "layers": "n_layers",
    "heads": "n_heads",
}
ROBERTAS = ("roberta", "xlm-roberta")
DEBERTA = "deberta-v2"  # of versions 2 and 3
_KEYS = {
    "bert": _BERT_KEYS,
    "dpr": _BERT_KEYS,
    "distilbert": _DISTILBERT_KEYS,
    **dict.fromkeys(ROBERTAS, _BERT_KEYS),
}
# RoBERTa's padding token has id 1, and the rows of positions up to it are unused.
_ROBERTA_PADDING = 1
_DISTILBERT_EPSILON = 1e-12  # fixed in its definition

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
_DEBERTA_LAYER = (
    "encoder.layer.{}.",
    *(f"attention.self.{name}_proj" for name in ("query", "key", "value")),
    *_BERT_LAYER[4:],
    *(f"attention.self.pos_{name}_proj" for name in ("key", "query")),
)
_PREFIXES = (
    "",
    "bert.",
    "distilbert.",
    "roberta.",
    "deberta.",
    "question_encoder.bert_model.",
    "ctx_encoder.bert_model.",
)
_WORDS = "embeddings.word_embeddings.weight"
# Tensors that are not read: positions that the config does not use, the pooler, heads of other tasks.
_PASSED_OVER = ("embeddings.position", "pooler.")
_HEADS = (
    "cls.",
    "lm_head.",
    "classifier.",
    "pre_classifier.",
    "qa_outputs.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "lm_predictions.",
    "mask_predictions.",
    *_PASSED_OVER[1:],
)
# The first BERT's files call a norm's weight gamma and its bias beta.
_OLD_ENDS = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes and constants of one encoder. `max_positions`: tokens of the longest text. `types`: 0 without token types
    (DistilBERT). `architecture`: config.json's class, which distinguishes DPR's halves."""

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
        """Return the row of the position table for a text's first token."""
        return _ROBERTA_PADDING + 1 if self.model_type in ROBERTAS else 0

    def __post_init__(self) -> None:
        if self.max_positions < 1:
            raise UserError(f"max_position_embeddings leaves {self.max_positions} positions; fetch the file again")
        if self.hidden_size % self.heads:
            raise UserError(
                f"the hidden size {self.hidden_size} is not a multiple of the {self.heads} attention heads; "
                "correct one of them"
            )


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(BertConfig):
    """Config of a DeBERTa. span: S above. farthest: the distance in the last bin, 0 without bins. shared: r has the
    content's projections. positions: embeddings have absolute ones too. convolution: kernel size and groups."""

    span: int
    farthest: int
    shared: bool
    norm_table: bool
    positions: bool
    convolution: tuple[int, int] | None
    convolution_activation: str


def read_bert_config(folder: str | Path) -> BertConfig:
    """Read config.json of a model folder of the BERT family."""
    path = Path(folder) / "config.json"
    record = read_json_object(path)
    model_type = record.get("model_type")
    if model_type not in _KEYS:
        raise UserError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(_KEYS)}; "
            "use an encoder of the BERT family"
        )
    wanted: dict[str, tuple[Any, ...]] = {
        "position_embedding_type": (None, "absolute"),
        "is_decoder": (None, False),
        "add_cross_attention": (None, False),
        "projection_dim": (None, 0),
        "quantization_config": (None,),
        "embedding_size": (None, record.get("hidden_size")),
    }
    if model_type in ROBERTAS:
        wanted["pad_token_id"] = (None, _ROBERTA_PADDING)
    _refuse_unsupported(record, wanted, path)
    sizes = {field: _whole(record.get(key), 1, key, path) for field, key in _KEYS[model_type].items()}
    if model_type in ROBERTAS:
        sizes["max_positions"] -= _ROBERTA_PADDING + 1
    key = "activation" if model_type == "distilbert" else "hidden_act"
    return _made(
        BertConfig,
        record,
        path,
        epsilon=_DISTILBERT_EPSILON if model_type == "distilbert" else _epsilon(record.get("layer_norm_eps"), path),
        activation=_one_of(ACTIVATIONS, record.get(key), key, path),
        **sizes,
    )


def read_deberta_config(folder: str | Path) -> DebertaConfig:
    """Read config.json of a DeBERTa's folder."""
    path = Path(folder) / "config.json"
    record = read_json_object(path)
    if record.get("model_type") != DEBERTA:
        raise UserError(f"{path}: model_type is {record.get('model_type')!r}, expected {DEBERTA!r}")
    if sorted(_words_of(record.get("pos_att_type"))) != ["c2p", "p2c"]:
        raise UserError(
            f"{path}: pos_att_type is {record.get('pos_att_type')!r}, expected 'p2c|c2p'; use a model that has both"
        )
    hidden, heads = record.get("hidden_size"), record.get("num_attention_heads")
    head = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    wanted: dict[str, tuple[Any, ...]] = {
        "relative_attention": (True,),
        "embedding_size": (None, hidden),
        "attention_head_size": (None, head),
        "pooler_hidden_size": (None, hidden),
        "quantization_config": (None,),
    }
    _refuse_unsupported(record, wanted, path)

    def whole(key: str, least: int, default: int) -> int:
        return _whole(record.get(key, default), least, key, path)

    sizes = {field: _whole(record.get(key), 1, key, path) for field, key in _SIZES.items()}
    farthest = whole("max_relative_positions", -1, -1)
    farthest = farthest if farthest > 0 else sizes["max_positions"]
    bins, kernel = whole("position_buckets", -1, -1), whole("conv_kernel_size", 0, 0)
    return _made(
        DebertaConfig,
        record,
        path,
        types=whole("type_vocab_size", 0, 0),
        epsilon=_epsilon(record.get("layer_norm_eps", 1e-7), path),
        activation=_one_of(ACTIVATIONS, record.get("hidden_act", "gelu"), "hidden_act", path),
        span=bins if bins > 0 else farthest,
        farthest=farthest if bins > 0 else 0,
        shared=bool(record.get("share_att_key", False)),
        norm_table="layer_norm" in _words_of(record.get("norm_rel_ebd", "none")),
        positions=bool(record.get("position_biased_input", True)),
        convolution=(kernel, whole("conv_groups", 1, 1)) if kernel else None,
        convolution_activation=_one_of(_CONV_ACTIVATIONS, record.get("conv_act", "tanh"), "conv_act", path),
        **sizes,
    )


def _made(kind: type[C], record: Mapping[str, Any], path: Path, **fields: Any) -> C:
    named = record.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    try:
        return kind(model_type=record["model_type"], architecture=architecture, **fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_unsupported(record: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], path: Path) -> None:
    """Raise UserError for every feature that would silently change the results of the model."""
    for key, accepted in wanted.items():
        if record.get(key) not in accepted:
            raise UserError(
                f"{path}: {key} is {record.get(key)!r}, expected {accepted[-1]!r}; use a model with that value"
            )


def _words_of(value: object) -> list[str]:
    """Return the words of a setting, which may be a list or a string of words joined by bars."""
    words = value.split("|") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(word).strip().lower() for word in words]


def _whole(value: object, least: int, key: str, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_SIZE:
        raise UserError(
            f"{path}: {key} is {value!r}, expected an integer from {least} to {LARGEST_SIZE:,}; add it or fetch the "
            "file again"
        )
    return value


def _one_of(known: Mapping[str, object], value: object, key: str, path: Path) -> str:
    if not isinstance(value, str) or value not in known:
        raise UserError(f"{path}: {key} is {value!r}, expected one of {', '.join(known)}; use another model")
    return value


def _epsilon(value: object, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise UserError(
            f"{path}: layer_norm_eps is {value!r}, expected a positive number below 1; fetch the file again"
        )
    return float(value)


def map_rows(x: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """Apply the linear map to the last axis of `x`: [.., I] -> [.., O]."""
    return linear(x.flatten(0, -2), weight_OI, bias_O).view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """torch's Linear, with the matmul of the library that is faster here (kernels/layers.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return map_rows(x, self.weight, self.bias)


class EncoderLayer(nn.Module):
    """Attention and a two-layer MLP, each added to the residual stream and followed by a norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads = config.heads
        self.activation = ACTIVATIONS[config.activation]
        self.qkv = Linear(hidden, 3 * hidden)
        own_table = isinstance(config, DebertaConfig) and not config.shared
        self.table_kq = Linear(hidden, 2 * hidden) if own_table else None
        self.out = Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, config.epsilon)
        self.up = Linear(hidden, inner)
        self.down = Linear(inner, hidden)
        self.mlp_norm = nn.LayerNorm(hidden, config.epsilon)

    def forward(self, x_BTH: Tensor, mask_B11T: Tensor, relative: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return the layer's output [B, T, H]. mask_B11T: bool, false for keys that no token attends to. relative: a
        DeBERTa's table [W, H], and its row for each pair of query and key positions, int64 [T, T]."""
        if relative is None:
            q_BNTD, k_BNTD, v_BNTD = self.qkv(x_BTH).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            o_BNTD = F.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, attn_mask=mask_B11T)
        else:
            o_BNTD = self._disentangled(x_BTH, mask_B11T, *relative)
        x_BTH = self.attention_norm(x_BTH + self.out(o_BNTD.transpose(1, 2).flatten(2)))
        mlp_BTH: Tensor = self.mlp_norm(x_BTH + self.down(self.activation(self.up(x_BTH))))
        return mlp_BTH

    def _disentangled(self, x_BTH: Tensor, mask_B11T: Tensor, table_WH: Tensor, row_TT: Tensor) -> Tensor:
        q_BNTD, k_BNTD, v_BNTD = self._projected(x_BTH, self.qkv, 3)
        if self.table_kq is None:
            table_q_NWD, table_k_NWD = self._projected(table_WH, self.qkv, 3, of=slice(2))
        else:
            table_k_NWD, table_q_NWD = self._projected(table_WH, self.table_kq, 2)
        index_BNTT = row_TT.expand(*q_BNTD.shape[:2], -1, -1)
        # r^Q k_j is gathered as [j, i] and transposed.
        content_BNTT = (q_BNTD @ table_k_NWD.transpose(-1, -2)).gather(-1, index_BNTT)
        position_BNTT = (k_BNTD @ table_q_NWD.transpose(-1, -2)).gather(-1, index_BNTT.transpose(-1, -2))
        scale = 1 / math.sqrt(3 * q_BNTD.shape[-1])
        bias_BNTT = (content_BNTT + position_BNTT.transpose(-1, -2)) * scale
        bias_BNTT = bias_BNTT.masked_fill(~mask_B11T, -math.inf)
        return F.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, attn_mask=bias_BNTT, scale=scale)

    def _projected(self, x_TH: Tensor, projection: nn.Linear, parts: int, of: slice = slice(None)) -> list[Tensor]:
        """Map [.., T, H] to [.., N, T, D] by each of the linear maps fused in one `projection`, or by some of them."""
        pairs = list(zip(projection.weight.chunk(parts), projection.bias.chunk(parts), strict=True))[of]
        return [map_rows(x_TH, *pair).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for pair in pairs]


class Bert(nn.Module):
    """An encoder without a head, which may be a DeBERTa; created by `load_bert` or `load_deberta`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        deberta = config if isinstance(config, DebertaConfig) else None
        rows = config.first_position + config.max_positions
        self.words_VH = nn.Parameter(torch.empty(config.vocab_size, hidden))
        absolute = deberta is None or deberta.positions
        self.positions_WH = nn.Parameter(torch.empty(rows, hidden)) if absolute else None
        self.types_WH = nn.Parameter(torch.empty(config.types, hidden)) if config.types else None
        self.norm = nn.LayerNorm(hidden, config.epsilon)
        self.table_WH = nn.Parameter(torch.empty(2 * deberta.span, hidden)) if deberta else None
        self.table_norm = nn.LayerNorm(hidden, config.epsilon) if deberta and deberta.norm_table else None
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.convolution: nn.Conv1d | None = None
        if deberta and deberta.convolution is not None:
            kernel, groups = deberta.convolution
            self.convolution = nn.Conv1d(hidden, hidden, kernel, padding=(kernel - 1) // 2, groups=groups)
            self.convolution_norm = nn.LayerNorm(hidden, config.epsilon)
            self.convolution_activation = _CONV_ACTIVATIONS[deberta.convolution_activation]

    @property
    def device(self) -> torch.device:
        return self.words_VH.device

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states of the last layer, [B, T, H] in the weights' dtype, undefined for padding.

        ids_BT: int64. mask_BT: bool, true for tokens, at least one per row, with padding on the right. types_BT: int64,
        the segment of each token, None for 0. T may exceed `max_positions` only by padding.
        """
        place_T = torch.arange(ids_BT.shape[1], device=self.device)
        x_BTH: Tensor = F.embedding(ids_BT, self.words_VH)
        if self.positions_WH is not None:
            # Padding to a fixed step may exceed the last position; the rows read for it are masked.
            position_T = place_T.clamp(max=self.config.max_positions - 1) + self.config.first_position
            x_BTH = x_BTH + self.positions_WH[position_T]
        if self.types_WH is not None:
            x_BTH = x_BTH + (self.types_WH[0] if types_BT is None else F.embedding(types_BT, self.types_WH))
        x_BTH = self.norm(x_BTH)
        relative = None
        if self.table_WH is not None:
            assert isinstance(self.config, DebertaConfig)
            x_BTH = x_BTH * mask_BT[:, :, None]
            table_WH = self.table_WH if self.table_norm is None else self.table_norm(self.table_WH)
            relative = (table_WH, buckets(place_T[:, None] - place_T, self.config.span, self.config.farthest))
        embedded_BTH = x_BTH
        for number, layer in enumerate(self.layers):
            x_BTH = layer(x_BTH, mask_BT[:, None, None, :], relative)
            if number == 0 and self.convolution is not None:
                near_BTH = self.convolution(embedded_BTH.transpose(1, 2)).transpose(1, 2)
                x_BTH = self.convolution_norm(x_BTH + self.convolution_activation(near_BTH))
        return x_BTH

    def padded(
        self, rows: Sequence[Sequence[int]], length: int, types: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `forward` of ids of unequal lengths, at least one each, padded to `length`: (hidden_BTH, mask_BT)."""

        def batch(lists: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor([[*row, *[0] * (length - len(row))] for row in lists]).to(self.device)

        lengths_B1 = torch.tensor([[len(row)] for row in rows]).to(self.device)
        mask_BT = torch.arange(length, device=self.device) < lengths_B1
        return self(batch(rows), mask_BT, None if types is None else batch(types)), mask_BT


def buckets(distance_TT: Tensor, span: int, farthest: int) -> Tensor:
    """Return the table's row for each distance i - j: S + bucket, within [0, 2S); int64 [..] -> int64 [..]. The
    logarithm is in float32, as published; in float64 a distance on a bin's edge may fall into the next bin."""
    bucket_TT = distance_TT
    if farthest:
        middle = span // 2
        far_TT = distance_TT.abs().clamp(min=middle)
        width = torch.log(torch.tensor((farthest - 1) / middle))
        bin_TT = torch.ceil(torch.log(far_TT / middle) / width * (middle - 1)).long() + middle
        bucket_TT = torch.where(distance_TT.abs() <= middle, distance_TT, bin_TT * distance_TT.sign())
    return (bucket_TT + span).clamp(0, 2 * span - 1)


def load_bert(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Bert:
    """Read an encoder from a folder of config.json and safetensors, without gradients, pooler and heads."""
    return _load(Path(folder), read_bert_config(folder), dtype, device)


def load_deberta(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Bert:
    """Read a DeBERTa; see `load_bert`."""
    return _load(Path(folder), read_deberta_config(folder), dtype, device)


def _load(folder: Path, config: BertConfig, dtype: torch.dtype, device: torch.device | str) -> Bert:
    found = tensor_shapes(folder)
    prefix = next((prefix for prefix in _PREFIXES if prefix + _WORDS in found), "")
    bert = build_unallocated(lambda: Bert(config), config.layers, found, folder / "config.json").to(dtype)
    bert.requires_grad_(False)
    shapes = {_name_in(found, prefix + name): view.shape for name, view in tensors_of(bert).items()}
    beside = {name for name in found if name.removeprefix(prefix).startswith(_PASSED_OVER) or name.startswith(_HEADS)}
    weights = read_weights(folder, shapes, optional=beside - shapes.keys())
    views = dict(zip(shapes, tensors_of(bert.to_empty(device=device)).values(), strict=True))
    for name, tensor in weights:
        views[name].copy_(tensor)
    return bert.eval()


def _name_in(found: Mapping[str, torch.Size], name: str) -> str:
    old = next((name.removesuffix(end) + old for end, old in _OLD_ENDS.items() if name.endswith(end)), name)
    return old if name not in found and old in found else name


def tensors_of(bert: Bert) -> dict[str, Tensor]:
    """Return tensors that share the model's memory, by Hugging Face's names without a prefix."""
    tables = {
        _WORDS: bert.words_VH,
        "embeddings.position_embeddings.weight": bert.positions_WH,
        "embeddings.LayerNorm.weight": bert.norm.weight,
        "embeddings.LayerNorm.bias": bert.norm.bias,
        "embeddings.token_type_embeddings.weight": bert.types_WH,
        "encoder.rel_embeddings.weight": bert.table_WH,
    }
    views = {name: tensor.data for name, tensor in tables.items() if tensor is not None}
    modules: dict[str, nn.Module | None] = {"encoder.LayerNorm": bert.table_norm}
    if bert.convolution is not None:
        modules |= {"encoder.conv.conv": bert.convolution, "encoder.conv.LayerNorm": bert.convolution_norm}
    for name, module in modules.items():
        if module is not None:
            views |= {f"{name}.{part}": parameter.data for part, parameter in module.named_parameters()}
    names = {"distilbert": _DISTILBERT_LAYER, DEBERTA: _DEBERTA_LAYER}.get(bert.config.model_type, _BERT_LAYER)
    for number, layer in enumerate(bert.layers):
        views |= _layer_views(layer, names[0].format(number), names[1:])
    return views


def _layer_views(layer: nn.Module, start: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    assert isinstance(layer, EncoderLayer)
    pairs = [*zip(layer.qkv.weight.data.chunk(3), layer.qkv.bias.data.chunk(3), strict=True)]
    parts = (layer.out, layer.attention_norm, layer.up, layer.down, layer.mlp_norm)
    pairs += [(part.weight.data, part.bias.data) for part in parts]
    if layer.table_kq is not None:
        pairs += zip(layer.table_kq.weight.data.chunk(2), layer.table_kq.bias.data.chunk(2), strict=True)
    views = {}
    for name, (weight, bias) in zip(names, pairs, strict=False):  # a shared table has no separate projections
        views[f"{start}{name}.weight"], views[f"{start}{name}.bias"] = weight, bias
    return views
