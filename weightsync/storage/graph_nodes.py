"""What the nodes of a captured graph were given: parameter words of kernels, addresses of copies and fills.

The CUDA driver shows a graph's nodes and, for each kernel, the bytes of its
parameters. Every aligned 8-byte word of them is kept: kernels get pointers not
only as parameters but inside structs passed by value (CUTLASS), and cuBLAS hands
over one packed buffer instead of a parameter list. Which words are addresses is
for `census` to say.

Nothing is skipped silently: what can't be read is counted under a reason.

Not covered: bodies of conditional nodes, host callbacks and other rare node types
(counted as unread), and pointers at addresses that are no multiple of 8 (packed
structs). Works on whatever `cuda.bindings.driver` is handed in, so it is tested
without a GPU.
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weightsync.errors import UnsupportedEngine

#: Values of `CUgraphNodeType`; spelt out so that a node type newer than the bindings is still counted.
NODE_TYPES = (
    "kernel", "memcpy", "memset", "host", "child_graph", "empty", "wait_event", "event_record",
    "ext_semas_signal", "ext_semas_wait", "mem_alloc", "mem_free", "batch_mem_op", "conditional",
)  # fmt: skip
#: Node types that order other nodes and touch no memory.
WITHOUT_MEMORY = frozenset({"empty", "wait_event", "event_record"})

#: Keys of a launch's `extra` array, and the most pairs that are read before it is called malformed.
EXTRA_END, EXTRA_BUFFER, EXTRA_SIZE = 0, 1, 2
EXTRA_MAX_PAIRS = 8
#: Kernel parameters end at 32,764 bytes on today's devices; more means that a size was misread.
MAX_PARAMETER_BYTES = 64 << 10
MAX_PARAMETERS = 4096
#: `CUDA_ERROR_INVALID_VALUE`.
INVALID_VALUE = 1

#: What the bindings raise where they or the driver lack a function, or are given an enumerator that they don't know.
BINDING_FAULTS = (AttributeError, RuntimeError, ValueError)

_MEMORY_HOST, _MEMORY_DEVICE, _MEMORY_UNIFIED = 1, 2, 4


@dataclass(frozen=True)
class Touch:
    """One node that may touch memory: the kernel's name (or `memcpy`, `memset`) and the words it was given.

    `certain` says that the words are addresses; a kernel's may be any number.
    """

    name: str
    words: frozenset[int]
    certain: bool = False


class Unread(Exception):
    """A node, or a part of one, that could not be read; the text is the reason it is counted under."""


def aligned_words(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, ...]:
    """The 8-byte words of `data` that are aligned in a layout in which `data` begins at `offset`."""
    start = -offset % 8
    count = (len(data) - start) // 8
    return struct.unpack_from(f"<{count}Q", data, start) if count > 0 else ()


def parse_extra(words: Iterable[int]) -> tuple[int, int]:
    """A launch's `extra` array, pairs of key and value in either order: address of the buffer, address of its size.

    Raises:
        Unread: a key that is not known, one that is missing, or no end.
    """
    found: dict[int, int] = {}
    source = iter(words)
    for _ in range(EXTRA_MAX_PAIRS):
        key = next(source, None)
        if key == EXTRA_END:
            break
        value = next(source, None)
        if key not in (EXTRA_BUFFER, EXTRA_SIZE) or value is None:
            raise Unread("kernel: extra array holds an unknown key")
        found[key] = value
    else:
        raise Unread("kernel: extra array has no end")
    if not found.get(EXTRA_BUFFER) or not found.get(EXTRA_SIZE):
        raise Unread("kernel: extra array names no buffer")
    return found[EXTRA_BUFFER], found[EXTRA_SIZE]


def copy_address(params: Any, side: str) -> int:
    """Where one side (`src`, `dst`) of a memcpy node's `CUDA_MEMCPY3D` begins.

    Raises:
        Unread: that side is a CUDA array, which has no address.
    """
    try:
        kind = int(getattr(params, f"{side}MemoryType"))
    except ValueError:
        raise Unread("memcpy: memory type not set") from None
    if kind == _MEMORY_HOST:
        base = int(getattr(params, f"{side}Host") or 0)
    elif kind in (_MEMORY_DEVICE, _MEMORY_UNIFIED):
        base = int(getattr(params, f"{side}Device"))
    else:
        raise Unread("memcpy: to or from a CUDA array")
    row = int(getattr(params, f"{side}Y")) + int(getattr(params, f"{side}Z")) * int(getattr(params, f"{side}Height"))
    return base + int(getattr(params, f"{side}XInBytes")) + row * int(getattr(params, f"{side}Pitch"))


@dataclass(frozen=True)
class _Function:
    """A kernel's name and, for each parameter, its offset in the device's layout and its size; or why that isn't known."""

    name: str
    parameters: tuple[tuple[int, int], ...]
    fault: str = ""


