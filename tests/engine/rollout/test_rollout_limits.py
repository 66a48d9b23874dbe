"""Rollouts of a tiny policy at their limits: what ends one, what is shared, cut, batched and given back, systems that
break the rules. Where a test needs to know what the policy writes, `script` puts the words in its mouth."""

import threading
from pathlib import Path
from typing import Any

import pytest
from batch_invariance import needs_invariant_policy
from rollout_cases import EOS, Make, assert_logprobs_match, make_jobs, record, system_of

from thresher.common.errors import UserError
from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.episode import Feedback, Generate, Prompt, Retrieved, Search
from thresher.engine.rollout.rollout import Job
from thresher.policy.tokenizer import Tokenizer, load_tokenizer
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source


class SpyIndex:
    """The index, and every call of it."""

    elsewhere = False

    def __init__(self, index: Index) -> None:
        self.index = index
        self.calls: list[list[str]] = []

    def search(self, queries: list[str], k: int) -> Any:
        self.calls.append(list(queries))
        return self.index.search(queries, k)


# --- Limits


def test_limits_end_a_trajectory_each_with_its_reason(
    script: Any, tiny_rollout: Make, tiny_tokenizer: Tokenizer, tiny_questions: list[Question]
) -> None:
    endless = ["a" * 400]
    short = [f"abc{EOS}"] * 100
    job = Job(tiny_questions[0], 0, 0, 0)
    prompt = len(tiny_rollout().prompt(tiny_questions[0]))

    def end(lines: list[str], **limits: int) -> tuple[str, list[int], int]:
        script({0: lines})
        (trajectory,) = tiny_rollout(**limits).run([job], 1.0)
        turns = [len(s.ids) for s in trajectory.segments if s.source is Source.POLICY]
        return trajectory.reason, turns, len(trajectory)

    assert end(endless, max_turn_tokens=7) == ("turn_tokens", [7], prompt + 7)
    assert end(endless, max_policy_tokens=9, max_turn_tokens=50) == ("tokens", [9], prompt + 9)
    # Turns of 4 tokens: inside the third, and at the end of the second.
    assert end(short, max_policy_tokens=10, max_turns=9)[:2] == ("tokens", [4, 4, 2])
    assert end(short, max_policy_tokens=8, max_turns=9)[:2] == ("tokens", [4, 4])
    assert end(endless, max_context=prompt + 11, max_turn_tokens=50) == ("context", [11], prompt + 11)
    assert end(endless, max_context=prompt + 1) == ("context", [1], prompt + 1)
    assert end(short, max_turns=3)[:2] == ("turns", [4, 4, 4])
    # A turn that ends with its last allowed token has ended.
    answer = ["<answer>a</answer>"]
    size = len(tiny_tokenizer.encode(answer[0]))
    assert end(answer, max_turn_tokens=size, max_policy_tokens=size)[:2] == ("answered", [size])
    assert end(answer, max_turn_tokens=size - 1)[:2] == ("turn_tokens", [size - 1])
    assert end([f"abc{EOS}"], max_turn_tokens=4, max_turns=1)[:2] == ("turns", [4])
    assert end(answer, max_context=prompt + size)[0] == "answered"


