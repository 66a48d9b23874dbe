"""Tests of tokenizers shaped as Llama 3's, R1-Distill-Qwen's and Qwen3's: ids, bytes and prompts are transformers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_cases import (
    LLAMA_TOKENS,
    R1_TOKENS,
    write_llama_tokenizer,
    write_qwen3_tokenizer,
    write_qwen35_tokenizer,
    write_r1_tokenizer,
)

from thresher.policy.tokenizer import Tokenizer, load_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Who wrote 1234567 letters? "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
    [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "<think>\nthe zoo\n</think>\n\nThe zoo."},
        {"role": "user", "content": "<x>no question</x>"},
        {"role": "assistant", "content": "End", "reasoning_content": "long"},
    ],
]
TEXTS = [
    "",
    "\u1eb9\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",
    "Who wrote it?",
    " zoology zoologyx 12345 guide's",
    "ein Käfer 🦊\n\n  und mehr\t",
    "<|eot_id|> <think>",
]
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_llama_tokenizer,
    "r1": write_r1_tokenizer,
    "qwen3": write_qwen3_tokenizer,
    "qwen3.5": write_qwen35_tokenizer,
}


@pytest.fixture(params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path / request.param)


def change_settings(folder: Path, **changes: Any) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return load_tokenizer(folder)


def theirs_of(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def test_ids_are_those_of_transformers_and_bytes_exact(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), theirs_of(folder)
    controls = {ours.token_bytes(token).decode(): token for token in ours.added_tokens.values()}
    assert controls == ours.added_tokens
    for text in TEXTS:
        assert ours.encode_template(text) == theirs(text, add_special_tokens=False).input_ids, text
        assert [*ours.begin_ids, *ours.encode_template(text)] == theirs(text).input_ids, text
        for ids in (ours.encode(text), ours.encode_template(text)):
            assert ours.decode_bytes(ids) == text.encode()
        assert not {*ours.encode(text)} & {*ours.added_tokens.values()}
    every = bytes(range(256))
    assert b"".join(map(ours.token_bytes, ours.byte_ids(every))) == every and len(ours.byte_ids(every)) == 256


def test_a_word_of_the_vocabulary_goes_before_merges(tmp_path: Path) -> None:
    ours = load_tokenizer(write_llama_tokenizer(tmp_path))
    (token,) = ours.encode(" zoology")
    assert ours.token_bytes(token) == b" zoology" and len(ours.encode(" zoologyx")) > 1
    assert ours.encode("1234567") == [*ours.encode("123"), *ours.encode("456"), *ours.encode("7")]


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_templates_render_as_transformers_renders_them(folder: Path, prompt: bool) -> None:
    """The date is given, because transformers passes the current time to a template and we do not."""
    ours, theirs = load_tokenizer(folder), theirs_of(folder)
    for chat in CHATS:
        text = ours.render_chat(chat, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt, date_string="1 Jan 2020"
        )
        ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, date_string="1 Jan 2020")
        assert ours.encode_template(text) == (ids if isinstance(ids, list) else ids["input_ids"])
        assert ours.encode_template(text)[: len(ours.begin_ids)] == list(ours.begin_ids), "the template begins the text"


def test_what_comes_before_a_text(tmp_path: Path) -> None:
    llama, r1 = write_llama_tokenizer(tmp_path / "llama"), write_r1_tokenizer(tmp_path / "r1")
    begin = load_tokenizer(llama).begin_ids
    assert begin == (load_tokenizer(llama).added_tokens[LLAMA_TOKENS[0]],)
    assert load_tokenizer(r1).begin_ids == (load_tokenizer(r1).added_tokens[R1_TOKENS[0]],)
    # A setting in tokenizer_config.json takes precedence.
    assert change_settings(llama, add_bos_token=False).begin_ids == ()
    assert change_settings(llama, add_bos_token=None).begin_ids == begin
    assert change_settings(r1, add_bos_token=True, bos_token=None).begin_ids == ()
    qwen3 = write_qwen3_tokenizer(tmp_path / "qwen3")
    assert load_tokenizer(qwen3).begin_ids == ()
    ours = change_settings(qwen3, add_bos_token=True, bos_token="<|im_start|>")
    assert ours.begin_ids == (ours.added_tokens["<|im_start|>"],)
