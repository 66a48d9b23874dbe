"""A simulated CUDA device in torch's CPU build: real values, real `cuda:0` tensors, streams, events, graphs.

    import simcuda

    simcuda.install()           # once, before any call of torch.cuda
    ...                         # code that runs on "cuda"
    print(simcuda.report())     # launches, host waits by line, hazards
    assert not simcuda.hazards()

It imports nothing but torch (and triton, if installed); README.md says what it detects and what it cannot.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CHECKED = ("2.13",)  # tested versions of torch
HERE = Path(__file__).resolve().parent
SOURCE = HERE / "device.cpp"
FRAMES = 2  # Python frames in the location of a wait or a hazard

_c: Any = None
_root = ""


def missing() -> str | None:
    """Return the reason why no device can be simulated here, or None."""
    version = torch.__version__.partition("+")[0]
    if version.rpartition(".")[0] not in CHECKED:
        return f"torch is {version}; simcuda was checked with {', '.join(CHECKED)}"
    if torch.version.cuda is not None and _c is None:
        return "this torch has CUDA of its own"
    if sys.platform != "linux":
        return "simcuda is built on Linux alone"
    if not library().exists():
        if shutil.which("g++") is None:
            return "there is no g++ to build it"
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
            return "Python.h is not installed"
        above = next(folder for folder in library().parents if folder.exists())
        if not os.access(above, os.W_OK):
            return f"{above}, where it would be built, cannot be written"
    return None


def library() -> Path:
    """Return the path of the built extension, existing or not: one for each source, torch and Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "simcuda"
    key = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    return cache / f"_simcuda-{key}-{torch.__version__}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> Path:
    """Compile the extension unless it exists, which takes a minute; return its file. RuntimeError: the compiler's
    output."""
    made = library()
    made.parent.mkdir(parents=True, exist_ok=True)
    if made.exists():
        return made
    lib = Path(torch.__file__).parent / "lib"
    include = Path(torch.__file__).parent / "include"
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        new = Path(scratch) / made.name
        command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_simcuda"]
        command += ["-DTORCH_API_INCLUDE_EXTENSION_H"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-I{sysconfig.get_paths()['include']}"]
        command += [str(SOURCE), "-o", str(new), f"-L{lib}", f"-Wl,-rpath,{lib}"]
        command += [f"-l{name}" for name in ("torch_cpu", "c10", "torch_python", "torch")]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"g++ could not build {SOURCE.name}:\n{run.stderr[-4000:]}")
        os.replace(new, made)  # another process may have finished first
    return made


