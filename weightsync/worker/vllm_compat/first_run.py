"""The two ends of a model's first run: how it was when its loading ended, and a run like the first in a live engine.

vLLM's worker is watched from the import of this package on, which is before it
loads its model. The run is the one that vLLM's idle data-parallel ranks make beside
live requests, with Python executed instead of compiled code or a replayed graph.

Not covered: encoders of multi-modal models, which a dummy run leaves out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_worker import Worker

from weightsync.errors import UnsupportedEngine
from weightsync.storage import census
from weightsync.worker.lazies import Lazies, Snapshot
from weightsync.worker.vllm_compat.versions import require_sources

#: What `run_once` leans on, by the class that has it, with the SHA-256 of its source.
_PROVED = {
    "_dummy_run": {"47b96b71fc654516", "82cd9936a8321745"},
    "maybe_select_dummy_loras": {"763d682d9018bef9"},
    "maybe_dummy_run_with_lora": {"e6def1f638d10f3e"},
}
_FRESH: WeakKeyDictionary[torch.nn.Module, Snapshot] = WeakKeyDictionary()


def watch_loading() -> None:
    """Take a snapshot of every model that a worker of this process loads from now on, and of the memory it takes."""
    stock = Worker.load_model
    if hasattr(stock, "__weightsync__"):  # this module was loaded twice
        return

    @functools.wraps(stock)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = stock(self, *args, **kwargs)
        note_loaded(self.get_model())
        census.note_loaded()
        return returned

    load_model.__weightsync__ = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


def note_loaded(model: torch.nn.Module) -> None:
    """Note what the model holds now, when its loading has ended."""
    _FRESH[model] = Snapshot(model)


def find_lazies(model: torch.nn.Module, runner: Any) -> Lazies:
    """What the first run of a model has filled in.

    Raises:
        UnsupportedEngine: nobody saw the end of its loading.
        UnknownVllm: there is something, and the runner is not one that was proved. An update would write, and then fail.
    """
    fresh = _FRESH.get(model)
    if fresh is None:
        raise UnsupportedEngine(
            "this engine's model was loaded unseen, so that values it has cached since then can't be told",
            hint="Start it with worker_extension_cls=weightsync.worker.extension.WeightSyncExtension",
        )
    found = Lazies(model, fresh, runner)
    if len(found):
        require_sources(type(runner), _PROVED)
    return found


def run_once(runner: Any) -> None:
    """One run of the model that executes its Python. Requests, their caches and adapters stay as they are."""
    with _as_python(runner.get_model()), _adapters_kept(runner), torch.inference_mode():
        if hasattr(runner, "req_states"):  # vLLM's second model runner
            with _no_replay(runner.cudagraph_manager):
                runner._dummy_run(1, uniform_decode=True)
        else:
            with runner.preserve_serving_state():
                runner._dummy_run(
                    runner.uniform_decode_query_len,
                    cudagraph_runtime_mode=CUDAGraphMode.NONE,
                    force_attention=True,
                    uniform_decode=True,
                    allow_microbatching=False,
                    skip_eplb=True,
                )
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


@contextlib.contextmanager
def _as_python(model: torch.nn.Module) -> Iterator[None]:
    """Compiled modules run their Python instead."""
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "do_not_compile", None) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False


@contextlib.contextmanager
def _adapters_kept(runner: Any) -> Iterator[None]:
    """A dummy run would load adapters of its own, and unload all behind it; this one runs without any."""

    def without(config: Any, num_scheduled_tokens: Any, num_sampled_tokens: Any = None, *_: Any, **__: Any) -> Any:
        return runner.maybe_select_dummy_loras(config, num_scheduled_tokens, num_sampled_tokens=num_sampled_tokens, num_active_loras=0)

    runner.maybe_dummy_run_with_lora = without
    try:
        yield
    finally:
        del runner.maybe_dummy_run_with_lora


@contextlib.contextmanager
def _no_replay(manager: Any) -> Iterator[None]:
    """The second runner looks for a captured graph for every batch; it finds none now."""
    captured, manager._graphs_captured = manager._graphs_captured, False
    try:
        yield
    finally:
        manager._graphs_captured = captured
