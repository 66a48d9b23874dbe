"""Test plans: parts by hand, monotonicity, the largest settings at the limit, advice that is true, seconds, several
GPUs, names of chips, and the statement in every shipped recipe."""

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import make_config

from thresher.bench.roofline import MODELS
from thresher.cli import main as cli
from thresher.common import machine
from thresher.common.errors import UserError
from thresher.common.machine import cpu_memory
from thresher.common.records import write_records
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.planning import plan as check
from thresher.engine.planning.memory import PARTS, all_weights, demand, head_weights, kv_tokens, one_layer, read_setting
from thresher.engine.planning.plan import GB, Plan, _combined, check_memory, plan
from thresher.engine.planning.time import CHIPS, Chip, this_chip
from thresher.policy.config import ModelConfig, config_from_dict, write_config
from thresher.policy.model import init_policy

ROLLOUT = {"group_size": 8, "questions_per_step": 64, "max_policy_tokens": 1024, "max_context": 4096}


def recipe(**changes: dict[str, Any]) -> Recipe:
    tables = {"model": {"path": "m", "dtype": "bfloat16", "device": "cuda"}, "rollout": ROLLOUT}
    tables |= {name: tables.get(name, {}) | table for name, table in changes.items()}
    return from_dict(Recipe, tables, "test")


def plan_of(size: str, gpus: int = 1, gb: int | None = None, /, **changes: dict[str, Any]) -> Plan:
    """Return the plan of a recipe with these changes, on GPUs of `gb` GB."""
    return plan(MODELS[size], recipe(**changes), gpus, memory_bytes=None if gb is None else gb * GB)


def update_seconds(**changes: dict[str, Any]) -> float:
    """Return the update's seconds for 3B on an A100."""
    seconds = plan(MODELS["3B"], recipe(**changes), rates=CHIPS["A100-80"]).seconds
    assert seconds is not None
    return seconds["update"]


def test_weights_are_counted_to_the_last_bias() -> None:
    for changes in ({}, {"tie_word_embeddings": False, "num_hidden_layers": 3}):
        config = make_config(**changes)
        policy = init_policy(config, 0)
        assert all_weights(config) == policy.parameter_count()
        assert one_layer(config) == sum(x.numel() for x in policy.layers[0].parameters())


def test_states_by_hand() -> None:
    """Full training takes 22 bytes per weight. They are bfloat16 weights and gradients 2 + 2, masters and their
    gradients 4 + 4, moments 8, reference 2. Adapters need one model and their own states; beta 0 needs no reference,
    float32 no masters."""
    found, n = plan_of("7B"), all_weights(MODELS["7B"])
    parts = found.phases["gradients"]
    states = sum(parts[name] for name in ("weights", "masters", "gradients", "moments", "reference"))
    assert states == 22 * n and found.fits is None and found.sentence().startswith("activations 7")
    assert all(set(parts) == set(PARTS) for parts in found.phases.values())
    assert found.total_bytes == sum(found.parts.values()) == max(sum(x.values()) for x in found.phases.values())
    parts = plan_of("3B", lora={"rank": 16, "targets": ["q", "o"]}).phases["loss"]
    adapters = 36 * 16 * (2048 + 2048) * 2
    assert parts["weights"] == 2 * all_weights(MODELS["3B"]) + 4 * adapters
    assert (parts["masters"], parts["reference"]) == (0, 0)
    assert (parts["moments"], parts["gradients"]) == (8 * adapters, 4 * adapters)
    assert plan_of("3B", grpo={"beta": 0.0}).parts["reference"] == 0
    parts = plan_of("3B", model={"dtype": "float32"}).phases["optimiser"]
    assert parts["masters"] == 0 and parts["gradients"] == parts["weights"] == parts["moments"] // 2


