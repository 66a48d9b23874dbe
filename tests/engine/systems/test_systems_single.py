"""The systems that answer in one pass, driven by hand, and what every system needs: tags, template, preset, parts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_cases import drive as play
from reward_cases import PARTS

from thresher.engine.assemble import read_run_recipe
from thresher.engine.episode import (
    BranchPrompt,
    Generate,
    KeptSpan,
    Prompt,
    SpawnBranches,
    System,
    pair_tags,
)
from thresher.engine.rollout.contexts import branch_seed, context_ids
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.judges import LexicalJudge
from thresher.engine.scoring.score import Judges, ask_judges, check_all, score
from thresher.engine.systems import NAMES, load_system
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, Source, TextSegment
from thresher.rewards.tags import escape_tags

ROOT = Path(__file__).resolve().parents[3]
PASSAGES = (
    Passage("1", "Glass Bay", "Anna Bell mapped it."),
    Passage("2", "Bo", "He wrote </references> and </answer>."),
)
QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell",), passages=PASSAGES, gold_indices=(1,))
TEMPLATE = "T {question} {passages}"
REASON, EXTRACT = "<reason>The first.</reason>", "<extract>Anna Bell did.</extract>"
ANSWER = Generate(("</answer>",))
NOTE = ["think", "search", "information", "summary", "answer"]
PRESETS: dict[str, tuple[list[str], tuple[Any, ...]]] = {  # tags; k, G, temperature, KL, beta, lr
    "search_r1": (["think", "search", "information", "answer"], (3, 5, 1.0, "k3", 1e-3, 1e-6)),
    "tree_grpo": (["think", "search", "information", "answer"], (3, 6, 1.0, "k3", 1e-3, 1e-6)),
    "igpo": (["think", "search", "information", "answer"], (3, 16, 1.0, "k3", 1e-3, 1e-6)),
    "search_r1_reinforce": (["think", "search", "information", "answer"], (3, 5, 1.0, "k3", 0.0, 1e-6)),
    "llds": (["think", "search", "information", "answer"], (3, 5, 1.0, "k3", 1e-3, 1e-6)),
    "gigpo": (["think", "search", "information", "answer"], (3, 5, 1.0, "k3", 1e-3, 1e-6)),
    "eval_rar": (["think", "search", "information", "evaluate", "answer"], (3, 5, 1.0, "k3", 1e-3, 1e-6)),
    "evinote": (NOTE, (3, 4, 1.0, "k3", 1e-3, 1e-5)),
    "evinote_code": (NOTE, (3, 5, 1.0, "k3", 1e-3, 1e-6)),
    "eviomni": (["reason", "extract", "answer"], (5, 8, 1.0, "k3", 1e-2, 1e-6)),
    "lear": (["reason", "extract", "answer"], (5, 8, 1.0, "k3", 1e-2, 1e-6)),
    "arena": (["question", "references", "relevance", "analysis", "answer"], (10, 7, 0.9, "k2", 4e-2, 3e-6)),
    "naive_grpo": (["think", "answer"], (10, 7, 0.9, "k3", 4e-2, 3e-6)),
}


def drive(system: System, texts: Sequence[str]) -> tuple[list[Any], str | None]:
    return play(system, QUESTION, texts, max_turns=1, template=TEMPLATE)


def eviomni(**options: Any) -> System:
    return load_system("eviomni", options)


PROMPT = Prompt(TEMPLATE, QUESTION.question, PASSAGES)
BARE = Prompt(TEMPLATE, QUESTION.question)
WRITTEN = f"Well. {REASON} {EXTRACT}"
RATIONALE = BranchPrompt(PROMPT, (KeptSpan(0, len(f"Well. {REASON}")), "<answer>"), ("</answer>",))
EVIDENCE = BranchPrompt(BARE, (KeptSpan(len(f"Well. {REASON} "), len(WRITTEN)), "<answer>"), ("</answer>",))


def test_eviomni_reasons_extracts_and_answers_in_three_contexts() -> None:
    requests, reason = drive(eviomni(), [WRITTEN + ">\n", "<answer>Anna Bell</answer>"])
    assert requests == [
        PROMPT,
        Generate(("</extract>",)),
        SpawnBranches({"rationale": RATIONALE, "evidence": EVIDENCE}),
        ANSWER,
    ]
    assert reason == "answered"
    assert (
        drive(eviomni(), [WRITTEN, "Anna Bell"])[1] == drive(eviomni(), [WRITTEN, "<answer> </answer>"])[1] == "ended"
    )


@pytest.mark.parametrize(
    ("off", "left"),
    [
        (["rationale"], {"evidence": EVIDENCE}),
        (["evidence"], {"rationale": RATIONALE}),
        (["full"], {"rationale": RATIONALE, "evidence": EVIDENCE}),
        (["rationale", "full"], {"evidence": EVIDENCE}),
        (["rationale", "evidence"], None),
    ],
)
def test_answers_that_are_switched_off_are_not_written(off: list[str], left: dict[str, BranchPrompt] | None) -> None:
    """The trajectory's own answer is an exception: its format and all measures of the answer depend on it."""
    requests, _ = drive(eviomni(**dict.fromkeys(off, False)), [WRITTEN, "<answer>a</answer>"])
    assert [request.branches for request in requests if isinstance(request, SpawnBranches)] == ([left] if left else [])
    assert requests[-1] == ANSWER