def install(root: str | Path = ".", capability: tuple[int, int] = (8, 0), memory: int = 80 << 30) -> None:
    """Install the device in torch. Locations are reported as lines of files under `root`. memory: its bytes."""
    global _c, _root
    if _c is not None:
        return
    if why := missing():
        raise RuntimeError(f"simcuda: {why}")
    spec = importlib.util.spec_from_file_location("_simcuda", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _c, _root = module, str(Path(root).resolve()) + os.sep
    _c.where_with(_where)
    _c.set_total_memory(memory)
    _patch_torch_cuda(capability)
    _register_operations()
    _patch_triton()


def _where() -> str:
    """Return the innermost lines of the project, innermost first."""
    found = list[str]()
    frame: Any = sys._getframe()
    while frame is not None and len(found) < FRAMES:
        name = frame.f_code.co_filename
        if name.startswith(_root) and not name.startswith(str(HERE)) and "site-packages" not in name:
            found.append(f"{os.path.relpath(name, _root)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "outside the project"


# --- Records


def counts() -> dict[str, int]:
    """Return the numbers of launches, kernels (those not torch's), views, allocations, syncs, captures, replays and
    replayed nodes."""
    return dict(_c.counts())


def syncs() -> dict[str, int]:
    """Return how often the host waited for the device, by the call that waited and its location."""
    return dict(_c.syncs())


def operations() -> dict[str, int]:
    """Return the launches of torch's operations by name, without those in graphs."""
    return dict(_c.operations())


def hazards() -> list[tuple[str, str]]:
    """Return errors on a real device as (kind, what and where). Kinds: race, free, pinned-reuse, graph-freed."""
    return list(_c.hazards())


def reset() -> None:
    """Forget counts, waits and hazards."""
    _c.reset()


def report() -> str:
    """Return counts, waits by place and hazards as lines."""
    lines = [", ".join(f"{name} {count:,}" for name, count in counts().items())]
    lines += [f"{count:7d}  {at}" for at, count in sorted(syncs().items(), key=lambda entry: -entry[1])]
    return "\n".join(lines + [f"HAZARD {kind}: {what}" for kind, what in hazards()])


# --- Host functions that count as one kernel of the device


def one_launch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one launch on its tensors of the device. It computes on their memory, as CPU tensors; its
    results are new. A graph may contain it."""

    def launched(*args: Any) -> Any:
        tensors = [x for x in _tensors(args) if x.is_cuda]
        if not tensors:
            return function(*args)
        _c.launch(tensors)
        host = [_on_host(x) for x in args]
        results = function(*host)
        several = isinstance(results, tuple)
        found = list(results) if several else [results] if results is not None else []
        made = [torch.empty_like(x, device="cuda") for x in found]
        into = [_c.alias(x) for x in made]

        def again() -> None:
            results = function(*host)
            fill(results if several else [results])

        def fill(values: Any) -> None:
            for x, value in zip(into, values, strict=True):
                x.copy_(value)

        fill(found)
        if _c.capturing():
            _c.record_call(again)
        return tuple(made) if several else made[0] if made else None

    return launched


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _c.alias(value) if value.is_cuda else value
    if isinstance(value, tuple):
        made = tuple(map(_on_host, value))
        return type(value)(*made) if hasattr(value, "_fields") else made
    return value


# --- torch.cuda


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self._event = _c.Event(enable_timing)

    def record(self, stream: Stream | None = None) -> None:
        self._event.record(_id(stream))

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait(_id(stream))

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())

    def elapsed_time(self, other: Event) -> float:
        return float(self._event.elapsed_time(other._event))


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        return super().__new__(cls, **ids) if ids else super().__new__(cls, device="cuda:0")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        _c.wait_stream(_id(self), _id(other))

    def synchronize(self) -> None:
        _c.synchronize_stream(_id(self))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


def _id(stream: Stream | None) -> int:
    return int(_c.current_stream() if stream is None else stream.stream_id)


def _stream(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=1)


@contextmanager
def _in_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = _c.set_stream(stream.stream_id)
    try:
        yield
    finally:
        _c.set_stream(before)


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = _c.Graph()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if _c.current_stream() == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream (simulated)")
        self._graph.begin()

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        self._graph.replay()

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def reset(self) -> None:
        self._graph = _c.Graph()

    @property
    def nodes(self) -> int:
        """Return the number of operations and kernels of a replay."""
        return int(self._graph.nodes)


class _Capture:
    """Stand-in for torch.cuda.graph."""

    stream: Stream | None = None  # of all captures that name none

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any):
        _Capture.stream = _Capture.stream or Stream()
        self.graph, self.stream = cuda_graph, stream or _Capture.stream

    def __enter__(self) -> None:
        _c.synchronize()
        self.before = _c.set_stream(self.stream.stream_id)
        self.graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self.graph.capture_end()
        _c.set_stream(self.before)


def _patch_torch_cuda(capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(
        name="Simulated GPU",
        major=capability[0],
        minor=capability[1],
        total_memory=_c.memory()[2],
        multi_processor_count=108,
        L2_cache_size=40 << 20,
        shared_memory_per_block_optin=163 << 10,
        shared_memory_per_multiprocessor=164 << 10,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        gcnArchName="",
        uuid="simulated",
    )

    def memory_stats(device: Any = None) -> dict[str, int]:
        now, peak, _ = _c.memory()
        stats = {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}
        return stats | {"num_alloc_retries": 0, "num_ooms": 0}

    one_value: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "graph_pool_handle": (0, 1),
        **dict.fromkeys(("init", "_lazy_init", "set_device", "empty_cache", "ipc_collect"), None),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), None),
    }
    functions: dict[str, Any] = {name: lambda *_, value=value, **__: value for name, value in one_value.items()} | {
        "mem_get_info": lambda device=None: (_c.memory()[2] - _c.memory()[0], _c.memory()[2]),
        "memory_allocated": lambda device=None: _c.memory()[0],
        "memory_reserved": lambda device=None: _c.memory()[0],
        "max_memory_allocated": lambda device=None: _c.memory()[1],
        "max_memory_reserved": lambda device=None: _c.memory()[1],
        "reset_peak_memory_stats": lambda device=None: _c.reset_peak(),
        "memory_stats": memory_stats,
        "synchronize": lambda device=None: _c.synchronize(),
        "current_stream": lambda device=None: _stream(_c.current_stream()),
        "default_stream": lambda device=None: _stream(0),
        "set_stream": lambda stream: _c.set_stream(stream.stream_id),
        "is_current_stream_capturing": lambda: _c.capturing(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "stream": _in_stream,
        "graph": _Capture,
        "device": lambda device=None: nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
    }
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = lambda: True

    # torch.load moves storages by a resize and a copy that are compiled into torch's CUDA build.
    move = torch.storage._to

    def move_storage(self: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type != "cuda" or self.device == device:
            return move(self, device, non_blocking)
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device="cuda")
        made.copy_(torch.empty(0, dtype=torch.uint8).set_(self), non_blocking)
        return made.untyped_storage()

    torch.storage._to = move_storage


# --- Operations that only CUDA has. They are registered for the CPU, whose kernels the device calls.


def _mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return a.to(dtype) @ b.to(dtype)


def _addmm(c: Any, a: Any, b: Any, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = alpha * _mm(a, b, dtype)
    return product if beta == 0 else beta * c.to(dtype) + product


def _mm_out(a: Any, b: Any, dtype: torch.dtype, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_mm(a, b, dtype))


def _addmm_out(c: Any, a: Any, b: Any, dtype: Any, *, beta: float = 1, alpha: float = 1, out: Any) -> torch.Tensor:
    return out.copy_(_addmm(c, a, b, dtype, beta=beta, alpha=alpha))


def _scores(q: Any, k: Any, scale: float, causal: bool) -> torch.Tensor:
    s = torch.einsum("qnd,knd->nqk", q, k) * scale
    if not causal:
        return s
    rows, keys = len(q), len(k)
    return s.masked_fill(torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows, -torch.inf)


def _sequences(cu_q: Any, cu_k: Any) -> Iterator[tuple[slice, slice]]:
    for (a, c), (b, d) in pairwise(zip(cu_q.tolist(), cu_k.tolist(), strict=True)):
        yield slice(a, b), slice(c, d)


def _causal(causal: bool, left: int | None, right: int | None) -> bool:
    return causal or (left in (None, -1) and right == 0)


def _flash(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float, causal: bool, _: bool,
           *, scale: float | None = None, window_size_left: Any = None, window_size_right: Any = None,
           seqused_k: Any = None, alibi_slopes: Any = None, **paged: Any) -> Any:  # fmt: skip
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data types (simulated)")
    dense = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if not (dense and cu_q.dtype == torch.int32 and cu_q.is_contiguous() and q.shape[-1] % 8 == 0):
        raise RuntimeError("FlashAttention: operands that it does not take (simulated)")
    if max_q < int(cu_q.diff().max()) or max_k < int(cu_k.diff().max()):
        raise RuntimeError("FlashAttention: a sequence is longer than the maximum that was given (simulated)")
    if dropout or window_size_left not in (None, -1) or not (seqused_k is alibi_slopes is None):
        raise NotImplementedError("FlashAttention with dropout, a window, alibi or lengths of keys is not simulated")
    causal, scale = _causal(causal, window_size_left, window_size_right), scale or q.shape[-1] ** -0.5
    out, repeats = torch.zeros_like(q), q.shape[1] // k.shape[1]
    lse = torch.full((q.shape[1], q.shape[0]), torch.inf)
    for rows, keys in _sequences(cu_q, cu_k):
        k_, v_ = (x[keys].float().repeat_interleave(repeats, 1) for x in (k, v))
        s = _scores(q[rows].float(), k_, scale, causal)
        norm = s.logsumexp(-1)
        lse[:, rows] = norm.masked_fill(norm == -torch.inf, torch.inf)
        out[rows] = torch.einsum("nqk,knd->qnd", (s - norm[..., None]).exp().nan_to_num(0), v_).to(q.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
                    dropout: float, causal: bool, state: Any, unused: Any, *, scale: float | None = None,
                    window_size_left: Any = None, window_size_right: Any = None) -> Any:  # fmt: skip
    if lse.shape != (q.shape[1], q.shape[0]) or not lse.is_contiguous() or lse.dtype != torch.float32:
        raise RuntimeError("FlashAttention: log-sums that it does not take (simulated)")
    causal, scale = _causal(causal, window_size_left, window_size_right), scale or q.shape[-1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    for rows, keys in _sequences(cu_q, cu_k):
        k_, v_ = (x[keys].float().repeat_interleave(repeats, 1) for x in (k, v))
        q_, grad_ = q[rows].float(), grad[rows].float()
        p = (_scores(q_, k_, scale, causal) - lse[:, rows, None]).exp().nan_to_num(0)
        dp = torch.einsum("qnd,knd->nqk", grad_, v_)
        ds = p * (dp - (grad_ * out[rows].float()).sum(-1).t()[..., None]) * scale
        dq[rows] = torch.einsum("nqk,knd->qnd", ds, k_).to(q.dtype)
        dk[keys] = torch.einsum("nqk,qnd->knd", ds, q_).unflatten(1, (heads, repeats)).sum(2).to(k.dtype)
        dv[keys] = torch.einsum("nqk,qnd->knd", p, grad_).unflatten(1, (heads, repeats)).sum(2).to(v.dtype)
    return dq, dk, dv


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mm.dtype": _mm,
    "mm.dtype_out": _mm_out,
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm_out,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
}
_library: Any = None  # torch removes the operations when this object is freed


def _register_operations() -> None:
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name, function in _OPERATIONS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
            _library.impl(name, function, "CPU")


# --- Triton: its interpreter, on the device's memory


def _patch_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(x.is_cuda for x in tensors):
            return interpret(self, *args, **kwargs)
        _c.launch(tensors)
        args, kwargs = _on_host(args), {name: _on_host(x) for name, x in kwargs.items()}
        if _c.capturing():
            _c.record_call(lambda: interpret(self, *args, **kwargs))
        return interpret(self, *args, **kwargs)

    GridExecutor.__call__ = launch


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
