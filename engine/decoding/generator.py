"""Generate text from prompts, without a recipe or an episode.

    generator = Generator(load_policy(folder), load_tokenizer(folder))
    (results,) = generator.generate([GenerateRequest(prompt_text="2 + 2 =", n=4)])

Every request is checked before anything runs. A result does not depend on the other requests (decoder.py says where
this holds bit for bit). Keys and values are kept for one call, so the weights may change between two calls.
"""

import codecs
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, TypeVar

from thresher.common.errors import LARGEST_INT, UserError, as_whole, is_unicode, shown
from thresher.engine.config.sampling import BOUNDS, MOST_SAMPLES, checked
from thresher.engine.decoding.decoder import DecodeClock, Decoder, ring_of, states_bytes
from thresher.engine.decoding.decoder_cuda import free_memory, make_decoder, memory_left
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.engine.decoding.speculative import MOST, Speculate
from thresher.engine.decoding.stop_tags import TagMatcher
from thresher.kernels.attention.backends.choice import Choice
from thresher.policy.model import Policy, attention_backend
from thresher.policy.tokenizer import Tokenizer

Finish = Literal["stop", "eos", "length", "context"]
T = TypeVar("T")

BLOCK = 64  # slots of a block
CPU_SHARE = 0.5  # largest share of the memory for keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, and the settings with which `n` samples of it are drawn.

    The prompt is given as ids, as plain text, or as messages for the model's chat template. Control tokens in plain
    text are encoded as ordinary characters, and the ids that the model expects before a text, such as Llama 3's begin
    of text, are prepended. stop: strings at which a sample ends, found in its bytes however they are split into tokens.
    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 exclude no token. seed: the noise of sample j is a function of
    (seed, j) alone, so two requests with the same seed share their noise, in any Generator and any call. None, the
    default: the noise is a function of (r, j), where r is the request's number, counted from 0 over all requests of
    this Generator. Every request and every call then has its own noise, and a program that is run again draws the same
    samples.
    """

    prompt_ids: Sequence[int] | None = None
    prompt_text: str | None = None
    prompt_messages: Sequence[Mapping[str, Any]] | None = None
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """One sample.

    token_ids: all drawn ids, including those of the stop or of the end of text; logprobs: of each id, under the
    distribution that it was drawn from (greedy: at temperature 1). text: the text up to the stop's last byte, without
    the end of text. finish: "stop", "eos", "length" (max_new_tokens) or "context" (the model's context is full). stop:
    the string that ended it; trailing: bytes of its last token after the stop. prefill_tokens_computed: tokens
    prefilled for it; a token that several samples share counts once, at the first. drafted: drafts of its tokens that
    were fed; accepted: those that were accepted.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish: Finish
    stop: str | None
    trailing: bytes
    prefill_tokens_computed: int
    drafted: int
    accepted: int


class Generator:
    """Generator of samples from one policy.

    kv_tokens: tokens whose keys and values are held at once; None: as many as a call can use, up to half of the memory.
    When they are full, the youngest sequences wait. max_running: number of samples that are decoded at once. attention:
    attention backend, "auto", "torch", "triton", "flash" or "xformers" (kernels/attention/backends/choice.py).
    speculate: drafts of a sample that are verified in one forward, 0 to 8; "auto": where they pay (speculative.py).
    share_prefix: whether attention to a prefix that several samples share is computed once, or for each of them.
    Neither of the last two changes a result.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        kv_tokens: int | None = None,
        max_running: int = 256,
        attention: Choice = "auto",
        speculate: Speculate = "auto",
        share_prefix: bool = True,
    ) -> None:
        for name, given, kind in (("policy", policy, Policy), ("tokenizer", tokenizer, Tokenizer)):
            if not isinstance(given, kind):
                raise UserError(f"{name} is {shown(given)}; expected what thresher.policy.load_{name} returns")
        for name, value, most in (("kv_tokens", kv_tokens, LARGEST_INT), ("max_running", max_running, MOST_SAMPLES)):
            whole = as_whole(value)
            if not (value is None and name == "kv_tokens") and (whole is None or not 1 <= whole <= most):
                raise UserError(f"{name} is {shown(value)}; expected a whole number from 1 to {most:,}")
        if not isinstance(share_prefix, bool):
            raise UserError(f"share_prefix is {shown(share_prefix)}; expected True or False")
        self.attention = attention_backend(policy, attention, "rollout")
        drafts = as_whole(speculate)
        if speculate != "auto" and (drafts is None or not 0 <= drafts <= MOST):
            raise UserError(f'speculate is {shown(speculate)}; expected "auto" or 0 to {MOST}')
        self.policy, self.tokenizer, self.speculate = policy, tokenizer, speculate
        self.kv_tokens, self.max_running, self.share_prefix = kv_tokens, max_running, share_prefix
        self.context = policy.config.max_position_embeddings
        self.clock = DecodeClock()
        self._decoder: Decoder | None = None
        self._requests = 0  # number of requests so far

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[GenerateResult]]:
        """Return the samples of every request, in order. UserError, which names the request, before anything runs."""
        started = time.perf_counter()
        decoder, asked = self._begin(requests)
        while not decoder.idle:
            for sequence in decoder.step():
                decoder.release(sequence)
        self.clock.total = time.perf_counter() - started
        return [[self._result(request, sequence) for sequence in sequences] for request, sequences in asked]

    def stream(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[int, int, list[int], bytes]]:
        """Yield (request, sample, new ids, their bytes) as they are drawn; the end of text has no bytes."""
        decoder, asked = self._begin(requests)
        names = {
            sequence: (number, sample)
            for number, (_, sequences) in enumerate(asked)
            for sample, sequence in enumerate(sequences)
        }
        eos = frozenset(self.policy.config.eos_token_ids)
        while not decoder.idle:
            ended = decoder.step()
            for sequence, ids in decoder.new_ids():
                yield (*names[sequence], ids, self.tokenizer.decode_bytes(token for token in ids if token not in eos))
            for sequence in ended:
                decoder.release(sequence)

    # --- From requests to sequences

    def _begin(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[Decoder, list[tuple[GenerateRequest, list[TokenSequence]]]]:
        """Return a decoder in which the samples of every request wait, and the samples of each request."""
        requests = _checked_requests(requests)
        prompts = [self._prompt(number, request) for number, request in enumerate(requests)]
        asked = list(zip(requests, prompts, strict=True))
        most = [min(len(ids) + request.max_new_tokens, self.context) for request, ids in asked]
        decoder = self._decoder_for([most[number] for number, request in enumerate(requests) for _ in range(request.n)])
        held = (decoder.num_blocks - 1) * BLOCK
        for number, (request, ids) in enumerate(asked):
            if most[number] > held:
                raise UserError(
                    f"request {number}: its prompt of {len(ids)} tokens and up to {request.max_new_tokens} new ones do "
                    f"not fit into the {held} tokens of the KV cache; raise kv_tokens or lower max_new_tokens"
                )
        self.clock = DecodeClock()
        decoder.begin(max(most, default=1), self.clock)
        begun = []
        for number, (request, ids) in enumerate(asked):
            draw = SamplingParams(request.temperature, request.top_k, request.top_p, request.min_p)
            prompt = SharedPrompt(ids)
            noise = f"request {self._requests + number}" if request.seed is None else str(request.seed)
            samples = [TokenSequence(prompt, _seed(noise, j), draw, most=most[number]) for j in range(request.n)]
            for sequence in samples:
                decoder.begin_turn(sequence, request.stop, most[number] - len(ids))
            begun.append((request, samples))
        self._requests += len(requests)
        return decoder, begun

    def _decoder_for(self, lengths: Sequence[int]) -> Decoder:
        """Return a decoder for sequences of these lengths: that of the last call, if its cache is large enough."""
        running = self._running(len(lengths))
        if self.kv_tokens is not None:
            blocks = self.kv_tokens // BLOCK
            if self.policy.device.type == "cpu" and blocks > (held := int(self._affordable() / CPU_SHARE)):
                raise UserError(
                    f"kv_tokens is {self.kv_tokens:,}, and the memory holds {held * BLOCK:,} at most; lower it"
                )
        else:
            blocks = sum(-(-length // BLOCK) for length in sorted(lengths)[-self.max_running :])
            blocks = max(min(blocks, self._affordable()), 1)
        if self._decoder is None or self._decoder.num_blocks < 1 + blocks or self._decoder.max_running < running:
            self._decoder = make_decoder(
                self.policy,
                self.tokenizer,
                self.attention,
                num_blocks=1 + max(blocks, 1),
                block_size=BLOCK,
                max_running=running,
                share_prefix=self.share_prefix,
                speculate=self.speculate,
            )
        return self._decoder

    def _running(self, samples: int) -> int:
        """Return the number of slots of a decoder. If slots have states, it is the power of two that holds `samples`,
        at most max_running. UserError if the states do not fit into memory."""
        config, cuda = self.policy.config, self.policy.device.type == "cuda"
        if not config.delta_layers:
            return self.max_running
        running = min(1 << max(samples - 1, 1).bit_length(), self.max_running)
        if self._decoder is not None and self._decoder.max_running >= running:
            return running
        needed = states_bytes(config, self.policy.dtype.itemsize, running, ring_of(bool(self.speculate), cuda))
        if needed > free_memory(self.policy.device):
            raise UserError(
                f"the states of {running} samples at once take {needed / 2**30:.3g} GiB, and "
                f"{memory_left(self.policy.device)}; lower max_running"
            )
        return running

    def _affordable(self) -> int:
        memory = free_memory(self.policy.device)
        a_block = PagedKV.bytes_needed(self.policy.config, 1, BLOCK, self.policy.dtype.itemsize)
        return int(CPU_SHARE * memory) // max(a_block, 1)

    def _prompt(self, number: int, request: GenerateRequest) -> list[int]:
        where = f"request {number}"
        given = [x for x in (request.prompt_ids, request.prompt_text, request.prompt_messages) if x is not None]
        if len(given) != 1:
            raise UserError(f"{where}: expected one of prompt_ids, prompt_text and prompt_messages, got {len(given)}")
        if request.prompt_ids is not None:
            ids = _checked_list(where, "prompt_ids", request.prompt_ids, "a list of whole numbers", as_whole)
        elif request.prompt_text is not None:
            if not isinstance(request.prompt_text, str) or not is_unicode(request.prompt_text):
                raise UserError(
                    f"{where}: prompt_text is {shown(request.prompt_text)}; expected text that UTF-8 encodes"
                )
            ids = [*self.tokenizer.begin_ids, *self.tokenizer.encode(request.prompt_text)]
        else:
            expected = 'a list of messages such as {"role": "user", "content": "text"}'
            messages = _checked_list(where, "prompt_messages", request.prompt_messages, expected, _message)
            for message in messages:
                parts = message.get("content")
                for part in parts if isinstance(parts, list) else ():
                    if not isinstance(part, Mapping) or part.get("type") != "text":
                        raise UserError(
                            f"{where}: a message's content has the part {shown(part)}; expected text, because images "
                            "are not read"
                        )
            if not messages:
                raise UserError(f"{where}: prompt_messages is empty; give at least one message")
            ids = self.tokenizer.encode_template(self.tokenizer.render_chat(messages))
        wrong = [token for token in ids if not 0 <= token < self.tokenizer.vocab_size]
        if not ids or wrong:
            found = f"token {shown(wrong[0])} in its prompt" if wrong else "an empty prompt"
            raise UserError(f"{where}: {found}; expected at least one id of 0 .. {self.tokenizer.vocab_size - 1}")
        if len(ids) >= self.context:
            raise UserError(
                f"{where}: its prompt of {len(ids)} tokens leaves no room in the model's context of {self.context}; "
                "shorten it"
            )
        return ids

    def _result(self, request: GenerateRequest, sequence: TokenSequence) -> GenerateResult:
        ids, hit = sequence.turn_ids, sequence.hit
        finish: Finish = "stop" if hit is not None else "eos"
        if sequence.finish == "length":
            finish = "length" if len(ids) >= request.max_new_tokens else "context"
        trailing = hit.trailing if hit is not None else b""
        written = self.tokenizer.decode_bytes(ids[:-1] if finish == "eos" else ids)
        return GenerateResult(
            token_ids=ids,
            logprobs=sequence.logprobs,
            text=written[: len(written) - len(trailing)].decode("utf-8", "replace"),
            finish=finish,
            stop=hit.tag if hit is not None else None,
            trailing=trailing,
            prefill_tokens_computed=sequence.prefilled,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
        )


def _checked_requests(requests: Iterable[GenerateRequest]) -> list[GenerateRequest]:
    """Return the requests with numbers and stops checked and converted. `Generator._prompt` checks the prompts."""
    if isinstance(requests, str | bytes) or not isinstance(requests, Iterable):
        raise UserError(f"requests is {shown(requests)}; expected a list of GenerateRequest")
    found = []
    for number, request in enumerate(requests):
        where = f"request {number}"
        if not isinstance(request, GenerateRequest):
            raise UserError(f"{where} is {shown(request)}; expected a GenerateRequest")
        names = [name for name in BOUNDS if name != "seed" or request.seed is not None]
        values: dict[str, Any] = {name: checked(where, name, getattr(request, name)) for name in names}
        stop = _checked_list(where, "stop", request.stop, "a tuple of strings, none empty, that UTF-8 encodes", _stop)
        if len(set(stop)) < len(stop):
            raise UserError(f"{where}: stop has a string twice; give each once")
        found.append(replace(request, stop=tuple(stop), **values))
    return found


def _checked_list(where: str, name: str, values: object, expected: str, convert: Callable[[Any], T | None]) -> list[T]:
    """Return the converted entries of a list. UserError if it is no list, or if `convert` returns None."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{where}: {name} is {shown(values)}; expected {expected}")
    found = []
    for value in values:
        entry = convert(value)
        if entry is None:
            raise UserError(f"{where}: {name} contains {shown(value)}; expected {expected}")
        found.append(entry)
    return found


def _message(value: object) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else None


def _stop(value: object) -> str | None:
    return value if isinstance(value, str) and value and is_unicode(value) else None


def _seed(noise: str, sample: int) -> int:
    return int.from_bytes(blake2b(f"{noise} {sample}".encode(), digest_size=8).digest()) >> 1


def stream_text(generator: Generator, request: GenerateRequest) -> Iterator[str]:
    """Yield the text of the request's first sample in non-empty pieces. UserError as in `Generator.generate`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    matcher = TagMatcher(generator.tokenizer, request.stop) if request.stop else None
    state = 0 if matcher is None else matcher.start()
    for _, _, ids, data in generator.stream([replace(request, n=1)]):
        if matcher is not None:
            for token in ids:
                state, hit = matcher.step(state, token)
                data = data if hit is None else data[: len(data) - len(hit.trailing)]
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
