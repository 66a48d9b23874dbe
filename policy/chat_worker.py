"""Fill chat templates in a separate process, because a template is a program that came with somebody's weights.

    {"template", "messages", "names", "tools", "add_generation_prompt", "seconds"} -> {"text"}, or {"error"}
                                                                                     one JSON object per line

Jinja's sandbox keeps a template from Python's objects, but does not limit loops, recursion or memory. The memory of
this process is therefore limited (resource.RLIMIT_AS), and SIGPROF ends it after `seconds` of CPU time on one request;
time spent waiting for a processor does not count. It is run by its path and imports nothing from the package.
"""

import json
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY = 2 << 30  # bytes, including the interpreter's
LONGEST = 10_000_000  # characters of a prompt


def fill(request: dict[str, Any]) -> str:
    """Fill the template as Hugging Face does. An exception raised by the template propagates."""
    return compiled(request["template"]).render(
        messages=request["messages"],
        add_generation_prompt=request["add_generation_prompt"],
        tools=request["tools"],
        documents=None,
        **request["names"],
    )


@lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


class Generation(jinja2.ext.Extension):
    """The tag {% generation %}..{% endgeneration %}, rendered as its body; other tools mark assistant text with it."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, as chat templates expect it; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def reply(line: str) -> dict[str, str]:
    try:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        text = fill(request)
        return {"text": text} if len(text) <= LONGEST else {"error": f"its text has {len(text):,} characters"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno} of the template: {error.message}"}
    except jinja2.TemplateError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY >> 30} GiB of memory"}
    except RecursionError:
        return {"error": "it recurses without end"}
    except Exception as error:  # a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches this process; it ends with its parent
    for line in sys.stdin:
        print(json.dumps(reply(line)), flush=True)


if __name__ == "__main__":
    main()
