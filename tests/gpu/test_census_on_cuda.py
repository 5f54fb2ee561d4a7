"""The census of real graphs: cuBLAS, elementwise, copies, Triton, pointer arrays; and graphs that work as before.

Needs torch with CUDA and cuda-bindings; without Triton its tests are skipped. No vLLM.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weightsync.storage import census
from weightsync.storage.census import Block, Census
from weightsync.storage.graph_nodes import NodeReader, load_driver

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_triton = pytest.mark.skipif(triton is None, reason="no Triton")

#: Parts of the names of cuBLAS's matrix kernels on the devices so far.
GEMM_NAMES = ("gemm", "nvjet", "cutlass", "gemv", "xmma")

if triton is not None:

    @triton.jit
    def scale_rows(source, factor, out):
        offsets = tl.program_id(0) * 128 + tl.arange(0, 128)
        tl.store(out + offsets, tl.load(source + offsets) * tl.load(factor))

    @triton.jit
    def gather_by_table(table, out):
        row = tl.program_id(0)
        source = tl.load(table + row).to(tl.pointer_type(tl.float32))
        offsets = tl.arange(0, 128)
        tl.store(out + row * 128 + offsets, tl.load(source + offsets) + 1.0)


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    assert census.install() and census.active()
    for graph in census.captured_graphs():  # held by the traceback of a test that failed
        graph.reset()
    yield
    gc.collect()
    census.uninstall()


def capture(function: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """Warm up on a side stream, capture; the graph and what the function returned while captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        out = function()
    return graph, out


