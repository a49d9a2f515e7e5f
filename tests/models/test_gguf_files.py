"""GGUF files are opened; a damaged or hostile one is named, and costs no memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian

from engine.errors import LoadError
from engine.models.gguf.file import open_file
from tests.models.gguf_models import write_model

Q8_0, F32 = 8, 0
_MOST_BYTES = 1 << 22
"""Memory that opening a small file may take."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def items(kind: int, count: int, content: bytes = b"") -> bytes:
    """A key-value whose value is a list."""
    return text("list") + struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: str = "w", dimensions: tuple[int, ...] = (64, 2), kind: int = Q8_0, offset: int = 0) -> bytes:
    """A line of the table of tensors; dimensions as the file has them, fastest first."""
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def content(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: int = 1 << 12,
) -> bytes:
    """A whole file, with the counts that it should have or others; data: bytes after the header."""
    keys = (ARCHITECTURE, *keys)
    counts = len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def begin(version: bytes) -> bytes:
    return b"GGUF" + version + content()[8:]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty; download it again"),
    "magic": (b"GGML" + content()[4:], "damaged in its first bytes: it does not begin as GGUF files do"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer, not the file itself; run in"),
    "page": (b"<!DOCTYPE html>\n<html>", "a web page (HTML)"),
    "version 1": (begin(struct.pack("<I", 1)), "version 1 of GGUF; versions 2 and 3 are served: download a newer"),
    "version 0": (begin(bytes(4)), "version 0 of GGUF"),
    "big-endian": (begin(struct.pack(">I", 3)), "for big-endian machines; download the little-endian one"),
    "many keys": (content(num_keys=1 << 60), "claims to have 0 tensors and 1152921504606846976"),
    "many tensors": (content(num_tensors=1 << 60), "it claims to have 1152921504606846976 tensors and 1 key-values"),
    "more keys": (content(num_keys=4, data=0), " in its key-values"),
    "more tensors": (content((), (tensor(),), num_tensors=2, data=0), " in its table of tensors"),
    "long list": (content((items(0, 1 << 60),)), "cut off in its key-values"),
    "long list of texts": (content((items(8, 1 << 60),)), "cut off in its key-values"),
    "long text": (content((struct.pack("<Q", (1 << 64) - 1),)), "cut off in its key-values"),
    "list of lists": (content((items(9, 1, struct.pack("<IQ", 0, 0)),)), "has values of type 9, which is not served"),
    "type of a value": (content((text("key") + struct.pack("<I", 77),)), "'key' has values of type 77"),
    "not UTF-8": (content((struct.pack("<Q", 2) + b"\xff\xff",)), "a text that is not UTF-8"),
    "key twice": (content((ARCHITECTURE,)), "the key 'general.architecture' is there twice"),
    "alignment": (content((text("general.alignment") + struct.pack("<II", 4, 24),)), "is 24, not a power of two"),
    "no dimension": (content((), (tensor(dimensions=()),)), "'w' has 0 dimensions"),
    "dimensions": (content((), (tensor(dimensions=(64, 1, 1, 1, 1)),)), "'w' has 5 dimensions"),
    "negative": (content((), (tensor(dimensions=((1 << 64) - 64, 1)),)), "'w' has dimensions (18446744073709551552"),
    "nothing": (content((), (tensor(dimensions=(0, 4)),)), "'w' has dimensions (0, 4)"),
    "product": (content((), (tensor(dimensions=(1 << 40, 1 << 40, 1 << 40, 1 << 40)),)), "'w' ends at byte"),
    "blocks": (content((), (tensor(dimensions=(40, 32)),)), "'w' has rows of 40 numbers, which are not whole blocks"),
    "type": (content((), (tensor(kind=31),)), "'w' has the tensor type 31, which is unknown here"),
    "tensor twice": (content((), (tensor(), tensor(offset=160))), "the tensor 'w' is there twice, so the file"),
    "overlap": (content((), (tensor(), tensor("v", offset=32))), "'v' begins inside another tensor"),
    "not aligned": (content((), (tensor(offset=8),)), "'w' begins at byte 8, which is not aligned to 32"),
    "past the end": (content((), (tensor(offset=1 << 62),)), "the file is cut off, or damaged: 'w' ends at byte"),
    "cut data": (content((), (tensor(),), data=100), "the file is cut off, or damaged: 'w' ends at byte"),
}  # fmt: skip


