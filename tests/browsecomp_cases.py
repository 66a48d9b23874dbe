"""An invented question and corpus in the layout of BrowseComp-Plus, and the obfuscation of its questions."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

CANARY = "SAMPLE DATA OF A TEST. canary GUID sample:00000000-0000-0000-0000-000000000000"
CORPUS: list[dict[str, Any]] = [
    {"docid": "11", "text": '---\ntitle: "A: town"\ndate: 2001-01-01\n---\nA town in the hills.', "url": "http://a"},
    {"docid": "22", "text": "---\ntitle: Mayors\n---\nAnna Bell is the mayor of the town.", "url": "http://b"},
    {"docid": "33", "text": "Nothing else.", "url": "http://c"},
    {"docid": "44", "text": " ", "url": "http://d"},
]
RECORD: dict[str, Any] = {
    "query_id": "769",
    "query": "Who is the mayor of the town?",
    "answer": "Anna Bell",
    "evidence_docs": CORPUS[:2],
    "gold_docs": CORPUS[1:2],
    "negative_docs": CORPUS[2:3],
}


def obfuscated(value: Any, canary: str = CANARY) -> Any:
    """Return the value with all its strings obfuscated, except for a "query_id"."""
    if isinstance(value, dict):
        return {key: item if key == "query_id" else obfuscated(item, canary) for key, item in value.items()}
    if isinstance(value, list):
        return [obfuscated(item, canary) for item in value]
    data = value.encode()
    key = (hashlib.sha256(canary.encode()).digest() * (len(data) // 32 + 1))[: len(data)]
    return base64.b64encode((int.from_bytes(data) ^ int.from_bytes(key)).to_bytes(len(data))).decode()