@pytest.mark.parametrize(
    ("text", "names", "reason"),
    [
        (f"{REASON} and that is all", ["rationale"], "ended"),
        (EXTRACT, ["evidence"], "answered"),
        (f"<reason>never closed {EXTRACT}", ["evidence"], "answered"),
        (f"{REASON} Anna Bell did.</extract>", ["rationale"], "answered"),
        ("<extract>Anna <reason>why</reason> Bell</extract>", [], "answered"),
        ("nothing at all", [], "ended"),
        ("", [], "ended"),
    ],
)
def test_what_was_not_written_has_no_branch(text: str, names: list[str], reason: str) -> None:
    """The answer is still requested if the turn stopped at the tag; otherwise the policy has finished."""
    texts = [text, "<answer>a</answer>"] if reason == "answered" else [text]
    requests, ended = drive(eviomni(), texts)
    forks = [request for request in requests if isinstance(request, SpawnBranches)]
    assert [list(fork.branches) for fork in forks] == ([names] if names else [])
    assert ended == reason


def test_a_branch_holds_nothing_of_what_it_hides(
    tiny_rollout: Callable[..., Rollout], tiny_tokenizer: Tokenizer
) -> None:
    renderer = tiny_rollout("eviomni", template=TEMPLATE, max_passage_tokens=200).renderer
    written = tiny_tokenizer.encode_template(WRITTEN)
    rationale, evidence = (
        tiny_tokenizer.decode(context_ids(branch, written, renderer)) for branch in (RATIONALE, EVIDENCE)
    )
    assert evidence == f"T {QUESTION.question} {EXTRACT}<answer>"
    assert rationale.endswith(f"Well. {REASON}<answer>") and "Anna Bell mapped it." in rationale
    assert "Anna Bell did." not in rationale


def test_lear_is_eviomni_under_its_own_name() -> None:
    ours, theirs = load_system("lear", {"tau": 0.2}), load_system("eviomni", {"tau": 0.2})
    assert (ours.name, ours.tags, ours.template, ours.preset) == ("lear", theirs.tags, theirs.template, theirs.preset)
    assert drive(ours, [WRITTEN, "<answer>a</answer>"]) == drive(theirs, [WRITTEN, "<answer>a</answer>"])
    attempt = attempt_of(WRITTEN + "<answer>Anna Bell</answer>")
    assert ours.reward(attempt) == theirs.reward(attempt)


