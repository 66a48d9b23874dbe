"""`thresher bench step`: a whole GRPO step of ours, with and without shared prefixes, compared with TRL's GRPOTrainer.

All sides get the same model (random weights), prompts, group, number of tokens, reward, beta, learning rate and
optimiser (settings.py). Their steps alternate in one process, so they also have the same allocator settings
(cli/process.py). If the peer fails, the reason is recorded and ours is measured alone. Before anything is timed,
log-probs recorded while sampling must agree with a forward over the whole sequences, and with the peer's. If a shape
has several ways for TRL to compute an update, each takes one step first, and the fastest is used.

A run appends up to three rows, of which the last counts: one step of ours, before TRL is imported; all sides; the same
row with the profile. So a peer that hangs or ends the process loses no row of ours.

    rollout       sampling all completions (TRL: `_generate`, see step_trl.py)
    update        the rest of the step: rewards, advantages, reference, forward, backward, clip, optimiser
    tokens        of a step's trajectories, prompts and passages included, each counted for every sample
    ratio_*       TRL's seconds / ours (prefixes shared), of neighbouring steps
    shared_gain   seconds of our update without shared prefixes / with them

Axes: T packed tokens.
"""

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thresher.bench.harness import (
    append_rows,
    check_files,
    facts,
    print_files,
    profile_kernels,
    ratios,
    read_rows,
    reason_of,
    resolve_device,
    spread,
    spread_text,
    wait,
)
from thresher.bench.rollout import LogitsOf, compare, prove
from thresher.bench.rollout_sides import RolloutSide, Written
from thresher.bench.settings import (
    PeerWay,
    Seconds,
    StepSetting,
    StepShape,
    make_step_setting,
    reward_of,
    shape_of_family,
)
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection, LoraSection, OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import build_train_sequences, grpo_advantages
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.threads import threads_for, use_threads
from thresher.engine.training.update import Updater
from thresher.policy.lora import add_lora
from thresher.policy.model import Policy

WARMUP = 1  # untimed rounds
LARGEST_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.3}  # nats
SIDES = ("shared", "unshared", "peer")
NOT_YET = "not measured yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """Options. shape: a name of STEP_SHAPES. family: of its model; "qwen2" is the shape's own. model: folder of a
    published model, in place of random weights. threads None: as in a run of this model (engine/threads.py). budget:
    seconds, after which no round starts; one is always measured. profile: file for the kernel times of one more update
    with shared prefixes."""

    shape: str = "demo"
    family: str = "qwen2"
    model: str | None = None
    peer: str = "trl"
    steps: int = 5
    threads: int | None = None
    device: str = "cpu"
    budget: float = 480.0
    profile: str | None = None


@dataclass(slots=True)
class Steps:
    """The timed steps of each of SIDES, and the parts of our rollouts' time. gaps: largest differences of log-probs."""

    gaps: dict[str, float] = field(default_factory=dict)
    of: dict[str, list[Seconds]] = field(default_factory=lambda: {side: [] for side in SIDES})
    parts: list[dict[str, float]] = field(default_factory=list)
    asked: int = 0
    computed: int = 0
    way: PeerWay | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)
    peer_failure: str | None = None

    def drop(self) -> bool:
        """Drop the warm-up and an unfinished round; return whether a round is left."""
        done = min(len(taken) for taken in self.of.values() if taken) if any(self.of.values()) else 0
        every: list[list[Any]] = [*self.of.values(), self.parts]
        for taken in every:
            taken[:] = taken[WARMUP:done]
        return done > WARMUP


Keep = Callable[[Steps], dict[str, Any]]  # appends a row, and returns it


