"""The parts of a trajectory, and a planted fault for every rule that `check_trajectory` states."""

import re
from collections.abc import Callable

import pytest

from thresher.engine.decoding.stop_tags import TagMatcher
from thresher.engine.episode import pair_tags
from thresher.engine.protocol.trajectory import (
    Segment,
    Trajectory,
    check_trajectory,
    contexts,
    trailing_bytes,
    trained_contexts,
    turns,
)
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.reward import Source

TAGS = pair_tags("search", "information", "answer")


@pytest.fixture
def sound(tiny_tokenizer: Tokenizer) -> Trajectory:
    """Return a prompt that shows tags and control tokens, a search whose last token goes on, a note and an answer."""
    encode, template = tiny_tokenizer.encode, tiny_tokenizer.encode_template
    search, answer = encode("<search>mayor</search><"), encode("<answer>Eva</answer>")
    return Trajectory(
        "q",
        0,
        0,
        [
            Segment(Source.PROMPT, template("<|im_start|>Use <search> or <answer>.<|im_end|>")),
            Segment(Source.POLICY, search, [-0.5] * len(search), "</search>", 1),
            Segment(Source.RETRIEVED, template("\n<information>Doc 1 < /answer></information>\n")),
            Segment(Source.POLICY, template("a<|endoftext|>"), [0.0, -0.25]),
            Segment(Source.FEEDBACK, encode("Try again.")),
            Segment(Source.POLICY, answer, [-1.0] * len(answer), "</answer>", 0),
        ],
        "answered",
    )


def test_a_sound_one_passes(sound: Trajectory, tiny_tokenizer: Tokenizer) -> None:
    assert check_trajectory(sound, tiny_tokenizer, TAGS, len(sound)) == []


def test_policy_ids_are_those_at_its_positions(sound: Trajectory) -> None:
    ids = sound.ids()
    assert sound.policy_ids() == [ids[row] for row in sound.policy_positions()] != []


def test_the_template_may_have_several_tags_around_a_result(sound: Trajectory, tiny_tokenizer: Tokenizer) -> None:
    encode = tiny_tokenizer.encode_template
    before, after = encode("\n<search><information>"), encode("</information></search>\n")
    sound.segments[2].ids = [*before, *encode("Doc 1"), *after]
    sound.segments[2].edges = len(before), len(after)
    assert check_trajectory(sound, tiny_tokenizer, TAGS, len(sound) + 20) == []
    sound.segments[2].ids = [*before, *encode("Doc </information> 1"), *after]
    (wrong,) = check_trajectory(sound, tiny_tokenizer, TAGS, len(sound) + 20)
    assert "segment 2 (retrieved) contains tags of its own" in wrong


Plant = Callable[[Trajectory, Tokenizer], None]


def set_ids(number: int, text: str) -> Plant:
    def plant(trajectory: Trajectory, tokenizer: Tokenizer) -> None:
        segment = trajectory.segments[number]
        segment.ids = tokenizer.encode_template(text)
        segment.logprobs = [-1.0] * len(segment.ids) if segment.source is Source.POLICY else []

    return plant


def change(number: int, **values: object) -> Plant:
    def plant(trajectory: Trajectory, _: Tokenizer) -> None:
        for name, value in values.items():
            setattr(trajectory.segments[number], name, value)

    return plant


@pytest.mark.parametrize("cut", range(1, len("</answer>")))
def test_a_stop_tag_may_begin_in_the_token_that_ended_the_turn_before(
    sound: Trajectory, tiny_tokenizer: Tokenizer, cut: int
) -> None:
    """`..</search></` + `answer>`: the matcher of the second turn starts after the first turn's trailing bytes."""

    class Joined:  # one token ends the search and begins the closing answer tag
        vocab_size, added_tokens = tiny_tokenizer.vocab_size + 1, tiny_tokenizer.added_tokens

        def token_bytes(self, token_id: int) -> bytes:
            is_joined = token_id == tiny_tokenizer.vocab_size
            return b">" + b"</answer>"[:cut] if is_joined else tiny_tokenizer.token_bytes(token_id)

        def decode_bytes(self, ids: list[int]) -> bytes:
            return b"".join(map(self.token_bytes, ids))

    search = [*tiny_tokenizer.encode("<search>mayor</search"), tiny_tokenizer.vocab_size]
    rest = tiny_tokenizer.encode("</answer>"[cut:])
    first = Segment(Source.POLICY, search, [-0.5] * len(search), "</search>", cut)
    matcher = TagMatcher(Joined(), ("</answer>",))
    state, hit = matcher.start(trailing_bytes(first, Joined())), None  # type: ignore[arg-type]
    for token in rest:
        assert hit is None
        state, hit = matcher.step(state, token)
    assert hit is not None and hit.tag == "</answer>"
    sound.segments[1:] = [first, Segment(Source.POLICY, rest, [-0.5] * len(rest), "</answer>", len(hit.trailing))]
    assert check_trajectory(sound, Joined(), TAGS, len(sound)) == []  # type: ignore[arg-type]
    sound.segments[2].trailing += 1
    assert "segment 2 (policy) did not end" in check_trajectory(sound, Joined(), TAGS, len(sound))[0]  # type: ignore[arg-type]


