"""EviNote-RAG with the hyperparameters of its released code instead of the paper's: lr 1e-6, 4 searches, G 5, 300
questions a step in two updates of 150, 1,024 tokens a turn, 8,192 for the passages of a search, a context of 16,384;
and its rule for marks, pairs of * and # (and a DeBERTa-xlarge MNLI judge, which a recipe names in [judge]). All else is
in evinote.py.
"""

from dataclasses import dataclass, replace

from thresher.engine.episode import System
from thresher.engine.systems import evinote
from thresher.rewards.papers.evinote import Marks


@dataclass(frozen=True, kw_only=True)
class Options(evinote.Options):
    """As evinote's, with the marks that its code looks at."""

    marks: Marks = "code"


def system(options: Options) -> System:
    paper = evinote.system(options)
    preset = {section: dict(values) for section, values in paper.preset.items()}
    preset["rollout"] |= {
        "group_size": 5,
        "questions_per_step": 300,
        "max_turns": 5,
        "max_turn_tokens": 1024,
        "max_policy_tokens": 5120,
        "max_passage_tokens": 8192,
        "max_context": 16384,
    }
    preset["grpo"] |= {"updates_per_batch": 2}
    preset["optim"] |= {"lr": 1e-6}
    return replace(paper, name="evinote_code", preset=preset)
