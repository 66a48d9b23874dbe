"""How a model folder wants its vectors made: pooling, norm, prefixes, length, and which file said so.

A prefix or a pooling that is guessed wrong costs points of recall and no error, so each setting comes with its origin
(`EncoderSettings.why`), for the printout, and one that neither a file nor the user gives is refused, never assumed:
  given by the caller             wins over every file
  sentence-transformers' layout   modules.json, 1_Pooling, sentence_bert_config.json, prompts
  E5, BGE, DPR, Contriever        by model_type (DPR) or the name that folder, config.json or README.md carry;
                                  their published ways are in `_FAMILIES` (Wang et al. 2022, Xiao et al. 2023,
                                  Karpukhin et al. 2020, Izacard et al. 2022)
A sentence-transformers folder that names no prefix and no family is used without prefixes, and `why` says that.

Deliberately absent: poolings other than mean and cls, and Dense layers behind them.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import MOST_JSON, atomic_write_text, read_bytes, read_json_object, refuse_hub_id
from thresher.retrieval.encoders.bert import BertConfig, read_bert_config

POOLINGS = ("mean", "cls")
HALVES = ("question_encoder", "ctx_encoder")
_ARCHITECTURES = ("DPRQuestionEncoder", "DPRContextEncoder")
GIVEN = "given"
_ASK = "give pooling (mean or cls) and normalize (yes or no) as its authors do"
_NO_PREFIX = "no file names one (an E5 or BGE model under another name needs its own)"


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """What is done to a text before and after the transformer.

    `why` maps each field to where it comes from; it takes no part in comparisons.
    """

    pooling: str
    normalize: bool
    query_prefix: str
    passage_prefix: str
    max_length: int
    why: Mapping[str, str] = field(default_factory=dict, compare=False)

    def values(self) -> dict[str, Any]:
        """Field -> value, without the origins."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = ("pooling", "normalize", "query_prefix", "passage_prefix", "max_length")
_Found = dict[str, tuple[Any, str]]


@dataclass(frozen=True, kw_only=True)
class ModelFolders:
    """Where the transformer for queries and the one for passages lie (the same folder but for DPR's pair)."""

    query: Path
    passage: Path


