"""TRL's side of `thresher bench step`: an unmodified GRPOTrainer, with the step's phases timed from outside.

A step lasts from `on_step_begin` to `on_step_end`; the rollout is the trainer's own `_generate` (tokenise, generate,
decode). Our steps run inside the `on_step_end` callback, after the clock was stopped. All samples of a step are one
batch, without checkpointing, the fastest way if memory allows it; for larger models a shape names the ways to try.
`min_new_tokens` keeps samples at their full length. bench/train.py uses the same trainer, without that.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from thresher.bench.settings import PeerWay, Seconds, StepSetting, reward_of


class Theirs:
    """A trainer over the setting's model, which is written to `folder` and loaded from it; `steps` at most."""

    def __init__(self, setting: StepSetting, folder: Path, steps: int, way: PeerWay) -> None:
        setting.rollout.policy.save(folder / "model")
        setting.rollout.tokenizer.save(folder / "model")
        tokenizer = their_tokenizer(folder / "model", setting.end)
        if tokenizer(setting.peer_prompts)["input_ids"] != setting.peer_ids():
            raise RuntimeError("TRL's tokenizer gives different ids for the same prompts: there is nothing to compare")
        self.clock = Clock()
        self.trainer = quiet(
            GRPOTrainer(
                model=str(folder / "model"),
                reward_funcs=_rewards,
                args=_arguments(setting, folder, steps, way),
                train_dataset=Dataset.from_dict({"prompt": setting.peer_prompts * steps}),
                processing_class=tokenizer,
                callbacks=[self.clock],
            )
        )

        def check(result: Any) -> None:
            lengths = [{len(ids) for ids in side} for side in result[:2]]
            if lengths != [{setting.shape.peer_prompt}, {setting.shape.peer_completion}]:
                raise RuntimeError(f"TRL's prompts and samples have lengths {lengths}: there is nothing to compare")

        time_generation(self.trainer, self.clock, check)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return logits [T, V] of TRL's model for the ids of one sequence."""
        model = self.trainer.model
        logits_TV: torch.Tensor = model(torch.tensor([ids], device=model.device)).logits[0]
        return logits_TV

    def run(self, between: Callable[[Seconds], bool]) -> None:
        """Train. `between` gets every step's clock after it, and returns False to end the training."""
        self.clock.between = between
        self.trainer.train()


def quickest_way(setting: StepSetting, folder: Path) -> tuple[PeerWay, list[dict[str, Any]]]:
    """Return the fastest way of a step, and the seconds of all ways tried: one step each after one to warm up. A single
    way is not tried."""
    ways = setting.shape.peer_ways
    if len(ways) == 1:
        return ways[0], []
    taken: list[float] = []

    def keep(seconds: Seconds) -> bool:
        taken.append(seconds.total)
        return True

    for way in (ways[0], *ways):
        Theirs(setting, folder, 1, way).run(keep)
        gc.collect()  # a trainer's weights and moments are in reference cycles
    del taken[0]
    tried = [asdict(way) | {"step_s": seconds} for way, seconds in zip(ways, taken, strict=True)]
    return ways[taken.index(min(taken))], tried


def their_tokenizer(folder: Path, end: str) -> PreTrainedTokenizerFast:
    """Return a folder's tokenizer as transformers loads it. end: the token that ends and pads texts."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=end, pad_token=end, padding_side="left"
    )


def quiet(trainer: GRPOTrainer) -> GRPOTrainer:
    """Return the trainer, with its output turned off."""
    trainer.remove_callback(PrinterCallback)
    return trainer


def time_generation(trainer: GRPOTrainer, clock: "Clock", check: Callable[[Any], None] = lambda _: None) -> None:
    """Make `clock` time the trainer's sampling, and check its result outside of the timed part."""
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = _now()
        result = generate(*args, **kwargs)
        done, done_cpu = _now()
        clock.rollout = done - wall, done_cpu - cpu
        check(result)
        return result

    trainer._generate = timed


class Clock(TrainerCallback):
    """The clock of a trainer's steps; `between` as in `Theirs.run`."""

    def __init__(self) -> None:
        self.between: Callable[[Seconds], bool] = lambda _: True
        self.rollout = self.started = (0.0, 0.0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wall, cpu = _now()
        seconds = Seconds(self.rollout[0], wall - self.started[0], self.rollout[1], cpu - self.started[1])
        if not self.between(seconds):
            control.should_training_stop = True


def _now() -> tuple[float, float]:
    """Return wall and CPU seconds, once a GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def _rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def _arguments(setting: StepSetting, folder: Path, steps: int, way: PeerWay) -> GRPOConfig:
    shape, lengths, cpu = setting.shape, setting.shape.lengths, setting.device.type == "cpu"
    return their_arguments(
        folder / "run",
        lengths.samples,
        way,
        model_init_kwargs={"dtype": "float32" if cpu else "bfloat16"},
        use_cpu=cpu,
        bf16=not cpu,
        max_steps=steps,
        num_generations=lengths.group,
        max_completion_length=shape.peer_completion,
        generation_kwargs={"min_new_tokens": shape.peer_completion},
        temperature=1.0,
        beta=shape.beta,
        learning_rate=shape.lr,
        lr_scheduler_type="constant",
        seed=lengths.seed,
    )


def their_arguments(folder: Path, samples: int, way: PeerWay, **settings: Any) -> GRPOConfig:
    """Return a trainer's settings with `samples` samples per step. It keeps the order of the questions, and prints and
    saves nothing."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    batch = way.batch or samples
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=samples // batch,
        gradient_checkpointing=way.checkpointing,
        loss_type="grpo",
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
