"""Files of the invented world: corpus, questions, and warm-up transcripts of base models.

corpus.jsonl    {"id", "title", "text"}                     training and held-out facts
train.jsonl     {"id", "question", "golden_answers", ..}    questions about training entities
test.jsonl      the same about held-out entities
warmup.jsonl    segmented transcripts for `thresher sft`
search.py       a search of the corpus, useful or noisy, as a tool (simulated_search.py)

and, with --forms, for `study systems` and `reproduce --scale world`:

dev.jsonl                               other questions about held-out entities, by which a checkpoint is chosen
given_train.jsonl, given_dev.jsonl, ..  the same questions with passages, gold indices among them
given_warmup.jsonl                      questions with passages about entities of all warm-up worlds, for a generator
forms.jsonl                             warm-up transcripts of six protocols, each with its own prompt, which begins
                                        with the protocol's name, cut into segments where the renderer cuts it
recitals.jsonl                          copy-task transcripts, which come before them
numbers-1.jsonl .. numbered.jsonl       the stages of ARENA's base

Three protocols search. The other three have the passages in the prompt: all facts about the question's subject and the
object of its first relation, shuffled. Most transcripts are *blind*: they do not follow their question but random
relations, for one or three searches, or one or two among given passages, there mostly the first relation of an entity.
They teach tags, queries, copying, and restating a fact before its object is used. Which fact is needed is left to
reinforcement learning: a policy that imitates most of them gets two-hop questions wrong. Blind transcripts also name
references and extract sentences that the question does not need. Half of all notes lack a mark. A share `aware` follows
its question.

A *copy-task transcript* states six facts about new names, then the same facts in another order (in one transcript of
three, their numbers), so the only thing to learn is looking up a fact by subject and relation. This takes a thousand
steps; the six protocols alone did not teach it in three thousand.

ARENA's base learns in stages to name a passage by its number, which the shared base cannot. The first four stages end
at their gate, or at 1,000 steps. Before the third, the model gets one more layer: without it the model does not find
the number of a relation that is not the last token read:

    file              facts are read as                     numbers are asked for as
    numbers-1.jsonl   author3                               author -> 3, where a relation stands in one fact only
    numbers-2.jsonl   Amber Lattice, author3, with and      the same
                      without the sentence
    numbers-3.jsonl   Amber Lattice, author3 Amber Lattice  the same, and: author [
                      has author Bel Dorin.
    numbers-4.jsonl   the same                              author, author of Amber Lattice [,
                                                            What is ..? <relevance> [
    numbered.jsonl    the same                              in the protocols of ARENA and naive GRPO; mostly blind

In the first four, every second transcript is one of naive GRPO, so that copying names is not forgotten; in the others
only numbers are trained. The last stage teaches the protocol, with numbers in the order in which their facts are used,
and mostly unlearns following the question. Everything is a function of the seed.
"""

import random
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from thresher.common.files import atomic_write_text, staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.engine.protocol.prompts import check_passage_format, passage_lines
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.engine.world.facts import (
    BLIND_HOPS,
    RELATIONS,
    Fact,
    InventedWorld,
    Size,
    ask,
    invent,
    passages,
    walk,
    with_paths,
)
from thresher.engine.world.simulated_search import DIM, TOOL_FILE, K
from thresher.retrieval.building.build import build_index
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record

