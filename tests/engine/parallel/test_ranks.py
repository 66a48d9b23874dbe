"""Who takes part and who does what: all that needs no second process."""

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher.cli.main import run
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.evaluation.metrics import Measured, summary_of
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing.batches import Item
from thresher.engine.parallel.first import UnwrittenFolder, VerdictsOfFirst
from thresher.engine.parallel.ranks import ALONE, Ranks, joined
from thresher.engine.parallel.shards import rows_of
from thresher.engine.training.metrics import RankStep, step_record
from thresher.engine.training.step import groups_of_rank, shuffled_rewards, shuffled_within_groups, update_bounds
from thresher.engine.training.update import Updater, UpdateStats
from thresher.policy.model import Policy
from thresher.rewards.errors import UserError


def of(count: int) -> list[Ranks]:
    return [Ranks(rank, count) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 5, 64])
def test_parts_and_rows_are_everything_once(count: int, total: int) -> None:
    parts = [ranks.share(total) for ranks in of(count)]
    assert [number for part in parts for number in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    rows = [rows_of(total, ranks) for ranks in of(count)]
    assert [number for each in rows for number in range(total)[each]] == list(range(total))
    # As torch.chunk shares rows out, which is how fully_shard does.
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(count)] if total else []
    assert [each.stop - each.start for each in rows if each.stop > each.start] == chunks


@pytest.mark.parametrize(("groups", "updates", "count"), [(4, 1, 4), (12, 2, 3), (16, 4, 2), (5, 2, 1)])
def test_every_optimiser_step_has_the_same_groups_for_any_number_of_ranks(
    groups: int, updates: int, count: int
) -> None:
    mine = [groups_of_rank(groups, updates, ranks) for ranks in of(count)]
    wanted = [set(range(start, end)) for start, end in update_bounds(groups, 1, updates)]
    for number, step in enumerate(wanted):
        stretches = [part[slice(*update_bounds(len(part), 1, updates)[number])] for part in mine]
        assert sorted(group for stretch in stretches for group in stretch) == sorted(step)
        assert len(set(map(len, stretches))) == 1


def test_the_control_shuffles_alike_for_any_number_of_ranks() -> None:
    groups, size, seed = 6, 5, 11
    rewards = [float(number) for number in range(groups * size)]
    alone = shuffled_within_groups(rewards, size, seed)
    assert alone != rewards and shuffled_rewards(rewards, range(groups), groups, seed) == alone
    for mine in ([0, 1, 2], [3, 4, 5], [0, 3], [5]):
        ours = [rewards[group * size + sample] for group in mine for sample in range(size)]
        wanted = [alone[group * size + sample] for group in mine for sample in range(size)]
        assert shuffled_rewards(ours, mine, groups, seed) == wanted


def part(groups: Sequence[int], seconds: float, loss: float) -> RankStep:
    rows = [Measured((group, 0), {"reward": 0.1 * group}, {"answer": None}, "answered") for group in groups]
    update = UpdateStats(tokens=10, rows=4, loss=loss, grad_norm=0.5, lr=1e-3, capped=1, seconds=seconds)
    update.sums, update.largest = {"logprob_gap": 0.25, "entropy": 8.0}, {"logprob_gap_max": seconds}
    clock = {
        "decode": 0.5,
        "prefill": 0.1,
        "search": 0.2,
        "host": 0.1,
        "rest": 0.3,
        "total": seconds,
        "forwards": 5,
        "searches": 3,
    }
    return RankStep(
        rows=rows, cut_passages=2, zero_advantage_groups=1, updates=[update], scoring_seconds=1 / seconds, clock=clock
    )


