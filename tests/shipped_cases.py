"""The recipes of training runs that come with Thresher, cut down to what a CPU runs in a second or two.

All that a recipe and its system's preset decide is kept: protocol, prompt, rewards, dtype, adapters, judge, optimiser,
updates per batch. Layers, widths and the vocabulary are cut, but not the query heads per key/value head and the tied or
untied head of the size; so are questions, samples and lengths. The weights are random, so that no answer is right: an
entropy bonus replaces the reward's gradient, so that the weights must move.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import encoder_folders
import transformers

from thresher.bench.roofline import MODELS
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import RetrievalSection
from thresher.policy.config import ModelConfig, config_from_dict
from thresher.policy.model import init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question

ROOT = Path(__file__).parents[1]
# All except those of SFT.
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.toml") if "[sft]" not in path.read_text("utf-8"))
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
    """The inputs of the runs."""

    folder: Path
    tokenizer: Tokenizer
    index: Path

    def model(self, path: Path, named: str) -> Path:
        """Return the folder of a model cut from the one that a recipe names, or from the config next to it."""
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
        """Return the folder of a classifier of the kind that a recipe names, with random weights."""
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
    """Return two layers and one key/value head with the config's query heads per key/value head, 8 wide."""
    heads = config.num_attention_heads // config.num_key_value_heads
    narrow = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 8 * heads}
    return config.replace(num_hidden_layers=2, intermediate_size=48, **narrow)


def make_world(folder: Path, tokenizer: Tokenizer, index: Path, questions: Sequence[Question]) -> World:
    """Write questions that contain two passages, of which the first is gold."""
    records = [
        {
            "id": each.id,
            "question": each.question,
            "golden_answers": list(each.golds),
            "passages": [{"title": "Carl Dorn", "text": "He was born."}, {"title": "Mia Noor", "text": "A mayor."}],
            "gold_indices": [1],
        }
        for each in questions[:8]
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return World(folder, tokenizer, index)


def shortened(path: Path, world: World, url: str) -> Recipe:
    """Return the recipe with its paths filled in and all of its sizes small."""
    whole = read_run_recipe(path, [])
    retrieval = whole.retrieval or RetrievalSection()
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
        "rollout.max_num_seqs": 4,
        "grpo.entropy_coef": 0.1,
        "grpo.updates_per_batch": min(whole.grpo.updates_per_batch, QUESTIONS),
        "optim.lr": LR,
        "run.steps": STEPS,
        "run.eval_questions": 1,
        "run.keep_trajectories": 1,
    }
    if whole.rollout.trees:
        changes |= {"rollout.trees": 1, "rollout.tree_nodes": GROUP - 1}
    if path.parent.name in OWN_MODEL:  # whose commands set a short prompt
        changes["system.template"] = ROOT / "recipes" / "demo" / "prompt.txt"
    else:
        changes["rollout.max_context"] = 2560  # room for the paper's prompt in a vocabulary of 380 tokens
    if retrieval.url is not None:
        changes["retrieval.url"] = url
    elif retrieval.index is not None or path.parent.name in OWN_MODEL:
        changes["retrieval.index"] = world.index
    if whole.tools is not None:
        tool = world.folder / "search.py"
        tool.write_text(
            "def search(query, noisy, question, golds):\n    return f'{query} is {golds[0][::1 - 2 * noisy]}.'\n"
        )
        changes |= {"tools.search.function": f"{tool}:search", "tools.search.chat_url": "", "tools.search.model": ""}
    if whole.judge.entailment is not None:
        changes |= {"judge.entailment": world.judge(whole.judge.entailment), "judge.device": "cpu"}
    return read_run_recipe(path, [f"{key}={value}" for key, value in changes.items()])
