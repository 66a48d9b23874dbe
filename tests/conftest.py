"""Fixtures shared by all tests: the folder of real data, and a tiny world that a rollout can run in.

The tiny policy was trained for a second or two on the form of transcripts, so that its random text searches, answers
and stops in all kinds of places.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

# Imported where they are used, so that a folder's tests need no more than the folder itself.
if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe
    from thresher.engine.episode import System
    from thresher.engine.rollout.rollout import Rollout
    from thresher.policy.config import ModelConfig
    from thresher.policy.model import Policy
    from thresher.policy.tokenizer import Tokenizer
    from thresher.retrieval.indexes.load import Index
    from thresher.retrieval.questions import Question

# Everything here is tiny, and a second thread would only wait for the first. Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the program sets it, so that a run's records are the same in every process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

ROOT = Path(__file__).resolve().parent.parent

GPU = torch.cuda.is_available()
# Where there is no GPU, Triton's kernels run in its interpreter. Triton reads this when a kernel is defined.
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("SIMCUDA") == "1":
    import simcuda

    simcuda.install(ROOT)

END_OF_TEXT = "<|endoftext|>"
TEACHING_STEPS = 80
TEMPLATE = "<search> or <answer>: {question}\n"
NAMES = ["Anna Bell", "Carl Dorn", "Eva Frost", "Gil Hart", "Ida Jones", "Karl Lund", "Mia Noor", "Otto Pike"]
RELATIONS = ["birthplace", "teacher", "spouse", "mayor", "rival"]
FACTS = [
    (name, relation, NAMES[(number * 3 + offset * 5 + 1) % len(NAMES)])
    for number, name in enumerate(NAMES)
    for offset, relation in enumerate(RELATIONS)
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but N cases of a test marked `fast_cases(N)`; the N are spread evenly over them. On a GPU
    `fast_cases(N, gpu=M)` keeps M cases, which are slow in Triton's interpreter."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("fast_cases"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in cases.values():
        mark = several[0].get_closest_marker("fast_cases")
        assert mark is not None
        kept = mark.kwargs.get("gpu", mark.args[0]) if GPU else mark.args[0]
        fast = {place * len(several) // kept for place in range(kept)}
        for place, item in enumerate(several):
            if place not in fast:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude imported and collected objects from garbage collection: millions of objects, a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ints_of_one_element() -> Iterator[None]:
    """Allow int() of an array of shape [1], which Triton 3.6's interpreter uses, for example for a loop bound that was
    loaded. NumPy 2.4 refuses it, and Triton 3.7 does not need it."""
    try:
        old = version("triton").startswith("3.6.")
    except PackageNotFoundError:
        old = False
    if not old or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang_tensor", patch)
        yield


@pytest.fixture(autouse=os.environ.get("SIMCUDA") == "1")
def on_a_simulated_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use references in place of the kernels unless SIMCUDA_KERNELS=1, and require that no hazard is left."""
    import simcuda
    from simulated_references import without_kernels

    if os.environ.get("SIMCUDA_KERNELS") != "1":
        without_kernels(monkeypatch)
    simcuda.reset()
    yield
    # Objects in reference cycles are freed here, before the host waits, not whenever the collector runs.
    gc.collect()
    torch.cuda.synchronize()  # checks copies that are still in progress
    assert simcuda.hazards() == []


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data next to the checkout (or at $THRESHER_DATA); tests that need it are skipped if it
    is absent."""
    folder = Path(os.environ.get("THRESHER_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; set THRESHER_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return once(name, make) -> Path: the folder that `make(folder)` filled. All workers of a run of the suite share
    it; a test must not change it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """Return a BPE of 380 tokens over the tiny world, with three control tokens. Most tags are several tokens."""
    from thresher.policy.tokenizer import train_bpe

    texts = [f"{subject} has {relation} {object_}." for subject, relation, object_ in FACTS]
    texts += [f"<search>{relation} of {name}</search><answer>{name}</answer>" for name, relation, _ in FACTS[::4]]
    texts += ["<think>What is it?</think> <information>Doc 1</information> <evaluate>missing</evaluate>"] * 3
    return train_bpe(texts, 380, [END_OF_TEXT, "<|im_start|>", "<|im_end|>"])


def tiny_config(tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    """Return a config: width 32, two layers, two query heads per key/value head, 13 columns more than the tokenizer."""
    from model_cases import make_config

    config = make_config(
        vocab_size=tokenizer.vocab_size + 13,
        max_position_embeddings=2048,
        eos_token_ids=(tokenizer.added_tokens[END_OF_TEXT],),
    )
    return config.replace(**changes)


@lru_cache(maxsize=8)
def taught(tokenizer: Tokenizer, config: ModelConfig, seed: int) -> Policy:
    """Return a policy trained on some transcripts: it writes tags, but not always, nor the right ones."""
    import torch

    from thresher.kernels.attention.varlen import Varlen
    from thresher.policy.model import init_policy

    policy = init_policy(config, seed)
    optimizer = torch.optim.Adam(policy.parameters(), 0.015)
    draw = Random(seed)
    for _ in range(TEACHING_STEPS):
        ids = [tokenizer.encode_template(transcript(draw)) for _ in range(8)]
        layout = Varlen([len(row) - 1 for row in ids])
        inputs_T = torch.tensor([token for row in ids for token in row[:-1]])
        targets_T = torch.tensor([token for row in ids for token in row[1:]])
        hidden_TH = policy.hidden(inputs_T, layout.positions_T, layout)
        torch.nn.functional.cross_entropy(hidden_TH @ policy.head_VH.T, targets_T).backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy.requires_grad_(False)


def transcript(draw: Random) -> str:
    """Return a prompt and some turns: searches, empty ones, answers, text without a tag, the end of text."""
    (name, relation, answer), (other, _, _) = draw.choice(FACTS), draw.choice(FACTS)
    text = TEMPLATE.replace("{question}", f"What is the {relation} of {name}?")
    for _ in range(draw.randrange(4)):
        thought = draw.choice(("", f"<think>{other}</think>"))
        query = draw.choice((name, other, relation, relation, ""))
        action = draw.choice((f"<search>{query}</search>", f"<search>{query}</search>", END_OF_TEXT))
        text += f"{thought}{action}\n{name} has {relation} {answer}.\n"
    return text + draw.choice((f"<answer>{answer}</answer>", f"<evaluate>{answer}</evaluate>{END_OF_TEXT}"))


@pytest.fixture
def tiny_model_config(tiny_tokenizer: Tokenizer) -> ModelConfig:
    """Return the config of `tiny_policy`, for tests that need no trained policy."""
    return tiny_config(tiny_tokenizer)


@pytest.fixture(scope="session")
def make_tiny_policy(tiny_tokenizer: Tokenizer) -> Callable[..., Policy]:
    """Return make(seed=0, **changes of the config) -> Policy: a copy of a policy that was trained a little."""

    def make(seed: int = 0, **changes: Any) -> Policy:
        return deepcopy(taught(tiny_tokenizer, tiny_config(tiny_tokenizer, **changes), seed))

    return make


@pytest.fixture
def tiny_policy(make_tiny_policy: Callable[..., Policy]) -> Policy:
    """Return a fresh policy for every test, which may train it; gradients are off until enabled."""
    return make_tiny_policy()


@pytest.fixture(scope="session")
def tiny_index_folder(once: Callable[..., Path]) -> Path:
    """Return the path of an index; its corpus is corpus.jsonl next to the folder."""
    from thresher.retrieval.building.build import build_index
    from thresher.retrieval.corpus import read_corpus
    from thresher.retrieval.encoders.lexical import LexicalEncoder

    def make(folder: Path) -> None:
        records = [
            {"id": f"p{number}", "title": subject, "text": f"{subject} has {relation} {object_}."}
            for number, (subject, relation, object_) in enumerate(FACTS)
        ]
        (folder / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        corpus = read_corpus(folder / "corpus.jsonl")
        build_index(corpus, LexicalEncoder.fit([passage.text for passage in corpus], 64), folder / "index")

    return once("tiny", make) / "index"


@pytest.fixture
def tiny_index(tiny_index_folder: Path) -> Index:
    """Load the index anew for every test, so that its counts of calls start at 0."""
    from thresher.retrieval.indexes.load import load_index

    return load_index(tiny_index_folder)


@pytest.fixture(scope="session")
def tiny_questions() -> list[Question]:
    """Return forty questions of different lengths, each with its answer."""
    from thresher.retrieval.questions import Question

    return [
        Question(f"q{number}", f"What is the {relation} of {subject}{', please' * (number % 4)}?", (object_,))
        for number, (subject, relation, object_) in enumerate(FACTS)
    ]


@pytest.fixture
def tiny_model_folder(tiny_policy: Policy, tiny_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """Save policy and tokenizer together, as `load_policy` and `load_tokenizer` read them."""
    folder = tmp_path / "tiny-model"
    tiny_policy.save(folder)
    tiny_tokenizer.save(folder)
    return folder


@pytest.fixture
def tiny_rollout(
    request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer, tiny_index: Index
) -> Callable[..., Rollout]:
    """Return make(system="eval_rar", *, policy, index, tokenizer, template, max_turns, k, chat, max_passage_tokens,
    shuffle, tools, **limits) -> Rollout; everything has a default. `system` is a name or a System."""
    from thresher.engine.episode import EpisodeConfig
    from thresher.engine.protocol.prompts import Renderer
    from thresher.engine.rollout.rollout import Limits, Rollout
    from thresher.engine.systems import load_system

    def make(
        system: str | System = "eval_rar",
        *,
        policy: Policy | None = None,
        index: Any = None,
        tokenizer: Tokenizer | None = None,
        template: str = TEMPLATE,
        max_turns: int = 4,
        k: int = 2,
        chat: bool = False,
        max_passage_tokens: int = 40,
        shuffle: bool = False,
        tools: Any = None,
        **limits: int,
    ) -> Rollout:
        system = load_system(system, {}) if isinstance(system, str) else system
        tokenizer = tokenizer or tiny_tokenizer
        renderer = Renderer(
            tokenizer=tokenizer,
            tags=system.tags,
            k=k,
            chat=chat,
            max_passage_tokens=max_passage_tokens,
            passage_format='Doc {number}(Title: "{title}") {text}',
        )
        sizes = {"max_turn_tokens": 48, "max_policy_tokens": 160, "max_context": 360, "max_num_seqs": 64, **limits}
        return Rollout(
            policy or request.getfixturevalue("tiny_policy"),  # trained only if no other is given
            tokenizer,
            tiny_index if index is None else index,
            system,
            EpisodeConfig(template, max_turns),
            renderer,
            Limits(**sizes),
            shuffle=shuffle,
            tools=tools,
        )

    return make


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer) -> Callable[..., None]:
    """Return script({seed: [its text, turn by turn]}, tokenizer=..): ids are forced, log-probs are the policy's own.
    Control tokens are recognised; text after the end of a turn starts the next one."""

    import torch

    from thresher.engine.decoding.speculative import Drafter
    from thresher.kernels import sampling

    def install(lines: dict[int, list[str]], tokenizer: Tokenizer | None = None) -> None:
        encode = (tokenizer or tiny_tokenizer).encode_template
        queues = {seed: [token for text in texts for token in encode(text)] for seed, texts in lines.items()}

        def say(logits_BV: Any, seeds_B: Any, positions_B: Any, rules: sampling.SamplingTensors) -> Any:
            ids = torch.tensor([queues[seed].pop(0) for seed in seeds_B.tolist()])
            divisor_B = 1.0 if rules.divisor_B is None else rules.divisor_B[:, None]
            return ids, torch.log_softmax(logits_BV / divisor_B, -1).gather(1, ids[:, None])[:, 0]

        monkeypatch.setattr(sampling, "sample", say)
        monkeypatch.setattr(Drafter, "draft", lambda *_: None)  # a rejected draft would use up forced tokens

    return install


@pytest.fixture(scope="session")
def base(
    once: Callable[..., Path],
    tiny_tokenizer: Tokenizer,
    tiny_index_folder: Path,
    tiny_questions: list[Question],
) -> dict[str, dict[str, Any]]:
    """Return the recipe of a small training run, as tables; see train_cases.py."""
    from train_cases import recipe_tables, write_inputs

    folder = once("inputs", lambda folder: write_inputs(folder, tiny_tokenizer, tiny_questions))
    return recipe_tables(folder, tiny_index_folder)


@pytest.fixture(scope="session")
def make_recipe(base: dict[str, dict[str, Any]]) -> Callable[..., Recipe]:
    from train_cases import recipe_maker

    return recipe_maker(base)


@pytest.fixture(scope="session")
def uninterrupted(once: Callable[..., Path], make_recipe: Callable[..., Recipe]) -> Path:
    """Run the training that nothing interrupts, once."""
    from train_cases import single_threaded

    from thresher.engine.training.train import train

    def make(folder: Path) -> None:
        with single_threaded():
            train(make_recipe(), folder / "run")

    return once("uninterrupted", make) / "run"
