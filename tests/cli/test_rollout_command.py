"""Tests of `thresher rollout`: exact tokens with log-probs, in a file that survives a kill and that `score` reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy
from evaluate_cases import SHORT, refusal, write_asked
from stored_cases import reweighted, stored

from thresher.cli import main as cli
from thresher.common.records import RecordLog
from thresher.engine.rollout.rollout import Rollout, seed_of
from thresher.engine.systems import load_system
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

PROMPT = "<search> or <answer>: {question}\n"  # the tiny policy was taught to continue it
Run = Callable[..., Path]


@pytest.fixture
def words(
    tiny_model_folder: Path, tiny_index_folder: Path, tiny_questions: list[Question], tmp_path: Path
) -> list[str]:
    """Return a rollout command of seven questions that lacks only --out."""
    asked = write_asked(tmp_path, tiny_questions)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    where = ["--model", str(tiny_model_folder), "--index", str(tiny_index_folder), "--questions", str(asked)]
    sets = ["--set", f"system.template={tmp_path / 'prompt.txt'}", "--set", "rollout.max_policy_tokens=80"]
    return ["rollout", *where, "--system", "search_r1", *SHORT, *sets]


@pytest.fixture
def run(words: list[str], tmp_path: Path) -> Run:
    """Return run(name, *more words) -> the file."""

    def once(name: str, *more: str) -> Path:
        assert cli.run([*words, *more, "--out", str(tmp_path / name)]) == 0
        return tmp_path / name

    return once


def test_a_line_is_a_trajectory_with_its_tokens_and_log_probs(
    run: Run, tiny_questions: list[Question], tiny_policy: Policy, tiny_tokenizer: Tokenizer, capsys: Any
) -> None:
    found = stored(run("out.jsonl", "--n", "3", "--seed", "5", "--temperature", "0.8"))
    places = [
        (question.id, number, sample) for number, question in enumerate(tiny_questions[:7]) for sample in range(3)
    ]
    assert [(one["id"], one["group"], one["sample"]) for one in found] == places
    for one, (_, number, sample) in zip(found, places, strict=True):
        question = tiny_questions[number]
        assert (one["question"], one["golden_answers"]) == (question.question, list(question.golds))
        assert (one["seed"], one["temperature"]) == (seed_of("rollout", 5, number, sample), 0.8)
        ids = [token for segment in one["segments"] for token in segment["ids"]]
        logits_TV = tiny_policy.logits(torch.tensor(ids))[:, : tiny_tokenizer.vocab_size].float() / 0.8
        fresh_TV, at = torch.log_softmax(logits_TV, -1), 0
        for segment in one["segments"]:
            assert segment["text"] == tiny_tokenizer.decode(segment["ids"])
            assert ("logprobs" in segment) == (segment["source"] == Source.POLICY)
            if "logprobs" in segment:
                rows = torch.arange(at, at + len(segment["ids"]))
                fresh = fresh_TV[rows - 1, torch.tensor(segment["ids"])]
                torch.testing.assert_close(torch.tensor(segment["logprobs"]), fresh, rtol=0, atol=1e-4)
            at += len(segment["ids"])
    assert any(one["searches"] for one in found)
    assert len({json.dumps(one["segments"]) for one in found}) > 7  # samples of a question differ
    said = capsys.readouterr().out
    assert "tokens/s" in said and "rollout 21/21" in said


@pytest.mark.slow
def test_what_a_sample_draws_depends_on_its_place_alone(run: Run, tiny_policy: Policy, tmp_path: Path) -> None:
    needs_invariant_policy(tiny_policy)
    wide = stored(run("wide.jsonl", "--n", "3"))
    assert [one for one in wide if one["sample"] < 2] == stored(run("narrow.jsonl", "--n", "2", "--max-num-seqs", "3"))
    assert wide[:6] == stored(run("short.jsonl", "--n", "3", "--limit", "2"))
    first, second = stored(run("greedy.jsonl", "--n", "2", "--temperature", "0", "--limit", "1"))
    assert first["segments"] == second["segments"] and first["temperature"] == 0
    (tmp_path / "questions.jsonl").write_text('{"question": "Who?"}\n')  # gold answers are optional
    (one,) = stored(run("out.jsonl"))
    assert one["golden_answers"] == [] and one["id"] == "0"


@pytest.mark.parametrize("half", [b"", b'{"id": "q', b"\xc3"], ids=["between lines", "in a line", "in a character"])
@pytest.mark.fast_cases(1)
def test_a_killed_rollout_goes_on_to_the_same_bytes(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_policy: Policy, half: bytes
) -> None:
    needs_invariant_policy(tiny_policy)
    sampling = ("--n", "2", "--seed", "9")
    whole = run("whole.jsonl", *sampling).read_bytes()
    cut = tmp_path / "cut.jsonl"
    append = RecordLog.append

    def killed(self: RecordLog, *records: Any) -> None:
        append(self, *records[:5])  # of six: sample 0 of a question, and not sample 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RecordLog, "append", killed)
        assert cli.run([*words, *sampling, "--max-num-seqs", "3", "--out", str(cut)]) == 130
    assert cut.read_bytes() == b"".join(whole.splitlines(keepends=True)[:5])
    with cut.open("ab") as file:
        file.write(half)
    asked: list[int] = []
    real = Rollout.run

    def counted(self: Rollout, jobs: Any, *more: Any, **options: Any) -> Any:
        asked.append(len(jobs))
        return real(self, jobs, *more, **options)

    monkeypatch.setattr(Rollout, "run", counted)
    assert run("cut.jsonl", *sampling, "--resume", "--max-num-seqs", "4").read_bytes() == whole
    assert asked == [8, 1]  # the rest, and nothing twice
    assert run("cut.jsonl", *sampling, "--resume").read_bytes() == whole and asked == [8, 1]
    assert run("new.jsonl", *sampling, "--resume").read_bytes() == whole  # there is no file to resume


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return refused(*words) -> the error sentence; no file changes. Runs in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def refuse(*command: str) -> str:
        before = files()
        message = refusal(capsys, *command)
        assert files() == before
        return message

    return refuse


def test_a_file_of_another_rollout_is_refused(
    run: Run, words: list[str], refused: Callable[..., str], tiny_model_folder: Path, tmp_path: Path
) -> None:
    other = reweighted(tiny_model_folder, tmp_path / "other")
    Path("other.txt").write_text("Another: {question}\n")
    out = run("out.jsonl", "--n", "2", "--limit", "4")
    with out.open("a") as file:
        file.write('{"id')
    cases: list[tuple[str, str]] = [
        ("", "exists already; choose another file, or continue this one with --resume"),
        ("--resume --n 3", ':3: its id is "q1", not "q0"; resume with the questions, --n'),
        ("--resume --n 1", ':2: its id is "q0", not "q1"; resume with the questions, --n'),
        ("--resume --limit 3", ":7: only 6 trajectories were asked for; resume with the --n and --limit"),
        ("--resume --seed 1", ":1: its seed is "),
        ("--resume --temperature 0.5", ":1: its temperature is 1.0, not 0.5; resume with"),
        ("--resume --set system.template=other.txt", ":1: it begins with another prompt; resume with the model"),
        (
            "--resume --set rollout.max_policy_tokens=79",
            ":1: it was sampled with another model, system, index or limits",
        ),
        (f"--resume --model {other}", ":1: it was sampled with another model, system, index or limits"),
    ]
    for more, message in cases:
        assert message in refused(*words, "--n", "2", "--limit", "4", "--out", str(out), *more.split())
    for line in (b"[1]\n", b"{}\n", b"not json\n", b"\xff\n"):
        out.write_bytes(line)
        assert f"{out}:1: " in refused(*words, "--out", str(out), "--resume")


def test_wrong_input_is_one_sentence_and_leaves_no_file(words: list[str], refused: Callable[..., str]) -> None:
    Path("bad.jsonl").write_text("{\n")
    cases: list[tuple[str, str | None, str]] = [
        ("--model", None, "rollout: no model; give --model FOLDER, or --recipe FILE"),
        ("--system", None, "rollout: no system; give --system NAME, or --recipe FILE"),
        (
            "--index",
            None,
            "search_r1 searches, but the recipe names no index or server; set retrieval.index to a folder",
        ),
        ("--questions", "bad.jsonl", "bad.jsonl:1: not valid JSON"),
        ("--index", "absent", "absent"),
        ("--out", "out.json", "out.json: expected a name that ends in .jsonl"),
        ("--out", "nowhere/out.jsonl", "the folder nowhere does not exist; make it first"),
        ("--set", "rollout.max_context=4", "question q0: its prompt of "),
    ]
    for flag, value, message in cases:
        command = [*words, "--out", "out.jsonl"]
        if value is None:
            at = command.index(flag)
            del command[at : at + 2]
        else:
            command += [flag, value]
        assert message in refused(*command)


def test_logits_that_are_not_finite_are_refused_by_every_command_that_samples(
    words: list[str],
    tiny_policy: Policy,
    tiny_model_folder: Path,
    tiny_index_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_policy.embed_VH.mul_(100)
    tiny_policy.norm.mul_(5e37)  # all weights are finite, but hardly any logit
    tiny_policy.save(tiny_model_folder)
    out, model = str(tmp_path / "out"), ["--model", str(tiny_model_folder)]
    index = ["--index", str(tiny_index_folder)]
    commands: dict[str, list[str]] = {
        "generate": ["--prompt", "Who?"],
        "generate --json": ["--prompt", "Who?", "--json", "--temperature", "0"],
        "eval": [*words[words.index("--index") :], "--out", out],
        "rollout": [*words[words.index("--index") :], "--out", f"{out}.jsonl"],
        "extract": [*index, "--questions", words[words.index("--questions") + 1], "--out", f"{out}-e.jsonl"],
    }
    for name, more in commands.items():
        said = refusal(capsys, *name.split()[:1], *model, *more)
        assert f"{tiny_model_folder}: the log-prob of a token is not finite" in said, name


def test_a_recipe_says_what_the_flags_do_not(
    tiny_model_folder: Path, tiny_index_folder: Path, tiny_questions: list[Question], tmp_path: Path
) -> None:
    asked = write_asked(tmp_path, tiny_questions)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "r.toml").write_text(
        f'[model]\npath = "{tiny_model_folder}"\n[system]\nname = "search_r1"\ntemplate = "{tmp_path}/prompt.txt"\n'
        f'[retrieval]\nindex = "{tiny_index_folder}"\nk = 2\n[run]\nseed = 5\n'
        "[rollout]\ntemperature = 0.7\nmax_turn_tokens = 20\nmax_context = 500\n"
    )
    command = ["rollout", "--recipe", str(tmp_path / "r.toml"), "--questions", str(asked), "--limit", "1"]
    assert cli.run([*command, "--out", str(tmp_path / "a.jsonl")]) == 0
    (one,) = stored(tmp_path / "a.jsonl")
    assert (one["temperature"], one["seed"]) == (0.7, seed_of("rollout", 5, 0, 0))
    assert cli.run([*command, "--seed", "6", "--temperature", "1", "--out", str(tmp_path / "b.jsonl")]) == 0
    (one,) = stored(tmp_path / "b.jsonl")
    assert (one["temperature"], one["seed"]) == (1.0, seed_of("rollout", 6, 0, 0))


@pytest.mark.parametrize("system", ["search_r1", "eval_rar", "naive_grpo", "eviomni", "arena"])
@pytest.mark.fast_cases(2)
def test_score_reads_the_file(
    words: list[str], system: str, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Including given passages, gold indices and branches."""
    asked = tmp_path / "questions.jsonl"
    if load_system(system, {}).given_passages:
        passages = [{"id": "a", "title": "T", "text": "Anna Bell."}, {"id": "b", "title": "U", "text": "Carl Dorn."}]
        records = [{**json.loads(line), "passages": passages, "gold_indices": [2]} for line in asked.open()]
        asked.write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "prompt.txt").write_text("{passages}\n" + PROMPT)
    out, rewards = tmp_path / "out.jsonl", tmp_path / "rewards.jsonl"
    assert cli.run([*words, "--system", system, "--n", "2", "--out", str(out)]) == 0
    for more in ([], ["--tokenizer", str(tiny_model_folder)]):
        score = ["score", "--system", system, "--transcripts", str(out), "--out", str(rewards), *more]
        assert cli.run(score) == 0, capsys.readouterr().err
        assert [one["id"] for one in stored(rewards)] == [one["id"] for one in stored(out)]
    if system in ("eviomni", "arena"):
        assert stored(out)[0]["gold_indices"] == [2] and len(stored(out)[0]["passages"]) == 2
