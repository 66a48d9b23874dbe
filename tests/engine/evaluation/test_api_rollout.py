"""`thresher eval --answer-url`: the requests to an endpoint, the handling of its replies, and no request made twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from evaluate_cases import refusal, write_asked
from rollout_cases import system_of
from stored_cases import stored

from thresher.cli import main as cli
from thresher.engine.episode import EpisodeConfig, Generate, Prompt, Retrieved, Search, Turn
from thresher.engine.evaluation.api_rollout import ApiRollout, Continued, ContinuingEndpoint, cut
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job, Limits
from thresher.policy.tokenizer import Tokenizer, train_bpe
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever

FAST = ("--set", "judge.retry_seconds=0")


@pytest.fixture
def asked(tmp_path: Path, tiny_questions: list[Question]) -> Path:
    return write_asked(tmp_path, tiny_questions)


@pytest.fixture
def flags(server: ChatServer, asked: Path, tiny_index_folder: Path) -> list[str]:
    words = ["--answer-url", server.url, "--answer-model", "big", "--system", "search_r1", "--questions", str(asked)]
    return ["eval", *words, "--index", str(tiny_index_folder), "--k", "2", "--limit", "3", *FAST]


def chat(text: str, finish: str = "stop", **more: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish, **more}]}


def records(folder: Path) -> list[dict[str, Any]]:
    return stored(folder / "trajectories.jsonl")


def test_a_searching_system_is_played_in_messages_and_scored_as_ours_are(
    flags: list[str], server: ChatServer, asked: Path, tmp_path: Path, tiny_questions: list[Question]
) -> None:
    golds = {question.question: question.golds[0] for question in tiny_questions[:7]}
    out = tmp_path / "a"
    # first round: every question searches; second: the first answer is right, the next runs on, the third is cut off
    server.script = [chat("<think> hm </think> <search> the relation")] * 3
    server.script += [
        chat(f"<answer> {next(iter(golds.values()))} "),
        chat("<answer> wrong </answer> <search> and on", stop_reason=None),
        chat("<think> much", "length"),
    ]
    assert cli.run([*flags, "--set", "judge.concurrency=1", "--out", str(out)]) == 0
    first, again = server.asked[0], server.asked[3]
    assert (first["model"], first["stop"], first["max_tokens"]) == ("big", ["</search>", "</answer>"], 500)
    assert [message["role"] for message in again["messages"]] == ["user", "assistant", "user"]
    assert again["messages"][1]["content"] == "<think> hm </think> <search> the relation</search>"
    assert "<information>" in again["messages"][2]["content"] and first["messages"][0] == again["messages"][0]
    right, ran_on, full = records(out)
    assert [segment["source"] for segment in right["segments"]] == ["prompt", "policy", "retrieved", "policy"]
    assert not any("ids" in segment for segment in right["segments"])
    assert right["measures"]["em"] == 1.0 and right["measures"]["searches"] == 1.0 and right["reward"] == 1.0
    assert ran_on["answer"] == "wrong" and ran_on["segments"][-1]["text"].endswith("</answer>")
    assert (full["reason"], full["measures"]["answered"]) == ("turn_tokens", 0.0)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["model"] == "big, a chat endpoint" and "bytes" in metrics["lengths"]
    assert "tokens" not in metrics and metrics["actions"] == 2.0 and metrics["em"] == pytest.approx(1 / 3)


def test_what_was_answered_before_a_failure_is_not_asked_for_again(
    flags: list[str], server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    answer = chat("<answer> a </answer>")
    refused = (400, {"error": {"message": "too long"}})
    server.script = [answer, refused, answer, refused]
    # parts of two questions: the first failure is within a part, the second after one
    words = [*flags, "--set", "judge.concurrency=1", "--set", "rollout.max_num_seqs=1", "--out", str(out)]
    assert "too long" in refusal(capsys, *words) and not (out / "generated.jsonl").exists()
    assert "too long" in refusal(capsys, *words) and (out / "generated.jsonl").read_text().count("\n") == 2
    assert '"big", not "small"' in refusal(capsys, *[word.replace("big", "small") for word in words])
    server.reply = lambda content: answer
    assert cli.run(words) == 0 and len(server.asked) == 5  # three questions, and two refusals
    assert len(records(out)) == 3
    transcripts = str(out / "trajectories.jsonl")
    scored = ["score", "--system", "search_r1", "--transcripts", transcripts, "--out", str(tmp_path / "s.jsonl")]
    assert cli.run(scored) == 0


def test_a_completion_endpoint_reads_the_one_text_and_a_tokenizer_counts_it(
    flags: list[str], server: ChatServer, tmp_path: Path, tiny_model_folder: Path, tiny_tokenizer: Tokenizer
) -> None:
    out, texts = tmp_path / "a", ["no action ", "<answer> x"]

    def reply(prompt: str) -> Any:
        return 200, {"choices": [{"text": texts["no action" in prompt], "finish_reason": "stop"}]}

    server.reply = reply
    flags[flags.index(server.url)] = server.url + "/v1/completions"
    extra = ["--tokenizer", str(tiny_model_folder), "--set", "rollout.max_turn_tokens=40", "--limit", "1"]
    assert cli.run([*flags, *extra, "--out", str(out)]) == 0
    assert server.paths == ["/v1/completions"] * 2 and server.asked[0]["max_tokens"] == 40
    assert server.asked[1]["prompt"].startswith(server.asked[0]["prompt"] + "no action \nThat was no valid action.")
    (record,) = records(out)
    texts_of_policy = [segment["text"] for segment in record["segments"] if segment["source"] == "policy"]
    assert texts_of_policy == ["no action ", "<answer> x</answer>"] and record["measures"]["invalid_actions"] == 1.0
    assert record["measures"]["response_tokens"] == sum(len(tiny_tokenizer.encode(text)) for text in texts_of_policy)


def test_a_folded_context_is_asked_for_by_itself(flags: list[str], server: ChatServer, tmp_path: Path) -> None:
    """MEM1 keeps the prompt, the last turn and what it found: the third request contains nothing of the first turn."""
    out, flags = tmp_path / "a", ["mem1" if word == "search_r1" else word for word in flags]
    turns = [f"<think> {word} </think> <search> mayor of {word}" for word in ("one", "two")]
    server.script = [chat(turns[0]), chat(turns[1]), chat("<answer> x ")]
    assert cli.run([*flags, "--limit", "1", "--out", str(out)]) == 0
    first, second, third = (request["messages"] for request in server.asked)
    for messages, turn in ((second, turns[0]), (third, turns[1])):
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[0] == first[0] and messages[1]["content"] == f"{turn}</search>"
        assert messages[2]["content"].strip().startswith("<information>")
    assert "mayor of one" in str(second) and "mayor of one" not in str(third)
    (record,) = records(out)
    sources = [segment["source"] for segment in record["segments"]]
    assert sources == ["prompt", "policy", *["prompt", "retrieved", "policy"] * 2]
    assert record["measures"]["searches"] == 2.0 and record["answer"] == "x"


def test_branches_are_asked_for_in_contexts_of_their_own(
    server: ChatServer, asked: Path, tmp_path: Path, tiny_questions: list[Question]
) -> None:
    """EviOmni answers twice more with a part hidden; the answer tag that opens a branch is the engine's."""
    passage = {"id": "p", "title": "t", "text": "a passage"}
    record = {"id": "q", "question": "Who?", "golden_answers": ["Anna"], "passages": [passage]}
    asked.write_text(json.dumps(record) + "\n")

    def reply(content: str) -> Any:
        if content.endswith("<answer>"):
            return chat(" Anna ")
        return chat("<answer> Anna" if content.startswith("<reason>") else "<reason> r </reason> <extract> e")

    server.reply = reply
    out = tmp_path / "a"
    words = ["--answer-url", server.url, "--answer-model", "big", "--system", "eviomni", "--questions", str(asked)]
    assert cli.run(["eval", *words, *FAST, "--out", str(out)]) == 0
    (found,) = records(out)
    assert {name: branch[-1]["text"] for name, branch in found["branches"].items()} == {
        "rationale": " Anna </answer>",
        "evidence": " Anna </answer>",
    }
    assert found["measures"]["em"] == 1.0 and found["parts"]["answer"] == pytest.approx(1.0)
    hidden = [body["messages"] for body in server.asked if body["messages"][-1]["content"].endswith("<answer>")]
    assert sorted("a passage" in messages[0]["content"] for messages in hidden) == [False, True]


