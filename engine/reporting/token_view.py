"""The token view: the trajectories of a stored step as a page on which each token has the colour of one of its values.

    step_000010.html   one step, one file: no request to anywhere, at most 10 MB; what is too much is left out by groups
    index.html         of a folder of such pages: the run's stored steps with their figures

The page is this folder's token_view.html, .css and .js with the step's data as JSON in it. What the page computes of a
token's values stands in token_formulas.js. Sampled text reaches the page as data alone, and its script only ever makes
text nodes of it.

Deliberately absent: a server, and values that the update did not find itself (engine/store/token_stats.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.config.recipe import Recipe
from thresher.engine.reporting.pages import open_run, page_part, page_template, steps_in_words, stored_steps
from thresher.engine.reporting.token_data import groups_of, objective_of, odd_tokens, policy_counts, to_json
from thresher.engine.store.run_folder import RunFolder, step_name, step_of
from thresher.engine.store.token_stats import read_token_stats
from thresher.engine.systems import load_system
from thresher.policy.tokenizer import Tokenizer, load_tokenizer

MOST_BYTES = 10_000_000  # of a page: what mail servers let through
Group = Mapping[str, Any]


def write_token_view(run: str | Path, step: str, out: str | Path | None = None, unverified: bool = False) -> Path:
    """Write the page of a stored step, or of "all" of them with their index; returns the page's path, or the index's.

    out: the file, or for "all" the folder; default: the folder tokens/ of the run. UserError where the run has no such
    step, a file of it is malformed or, unless `unverified`, not as it was written, its tokenizer is gone, or `out`
    cannot be written.
    """
    folder, recipe = open_run(run, unverified)
    stored = stored_steps(folder)
    if step == "all":
        target = Path(out) if out is not None else folder.path / "tokens"
        return _write_all(folder, recipe, stored, target)
    if not step.isdecimal() or int(step) not in stored:
        listed = f"stored are {steps_in_words(stored)}" if stored else "none is stored (run.keep_trajectories)"
        raise UserError(f"--tokens {step}: expected a stored step of {run}, or all; {listed}")
    target = Path(out) if out is not None else folder.path / "tokens" / f"{step_name(int(step))}.html"
    _write(target, _page(folder, recipe, int(step), _tokenizer(folder, recipe)))
    return target


def _write_all(folder: RunFolder, recipe: Recipe, stored: Sequence[int], target: Path) -> Path:
    if not stored:
        raise UserError(f"--tokens all: {folder.path} has no stored step (run.keep_trajectories)")
    tokenizer = _tokenizer(folder, recipe)
    for n, step in enumerate(stored):
        beside = {"before": stored[n - 1] if n else None, "after": stored[n + 1] if n + 1 < len(stored) else None}
        links = {name: f"{step_name(other)}.html" for name, other in beside.items() if other is not None}
        links["index"] = "index.html"
        _write(target / f"{step_name(step)}.html", _page(folder, recipe, step, tokenizer, links))
    records = {record["step"]: record for record in folder.metrics() if "eval" not in record}
    rows = [(step, f"{step_name(step)}.html", records.get(step, {})) for step in stored]
    page = page_template("token_index.html").render(
        name=str(folder.path), css=page_part("token_view.css"), recipe=recipe, rows=rows
    )
    _write(target / "index.html", page)
    return target / "index.html"


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made ({error.strerror}); choose another --out") from None
    atomic_write_text(path, page)


def _tokenizer(run: RunFolder, recipe: Recipe) -> Tokenizer:
    """The tokenizer of the newest checkpoint, or else of the model that the run started from."""
    checkpoints = sorted((p for p in run.checkpoints.glob("step_*") if step_of(p.name) is not None), reverse=True)
    folders = [*checkpoints, Path(recipe.model.path)]
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder)
    raise UserError(
        f"{run.path}: no tokenizer.json in its checkpoints nor in {recipe.model.path}; put the model's folder back"
    )


def _page(
    run: RunFolder, recipe: Recipe, step: int, tokenizer: Tokenizer, links: Mapping[str, str] | None = None
) -> str:
    path = run.trajectories / f"{step_name(step)}.jsonl"
    records = list(run.stored_trajectories(path))
    stats = read_token_stats(path.with_suffix(".safetensors"), *policy_counts(records), unverified=run.unverified)
    tags = load_system(recipe.system.name, recipe.system.options).tags if recipe.system else ()
    groups = groups_of(records, stats, tokenizer, tags)
    facts = {
        "step": step,
        "stored": stats is not None,
        "reference": stats is not None and any("reference" in sample for g in groups for sample in g["samples"]),
        "odd": odd_tokens(records, tokenizer),
        "objective": objective_of(recipe.grpo, recipe.rollout.temperature),
    }
    return assemble(str(run.path), recipe, groups, facts, links or {})


def assemble(
    name: str,
    recipe: Recipe,
    groups: Sequence[Group],
    facts: Mapping[str, Any],
    links: Mapping[str, str],
    most_bytes: int = MOST_BYTES,
) -> str:
    """The page of these groups, of at most `most_bytes`: as many groups as fit, those with a signal first."""
    template = page_template("token_view.html")

    def render(kept: Sequence[Group], left_out: str) -> str:
        data = to_json({**facts, "groups": kept})
        return template.render(
            name=name,
            recipe=recipe,
            step=facts["step"],
            groups=kept,
            left_out=left_out,
            links=links,
            css=page_part("token_view.css"),
            script=page_part("token_formulas.js") + page_part("token_view.js"),
            data=data,
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
    return any(sample["advantage"] for sample in group["samples"])


def _left_out(missing: Sequence[Group], groups: Sequence[Group]) -> str:
    if not missing:
        return ""
    numbers = ", ".join(str(group["n"]) for group in missing[:12])
    numbers += f" and {len(missing) - 12} more" if len(missing) > 12 else ""
    idle = sum(not has_signal(group) for group in missing)
    return (
        f"{len(missing)} of {len(groups)} groups are left out, or the page would be larger than"
        f" {MOST_BYTES / 1e6:.0f} MB ({idle} of them without a signal): {numbers}."
    )
