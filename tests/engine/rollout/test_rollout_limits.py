"""Rollouts of a tiny policy at their limits: what ends one; sharing, cuts, batched searches and freed pages; systems
that break the rules. Where a test needs to know the policy's tokens, `script` and `written` force the ids."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rollout_cases import EOS, Make, Written, assert_logprobs_match, make_jobs, system_of

from thresher.common.errors import UserError
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.episode import Feedback, Generate, Prompt, Retrieved, Search, System
from thresher.engine.protocol.trajectory import turns
from thresher.engine.rollout import rollout as rollout_module
from thresher.engine.rollout.rollout import DecoderWriter, Job
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source


class SpyIndex:
    """An index that records every call. before: is called before each search."""

    samples = False

    def __init__(self, index: Index, elsewhere: bool = False, before: Callable[[], None] = lambda: None) -> None:
        self.index, self.elsewhere, self.before = index, elsewhere, before
        self.calls: list[list[str]] = []

    def search(self, queries: list[str], k: int) -> Any:
        self.before()
        self.calls.append(list(queries))
        return self.index.search(queries, k)


# --- Limits


def test_limits_end_a_trajectory_each_with_its_reason(
    written: Written, tiny_rollout: Make, tiny_tokenizer: Tokenizer, tiny_questions: list[Question]
) -> None:
    prompt = len(tiny_rollout().prompt(tiny_questions[0]))
    endless, short, answer = ["a" * 400], [f"abc{EOS}"] * 100, ["<answer>a</answer>"]
    size = len(tiny_tokenizer.encode(answer[0]))
    for texts, limits, reason, lengths in (
        (endless, {"max_turn_tokens": 7}, "turn_tokens", [7]),
        (endless, {"max_policy_tokens": 9, "max_turn_tokens": 50}, "tokens", [9]),
        # Turns of 4 tokens: the limit is within the third, and at the end of the second.
        (short, {"max_policy_tokens": 10, "max_turns": 9}, "tokens", [4, 4, 2]),
        (short, {"max_policy_tokens": 8, "max_turns": 9}, "tokens", [4, 4]),
        (endless, {"max_context": prompt + 11, "max_turn_tokens": 50}, "context", [11]),
        (endless, {"max_context": prompt + 1}, "context", [1]),
        (short, {"max_turns": 3}, "turns", [4, 4, 4]),
        # A turn that stops at its last allowed token is complete.
        (answer, {"max_turn_tokens": size, "max_policy_tokens": size}, "answered", [size]),
        (answer, {"max_turn_tokens": size - 1}, "turn_tokens", [size - 1]),
        (short, {"max_turn_tokens": 4, "max_turns": 1}, "turns", [4]),
        (answer, {"max_context": prompt + size}, "answered", [size]),
    ):
        _, trajectory = written(texts, **limits)
        assert (trajectory.reason, [len(s.ids) for s in turns(trajectory)]) == (reason, lengths), limits
        assert len(trajectory.segments) > 2 or len(trajectory) == prompt + lengths[0]


def test_passages_that_no_longer_fit_are_left_out_and_end_it(written: Written) -> None:
    texts = ["<search>mayor</search>", "<answer>a</answer>"]
    _, whole = written(texts)
    up_to_passages = sum(len(s.ids) for s in whole.segments[:3])
    for room, sources in ((up_to_passages + 1, 4), (up_to_passages, 2), (up_to_passages - 9, 2)):
        _, trajectory = written(texts, max_context=room)
        assert trajectory.reason == "context" and len(trajectory.segments) == sources
        assert len(trajectory.searches) == 1 and len(trajectory) <= room


def test_a_prompt_that_fills_the_context_is_refused(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    question = tiny_questions[3]
    length = len(tiny_rollout().prompt(question))
    (trajectory,) = tiny_rollout(max_context=length + 1).run([Job(question, 0, 0, 0)], 1.0)
    assert len(trajectory) == length + 1
    for room in (length, 5):
        run = tiny_rollout(max_context=room)
        with pytest.raises(UserError, match=rf"question q3: its prompt of {length} tokens leaves no room .* of {room}"):
            run.run(make_jobs(tiny_questions[3:5]), 1.0)
        with pytest.raises(UserError, match="question q3"):
            run.check_prompts(tiny_questions[3:])
    tiny_rollout(max_context=length + 1).check_prompts([question])


def test_what_cannot_be_encoded_is_refused_at_the_question_or_passage(
    tiny_rollout: Make, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Like SmolLM2's, the tokenizer has no token for byte 0: the error must show where the text is."""
    tiny_tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"Ā"', '"ĀĀ"'))
    run = tiny_rollout(tokenizer=load_tokenizer(tmp_path))
    good = Question("q0", "Who?", ("x",))
    run.check_prompts([good])
    with pytest.raises(UserError, match=r"question q1: text starting .* has U\+0000 at character 5"):
        run.check_prompts([good, Question("q1", " Who\0?", ("x",))])
    passages = [Passage("1", "Fine", "text"), Passage("2", "Broken", "a\0b")]
    with pytest.raises(UserError, match="passage 'Broken': text starting"):
        run.renderer.passages(passages)


