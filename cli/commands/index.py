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
    passages: Annotated[Count, "N", "how many there will be"]
    dim: Annotated[Count | None, "D", "of a vector; default: the encoder's, else 768"] = None
    kind: Annotated[
        Texts | None, REPEATED, "as index build has it, or bm25; default: all (of vectors); may be repeated"
    ] = None
    memory: Annotated[str | None, "SIZE", "such as 16GB; default: this machine's"] = None
    encoder: Annotated[str | None, "DIR", "a model's folder, or lexical: to time encoding; bm25: as --kind bm25"] = None
    device: Annotated[Device | None, "of --encoder; default: cpu"] = None
    sample: Annotated[Count | None, "N", "vectors to calibrate with; default: 65536"] = None
    disk: Annotated[str, "FOLDER", "where the index will lie; default: here"] = "."
    out: Annotated[str | None, "FILE", "JSON to write as well"] = None

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
            console.console.print(f"It is busy (load {load:.1f}), and on a quiet one all times are shorter.")
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
            raise UserError("--device is of --encoder, and none is given; add --encoder DIR, or leave it out")
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
            raise UserError("--device is for a model's folder, and the encoder lexical has none; leave it out")
        return LexicalEncoder.fit([PASSAGE], self.dim or DEFAULT_DIM)

    def _encoding_note(self, encoded: float | None, words: bool, plans: "Sequence[IndexPlan]") -> str:
        """Describe the encoding, which the table leaves out. encoded: passages a second."""
        from thresher.retrieval.building.plan import WORDS, show_seconds

        if words:
            return f"BM25 counts words; build it with --encoder {WORDS}."
        if encoded is None:
            return "Encoding comes before the build and is not in it; give --encoder to have it measured."
        first = self.passages / encoded
        in_all = ", ".join(
            f"{row.kind} {show_seconds(first + row.build_seconds)}" for row in plans if row.kind != WORDS
        )
        return (
            f"Encoding comes before the build and is not in it: {show_seconds(first)}, at {encoded:,.0f} passages of "
            f"100 words a second with {self.encoder} on {self.device or 'cpu'}. In all: {in_all}."
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
    corpus: Annotated[str, "FILE", "passages: JSONL or TSV, gzipped if named .gz"]
    encoder: Annotated[str, "lexical (hashed words), bm25, or a model's folder"] = "lexical"
    embed: Annotated[Literal["text", "title+text", "title[SEP]text"], "part of a passage that is encoded"] = "text"
    kind: Annotated[str | None, "flat (the default), flat16, ivf, ivfpq, hnsw, or such as IVF4096,Flat"] = None
    memory: Annotated[str | None, "SIZE", "such as 16GB: pick the kind that fits, and say why"] = None
    recall: Annotated[Float, "recall of an approximate kind; default: 0.95"] = 0.95
    keep: Annotated[str, "vectors for exact scores: float32, float16 or none"] = "float32"
    dim: Annotated[Count | None, "of the lexical encoder; default: 2048"] = None
    # Settings of a trained encoder that may be given in the place of what its folder says.
    pooling: Annotated[str | None, "of a model, mean or cls"] = None
    query_prefix: Annotated[str | None, "of a model, text before every query"] = None
    passage_prefix: Annotated[str | None, "of a model, text before every passage"] = None
    max_length: Annotated[Count | None, "of a model, tokens of a text"] = None
    device: Annotated[str | None, "of a model, cpu or cuda"] = None
    chunk_words: Annotated[Count, "cut passages into this many words"] = 0
    skip_empty: Annotated[bool, "leave out records without text"] = False
    out: Annotated[str, "DIR", "index folder to write; goes on if unfinished"]

    def __call__(self) -> None:
        from thresher.retrieval.building.build import RECORD_FILE, work_folder
        from thresher.retrieval.building.commands import build
        from thresher.retrieval.encoders.lexical import DEFAULT_DIM, LexicalEncoder

        if self.dim is not None and self.encoder != LexicalEncoder.name:
            raise UserError(
                f"--dim is of the encoder {LexicalEncoder.name}, and {self.encoder} takes none; leave it out"
            )
        names = ("pooling", "query_prefix", "passage_prefix", "max_length", "device")
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
                encoder_options={name: getattr(self, name) for name in names if getattr(self, name) is not None},
                on_stage=on_stage,
                **flags.pick(self, "kind memory recall keep chunk_words skip_empty"),
            )
        console.figures(f"index in {self.out}", figures)


