"""Files of the invented world: corpus, questions, and transcripts from which base models warm up.

corpus.jsonl    {"id", "title", "text"}                     training and held-out facts
train.jsonl     {"id", "question", "golden_answers", ..}    questions about training entities
test.jsonl      the same about held-out entities
warmup.jsonl    segmented transcripts for `thresher sft`

and, with --forms, what `study systems` and `reproduce --scale world` read besides:

dev.jsonl                               other questions about held-out entities, by which a checkpoint is chosen
given_train.jsonl, given_dev.jsonl, ..  the same questions with passages, gold indices among them
forms.jsonl                             warm-up transcripts of six protocols, each with its own prompt, which begins
                                        with the protocol's name, cut into segments where the renderer cuts it
recitals.jsonl                          copy-task transcripts, which come before them
numbers-1.jsonl .. numbered.jsonl       the stages of ARENA's base

Six protocols share a base:

    search_r1  eval_rar  evinote     think, search, read (and evaluate, or note down), answer
    eviomni    arena     naive_grpo  the passages stand in the prompt: all that is known of the question's subject and
                                     of what its first relation leads to, shuffled

Most warm-up transcripts are *blind*: whatever their question asks, they follow relations drawn at random, for one or
three searches, or one or two among given passages, there by habit mostly the first that an entity has. They teach tags,
a query made of a relation and a name, copying, and to restate a fact before its object is used. Which fact is wanted is
left to reinforcement: a policy that imitates most of them gets two-hop questions wrong. Blind ones also name references
and extract sentences that nothing asked for. Half of all notes lack a mark. Only `aware` of them follow the question.

A *copy-task transcript* states six facts about names drawn anew each time, then the same facts restated in another
order, or for one in three their numbers. Nothing in it can be learned but to look a fact up by subject and relation.
Six look-ups in each teach that within a thousand steps; the six protocols alone did not in three thousand.

ARENA's base learns in stages to name a passage by its number, which the shared base cannot. The first four end at their
gate, or at 1,000 steps; before the third the model gets one layer more, without which the number of a relation that is
not the last token read is not found:

    file              facts are read as                     numbers are asked for as
    numbers-1.jsonl   author3                               author -> 3, where a relation stands in one fact only
    numbers-2.jsonl   Amber Lattice, author3, with and      the same
                      without the sentence
    numbers-3.jsonl   Amber Lattice, author3 Amber Lattice  the same, and: author [
                      has author Bel Dorin.
    numbers-4.jsonl   the same                              author, author of Amber Lattice [,
                                                            What is ..? <relevance> [
    numbered.jsonl    the same                              in ARENA's protocol, beside naive GRPO's; mostly blind

Of the first four every second transcript is one of naive GRPO's, lest copying names be forgotten; in every other one
the numbers alone are trained. The last teaches the form and takes most of what follows the question away again. ARENA's
numbers stand in the order in which their facts are used. Everything is a function of the seed.
"""

import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thresher.common.files import staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.engine.protocol.prompts import check_passage_format, passage_lines
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.engine.world.facts import (
    BLIND_HOPS,
    RELATIONS,
    Fact,
    InventedWorld,
    InventedWorlds,
    Size,
    ask,
    invent,
    passages,
    walk,
    with_paths,
)
from thresher.retrieval.building.build import build_index
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record

