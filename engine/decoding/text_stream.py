"""What one sample writes, as text, while it is drawn.

    bytes of a token -> those up to a stop's last byte -> whole characters

A token may end in the middle of a character: its bytes wait for the rest. What is no UTF-8 becomes U+FFFD, so that all
pieces together are `GenerateResult.text`.
"""

import codecs
from collections.abc import Iterator
from dataclasses import replace

from thresher.engine.decoding.generator import GenerateRequest, Generator
from thresher.engine.decoding.stop_tags import TagMatcher


def stream_text(generator: Generator, request: GenerateRequest) -> Iterator[str]:
    """The text of the request's first sample, piece by piece, none of them empty. UserError as `Generator.generate`."""
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
