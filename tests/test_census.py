"""The census without a GPU: words of parameters, the join with the allocator's blocks, the class that counts captures."""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import UnsupportedEngine
from weightsync.storage import census, graph_nodes
from weightsync.storage.blocks import MemoryMap, Span
from weightsync.storage.census import Block, Census, Join
from weightsync.storage.graph_nodes import NodeReader, Touch, Unread, aligned_words, copy_address, parse_extra

BASE = 0x7F00_0000_0000


def span(start: int, nbytes: int, pool: tuple[int, int] = (0, 0), active: bool = True, requested: int | None = None) -> Span:
    return Span(BASE + start, nbytes, nbytes if requested is None else requested, pool, 0, active)


def kernel(name: str, *words: int) -> Touch:
    return Touch(name, frozenset(words))


def nowhere(_: int) -> None:
    return None


# Words of parameter bytes


def test_a_pointer_inside_a_struct_that_is_passed_by_value_is_a_word() -> None:
    by_value = struct.pack("<iiQfxxxxQ", 7, 8, BASE + 64, 0.5, BASE + 128)
    assert {BASE + 64, BASE + 128} <= set(aligned_words(by_value, offset=16))


def test_alignment_is_that_of_the_parameter_layout_and_not_of_the_bytes() -> None:
    data = struct.pack("<IQI", 1, BASE, 2)
    assert aligned_words(data, offset=4) == (BASE,)
    assert BASE not in aligned_words(data, offset=0), "a pointer at 4 of 8 is one of the blind spots that the module names"


@pytest.mark.parametrize(("nbytes", "offset", "count"), [(0, 0, 0), (7, 0, 0), (8, 0, 1), (8, 1, 0), (15, 1, 1), (24, 8, 3)])
def test_a_word_is_whole_or_not_there(nbytes: int, offset: int, count: int) -> None:
    assert len(aligned_words(b"\xff" * nbytes, offset)) == count


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(0, 4096))
def test_every_aligned_word_is_found(words: list[int], offset: int) -> None:
    padding = -offset % 8
    assert aligned_words(b"\0" * padding + struct.pack(f"<{len(words)}Q", *words) + b"\0" * 7, offset) == tuple(words)


# The `extra` array of a launch


@pytest.mark.parametrize("words", [[1, 0x1000, 2, 0x2000, 0], [2, 0x2000, 1, 0x1000, 0]], ids=["buffer first", "size first"])
def test_an_extra_array_reads_in_either_order(words: list[int]) -> None:
    assert parse_extra(words) == (0x1000, 0x2000)


@pytest.mark.parametrize(
    "words",
    [[0], [1, 0x1000, 0], [2, 0x2000, 0], [3, 5, 1, 0x1000, 2, 0x2000, 0], [1, 0, 2, 0x2000, 0], [1], [1, 0x1000] * 50],
    ids=["empty", "no size", "no buffer", "unknown key", "null buffer", "cut short", "endless"],
)
def test_a_malformed_extra_array_is_a_reason_and_not_a_guess(words: list[int]) -> None:
    with pytest.raises(Unread, match="extra array"):
        parse_extra(words)


# Nodes, read through a driver that is made up


class Code(int):
    name = "CUDA_ERROR_UNKNOWN"


OK, INVALID, UNKNOWN = Code(0), Code(1), Code(999)


