"""Every shipped recipe of a training run, run for two steps on a CPU; shipped_cases.py explains how."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from retrieval_server_cases import SERVED
from safetensors.torch import load_file
from shipped_cases import GROUP, LR, QUESTIONS, RECIPES, STEPS, World, make_world, shortened
from train_cases import metrics, sampled, single_threaded

from thresher.engine.training.train import train
from thresher.policy.model import load_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.indexes.load import load_index
from thresher.retrieval.questions import Question
from thresher.retrieval.serving.server import Server


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer: Tokenizer,
    tiny_index_folder: Path,
    tiny_questions: list[Question],
) -> World:
    return make_world(tmp_path_factory.mktemp("shipped"), tiny_tokenizer, tiny_index_folder, tiny_questions)


@pytest.fixture(scope="module")
def url(tiny_index_folder: Path) -> Iterator[str]:
    """Serve a retriever in a thread; return its URL."""
    with Server(load_index(tiny_index_folder), SERVED, port=0) as server:
        yield server.url


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.fast_cases(2)
def test_a_shipped_recipe_trains(path: Path, world: World, url: str, tmp_path: Path) -> None:
    recipe = shortened(path, world, url)
    train(recipe, tmp_path / "run")
    steps = [record for record in metrics(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert all(map(math.isfinite, (record["loss"], record["reward"], record["entropy"])))
        assert record["grad_norm"] > 0 and record["loss_tokens"] == record["sampled_tokens"] > 0
        assert record["logprob_gap_max"] < (1e-4 if recipe.model.dtype == "float32" else 0.1)
    assert len(sampled(tmp_path / "run", STEPS)) == QUESTIONS * GROUP
    before = load_file(Path(recipe.model.path) / "model.safetensors")
    folder = tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}"
    trained = load_file(folder / "model.safetensors")  # with adapters: base plus adapters
    assert {x.dtype for x in trained.values()} == {torch.float32}
    moved = {name: float((x - before[name]).abs().max()) for name, x in trained.items()}
    assert {name for name in moved if moved[name] > 0} == {
        name for name in moved if recipe.lora is None or "proj.weight" in name
    }
    if recipe.lora is None:  # an update of AdamW moves a weight by about LR
        assert max(moved.values()) < 2 * LR * STEPS * recipe.grpo.updates_per_batch
    logits_TV = load_policy(folder).logits(world.tokenizer.encode("Who is the mayor?"))
    assert bool(logits_TV.isfinite().all())
