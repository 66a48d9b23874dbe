"""The command line. Every command says what it is about to do, shows progress, ends with one table and writes JSON.

Exit status: 0 done; 2 the user's mistake, told in one sentence; 1 ours, with a trace, or in a sentence where a command
checks our own work (`bench loss`, `bench compile`); 130 interrupted.
This file only reads arguments and prints; the work is in the modules it imports, each when its command is called.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.cli import flags
from thresher.cli.commands.bench.retrieval import retrieval_arguments
from thresher.cli.commands.data.convert import data_commands
from thresher.cli.commands.eval import eval_arguments
from thresher.cli.commands.extract import extract_arguments
from thresher.cli.commands.index.build import build_arguments, search_arguments
from thresher.cli.commands.index.plan import hybrid_arguments, plan_arguments
from thresher.cli.commands.serve_retriever import serve_arguments
from thresher.cli.commands.study.kl import study_commands
from thresher.engine.evaluation.compare import compare_arguments
from thresher.engine.training.sft_data import sft_command
from thresher.rewards.errors import UserError

Handler = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `thresher`; leaves by SystemExit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        options.handler(options)
    except UserError as error:
        print(f"thresher: {error}", file=sys.stderr)
        return 2
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        # A path to write that nobody looked at before. Anything else the system may say is ours to explain.
        print(f"thresher: {error.filename2 or error.filename}: {error.strerror}; choose another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "thresher: interrupted; a training run goes on with --resume, an index or an evaluation when begun again",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 141
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thresher", description="Train small open models to answer from retrieved text, with GRPO."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    init = _command(commands, "init", _init, "make a model folder with random weights")
    init.add_argument("--config", required=True, help="a Qwen2 config.json")
    init.add_argument("--tokenizer", help="folder with a tokenizer.json, or the file")
    init.add_argument(
        "--train-tokenizer",
        nargs="+",
        default=[],
        metavar="FILE",
        help="train one on the strings of JSONL files",
    )
    init.add_argument("--vocab-size", type=flags.count, default=1024, help="of a tokenizer that is trained")
    init.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config")
    init.add_argument("--seed", type=int, default=0)
    init.add_argument("--embedding-std", type=flags.positive, metavar="STD", help="default: initializer_range")
    init.add_argument("--zero-outputs", action="store_true", help="every layer begins as the identity")
    init.add_argument("--out", required=True)

    sft = _command(commands, "sft", _sft, "supervised fine-tuning, of all weights or of adapters")
    _recipe_arguments(sft)
    sft.add_argument("--out", required=True, help="model folder to write")

    train = _command(commands, "train", _train, "GRPO")
    _recipe_arguments(train)
    train.add_argument("--out", required=True, help="run folder to write")
    train.add_argument("--resume", action="store_true", help="go on from the run folder's last checkpoint")

    eval_arguments(_command(commands, "eval", _eval, "answer questions with a system or a baseline, and measure"))
    compare_arguments(_command(commands, "compare", _compare, "two evaluations of the same questions, side by side"))

    extract_arguments(_command(commands, "extract", _extract, "evidence from passages, for whoever answers"))

    score = _command(commands, "score", _score, "rate transcripts with a system's reward")
    score.add_argument("--system", required=True, help="its name, or path/to/your_own.py")
    score.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="a switch of the system")
    score.add_argument("--transcripts", required=True)
    score.add_argument("--tokenizer", metavar="DIR", help="count lengths in its tokens; default: in words")
    score.add_argument("--out", required=True)

    index = commands.add_parser("index", help="plan, build, join, search or check an index").add_subparsers(
        required=True, metavar="ACTION"
    )
    plan_arguments(_command(index, "plan", _index_plan, "what an index will need and take, before it is built"))
    build_arguments(_command(index, "build", _index_build, "encode a corpus into an index folder"))
    hybrid_arguments(_command(index, "hybrid", _index_hybrid, "join indexes of one corpus by reciprocal rank"))
    search = _command(index, "search", _index_search, "the k nearest passages of each question")
    search_arguments(search)
    search.add_argument("--out", required=True)
    search_arguments(_command(index, "check", _index_check, "recall and MRR against gold_titles"))

    serve = _command(commands, "serve-retriever", _serve, "answer searches over HTTP, as Search-R1 and ReCall ask")
    serve_arguments(serve)

    data = commands.add_parser("data", help="make and check data").add_subparsers(required=True, metavar="ACTION")
    data_commands(data)
    sft_command(data)
    invent = _command(data, "invent", _data_invent, "an invented world: corpus, questions, warm-up transcripts")
    invent.add_argument("--out", required=True)
    invent.add_argument("--seed", type=int, default=0)
    invent.add_argument("--passage-format", default=" {text}", help="as retrieval.passage_format of the recipe")
    invent.add_argument(
        "--forms", type=flags.natural, default=0, help="transcripts of each system's form, for `study systems`"
    )
    invent.add_argument("--aware", type=flags.share, help="share of warm-up transcripts that follow their question")

    report = _command(commands, "report", _report, "curves and trajectories of a run, as a page and pictures")
    report.add_argument("run", help="run folder")
    report.add_argument("--out", help="folder to write into; default: the run folder")

    bench = commands.add_parser("bench", help="measure, beside peers").add_subparsers(required=True, metavar="WHAT")
    step = _command(bench, "step", _bench_step, "one GRPO step of the demo's model, beside TRL where it is installed")
    step.add_argument("--steps", type=flags.count, default=5)
    step.add_argument("--peer", choices=("trl", "none"), default="trl")
    step.add_argument("--out", help="JSON lines to append to")
    loss = _command(bench, "loss", _bench_loss, "the loss's forward and backward, beside peers and its matmuls' floor")
    loss.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    loss.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on cuda, else float32")
    for axis, text in (("hidden", "widths"), ("vocab", "vocabulary sizes"), ("tokens", "rows, masked ones included")):
        loss.add_argument(f"--{axis}", type=flags.count, nargs="+", metavar="N", help=f"{text}; default: by device")
    loss.add_argument("--density", type=flags.percent, nargs="+", metavar="PERCENT", help="shares of rows in the loss")
    loss.add_argument("--peers", default="all", metavar="NAMES", help="all, none, or names with commas between them")
    loss.add_argument("--chunk-rows", type=flags.count, help="of ours, and of the chunked naive form")
    loss.add_argument(
        "--budget", type=flags.seconds, default=float("inf"), metavar="SECONDS", help="then leave out the rest"
    )
    loss.add_argument("--out", help="JSON lines to append to")
    loss.add_argument("--plot", help="PNG to write")
    text = "indexes, their recall and speed, beside torch, numpy and FAISS; the server under load"
    retrieval_arguments(_command(bench, "retrieval", _bench_retrieval, text))
    compiled = _command(bench, "compile", _bench_compile, "the Triton kernels, compiled for GPUs that are not here")
    compiled.add_argument("--target", action="append", choices=("sm_80", "sm_90"), help="default: both")
    compiled.add_argument("--module", action="append", help="dotted name of one with kernels, in place of the loss's")
    compiled.add_argument("--out", help="JSON lines to append to")

    study = commands.add_parser("study", help="put a claim of the method to the test").add_subparsers(
        required=True, metavar="CLAIM"
    )
    study_commands(study, build_parser)

    demo = _command(commands, "demo", _demo, "from nothing to a model that searches, in minutes")
    demo.add_argument("--out", default="runs/demo")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")
    return parser


def _command(commands: Any, name: str, handler: Handler, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(handler=handler)
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="short for --set model.device=")


def _load_recipe(options: argparse.Namespace) -> Any:
    from thresher.engine.assemble import read_run_recipe

    device = [] if options.device is None else [f"model.device={options.device}"]
    return read_run_recipe(options.recipe, [*options.set, *device])


def _init(options: argparse.Namespace) -> None:
    from thresher.engine import console
    from thresher.engine.synthetic.random_model import initialise

    figures = initialise(
        options.config,
        options.out,
        tokenizer_path=options.tokenizer,
        train_on=options.train_tokenizer,
        vocab_size=options.vocab_size,
        overrides=options.set,
        seed=options.seed,
        embedding_std=options.embedding_std,
        zero_outputs=options.zero_outputs,
    )
    console.figures(f"model with random weights in {options.out}", figures)


def _sft(options: argparse.Namespace) -> None:
    from thresher.cli.commands.train import run_sft

    run_sft(_load_recipe(options), options.out)


def _train(options: argparse.Namespace) -> None:
    from thresher.cli.commands.train import run_train

    run_train(_load_recipe(options), options.out, options.resume)


def _eval(options: argparse.Namespace) -> None:
    from thresher.cli.commands.eval import run_eval

    run_eval(options)


def _compare(options: argparse.Namespace) -> None:
    from thresher.engine.evaluation.compare import run_compare

    run_compare(options)


def _extract(options: argparse.Namespace) -> None:
    from thresher.cli.commands.extract import run_extract

    run_extract(options)


def _score(options: argparse.Namespace) -> None:
    from thresher.engine import console
    from thresher.engine.config.recipe import parse_overrides
    from thresher.engine.scoring.transcripts import score_file

    switches = parse_overrides(options.set)
    figures = score_file(options.system, switches, options.transcripts, options.out, options.tokenizer)
    console.figures(f"{options.system} rewards in {options.out}", figures)


def _index_build(options: argparse.Namespace) -> None:
    from thresher.cli.commands.index.build import run_build

    run_build(options)


def _index_plan(options: argparse.Namespace) -> None:
    from thresher.cli.commands.index.plan import run_plan

    run_plan(options)


def _index_hybrid(options: argparse.Namespace) -> None:
    from thresher.cli.commands.index.plan import run_hybrid

    run_hybrid(options)


def _index_search(options: argparse.Namespace) -> None:
    from thresher.cli.commands.index.build import run_search

    run_search(options)


def _index_check(options: argparse.Namespace) -> None:
    from thresher.cli.commands.index.build import run_check

    run_check(options)


def _serve(options: argparse.Namespace) -> None:
    from thresher.cli.commands.serve_retriever import run_server

    run_server(options)


def _data_invent(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from thresher.engine import console
    from thresher.engine.synthetic.invent import invent_files
    from thresher.engine.synthetic.world import Size

    size = Size() if options.aware is None else replace(Size(), aware=options.aware)
    figures = invent_files(options.out, options.seed, size, options.passage_format, options.forms)
    console.figures(f"an invented world in {options.out}", figures)


def _report(options: argparse.Namespace) -> None:
    from thresher.engine.reporting.report import write_report

    print(write_report(options.run, options.out))


def _bench_step(options: argparse.Namespace) -> None:
    from thresher.bench.step.run import run_step_bench

    run_step_bench(options.steps, options.out, options.peer)


def _bench_loss(options: argparse.Namespace) -> None:
    from thresher.bench.loss.run import LossBench, failure, read_peers, run_loss_bench

    bench = LossBench(
        device=options.device,
        dtype=options.dtype,
        hidden=options.hidden,
        vocab=options.vocab,
        tokens=options.tokens,
        density=options.density,
        peers=read_peers(options.peers),
        chunk_rows=options.chunk_rows,
        budget=options.budget,
    )
    wrong = failure(run_loss_bench(bench, options.out, options.plot))
    if wrong is not None:
        sys.exit(f"thresher: {wrong}")  # prints it, status 1


def _bench_retrieval(options: argparse.Namespace) -> None:
    from thresher.bench.retrieval.run import RetrievalBench, failure, read_source, run_retrieval_bench

    bench = RetrievalBench(
        sizes=options.sizes,
        dim=options.dim,
        kinds=options.kinds,
        batches=options.batches,
        source=read_source(options.corpus, options.encoder, options.passages, options.questions),
        work=options.work,
        server_seconds=options.server,
        budget=options.budget,
    )
    wrong = failure(run_retrieval_bench(bench, options.out, options.plot))
    if wrong is not None:
        sys.exit(f"thresher: {wrong}")  # prints it, status 1


def _bench_compile(options: argparse.Namespace) -> None:
    from thresher.bench.compile import KERNEL_MODULES, TARGETS, run_compile_bench

    wrong = run_compile_bench(options.target or tuple(TARGETS), options.module or KERNEL_MODULES, options.out)
    if wrong is not None:
        sys.exit(f"thresher: {wrong}")  # prints it, status 1


def _demo(options: argparse.Namespace) -> None:
    from thresher.cli.commands.train import run_demo

    run_demo(Path(options.out), options.seed, options.set, build_parser())


if __name__ == "__main__":
    main()
