"""Mutated files: one file that a command reads is damaged, and the command must say so or come to the right result.

A file is written in whole by somebody and changed by nobody: a disk, a copy or an editor has done it. Half of the
mutants keep the time of the whole file, as what a disk damages does. `OPEN` files are those that a person may write
anew and that no hash is known of; a mutant of theirs that is still of their format may be read as what it now says.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from thresher.bench.torture.attack import (
    NOT_COMPARED,
    Field,
    Tried,
    Verdict,
    content,
    different,
    fault_of,
    is_legible,
    judge,
    last_line,
    shuffled,
)
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import Ended, ForkLimits
from thresher.bench.torture.world import eval_words, extract_words, search_words, sft_words, train_words

MUTANTS, LEAST = 1000, 5
LIMITS = ForkLimits(seconds=60)


@dataclass(frozen=True, slots=True)
class Readable:
    """Files to be damaged, as patterns in the world, and the command that reads them. words: from the world and a free
    path to a command. result: what it writes, in the world; None: the free path. open: see above. pages: its pages are
    compared too. spoken: its result is what it says. anyway: behind which damages
    `--unverified` must read what was refused."""

    files: tuple[str, ...]
    words: Callable[[Path, Path], list[str]]
    result: str | None = None
    open: bool = False
    pages: bool = False
    spoken: bool = False
    anyway: Callable[[str], bool] | None = None


def _resumed(at: Path, out: Path) -> list[str]:
    return train_words(at, at / "run", "--resume")


def _warm(at: Path, out: Path) -> list[str]:
    return [*eval_words(at, out), "--model", str(at / "warm"), "--limit", "4"]


def _raw(at: Path, out: Path) -> list[str]:
    return [*eval_words(at, out), "--limit", "4"]


def _sft(at: Path, out: Path) -> list[str]:
    return sft_words(at, out)


def _score(at: Path, out: Path) -> list[str]:
    return ["score", "--system", "search_r1", "--transcripts", str(at / "scored.jsonl"), "--out", str(out)]


def _search(index: str) -> Callable[[Path, Path], list[str]]:
    return lambda at, out: search_words(at, index, out)


def _continued(words: Callable[[Path, Path], list[str]], name: str) -> Callable[[Path, Path], list[str]]:
    return lambda at, out: words(at, at / name)


LAST = "run/checkpoints/step_000002/"
TARGETS = {
    "checkpoint: weights": Readable((f"{LAST}model.safetensors",), _resumed, "run"),
    "checkpoint: moments": Readable((f"{LAST}optimizer.safetensors",), _resumed, "run"),
    "checkpoint: state, hashes": Readable((f"{LAST}state.json", f"{LAST}hashes.json"), _resumed, "run"),
    "checkpoint: tokenizer, config": Readable((f"{LAST}tokenizer.json", f"{LAST}*config.json"), _resumed, "run"),
    "run: recipe.toml": Readable(("run/recipe.toml",), _resumed, "run"),
    "run: metrics.jsonl": Readable(("run/metrics.jsonl",), _resumed, "run"),
    "model: weights": Readable(("warm/model.safetensors",), _warm),
    "model of init: weights": Readable(("model/model.safetensors",), _raw),
    "model: tokenizer, config, hashes": Readable(("warm/*.json",), _warm),
    "index: vectors": Readable(("flat/vectors.npy",), _search("flat")),
    "index: vectors of a graph, of lists": Readable(("hnsw/vectors.npy",), _search("hnsw")),
    "index: FAISS structure, graph": Readable(("hnsw/index.faiss",), _search("hnsw")),
    "index: FAISS structure, lists": Readable(("ivf/index.faiss",), _search("ivf")),
    "index: BM25 arrays": Readable(("bm25/scores/*.npy", "bm25/scores/*.json"), _search("bm25")),
    "index: manifest, encoder, hashes": Readable(("flat/*.json", "bm25/*.json", "hybrid/*.json"), _search("hybrid")),
    "corpus of an index": Readable(("corpus.jsonl",), _search("flat")),
    "evaluation: generated.jsonl": Readable(
        ("evaluation/generated.jsonl", "evaluation/settings.json"), _continued(eval_words, "evaluation"), "evaluation"
    ),
    "extraction: evidence.jsonl": Readable(
        ("evidence.jsonl", "evidence.json"), _continued(extract_words, "evidence.jsonl"), "evidence.jsonl"
    ),
    "questions": Readable(("questions.jsonl",), _raw, open=True),
    "transcripts": Readable(("transcripts.jsonl",), _sft, open=True),
    "scored transcripts": Readable(("scored.jsonl",), _score, open=True),
    "recipe, prompt, system file": Readable(("recipe.toml", "prompt.txt", "letters.py"), _raw, open=True),
}


def attack(field: Field) -> Iterator[Tried]:
    """Every kind of file, by every kind of damage."""
    yield from damage_all(field, field.draw("files"), TARGETS, list(DAMAGES), field.count(MUTANTS, LEAST))


def damage_all(
    field: Field, draw: Random, targets: Mapping[str, Readable], damages: Sequence[str], count: int
) -> Iterator[Tried]:
    """So many attempts on the targets, each as often as any other but for one, by damages that are drawn."""
    pristine = field.scratch / "pristine"
    shutil.copytree(field.at, pristine)
    chosen = shuffled(draw, list(targets), count)
    expected = _unharmed(field, pristine, {kind: targets[kind] for kind in dict.fromkeys(chosen)})
    for kind in chosen:
        target = targets[kind]
        path = draw.choice(sorted(path for name in target.files for path in field.at.glob(name)))
        damage = draw.choice(damages)
        yield Tried(kind, *try_mutant(field, pristine, target, path, damage, draw, expected[kind]))
    again = _unharmed(field, pristine, {kind: targets[kind] for kind in expected})
    if changed := [kind for kind in expected if again[kind] != expected[kind]]:
        raise RuntimeError(f"the world is not whole again behind the attempts, so they prove nothing: {changed}")


def try_mutant(
    field: Field,
    pristine: Path,
    target: Readable,
    path: Path,
    damage: str,
    draw: Random,
    expected: dict[str, str],
) -> tuple[Verdict, str]:
    """One damaged file and the command that reads it; the verdict. The world is whole again behind it."""
    name = path.relative_to(field.at)
    before = path.stat()
    said = (DAMAGES | RECORD_DAMAGES)[damage](path, pristine / name, draw)
    if path.exists() and draw.random() < 0.5:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    out = field.scratch / "out"
    ended = field.worker.play(target.words(field.at, out), LIMITS)
    found = _found(field, target, out, ended)
    verdict, word = judge(
        ended, lambda: found == expected, lambda: target.open and (damage == "gone" or is_legible(path))
    )
    if verdict == "wrong":
        word += f" ({', '.join(different(found, expected))})"
    clear(out)
    if verdict == "refused" and target.anyway is not None and target.anyway(damage):
        verdict, word = _read_anyway(field, target, out, word)
        clear(out)
    restore(field.at, pristine, {str(name), target.result or str(name)})
    if left := different(content(field.at), content(pristine)):  # or what comes next would prove nothing
        raise RuntimeError(f"{name}: the world is not whole again: {', '.join(left)}")
    return verdict, f"{name}, {damage} {said}: {word}"


def _read_anyway(field: Field, target: Readable, out: Path, refusal: str) -> tuple[Verdict, str]:
    """What `--unverified` makes of records that were refused: it reads them, or they are refused for what they say."""
    ended = field.worker.play([*target.words(field.at, out), "--unverified"], LIMITS)
    fault = fault_of(ended)
    if fault is None and ended.status == 2 and "--unverified" in last_line(ended):
        fault = f"refused all the same: {last_line(ended)}"
    return ("wrong", f"{refusal}; with --unverified: {fault}") if fault else ("refused", refusal)


def _unharmed(field: Field, pristine: Path, targets: Mapping[str, Readable]) -> dict[str, dict[str, str]]:
    """What every target's command comes to where nothing is damaged."""
    found: dict[str, dict[str, str]] = {}
    for kind, target in targets.items():
        same = next((name for name in found if targets[name].words is target.words), None)
        found[kind] = _result(field, pristine, target) if same is None else found[same]
    return found


