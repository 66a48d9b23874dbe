"""Tokenizers in the form of other families' files, made here: pre-tokenizer, post-processor, control tokens, template.

Only the form is taken from published files; BPE is trained on the tests' own texts.
"""

import json
from pathlib import Path
from typing import Any

TEXTS = [
    "Who wrote the zoo's long guide?",
    "12345 letters, 1 2 34 567 of them.\n\nThe End",
    "who wrote who",
    " the the the",
]
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
# The control flow of Llama 3.1's and 3.2's, in other words: a date from the caller, the clock, or a constant.
LLAMA_TEMPLATE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2020" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set first = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nDate: " + date_string + "\\n" + first + "<|eot_id|>" }}
{%- if tools is not none %}{{- raise_exception("no tools here") }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
R1_TOKENS = ("<｜begin｜>", "<｜end｜>", "<｜User｜>", "<｜Assistant｜>", "<think>")
R1_TEMPLATE = """{{- bos_token }}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' %}
    {%- set content = message['content'] %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
    {{- '<｜Assistant｜>' + content + '<｜end｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""
QWEN3_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# The control flow of Qwen3's: the message from which thoughts are kept, and a switch that omits them.
QWEN3_TEMPLATE = """{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string
        and not (message.content.startswith('<x>') and message.content.endswith('</x>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {%- set content = '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def _table(words: str, controls: tuple[str, ...]) -> dict[str, Any]:
    """Return a tokenizer.json: byte-level BPE with these control tokens after its vocabulary."""
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    table: dict[str, Any] = json.loads(model.to_str())
    first = len(table["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    table["added_tokens"] = [{"id": first + at, "content": content, **flags} for at, content in enumerate(controls)]
    return table


def _write(folder: Path, table: dict[str, Any], settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _begins_with(begin: str, token: int) -> dict[str, Any]:
    """Return the post-processor that puts the control token `begin` before a text."""
    one, first, second = (
        {"SpecialToken": {"id": begin, "type_id": 0}},
        *({"Sequence": {"id": text, "type_id": number}} for number, text in enumerate("AB")),
    )
    return {
        "type": "TemplateProcessing",
        "single": [one, first],
        "pair": [one, first, second],
        "special_tokens": {begin: {"id": begin, "ids": [token], "tokens": [begin]}},
    }


def write_llama_tokenizer(folder: Path) -> Path:
    """Write Llama 3's: numbers split in threes, whole words looked up before merges, a post-processor that prepends the
    begin of text. " zoology" is a token that no merges make."""
    table = _table(LLAMA_WORDS, ())
    table["model"]["ignore_merges"] = True
    table["model"]["vocab"]["Ġzoology"] = len(table["model"]["vocab"])
    first = len(table["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    table["added_tokens"] = [{"id": first + at, "content": content, **flags} for at, content in enumerate(LLAMA_TOKENS)]
    begin = LLAMA_TOKENS[0]
    letters = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    table["post_processor"] = {"type": "Sequence", "processors": [letters, _begins_with(begin, first)]}
    settings = {"bos_token": begin, "eos_token": "<|eot_id|>", "chat_template": LLAMA_TEMPLATE}
    return _write(folder, table, settings)


def write_r1_tokenizer(folder: Path) -> Path:
    """Write R1-Distill-Qwen's: words split as by Qwen2; the begin of text set in both of its files."""
    table = _table(LLAMA_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"), R1_TOKENS)
    table["post_processor"] = _begins_with(R1_TOKENS[0], table["added_tokens"][0]["id"])
    begin, end = ({"__type": "AddedToken", "content": content} for content in R1_TOKENS[:2])
    settings = {"add_bos_token": True, "add_eos_token": False, "bos_token": begin, "eos_token": end}
    return _write(folder, table, settings | {"chat_template": R1_TEMPLATE})


def write_qwen35_tokenizer(folder: Path) -> Path:
    """Write Qwen3.5's: Qwen3's, whose words include combining marks as letters."""
    letters = LLAMA_WORDS.replace(r"\p{N}{1,3}", r"\p{N}").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
    table = _table(letters.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"), QWEN3_TOKENS)
    table["normalizer"] = {"type": "NFC"}
    settings = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _write(folder, table, settings | {"chat_template": QWEN3_TEMPLATE})


def write_qwen3_tokenizer(folder: Path) -> Path:
    """Write Qwen3's: Qwen2's with more control tokens and a template that handles thoughts; nothing before a text."""
    table = _table(LLAMA_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"), QWEN3_TOKENS)
    table["normalizer"] = {"type": "NFC"}
    settings = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _write(folder, table, settings | {"chat_template": QWEN3_TEMPLATE})