def test_calls_are_asked_for_in_contexts_of_their_own_and_waited_for(
    server: ChatServer, asked: Path, tmp_path: Path, tiny_questions: list[Question]
) -> None:
    """SuRe makes calls for two candidates, a summary and a verdict for each, and two comparisons."""
    passage = {"id": "p", "title": "t", "text": "a passage"}
    record = {"id": "q", "question": "Who?", "golden_answers": ["Anna"], "passages": [passage]}
    asked.write_text(json.dumps(record) + "\n")
    summaries = {"Eva": "for Eva", "Anna": "for Anna"}

    def reply(content: str) -> Any:
        if "Summary 1:" in content:
            return chat(f"<verdict> {1 + content.index('for Anna') // content.index('for Eva')}")
        if "Summary:" in content:
            return chat(f"<verdict> {'yes' if 'for Anna' in content else 'no'}")
        about = [name for name in summaries if f"Candidate answer: {name}" in content]
        return chat(f"<support> {summaries[about[0]]}" if about else "<candidates> Eva\nAnna")

    server.reply = reply
    words = ["eval", "--answer-url", server.url, "--answer-model", "big", "--questions", str(asked), *FAST]
    assert cli.run([*words, "--baseline", "sure", "--out", str(tmp_path / "a")]) == 0
    (found,) = records(tmp_path / "a")
    assert list(found["branches"]) == [f"call {number}" for number in range(1, 7)]
    assert [branch[-1]["text"] for branch in found["branches"].values()][4:] == [
        "<verdict> 2</verdict>",
        "<verdict> 1</verdict>",
    ]
    assert (found["answer"], found["reason"], found["measures"]["em"]) == ("Anna", "answered", 1.0)
    assert sum("a passage" in body["messages"][0]["content"] for body in server.asked) == 3 and len(server.asked) == 7


