"""The invented world in natural sentences: one article per entity, and questions with articles that hold the answer.

    The Silver Orchard is a play. The author of the play is Greta Holm. The Silver Orchard is set in Ash Creek. ..

An article states all facts of its entity, in random order and in one of several wordings. It calls the entity by its
name or "the play". Names are new pairs of common words, which a small model can copy; `facts` invents words for names.

A question asks for one fact, or for a fact of another fact's object. Its articles are those that the answer needs, and
distractors: articles of the subject's other objects, articles that mention the subject or the answer, and articles of
the same kind, which state the same relation of another entity. The facts are random, so pretraining cannot know them: a
right answer was read.

Facts have a direction, so no wording holds both ways, as that of a marriage would: that X wants to marry Y says nothing
about whom Y wants to marry. A relation of a subject is stated only in the subject's own article.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.common.files import staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.engine.world.facts import RELATIONS, Fact, InventedWorld, Size, invent, with_paths
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record

SIZE = Size(people=400, places=300, works=400, train_questions=2000, test_questions=500, dev_questions=500, two_hop=0.4)
ARTICLES = 5  # articles per question
RELATED = 2  # of its distractors, the number that are related to the question
NAMES = {  # kind -> first words of a name, second words
    "person": (
        "Ada Agnes Albert Amos Anna Arthur Bella Boris Carl Clara Daniel Edith Elsa Emil Felix Flora George Greta "
        "Hannah Henry Hugo Ida Ivan Jacob Julia Karl Laura Leo Lydia Martin Mary Nora Oscar Paula Rosa Simon Victor",
        "Abbot Baker Barnes Bishop Carter Cole Cooper Dawson Fisher Fletcher Gardner Grant Harper Holm Hunter Keller "
        "Knight Lang Marsh Mason Miller Moore Norton Palmer Porter Reed Ross Sawyer Shepherd Stone Turner Vogel Weaver",
    ),
    "place": (
        "Amber Apple Ash Bear Birch Black Cedar Cherry Clay Cold Copper Crane Deer Eagle Elm Fern Fox Glen Gold Green "
        "Gull Hazel Iron Maple Moss Oak Otter Owl Pine Raven Red Salt Sand Silver Swan Thorn Willow Wolf",
        "Bay Beach Bridge Creek Falls Ford Gate Grove Harbor Hill Island Lake Mill Point Ridge River Rock Springs",
    ),
    "work": (
        "Blue Broken Burning Cold Dark Distant Empty Endless Fallen Final First Frozen Gentle Glass Golden Hidden Last "
        "Little Lonely Long Lost Narrow Old Paper Quiet Second Secret Silent Silver Stolen Strange Sunken White Wild",
        "Bell Bird Boat Book Bridge Candle Castle Clock Crown Dance Door Dream Feast Fire Garden Ghost House Island "
        "Journey King Lamp Letter Mirror Moon Night Orchard Promise Road Sea Ship Song Storm Summer Tower Winter",
    ),
}
NOUNS = {
    "person": ("painter", "lawyer", "farmer", "doctor"),
    "place": ("town", "village", "city", "port"),
    "work": ("play", "novel", "poem", "song"),
}
# relation -> wordings of the fact: {s} is the subject, {o} the object
SENTENCES = {
    "birthplace": ("{s} was born in {o}.", "{o} is the birthplace of {s}.", "{s} came into the world in {o}."),
    "spouse": ("{s} wants to marry {o}.", "{s} hopes for a marriage with {o}.", "{o} is the one {s} wants to marry."),
    "teacher": ("{s} was taught by {o}.", "{o} was the teacher of {s}.", "{s} learned everything from {o}."),
    "mayor": ("The mayor of {s} is {o}.", "{s} has elected {o} as its mayor.", "{o} serves as the mayor of {s}."),
    "founder": ("{s} was founded by {o}.", "{o} founded {s} long ago.", "The founder of {s} was {o}."),
    "rival": ("{s} has always envied {o}.", "{s} is jealous of {o}.", "{s} envies {o} more than any other."),
    "author": ("{s} was written by {o}.", "{o} wrote {s} in one winter.", "The author of {s} is {o}."),
    "owner": (
        "The manuscript of {s} belongs to {o}.",
        "{o} owns the manuscript of {s}.",
        "{o} has the manuscript of {s}.",
    ),
    "setting": ("{s} is set in {o}.", "The story of {s} takes place in {o}.", "{o} is the setting of {s}."),
}
# relation -> the question for the object, and a phrase for the object in a two-hop question
ASKED = {
    "birthplace": ("Where was {s} born?", "the birthplace of {s}"),
    "spouse": ("Who does {s} want to marry?", "the person that {s} wants to marry"),
    "teacher": ("Who taught {s}?", "the teacher of {s}"),
    "mayor": ("Who is the mayor of {s}?", "the mayor of {s}"),
    "founder": ("Who founded {s}?", "the founder of {s}"),
    "rival": ("Which place does {s} envy?", "the place that {s} envies"),
    "author": ("Who wrote {s}?", "the author of {s}"),
    "owner": ("Who owns the manuscript of {s}?", "the owner of the manuscript of {s}"),
    "setting": ("Where is {s} set?", "the setting of {s}"),
}


def invent_articles(out: str | Path, seed: int, size: Size = SIZE) -> dict[str, Any]:
    """Write train.jsonl, dev.jsonl and test.jsonl into the new folder `out`; return their counts."""
    worlds = invent(replace(size, warmup_worlds=0), seed)
    train_world, test_world = renamed((worlds.train, worlds.test), seed)
    train = reading_questions(train_world, size.train_questions, size.two_hop, seed, "train")
    held_out = reading_questions(test_world, size.test_questions + size.dev_questions, size.two_hop, seed, "held-out")
    splits = {"train": train, "test": held_out[: size.test_questions], "dev": held_out[size.test_questions :]}
    with staged_folder(out) as staged:
        for name, questions in splits.items():
            write_jsonl(staged / f"{name}.jsonl", map(question_record, questions))
    return {f"{name} questions": len(questions) for name, questions in splits.items()}


def renamed(worlds: Sequence[InventedWorld], seed: int) -> list[InventedWorld]:
    """Return the worlds with new names, unique over all of them."""
    rng = random.Random(f"names {seed}")
    pools = {}
    for kind, (firsts, seconds) in NAMES.items():
        pairs = [f"{first} {second}" for first in firsts.split() for second in seconds.split() if first != second]
        pools[kind] = iter(rng.sample(pairs, len(pairs)))
    found = []
    for world in worlds:
        names = {entity: ("The " if kind == "work" else "") + next(pools[kind]) for entity, kind in world.kinds.items()}
        facts = [Fact(names[fact.subject], fact.relation, names[fact.object]) for fact in world.facts.values()]
        kinds = {names[entity]: kind for entity, kind in world.kinds.items()}
        found.append(InventedWorld(kinds, {(fact.subject, fact.relation): fact for fact in facts}))
    return found


def reading_questions(world: InventedWorld, count: int, two_hop: float, seed: int, prefix: str) -> list[Question]:
    """Return `count` questions with their articles, shuffled, and the numbers of the articles that the answer needs."""
    told = articles(world, seed)
    rng = random.Random(f"articles of questions {prefix} {seed}")
    mentioned_by: dict[str, list[str]] = {}
    for fact in world.facts.values():
        mentioned_by.setdefault(fact.object, []).append(fact.subject)
    found = []
    for question, path in with_paths(world, count, two_hop, seed, prefix):
        needed = [fact.subject for fact in path]
        subject, answer = path[0].subject, path[-1].object
        objects = [world.facts[subject, relation].object for relation in world.relations(subject)]
        related = [*objects, *mentioned_by.get(subject, ()), *mentioned_by[answer]]
        alike = [name for name, kind in world.kinds.items() if kind == world.kinds[needed[-1]]]
        candidates = [*_some(rng, related, needed, RELATED), *_some(rng, alike, needed, ARTICLES)]
        shown = [*needed, *dict.fromkeys(candidates)][:ARTICLES]
        rng.shuffle(shown)
        gold = tuple(sorted(shown.index(name) + 1 for name in needed))
        passages = tuple(told[name] for name in shown)
        found.append(replace(question, question=ask(path), passages=passages, gold_indices=gold))
    return found


def articles(world: InventedWorld, seed: int) -> dict[str, Passage]:
    """Return entity name -> its article."""
    rng = random.Random(f"articles {seed}")
    found = {}
    for number, (entity, kind) in enumerate(world.kinds.items()):
        noun = rng.choice(NOUNS[kind])
        sentences = [f"{entity} is a {noun}."]
        for relation in rng.sample(list(RELATIONS[kind]), len(RELATIONS[kind])):
            mention = rng.choice((entity, f"the {noun}"))
            text = rng.choice(SENTENCES[relation]).format(s=mention, o=world.facts[entity, relation].object)
            sentences.append(text[0].upper() + text[1:])
        found[entity] = Passage(str(number), entity, " ".join(sentences))
    return found


def ask(path: Sequence[Fact]) -> str:
    """Return the question that a path of facts answers."""
    subject = path[0].subject
    for fact in path[:-1]:
        subject = ASKED[fact.relation][1].format(s=subject)
    return ASKED[path[-1].relation][0].format(s=subject)


def _some(rng: random.Random, names: Sequence[str], without: Sequence[str], count: int) -> list[str]:
    """Return up to `count` distinct random names, none of them in `without`."""
    left = [name for name in dict.fromkeys(names) if name not in without]
    return rng.sample(left, min(count, len(left)))
