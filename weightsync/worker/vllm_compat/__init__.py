"""Every touch of vLLM's internals, for the versions that were proved.

vLLM renames and moves these between releases, so nothing else here imports
vLLM. `require_supported` refuses an unknown version at start; importing this
package in a worker registers the weight-transfer backend under our name, which
makes vLLM turn off the layouts that can't be updated, and watches for the end of
the model's loading.

    versions.py   which vLLM was proved, down to the source of what is leaned on
    backend.py    the weight-transfer backend that holds the place
    layers.py     what can be told from one live layer
    twin.py       what a cold load runs in; the model once more, on meta
    blueprint.py  what a fresh model has and a live one has lost: loaders, first values
    doubles.py    what a layer's processing makes of loaded weights, without the layer
    counting.py   how many elements of a layer a load has filled
    reload.py     one layerwise reload, run as a cold load, with what stock leaves out
    first_run.py  what a model's first run filled in, and a run like it in a live engine
    graphs.py     captured graphs released, and captured anew
    adapters.py   the slot of the adapter that an engine serves with
    sleeping.py   the memory that a sleep gives back
    spinning.py   how long a worker's process stays awake behind a call
    vote.py       what the workers of a model decide together

Not covered: layers that `unproved_layers` names: the engine then refuses to start.
"""

from weightsync.worker.vllm_compat.adapters import AdapterSlot, adapter_slot
from weightsync.worker.vllm_compat.backend import BACKEND
from weightsync.worker.vllm_compat.blueprint import Blueprint, draw
from weightsync.worker.vllm_compat.doubles import processed, requantises
from weightsync.worker.vllm_compat.first_run import find_lazies, note_loaded, run_once, watch_loading
from weightsync.worker.vllm_compat.graphs import captures_graphs, graph_holders, recapture
from weightsync.worker.vllm_compat.layers import (
    FOREIGN_HANDLES,
    KV_CACHE,
    WRITTEN_IN_PLACE,
    absorbing,
    keeps_what_is_loaded,
    missing_layers,
    plain_modules,
    plain_path,
    unproved_layers,
)
from weightsync.worker.vllm_compat.reload import Reload, reload_waiting, whole_only
from weightsync.worker.vllm_compat.sleeping import SleepMemory
from weightsync.worker.vllm_compat.spinning import sleep_soon
from weightsync.worker.vllm_compat.twin import cold_load_context, meta_twin
from weightsync.worker.vllm_compat.versions import PROVED_SOURCES, PROVED_VERSIONS, require_supported, told, vllm_version
from weightsync.worker.vllm_compat.vote import together

__all__ = [
    "BACKEND",
    "FOREIGN_HANDLES",
    "KV_CACHE",
    "PROVED_SOURCES",
    "PROVED_VERSIONS",
    "WRITTEN_IN_PLACE",
    "AdapterSlot",
    "Blueprint",
    "Reload",
    "SleepMemory",
    "absorbing",
    "adapter_slot",
    "captures_graphs",
    "cold_load_context",
    "draw",
    "find_lazies",
    "graph_holders",
    "keeps_what_is_loaded",
    "meta_twin",
    "missing_layers",
    "note_loaded",
    "plain_modules",
    "plain_path",
    "processed",
    "recapture",
    "reload_waiting",
    "requantises",
    "require_supported",
    "run_once",
    "sleep_soon",
    "together",
    "told",
    "unproved_layers",
    "vllm_version",
    "whole_only",
]

watch_loading()
