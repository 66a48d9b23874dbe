"""Ranks: which take part and what each does; all tests that need no second process."""

import pickle
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thresher.cli.main import run
from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.signals import Interrupted, defer_signals, handle_signals
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.evaluation.metrics import Measured, summary_of
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import TrainSequence
from thresher.engine.parallel import ranks as ranks_module
from thresher.engine.parallel.ranks import SINGLE, Ranks, joined
from thresher.engine.parallel.sharded_weights import rows_of
from thresher.engine.parallel.sync import MainRankJudge
from thresher.engine.training.metrics import RankStep, step_record
from thresher.engine.training.step import groups_of_rank, shuffled_rewards, update_bounds
from thresher.engine.training.update import Updater, UpdateStats
from thresher.policy.model import Policy


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
    # Rows are divided as by torch.chunk, which fully_shard uses.
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
    alone = shuffled_rewards(rewards, range(groups), groups, seed)
    assert alone[:10] == [2, 0, 1, 4, 3, 9, 5, 7, 8, 6] and sorted(alone) == rewards
    for mine in ([0, 1, 2], [3, 4, 5], [0, 3], [5]):
        ours = [rewards[group * size + sample] for group in mine for sample in range(size)]
        wanted = [alone[group * size + sample] for group in mine for sample in range(size)]
        assert shuffled_rewards(ours, mine, groups, seed) == wanted


def part(groups: Sequence[int], seconds: float, loss: float) -> RankStep:
    rows = [Measured((group, 0), {"reward": 0.1 * group}, {"answer": None}, "answered") for group in groups]
    update = UpdateStats(tokens=10, rows=4, fresh=4, loss=loss, grad_norm=0.5, lr=1e-3, capped=1, seconds=seconds)
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
        "forks": 0,
        "slots": 8,
        "busy_slots": 6,
    }
    return RankStep(
        rows=rows,
        cut_passages=2,
        zero_advantage_groups=1,
        updates=[update],
        scoring_seconds=1 / seconds,
        clock=clock,
        right_logprobs={(groups[0], 0): -seconds},
        rounds=groups[0],
        replaced=1,
        tokens_replaced=30,
        staleness={0: 3, 2: 1},
    )


def test_a_steps_record_is_that_of_all_ranks() -> None:
    """Means over trajectories in their order, means over tokens, sums of counts, the time of the slowest rank."""
    parts = [part([2, 3, 7], 2.0, 0.5), part([0, 1, 9], 4.0, -0.25)]
    record = step_record(3, parts)
    rows = sorted((row for each in parts for row in each.rows), key=lambda row: row.place)
    assert record | summary_of(rows) == record and record["questions"] == 6
    wanted: dict[str, Any] = {
        "step": 3, "cut_passages": 4, "zero_advantage_groups": 2, "loss": 0.25, "grad_norm": 0.5, "entropy": 2.0,
        "right_logprob": -3.0, "logprob_gap": 0.0625, "logprob_gap_max": 4.0, "capped": 2, "train_tokens": 20,
        "loss_tokens": 8, "update_seconds": 4.0, "reward_seconds": 0.5, "rollout_seconds": 4.0, "search_share": 0.05,
        "forwards": 10, "forward_host_seconds": 0.02, "host_seconds": 0.3, "decode_seconds": 0.5, "searches": 6,
        "slots_busy": 0.75, "staleness_mean": 0.5, "staleness_tokens": [6, 0, 2],
    }  # fmt: skip
    assert {key: record[key] for key in wanted} == wanted
    waiting = [replace(each, clock=each.clock | {"slots": 0, "busy_slots": 0}) for each in parts]
    assert step_record(3, waiting)["slots_busy"] is None
    refilled = step_record(3, parts, refill=True)  # with rollout.partial each rank has rounds of its own
    counts = {"refill_rounds": 2, "refilled_groups": 2, "tokens_set_aside": 60}
    assert {key: value for key, value in refilled.items() if key not in record} == counts
    # A rank whose groups were all dropped has no sums, and its counts are 0.
    idle = replace(parts[0], updates=[UpdateStats(grad_norm=0.5, lr=1e-3)])
    assert step_record(3, [idle, parts[1]])["entropy"] == 2.0
    assert step_record(3, [replace(parts[0], updates=[]), replace(parts[1], updates=[])])["loss_tokens"] == 0
    assert step_record(3, [pickle.loads(pickle.dumps(each)) for each in parts]) == record


