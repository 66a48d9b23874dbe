"""Runs that save memory, train adapters or pass over a rollout batch several times: equal bits where they must be, and
exact resumption. A full device reports what holds how much."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import Make, assert_same_run, steps_of, steps_saved, train_killed, what_happened

from thresher.common.errors import UserError
from thresher.engine.config.recipe import load_recipe
from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.decoder_cuda import make_decoder
from thresher.engine.packing import TrainSequence
from thresher.engine.planning import plan as check
from thresher.engine.planning.plan import plan
from thresher.engine.training import train as train_module
from thresher.engine.training import update as update_module
from thresher.engine.training.train import Trainer, train
from thresher.engine.training.update import Updater, memory_by_use
from thresher.policy.config import read_config
from thresher.policy.lora import FOLDER
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

SMALL = {"questions_per_step": 2, "group_size": 2}
RUN = {"steps": 2, "save_every": 1, "eval_every": None, "eval_questions": 1}
PLACES = {
    "optim": {"lr": 1e-4, "offload": "masters", "checkpoint_activations": "on"},
    "grpo": {"beta": 0.02, "reference": "cpu"},
}


def test_auto_recomputes_where_the_plan_does_not_fit_otherwise(
    tmp_path: Path,
    make_recipe: Make,
    checkpointed: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line reports it, and the run's recipe keeps "auto", so that another machine may resume the run."""
    run = {**RUN, "steps": 1}
    recipe = make_recipe(rollout=SMALL, run=run, optim={"lr": 1e-4, "micro_batch_tokens": 100_000})
    needed = plan(read_config(recipe.model.path), recipe).total_bytes
    for memory, anew in ((needed, False), (needed - 1, True)):
        checkpointed.clear()
        monkeypatch.setattr(check, "cpu_memory", lambda memory=memory: (memory, needed))
        train(recipe, tmp_path / str(anew))
        assert any(checkpointed) is anew
        assert ('train: the plan chooses optim.checkpoint_activations = "on"' in capsys.readouterr().out) is anew
    for folder in (tmp_path / "False", tmp_path / "True"):
        assert load_recipe(folder / "recipe.toml") == recipe
    assert_same_run(tmp_path / "False", tmp_path / "True")


@pytest.mark.slow
def test_where_things_lie_changes_no_bit(tmp_path: Path, make_recipe: Make, checkpointed: list[bool]) -> None:
    """Masters and reference are in CPU memory, layers are computed twice. A resumed run may change these settings."""
    bf16 = {"dtype": "bfloat16"}
    train(make_recipe(model=bf16, rollout=SMALL, run=RUN, optim={"lr": 1e-4}), tmp_path / "plain")
    assert not any(checkpointed)
    recipe = make_recipe(model=bf16, rollout=SMALL, run=RUN, **PLACES)
    train(recipe, tmp_path / "moved")
    assert any(checkpointed)
    train_killed(recipe, tmp_path / "half", 2)
    train(make_recipe(model=bf16, rollout=SMALL, run=RUN, optim={"lr": 1e-4}), tmp_path / "half", resume=True)
    plain, moved, half = (what_happened(tmp_path / name) for name in ("plain", "moved", "half"))
    for other in (moved, half):
        assert [key for key in plain if key != "recipe" and plain[key] != other[key]] == []