def _result(field: Field, pristine: Path, target: Readable) -> dict[str, str]:
    out = field.scratch / "out"
    ended = field.worker.play(target.words(field.at, out), LIMITS)
    if ended.status != 0:
        raise RuntimeError(f"thresher {' '.join(target.words(field.at, out))}: {ended.err}")
    found = _found(field, target, out, ended)
    clear(out)
    restore(field.at, pristine, {target.result} if target.result else set())
    return found


def _found(field: Field, target: Readable, out: Path, ended: Ended) -> dict[str, str]:
    """What a command came to."""
    if target.spoken:
        return {"said": ended.out}
    but = () if target.pages else NOT_COMPARED
    written = [out, *out.parent.glob(f"{out.name}.*")] if target.result is None else [field.at / target.result]
    return {name: digest for path in written for name, digest in content(path, but).items()}


def restore(at: Path, pristine: Path, names: set[str]) -> None:
    """Puts back what lies at the top of the world and holds one of `names`, and what begins with its stem."""
    for top in {name.split("/")[0] for name in names}:
        stem = top.split(".")[0]
        for path in {at / top, *at.glob(f"{stem}.*"), *at.glob(f".{stem}*")}:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in {pristine / top, *pristine.glob(f"{stem}.*")}:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, at / path.name)


