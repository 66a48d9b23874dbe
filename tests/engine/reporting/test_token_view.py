"""The token view: its data are the step's, its page is whole and small, and nothing sampled acts on it."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.reporting.token_data import half, line_breaks, prompt_parts, token_texts
from thresher.engine.reporting.token_view import assemble, write_token_view
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.store.token_stats import TokenStats, write_token_stats
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.errors import UserError

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u202e\x1b[31m"
TABLE = {"model": {"path": "gone"}, "system": {"name": "eval_rar"}, "run": {"steps": 9}}


class Elements(HTMLParser):
    """Every element of a page, with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def record(tokenizer: Tokenizer, group: int, sample: int, said: str = "<answer> Bel </answer>") -> dict[str, Any]:
    segments = [("prompt", "Question: Who?\nName her."), ("policy", said), ("retrieved", f"found {HOSTILE}")]
    return {
        "id": "q",
        "group": group,
        "sample": sample,
        "reason": "answered",
        "searches": [{"query": HOSTILE, "passages": ["1"]}],
        "segments": [{"source": s, "text": text, "ids": tokenizer.encode(text)} for s, text in segments],
        "branches": {HOSTILE: [{"source": "policy", "text": "abc", "ids": tokenizer.byte_ids(b"abc")}]},
        "question": "Who?",
        "golden_answers": [HOSTILE],
        "reward": float(sample),
        "parts": {"em": sample == 1, HOSTILE: 1.0},
        "answer": HOSTILE,
        "advantage": sample - 0.5 if group else 0.0,
    }


def stats_of_record(one: dict[str, Any]) -> TokenStats:
    count = len(one["segments"][1]["ids"])
    drawn = -np.arange(1, count + 1, dtype=np.float32) / 8
    values = {"sampled": drawn, "recomputed": drawn + np.float32(1e-4), "reference": drawn - np.float32(0.5)}
    values |= {"entropy": np.full(count, 0.25, np.float16), "clipped": np.arange(count) == 1}
    return TokenStats(key=(0, 0), values=values, branches=np.array([-1.0, -2.0, -3.0], np.float32))


