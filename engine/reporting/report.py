"""`thresher report`: a run folder as one page that a person can read, with its curves as pictures in it.

    report.html           what came of it, the curves, trajectories before and after, the recipe
    plots/NAME.png        one picture a chart (engine/reporting/plots.py), and overview.png for a README

The page holds its pictures, so that a copy of it is whole, and needs no network and no script. It is made from the run
folder's files alone, so it can be written again at any time, also while the run goes on or after it was killed: what is
not there yet is left out, and the page says so. Text that was sampled or retrieved is shown escaped, control characters
and all. What the page cannot know (what the data is, what a figure does not prove) stands in an optional notes.md,
paragraphs apart by blank lines.

Deliberately absent: any figure that is not in the run's files, and comparisons between runs.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.padding import Padding
from rich.text import Text

from thresher.common.console import console
from thresher.common.console import shown as shown_number
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import RetrievalSection
from thresher.engine.reporting.charts import ENDINGS, charts_of
from thresher.engine.reporting.excerpts import Chunk, examples_of
from thresher.engine.reporting.pages import open_run, page_template, steps_in_words, stored_steps
from thresher.engine.reporting.plots import draw, draw_overview, smoothing
from thresher.engine.store.run_folder import RunFolder, step_of
from thresher.policy.config import read_config
from thresher.policy.families import find_family
from thresher.policy.model import Policy
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.rewards.statistics import wilson
from thresher.rewards.transcript import Source

Record = Mapping[str, Any]

MEASURES = (  # key of an evaluation, its name, and whether it is a share
    ("em", "Exact match", True),
    ("f1", "F1", True),
    ("contains", "Contains a gold answer", True),
    ("answered", "Gave an answer", True),
    ("recall_evidence", "Answer recall of the evidence", True),
    ("recall_rationale", "Answer recall of the rationale", True),
    ("recall_notes", "Answer recall of the notes", True),
    ("recall_evaluation", "Answer recall of the evaluations", True),
    ("recall_analysis", "Answer recall of the analysis", True),
    ("compression", "Compression ratio", False),
    ("relevance_precision", "Precision of named references", True),
    ("relevance_recall", "Recall of named references", True),
    ("reward", "Reward", False),
    ("searches", "Searches", False),
    ("response_tokens", "Tokens written", False),
)
SPAN_COLORS = {"think": "magenta", "search": "blue", "evaluate": "cyan", "refine": "cyan", "answer": "green"}
PAGE_CHARS, TERMINAL_CHARS = 2400, 700  # of one segment; the files hold the rest
OVERVIEW = ("reward", "em")


def write_report(run: str | Path, out: str | Path | None = None, unverified: bool = False) -> Path:
    """Write the report of a run folder into the folder `out` (default: the run folder); returns report.html's path.

    UserError if `run` is no run folder, if a file in it is malformed or, unless `unverified`, not as it was written, or
    if `out` cannot be written.
    """
    folder, recipe = open_run(run, unverified)
    out = Path(out) if out is not None else folder.path
    records, summary = folder.metrics(), folder.summary()
    charts = charts_of(
        records,
        kl_value=recipe.grpo.kl_value,
        beta=recipe.grpo.beta,
        max_grad_norm=recipe.optim.max_grad_norm,
        groups=recipe.rollout.questions_per_step,
    )
    steps = [record for record in records if "eval" not in record]
    evals = [(record["step"], record["eval"] or {}) for record in records if "eval" in record]
    overview = [chart for chart in charts if chart.name in OVERVIEW]
    examples = examples_of(folder, recipe, 3, PAGE_CHARS)
    plots = out / "plots"
    try:
        plots.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            draw(chart, plots / f"{chart.name}.png")
        if overview:
            draw_overview(overview, plots / "overview.png")
    except OSError as error:
        raise _unwritable(out, error) from None
    page = page_template("report.html").render(
        name=str(folder.path),
        recipe=recipe,
        toml=recipe.to_toml(),
        summary=summary,
        last_step=steps[-1]["step"] if steps else 0,
        tiles=_tiles(summary or {}, evals),
        notes=_notes(out, folder.path),
        measures=_measures(evals),
        evals=evals,
        interval=_interval(evals[-1][1]) if evals else "",
        facts=_facts(folder, recipe),
        time=_time_sentence(steps, evals, summary),
        charts=charts,
        overview=overview,
        picture=lambda name: _data_uri(plots / f"{name}.png"),
        window=smoothing(len(steps)),
        endings=ENDINGS,
        examples=examples,
        stored=steps_in_words(stored_steps(folder)),
    )
    try:
        atomic_write_text(out / "report.html", page)
    except OSError as error:
        raise _unwritable(out, error) from None
    return out / "report.html"


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"{out}: cannot write the report ({error.strerror}); choose another folder")


def _data_uri(picture: Path) -> str:
    """A picture as the page holds it, so that a copy of the page is whole."""
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode('ascii')}"


def print_trajectories(run: str | Path, count: int = 2) -> None:
    """Print up to `count` trajectories of the last evaluation: tags in colour, passages dim, feedback yellow."""
    folder, recipe = open_run(run)
    for example in examples_of(folder, recipe, count, TERMINAL_CHARS):
        excerpt = example.excerpts[-1]
        console.print(Text.assemble("\n", (example.question, "bold")))
        verdict = ("right", "green") if excerpt.right else ("wrong", "red")
        searches = f"{excerpt.searches} search{'' if excerpt.searches == 1 else 'es'}"
        about = f", {searches}, reward {shown_number(excerpt.reward)}; expected: {' | '.join(example.golds)}"
        console.print(Text.assemble(verdict, (about, "dim")))
        for part in excerpt.parts:
            for line in part.lines:
                console.print(Padding(_terminal_line(part.source, line), (0, 0, 0, 2), expand=False))


def _terminal_line(source: Source, line: Sequence[Chunk]) -> Text:
    base = {Source.RETRIEVED: "dim", Source.FEEDBACK: "yellow"}.get(source, "")
    text = Text()
    for chunk in line:
        color = SPAN_COLORS.get(chunk.span, "bright_black") if chunk.is_tag else ""
        text.append(chunk.text, f"{base} {color}".strip())
    text.rstrip()
    return text


def _notes(*folders: Path) -> list[str]:
    """The paragraphs of the first notes.md there is."""
    for folder in folders:
        if (folder / "notes.md").is_file():
            text = (folder / "notes.md").read_text(encoding="utf-8", errors="replace")
            return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    return []


# Figures


def _tiles(summary: Record, evals: Sequence[tuple[int, Record]]) -> list[tuple[str, str, str]]:
    """(name, figure, what it was before) for the head of the page."""
    tiles = []
    for key, name in (("em", "exact match"), ("f1", "F1")):
        values = [measures.get(key) for _, measures in (*evals[:1], *evals[-1:])]
        if values and values[-1] is not None:
            before = "" if len(evals) < 2 or values[0] is None else f"from {values[0]:.1%}"
            tiles.append((f"{name}, held out", f"{values[-1]:.1%}", before))
    for key, name in (("rollout_tokens_per_s", "rollout"), ("train_tokens_per_s", "update")):
        if (value := summary.get(key)) is not None:
            tiles.append((name, f"{value:,.0f}", "tokens/s"))
    if (seconds := summary.get("seconds")) is not None:
        tiles.append(("in all", duration(seconds), f"{summary['steps']} steps" if "steps" in summary else ""))
    return tiles


def _measures(evals: Sequence[tuple[int, Record]]) -> list[tuple[str, str, str, str]]:
    """(name, before, after, change) of each measure that the last evaluation has; before and change may be ""."""
    if not evals:
        return []
    first, last = ({**measures, **_parts(measures)} for measures in (evals[0][1], evals[-1][1]))
    rows = []
    for key, name, share in (*MEASURES, *((key, key, False) for key in _parts(last))):
        old, new = (first.get(key) if len(evals) > 1 else None), last.get(key)
        if new is None:
            continue
        if share:
            change = "" if old is None else f"{100 * (new - old):+.1f} pts"
            rows.append((name, "" if old is None else f"{old:.1%}", f"{new:.1%}", change))
        else:
            change = "" if old is None else f"{new - old:+.2f}"
            rows.append((name, "" if old is None else f"{old:.2f}", f"{new:.2f}", change))
    return rows


def _parts(measures: Record) -> Record:
    """The parts of the system's own reward, under names to show; none where a single one is all of it."""
    parts = measures.get("parts") or {}
    return {f"Reward's part: {name}": value for name, value in parts.items()} if len(parts) > 1 else {}