class FakeDriver:
    """As much of `cuda.bindings.driver` as a reader calls. A graph is a list of nodes; parameters lie in real memory."""

    CUgraph = CUfunction = CUkernel = staticmethod(int)

    def __init__(self) -> None:
        self.graphs: dict[int, list[int]] = {1: []}
        self.types: dict[int, int] = {}
        self.params: dict[int, Any] = {}
        self.layouts: dict[int, list[tuple[int, int]]] = {}
        self.asked: list[tuple[int, int]] = []
        self.kept: list[Any] = []

    def node(self, kind: str | int, params: Any = None, graph: int = 1) -> int:
        number = 100 + len(self.types)
        self.types[number] = kind if isinstance(kind, int) else graph_nodes.NODE_TYPES.index(kind)
        self.params[number] = params
        self.graphs[graph].append(number)
        return number

    def kernel(self, handle: int, layout: list[tuple[int, int]], values: list[bytes], **more: int) -> int:
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        array = (ctypes.c_uint64 * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        self.kept += [buffers, array]
        self.layouts[handle] = layout
        fields = {"func": handle, "kern": 0, "kernelParams": ctypes.addressof(array) if values else 0, "extra": 0}
        return self.node("kernel", SimpleNamespace(**{**fields, **more}))

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        if graph not in self.graphs:
            return UNKNOWN, None, 0
        return OK, self.graphs[graph][:count], len(self.graphs[graph])

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        if self.types[node] == 999:
            raise ValueError("999 is not a valid CUgraphNodeType")
        return OK, self.types[node]

    def _params(self, node: int) -> tuple[Any, ...]:
        return (OK, self.params[node]) if self.params[node] is not None else (UNKNOWN, None)

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = cuGraphChildGraphNodeGetGraph = _params

    def cuFuncGetName(self, func: int) -> tuple[Any, ...]:
        return OK, f"kernel_{func}".encode()

    def cuFuncGetParamInfo(self, func: int, index: int) -> tuple[Any, ...]:
        self.asked.append((func, index))
        layout = self.layouts[func]
        return (OK, *layout[index]) if index < len(layout) else (INVALID, None, None)

    def cuFuncGetParamCount(self, func: int) -> tuple[Any, ...]:
        return OK, 0 if func == 9 else 1

    def cuKernelGetName(self, kern: int) -> tuple[Any, ...]:
        return UNKNOWN, None

    def cuKernelGetParamInfo(self, kern: int, index: int) -> tuple[Any, ...]:
        return self.cuFuncGetParamInfo(kern, index)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def read(driver: FakeDriver) -> tuple[list[Touch], dict[str, int], dict[str, int]]:
    reader = NodeReader(driver)
    touches = reader.read(1)
    return touches, dict(reader.by_type), dict(reader.unread)


def test_a_kernels_parameters_are_read_at_their_offsets_and_asked_for_once(driver: FakeDriver) -> None:
    layout = [(0, 8), (8, 4), (16, 24)]
    for _ in range(3):
        driver.kernel(5, layout, [struct.pack("<Q", BASE), b"\1\0\0\0", struct.pack("<QQQ", 1, BASE + 8, 2)])
    touches, by_type, unread = read(driver)
    assert touches == [kernel("kernel_5", BASE, 1, BASE + 8, 2)] * 3
    assert by_type == {"kernel": 3} and unread == {}
    assert driver.asked == [(5, index) for index in range(4)], "the fourth question is the end"


@pytest.mark.parametrize("buffer_first", [True, False])
def test_a_packed_buffer_in_extra_is_read_for_as_long_as_its_size_says(driver: FakeDriver, buffer_first: bool) -> None:
    buffer, size = ctypes.create_string_buffer(struct.pack("<QQ", BASE, BASE + 16) + b"\xff" * 8), ctypes.c_size_t(16)
    pairs = [1, ctypes.addressof(buffer), 2, ctypes.addressof(size)]
    extra = (ctypes.c_uint64 * 5)(*(pairs if buffer_first else pairs[2:] + pairs[:2]), 0)
    driver.kernel(6, [], [], extra=ctypes.addressof(extra))
    touches, _, unread = read(driver)
    assert touches == [kernel("kernel_6", BASE, BASE + 16)] and unread == {}


def test_a_kernel_known_by_its_other_handle_and_without_a_name_is_read_all_the_same(driver: FakeDriver) -> None:
    driver.kernel(7, [(0, 8)], [struct.pack("<Q", BASE)], func=0, kern=7)
    assert read(driver)[0] == [kernel("kernel@0x7", BASE)]


def test_a_kernel_without_parameters_is_read_and_one_that_should_have_some_is_not(driver: FakeDriver) -> None:
    driver.kernel(8, [], [])
    driver.kernel(9, [], [b"12345678"])  # the driver counts none
    driver.kernel(10, [], [b"12345678"])  # it counts one, and describes none
    driver.kernel(11, [(0, 8)], [])
    touches, _, unread = read(driver)
    assert touches == [kernel("kernel_8"), kernel("kernel_9")]
    assert unread == {"kernel: its parameters are not described": 1, "kernel: neither parameters nor an extra array": 1}


def copy(**fields: int) -> SimpleNamespace:
    zero = {f"{side}{name}": 0 for side in ("src", "dst") for name in ("XInBytes", "Y", "Z", "Pitch", "Height", "Host", "Device")}
    return SimpleNamespace(**{**zero, "srcMemoryType": 2, "dstMemoryType": 2, **fields})


def test_copies_and_fills_give_addresses_for_certain(driver: FakeDriver) -> None:
    driver.node("memcpy", copy(srcMemoryType=1, srcHost=BASE, dstDevice=BASE + 4096, dstXInBytes=16))
    driver.node("memset", SimpleNamespace(dst=BASE + 8192))
    touches, by_type, unread = read(driver)
    assert touches == [Touch("memcpy", frozenset({BASE, BASE + 4112}), True), Touch("memset", frozenset({BASE + 8192}), True)]
    assert by_type == {"memcpy": 1, "memset": 1} and unread == {}


def test_a_copy_of_rows_begins_where_its_row_begins() -> None:
    params = copy(srcMemoryType=4, srcDevice=BASE, srcXInBytes=4, srcY=2, srcZ=1, srcPitch=256, srcHeight=10)
    assert copy_address(params, "src") == BASE + 4 + 12 * 256


def test_child_graphs_are_walked_and_what_is_not_read_is_counted(driver: FakeDriver) -> None:
    driver.graphs[2] = []
    driver.kernel(5, [(0, 8)], [struct.pack("<Q", BASE)])
    driver.node("child_graph", 2)
    driver.node("child_graph", 3)  # the driver refuses it
    driver.node("memset", SimpleNamespace(dst=BASE), graph=2)
    for kind in ("empty", "wait_event", "event_record", "host", "conditional", 42, 999):
        driver.node(kind, graph=2)
    driver.node("memcpy", copy(srcMemoryType=3))
    driver.node("kernel")
    touches, by_type, unread = read(driver)
    assert {touch.name for touch in touches} == {"kernel_5", "memset"}
    assert by_type["child_graph"] == 2 and by_type["type_42"] == 1 and by_type["unknown"] == 1
    assert unread == {
        "host node": 1, "conditional node": 1, "type_42 node": 1,
        "node: cuGraphNodeGetType: 999 is not a valid CUgraphNodeType": 1,
        "graph: cuGraphGetNodes: CUDA_ERROR_UNKNOWN": 1,
        "memcpy: to or from a CUDA array": 1,
        "kernel: cuGraphKernelNodeGetParams: CUDA_ERROR_UNKNOWN": 1,
    }  # fmt: skip


def test_bindings_that_lack_a_function_are_a_reason(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeDriver, "cuFuncGetParamInfo")
    driver.kernel(5, [(0, 8)], [struct.pack("<Q", BASE)])
    touches, _, unread = read(driver)
    assert touches == [] and list(unread.values()) == [1] and "cuFuncGetParamInfo" in next(iter(unread))


# The allocator's blocks


def test_adjacent_blocks_meet_without_a_gap_and_without_a_common_byte() -> None:
    one, two = span(0, 512), span(512, 512)
    memory = MemoryMap([two, one])
    assert memory.find(BASE - 1) is None and memory.find(BASE + 1024) is None
    assert memory.find(BASE) == memory.find(BASE + 511) == one
    assert memory.find(BASE + 512) == memory.find(BASE + 1023) == two
    assert memory.overlaps == 0


def test_a_gap_between_blocks_belongs_to_none_and_an_overlap_is_told() -> None:
    memory = MemoryMap([span(0, 512), span(1024, 512), span(1280, 512)])
    assert memory.find(BASE + 600) is None
    assert memory.overlaps == 1
    assert Join(memory, ()).unread == {"allocator: overlapping blocks": 1}
    assert MemoryMap([]).find(BASE) is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 1100))
