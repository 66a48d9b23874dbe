"""Test the floors of GPUs: published sizes of models, formulas against numbers derived elsewhere, and the command."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
from documents import ROOT, table_rows

from thresher.bench.roofline import (
    IN_FLIGHT,
    LONGEST,
    MODELS,
    OWN,
    config_of,
    counts_of_tail,
    predicted_step,
    step_tokens,
)
from thresher.bench.settings import STEP_SHAPES
from thresher.cli import main as cli
from thresher.cli.commands import bench as command
from thresher.engine.planning import time as floors
from thresher.engine.planning.memory import head_weights, kv_bytes, layer_weights, trained_weights
from thresher.engine.planning.tail import (
    SIGMA,
    Queue,
    RolloutCounts,
    predicted_rollout_s,
    tail_lengths,
    tokens_again,
    usual_rollouts,
)
from thresher.engine.planning.time import CHIPS, TB, DecodeShape, UpdateShape
from thresher.policy.config import config_from_dict

SIZES = "0.5B, 1.5B, 3B, 7B, Qwen3.5-0.8B, Qwen3.5-2B, Qwen3.5-4B, Qwen3.5-9B, Qwen3.5-27B"
# (chip, commit) of stored rows of decode steps
FITTED, LATER, H100 = ("H200", "07ce6a9c"), ("H200", "b0733635"), ("H100", "b1a6eb16")
UNSHARED, SHARED = DecodeShape(), DecodeShape(group=8, shared=1200, own=300)


@pytest.mark.parametrize(
    ("name", "all_of_them", "without_embedding"),
    [("0.5B", 0.49, 0.36), ("1.5B", 1.54, 1.31), ("3B", 3.09, 2.77), ("7B", 7.61, 6.53)],
)
def test_the_sizes_are_those_of_the_model_cards(name: str, all_of_them: float, without_embedding: float) -> None:
    """The sizes are billions of weights, from Qwen2.5's model cards."""
    assert trained_weights(MODELS[name]) / 1e9 == pytest.approx(all_of_them, abs=0.006)
    assert layer_weights(MODELS[name]) / 1e9 == pytest.approx(without_embedding, abs=0.006)


@pytest.mark.parametrize(("name", "weights"), [("0.8B", 0.75), ("2B", 1.88), ("4B", 4.2), ("9B", 8.95), ("27B", 26.89)])
def test_qwen35_has_as_many_weights_as_its_name_says(name: str, weights: float) -> None:
    """The sizes are billions of weights of the text model, without images and the multi-token prediction layer."""
    config = config_of(f"Qwen3.5-{name}")
    assert trained_weights(config) / 1e9 == pytest.approx(weights, abs=0.006)
    assert config.delta_layers == 3 * config.num_hidden_layers // 4


@pytest.mark.parametrize("name", list(MODELS))
def test_the_sizes_are_those_of_the_published_configs(name: str, shared_data: Path) -> None:
    path = shared_data / "qwen2.5" / f"Qwen2.5-{name}-Instruct.config.json"
    found = config_from_dict(json.loads(path.read_text("utf-8")), str(path))
    kept = {"extra": {}, "eos_token_ids": (), "bos_token_id": None}
    assert replace(found, **kept) == MODELS[name]


# (chip, model, shape) -> thousands of tokens/s, derived by others: H200 with the 4.3 TB/s that a copy reaches on it,
# the rest with the data sheets' bandwidth.
COPY = replace(CHIPS["H200"], bytes_per_s=4.3 * TB)
KNOWN = [
    (CHIPS["A100-80"], "1.5B", UNSHARED, 31.8),
    (CHIPS["A100-80"], "1.5B", SHARED, 61.2),
    (CHIPS["A100-80"], "7B", UNSHARED, 11.3),
    (CHIPS["A100-80"], "7B", SHARED, 17.2),
    (CHIPS["A100-80"], "1.5B", replace(UNSHARED, batch=64), 21.9),
    (CHIPS["A100-80"], "7B", replace(SHARED, batch=64), 8.1),
    (CHIPS["H100"], "1.5B", UNSHARED, 61),
    (CHIPS["H100"], "1.5B", SHARED, 134),
    (COPY, "1.5B", UNSHARED, 76.2),
    (COPY, "1.5B", SHARED, 163),
    (COPY, "7B", UNSHARED, 29.2),
    (COPY, "7B", SHARED, 49.3),
]


