"""An invented world for search agents: documents of several sentences, contradictions, facts that no document states.

corpus.jsonl        {"id", "title", "text"}                     documents about training and held-out entities
train.jsonl         {"id", "question", "golden_answers", ..}    questions about training entities
test.jsonl          questions about held-out entities that the corpus answers at every coverage
unanswerable.jsonl  questions about held-out entities that it answers at no coverage; the gold is "unknown"
recitals.jsonl      transcripts that teach copying, used first
warmup.jsonl        segmented transcripts for `thresher sft`, in the format of search_r1
prompt.txt          the prompt of both, and of training

A question follows two to four relations, all different. A document is a few sentences in any order:

    Amber Lattice               Its facts, and one fact that has it as object.
    Amber Lattice, elsewhere    Facts that have it as object, and facts about entities that share one word of its name.
    Amber Lattice, hearsay      "Amber Lattice may have author Bel Dorin.", which is false, whether or not an
                                article states the true fact; and one fact that has it as object.

*Coverage* is the share of the facts that the corpus states, among those that are not *missing*; missing facts are never
stated. Each fact has one fixed rank, so the corpus of a lower coverage is that of a higher coverage without some
sentences, and without the documents that have no sentence left. Nothing else depends on the coverage: questions,
warm-up and hearsay are the same. Held-out questions with an answer need only facts that are stated at the lowest
coverage. Those without one need exactly one missing fact; their other facts are stated at the lowest coverage.

Training questions are independent of the coverage, and their gold is the true answer, as in published data. If the
corpus does not state a fact that a question needs, samples are right only by guessing, and by exact match the group
teaches nothing: coverage is the share of training questions with a signal. Training never rewards "unknown": with
"unknown" as the gold of one training question in ten, a policy answered it to all questions within eight steps. The
warm-up teaches the model to write it; `thresher eval` with unanswerable.jsonl measures whether training keeps it.

Warm-up uses further worlds, as in `facts`. Its transcripts read the search results: they restate the fact that was
searched for, from an article or, with probability `trusting`, from hearsay if both state it, or end with "unknown" if
neither does. A share `aware` of them follows the question. The others are blind: one to four times they search for the
first relation of the current entity. What to search for, when to stop and what to trust is left to reinforcement
learning. Everything is a function of the seed.
"""

import itertools
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.engine.protocol.prompts import check_passage_format, passage_lines
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.engine.world.facts import RELATIONS, Fact, InventedWorld, Size, invent
from thresher.engine.world.files import Segments, policy_segment, searching
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record

