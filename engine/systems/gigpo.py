"""GiGPO for search (Feng et al. 2025, arXiv 2505.10978): a turn is compared with its group's turns from the same state.

Prompt, episode and reward are Search-R1's (search_r1.py). The state of turn k of trajectory i is the last text shown to
the policy: the question, or the passages of a search. The turns of a group with equal states form a step group S, and

    A_ik = (R_i - mean R) / std R + omega (G_ik - mean_S G) / std_S G          eq. 3, 7 and 8
    G_ik = gamma^(K_i - k) R_i        K_i turns, rewarded at the last          eq. 5

A turn without others of its state has only the first part. docs/results/estimators.md has the expectation of this
rule.

Preset: omega 1, gamma .95, G 5, 256 questions, 4 turns of 512 tokens, k3 with beta 1e-3, lr 1e-6 after a warm-up over
.1 of the steps (the authors' script for search with 7B); 3 passages, 2,048 tokens for all, and four updates per batch,
in place of their mini-batches of 512 turns [assumed].

Differences from their code: states are equal if their ids are equal, while the code groups texts that are .9 alike;
mean and deviation of R are over trajectories, while the code takes them over turns; deviations are the population's; an
invalid turn costs nothing (.01 there); a trajectory is one context, not a separate prompt for each turn.
"""

from dataclasses import replace
from pathlib import Path

from thresher.engine.episode import System, read_preset
from thresher.engine.systems import search_r1
from thresher.engine.systems.search_r1 import Options


def system(options: Options) -> System:
    return replace(search_r1.system(options), name="gigpo", preset=read_preset(Path(__file__).with_suffix(".toml")))
