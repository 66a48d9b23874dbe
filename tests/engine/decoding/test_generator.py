"""The Generator's requests: whose noise is whose, and every wrong value ends in one sentence before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thresher.engine import GenerateRequest, Generator, TagMatcher
from thresher.kernels import grpo_loss
from thresher.policy import load_policy, load_tokenizer
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards import UserError, contains_answer, exact_match, f1_score, group_advantages, normalize_answer

HUGE = 10**5000  # which Python does not write out


@pytest.fixture
def generator(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> Generator:
    return Generator(tiny_policy, tiny_tokenizer)


def seeds_of(generator: Generator, *seeds: int | None, n: int = 3) -> list[tuple[int, ...]]:
    """The noise of each request's samples, of one call with requests of these seeds."""
    requests = [GenerateRequest(prompt_ids=[5], n=n, max_new_tokens=1, seed=seed) for seed in seeds]
    _, asked = generator._begin(requests)
    return [tuple(sample.seed for sample in samples) for _, samples in asked]


# whose noise is whose


def test_requests_without_a_seed_have_noise_of_their_own_in_every_call(
    generator: Generator, tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    calls = [seeds_of(generator, None, None, None, None) for _ in range(3)]
    every = [seed for call in calls for samples in call for seed in samples]
    assert len(set(every)) == len(every) == 3 * 4 * 3
    again = Generator(tiny_policy, tiny_tokenizer)
    assert [seeds_of(again, None, None, None, None) for _ in range(3)] == calls  # a program that is run again
    assert not set(every) & {seed for samples in seeds_of(generator, *range(40)) for seed in samples}


def test_a_seed_decides_a_requests_noise_alone(generator: Generator) -> None:
    """Not its place, its company, the number of its samples, nor what the Generator was given before."""
    (first,) = seeds_of(generator, 7)
    assert seeds_of(generator, None, 7, 8, 7)[1::2] == [first, first]
    assert seeds_of(generator, 7, n=5)[0][:3] == first
    several = seeds_of(generator, *range(50))
    assert len({seed for samples in several for seed in samples}) == 150
    # A seed in one request's place moves no other's noise.
    fresh = [Generator(generator.policy, generator.tokenizer) for _ in range(2)]
    assert seeds_of(fresh[0], None, None, None)[2] == seeds_of(fresh[1], None, 7, None)[2]


def test_a_request_that_is_refused_moves_no_noise(generator: Generator) -> None:
    fresh = Generator(generator.policy, generator.tokenizer)
    with pytest.raises(UserError):
        generator.generate([GenerateRequest(prompt_ids=[5]), GenerateRequest(prompt_ids=[])])
    assert seeds_of(generator, None) == seeds_of(fresh, None)


def test_one_prompt_asked_often_begins_in_several_ways(generator: Generator) -> None:
    request = GenerateRequest(prompt_ids=[5, 6], max_new_tokens=4, temperature=5.0)
    together = [samples[0].token_ids for samples in generator.generate([request] * 8)]
    one_by_one = [generator.generate([request])[0][0].token_ids for _ in range(8)]
    assert len({tuple(ids) for ids in together + one_by_one}) == 16


# wrong values


def request(**changes: Any) -> list[GenerateRequest]:
    return [GenerateRequest(**{"prompt_ids": [5, 6], "max_new_tokens": 2, **changes})]


WRONG_NUMBERS = (
    1.5,
    1.0,
    "1",
    None,
    True,
    [1],
    float("nan"),
    float("inf"),
    1j,
    object(),
    -1,
    HUGE,
    np.float32(2),
    b"1",
)
REQUESTS = [
    *(
        ({name: value}, f"request 0: {name} is ")
        for name in ("n", "max_new_tokens", "top_k", "seed")
        for value in (*WRONG_NUMBERS, 2**63)
        if not (name == "seed" and value is None)
    ),
    ({"n": 0}, "request 0: n is 0; expected a whole number from 1 to 65,536"),
    ({"n": 65_537}, "request 0: n is 65537; expected"),
    ({"max_new_tokens": 0}, "request 0: max_new_tokens is 0; expected a whole number from 1"),
    ({"top_k": 10**30}, "request 0: top_k is 1000000000000000000000000000000; expected a whole number from 0 to 2"),
    *(
        ({name: value}, f"request 0: {name} is ")
        for name in ("temperature", "top_p", "min_p")
        for value in ("1", None, True, [1.0], float("nan"), float("inf"), -1, 1j, HUGE, object(), torch.ones(2))
    ),
    *(
        ({"temperature": value}, "request 0: temperature is .*; expected 0, or a number from 1e-30 to 1e")
        for value in (1e-300, 1e-45, 1e-40, 1.1e-38, 9e-31, 1.1e30, 1e38, 1e39, 1e300)
    ),
    ({"top_p": 0}, "request 0: top_p is 0; expected a number from 1e-30 to 1"),
    ({"top_p": 1e-300}, "request 0: top_p is 1e-300; expected a number from 1e-30 to 1"),
    ({"top_p": 1.01}, "request 0: top_p is 1.01; expected"),
    ({"min_p": 1.01}, "request 0: min_p is 1.01; expected a number from 0 to 1"),
    ({"stop": "</s>"}, "request 0: stop is '</s>'; expected a tuple of strings"),
    *(({"stop": value}, "request 0: stop is ") for value in (None, 5, b"x", 1.5)),
    *(({"stop": (value,)}, "request 0: stop holds ") for value in ("", None, 5, b"x", "\ud800", ["x"], HUGE)),
    ({"stop": ("x", "x")}, "request 0: stop holds a string twice"),
    *(({"prompt_ids": value}, "request 0: prompt_ids is ") for value in ("abc", b"abc", 5, 1.5)),
    *(
        ({"prompt_ids": [5, value]}, "request 0: prompt_ids holds ")
        for value in (1.5, 1.0, True, None, "5", [5], np.float32(5), 1j, torch.tensor(5.0))
    ),
    *(({"prompt_ids": [value]}, "request 0: token .* in its prompt; expected") for value in (-1, 10**9, HUGE)),
    ({"prompt_ids": []}, "request 0: an empty prompt; expected at least one id"),
    ({"prompt_ids": None}, "request 0: expected one of prompt_ids, prompt_text and prompt_messages, got 0"),
    ({"prompt_text": "both"}, "request 0: expected one of prompt_ids, prompt_text and prompt_messages, got 2"),
    *(
        ({"prompt_ids": None, "prompt_text": value}, "request 0: prompt_text is ")
        for value in (5, b"text", ["text"], "\ud800", 1.5)
    ),
    *(
        ({"prompt_ids": None, "prompt_messages": value}, "request 0: prompt_messages ")
        for value in (5, "text", ["text"], [5], [], {"role": "user"}, [None])
    ),
]


@pytest.mark.parametrize(("changes", "message"), REQUESTS, ids=[f"{number}" for number in range(len(REQUESTS))])
def test_a_wrong_value_in_a_request_is_refused(generator: Generator, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        generator.generate(request(**changes))
    with pytest.raises(UserError, match=f"^{message}"):
        list(generator.stream(request(**changes)))


@pytest.mark.parametrize("requests", ["hello", b"x", None, 5, GenerateRequest(prompt_ids=[5]), 1.5])
def test_what_is_no_list_of_requests_is_refused(generator: Generator, requests: Any) -> None:
    with pytest.raises(UserError, match=r"^requests is .*; expected a list of GenerateRequest"):
        generator.generate(requests)


@pytest.mark.parametrize("entry", ["hello", None, 5, {"prompt_text": "hello"}, [1, 2]])
def test_what_is_no_request_is_refused_by_its_number(generator: Generator, entry: Any) -> None:
    with pytest.raises(UserError, match=r"^request 1 is .*; expected a GenerateRequest"):
        generator.generate([*request(), entry])


def test_values_that_count_as_whole_numbers_are_taken(generator: Generator) -> None:
    """NumPy's and torch's integers, and an integer for a temperature."""
    plain = request(top_k=3, n=2, seed=4, temperature=1, max_new_tokens=3)
    others = request(
        prompt_ids=np.array([5, 6]),
        top_k=np.int64(3),
        n=np.int32(2),
        seed=torch.tensor(4),
        temperature=np.float32(1),
        max_new_tokens=np.uint8(3),
    )
    assert generator.generate(others) == generator.generate(plain)
    assert generator.generate(request(prompt_ids=torch.tensor([5, 6]), seed=4)) == generator.generate(request(seed=4))
    limits = {"temperature": 1e-30, "top_p": 1e-30, "top_k": 2**63 - 1, "seed": 2**63 - 1, "max_new_tokens": 1}
    for changes in (limits, {**limits, "temperature": 1e30, "min_p": 1.0}):
        assert np.isfinite(generator.generate(request(**changes))[0][0].logprobs).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, f"{name} is ")
            for name in ("kv_tokens", "max_running")
            for value in (0, -1, 1.5, "5", True, [5], 2**63, HUGE)
        ),
        ({"max_running": None}, "max_running is None"),
        ({"max_running": 10**9}, "max_running is 1000000000; expected a whole number from 1 to 65,536"),
        *(({"speculate": value}, "speculate is ") for value in (True, -1, 9, 1.5, "yes", None, [1])),
        *(({"share_prefix": value}, "share_prefix is ") for value in (None, "yes", 1)),
        *(({"attention": value}, "attention is ") for value in ("x", None, 5, ["torch"])),
        *(({"policy": value}, "policy is ") for value in (None, "runs/demo", 5)),
        *(({"tokenizer": value}, "tokenizer is ") for value in (None, "runs/demo", 5)),
    ],
)
def test_a_generator_of_wrong_values_is_not_made(
    options: dict[str, Any], message: str, tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        Generator(**{"policy": tiny_policy, "tokenizer": tiny_tokenizer, **options})


def test_more_keys_and_values_than_the_memory_holds_are_refused(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"^kv_tokens is 9,223,372,036,854,775,807, and the memory holds .* at most"):
        Generator(tiny_policy, tiny_tokenizer, kv_tokens=2**63 - 1).generate(request())


# the other names that the README lists


class Letters:
    vocab_size = 2

    def token_bytes(self, token_id: int) -> bytes:
        return b"ab"[token_id : token_id + 1]


def stepped(state: Any, token: Any) -> None:
    TagMatcher(Letters(), ["ab"]).step(state, token)


def loss(**changes: Any) -> None:
    vectors = dict.fromkeys(("old_logprobs_T", "advantages_T", "weights_T"), torch.zeros(2))
    operands = {"hidden_TH": torch.zeros(2, 4), "lm_head_VH": torch.zeros(3, 4), "targets_T": torch.tensor([0, 1])}
    grpo_loss(**{**operands, **vectors, **changes})


NO_TEXT: tuple[Any, ...] = (None, 5, b"x", ["x"], 1.5)
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    *((TagMatcher, (Letters(), value), {}) for value in (None, 5, "x", b"x", [None], [""], ["\ud800"], [HUGE], [])),
    *((TagMatcher, (value, ["x"]), {}) for value in (None, "folder", 5)),
    *((stepped, (value, 0), {}) for value in (1.5, "0", None, True, -1, 3, HUGE)),
    *((stepped, (0, value), {}) for value in (1.5, "0", None, True, -1, 3, HUGE)),
    *((TagMatcher(Letters(), ["ab"]).start, (value,), {}) for value in ("a", None, 5)),
    *((TagMatcher(Letters(), ["ab"]).step_many, ([0], value), {}) for value in ([0.5], ["0"], [None], [True], [3])),
    *((load_policy, (value,), {}) for value in (None, 5, b"x", ["x"], "no/such/folder", "\0")),
    *((load_policy, ("m", value), {}) for value in ("float32", None, torch.int64, 5)),
    *((load_policy, ("m",), {"device": value}) for value in ("gpu", None, 1.5, "cuda:99", ["cpu"])),
    *((load_tokenizer, (value,), {}) for value in (None, 5, b"x", ["x"], "no/such/folder", "\0")),
    *((function, (value, ["x"]), {}) for function in (exact_match, f1_score, contains_answer) for value in NO_TEXT),
    *(
        (function, ("x", value), {})
        for function in (exact_match, f1_score, contains_answer)
        for value in (None, 5, [5])
    ),
    *((normalize_answer, (value,), {}) for value in NO_TEXT),
    *((normalize_answer, ("x", value), {}) for value in ("other", None, ["squad"], 5)),
    *((group_advantages, (value,), {}) for value in (None, 5, [], ["1"], [None], [float("nan")], [HUGE], [1j], "12")),
    *((group_advantages, ([1, 2],), {"std_floor": value}) for value in (-1, "1", None, float("nan"), HUGE)),
    *((group_advantages, ([1, 2],), {"eps": value}) for value in (-1, "1", None, float("nan"), HUGE)),
    *((loss, (), {name: None}) for name in ("hidden_TH", "lm_head_VH", "targets_T")),
    *((loss, (), {name: [0, 1]}) for name in ("hidden_TH", "lm_head_VH", "targets_T", "advantages_T", "weights_T")),
    *(
        (loss, (), {name: value})
        for name in ("temperature", "clip_low", "clip_high", "beta", "entropy_coef", "dual_clip")
        for value in ("1", True, [1], float("nan"), 1e308, HUGE, 1j)
    ),
    *((loss, (), {"temperature": value}) for value in (0, 1e-300, 1e-40, 1e38, None)),
]


@pytest.mark.parametrize(("call", "arguments", "options"), CALLS, ids=[f"{number}" for number in range(len(CALLS))])
def test_a_wrong_value_ends_in_a_sentence(
    call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as refused:
        call(*arguments, **options)
    assert " " in str(refused.value) and "\n" not in str(refused.value)


def test_a_dangling_device_or_dtype_is_named(tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"^dtype is torch.int64; expected a floating one of torch"):
        load_policy(tiny_model_folder, torch.int64)
    with pytest.raises(UserError, match=r"^device is 'gpu'; expected \"cpu\", or a device that torch sees"):
        load_policy(tiny_model_folder, device="gpu")
