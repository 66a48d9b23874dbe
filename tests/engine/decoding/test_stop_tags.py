"""Stop tags in token ids, against plain substring search over bytes: on toy vocabularies built to glue and split tags
in every way, and on 100,000 streams over Qwen's. The bank of many stop sets, against one matcher per set."""

import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.decoding.batch_state import StopTables
from thresher.engine.decoding.stop_tags import Hit, TagMatcher
from thresher.rewards import UserError, tag_strings


class Toy:
    """A tokenizer given by its list of tokens."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def searched(tokens: list[bytes], tags: list[bytes]) -> dict[int, tuple[bytes, bytes]]:
    """Return, for each token (by place) in which a tag ends, the first such tag and the token's bytes after it."""
    text = b"".join(tokens)
    found = []
    for tag in tags:
        begin = text.find(tag)
        while begin >= 0:
            found.append((begin + len(tag), -len(tag), tag))
            begin = text.find(tag, begin + 1)
    hits: dict[int, tuple[bytes, bytes]] = {}
    ends = list(accumulate(map(len, tokens))) if found else []
    for end, _, tag in sorted(found):
        place = bisect_left(ends, end)
        hits.setdefault(place, (tag, tokens[place][len(tokens[place]) - (ends[place] - end) :]))
    return hits


def stepped(matcher: TagMatcher, ids: list[int]) -> dict[int, tuple[bytes, bytes]]:
    state, hits = matcher.start(), {}
    for place, token_id in enumerate(ids):
        state, hit = matcher.step(state, token_id)
        if hit is not None:
            hits[place] = (hit.tag.encode(), hit.trailing)
    return hits


def test_a_stream_that_bytes_open_finds_a_tag_that_began_in_them() -> None:
    matcher = TagMatcher(Toy([b"s>", b"x"]), ["</s>"])
    for lead, expected in ((b"", None), (b"</", Hit("</s>", b"")), (b"<</", Hit("</s>", b"")), (b"</x", None)):
        assert matcher.step(matcher.start(lead), 0)[1] == expected


TABLE = [
    # case, tokens in order, tags, hits as place -> (tag, trailing)
    ("whole", [b"</s>"], ["</s>"], {0: ("</s>", b"")}),
    ("byte by byte", [b"<", b"/", b"s", b">"], ["</s>"], {3: ("</s>", b"")}),
    ("bytes before and behind", [b"x</", b"s>\n"], ["</s>"], {1: ("</s>", b"\n")}),
    ("two tags in one token", [b"</s></a>!"], ["</a>", "</s>"], {0: ("</s>", b"</a>!")}),
    ("the same tag twice", [b"</s></s>"], ["</s>"], {0: ("</s>", b"</s>")}),
    ("glued, then the rest", [b"</s", b"></", b"a", b">"], ["</s>", "</a>"], {1: ("</s>", b"</"), 3: ("</a>", b"")}),
    ("a false start", [b"</", b"</s", b">"], ["</s>"], {2: ("</s>", b"")}),
    ("a head of its own", [b"<<", b"<s>"], ["<s>"], {1: ("<s>", b"")}),
    ("broken off", [b"</s", b"x", b">"], ["</s>"], {}),
    ("nothing between", [b"</s", b"", b"", b">"], ["</s>"], {3: ("</s>", b"")}),
    ("same end, the longer", [b"</s>"], ["s>", "</s>", "/s>"], {0: ("</s>", b"")}),
    ("one inside another", [b"<abc>"], ["<abc>", "b"], {0: ("b", b"c>")}),
    ("overlapping", [b"aa", b"a"], ["aa"], {0: ("aa", b""), 1: ("aa", b"")}),
    ("ends first beats begins first", [b"xabcd"], ["abcd", "bc"], {0: ("bc", b"d")}),
    ("upper case", [b"</S>"], ["</s>"], {}),
    ("inner space", [b"</", b" s>"], ["</s>"], {}),
    ("inside a character", ["ü".encode()[:1], "ü".encode()[1:] + b">"], ["ü>"], {1: ("ü>", b"")}),
    ("any byte", [b"\xff\x00<", b"s>\xfe"], ["<s>"], {1: ("<s>", b"\xfe")}),
]