def test_the_pool_takes_what_is_free_and_no_more_than_it_wants() -> None:
    wanted = kv_tokens(read_setting(recipe()))[0] * 2 * 28 * 2 * 128 * 2
    for gb in (36, 80):
        parts = plan_of("1.5B", 1, gb).phases["rollout"]
        free = gb * GB - sum(parts.values()) + parts["KV pool"] + parts["working memory"]
        assert parts["KV pool"] == min(wanted, int(0.85 * free))
    assert wanted == parts["KV pool"]  # 80 GB are enough
    assert plan_of("1.5B", rollout={"kv_tokens": 8192}).phases["rollout"]["KV pool"] == (8192 + 64) * 28_672


# As plans were before they could choose: nothing is recomputed, and the reference is on the device.
KEPT: dict[str, dict[str, Any]] = {"optim": {"checkpoint_activations": "off"}, "grpo": {"reference": "device"}}


@pytest.mark.parametrize(("base", "memory"), [(KEPT, 60), ({}, 34)])
def test_the_largest_settings_fit_and_one_more_does_not(base: dict[str, dict[str, Any]], memory: int) -> None:
    base = base | {"optim": {**base.get("optim", {}), "micro_batch_tokens": 8192}}
    largest = plan_of("1.5B", 1, memory, **base).largest
    assert set(largest) == {"optim.micro_batch_tokens", "rollout.max_context", "rollout.kv_tokens"}
    for key in ("optim.micro_batch_tokens", "rollout.max_context"):
        section, name = key.split(".")
        for more, fits in ((0, True), (1, False)):
            changed = base | {section: {**base.get(section, {}), name: largest[key] + more}}
            assert plan_of("1.5B", 1, memory, **changed).fits is fits, key


