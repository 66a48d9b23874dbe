"""`thresher generate`: one look at a model: a prompt, and what it writes. The work is engine/decoding's.

    thresher generate --model FOLDER --prompt "Question: " --stop "</answer>"

One sample is shown while it is drawn; several, or the JSON of any number, when all have ended. On a terminal the
text's control characters are shown as signs; a file, a pipe and the JSON get the text as it is.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

if TYPE_CHECKING:
    from thresher.engine.decoding.generator import GenerateRequest, GenerateResult, Generator
    from thresher.policy.tokenizer import Tokenizer

HELP = "one look at a model: what it writes after a prompt"
PLACE = 32
EXAMPLE = 'thresher generate --model models/warm --prompt "Who is the mayor?" --chat'

ENDS = {"eos": "end of text", "length": "--max-new-tokens", "context": "the model's context is full"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="model folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="plain text: no control token can come of it")
    what.add_argument("--prompt-file", metavar="F", help="the same from a file, every byte of it")
    add("--chat", action="store_true", help="a user's message, through the model's chat template")
    add("--max-new-tokens", type=flags.count, default=256, metavar="N", help="default 256")
    add("--stop", type=stop, nargs="+", action="extend", default=[], metavar="S", help="strings that end a sample")
    add("--temperature", type=flags.temperature, default=1.0, help="0 is greedy; default 1")
    add("--top-k", type=flags.natural, default=0, metavar="K", help="the K likeliest tokens; default 0: all")
    add("--top-p", type=flags.top_p, default=1.0, metavar="P", help="the likeliest up to a mass of P; default 1: all")
    add("--min-p", type=flags.min_p, default=0.0, metavar="P", help="those of P times the likeliest's, at least")
    add("--n", type=flags.samples, default=1, help="samples; default 1, shown while it is drawn")
    add("--seed", type=flags.seed, default=0, help="of the sampling")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where it is computed")


def stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a string that is not empty")
    text.encode("utf-8")  # argparse says what a ValueError means
    return text


def run(options: argparse.Namespace) -> None:
    where, text = _prompt(options)
    generator = _load(options)
    request = _request(options, _prompt_ids(options, text, generator.tokenizer))
    try:
        if options.n == 1 and not options.json:
            _show_stream(generator, request)
            return
        (samples,) = generator.generate([request])
    except UserError as error:
        raise UserError(str(error).replace("request 0: its prompt", f"{where}: the prompt")) from None
    if options.json:
        console.answer({"prompt_ids": request.prompt_ids, "samples": [_record(sample) for sample in samples]})
        return
    for number, sample in enumerate(samples, 1):
        end = f"at {sample.stop}" if sample.stop is not None else ENDS[sample.finish]
        console.say(f"--- {number} of {options.n}: {len(sample.token_ids)} tokens, ended: {end}")
        console.say(sample.text, exact=True)


def _prompt(options: argparse.Namespace) -> tuple[str, str]:
    """The flag that gave the text, and the text."""
    where, text = "--prompt", options.prompt
    if text is None:
        from thresher.common.files import MOST_TEXT, decode_text, read_bytes

        where = f"--prompt-file {options.prompt_file}"
        text = decode_text(read_bytes(options.prompt_file, MOST_TEXT, stream=True), where)
    if not text:
        raise UserError(f"{where}: the prompt is empty; give the text that the model is to go on from")
    return where, text


def _load(options: argparse.Namespace) -> "Generator":
    import torch

    from thresher.engine.assemble import DTYPES, check_fit, fit_doubts
    from thresher.engine.decoding.generator import Generator
    from thresher.policy.model import load_policy
    from thresher.policy.tokenizer import load_tokenizer

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch sees no CUDA device; leave it out")
    tokenizer = load_tokenizer(options.model)
    policy = load_policy(options.model, DTYPES[options.dtype], options.device)
    check_fit(policy, tokenizer, options.model)
    if doubts := fit_doubts(policy, tokenizer, options.model):
        print(console.visible(doubts), file=sys.stderr)
    return Generator(policy, tokenizer, max_running=min(options.n, 256))


def _prompt_ids(options: argparse.Namespace, text: str, tokenizer: "Tokenizer") -> list[int]:
    if not options.chat:
        return [*tokenizer.begin_ids, *tokenizer.encode(text)]
    if tokenizer.chat_template is None:
        raise UserError(f"{options.model}: the model has no chat template; leave out --chat")
    from thresher.engine.episode import Prompt
    from thresher.engine.protocol.prompts import Renderer

    # As a chat prompt of a system: the template may emit control tokens, the message may not.
    renderer = Renderer(tokenizer=tokenizer, tags=(), k=1, chat=True, max_passage_tokens=0, passage_format="{text}")
    return renderer.prompt(Prompt("{question}", text))


def _request(options: argparse.Namespace, prompt_ids: list[int]) -> "GenerateRequest":
    from thresher.engine.decoding.generator import GenerateRequest

    return GenerateRequest(
        prompt_ids=prompt_ids,
        max_new_tokens=options.max_new_tokens,
        stop=tuple(dict.fromkeys(options.stop)),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        n=options.n,
        seed=options.seed,
    )


def _show_stream(generator: "Generator", request: "GenerateRequest") -> None:
    from thresher.engine.decoding.generator import stream_text

    last = "\n"
    for last in stream_text(generator, request):
        console.say(last, end="", exact=True)
    if not last.endswith("\n"):
        console.say("")


def _record(sample: "GenerateResult") -> dict[str, object]:
    return {
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "text": sample.text,
        "finish": sample.finish,
        "stop": sample.stop,
        "trailing": sample.trailing.decode("utf-8", "replace"),
        "prefill_tokens_computed": sample.prefill_tokens_computed,
    }
