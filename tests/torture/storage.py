"""Attacks on files: kills, damaged files, changed records, full disks, two writers, deleted files.

A signal is sent at a random moment within the time of the unbroken command, to one rank or to all. A third of the
killed commands are killed again while they resume. In the end they must reach the result of the unbroken command.
"""

import json
import os
import re
import shutil
import signal
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from torture import world
from torture.harness import (
    ASYNC,
    RANKS,
    TRACEBACK,
    Campaign,
    Ended,
    Limits,
    Outcome,
    Verdict,
    content,
    different,
    judge,
    refused,
    remove,
)
from torture.world import (
    EVAL,
    EXTRACT,
    MODES,
    ROLLOUT,
    SFT,
    TRAIN,
    build_words,
    score_words,
    search_words,
    train_words,
    with_settings,
)

LIMITS = Limits(seconds=90)

# Kills.

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
BIG = "big.jsonl"  # a corpus whose index takes a while
KILLED = {
    **{f"train, {mode}".removesuffix(", "): train_words(mode) for mode in MODES},
    "sft": with_settings(SFT, "sft.steps=30", "sft.save_every=4"),
    "sft, adapters and restarts": with_settings(
        *(SFT, "sft.steps=12", "sft.save_every=4", "lora.rank=2", "sft.held_out=0.2"),
        *("sft.stop_at_copy_accuracy=1", "sft.gate_every=5", "sft.max_restarts=1"),
    ),
    "eval": EVAL,
    "extract": EXTRACT,
    "index build, flat": build_words("flat", BIG),
    "index build, HNSW": build_words("hnsw", BIG),
    "index build, BM25": build_words("bm25", BIG),
}
SELDOM = "train, one step of asynchrony"  # two ranks, and ten seconds per attempt


def kills(campaign: Campaign) -> Iterator[Outcome]:
    draw, words = Random(0), [f"w{number}" for number in range(500)]
    texts = [" ".join(draw.choices(words, k=12)) for _ in range(4000)]
    passages = [{"id": f"b{n}", "title": f"t{n}", "text": text} for n, text in enumerate(texts)]
    world.write_lines(campaign.world / BIG, passages)
    whole: dict[str, tuple[Ended, dict[str, str]]] = {}
    often = campaign.each([name for name in KILLED if name != SELDOM], campaign.count(480, 3))
    for name in [*often, *[SELDOM] * campaign.count(20, 1)]:
        if name not in whole:
            whole[name] = campaign.unharmed(KILLED[name])
        ended, expected = whole[name]
        verdict, reason = kill_and_resume(campaign, KILLED[name], ended.seconds, expected)
        campaign.clear()
        yield Outcome(name, verdict, reason)


def kill_and_resume(campaign: Campaign, words: str, seconds: float, expected: Mapping[str, str]) -> tuple[Verdict, str]:
    """Kill a command that takes `seconds`, start it again, and compare its result with `expected`."""
    said: list[str] = []

    def strike() -> tuple[Ended, str | None]:
        """Send a signal; return how the command ended, and what is wrong with that."""
        number, moment = campaign.draw.choice(SIGNALS), campaign.draw.uniform(0, seconds)
        rank = campaign.draw.choice((None, *range(RANKS))) if ASYNC in words else None
        of = "" if rank is None else f" of rank {rank}"
        said.append(f"{number.name}{of} after {moment:.3f} s of {seconds:.3f}")
        started = campaign.start(campaign.words_again(words))
        until = time.monotonic() + moment
        started.wait_until(lambda: time.monotonic() > until)
        started.kill(number, rank)
        ended = started.wait()
        if TRACEBACK not in ended.err and (ended.signal == number or ended.status in (0, STATUS.get(number))):
            return ended, None
        return ended, ended.fault or f"status {ended.status} on {number.name}: {ended.last_line}"

    for _ in range(50):
        campaign.clear()
        said.clear()
        ended, fault = strike()
        if ended.status != 0:
            break
    else:
        return "wrong", "no kill came before the end in 50 attempts"
    if fault is None and campaign.draw.random() < 1 / 3:
        ended, fault = strike()
        if ended.status == 2:  # it had finished
            fault = None
    if fault is None:
        ended = campaign.play(campaign.words_again(words))
        done = ended.status == 2 and ("exists already" in ended.err or "is finished" in ended.err)
        fault = ended.fault or (None if ended.status == 0 or done else ended.last_line)
    if fault is None and (differ := different(content(campaign.out.parent), expected)):
        fault = f"{differ} differ from the unbroken command's"
    return ("wrong", f"{', '.join(said)}: {fault}") if fault else ("right", "")