class Hybrid(
    Command,
    group=INDEX,
    help="join indexes of one corpus by reciprocal rank",
    place=30,
    example="thresher index hybrid indexes/wiki indexes/words --out indexes/both",
):
    members: Annotated[Texts, POSITIONAL, "INDEX", "folders of two or more indexes of one corpus"]
    depth: Annotated[Count, "passages asked of each; default: 100"] = 100
    out: Annotated[str, "DIR", "index folder to write"]

    def __call__(self) -> None:
        from thresher.retrieval.indexes.hybrid import build_hybrid
        from thresher.retrieval.indexes.load import load_retriever

        hybrid = build_hybrid([Path(member) for member in self.members], self.out, load_retriever, self.depth)
        joined = {"members": ", ".join(self.members), "passages": len(hybrid), "depth": hybrid.depth}
        console.figures(f"hybrid index in {self.out}", {"index": self.out, **joined})


IndexFolder = Annotated[str, "DIR", "folder that `thresher index build` wrote"]
Passages = Annotated[Count, "passages of a question"]
OnGpus = Annotated[bool, "lists on all GPUs, in float16"]


class Search(
    Command,
    group=INDEX,
    help="find the k nearest passages of one question, or of each in a file",
    place=40,
    example='thresher index search --index indexes/mine "Who is the mayor?"',
):
    question: Annotated[str | None, POSITIONAL, "one question; its passages are printed"] = None
    index: IndexFolder
    k: Passages = 5
    set: SearchParameters = []
    gpu: OnGpus = False
    verify: Verify = True
    queries: Annotated[str | None, "FILE", "JSONL of questions in its place; goes with --out"] = None
    out: Annotated[str | None, "FILE", "JSONL to write, a line a question of --queries"] = None

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
    queries: Annotated[str, "FILE", "JSONL of questions with gold_titles"]

    def __call__(self) -> None:
        from thresher.retrieval.building.commands import check

        figures = check(self.index, self.queries, self.k, parse_overrides(self.set), self.gpu, self.verify)
        console.figures(f"{self.index} against the gold titles of {self.queries}", figures)
        console.answer(figures)


Most = Annotated[int, checked(int, f"a whole number from 1 to {2**40}", lambda value: 1 <= value <= 2**40)]
Limit = Annotated[float, checked(float, "a number above 0, up to a million", lambda value: 0 < value <= 1e6)]


class ServeRetriever(
    Command,
    help="answer searches over HTTP, as Search-R1 and ReCall ask",
    place=90,
    example="thresher serve-retriever --index indexes/wiki --port 8000",
):
    """retrieval/serving/app.py explains the limits."""

    index: Annotated[str, "folder that `thresher index build` wrote"]
    set: SearchParameters = []
    gpu: Annotated[bool, "the index's lists on all GPUs, in float16"] = False
    verify: Verify = True
    host: Annotated[str, "default: this machine alone, for there is no password"] = "127.0.0.1"
    allow_host: Annotated[
        Texts,
        REPEATED,
        "NAME",
        "a name under which requests may ask, beside localhost, this machine's name, --host and IP addresses; "
        "may be given again",
    ] = []
    port: Annotated[Port, "0: any that is free; default: 8000"] = 8000
    k: Annotated[Most, "passages for a request that does not say; default: 3"] = 3
    max_k: Annotated[Most, "K", "passages that a request may ask for; default: 100"] = 100
    max_queries: Annotated[Most, "N", "in one request; default: 8192"] = 8192
    max_body: Annotated[Most, "BYTES", "of one request; default: 8388608"] = 8 * 2**20
    max_batch: Annotated[Most, "N", "queries searched at once, from several connections; default: 256"] = 256
    max_wait_ms: Annotated[Limit, "MS", "for others to join a search; default: 3.0"] = 3.0
    max_waiting: Annotated[Most, "N", "queries; more are refused for now; default: 16384"] = 16_384
    max_connections: Annotated[Most, "N", "served at once; more are refused for now; default: 512"] = 512
    timeout: Annotated[Limit, "SECONDS", "for a body to arrive, and for a search; default: 60.0"] = 60.0

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
