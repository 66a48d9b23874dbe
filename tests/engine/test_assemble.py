"""Whether a tokenizer is the model's: what is refused, and what only raises a question."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_cases import make_config

from thresher.common.errors import UserError
from thresher.engine import assemble
from thresher.engine.assemble import PADDING, check_fit, fit_doubts, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.world.random_model import write_model
from thresher.policy.config import DeltaShape
from thresher.policy.model import init_policy
from thresher.policy.tokenizer import Tokenizer


def policy_of(tokenizer: Tokenizer, **changes: Any) -> Any:
    """Return a stand-in policy, of which only the config is read."""
    end = tokenizer.added_tokens["<|endoftext|>"]
    return SimpleNamespace(config=make_config(**{"vocab_size": 384, "eos_token_ids": (end,), **changes}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 379, "eos_token_ids": (1,)}, "the tokenizer has 380 tokens, the model's head only 379; use"),
        ({"eos_token_ids": (379, 380)}, "eos_token_id is 380, but the tokenizer has only 380 tokens; use the tok"),
        ({"bos_token_id": 383}, "bos_token_id is 383, but the tokenizer has only 380 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_the_models_is_refused(
    tiny_tokenizer: Tokenizer, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=f"^models/x: {complaint}"):
        check_fit(policy_of(tiny_tokenizer, **changes), tiny_tokenizer, "models/x")


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({}, None),
        ({"bos_token_id": 378, "pad_token_id": 383}, None),  # <|im_start|>; the padding token is not used
        ({"vocab_size": PADDING}, None),
        ({"vocab_size": PADDING + 1}, "the model's head has 1,025 rows, the tokenizer only 380 tokens; check"),
        ({"eos_token_ids": (32, 377)}, "eos_token_id 32 is not an added token of the tokenizer but the text 'A'; ch"),
        (
            {"bos_token_id": 33, "vocab_size": 5000},
            "bos_token_id 33 is not .* 'B', and the model's head has 5,000",
        ),
    ],
)
def test_what_sizes_alone_cannot_tell_is_asked(
    tiny_tokenizer: Tokenizer, changes: dict[str, Any], doubt: str | None
) -> None:
    policy = policy_of(tiny_tokenizer, **changes)
    check_fit(policy, tiny_tokenizer, "models/x")
    found = fit_doubts(policy, tiny_tokenizer, "models/x")
    if doubt is None:
        assert found is None
    else:
        assert found is not None and re.match(f"models/x: {doubt}", found) and "\n" not in found


@pytest.mark.parametrize(("rows", "said"), [(384, False), (2000, True)])
def test_loading_a_run_says_so_in_one_line(
    tiny_tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int, said: bool
) -> None:
    policy = init_policy(policy_of(tiny_tokenizer, vocab_size=rows, max_position_embeddings=2048).config, 0)
    write_model(policy, tiny_tokenizer, tmp_path / "model")
    tables = {
        "model": {"path": str(tmp_path / "model")},
        "system": {"name": "eval_rar"},
        "rollout": {"max_context": 999},
    }
    load_run_context(from_dict(Recipe, tables, "test"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == said and all("head has 2,000 rows" in line for line in lines)


def test_states_that_do_not_fit_are_refused(
    tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types: dict[str, Any] = {"layer_types": ("linear_attention", "full_attention"), "delta": DeltaShape(2, 4, 8, 8, 4)}
    shape = {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.5, "max_position_embeddings": 2048, **types}
    write_model(init_policy(policy_of(tiny_tokenizer, **shape).config, 0), tiny_tokenizer, tmp_path / "model")
    rollout = {"max_context": 999, "max_num_seqs": 4, "kv_tokens": 1024}
    tables = {"model": {"path": str(tmp_path / "model")}, "system": {"name": "eval_rar"}, "rollout": rollout}
    context = load_run_context(from_dict(Recipe, tables, "test"))
    context.rollout(None)
    blocks, size = Rollout.blocks_for(context.limits), context.limits.kv_block_size
    keys = PagedKV.bytes_needed(context.policy.config, blocks, size, 4)
    monkeypatch.setattr(assemble, "free_memory", lambda device: keys + 1000)
    with pytest.raises(UserError, match=r"^the states of rollout.max_num_seqs = 4 sequences take .*; lower it$"):
        context.rollout(None)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(151_665, 151_936), (151_665, 152_064), (151_669, 151_936), (128_256, 128_256)]
)
def test_published_padding_is_no_reason_to_ask(tokens: int, rows: int) -> None:
    """The heads of Qwen2.5, Qwen3 and Llama 3 raise no question; a Qwen head with Llama's tokenizer does."""
    tokenizer: Any = SimpleNamespace(vocab_size=tokens, added_tokens={"end": 7})
    policy: Any = SimpleNamespace(config=make_config(vocab_size=rows, eos_token_ids=(7,)))
    assert fit_doubts(policy, tokenizer, "here") is None
    tokenizer.vocab_size = 128_256
    assert (fit_doubts(policy, tokenizer, "here") is None) == (rows == 128_256)