def drop(container: Callable[[Trajectory], list[object]], place: int) -> Plant:
    def plant(trajectory: Trajectory, _: Tokenizer) -> None:
        del container(trajectory)[place]

    return plant


def whole_token_trailing(trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    set_ids(5, "<answer></answer>.")(trajectory, tokenizer)
    trajectory.segments[5].trailing = 1


def padded_column(trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    trajectory.segments[3].ids[0] = tokenizer.vocab_size


def later_context(trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    trajectory.segments[4].source = Source.PROMPT
    trajectory.segments[4].ids = [1] * (len(trajectory) + SLACK + 1)


SLACK = 12  # tokens that a fault may add before the context is also too small
INFORMATION = "<information>{}</information>"
FAULTS: list[tuple[str, Plant, str]] = [
    # rule and fault, change to the sound trajectory, message
    ("1 no prompt", drop(lambda t: t.segments, 0), "does not begin with a prompt"),
    ("1 nothing at all", lambda t, _: t.segments.clear(), "does not begin with a prompt"),
    ("1 a later context too long", later_context, "tokens of its context 2 exceed the context"),
    ("1 prompt later", lambda t, _: t.segments.reverse(), "does not begin with a prompt"),
    ("1 too long", lambda t, _: t.segments[0].ids.extend([1] * (SLACK + 1)), "tokens exceed the context"),
    ("1 padded column", padded_column, r"segment 3 \(policy\) has an id outside"),
    ("1 negative id", change(2, ids=[-1]), r"segment 2 \(retrieved\) has an id outside"),
    ("2 one short", drop(lambda t: t.segments[1].logprobs, 0), r"segment 1 .* log-probs for"),
    ("2 not sampled", change(4, logprobs=[-1.0]), r"segment 4 \(feedback\) has 1 log-probs"),
    ("2 positive", change(3, logprobs=[0.0, 0.01]), "segment 3 .* log-prob above 0"),
    ("2 nan", change(3, logprobs=[0.0, float("nan")]), "segment 3 .* log-prob above 0"),
    ("3 went on after a tag", set_ids(1, "<search>a</search>b</search><"), "segment 1 .* first </search>"),
    ("3 another tag", change(5, stop="</search>"), "segment 5 .* first </search>"),
    ("3 trailing forgotten", change(1, trailing=0), "segment 1 .* first </search>"),
    ("3 a token too many", set_ids(5, "<answer>Eva</answer>."), "segment 5 .* first </answer>"),
    ("3 a whole token trailing", whole_token_trailing, "segment 5 .* first </answer>"),
    ("3 an empty turn", change(5, ids=[], logprobs=[]), "segment 5 .* first </answer>"),
    ("4 control token retrieved", set_ids(2, INFORMATION.format("a<|im_end|>")), "segment 2 .* a control token"),
    ("4 control token in feedback", set_ids(4, "no<|endoftext|>"), r"segment 4 \(feedback\) contains a control token"),
    ("5 tag in a passage", set_ids(2, INFORMATION.format("</answer>")), "segment 2 .* tags of its own"),
    ("5 pair in a passage", set_ids(2, INFORMATION.format(INFORMATION)), "segment 2 .* tags of its own"),
    ("5 tag in feedback", set_ids(4, "use <search>"), r"segment 4 \(feedback\) contains tags of its own"),
]


@pytest.mark.parametrize(("plant", "said"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_every_planted_fault_is_found(sound: Trajectory, tiny_tokenizer: Tokenizer, plant: Plant, said: str) -> None:
    room = len(sound) + SLACK
    plant(sound, tiny_tokenizer)
    (wrong,) = check_trajectory(sound, tiny_tokenizer, TAGS, room)
    assert re.search(said, wrong)


def test_contexts_of_a_folded_trajectory(sound: Trajectory, tiny_tokenizer: Tokenizer) -> None:
    """Each context has its own positions, and only has to fit by itself."""
    sound.segments[4].source = Source.PROMPT
    first, second = contexts(sound)
    assert [*first, *second] == sound.segments and len(first) == 4
    one, two = trained_contexts(sound)
    for context, segments in ((one, first), (two, second)):
        assert context.ids == [token for segment in segments for token in segment.ids] and context.branch is None
        written = [segment for segment in segments if segment.source is Source.POLICY]
        assert [context.ids[at] for at in context.positions] == [i for segment in written for i in segment.ids] != []
        assert context.logprobs == [value for segment in written for value in segment.logprobs]
    assert check_trajectory(sound, tiny_tokenizer, TAGS, max(len(one.ids), len(two.ids))) == []


def test_what_is_trained_of_branches_and_of_inherited_turns(sound: Trajectory) -> None:
    """Of a fork after one turn, only the later turns are trained; a branch is trained if it is marked so."""
    segments = [Segment(Source.PROMPT, [5, 6]), Segment(Source.POLICY, [7], [-0.25])]
    sound.branches = {name: Trajectory("q", 0, 0, segments, trained=name == "b") for name in ("a", "b")}
    sound.segments.insert(3, Segment(Source.PROMPT, [1, 2, 3]))  # the fork's first turn is before the fold
    sound.forked = (0, 1)
    own, branch = trained_contexts(sound)
    assert own.ids[:3] == [1, 2, 3] and own.branch is None
    turns_of_own = [list(turn.ids) for turn in turns(sound)][1:]
    assert [own.ids[at] for at in own.positions] == [token for ids in turns_of_own for token in ids]
    assert (branch.ids, branch.positions, branch.logprobs, branch.branch) == ([5, 6, 7], [2], [-0.25], "b")
    sound.forked = (0, 3)
    assert [context.branch for context in trained_contexts(sound)] == ["b"]


def test_faults_add_up(sound: Trajectory, tiny_tokenizer: Tokenizer) -> None:
    sound.segments[1].logprobs.pop()
    sound.segments[4].logprobs.append(-1.0)
    assert len(check_trajectory(sound, tiny_tokenizer, TAGS, 5)) == 3


def test_rows_and_log_probs_follow_from_the_sources(sound: Trajectory, tiny_tokenizer: Tokenizer) -> None:
    lengths = [len(segment.ids) for segment in sound.segments]
    assert len(sound) == sum(lengths) == len(sound.ids())
    expected = [sum(lengths[:number]) + at for number in (1, 3, 5) for at in range(lengths[number])]
    assert sound.policy_positions() == expected
    ids, written = sound.ids(), [token for segment in turns(sound) for token in segment.ids]
    assert [ids[row] for row in expected] == written
    assert sound.policy_logprobs() == [-0.5] * lengths[1] + [0.0, -0.25] + [-1.0] * lengths[5]
    assert sound.count(Source.POLICY) == len(expected) and sound.count(Source.FEEDBACK) == lengths[4]
    assert Trajectory("q", 0, 0).policy_positions() == [] and len(Trajectory("q", 0, 0)) == 0


def test_pieces_and_the_record_for_the_run_folder(sound: Trajectory, tiny_tokenizer: Tokenizer) -> None:
    sound.searches.append({"query": "mayor", "passages": ["p1"]})
    record = sound.to_dict(tiny_tokenizer)
    expected = {"id": "q", "group": 0, "sample": 0, "reason": "answered", "searches": sound.searches}
    assert record == expected | {"segments": record["segments"]}
    assert [(s["source"], s["ids"]) for s in record["segments"]] == [(str(s.source), s.ids) for s in sound.segments]
    assert record["segments"][5]["text"] == "<answer>Eva</answer>"
    assert record["segments"][0]["text"].startswith("<|im_start|>Use <search>")
    sound.segments[4].ids = tiny_tokenizer.encode("ü")[:1]  # half a character
    pieces = sound.pieces(tiny_tokenizer)
    assert [piece.source for piece in pieces] == [segment.source for segment in sound.segments]
    assert pieces[1].text == b"<search>mayor</search><" and pieces[4].text == "ü".encode()[:1]
