"""A classifier of tokens that keeps or drops each, such as LLMLingua-2's, on an encoder of the BERT family.

    p(token) = softmax(W h + b)[1],    h = the encoder's state of that token in  [CLS] text [SEP]

(Pan et al. 2024, "LLMLingua-2", arXiv:2403.12968, section 3.2.) A word is what stands between white space, and its
probability is the mean over its tokens. A text longer than the encoder's positions is read in stretches, each ending
where a word does if one does.

A text's probabilities do not depend on the texts beside it: to the last bit on a CPU, as `learned` has it for vectors;
but for rounding on CUDA, where the encoder computes in bfloat16. The head is float32 everywhere.

Deliberately absent: training, and heads of more than two outputs.

Axes: B stretches of a batch, T padded length, H hidden, O outputs (docs/notation.md).
"""

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.common.errors import UserError
from thresher.common.files import refuse_hub_id
from thresher.policy.weights import read_weights, tensor_shapes
from thresher.retrieval.encoders.bert import Bert, load_bert
from thresher.retrieval.encoders.learned import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS, batches, pick_device
from thresher.retrieval.encoders.wordpiece import TEXTS_AT_ONCE, count_tokens, read_tokenizer

KEEP = 1  # the output that says keep
_HEAD = "classifier"
_WORD = re.compile(r"\S+")

Stretch = tuple[list[int], list[int]]  # ids, and of each the word that it is part of, -1 for none


class TokenClassifier:
    """Texts to the words that they are made of, each with the probability that it is kept. Made by
    `load_token_classifier`. Not thread-safe."""

    def __init__(
        self, folder: Path, bert: Bert, head: tuple[Tensor, Tensor], tokenizer: tokenizers.Tokenizer, batch_tokens: int
    ) -> None:
        self.folder = folder
        self._bert, self._tokenizer, self._batch_tokens = bert, tokenizer, batch_tokens
        self._weight_OH, self._bias_O = head
        self._around = tokenizer.encode("").ids

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has, without those around it."""
        return count_tokens(self._tokenizer, list(texts))

    @torch.inference_mode()
    def words(self, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Each text's words in order, with the mean probability of their tokens; 0 for a word of which the tokenizer
        makes no token. UserError when the weights make numbers that are not finite."""
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
        mixed = self._bert.device.type != "cpu"
        for rows, length in batches([len(ids) for ids, _ in stretches], self._batch_tokens, mixed=mixed):
            for row, probabilities in zip(rows, self._keep([stretches[row][0] for row in rows], length), strict=True):
                for word, value in zip(stretches[row][1], probabilities, strict=False):  # behind them is padding
                    if word >= 0:
                        sums[owners[row]][word] += value
                        counts[owners[row]][word] += 1
        means = [[a / max(n, 1) for a, n in zip(*pair, strict=True)] for pair in zip(sums, counts, strict=True)]
        return [list(zip(found, values, strict=True)) for found, values in zip(words, means, strict=True)]

    def _keep(self, rows: list[list[int]], length: int) -> list[list[float]]:
        """The probability of every place, padding included."""
        hidden_BTH, mask_BT = self._bert.padded(rows, length)
        probs_BTO = F.linear(hidden_BTH.float(), self._weight_OH, self._bias_O).softmax(-1)
        if not probs_BTO[mask_BT].isfinite().all():
            raise UserError(
                f"{self.folder}: makes probabilities that are not finite; its weights are damaged, fetch them again"
            )
        kept: list[list[float]] = probs_BTO[:, :, KEEP].tolist()
        return kept

    def _stretches(self, texts: Sequence[str]) -> list[tuple[list[str], list[Stretch]]]:
        """Of each text its words, and its tokens in as many stretches as the positions ask for."""
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        room = self._bert.config.max_positions - len(self._around)
        begin, end = self._around
        result = []
        for text, encoding in zip(whole, self._tokenizer.encode_batch(whole, add_special_tokens=False), strict=True):
            matches = list(_WORD.finditer(text))
            place = [-1] * len(text)
            for number, match in enumerate(matches):
                place[match.start() : match.end()] = [number] * len(match[0])
            # A token's last character: where its first may be the white space before the word.
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
    """Where a stretch from `start` ends: before the word that does not fit any more, within one that is longer than
    the room."""
    limit = stop = min(start + room, len(owner))
    while stop < len(owner) and stop > start and owner[stop] == owner[stop - 1]:
        stop -= 1
    return stop if stop > start else limit


def load_token_classifier(
    folder: str | Path, *, device: torch.device | str = "cpu", batch_tokens: int | None = None
) -> TokenClassifier:
    """The token classifier in `folder`: config.json, safetensors and tokenizer of a BERT, DistilBERT, RoBERTa or XLM-R
    with the head of transformers' ...ForTokenClassification, of two outputs, of which the second keeps.

    device: where the encoder runs, in float32 on a CPU and in bfloat16 on CUDA. batch_tokens: padded tokens of one
    forward; None for a size that suits the device. UserError for a folder that is damaged or has no such head.
    """
    refuse_hub_id(folder)
    folder = Path(folder)
    device = pick_device(device)
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; expected at least 1")
    bert = load_bert(folder, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    named = bert.config.architecture
    if named and not named.endswith("ForTokenClassification"):
        raise UserError(
            f"{folder / 'config.json'}: holds a {named}, expected one ..ForTokenClassification; use a model that "
            "classifies tokens, such as LLMLingua-2's"
        )
    tokenizer, files = read_tokenizer(folder, bert.config.vocab_size)
    if len(tokenizer.encode("").ids) != 2:
        raise UserError(
            f"{files[0]}: puts no token of its own before and after a text, as BERT's [CLS] and [SEP]; use the "
            "tokenizer that belongs to the model"
        )
    if bert.config.max_positions < 3:
        raise UserError(f"{folder}: has {bert.config.max_positions} positions, expected 3 at least; use another model")
    head = _load_head(folder, bert.config.hidden_size, device)
    default = CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS
    return TokenClassifier(folder, bert, head, tokenizer, batch_tokens or default)


def _load_head(folder: Path, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    found = tensor_shapes(folder)
    if f"{_HEAD}.weight" not in found:
        raise UserError(
            f"{folder}: tensor {_HEAD}.weight is missing, so this is an encoder without a token classifier's head; "
            "use a model that classifies tokens, such as LLMLingua-2's"
        )
    if (outputs := found[f"{_HEAD}.weight"][0]) != 2:
        raise UserError(
            f"{folder}: its classifier has {outputs} outputs, expected 2, to drop a token and to keep it; use "
            "a model that does that, such as LLMLingua-2's"
        )
    shapes = {f"{_HEAD}.weight": torch.Size([2, width]), f"{_HEAD}.bias": torch.Size([2])}
    tensors = dict(read_weights(folder, shapes, optional=found.keys() - shapes.keys()))
    weight_OH, bias_O = (tensors[name].to(device, torch.float32, copy=True) for name in shapes)
    return weight_OH, bias_O
