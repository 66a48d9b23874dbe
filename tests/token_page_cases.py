"""Shared by the tests of token pages: a page's data and elements, and the steps of a scenario."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u202e\x1b[31m"
OPEN = """
const detail = () => Object.fromEntries(texts("#detail dt").map((name, n) => [name, texts("#detail dd")[n]]));
const spans = (s) => document.querySelectorAll(`.sample[data-s="${s}"] span[data-at]:not([data-b])`);
const option = (id, value) => { const box = document.getElementById(id); box.value = value; fire("change", box); };
"""


class Elements(HTMLParser):
    """Every element of a page, with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def halves(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<f2")
