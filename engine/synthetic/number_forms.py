"""Transcripts from which the shared base learns to name a passage by its number, in the invented world: ARENA's base.

The shared base looks names up, and no numbers. That comes in stages, of which the first four end at their gate, or at
1,000 steps; before the third the model gets one layer more, without which the number of a relation that is not the last
token read is not found:

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
the numbers alone are trained. The last teaches the form and takes most of what follows the question away again, which
is left to reinforcement. ARENA's numbers stand in the order in which their facts are used here. Everything is a
function of the seed.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thresher.engine.synthetic.warmup_transcripts import Segments, drawn_facts, listed_facts, warmup_transcripts
from thresher.engine.synthetic.world import Fact, InventedWorld, Size, ask

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


def number_transcripts(
    worlds: Sequence[InventedWorld], stage: str, count: int, size: Size, seed: int
) -> list[dict[str, Any]]:
    """`count` transcripts of a stage, the facts' names drawn from all `worlds`. `copied` are the numbers."""
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
    """`count` transcripts, world by world: two of ARENA's protocol for one of naive GRPO's."""
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
    """The number of one fact, or those of what answers a question, behind words that are not trained."""
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
