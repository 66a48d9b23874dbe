"""TRL's side of `thresher bench train`: its GRPOTrainer with a recipe's settings and the questions of its steps."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from thresher.bench.settings import PeerWay
from thresher.bench.step_trl import Clock, quiet, their_arguments, their_tokenizer, time_generation
from thresher.engine.config.recipe import Recipe

SCHEDULES = {"constant": "constant_with_warmup"}  # named differently there


def make_trainer(
    recipe: Recipe,
    way: PeerWay,
    prompts: Sequence[list[int]],
    reward: Callable[[list[int], list[list[int]]], list[float]],
    *,
    completion: int,
    end: str,
    unknown: Sequence[int],
    clock: Clock,
    scratch: str,
) -> GRPOTrainer:
    """Return a trainer that uses `prompts` in their order. reward: maps their numbers and the ids of completions to
    rewards. completion: maximum tokens of one. end: the text of the token that ends one. unknown: ids of the head
    without a token in the tokenizer, which are not sampled."""
    rollout, optim, folder = recipe.rollout, recipe.optim, Path(recipe.model.path)

    def rewards(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return reward(list(map(int, prompts)), completion_ids)

    arguments = their_arguments(
        Path(scratch),
        rollout.questions_per_step * rollout.group_size,
        way,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=recipe.model.device == "cpu",
        bf16=recipe.model.dtype == "bfloat16",  # autocast; its weights stay in float32, like our master weights
        max_steps=recipe.run.steps,
        num_generations=rollout.group_size,
        max_completion_length=completion,
        generation_kwargs={"suppress_tokens": list(unknown)} if unknown else None,
        temperature=rollout.temperature,
        beta=0.0,
        epsilon=recipe.grpo.clip_low,
        epsilon_high=recipe.grpo.clip_high,
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm if math.isfinite(optim.max_grad_norm) else 0.0,
        lr_scheduler_type=SCHEDULES.get(optim.schedule, optim.schedule),
        warmup_steps=math.ceil(optim.warmup_ratio * recipe.run.steps),
        seed=recipe.run.seed,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": list(map(str, range(len(prompts))))}),
        processing_class=their_tokenizer(folder, end),
        callbacks=[clock],
    )
    # The texts are the prompts' numbers: a prompt's ids are put together in pieces, and encoding the whole text may
    # give other ids.
    trainer._tokenize_prompts = lambda texts: ([list(prompts[int(text)]) for text in texts], None, {})
    time_generation(trainer, clock)
    return quiet(trainer)
