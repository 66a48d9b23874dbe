"""`thresher bench ..`: a class a measurement; the measuring itself is done in bench/.

Status 1 where our own loss, flat index or kernel, or a part of the GPU check, is wrong.
"""

import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from thresher.cli import flags
from thresher.cli.flags import Count, Device, Dtype, Natural, Seconds, Texts, checked
from thresher.cli.parser import ANY_NUMBER, REPEATED, Command, Group
from thresher.common import console

BENCH = Group("bench", "benchmark Thresher, compared with peers", 120, "thresher bench step", "WHAT")

StepShape = Literal["demo", "rag", "search", "smollm2", "0.5B", "1.5B", "7B-lora"]
RolloutShape = Literal["demo", "rag", "search", "branches", "tail"]
Model = Literal["0.5B", "1.5B", "3B", "7B"]
Size = Literal[Model, "Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B"]
Chip = Literal["A100-40", "A100-80", "A800", "H100", "H200"]

Rows = Annotated[str | None, "JSONL file to append rows to"]
Picture = Annotated[str | None, "PNG file to write"]
Counts = Annotated[Sequence[Count], "N"]
CpuOrCuda = Annotated[Device, "device of the benchmark; default: cpu"]
WhereThereIsOne = Annotated[Device | None, "device of the benchmark; default: cuda if available"]
ByDevice = Annotated[Dtype | None, "dtype of the computation; default: bfloat16 on cuda, else float32"]
Budget = Annotated[Seconds, "SECONDS", "time limit, after which the remaining measurements are skipped"]


def leave(wrong: str | None) -> None:
    """End with status 1 and a sentence, if something is wrong."""
    if wrong is not None:
        sys.exit(wrong)


class Step(
    Command,
    group=BENCH,
    help="time a GRPO step, compared with TRL",
    place=10,
    example="thresher bench step --shape rag --peer none",
):
    shape: Annotated[StepShape, "shape of the model and the batch; default: demo; sizes in B require --device cuda"] = (
        "demo"
    )
    family: Annotated[Literal["qwen2", "qwen3_5"], "model family, for demo, rag and search; default: qwen2"] = "qwen2"
    model: Annotated[
        str | None, "FOLDER", "folder of a published model, in place of random weights of the shape's sizes"
    ] = None
    peer: Annotated[Literal["trl", "none"], "peer to measure"] = "trl"
    steps: Annotated[Count, "N", "number of measured steps per implementation; default: 5"] = 5
    device: CpuOrCuda = "cpu"
    threads: Annotated[Count | None, "N", "number of CPU threads; default: as a training run of this model uses"] = None
    budget: Annotated[Seconds, "SECONDS", "time limit, after which no further step begins; default: 480"] = 480.0
    profile: Annotated[str | None, "FILE", "append the time of each kernel in one more update to this file"] = None
    out: Rows = None
    plot: Annotated[str | None, "PNG file to write, of the last row of each shape in --out"] = None

    def __call__(self) -> None:
        from thresher.bench.step import StepBench, run_step_bench

        console.answer(run_step_bench(flags.fill(StepBench, self), self.out, self.plot))


class Train(
    flags.OfRecipe,
    group=BENCH,
    help="train a recipe's task with TRL: held-out scores against training time",
    place=12,
    example="thresher bench train smollm2/read.toml --beside runs/read",
):
    """bench/train.py says what is the same as in `thresher train`."""

    beside: Annotated[
        Texts,
        REPEATED,
        "[NAME=]RUN",
        "folder of `thresher train`, whose steps are added as rows, or a file of rows; may be repeated",
    ] = []
    peer: Annotated[Literal["trl", "none"], "peer to train; none: only show the rows of --beside"] = "trl"
    batch: Annotated[Count, "N", "number of samples that TRL computes at once; default: 16"] = 16
    checkpointing: Annotated[bool, "let TRL recompute activations in the backward pass"] = False
    out: Rows = None
    plot: Picture = None

    def __call__(self) -> None:
        from thresher.bench.train import TrainBench, run_train_bench

        rows = run_train_bench(flags.fill(TrainBench, self), self.read_recipe(), self.out, self.plot)
        console.answer({"rows": rows})


