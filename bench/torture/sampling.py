"""Sampling: stop sets, seeds and parameters at their ends, through the Python API and the command line.

stop sets     every sample ends where the first of its stop strings does in the text that is drawn without them,
              however many sets share the call
endless       thousands of strings that never come; the sample ends at its limit, in seconds
seeds         prompts without a seed do not share their noise, nor do two seeds of `eval`
parameters    a value that cannot be is refused in a sentence; any other gives finite log-probs
"""

import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from thresher.bench.torture.attack import Field, Tried, called, judge, tried
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import Ended, ForkLimits
from thresher.bench.torture.world import eval_words, train_words, write_lines

SETS, LEAST = 60, 2  # calls with many stop sets; parameters
STRINGS = 40  # requests of a call
LIMITS = ForkLimits(seconds=60)
LENGTH = 40  # tokens of a sample
ENDLESS = 5000  # strings that never come

Values = dict[str, Any]
PARAMETERS: list[Values] = [
    *({"temperature": value} for value in (1e-38, 1e-45, 1e-300, 1e300, math.nan, math.inf, -1.0, "1")),
    *({"top_p": value} for value in (1e-300, 0.0, 1.5, math.nan)),
    *({"min_p": value} for value in (1e-300, 1.0, 2.0, math.nan)),
    *({"top_k": value} for value in (10**30, -1, 1.5)),
    *({"n": value} for value in (1.5, 0, 10**18)),
    *({"max_new_tokens": value} for value in (10**18, 0, 2.5)),
    *({"seed": value} for value in (-1, 2**64, 0.5)),
    *({"stop": value} for value in (("\ud800",), ("",), "abc", (7,))),
    *({"prompt_text": None, "prompt_ids": value} for value in ([1.5], [True], [10**30], [-1], [])),
]
SETTINGS = ("rollout.temperature=1e-300", "rollout.temperature=1e300", "rollout.top_p=1e-300", "grpo.clip_high=1e308")


def attack(field: Field) -> Iterator[Tried]:
    """All kinds; at a smaller scale fewer stop sets, and fewer parameters."""
    draw = field.draw("sampling")
    for _ in range(field.count(SETS, 1)):
        seed = draw.randrange(2**32)
        ended = called(field.worker, partial(stop_sets, field.at, seed), LIMITS)
        yield _right("stop sets", f"seed {seed}", ended)
    yield _right("endless", f"{ENDLESS:,} strings", called(field.worker, partial(endless, field.at), LIMITS))
    yield _right("seeds", "prompts without one", called(field.worker, partial(default_seeds, field.at), LIMITS))
    yield seeds_of_eval(field)
    for values in draw.sample(PARAMETERS, min(len(PARAMETERS), field.count(len(PARAMETERS), LEAST))):
        ended = called(field.worker, partial(parameters, field.at, values), LIMITS)
        yield tried("parameters", str(values)[:80], ended, passes=True)
    for setting in draw.sample(SETTINGS, min(len(SETTINGS), field.count(len(SETTINGS), 1))):
        out = field.scratch / "out"
        ended = field.worker.play(train_words(field.at, out, "--set", setting, "--set", "run.steps=1"), LIMITS)
        yield tried("parameters", setting, ended, passes=True)
        clear(out)


def _right(kind: str, what: str, ended: Ended) -> Tried:
    verdict, word = judge(ended, lambda: True)
    said = ended.err.strip().splitlines()[-1:] if verdict == "wrong" else []
    return Tried(kind, "wrong" if verdict == "refused" else verdict, f"{what}: {word} {said}")


# In forks: torch computes here, and what a function returns is the exit status.


def _made(at: Path) -> tuple[Any, type]:
    from thresher.engine.decoding.generator import GenerateRequest, Generator
    from thresher.policy.model import load_policy
    from thresher.policy.tokenizer import load_tokenizer

    return Generator(load_policy(at / "model"), load_tokenizer(at / "model")), GenerateRequest


