"""The trainer's two ends: what it may offer (`client.source`), and how a service that misbehaves shows (`client.http`)."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.client.http import Http
from weightsync.client.source import Lazy, Offer, SourceSpec, offer, require_same_dtypes
from weightsync.errors import (
    ConfigError,
    DeadlineExceeded,
    ManifestRefused,
    ServiceUnreachable,
    UpdateConflict,
    UpdateFailed,
    WeightSyncError,
)
from weightsync.protocol import DTYPE_BYTES

# --- what can be offered ------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A tied head, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cos_cache", torch.ones(100), persistent=False)


def names(source: Any) -> list[str]:
    return [spec.name for spec in offer(source).manifest.tensors]


def read_all(offered: Offer) -> list[torch.Tensor]:
    return [offered.read(index) for index in range(len(offered.manifest.tensors))]


def test_a_module_offers_parameters_once_and_persistent_buffers() -> None:
    model = Model()
    assert names(model) == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "scale",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    offered = offer(model)
    tensors = read_all(offered)
    assert tensors[0].data_ptr() == model.embed.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in tensors)
    assert offered.transport == "gloo"


def test_a_manifest_tells_dtypes_and_shapes_as_they_are() -> None:
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0), "c": torch.zeros(0, 4, dtype=torch.int8)}
    specs = offer(tensors).manifest.tensors
    assert [(s.name, s.dtype, s.shape) for s in specs] == [("a", "bfloat16", (2, 3)), ("b", "float32", ()), ("c", "int8", (0, 4))]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_of_the_protocol_can_be_offered(dtype: str) -> None:
    tensor = torch.zeros(3, dtype=torch.uint8).view(torch.uint8).repeat(8).view(getattr(torch, dtype))
    (spec,) = offer({"t": tensor}).manifest.tensors
    assert spec.dtype == dtype
    assert spec.nbytes == tensor.nbytes


@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: t.items(), lambda t: iter(t.items()), lambda t: list(t.items()), lambda t: (p for p in t.items())]
)
def test_a_mapping_and_any_iterable_of_pairs_will_do(make: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3)}
    offered = offer(make(tensors))
    assert [spec.name for spec in offered.manifest.tensors] == ["b", "a"], "in the order given"
    assert [t.data_ptr() for t in read_all(offered)] == [t.data_ptr() for t in tensors.values()]


def test_named_parameters_will_do() -> None:
    assert names(Model().named_parameters()) == ["embed.weight", "norm.weight", "norm.bias"]


def test_an_error_of_the_callers_own_iterator_passes_unchanged() -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        offer(pairs())


def partitioned_by_zero3() -> torch.nn.Parameter:
    """As DeepSpeed leaves a parameter outside its `GatheredParameters`."""
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = torch.ones(2), 4, torch.Size([4])  # type: ignore[attr-defined]
    return parameter


def flat_of_fsdp1() -> Any:
    from torch.distributed.fsdp._flat_param import FlatParameter

    flat = torch.nn.Parameter(torch.ones(12))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    assert isinstance(flat, FlatParameter), "this is how torch tells them"
    return flat


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (partitioned_by_zero3(), "partitioned by DeepSpeed ZeRO-3"),
        (flat_of_fsdp1(), "FlatParameter: FSDP1"),
        (torch.empty(2, device="meta"), "device meta"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, dtype=torch.uint16), "uint16"),
        ([1.0, 2.0], "list, want a tensor"),
        (None, "NoneType, want a tensor"),
    ],
    ids=lambda value: None if isinstance(value, (torch.Tensor, list)) else str(value),
)
def test_what_is_no_dense_whole_tensor_is_refused_by_name(tensor: Any, words: str) -> None:
    with pytest.raises(ManifestRefused, match=words) as caught:
        offer({"fine": torch.ones(1), "layer.weight": tensor})
    assert caught.value.names == ("layer.weight",)
    assert "'layer.weight'" in caught.value.message


def test_tensors_on_several_devices_are_refused_by_name() -> None:
    # meta stands for a part of the model that was not loaded: a second real device is not at hand.
    with pytest.raises(ManifestRefused, match="'b' is on device meta"):
        offer({"a": torch.ones(1), "b": torch.empty(1, device="meta")})


@pytest.mark.parametrize("name", [1, None, ("a",), b"a", torch.ones(1)], ids=lambda name: type(name).__name__)
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(ManifestRefused, match=f"name is {type(name).__name__}, want str"):
        offer([(name, torch.ones(1))])


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 600])
def test_a_name_that_cannot_travel_is_refused(name: str) -> None:
    with pytest.raises(ManifestRefused, match="tensor name"):
        offer([(name, torch.ones(1))])


def test_a_name_given_twice_is_refused_and_named() -> None:
    with pytest.raises(ManifestRefused, match=r"twice: a\."):
        offer([("a", torch.ones(1)), ("b", torch.ones(1)), ("a", torch.ones(1))])


@pytest.mark.parametrize(
    "item", ["a", torch.ones(2), ("a",), ("a", torch.ones(1), 1), ["a", torch.ones(1)], 7], ids=lambda item: type(item).__name__
)
def test_an_iterable_of_something_else_is_refused(item: Any) -> None:
    with pytest.raises(ManifestRefused, match=r"want \(name, tensor\) pairs"):
        offer(iter([("fine", torch.ones(1)), item]))


@pytest.mark.parametrize("source", [None, 7, print])
def test_what_is_no_source_at_all_is_refused_by_its_type(source: Any) -> None:
    with pytest.raises(ManifestRefused, match=f"want weights, got {type(source).__name__}"):
        offer(source)


@pytest.mark.parametrize("source", [{}, [], iter(()), torch.nn.Module(), torch.nn.ReLU()], ids=lambda source: type(source).__name__)
def test_an_empty_model_is_refused(source: Any) -> None:
    with pytest.raises(ManifestRefused, match="empty"):
        offer(source)


def test_a_parameter_that_zero3_has_gathered_is_taken_as_it_is() -> None:
    parameter = partitioned_by_zero3()
    parameter.data = torch.arange(4.0)
    assert torch.equal(offer({"w": parameter}).read(0), torch.arange(4.0))


def test_a_module_wrapped_by_fsdp1_is_refused_with_what_to_do(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(3, 3), use_orig_params=True, device_id=torch.device("cpu")))
        with pytest.raises(ManifestRefused, match="module '0' is wrapped by FSDP1") as caught:
            offer(wrapped)
    finally:
        dist.destroy_process_group()
    assert "get_model_state_dict" in caught.value.hint


# --- what is made when it is its turn -----------------------------------------------------------


def test_what_is_lazy_is_made_once_when_it_is_read_and_not_before() -> None:
    made: list[str] = []

    def lazy(name: str) -> Lazy:
        return Lazy(torch.bfloat16, (2,), lambda: made.append(name) or torch.ones(2, dtype=torch.bfloat16))  # type: ignore[func-returns-value]

    offered = offer({"a": lazy("a"), "b": torch.zeros(1), "c": lazy("c")})
    first = offered.manifest.tensors[0]
    assert (first.name, first.dtype, first.shape) == ("a", "bfloat16", (2,)) and made == []
    offered.read(0)
    assert made == ["a"]
    offered.read(1)
    offered.read(2)
    assert made == ["a", "c"]


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: {}["lost"], "'w' could not be read: KeyError: 'lost'"),
        (lambda: torch.ones(2) @ torch.ones(3), "'w' could not be read: RuntimeError"),
        (lambda: None, "'w' is NoneType, want a tensor"),
        (lambda: torch.eye(2).to_sparse(), "'w' has layout"),
    ],
)
def test_what_a_lazy_tensor_does_wrong_ends_the_update_by_name(read: Callable[[], Any], words: str) -> None:
    with pytest.raises(UpdateFailed, match=words) as caught:
        offer({"w": Lazy(torch.float32, (2,), read)}).read(0)
    assert caught.value.names == ("w",) and not caught.value.retryable


class Source:
    """A source of one's own."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def specs(self) -> list[SourceSpec]:
        sizes = (10, 20, 5, 100, 10, 10, 10)
        return [SourceSpec(f"w{at}", torch.uint8, (size,), collective=at != 4) for at, size in enumerate(sizes)]

    def read(self, indices: Sequence[int]) -> list[torch.Tensor]:
        self.asked += indices
        return [torch.full(self.specs()[index].shape, index, dtype=torch.uint8) for index in indices]


