"""An invented world in which to learn searching: people, places and works that no pretraining corpus mentions.

Facts are one sentence each ("Amber Lattice has author Bel Dorin."). Questions follow one relation or two ("What is the
birthplace of the author of Amber Lattice?"). Training and held-out entities are disjoint, and no fact connects them, so
an answer has to be found and copied; the words of held-out names all occur in other names. Warm-up transcripts use
several further worlds with other names (never a held-out one): from a single world a small model memorizes which words
form a name, and does not learn to copy. Everything is a function of the seed.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

# kind -> relation -> kind of the object
RELATIONS = {
    "person": {"birthplace": "place", "spouse": "person", "teacher": "person"},
    "place": {"mayor": "person", "founder": "person", "rival": "place"},
    "work": {"author": "person", "owner": "person", "setting": "place"},
}
BLIND_HOPS = (1, 3)  # searches of a blind transcript: never two, which most questions need


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Numbers of things to invent, entities by kind. held_out: share of the entities that is set aside with its own
    facts. aware: share of the transcripts that follow their question."""

    people: int = 240
    places: int = 160
    works: int = 240
    pieces: int = 60  # number of distinct first words, and of second words, of names
    held_out: float = 0.25
    train_questions: int = 2000
    test_questions: int = 200
    dev_questions: int = 100
    two_hop: float = 0.67  # share of two-hop questions
    warmup_worlds: int = 16
    transcripts: int = 6400  # over all warm-up worlds
    aware: float = 0.24

    @property
    def entities(self) -> dict[str, int]:
        return {"person": self.people, "place": self.places, "work": self.works}


@dataclass(frozen=True, slots=True)
class Fact:
    """A relation between two entities."""

    subject: str
    relation: str
    object: str

    @property
    def sentence(self) -> str:
        return f"{self.subject} has {self.relation} {self.object}."

    @property
    def query(self) -> str:
        return f"{self.relation} of {self.subject}"


@dataclass(frozen=True, slots=True)
class InventedWorld:
    """A closed set of invented facts, for training, held-out questions or warm-up. kinds: entity -> kind. facts:
    (entity, relation) -> fact."""

    kinds: dict[str, str]
    facts: dict[tuple[str, str], Fact]

    def relations(self, entity: str) -> list[str]:
        return list(RELATIONS[self.kinds[entity]])


@dataclass(frozen=True, slots=True)
class InventedWorlds:
    """All worlds of a seed: the first two have the training and held-out questions, the others are for warm-up."""

    train: InventedWorld
    test: InventedWorld
    warmup: list[InventedWorld]


def invent(size: Size, seed: int) -> InventedWorlds:
    """Invent all worlds of a seed."""
    rng = random.Random(f"world {seed}")
    firsts, seconds = _words(rng, size.pieces, 1), _words(rng, size.pieces, 2)
    names = [f"{first} {second}" for first in firsts for second in seconds]
    held_out = {kind: round(count * size.held_out) for kind, count in size.entities.items()}
    rng.shuffle(names)
    test = _world(names, held_out, rng)
    names = names[sum(held_out.values()) :]
    counts = {kind: count - held_out[kind] for kind, count in size.entities.items()}
    train, *warmup = (_world(rng.sample(names, len(names)), counts, rng) for _ in range(1 + size.warmup_worlds))
    return InventedWorlds(train, test, warmup)


def passages(worlds: Sequence[InventedWorld], seed: int) -> list[Passage]:
    """Return every fact of these worlds as a passage whose title is its subject and relation, shuffled."""
    facts = [fact for world in worlds for fact in world.facts.values()]
    random.Random(f"order {seed}").shuffle(facts)
    return [
        Passage(str(number), f"{fact.subject}, {fact.relation}", fact.sentence) for number, fact in enumerate(facts)
    ]


def with_paths(
    world: InventedWorld, count: int, two_hop: float, seed: int, prefix: str, asked: Collection[str] = ()
) -> list[tuple[Question, list[Fact]]]:
    """Return distinct questions, each with the facts that lead to its answer, and with one gold.

    two_hop: share of the questions over two facts. asked: questions to leave out.
    """
    rng = random.Random(f"questions {prefix} {seed}")
    one = [[fact] for fact in world.facts.values()]
    two = [
        [fact, world.facts[fact.object, relation]]
        for fact in world.facts.values()
        for relation in world.relations(fact.object)
        if world.facts[fact.object, relation].object != fact.subject
    ]
    one, two = ([path for path in paths if ask(path) not in asked] for paths in (one, two))
    rng.shuffle(one)
    rng.shuffle(two)
    twos = min(round(count * two_hop), len(two))
    chosen = two[:twos] + one[: count - twos]
    rng.shuffle(chosen)
    return [
        (Question(f"{prefix}-{number}", ask(path), (path[-1].object,), {"hops": len(path)}), path)
        for number, path in enumerate(chosen)
    ]


def ask(path: Sequence[Fact]) -> str:
    """Return the question that a path of facts answers."""
    inner = path[0].subject
    for fact in path:
        inner = f"the {fact.relation} of {inner}"
    return f"What is {inner}?"


def walk(world: InventedWorld, entity: str, hops: int, rng: random.Random) -> list[Fact]:
    """Return a path of facts from an entity, along random relations."""
    path: list[Fact] = []
    for _ in range(hops):
        path.append(world.facts[entity, rng.choice(world.relations(entity))])
        entity = path[-1].object
    return path


def _world(names: Sequence[str], counts: dict[str, int], rng: random.Random) -> InventedWorld:
    remaining = iter(names)
    by_kind = {kind: [next(remaining) for _ in range(count)] for kind, count in counts.items()}
    facts = {}
    for kind, members in by_kind.items():
        for name in members:
            for relation, target in RELATIONS[kind].items():
                other = rng.choice([entity for entity in by_kind[target] if entity != name])
                facts[name, relation] = Fact(name, relation, other)
    return InventedWorld({name: kind for kind, members in by_kind.items() for name in members}, facts)


def _words(rng: random.Random, count: int, syllables: int) -> list[str]:
    """Return distinct pronounceable words: `syllables` open syllables, then final consonants."""
    onsets = [
        *("b", "br", "c", "d", "dr", "f", "g", "gr", "h", "j", "k", "l"),
        *("m", "n", "p", "qu", "r", "s", "st", "t", "tr", "v", "w", "z"),
    ]
    vowels = ["a", "e", "i", "o", "u", "ae", "ei", "ou"]
    codas = ["l", "m", "n", "r", "s", "th", "nd", "rk", "lm", "st", "v", "sk"]
    words: set[str] = set()
    while len(words) < count:
        parts = [rng.choice(onsets) + rng.choice(vowels) for _ in range(syllables)]
        words.add(("".join(parts) + rng.choice(codas)).capitalize())
    return sorted(words)
