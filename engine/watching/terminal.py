"""`thresher watch RUN --tty`: where a run stands, in the terminal; a line for each new step where there is none.

Deliberately absent: keys. What there is to be looked into is on the page.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thresher.common.console import console, shown, visible
from thresher.common.errors import UserError
from thresher.common.jsonl import Record
from thresher.engine.reporting.excerpts import is_right
from thresher.engine.store.run_folder import RunFolder, step_of
from thresher.engine.watching.state import RunState, read_state, resident_bytes

BARS = "▁▂▃▄▅▆▇█"
CURVE, SAMPLES, TEXT = 64, 4, 160  # characters of the reward's curve, samples shown, characters of a text


def watch_terminal(run: str | Path, every: float = 1.0, unverified: bool = False) -> RunState:
    """Show the run until it has ended; the last state. every: seconds between two looks.

    UserError for a folder that is no run or, unless `unverified`, whose records are not as they were written.
    KeyboardInterrupt ends it earlier.
    """
    read = partial(read_state, run, unverified)
    if not console.is_terminal:
        return _lines(read, every)
    state, folder = read(), RunFolder(Path(run), unverified=unverified)
    with Live(_view(folder, state), console=console, auto_refresh=False) as live:
        while not state.ended:
            time.sleep(every)
            state = read()
            live.update(_view(folder, state), refresh=True)
    return state


def _lines(read: Callable[[], RunState], every: float) -> RunState:
    last = None
    while True:
        state = read()
        if last != (last := (state.step, len(state.evals))) or state.ended:
            console.print(_line(state), markup=False, soft_wrap=True)
        if state.ended:
            return state
        time.sleep(every)


def _line(state: RunState) -> str:
    facts = state.to_dict()
    names = {"reward": "reward", "em": "EM", "greedy_em": "greedy EM", "rollout_tokens_per_s": "tokens/s sampled"}
    names |= {"train_tokens_per_s": "trained", "seconds_a_step": "s a step"}
    figures = [f"{name} {shown(facts[key])}" for key, name in names.items() if facts[key] is not None]
    return "  ".join([state.says, *figures, *([f"memory {_memory(state)}"] if state.process else [])])


def _memory(state: RunState) -> str:
    resident = resident_bytes(state.process)
    return "-" if resident is None else f"{resident / 2**30:.2f} GiB"


def _view(run: RunFolder, state: RunState) -> RenderableType:
    facts = state.to_dict()
    table = Table.grid(padding=(0, 3))
    rows = (
        ("reward", facts["reward"], "sampled tokens/s", facts["rollout_tokens_per_s"]),
        ("EM, sampled", facts["em"], "trained tokens/s", facts["train_tokens_per_s"]),
        ("EM, greedy", facts["greedy_em"], "seconds a step", facts["seconds_a_step"]),
        ("process", str(state.process or "-"), "memory", _memory(state)),
    )
    for left, value, right, other in rows:
        table.add_row(Text(left, "dim"), shown(value), Text(right, "dim"), shown(other))
    rewards = [float(record["reward"]) for record in state.steps if record.get("reward") is not None]
    color = "green" if state.finished else "yellow" if state.ended else "cyan"
    parts: list[RenderableType] = [Text(str(run.path), "bold"), Text(state.says, color), table]
    if rewards:
        parts.append(Text.assemble(("reward ", "dim"), (sparkline(rewards), "blue"), f" {shown(rewards[-1])}"))
    try:
        parts += _samples(run)
    except UserError as error:  # a file that is damaged, or that a resumed run has just taken away
        parts.append(Text(f"\n{error}", "red"))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """Values as bars from their smallest to their largest; of more than `width`, means of neighbours."""
    means = [part.mean() for part in np.array_split(np.asarray(values, float), min(width, len(values)))]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _samples(run: RunFolder) -> Iterator[Text]:
    """A trajectory of each of the first questions in the newest file that there is."""
    files = [path for folder in (run.trajectories, run.evaluations) for path in folder.glob("step_*.jsonl")]
    newest = max(files, key=lambda path: (step_of(path.stem) or 0, path.parent == run.trajectories), default=None)
    if newest is None:
        return
    yield Text(f"\n{newest.parent.name}, step {step_of(newest.stem)}", "dim")
    for record in islice(_of_different_questions(run, newest), SAMPLES):
        right = is_right(record)
        answer = record.get("answer")
        searches = len(record.get("searches") or [])
        yield Text.assemble(
            _short(record.get("question")),
            ("  → ", "dim"),
            ("no answer" if answer is None else _short(answer), "green" if right else "red"),
            (f"  reward {shown(record.get('reward'))}, {searches} search{'' if searches == 1 else 'es'}", "dim"),
        )


def _of_different_questions(run: RunFolder, path: Path) -> Iterator[Record]:
    seen = set()
    for record in run.stored_trajectories(path):
        if record.get("id") not in seen:
            seen.add(record.get("id"))
            yield record


def _short(text: object) -> str:
    line = " ".join(visible(text).split())
    return line if len(line) <= TEXT else f"{line[:TEXT]} …"