# Damaged files, as changed by a disk, a copy or an editor. Half of them keep the time of the intact file.


@dataclass(frozen=True, slots=True)
class Target:
    """A command, and the files of the world that are damaged before it runs.

    result: its output, in the world; None: the free path. open: a person may rewrite the file, so a well-formed damaged
    file may be read. pages: its HTML pages are compared too. spoken: its result is its stdout. unverified: the
    damages after which `--unverified` must read what was refused.
    """

    words: str
    files: tuple[str, ...]
    result: str | None = None
    open: bool = False
    pages: bool = False
    spoken: bool = False
    unverified: Collection[str] = ()


DAMAGES = (
    *("one bit flipped", "bits flipped", "a character changed", "cut short", "emptied", "doubled", "parts swapped"),
    *("zeroed", "replaced", "gone"),
)
RECORD_DAMAGES = ("a line lost", "a line doubled", "a number changed")


def damage(root: Path, path: Path, name: str, draw: Random) -> str:
    """Damage a file of the world; return a description of the damage.

    "replaced" puts the file of the same name of another run, index or corpus of the same shape in its place, or swaps
    two parts if there is none. In a file without lines or numbers, damage to these changes a character instead: a digit
    or a letter becomes another, so that text keeps its form.
    """
    if name == "gone":
        path.unlink()
        return ""
    data = path.read_bytes()
    top, *rest = path.relative_to(root).parts
    stem, dot, suffix = top.partition(".")
    other = root.joinpath(f"{stem}2{dot}{suffix}", *rest)
    begin = draw.randrange(len(data))
    numbers = (
        list(re.finditer(rb"(?<=: )-?[0-9]+(\.[0-9]+)?(?=[,}\n])", data)) if path.suffix.startswith(".json") else []
    )
    letters = [place for place, byte in enumerate(data) if chr(byte).isalnum() and byte < 128]
    match name:
        case "cut short":
            changed = data[:begin]
        case "emptied":
            changed = b""
        case "doubled":
            changed = data * 2
        case "zeroed":
            end = min(len(data), begin + draw.choice((8, 64, 4096)))
            changed = data[:begin] + bytes(end - begin) + data[end:]
        case "replaced" if other.is_file():
            changed = other.read_bytes()
        case "replaced" | "parts swapped":
            a, b, c = sorted(draw.randrange(len(data) + 1) for _ in range(3))
            changed = data[:a] + data[b:c] + data[a:b] + data[c:]
        case "a line lost" | "a line doubled" if path.suffix == ".jsonl":
            lines = data.splitlines(keepends=True)
            number = draw.randrange(len(lines))
            lines[number : number + 1] = [lines[number]] * (2 if name == "a line doubled" else 0)
            changed = b"".join(lines)
        case "a number changed" if numbers:
            one = draw.choice(numbers)
            value = b"1.5" if one[1] else str(int(one[0]) + 1).encode()
            changed = data[: one.start()] + value + data[one.end() :]
        case _ if letters and "flipped" not in name:
            place = draw.choice(letters)
            kind = "0123456789" if chr(data[place]).isdigit() else "abcdefghijklmnopqrstuvwxyz"
            letter = draw.choice([letter for letter in kind if letter != chr(data[place])])
            changed = data[:place] + letter.encode() + data[place + 1 :]
        case _:
            flipped = bytearray(data)
            for _ in range(draw.randint(2, 40) if name == "bits flipped" else 1):
                bit = draw.randrange(8 * len(data))
                flipped[bit // 8] ^= 1 << bit % 8
            changed = bytes(flipped)
    path.write_bytes(changed)
    same = next(
        (n for n, (a, b) in enumerate(zip(data, changed, strict=False)) if a != b), min(len(data), len(changed))
    )
    return f"from byte {same}: {data[same : same + 20]!r}, now {changed[same : same + 20]!r}"


LAST = "run/checkpoints/step_000002/"
RESUME = "train {at}/recipe.toml --out {at}/run --resume"
FEW = f"{EVAL} --limit 4"
WARM = f"{FEW} --model {{at}}/warm"
HYBRID = ("flat/*.json", "bm25/*.json", "hybrid/*.json")
TARGETS = {
    "checkpoint: weights": Target(RESUME, (f"{LAST}model.safetensors",), "run"),
    "checkpoint: moments": Target(RESUME, (f"{LAST}optimizer.safetensors",), "run"),
    "checkpoint: state, hashes": Target(RESUME, (f"{LAST}state.json", f"{LAST}hashes.json"), "run"),
    "checkpoint: tokenizer, config": Target(RESUME, (f"{LAST}tokenizer.json", f"{LAST}*config.json"), "run"),
    "checkpoint: groups of partial rollouts": Target(
        train_words("partial rollouts", RESUME.replace("/run", "/partial")),
        (f"{LAST.replace('run', 'partial')}unfinished.jsonl",),
        "partial",
    ),
    "run: recipe.toml": Target(RESUME, ("run/recipe.toml",), "run"),
    "run: metrics.jsonl": Target(RESUME, ("run/metrics.jsonl",), "run"),
    "model: weights": Target(WARM, ("warm/model.safetensors",)),
    "model of init: weights": Target(FEW, ("model/model.safetensors",)),
    "model: tokenizer, config, hashes": Target(WARM, ("warm/*.json",)),
    "index: vectors": Target(search_words("flat"), ("flat/vectors.npy",)),
    "index: vectors of a graph, of lists": Target(search_words("hnsw"), ("hnsw/vectors.npy",)),
    "index: FAISS structure, graph": Target(search_words("hnsw"), ("hnsw/index.faiss",)),
    "index: FAISS structure, lists": Target(search_words("ivf"), ("ivf/index.faiss",)),
    "index: BM25 arrays": Target(search_words("bm25"), ("bm25/scores/*.npy", "bm25/scores/*.json")),
    "index: manifest, encoder, hashes": Target(search_words("hybrid"), HYBRID),
    "corpus of an index": Target(search_words("flat"), ("corpus.jsonl",)),
    "evaluation: generated.jsonl": Target(
        EVAL.format(at="{at}", out="{at}/evaluation"),
        ("evaluation/generated.jsonl", "evaluation/settings.json"),
        "evaluation",
    ),
    "extraction: evidence.jsonl": Target(
        EXTRACT.format(at="{at}", out="{at}/evidence"), ("evidence.jsonl", "evidence.json"), "evidence.jsonl"
    ),
    "questions": Target(FEW, ("questions.jsonl",), open=True),
    "transcripts": Target(SFT, ("transcripts.jsonl",), open=True),
    "scored transcripts": Target(score_words("scored.jsonl"), ("scored.jsonl",), open=True),
    "recipe, prompt, system file": Target(FEW, ("recipe.toml", "prompt.txt", "letters.py"), open=True),
}

# Stored records: kind -> its file, and its readers.
STEP = "trajectories/step_000002"
STORED = {
    "metrics": ("done/metrics.jsonl", ("report", "report of two", "watch")),
    "trajectories": (f"done/{STEP}.jsonl", ("report", "report --tokens", "score of a run's")),
    "token statistics": (f"done/{STEP}.safetensors", ("report", "report --tokens")),
    "evaluations": ("done/evaluations/step_000002.jsonl", ("report", "report of two")),
    "summary": ("done/summary.json", ("report", "report of two", "watch")),
    "trajectories of eval": ("answers/trajectories.jsonl", ("compare", "score")),
    "measures of eval": ("answers/metrics.json", ("compare",)),
}
READERS = {
    "report": "report {at}/done --out {out}",
    "report --tokens": "report {at}/done --tokens 2 --out {out}.html",
    "report of two": "report {at}/done {at}/done2 --out {out}.html",
    "watch": "watch {at}/done --tty",
    "compare": "compare {at}/answers {at}/answers2 --out {out}",
    "score": score_words("answers/trajectories.jsonl", "{at}/letters.py"),
    "score of a run's": score_words(f"done/{STEP}.jsonl", "{at}/letters.py"),
}
STORED_TARGETS = {
    # A resume reads the metrics only, and has --resume-from instead of --unverified.
    "metrics, train --resume": Target(RESUME.replace("/run", "/done"), ("done/metrics.jsonl",), "done")
} | {
    f"{kind}, {reader}": Target(
        READERS[reader], (file,), pages=True, spoken=reader == "watch", unverified=RECORD_DAMAGES
    )
    for kind, (file, readers) in STORED.items()
    for reader in readers
}
STORED_DAMAGES = (*RECORD_DAMAGES, "one bit flipped", "a character changed", "cut short")


def files(campaign: Campaign) -> Iterator[Outcome]:
    yield from damage_all(campaign, TARGETS, DAMAGES, campaign.count(1000, 5))


def stored(campaign: Campaign) -> Iterator[Outcome]:
    for seed, end in (("0", ""), ("1", "2")):
        run, answers = with_settings(TRAIN, f"run.seed={seed}"), f"{EVAL} --seed {seed} --temperature 1"
        campaign.must(campaign.words(run, campaign.world / f"done{end}"))
        campaign.must(campaign.words(answers, campaign.world / f"answers{end}"))
    yield from damage_all(campaign, STORED_TARGETS, STORED_DAMAGES, campaign.count(150, 2))


def damage_all(
    campaign: Campaign, targets: Mapping[str, Target], damages: Collection[str], count: int
) -> Iterator[Outcome]:
    """Damage `count` files, spread evenly over the kinds of target."""
    pristine = campaign.scratch / "pristine"
    shutil.copytree(campaign.world, pristine)

    def unharmed() -> dict[str, dict[str, str]]:
        """Return the result of every chosen command without damage."""
        found: dict[tuple[str, bool], dict[str, str]] = {}
        for target in map(targets.__getitem__, dict.fromkeys(chosen)):
            if (key := (target.words, target.pages)) not in found:
                found[key] = result_of(campaign, target, campaign.must(target.words, LIMITS))
                campaign.clear()
                restore(campaign.world, pristine, target.result or "")
        return {kind: found[targets[kind].words, targets[kind].pages] for kind in chosen}

    chosen = campaign.each(targets, count)
    expected = unharmed()
    for kind in chosen:
        path = campaign.draw.choice(sorted(path for name in targets[kind].files for path in campaign.world.glob(name)))
        one = campaign.draw.choice(list(damages))
        yield Outcome(kind, *try_damage(campaign, pristine, targets[kind], path, one, expected[kind]))
    if unharmed() != expected:
        raise RuntimeError("the world is not whole again behind the attempts, so they prove nothing")
    remove(pristine)


def try_damage(
    campaign: Campaign, pristine: Path, target: Target, path: Path, name: str, expected: dict[str, str]
) -> tuple[Verdict, str]:
    """Damage one file, run the command that reads it, and restore the world; return the verdict."""
    file, before = path.relative_to(campaign.world), path.stat()
    how = damage(campaign.world, path, name, campaign.draw)
    if path.exists() and campaign.draw.random() < 0.5:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    ended = campaign.play(target.words, LIMITS)
    found = result_of(campaign, target, ended)
    well_formed = target.open and (name == "gone" or is_well_formed(path))
    verdict, reason = judge(ended, found == expected, well_formed)
    if verdict == "wrong":
        reason += f" ({different(found, expected)})"
    campaign.clear()
    if verdict == "refused" and name in target.unverified:
        ended = campaign.play(f"{target.words} --unverified", LIMITS)
        fault = ended.fault
        if fault is None and ended.status == 2 and "--unverified" in ended.last_line:
            fault = f"refused all the same: {ended.last_line}"
        if fault:
            verdict, reason = "wrong", f"{reason}; with --unverified: {fault}"
        campaign.clear()
    restore(campaign.world, pristine, str(file), target.result or "")
    if left := different(content(campaign.world), content(pristine)):
        raise RuntimeError(f"{file}: the world is not whole again: {left}")
    return verdict, f"{file}, {name} {how}: {reason}"


def result_of(campaign: Campaign, target: Target, ended: Ended) -> dict[str, str]:
    if target.spoken:
        return {"said": ended.out}
    if target.result is None:
        return content(campaign.out.parent, pages=target.pages)
    return content(campaign.world / target.result)


def is_well_formed(path: Path) -> bool:
    """Return whether Python's own readers accept the file as its format."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix == ".jsonl":
            return all(isinstance(json.loads(line), dict) for line in text.split("\n") if line.strip())
        elif path.suffix == ".py":
            compile(text, path.name, "exec")
    except (ValueError, SyntaxError, OSError):
        return False
    return True


def restore(root: Path, pristine: Path, *names: str) -> None:
    """Restore the entries at the top of the world that hold `names`, and all entries with the same stems."""
    for stem in {name.split("/")[0].split(".")[0] for name in names if name}:
        for pattern in (stem, f"{stem}.*", f".{stem}*"):
            for path in list(root.glob(pattern)):
                remove(path)
            for path in pristine.glob(pattern):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, root / path.name)


# Disks: a limit on the size of files; a folder without write permission; a file in the place of a folder.

SIZES = (0, 40, 3000)  # bytes that every command gets at full scale, next to a byte less than each file and random ones
WRITERS = {
    "init": "init --config {at}/config.json --tokenizer {at}/model --out {out}",
    "train": with_settings(TRAIN, "run.steps=2"),
    "train, partial rollouts": with_settings(train_words("partial rollouts"), "run.steps=2"),
    "sft": with_settings(SFT, "sft.save_every=3"),
    "sft of adapters": with_settings(SFT, "sft.save_every=3", "lora.rank=2"),
    "eval": EVAL,
    "rollout": ROLLOUT,
    "extract": EXTRACT,
    "score": score_words("scored.jsonl"),
    "report": "report {at}/run --out {out}",
    "index build": build_words("flat"),
    "index build, BM25": build_words("bm25"),
    "index build, HNSW": build_words("hnsw"),
    "index hybrid": "index hybrid {at}/flat {at}/bm25 --out {out}",
    "index search": search_words("flat"),
    "data convert": "data convert --in {at}/questions.jsonl --out {out}.jsonl",
    "data sft": "data sft --kind closed-book --questions {at}/questions.jsonl --out {out}.jsonl",
    "data invent": "data invent --out {out}",
}


def disks(campaign: Campaign) -> Iterator[Outcome]:
    for name in campaign.some(WRITERS, 3, times=10):
        campaign.must(WRITERS[name], LIMITS)
        expected = content(campaign.out.parent)
        written = {path.stat().st_size for path in campaign.out.parent.rglob("*") if path.is_file()} - {0}
        campaign.clear()
        sizes = [*SIZES, *(size - 1 for size in sorted(written)), *(campaign.draw.randrange(80_000) for _ in range(4))]
        for size in campaign.draw.sample(sizes, campaign.count(len(sizes), 1)):
            yield Outcome(name, *try_disk(campaign, WRITERS[name], size, expected))
        for what in ("a read-only folder", "a file for a folder"):
            yield Outcome(name, *try_place(campaign, WRITERS[name], what))


def try_disk(campaign: Campaign, words: str, size: int, expected: dict[str, str]) -> tuple[Verdict, str]:
    """Run a command with files of at most `size` bytes, and again without the limit; return the verdict."""
    ended = campaign.play(words, replace(LIMITS, file_bytes=size))
    fault, verdict = ended.fault, judge(ended, right=True)[0]
    if ended.status == 2 and not re.search(r"thresher: .*/[^ ]+: ", ended.last_line):
        fault = fault or f"names no file: {ended.last_line}"
    if fault is None and ended.status == 2:
        ended = campaign.play(campaign.words_again(words), LIMITS)
        fault = None if ended.status == 0 else f"then, with room: {ended.fault or ended.last_line}"
    if fault is None and (left := campaign.unfinished()):
        fault = f"{left[0]} is left"
    if fault is None and content(campaign.out.parent) != expected:
        fault = "another result without a word"
    campaign.clear()
    return ("wrong", f"at most {size} bytes: {fault}") if fault else (verdict, "")


def try_place(campaign: Campaign, words: str, what: str) -> tuple[Verdict, str]:
    """Run a command in a read-only folder, or with a file in the folder's place; it must be refused."""
    place = campaign.scratch / "place"
    if what == "a read-only folder":
        place.mkdir(mode=0o555)
    else:
        place.write_text("in the way")
    ended = campaign.play(campaign.words(words, place / "out"), replace(LIMITS, unprivileged=True))
    whole = not list(place.iterdir()) if place.is_dir() else place.read_text() == "in the way"
    place.chmod(0o755)
    remove(place)
    right = ended.fault is None and ended.status == 2 and str(place) in ended.last_line and whole
    return "refused" if right else "wrong", f"{what}: {ended.fault or ended.last_line}"


# Mishaps: a system's file that ends the process, files that are deleted during a run, two processes with one output.

REWARDS = {
    "exits with 0": "raise SystemExit(0)",
    "exits with 3": "import sys; sys.exit(3)",
    "raises what is no Exception": "raise GeneratorExit",
    "raises": "raise KeyError('x')",
    "is NaN": "return RewardResult(float('nan'), answer_measures(None, attempt.golds), None)",
    "is None": "return None",
    "is endless recursion": "return reward(attempt)",
}


def mishaps(campaign: Campaign) -> Iterator[Outcome]:
    cases = [("    text = b", f"its reward {name}", REWARDS[name]) for name in campaign.some(REWARDS, 1)]
    text, file = (campaign.world / "letters.py").read_text(), campaign.scratch / "system.py"
    for line, what, put in [*cases, ("    yield Generate(", "its episode exits", "raise SystemExit(0)")]:
        file.write_text(text.replace(line, f"    {put}\n{line}", 1))
        ended = campaign.play(with_settings(TRAIN, f"system.name={file}"), LIMITS)
        campaign.clear()
        yield refused("a system's file", what, ended)
    for name in campaign.some(("metrics.jsonl", "checkpoints"), 1):
        yield try_deletion(campaign, name)
    for name in campaign.some(WRITERS, 1):
        verdict, reason = two_at_once(campaign, WRITERS[name])
        campaign.clear()
        yield Outcome("two at once", verdict, f"{name}: {reason}")


def try_deletion(campaign: Campaign, name: str) -> Outcome:
    """Delete output of a run while it goes on; the run must be refused, or have all its output at its end."""
    started = campaign.start(with_settings(TRAIN, "run.steps=12", "run.save_every=2"), LIMITS)
    metrics = campaign.out / "metrics.jsonl"
    started.wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3)
    remove(campaign.out / name)
    ended = started.wait()
    lost = not (campaign.out / name).exists() or (name == metrics.name and b'"step": 1,' not in metrics.read_bytes())
    campaign.clear()
    return refused("deleted while it runs", name, ended, passes=not lost)


def two_at_once(campaign: Campaign, words: str) -> tuple[Verdict, str]:
    """Run a command twice at the same time: one must reach the result, the other must reach it too or be refused."""
    _, expected = campaign.unharmed(words, LIMITS)
    both = [campaign.start(words, LIMITS) for _ in range(2)]
    ends = [one.wait() for one in both]
    said = "; ".join(one.last_line for one in ends)
    if faults := [one.fault for one in ends if one.fault]:
        return "wrong", faults[0]
    if all(one.status == 2 for one in ends):
        return "wrong", f"neither comes to an end: {said}"
    if differ := different(content(campaign.out.parent), expected):
        return "wrong", f"{differ} differ from the command's alone; {said}"
    if left := campaign.unfinished():
        return "wrong", f"{left[0]} is left"
    return "right" if {one.status for one in ends} == {0} else "refused", said
