"""Reading and writing of weights in Hugging Face's safetensors layouts: model.safetensors, or shards with an index.

A folder must have exactly the tensors of the model, in its shapes. Lengths, names, shapes, dtypes and the index are
checked first, from the headers, so a wrong folder is refused in milliseconds. Tensors are then mapped from the file and
yielded one by one, so peak memory is the model plus one tensor. Pickled files (pytorch_model.bin), which can run code
when opened, and quantised dtypes are refused.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from thresher.common.errors import UserError
from thresher.common.files import (
    atomic_path,
    atomic_write_text,
    check_file,
    need_room,
    parse_json_object,
    read_json_object,
)
from thresher.common.hashes import check_hashes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BYTES_OF_DTYPE = {"F32": 4, "BF16": 2, "F16": 2}
# Buffers that older files have next to the weights (BERT's position_ids). They are never requested and never yielded.
_BYTES_OF_BUFFER = {"I64": 8}
_HEADER_LIMIT = 100_000_000
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# A tied head has no separate tensor, but some files have a copy of the embedding.
_COPY = "lm_head.weight"
_COPIED = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")

Built = TypeVar("Built", bound=torch.nn.Module)


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: torch.Size
    dtype: str


def tensor_shapes(folder: str | Path) -> dict[str, torch.Size]:
    """Return name -> shape of every tensor of a model folder, in file order, from the headers alone."""
    return {name: entry.shape for name, entry in _locate(Path(folder)).items()}


def build_unallocated(build: Callable[[], Built], layers: int, found: Sized, config: Path) -> Built:
    """Build a module on the meta device, from the sizes in the file `config`. UserError for more `layers` than there
    are tensors in the files (`found`), which would take hours to build, and for sizes whose product overflows."""
    if layers > len(found):
        raise UserError(
            f"{config}: specifies {layers:,} layers, but the weights have {len(found):,} tensors; use the config.json "
            "that belongs to these weights, or fetch them again"
        )
    try:
        with torch.device("meta"):
            return build()
    except RuntimeError:
        raise UserError(
            f"{config}: its sizes are too large for any tensor; use the config.json that belongs to these weights"
        ) from None


def read_weights(
    folder: str | Path, expected: Mapping[str, torch.Size], *, optional: Set[str] = frozenset(), verify: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (name, CPU tensor in float32, bfloat16 or float16) of a model folder, in file order.

    The folder must have every name of `expected`, in its shape, and no other; those in `optional` may be absent. An
    optional name that is not in `expected` is not yielded; `lm_head.weight` is then the copy of a tied head and must
    equal the embedding. Everything is checked before this returns, except that the numbers are finite, which is checked
    for each tensor before it is yielded. The tensors are backed by the files. verify: check the folder's hashes first,
    if there are any.
    """
    folder = Path(folder)
    if verify:
        check_hashes(folder, _weight_files(folder))
    entries = _locate(folder)
    _check_names(folder, entries, expected, optional)
    for name, entry in entries.items():
        if name in expected and entry.shape != expected[name]:
            raise UserError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, the config specifies "
                f"{list(expected[name])}; use the config.json that belongs to these weights"
            )
        if name in expected and entry.dtype not in _BYTES_OF_DTYPE:
            raise _wrong_dtype(entry.file, name, entry.dtype)
    with ExitStack() as files:
        opened = {file: files.enter_context(_open(file)) for file in {entry.file for entry in entries.values()}}
        _check_copies(entries, opened, optional)
    return _stream({name: entry for name, entry in entries.items() if name in expected})


