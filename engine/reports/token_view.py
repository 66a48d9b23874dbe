"""The token view: the trajectories of a stored step as a page on which each token is colored by one of its values.

    step_000010.html   one step, one self-contained file of at most 10 MB: groups that do not fit are left out
    index.html         in a folder of such pages: the run's stored steps with their measures

The page is this folder's token_view.html, .css and .js with the step's data embedded as JSON: groups of samples, their
text cut into tokens, values in base64. The gradients are those that the update computed; token_formulas.js computes
ratios and KL. The script inserts sampled text only as text nodes. A character whose bytes are split over several tokens
is shown with the last of them. Repeated strings (prompts, passages) are stored once per group. Differences of log-probs
are computed here in float32 and stored as float16, because rounding the log-probs themselves to float16 would exceed
the differences.
"""

import base64
import codecs
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.common.console import visible
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.config.objectives import surrogate_name
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection
from thresher.engine.reports.pages import (
    ENDINGS,
    Record,
    is_right,
    model_folders,
    open_run,
    page_part,
    page_template,
    step_files,
    steps_in_words,
    tags_of,
)
from thresher.engine.store.run_folder import RunFolder, step_name
from thresher.engine.store.token_stats import TokenStats, read_token_stats
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.rewards.reward import Source

MOST_BYTES = 10_000_000  # of a page: mail servers accept this size
Group = Mapping[str, Any]
WORD = re.compile(r"\s*\S+|\s+")
LETTERS = {Source.PROMPT: "t", Source.RETRIEVED: "r", Source.FEEDBACK: "f"}  # and y: the policy


def write_token_view(run: str | Path, step: str, out: str | Path | None = None, unverified: bool = False) -> Path:
    """Write the page of a stored step, or of "all" steps with an index; return the path of the page or of the index.

    out: the file, or for "all" the folder; default: the folder tokens/ of the run. Raise UserError if the run has no
    such step, a file of it is malformed or, unless `unverified`, fails verification, its tokenizer is gone, or `out`
    cannot be written.
    """
    folder, recipe = open_run(run, unverified)
    stored = list(step_files(folder.trajectories))
    if not stored if step == "all" else not step.isdecimal() or int(step) not in stored:
        listed = f"stored are {steps_in_words(stored)}" if stored else "none is stored (run.keep_trajectories)"
        raise UserError(f"--tokens {step}: expected a stored step of {run}, or all; {listed}")
    tokenizer, pages = tokenizer_of(folder, recipe), {number: f"{step_name(number)}.html" for number in stored}
    if step != "all":
        target = Path(out) if out is not None else folder.path / "tokens" / pages[int(step)]
        write_page(target, _page(folder, recipe, int(step), tokenizer, {}))
        return target
    target = Path(out) if out is not None else folder.path / "tokens"
    for before, number, after in zip([None, *stored], stored, [*stored[1:], None], strict=False):
        links = {"before": pages.get(before or -1), "after": pages.get(after or -1), "index": "index.html"}
        present = {name: page for name, page in links.items() if page is not None}
        write_page(target / pages[number], _page(folder, recipe, number, tokenizer, present))
    records = {record["step"]: record for record in folder.metrics() if "eval" not in record}
    rows = [(number, page, records.get(number, {})) for number, page in pages.items()]
    index = page_template("token_index.html").render(
        name=str(folder.path), css=page_part("token_view.css"), recipe=recipe, rows=rows
    )
    write_page(target / "index.html", index)
    return target / "index.html"


def write_page(path: Path, page: str) -> None:
    """Write a page atomically, and create its folder. Raise UserError if the folder cannot be created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made ({error.strerror}); choose another --out") from None
    atomic_write_text(path, page)


def tokenizer_of(run: RunFolder, recipe: Recipe) -> Tokenizer:
    """Return the run's tokenizer. Raise UserError if no folder of its model has one."""
    for folder in model_folders(run, recipe):
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder)
    raise UserError(
        f"{run.path}: no tokenizer.json in its checkpoints nor in {recipe.model.path}; put the model's folder back"
    )