def test_alone_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined() as ranks:
        assert ranks is SINGLE and ranks.is_main and not ranks.is_distributed
    assert (ranks.gather("x"), ranks.broadcast(lambda: 3), ranks.all_reduce_sum(2, 5), ranks.all_reduce_max(4)) == (
        ["x"],
        3,
        [2, 5],
        4,
    )
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun with one process
    monkeypatch.setenv("RANK", "0")
    with joined() as ranks:
        assert ranks is SINGLE
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            dist.DistNetworkError("Failed to recv, got 0 bytes.\nat 5"),
            r"the ranks did not meet at here:1234 \(Failed to recv, got 0 bytes\.\): one of them has ended, or cannot ",
        ),
        (RuntimeError("[enforce] gloo/transport/tcp/pair.cc: refused"), "the ranks did not meet at here:1234"),
        (RuntimeError("shapes differ"), "^shapes differ$"),
    ],
)
def test_ranks_that_do_not_meet_are_named(
    monkeypatch: pytest.MonkeyPatch, torchrun: Path, error: RuntimeError, expected: str
) -> None:
    def apart(*_: str, **__: timedelta) -> None:
        raise error

    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", apart)
    waits: list[float] = []
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(sleep=waits.append))
    of_its_own = "shapes" in str(error)
    with pytest.raises(RuntimeError if of_its_own else UserError, match=expected), joined():
        pass
    # A rank that ended first has time to print its error; torchrun reads the reason of this rank.
    assert len(waits) == (not of_its_own)
    assert torchrun.exists() != of_its_own and (of_its_own or "did not meet" in torchrun.read_text())


# the end of a run


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set the environment of two ranks that do not connect, but not their numbers; return torchrun's error file."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    store = dist.HashStore()
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(console.console, "quiet", False)
    monkeypatch.setattr(ranks_module, "_LAST_WORDS", 0.0)
    return tmp_path / "error.json"