class Ours:
    """A policy with the engine's own rollout and two updaters, one of which shares prefixes.

    Each step samples its own trajectories, and all steps train the same weights in sequence. A reward from ids replaces
    that of a system. parts: seconds of decoding, prefill and the host in the last rollout. asked, computed: tokens of
    the last update, without sharing and as they went through the model. written: samples of the first weights.
    """

    def __init__(self, setting: StepSetting) -> None:
        self.setting = setting
        shape, policy = setting.shape, copy.deepcopy(setting.rollout.policy)
        weights, reference = _trained(policy, shape.lora, shape.beta > 0)
        self.side = RolloutSide(replace(setting.rollout, policy=policy))
        self.grpo = GrpoSection(beta=shape.beta, kl_value="k3_ratio")  # TRL's default is the same estimator
        self.updaters = {
            share: Updater(
                weights=weights,
                reference=reference,
                optim=OptimSection(lr=shape.lr, share_prefix=share, micro_batch_tokens=shape.micro_batch_tokens),
                grpo=self.grpo,
                vocab_size=setting.rollout.tokenizer.vocab_size,
                total_steps=1,
            )
            for share in (True, False)
        }
        self.updaters[False].optimizer = self.updaters[True].optimizer  # one set of moments
        self.steps = self.asked = self.computed = 0
        self.parts: dict[str, float] = {}
        self.written: Sequence[Written] = ()

    @property
    def policy(self) -> Policy:
        return self.updaters[True].policy

    def step(self, share_prefix: bool) -> Seconds:
        """Time one GRPO step."""
        wait(self.setting.device)
        wall, cpu = time.perf_counter(), time.process_time()
        trajectories = self.side.sample()
        wait(self.setting.device)
        sampled, sampled_cpu = time.perf_counter(), time.process_time()
        self._update(trajectories, share_prefix)
        wait(self.setting.device)
        seconds = Seconds(sampled - wall, time.perf_counter() - wall, sampled_cpu - cpu, time.process_time() - cpu)
        clock = self.side.rollout.clock
        self.parts = {"decode": clock.decode, "prefill": clock.prefill, "search": clock.search, "host": clock.rest}
        return seconds

    def profile_update(self, path: str) -> dict[str, float]:
        """Append the kernel times of one more update with shared prefixes to a file; return number and seconds."""
        trajectories, device = self.side.sample(), self.setting.device
        title = f"an update, {self.setting.shape.name}"
        kernels, busy = profile_kernels(lambda: self._update(trajectories, share_prefix=True), device, path, title)
        return {"kernels": kernels, "busy_s": busy}

    def _update(self, trajectories: Sequence[Trajectory], share_prefix: bool) -> None:
        rewards = [reward_of(t.policy_ids()) for t in trajectories]
        advantage = grpo_advantages(rewards, [trajectory.group for trajectory in trajectories], self.grpo)
        items = build_train_sequences(trajectories, advantage, self.grpo)
        stats = self.updaters[share_prefix].update(items, self.steps, 1.0)
        assert stats is not None
        self.steps += 1
        self.asked, self.computed = sum(len(item.ids) - 1 for item in items), stats.computed_tokens


def _trained(policy: Policy, lora: int | None, referred: bool) -> tuple[MasterWeights, Policy | None]:
    """Return (the trained weights, the reference, if one is `referred` to); `policy` is made trainable in place."""
    if lora is not None:
        section = LoraSection(rank=lora)
        add_lora(policy, rank=lora, alpha=section.alpha, targets=section.targets, seed=section.seed)
        return MasterWeights(policy), policy if referred else None  # the reference is the policy with its adapters off
    reference = copy.deepcopy(policy).requires_grad_(False) if referred else None
    policy.requires_grad_(True)
    master = None if policy.dtype == torch.float32 else copy.deepcopy(policy).float().requires_grad_(True)
    return MasterWeights(policy, master), reference


def run_step_bench(bench: StepBench, out: str | Path | None = None, plot: str | Path | None = None) -> dict[str, Any]:
    """Verify, time, print a table, append the rows to `out` as they are made, draw all rows of `out`; return the last.

    peer "trl" falls back to "none", with a message, if TRL is not available.
    """
    resolve_device(bench.device)
    shape = shape_of_family(bench.shape, bench.family)
    if shape.model is not None and bench.device != "cuda":
        raise UserError(f"--shape {bench.shape}: its model is for a GPU; give --device cuda")
    check_files(out, plot, bench.profile)
    begun = time.monotonic()
    setting = make_step_setting(shape, torch.device(bench.device), bench.model)
    with use_threads(bench.threads or threads_for("auto", setting.rollout.policy.config)):
        ours = Ours(setting)

        def keep(steps: Steps) -> dict[str, Any]:
            row = make_row(ours, steps, facts(("trl", "transformers")))
            append_rows(out, row)
            return row

        row = _measure(bench, ours, _peer(bench.peer, shape), begun + bench.budget, keep)
        if bench.profile is not None:
            row |= {"update_profile": ours.profile_update(bench.profile)}
            append_rows(out, row)
    show(row)
    if plot is not None:
        from thresher.bench.plots import draw_step

        draw_step([row] if out is None else rows_of_steps(out), Path(plot))
    print_files(out, plot)
    return row


