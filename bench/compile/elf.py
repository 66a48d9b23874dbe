"""Several cubins as one, for the disassembler: to start it costs more than to disassemble a kernel.

A cubin is an ELF file of 64 bits (System V Application Binary Interface, chapter 4). Kept are the sections of machine
code, each under a number of its own, and the symbols of the functions in them, by which the disassembler finds where
one begins. The code itself is not touched: what ptxas had to leave to a linker stays undone, in both.

Deliberately absent: all that running a kernel takes (constants, shared memory, register counts).
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CODE = ".text."
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_HEADER, _FIRST_OFFSETS, _COUNTS = 64, 32, 54  # bytes of the file's header, and places in it
_SYMBOLS, _STRINGS, _FUNCTION = 2, 3, 2  # types: of sections, and of a symbol


@dataclass(frozen=True, slots=True)
class ElfSection:
    """As its header has it; `link` and `info` mean what the type says. number: its place among the headers."""

    name: str
    number: int
    kind: int
    flags: int
    data: bytes
    link: int = 0
    info: int = 0
    align: int = 1
    entry: int = 0


@dataclass(frozen=True, slots=True)
class Function:
    """A symbol of a piece of code: the section it is in, where in it, and how long."""

    name: bytes
    info: int
    other: int
    section: int
    value: int
    size: int


def merged(cubins: Sequence[bytes]) -> bytes:
    """A file in which the code of cubin n is section `.text.n.<name>`. All for one GPU. Raises ValueError otherwise."""
    if len({cubin[16:20] + cubin[48:52] for cubin in cubins}) != 1:  # type, machine, and flags, which name the GPU
        raise ValueError("expected cubins for one GPU")
    code: list[ElfSection] = []
    functions: list[Function] = []
    for number, cubin in enumerate(cubins):
        found = sections(cubin)
        for section in found:
            if section.name.startswith(CODE):
                code.append(_numbered(section, number, len(code) + 1))
                prefix = f"{number}.".encode()
                functions += [
                    Function(prefix + one.name, one.info, one.other, len(code), one.value, one.size)
                    for one in _functions(found)
                    if one.section == section.number
                ]
    names = b"\0" + b"".join(one.name + b"\0" for one in functions)
    symbols, at = _SYMBOL.pack(0, 0, 0, 0, 0, 0), 1
    for one in functions:
        symbols += _SYMBOL.pack(at, one.info, one.other, one.section, one.value, one.size)
        at += len(one.name) + 1
    count = len(code)
    tables = (
        ElfSection(".strtab", count + 1, _STRINGS, 0, names),
        ElfSection(".symtab", count + 2, _SYMBOLS, 0, symbols, link=count + 1, info=1, align=8, entry=_SYMBOL.size),
    )
    return _written(cubins[0], [*code, *tables], symbols_at=count + 2)


def sections(file: bytes) -> list[ElfSection]:
    """Of an ELF file, in the order of their headers."""
    (start,) = struct.unpack_from("<Q", file, 40)
    count, of_names = struct.unpack_from("<HH", file, 60)
    heads = [_SECTION.unpack_from(file, start + number * _SECTION.size) for number in range(count)]
    names = heads[of_names][4]

    def read(number: int) -> ElfSection:
        name, kind, flags, _, at, size, link, info, align, entry = heads[number]
        end = file.index(b"\0", names + name)
        text = file[names + name : end].decode()
        return ElfSection(text, number, kind, flags, file[at : at + size], link, info, align, entry)

    return [read(number) for number in range(count)]


def _functions(found: Sequence[ElfSection]) -> Iterator[Function]:
    for table in found:
        if table.kind == _SYMBOLS:
            names = found[table.link].data
            for name, info, other, section, value, size in _SYMBOL.iter_unpack(table.data):
                if info & 15 == _FUNCTION:
                    yield Function(names[name : names.index(b"\0", name)], info, other, section, value, size)


def _numbered(section: ElfSection, cubin: int, place: int) -> ElfSection:
    name = f"{CODE}{cubin}.{section.name.removeprefix(CODE)}"
    return ElfSection(name, place, section.kind, section.flags, section.data, 0, section.info, section.align)


def _written(like: bytes, chosen: Sequence[ElfSection], symbols_at: int) -> bytes:
    """An ELF file of these sections, for the machine of `like`."""
    names = bytearray(b"\0")
    body = bytearray()
    heads = [bytes(_SECTION.size)]
    own = ElfSection(".shstrtab", len(chosen) + 1, _STRINGS, 0, b"")
    for section in (*chosen, own):
        body.extend(bytes(-(_HEADER + len(body)) % max(section.align, 1)))
        name = len(names)
        names.extend(section.name.encode() + b"\0")
        data = bytes(names) if section is own else section.data
        link = symbols_at if section.name.startswith(CODE) else section.link
        place = (0, _HEADER + len(body), len(data), link, section.info, section.align, section.entry)
        heads.append(_SECTION.pack(name, section.kind, section.flags, *place))
        body.extend(data)
    body.extend(bytes(-len(body) % 8))
    header = bytearray(like[:_HEADER])
    struct.pack_into("<QQ", header, _FIRST_OFFSETS, 0, _HEADER + len(body))
    struct.pack_into("<HHHHH", header, _COUNTS, 0, 0, _SECTION.size, len(heads), len(chosen) + 1)
    return bytes(header) + bytes(body) + b"".join(heads)
