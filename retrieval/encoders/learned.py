"""A trained encoder: a transformer of the BERT family, pooled to one vector a text.

    vector = [v / |v|],  v = mean over tokens, or the first token, of bert(prefix + text)

How a folder wants it done is read by `settings`, with where each answer comes from (`LearnedEncoder.settings.why`).
Texts are sorted by length and batched by it, so little is padding.

A vector does not depend on the texts beside it: in float32 on a CPU not in its last bit, where the BLAS is batch-
invariant, since texts of one batch are padded to the same multiple of 16 tokens by their own length alone; on CUDA,
where a batch is padded to its longest text and the transformer computes in bfloat16, but for rounding. Pooling and norm
are float32 everywhere.

The model itself is not copied into an index: encoder.json keeps where it lies, the settings and a fingerprint over
weights, tokenizer and settings, which must still be the same when the index is opened. Device and dtype are not part
of it: an index made on a GPU can be searched from a CPU.

Deliberately absent: a loss (`query_vectors` and `passage_vectors` have gradients, for whoever has one), and encoders
outside the BERT family.

Axes: B texts of a batch, T padded length, H hidden width and length of a vector.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.retrieval.encoders.bert import LENGTH_STEP, Bert, load_bert
from thresher.retrieval.encoders.encoder import Vectors
from thresher.retrieval.encoders.settings import GIVEN, NAMES, EncoderSettings, read_settings
from thresher.retrieval.encoders.wordpiece import WordPiece, load_wordpiece

FILE = "encoder.json"
FORMAT = 1
# Padded tokens of a batch. A CPU is fastest while a batch's activations stay in its caches; a GPU needs work.
CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 65_536
# Texts whose ids are held at once: bounds memory however many are given, and is plenty to sort by length.
TEXTS_AT_ONCE = 8192


@dataclass(frozen=True)
class Tower:
    """A transformer, the tokenizer that feeds it, and the folder of both."""

    folder: Path
    bert: Bert
    tokenizer: WordPiece


class LearnedEncoder:
    """Texts to pooled vectors, see the top of this file. Made by `load_encoder` or `load`.

    `queries_cut` and `passages_cut` count the texts so far that were longer than `settings.max_length` tokens and lost
    their end. Not thread-safe.
    """

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

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> "LearnedEncoder":
        """The encoder of the index in `folder`. UserError when encoder.json is absent or damaged, or the model is no
        longer where it was, or is another one."""
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
        """Writes `encoder.json` into `folder`: settings, and the model's place, seen from there and from the root."""
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
        """The transformer for queries and passages alike. UserError for a pair, which has two."""
        if self._query is not self._passage:
            raise UserError(f"{self.folder}: is a pair of transformers; give an encoder of one, such as Contriever")
        return self._query

    def encode_queries(self, queries: list[str]) -> Vectors:
        """float32 [len(queries), dim]. UserError when the weights make numbers that are not finite."""
        vectors, cut = self._encode(self._query, self.settings.query_prefix, queries)
        self.queries_cut += cut
        return vectors

    def encode_passages(self, passages: list[str]) -> Vectors:
        """As `encode_queries`, with the prefix (and in a pair, the transformer) for passages."""
        vectors, cut = self._encode(self._passage, self.settings.passage_prefix, passages)
        self.passages_cut += cut
        return vectors

    def query_vectors(self, queries: Sequence[str]) -> Tensor:
        """`encode_queries` as one batch, a float32 tensor on the transformer's device, with gradients where its
        parameters have them."""
        return self._vectors(self._query, self.settings.query_prefix, queries)

    def passage_vectors(self, passages: Sequence[str]) -> Tensor:
        """As `query_vectors`, of passages."""
        return self._vectors(self._passage, self.settings.passage_prefix, passages)

    def _vectors(self, tower: Tower, prefix: str, texts: Sequence[str]) -> Tensor:
        ids, _ = tower.tokenizer.encode([prefix + text for text in texts])
        return self._pool(tower.bert, ids, max(map(len, ids)))

    def count_tokens(self, texts: list[str]) -> list[int]:
        """How many tokens each passage has, whole, without prefix and what the tokenizer puts around it."""
        return self._passage.tokenizer.count(texts)

    @torch.inference_mode()
    def _encode(self, tower: Tower, prefix: str, texts: list[str]) -> tuple[Vectors, int]:
        vectors_NH = np.empty((len(texts), self.dim), np.float32)
        cut = 0
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            ids, cut_here = tower.tokenizer.encode([prefix + text for text in texts[start : start + TEXTS_AT_ONCE]])
            cut += cut_here
            # A CPU in float32 keeps its promise of equal bits by batches of one padded length.
            mixed = tower.bert.device.type != "cpu"
            for rows, length in batches([len(row) for row in ids], self._batch_tokens, mixed=mixed):
                pooled_BH = self._pool(tower.bert, [ids[row] for row in rows], length)
                vectors_NH[start + np.array(rows)] = pooled_BH.cpu().numpy()
        if not np.isfinite(vectors_NH).all():
            raise UserError(
                f"{self.folder}: makes vectors that are not finite; its weights are damaged, fetch them again"
            )
        return vectors_NH, cut

    def _pool(self, bert: Bert, ids: list[list[int]], length: int) -> Tensor:
        hidden_BTH, mask_BT = bert.padded(ids, length)
        if self.settings.pooling == "cls":
            pooled_BH = hidden_BTH[:, 0].float()
        else:
            pooled_BH = (hidden_BTH.float() * mask_BT[:, :, None]).sum(1) / mask_BT.sum(1, keepdim=True)
        return F.normalize(pooled_BH) if self.settings.normalize else pooled_BH