def test_a_lookup_is_what_a_search_of_all_blocks_finds(sizes: list[int], at: int) -> None:
    spans, start = [], 0
    for size in sizes:
        spans.append(span(start, size))
        start += size + size % 2  # some adjacent, some not
    expected = [s for s in spans if s.address <= BASE + at < s.address + s.nbytes]
    assert MemoryMap(spans).find(BASE + at) == (expected[0] if expected else None)


@pytest.mark.parametrize("with_addresses", [True, False], ids=["addresses given", "addresses added up"])
def test_a_snapshot_gives_blocks_their_pool_their_state_and_their_address(with_addresses: bool) -> None:
    blocks: list[dict[str, Any]] = [
        {"size": 512, "requested_size": 500, "state": "active_allocated"},
        {"size": 1536, "requested_size": 0, "state": "inactive"},
        {"size": 1024, "requested_size": 1024, "state": "active_awaiting_free"},
    ]
    if with_addresses:
        for block, offset in zip(blocks, (0, 512, 2048), strict=True):
            block["address"] = BASE + offset
    memory = MemoryMap.from_snapshot([{"address": BASE, "device": 0, "segment_pool_id": (3, 0), "blocks": blocks}])
    assert memory.find(BASE + 511) == span(0, 512, (3, 0), requested=500)
    assert memory.find(BASE + 512) == span(512, 1536, (3, 0), active=False, requested=0)
    assert memory.find(BASE + 2048) == span(2048, 1024, (3, 0))


