"""Rollouts of a tiny policy: bitwise independent of batch composition, with exact tokens. Where a test needs to know
the policy's tokens, `script` forces the ids."""

from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy, using_threads
from rollout_cases import EOS, Make, Written, assert_logprobs_match, make_jobs, record, system_of

from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.episode import Feedback, Generate, Prompt, Retrieved, Search
from thresher.engine.protocol.trajectory import check_trajectory, turns
from thresher.engine.rollout.rollout import Job
from thresher.kernels.sampling import SamplingTensors, sample
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

# --- Independent of batch composition


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_are_batch_invariant(
    dtype: torch.dtype, tiny_rollout: Make, tiny_policy: Policy, tiny_questions: list[Question]
) -> None:
    policy = tiny_policy.to(dtype)
    needs_invariant_policy(policy)
    jobs = make_jobs(tiny_questions[:20])
    batched_run = tiny_rollout(policy=policy)
    batch = batched_run.run(jobs, 1.0)
    # The batch is mixed: it searches, goes on after a search, ends in several ways and at different times.
    assert batched_run.clock.search_queries >= 5 and len({len(trajectory) for trajectory in batch}) > 10
    assert len({trajectory.reason for trajectory in batch}) >= 3
    single_run = tiny_rollout(policy=policy, max_num_seqs=1)
    for job, together in zip(jobs, batch, strict=True):
        assert record(single_run.run([job], 1.0)[0]) == record(together)


def babble(question: Question, config: Any) -> Any:
    """End turns at letters that random weights soon write; some turns search, some are answered by the engine."""
    yield Prompt("{question}", question.question)
    for _ in range(config.max_turns):
        turn = yield Generate(("e", "a", "o"))
        if turn.stop == "o":
            return "answered"
        if turn.stop == "e":
            yield Retrieved((yield Search(f"{question.question} {len(turn.text)}")), "<search>", "</search>")
        else:
            yield Feedback(" Go on." * (1 + len(turn.text) % 3))
    return "turns"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(1, 1, 32), pytest.param(5, 1, 24, marks=pytest.mark.bits), (7, 1, 64), (6, 2, 12)],
    ids=["one head", "5 to 1", "7 to 1", "6 to 2"],
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.fast_cases(2)
def test_samples_are_batch_invariant_with_other_heads(
    heads: int, kv_heads: int, dim: int, threads: int, tiny_model_config: Any, tiny_rollout: Make, tiny_questions: Any
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * dim}
    policy = init_policy(tiny_model_config.replace(**shape, intermediate_size=100, tie_word_embeddings=False), 0)
    needs_invariant_policy(policy, threads)
    jobs = make_jobs(tiny_questions[:9])
    with using_threads(threads):
        run = tiny_rollout(system_of(babble), policy=policy, max_turns=6)
        batch = run.run(jobs, 1.0)
        assert run.clock.search_queries > 1 and len({len(t) for t in batch}) > 5
        single = tiny_rollout(system_of(babble), policy=policy, max_turns=6, max_num_seqs=1)
        for job, together in zip(jobs, batch, strict=True):
            assert record(single.run([job], 1.0)[0]) == record(together)