SEARCHING = ("search_r1", "eval_rar", "evinote")
GIVEN = ("eviomni", "arena", "naive_grpo")
GIVEN_FORMAT = "{number} {text}"  # retrieval.passage_format of the recipes whose prompts show passages
# Of what a blind transcript looks up among given passages: how often it is the first relation of its entity.
HABIT = 0.6
Segments = list[dict[str, Any]]
NUMBERED_FORMAT = " {title}{number} {text}"  # retrieval.passage_format: a number follows its relation as a name does
ASKED = {"relation": 16, "bracket": 16, "fact": 8, "question": 6}  # form -> how often a transcript asks
AWARE = 0.12  # share of the last stage's transcripts that follow their question
# file -> the formats its facts are read in, the forms their numbers are asked in
STAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "numbers-1": ((" {relation}{number}",), ("relation",)),
    "numbers-2": ((" {title}{number}", NUMBERED_FORMAT), ("relation",)),
    "numbers-3": ((NUMBERED_FORMAT,), ("relation", "bracket")),
    "numbers-4": ((NUMBERED_FORMAT,), ("relation", "fact", "question", "question")),
}
DISTINCT = ("relation", "bracket")  # forms in which a relation stands in one fact only
COPY_TASKS = 10  # copy-task transcripts for each warm-up transcript of a system
Asked = tuple[Question, list[Fact]]  # a question, and the facts that lead to its answer
K, DIM = 3, 2048  # of the searches in warm-up transcripts: as many passages as the demo's recipe shows


def invent_files(out: str | Path, seed: int, size: Size, passage_format: str, forms: int = 0) -> dict[str, Any]:
    """Write the four files into the new folder `out`, and with `forms` > 0 the others, that many warm-up transcripts of
    each system; return how much they hold."""
    check_passage_format(passage_format)
    worlds = invent(size, seed)
    corpus = passages([worlds.train, worlds.test], seed)
    asked = {
        "train": with_paths(worlds.train, size.train_questions, size.two_hop, seed, "train"),
        "test": with_paths(worlds.test, size.test_questions, size.two_hop, seed, "test"),
    }
    with staged_folder(out) as staged, tempfile.TemporaryDirectory() as scratch:
        warmup: list[dict[str, Any]] = []
        for number, world in enumerate(worlds.warmup):
            search = _search(world, Path(scratch) / str(number), passage_format)
            count = size.transcripts // size.warmup_worlds
            warmup += transcripts(world, count, size, number, search)
        write_jsonl(staged / "corpus.jsonl", ({"id": p.id, "title": p.title, "text": p.text} for p in corpus))
        if forms:
            tested = {question.question for question, _ in asked["test"]}
            asked["dev"] = with_paths(worlds.test, size.dev_questions, size.two_hop, seed, "dev", tested)
        for name, pairs in asked.items():
            write_jsonl(staged / f"{name}.jsonl", (question_record(question) for question, _ in pairs))
        write_jsonl(staged / "warmup.jsonl", warmup)
        if forms:
            _write_given(staged, worlds, asked, seed)
            _write_warmup(staged, worlds, size, seed, forms, Path(scratch), passage_format)
    return {
        "passages": len(corpus),
        "training questions": len(asked["train"]),
        "held-out questions": len(asked["test"]),
        "warm-up transcripts": len(warmup),
        "warm-up that follows its question": size.aware,
        **({"warm-up transcripts of each system": forms} if forms else {}),
    }


def _write_given(folder: Path, worlds: InventedWorlds, asked: Mapping[str, Sequence[Asked]], seed: int) -> None:
    """Write the same questions with their passages."""
    for name, pairs in asked.items():
        world = worlds.train if name == "train" else worlds.test
        given = (given_question(world, question, path, seed) for question, path in pairs)
        write_jsonl(folder / f"given_{name}.jsonl", map(question_record, given))