@pytest.mark.parametrize(("chip", "model", "shape", "known"), KNOWN)
def test_the_floor_of_a_decode_step(chip: object, model: str, shape: DecodeShape, known: float) -> None:
    seconds = floors.floor_s(floors.decode_costs(MODELS[model], shape), chip)
    assert shape.batch / seconds / 1000 == pytest.approx(known, rel=0.025)


@dataclass(frozen=True)
class Measured:
    """A decode step that a GPU measured: its median seconds."""

    commit: str
    chip: str
    model: str
    shape: DecodeShape
    seconds: float

    def miss(self, share: float = floors.DECODE_SHARE, own: float = 0.0, shared: float = 0.0) -> float:
        """Return the relative error of the prediction, with another share and other seconds added per layer."""
        config = config_of(self.model)
        steady = floors.LAYER_SECONDS[self.shape.shares] + (shared if self.shape.shares else own)
        floor = floors.floor_s(floors.decode_costs(config, self.shape), CHIPS[self.chip])
        return (floor / share + config.num_hidden_layers * steady) / self.seconds - 1


def measured_decode_steps() -> list[Measured]:
    """Return the stored rows of decode steps, without the H200's of Qwen3.5, because an older kernel ran there."""
    text = (ROOT / "bench" / "results" / "gpu-check.jsonl").read_text("utf-8")
    found = []
    for row in (row for row in map(json.loads, text.splitlines()) if row["bench"] == "decode"):
        chip = next(name for name in ("H200", "H100") if name in row["gpu"])
        if chip == "H100" or row["model"] in MODELS:
            shape, seconds = DecodeShape(**row["shape"]), row["step_s"]["p50"]
            found.append(Measured(row["commit"][:8], chip, row["model"], shape, seconds))
    return found


def test_predictions_are_near_what_gpus_measured() -> None:
    """The constants were fitted to an H200's six shapes of Qwen2.5; the other rows are in no fit. docs/gpu.md has the
    largest errors."""
    largest: dict[tuple[str, str], list[float]] = {}
    for one in measured_decode_steps():
        predicted = floors.predicted_decode_s(config_of(one.model), one.shape, CHIPS[one.chip])
        assert predicted / one.seconds - 1 == pytest.approx(one.miss())
        largest.setdefault((one.chip, one.commit), []).append(abs(one.miss()))
    assert [len(largest[key]) for key in (FITTED, LATER, H100)] == [6, 6, 10] and len(largest) == 3
    fitted, later, other = (f"{max(largest[key]):.1%}" for key in (FITTED, LATER, H100))
    page = " ".join((ROOT / "docs" / "gpu.md").read_text("utf-8").split())
    assert f"miss these by {fitted} at most, the same shapes at b0733635 by {later}, and the ten" in page
    assert f"Qwen3.5's among them, by {other}." in page and f"predicted to within {other}." in page


def test_the_constants_are_those_of_least_squares() -> None:
    six = [one for one in measured_decode_steps() if (one.chip, one.commit) == FITTED]
    least = sum(one.miss() ** 2 for one in six)
    for share in (-0.005, 0, 0.005):
        for own in (-5e-7, 0, 5e-7):
            for shared in (-5e-7, 0, 5e-7):
                assert least <= sum(one.miss(floors.DECODE_SHARE + share, own, shared) ** 2 for one in six)


