"""Search-R1 under REINFORCE (Xu et al. 2026, arXiv 2602.19526): the reward itself is the advantage.

Prompt, episode and reward are Search-R1's (search_r1.py). The objective is Williams' (1992):

    J = mean over trajectories y of  R(y) / |y| sum_t log pi(y_t | y_<t)          R = EM(answer, golds)

There is no baseline, no deviation, no ratio, no clip and no reference model. R is 0 or 1, so only correct trajectories
have a gradient, which makes all their tokens more likely.

Preset: Search-R1's, except for the KL, which the objective `reinforce` leaves out, and one update per batch, because
without a ratio a second update would not correct for samples of older weights [both assumed]. A group is only the
samples of one question; there are 5 for each of 512 questions, as many per step as in Search-R1 [assumed].

Not implemented: the rest of that paper's Search-R1++, its prompt without reasoning and its F1 with penalties.
"""

from dataclasses import replace
from pathlib import Path

from thresher.engine.episode import System, read_preset
from thresher.engine.systems import search_r1
from thresher.engine.systems.search_r1 import Options


def system(options: Options) -> System:
    preset = read_preset(Path(__file__).with_suffix(".toml"))
    return replace(search_r1.system(options), name="search_r1_reinforce", preset=preset)
