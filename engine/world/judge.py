"""A judge of entailment for the invented world, trained in it: `thresher data judge`.

A BERT of three layers, trained on labelled pairs from the training world and the warm-up worlds, and written as a
classifier for `judge.entailment` (retrieval/encoders). Held-out pairs are about held-out entities. A pair:

    premise     a note                                    "* Amber Lattice has author Bel Dorin.\\n- the rest"
    hypothesis  "<gold> is the answer to '<question>'"    with one relation or two

    entailment      the note states the fact that answers: the last relation of the question, with the gold as its
                    object and, for a question with one relation, with its subject
    contradiction   a question with one relation: the same fact with another object, and not with the gold
    neutral         everything else, including notes that a judge by word overlap would reward

Everything is a function of the seed: the computation uses one thread, so that the number of cores changes no bit.
"""

import json
import random
import re
import string
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
from thresher.engine.threads import use_threads
from thresher.engine.world.facts import RELATIONS, Fact, InventedWorld, Size, ask, invent, walk
from thresher.policy.weights import write_weights
from thresher.retrieval.encoders.heads import Head, load_classifier
from thresher.retrieval.encoders.tokenizer import PairTokenizer, load_pair_tokenizer
from thresher.retrieval.encoders.transformer import Bert, EncoderLayer, read_bert_config, tensors_of
from thresher.rewards.papers.evinote import CLAIM

LABELS = ("contradiction", "neutral", "entailment")
Pair = tuple[str, str, int]  # premise, hypothesis, the index of its label in LABELS


def invent_pairs(world: InventedWorld, count: int, rng: random.Random) -> list[Pair]:
    """Return `count` labelled pairs about one world, a third of them entailed."""
    subjects = list(world.kinds)
    found: list[Pair] = []
    while len(found) < count:
        path = walk(world, rng.choice(subjects), rng.choice((1, 2, 2)), rng)
        if path[-1].object == path[0].subject:  # no question has such a path
            continue
        makers = [_answering] if len(found) % 3 == 0 else [*_NEUTRAL, _changed]
        premise = _littered(rng.choice(makers)(world, path, rng), rng)
        hypothesis = CLAIM.format(gold=path[-1].object, question=ask(path))
        found.append((premise, hypothesis, LABELS.index(label_of(premise, path))))
    return found


def label_of(note: str, path: Sequence[Fact]) -> str:
    """Return the label of a note for the claim that `path` leads to, from the facts that the note states."""
    wanted = path[-1]
    told = [Fact(*match.groups()) for match in _FACT.finditer(note)]
    right = [fact for fact in told if fact.relation == wanted.relation and fact.object == wanted.object]
    if len(path) == 1:
        right = [fact for fact in right if fact.subject == wanted.subject]
    if right:
        return "entailment"
    other = any((fact.subject, fact.relation) == (wanted.subject, wanted.relation) for fact in told)
    return "contradiction" if other and len(path) == 1 else "neutral"


def _littered(note: str, rng: random.Random) -> str:
    """Return the note, in half of the cases with noise before or after it that does not change the label. A policy
    finds whatever deceives its judge: broken tags did, for a judge that was not trained on any."""
    if rng.random() < 0.5:
        return note
    tags = [f"{mark}{name}"[: rng.randrange(1, 12)] for mark in ("<", "</") for name in _TAGS]
    letters = ["".join(rng.choices(string.ascii_letters + string.punctuation, k=rng.randrange(1, 8))) for _ in range(4)]
    piece = rng.choice((*tags, *letters, "the re", "the"))
    litter = " ".join(rng.choices((piece, rng.choice(letters)), (3, 1), k=rng.randrange(1, 6)))
    return f"{note} {litter}" if rng.random() < 0.7 else f"{litter} {note}"


_TAGS = ("summary>", "search>", "think>", "answer>", "information>")
_NAME = r"[A-Z]\w+ [A-Z]\w+"
_RELATIONS = sorted({relation for relations in RELATIONS.values() for relation in relations})
_FACT = re.compile(rf"({_NAME}) has ({'|'.join(_RELATIONS)}) ({_NAME})\.")


def _fact(world: InventedWorld, rng: random.Random) -> Fact:
    subject = rng.choice(list(world.kinds))
    return world.facts[subject, rng.choice(world.relations(subject))]


