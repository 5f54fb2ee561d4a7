"""Which live parameters still hold the bytes that were sent, and that a wrong one is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fleets import ENGINE_ARGS
from weightsync.client.source import offer
from weightsync.demo.cold import COLD_ENV
from weightsync.worker.loadmap import LoadMap, record
from weightsync.worker.stored import Stored, checkpoint_tensors

HALF = torch.bfloat16


class Model(torch.nn.Module):
    """Loads as vLLM's layers do: fused, sharded, transposed, converted, computed."""

    def __init__(self, device: str) -> None:
        super().__init__()

        def new(*shape: int, dtype: torch.dtype = HALF) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.qkv, self.shard, self.turned, self.shuffled, self.packed = new(12, 4), new(4, 3), new(5, 5), new(6, 4), new(4, 4)
        self.wide, self.doubled, self.norm, self.experts = new(4, dtype=torch.float32), new(4), new(4), new(2, 3, 4)
        self.memory, self.left, self.right = torch.zeros(99, dtype=HALF, device=device), new(3), new(3)
        self.register_buffer("offset", torch.zeros(4, dtype=torch.float32, device=device))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in "qkv":
                self.qkv.data.narrow(0, 4 * "qkv".index(name), 4).copy_(tensor)
            elif name == "shard":
                self.shard.data.copy_(tensor.narrow(1, 3, 3))
            elif name == "turned":
                self.turned.data.copy_(tensor.t())
            elif name == "doubled":
                self.doubled.data.copy_(tensor * 2)
            elif name == "both":
                self.left.data.copy_(tensor)
                self.right.data.copy_(tensor)
            elif name.startswith("expert."):
                self.experts.data[int(name[-1])].copy_(tensor)
            else:
                (self.offset if name == "offset" else self.get_parameter(name).data).copy_(tensor)

    def process(self) -> None:
        """What vLLM does behind a load."""
        self.shuffled.data, self.right.data = self.shuffled.data.flip(0).clone(), -self.right.data
        self.memory[7:32].copy_(self.turned.data.reshape(-1))
        self.turned.data = self.memory[7:32].view(5, 5)
        self.packed.data = torch.empty(0, dtype=HALF)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(HALF)

    return {
        **{name: new(4, 4) for name in "qkv"}, "shard": new(4, 6), "turned": new(5, 5), "shuffled": new(6, 4), "packed": new(4, 4),
        "wide": new(4), "doubled": new(4), "norm": torch.ones(4, dtype=HALF), "expert.0": new(3, 4), "expert.1": new(3, 4),
        "offset": new(4).float(), "both": new(3),
    }  # fmt: skip


#: What can't be compared: reordered, packed away, converted, computed, all of one value at the start, changed in one of two places.
UNCHECKED = {"shuffled", "packed", "wide", "doubled", "norm", "both"}


class Engine:
    """A model that was loaded from weights 1, as `Stored` sees it."""

    def __init__(self) -> None:
        self.model, first = Model("cpu"), weights(1)
        self.load(first)
        self.map: LoadMap = record(Model("meta"), offer(first).manifest.tensors)
        self.stored = Stored(self.model, self.map, first.items())

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.model = self.model if hasattr(self, "map") else Model("cpu")
        self.model.packed.data = torch.zeros(4, 4, dtype=HALF)
        self.model.load_weights(tensors.items())
        self.model.process()


def test_what_stays_as_it_was_loaded_is_compared_and_the_rest_counted() -> None:
    engine = Engine()
    for seed in (1, 2):
        engine.load(weights(seed))
        error, counts = engine.stored.check(engine.map, weights(seed).items())
        assert error is None
        assert counts == {"stored": len(weights(1)) - len(UNCHECKED), "stored_unchecked": len(UNCHECKED)}


def test_what_a_loader_converts_or_computes_is_no_copy() -> None:
    engine = Engine()
    assert set(engine.map.writes) == set(weights(1))
    assert set(engine.map.copies) == set(weights(1)) - {"wide", "doubled"}


