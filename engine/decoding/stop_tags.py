"""Find stop tags in token ids, exactly, however the tokenizer splits or merges them.

In Qwen's vocabulary 266 tokens can complete `</search>`, 265 of them with bytes after it (`>\\n`, `></`), so a search
for a tag's ids fails. The tags become one automaton over bytes (Aho and Corasick, 1975), tabulated over whole tokens:
(state, token) -> (state, hit). Almost every token leads from every state to the root without a hit; all of these share
column 0. With Qwen2.5's 151,665 tokens and 12 tags the tables [A, C] have 561 columns and .4 MiB; [A, V] takes 29.

Axes: A states, V token ids, C columns, Y byte values, Z (state, token) pairs, B sequences (docs/notation.md).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError, as_whole, is_unicode, shown

Ints = npt.NDArray[np.integer]

ROOT = 0


class TokenBytes(Protocol):
    """Interface of a tokenizer that the matcher needs: ids 0 .. vocab_size - 1, each a run of bytes."""

    @property
    def vocab_size(self) -> int: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A tag that ended inside a token. trailing: the token's bytes after the tag."""

    tag: str
    trailing: bytes


class TagMatcher:
    """Matcher that finds the first tag that ends in each token of a stream of token ids.

    `tags` are whole tags, such as "</search>". If several end in one token, the hit is the one that ends first; of two
    that end at the same byte, it is the longer one. The state returned with a hit is the state after **all** bytes of
    the token, trailing ones included; a caller that ends the stream at a hit takes `start()` for the next stream. A
    state is a small int and belongs to its matcher. Raises UserError for no tags, an empty tag, a repeated tag or one
    that is not a string.
    """

    def __init__(self, tokenizer: TokenBytes, tags: Sequence[str]) -> None:
        if not hasattr(tokenizer, "token_bytes"):
            raise UserError(f"tokenizer is {shown(tokenizer)}: give one that load_tokenizer read")
        self.tags = _checked(tags)
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        delta_AY, ends_A = _automaton([tag.encode() for tag in self.tags])
        self.states, self._delta_AY = len(delta_AY), delta_AY
        tokens = _Tokens([tokenizer.token_bytes(i) for i in range(self.vocab_size)])
        self._tabulate(tokens, delta_AY, ends_A)

    def start(self, lead: bytes = b"") -> int:
        """Return the state before the first token of a stream. lead: bytes with which the stream begins."""
        if not isinstance(lead, bytes):
            raise UserError(f"lead is {shown(lead)}: give the bytes that open the stream")
        state = ROOT
        for byte in lead:
            state = int(self._delta_AY[state, byte])
        return state

    def step(self, state: int, token_id: int) -> tuple[int, Hit | None]:
        """Read one token; return state and hit. ValueError if the id or the state is no whole number or out of
        range."""
        if as_whole(state) is None or as_whole(token_id) is None:
            raise ValueError(f"state {shown(state)} and token id {shown(token_id)} are not both whole numbers")
        self._check(state, state, token_id, token_id)
        column = self._column_V[token_id]
        return int(self._next_AC[state, column]), self.hit(int(self._code_AC[state, column]), token_id)

    def step_many(self, states_B: Ints, ids_B: Ints) -> tuple[Ints, Ints]:
        """Read one token of each of B sequences; return states [B] and hit codes [B]. Code 0 is no hit; `hit` decodes
        the others. ValueError as in `step`."""
        states_B, ids_B = np.asarray(states_B), np.asarray(ids_B)
        if states_B.shape != ids_B.shape:
            raise ValueError(f"{states_B.shape} states for {ids_B.shape} token ids: give one state per id")
        if ids_B.size:
            if states_B.dtype.kind not in "iu" or ids_B.dtype.kind not in "iu":
                raise ValueError(f"states are {states_B.dtype} and token ids {ids_B.dtype}: give whole numbers")
            self._check(states_B.min(), states_B.max(), ids_B.min(), ids_B.max())
        columns_B = self._column_V[ids_B]
        return self._next_AC[states_B, columns_B], self._code_AC[states_B, columns_B]

    def hit(self, code: int, token_id: int) -> Hit | None:
        """Return the hit for a code of `step_many` and the token that it was returned for; None for code 0."""
        if code == 0:
            return None
        tag, end = self._hits[code - 1]
        return Hit(self.tags[tag], self._tokenizer.token_bytes(int(token_id))[end:])

    def tables(self) -> tuple[Ints, Ints, Ints]:
        """Return the column of each token [V], next states [A, C] and hit codes [A, C]."""
        return self._column_V, self._next_AC, self._code_AC

    @property
    def nbytes(self) -> int:
        """Return the memory of the tables, in bytes."""
        return self._column_V.nbytes + self._next_AC.nbytes + self._code_AC.nbytes + self._delta_AY.nbytes

    def _check(self, lowest_state: int, highest_state: int, lowest_id: int, highest_id: int) -> None:
        padded = ": exclude the model's padded vocabulary columns from sampling"
        for what, lowest, highest, whose, most, remedy in (
            ("token id", lowest_id, highest_id, "the tokenizer", self.vocab_size, padded),
            ("state", lowest_state, highest_state, "this matcher", self.states, ""),
        ):
            if lowest < 0 or highest >= most:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(f"{what} {wrong} is outside {whose}'s 0..{most - 1}{remedy}")

    def _tabulate(self, tokens: "_Tokens", delta_AY: Ints, ends_A: Ints) -> None:
        """Fill the tables: all tokens from the root, then the entries of each state that differ from the root's."""
        all_V = np.arange(self.vocab_size)
        root_next_V, root_tag_V, root_end_V = tokens.run(np.full(self.vocab_size, ROOT), all_V, delta_AY, ends_A)
        states_Z, tokens_Z = tokens.unlike_root(delta_AY)
        next_Z, tag_Z, end_Z = tokens.run(states_Z, tokens_Z, delta_AY, ends_A)
        differs_Z = (
            (next_Z != root_next_V[tokens_Z]) | (tag_Z != root_tag_V[tokens_Z]) | (end_Z != root_end_V[tokens_Z])
        )
        states_Z, tokens_Z, next_Z, tag_Z, end_Z = (x[differs_Z] for x in (states_Z, tokens_Z, next_Z, tag_Z, end_Z))

        own_column_V = (root_next_V != ROOT) | (root_tag_V >= 0)
        own_column_V[tokens_Z] = True
        chosen_C = np.flatnonzero(own_column_V)
        self._column_V = np.zeros(self.vocab_size, _narrow(len(chosen_C)))
        self._column_V[chosen_C] = np.arange(1, len(chosen_C) + 1)

        # A code stands for (tag, end within the token); few such pairs occur.
        stride = int(max(root_end_V.max(initial=0), end_Z.max(initial=0))) + 1
        keys_V = np.where(root_tag_V >= 0, root_tag_V * stride + root_end_V, -1)
        keys_Z = np.where(tag_Z >= 0, tag_Z * stride + end_Z, -1)
        keys = np.unique(np.concatenate([[-1], keys_V, keys_Z]))
        self._hits = [divmod(int(key), stride) for key in keys[1:]]

        shape = (self.states, len(chosen_C) + 1)
        self._next_AC = np.full(shape, ROOT, _narrow(self.states))
        self._code_AC = np.zeros(shape, _narrow(len(keys)))
        self._next_AC[:, 1:] = root_next_V[chosen_C]
        self._code_AC[:, 1:] = np.searchsorted(keys, keys_V[chosen_C])
        columns_Z = self._column_V[tokens_Z]
        self._next_AC[states_Z, columns_Z] = next_Z
        self._code_AC[states_Z, columns_Z] = np.searchsorted(keys, keys_Z)