# The join


def test_blocks_are_private_external_or_unknown_and_carry_who_reads_them() -> None:
    memory = MemoryMap([span(0, 512), span(512, 512, pool=(1, 0)), span(4096, 512, pool=(0, 7)), span(8192, 512, active=False)])
    join = Join(memory, {(1, 0)})
    join.add(0, [kernel("gemm", BASE + 16, BASE + 64, BASE + 512), kernel("add", BASE + 16, BASE + 4096)])
    join.add(1, [kernel("add", BASE + 16, BASE + 8200), Touch("memcpy", frozenset({0x5000_0000_0010}), certain=True)])
    blocks = join.blocks(lambda _: (0x5000_0000_0000, 4096, "host"))
    assert blocks == (
        Block("unknown", 0x5000_0000_0000, 4096, 4096, (16,), ("memcpy",), 1, memory="host"),
        Block("external", BASE, 512, 512, (16, 64), ("add", "gemm"), 2, device=0),
        Block("private_pool", BASE + 512, 512, 512, (0,), ("gemm",), 1, device=0, pool_id=(1, 0)),
        # A pool of somebody's own is no graph's pool: what lies there can move.
        Block("external", BASE + 4096, 512, 512, (0,), ("add",), 1, device=0, pool_id=(0, 7)),
        Block("external", BASE + 8192, 512, 512, (8,), ("add",), 1, active=False, device=0),
    )
    assert join.pointers == 8 and not join.unread


def test_numbers_are_no_pointers_unless_they_fall_into_a_block() -> None:
    asked: list[int] = []
    join = Join(MemoryMap([span(0, 512)]), ())
    numbers = [0, 1, 4096, 2**32 - 1, 2**63, 2**64 - 1, struct.unpack("<Q", struct.pack("<d", 1.0))[0], (4096 << 32) | 4096]
    join.add(0, [kernel("k", *numbers, BASE + 511)])
    blocks = join.blocks(lambda word: asked.append(word))
    assert [block.offsets for block in blocks] == [(511,)], "a number that looks like a pointer widens the census; accepted"
    assert asked == [(4096 << 32) | 4096], "only what can be an address is worth a question to the driver"


def test_the_address_of_a_copy_stands_even_if_nobody_knows_it() -> None:
    join = Join(MemoryMap([]), ())
    join.add(0, [Touch("memcpy", frozenset({0x5500_0000_0000, 0}), certain=True), kernel("k", 0x5600_0000_0000)])
    assert join.blocks(nowhere) == (Block("unknown", 0x5500_0000_0000, 0, 0, (0,), ("memcpy",), 1, memory="unclear"),)


def test_strays_above_the_limit_are_counted_and_copies_are_not_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "MAX_STRAYS", 2)
    join = Join(MemoryMap([]), ())
    join.add(0, [kernel("k", *(0x5600_0000_0000 + i for i in range(5))), Touch("memset", frozenset({0x5500_0000_0000}), certain=True)])
    assert [block.kernels for block in join.blocks(nowhere)] == [("memset",)]
    assert join.unread == {"words: too many outside of the allocator": 4}


def test_the_second_look_follows_pointer_arrays_one_step_and_only_in_small_external_blocks() -> None:
    array, large, private, weight, other, freed = (
        span(0, 512, requested=24), span(4096, 128 << 10), span(1 << 20, 512, (1, 0)),
        span(2 << 20, 4096), span(3 << 20, 4096), span(4 << 20, 512, active=False),
    )  # fmt: skip
    join = Join(MemoryMap([array, large, private, weight, other, freed]), {(1, 0)})
    join.add(0, [kernel("grouped", array.address, large.address, private.address, freed.address)])
    join.add(1, [kernel("grouped", array.address)])
    held = {
        array.address: struct.pack("<QQQ", weight.address + 32, freed.address, 3),
        weight.address: struct.pack("<Q", other.address),
    }
    asked: list[tuple[int, int]] = []

    def device(address: int, nbytes: int) -> bytes:
        asked.append((address, nbytes))
        return held[address]

    join.second_look(device)
    blocks = {block.address: block for block in join.blocks(nowhere)}
    assert asked == [(array.address, 24)]
    assert blocks[weight.address] == Block("external", weight.address, 4096, 4096, (32,), ("grouped",), 2, device=0, via=(array.address,))
    assert other.address not in blocks and blocks[freed.address].via == ()


