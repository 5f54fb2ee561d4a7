"""Sections of the settings: the engines, the HTTP service, updates, Ray. Frozen; `config` reads them.

Imports no torch, Ray or vLLM, so the command line answers at once.
Not covered: what sections have to do with each other (`config.Settings`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator

#: Arguments of vLLM that weightsync sets itself.
_OURS = ("distributed_executor_backend", "model", "skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls")
#: What `_extra_leaves_ours` refuses, as JSON schema: for who checks settings before the service reads them.
_NO_EXTRA: dict[str, Any] = {
    "patternProperties": {f"^({'|'.join(_OURS)}|nnodes|data_parallel_.*|tensor_parallel_size|pipeline_parallel_size)$": False},
    "not": {
        "anyOf": [
            {"required": ["enable_eplb"], "properties": {"enable_eplb": {"not": {"enum": [False, None]}}}},
            {"required": ["additional_config"], "properties": {"additional_config": {"type": "object", "required": ["weightsync"]}}},
        ]
    },
}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineSettings(_Section):
    """The vLLM engines."""

    model: Path
    """Folder of the checkpoint that engines start from, in Hugging Face layout."""
    count: int = Field(default=1, ge=1, le=1024)
    """How many engines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines run; auto takes CUDA when the installed vLLM was built for it."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights that the checkpoint does not quantise."""
    max_model_len: int = Field(default=2048, ge=16)
    """Longest prompt and completion together, tokens."""
    max_num_seqs: int = Field(default=16, ge=1)
    """Most requests in one step."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory for the KV cache of one engine, bytes; vLLM decides on a GPU when not given, 256 MiB on a CPU."""
    enforce_eager: bool = False
    """Run without CUDA graphs (always so on a CPU)."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU cores that Ray reserves for one engine."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for one engine; one for each of its workers with CUDA when not given. A fraction lets engines of
    one worker share a GPU."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Workers that share every layer of one engine."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages of one engine, each with some of its layers."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Copies of the model inside one engine, each with all of the above. A dense model gains nothing over engine.count."""
    port_base: int = Field(default=0, ge=0, le=65_000)
    """Port of the first engine's OpenAI-compatible application; 0 takes free ports."""
    served_model_name: str = "policy"
    """The name that requests to the engines give."""
    strict: bool = False
    """Take an update that needed a repair of captured storage for a failed one: the engine is quarantined."""
    frozen: tuple[str, ...] = ()
    """Patterns (`visual.*`) of checkpoint names that an update may leave out, a layer's tensors all or none; they keep their values."""
    unknown_vllm: Literal["refuse", "observe"] = "refuse"
    """A vLLM whose reload was not proved: refuse to start, or start, report what graphs read, and refuse every update."""
    extra: dict[str, Any] = Field(default_factory=dict, json_schema_extra=_NO_EXTRA)
    """Further arguments of vLLM's AsyncEngineArgs, as they are."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long an engine may take to start."""
    silence_seconds: float = Field(default=60.0, ge=0)
    """How long workers may owe a sign of life, for which they are asked every 15 s, before their engine counts as dead until they give it.
    They come to it behind the model step under way, so more than the longest one, which may compile kernels (vLLM ends an engine whose
    step takes 300 s). 0: never asked."""

    @field_validator("model")
    @classmethod
    def _model_has_config(cls, value: Path) -> Path:
        if not (value / "config.json").is_file():
            raise ValueError("a folder that holds config.json")
        return value.resolve()

    @field_validator("frozen", mode="before")
    @classmethod
    def _frozen_is_a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError('a list of patterns, such as ["visual.*"]')
        return value

    @field_validator("extra")
    @classmethod
    def _extra_leaves_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if clash := sorted(set(_OURS) & set(value)):
            raise ValueError(f"keys other than {', '.join(clash)}, which weightsync sets itself")
        if "weightsync" in (value.get("additional_config") or {}):
            raise ValueError("additional_config without weightsync: that is engine.frozen, engine.strict and engine.unknown_vllm")
        if clash := sorted(name for name in value if name in cls.model_fields and name.endswith("_parallel_size")):
            raise ValueError(f"{', '.join(clash)} as settings of their own: engine.{clash[0]}")
        if clash := sorted(name for name in value if name == "nnodes" or name.startswith("data_parallel_")):
            raise ValueError(f"no {', '.join(clash)}: an engine with all its workers lives on one node")
        if value.get("enable_eplb"):
            # Where an expert lies would change between two updates, and with it what the load map says.
            raise ValueError("no enable_eplb: experts that move while an engine serves can't be updated")
        return value

    @model_validator(mode="after")
    def _gpus_for_all_workers(self) -> EngineSettings:
        if self.workers > 1 and self.gpus is not None and self.gpus != self.workers:
            parts = " x ".join(f"{kind} {getattr(self, f'{kind}_parallel_size')}" for kind in ("tensor", "pipeline", "data"))
            raise ValueError(
                f"engine.gpus: got {self.gpus:g}, want {self.workers} or nothing: every worker of an engine has a GPU of its own ({parts})"
            )
        return self

    @property
    def workers(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


class ApiSettings(_Section):
    """The HTTP service."""

    host: str = "127.0.0.1"
    """Address to listen on, for the service and for the engines' applications."""
    port: int = Field(default=8517, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    token: SecretStr | None = None
    """Bearer token of everything that changes or discloses; one is made and kept in the state folder when not given."""
    max_request_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Largest request body; a manifest takes about 100 bytes per tensor."""
    min_ready: int = Field(default=1, ge=1)
    """`/readyz` says ready when at least so many engines serve the committed version."""

    @field_validator("token")
    @classmethod
    def _token_fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not re.fullmatch(r"[!-~]+", value.get_secret_value()):
            raise ValueError("printable ASCII without spaces")
        return value


class SyncSettings(_Section):
    """Updates."""

    require: int | None = Field(default=None, ge=1)
    """How many engines must commit for a call to succeed; all when not given."""
    rendezvous_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long trainer and workers may take to connect."""
    control_timeout_seconds: float = Field(default=30.0, gt=0)
    """Deadline of one short call to an engine: begin, poll, abort, pause, resume."""
    apply_timeout_seconds: float = Field(default=300.0, gt=0)
    """Deadline of writing the weights and proving them in one engine."""
    drain_timeout_seconds: float = Field(default=60.0, gt=0)
    """With in_flight = wait: how long an engine's requests may take to end; those that have not are kept."""
    history: int = Field(default=200, ge=1, le=10_000)
    """How many finished updates the ledger keeps."""
    stage: Literal["auto", "host", "gpu", "none"] = "auto"
    """Where an update waits beside the live weights until all of it is there; auto takes the GPU if half of its free memory is
    enough; on a CPU each is the host.
    With none it takes no memory, and engines stand still while it arrives: one that fails in between leaves them in quarantine."""
    min_available: int = Field(default=0, ge=0)
    """Never fewer than so many engines serving while an update is written: as many as there are above it are written at a time. Those
    whose turn never comes, since others failed, serve on and are brought up later. 0: all at once."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of requests that an engine runs when it is to be written: frozen meanwhile and kept; they end first; or they are
    ended with an error that says to come again."""
    new_requests: Literal["wait", "refuse"] = "wait"
    """What becomes of those that come while an engine drains or is written: they wait, or get an error that says to come again."""
    rollback: Literal["off", "host"] = "off"
    """After an update that failed twice behind its first write: quarantine the engine until the next one, or bring the last committed
    update back, of which each worker then keeps a copy in host memory."""
    plan: Literal["auto", "off"] = "auto"
    """Whether layers that keep what is loaded are written as plain copies from the second update on, or all of them by vLLM's reload."""
    verify_stored: bool = False
    """After each update also compare the bytes of parameters that the engine keeps as they are loaded with what was sent."""
    retain_engines: int = Field(default=1, ge=0)
    """How many engines keep the bytes of the last committed update in shared memory, so that one that comes later (restarted, added,
    awake again) gets its weights without the trainer: one copy of the weights each, two during an update. With 0 it waits for the
    next update; and so it does with stage none, which keeps nothing."""
    retain_folder: Path = Path("/dev/shm")
    """Where they are kept: a file system in memory, on every machine that has engines."""
    caches: Literal["reset", "retain", "salt"] = "reset"
    """What becomes of prefix, connector, multimodal and encoder caches at an update: dropped once, kept in use, or kept for
    the requests that began before it, by vLLM's cache_salt."""
    probe: Literal["off", "warn", "quarantine"] = "warn"
    """Behind each commit engines score a few fixed prompts, and one that differs is named: in log, status and metrics, or also taken out of
    service until it gets its weights again."""
    local: Literal["auto", "host", "off"] = "auto"
    """Which engines a trainer hands its memory to: those on its own GPU, also those on its host when its tensors are on the CPU, or
    none. The others are reached by gloo or NCCL in the same update."""
    store_host: str = "127.0.0.1"
    """Address of the rendezvous store, in the controller; trainers on other machines need one they can reach."""
    store_port: int = Field(default=0, ge=0, le=65_535)
    """Port of that store, for hosts where ports must be opened; 0 takes a free one."""
    interface: str = ""
    """Network interface of the broadcast over gloo; the one that leads to the store when empty. NCCL reads NCCL_SOCKET_IFNAME."""

    @field_validator("rollback", "verify_stored", "min_available")
    @classmethod
    def _needs_staged_bytes(cls, value: str | int, others: ValidationInfo) -> str | int:
        if value not in ("off", 0) and others.data.get("stage") == "none":
            want = "0" if others.field_name == "min_available" else "off"
            raise ValueError(f"{want}, as sync.stage is none: bytes that were not staged are gone")
        return value


class RaySettings(_Section):
    """Ray."""

    address: str = ""
    """A cluster to join; a small one is started when empty."""
    num_cpus: int | None = Field(default=None, ge=1)
    """Logical cores of the cluster that is started; two more than the engines ask for when not given."""
    object_store_bytes: int = Field(default=80 << 20, ge=76 << 20)
    """Shared memory of the cluster that is started. Weights never pass through it."""
