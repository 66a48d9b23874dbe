"""Tiny stand-ins for what the documents name: models, encoders, questions, corpora, runs, at the paths of the text.

The models know nothing but to end soon: an analysis, an answer, whatever is asked; one searches first, one
extracts evidence. Recipes are the project's own; what makes them small is appended to the commands
(tests/docs/test_documentation.py).
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from browsecomp_cases import CORPUS, RECORD, obfuscated
from documents import ROOT
from gguf_cases import make_model, write_gguf
from safetensors.torch import load_file

from thresher.cli.main import run
from thresher.engine.world.facts import Size
from thresher.engine.world.files import invent_files
from thresher.engine.world.stages import world_stages
from thresher.policy.tokenizer import Tokenizer

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ENDS = ("\n", "<|im_end|>\n<|im_start|>assistant\n")
ASKED = ("{question}\n", "{question}\n" * 9, "{question}" + ENDS[1])
SIZES = ("0.5B", "1.5B", "3B", "7B")
MODELS = ("Qwen2.5-0.5B", *(f"Qwen2.5-{size}-Instruct" for size in SIZES), "M", "G")
NAMES = ["Anna Bell", "Carl Dorn", "Eva Frost", "Gil Hart", "Ida Jones", "Karl Lund", "Mia Noor", "Otto Pike"]
CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 32_768}
CONFIG |= {"initializer_range": 0.1, "rope_theta": 10_000.0}
TEACHING = """
[model]
path = "untaught/model"
[system]
name = "naive_grpo"
[sft]
transcripts = "untaught/transcripts.jsonl"
steps = 100
batch_size = 8
lr = 1e-2
held_out = 0.0
"""
SFT = """
[model]
path = "models/Qwen2.5-0.5B"
[system]
name = "arena"
[sft]
data = "train.jsonl"
format = "reasoning"
steps = 2
batch_size = 2
"""
TRANSCRIPT = {
    "id": "1",
    "question": "Who is the mayor?",
    "golden_answers": ["Anna Bell"],
    "segments": [
        {"source": "policy", "text": "<think>Look.</think> <search>mayor</search>"},
        {"source": "retrieved", "text": "<information>Anna Bell is the mayor.</information>"},
        {"source": "policy", "text": "<evaluate>Anna Bell.</evaluate> <answer>Anna Bell</answer>"},
    ],
}
ANSWER = {"source": "policy", "text": "<analysis>by [1]</analysis><answer>Anna</answer>"}
EVIDENCE = {
    "source": "policy",
    "text": "<reason>Look.</reason><extract>Anna Bell is the mayor.</extract><answer>Anna Bell</answer>",
}
SEARCH = {"source": "policy", "text": "<search>mayor</search>"}
FOUND = {"source": "retrieved", "text": "<information>Anna Bell is the mayor.</information>"}
WORDS = {"people": 12, "places": 9, "works": 12, "pieces": 12}
SMALL_WORLD = Size(**WORDS, train_questions=40, test_questions=4, warmup_worlds=2, transcripts=32)
OF_DATA = ("hotpotqa_train", "hotpotqa_dev", "2wiki_train", "2wiki_dev", "dev")
DATA = ("train", "dev", "questions", *(f"data/{name}" for name in OF_DATA))


def make_world(folder: Path, tokenizer: Tokenizer) -> None:
    """Everything that a document may name, into the empty folder, which is the current one."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "models").mkdir()
    model = folder / "models" / MODELS[0]
    _model(model, tokenizer, [[ANSWER]] * len(NAMES))
    for name in MODELS[1:]:
        shutil.copytree(model, folder / "models" / name)
    _model(
        folder / "models" / "smollm2-search",
        tokenizer,
        [[SEARCH, FOUND, {"source": "policy", "text": f"<answer>{name}</answer>"}] for name in NAMES],
    )
    # With its passages before the question, because text of many passages or tags would confuse it.
    (folder / "short.txt").write_text("{passages}\n{question}\n")
    shown = [f"{one} is the mayor of town 1.\n{two} is the mayor.\n" for one, two in pairwise(NAMES[:4])]
    asked = [f"{text * count}{{question}}{end}" for text in shown for count in (1, 6) for end in ENDS]
    _model(folder / "models" / "eviomni", tokenizer, [[EVIDENCE]] * len(NAMES), asked)
    for name in ("M", "G"):  # as docs/systems.md calls them
        (folder / "models" / name).rename(folder / name)
    write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", *make_model("llama", max_position_embeddings=1024))
    _encoders(folder / "models")
    _data(folder)
    _downloads(folder)
    _compared(folder)
    for name in ("wiki18", "hotpotqa", "2wiki"):
        assert run(["index", "build", "--corpus", "corpus.jsonl", "--dim", "64", "--out", f"indexes/{name}"]) == 0
    _invented(folder / "runs" / "demo", model, 0, "init", "warmup")
    models = [Path(words[-1]).name for words in world_stages(Path(), base="numbered") if words[0] in ("init", "sft")]
    _invented(folder / "runs" / "study-systems" / "world", model, 4, *models)
    _invented(folder / "runs" / "study-partial" / "world", model, 4, "init0", "recite0", "base0")


