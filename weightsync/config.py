"""Settings of the service: frozen, and the only reader of the environment.

Order, first wins: flags, environment (`WEIGHTSYNC_ENGINE__MODEL=…`, two
underscores between levels), the TOML file named by `--config`, the defaults
below. An unknown key is an error. `load` turns every complaint into one
`ConfigError` that says which key, what it got and what it wants.

Imports no torch, Ray or vLLM, so the command line answers at once.
Not covered: settings of the trainer (arguments of `client.WeightSync`).
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from weightsync.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def default_state_dir() -> Path:
    """Where `serve` keeps its state when not told."""
    home = os.path.expanduser("~")  # also without HOME; a folder in /tmp that anybody can foresee could hold anybody's token
    return Path(f"/tmp/weightsync-{os.getuid()}" if home == "~" else home) / ".weightsync"


def namespace_of(fleet: str) -> str:
    """Ray's namespace of a fleet."""
    return f"weightsync-{fleet}"


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
    extra: dict[str, Any] = Field(default_factory=dict)
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
        ours = {"worker_extension_cls", "weight_transfer_config", "distributed_executor_backend", "model", "skip_tokenizer_init"}
        if clash := sorted(ours & set(value)):
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


class Settings(BaseSettings):
    """All settings of `weightsync serve`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="WEIGHTSYNC_", env_nested_delimiter="__", use_attribute_docstrings=True
    )

    engine: EngineSettings
    api: ApiSettings = ApiSettings()
    sync: SyncSettings = SyncSettings()
    ray: RaySettings = RaySettings()
    fleet: str = "default"
    """Name of the fleet; Ray's namespace is `weightsync-<fleet>`."""
    state_dir: Path = Field(default_factory=lambda: default_state_dir())
    """Folder where `serve` keeps its token and finds the fleet that a killed `serve` left."""

    @field_validator("fleet")
    @classmethod
    def _fleet_is_a_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", value):
            raise ValueError("lower-case letters, digits and '-', at most 32")
        return value

    @model_validator(mode="after")
    def _salt_reaches_every_cache(self) -> Settings:
        if self.sync.caches == "salt" and self.engine.extra.get("kv_transfer_config"):
            # Some connectors key what they keep by tokens alone; then old entries would answer new requests.
            raise ValueError(
                "sync.caches: got 'salt' with a kv_transfer_config, want reset or retain: not every connector heeds cache_salt"
            )
        return self

    @model_validator(mode="after")
    def _some_engine_can_be_taken(self) -> Settings:
        if self.sync.min_available >= self.engine.count:
            raise ValueError(f"sync.min_available: got {self.sync.min_available}, want fewer than the {self.engine.count} of engine.count")
        return self

    @property
    def namespace(self) -> str:
        return namespace_of(self.fleet)

    @property
    def home(self) -> Path:
        """This fleet's own folder."""
        return self.state_dir / self.fleet


class _Restored(Settings):
    """Settings from the given values alone: what an actor was sent has been through `load` already."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def load(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """Settings from flags, the environment, and a TOML file.

    Args:
        flags: dotted keys to values, for example `{"engine.count": 2}`.
        config_file: TOML with the same keys as tables.

    Raises:
        ConfigError: names each wrong key, its value, and what is wanted.
    """
    _check_environment()

    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            *_: Any,
            **__: Any,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, _read_toml(config_file))

    try:
        return Loaded(**_nest(flags))
    except SettingsError as exc:
        raise ConfigError(f"environment: {exc}", hint="Objects and lists are given as JSON") from None
    except ValidationError as exc:
        raise ConfigError(
            "; ".join(_complaint(error) for error in exc.errors()),
            hint="See `weightsync serve --help` for every key",
        ) from None


def parse_value(key: str, text: str) -> Any:
    """The text of the flag `key`; objects and lists are JSON, the rest is left to the settings' types."""
    if text[:1] in ("{", "[") and "token" not in key:
        try:
            return json.loads(text)
        except ValueError as exc:
            raise ConfigError(f"{key}: got {text[:80]!r}, want JSON: {exc}", hint="Objects and lists are given as JSON") from None
    return text


def dump(settings: Settings) -> dict[str, Any]:
    """Settings as JSON-ready data for an actor, token included; `restore` is the reverse."""
    data = settings.model_dump(mode="json")
    data["api"]["token"] = settings.api.token.get_secret_value() if settings.api.token else None
    return data


def restore(data: Mapping[str, Any]) -> Settings:
    """Settings from `dump`, whatever this process's environment says."""
    return _Restored(**data)


def _check_environment() -> None:
    # pydantic-settings passes over a variable whose first part fits no key; a typing slip should not go unseen.
    for variable in os.environ:
        if variable.startswith("WEIGHTSYNC_"):
            first = variable.removeprefix("WEIGHTSYNC_").lower().split("__")[0]
            if first not in Settings.model_fields:
                raise ConfigError(
                    f"environment variable {variable}: no such key",
                    hint="Two underscores stand between levels, as in WEIGHTSYNC_API__PORT",
                )


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"config file {path}: {exc.strerror}", hint="Give an existing TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {path}: not TOML: {exc}", hint="Mend that line") from None


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def _complaint(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{'engine.model' if key == 'engine' else key}: not given, and it has no default"
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key"
    want = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not key or want.startswith(f"{key}."):  # of several keys together, and says which itself
        return want
    return f"{key}: got {_shown(key, error['input'])}, want {want}"


def _shown(key: str, value: Any) -> str:
    if "token" in key or key == "api":
        return "<secret>"
    # Values in an object may be secrets too: engine.extra takes vLLM's hf_token.
    return f"an object with {', '.join(sorted(map(str, value)))}" if isinstance(value, dict) else repr(value)
