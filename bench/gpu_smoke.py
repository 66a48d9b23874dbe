"""The part `smoke` of `thresher bench gpu-check`: the commands that a user runs first, on a model with random weights.

    data invent -> init -> index build -> sft -> train, 2 steps -> train --resume, 1 more -> eval of the best checkpoint

`python -m thresher.bench.gpu_smoke ROWS [SIZE DEVICE]`. The recipe is the demo's, in bfloat16 on CUDA. The model has
the widths of Qwen2.5-0.5B, fewer layers, and a head of 32,768 columns. The fine-tuning teaches it enough of the format
to search. Nothing is downloaded. All commands run in this process in sequence, so that torch and CUDA are loaded once.
"""

import json
import math
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from thresher.bench.harness import append_rows, facts
from thresher.common.errors import UserError
from thresher.engine.world.stages import DEMO, sets_of

LARGEST_GAP = {"cuda": 0.3, "cpu": 1e-4}  # nats: bfloat16, float32
# Keys of a config.json; "tiny" is for tests on a CPU.
SIZES = {
    "0.5B": (
        "hidden_size=896",
        "intermediate_size=4864",
        "num_attention_heads=14",
        "num_key_value_heads=2",
        "num_hidden_layers=8",
        "vocab_size=32768",
        "rope_theta=1e6",
        "initializer_range=0.02",
    ),
    "tiny": ("hidden_size=32", "intermediate_size=64", "num_attention_heads=2", "num_key_value_heads=1"),
}


def smoke_commands(folder: Path, size: str, device: str) -> list[list[str]]:
    """Return the commands, as argument lists of `thresher`."""
    data, words, model, warm, run = (folder / name for name in ("data", "words", "init", "warm", "run"))
    trained_on = [str(data / name) for name in ("corpus.jsonl", "train.jsonl", "warmup.jsonl")]
    sets = (
        f"model.device={device}",
        f"model.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
        f"data.train={data / 'train.jsonl'}",
        f"data.dev={data / 'test.jsonl'}",
        f"retrieval.index={folder / 'index'}",
        f"system.template={DEMO / 'prompt.txt'}",
        f"sft.transcripts={data / 'warmup.jsonl'}",
        "sft.steps=40",
        "sft.lr=1e-3",
        "sft.held_out=0.0",
        "sft.stop_at_copy_accuracy=",  # removes the demo's gate
        "grpo.entropy_coef=1e-3",  # a gradient even if all rewards are equal
        "optim.lr=1e-5",
        "optim.schedule=constant",  # so that a resumed run may have more steps
        "optim.warmup_ratio=0.0",
        "rollout.questions_per_step=8",
        "run.eval_questions=8",
        "run.save_every=2",
        "run.keep_checkpoints=1",
    )
    recipe = [str(DEMO / "recipe.toml"), *sets_of(*sets)]

    def train(steps: int) -> list[str]:
        return ["train", *recipe, *sets_of(f"model.path={warm}", f"run.steps={steps}"), "--out", str(run)]

    demo = str(DEMO / "config.json")
    of_texts = ["--train-tokenizer", *trained_on, "--vocab-size", "800", "--out", str(words)]
    of_size = ["--tokenizer", str(words), *sets_of(*SIZES[size]), "--out", str(model)]
    embedded = ["--encoder", "lexical", "--embed", "title+text", "--out", str(folder / "index")]
    return [
        ["data", "invent", "--out", str(data)],
        ["init", "--config", demo, *of_texts],
        ["init", "--config", str(words / "config.json"), *of_size],
        ["index", "build", "--corpus", str(data / "corpus.jsonl"), *embedded],
        ["sft", *recipe, *sets_of(f"model.path={model}"), "--out", str(warm)],
        train(2),
        [*train(3), "--resume"],
        ["eval", "--best-of", str(run), "--limit", "8", "--out", str(folder / "eval")],
    ]


def run_smoke(folder: Path, size: str, device: str) -> dict[str, Any]:
    """Run the commands in turn; return a row. UserError if one fails, or if a figure is wrong."""
    from thresher.cli.main import run

    seconds: dict[str, float] = {}
    for words in smoke_commands(folder, size, device):
        print(f"$ thresher {shlex.join(words)}", flush=True)
        started, name = time.monotonic(), "resume" if "--resume" in words else words[0]
        status = run(words)
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started
        print(f"{name}: {seconds[name]:.1f} s", flush=True)
        if status:
            raise UserError(f"{name} ended with status {status}")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [record for record in records if "logprob_gap_max" in record]
    if [record["step"] for record in steps] != [1, 2, 3]:
        raise UserError(f"expected updates of steps 1, 2 and 3, the run has {[record['step'] for record in steps]}")
    gap = max(record["logprob_gap_max"] for record in steps)
    if not (gap <= LARGEST_GAP[device] and all(math.isfinite(record["loss"]) for record in steps)):
        losses = [record["loss"] for record in steps]
        raise UserError(f"log-probs of rollout and update differ by {gap:.2g} nats, the losses are {losses}")
    kept = ("loss", "grad_norm", "logprob_gap_max", "search_queries")
    rates = {"rollout": ("sampled_tokens", "rollout_seconds"), "update": ("train_tokens", "update_seconds")}
    figures = [
        {name: record[name] for name in kept}
        | {f"{name}_tokens_per_s": record[tokens] / record[spent] for name, (tokens, spent) in rates.items()}
        for record in steps
    ]
    return {
        "bench": "smoke",
        **facts(("triton",)),
        "device": device,
        "size": size,
        "seconds": seconds,
        "steps": figures,
    }


def main(out: str, size: str = "0.5B", device: str = "cuda") -> None:
    """Run the commands in a temporary folder, and append the row to `out`."""
    with tempfile.TemporaryDirectory(prefix="thresher-smoke-") as folder:
        try:
            append_rows(out, run_smoke(Path(folder), size, device))
        except UserError as error:
            sys.exit(f"smoke: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
