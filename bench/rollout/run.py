"""`thresher bench rollout`: our rollout beside Hugging Face's, on the same model and lengths, in turn in one process.

For every shape (shapes.py): make the model and the texts; hold the log-probs that our side recorded to a forward of our
own over the finished sequences and to one of the peer's model; measure the machine's bare rates; then let the sides
take turns. A row is one peer beside ours. A peer that cannot run gets its reason in place of figures.

    ours_tokens_per_s    sampled tokens by wall seconds, and so the peer's
    ratio, cpu_ratio     the peer's seconds by ours, of neighbouring rounds; wall, and CPU of all threads; p20, p50, p80
    ratio_rollout        the median of `ratio`, a number under the name that `bench step` has for it
    prefill_tokens       asked: contexts as somebody submits them who has but a function from contexts to tokens; ours
                         and peer: what went through the model, sampled tokens that were fed back left out
    floor_share          the floor (floor.py) by ours, by the peer's
    host_share           of our rollout's time, what was not spent in forwards, sampling and searches

Rows are written as they are made.

Deliberately absent: a peer that serves over HTTP.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thresher.bench.machine import facts
from thresher.bench.measure import spread
from thresher.bench.rollout.floor import floor_seconds, measure_rates
from thresher.bench.rollout.ours import Written, make_ours
from thresher.bench.rollout.setting import RolloutSetting, make_rollout_setting
from thresher.bench.rollout.shapes import SHAPES, RolloutShape
from thresher.bench.rollout.turns import Round, Rounds, Side, take_turns
from thresher.bench.rows import append_rows, check_files
from thresher.common.console import console, table
from thresher.common.errors import UserError

PEERS: dict[str, tuple[str, ...]] = {
    "both": ("generate", "generate_batch"),
    "hf": ("generate",),
    "generate_batch": ("generate_batch",),
    "none": (),
}
LARGEST_GAP = 1e-4  # nats, in float32
PROVED = 8  # sequences of a shape's first round that are held to both models


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """What to measure: names of SHAPES, a name of PEERS, in float32 on `device`. threads None: as torch has them.
    budget: seconds for each name of SHAPES, after which no round begins; a round of every side is measured in any
    case."""

    shapes: Sequence[str] = tuple(SHAPES)
    peer: str = "both"
    rounds: int = 5
    threads: int | None = None
    budget: float = 540.0
    device: str = "cpu"

    def check(self) -> None:
        """UserError for what cannot be measured."""
        for shape in self.shapes:
            if shape not in SHAPES:
                raise UserError(f"--shape {shape}: expected some of {', '.join(SHAPES)}")
        if self.peer not in PEERS:
            raise UserError(f"--peer {self.peer}: expected one of {', '.join(PEERS)}")
        for flag, value in (("rounds", self.rounds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise UserError(f"--{flag} {value}: expected a whole number of at least 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device cuda: torch {torch.__version__} sees none; run where there is one, or with cpu")
        if PEERS[self.peer] and find_spec("transformers") is None:
            raise UserError(
                f'--peer {self.peer}: transformers is not installed; pip install "thresher[bench]" brings it, '
                "and --peer none measures ours alone"
            )


def run_rollout_bench(
    bench: RolloutBench, out: str | Path | None = None, plot: str | Path | None = None
) -> list[dict[str, Any]]:
    """Prove, measure, append the rows to `out` as they are made, print a table, draw `plot`. Returns the rows."""
    bench.check()
    check_files(out, plot)
    rows: list[dict[str, Any]] = []
    with _threads(bench.threads):
        for shape in [shape for name in bench.shapes for shape in SHAPES[name]]:
            made = measure(bench, shape)
            append_rows(out, *made)
            rows += made
    _show(rows)
    if plot is not None:
        from thresher.bench.rollout.plot import draw

        draw(rows, Path(plot))
    for path in filter(None, (out, plot)):
        console.print(f"written to {path}")
    return rows


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(bench: RolloutBench, shape: RolloutShape) -> list[dict[str, Any]]:
    """The rows of one shape: one for each peer, or one alone."""
    begun, budget = time.monotonic(), bench.budget / len(SHAPES[shape.name])
    head = {"bench": "rollout", **facts(("transformers",))}
    setting = make_rollout_setting(shape, torch.device(bench.device))
    ours = make_ours(setting)
    found = Rounds()
    peers, model = _peers(setting, PEERS[bench.peer], found)
    first = ours.run()  # warms up as well
    gaps = prove(setting, first.written, None if model is None else model.logits)
    console.print(
        f"{shape.name}, {shape.sampled} tokens a sample: recorded log-probs agree with a forward of ours to "
        f"{gaps['recomputed']:.1e} nats" + (f", with Hugging Face's model to {gaps['peer']:.1e}" if model else "")
    )
    ready: list[Any] = []
    for peer in peers:
        try:
            peer.settle(begun + budget / 2)
            ready.append(peer)
        except Exception as error:  # whatever a peer's library may raise
            found.fail(peer.name, error)
    floor = floor_seconds(shape, measure_rates(torch.device(bench.device)))
    take_turns(ours, ready, bench.rounds, begun + budget, found)
    common = {
        **head,
        "shape": shape.name,
        "tokens": shape.sampled,
        **_ours(shape, ours, found.ours),
        "logprob_gap": gaps,
        "floor": floor,
        "floor_share": {"ours": floor["seconds"] / spread([r.wall for r in found.ours])["p50"], "peer": None},
        "lengths": shape.record(),
    }
    names = PEERS[bench.peer]
    calls = {peer.name: peer.samples_a_call for peer in ready}
    return [_beside(common, shape, name, found, calls.get(name)) for name in names] or [common | {"peer": None}]


def _peers(setting: RolloutSetting, names: Sequence[str], found: Rounds) -> tuple[list[Any], Any]:
    """Hugging Face's sides and its model; none where the model itself does not load, with the reason in `found`."""
    if not names:
        return [], None
    try:
        from thresher.bench.rollout.hf import HuggingFace, HuggingFaceSide

        model = HuggingFace(setting)
    except Exception as error:  # whatever a peer's library may raise
        for name in names:
            found.fail(name, error)
        return [], None
    return [HuggingFaceSide(setting, model, name) for name in names], model


