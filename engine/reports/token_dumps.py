"""Rollouts of TRL, verl and prime-rl, and stored trajectories, as a token page: `thresher tokens FILE`.

    trl        prompt, completion, step, advantage; other columns are rewards and other logged values:
               completions/completions_00010.parquet of GRPOTrainer (log_completions)
    verl       input, output, score, step, gts; other keys come from the reward function: 10.jsonl of
               trainer.rollout_data_dir and trainer.validation_data_dir
    prime-rl   traces, episodes of verifiers (or nodes, one trace): rollouts/step_N/train/effective/traces.jsonl; or
               token_ids, loss_mask, ..: token_exports/step_N/rank_R.jsonl of trainer.enable_token_export
    thresher   segments: trajectories/step_000010.jsonl of a run, evaluations, output of `thresher rollout`

A reader converts the records to trajectories, in the format of a run, and to per-token values if the dump has any. A
value that is missing from the dump is not computed from others: it is not shown, and the page says so.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError
from thresher.common.jsonl import string_field
from thresher.common.records import read_records
from thresher.engine.config.recipe import Recipe
from thresher.engine.reports.pages import open_run, tags_of
from thresher.engine.reports.token_view import (
    about_run,
    assemble,
    facts_of,
    groups_of,
    notes_of,
    policy_counts,
    tokenizer_of,
    write_page,
)
from thresher.engine.store.run_folder import (
    ANYTHING,
    FLAG,
    NAME,
    NUMBER,
    NUMBERS,
    START,
    TEXT,
    TRAJECTORY,
    WHOLE,
    RunFolder,
    check_shape,
    step_of,
)
from thresher.engine.store.token_stats import TokenStats, read_token_stats
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.retrieval.datasets.containers import iter_rows, plain
from thresher.rewards.reward import Source

Array = npt.NDArray[Any]
TITLE = 300  # characters of a group's title that is made from its prompt
STEP = re.compile(r"step_(\d+)")

# Values that a page may show with the text: name in the sentence about missing values -> keys of a sample.
SHOWN = {
    "advantages": ("advantage", "weighted"),
    "log-probs": ("logprob",),
    "ratios to the rollout": ("rollout",),
    "ratios to a reference and KL": ("reference",),
    "entropies": ("entropy",),
    "clipped tokens": ("clipped",),
    "gradients": ("gradient",),
    "versions of the weights": ("versions",),
}
NO_ROLES = "A response is one text in this dump: what a tool or an environment wrote in it is not marked."
TEXT_AS_WORDS = (
    "The dump has text and no token ids: it is cut into words. --tokenizer FOLDER cuts it into a model's tokens."
)
ENCODED = (
    "The dump has text and no token ids: its tokens are the tokenizer's, and may differ from those that were sampled."
)
WORDS = "The text is cut into words: --tokenizer FOLDER shows the dump's tokens, and what it has of each."
WEIGHTS = "The dump has several rewards and not their weights: each is shown, but no sum."


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A file to read. format: a key of READERS. run: the run whose stored step it is. tokenizer: None cuts text into
    words."""

    path: Path
    format: str
    run: tuple[RunFolder, Recipe] | None
    tokenizer: Tokenizer | None
    unverified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory of a dump. group: key shared by the samples of a prompt. record: in the format of a run, without
    the numbers of group and sample. values: arrays [P] over its sampled tokens, by the names of TokenStats."""

    group: Hashable
    record: dict[str, Any]
    values: dict[str, Array] = field(default_factory=dict)
    branches: Array = field(default_factory=lambda: np.empty(0, np.float32))


def write_token_page(
    path: str | Path,
    out: str | Path | None = None,
    *,
    format: str | None = None,
    tokenizer: str | Path | None = None,
    most: int = 512,
    unverified: bool = False,
) -> Path:
    """Write the token page of a file of rollouts; return the page's path.

    out: default: next to the file, with the suffix .html. format: a key of READERS; None: detected from the columns.
    tokenizer: folder of the model that wrote the rollouts; trajectories in a run folder need none. most: maximum number
    of trajectories to read. unverified: also accept stored records that fail verification.

    Raise UserError if the file has none of these formats, a record is malformed, the tokenizer is not the dump's, or
    `out` cannot be written.
    """
    path = Path(path)
    name = recognised(path) if format is None else format
    run = _run_of(path, unverified) if name == "thresher" else None
    own = tokenizer_of(*run) if run is not None and tokenizer is None else None
    dump = Dump(
        path=path,
        format=name,
        run=run,
        tokenizer=own if tokenizer is None else load_tokenizer(tokenizer),
        unverified=unverified,
    )
    rows = READERS[name].read(dump)
    rollouts = list(islice(rows, most))
    if not rollouts:
        raise UserError(f"{path}: holds no rollout; name a file that has some")
    notes = [] if next(rows, None) is None else [f"The file has more trajectories than these first {most:,} (--most)."]
    target = Path(out) if out is not None else path.with_name(path.name.removesuffix(".gz")).with_suffix(".html")
    write_page(target, _page(dump, rollouts, notes))
    return target


def recognised(path: Path) -> str:
    """Return the format of a file, from the columns of its first record. Raise UserError if there is no match."""
    for where, row in iter_rows(path):
        for name, reader in READERS.items():
            if any(columns <= row.keys() for columns in reader.columns):
                return name
        expected = "; ".join(
            f"{name}: {' or '.join(', '.join(sorted(columns)) for columns in reader.columns)}"
            for name, reader in READERS.items()
        )
        raise UserError(
            f"{where}: expected the columns of a rollout dump ({expected}), found {', '.join(map(str, row))[:200]};"
            " convert the file"
        )
    raise UserError(f"{path}: holds no rollout; name a file that has some")


def _run_of(path: Path, unverified: bool) -> tuple[RunFolder, Recipe] | None:
    """Return the run (and its recipe) that has the file in its folder trajectories/; None if there is none."""
    inside = path.parent.name == "trajectories" and (path.parent.parent / "recipe.toml").is_file()
    return open_run(path.parent.parent, unverified) if inside else None


def _encode(rollouts: Sequence[Rollout], tokenizer: Tokenizer | None) -> bool:
    """Encode the text of policy segments that have no ids; return whether there was such a segment."""
    segments = [
        segment
        for rollout in rollouts
        for part in (rollout.record["segments"], *(rollout.record.get("branches") or {}).values())
        for segment in part
        if segment.get("source") == Source.POLICY and segment.get("ids") is None
    ]
    if tokenizer is not None and segments:
        for segment, ids in zip(segments, tokenizer.encode_batch([s.get("text") or "" for s in segments]), strict=True):
            segment |= {"ids": ids, "text": tokenizer.decode(ids)}
    return bool(segments)


def _page(dump: Dump, rollouts: Sequence[Rollout], notes: Sequence[str]) -> str:
    """Return the page. notes: shown first, before the notes about the dump."""
    encoded, tokenizer = _encode(rollouts, dump.tokenizer), dump.tokenizer
    _entitle(rollouts)
    records = _numbered(rollouts)
    values = tokenizer is not None and any(rollout.values for rollout in rollouts)
    stats = [TokenStats(key=(n, 0), values=r.values, branches=r.branches) for n, r in enumerate(rollouts)]
    recipe = None if dump.run is None else dump.run[1]
    groups = groups_of(records, stats if values else None, tokenizer, tags_of(recipe) if recipe else ())
    has = {key for group in groups for sample in group["samples"] for key, value in sample.items() if value is not None}
    absent = [words for words, keys in SHOWN.items() if not has & set(keys)]
    text_only = READERS[dump.format].text_only
    said = {
        NO_ROLES: text_only,
        TEXT_AS_WORDS: text_only and tokenizer is None,
        WORDS: not text_only and tokenizer is None,
        ENCODED: encoded and tokenizer is not None,
        WEIGHTS: any(len(record.get("rewards", ())) > 1 for record in records),
        f"The dump has no {', '.join(absent)}: they are not shown.": bool(absent)
        and recipe is None
        and (text_only or tokenizer is not None),  # otherwise the dump may have per-token values
    }
    notes = [*notes, *(sentence for sentence, holds in said.items() if holds)]
    notes += notes_of(recipe, groups, values) if recipe else []
    facts = facts_of(records, groups, dump.format == "thresher" and values, tokenizer, recipe, notes)
    steps = sorted({group["step"] for group in groups if group["step"] is not None})
    title = (
        dump.path.name if not steps else f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}"
    )
    about = f"{dump.path} · rollouts of {dump.format}" if dump.run is None else about_run(*dump.run)
    return assemble(title, about, groups, facts, {})


def _entitle(rollouts: Sequence[Rollout]) -> None:
    """Set missing questions to the prompt's lines that differ within the dump, shortened to their end."""
    prompts = []
    for rollout in rollouts:
        before = takewhile(lambda segment: segment.get("source") == Source.PROMPT, rollout.record["segments"])
        prompts.append("".join(segment.get("text") or "" for segment in before))
    lines = [prompt.split("\n") for prompt in prompts]
    first, last = _shared(lines), _shared([each[::-1] for each in lines])
    for rollout, prompt, each in zip(rollouts, prompts, lines, strict=True):
        if rollout.record.get("question") is None:
            found = "\n".join(each[first : len(each) - last]).strip() or prompt
            rollout.record["question"] = found if len(found) <= TITLE else f"… {found[-TITLE:]}"


