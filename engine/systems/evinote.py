"""EviNote-RAG: Search-R1's loop, with a Supportive-Evidence Note after the passages of each search.

    <think>..</think> <search>query</search>  ->  <information>passages</information>
        ->  <summary>*a key fact* -an uncertain one-</summary>  ->  ..  ->  <answer>..</answer>

A turn ends at </search> or </answer>: at most 5 searches, then one turn that may only answer. A turn that neither
searches nor answers counts as a turn and gets a line of feedback, as in Search-R1.

    reward = 1  + EQR    if format and answer hold
             .1 + EQR    else if format and note-taking hold
             0           else
    format   (search information summary?)+ answer with at least one summary (Eq. 5), each closed, thoughts and text
             between them; `note_every_search`: a summary after each search; `strict_format`: so too, no text, and
             thoughts only before a search or the answer, which the prompt then demands. Only white space after the
             answer [assumed]
    answer   EM          note-taking   the notes carry both marks, * and - (`marks` = "either": one of them)
    EQR      P(entailment) by an NLI judge, the largest over the golds; premise the last note, hypothesis "<gold> is the
             answer to '<question>'"

The ablation's variants: Base (Search-R1, EM) · NS (a plain summary, EM [assumed]) · NE (<evidence> for <summary>, EM
[assumed]) · FS (EM, 0 without a summary) · FS+SR (and a wrong answer with a summary gets .1, once in three) · FS+EQR ·
SEN (the equation with EQR 0) · SEN+EQR. Prompt and tags depend on the variant.

Preset: 3 passages (code), 5 searches, G 4, 600 questions per step, lr 1e-5, its warm-up over .078 (code), k3 with beta
1e-3 (code), eps .2 [assumed], temperature 1; turns of 500 tokens, 2,560 for all, a context of 6,144 [assumed]. The
system `evinote_code`, at the end of this file, has the values in which the released code differs.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from thresher.engine.episode import System, pair_tags, read_preset, read_template
from thresher.engine.systems.search_r1 import search_loop
from thresher.rewards.papers.evinote import NOTE_TAGS, Marks, Variant, evinote_claims, evinote_reward


@dataclass(frozen=True, kw_only=True)
class Options:
    """variant: of the ablation. marks: the notes must carry both marks, as in the paper, or either, or, as in the
    released code, pairs of * and #. note_every_search: a search without a note breaks the format. strict_format:
    so does text between the tags."""

    variant: Variant = "SEN+EQR"
    marks: Marks = "both"
    note_every_search: bool = False
    strict_format: bool = False


STRICT = (
    " Write nothing outside these tags, and think only right before a search or the answer: a note follows its "
    "documents at once."
)


def template_name(variant: Variant) -> str:
    """Return the prompt file of a variant. SEN requests marks, FS and NS a plain summary, NE evidence, Base no
    notes."""
    if variant in ("SEN", "SEN+EQR"):
        return "evinote.txt"
    return {"Base": "search_r1.txt", "NE": "evinote_evidence.txt"}.get(variant, "evinote_summary.txt")


def template_of(options: Options) -> str:
    """Return the prompt of the variant, with the rule of a strict format if that is set."""
    template = read_template(Path(__file__).with_name(template_name(options.variant)))
    instructions, question = template.split("\n\n", 1)
    return f"{instructions}{STRICT if options.strict_format else ''}\n\n{question}"


def system(options: Options) -> System:
    tag = NOTE_TAGS[options.variant]
    return System(
        name="evinote",
        tags=pair_tags("think", "search", "information", *([tag] if tag else []), "answer"),
        episode=search_loop,
        reward=partial(evinote_reward, **asdict(options)),
        template=template_of(options),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        claims=evinote_claims if options.variant.endswith("EQR") else None,
    )


# --- evinote_code: the hyperparameters and the rule for marks of the released code


@dataclass(frozen=True, kw_only=True)
class CodeOptions(Options):
    """Options of evinote, with the marks of its code as the default: pairs of * and #."""

    marks: Marks = "code"


def code_system(options: CodeOptions) -> System:
    """Make EviNote-RAG with the hyperparameters of its released code (evinote_code.toml). These are lr 1e-6, 4
    searches, G 5, 300 questions per step in two updates of 150, 1,024 tokens per turn, 8,192 for the passages of a
    search, a context of 16,384; and a DeBERTa-xlarge MNLI judge, which a recipe names in [judge]."""
    preset = read_preset(Path(__file__).with_name("evinote_code.toml"))
    return replace(system(options), name="evinote_code", preset=preset)