class NodeReader:
    """Reads graphs of one census; what is asked once per kernel function is kept.

    Attributes:
        by_type: nodes seen, child graphs' included, by type.
        unread: what could not be read, by reason.
    """

    def __init__(self, driver: Any) -> None:
        self.by_type: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self._driver = driver
        self._functions: dict[tuple[bool, int], _Function] = {}

    def read(self, raw_graph: int) -> list[Touch]:
        """Every node of a `cudaGraph_t` given as an address, and of the graphs inside it."""
        touches: list[Touch] = []
        pending = [self._driver.CUgraph(raw_graph)]
        while pending:
            try:
                nodes = self._nodes(pending.pop())
            except Unread as reason:
                self.unread[str(reason)] += 1
                continue
            for node in nodes:
                try:
                    self._read_node(node, touches, pending)
                except Unread as reason:
                    self.unread[str(reason)] += 1
        return touches

    def _call(self, what: str, function: str, *arguments: Any) -> Any:
        """A driver call's values: one alone, several as a tuple."""
        try:
            error, *values = getattr(self._driver, function)(*arguments)
        except BINDING_FAULTS as exc:
            raise Unread(f"{what}: {function}: {exc}") from exc
        if int(error) != 0:
            raise Unread(f"{what}: {function}: {getattr(error, 'name', error)}")
        return values[0] if len(values) == 1 else tuple(values)

    def _nodes(self, graph: Any) -> list[Any]:
        _, count = self._call("graph", "cuGraphGetNodes", graph, 0)
        if not count:
            return []
        nodes, count = self._call("graph", "cuGraphGetNodes", graph, count)
        return list(nodes[:count])

    def _read_node(self, node: Any, touches: list[Touch], pending: list[Any]) -> None:
        try:
            number = int(self._call("node", "cuGraphNodeGetType", node))
        except Unread:
            self.by_type["unknown"] += 1
            raise
        kind = NODE_TYPES[number] if number < len(NODE_TYPES) else f"type_{number}"
        self.by_type[kind] += 1
        if kind == "kernel":
            touches.append(self._kernel(node))
        elif kind == "memcpy":
            params = self._call("memcpy", "cuGraphMemcpyNodeGetParams", node)
            touches.append(Touch("memcpy", frozenset(copy_address(params, side) for side in ("src", "dst")), certain=True))
        elif kind == "memset":
            params = self._call("memset", "cuGraphMemsetNodeGetParams", node)
            touches.append(Touch("memset", frozenset({int(params.dst)}), certain=True))
        elif kind == "child_graph":
            pending.append(self._call("child_graph", "cuGraphChildGraphNodeGetGraph", node))
        elif kind not in WITHOUT_MEMORY:
            raise Unread(f"{kind} node")

    def _kernel(self, node: Any) -> Touch:
        params = self._call("kernel", "cuGraphKernelNodeGetParams", node)
        function = self._function(int(params.func), int(params.kern))
        # Both are `void**`, which the bindings give as plain integers.
        listed, extra = int(params.kernelParams or 0), int(params.extra or 0)
        if listed:
            if function.fault:
                raise Unread(function.fault)
            return Touch(function.name, frozenset(_listed_words(listed, function.parameters)))
        if extra:
            buffer, size_at = parse_extra(_memory_words(extra))
            size = ctypes.c_size_t.from_address(size_at).value
            if size > MAX_PARAMETER_BYTES:
                raise Unread("kernel: extra buffer is larger than parameters can be")
            return Touch(function.name, frozenset(aligned_words(ctypes.string_at(buffer, size))))
        if function.parameters:
            raise Unread("kernel: neither parameters nor an extra array")
        return Touch(function.name, frozenset())

    def _function(self, func: int, kern: int) -> _Function:
        key = (bool(func), func or kern)
        if key not in self._functions:
            self._functions[key] = self._ask_function(*key)
        return self._functions[key]

    def _ask_function(self, is_function: bool, handle: int) -> _Function:
        which, kind = ("Func", "CUfunction") if is_function else ("Kernel", "CUkernel")
        subject = getattr(self._driver, kind)(handle)
        try:
            given = self._call("kernel", f"cu{which}GetName", subject)
            name = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
        except Unread:
            name = f"kernel@{handle:#x}"  # what the kernel is given matters more than its name
        try:
            parameters = self._ask_parameters(f"cu{which}GetParamInfo", subject)
            # None at all may also mean that the driver doesn't know this function: only its count can tell.
            if not parameters and self._call("kernel", f"cu{which}GetParamCount", subject) != 0:
                raise Unread("kernel: its parameters are not described")
        except Unread as reason:
            return _Function(name, (), str(reason))
        return _Function(name, parameters)

    def _ask_parameters(self, function: str, subject: Any) -> tuple[tuple[int, int], ...]:
        """Offset and size of each parameter. Not every driver tells how many there are: the first index it refuses ends them."""
        found: list[tuple[int, int]] = []
        for index in range(MAX_PARAMETERS):
            try:
                error, offset, size = getattr(self._driver, function)(subject, index)
            except BINDING_FAULTS as exc:
                raise Unread(f"kernel: {function}: {exc}") from exc
            if int(error) == INVALID_VALUE:
                return tuple(found)
            if int(error) != 0:
                raise Unread(f"kernel: {function}: {getattr(error, 'name', error)}")
            found.append((int(offset), int(size)))
        raise Unread(f"kernel: more than {MAX_PARAMETERS} parameters")


