"""A classifier of pairs of texts, such as one for natural language inference, on an encoder of the BERT family.

    logits = W f(V h + b) + c,    h = the encoder's state of the first token of  [CLS] premise [SEP] hypothesis [SEP]

f is tanh for BERT (its pooler; MiniLM's cross-encoders are BERTs), ReLU for DistilBERT, GELU for DeBERTa 2 and 3. What
each output stands for is read from config.json, and which of them is entailment by its name: checkpoints differ in the
order, and a wrong guess would reward contradiction.

Pairs are sorted by length and batched by it. A pair's logits do not depend on the pairs beside it: to the last bit for
a BERT or DistilBERT on a CPU, as `learned` has it for vectors; but for rounding for a DeBERTa, and on CUDA, where the
encoder computes in bfloat16.

Deliberately absent: training, regression and several labels at once, and RoBERTa, whose input has another form.

Axes: B pairs of a batch or a call, T padded length, H hidden, O outputs (docs/notation.md).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.common.errors import UserError
from thresher.common.files import read_json_object, refuse_hub_id
from thresher.policy.weights import read_weights, tensor_shapes
from thresher.retrieval.encoders.bert import LENGTH_STEP, Bert, load_bert
from thresher.retrieval.encoders.deberta import MODEL_TYPE as DEBERTA
from thresher.retrieval.encoders.deberta import Deberta, load_deberta
from thresher.retrieval.encoders.learned import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS, batches, pick_device
from thresher.retrieval.encoders.pairs import PairTokenizer, load_pair_tokenizer

# model_type -> how the name of the head's first layer ends, and what follows that layer.
_HEADS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bert": ("pooler.dense", torch.tanh),
    "distilbert": ("pre_classifier", F.relu),
    DEBERTA: ("pooler.dense", F.gelu),
}
_OUTPUT = "classifier"
ENTAILMENT = "entailment"


class Classifier:
    """Pairs to logits, see the top of this file. Made by `load_classifier`.

    labels: what the outputs stand for, in their order. cut: pairs so far whose premise lost its end to `max_tokens`.
    Not thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        encoder: Bert | Deberta,
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
        """Which output is entailment. UserError where no label, or more than one, is called so."""
        places = [place for place, label in enumerate(self.labels) if label.strip().lower() == ENTAILMENT]
        if len(places) != 1:
            raise UserError(
                f"{self.folder}: which output is entailment cannot be read from the labels {json.dumps(self.labels)}; "
                f"give labels, the names of its {len(self.labels)} outputs in the model's order, one of them "
                f'"{ENTAILMENT}"'
            )
        return places[0]

    @torch.inference_mode()
    def logits(self, pairs: Sequence[tuple[str, str]], on_done: Callable[[int], None] = lambda pairs: None) -> Tensor:
        """float32 [B, O] on the CPU, for (premise, hypothesis) pairs; `on_done` hears how many are. UserError for a
        hypothesis that leaves no room for a premise, and when the weights make numbers that are not finite."""
        inputs, cut = self._tokenizer.encode(pairs)
        self.cut += cut
        logits_BO = torch.empty(len(pairs), len(self.labels))
        # A CPU in float32 keeps its promise of equal bits by batches of one padded length.
        mixed = self._encoder.device.type != "cpu"
        done = 0
        for rows, length in batches([len(ids) for ids, _ in inputs], self._batch_tokens, mixed=mixed):
            logits_BO[rows] = self._forward([inputs[row] for row in rows], length).cpu()
            on_done(done := done + len(rows))
        if not logits_BO.isfinite().all():
            raise UserError(
                f"{self.folder}: makes logits that are not finite; its weights are damaged, fetch them again"
            )
        return logits_BO

    def _forward(self, inputs: list[tuple[list[int], list[int]]], length: int) -> Tensor:
        device = self._encoder.device
        ids_BT, types_BT = (
            torch.tensor([part + [0] * (length - len(part)) for part in parts]).to(device)
            for parts in zip(*inputs, strict=True)
        )
        lengths_B1 = torch.tensor([[len(ids)] for ids, _ in inputs]).to(device)
        mask_BT = torch.arange(length, device=device) < lengths_B1
        # A table of one type has no row for the second text.
        types = types_BT if self._encoder.config.types > 1 else None
        return self._head(self._encoder(ids_BT, mask_BT, types)[:, 0].float())


