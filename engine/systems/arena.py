"""ARENA: name the relevant references, analyse, answer; a reward of four parts, and a KL penalty by k2.

    question, references [1] .. [n]  ->  <relevance>[1,5]</relevance> <analysis>..</analysis> <answer>a phrase</answer>

    reward = format + accuracy + relevance + bonus                                                    (13 at most)
    format     1 if the three sections are in order, with only white space around them, else 0
    accuracy   1 if the answer equals any gold, else 0   (or its F1, or a judge's verdict)
    relevance  1 if the named indices are the gold ones, .5 if some of them are, else 0
    bonus      10 if all three are 1

The four parts are scored independently; with F1 too, the bonus requires exactly 1 [assumed]. Naming every reference
earns .5, as in the paper; `max_indices` prevents this.

KL: k2, d^2/2 with d = log pi - log pi_ref, because k3 explodes for a sampled token whose probability under the policy
is almost 0; the ablation is grpo.kl_value = "k3".

Preset: G 7, 256 questions per step [unit unstated], lr 3e-6 on a cosine after a warm-up over .1, beta 4e-2 (its code's
default), eps .2 [assumed], temperature .9, one update per batch [assumed], 3,072 tokens for the references, 256 for the
response (its code), a context of 4,096 [assumed]. For a question without passages 10 are retrieved [assumed]; which of
them are gold is then unknown. A run without any known gold reference does not start. Its code takes the mean over
tokens and the sample's deviation + 1e-4: grpo.aggregation = "token", grpo.sample_std = true, grpo.std_eps = 1e-4.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from thresher.engine.config.tables import Count
from thresher.engine.episode import System, answer_once, pair_tags, read_preset, read_template
from thresher.rewards.papers.arena import Accuracy, arena_reward
from thresher.rewards.text import Variant


@dataclass(frozen=True, kw_only=True)
class Options:
    """accuracy: exact match, F1, or an LLM judge's verdict. relevance_reward: off is a control that is not in the
    paper, format + accuracy alone. max_indices: with more named references than this there is no .5; None, as in the
    paper: no bound. variant: normalisation before EM and F1, that of the paper's Appendix C.1, of its code, or of
    SQuAD."""

    accuracy: Accuracy = "em"
    relevance_reward: bool = True
    max_indices: Count | None = None
    variant: Variant = "arena"


def system(options: Options) -> System:
    return System(
        name="arena",
        # The tags question and references wrap the input, so passages must not close them.
        tags=pair_tags("question", "references", "relevance", "analysis", "answer"),
        episode=answer_once,
        reward=partial(arena_reward, **asdict(options)),
        template=read_template(Path(__file__).with_name("arena.txt"), passages=True),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        given_passages=True,
        wants_verdict=options.accuracy == "judge",
        needs_gold_indices=options.relevance_reward,
    )
