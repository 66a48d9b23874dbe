"""Several ranks train what one trains: processes over gloo, each with a thread of its own, on a small model.

All that needs processes is run once, by `runs`, for starting them takes longer than what they do. How far the weights
may be apart is set by what moves them: at lr = eps = 0.01 a weight moves by g / (|g| + eps) hundredths, so that a
gradient's rounding error reaches it no larger than it is, while the step itself is thousands of times larger.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy
from rank_worker import copy_until_step_1
from safetensors.torch import load_file
from train_cases import metrics, sampled, single_threaded, untimed

from thresher.engine.config.recipe import Recipe
from thresher.engine.training.train import train
from thresher.policy.model import Policy, hf_views, load_policy

WORKER = Path(__file__).parents[2] / "rank_worker.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
TOLERANCE = 1e-6
LR = 1e-2
# Which samples share a forward, and what they can share, follows from how many are on a rank.
BY_RANK = {"prefilled_tokens", "shared_tokens", "preemptions"}
OF_PROCESS = {"threads", "wait_policy"}  # of the tests' own, or of a worker


@dataclass
class Runs:
    """The folder that holds all runs by name, and the recipe of most of them."""

    folder: Path
    recipe: Recipe

    def weights(self, name: str, step: int, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "checkpoints" / f"step_{step:06d}" / file)

    def error(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}.{rank}.error").read_text()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def untied(folder: Path, source: Path) -> Path:
    """The model of `source` with a head of its own, which begins as a copy of the embedding."""
    tied = load_policy(source)
    policy = Policy(tied.config.replace(tie_word_embeddings=False))
    for name, view in hf_views(policy).items():
        view.copy_(hf_views(tied)["model.embed_tokens.weight" if name == "lm_head.weight" else name])
    policy.save(folder)
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, make_recipe: Callable[..., Recipe]) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")

    def make(name: str, **changes: dict[str, Any]) -> Recipe:
        recipe = make_recipe(
            rollout={"questions_per_step": 4, "group_size": 3},
            optim={"lr": LR, "eps": LR, "warmup_ratio": 0.0, "micro_batch_tokens": 200},
            run={"steps": 2, "save_every": 1, "eval_every": None} | changes.pop("run", {}),
            **changes,
        )
        recipe.write(folder / f"{name}.toml")
        return recipe

    plain = make("plain")
    model = untied(folder / "untied-model", Path(plain.model.path))
    short = {"steps": 1, "eval_questions": 1}
    others = {
        "adapters": make("adapters", run=short, lora={"rank": 3, "alpha": 6.0}),
        "parts": make(
            "parts",
            run=short,
            model={"path": str(model)},
            grpo={"updates_per_batch": 2, "shuffle_rewards": True, "aggregation": "token", "drop_zero_advantage": True},
        ),
    }
    train(plain, folder / "plain-1")
    for name, recipe in others.items():
        train(recipe, folder / f"{name}-1")

    def scenario(ranks: int, name: str, recipe: str = "plain", **more: Any) -> dict[str, Any]:
        return {"ranks": ranks, "out": str(folder / name), "recipe": str(folder / f"{recipe}.toml"), **more}

    scenarios = [
        scenario(2, "plain-2"),
        scenario(4, "plain-4"),
        scenario(4, "resumed-4", **{"from": str(folder / "plain-2"), "resume": True}),
        *(scenario(2, f"{name}-2", name) for name in others),
        scenario(2, "other-recipe", mine={"1": ["grpo.beta=0.5"]}),
        scenario(4, "other-folder", mine={"2": [f"data.dev={plain.need(type(plain.data)).train}"]}),
        scenario(4, "indivisible", mine={str(rank): ["rollout.questions_per_step=6"] for rank in range(4)}),
    ]
    for each, port in zip(scenarios, free_ports(len(scenarios)), strict=True):
        each["port"] = port
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    commands = [[sys.executable, "-P", str(WORKER), str(folder / "scenarios.json"), str(rank)] for rank in range(4)]
    processes = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, said
    copy_until_step_1(folder / "plain-2", folder / "resumed-1")
    train(plain, folder / "resumed-1", resume=True)
    return Runs(folder, plain)


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models, or two optimisers' states, of the same names, shapes and dtypes."""
    assert {name: (x.shape, x.dtype) for name, x in one.items()} == {n: (x.shape, x.dtype) for n, x in other.items()}
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize("count", [2, 4])
def test_tokens_of_the_first_step_are_those_of_one_rank(runs: Runs, count: int) -> None:
    needs_invariant_policy(load_policy(runs.recipe.model.path))
    one, several = (runs.folder / f"plain-{ranks}" for ranks in (1, count))
    assert sampled(one, 1) == sampled(several, 1)
    evaluation = Path("evaluations") / "step_000000.jsonl"
    assert (one / evaluation).read_bytes() == (several / evaluation).read_bytes()
    kept, gathered = (load_file(run / "trajectories" / "step_000001.safetensors") for run in (one, several))
    assert [part.pop("branches_B").shape for part in (kept, gathered)] == [(0,), (0,)]
    assert kept.keys() == {"counts_N", "sampled_P", "recomputed_P", "reference_P", "entropy_P", "clipped_P"}
    assert torch.equal(kept["counts_N"], gathered["counts_N"])
    assert torch.equal(kept["sampled_P"], gathered["sampled_P"])
    assert apart(kept, gathered) < 4e-3  # an ulp of float16, for the entropy; out of its place a value differs by more


