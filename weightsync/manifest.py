"""What an update sends, by name: tensors in the engine's checkpoint format. Plain data; standard library only.

Not covered: whether an engine can take them (`worker.admission`).
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from dataclasses import dataclass

#: Bytes per element of every dtype that may travel, by its safetensors-like name.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Adapter(enum.StrEnum):
    """What an update brings of a LoRA adapter: pairs of `PATH.lora_A.weight`, and `PATH.lora_B.weight` times the adapter's scaling."""

    NONE = "none"  # nothing: behind it engines serve without one
    WITH_BASE = "with_base"  # the adapter, and all of the weights that it lies on
    ALONE = "alone"  # the adapter, for the weights that engines got with the one before


MAX_NAME_LENGTH = 512
MAX_TENSORS = 1_000_000


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a manifest, in the engine's checkpoint format.

    Attributes:
        name: the checkpoint's name for it.
        dtype: a key of `DTYPE_BYTES`.
        shape: sizes in elements; `()` for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_NAME_LENGTH or not self.name.isprintable():
            raise ValueError(f"tensor name {self.name[:80]!r}: want 1 to {MAX_NAME_LENGTH} printable characters")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r}: dtype {self.dtype!r} can't travel; want one of {sorted(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape) or math.prod(self.shape) > 2**48:
            raise ValueError(f"tensor {self.name!r}: impossible shape {list(self.shape)}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Every tensor of an update, in the order in which the tensors travel.

    Raises:
        ValueError: a name appears twice, or there are too many tensors.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise ValueError(f"{len(self.tensors)} tensors; at most {MAX_TENSORS} can travel in one update")
        seen: set[str] = set()
        twice = [s.name for s in self.tensors if s.name in seen or seen.add(s.name)]  # type: ignore[func-returns-value]
        if twice:
            raise ValueError(f"{len(twice)} tensor name(s) appear twice: {', '.join(twice[:20])}")

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def hash(self) -> str:
        """SHA-256 of the manifest's canonical form; both sides compare it."""
        rows = [[s.name, s.dtype, list(s.shape)] for s in self.tensors]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
