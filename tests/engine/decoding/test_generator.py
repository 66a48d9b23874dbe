"""The Generator's requests: the noise of each, and wrong values, which all end in one sentence before anything runs."""

from collections.abc import Callable, Iterable
from functools import partial
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

HUGE = 10**5000  # Python does not print it
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def generator(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> Generator:
    return Generator(tiny_policy, tiny_tokenizer)


def seeds_of(generator: Generator, *seeds: int | None, n: int = 3) -> list[tuple[int, ...]]:
    """Return the noise seeds of each request's samples, for one call with requests of these seeds."""
    requests = [GenerateRequest(prompt_ids=[5], n=n, max_new_tokens=1, seed=seed) for seed in seeds]
    _, asked = generator._begin(requests)
    return [tuple(sample.seed for sample in samples) for _, samples in asked]


# noise


def test_requests_without_a_seed_have_noise_of_their_own_in_every_call(
    generator: Generator, tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    calls = [seeds_of(generator, None, None, None, None) for _ in range(3)]
    every = [seed for call in calls for samples in call for seed in samples]
    assert len(set(every)) == len(every) == 3 * 4 * 3
    again = Generator(tiny_policy, tiny_tokenizer)
    assert [seeds_of(again, None, None, None, None) for _ in range(3)] == calls  # as when a program is run again
    assert not set(every) & {seed for samples in seeds_of(generator, *range(40)) for seed in samples}


def test_a_seed_decides_a_requests_noise_alone(generator: Generator) -> None:
    """The noise depends neither on the request's position, other requests, the number of samples nor earlier calls."""
    (first,) = seeds_of(generator, 7)
    assert seeds_of(generator, None, 7, 8, 7)[1::2] == [first, first]
    assert seeds_of(generator, 7, n=5)[0][:3] == first
    several = seeds_of(generator, *range(50))
    assert len({seed for samples in several for seed in samples}) == 150
    # A seed on one request does not change the noise of another.
    fresh = [Generator(generator.policy, generator.tokenizer) for _ in range(2)]
    assert seeds_of(fresh[0], None, None, None)[2] == seeds_of(fresh[1], None, 7, None)[2]


def test_a_request_that_is_refused_moves_no_noise(generator: Generator) -> None:
    fresh = Generator(generator.policy, generator.tokenizer)
    with pytest.raises(UserError):
        generator.generate([GenerateRequest(prompt_ids=[5]), GenerateRequest(prompt_ids=[])])
    assert seeds_of(generator, None) == seeds_of(fresh, None)
    request = GenerateRequest(prompt_ids=[5, 6], max_new_tokens=4, temperature=5.0)
    together = [samples[0].token_ids for samples in generator.generate([request] * 8)]
    one_by_one = [generator.generate([request])[0][0].token_ids for _ in range(8)]
    assert len({tuple(ids) for ids in together + one_by_one}) == 16


# wrong values


def request(**changes: Any) -> list[GenerateRequest]:
    return [GenerateRequest(**{"prompt_ids": [5, 6], "max_new_tokens": 2, **changes})]


def each(name: str, values: Iterable[Any], message: str, **others: Any) -> list[tuple[dict[str, Any], str]]:
    """Return a row of a table for each value: the changes, and the message."""
    return [({name: value, **others}, message) for value in values]


WHOLE = (1.5, 1.0, "1", None, True, [1], NAN, INF, 1j, object(), -1, HUGE, np.float32(2), b"1", 2**63)
NUMBER = ("1", None, True, [1.0], NAN, INF, -1, 1j, HUGE, object(), torch.ones(2))
NO_REQUESTS: tuple[Any, ...] = ("hello", b"x", None, 5, GenerateRequest(prompt_ids=[5]), 1.5)
ONE_OF = "expected one of prompt_ids, prompt_text and prompt_messages, got"
REQUESTS = [
    *(row for name in ("n", "max_new_tokens", "top_k") for row in each(name, WHOLE, f"{name} is ")),
    *each("seed", (value for value in WHOLE if value is not None), "seed is "),
    ({"n": 0}, "n is 0; expected a whole number from 1 to 65,536"),
    ({"n": 65_537}, "n is 65537; expected"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; expected a whole number from 1"),
    ({"top_k": 10**30}, "top_k is 1000000000000000000000000000000; expected a whole number from 0 to 2"),
    *(row for name in ("temperature", "top_p", "min_p") for row in each(name, NUMBER, f"{name} is ")),
    *each(
        "temperature",
        (1e-300, 1e-45, 1e-40, 1.1e-38, 9e-31, 1.1e30, 1e38, 1e39, 1e300),
        "temperature is .*; expected 0, or a number from 1e-30 to 1e",
    ),
    ({"top_p": 0}, "top_p is 0; expected a number from 1e-30 to 1"),
    ({"top_p": 1e-300}, "top_p is 1e-300; expected a number from 1e-30 to 1"),
    ({"top_p": 1.01}, "top_p is 1.01; expected"),
    ({"min_p": 1.01}, "min_p is 1.01; expected a number from 0 to 1"),
    ({"stop": "</s>"}, "stop is '</s>'; expected a tuple of strings"),
    *each("stop", (None, 5, b"x", 1.5), "stop is "),
    *each("stop", ([value] for value in ("", None, 5, b"x", "\ud800", ["x"], HUGE)), "stop contains "),
    ({"stop": ("x", "x")}, "stop has a string twice"),
    *each("prompt_ids", ("abc", b"abc", 5, 1.5), "prompt_ids is "),
    *each(
        "prompt_ids",
        ([5, value] for value in (1.5, 1.0, True, None, "5", [5], np.float32(5), 1j, torch.tensor(5.0))),
        "prompt_ids contains ",
    ),
    *each("prompt_ids", ([-1], [10**9], [HUGE]), "token .* in its prompt; expected"),
    ({"prompt_ids": []}, "an empty prompt; expected at least one id"),
    ({"prompt_ids": None}, f"{ONE_OF} 0"),
    ({"prompt_text": "both"}, f"{ONE_OF} 2"),
    *each("prompt_text", (5, b"text", ["text"], "\ud800", 1.5), "prompt_text is ", prompt_ids=None),
    *each(
        "prompt_messages",
        (5, "text", ["text"], [5], [], {"role": "user"}, [None]),
        "prompt_messages ",
        prompt_ids=None,
    ),
    *each(
        "prompt_messages",
        ([{"role": "user", "content": [part]}] for part in ({"type": "image", "image": "x.png"}, "text", None)),
        "a message's content has the part .*; expected text, because images are not read",
        prompt_ids=None,
    ),
]


@pytest.mark.parametrize(("changes", "message"), REQUESTS, ids=[f"{number}" for number in range(len(REQUESTS))])
def test_a_wrong_value_in_a_request_is_refused(generator: Generator, changes: dict[str, Any], message: str) -> None:
    for call in (generator.generate, lambda requests: list(generator.stream(requests))):
        with pytest.raises(UserError, match=f"^request 0: {message}"):
            call(request(**changes))


def test_what_is_no_list_of_requests_is_refused(generator: Generator) -> None:
    for requests in NO_REQUESTS:
        with pytest.raises(UserError, match=r"^requests is .*; expected a list of GenerateRequest"):
            generator.generate(requests)
    for entry in ("hello", None, 5, {"prompt_text": "hello"}, [1, 2]):
        with pytest.raises(UserError, match=r"^request 1 is .*; expected a GenerateRequest"):
            generator.generate([*request(), entry])  # type: ignore[list-item]


def test_values_that_count_as_whole_numbers_are_taken(generator: Generator) -> None:
    """NumPy's and torch's integers are accepted, and an integer as a temperature."""
    plain = request(top_k=3, n=2, seed=4, temperature=1, max_new_tokens=3)
    others = {"top_k": np.int64(3), "n": np.int32(2), "seed": torch.tensor(4), "max_new_tokens": np.uint8(3)}
    others |= {"prompt_ids": np.array([5, 6]), "temperature": np.float32(1)}
    assert generator.generate(request(**others)) == generator.generate(plain)
    assert generator.generate(request(prompt_ids=torch.tensor([5, 6]), seed=4)) == generator.generate(request(seed=4))
    limits = {"temperature": 1e-30, "top_p": 1e-30, "top_k": 2**63 - 1, "seed": 2**63 - 1, "max_new_tokens": 1}
    for changes in (limits, {**limits, "temperature": 1e30, "min_p": 1.0}):
        assert np.isfinite(generator.generate(request(**changes))[0][0].logprobs).all()


ON_CPU = "which needs CUDA \\(the model is on cpu\\)"
OPTIONS = [
    *(
        row
        for name in ("kv_tokens", "max_running")
        for row in each(name, (0, -1, 1.5, "5", True, [5], 2**63, HUGE), f"{name} is ")
    ),
    ({"max_running": None}, "max_running is None"),
    ({"max_running": 10**9}, "max_running is 1000000000; expected a whole number from 1 to 65,536"),
    *each("speculate", (True, -1, 9, 1.5, "often", None, [1]), 'speculate is .*; expected "auto" or 0 to 8'),
    *each("share_prefix", (None, "yes", 1), "share_prefix is "),
    *each("attention", ("x", None, 5, ["torch"]), "attention is "),
    ({"attention": "separate"}, 'attention is \'separate\'; expected "auto" or "torch" or'),
    ({"attention": "triton"}, f'attention is "triton", {ON_CPU}; set it to "auto" or "torch"'),
    ({"attention": "flash"}, f'attention is "flash", {ON_CPU}'),
    ({"attention": "xformers"}, f'attention is "xformers", {ON_CPU}'),
    *each("policy", (None, "runs/demo", 5), "policy is "),
    *each("tokenizer", (None, "runs/demo", 5), "tokenizer is "),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[f"{number}" for number in range(len(OPTIONS))])
def test_a_generator_of_wrong_values_is_not_made(
    options: dict[str, Any],
    message: str,
    tiny_policy: Policy,
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=f"^{message}"):
        Generator(**{"policy": tiny_policy, "tokenizer": tiny_tokenizer, **options})


def test_more_keys_and_values_than_the_memory_holds_are_refused(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"^kv_tokens is 9,223,372,036,854,775,807, and the memory holds .* at most"):
        Generator(tiny_policy, tiny_tokenizer, kv_tokens=2**63 - 1).generate(request())


def test_torch_is_what_auto_takes_on_a_cpu_and_sharing_changes_no_result(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    asked = request(prompt_ids=None, prompt_text="Who is the mayor of the town by the river?", n=3, max_new_tokens=6)
    generators = [
        Generator(tiny_policy, tiny_tokenizer, attention=attention, share_prefix=share_prefix)
        for attention, share_prefix in (("auto", True), ("torch", True), ("auto", False))
    ]
    first, *others = ([sample.token_ids for sample in one.generate(asked)[0]] for one in generators)
    assert others == [first, first] and generators[0].attention == "torch"


def test_what_is_streamed_is_what_is_generated(generator: Generator, tiny_tokenizer: Tokenizer) -> None:
    asked = [*request(n=3, max_new_tokens=6, seed=5, stop=("e",)), *request(prompt_ids=[9], max_new_tokens=4, seed=6)]
    streamed: dict[tuple[int, int], list[int]] = {}
    for number, sample, ids, data in generator.stream(asked):
        written = [token for token in ids if token != tiny_tokenizer.added_tokens["<|endoftext|>"]]
        assert ids and data == tiny_tokenizer.decode_bytes(written)
        streamed.setdefault((number, sample), []).extend(ids)
    generated = generator.generate(asked)
    assert streamed == {(n, j): one.token_ids for n, samples in enumerate(generated) for j, one in enumerate(samples)}


# the other names that the README lists


class Letters:
    vocab_size = 2

    def token_bytes(self, token_id: int) -> bytes:
        return b"ab"[token_id : token_id + 1]


MATCHER = TagMatcher(Letters(), ["ab"])


def loss(**changes: Any) -> None:
    vectors = dict.fromkeys(("old_logprobs_T", "advantages_T", "weights_T"), torch.zeros(2))
    operands = {"hidden_TH": torch.zeros(2, 4), "lm_head_VH": torch.zeros(3, 4), "targets_T": torch.tensor([0, 1])}
    grpo_loss(**{**operands, **vectors, **changes})


NO_TEXT: tuple[Any, ...] = (None, 5, b"x", ["x"], 1.5)
NO_FOLDER: tuple[Any, ...] = (None, 5, b"x", ["x"], "no/such/folder", "\0")
NO_INDEX: tuple[Any, ...] = (1.5, "0", None, True, -1, 3, HUGE)
MATCHES = (exact_match, f1_score, contains_answer)
OPERANDS = ("hidden_TH", "lm_head_VH", "targets_T")
SETTINGS = ("temperature", "clip_low", "clip_high", "beta", "entropy_coef", "dual_clip")
# A call, and the lists of arguments that it refuses.
CALLS: list[tuple[Callable[..., Any], Iterable[tuple[Any, ...]]]] = [
    (TagMatcher, ((Letters(), tags) for tags in (None, 5, "x", b"x", [None], [""], ["\ud800"], [HUGE], []))),
    (TagMatcher, ((tokenizer, ["x"]) for tokenizer in (None, "folder", 5))),
    (MATCHER.step, ((state, 0) for state in NO_INDEX)),
    (MATCHER.step, ((0, token) for token in NO_INDEX)),
    (MATCHER.start, ((lead,) for lead in ("a", None, 5))),
    (MATCHER.step_many, (([0], ids) for ids in ([0.5], ["0"], [None], [True], [3]))),
    (load_policy, ((folder,) for folder in NO_FOLDER)),
    (load_policy, (("m", dtype) for dtype in ("float32", None, torch.int64, 5))),
    (load_tokenizer, ((folder,) for folder in NO_FOLDER)),
    *((function, ((text, ["x"]) for text in NO_TEXT)) for function in MATCHES),
    *((function, (("x", golds) for golds in (None, 5, [5]))) for function in MATCHES),
    (normalize_answer, ((text,) for text in NO_TEXT)),
    (normalize_answer, (("x", style) for style in ("other", None, ["squad"], 5))),
    (group_advantages, ((rewards,) for rewards in (None, 5, [], ["1"], [None], [NAN], [HUGE], [1j], "12"))),
]
NAMED: list[tuple[Callable[..., Any], tuple[str, ...], tuple[Any, ...]]] = [
    (partial(load_policy, "m"), ("device",), ("gpu", None, 1.5, "cuda:99", ["cpu"])),
    (partial(group_advantages, [1, 2]), ("std_floor", "eps"), (-1, "1", None, NAN, HUGE)),
    (loss, OPERANDS, (None,)),
    (loss, (*OPERANDS, "advantages_T", "weights_T"), ([0, 1],)),
    (loss, SETTINGS, ("1", True, [1], NAN, 1e308, HUGE, 1j)),
    (loss, ("temperature",), (0, 1e-300, 1e-40, 1e38, None)),
]
REFUSED = [partial(call, *arguments) for call, lists in CALLS for arguments in lists]
REFUSED += [partial(call, **{name: value}) for call, names, values in NAMED for name in names for value in values]


@pytest.mark.parametrize("call", REFUSED, ids=[f"{number}" for number in range(len(REFUSED))])
def test_a_wrong_value_ends_in_a_sentence(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError) as refused:
        call()
    assert " " in str(refused.value) and "\n" not in str(refused.value)


def test_a_dangling_device_or_dtype_is_named(tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"^dtype is torch.int64; expected a floating dtype of torch"):
        load_policy(tiny_model_folder, torch.int64)
    with pytest.raises(UserError, match=r"^device is 'gpu'; expected \"cpu\", or a device that torch sees"):
        load_policy(tiny_model_folder, device="gpu")
