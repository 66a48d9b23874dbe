"""Classifiers on an encoder of the BERT family: of pairs of texts, and of a text's tokens.

    logits   = W f(V h + b) + c,     h = the encoder's state of the first token of  [CLS] premise [SEP] hypothesis [SEP]
    p(token) = softmax(W h + b)[1],  h = the encoder's state of that token in  [CLS] text [SEP]

Classifier computes the first: f is tanh for BERT, ReLU for DistilBERT, GELU for DeBERTa 2 and 3. TokenClassifier
computes the second, as LLMLingua-2 does (Pan et al. 2024, arXiv:2403.12968, section 3.2); a word's probability is the
mean over its tokens. A result does not depend on the other inputs of a batch: to the last bit for a BERT or DistilBERT
on a CPU, and up to rounding for a DeBERTa and on CUDA (bfloat16). Heads are float32.

Axes: B inputs of a batch or a call, T padded length, H hidden, O outputs (docs/notation.md).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.common.errors import UserError
from thresher.common.files import read_json_object, refuse_hub_id
from thresher.policy.tokenizer import panics_refused
from thresher.policy.weights import read_weights, tensor_shapes
from thresher.retrieval.encoders.learned import checked_batch_tokens, dtype_on, forwards, pick_device
from thresher.retrieval.encoders.tokenizer import (
    TEXTS_AT_ONCE,
    PairTokenizer,
    count_tokens,
    load_pair_tokenizer,
    read_tokenizer,
)
from thresher.retrieval.encoders.transformer import DEBERTA, LENGTH_STEP, Bert, load_bert, load_deberta

# model_type -> the end of the name of the head's first layer, and the activation after it.
_FIRST_LAYERS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bert": ("pooler.dense", torch.tanh),
    "distilbert": ("pre_classifier", F.relu),
    DEBERTA: ("pooler.dense", F.gelu),
}
_OUTPUT = "classifier"
ENTAILMENT = "entailment"
KEEP = 1  # the output for keeping a token
_WORD = re.compile(r"\S+")

Stretch = tuple[list[int], list[int]]  # ids, and the word of each id, -1 for none


class Classifier:
    """Maps text pairs to logits; created by `load_classifier`. labels: of the outputs, in order. cut: number of pairs
    so far whose premise was truncated to `max_tokens`. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        encoder: Bert,
        head: "Head",
        tokenizer: PairTokenizer,
        labels: tuple[str, ...],
        batch_tokens: int,
    ) -> None:
        self.folder = folder
        self.labels = labels
        self.cut = 0
        self.max_tokens = tokenizer.max_tokens
        self._encoder = encoder
        self._head = head
        self._tokenizer = tokenizer
        self._batch_tokens = batch_tokens

    @property
    def entailment(self) -> int:
        """Return the number of the output for entailment. UserError unless exactly one label has this name."""
        places = [place for place, label in enumerate(self.labels) if label.strip().lower() == ENTAILMENT]
        if len(places) != 1:
            raise UserError(
                f"{self.folder}: the labels {json.dumps(self.labels)} do not say which output is entailment; "
                f"give labels, the names of its {len(self.labels)} outputs in the model's order, one of them "
                f'"{ENTAILMENT}"'
            )
        return places[0]

    @torch.inference_mode()
    def logits(self, pairs: Sequence[tuple[str, str]], on_done: Callable[[int], None] = lambda pairs: None) -> Tensor:
        """Return float32 [B, O] on the CPU for (premise, hypothesis) pairs. `on_done` is given the number done."""
        inputs, cut = self._tokenizer.encode(pairs)
        self.cut += cut
        ids, types = [ids for ids, _ in inputs], [types for _, types in inputs]
        logits_BO = torch.empty(len(pairs), len(self.labels))
        done = 0
        # A table of one type has no row for the second text.
        second = types if self._encoder.config.types > 1 else None
        for rows, hidden_BTH, _ in forwards(self._encoder, ids, self._batch_tokens, second):
            logits_BO[rows] = self._head(hidden_BTH[:, 0].float()).cpu()
            on_done(done := done + len(rows))
        _check_finite(logits_BO, self.folder, "logits")
        return logits_BO


class Head:
    """Two layers on the first token's state, in float32; tensors: weight and bias of the first, then of the second."""

    def __init__(self, tensors: Sequence[Tensor], activation: Callable[[Tensor], Tensor]) -> None:
        self.dense_HH, self.dense_H, self.output_OH, self.output_O = tensors
        self._activation = activation

    def __call__(self, x_BH: Tensor) -> Tensor:
        """Return [B, O] of float32 [B, H]. Rows are padded to a multiple, for batch invariance."""
        padded_BH = F.pad(x_BH, (0, 0, 0, -len(x_BH) % LENGTH_STEP))
        inner_BH = self._activation(F.linear(padded_BH, self.dense_HH, self.dense_H))
        return F.linear(inner_BH, self.output_OH, self.output_O)[: len(x_BH)]


