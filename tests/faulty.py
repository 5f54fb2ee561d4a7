"""Faults of updates, and a real engine in a process of its own that meets them.

Functions whose first argument is `state` run in the engine's process (`peers.Peer`).

Not covered: faults between a controller and its engines (the fleet's tests have those).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from tests.bench import SECONDS, WAYS, Bench, Fault, Gone, Send, Tensors, send, structure
from weightsync.client.sender import Sender
from weightsync.transport.channel import Outlet
from weightsync.transport.communicator import Communicator
from weightsync.transport.ground import Ground
from weightsync.transport.packing import Bucket, BucketPlan
from weightsync.transport.wire import Cancelled, never
from weightsync.worker import staging


class Broken(Exception):
    """What a worker's step raises when a fault says so."""


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    """Tensors are missing whose name has one of these in it."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def last(part: str) -> Callable[[Tensors], Tensors]:
    """The tensors with this in their names come after all others."""
    return lambda tensors: without(part)(tensors) | {name: tensor for name, tensor in tensors.items() if part in name}


def reshaped(part: str) -> Callable[[Tensors], Tensors]:
    """A row is missing."""
    return lambda tensors: {name: tensor[1:].contiguous() if part in name else tensor for name, tensor in tensors.items()}


def spoilt(name: str) -> Callable[[Tensors], Tensors]:
    """One element is NaN."""
    return lambda tensors: tensors | {name: tensors[name].index_fill(1, torch.tensor([3]), float("nan"))}


class Flipping(Sender):
    """A bit of the third bucket changes between the digest and the worker."""

    def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
        packed = super()._pack(bucket, window)
        if bucket is self._plan.buckets[2]:
            window[bucket.pieces[0].bucket_offset + 8] ^= 4
        return packed


class Short(Outlet):
    """A wire on which the fourth bucket ends half way; the trainer leaves then, or goes on as if nothing had been."""

    def __init__(self, wire: Communicator, leaves: bool) -> None:
        self._wire, self.info, self.device, self._leaves, self._count = wire, wire.info, wire.device, leaves, 0

    @property
    def open(self) -> bool:
        return self._wire.open

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled = never) -> Ground:
        return self._wire.ground(plan, deadline, cancelled)

    def end(self, deadline: float, cancelled: Cancelled = never) -> None:
        self._wire.end(deadline, cancelled)

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> Any:
        self._count += 1
        if self._count != 4:
            return self._wire.post(tensors, deadline, cancelled)
        half = [tensors[0][: tensors[0].numel() // 2]]
        if not self._leaves:
            return self._wire.post([*half, *tensors[1:]], deadline, cancelled)
        self._wire.settle(self._wire.post(half, deadline, cancelled), deadline, cancelled)
        raise Gone

    def settle(self, posted: Any, deadline: float, cancelled: Cancelled = never) -> None:
        self._wire.settle(posted, deadline, cancelled)

    def close(self) -> None:
        self._wire.close()


def leaving(share: float) -> Send:
    """The trainer leaves when it has sent this share of its bytes."""

    def told(sent: int, total: int) -> None:
        if sent >= share * total:
            raise Gone

    def run(*to: Any) -> None:
        told(0, 1)
        send(*to, told=told)

    return run


def shortened(leaves: bool) -> Send:
    return lambda offered, plan, wire, cancelled: send(offered, plan, Short(wire, leaves), cancelled)


@contextlib.contextmanager
def loader_raises(bench: Bench, tensors: Tensors, index: int, times: int) -> Iterator[None]:
    """The loader raises when it is to write this tensor into a real parameter; so often at most."""
    from vllm.model_executor.model_loader.reload import layerwise

    bad, stock, left = list(tensors.values())[index], layerwise._get_original_loader, [times]

    def original(parameter: torch.Tensor) -> Callable[..., Any]:
        loader = stock(parameter)

        @functools.wraps(loader)
        def raises(*args: Any, **kwargs: Any) -> Any:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if left[0] and not given[0].is_meta and given[1].shape == bad.shape and torch.equal(given[1], bad):
                left[0] -= 1
                raise Broken("out of patience")
            return loader(*args, **kwargs)

        return raises

    with patch.object(layerwise, "_get_original_loader", original):
        yield
    left[0] = 0


def loading(index: Callable[[int], int], times: int = 1 << 30) -> Callable[[Bench, Tensors], AbstractContextManager[Any]]:
    return lambda bench, tensors: loader_raises(bench, tensors, index(len(tensors)), times)


def repeated(index: int, after: int, other: bool) -> Callable[[Bench, Tensors], AbstractContextManager[Any]]:
    """What is staged gives a tensor again, behind another one; as it was, or with other values."""

    def around(bench: Bench, tensors: Tensors) -> AbstractContextManager[Any]:
        stock = staging.Staged.stream

        def stream(self: staging.Staged, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
            kept: Any = None
            for number, (name, tensor) in enumerate(stock(self, taken)):
                kept = (name, tensor + 1 if other else tensor) if number == index else kept
                yield name, tensor
                if number == after % len(tensors):
                    yield kept

        return patch.object(staging.Staged, "stream", stream)

    return around


def raising(find: Callable[[Bench], tuple[Any, str]]) -> Callable[[Bench, Tensors], AbstractContextManager[Any]]:
    """A method raises."""
    return lambda bench, tensors: patch.object(*find(bench), side_effect=Broken("out of luck"))


def processing_raises(path: str) -> Callable[[Bench, Tensors], AbstractContextManager[Any]]:
    """Processing after loading raises in one layer, when it has done its work."""

    def around(bench: Bench, tensors: Tensors) -> AbstractContextManager[Any]:
        layer = bench.model.get_submodule(path)
        owner: Any = type(layer if hasattr(layer, "process_weights_after_loading") else layer.quant_method)
        stock = owner.process_weights_after_loading

        def process(self: Any, *args: Any) -> None:
            stock(self, *args)
            if layer in (self, *args[:1]):
                raise Broken("out of memory")

        return patch.object(owner, "process_weights_after_loading", process)

    return around


def processing_skipped(path: str) -> Callable[[Bench, Tensors], AbstractContextManager[Any]]:
    """Processing after loading does nothing in one layer."""

    def around(bench: Bench, tensors: Tensors) -> AbstractContextManager[Any]:
        layer = bench.model.get_submodule(path)
        owner: Any = type(layer.quant_method)
        stock = owner.process_weights_after_loading
        process = lambda self, given: None if given is layer else stock(self, given)  # noqa: E731
        return patch.object(owner, "process_weights_after_loading", process)

    return around


#: Tensors of the checkpoint: layer 0 is in the middle of its stream.
Q, K, V, UP, GATE = (f"model.layers.0.{part}.weight" for part in
                     ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj"))  # fmt: skip
#: Tensors that are given to the loader once more when their layers are complete.
AGAIN = {"head": 0, "embedding": 1, "norm": 2, "k": 8, "o": 9}
_CUT: dict[str, Callable[[Tensors], Tensors]] = {
    "q missing": without(Q),
    "k missing": without(K),
    "v missing": without(V),
    "up missing": without(UP),
    "norm missing": without("model.layers.1.input_layernorm"),
    "qkv missing": without(Q, K, V),
    "down missing": without("layers.1.mlp.down_proj"),
    "embedding missing": without("embed_tokens"),
    "head missing": without("lm_head"),
    "layer missing": without("model.layers.1."),
    "wrong shape": reshaped(K),
}
FAULTS: dict[str, Fault] = {
    "none": Fault(),
    "q late": Fault(offered=last(Q)),
    "layer late": Fault(offered=last("model.layers.0.")),
    **{f"{name}, offered": Fault(offered=cut) for name, cut in _CUT.items()},
    **{f"{name}, admitted": Fault(offered=cut, admitted=True) for name, cut in _CUT.items()},
    "NaN": Fault(offered=spoilt(K)),
    "short bucket, trainer gone": Fault(sender=shortened(leaves=True)),
    "short bucket": Fault(sender=shortened(leaves=False)),
    "bytes flipped": Fault(sender=lambda *to: send(*to, kind=Flipping)),
    "gone at 0 %": Fault(sender=leaving(0)),
    "gone at 50 %": Fault(sender=leaving(0.5)),
    "gone at 100 %": Fault(sender=leaving(1)),
    "shard twice": Fault(worker=repeated(8, 11, other=False)),
    "shard twice, other values": Fault(worker=repeated(8, 11, other=True)),
    **{f"{name} again after all else": Fault(worker=repeated(index, -1, other=True)) for name, index in AGAIN.items()},
    "loader raises at 1": Fault(worker=loading(lambda count: 0)),
    "loader raises at n/2": Fault(worker=loading(lambda count: count // 2)),
    "loader raises at n": Fault(worker=loading(lambda count: count - 1)),
    "loader raises once": Fault(worker=loading(lambda count: count // 2, times=1)),
    "processing raises in a linear layer": Fault(worker=processing_raises("model.layers.1.self_attn.qkv_proj")),
    "processing skipped in a linear layer": Fault(worker=processing_skipped("model.layers.1.self_attn.qkv_proj")),
    "processing raises in attention": Fault(worker=processing_raises("model.layers.1.self_attn.attn")),
    "repair raises": Fault(worker=raising(lambda bench: (bench.applier._guard, "repair"))),
    "verify raises": Fault(worker=raising(lambda bench: (bench.applier._guard, "verify"))),
}


# --- a whole engine -------------------------------------------------------------------------------

PROMPTS, MAX_TOKENS = [[1, 5, 9, 300], [100, 200, 300, 400, 500, 11, 12, 13]], 12


def cold(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """What an engine that is started on a checkpoint holds and says; it is gone afterwards."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    from weightsync.worker import tiles

    tiles.ask()
    state: dict[str, Any] = {"llm": vllm.LLM(model=str(folder), **arguments)}
    state["model"] = state["llm"].collective_rpc(lambda worker: worker.get_model())[0]
    seen = look(state)
    state.pop("llm").llm_engine.engine_core.shutdown()
    state.clear()
    cleanup_dist_env_and_memory()
    gc.collect()
    return seen


