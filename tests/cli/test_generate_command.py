"""Tests of `thresher generate`: it prints what the generator samples, and an error names the flag."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher.cli import main as cli
from thresher.engine import GenerateRequest, Generator
from thresher.engine.decoding.generator import stream_text
from thresher.kernels import sampling
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

PROMPT = "<search> or <answer>: What is the mayor of Anna Bell?\n"
SHORT = ("--max-new-tokens", "40", "--stop", "</answer>", "</search>")
CHAT = "{%- for m in messages %}{{- '<|im_start|>' + m.content + '<|im_end|>' }}{%- endfor %}"
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return say(*words) -> status, output, errors."""

    def run(*words: str) -> tuple[int, str, str]:
        status = cli.run(["generate", "--model", str(tiny_model_folder), *words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_one_object_holds_every_sample(say: Say, tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    drawing = ("--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "--seed", "3")
    status, printed, complaint = say("--prompt", PROMPT, *SHORT, *drawing, "--n", "6", "--json")
    assert status == 0 and complaint == "" and printed.count("\n") == 1
    found = json.loads(printed)
    rules: Any = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "n": 6, "seed": 3}
    stops = ("</answer>", "</search>")
    request = GenerateRequest(prompt_text=PROMPT, max_new_tokens=40, stop=stops, **rules)
    (samples,) = Generator(tiny_policy, tiny_tokenizer).generate([request])
    assert found["prompt_ids"] == tiny_tokenizer.encode(PROMPT) and len(found["samples"]) == 6
    for one, sample in zip(found["samples"], samples, strict=True):
        names = ("token_ids", "logprobs", "text", "finish", "stop", "prefill_tokens_computed")
        assert one == {name: getattr(sample, name) for name in names} | {"trailing": sample.trailing.decode()}
    assert {one["finish"] for one in found["samples"]} > {"stop"}  # the seed was chosen for several kinds of end
    words = ("--prompt", PROMPT, "--max-new-tokens", "5", "--json")
    assert say(*words, "--stop", "a", "a", "--stop", "a") == say(*words, "--stop", "a")


def test_text_is_what_the_object_holds(say: Say, tmp_path: Path) -> None:
    """One sample is printed as it is generated, several in order; the prompt is an argument or a file."""
    (tmp_path / "p.txt").write_bytes(PROMPT.encode())
    for seed in ("1", "2", "3"):
        words = (*SHORT, "--seed", seed)
        (sample,) = json.loads(say("--prompt", PROMPT, *words, "--json")[1])["samples"]
        status, printed, complaint = say("--prompt-file", str(tmp_path / "p.txt"), *words)
        assert (status, complaint) == (0, "")
        assert printed == sample["text"] + "\n" * (not sample["text"].endswith("\n"))
    words = ("--prompt", PROMPT, *SHORT, "--n", "3")
    samples = json.loads(say(*words, "--json")[1])["samples"]
    printed = say(*words)[1]
    assert [line for line in printed.splitlines() if line.startswith("--- ")] == [
        f"--- {number} of 3: {len(one['token_ids'])} tokens, ended: "
        + (f"at {one['stop']}" if one["stop"] else {"eos": "end of text", "length": "--max-new-tokens"}[one["finish"]])
        for number, one in enumerate(samples, 1)
    ]
    assert all(one["text"] in printed for one in samples)


def test_a_message_goes_through_the_chat_template(say: Say, tiny_model_folder: Path, tiny_tokenizer: Tokenizer) -> None:
    status, _, complaint = say("--prompt", "Who?", "--chat")
    assert status == 2 and complaint.endswith("the model has no chat template; leave out --chat\n")
    (tiny_model_folder / "chat_template.jinja").write_text(CHAT)
    found = json.loads(say("--prompt", "Who?", "--chat", "--max-new-tokens", "1", "--json")[1])
    assert found["prompt_ids"] == tiny_tokenizer.encode_template("<|im_start|>Who?<|im_end|>")
    # The typed text is plain text in both forms and ends no message.
    for more in ((), ("--chat",)):
        found = json.loads(say("--prompt", "<|im_end|>", "--max-new-tokens", "1", "--json", *more)[1])
        assert found["prompt_ids"].count(tiny_tokenizer.added_tokens["<|im_end|>"]) == len(more)


def force(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Set the next tokens that are sampled."""
    queue = list(ids)
    monkeypatch.setattr(
        sampling, "sample", lambda logits_BV, *_: (torch.tensor([queue.pop(0)]), torch.zeros(len(logits_BV)))
    )


@pytest.mark.parametrize(
    ("stop", "text"), [((), "naïve ☃ 🎈<answer>\ufffd"), (("☃",), "naïve ☃"), (("<an", "zz"), "naïve ☃ 🎈<an")]
)
def test_a_stream_is_cut_between_characters(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], text: str
) -> None:
    """One token per byte, a tag directly before the text after a stop, and an incomplete last character."""
    ids = tiny_tokenizer.byte_ids("naïve ☃ 🎈".encode()) + tiny_tokenizer.encode("<answer>")
    ids += tiny_tokenizer.byte_ids(b"\xe2\x98")
    request = GenerateRequest(prompt_text="x", max_new_tokens=len(ids), stop=stop)
    generator = Generator(tiny_policy, tiny_tokenizer)
    force(monkeypatch, ids)
    ((sample,),) = generator.generate([request])
    force(monkeypatch, ids)
    pieces = list(stream_text(generator, request))
    assert "".join(pieces) == sample.text == text
    assert all(pieces) and not any("\ufffd" in piece for piece in pieces[:-1])
    assert len(stop) < 2 or sample.trailing == b"swer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", "a", "--prompt-file", "b"), "expected either --prompt or --prompt-file, got both"),
        (("--prompt", ""), "thresher: --prompt: the prompt is empty; give the text"),
        (("--prompt-file", "empty.txt"), "thresher: --prompt-file empty.txt: the prompt is empty"),
        (("--prompt-file", "latin.txt"), "thresher: --prompt-file latin.txt: not valid UTF-8 at byte 1; convert"),
        (("--prompt", "ab " * 2000), "leaves no room in the model's context of 2048; shorten it"),
        (("--prompt", "a", "--n", "0"), "--n: expected a whole number from 1 to 65,536, got 0"),
        (("--prompt", "a", "--top-p", "0"), "--top-p: expected a number from 1e-30 to 1, got 0"),
        (("--prompt", "a", "--min-p", "nan"), "--min-p: expected a number from 0 to 1, got nan"),
        (("--prompt", "a", "--stop", ""), "--stop: expected a string that is not empty"),
        (("--prompt", "a", "--dtype", "float16"), "--dtype: expected float32 or bfloat16, got float16"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_its_flag(
    say: Say, words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_bytes(b"")
    Path("latin.txt").write_bytes(b"n\xe9e")
    status, printed, complaint = say(*words)
    assert status == 2 and printed == "" and message in complaint
    assert complaint.count("\n") == 1
    assert "request 0" not in complaint
