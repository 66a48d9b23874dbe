"""Test the token pages of rollout dumps: each format as its source writes it, values that a dump lacks, refusals."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import run_page
from token_page_cases import HOSTILE, OPEN, Elements, data_of, halves

from thresher.cli.main import run as run_command
from thresher.common.errors import UserError
from thresher.common.records import write_records
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.reports.token_dumps import ENCODED, NO_ROLES, TEXT_AS_WORDS, WEIGHTS, WORDS, write_token_page
from thresher.engine.reports.token_view import write_token_view
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.store.token_stats import TokenStats, write_token_stats
from thresher.policy.tokenizer import Tokenizer

EVERYTHING = "log-probs, ratios to the rollout, ratios to a reference and KL, entropies, clipped tokens, gradients"


@pytest.fixture
def model(tmp_path: Path, tiny_tokenizer: Tokenizer) -> Path:
    """Return a folder with the tokenizer."""
    tiny_tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def lines(path: Path, *records: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(dict(columns)), path)
    return path


def samples(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [sample for group in data["groups"] for sample in group["samples"]]


def said(sample: Mapping[str, Any]) -> str:
    return "".join(part[1] for part in sample["segments"] if part[0] == "y")


def test_tables_of_trl(tmp_path: Path, model: Path, tiny_tokenizer: Tokenizer) -> None:
    columns = {
        "step": [10] * 4,
        "prompt": ["user\nWho?\nassistant\n", "user\nWhere?\nassistant\n"] * 2,  # groups need not be contiguous
        "completion": ["Bel is.", "In  Bel", "Anna", ""],
        "accuracy_reward": [1.0, 0.0, None, 0.5],  # pandas writes nan as null
        "solution": ["Bel", "Bel", "Anna", "x"],  # from log_extra
        "advantage": [0.7, -0.7, -0.7, 0.7],
    }
    path = parquet(tmp_path / "completions_00010.parquet", columns)
    page = write_token_page(path)
    assert page == tmp_path / "completions_00010.html"
    data = data_of(page)
    first, second = data["groups"]
    assert (first["question"], second["question"], first["step"]) == ("Who?", "Where?", 10) and "golds" not in first
    assert [part[0] for part in first["samples"][0]["segments"]] == ["t", "q", "t", "y"]
    assert [s["reward"] for s in first["samples"]] == [1.0, None] and second["samples"][1]["reward"] == 0.5
    assert [s["advantage"] for s in first["samples"]] == [0.7, -0.7] and first["samples"][0]["right"] is None
    assert first["samples"][0]["parts"] == {"accuracy_reward": 1.0, "solution": "Bel"}
    assert "answer" not in first["samples"][0]
    assert second["samples"][0]["segments"][3] == ["y", "In  Bel", [2, 5], [], []]
    absent = f"The dump has no {EVERYTHING}, versions of the weights: they are not shown."
    assert data["words"] and data["notes"] == [NO_ROLES, TEXT_AS_WORDS, absent]
    tokens = data_of(write_token_page(path, tmp_path / "t.html", tokenizer=model))
    part = tokens["groups"][0]["samples"][0]["segments"][3]
    assert part[1] == "Bel is." and part[3] == tiny_tokenizer.encode("Bel is.") and sum(part[2]) == 7
    assert not tokens["words"] and tokens["notes"] == [NO_ROLES, ENCODED, absent]
    del columns["solution"]
    both = data_of(write_token_page(parquet(path, columns | {"format_reward": [1.0] * 4})))
    assert {s["reward"] for s in samples(both)} == {None}
    assert WEIGHTS in both["notes"]


def test_conversations_of_trl(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Bel"}}}
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    wrote = [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": "Bel is here."},
        {"role": "assistant", "content": "Bel."},
    ]
    other = [asked[0], {"role": "user", "content": "Where?"}]
    rows = [
        {"step": 1, "prompt": prompt, "completion": wrote, "score": 1.0, "advantage": 0.0}
        for prompt in (asked, other, asked)
    ]
    for path in (lines(tmp_path / "rows.jsonl", *rows), parquet(tmp_path / "completions_00001.parquet", columns(rows))):
        data = data_of(write_token_page(path))
        first, second = data["groups"]
        assert (first["question"], second["question"]) == ("Who?", "Where?") and len(first["samples"]) == 2
        (sample, _) = first["samples"]
        shown = [
            (kind, first["texts"][text] if isinstance(text, int) else text) for kind, text, *_ in sample["segments"]
        ]
        texts = [(kind, text.strip()) for kind, text in shown if kind in "yr"]
        assert texts == [("y", "I look.\nsearch({'query': 'Bel'})"), ("r", "Bel is here."), ("y", "Bel.")]
        assert sample["reward"] == 1.0


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_generations_of_verl(tmp_path: Path) -> None:
    rows = [
        {"input": "user\nWho?", "output": "Bel", "gts": "Bel", "score": 1.0, "step": 3, "acc": True, "pred": "Bel"},
        {"input": "user\nWho?", "output": "Anna", "gts": "Bel", "score": -1.0, "step": 3, "acc": False, "pred": "[A]"},
        {"input": "user\nWho?", "output": "x", "gts": {"target": ["Bel"]}, "score": float("nan"), "step": 4},
        {"input": "user\nWho?", "output": "y", "gts": None, "score": 0.0, "step": 4, "request_id": "r"},
    ]
    data = data_of(write_token_page(lines(tmp_path / "3.jsonl", *rows)))
    third, fourth = data["groups"]  # the same prompt in another step is another group
    assert data["steps"] and (third["step"], fourth["step"]) == (3, 4)
    assert third["golds"] == ["Bel"] and fourth["golds"] == ['{"target": ["Bel"]}']
    assert [(s["reward"], s["right"], s["answer"]) for s in third["samples"]] == [
        (1.0, True, "Bel"),
        (-1.0, False, "[A]"),
    ]
    assert [(s["reward"], s["right"], "answer" in s) for s in fourth["samples"]] == [
        (None, None, False),
        (0, None, False),
    ]
    assert fourth["samples"][1]["parts"] == {"request_id": "r"}
    assert (
        data["notes"][-1] == f"The dump has no advantages, {EVERYTHING}, versions of the weights: they are not shown."
    )


def episode(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    """Return an episode as prime-rl's file monitor writes it: two turns with a tool between them, and a second leaf."""

    def node(
        parent: int | None, role: str, text: str, drawn: str = "", before: str = "", **more: Any
    ) -> dict[str, Any]:
        """Return a node. before: the template's scaffold; text or drawn: the message."""
        ids, wrote = tokenizer.encode(before + text), tokenizer.encode(drawn)
        found = {"message": {"role": role, "content": text or drawn}, "sampled": bool(drawn), "token_ids": ids + wrote}
        found |= {"mask": [False] * len(ids) + [True] * len(wrote), "timestamp": 1.0, "is_content": []}
        found["logprobs"] = [-(n + 1) / 8 for n in range(len(wrote))]
        if drawn:
            found["advantages"] = [0.5] * len(wrote)
        return found | ({} if parent is None else {"parent": parent}) | more

    first = tokenizer.encode("look")
    nodes = [
        node(None, "system", "Help."),
        node(0, "user", "Who?"),
        node(1, "assistant", "", "look", ">>", reference_logprobs=[-1.0] * len(first)),
        node(2, "tool", "Bel is.", before="<<"),
        node(3, "assistant", "", "Bel", ">>"),
        node(1, "assistant", "", "again", ">>"),
    ]
    nodes[2]["message"] |= {
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [{"id": "1", "name": "find", "arguments": "{}"}],
    }
    trace = {
        "version": 1,
        "id": "t",
        "task": {"type": "QA", "data": {"prompt": "Who?"}, "hash": "h"},
        "agent": {"config": {}, "name": "solver", "trainable": True},
        "nodes": nodes,
        "rewards": {"exact": {"score": 1.0, "weight": 2.0}, "form": {"score": 0.5, "weight": 1.0}},
        "metrics": {"turns": 2.0},
        "info": {"advantage": 0.25},
        "stop_condition": "agent_completed",
    }
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 41, "policy": {"start": 39, "end": 39}}}
    return {"id": "e", "env": {"id": "qa"}, "group": {"id": "g"}, "run": run, "ok": True, "traces": [trace]} | changes


