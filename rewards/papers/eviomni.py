"""EviOmni, and LEAR, its first version: rationale and evidence are rewarded by the answers that they enable.

    trained    <reason>r</reason><extract>e</extract><answer>o_f</answer>
    branches   o_r ~ M(q, P, r)    o_e ~ M(q, e)      each in a separate context, only for the reward

    R     = .8 R_ans + .1 R_len + .1 R_fmt
    R_ans = mean of F1(A, o_r), F1(A, o_e), F1(A, o_f), over those that are switched on
    R_len = mean of R_len_r and R_len_e
    R_len_r = sigmoid((L_r/L_e - 1)/tau)  if L_r >= L_e,  else  sigmoid((1 - L_e/L_r)/tau)
    R_len_e = 1  if 1 - L_e/L_P >= omega,  else  (1 - L_e/L_P)**gamma;   0 if L_e > L_P
    R_fmt = 1  if the transcript is reason, extract and answer, in order, and nothing else

tau is inside the sigmoid: one printing has it outside, where the value goes up to 10. [assumed]: lengths are in tokens
(words without a tokenizer); for an empty e both length rewards are 0, although the printed equation gives 1, and for an
empty r its own is 0; without passages L_P is 0 and any e is longer, so R_len_e is 0; o_r and o_e without a closed
answer have F1 0 and do not affect the format.
"""

import math
from collections.abc import Sequence

from thresher.common.errors import UserError
from thresher.rewards.measures import answer_measures
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment
from thresher.rewards.tags import blocks, final_answer, outline
from thresher.rewards.text import f1_score

SECTIONS = ("reason", "extract", "answer")


def eviomni_reward(
    attempt: RewardInput,
    *,
    rationale: bool = True,
    evidence: bool = True,
    full: bool = True,
    tau: float = 0.5,
    gamma: float = 0.5,
    omega: float = 0.9,
    weights: tuple[float, float, float] = (0.8, 0.1, 0.1),
) -> RewardResult:
    """Compute EviOmni's reward.

    rationale, evidence, full: which of the three answers count. weights: of answer, length and format. The branches
    "rationale" and "evidence" hold o_r and o_e; a missing one has F1 0. The branch "full" holds o_f if the transcript
    has none, which is possible in a record of `thresher score`.

    Parts: answer, answer_rationale, answer_evidence, answer_full, length, length_rationale, length_evidence, format,
    all in [0, 1] and before weighting; None for an answer that is switched off and was not generated. Measures em, f1,
    answered, of o_f.
    """
    if not (0 < tau < math.inf and 0 <= gamma < math.inf and 0 <= omega <= 1):
        raise UserError(f"tau {tau}, gamma {gamma}, omega {omega}: expected tau > 0, gamma >= 0 and omega in 0..1")
    if len(weights) != 3 or not all(0 <= weight < math.inf for weight in weights):
        raise UserError(f"weights {weights!r}: expected three numbers of at least 0, for answer, length and format")
    answer = full_answer(attempt)
    scores = {
        "answer_rationale": _branch_f1(attempt, "rationale"),
        "answer_evidence": _branch_f1(attempt, "evidence"),
        "answer_full": 0.0 if answer is None else f1_score(answer, attempt.golds),
    }
    unwritten = {"answer_rationale", "answer_evidence"} - {f"answer_{name}" for name in attempt.branches}
    switches = dict(zip(scores, (rationale, evidence, full), strict=True))
    counted = [score for name, score in scores.items() if switches[name]]
    if not counted:
        raise UserError("rationale, evidence and full are all switched off: EviOmni needs one answer to reward")
    length_of_r, length_of_e = (
        attempt.length(text) for text in (rationale_of(attempt.pieces), evidence_of(attempt.pieces))
    )
    lengths = {
        "length_rationale": rationale_length_reward(length_of_r, length_of_e, tau=tau),
        "length_evidence": evidence_length_reward(length_of_e, length_of_passages(attempt), gamma=gamma, omega=omega),
    }
    weighed = {
        "answer": math.fsum(counted) / len(counted),
        "length": sum(lengths.values()) / 2,
        "format": float(_formatted(attempt)),
    }
    reported = {name: None if name in unwritten and not switches[name] else score for name, score in scores.items()}
    reward = math.fsum(weight * part for weight, part in zip(weights, weighed.values(), strict=True))
    return RewardResult(reward, {**weighed, **reported, **lengths, **answer_measures(answer, attempt.golds)}, answer)


def rationale_of(pieces: Sequence[TextSegment]) -> str:
    """Return r, the text of the policy's first closed `<reason>`; "" if there is none."""
    return _first(pieces, "reason")


def evidence_of(pieces: Sequence[TextSegment]) -> str:
    """Return e, the text of the policy's first closed `<extract>`, where the turn stopped; "" if there is none."""
    return _first(pieces, "extract")


def length_of_passages(attempt: RewardInput) -> int:
    """Return L_P, the total length of the passages without their titles, in the unit of the attempt."""
    return sum(attempt.length(text) for _, text in attempt.passages)


def full_answer(attempt: RewardInput) -> str | None:
    """Return o_f, the first answer after the evidence (one inside the rationale does not count). Without evidence it is
    the first of all answers; if the transcript has none, that of the branch "full"."""
    extracts = blocks(attempt.pieces, "extract")
    answer = final_answer(attempt.pieces, after=extracts[0].end if extracts else 0)
    return final_answer(attempt.branches.get("full", ())) if answer is None else answer


def rationale_length_reward(length_of_r: int, length_of_e: int, *, tau: float) -> float:
    """Return R_len_r: .5 for equal lengths, closer to 1 for longer rationales; 0 if either is empty."""
    if length_of_r <= 0 or length_of_e <= 0:
        return 0.0
    if length_of_r >= length_of_e:
        return _sigmoid((length_of_r / length_of_e - 1) / tau)
    return _sigmoid((1 - length_of_e / length_of_r) / tau)


def evidence_length_reward(length_of_e: int, length_of_passages: int, *, gamma: float, omega: float) -> float:
    """Return R_len_e: 1 if the share saved is at least `omega`, else that share to the power `gamma`."""
    if length_of_e <= 0 or length_of_e > length_of_passages:
        return 0.0
    # Not 1 - L_e/L_P: with one rounding instead of two, 9 saved of 10 is the float .9.
    saved = (length_of_passages - length_of_e) / length_of_passages
    return 1.0 if saved >= omega else saved**gamma


def _first(pieces: Sequence[TextSegment], tag: str) -> str:
    found = blocks(pieces, tag)
    return found[0].text if found else ""


def _branch_f1(attempt: RewardInput, name: str) -> float:
    """Return F1 of a branch's answer, which begins after an `<answer>` written by the engine."""
    pieces = list(attempt.branches.get(name, ()))
    begin = next((i for i, piece in enumerate(pieces) if piece.source == Source.POLICY), len(pieces))
    answers = blocks([*pieces[:begin], TextSegment(Source.POLICY, b"<answer>"), *pieces[begin:]], "answer")
    return f1_score(answers[0].text, attempt.golds) if answers else 0.0


def _formatted(attempt: RewardInput) -> bool:
    if outline(attempt.pieces, SECTIONS) == SECTIONS:
        return True
    apart = outline(attempt.branches.get("full", ()), SECTIONS) == SECTIONS[2:]
    return apart and outline(attempt.pieces, SECTIONS) == SECTIONS[:2]


def _sigmoid(x: float) -> float:
    """Return the sigmoid, in a form in which exp never overflows."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
