"""Training of RECOMP's extractive compressor: `thresher train-encoder`.

    loss(q) = -log  exp(<q, p> / tau) / (exp(<q, p> / tau) + sum over n in N of exp(<q, n> / tau))

(Xu, Shi and Choi 2024, "RECOMP", arXiv:2310.04408, section 3.1.) q, p and n are vectors of one encoder: of a
question, of the sentence that helps most, and of sentences that help less (training_data.py). N holds at most 5 of
these, the nearest to q under the encoder before training. Sentences of other questions are not used as negatives.

The paper starts from Contriever: mean pooling, no norm, tau = 1. [assumed] to be the paper's: Adam, a learning rate of
2e-5, batches of 64. [assumed]: three epochs; a warm-up over the first tenth of the steps, then a decay to 0; gradients
clipped to a norm of 1; tau .05 for an encoder whose vectors have norm 1. Everything is float32. On a CPU the result is
a function of the records, the initial weights, the seed and the number of threads. Nothing is written before the end.

Axes: B questions, S sentences of all questions concatenated, C sentences of a question, padded; H as everywhere.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import need_room, staged_folder
from thresher.common.hashes import write_hashes
from thresher.engine.compressors.training_data import Contrast, read_contrasts
from thresher.engine.threads import threads_for, use_threads
from thresher.retrieval.encoders.learned import (
    CPU_BATCH_TOKENS,
    CUDA_BATCH_TOKENS,
    LearnedEncoder,
    load_encoder,
    pick_device,
    save_encoder,
)

HARD = 5  # negatives per question
LR, BATCH, EPOCHS, CLIP = 2e-5, 64, 3, 1.0
NORMED_TAU = 0.05
HELD_OUT = 500  # records, or a tenth of all if that is fewer
MICRO = 8  # questions per forward and backward
AT_ONCE = 512  # records whose vectors are in memory at once


def train_recomp(
    records: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    steps: int = 0,
    lr: float = LR,
    batch: int = BATCH,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train the encoder in the folder `model`, write it to the new folder `out`, and return its figures.

    steps: of the optimiser, 0 for three epochs. batch: questions per step, at most all. UserError for records or a
    model that cannot be used, for an existing `out`, and for a loss that is not finite.
    """
    started = time.perf_counter()
    out = Path(out)
    if out.exists():
        raise UserError(f"{out}: exists already; choose another folder for the encoder")
    found = read_contrasts(records)
    encoder = _load(model, device)
    parameters = list(encoder.tower.bert.parameters())
    need_room(out, sum(parameter.nbytes for parameter in parameters), "the encoder")
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(found), generator=draw).tolist()
    count = min(HELD_OUT, max(1, len(found) // 10))
    held_out, training = [found[n] for n in order[:count]], [found[n] for n in order[count:]]
    batch = min(batch, len(training))
    steps = steps or math.ceil(EPOCHS * len(training) / batch)
    with use_threads(threads_for("auto", encoder.tower.bert.config)):
        before = evaluate(encoder, held_out)
        losses = _train(encoder, _hardest(encoder, training), steps, lr, batch, draw)
        after = evaluate(encoder, held_out)
    with staged_folder(out) as staged:
        save_encoder(encoder, staged)
        write_hashes(staged)
    last = losses[-max(1, steps // 10) :]
    return {
        "records": len(training),
        "held out": count,
        "steps": steps,
        "loss of the first step": losses[0],
        "loss of the last tenth": sum(last) / len(last),
        **{f"held-out {name} before": value for name, value in before.items()},
        **{f"held-out {name}": value for name, value in after.items()},
        "seed": seed,
        "seconds": time.perf_counter() - started,
    }


def contrastive_loss(query_BH: Tensor, sentence_SH: Tensor, counts: Sequence[int], tau: float) -> Tensor:
    """Return the mean over questions of the loss at the top of this file, a scalar.

    query_BH, sentence_SH: floating. counts: number of sentences of each question, of which the first is the positive.
    """
    owner_S = torch.repeat_interleave(torch.tensor(counts)).to(query_BH.device)
    scores_S = (query_BH[owner_S] * sentence_SH).sum(-1) / tau
    scores_BC = nn.utils.rnn.pad_sequence(list(scores_S.split(list(counts))), True, padding_value=-math.inf)
    return F.cross_entropy(scores_BC, torch.zeros(len(counts), dtype=torch.int64, device=scores_BC.device))


def evaluate(encoder: LearnedEncoder, records: Sequence[Contrast]) -> dict[str, float]:
    """Return mean loss and accuracy against all negatives, not only the hardest. accuracy: share of records whose
    positive has a higher score than every negative."""
    loss = right = 0.0
    for _, scores_C in _scored(encoder, records):
        scaled_C = scores_C / _tau(encoder)
        loss += float(np.logaddexp.reduce(scaled_C) - scaled_C[0])
        right += float(scores_C[0] > scores_C[1:].max())
    return {"loss": loss / len(records), "accuracy": right / len(records)}


def _load(model: str | Path, device: str) -> LearnedEncoder:
    """Load an encoder with gradients, in float32 on any device (`load_encoder` uses bfloat16 on CUDA)."""
    place = pick_device(device)
    tokens = CUDA_BATCH_TOKENS if place.type == "cuda" else CPU_BATCH_TOKENS
    encoder = load_encoder(model, batch_tokens=tokens)
    encoder.tower.bert.to(place).requires_grad_(True)
    return encoder


def _tau(encoder: LearnedEncoder) -> float:
    return NORMED_TAU if encoder.settings.normalize else 1.0


def _scored(encoder: LearnedEncoder, records: Sequence[Contrast]) -> Iterator[tuple[Contrast, NDArray[np.float64]]]:
    """Yield each record with the float64 inner products of its question and sentences, the positive first."""
    for start in range(0, len(records), AT_ONCE):
        part = records[start : start + AT_ONCE]
        queries_BH = encoder.encode_queries([record.question for record in part]).astype(np.float64)
        vectors_SH = encoder.encode_passages([text for record in part for text in (record.positive, *record.negatives)])
        at = 0
        for record, query_H in zip(part, queries_BH, strict=True):
            end = at + 1 + len(record.negatives)
            yield record, vectors_SH[at:end].astype(np.float64) @ query_H
            at = end


def _hardest(encoder: LearnedEncoder, records: Sequence[Contrast]) -> list[Contrast]:
    """Return the records, each with its `HARD` negatives of highest score."""
    found: list[Contrast] = []
    with console.progress_line("hard negatives", len(records)) as line:
        for record, scores_C in _scored(encoder, records):
            nearest = np.argsort(-scores_C[1:], kind="stable")[:HARD]
            found.append(replace(record, negatives=tuple(record.negatives[n] for n in nearest)))
            if len(found) % AT_ONCE == 0 or len(found) == len(records):
                line.to(len(found), "")
    return found


def _train(
    encoder: LearnedEncoder, records: Sequence[Contrast], steps: int, lr: float, batch: int, draw: torch.Generator
) -> list[float]:
    """Train the encoder; return the loss of every step."""
    parameters = list(encoder.tower.bert.parameters())
    optimizer = torch.optim.Adam(parameters, lr=lr)
    warmup = max(1, steps // 10)
    order = _order(len(records), draw)
    losses = []
    with console.progress_line("train-encoder", steps) as line:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
            optimizer.zero_grad()
            losses.append(_backward(encoder, [records[next(order)] for _ in range(batch)]))
            norm = nn.utils.clip_grad_norm_(parameters, CLIP).item()
            if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
                raise UserError(
                    f"step {step + 1}: the loss is {losses[-1]} and its gradient's norm {norm}; give a lower --lr"
                )
            optimizer.step()
            line.to(step + 1, f"loss {losses[-1]:.3f}")
    return losses


def _order(count: int, draw: torch.Generator) -> Iterator[int]:
    """Yield record numbers indefinitely, each epoch in a new random order."""
    while True:
        yield from torch.randperm(count, generator=draw).tolist()


def _backward(encoder: LearnedEncoder, records: Sequence[Contrast]) -> float:
    """Accumulate the gradient of the mean loss over the records of a step, `MICRO` at a time; return the loss."""
    total = 0.0
    for start in range(0, len(records), MICRO):
        part = records[start : start + MICRO]
        texts = [text for record in part for text in (record.positive, *record.negatives)]
        loss = contrastive_loss(
            encoder.query_vectors([record.question for record in part]),
            encoder.passage_vectors(texts),
            [1 + len(record.negatives) for record in part],
            _tau(encoder),
        ) * (len(part) / len(records))
        loss.backward()
        total += loss.item()
    return total
