"""Test hybrid indexes: the sum over ranks, ties by row, and the refusal of members other than those of the build."""

import json
import shutil
from pathlib import Path

import pytest

from thresher.common.errors import UserError
from thresher.retrieval.building.build import build_index
from thresher.retrieval.corpus import Corpus, read_corpus
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.bm25 import Bm25Settings, build_bm25
from thresher.retrieval.indexes.hybrid import Hybrid, build_hybrid, load_hybrid
from thresher.retrieval.indexes.load import load_retriever
from thresher.retrieval.passages import Passage
from thresher.retrieval.retriever import Hit, Retriever, check_positive


class Scripted(Retriever):
    """Retriever that returns given rows in their order, whatever the query."""

    def __init__(self, corpus: Corpus, rows: list[int]) -> None:
        super().__init__()
        self.corpus = corpus
        self.rows = rows
        self.asked: list[int] = []

    def check_k(self, k: int) -> None:
        check_positive(k, len(self.corpus))

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        self.asked.append(k)
        return [[Hit(row, self.corpus[row], 9.0) for row in self.rows[:k]] for _ in queries]


def letters(text: str = "abcdef") -> Corpus:
    return Corpus([Passage(letter, letter, letter) for letter in text])


def join(*rows: list[int], depth: int = 100) -> Hybrid:
    corpus = letters()
    return Hybrid([Scripted(corpus, each) for each in rows], depth)


def pairs(hybrid: Hybrid, k: int) -> list[tuple[int, float]]:
    return [(hit.row, hit.score) for hit in hybrid.search(["q"], k)[0]]


def test_ranks_are_summed():
    # Row 2 is third and first, row 0 first and absent, row 5 second and second.
    assert pairs(join([0, 5, 2], [2, 5]), 3) == [(2, 1 / 63 + 1 / 61), (5, 1 / 62 + 1 / 62), (0, 1 / 61)]


def test_equal_sums_go_by_row():
    # Each row has each rank once, so all sums are equal.
    assert [row for row, _ in pairs(join([4, 1], [1, 4]), 2)] == [1, 4]
    assert [row for row, _ in pairs(join([5, 3, 1], [3, 1, 5], [1, 5, 3]), 2)] == [1, 3]


def test_the_order_of_members_changes_no_bit():
    lists = [[5, 3, 1, 0], [3, 1, 4, 5], [0, 5, 3, 2]]
    assert pairs(join(*lists), 6) == pairs(join(*reversed(lists)), 6) == pairs(join(lists[1], lists[0], lists[2]), 6)


def test_members_are_asked_for_the_depth_or_for_k_where_that_is_more():
    hybrid = join([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], depth=2)
    assert [row for row, _ in pairs(hybrid, 2)] == [0, 5]
    pairs(hybrid, 4)
    assert [member.asked for member in hybrid.members] == [[2, 4], [2, 4]]
    deep = join([0], [1])
    pairs(deep, 1)
    assert deep.members[0].asked == [6]  # the whole corpus has fewer than 100 passages


def test_a_query_that_no_member_can_answer():
    assert join([], []).search(["q", " "], 3) == [[], []]


def test_members_of_other_corpora_and_too_few_of_them_are_refused():
    with pytest.raises(UserError, match="index 2 is of another corpus"):
        Hybrid([Scripted(letters(), []), Scripted(letters("abcdeg"), [])])
    with pytest.raises(UserError, match="at least 2 indexes, got 1"):
        join([0])
    with pytest.raises(UserError, match="depth is 0"):
        join([0], [1], depth=0)
    remote = Scripted(letters(), [])
    del remote.corpus
    with pytest.raises(UserError, match="Scripted holds no corpus"):
        Hybrid([remote, remote])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Build a corpus, two indexes and their hybrid in one folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"title": f"t{row}", "text": f"word{row} word{row // 3} common"}) + "\n" for row in range(30)
        )
    )
    corpus = read_corpus(home / "corpus.jsonl")
    build_bm25(corpus, home / "bm25")
    build_index(corpus, LexicalEncoder.fit([passage.text for passage in corpus], 64), home / "lexical")
    build_hybrid([home / "bm25", home / "lexical"], home / "hybrid", load_retriever, depth=10)
    return home


def ask(folder: Path) -> list[list[tuple[int, float]]]:
    hybrid = load_retriever(folder / "hybrid")
    return [[(hit.row, hit.score) for hit in hits] for hits in hybrid.search(["word2 word7", "common word29"], 4)]


def test_loaded_it_is_the_sum_of_its_members(folder):
    hybrid = load_retriever(folder / "hybrid")
    assert isinstance(hybrid, Hybrid) and hybrid.depth == 10
    by_hand = Hybrid([load_retriever(folder / "bm25"), load_retriever(folder / "lexical")], 10)
    assert [[(hit.row, hit.score) for hit in hits] for hits in by_hand.search(["word2 word7"], 4)] == ask(folder)[:1]
    # The members share one corpus in memory.
    assert all(member.corpus is hybrid.corpus for member in hybrid.members)
    before = ask(folder)
    assert ask(folder.rename(folder.with_name("moved"))) == before  # all folders move together
    with pytest.raises(UserError, match="the index was built from another corpus"):
        load_hybrid(folder.with_name("moved") / "hybrid", letters(), load_retriever)


def test_a_member_that_was_built_anew_or_is_gone_is_refused(folder):
    shutil.rmtree(folder / "bm25")
    with pytest.raises(UserError, match=r"its member .*bm25 is no longer there"):
        load_hybrid(folder / "hybrid", None, load_retriever)
    build_bm25(read_corpus(folder / "corpus.jsonl"), folder / "bm25", settings=Bm25Settings(k1=0.9))
    with pytest.raises(UserError, match=r"its member .*bm25 was rebuilt since"):
        load_hybrid(folder / "hybrid", None, load_retriever)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 7}, "was changed after the index was built"),
        ({"depth": "deep"}, '"members" should be a list and "depth" a whole number'),
        ({"members": [{"manifest_sha256": "0"}]}, 'a member lacks its "paths"'),
    ],
)
def test_damage_is_reported_in_a_sentence(folder, change, message):
    path = folder / "hybrid/hybrid.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        load_hybrid(folder / "hybrid", None, load_retriever, verify=False)


def test_what_cannot_be_joined_leaves_nothing(folder):
    build_bm25(letters(), folder / "other")
    before = sorted(folder.rglob("*"))
    for members, message in (
        (["bm25", "bm25"], "named twice"),
        (["bm25", "hybrid"], "is a hybrid index itself"),
        (["bm25"], "at least 2 indexes"),
        (["bm25", "nowhere"], "no such folder"),
        (["bm25", "other"], "another corpus"),
    ):
        with pytest.raises(UserError, match=message):
            build_hybrid([folder / name for name in members], folder / "new", load_retriever)
    with pytest.raises(UserError, match="exists already"):
        build_hybrid([folder / "bm25", folder / "lexical"], folder / "hybrid", load_retriever)
    with pytest.raises(UserError, match="an index of kind 'bm25', expected hybrid"):
        load_hybrid(folder / "bm25", None, load_retriever)
    assert sorted(folder.rglob("*")) == before
