"""The sections of a recipe, and the shipped recipes: what a command needs, what a resumed run may change."""

import re
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from recipe_cases import FULL, refusal, writer

from thresher.common.errors import UserError
from thresher.engine.config.recipe import MAY_CHANGE, Recipe, load_recipe
from thresher.engine.config.sections import (
    Attention,
    ModelSection,
    RetrievalSection,
    RolloutSection,
    SftSection,
    SystemSection,
)
from thresher.engine.config.tables import Section, hints, key_of, named_section_in, section_in
from thresher.kernels.attention.backends.choice import Choice

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    return writer(tmp_path)


def test_searches_go_to_an_index_or_to_a_server(write: Any) -> None:
    remote = load_recipe(write('[model]\npath = "m"\n[retrieval]\nurl = "http://h:1"\npatience = 0\n'))
    section = remote.need(RetrievalSection)
    assert (section.index, section.url, section.timeout, section.patience) == (None, "http://h:1", 60.0, 0.0)
    message = refusal(write('[model]\npath = "m"\n[retrieval]\nindex = "i"\nurl = "u"\n'))
    assert message == "r.toml: [retrieval] index: expected either index, a folder, or url, a server, got both"
    moved = replace(remote, retrieval=replace(section, url="http://other:2", timeout=1.0, patience=2.0))
    assert moved.digest() == remote.digest()
    at_home = replace(remote, retrieval=RetrievalSection(index="i"))
    assert remote.differences(at_home) == ['retrieval.index is unset, not "i"']
    with pytest.raises(UserError, match=r"no section \[retrieval\], which .*; add it with index or url"):
        Recipe(model=ModelSection(path="m")).need(RetrievalSection)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_recipes_that_come_with_it(path: Path) -> None:
    recipe = load_recipe(path)
    assert ((recipe.retrieval or RetrievalSection()).url is not None) == path.stem.endswith("-server")
    folder = path.parent.name
    if folder == "smollm2":  # recipes of a model, with several systems
        return
    assert recipe.need(SystemSection).name == {"demo": "eval_rar", "world": "search_r1"}.get(folder, folder)


def test_need_names_the_missing_section() -> None:
    with pytest.raises(UserError, match=re.escape("[sft], which this command needs; add it with transcripts or data")):
        Recipe(model=ModelSection(path="m")).need(SftSection)


def test_attention_is_chosen_for_rollouts_and_for_updates(write: Any) -> None:
    recipe = load_recipe(write('[model]\npath = "m"\n[optim]\nattention = "flash"\n'), ["rollout.attention=triton"])
    assert (recipe.rollout.attention, recipe.optim.attention) == ("triton", "flash")
    assert recipe.rollout.share_prefix and recipe.optim.share_prefix
    assert {"rollout.attention", "optim.attention", "optim.share_prefix"} < MAY_CHANGE
    assert get_args(Attention) == get_args(Choice)  # the recipe does not import it, because it needs no torch
    expected = 'expected "auto" or "torch" or "triton" or "flash" or "xformers", got "sdpa"'
    assert (
        refusal(write('[model]\npath = "m"\n[optim]\nattention = "sdpa"\n')) == f"r.toml: [optim] attention: {expected}"
    )


def test_what_attention_meant_once_says_what_to_write_now(write: Any) -> None:
    shared = "leave it out; it meant rollout.share_prefix = true, which is the default"
    separate = "write rollout.share_prefix = false instead"
    for value, advice in (("shared", shared), ("separate", separate)):
        message = refusal(write(f'[model]\npath = "m"\n[rollout]\nattention = "{value}"\n'))
        assert message == f'r.toml: [rollout] attention: "{value}" is no longer a choice; {advice}'
        message = refusal(write('[model]\npath = "m"\n'), f"rollout.attention={value}")
        assert message == f'--set rollout.attention: "{value}" is no longer a choice; {advice}'
        with pytest.raises(UserError, match=f'attention: "{value}" is no longer a choice; '):
            RolloutSection(attention=value)  # type: ignore[arg-type]
        assert "no longer a choice" not in refusal(write(f'[model]\npath = "m"\n[optim]\nattention = "{value}"\n'))
    assert not load_recipe(write('[model]\npath = "m"\n[rollout]\nshare_prefix = false\n')).rollout.share_prefix