class Rollout(
    Command,
    group=BENCH,
    help="time sampling, compared with transformers",
    place=15,
    example="thresher bench rollout --shape demo --rounds 3",
):
    shape: Annotated[Sequence[RolloutShape], "shapes of the model and the batch; default: all of them"] = get_args(
        RolloutShape
    )
    peer: Annotated[Literal["hf", "generate_batch", "both", "none"], "peers to measure"] = "both"
    rounds: Annotated[Count, "N", "number of measured rounds per implementation; default: 5"] = 5
    device: CpuOrCuda = "cpu"
    threads: Annotated[Count | None, "N", "number of CPU threads; default: as many as torch uses"] = None
    budget: Annotated[Seconds, "SECONDS", "time limit per shape, after which no further round begins; default: 540"] = (
        540.0
    )
    out: Rows = None
    plot: Picture = None

    def __call__(self) -> None:
        from thresher.bench.rollout import RolloutBench, run_rollout_bench

        bench = flags.fill(RolloutBench, self, shapes=self.shape)
        console.answer({"rows": run_rollout_bench(bench, self.out, self.plot)})


class Decode(
    Command,
    group=BENCH,
    help="time decode steps, compared with floor and prediction",
    place=17,
    example="thresher bench decode --model 0.5B --batch 8",
):
    model: Annotated[Sequence[Size], "sizes of Qwen2.5 and Qwen3.5 models"] = ("0.5B", "1.5B", "7B")
    batch: Annotated[Count, "N", "number of sequences; default: 256"] = 256
    own: Annotated[Count, "N", "number of unshared positions per sequence; default: 300"] = 300
    shared: Annotated[Count, "N", "number of positions shared by a group; default: 1,200"] = 1200
    steps: Annotated[Count, "N", "number of timed steps; default: 64"] = 64
    device: WhereThereIsOne = None
    dtype: ByDevice = None
    budget: Budget = math.inf
    profile: Annotated[
        str | None, "FILE", "append the time of each kernel in 8 more steps of each shape to this file"
    ] = None
    out: Rows = None

    def __call__(self) -> None:
        from thresher.bench.decode import DecodeBench, run_decode_bench

        console.answer({"rows": run_decode_bench(flags.fill(DecodeBench, self, models=self.model), self.out)})


Sigma = Annotated[float, checked(float, "a number above 0, at most 4", lambda value: 0 < value <= 4)]
Percent = Annotated[int, checked(int, "a whole number from 1 to 100", lambda value: 1 <= value <= 100)]


class Loss(
    Command,
    group=BENCH,
    help="time the loss, compared with peers and with its matmuls alone",
    place=20,
    example="thresher bench loss --device cpu --peers none",
):
    device: WhereThereIsOne = None
    dtype: ByDevice = None
    hidden: Annotated[Counts | None, "hidden sizes; default: by device"] = None
    vocab: Annotated[Counts | None, "vocabulary sizes; default: by device"] = None
    tokens: Annotated[Counts | None, "numbers of tokens, including masked ones; default: by device"] = None
    density: Annotated[Sequence[Percent] | None, "PERCENT", "percentages of unmasked tokens"] = None
    peers: Annotated[str, "NAMES", "peers to measure: all, none, or comma-separated names"] = "all"
    chunk_rows: Annotated[Count | None, "rows per chunk, in ours and in the chunked naive implementation"] = None
    budget: Budget = math.inf
    out: Rows = None
    plot: Picture = None

    def __call__(self) -> None:
        from thresher.bench.loss import LossBench, failure, read_peers, run_loss_bench

        rows = run_loss_bench(flags.fill(LossBench, self, peers=read_peers(self.peers)), self.out, self.plot)
        console.answer({"rows": rows})
        leave(failure(rows))


