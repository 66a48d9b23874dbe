"""DeBERTa, versions 2 and 3: config, transformer, weights in; for classifiers of pairs (He et al. 2020, 2021).

    score(i, j) = (q_i k_j  +  q_i r^K_d(i,j)  +  r^Q_d(i,j) k_j) / sqrt(3 D)         content and position disentangled
    d(i, j)     = S + bucket(i - j), within [0, 2S)                                   rows of a table r of 2S positions
    r^K, r^Q    = the table through the projections of content, or through its own

bucket keeps distances up to S/2 and puts longer ones in bins that widen with the logarithm up to the largest. Both sums
look up the same row d(i, j), for bucket is odd. The rest is BERT: norms behind the sums, a two-layer MLP. Version 2
adds, once, after the first layer, a convolution over the embeddings. There are no positions in the embeddings unless
the config asks for them.

Padding takes part in nothing: keys are masked, and the convolution reads zeros there.

Deliberately absent: dropout, heads, embeddings narrower than the stream, attention without relative positions, and the
first DeBERTa, whose projections are laid out in another way.

Axes: B texts, T padded length, H hidden, N heads, D head dimension, I intermediate, W rows of a table
(docs/notation.md).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.common.errors import UserError
from thresher.common.files import read_json_object
from thresher.policy.config import LARGEST_SIZE
from thresher.policy.weights import build_unallocated, read_weights, tensor_shapes
from thresher.retrieval.encoders.bert import ACTIVATIONS

MODEL_TYPE = "deberta-v2"  # of both versions

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
_CONV_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "tanh": torch.tanh}
_PREFIX = "deberta."
_HEADS = ("pooler.", "classifier.", "cls.", "lm_predictions.", "mask_predictions.")


@dataclass(frozen=True, kw_only=True)
class DebertaConfig:
    """Sizes and switches of one encoder; UserError when they do not fit each other.

    span: S above. farthest: the distance in the last bin, buckets being in use; 0 where every distance up to the span
    has a row of its own. shared: r goes through content's projections. positions: embeddings hold absolute ones too.
    convolution: kernel size and groups, None without.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    max_positions: int
    types: int
    epsilon: float
    activation: str
    span: int
    farthest: int
    shared: bool
    norm_table: bool
    positions: bool
    convolution: tuple[int, int] | None
    convolution_activation: str

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise UserError(
                f"the hidden size {self.hidden_size} is not a multiple of the {self.heads} attention heads; "
                "correct one of them"
            )


def read_deberta_config(folder: str | Path) -> DebertaConfig:
    """Reads config.json of a model folder. UserError naming file and key, as `read_bert_config`."""
    path = Path(folder) / "config.json"
    record = read_json_object(path)
    _refuse_unsupported(record, path)
    sizes = {field: _whole(record.get(key), 1, key, path) for field, key in _SIZES.items()}
    farthest = _whole(record.get("max_relative_positions", -1), -1, "max_relative_positions", path)
    farthest = farthest if farthest > 0 else sizes["max_positions"]
    buckets = _whole(record.get("position_buckets", -1), -1, "position_buckets", path)
    kernel = _whole(record.get("conv_kernel_size", 0), 0, "conv_kernel_size", path)
    epsilon = record.get("layer_norm_eps", 1e-7)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise UserError(
            f"{path}: layer_norm_eps is {epsilon!r}, expected a positive number below 1; fetch the file again"
        )
    try:
        return DebertaConfig(
            types=_whole(record.get("type_vocab_size", 0), 0, "type_vocab_size", path),
            epsilon=float(epsilon),
            activation=_one_of(ACTIVATIONS, record.get("hidden_act", "gelu"), "hidden_act", path),
            span=buckets if buckets > 0 else farthest,
            farthest=farthest if buckets > 0 else 0,
            shared=bool(record.get("share_att_key", False)),
            norm_table="layer_norm" in _parts(record.get("norm_rel_ebd", "none")),
            positions=bool(record.get("position_biased_input", True)),
            convolution=(kernel, _whole(record.get("conv_groups", 1), 1, "conv_groups", path)) if kernel else None,
            convolution_activation=_one_of(_CONV_ACTIVATIONS, record.get("conv_act", "tanh"), "conv_act", path),
            **sizes,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_unsupported(record: Mapping[str, Any], path: Path) -> None:
    """UserError for every feature that would silently change what the model computes."""
    if record.get("model_type") != MODEL_TYPE:
        raise UserError(f"{path}: model_type is {record.get('model_type')!r}, expected {MODEL_TYPE!r}")
    if sorted(_parts(record.get("pos_att_type"))) != ["c2p", "p2c"]:
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
    for key, accepted in wanted.items():
        if record.get(key) not in accepted:
            raise UserError(
                f"{path}: {key} is {record.get(key)!r}, expected {accepted[-1]!r}; use a model that has it so"
            )


def _parts(value: object) -> list[str]:
    """The words of a setting that may be a list or have them joined by bars."""
    words = value.split("|") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(word).strip().lower() for word in words]