@pytest.fixture
def run(tmp_path: Path, tiny_tokenizer: Tokenizer) -> RunFolder:
    """Steps 2 and 4 are stored, the second without what its update found."""
    tiny_tokenizer.save(tmp_path / "model")
    run = RunFolder.create(
        tmp_path / "run", from_dict(Recipe, TABLE | {"model": {"path": str(tmp_path / "model")}}, "t")
    )
    run.close()
    records = [record(tiny_tokenizer, group, sample) for group in (0, 1) for sample in (0, 1)]
    for step in (2, 4):
        run.append_metrics({"step": step, "reward": 0.5, "em": 0.5})
        run.write_trajectories(step, records)
    path = run.trajectories / "step_000002.safetensors"
    assert write_token_stats(path, [stats_of_record(one) for one in records], 10**6)
    return run


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def halves(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<f2")


def test_the_page_holds_what_was_stored(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    page = write_token_view(run.path, "2", tmp_path / "mail" / "F.html")
    assert page == tmp_path / "mail" / "F.html"
    data = data_of(page)
    assert data["step"] == 2 and data["stored"] and data["reference"] and data["objective"]["high"] == 1.2
    assert [[sample["n"] for sample in group["samples"]] for group in data["groups"]] == [[0, 1], [0, 1]]
    group = data["groups"][1]
    sample = group["samples"][1]
    assert sample["right"] and sample["advantage"] == 0.5 and sample["reward"] == 1.0
    letters = [part[0] for part in sample["segments"]]
    assert letters == ["t", "q", "t", "y", "r"] and group["texts"][sample["segments"][1][1]] == "Who?"
    _, text, lengths, ids, _ = sample["segments"][3]
    assert text == "<answer> Bel </answer>" and sum(lengths) == len(text) and tiny_tokenizer.decode(ids) == text
    drawn = -np.arange(1, len(ids) + 1) / 8
    assert halves(sample["logprob"]) == pytest.approx(drawn, rel=1e-3)
    assert halves(sample["rollout"]) == pytest.approx(1e-4, rel=2e-3)  # not what float16 would leave of a difference
    assert halves(sample["reference"]) == pytest.approx(0.5, rel=1e-3)
    assert sample["clipped"] == [1] and halves(sample["branch_logprob"]).tolist() == [-1.0, -2.0, -3.0]
    bare = data_of(write_token_view(run.path, "4", tmp_path / "bare.html"))
    assert not bare["stored"] and "logprob" not in bare["groups"][0]["samples"][0]


def test_nothing_sampled_or_retrieved_acts_on_the_page(run: RunFolder, tmp_path: Path) -> None:
    page = write_token_view(run.path, "2", tmp_path / "F.html")
    text = page.read_text(encoding="utf-8")
    elements = Elements(text).found
    assert [attrs for tag, attrs in elements if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert {tag for tag, _ in elements}.isdisjoint({"img", "link", "iframe", "base", "object"})
    assert not any(name.startswith("on") or name in ("src", "srcset") for _, attrs in elements for name in attrs)
    assert "://" not in text and "url(" not in text and "\x1b" not in text and "\u202e" not in text
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in elements
    # Unharmed as data: the passage reads as it was retrieved, but for what would act on a terminal or turn text round.
    assert f"found {HOSTILE[:-6]}\\u202e␛[31m" in data_of(page)["groups"][0]["texts"]


def test_all_steps_have_an_index(run: RunFolder) -> None:
    index = write_token_view(run.path, "all")
    assert index == run.path / "tokens" / "index.html"
    links = [attrs["href"] for tag, attrs in Elements(index.read_text(encoding="utf-8")).found if tag == "a"]
    assert links == ["step_000002.html", "step_000004.html"]
    page = Elements((run.path / "tokens" / "step_000004.html").read_text(encoding="utf-8")).found
    assert [attrs["href"] for tag, attrs in page if tag == "a"] == ["step_000002.html", "index.html"]


def test_groups_are_left_out_whole_and_those_without_a_signal_first(tiny_tokenizer: Tokenizer) -> None:
    recipe = from_dict(Recipe, TABLE, "t")
    sample = {"n": 0, "reward": 1.0, "answer": "a", "segments": [["y", "x" * 5000, [], [], []]]}
    groups = [
        {"n": n, "question": "é" * 50, "golds": [], "texts": [], "samples": [sample | {"advantage": float(n % 2)}]}
        for n in range(8)
    ]

    def page(most: int) -> tuple[str, list[int]]:
        text = assemble("run", recipe, groups, {"step": 1}, {}, most)
        assert len(text.encode()) <= most
        return text, [int(n) for n in re.findall(r'"n":(\d+),"question"', text)]

    empty = len(assemble("run", recipe, [], {"step": 1}, {}).encode())
    assert page(empty + 10**6)[1] == list(range(8)) and "left out" not in page(empty + 10**6)[0]
    text, kept = page(empty + 30_000)
    assert kept == [0, 1, 3, 5, 7]
    assert "3 of 8 groups are left out" in text and "(3 of them without a signal): 2, 4, 6." in text
    assert page(empty + 1000)[1] == []


def test_steps_and_folders_that_are_not_there(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    for step in ("3", "last", "-2", "2.0"):
        with pytest.raises(UserError, match=f"--tokens {step}: expected a stored step of .*; stored are 2, 4$"):
            write_token_view(run.path, step)
    with pytest.raises(UserError, match="is not a run folder"):
        write_token_view(tmp_path, "2")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be made"):
        write_token_view(run.path, "2", tmp_path / "file" / "F.html")
    other = record(tiny_tokenizer, 0, 0)
    other["segments"][1]["text"] = "what it never said"
    run.write_trajectories(4, [other])
    with pytest.raises(UserError, match="are of another tokenizer"):
        write_token_view(run.path, "4")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json in its checkpoints nor in"):
        write_token_view(run.path, "2")
    for path in run.trajectories.iterdir():
        path.unlink()
    with pytest.raises(UserError, match="none is stored"):
        write_token_view(run.path, "2")


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([b"a", b"\xe5\x90", b"\x8d", b"b"], ["a", "", "名", "b"]),
        ([b"x\xf0\x9f", b"\x8c", b"\xbe y"], ["x", "", "🌾 y"]),  # the last of them completes it
        ([b"a", b"\xff", b"b"], ["a", "\ufffd", "b"]),
        ([b"a", b"\xe5\x90"], ["a", "\ufffd"]),  # a turn that ends inside a character
        ([], []),
    ],
)
def test_bytes_are_joined_across_tokens(tokens: list[bytes], texts: list[str]) -> None:
    assert token_texts(tokens) == texts
    assert "".join(texts) == b"".join(tokens).decode("utf-8", errors="replace")


def test_a_characters_tokens_are_kept_apart(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    one = record(tiny_tokenizer, 0, 0)
    text = "🌾名"
    one["segments"][1] |= {"text": text, "ids": tiny_tokenizer.byte_ids(text.encode())}
    run.write_trajectories(4, [one])
    data = data_of(write_token_view(run.path, "4", tmp_path / "F.html"))
    _, shown, lengths, ids, _ = data["groups"][0]["samples"][0]["segments"][3]
    assert (shown, lengths) == (text, [0, 0, 0, 2, 0, 0, 1])  # as JavaScript counts: an ear is two
    assert data["odd"][str(ids[0])] == "f0" and len(data["odd"]) == 7


def test_parts_of_a_prompt_and_of_a_line() -> None:
    record = {"question": "Who?", "passages": [{"text": "Bel is."}, {"text": "gone"}, {"text": ""}]}
    assert prompt_parts("As: Who? [Bel is.]\nQ: Who?\n", record) == [
        ("t", "As: Who? ["),
        ("g", "Bel is."),
        ("t", "]\nQ: "),
        ("q", "Who?"),
        ("t", "\n"),
    ]
    tags = ("<a>", "</a>", "<b>", "</b>")
    assert line_breaks("<a>🌾</a> <b>x</b>\n <a>y</a><b>", tags) == [10, 28]
    assert line_breaks("<a><b>", ()) == []
    assert halves(half(np.array([1e9, -np.inf, np.nan]))).tolist()[:2] == [65504.0, -65504.0]