def _interval(measures: Record) -> str:
    """Wilson's 95% interval for exact match, in words."""
    share, count = measures.get("em"), measures.get("questions")
    if share is None or not count:
        return ""
    low, high = wilson(share, count)
    return f"{low:.1%} to {high:.1%}"


def _time_sentence(steps: Sequence[Record], evals: Sequence[tuple[int, Record]], summary: Record | None) -> str:
    """Where the time went, the largest part first."""
    parts = {
        name: sum(record.get(f"{key}_seconds") or 0.0 for record in steps)
        for key, name in (
            ("update", "the update"),
            ("decode", "decoding"),
            ("prefill", "prefill"),
            ("search", "searching"),
            ("host", "Python around the rollout"),
            ("reward", "rewards"),
        )
    }
    parts["evaluations"] = sum(measures.get("seconds") or 0.0 for _, measures in evals)
    known = sum(parts.values())
    total = max((summary or {}).get("seconds") or 0.0, known)
    if not total:
        return ""
    parts["loading, checkpoints and files"] = total - known
    shares = [(seconds / total, name) for name, seconds in parts.items()]
    listed = ", ".join(f"{share:.0%} {name}" for share, name in sorted(shares, reverse=True) if share >= 0.005)
    waited = ""
    if rollout := sum(record.get("rollout_seconds") or 0.0 for record in steps):
        share = sum(record.get("search_seconds") or 0.0 for record in steps) / rollout
        waited = f" Decoding waited for searches {share:.1%} of the rollouts' time."
    return f"Of {duration(total)}: {listed}.{waited}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# What ran


