"""What `thresher bench step` says: a row of its file, and the table.

Deliberately absent: measuring (run.py) and drawing (plot.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thresher.bench.measure import spread
from thresher.bench.step.ours import Ours
from thresher.bench.step.setting import Seconds, Steps
from thresher.common.console import console, table

SIDES = ("shared", "unshared", "peer")
_P = ("p20", "p50", "p80")


def make_row(ours: Ours, steps: Steps, gaps: dict[str, float], head: dict[str, Any]) -> dict[str, Any]:
    """A run's row. Its ratios are the medians of neighbouring steps' wall seconds; `ratio` and `cpu_ratio` have their
    spread, None without a peer."""
    setting, sides = ours.setting, {"shared": steps.shared, "unshared": steps.unshared, "peer": steps.peer}
    shape, config = setting.shape, setting.rollout.policy.config
    wall = {part: _ratio(steps.peer, steps.shared, part) for part in ("total", "update", "rollout")}
    gain, cpu_gain = (_ratio(steps.unshared, steps.shared, part) for part in ("update", "update_cpu"))
    assert gain is not None
    return {
        "bench": "step",
        **head,
        "device": setting.device.type,
        "shape": shape.name,
        "steps": len(steps.shared),
        "tokens": shape.tokens,
        "sampled_tokens": shape.lengths.tokens,
        "asked_tokens": steps.asked,
        "computed_tokens": steps.computed,
        "ratio_step": _median(wall["total"]),
        "ratio_update": _median(wall["update"]),
        "ratio_rollout": _median(wall["rollout"]),
        "shared_gain": gain["p50"],
        **{name: _figures(shape.tokens, found) if found else None for name, found in sides.items()},
        "rollout_parts_s": {part: spread([one[part] for one in steps.parts]) for part in steps.parts[0]},
        "ratio": wall,
        "cpu_ratio": {part: _ratio(steps.peer, steps.shared, f"{part}_cpu") for part in wall},
        "shared_gains": {"wall": gain, "cpu": cpu_gain},
        "logprob_gap": gaps,
        "lengths": shape.record()
        | {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "vocab": setting.rollout.tokenizer.vocab_size,
            "parameters": setting.rollout.policy.parameter_count(),
            "peer_prompt": shape.peer_prompt,
            "peer_completion": shape.peer_completion,
        },
    }


def _ratio(theirs: Sequence[Seconds], ours: Sequence[Seconds], part: str) -> dict[str, float] | None:
    if not theirs:
        return None
    return spread([getattr(b, part) / getattr(a, part) for a, b in zip(ours, theirs, strict=True)])


def _median(values: dict[str, float] | None) -> float | None:
    return None if values is None else values["p50"]


def _figures(tokens: int, steps: Sequence[Seconds]) -> dict[str, Any]:
    names = {"step": "total", "rollout": "rollout", "update": "update"}
    return {
        "tokens_per_s": spread([tokens / step.total for step in steps]),
        "tokens_per_cpu_s": spread([tokens / step.total_cpu for step in steps]),
        **{f"{name}_s": spread([getattr(step, part) for step in steps]) for name, part in names.items()},
        **{f"{name}_cpu_s": spread([getattr(step, f"{part}_cpu") for step in steps]) for name, part in names.items()},
    }


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """A file's rows of this bench in their present form."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("bench") == "step" and isinstance(row["shape"], str)]


def show(row: dict[str, Any]) -> None:
    """The table: a line a figure, a column a side."""
    named = {
        "tokens_per_s": ("step, tokens/s", "total"),
        "step_s": ("step, seconds", None),
        "rollout_s": ("rollout, seconds", "rollout"),
        "update_s": ("update, seconds", "update"),
        "step_cpu_s": ("step, CPU seconds", None),
    }

    def cell(values: dict[str, Any] | None, key: str | None) -> str:
        if values is None or key is None or values[key] is None:
            return "-"
        p20, p50, p80 = (f"{values[key][p]:,.0f}" if values[key][p] >= 100 else f"{values[key][p]:.3g}" for p in _P)
        return f"{p50} ({p20} to {p80})"

    lengths = row["lengths"]
    console.print(
        f"shared prefixes: an update computes {row['computed_tokens']:,} of {row['asked_tokens']:,} tokens, "
        f"{row['shared_gain']:.2f} times as fast as unshared",
        soft_wrap=True,
    )
    table(
        f"one GRPO step, {row['shape']}: {lengths['questions']} questions x {lengths['group']} samples, "
        f"{row['tokens']:,} tokens, {row['sampled_tokens']:,} of them sampled; {row['threads']} "
        f"thread{'s' if row['threads'] > 1 else ''}; median (p20 to p80) of {row['steps']} steps",
        ("", "ours", "ours, unshared", "TRL", "TRL by ours"),
        [
            (name, *(cell(row[side], key) for side in SIDES), cell(row["ratio"], part))
            for key, (name, part) in named.items()
        ],
    )