def start(state: dict[str, Any], folders: dict[str, Path], arguments: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Cold engines' answers and tensors on `a` and `b`; then the engine on `a` that is updated by what follows."""
    import vllm
    from safetensors.torch import load_file

    answers = {"b": cold(folders["b"], arguments)}
    state["llm"] = llm = vllm.LLM(model=str(folders["a"]), **arguments, **ours)
    state["model"] = llm.collective_rpc(lambda worker: worker.get_model())[0]
    answers["a"] = look(state)
    state["tensors"] = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}

    def call(name: str, *args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = llm.collective_rpc(name, args=args)[0]
        return answer

    state["bench"] = bench = Bench(call, llm.collective_rpc(lambda worker: worker)[0])
    state["here"] = here = contextlib.ExitStack()
    here.enter_context(bench.meeting_here())
    bench.update(state["tensors"]["a"])  # gives parameters the loaders that a cold engine's processing has dropped
    bench.structure = structure(bench.model)
    return answers


def look(state: dict[str, Any]) -> dict[str, Any]:
    """What the engine says, and what it holds; numbers that are addresses of oneDNN's are left out."""
    from weightsync.check.contents import contents
    from weightsync.check.engine import generate

    held = contents(state["model"])
    owned = {path: digest for path, digest in held["owned"].items() if not path.endswith(".handler_tensor")}
    return {"outputs": generate(state["llm"], PROMPTS, MAX_TOKENS), "registered": held["registered"], "owned": owned}


def attempt(state: dict[str, Any], fault: str, weights: str, way: str) -> dict[str, Any]:
    """One update of the engine to `a`, `b` or `c`, with a fault."""
    return state["bench"].update(state["tensors"][weights], FAULTS[fault], WAYS[way])


def move(state: dict[str, Any], path: str) -> None:
    """Somebody lets a parameter come to lie elsewhere."""
    parameter = state["model"].get_parameter(path)
    parameter.data = parameter.data.clone()


def after(state: dict[str, Any], closing: bool, kept: bool) -> dict[str, Any]:
    """What updates have left behind; and by what the model's structure differs from what it was at the start."""
    bench = state["bench"]
    now = structure(bench.model)
    changed = {key: (value, now[key]) for key, value in bench.structure.items() if now[key] != value}
    return {"changed": changed, **bench.left_behind(closing, int(kept))}


def resident(state: dict[str, Any], updates: int) -> list[float]:
    """Resident memory of the engine's process behind each of so many updates in a row, MB; it answers in between."""
    from weightsync.check.engine import generate

    sizes = []
    for number in range(updates):
        report = state["bench"].update(state["tensors"]["ba"[number % 2]])
        assert report["state"] == "verified", report
        generate(state["llm"], PROMPTS[:1], 2)
        sizes.append(psutil.Process().memory_info().rss / 1e6)
    return sizes


class Requests:
    """Requests one behind the other, in a thread, while updates come: the worker's calls fall between two steps of the engine.

    Args:
        llm: an engine.
        bench: its worker; called between two steps from now on.
        held: the weights that the engine holds.
    """

    def __init__(self, llm: Any, bench: Bench, held: str) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._engine, self.held = llm.llm_engine, held
        self._params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
        self._prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        self._step, self.paused = threading.Lock(), threading.Lock()
        self.answers: list[tuple[str, int, list[int], list[float]]] = []
        self.steps, self.error, self._stop = 0, "", threading.Event()
        self._stock, self._bench = bench._call, bench
        bench._call = self._between
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._thread.start()

    def _between(self, *call: Any) -> dict[str, Any]:
        with self._step:
            return self._stock(*call)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self.paused:  # no request is under way while weights are written
                    self._answer(len(self.answers) % len(PROMPTS))
                time.sleep(0.001)
        except Exception as exc:
            self.error = f"{type(exc).__name__}: {exc}"

    def _answer(self, prompt: int) -> None:
        self._engine.add_request(str(len(self.answers)), self._prompts[prompt], self._params)
        while self._engine.has_unfinished_requests():
            with self._step:
                done = self._engine.step()
            self.steps += 1
            time.sleep(0.0005)  # whoever waits for the worker gets his turn
        output = done[0].outputs[0]
        logprobs = [float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True)]
        self.answers.append((self.held, prompt, list(output.token_ids), logprobs))

    def end(self) -> None:
        self._stop.set()
        self._thread.join(SECONDS)
        self._bench._call = self._stock


def beside(state: dict[str, Any], rounds: int, commit_every: int, faults: list[str], held: str) -> dict[str, Any]:
    """Rounds of updates beside requests: staged and aborted, broken by each fault in turn, and every so often committed."""
    bench, tensors = state["bench"], state["tensors"]
    requests = Requests(state["llm"], bench, held)
    states: dict[str, int] = {}
    try:
        for number in range(rounds):
            if commit := number % commit_every == commit_every - 1:
                with requests.paused:
                    requests.held = "b" if requests.held == "a" else "a"
                    report = bench.update(tensors[requests.held])
            else:
                fault = FAULTS[faults[number % len(faults)]]
                report = bench.update(tensors["c"], fault)
            key = f"{'commit' if commit else 'stage'} {report['state']} {report['wrote']}"
            states[key] = states.get(key, 0) + 1
    finally:
        requests.end()
    return {"answers": requests.answers, "steps": requests.steps, "error": requests.error, "states": states, "held": requests.held}
