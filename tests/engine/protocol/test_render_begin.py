"""The tokens that a model expects before a prompt: once, whichever code renders it, and with the ids of
transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_cases import make_config
from tokenizer_cases import LLAMA_TOKENS, write_llama_tokenizer, write_qwen3_tokenizer, write_r1_tokenizer

from thresher.cli.commands.answering import prompt_ids
from thresher.engine.decoding.generator import GenerateRequest, Generator
from thresher.engine.episode import Prompt
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.training.sft import encode_transcript
from thresher.policy.model import init_policy
from thresher.policy.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "Answer it.\nQuestion: {question}\n"
ASKED = TEMPLATE.replace("{question}", "Who wrote it?")
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_llama_tokenizer,
    "r1": write_r1_tokenizer,
    "qwen3": write_qwen3_tokenizer,
}


def make(tokenizer: Tokenizer, chat: bool = False) -> Renderer:
    return Renderer(tokenizer=tokenizer, tags=(), k=1, chat=chat, max_passage_tokens=99, passage_format="{text}")


@pytest.mark.parametrize("name", MAKERS)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = MAKERS[name](tmp_path)
    tokenizer, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    prompt = Prompt(TEMPLATE, "Who wrote it?")
    assert make(tokenizer).prompt(prompt) == theirs(ASKED).input_ids
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": ASKED}], add_generation_prompt=True, date_string="1 Jan 2020", tokenize=False
    )
    ids = make(tokenizer, chat=True).prompt(prompt)
    assert ids == theirs(chat, add_special_tokens=False).input_ids
    assert all(ids.count(token) == 1 for token in tokenizer.begin_ids)


def test_a_template_that_begins_the_text_itself_is_left_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_llama_tokenizer(tmp_path))
    begun = make(tokenizer).prompt(Prompt(LLAMA_TOKENS[0] + TEMPLATE, "Who wrote it?"))
    assert begun == make(tokenizer).prompt(Prompt(TEMPLATE, "Who wrote it?"))
    # Only a template can do this: in a question it is text.
    asked = make(tokenizer).prompt(Prompt("{question}", LLAMA_TOKENS[0]))
    assert asked[:1] == list(tokenizer.begin_ids) and asked.count(asked[0]) == 1 and len(asked) > 2


@pytest.mark.parametrize("chat", [False, True])
def test_transcripts_begin_as_prompts_do(chat: bool, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_llama_tokenizer(tmp_path))
    begin = list(tokenizer.begin_ids)

    def ids(prompt: str) -> list[int]:
        segments: list[dict[str, Any]] = [{"source": "prompt", "text": prompt}, {"source": "policy", "text": "the zoo"}]
        found = encode_transcript({"segments": segments}, tokenizer, make(tokenizer, chat), "{question}")
        assert [found.ids[row] for row in found.positions] == tokenizer.encode("the zoo")
        return found.ids

    plain = tokenizer.encode("Who?") + tokenizer.encode("the zoo")
    assert ids("Who?") == (plain if chat else begin + plain), "a chat's prompt has what its template wrote"
    assert ids(LLAMA_TOKENS[0] + "Who?") == begin + plain
    with pytest.raises(TypeError):  # read_transcripts names the line
        encode_transcript({"segments": [{"source": "prompt", "text": 3}]}, tokenizer, make(tokenizer), "{question}")
    asked = {"question": "Who?", "segments": [{"source": "policy", "text": "the zoo"}]}
    if not chat:
        assert encode_transcript(asked, tokenizer, make(tokenizer), "{question}").ids == begin + plain


def test_text_for_the_generator_begins_so_too(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_llama_tokenizer(tmp_path))
    policy = init_policy(make_config(vocab_size=tokenizer.vocab_size), 0)
    begin = list(tokenizer.begin_ids)

    def drawn(**prompt: Any) -> list[float]:
        requests = [GenerateRequest(**prompt, max_new_tokens=3)]
        return Generator(policy, tokenizer).generate(requests)[0][0].logprobs

    assert drawn(prompt_text="Who?") == drawn(prompt_ids=begin + tokenizer.encode("Who?"))
    assert drawn(prompt_text="Who?") != drawn(prompt_ids=tokenizer.encode("Who?"))
    assert prompt_ids("Who?", tokenizer, False, "m") == begin + tokenizer.encode("Who?")
