"""Tests of `thresher index ..` as a person runs it: stages, figures, parameters, and errors in one sentence."""

import json
from pathlib import Path

import pytest

from thresher.cli import main as cli


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [json.dumps({"title": f"Town {n}", "text": f"town {n} lies by river {n % 7}"}) for n in range(300)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus.jsonl"


def run(*arguments: object) -> int:
    return cli.run(["index", *map(str, arguments)])


def test_an_approximate_index_from_build_to_check(corpus, tmp_path, capsys):
    folder, queries = tmp_path / "ix", tmp_path / "q.jsonl"
    queries.write_text(json.dumps({"id": "a", "question": "town 17", "gold_titles": ["Town 17"]}) + "\n")
    build = ("build", "--corpus", corpus, "--dim", 64, "--kind", "hnsw", "--recall", 0.9, "--out", folder)
    assert run(*build) == 0
    out = capsys.readouterr().out
    for stage in ("counting words 300/300", "encoding 300/300", "linking 300/300", "exact answers 300/300", "tuning"):
        assert stage in out
    assert "HNSW32" in out and "recall_at_5" in out and "efSearch" in out
    assert run("check", "--index", folder, "--queries", queries, "--k", 1, "--set", "efSearch=50", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["recall"] == 1
    assert run("search", "--index", folder, "--queries", queries, "--k", 2, "--out", tmp_path / "out.jsonl") == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["hits"][0]["title"] == "Town 17"
    capsys.readouterr()
    for flags, expected in (
        (["--set", "nprobe=4"], "no search parameter 'nprobe'; this index has efSearch, candidates"),
        (["--set", "efSearch=many"], "efSearch is 'many'; expected a whole number"),
        (["--gpu"], "HNSW32 has no form for GPUs"),
        (["--k", "301"], "k is 301, but the corpus holds 300 passages; lower k"),
    ):
        assert run("check", "--index", folder, "--queries", queries, *flags) == 2
        message = capsys.readouterr().err
        assert expected in message and message.count("\n") == 1
    assert run(*build) == 2
    assert "ix: exists already" in capsys.readouterr().err


def test_an_unfinished_build_is_gone_on_with_or_refused(corpus, tmp_path, capsys, monkeypatch):
    from thresher.retrieval.building import build as build_module

    build = ("build", "--corpus", corpus, "--dim", 64, "--kind", "ivf", "--out", tmp_path / "ix")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_measure", interrupted)
        assert run(*build) == 130
    assert "ix.building keeps what is done; " in capsys.readouterr().err
    assert run("check", "--index", tmp_path / "ix", "--queries", corpus) == 2
    assert "ix: no such folder; build the index first" in capsys.readouterr().err
    with corpus.open("a") as file:
        file.write("\n" + json.dumps({"title": "New", "text": "a new town"}))
    assert run(*build) == 2
    assert "ix.building: an unfinished index over another corpus" in capsys.readouterr().err
    corpus.write_text("\n".join(corpus.read_text().splitlines()[:300]))
    assert run(*build) == 0
    out = capsys.readouterr().out
    assert "encoding" not in out.splitlines()[0] and "tuning" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "ix"]


def test_one_question_prints_its_passages(corpus, tmp_path, capsys):
    assert run("build", "--corpus", corpus, "--encoder", "bm25", "--out", tmp_path / "ix") == 0
    capsys.readouterr()
    assert run("search", "--index", tmp_path / "ix", "--k", 2, "where is town 17?") == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("1. Town 17  [") and "town 17 lies by river 3" in out and "\n2. " in out and "\n3. " not in out
    )
    assert run("search", "--index", tmp_path / "ix", "zebra") == 0
    assert capsys.readouterr().out == "no passage has a word of the question\n"
    for words, expected in (
        ([], "expected either a question"),
        (["x", "--queries", "q.jsonl", "--out", "o"], "got both"),
        (["--queries", "q.jsonl"], "--queries FILE and --out FILE go together"),
        (["x", "--out", "o"], "go together; one question's passages are printed"),
        ([" "], "the question is empty"),
    ):
        assert run("search", "--index", tmp_path / "ix", *words) == 2
        message = capsys.readouterr().err
        assert expected in message and message.count("\n") == 1


def test_a_flag_that_would_do_nothing_is_refused(corpus, tmp_path, capsys):
    for words, expected in (
        (["--device", "cpu"], "--device belongs to --encoder, which is not given"),
        (["--kind", "bm25", "--dim", "64"], "--dim is for vectors, and bm25 counts words; leave it out"),
        (["--encoder", "bm25", "--dim", "64"], "--dim is for vectors, and bm25 counts words; leave it out"),
        (["--kind", "bm25", "--encoder", "m"], "--encoder is for vectors"),
        (["--kind", "bm25", "--sample", "9"], "--sample is for vectors"),
    ):
        assert run("plan", "--passages", 100, *words) == 2
        assert expected in capsys.readouterr().err
    build = ("build", "--corpus", corpus, "--encoder", "bm25", "--dim", 64, "--out", tmp_path / "ix")
    assert run(*build) == 2
    assert "--dim belongs to the encoder lexical, and bm25 takes none" in capsys.readouterr().err