def _page(run: RunFolder, recipe: Recipe, step: int, tokenizer: Tokenizer, links: Mapping[str, str]) -> str:
    path = run.trajectories / f"{step_name(step)}.jsonl"
    records = list(run.stored_trajectories(path))
    stats = read_token_stats(path.with_suffix(".safetensors"), *policy_counts(records), unverified=run.unverified)
    groups = groups_of(records, stats, tokenizer, tags_of(recipe), step)
    notes = notes_of(recipe, groups, stats is not None)
    facts = facts_of(records, groups, stats is not None, tokenizer, recipe, notes)
    return assemble(f"Step {step}", about_run(run, recipe), groups, facts, links)


def about_run(run: RunFolder, recipe: Recipe) -> str:
    """Return the line below a page's title."""
    system = recipe.system.name if recipe.system else "no system"
    return f"{run.path} · {system}, objective {recipe.grpo.objective}, seed {recipe.run.seed}"


def assemble(
    title: str,
    about: str,
    groups: Sequence[Group],
    facts: Mapping[str, Any],
    links: Mapping[str, str],
    most_bytes: int = MOST_BYTES,
) -> str:
    """Return the page of these groups, of at most `most_bytes`: as many groups as fit, those with a signal first.

    about: the line below the title. facts: the result of `facts_of`.
    """
    template = page_template("token_view.html")

    def render(kept: Sequence[Group], left_out: str) -> str:
        data = json.dumps({**facts, "groups": kept}, ensure_ascii=False, separators=(",", ":"))
        return template.render(
            title=title,
            about=about,
            groups=kept,
            left_out=left_out,
            links=links,
            css=page_part("token_view.css"),
            script=page_part("token_formulas.js") + page_part("token_view.js"),
            data=data.replace("<", "\\u003c"),  # so that no text can end the script element or open a comment
        )

    empty = len(render([], "").encode())
    room = most_bytes - len(render([], _left_out(groups, groups)).encode())
    kept: set[int] = set()
    for n in sorted(range(len(groups)), key=lambda n: (not has_signal(groups[n]), n)):
        size = len(render([groups[n]], "").encode()) - empty + 1  # and a comma
        if size <= room:
            room -= size
            kept.add(n)
    missing = [group for n, group in enumerate(groups) if n not in kept]
    return render([group for n, group in enumerate(groups) if n in kept], _left_out(missing, groups))


def has_signal(group: Group) -> bool:
    """Return whether any sample has a non-zero or unknown advantage."""
    return any(sample["advantage"] != 0 for sample in group["samples"])


def _left_out(missing: Sequence[Group], groups: Sequence[Group]) -> str:
    if not missing:
        return ""
    numbers = ", ".join(str(group["n"]) for group in missing[:12])
    numbers += f" and {len(missing) - 12} more" if len(missing) > 12 else ""
    idle = sum(not has_signal(group) for group in missing)
    return (
        f"{len(missing)} of {len(groups)} groups are left out, because the page would be larger than"
        f" {MOST_BYTES / 1e6:.0f} MB ({idle} of them without a signal): {numbers}."
    )


# The data of a page


def policy_counts(records: Sequence[Record]) -> tuple[list[int], list[int]]:
    """Return the number of policy tokens of each trajectory with its trained branches, and of its other branches."""

    def count(segments: Sequence[Record]) -> int:
        return sum(len(s.get("ids") or ()) for s in segments if s.get("source") == Source.POLICY)

    def of_branches(record: Record, trained: bool) -> int:
        branches, names = record.get("branches") or {}, of_trained(record)
        return sum(count(segments) for name, segments in branches.items() if (name in names) is trained)

    return (
        [count(record.get("segments") or ()) + of_branches(record, trained=True) for record in records],
        [of_branches(record, trained=False) for record in records],
    )


