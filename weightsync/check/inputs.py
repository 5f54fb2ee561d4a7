"""The checkpoints of a check, looked at before an engine is started.

Not covered: whether vLLM knows the architecture; values, but for whether two sets are the same.
"""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import ConfigError, UnsupportedEngine
from weightsync.protocol import TensorSpec
from weightsync.transport.digest import as_bytes
from weightsync.worker.loadmap import checkpoint_specs

_SHOWN = 5
#: What is asked of whoever gave two sets of weights that are the same.
OTHER_VALUES = "Give other values of the same model, such as a later step's checkpoint; or leave --other out, and values stay unproven"


def require_checkpoint(folder: Path, flag: str) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """The configuration and the tensors' specs of a checkpoint folder.

    Args:
        folder: as given.
        flag: of the command line, for the message.

    Raises:
        ConfigError: it is no folder, or has no config.json or no safetensors files that can be read.
    """
    want = "want a folder with config.json and safetensors files"
    if not folder.is_dir():
        raise ConfigError(f"{flag}: got {folder}, {want}: {'it is no folder' if folder.exists() else 'it does not exist'}")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"{flag}: got {folder}, {want}: it has no config.json") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{flag}: {folder / 'config.json'} can't be read: {exc}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigError(f"{flag}: {folder / 'config.json'} names no architecture")
    try:
        specs = checkpoint_specs(folder)
    except UnsupportedEngine:
        raise ConfigError(f"{flag}: got {folder}, {want}: it has no safetensors files") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, struct.error) as exc:
        raise ConfigError(f"{flag}: the safetensors files in {folder} can't be read: {type(exc).__name__}: {exc}") from None
    return config, {spec.name: spec for spec in specs}


def require_same_kind(model: Path, other: Path) -> None:
    """That two checkpoints are two sets of weights of one model.

    Raises:
        ConfigError: one can't be read, or architecture, names, shapes or dtypes differ; says which. Or all values are the same.
    """
    config, specs = require_checkpoint(model, "--model")
    other_config, others = require_checkpoint(other, "--other")
    if config["architectures"] != other_config["architectures"]:
        raise ConfigError(f"--other: it is a {_names(other_config['architectures'])}, --model is a {_names(config['architectures'])}")
    differ = {
        "not in --other": [name for name in specs if name not in others],
        "not in --model": [name for name in others if name not in specs],
        "of another shape or dtype": [
            f"{name} ({_form(spec)}, in --other {_form(others[name])})" for name, spec in specs.items() if others.get(name, spec) != spec
        ],
    }
    if any(differ.values()):
        said = "; ".join(f"{len(names)} {how}: {_names(names)}" for how, names in differ.items() if names)
        raise ConfigError(f"--other: want other values under the same names, shapes and dtypes; {said}")
    if _same_values(model, other):
        raise ConfigError(
            f"--other: {other} holds the same values as {model}, tensor by tensor, so nothing can be told by it", hint=OTHER_VALUES
        )


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, in host memory."""
    from safetensors.torch import load_file

    return {name: tensor for file in _files(folder) for name, tensor in load_file(file).items()}


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()}) if index.is_file() else []
    return files or sorted(folder.glob("*.safetensors"))


def _same_values(model: Path, other: Path) -> bool:
    """Whether two checkpoints of the same tensors are equal to the bit. One tensor at a time, up to the first that differs."""
    from safetensors import safe_open

    with contextlib.ExitStack() as opened:
        found: list[dict[str, Any]] = []
        for folder in (model, other):
            files = [opened.enter_context(safe_open(file, framework="pt")) for file in _files(folder)]
            found.append({name: file for file in files for name in file.keys()})  # noqa: SIM118 - no mapping
        return all(torch.equal(*(as_bytes(files[name].get_tensor(name)) for files in found)) for name in found[0])


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _names(names: list[str]) -> str:
    return ", ".join(map(str, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