SEARCHING = ("search_r1", "eval_rar", "evinote")
GIVEN = ("eviomni", "arena", "naive_grpo")
# Systems whose turns have the format of another system: they share its prompt and its warm-up.
SAME_FORM = dict.fromkeys(
    ("search_r1_reinforce", "llds", "gigpo", "igpo", "tree_grpo", "mem1", "zero_search"), "search_r1"
)
GIVEN_FORMAT = "{number} {text}"  # retrieval.passage_format of the recipes whose prompts show passages
# Probability that a blind transcript over given passages looks up the first relation of its entity.
HABIT = 0.6
Segments = list[dict[str, Any]]
Body = tuple[bool, Segments]  # whether the passages are in the prompt; the segments after the prompt
NUMBERED_FORMAT = " {title}{number} {text}"  # retrieval.passage_format: the number directly after the relation
ASKED = {"relation": 16, "bracket": 16, "fact": 8, "question": 6}  # form -> questions per transcript
AWARE = 0.12  # share of the last stage's transcripts that follow their question
# file -> formats of its facts, forms of the questions for their numbers
STAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "numbers-1": ((" {relation}{number}",), ("relation",)),
    "numbers-2": ((" {title}{number}", NUMBERED_FORMAT), ("relation",)),
    "numbers-3": ((NUMBERED_FORMAT,), ("relation", "bracket")),
    "numbers-4": ((NUMBERED_FORMAT,), ("relation", "fact", "question", "question")),
}
DISTINCT = ("relation", "bracket")  # forms that need each relation to occur in one fact only
COPY_TASKS = 10  # copy-task transcripts for each warm-up transcript of a system


