"""stub"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    table_GP: Tensor
    length_G: Tensor
    members_GM: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    table_BP: Tensor
    start_B: Tensor
    count_B: Tensor
    first_B: Tensor | None
    prefix: "SharedPrefix | None"


@dataclass(frozen=True, slots=True)
class PrefillRows:
    table_NP: Tensor
    row_N: Tensor
    start_N: Tensor
    count_N: Tensor
    longest: int


def _one(q_ND, k_PKSD, v_PKSD, table_P, position):
    K, S, D = k_PKSD.shape[1:]
    n = position + 1
    blocks = table_P[: -(-n // S)].long()
    k = k_PKSD[blocks].transpose(1, 2).reshape(-1, K, D)[:n].float()
    v = v_PKSD[blocks].transpose(1, 2).reshape(-1, K, D)[:n].float()
    R = q_ND.shape[0] // K
    k, v = k.repeat_interleave(R, 1), v.repeat_interleave(R, 1)
    s = torch.einsum("nd,jnd->nj", q_ND.float() * D**-0.5, k).softmax(-1)
    return torch.einsum("nj,jnd->nd", s, v).to(q_ND.dtype)


def decode_attention(q_BQND, k_PKSD, v_PKSD, rows, *, splits=None):
    out = torch.zeros_like(q_BQND)
    for b in range(len(q_BQND)):
        for i in range(int(rows.count_B[b])):
            out[b, i] = _one(q_BQND[b, i], k_PKSD, v_PKSD, rows.table_BP[b], int(rows.start_B[b]) + i)
    return out


def prefill_attention(q_TND, k_PKSD, v_PKSD, rows):
    out = torch.zeros_like(q_TND)
    for n in range(len(rows.row_N)):
        for i in range(int(rows.count_N[n])):
            t = int(rows.row_N[n]) + i
            out[t] = _one(q_TND[t], k_PKSD, v_PKSD, rows.table_NP[n], int(rows.start_N[n]) + i)
    return out


def prefix_pays(length, members):
    return length >= 256 and members > 1