# --- Sharing, cuts, batched searches, freed pages


def test_siblings_recompute_nothing_of_their_prompt(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    """The prompts of other questions are not recomputed either where they begin alike."""
    for max_running in (64, 2):
        run = tiny_rollout(max_turns=1, max_num_seqs=max_running, kv_block_size=16)
        prompts = [len(run.prompt(question)) for question in tiny_questions[:3]]
        run.run(make_jobs(tiny_questions[:3], samples=6), 1.0)
        assert run.clock.prefilled_tokens < sum(prompts)
        assert run.clock.prefilled_tokens + run.clock.shared_tokens == 6 * sum(prompts)


def test_all_searches_of_a_step_are_one_call(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question]
) -> None:
    late = ["<think>?</think><search>mayor</search>", "<answer>a</answer>"]
    early = ["<search>rival</search>", "<search>spouse</search>", "<answer>a</answer>"]
    script({seed: list(late if seed % 3 == 0 else early) for seed in range(9)})
    spy = SpyIndex(tiny_index)
    run = tiny_rollout(index=spy)
    trajectories = run.run([Job(tiny_questions[0], 0, seed, seed) for seed in range(9)], 1.0)
    # The first search of some samples falls on the same step as the second of others, and they share a call.
    assert spy.calls == [["rival"] * 6, ["mayor", "spouse", "spouse"] * 3]
    assert (run.clock.search_calls, run.clock.search_queries) == (2, 15)
    assert {t.reason for t in trajectories} == {"answered"}


