"""`thresher bench train`: a recipe's task trained by TRL's GRPOTrainer: held-out answers against training time.

If model.dtype is bfloat16, TRL's weights stay in float32 and it computes under autocast, its default; ours are float32
masters with a bfloat16 copy. The following are the same as in `thresher train` of that recipe: weights, questions and
their order, ids of the prompts, reward, group, lengths, temperature, clip, AdamW with its learning rate and schedule,
threads, allocator settings. Before the first step, log-probs that our rollout recorded must agree with those of TRL's
model, which has no autocast there: to 1e-4 nats in float32, and in bfloat16 to .11 in the mean. Held-out questions are
answered greedily by our engine with TRL's weights, rounded to model.dtype, with the clock stopped. Our seconds are
those of rollout, rewards, recomputed log-probs and update; TRL's are of the whole step.

Specific to TRL are padded batches, the noise of its samples, a warm-up that starts at a learning rate of 0, and
advantages divided by the sample's deviation + 1e-4, which ours are with grpo.sample_std = true and grpo.std_eps = 1e-4.

A row is the end of a step (0: before the first): `seconds` of training, `questions` and `sampled_tokens` so far,
`reward` of its samples, and `eval`, the measures of the held-out questions, None if there was no evaluation. `side` is
"TRL", or the name of one of our runs, and `seed` distinguishes the runs of a side. With `beside`, steps of run folders
of `thresher train` are rows as well, and stored rows are shown again.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from thresher.bench.harness import append_rows, check_files, facts, print_files, read_rows
from thresher.bench.rollout import gaps_of
from thresher.bench.rollout_sides import Written
from thresher.bench.settings import PeerWay, Seconds
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.engine.assemble import RunContext, load_questions, load_retrieval, load_run_context
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.episode import Generate
from thresher.engine.evaluation.evaluate import evaluate
from thresher.engine.evaluation.metrics import measured, summary_of
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.rollout import Job
from thresher.engine.scoring.score import score
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.training.step import questions_of_step
from thresher.policy.model import hf_views
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source
from thresher.rewards.statistics import minimum_detectable_effect, seed_interval

# Keys that TRL's trainer is given, or that have no effect it could see; all other keys must have their defaults.
FREE = {
    *("clip_low", "clip_high", "std_floor", "std_eps", "sample_std", "reference", "kl_value", "kl_gradient"),
    *("drop_zero_advantage", "lr", "betas", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_ratio"),
    *("micro_batch_tokens", "attention", "share_prefix", "loss_workspace_bytes", "checkpoint_activations"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {key: value for key, value in vars(GrpoSection(beta=0.0)).items() if key not in FREE},
    "optim": {key: value for key, value in vars(OptimSection()).items() if key not in FREE},
    "rollout": {"max_turns": 1},
}
MEASURES = ("questions", "f1", "em", "reward", "response_tokens")
STEP_SECONDS = ("rollout_seconds", "reward_seconds", "recompute_seconds", "update_seconds")
OURS, TRL = "ours", "TRL"
# Nats, of all sampled tokens: the largest gap in float32; the mean in bfloat16, where single improbable tokens may be
# off by one. SmolLM2 in bfloat16 compared with float32 on a CPU: .035, 920 tokens.
LARGEST_GAP, LARGEST_MEAN_GAP = 1e-4, 0.11

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBench:
    """Options. peer: "trl", or "none" for only the rows of `beside`. batch: samples in one forward and backward of
    TRL's; checkpointing: it recomputes activations. beside: [NAME=]FOLDER of `thresher train`, whose side is NAME, or a
    file of rows."""

    peer: str = "trl"
    batch: int = 16
    checkpointing: bool = False
    beside: Sequence[str] = ()


def run_train_bench(
    bench: TrainBench, recipe: Recipe, out: str | Path | None = None, plot: str | Path | None = None
) -> list[Row]:
    """Train, append a row to `out` as each step ends, print a table, draw `plot`; return the rows."""
    if bench.peer == "none" and not bench.beside:
        raise UserError("--peer none: there is nothing to show; name a run with --beside")
    if bench.peer == "trl":
        check_comparable(recipe, bench.batch)
        if not all(map(find_spec, ("trl", "datasets"))):
            raise UserError(
                '--peer trl: TRL is not installed; pip install "thresher[bench]" installs it, and --peer none shows '
                "the run of --beside alone"
            )
    check_files(out, plot)
    rows = list[Row]()
    for beside in bench.beside:
        name, _, path = beside.rpartition("=")
        if Path(path).is_file():
            rows += (found := [row for row in read_rows(path) if row.get("bench") == "train"])
            if not found:
                raise UserError(f"--beside {path}: expected rows of bench train, found none; name another file")
        else:
            rows += (found := rows_of_run(path, name or OURS))
            append_rows(out, *found)
    if bench.peer == "none" and not sides_of(rows):
        raise UserError("--beside: none of these runs answered held-out questions; train with data.dev")
    if bench.peer == "trl":
        context = load_run_context(recipe)
        check_plain(context)
        with context.threads():
            rows += _train(Task(context), PeerWay(batch=bench.batch, checkpointing=bench.checkpointing), out)
    show(rows)
    if plot is not None:
        from thresher.bench.plots import draw_train

        draw_train(sides_of(rows), TRL, Path(plot))
    print_files(out, plot)
    return rows


def check_comparable(recipe: Recipe, batch: int) -> None:
    """Raise UserError for a recipe with settings that TRL's trainer is not given."""

    for section, defaults in SETTINGS.items():
        for key, expected in defaults.items():
            value = getattr(getattr(recipe, section), key)
            if value != expected:
                raise UserError(f"{section}.{key} is {value!r}, which is not passed to TRL; set it to {expected!r}")
    if recipe.lora is not None:
        raise UserError("[lora]: TRL's adapters come from another library; leave the section out")
    samples = recipe.rollout.questions_per_step * recipe.rollout.group_size
    if samples % batch:
        raise UserError(f"--batch {batch} does not divide the {samples} samples of a step; choose one that does")


