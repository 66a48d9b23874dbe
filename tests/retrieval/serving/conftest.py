"""Servers for one test, over a retriever that answers as it is told."""

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
    retriever.go.set()  # or the server's thread would wait for it


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """serve(retriever, **settings) -> a running Server, ended with the test."""
    running: list[Server] = []

    def start(retriever: Retriever, **settings: Any) -> Server:
        server = Server(retriever, SERVED, Settings(**settings), port=0)
        running.append(server.__enter__())
        return server

    yield start
    for server in running:
        server.__exit__(None, None, None)