def test_passages_that_no_longer_fit_are_left_out_and_end_it(
    script: Any, tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    job, lines = Job(tiny_questions[0], 0, 0, 0), ["<search>mayor</search>", "<answer>a</answer>"]
    script({0: lines})
    (whole,) = tiny_rollout().run([job], 1.0)
    up_to_passages = sum(len(s.ids) for s in whole.segments[:3])
    for room, sources in ((up_to_passages + 1, 4), (up_to_passages, 2), (up_to_passages - 9, 2)):
        script({0: lines})
        (trajectory,) = tiny_rollout(max_context=room).run([job], 1.0)
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
    """The tokenizer has no token for byte 0, as SmolLM2's: its name is not enough to find the text."""
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


# --- What is shared, cut, batched and given back


def test_siblings_recompute_nothing_of_their_prompt(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    """Nor the prompts of others, where they begin as theirs does."""
    apart = [Question(f"q{n}", f"{name}'s rival? Who is it?", ("a",)) for n, name in enumerate(("Anna", "Carl", "Eva"))]
    for max_running in (64, 2):
        run = tiny_rollout(template="{question}\n", max_turns=1, max_num_seqs=max_running)
        prompts = [len(run.prompt(question)) for question in apart]
        assert len({run.prompt(question)[0] for question in apart}) == 3
        run.run(make_jobs(apart, samples=6), 1.0)
        assert run.clock.prefilled_tokens == sum(prompts)
        assert run.clock.shared_tokens == 5 * sum(prompts)
        run = tiny_rollout(max_turns=1, max_num_seqs=max_running, kv_block_size=16)
        prompts = [len(run.prompt(question)) for question in tiny_questions[:3]]
        run.run(make_jobs(tiny_questions[:3], samples=6), 1.0)
        assert run.clock.prefilled_tokens < sum(prompts)
        assert run.clock.prefilled_tokens + run.clock.shared_tokens == 6 * sum(prompts)


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.slow
def test_long_inputs_enter_in_chunks(
    rows: int, tiny_rollout: Make, tiny_questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = make_jobs(tiny_questions[:6], samples=2)
    in_one = tiny_rollout()
    whole = in_one.run(jobs, 1.0)
    monkeypatch.setattr(decoder_module, "FORWARD_ROWS", rows)
    run, single = tiny_rollout(max_num_seqs=9), tiny_rollout(max_num_seqs=1)
    batch = run.run(jobs, 1.0)
    assert run.clock.forwards > in_one.clock.forwards
    assert_logprobs_match(run, batch, 1.0)
    needs_invariant_policy(run.policy)
    assert list(map(record, batch)) == list(map(record, whole))
    for job, together in list(zip(jobs, batch, strict=True))[::3]:
        assert record(single.run([job], 1.0)[0]) == record(together)


def test_all_searches_of_a_step_are_one_call(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question]
) -> None:
    late = ["<think>?</think><search>mayor</search>", "<answer>a</answer>"]
    early = ["<search>rival</search>", "<search>spouse</search>", "<answer>a</answer>"]
    script({seed: list(late if seed % 3 == 0 else early) for seed in range(9)})
    spy = SpyIndex(tiny_index)
    run = tiny_rollout(index=spy)
    trajectories = run.run([Job(tiny_questions[0], 0, seed, seed) for seed in range(9)], 1.0)
    # Whatever their turn: the first search of some falls on the same step as the second of others.
    assert spy.calls == [["rival"] * 6, ["mayor", "spouse", "spouse"] * 3]
    assert (run.clock.search_calls, run.clock.search_queries) == (2, 15)
    assert {t.reason for t in trajectories} == {"answered"}


def test_episodes_that_search_before_they_write_share_a_call(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question]
) -> None:
    """Regression: those that started together were searched for one by one. And two searches in a row are two calls."""

    def episode(question: Question, tools: Any) -> Any:
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


class SlowServer(SpyIndex):
    """Answers only once the others have gone on writing, or not at all."""

    elsewhere = True

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.went_on = threading.Event()

    def search(self, queries: list[str], k: int) -> Any:
        assert self.went_on.wait(timeout=60), "nobody wrote while the search was out"
        return super().search(queries, k)


def test_others_write_while_a_server_searches(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> dict[int, list[str]]:
        searching = ["<search>mayor</search>", "<answer>a</answer>"]
        return {
            seed: list(searching) if seed < 3 else ["<think>nobody is asked</think><answer>b</answer>"]
            for seed in range(6)
        }

    jobs = [Job(tiny_questions[0], 0, seed, seed) for seed in range(6)]
    script(lines())
    alone = tiny_rollout(index=SpyIndex(tiny_index)).run(jobs, 1.0)
    server = SlowServer(tiny_index)
    run = tiny_rollout(index=server)
    step = run.decoder.step

    def counted() -> Any:
        ended = step()
        if run.clock.search_calls:
            server.went_on.set()
        return ended

    monkeypatch.setattr(run.decoder, "step", counted)
    script(lines())
    together = run.run(jobs, 1.0)
    assert server.calls == [["mayor"] * 3]
    assert [t.ids() for t in together] == [t.ids() for t in alone]
    assert [t.searches for t in together] == [t.searches for t in alone]
    assert_logprobs_match(run, together, 1.0)


def test_a_search_that_fails_elsewhere_ends_the_run(
    script: Any, tiny_rollout: Make, tiny_index: Index, tiny_questions: list[Question]
) -> None:
    class Away(SpyIndex):
        elsewhere = True

        def search(self, queries: list[str], k: int) -> Any:
            raise UserError("the server is away")

    script({0: ["<search>mayor</search>"]})
    with pytest.raises(UserError, match="the server is away"):
        tiny_rollout(index=Away(tiny_index)).run([Job(tiny_questions[0], 0, 0, 0)], 1.0)


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


def test_an_episode_that_writes_nothing_ends(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    def silent(question: Question, tools: Any) -> Any:
        yield Prompt("{question}", question.question)

    def deaf(question: Question, tools: Any) -> Any:
        yield Prompt("{question}", question.question)
        yield Feedback("nobody listens")
        return "gave up"

    for episode, reason, segments in ((silent, "ended", 1), (deaf, "gave up", 2)):
        run = tiny_rollout(system_of(episode), max_num_seqs=2)
        trajectories = run.run(make_jobs(tiny_questions[:3], samples=2), 1.0)
        assert {(t.reason, len(t.segments)) for t in trajectories} == {(reason, segments)}


def test_requests_out_of_place_are_our_fault(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    def hasty(question: Question, tools: Any) -> Any:
        yield Generate(("</search>",))

    def twice(question: Question, tools: Any) -> Any:
        yield Prompt("{question}", question.question)
        yield Prompt("{question}", question.question)

    with pytest.raises(TypeError, match="test must begin with a Prompt"):
        tiny_rollout(system_of(hasty)).run(make_jobs(tiny_questions[:1]), 1.0)
    with pytest.raises(TypeError, match="no request that may follow the prompt"):
        tiny_rollout(system_of(twice)).run(make_jobs(tiny_questions[:1]), 1.0)


def test_limits_of_the_cache(tiny_rollout: Make) -> None:
    with pytest.raises(UserError, match=r"rollout\.kv_block_size is 24; expected a multiple of 16"):
        tiny_rollout(kv_block_size=24)
    run = tiny_rollout(max_context=100, max_num_seqs=3, kv_block_size=16)
    blocks, cache = run.decoder.num_blocks, run.decoder.cache
    assert blocks == run.blocks_for(run.limits) == 1 + 3 * 7
    needed = PagedKV.bytes_needed(run.policy.config, blocks, 16, 4)
    assert needed == cache.k_LPKDS.nbytes + cache.v_LPKSD.nbytes
