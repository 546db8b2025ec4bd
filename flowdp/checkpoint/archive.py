"""Checksums and bounds of a checkpoint's archive, checked before torch unpickles it.

Right checksums say that a file is whole, not that it means well. torch's restricted unpickler runs no code
of a file, and still takes as much memory as the file asks for: a compressed record, a tensor of four bytes
and a shape of gigabytes, a storage declared larger than its record, a `bytearray(2**31)`, or tuples in tuples
until the interpreter's stack is full. So the opcodes are walked first, by a machine that knows only the
opcodes of flowdp's own files, and computes nothing but sizes and depths.

flowdp writes a tree: no list, dict, tuple or tensor occurs twice in it. So depth and memory are
bounded by the file's contents.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from typing import Any

import torch

__all__ = ["NESTED", "check_archive"]

NESTED = 100
"""Containers within each other, at most."""

DIMENSIONS = 64
"""Dimensions of a tensor, at most: torch's own limit."""

FOLDER = 0x10
"""Attribute of a record that is a folder."""

STORAGES = {
    "torch BFloat16Storage": 2,
    "torch BoolStorage": 1,
    "torch ByteStorage": 1,
    "torch CharStorage": 1,
    "torch ComplexDoubleStorage": 16,
    "torch ComplexFloatStorage": 8,
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch IntStorage": 4,
    "torch LongStorage": 8,
    "torch ShortStorage": 2,
    "torch.storage UntypedStorage": 1,
}
"""Bytes of an element."""

REBUILD = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
DICTS = ("collections OrderedDict", "collections Counter")

ATOMS = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")

_Atom = int | float | str | None
_MARK = object()


@dataclass(slots=True)
class _Node:
    """A value on the pickle's stack that is more than a number or a string.

    Attributes:
        kind: "list", "dict", "tuple", "tensor", "storage", or the name of a class or function.
        depth: Containers within each other.
        parts: Of a tuple.
        nbytes: Of a storage.
        itemsize: Bytes of an element, of a storage.
    """

    kind: str
    depth: int = 0
    parts: tuple[Any, ...] = ()
    nbytes: int = 0
    itemsize: int = 0


_Value = _Atom | _Node


def check_archive(file: BufferedReader) -> None:
    """Check that a torch archive is whole, and that nothing in it takes more memory than the file tells.

    Args:
        file: The archive.

    Raises:
        ValueError: A record is damaged, larger than the file, or not written by flowdp.
        BadZipFile: It is no archive, or one that is cut off.
        RuntimeError: It is no torch archive.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        sizes = {one.filename.partition("/")[2]: one.file_size for one in records}
        if len(sizes) < len(records):
            raise ValueError("two of its records have one name")
        if any(one.external_attr & FOLDER for one in records):  # torch returns unwritten memory
            raise ValueError("a record of it is marked as a folder")
        if sum(sizes.values()) > size:
            raise ValueError("its records are larger than the file: they are compressed, or overlap")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of its record {damaged!r} is wrong")
    file.seek(0)
    reader: Any = torch._C.PyTorchFileReader(file)
    if hasattr(reader, "get_record_size"):  # of a newer torch
        seen = {name: reader.get_record_size(name) for name in reader.get_all_records()}
        if seen != sizes:
            raise ValueError("it is another archive for torch than for zipfile")
    if archive.comment or min(one.header_offset for one in records):  # zipfile would shift all offsets by it
        raise ValueError("it has bytes before its first record, or a comment")
    _Walk(sizes).over(reader.get_record("data.pkl"))


class _Walk:
    """The pickle machine, on kinds and depths in place of objects.

    Args:
        sizes: Bytes of each record of the archive, by name.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def over(self, pickled: bytes) -> None:
        """Walk over all opcodes."""
        for opcode, argument, _ in pickletools.genops(pickled):
            do = _OPCODES.get(opcode.name)
            if do is None:
                raise ValueError(f"its pickle has the opcode {opcode.name}")
            do(self, argument)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("its pickle takes more values than it has made")
        return self._stack.pop()

    def pop_to_mark(self) -> list[Any]:
        stack = self._stack
        start = len(stack) - 1
        while start >= 0 and stack[start] is not _MARK:
            start -= 1
        if start < 0:
            raise ValueError("its pickle takes more values than it has made")
        items = stack[start + 1 :]
        del stack[start:]
        return items

    def make_tuple(self, items: Sequence[_Value]) -> None:
        made = _Node("tuple", parts=tuple(items))
        self._grow(made, items)
        self.push(made)

    def append(self, items: Sequence[_Value]) -> None:
        self._grow(self._top("list"), items)

    def set_items(self, items: Sequence[_Value]) -> None:
        if any(isinstance(key, _Node) for key in items[::2]):
            raise ValueError("a key of a dict is neither a number nor a string")
        self._grow(self._top("dict"), items)

    def remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1] if self._stack else None

    def recall(self, number: int) -> None:
        value = self._memo.get(number, _MARK)
        if value is _MARK or (isinstance(value, _Node) and value.depth):
            raise ValueError("a container occurs in it twice")
        self.push(value)

    def name(self, name: str) -> None:
        module, _, dtype = name.partition(" ")
        is_dtype = module == "torch" and isinstance(vars(torch).get(dtype), torch.dtype)
        if not (name in STORAGES or name in REBUILD or name in DICTS or is_dtype):
            raise ValueError(f"its pickle names {name.replace(' ', '.')}")
        self.push(_Node(name))

    def open_storage(self) -> None:
        match self.pop():
            case _Node(parts=("storage", _Node(kind=kind), str(key), str(), int(count))) if kind in STORAGES:
                nbytes = count * STORAGES[kind]
                if nbytes != self._sizes.get(f"data/{key}"):
                    raise ValueError(f"a storage of {nbytes} bytes is not as long as its record")
                self.push(_Node("storage", depth=1, nbytes=nbytes, itemsize=STORAGES[kind]))
            case _:
                raise ValueError("a storage of it is described in another way")

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(arguments, _Node) or not isinstance(function, _Node):
            raise ValueError("its pickle calls a value that is not a function")
        if function.kind in REBUILD:
            _check_tensor(arguments.parts)
            self.push(_Node("tensor", depth=1))
        elif function.kind in DICTS and all(_is_dict(part) for part in arguments.parts):
            self.push(_Node("dict", depth=max([1, *(part.depth for part in arguments.parts)])))
        else:
            raise ValueError(f"its pickle calls {function.kind.replace(' ', '.')}")

    def _top(self, kind: str) -> _Node:
        top = self.pop()
        self.push(top)
        if not isinstance(top, _Node) or top.kind != kind:
            raise ValueError(f"its pickle puts items into a value that is not a {kind}")
        return top

    def _grow(self, node: _Node, items: Sequence[_Value]) -> None:
        depths = [item.depth for item in items if isinstance(item, _Node)]
        node.depth = max(node.depth, 1 + max(depths, default=0))
        if node.depth > NESTED:
            raise ValueError(f"more than {NESTED} containers lie within each other")


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _itemsize(dtype: object) -> int:
    """A storage of a dtype that has no storage class."""
    found = vars(torch).get(dtype.kind.partition(" ")[2]) if isinstance(dtype, _Node) else None
    if not isinstance(found, torch.dtype):
        raise ValueError("a tensor of it has no dtype")
    return found.itemsize


