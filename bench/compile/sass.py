"""What the assembler made of a kernel: its machine code, disassembled, and cut into prologue, loops and epilogue.

The disassembler is NVIDIA's nvdisasm, which Triton brings; it is run once for all kernels (elf.py). Its text gives
instructions in the order of their addresses, labels, and the labels that branches go to. From these a graph of basic
blocks is made. An instruction is in a loop where its block can be reached from itself: a strongly connected component
of the graph (Tarjan 1972). A jump backwards is not enough, for ptxas puts rare paths behind the end of a kernel, and
they jump back. A subroutine is in a loop where a call to it is.

    prologue   not in a loop, and a loop can be reached from it
    loop       in a loop; a loop inside another counts once
    epilogue   the rest. A kernel without a loop, or whose loops were unrolled, is all epilogue

Counted are instructions of the program's text, not of its run. Widths are a thread's bytes of one instruction.

Deliberately absent: trip counts, latencies, bank conflicts; all need a run.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thresher.bench.compile.elf import merged

_LABEL = re.compile(r"^(\.L_\w+|\.L\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_GOES_TO = re.compile(r"`\((\.L\w+)\)")
# A section's number, and what follows up to the next one.
_CODE_OF = re.compile(r"^\s*\.section\s+\.text\.(\d+)\.(.*?)(?=^\s*\.section\s|\Z)", re.MULTILINE | re.DOTALL)
_ENDS = ("EXIT", "RET", "BRX", "JMP", "KILL")
_WIDE = 16
# More than this share of the bytes, moved by narrower instructions, is no bulk path any more: a few scalars are.
NARROW_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Instruction:
    """guarded: under a predicate, so that the next one may follow although this one jumps or ends."""

    opcode: str
    operands: str
    guarded: bool

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str | None:
        found = _GOES_TO.search(self.operands)
        return found[1] if found else None

    @property
    def conditional(self) -> bool:
        """A branch on a uniform predicate has it among its operands."""
        return self.guarded or _GOES_TO.sub("", self.operands).strip(" ,") != ""

    @property
    def width(self) -> int:
        """Bytes that a thread moves: .128 is 16 of them, none said is 4."""
        parts = self.opcode.split(".")[1:]
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[part] for part in parts if part in sizes), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a kernel. loads and stores of global memory: bytes a thread moves by one instruction -> number of such
    instructions; copies: those of the loads that go to shared memory without passing registers. bulk: copies by the
    tensor memory accelerator. spill_loads and spill_stores: instructions on local memory."""

    instructions: int
    loads: dict[int, int]
    copies: dict[int, int]
    stores: dict[int, int]
    bulk: int
    spill_loads: int
    spill_stores: int

    @property
    def loaded(self) -> int:
        """Bytes that a thread loads in one pass."""
        return sum(width * count for width, count in self.loads.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A kernel in its three parts. loops: instructions of each loop, the longest first."""

    prologue: Region
    loop: Region
    epilogue: Region
    loops: tuple[int, ...]

    @property
    def spills_in_loops(self) -> int:
        return self.loop.spill_loads + self.loop.spill_stores

    @property
    def spills_outside(self) -> int:
        return sum(part.spill_loads + part.spill_stores for part in (self.prologue, self.epilogue))

    @property
    def asynchronous(self) -> bool:
        return any(part.copies or part.bulk for part in (self.prologue, self.loop, self.epilogue))

    def bulk_path(self, what: str) -> dict[int, int]:
        """The "loads" or the "stores" that matter, by width: those of the loops, or all where the loops have none."""
        inside: dict[int, int] = getattr(self.loop, what)
        if inside:
            return inside
        outside: Counter[int] = Counter()
        for part in (self.prologue, self.epilogue):
            outside.update(getattr(part, what))
        return dict(outside)

    def narrow(self) -> tuple[str, ...]:
        """What of the bulk path is narrower than 16 bytes, each as the end of a sentence."""
        found = []
        for what in ("loads", "stores"):
            widths = self.bulk_path(what)
            total = sum(width * count for width, count in widths.items())
            below = {width: count for width, count in sorted(widths.items()) if width < _WIDE}
            if sum(width * count for width, count in below.items()) > NARROW_SHARE * total:
                said = " and ".join(f"{count} of {width} bytes" for width, count in below.items())
                found.append(f"has narrow {what} ({said}) where 16 bytes are meant")
        return tuple(found)


def disassemble(cubins: Sequence[bytes], folder: str) -> list[str]:
    """nvdisasm's text of each cubin, all for one GPU; `folder` is for a file that it reads."""
    from triton import knobs

    path = f"{folder}/kernels.cubin"
    with open(path, "wb") as file:
        file.write(merged(cubins))
    # Without its analysis of data flow, which gives the same text of what ptxas makes of Triton's kernels.
    command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm could not read the kernels: {done.stderr.strip()}")
    texts = [""] * len(cubins)
    for number, text in _CODE_OF.findall(done.stdout):
        texts[int(number)] += text
    return texts


def read_code(text: str) -> Code:
    """Cut a disassembly up. Raises RuntimeError where it holds no instructions, as after a change of its form."""
    blocks, labels = _blocks(text)
    if not blocks:
        raise RuntimeError(f"no instructions in what nvdisasm wrote; has its form changed?\n{text[:500]}")
    graph, calls = _graph(blocks, labels)
    loops = [part for part in _components(graph) if len(part) > 1 or part[0] in graph[part[0]]]
    inside = {block for part in loops for block in part}
    for _ in calls:  # a subroutine may call another
        for caller, callee in calls:
            if caller in inside:
                inside |= _reachable(graph, [callee])
    before = {block for block in range(len(blocks)) if block not in inside and _reachable(graph, [block]) & inside}
    after = set(range(len(blocks))) - inside - before
    sizes = sorted((sum(len(blocks[block]) for block in part) for part in loops), reverse=True)
    return Code(
        prologue=_region(blocks, before), loop=_region(blocks, inside), epilogue=_region(blocks, after), loops=(*sizes,)
    )


def _blocks(text: str) -> tuple[list[list[Instruction]], dict[str, int]]:
    """Basic blocks in the order of their addresses, and label -> block. A block ends at a label and behind a jump."""
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            one = Instruction(found[3], found[4], found[2] is not None and found[2] != "@PT")
            # Behind the end ptxas puts a branch to itself and fills up with NOPs.
            to_itself = not blocks[-1] and labels.get(str(one.target)) == len(blocks) - 1
            if one.kind == "NOP" or (one.kind == "BRA" and not one.conditional and to_itself):
                continue
            blocks[-1].append(one)
            if one.kind in ("BRA", "CALL", *_ENDS):
                blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    return blocks, {label: block for label, block in labels.items() if block < len(blocks)}


def _graph(
    blocks: Sequence[Sequence[Instruction]], labels: dict[str, int]
) -> tuple[list[set[int]], list[tuple[int, int]]]:
    """Which blocks may follow each block, and the calls of subroutines, (block, block)."""
    graph: list[set[int]] = []
    calls = []
    for number, block in enumerate(blocks):
        last = block[-1] if block else None
        target = labels.get(str(last.target)) if last is not None else None
        follows = True
        after: set[int] = set()
        if last is not None and last.kind == "BRA":
            after |= {target} if target is not None else set()
            follows = last.conditional
        elif last is not None and last.kind == "CALL" and target is not None:
            calls.append((number, target))
        elif last is not None and last.kind in _ENDS:
            follows = last.guarded
        if follows and number + 1 < len(blocks):
            after.add(number + 1)
        graph.append(after)
    # ptxas also jumps by CALL, to code from which nothing returns.
    returning = {number for number, block in enumerate(blocks) if block and block[-1].kind == "RET"}
    subroutines = []
    for caller, callee in calls:
        if _reachable(graph, [callee]) & returning:
            subroutines.append((caller, callee))
        else:
            graph[caller] = {callee} | (graph[caller] if blocks[caller][-1].guarded else set())
    return graph, subroutines


def _components(graph: Sequence[Iterable[int]]) -> list[list[int]]:
    """Strongly connected components, without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for root in range(len(graph)):
        if root in index:
            continue
        work = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            block, rest = work[-1]
            follower = next(rest, None)
            if follower is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[block])
                if low[block] == index[block]:
                    at = stack.index(block)
                    found.append(stack[at:])
                    on_stack -= set(stack[at:])
                    del stack[at:]
            elif follower not in index:
                index[follower] = low[follower] = len(index)
                stack.append(follower)
                on_stack.add(follower)
                work.append((follower, iter(graph[follower])))
            elif follower in on_stack:
                low[block] = min(low[block], index[follower])
    return found


def _reachable(graph: Sequence[Iterable[int]], start: Iterable[int]) -> set[int]:
    seen: set[int] = set()
    waiting = list(start)
    while waiting:
        block = waiting.pop()
        if block not in seen:
            seen.add(block)
            waiting.extend(graph[block])
    return seen


def _region(blocks: Sequence[Sequence[Instruction]], chosen: Iterable[int]) -> Region:
    code = [one for number in sorted(chosen) for one in blocks[number]]

    def widths(*kinds: str) -> dict[int, int]:
        return dict(sorted(Counter(one.width for one in code if one.kind in kinds).items()))

    kinds = Counter(one.kind for one in code)
    return Region(
        instructions=len(code),
        loads=widths("LDG", "LD", "LDGSTS"),
        copies=widths("LDGSTS"),
        stores=widths("STG", "ST"),
        bulk=sum(count for kind, count in kinds.items() if kind.startswith(("UTMA", "UBLKCP"))),
        spill_loads=kinds["LDL"],
        spill_stores=kinds["STL"],
    )
