"""Hugging Face's side of `thresher bench rollout`: `model.generate` and `model.generate_batch` of transformers.

Both get the ids of all samples of a call. `generate` gets a group's prompt once for each sample, padded on the left
where lengths differ, with the mask; `generate_batch` (continuous batching) gets it once with `num_return_sequences`,
shares it, and has a tenth more blocks than the call can fill: on a CPU its attention runs over all of them.
Sampling is from the full distribution, lengths are fixed, scores are not asked for, and each call begins with an empty
cache.

How many sequences a call should hold is the user's to choose, and decides much on a CPU. So before the clock counts,
`settle` tries one question a call, two, four and so on, as long as a round then takes less CPU time.

Deliberately absent: compilation, flash attention, and a manager that outlives a call.
"""

import logging
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as their_logging

from thresher.bench.rollout.ours import Work
from thresher.bench.rollout.plan import play
from thresher.bench.rollout.setting import RolloutSetting

PAD = 0
PAGE = 16
SPARE = 1.1  # blocks by those that can be filled: its scheduler keeps some free
BATCH_TOKENS = 2048  # that generate_batch feeds at most in one forward


class HuggingFace:
    """The setting's model as transformers loads it, and a count of what goes through it."""

    def __init__(self, setting: RolloutSetting) -> None:
        their_logging.set_verbosity_error()
        their_logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        with tempfile.TemporaryDirectory() as folder:
            setting.policy.save(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.device = setting.policy.device
        self.model: Any = model.to(self.device)
        self.model.generation_config = GenerationConfig(pad_token_id=PAD)
        self.forwards = self.fed = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else arguments[0]
        self.forwards += 1
        self.fed += ids.numel()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Ids of one sequence -> logits [T, V]."""
        logits_TV: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)], device=self.device)).logits[0]
        return logits_TV

    def generate(self, contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        """One call of `model.generate`."""
        longest = max(map(len, contexts))
        ids_BT = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in contexts], device=self.device)
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in contexts], device=self.device)
        made_BT = self.model.generate(
            ids_BT.repeat_interleave(copies, 0),
            attention_mask=mask_BT.repeat_interleave(copies, 0),
            generation_config=_sampling(tokens, min_new_tokens=tokens),
        )
        written: list[list[int]] = made_BT[:, longest:].tolist()
        return written

    def generate_batch(self, contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        """One call of `model.generate_batch`. RuntimeError where it lost a request, which it only logs."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig  # older versions have none

        own = -(-tokens // PAGE) + 2 if copies > 1 else 0
        blocks = sum(-(-(len(ids) + (tokens if copies == 1 else 0)) // PAGE) + 1 + copies * own for ids in contexts)
        made = self.model.generate_batch(
            inputs=contexts,
            generation_config=_sampling(tokens, num_return_sequences=copies),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=int(SPARE * blocks),
                max_batch_tokens=BATCH_TOKENS,
                auto_switch_to_flash=False,
            ),
            progress_bar=False,
        )
        wrong = [output.error for output in made.values() if output.error is not None]
        if wrong or len(made) != len(contexts) * copies:
            raise RuntimeError(f"generate_batch answered {len(made)} of {len(contexts) * copies}: {wrong[:1]}")
        return [list(output.generated_tokens) for output in made.values()]


def _sampling(tokens: int, **more: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=PAD, **more
    )  # fmt: skip


class HuggingFaceSide:
    """One of the two calls, with a number of samples for each."""

    def __init__(self, setting: RolloutSetting, model: HuggingFace, name: str) -> None:
        self.setting, self.model, self.name = setting, model, name
        self.samples_a_call = setting.shape.samples
        self.one_call = {"generate": model.generate, "generate_batch": model.generate_batch}[name]

    def run(self) -> Work:
        self.model.forwards = self.model.fed = 0
        back = 0  # sampled tokens that went in again, one at a time

        def ask(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
            nonlocal back
            back += len(contexts) * copies * (tokens - 1)
            size = max(1, self.samples_a_call // copies)
            parts = [contexts[first : first + size] for first in range(0, len(contexts), size)]
            return [ids for part in parts for ids in self.one_call(part, copies, tokens)]

        play(self.setting, ask)
        return Work(prefilled=self.model.fed - back, forwards=self.model.forwards)

    def settle(self, until: float) -> None:
        """Find how many samples a call should hold: doubled as long as that takes less CPU time, and as there is time
        left until `until` (time.monotonic). Warms up, too."""
        best, least = self.setting.shape.group, float("inf")
        self.samples_a_call = best
        while self.samples_a_call <= self.setting.shape.samples:
            started = time.monotonic()
            seconds = self._cpu_seconds()
            if seconds >= least:
                break
            best, least = self.samples_a_call, seconds
            if 2 * time.monotonic() - started > until:
                break
            self.samples_a_call *= 2
        self.samples_a_call = best

    def _cpu_seconds(self) -> float:
        started = time.process_time()
        self.run()
        return time.process_time() - started