class _Tokens:
    """Bytes of all tokens in one buffer, so that many tokens can be run at once, byte by byte."""

    def __init__(self, texts: list[bytes]) -> None:
        self.bytes = np.frombuffer(b"".join(texts), np.uint8)
        self.lengths_V = np.fromiter(map(len, texts), np.int64, len(texts))
        self.begins_V = np.cumsum(self.lengths_V) - self.lengths_V

    def run(self, states_Z: Ints, tokens_Z: Ints, delta_AY: Ints, ends_A: Ints) -> tuple[Ints, Ints, Ints]:
        """Run each token from its state; return the state after it, the first tag or -1, and that tag's end."""
        # Longest first, so that the tokens with a byte number j are always a prefix.
        order_Z = np.argsort(-self.lengths_V[tokens_Z], kind="stable")
        lengths_Z = self.lengths_V[tokens_Z][order_Z]
        begins_Z = self.begins_V[tokens_Z][order_Z]
        now_Z = np.asarray(states_Z, np.int32)[order_Z]
        tag_Z, end_Z = np.full(len(order_Z), -1), np.zeros(len(order_Z), np.int64)
        for j in range(int(lengths_Z.max(initial=0))):
            live = int(np.searchsorted(-lengths_Z, -j))
            now_Z[:live] = delta_AY[now_Z[:live], self.bytes[begins_Z[:live] + j]]
            first = np.flatnonzero((ends_A[now_Z[:live]] >= 0) & (tag_Z[:live] < 0))
            tag_Z[first], end_Z[first] = ends_A[now_Z[first]], j + 1
        back_Z = np.empty_like(order_Z)
        back_Z[order_Z] = np.arange(len(order_Z))
        return now_Z[back_Z], tag_Z[back_Z], end_Z[back_Z]

    def unlike_root(self, delta_AY: Ints) -> tuple[Ints, Ints]:
        """Return all (state, token) where the token's first byte leads to another state than from the root. Results can
        differ only there. An empty token does not change the state, so it differs from the root in every state."""
        filled = np.flatnonzero(self.lengths_V)
        first = self.bytes[self.begins_V[filled]]
        by_byte = [filled[first == byte] for byte in range(256)]
        empty = np.flatnonzero(self.lengths_V == 0)
        states, tokens = [], []
        for state in range(1, len(delta_AY)):
            unlike = [by_byte[byte] for byte in np.flatnonzero(delta_AY[state] != delta_AY[ROOT])]
            here = np.concatenate([empty, *unlike])
            states.append(np.full(len(here), state))
            tokens.append(here)
        return np.concatenate(states), np.concatenate(tokens)