class Attention(
    Command,
    group=BENCH,
    help="time training attention with shared prompts, compared with peers",
    place=25,
    example="thresher bench attention --model 0.5B",
):
    model: Annotated[Sequence[Model], "Qwen2.5 sizes that give the numbers of heads"] = ("0.5B", "1.5B", "7B")
    trees: Annotated[Count, "N", "number of prompts; default: 8"] = 8
    group_size: Annotated[Count, "N", "number of samples per prompt; default: 8"] = 8
    shared: Annotated[Count, "N", "number of tokens per prompt; default: 1,200"] = 1200
    own: Annotated[Count, "N", "number of tokens per sample; default: 300"] = 300
    rounds: Annotated[Count, "N", "number of measured calls per implementation; default: 20"] = 20
    device: WhereThereIsOne = None
    dtype: ByDevice = None
    budget: Budget = math.inf
    out: Rows = None

    def __call__(self) -> None:
        from thresher.bench.attention import AttentionBench, failure, run_attention_bench

        rows = run_attention_bench(flags.fill(AttentionBench, self, models=self.model, group=self.group_size), self.out)
        console.answer({"rows": rows})
        leave(failure(rows))


class Delta(
    Command,
    group=BENCH,
    help="time the gated delta rule of Qwen3.5, compared with peers",
    place=27,
    example="thresher bench delta --peer transformers",
):
    peer: Annotated[Literal["transformers", "fla", "both", "none"], "peers to measure"] = "both"
    sequences: Annotated[Count, "N", "number of sequences; default: 8"] = 8
    length: Annotated[Count, "N", "number of tokens per sequence; default: 512"] = 512
    key_heads: Annotated[Count, "N", "number of key heads; default: 16, as in Qwen3.5-0.8B"] = 16
    value_heads: Annotated[Count, "N", "number of value heads, a multiple of --key-heads; default: 16"] = 16
    dim: Annotated[Count, "N", "dimension of a head's keys and values; default: 128"] = 128
    rounds: Annotated[Count, "N", "number of measured calls per implementation; default: 9"] = 9
    device: WhereThereIsOne = None
    dtype: ByDevice = None
    out: Rows = None

    def __call__(self) -> None:
        from thresher.bench.delta import DeltaBench, failure, run_delta_bench

        row = run_delta_bench(flags.fill(DeltaBench, self), self.out)
        console.answer(row)
        leave(failure(row))


class Retrieval(
    Command,
    group=BENCH,
    help="measure recall and speed of indexes, compared with torch, numpy and FAISS, and the server under load",
    place=30,
    example="thresher bench retrieval --sizes 10000 100000",
):
    """bench/retrieval.py explains the flags."""

    sizes: Annotated[Counts, "sizes of the synthetic vector sets; default: 10^4 to 10^6"] = (10_000, 100_000, 1_000_000)
    dim: Annotated[Count, "N", "dimension of the synthetic vectors; default: 768"] = 768
    kinds: Annotated[
        Sequence[str], ANY_NUMBER, "KIND", "index kinds to measure in addition to flat; without a value: flat alone"
    ] = ("ivf", "hnsw")
    batches: Annotated[Counts, "numbers of queries per call, up to 512; default: 1 8 64 512"] = (1, 8, 64, 512)
    corpus: Annotated[str | None, "corpus of real passages, measured first, with --encoder"] = None
    encoder: Annotated[str | None, "FOLDER", "folder of a trained encoder for the real passages"] = None
    questions: Annotated[
        str | None, "FILE", "questions about the real passages; default: word sequences from the passages"
    ] = None
    passages: Annotated[Count, "N", "number of real passages; default: 10,000"] = 10_000
    work: Annotated[str | None, "FOLDER", "keep vectors and index structures in this folder, for reuse"] = None
    server: Annotated[Seconds, "SECONDS", "duration of each of the two load tests of the server; 0: none"] = 10.0
    budget: Annotated[
        Seconds, "SECONDS", "time limit, after which the remaining measurements are skipped; default: an hour"
    ] = 3600.0
    out: Rows = None
    plot: Picture = None

    def __call__(self) -> None:
        from thresher.bench.retrieval import RetrievalBench, failure, read_source, run_retrieval_bench

        source = read_source(self.corpus, self.encoder, self.passages, self.questions)
        bench = flags.fill(RetrievalBench, self, source=source, server_seconds=self.server)
        rows = run_retrieval_bench(bench, self.out, self.plot)
        console.answer({"rows": rows})
        leave(failure(rows))