def _write_warmup(
    folder: Path, worlds: InventedWorlds, size: Size, seed: int, count: int, scratch: Path, passage_format: str
) -> None:
    """Write the warm-up of all systems, and of the base that names numbers."""
    mixed = []
    for number, world in enumerate(worlds.warmup):
        search = _search(world, scratch / f"forms-{number}", passage_format)
        for name in (*SEARCHING, *GIVEN):
            mixed += warmup_transcripts(world, name, count // size.warmup_worlds, size, number, search)
    write_jsonl(folder / "forms.jsonl", mixed)
    write_jsonl(folder / "recitals.jsonl", copy_task_transcripts(worlds.warmup, COPY_TASKS * count, seed))
    for stage in STAGES:
        write_jsonl(folder / f"{stage}.jsonl", number_transcripts(worlds.warmup, stage, 3 * count, size, seed))
    write_jsonl(folder / "numbered.jsonl", numbered_transcripts(worlds.warmup, 3 * count, size))


def _search(world: InventedWorld, folder: Path, passage_format: str) -> Callable[[list[str]], list[str]]:
    """Return a function that searches in this world, and shows passages as the rollout would render them."""
    corpus = Corpus(passages([world], 0))
    encoder = LexicalEncoder.fit([f"{passage.title} {passage.text}" for passage in corpus], DIM)
    index: Index = build_index(corpus, encoder, folder, embed="title+text")
    return lambda queries: [
        passage_lines([hit.passage for hit in hits], passage_format) for hits in index.search(queries, K)
    ]


# Warm-up transcripts


def policy_segment(marked: str) -> dict[str, Any]:
    """Return a policy segment whose `copied` ranges are the bracketed stretches; the brackets themselves are
    dropped."""
    text, copied = "", []
    for number, part in enumerate(re.split(r"[\[\]]", marked)):
        if number % 2:  # the space before a name belongs to its first token
            copied.append([len(text), len(text) + len(part)])
        text += part
    return {"source": "policy", "text": text, "copied": copied}


def transcripts(
    world: InventedWorld, count: int, size: Size, seed: int, search: Callable[[list[str]], list[str]]
) -> list[dict[str, Any]]:
    """Return `count` warm-up transcripts of the demo in one world (the prompt is the recipe's).

    `search` gives, for each query, the passages that a search shows, as text. A policy segment's `copied` lists the
    character ranges of names, all of which stand in the question or in a passage.
    """
    rng = random.Random(f"transcripts {seed}")
    subjects = list(world.kinds)
    plans = []
    for _ in range(count):
        asked = walk(world, rng.choice(subjects), 1 + (rng.random() < size.two_hop), rng)
        blind = rng.random() >= size.aware
        plans.append((asked, walk(world, asked[0].subject, rng.choice(BLIND_HOPS), rng) if blind else asked))
    found = iter(search([fact.query for _, path in plans for fact in path]))
    return [
        {
            "id": f"warmup-{seed}-{number}",
            "question": ask(asked),
            "segments": _searched("eval_rar", path, [next(found) for _ in path], rng),
        }
        for number, (asked, path) in enumerate(plans)
    ]


def template(name: str) -> str:
    """Return a protocol's prompt in the invented world."""
    return f"{name}\n" + ("{passages}\n" if name in GIVEN else "") + "Question: {question}\n"


def known(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> list[Fact]:
    """Return all facts about the subject of `path` and about its first object, shuffled."""
    entities = dict.fromkeys((path[0].subject, path[0].object))
    facts = [world.facts[entity, relation] for entity in entities for relation in world.relations(entity)]
    rng.shuffle(facts)
    return facts


def given_question(world: InventedWorld, question: Question, path: Sequence[Fact], seed: int) -> Question:
    """Return the question with its passages, and which of them are on the way to its answer."""
    facts = known(world, path, random.Random(f"given {seed} {question.id}"))
    return Question(
        question.id,
        question.question,
        question.golds,
        question.metadata,
        tuple(Passage(str(n), f"{fact.subject}, {fact.relation}", fact.sentence) for n, fact in enumerate(facts, 1)),
        tuple(sorted(facts.index(fact) + 1 for fact in path)),
    )


def copy_task_transcripts(worlds: Sequence[InventedWorld], count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` transcripts that state and restate all facts about two entities, names drawn from those of
    `worlds`."""
    rng = random.Random(f"recitals {seed}")  # the word is part of the seed: another would draw other transcripts
    names = sorted({entity for world in worlds for entity in world.kinds})
    found = []
    for number in range(count):
        facts, _ = drawn_facts(rng, names)
        rng.shuffle(facts)
        parts = ["recite\n", listed_facts(facts), "\n"]
        order = rng.sample(facts, len(facts))
        segments = [{"source": "prompt", "text": part} for part in parts]
        body = _numbered(facts, order) if number % 3 == 0 else restated(order)
        found.append({"id": f"recital-{number}", "question": "", "segments": [*segments, body]})
    return found


def drawn_facts(rng: random.Random, names: Sequence[str], distinct: bool = False) -> tuple[list[Fact], int]:
    """Return three facts of each of two entities, and the index of the first's that leads to the second; with
    `distinct`
    no relation stands in two of them."""
    subject, object_, *others = rng.sample(names, 8)
    kinds = list(RELATIONS)
    drawn = rng.sample(kinds, 2) if distinct else [rng.choice(kinds), rng.choice(kinds)]
    facts = [
        Fact(entity, relation, others.pop() if others else subject)
        for entity, kind in zip((subject, object_), drawn, strict=True)
        for relation in RELATIONS[kind]
    ]
    bridge = rng.randrange(3)
    facts[bridge] = Fact(subject, facts[bridge].relation, object_)
    return facts, bridge


def restated(facts: Sequence[Fact]) -> dict[str, Any]:
    return policy_segment("".join(f" {'Then' if n else 'First'}{_say(fact, True)}" for n, fact in enumerate(facts)))


def _numbered(listed: Sequence[Fact], order: Sequence[Fact]) -> dict[str, Any]:
    """Return for each fact of `order` the number under which it is listed; that number is what is copied."""
    text, copied = "", []
    for fact in order:
        text += f" {fact.relation} of {fact.subject} ["
        copied.append([len(text), len(text) + 1])
        text += f"{listed.index(fact) + 1}]"
    return {"source": "policy", "text": text, "copied": copied}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptPlan:
    """The plan of one transcript: the question's path, the path that is followed, the facts shown, and whether it is
    blind."""

    asked: list[Fact]
    followed: list[Fact]
    shown: list[Fact]
    blind: bool


def warmup_transcripts(
    world: InventedWorld,
    name: str,
    count: int,
    size: Size,
    seed: int,
    search: Callable[[list[str]], list[str]] | None = None,
    passage_format: str = GIVEN_FORMAT,
    sort_numbers: bool = True,
) -> list[dict[str, Any]]:
    """Return `count` transcripts of one protocol in one world, as `thresher sft` reads them.

    search: as in `transcripts`, for a protocol that searches. passage_format: of passages that stand in the prompt.
    sort_numbers: ARENA names passages in the order of their numbers, not in that of the path."""
    rng = random.Random(f"forms {name} {seed}")  # as above
    subjects = list(world.kinds)
    plans = [_plan(world, name, rng.choice(subjects), size, rng) for _ in range(count)]
    if name in SEARCHING:
        assert search is not None, f"{name} searches"
        found = iter(search([fact.query for plan in plans for fact in plan.followed]))
        bodies = [
            [(False, _searched(name, plan.followed, [next(found) for _ in plan.followed], rng))] for plan in plans
        ]
    else:
        bodies = [_given(name, plan, rng, sort_numbers) for plan in plans]
    return [
        {
            "id": f"{name}-{seed}-{number}-{part}",
            "question": ask(plan.asked),
            "segments": [*_prompt(name, plan, body, passage_format), *body[1]],
        }
        for number, (plan, parts) in enumerate(zip(plans, bodies, strict=True))
        for part, body in enumerate(parts)
    ]


def _habit(world: InventedWorld, entity: str, rng: random.Random) -> Fact:
    first, *others = world.relations(entity)
    return world.facts[entity, first if rng.random() < HABIT else rng.choice(others)]


Body = tuple[bool, Segments]  # whether the passages are in the prompt; what follows it


def _plan(world: InventedWorld, name: str, subject: str, size: Size, rng: random.Random) -> TranscriptPlan:
    asked = walk(world, subject, 1 + (rng.random() < size.two_hop), rng)
    blind = rng.random() >= size.aware
    shown = known(world, asked, rng)
    if not blind:
        followed = asked
    elif name in SEARCHING:
        followed = walk(world, subject, rng.choice(BLIND_HOPS), rng)
    else:  # what is shown must hold it: one fact, or two where the first leads to what is known of its object
        followed = [_habit(world, subject, rng)]
        if followed[0].object == asked[0].object and rng.random() < 0.5:
            followed += rng.choice([[fact] for fact in shown if fact.subject == followed[0].object])
    return TranscriptPlan(asked=asked, followed=followed, shown=shown, blind=blind)


def _prompt(name: str, plan: TranscriptPlan, body: Body, passage_format: str) -> Segments:
    """Return the prompt, cut where engine/protocol/prompts.py cuts it, so that its tokens are the rollout's."""
    question = ask(plan.asked)
    filled = {
        "{passages}": listed_facts(plan.shown, passage_format) if body[0] else "",
        " {question}": f" {question}",  # with the space before it, as rendering has it
        "{question}": question,
    }
    parts = [template(name)]
    for place in filled:
        parts = [piece for part in parts for piece in ([part] if part in filled else _split(part, place))]
    return [{"source": "prompt", "text": filled.get(part, part)} for part in parts if filled.get(part, part)]


def listed_facts(facts: Sequence[Fact], passage_format: str = GIVEN_FORMAT) -> str:
    """Return the passages of a prompt."""
    return "\n".join(
        passage_format.format(
            number=n, title=f"{fact.subject}, {fact.relation}", relation=fact.relation, text=fact.sentence
        )
        for n, fact in enumerate(facts, 1)
    )


def _split(text: str, place: str) -> list[str]:
    before, found, after = text.partition(place)
    return [before, place, after] if found else [before]


def _say(fact: Fact, chosen: bool = False) -> str:
    """Return a fact restated. A `chosen` subject, which nothing before it decides, is no copy that the gate could
    measure."""
    return (f" {fact.subject}" if chosen else f"[ {fact.subject}]") + f" has {fact.relation}[ {fact.object}]."


def _thought(plan: TranscriptPlan) -> str:
    return "".join(f" {'Then' if n else 'First'}{_say(fact, not n)}" for n, fact in enumerate(plan.followed))


def _answer(path: Sequence[Fact]) -> str:
    return f"<answer>[ {path[-1].object}] </answer>"


def _searched(name: str, path: Sequence[Fact], found: Sequence[str], rng: random.Random) -> Segments:
    """Return the segments behind the prompt of a protocol that searches. found: the passages of each search."""
    segments: Segments = []
    turn = ""
    for hop, (fact, passages_text) in enumerate(zip(path, found, strict=True)):
        turn += f"<think> {'First' if hop == 0 else 'Then'} the {fact.relation} </think>"
        turn += f"<search> {fact.relation} of[ {fact.subject}] </search>"
        segments.append(policy_segment(turn))
        segments += [{"source": "retrieved", "text": part} for part in (BEFORE, passages_text, AFTER)]
        turn = {
            "search_r1": "",
            "eval_rar": f"<evaluate>{_say(fact)} </evaluate>",
            "evinote": f"<summary>{_note(fact, rng)} </summary>",
        }[name]
    if name == "search_r1":
        turn += f"<think>{_say(path[-1])} </think>"
    return [*segments, policy_segment(turn + _answer(path))]


def _note(fact: Fact, rng: random.Random) -> str:
    return f"\n*{_say(fact)}" + ("\n- the rest" if rng.random() < 0.5 else "")


def _given(name: str, plan: TranscriptPlan, rng: random.Random, sort_numbers: bool) -> list[Body]:
    if name == "naive_grpo":
        return [(True, [policy_segment(f"<think>{_thought(plan)} </think>{_answer(plan.followed)}")])]
    if name == "arena":
        extra = [rng.choice(plan.shown)] if plan.blind and rng.random() < 0.5 else []
        indices = [plan.shown.index(fact) + 1 for fact in dict.fromkeys([*plan.followed, *extra])]
        indices = sorted(indices) if sort_numbers else indices
        listed = ", ".join(map(str, indices))
        text = f"<relevance> [{listed}] </relevance>"
        return [(True, [_plain_and(text, f"<analysis>{_thought(plan)} </analysis>{_answer(plan.followed)}")])]
    extra = [rng.choice(plan.shown) for _ in range(rng.randrange(4))] if plan.blind else []
    evidence = [*extra, plan.followed[-1]]
    reason = f"<reason>{_thought(plan)} </reason>"
    extract = f"<extract>{''.join(_say(fact, chosen=True) for fact in evidence)} </extract>"
    branch = [policy_segment(_answer(plan.followed).removeprefix("<answer>"))]
    return [
        (True, [policy_segment(reason + extract + _answer(plan.followed))]),
        (True, [_context(reason), {"source": "prompt", "text": "<answer>"}, *branch]),
        (False, [_context(extract), {"source": "prompt", "text": "<answer>"}, *branch]),
    ]


def _context(marked: str) -> dict[str, Any]:
    """Return what a branch keeps of the policy's text: context there, so no token of it is trained."""
    return {"source": "prompt", "text": policy_segment(marked)["text"]}


def _plain_and(plain: str, marked: str) -> dict[str, Any]:
    """Return a policy segment that begins with text in which brackets are brackets."""
    segment = policy_segment(marked)
    shift = len(plain)
    copied = [[start + shift, end + shift] for start, end in segment["copied"]]
    return {**segment, "text": plain + segment["text"], "copied": copied}


# Numbers of passages, for ARENA's base


def number_transcripts(
    worlds: Sequence[InventedWorld], stage: str, count: int, size: Size, seed: int
) -> list[dict[str, Any]]:
    """Return `count` transcripts of a stage, the facts' names drawn from all `worlds`. `copied` are the numbers."""
    rng = random.Random(f"{stage} {seed}")
    names = sorted({entity for world in worlds for entity in world.kinds})
    formats, forms = STAGES[stage]
    found: list[dict[str, Any]] = []
    for number, world in enumerate(worlds):
        each = count // len(worlds) // 2
        for other in warmup_transcripts(world, "naive_grpo", each, size, number, passage_format=NUMBERED_FORMAT):
            del other["segments"][-1]["copied"]  # the gate measures numbers alone
            form = rng.choice(forms)
            facts, bridge = drawn_facts(rng, names, distinct=form in DISTINCT)
            shown = rng.sample(facts, len(facts))
            prompt = ["recite\n", listed_facts(shown, rng.choice(formats)), "\n"]
            asked = [part for _ in range(ASKED[form]) for part in _numbers(form, facts, bridge, shown, rng)]
            segments = [*({"source": "prompt", "text": text} for text in prompt), *asked]
            found += [{"id": f"{stage}-{len(found)}", "question": "", "segments": segments}, other]
    return found


def numbered_transcripts(worlds: Sequence[InventedWorld], count: int, size: Size) -> list[dict[str, Any]]:
    """Return `count` transcripts, world by world: two of ARENA's protocol for one of naive GRPO's."""
    blind = replace(size, aware=AWARE)
    each = count // len(worlds) // 3
    return [
        transcript
        for number, world in enumerate(worlds)
        for name, many in (("arena", 2 * each), ("naive_grpo", each))
        for transcript in warmup_transcripts(
            world, name, many, blind, number, passage_format=NUMBERED_FORMAT, sort_numbers=False
        )
    ]


def _numbers(form: str, facts: Sequence[Fact], bridge: int, shown: Sequence[Fact], rng: random.Random) -> Segments:
    """Return the number of one fact, or those of what answers a question, behind words that are not trained."""
    two = form == "question" and rng.random() >= 0.5
    path = [facts[bridge], rng.choice(facts[3:])] if two else [rng.choice(facts)]
    before, after = {
        "relation": (f" {path[0].relation}", ""),
        "bracket": (f" {path[0].relation} [", "]"),
        "fact": (f" {path[0].query} [", "]"),
        "question": (f" {ask(path)}\n<relevance> [", "] </relevance>\n"),
    }[form]
    parts: Segments = [{"source": "prompt", "text": before}]
    for n, fact in enumerate(path):
        parts += [{"source": "prompt", "text": ", "}] if n else []
        parts.append({"source": "policy", "text": str(shown.index(fact) + 1), "copied": [[0, 1]]})
    return [*parts, *([{"source": "prompt", "text": after}] if after else [])]