def _is_dict(value: object) -> bool:
    return isinstance(value, _Node) and value.kind == "dict"


def _check_tensor(arguments: tuple[Any, ...]) -> None:
    """Check that a tensor is as long as its storage: torch would make the storage longer."""
    match arguments:
        case (
            _Node(kind="storage") as storage,
            0,
            _Node(kind="tuple", parts=shape),
            _Node(kind="tuple", parts=strides),
            bool(),
            _Node(kind="dict"),
            *rest,
        ) if len(shape) == len(strides) <= DIMENSIONS and all(_is_length(n) for n in (*shape, *strides)):
            itemsize = _itemsize(rest[0]) if rest else storage.itemsize
            reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            if prod(shape) * itemsize == storage.nbytes and (reach + 1) * itemsize <= storage.nbytes:
                return
            if 0 in shape and not storage.nbytes:
                return
            raise ValueError(f"a tensor of shape {shape} has {storage.nbytes} bytes")
        case _:
            raise ValueError("a tensor of it is described in another way")


_OPCODES: dict[str, Callable[[_Walk, Any], None]] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda *_: None),
    "MARK": lambda walk, _: walk.push(_MARK),
    **dict.fromkeys(ATOMS, lambda walk, atom: walk.push(atom)),
    "NONE": lambda walk, _: walk.push(None),
    "NEWTRUE": lambda walk, _: walk.push(True),
    "NEWFALSE": lambda walk, _: walk.push(False),
    "EMPTY_DICT": lambda walk, _: walk.push(_Node("dict", depth=1)),
    "EMPTY_LIST": lambda walk, _: walk.push(_Node("list", depth=1)),
    "EMPTY_TUPLE": lambda walk, _: walk.make_tuple(()),
    "TUPLE1": lambda walk, _: walk.make_tuple([walk.pop()]),
    "TUPLE2": lambda walk, _: walk.make_tuple([walk.pop(), walk.pop()][::-1]),
    "TUPLE3": lambda walk, _: walk.make_tuple([walk.pop(), walk.pop(), walk.pop()][::-1]),
    "TUPLE": lambda walk, _: walk.make_tuple(walk.pop_to_mark()),
    "APPEND": lambda walk, _: walk.append([walk.pop()]),
    "APPENDS": lambda walk, _: walk.append(walk.pop_to_mark()),
    "SETITEM": lambda walk, _: walk.set_items([walk.pop(), walk.pop()][::-1]),
    "SETITEMS": lambda walk, _: walk.set_items(walk.pop_to_mark()),
    "BINPUT": lambda walk, number: walk.remember(number),
    "LONG_BINPUT": lambda walk, number: walk.remember(number),
    "BINGET": lambda walk, number: walk.recall(number),
    "LONG_BINGET": lambda walk, number: walk.recall(number),
    "GLOBAL": lambda walk, name: walk.name(name),
    "BINPERSID": lambda walk, _: walk.open_storage(),
    "REDUCE": lambda walk, _: walk.call(),
}
