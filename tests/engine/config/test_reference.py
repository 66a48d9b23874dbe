"""The recipe reference: every key has a meaning, read from the sections themselves; docs/recipe.md is up to date."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from documents import table_rows

from thresher.common.errors import UserError
from thresher.engine.config.objectives import OBJECTIVES
from thresher.engine.config.recipe import Recipe, make_recipe
from thresher.engine.config.reference import explain, keys_of, markdown, meanings_of
from thresher.engine.config.tables import hints, keys, named_section_in, section_in
from thresher.engine.systems import NAMES, load_system

ROOT = Path(__file__).resolve().parents[3]
KEYS = keys_of({name: load_system(name, {}).preset for name in NAMES})


@dataclass
class Sample:
    """A section."""

    first: int = 1  # behind it
    # above it,
    # on two lines
    second: int = 2
    # above
    third: int = 3  # and behind; None: nothing
    fourth: str = "# no comment"


def test_a_meaning_is_the_comment_behind_a_field_or_above_it() -> None:
    assert meanings_of(Sample) == {
        "first": "behind it",
        "second": "above it, on two lines",
        "third": "above and behind; none: nothing",
        "fourth": "",
    }


def test_every_key_is_there_and_has_a_meaning() -> None:
    found = hints(Recipe).items()
    sections = {f"{name}.NAME" if named_section_in(hint) else name: hint for name, hint in found}
    assert [key.dotted for key in KEYS] == [
        f"{name}.{key}"
        for name, hint in sections.items()
        for key in keys(section_in(hint) or named_section_in(hint) or Recipe)
    ]
    assert [key.dotted for key in KEYS if len(key.meaning) < 6] == []


def test_defaults_and_presets_are_those_that_hold() -> None:
    found = {key.dotted: key for key in KEYS}
    assert found["model.path"].default == "required" and found["data.dev"].default == "none"
    made = make_recipe({"model": {"path": "m"}}, "here").to_toml()
    for key in KEYS:
        if key.section in ("rollout", "grpo", "optim", "run", "judge") and key.default not in ("required", "none"):
            assert f"\n{key.name} = {key.default}\n" in f"{made}\n"
    assert found["rollout.group_size"].presets["arena"] == "7" and found["rollout.group_size"].takes.startswith(
        "an int"
    )
    assert found["grpo.kl_value"].presets["arena"] == '"k2"' and found["run.seed"].presets == {}


def test_the_page_is_as_it_would_be_written_now() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    assert page == markdown(KEYS), "run make docs"


def test_a_key_is_explained_by_any_of_its_names() -> None:
    assert [key.dotted for key in explain(KEYS, "lr")] == ["optim.lr", "sft.lr"]
    assert [key.dotted for key in explain(KEYS, "optim.lr")] == ["optim.lr"]
    assert {key.section for key in explain(KEYS, "[lora]")} == {"lora"}
    for asked, hint in (("group_sze", "did you mean group_size"), ("zzzz", "docs/recipe.md lists them")):
        with pytest.raises(UserError, match=hint):
            explain(KEYS, asked)


def test_the_page_of_objectives_is_what_they_are() -> None:
    rows = table_rows("docs/objectives.md", "`objective`")
    said = {
        name.strip("`"): (
            surrogate.strip("`"),
            source,
            {
                key.strip("`"): value
                for key, _, value in (one.partition(" ") for one in presets.split(", ") if one != "-")
            },
        )
        for name, surrogate, presets, source in rows
    }
    assert said == {
        name: (one.surrogate, one.source, {key: str(value).lower() for key, value in one.grpo.items()})
        for name, one in OBJECTIVES.items()
    }
