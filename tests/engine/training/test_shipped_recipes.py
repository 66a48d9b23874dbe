"""Every recipe of a training run that comes with Thresher, run for two steps on a CPU.

Kept is all that a recipe and its system's preset decide: protocol, prompt, rewards, dtype, adapters, judge, optimiser,
updates a batch. Cut are layers, widths and the vocabulary, with the query heads a key/value head and the tied or own
head that the size has; questions, samples and lengths. The weights are random, so no answer is right: an entropy
bonus stands in for the reward's gradient, so that the weights have to move.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import encoder_folders
import pytest
import torch
import transformers
from retrieval_server_cases import SERVED
from safetensors.torch import load_file
from train_cases import metrics, sampled, single_threaded

from thresher.bench.roofline.models import MODELS
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.training.train import train
from thresher.policy.config import ModelConfig, config_from_dict
from thresher.policy.model import init_policy, load_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.indexes.flat import load_index
from thresher.retrieval.questions import Question
from thresher.retrieval.serving.server import Server

ROOT = Path(__file__).parents[3]
# All but the one that is SFT's alone.
RECIPES = sorted(set((ROOT / "recipes").glob("*/*.toml")) - {ROOT / "recipes" / "world" / "base.toml"})
OWN_MODEL = ("demo", "world")
SIZES = ("7B", "3B", "1.5B", "0.5B")
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
QUESTIONS, GROUP, LR, STEPS = 2, 2, 1e-3, 2


@dataclass
class World:
    """What the runs read."""

    folder: Path
    tokenizer: Tokenizer
    index: Path

    def model(self, path: Path, named: str) -> Path:
        """The folder of a model cut from the one that a recipe names, or from the config beside it."""
        size = next((size for size in SIZES if f"-{size}-" in named), "0.5B")
        if path.parent.name in OWN_MODEL:
            beside = json.loads((path.parent / "config.json").read_text("utf-8"))
            size, config = path.parent.name, config_from_dict(beside, "config.json")
        else:
            config = cut(MODELS[size])
        folder = self.folder / size
        if not folder.exists():
            tokenizer = self.tokenizer
            end = tokenizer.added_tokens["<|endoftext|>"]
            init_policy(config.replace(vocab_size=tokenizer.vocab_size + 3, eos_token_ids=(end,)), 0).save(folder)
            tokenizer.save(folder)
            (folder / "chat_template.jinja").write_text(CHATML)
        return folder

    def judge(self, named: str) -> Path:
        """The folder of a classifier of the kind that a recipe names, with random weights."""
        folder = self.folder / Path(named).name
        if not folder.exists():
            if "deberta" in named:
                sizes = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
                sizes |= {"position_biased_input": False, "norm_rel_ebd": "layer_norm", "share_att_key": True}
                config = transformers.DebertaV2Config(**encoder_folders.SIZES, **sizes, id2label=NLI)
                kind = transformers.DebertaV2ForSequenceClassification
            else:
                config = transformers.DistilBertConfig(**encoder_folders.DISTILBERT_SIZES, id2label=NLI)
                kind = transformers.DistilBertForSequenceClassification
            encoder_folders.save_model(folder, encoder_folders.random_model(kind, config))
        return folder


def cut(config: ModelConfig) -> ModelConfig:
    """Two layers and one key/value head with the query heads that it has here, 8 wide."""
    heads = config.num_attention_heads // config.num_key_value_heads
    narrow = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 8 * heads}
    return config.replace(num_hidden_layers=2, intermediate_size=48, **narrow)


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
    """Questions that bring two passages, of which the first is gold."""
    folder = tmp_path_factory.mktemp("shipped")
    records = [
        {
            "id": each.id,
            "question": each.question,
            "golden_answers": list(each.golds),
            "passages": [{"title": "Carl Dorn", "text": "He was born."}, {"title": "Mia Noor", "text": "A mayor."}],
            "gold_indices": [1],
        }
        for each in tiny_questions[:8]
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return World(folder, tiny_tokenizer, tiny_index_folder)


def shortened(path: Path, world: World, url: str) -> Recipe:
    """The recipe with its paths filled in, and of everything little."""
    whole = read_run_recipe(path, [])
    assert whole.retrieval is not None
    changes = {
        "model.path": world.model(path, whole.model.path),
        "model.device": "cpu",
        "data.train": world.folder / "questions.jsonl",
        "data.dev": world.folder / "questions.jsonl",
        "rollout.questions_per_step": QUESTIONS,
        "rollout.group_size": GROUP,
        "rollout.max_turns": 2,
        "rollout.max_turn_tokens": 12,
        "rollout.max_policy_tokens": 20,
        "rollout.max_passage_tokens": 64,
        "rollout.max_running": 4,
        "grpo.entropy_coef": 0.1,
        "optim.lr": LR,
        "run.steps": STEPS,
        "run.eval_questions": 1,
        "run.keep_trajectories": 1,
    }
    if path.parent.name in OWN_MODEL:  # whose commands bring a short prompt
        changes["system.template"] = ROOT / "recipes" / "demo" / "prompt.txt"
    else:
        changes["rollout.max_context"] = 2560  # room for the paper's prompt in a vocabulary of 380 tokens
    if whole.retrieval.url is not None:
        changes["retrieval.url"] = url
    elif whole.retrieval.index is not None or path.parent.name in OWN_MODEL:
        changes["retrieval.index"] = world.index
    if whole.judge.entailment is not None:
        changes |= {"judge.entailment": world.judge(whole.judge.entailment), "judge.device": "cpu"}
    return read_run_recipe(path, [f"{key}={value}" for key, value in changes.items()])


@pytest.fixture(scope="module")
def url(tiny_index_folder: Path) -> Iterator[str]:
    """Of a retriever's server, in a thread."""
    with Server(load_index(tiny_index_folder), SERVED, port=0) as server:
        yield server.url


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
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
    trained = load_file(folder / "model.safetensors")  # with adapters: the sum
    assert {x.dtype for x in trained.values()} == {torch.float32}
    moved = {name: float((x - before[name]).abs().max()) for name, x in trained.items()}
    assert {name for name in moved if moved[name] > 0} == {
        name for name in moved if recipe.lora is None or "proj.weight" in name
    }
    if recipe.lora is None:  # an update of AdamW moves a weight by about LR
        assert max(moved.values()) < 2 * LR * STEPS * recipe.grpo.updates_per_batch
    logits_TV = load_policy(folder).logits(world.tokenizer.encode("Who is the mayor?"))
    assert bool(logits_TV.isfinite().all())