@pytest.mark.parametrize(("tokens", "tags", "hits"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_by_hand(tokens: list[bytes], tags: list[str], hits: dict[int, tuple[str, bytes]]) -> None:
    expected = {place: (tag.encode(), trailing) for place, (tag, trailing) in hits.items()}
    assert stepped(TagMatcher(Toy(tokens), tags), list(range(len(tokens)))) == expected
    assert searched(tokens, [tag.encode() for tag in tags]) == expected


def test_after_a_hit_the_state_is_that_after_the_whole_token() -> None:
    matcher = TagMatcher(Toy([b"</s></", b"s>", b"</"]), ["</s>"])
    state, hit = matcher.step(matcher.start(), 0)
    assert hit == Hit("</s>", b"</")
    assert state == matcher.step(matcher.start(), 2)[0] != matcher.start()
    assert matcher.step(state, 1) == (matcher.states - 1, Hit("</s>", b""))


BYTES = st.text(alphabet="<>/ab", max_size=6).map(str.encode)
TAG = st.text(alphabet="<>/ab", min_size=1, max_size=5)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(
    st.lists(BYTES, min_size=1, max_size=12),
    st.lists(TAG, min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_any_vocabulary_any_tags_any_stream(tokens: list[bytes], tags: list[str], numbers: list[int]) -> None:
    matcher = TagMatcher(Toy(tokens), tags)
    ids = [number % len(tokens) for number in numbers]
    hits = searched([tokens[i] for i in ids], [tag.encode() for tag in tags])
    assert stepped(matcher, ids) == hits
    states = np.zeros(3, np.int64)
    for place, token_id in enumerate(ids):
        states, codes = matcher.step_many(states, np.full(3, token_id))
        for code in codes:
            hit = matcher.hit(int(code), token_id)
            assert (None if hit is None else (hit.tag.encode(), hit.trailing)) == hits.get(place)


def assert_bank_equals_matchers(tokens: list[bytes], sets: list[tuple[str, ...]], ids: np.ndarray) -> None:
    """Check that each set of the bank has the states and hits of its own matcher, and no state of another set. The sets
    are stepped together over ids [steps, sets]. Token 0 is the end of text."""
    toy, cpu = Toy(tokens), torch.device("cpu")
    bank = StopTables(toy, [0], cpu)  # type: ignore[arg-type]
    starts = [bank.start(stop) for stop in sets]
    assert starts == [bank.start(stop) for stop in sets]
    matchers = [TagMatcher(toy, stop) for stop in sets]
    states = torch.tensor(starts)
    expected = [matcher.start() for matcher in matchers]
    for ids_of_step in ids:
        states, codes = bank.advance(states, torch.from_numpy(ids_of_step))
        for place, (stop, matcher) in enumerate(zip(sets, matchers, strict=True)):
            token = int(ids_of_step[place])
            expected[place], hit = matcher.step(expected[place], token)
            assert int(states[place]) - starts[place] == expected[place], (place, stop)
            assert bank.hit(stop, int(codes[place]), token) == hit, (place, stop)
            assert (int(codes[place]) == 0) == (hit is None and token != 0)


STOP_SETS = st.lists(
    st.lists(
        st.one_of(TAG, st.builds(lambda tag, times: tag * times, TAG, st.integers(1, 60))),
        min_size=1,
        max_size=4,
        unique=True,
    ).map(tuple),
    min_size=1,
    max_size=8,
    unique=True,
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(BYTES, min_size=1, max_size=12), STOP_SETS, st.integers(0, 2**32 - 1))
def test_a_bank_of_any_stop_sets_finds_what_each_matcher_finds(
    tokens: list[bytes], sets: list[tuple[str, ...]], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    # Half of the streams spell a tag of their set, if the vocabulary has its bytes; the rest are random tokens.
    tokens = [b"", *tokens, *(bytes([byte]) for byte in b"<>/ab")]
    ids = draw.integers(0, len(tokens), (12, len(sets)))
    for place, stop in enumerate(sets[::2]):
        spelled = [tokens.index(bytes([byte]), 1) for byte in stop[0].encode()[-12:]]
        ids[: len(spelled), 2 * place] = spelled
    assert_bank_equals_matchers(tokens, sets, ids)


@pytest.mark.parametrize(
    "sets",
    [
        # A byte holds the first set's states, but not those of the second set after them.
        [("x" * 114,), ("DorDorDor9999",)],
        # NumPy refused to add so large a first state to a table of bytes.
        [(f"<{number}>" * 40,) for number in range(7)],
        # More states than two bytes hold, before and after.
        [("</answer>",), ("y" * 32_800,), ("</search>", "9" * 200), ("x" * 120,), ("</answer>", "</search>")],
    ],
    ids=["past 127", "past 255", "past 32,767"],
)
def test_a_bank_of_more_states_than_a_matcher_counts(sets: list[tuple[str, ...]]) -> None:
    tokens = [b"", *sorted({bytes([byte]) for stop in sets for tag in stop for byte in tag.encode()}), b"</", b">9"]
    spelled = [[tokens.index(bytes([byte]), 1) for byte in stop[0].encode()[:300]] for stop in sets]
    ids = np.zeros((max(map(len, spelled)), len(sets)), np.int64)
    for place, of_set in enumerate(spelled):
        ids[: len(of_set), place] = of_set
    assert_bank_equals_matchers(tokens, sets, ids)


def test_more_columns_and_codes_than_fit_a_byte() -> None:
    # Each token holds the tag at a different position, so each needs its own column and hit.
    tokens = [b"." * n + b"<s>" + b"," * (n % 3) for n in range(400)]
    matcher = TagMatcher(Toy(tokens), ["<s>"])
    ids = np.arange(400)
    _, codes = matcher.step_many(np.zeros(400, int), ids)
    assert len(set(codes.tolist())) == 400
    for code, token_id in zip(codes, ids, strict=True):
        assert matcher.hit(int(code), int(token_id)) == Hit("<s>", b"," * (token_id % 3))


def test_tags_that_cannot_be_matched_and_what_is_out_of_range_are_refused() -> None:
    refused: list[tuple[Any, str]] = [
        ([], "no tags"),
        ([""], "tag 0 is empty"),
        (["</a>", ""], "tag 1 is empty"),
        (["</a>", "</b>", "</a>"], "'</a>' is given twice"),
        ([b"</a>"], "tag 0 is b'</a>'"),
        ([None], "tag 0 is None"),
        ("</a>", r"write \['</a>'\]"),
    ]
    for tags, message in refused:
        with pytest.raises(UserError, match=message):
            TagMatcher(Toy([b"a"]), tags)
    matcher = TagMatcher(Toy([b"<", b"s>"]), ["<s>"])
    outside = [("token id", 0, token) for token in (-1, 2, 151_936)] + [("state", at, 0) for at in (-1, matcher.states)]
    for what, state, token in outside:
        message = f"{what} {token if what == 'token id' else state} is outside"
        with pytest.raises(ValueError, match=message):
            matcher.step(state, token)
        with pytest.raises(ValueError, match=message):
            matcher.step_many(np.array([0, state]), np.array([0, token]))
    with pytest.raises(ValueError, match="one state per id"):
        matcher.step_many(np.zeros(2, int), np.zeros(3, int))
    states, codes = matcher.step_many(np.zeros(0, int), np.zeros(0, int))
    assert states.shape == codes.shape == (0,)


def test_the_module_imports_no_torch() -> None:
    code = "import sys, thresher.engine; thresher.engine.TagMatcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> Toy:
    """Return Qwen2.5's real vocabulary as a list of bytes. The oracle reads the same table without the class under
    test."""
    from thresher.policy.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shared_data / "qwen2.5")
    toy = Toy([tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)])
    toy.encode = tokenizer.encode  # type: ignore[attr-defined]
    return toy


LOOP_TAGS = tag_strings("think", "search", "information", "evaluate", "summary", "answer")
# Tails of tags, a glued middle and a lone bracket: nearly every token hits, many at the same byte.
ODD_TAGS = ("</search>", "search>", "h>", "></", "</answer>", "</reason><extract>", "<", "er>\n", " </", "ans")


def adversarial_streams(qwen: Toy, tags: tuple[str, ...], count: int, length: int) -> np.ndarray:
    """Return ids [count, length] with tags that are whole, cut off, damaged or doubled. Their neighbours hold pieces of
    tags; each is spelled in one of the many ways that the vocabulary has; single tokens that hold pieces are added."""
    rng = np.random.default_rng(len(tags) * 1000 + length)
    ids = {token: i for i, token in enumerate(qwen.tokens)}
    marks = [i for i, token in enumerate(qwen.tokens) if b"<" in token or b">" in token]
    pieces = {piece.encode() for tag in tags for n in range(1, len(tag)) for piece in (tag[:n], tag[n:])}
    inner = [i for i, token in enumerate(qwen.tokens) if token in pieces]
    singles = np.concatenate([marks, inner * 10, rng.integers(0, qwen.vocab_size, len(marks))])

    def spelled(text: bytes) -> list[int]:
        out: list[int] = []
        while text:
            size = int(rng.choice([n for n in range(1, min(14, len(text) + 1)) if text[:n] in ids]))
            out.append(ids[text[:size]])
            text = text[size:]
        return out

    fragments: list[list[int]] = []
    for _ in range(6000):
        tag = tags[rng.integers(len(tags))].encode()
        cut = int(rng.integers(len(tag)))
        text = (tag[cut:], tag[:cut], tag[:cut] + tag[cut + 1 :], tag[:cut] + tag, tag, tag)[rng.integers(6)]
        before, behind = (qwen.tokens[i] for i in rng.choice(marks, 2))
        fragments.append(spelled(before * (cut % 2) + text + behind * (cut % 3 > 0)))
    fragments += [[int(i)] for i in rng.choice(singles, 2000)]
    picks = rng.integers(len(fragments), size=(count, length))
    # A stream takes as many of its fragments as fit; the last one is cut.
    return np.array([list(chain.from_iterable(fragments[pick] for pick in row))[:length] for row in picks])


@pytest.mark.parametrize(
    ("tags", "count"),
    [pytest.param(LOOP_TAGS, 100_000, marks=pytest.mark.slow), (LOOP_TAGS, 5_000), (ODD_TAGS, 5_000)],
    ids=["loop, many", "loop", "odd"],
)
def test_no_mismatch_on_adversarial_streams(qwen: Toy, tags: tuple[str, ...], count: int) -> None:
    matcher = TagMatcher(qwen, tags)
    streams = adversarial_streams(qwen, tags, count, 20)
    found: list[dict[int, tuple[bytes, bytes]]] = [{} for _ in streams]
    states = np.full(count, matcher.start())
    for place, ids in enumerate(streams.T):
        states, codes = matcher.step_many(states, ids)
        for row in np.flatnonzero(codes):
            hit = matcher.hit(int(codes[row]), int(ids[row]))
            assert hit is not None
            found[row][place] = (hit.tag.encode(), hit.trailing)

    patterns = [tag.encode() for tag in tags]
    mismatches = 0
    seen: Counter[str] = Counter()
    for ids, hits in zip(streams.tolist(), found, strict=True):
        expected = searched([qwen.tokens[i] for i in ids], patterns)
        mismatches += hits != expected
        for place, (tag, trailing) in expected.items():
            seen["hits"] += 1
            seen["trailing"] += bool(trailing)
            seen["split"] += len(tag) > len(qwen.tokens[ids[place]]) - len(trailing)
            seen[tag.decode()] += 1
    assert mismatches == 0
    # The streams cover what they should: every tag ends often, in the middle of tokens, and after a split.
    assert seen["hits"] > count / 2 and seen["trailing"] > count / 20 and seen["split"] > count / 4, seen
    assert all(seen[tag] > count / 1000 for tag in tags), seen
    for ids, hits in zip(streams[:500].tolist(), found, strict=False):
        assert stepped(matcher, ids) == hits


def test_the_real_vocabulary_completes_a_tag_in_266_ways(qwen: Toy) -> None:
    begin = time.perf_counter()
    matcher = TagMatcher(qwen, LOOP_TAGS)
    assert time.perf_counter() - begin < 2.0
    assert matcher.nbytes < 2**20
    state = matcher.start()
    for token_id in (522, 1836):  # "</", "search"
        state, hit = matcher.step(state, token_id)
        assert hit is None
    ids = np.arange(qwen.vocab_size)
    _, codes = matcher.step_many(np.full(qwen.vocab_size, state), ids)
    hits = {int(i): matcher.hit(int(codes[i]), int(i)) for i in np.flatnonzero(codes)}
    whole = {i for i, token in enumerate(qwen.tokens) if any(t.encode() in token for t in LOOP_TAGS)}
    assert len(hits.keys() - whole) == 266
    assert [i for i, hit in hits.items() if hit is not None and not hit.trailing and i not in whole] == [29]
    assert hits[397] == Hit("</search>", b"\n") and hits[1472] == Hit("</search>", b"</")


def test_encoded_text_gives_the_tags_in_it(qwen: Toy) -> None:
    matcher = TagMatcher(qwen, LOOP_TAGS)
    for text in (
        "<think>So.</think>\n\n<search>who wrote it</search>\n",
        "<think></think><search></search><answer></answer>",
        "\t<evaluate>x</evaluate>\n\n\n</answer></answer>.",
        "<search >no</ search></SEARCH>",
        "«<answer>Köln</answer>»東京</search>",
    ):
        ids = qwen.encode(text)  # type: ignore[attr-defined]
        hits = stepped(matcher, ids)
        assert hits == searched([qwen.tokens[i] for i in ids], [tag.encode() for tag in LOOP_TAGS])
        assert len(hits) == sum(text.count(tag) for tag in LOOP_TAGS)
