"""Choice of what computes the attention of an update and of SFT, by the recipe and by what runs here."""

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.engine.config.sections import OptimSection
from thresher.kernels.attention.backends.adapter import Unserved
from thresher.kernels.attention.backends.choice import Backend, load_attention, resolve_attention
from thresher.kernels.attention.backends.parts import load_partial_attention
from thresher.kernels.attention.parts import AttentionWithLSE
from thresher.kernels.attention.varlen import TrainingAttention
from thresher.policy.model import Policy


def choose_attention(optim: OptimSection, policy: Policy) -> tuple[TrainingAttention, Backend]:
    """Return the function that computes attention in this policy's forwards and backwards, and its backend. UserError
    where the recipe's choice does not serve here. On CUDA the backend is tried out, which takes a moment."""
    try:
        backend = resolve_attention(optim.attention, policy.device, policy.dtype, policy.config.head_dim, "training")
        return load_attention(backend), backend
    except ValueError as error:
        raise UserError(f"optim.{error}") from None


def choose_sharing(optim: OptimSection, policy: Policy, backend: Backend) -> AttentionWithLSE | None:
    """Return the backend's attention in parts, for items that share a beginning; None: each item is computed whole.
    Where None is not the recipe's choice, the reason is printed."""
    if not optim.share_prefix:
        return None
    try:
        return load_partial_attention(backend, policy.device, policy.dtype, policy.config.head_dim)
    except Unserved as error:
        console.print(
            f"optim.share_prefix has no effect: attention is computed by {backend}, which {error}", soft_wrap=True
        )
        return None
