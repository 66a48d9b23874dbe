"""A stored step as the token view's page reads it: groups of samples, their text cut into tokens, values in base64.

A character whose bytes lie in several tokens stands with the last of them, the others have no text of their own; the
page draws such tokens as one span of several colours. Strings that come often (prompts, passages) stand once a group.
Differences of log-probs are made here, in float32, and only then stored as float16: of the log-probs themselves they
would be rounding.

Deliberately absent: colours, and whatever follows from the values and the recipe, which the page computes.
"""

import base64
import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.common.console import visible
from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection
from thresher.engine.reporting.charts import ENDINGS
from thresher.engine.reporting.excerpts import is_right
from thresher.engine.store.token_stats import TokenStats
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.transcript import Source

Record = Mapping[str, Any]
LETTERS = {Source.PROMPT: "t", Source.RETRIEVED: "r", Source.FEEDBACK: "f"}  # and y: the policy


def policy_counts(records: Sequence[Record]) -> tuple[list[int], list[int]]:
    """How many tokens the policy sampled in each trajectory, and how many in its branches."""

    def count(segments: Sequence[Record]) -> int:
        return sum(len(s.get("ids") or ()) for s in segments if s.get("source") == Source.POLICY)

    return (
        [count(record.get("segments") or ()) for record in records],
        [sum(map(count, (record.get("branches") or {}).values())) for record in records],
    )


def groups_of(
    records: Sequence[Record], stats: Sequence[TokenStats] | None, tokenizer: Tokenizer, tags: Sequence[str]
) -> list[dict[str, Any]]:
    """The groups of a step in their order, ready for JSON. UserError where the tokenizer is another than the run's."""
    groups: dict[Any, dict[str, Any]] = {}
    tables: dict[Any, dict[str, int]] = {}
    for place, record in enumerate(records):
        number = record.get("group", 0)
        group = groups.setdefault(
            number,
            {
                "n": number,
                "question": visible(record.get("question", "")),
                "golds": [visible(gold) for gold in record.get("golden_answers") or []],
                "samples": [],
            },
        )
        writer = _Writer(record, tokenizer, tags, tables.setdefault(number, {}))
        group["samples"].append(writer.sample(None if stats is None else stats[place]))
    for number, group in groups.items():
        group["texts"] = list(tables[number])
    return list(groups.values())


