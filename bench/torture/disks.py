"""Full and read-only disks: every command that writes, where it may not, or not so much.

    full        no file may grow beyond so many bytes (0, 40, 3,000, a byte less than each file of the result, and sizes
                that are drawn); the system's word is EFBIG, which the program treats as ENOSPC
    read-only   the folder of what it writes allows no writing, also to root, who gives up passing over modes
    a file      where the folder should be

A command ends in its sentence, or has room enough and comes to its result. Where it was refused the same command, with
`--resume` where it takes one, comes to the result once there is room, with nothing of the first attempt beside it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from thresher.bench.torture.attack import Field, Tried, Verdict, begun_again, content, fault_of, last_line
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import ForkLimits
from thresher.bench.torture.world import eval_words, extract_words, index_words, search_words, sft_words, train_words

SIZES = (0, 40, 3000)  # bytes that every command meets at full scale, beside drawn ones
DRAWN = 4  # of each command
LEAST = 3  # commands; every one from a tenth of the scale on
LARGEST = 80_000  # bytes; the world's largest file is a checkpoint's moments
LIMITS = ForkLimits(seconds=60)


@dataclass(frozen=True, slots=True)
class Writer:
    """A command that writes `out`."""

    words: Callable[[Path, Path], list[str]]
    out: str = "out"


def _index(kind: str) -> Writer:
    return Writer(lambda at, out: index_words(at, out, kind))


WRITERS = {
    "init": Writer(
        lambda at, out: ["init", "--config", f"{at}/config.json", "--tokenizer", f"{at}/model", "--out", str(out)]
    ),
    "train": Writer(lambda at, out: train_words(at, out, "--set", "run.steps=2")),
    "sft": Writer(lambda at, out: sft_words(at, out, "sft.save_every=3")),
    "sft of adapters": Writer(lambda at, out: sft_words(at, out, "sft.save_every=3", "lora.rank=2")),
    "eval": Writer(eval_words),
    "rollout": Writer(
        lambda at, out: [
            *("rollout", "--recipe", f"{at}/recipe.toml", "--questions", f"{at}/questions.jsonl", "--out", str(out))
        ],
        out="out.jsonl",
    ),
    "extract": Writer(extract_words, out="out.jsonl"),
    "score": Writer(
        lambda at, out: ["score", "--system", "search_r1", "--transcripts", f"{at}/scored.jsonl", "--out", str(out)],
        out="out.jsonl",
    ),
    "report": Writer(lambda at, out: ["report", f"{at}/run", "--out", str(out)]),
    "index build": _index("flat"),
    "index build, BM25": _index("bm25"),
    "index build, HNSW": _index("hnsw"),
    "index hybrid": Writer(lambda at, out: ["index", "hybrid", f"{at}/flat", f"{at}/bm25", "--out", str(out)]),
    "index search": Writer(lambda at, out: search_words(at, "flat", out), out="out.jsonl"),
    "data convert": Writer(
        lambda at, out: ["data", "convert", "--in", f"{at}/questions.jsonl", "--out", str(out)], out="out.jsonl"
    ),
    "data sft": Writer(
        lambda at, out: [
            *("data", "sft", "--kind", "closed-book", "--questions", f"{at}/questions.jsonl", "--out", str(out))
        ],
        out="out.jsonl",
    ),
    "data invent": Writer(lambda at, out: ["data", "invent", "--out", str(out)]),
}


def attack(field: Field) -> Iterator[Tried]:
    """Commands on every kind of disk; all of them but at the smallest scales."""
    draw = field.draw("disks")
    for name in draw.sample(list(WRITERS), min(len(WRITERS), field.count(10 * len(WRITERS), LEAST))):
        writer = WRITERS[name]
        expected, written = _with_room(field, writer)
        sizes = [*SIZES, *(size - 1 for size in written), *(draw.randrange(LARGEST) for _ in range(DRAWN))]
        for size in draw.sample(sizes, field.count(len(sizes), 1)):
            limits = replace(LIMITS, file_bytes=size)
            yield Tried(name, *try_disk(field, writer, limits, expected))
        yield Tried(name, *_read_only(field, writer))
        yield Tried(name, *_file_in_the_way(field, writer))


def try_disk(field: Field, writer: Writer, limits: ForkLimits, expected: dict[str, str]) -> tuple[Verdict, str]:
    """A command with little room, and again with enough; the verdict."""
    out = field.scratch / writer.out
    ended = field.worker.play(writer.words(field.at, out), limits)
    if fault := fault_of(ended):
        clear(out)
        return "wrong", f"at most {limits.file_bytes} bytes: {fault}"
    if ended.status == 2 and not re.search(r"thresher: .*/[^ ]+: ", last_line(ended)):
        clear(out)
        return "wrong", f"at most {limits.file_bytes} bytes: names no file: {last_line(ended)}"
    refused = ended.status == 2
    if refused:
        ended = field.worker.play(begun_again(writer.words(field.at, out), out), LIMITS)
        if ended.status != 0:
            clear(out)
            return "wrong", f"behind {limits.file_bytes} bytes, with room: {fault_of(ended) or last_line(ended)}"
    found, left = content(out), list(field.scratch.rglob("*.tmp"))
    clear(out)
    if left:
        return "wrong", f"at most {limits.file_bytes} bytes: {left[0].name} is left"
    if found != expected:
        return "wrong", f"at most {limits.file_bytes} bytes: another result without a word"
    return ("refused", "") if refused else ("right", "")


def _with_room(field: Field, writer: Writer) -> tuple[dict[str, str], list[int]]:
    """The result, and the sizes of its files."""
    out = field.scratch / writer.out
    ended = field.worker.play(writer.words(field.at, out), LIMITS)
    if ended.status != 0:
        raise RuntimeError(f"thresher {' '.join(writer.words(field.at, out))}: {ended.err}")
    found = content(out)
    files = [path for path in [out, *out.rglob("*")] if path.is_file()]
    sizes = sorted({path.stat().st_size for path in files} - {0})
    clear(out)
    return found, sizes


def _read_only(field: Field, writer: Writer) -> tuple[Verdict, str]:
    folder = field.scratch / "locked"
    folder.mkdir(mode=0o555)
    try:
        ended = field.worker.play(writer.words(field.at, folder / writer.out), replace(LIMITS, powerless=True))
        there = list(folder.iterdir())
    finally:
        folder.chmod(0o755)
        clear(folder)
    if fault := fault_of(ended):
        return "wrong", f"read-only folder: {fault}"
    if ended.status == 0 or there:
        return "wrong", f"read-only folder: status {ended.status}, holds {there}"
    named = str(folder) in last_line(ended)
    return "refused" if named else "wrong", f"read-only folder: {last_line(ended)}"


def _file_in_the_way(field: Field, writer: Writer) -> tuple[Verdict, str]:
    file = field.scratch / "file"
    file.write_text("in the way")
    ended = field.worker.play(writer.words(field.at, file / writer.out), LIMITS)
    kept = file.read_text() == "in the way"
    clear(file)
    if fault := fault_of(ended):
        return "wrong", f"a file for a folder: {fault}"
    named = ended.status == 2 and str(file) in last_line(ended) and kept
    return "refused" if named else "wrong", f"a file for a folder: {last_line(ended)}"
