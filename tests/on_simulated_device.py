"""Tests of a GPU's code path on the simulated device (tests/simcuda): a CPU's results, no hazard, no wait of the host
where none is allowed, and ceilings on launches, waits and nodes of graphs, which a change may only lower.

`make simcuda` runs this file, as does test_simulated_device.py in a separate process, because torch keeps the device
once installed. References replace the Triton kernels unless SIMCUDA_KERNELS=1, which takes minutes.
"""

import gc
import json
import linecache
import math
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import simcuda
import torch
import train_cases
from stored_cases import stored
from train_cases import recipe_maker, recipe_tables, sampled, single_threaded, steps_of, untimed, write_inputs

from thresher.cli.main import main
from thresher.engine.config.recipe import Recipe
from thresher.engine.decoding import batch_state, decoder_cuda, kv_cache
from thresher.engine.decoding.decoder_cuda import BucketStep
from thresher.engine.decoding.generator import GenerateRequest, Generator
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import MicroBatch
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater
from thresher.kernels import layers
from thresher.kernels.attention.prefix import PrefixForest
from thresher.policy import model
from thresher.policy.config import DeltaShape
from thresher.policy.model import load_policy
from thresher.policy.streamed import StreamedPolicy
from thresher.policy.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
WIDE = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
KERNELS = os.environ.get("SIMCUDA_KERNELS") == "1"


ASKS = re.compile(r'"cuda"|\.is_cuda|torch\.cuda\.')
NO_STATEMENT = re.compile(r'\s*(#|"|import |from |\w+: (Literal|.*torch\.cuda\.\w+[^(]*$))')


def lines_that_ask() -> dict[Path, dict[int, str]]:
    """Return the product's lines that use CUDA, by file and number."""
    found: dict[Path, dict[int, str]] = {}
    for folder in ("common", "kernels", "policy", "retrieval", "engine", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = enumerate(path.read_text().splitlines(), 1)
            found[path] = {n: line.strip() for n, line in lines if ASKS.search(line) and not NO_STATEMENT.match(line)}
    return {path: lines for path, lines in found.items() if lines}


@pytest.fixture(scope="session", autouse=True)
def lines_run(request: pytest.FixtureRequest) -> Iterator[set[tuple[str, int]]]:
    """Collect the executed lines of functions that use CUDA, if the slow tests run."""
    ran = set[tuple[str, int]]()
    if KERNELS or request.config.getoption("-k") or "not slow" in (request.config.getoption("-m") or ""):
        yield ran
        return
    asking = {str(path): lines for path, lines in lines_that_ask().items()}
    watched = dict[CodeType, bool]()

    def line(frame: FrameType, event: str, arg: object) -> Any:
        ran.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in watched:
            asked = asking.get(code.co_filename, {})
            watched[code] = any(number in asked for _, _, number in code.co_lines())
        return line(frame, event, arg) if watched[code] else None

    sys.settrace(call)
    threading.settrace(call)
    yield ran
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="session")
def tables(once: Any, tiny_tokenizer: Any, tiny_index_folder: Path, tiny_questions: Any) -> dict[str, Any]:
    """Return the recipe of train_cases.py for a model with heads of 16, the smallest size that the kernels serve."""

    def make(folder: Path) -> None:
        narrow = train_cases.make_config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_cases, "make_config", lambda **c: narrow(**WIDE, **c))
            write_inputs(folder, tiny_tokenizer, tiny_questions)

    return recipe_tables(once("wide-inputs", make), tiny_index_folder)


@pytest.fixture
def make(tables: dict[str, Any]) -> Callable[..., Recipe]:
    def make(device: str, **changes: dict[str, Any]) -> Recipe:
        small = {
            "run": {"steps": 2, "eval_every": 2, "eval_questions": 2, "save_every": 1},
            # A large eps: otherwise Adam's first step has the size of lr wherever a gradient is only rounding.
            "optim": {"warmup_ratio": 0.0, "lr": 3e-2, "eps": 1e-2},
        }
        for name, keys in {**changes, "model": {**changes.get("model", {}), "device": device}}.items():
            small[name] = {**small.get(name, {}), **keys}
        return recipe_maker(tables)(**small)

    return make


