"""EviNote-RAG with the hyperparameters of its released code instead of the paper's: lr 1e-6, 4 searches, G 5, 300
questions a step, a context of 5,120 [assumed] (and a DeBERTa-xlarge MNLI judge, which a recipe names in [judge]). All
else is in evinote.py.
"""

from dataclasses import replace

from thresher.engine.episode import System
from thresher.engine.systems import evinote

Options = evinote.Options


def system(options: Options) -> System:
    paper = evinote.system(options)
    preset = {section: dict(values) for section, values in paper.preset.items()}
    preset["rollout"] |= {"group_size": 5, "questions_per_step": 300, "max_turns": 5, "max_context": 5120}
    preset["optim"] |= {"lr": 1e-6}
    return replace(paper, name="evinote_code", preset=preset)
