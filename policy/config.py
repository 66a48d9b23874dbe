"""The shape of a model, read from and written to config.json and generation_config.json of a Hugging Face folder.

generation_config.json overrides the end-of-text ids, because Qwen's instruct models list both of theirs only there.
Both formats of config.json are read (`rope_theta` and `torch_dtype` of transformers 4, `rope_parameters` and `dtype` of
5). The older one, which both load, is written, except for families that are newer than it. A model of text and images
has its shape under `text_config`; the keys outside it are kept. A missing key of the shape is refused. The only RoPE
scaling that is read is Llama 3.1's ("llama3"). Sliding windows and quantised weights are refused. This file does not
need torch; the `ConfigRules` of a family are next to its layer.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, model_folder, read_json_object
from thresher.policy.families import FAMILIES, find_family, infer_model_type, load_layer_class

# The files of a model folder that `read_config` reads.
CONFIG_FILES = ("config.json", "generation_config.json")

Found = TypeVar("Found")
# Supported values (an absent key is always supported), and their description in a message.
Accepted = tuple[tuple[object, ...], str]
# Keys that are read only to refuse a model, of any family.
_ACCEPTED: dict[str, Accepted] = {
    "quantization_config": ((None,), "none (weights in float32, bfloat16 or float16)"),
}
_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_WRITTEN = (*_INTEGERS, "rms_norm_eps", "rope_theta", "tie_word_embeddings", "initializer_range")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
# No model has a larger size, and products of larger sizes would overflow 64 bits.
LARGEST_SIZE = 2**31 - 1
LARGEST_LAYERS = 10_000  # types of more layers are not listed; no file has so many
# Keys that are rewritten from the fields, or that have a meaning only in the file that was read.
_NOT_KEPT = {"model_type", "architectures", "torch_dtype", "dtype", "layer_types", *_ROPE_KEYS}


FULL, LINEAR = "full_attention", "linear_attention"  # config.json's layer_types


class DeltaShape(NamedTuple):
    """Sizes of the layers with the gated delta rule (kernels/delta), under config.json's names without `linear_`."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int  # tokens that the causal convolution sees

    @property
    def channels(self) -> int:
        """Return the width of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


_DELTA_KEYS = tuple(f"linear_{name}" for name in DeltaShape._fields)


class RopeScaling(NamedTuple):
    """RoPE of type "llama3", under config.json's names; kernels/layers.py computes it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ConfigRules:
    """Rules of one family for config.json.

    constants: keys and the only value that the layer computes; it is always written, any other value is refused.
    accepted: keys that are read only to refuse values that the layer does not compute. integers: required fields, also
    written. written: optional fields that are written. check: raises UserError for sizes that contradict each other.
    hybrid: if not 0, layers are of several types, some with the gated delta rule, and RoPE rotates a fraction of each
    head. If config.json lacks these, every `hybrid`-th layer has full attention, and the fraction is 1 / hybrid.
    """

    constants: Mapping[str, object]
    accepted: Mapping[str, Accepted] = field(default_factory=dict)
    integers: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    check: Callable[["ModelConfig"], None] = lambda config: None
    hybrid: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model; UserError if they contradict each other.

    layer_types: the type of each layer if the family has several, else empty. delta: sizes of the layers with the gated
    delta rule. `extra` and `generation_extra` hold the other keys of the two files, so that saving keeps them, and
    `around` the keys outside the shape of a model of text and images. These three are not hashed.
    """

    model_type: str = "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    layer_types: tuple[str, ...] = ()
    delta: DeltaShape | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    generation_extra: dict[str, Any] = field(default_factory=dict, hash=False)
    around: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def rotary_dim(self) -> int:
        """Return the number of dimensions of a head that RoPE rotates; these are the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def delta_layers(self) -> int:
        """Return the number of layers with the gated delta rule."""
        return self.layer_types.count(LINEAR)

    @property
    def attention_layers(self) -> int:
        """Return the number of layers that keep keys and values."""
        return self.num_hidden_layers - self.delta_layers

    def __post_init__(self) -> None:
        rules_of(self.model_type).check(self)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {self.num_hidden_layers}; "
                "correct one of them"
            )
        delta = self.delta
        if delta is not None and delta.num_value_heads % delta.num_key_heads:
            raise UserError(
                f"linear_num_value_heads {delta.num_value_heads} is not a multiple of linear_num_key_heads "
                f"{delta.num_key_heads}; change one of them"
            )
        if not 0 < self.rotary_dim <= self.head_dim or (self.rotary_dim % 2 and self.head_dim % 2 == 0):
            raise UserError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} is "
                f"{self.rotary_dim} dimensions; expected an even number, from 2 to head_dim"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim {self.head_dim} (hidden_size / num_attention_heads, unless given) is odd, but rotary "
                "embeddings need an even head; change one of them"
            )
        if heads % kv_heads:
            raise UserError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; change one of them"
            )
        named: list[tuple[str, int | None]] = [("eos_token_id", token) for token in self.eos_token_ids]
        named += [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        for key, token in named:
            if token is not None and not 0 <= token < self.vocab_size:
                raise UserError(f"{key} {token} is outside the vocabulary of {self.vocab_size}; correct one of them")

    def replace(self, **changes: Any) -> "ModelConfig":
        """Return a copy with other values. head_dim remains hidden_size / num_attention_heads if it was; layer_types is
        truncated or repeated periodically to the new number of layers."""
        follows = self.head_dim * self.num_attention_heads == self.hidden_size
        if follows and "head_dim" not in changes and changes.keys() & {"hidden_size", "num_attention_heads"}:
            hidden = changes.get("hidden_size", self.hidden_size)
            changes["head_dim"] = hidden // changes.get("num_attention_heads", self.num_attention_heads)
        if self.layer_types and "layer_types" not in changes:
            changes["layer_types"] = tuple(
                islice(cycle(self.layer_types), changes.get("num_hidden_layers", len(self.layer_types)))
            )
        return dataclasses.replace(self, **changes)


def rules_of(model_type: str) -> ConfigRules:
    """Return the rules of the family with this model_type; UserError if there is none."""
    rules = load_layer_class(model_type).rules
    assert isinstance(rules, ConfigRules)
    return rules


def known_keys() -> frozenset[str]:
    """Return the keys of config.json that have a meaning for any family."""
    ours = {field.name for field in dataclasses.fields(ModelConfig)}
    ours -= {"eos_token_ids", "extra", "generation_extra", "around", "delta"}
    keys = ours | {"eos_token_id", "full_attention_interval", *_DELTA_KEYS} | _NOT_KEPT | _ACCEPTED.keys()
    for rules in map(rules_of, FAMILIES):
        keys |= rules.accepted.keys() | rules.constants.keys()
    return frozenset(keys)


def read_config(folder: str | Path) -> ModelConfig:
    """Read the config of a model folder. UserError, naming file and key, for anything that is not supported."""
    folder = model_folder(folder)
    path = folder / "config.json"
    config = config_from_dict(read_json_object(path), str(path))
    generation_path = folder / "generation_config.json"
    if not os.path.lexists(generation_path):
        return config
    generation = read_json_object(generation_path)
    where = str(generation_path)
    found: dict[str, Any] = {"eos_token_ids": _token_ids(generation, "eos_token_id", where) or None}
    found |= {key: _token_id(generation, key, where) for key in ("bos_token_id", "pad_token_id")}
    changes = {key: value for key, value in found.items() if value is not None}
    # Keys that begin with an underscore are internal to transformers and invalid once the values above are written.
    own = {key: value for key, value in generation.items() if key not in ("eos_token_id", *found) and key[:1] != "_"}
    changes["generation_extra"] = own
    return _with_location(where, lambda: dataclasses.replace(config, **changes))


def config_from_dict(d: dict[str, Any], where: str) -> ModelConfig:
    """Return the config of a parsed config.json. where: its origin, for errors."""
    model_type = _with_location(where, lambda: infer_model_type(d))
    rules, around = rules_of(model_type), {}
    if find_family(model_type).in_text_config:
        inside = _checked(d, "text_config", where, "an object with the shape", lambda value: isinstance(value, dict))
        around = {key: value for key, value in d.items() if key not in {"text_config", *_NOT_KEPT, *_TOKENS}}
        _refuse_unsupported({key: d[key] for key in _ACCEPTED if key in d}, rules, where)
        # Token ids may be given only outside text_config; tie_word_embeddings is given there.
        outer = {key: d[key] for key in _TOKENS if key in d and inside.get(key) is None}
        tied = {key: d[key] for key in ("tie_word_embeddings",) if key in d}
        d, where = inside | outer | tied, f"{where}: text_config"
    _refuse_unsupported(d, rules, where)
    values: dict[str, Any] = {key: _integer(d, key, where) for key in (*_INTEGERS, *rules.integers)}
    quotient = values["hidden_size"] // values["num_attention_heads"]
    values["head_dim"] = quotient if d.get("head_dim") is None else _integer(d, "head_dim", where)
    values |= {"model_type": model_type, "rms_norm_eps": _number(d, "rms_norm_eps", where)}
    values["rope_theta"], values["rope_scaling"] = _rope(d, rules, where)
    hybrid = _hybrid(d, rules.hybrid, values["num_hidden_layers"], where) if rules.hybrid else {}
    if "initializer_range" in d:
        values["initializer_range"] = _number(d, "initializer_range", where)
    key = "tie_word_embeddings"
    values[key] = _checked(d, key, where, "true or false", lambda value: isinstance(value, bool))
    values["eos_token_ids"] = _token_ids(d, "eos_token_id", where)
    values |= {key: _token_id(d, key, where) for key in ("bos_token_id", "pad_token_id")}
    known = values.keys() | _NOT_KEPT | {"eos_token_id"} | rules.constants.keys()
    known |= {*_DELTA_KEYS} if rules.hybrid else set()
    extra = {key: value for key, value in d.items() if key not in known}
    if rules.hybrid and (rest := _beside_rope(d)):
        extra["rope_parameters"] = rest
    return _with_location(where, lambda: ModelConfig(**values, **hybrid, extra=extra, around=around))


def write_config(config: ModelConfig, folder: str | Path, dtype: str = "float32") -> None:
    """Write config.json and generation_config.json into `folder` (made if absent). dtype: of the stored weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    eos = list(config.eos_token_ids)
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
    }
    rules, family = rules_of(config.model_type), find_family(config.model_type)
    shape = {name: getattr(config, name) for name in (*_WRITTEN, *rules.integers, *rules.written)}
    if config.rope_scaling is not None:
        shape["rope_scaling"] = {"rope_type": "llama3", **config.rope_scaling._asdict()}
    if rules.hybrid:
        shape |= _hybrid_keys(config, shape.pop("rope_theta"))
    fixed = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "dtype" if rules.hybrid else "torch_dtype": dtype,
    }
    if family.in_text_config:
        inside = {**config.extra, **shape, **tokens, **rules.constants, "model_type": f"{config.model_type}_text"}
        ties = {"tie_word_embeddings": config.tie_word_embeddings}
        _write_json(folder / "config.json", {**config.around, "text_config": inside, **ties, **fixed})
    else:
        _write_json(folder / "config.json", {**config.extra, **shape, **tokens, **fixed, **rules.constants})
    present = {key: token for key, token in tokens.items() if token is not None}
    _write_json(folder / "generation_config.json", {**config.generation_extra, **present})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _refuse_unsupported(d: dict[str, Any], rules: ConfigRules, where: str) -> None:
    layer_types = d.get("layer_types")
    if (
        not rules.hybrid
        and layer_types is not None
        and (not isinstance(layer_types, list) or any(kind != FULL for kind in layer_types))
    ):
        raise UserError(f"{where}: layer_types must all be {FULL!r}; use a model without sliding windows")
    constants: dict[str, Accepted] = {key: ((value,), _short(value)) for key, value in rules.constants.items()}
    whole: dict[str, Accepted] = {} if rules.hybrid else {"partial_rotary_factor": ((None, 1.0), "1.0")}
    for key, (values, words) in {**constants, **rules.accepted, **_ACCEPTED, **whole}.items():
        if key in d and d[key] not in values:
            raise UserError(f"{where}: {key} is {_short(d[key])}, only {words} is supported; use a model without it")


def _hybrid(d: dict[str, Any], interval: int, layers: int, where: str) -> dict[str, Any]:
    """Read the additional fields of a hybrid family: layer types, sizes of the delta rule, RoPE's fraction."""
    kinds = d.get("layer_types")
    if kinds is None:
        key = "full_attention_interval"
        every = interval if d.get(key) is None else _integer(d, key, where)
        kinds = [LINEAR if (number + 1) % every else FULL for number in range(min(layers, LARGEST_LAYERS))]
    if not isinstance(kinds, list):
        raise _wrong(where, "layer_types", kinds, "a list, a type for each layer")
    for number, kind in enumerate(kinds):
        if kind not in (FULL, LINEAR):
            raise _wrong(where, f"layer_types[{number}]", kind, f"{FULL!r} or {LINEAR!r}")
    delta = DeltaShape(*(_integer(d, key, where) for key in _DELTA_KEYS))
    inside, beside = (x.get("partial_rotary_factor") for x in (d.get("rope_parameters") or {}, d))
    if None not in (inside, beside) and inside != beside:
        raise UserError(
            f"{where}: partial_rotary_factor is {beside} but rope_parameters says {inside}; remove the wrong one"
        )
    share = next((x for x in (inside, beside) if x is not None), 1 / interval)
    found = _number({"partial_rotary_factor": share}, "partial_rotary_factor", where)
    return {"layer_types": tuple(kinds), "delta": delta, "partial_rotary_factor": found}


def _hybrid_keys(config: ModelConfig, rope_theta: float) -> dict[str, Any]:
    """Return the keys that `_hybrid` and `_rope` read, in their format."""
    assert config.delta is not None
    rope = {"rope_type": "default", "rope_theta": rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    sizes = dict(zip(_DELTA_KEYS, config.delta, strict=True))
    kept = config.extra.get("rope_parameters", {})
    return {"layer_types": list(config.layer_types), "rope_parameters": {**kept, **rope}, **sizes}


# Keys that divide the pairs of a head among the three axes of an image position; for text the three are equal.
_IMAGE_AXES = ("mrope_section", "mrope_interleaved")


def _beside_rope(d: dict[str, Any]) -> dict[str, Any]:
    found = d.get("rope_parameters") or {}
    return {key: found[key] for key in _IMAGE_AXES if key in found}


def _rope(d: dict[str, Any], rules: ConfigRules, where: str) -> tuple[float, RopeScaling | None]:
    """Read RoPE's base and scaling from either format; they must agree if both are present."""
    parameters = d.get("rope_parameters")
    if parameters is None:
        return _number(d, "rope_theta", where), _rope_scaling(d, "rope_scaling", where)
    if rules.hybrid and isinstance(parameters, dict):
        plain = {key: value for key, value in parameters.items() if key not in (*_IMAGE_AXES, "partial_rotary_factor")}
        d = {**d, "rope_parameters": plain}
        if _rope_scaling(d, "rope_parameters", where) is not None:
            raise UserError(f"{where}: rope_parameters has a scaling, which this family does not support; remove it")
    scaling = _rope_scaling(d, "rope_parameters", where)
    theta = _number(parameters, "rope_theta", f"{where}: rope_parameters")
    if d.get("rope_theta") is not None and _number(d, "rope_theta", where) != theta:
        raise UserError(
            f"{where}: rope_theta is {d['rope_theta']} but rope_parameters says {theta}; remove the wrong one"
        )
    if d.get("rope_scaling") is not None and _rope_scaling(d, "rope_scaling", where) != scaling:
        raise UserError(f"{where}: rope_scaling differs from rope_parameters; remove the wrong one")
    return theta, scaling


def _rope_scaling(d: dict[str, Any], key: str, where: str) -> RopeScaling | None:
    """Read the scaling in the object `key`; None for plain RoPE."""
    found = d.get(key)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise _wrong(where, key, found, "an object with rope_type")
    kind = found.get("rope_type", found.get("type", "default"))
    others = found.keys() - {"rope_theta", "rope_type", "type", *(RopeScaling._fields if kind == "llama3" else ())}
    if found.get("partial_rotary_factor") in (None, 1.0):
        others -= {"partial_rotary_factor"}
    if kind not in ("default", "llama3") or others:
        named = f"rope_type {kind!r}" + (f" with {', '.join(sorted(others))}" if others else "")
        raise UserError(
            f"{where}: {key} has {named}, only the types 'default' and 'llama3' are supported; use a model without "
            "such scaling, or remove it if it was added for longer contexts, like YaRN to a Qwen model"
        )
    if kind == "default":
        return None
    inside = f"{where}: {key}"
    factor, low, high = (_number(found, name, inside) for name in RopeScaling._fields[:3])
    if factor < 1 or low >= high:
        raise UserError(
            f"{inside}: factor {factor}, low_freq_factor {low} and high_freq_factor {high} are not a scaling, expected "
            "a factor of at least 1 and low below high; correct the file or fetch it again"
        )
    return RopeScaling(factor, low, high, _integer(found, RopeScaling._fields[3], inside))


def _with_location(where: str, build: Callable[[], Found]) -> Found:
    try:
        return build()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _checked(d: dict[str, Any], key: str, where: str, expected: str, fits: Callable[[Any], bool]) -> Any:
    if key not in d:
        raise UserError(f"{where}: key {key} is missing, expected {expected}; add it or fetch the file again")
    if not fits(d[key]):
        raise _wrong(where, key, d[key], expected)
    return d[key]


def _integer(d: dict[str, Any], key: str, where: str) -> int:
    expected = f"a positive integer up to {LARGEST_SIZE:,}"
    return int(_checked(d, key, where, expected, lambda value: _is_integer(value) and 1 <= value <= LARGEST_SIZE))


def _number(d: dict[str, Any], key: str, where: str) -> float:
    def fits(value: Any) -> bool:
        return (_is_integer(value) or isinstance(value, float)) and 0 < value <= sys.float_info.max

    return float(_checked(d, key, where, "a positive number", fits))


def _token_id(d: dict[str, Any], key: str, where: str) -> int | None:
    value = d.get(key)
    if value is not None and (not _is_integer(value) or value < 0):
        raise _wrong(where, key, value, "a token id or null")
    return value


def _token_ids(d: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    value = d.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not _is_integer(token) or token < 0 for token in ids):
        raise _wrong(where, key, value, "a token id, a list of them, or null")
    return tuple(dict.fromkeys(ids))


def _is_integer(value: object) -> bool:
    # True and False are ints in Python, but never a size.
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(where: str, key: str, value: object, expected: str) -> UserError:
    return UserError(f"{where}: {key} is {_short(value)}, expected {expected}; correct the file or fetch it again")


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
