"""LLDS (Deng et al. 2025, arXiv 2512.04220): Search-R1 under GRPO, with a guard against falling likelihood.

Prompt, episode and reward are Search-R1's (search_r1.py). The guard adds to the objective of each sampled token, with
log-prob l now and log-prob old when it was sampled (eq. 4)

    -lambda max(0, old - l)        where A >= 0, in a turn whose sum of old - l over such tokens is above 0

so that a turn that was not worse than its group's mean does not become less likely as a whole. GRPO lowers the
likelihood of correct turns that resemble wrong ones; according to the paper this makes Search-R1 collapse.

Preset: Search-R1's, with lambda .2 and 4 turns, three of which may search (the paper's script). The guard compares two
versions of the weights, so it needs more than one update per batch. In the first update l equals old up to rounding,
and the guard adds nothing (training/update.py). In bfloat16 set grpo.old_logprobs = "recomputed" against rounding.

Difference from its code: the penalty has the weight of the token's surrogate (`grpo.aggregation`), while the code takes
a mean over all tokens of a micro-batch. In both, a turn consists of the tokens between two observations.
"""

from dataclasses import replace
from pathlib import Path

from thresher.engine.episode import System, read_preset
from thresher.engine.systems import search_r1
from thresher.engine.systems.search_r1 import Options


def system(options: Options) -> System:
    return replace(search_r1.system(options), name="llds", preset=read_preset(Path(__file__).with_suffix(".toml")))
