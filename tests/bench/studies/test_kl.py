"""Test `thresher study kl`: its findings about the estimators, compared with exact values; a study of a tiny world; and
one of stored tokens, compared with arithmetic and with the run's own metrics."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_cases import make_run, trajectory
from train_cases import steps_of

from thresher.bench.studies import kl, runs
from thresher.bench.studies.kl import CHOICES, curve, curves, enumerate_all, exact, expectation
from thresher.cli import main as cli
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.store.run_folder import RunFolder, read_metrics
from thresher.engine.store.token_stats import TokenStats, write_token_stats
from thresher.engine.training.train import Progress, train
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question

EXACT = 1e-10
# pi, pi_old and pi_ref: random ones; a pi far below its reference in one outcome; an outcome that pi_old never draws.
POLICIES = [
    *torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(2).unbind(0),
    torch.tensor([[-12.0, 1.0, 0.0], [0.0, 0.5, 1.0], [2.0, 0.0, 1.0]], dtype=torch.float64),
    torch.tensor([[0.0, 1.0, 2.0], [-30.0, 0.5, 0.5], [1.0, 1.0, -3.0]], dtype=torch.float64),
]


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("policies", POLICIES, ids=range(len(POLICIES)))
def test_which_estimators_are_exact_and_of_what(policies: torch.Tensor) -> None:
    z = policies[0]
    pi, old, ref = torch.softmax(policies, 1)
    truth = exact(z, ref)
    (reverse, reverse_V), (forward, forward_V) = truth["reverse"], truth["forward"]
    gap = pi.log() - ref.log()
    assert reverse == pytest.approx(float((pi * gap).sum())) and far(reverse_V, pi * (gap - reverse)) < EXACT
    assert forward == pytest.approx(float(-(ref * gap).sum())) and far(forward_V, pi - ref) < EXACT

    on = {choice: expectation(*choice, z, pi, ref) for choice in CHOICES}
    off = {choice: expectation(*choice, z, old, ref) for choice in CHOICES}
    for name in ("k2", "k3_ratio"):
        assert far(on[name, name][1], reverse_V) < EXACT
    assert far(on["k3", "k2"][1], reverse_V) < EXACT
    assert on["k1", "k1"][1].norm() < EXACT
    assert far(on["k3", "k3"][1], forward_V) < EXACT < 1e-2 < far(on["k3", "k3"][1], reverse_V)
    for choice in CHOICES:
        difference = abs(on[choice][0] / reverse - 1)
        assert difference > 1e4 * EXACT if choice[0] == "k2" else difference < EXACT

    assert far(off["k3_ratio", "k3_ratio"][1], reverse_V) < EXACT
    assert off["k3_ratio", "k3_ratio"][0] == pytest.approx(reverse, rel=EXACT)
    assert far(off["k1", "k1"][1], old - pi) < EXACT  # k1 pulls towards the old policy, wherever the reference is
    for choice in (("k2", "k2"), ("k3", "k3"), ("k3", "k2")):
        assert min(far(off[choice][1], reverse_V), far(off[choice][1], forward_V)) > 1e-2


def test_the_table_says_so_too() -> None:
    rows = enumerate_all(draws=6, seed=3)
    findings = {(row["sampled"], row["value"], row["gradient"]): row["finding"] for row in rows}
    on, off = ("zero", "exact", "forward", "exact", "exact"), ("biased", "biased", "biased", "exact", "biased")
    expected = {("on policy", *choice): finding for choice, finding in zip(CHOICES, on, strict=True)}
    assert findings == expected | {("off policy", *c): finding for c, finding in zip(CHOICES, off, strict=True)}
    assert CHOICES == (("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_ratio", "k3_ratio"), ("k3", "k2"))
    for row in rows:
        assert (row["cosine"] is None) == (row["finding"] == "zero")
        error = row["reverse_error"]
        assert error["smallest"] <= error["median"] <= error["largest"]  # bound: their order
        if row["finding"] == "exact":
            assert row["cosine"]["smallest"] == pytest.approx(1)


def test_curves() -> None:
    k3, k2 = curve("k3", points=[-10.0, 0.0, 10.0]), curve("k2", points=[-10.0, 0.0, 10.0])
    assert k3.value_X.tolist() == pytest.approx([math.exp(10) - 11, 0, math.exp(-10) + 9])
    assert k3.value_X[0].item() == pytest.approx(22_015.5, abs=0.05) and k2.value_X[0] == 50
    assert k3.coefficient_X.tolist() == pytest.approx([1 - math.exp(10), 0, 1 - math.exp(-10)])
    assert k2.coefficient_X.tolist() == [-10, 0, 10]
    assert curve("k3_ratio", 2.0, [-10.0]).coefficient_X.tolist() == [-20]
    drawn = curves()
    assert [(line.name, line.ratio) for line in drawn[:4]] == [("k1", 1), ("k2", 1), ("k3", 1), ("k3_ratio", 1)]
    for line in drawn:
        assert line.d_X[0] == -12 and line.d_X[-1] == 12 and -10 in line.d_X
        assert torch.isfinite(line.value_X).all() and torch.isfinite(line.coefficient_X).all()


STEPS = 3
NAMES = ["Anna Bell", "Carl Dorn", "Eva Frost", "Gil Hart", "Ida Jones", "Karl Lund", "Mia Noor", "Otto Pike"]


@pytest.fixture
def world(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_policy: Policy,
    tiny_tokenizer: Tokenizer,
    tiny_index_folder: Path,
    tiny_questions: list[Question],
) -> Path:
    """Write a start in the layout of the demo's folder; cut the study down to it, with a rate that breaks a run.

    Half of the names are right for every question, so that rewards differ within a group.
    """
    folder = tmp_path / "world"
    (folder / "data").mkdir(parents=True)
    for name, part in (("train", tiny_questions[4:]), ("test", tiny_questions[:4])):
        records = [{"id": q.id, "question": q.question, "golden_answers": NAMES[::2]} for q in part]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shutil.copytree(tiny_index_folder, folder / "index")
    tiny_policy.save(folder / "warmup")
    tiny_tokenizer.save(folder / "warmup")
    (folder / "prompt.txt").write_text("<search> or <answer>: {question}\n")  # the tiny policy's training prompt
    small = {"group_size": 4, "questions_per_step": 4, "max_turns": 2, "max_turn_tokens": 32, "max_num_seqs": 16}
    overrides = [f"rollout.{key}={value}" for key, value in small.items()]
    monkeypatch.setattr(kl, "SETTINGS", (*kl.SETTINGS, *overrides, f"system.template={folder / 'prompt.txt'}"))
    monkeypatch.setattr(kl, "enumerate_all", partial(enumerate_all, draws=2))
    monkeypatch.setattr(kl, "RATES", {"mild": 1e-3, "wild": 1e12})  # weights of 1e12 make products beyond float32
    return folder


def dying(name: str) -> Callable[..., dict[str, Any]]:
    """Return `train`, interrupted after the first step of the run `name`."""

    def run(recipe: Any, out: Path, resume: bool, watch: Callable[[Progress], None], **_: Any) -> dict[str, Any]:
        def look(progress: Progress) -> None:
            watch(progress)
            if out.name == name and "eval" not in progress.record:
                raise KeyboardInterrupt

        return train(recipe, out, resume, look)

    return run


@pytest.mark.slow
def test_a_study_that_is_interrupted_goes_on(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    command = ["study", "kl", "--out", str(out), "--start", str(world), "--steps", str(STEPS), "--seeds", "4"]
    with monkeypatch.context() as patched:
        patched.setattr(runs, "train", dying("mild-k3-seed4"))
        assert cli.run(command) == 130
    finished, broken = (out / "runs" / name / "metrics.jsonl" for name in ("mild-k2-seed4", "mild-k3-seed4"))
    before = finished.read_bytes()  # with its seconds, which no second run would repeat
    assert len(read_metrics(broken)) == 2 and not (out / "kl.json").exists()

    assert cli.run(command) == 0
    assert finished.read_bytes() == before
    table = json.loads((out / "kl.json").read_text())
    lines = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    assert table["settings"]["steps"] == STEPS and table["settings"]["seeds"] == [4]
    assert [run["name"] for run in table["runs"]] == [
        f"{rate} {name} seed 4" for rate in ("mild", "wild") for name in ("k2", "k3")
    ]
    for run in table["runs"]:
        own = [line for line in lines if (line["rate"], line["estimator"]) == (run["rate"], run["estimator"])]
        assert [line["step"] for line in own] == list(range(1, run["steps"] + 1))
        assert run["kl_coefficient_largest"] == max(line["kl_coefficient_largest"] for line in own)
        assert own[0]["kl_largest"] == 0 and own[0]["grad_norm"] > 0
        if run["rate"] == "mild":
            assert run["steps"] == STEPS and run["stopped"] is None
            assert run["kl_largest"] > 0 and run["em_before"] is not None and run["em_after"] is not None
        else:  # a rate that breaks the run is a result, reported with its step
            assert run["steps"] < STEPS and "not finite" in run["stopped"] and run["em_after"] is None
    k2, k3 = ([line for line in lines if (line["rate"], line["estimator"]) == ("mild", name)] for name in ("k2", "k3"))
    # Start, questions and noise are the same, and the first step's KL is 0, so the first steps are equal.
    assert {**k2[0], "estimator": "k3"} == k3[0] and k2[1]["kl_largest"] != k3[1]["kl_largest"]
    for name in ("curves.png", "enumeration.png", "training.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "KL(ref||pi)'s" in said and "wild k3 seed 4 stopped: step 2" in said


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (["--steps", "5"], "other settings (run.steps is 1, not 5)"),
        (["--start", "elsewhere"], "other settings (model.path is"),
        (["--out", "world/prompt.txt"], "in the way"),
        (["--out", "new", "--start", "elsewhere"], "elsewhere/data/train.jsonl: no such file"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    wrong: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    case = kl.make_cases(Path("old"), world, 1, [0])[0]
    case.folder.mkdir(parents=True)
    case.recipe.write(case.folder / "recipe.toml")
    assert cli.run(["study", "kl", "--out", "old", "--start", str(world), "--steps", "1", *change]) == 2
    assert wrong in capsys.readouterr().err
    assert not Path("new").exists() and sorted(path.name for path in Path("old").iterdir()) == ["runs"]


# a pretrained model with a recipe


@pytest.fixture
def recipe_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """Write a recipe without a reference, for a model that searches and answers."""
    path = tmp_path / "recipe.toml"
    make_recipe(grpo={"beta": 0.0}, model={"device": "cuda"}).write(path)
    return path


@pytest.mark.slow
def test_a_model_is_trained_by_its_recipe(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "study", load_recipe(recipe_file)
    model = tmp_path / "models" / "mine"
    shutil.copytree(recipe.model.path, model)
    monkeypatch.setattr(kl, "enumerate_all", partial(enumerate_all, draws=2))
    command = ["study", "kl", "--recipe", str(recipe_file), "--model", str(model), "--steps", "2", "--out", str(out)]
    command += ["--set", "rollout.max_turns=2", "--device", "cpu"]
    assert cli.run(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"3 runs of 2 steps (6 steps to do) from {model} by {recipe_file} (k1 and k2 and k3, beta 0.1," in said
    assert "F1 greedy" in said and "EM greedy" not in said

    table = json.loads((out / "kl.json").read_text())
    assert [run["name"] for run in table["runs"]] == [f"eval_rar {name} seed 0" for name in ("k1", "k2", "k3")]
    lines = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    firsts, seconds = ([line for line in lines if line["step"] == step] for step in (1, 2))
    assert [line["kl_coefficient_largest"] for line in firsts] == [1, 0, 0]  # k1's is 1 everywhere
    assert {**firsts[1], "estimator": "k3"} == firsts[2]
    assert {line["reward"] for line in firsts} == {firsts[0]["reward"]} and {line["kl_k1"] for line in firsts} == {0}
    assert len({line["kl_largest"] for line in seconds}) == 3 == len(seconds)
    for run in table["runs"]:
        folder = out / "runs" / f"eval_rar-{run['estimator']}-seed0"
        made, evals = load_recipe(folder / "recipe.toml"), [r["eval"] for r in read_metrics(folder) if "eval" in r]
        assert (made.grpo.kl_value, made.grpo.kl_gradient) == (run["estimator"],) * 2
        assert (made.optim.lr, made.rollout.max_turns, made.model.path) == (recipe.optim.lr, 2, str(model))
        assert made.model.device == "cpu"
        assert [run["f1_before"], run["f1_after"]] == [evals[0]["f1"], evals[-1]["f1"]] and len(evals) == 2
        own = [line for line in lines if line["estimator"] == run["estimator"]]
        assert run["kl"] == pytest.approx(sum(line["kl_k1"] for line in own) / 2)
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")

    shutil.rmtree(model)  # no remaining work needs it
    assert cli.run(command) == 0
    assert "(0 steps to do)" in " ".join(capsys.readouterr().out.split())
    assert cli.run([*command, "--set", "grpo.beta=0.2"]) == 2
    assert "another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--recipe {recipe} --set grpo.kl_value=k1", "--set grpo.kl_value=k1: the study itself sets grpo.kl_value"),
        ("--recipe {recipe} --set grpo.beta=0", "the study itself sets grpo.beta"),
        ("--recipe {recipe} --model m --set model.path=n", "the study itself sets model.path"),
        ("--recipe {recipe} --device cpu --set data.dev=", "recipe.toml: names no held-out questions"),
        ("--recipe {recipe} --device cpu --set rollout.max_context=100000", "the model was made for"),
        ("--recipe {recipe} --device cpu --model nowhere", "nowhere: "),
        ("--model m", "--model: belongs to a recipe; name it with --recipe"),
        ("--set grpo.beta=1", "--set: belongs to a recipe; name it with --recipe"),
        ("--device cpu", "--device: belongs to a recipe; name it with --recipe"),
        ("--recipe {recipe} --start runs/demo", "expected either --recipe or --start, got both"),
    ],
)
def test_a_model_and_a_recipe_that_do_not_fit_are_refused(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, wrong: str
) -> None:
    out = tmp_path / "out"
    assert cli.run(["study", "kl", "--out", str(out), *words.format(recipe=recipe_file).split()]) == 2
    message = capsys.readouterr().err
    assert wrong in message and message.startswith("thresher")
    assert not out.exists()


# the stored tokens of a run


def step_of_tokens(run: RunFolder, step: int, *trajectories: tuple[float, dict[str, list[float]]]) -> None:
    """Store a step: the advantage of each trajectory, and the values of its tokens, of which there are 1 or 3."""
    records, stats = [], []
    for number, (advantage, values) in enumerate(trajectories):
        count = len(values["sampled"])
        records.append(trajectory("ann", True, (count - 1) // 2, group=0, sample=number, advantage=advantage))
        blank = {"entropy": np.zeros(count, np.float16), "clipped": np.zeros(count, np.bool_)}
        arrays = {name: np.array(value, np.float32) for name, value in values.items()} | blank
        stats.append(TokenStats(key=(0, number), values=arrays, branches=np.empty(0, np.float32)))
    run.write_trajectories(step, records)
    write_token_stats(run.trajectories / f"step_{step:06d}.safetensors", stats, 2**20)


def test_the_figures_of_stored_tokens_are_those_of_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, nan = make_run(tmp_path / "run", grpo={"beta": 0.5, "kl_value": "k3"}), tmp_path / "out", math.nan
    step_of_tokens(  # d: 0, 1, -1 with advantage 2; 2 with advantage 0, twice as likely as when drawn; one in no update
        run,
        4,
        (2.0, {"sampled": [-4, -4, -4], "recomputed": [-4, -4, -4], "reference": [-4, -5, -3]}),
        (0.0, {"sampled": [-1 - math.log(2)], "recomputed": [-1], "reference": [-3]}),
        (1.0, {"sampled": [-1], "recomputed": [nan], "reference": [nan]}),
    )
    one: dict[str, list[float]] = {"sampled": [-1], "recomputed": [-1], "reference": [-1]}
    step_of_tokens(run, 8, (9.0, one | {"advantage": [-0.25]}))
    step_of_tokens(run, 12, (1.0, {"sampled": [-1], "recomputed": [-1]}))
    run.write_trajectories(16, [trajectory("ann", True)])
    assert cli.run(["study", "kl", "--run", str(run.path), "--out", str(out)]) == 0

    found = json.loads((out / "kl_run.json").read_text())
    assert found["settings"] == {"run": str(run.path), "beta": 0.5, "kl_value": "k3", "kl_gradient": "k3"}
    assert [row["step"] for row in found["steps"]] == [4, 8] and found["left_out"] == [12, 16]
    first, second = found["steps"]
    assert (first["tokens"], first["trajectories"], first["advantage_0_share"]) == (4, 2, 0.25)
    assert (first["d_mean"], first["d_largest"]) == (0.5, 2) and first["d_std"] == pytest.approx(math.sqrt(1.25))
    assert first["log_ratio_largest"] == pytest.approx(math.log(2))
    e = math.e
    k3 = [0, 1 / e, e - 2, e**-2 + 1]
    mean, c = sum(k3) / 4, [0, 1 - 1 / e, e - 1, 1 - e**-2]
    error = math.sqrt(2 * 2) * (k3[3] - mean) / 4  # two trajectories, whose sums are each other's negative
    spread = sum((value - mean) ** 2 for value in k3) / 4
    ratio = [0, 1 / e, e - 2, 2 * k3[3]]
    ratio_mean = sum(ratio) / 4
    ratio_spread = sum((value - ratio_mean) ** 2 for value in ratio) / 4
    expected = {  # mean, standard error, variance; |c|: mean, largest, share of one token; pull: median, largest
        "k1": [0.5, 0.75, 1.25, 1, 1, 0.25, 0.25, 0.25],
        "k2": [0.75, 0.625, 0.5625, 1, 2, 0.5, 0.25, 0.25],
        "k3": [mean, error, spread, sum(c) / 4, e - 1, c[2] / sum(c), c[1] / 4, c[2] / 4],
        "k3_ratio": [ratio_mean, (ratio[3] - ratio_mean) / 2, ratio_spread, 1.5, 4, 4 / 6, 0.25, 0.25],
    }
    assert first["estimators"].keys() == expected.keys()
    for name, figures in expected.items():
        assert list(first["estimators"][name].values()) == pytest.approx(figures, rel=1e-6), name
    assert second["estimators"]["k1"]["pull_largest"] == 2  # the token's own advantage, not its trajectory's
    assert list(second["estimators"]["k2"].values()) == [0, None, 0, 0, 0, None, 0, 0]
    every = found["all"]
    assert (every["tokens"], every["trajectories"], every["d_mean"]) == (5, 3, pytest.approx(0.4))
    residuals = [0 - 3 * 0.4, 2 - 0.4, 0 - 0.4]
    error = math.sqrt(3 / 2 * sum(value**2 for value in residuals)) / 5
    assert every["estimators"]["k1"]["standard_error"] == pytest.approx(error)
    assert (out / "kl_run.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "steps 4, 8: 5 tokens of 3 trajectories" in said and "Left out: steps 12, 16," in said


def test_a_runs_stored_tokens_have_the_kl_that_the_run_recorded(uninterrupted: Path, tmp_path: Path) -> None:
    assert cli.run(["study", "kl", "--run", str(uninterrupted), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "kl_run.json").read_text())
    assert found["settings"]["kl_value"] == found["settings"]["kl_gradient"] == "k2" and found["left_out"] == []
    for row, record in zip(found["steps"], steps_of(uninterrupted), strict=True):
        own = row["estimators"]
        assert (row["step"], row["tokens"]) == (record["step"], record["loss_tokens"])
        for name in ("k1", "k2", "k3"):
            assert own[name]["mean"] == pytest.approx(record[f"kl_{name}"], rel=1e-3, abs=1e-9)
        assert row["d_largest"] == own["k2"]["c_largest"] == pytest.approx(record["kl_coefficient_largest"], rel=1e-5)
        assert row["d_largest"] ** 2 / 2 == pytest.approx(record["kl_largest"], rel=1e-5)
        assert row["log_ratio_largest"] == pytest.approx(record["logprob_gap_max"], rel=1e-2, abs=1e-8)
    assert found["all"]["tokens"] == sum(row["tokens"] for row in found["steps"])
    assert found["all"]["d_largest"] == max(row["d_largest"] for row in found["steps"]) > 0


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--run run", "run: none of its 1 stored steps has log-probs of a reference; train a run with grpo.beta > 0"),
        ("--run nowhere", "nowhere: the run folder does not exist"),
        ("--run run --steps 3", "--steps: belongs to training runs"),
        ("--run run --seeds 1", "--seeds: belongs to training runs"),
        ("--run run --device cpu", "--device: belongs to a recipe"),
        ("--run run --set grpo.beta=1", "--set: belongs to a recipe"),
        ("--run run --start runs/demo", "got both"),
        ("--run run --recipe r.toml", "got both"),
        ("--run run --out run/recipe.toml", "in the way"),
    ],
)
def test_a_run_without_what_is_needed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("run"), grpo={"beta": 0.0})
    step_of_tokens(run, 1, (1.0, {"sampled": [-1], "recomputed": [-1]}))
    assert cli.run(["study", "kl", "--out", "out", *words.split()]) == 2
    message = capsys.readouterr().err
    assert wrong in message and message.startswith("thresher")
    assert not Path("out").exists()