def _note(facts: Sequence[Fact], rng: random.Random) -> str:
    """Return a note of the facts: in random order, each with or without a mark, and sometimes with a second line."""
    mark = rng.choice(("* ", "* ", "* ", "", "- "))
    lines = [mark + fact.sentence for fact in rng.sample(list(facts), len(facts))]
    return rng.choice(("\n", " ")).join(lines) + rng.choice(("", "\n- the rest"))


# Makers of notes for a path of facts: (world, path, random generator) -> note.


def _answering(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Note the answering fact and up to two others, of the path's entities or of any."""
    entities = (path[0].subject, path[-1].subject)
    near = [world.facts[entity, relation] for entity in entities for relation in world.relations(entity)]
    found = [rng.choice(near) if rng.random() < 0.7 else _fact(world, rng) for _ in range(rng.choice((0, 0, 1, 2)))]
    return _note([path[-1], *(fact for fact in found if fact != path[-1])], rng)


def _right_subject(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Note facts of the question's subject that are not the answer, possibly the first of a two-hop path."""
    known = [world.facts[path[0].subject, relation] for relation in world.relations(path[0].subject)]
    known = [fact for fact in known if fact != path[-1]]
    return _note(rng.sample(known, rng.choice((1, 1, 2))), rng)


def _other_subject(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Note the requested relation of another subject, with that subject's object or with the gold."""
    wanted, facts = path[-1], world.facts.values()
    other = rng.choice([x for x in facts if x.relation == wanted.relation and x.subject != wanted.subject])
    return _note([Fact(other.subject, other.relation, wanted.object) if rng.random() < 0.3 else other], rng)


def _other_relation(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Note the right subject and the gold, with another relation."""
    relation = rng.choice([name for name in _RELATIONS if name != path[-1].relation])
    return _note([Fact(path[-1].subject, relation, path[-1].object)], rng)


def _turned(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Note a fact that has the gold as its subject."""
    relation = rng.choice((path[-1].relation, *world.relations(path[-1].object)))
    return _note([Fact(path[-1].object, relation, rng.choice((path[0].subject, _fact(world, rng).object)))], rng)


def _elsewhere(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    return _note([_fact(world, rng) for _ in range(rng.choice((1, 2)))], rng)


def _copied(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    question = ask(path)
    return rng.choice((question, f"* {question}", f"* {question} {path[-1].object}", f"{path[-1].object} {question}"))


def _loose(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Return shuffled words of the question, of facts and of a note, without a meaning."""
    told = *path[-1].sentence.split(), *_fact(world, rng).sentence.split()
    words = [*ask(path).split(), *told, "*", "-", "the", "rest"]
    return " ".join(rng.sample(words, rng.randrange(len(words) // 2)))


def _changed(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    return _note([Fact(path[-1].subject, path[-1].relation, _fact(world, rng).object)], rng)


_NEUTRAL = [_right_subject, _right_subject, _other_subject, _other_relation, _turned, _elsewhere, _copied, _loose]


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
POSITIONS = 160  # of note and claim together
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
STDS = {"word_embeddings": 1.0, "token_type_embeddings": 0.7}  # of initial values; all others 1 / sqrt(width)
WAVES = 0.5  # amplitude of the initial positions, which are sines and cosines
HELD_OUT = 1000  # pairs
STEPS, BATCH, LR, WARMUP, CLIP = 1300, 64, 2e-3, 100, 1.0


def make_judge(out: str | Path, seed: int, steps: int, size: Size | None = None) -> dict[str, Any]:
    """Train a judge and write it into the new folder `out`; return its figures, with held-out accuracy."""
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
    """Return two accuracies of the classifier in `folder`: over all labels, and for entailment against the rest."""
    found_B = load_classifier(folder).logits([pair[:2] for pair in pairs]).argmax(-1)
    labels_B = torch.tensor([label for *_, label in pairs])
    entailed = LABELS.index("entailment")
    same_B = (found_B == entailed) == (labels_B == entailed)
    return {"accuracy": (found_B == labels_B).double().mean().item(), "of entailment": same_B.double().mean().item()}


def _write_files(folder: Path, worlds: Iterable[InventedWorld]) -> None:
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
    """Make a lower-casing tokenizer of the words in the worlds' facts and in claims about them, and of characters."""
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
    """Train, write the weights, and return the mean loss of the last tenth of the steps."""
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
    """Set the initial values so that names can be compared; 1,500 steps from the usual ones do not teach it.

    Word embeddings are larger than position embeddings, adjacent positions have similar embeddings, and each head
    attends to equal words because its keys equal its queries.
    """
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