def _facts(run: RunFolder, recipe: Recipe) -> list[tuple[str, str]]:
    """(name, value) of what a reader must know of the run. What lies outside the run folder may be gone by now."""
    rollout, grpo, optim = recipe.rollout, recipe.grpo, recipe.optim
    model = _model(run, recipe)
    facts = [("Model", f"{model}; {recipe.model.dtype} on {recipe.model.device}" if model else recipe.model.path)]
    if warmup := _warmup(Path(recipe.model.path) / "sft.json"):
        facts.append(("Warm-up", warmup))
    if recipe.system:
        options = "".join(f", {key} = {value}" for key, value in recipe.system.options.items())
        facts.append(("System", recipe.system.name + options))
    if recipe.data:
        facts.append(("Questions", f"{recipe.data.train} (training), {recipe.data.dev or 'none'} (held out)"))
    if recipe.retrieval:
        facts.append(("Retrieval", _retrieval(recipe.retrieval)))
    steps = grpo.updates_per_batch * grpo.epochs_per_batch
    turns = f"{rollout.max_turns} turn{'s' if rollout.max_turns > 1 else ''}"
    kl = f"KL {grpo.beta:g} × {grpo.kl_value}" if grpo.beta > 0 else "no KL"
    facts += [
        (
            "Step",
            f"{rollout.questions_per_step} questions × {rollout.group_size} samples at temperature"
            f" {rollout.temperature:g}, at most {turns} and {rollout.max_context:,} tokens each",
        ),
        (
            "Objective",
            f"GRPO, ratio clipped to [{1 - grpo.clip_low:g}, {1 + grpo.clip_high:g}], {kl}, mean per"
            f" {grpo.aggregation}; AdamW at {optim.lr:g} ({optim.schedule}), {steps} update"
            f"{'s' if steps > 1 else ''} per batch",
        ),
        ("Seed", str(recipe.run.seed)),
    ]
    return facts


def _model(run: RunFolder, recipe: Recipe) -> str:
    """The model in words, from the newest checkpoint or else from where the run started; "" if both are gone."""
    checkpoints = sorted((p for p in run.checkpoints.glob("step_*") if step_of(p.name) is not None), reverse=True)
    for folder in (*checkpoints, Path(recipe.model.path)):
        try:
            config = read_config(folder)
        except UserError:
            continue
        with torch.device("meta"):
            count = Policy(config).parameter_count()
        return (
            f"{find_family(config.model_type).models}, {count:,} parameters:"
            f" {config.num_hidden_layers} layers of width {config.hidden_size},"
            f" {config.num_attention_heads} heads over {config.num_key_value_heads} of keys and values, MLP"
            f" {config.intermediate_size:,}, vocabulary {config.vocab_size:,},"
            f" {'tied' if config.tie_word_embeddings else 'untied'} head"
        )
    return ""


def _warmup(path: Path) -> str:
    """What `thresher sft` wrote beside its model, in words."""
    try:
        record = read_json_object(path)
    except UserError:
        return ""
    text = f"{record.get('steps')} steps of supervised fine-tuning"
    if record.get("restarts"):
        text += f" after {record['restarts']} restarts"
    copied, gate = record.get("names copied right"), record.get("gate")
    if isinstance(copied, float):
        text += f"; {copied:.1%} of the held-out copied tokens right"
    if isinstance(gate, float):
        text += f" (gate {gate:.0%}, {'passed' if record.get('passed') else 'NOT passed'})"
    return text


def _retrieval(retrieval: RetrievalSection) -> str:
    order = "in an order drawn at random" if retrieval.shuffle else "best first"
    shown = f"{retrieval.k} passages a search, {order}"
    if retrieval.index is None:
        return f"the server at {retrieval.url}; {shown}"
    try:
        manifest = read_manifest(Path(retrieval.index))
    except UserError:
        return f"{retrieval.index}; {shown}"
    # An index of words, and one that fuses others, has no vectors of its own.
    made_of = f"{manifest.encoder} encoder, {manifest.dim:,} dimensions" if manifest.dim else manifest.kind
    return f"{manifest.passages:,} passages, {made_of}; {shown}"
