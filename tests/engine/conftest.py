"""A chat model served at a URL, for one test."""

from collections.abc import Iterator

import pytest
from chat_server import ChatServer


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server
