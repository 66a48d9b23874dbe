"""Tests of hashes: a flipped bit, a byte more or less, or a file of another folder is found before use, and named."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import make_config

from thresher.common import hashes as module
from thresher.common.errors import UserError
from thresher.common.hashes import FILE, Damaged, check_hashes, read_hashes, write_hashes
from thresher.policy.model import init_policy, load_policy
from thresher.policy.tokenizer import load_tokenizer, train_bpe

BLOCK = 100


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 100 bytes, of which two are enough for a thread."""
    monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(module, "FEWEST_FOR_THREADS", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make files of no block, less than one, exactly three, and 17 and a bit; one of them in a subfolder."""
    draw = np.random.default_rng(0)
    (tmp_path / "sub").mkdir()
    for name, size in (("empty", 0), ("less", 37), ("three", 300), ("sub/many", 1717)):
        (tmp_path / name).write_bytes(draw.bytes(size))
    (tmp_path / ".hidden").write_bytes(b"lock")
    write_hashes(tmp_path)
    return tmp_path


NAMES = ("empty", "less", "three", "sub/many")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_what_was_written_passes_and_is_listed(folder: Path) -> None:
    listed = json.loads((folder / FILE).read_text())
    assert sorted(listed["files"]) == sorted(NAMES) and listed["block"] == BLOCK
    assert [len(listed["files"][name]["digests"]) for name in NAMES] == [0, 1, 3, 18]
    check_hashes(folder, [*NAMES, "neither there nor listed"])
    before = (folder / FILE).read_bytes()
    write_hashes(folder)  # the file of hashes does not contain itself
    assert (folder / FILE).read_bytes() == before


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_flipped_bit_is_found(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()
    bits = np.random.default_rng(1).permutation(8 * len(whole))[:60]
    for bit in [0, 8 * len(whole) - 1, *bits.tolist()]:
        flip(path, bit)
        begin = bit // 8 // BLOCK * BLOCK
        with pytest.raises(Damaged, match=rf"{name}: damaged or changed, its bytes {begin:,} to "):
            check_hashes(folder, [name])
        check_hashes(folder, set(NAMES) - {name})
        path.write_bytes(whole)
    check_hashes(folder, NAMES)


def test_a_flipped_bit_in_the_list_itself_is_found_or_means_nothing(folder: Path) -> None:
    path = folder / FILE
    whole = path.read_bytes()
    passed = 0
    for bit in np.random.default_rng(2).permutation(8 * len(whole))[:300].tolist():
        flip(path, bit)
        try:
            check_hashes(folder, NAMES)  # a space in place of a line feed gives the same list
            passed += 1
            assert json.loads(path.read_bytes()) == json.loads(whole)
        except UserError as error:
            assert str(path) in str(error)
        path.write_bytes(whole)
    assert passed < 30


def test_absent_swapped_and_added_files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "folder"
    shutil.copytree(folder, other)
    (other / "three").write_bytes(bytes(300))
    write_hashes(other)
    shutil.copy(other / "three", folder / "three")
    with pytest.raises(Damaged, match="three: damaged or changed, its bytes 0 to 100"):
        check_hashes(folder, NAMES)
    shutil.copy(other / FILE, folder / FILE)
    check_hashes(folder, NAMES)
    for size in (0, 299, 301):
        (folder / "three").write_bytes(bytes(size))
        with pytest.raises(Damaged, match=f"three: damaged or changed, expected 300 bytes, found {size}"):
            check_hashes(folder, NAMES)
    (folder / "three").unlink()
    with pytest.raises(Damaged, match=r"three: no such file, though hashes\.json lists it"):
        check_hashes(folder, NAMES)
    (folder / "new").touch()  # added by a person
    check_hashes(folder, ["new"])


def test_a_folder_without_hashes_is_read_as_it_is_unless_it_had_some(folder: Path) -> None:
    (folder / FILE).unlink()
    flip(folder / "three", 5)
    check_hashes(folder, NAMES)
    assert read_hashes(folder) is None
    with pytest.raises(Damaged, match=r"hashes\.json: no such file, though one was written with the folder"):
        read_hashes(folder, expected=True)
    (folder / FILE).symlink_to(folder / "nowhere")
    with pytest.raises(UserError, match=r"hashes\.json: is a link to a file that does not exist"):
        check_hashes(folder, ["any"])


def test_a_block_is_hashed_once_and_when_it_is_touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    digests = module._digests
    monkeypatch.setattr(
        module, "_digests", lambda path, block, new: asked.append(list(new)) or digests(path, block, new)
    )
    hashes = read_hashes(folder)
    assert hashes is not None
    blocks = hashes.blocks("sub/many")
    flip(folder / "sub/many", 8 * 1000)
    for begin, end in ((0, 0), (99, 101), (0, 200), (150, 301), (1700, 1717)):
        blocks.touch(begin, end)
    assert asked == [[0, 1], [2, 3], [17]] and not blocks.whole
    for _ in range(2):  # the damage persists
        with pytest.raises(Damaged, match="sub/many: damaged or changed, its bytes 1,000 to 1,100"):
            blocks.touch(0, 1717)
    flip(folder / "sub/many", 8 * 1000)
    blocks.touch(0, 1717)
    assert blocks.whole
    before = len(asked)
    blocks.touch(0, 1717)
    assert len(asked) == before


def test_several_threads_touch_the_same_blocks(folder: Path) -> None:
    hashes = read_hashes(folder)
    assert hashes is not None
    for damaged in (False, True):
        if damaged:
            flip(folder / "sub/many", 8 * 850)
        blocks = hashes.blocks("sub/many")
        found: list[int] = []

        def read(seed: int, blocks=blocks, found=found) -> None:
            for number in np.random.default_rng(seed).permutation(18).tolist():
                try:
                    blocks.check([number])
                except Damaged:
                    found.append(number)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [8] * (6 * damaged) and blocks.whole != damaged


def test_a_models_files_are_verified_as_they_are_read(tmp_path: Path) -> None:
    """A flipped bit is reported with its file unless the file is not read; with verification off, nothing is."""
    tokenizer = train_bpe(["aa bb cc dd"] * 9, 270, ["<|endoftext|>"])
    policy = init_policy(make_config(vocab_size=270), 0)
    policy.save(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "notes.txt").write_text("not read")
    write_hashes(tmp_path)
    weights = policy.state_dict()
    draw = np.random.default_rng(3)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    for name, whole in files.items():
        for bit in draw.integers(8 * len(whole), size=12).tolist():
            flip(tmp_path / name, bit)
            try:
                loaded = load_policy(tmp_path).state_dict()
                load_tokenizer(tmp_path)
                assert name in ("notes.txt", FILE)
                assert all(torch.equal(loaded[key], value) for key, value in weights.items())
            except UserError as error:
                assert str(tmp_path / name) in str(error), (name, error)
            (tmp_path / name).write_bytes(whole)
    # The last bit of the last weight: a different but finite number.
    flip(tmp_path / "model.safetensors", 8 * (len(files["model.safetensors"]) - 4))
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or changed, its bytes "):
        load_policy(tmp_path)
    changed = load_policy(tmp_path, verify=False).state_dict()
    assert sum(int((changed[key] != value).sum()) for key, value in weights.items()) == 1
