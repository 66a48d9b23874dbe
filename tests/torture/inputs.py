"""Attacks through inputs: malformed records, hostile models and files, parameters, control bytes, rewards.

Invalid records and models must be refused with a sentence that names the file, within seconds and with little memory.
Odd but valid ones may be refused or read, but must not end in a traceback. Models have no hashes here, like downloads.
"""

import io
import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from torture.harness import TRACEBACK, Campaign, Ended, Limits, Outcome, Verdict, judge, refused, remove
from torture.world import (
    EVAL,
    EXTRACT,
    GENERATE,
    ROLLOUT,
    SFT,
    TRAIN,
    build_words,
    place_recipe,
    score_words,
    with_settings,
    write_lines,
)

from thresher.bench.harness import append_rows
from thresher.engine.scoring.transcripts import read_reward_input
from thresher.engine.systems import load_system

LIMITS = Limits(seconds=60)
Record = dict[str, Any]

# Malformed records: one among valid ones.

WRONG_TYPES: tuple[Any, ...] = (None, True, 7, -1.5, [], {}, [7], [None], {"a": 1}, [["x"]])


@dataclass(frozen=True, slots=True)
class Reader:
    """A kind of record and its reader. words: the command that reads {file}, or its {folder}. record: a valid record,
    with # for its number. needed: the required keys, with the types that are valid for them."""

    words: str
    record: Record
    needed: Mapping[str, tuple[type, ...]]


