"""Tests that chat templates render as Hugging Face renders them, wherever the model folder stores them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from thresher.common.errors import UserError
from thresher.policy.tokenizer import Tokenizer, _worker, load_tokenizer, train_bpe

CHATML = (
    "{%- for m in messages %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
NAMED = [{"name": "rag", "template": "r"}, {"name": "default", "template": CHATML}]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_bpe([], 260, ["<|im_start|>", "<|im_end|>"])


@pytest.mark.slow
def test_qwen_chat_template(shared_data: Path) -> None:
    qwen = load_tokenizer(shared_data / "qwen2.5")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who <b>is</b>\nit?"},
        {"role": "assistant", "content": "Anna."},
    ]
    assert qwen.render_chat(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho <b>is</b>\nit?<|im_end|>\n"
        "<|im_start|>assistant\nAnna.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert qwen.render_chat(messages[:1], add_generation_prompt=False).endswith("Be brief.<|im_end|>\n")
    assert qwen.encode_template("<|im_start|>assistant\n") == [151_644, 77_091, 198]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=qwen._template_encoder)
    call = {"function": {"name": "find", "arguments": {"q": "ä<'\"", "b": 1, "a": [1.5, None]}}}
    for chat in (
        messages,
        messages[1:],
        [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}],
        [*messages[:2], {"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}],
    ):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt, chat_template=qwen.chat_template
            )
            assert qwen.render_chat(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"chat_template.jinja": CHATML}, CHATML),
        ({"tokenizer_config.json": json.dumps({"chat_template": CHATML})}, CHATML),
        ({"tokenizer_config.json": json.dumps({"chat_template": None})}, None),
        ({"chat_template.jinja": CHATML, "tokenizer_config.json": '{"chat_template": "other"}'}, CHATML),
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMED})}, CHATML),
    ],
)
def test_where_the_chat_template_comes_from(
    small: Tokenizer, tmp_path: Path, files: dict[str, str], expected: str | None
) -> None:
    small.save(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == expected
    if expected:
        rendered = tokenizer.render_chat([{"role": "user", "content": "hi"}])
        assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        end = tokenizer.added_tokens["<|im_end|>"]
        assert tokenizer.encode_template(rendered).count(end) == 1
    else:
        with pytest.raises(UserError, match="no chat template"):
            tokenizer.render_chat([{"role": "user", "content": "hi"}])


HI = [{"role": "user", "content": "<b>&"}]


def with_template(tokenizer: Tokenizer, folder: Path, template: str) -> Tokenizer:
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(template)
    settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<pad>"}, "model_max_length": 9}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ eos_token }}{{ pad_token }}{{ model_max_length }}", "<|im_end|><pad>"),
        ("{{ {'b': '<ä>', 'a': 1} | tojson }}", '{"b": "<ä>", "a": 1}'),
        ("{% for m in messages %}{% break %}{% endfor %}{{ tools is none }}", "True"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ {'b': [1, 2]} | tojson(separators=(',', ':')) }}", '{"b":[1,2]}'),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}.", "user."),
    ],
)
def test_templates_render_as_hugging_face_does(small: Tokenizer, tmp_path: Path, template: str, text: str) -> None:
    assert with_template(small, tmp_path, template).render_chat(HI) == text


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.x }}", ""),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ""),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("\n{% generatoin %}", "line 2 of the template: Encountered unknown tag 'generatoin'"),
        ("{% for x in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it recurses without end"),
        ("{{ 'a' * 10**11 }}", "it takes more than 2 GiB of memory"),
        ("{{ 'a' * 10**7 }}a", "its text has 10,000,001 characters"),
        ("{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}", "it takes longer than 1 s"),
    ],
)
def test_a_hostile_template_ends_in_a_sentence_and_the_next_one_is_filled(
    small: Tokenizer, tmp_path: Path, template: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.policy.tokenizer.TEMPLATE_SECONDS", 1.0 if "range(9" in template else 20.0)
    with pytest.raises(UserError, match=f"the chat template cannot render these messages .*{problem}"):
        with_template(small, tmp_path, template).render_chat(HI)
    assert with_template(small, tmp_path, "{{ messages[0].content }}").render_chat(HI) == "<b>&"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_template_is_filled_though_its_process_has_to_wait_or_was_killed(
    small: Tokenizer, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.policy.tokenizer.TEMPLATE_SECONDS", 0.5)
    tokenizer = with_template(small, tmp_path, "{{ messages[0].content }}")
    process = stopped(tokenizer, number)
    going_on = threading.Timer(1.0, process.send_signal, [signal.SIGCONT])
    going_on.start()
    assert tokenizer.render_chat(HI) == "<b>&"
    going_on.join()


def test_an_interrupted_request_leaves_no_answer_to_the_next_one(
    small: Tokenizer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # A shell makes background processes ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    tokenizer = with_template(small, tmp_path, "{{ messages[0].content }}")
    stopped(tokenizer, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.render_chat([{"role": "user", "content": "of the first"}])
    assert tokenizer.render_chat(HI) == "<b>&"


def stopped(tokenizer: Tokenizer, number: signal.Signals) -> subprocess.Popen[str]:
    """Return the process that fills templates, after sending it the signal."""
    tokenizer.render_chat(HI)
    process = _worker(os.getpid())._process
    assert process is not None
    process.send_signal(number)
    return process


def test_a_template_whose_process_ends_each_time_is_refused(
    small: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _worker(os.getpid()).end()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match="it ended the process that renders it"):
        with_template(small, tmp_path, CHATML).render_chat(HI)


def test_a_message_that_json_cannot_hold_is_refused(small: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot render these messages .*set is not JSON serializable"):
        with_template(small, tmp_path, CHATML).render_chat([{"role": "user", "content": {"a"}}])


def test_a_template_that_drops_the_message_is_refused(small: Tokenizer, tmp_path: Path) -> None:
    dropped = "the chat template leaves out the user's message; use another, or prompt 'raw'"
    with pytest.raises(UserError, match=dropped):
        with_template(small, tmp_path, "<|im_start|>user\n<|im_end|>\n").chat_prompt("Who?")
    kept = with_template(small, tmp_path, "[{{ messages[0].content | trim }}]")
    assert kept.chat_prompt(" Who? \n") == "[Who?]"