@contextmanager
def little_memory(most: int = _MOST_BYTES) -> Iterator[None]:
    """Fail if the block takes more memory than that."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refusal(path: Path) -> str:
    """The line that a file is refused with, which names it."""
    with little_memory(), pytest.raises(LoadError) as refused:
        open_file(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_file_is_explained(fault: str, tmp_path: Path) -> None:
    hostile, words = HOSTILE[fault]
    path = tmp_path / "model.gguf"
    path.write_bytes(hostile)
    assert words in refusal(path)


def test_a_file_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content((), num_keys=0))
    assert "has no general.architecture, so it is not a model's" in refusal(tmp_path / "model.gguf")
    (tmp_path / "link.gguf").symlink_to("gone")
    assert "a link to gone, which is gone" in refusal(tmp_path / "link.gguf")
    assert "1 of the 1 parts of this model are missing" in refusal(tmp_path / "nowhere.gguf")


def small(path: Path) -> bytes:
    """Write a file with keys of all types and three tensors, and return its content."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -5)
    writer.add_float32("f32", 1e-5)
    writer.add_bool("yes", True)
    writer.add_string("words", "größer")
    writer.add_array("tokens", ["a", "", "ß"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("norm", np.arange(8, dtype=np.float32))
    rows = np.arange(128, dtype=np.float32).reshape(2, 64)
    writer.add_tensor(
        "rows", gguf.quants.quantize(rows, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("cube", np.ones((3, 2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    small(path)
    file = open_file(path)
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    near = found.pop("f32")
    assert near == pytest.approx(1e-5)
    assert found == {
        "general.architecture": "llama",
        "u8": 200,
        "i64": -5,
        "yes": True,
        "words": "größer",
        "tokens": ["a", "", "ß"],
        "numbers": [1, 2, 3],
    }
    assert (file.path, file.paths, file.architecture) == (path, (path,), "llama")
    norm, rows, cube = (file.tensors[name] for name in ("norm", "rows", "cube"))
    assert norm.data.view(np.float32).tolist() == list(range(8))
    assert (norm.shape, norm.data.shape) == ((8,), (32,))
    assert (rows.type, rows.shape, rows.data.shape) == (GGMLQuantizationType.Q8_0, (2, 64), (2, 68))
    assert np.abs(gguf.quants.dequantize(rows.data, rows.type) - np.arange(128).reshape(2, 64)).max() < 1
    assert (cube.shape, cube.data.shape) == ((3, 2, 4), (3, 2, 16))
    assert not any(one.data.flags.writeable or one.data.flags.owndata for one in file.tensors.values())


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """After every byte, in the header, the keys, the table and the data."""
    whole = small(tmp_path / "small.gguf").rstrip(b"\0")
    path, sections = tmp_path / "cut.gguf", set()
    for length in range(1, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError) as refused:
            open_file(path)
        sections |= {name for name in ("first bytes", "key-values", "table", "ends at") if name in str(refused.value)}
    assert sections == {"first bytes", "key-values", "table", "ends at"}


@pytest.mark.slow
def test_damaged_bytes_never_end_in_another_error(tmp_path: Path) -> None:
    whole, path = small(tmp_path / "small.gguf"), tmp_path / "damaged.gguf"
    header = whole.index(b"cube") + 60
    source = random.Random(3)
    messages = []
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(source.choice([1, 1, 2, 8])):
            damaged[source.randrange(header)] = source.choice([0, 1, 0x7F, 0xFF, source.randrange(256)])
        path.write_bytes(damaged)
        with little_memory():
            try:
                open_file(path)
            except LoadError as error:
                messages.append(str(error))
    assert len(messages) > 700
    assert all(message.startswith(f"{path}: ") for message in messages)


@pytest.mark.parametrize(
    ("value", "size", "words"),
    [
        (items(0, 5_000_000), 5_000_000, "more than 4194304 items in lists"),
        (items(8, 5_000_000), 40_000_000, "more than 4194304 items in lists"),
        (text("key") + struct.pack("<IQ", 8, 200_000_000), 200_000_000, "it would be longer than 128 MiB"),
    ],
)
def test_a_header_has_bounds(value: bytes, size: int, words: str, tmp_path: Path) -> None:
    """The file is as long as it claims."""
    path = tmp_path / "model.gguf"
    header = content((value,), data=0)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    assert words in refusal(path)


def test_a_big_endian_file_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "for big-endian machines" in refusal(tmp_path / "big.gguf")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in three parts, and the same model whole."""
    folder = tmp_path_factory.mktemp("parts")
    write_model(folder / "model.gguf", parts=3)
    write_model(folder / "whole.gguf")
    write_model(folder / "other.gguf", parts=3, biases=True)
    return folder


def part(number: int, name: str = "model", count: int = 3) -> str:
    return f"{name}-{number:05}-of-{count:05}.gguf"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_parts_are_opened_as_one(number: int, parts: Path) -> None:
    """Whichever of them is named."""
    together, whole = open_file(parts / part(number)), open_file(parts / "whole.gguf")
    assert together.path == parts / part(1)
    assert together.paths == tuple(parts / part(one) for one in (1, 2, 3))
    assert together.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert together.tensors[name].shape == tensor.shape
        assert np.array_equal(together.tensors[name].data, tensor.data)
    assert together.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]


def overwrite(folder: Path, name: str, content: Path | bytes) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())


PARTS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "missing": (lambda at, _: (at / part(2)).unlink(), "1 of the 3 parts of this model are missing from {} (model-"),
    "only one": (lambda at, _: [(at / part(one)).unlink() for one in (2, 3)], "2 of the 3 parts of this model are"),
    "given twice": (lambda at, given: overwrite(at, part(3), given / part(2)), f"{part(3)}: its name says part 3 of 3, "
                    "its content part 2 of 3; download this part again"),
    "other model": (lambda at, given: overwrite(at, part(3), given / part(3, "other")),
                    "split.tensors.count is 26 here and 20 in"),
    "whole file": (lambda at, given: overwrite(at, part(3), given / "whole.gguf"),
                   "its name says part 3 of 3, its content part 1 of 1"),
    "cut": (lambda at, given: overwrite(at, part(2), (given / part(2)).read_bytes()[:-4000]),
            f"{part(2)}: the file is cut off"),
    "empty": (lambda at, _: overwrite(at, part(2), b""), f"{part(2)}: the file is empty"),
}  # fmt: skip


def copied(parts: Path, folder: Path) -> Path:
    for number in (1, 2, 3):
        overwrite(folder, part(number), parts / part(number))
    return folder


@pytest.mark.parametrize("fault", PARTS)
def test_parts_that_are_not_of_one_model_are_refused(fault: str, parts: Path, tmp_path: Path) -> None:
    at = copied(parts, tmp_path)
    open_file(at / part(1))
    spoil, words = PARTS[fault]
    spoil(at, parts)
    with pytest.raises(LoadError) as refused:
        open_file(at / part(1))
    assert words.format(at) in str(refused.value)


def test_parts_with_the_same_tensor_are_refused(tmp_path: Path, parts: Path) -> None:
    at = copied(parts, tmp_path)
    first = open_file(at / part(1)).paths[0].read_bytes()
    second = (at / part(2)).read_bytes()
    named = [f"blk.{layer}.attn_{one}.weight".encode() for layer in (0, 1) for one in "qkv"]
    of_first, of_second = (next(name for name in named if name in content) for content in (first, second))
    overwrite(at, part(2), second.replace(of_second, of_first))
    with pytest.raises(LoadError, match="is there twice, so its parts are of different models"):
        open_file(at / part(1))


def test_a_part_under_another_name_is_named(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "renamed.gguf").write_bytes((parts / part(2)).read_bytes())
    words = "part 2 of the 3 parts of a model, under another name; put all parts into one folder as NAME-00002-of-00003"
    assert words in refusal(tmp_path / "renamed.gguf")
