"""`thresher index ..`, what builds an index and asks it, and `serve-retriever`. The work is retrieval's."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from thresher.cli import flags
from thresher.cli.flags import Count, Device, Float, Port, SearchParameters, Texts, Verify, checked
from thresher.cli.parser import POSITIONAL, REPEATED, Command, Group
from thresher.common import console, signals
from thresher.common.errors import UserError
from thresher.engine.config.recipe import parse_overrides

if TYPE_CHECKING:
    from thresher.retrieval.building.plan import IndexPlan
    from thresher.retrieval.encoders import Encoder

INDEX = Group(
    "index",
    "plan, build, join, search or check an index",
    80,
    "thresher index build --corpus corpus.jsonl --out indexes/mine",
    "ACTION",
)


class Plan(
    Command,
    group=INDEX,
    help="predict the memory, disk and time of an index",
    place=10,
    example="thresher index plan --passages 21015324 --dim 768 --memory 16GB",
):
    passages: Annotated[Count, "N", "number of passages"]
    dim: Annotated[Count | None, "D", "dimension of the vectors; default: the encoder's, else 768"] = None
    kind: Annotated[
        Texts | None,
        REPEATED,
        "index kind, as in index build, or bm25; default: all kinds with vectors; may be repeated",
    ] = None
    memory: Annotated[str | None, "SIZE", "memory limit, such as 16GB; default: this machine's"] = None
    encoder: Annotated[
        str | None, "DIR", "model folder, or lexical, to time the encoding; bm25: same as --kind bm25"
    ] = None
    device: Annotated[Device | None, "device of --encoder; default: cpu"] = None
    sample: Annotated[Count | None, "N", "number of vectors for the calibration; default: 65536"] = None
    disk: Annotated[
        str, "FOLDER", "future folder of the index, for the speed of its disk; default: the current folder"
    ] = "."
    out: Annotated[str | None, "FILE", "also write the plan to this JSON file"] = None

    def __call__(self) -> None:
        from thresher.common.files import atomic_write_text, show_bytes
        from thresher.common.machine import cpu_memory
        from thresher.retrieval.building.plan import (
            ALL,
            SAMPLE,
            WORDS,
            Calibration,
            advice,
            disk_rate,
            encode_rate,
            plan,
        )
        from thresher.retrieval.indexes.kinds import parse_memory

        if self.encoder == WORDS:  # as `index build` names it: an index without vectors
            self.encoder, self.kind = None, [*(self.kind or []), WORDS]
        words = all(kind == WORDS for kind in self.kind or [ALL])
        self._check(words)
        memory = cpu_memory()[0] if self.memory is None else parse_memory(self.memory)
        dim, encoded = self.dim or 768, None
        if self.encoder is not None:
            encoder = self._encoder()
            dim, encoded = self.dim or encoder.dim, encode_rate(encoder)
        calibration = Calibration(dim, self.sample or SAMPLE)
        sample, threads, load = calibration.sample, calibration.threads, os.getloadavg()[0]
        console.console.print(f"Measuring this machine for up to a minute: samples of {sample:,}, {threads} threads.")
        if load > 0.5 * (os.cpu_count() or 1):
            console.console.print(f"It is busy (load {load:.1f}); on an idle one all times are shorter.")
        written = disk_rate(self.disk)
        with console.stages() as on_stage:
            plans = plan(self.passages, dim, self.kind or [ALL], memory, calibration, written, on_stage)
        shape = f"{self.passages:,} passages" + ("" if words else f" x {dim}")
        _print_plans(f"{shape}, {show_bytes(memory)} of memory, disk {show_bytes(written)}/s", plans)
        console.console.print(self._encoding_note(encoded, words, plans), soft_wrap=True)
        advised = advice(self.passages, dim, memory)
        if not words:
            console.console.print(advised[0].upper() + advised[1:] + ".", soft_wrap=True)
        record: dict[str, Any] = {"passages": self.passages, "dim": dim, "memory_bytes": memory}
        record |= {
            "threads": threads,
            "sample": sample,
            "disk_bytes_per_second": written,
            "encoded_per_second": encoded,
        }
        record |= {"plans": [asdict(row) for row in plans], "advice": advised}
        console.answer(record)
        if self.out is not None:
            atomic_write_text(self.out, json.dumps(record, indent=2) + "\n")

    def _check(self, words: bool) -> None:
        if self.device is not None and self.encoder is None:
            raise UserError("--device belongs to --encoder, which is not given; add --encoder DIR, or leave it out")
        for flag in ("dim", "encoder", "sample") if words else ():
            if getattr(self, flag) is not None:
                raise UserError(f"--{flag} is for vectors, and bm25 counts words; leave it out")

    def _encoder(self) -> "Encoder":
        from thresher.retrieval.encoders.lexical import DEFAULT_DIM, LexicalEncoder

        if self.encoder is not None and self.encoder != LexicalEncoder.name:
            from thresher.retrieval.encoders.learned import load_encoder

            return load_encoder(self.encoder, device=self.device or "cpu")
        from thresher.retrieval.building.plan import PASSAGE

        if self.device is not None:
            raise UserError("--device is for an encoder in a model's folder, and lexical has none; leave it out")
        return LexicalEncoder.fit([PASSAGE], self.dim or DEFAULT_DIM)

    def _encoding_note(self, encoded: float | None, words: bool, plans: "Sequence[IndexPlan]") -> str:
        """Describe the encoding, which the table leaves out. encoded: passages a second."""
        from thresher.retrieval.building.plan import WORDS, show_seconds

        if words:
            return f"BM25 counts words; build it with --encoder {WORDS}."
        if encoded is None:
            return "Encoding comes before the build and is not included; give --encoder to have it measured."
        first = self.passages / encoded
        in_all = ", ".join(
            f"{row.kind} {show_seconds(first + row.build_seconds)}" for row in plans if row.kind != WORDS
        )
        return (
            f"Encoding comes before the build and is not included: {show_seconds(first)}, at {encoded:,.0f} passages "
            f"of 100 words a second with {self.encoder} on {self.device or 'cpu'}. In all: {in_all}."
        )


def _print_plans(title: str, plans: "Sequence[IndexPlan]") -> None:
    from thresher.retrieval.building.plan import COLUMNS

    console.grid(title, COLUMNS, [row.row() for row in plans], padding=(0, 1, 0, 0), pad_edge=False)
    note = "1 query and 64 together: seconds of the search, at an assumed nprobe or efSearch."
    console.console.print(note, soft_wrap=True)


class Build(
    Command,
    group=INDEX,
    help="encode a corpus into an index folder",
    place=20,
    example="thresher index build --corpus corpus.jsonl --embed title+text --out indexes/mine",
):
    corpus: Annotated[str, "FILE", "passages, as JSONL or TSV, gzipped if named .gz"]
    encoder: Annotated[str, "encoder: lexical (hashed words), bm25, or a model folder"] = "lexical"
    embed: Annotated[Literal["text", "title+text", "title[SEP]text"], "parts of a passage to encode"] = "text"
    kind: Annotated[
        str | None,
        "index kind: flat (the default), flat16, ivf, ivfpq, hnsw, or a FAISS factory string such as IVF4096,Flat",
    ] = None
    memory: Annotated[str | None, "SIZE", "memory limit, such as 16GB: choose the kind that fits, and report why"] = (
        None
    )
    recall: Annotated[Float, "target recall of an approximate kind; default: 0.95"] = 0.95
    keep: Annotated[str, "dtype of the vectors kept for exact scores: float32, float16 or none"] = "float32"
    dim: Annotated[Count | None, "dimension of the lexical encoder; default: 2048"] = None
    # Settings of a trained encoder that may be given in the place of what its folder says.
    pooling: Annotated[str | None, "pooling of a model encoder: mean or cls"] = None
    normalize: Annotated[Literal["yes", "no"] | None, "whether a model encoder's vectors are normalised"] = None
    query_prefix: Annotated[str | None, "prefix of every query, for a model encoder"] = None
    passage_prefix: Annotated[str | None, "prefix of every passage, for a model encoder"] = None
    max_length: Annotated[Count | None, "maximum number of tokens per text, for a model encoder"] = None
    device: Annotated[str | None, "device of a model encoder: cpu or cuda"] = None
    chunk_words: Annotated[Count, "split passages into chunks of this many words"] = 0
    skip_empty: Annotated[bool, "skip records without text"] = False
    out: Annotated[str, "DIR", "index folder to write; an unfinished build is resumed"]

    def __call__(self) -> None:
        from thresher.retrieval.building.build import RECORD_FILE, work_folder
        from thresher.retrieval.building.commands import build
        from thresher.retrieval.encoders.lexical import DEFAULT_DIM, LexicalEncoder

        if self.dim is not None and self.encoder != LexicalEncoder.name:
            raise UserError(
                f"--dim belongs to the encoder {LexicalEncoder.name}, and {self.encoder} takes none; leave it out"
            )
        names = ("pooling", "query_prefix", "passage_prefix", "max_length", "device")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.normalize is not None:
            options["normalize"] = self.normalize == "yes"
        work = work_folder(Path(self.out))

        def kept() -> str | None:
            return f"{work} keeps what is done" if (work / RECORD_FILE).is_file() else None

        with signals.on_interrupt(kept), console.stages() as on_stage:
            figures = build(
                self.corpus,
                self.out,
                self.encoder,
                self.embed,
                DEFAULT_DIM if self.dim is None else self.dim,
                encoder_options=options,
                on_stage=on_stage,
                **flags.pick(self, "kind memory recall keep chunk_words skip_empty"),
            )
        console.figures(f"index in {self.out}", figures)


class Hybrid(
    Command,
    group=INDEX,
    help="combine indexes of one corpus by reciprocal rank",
    place=30,
    example="thresher index hybrid indexes/wiki indexes/words --out indexes/both",
):
    members: Annotated[Texts, POSITIONAL, "INDEX", "folders of two or more indexes of the same corpus"]
    depth: Annotated[Count, "number of passages requested from each index; default: 100"] = 100
    out: Annotated[str, "DIR", "index folder to write"]

    def __call__(self) -> None:
        from thresher.retrieval.indexes.hybrid import build_hybrid
        from thresher.retrieval.indexes.load import load_retriever

        hybrid = build_hybrid([Path(member) for member in self.members], self.out, load_retriever, self.depth)
        joined = {"members": ", ".join(self.members), "passages": len(hybrid), "depth": hybrid.depth}
        console.figures(f"hybrid index in {self.out}", {"index": self.out, **joined})


IndexFolder = Annotated[str, "DIR", "index folder written by `thresher index build`"]
Passages = Annotated[Count, "number of passages per question"]
OnGpus = Annotated[bool, "place the lists of the index on all GPUs, in float16"]


class Search(
    Command,
    group=INDEX,
    help="retrieve the k nearest passages for one question, or for each question in a file",
    place=40,
    example='thresher index search --index indexes/mine "Who is the mayor?"',
):
    question: Annotated[str | None, POSITIONAL, "one question, whose passages are printed"] = None
    index: IndexFolder
    k: Passages = 5
    set: SearchParameters = []
    gpu: OnGpus = False
    verify: Verify = True
    queries: Annotated[str | None, "FILE", "JSONL file of questions, in place of one question; requires --out"] = None
    out: Annotated[str | None, "FILE", "JSONL file to write, one line per question of --queries"] = None

    def __call__(self) -> None:
        from thresher.retrieval.building.commands import search_file

        if (self.question is None) == (self.queries is None):
            got = "neither" if self.queries is None else "both"
            raise UserError(f'index search: expected either a question, "..", or --queries FILE, got {got}')
        if (self.queries is None) != (self.out is None):
            raise UserError(
                "index search: --queries FILE and --out FILE go together; one question's passages are printed"
            )
        parameters = parse_overrides(self.set)
        if self.queries is None or self.out is None:
            self._print_passages(str(self.question), parameters)
            return
        figures = search_file(self.index, self.queries, self.k, self.out, parameters, self.gpu, self.verify)
        console.figures(f"hits in {self.out}", figures)

    def _print_passages(self, question: str, parameters: dict[str, int]) -> None:
        from rich.padding import Padding
        from rich.text import Text

        from thresher.retrieval.indexes.load import load_retriever

        if not question.strip():
            raise UserError("index search: the question is empty; give some words")
        retriever = load_retriever(self.index, None, parameters, self.gpu, self.verify)
        (hits,) = retriever.search([question], self.k)
        for rank, hit in enumerate(hits, 1):
            where = f"{rank}. {hit.passage.title}  [{hit.passage.id}]  {hit.score:.4g}"
            console.console.print(Text(where, style="bold"), soft_wrap=True)
            console.console.print(Padding(Text(hit.passage.text), (0, 0, 0, 3), expand=False))
        if not hits:
            console.console.print("no passage has a word of the question")
        found = [
            {"id": hit.passage.id, "title": hit.passage.title, "text": hit.passage.text, "score": hit.score}
            for hit in hits
        ]
        console.answer({"question": question, "hits": found})


class Check(
    Command,
    group=INDEX,
    help="measure recall and MRR against gold_titles",
    place=50,
    example="thresher index check --index indexes/mine --queries questions.jsonl --k 5",
):
    index: IndexFolder
    k: Passages = 5
    set: SearchParameters = []
    gpu: OnGpus = False
    verify: Verify = True
    queries: Annotated[str, "FILE", "JSONL file of questions with gold_titles"]

    def __call__(self) -> None:
        from thresher.retrieval.building.commands import check

        figures = check(self.index, self.queries, self.k, parse_overrides(self.set), self.gpu, self.verify)
        console.figures(f"{self.index} against the gold titles of {self.queries}", figures)
        console.answer(figures)


Most = Annotated[int, checked(int, f"a whole number from 1 to {2**40}", lambda value: 1 <= value <= 2**40)]
Limit = Annotated[float, checked(float, "a number above 0, up to a million", lambda value: 0 < value <= 1e6)]


class ServeRetriever(
    Command,
    help="serve an index over HTTP, with the APIs of Search-R1 and ReCall",
    place=90,
    example="thresher serve-retriever --index indexes/wiki --port 8000",
):
    """retrieval/serving/app.py explains the limits."""

    index: Annotated[str, "index folder written by `thresher index build`"]
    set: SearchParameters = []
    gpu: Annotated[bool, "place the lists of the index on all GPUs, in float16"] = False
    verify: Verify = True
    host: Annotated[str, "address to listen on; default: this machine only, because there is no password"] = "127.0.0.1"
    allow_host: Annotated[
        Texts,
        REPEATED,
        "NAME",
        "additional host name that requests may use, besides localhost, this machine's name, --host and IP "
        "addresses; may be repeated",
    ] = []
    port: Annotated[Port, "port to listen on; 0: any free port; default: 8000"] = 8000
    k: Annotated[Most, "number of passages if a request does not set it; default: 3"] = 3
    max_k: Annotated[Most, "K", "maximum number of passages per query; default: 100"] = 100
    max_queries: Annotated[Most, "N", "maximum number of queries per request; default: 8192"] = 8192
    max_body: Annotated[Most, "BYTES", "maximum size of a request body; default: 8388608"] = 8 * 2**20
    max_batch: Annotated[
        Most, "N", "maximum number of queries searched at once, from several connections; default: 256"
    ] = 256
    max_wait_ms: Annotated[Limit, "MS", "maximum time that a search waits for further queries; default: 3.0"] = 3.0
    max_waiting: Annotated[
        Most, "N", "maximum number of waiting queries; further ones are refused temporarily; default: 16384"
    ] = 16_384
    max_connections: Annotated[
        Most, "N", "maximum number of connections served at once; further ones are refused temporarily; default: 512"
    ] = 512
    timeout: Annotated[Limit, "SECONDS", "timeout of receiving a request body, and of a search; default: 60.0"] = 60.0

    def __call__(self) -> None:
        from thresher.retrieval.serving.app import Bounds, Settings
        from thresher.retrieval.serving.server import serve_folder

        if self.k > self.max_k:
            raise UserError(f"--k is {self.k}, above --max-k {self.max_k}; lower it, or raise --max-k")
        bounds = Bounds(max_queries=self.max_queries, max_k=self.max_k)
        settings = flags.fill(Settings, self, allow_hosts=tuple(self.allow_host), bounds=bounds)
        where, parameters = (self.host, self.port), parse_overrides(self.set)
        served = serve_folder(self.index, settings, where, console.note, parameters, self.gpu, self.verify)
        console.answer(served)