@pytest.mark.parametrize(
    ("one", "several"),
    [("plain-1", "plain-2"), ("plain-1", "plain-4"), ("adapters-1", "adapters-2"), ("parts-1", "parts-2")],
)
def test_weights_and_moments_after_a_step_are_those_of_one_rank(runs: Runs, one: str, several: str) -> None:
    start = load_file(runs.folder / "untied-model" / "model.safetensors")  # of the tied model, and its head
    first = runs.weights(one, 1)
    moved = max(float((first[name] - start[name]).abs().max()) for name in first)
    assert moved > 100 * TOLERANCE
    assert apart(first, runs.weights(several, 1)) < TOLERANCE
    state = "optimizer.safetensors"
    assert apart(runs.weights(one, 1, state), runs.weights(several, 1, state)) < TOLERANCE


@pytest.mark.parametrize("several", ["plain-2", "plain-4"])
def test_metrics_of_a_step_are_those_of_one_rank(runs: Runs, several: str) -> None:
    """Counts and means over trajectories to the bit; those of the update to rounding."""
    (before, one), (before_several, other) = (
        [untimed(record) for record in metrics(runs.folder / name)[:2]] for name in ("plain-1", several)
    )
    assert before == before_several and before["eval"]["questions"] == 5
    assert one.keys() == other.keys()
    of_update = {"loss", "grad_norm", "entropy", "ratio", "logprob_gap", "logprob_gap_max"}
    kept = {key for key in one if key not in of_update | BY_RANK | OF_PROCESS and not key.startswith("kl_")}
    assert {"reward", "em", "zero_advantage_groups", "sampled_tokens", "train_tokens", "loss_tokens"} <= kept
    assert {key: one[key] for key in kept} == {key: other[key] for key in kept}
    for key in ("grad_norm", "entropy", "ratio"):
        assert other[key] == pytest.approx(one[key], rel=1e-5)
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)


@pytest.mark.parametrize("resumed", ["resumed-1", "resumed-4"])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(runs: Runs, resumed: str) -> None:
    needs_invariant_policy(load_policy(runs.recipe.model.path))
    assert [record["step"] for record in metrics(runs.folder / resumed)] == [0, 1, 2, 2]
    assert sampled(runs.folder / resumed, 2) == sampled(runs.folder / "plain-2", 2)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert apart(runs.weights("plain-2", 2, file), runs.weights(resumed, 2, file)) < TOLERANCE
    assert apart(runs.weights("plain-2", 1), runs.weights("plain-2", 2)) > 100 * TOLERANCE


def test_ranks_that_do_not_do_the_same_are_refused_before_there_is_a_folder(runs: Runs) -> None:
    """All find the same; the first says it, the others nothing."""
    said = {}
    for name, ranks in (("other-recipe", 2), ("other-folder", 4), ("indivisible", 4)):
        *others, said[name] = sorted(runs.error(name, rank) for rank in range(ranks))
        assert others == ["SystemExit: 1"] * (ranks - 1)
        assert not (runs.folder / name).exists()
    assert said["other-recipe"] == (
        "UserError: rank 1 has another run than rank 0: the recipe's grpo.beta is 0.5 there, 0.02 on rank 0; "
        "give every rank the same recipe, files and folders"
    )
    assert "rank 2 has another run than rank 0: the recipe's data.dev is " in said["other-folder"]
    assert said["indivisible"] == (
        "UserError: rollout.questions_per_step is 6; expected a multiple of 4 ranks, for a group is not split"
    )


@pytest.mark.parametrize("what", ["killed", "wrong"])
def test_a_rank_that_dies_ends_all_and_the_run_goes_on_from_its_checkpoint(
    runs: Runs, tmp_path: Path, what: str
) -> None:
    """By torchrun, as a person starts it: the reason is said once, and step 1 is kept."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(WORKER), what, "train", str(runs.folder / "plain.toml"), "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert ended.returncode != 0
    assert "train: 2 steps of 4 questions x 3 samples, k2 with beta 0.02" in ended.stdout
    assert ended.stdout.count("on 2 ranks") == 1
    if what == "killed":
        assert "Signal 9 (SIGKILL) received" in ended.stderr
    else:
        sentence = "questions.jsonl: line 7 is on fire; put it out"
        assert [line for line in ended.stderr.splitlines() if line.startswith("thresher: ")] == [
            f"thresher: {sentence}"
        ]
        assert "local_rank: 1" in ended.stderr  # torchrun's own report, which names the rank
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    if what == "killed":
        train(runs.recipe, tmp_path / "run", resume=True)
        weights = load_file(tmp_path / "run" / "checkpoints" / "step_000002" / "model.safetensors")
        assert apart(weights, runs.weights("plain-2", 2)) < TOLERANCE
