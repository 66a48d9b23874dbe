"""Partial rollouts that end while searches or tools are running, by a signal, or in an update without memory; and the
settings that a resumed run may not change."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from partial_cases import STEPS, also, turns
from tool_cases import LOOKING
from train_cases import Make, assert_same_run, sampled, steps_of, steps_saved, train_killed

from thresher.common import signals
from thresher.common.errors import UserError
from thresher.common.records import read_records
from thresher.engine.assemble import load_retrieval
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.rollout.tools import Call, Toolbox
from thresher.engine.rollout.unfinished import LastingPlay
from thresher.engine.training import train as train_module
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater
from thresher.retrieval.retriever import Hit, Retriever

SLOW = 0.2  # duration of a search or call in seconds, in which a tiny model draws hundreds of tokens


class Waits:
    """Record what was running when a step had its groups: whether a search, and how many calls of tools."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.searches, self.calls, self.over = list[bool](), list[int](), False
        plain = LastingPlay.interrupt

        def interrupt(play: LastingPlay) -> None:
            self.searches.append(bool(play.search is not None or play.asked))
            self.calls.append(len(play.runner.tools.waiting))
            self.over = True
            plain(play)
            self.over = False
            assert play.search is None and not play.asked and not play.runner.tools.waiting

        patch.setattr(LastingPlay, "interrupt", interrupt)


def check_tokens(run: Path) -> None:
    """Check that the versions of each turn cover its tokens, and that no fresh token was drawn by other weights."""
    for step in steps_of(run):
        assert step["logprob_gap_max"] < 1e-3
        for turn in (turn for record in sampled(run, step["step"]) for turn in turns(record)):
            assert sum(count for _, count in turn["versions"]) == len(turn["ids"])


@pytest.mark.slow
def test_a_search_of_a_server_that_is_under_way_is_waited_for(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(Retriever):
        elsewhere = True

        def __init__(self, index: Retriever) -> None:
            super().__init__()
            self.index = index

        def check_k(self, k: int) -> None:
            self.index.check_k(k)

        def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
            time.sleep(SLOW)
            return self.index._find(queries, k)

    def load(*arguments: Any) -> Retriever:
        index = load_retrieval(*arguments)
        assert index is not None
        return Elsewhere(index)

    monkeypatch.setattr(train_module, "load_retrieval", load)
    Waits(monkeypatch)
    recipe = make_recipe(**also(run={"eval_every": None}))
    train_killed(recipe, tmp_path / "run", 3)
    train(recipe, tmp_path / "run", resume=True)
    check_tokens(tmp_path / "run")


def test_calls_of_tools_that_are_under_way_are_waited_for_and_those_that_hang_are_not(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, number = tmp_path / "looking.py", "number = next(COUNT)\n"
    slow = f"    import time\n    time.sleep({SLOW} * (3 if number % 3 == 0 else 1))\n"
    file.write_text(LOOKING.replace(number, number + slow))
    tools = {"look": {"function": f"{file}:look", "timeout": 1.5 * SLOW}}
    system = {"name": str(file), "template": None}
    changes = also(system=system, rollout={"max_passage_tokens": 60}, run={"eval_every": None})
    waits, ended, held = Waits(monkeypatch), Toolbox.ended, list[Call]()

    def own_only(box: Toolbox, wait: bool) -> list[Call]:
        """Hold results of groups of later steps back until the step is over, which then waits for them."""
        if waits.over:
            box.waiting -= {*held}
            found, held[:] = [*held], []
            return found or ended(box, wait)
        while True:
            found = ended(box, wait)
            later = [call for call in found if call.owner.group.step > box.step]
            held.extend(later)
            box.waiting |= {*later}
            if len(found) > len(later) or not wait:
                return [call for call in found if call not in later]

    monkeypatch.setattr(Toolbox, "ended", own_only)
    recipe = make_recipe(tools=tools, **changes)
    train_killed(recipe, tmp_path / "run", 3)
    train(recipe, tmp_path / "run", resume=True)
    assert any(waits.calls)
    check_tokens(tmp_path / "run")
    records = [record for step in range(1, STEPS + 1) for record in sampled(tmp_path / "run", step)]
    calls = [call for record in records for call in record.get("tools", [])]
    hung = [call for call in calls if "gave no result within" in call["text"]]
    assert len(calls) > 2 * len(hung) > 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_signal_in_a_rollout_keeps_the_groups_behind_the_last_learned_step(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handled: None, shuffle: bool
) -> None:
    recipe = make_recipe(**also(run={"save_every": 99}, retrieval={"shuffle": shuffle}))
    train(recipe, tmp_path / "whole")
    step, steps = Decoder.step, [0]

    def signalling(self: Decoder) -> Any:
        steps[0] += self.clock.tokens_recomputed > 0  # in a rollout that continues groups of an earlier one
        if steps[0] == 20:
            signals.signal.raise_signal(signals.signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch, pytest.raises(signals.Interrupted):
        patch.setattr(Decoder, "step", signalling)
        train(recipe, tmp_path / "run")
    (saved,) = steps_saved(tmp_path / "run")
    file = tmp_path / f"run/checkpoints/step_{saved:06d}/unfinished.jsonl"
    first, *groups = [record for _, record in read_records(file)]
    assert first["next"] == 2 * saved and [one["group"] for one in groups] == list(range(2 * saved, 2 * saved + 4))
    with signals.handle_signals():
        train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_an_update_without_memory_leaves_the_groups_of_its_step(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups are sampled again from their state after the last learned step."""
    recipe = make_recipe(**also(run={"save_every": 99}))
    train(recipe, tmp_path / "whole")
    update = Updater.update

    def failing(self: Updater, sequences: Any, place: int, *more: Any) -> Any:
        if place == 2:
            raise torch.OutOfMemoryError
        return update(self, sequences, place, *more)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="out of memory"):
        patch.setattr(Updater, "update", failing)
        train(recipe, tmp_path / "run")
    assert steps_saved(tmp_path / "run") == [2]
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_an_episode_that_is_no_function_of_what_it_is_sent_is_refused(make_recipe: Make, tmp_path: Path) -> None:
    system, call = tmp_path / "moody.py", "        result = yield"
    system.write_text(LOOKING.replace(call, f"        if next(COUNT) > 6:\n            continue\n{call}"))
    tools = {"look": {"function": f"{system}:look"}}
    recipe = make_recipe(tools=tools, **also(system={"name": str(system), "template": None}, run={"eval_every": None}))
    with pytest.raises(UserError, match=r"looking: question q\d+: the episode requested something else when it was"):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize("change", [{"kv_tokens": 900}, {"num_draft_tokens": 2}, {"max_num_seqs": 7}])
def test_what_decides_versions_may_not_change(make_recipe: Make, tmp_path: Path, change: dict[str, Any]) -> None:
    short = {"steps": 1, "eval_every": None, "eval_questions": 1}
    train(make_recipe(**also(run=short)), tmp_path / "run")
    (key,) = change
    with pytest.raises(UserError, match=f"rollout.{key}"):
        train(make_recipe(**also(run=short | {"steps": 2}, rollout=change)), tmp_path / "run", resume=True)


def test_results_of_tools_are_not_replayed_alone(make_recipe: Make, tmp_path: Path) -> None:
    recipe = make_recipe(**also(rollout={"tools_replay": "run"}))
    with pytest.raises(
        UserError, match=r"tools_replay: expected none with rollout.partial = true, .* with --replay RUN"
    ):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