UNKNOWN = "unknown"
NEVER = 1.0  # rank of a missing fact
ABSENT = 1  # relations in a recital about which the documents say nothing
PROMPT = "Question: {question}\n"
SearchDocuments = Callable[[list[str]], list[list["Document"]]]  # queries -> the documents found for each
Ranks = dict[tuple[str, str], float]  # (subject, relation) -> coverage above which the fact is stated


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorld:
    """Settings of the documents and the questions; each share and probability is from 0 to 1."""

    size: Size = field(default_factory=lambda: Size(pieces=60, test_questions=200, aware=0.35))
    hops: tuple[tuple[int, float], ...] = ((2, 0.4), (3, 0.4), (4, 0.2))  # (relations of a question, share)
    least: float = 0.5  # the lowest coverage
    missing: float = 0.1  # share of the facts that are stated at no coverage
    unanswerable: int = 200  # held-out questions that need a missing fact
    hearsay: float = 0.3  # probability that a fact has a false hearsay version
    elsewhere: float = 0.5  # probability that an entity has an "elsewhere" document
    trusting: float = 0.35  # probability that a transcript follows hearsay if an article contradicts it
    recitals: int = 6400
    shown: tuple[float, ...] = (0.5, 0.3, 0.2)  # shares of the recitals that show one document, two, ..
    blind_hops: tuple[int, ...] = (1, 2, 3, 4)  # searches of a blind transcript, each for an entity's first relation


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence of a document. said: it is hearsay, and false."""

    fact: Fact
    said: bool = False

    @property
    def text(self) -> str:
        fact = self.fact
        return f"{fact.subject} may have {fact.relation} {fact.object}." if self.said else fact.sentence


@dataclass(frozen=True, slots=True)
class Document:
    """A titled list of statements."""

    title: str
    statements: tuple[Statement, ...]

    def passage(self, number: int) -> Passage:
        return Passage(str(number), self.title, " ".join(statement.text for statement in self.statements))


def invent_agents(
    out: str | Path, seed: int, coverage: float, passage_format: str, settings: AgentWorld | None = None
) -> dict[str, Any]:
    """Write the files into the new folder `out`; return their counts. UserError for a coverage below `least` or above
    1."""
    settings = settings or AgentWorld()
    check_passage_format(passage_format)
    if not settings.least <= coverage <= 1:
        raise UserError(f"--coverage {coverage}: expected a number from {settings.least} to 1")
    worlds = invent(settings.size, seed)
    corpus = []
    ranks = {}
    for name, world in (("train", worlds.train), ("test", worlds.test)):
        ranks[name] = ranked(world, settings, f"{name} {seed}")
        corpus += documents(world, settings, f"{name} {seed}")
    random.Random(f"order {seed}").shuffle(corpus)
    passages = [
        shown.passage(number)
        for number, document in enumerate(corpus)
        if (shown := covered(document, ranks["train"] | ranks["test"], coverage)).statements
    ]
    asked = ask_all(worlds.train, worlds.test, ranks, settings, seed)
    with staged_folder(out) as staged, tempfile.TemporaryDirectory() as scratch:

        def write(name: str, records: Iterable[dict[str, Any]]) -> None:
            write_jsonl(staged / f"{name}.jsonl", records)

        write("corpus", ({"id": p.id, "title": p.title, "text": p.text} for p in passages))
        for name, questions in asked.items():
            write(name, map(question_record, questions))
        warmup, recited = [], []
        each, recitals_each = (n // settings.size.warmup_worlds for n in (settings.size.transcripts, settings.recitals))
        for number, world in enumerate(worlds.warmup):
            of = f"warm-up {number} {seed}"
            search = _search(world, settings, of, Path(scratch) / str(number))
            warmup += transcripts(world, each, settings, of, search, passage_format)
            recited += recitals(world, recitals_each, settings, of, search, passage_format)
        write("warmup", warmup)
        write("recitals", recited)
        atomic_write_text(staged / "prompt.txt", PROMPT)
    return {
        "documents": len(passages),
        "coverage": coverage,
        "training questions": len(asked["train"]),
        "held-out questions": len(asked["test"]),
        "held-out questions without an answer": len(asked["unanswerable"]),
        "warm-up transcripts": len(warmup),
        "recitals": len(recited),
    }


# Documents


def ranked(world: InventedWorld, settings: AgentWorld, seed: str) -> Ranks:
    """Return each fact's rank: a corpus states the facts whose rank is below its coverage."""
    rng = random.Random(f"coverage {seed}")
    found = {}
    for key in world.facts:
        rank = rng.random()
        found[key] = NEVER if rng.random() < settings.missing else rank
    return found


def covered(document: Document, ranks: Ranks, coverage: float) -> Document:
    """Return a document with the statements that are present at a coverage. Hearsay is present at every coverage."""
    kept = (one for one in document.statements if one.said or ranks[one.fact.subject, one.fact.relation] < coverage)
    return Document(document.title, tuple(kept))


def documents(world: InventedWorld, settings: AgentWorld, seed: str) -> list[Document]:
    """Return all documents of a world as if every fact were covered."""
    rng = random.Random(f"documents {seed}")
    told_of: dict[str, list[Fact]] = {}  # object -> facts
    told_by: dict[tuple[int, str], list[Fact]] = {}  # (position, word) of a subject's name -> facts
    for fact in world.facts.values():
        told_of.setdefault(fact.object, []).append(fact)
        for word in enumerate(fact.subject.split()):
            told_by.setdefault(word, []).append(fact)
    by_kind = {kind: [name for name, its in world.kinds.items() if its == kind] for kind in RELATIONS}
    found = []

    def add(title: str, statements: list[Statement]) -> None:
        rng.shuffle(statements)
        if statements:
            found.append(Document(title, tuple(statements)))

    for entity in world.kinds:
        facts = [world.facts[entity, relation] for relation in world.relations(entity)]
        mentions = told_of.get(entity, [])
        add(entity, [Statement(fact) for fact in (*facts, *_some(rng, mentions, 1))])
        if rng.random() < settings.elsewhere:
            namesakes = [one for word in enumerate(entity.split()) for one in told_by[word] if one.subject != entity]
            both = dict.fromkeys((*_some(rng, mentions, 2), *_some(rng, namesakes, 2)))
            add(f"{entity}, elsewhere", [Statement(fact) for fact in both])
        wrong = []
        for fact in facts:
            if rng.random() < settings.hearsay:
                others = [one for one in by_kind[world.kinds[fact.object]] if one not in (entity, fact.object)]
                wrong.append(Statement(Fact(entity, fact.relation, rng.choice(others)), said=True))
        if wrong:
            add(f"{entity}, hearsay", [*wrong, *map(Statement, _some(rng, mentions, 1))])
    return found


def _some(rng: random.Random, facts: Sequence[Fact], count: int) -> list[Fact]:
    return rng.sample(facts, min(count, len(facts)))


# Questions


def ask(path: Sequence[Fact]) -> str:
    """Return the question that a path answers, with its relations in the order in which they are followed."""
    return "What is " + "'s ".join((path[0].subject, *(fact.relation for fact in path))) + "?"