def stop_sets(at: Path, seed: int) -> int:
    """Requests of drawn strings, some of which come in the text, and long ones that do not."""
    generator, request = _made(at)
    draw = Random(seed)
    plain = [
        {"prompt_text": f"Anna {n}", "max_new_tokens": LENGTH, "seed": draw.randrange(2**31)} for n in range(STRINGS)
    ]
    texts = [result.text for (result,) in generator.generate([request(**values) for values in plain])]
    longest = draw.choice((8, 130))  # characters of a string that does not come
    stops = [_drawn_stops(text, longest, draw) for text in texts]
    asked = [request(**values, stop=stop) for values, stop in zip(plain, stops, strict=True)]
    wrong = 0
    for text, stop, (found,) in zip(texts, stops, generator.generate(asked), strict=True):
        ends = [text.index(one) + len(one) for one in stop if one in text]
        expected = text[: min(ends)] if ends else text
        if found.text != expected:
            wrong += 1
            print(f"stops {[one[:20] for one in stop]}: {found.text!r} where {expected!r} is right", file=sys.stderr)
    return 1 if wrong else 0


def _drawn_stops(text: str, longest: int, draw: Random) -> tuple[str, ...]:
    """Some strings that stand in a text, of characters that one token spells alone, and some that do not."""
    plain = [n for n, letter in enumerate(text) if letter.isascii() and letter.isprintable()]
    found = []
    for begin in draw.sample(plain, min(len(plain), draw.randrange(3))):
        end = begin + 1
        while end < len(text) and end - begin < 4 and text[end].isascii() and text[end].isprintable():
            end += 1
        found.append(text[begin:end])
    absent = [draw.choice("xyz") * draw.randrange(4, longest) + str(n) for n in range(draw.randrange(1, 4))]
    return tuple(dict.fromkeys([*found, *absent]))


def endless(at: Path) -> int:
    generator, request = _made(at)
    never = tuple(f"<never-{number}>" * 3 for number in range(ENDLESS))
    (results,) = generator.generate([request(prompt_text="Anna", max_new_tokens=LENGTH, stop=never)])
    return 0 if results[0].finish in ("length", "eos") else 1


def default_seeds(at: Path) -> int:
    """One prompt, asked forty times in one call: forty texts, not one."""
    generator, request = _made(at)
    results = generator.generate([request(prompt_text="Anna", max_new_tokens=LENGTH) for _ in range(STRINGS)])
    different = len({result.text for (result,) in results})
    print(f"{different} different texts of {STRINGS}", file=sys.stderr)
    return 0 if different > STRINGS // 2 else 1


def parameters(at: Path, values: Values) -> int:
    """Refused, or finite log-probs of the tokens that were drawn."""
    generator, request = _made(at)
    results = generator.generate([request(**{"prompt_text": "Anna", "max_new_tokens": 4} | values)])
    finite = all(math.isfinite(value) for samples in results for one in samples for value in one.logprobs)
    if not finite:
        print("log-probs that are not finite", file=sys.stderr)
    return 0 if finite else 1


def seeds_of_eval(field: Field) -> Tried:
    """One question many times over: an answer of seed 1 is not that of the question behind it under seed 0."""
    asked = field.scratch / "asked.jsonl"
    write_lines(asked, [{"id": f"q{n}", "question": "Where?", "golden_answers": ["x"]} for n in range(16)])
    answers: list[list[Any]] = []
    for seed in ("0", "1"):
        out = field.scratch / f"seed{seed}"
        words = [*eval_words(field.at, out), "--seed", seed, "--temperature", "1"]
        words[words.index("--questions") + 1] = str(asked)
        ended = field.worker.play(words, LIMITS)
        if ended.status != 0:
            return tried("seeds", "of eval", ended)
        lines = (out / "trajectories.jsonl").read_text().splitlines()
        answers.append([json.loads(line).get("segments") for line in lines if "segments" in line])
        clear(out)
    shared = [
        sum(a == b for a, b in zip(answers[0][i:], answers[1][j:], strict=False)) for i, j in ((1, 0), (0, 1), (0, 0))
    ]
    right = max(shared) <= 2 and bool(answers[0])
    return Tried(
        "seeds", "right" if right else "wrong", f"of eval: {max(shared)} of 15 answers are shared by two seeds"
    )
