"""Shared by the tests of the report: a run folder, records of steps and evaluations, trajectories, a page parser."""

import base64
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.store.run_folder import RunFolder

VOID = {"meta", "img", "br", "wbr"}
CHARTS: dict[str, Any] = {"kl_value": "k2", "beta": 0.02, "max_grad_norm": 1.0, "groups": 4}


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    """Return a record with every key of the training loop that the report reads."""
    record = {
        "step": step,
        "questions": 16,
        **dict.fromkeys(("reward", "em", "f1", "contains"), step / 30),
        "answered": 0.75,
        "searches": 1.5,
        "response_tokens": 60.0,
        "tokens": 120.0,
        "reasons": {"answered": 12, "turns": 3, "context": 1},
        "zero_advantage_groups": 1,
        "loss": 0.0,
        "grad_norm": 0.3,
        "lr": 1e-3,
        "entropy": 0.2,
        "logprob_gap": 1e-7,
        "logprob_gap_max": 1e-5,
        "kl_k1": -0.01,
        "kl_k2": 0.02,
        "kl_k3": 0.01,
        "kl_largest": 4.5,
        "kl_coefficient_largest": 3.0,
        "train_tokens": 3000,
        "sampled_tokens": 1000,
        "update_seconds": 0.6,
        "reward_seconds": 0.01,
        "rollout_seconds": 0.4,
        "decode_seconds": 0.3,
        "prefill_seconds": 0.06,
        "search_seconds": 0.03,
        "host_seconds": 0.01,
    }
    return record | changes


def eval_record(step: int, em: float | None, questions: int = 200) -> dict[str, Any]:
    measures = {"questions": questions, "reward": em, "em": em, "f1": em, "contains": em, "answered": 1.0}
    return {"step": step, "eval": {**measures, "searches": 1.5, "response_tokens": 60.0, "seconds": 2.0}}


def trajectory(name: str, right: bool, searches: int = 1, **changes: Any) -> dict[str, Any]:
    found = {"source": "retrieved", "text": "\n\n<information> It is <b>Bel</b>.</information>\n\n", "ids": [4]}
    asked = {"source": "policy", "text": f"<think> hm </think><search> {name}? </search>", "ids": [2, 3]}
    record = {
        "id": name,
        "reason": "answered",
        "searches": [{"query": name, "passages": ["1"]}] * searches,
        "segments": [
            {"source": "prompt", "text": f"Question: {name}\n", "ids": [1]},
            *([asked, found] * searches),
            {"source": "policy", "text": "<answer> Bel </answer>", "ids": [5]},
        ],
        "question": f"Who is {name}?",
        "golden_answers": ["Bel", "Bel D."],
        "reward": float(right),
        "parts": {"em": right, "f1": float(right)},
        "answer": "Bel",
    }
    return record | changes


def make_run(path: Path, model: str = "nowhere", **sections: dict[str, Any]) -> RunFolder:
    table = {
        "model": {"path": model},
        "data": {"train": "train.jsonl", "dev": "dev.jsonl"},
        "retrieval": {"index": "index"},
        "system": {"name": "eval_rar"},
        "rollout": {"questions_per_step": 4},
        "run": {"steps": 30, "seed": 7},
    }
    run = RunFolder.create(path, from_dict(Recipe, table | sections, "test"))
    run.close()
    return run


class Page(HTMLParser):
    """A page's text, its pictures and the open elements; fails on wrong nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.pictures: dict[str, bytes] = {}  # by alternative text
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "img":
            about = dict(attrs)
            kind, _, data = (about["src"] or "").partition(",")
            assert kind == "data:image/png;base64"
            self.pictures[about["alt"] or ""] = base64.b64decode(data, validate=True)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())