def check_plain(context: RunContext) -> None:
    """Raise UserError for a system that TRL cannot run: with several turns, a turn that ends at a tag, or judges."""
    system, question = context.system, Question("", "", ())
    episode = system.episode(question, context.episode_config)
    next(episode)
    turn = episode.send(None)
    if not isinstance(turn, Generate) or turn.stop or system.claims is not None or system.wants_verdict:
        raise UserError(
            f"system {system.name}: TRL's trainer writes one turn, up to the end of text, and uses no judge; use a "
            "system that does the same, such as reading"
        )


class Task:
    """A recipe's questions with the ids of their prompts, its reward, and its held-out questions.

    asked: the questions of all steps, concatenated in the order of `thresher train`.
    """

    def __init__(self, context: RunContext) -> None:
        self.context, recipe = context, context.recipe
        limits = context.limits
        self.rollout = context.rollout(load_retrieval(recipe, context.system))
        train, dev = load_questions(recipe, context.system)
        count, steps = recipe.rollout.questions_per_step, range(1, recipe.run.steps + 1)
        asked = [question for step in steps for question in questions_of_step(train, count, recipe.run.seed, step)]
        self.asked = self.rollout.retrieve_and_truncate(asked).questions
        self.dev = self.rollout.retrieve_and_truncate(dev).questions
        self.completion = min(limits.max_turn_tokens, limits.max_policy_tokens)
        self.prompts = [self.rollout.prompt(question) for question in self.asked]
        longest = max(map(len, self.prompts)) + self.completion
        if longest > limits.max_context:
            raise UserError(
                f"rollout.max_context is {limits.max_context}, but a prompt and an answer may take {longest}, and TRL "
                "has no limit of this kind; raise it"
            )

    def rewards(self, numbers: Sequence[int], completions: Sequence[list[int]]) -> list[float]:
        """Return the rewards of completions of the questions with these numbers."""
        questions = [self.asked[number] for number in numbers]
        trajectories = [
            Trajectory(
                question.id, number, 0, [Segment(Source.PROMPT, self.prompts[number]), Segment(Source.POLICY, ids)]
            )
            for question, number, ids in zip(questions, numbers, completions, strict=True)
        ]
        scored = score(questions, trajectories, self.context.system, self.context.tokenizer)
        return [entry.result.reward for entry in scored]

    def sampled(self) -> list[Written]:
        """Return a group of our own samples, with their log-probs."""
        recipe = self.context.recipe
        jobs = [Job(self.asked[0], 0, sample, sample) for sample in range(recipe.rollout.group_size)]
        found = self.rollout.run(jobs, recipe.rollout.temperature)
        return [Written(one.ids(), one.policy_positions(), one.policy_logprobs()) for one in found]

    @torch.no_grad()
    def evaluate(self, weights: dict[str, torch.Tensor]) -> Row | None:
        """Return the measures of greedy answers to the held-out questions with these weights; None without questions.
        weights: by Hugging Face's names."""
        if not self.dev:
            return None
        for name, view in hf_views(self.context.policy).items():
            view.copy_(weights[name])
        summary = summary_of(measured(evaluate(self.rollout, self.dev), self.context.system.tags))
        return {name: summary[name] for name in MEASURES}


