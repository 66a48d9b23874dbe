"""Plans of `thresher extract`."""

from pathlib import Path

import pytest
from extract_cases import make_agentic, make_plan

from thresher.engine.extraction.run import ExtractionPlan
from thresher.retrieval.questions import Question


@pytest.fixture
def plan(tiny_model_folder: Path, tiny_questions: list[Question], tmp_path: Path) -> ExtractionPlan:
    return make_plan(tmp_path, tiny_model_folder, tiny_questions)


@pytest.fixture
def agentic(plan: ExtractionPlan, tiny_index_folder: Path, tmp_path: Path) -> ExtractionPlan:
    return make_agentic(plan, tiny_index_folder, tmp_path)
