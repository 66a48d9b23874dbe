"""A trained encoder: a transformer of the BERT family, pooled to one vector per text; its settings, and saving.

    vector = [v / |v|],  v = mean over tokens, or the first token, of bert(prefix + text)

A wrong prefix or pooling lowers recall without an error. Each setting therefore has its origin (`EncoderSettings.why`),
and a pooling or normalisation that neither a file nor the user gives is refused. The order of precedence is: the
caller's arguments; sentence-transformers' layout; the published settings of E5, BGE, DPR, Contriever (`_FAMILIES`: Wang
et al. 2022, Xiao et al. 2023, Karpukhin et al. 2020, Izacard et al. 2022), by model_type or the name in folder,
config.json or README.md.

A vector does not depend on the other texts of a batch: to the last bit in float32 on a CPU, if the BLAS is
batch-invariant, and up to rounding in bfloat16 on CUDA. The model is not copied into an index: encoder.json has its
path, the settings and a fingerprint without device and dtype. Axes: B texts of a batch, T padded length, H hidden
width.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.common.errors import UserError
from thresher.common.files import MOST_JSON, atomic_write_text, read_bytes, read_json_object, refuse_hub_id
from thresher.policy.weights import write_weights
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.encoders.tokenizer import WordPiece, ignores_case, load_wordpiece
from thresher.retrieval.encoders.transformer import (
    LENGTH_STEP,
    Bert,
    BertConfig,
    load_bert,
    read_bert_config,
    tensors_of,
)

POOLINGS = ("mean", "cls")
HALVES = ("question_encoder", "ctx_encoder")
_ARCHITECTURES = ("DPRQuestionEncoder", "DPRContextEncoder")
GIVEN = "given"
_ASK = (
    "with index build give --pooling and --normalize as its authors do, or add sentence-transformers' files "
    "(modules.json, 1_Pooling/config.json)"
)
_NO_PREFIX = "no file names one (an E5 or BGE model under another name needs its own)"


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Settings of the steps before and after the transformer; `why` maps each field to its origin."""

    pooling: str
    normalize: bool
    query_prefix: str
    passage_prefix: str
    max_length: int
    why: Mapping[str, str] = field(default_factory=dict, compare=False)

    def values(self) -> dict[str, Any]:
        """Return field -> value, without the origins."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = ("pooling", "normalize", "query_prefix", "passage_prefix", "max_length")
_Found = dict[str, tuple[Any, str]]


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
    # RECOMP's compressors are Contrievers that were trained further.
    "Contriever": re.compile(r"(?:^|[-_])(?:m?contriever|extractive[-_]compressor)(?:[-_]|$)", re.IGNORECASE),
}
# Older files enable one of several modes, newer ones name it.
_POOLING_OF_MODE = {"mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
_README_NAME = re.compile(r"^model-index:\s*\n\s*-\s*name:\s*(\S+)", re.MULTILINE)


def read_settings(
    folder: Path, given: Mapping[str, Any], origin: str = GIVEN
) -> tuple[EncoderSettings, tuple[Path, Path]]:
    """Return the settings of the encoder in `folder`, and the folders of its transformers for queries and for passages.
    Settings of `given` (field -> value or None) take precedence. UserError for a setting that no file has, or that is
    not supported."""
    refuse_hub_id(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of an encoder (config.json and its weights)")
    found: _Found = {name: (value, origin) for name, value in given.items() if value is not None}
    query, passage = folders = _folders(folder)
    configs = {path: read_bert_config(path) for path in folders}
    limit = min(config.max_positions for config in configs.values())
    if query == passage:
        found = _from_sentence_transformers(folder, configs[query]) | found
    family, evidence = _family(folder, folders, configs[query])
    if family:
        found = {name: (value, f"{family}, by {evidence}") for name, value in _FAMILIES[family].items()} | found
    for name in ("pooling", "normalize"):
        if name not in found:
            raise UserError(f"{folder}: no file says how its vectors are made ({name} is unknown); {_ASK}")
    no_prefixes: _Found = dict.fromkeys(("query_prefix", "passage_prefix"), ("", _NO_PREFIX))
    found = no_prefixes | found
    if "max_length" not in found:
        found["max_length"] = _tokenizer_length(passage, limit)
    _check(folder, found, limit)
    why = {name: found[name][1] for name in NAMES}
    return EncoderSettings(**{name: found[name][0] for name in NAMES}, why=why), folders


def write_settings(folder: Path, settings: EncoderSettings, width: int) -> None:
    """Write sentence-transformers' layout for a transformer in `folder` whose vectors have `width` numbers."""
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