def test_episodes_that_search_before_they_write_share_a_call(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question]
) -> None:
    """Regression: episodes that began together searched one by one. Two successive searches are two calls."""

    def episode(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        first = yield Search(question.question)
        second = yield Search(first[0].passage.text)
        yield Retrieved([*first, *second], "<search>", "</search>")
        yield Generate(("</search>",))
        return "done"

    script({1000 * group + number: ["</search>"] for group in range(5) for number in range(2)})
    spy = SpyIndex(tiny_index)
    run = tiny_rollout(system_of(episode), index=spy)
    jobs = make_jobs(tiny_questions[:5], samples=2)
    trajectories = run.run(jobs, 1.0)
    assert [len(call) for call in spy.calls] == [10, 10]
    assert spy.calls[0] == [job.question.question for job in jobs]
    assert {t.reason for t in trajectories} == {"done"} and all(len(t.searches) == 2 for t in trajectories)
    assert run.clock.forwards == 2 + 2, "all prompts, all passages, and two tokens more than the first"
    assert_logprobs_match(run, trajectories, 1.0)


def test_others_write_while_a_server_searches(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers only after the others have continued writing."""
    searching = ["<search>mayor</search>", "<answer>a</answer>"]
    other = ["<think>nobody is asked</think><answer>b</answer>"]
    jobs = [Job(tiny_questions[0], 0, seed, seed) for seed in range(6)]
    went_on = threading.Event()

    def wait() -> None:
        assert went_on.wait(timeout=60), "nobody wrote while the search was out"

    found = []
    for server in (SpyIndex(tiny_index), SpyIndex(tiny_index, elsewhere=True, before=wait)):
        script({seed: list(searching if seed < 3 else other) for seed in range(6)})
        run = tiny_rollout(index=server)
        step = run.decoder.step
        went_on.clear()

        def counted(run: Any = run, step: Any = step) -> Any:
            ended = step()
            if run.clock.search_calls:
                went_on.set()
            return ended

        monkeypatch.setattr(run.decoder, "step", counted)
        found.append(run.run(jobs, 1.0))
        assert server.calls == [["mayor"] * 3]
    alone, together = found
    assert [(t.ids(), t.searches) for t in together] == [(t.ids(), t.searches) for t in alone]
    assert_logprobs_match(run, together, 1.0)


QUERIES = ("mayor", "spouse", "rival")


class BesideAGpu(DecoderWriter):
    """A writer that accepts text every third step, as a decoder on a GPU does, and runs searches in the background.
    appended: the steps, of all steps, after which text was appended."""

    appended: ClassVar[list[int]] = []

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.elsewhere = True

    def append(self, sample: Any, ids: list[int]) -> None:
        self.appended.append(self.decoder.clock.forwards)
        super().append(sample, ids)

    @property
    def takes_text(self) -> bool:
        return self.decoder.clock.forwards % 3 == 0


def test_a_search_beside_a_gpu_is_over_in_so_many_steps_however_long_it_takes(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search runs in a thread while others write, and changes no result. Three samples search at different steps;
    searches between two steps that accept text are one call."""
    texts = [
        "<search>mayor</search>",
        "<think>a</think><search>spouse</search>",
        "<think>b</think><search>rival</search>",
    ]
    searching = {seed: [text, "<answer>a</answer>"] for seed, text in enumerate(texts)}
    jobs = [Job(tiny_questions[0], 0, seed, seed) for seed in range(4)]
    threads: list[threading.Thread] = []
    found, calls, appended = [], [], []
    for seconds in (0.0, 0.0, 0.2):
        script({**{seed: list(turns) for seed, turns in searching.items()}, 3: ["c" * 60 + "<answer>b</answer>"]})
        wait = partial(threading.Event().wait, seconds)
        index = SpyIndex(tiny_index, before=lambda: threads.append(threading.current_thread()) or wait())  # noqa: B023
        BesideAGpu.appended.clear()
        found.append([(t.ids(), t.searches, t.reason) for t in tiny_rollout(index=index).run(jobs, 1.0)])
        calls.append(index.calls)
        appended.append(list(BesideAGpu.appended))
        monkeypatch.setattr(rollout_module, "DecoderWriter", BesideAGpu)
    assert found[0] == found[1] == found[2]
    assert calls[1] == calls[2] and appended[1] == appended[2]
    assert len(appended[1]) == 3 and all(step % 3 == 0 for step in appended[1])
    assert all(sorted(query for call in each for query in call) == sorted(QUERIES) for each in calls)
    main = threading.current_thread()
    assert [thread is main for thread in threads] == [True] * len(calls[0]) + [False] * 2 * len(calls[1])
    # A search that samples itself must not run beside the writer.
    script({**{seed: list(turns) for seed, turns in searching.items()}, 3: ["c" * 60 + "<answer>b</answer>"]})
    threads.clear()
    index = SpyIndex(tiny_index, before=lambda: threads.append(threading.current_thread()))
    index.samples = True
    assert [(t.ids(), t.searches, t.reason) for t in tiny_rollout(index=index).run(jobs, 1.0)] == found[0]
    assert set(threads) == {main}


@pytest.mark.parametrize("most", [0, -3])
def test_a_turn_of_no_tokens_is_refused(tiny_rollout: Make, tiny_questions: list[Question], most: int) -> None:
    def episode(question: Question, config: Any) -> Iterator[Any]:
        yield Prompt(config.template, question.question)
        yield Generate(stop=(), max_tokens=most)
        return "answered"

    with pytest.raises(UserError, match=f"test asks for a turn of {most} tokens; expected max_tokens of at least 1"):
        tiny_rollout(system_of(episode)).run([Job(tiny_questions[0], 0, 0, 0)], 1.0)


def test_a_search_that_fails_elsewhere_ends_the_run(written: Written, tiny_index: Index) -> None:
    def fail() -> None:
        raise UserError("the server is away")

    with pytest.raises(UserError, match="the server is away"):
        written(["<search>mayor</search>"], index=SpyIndex(tiny_index, elsewhere=True, before=fail))


def test_pages_come_back_and_results_keep_the_order_of_the_jobs(
    tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    run, ended = tiny_rollout(max_num_seqs=5), []
    jobs = make_jobs(tiny_questions[:7], samples=3)[::-1]
    trajectories = run.run(jobs, 1.0, ended.append)
    assert [(t.question_id, t.sample) for t in trajectories] == [(job.question.id, job.sample) for job in jobs]
    assert sum(ended) == len(jobs) and min(ended) >= 1
    pool = run.decoder.pool
    assert pool.num_free == pool.num_blocks - 1 == 5 * 6 and not pool.ref_count_P.any()
    assert run.clock.sampled_tokens == sum(t.count(Source.POLICY) for t in trajectories)
    assert run.run([], 1.0) == [] and run.clock.forwards == 0


def test_shuffled_passages_depend_on_the_sample_alone(
    script: Any, tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    lines = {seed: ["<search>mayor of Eva Frost</search>", "<search>rival</search>", EOS] for seed in range(12)}

    def shown(jobs: list[Job], shuffle: bool) -> list[list[list[str]]]:
        script({seed: list(texts) for seed, texts in lines.items()})
        run = tiny_rollout(k=4, max_turns=3, shuffle=shuffle, max_context=700)
        return [[search["passages"] for search in t.searches] for t in run.run(jobs, 1.0)]

    jobs = [Job(tiny_questions[0], 0, seed, seed) for seed in range(12)]
    by_score, shuffled = shown(jobs, False), shown(jobs, True)
    assert len({str(searches) for searches in by_score}) == 1
    assert len({str(searches[0]) for searches in shuffled}) > 6
    for plain, mixed in zip(by_score, shuffled, strict=True):
        assert [sorted(search) for search in mixed] == [sorted(search) for search in plain]
    assert [shown([job], True)[0] for job in jobs[:4]] == shuffled[:4]


# --- Systems that break the rules


def asking(*requests: Any, reason: str | None = None) -> System:
    """Return a system whose episodes make these requests."""

    def episode(question: Question, config: Any) -> Any:
        yield from requests
        return reason

    return system_of(episode)


def test_an_episode_that_writes_nothing_ends_and_requests_out_of_place_are_our_fault(
    tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    prompt, feedback = Prompt("{question}", "Who?"), Feedback("nobody listens")
    for system, ends in ((asking(prompt), ("ended", 1)), (asking(prompt, feedback, reason="gave up"), ("gave up", 2))):
        trajectories = tiny_rollout(system, max_num_seqs=2).run(make_jobs(tiny_questions[:3], samples=2), 1.0)
        assert {(t.reason, len(t.segments)) for t in trajectories} == {ends}
    for system, message in (
        (asking(Generate(("</search>",))), "test must begin with a Prompt"),
        (asking(prompt, prompt), "not a request that may follow the prompt"),
    ):
        with pytest.raises(TypeError, match=message):
            tiny_rollout(system).run(make_jobs(tiny_questions[:1]), 1.0)


def test_limits_of_the_cache(tiny_rollout: Make) -> None:
    with pytest.raises(UserError, match=r"rollout\.kv_block_size is 24; expected a multiple of 16"):
        tiny_rollout(kv_block_size=24)
    run = tiny_rollout(max_context=100, max_num_seqs=3, kv_block_size=16)
    blocks, cache = run.decoder.num_blocks, run.decoder.cache
    assert blocks == run.blocks_for(run.limits) == 1 + 3 * 7
    needed = PagedKV.bytes_needed(run.policy.config, blocks, 16, 4)
    assert needed == cache.k_LPKDS.nbytes + cache.v_LPKSD.nbytes