def test_the_measured_tables_are_those_of_the_rows() -> None:
    """Rates of the median step; the H100's table has the prediction too."""

    def cells(one: Measured) -> list[str]:
        config, chip = config_of(one.model), CHIPS[one.chip]
        share = floors.floor_s(floors.decode_costs(config, one.shape), chip) / one.seconds
        label = "1,200 shared by 8 + 300" if one.shape.shares else "1,500"
        seconds = one.seconds, floors.predicted_decode_s(config, one.shape, chip)
        return [one.model, label, *(f"{one.shape.batch / each / 1000:.1f}k" for each in seconds), f"{share:.0%}"]

    steps = measured_decode_steps()
    rows = [[cell.strip(" |") for cell in row] for row in table_rows("docs/gpu.md", "H100, tokens/s")]
    assert rows == [cells(one) for one in steps if (one.chip, one.commit) == H100]
    rows = [[cell.strip(" |") for cell in row] for row in table_rows("docs/gpu.md", "H200, tokens/s")]
    expected = [cells(one) for one in steps if (one.chip, one.commit) == FITTED]
    assert [[*row[:2], row[-3], row[-1]] for row in rows] == [[*row[:3], row[-1]] for row in expected]
    later = [cells(one)[2] for one in steps if (one.chip, one.commit) == LATER]
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    alone, groups = ("{}, {} and {}".format(*later[first::2]) for first in (0, 1))
    assert f"Decoding reaches {alone} tokens/s at 1,500 positions, and {groups} in groups." in page
    readme = (ROOT / "README.md").read_text("utf-8")
    for which in (FITTED, H100):
        of_them = [cells(one) for one in steps if (one.chip, one.commit) == which and not one.shape.shares]
        assert " / ".join(row[2] for row in of_them[:3]) in readme
        assert " / ".join(row[4].rstrip("%") for row in of_them[:3]) + "%" in readme


def test_a_decode_step_by_hand() -> None:
    """7B, shared: 115,200 positions of 57,344 bytes; with 256 rows the weights are bound by arithmetic."""
    config, chip = MODELS["7B"], CHIPS["H200"]
    weights, attention = floors.decode_costs(config, SHARED)
    assert kv_bytes(config) == 57_344 and attention.bytes == 57_344 * (256 * 300 + 32 * 1200)
    assert attention.flops == 4 * 28 * 3584 * 1500 * 256
    assert weights.bytes == 2 * (layer_weights(config) + head_weights(config)) and weights.flops == 256 * weights.bytes
    assert weights.seconds(chip) == weights.flops / 989e12 and attention.seconds(chip) == attention.bytes / 4.8e12
    memory = floors.decode_bytes(config, SHARED)
    assert memory == attention.bytes + 2 * trained_weights(config)


def test_an_update_by_hand() -> None:
    config, chip = MODELS["1.5B"], CHIPS["A100-80"]
    shape = UpdateShape(trajectories=2, length=1000, sampled=250)
    parts = {part.name: part for part in floors.update_costs(config, shape)}
    assert parts["layers"].flops == 6 * layer_weights(config)
    assert parts["attention"].flops == 3 * 2 * 28 * 1536 * 1000
    assert parts["loss"].flops == 6 * 0.25 * 151_936 * 1536
    forward = sum(parts[name].flops for name in ("layers", "attention", "loss")) / 3
    assert parts["reference"].flops == pytest.approx(forward)
    assert parts["optimiser"].bytes == 30 * trained_weights(config) / 2000
    seconds = floors.floor_s(tuple(parts.values()), chip)
    assert seconds == pytest.approx(4 * forward / 312e12 + parts["optimiser"].bytes / 2.039e12)
    assert floors.state_bytes(config) / 2**30 == pytest.approx(32, abs=0.5)


