"""What a trainer offers where it has GPUs: from which one it travels, and shards that lie in host memory.

Not covered: several ranks on several GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weightsync.client.source import offer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda", 0)


def test_host_memory_is_read_onto_the_gpu_that_is_named_one_tensor_at_a_time() -> None:
    tensors = {f"w{at}": torch.randn(1 << 20) for at in range(8)}
    offered = offer(tensors, GPU)
    assert offered.transport == "nccl"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for index, tensor in enumerate(tensors.values()):
        read = offered.read(index)
        assert read.device == GPU and torch.equal(read.cpu(), tensor)
        del read
    assert torch.cuda.max_memory_allocated() - before <= 4 << 20


def test_what_lies_on_one_gpu_and_in_host_memory_travels_from_the_gpu() -> None:
    offered = offer({"a": torch.ones(3), "b": torch.ones(3, device=GPU)})
    assert offered.device == GPU
    assert offered.read(0).device == offered.read(1).device == GPU


def test_shards_that_fsdp2_keeps_in_host_memory_are_gathered_on_the_gpu(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(5, 7)
        expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
        assert model.weight.device.type == "cpu"
        offered = offer(model)
        assert offered.device == GPU
        for index, spec in enumerate(offered.manifest.tensors):
            read = offered.read(index)
            assert read.device == GPU and torch.equal(read.cpu(), expected[spec.name])
    finally:
        dist.destroy_process_group()
