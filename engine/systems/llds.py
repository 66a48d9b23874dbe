"""LLDS (Deng et al. 2025, arXiv 2512.04220): Search-R1 under GRPO, with a guard against a likelihood that falls.

Prompt, episode and reward are Search-R1's (search_r1.py). To the objective of each sampled token, of log-prob l, old
when it was sampled, the guard adds (eq. 4)

    -lambda max(0, old - l)        where A >= 0, in a turn whose sum of old - l over such tokens is above 0

so that a turn that was not worse than its group's mean does not become less likely as a whole. GRPO does that to right
turns that look like wrong ones, which the paper holds to be what lets Search-R1 collapse.

Preset: Search-R1's, with lambda .2 and 4 turns, three of which may search (the paper's script). The guard compares two
versions of the weights: it needs more than one update a batch. In the first l is old but for rounding, and there it
holds nothing (training/update.py). In bfloat16 grpo.old_logprobs = "recomputed" keeps the rollout's rounding out, too.

Otherwise than in its code: the penalty has the weight of the token's surrogate (`grpo.aggregation`), where the code
takes a mean over all tokens of a micro-batch. A turn has the same tokens in both, those between two observations.
"""

from dataclasses import replace
from pathlib import Path

from thresher.engine.episode import System, read_preset
from thresher.engine.systems import search_r1
from thresher.engine.systems.search_r1 import Options


def system(options: Options) -> System:
    return replace(search_r1.system(options), name="llds", preset=read_preset(Path(__file__).with_suffix(".toml")))