def test_a_step_by_hand() -> None:
    """8 groups of 8, prompts of 1,000 tokens, 256 sampled each: 256 decode steps, and an update whose shared prompts
    are computed once."""
    config, chip = MODELS["0.5B"], CHIPS["H200"]
    found, shape = predicted_step(config, chip), DecodeShape(batch=64, group=8, shared=1000, own=128)
    decoding = 256 * floors.predicted_decode_s(config, shape, chip)
    assert found["rollout"] == pytest.approx(decoding + floors.predicted_prefill_s(config, 8 * 1000, chip))
    for name, tokens in (("update", 8 * (1000 + 8 * 256)), ("unshared", 64 * 1256)):
        whole = tokens / 1256
        update = UpdateShape(trajectories=whole, length=1256, sampled=64 * 256 / whole)
        expected = floors.predicted_update_s(floors.update_costs(config, update), chip) * tokens
        assert found[name] == pytest.approx(expected)
    lengths = STEP_SHAPES["0.5B"].lengths
    assert (lengths.samples, lengths.group, lengths.prompt, lengths.turns) == (64, 8, 1000, (256,))
    assert STEP_SHAPES["0.5B"].tokens == step_tokens()


def test_what_is_predicted_lies_above_the_floor() -> None:
    assert floors.UPDATE_SHARES.keys() == {part.name for part in floors.update_costs(MODELS["3B"], UpdateShape())}
    measured = floors.MeasuredRates(1e11, 1e10)
    for config, share in (("1.5B", 0.45), ("7B", 0.55)):
        floor = floors.floor_s(floors.decode_costs(MODELS[config], UNSHARED), measured)
        assert floor / floors.predicted_decode_s(MODELS[config], UNSHARED, measured) == pytest.approx(share, abs=0.001)
    tiny = MODELS["0.5B"].replace(num_hidden_layers=1, intermediate_size=64, vocab_size=100)
    floor = floors.floor_s(floors.decode_costs(tiny, UNSHARED), measured)
    assert floors.predicted_decode_s(tiny, UNSHARED, measured) == pytest.approx(floor / floors.LOWEST_SHARE)
    for chip in CHIPS.values():
        parts = floors.update_costs(MODELS["7B"], UpdateShape())
        assert floors.predicted_update_s(parts, chip) > floors.floor_s(parts, chip)
        assert 0.3 < floors.predicted_mfu(parts, chip) < 0.6