def test_what_ranks_read_together_is_read_in_runs_of_at_most_half_a_bucket_each_announced_before() -> None:
    source, told = Source(), list[tuple[int, int]]()
    offered = offer(source, bucket_bytes=64, members=[0])
    assert offered.runs == ((0, 1), (2,), (3,), (5, 6)), "a larger tensor alone; what is not collective lies between"
    offered.go = lambda run: told.append((run, len(source.asked)))
    assert [int(tensor[0]) for tensor in read_all(offered)] == list(range(7))
    assert source.asked == list(range(7))
    assert told == [(0, 0), (1, 2), (2, 3), (3, 5)]
    assert offered.most_gathered == 100


def test_nothing_of_a_run_is_read_when_the_update_has_ended() -> None:
    source = Source()
    offered = offer(source, members=[0])

    def over(_: int) -> None:
        raise UpdateConflict("it has ended")

    offered.go = over
    with pytest.raises(UpdateConflict):
        offered.read(0)
    assert source.asked == []


def test_the_fingerprint_tells_names_dtypes_shapes_and_what_is_read_together_apart() -> None:
    def one(name: str = "a", dtype: torch.dtype = torch.float32, size: int = 2, collective: bool = False) -> str:
        return offer({name: Lazy(dtype, (size,), lambda: torch.ones(1), collective=collective)}).fingerprint

    assert one() == one()
    assert len({one(), one("b"), one(dtype=torch.int32), one(size=3), one(collective=True)}) == 5


