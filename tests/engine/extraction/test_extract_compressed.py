"""`thresher extract --refiner`: compressors write the same file of evidence, which can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import transformers
from extract_cases import PASSAGES, SMALL, extracted, lines, make_plan

from thresher.cli.main import run
from thresher.common.errors import UserError
from thresher.common.records import read_object, write_object
from thresher.engine.baselines.reading import read_evidence
from thresher.engine.compressors.options import Name, compressor_options
from thresher.engine.extraction.run import Chosen, ExtractionPlan, extract
from thresher.retrieval.questions import Question


@pytest.fixture
def plan(tiny_model_folder: Path, tiny_questions: list[Question], tmp_path: Path) -> ExtractionPlan:
    """Return a plan for a policy's refiner; three questions, in two batches."""
    return replace(make_plan(tmp_path, tiny_model_folder, tiny_questions), template=None, batch=2)


def encoder(folder: Path, name: str) -> Path:
    if name == "recomp":
        return folders.save_model(folder / "contriever")
    config = folders.bert_config(num_labels=2)
    return folders.save_model(folder / name, folders.random_model(transformers.BertForTokenClassification, config))


def with_refiner(plan: ExtractionPlan, name: Name, folder: Path, **options: Any) -> ExtractionPlan:
    model = plan.model if name == "selective-context" else str(encoder(folder, name))
    return replace(plan, model=model, refining=compressor_options(name, **options))


def untimed(plan: ExtractionPlan) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "extract_seconds"} for line in lines(plan)]


@pytest.mark.parametrize("name", ["selective-context", "recomp", "llmlingua-2"])
def test_a_file_of_evidence_that_is_gone_on_with(plan: ExtractionPlan, name: Name, tmp_path: Path) -> None:
    plan = with_refiner(plan, name, tmp_path)
    figures = extract(plan)
    whole = untimed(plan)
    for line in whole:
        assert line["passages"] == [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
        assert line["evidence"] and set(line["evidence"].split()) <= set(" ".join(p.text for p in PASSAGES).split())
        assert (line["ended"], line["cut_passages"]) == ("refined", 0) and "rationale" not in line
        assert line["compression_ratio"] >= 1
    assert figures["questions"] == 3 and figures["compression_ratio"] > 1 and "recall_rationale" not in figures
    assert read_evidence(plan.out) == {line["id"]: line["evidence"] for line in whole}
    # As a kill leaves it: one line, and half of the next.
    first, second, *_ = Path(plan.out).read_bytes().splitlines(keepends=True)
    Path(plan.out).write_bytes(first + second[:20])
    side = Path(plan.out).with_suffix(".json")
    finished = read_object(side)
    with pytest.raises(UserError, match=r"has 1 records, but 3 were written; put a copy back"):
        extract(plan)
    write_object(side, {"settings": finished["settings"]})
    seen: list[tuple[int, int]] = []
    extract(plan, lambda done, of: seen.append((done, of)))
    assert untimed(plan) == whole and seen == [(1, 3), (3, 3)]
    changed = "sentences" if name == "recomp" else "keep"
    with pytest.raises(UserError, match="was begun with refining"):
        extract(replace(plan, refining=compressor_options(name, **{changed: {"sentences": 2, "keep": 0.3}[changed]})))
    with pytest.raises(UserError, match=f"--template is a prompt, and --refiner {name} has none"):
        extract(replace(plan, template=str(tmp_path / "t.txt"), out=str(tmp_path / "other.jsonl")))


def test_a_generator_answers_from_what_an_encoder_keeps(
    plan: ExtractionPlan, script: Callable[..., None], tmp_path: Path
) -> None:
    script({n: ["<answer>Carl Dorn</answer>"] for n in range(3)})
    generator = Chosen(model=plan.model)
    figures = extract(replace(with_refiner(plan, "recomp", tmp_path), generator=generator, batch=3))
    assert [line["answer"] for line in lines(plan)] == ["Carl Dorn"] * 3 and figures["answered"] == 1
    assert figures["em"] == pytest.approx(1 / 3)


def test_filco_writes_without_a_rationale_and_in_its_prompt(plan: ExtractionPlan, script: Callable[..., None]) -> None:
    wide = (*SMALL, "rollout.max_context=1024")
    plan = replace(plan, refining=compressor_options("filco"), overrides=wide, batch=3)
    script({n: [extracted("", "Carl")[len("<reason></reason>") :]] for n in range(3)})
    figures = extract(plan)
    assert {(line["evidence"], line["ended"]) for line in lines(plan)} == {("Carl", "extracted")}
    assert "rationale" not in lines(plan)[0] and "recall_rationale" not in figures


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--keep .5", "--keep is for --refiner selective-context or llmlingua-2; name it, or leave --keep out"),
        ("--refiner recomp --unit token", "--unit is for --refiner selective-context"),
        ("--refiner filco --sentences 2", "--sentences is for --refiner recomp"),
        ("--refiner selective-context --keep 0", "expected a share above 0, up to 1, got 0"),
        ("--refiner llmlingua-2", "model_type is 'qwen2', expected one of bert"),
        ("--refiner recomp", "model_type is 'qwen2', expected one of bert"),
    ],
)
def test_what_a_refiner_cannot_be_told(
    flags: str, said: str, plan: ExtractionPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["extract", "--model", plan.model, "--questions", plan.questions, "--out", plan.out, *flags.split()]
    assert run(typed) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not Path(plan.out).exists()


def test_from_filco_s_data_to_its_evidence(plan: ExtractionPlan, tmp_path: Path) -> None:
    """Through the commands: records with extract's prompt, and evidence between its tags."""
    records = tmp_path / "filco.jsonl"
    questions = Path(plan.questions)
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    typed = ["data", "sft", "--kind", "filco", "--measure", "inclusion", "--questions", str(questions), "--out"]
    assert run([*typed, str(records)]) == 0
    for question, line in zip(asked, records.read_text().splitlines(), strict=True):
        record = json.loads(line)
        gold = question["golden_answers"][0]
        expected = "\n".join(p.text for p in PASSAGES if gold in p.text)
        assert record["segments"][0]["text"] == f"<extract>{expected}</extract>"
        assert record["metadata"] == {"kind": "filco", "measure": "inclusion"}
    shutil.copytree(plan.model, model := tmp_path / "generator")
    for wrong in (["--kind", "filco"], ["--kind", "filco", "--measure", "cxmi"], ["--kind", "qa", "--measure", "cxmi"]):
        assert run(["data", "sft", *wrong, "--questions", str(questions), "--out", str(tmp_path / "w.jsonl")]) == 2
    assert run([*typed, str(tmp_path / "w.jsonl"), "--answer", "plain"]) == 2
    typed[5] = "cxmi"
    assert run([*typed, str(tmp_path / "cxmi.jsonl"), "--model", str(model)]) == 0