def test_a_steps_record_is_that_of_all_ranks() -> None:
    """Means over trajectories in their order, means over tokens, sums of counts, the slowest rank's seconds."""
    parts = [part([2, 3, 7], 2.0, 0.5), part([0, 1, 9], 4.0, -0.25)]
    record = step_record(3, parts)
    rows = sorted((row for each in parts for row in each.rows), key=lambda row: row.place)
    assert record | summary_of(rows) == record and record["questions"] == 6
    wanted: dict[str, Any] = {
        "step": 3, "cut_passages": 4, "zero_advantage_groups": 2, "loss": 0.25, "grad_norm": 0.5, "entropy": 2.0,
        "logprob_gap": 0.0625, "logprob_gap_max": 4.0, "capped": 2, "train_tokens": 20, "loss_tokens": 8,
        "update_seconds": 4.0, "reward_seconds": 0.5, "rollout_seconds": 4.0, "search_share": 0.05, "forwards": 10,
        "forward_host_seconds": 0.02, "host_seconds": 0.3, "decode_seconds": 0.5, "searches": 6,
    }  # fmt: skip
    assert {key: record[key] for key in wanted} == wanted
    # A rank whose groups were all dropped has no sums, and its counts are 0.
    idle = replace(parts[0], updates=[UpdateStats(grad_norm=0.5, lr=1e-3)])
    assert step_record(3, [idle, parts[1]])["entropy"] == 2.0
    assert step_record(3, [replace(parts[0], updates=[]), replace(parts[1], updates=[])])["loss_tokens"] == 0
    assert step_record(3, [pickle.loads(pickle.dumps(each)) for each in parts]) == record


def test_alone_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined() as ranks:
        assert ranks is ALONE and ranks.first and not ranks.several
    assert (ranks.gather("x"), ranks.from_first(lambda: 3), ranks.total(2, 5), ranks.most(4)) == (["x"], 3, [2, 5], 4)
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun with one process
    monkeypatch.setenv("RANK", "0")
    with joined() as ranks:
        assert ranks is ALONE
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"RANK": "one", "LOCAL_RANK": "1"}])
def test_an_environment_that_is_not_torchruns_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    expected = "expected numbers in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, as torchrun sets them"
    with pytest.raises(UserError, match=expected), joined():
        pass


class Three(Ranks):
    """Rank 0 of three, of which the others have nothing to ask, and two things."""

    def gather(self, value: Any) -> list[Any]:
        return [value, [], [(("g",), "yes"), (("g",), "no")]]


class Behind(Ranks):
    """A rank of which another always has two micro-batches more."""

    def most(self, number: int) -> int:
        return number + 2


def test_micro_batches_that_make_up_the_number_change_no_bit(make_tiny_policy: Callable[..., Policy]) -> None:
    generator, items = torch.Generator().manual_seed(0), []
    for length, advantage in ((12, 1.0), (9, -0.7), (17, 0.4)):
        ids = torch.randint(1, 29, (length,), generator=generator).tolist()
        old = [-3.0] * (length - 4)
        items.append(
            Item(ids=ids, positions=list(range(4, length)), old_logprobs=old, advantage=advantage, weight=0.05)
        )
    ends = []
    for ranks in (ALONE, Behind()):
        policy, reference = make_tiny_policy().requires_grad_(True), make_tiny_policy(initializer_range=0.2)
        optim = OptimSection(lr=1e-2, micro_batch_tokens=20, checkpoint_activations="on")
        grpo = GrpoSection(beta=0.1, entropy_coef=0.1)
        updater = Updater(MasterWeights(policy), reference, optim, grpo, 29, 3, ranks)
        found = updater.logprobs(items, 1.0)
        stats = [replace(updater.update(items, step, 1.0), seconds=0.0) for step in range(2)]
        ends.append((found, stats, {name: value.tolist() for name, value in policy.state_dict().items()}))
    assert ends[0] == ends[1] and ends[0][1][0].grad_norm > 0


def test_verdicts_are_asked_for_once_and_each_rank_gets_its_own() -> None:
    asked: list[list[str]] = []

    class Judge:
        name = "the judge"

        def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]:
            asked.append([response for _, response in cases])
            return [response == "yes" for _, response in cases]

    verdicts = VerdictsOfFirst(Judge(), Three())
    assert verdicts.name == "the judge"
    assert verdicts.rate([(("g",), "no"), (("g",), "yes")]) == [False, True]
    assert asked == [["no", "yes", "yes", "no"]]


def test_a_rank_that_is_not_the_first_writes_nothing(tmp_path: Path) -> None:
    with UnwrittenFolder(tmp_path / "run") as run:
        run.append_metrics({"step": 1})
        run.write_trajectories(1, [{}])
        run.write_evaluation(1, [{}])
        run.write_summary({})
        run.truncate_after(0)
    assert os.listdir(tmp_path) == []


def test_sft_refuses_several_ranks_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thresher.engine.parallel.ranks.joined", lambda: nullcontext(Ranks(1, 2)))
    assert run(["sft", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err == (
        "thresher: sft trains in one process, and torchrun has started 2; leave torchrun out\n"
    )