def groups_of(
    records: Sequence[Record],
    stats: Sequence[TokenStats] | None,
    tokenizer: Tokenizer | None,
    tags: Sequence[str],
    step: int | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of a step in their order, ready for JSON.

    tokenizer: None cuts the policy's text into words, which have no values. step: for records without a "step". Raise
    UserError if the tokenizer is not the run's.
    """
    groups: dict[Any, dict[str, Any]] = {}
    texts: dict[Any, dict[str, int]] = {}  # group -> its strings, each with its index
    for place, record in enumerate(records):
        number = record.get("group", 0)
        new: dict[str, Any] = {
            "n": number,
            "step": record.get("step", step),
            "question": visible(record.get("question", "")),
        }
        if (golds := record.get("golden_answers", [])) is not None:  # null: the dump has none
            new["golds"] = [visible(gold) for gold in golds]
        new["samples"] = []
        sample = _sample(record, tokenizer, tags, texts.setdefault(number, {}))
        if tokenizer is not None and new["step"] is not None and (runs := version_runs(record)):
            sample["versions"] = runs
        if stats is not None:
            sample |= values_of(stats[place])
        groups.setdefault(number, new)["samples"].append(sample)
    for number, group in groups.items():
        group["texts"] = list(texts[number])
    return list(groups.values())


def _sample(record: Record, tokenizer: Tokenizer | None, tags: Sequence[str], texts: dict[str, int]) -> dict[str, Any]:
    """Return a trajectory's data for the page; add its strings to the group's `texts`."""

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def cut(segments: Sequence[Record]) -> list[list[Any]]:
        found: list[list[Any]] = []
        for segment in segments:
            source, text = segment.get("source"), str(segment.get("text", ""))
            if source == Source.POLICY:
                found.append(["y", *_tokens(text, segment.get("ids") or [], tokenizer, tags)])
            elif source == Source.PROMPT:
                found.extend([letter, place(part)] for letter, part in prompt_parts(text, record))
            elif source in list(Source):
                found.append([LETTERS[Source(source)], place(visible(text))])
        return found

    reason = record.get("reason", "")
    made: dict[str, Any] = {
        "n": record.get("sample", 0),
        "right": is_right(record) if "em" in (record.get("parts") or {}) else record.get("right"),
        "reward": record.get("reward"),
        "advantage": record.get("advantage"),
        "ending": ENDINGS.get(reason, visible(reason)) if reason != "answered" else "",
        "parts": {visible(name): _plain(value) for name, value in (record.get("parts") or {}).items()},
        "searches": [[visible(s.get("query", "")), len(s.get("passages") or ())] for s in record.get("searches") or []],
        "segments": cut(record.get("segments") or []),
    }
    if "answer" in record:
        made["answer"] = None if record["answer"] is None else visible(record["answer"])
    if len(forked := record.get("forked") or []) == 2:  # append the number of tokens that the other sample wrote
        written = [len(part[2]) for part in made["segments"] if part[0] == "y"]
        made["forked"] = [*forked, sum(written[: forked[1]])]
    if branches := record.get("branches"):
        trained = of_trained(record)
        made["branches"] = [[visible(name), cut(part), name in trained] for name, part in branches.items()]
    return made


def of_trained(record: Record) -> Sequence[str]:
    """Return the names of a trajectory's trained branches."""
    return record.get("trained_branches") or ()


def _tokens(
    text: str, ids: Sequence[int], tokenizer: Tokenizer | None, tags: Sequence[str]
) -> tuple[str, list[int], list[int], list[int]]:
    """Return the text, each token's length in it in UTF-16 units, the ids, and the positions of possible line breaks.
    Without a tokenizer the lengths are those of words, each with the white space before it."""
    if tokenizer is None:
        words = [visible(word) for word in WORD.findall(text)]
        return "".join(words), [units(word) for word in words], [], line_breaks("".join(words), tags)
    try:
        pieces = token_texts([tokenizer.token_bytes(token) for token in ids])
    except ValueError as error:
        raise UserError(f"the trajectories are from another tokenizer ({error}); give the run its own") from None
    if "".join(pieces) != text:
        raise UserError(
            f"the trajectories are from another tokenizer: it spells {''.join(pieces)[:60]!r}, they {text[:60]!r}"
        )
    shown = [visible(piece) for piece in pieces]
    return "".join(shown), [units(piece) for piece in shown], list(ids), line_breaks("".join(shown), tags)


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """Return the text that each token adds to the joined bytes, "" if it ends inside a character. Invalid UTF-8 becomes
    U+FFFD, as when all bytes are decoded at once."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(token, final=n == len(tokens) - 1) for n, token in enumerate(tokens)]


def line_breaks(text: str, tags: Sequence[str]) -> list[int]:
    """Return the offsets, in UTF-16 units, of opening tags within a line: the page breaks the line there."""
    opening = "|".join(re.escape(tag) for tag in tags if not tag.startswith("</"))
    found = (match.start() for match in re.finditer(opening or "(?!)", text))
    return [units(text[:at]) for at in found if text[:at].strip(" ") and not text[:at].rstrip(" ").endswith("\n")]


def units(text: str) -> int:
    """Return the length of a text as JavaScript counts it."""
    return len(text.encode("utf-16-le")) // 2


def prompt_parts(text: str, record: Record) -> list[tuple[str, str]]:
    """Return a prompt cut into (letter, text): t template, q the question, g a passage that came with the question."""
    needles = [("q", str(record.get("question") or ""))]
    needles += [("g", str(passage.get("text") or "")) for passage in record.get("passages") or []]
    spans = []
    for letter, needle in needles:
        at = text.rfind(needle) if needle else -1
        if at >= 0:
            spans.append((at, at + len(needle), letter))
    parts, end = [], 0
    for start, stop, letter in sorted(spans):
        if start < end:
            continue
        parts += [("t", text[end:start]), (letter, text[start:stop])]
        end = stop
    return [(letter, visible(part)) for letter, part in (*parts, ("t", text[end:])) if part]


def values_of(stats: TokenStats) -> dict[str, Any]:
    """Return the values of the sampled tokens of a trajectory and its trained branches. Values of the update are
    present only if the trajectory was in one."""
    values = {name: value for name, value in stats.values.items() if name == "clipped" or np.isfinite(value).any()}
    made: dict[str, Any] = {}
    if "sampled" in values:
        made["logprob"] = half(values["sampled"])
    if len(stats.branches):
        made["branch_logprob"] = half(stats.branches)
    if "recomputed" in values and "sampled" in values:
        made["rollout"] = half(values["recomputed"] - values["sampled"])
    if "entropy" in values:
        made["entropy"] = half(values["entropy"])
    if "clipped" in values and "recomputed" in values:
        made["clipped"] = np.flatnonzero(values["clipped"]).tolist()
    policy = values.get("recomputed", values.get("sampled"))  # a dump may have only the log-prob recorded at sampling
    if "reference" in values and policy is not None:
        made["reference"] = half(policy - values["reference"])
    if "advantage" in values:
        made["weighted"] = half(values["advantage"])
    if "gradient" in values:  # divided by the sample's largest, because most are too small for float16
        made["unit"] = float(np.nanmax(np.abs(values["gradient"]))) or 1.0
        made["gradient"] = half(values["gradient"] / made["unit"])
    return made


def version_runs(record: Record) -> list[tuple[int | None, int]]:
    """Return the weight versions of the policy's tokens as runs (version or None, tokens), in order.

    The tokens are those of a trajectory and its trained branches; [] if no segment has a version. Raise UserError if a
    segment's `versions` do not add up to its number of tokens.
    """
    branches = record.get("branches") or {}
    parts = [record.get("segments") or [], *(branches[name] for name in branches if name in of_trained(record))]
    runs: list[tuple[int | None, int]] = []
    for segment in (segment for part in parts for segment in part if segment.get("source") == Source.POLICY):
        count, said = len(segment.get("ids") or ()), segment.get("versions")
        try:
            found = [(None, count)] if said is None else [(int(version), int(tokens)) for version, tokens in said]
        except (TypeError, ValueError):
            found = []
        if sum(tokens for _, tokens in found) != count or any(tokens < 0 for _, tokens in found):
            raise UserError(
                f'trajectory {record.get("id", "")!r}: expected "versions" as [version, tokens] of {count} tokens,'
                f" found {str(said)[:60]}; put a copy back, or take the key out"
            )
        runs += found
    return runs if any(version is not None for version, _ in runs) else []


def half(values: npt.NDArray[Any]) -> str:
    """Return values as little-endian float16 in base64, clipped to the range of float16."""
    most = np.finfo(np.float16).max
    return base64.b64encode(np.clip(values, -most, most).astype("<f2").tobytes()).decode("ascii")


def odd_tokens(records: Sequence[Record], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the policy's tokens whose bytes alone are not valid UTF-8: id -> bytes in hexadecimal."""
    used = {
        token
        for record in records
        for segments in (record.get("segments") or [], *(record.get("branches") or {}).values())
        for segment in segments
        if segment.get("source") == Source.POLICY
        for token in segment.get("ids") or ()
    }
    odd = {}
    for token in sorted(used):
        spelled = tokenizer.token_bytes(token)
        if "\ufffd" in spelled.decode("utf-8", errors="replace"):
            odd[token] = spelled.hex(" ")
    return odd


def facts_of(
    records: Sequence[Record],
    groups: Sequence[Group],
    updated: bool,
    tokenizer: Tokenizer | None,
    recipe: Recipe | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the data that the script reads in addition to the groups. updated: token statistics of an update exist.
    tokenizer: None if the text is cut into words. recipe: None if the loss is unknown. notes: shown above the groups.
    """
    return {
        "updated": updated,
        "words": tokenizer is None,
        "steps": len({group["step"] for group in groups}) > 1,
        "odd": {} if tokenizer is None else odd_tokens(records, tokenizer),
        "objective": objective_of(recipe.grpo if recipe else None),
        "notes": notes,
    }


def objective_of(grpo: GrpoSection | None) -> dict[str, Any]:
    """Return the data that the script shows about the loss. grpo: None if the loss is unknown."""
    if grpo is None:
        return {"objective": "unknown", "high": 1.2}
    high = 1.2 if surrogate_name(grpo.objective) == "gspo" else 1 + grpo.clip_high  # gspo clips per sequence
    return {"objective": visible(grpo.objective), "high": high}


def notes_of(recipe: Recipe, groups: Sequence[Group], stored: bool) -> list[str]:
    """Return the page's notes on a run's step: missing values, and how to read the others. stored: the step has token
    statistics."""
    if not stored:
        return [
            "This step has no log-probs: none were stored (run.token_stats_mib), or newer steps took their space."
            " Sources and advantages are shown."
        ]
    grpo, temperature = recipe.grpo, recipe.rollout.temperature
    samples = [sample for group in groups for sample in group["samples"]]
    said = {
        "The run has no KL, so there was no reference: ratios to it and KL are not shown.": not any(
            "reference" in sample for sample in samples
        ),
        "This step was stored by an earlier version of Thresher, which kept no gradients: they are not shown.": any(
            "rollout" in sample and "gradient" not in sample for sample in samples
        ),
        f"Log-probs are at the rollout's temperature, {temperature:g}.": temperature != 1,
        f"The update's values are of the first of {grpo.epochs_per_batch} passes over the batch.": (
            grpo.epochs_per_batch > 1
        ),
        f"The batch had {grpo.updates_per_batch} updates: a part's values were computed after the updates before it.": (
            grpo.updates_per_batch > 1
        ),
        "The surrogate's ratio is to log-probs that the update computed itself before its first step; shown is the"
        " ratio to the rollout's.": grpo.old_logprobs == "recomputed",
    }
    return [sentence for sentence, holds in said.items() if holds]


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else visible(value)