def test_the_digest_covers_all_but_what_may_change(write: Any) -> None:
    recipe = load_recipe(write(FULL))
    changed: dict[str, Any] = {
        bool: lambda value: not value,
        int: lambda value: value + 1,
        float: lambda value: (value + 1) / 4,
        str: lambda value: value + "x",
        tuple: lambda value: (0.5, 0.5),
        dict: lambda value: {**value, "more": 1},
        NoneType: lambda value: None,
    }
    choices = {"dtype": "float32", "device": "cpu", "prompt": "raw", "kl_value": "k3", "schedule": "linear"}
    choices |= {
        "format": "direct",
        "answer": "plain",
        "attention": "torch",
        "num_draft_tokens": 4,
        "threads": 2,
        "targets": ("q", "down"),
        "labels": ("no", "yes"),
        "reference": "device",
        "trackers": ("wandb",),
        "old_logprobs": "rollout",
        "tis_level": "token",
        "tis_rule": "mask",
        "checkpoint_activations": "on",
        "optimizer_state_dtype": "8bit",
        "offload": "moments",
        "objective": "dapo",
        "baseline": "leave_one_out",
        "scale": "batch",
        "guard": "llds",
        "advantage": "token",
        "anchor": "observation",
    }
    seen, skipped = {recipe.digest()}, []
    for name, hint in hints(Recipe).items():
        if (kind := section_in(hint)) is None:
            continue  # [tools.NAME]: tests/engine/rollout/test_tools_runs.py
        section = getattr(recipe, name)
        for key in hints(kind):
            value = getattr(section, key)
            new = choices[key] if key in choices else changed[type(value)](value)
            bound = ("aggregation", "max_grad_norm", "trees", "partial", "max_staleness", "stale_cache")
            if value is None or key in bound:  # inf, or tied to another key
                skipped.append(key)
                continue
            other = replace(recipe, **{name: replace(section, **{key: new})})
            dotted = f"{name}.{key_of(key)}"
            if dotted in MAY_CHANGE:
                assert other.digest() == recipe.digest() and recipe.differences(other) == []
            else:
                assert other.digest() not in seen, dotted
                (difference,) = recipe.differences(other)
                assert difference.startswith(dotted)
                seen.add(other.digest())
    assert len(seen) > 55 and len(skipped) < 25


def test_what_decides_when_a_token_is_drawn_stays_while_groups_outlive_their_step(write: Any) -> None:
    path = write('[model]\npath = "m"\n')
    whole = [load_recipe(path, [f"rollout.{key}"]).digest() for key in ("kv_tokens=9000", "num_draft_tokens=2")]
    assert set(whole) == {load_recipe(path).digest()}
    partial = [("rollout.partial=true", f"rollout.{key}") for key in ("kv_tokens=9000", "num_draft_tokens=2")]
    digests = {load_recipe(path, keys).digest() for keys in [("rollout.partial=true",), *partial]}
    assert len(digests) == 3 and not digests & set(whole)


def test_groups_in_flight_stay_within_the_limit_of_staleness(write: Any) -> None:
    path = write('[model]\npath = "m"\n[rollout]\nquestions_per_step = 4\n')
    assert load_recipe(path).rollout.in_flight == 4
    assert load_recipe(path, ["rollout.partial=true"]).rollout.in_flight == 8
    both = ["rollout.partial=true", "rollout.max_staleness=2"]
    assert load_recipe(path, both).rollout.in_flight == 12
    assert load_recipe(path, [*both, "rollout.groups_in_flight=5"]).rollout.in_flight == 5
    for wrong in (4, 13):
        message = refusal(path, *both, f"rollout.groups_in_flight={wrong}")
        assert message == (
            "--set rollout.groups_in_flight: expected 5 to 12, more than questions_per_step and at most "
            f"questions_per_step x (1 + max_staleness), got {wrong}"
        )
    few = refusal(path, "rollout.partial=true", "rollout.kv_tokens=256")
    assert few.endswith("] groups_in_flight: expected at most the 4 blocks of kv_tokens = 256, got 8")
    none = refusal(path, "rollout.partial=true", "rollout.max_staleness=0")
    assert "rollout.max_staleness: expected an integer >= 1 with partial = true, because at 0 no group" in none
    for key in ("groups_in_flight=8", "max_staleness=2", "stale_cache=true"):
        assert "expected it unset with partial = false" in refusal(path, f"rollout.{key}")


def test_the_digest_is_stable_and_tells_types_apart() -> None:
    recipe = Recipe(model=ModelSection(path="m"), system=SystemSection(name="s", options={"a": 1, "b": 2}))
    reordered = Recipe(model=ModelSection(path="m"), system=SystemSection(name="s", options={"b": 2, "a": 1}))
    as_bool = Recipe(model=ModelSection(path="m"), system=SystemSection(name="s", options={"a": True, "b": 2}))
    assert recipe.digest() == reordered.digest() and recipe.differences(reordered) == []
    assert recipe == as_bool and recipe.digest() != as_bool.digest()
    assert recipe.differences(as_bool) == ["system.options.a is 1, not true"]
    assert recipe.differences(Recipe(model=ModelSection(path="m"))) == [
        'system.name is "s", not unset',
        "system.options.a is 1, not unset",
        "system.options.b is 2, not unset",
    ]
    assert re.fullmatch("[0-9a-f]{64}", recipe.digest())


def test_options_are_copied() -> None:
    options = {"a": [1]}
    system = SystemSection(name="s", options=options)
    options["a"].append(2)
    assert system.options == {"a": [1]}


def all_sections() -> list[type[Section]]:
    kinds = [section_in(hint) or named_section_in(hint) for hint in hints(Recipe).values()]
    return [kind for kind in kinds if kind is not None]


def test_every_field_can_be_written_and_what_may_change_exists() -> None:
    names = {f"{name}.{key}" for name, kind in zip(hints(Recipe), all_sections(), strict=True) for key in hints(kind)}
    assert names >= MAY_CHANGE
    for section in [*all_sections(), Recipe]:
        for f in fields(section):  # type: ignore[arg-type]
            optional = NoneType in get_args(hints(section)[f.name])
            # TOML cannot say "nothing", so None must be the meaning of an absent key.
            assert not optional or f.default is None, f"{section.__name__}.{f.name}"
