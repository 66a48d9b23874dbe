"""`thresher bench step`: one GRPO step of ours beside one of TRL's GRPOTrainer, in the same run on the CPU.

Both get the same model (the demo's Qwen2, random weights), the same prompts with the same ids, the same group, exactly
`completion` tokens a sample, the same reward, beta, learning rate and optimiser. Their steps alternate, so whatever
else the machine does falls on both. Search is left out on both sides; TRL runs without gradient checkpointing.

    rollout    sampling all completions (TRL: `_generate`, see trl.py)
    update     the rest of the step: rewards, advantages, reference log-probs, forward, backward, clip, optimiser

Rates are completion tokens per second of rollout, and prompt and completion tokens per second of update. The ratio is
that of each pair of neighbouring steps, their seconds by ours.

The lengths are fixed by taking every other end away: the model has no end of text, and the stop tag of the episode is
too long for chance to spell. Before anything is timed, log-probs recorded while sampling must agree with a forward over
the whole sequences, and with the peer's model; if not, the bench refuses to run.

Deliberately absent: learning curves (a random model on a meaningless reward learns nothing) and any model but this one.
Axes: T packed tokens.
"""

import copy
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thresher.bench.machine import checkout, facts
from thresher.bench.measure import spread
from thresher.bench.step.setting import Seconds, Setting, StepShape, make_setting, reward_of
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.console import console, table
from thresher.engine.episode import Episode, Generate, Prompt, System, Tools
from thresher.engine.protocol.render import Renderer
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Limits, Rollout
from thresher.engine.rollout.samples import Job
from thresher.engine.training.packing import Item, pack
from thresher.engine.training.update import Updater, advantages, make_items
from thresher.kernels import token_logprobs
from thresher.retrieval.questions import Question
from thresher.rewards.errors import UserError
from thresher.rewards.result import RewardResult

PEERS = ("trl", "none")
WARMUP = 2  # steps of each side before the clock counts
STOP = "</NotToBeSpelledByChance>"
LARGEST_GAP = 1e-4  # nats, in float32


class Ours:
    """Our side: the engine's own rollout and updater around an episode that never searches."""

    def __init__(self, setting: Setting) -> None:
        self.setting, shape = setting, setting.shape
        policy = copy.deepcopy(setting.policy).requires_grad_(True)
        system = System("bench", (STOP,), _episode, _no_reward, "{question}")
        longest = max(map(len, setting.prompts))
        self.rollout = Rollout(
            policy,
            setting.tokenizer,
            None,  # an episode that never searches needs no retriever
            system,
            Tools(system.template, 1),
            Renderer(
                tokenizer=setting.tokenizer,
                tags=system.tags,
                k=1,
                chat=False,
                max_passage_tokens=1,
                passage_format="{text}",
            ),
            Limits(
                max_turn_tokens=shape.completion,
                max_policy_tokens=shape.completion,
                max_context=longest + shape.completion,
                max_running=shape.questions * shape.group,
            ),
        )
        self.grpo = GrpoSection(beta=shape.beta, kl_value="k3_ratio")  # TRL's default is the same estimator
        self.updater = Updater(
            policy=policy,
            master=policy,
            reference=copy.deepcopy(setting.policy).requires_grad_(False),
            optim=OptimSection(lr=shape.lr),
            grpo=self.grpo,
            vocab_size=setting.tokenizer.vocab_size,
            total_steps=1,
        )
        self.steps = 0

    def step(self) -> Seconds:
        """One GRPO step, timed."""
        started = time.perf_counter()
        trajectories = self.sample()
        sampled = time.perf_counter()
        rewards = [reward_of(trajectory.segments[-1].ids) for trajectory in trajectories]
        advantage = advantages(rewards, [trajectory.group for trajectory in trajectories], self.grpo)
        self.updater.update(make_items(trajectories, advantage, self.grpo), self.steps, 1.0)
        return Seconds(sampled - started, time.perf_counter() - started)

    def sample(self) -> list[Trajectory]:
        """The samples of a step, each with its full length."""
        shape = self.setting.shape
        self.steps += 1
        jobs = [
            Job(question, group, sample, (self.steps * shape.questions + group) * shape.group + sample)
            for group, question in enumerate(self.setting.questions)
            for sample in range(shape.group)
        ]
        trajectories = self.rollout.run(jobs, 1.0)
        for trajectory in trajectories:
            if len(trajectory.segments[-1].ids) != shape.completion:
                raise RuntimeError(f"a sample ended early ({trajectory.reason}): the bench's lengths are not fixed")
        return trajectories