def following(world: InventedWorld, path: Sequence[Fact]) -> list[Fact]:
    """Return the facts that can continue a path, with a relation and an object that are not yet on it."""
    passed = {path[0].subject, *(fact.object for fact in path)}
    used = {fact.relation for fact in path}
    entity = path[-1].object
    facts = [world.facts[entity, relation] for relation in world.relations(entity) if relation not in used]
    return [fact for fact in facts if fact.object not in passed]


def paths(world: InventedWorld, hops: int) -> list[list[Fact]]:
    """Return all paths of `hops` facts."""
    found = [[fact] for fact in world.facts.values()]
    for _ in range(hops - 1):
        found = [[*path, fact] for path in found for fact in following(world, path)]
    return found


def ask_all(
    train: InventedWorld, test: InventedWorld, ranks: dict[str, Ranks], settings: AgentWorld, seed: int
) -> dict[str, list[Question]]:
    """Return file name -> questions."""

    def always(path: list[Fact]) -> bool:
        return max(_ranks(path, ranks["test"])) < settings.least

    def one_missing(path: list[Fact]) -> bool:
        *others, most = sorted(_ranks(path, ranks["test"]))
        return most == NEVER and max(others) < settings.least

    return {
        "train": _questions(train, settings.size.train_questions, settings, seed, "train", lambda path: True),
        "test": _questions(test, settings.size.test_questions, settings, seed, "test", always),
        "unanswerable": _questions(test, settings.unanswerable, settings, seed, "unanswerable", one_missing, UNKNOWN),
    }


def _ranks(path: Sequence[Fact], ranks: Ranks) -> list[float]:
    return [ranks[fact.subject, fact.relation] for fact in path]


def _questions(
    world: InventedWorld,
    count: int,
    settings: AgentWorld,
    seed: int,
    prefix: str,
    fits: Callable[[list[Fact]], bool],
    gold: str | None = None,
) -> list[Question]:
    """Return up to `count` distinct questions whose paths fit, divided over the numbers of hops by their shares."""
    rng = random.Random(f"questions {prefix} {seed}")
    chosen = []
    for hops, share in settings.hops:
        fitting = [path for path in paths(world, hops) if fits(path)]
        chosen += rng.sample(fitting, min(round(count * share), len(fitting)))
    rng.shuffle(chosen)
    return [
        Question(f"{prefix}-{number}", ask(path), (path[-1].object if gold is None else gold,), {"hops": len(path)})
        for number, path in enumerate(chosen)
    ]


# Warm-up transcripts


@dataclass(slots=True)
class _Plan:
    """A transcript in progress. relations: those of the question, if it follows them. turn: text since the last search.
    ended: it has answered."""

    question: str
    entity: str
    hops: int
    relations: list[str] | None
    segments: Segments = field(default_factory=list)
    turn: str = ""
    ended: bool = False


def transcripts(
    world: InventedWorld, count: int, settings: AgentWorld, seed: str, search: SearchDocuments, passage_format: str
) -> list[dict[str, Any]]:
    """Return `count` warm-up transcripts of one world, without the prompt, which is in the recipe."""
    rng = random.Random(f"transcripts {seed}")
    plans = [_plan(world, settings, rng) for _ in range(count)]
    for hop in range(max(plan.hops for plan in plans)):
        going = [plan for plan in plans if not plan.ended]
        facts = []
        for plan in going:
            relation = world.relations(plan.entity)[0] if plan.relations is None else plan.relations[hop]
            facts.append(world.facts[plan.entity, relation])
            plan.turn += f"{f'<think>[ {plan.entity}]' if hop == 0 else ''}'s {relation} </think>"
            plan.turn += f"<search> {relation} of[ {plan.entity}] </search>"
        for plan, fact, found in zip(going, facts, search([fact.query for fact in facts]), strict=True):
            plan.segments += [policy_segment(plan.turn), *_shown(found, passage_format)]
            _read(plan, fact, found, hop + 1 == plan.hops, settings, rng)
    return [
        {"id": f"{seed} {number}", "question": plan.question, "segments": plan.segments}
        for number, plan in enumerate(plans)
    ]