def _shared(texts: Sequence[Sequence[str]]) -> int:
    """Return the number of leading lines that all texts share."""
    return sum(1 for _ in takewhile(lambda row: len(set(row)) == 1, zip(*texts, strict=False)))


def _numbered(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return the records with group numbers, in order of first occurrence, and sample numbers. Existing numbers are
    kept."""
    sizes: dict[Hashable, int] = {}
    numbers: dict[Hashable, int] = {}
    records = []
    for rollout in rollouts:
        number = numbers.setdefault(rollout.group, len(numbers))
        sample = sizes[rollout.group] = sizes.get(rollout.group, -1) + 1
        records.append({"group": number, "sample": sample, **rollout.record})
    return records


TRL_COLUMNS = {"prompt": Source.PROMPT, "completion": Source.POLICY}

# The readers: they convert a dump's records to trajectories


def _trl(dump: Dump) -> Iterator[Rollout]:
    for where, row in iter_rows(dump.path):
        begun, said = (_trl_pieces(row, name, source, where) for name, source in TRL_COLUMNS.items())
        parts = {name: plain(value) for name, value in row.items() if name not in ("prompt", "completion", "step")}
        check_shape(parts, {"*": ANYTHING, "advantage": NUMBER}, where)
        advantage = parts.pop("advantage", None)
        rewards = [name for name, value in parts.items() if value is None or isinstance(value, float)]
        check_shape(row, START, where)
        record = {
            "golden_answers": None,
            "step": row.get("step"),
            "segments": [{"source": source, "text": text} for source, text in (*begun, *said)],
            "reward": parts[rewards[0]] if len(rewards) == 1 else None,
            "advantage": advantage,
            "parts": parts,
            "rewards": rewards,
        }
        yield Rollout(group=(record["step"], tuple(text for _, text in begun)), record=record)


def _trl_pieces(row: dict[str, Any], name: str, source: str, where: str) -> list[tuple[str, str]]:
    """Return the texts of a column with their sources: one text, or the messages of a conversation."""
    if not isinstance(row.get(name), list | np.ndarray):
        return [(source, string_field(row, name, where, may_be_empty=True))]
    messages = plain(row[name])
    check_shape(messages, [MESSAGE], f"{where}: {name}")
    sources = [Source.RETRIEVED if message.get("role") == "tool" else source for message in messages]
    return [(found, f"{_message_text(one)}\n\n") for found, one in zip(sources, messages, strict=True)]


def _verl(dump: Dump) -> Iterator[Rollout]:
    for where, row in iter_rows(dump.path):
        prompt = string_field(row, "input", where, may_be_empty=True)
        said = string_field(row, "output", where, may_be_empty=True)
        found = plain(row)
        check_shape(found, {"*": ANYTHING, "score": NUMBER}, where)
        known = ("input", "output", "score", "step", "gts")
        record = _text_record(row, prompt, said, where) | {
            "reward": found.get("score"),
            "parts": {name: value for name, value in found.items() if name not in known},
        }
        if (gold := found.get("gts")) is not None:
            golds = gold if isinstance(gold, list) else [gold]
            record["golden_answers"] = [g if isinstance(g, str) else json.dumps(g, ensure_ascii=False) for g in golds]
        # Some reward functions return the extracted answer, and whether it is right.
        if isinstance(found.get("pred"), str):
            record["answer"] = found["pred"]
        if isinstance(found.get("acc"), bool | int | float):
            record["right"] = bool(found["acc"])
        yield Rollout(group=(record["step"], prompt), record=record)


def _text_record(row: Mapping[str, Any], prompt: str, said: str, where: str) -> dict[str, Any]:
    check_shape(row, START, where)
    segments = [{"source": Source.PROMPT, "text": prompt}, {"source": Source.POLICY, "text": said}]
    return {"golden_answers": None, "step": row.get("step"), "segments": segments}


MESSAGE = {"*": ANYTHING, "role": TEXT, "tool_calls": [{"*": ANYTHING, "name": TEXT, "arguments": TEXT}]}
TRACE = {
    "*": ANYTHING,
    "nodes": [{"*": ANYTHING, "parent": WHOLE, "message": MESSAGE, "sampled": FLAG}],
    "rewards": {"*": {"*": ANYTHING, "score": NUMBER, "weight": NUMBER}},
    "metrics": NUMBERS,
    "info": {"*": ANYTHING, "advantage": NUMBER},
    "agent": {"*": ANYTHING, "name": TEXT},
    "task": {"*": ANYTHING, "hash": NAME, "data": {"*": ANYTHING}},
    "stop_condition": TEXT,
}
EPISODE = {
    "*": ANYTHING,
    "group": {"*": ANYTHING, "id": NAME},
    "run": {"*": ANYTHING, "work": {"*": ANYTHING, "policy": {"*": ANYTHING, "start": WHOLE, "end": WHOLE}}},
    "traces": [TRACE],
}
OF_NODE = {"sampled": "logprobs", "reference": "reference_logprobs", "advantage": "advantages"}  # our name -> theirs
EXPORTED = {
    "sampled": "inference_logprobs",
    "recomputed": "trainer_logprobs",
    "entropy": "entropy",
    "clipped": "is_masked",
    "advantage": "advantages",
}


def _prime_rl(dump: Dump) -> Iterator[Rollout]:
    for where, row in iter_rows(dump.path):
        if "token_ids" in row:
            yield _exported(row, where, dump.tokenizer)
            continue
        episode = row if "traces" in row else {"traces": [row]}
        check_shape(episode, EPISODE, where)
        for trace in episode["traces"] or ():
            for path in _paths(trace.get("nodes") or (), where):
                yield _path(path, trace, episode, where, dump)


def _exported(row: Mapping[str, Any], where: str, tokenizer: Tokenizer | None) -> Rollout:
    """Return the rollout of one sequence of a trainer's token export."""
    if tokenizer is None:
        raise UserError(f"{where}: holds token ids and no text; name the model's folder with --tokenizer FOLDER")
    check_shape(row, START, where)
    ids = _column(row, "token_ids", where).astype(np.int64).tolist()
    mask = _column(row, "loss_mask", where, len(ids)) == 1
    columns = {name: _column(row, theirs, where, len(ids)) for name, theirs in EXPORTED.items() if row.get(theirs)}
    values = _known({name: column[mask] for name, column in columns.items()})
    if "clipped" in values:
        values["clipped"] = values["clipped"] == 1
    pieces = [(Source.POLICY if drawn else Source.FEEDBACK, [token]) for token, drawn in zip(ids, mask, strict=True)]
    segments = _segments(pieces, tokenizer, where)
    prompt = segments[0]["text"] if segments and segments[0]["source"] == Source.PROMPT else ""
    record = {
        "golden_answers": None,
        "step": row.get("step"),
        "segments": segments,
        "advantage": _same(values.get("advantage", ())),
        "parts": plain({name: row[name] for name in ("env_name", "rank") if row.get(name) is not None}),
    }
    return Rollout(group=(row.get("step"), prompt), record=record, values=values)


def _paths(nodes: Sequence[Mapping[str, Any]], where: str) -> Iterator[list[Mapping[str, Any]]]:
    """Yield each path of a trace's messages from a root to a leaf, which prime-rl trains as a separate sample."""
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        if not isinstance(node.get("message"), dict) or not (parent is None or 0 <= parent < number):
            raise UserError(
                f'{where}: node {number}: expected a "message", and the number of an earlier node as its "parent";'
                " fix or remove this record"
            )
    parents = {node.get("parent") for node in nodes}
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path, at = [nodes[leaf]], nodes[leaf].get("parent")
        while at is not None:
            path.append(nodes[at])
            at = nodes[at].get("parent")
        yield path[::-1]


def _path(
    path: Sequence[Mapping[str, Any]], trace: Mapping[str, Any], episode: Mapping[str, Any], where: str, dump: Dump
) -> Rollout:
    tokens, drawn = [], []
    for node in path:
        ids = _column(node, "token_ids", where).astype(np.int64).tolist()
        tokens.append(ids)
        drawn.append(_column(node, "mask", where, len(ids)) == 1)
    has_ids = all(mask.any() for node, mask in zip(path, drawn, strict=True) if node.get("sampled"))
    pieces: list[tuple[Source, list[int] | str]] = []
    values: dict[str, Array] = {}
    if dump.tokenizer is not None and has_ids:
        for node, ids, mask in zip(path, tokens, drawn, strict=True):
            pieces += [(Source.POLICY if on else _source(node), [token]) for token, on in zip(ids, mask, strict=True)]
        counts = [int(mask.sum()) for mask in drawn]
        values = _known({name: _of_nodes(path, theirs, counts, where) for name, theirs in OF_NODE.items()})
    else:
        for node in path:
            text = _message_text(node["message"])
            pieces.append((Source.POLICY, text) if node.get("sampled") else (_source(node), f"{text}\n\n"))
    segments = _segments(pieces, dump.tokenizer, where)
    prompt = "".join(segment["text"] for segment in segments if segment["source"] == Source.PROMPT)
    task, work = trace.get("task") or {}, (episode.get("run") or {}).get("work") or {}
    policy, asked = work.get("policy") or {}, (task.get("data") or {}).get("prompt")
    rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward is not None}
    scored = [reward for reward in rewards.values() if reward.get("score", 0.0) is not None]
    in_batch = dump.path.parts[-3:-1] == ("train", "effective")  # otherwise the folder's step is another
    step = STEP.fullmatch(dump.path.parts[-4]) if in_batch and len(dump.path.parts) > 3 else None
    version = policy.get("start")
    if step and version is not None and version == policy.get("end"):  # otherwise a token's version is unknown
        for segment in segments:
            if segment["source"] == Source.POLICY and "ids" in segment:
                segment["versions"] = [[version, len(segment["ids"])]]
    advantage = (trace.get("info") or {}).get("advantage")
    record = {
        "question": asked if isinstance(asked, str) else None,
        "golden_answers": None,
        "step": int(step[1]) if step else None,
        "segments": segments,
        "reward": sum(map(_weighted, scored)) if scored and len(scored) == len(rewards) else None,
        "advantage": _same(values.get("advantage", ())) if advantage is None else advantage,
        "parts": plain({name: reward.get("score") for name, reward in rewards.items()} | (trace.get("metrics") or {}))
        | {"agent": (trace.get("agent") or {}).get("name")}
        | {f"version at its {end}": policy.get(end) for end in ("start", "end") if end in policy},
        "reason": trace.get("stop_condition") or "",
    }
    return Rollout(
        group=(episode.get("group") or {}).get("id") or task.get("hash") or prompt, record=record, values=values
    )


