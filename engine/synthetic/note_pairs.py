"""Pairs of a note and a claim about the invented world, labelled: what its judge of entailment is trained on.

    premise     a note                                    "* Amber Lattice has author Bel Dorin.\\n- the rest"
    hypothesis  "<gold> is the answer to '<question>'"    of one relation or two

    entailment      the fact that answers stands in the note: the relation asked for last, with the gold as its object,
                    and of a question of one relation with its subject
    contradiction   a question of one relation: the same fact with another object, and the gold's not beside it
    neutral         everything else: a fact of the right subject and another relation, one of another subject, the first
                    fact of two, the question copied, alone or with the gold, loose words, nothing

Neutral notes are the ones that a judge of overlapping words pays for.

Everything is a function of the seed of `rng`.
"""

import random
import re
import string
from collections.abc import Callable, Sequence

from thresher.engine.synthetic.world import RELATIONS, Fact, InventedWorld, ask, walk
from thresher.rewards.papers.evinote import CLAIM

LABELS = ("contradiction", "neutral", "entailment")
Pair = tuple[str, str, int]  # premise, hypothesis, the place of its label in LABELS


def invent_pairs(world: InventedWorld, count: int, rng: random.Random) -> list[Pair]:
    """`count` labelled pairs about one world, a third of them entailed."""
    subjects = list(world.kinds)
    found: list[Pair] = []
    while len(found) < count:
        path = walk(world, rng.choice(subjects), rng.choice((1, 2, 2)), rng)
        if path[-1].object == path[0].subject:  # no question has such a path
            continue
        makers = _MAKERS["entailment"] if len(found) % 3 == 0 else [*_MAKERS["neutral"], *_MAKERS["contradiction"]]
        premise = _littered(rng.choice(makers)(world, path, rng), rng)
        hypothesis = CLAIM.format(gold=path[-1].object, question=ask(path))
        found.append((premise, hypothesis, LABELS.index(label_of(premise, path))))
    return found


def label_of(note: str, path: Sequence[Fact]) -> str:
    """What a note says of the claim that `path` leads to, read off the facts that stand in it."""
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
    """Half of the notes with litter before or behind them, which changes no label: a policy tries whatever fools its
    judge, and broken tags fooled one that had never read any."""
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
    """The facts as a note has them: in any order, each with a mark or none, and sometimes a second line."""
    mark = rng.choice(("* ", "* ", "* ", "", "- "))
    lines = [mark + fact.sentence for fact in rng.sample(list(facts), len(facts))]
    return rng.choice(("\n", " ")).join(lines) + rng.choice(("", "\n- the rest"))


def _beside(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> list[Fact]:
    """Up to two facts that do not answer: of the path's entities, or any."""
    entities = (path[0].subject, path[-1].subject)
    near = [world.facts[entity, relation] for entity in entities for relation in world.relations(entity)]
    found = [rng.choice(near) if rng.random() < 0.7 else _fact(world, rng) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [fact for fact in found if fact != path[-1]]


def _answering(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    return _note([path[-1], *_beside(world, path, rng)], rng)


def _right_subject(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Facts of the question's subject, none of which answers; the first of two among them."""
    known = [world.facts[path[0].subject, relation] for relation in world.relations(path[0].subject)]
    known = [fact for fact in known if fact != path[-1]]
    return _note(rng.sample(known, rng.choice((1, 1, 2))), rng)


def _other_subject(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """The relation asked for, of somebody else: with the object that this one has, or with the gold."""
    wanted = path[-1]
    same = [
        fact for fact in world.facts.values() if fact.relation == wanted.relation and fact.subject != wanted.subject
    ]
    other = rng.choice(same)
    return _note([Fact(other.subject, other.relation, wanted.object) if rng.random() < 0.3 else other], rng)


def _other_relation(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """The right subject and the gold, in a relation that was not asked for."""
    relation = rng.choice([name for name in _RELATIONS if name != path[-1].relation])
    return _note([Fact(path[-1].subject, relation, path[-1].object)], rng)


def _turned(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """The gold as the subject of a fact."""
    relation = rng.choice((path[-1].relation, *world.relations(path[-1].object)))
    return _note([Fact(path[-1].object, relation, rng.choice((path[0].subject, _fact(world, rng).object)))], rng)


def _elsewhere(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    return _note([_fact(world, rng) for _ in range(rng.choice((1, 2)))], rng)


def _copied(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """The question, with the gold beside it or without."""
    question = ask(path)
    return rng.choice((question, f"* {question}", f"* {question} {path[-1].object}", f"{path[-1].object} {question}"))


def _loose(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """Words of the question, of facts and of a note, that say nothing together."""
    words = [
        *ask(path).split(),
        *path[-1].sentence.split(),
        *_fact(world, rng).sentence.split(),
        "*",
        "-",
        "the",
        "rest",
    ]
    return " ".join(rng.sample(words, rng.randrange(len(words) // 2)))


def _changed(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> str:
    """The fact asked for with another object."""
    return _note([Fact(path[-1].subject, path[-1].relation, _fact(world, rng).object)], rng)


_MAKERS: dict[str, list[Callable[[InventedWorld, Sequence[Fact], random.Random], str]]] = {
    "entailment": [_answering],
    "neutral": [_right_subject, _right_subject, _other_subject, _other_relation, _turned, _elsewhere, _copied, _loose],
    "contradiction": [_changed],
}
