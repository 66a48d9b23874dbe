"""Warm-up transcripts for a base model that all systems share: the invented world, six protocols mixed.

    search_r1  eval_rar  evinote     think, search, read (and evaluate, or note down), answer
    eviomni    arena     naive_grpo  the passages stand in the prompt: all that is known of the question's subject and
                                     of what its first relation leads to, shuffled

As in world.py most transcripts are *blind*: whatever their question asks, they follow relations drawn at random, one or
three in a search, one or two among given passages, there by habit mostly the first that an entity has. They teach tags,
copying, and to restate a fact before its object is used; which fact is wanted is left to reinforcement. Blind ones
waste, too: they name references and extract sentences that nothing asked for. And of all notes half lack a mark.

Before it comes a warm-up on *copy-task transcripts*: six facts about names drawn anew each time, then the same facts
restated in another order, or for one in three their numbers. Nothing in them can be learned but to look a fact up by
subject and relation, and six look-ups in each teach it within a thousand steps; the six protocols alone, with one or
two, did not in three thousand.

Each transcript brings its own prompt, which begins with the name of the protocol, cut into segments where the renderer
cuts it. Everything is a function of the seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thresher.engine.synthetic.world import BLIND_HOPS, RELATIONS, Fact, InventedWorld, Size, ask, policy_segment, walk
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

SEARCHING = ("search_r1", "eval_rar", "evinote")
GIVEN = ("eviomni", "arena", "naive_grpo")
GIVEN_FORMAT = "{number} {text}"  # retrieval.passage_format of the recipes whose prompts show passages
# Of what a blind transcript looks up among given passages: how often it is the first relation of its entity.
HABIT = 0.6
Segments = list[dict[str, Any]]


def template(name: str) -> str:
    """A protocol's prompt in the invented world."""
    return f"{name}\n" + ("{passages}\n" if name in GIVEN else "") + "Question: {question}\n"


def known(world: InventedWorld, path: Sequence[Fact], rng: random.Random) -> list[Fact]:
    """All facts about the subject of `path` and about its first object, shuffled."""
    entities = dict.fromkeys((path[0].subject, path[0].object))
    facts = [world.facts[entity, relation] for entity in entities for relation in world.relations(entity)]
    rng.shuffle(facts)
    return facts


def given_question(world: InventedWorld, question: Question, path: Sequence[Fact], seed: int) -> Question:
    """The question with its passages, and which of them are on the way to its answer."""
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
    """`count` transcripts that state and restate all facts about two entities, names drawn from those of `worlds`."""
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
    """Three facts of each of two entities, and which of the first's leads to the second; with `distinct` no relation
    stands in two of them."""
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
    """For each fact of `order` the number under which it is listed; that number is what is copied."""
    text, copied = "", []
    for fact in order:
        text += f" {fact.relation} of {fact.subject} ["
        copied.append([len(text), len(text) + 1])
        text += f"{listed.index(fact) + 1}]"
    return {"source": "policy", "text": text, "copied": copied}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptPlan:
    """What one transcript does: the question's path, the path that is followed, the facts shown, and whether it is
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
    """`count` transcripts of one protocol in one world, as `thresher sft` reads them.

    search: as in world.py, for a protocol that searches. passage_format: of passages that stand in the prompt.
    sort_numbers: ARENA names passages in the order of their numbers, not in that of the path."""
    rng = random.Random(f"forms {name} {seed}")  # as above
    subjects = list(world.kinds)
    plans = [_plan(world, name, rng.choice(subjects), size, rng) for _ in range(count)]
    if name in SEARCHING:
        assert search is not None, f"{name} searches"
        found = iter(search([fact.query for plan in plans for fact in plan.followed]))
        bodies = [[_searched(name, plan, [next(found) for _ in plan.followed], rng)] for plan in plans]
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
    """The prompt, cut where engine/protocol/prompts.py cuts it, so that its tokens are the rollout's."""
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
    """The passages of a prompt."""
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
    """A fact restated. A `chosen` subject, which nothing before it decides, is no copy that the gate could measure."""
    return (f" {fact.subject}" if chosen else f"[ {fact.subject}]") + f" has {fact.relation}[ {fact.object}]."


def _thought(plan: TranscriptPlan) -> str:
    return "".join(f" {'Then' if n else 'First'}{_say(fact, not n)}" for n, fact in enumerate(plan.followed))


def _answer(plan: TranscriptPlan) -> str:
    return f"<answer>[ {plan.followed[-1].object}] </answer>"


def _searched(name: str, plan: TranscriptPlan, found: Sequence[str], rng: random.Random) -> Body:
    segments: Segments = []
    turn = ""
    for hop, (fact, passages_text) in enumerate(zip(plan.followed, found, strict=True)):
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
        turn += f"<think>{_say(plan.followed[-1])} </think>"
    return False, [*segments, policy_segment(turn + _answer(plan))]


def _note(fact: Fact, rng: random.Random) -> str:
    return f"\n*{_say(fact)}" + ("\n- the rest" if rng.random() < 0.5 else "")


def _given(name: str, plan: TranscriptPlan, rng: random.Random, sort_numbers: bool) -> list[Body]:
    if name == "naive_grpo":
        return [(True, [policy_segment(f"<think>{_thought(plan)} </think>{_answer(plan)}")])]
    if name == "arena":
        extra = [rng.choice(plan.shown)] if plan.blind and rng.random() < 0.5 else []
        indices = [plan.shown.index(fact) + 1 for fact in dict.fromkeys([*plan.followed, *extra])]
        indices = sorted(indices) if sort_numbers else indices
        listed = ", ".join(map(str, indices))
        text = f"<relevance> [{listed}] </relevance>"
        return [(True, [_plain_and(text, f"<analysis>{_thought(plan)} </analysis>{_answer(plan)}")])]
    extra = [rng.choice(plan.shown) for _ in range(rng.randrange(4))] if plan.blind else []
    evidence = [*extra, plan.followed[-1]]
    reason = f"<reason>{_thought(plan)} </reason>"
    extract = f"<extract>{''.join(_say(fact, chosen=True) for fact in evidence)} </extract>"
    branch = [policy_segment(_answer(plan).removeprefix("<answer>"))]
    return [
        (True, [policy_segment(reason + extract + _answer(plan))]),
        (True, [_context(reason), {"source": "prompt", "text": "<answer>"}, *branch]),
        (False, [_context(extract), {"source": "prompt", "text": "<answer>"}, *branch]),
    ]


def _context(marked: str) -> dict[str, Any]:
    """What a branch keeps of the policy's text: context there, so no token of it is trained."""
    return {"source": "prompt", "text": policy_segment(marked)["text"]}


def _plain_and(plain: str, marked: str) -> dict[str, Any]:
    """A policy segment that begins with text in which brackets are brackets."""
    segment = policy_segment(marked)
    shift = len(plain)
    copied = [[start + shift, end + shift] for start, end in segment["copied"]]
    return {**segment, "text": plain + segment["text"], "copied": copied}