@pytest.mark.parametrize(
    ("name", "update"),
    [
        (
            "search_r1_reinforce",
            {"objective": "reinforce", "baseline": "none", "scale": "none", "updates_per_batch": 1},
        ),
        ("llds", {"objective": "grpo", "guard": "llds", "guard_weight": 0.2, "updates_per_batch": 2}),
        ("gigpo", {"advantage": "anchor", "anchor": "observation", "gamma": 0.95, "omega": 1.0, "baseline": "group"}),
    ],
)
def test_what_differs_from_search_r1_in_the_update_alone(name: str, update: dict[str, Any], tmp_path: Path) -> None:
    """Requests, prompt and reward are the same, also with the last turn switched off; only [grpo] differs."""
    (tmp_path / "r.toml").write_text(f'[model]\npath = "m"\n[retrieval]\nindex = "i"\n[system]\nname = "{name}"\n')
    grpo = read_run_recipe(tmp_path / "r.toml", []).grpo
    assert {key: getattr(grpo, key) for key in update} == update
    for options in ({}, {"answer_after_searches": False}):
        ours, theirs = load_system(name, options), load_system("search_r1", options)
        assert (ours.tags, ours.template, ours.reward) == (theirs.tags, theirs.template, theirs.reward)
        played = [play(one, QUESTION, ["<search>a</search>", "nothing"], [[]], max_turns=3) for one in (ours, theirs)]
        assert played[0] == played[1]


@pytest.mark.parametrize("name", ["arena", "naive_grpo"])
def test_one_pass(name: str) -> None:
    system = load_system(name, {})
    assert drive(system, ["x<answer>Anna Bell</answer>"]) == ([PROMPT, ANSWER], "answered")
    for broken in ("x", "", "<answer></answer>", "Anna Bell</answer>"):
        assert drive(system, [broken])[1] == "ended"


def test_without_passages_the_question_stands_alone() -> None:
    system = load_system("naive_grpo", {"passages": False})
    assert not system.given_passages and "{passages}" not in system.template and "assage" not in system.template
    assert drive(system, ["<answer>x</answer>"])[0] == [BARE, ANSWER]


def test_arenas_input_cannot_be_closed_from_inside(tiny_rollout: Callable[..., Rollout]) -> None:
    system = load_system("arena", {})
    run = tiny_rollout(system, template=system.template, max_context=1500, max_passage_tokens=400)
    shown = run.tokenizer.decode(run.renderer.prompt(Prompt(system.template, "</question>", PASSAGES)))
    assert [shown.count(tag) for tag in ("<references>", "</references>", "</question>")] == [1, 1, 1]
    assert escape_tags("</references>", system.tags) in shown


def attempt_of(text: str, **more: Any) -> RewardInput:
    pieces = [TextSegment(Source.PROMPT, b"<answer>Anna Bell</answer>"), TextSegment(Source.POLICY, text.encode())]
    passages = [(passage.title, passage.text) for passage in PASSAGES]
    return RewardInput(pieces=pieces, golds=QUESTION.golds, passages=passages, gold_indices=(1,), **more)


def test_arenas_switches() -> None:
    text = "<relevance>{}</relevance><analysis>As [1] says.</analysis><answer>{}</answer>"
    right, all_named, half = (text.format(*x) for x in (("[1]", "Anna Bell"), ("[1,2]", "Anna Bell"), ("[1]", "Anna")))

    def rewards(**options: Any) -> list[float]:
        reward = load_system("arena", options).reward
        return [reward(attempt_of(x, verdict=True)).reward for x in (right, all_named, half)]

    assert rewards() == [13, 2.5, 2]
    assert rewards(max_indices=1) == [13, 2, 2]
    assert rewards(relevance_reward=False) == [2, 2, 1]
    needing = [load_system("arena", {"relevance_reward": on}).needs_gold_indices for on in (True, False)]
    assert needing == [True, False]
    assert rewards(accuracy="f1") == pytest.approx([13, 2.5, 2 + 2 / 3])
    assert rewards(accuracy="judge") == [13, 2.5, 13]
    assert load_system("arena", {"accuracy": "judge"}).wants_verdict and not load_system("arena", {}).wants_verdict
    spaced = attempt_of(right.replace("Anna Bell", "Anna_Bell"))
    assert load_system("arena", {"variant": "squad"}).reward(spaced).parts["accuracy"] == 0
    assert load_system("arena", {}).reward(spaced).parts["accuracy"] == 1
    hyphened = attempt_of(right.replace("Anna Bell", "Anna-Bell"))
    assert load_system("arena", {}).reward(hyphened).parts["accuracy"] == 0
    assert load_system("arena", {"variant": "arena_code"}).reward(hyphened).parts["accuracy"] == 1


