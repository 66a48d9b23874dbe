"""`thresher bench torture`: the attacks one after the other, each counted by kind, and what came of them.

    kills      commands killed at any moment, and begun again                    kills.py
    files      files damaged, and read by a command                             files.py
    records    malformed questions, transcripts, corpora and predictions        records.py
    requests   hostile requests to a retrieval server                           requests.py
    holes      attempts to be rewarded without merit                            holes.py
    stored     stored results changed, lost and doubled, for every reader      stored.py
    inputs     models, tokenizers and files that are none, FIFOs, huge sizes    inputs.py
    sampling   stop sets, seeds, parameters at their ends                       sampling.py
    mishaps    rewards that exit, deleted records, two writers at once          mishaps.py
    answers    servers that answer without end                                  answers.py
    terminal   control bytes on a terminal                                      terminal.py
    disks      a full and a read-only disk for every command that writes        disks.py
    endurance  many small steps, with flat memory and descriptors               endurance.py

Everything drawn follows from the seed; kills alone fall at moments of a clock. A fault of ours makes the status 1.

Deliberately absent: threads, and any computing in this process: it forks (worker.py).
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thresher.bench.machine import facts
from thresher.bench.rows import append_rows, check_files
from thresher.bench.torture import (
    answers,
    disks,
    endurance,
    files,
    holes,
    inputs,
    kills,
    mishaps,
    records,
    requests,
    sampling,
    terminal,
)
from thresher.bench.torture import stored as stored_results
from thresher.bench.torture.attack import Counts, Field, Tried
from thresher.bench.torture.worker import Worker
from thresher.bench.torture.world import make_world
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text

ATTACKS: dict[str, Callable[[Field], Iterator[Tried]]] = {
    "kills": kills.attack,
    "files": files.attack,
    "records": records.attack,
    "requests": requests.attack,
    "holes": holes.attack,
    "stored": stored_results.attack,
    "inputs": inputs.attack,
    "sampling": sampling.attack,
    "mishaps": mishaps.attack,
    "answers": answers.attack,
    "terminal": terminal.attack,
    "disks": disks.attack,
    "endurance": endurance.attack,
}
WORLDLESS = {"holes"}  # attacks that read no file
VERSIONS = ("torch", "triton", "faiss-cpu", "safetensors", "tokenizers", "aiohttp")
MARKS = ("<!-- torture -->", "<!-- end of torture -->")  # of a page, around the table
SHOWN = 20  # faults of a kind that a row holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is to be done. scale: of the number of attempts; 1 is all, and takes half an hour on two cores. tries: a
    file that gets a line for every attempt. page: Markdown that shows the table between `MARKS`."""

    seed: int = 0
    scale: float = 1.0
    attacks: Sequence[str] = tuple(ATTACKS)
    out: str | None = None
    tries: str | None = None
    page: str | None = None


def run_torture(campaign: Campaign, run: Callable[[Sequence[str]], int]) -> dict[str, Any]:
    """All of a campaign; the row, which `out` keeps. run: the command line, from arguments to an exit status."""
    if unknown := [name for name in campaign.attacks if name not in ATTACKS]:
        raise UserError(f"--attack {unknown[0]}: expected one of {', '.join(ATTACKS)}")
    check_files(campaign.out, None)
    check_files(campaign.tries, None)
    if campaign.page is not None and _parts_of(Path(campaign.page)) is None:
        raise UserError(f"--page {campaign.page}: expected a file with {MARKS[0]} and, below it, {MARKS[1]}")
    row = facts(VERSIONS) | {"bench": "torture", "seed": campaign.seed, "scale": campaign.scale, "kinds": []}
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="thresher-torture-"))
    try:
        worker = Worker(run, folder / "streams")
        if set(campaign.attacks) - WORLDLESS:
            make_world(folder / "world", worker)
        for name in dict.fromkeys(campaign.attacks):
            (folder / name).mkdir()
            field = Field(
                at=folder / "world", scratch=folder / name, worker=worker, seed=campaign.seed, scale=campaign.scale
            )
            row["kinds"] += _carried_out(name, field, campaign.tries)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row["seconds"] = round(time.monotonic() - begun, 1)
    append_rows(campaign.out, row)
    if campaign.page is not None:
        show_on(Path(campaign.page), row)
    console.console.print(summary(row), markup=False, soft_wrap=True)
    return row


def _carried_out(name: str, field: Field, tries: str | None) -> list[dict[str, Any]]:
    begun = time.monotonic()
    found: dict[str, Counts] = {}
    for one in ATTACKS[name](field):
        found.setdefault(one.kind, Counts()).add(one)
        append_rows(tries, {"attack": name, **asdict(one)})
        if one.verdict == "wrong":
            console.console.print(f"torture: {name}, {one.kind}: {one.what}", markup=False, soft_wrap=True)
    tried = sum(each.tried for each in found.values())
    wrong = sum(len(each.wrong) for each in found.values())
    console.console.print(f"torture: {name}: {tried:,} attempts, {wrong:,} wrong, {time.monotonic() - begun:.0f} s")
    rows = []
    for kind, each in sorted(found.items()):
        counts = {"tried": each.tried, "right": each.right, "refused": each.refused, "read": each.read}
        rows.append({"attack": name, "kind": kind, **counts, "wrong": len(each.wrong), "faults": each.wrong[:SHOWN]})
    return rows


def wrong_of(row: dict[str, Any]) -> int:
    """How many attempts of a row found a fault."""
    return sum(kind["wrong"] for kind in row["kinds"])


def summary(row: dict[str, Any]) -> str:
    """A row as the table of docs/reliability.md, in Markdown."""
    lines = ["| attack | of | tried | right | refused | read as it now says | wrong |", "|---|---|--:|--:|--:|--:|--:|"]
    for kind in row["kinds"]:
        counts = " | ".join(f"{kind[name]:,}" for name in ("tried", "right", "refused", "read", "wrong"))
        lines.append(f"| {kind['attack']} | {kind['kind']} | {counts} |")
    tried = sum(kind["tried"] for kind in row["kinds"])
    share = "" if row["scale"] == 1 else f" (a {row['scale']:g} of the whole)"
    lines += [
        "",
        f"{tried:,} attempts{share}, {wrong_of(row):,} wrong, in {row['seconds'] / 60:.0f} minutes; "
        f"seed {row['seed']}, commit {row['commit']}, {row['machine']}.",
    ]
    return "\n".join(lines)


def show_on(page: Path, row: dict[str, Any]) -> None:
    """Puts a row's table between the marks of a page."""
    parts = _parts_of(page)
    assert parts is not None
    atomic_write_text(page, f"{parts[0]}{MARKS[0]}\n\n{summary(row)}\n\n{MARKS[1]}{parts[1]}")


def _parts_of(page: Path) -> tuple[str, str] | None:
    """What stands before and behind the marks of a page."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, _, rest = text.partition(MARKS[0])
    _, end, behind = rest.partition(MARKS[1])
    return (before, behind) if end else None


def stored(path: str | Path) -> dict[str, Any]:
    """The last row of a file that `out` named."""
    row: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8").splitlines()[-1])
    return row
