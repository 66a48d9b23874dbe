"""What a plan counts of trajectories that begin alike, and where it has their lengths from."""

from typing import Any

import pytest

from thresher.bench.roofline import MODELS
from thresher.engine.config.recipe import Recipe, make_recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.planning.memory import (
    PlanSetting,
    activation_bytes,
    all_weights,
    micro_batch,
    one_layer,
    read_setting,
)
from thresher.engine.planning.plan import plan
from thresher.engine.planning.time import CHIPS, sent_bytes
from thresher.engine.systems import load_system

CONFIG = MODELS["0.5B"]


def of_system(name: str, **rollout: Any) -> PlanSetting:
    """The setting of a recipe that says nothing else, as `thresher plan` reads it."""
    tables: dict[str, Any] = {"model": {"path": "m"}, "system": {"name": name}, "rollout": rollout}
    return read_setting(make_recipe(tables, "test", [], lambda system: load_system(system, {}).preset))


@pytest.mark.parametrize(
    ("name", "sampled", "searched", "prompt"),
    [
        ("arena", 256, 0, 4096 - 256),  # one turn, its passages in the prompt
        ("naive_grpo", 256, 0, 4096 - 256),
        ("eviomni", 768, 0, 3072 - 768),  # two turns of 640, 768 in all
        ("search_r1", 2048, 4 * 512, 1),  # which fill the context
        ("evinote", 2560, 5 * 512, 6144 - 5120),
    ],
)
def test_lengths_are_those_of_a_systems_preset(name: str, sampled: int, searched: int, prompt: int) -> None:
    found = of_system(name)
    assert (found.sampled, found.searched, found.prompt) == (sampled, searched, prompt)
    assert found.prompt + found.own == found.length


def small(**optim: Any) -> Recipe:
    """Two questions of four samples: a prompt of 900 tokens, of their own 100."""
    rollout = {"group_size": 4, "questions_per_step": 2, "max_turns": 1, "max_policy_tokens": 100, "max_context": 1000}
    return from_dict(Recipe, {"model": {"path": "m"}, "rollout": rollout, "optim": optim}, "test")


@pytest.mark.parametrize(
    ("optim", "tokens", "several"),
    [
        ({}, 2 * (900 + 4 * 100), False),
        ({"share_prefix": False}, 2 * 4 * 1000, False),
        ({"micro_batch_tokens": 2000}, 2000, True),
        ({"micro_batch_tokens": 10}, 1000, True),
    ],
)
def test_a_micro_batch_is_counted_in_computed_tokens(optim: dict[str, Any], tokens: int, several: bool) -> None:
    """Up to the budget, and at least one whole context."""
    setting = read_setting(small(**optim))
    assert micro_batch(setting) == (tokens, several)
    activations = plan(CONFIG, small(checkpoint_activations="off", **optim)).phases["loss"]["activations"]
    assert activations == tokens * activation_bytes(CONFIG, setting, checkpointed=False)


def test_a_longer_context_never_needs_less() -> None:
    """Nor where a prompt begins to be worth sharing, on which the search for the longest that fits relies."""
    tokens = [micro_batch(of_system("naive_grpo", max_context=n, max_turn_tokens=60))[0] for n in range(2, 200)]
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0]


def test_on_a_gpu_prompts_are_shared_where_its_libraries_can() -> None:
    def shares(dtype: str, **optim: Any) -> bool:
        tables = {"model": {"path": "m", "device": "cuda", "dtype": dtype}, "optim": optim}
        return read_setting(from_dict(Recipe, tables, "test")).share_rows

    assert shares("bfloat16") and not shares("float32") and not shares("bfloat16", attention="xformers")


def test_seconds_follow_computed_tokens_and_rows_in_the_loss_do_not() -> None:
    """Without its head an update takes as long as its computed tokens; with it, somewhat longer than that."""
    chip = CHIPS["H100"]

    def update(share: bool) -> float:
        recipe = small(share_prefix=share)
        tables = recipe.to_dict() | {"model": {"path": "m", "device": "cuda", "dtype": "bfloat16"}}
        seconds = plan(CONFIG, from_dict(Recipe, tables, "test"), rates=chip).seconds
        assert seconds is not None
        return seconds["update"]

    share = (900 + 400) / 4000
    assert share < update(True) / update(False) < 2 * share


def large(**tables: dict[str, Any]) -> Recipe:
    given = {"model": {"path": "m", "device": "cuda", "dtype": "bfloat16"}, "rollout": {"questions_per_step": 64}}
    return from_dict(Recipe, given | tables, "test")


def test_what_ranks_send_by_hand() -> None:
    """All weights of 7B, four micro-batches of one update on each of eight GPUs (docs/scale.md)."""
    config = MODELS["7B"]
    p, layers = all_weights(config), config.num_hidden_layers * one_layer(config)
    setting = read_setting(large(optim={"share_prefix": False}), gpus=8)
    tokens, _ = micro_batch(setting)
    batches = 8 * 8 * 4096 // tokens
    sent = sent_bytes(config, setting)
    assert sent["rollout"] == 2 * p * 7 / 8
    assert sent["update"] == (batches * (6 * p + 2 * layers + 2 * layers) + 2 * (p - layers)) * 7 / 8
    adapters = sent_bytes(config, read_setting(large(lora={"rank": 4}, optim={"share_prefix": False}), gpus=8))
    assert adapters["rollout"] == sent["rollout"] and adapters["update"] < 0.7 * sent["update"]
    assert set(sent_bytes(config, read_setting(large())).values()) == {0.0}


def test_links_count_where_a_chips_are_known() -> None:
    """A rollout waits for its copy; an update for what it sends where that takes longer than computing."""
    config, chip = MODELS["7B"], CHIPS["A100-80"]
    recipe = large()
    one, eight = plan(config, recipe, rates=chip), plan(config, recipe, gpus=8, rates=chip)
    assert one.links is None and eight.links == 300e9
    short = large(optim={"micro_batch_tokens": 1}, rollout={"questions_per_step": 64, "max_context": 128})
    slow, sent = plan(config, short, gpus=8, rates=chip).seconds, sent_bytes(config, read_setting(short, gpus=8))
    assert slow is not None and slow["update"] == sent["update"] / 300e9

    class Measured:
        flops_per_s, bytes_per_s = chip.flops_per_s, chip.bytes_per_s

    without = plan(config, recipe, gpus=8, rates=Measured())
    assert without.links is None and without.seconds is not None and eight.seconds is not None
    assert eight.seconds["rollout"] == pytest.approx(without.seconds["rollout"] + sent["rollout"] / 300e9)
    assert eight.seconds["update"] == without.seconds["update"]