# --- Results


def tokens(run: Path, step: int) -> list[list[int]]:
    """Return the ids of a step's trajectories."""
    return [[token for segment in one["segments"] for token in segment["ids"]] for one in sampled(run, step)]


def assert_same(run: Path, cpu: Path, budget: float) -> None:
    """Check equal tokens at each step, and loss, gradient norm, KL and entropy within a relative `budget`."""
    ours, theirs = steps_of(run), steps_of(cpu)
    assert [one["step"] for one in ours] == [one["step"] for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert tokens(run, one["step"]) == tokens(cpu, one["step"])
        for name in ("loss", "grad_norm", "kl_k1", "kl_k2", "kl_k3", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=budget, abs=2e-6)


FLOAT32 = {
    "plain": {},
    "whole sequences": {"optim": {"share_prefix": False}},
    "adapters": {"lora": {"rank": 4}},
    "moments in 8 bits": {"optim": {"optimizer_state_dtype": "8bit"}},
    "moments in CPU memory": {"optim": {"offload": "moments"}},
    "reference in CPU memory": {"grpo": {"reference": "cpu"}, "optim": {"checkpoint_activations": "on"}},
    "several updates": {
        # No clip: rounding would decide a ratio at its edge.
        "grpo": {
            "old_logprobs": "recomputed",
            "updates_per_batch": 2,
            "epochs_per_batch": 2,
            "clip_low": 1.0,
            "clip_high": 1e9,
        },
        "optim": {"micro_batch_tokens": 200},
    },
    "few blocks, drafts": {"rollout": {"kv_tokens": 512, "num_draft_tokens": 2}},
    "folds": {"system": {"name": "mem1"}},
    "branches": {"system": {"name": "eviomni", "template": None}, "rollout": {"max_context": 2000}},
}


@pytest.mark.parametrize(
    "changes",
    [pytest.param(c, id=i, marks=[pytest.mark.slow] * (i not in ("plain", "folds"))) for i, c in FLOAT32.items()],
)
def test_a_run_is_the_cpu_s(changes: dict[str, Any], make: Callable[..., Recipe], tmp_path: Path) -> None:
    for name in ("cpu", "cuda"):
        train(make(name, **changes), tmp_path / name)
    # Two orders of float32 sums, through two updates, or through eight, which amplify rounding: up to 1.4e-3 over CPU
    # settings and learning rates.
    assert_same(tmp_path / "cuda", tmp_path / "cpu", 3e-3 if changes == FLOAT32["several updates"] else 2e-4)
    assert simcuda.counts()["launches"] > 1000
    if "num_draft_tokens" in changes.get("rollout", {}):
        assert all(step["drafted_tokens"] > 0 for step in steps_of(tmp_path / "cuda"))


@pytest.fixture
def hybrid(
    make: Callable[..., Recipe],
    tiny_tokenizer: Any,
    tiny_questions: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Recipe]:
    """Return `make` for a model with Qwen3.5's layers."""
    types = {"layer_types": ("linear_attention", "full_attention"), "delta": DeltaShape(2, 4, 8, 16, 4)}
    shape = {"model_type": "qwen3_5_text", "head_dim": 16, "partial_rotary_factor": 0.5, **types}
    narrow = train_cases.make_config
    monkeypatch.setattr(train_cases, "make_config", lambda **changes: narrow(**WIDE, **shape, **changes))
    write_inputs(tmp_path, tiny_tokenizer, tiny_questions)
    return lambda device, **changes: make(device, model={"path": str(tmp_path / "model")}, **changes)


@pytest.mark.slow
def test_a_run_with_states_is_the_cpu_s(hybrid: Callable[..., Recipe], tmp_path: Path) -> None:
    """Qwen3.5's layers: chunked prefills, decode steps in graphs with a ring of states, shared prefixes."""
    for name in ("cpu", "cuda"):
        train(hybrid(name), tmp_path / name)
    assert_same(tmp_path / "cuda", tmp_path / "cpu", 2e-4)
    assert all(step["grad_norm"] > 0 for step in steps_of(tmp_path / "cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("system", ["eval_rar", "igpo"])
def test_a_partial_run_is_the_cpu_s_up_to_the_versions(
    system: str, make: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The decode step in which a group ends differs on a GPU, and with it the version that samples the rest of another
    group. Under versions 0 and 1, whose training data is the same, a token after the same tokens of the same versions
    is the same."""
    changes = {
        "system": {"name": system},
        "rollout": {"partial": True, "questions_per_step": 2, "max_num_seqs": 6},
        "run": {"steps": 3, "eval_every": None},
    }
    for name in ("cpu", "cuda"):
        train(make(name, **changes), tmp_path / name)
    assert tokens(tmp_path / "cuda", 1) == tokens(tmp_path / "cpu", 1)
    stale = 0
    for step in (2, 3):
        assert steps_of(tmp_path / "cuda")[step - 1]["logprob_gap_max"] < 1e-4  # two orders of float32 sums
        for one, other in zip(*(sampled(tmp_path / name, step) for name in ("cuda", "cpu")), strict=True):
            for (ours, version), (theirs, others) in zip(drawn_by(one), drawn_by(other), strict=False):
                if version != others or version == 2:
                    break
                assert ours == theirs
                stale += version is not None and version < step - 1
    assert stale > 50
    assert not simcuda.hazards()


def drawn_by(record: dict[str, Any]) -> Iterator[tuple[int, int | None]]:
    """Yield the ids of a trajectory, each with the version that sampled it, or None if the policy did not."""
    for segment in record["segments"]:
        runs = segment.get("versions", [[None, len(segment["ids"])]])
        versions = [version for version, count in runs for _ in range(count)]
        yield from zip(segment["ids"], versions, strict=True)


@pytest.mark.slow
def test_scores_are_the_cpu_s_and_cost_no_wait(
    make: Callable[..., Recipe], tmp_path: Path, decoding_waits: set[str]
) -> None:
    """Log-probs of given texts, from prefills in graphs and without, are read one step later."""
    for name in ("cpu", "cuda"):
        train(make(name, system={"name": "igpo"}), tmp_path / name)
    assert_same(tmp_path / "cuda", tmp_path / "cpu", 2e-4)
    ours, theirs = (
        [x for step in (1, 2) for one in sampled(tmp_path / name, step) for s in one["scores"] for x in s["logprobs"]]
        for name in ("cuda", "cpu")
    )
    assert len(ours) > 50 and ours == pytest.approx(theirs, abs=1e-4)  # two orders of float32 sums, after an update
    assert decoding_waits == DECODING_WAITS


@pytest.mark.skipif(not KERNELS, reason="references compute; make simcuda runs the kernels, interpreted")
@pytest.mark.parametrize("family", ["make", "hybrid"])
def test_with_kernels_a_run_is_the_cpu_s(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    made = request.getfixturevalue(family)
    sizes = {"group_size": 2, "questions_per_step": 1, "max_turn_tokens": 6, "max_policy_tokens": 12}
    for name in ("cpu", "cuda"):
        train(made(name, rollout=sizes, run={"steps": 1, "eval_questions": 1}), tmp_path / name)
    assert_same(tmp_path / "cuda", tmp_path / "cpu", 2e-4)
    assert simcuda.counts()["kernels"] > 100


@pytest.mark.slow
def test_a_resumed_run_is_the_cpu_s(make: Callable[..., Recipe], tmp_path: Path) -> None:
    for name in ("cpu", "cuda"):
        changes = {"optim": {"offload": "moments", "optimizer_state_dtype": "8bit"}}
        train(make(name, run={"steps": 1, "save_every": 1}, **changes), tmp_path / name)
        train(make(name, run={"steps": 2, "save_every": 1}, **changes), tmp_path / name, resume=True)
    assert_same(tmp_path / "cuda", tmp_path / "cpu", 2e-4)


BFLOAT16 = {
    "plain": {},
    "adapters": {"lora": {"rank": 4}},
    "masters in CPU memory": {"optim": {"offload": "masters"}, "grpo": {"reference": "cpu"}},
    "importance weights": {"grpo": {"old_logprobs": "recomputed", "tis_level": "token"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", BFLOAT16.values(), ids=BFLOAT16)
def test_in_bfloat16_rollout_and_update_agree(
    changes: dict[str, Any], make: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Its bits and samples are not the CPU's, but the update reproduces the rollout's log-probs up to rounding."""
    train(make("cuda", **changes, model={"dtype": "bfloat16"}), tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 and all(step["sampled_tokens"] > 100 for step in steps)
    # Logits of a few units have a relative error of 2^-9 from each of about twenty roundings.
    assert all(step["logprob_gap"] < 0.05 and math.isfinite(step["grad_norm"]) for step in steps)


COMMANDS = {
    "eval": "eval {recipe} --limit 3 --device {device} --out {out}",
    "rollout": "rollout --model {model} --system r1 --questions {dev} --n 2 --device {device} --out {out}.jsonl "
    "--set rollout.max_turn_tokens=8",
    "generate": "generate --model {model} --prompt Who? --n 2 --max-new-tokens 8 --device {device}",
    "sft": "sft {sft} --set model.device={device} --out {out}",
    "sft in bfloat16": "sft {sft} --set model.device={device} --set model.dtype=bfloat16 "
    "--set optim.offload=masters --out {out}",
    "extract": "extract --model {model} --questions {dev} --index {index} --limit 2 --device {device} "
    "--out {out}.jsonl",
    "plan": "plan --recipe {recipe} --device {device}",
}


# Of each command's records: the file in its folder ("" is its whole output), and how far the floats may be from the
# CPU's, absolute and relative, as in the tests above.
RECORDS = {
    "eval": ("trajectories.jsonl", 0.0),
    "rollout": ("", 1e-4),
    "sft": ("metrics.jsonl", 2e-4),
    "sft in bfloat16": ("metrics.jsonl", 0.05),
    "extract": ("", 0.0),
}


def records_of(name: str, out: Path) -> list[dict[str, Any]]:
    """Return a command's records without timings."""
    file = RECORDS[name][0]
    return [untimed(record) for record in stored(out / file if file else out.with_suffix(".jsonl"))]


def assert_near(one: Any, other: Any, budget: float) -> None:
    """Check two JSON values: equal, but for floats, which may differ by `budget`."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_near(one[key], other[key], budget)
    elif isinstance(one, list):
        for value, second in zip(one, other, strict=True):
            assert_near(value, second, budget)
    else:
        assert one == (pytest.approx(other, rel=budget, abs=budget) if isinstance(one, float) else other)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_what_it_does_on_the_cpu(
    name: str, tables: dict[str, Any], make: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its records are the CPU's, and `generate` prints the same text; `plan` only runs."""
    questions = [{"id": f"q{n}", "question": "Who?", "golden_answers": ["Anna Bell"]} for n in range(12)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    sft = {"data": str(tmp_path / "sft.jsonl"), "format": "closed-book", "steps": 2, "batch_size": 4}
    sections = {"model": tables["model"], "system": tables["system"], "rollout": {"max_context": 200}, "sft": sft}
    (tmp_path / "sft.toml").write_text(
        "".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
            for section, keys in sections.items()
        )
    )
    said = {}
    for device in ("cpu", "cuda"):
        make(device).write(tmp_path / f"{device}.toml")
        line = COMMANDS[name].format(
            recipe=tmp_path / f"{device}.toml",
            sft=tmp_path / "sft.toml",
            out=tmp_path / f"out-{device}",
            model=tables["model"]["path"],
            dev=tables["data"]["dev"],
            index=tables["retrieval"]["index"],
            device=device,
        )
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        said[device] = capsys.readouterr()
        assert ended.value.code == 0, said[device].err
    assert name == "plan" or simcuda.counts()["launches"] > 100
    assert name != "generate" or said["cuda"].out == said["cpu"].out
    if name in RECORDS:
        ours, theirs = (records_of(name, tmp_path / f"out-{device}") for device in ("cuda", "cpu"))
        assert len(ours) > 1
        assert_near(ours, theirs, RECORDS[name][1])


# --- Waits of the host, and numbers of launches


@pytest.fixture
def decoding_waits(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect the lines of any file in which the host waits during rollouts and generations."""
    lines = set[str]()

    def watch(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = simcuda.syncs()
            result = plain(*args, **kwargs)
            for at in (at for at, count in simcuda.syncs().items() if count > before.get(at, 0)):
                innermost = re.search(r" @ (\S+?):(\d+)", at)
                lines.add(linecache.getline(str(ROOT / innermost[1]), int(innermost[2])).strip() if innermost else at)
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(Rollout, "run")
    watch(Generator, "generate")
    return lines


DECODING_WAITS = {
    "self.done.synchronize()",  # a step's draws, or scores, are read
    "with torch.cuda.graph(self.graph, pool=self.pool):",  # a capture starts
    "ended.synchronize()",  # each step: its time is read, after its draws
}


class Counted:
    """Records the device's counts that each call of a method adds, and the `size` of its arguments."""

    def __init__(
        self, patch: pytest.MonkeyPatch, owner: type, name: str, size: Callable[..., int] = lambda *args, **more: 0
    ) -> None:
        self.calls = list[dict[str, int]]()
        plain = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = simcuda.counts()
            result = plain(*args, **kwargs)
            counts = {key: count - before[key] for key, count in simcuda.counts().items()}
            self.calls.append(counts | {"size": size(*args, **kwargs)})
            return result

        patch.setattr(owner, name, counted)

    def most(self, key: str) -> int:
        return max(call[key] for call in self.calls)


def test_what_a_step_launches_and_where_the_host_waits(
    make: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoding_waits: set[str]
) -> None:
    """Checks ceilings for a model of two layers, with references in place of the kernels. A change may only lower them.

    The sampled tokens depend on the CPU, and with them the number of segments in a tree of shared prefixes. The
    reference of attention launches operations for each segment, by itself and against its descendants.
    """

    def runs(_: Updater, batch: MicroBatch, *more: Any) -> int:
        if not isinstance(layout := batch.layout, PrefixForest):
            return 1
        inner = [end > stop for end, stop in zip(layout.ends, accumulate(layout.lengths), strict=True)]
        return len(inner) + sum(inner)

    load, launch = (Counted(monkeypatch, BucketStep, name) for name in ("load", "launch"))
    backward = Counted(monkeypatch, Updater, "_train_micro_batch", runs)
    train(make("cuda"), tmp_path / "run")
    assert decoding_waits == DECODING_WAITS
    replayed = [call for call in launch.calls if call["replays"] and not call["captures"]]
    assert len(replayed) > 0.8 * len(launch.calls)
    assert load.most("launches") == 1 and load.most("syncs") == 0
    assert {call["launches"] for call in replayed} == {2} and {call["syncs"] for call in replayed} == {0}
    assert max(call["replayed_nodes"] for call in replayed) <= 263
    # The checks of the loss are read. Without shared prefixes, the reference of attention also sends `Varlen.index_T`.
    for shared, most in ((True, 1), (False, 2)):
        assert max(call["syncs"] for call in backward.calls if (call["size"] > 1) == shared) <= most
    assert max(call["launches"] - 145 * call["size"] for call in backward.calls) <= 560


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all"),
        pytest.param({"lora": {"rank": 4}}, id="adapters", marks=pytest.mark.slow),
        pytest.param(
            {"optim": {"offload": "masters"}, "model": {"dtype": "bfloat16"}},
            id="masters in CPU memory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_graphs_outlive_updates(
    changes: dict[str, Any], make: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of the first rollout are dropped, because an update's memory is unknown; then each is captured once."""
    captured = Counter[tuple[int, int, int, float | None]]()
    plain = BucketStep._capture

    def capture(self: BucketStep) -> None:
        captured[self.size, len(self.row_Q), self.groups, self.rules.temperature] += 1
        plain(self)

    def update(self: Updater, *args: Any, **kwargs: Any) -> Any:
        if not self.begun:
            captured.clear()
        return whole_update(self, *args, **kwargs)

    whole_update = Updater.update
    monkeypatch.setattr(Updater, "update", update)
    monkeypatch.setattr(BucketStep, "_capture", capture)
    train(make("cuda", **changes, run={"steps": 4, "eval_every": 9, "eval_questions": 2}), tmp_path / "run")
    assert len(captured) > 2 and max(captured.values()) == 1


# --- Rules broken on purpose


def broken(run: Callable[[], object]) -> str:
    """Return the device's report of a run that breaks a rule: its error, or its hazards."""
    try:
        run()
        said = ""
    except Exception as error:  # any error that follows from the broken rule
        said = str(error)
    found = [f"{kind}: {what}" for kind, what in simcuda.hazards()]
    simcuda.reset()
    return "\n".join([said, *found])


@pytest.fixture
def samples(tables: dict[str, Any]) -> Callable[..., object]:
    """Return a function that decodes some steps on the device."""

    def run(dtype: torch.dtype = torch.float32) -> object:
        folder = Path(tables["model"]["path"])
        generator = Generator(load_policy(folder, dtype, "cuda"), load_tokenizer(folder), speculate=0)
        prompts = [f"Question: What is the mayor of {name}?" for name in ("Anna Bell", "Karl Lund")]
        return generator.generate([GenerateRequest(prompt_text=prompt, n=3, max_new_tokens=8) for prompt in prompts])

    return run


def test_a_wait_below_a_prefill_is_seen(
    samples: Callable[[], object], monkeypatch: pytest.MonkeyPatch, decoding_waits: set[str]
) -> None:
    """The line that waits is in another folder, and so is its caller."""

    def add_norm(x_TH: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x_TH) > 8 and not torch.cuda.is_current_stream_capturing():  # more rows than a decode step has
            assert int(x_TH.isnan().sum()) == 0
        return layers.add_norm(x_TH, *more)

    samples()
    assert decoding_waits == DECODING_WAITS
    monkeypatch.setattr(model, "add_norm", add_norm)
    samples()
    assert decoding_waits - DECODING_WAITS == {"assert int(x_TH.isnan().sum()) == 0"}


def test_one_staging_buffer_for_two_steps_is_seen(
    samples: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broken(samples).strip() == ""
    monkeypatch.setattr(decoder_cuda, "IN_FLIGHT", 1)
    assert "pinned-reuse: a pinned buffer was changed before its copy was known to be over" in broken(samples)


def test_a_wait_in_a_captured_function_is_seen(samples: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BucketStep.run

    def run(self: BucketStep) -> None:
        assert int(self.inputs["count"].max()) > 0
        plain(self)

    monkeypatch.setattr(BucketStep, "run", run)
    assert "operation not permitted when stream is capturing: item" in broken(samples)


def test_a_graph_whose_input_was_freed_is_seen(samples: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BucketStep._capture

    def capture(self: BucketStep) -> None:
        plain(self)
        self.row_Q = torch.empty(0)

    monkeypatch.setattr(BucketStep, "_capture", capture)
    assert "graph-freed: a graph is replayed whose memory was freed; its capture saw it at engine/" in broken(samples)


def test_a_stream_that_does_not_wait_is_seen(
    make: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StreamedPolicy._wait_for

    def wait_for(self: StreamedPolicy, index: int) -> Any:
        self._copied[index % 2] = None
        return plain(self, index)

    monkeypatch.setattr(StreamedPolicy, "_wait_for", wait_for)
    found = broken(lambda: train(make("cuda", grpo={"reference": "cpu"}, run={"steps": 1}), tmp_path / "run"))
    assert "race: read after a write of another stream, unordered; seen at" in found


def test_a_result_that_is_read_before_it_arrived_is_seen(
    samples: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of a buffer whose copy has not arrived is 0x7A."""
    plain, codes = batch_state.DrawnRows.read, list[int]()

    def read(self: batch_state.DrawnRows, count: int) -> batch_state.Drawn:
        drawn = plain(self._replace(done=None), count)
        codes.append(int(drawn.code_N[0]))
        return drawn

    monkeypatch.setattr(batch_state.DrawnRows, "read", read)
    with pytest.raises(KeyError):  # no stop has this code
        samples()
    assert codes[0] == 0x7A7A7A7A


def pinned(count: int) -> torch.Tensor:
    return torch.ones(count, pin_memory=True)


def mixed() -> None:
    torch.ones(3, device="cuda") + torch.ones(3)


def step_counts_of_the_cpu() -> None:
    x, step = torch.ones(3, device="cuda"), torch.zeros(())
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_([x], [x], [x], [x], [], [step], **rates, amsgrad=False, maximize=False)


def captured(make: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            make()

    return run


def freed_early() -> None:
    other, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.add_(1)
    del x


def written_after_a_read() -> None:
    other, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.sum()
    x.zero_()
    torch.cuda.synchronize()


FAULTS = {
    "tensors of two devices": (mixed, "Expected all tensors to be on the same device"),
    "step counts of the CPU": (step_counts_of_the_cpu, "Expected all tensors to be on the same device"),
    "pinned memory in a capture": (captured(lambda: pinned(3)), "pinned memory is allocated while"),
    "a pageable copy in a capture": (captured(lambda: torch.ones(3).to("cuda")), "a copy of pageable memory while"),
    "a mask in a capture": (captured(lambda: torch.ones(3, device="cuda").nonzero()), "not permitted when stream is"),
    "memory freed early": (freed_early, "free: memory of a stream is freed while another may use it"),
    "a write after a read": (written_after_a_read, "race: write after a read of another stream, unordered"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    run, said = FAULTS[name]
    assert said in broken(run)


def test_what_is_right_is_no_hazard() -> None:
    """Waits, recorded streams, events and fresh memory are fine."""
    other, x, host = torch.cuda.Stream(), pinned(3).to("cuda", non_blocking=True), torch.zeros(3, pin_memory=True)
    assert torch.empty(3, device="cuda").isnan().all()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.add_(1)
        host.copy_(x, non_blocking=True)
        done = other.record_event()
    assert not done.query() and done.query() and host.tolist() == [2.0, 2.0, 2.0]
    del x
    assert simcuda.hazards() == []
    y = torch.ones(4, device="cuda")
    before = simcuda.counts()["syncs"]
    y[y > 0] = 2.0
    assert simcuda.counts()["syncs"] == before and y.tolist() == [2.0] * 4


# --- Single rules


def test_without_a_kernel_keys_are_stored_in_graphs(
    samples: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel rotates float16. In the other tests, the CPU's branch is in the kernel's place, as one launch."""
    expected = samples(torch.float16)
    for module in (decoder_cuda, kv_cache):
        monkeypatch.setattr(module, "rotate_and_store", layers.rotate_and_store)
    before = simcuda.counts()["replays"]
    assert samples(torch.float16) == expected and simcuda.counts()["replays"] > before


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_a_capture(
    enabled: bool, fails: bool, samples: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the collector is as it was, also if the capture fails."""
    plain, during = BucketStep.run, list[bool]()

    def run(self: BucketStep) -> None:
        if torch.cuda.is_current_stream_capturing():
            during.append(gc.isenabled())
            if fails:
                raise ZeroDivisionError
        plain(self)

    monkeypatch.setattr(BucketStep, "run", run)
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ZeroDivisionError):
            samples()
        assert set(during) == {False} and gc.isenabled() == enabled
    finally:
        gc.enable()


def test_adding_gradients_copies_none(tables: dict[str, Any]) -> None:
    """A copy in float32 takes as much memory as the masters have."""
    master = load_policy(Path(tables["model"]["path"]), torch.float32, "cuda").requires_grad_(True)
    policy = deepcopy(master).bfloat16()
    weights = MasterWeights(policy, master)
    for number in (1, 2):
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        weights.add_gradients()
        assert number == 1 or torch.cuda.max_memory_allocated() == held
        assert all((weight.grad == number).all() for weight in master.parameters())


# --- Every line that uses CUDA

KERNEL = "Triton's kernels, in whose place references compute"
RANKS = "several ranks"
ENCODER = "a learned encoder or classifier"
UNRUN = {
    "cli/commands/training.py": (2, "refusals, and a memory check that a tiny model skips"),
    "engine/compressors/recomp_train.py": (1, ENCODER),
    "engine/compressors/training_data.py": (2, "data for compressors"),
    "engine/decoding/decoder_cuda.py": (3, "what a refusal tells of a GPU's memory"),
    "engine/parallel/ranks.py": (2, RANKS),
    "engine/parallel/sharded_weights.py": (1, RANKS),
    "engine/parallel/sync.py": (2, RANKS),
    "engine/planning/time.py": (2, "the time of a chip of the data sheets, by the one that is there"),
    "engine/reproduce/pipelines.py": (1, "an argument"),
    "engine/training/sft_analyses.py": (2, "analyses by another model"),
    "engine/training/update.py": (2, "what held memory, told once it has run out"),
    "kernels/attention/backends/parts.py": (1, KERNEL),
    "kernels/attention/decode_triton.py": (2, KERNEL),
    "kernels/attention/forest_triton.py": (1, KERNEL),
    "kernels/attention/paged_cuda.py": (1, KERNEL),
    "kernels/autotune_cache.py": (3, KERNEL),
    "kernels/delta/rule.py": (2, "a constant, and the refusal of another library"),
    "kernels/delta/rule_triton.py": (1, KERNEL),
    "kernels/head_tiling.py": (2, KERNEL),
    "kernels/logprob.py": (1, "a constant"),
    "kernels/operands.py": (1, KERNEL),
    "kernels/sampling_triton.py": (1, KERNEL),
    "retrieval/encoders/learned.py": (5, ENCODER),
}


@pytest.mark.slow
def test_each_line_that_asks_for_cuda_ran_or_has_a_reason(
    lines_run: set[tuple[str, int]], request: pytest.FixtureRequest
) -> None:
    """Compares the number of such lines in each file; it may only decrease."""
    if request.config.getoption("-k") or KERNELS:
        pytest.skip("not all tests were run as they are counted")
    unrun = [
        (str(path.relative_to(ROOT)), text)
        for path, lines in lines_that_ask().items()
        for number, text in lines.items()
        if (str(path), number) not in lines_run
    ]
    print(*unrun, sep="\n")
    assert Counter(file for file, _ in unrun) == {file: count for file, (count, _) in UNRUN.items()}