@torch.no_grad()
def prove(setting: RolloutSetting, written: Sequence[Written], theirs: Any = None) -> dict[str, float]:
    """Log-probs recorded while sampling against those of a forward over the finished sequences, ours and the peer's.

    `theirs` maps the ids of a sequence to its logits [T, V]. Returns the largest differences in nats; raises
    RuntimeError if one exceeds LARGEST_GAP.
    """
    gaps = {"recomputed": 0.0} | ({} if theirs is None else {"peer": 0.0})
    models = {"recomputed": setting.policy.logits, "peer": theirs}
    for one in written[:: max(1, len(written) // PROVED)]:
        at_R = torch.tensor(one.positions)
        ids_T = torch.tensor(one.ids)
        recorded_R = torch.tensor(one.logprobs)
        for name in gaps:
            logits_TV = models[name](ids_T if name == "recomputed" else one.ids).cpu()
            logp_RV = logits_TV[at_R - 1, : setting.tokenizer.vocab_size].log_softmax(-1)
            gap = (logp_RV.gather(1, ids_T[at_R, None])[:, 0] - recorded_R).abs().max()
            gaps[name] = float(torch.maximum(torch.tensor(gaps[name]), gap))  # NaN where either is
    if not all(gap <= LARGEST_GAP for gap in gaps.values()):
        raise RuntimeError(f"log-probs differ by {gaps} nats, more than {LARGEST_GAP}: nothing is timed that is wrong")
    return gaps


def _ours(shape: RolloutShape, ours: Side, rounds: Sequence[Round]) -> dict[str, Any]:
    hosts = [r.work.host_share for r in rounds if r.work.host_share is not None]
    last = rounds[-1].work
    return {
        "ours": ours.name,
        "rounds": len(rounds),
        "ours_tokens_per_s": spread([shape.tokens / r.wall for r in rounds]),
        "ours_s": spread([r.wall for r in rounds]),
        "ours_cpu_s": spread([r.cpu for r in rounds]),
        "peer_tokens_per_s": None,
        "peer_s": None,
        "peer_cpu_s": None,
        "ratio_rollout": None,
        "ratio": None,
        "cpu_ratio": None,
        "prefill_tokens": {"asked": shape.asked, "ours": last.prefilled, "peer": None},
        "tokens_a_forward": {"ours": shape.tokens / last.forwards if last.forwards else None, "peer": None},
        "host_share": spread(hosts) if hosts else None,
        "drafted": last.drafted,
        "accepted": last.accepted,
    }


def _beside(
    common: dict[str, Any], shape: RolloutShape, name: str, found: Rounds, samples_a_call: int | None
) -> dict[str, Any]:
    """The row of ours beside one peer."""
    rounds = found.peers.get(name, [])
    row = common | {"peer": name, "peer_failure": found.failures.get(name), "peer_samples_a_call": samples_a_call}
    if not rounds:
        return row
    work, pairs = rounds[-1].work, list(zip(found.ours, rounds, strict=True))
    assert work.forwards is not None
    floor = common["floor"]["seconds"]
    ratio = spread([theirs.wall / ours.wall for ours, theirs in pairs])
    return row | {
        "peer_tokens_per_s": spread([shape.tokens / r.wall for r in rounds]),
        "peer_s": spread([r.wall for r in rounds]),
        "peer_cpu_s": spread([r.cpu for r in rounds]),
        "ratio_rollout": ratio["p50"],
        "ratio": ratio,
        "cpu_ratio": spread([theirs.cpu / ours.cpu for ours, theirs in pairs]),
        "prefill_tokens": common["prefill_tokens"] | {"peer": work.prefilled},
        "tokens_a_forward": common["tokens_a_forward"] | {"peer": shape.tokens / work.forwards},
        "floor_share": common["floor_share"] | {"peer": floor / spread([r.wall for r in rounds])["p50"]},
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    def middle(values: dict[str, float] | None) -> str:
        return "-" if values is None else f"{values['p50']:,.0f}"

    def ratio(values: dict[str, float] | None) -> str:
        return "-" if values is None else "{p50:.2f} ({p20:.2f} to {p80:.2f})".format(**values)

    table(
        "rollout, sampled tokens/s (medians), and the peer's seconds by ours (p20 to p80)",
        ("", "ours", "peer", "ratio", "by CPU seconds", "ours, of floor"),
        [
            (
                f"{row['shape']} {row['tokens']}" + (f", {row['peer']}" if row["peer"] else ""),
                middle(row["ours_tokens_per_s"]),
                row.get("peer_failure") or middle(row["peer_tokens_per_s"]),
                ratio(row["ratio"]),
                ratio(row["cpu_ratio"]),
                f"{row['floor_share']['ours']:.0%}",
            )
            for row in rows
        ],
    )