@pytest.mark.parametrize(("device", "memory"), [("cpu", 32), ("cpu", 20), ("cuda", 80), ("cuda", 16)])
def test_the_largest_cache_fits(device: str, memory: int) -> None:
    """On a CPU one block more does not fit, unless all samples have a place; on a GPU the cache is what is free."""
    model = {"path": "m", "device": device, "dtype": "float32" if device == "cpu" else "bfloat16"}
    found = plan(MODELS["0.5B"], recipe(model=model), memory_bytes=memory * GB)
    tokens, setting = found.largest["rollout.kv_tokens"], read_setting(recipe(model=model))
    all_samples = setting.rollout.max_num_seqs * -(-setting.length // 64) * 64
    wide = plan(MODELS["0.5B"], recipe(model=model, rollout={"kv_tokens": tokens}), memory_bytes=memory * GB)
    assert wide.fits and tokens <= all_samples
    more = plan(MODELS["0.5B"], recipe(model=model, rollout={"kv_tokens": tokens + 64}), memory_bytes=memory * GB)
    if device == "cpu":
        assert tokens == all_samples or not more.fits
    elif tokens < all_samples:
        pools = [one.phases["rollout"]["KV pool"] for one in (wide, more)]
        assert pools[1] == pytest.approx(pools[0], rel=1e-4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_of_partial_rollouts_has_a_block_for_each_group(device: str) -> None:
    sizes = {"partial": True, "questions_per_step": 512, "max_context": 320, "max_policy_tokens": 64}
    model = {"path": "m", "device": device, "dtype": "bfloat16"}
    sized = recipe(model=model, rollout=ROLLOUT | sizes | {"max_num_seqs": 8})
    found = plan(MODELS["0.5B"], sized, memory_bytes=40 * GB)
    assert found.largest["rollout.kv_tokens"] >= 1024 * sized.rollout.kv_block_size


def test_advice_names_each_key_once() -> None:
    changes = [("optim.optimizer_state_dtype", "8bit"), ("optim.offload", "moments"), ("optim.offload", "masters")]
    assert _combined(changes) == [("optim.offload", "masters")]
    assert _combined(changes[:2]) == changes[:2]


def test_more_of_anything_needs_no_less() -> None:
    least = plan_of("1.5B").total_bytes
    for section, more in (
        ("optim", {"micro_batch_tokens": 32_768}),
        ("rollout", {"max_context": 32_768}),
        ("model", {"dtype": "float32"}),
    ):
        assert plan_of("1.5B", **{section: more}).total_bytes > least


def applied(line: str, base: dict[str, dict[str, Any]]) -> Recipe:
    """Return the recipe, changed as a line of advice says."""
    tables = {name: dict(table) for name, table in base.items()}
    for words in line.split(" make")[0].split(" and "):
        key, _, value = words.partition(" = ")
        if key.startswith("[lora]"):
            tables["lora"] = {"rank": int(value)}
        else:
            section, name = key.split(".")
            tables.setdefault(section, {})[name] = json.loads(value)
    return recipe(**tables)


@pytest.mark.parametrize(
    ("model", "memory", "base"),
    [
        *(("3B", 80, KEPT), ("1.5B", 40, KEPT), ("7B", 80, KEPT), ("0.5B", 16, KEPT)),
        *(("7B", 80, {}), ("3B", 60, {}), ("1.5B", 24, {}), ("0.5B", 8, {"optim": {"optimizer_state_dtype": "8bit"}})),
    ],
)
def test_advice_is_true(model: str, memory: int, base: dict[str, dict[str, Any]]) -> None:
    found = plan_of(model, 1, memory, **base)
    lines = [line for line in found.advice if " it fit: " in line]
    assert not found.fits and lines
    for line in lines:
        after = plan(MODELS[model], applied(line, base), memory_bytes=memory * GB)
        assert after.fits and line.endswith(f": {after.total_bytes / GB:.1f} GB"), line
    for section, keys in base.items():
        assert not any(f'{section}.{key} = "{value}"' in line for key, value in keys.items() for line in lines)


def test_advice_changes_nothing_that_auto_has_changed() -> None:
    said = " ".join(plan_of("7B", 1, 60).advice)
    assert "optim.offload" in said and "checkpoint_activations" not in said and "grpo.reference" not in said


def test_all_weights_of_7b_need_several_gpus() -> None:
    def kept(gpus: int, tokens: int) -> bool | None:
        return plan_of("7B", gpus, 80, **KEPT | {"optim": KEPT["optim"] | {"micro_batch_tokens": tokens}}).fits

    (line,) = [line for line in plan_of("7B", 1, 80, **KEPT).advice if "sharded over" in line]
    gpus, tokens = int(line.split()[2]), int(line.split()[-3])
    assert gpus > 2 and kept(gpus, tokens) and not kept(gpus // 2, 4096)
    questions = recipe().rollout.questions_per_step
    assert questions % gpus == 0 and kept(gpus - 1, 4096) and questions % (gpus - 1)  # a group is not split


def test_several_gpus_divide_states_and_gather_weights() -> None:
    one, four = (plan_of("7B", gpus).phases["rollout"] for gpus in (1, 4))
    for name in ("masters", "moments", "reference"):
        assert four[name] == one[name] // 4
    assert (one["gathered copy"], four["gathered copy"]) == (0, one["weights"])
    assert four["weights"] == 0, "each has its rows of the masters, from which the copy is gathered"
    outside = 2 * 152_064 * 3_584  # embedding and head
    assert plan_of("7B", 4).phases["backward"]["gathered copy"] > 2 * 2 * outside, "of policy and reference"
    assert plan_of("7B", 4, lora={"rank": 16}).phases["rollout"]["weights"] > one["weights"] // 4
    # If four GPUs are not enough, only settings that several ranks can run are advised.
    advice = plan_of("7B", 4, 80, optim={"checkpoint_activations": "off", "micro_batch_tokens": 65_536}).advice
    assert advice and all("checkpoint" in line or "micro_batch" in line or "lora" in line for line in advice)


def test_seconds_are_those_of_the_floors() -> None:
    """A chip twice as fast takes half as long for an update. Adapters take less than all weights, a reference somewhat
    more; passes multiply. docs/gpu.md: 127.7 ms per 1,000 tokens of 1,500-token trajectories with 300 sampled."""
    chip = CHIPS["A100-80"]
    twice = replace(chip, flops_per_s=2 * chip.flops_per_s, bytes_per_s=2 * chip.bytes_per_s)
    slow, fast = (plan(MODELS["3B"], recipe(), rates=rates) for rates in (chip, twice))
    assert slow.seconds is not None and slow.seconds_per_step == sum(slow.seconds.values())
    assert fast.seconds is not None and fast.seconds["update"] == pytest.approx(slow.seconds["update"] / 2)
    # A part of a decode step does not shrink.
    assert slow.seconds["rollout"] / 2 < fast.seconds["rollout"] < slow.seconds["rollout"]
    once = update_seconds()
    assert once == slow.seconds["update"] > update_seconds(lora={"rank": 16})
    assert once > update_seconds(grpo={"beta": 0.0})
    assert update_seconds(grpo={"epochs_per_batch": 4}) == pytest.approx(4 * once)
    assert once < update_seconds(grpo={"old_logprobs": "recomputed"}) < 1.6 * once
    # The head's log-probs before the gradient: always, or in the second update only, for a guard that holds nothing in
    # the first update.
    whole = update_seconds(grpo={"objective": "gmpo"}) - once
    guards = [
        update_seconds(grpo={"guard": "llds", "updates_per_batch": n}) - update_seconds(grpo={"updates_per_batch": n})
        for n in (2, 4)
    ]
    assert whole > 0 and guards == pytest.approx([whole / 2, 3 * whole / 4], abs=1e-9 * once)
    shape = {"group_size": 8, "questions_per_step": 32, "max_policy_tokens": 300, "max_context": 1500}
    assert update_seconds(rollout=shape) == pytest.approx(0.1277 * 256 * 1.5, rel=1e-3)


def test_every_switch_takes_what_it_says() -> None:
    config, setting = MODELS["3B"], read_setting(recipe())
    n, usual = all_weights(config), demand(config, setting, None, False)
    eight = plan_of("3B", optim={"optimizer_state_dtype": "8bit"}).phases["loss"]
    assert eight["moments"] == int(2 * (1 + 4 / 256) * n)
    away = plan_of("3B", optim={"offload": "masters"})
    assert away.host == {"moments": 8 * n, "masters": 4 * n, "gradients": 4 * n}
    assert away.phases["loss"]["masters"] == away.phases["loss"]["moments"] == 0
    beside = plan_of("3B", grpo={"reference": "cpu"})
    assert beside.host == {"reference": 2 * n} and beside.phases["loss"]["reference"] == 4 * one_layer(config)
    assert demand(config, setting, None, True).total < usual.total
    assert plan_of("3B", optim={"checkpoint_activations": "on"}).total_bytes < usual.total


AUTO = [("off", "device"), ("on", "device"), ("off", "cpu"), ("on", "cpu")]


def fixed(recomputed: str, reference: str) -> Recipe:
    return recipe(optim={"checkpoint_activations": recomputed}, grpo={"reference": reference})


def test_auto_takes_the_first_choice_that_fits() -> None:
    """The plan is that of a recipe with that choice, to the byte; the last choice is taken if none fits."""
    config = MODELS["3B"]
    totals = [plan(config, fixed(*choice)).total_bytes for choice in AUTO]
    assert min(totals) == totals[3] < totals[1] < totals[2] < totals[0]
    for memory, number in [(totals[0], 0), (totals[0] - 1, 1), (totals[1] - 1, 3), (totals[3] - 1, 3)]:
        found = plan(config, recipe(), memory_bytes=memory)
        assert (found.checkpointed, found.reference) == (AUTO[number][0] == "on", AUTO[number][1])
        assert found.total_bytes == totals[number] and found.fits is (memory >= totals[3])
    assert plan(config, recipe()).reference == "device" and plan(config, recipe()).total_bytes == totals[0]


def test_auto_leaves_a_reference_that_is_none_where_it_is() -> None:
    """This holds with adapters or beta 0, and on a CPU, where there is no other place."""
    for changes in ({"lora": {"rank": 8}}, {"grpo": {"beta": 0.0}}, {"model": {"device": "cpu"}}):
        found = plan_of("0.5B", 1, 1, **changes)
        assert not found.fits and found.checkpointed
        assert found.reference == ("device" if "model" in changes else None)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_config(make_config(vocab_size=512, max_position_embeddings=4096), tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(f'[model]\npath = "{tmp_path / "model"}"\ndtype = "bfloat16"\n')
    return ["plan", "--recipe", str(tmp_path / "recipe.toml"), "--device", "cuda"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_is_advised_where_the_processor_multiplies_it(
    dtype: str, files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_dtype", lambda: dtype)
    words = [*files[:-2], "--device", "cpu", "--json", "--set"]
    plans = {}
    for own in ("float32", "bfloat16"):
        assert cli.run([*words, f"model.dtype={own}"]) == 0
        plans[own] = json.loads(capsys.readouterr().out)
    low = f'model.dtype = "bfloat16" takes {plans["bfloat16"]["total_bytes"] / GB:.1f} GB'
    said = [f"this processor multiplies bfloat16 faster: {low}"]
    assert plans["float32"]["advice"] == (said if dtype == "bfloat16" else [])
    assert plans["bfloat16"]["advice"] == []


def test_a_context_that_training_refuses_is_no_plan(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*files, "--set", "rollout.max_context=100000"]) == 2
    assert "rollout.max_context is 100000, but the model was made for" in capsys.readouterr().err


def test_the_command_reads_a_config_and_a_recipe_alone(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder holds no weights. A folder and its config.json give the same plan; exit 0 whether it fits or not."""

    def printed(*extra: str) -> str:
        assert cli.run([*files, *extra]) == 0
        return capsys.readouterr().out

    models = ([], ["--model", str(tmp_path / "model")], ["--model", str(tmp_path / "model" / "config.json")])
    found, *same = (json.loads(printed(*model, "--chip", "H100", "--json")) for model in models)
    assert same == [found, found]
    assert found["fits"] and found["total_bytes"] == sum(found["parts"].values()) and found["memory_bytes"] == 80 * GB
    assert found["seconds_per_step"] == sum(found["seconds"].values()) > 0 and found["advice"] == []
    whole, partial = found["tail"]["whole"], found["tail"]["partial"]
    assert found["tail"]["sigma"] == 0.9 and (whole["in_flight"], partial["in_flight"]) == (16, 32)
    found = json.loads(printed("--gpu-memory", "64MB", "--json"))
    assert not found["fits"] and found["advice"] and found["seconds_per_step"] is None
    stored = tmp_path / "step_000010.jsonl"
    write_records(stored, [{"id": "a", "segments": [{"source": "policy", "text": "", "ids": [1] * 40}]}])
    shown = " ".join(printed("--chip", "H100", "--lengths", str(stored)).split())
    assert "predicted, with 40 tokens a sample on average, 40 at most, as in --lengths: rollout" in shown
    assert "s, 128 of 128 slots busy with rollout.partial and 32 groups in flight: rollout" in shown
    assert "1.00 times as fast, 128 slots busy; staleness of tokens 0 updates on average, 0 at most; 0 tokens" in shown
    shown = printed("--gpu-memory", "80GB", "--gpus", "2")
    assert "of 80.0: it fits" in shown and "torchrun --nproc-per-node N" in shown
    # A micro-batch larger than an update fits too, so the largest one is that of the whole update.
    larger = ["--gpu-memory", "80GB", "--set", "optim.micro_batch_tokens=9000000"]
    found = json.loads(printed(*larger, "--json"))
    largest = found["largest"]["optim.micro_batch_tokens"]
    assert found["fits"] and largest < 9_000_000
    assert found["bounds"]["optim.micro_batch_tokens"] == "all that an update computes"
    assert f"optim.micro_batch_tokens = {largest:,} (all that an update computes)" in printed(*larger)
    bound = plan_of("1.5B", 1, 60, **KEPT)
    assert bound.bounds == {} and bound.largest


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--gpu-memory", "80"], "--gpu-memory 80: expected a size with its unit, such as 80GB or 40GiB"),
        (["--gpu-memory", "many GB"], "memory is 'many GB'; expected a size"),
        (["--chip", "H900"], "--chip H900: expected one of A100-40"),
        (["--chip", "H100", "--measure"], "expected either --chip or --measure"),
        (["--chip", "H100", "--device", "cpu"], "expected a recipe with model.device = cuda"),
        (["--gpu-memory", "80GB", "--lengths", "l"], "--lengths: expected --measure, or --chip with model.dtype ="),
        (["--chip", "H100", "--lengths", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--gpu-memory", "80GB", "--model", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_a_wrong_flag_ends_in_one_sentence(
    files: list[str], capsys: pytest.CaptureFixture[str], extra: list[str], sentence: str
) -> None:
    assert cli.run([*files, *extra]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_that_cannot_fit_is_refused_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(vocab_size=512)
    write_config(config, tmp_path)
    tables: dict[str, Any] = {"model": {"path": str(tmp_path)}, "rollout": ROLLOUT}
    small = from_dict(Recipe, tables, "test")
    kept, recomputed = (
        from_dict(Recipe, tables | {"optim": {"checkpoint_activations": choice}}, "test") for choice in ("off", "on")
    )
    needed, least = (plan(config, choice).total_bytes for choice in (kept, recomputed))
    total, free = cpu_memory()
    assert 0 < free <= total
    monkeypatch.setattr(check, "cpu_memory", lambda: (least - 1, least - 1))
    with pytest.raises(UserError, match=r"the run needs .* GB at its (loss|backward|gradients) \(.*\), and there are "):
        check_memory(small, tmp_path)
    for memory, available, chosen, said in (
        (least, least, "on", 'optim.checkpoint_activations = "on", because the run does not fit without it'),
        (needed, needed - 1, "off", "are available now"),
        (needed, needed, "off", ""),
    ):
        monkeypatch.setattr(check, "cpu_memory", lambda found=(memory, available): found)
        decided, _ = check_memory(small, tmp_path)
        assert decided.optim.checkpoint_activations == chosen and decided.grpo.reference == "device"
        printed = capsys.readouterr().out
        assert said in printed and bool(printed) is bool(said)
    assert check_memory(recomputed, tmp_path)[0] == replace(recomputed, grpo=replace(small.grpo, reference="device"))
    assert capsys.readouterr().out == "", "what the recipe says itself is no news"


def test_on_a_gpu_auto_is_decided_by_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine's own memory is checked for the parts that are stored there."""
    config = MODELS["3B"]
    write_config(config, tmp_path)
    tables = {"model": {"path": str(tmp_path), "dtype": "bfloat16", "device": "cuda"}, "rollout": ROLLOUT}
    asked = from_dict(Recipe, tables, "test")
    totals = [plan(config, fixed(*choice)).total_bytes for choice in AUTO]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "cpu_memory", lambda: (GB, GB))
    for free, choice in ((totals[0], AUTO[0]), (totals[1], AUTO[1]), (totals[3], AUTO[3])):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * free))
        decided, _ = check_memory(asked, tmp_path)
        assert (decided.optim.checkpoint_activations, decided.grpo.reference) == choice
        printed = capsys.readouterr().out
        assert ('optim.checkpoint_activations = "on"' in printed) is (choice[0] == "on")
        assert ('grpo.reference = "cpu"' in printed) is (choice[1] == "cpu")
        assert ("are available now" in printed) is (choice[1] == "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (totals[3] - 1, totals[0]))
    with pytest.raises(UserError, match=r"and the GPU has .* free; "):
        check_memory(asked, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_memory(asked, tmp_path)[0].optim.checkpoint_activations == "off", (
        "another sentence says that there is no GPU"
    )


ARENA = Path(__file__).parents[3] / "recipes" / "arena" / "qwen2.5-7b.toml"


def planned(gpus: int, *changes: str, **options: Any) -> Plan:
    return plan(MODELS["7B"], read_run_recipe(ARENA, list(changes)), gpus, **options)


def test_parts_beside_several_gpus_are_each_ranks_share() -> None:
    """The head's gradient is an exception: the loss adds to it on the device, as a whole."""
    for change in ("optim.offload=masters", "optim.offload=moments", "grpo.reference=cpu"):
        one, four = planned(1, change), planned(4, change)
        assert one.host and four.host == {name: size // 4 for name, size in one.host.items()}
        if change == "optim.offload=masters":
            for parts in (one.phases["loss"], four.phases["loss"]):
                assert parts["gradients"] == 4 * head_weights(MODELS["7B"])
                assert parts["masters"] == parts["moments"] == 0
    found = planned(2, memory_bytes=40 * GB)  # advised as for one GPU
    assert not found.fits and any('optim.offload = "masters"' in line for line in found.advice), found.advice
    assert not any("sharded over" in line for line in found.advice)


ROOT = Path(__file__).parents[3]
GPU, LAPTOP = 80 * GB, 16 * GB
START = "# Memory, by thresher plan: "
# All recipes but those of SFT: a plan describes a GRPO run.
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.toml") if "[sft]" not in path.read_text("utf-8"))


def model_of(path: Path, named: str) -> ModelConfig:
    """Return a recipe's model: a size of Qwen2.5, the config next to it, or two layers of the smallest."""
    if (path.parent / "config.json").exists():
        return config_from_dict(json.loads((path.parent / "config.json").read_text("utf-8")), "config.json")
    size = next((size for size in MODELS if f"-{size}-" in named), None)
    return MODELS["0.5B"].replace(num_hidden_layers=2) if size is None else MODELS[size]


def statement(path: Path) -> list[str]:
    """Return the lines that belong at a recipe's head."""
    recipe = read_run_recipe(path, [])
    cuda = recipe.model.device == "cuda"
    found = plan(model_of(path, recipe.model.path), recipe, memory_bytes=GPU if cuda else LAPTOP)
    where = "an 80 GB GPU" if cuda else "a CPU with 16 GB"
    total = f"{found.total_bytes / GB:.1f} GB"
    if found.fits:
        turned = ["activations recomputed"] if found.checkpointed else []
        turned += ["the reference in CPU memory"] if found.reference == "cpu" else []
        how = f", with {' and '.join(turned)}" if turned else ""
        return [f"{START}{total} at most{how}; it fits {where}."]
    advice = "; or ".join(found.advice)
    return textwrap.wrap(f"{START}{total}; it does not fit {where}: {advice}.", 118, subsequent_indent="# ")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_states_what_it_needs(path: Path) -> None:
    text, wanted = path.read_text("utf-8"), "\n".join(statement(path))
    assert text.count(START) == 1
    assert f"\n{wanted}\n\n" in text, f"{path.name} should say:\n{wanted}"


def test_a_recipe_of_all_weights_of_7b_says_that_it_takes_several_gpus() -> None:
    full = [path for path in RECIPES if "7b" in path.name]
    assert len(RECIPES) > 10 and full
    assert all("sharded over" in " ".join(statement(path)) for path in full)


def test_chips_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        name, total_memory = "", 80e9

    def chip(name: str, memory: float = 80e9) -> Chip | None:
        Found.name, Found.total_memory = name, memory
        return this_chip(torch.device("cuda"))

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Found)
    assert chip("NVIDIA H100 80GB HBM3") is CHIPS["H100"] and chip("NVIDIA H200") is CHIPS["H200"]
    assert chip("NVIDIA A100-SXM4-80GB") is chip("NVIDIA A100 80GB PCIe") is CHIPS["A100-80"]
    assert chip("NVIDIA A800-SXM4-80GB") is CHIPS["A800"] and chip("NVIDIA A100-SXM4-40GB", 42e9) is CHIPS["A100-40"]
    for name, rate, bandwidth in (("NVIDIA H100 PCIe", 756e12, 2.0e12), ("NVIDIA H800", 989e12, 3.35e12)):
        found = chip(name)
        assert found is not None and (found.flops_per_s, found.bytes_per_s) == (rate, bandwidth)
        assert found.name not in CHIPS
    assert chip("Tesla T4") is None and this_chip(torch.device("cpu")) is None
    for name in ("GH200 480GB", "H100 NVL", "H200 NVL", "H800 PCIe", "H100 80GB HBM3 MIG 1g.10gb", "H1000"):
        assert chip(f"NVIDIA {name}") is None, "its rates differ from those of the chip with a similar name"
