"""Shared by the tests of recipes: the smallest and a full one, a function that writes them, and error messages."""

from pathlib import Path
from typing import Any

import pytest

from thresher.common.errors import UserError
from thresher.engine.config.recipe import load_recipe

SMALLEST = '[model]\npath = "m"\n'
FULL = """
[model]
path = "models/tiny"
dtype = "bfloat16"
device = "cuda"
prompt = "chat"
[data]
train = "train.jsonl"
dev = "dev.jsonl"
limit = 100
[retrieval]
index = "index"
[system]
name = "eval_rar"
[system.options]
partial_credit = false
weights = [0.1, 1, "x"]
"odd key" = { deep = 1.0 }
[grpo]
clip_high = 1
kl_value = "k2"
aggregation = "constant"
aggregation_constant = 256
old_logprobs = "recomputed"
updates_per_batch = 2
tis_cap = 4
[optim]
betas = [0.9, 0.95]
max_grad_norm = inf
[run]
steps = 7
[sft]
transcripts = "t.jsonl"
stop_at_copy_accuracy = 0.9
[lora]
rank = 8
[judge]
entailment = "models/nli"
labels = ["entailment", "neutral", "contradiction"]
max_tokens = 256
batch_tokens = 4096
device = "cuda"
url = "http://h:1"
model = "chat"
key_env = "CHAT_KEY"
replies = "replies.jsonl"
"""


def writer(folder: Path) -> Any:
    """Return a function that writes a recipe into the folder and returns its path."""

    def write(text: str, name: str = "r.toml") -> Path:
        path = folder / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    """Return the message of the UserError, without the folder."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path.parent}/", "")
