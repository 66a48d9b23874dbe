"""`thresher index build`, `search` and `check` as plain functions: paths in, files and a dict of figures out."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import refuse_existing, refuse_hub_id, show_bytes
from thresher.common.jsonl import write_jsonl
from thresher.retrieval.building.build import BuildSettings, build_folder, work_folder
from thresher.retrieval.corpus import (
    CACHE_FILES,
    PAIRED,
    Corpus,
    check_embed,
    embedded_text,
    open_corpus,
    read_corpus,
)
from thresher.retrieval.encoders import Encoder
from thresher.retrieval.encoders.lexical import COUNTING, DEFAULT_DIM, PROGRESS_STEP, LexicalEncoder
from thresher.retrieval.indexes.kinds import OnStage, choose_kind, estimate, parse_kind, parse_memory
from thresher.retrieval.indexes.load import load_retriever
from thresher.retrieval.indexes.manifest import Manifest
from thresher.retrieval.questions import Query, read_queries
from thresher.retrieval.retriever import Hit, Retriever

MRR_DEPTH = 10
SEARCH_BATCH = 64
WORDS = "bm25"
RECALL, KEEP = 0.95, "float32"  # the defaults
# A larger corpus file is left on disk, with the offsets of its passages in the index folder.
READ_WHOLE_BYTES = 512 * 2**20


def build(
    corpus_path: str | Path,
    out: str | Path,
    encoder_name: str = LexicalEncoder.name,
    embed: str = "text",
    dim: int = DEFAULT_DIM,
    *,
    kind: str | None = None,
    memory: str | None = None,
    recall: float = RECALL,
    keep: str = KEEP,
    encoder_options: dict[str, Any] | None = None,
    chunk_words: int = 0,
    skip_empty: bool = False,
    on_stage: OnStage = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Read a corpus, load or fit the encoder, and write the index folder `out`; after a kill, a new call resumes.

    encoder_name: "lexical" (of `dim` dimensions), "bm25" (with settings, see `parse_bm25`), or a trained encoder's
    folder, loaded with `encoder_options` (`load_encoder`). kind: see `parse_kind`; if None, `memory` ("16GB") decides,
    and if both are None it is flat. recall, keep: see BuildSettings. chunk_words, skip_empty: see `open_corpus`.

    Returns the figures corpus, index, kind, passages, encoder, embed, seconds; for vectors also dim, vectors_mib (MiB
    in float32), search parameters, recall, note, reason, and passages_cut (passages that a trained encoder truncated);
    with chunk_words or skip_empty also records and skipped_empty.
    """
    started = time.perf_counter()
    check_embed(embed)
    if embed == PAIRED and encoder_name.partition(":")[0] in (WORDS, LexicalEncoder.name):
        raise UserError(f"embed is {embed!r}, which needs a model with the token [SEP], such as DPR's; use title+text")
    out = Path(out)
    refuse_existing(out)
    corpus = _open(Path(corpus_path), out, chunk_words, skip_empty)
    figures: dict[str, Any] = {"corpus": str(corpus_path), "index": str(out), "passages": len(corpus)}
    if chunk_words or skip_empty:
        figures |= {"records": corpus.records, "skipped_empty": corpus.skipped}

    if encoder_name.partition(":")[0] == WORDS:
        if (kind, memory, recall, keep) != (None, None, RECALL, KEEP) or encoder_options:
            raise UserError(
                "kind, memory, recall, keep and a model's settings apply to vectors, and bm25 has none; leave them out"
            )
        _build_words(encoder_name, corpus, out, embed, on_stage)
        figures |= {"kind": WORDS, "encoder": encoder_name, "embed": embed}
    else:
        encoder = _encoder(encoder_name, corpus, embed, dim, encoder_options or {}, on_stage)
        settings = _settings(kind, memory, len(corpus), encoder.dim, embed, recall, keep)
        if not work_folder(out).exists():
            on_stage("encoding", 0, len(corpus))  # a trained encoder takes a minute or two for its first batch
        manifest = build_folder(corpus, encoder, out, settings, on_stage)
        figures |= {"dim": encoder.dim, "encoder": encoder_name, "embed": embed, "kind": manifest.factory}
        if (chosen := getattr(encoder, "settings", None)) is not None:
            figures |= {name: f"{value!r}, from {chosen.why[name]}" for name, value in chosen.values().items()}
        if cut := getattr(encoder, "passages_cut", 0):
            figures["passages_cut"] = cut
        figures["vectors_mib"] = len(corpus) * encoder.dim * 4 / 2**20
        figures |= manifest.parameters | manifest.recall
        if manifest.parameters:
            figures |= {"recall_wanted": recall, "note": _note(settings, manifest)}
        if manifest.reason:
            figures["reason"] = manifest.reason
    figures["seconds"] = time.perf_counter() - started
    return figures


def _open(path: Path, out: Path, chunk_words: int, skip_empty: bool) -> Corpus:
    """Return the corpus, in memory if it is small and unchanged, else on disk with its offsets next to the index."""
    if chunk_words == 0 and not skip_empty and (not path.is_file() or path.stat().st_size <= READ_WHOLE_BYTES):
        return read_corpus(path)
    return open_corpus(path, work_folder(out), chunk_words=chunk_words, skip_empty=skip_empty)


