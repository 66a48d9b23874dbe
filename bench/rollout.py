"""`thresher bench rollout`: our rollout compared with Hugging Face's, on the same model and lengths, in one process.

For every shape: make the model and the texts; compare the log-probs that our side recorded with a forward of our own
over the finished sequences and with one of the peer's model; measure the machine's bare rates; then time the sides in
turn. A row compares one peer with ours; a peer that cannot run gets a reason in place of figures. The shape `tail` is
measured without peers (rollout_tail.py). A row with one round of ours is appended before a peer is loaded.

    ours_tokens_per_s    sampled tokens / wall seconds; likewise for the peer
    ratio, cpu_ratio     the peer's seconds / ours, of neighbouring rounds: wall, CPU of all threads
    ratio_rollout        the median of `ratio`
    prefill_tokens       asked: contexts as a caller of a function from contexts to tokens submits them; ours and peer:
                         tokens that went through the model, without sampled tokens that were fed back
    floor_share          floor / our seconds, floor / the peer's
    host_share           share of our rollout's time outside of forwards, sampling and searches

The floor is the arithmetic at the rate of a bare matmul, or the memory traffic at the rate of a bare copy, whichever is
longer, of an engine that computes nothing twice and keeps the whole batch together: a prompt once per group, a passage
once per sample, every sampled token once. Weights are read once for each token position that trajectories sample; keys
and values are read per sequence, and shared ones once per group. EviOmni's (q, P, r) is a prefix of the trajectory, and
q a prefix of the prompt: only the evidence of (q, e) is fed anew. Norms, rotations, softmax and sampling are not
counted.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from thresher.bench.harness import (
    ITEM,
    Rates,
    append_rows,
    check_files,
    facts,
    measure_rates,
    print_files,
    ratios,
    reason_of,
    resolve_device,
    spread,
    spread_text,
)
from thresher.bench.rollout_sides import HuggingFace, HuggingFaceSide, Work, Written, make_ours
from thresher.bench.rollout_tail import measure_tail, show_tail
from thresher.bench.settings import ROLLOUT_SHAPES, RolloutSetting, RolloutShape, Sizes, make_rollout_setting
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.engine.threads import use_threads

PEERS: dict[str, tuple[str, ...]] = {
    "both": ("generate", "generate_batch"),
    "hf": ("generate",),
    "generate_batch": ("generate_batch",),
    "none": (),
}
TAIL = "tail"  # the shape with unequal lengths, which has no peer
LARGEST_GAP = 1e-4  # nats, in float32
LogitsOf = Callable[[list[int]], torch.Tensor]  # ids of a sequence -> logits [T, V]
PROVED = 8  # sequences of a shape's first round that are compared with both models


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """Options: names of ROLLOUT_SHAPES, a name of PEERS, in float32 on `device`. threads None: torch's current number.
    budget: seconds for each name, after which no round starts; one round of every side is always measured."""

    shapes: Sequence[str] = tuple(ROLLOUT_SHAPES)
    peer: str = "both"
    rounds: int = 5
    threads: int | None = None
    budget: float = 540.0
    device: str = "cpu"


class Side(Protocol):
    """A side that can play a round."""

    @property
    def name(self) -> str: ...

    def run(self) -> Work: ...


@dataclass(frozen=True, slots=True)
class Round:
    """One side's round."""

    wall: float
    cpu: float
    work: Work