def load_classifier(
    folder: str | Path,
    *,
    labels: Sequence[str] | None = None,
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> Classifier:
    """Read a BERT, DistilBERT or DeBERTa-v2 with the head of transformers' ...ForSequenceClassification.

    folder: with config.json, safetensors and tokenizer. labels: of the outputs, in order; None: config.json's.
    max_tokens: of premise and hypothesis together; None: the model's positions. batch_tokens: padded tokens of one
    forward. device: float32 on a CPU, bfloat16 on CUDA.
    """
    refuse_hub_id(folder)
    folder = Path(folder)
    device = pick_device(device)
    path = folder / "config.json"
    record = read_json_object(path)
    model_type = record.get("model_type")
    if model_type not in _FIRST_LAYERS:
        raise UserError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(_FIRST_LAYERS)}; use such a classifier"
        )
    if record.get("problem_type") not in (None, "single_label_classification"):
        raise UserError(
            f"{path}: problem_type is {record['problem_type']!r}, expected 'single_label_classification'; use a "
            "model whose labels exclude each other"
        )
    pooled = record.get("pooler_hidden_act", "gelu")
    if model_type == DEBERTA and pooled != "gelu":
        raise UserError(f"{path}: pooler_hidden_act is {pooled!r}, expected 'gelu'; use another model")
    end, activation = _FIRST_LAYERS[model_type]
    advice = "a folder that was fine-tuned on natural language inference"
    head = Head(_read_head(folder, (end, _OUTPUT), device, "a classifier's head", advice), activation)
    encoder = (load_deberta if model_type == DEBERTA else load_bert)(folder, dtype_on(device), device)
    longest = encoder.config.max_positions
    if max_tokens is not None and not 1 <= max_tokens <= longest:
        raise UserError(f"max_tokens is {max_tokens}; expected 1 to {longest}, the positions of {folder}")
    batch_tokens = checked_batch_tokens(batch_tokens, device)
    tokenizer = load_pair_tokenizer(folder, encoder.config.vocab_size, max_tokens or longest)
    return Classifier(folder, encoder, head, tokenizer, _labels(record, path, len(head.output_O), labels), batch_tokens)


def _labels(record: Mapping[str, Any], path: Path, count: int, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the outputs' names: `given`, else those of id2label, else their numbers."""
    if given is not None:
        if len(given) != count:
            raise UserError(f"{path.parent}: has {count} outputs, but {len(given)} labels are given; give {count}")
        return tuple(given)
    named = record.get("id2label")
    if named is None:
        return tuple(f"LABEL_{place}" for place in range(count))
    names = [named.get(str(place)) for place in range(count)] if isinstance(named, dict) else [None]
    if len(names) != len(named) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{path}: id2label is {json.dumps(named)[:80]}, expected names for 0 to {count - 1}; give labels"
        )
    return tuple(map(str, names))


class TokenClassifier:
    """Maps texts to their words and the probability that each is kept; created by `load_token_classifier`. Not
    thread-safe."""

    def __init__(
        self, folder: Path, bert: Bert, head: Sequence[Tensor], tokenizer: tokenizers.Tokenizer, batch_tokens: int
    ) -> None:
        self.folder = folder
        self._bert, self._tokenizer, self._batch_tokens = bert, tokenizer, batch_tokens
        self._weight_OH, self._bias_O = head
        self._around = tokenizer.encode("").ids

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens."""
        return count_tokens(self._tokenizer, list(texts))

    @torch.inference_mode()
    def words(self, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Return each text's words in order, with the mean probability of their tokens (0 for a word without any)."""
        words: list[list[str]] = []
        stretches: list[Stretch] = []
        owners: list[int] = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            for found, parts in self._stretches(texts[start : start + TEXTS_AT_ONCE]):
                stretches += parts
                owners += [len(words)] * len(parts)
                words.append(found)
        sums = [[0.0] * len(found) for found in words]
        counts = [[0] * len(found) for found in words]
        for rows, hidden_BTH, mask_BT in forwards(self._bert, [ids for ids, _ in stretches], self._batch_tokens):
            probs_BTO = F.linear(hidden_BTH.float(), self._weight_OH, self._bias_O).softmax(-1)
            _check_finite(probs_BTO[mask_BT], self.folder, "probabilities")
            for row, probabilities in zip(rows, probs_BTO[:, :, KEEP].tolist(), strict=True):
                for word, value in zip(stretches[row][1], probabilities, strict=False):  # padding follows
                    if word >= 0:
                        sums[owners[row]][word] += value
                        counts[owners[row]][word] += 1
        means = [[a / max(n, 1) for a, n in zip(*pair, strict=True)] for pair in zip(sums, counts, strict=True)]
        return [list(zip(found, values, strict=True)) for found, values in zip(words, means, strict=True)]

    def _stretches(self, texts: Sequence[str]) -> list[tuple[list[str], list[Stretch]]]:
        """Return each text's words, and its tokens in stretches that fit the positions, split between words."""
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        room = self._bert.config.max_positions - len(self._around)
        begin, end = self._around
        with panics_refused(whole, str(self.folder)):
            encodings = self._tokenizer.encode_batch(whole, add_special_tokens=False)
        result = []
        for text, encoding in zip(whole, encodings, strict=True):
            matches = list(_WORD.finditer(text))
            place = [-1] * len(text)
            for number, match in enumerate(matches):
                place[match.start() : match.end()] = [number] * len(match[0])
            # By a token's last character, because its first may be the white space before the word.
            owner = [place[max(a, b - 1)] if a < len(text) else -1 for a, b in encoding.offsets]
            parts: list[Stretch] = []
            start = 0
            while start < len(owner):
                stop = _stop(owner, start, room)
                parts.append(([begin, *encoding.ids[start:stop], end], [-1, *owner[start:stop], -1]))
                start = stop
            result.append(([match[0] for match in matches], parts))
        return result


