"""The GGUF container: metadata and tensor directory, read without numpy or torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
Weights stay in the file; `GgufFile.tensor_bytes` hands out a view of the memory map.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from firsttoken_runtime.model.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 24  # more metadata entries, tensors or array items than this is a damaged header


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory.

    shape: rows first, as torch has it (the file stores the reverse).
    kind: the ggml type number (0 F32, 1 F16, 8 Q8_0, …).
    offset: of the data, in bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: memoryview  # the whole file, mapped read-only

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata value of `<architecture>.<key>`, or default."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def tensor_bytes(self, name: str, size: int) -> memoryview:
        """The first `size` bytes of a tensor's data. Raises ModelError when the file ends before."""
        info = self.tensors[name]
        if info.offset + size > len(self.data):
            raise ModelError(
                f"{self.path}: truncated: tensor {name} ends at byte {info.offset + size}, "
                f"the file has {len(self.data)}; download it again"
            )
        return self.data[info.offset : info.offset + size]


def open_gguf(path: str | Path) -> GgufFile:
    """Map a GGUF file and read its header. Raises ModelError: missing, no GGUF, truncated, version."""
    # Not resolved: in a Hugging Face cache the link has the name, its target is a hash.
    file = Path(path).absolute()
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return _open(file, status.st_size, status.st_mtime_ns)


def close_files() -> None:
    """Forget the files opened so far: they are unmapped when nothing read from them is left."""
    _open.cache_clear()


@lru_cache(maxsize=4)
def _open(file: Path, size: int, changed_ns: int) -> GgufFile:
    # Cached: configuration, tokenizer and weights each open the file. Size and time tell versions apart.
    if size < 24:
        raise ModelError(f"{file}: not a GGUF file: only {size} bytes")
    try:
        with file.open("rb") as stream:
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    if data[:4] != MAGIC:
        raise ModelError(f"{file}: not a GGUF file: it starts with {bytes(data[:4])!r} instead of {MAGIC!r}")
    try:
        return _Cursor(file, data).read_file()
    except (struct.error, IndexError):
        raise ModelError(
            f"{file}: truncated: the header runs past the end of the file ({size} bytes); download it again"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise ModelError(f"{file}: damaged: the header makes no sense; download it again") from None


class _Cursor:
    """Reads the header front to back."""

    def __init__(self, file: Path, data: memoryview) -> None:
        self.file, self.data, self.at = file, data, 4

    def read_file(self) -> GgufFile:
        version = self._scalar(4)
        if version in (2 << 24, 3 << 24):
            raise ModelError(f"{self.file}: a big-endian GGUF file; use the little-endian one")
        if version not in (2, 3):
            raise ModelError(f"{self.file}: GGUF version {version} is not supported; use version 2 or 3")
        tensor_count, entry_count = self._count(), self._count()
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            name = self._string()
            metadata[name] = self._value(self._scalar(4))
        listed = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ModelError(f"{self.file}: damaged: general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors = {
            name: TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in listed
        }
        return GgufFile(self.file, metadata, tensors, self.data)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._scalar(4)
        if not 1 <= dimensions <= 4:
            raise ModelError(f"{self.file}: damaged: tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar(10) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise ModelError(f"{self.file}: damaged: tensor {name} is empty: {list(shape)}")
        return name, shape, self._scalar(4), self._scalar(10)

    def _scalar(self, kind: int) -> Any:
        codec = _SCALARS[kind]
        value = codec.unpack_from(self.data, self.at)[0]
        self.at += codec.size
        return value

    def _count(self) -> int:
        count = int(self._scalar(10))
        if count > _MOST_ENTRIES:
            raise ModelError(f"{self.file}: damaged: the header counts {count} entries; download it again")
        return count

    def _string(self) -> str:
        size = self._scalar(10)
        start = self.at
        if start + size > len(self.data):
            raise IndexError
        self.at = start + size
        return str(self.data[start : self.at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ModelError(f"{self.file}: damaged: metadata type {kind} does not exist")
            return self._scalar(kind)
        item, count = self._scalar(4), self._count()
        if item in _SCALARS:
            codec = struct.Struct(f"<{count}{_SCALARS[item].format[1:]}")
            values = codec.unpack_from(self.data, self.at)
            self.at += codec.size
            return list(values)
        if item == _STRING:
            return self._strings(count)
        return [self._value(item) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `_string`, in one loop: a vocabulary and its merges are a hundred thousand of them."""
        data, at, end, length_at = self.data, self.at, len(self.data), _SCALARS[10].unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > end:
                raise IndexError
            found.append(str(data[start:at], "utf-8"))
        self.at = at
        return found