# Damages: each changes a file for good, and says how it may be done again.


def _flip(path: Path, count: int, draw: Random) -> str:
    data = bytearray(path.read_bytes())
    bits = [draw.randrange(8 * len(data)) for _ in range(count)]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"of bits {bits[:3]}{' ..' if count > 3 else ''}"


def _one_bit(path: Path, whole: Path, draw: Random) -> str:
    return _flip(path, 1, draw)


def _bits(path: Path, whole: Path, draw: Random) -> str:
    return _flip(path, draw.randint(2, 40), draw)


def _cut(path: Path, whole: Path, draw: Random) -> str:
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"to {size} bytes"


def _empty(path: Path, whole: Path, draw: Random) -> str:
    path.write_bytes(b"")
    return ""


def _double(path: Path, whole: Path, draw: Random) -> str:
    path.write_bytes(path.read_bytes() * 2)
    return ""


def _swap(path: Path, whole: Path, draw: Random) -> str:
    data = path.read_bytes()
    a, b, c = sorted(draw.randrange(len(data) + 1) for _ in range(3))
    path.write_bytes(data[:a] + data[b:c] + data[a:b] + data[c:])
    return f"bytes {a}:{b} and {b}:{c}"


def _zero(path: Path, whole: Path, draw: Random) -> str:
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((8, 64, 4096)))
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    return f"bytes {begin}:{end}"


def _other(path: Path, whole: Path, draw: Random) -> str:
    """The file of the same name of another run, index or corpus of the same shape; two parts swapped where there is
    none."""
    top, *rest = path.relative_to(_world_of(path)).parts
    stem, dot, suffix = top.partition(".")
    other = _world_of(path) / f"{stem}2{dot}{suffix}" / "/".join(rest)
    if not other.is_file():
        return _swap(path, whole, draw)
    shutil.copy(other, path)
    return f"by that of {stem}2"


def _world_of(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "recipe.toml").exists() and (parent / "flat2").exists())


def _character(path: Path, whole: Path, draw: Random) -> str:
    """What a flipped bit may do to text without harm to its form: a digit becomes another, or a letter does."""
    data = bytearray(path.read_bytes())
    places = [place for place, byte in enumerate(data) if chr(byte).isalnum() and byte < 128]
    if not places:
        return _flip(path, 1, draw)
    place = draw.choice(places)
    same = "0123456789" if chr(data[place]).isdigit() else "abcdefghijklmnopqrstuvwxyz"
    data[place] = ord(draw.choice([letter for letter in same if letter != chr(data[place])]))
    path.write_bytes(data)
    return f"at byte {place}"


def _lines(path: Path, draw: Random, change: Callable[[bytes], list[bytes]]) -> str:
    """Put what `change` makes of a line in its place; of a file without lines, change a character."""
    lines = path.read_bytes().splitlines(keepends=True)
    if path.suffix != ".jsonl" or not lines:
        return _character(path, path, draw)
    number = draw.randrange(len(lines))
    lines[number : number + 1] = change(lines[number])
    path.write_bytes(b"".join(lines))
    return f"line {number + 1}"


def _line_lost(path: Path, whole: Path, draw: Random) -> str:
    return _lines(path, draw, lambda line: [])


def _line_doubled(path: Path, whole: Path, draw: Random) -> str:
    return _lines(path, draw, lambda line: [line, line])


def _number_changed(path: Path, whole: Path, draw: Random) -> str:
    """One number of a record, in JSON that is as whole as before."""
    text = path.read_text(encoding="utf-8") if path.suffix in (".json", ".jsonl") else ""
    if not (found := list(re.finditer(r"(?<=: )-?[0-9]+(\.[0-9]+)?(?=[,}\n])", text))):
        return _character(path, whole, draw)
    one = draw.choice(found)
    value = "1.5" if one[1] else str(int(one[0]) + 1)
    path.write_text(text[: one.start()] + value + text[one.end() :], encoding="utf-8")
    return f"at {one.start()}: {one[0]} is now {value}"


def _gone(path: Path, whole: Path, draw: Random) -> str:
    path.unlink()
    return ""


RECORD_DAMAGES: dict[str, Callable[[Path, Path, Random], str]] = {
    "a line lost": _line_lost,
    "a line doubled": _line_doubled,
    "a number changed": _number_changed,
}
DAMAGES: dict[str, Callable[[Path, Path, Random], str]] = {
    "one bit flipped": _one_bit,
    "bits flipped": _bits,
    "a character changed": _character,
    "cut short": _cut,
    "emptied": _empty,
    "doubled": _double,
    "parts swapped": _swap,
    "zeroed": _zero,
    "replaced": _other,
    "gone": _gone,
}