class Compile(
    Command,
    group=BENCH,
    help="compile the Triton kernels for GPUs that need not be present",
    place=40,
    example="thresher bench compile --target sm_90",
):
    target: Annotated[
        list[Literal["sm_80", "sm_90"]] | None,
        REPEATED,
        "GPU architecture to compile for; may be repeated; default: both",
    ] = None
    module: Annotated[
        Texts | None,
        REPEATED,
        "dotted name of a module with kernels, in place of Thresher's kernel modules; may be repeated",
    ] = None
    triton: Annotated[
        str | None, "DIR", "folder with the unpacked wheel of another Triton, in place of the installed one"
    ] = None
    out: Rows = None

    def __call__(self) -> None:
        from thresher.bench.compile import KERNEL_MODULES, TARGETS, run_compile_bench, run_under

        targets, modules = self.target or tuple(TARGETS), self.module or KERNEL_MODULES
        if self.triton is not None:
            sys.exit(run_under(self.triton, targets, modules, self.out, self.json))
        leave(run_compile_bench(targets, modules, self.out))


class Roofline(
    Command,
    group=BENCH,
    help="predict a decode step, a rollout, an update and a step on A100 to H200",
    place=50,
    example="thresher bench roofline --chip H100 --model 7B",
):
    chip: Annotated[Sequence[Chip], "GPUs to predict for; default: all of them"] = get_args(Chip)
    model: Annotated[Sequence[str], "model sizes or model folders; default: all of Qwen2.5"] = get_args(Model)
    batch: Annotated[Count, "number of sequences; default: 256"] = 256
    sigma: Annotated[Sequence[Sigma], "sigma of the lognormal sample lengths of a rollout; default: 0.9"] = (0.9,)
    prompt: Annotated[Natural, "number of tokens shared by a group of a rollout; default: 1200"] = 1200
    out: Rows = None

    def __call__(self) -> None:
        from thresher.bench.roofline import run_roofline

        console.answer({"rows": run_roofline(self.chip, self.model, self.batch, self.sigma, self.prompt, self.out)})


class GpuCheck(
    Command,
    group=BENCH,
    help="run all checks on a GPU, in eight minutes",
    place=60,
    example="thresher bench gpu-check --parts tests,loss",
):
    """Run what `make gpu-check` runs."""

    out: Annotated[str, "DIR", "folder for the table, rows and logs; default: runs/gpu-check"] = "runs/gpu-check"
    budget: Annotated[Seconds, "SECONDS", "time limit; default: 465"] = 465.0
    parts: Annotated[
        Sequence[str] | None,
        "PART",
        "parts to run: smoke, tests, tuning, loss, attention, decode, rollout, step, racecheck; default: all",
    ] = None

    def __call__(self) -> None:
        from thresher.bench.gpu_check import failure, run_gpu_check

        outcomes = run_gpu_check(self.out, self.budget, self.parts)
        parts = [{"part": one.part.name, "how": one.how, "why": one.why, "seconds": one.seconds} for one in outcomes]
        console.answer({"parts": parts})
        leave(failure(outcomes))