READERS = {
    "questions": Reader(
        "data check {file}",
        {"id": "q#", "question": "Who is #?", "golden_answers": ["Anna #"]},
        {"question": (str,), "golden_answers": (list, str)},
    ),
    "transcripts": Reader(
        "score --system eval_rar --transcripts {file} --out {out}",
        {"id": "t#", "golden_answers": ["A"], "segments": [{"source": "policy", "text": "<answer>Anna #</answer>"}]},
        {"id": (str, int), "golden_answers": (list,), "segments": (list,)},
    ),
    "corpora": Reader(
        "index build --corpus {file} --dim 16 --out {out}",
        {"id": "p#", "title": "Anna #", "text": "Anna # lives at number #."},
        {"text": (str,)},
    ),
    "predictions": Reader(
        "compare {folder} {folder} --unverified --out {out}",
        {"id": "q#", "question": "Who is #?", "measures": {"em": 1.0, "f1": 0.5}, "parts": {"em": 1}},
        {"measures": (dict,), "parts": (dict,)},
    ),
}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A file with one malformed record in the middle. must: whether it must be refused."""

    kind: str
    what: str
    must: bool
    file: Path
    words: list[str]


def records(campaign: Campaign) -> Iterator[Outcome]:
    campaign.must(campaign.words(EVAL, campaign.scratch / "evaluation"))
    kinds = campaign.each(READERS, campaign.count(10_000, 20))
    for begin in range(0, len(kinds), 100):
        cases = [make_malformed(campaign, kind, begin + n) for n, kind in enumerate(kinds[begin : begin + 100])]
        yield from read_all(campaign, cases)
        for case in cases:
            remove(case.file.parent)


def make_malformed(campaign: Campaign, kind: str, number: int) -> Malformed:
    reader, what, folder = READERS[kind], campaign.draw.choice(ODDITIES), campaign.scratch / f"read{number}"
    folder.mkdir()
    if kind == "predictions":
        shutil.copy(campaign.scratch / "evaluation" / "metrics.json", folder)
    lines = [json.dumps(reader.record).replace("#", str(place)).encode() for place in range(3)]
    lines[1], must = malform(what, json.loads(lines[1]), reader.needed, campaign.draw)
    file = folder / ("trajectories.jsonl" if kind == "predictions" else f"read{number}.jsonl")
    file.write_bytes(b"\n".join([*lines, b""]))
    what = f"{what}: {lines[1][:160]!r}{'..' if len(lines[1]) > 160 else ''}"
    return Malformed(kind, what, must, file, campaign.words(reader.words, folder / "out", file=file, folder=folder))


def read_all(campaign: Campaign, cases: Sequence[Malformed]) -> Iterator[Outcome]:
    """Read the cases in one fork, because forks take longer than cases; if a case ends it, another goes on."""
    journal = campaign.scratch / "journal.jsonl"

    def call() -> int:
        for case in cases:
            err = io.StringIO()
            with redirect_stderr(err), redirect_stdout(io.StringIO()):
                try:
                    status = campaign.run(case.words)
                except BaseException:
                    status = 1
                    traceback.print_exc()
            append_rows(journal, {"status": status, "err": err.getvalue()})
        return 0

    while cases:
        journal.write_text("")
        batch = campaign.play(call)
        ends = [json.loads(line) for line in journal.read_text().splitlines()]
        for case, end in zip(cases, ends, strict=False):
            ended = Ended(**end, signal=None, timed_out=False, seconds=0.0, out="")
            verdict, reason = judge(ended, right=False, may_be_read=not case.must)
            if verdict == "refused" and str(case.file.parent) not in reason and case.file.name not in reason:
                verdict = "wrong"  # it names no file
            yield Outcome(case.kind, verdict, f"{case.what}: {reason}")
        if len(ends) < len(cases):
            case = cases[len(ends)]
            yield Outcome(case.kind, "wrong", f"{case.what}: {batch.fault}: {batch.err[-300:]}")
        cases = cases[len(ends) + 1 :]


def places(value: Any, of: type = object) -> list[tuple[Any, Any]]:
    """Return (key, container) of every value of a type inside a record, at any depth."""
    found = []
    for place in value if isinstance(value, dict) else range(len(value)):
        found += [(place, value)] if isinstance(value[place], of) else []
        found += places(value[place], of) if isinstance(value[place], dict | list) else []
    return found


def malform(what: str, record: Record, needed: Mapping[str, Any], draw: Random) -> tuple[bytes, bool]:
    """Return a malformed line, and whether it must be refused."""
    key, whole = draw.choice(list(needed)), json.dumps(record).encode()
    place, holder = draw.choice(places(record))
    text_place, text_holder = draw.choice(places(record, str))
    must = what in ("no key", "no object", "half a line", "not UTF-8", "more behind it")
    value: Any = record
    match what:
        case "no key":
            del record[key]
        case "another type":
            record[key] = draw.choice(WRONG_TYPES)
            must = isinstance(record[key], bool) or not isinstance(record[key], needed[key])
        case "another type inside":
            holder[place] = draw.choice(WRONG_TYPES)
        case "no object":
            value = draw.choice([[record], "text", 7, None, True, [], 1e9])
        case "half a line":
            return whole[: draw.randrange(1, len(whole) - 1)], must
        case "not UTF-8":
            return whole[:5] + draw.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]) + whole[
                5:
            ], must
        case "a number that is none" | "nested":
            holder[place] = "PLACE"
            put = draw.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"1e-999", b"-0", b"1E400"])
            if what == "nested":
                depth = draw.choice([50, 990, 5000, 200_000])
                opened, closed = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
                put, must = opened * depth + b"0" + closed * depth, depth > 1000
            return json.dumps(record).encode().replace(b'"PLACE"', put), must
        case "odd characters":
            odd = draw.choices(ODD_CHARACTERS, k=3) + draw.choices(["", "x"])
            text_holder[text_place] = draw.choice(["", text_holder[text_place]]) + "".join(odd)
        case "a long text":
            text = draw.choice(["x", " ", "<", "<answer>", "\u0301", "ab "])
            text_holder[text_place] = text * draw.choice([1000, 100_000])
        case "a blank text":
            text_holder[text_place] = draw.choice(["", " ", "\t\n", "\u3000"])
        case "twice":  # in two lines, or every key twice in one object
            return (whole + b"\n" + whole if draw.random() < 0.5 else whole[:-1] + b"," + whole[1:]), must
        case "more keys":
            for name in draw.sample(MORE_KEYS, 2):
                values = [*WRONG_TYPES, "x", 10**400, [{"text": 7}], [0], [-1], {"full": 3}, {"x": [{}]}]
                record[name] = draw.choice(values)
            must = not all(isinstance(record.get(key), types) for key, types in needed.items())
        case "more behind it":
            return whole + draw.choice([b"}", b"]", b" {}", b",", b"x", b"\x00"]), must
    return json.dumps(value).encode(), must


ODDITIES = (
    *("no key", "another type", "another type inside", "no object", "half a line", "not UTF-8"),
    *("a number that is none", "nested", "odd characters", "a long text", "a blank text", "twice", "more keys"),
    "more behind it",
)
ODD_CHARACTERS = ("\x00", "\ud800", "\udfff", "\u202e", "\ufeff", "\u2028", "\x1b[2J", "\U0010ffff", "\r", "</answer>")
MORE_KEYS = (
    *("id", "passages", "gold_indices", "branches", "answers", "entailment", "verdict", "metadata", "answer"),
    *("contents", "__class__", "", "title", "text", "questions"),
)

# Hostile models, and other things in a file's place.

HOSTILE = Limits(seconds=30, memory=2 << 30)
NOT_READ = ("run*", "done*", "evaluation", "answers*", "warm", "hnsw*", "ivf*", "bm25*", "hybrid")  # of the world
Change = Callable[[Path], object]
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "hashes.json")
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ROPES: dict[str, Any] = {"1e-300": 1e-300, "0": 0, "-1": -1.0, "NaN": math.nan, "text": "big"}
TEMPLATES: dict[str, Any] = {
    "a list": [1],
    "an endless loop": "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
    "a huge power": "{{ 9 ** 9 ** 9 }}",
    "a look around": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}
ANNA = f"{GENERATE} --prompt Anna"
OF_MODELS = {"generate": ANNA, "extract": EXTRACT, "eval": EVAL, "rollout": ROLLOUT, "train": TRAIN, "sft": SFT}
OF_FILES = {
    "model/config.json": ANNA,
    "model/hashes.json": ANNA,
    "model/model.safetensors": ANNA,
    "model/tokenizer.json": ANNA,
    "prompt.txt": EVAL,
    "letters.py": EVAL,
    "recipe.toml": EVAL,
    "questions.jsonl": "data check {at}/questions.jsonl",
    "corpus.jsonl": build_words("flat"),
    "transcripts.jsonl": SFT,
    "scored.jsonl": score_words("scored.jsonl", "r1"),
}
PIPED = {"recipe.toml", "questions.jsonl", "corpus.jsonl", "transcripts.jsonl", "scored.jsonl"}  # may be <(..)
PLACED: dict[str, Change] = {
    "a FIFO": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("/nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
}


@dataclass(frozen=True, slots=True)
class HostileInput:
    """A hostile file. change: applied to `file` of a copy of the world. words: the command that reads it. passes: it
    may be read."""

    kind: str
    what: str
    change: Change
    words: str = ANNA
    passes: bool = False
    file: str = "model"


def set_keys(model: Path, name: str, **keys: Any) -> None:
    path = model / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))


def add_huge_integer(model: Path, name: str) -> None:
    text = (model / name).read_bytes() if (model / name).exists() else b'{"a": 1}'
    (model / name).write_bytes(text.replace(b"{", b'{"huge": %s, ' % (b"9" * 5000), 1))


def scale_weights(model: Path, factor: float) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    path = model / "model.safetensors"
    with np.errstate(invalid="ignore"):
        save_file({name: (value * factor).astype("float32") for name, value in load_file(path).items()}, path)


def split_at(model: Path, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    set_keys(model, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


def map_surrogate(model: Path) -> None:
    (model / "model.safetensors").rename(model / "part.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "\\ud800"}}')


def place(path: Path, change: Change) -> None:
    path.unlink(missing_ok=True)
    change(path)


def hostile_inputs() -> Iterator[HostileInput]:
    set_config = partial(set_keys, name="config.json")
    for name in JSON_FILES:
        yield HostileInput(
            "huge integers", name, partial(add_huge_integer, name=name), passes=name == "generation_config.json"
        )
    for name in SIZES:
        yield HostileInput("sizes", f"{name} of 10^12", partial(set_config, **{name: 10**12}))
    for layers in (10**5, 10**12):
        yield HostileInput("sizes", f"{layers:,} layers", partial(set_config, num_hidden_layers=layers))
    for name, value in ROPES.items():
        yield HostileInput("weights and rope_theta", f"rope_theta {name}", partial(set_config, rope_theta=value))
    for factor in (1e18, 1e38, math.nan, math.inf):
        for name, words in OF_MODELS.items():
            what, passes = f"weights x {factor}, {name}", math.isfinite(factor)  # of any finite size
            yield HostileInput("weights and rope_theta", what, partial(scale_weights, factor=factor), words, passes)
    for pattern in ("(x+x+)+y", "(x|x|x)*y", "(?:x*)*y", "(x{0,99}){0,99}y"):
        for size in (20_000, 40):
            words = f"{GENERATE} --prompt {'x' * size}"
            yield HostileInput(
                "tokenizers", f"{pattern} on {size} letters", partial(split_at, pattern=pattern), words, True
            )
    spaces = partial(Path.write_bytes, data=b" " * 11_000_000 + b"a")
    words = f"{GENERATE} --prompt-file {{at}}/prompt.txt"
    yield HostileInput("tokenizers", "11 million spaces", spaces, words, True, "prompt.txt")
    for name, value in TEMPLATES.items():
        change = partial(set_keys, name="tokenizer_config.json", chat_template=value)
        yield HostileInput("chat templates", name, change, f"{ANNA} --chat", name == "a look around")
    latin = partial(Path.write_bytes, data="{{ messages[0].content }} é".encode("latin-1"))
    yield HostileInput("chat templates", "in Latin-1", lambda at: latin(at / "chat_template.jinja"), f"{ANNA} --chat")
    kind, renamed = "what lies in a file's place", os.fsdecode(b"q\xff.jsonl")
    yield HostileInput(kind, "a weight_map with half a character", map_surrogate)
    for name, words in OF_FILES.items():
        for what, change in PLACED.items():
            if what != "a FIFO" or name not in PIPED:
                yield HostileInput(kind, f"{what} for {name}", partial(place, change=change), words, file=name)
    no_utf8: Change = lambda path: path.rename(path.with_name(renamed))  # noqa: E731
    yield HostileInput(kind, "a name not in UTF-8", no_utf8, f"data check {{at}}/{renamed}", True, "questions.jsonl")


def inputs(campaign: Campaign) -> Iterator[Outcome]:
    for number, case in enumerate(campaign.some(list(hostile_inputs()), 5)):
        copied = Campaign("copied", campaign.scratch / f"{number}", campaign.run)
        shutil.copytree(campaign.world, copied.world, ignore=shutil.ignore_patterns(*NOT_READ))
        (copied.world / "model" / "hashes.json").unlink(missing_ok=True)
        place_recipe(copied.world)
        case.change(copied.world / case.file)
        yield refused(case.kind, case.what, copied.play(case.words, HOSTILE), passes=case.passes)
        remove(copied.world.parent)


# Sampling: stop sets, seeds and extreme parameters. torch computes in forks, whose results are exit statuses.

REQUESTS = 40  # per call
LENGTH = 40  # tokens per sample
ENDLESS = 5000  # stop strings that never occur
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


def sampling(campaign: Campaign) -> Iterator[Outcome]:
    def right(kind: str, what: str, call: Callable[[], int]) -> Outcome:
        ended = campaign.play(call, LIMITS)
        reason = ended.fault or ended.last_line
        return Outcome(kind, "right" if ended.status == 0 and not ended.fault else "wrong", f"{what}: {reason}")

    campaign.must(ANNA)  # so that no fork has to import the generator
    for _ in range(campaign.count(60, 1)):
        seed = campaign.draw.randrange(2**32)
        yield right("stop sets", f"seed {seed}", partial(stop_sets, campaign.world, seed))
    yield right("endless", f"{ENDLESS:,} strings", partial(endless, campaign.world))
    yield right("seeds", "prompts without one", partial(default_seeds, campaign.world))
    yield seeds_of_eval(campaign)
    for values in campaign.some(PARAMETERS, 2):
        ended = campaign.play(partial(parameters, campaign.world, values), LIMITS)
        yield refused("parameters", str(values)[:80], ended, passes=True)
    for setting in campaign.some(SETTINGS, 1):
        ended = campaign.play(with_settings(TRAIN, setting, "run.steps=1"), LIMITS)
        campaign.clear()
        yield refused("parameters", setting, ended, passes=True)


def load_generator(at: Path) -> tuple[Any, type]:
    from thresher.engine.decoding.generator import GenerateRequest, Generator
    from thresher.policy.model import load_policy
    from thresher.policy.tokenizer import load_tokenizer

    return Generator(load_policy(at / "model"), load_tokenizer(at / "model")), GenerateRequest


def generate(at: Path, requests: Sequence[Values]) -> list[Any]:
    """Return the first sample of each request; the default is the prompt "Anna" and LENGTH tokens."""
    generator, request = load_generator(at)
    asked = [request(**{"prompt_text": "Anna", "max_new_tokens": LENGTH} | values) for values in requests]
    return [samples[0] for samples in generator.generate(asked)]


def stop_sets(at: Path, seed: int) -> int:
    """Check that each sample ends where the first of its stop strings ends in the text sampled without them."""
    draw = Random(seed)
    plain = [{"prompt_text": f"Anna {n}", "seed": draw.randrange(2**31)} for n in range(REQUESTS)]
    texts = [sample.text for sample in generate(at, plain)]
    longest = draw.choice((8, 130))  # characters of a string that does not occur
    stops = [draw_stops(text, longest, draw) for text in texts]
    found = generate(at, [{**values, "stop": stop} for values, stop in zip(plain, stops, strict=True)])
    wrong = 0
    for text, stop, sample in zip(texts, stops, found, strict=True):
        expected = text[: min((text.index(one) + len(one) for one in stop if one in text), default=len(text))]
        if sample.text != expected:
            wrong += 1
            print(f"stops {[one[:20] for one in stop]}: {sample.text!r} where {expected!r} is right", file=sys.stderr)
    return 1 if wrong else 0


def draw_stops(text: str, longest: int, draw: Random) -> tuple[str, ...]:
    """Draw strings that occur in a text, of characters that are single tokens, and strings that do not occur."""
    runs = re.findall("[ -~]{1,4}", text)
    found = draw.sample(runs, min(len(runs), draw.randrange(3)))
    absent = [draw.choice("xyz") * draw.randrange(4, longest) + str(n) for n in range(draw.randrange(1, 4))]
    return tuple(dict.fromkeys([*found, *absent]))


def endless(at: Path) -> int:
    """Check that a sample with thousands of stop strings that never occur ends at its limit, within seconds."""
    (sample,) = generate(at, [{"stop": tuple(f"<never-{number}>" * 3 for number in range(ENDLESS))}])
    return 0 if sample.finish in ("length", "eos") else 1


def default_seeds(at: Path) -> int:
    """Check that one prompt, given forty times in one call without a seed, gives different texts."""
    different = len({sample.text for sample in generate(at, [{}] * REQUESTS)})
    print(f"{different} different texts of {REQUESTS}", file=sys.stderr)
    return 0 if different > REQUESTS // 2 else 1


def parameters(at: Path, values: Values) -> int:
    """Check that values are refused, or give finite log-probs."""
    (sample,) = generate(at, [{"max_new_tokens": 4, **values}])
    return 0 if all(math.isfinite(value) for value in sample.logprobs) else 1


def seeds_of_eval(campaign: Campaign) -> Outcome:
    """Check, on one repeated question, that an answer of seed 1 is not that of the next question under seed 0."""
    asked = campaign.scratch / "asked.jsonl"
    write_lines(asked, [{"id": f"q{n}", "question": "Where?", "golden_answers": ["x"]} for n in range(16)])
    answers: list[list[Any]] = []
    for seed in (0, 1):
        words = EVAL.replace("{at}/questions.jsonl", str(asked))
        ended = campaign.play(f"{words} --seed {seed} --temperature 1", LIMITS)
        if ended.status != 0:
            return refused("seeds", "of eval", ended)
        lines = (campaign.out / "trajectories.jsonl").read_text().splitlines()
        answers.append([json.loads(line)["segments"] for line in lines if "segments" in json.loads(line)])
        campaign.clear()
    first, second = answers
    shared = [sum(a == b for a, b in zip(first[i:], second[j:], strict=False)) for i, j in ((1, 0), (0, 1), (0, 0))]
    verdict: Verdict = "right" if max(shared) <= 2 and first else "wrong"
    return Outcome("seeds", verdict, f"of eval: {max(shared)} of 15 answers are shared by two seeds")


# Control bytes of a model, a file or an argument must not act on the terminal that shows them.

PAYLOADS = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "bidi": "\u202etxt\u202c",
    "C1": "\x9b31m",
    "bell": "\x07\x08",
}
OURS = re.compile(r"\x1b\[[0-9;]*[mKABCDG]|\x1b\[\?25[hl]")  # colours and cursors
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SHOWN = {
    "generate, a model that writes any byte": "generate --model {at}/model --prompt {text} --max-new-tokens 200",
    "generate, several samples": f"{GENERATE} --prompt {{text}} --n 3",
    "a path": "data check {at}/{text}.jsonl",
    "--set": with_settings(TRAIN, "run.steps={text}"),
    "--set of an unknown key": with_settings(TRAIN, "run.{text}=1"),
    "--system": "score --system {text} --transcripts {file} --out {out}",
    "an unknown flag": "report --{text}",
    "data show": "data show {file}",
    "data check": "data check {file}",
}


def terminal(campaign: Campaign) -> Iterator[Outcome]:
    file = campaign.scratch / "asked.jsonl"
    for way, payload in campaign.some([(way, payload) for way in SHOWN for payload in PAYLOADS], 4):
        text = PAYLOADS[payload]
        record = {"id": f"a{text}", "question": f"Who {text}?", "golden_answers": [text], "metadata": {text: text}}
        write_lines(file, [record, {"id": f"a{text}", "question": text}])
        words = campaign.words(SHOWN[way], file=file, text=text)
        ended = campaign.play(words, replace(LIMITS, terminal=True))
        campaign.clear()
        yield Outcome(way, *judge_shown(ended, payload))


def judge_shown(ended: Ended, payload: str) -> tuple[Verdict, str]:
    if ended.timed_out or ended.signal is not None or TRACEBACK in ended.out:
        return "wrong", f"{payload}: {ended.fault or 'traceback'}"
    shown = OURS.sub("", ended.out.replace("\r\n", "\n"))
    if (found := CONTROL.search(shown)) is not None:
        return "wrong", f"{payload}: {shown[max(0, found.start() - 20) : found.end() + 20]!r} is shown"
    refusal = [line for line in ended.out.splitlines() if line.startswith("thresher: ")]
    return ("refused" if refusal else "right"), f"{payload}: {refusal[-1:]}"


# Rewards without merit, ten attempts or more per system.

GIVEN = {
    "passages": [
        {"title": "France", "text": "Paris is the capital of France and its largest city by far."},
        {"title": "Spain", "text": "Madrid is the capital of Spain."},
        {"title": "Italy", "text": "Rome is the capital of Italy."},
    ],
    "gold_indices": [1],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """One line of holes.jsonl.

    systems: the systems that it is tried on. written: a text of the policy, or (source, text) pairs. earns: the reward,
    by hand from the equation of the paper's file in rewards/papers; a number or a sum. by: the part of the formula that
    pays; "" if nothing is paid. more: further keys of the record. options: options of the system.
    """

    what: str
    systems: list[str]
    written: str | list[tuple[str, str]]
    earns: float | str
    by: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return float(eval(str(self.earns), {"exp": math.exp}))


def read_holes() -> list[Hole]:
    lines = Path(__file__).with_name("holes.jsonl").read_text(encoding="utf-8").splitlines()
    return [Hole(**json.loads(line)) for line in lines]


def holes(campaign: Campaign) -> Iterator[Outcome]:
    """Try all holes at any scale, because they take milliseconds."""
    for hole in read_holes():
        for system in hole.systems:
            found = reward_of(system, hole)
            verdict: Verdict = "right" if abs(found - hole.reward) <= 1e-12 else "wrong"
            yield Outcome(system, verdict, f"{hole.what}: earns {found}, by the formula {hole.earns}")


def reward_of(system: str, hole: Hole) -> float:
    written = [("policy", hole.written)] if isinstance(hole.written, str) else hole.written
    record = {
        "id": hole.what,
        "question": "What is the capital of France?",
        "golden_answers": ["Paris"],
        "entailment": 0.9,
        "segments": [{"source": source, "text": text} for source, text in written],
        **(GIVEN if system in ("arena", "eviomni", "lear") else {}),
        **hole.more,
    }
    return load_system(system, dict(hole.options)).reward(read_reward_input(record, hole.what)).reward


def paid(system: str) -> list[str]:
    """Return what a system's formula pays for without merit, one line of Markdown each, for docs/papers.md."""
    found = [hole for hole in read_holes() if hole.by and system in hole.systems]
    return [f"| {hole.what} | {hole.reward:.4g} | {hole.by} |" for hole in found]