def test_noise_is_asked_for_by_seed_and_position(
    tiny_rollout: Make, tiny_questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position is the token's place in its trajectory, so no two of its tokens get the same noise."""
    asked: dict[int, list[int]] = {}

    def spy(logits_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor, rules: SamplingTensors) -> Any:
        for seed, position in zip(seeds_B.tolist(), positions_B.tolist(), strict=True):
            asked.setdefault(seed, []).append(position)
        return sample(logits_BV, seeds_B, positions_B, rules)

    monkeypatch.setattr(decoder_module.sampling, "sample", spy)
    jobs = make_jobs(tiny_questions[:6], samples=2)
    for job, trajectory in zip(jobs, tiny_rollout().run(jobs, 1.0), strict=True):
        assert asked[job.seed] == trajectory.policy_positions()


@pytest.mark.slow
def test_greedy_ignores_the_seed(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    jobs = make_jobs(tiny_questions[:6])
    others = [Job(job.question, job.group, 0, job.seed + 77) for job in jobs]
    run = tiny_rollout()
    assert list(map(record, run.run(jobs, 0.0))) == list(map(record, run.run(others, 0.0)))
    assert list(map(record, run.run(jobs, 1.0))) != list(map(record, run.run(others, 1.0)))


@pytest.mark.slow
def test_new_weights_need_no_new_rollout(
    tiny_rollout: Make, tiny_policy: Policy, make_tiny_policy: Any, tiny_questions: list[Question]
) -> None:
    """The training loop updates the same tensors: no keys and values of the old weights may be left."""
    jobs = make_jobs(tiny_questions[:8], samples=2)
    run = tiny_rollout(policy=tiny_policy)
    before = list(map(record, run.run(jobs, 1.0)))
    changed = make_tiny_policy()
    with torch.no_grad():
        for policy in (tiny_policy, changed):
            for parameter in policy.parameters():
                parameter.mul_(1.05)
    after = list(map(record, run.run(jobs, 1.0)))
    assert after == list(map(record, tiny_rollout(policy=changed).run(jobs, 1.0))) != before


# --- Tokens


@pytest.mark.parametrize(("system", "temperature"), [("eval_rar", 1.0), ("search_r1", 0.7)])
def test_decode_equals_prefill_and_every_trajectory_keeps_its_invariants(
    system: str, temperature: float, tiny_rollout: Make, tiny_tokenizer: Tokenizer, tiny_questions: list[Question]
) -> None:
    run = tiny_rollout(system, max_num_seqs=11)
    trajectories = run.run(make_jobs(tiny_questions[:30]), temperature)
    assert sum(len(trajectory.searches) for trajectory in trajectories) > 5
    assert_logprobs_match(run, trajectories, temperature)
    assert all(check_trajectory(t, tiny_tokenizer, run.system.tags, 360) == [] for t in trajectories)
    assert all(t.segments[0].source is Source.PROMPT and t.reason for t in trajectories)


def test_bfloat16_decodes_near_its_prefill(
    tiny_rollout: Make, tiny_policy: Policy, tiny_questions: list[Question]
) -> None:
    run = tiny_rollout(policy=tiny_policy.bfloat16())
    trajectories = run.run(make_jobs(tiny_questions[:10]), 1.0)
    assert run.decoder.cache.k_LPKDS.dtype == torch.bfloat16
    assert_logprobs_match(run, trajectories, 1.0)


def test_columns_beyond_the_tokenizer_are_never_sampled(
    tiny_rollout: Make, tiny_policy: Policy, tiny_tokenizer: Tokenizer, tiny_questions: list[Question]
) -> None:
    vocab = tiny_tokenizer.vocab_size
    assert tiny_policy.config.vocab_size > vocab
    frequent = sorted({token for word in ("rival", "spouse", "</>") for token in tiny_tokenizer.encode(word)})
    tiny_policy.head_VH[vocab : vocab + len(frequent)] = 1.2 * tiny_policy.head_VH[frequent]
    run = tiny_rollout(policy=tiny_policy)
    trajectories = run.run(make_jobs(tiny_questions[:10]), 1.0)
    ids = trajectories[0].ids()
    tempting = torch.softmax(tiny_policy.logits(torch.tensor(ids)), -1)[:, vocab:].sum(-1)
    assert tempting.mean() > 0.05
    assert max(max(trajectory.ids()) for trajectory in trajectories) < vocab
    assert_logprobs_match(run, trajectories, 1.0)


def test_a_scripted_episode_token_by_token(written: Written, tiny_tokenizer: Tokenizer) -> None:
    """Two searches, a turn without an action, an answer: the source of each segment, in order, without a lost token."""
    texts = [
        "<think>?</think><search>spouse of Gil Hart</search>",
        "<search>mayor</search>",
        f"<evaluate>missing</evaluate>{EOS}",
        "<answer>Eva Frost</answer>",
    ]
    run, trajectory = written(texts, max_turn_tokens=60, max_policy_tokens=300, max_context=600)
    sources = "prompt policy retrieved policy retrieved policy feedback policy"
    assert [str(s.source) for s in trajectory.segments] == sources.split() and trajectory.reason == "answered"
    ends = [("</search>", 0), ("</search>", 0), (None, 0), ("</answer>", 0)]
    assert [(s.stop, s.trailing) for s in turns(trajectory)] == ends
    assert [s.ids for s in turns(trajectory)] == [tiny_tokenizer.encode_template(text) for text in texts]
    assert [search["query"] for search in trajectory.searches] == ["spouse of Gil Hart", "mayor"]
    shown = tiny_tokenizer.decode(trajectory.segments[2].ids)
    first = run.retriever.search(["spouse of Gil Hart"], 2)[0]
    assert trajectory.searches[0]["passages"] == [hit.passage.id for hit in first]
    assert shown.startswith(f'\n\n<information>Doc 1(Title: "{first[0].passage.title}") {first[0].passage.text}')
    assert shown.endswith("</information>\n\n")
    assert_logprobs_match(run, [trajectory], 1.0)
    assert run.clock.sampled_tokens == trajectory.count(Source.POLICY)
    # All tokens fed except single sampled ones: the prompt, and appended pieces with the token before each.
    appended = sum(len(s.ids) + 1 for s in trajectory.segments if s.source in (Source.RETRIEVED, Source.FEEDBACK))
    assert run.clock.prefilled_tokens == len(trajectory.segments[0].ids) + appended
    assert (run.clock.search_queries, run.clock.search_calls) == (2, 2)


def test_a_token_that_goes_on_after_its_tag_is_kept_whole(written: Written, tiny_tokenizer: Tokenizer) -> None:
    _, trajectory = written(["<search>mayor</search><", "/answer>no</answer>"], max_turns=2)
    first, second = turns(trajectory)
    assert tiny_tokenizer.token_bytes(first.ids[-1]) == b"><" and (first.stop, first.trailing) == ("</search>", 1)
    # The bracket belongs to the first turn: the second does not begin with a closing tag.
    assert tiny_tokenizer.decode(second.ids) == "/answer>no</answer>" and second.stop == "</answer>"
    assert trajectory.reason == "turns" and [search["query"] for search in trajectory.searches] == ["mayor"]


def test_a_tag_does_not_reach_from_one_turn_into_the_next(written: Written, tiny_tokenizer: Tokenizer) -> None:
    texts = [f"<answer>Eva</answ{EOS}", f"er>{EOS}", f"</answer>{EOS}"]
    _, trajectory = written(texts, max_turns=3)
    assert [s.stop for s in turns(trajectory)] == [None, None, "</answer>"] and trajectory.reason == "turns"
    assert [tiny_tokenizer.decode(s.ids) for s in turns(trajectory)] == [texts[0], texts[1], "</answer>"]


def test_every_end_of_text_ends_a_turn_and_is_trained(
    written: Written, tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    ends = [tiny_tokenizer.added_tokens[name] for name in (EOS, "<|im_end|>")]
    object.__setattr__(tiny_policy.config, "eos_token_ids", tuple(ends))
    _, trajectory = written([f"a{EOS}", "<|im_start|>b<|im_end|>"], policy=tiny_policy, max_turns=2)
    first, second = turns(trajectory)
    assert [first.ids[-1], second.ids[-1]] == ends and trajectory.reason == "turns"
    assert all(len(s.logprobs) == len(s.ids) and s.stop is None for s in (first, second))
    assert [trajectory.ids()[row] for row in trajectory.policy_positions()] == first.ids + second.ids
