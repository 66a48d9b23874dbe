"""EviOmni: reason over the passages, extract the evidence, answer; and answer twice more with parts hidden.

    prompt(q, P)  ->  <reason>r</reason> <extract>e</extract>  ->  <answer>o_f</answer>         (the trained trajectory)

    o_r ~ M(q, P, r)     e hidden            each of these contexts is assembled anew without the hidden parts, and ends
    o_e ~ M(q, e)        P and r hidden      in an <answer> of the engine, because after </reason> the model would go on
                                             to extract [assumed]; o_f writes its own. Both are rewarded, not trained.

    reward  = .8 R_ans + .1 R_len + .1 R_fmt
    R_ans   = mean F1(golds, o) over those of o_r, o_e and o_f that are switched on
    R_len   = (R_len_r + R_len_e) / 2, lengths in tokens [assumed], L_P that of all passages
    R_len_r = sigmoid((L_r/L_e - 1)/tau) if L_r >= L_e, else sigmoid((1 - L_e/L_r)/tau)
    R_len_e = 1 if 1 - L_e/L_P >= omega, else (1 - L_e/L_P)^gamma
    R_fmt   = 1 if r, e and o_f have the right tags, else 0

A first turn without a closed <extract> ends the trajectory. A missing reason or extract has no branch, and the missing
answer has F1 0. A limit that cuts the first turn (of tokens, or of the context) ends it before any branch, even after a
closed reason. The context of o_e is the same template without passages. o_f is generated even if it is not rewarded,
because the format and all measures of the trained model's answer are read from it.

Preset: 5 passages (of 100 words, hence 1,024 tokens [assumed]), beta 1e-2, k3 [assumed], eps .2, G 8 [assumed], lr
1e-6, temperature 1 [assumed], advantages divided by max(std, .1). tau and gamma are .5 [assumed: the paper tunes them,
over .1 .2 .5 1 and over .1 .3 .5 .8 1], omega .9. Turns of 640 tokens and a context of 3,072 are assumed; the 768 new
tokens per trajectory are those of its latency table.

The use of a trained extractor is not here: `thresher extract`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from thresher.engine.config.tables import FieldError, NotNegative, Positive, Section, Share
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Generate,
    KeptSpan,
    Prompt,
    SpawnBranches,
    System,
    pair_tags,
    read_preset,
    read_template,
)
from thresher.retrieval.questions import Question
from thresher.rewards.papers.eviomni import eviomni_reward, full_answer
from thresher.rewards.reward import Source, TextSegment
from thresher.rewards.tags import blocks

ANSWERED = ("</answer>",)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """rationale, evidence, full: which of o_r, o_e and o_f count in R_ans, at least one. o_r and o_e are generated only
    if they count. tau, gamma, omega: as in the equations. weights: of R_ans, R_len and R_fmt."""

    rationale: bool = True
    evidence: bool = True
    full: bool = True
    tau: Positive = 0.5
    gamma: NotNegative = 0.5
    omega: Share = 0.9
    weights: tuple[NotNegative, NotNegative, NotNegative] = (0.8, 0.1, 0.1)

    def check(self) -> None:
        if not (self.rationale or self.evidence or self.full):
            raise FieldError("full", "expected one of rationale, evidence and full to be true, got none")


def episode(question: Question, config: EpisodeConfig, options: Options) -> Episode:
    prompt = Prompt(config.template, question.question, question.passages)
    yield prompt
    turn = yield Generate(stop=("</extract>",))
    if hidden := branches(prompt, turn.text, options):
        yield SpawnBranches(hidden)
    if not turn.stopped_at("</extract>"):
        return "ended"
    turn = yield Generate(stop=ANSWERED)
    return "answered" if turn.stopped_at("</answer>") and turn.inside("answer") else "ended"


def branches(prompt: Prompt, written: bytes, options: Options) -> Mapping[str, BranchPrompt]:
    """Return the contexts of o_r and o_e, from the policy's text up to </extract>. A missing span has none. If the
    extract begins before the reason ends there are none, because neither could be hidden from the other."""
    text = [TextSegment(Source.POLICY, written)]
    reason, extract = next(iter(blocks(text, "reason")), None), next(iter(blocks(text, "extract")), None)
    if reason and extract and extract.start < reason.end:
        return {}
    found = {}
    if options.rationale and reason:
        found["rationale"] = BranchPrompt(prompt, (KeptSpan(0, reason.end), "<answer>"), ANSWERED)
    if options.evidence and extract:
        bare = Prompt(prompt.template, prompt.question)
        found["evidence"] = BranchPrompt(bare, (KeptSpan(extract.start, extract.end), "<answer>"), ANSWERED)
    return found


def system(options: Options) -> System:
    return System(
        name="eviomni",
        tags=pair_tags("reason", "extract", "answer"),
        episode=partial(episode, options=options),
        reward=partial(eviomni_reward, **asdict(options)),
        answer=full_answer,
        template=read_template(Path(__file__).with_name("eviomni.txt"), passages=True),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        given_passages=True,
    )


def lear(options: Options) -> System:
    """Make LEAR, the first version of EviOmni: the same loop, reward and preset under its own name. Its paper calls the
    weights of the three reward parts alpha, the later paper lambda."""
    return replace(system(options), name="lear")
