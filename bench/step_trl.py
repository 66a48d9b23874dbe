"""TRL's side of `thresher bench step`: its GRPOTrainer as it comes, with the step's phases timed from outside.

A step lasts from `on_step_begin` to `on_step_end`; the rollout is the trainer's own `_generate` (tokenise, generate,
decode). Our steps run inside the `on_step_end` callback, after the clock was stopped. All samples of a step are one
batch, without checkpointing: its fastest where memory allows it. `min_new_tokens` keeps samples at their full length.
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

from thresher.bench.settings import Seconds, StepSetting, reward_of
from thresher.engine.world.random_model import END_OF_TEXT


class Theirs:
    """A trainer over the setting's model, written to and loaded from `folder`; `steps` at most."""

    def __init__(self, setting: StepSetting, folder: Path, steps: int) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        setting.rollout.policy.save(folder / "model")
        setting.rollout.tokenizer.save(folder / "model")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "model" / "tokenizer.json"),
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            padding_side="left",
        )
        if tokenizer(setting.peer_prompts)["input_ids"] != setting.peer_ids():
            raise RuntimeError("TRL's tokenizer gives other ids for the same prompts: there is nothing to compare")
        self.clock = _Clock()
        self.trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=_rewards,
            args=_arguments(setting, folder, steps),
            train_dataset=Dataset.from_dict({"prompt": setting.peer_prompts * steps}),
            processing_class=tokenizer,
            callbacks=[self.clock],
        )
        generate = self.trainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = _now()
            result = generate(*args, **kwargs)
            done, done_cpu = _now()
            self.clock.rollout = done - wall, done_cpu - cpu
            lengths = [{len(ids) for ids in side} for side in result[:2]]
            if lengths != [{setting.shape.peer_prompt}, {setting.shape.peer_completion}]:
                raise RuntimeError(f"TRL's prompts and samples have lengths {lengths}: there is nothing to compare")
            return result

        self.trainer._generate = timed

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return logits [T, V] of TRL's model for the ids of one sequence."""
        model = self.trainer.model
        logits_TV: torch.Tensor = model(torch.tensor([ids], device=model.device)).logits[0]
        return logits_TV

    def run(self, between: Callable[[Seconds], bool]) -> None:
        """Train; `between` gets every step's clock behind it, and returns False to end the training."""
        self.clock.between = between
        self.trainer.train()


class _Clock(TrainerCallback):
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
    """Wall and CPU seconds, once a GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def _rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def _arguments(setting: StepSetting, folder: Path, steps: int) -> GRPOConfig:
    shape, lengths, cpu = setting.shape, setting.shape.lengths, setting.device.type == "cpu"
    return GRPOConfig(
        output_dir=str(folder / "run"),
        model_init_kwargs={"dtype": "float32" if cpu else "bfloat16"},
        use_cpu=cpu,
        bf16=not cpu,
        gradient_checkpointing=False,
        max_steps=steps,
        per_device_train_batch_size=lengths.samples,
        num_generations=lengths.group,
        max_completion_length=shape.peer_completion,
        generation_kwargs={"min_new_tokens": shape.peer_completion},
        temperature=1.0,
        beta=shape.beta,
        loss_type="grpo",
        learning_rate=shape.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        seed=lengths.seed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
