"""Test the token view: its data are those of the step, its page is complete and small, sampled text cannot act on it,
and its formulas, run in node, are those of the kernels."""

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import run_page
from token_page_cases import HOSTILE, OPEN, Elements, data_of, halves

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.reports.pages import page_part
from thresher.engine.reports.token_view import assemble, half, line_breaks, prompt_parts, token_texts, write_token_view
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.store.token_stats import TokenStats, write_token_stats
from thresher.kernels.objective import capped_exp, kl_values
from thresher.policy.tokenizer import Tokenizer

FALL = -0.25  # change of the last token's log-prob between rollout and update
TABLE = {"model": {"path": "gone"}, "system": {"name": "eval_rar"}, "run": {"steps": 9}}


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
    drift = np.array([1e-4] * (count - 1) + [FALL], np.float32)
    values = {"sampled": drawn, "recomputed": drawn + drift, "reference": drawn + drift - np.float32(0.5)}
    values |= {"entropy": np.full(count, 0.25, np.float16), "clipped": np.arange(count) == 1}
    values["gradient"] = (np.arange(count) - 2).astype(np.float32) * np.float32(
        1e-9
    )  # that of a large batch: too small for float16
    return TokenStats(key=(0, 0), values=values, branches=np.array([-1.0, -2.0, -3.0], np.float32))


@pytest.fixture
def run(tmp_path: Path, tiny_tokenizer: Tokenizer) -> RunFolder:
    """Return a run with stored steps 2 and 4, the second without values of its update."""
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


