"""TRL's side of `thresher bench step`: its GRPOTrainer as it comes, with the step's phases timed from outside.

A step lasts from the trainer's `on_step_begin` to its `on_step_end`, the optimiser's step included. The rollout is the
trainer's own `_generate` (tokenise, `model.generate`, decode); the rest is the update. Our step runs inside the
`on_step_end` callback, after the clock was stopped.

Samples keep their full length through `min_new_tokens`. Logging, saving and progress bars are off.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from thresher.bench.step.setting import Seconds, Setting, reward_of
from thresher.engine.synthetic.random_model import END_OF_TEXT


class Theirs:
    """A trainer over the setting's model, written to and loaded from `folder`."""

    def __init__(self, setting: Setting, folder: Path, steps: int) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        setting.policy.save(folder / "model")
        setting.tokenizer.save(folder / "model")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "model" / "tokenizer.json"),
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            padding_side="left",
        )
        prompts = [question.question for question in setting.questions]
        if tokenizer(prompts)["input_ids"] != setting.prompts:
            raise RuntimeError("TRL's tokenizer gives other ids for the same prompts: there is nothing to compare")
        self.clock = _Clock()
        self.trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=_rewards,
            args=_arguments(setting, folder, steps),
            train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
            processing_class=tokenizer,
            callbacks=[self.clock],
        )
        generate = self.trainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = generate(*args, **kwargs)
            self.clock.rollout = time.perf_counter() - started
            if {len(ids) for ids in result[1]} != {setting.shape.completion}:
                raise RuntimeError("TRL's samples differ in length: there is nothing to compare")
            return result

        self.trainer._generate = timed

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Ids of one sequence -> logits [T, V] of TRL's model."""
        logits_TV: torch.Tensor = self.trainer.model(torch.tensor([ids])).logits[0]
        return logits_TV

    def run(self, between: Callable[[], None]) -> list[Seconds]:
        """Train; `between` runs after every step. Returns each step's clock."""
        self.clock.between = between
        self.trainer.train()
        return self.clock.steps


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[Seconds] = []
        self.between: Callable[[], None] = lambda: None
        self.rollout = self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(Seconds(self.rollout, time.perf_counter() - self.started))
        self.between()


def _rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def _arguments(setting: Setting, folder: Path, steps: int) -> GRPOConfig:
    shape = setting.shape
    return GRPOConfig(
        output_dir=str(folder / "run"),
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=steps,
        per_device_train_batch_size=shape.questions * shape.group,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        generation_kwargs={"min_new_tokens": shape.completion},
        temperature=1.0,
        beta=shape.beta,
        loss_type="grpo",
        learning_rate=shape.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        seed=shape.seed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
