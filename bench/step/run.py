"""`thresher bench step`: a whole GRPO step of ours, prefixes shared and unshared, beside one of TRL's GRPOTrainer.

All get the same model (random weights), prompts, group, number of tokens given and sampled, reward, beta, learning rate
and optimiser; shapes.py says what. Their steps alternate in one process, so whatever else the machine does falls on
all.

    rollout    sampling all completions (TRL: `_generate`, see trl.py)
    update     the rest of the step: rewards, advantages, reference log-probs, forward, backward, clip, optimiser
    tokens     of a step's trajectories, prompts and passages included, each counted for every sample of its group: what
               is processed is less where prefixes are shared, but what is trained is the same
    ratio_*    TRL's seconds by ours (prefixes shared), of neighbouring steps; above 1 ours is faster
    shared_gain    seconds of our update without shared prefixes by those with

Lengths are fixed by taking every other end away: the model has no end of text, and the stop tag of the episode is too
long for chance to spell. Before anything is timed, log-probs recorded while sampling must agree with a forward over the
whole sequences, and with the peer's model; if not, the bench refuses to run.

Deliberately absent: learning curves (a random model on a meaningless reward learns nothing), scoring by a system's
reward, and TRL behind vLLM. Axes: T packed tokens.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thresher.bench.machine import facts
from thresher.bench.rows import append_rows, check_files
from thresher.bench.step.ours import Ours
from thresher.bench.step.report import make_row, read_rows, show
from thresher.bench.step.setting import Seconds, Steps, make_setting
from thresher.bench.step.shapes import SHAPES, StepShape
from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.machine import checkout
from thresher.engine.packing import TrainSequence, pack
from thresher.engine.threads import threads_for, use_threads
from thresher.kernels import token_logprobs

PEERS = ("trl", "none")
WARMUP = 1  # rounds before the clock counts
PROVED = 8  # sequences that are held to both models
LARGEST_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.3}  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What to measure. shape: a name of SHAPES. threads None: as a run of this model takes (engine/threads.py).
    budget: seconds, after which no round begins; one is measured in any case."""

    shape: str = "demo"
    peer: str = "trl"
    steps: int = 5
    threads: int | None = None
    device: str = "cpu"
    budget: float = 480.0

    def check(self) -> StepShape:
        """The shape. UserError for what cannot be measured."""
        if self.shape not in SHAPES:
            raise UserError(f"--shape {self.shape}: expected one of {', '.join(SHAPES)}")
        if self.peer not in PEERS:
            raise UserError(f"--peer {self.peer}: expected one of {', '.join(PEERS)}")
        for flag, value in (("steps", self.steps), ("threads", self.threads)):
            if value is not None and value < 1:
                raise UserError(f"--{flag} {value}: expected a whole number of at least 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device cuda: torch {torch.__version__} sees none; run where there is one, or with cpu")
        shape = SHAPES[self.shape]
        if shape.model is not None and self.device != "cuda":
            raise UserError(f"--shape {self.shape}: its model is for a GPU; give --device cuda")
        return shape


def run_step_bench(bench: StepBench, out: str | Path | None = None, plot: str | Path | None = None) -> dict[str, Any]:
    """Prove, time, print a table, append a row to `out`, draw what `out` holds; returns the row.

    `out` None: bench/results/step-cpu.jsonl of the checkout, step-gpu.jsonl on CUDA, nothing where there is none. peer
    "trl" falls back to "none", and says so, where TRL cannot be had.
    """
    shape = bench.check()
    root = checkout()
    if out is None and root is not None:
        out = root / "bench" / "results" / f"step-{'cpu' if bench.device == 'cpu' else 'gpu'}.jsonl"
    check_files(out, plot)
    begun = time.monotonic()
    setting = make_setting(shape, torch.device(bench.device))
    with use_threads(bench.threads or threads_for("auto", setting.rollout.policy.config)):
        ours = Ours(setting)
        gaps, steps = _measure(bench, ours, _peer(bench.peer, shape), begun + bench.budget)
        row = make_row(ours, steps, gaps, facts(("trl", "transformers")))
    show(row)
    append_rows(out, row)
    if plot is not None:
        from thresher.bench.step.plot import draw

        draw([row] if out is None else read_rows(out), Path(plot))
    for path in filter(None, (out, plot)):
        console.print(f"written to {path}", soft_wrap=True)
    return row