def test_what_a_call_is_shown_is_the_users(
    server: ChatServer, asked: Path, tmp_path: Path, tiny_index_folder: Path
) -> None:
    server.reply = lambda content: chat("<answer> Anna </answer>")
    words = ["eval", "--answer-url", server.url, "--answer-model", "big", "--questions", str(asked), "--limit", "1"]
    searched = ["--baseline", "iter_retgen", "--index", str(tiny_index_folder), "--k", "1"]
    assert cli.run([*words, *searched, "--set", "judge.concurrency=1", *FAST, "--out", str(tmp_path / "a")]) == 0
    (found,) = records(tmp_path / "a")
    assert found["measures"]["searches"] == 3.0 and list(found["branches"]) == ["call 1", "call 2"]
    (body,) = server.asked  # calls and last turn have the same request, so one reply serves them all
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert "<information>" in body["messages"][0]["content"]


def test_a_key_is_sent_and_never_kept(
    flags: list[str], server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sesame")
    server.reply = lambda content: chat("<answer> a </answer>")
    out = tmp_path / "a"
    flags[flags.index("--system") : flags.index("--system") + 2] = ["--baseline", "direct"]
    assert cli.run([*flags, "--answer-key-env", "THE_KEY", "--out", str(out)]) == 0
    assert [record["answer"] for record in records(out)] == ["a"] * 3
    assert set(server.keys) == {"Bearer sesame"}
    assert not any(b"sesame" in path.read_bytes() for path in out.iterdir())


def test_what_the_command_refuses(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(tmp_path / "a"))
    assert "leave out --model" in refusal(capsys, *flags, "--model", "m", *out)
    at = flags.index("--answer-model")
    assert "belong together" in refusal(capsys, *flags[:at], *flags[at + 2 :], *out)
    assert "are for --answer-url" in refusal(capsys, "eval", "--model", "m", "--tokenizer", "m", *out)
    completions = [word + "/v1/completions" if word.startswith("http") else word for word in flags]
    assert "--tokenizer, a folder" in refusal(capsys, *completions, "--prompt", "chat", *out)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("text", "finish", "named", "expected"),
    [
        ("<search> a", "stop", {}, "</search>"),  # a server that names no stops
        ("<think> so </think> done", "stop", {}, None),
        ("<|begin_of_query|> a", "stop", {}, "<|end_of_query|>"),
        ("<|begin_of_query|> a <|end_of_query|> b", "stop", {}, "<|end_of_query|>"),
        ("<search> a </search> b <answer> c", "stop", {"stop_reason": "</answer>"}, "</search>"),  # it ran on
        ("<search> a", "stop", {"stop_reason": "</answer>"}, "</answer>"),
        ("<search> a", "length", {}, None),
        ("<search> a", "stop", {"stop_reason": None}, None),  # the end of text, as vLLM and SGLang have it
        ("<search> a", "stop", {"matched_stop": 151643}, None),
    ],
)
def test_a_stop_tag_that_was_left_out_is_put_back(
    server: ChatServer, text: str, finish: str, named: dict[str, Any], expected: str | None
) -> None:
    server.script = [chat(text, finish, **named)]
    endpoint = ContinuingEndpoint(server.url, "m")
    context = [{"role": "user", "content": "between <answer> and tags"}]
    (found,) = endpoint.continued([(context, ("</search>", "</answer>", "<|end_of_query|>"), 9)], 0.0)
    assert (found.turn.stop, found.full) == (expected, finish == "length")
    assert found.turn.text.decode().endswith(expected or text)