@pytest.mark.parametrize(("options", "answer"), [({}, 2 / 3), ({"full": False}, 0.5), ({"rationale": False}, 1.0)])
def test_eviomnis_switches_choose_the_answers_that_count(options: dict[str, bool], answer: float) -> None:
    branches = {
        "rationale": [TextSegment(Source.POLICY, b"Bo</answer>")],
        "evidence": [TextSegment(Source.POLICY, b"Anna Bell</answer>")],
    }
    attempt = attempt_of(REASON + EXTRACT + "<answer>Anna Bell</answer>", branches=branches)
    result = load_system("eviomni", options | {"weights": [1, 0, 0]}).reward(attempt)
    assert result.reward == pytest.approx(answer) and result.parts["format"] == 1


@pytest.mark.parametrize("name", PRESETS)
def test_tags_template_and_preset(name: str, tmp_path: Path) -> None:
    tags, figures = PRESETS[name]
    system, one_pass = load_system(name, {}), name in ("eviomni", "lear", "arena", "naive_grpo")
    assert system.name == name and system.tags == pair_tags(*tags) and system.given_passages == one_pass
    assert [system.template.count(place) for place in ("{question}", "{passages}")] == [1, one_pass]
    assert all(tag in system.template for tag in system.tags) and not system.wants_verdict
    if one_pass:  # the prompt names the sections in their expected order
        places = [system.template.index(f"<{tag}>") for tag in tags if tag not in ("question", "references")]
        assert places == sorted(places)
    else:
        assert system.template.rstrip().endswith("{question}"), "the question comes last"
    index = "" if one_pass else '[retrieval]\nindex = "i"\n'
    (tmp_path / "r.toml").write_text(f'[model]\npath = "m"\n{index}[system]\nname = "{name}"\n')
    recipe = read_run_recipe(tmp_path / "r.toml", [])  # so its keys and values are valid in a recipe
    grpo, rollout = recipe.grpo, recipe.rollout
    assert recipe.retrieval is not None and grpo.clip_low == grpo.clip_high == 0.2
    found = (recipe.retrieval.k, rollout.group_size, rollout.temperature, grpo.kl_value, grpo.beta, recipe.optim.lr)
    assert found == figures
    if name in ("eviomni", "lear"):
        assert grpo.std_floor == 0.1
    elif one_pass:
        assert (recipe.optim.schedule, recipe.optim.warmup_ratio, rollout.questions_per_step) == ("cosine", 0.1, 256)
    else:
        assert rollout.max_turns == {"evinote": 6, "tree_grpo": 4, "igpo": 10, "llds": 4, "gigpo": 4}.get(name, 5)
        assert (grpo.advantage == "turn") == (name == "igpo")


@pytest.mark.parametrize("name", NAMES)
def test_every_system_explains_its_reward(name: str) -> None:
    """The result has the contract's parts and three measures, whatever was written."""
    system = load_system(name, {})
    for text in ("", "<answer>Anna Bell</answer>", WRITTEN, "<answer>Bo</answer> </extract> \ufffd<"):
        result = system.reward(attempt_of(text))
        assert PARTS[name] | {"em", "f1", "answered"} <= result.parts.keys()
        assert all(isinstance(value, int | float) for value in result.parts.values())
        assert result.parts["em"] == ("<answer>Anna Bell" in text and bool(system.tags))  # `reading` has no tags


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cases(5)
def test_every_system_runs_in_a_rollout(
    name: str, tiny_rollout: Callable[..., Rollout], tiny_questions: list[Question]
) -> None:
    """Whatever an untaught policy writes, the trajectory ends with a reason and has a reward."""
    system = load_system(name, {})
    template = "{question}\n{passages}\n" if system.given_passages else "{question}\n"
    run = tiny_rollout(system, template=template)
    jobs = [Job(tiny_questions[i], i, 0, i) for i in range(6)]
    trajectories = run.run(jobs, 1.0)
    judges = Judges(entailment=LexicalJudge())
    scored = score([job.question for job in jobs], trajectories, system, run.tokenizer, judges)
    check_all(scored, run.tokenizer, system.tags, run.limits.max_context)
    assert all(entry.trajectory.reason and math.isfinite(entry.result.reward) for entry in scored)


