"""What watch.js does on the live page, run in node: a newer page, an answer of an error, a cut one, and none."""

import json
from importlib.resources import files
from typing import Any

import pytest
from browser import run_page

from thresher.engine.reports.watch import FIRST, FOOT

LOST = "no answer from thresher watch: this page shows what it sent last"
SCRIPT = files("thresher.engine.reports").joinpath("watch.js").read_text(encoding="utf-8")
LOOK = """
const foot = document.getElementById("watch");
const look = () => ({ foot: foot.textContent, title: document.title, main: texts("main")[0] });
"""


def page(text: str) -> str:
    sections = f"<h2>Reward</h2><details>{text}</details><h2>Samples</h2><details></details>"
    picture = '<img loading="lazy" src="data:,">'
    return f"<html><head><title>run {text}</title></head><body><main>{sections}{picture}</main>\n{FOOT}\n</html>"


def state(version: int, says: str) -> dict[str, Any]:
    return {"text": json.dumps({"version": version, "says": says})}


def watch(scenario: str, states: list[dict[str, Any]], pages: list[dict[str, Any]]) -> Any:
    return run_page(page("one"), LOOK + scenario, scripts=[SCRIPT], answers={"/state": states, "/": pages})


def test_a_newer_page_takes_the_place_of_the_old_one() -> None:
    found = watch(
        """
        const seen = [look()];
        seen.push(await tick(), look());
        document.querySelectorAll("details")[1].open = true;
        scrollY = 500;
        document.querySelectorAll("h2").forEach((section, n) => { section.top = 100 + 1000 * n; });
        seen.push(await tick(), look());
        const open = document.querySelectorAll("details").map((details) => details.open);
        document.hidden = true;
        await tick();
        seen.push(await tick());
        return { seen, open, asked, scrolled: log.scrolled, lazy: texts("img[loading]").length };
        """,
        [state(1, "step 1"), state(1, "step 2"), state(2, "step 3"), state(2, "step 4"), state(2, "step 5")],
        [{"text": page("two")}],
    )
    one, two = ({"title": f"run {name}", "main": f"Reward{name}Samples"} for name in ("one", "two"))
    assert found["seen"] == [
        {"foot": "step 1"} | one,
        3000,
        {"foot": "step 2"} | one,
        3000,
        {"foot": "step 3"} | two,
        12000,
    ]
    assert found["asked"] == ["/state", "/state", "/state", "/", "/state", "/state"]
    assert found["open"] == [False, True] and found["lazy"] == 0
    # The section that is read was 100 below the top and is at 0 on the new page: the page is moved so far back.
    assert found["scrolled"] == [[0, 500], [0, -100]]


@pytest.mark.parametrize(
    ("states", "pages"),
    [
        ([{"error": True}], []),
        ([{"status": 500, "text": '{"version": 2, "says": "wrong"}'}], []),
        ([{"cut": True}], []),
        ([{"text": '{"version": 2, "sa'}], []),
        ([state(2, "step 2")], [{"error": True}]),
        ([state(2, "step 2")], [{"status": 403, "text": page("refused")}]),
        ([state(2, "step 2")], [{"cut": True, "text": page("cut")}]),
        ([state(2, "step 2")], [{"text": FIRST.format(says="a server that was started anew")}]),
    ],
    ids=["no-server", "state-500", "state-cut", "state-half", "no-page", "page-403", "page-cut", "page-being-drawn"],
)
def test_after_a_failed_answer_the_page_stays_and_is_asked_for_again(
    states: list[dict[str, Any]], pages: list[dict[str, Any]]
) -> None:
    found = watch(
        "await tick(); const lost = look(); const ms = await tick(); return { lost, ms, again: look() };",
        [state(1, "step 1"), *states, state(2, "step 3")],
        [*pages, {"text": page("two")}],
    )
    assert found["lost"] == {"foot": LOST, "title": "run one", "main": "RewardoneSamples"}
    assert found["ms"] == 3000
    assert found["again"] == {"foot": "step 3", "title": "run two", "main": "RewardtwoSamples"}