# --- devices --------------------------------------------------------------------------------------


def on(device: str) -> Lazy:
    return Lazy(torch.float32, (2,), lambda: torch.arange(2.0), torch.device(device))


@pytest.mark.parametrize(
    ("source", "device", "expected", "transport"),
    [
        ({"a": on("cpu")}, None, "cpu", "gloo"),
        ({"a": on("cpu"), "b": on("cuda:1")}, None, "cuda:1", "nccl"),
        ({"a": on("cpu")}, "cuda:0", "cuda:0", "nccl"),
        ({"a": on("cuda:0"), "b": on("cuda:1")}, "cuda:1", "cuda:1", "nccl"),
        ({"a": on("cuda:0"), "b": on("cuda:1")}, "cpu", "cpu", "gloo"),
    ],
)
def test_tensors_travel_from_the_one_gpu_that_has_some_or_from_where_it_is_said(
    source: Any, device: str | None, expected: str, transport: str
) -> None:
    offered = offer(source, None if device is None else torch.device(device))
    assert (str(offered.device), offered.transport) == (expected, transport)


def test_tensors_on_several_gpus_are_refused_until_one_is_named() -> None:
    with pytest.raises(ManifestRefused, match="several devices: 'b' on cuda:0, 'c' on cuda:1") as caught:
        offer({"a": on("cpu"), "b": on("cuda:0"), "c": on("cuda:1")})
    assert "device=" in caught.value.hint


def test_a_tensor_elsewhere_is_moved_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    stock = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append(device) or stock(self, "cpu"))  # type: ignore[func-returns-value]
    offered = offer({"a": torch.ones(2), "b": torch.ones(3)}, torch.device("cuda:0"))
    assert moved == []
    offered.read(0)
    assert moved == [torch.device("cuda:0")]


# --- dtypes from update to update -----------------------------------------------------------------


def test_a_dtype_that_is_another_than_in_the_last_update_is_refused_with_both() -> None:
    manifest = offer({"a": torch.ones(1), "b": torch.ones(1), "new": torch.ones(1)}).manifest
    require_same_dtypes(manifest, {})
    require_same_dtypes(manifest, {"a": "float32", "b": "float32", "gone": "int8"})
    with pytest.raises(ManifestRefused, match=r"^1 tensor\(s\) .*: b is float32, was bfloat16") as caught:
        require_same_dtypes(manifest, {"a": "float32", "b": "bfloat16"})
    assert caught.value.names == ("b",)


# --- a service that misbehaves ------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        server: Any = self.server
        server.seen.append((self.command, self.path, dict(self.headers), body))
        status, content = server.answer
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.seen, server.answer = [], (200, b"{}")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that accepts a connection, reads a request, and then does `talk`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    talk(connection)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def call(url: str, seconds: float = 5.0) -> Any:
    http = Http(url, "t")
    try:
        return http.get("/v1/status", seconds)
    finally:
        http.close()


def test_a_call_carries_token_path_and_json(server: Any) -> None:
    server.answer = (200, '{"größe": [1, null]}'.encode())
    http = Http(server.url + "/", "the-token")
    assert http.get("/v1/status", 5.0) == {"größe": [1, None]}
    assert http.post("/v1/updates", {"a": "ü"}, 5.0) == {"größe": [1, None]}
    http.close()
    (method, path, headers, _), (method2, path2, _, body2) = server.seen
    assert (method, path, headers["authorization"]) == ("GET", "/v1/status", "Bearer the-token")
    assert (method2, path2, json.loads(body2)) == ("POST", "/v1/updates", {"a": "ü"})


def test_no_proxy_of_the_environment_is_used(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert call(server.url) == {}


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceUnreachable, match=f"no service answers at {url}/v1/status") as caught:
            call(url)
    assert caught.value.retryable
    assert "weightsync serve" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8517",
        "http://",
        "ftp://localhost",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://a..b",
        "http://xn--a",
        "http://nul\0",
        "/v1",
    ],
)
def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(ServiceUnreachable, match="no service answers at"):
        call(url)