class Head:
    """Two layers on the first token's state, in float32; tensors: weight and bias of the first, then of the second."""

    def __init__(self, tensors: Sequence[Tensor], activation: Callable[[Tensor], Tensor]) -> None:
        self.dense_HH, self.dense_H, self.output_OH, self.output_O = tensors
        self._activation = activation

    def __call__(self, x_BH: Tensor) -> Tensor:
        """float32 [B, H] -> [B, O]. Rows are padded to a multiple, for batch invariance."""
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
    """The classifier in `folder`: config.json, safetensors and tokenizer of a BERT, DistilBERT or DeBERTa-v2 with the
    head of transformers' ...ForSequenceClassification.

    labels: of the outputs, in their order; None: as config.json has them. max_tokens: of premise and hypothesis
    together; None: as many as the model has positions. batch_tokens: padded tokens of one forward; None for a size that
    suits the device. device: where the encoder runs, in float32 on a CPU and in bfloat16 on CUDA. UserError for a
    folder that is damaged, has no such head, or another number of labels.
    """
    refuse_hub_id(folder)
    folder = Path(folder)
    device = pick_device(device)
    path = folder / "config.json"
    record = read_json_object(path)
    model_type = record.get("model_type")
    if model_type not in _HEADS:
        raise UserError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(_HEADS)}; use such a classifier"
        )
    if record.get("problem_type") not in (None, "single_label_classification"):
        raise UserError(
            f"{path}: problem_type is {record['problem_type']!r}, expected 'single_label_classification'; use a "
            "model whose labels exclude each other"
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = _load_head(folder, *_head_of(record, path), device)
    encoder = (load_deberta if model_type == DEBERTA else load_bert)(folder, dtype, device)
    longest = encoder.config.max_positions
    if max_tokens is not None and not 1 <= max_tokens <= longest:
        raise UserError(f"max_tokens is {max_tokens}; expected 1 to {longest}, the positions of {folder}")
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; expected at least 1")
    tokenizer = load_pair_tokenizer(folder, encoder.config.vocab_size, max_tokens or longest)
    default = CUDA_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS
    names = _labels(record, path, len(head.output_O), labels)
    return Classifier(folder, encoder, head, tokenizer, names, batch_tokens or default)


def _head_of(record: Mapping[str, Any], path: Path) -> tuple[str, Callable[[Tensor], Tensor]]:
    """How the first layer's name ends, and what follows it. UserError for a DeBERTa with another activation."""
    end, activation = _HEADS[record["model_type"]]
    pooled = record.get("pooler_hidden_act", "gelu")
    if record["model_type"] == DEBERTA and pooled != "gelu":
        raise UserError(f"{path}: pooler_hidden_act is {pooled!r}, expected 'gelu'; use another model")
    return end, activation


def _load_head(folder: Path, end: str, activation: Callable[[Tensor], Tensor], device: torch.device) -> Head:
    found = tensor_shapes(folder)
    # BERT's pooler belongs to the encoder and has its prefix, the others' does not.
    dense = next((name.removesuffix(".weight") for name in found if name.endswith(f"{end}.weight")), None)
    if dense is None or f"{_OUTPUT}.weight" not in found:
        missing = f"{_OUTPUT}.weight" if dense is not None else f"{end}.weight"
        raise UserError(
            f"{folder}: tensor {missing} is missing, so this is an encoder without a classifier's head; "
            "use a folder that was fine-tuned on natural language inference"
        )
    width, count = found[f"{dense}.weight"][-1], found[f"{_OUTPUT}.weight"][0]
    shapes = {
        f"{dense}.weight": torch.Size([width, width]),
        f"{dense}.bias": torch.Size([width]),
        f"{_OUTPUT}.weight": torch.Size([count, width]),
        f"{_OUTPUT}.bias": torch.Size([count]),
    }
    tensors = dict(read_weights(folder, shapes, optional=found.keys() - shapes.keys()))
    # Tensors read are the file's; a copy is ours.
    return Head([tensors[name].to(device, torch.float32, copy=True) for name in shapes], activation)


def _labels(record: Mapping[str, Any], path: Path, count: int, given: Sequence[str] | None) -> tuple[str, ...]:
    """What the outputs are called: as given, as id2label has it, or by their numbers where that says nothing."""
    if given is not None:
        if len(given) != count:
            raise UserError(f"{path.parent}: has {count} outputs, and {len(given)} labels are given; give {count}")
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