def _encoder(name: str, corpus: Corpus, embed: str, dim: int, options: dict[str, Any], report: OnStage) -> Encoder:
    if name != LexicalEncoder.name:
        refuse_hub_id(name)
        if not Path(name).is_dir():
            raise UserError(f"encoder is {name!r}; expected {LexicalEncoder.name}, {WORDS} or the folder of a model")
        # Imported here, because it imports torch.
        from thresher.retrieval.encoders.learned import load_encoder

        encoder = load_encoder(name, **options)
        if embed == PAIRED and not encoder.separates:
            raise UserError(f"embed is {embed!r}, but the tokenizer of {name} has no token [SEP]; use title+text")
        return encoder
    if options:
        raise UserError(f"{', '.join(options)}: only for the folder of a model; the encoder {name} has no such setting")

    def texts() -> Iterator[str]:
        for row, passage in enumerate(corpus, 1):
            yield embedded_text(passage, embed)
            if row % PROGRESS_STEP == 0 or row == len(corpus):
                report(COUNTING, row, len(corpus))

    return LexicalEncoder.fit(texts(), dim)


def _settings(
    kind: str | None, memory: str | None, passages: int, dim: int, embed: str, recall: float, keep: str
) -> BuildSettings:
    reason = ""
    if memory is not None and kind is None:
        kind, reason = choose_kind(passages, dim, parse_memory(memory))
    parsed = parse_kind(kind or "flat", passages, dim)
    if memory is not None:
        needed = estimate(parsed, passages, dim)
        if needed.most_ram > parse_memory(memory):
            raise UserError(
                f"{parsed.name} over {passages:,} x {dim} needs {show_bytes(needed.most_ram)} of memory, but {memory} "
                "are given; leave out the kind to get one that fits"
            )
    settings = BuildSettings(kind=parsed, embed=embed, keep=keep, recall=recall, reason=reason)
    if memory is None and parsed.exact and recall != RECALL:
        raise UserError(f"recall is {recall}, but an index of kind {parsed.name} is searched exactly; leave it out")
    return settings


def _note(settings: BuildSettings, manifest: Manifest) -> str | None:
    if min(value for name, value in manifest.recall.items() if name.startswith("recall_at_")) < settings.recall:
        return "no nprobe or efSearch reached the requested recall; use longer codes, keep the vectors, or use flat"
    return settings.kind.note(manifest.parameters)


def _build_words(encoder_name: str, corpus: Corpus, out: Path, embed: str, report: OnStage) -> None:
    from thresher.retrieval.indexes.bm25 import build_bm25, parse_bm25

    settings = parse_bm25(encoder_name)
    work = work_folder(out)
    cache = [work / name for name in CACHE_FILES if (work / name).is_file()]
    build_bm25(corpus, out, embed, settings=settings, cache=cache, on_stage=report)
    shutil.rmtree(work, ignore_errors=True)


def search_file(
    index_dir: str | Path,
    queries_path: str | Path,
    k: int,
    out_path: str | Path,
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Search every {"id", "question"} of `queries_path`; write one {"id", "hits": [{"id", "title", "score"}]} per line.

    Returns queries, hits, k and seconds (of the search only). After a UserError nothing is written.
    """
    retriever = load_retriever(index_dir, None, parameters, gpu, verify)
    retriever.check_k(k)
    queries = read_queries(queries_path)
    started = time.perf_counter()
    found = _search_all(retriever, queries, k)
    seconds = time.perf_counter() - started
    write_jsonl(
        out_path,
        (
            {
                "id": query.id,
                "hits": [{"id": h.passage.id, "title": h.passage.title, "score": h.score} for h in hits],
            }
            for query, hits in zip(queries, found, strict=True)
        ),
    )
    return {"queries": len(queries), "hits": sum(map(len, found)), "k": k, "seconds": seconds}


def check(
    index_dir: str | Path,
    queries_path: str | Path,
    k: int,
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Measure the index against the "gold_titles" of `queries_path`.

    Returns means over the queries: recall (share of the distinct gold titles among the first `k` passages), full_recall
    (1 if all of them are), mrr_at_10 (1 / rank of the first passage with a gold title, 0 beyond rank 10). Also returns
    queries, k and absent_titles, the number of distinct gold titles that no passage has.
    """
    retriever = load_retriever(index_dir, None, parameters, gpu, verify)
    retriever.check_k(k)
    queries = read_queries(queries_path)
    for query in queries:
        if not query.gold_titles:
            raise UserError(f'{queries_path}: the query {query.id!r} has no "gold_titles"; add them or remove it')
    gold_titles = {title for query in queries for title in query.gold_titles}
    absent = gold_titles - {passage.title for passage in retriever.corpus}
    if absent == gold_titles:
        raise UserError(
            f"{queries_path}: no passage of {index_dir} has any of its {len(absent)} gold titles, such as "
            f"{min(absent)!r}; name an index of the corpus that these questions are about"
        )
    depth = min(len(retriever), max(k, MRR_DEPTH))
    recall = full = reciprocal = 0.0
    for query, hits in zip(queries, _search_all(retriever, queries, depth), strict=True):
        golds = set(query.gold_titles)
        share = len(golds & {hit.passage.title for hit in hits[:k]}) / len(golds)
        recall += share
        full += share == 1
        ranks = (rank for rank, hit in enumerate(hits[:MRR_DEPTH], 1) if hit.passage.title in golds)
        reciprocal += 1 / next(ranks, float("inf"))
    return {
        "queries": len(queries),
        "k": k,
        "recall": recall / len(queries),
        "full_recall": full / len(queries),
        f"mrr_at_{MRR_DEPTH}": reciprocal / len(queries),
        "absent_titles": len(absent),
    }


def _search_all(retriever: Retriever, queries: list[Query], k: int) -> list[list[Hit]]:
    found: list[list[Hit]] = []
    for start in range(0, len(queries), SEARCH_BATCH):
        found += retriever.search([query.question for query in queries[start : start + SEARCH_BATCH]], k)
    return found