@pytest.mark.parametrize("status", [200, 404, 500])
@pytest.mark.parametrize(
    "content", [b"", b"<html>hello</html>", b"{", b"\xff\xfe\x00", b"[" * 100_000], ids=lambda content: repr(content[:10])
)
def test_an_answer_that_is_no_json_may_come_from_another_service(server: Any, status: int, content: bytes) -> None:
    server.answer = (status, content)
    with pytest.raises(ServiceUnreachable, match=rf"GET {server.url}/v1/status answered {status} and no JSON"):
        call(server.url)


def test_a_server_that_accepts_and_never_answers_costs_no_more_than_the_deadline() -> None:
    with raw_server(lambda connection: time.sleep(10)) as url:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"GET .*/v1/status gave no answer within 1 s") as caught:
            call(url, 0.6)
        assert 0.5 <= time.monotonic() - began < 1.5
        assert caught.value.retryable


def test_a_server_that_is_full_and_does_not_even_accept_costs_no_more_than_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):  # fill the queue of the kernel
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        began = time.monotonic()
        with pytest.raises((ServiceUnreachable, DeadlineExceeded)):
            call(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.6)
        assert time.monotonic() - began < 1.5


def test_a_server_that_answers_drop_by_drop_costs_no_more_than_the_deadline() -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(100):
            connection.sendall(b" ")
            time.sleep(0.1)

    with raw_server(talk) as url:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            call(url, 0.6)
        assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", b"SSH-2.0-OpenSSH\r\n"])
def test_a_connection_that_breaks_off_is_unreachable(sent: bytes) -> None:
    with raw_server(lambda connection: connection.sendall(sent)) as url, pytest.raises(ServiceUnreachable, match="broke off") as caught:
        call(url)
    assert caught.value.retryable


def test_an_error_of_the_service_is_raised_as_its_own_class(server: Any) -> None:
    error = UpdateConflict("update u-1 is under way", hint="Wait", update_id="u-2", names=["a"])
    server.answer = (409, json.dumps({"error": error.to_dict()}).encode())
    with pytest.raises(UpdateConflict) as caught:
        call(server.url)
    assert caught.value.to_dict() == error.to_dict()


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "vLLM says no", "type": "BadRequestError", "param": None, "code": 400}},
        {"detail": "vLLM says no"},
        ["vLLM says no"],
        "vLLM says no",
        {"error": "vLLM says no"},
    ],
    ids=str,
)
def test_an_error_of_another_form_is_shown_as_it_came(server: Any, body: Any) -> None:
    server.answer = (400, json.dumps(body).encode())
    with pytest.raises(WeightSyncError, match=r"answered 400: .*vLLM says no") as caught:
        call(server.url)
    assert type(caught.value) is WeightSyncError


@pytest.mark.parametrize("token", ["", " ", "a b", "a\nb", "a\r\nx: y", "secret\n", "é"])
def test_a_token_that_fits_no_header_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="token") as caught:
        Http("http://127.0.0.1:1", token)
    assert not token.strip() or token.strip() not in str(caught.value).replace("a space", "")
    assert "secret" not in str(caught.value)


# --- a scope ------------------------------------------------------------------------------------


def test_a_scope_takes_its_tensors_out_of_any_source() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    pairs = list(model.named_parameters())
    for source in (model, dict(pairs), pairs, iter(pairs)):
        assert [spec.name for spec in offer(source, scope=["1.*"]).manifest.tensors] == ["1.weight", "1.bias"]
    assert [spec.name for spec in offer(model, scope=["*.bias", "0.w?ight"]).manifest.tensors] == ["0.weight", "0.bias", "1.bias"]
    assert len(offer(model, scope=None).manifest.tensors) == 4


def test_a_scope_reads_the_tensors_that_it_names_also_where_others_are_shaped_alike() -> None:
    alike = {f"layers.{number}.w": torch.full((3,), float(number)) for number in range(4)}
    for source in (alike, {name: Lazy(torch.float32, (3,), lambda it=it: it) for name, it in alike.items()}):  # type: ignore[misc]
        offered = offer(source, scope=["layers.2.*", "layers.3.*"])
        assert [float(offered.read(index)[0]) for index in range(2)] == [2.0, 3.0]


def test_a_scope_that_takes_nothing_or_is_no_list_is_refused() -> None:
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ManifestRefused, match=r"scope: none of 2 tensors matches 'layers\.\*'") as caught:
        offer(model, scope=["layers.*"])
    assert "'weight'" in caught.value.hint
    for scope in ("weight", [], ()):
        with pytest.raises(ConfigError, match="want a list of patterns"):
            offer(model, scope=scope)