@pytest.mark.parametrize(
    ("score", "weight", "reward"), [(1.0, None, 1.5), (None, 1.0, None), (None, None, None), (1.0, 3.0, 3.5)]
)
def test_a_reward_of_prime_rl_may_be_null(
    tmp_path: Path, tiny_tokenizer: Tokenizer, score: float | None, weight: float | None, reward: float | None
) -> None:
    one = episode(tiny_tokenizer)
    one["traces"][0]["rewards"]["exact"] = {"score": score, "weight": weight}
    [group] = data_of(write_token_page(lines(tmp_path / "traces.jsonl", one)))["groups"]
    assert {sample["reward"] for sample in group["samples"]} == {reward}


def test_episodes_of_prime_rl(tmp_path: Path, model: Path, tiny_tokenizer: Tokenizer) -> None:
    failed = {"id": "f", "env": {"id": "qa"}, "task": {}, "ok": False, "errors": [{"type": "E"}], "traces": []}
    two = [episode(tiny_tokenizer), failed, episode(tiny_tokenizer, group={"id": "other"})]
    path = lines(tmp_path / "rollouts" / "step_42" / "train" / "effective" / "traces.jsonl", *two)
    data = data_of(write_token_page(path, tokenizer=model))
    assert [len(group["samples"]) for group in data["groups"]] == [2, 2]  # two leaves of each
    group = data["groups"][0]
    whole, other = group["samples"]
    assert [(part[0], part[1] if part[0] == "y" else group["texts"][part[1]]) for part in whole["segments"]] == [
        ("t", "Help."),
        ("q", "Who?"),
        ("t", ">>"),
        ("y", "look"),
        ("r", "<<Bel is."),
        ("f", ">>"),
        ("y", "Bel"),
    ]
    assert said(other) == "again" and group["question"] == "Who?" and group["step"] == 42
    assert (whole["reward"], whole["advantage"], whole["ending"]) == (2.5, 0.25, "agent_completed")
    shown = {"exact": 1.0, "form": 0.5, "turns": 2.0, "agent": "solver"}
    assert whole["parts"] == shown | {"version at its start": 39, "version at its end": 39}
    look, bel = len(tiny_tokenizer.encode("look")), len(tiny_tokenizer.encode("Bel"))
    drawn = [-(n + 1) / 8 for count in (look, bel) for n in range(count)]
    assert halves(whole["logprob"]).tolist() == drawn and halves(whole["weighted"]).tolist() == [0.5] * (look + bel)
    reference = halves(whole["reference"])  # nan where no reference has scored
    assert reference[:look].tolist() == [d + 1 for d in drawn[:look]] and np.isnan(reference[look:]).all()
    assert whole["versions"] == [[39, look], [39, bel]] and "rollout" not in whole
    absent = "ratios to the rollout, entropies, clipped tokens, gradients"
    assert data["notes"] == [f"The dump has no {absent}: they are not shown."]
    span = {"work": {"step": 41, "policy": {"start": 39, "end": 40}}}  # versions of tokens unknown
    mixed = data_of(write_token_page(lines(path, episode(tiny_tokenizer, run=span)), tokenizer=model))
    assert not any("versions" in sample for sample in samples(mixed))
    seen = lines(tmp_path / "rollouts" / "step_42" / "train" / "all" / "traces.jsonl", *two)  # unknown step
    assert data_of(write_token_page(seen, tokenizer=model))["groups"][0]["step"] is None