def _whole(value: object, least: int, key: str, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_SIZE:
        raise UserError(
            f"{path}: {key} is {value!r}, expected an integer from {least} to {LARGEST_SIZE:,}; fetch the file again"
        )
    return value


def _one_of(known: Mapping[str, object], value: object, key: str, path: Path) -> str:
    if not isinstance(value, str) or value not in known:
        raise UserError(f"{path}: {key} is {value!r}, expected one of {', '.join(known)}; use another model")
    return value


class DebertaLayer(nn.Module):
    """Disentangled attention and a two-layer MLP, each added to the stream and normed."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads = config.heads
        self.activation = ACTIVATIONS[config.activation]
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.table_key = self.key if config.shared else nn.Linear(hidden, hidden)
        self.table_query = self.query if config.shared else nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, config.epsilon)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.mlp_norm = nn.LayerNorm(hidden, config.epsilon)

    def forward(self, x_BTH: Tensor, mask_B11T: Tensor, table_WH: Tensor, row_TT: Tensor) -> Tensor:
        """x_BTH -> the same shape. mask_B11T: bool, false where nobody may look. table_WH: W = 2S relative positions.
        row_TT: int64, row of the table for a query's and a key's place."""
        q_BNTD, k_BNTD, v_BNTD = (self._split(part(x_BTH)) for part in (self.query, self.key, self.value))
        table_k_NWD, table_q_NWD = self._split(self.table_key(table_WH)), self._split(self.table_query(table_WH))
        index_BNTT = row_TT.expand(*q_BNTD.shape[:2], -1, -1)
        # A key's row of r^Q k_j is gathered as [j, i] and turned.
        content_BNTT = (q_BNTD @ table_k_NWD.transpose(-1, -2)).gather(-1, index_BNTT)
        position_BNTT = (k_BNTD @ table_q_NWD.transpose(-1, -2)).gather(-1, index_BNTT.transpose(-1, -2))
        scale = 1 / math.sqrt(3 * q_BNTD.shape[-1])
        bias_BNTT = (content_BNTT + position_BNTT.transpose(-1, -2)) * scale
        bias_BNTT = bias_BNTT.masked_fill(~mask_B11T, -math.inf)
        o_BNTD = F.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, attn_mask=bias_BNTT, scale=scale)
        x_BTH = self.attention_norm(x_BTH + self.out(o_BNTD.transpose(1, 2).flatten(2)))
        mlp_BTH: Tensor = self.mlp_norm(x_BTH + self.down(self.activation(self.up(x_BTH))))
        return mlp_BTH

    def _split(self, x_TH: Tensor) -> Tensor:
        """[.., T, H] -> [.., N, T, D]."""
        x_NTD: Tensor = x_TH.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return x_NTD


class Deberta(nn.Module):
    """The encoder without a head. Make one with `load_deberta`."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.words_VH = nn.Parameter(torch.empty(config.vocab_size, hidden))
        self.positions_WH = nn.Parameter(torch.empty(config.max_positions, hidden)) if config.positions else None
        self.types_WH = nn.Parameter(torch.empty(config.types, hidden)) if config.types else None
        self.norm = nn.LayerNorm(hidden, config.epsilon)
        self.table_WH = nn.Parameter(torch.empty(2 * config.span, hidden))
        self.table_norm = nn.LayerNorm(hidden, config.epsilon) if config.norm_table else None
        self.layers = nn.ModuleList(DebertaLayer(config) for _ in range(config.layers))
        self.convolution: nn.Conv1d | None = None
        if config.convolution is not None:
            kernel, groups = config.convolution
            self.convolution = nn.Conv1d(hidden, hidden, kernel, padding=(kernel - 1) // 2, groups=groups)
            self.convolution_norm = nn.LayerNorm(hidden, config.epsilon)
            self.convolution_activation = _CONV_ACTIVATIONS[config.convolution_activation]

    @property
    def device(self) -> torch.device:
        return self.words_VH.device

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        """Hidden states of the last layer, [B, T, H]; arguments and padding as `Bert.forward`."""
        length = ids_BT.shape[1]
        place_T = torch.arange(length, device=self.device)
        sum_BTH = F.embedding(ids_BT, self.words_VH)
        if self.positions_WH is not None:
            sum_BTH = sum_BTH + self.positions_WH[place_T.clamp(max=self.config.max_positions - 1)]
        if self.types_WH is not None:
            sum_BTH = sum_BTH + (self.types_WH[0] if types_BT is None else F.embedding(types_BT, self.types_WH))
        embedded_BTH = self.norm(sum_BTH) * mask_BT[:, :, None]
        table_WH = self.table_WH if self.table_norm is None else self.table_norm(self.table_WH)
        row_TT = buckets(place_T[:, None] - place_T, self.config.span, self.config.farthest)
        x_BTH: Tensor = embedded_BTH
        for number, layer in enumerate(self.layers):
            x_BTH = layer(x_BTH, mask_BT[:, None, None, :], table_WH, row_TT)
            if number == 0 and self.convolution is not None:
                near_BTH = self.convolution(embedded_BTH.transpose(1, 2)).transpose(1, 2)
                x_BTH = self.convolution_norm(x_BTH + self.convolution_activation(near_BTH))
        return x_BTH


def buckets(distance_TT: Tensor, span: int, farthest: int) -> Tensor:
    """int64 [..] -> int64 [..], the table's row for each distance i - j: S + bucket, within [0, 2S).

    farthest: as in DebertaConfig. The logarithm is taken in float32, as those who publish such models take it: in
    float64 a distance on a bin's edge may fall into its neighbour.
    """
    bucket_TT = distance_TT
    if farthest:
        middle = span // 2
        far_TT = distance_TT.abs().clamp(min=middle)
        width = torch.log(torch.tensor((farthest - 1) / middle))
        bin_TT = torch.ceil(torch.log(far_TT / middle) / width * (middle - 1)).long() + middle
        bucket_TT = torch.where(distance_TT.abs() <= middle, distance_TT, bin_TT * distance_TT.sign())
    return (bucket_TT + span).clamp(0, 2 * span - 1)


def load_deberta(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Deberta:
    """Reads an encoder from a folder of config.json and safetensors, without gradients; heads are passed over.
    UserError naming file and tensor for one that is missing, of another shape, or not part of such a model."""
    folder = Path(folder)
    config = read_deberta_config(folder)
    found = tensor_shapes(folder)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in found) else ""
    deberta = build_unallocated(lambda: Deberta(config), config.layers, found, folder / "config.json").to(dtype)
    deberta.requires_grad_(False)
    shapes = {prefix + name: view.shape for name, view in _views(deberta).items()}
    # Some files hold positions that the config does not use.
    beside = {name for name in found if name.startswith(_HEADS) or "embeddings.position" in name}
    weights = read_weights(folder, shapes, optional=beside - shapes.keys())
    views = {prefix + name: view for name, view in _views(deberta.to_empty(device=device)).items()}
    for name, tensor in weights:
        views[name].copy_(tensor)
    return deberta.eval()


def _views(deberta: Deberta) -> dict[str, Tensor]:
    """Hugging Face's names, without a prefix -> tensors that share the model's memory."""
    modules: dict[str, nn.Module | None] = {
        "embeddings.LayerNorm": deberta.norm,
        "encoder.LayerNorm": deberta.table_norm,
        "encoder.conv.conv": deberta.convolution,
        "encoder.conv.LayerNorm": deberta.convolution_norm if deberta.convolution is not None else None,
    }
    for number, layer in enumerate(deberta.layers):
        assert isinstance(layer, DebertaLayer)
        start = f"encoder.layer.{number}."
        attention = f"{start}attention.self."
        modules |= {
            f"{attention}query_proj": layer.query,
            f"{attention}key_proj": layer.key,
            f"{attention}value_proj": layer.value,
            f"{attention}pos_key_proj": None if deberta.config.shared else layer.table_key,
            f"{attention}pos_query_proj": None if deberta.config.shared else layer.table_query,
            f"{start}attention.output.dense": layer.out,
            f"{start}attention.output.LayerNorm": layer.attention_norm,
            f"{start}intermediate.dense": layer.up,
            f"{start}output.dense": layer.down,
            f"{start}output.LayerNorm": layer.mlp_norm,
        }
    tensors = {
        "embeddings.word_embeddings.weight": deberta.words_VH,
        "embeddings.position_embeddings.weight": deberta.positions_WH,
        "embeddings.token_type_embeddings.weight": deberta.types_WH,
        "encoder.rel_embeddings.weight": deberta.table_WH,
    }
    views = {name: tensor.data for name, tensor in tensors.items() if tensor is not None}
    for name, module in modules.items():
        if module is not None:
            views |= {f"{name}.{part}": parameter.data for part, parameter in module.named_parameters()}
    return views