def raised(monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException) -> BaseException:
    """Return the exception that leaves `joined` if the work of a rank raises this one."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    with pytest.raises(BaseException) as left, joined() as ranks:
        assert ranks == Ranks(rank, 2, rank, 2) and console.console.quiet == (rank == 1)
        raise error
    return left.value


def test_the_rank_that_fails_first_says_why_and_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, torchrun: Path
) -> None:
    reason, lost = UserError("questions.jsonl: on fire"), RuntimeError("gloo: Connection closed by peer\nat 5")
    assert raised(monkeypatch, 1, reason) is reason
    assert "questions.jsonl: on fire" in torchrun.read_text()
    ended = raised(monkeypatch, 0, lost)
    assert isinstance(ended, SystemExit) and ended.code == 1
    assert "on fire" in torchrun.read_text() and "gloo" not in torchrun.read_text()


def test_a_rank_whose_neighbour_left_no_word_says_so(monkeypatch: pytest.MonkeyPatch, torchrun: Path) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(sleep=waits.append))
    ended = raised(monkeypatch, 0, RuntimeError("gloo: Connection closed by peer\nat 5"))
    assert len(waits) == 1, "one that was interrupted prints first"
    assert isinstance(ended, UserError) and str(ended) == (
        "another rank has ended without a message, as a killed process does (gloo: Connection closed by peer); "
        "continue with --resume"
    )
    assert "another rank has ended without a message" in torchrun.read_text()


def test_a_fault_of_a_ranks_own_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch, torchrun: Path) -> None:
    fault = RuntimeError("shapes differ")
    assert raised(monkeypatch, 0, fault) is fault and "shapes differ" in torchrun.read_text()


def test_a_rank_whose_store_is_gone_says_nothing(monkeypatch: pytest.MonkeyPatch, torchrun: Path) -> None:
    def gone(*_: str) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: SimpleNamespace(compare_set=gone))
    ended = raised(monkeypatch, 1, RuntimeError("gloo: Connection closed by peer"))
    assert isinstance(ended, SystemExit) and ended.code == 1 and not torchrun.exists()


@pytest.mark.parametrize(("error", "status"), [(Interrupted(signal.SIGTERM), 143), (KeyboardInterrupt(), 130)])
def test_rank_0_alone_speaks_of_an_interruption(
    monkeypatch: pytest.MonkeyPatch, torchrun: Path, error: BaseException, status: int
) -> None:
    assert raised(monkeypatch, 0, error) is error
    ended = raised(monkeypatch, 1, error)
    assert isinstance(ended, SystemExit) and ended.code == status and not torchrun.exists()


@dataclass(frozen=True, slots=True)
class Beside(Ranks):
    """A rank next to one that got the signal `other`. told: the signals that this rank has reported to it."""

    count: int = 2
    other: int = 0
    told: list[int] = field(default_factory=list)

    def all_reduce_max(self, number: int) -> int:
        self.told.append(number)
        return max(number, self.other)


def test_a_signal_to_one_rank_ends_the_work_of_all() -> None:
    done: list[str] = []

    def work(ranks: Ranks, number: int) -> None:
        with handle_signals(), defer_signals("the step"):
            with ranks.interruptible():
                if number:
                    signal.raise_signal(number)
                done.append("work without collectives")
            done.append("an update")

    for ranks, number, named in (
        (Beside(other=signal.SIGTERM), 0, "SIGTERM"),
        (Beside(rank=1), signal.SIGTERM, "SIGTERM"),  # a background process may ignore SIGINT
    ):
        with pytest.raises(Interrupted, match=named):
            work(ranks, number)
        assert ranks.told == [number]
    assert done == ["work without collectives"]  # of the rank that got no signal
    work(Beside(), 0)
    assert done[1:] == ["work without collectives", "an update"]


class Three(Ranks):
    """Rank 0 of three; one of the others has nothing to ask, the other has two cases."""

    def gather(self, value: Any) -> list[Any]:
        return [value, [], [(("g",), "yes"), (("g",), "no")]]


class Behind(MasterWeights):
    """A rank next to which another one always has two more micro-batches."""

    def max_over_ranks(self, count: int) -> int:
        return count + 2


@pytest.mark.slow
def test_micro_batches_that_make_up_the_number_change_no_bit(make_tiny_policy: Callable[..., Policy]) -> None:
    generator, items = torch.Generator().manual_seed(0), []
    for length, advantage in ((12, 1.0), (9, -0.7), (17, 0.4)):
        ids = torch.randint(1, 29, (length,), generator=generator).tolist()
        old = [-3.0] * (length - 4)
        items.append(
            TrainSequence(ids=ids, positions=list(range(4, length)), old_logprobs=old, advantage=advantage, weight=0.05)
        )
    ends = []
    for weights in (MasterWeights, Behind):
        policy, reference = make_tiny_policy().requires_grad_(True), make_tiny_policy(initializer_range=0.2)
        optim = OptimSection(lr=1e-2, micro_batch_tokens=20, checkpoint_activations="on")
        grpo = GrpoSection(beta=0.1, entropy_coef=0.1)
        updater = Updater(weights(policy), reference, optim, grpo, 29, 3)
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

    verdicts = MainRankJudge(Judge(), Three())
    assert verdicts.name == "the judge"
    assert verdicts.rate([(("g",), "no"), (("g",), "yes")]) == [False, True]
    assert asked == [["no", "yes", "yes", "no"]]


def test_sft_refuses_several_ranks_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thresher.engine.parallel.ranks.joined", lambda: nullcontext(Ranks(1, 2)))
    assert run(["sft", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err == (
        "thresher: sft trains in one process, but torchrun has started 2; leave torchrun out\n"
    )
