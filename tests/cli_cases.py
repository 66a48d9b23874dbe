"""A folder with everything that a run needs, made by the commands themselves."""

import json
from pathlib import Path
from typing import Any

from thresher.cli import main as cli

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 999,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
NAMES = ["Anna Bell", "Carl Dorn", "Eva Frost", "Gil Hart"]
RECIPE = """
[model]
path = "{folder}/model"
[data]
train = "{folder}/questions.jsonl"
dev = "{folder}/questions.jsonl"
[retrieval]
index = "{folder}/index"
k = 2
passage_format = "{{text}}"
[system]
name = "search_r1"
template = "{folder}/prompt.txt"
[rollout]
group_size = 2
questions_per_step = 2
max_turns = 2
max_turn_tokens = 6
max_context = 96
max_num_seqs = 4
[run]
steps = 1
[sft]
transcripts = "{folder}/transcripts.jsonl"
steps = 2
batch_size = 2
"""


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def finished_folder(folder: Path) -> Path:
    """Make model, questions, corpus, index, transcripts and a recipe in `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    facts = [{"id": name, "title": name, "text": f"{name} lives."} for name in NAMES]
    corpus = write(folder / "corpus.jsonl", *facts)
    asked = [{"id": name, "question": f"Who is {name}?", "golden_answers": [name]} for name in NAMES]
    write(folder / "questions.jsonl", *asked)
    said = [{"question": f"Who is {name}?", "segments": [{"source": "policy", "text": name}]} for name in NAMES]
    write(folder / "transcripts.jsonl", *said)
    right = {"segments": [{"source": "policy", "text": "<answer>Anna Bell</answer>"}], "golden_answers": ["Anna Bell"]}
    write(folder / "scored.jsonl", {"id": "a", **right}, {"id": "b", **right})
    (folder / "prompt.txt").write_text("Q: {question}\n")
    recipe_in(folder)
    init = ["init", "--config", str(folder / "config.json"), "--train-tokenizer", str(corpus), "--vocab-size", "300"]
    assert cli.run([*init, "--out", str(folder / "model")]) == 0
    assert cli.run(["index", "build", "--corpus", str(corpus), "--out", str(folder / "index")]) == 0
    return folder


def recipe_in(folder: Path) -> Path:
    """Rewrite the recipe of a copied folder so that it names the copy; return its path."""
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    return folder