def _peer(peer: str, shape: StepShape) -> str:
    """Return the peer to measure; print a sentence if the requested one is not available."""
    if peer == "trl" and not all(map(find_spec, ("trl", "datasets"))):
        console.print('TRL is not installed, so ours is measured alone; pip install "thresher[bench]" installs it.')
        return "none"
    if peer == "trl" and shape.lora is not None:
        console.print("TRL's adapters come from another library (peft), so ours is measured alone.")
        return "none"
    return peer


def _measure(bench: StepBench, ours: Ours, peer: str, deadline: float, keep: Keep) -> dict[str, Any]:
    """Keep a step of ours, then measure ours and the peer; if the peer fails, ours alone, with the reason in
    `peer_failure`. Return the last row."""
    gaps = prove_ours(ours)
    if peer == "none":
        return _take_turns(bench, ours, peer, deadline, keep, Steps(gaps))
    _take_turns(replace(bench, steps=1), ours, "none", deadline, keep, Steps(gaps, peer_failure=NOT_YET))
    try:
        return _take_turns(bench, ours, peer, deadline, keep, Steps(gaps))
    except Exception as error:  # a peer's library may raise anything; an error of ours is raised again below
        failure = reason_of(error)
    gc.collect()  # a trainer's weights and moments are in reference cycles
    if ours.setting.device.type == "cuda":
        torch.cuda.empty_cache()
    console.print(f"TRL fails, so ours is measured alone: {failure}", soft_wrap=True)
    return _take_turns(bench, ours, "none", deadline, keep, Steps(gaps, peer_failure=failure))


def _take_turns(bench: StepBench, ours: Ours, peer: str, deadline: float, keep: Keep, steps: Steps) -> dict[str, Any]:
    """Time rounds into `steps`, and keep them, also if they are interrupted."""
    try:
        _play(bench, ours, peer, deadline, steps)
    except KeyboardInterrupt:
        if steps.drop():
            keep(steps)
        raise
    steps.drop()
    return keep(steps)


def _play(bench: StepBench, ours: Ours, peer: str, deadline: float, steps: Steps) -> None:
    longest, last = 0.0, time.monotonic()

    def our_round(theirs: Seconds | None) -> bool:
        """Time both of ours after a step of the peer's; return False to end the run."""
        nonlocal longest, last
        shared = steps.of["shared"]
        for share in (True, False) if len(shared) % 2 == 0 else (False, True):
            steps.of["shared" if share else "unshared"].append(ours.step(share))
            if share:
                steps.parts.append(ours.parts)
                steps.asked, steps.computed = ours.asked, ours.computed
        if theirs is not None:
            steps.of["peer"].append(theirs)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        done = len(shared) - WARMUP
        return done < 1 or (done < bench.steps and now + longest <= deadline)

    if peer == "trl":
        from thresher.bench.step_trl import Theirs, quickest_way

        with tempfile.TemporaryDirectory() as scratch:
            steps.way, steps.tried = quickest_way(ours.setting, Path(scratch))
            theirs = Theirs(ours.setting, Path(scratch), WARMUP + bench.steps, steps.way)
            steps.gaps = steps.gaps | prove_theirs(ours, theirs.logits)
            last = time.monotonic()
            theirs.run(our_round)
    else:
        while our_round(None):
            pass


def prove_ours(ours: Ours) -> dict[str, float]:
    """Sample once, compare the recorded log-probs with our model (`prove`), and print the gap."""
    ours.written = ours.side.run().written
    gaps = prove(ours.side.setting, ours.written, limit=LARGEST_GAP[ours.policy.dtype])
    said = f"sampled log-probs agree with a forward over whole sequences to {gaps['recomputed']:.1e} nats"
    console.print(said, soft_wrap=True)
    return gaps


def prove_theirs(ours: Ours, theirs: LogitsOf) -> dict[str, float]:
    """Compare the samples of `prove_ours` with the peer's model, which has our first weights, and print the gap."""
    gaps = compare({"peer": theirs}, ours.written, ours.side.setting, LARGEST_GAP[ours.policy.dtype])
    console.print(f"they agree with TRL's model to {gaps['peer']:.1e}", soft_wrap=True)
    return gaps