def test_tensors_are_found_where_they_are_staged_one_behind_the_other() -> None:
    engine, sent = Engine(), {name: tensor for name, tensor in weights(2).items() if tensor.dtype == HALF}
    engine.load(weights(2))
    data, staged, at = torch.cat([tensor.reshape(-1) for tensor in sent.values()]), {}, 0
    for name, tensor in sent.items():
        staged[name] = data[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    assert engine.stored.check(engine.map, staged.items())[0] is None


@pytest.mark.parametrize("name", sorted(set(weights(1)) - UNCHECKED))
def test_one_bit_that_is_not_the_sent_one_is_found_and_its_tensor_named(name: str) -> None:
    engine, sent = Engine(), weights(2)
    engine.load(sent)
    for source in engine.map.copies[name]:
        parameter = engine.model.offset if name == "offset" else engine.model.get_parameter(source.path)
        offset, shape, stride = source.into
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        flat = parameter.data.view(-1).view(torch.int16 if parameter.dtype == HALF else torch.int32)
        flat[last] ^= 1
        error, _ = engine.stored.check(engine.map, sent.items())
        assert error is not None and error.names == (name,) and name in error.message
        flat[last] ^= 1
    assert engine.stored.check(engine.map, sent.items())[0] is None


def test_weights_of_the_update_before_and_shards_in_each_others_place_are_found() -> None:
    engine = Engine()
    engine.load(weights(2))
    engine.model.experts.data[1].copy_(weights(1)["expert.1"])
    q, k = engine.model.qkv.data[:4].clone(), engine.model.qkv.data[4:8].clone()
    engine.model.qkv.data[:4], engine.model.qkv.data[4:8] = k, q
    error, _ = engine.stored.check(engine.map, weights(2).items())
    assert error is not None and error.names == ("q", "k", "expert.1")


def test_nan_is_compared_by_its_bits() -> None:
    engine, sent = Engine(), weights(2)
    sent["q"][0, 0] = float("nan")
    engine.load(sent)
    assert engine.stored.check(engine.map, sent.items())[0] is None


def test_a_parameter_that_is_gone_too_small_or_of_another_dtype_by_now_is_not_what_was_sent() -> None:
    engine, sent = Engine(), weights(2)
    engine.load(sent)
    engine.model.qkv.data = torch.zeros(5, 4, dtype=HALF)
    engine.model.shard.data = engine.model.shard.data.view(torch.float16)
    del engine.model.turned
    error, _ = engine.stored.check(engine.map, sent.items())
    assert error is not None and error.names == ("q", "k", "v", "shard", "turned")


def test_a_checkpoint_is_read_file_by_file_and_by_its_index(tmp_path: Path) -> None:
    first = weights(1)
    save_file({"q": first["q"]}, tmp_path / "a.safetensors")
    save_file({"k": first["k"]}, tmp_path / "b.safetensors")
    assert {name: tensor.tolist() for name, tensor in checkpoint_tensors(tmp_path)} == {name: first[name].tolist() for name in "qk"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"q": "a.safetensors"}}))
    assert [name for name, _ in checkpoint_tensors(tmp_path)] == ["q"]


ON_VLLM = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from vllm import LLM
from weightsync.check.engine import OURS, Trainer
from weightsync.worker.stored import Stored, checkpoint_tensors
first, second, arguments = json.loads(sys.argv[1])
llm = LLM(model=first, **arguments, **OURS)
trainer = Trainer(llm)
applier = llm.collective_rpc(lambda worker: worker._weightsync())[0]
stored = Stored(applier.model, applier._base, checkpoint_tensors(Path(first)))
sent = load_file(second + "/model.safetensors")
before = stored.check(applier._base, sent.items())
trainer.sync(sent)
error, counts = stored.check(applier._map, sent.items())
norm = applier.model.get_parameter("model.norm.weight")
with torch.inference_mode():
    norm.data[-1] += 1
broken = stored.check(applier._map, sent.items())[0]
said = {"before": len(before[0].names), "error": error and str(error), "counts": counts}
said |= {"paths": sorted(stored._paths), "broken": broken.names}
print("RESULT", json.dumps(said), flush=True)
import os; os._exit(0)
"""


def on_vllm(first: Path, second: Path, arguments: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """What a real engine says that was started on the first checkpoint and then got the second."""
    job = json.dumps([str(first), str(second), arguments])
    command = [sys.executable, "-c", ON_VLLM, job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    said: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return said


@pytest.mark.engine
@pytest.mark.parametrize(("kind", "unchecked"), [("qwen3", 14), pytest.param("qwen3-moe", 34, marks=pytest.mark.slow)])
def test_a_real_engines_own_parameters_are_compared(kind: str, unchecked: int, checkpoint: Any) -> None:
    said = on_vllm(checkpoint(kind, 1), checkpoint(kind, 2), ENGINE_ARGS, COLD_ENV)
    assert said["before"] == 11  # all that is compared differs while the engine holds its own checkpoint
    assert said["error"] is None
    # On a CPU the linear layers' weights are packed by the kernels' library, and experts are reordered.
    assert said["counts"] == {"stored": 11, "stored_unchecked": unchecked}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_norm.weight"} <= set(said["paths"])
    assert said["broken"] == ["model.norm.weight"]
