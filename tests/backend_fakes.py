"""Stand-ins for attention libraries: each function has the parameters of the real one, computes on a CPU, in any dtype,
and refuses what the real one refuses. test_backends.py compares the parameters with installed libraries.

flash-attn 2.8.3, FlashAttention-3 of the same release, xformers 0.0.35, torch 2.11 and 2.12 (2.13 has 2.12's).
"""

import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Compute causal attention in the dtype of its arguments; q [T, N, D], k and v [T, K, D], N a multiple of K."""
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert ends[0] == 0 and ends[-1] == len(q) == len(k) == len(v) and longest == max(lengths)
    assert type(longest) is int and all(x.stride(-1) == 1 for x in (q, k, v)) and q.dtype == k.dtype == v.dtype
    shared = q.shape[1] // k.shape[1]
    out = []
    for q_QND, k_QND, v_QND in zip(
        *(x.split(lengths) for x in (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))), strict=True
    ):
        unseen_QQ = torch.ones(len(q_QND), len(q_QND)).triu(1).bool()
        s_NQQ = torch.einsum("qnd,jnd->nqj", q_QND, k_QND) * q.shape[2] ** -0.5
        out.append(torch.einsum("nqj,jnd->qnd", s_NQQ.masked_fill(unseen_QQ, -torch.inf).softmax(-1), v_QND))
    return torch.cat(out)


ANYTHING: Any = object()


def stand_in(parameters: str, call: Callable[[dict[str, Any]], Any], **given: Any) -> Callable[..., Any]:
    """Return a function with a library's `parameters` that passes its arguments to `call`. An argument must have its
    default, or the value in `given` if it has one; ANYTHING is not checked."""

    def check(arguments: dict[str, Any]) -> Any:
        for name, parameter in signature(function).parameters.items():
            expected = given.get(name, parameter.default)
            assert expected in (Parameter.empty, ANYTHING) or arguments[name] == expected, name
        return call(arguments)

    function: Callable[..., Any] = eval(f"lambda {parameters}: check(locals())", {"check": check})
    return function


def attend(arguments: dict[str, Any]) -> torch.Tensor:
    """Compute causal attention of the first seven arguments, whose order is the same in all of these libraries."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = list(arguments.values())[:7]
    assert cu_seqlens_q is cu_seqlens_k and longest_q == longest_k and k.shape == v.shape
    if not arguments.get("enable_gqa", "cu_seqlens_q" in arguments) and q.shape[1] != k.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return packed(q, k, v, cu_seqlens_q, longest_q)


TORCH = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)"
varlen_attn_211 = stand_in(TORCH, attend, window_size=(-1, 0))
varlen_attn_212 = stand_in(
    f"{TORCH}, enable_gqa=False, seqused_k=None, block_table=None, num_splits=None",
    attend,
    window_size=(-1, 0),
    enable_gqa=ANYTHING,
)
FLASH = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
flash_attn_varlen_func = stand_in(
    f"{FLASH}, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, block_table=None",
    attend,
    causal=True,
)
flash3_varlen_func = stand_in(
    f"{FLASH}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
    "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, sm_margin=0",
    attend,
    causal=True,
)


def flash3_with_log_sum_exp(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp as well, like early builds of version 3."""
    out = flash3_varlen_func(*args, **kwargs)
    return out, out.new_zeros(out.shape[1], out.shape[0])


class BlockDiagonalCausalMask:
    made = 0

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        self.longest = max(lengths)

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert isinstance(device, torch.device) and kv_seqlen is None  # None: xformers uses the GPU if there is one
        cls.made += 1
        return cls(q_seqlen, device)


ranks: list[int] = []  # number of dimensions of the queries in each call


def attend_under_bias(arguments: dict[str, Any]) -> torch.Tensor:
    query, key, value, attn_bias = list(arguments.values())[:4]
    assert isinstance(attn_bias, BlockDiagonalCausalMask)
    assert query.ndim in (4, 5) and query.shape == key.shape == value.shape and query.shape[0] == 1  # no broadcasting
    ranks.append(query.ndim)
    if query.ndim == 5 and any(x.requires_grad for x in (query, key, value)):
        raise NotImplementedError("No operator found for `memory_efficient_attention_backward`")
    flat = [x.reshape(x.shape[1], -1, x.shape[-1]) for x in (query, key, value)]
    return packed(flat[0], flat[1], flat[2], attn_bias.cu_seqlens, attn_bias.longest).reshape(query.shape)


memory_efficient_attention = stand_in(
    "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None",
    attend_under_bias,
    attn_bias=ANYTHING,
)
FAKES: dict[str, Callable[..., Any]] = {
    "varlen_211": varlen_attn_211,
    "varlen_212": varlen_attn_212,
    "flash2": flash_attn_varlen_func,
    "flash3": flash3_varlen_func,
    "flash3_early": flash3_with_log_sum_exp,
    "xformers": memory_efficient_attention,
}


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Install the named fakes of FAKES in place of the libraries; the other libraries are missing."""
    for absent in ("flash_attn", "flash_attn_interface", "xformers", "xformers.ops", "torch.nn.attention.varlen"):
        monkeypatch.setitem(sys.modules, absent, None)
    for name in names:
        library = name.partition("_")[0]
        if library == "varlen":
            _module(monkeypatch, "torch.nn.attention.varlen", varlen_attn=FAKES[name])
        elif library == "xformers":
            _module(monkeypatch, "xformers")
            _module(monkeypatch, "xformers.ops", memory_efficient_attention=FAKES[name])
            _module(monkeypatch, "xformers.ops.fmha")
            _module(monkeypatch, "xformers.ops.fmha.attn_bias", BlockDiagonalCausalMask=BlockDiagonalCausalMask)
        else:
            module = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}[library]
            _module(monkeypatch, module, flash_attn_varlen_func=FAKES[name])


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    module = ModuleType(name)
    for part, value in parts.items():
        setattr(module, part, value)
    monkeypatch.setitem(sys.modules, name, module)
