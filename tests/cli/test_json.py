"""Tests that with --json stdout is one object, for any command and outcome, and without it nothing changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import finished_folder, write
from gguf_cases import make_model, write_gguf

from thresher.cli import main as cli
from thresher.cli.parser import commands_of

Run = Callable[..., tuple[int, Any, str]]
# Command -> the words after it, in this order; {at} is the folder, and the last string lists keys of the object.
SHOWN = {
    "init": ("--config {at}/config.json --tokenizer {at}/model --out {at}/init", "parameters out"),
    "import-gguf": ("{at}/m.gguf --out {at}/imported", "architecture parameters tokens out"),
    "sft": ("{at}/recipe.toml --out {at}/warm", "steps out"),
    "plan": ("--recipe {at}/recipe.toml --gpu-memory 80GB", "fits phases"),
    "recipe": ("--show {at}/recipe.toml", "model rollout"),
    "reproduce": ("--list", "rows left_out"),
    "completion": ("bash", "shell script"),
    "train": ("{at}/recipe.toml --out {at}/run", "out"),
    "generate": ("--model {at}/model --prompt Who --max-new-tokens 2", "prompt_ids samples"),
    "rollout": ("--recipe {at}/recipe.toml --questions {at}/questions.jsonl --out {at}/r.jsonl", "trajectories out"),
    "eval": ("{at}/recipe.toml --limit 3 --out {at}/a", "questions out"),
    "compare": ("{at}/a {at}/a --out {at}/compared", "notes out"),
    "extract": (
        "--model {at}/model --questions {at}/questions.jsonl --index {at}/index --k 1 --template {at}/template.txt"
        " --set rollout.max_turn_tokens=4 --set rollout.max_passage_tokens=20 --out {at}/e.jsonl",
        "questions out",
    ),
    "score": ("--system search_r1 --transcripts {at}/scored.jsonl --out {at}/s.jsonl", "transcripts out"),
    "index plan": ("--passages 100 --kind bm25", "plans advice"),
    "index build": ("--corpus {at}/corpus.jsonl --encoder bm25 --out {at}/words", "passages out"),
    "index hybrid": ("{at}/index {at}/words --out {at}/both", "members out"),
    "index search": ("--index {at}/index --k 2 Anna", "question hits"),
    "index check": ("--index {at}/index --queries {at}/golds.jsonl --k 2", "recall queries"),
    "data convert": ("--in {at}/questions.jsonl --out {at}/c.jsonl", "sources questions out"),
    "data check": ("{at}/questions.jsonl", "questions"),
    "data show": ("{at}/questions.jsonl --n 1", "questions skipped"),
    "data sft": ("--kind closed-book --questions {at}/questions.jsonl --out {at}/w.jsonl", "records out"),
    "data invent": ("--out {at}/world", "out"),
    "data judge": ("--out {at}/contriever --steps 1", "out"),  # a name that says how the vectors are made
    "train-encoder": (
        "--records {at}/contrasts.jsonl --model {at}/contriever --out {at}/recomp --steps 1",
        "records steps out",
    ),
    "watch": ("{at}/run --tty", "step steps ended"),
    "report": ("{at}/run", "report"),
    "tokens": ("{at}/r.jsonl", "page"),
    "bench roofline": ("--chip H100 --model 0.5B", "rows"),
    "bench loss": ("--device cpu --hidden 8 --vocab 40 --tokens 32 --density 50 --peers none --out {at}/l", "rows out"),
}
# Work that takes too long here, or needs a GPU: command -> (module, function), its result, keys of the object.
LONG: dict[str, tuple[str, str, Any, str]] = {
    "bench step": ("thresher.bench.step", "run_step_bench", {"ours": 1}, "ours"),
    "bench train": ("thresher.bench.train", "run_train_bench", [{}], "rows"),
    "bench delta": (
        "thresher.bench.delta",
        "run_delta_bench",
        {"sides": {"ours": {"error": 0}}, "dtype": "float32"},
        "sides",
    ),
    "bench rollout": ("thresher.bench.rollout", "run_rollout_bench", [{}], "rows"),
    "bench decode": ("thresher.bench.decode", "run_decode_bench", [{}], "rows"),
    "bench attention": ("thresher.bench.attention", "run_attention_bench", [], "rows"),
    "bench retrieval": ("thresher.bench.retrieval", "run_retrieval_bench", [], "rows"),
    "bench gpu-check": ("thresher.bench.gpu_check", "run_gpu_check", [], "parts out"),
    "bench compile": ("thresher.bench.compile", "run_compile_bench", None, ""),
    "serve-retriever": ("thresher.retrieval.serving.server", "serve_folder", {"url": "http://h:1"}, "url"),
    "study kl": ("thresher.bench.studies.kl", "run_study", None, "found out"),
    "study credit": ("thresher.bench.studies.credit", "run_study", None, "found out"),
    "study mask": ("thresher.bench.studies.mask", "run_study", None, "found out"),
    "study leak": ("thresher.bench.studies.leak", "run_study", None, "found out"),
    "study systems": ("thresher.bench.studies.systems", "run_study", None, "found out"),
    "study partial": ("thresher.bench.studies.partial", "run_study", None, "found out"),
    "compare-methods": ("thresher.bench.studies.methods", "run_comparison", {"runs": 0}, "runs"),
    "demo": ("thresher.engine.world.stages", "demo", None, "em_after out"),
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return run(*words) -> status, the object on stdout, the text on stderr."""

    def play(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        status = cli.run([*words, "--json"])
        said = capsys.readouterr()
        return status, json.loads(said.out, parse_constant=pytest.fail), said.err

    return play


def test_every_command_is_here() -> None:
    below = commands_of(cli.build_parser()).items()
    names = [f"{name} {action}" for name, group in below for action in commands_of(group)]
    names += [name for name, command in below if not commands_of(command)]
    assert sorted(names) == sorted([*SHOWN, *LONG])


@pytest.mark.slow
def test_a_command_prints_one_object(run: Run, tmp_path: Path) -> None:
    at = finished_folder(tmp_path)
    asked = {"id": "a", "question": "Who is Anna Bell?", "gold_titles": ["Anna Bell"]}
    write(at / "golds.jsonl", asked)
    contrast = {"question": "Who?", "positive": "Anna", "negatives": ["Carl"]}
    write(at / "contrasts.jsonl", contrast, contrast)
    write_gguf(at / "m.gguf", *make_model("llama"))
    (at / "template.txt").write_text("{question} {passages}")
    for command, (words, keys) in SHOWN.items():
        status, found, said = run(*command.split(), *words.format(at=at).split())
        assert status == 0, f"{command}: {said}"
        assert isinstance(found, dict) and set(keys.split()) <= found.keys(), f"{command}: {list(found)}"
        assert said or command == "generate", f"{command} says nothing on stderr"
        if "out" in found:
            assert Path(found["out"]).exists()


@pytest.mark.parametrize("command", LONG)
def test_long_work_is_answered_for(command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, returned, keys = LONG[command]
    for name in ("kl", "credit", "mask", "leak", "systems", "partial"):
        write(tmp_path / f"{name}.json", {"found": 1})
    write(
        tmp_path / "summary.json",
        dict.fromkeys(("em_before", "em_after", "f1_before", "f1_after"), 0.5) | {"questions": 2, "seconds": 3.0},
    )
    monkeypatch.setattr("thresher.engine.reports.report.print_trajectories", lambda folder: print("shown"))
    monkeypatch.setattr(f"{module}.{function}", lambda *_, **__: returned)
    needed = {
        "serve-retriever": ["--index", "i"],
        "bench train": ["smollm2/read.toml"],
        "compare-methods": ["world.toml"],
        "study leak": ["--recipe", "eviomni/laptop.toml"],
    }
    named = needed.get(command, []) + (["--out", str(tmp_path)] if "out" in keys else [])
    status, found, _ = run(*command.split(), *named)
    assert status == 0 and set(keys.split()) <= found.keys()


def test_a_mistake_is_an_object_too(run: Run, tmp_path: Path) -> None:
    for words, sentence in (
        (["data", "check", str(tmp_path / "absent")], "absent: no such file"),
        (["data", "chekc", "x"], "there is no command data chekc; did you mean check?"),
        (["train", "r.toml"], "train needs --out"),
    ):
        status, found, said = run(*words)
        assert status == 2 and list(found) == ["error"] and sentence in found["error"]
        assert said == f"thresher: {found['error']}\n"


def test_of_several_ranks_the_first_prints_the_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []
    for run_id, rank in (("run", "0"), ("run", "1"), (None, "1")):  # without torchrun, RANK is something else's
        monkeypatch.setenv("RANK", rank)
        if run_id is None:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        assert cli.run(["recipe", "--show", "smollm2/read.toml", "--json"]) == 0
        printed.append(capsys.readouterr().out)
        assert cli.run(["data", "check", "absent", "--json"]) == 2
        assert "absent: no such file" in json.loads(capsys.readouterr().out)["error"]
    assert json.loads(printed[0]) == json.loads(printed[2]) and printed[1] == ""


def test_what_is_wrong_with_our_work_stands_beside_its_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thresher.bench.loss.run_loss_bench", lambda *_: [{"ms": float("inf")}])
    monkeypatch.setattr("thresher.bench.loss.failure", lambda rows: "ours is wrong")
    assert run("bench", "loss") == (1, {"rows": [{"ms": None}], "error": "ours is wrong"}, "thresher: ours is wrong\n")


def test_a_fault_of_ours_is_an_object_and_a_trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thresher.retrieval.datasets.summary.summarize", lambda path, on_question: [][1])
    status, found, said = run("data", "check", "x")
    assert status == 1 and found == {"error": "IndexError: list index out of range"} and "Traceback" in said


@pytest.mark.slow
def test_commands_of_a_chain_are_not_its_answer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(out: Path, plan: Any, command: Callable[[list[str]], None], say: Any) -> None:
        command(["data", "invent", "--out", str(tmp_path / "world")])
        raise cli.UserError("far enough")

    monkeypatch.setattr("thresher.engine.world.stages.demo", chain)
    status, found, said = run("demo", "--out", str(tmp_path / "demo"))
    assert (status, found) == (2, {"error": "far enough"}) and "an invented world" in said


def test_help_and_versions(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    assert cli.run(["train", "--help", "--json"]) == 0 and capsys.readouterr().out.startswith("usage: thresher train")
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("thresher ")
    status, found, _ = run("train", "--version")
    assert status == 0 and {"thresher", "torch", "triton", "python"} == found.keys()