def make_row(ours: Ours, steps: Steps, head: dict[str, Any]) -> dict[str, Any]:
    """Return a run's row. Its ratios are the medians over neighbouring steps' wall seconds; `ratio` and `cpu_ratio`
    have their spread, None without a peer."""
    setting, shape, config = ours.setting, ours.setting.shape, ours.setting.rollout.policy.config
    folder = setting.rollout.policy.folder

    def by_ours(side: str, part: str) -> dict[str, float] | None:
        theirs, shared = ([getattr(step, part) for step in steps.of[name]] for name in (side, "shared"))
        return ratios(theirs, shared) if theirs else None

    wall = {part: by_ours("peer", part) for part in ("total", "update", "rollout")}
    medians = {part: None if values is None else values["p50"] for part, values in wall.items()}
    gain, cpu_gain = (by_ours("unshared", part) for part in ("update", "update_cpu"))
    assert gain is not None
    return {
        "bench": "step",
        **head,
        "device": setting.device.type,
        "shape": shape.name,
        "steps": len(steps.of["shared"]),
        "tokens": shape.tokens,
        "sampled_tokens": shape.lengths.tokens,
        "asked_tokens": steps.asked,
        "computed_tokens": steps.computed,
        "ratio_step": medians["total"],
        "ratio_update": medians["update"],
        "ratio_rollout": medians["rollout"],
        "shared_gain": gain["p50"],
        **{name: _figures(shape.tokens, found) if found else None for name, found in steps.of.items()},
        "rollout_parts_s": {part: spread([one[part] for one in steps.parts]) for part in steps.parts[0]},
        "ratio": wall,
        "cpu_ratio": {part: by_ours("peer", f"{part}_cpu") for part in wall},
        "shared_gains": {"wall": gain, "cpu": cpu_gain},
        "logprob_gap": steps.gaps,
        "peer_way": None if steps.way is None else asdict(steps.way),
        "peer_ways_tried": steps.tried,
        "peer_failure": steps.peer_failure,
        "lengths": shape.record()
        | {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "vocab": setting.rollout.tokenizer.vocab_size,
            "parameters": setting.rollout.policy.parameter_count(),
            "peer_prompt": shape.peer_prompt,
            "peer_completion": shape.peer_completion,
            "weights": None if folder is None else folder.name,
            "family": config.model_type,
        },
        "update_profile": None,
    }


def _figures(tokens: int, steps: Sequence[Seconds]) -> dict[str, Any]:
    names = {"step": "total", "rollout": "rollout", "update": "update"}
    return {
        "tokens_per_s": spread([tokens / step.total for step in steps]),
        "tokens_per_cpu_s": spread([tokens / step.total_cpu for step in steps]),
        **{f"{name}_s": spread([getattr(step, part) for step in steps]) for name, part in names.items()},
        **{f"{name}_cpu_s": spread([getattr(step, f"{part}_cpu") for step in steps]) for name, part in names.items()},
    }


def rows_of_steps(path: str | Path) -> list[dict[str, Any]]:
    """Return a file's rows of this bench in their present format."""
    return [row for row in read_rows(path) if row.get("bench") == "step" and isinstance(row["shape"], str)]


def show(row: dict[str, Any]) -> None:
    """Print the table: one line per figure, one column per side."""
    named = {
        "tokens_per_s": ("step, tokens/s", "total"),
        "step_s": ("step, seconds", None),
        "rollout_s": ("rollout, seconds", "rollout"),
        "update_s": ("update, seconds", "update"),
        "step_cpu_s": ("step, CPU seconds", None),
    }

    def cell(values: dict[str, Any] | None, key: str | None) -> str:
        return spread_text(None if values is None or key is None else values[key])

    lengths = row["lengths"]
    for way in row["peer_ways_tried"]:
        how = "activations computed again" if way["checkpointing"] else "activations kept"
        console.print(f"TRL, {way['batch']} samples at once, {how}: {way['step_s']:.3g} s a step", soft_wrap=True)
    console.print(
        f"shared prefixes: an update computes {row['computed_tokens']:,} of {row['asked_tokens']:,} tokens, "
        f"{row['shared_gain']:.2f} times as fast as unshared",
        soft_wrap=True,
    )
    table(
        f"one GRPO step, {row['shape']}: {lengths['questions']} questions x {lengths['group']} samples, "
        f"{row['tokens']:,} tokens, {row['sampled_tokens']:,} of them sampled; {row['threads']} "
        f"thread{'s' if row['threads'] > 1 else ''}; median (p20 to p80) of {row['steps']} steps",
        ("", "ours", "ours, unshared", "TRL", "TRL / ours"),
        [
            (name, *(cell(row[side], key) for side in SIDES), cell(row["ratio"], part))
            for key, (name, part) in named.items()
        ],
    )
