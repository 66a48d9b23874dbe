"""A judge of entailment for the invented world, trained in it: `thresher data judge`.

A BERT of three layers, trained on labelled pairs (note_pairs.py) of the training world and the warm-up worlds, and
written as `judge.entailment` reads any classifier (retrieval/encoders/heads.py). Held-out pairs are about held-out
entities. Its vocabulary is the world's words, and characters for all others.

Everything is a function of the seed: one thread computes, so that the number of cores changes no bit.
"""

import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

from thresher.common import console
from thresher.common.files import atomic_write_text, staged_folder
from thresher.common.hashes import write_hashes
from thresher.engine.synthetic.note_pairs import LABELS, Pair, invent_pairs
from thresher.engine.synthetic.world import InventedWorld, Size, invent
from thresher.engine.threads import use_threads
from thresher.policy.weights import write_weights
from thresher.retrieval.encoders.heads import Head, load_classifier
from thresher.retrieval.encoders.tokenizer import PairTokenizer, load_pair_tokenizer
from thresher.retrieval.encoders.transformer import Bert, EncoderLayer, read_bert_config, tensors_of

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
POSITIONS = 160  # of note and claim together
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
STDS = {"word_embeddings": 1.0, "token_type_embeddings": 0.7}  # of first values; all else 1 / sqrt(width)
WAVES = 0.5  # of the first positions, sines and cosines
HELD_OUT = 1000  # pairs
STEPS, BATCH, LR, WARMUP, CLIP = 1300, 64, 2e-3, 100, 1.0


def make_judge(out: str | Path, seed: int, steps: int, size: Size | None = None) -> dict[str, Any]:
    """Train a judge and write it into the new folder `out`; returns its figures, accuracy on held-out pairs among
    them."""
    started = time.perf_counter()
    worlds = invent(size or Size(), seed)
    rng = random.Random(f"judge {seed}")
    held_out = invent_pairs(worlds.test, HELD_OUT, rng)
    with staged_folder(out) as staged, use_threads(1):
        _write_files(staged, [worlds.train, worlds.test])
        loss = _train(staged, [worlds.train, *worlds.warmup], seed, steps, rng)
        write_hashes(staged)
        accuracy = judge_accuracy(staged, held_out)
    return {
        "steps": steps,
        "loss": loss,
        **accuracy,
        "held-out pairs": HELD_OUT,
        "seed": seed,
        "seconds": time.perf_counter() - started,
    }


def judge_accuracy(folder: Path, pairs: Sequence[Pair]) -> dict[str, float]:
    """How often the classifier in `folder` names the label, and tells entailment from the rest."""
    found_B = load_classifier(folder).logits([pair[:2] for pair in pairs]).argmax(-1)
    labels_B = torch.tensor([label for *_, label in pairs])
    entailed = LABELS.index("entailment")
    same_B = (found_B == entailed) == (labels_B == entailed)
    return {"accuracy": (found_B == labels_B).double().mean().item(), "of entailment": same_B.double().mean().item()}


def _write_files(folder: Path, worlds: Iterable[InventedWorld]) -> None:
    """config.json and tokenizer.json."""
    tokenizer = _tokenizer(worlds)
    tokenizer.save(str(folder / "tokenizer.json"))
    record = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "relu",
        "layer_norm_eps": 1e-12,
        "id2label": {str(place): label for place, label in enumerate(LABELS)},
        "label2id": {label: place for place, label in enumerate(LABELS)},
        **SIZES,
    }
    atomic_write_text(folder / "config.json", json.dumps(record, indent=2) + "\n")


def _tokenizer(worlds: Iterable[InventedWorld]) -> tokenizers.Tokenizer:
    """Whole words of the worlds' facts and of claims about them, lower-cased, and characters for all else."""
    texts = [fact.sentence for world in worlds for fact in world.facts.values()]
    texts += [hypothesis for world in worlds for _, hypothesis, _ in invent_pairs(world, 1, random.Random(0))]
    split = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text.lower())}
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *sorted(words)])
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
    )
    return tokenizer


def _train(folder: Path, worlds: Sequence[InventedWorld], seed: int, steps: int, rng: random.Random) -> float:
    """Writes the weights; returns the mean loss of the last tenth of the steps."""
    config = read_bert_config(folder)
    draw = torch.Generator().manual_seed(seed)
    encoder = _start(Bert(config), draw)
    width, outputs = config.hidden_size, len(LABELS)
    head = [nn.Parameter(torch.zeros(shape)) for shape in ((width, width), (width,), (outputs, width), (outputs,))]
    for weight in (head[0], head[2]):
        weight.data.normal_(std=width**-0.5, generator=draw)
    model = Head(head, torch.tanh)
    parameters = [*encoder.parameters(), *head]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01)
    tokenizer = load_pair_tokenizer(folder, config.vocab_size, POSITIONS)
    losses = []
    with console.progress_line("judge", steps) as line:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LR * min((step + 1) / WARMUP, (steps - step) / (steps - min(WARMUP, steps - 1)))
            pairs = invent_pairs(rng.choice(worlds), BATCH, rng)
            loss = _loss(encoder, model, tokenizer, pairs)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            losses.append(loss.item())
            line.to(step + 1, f"loss {losses[-1]:.3f}")
    names = ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors_of(encoder).items()}
    tensors |= {name: parameter.data for name, parameter in zip(names, head, strict=True)}
    write_weights(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def _start(encoder: Bert, draw: torch.Generator) -> Bert:
    """First values: words say who they are louder than where they stand, neighbours have neighbouring positions, and
    every head looks at equal words, for its keys are its queries. Names have to be compared; from the usual first
    values 1,500 steps do not teach it."""
    width = encoder.config.hidden_size
    for name, tensor in tensors_of(encoder).items():
        if name.endswith("bias"):
            tensor.zero_()
        elif "LayerNorm" not in name:
            tensor.normal_(std=STDS.get(name.split(".")[1], width**-0.5), generator=draw)
    waves = torch.arange(POSITIONS)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
    assert encoder.positions_WH is not None
    encoder.positions_WH.data.copy_(WAVES * torch.cat([waves.sin(), waves.cos()], -1))
    for layer in encoder.layers:
        assert isinstance(layer, EncoderLayer)
        query, key, _ = layer.qkv.weight.data.chunk(3)
        key.copy_(query)
    return encoder


def _loss(encoder: Bert, head: Head, tokenizer: PairTokenizer, pairs: Sequence[Pair]) -> torch.Tensor:
    inputs, _ = tokenizer.encode([pair[:2] for pair in pairs])
    ids, types = zip(*inputs, strict=True)
    hidden_BTH, _ = encoder.padded(ids, max(map(len, ids)), types)
    logits_BO = head(hidden_BTH[:, 0])
    return F.cross_entropy(logits_BO, torch.tensor([label for *_, label in pairs]))
