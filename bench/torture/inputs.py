"""Hostile inputs: a model, a tokenizer or a file that a person may be given, and a command that reads it.

What is no model must be refused, in seconds and in little memory. `passes` marks what may also be taken for what it is.
Models have no hashes here, as those from elsewhere have none.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.bench.torture.attack import Field, Tried, tried
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import ForkLimits
from thresher.bench.torture.world import eval_words, extract_words, index_words, place_recipe, sft_words, train_words

LEAST = 5
LIMITS = ForkLimits(seconds=30, memory=2 << 30)
HUGE = b"9" * 5000
NOT_READ = ("run*", "done*", "evaluation", "answers*", "warm", "hnsw*", "ivf*", "bm25*", "hybrid")  # of the world
Change = Callable[[Path], None]  # of a model folder, or of a file


def generate_words(model: Path, *more: str) -> list[str]:
    return ["generate", "--model", str(model), "--max-new-tokens", "8", *(more or ("--prompt", "Anna"))]


@dataclass(frozen=True, slots=True)
class HostileInput:
    """change: what is done to `file` of the copied world. words: of the command that reads it, from world and a free
    path."""

    kind: str
    what: str
    file: str
    change: Change
    words: Callable[[Path, Path], list[str]]
    passes: bool = False


def generated(*more: str) -> Callable[[Path, Path], list[str]]:
    return lambda at, out: generate_words(at / "model", *(word.format(at=at) for word in more))


GENERATED = generated()


# Of a model folder.


def _keys(name: str, **keys: Any) -> Change:
    """Set keys of one of its JSON files."""

    def change(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | keys))

    return change


def _huge_integer(name: str) -> Change:
    def change(model: Path) -> None:
        path = model / name
        text = path.read_bytes() if path.exists() else b'{"a": 1}'
        path.write_bytes(text.replace(b"{", b'{"huge": %s, ' % HUGE, 1))

    return change


def _weights(factor: float) -> Change:
    def change(model: Path) -> None:
        import numpy as np
        from safetensors.numpy import load_file, save_file

        path = model / "model.safetensors"
        with np.errstate(invalid="ignore"):
            save_file({name: (value * factor).astype("float32") for name, value in load_file(path).items()}, path)

    return change


def _pretokenizer(pattern: str) -> Change:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _keys("tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


def _latin_template(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes("{{ messages[0].content }} é".encode("latin-1"))


def _surrogate_map(model: Path) -> None:
    (model / "model.safetensors").rename(model / "part.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "\\ud800"}}')


JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "hashes.json")
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ROPES: dict[str, Any] = {"1e-300": 1e-300, "0": 0, "-1": -1.0, "NaN": float("nan"), "text": "big"}
TEMPLATES: dict[str, Any] = {
    "a list": [1],
    "an endless loop": "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
    "a huge power": "{{ 9 ** 9 ** 9 }}",
    "a look around": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}
CHAT = generated("--prompt", "Anna", "--chat")


def _of_models() -> Iterator[HostileInput]:
    def case(kind: str, what: str, change: Change, words: Any = GENERATED, passes: bool = False) -> HostileInput:
        return HostileInput(kind, what, "model", change, words, passes)

    for name in JSON_FILES:
        yield case("huge integers", name, _huge_integer(name), passes=name == "generation_config.json")
    for name in SIZES:
        yield case("sizes", f"{name} of 10^12", _keys("config.json", **{name: 10**12}))
    for layers in (10**5, 10**12):
        yield case("sizes", f"{layers:,} layers", _keys("config.json", num_hidden_layers=layers))
    for name, value in ROPES.items():
        yield case("weights and rope_theta", f"rope_theta {name}", _keys("config.json", rope_theta=value))
    for factor in (1e18, 1e38, float("nan"), float("inf")):
        for name, words in READERS.items():
            passes = math.isfinite(factor)  # float32 weights of any size are a model's
            yield case("weights and rope_theta", f"weights x {factor}, {name}", _weights(factor), words, passes)
    for pattern in ("(x+x+)+y", "(x|x|x)*y", "(?:x*)*y", "(x{0,99}){0,99}y"):
        for text in ("x" * 20_000, "x" * 40):
            words = generated("--prompt", text)
            yield case("tokenizers", f"{pattern} on {len(text)} letters", _pretokenizer(pattern), words, True)
    for name, value in TEMPLATES.items():
        yield case(
            "chat templates", name, _keys("tokenizer_config.json", chat_template=value), CHAT, name[0:6] == "a look"
        )
    yield case("chat templates", "in Latin-1", _latin_template, CHAT)
    yield case("what lies in a file's place", "a weight_map with half a character", _surrogate_map)


READERS: dict[str, Callable[[Path, Path], list[str]]] = {
    "generate": GENERATED,
    "extract": lambda at, out: extract_words(at, out.with_suffix(".jsonl")),
    "eval": eval_words,
    "rollout": lambda at, out: [
        *("rollout", "--recipe", f"{at}/recipe.toml", "--questions", f"{at}/dev.jsonl", "--out", f"{out}.jsonl")
    ],
    "train": train_words,
    "sft": sft_words,
}


# Of files: what lies where a file should, and who reads it.


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _link(target: str) -> Change:
    def change(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return change


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


PLACED: dict[str, Change] = {
    "a FIFO": _fifo,
    "/dev/zero": _link("/dev/zero"),
    "a link to nothing": _link("/nowhere"),
    "a link to itself": lambda path: _link(path.name)(path),
    "a folder": _folder,
}
FILES: dict[str, Callable[[Path, Path], list[str]]] = {
    "model/config.json": GENERATED,
    "model/hashes.json": GENERATED,
    "model/model.safetensors": GENERATED,
    "model/tokenizer.json": GENERATED,
    "prompt.txt": eval_words,
    "letters.py": eval_words,
    "recipe.toml": eval_words,
    "questions.jsonl": lambda at, out: ["data", "check", str(at / "questions.jsonl")],
    "corpus.jsonl": lambda at, out: index_words(at, out, "flat"),
    "transcripts.jsonl": sft_words,
    "scored.jsonl": lambda at, out: [
        *("score", "--system", "r1", "--transcripts", f"{at}/scored.jsonl", "--out", f"{out}.jsonl")
    ],
}
# What a shell may give as <(..), and is waited for.
PIPED = {"recipe.toml", "questions.jsonl", "corpus.jsonl", "transcripts.jsonl", "scored.jsonl"}


def _spaces(path: Path) -> None:
    path.write_bytes(b" " * 11_000_000 + b"a")


def _undecodable(path: Path) -> None:
    path.rename(os.fsdecode(os.fsencode(path.parent) + b"/q\xff.jsonl"))


def cases() -> list[HostileInput]:
    """All of them."""
    placed = [
        HostileInput("what lies in a file's place", f"{what} for {name}", name, change, words)
        for name, words in FILES.items()
        for what, change in PLACED.items()
        if what != "a FIFO" or name not in PIPED
    ]
    named = lambda at, out: ["data", "check", os.fsdecode(os.fsencode(at) + b"/q\xff.jsonl")]  # noqa: E731
    return [
        *_of_models(),
        *placed,
        HostileInput(
            "tokenizers",
            "11 million spaces",
            "prompt.txt",
            _spaces,
            generated("--prompt-file", "{at}/prompt.txt"),
            True,
        ),
        HostileInput(
            "what lies in a file's place", "a name that is no UTF-8", "questions.jsonl", _undecodable, named, True
        ),
    ]


def attack(field: Field) -> Iterator[Tried]:
    """Each of the cases once, at full scale, in any order."""
    draw, found = field.draw("inputs"), cases()
    for number, case in enumerate(draw.sample(found, min(len(found), field.count(len(found), LEAST)))):
        at, out = field.scratch / f"{number}", field.scratch / "out"
        shutil.copytree(field.at, at, ignore=shutil.ignore_patterns(*NOT_READ))
        (at / "model" / "hashes.json").unlink(missing_ok=True)
        place_recipe(at)
        case.change(at / case.file)
        ended = field.worker.play(case.words(at, out), LIMITS)
        yield tried(case.kind, case.what, ended, case.passes)
        clear(out)
        shutil.rmtree(at)