def _train(task: Task, way: PeerWay, out: str | Path | None) -> list[Row]:
    """Train by TRL; return one row per step, each appended to `out` as its step ends."""
    from thresher.bench.step_trl import Clock
    from thresher.bench.train_trl import make_trainer

    context, run = task.context, task.context.recipe.run
    ends = context.policy.config.eos_token_ids or (context.vocab_size - 1,)
    clock, rows = Clock(), list[Row]()
    rewards: list[float] = []
    lengths: list[int] = []
    head = {"bench": "train", "side": TRL, **facts(("trl", "transformers")), "device": context.policy.device.type}
    head |= {"seed": run.seed, "way": asdict(way)}

    def reward(numbers: list[int], completions: list[list[int]]) -> list[float]:
        rewards[:], lengths[:] = task.rewards(numbers, completions), map(len, completions)
        return list(rewards)

    def record(spent: Seconds | None) -> None:
        step, before = len(rows), rows[-1]["seconds"] if rows else 0.0
        due = step in (0, run.steps) or (run.eval_every and step % run.eval_every == 0)
        row = head | {
            "step": step,
            "seconds": before + (spent.total if spent else 0.0),
            "questions": step * context.recipe.rollout.questions_per_step,
            "sampled_tokens": rows[-1]["sampled_tokens"] + sum(lengths) if rows else 0,
            "step_s": spent.total if spent else None,
            "rollout_s": spent.rollout if spent else None,
            "reward": fmean(rewards) if rewards else None,
            "response_tokens": fmean(lengths) if lengths else None,
            "eval": task.evaluate(trainer.model.state_dict()) if due else None,
        }
        rows.append(row)
        append_rows(out, row)
        said = f", held-out F1 {row['eval']['f1']:.3f}, EM {row['eval']['em']:.3f}" if row["eval"] else ""
        console.print(f"TRL, step {step} of {run.steps}: {row['seconds']:,.0f} s of training{said}", soft_wrap=True)

    def between(spent: Seconds) -> bool:
        record(spent)
        return True

    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(
            context.recipe,
            way,
            task.prompts,
            reward,
            completion=task.completion,
            end=context.tokenizer.decode(ends[:1]),
            unknown=range(context.vocab_size, context.policy.config.vocab_size),
            clock=clock,
            scratch=scratch,
        )
        head["logprob_gap"] = _prove(task, trainer.model)
        record(None)
        clock.between = between
        trainer.train()
    return rows


@torch.no_grad()
def _prove(task: Task, model: Any) -> float:
    """Return the largest gap between log-probs that our rollout recorded and those of TRL's model. RuntimeError if they
    differ by more than rounding."""
    temperature, vocab = task.context.recipe.rollout.temperature, task.context.vocab_size
    gaps_R = torch.cat(
        [
            gaps_of(model(torch.tensor([one.ids], device=model.device)).logits[0] / temperature, one, vocab)
            for one in task.sampled()
        ]
    )
    largest, mean = float(gaps_R.max()), float(gaps_R.mean())
    agrees = largest <= LARGEST_GAP if task.context.policy.dtype == torch.float32 else mean <= LARGEST_MEAN_GAP
    if not agrees:
        raise RuntimeError(
            f"log-probs differ by {largest} nats from TRL's model, {mean} on average: there is nothing to compare"
        )
    console.print(
        f"sampled log-probs agree with TRL's model to {largest:.1e} nats, {mean:.1e} on average", soft_wrap=True
    )
    return largest