def _folders(folder: Path) -> tuple[Path, Path]:
    """Return the folders of the transformers for queries and passages: DPR's two, or one that modules.json may name."""
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
        return halves[0], halves[1]
    place = dict(_modules(folder)).get("Transformer", folder)
    return place, place


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return (last part of the type, folder) of each module in modules.json; empty if there is no such file."""
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
    elif similarity in ("dot", "dot_product"):
        found["normalize"] = (False, f"config_sentence_transformers.json: similarity_fn_name is {similarity}")
    elif similarity == "cosine":
        found["normalize"] = (True, "config_sentence_transformers.json: similarity_fn_name is cosine")
    elif similarity is not None:
        raise UserError(
            f"{folder / 'config_sentence_transformers.json'}: similarity_fn_name is {similarity!r}, expected cosine or "
            "dot, because an index compares by inner product; use another encoder"
        )
    prompts = top.get("prompts")
    prompts = prompts if isinstance(prompts, dict) else {}
    for name, keys in (("query_prefix", ("query",)), ("passage_prefix", ("document", "passage", "corpus"))):
        if text := next((prompts[key] for key in keys if prompts.get(key)), None):
            found[name] = (text, "config_sentence_transformers.json")
    place = modules.get("Transformer", folder)
    file = place / "sentence_bert_config.json"
    record = _optional(file)
    if record.get("do_lower_case") and not ignores_case(place):
        raise UserError(f"{file}: do_lower_case is true, but the tokenizer keeps case; set it to false")
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


def _family(folder: Path, folders: tuple[Path, Path], config: BertConfig) -> tuple[str | None, str]:
    """Return a key of `_FAMILIES` and the evidence for it."""
    if folders[0] != folders[1]:
        return "DPR", f"the folders {' and '.join(HALVES)}"
    if config.model_type == "dpr":
        raise UserError(
            f"{folder}: holds one half of DPR ({config.architecture or 'it does not say which'}); "
            f"put both halves into one folder as {' and '.join(HALVES)} and give that"
        )
    place = folder.resolve()
    # In a download cache, a model's folder is named after its commit, and a folder above it after the model.
    name = place.parent.parent.name.rpartition("--")[2] if place.parent.name == "snapshots" else place.name
    origin = str(_optional(folders[0] / "config.json").get("_name_or_path", ""))
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
    # If it was not set, transformers writes 10^30.
    if isinstance(length, int) and 0 < length < limit:
        return length, "tokenizer_config.json"
    return limit, "max_position_embeddings in config.json"


def _optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if os.path.lexists(file) else {}


def _check(folder: Path, found: _Found, limit: int) -> None:
    for name, right, expected in (
        ("pooling", lambda value: value in POOLINGS, " or ".join(POOLINGS)),
        ("normalize", lambda value: isinstance(value, bool), "true or false"),
        ("query_prefix", lambda value: isinstance(value, str), "a string"),
        ("passage_prefix", lambda value: isinstance(value, str), "a string"),
        (
            "max_length",
            lambda value: type(value) is int and 3 <= value <= limit,
            f"3 to {limit} tokens, the model's positions",
        ),
    ):
        value, why = found[name]
        if not right(value):
            raise UserError(f"{folder}: {name} is {value!r} ({why}), expected {expected}; give another")


FILE = "encoder.json"
FORMAT = 1
# Padded tokens of a batch. A CPU is fastest if a batch's activations stay in its caches; a GPU needs large batches.
CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 65_536
# Texts whose ids are in memory at once, and that are sorted by length together.
TEXTS_AT_ONCE = 8192


@dataclass(frozen=True)
class Tower:
    """A transformer, the tokenizer that feeds it, and the folder of both."""

    folder: Path
    bert: Bert
    tokenizer: WordPiece


class LearnedEncoder:
    """Encodes texts to pooled vectors; created by `load_encoder` or `load`. `queries_cut` and `passages_cut` count the
    texts that were truncated to `settings.max_length` tokens. Not thread-safe."""

    name = "learned"

    def __init__(
        self, folder: Path, settings: EncoderSettings, query: Tower, passage: Tower, fingerprint: str, batch_tokens: int
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.fingerprint = fingerprint
        self.dim = passage.bert.config.hidden_size
        self.queries_cut = 0
        self.passages_cut = 0
        self._query = query
        self._passage = passage
        self._batch_tokens = batch_tokens

    @property
    def separates(self) -> bool:
        """Return whether passages may have [SEP] between title and text."""
        return self._passage.tokenizer.separates

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> "LearnedEncoder":
        """Return the encoder of the index in `folder`. UserError if its model is missing or has changed."""
        path = folder / FILE
        record = read_json_object(path)
        places, settings = record.get("model"), record.get("settings")
        if record.get("format") != FORMAT or not isinstance(places, list) or not isinstance(settings, dict):
            raise UserError(f'{path}: expected "format" {FORMAT}, "model" and "settings"; build the index again')
        if missing := [name for name in NAMES if settings.get(name) is None]:
            raise UserError(f"{path}: the setting {missing[0]} is missing; build the index again")
        model = next((folder / place for place in places if (folder / place).is_dir()), None)
        if model is None:
            raise UserError(f"{path}: the encoder is no longer at {places[-1]}; put it there, or build the index again")
        given = {name: settings[name] for name in NAMES}
        encoder = _load(model, given, device, None, origin=f"the index's {FILE}")
        if encoder.fingerprint != record.get("fingerprint"):
            raise UserError(
                f"{model}: is not the encoder that this index was built with (weights or tokenizer were changed); "
                f"put that one back, or build the index in {folder} again"
            )
        return encoder

    def save(self, folder: Path) -> None:
        """Write `encoder.json` to `folder`: settings, and the model's path, relative to `folder` and absolute."""
        absolute = os.path.abspath(self.folder)
        record = {
            "format": FORMAT,
            "model": [os.path.relpath(absolute, os.path.abspath(folder)), absolute],
            "settings": self.settings.values(),
            "fingerprint": self.fingerprint,
        }
        atomic_write_text(folder / FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    @property
    def tower(self) -> Tower:
        """Return the transformer for both queries and passages. UserError for a pair, which has two."""
        if self._query is not self._passage:
            raise UserError(
                f"{self.folder}: is a pair of transformers; give an encoder that has one, such as Contriever"
            )
        return self._query

    def encode_queries(self, queries: list[str]) -> Vectors:
        """Return float32 [len(queries), dim]. UserError if the weights produce numbers that are not finite."""
        vectors, cut = self._encode(self._query, self.settings.query_prefix, queries)
        self.queries_cut += cut
        return vectors

    def encode_passages(self, passages: list[str]) -> Vectors:
        """Return `encode_queries` of passages, with their prefix (and in a pair, their transformer)."""
        vectors, cut = self._encode(self._passage, self.settings.passage_prefix, passages)
        self.passages_cut += cut
        return vectors

    def query_vectors(self, queries: Sequence[str]) -> Tensor:
        """Return `encode_queries` as one batch: a float32 tensor on the transformer's device, with its gradients."""
        return self._vectors(self._query, self.settings.query_prefix, queries)

    def passage_vectors(self, passages: Sequence[str]) -> Tensor:
        """Return `query_vectors` of passages."""
        return self._vectors(self._passage, self.settings.passage_prefix, passages)

    def _vectors(self, tower: Tower, prefix: str, texts: Sequence[str]) -> Tensor:
        ids, _ = tower.tokenizer.encode([prefix + text for text in texts])
        return self._pool(*tower.bert.padded(ids, max(map(len, ids))))

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each passage, not truncated, without prefix and special tokens."""
        return self._passage.tokenizer.count(texts)

    @torch.inference_mode()
    def _encode(self, tower: Tower, prefix: str, texts: list[str]) -> tuple[Vectors, int]:
        vectors_NH = np.empty((len(texts), self.dim), np.float32)
        cut = 0
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            ids, cut_here = tower.tokenizer.encode([prefix + text for text in texts[start : start + TEXTS_AT_ONCE]])
            cut += cut_here
            for rows, *hidden in forwards(tower.bert, ids, self._batch_tokens):
                vectors_NH[start + np.array(rows)] = self._pool(*hidden).cpu().numpy()
        if not np.isfinite(vectors_NH).all():
            raise UserError(
                f"{self.folder}: produces vectors that are not finite; its weights are damaged, fetch them again"
            )
        return vectors_NH, cut

    def _pool(self, hidden_BTH: Tensor, mask_BT: Tensor) -> Tensor:
        if self.settings.pooling == "cls":
            pooled_BH = hidden_BTH[:, 0].float()
        else:
            pooled_BH = (hidden_BTH.float() * mask_BT[:, :, None]).sum(1) / mask_BT.sum(1, keepdim=True)
        return F.normalize(pooled_BH) if self.settings.normalize else pooled_BH


def batches(lengths: Sequence[int], batch_tokens: int, *, mixed: bool) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, padded length) of each batch, longest first, of at most `batch_tokens` padded tokens or one row.
    Lengths are multiples of LENGTH_STEP. Unless `mixed`, all rows of a batch have the same length, which keeps a CPU's
    results equal to the bit."""
    batch: list[int] = []
    widest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        padded = -(-lengths[row] // LENGTH_STEP) * LENGTH_STEP
        if batch and ((len(batch) + 1) * widest > batch_tokens or (padded != widest and not mixed)):
            yield batch, widest
            batch = []
        widest = widest if batch else padded
        batch.append(row)
    if batch:
        yield batch, widest


def forwards(
    bert: Bert, ids: Sequence[Sequence[int]], batch_tokens: int, types: Sequence[Sequence[int]] | None = None
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield (rows, hidden_BTH, mask_BT) of each batch of texts."""
    for rows, length in batches([len(row) for row in ids], batch_tokens, mixed=bert.device.type != "cpu"):
        types_here = None if types is None else [types[row] for row in rows]
        yield rows, *bert.padded([ids[row] for row in rows], length, types_here)


def load_encoder(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_length: int | None = None,
    normalize: bool | None = None,
    batch_tokens: int | None = None,
) -> LearnedEncoder:
    """Read the encoder in `folder`: a sentence-transformers folder, a plain one of a known family, or DPR's pair.

    device: float32 on a CPU, bfloat16 on CUDA. pooling: "mean" or "cls". max_length: tokens, [CLS] and [SEP] included.
    normalize: to norm 1. A setting that is None is taken from the folder's files. batch_tokens: padded tokens of one
    forward, None for a size that suits the device; it changes no vector on a CPU.
    """
    given = {
        "pooling": pooling,
        "normalize": normalize,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "max_length": max_length,
    }
    return _load(Path(folder), given, device, batch_tokens)


def _load(
    folder: Path, given: dict[str, Any], device: torch.device | str, batch_tokens: int | None, origin: str = GIVEN
) -> LearnedEncoder:
    device = pick_device(device)
    batch_tokens = checked_batch_tokens(batch_tokens, device)
    settings, folders = read_settings(folder, given, origin)
    towers = {}
    for place in dict.fromkeys(folders):
        bert = load_bert(place, dtype_on(device), device)
        towers[place] = Tower(place, bert, load_wordpiece(place, bert.config.vocab_size, settings.max_length))
    query, passage = (towers[place] for place in folders)
    if query.bert.config.hidden_size != passage.bert.config.hidden_size:
        raise UserError(
            f"{folder}: queries get {query.bert.config.hidden_size} dimensions and passages "
            f"{passage.bert.config.hidden_size}; put the two halves of one model there"
        )
    fingerprint = _fingerprint(settings, towers)
    return LearnedEncoder(folder, settings, query, passage, fingerprint, batch_tokens)


def pick_device(device: torch.device | str) -> torch.device:
    """Return a CPU or CUDA device that is available. UserError for any other."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UserError(f"device is {device!r}; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device is {str(device)!r}; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {str(device)!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype in which an encoder computes: bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def checked_batch_tokens(tokens: int | None, device: torch.device) -> int:
    """Return the padded tokens of one forward: as given, or a size that suits the device. UserError below 1."""
    if tokens is not None and tokens < 1:
        raise UserError(f"batch_tokens is {tokens}; expected at least 1")
    return tokens or (CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS)


def _fingerprint(settings: EncoderSettings, towers: dict[Path, Tower]) -> str:
    """Return a hash of the settings, and of each transformer's sizes and the bytes of its weights and tokenizer."""
    total = hashlib.sha256(json.dumps(settings.values(), sort_keys=True).encode())
    for place, tower in towers.items():
        config = {key: value for key, value in asdict(tower.bert.config).items() if key != "architecture"}
        total.update(json.dumps(config, sort_keys=True).encode())
        for file in (*_weight_files(place), *tower.tokenizer.files):
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("model*.safetensors*"))


# Files that are copied unchanged if they exist: sizes and tokenizer.
_COPIED = ("config.json", "tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")


def save_encoder(encoder: LearnedEncoder, folder: Path) -> None:
    """Write weights, config, tokenizer and settings to the existing, empty `folder`. UserError for a pair."""
    tower = encoder.tower
    for name in _COPIED:
        if (tower.folder / name).is_file():
            shutil.copyfile(tower.folder / name, folder / name)
    write_settings(folder, encoder.settings, encoder.dim)
    write_weights(folder, {name: tensor.contiguous() for name, tensor in tensors_of(tower.bert).items()})