def test_the_page_holds_what_was_stored(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    page = write_token_view(run.path, "2", tmp_path / "mail" / "F.html")
    assert page == tmp_path / "mail" / "F.html"
    data = data_of(page)
    assert data["updated"] and data["notes"] == [] and data["objective"] == {"objective": "grpo", "high": 1.2}
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
    *small, last = halves(sample["rollout"])
    assert small == pytest.approx([1e-4] * len(small), rel=2e-3)  # more precise than a difference of float16 values
    assert last == pytest.approx(FALL, rel=1e-3)
    assert halves(sample["reference"]) == pytest.approx(0.5, rel=1e-3)
    assert sample["clipped"] == [1] and halves(sample["branch_logprob"]).tolist() == [-1.0, -2.0, -3.0]
    bare = data_of(write_token_view(run.path, "4", tmp_path / "bare.html"))
    assert not bare["updated"] and "logprob" not in bare["groups"][0]["samples"][0]


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
    # Unchanged as data: the passage reads as retrieved, except for characters that act on a terminal or reverse text.
    assert f"found {HOSTILE[:-6]}\\u202e␛[31m" in data_of(page)["groups"][0]["texts"]


def test_all_steps_have_an_index(run: RunFolder) -> None:
    index = write_token_view(run.path, "all")
    assert index == run.path / "tokens" / "index.html"
    links = [attrs["href"] for tag, attrs in Elements(index.read_text(encoding="utf-8")).found if tag == "a"]
    assert links == ["step_000002.html", "step_000004.html"]
    page = Elements((run.path / "tokens" / "step_000004.html").read_text(encoding="utf-8")).found
    assert [attrs["href"] for tag, attrs in page if tag == "a"] == ["step_000002.html", "index.html"]


def test_groups_are_left_out_whole_and_those_without_a_signal_first(tiny_tokenizer: Tokenizer) -> None:
    sample = {"n": 0, "reward": 1.0, "answer": "a", "segments": [["y", "x" * 5000, [], [], []]]}
    groups = [
        {"n": n, "question": "é" * 50, "golds": [], "texts": [], "samples": [sample | {"advantage": float(n % 2)}]}
        for n in range(8)
    ]

    def page(most: int) -> tuple[str, list[int]]:
        text = assemble("Step 1", "run", groups, {}, {}, most)
        assert len(text.encode()) <= most
        return text, [int(n) for n in re.findall(r'"n":(\d+),"question"', text)]

    empty = len(assemble("Step 1", "run", [], {}, {}).encode())
    assert page(empty + 10**6)[1] == list(range(8)) and "left out" not in page(empty + 10**6)[0]
    text, kept = page(empty + 30_000)
    assert kept == [0, 1, 3, 5, 7]
    assert "3 of 8 groups are left out" in text and "(3 of them without a signal): 2, 4, 6." in text
    assert page(empty + 1000)[1] == []
    bare = assemble("Step 1", "run", [], {"objective": {}}, {})
    assert run_page(bare, "return texts('#group')") == ["No group is on this page."]


def test_refusals(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    def refused(step: str, problem: str, folder: Path = run.path, out: Path | None = None) -> None:
        with pytest.raises(UserError, match=problem):
            write_token_view(folder, step, out)

    for step in ("3", "last", "-2", "2.0"):
        refused(step, f"--tokens {step}: expected a stored step of .*; stored are 2, 4$")
    refused("2", "is not a run folder", tmp_path)
    (tmp_path / "file").write_text("")
    refused("2", "file: cannot be made", out=tmp_path / "file" / "F.html")
    other = record(tiny_tokenizer, 0, 0)
    other["segments"][1]["text"] = "what it never said"
    run.write_trajectories(4, [other])
    refused("4", "are from another tokenizer")
    (tmp_path / "model" / "tokenizer.json").unlink()
    refused("2", r"no tokenizer\.json in its checkpoints nor in")
    for path in run.trajectories.iterdir():
        path.unlink()
    for step in ("2", "all"):
        refused(step, f"--tokens {step}: .*none is stored")


def test_bytes_are_joined_across_tokens() -> None:
    for tokens, texts in (
        ([b"a", b"\xe5\x90", b"\x8d", b"b"], ["a", "", "名", "b"]),
        ([b"x\xf0\x9f", b"\x8c", b"\xbe y"], ["x", "", "🌾 y"]),  # the last token completes the character
        ([b"a", b"\xff", b"b"], ["a", "\ufffd", "b"]),
        ([b"a", b"\xe5\x90"], ["a", "\ufffd"]),  # a turn that ends inside a character
        ([], []),
    ):
        assert token_texts(tokens) == texts
        assert "".join(texts) == b"".join(tokens).decode("utf-8", errors="replace")


def test_a_characters_tokens_are_kept_apart(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    one, text = record(tiny_tokenizer, 0, 0), "🌾名"
    one["segments"][1] |= {"text": text, "ids": tiny_tokenizer.byte_ids(text.encode())}
    run.write_trajectories(4, [one])
    data = data_of(write_token_view(run.path, "4", tmp_path / "F.html"))
    _, shown, lengths, ids, _ = data["groups"][0]["samples"][0]["segments"][3]
    assert (shown, lengths) == (text, [0, 0, 0, 2, 0, 0, 1])  # in JavaScript's units: the ear of rice counts two
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


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def test_the_pages_script_shows_the_kernels_numbers(run: RunFolder, tmp_path: Path) -> None:
    page = write_token_view(run.path, "2", tmp_path / "F.html").read_text(encoding="utf-8")
    found = run_page(
        page,
        OPEN
        + """
        const first = { hidden: document.getElementById("app").hidden, asked: texts("h2")[0], address: log.address,
          names: texts("#figures dt"), figures: texts("#figures dd"), notes: texts("p.note"),
          strips: document.querySelectorAll("canvas").map((canvas) => canvas.filled) };
        first.text = spans(1).map((span) => span.textContent).join("");
        const seen = spans(1).map((span) => { click(span); return detail(); });
        const help = click(document.getElementById("ask")) || document.getElementById("help").open;
        return { first, seen, help };
        """,
    )
    first, seen = found["first"], found["seen"]
    assert not first["hidden"] and first["asked"] == "Who?" and found["help"]
    assert first["address"] == "#g=1&s=0&c=gradient&f=all"  # the first group with a signal
    assert first["text"] == "<answer> Bel </answer>" and first["notes"] == []
    count = len(seen)
    figures = dict(zip(first["names"], first["figures"], strict=True))
    d, entropy = 0.5, 0.25
    k3 = float(kl_values(torch.tensor(d), torch.tensor(1.0))["k3"])
    assert figures == {
        "groups": "2",
        "samples": "4",
        "mean reward": "0.5",
        "right": "50%",
        "tokens written": str(4 * count),
        "entropy": "0.25",
        "clipped": f"{100 / count:.1f}%",
        "KL, k3": f"{k3:.3g}",
    }
    for i, row in enumerate(seen):
        drawn, drift = -(i + 1) / 8, FALL if i == count - 1 else 1e-4
        expected = {
            "log-prob when drawn": drawn,
            "p": math.exp(drawn),
            "advantage": 0.5,
            "log-prob in the update": drawn + drift,
            "ratio to the rollout": math.exp(drift),
            "ratio to the reference": math.exp(d),
            "k1": d,
            "k2": d * d / 2,
            "k3": k3,
            "entropy": entropy,
        }
        expected["gradient"] = (i - 2) * 1e-9
        assert row.pop("clipped") == ("yes" if i == 1 else "no")
        assert {name: number(text) for name, text in row.items()} == {
            name: pytest.approx(x, rel=6e-3, abs=0 if name == "gradient" else 1e-6) for name, x in expected.items()
        }
    shown = first["strips"][1]
    # --down: made less likely; --up: made more likely
    tones = ["rgba(1,2,6"] * 2 + ["transparent"] + ["rgba(1,2,4"] * (count - 3)
    assert [fill.rpartition(",")[0] or fill for fill in shown] == tones


COLOURS = ["gradient", "source", "logprob", "rollout", "reference", "k1", "k2", "k3", "entropy", "advantage", "clipped"]
TOUR = """
const colours = {}, filters = {};
const usable = document.querySelectorAll("#colour option").filter((node) => !node.attributes.has("disabled"));
for (const value of usable.map((node) => node.getAttribute("value"))) {
  option("colour", value);
  const tinted = spans(1).filter((span) => span.style.background).length;
  colours[value] = [texts("#legend")[0], texts(".strong button")[0] ?? "", tinted];
}
for (const value of document.querySelectorAll("#filter option").map((node) => node.getAttribute("value"))) {
  option("filter", value);
  filters[value] = document.querySelectorAll(".sample:not([hidden])").length;
}
option("filter", "all");
const went = [..."kjpnp"].map((key) => { press(key); return log.address.slice(1, 8); });
for (const key of ["c", "C", "o", "?"]) press(key);
document.getElementById("help").open = false;
press("/");
const box = document.activeElement, count = () => document.getElementById("found").value, matches = [];
box.value = "bel";
fire("input", box);
matches.push(count());
for (const shiftKey of [false, false, true]) {
  fire("keydown", box, { key: "Enter", shiftKey });
  matches.push(count(), log.highlighted.at(-1).startContainer.data.slice(log.highlighted.at(-1).start));
}
return { colours, filters, went, matches, notes: texts("p.note"), branches: texts("span[data-b]").join("") };
"""


def test_a_turn_that_several_versions_drew(run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    one = record(tiny_tokenizer, 0, 0)
    turn, branch = one["segments"][1], one["branches"][HOSTILE][0]
    count = len(turn["ids"])
    turn["versions"], one["trained_branches"], branch["versions"] = [[1, 1], [3, count - 1]], [HOSTILE], [[2, 3]]
    run.write_trajectories(4, [one, record(tiny_tokenizer, 0, 1)])
    page = write_token_view(run.path, "4", tmp_path / "F.html").read_text(encoding="utf-8")
    told = """
        option("colour", "staleness");
        return [texts("#legend")[0], ...[0, 1].map((s) => spans(s).map((span) => {
          click(span);
          return [span.getAttribute("title"), detail()["drawn by version"], detail().staleness];
        }))];
    """
    legend, drawn, unknown = run_page(page, OPEN + told)
    assert legend == "02"  # full at the largest, which one token in four that are stale has: not at the 99th percentile
    mark = "version 3 of the weights from here on"
    assert drawn == [[None, "1", "2"]] + [[mark, "3", "0"]] + [[None, "3", "0"]] * (count - 2) + [[None, "2", "1"]] * 3
    assert unknown == [[None, None, None]] * count


def test_every_colour_filter_and_key_of_the_page(run: RunFolder, tmp_path: Path) -> None:
    page = write_token_view(run.path, "2", tmp_path / "F.html").read_text(encoding="utf-8")
    found = run_page(page, OPEN + TOUR, address="#g=1&s=1&c=k2&f=all")
    assert found["colours"] == {  # legend, the first of the largest values, number of tinted tokens among nine
        "gradient": ["less likelylikelier· full at 6.0e−9", ">+6.0e−9 ×2", 8],
        "source": ["templatequestionpolicyretrievedfeedback", "", 0],
        "logprob": ["sureunlikely· full at −5, largest −1.13", ">−1.13 ×2", 9],
        "rollout": ["fallsrises· full at 1.2, largest 0.779", ">0.779 ×2", 1],
        "reference": ["belowabove· full at 1.65", "<1.65 ×2", 9],
        "k1": ["−0.50.5", "<+0.5 ×2", 9],
        "k2": ["00.125", "<0.125 ×2", 9],
        "k3": ["00.107", "<0.107 ×2", 9],
        "entropy": ["00.25", "<0.25 ×2", 9],
        "advantage": ["−0.50.5", "", 9],
        "clipped": ["–clipped· largest clipped", "answerclipped ×2", 1],
    }
    assert found["filters"] == {"all": 2, "wrong": 1, "right": 1, "clipped": 2, "longest": 2, "signal": 2}
    assert found["went"] == ["g=0&s=1", "g=1&s=0", "g=0&s=0", "g=1&s=0", "g=0&s=0"]
    assert found["matches"] == ["4 matches", "1 of 4", "Be", "2 of 4", "Be", "1 of 4", "Be"]
    assert found["branches"] == "abcabc" and found["notes"] == []
    page = write_token_view(run.path, "4", tmp_path / "F.html").read_text(encoding="utf-8")
    bare = run_page(page, OPEN + TOUR, address="#g=1&s=1&c=k2&f=all")
    assert bare["colours"] == {name: found["colours"][name] for name in ("source", "advantage")}
    assert bare["filters"] == {name: n for name, n in found["filters"].items() if name != "clipped"}
    assert len(bare["notes"]) == 1
    assert bare["notes"][0].startswith("This step has no log-probs") and bare["matches"] == found["matches"]


def test_a_step_of_an_earlier_version_has_no_gradients(
    run: RunFolder, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    records = [record(tiny_tokenizer, 0, sample) for sample in (0, 1)]
    earlier = [stats_of_record(one) for one in records]
    for entry in earlier:
        del entry.values["gradient"]
        entry.values["recomputed"] = entry.values["sampled"] + np.float32(1e-4)
    run.write_trajectories(4, records)
    assert write_token_stats(run.trajectories / "step_000004.safetensors", earlier, 10**6)
    page = write_token_view(run.path, "4", tmp_path / "F.html").read_text(encoding="utf-8")
    bare = run_page(page, OPEN + TOUR, address="#g=0&s=1&c=gradient&f=all")
    assert list(bare["colours"]) == ["source", *[name for name in COLOURS if name not in ("source", "gradient")]]
    assert len(bare["notes"]) == 1 and "kept no gradients" in bare["notes"][0]
    assert bare["colours"]["rollout"] == ["fallsrises· full at 1.2, largest 1", "", 0]  # no roundings listed


# Each formula of token_formulas.js is compared with its Python on random float64 values. Where both sides compute the
# same sums and products they agree to the bit; exp and expm1 are rounded within an ulp on either side, so that two of
# them differ by at most 4 u of their value, with u = 2^-53.
U = 2.0**-53
NAMES = {
    *("ratioOf", "estimators", "updated", "probability", "gradientOf", "staleness", "spread", "mean", "percent"),
    *("longest", "fullScale", "opacity", "halves"),
}
# Both sides of the cap at 80, both signs, sizes at which exp(-d) - 1 loses its digits, and float16's largest.
LOG_RATIOS = [0.0, 1e-7, -1e-7, 1e-3, -1e-3, 0.2, -0.2, 1.0, -1.0, 10.0, -10.0, 79.9, 80.0, 80.1, -79.9, -80.0, -80.1]
LOG_RATIOS += [65504.0, -65504.0]


def drawn_at_random(seed: int, count: int = 400) -> list[float]:
    """Return values of both signs, of magnitudes from 1e-8 to 100."""
    generator = np.random.default_rng(seed)
    sizes = 10.0 ** generator.uniform(-8, 2, count)
    return (sizes * generator.choice([-1.0, 1.0], count)).tolist()


def formulas(expression: str, *given: object) -> Any:
    """Return the value of a JavaScript expression over FORMULAS and `given`; null, which JSON has for NaN, as None."""
    scenario = f"const given = {json.dumps(given)}; return ({expression})(...given);"
    return run_page("", scenario, scripts=[page_part("token_formulas.js")])


def within(found: object, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Check that each value is within 4 u of `size` of the expected one."""
    assert expected.dtype == torch.float64
    distance = (torch.tensor(found, dtype=torch.float64) - expected).abs()
    assert (distance <= 4 * U * size.abs()).all(), distance.max()


def test_every_formula_is_held_to_its_python() -> None:
    assert set(formulas("() => Object.keys(FORMULAS)")) == NAMES
    assert formulas("() => Object.keys(FORMULAS.estimators)") == ["k1", "k2", "k3"]
    computed = re.sub(r"//.*", "", page_part("token_view.js"))
    outside = re.findall(r"Math\.(?:exp|expm1|log|sqrt|pow)\b", computed)
    assert outside == ["Math.log"]  # for the clip, where a colour is full; all else is in token_formulas.js


def test_ratios_and_kl_are_the_kernels() -> None:
    values = LOG_RATIOS + drawn_at_random(0)
    every = torch.tensor(values, dtype=torch.float64)
    ratio = capped_exp(every)
    within(formulas("(all) => all.map(FORMULAS.ratioOf)", values), ratio, ratio)
    expected = kl_values(every, torch.ones_like(every))
    for name in ("k1", "k2"):
        found = formulas("(all, name) => all.map(FORMULAS.estimators[name])", values, name)
        assert found == expected[name].tolist()
    # k3 is a difference: expm1 and its other term have errors relative to their own size.
    found = formulas("(all) => all.map(FORMULAS.estimators.k3)", values)
    within(found, expected["k3"], torch.expm1((-every).clamp(max=80)).abs() + every.abs())


def test_values_of_a_token_are_those_of_its_stored_ones() -> None:
    a, b = drawn_at_random(1), drawn_at_random(2)
    pairs = "(f, a, b) => a.map((x, n) => FORMULAS[f](x, b[n]))"
    assert formulas(pairs, "updated", a, b) == (np.array(a) + np.array(b)).tolist()
    assert formulas(pairs, "gradientOf", a, b) == (np.array(a) * np.array(b)).tolist()
    logprobs = [-abs(value) for value in a]
    expected = torch.tensor(logprobs, dtype=torch.float64).exp()
    within(formulas("(all) => all.map(FORMULAS.probability)", logprobs), expected, expected)


def test_staleness_is_that_of_the_versions() -> None:
    generator = np.random.default_rng(3)
    steps, ages = generator.integers(1, 10**6, 100), generator.integers(0, 50, 100)
    versions = steps - 1 - ages  # step s trains the weights of version s - 1
    found = formulas("(s, v) => s.map((x, n) => FORMULAS.staleness(x, v[n]))", steps.tolist(), versions.tolist())
    assert found == ages.tolist()
    counts = generator.integers(0, 6, 100)
    runs = [[int(v), int(c)] for v, c in zip(versions, counts, strict=True)]
    assert formulas("(runs) => FORMULAS.spread(runs)", runs) == np.repeat(versions, counts).tolist()
    unknown = "(runs) => FORMULAS.spread(runs).map((version) => FORMULAS.staleness(9, version))"
    assert formulas(unknown, [[None, 2], [7, 1]]) == [None, None, 1]  # no number, and not the staleness of version 0


def test_measures_of_the_page() -> None:
    values = drawn_at_random(4)
    gaps: list[float | None] = [None if n % 7 == 0 else value for n, value in enumerate(values)]
    present = [value for value in gaps if value is not None]
    total = 0.0
    for value in present:  # in the order in which the page adds
        total += value
    assert formulas("(all) => FORMULAS.mean(all)", gaps) == total / len(present)
    assert formulas("(all) => FORMULAS.mean(all.map((v) => v ?? NaN))", gaps) == total / len(present)
    assert formulas("() => FORMULAS.mean([null, NaN, undefined])") is None
    wholes = np.random.default_rng(5).integers(1, 1000, 50)
    parts = wholes // 3
    expected = (100 * parts / wholes).tolist()
    assert formulas("(a, b) => a.map((x, n) => FORMULAS.percent(x, b[n]))", parts.tolist(), wholes.tolist()) == expected
    assert formulas("() => [FORMULAS.percent(0, 0), FORMULAS.percent(1, 1)]") == [0, 100]
    for count in (1, 9, 10, 11, 237):
        lengths = np.random.default_rng(count).permutation(count * 3)[:count].tolist()
        most = sorted(lengths, reverse=True)
        assert formulas("(all) => FORMULAS.longest(all)", lengths) == most[math.ceil(count / 10) - 1]


def test_halves_are_numpys() -> None:
    bits = np.arange(2**16, dtype="<u2")
    text = base64.b64encode(bits.tobytes()).decode()
    found = np.array(formulas("(text) => [...FORMULAS.halves(text)]", text), float)  # JSON has null for NaN
    expected = bits.view("<f2").astype(float)
    np.testing.assert_array_equal(found, np.where(np.isfinite(expected), expected, np.nan))


def test_colours_are_full_at_the_99th_percentile() -> None:
    sizes = [abs(math.sin(n)) for n in range(1, 301)]
    at = "(sizes, ...rest) => { const { full, largest } = FORMULAS.fullScale(sizes, ...rest); return [full, largest]; }"
    percentile = np.quantile(sizes, 0.99, method="lower")
    assert formulas(at, sizes) == [percentile, max(sizes)]
    assert formulas(at, sizes, None, 1) == [max(sizes), max(sizes)]
    assert formulas(at, sizes, 5.0) == [5.0, max(sizes)]
    falls = [-7.0, *sizes, -3.0]  # the sign is kept; otherwise the largest fall of a ratio would be shown as a rise
    assert formulas(at, falls, None, 1) == [7.0, -7.0] and formulas(at, falls, 5.0) == [5.0, -7.0]
    assert formulas(at, []) == [1, 0]
    given = [0.0, 0.015, 0.016, -0.5, 1.0, -7.0]
    shown = formulas("(all) => all.map((v) => FORMULAS.opacity(v, 1))", given)
    assert shown == pytest.approx([0.0, 0.0, 0.0812, 0.42, 0.77, 0.77])