def _episode(question: Question, tools: Tools) -> Episode:
    yield Prompt(tools.template, question.question)
    yield Generate((STOP,))
    return "ended"


def _no_reward(attempt: object) -> RewardResult:
    raise RuntimeError("the bench rewards ids, not text")


def prove(ours: Ours, theirs: Callable[[list[int]], torch.Tensor] | None = None) -> dict[str, float]:
    """Log-probs recorded while sampling against those of a forward over the whole sequences, and against the peer's.

    `theirs` maps the ids of a sequence to its logits [T, V]. Returns the largest differences in nats; raises
    RuntimeError if one exceeds LARGEST_GAP.
    """
    trajectories = ours.sample()
    vocab = ours.setting.tokenizer.vocab_size
    items = [
        Item(ids=t.ids(), positions=t.policy_positions(), old_logprobs=t.policy_logprobs(), advantage=0.0, weight=1.0)
        for t in trajectories
    ]
    policy, gaps = ours.rollout.policy, {"recomputed": 0.0}
    with torch.no_grad():
        for batch in pack(items, 4096):
            hidden_TH = policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)[batch.rows_R]
            logprobs_R, _ = token_logprobs(hidden_TH, policy.head_VH, batch.targets_R, vocab_size=vocab)
            gaps["recomputed"] = max(gaps["recomputed"], float((logprobs_R - batch.old_logprobs_R).abs().max()))
        if theirs is not None:
            gaps["peer"] = 0.0
            for item in items[:: ours.setting.shape.group]:
                logp_TV = theirs(item.ids)[:, :vocab].log_softmax(-1)
                for row, logprob in zip(item.positions, item.old_logprobs, strict=True):
                    gaps["peer"] = max(gaps["peer"], abs(float(logp_TV[row - 1, item.ids[row]]) - logprob))
    if max(gaps.values()) > LARGEST_GAP:
        raise RuntimeError(f"log-probs differ by {gaps} nats, more than {LARGEST_GAP}: nothing is timed that is wrong")
    return gaps


def run_step_bench(
    steps: int = 20, out: str | Path | None = None, peer: str = "trl", shape: StepShape | None = None
) -> dict[str, Any]:
    """Prove, time `steps` steps of each side, print a table, append a row to `out`; returns the row.

    `shape` None: the one that stored results are of. `out` None: bench/results/step-cpu.jsonl of the checkout, nothing
    where there is none. peer "trl" falls back to "none", and says so, where TRL is not installed.
    """
    if peer not in PEERS:
        raise UserError(f"--peer {peer}: expected one of {', '.join(PEERS)}")
    if steps < 1:
        raise UserError(f"--steps {steps}: expected a whole number of at least 1")
    if peer == "trl" and not all(map(find_spec, ("trl", "datasets"))):
        console.print('TRL is not installed, so ours is measured alone; pip install "thresher[bench]" brings it.')
        peer = "none"
    setting = make_setting(shape or StepShape())
    ours = Ours(setting)
    mine: list[Seconds] = []
    others: list[Seconds] = []
    parts: list[dict[str, float]] = []

    def our_step() -> None:
        mine.append(ours.step())
        clock = ours.rollout.clock
        parts.append({"decode": clock.decode, "prefill": clock.prefill, "host": clock.host})

    if peer == "trl":
        from thresher.bench.step.trl import Theirs

        with tempfile.TemporaryDirectory() as scratch:
            theirs = Theirs(setting, Path(scratch), WARMUP + steps)
            gaps = prove(ours, theirs.logits)
            console.print(_proof(gaps))
            others = theirs.run(our_step)[WARMUP:]
    else:
        gaps = prove(ours)
        console.print(_proof(gaps))
        for _ in range(WARMUP + steps):
            our_step()
    row = _row(setting, mine[WARMUP:], others, parts[WARMUP:], gaps)
    _show(row)
    root = checkout()
    path = Path(out) if out is not None else root / "bench" / "results" / "step-cpu.jsonl" if root else None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        console.print(f"appended to {path}")
    return row