def _stop(owner: Sequence[int], start: int, room: int) -> int:
    """Return the end of a stretch from `start`: before the first word that does not fit, or inside one too long."""
    limit = stop = min(start + room, len(owner))
    while stop < len(owner) and stop > start and owner[stop] == owner[stop - 1]:
        stop -= 1
    return stop if stop > start else limit


def load_token_classifier(folder: str | Path, *, device: torch.device | str = "cpu") -> TokenClassifier:
    """Read a BERT, DistilBERT, RoBERTa or XLM-R with the head of transformers' ...ForTokenClassification. The head has
    two outputs, and the second is for keeping a token. folder: with config.json, safetensors and tokenizer. device: see
    `load_classifier`."""
    refuse_hub_id(folder)
    folder = Path(folder)
    device = pick_device(device)
    bert = load_bert(folder, dtype_on(device), device)
    named = bert.config.architecture
    if named and not named.endswith("ForTokenClassification"):
        raise UserError(
            f"{folder / 'config.json'}: holds a {named}, expected one ..ForTokenClassification; use a model that "
            "classifies tokens, such as LLMLingua-2's"
        )
    tokenizer, _ = read_tokenizer(folder, bert.config.vocab_size)
    if bert.config.max_positions < 3:
        raise UserError(f"{folder}: has {bert.config.max_positions} positions, expected 3 at least; use another model")
    advice = "a model that classifies tokens, such as LLMLingua-2's"
    head = _read_head(folder, (_OUTPUT,), device, "a token classifier's head", advice, outputs=2)
    return TokenClassifier(folder, bert, head, tokenizer, checked_batch_tokens(None, device))


def _read_head(
    folder: Path, layers: Sequence[str], device: torch.device, head: str, advice: str, outputs: int | None = None
) -> list[Tensor]:
    """Return weight and bias, float32, of each linear layer, given by the end of its name. All are square except the
    last, which has `outputs` rows. `head` and `advice` are words for the error for a missing layer."""
    found = tensor_shapes(folder)
    shapes: dict[str, torch.Size] = {}
    for layer in layers:
        # BERT's pooler belongs to the encoder and has its prefix; that of the others does not.
        ends = (f"{layer}.weight",) if layer == _OUTPUT else (f"{layer}.weight", f".{layer}.weight")
        name = next((name for name in found if name == ends[0] or name.endswith(ends[1:])), None)
        if name is None:
            raise UserError(
                f"{folder}: tensor {ends[0]} is missing, so this is an encoder without {head}; use {advice}"
            )
        rows, width = found[name][0], found[name][-1]
        if layer == _OUTPUT and outputs not in (None, rows):
            raise UserError(
                f"{folder}: its classifier has {rows} outputs, expected {outputs}, to drop a token and to keep it; use "
                "a model that does that, such as LLMLingua-2's"
            )
        shapes[name] = torch.Size([rows if layer == _OUTPUT else width, width])
        shapes[f"{name.removesuffix('.weight')}.bias"] = shapes[name][:1]
    tensors = dict(read_weights(folder, shapes, optional=found.keys() - shapes.keys()))
    # The tensors that were read are backed by the file, so they are copied.
    return [tensors[name].to(device, torch.float32, copy=True) for name in shapes]


def _check_finite(values: Tensor, folder: Path, what: str) -> None:
    if not values.isfinite().all():
        raise UserError(f"{folder}: produces {what} that are not finite; its weights are damaged, fetch them again")