CHOICES: list[dict[str, Any]] = [
    {"model": {"dtype": "bfloat16"}, "optim": {"lr": 1e-5}},
    {
        "model": {"dtype": "bfloat16"},
        "optim": {"lr": 1e-4, "optimizer_state_dtype": "8bit", "offload": "masters", "schedule": "linear"},
        "grpo": {
            "beta": 0.02,
            "updates_per_batch": 2,
            "epochs_per_batch": 2,
            "old_logprobs": "recomputed",
            "tis_level": "sequence",
            "tis_rule": "mask",
        },
    },
    {
        "optim": {"lr": 1e-3, "optimizer_state_dtype": "8bit", "offload": "moments"},
        "grpo": {"beta": 0.0, "epochs_per_batch": 2},
    },
    {
        "lora": {"rank": 4, "alpha": 8, "targets": ["q", "v", "up", "down"], "seed": 3},
        "optim": {"lr": 1e-2},
        "grpo": {"beta": 0.05, "entropy_coef": 0.05},
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHOICES, ids=["bfloat16", "masters", "moments", "adapters"])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, make_recipe: Make, changes: dict[str, Any]) -> None:
    recipe = make_recipe(rollout=SMALL, run=RUN, **changes)
    train(recipe, tmp_path / "whole")
    train_killed(recipe, tmp_path / "killed", 2)
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_000002"
    kept = load_file(checkpoint / "optimizer.safetensors")
    steps = {float(value) for name, value in kept.items() if name.endswith(".step")}
    assert steps == {2 * recipe.grpo.epochs_per_batch * recipe.grpo.updates_per_batch}
    if recipe.lora is None:
        moments = torch.uint8 if recipe.optim.optimizer_state_dtype == "8bit" else torch.float32
        assert kept["embed_VH.exp_avg"].dtype == moments
        weights = load_file(checkpoint / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {torch.float32}
        embedding = weights["model.embed_tokens.weight"]
        assert not torch.equal(embedding, embedding.bfloat16().float())
    else:
        records = steps_of(tmp_path / "whole")
        assert records[0]["kl_k3"] == 0 < records[-1]["kl_k3"] and min(r["grad_norm"] for r in records) > 0
        stored = f"checkpoints/step_000002/{FOLDER}/adapter_model.safetensors"
        assert stored in what_happened(tmp_path / "whole")


def test_the_cache_is_given_back_before_every_update(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder here frees its memory during the update, as on a GPU, and allocates it again for a rollout."""
    happened: list[str] = []
    end, update = Decoder.end, Updater.update

    def ended(self: Decoder) -> None:
        end(self)
        assert self.held()
        self.cache = None
        happened.append("end")

    def updated(self: Any, *arguments: Any) -> Any:
        happened.append("update")
        return update(self, *arguments)

    monkeypatch.setattr(Decoder, "end", ended)
    monkeypatch.setattr(Updater, "update", updated)
    recipe = make_recipe(rollout=SMALL, run=RUN, optim={"lr": 1e-4})
    train(recipe, tmp_path / "given_back")
    assert happened == ["end", "end", "update", "end", "update", "end"]  # the first and the last are evaluations
    monkeypatch.undo()
    train(recipe, tmp_path / "kept")
    assert_same_run(tmp_path / "given_back", tmp_path / "kept")


def test_only_a_cpu_keeps_its_cache(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    decoder = make_decoder(tiny_policy, tiny_tokenizer, num_blocks=4, block_size=16, max_running=2)
    decoder.end()
    assert decoder.held()
    decoder.policy = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    decoder.end()
    assert not decoder.held()
    decoder.policy = tiny_policy
    decoder.begin(20, DecodeClock())
    assert decoder.held()


def test_passes_over_a_batch(tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of two parts have the same parts in the same order, numbered consecutively for the schedule. The token
    values that are kept are those of the first pass. Advantages are given, so that every update moves the weights
    whatever the policy wrote."""
    calls: list[tuple[int, list[TrainSequence]]] = []
    kept: list[bool] = []
    later: list[bool] = []
    update = Updater.update

    def noted(self: Any, items: list[TrainSequence], step: int, temperature: float, recorder: Any, moved: bool) -> Any:
        calls.append((step, items))
        kept.append(recorder is not None)
        later.append(moved)
        given = [replace(item, advantage=(1.0, -1.0)[item.key[1]]) for item in items]
        return update(self, given, step, temperature, recorder, moved)

    monkeypatch.setattr(Updater, "update", noted)
    optim = {"lr": 1e-3, "schedule": "linear", "warmup_ratio": 0.0}
    grpo = {"updates_per_batch": 2, "epochs_per_batch": 2}
    train(make_recipe(rollout=SMALL, run=RUN, optim=optim, grpo=grpo), tmp_path / "run")
    assert [step for step, _ in calls] == list(range(8))
    assert kept == [True, True, False, False] * 2
    assert later == [False, True, True, True] * 2
    for start in (0, 4):
        first, second = calls[start : start + 2], calls[start + 2 : start + 4]
        assert [items for _, items in first] == [items for _, items in second]
    records = steps_of(tmp_path / "run")
    assert [record["lr"] for record in records] == pytest.approx([1e-3 * (1 - 3 / 8), 1e-3 * (1 - 7 / 8)])
    for record in records:
        one, two = record["by_epoch"]
        # The first part's first update is on policy; by the second pass all weights have moved.
        assert record["logprob_gap_max"] < 1e-4 < two["logprob_gap"]
        assert one["ratio"] != two["ratio"]


@pytest.mark.slow
def test_recomputed_log_probs_and_weights_are_in_the_metrics(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path
) -> None:
    """In float32 rollout and update agree: every weight is 1 up to rounding, and the run equals one without weights."""
    grpo = {"old_logprobs": "recomputed", "tis_level": "token"}
    train(make_recipe(grpo=grpo | {"kl_value": "k2", "beta": 0.02}, run={"steps": 2}), tmp_path / "run")
    plain = steps_of(uninterrupted)[0]
    record = steps_of(tmp_path / "run")[0]
    weights = {f"importance_{name}" for name in ("mean", "max", "bounded", "effective")}
    assert record.keys() - plain.keys() == {*weights, "recompute_seconds"}
    assert record["logprob_gap"] == pytest.approx(plain["logprob_gap"], abs=1e-6) and record["logprob_gap"] > 0
    assert record["importance_mean"] == pytest.approx(1, abs=1e-4) and record["importance_bounded"] == 0
    assert record["importance_effective"] == pytest.approx(1, abs=1e-4)
    for name in ("loss", "grad_norm"):
        assert record[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5)


# --- Memory


def fail_for_want_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_full_device_names_what_it_holds_and_what_to_lower(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is full in the update of step 2; what was learned before is saved."""
    monkeypatch.setattr(update_module, "GIB", 1 << 10)
    update, steps = Updater.update, []

    def full_at_the_second(self: Updater, *arguments: Any) -> object:
        steps.append(1)
        return fail_for_want_of_memory() if len(steps) == 2 else update(self, *arguments)

    monkeypatch.setattr(Updater, "update", full_at_the_second)
    with pytest.raises(UserError, match=r"^cpu is out of memory; GiB held: weights [\d.]+, moments") as found:
        train(make_recipe(run={"steps": 3}), tmp_path / "run")
    for name in ("moments", "the reference", "keys and values", "optim.micro_batch_tokens", "rollout.kv_tokens"):
        assert name in str(found.value)
    assert steps_saved(tmp_path / "run") == [1]


def test_a_device_that_is_full_in_an_evaluation_says_the_same(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "evaluate", fail_for_want_of_memory)
    with pytest.raises(UserError, match=r"^cpu is out of memory; GiB held: .*; lower optim.micro_batch_tokens"):
        train(make_recipe(), tmp_path / "run")


@pytest.mark.parametrize("small", [False, True], ids=["float32", "8 bits and a streamed reference"])
def test_what_is_held_is_counted_once_and_weights_stay_in_place(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    places: list[list[int]] = []
    step = Trainer.step

    def noted(self: Trainer, number: int) -> object:
        done = step(self, number)
        parameters = list(self.updater.policy.parameters())
        places.append([parameter.data_ptr() for parameter in parameters])
        used, weights = memory_by_use(self.updater, self.rollout), sum(parameter.nbytes for parameter in parameters)
        assert used["weights"] == weights and used["keys and values"] > 0  # the policy is its own master
        assert used["gradients"] == 0  # there are none between two updates
        parameters[0].grad = torch.zeros_like(parameters[0])
        assert memory_by_use(self.updater, self.rollout) == used | {"gradients": parameters[0].nbytes}
        parameters[0].grad = None
        if small:  # room for two layers of the reference; many matrices are too small for codes
            assert used["moments"] < 1.5 * weights and 0 < used["the reference"] < weights
        else:
            assert 2 * weights <= used["moments"] <= 2 * weights + 8 * len(parameters)
            assert used["the reference"] == weights
        device, self.updater.device = self.updater.device, torch.device("meta")
        assert set(memory_by_use(self.updater, self.rollout).values()) == {0}  # nothing on another device is counted
        self.updater.device = device
        return done

    monkeypatch.setattr(Trainer, "step", noted)
    places_of = {"optim": {"optimizer_state_dtype": "8bit"}, "grpo": {"reference": "cpu"}} if small else {}
    train(make_recipe(run={"steps": 1 if small else 3}, **places_of), tmp_path / "run")
    assert all(one == places[0] for one in places), "a CUDA graph may hold their addresses"
