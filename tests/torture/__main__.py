"""Attack the program itself (`make torture`), count the verdicts, and keep a row and a table.

All draws follow from the seed, but kills fall at moments of a clock. The status is 1 if any attempt went wrong.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thresher.cli.process import prepare_process

if __name__ == "__main__":
    prepare_process()  # before torch is loaded, whose threads would busy-wait in every fork

from torture.harness import Campaign, Outcome
from torture.inputs import holes, inputs, records, sampling, terminal
from torture.servers import answers, endurance, requests
from torture.storage import disks, files, kills, mishaps, stored
from torture.world import make_world

from thresher.bench.harness import append_rows, facts
from thresher.cli.main import run
from thresher.common.files import atomic_write_text

ALL = (kills, files, records, requests, holes, stored, inputs, sampling, mishaps, answers, terminal, disks, endurance)
ATTACKS: dict[str, Callable[[Campaign], Iterator[Outcome]]] = {attack.__name__: attack for attack in ALL}
VERSIONS = ("torch", "triton", "faiss-cpu", "safetensors", "tokenizers", "aiohttp")
VERDICTS = ("right", "refused", "read", "wrong")
MARKS = ("<!-- torture -->", "<!-- end of torture -->")  # of a page, around the table
SHOWN = 20  # faults per kind that a row holds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the attempts; all of them take half an hour")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="may be repeated; default: every one")
    parser.add_argument("--tries", help="JSON lines to append every attempt to")
    parser.add_argument("--page", type=Path, help="Markdown whose table is replaced")
    parser.add_argument("--out", help="JSON lines to append the counts to")
    options = parser.parse_args(arguments)
    if options.page is not None:
        split_page(options.page)
    row = facts(VERSIONS) | {"bench": "torture", "seed": options.seed, "scale": options.scale, "kinds": []}
    begun, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="thresher-torture-"))
    names = dict.fromkeys(options.attack or ATTACKS)
    try:
        if set(names) != {"holes"}:  # whose attack reads no file
            make_world(Campaign("world's", folder, run))
        for name in names:
            campaign = Campaign(name, folder, run, options.seed, options.scale)
            row["kinds"] += carry_out(name, campaign, options.tries)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row["seconds"] = round(time.monotonic() - begun, 1)
    append_rows(options.out, row)
    if options.page is not None:
        before, behind = split_page(options.page)
        atomic_write_text(options.page, f"{before}{MARKS[0]}\n\n{summary(row)}\n\n{MARKS[1]}{behind}")
    print(summary(row))
    if wrong := sum(kind["wrong"] for kind in row["kinds"]):
        sys.exit(f"torture: {wrong} attempts were answered wrongly")


def carry_out(name: str, campaign: Campaign, tries: str | None) -> list[dict[str, Any]]:
    """Carry out an attack; return the counts of each kind."""
    begun = time.monotonic()
    found: dict[str, list[Outcome]] = {}
    for one in ATTACKS[name](campaign):
        found.setdefault(one.kind, []).append(one)
        append_rows(tries, {"attack": name, **asdict(one)})
        if one.verdict == "wrong":
            print(f"torture: {name}, {one.kind}: {one.what}", flush=True)
    rows = []
    for kind, each in sorted(found.items()):
        counts = {verdict: sum(one.verdict == verdict for one in each) for verdict in VERDICTS}
        faults = [one.what for one in each if one.verdict == "wrong"][:SHOWN]
        rows.append({"attack": name, "kind": kind, "tried": len(each), **counts, "faults": faults})
    tried, wrong = (sum(row[count] for row in rows) for count in ("tried", "wrong"))
    print(f"torture: {name}: {tried:,} attempts, {wrong:,} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    return rows


def summary(row: dict[str, Any]) -> str:
    """Return a row as the table of docs/internals/reliability.md, in Markdown."""
    lines = ["| attack | of | tried | right | refused | read as it now says | wrong |", "|---|---|--:|--:|--:|--:|--:|"]
    for kind in row["kinds"]:
        counts = " | ".join(f"{kind[name]:,}" for name in ("tried", *VERDICTS))
        lines.append(f"| {kind['attack']} | {kind['kind']} | {counts} |")
    tried, wrong = (sum(kind[count] for kind in row["kinds"]) for count in ("tried", "wrong"))
    share = "" if row["scale"] == 1 else f" (a {row['scale']:g} of the whole)"
    ended = f"{tried:,} attempts{share}, {wrong:,} wrong, in {row['seconds'] / 60:.0f} minutes"
    lines += ["", f"{ended}; seed {row['seed']}, commit {row['commit']}, {row['machine']}."]
    return "\n".join(lines)


def split_page(page: Path) -> tuple[str, str]:
    """Return the text before and after the marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, behind = rest.partition(MARKS[1])
    if not begin or not end:
        sys.exit(f"torture: {page}: expected {MARKS[0]} and, below it, {MARKS[1]}")
    return before, behind


def last_row(path: Path) -> dict[str, Any]:
    """Return the last row of a file that --out named."""
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
