"""The prompts of the invented world, a name, passages and the question: of the systems that its base
knows, and of what a tuning teaches."""

from pathlib import Path

from thresher.common.files import atomic_write_text
from thresher.engine.synthetic.warmup_transcripts import GIVEN, SEARCHING, template

ASKED_IN = {"reason-extract": "eviomni", "extract": "extract_only"}  # a tuning's kind or format -> prompt in the world
ASKED_IN |= {name: name for name in ("qa", "closed-book", "filco")}


def write_prompts(world: Path) -> None:
    """The invented world's prompt of each system that its base knows, and of each that a tuning teaches."""
    world.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys((*SEARCHING, *GIVEN, *ASKED_IN.values())):
        shown = "" if name in SEARCHING or name == "closed-book" else "{passages}\n"
        text = template(name) if name in (*SEARCHING, *GIVEN) else f"{name}\n{shown}Question: {{question}}\n"
        atomic_write_text(prompt_file(world, name), text)


def prompt_file(world: Path, name: str) -> Path:
    return world / f"{name}.txt"