def test_the_command_prints_and_keeps_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ((*CHIPS,), (*MODELS,)) == (get_args(command.Chip), get_args(command.Model))
    out = tmp_path / "new" / "rows.jsonl"
    words = ["bench", "roofline", "--chip", "A100-40", "H200", "--model", "1.5B", "7B", "--sigma", "0.6", "1"]
    assert cli.run([*words, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(row["chip"], row["model"], row["kind"]) for row in rows] == [
        (chip, model, kind)
        for chip in ("A100-40", "H200")
        for model in ("1.5B", "7B")
        for kind in ("decode", "decode", "rollout", "rollout", "update", "step")
    ]
    first, second = (row for row in rows[2:4])
    assert [row["shape"]["sigma"] for row in (first, second)] == [0.6, 1.0]
    assert first["mean_batch"] == counts_of_tail(0.6, 256)[1].mean_busy
    assert [one["in_flight"] for one in first["partial"]] == [64, 96, 160]
    for one in (*first["partial"], *second["partial"]):
        assert 0 < one["staleness"] < one["max_staleness"] < one["in_flight"] / 32
        assert one["tokens_again"] > 0 and one["predicted_speedup"] < one["predicted_speedup_stale_cache"]
    assert list(rows[4]["shape"]) == ["trajectories", "length", "sampled", "full", "reference"]
    seconds = rows[5]["predicted_seconds"]
    assert seconds == predicted_step(MODELS["1.5B"], CHIPS["A100-40"]) and seconds["update"] < seconds["unshared"]
    assert rows[5]["predicted_tokens_per_s"] == 80_384 / (seconds["rollout"] + seconds["update"])
    said = capsys.readouterr().out
    assert "nothing is measured here" in said and max(map(len, said.splitlines()[:-1])) <= 80
    by_hand = floors.floor_s(floors.decode_costs(MODELS["7B"], SHARED), CHIPS["H200"])
    assert rows[19]["floor_seconds"] == by_hand and f"{1000 * by_hand:.2f}" in said
    fits = {(row["chip"], row["model"]): row["states_fit"] for row in rows if row["kind"] == "update"}
    assert fits["A100-40", "1.5B"] and not fits["H200", "7B"]  # 34 GB, 168 GB


def test_a_model_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from thresher.policy.config import write_config

    write_config(MODELS["0.5B"], tmp_path)
    out = tmp_path / "rows.jsonl"
    assert cli.run(["bench", "roofline", "--chip", "H100", "--model", "0.5B", str(tmp_path), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row.get("floor_seconds") for row in rows[:5]] == [row.get("floor_seconds") for row in rows[5:]]
    assert rows[2]["shape"]["sigma"] == SIGMA and rows[2]["partial"] == rows[7]["partial"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "8B"], f"--model 8B: expected one of {SIZES}, or a model folder with config.json"),
        (["--batch", "12"], "--batch 12: expected a multiple of 8, because one shape has groups of 8"),
        (["--sigma", "0"], "--sigma: expected a number above 0, at most 4, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "roofline", *arguments]) == 2
    assert capsys.readouterr().err == f"thresher: {said}\n"


IN_THE_TABLES = ("A100-40", "A100-80", "H100", "H200")  # an A800 is an A100-80 here


def test_the_tables_of_the_document_are_those_of_the_formulas() -> None:
    chips = [CHIPS[name] for name in IN_THE_TABLES]
    assert replace(CHIPS["A800"], name="A100-80", link_bytes_per_s=300e9) == CHIPS["A100-80"]
    expected = []
    for name, config in MODELS.items():
        for label, shape in (("1,500", UNSHARED), ("1,200 shared by 8 + 300", SHARED)):
            seconds = [
                (
                    floors.floor_s(floors.decode_costs(config, shape), chip),
                    floors.predicted_decode_s(config, shape, chip),
                )
                for chip in chips
            ]
            rates = [[shape.batch / time / 1000 for time in pair] for pair in seconds]
            expected.append([name, label, *(f"{floor:.1f}k → {predicted:.1f}k" for floor, predicted in rates)])
        usual = counts_of_tail(SIGMA, 256)[1]
        tokens = usual.drawn / usual.steps / 1000
        found = [tokens / predicted_rollout_s(config, usual, 1200, chip) for chip in chips]
        expected.append([name, "1,200 shared by 8 + a tail to 1,000", *(f"{rate:.1f}k" for rate in found)])
    assert [[cell.strip(" |") for cell in row] for row in table_rows("docs/gpu.md", "tokens/s of decoding")] == expected
    expected = []
    for name, config in MODELS.items():
        parts = floors.update_costs(config, UpdateShape())
        times = [(1e6 * floors.floor_s(parts, chip), 1e6 * floors.predicted_update_s(parts, chip)) for chip in chips]
        mfu, states = floors.predicted_mfu(parts, CHIPS["A100-80"]), floors.state_bytes(config) / 1e9
        cells = [f"{floor:.1f} → {predicted:.1f}" for floor, predicted in times]
        expected.append([name, *cells, f"{mfu:.0%}", f"{states:.0f} GB"])
    rows = table_rows("docs/gpu.md", "ms of update per 1,000 tokens")
    assert [[cell.strip(" |") for cell in row] for row in rows] == expected
    for row in table_rows("docs/gpu.md", "chip"):
        for chip in (CHIPS[name] for name in row[0].split(", ")):
            said = [f"{chip.flops_per_s / 1e12:.0f}", f"{chip.bytes_per_s / 1e12:g}", f"{chip.memory / 1e9:.0f} GB"]
            assert [cell.strip(" |") for cell in row[1:]] == said


def test_the_predicted_step_of_the_document_is_that_of_the_formulas() -> None:
    """Its measured step is the stored row."""
    names = ("A100-80", "H100", "H200")
    found = [predicted_step(MODELS["0.5B"], CHIPS[name]) for name in names]
    whole = [one["rollout"] + one["update"] for one in found]
    rows = [[cell.strip(" |") for cell in row[:4]] for row in table_rows("docs/gpu.md", "line of gpu-check")][1:]
    assert rows == [
        [f"step 0.5B, {step_tokens():,} tokens", *(f"{step_tokens() / seconds / 1000:.1f}k" for seconds in whole)],
        ["its rollout", *(f"{one['rollout']:.2f} s" for one in found)],
        ["its update, prefixes shared", *(f"{one['update']:.2f} s" for one in found)],
        ["its update, prefixes shared / unshared", *(f"{one['unshared'] / one['update']:.2f}x" for one in found)],
    ]
    text = (ROOT / "bench" / "results" / "gpu-check.jsonl").read_text("utf-8")
    (row,) = (row for row in map(json.loads, text.splitlines()) if row["bench"] == "step")
    took = {part: row["shared"][f"{part}_s"]["p50"] for part in ("step", "rollout", "update")}
    page = " ".join((ROOT / "docs" / "gpu.md").read_text("utf-8").split())
    said = f"has {took['step']:.3f} s where {whole[2]:.3f} s is predicted: {took['step'] / whole[2]:.2f} times as long."
    assert said.replace(" 0.", " .") in page
    for part in ("rollout", "update"):
        assert f"{took[part] / found[2][part]:.2f} times" in page


def test_the_tables_of_partial_rollouts_are_those_of_the_formulas() -> None:
    counts = {sigma: counts_of_tail(sigma, 256) for sigma in (0.6, 0.8, 1.0)}
    expected = [
        [
            *(f"{sigma:g}", f"{times}", f"{one.decode_steps / one.steps:.0f}", f"{one.mean_busy:.0f}"),
            *(f"{one.mean_staleness:.2f}", f"{max(one.staleness)}"),
            *(f"{tokens_again(one, prompt) / one.steps / 1000:.0f}k" for prompt in (200, 1200)),
        ]
        for sigma, found in counts.items()
        for times, one in found.items()
    ]
    assert (OWN, LONGEST) == (300, 1000)
    half = usual_rollouts(tail_lengths(OWN, LONGEST, 0.8), Queue(8, 32, 48, 256))
    said = (
        f"it has {half.decode_steps / half.steps:.0f} decode steps, and a mean staleness of {half.mean_staleness:.2f}"
    )
    assert said.replace(" 0.", " .") in Path(__file__).parents[2].joinpath("docs", "gpu.md").read_text("utf-8")
    rows = table_rows("docs/gpu.md", "sigma of lengths")
    assert [[cell.strip(" |") for cell in row] for row in rows] == expected

    def speedup(chip: str, model: str, prompt: int, found: dict[int, RolloutCounts], times: int) -> str:
        whole, anew = (predicted_rollout_s(MODELS[model], found[n], prompt, CHIPS[chip]) for n in (1, times))
        kept = predicted_rollout_s(MODELS[model], found[times], prompt, CHIPS[chip], stale_cache=True)
        return f"{whole / anew:.2f} / {whole / kept:.2f}"

    expected = [
        [
            chip,
            model,
            f"{prompt:,}",
            f"{sigma:g}",
            *(speedup(chip, model, prompt, counts[sigma], n) for n in IN_FLIGHT[1:]),
        ]
        for chip in ("A100-80", "H100")
        for model in ("0.5B", "1.5B", "7B")
        for prompt, sigma in ((200, 0.8), (1200, 0.6), (1200, 0.8), (1200, 1.0))
    ]
    rows = table_rows("docs/gpu.md", "speedup, predicted")
    assert [[cell.strip(" |") for cell in row] for row in rows] == expected
