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

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from weightsync.errors import ConfigError
from weightsync.sections import ApiSettings, EngineSettings, RaySettings, SyncSettings

_FLEET = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"


def default_state_dir() -> Path:
    """Where `serve` keeps its state when not told."""
    home = os.path.expanduser("~")  # also without HOME; a folder in /tmp that anybody can foresee could hold anybody's token
    return Path(f"/tmp/weightsync-{os.getuid()}" if home == "~" else home) / ".weightsync"


def token_of_environment() -> str | None:
    """The token that a `serve` with this environment takes, as the API's pod has it; the file is looked at when there is none."""
    return os.environ.get("WEIGHTSYNC_API__TOKEN") or None


def namespace_of(fleet: str) -> str:
    """Ray's namespace of a fleet."""
    return f"weightsync-{fleet}"


class Settings(BaseSettings):
    """All settings of `weightsync serve`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="WEIGHTSYNC_", env_nested_delimiter="__", use_attribute_docstrings=True
    )

    engine: EngineSettings
    api: ApiSettings = ApiSettings()
    sync: SyncSettings = SyncSettings()
    ray: RaySettings = RaySettings()
    log: Literal["plain", "json"] = "plain"
    """What controller and engines write: text, or JSON by the line, then with a line for each phase of an update."""
    fleet: str = Field(default="default", json_schema_extra={"pattern": f"^{_FLEET}$"})
    """Name of the fleet; Ray's namespace is `weightsync-<fleet>`."""
    state_dir: Path = Field(default_factory=lambda: default_state_dir())
    """Folder where `serve` keeps its token and finds the fleet that an earlier `serve` left."""
    leave_fleet: bool = False
    """When `serve` is told to end (SIGTERM, Ctrl-C) controller and engines go on, and the next `serve` adopts them, as after a kill."""

    @field_validator("fleet")
    @classmethod
    def _fleet_is_a_name(cls, value: str) -> str:
        if not re.fullmatch(_FLEET, value):
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