def test_a_reply_is_cut_at_its_first_stop() -> None:
    stop = ("</search>", "</answer>")
    assert cut("<search>a</search> b <answer>c</answer>", stop) == Turn(b"<search>a</search>", "</search>")
    assert cut("<answer>c</answer></search>", stop) == Turn(b"<answer>c</answer>", "</answer>")
    assert cut("plain", stop) == Turn(b"plain", None)


def test_limits_end_a_turn_of_an_endpoint_and_a_server_searches_for_it(tiny_index: Retriever) -> None:
    """Lengths are in bytes, 4 to a token; a reply longer than the room in the context is cut there."""

    def episode(question: Question, config: EpisodeConfig) -> Any:
        yield Prompt("{question}", question.question)
        yield Retrieved((yield Search("mayor")), "<search>", "</search>")
        yield Generate(("</search>",), 2)
        yield Generate(("</search>",))
        return "done"

    class Remote:
        elsewhere = True

        def search(self, queries: list[str], k: int) -> Any:
            return tiny_index.search(queries, k)

    asked: list[int] = []

    class Scripted:
        def continued(self, asked_for: Any, temperature: float) -> list[Continued]:
            asked.extend(most for _, _, most in asked_for)
            return [Continued(Turn(texts.pop(0), None), full=True) for _ in asked_for]

    def played(limits: dict[str, int]) -> Trajectory:
        tokenizer, system, config = train_bpe((), 256), system_of(episode), EpisodeConfig("", 1)
        renderer = Renderer(
            tokenizer=tokenizer, tags=system.tags, k=1, chat=False, max_passage_tokens=999, passage_format="{text}"
        )
        given = {"max_turn_tokens": 40, "max_policy_tokens": 999, "max_context": 999, "max_num_seqs": 1} | limits
        rollout = ApiRollout(Scripted(), tokenizer, Remote(), system, config, renderer, Limits(**given), False, 4)
        (found,) = rollout.run([Job(Question("q", "Who?", ("Anna",)), 0, 0, 0)], 0.0)
        assert rollout.clock.search_queries == 1 and found.from_api
        return found

    texts = [b"x" * 8, b"y" * 40]
    whole = played({})
    assert (whole.reason, asked) == ("turn_tokens", [2, 10])  # a limit of the episode ends no trajectory
    before = len(whole) - 48
    texts, asked = [b"x" * 8, b"y" * 40], []
    cut_off = played({"max_context": before + 11})
    assert (cut_off.reason, len(cut_off), asked) == ("context", before + 11, [2, 1])
    texts, asked = [b"x" * 8], []
    assert (played({"max_policy_tokens": 8}).reason, asked) == ("tokens", [2])
