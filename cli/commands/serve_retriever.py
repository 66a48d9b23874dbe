"""`thresher serve-retriever`: its flags, and what a person sees of it.

What a limit is for stands at retrieval/serving/app.py.
"""

import argparse

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.config.overrides import parse_overrides

HELP = "answer searches over HTTP, as Search-R1 and ReCall ask"
PLACE = 90
EXAMPLE = "thresher serve-retriever --index indexes/wiki --port 8000"

PORT = flags.checked(int, "a whole number from 0 to 65535", lambda value: 0 <= value <= 65_535)
COUNT = flags.checked(int, f"a whole number from 1 to {2**40}", lambda value: 1 <= value <= 2**40)
POSITIVE = flags.checked(float, "a number above 0, up to a million", lambda value: 0 < value <= 1e6)
# name, default, unit, text
LIMITS = (
    ("max-k", 100, "K", "passages that a request may ask for"),
    ("max-queries", 8192, "N", "in one request"),
    ("max-body", 8 * 2**20, "BYTES", "of one request"),
    ("max-batch", 256, "N", "queries searched at once, from several connections"),
    ("max-wait-ms", 3.0, "MS", "for others to join a search"),
    ("max-waiting", 16_384, "N", "queries; more are refused for now"),
    ("max-connections", 512, "N", "whose request is being served; more are refused for now"),
    ("timeout", 60.0, "SECONDS", "for a body to arrive, and for a search"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--index", required=True, help="folder that `thresher index build` wrote")
    flags.add_set(
        parser, "NAME=VALUE", "a parameter of the search, such as nprobe=64; default: what the build measured"
    )
    parser.add_argument("--gpu", action="store_true", help="the index's lists on all GPUs, in float16")
    flags.add_no_verify(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone, for there is no password")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which requests may ask, beside localhost, this machine's name, --host and IP addresses; "
        "may be given again",
    )
    parser.add_argument("--port", type=PORT, default=8000, help="0: any that is free; default: 8000")
    parser.add_argument("--k", type=COUNT, default=3, help="passages for a request that does not say; default: 3")
    for name, default, unit, text in LIMITS:
        kind = COUNT if isinstance(default, int) else POSITIVE
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=unit, help=f"{text}; default: {default}")


def run(options: argparse.Namespace) -> None:
    """Serve until a signal ends it."""
    from thresher.retrieval.serving.app import Bounds, Settings
    from thresher.retrieval.serving.server import serve_folder

    if options.k > options.max_k:
        raise UserError(f"--k is {options.k}, above --max-k {options.max_k}; lower it, or raise --max-k")
    settings = Settings(
        k=options.k,
        max_body=options.max_body,
        max_batch=options.max_batch,
        max_wait_ms=options.max_wait_ms,
        max_waiting=options.max_waiting,
        max_connections=options.max_connections,
        timeout=options.timeout,
        allow_hosts=tuple(options.allow_host),
        bounds=Bounds(max_queries=options.max_queries, max_k=options.max_k),
    )
    served = serve_folder(
        options.index,
        settings,
        (options.host, options.port),
        lambda text: console.console.print(text, markup=False, soft_wrap=True),
        parse_overrides(options.set),
        options.gpu,
        options.verify,
    )
    console.answer(served)
