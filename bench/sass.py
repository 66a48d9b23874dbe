"""The machine code of a kernel, disassembled, and cut into prologue, loops and epilogue.

    prologue   not in a loop, and a loop can be reached from it
    loop       in a loop; a loop inside another counts once
    epilogue   the rest. A kernel without a loop, or with only unrolled loops, is all epilogue

An instruction is in a loop if its basic block can be reached from itself; a subroutine is in a loop if a call to it is.
A backward jump is not sufficient: ptxas puts rare paths after the end of a kernel, and they jump back. Instructions are
counted in the text, not as executed. Widths are a thread's bytes of one instruction.
"""

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_LABEL = re.compile(r"^(\.L_\w+|\.L\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_GOES_TO = re.compile(r"`\((\.L\w+)\)")
# A section's number, and the text up to the next section.
_CODE_OF = re.compile(r"^\s*\.section\s+\.text\.(\d+)\.(.*?)(?=^\s*\.section\s|\Z)", re.MULTILINE | re.DOTALL)
_ENDS = ("EXIT", "RET", "BRX", "JMP", "KILL")
_WIDE = 16
# Share of bytes in narrower instructions above which a bulk path counts as narrow; a few scalars stay below it.
NARROW_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction. guarded: under a predicate, so that the next one may follow although this one jumps."""

    opcode: str
    operands: str
    guarded: bool

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str | None:
        return found[1] if (found := _GOES_TO.search(self.operands)) else None

    @property
    def conditional(self) -> bool:
        """Return True for a branch that may fall through; a uniform predicate is among its operands."""
        return self.guarded or _GOES_TO.sub("", self.operands).strip(" ,") != ""

    @property
    def width(self) -> int:
        """Return the bytes that a thread moves: 16 for .128, 4 without a suffix."""
        parts = self.opcode.split(".")[1:]
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((sizes[part] for part in parts if part in sizes), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a kernel. loads and stores of global memory: bytes that a thread moves per instruction -> number of
    such instructions; copies: loads that go to shared memory without passing registers. bulk: copies by the tensor
    memory accelerator. spill_loads and spill_stores: instructions on local memory."""

    instructions: int
    loads: dict[int, int]
    copies: dict[int, int]
    stores: dict[int, int]
    bulk: int
    spill_loads: int
    spill_stores: int

    @property
    def loaded(self) -> int:
        """Return the bytes that a thread loads in one pass."""
        return sum(width * count for width, count in self.loads.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A kernel in its three parts. loops: instructions of each loop, the longest first."""

    prologue: Region
    loop: Region
    epilogue: Region
    loops: tuple[int, ...]

    @property
    def outside(self) -> tuple[Region, Region]:
        return self.prologue, self.epilogue

    @property
    def spills_in_loops(self) -> int:
        return self.loop.spill_loads + self.loop.spill_stores

    @property
    def spills_outside(self) -> int:
        return sum(part.spill_loads + part.spill_stores for part in self.outside)

    @property
    def asynchronous(self) -> bool:
        return any(part.copies or part.bulk for part in (*self.outside, self.loop))

    def bulk_path(self, what: str) -> dict[int, int]:
        """Return the relevant "loads" or "stores", by width: those of the loops, or all if the loops have none."""
        inside: dict[int, int] = getattr(self.loop, what)
        before, behind = (Counter[int](getattr(part, what)) for part in self.outside)
        return inside or dict(before + behind)

    def narrow(self) -> tuple[str, ...]:
        """Return the parts of the bulk path that are narrower than 16 bytes, each as the end of a sentence."""
        found = []
        for what in ("loads", "stores"):
            widths = self.bulk_path(what)
            total = sum(width * count for width, count in widths.items())
            below = {width: count for width, count in sorted(widths.items()) if width < _WIDE}
            if sum(width * count for width, count in below.items()) > NARROW_SHARE * total:
                said = " and ".join(f"{count} of {width} bytes" for width, count in below.items())
                found.append(f"has narrow {what} ({said}) where 16 bytes are expected")
        return tuple(found)


def disassemble(cubins: Sequence[bytes], folder: str) -> list[str]:
    """Return nvdisasm's text of each cubin, all for one GPU. folder: for its input file."""
    from triton import knobs

    path = f"{folder}/kernels.cubin"
    with open(path, "wb") as file:
        file.write(merged(cubins))
    # Without data-flow analysis, which does not change the text for ptxas's output of Triton kernels.
    command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm could not read the kernels: {done.stderr.strip()}")
    texts = [""] * len(cubins)
    for number, text in _CODE_OF.findall(done.stdout):
        texts[int(number)] += text
    return texts


def read_code(text: str) -> Code:
    """Split a disassembly. Raises RuntimeError if it has no instructions, as after a change of the format."""
    blocks, labels = _blocks(text)
    if not blocks:
        raise RuntimeError(f"no instructions in what nvdisasm wrote; has its format changed?\n{text[:500]}")
    graph, calls = _graph(blocks, labels)
    behind = [_reachable(graph, after) for after in graph]
    looping = [block for block, after in enumerate(behind) if block in after]
    # Blocks that can be reached from each other are one loop: a strongly connected component of the graph.
    loops = {frozenset(other for other in looping if other in behind[one] and one in behind[other]) for one in looping}
    inside = set(looping)
    for _ in calls:  # a subroutine may call another
        for caller, callee in calls:
            if caller in inside:
                inside |= _reachable(graph, [callee])
    before = {block for block, after in enumerate(behind) if block not in inside and after & inside}
    after = set(range(len(blocks))) - inside - before
    sizes = sorted((sum(len(blocks[block]) for block in part) for part in loops), reverse=True)
    prologue, loop, epilogue = (_region(blocks, chosen) for chosen in (before, inside, after))
    return Code(prologue=prologue, loop=loop, epilogue=epilogue, loops=(*sizes,))


def _blocks(text: str) -> tuple[list[list[Instruction]], dict[str, int]]:
    """Return basic blocks by address, and label -> block. A block ends at a label and after a jump."""
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            one = Instruction(found[3], found[4], found[2] is not None and found[2] != "@PT")
            # After the end, ptxas puts a branch to itself and fills up with NOPs.
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
    """Return the blocks that may follow each block, and the calls of subroutines, (block, block)."""
    graph: list[set[int]] = []
    calls = []
    for number, block in enumerate(blocks):
        last = block[-1]
        target = labels.get(str(last.target))
        follows = True
        after: set[int] = set()
        if last.kind == "BRA":
            after |= {target} if target is not None else set()
            follows = last.conditional
        elif last.kind == "CALL" and target is not None:
            calls.append((number, target))
        elif last.kind in _ENDS:
            follows = last.guarded
        if follows and number + 1 < len(blocks):
            after.add(number + 1)
        graph.append(after)
    # ptxas also jumps by CALL, to code that never returns.
    returning = {number for number, block in enumerate(blocks) if block[-1].kind == "RET"}
    subroutines = []
    for caller, callee in calls:
        if _reachable(graph, [callee]) & returning:
            subroutines.append((caller, callee))
        else:
            graph[caller] = {callee} | (graph[caller] if blocks[caller][-1].guarded else set())
    return graph, subroutines


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


# several cubins in one file: starting the disassembler takes longer than disassembling a kernel

CODE = ".text."
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_HEADER, _FIRST_OFFSETS, _COUNTS = 64, 32, 54  # bytes of the file's header, and offsets in it
_SYMBOLS, _STRINGS, _FUNCTION = 2, 3, 2  # types: of sections, and of a symbol


@dataclass(frozen=True, slots=True)
class ElfSection:
    """A section with the fields of its header; the meaning of `link` and `info` depends on the type."""

    name: str
    kind: int
    flags: int
    data: bytes
    link: int = 0
    info: int = 0
    align: int = 1
    entry: int = 0


def merged(cubins: Sequence[bytes]) -> bytes:
    """Return a file in which the code of cubin n is section `.text.n.<name>`; all are for one GPU.

    A cubin is an ELF file of 64 bits (System V Application Binary Interface, chapter 4). The file has the sections of
    machine code and the symbols of the functions in them, which mark where functions begin for the disassembler.
    """
    code: list[ElfSection] = []
    names, symbols = b"\0", bytes(_SYMBOL.size)
    for number, cubin in enumerate(cubins):
        found = sections(cubin)
        places: dict[int, int] = {}  # index of a code section: in its cubin -> in the new file
        for at, section in enumerate(found):
            if section.name.startswith(CODE):
                name = f"{CODE}{number}.{section.name.removeprefix(CODE)}"
                code.append(replace(section, name=name, link=0, entry=0))
                places[at] = len(code)
        for table in (section for section in found if section.kind == _SYMBOLS):
            for name_at, info, other, at, value, size in _SYMBOL.iter_unpack(table.data):
                if info & 15 == _FUNCTION and at in places:
                    symbols += _SYMBOL.pack(len(names), info, other, places[at], value, size)
                    names += b"%d.%s\0" % (number, _text(found[table.link].data, name_at))
    of_names, of_symbols = len(code) + 1, len(code) + 2
    tables = (
        ElfSection(".strtab", _STRINGS, 0, names),
        ElfSection(".symtab", _SYMBOLS, 0, symbols, link=of_names, info=1, align=8, entry=_SYMBOL.size),
    )
    return _written(cubins[0], [*(replace(one, link=of_symbols) for one in code), *tables])


def _text(data: bytes, at: int) -> bytes:
    return data[at : data.index(b"\0", at)]


def sections(file: bytes) -> list[ElfSection]:
    """Return the sections of an ELF file, in the order of their headers."""
    (start,) = struct.unpack_from("<Q", file, 40)
    count, of_names = struct.unpack_from("<HH", file, 60)
    heads = [_SECTION.unpack_from(file, start + number * _SECTION.size) for number in range(count)]
    names = heads[of_names][4]
    return [
        ElfSection(_text(file, names + name).decode(), kind, flags, file[at : at + size], link, info, align, entry)
        for name, kind, flags, _, at, size, link, info, align, entry in heads
    ]


def _written(like: bytes, chosen: Sequence[ElfSection]) -> bytes:
    """Return an ELF file of these sections, for the machine of `like`."""
    names, body = b"\0", b""
    heads = [bytes(_SECTION.size)]
    own = ElfSection(".shstrtab", _STRINGS, 0, b"")
    for section in (*chosen, own):
        body += bytes(-(_HEADER + len(body)) % max(section.align, 1))
        name = len(names)
        names += section.name.encode() + b"\0"
        data = names if section is own else section.data
        place = (0, _HEADER + len(body), len(data), section.link, section.info, section.align, section.entry)
        heads.append(_SECTION.pack(name, section.kind, section.flags, *place))
        body += data
    body += bytes(-len(body) % 8)
    header = bytearray(like[:_HEADER])
    struct.pack_into("<QQ", header, _FIRST_OFFSETS, 0, _HEADER + len(body))
    struct.pack_into("<HHHHH", header, _COUNTS, 0, 0, _SECTION.size, len(heads), len(chosen) + 1)
    return bytes(header) + body + b"".join(heads)
