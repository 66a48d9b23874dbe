"""Calls of tools in a model's own chat format: that of Qwen2.5, Qwen3 and other models with Hermes' tags.

    Prompt(template, question, tools=TOOLS)      the chat template lists the tools; model.prompt = "chat"
    turn = yield Generate(stop=(CALL_END,))      <tool_call>{"name": .., "arguments": {..}}</tool_call>
    call = read_call(turn)                       a Tool, or a sentence on the fault of the call
    yield tool_response((yield call))            the result, with the text that the chat template writes around it
    yield correction(turn, call)                 the sentence, with the text around a user's message

The text around is template text: its control tokens are the tokenizer's, and neither it nor a turn is encoded again. A
prompt with tools is refused if the model's chat template writes other text between turns (protocol/prompts.py).
"""

import json

from thresher.engine.episode import Feedback, Result, Retrieved, Tool, Turn, pair_tags

CALL_TAGS = pair_tags("tool_call", "tool_response")  # for System.tags
CALL_END = "</tool_call>"
TURN_END, NEXT_TURN = "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n"
BEFORE_USER = "\n<|im_start|>user\n"
FORM = 'Write {"name": NAME, "arguments": {NAME: VALUE, ..}} between the tags of a call.'


def read_call(turn: Turn) -> Tool | str:
    """Return the call in a turn that stopped at CALL_END, or a sentence on its fault."""
    text = turn.inside("tool_call")
    if text is None:
        return f"The call is empty. {FORM}"
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"The call is not JSON ({error}). {FORM}"
    name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return f"The call lacks a name or arguments. {FORM}"
    return Tool(name, arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def tool_response(result: Result) -> Retrieved:
    """Return a tool's result as the chat template shows it, up to the beginning of the policy's next turn."""
    before = f"{TURN_END}{BEFORE_USER}<tool_response>\n"
    return Retrieved(result.text, before, f"\n</tool_response>{NEXT_TURN}")


def correction(turn: Turn, text: str) -> Feedback:
    """Return a line of engine text as a user's message, up to the beginning of the policy's next turn. turn: the
    previous turn, which may already end in TURN_END."""
    end = "" if turn.text.endswith(TURN_END.encode()) else TURN_END
    return Feedback(text, f"{end}{BEFORE_USER}", NEXT_TURN)