def _weighted(reward: Mapping[str, float]) -> float:
    weight = reward.get("weight")
    return reward.get("score", 0.0) * (1.0 if weight is None else weight)


def _column(row: Mapping[str, Any], key: str, where: str, count: int | None = None) -> Array:
    """Return a list of numbers, true, false and null as float64, checked to have `count` entries if given."""
    try:
        array = np.array([] if row.get(key) is None else row[key], np.float64)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    are_ids = (array == np.floor(array)) & (np.abs(array) < 2**31)
    if array.ndim != 1 or (len(array) != count if count is not None else not are_ids.all()):
        many = "whole numbers" if count is None else f"{count} numbers, one for each token"
        raise UserError(f'{where}: expected "{key}" to be a list of {many}; fix or remove this record')
    return array


def _of_nodes(path: Sequence[Mapping[str, Any]], key: str, counts: Sequence[int], where: str) -> Array:
    """Return the values of the sampled tokens of a path, nan for messages without values."""
    none = (np.full(count, np.nan) for count in counts)
    return np.concatenate(
        [
            _column(node, key, where, count) if node.get(key) else blank
            for node, count, blank in zip(path, counts, none, strict=True)
        ]
    )


def _known(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays that have any finite value, as float32."""
    most = np.finfo(np.float32).max
    known = {name: array for name, array in values.items() if np.isfinite(array).any()}
    return {name: np.clip(array, -most, most).astype(np.float32) for name, array in known.items()}


def _same(values: Sequence[float] | Array) -> float | None:
    """Return the value that all entries have; None if they differ, or if there are none."""
    found = set(map(float, values))
    return found.pop() if len(found) == 1 else None


def _segments(
    pieces: Iterable[tuple[Source, list[int] | str]], tokenizer: Tokenizer | None, where: str
) -> list[dict[str, Any]]:
    """Return the segments of pieces of ids or text, with adjacent pieces of one source merged. Pieces before the first
    of the policy are the prompt."""
    segments: list[dict[str, Any]] = []
    begun = False
    for source, run in groupby(pieces, key=lambda piece: piece[0]):
        begun = begun or source == Source.POLICY
        contents = [content for _, content in run]
        ids = [token for content in contents if isinstance(content, list) for token in content]
        text = "".join(content for content in contents if isinstance(content, str))
        new = {"source": source if begun else Source.PROMPT, "text": text}
        if tokenizer is not None and ids:
            try:
                new |= {"ids": ids, "text": tokenizer.decode(ids)}
            except ValueError as error:
                raise UserError(f"{where}: the dump is from another tokenizer ({error}); name its own") from None
        segments.append(new)
    return segments


def _source(node: Mapping[str, Any]) -> Source:
    """Return the source of a message, and of the chat template around it, for tokens that the policy did not sample."""
    return Source.RETRIEVED if node["message"].get("role") == "tool" else Source.FEEDBACK


def _message_text(message: Mapping[str, Any]) -> str:
    content, calls = message.get("content"), [call.get("function") or call for call in message.get("tool_calls") or ()]
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [message.get("reasoning_content"), *(part.get("text") for part in parts if isinstance(part, dict))]
    texts += [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _thresher(dump: Dump) -> Iterator[Rollout]:
    records = []
    for number, record in read_records(dump.path, unverified=dump.unverified, foreign=True):
        check_shape(record, TRAJECTORY | START, f"{dump.path}:{number}")
        if not isinstance(record.get("segments"), list):
            raise UserError(f'{dump.path}:{number}: no "segments" in this record; fix or remove it')
        branches = {name: part for name, part in (record.get("branches") or {}).items() if part is not None}
        records.append({"step": step_of(dump.path.stem), **record, "branches": branches})
    values = dump.path.with_suffix(".safetensors")
    stats = read_token_stats(values, *policy_counts(records), unverified=dump.unverified)
    for n, record in enumerate(records):
        group = record.get("group", record.get("id", n))
        if stats is None:
            yield Rollout(group=group, record=record)
        else:
            yield Rollout(group=group, record=record, values=stats[n].values, branches=stats[n].branches)


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of one format. columns: alternative sets of required keys. text_only: the format has no token ids."""

    columns: tuple[frozenset[str], ...]
    read: Callable[[Dump], Iterator[Rollout]]
    text_only: bool = False


def _columns(*names: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(each.split()) for each in names)


READERS = {
    "thresher": Reader(_columns("segments"), _thresher),
    "trl": Reader(_columns("prompt completion"), _trl, text_only=True),
    "verl": Reader(_columns("input output"), _verl, text_only=True),
    "prime-rl": Reader(_columns("traces", "nodes", "token_ids loss_mask"), _prime_rl),
}