def _proof(gaps: dict[str, float]) -> str:
    said = f"sampled log-probs agree with a forward over whole sequences to {gaps['recomputed']:.1e} nats"
    return said + (f", with TRL's model to {gaps['peer']:.1e}" if "peer" in gaps else "")


def _row(
    setting: Setting,
    mine: list[Seconds],
    others: list[Seconds],
    parts: list[dict[str, float]],
    gaps: dict[str, float],
) -> dict[str, Any]:
    config = setting.policy.config
    lengths = [len(prompt) for prompt in setting.prompts]
    return {
        "bench": "step",
        **facts(("trl", "transformers")),
        "shape": {
            **asdict(setting.shape),
            "prompt": [min(lengths), max(lengths)],
            "parameters": setting.policy.parameter_count(),
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "vocab": setting.tokenizer.vocab_size,
            "rollout_tokens": setting.rollout_tokens,
            "update_tokens": setting.update_tokens,
        },
        "steps": len(mine),
        "logprob_gap": gaps,
        "ours": _figures(setting, mine) | {"rollout_parts_s": {k: spread([p[k] for p in parts]) for k in parts[0]}},
        "theirs": _figures(setting, others) if others else None,
        "ratio": {
            part: spread([getattr(b, part) / getattr(a, part) for a, b in zip(mine, others, strict=True)])
            for part in ("rollout", "update", "total")
        }
        if others
        else None,
    }


def _figures(setting: Setting, steps: list[Seconds]) -> dict[str, Any]:
    return {
        "rollout_s": spread([step.rollout for step in steps]),
        "update_s": spread([step.update for step in steps]),
        "total_s": spread([step.total for step in steps]),
        "rollout_tokens_per_s": spread([setting.rollout_tokens / step.rollout for step in steps]),
        "update_tokens_per_s": spread([setting.update_tokens / step.update for step in steps]),
    }


def _show(row: dict[str, Any]) -> None:
    named = {
        "rollout_tokens_per_s": ("rollout, tokens/s", "rollout"),
        "update_tokens_per_s": ("update, tokens/s", "update"),
        "rollout_s": ("rollout, seconds", None),
        "update_s": ("update, seconds", None),
        "total_s": ("step, seconds", "total"),
    }

    def cell(values: dict[str, Any] | None, key: str | None) -> str:
        if values is None or key is None:
            return "-"
        p20, p50, p80 = (f"{values[key][p]:,.0f}" if values[key][p] >= 100 else f"{values[key][p]:.3g}" for p in _P)
        return f"{p50} ({p20} to {p80})"

    shape = row["shape"]
    table(
        f"one GRPO step: {shape['questions']} questions x {shape['group']} samples, prompts of {shape['prompt'][0]} to "
        f"{shape['prompt'][1]} tokens, {shape['completion']} sampled; median (p20 to p80) of {row['steps']} steps",
        ("", "ours", "theirs", "ratio"),
        [
            (name, cell(row["ours"], key), cell(row["theirs"], key), cell(row["ratio"], part))
            for key, (name, part) in named.items()
        ],
    )


_P = ("p20", "p50", "p80")