def _peer(peer: str, shape: StepShape) -> str:
    """Whom to measure beside; a sentence where it is nobody though somebody was asked for."""
    if peer == "trl" and not all(map(find_spec, ("trl", "datasets"))):
        console.print('TRL is not installed, so ours is measured alone; pip install "thresher[bench]" brings it.')
        return "none"
    if peer == "trl" and shape.lora is not None:
        console.print("TRL's adapters are another library's (peft), so ours is measured alone.")
        return "none"
    return peer


def _measure(bench: StepBench, ours: Ours, peer: str, deadline: float) -> tuple[dict[str, float], Steps]:
    steps, longest, last = Steps(), 0.0, time.monotonic()

    def our_round(theirs: Seconds | None) -> bool:
        """Both of ours behind a step of the peer's; whether there shall be another round."""
        nonlocal longest, last
        order = (True, False) if len(steps.shared) % 2 == 0 else (False, True)
        for share in order:
            (steps.shared if share else steps.unshared).append(ours.step(share))
            if share:
                steps.parts.append(ours.parts)
                steps.asked, steps.computed = ours.asked, ours.computed
        if theirs is not None:
            steps.peer.append(theirs)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        done = len(steps.shared) - WARMUP
        return done < 1 or (done < bench.steps and now + longest <= deadline)

    if peer == "trl":
        from thresher.bench.step.trl import Theirs

        with tempfile.TemporaryDirectory() as scratch:
            theirs = Theirs(ours.setting, Path(scratch), WARMUP + bench.steps)
            gaps = prove(ours, theirs.logits)
            _say(gaps)
            last = time.monotonic()
            theirs.run(our_round)
    else:
        gaps = prove(ours)
        _say(gaps)
        last = time.monotonic()
        while our_round(None):
            pass
    for warm in (steps.shared, steps.unshared, steps.peer, steps.parts):
        del warm[:WARMUP]
    return gaps, steps


def prove(ours: Ours, theirs: Callable[[list[int]], torch.Tensor] | None = None) -> dict[str, float]:
    """Log-probs recorded while sampling against those of a forward over the whole sequences, and against the peer's.

    `theirs` maps the ids of a sequence to its logits [T, V]. Returns the largest differences in nats; raises
    RuntimeError if one exceeds LARGEST_GAP of the dtype.
    """
    trajectories = ours.sample()
    vocab = ours.setting.rollout.tokenizer.vocab_size
    items = [
        TrainSequence(
            ids=t.ids(), positions=t.policy_positions(), old_logprobs=t.policy_logprobs(), advantage=0.0, weight=1.0
        )
        for t in trajectories[:: max(1, len(trajectories) // PROVED)]
    ]
    policy = ours.policy
    found: dict[str, list[torch.Tensor]] = {"recomputed": []}
    with torch.no_grad():
        for batch in pack(items, 4096, policy.device, ours.updaters[True].attention):
            hidden_TH = policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)[batch.rows_R]
            logprobs_R, _ = token_logprobs(hidden_TH, policy.head_VH, batch.targets_R, vocab_size=vocab)
            found["recomputed"].append((logprobs_R - batch.old_logprobs_R).abs().max().cpu())
        for item in items:
            if theirs is None:
                break
            at_R = torch.tensor(item.positions)
            logp_RV = theirs(item.ids)[at_R - 1, :vocab].float().log_softmax(-1).cpu()
            logprobs_R = logp_RV.gather(1, torch.tensor(item.ids)[at_R, None])[:, 0]
            found.setdefault("peer", []).append((logprobs_R - torch.tensor(item.old_logprobs)).abs().max())
    gaps = {name: float(torch.stack(values).max()) for name, values in found.items()}  # NaN where one of them is
    if not all(gap <= LARGEST_GAP[policy.dtype] for gap in gaps.values()):
        raise RuntimeError(
            f"log-probs differ by {gaps} nats, more than {LARGEST_GAP[policy.dtype]}: nothing is timed that is wrong"
        )
    return gaps


def _say(gaps: dict[str, float]) -> None:
    said = f"sampled log-probs agree with a forward over whole sequences to {gaps['recomputed']:.1e} nats"
    console.print(said + (f", with TRL's model to {gaps['peer']:.1e}" if "peer" in gaps else ""), soft_wrap=True)