_INSTRUCTION_EN = "Represent this sentence for searching relevant passages: "
_INSTRUCTION_ZH = "为这个句子生成表示以用于检索相关文章："
_FAMILIES: dict[str, dict[str, Any]] = {
    "E5": {"pooling": "mean", "normalize": True, "query_prefix": "query: ", "passage_prefix": "passage: "},
    "BGE (English)": {"pooling": "cls", "normalize": True, "query_prefix": _INSTRUCTION_EN, "passage_prefix": ""},
    "BGE (Chinese)": {"pooling": "cls", "normalize": True, "query_prefix": _INSTRUCTION_ZH, "passage_prefix": ""},
    "DPR": {"pooling": "cls", "normalize": False, "query_prefix": "", "passage_prefix": ""},
    "Contriever": {"pooling": "mean", "normalize": False, "query_prefix": "", "passage_prefix": ""},
}
_NAMED = {
    "E5": re.compile(r"(?:^|[-_])e5-(?:small|base|large)(?!.*instruct)", re.IGNORECASE),
    "BGE (English)": re.compile(r"(?:^|[-_])bge-(?:small|base|large)-en(?:-|$)", re.IGNORECASE),
    "BGE (Chinese)": re.compile(r"(?:^|[-_])bge-(?:small|base|large)-zh(?:-|$)", re.IGNORECASE),
    # RECOMP's compressors are Contrievers, trained on.
    "Contriever": re.compile(r"(?:^|[-_])(?:m?contriever|extractive[-_]compressor)(?:[-_]|$)", re.IGNORECASE),
}
# Older files switch one of several modes on, newer ones name it.
_POOLING_OF_MODE = {"mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
_README_NAME = re.compile(r"^model-index:\s*\n\s*-\s*name:\s*(\S+)", re.MULTILINE)


def read_settings(folder: Path, given: Mapping[str, Any], origin: str = GIVEN) -> tuple[EncoderSettings, ModelFolders]:
    """The settings of the encoder in `folder`, those in `given` (field -> value, None for not given) before all others.

    UserError naming the file, or what has to be given, for a folder that does not say enough or says what is not
    supported.
    """
    refuse_hub_id(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of an encoder (config.json and its weights)")
    found: _Found = {name: (value, origin) for name, value in given.items() if value is not None}
    folders = _folders(folder)
    configs = {path: read_bert_config(path) for path in (folders.query, folders.passage)}
    if len(configs) == 1:
        found = _from_sentence_transformers(folder, configs[folders.query]) | found
    family, evidence = _family(folder, folders, configs[folders.query])
    if family:
        _fill(found, {name: (value, f"{family}, by {evidence}") for name, value in _FAMILIES[family].items()})
    for name in ("pooling", "normalize"):
        if name not in found:
            raise UserError(f"{folder}: no file says how its vectors are made ({name} is unknown); {_ASK}")
    _fill(found, dict.fromkeys(("query_prefix", "passage_prefix"), ("", _NO_PREFIX)))
    limit = min(config.max_positions for config in configs.values())
    if "max_length" not in found:
        found["max_length"] = _tokenizer_length(folders.passage, limit)
    _check(folder, found, limit)
    why = {name: found[name][1] for name in NAMES}
    return EncoderSettings(**{name: found[name][0] for name in NAMES}, why=why), folders


def write_settings(folder: Path, settings: EncoderSettings, width: int) -> None:
    """Writes sentence-transformers' layout around a transformer in `folder` whose vectors have `width` numbers, for
    `read_settings` to find the same settings again."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if settings.normalize else {})
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": width} | {
        f"pooling_mode_{mode}": _POOLING_OF_MODE[mode] == settings.pooling for mode in ("cls_token", "mean_tokens")
    }
    prefixes = {"query": settings.query_prefix, "passage": settings.passage_prefix}
    similarity = "cosine" if settings.normalize else "dot"
    (folder / kinds["Pooling"]).mkdir()
    for name, record in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": settings.max_length, "do_lower_case": False}),
        ("config_sentence_transformers.json", {"prompts": prefixes, "similarity_fn_name": similarity}),
    ):
        atomic_write_text(folder / name, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _fill(found: _Found, defaults: _Found) -> None:
    for name, value in defaults.items():
        found.setdefault(name, value)


def _folders(folder: Path) -> ModelFolders:
    """The transformer's own folder, which modules.json may place in a folder of its own; DPR has two."""
    halves = [folder / half for half in HALVES]
    if any(half.is_dir() for half in halves):
        for half, architecture in zip(halves, _ARCHITECTURES, strict=True):
            if not half.is_dir():
                raise UserError(f"{half}: no such folder; DPR's encoders are a pair, {' and '.join(HALVES)}")
            found = read_bert_config(half).architecture
            if found.startswith("DPR") and found != architecture:
                raise UserError(
                    f"{half}: holds a {found}, expected a {architecture}; put each half into its own folder"
                )
        return ModelFolders(query=halves[0], passage=halves[1])
    place = folder
    for kind, path in _modules(folder):
        if kind == "Transformer":
            place = path
    return ModelFolders(query=place, passage=place)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(last part of the type, folder) of each module in modules.json; empty where there is no such file."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return []
    try:
        records = json.loads(read_bytes(file, MOST_JSON).decode("utf-8"))
        found = [(record["type"].rsplit(".", 1)[-1], folder / record["path"]) for record in records]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f'{file}: expected a JSON list of {{"type", "path"}}; fetch it again') from None
    for kind, _ in found:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UserError(
                f"{file}: the module {kind} is not supported, only Transformer, Pooling and Normalize; "
                "use another encoder"
            )
    return found


def _from_sentence_transformers(folder: Path, config: BertConfig) -> _Found:
    found: _Found = {}
    modules = dict(_modules(folder))
    if not modules:
        return found
    if "Pooling" in modules:
        found["pooling"] = _pooling(modules["Pooling"] / "config.json", config)
    top = _optional(folder / "config_sentence_transformers.json")
    similarity = top.get("similarity_fn_name")
    if "Normalize" in modules:
        found["normalize"] = (True, "modules.json")
    elif similarity in (None, "dot", "dot_product"):
        found["normalize"] = (False, "modules.json, which has no Normalize")
    elif similarity == "cosine":
        found["normalize"] = (True, "config_sentence_transformers.json: similarity_fn_name is cosine")
    else:
        raise UserError(
            f"{folder / 'config_sentence_transformers.json'}: similarity_fn_name is {similarity!r}, expected cosine or "
            "dot, for an index compares by inner product; use another encoder"
        )
    prompts = top.get("prompts")
    prompts = prompts if isinstance(prompts, dict) else {}
    for name, keys in (("query_prefix", ("query",)), ("passage_prefix", ("document", "passage", "corpus"))):
        if text := next((prompts[key] for key in keys if prompts.get(key)), None):
            found[name] = (text, "config_sentence_transformers.json")
    file = modules.get("Transformer", folder) / "sentence_bert_config.json"
    record = _optional(file)
    if record.get("do_lower_case"):
        raise UserError(f"{file}: do_lower_case is true, which is the tokenizer's business here; set it to false")
    if record.get("max_seq_length") is not None:
        found["max_length"] = (record["max_seq_length"], "sentence_bert_config.json")
    return found


def _pooling(file: Path, config: BertConfig) -> tuple[str, str]:
    record = read_json_object(file)
    prefix = "pooling_mode_"
    modes = {key.removeprefix(prefix): on for key, on in record.items() if key.startswith(prefix)}
    chosen = [mode for mode, on in modes.items() if on] or [str(record.get("pooling_mode"))]
    pooling = _POOLING_OF_MODE.get(chosen[0])
    if len(chosen) != 1 or pooling is None:
        raise UserError(f"{file}: the pooling is {' and '.join(chosen)}, expected mean or cls; use another encoder")
    if record.get("include_prompt", True) is not True:
        raise UserError(f"{file}: include_prompt is false, which is not supported; use another encoder")
    width = record.get("word_embedding_dimension", config.hidden_size)
    if width != config.hidden_size:
        raise UserError(
            f"{file}: word_embedding_dimension is {width}, but config.json says {config.hidden_size}; fetch both again"
        )
    return pooling, f"{file.parent.name}/{file.name}"


def _family(folder: Path, folders: ModelFolders, config: BertConfig) -> tuple[str | None, str]:
    """A key of `_FAMILIES` and what it was recognised by."""
    if folders.query != folders.passage:
        return "DPR", f"the folders {' and '.join(HALVES)}"
    if config.model_type == "dpr":
        raise UserError(
            f"{folder}: holds one half of DPR ({config.architecture or 'it does not say which'}); "
            f"put both halves into one folder as {' and '.join(HALVES)} and give that"
        )
    place = folder.resolve()
    # A download cache names a model's folder by its commit, and the folder above by the model.
    name = place.parent.parent.name.rpartition("--")[2] if place.parent.name == "snapshots" else place.name
    origin = str(_optional(folders.query / "config.json").get("_name_or_path", ""))
    readme = folder / "README.md"
    card = _README_NAME.search(read_bytes(readme).decode("utf-8", "replace")) if readme.is_file() else None
    for text, evidence in (
        (name, f"the folder's name {name}"),
        (origin.rstrip("/").rpartition("/")[2], "_name_or_path in config.json"),
        (card[1] if card else "", "README.md"),
    ):
        for family, pattern in _NAMED.items():
            if pattern.search(text):
                return family, evidence
    return None, ""


def _tokenizer_length(folder: Path, limit: int) -> tuple[int, str]:
    length = _optional(folder / "tokenizer_config.json").get("model_max_length")
    # Where nobody set it, transformers writes 10^30.
    if isinstance(length, int) and 0 < length < limit:
        return length, "tokenizer_config.json"
    return limit, "max_position_embeddings in config.json"


def _optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if os.path.lexists(file) else {}


def _check(folder: Path, found: _Found, limit: int) -> None:
    def wrong(name: str, expected: str) -> UserError:
        value, why = found[name]
        return UserError(f"{folder}: {name} is {value!r} ({why}), expected {expected}; give another")

    if found["pooling"][0] not in POOLINGS:
        raise wrong("pooling", " or ".join(POOLINGS))
    if not isinstance(found["normalize"][0], bool):
        raise wrong("normalize", "true or false")
    for name in ("query_prefix", "passage_prefix"):
        if not isinstance(found[name][0], str):
            raise wrong(name, "a string")
    length = found["max_length"][0]
    if isinstance(length, bool) or not isinstance(length, int) or not 3 <= length <= limit:
        raise wrong("max_length", f"3 to {limit} tokens, the model's positions")