def batches(lengths: Sequence[int], batch_tokens: int, *, mixed: bool) -> Iterator[tuple[list[int], int]]:
    """(rows, padded length) of each batch, longest first, so that memory is asked for once.

    A batch holds at most `batch_tokens` padded tokens, but at least one row. Lengths are padded to a multiple of
    LENGTH_STEP; unless `mixed`, a batch holds rows of one padded length only.
    """
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
    """The encoder in `folder`: a sentence-transformers folder, a plain one of a known family, or DPR's pair.

    device: where the transformer runs, in float32 on a CPU and in bfloat16 on CUDA.
    pooling: "mean" or "cls". query_prefix, passage_prefix: put before every text. max_length: tokens, [CLS] and [SEP]
    included. normalize: to norm 1. None for any of these: as the folder's files have it.
    batch_tokens: padded tokens of one forward; None for a size that suits the device. It changes no vector on a CPU.
    UserError for a folder that is damaged, unsupported, or does not say what was not given.
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
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; expected at least 1")
    settings, folders = read_settings(folder, given, origin)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    towers = {}
    for place in dict.fromkeys((folders.query, folders.passage)):
        bert = load_bert(place, dtype, device)
        towers[place] = Tower(place, bert, load_wordpiece(place, bert.config.vocab_size, settings.max_length))
    query, passage = towers[folders.query], towers[folders.passage]
    if query.bert.config.hidden_size != passage.bert.config.hidden_size:
        raise UserError(
            f"{folder}: queries get {query.bert.config.hidden_size} dimensions and passages "
            f"{passage.bert.config.hidden_size}; put the two halves of one model there"
        )
    fingerprint = _fingerprint(settings, towers)
    default = CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS
    return LearnedEncoder(folder, settings, query, passage, fingerprint, batch_tokens or default)


def pick_device(device: torch.device | str) -> torch.device:
    """A CPU or CUDA device that is there. UserError for another."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UserError(f"device is {device!r}; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device is {str(device)!r}; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {str(device)!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def _fingerprint(settings: EncoderSettings, towers: dict[Path, Tower]) -> str:
    """Hash over settings, and of each transformer its sizes and the bytes of its weights and tokenizer."""
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