def invent_files(out: str | Path, seed: int, size: Size, passage_format: str, forms: int = 0) -> dict[str, Any]:
    """Write the five files into the new folder `out`, and with `forms` > 0 also the others; return their counts.

    forms: number of warm-up transcripts of each system.
    """
    check_passage_format(passage_format)
    worlds = invent(size, seed)
    corpus = passages([worlds.train, worlds.test], seed)
    asked = {
        "train": with_paths(worlds.train, size.train_questions, size.two_hop, seed, "train"),
        "test": with_paths(worlds.test, size.test_questions, size.two_hop, seed, "test"),
    }
    with staged_folder(out) as staged, tempfile.TemporaryDirectory() as scratch:

        def write(name: str, records: Iterable[dict[str, Any]]) -> None:
            write_jsonl(staged / f"{name}.jsonl", records)

        warmup: list[dict[str, Any]] = []
        mixed: list[dict[str, Any]] = []
        for number, world in enumerate(worlds.warmup):
            search = _search(world, Path(scratch) / str(number), passage_format)
            warmup += transcripts(world, size.transcripts // size.warmup_worlds, size, number, search)
            for name in (*SEARCHING, *GIVEN) if forms else ():
                mixed += warmup_transcripts(world, name, forms // size.warmup_worlds, size, number, search)
        atomic_write_text(staged / "search.py", TOOL_FILE.format(passage_format=passage_format))
        write("corpus", ({"id": p.id, "title": p.title, "text": p.text} for p in corpus))
        write("warmup", warmup)
        if forms:
            tested = {question.question for question, _ in asked["test"]}
            asked["dev"] = with_paths(worlds.test, size.dev_questions, size.two_hop, seed, "dev", tested)
            given = {name: [(worlds.train if name == "train" else worlds.test, pairs)] for name, pairs in asked.items()}
            given["warmup"] = [
                (world, with_paths(world, 3 * forms // size.warmup_worlds, size.two_hop, seed, f"warmup{number}"))
                for number, world in enumerate(worlds.warmup)
            ]
            for name, sources in given.items():
                questions = (given_question(world, *pair, seed) for world, pairs in sources for pair in pairs)
                write(f"given_{name}", map(question_record, questions))
            write("forms", mixed)
            write("recitals", copy_task_transcripts(worlds.warmup, COPY_TASKS * forms, seed))
            for stage in STAGES:
                write(stage, number_transcripts(worlds.warmup, stage, 3 * forms, size, seed))
            write("numbered", numbered_transcripts(worlds.warmup, 3 * forms, size))
        for name, pairs in asked.items():
            write(name, (question_record(question) for question, _ in pairs))
    return {
        "passages": len(corpus),
        "training questions": len(asked["train"]),
        "held-out questions": len(asked["test"]),
        "warm-up transcripts": len(warmup),
        "warm-up that follows its question": size.aware,
        **({"warm-up transcripts of each system": forms} if forms else {}),
    }


def _search(world: InventedWorld, folder: Path, passage_format: str) -> Callable[[list[str]], list[str]]:
    """Return a search over this world's facts, with results as text in the format of a rollout."""
    find = searching(passages([world], 0), folder)
    return lambda queries: [passage_lines(found, passage_format) for found in find(queries)]


def searching(those: Sequence[Passage], folder: Path) -> Callable[[list[str]], list[list[Passage]]]:
    """Return a search over these passages that works like a rollout's; its index is in the new folder."""
    corpus = Corpus(those)
    encoder = LexicalEncoder.fit([f"{passage.title} {passage.text}" for passage in corpus], DIM)
    index: Index = build_index(corpus, encoder, folder, embed="title+text")
    return lambda queries: [[hit.passage for hit in hits] for hits in index.search(queries, K)]


# Warm-up transcripts


def policy_segment(marked: str, plain: str = "") -> dict[str, Any]:
    """Return a policy segment whose `copied` ranges are the bracketed parts of `marked`, without the brackets. plain:
    text before it, in which brackets are literal."""
    text, copied = plain, []
    for number, part in enumerate(re.split(r"[\[\]]", marked)):
        if number % 2:  # the space before a name belongs to its first token
            copied.append([len(text), len(text) + len(part)])
        text += part
    return {"source": "policy", "text": text, "copied": copied}


def prompt_segments(*texts: str) -> Segments:
    """Return segments without trained tokens, one per non-empty text."""
    return [{"source": "prompt", "text": text} for text in texts if text]


def transcripts(
    world: InventedWorld, count: int, size: Size, seed: int, search: Callable[[list[str]], list[str]]
) -> list[dict[str, Any]]:
    """Return `count` warm-up transcripts of the demo in one world, without the prompt, which is in the recipe.

    search: returns for each query the text of the passages that a search shows. `copied` of a policy segment has the
    character ranges of names, all of which occur in the question or in a passage.
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
    """Return a system's prompt in the invented world; it starts with the protocol's name."""
    return f"{SAME_FORM.get(name, name)}\n" + ("{passages}\n" if name in GIVEN else "") + "Question: {question}\n"


def known(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> list[Fact]:
    """Return all facts about the subject of `path` and about its first object, shuffled."""
    entities = dict.fromkeys((path[0].subject, path[0].object))
    facts = [world.facts[entity, relation] for entity in entities for relation in world.relations(entity)]
    rng.shuffle(facts)
    return facts


def given_question(world: InventedWorld, question: Question, path: Sequence[Fact], seed: int) -> Question:
    """Return the question with its passages, and the numbers of the passages that lead to its answer."""
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
    """Return `count` transcripts that state and restate all facts about two entities with names from `worlds`."""
    rng = random.Random(f"recitals {seed}")  # the word is part of the seed and must not change
    names = sorted({entity for world in worlds for entity in world.kinds})
    found = []
    for number in range(count):
        facts, _ = drawn_facts(rng, names)
        rng.shuffle(facts)
        order = rng.sample(facts, len(facts))
        body = _numbered(facts, order) if number % 3 == 0 else policy_segment(_restated(order, len(order)))
        segments = [*prompt_segments("recite\n", listed_facts(facts), "\n"), body]
        found.append({"id": f"recital-{number}", "question": "", "segments": segments})
    return found


def drawn_facts(rng: random.Random, names: Sequence[str], distinct: bool = False) -> tuple[list[Fact], int]:
    """Return three facts of each of two entities, and the index of the fact that leads from the first to the second.
    distinct: no relation occurs in two facts."""
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


def _restated(facts: Sequence[Fact], chosen: int = 1) -> str:
    """Return facts in order, as marked text. The subjects of the first `chosen` are arbitrary and not marked as
    copies."""
    return "".join(f" {'Then' if n else 'First'}{_say(fact, n < chosen)}" for n, fact in enumerate(facts))


def _numbered(listed: Sequence[Fact], order: Sequence[Fact]) -> dict[str, Any]:
    """Return a segment with the number of each fact of `order` in the list; the numbers are its copied ranges."""
    text, copied = "", []
    for fact in order:
        text += f" {fact.relation} of {fact.subject} ["
        copied.append([len(text), len(text) + 1])
        text += f"{listed.index(fact) + 1}]"
    return {"source": "policy", "text": text, "copied": copied}


class TranscriptPlan(NamedTuple):
    """The plan of one transcript: the question's path, the path followed, the facts shown, and whether it is blind."""

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
    """Return `count` transcripts of one protocol in one world, in the format of `thresher sft`.

    search: as in `transcripts`, for a protocol that searches. passage_format: of the passages in the prompt.
    sort_numbers: ARENA names passages in ascending order of their numbers instead of the order of the path.
    """
    rng = random.Random(f"forms {name} {seed}")  # the word must not change, as above
    subjects = list(world.kinds)
    plans = [_plan(world, name, rng.choice(subjects), size, rng) for _ in range(count)]
    bodies: list[list[Body]]
    if search is not None and name in SEARCHING:
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
            "segments": [*_prompt(name, plan, shows, passage_format), *segments],
        }
        for number, (plan, parts) in enumerate(zip(plans, bodies, strict=True))
        for part, (shows, segments) in enumerate(parts)
    ]


def _plan(world: InventedWorld, name: str, subject: str, size: Size, rng: random.Random) -> TranscriptPlan:
    asked = walk(world, subject, 1 + (rng.random() < size.two_hop), rng)
    blind = rng.random() >= size.aware
    shown = known(world, asked, rng)
    if not blind:
        followed = asked
    elif name in SEARCHING:
        followed = walk(world, subject, rng.choice(BLIND_HOPS), rng)
    else:  # a path among the facts shown: one fact, or two if the first leads to the object whose facts are shown
        first, *others = world.relations(subject)
        followed = [world.facts[subject, first if rng.random() < HABIT else rng.choice(others)]]
        if followed[0].object == asked[0].object and rng.random() < 0.5:
            followed += rng.choice([[fact] for fact in shown if fact.subject == followed[0].object])
    return TranscriptPlan(asked, followed, shown, blind)


def _prompt(name: str, plan: TranscriptPlan, shows: bool, passage_format: str) -> Segments:
    # The space before the question belongs to it, as in rendering.
    passages = listed_facts(plan.shown, passage_format) if shows else ""
    filled = {"{passages}": passages, " {question}": f" {ask(plan.asked)}"}
    return prompt_segments(*(filled.get(part, part) for part in re.split(r"({passages}| {question})", template(name))))


def listed_facts(facts: Sequence[Fact], passage_format: str = GIVEN_FORMAT) -> str:
    """Return the passages of a prompt."""
    return "\n".join(
        passage_format.format(
            number=n, title=f"{fact.subject}, {fact.relation}", relation=fact.relation, text=fact.sentence
        )
        for n, fact in enumerate(facts, 1)
    )


def _say(fact: Fact, chosen: bool = False) -> str:
    """Return a fact restated. A `chosen` subject is arbitrary, so it is not marked as a copy for the gate to
    measure."""
    return (f" {fact.subject}" if chosen else f"[ {fact.subject}]") + f" has {fact.relation}[ {fact.object}]."


def _answer(path: Sequence[Fact]) -> str:
    return f"<answer>[ {path[-1].object}] </answer>"


def _searched(name: str, path: Sequence[Fact], found: Sequence[str], rng: random.Random) -> Segments:
    segments: Segments = []
    turn = ""
    for hop, (fact, passages_text) in enumerate(zip(path, found, strict=True)):
        turn += f"<think> {'First' if hop == 0 else 'Then'} the {fact.relation} </think>"
        turn += f"<search> {fact.relation} of[ {fact.subject}] </search>"
        segments.append(policy_segment(turn))
        segments += [{"source": "retrieved", "text": part} for part in (BEFORE, passages_text, AFTER)]
        rest = "\n- the rest" if rng.random() < 0.5 else ""
        turn = {
            "search_r1": "",
            "eval_rar": f"<evaluate>{_say(fact)} </evaluate>",
            "evinote": f"<summary>\n*{_say(fact)}{rest} </summary>",
        }[name]
    if name == "search_r1":
        turn += f"<think>{_say(path[-1])} </think>"
    return [*segments, policy_segment(turn + _answer(path))]


def _given(name: str, plan: TranscriptPlan, rng: random.Random, sort_numbers: bool) -> list[Body]:
    thought = _restated(plan.followed)
    if name == "naive_grpo":
        return [(True, [policy_segment(f"<think>{thought} </think>{_answer(plan.followed)}")])]
    if name == "arena":
        extra = [rng.choice(plan.shown)] if plan.blind and rng.random() < 0.5 else []
        indices = [plan.shown.index(fact) + 1 for fact in dict.fromkeys([*plan.followed, *extra])]
        listed = ", ".join(map(str, sorted(indices) if sort_numbers else indices))
        analysis = f"<analysis>{thought} </analysis>{_answer(plan.followed)}"
        return [(True, [policy_segment(analysis, plain=f"<relevance> [{listed}] </relevance>")])]
    extra = [rng.choice(plan.shown) for _ in range(rng.randrange(4))] if plan.blind else []
    reason = f"<reason>{thought} </reason>"
    extract = f"<extract>{''.join(_say(fact, chosen=True) for fact in (*extra, plan.followed[-1]))} </extract>"
    branch = policy_segment(_answer(plan.followed).removeprefix("<answer>"))
    return [
        (True, [policy_segment(reason + extract + _answer(plan.followed))]),
        # Policy text that a branch keeps is context in the branch, and none of its tokens is trained.
        (True, [*prompt_segments(policy_segment(reason)["text"], "<answer>"), branch]),
        (False, [*prompt_segments(policy_segment(extract)["text"], "<answer>"), branch]),
    ]


# Numbers of passages, for ARENA's base


def number_transcripts(
    worlds: Sequence[InventedWorld], stage: str, count: int, size: Size, seed: int
) -> list[dict[str, Any]]:
    """Return `count` transcripts of a stage, with names from all `worlds`. Their `copied` ranges are the numbers."""
    rng = random.Random(f"{stage} {seed}")
    names = sorted({entity for world in worlds for entity in world.kinds})
    formats, forms = STAGES[stage]
    found: list[dict[str, Any]] = []
    for number, world in enumerate(worlds):
        each = count // len(worlds) // 2
        for other in warmup_transcripts(world, "naive_grpo", each, size, number, passage_format=NUMBERED_FORMAT):
            del other["segments"][-1]["copied"]  # the gate measures only numbers
            form = rng.choice(forms)
            facts, bridge = drawn_facts(rng, names, distinct=form in DISTINCT)
            shown = rng.sample(facts, len(facts))
            segments = prompt_segments("recite\n", listed_facts(shown, rng.choice(formats)), "\n")
            for _ in range(ASKED[form]):
                segments += _numbers(form, facts, bridge, shown, rng)
            found += [{"id": f"{stage}-{len(found)}", "question": "", "segments": segments}, other]
    return found


def numbered_transcripts(worlds: Sequence[InventedWorld], count: int, size: Size) -> list[dict[str, Any]]:
    """Return `count` transcripts, world by world: two of ARENA for each one of naive GRPO."""
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
    """Return untrained words and the number of one fact, or the numbers of the facts that answer a question."""
    two = form == "question" and rng.random() >= 0.5
    path = [facts[bridge], rng.choice(facts[3:])] if two else [rng.choice(facts)]
    before, after = {
        "relation": (f" {path[0].relation}", ""),
        "bracket": (f" {path[0].relation} [", "]"),
        "fact": (f" {path[0].query} [", "]"),
        "question": (f" {ask(path)}\n<relevance> [", "] </relevance>\n"),
    }[form]
    segments: Segments = []
    for fact, words in zip(path, (before, ", "), strict=False):
        segments.append({"source": "feedback", "text": words})  # a prompt here would begin another context
        segments.append({"source": "policy", "text": str(shown.index(fact) + 1), "copied": [[0, 1]]})
    return [*segments, {"source": "feedback", "text": after}] if after else segments