def take() -> Census:
    """A census that is complete, printed."""
    seen = census.take()
    print(
        f"census: {seen.graphs} graphs, {seen.nodes_by_type}, {seen.pointers} pointers, {len(seen.blocks)} blocks,"
        f" {len(seen.external)} external, {seen.seconds * 1e3:.1f} ms, {seen.kept_host_bytes} bytes of host memory kept"
    )
    assert seen.unread == {}, f"not everything was read: {seen.unread}"
    return seen


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding: a captured product may come from another kernel than an eager one."""
    return float((one - other).double().norm()) <= 0.02 * float(other.double().norm())


def block_of(seen: Census, tensor: torch.Tensor) -> Block:
    """The block of a tensor, which must be listed with the exact address of its first element."""
    found = seen.find(tensor.data_ptr())
    listed = [(block.kind, hex(block.address), block.nbytes, block.offsets, block.kernels) for block in seen.blocks]
    assert found is not None, f"no graph seems to touch {hex(tensor.data_ptr())}; blocks: {listed}"
    assert tensor.data_ptr() - found.address in found.offsets, f"{hex(tensor.data_ptr())} is in {found}, but not pointed to"
    return found


@pytest.mark.parametrize(("rows", "width"), [(8, 256), (128, 4096), (1, 512)])
def test_a_weight_of_a_cublas_product_is_external_and_the_result_is_private(rows: int, width: int) -> None:
    weight = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    graph, out = capture(lambda: x @ weight)
    seen = take()
    for tensor in (weight, x):
        found = block_of(seen, tensor)
        assert found.kind == "external" and found.active and found.memory == "device"
        # A matrix kernel that is given its operands by TMA descriptors alone would hide them: its name is in the message.
        assert any(part in name.lower() for name in found.kernels for part in GEMM_NAMES), found.kernels
    assert block_of(seen, weight).requested_bytes == weight.nbytes
    found = block_of(seen, out)
    assert found.kind == "private_pool" and found.pool_id == tuple(graph.pool())
    print("kernels of the product:", block_of(seen, weight).kernels)
    weight.copy_(torch.randn_like(weight))
    graph.replay()
    assert close(out, x @ weight)


def test_a_view_is_found_at_its_offset_and_a_temporary_is_private() -> None:
    parent, x = torch.randn(1024, device="cuda"), torch.randn(256, device="cuda")
    view = parent[512:768]
    graph, (temporary, out) = capture(lambda: ((temporary := x * view), temporary + 1.0))
    seen = take()
    found = block_of(seen, view)
    assert found.kind == "external" and found.address == parent.data_ptr() and 2048 in found.offsets
    assert all("elementwise" in name for name in found.kernels), found.kernels
    assert block_of(seen, temporary).kind == block_of(seen, out).kind == "private_pool"
    parent.fill_(2.0)
    graph.replay()
    assert torch.equal(out, x * 2.0 + 1.0)


def test_copies_fills_and_memory_that_the_allocator_does_not_have() -> None:
    driver = load_driver()
    torch.cuda.synchronize()  # makes the device's context current for the calls below
    error, foreign = driver.cuMemAlloc(1 << 20)
    assert int(error) == 0, error
    source, target = torch.randn(4096, device="cuda"), torch.zeros(4096, device="cuda")
    pinned, uploaded = torch.randn(256).pin_memory(), torch.zeros(256, device="cuda")

    def work() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for (error,) in (
            driver.cuMemcpyDtoDAsync(target.data_ptr(), source.data_ptr(), source.nbytes, stream),
            driver.cuMemsetD8Async(int(foreign) + 256, 0, 512, stream),
        ):
            assert int(error) == 0, error
        uploaded.copy_(pinned, non_blocking=True)

    try:
        graph, _ = capture(work)
        seen = take()
        assert seen.nodes_by_type.get("memcpy") == 2 and seen.nodes_by_type.get("memset") == 1, seen.nodes_by_type
        for tensor in (source, target, uploaded):
            found = block_of(seen, tensor)
            assert found.kind == "external" and found.kernels == ("memcpy",)
        found = block_of(seen, pinned)
        assert found.kind == "unknown" and found.memory == "host", found
        unknown = seen.find(int(foreign) + 256)
        assert unknown is not None and unknown.kind == "unknown" and unknown.memory == "device" and unknown.kernels == ("memset",)
        assert (unknown.address, unknown.nbytes, unknown.offsets) == (int(foreign), 1 << 20, (256,)), unknown
        source.fill_(3.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(target, source) and torch.equal(uploaded.cpu(), pinned)
        graph.reset()
    finally:
        driver.cuMemFree(foreign)


@needs_triton
def test_a_triton_kernel_shows_its_tensors() -> None:
    source, factor, out = torch.randn(512, device="cuda"), torch.tensor([2.0], device="cuda"), torch.zeros(512, device="cuda")
    graph, _ = capture(lambda: scale_rows[(4,)](source, factor, out))
    seen = take()
    for tensor in (source, factor, out):
        found = block_of(seen, tensor)
        assert found.kind == "external" and found.kernels == ("scale_rows",) and found.via == ()
    factor.fill_(5.0)
    graph.replay()
    assert torch.equal(out, source * 5.0)


@needs_triton
def test_a_pointer_array_in_device_memory_leads_to_what_it_points_to() -> None:
    parts = [torch.full((128,), float(number), device="cuda") for number in range(4)]
    far = torch.full((1 << 20,), 9.0, device="cuda")  # a block above the limit is a target all the same
    table = torch.tensor([part.data_ptr() for part in parts] + [far[1024:].data_ptr()], dtype=torch.int64, device="cuda")
    out = torch.zeros(5, 128, device="cuda")
    graph, _ = capture(lambda: gather_by_table[(5,)](table, out))
    seen = take()
    array = block_of(seen, table)
    assert array.kind == "external" and array.via == ()
    for tensor in (*parts, far[1024:]):
        found = block_of(seen, tensor)
        assert found.kind == "external" and found.via == (array.address,) and found.kernels == ("gather_by_table",)
    assert block_of(seen, far[1024:]).address == far.data_ptr()
    graph.replay()
    assert torch.equal(out[:, 0].cpu(), torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]))


def test_pointers_that_travel_in_a_struct_by_value_are_found() -> None:
    tensors = [torch.zeros(64, device="cuda") for _ in range(20)]
    graph, _ = capture(lambda: torch._foreach_add_(tensors, 1.0))
    seen = take()
    for tensor in tensors:
        found = block_of(seen, tensor)
        assert found.kind == "external" and found.via == ()
    before = tensors[7].clone()
    graph.replay()
    assert torch.equal(tensors[7], before + 1.0)


def test_graphs_that_share_a_pool_and_a_weight_count_as_two_readers() -> None:
    weight, pool = torch.randn(256, 256, device="cuda"), torch.cuda.graph_pool_handle()
    inputs = [torch.randn(rows, 256, device="cuda") for rows in (1, 64)]
    graphs = [capture(lambda x=x: (x @ weight) * 2.0, pool=pool) for x in inputs]
    seen = take()
    assert seen.graphs == 2
    assert block_of(seen, weight).graphs == 2
    for x, (graph, out) in zip(inputs, graphs, strict=True):
        assert block_of(seen, x).graphs == 1
        found = block_of(seen, out)
        assert found.kind == "private_pool" and found.pool_id == tuple(pool) == tuple(graph.pool())
    for x, (graph, out) in zip(inputs, graphs, strict=True):
        graph.replay()
        assert close(out, (x @ weight) * 2.0)


def test_graphs_that_are_gone_before_the_seal_do_not_count() -> None:
    x = torch.randn(64, device="cuda")
    kept, dropped, reset = (capture(lambda: x + 1.0)[0] for _ in range(3))
    reset.reset()
    del dropped
    gc.collect()
    assert take().graphs == 1
    with torch.cuda.graph(reset):
        x * 2.0
    assert take().graphs == 2, "a graph may capture again after a reset"
    kept.replay()
    torch.cuda.synchronize()


def test_memory_that_was_freed_and_that_a_graph_still_reads_is_told() -> None:
    x, holder = torch.randn(300_000, device="cuda"), {"weight": torch.randn(300_000, device="cuda")}
    graph, _ = capture(lambda: x * holder["weight"])
    address = holder.pop("weight").data_ptr()
    found = take().find(address)
    assert found is not None, "its segment went back to the device, which a neighbour in use should prevent"
    assert found.kind == "external" and not found.active, found
    graph.reset()


def test_a_nested_graph_is_walked() -> None:
    driver = load_driver()
    x = torch.randn(64, device="cuda")
    graph, _ = capture(lambda: x + 1.0)
    error, parent = driver.cuGraphCreate(0)
    assert int(error) == 0, error
    try:
        error, _ = driver.cuGraphAddChildGraphNode(parent, [], 0, driver.CUgraph(graph.raw_cuda_graph()))
        assert int(error) == 0, error
        reader = NodeReader(driver)
        touches = reader.read(int(parent))
        assert not reader.unread and reader.by_type["child_graph"] == 1 and reader.by_type["kernel"] == 1, reader.by_type
        assert any(x.data_ptr() in touch.words for touch in touches)
    finally:
        driver.cuGraphDestroy(parent)


def test_installing_twice_is_harmless_and_a_graph_is_ready_when_its_capture_ends() -> None:
    once = torch.cuda.CUDAGraph
    assert census.install() and torch.cuda.CUDAGraph is once
    x = torch.zeros(8, device="cuda")
    graph, _ = capture(lambda: x.add_(1.0))
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert graph.raw_cuda_graph_exec() != 0, "instantiated already, as torch does by default"
    own = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(own):
        x.mul_(2.0)
    own.instantiate()
    assert take().graphs == 2
    x.fill_(1.0)
    graph.replay()
    own.replay()
    assert x.tolist() == [4.0] * 8


def test_make_graphed_callables_still_trains() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, device="cuda")
    sample = torch.randn(16, 64, device="cuda", requires_grad=True)
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    # A twin: a gradient's node that this layer has from the default stream would break the capture.
    twin = copy.deepcopy(layer)
    expected = twin(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), twin.weight)
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    seen = take()
    assert seen.graphs == 2, "forward and backward"
    assert block_of(seen, layer.weight).kind == "external"
    out = graphed(x)
    assert close(out, expected)
    out.square().sum().backward()
    assert close(layer.weight.grad, gradient)


def test_random_numbers_in_a_graph_still_advance() -> None:
    graph, out = capture(lambda: torch.rand(1024, device="cuda"))
    take()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_thirty_graphs_of_a_thousand_kernels_take_a_fraction_of_a_second() -> None:
    weights = [torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(12)]
    norms = [torch.randn(512, device="cuda", dtype=torch.bfloat16) for _ in range(12)]
    pool = torch.cuda.graph_pool_handle()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for weight, norm in zip(weights, norms, strict=True):
            x = torch.nn.functional.silu(x @ weight) * norm
        return x

    inputs = [torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16) for rows in range(1, 31)]
    graphs = [capture(lambda x=x: forward(x), pool=pool) for x in inputs]
    first, second = take(), take()
    assert first.graphs == second.graphs == 30
    assert first.nodes_by_type["kernel"] >= 1000, first.nodes_by_type
    for tensor in (*weights, *norms):
        assert block_of(second, tensor).graphs == 30
    assert [block.address for block in first.external] == [block.address for block in second.external]
    assert min(first.seconds, second.seconds) < 0.5, "a hundred milliseconds are the aim; five times that is a fault"
    for x, (graph, out) in zip(inputs, graphs, strict=True):
        graph.replay()
        assert close(out, forward(x))