def test_without_a_tokenizer_messages_are_cut_into_words(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (trace,) = episode(tiny_tokenizer)["traces"]  # as verifiers writes a single trace
    data = data_of(write_token_page(lines(tmp_path / "traces.jsonl", trace)))
    group = data["groups"][0]
    whole = group["samples"][0]
    assert [part[1] if part[0] == "y" else group["texts"][part[1]] for part in whole["segments"][-3:]] == [
        "so\nfind({})",
        "Bel is.\n\n",
        "Bel",
    ]
    assert data["notes"] == [WORDS] and "logprob" not in whole and whole["advantage"] == 0.25


def test_token_exports_of_prime_rl(tmp_path: Path, model: Path, tiny_tokenizer: Tokenizer) -> None:
    prompt, wrote, tool = (tiny_tokenizer.encode(text) for text in ("Who?", "Bel", "found"))
    ids = prompt + wrote + tool + wrote
    drawn = [*[0] * len(prompt), *[1] * len(wrote), *[0] * len(tool), *[1] * len(wrote)]
    every = np.linspace(-2, -1, len(ids)).tolist()
    row = {
        "schema_version": 1,
        "step": 7,
        "rank": 0,
        "micro_step": 0,
        "export_sequence_idx": 0,
        "env_name": "qa",
        "token_ids": ids,
        "position_ids": list(range(len(ids))),
        "loss_mask": [bool(one) for one in drawn],
        "advantages": [0.5 * one for one in drawn],
        "inference_logprobs": [value * one for value, one in zip(every, drawn, strict=True)],
        "trainer_logprobs": [None, *(value + 0.25 for value in every[1:])],  # not finite: null
        "entropy": [0.125] * len(ids),
        "is_masked": [n == len(prompt) for n in range(len(ids))],
        **dict.fromkeys(("mismatch_kl", "log_importance_ratio", "importance_ratio"), [None] * len(ids)),
    }
    path = lines(tmp_path / "token_exports" / "step_7" / "rank_0.jsonl", row, row | {"is_masked": [None] * len(ids)})
    data = data_of(write_token_page(path, tokenizer=model))
    group = data["groups"][0]
    one, bare = group["samples"]
    letters = [(part[0], part[1] if part[0] == "y" else group["texts"][part[1]]) for part in one["segments"]]
    assert letters == [("q", "Who?"), ("y", "Bel"), ("f", "found"), ("y", "Bel")] and group["step"] == 7
    chosen = np.array(drawn, bool)
    assert halves(one["logprob"]) == pytest.approx(np.array(every)[chosen], rel=2**-11)
    assert halves(one["rollout"]) == pytest.approx(0.25, rel=2**-11)
    assert halves(one["entropy"]).tolist() == [0.125] * chosen.sum()
    assert one["clipped"] == [0] and "clipped" not in bare and one["advantage"] == 0.5 and one["reward"] is None
    assert data["notes"] == [
        "The dump has no ratios to a reference and KL, gradients, versions of the weights: they are not shown."
    ]
    with pytest.raises(UserError, match=r"rank_0.jsonl:1: holds token ids and no text; .* --tokenizer"):
        write_token_page(path)


def stored(tokenizer: Tokenizer, sample: int, **changes: Any) -> dict[str, Any]:
    segments = [("prompt", "Who?"), ("policy", "Bel"), ("retrieved", "found"), ("policy", "Anna")]
    made = [{"source": source, "text": text, "ids": tokenizer.encode(text)} for source, text in segments]
    fixed = {"id": "q", "group": 3, "sample": sample, "question": "Who?", "golden_answers": ["Bel"], "answer": "Bel"}
    return (
        fixed | {"segments": made, "reward": 1.0, "advantage": 0.5, "parts": {"em": 1}, "reason": "answered"} | changes
    )


def run_folder(folder: Path, model: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write a run with a stored step 5; return its file of trajectories."""
    table = {"model": {"path": str(model)}, "system": {"name": "search_r1"}, "run": {"steps": 9}}
    run = RunFolder.create(folder, from_dict(Recipe, table, "t"))
    run.close()
    run.write_trajectories(5, records)
    entries = []
    for n, record in enumerate(records):
        count = sum(len(s["ids"]) for s in record["segments"] if s["source"] == "policy")
        values = {"sampled": np.full(count, -1.0, np.float32), "recomputed": np.full(count, -0.5, np.float32)}
        values |= {"entropy": np.full(count, 0.5, np.float16), "clipped": np.zeros(count, bool)}
        entries.append(TokenStats(key=(3, n), values=values, branches=np.empty(0, np.float32)))
    assert write_token_stats(run.trajectories / "step_000005.safetensors", entries, 10**6)
    return run.trajectories / "step_000005.jsonl"


def test_a_runs_own_trajectories(tmp_path: Path, model: Path, tiny_tokenizer: Tokenizer) -> None:
    path = run_folder(tmp_path / "run", model, [stored(tiny_tokenizer, sample) for sample in (0, 1)])
    page = write_token_page(path)
    report = write_token_view(tmp_path / "run", "5", tmp_path / "F.html")
    assert page.read_text(encoding="utf-8") == report.read_text(encoding="utf-8")
    alone = tmp_path / "mailed.jsonl"
    alone.write_bytes(path.read_bytes())
    data = data_of(write_token_page(alone))
    assert data["words"] and data["notes"] == [WORDS] and data["groups"][0]["n"] == 3
    assert samples(data)[0]["right"] and said(samples(data)[0]) == "BelAnna"
    tokens = data_of(write_token_page(alone, tokenizer=model))
    assert samples(tokens)[0]["segments"][1][3] == tiny_tokenizer.encode("Bel") and len(tokens["notes"]) == 1
    changed = path.read_text("utf-8").replace("Anna", "Anne", 1)
    alone.write_text(changed, encoding="utf-8")
    with pytest.raises(UserError, match=r"mailed.jsonl:1: does not follow"):
        write_token_page(alone)
    assert said(samples(data_of(write_token_page(alone, unverified=True)))[0]) == "BelAnne"


def test_versions_of_segments_are_shown_as_staleness(tmp_path: Path, model: Path, tiny_tokenizer: Tokenizer) -> None:
    bel, anna = len(tiny_tokenizer.encode("Bel")), len(tiny_tokenizer.encode("Anna"))
    old, new = stored(tiny_tokenizer, 0), stored(tiny_tokenizer, 1)
    old["segments"][1]["versions"] = [[2, 1], [3, bel - 1]]
    old["segments"][3]["versions"] = [[4, anna]]
    path = run_folder(tmp_path / "run", model, [old, new])
    page = write_token_page(path)
    found = run_page(
        page.read_text(encoding="utf-8"),
        OPEN
        + """
        option("colour", "staleness");
        const tinted = [0, 1].map((s) => spans(s).map((span) => Boolean(span.style.background)));
        const seen = spans(0).map((span) => { click(span); return detail(); });
        return { tinted, seen, legend: texts("#legend")[0],
          figures: Object.fromEntries(texts("#figures dt").map((name, n) => [name, texts("#figures dd")[n]])) };
        """,
    )
    stale = [2, *[1] * (bel - 1), *[0] * anna]  # of step 5: 5 - 1 - version
    assert [row["staleness"] for row in found["seen"]] == [str(n) for n in stale]
    assert [row["drawn by version"] for row in found["seen"]] == [str(4 - n) for n in stale]
    assert found["tinted"] == [[n > 0 for n in stale], [False] * (bel + anna)] and found["legend"] == "02"
    assert found["figures"]["staleness"] == f"{sum(stale) / len(stale):.3g}"
    for wrong in ([[2, 1]], [[2]], "new", [[2, bel + 1], [3, -1]]):
        old["segments"][1]["versions"] = wrong
        write_records(path, [old, new])
        with pytest.raises(
            UserError, match=rf'"versions" as \[version, tokens\] of {bel} tokens|versions: expected a list'
        ):
            write_token_page(path)


SCENE = """
const usable = document.querySelectorAll("#colour option").filter((node) => !node.attributes.has("disabled"));
const colours = usable.map((node) => node.getAttribute("value"));
const seen = spans(0).map((span) => { click(span); return detail(); });
for (const key of "jknpcfo?") press(key);
document.getElementById("help").open = false;
option("filter", "all");
const filters = document.querySelectorAll("#filter option").map((node) => node.getAttribute("value"));
return { colours, filters, seen, words: spans(0).map((span) => span.textContent), notes: texts("p.note"),
  text: texts("#group")[0], names: texts("#figures dt"), figures: texts("#figures dd"), dots: texts(".dots em") };
"""


def test_what_a_dump_lacks_is_not_drawn(tmp_path: Path) -> None:
    rows = [{"input": "Who?", "output": f"{word} is.", "score": n, "step": 3} for n, word in enumerate(("Bel", "Anna"))]
    page = write_token_page(lines(tmp_path / "3.jsonl", *rows)).read_text(encoding="utf-8")
    found = run_page(page, OPEN + SCENE)
    assert found["filters"] == ["all", "longest"]
    assert found["colours"] == ["source"] and found["seen"] == [{}, {}] and found["words"] == ["Bel", " is."]
    assert dict(zip(found["names"], found["figures"], strict=True)) == {
        "groups": "1",
        "samples": "2",
        "mean reward": "0.5",
        "words written": "4",
    }
    assert found["notes"] == [" ".join(data_of(tmp_path / "3.html")["notes"])]
    for absent in ("wrong", "right", "expected", "answer given", "no signal", "undefined", "NaN"):
        assert absent not in found["text"] and absent not in found["dots"]


def test_nothing_of_a_dump_acts_on_the_page(tmp_path: Path, model: Path) -> None:
    rows = [{"input": HOSTILE, "output": HOSTILE, "score": 1.0, "step": 3, "gts": HOSTILE, HOSTILE: HOSTILE}]
    path = lines(tmp_path / "</script>.jsonl", *rows)
    for tokenizer in (None, model):
        text = write_token_page(path, tmp_path / "F.html", tokenizer=tokenizer).read_text(encoding="utf-8")
        elements = Elements(text).found
        assert [attrs for tag, attrs in elements if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
        assert {tag for tag, _ in elements}.isdisjoint({"img", "link", "iframe", "base", "object"})
        assert "://" not in text and "\x1b" not in text and "\u202e" not in text
        shown = run_page(text, OPEN + SCENE)
        assert "".join(shown["words"]).startswith("</script><script>alert(1)</script><!--<img")


def test_the_first_of_a_large_file_are_shown(tmp_path: Path) -> None:
    rows = [{"input": f"Question {n // 4}?", "output": "x " * 50, "score": 0.0, "step": 3} for n in range(10_000)]
    path = lines(tmp_path / "3.jsonl", *rows)
    with path.open("a", encoding="utf-8") as file:
        file.write("broken")  # not read, because only the first lines are
    data = data_of(write_token_page(path))
    assert len(samples(data)) == 512 and len(data["groups"]) == 128
    assert data["notes"][0] == "The file has more trajectories than these first 512 (--most)."
    assert len(samples(data_of(write_token_page(path, most=6)))) == 6
    lines(path, *rows[:6])
    assert "--most" not in str(data_of(write_token_page(path, most=6))["notes"])


REFUSED: dict[str, tuple[list[Any], str]] = {  # name -> records, and the message about the file
    "of anything": (
        [{"question": "Who?"}],
        r":1: expected the columns of a rollout dump \(.*trl: completion, prompt.*found question;",
    ),
    "without any": ([], ": holds no rollout; name a file that has some"),
    "of no episode that ran": ([{"traces": []}], ": holds no rollout; name a file that has some"),
    "with a line of something else": (
        [{"input": "a", "output": "b"}, {"output": "b"}],
        ':2: no "input" in this record; expected a string there',
    ),
    "with a list for a text": (
        [{"prompt": [1], "completion": "b"}],
        ":1: prompt, item 1: expected an object, found",
    ),
    "with a text for a score": (
        [{"input": "a", "output": "b", "score": "1"}],
        ":1: score: expected a number, found a string",
    ),
    "with a text for a step": (
        [{"input": "a", "output": "b", "step": "1"}],
        ":1: step: expected a whole number, found a string",
    ),
    "with a node that is its own parent": (
        [{"traces": [{"nodes": [{"message": {"role": "user"}, "parent": 0}]}]}],
        ':1: node 0: expected a "message", and the number of an earlier node as its "parent"',
    ),
    "with a mask that is too short": (
        [{"nodes": [{"message": {"role": "user"}, "token_ids": [1, 2], "mask": [False]}]}],
        ':1: expected "mask" to be a list of 2 numbers, one for each token; fix or remove this record',
    ),
    "with texts for ids": (
        [{"nodes": [{"message": {"role": "user"}, "token_ids": ["a"]}]}],
        ':1: expected "token_ids" to be a list of whole numbers',
    ),
    "of another tokenizer": (
        [{"token_ids": [1, 9999], "loss_mask": [False, True], "step": 1}],
        r":1: the dump is from another tokenizer \(token id 9999",
    ),
    "with values for other tokens": (
        [{"token_ids": [1, 2], "loss_mask": [False, True], "step": 1, "entropy": [0.5]}],
        ':1: expected "entropy" to be a list of 2 numbers',
    ),
    "with segments that are none": ([{"segments": "x"}], ":1: segments: expected a list, found a string"),
    "with a record without segments": (
        [{"segments": []}, {"id": "b"}],
        ':2: no "segments" in this record; fix or remove it',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused(name: str, tmp_path: Path, model: Path) -> None:
    records, problem = REFUSED[name]
    path = lines(tmp_path / "dump.jsonl", *records)
    with pytest.raises(UserError, match=f"dump.jsonl{problem}"):
        write_token_page(path, tokenizer=model)
    assert not (tmp_path / "dump.html").exists()


def test_the_command(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    path = lines(tmp_path / "3.jsonl", {"input": "Who?", "output": "Bel", "score": 1.0, "step": 3})

    def refused(*words: str) -> str:
        assert run_command(["tokens", *words]) == 2
        return capsys.readouterr().err

    assert run_command(["tokens", str(path), "--tokenizer", str(model), "--format", "verl"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "3.html")
    assert '3.jsonl:1: no "prompt" in this record' in refused(str(path), "--format", "trl")
    assert "absent.jsonl: no such file" in refused(str(tmp_path / "absent.jsonl"))
    assert "3.jsonl: cannot be made" in refused(str(path), "--out", str(path / "F.html"))
    assert "tokenizer.json" in refused(str(path), "--tokenizer", str(tmp_path))
    path.write_text("not JSON\n")
    assert "3.jsonl:1: not valid JSON" in refused(str(path))
    (tmp_path / "F.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "read with pyarrow, which is not installed; install thresher with its extra [data]" in refused(
        str(tmp_path / "F.parquet")
    )


def test_a_group_is_named_by_the_lines_in_which_prompts_differ(tmp_path: Path) -> None:
    def titles(*prompts: str) -> list[str]:
        rows = [{"input": prompt, "output": "x", "score": 0.0, "step": 3} for prompt in prompts]
        return [group["question"] for group in data_of(write_token_page(lines(tmp_path / "3.jsonl", *rows)))["groups"]]

    assert titles("Help.\nuser\nWho?\nBe brief.", "Help.\nuser\nWhere?\nBe brief.") == ["Who?", "Where?"]
    assert titles("Help.\nWho?", "Help.\nIs\nit?") == ["Who?", "Is\nit?"]
    assert titles("Help.\nWho?") == ["Help.\nWho?"]  # there is nothing to differ from
    assert titles("a\nb", "a\nx\nb") == ["a\nb", "x"]  # the first has no line of its own
    assert titles("a" * 500)[0] == "… " + "a" * 300
