"""Shared by the tests of the papers' rewards: their parts, transcripts in shorthand, and transcripts that nobody would
write."""

from typing import Any

from hypothesis import strategies as st

from thresher.rewards import RewardInput, Source, TextSegment

# The parts of each system's own reward, one row per system, without the measures among its results.
PARTS = {
    "eviomni": {"answer", "answer_rationale", "answer_evidence", "answer_full", "format"}
    | {"length", "length_rationale", "length_evidence"},
    "evinote": {"format", "answer", "notes"},
    "arena": {"format", "accuracy", "relevance", "bonus"},
    "eval_rar": {"answer", "evaluation"},
    "autorefine": {"answer", "refinement"},
    "search_r1": {"answer"},
    "tree_grpo": {"format", "answer"},
    "zero_search": {"answer"},
    "igpo": {"outcome", "gain"},
    "naive_grpo": {"format", "answer"},
    "reading": set(),  # the measures are its parts
}
PARTS |= {"lear": PARTS["eviomni"], "evinote_code": PARTS["evinote"]}
PARTS |= dict.fromkeys(("r1", "mem1", "search_r1_reinforce", "llds", "gigpo"), PARTS["search_r1"])

LETTERS = {"q": Source.PROMPT, "p": Source.POLICY, "r": Source.RETRIEVED, "f": Source.FEEDBACK}


def transcript(*parts: str) -> list[TextSegment]:
    """Return pieces from "p:text", where the letter names the source: question, policy, retrieved, feedback."""
    return [TextSegment(LETTERS[part[0]], part[2:].encode()) for part in parts]


def attempt(*parts: str, golds: tuple[str, ...] = ("Paris",), **more: Any) -> RewardInput:
    return RewardInput(pieces=transcript(*parts), golds=golds, **more)


NAMES = (
    "think",
    "search",
    "information",
    "summary",
    "evidence",
    "relevance",
    "analysis",
    "reason",
    "extract",
    "answer",
)
TAGS = [f"<{slash}{name}>" for name in NAMES for slash in ("", "/")]
SCRAPS = ["[1,2]", "1", "Paris", "*x*", "- y", " ", "\n", "<", "</", "<|im_end|>", "the", "é"]
WRITTEN = st.lists(st.sampled_from(TAGS + SCRAPS), max_size=24).map(lambda scraps: "".join(scraps).encode())
BYTES = st.one_of(st.binary(max_size=40), WRITTEN, WRITTEN.map(lambda text: text[:-1]))
PIECES = st.lists(st.builds(TextSegment, st.sampled_from(list(Source)), BYTES), max_size=6)
GOLDS = st.lists(st.sampled_from(["Paris", "no", "The", "", "x", "é"]), max_size=3)

# A hundred kilobytes that make a careless parser quadratic, or worse.
LONG = [
    "<" * 100_000,
    "*" * 100_000,
    "-" * 100_000,
    "*x " * 33_000,
    "x* " * 33_000,
    "[" * 100_000,
    "[1] " * 25_000 + "x",
    "[1" + " " * 100_000 + "x",
    "1," * 50_000,
    "9" * 100_000,
    "<answer>" * 12_500,
    "</answer>" * 11_000,
    "<summary>" * 11_000,
    "<|im_end|>" * 10_000 + "x",
    "word\n" * 20_000,
    "\n" * 100_000,
    "é" * 50_000,
]