@pytest.mark.parametrize(("evidence", "answer"), [(True, (0 + 1 + 0.5) / 3), (False, (0 + 0.5) / 2)])
def test_eviomnis_three_answers_meet_in_one_reward(
    evidence: bool, answer: float, tiny_rollout: Callable[..., Rollout], script: Callable[..., None]
) -> None:
    """From branches to reward: wrong from the rationale, right from the evidence, half right in the transcript."""
    system = load_system("eviomni", {"evidence": evidence, "weights": [1, 0, 0]})
    lines = {7: [f"{REASON}{EXTRACT}", "<answer>Anna Frost</answer>"], branch_seed(7, "rationale"): ["Bo</answer>"]}
    script(lines | {branch_seed(7, "evidence"): ["Anna Bell</answer>"]})
    run = tiny_rollout(system, template="{question}\n{passages}\n", max_passage_tokens=120, max_turn_tokens=60)
    (entry,) = score([QUESTION], run.run([Job(QUESTION, 0, 0, 7)], 1.0), system, run.tokenizer)
    check_all([entry], run.tokenizer, system.tags, run.limits.max_context)
    parts = entry.result.parts
    scores = [parts[f"answer_{name}"] for name in ("rationale", "evidence", "full")]
    assert scores == [0.0, 1.0 if evidence else None, 0.5] and parts["format"] == 1
    assert entry.result.reward == pytest.approx(answer) and entry.trajectory.reason == "answered"


def test_the_verdict_is_on_the_answer_that_is_rewarded() -> None:
    """EviOmni's answer is the first one after its evidence, not one in the rationale."""
    text = "<reason><answer>Bo</answer></reason><extract>b</extract><answer>Anna Bell</answer>"
    attempt = attempt_of(text)
    system = load_system("eviomni", {})
    assert system.answer(attempt) == system.reward(attempt).answer == "Anna Bell"
    arena = load_system("arena", {})
    assert arena.answer(attempt) == arena.reward(attempt).answer == "Bo"
    asked: list[str] = []

    class Chat:
        name = "chat"

        def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]:
            asked.extend(response for _, response in cases)
            return [True] * len(cases)

    ask_judges([attempt], replace(system, wants_verdict=True), Judges(verdict=Chat()))
    assert asked == ["Anna Bell"]


RECIPES = [path for name in NAMES for path in sorted((ROOT / "recipes" / name).glob("*.toml"))]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_recipes_are_filled_by_their_presets(path: Path) -> None:
    recipe = read_run_recipe(path, [])
    assert recipe.system is not None
    system = load_system(recipe.system.name, recipe.system.options)
    places = recipe.retrieval and (recipe.retrieval.index or recipe.retrieval.url)
    assert places or system.given_passages or not system.needs_index, "it has nowhere to search"
    assert {*system.tools} <= {*(recipe.tools or {})}
    passages = recipe.rollout.max_passage_tokens if system.given_passages else 0
    turn = 0 if recipe.data is None else recipe.rollout.max_turn_tokens  # `sft` alone samples nothing
    assert passages + turn < recipe.rollout.max_context
    assert path.read_text().startswith("# "), "a recipe says what it is"


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_recipe_for_every_system(name: str) -> None:
    kinds = {path.stem.split("-")[0] for path in (ROOT / "recipes" / name).glob("*.toml")}
    assert "qwen2.5" in kinds and ("laptop" in kinds or name in ("evinote_code", "r1", "reading"))


@pytest.mark.parametrize(
    ("written", "earns"),
    [("Anna", 1), ("Anna<|im_end|>", 1), ("Anna Bo Cy Di<|endoftext|>", 0.2), ("Bo", 0), ("<|im_end|>", 0), ("", 0)],
)
def test_reading_takes_the_whole_reply_for_its_answer(written: str, earns: float) -> None:
    attempt = RewardInput(pieces=[TextSegment(Source.POLICY, written.encode())], golds=("Anna",), question="Who?")
    assert load_system("reading", {}).reward(attempt).reward == pytest.approx(earns)
