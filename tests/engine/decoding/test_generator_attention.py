"""A Generator's choice of attention: what does not serve is refused when it is made, and sharing changes no result."""

import pytest

from thresher.common.errors import UserError
from thresher.engine import GenerateRequest, Generator
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("separate", 'attention is \'separate\'; expected "auto" or "torch" or'),
        ("triton", 'attention is "triton", which needs CUDA \\(the model is on cpu\\); set it to "auto" or "torch"'),
        ("flash", 'attention is "flash", which needs CUDA \\(the model is on cpu\\)'),
        ("xformers", 'attention is "xformers", which needs CUDA \\(the model is on cpu\\)'),
    ],
)
def test_what_does_not_serve_is_refused(
    name: str, message: str, tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=f"^{message}"):
        Generator(tiny_policy, tiny_tokenizer, attention=name)  # type: ignore[arg-type]


def test_torch_is_what_auto_takes_on_a_cpu(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    request = GenerateRequest(prompt_text="Who is the mayor of the town by the river?", n=3, max_new_tokens=6)
    results = [
        Generator(tiny_policy, tiny_tokenizer, attention=attention, share_prefix=share_prefix).generate([request])
        for attention, share_prefix in (("auto", True), ("torch", True), ("auto", False))
    ]
    ids = [[sample.token_ids for sample in samples] for (samples,) in results]
    assert ids[0] == ids[1] == ids[2]
    assert Generator(tiny_policy, tiny_tokenizer).attention == "torch"
