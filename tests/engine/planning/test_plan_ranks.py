"""A plan of several GPUs offers and accepts what several ranks train, and nothing else."""

from pathlib import Path

import pytest

from thresher.bench.roofline.models import MODELS
from thresher.cli import main as cli
from thresher.engine.assemble import read_run_recipe
from thresher.engine.parallel.agreement import alone
from thresher.engine.planning.plan import GB, plan
from thresher.policy.config import write_config

ARENA = Path(__file__).parents[3] / "recipes" / "arena" / "qwen2.5-7b.toml"
IN_ONE_PROCESS = ("optim.moments", "optim.offload", "grpo.reference")


def test_advice_to_several_gpus_is_what_their_ranks_can_do() -> None:
    assert all(
        alone(read_run_recipe(ARENA, [f"{key}={value}"]))
        for key, value in zip(IN_ONE_PROCESS, ("8bit", "moments", "cpu"), strict=True)
    )
    recipe = read_run_recipe(ARENA, [])
    assert alone(recipe) is None
    for memory in (24 * GB, 40 * GB, 80 * GB):
        found = plan(MODELS["7B"], recipe, 2, memory)
        assert not found.fits and found.advice
        assert not [line for line in found.advice if any(key in line for key in IN_ONE_PROCESS)], found.advice


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("optim.moments=8bit", 'optim.moments is "8bit", which runs in one process; expected "float32" with several'),
        ("grpo.reference=cpu", 'grpo.reference is "cpu", which runs in one process'),
    ],
)
def test_what_ranks_would_refuse_is_not_planned(
    setting: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(MODELS["7B"].replace(eos_token_ids=(1,)), tmp_path)
    words = ["plan", "--recipe", str(ARENA), "--model", str(tmp_path), "--gpu-memory", "80GB", "--set", setting]
    assert cli.run([*words, "--gpus", "2"]) == 2
    assert sentence in capsys.readouterr().err
    assert cli.run(words) == 0