def test_device_memory_that_cannot_be_read_is_counted() -> None:
    def refuse(address: int, nbytes: int) -> bytes:
        raise OSError("cuMemcpyDtoH: CUDA_ERROR_INVALID_VALUE")

    join = Join(MemoryMap([span(0, 512)]), ())
    join.add(0, [kernel("k", BASE)])
    join.second_look(refuse)
    assert join.unread == {"second look: cuMemcpyDtoH: CUDA_ERROR_INVALID_VALUE": 1}


def test_a_census_finds_the_block_of_an_address() -> None:
    blocks = (Block("unknown", 100, 0, 0, (0,), (), 1), Block("external", 200, 50, 50, (0,), (), 1))
    seen = Census(1, {}, {}, 2, blocks)
    assert seen.find(100) == blocks[0] and seen.find(249) == blocks[1] and seen.external == (blocks[1],)
    assert seen.find(99) is None and seen.find(101) is None and seen.find(250) is None


# The class that counts captures


class StockGraph:
    """Behaves as torch's class does where it matters: the flag comes through `__init__`, and rules `instantiate`."""

    def __new__(cls, keep_graph: bool = False) -> StockGraph:
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph, self.calls = keep_graph, list[Any]()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **more: Any) -> None:
        self.calls.append(("capture_begin", pool, capture_error_mode, more))

    def capture_end(self) -> None:
        if self.calls[-1] == "fail":
            raise RuntimeError("Invalid capture.")
        self.calls.append("capture_end")

    def instantiate(self) -> None:
        assert self.keep_graph
        self.calls.append("instantiate")

    def reset(self) -> None:
        self.calls.append("reset")


@pytest.fixture
def graph_class() -> Iterator[Any]:
    yield census.counted(StockGraph)
    gc.collect()
    assert census.captured_graphs() == ()


@pytest.mark.parametrize(("arguments", "instantiated"), [({}, True), ({"keep_graph": False}, True), ({"keep_graph": True}, False)])
def test_a_graph_is_kept_readable_and_instantiated_as_its_caller_expects(
    graph_class: Any, arguments: dict[str, bool], instantiated: bool
) -> None:
    graph = graph_class(**arguments)
    assert isinstance(graph, StockGraph) and graph.keep_graph
    graph.capture_begin("pool", capture_error_mode="thread_local", check_input_liveness=False)
    graph.capture_end()
    assert graph.calls[0] == ("capture_begin", "pool", "thread_local", {"check_input_liveness": False})
    assert graph.calls[1:] == ["capture_end"] + ["instantiate"] * instantiated


def test_only_graphs_that_hold_a_capture_count(graph_class: Any) -> None:
    kept, reset, dropped, failed, unused = (graph_class() for _ in range(5))
    for graph in (kept, reset, dropped):
        graph.capture_begin()
        graph.capture_end()
    failed.calls.append("fail")
    with pytest.raises(RuntimeError, match="Invalid capture"):
        failed.capture_end()
    reset.reset()
    del graph, dropped
    gc.collect()
    assert census.captured_graphs() == (kept,)
    assert reset.calls[-1] == "reset" and unused.calls == []


def test_each_capture_has_a_number_of_its_own(graph_class: Any) -> None:
    first, second = graph_class(), graph_class()
    for graph in (first, second):
        graph.capture_begin()
        graph.capture_end()
    before = census.captures()
    assert len(before) == 2
    first.reset()
    assert len(census.captures()) == 1 and census.captures() < before
    first.capture_begin()
    first.capture_end()
    assert len(census.captures() - before) == len(census.captures() & before) == 1
    del graph


def test_the_class_goes_in_once_and_comes_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StockGraph)
    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", StockGraph)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert not census.active()
    assert census.install() and census.active()
    once = torch.cuda.CUDAGraph
    assert census.install() and torch.cuda.CUDAGraph is torch.cuda.graphs.CUDAGraph is once
    census.uninstall()
    assert torch.cuda.CUDAGraph is torch.cuda.graphs.CUDAGraph is StockGraph and not census.active()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_a_torch_without_cuda_is_left_as_it_is() -> None:
    stock = torch.cuda.CUDAGraph
    assert not census.install() and torch.cuda.CUDAGraph is stock and not census.active()


def test_the_module_loads_without_cuda_bindings_and_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['cuda'] = sys.modules['cuda.bindings'] = None\n"
        "from weightsync.storage.census import take\n"
        f"from {UnsupportedEngine.__module__} import UnsupportedEngine\n"
        "try:\n    take()\nexcept UnsupportedEngine as exc:\n    print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Install cuda-bindings" in done.stdout