class _Writer:
    """One trajectory's record as the page has it. texts: the group's strings, each with its place."""

    def __init__(self, record: Record, tokenizer: Tokenizer, tags: Sequence[str], texts: dict[str, int]) -> None:
        self.record, self.tokenizer, self.tags, self.texts = record, tokenizer, tags, texts

    def sample(self, stats: TokenStats | None) -> dict[str, Any]:
        record = self.record
        answer, advantage = record.get("answer"), record.get("advantage")
        reason = record.get("reason", "")
        made: dict[str, Any] = {
            "n": record.get("sample", 0),
            "right": is_right(record),
            "reward": record.get("reward"),
            "advantage": advantage,
            "answer": None if answer is None else visible(answer),
            "ending": ENDINGS.get(reason, (visible(reason), ""))[0] if reason != "answered" else "",
            "parts": {visible(name): _plain(value) for name, value in (record.get("parts") or {}).items()},
            "searches": [
                [visible(s.get("query", "")), len(s.get("passages") or ())] for s in record.get("searches") or []
            ],
            "segments": self.segments(record.get("segments") or []),
        }
        if branches := record.get("branches"):
            made["branches"] = [[visible(name), self.segments(part)] for name, part in branches.items()]
        if stats is not None:
            made |= values_of(stats)
        return made

    def segments(self, segments: Sequence[Record]) -> list[list[Any]]:
        found: list[list[Any]] = []
        for segment in segments:
            source, text = segment.get("source"), str(segment.get("text", ""))
            if source == Source.POLICY:
                found.append(["y", *self.tokens(text, segment.get("ids") or [])])
            elif source == Source.PROMPT:
                found.extend([letter, self.place(part)] for letter, part in prompt_parts(text, self.record))
            elif source in list(Source):
                found.append([LETTERS[Source(source)], self.place(visible(text))])
        return found

    def place(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def tokens(self, text: str, ids: Sequence[int]) -> tuple[str, list[int], list[int], list[int]]:
        """The text, each token's share of it in UTF-16 units, the ids, and where the page may break lines."""
        try:
            pieces = token_texts([self.tokenizer.token_bytes(token) for token in ids])
        except ValueError as error:
            raise UserError(f"the trajectories are of another tokenizer ({error}); give the run its own") from None
        if "".join(pieces) != text:
            raise UserError(
                f"the trajectories are of another tokenizer: it spells {''.join(pieces)[:60]!r}, they {text[:60]!r}"
            )
        shown = [visible(piece) for piece in pieces]
        return "".join(shown), [units(piece) for piece in shown], list(ids), line_breaks("".join(shown), self.tags)


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """What each token adds to the text when the bytes are joined; "" for one that ends inside a character. Bytes that
    are no UTF-8 become U+FFFD, as decoding all at once has it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(token, final=n == len(tokens) - 1) for n, token in enumerate(tokens)]


def line_breaks(text: str, tags: Sequence[str]) -> list[int]:
    """Where opening tags begin within a line, in UTF-16 units: the page begins a line there."""
    opening = "|".join(re.escape(tag) for tag in tags if not tag.startswith("</"))
    found = (match.start() for match in re.finditer(opening or "(?!)", text))
    return [units(text[:at]) for at in found if text[:at].strip(" ") and not text[:at].rstrip(" ").endswith("\n")]


def units(text: str) -> int:
    """The length of a text as JavaScript counts it."""
    return len(text.encode("utf-16-le")) // 2


def prompt_parts(text: str, record: Record) -> list[tuple[str, str]]:
    """A prompt in parts with their letters: t template, q the question, g a passage that the question brought."""
    needles = [("q", str(record.get("question") or ""))]
    needles += [("g", str(passage.get("text") or "")) for passage in record.get("passages") or []]
    spans = []
    for letter, needle in needles:
        at = text.rfind(needle) if needle else -1
        if at >= 0:
            spans.append((at, at + len(needle), letter))
    parts, end = [], 0
    for start, stop, letter in sorted(spans):
        if start < end:
            continue
        parts += [("t", text[end:start]), (letter, text[start:stop])]
        end = stop
    return [(letter, visible(part)) for letter, part in (*parts, ("t", text[end:])) if part]


def values_of(stats: TokenStats) -> dict[str, Any]:
    """The values of a trajectory's sampled tokens; those of the update only where it was in one."""
    values = stats.values
    made: dict[str, Any] = {"logprob": half(values["sampled"])}
    if len(stats.branches):
        made["branch_logprob"] = half(stats.branches)
    recomputed = values["recomputed"]
    if not np.isfinite(recomputed).any():
        return made
    made |= {"rollout": half(recomputed - values["sampled"]), "entropy": half(values["entropy"])}
    made["clipped"] = np.flatnonzero(values["clipped"]).tolist()
    if "reference" in values:
        made["reference"] = half(recomputed - values["reference"])
    if "advantage" in values:
        made["weighted"] = half(values["advantage"])
    return made


def half(values: npt.NDArray[Any]) -> str:
    """float16, little-endian, in base64; what is larger becomes the largest there is."""
    most = np.finfo(np.float16).max
    return base64.b64encode(np.clip(values, -most, most).astype("<f2").tobytes()).decode("ascii")


def odd_tokens(records: Sequence[Record], tokenizer: Tokenizer) -> dict[int, str]:
    """Tokens of the policy whose bytes are no UTF-8 by themselves: id -> their bytes in hexadecimal."""
    used = {
        token
        for record in records
        for segments in (record.get("segments") or [], *(record.get("branches") or {}).values())
        for segment in segments
        if segment.get("source") == Source.POLICY
        for token in segment.get("ids") or ()
    }
    odd = {}
    for token in sorted(used):
        spelled = tokenizer.token_bytes(token)
        if "\ufffd" in spelled.decode("utf-8", errors="replace"):
            odd[token] = spelled.hex(" ")
    return odd


def objective_of(grpo: GrpoSection, temperature: float) -> dict[str, Any]:
    """What of the recipe the page needs to compute with, as kernels/loss.py has it."""
    return {
        "low": 1 - grpo.clip_low,
        "high": 1 + grpo.clip_high,
        "beta": grpo.beta,
        "kl": (grpo.kl_gradient or grpo.kl_value) if grpo.beta else "none",
        "entropy": grpo.entropy_coef,
        "per_trajectory": grpo.aggregation == "trajectory",
        "old": grpo.old_logprobs,
        "passes": grpo.epochs_per_batch,
        "updates": grpo.updates_per_batch,
        "temperature": temperature,
    }


def to_json(value: object) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or opens a comment."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else visible(value)
