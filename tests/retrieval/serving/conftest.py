"""Fixtures: servers for one test, over a scripted retriever."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from retrieval_server_cases import SERVED, Scripted

from thresher.retrieval.retriever import Retriever
from thresher.retrieval.serving.app import Settings
from thresher.retrieval.serving.server import Server


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    retriever = Scripted()
    yield retriever
    retriever.go.set()  # otherwise the server's thread would wait for it


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Return serve(retriever, **settings) -> a running Server, which ends with the test."""
    running: list[Server] = []

    def start(retriever: Retriever, **settings: Any) -> Server:
        server = Server(retriever, SERVED, Settings(**settings), port=0)
        running.append(server.__enter__())
        return server

    yield start
    for server in running:
        server.__exit__(None, None, None)
