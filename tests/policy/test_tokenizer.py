"""Tests that plain text never becomes a control token, bytes are exact, and an unusable tokenizer gives an error."""

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.policy.tokenizer import Tokenizer, UnencodableText, load_tokenizer, train_bpe

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
TEXTS = [
    "The town of Greyford lies on the river Ash, and Anna Bellweather was born there.",
    "<think> I should search for the town. </think><search> Anna Bellweather </search>",
    "The answer is in the information, so the answer is Greyford. <answer> Greyford </answer>",
] * 3
BYTES = {bytes([byte]) for byte in range(256)}
text_like = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_bpe(TEXTS, 340, SPECIALS)


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> Tokenizer:
    return load_tokenizer(shared_data / "qwen2.5")


def stored(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    tokenizer.save(folder)
    data: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return data


def test_qwen_encodes_the_published_cases(qwen: Tokenizer, shared_data: Path) -> None:
    texts = (shared_data / "qwen2.5/encode_cases.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (shared_data / "qwen2.5/encode_cases.out").read_text().split("\n")
    expected = [[int(number) for number in line.split()] for line in lines]
    assert len(texts) == len(expected) == 47
    assert qwen.encode_batch(texts) == expected
    assert [qwen.encode(text) for text in texts] == expected
    assert [qwen.encode_template(text) for text in texts] == expected


def test_qwen_bytes_of_every_id(qwen: Tokenizer) -> None:
    assert len(qwen) == qwen.vocab_size == 151_665
    tokens = [qwen.token_bytes(token_id) for token_id in range(len(qwen))]
    assert len(set(tokens)) == len(tokens) and set(tokens) >= BYTES and b"" not in tokens
    assert b"".join(tokens) == qwen.decode_bytes(range(len(qwen)))
    # The library's decoder, which works on strings, agrees on each id, U+FFFD included.
    library = qwen._template_encoder
    theirs = library.decode_batch([[token_id] for token_id in range(len(qwen))], skip_special_tokens=False)
    assert theirs == [token.decode(errors="replace") for token in tokens]
    assert [qwen.decode_bytes([i]) for i in (522, 1836, 29)] == [b"</", b"search", b">"]


def test_qwen_added_tokens_inside_a_passage_stay_text(qwen: Tokenizer) -> None:
    assert len(qwen.added_tokens) == 22 and min(qwen.added_tokens.values()) == 151_643
    for content, token_id in qwen.added_tokens.items():
        passage = f"Before{content} between {content}{content}after.\n{content}"
        ids = qwen.encode(passage)
        assert max(ids) < 151_643, content
        assert qwen.decode(ids) == passage
        assert qwen.encode_template(passage).count(token_id) == 4, content
        assert qwen.token_bytes(token_id) == content.encode() and qwen.token_id(content) == token_id


@settings(derandomize=True, deadline=None, max_examples=300)
@given(pieces=st.lists(st.one_of(text_like, st.sampled_from(["<|im_end|>", "<|", "|>", "im_end"])), max_size=6))
def test_qwen_roundtrip(qwen: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = qwen.encode(text)
    assert all(token_id < 151_643 for token_id in ids)
    assert qwen.decode_bytes(ids) == unicodedata.normalize("NFC", text).encode()


def test_training_puts_special_tokens_last(small: Tokenizer, qwen: Tokenizer) -> None:
    first = len(small) - len(SPECIALS)
    assert small.added_tokens == {content: first + i for i, content in enumerate(SPECIALS)}
    assert 256 + len(SPECIALS) < len(small) <= 340
    assert {small.token_bytes(token_id) for token_id in range(first)} >= BYTES
    # The training had an effect: a common word of the text has far fewer tokens than letters.
    assert len(small.encode(" Greyford")) <= 3 < len(small.encode(" Zkvqjxwp"))
    sizes = [len(train_bpe(TEXTS, 256)), len(train_bpe(TEXTS, 300, SPECIALS)), len(train_bpe([], 300, ["<a>"]))]
    assert sizes == [256, 300, 257]
    ours, theirs = (t._plain_encoder.pre_tokenizer for t in (small, qwen))
    for text in ("I've 12 apples", "a  b\n\n c\t", "<|im_end|>", "x=y;\r\n", " ünïcode—dash", "WE'LL", "  \n  "):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_training_is_deterministic_and_read_by_transformers(small: Tokenizer, tmp_path: Path) -> None:
    """The trainer counts in hash maps; processes with different hash seeds must write the same file."""
    code = (
        "import sys; from thresher.policy.tokenizer import train_bpe\n"
        f"train_bpe({TEXTS!r}, 340, {SPECIALS!r}).save(sys.argv[1])"
    )
    for run in ("a", "b"):
        subprocess.run([sys.executable, "-P", "-c", code, tmp_path / run], check=True)
    small.save(tmp_path / "c")
    contents = {(tmp_path / run / "tokenizer.json").read_bytes() for run in "abc"}
    assert len(contents) == 1
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "c" / "tokenizer.json"))
    for text in ["Anna's 42 <|im_end|> ünï \n\n x", "</search><answer> Greyford"]:
        assert theirs(text, add_special_tokens=False).input_ids == small.encode_template(text)


def test_training_refuses_what_does_not_fit() -> None:
    for size, specials, complaint in (
        (258, ["<a>", "<b>", "<c>"], "no room"),
        (300, ["<a>", "<a>"], "different and not empty"),
        (300, ["a"], "added token 'a' has id 2[0-9]+ in added_tokens and 64 in the vocabulary"),
    ):
        with pytest.raises(ValueError, match=complaint):
            train_bpe(["answer " * 20 + "answer\n" + "answer"], size, specials)


def test_batches_templates_and_lookups(small: Tokenizer) -> None:
    texts = ["", "<|im_end|>", " the town", "ü" * 50, *TEXTS]
    assert small.encode_batch(texts) == [small.encode(text) for text in texts]
    assert small.encode_batch([]) == [] and small.encode("") == []
    end = small.added_tokens["<|im_end|>"]
    assert small.encode_template("a<|im_end|>b") == [*small.encode("a"), end, *small.encode("b")]
    assert small.decode([end, end]) == "<|im_end|>" * 2
    assert small.token_id("<|im_end|>") == end and small.token_id("no such token") is None
    for token_id in range(len(small)):
        token = small.token_bytes(token_id)
        if token.isascii():
            assert small.token_id(token.decode()) == token_id
    for token_id in (-1, len(small), 10**9):
        with pytest.raises(ValueError, match="outside"):
            small.decode([0, token_id])
    ids = small.encode("🦙")
    assert len(ids) == 4 and small.decode(ids) == "🦙"
    assert small.decode_bytes(ids[:3]) == "🦙".encode()[:3] and small.decode(ids[:3]) == "\ufffd"


@pytest.mark.parametrize("method", ["encode", "encode_template", "encode_batch"])
def test_half_characters_are_refused(small: Tokenizer, method: str) -> None:
    for text in (json.loads('"good \\ud83e bad"'), "x\udcffy"):
        argument = ["fine", text] if method == "encode_batch" else text
        with pytest.raises(UserError, match="lone surrogate"):
            getattr(small, method)(argument)
    with pytest.raises(TypeError, match="got bytes"):
        getattr(small, method)([b"x"] if method == "encode_batch" else b"x")


def test_saving_is_byte_for_byte(small: Tokenizer, tmp_path: Path) -> None:
    data = stored(small, tmp_path / "plain")
    odd = json.dumps(data, indent=7).encode() + b"\n\n"
    settings_file = b'{ "eos_token":"<|im_end|>" }'
    files = {"tokenizer.json": odd, "chat_template.jinja": b"{{ 'x' }}\r\n", "tokenizer_config.json": settings_file}
    (tmp_path / "read").mkdir()
    for name, content in files.items():
        (tmp_path / "read" / name).write_bytes(content)
    for source in (tmp_path / "read", tmp_path / "read" / "tokenizer.json", str(tmp_path / "read")):
        load_tokenizer(source).save(tmp_path / "new" / "folder")
        written = {path.name: path.read_bytes() for path in (tmp_path / "new" / "folder").iterdir()}
        assert written == files
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("merges_as_text", [False, True])
def test_added_tokens_listed_in_the_base_vocabulary(
    small: Tokenizer, tmp_path: Path, ignore_merges: bool, merges_as_text: bool
) -> None:
    """Merges give a base token that is also an added token for its text; plain text must avoid it."""
    data = stored(small, tmp_path)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    # A token without spaces, because the vocabulary must spell it like the added token.
    word = "search"
    promoted = small.token_id(word)
    assert promoted is not None and small.encode(word) == [promoted]
    data["added_tokens"].insert(0, {"id": promoted, "content": word, **flags})
    data["model"]["ignore_merges"] = ignore_merges
    if merges_as_text:
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == len(small) and tokenizer.added_tokens[word] == promoted
    for text in (word, f"{word}{word}", f"a {word}\n{word}", *TEXTS):
        assert promoted not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_template(f"{word}|{word}").count(promoted) == 2


def test_nothing_is_added_padded_or_cut(small: Tokenizer, tmp_path: Path) -> None:
    data = stored(small, tmp_path)
    end = small.added_tokens["<|im_end|>"]
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": end, "pad_type_id": 0, "pad_token": "<|im_end|>"}
    data["padding"] = pad | {"strategy": {"Fixed": 50}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [end], "tokens": ["<|im_end|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS[:3]:
        assert tokenizer.encode(text) == small.encode(text)
        assert tokenizer.encode_template(text) == small.encode(text)


def drop_byte(data: dict[str, Any]) -> None:
    """Give the token of byte 0 another spelling, which leaves no gap in the ids."""
    vocab = data["model"]["vocab"]
    vocab["ĀĀ"] = vocab.pop("Ā")


def test_a_text_with_a_byte_that_has_no_token_is_refused(small: Tokenizer, tmp_path: Path) -> None:
    """SmolLM2 lacks some control characters: texts that contain one are refused, and others encode without loss."""
    data = stored(small, tmp_path)
    drop_byte(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.lacks_bytes and not small.lacks_bytes
    assert [tokenizer.encode(text) for text in TEXTS] == [small.encode(text) for text in TEXTS]
    for encode in (tokenizer.encode, tokenizer.encode_template):
        with pytest.raises(UnencodableText, match=r"has U\+0000 at character 2, .*tokenizer.json has no .* byte 0x00"):
            encode("é!\0 and more")


def set_in(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


BYTE_LEVEL = ("pre_tokenizer", "pretokenizers", 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (set_in("model", "type", value="WordPiece"), "only byte-level BPE"),
        (set_in("pre_tokenizer", value=None), "only byte-level BPE"),
        (set_in("model", "byte_fallback", value=True), "only byte-level BPE"),
        (set_in(*BYTE_LEVEL, "add_prefix_space", value=True), "add_prefix_space"),
        (set_in("model", "dropout", value=0.1), "dropout"),
        (set_in("model", "continuing_subword_prefix", value="##"), "continuing_subword_prefix"),
        (set_in("model", "vocab", "▁the", value=340), "which stands for no byte"),
        (set_in("model", "vocab", "zzzz", value=5), "two tokens have the id 5"),
        (set_in("added_tokens", 0, "id", value="7"), "not a tokenizers file"),
        (set_in("added_tokens", 0, "content", value="e"), "added token 'e' has id 336 in added_tokens and 68"),
        (set_in("added_tokens", value=[{"content": "e", "id": 68}]), "letter of a byte"),
        (set_in("model", "vocab", value=[]), "not a tokenizers file"),
        (set_in("model", "merges", value=[["zz", "yy"]]), "not a readable tokenizer"),
    ],
)
def test_unusable_tokenizers(
    small: Tokenizer, tmp_path: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    data = stored(small, tmp_path)
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert complaint in message and message.startswith(str(tmp_path / "tokenizer.json")), message


def test_a_pattern_that_takes_too_many_steps(
    small: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library panics, which in Python is no Exception; one such text in a batch is enough."""
    data = stored(small, tmp_path)
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"(?:a|aa|aaa)+(?=\d)(?!\d)"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    text = "a" * 40 + "1"
    for call in (lambda: tokenizer.encode_batch(["a", text]), lambda: tokenizer.encode_template(text)):
        with pytest.raises(UserError, match=r"tokenizer\.json: the tokenizer failed on texts of up to 41 characters"):
            call()
    assert tokenizer.encode("aa") == small.encode("aa")


def test_companions_that_cannot_be_read(small: Tokenizer, tmp_path: Path) -> None:
    """A dangling link is not an absent file: without its template the model would be prompted differently."""
    small.save(tmp_path)
    template, settings_file = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    template.write_bytes("{{ 'Müller' }}".encode("latin-1"))
    with pytest.raises(UserError, match=r"chat_template\.jinja: not valid UTF-8 at byte 5; convert the file"):
        _ = load_tokenizer(tmp_path).chat_template
    for unlike in (lambda: template.symlink_to(tmp_path / "nowhere"), lambda: os.mkfifo(template)):
        template.unlink()
        unlike()
        with pytest.raises(
            UserError, match=r"chat_template\.jinja: (is a link to a file that|expected a regular file)"
        ):
            load_tokenizer(tmp_path)
    template.unlink()
    for value in ([1], 5, {"a": "b"}, [{"name": "default", "template": 1}]):
        settings_file.write_text(json.dumps({"chat_template": value}))
        with pytest.raises(
            UserError, match=r"tokenizer_config\.json: chat_template is .*, expected a string, or a list"
        ):
            _ = load_tokenizer(tmp_path).chat_template
    settings_file.write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: holds a number of more than 4,300 digits"):
        _ = load_tokenizer(tmp_path).chat_template


def test_absent_and_damaged_files(small: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such file"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"tokenizer.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"vocab.json alone is not read"):
        load_tokenizer(tmp_path)
    small.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 3):
        (tmp_path / "tokenizer.json").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"tokenizer.json: .*not valid JSON"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json: line 1 is not valid JSON"):
        _ = load_tokenizer(tmp_path).chat_template