def recitals(
    world: InventedWorld, count: int, settings: AgentWorld, seed: str, search: SearchDocuments, passage_format: str
) -> list[dict[str, Any]]:
    """Return `count` transcripts that show search results, restate them, and answer with the last restated object.

    Half of them restate the documents sentence by sentence, the other half fact by fact in random order.
    """
    rng = random.Random(f"recitals {seed}")
    facts = rng.choices(list(world.facts.values()), k=count)
    result = []
    for number, hits in enumerate(search([fact.query for fact in facts])):
        found = rng.sample(hits, *rng.choices(range(1, len(settings.shown) + 1), settings.shown))
        statements = [one for document in found for one in document.statements]
        asked = _path(world, settings, rng)
        traced = _traced(asked)
        if number % 2:
            stated = list(dict.fromkeys((one.fact.subject, one.fact.relation) for one in statements))
            subject = rng.choice(stated)[0]
            absent = [(subject, one) for one in world.relations(subject) if (subject, one) not in stated]
            keys = [*stated, *absent[:ABSENT]]
            rng.shuffle(keys)
            # The order of the subjects is arbitrary, so they are not marked as copies to be measured.
            parts = [_restate(*key, found, settings, rng) for key in keys]
            told = "".join(text.replace("]", "", 1).replace("[", "", 1) for text, _ in parts)
            relation, object_ = keys[-1][1], parts[-1][1]
        else:
            told = f" {' '.join(one.text for one in statements)}"
            relation, object_ = statements[-1].fact.relation, statements[-1].fact.object
        segment = policy_segment(f"<think>{traced}{told}{_answer(relation, object_)}")
        segments = [*_shown(found, passage_format), segment]
        result.append({"id": f"recital {seed} {number}", "question": ask(asked), "segments": segments})
    return result


def _traced(path: Sequence[Fact]) -> str:
    """Return a question's relations in the form in which a transcript states them."""
    steps = [f" {path[0].subject}'s {path[0].relation}."]
    steps += [f" The {before.relation}'s {fact.relation}." for before, fact in itertools.pairwise(path)]
    return f"{''.join(steps)} The {path[-1].relation}?"


def _shown(found: Sequence[Document], passage_format: str) -> Segments:
    lines = passage_lines([document.passage(0) for document in found], passage_format)
    return [{"source": "retrieved", "text": part} for part in (BEFORE, lines, AFTER)]


def _path(world: InventedWorld, settings: AgentWorld, rng: random.Random) -> list[Fact]:
    """Return the path of a random question."""
    [hops] = rng.choices(*zip(*settings.hops, strict=True))
    path: list[Fact] = []
    while len(path) < hops:
        entity = rng.choice(list(world.kinds))
        path = [world.facts[entity, rng.choice(world.relations(entity))]]
        while len(path) < hops and (further := following(world, path)):
            path.append(rng.choice(further))
    return path


def _plan(world: InventedWorld, settings: AgentWorld, rng: random.Random) -> _Plan:
    path = _path(world, settings, rng)
    if rng.random() < settings.size.aware:
        return _Plan(ask(path), path[0].subject, len(path), [fact.relation for fact in path])
    return _Plan(ask(path), path[0].subject, rng.choice(settings.blind_hops), None)


def _read(
    plan: _Plan, fact: Fact, found: Sequence[Document], last: bool, settings: AgentWorld, rng: random.Random
) -> None:
    """Continue after a search for a fact: restate it, and answer if this was the last search or found nothing."""
    text, object_ = _restate(fact.subject, fact.relation, found, settings, rng)
    if last or object_ is None:
        plan.segments.append(policy_segment(f"<think>{text}{_answer(fact.relation, object_)}"))
        plan.ended = True
    else:
        plan.turn = f"<think>{text} The {fact.relation}"
        plan.entity = object_


def _answer(relation: str, object_: str | None) -> str:
    """Return the end of a transcript: an answer with an object, or with "unknown" if it is None."""
    if object_ is None:
        return f" </think><answer> {UNKNOWN} </answer>"
    return f" The {relation}? </think><answer>[ {object_}] </answer>"


def _restate(
    subject: str, relation: str, found: Sequence[Document], settings: AgentWorld, rng: random.Random
) -> tuple[str, str | None]:
    """Return the documents' statement of a subject's relation, as marked text, and its object, None if there is none. A
    choice between hearsay and an article is not marked as a copy, because nothing determines it."""
    stated = [
        one
        for document in found
        for one in document.statements
        if (one.fact.subject, one.fact.relation) == (subject, relation)
    ]
    true, said = ([one.fact.object for one in stated if one.said is is_said] for is_said in (False, True))
    read = said if said and (not true or rng.random() < settings.trusting) else true
    if not read:
        return f"[ {subject}] has no {relation}.", None
    return f"[ {subject}] has {relation}" + (f" {read[0]}." if true and said else f"[ {read[0]}]."), read[0]


def _search(world: InventedWorld, settings: AgentWorld, seed: str, folder: Path) -> SearchDocuments:
    """Return a search over a world's documents that works like a rollout's; its index is in the new folder."""
    ranks = ranked(world, settings, seed)
    told = [shown for one in documents(world, settings, seed) if (shown := covered(one, ranks, 1.0)).statements]
    find = searching([document.passage(number) for number, document in enumerate(told)], folder)
    return lambda queries: [[told[int(passage.id)] for passage in found] for found in find(queries)]