def write_weights(folder: str | Path, tensors: Mapping[str, torch.Tensor], *, max_shard_bytes: int = 5 * 2**30) -> None:
    """Write model.safetensors, or shards and their index if the tensors take more than `max_shard_bytes`.

    UserError for a number that is not finite, and, before anything is written, for a full disk. Each file is written
    completely or not at all, and weights in the other layout are removed once the new ones are complete. A kill while
    shards replace shards leaves no index: the folder is then incomplete, but never a mixture.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    need_room(folder, sum(tensor.nbytes for tensor in tensors.values()), "a model's weights")
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _save(shards[0], folder / SINGLE)
        (folder / INDEX).unlink(missing_ok=True)
        _remove_shards(folder, keep=set())
        return
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ExitStack() as staged:
        paths = [staged.enter_context(atomic_path(folder / name)) for name in names]
        for path, shard in zip(paths, shards, strict=True):
            _save_to(path, shard)
        # New shards may have the names of older ones; an old index must not refer to a mixture of both.
        (folder / INDEX).unlink(missing_ok=True)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in sorted(shard)},
    }
    atomic_write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    (folder / SINGLE).unlink(missing_ok=True)
    _remove_shards(folder, keep=set(names))


def _split(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Split the tensors into shards in the given order; a tensor larger than the limit gets its own shard."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    with atomic_path(path) as temporary:
        _save_to(temporary, tensors)


def _save_to(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    for name, tensor in on_cpu.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise UserError(
                f"{path.parent}: not written, since {name} holds numbers that are not finite; train again with a lower "
                "learning rate"
            )
    save_tensors(path, on_cpu, {"format": "pt"})


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors`, on the CPU and contiguous, as a safetensors file with the mode that the umask gives."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # the library's wrapper of any error of the system
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), os.fspath(path)) from None
    path.chmod(mode)


def _remove_shards(folder: Path, keep: set[str]) -> None:
    for file in folder.iterdir():
        if _SHARD_NAME.fullmatch(file.name) and file.name not in keep:
            file.unlink()


def _weight_files(folder: Path) -> list[str]:
    if os.path.lexists(folder / SINGLE):
        return [SINGLE]
    return [INDEX, *sorted(path.name for path in folder.glob("model-*.safetensors"))]


def _locate(folder: Path) -> dict[str, _Entry]:
    """Return the entry of each tensor of the folder, after checking headers and index."""
    if os.path.lexists(folder / SINGLE):
        return _read_header(folder / SINGLE)
    if not os.path.lexists(folder / INDEX):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the path of a model folder")
        hint = "make or fetch the weights"
        if any(folder.glob("pytorch_model*.bin*")):
            hint = (
                "there is only pytorch_model.bin, which is not read because a pickle can run code when it is opened; "
                "convert it once: AutoModel.from_pretrained(folder).save_pretrained(folder) of transformers"
            )
        raise UserError(f"{folder}: holds neither {SINGLE} nor {INDEX}; {hint}")
    index = read_json_object(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{folder / INDEX}: expected weight_map to map tensors to files; fetch the index again")
    entries: dict[str, _Entry] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise UserError(f"{folder / INDEX}: weight_map names {file!r}, expected a file in the same folder")
        if not os.path.lexists(folder / file):
            raise UserError(f"{folder / file}: no such shard, though {INDEX} names it; fetch it again")
        in_shard = _read_header(folder / file)
        by_index = {name for name, shard in weight_map.items() if shard == file}
        if missing := sorted(by_index - in_shard.keys()):
            raise UserError(
                f"{folder / file}: tensor {missing[0]} is missing, though {INDEX} places it there; fetch both again"
            )
        if surplus := sorted(in_shard.keys() - by_index):
            raise UserError(f"{folder / file}: tensor {surplus[0]} is not placed there by {INDEX}; fetch both again")
        entries |= in_shard
    return entries


def _read_header(file: Path) -> dict[str, _Entry]:
    """Return the entries of one safetensors file, in file order, after checking that header and length agree.

    Layout: 8 bytes, little-endian, give the length of a JSON header. The tensors' bytes follow, at offsets counted from
    the header's end. (github.com/huggingface/safetensors, "Format")
    """
    check_file(file)
    try:
        length = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise UserError(f"{file}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            if len(prefix) < 8 or header_length > min(length - 8, _HEADER_LIMIT):
                raise UserError(f"{file}: truncated or not safetensors ({length} bytes); fetch it again")
            header = parse_json_object(stream.read(header_length), f"{file} (header)")
        header.pop("__metadata__", None)
        return _check_header(header, length - 8 - header_length, file)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check its permissions") from None
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{file}: corrupt header ({type(error).__name__}: {error}); fetch it again") from None


def _check_header(header: dict[str, Any], length: int, file: Path) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    end_of_last = 0
    for name, info in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        begin, end = info["data_offsets"]
        dtype, shape = info["dtype"], torch.Size(info["shape"])
        sizes = _BYTES_OF_DTYPE | _BYTES_OF_BUFFER
        if dtype not in sizes:
            raise _wrong_dtype(file, name, dtype)
        if begin != end_of_last or end - begin != math.prod(shape) * sizes[dtype]:
            raise UserError(
                f"{file}: tensor {name} lies at bytes {begin} to {end}, which does not fit its shape "
                f"{list(shape)} in {dtype} after byte {end_of_last}; fetch the file again"
            )
        if end > length:
            raise UserError(
                f"{file}: truncated inside tensor {name}, at least {end - length} bytes are missing; fetch it again"
            )
        entries[name] = _Entry(file, shape, dtype)
        end_of_last = end
    if end_of_last != length:
        raise UserError(f"{file}: {length - end_of_last} bytes too long for its header; fetch it again")
    return entries


def _wrong_dtype(file: Path, name: str, dtype: str) -> UserError:
    return UserError(
        f"{file}: tensor {name} is {dtype}, only {', '.join(_BYTES_OF_DTYPE)} are supported; "
        "use weights that are not quantised"
    )


def _check_names(
    folder: Path, entries: Mapping[str, _Entry], expected: Mapping[str, torch.Size], optional: Set[str]
) -> None:
    if missing := [name for name in expected if name not in entries and name not in optional]:
        raise UserError(
            f"{folder}: tensor {missing[0]} is missing from the weights ({len(missing)} missing in all); "
            "use the config.json that belongs to these weights, or fetch them again"
        )
    if surplus := [name for name in entries if name not in expected and name not in optional]:
        raise UserError(
            f"{entries[surplus[0]].file}: tensor {surplus[0]} is not part of the model "
            f"({len(surplus)} in all); use the config.json that belongs to these weights"
        )


def _check_copies(entries: Mapping[str, _Entry], opened: Mapping[Path, Any], optional: Set[str]) -> None:
    original = next((name for name in _COPIED if name in entries), None)
    if _COPY not in optional or _COPY not in entries or original is None:
        return
    values = [opened[entries[name].file].get_tensor(name) for name in (_COPY, original)]
    if values[0].dtype != values[1].dtype or not torch.equal(*values):
        raise UserError(
            f"{entries[_COPY].file}: tensor {_COPY} differs from {original}, though the config ties them; "
            "set tie_word_embeddings to false in config.json, or remove the tensor"
        )


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not readable as safetensors ({error}); fetch it again") from None


def _stream(entries: Mapping[str, _Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        with _open(file) as weights:
            for name, entry in entries.items():
                if entry.file == file:
                    tensor = weights.get_tensor(name)
                    if entry.dtype in _BYTES_OF_DTYPE and not is_finite(tensor):
                        raise UserError(
                            f"{file}: tensor {name} holds numbers that are not finite; fetch it again, or train it "
                            "again with a lower learning rate"
                        )
                    yield name, tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no number of the tensor is NaN or infinite, in one pass and without another tensor of its size."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