@dataclass(slots=True)
class Rounds:
    """The rounds of all sides, and the reasons for peers without rounds."""

    ours: list[Round] = field(default_factory=list)
    peers: dict[str, list[Round]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def fail(self, peer: str, error: Exception) -> None:
        self.failures[peer] = reason_of(error)
        self.peers.pop(peer, None)


def timed(side: Side) -> Round:
    """Time one round, and drop its samples."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work = side.run()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    work.written.clear()
    return Round(*seconds, work)


def take_turns(ours: Side, peers: Sequence[Side], rounds: int, deadline: float, into: Rounds) -> None:
    """Time up to `rounds` of each, at least one, as long as another fits before `deadline` (time.monotonic).

    A peer that fails is dropped with its reason, and the others continue; if ours fails, the bench ends.
    """
    into.peers.update({peer.name: [] for peer in peers})
    longest = 0.0
    for first in range(rounds):
        started = time.monotonic()
        if first and started + longest > deadline:
            break
        sides = [ours, *(peer for peer in peers if peer.name in into.peers)]
        for place in range(len(sides)):
            side = sides[(first + place) % len(sides)]
            if side is ours:
                into.ours.append(timed(side))
                continue
            try:
                into.peers[side.name].append(timed(side))
            except Exception as error:  # a peer's library may raise anything
                into.fail(side.name, error)
        longest = max(longest, time.monotonic() - started)


def run_rollout_bench(
    bench: RolloutBench, out: str | Path | None = None, plot: str | Path | None = None
) -> list[dict[str, Any]]:
    """Verify, measure, append the rows to `out` as they are made, print a table, draw `plot`; return the rows."""
    resolve_device(bench.device)
    if PEERS[bench.peer] and set(bench.shapes) != {TAIL} and find_spec("transformers") is None:
        raise UserError(
            f'--peer {bench.peer}: transformers is not installed; pip install "thresher[bench]" installs it, '
            "and --peer none measures ours alone"
        )
    if plot is not None and set(bench.shapes) == {TAIL}:
        raise UserError(f"--plot {plot}: a picture compares ours with peers, and {TAIL} has no peer; leave it out")
    check_files(out, plot)
    rows: list[dict[str, Any]] = []
    with use_threads(bench.threads or torch.get_num_threads()):
        for shape in [shape for name in bench.shapes for shape in ROLLOUT_SHAPES[name]]:
            made = (measure if shape.name != TAIL else _measure_tail)(bench, shape, partial(append_rows, out))
            append_rows(out, *made)
            rows += made
    beside, unequal = ([row for row in rows if (row["shape"] == TAIL) == of] for of in (False, True))
    if beside:
        _show(beside)
    if unequal:
        show_tail(unequal)
    if plot is not None:
        from thresher.bench.plots import draw_rollout

        draw_rollout(beside, Path(plot))
    print_files(out, plot)
    return rows


def measure(bench: RolloutBench, shape: RolloutShape, keep: Callable[..., None]) -> list[dict[str, Any]]:
    """Measure one shape; return one row per peer, or a single one without peers. keep: appends a row of ours before the
    peers run."""
    begun, budget = time.monotonic(), bench.budget / len(ROLLOUT_SHAPES[shape.name])
    head = {"bench": "rollout", **facts(("transformers",)), "device": bench.device}
    setting = make_rollout_setting(shape, torch.device(bench.device))
    ours = make_ours(setting)
    found, alone = Rounds(), Rounds()
    first = ours.run()  # also warms up
    gaps = prove(setting, first.written)
    floor = floor_seconds(shape, measure_rates(torch.device(bench.device)))
    head |= {"shape": shape.name, "tokens": shape.sampled, "ours": ours.name, "lengths": shape.record()}
    head |= {"floor": floor}
    if PEERS[bench.peer]:
        take_turns(ours, [], 1, begun, alone)
        row = head | {"rounds": 1, "logprob_gap": gaps} | _beside(shape, alone.ours, [], floor["seconds"])
        keep(row | {"peer": None})
    peers, model = _peers(setting, PEERS[bench.peer], found)
    try:
        gaps |= {} if model is None else compare({"peer": model.logits}, first.written, setting, LARGEST_GAP)
    except Exception as error:  # a peer's library may raise anything
        for peer in peers:
            found.fail(peer.name, error)
        peers, model = [], None
    console.print(
        f"{shape.name}, {shape.sampled} tokens a sample: recorded log-probs agree with a forward of ours to "
        f"{gaps['recomputed']:.1e} nats" + (f", with Hugging Face's model to {gaps['peer']:.1e}" if model else "")
    )
    ready: list[Any] = []
    for peer in peers:
        try:
            peer.settle(begun + budget / 2)
            ready.append(peer)
        except Exception as error:  # a peer's library may raise anything
            found.fail(peer.name, error)
    take_turns(ours, ready, bench.rounds, begun + budget, found)
    head |= {"rounds": len(found.ours), "logprob_gap": gaps}
    if not PEERS[bench.peer]:
        return [head | _beside(shape, found.ours, [], floor["seconds"]) | {"peer": None}]
    calls = {peer.name: peer.samples_a_call for peer in ready}
    return [
        head
        | _beside(shape, found.ours, found.peers.get(name, []), floor["seconds"])
        | {"peer": name, "peer_failure": found.failures.get(name), "peer_samples_a_call": calls.get(name)}
        for name in PEERS[bench.peer]
    ]


def _measure_tail(bench: RolloutBench, shape: RolloutShape, keep: Callable[..., None]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + bench.budget / len(ROLLOUT_SHAPES[shape.name])
    setting = make_rollout_setting(shape, torch.device(bench.device))
    return measure_tail(setting, bench.rounds, deadline, lambda written: prove(setting, written), keep)


def _peers(setting: RolloutSetting, names: Sequence[str], found: Rounds) -> tuple[list[Any], Any]:
    """Return Hugging Face's sides and its model; none if the model does not load, with the reason in `found`."""
    if not names:
        return [], None
    try:
        model = HuggingFace(setting)
    except Exception as error:  # a peer's library may raise anything
        for name in names:
            found.fail(name, error)
        return [], None
    return [HuggingFaceSide(setting, model, name) for name in names], model


def prove(
    setting: RolloutSetting,
    written: Sequence[Written],
    theirs: LogitsOf | None = None,
    limit: float = LARGEST_GAP,
) -> dict[str, float]:
    """Compare log-probs recorded while sampling with a forward over the finished sequences, ours and the peer's.

    `theirs` maps the ids of a sequence to its logits [T, V]. Returns the largest differences in nats, NaN if one of
    them is; RuntimeError if one exceeds `limit`.
    """
    models: dict[str, LogitsOf] = {"recomputed": lambda ids: setting.policy.logits(torch.tensor(ids))}
    return compare(models | ({} if theirs is None else {"peer": theirs}), written, setting, limit)


@torch.no_grad()
def compare(
    models: Mapping[str, LogitsOf], written: Sequence[Written], setting: RolloutSetting, limit: float
) -> dict[str, float]:
    """Return each model's largest difference from log-probs recorded while sampling, as `prove` does."""
    some, vocab = written[:: max(1, len(written) // PROVED)], setting.tokenizer.vocab_size
    gaps = {
        name: float(torch.stack([gap_of(logits_of(one.ids), one, vocab) for one in some]).max())
        for name, logits_of in models.items()
    }
    if not all(gap <= limit for gap in gaps.values()):
        raise RuntimeError(f"log-probs differ by {gaps} nats, more than {limit}; wrong results are not timed")
    return gaps


def gap_of(logits_TV: torch.Tensor, one: Written, vocab: int) -> torch.Tensor:
    """Return the largest difference between recorded log-probs and those of a forward over the whole sequence."""
    return gaps_of(logits_TV, one, vocab).max()


def gaps_of(logits_TV: torch.Tensor, one: Written, vocab: int) -> torch.Tensor:
    """Return the difference of each recorded log-prob from that of a forward over the whole sequence [R]."""
    at_R, ids_T = torch.tensor(one.positions), torch.tensor(one.ids)
    logp_RV = logits_TV[at_R - 1, :vocab].float().log_softmax(-1).cpu()
    return (logp_RV.gather(1, ids_T[at_R, None])[:, 0] - torch.tensor(one.logprobs)).abs()


def _beside(shape: RolloutShape, ours: Sequence[Round], peer: Sequence[Round], floor: float) -> dict[str, Any]:
    """Return the figures of both sides for a row; None for a peer without rounds, and for unknown figures."""
    hosts = [r.work.host_share for r in ours if r.work.host_share is not None]
    sides = {"ours": ours, "peer": peer}
    works = {name: rounds[-1].work if rounds else Work() for name, rounds in sides.items()}
    figures: dict[str, Any] = {}
    for name, rounds in sides.items():
        figures |= {
            f"{name}_tokens_per_s": spread([shape.tokens / r.wall for r in rounds]) if rounds else None,
            f"{name}_s": spread([r.wall for r in rounds]) if rounds else None,
            f"{name}_cpu_s": spread([r.cpu for r in rounds]) if rounds else None,
        }
    ratio = ratios([r.wall for r in peer], [r.wall for r in ours]) if peer else None
    return figures | {
        "ratio_rollout": None if ratio is None else ratio["p50"],
        "ratio": ratio,
        "cpu_ratio": ratios([r.cpu for r in peer], [r.cpu for r in ours]) if peer else None,
        "prefill_tokens": {"asked": shape.asked} | {name: work.prefilled for name, work in works.items()},
        "tokens_a_forward": {n: shape.tokens / work.forwards if work.forwards else None for n, work in works.items()},
        "floor_share": {name: floor / figures[f"{name}_s"]["p50"] if sides[name] else None for name in sides},
        "host_share": spread(hosts) if hosts else None,
        "drafted": works["ours"].drafted,
        "accepted": works["ours"].accepted,
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    def middle(values: dict[str, float] | None) -> str:
        return "-" if values is None else f"{values['p50']:,.0f}"

    table(
        "rollout, sampled tokens/s (medians), and the peer's seconds / ours (p20 to p80)",
        ("", "ours", "peer", "ratio", "by CPU seconds", "ours, of floor"),
        [
            (
                f"{row['shape']} {row['tokens']}" + (f", {row['peer']}" if row["peer"] else ""),
                middle(row["ours_tokens_per_s"]),
                row.get("peer_failure") or middle(row["peer_tokens_per_s"]),
                spread_text(row["ratio"]),
                spread_text(row["cpu_ratio"]),
                f"{row['floor_share']['ours']:.0%}",
            )
            for row in rows
        ],
    )


# the floor


@dataclass(frozen=True, slots=True)
class Stretch:
    """`tokens` fed consecutively from position `start` on, in `copies` sequences. Of the positions that they attend to,
    `shared` are common to `group` sequences at a time. written: fed token by token."""

    start: int
    tokens: int
    copies: int
    shared: int = 0
    group: int = 1
    written: bool = False


def stretches(shape: RolloutShape) -> list[Stretch]:
    """Return all tokens that have to be fed. The last token of a sequence is not, because nothing follows it."""
    found = [Stretch(0, shape.prompt, shape.questions)]
    at = shape.prompt
    for turn, tokens in enumerate(shape.turns):
        last = turn + 1 == len(shape.turns)
        found.append(Stretch(at, tokens - last, shape.samples, shape.prompt, shape.group, written=True))
        at += tokens
        if not last and shape.appended:
            found.append(Stretch(at, shape.appended, shape.samples, shape.prompt, shape.group))
            at += shape.appended
    if shape.branches:
        reason, evidence, answer = shape.turns
        behind = shape.prompt + reason
        found.append(Stretch(behind, answer - 1, shape.samples, shape.prompt, shape.group, written=True))
        found.append(Stretch(shape.question, evidence, shape.samples, shape.question, shape.group))
        behind = shape.question + evidence
        found.append(Stretch(behind, answer - 1, shape.samples, shape.question, shape.group, written=True))
    return found


def floor_seconds(shape: RolloutShape, rates: Rates) -> dict[str, Any]:
    """Return the floor in `seconds`, and its parts."""
    flops, moved = operations(shape), bytes_moved(shape)
    seconds, bound = max((flops / rates.flops_per_s, "arithmetic"), (moved / rates.bytes_per_s, "memory"))
    return {"seconds": seconds, "bound": bound, "flops": flops, "bytes": moved, **asdict(rates)}


def operations(shape: RolloutShape) -> int:
    """Count multiplications and additions: weights, attention, and the head for each sampled token."""
    sizes = shape.sizes
    total = 2 * shape.tokens * sizes.hidden_size * sizes.vocab_size
    for stretch in stretches(shape):
        fed = stretch.tokens * stretch.copies
        total += 2 * _layer_weights(sizes) * sizes.num_hidden_layers * fed
        total += 4 * sizes.hidden_size * sizes.num_hidden_layers * stretch.copies * _attended(stretch)
    return total


def bytes_moved(shape: RolloutShape) -> int:
    """Count the weights for every step of a trajectory, and keys and values: written once, read by every new token."""
    sizes = shape.sizes
    weights = _layer_weights(sizes) * sizes.num_hidden_layers + sizes.hidden_size * sizes.vocab_size
    total = ITEM * weights * sum(shape.turns)
    head = sizes.hidden_size // sizes.num_attention_heads
    token = ITEM * 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * head
    for stretch in stretches(shape):
        total += token * stretch.tokens * stretch.copies
        if stretch.written:
            shared = stretch.shared * stretch.tokens
            total += token * (stretch.copies * (_attended(stretch) - shared) + stretch.copies // stretch.group * shared)
    return total


def _layer_weights(sizes: Sizes) -> int:
    kv = sizes.hidden_size // sizes.num_attention_heads * sizes.num_key_value_heads
    return sizes.hidden_size * (2 * sizes.hidden_size + 2 * kv + 3 * sizes.intermediate_size)


def _attended(stretch: Stretch) -> int:
    """Sum the positions that the stretch's tokens attend to, themselves included: start + 1, start + 2, .."""
    return stretch.tokens * stretch.start + stretch.tokens * (stretch.tokens + 1) // 2