def _automaton(tags: list[bytes]) -> tuple[Ints, Ints]:
    """Build the Aho-Corasick automaton over bytes: next state [A, Y], and the longest tag that ends in a state, or -1
    [A]."""
    children: list[dict[int, int]] = [{}]
    ends = [-1]
    for number, tag in enumerate(tags):
        node = ROOT
        for byte in tag:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(-1)
            node = children[node][byte]
        ends[node] = number
    delta_AY = np.zeros((len(children), 256), np.int32)
    # Breadth first: the suffix that a state falls back to is shallower, so its row is already complete.
    queue = deque([(ROOT, ROOT)])
    while queue:
        node, suffix = queue.popleft()
        if node != ROOT:
            delta_AY[node] = delta_AY[suffix]
            if ends[node] < 0:
                ends[node] = ends[suffix]
        for byte, child in children[node].items():
            queue.append((child, int(delta_AY[suffix, byte]) if node != ROOT else ROOT))
            delta_AY[node, byte] = child
    return delta_AY, np.array(ends)


def _checked(tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str):
        raise UserError(f"tags must be a list of tags, got the string {shown(tags)}: write [{shown(tags)}]")
    if not isinstance(tags, Iterable):
        raise UserError(f"tags must be a list of strings, got {shown(tags)}")
    tags, seen = tuple(tags), set()
    for i, tag in enumerate(tags):
        if not isinstance(tag, str):
            raise UserError(f"tag {i} is {shown(tag)}: expected a string such as '</answer>'")
        if not tag:
            raise UserError(f"tag {i} is empty: give the text that it should match, such as '</answer>'")
        if not is_unicode(tag):
            raise UserError(f"tag {i} is {shown(tag)}, which UTF-8 cannot encode: give text without lone surrogates")
        if tag in seen:
            raise UserError(f"tag {shown(tag)} is given twice: give each tag once")
        seen.add(tag)
    if not tags:
        raise UserError("no tags given: a matcher needs at least one, such as '</answer>'")
    return tags


def _narrow(count: int) -> type[np.integer]:
    """Return the narrowest signed integer type that holds 0 .. count."""
    return next(kind for kind in (np.int8, np.int16, np.int32) if count <= np.iinfo(kind).max)