def _memory_words(address: int) -> Iterator[int]:
    """The words of this process's memory from `address` on, for as long as they are asked for."""
    while True:
        yield ctypes.c_uint64.from_address(address).value
        address += 8


def _listed_words(array: int, parameters: tuple[tuple[int, int], ...]) -> set[int]:
    """Words of parameters given as a `void**`: one pointer to each value, values apart from one another."""
    words: set[int] = set()
    values = (ctypes.c_uint64 * len(parameters)).from_address(array)
    for value, (offset, size) in zip(values, parameters, strict=True):
        if not value:
            raise Unread("kernel: a parameter has no value")
        if size > MAX_PARAMETER_BYTES:
            raise Unread("kernel: a parameter is larger than parameters can be")
        if size >= 8:
            words.update(aligned_words(ctypes.string_at(value, size), offset))
    return words


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def _heap_in_use() -> int | None:
    """Bytes that malloc has handed out in this process; None where the C library doesn't say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _MallInfo
    info = ask()
    return int(info.uordblks) + int(info.hblkhd)


def host_bytes_of(driver: Any, raw_graph: int) -> int | None:
    """Host memory that one graph's template takes: what the heap grows by when it is cloned. An estimate.

    None if the graph can't be cloned or the C library doesn't say.
    """
    before = _heap_in_use()
    try:
        error, clone = driver.cuGraphClone(driver.CUgraph(raw_graph))
    except BINDING_FAULTS:
        return None
    if int(error) != 0:
        return None
    after = _heap_in_use()
    driver.cuGraphDestroy(clone)
    return None if before is None or after is None else max(0, after - before)


def load_driver() -> Any:
    """`cuda.bindings.driver`.

    Raises:
        UnsupportedEngine: cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as exc:
        hint = "Install cuda-bindings, which torch's CUDA builds come with"
        raise UnsupportedEngine(f"CUDA graphs can't be read: {exc}", hint=hint) from exc
    return driver


def read_device(driver: Any, address: int, nbytes: int) -> bytes:
    """Bytes of device memory.

    Raises:
        OSError: the driver refuses, for example because the memory is unmapped.
    """
    host = ctypes.create_string_buffer(nbytes)
    try:
        (error,) = driver.cuMemcpyDtoH(ctypes.addressof(host), address, nbytes)
    except BINDING_FAULTS as exc:
        raise OSError(f"cuMemcpyDtoH: {exc}") from exc
    if int(error) != 0:
        raise OSError(f"cuMemcpyDtoH: {getattr(error, 'name', error)}")
    return host.raw


def locate(driver: Any, address: int) -> tuple[int, int, str] | None:
    """Start and size of the driver's allocation around an address, `device` or `host`; None for a number that is none."""
    start, nbytes = _pointer_attribute(driver, "RANGE_START_ADDR", address), _pointer_attribute(driver, "RANGE_SIZE", address)
    if not start or nbytes is None:
        return None
    memory = _pointer_attribute(driver, "MEMORY_TYPE", address)
    return start, nbytes, {_MEMORY_HOST: "host", _MEMORY_DEVICE: "device"}.get(memory or 0, "unclear")


def _pointer_attribute(driver: Any, name: str, address: int) -> int | None:
    try:
        error, value = driver.cuPointerGetAttribute(getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address)
    except ValueError:  # a memory type that the bindings don't know
        return None
    return None if int(error) != 0 or value is None else int(value)