def _model(
    folder: Path, tokenizer: Tokenizer, taught: Sequence[Sequence[dict[str, str]]], templates: Sequence[str] = ASKED
) -> None:
    """A small Qwen2, made by the project's own commands in the current folder, and taught to say one of these whatever
    is asked."""
    raw = Path("untaught")
    tokenizer.save(raw / "tokenizer")
    changes = {**CONFIG, "vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.added_tokens["<|endoftext|>"]}
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    config = ["--config", str(ROOT / "recipes" / "demo" / "config.json"), "--tokenizer", str(raw / "tokenizer")]
    assert run(["init", *config, *sets, "--out", str(raw / "model")]) == 0
    write_lines(
        raw / "transcripts.jsonl",
        [
            {"question": name, "template": text, "segments": said}
            for name, said in zip(NAMES, taught, strict=True)
            for text in templates
        ],
    )
    (raw / "sft.toml").write_text(TEACHING)
    assert run(["sft", str(raw / "sft.toml"), "--out", str(folder)]) == 0
    (folder / "chat_template.jinja").write_text(CHATML)
    shutil.rmtree(raw)


def _encoders(folder: Path) -> None:
    from encoder_folders import bert_config, random_model, save_model
    from transformers import BertForTokenClassification

    for name in ("e5-base-v2", "contriever"):
        save_model(folder / name)
    save_model(folder / "llmlingua-2", random_model(BertForTokenClassification, bert_config(num_labels=2)))
    pickled = shutil.copytree(folder / "e5-base-v2", folder / "nq_extractive_compressor")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()


def _data(folder: Path) -> None:
    passages = [
        {"id": f"p{n}", "title": name, "text": f"{name} is the mayor of town {n}."} for n, name in enumerate(NAMES)
    ]
    asked: list[dict[str, Any]] = [
        {"id": f"q{n}", "question": f"Who is the mayor of town {n}?", "golden_answers": [name], "gold_titles": [name]}
        | {"passages": [passages[n], passages[n - 1]], "gold_indices": [1]}
        for n, name in enumerate(NAMES)
    ]
    write_lines(folder / "corpus.jsonl", passages)
    with gzip.open(folder / "wiki.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(passage) + "\n" for passage in passages)
    (folder / "data").mkdir()
    for name in (*DATA, "data/nq_hotpotqa_train"):
        write_lines(folder / f"{name}.jsonl", asked)
    triples = [
        one | {"evidence": [[f"town {n}", "mayor", name]]}
        for n, (one, name) in enumerate(zip(asked, NAMES, strict=True))
    ]
    for part, some in {"warmup": triples[:4], "train": triples[4:6], "dev": triples[6:]}.items():
        write_lines(folder / "data" / f"2wiki_{part}.jsonl", some)
    write_lines(folder / "in.jsonl", [TRANSCRIPT])
    (folder / "teacher").mkdir()
    taught = {"passages": passages[:1], "segments": [EVIDENCE]}
    write_lines(folder / "teacher" / "trajectories.jsonl", [TRANSCRIPT | taught])
    (folder / "recipe.toml").write_text(SFT)
    both = [{"question": one["question"], "answer": one["golden_answers"][0]} for one in asked]
    shown = [[(passage["title"], passage["text"]) for passage in one["passages"]] for one in asked]
    for name in ("hotpot_train", "2wiki_train"):
        facts = [
            {"_id": f"{name}-q{n}", "supporting_facts": [[NAMES[n], 0]], "context": [[t, [text]] for t, text in pairs]}
            for n, pairs in enumerate(shown)
        ]
        (folder / f"{name}.json").write_text(json.dumps([one | two for one, two in zip(facts, both, strict=True)]))
    paragraphs = [
        [{"idx": i, "title": t, "paragraph_text": text, "is_supporting": i == 0} for i, (t, text) in enumerate(pairs)]
        for pairs in shown
    ]
    musique = [
        {"id": f"musique-q{n}", **one, "answerable": True, "paragraphs": paragraphs[n]} for n, one in enumerate(both)
    ]
    write_lines(folder / "musique_train.jsonl", musique)
    _dumps(folder)


def _compared(folder: Path) -> None:
    """Rows of two finished runs of world.toml, and the stored ones of smollm2.toml."""
    from thresher.bench.studies.methods import Run, origin_of, read_comparison, settings_of

    plan = read_comparison("world.toml")
    rows = []
    for seed in (0, 1):
        named = {"condition": "low", "method": "gigpo", "control": False, "seed": seed}
        ends = [(0, 0.0, 0.2, "14"), (10**9, 60.0, 0.6, "1e")]
        curve = [{"tokens": t, "seconds": s, "em": em, "searches": 2.0, "questions": q} for t, s, em, q in ends]
        run = Run(seed, "low", "gigpo", control=False)
        head = {"name": run.name, **named, "commit": "c0ffee", "measure": "em"}
        rows.append(head | origin_of(plan) | {"settings": settings_of(plan, run), "curve": curve})
    write_lines(folder / "compared.jsonl", rows)
    (folder / "bench/results").mkdir(parents=True)
    shutil.copy(ROOT / "bench/results/study-smollm2-cpu.jsonl", folder / "bench/results")


def _dumps(folder: Path) -> None:
    """Rollouts as TRL, verl and prime-rl write them."""
    table = {"step": [10], "prompt": ["Who?"], "completion": ["Anna Bell"], "reward": [1.0], "advantage": [0.0]}
    for name in ("completions", "rollouts/step_42/train/effective"):
        (folder / name).mkdir(parents=True)
    for path in (folder / "completions" / "completions_00010.parquet", folder / "completions_00010.parquet"):
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    write_lines(folder / "rollouts" / "10.jsonl", [{"input": "Who?", "output": "Anna", "score": 1.0, "step": 10}])
    asked = {"message": {"role": "user", "content": "Who?"}}
    said = {"message": {"role": "assistant", "content": "Anna Bell"}, "sampled": True, "parent": 0}
    write_lines(folder / "rollouts/step_42/train/effective/traces.jsonl", [{"traces": [{"nodes": [asked, said]}]}])


def _downloads(world: Path) -> None:
    """The question sets that docs/reproduce.md has one download, in their makers' formats, and the corpus."""
    folder = world / "downloads"
    for name in ("flashrag", "hotpotqa", "2wiki", "musique", "dpr"):
        (folder / name).mkdir(parents=True)
    hotpot = json.loads((world / "hotpot_train.json").read_text("utf-8"))
    for name in ("train_v1.1", "dev_distractor_v1"):
        (folder / "hotpotqa" / f"hotpot_{name}.json").write_text(json.dumps(hotpot))
    for name in ("train", "dev"):
        (folder / "2wiki" / f"{name}.json").write_text(json.dumps([{**one, "evidences": []} for one in hotpot]))
        shutil.copy(world / "musique_train.jsonl", folder / "musique" / f"musique_ans_v1.0_{name}.jsonl")
    write_lines(folder / "2wiki" / "id_aliases.json", [{"Q_id": "Q1", "aliases": ["Somebody"], "demonyms": []}])
    asked = [{"id": one["_id"], "question": one["question"], "golden_answers": [one["answer"]]} for one in hotpot]
    given = [dict(zip(("title", "content"), zip(*one["context"], strict=True), strict=True)) for one in hotpot]
    bare = ("nq/train", "nq/dev", "nq/test", "triviaqa/test", "popqa/test", "bamboogle/test", "musique/dev")
    for path in (*bare, "hotpotqa/train", "hotpotqa/dev", "2wikimultihopqa/dev"):
        records = [
            one | {"metadata": {} if path in bare else {"context": two}} for one, two in zip(asked, given, strict=True)
        ]
        (folder / "flashrag" / path).parent.mkdir(exist_ok=True)
        write_lines(folder / "flashrag" / f"{path}.jsonl", records)
    passages = [json.loads(line) for line in (world / "corpus.jsonl").read_text("utf-8").splitlines()]
    found = [{"question": one["question"], "answers": one["golden_answers"], "ctxs": passages} for one in asked]
    for name in ("train", "dev", "test"):
        with gzip.open(folder / "dpr" / f"nq-{name}.json.gz", "wt", encoding="utf-8") as file:
            json.dump(found, file)
    more = [{"docid": f"{n}", "text": f"Town {n}.", "url": "http://e"} for n in range(3)]
    for path, records in (("", [obfuscated(RECORD, "CANARY")]), ("-corpus", [*CORPUS, *more])):
        data = folder / f"browsecomp-plus{path}" / "data"
        data.mkdir(parents=True)
        name = "train" if path else "test"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), data / f"{name}-00000-of-00001.parquet")
    contents = [{"id": one["id"], "contents": f'"{one["title"]}"\n{one["text"]}'} for one in passages]
    for name in ("wiki-18", "wiki-18_added"):  # the second is made by cat, which the tests do not run
        write_lines(folder / f"{name}.jsonl", contents)


def _invented(folder: Path, model: Path, forms: int, *stages: str) -> None:
    """What `thresher demo`, `study systems` and `study partial` make before they train: a world, an index, models."""
    data = folder / "data"
    folder.mkdir(parents=True)
    invent_files(data, 0, SMALL_WORLD, " {text}", forms)
    corpus = str(data / "corpus.jsonl")
    index = ["index", "build", "--corpus", corpus, "--dim", "64", "--embed", "title+text"]
    assert run([*index, "--out", str(folder / "index")]) == 0
    for name in stages:
        shutil.copytree(model, folder / name)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