def rows_of_run(path: str | Path, side: str = OURS) -> list[Row]:
    """Return the steps of a folder of `thresher train` as rows of this side."""
    run = RunFolder.existing(path)
    records, starts = run.metrics(), run.starts()
    recipe = load_recipe(run.recipe_file)
    evals = {record["step"]: record["eval"] for record in records if "eval" in record}
    steps = [record for record in records if "eval" not in record]
    head = {"bench": "train", "side": side} | {
        key: starts[-1].get(key) for key in ("at", "commit", "machine", "gpu", "torch") if starts
    }
    head |= {"seed": recipe.run.seed}
    rows, seconds, tokens = list[Row](), 0.0, 0
    for number, record in enumerate([{"step": 0}, *steps]):
        spent = sum(record.get(key) or 0.0 for key in STEP_SECONDS) if number else None
        seconds, tokens = seconds + (spent or 0.0), tokens + record.get("sampled_tokens", 0)
        found = evals.get(record["step"])
        rows.append(
            head
            | {"step": record["step"], "seconds": seconds, "questions": number * recipe.rollout.questions_per_step}
            | {"sampled_tokens": tokens, "step_s": spent, "rollout_s": record.get("rollout_seconds")}
            | {key: record.get(key) for key in ("reward", "response_tokens")}
            | {"eval": None if found is None else {name: found.get(name) for name in MEASURES}}
        )
    return rows


def sides_of(rows: Sequence[Row]) -> dict[str, dict[int, list[Row]]]:
    """Return the rows with evaluations by side and step, one row per seed. UserError for a second row of a seed."""
    sides: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row["eval"]:
            others = sides.setdefault(row["side"], {}).setdefault(row["step"], [])
            if any(other.get("seed") == row.get("seed") for other in others):
                raise UserError(
                    f"step {row['step']} of {row['side']}, seed {row.get('seed')}: expected one row, found several; "
                    "name each run once, and remove the rows of a run that was repeated"
                )
            others.append(row)
    return sides


def show(rows: Sequence[Row]) -> None:
    """Print the means of each side's evaluations over its seeds, and compare the sides. The comparison has the
    difference of each side's last evaluation from the first side's, and how much longer TRL took to reach the F1 that
    both reached."""
    sides = sides_of(rows)
    table(
        "held-out questions, greedy",
        ("", "seeds", "step", "minutes of training", "F1", "exact match", "tokens of an answer"),
        [
            (
                side,
                len(found),
                step,
                f"{fmean(row['seconds'] for row in found) / 60:.1f}",
                *(str(seed_interval([row["eval"][key] for row in found])) for key in ("f1", "em")),
                f"{fmean(row['eval']['response_tokens'] for row in found):.1f}",
            )
            for side, steps in sides.items()
            for step, found in steps.items()
        ],
    )
    if not sides:
        return
    (first, steps), *others = sides.items()
    for side, found in others:
        last = max(set(steps) & set(found), default=0)
        for key, name in (("f1", "F1"), ("em", "exact match")):
            both = [{row.get("seed"): row["eval"][key] for row in each.get(last, ())} for each in (found, steps)]
            gaps = [both[0][seed] - both[1][seed] for seed in both[0] if seed in both[1]]
            if last and len(gaps) > 1:
                console.print(
                    f"step {last}, {name}: {side} - {first} is {seed_interval(gaps)}, {len(gaps)} seeds in pairs; "
                    f"minimum detectable effect {minimum_detectable_effect(gaps):.3f}, with a power of .8",
                    soft_wrap=True,
                )
    if TRL in sides and first != TRL:
        _show_slower(steps, sides[TRL], first)


def _show_slower(ours: dict[int, list[Row]], theirs: dict[int, list[Row]], name: str) -> None:
    curves = [
        [
            [fmean(value) for value in zip(*((row["seconds"], row["eval"]["f1"]) for row in rows), strict=True)]
            for rows in side.values()
        ]
        for side in (ours, theirs)
    ]
    best = min(max(f1 for _, f1 in curve) for curve in curves)
    our_s, their_s = (next(seconds for seconds, f1 in curve if f1 >= best) for curve in curves)
    if our_s > 0:
        console.print(
            f"F1 {best:.3f}, which both reached: {name} in {our_s / 60:.1f} minutes, TRL in {their_s / 60:.1f}, "
            f"{their_s / our_s:.1f} times as long",
            soft_wrap=True,
        )
