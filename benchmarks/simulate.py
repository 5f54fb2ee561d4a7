"""What a sync would take with up to 1,000 engines and 10^12 parameters, by rates that were measured: one command, one file, one picture.

    python -m benchmarks.simulate

Arithmetic, done in seconds; nothing of this size was run. Rates are read from `benchmarks/results`:

- *broadcast*: NCCL between two H200s over NVLink, digests and values looked at (`transport-nccl-h200.json`). Its three bucket sizes
  give seconds a byte and seconds a bucket. Over a network a byte takes no less than the network card needs for it.
- *apply*: an update by a plan, written and proved, bf16 on one H200 (`apply-h200.json`): seconds a byte, and seconds a tensor of the proof.
- *controller*: a call's fixed time, and seconds of CPU by engine, by tensor and by both (`scale-cpu.json`, receivers), on two cores.

Assumptions:

1. One trainer process sends everything, as it does today: every worker gets the whole stream, and keeps its own part.
2. NCCL's trees go over all workers at the rate of the slowest link, and each bucket costs one more step (`HOP`) for each level of a
   binary tree. A card of 400 Gb/s gives 50 GB/s, of which that share is used which NCCL reached of a bare broadcast on NVLink;
   eight cards give eight times as much, up to NVLink's rate, if NCCL spreads one sender over all cards of its host.
3. The controller's work for engines and tensors is done one after the other, by one process as fast as here, where a line of JSON
   stands for a call of Ray's. Nothing else grows with engines.
4. Weights are spread evenly over an engine's GPUs, and staged beside themselves: an engine has as many GPUs (a power of two, of 141 GB)
   as hold both in 90 % of them. All apply their parts at the same time. The service takes engines of one host today, eight
   GPUs at most: `within_a_host` says who needs more.
5. Tensors have 2^25 elements on the average, and are 400 at least (Qwen3-8B has 399; of 10^12 parameters 30,000 here, and some 70,000 in
   Kimi-K2 with experts one by one). All are planned.
6. Engines are not waited for: nothing fails, nobody drains.

Others' figures (`PUBLISHED`) are their own claims, from their documents; none was run here, and none includes a proof of what engines
hold. Each stands beside what this model says of as many bytes and engines.

Not covered: engines that quantise (their update is not planned), several senders, failures, slow hosts, congestion.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, Record

#: Of a GPU, and the share of it that weights and what is staged may take.
_GPU_BYTES, _SHARE = 141e9, 0.9
_HOST_GPUS = 8
#: Bytes a second of one network card of 400 Gb/s; seconds of one more level of a tree, for each bucket (assumed: no network was measured).
CARD, HOP = 50e9, 20e-6
BUCKET = 1 << 30
ENGINES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
PARAMETERS = (8e9, 30e9, 100e9, 300e9, 1e12)
#: Networks by name: bytes a second into a worker.
LINKS = {"one card a sender": CARD, "eight cards a sender": 8 * CARD, "NVLink": math.inf}


@dataclass(frozen=True)
class Rates:
    """What was measured, in seconds.

    Attributes:
        byte, bucket: of a broadcast with digests, by byte and by bucket.
        share: of a bare broadcast in the largest buckets.
        write: of a byte that is applied.
        prove: of one tensor's part in the proof.
        fixed, engine, tensor, both: of the controller, for an update, for each engine, for each tensor, for each tensor of each engine.
    """

    byte: float
    bucket: float
    share: float
    write: float
    prove: float
    fixed: float
    engine: float
    tensor: float
    both: float


@dataclass(frozen=True)
class Published:
    """A claim of somebody else's.

    Attributes:
        source, setup: who says it, and of what.
        nbytes: of the weights, by parameters and dtype.
        engines: that are updated, as far as it is said; else 1.
        seconds: least and most of what is claimed.
    """

    source: str
    setup: str
    nbytes: float
    engines: int
    seconds: tuple[float, float]


PUBLISHED = (
    Published("checkpoint-engine README", "GLM-4.5-Air BF16, 8 H800, broadcast", 212e9, 1, (3.47, 3.47)),
    Published("checkpoint-engine README", "Qwen3-235B BF16, 8 H800, broadcast", 470e9, 1, (6.22, 6.22)),
    Published("checkpoint-engine README", "DeepSeek-V3.1 FP8, 16 H20", 671e9, 1, (10.19, 10.19)),
    Published("checkpoint-engine README", "DeepSeek-V3.1 FP8, 256 H20", 671e9, 16, (11.33, 11.33)),
    Published("checkpoint-engine README", "Kimi-K2 FP8, 16 H20", 1000e9, 1, (14.36, 14.36)),
    Published("checkpoint-engine README", "Kimi-K2 FP8, 256 H20", 1000e9, 16, (16.04, 16.04)),
    Published("vLLM PR #43375", "Qwen3-235B, 8 to 8 H100, sharded RDT", 472e9, 1, (3.2, 3.3)),
    Published("SkyRL PR #2090", "Qwen3-235B, 4 nodes, NCCL", 470e9, 2, (64.72, 64.72)),
    Published("SkyRL PR #2090", "Qwen3-235B, 4 nodes, RDT", 470e9, 2, (3.54, 3.54)),
    Published("NeMo-RL docs, NCCL reshard", "Qwen3-4B BF16", 8e9, 1, (0.21, 0.34)),
    Published("NeMo-RL docs, NCCL reshard", "30B BF16", 60e9, 1, (0.74, 1.00)),
    Published("NeMo-RL docs, NCCL reshard", "DeepSeek-V3 BF16, H100", 1342e9, 1, (2.39, 2.83)),
    Published("verl README", "30B-A3B, 4 x 8 H100, NCCL", 60e9, 4, (7.0, 7.0)),
    Published("Awex README", "10^12 FP8, NCCL", 1000e9, 1, (20.0, 20.0)),
    Published("Awex README", "10^12 FP8, RDMA", 1000e9, 1, (6.0, 6.0)),
    Published("miles docs", "Kimi-K2, broadcast", 1000e9, 1, (53.3, 53.3)),
    Published("miles docs", "Kimi-K2, peer to peer", 1000e9, 1, (7.2, 7.2)),
    Published("slime v0.1.0", "GLM-4.5-355B BF16", 710e9, 1, (48.0, 48.0)),
    Published("TRL PR #5892", "Qwen3-0.6B", 1.2e9, 1, (0.18, 0.18)),
)


# --- arithmetic: pure ----------------------------------------------------------------------------


def rates(transport: dict[str, Any], applied: dict[str, Any], scale: dict[str, Any]) -> Rates:
    """From the files of results (`transport-nccl-…`, `apply-…`, `scale-cpu`)."""
    rows = [row for row in transport["rows"] if row["way"] == "all"]
    sizes = [row["bucket_mb"] * 2.0**20 for row in rows]
    fit = statistics.linear_regression(
        sizes, [size / row["gigabytes_per_second"]["median"] / 1e9 for size, row in zip(sizes, rows, strict=True)]
    )
    written = next(row for row in applied["rows"] if row["case"] == "bf16")
    parts = [{name: part[name] for name in ("apply", "verify")} for part in written["parts_ms"][1:]]
    apply, verify = (statistics.median(part[name] for part in parts) / 1e3 for name in ("apply", "verify"))
    cpu = scale["fits"]["controller_cpu"]
    smallest = min(
        (row for row in scale["rows"] if row["sort"] == "receivers"), key=lambda row: (row["engines"], row["tensors"], row["bytes"])
    )
    return Rates(
        byte=fit.slope, bucket=max(0.0, fit.intercept), share=max(row["of_bare"] for row in rows),
        write=apply / written["bytes"], prove=verify / written["tensors"],
        fixed=smallest["control"]["median"], engine=cpu["by_engine"], tensor=cpu["by_tensor"], both=cpu["by_both"],
    )  # fmt: skip


def gpus(nbytes: float) -> int:
    """Of one engine: a power of two that holds weights and as much again that is staged."""
    return 1 << max(0, math.ceil(math.log2(2 * nbytes / (_GPU_BYTES * _SHARE))))


def tensors_of(nbytes: float) -> int:
    """How many tensors weights of so many bytes are, with 2^25 elements of two bytes each."""
    return max(400, round(nbytes / 2 / 2**25))


def simulated(measured: Rates, nbytes: float, engines: int, link: float) -> dict[str, Any]:
    """Seconds of one update, by what they go to; `total` is the whole call, `pause` what engines stand still for.

    Args:
        nbytes: of the weights.
        link: bytes a second that a worker's network card takes at most.
    """
    each, tensors = gpus(nbytes), tensors_of(nbytes)
    levels = math.ceil(math.log2(engines * each + 1))
    buckets = math.ceil(nbytes / BUCKET)
    broadcast = nbytes * max(measured.byte, 1.0 / (link * measured.share)) + buckets * (measured.bucket + levels * HOP)
    controller = measured.fixed + engines * measured.engine + tensors * measured.tensor + engines * tensors * measured.both
    pause = nbytes / each * measured.write + tensors * measured.prove
    seconds = {"controller": controller, "broadcast": broadcast, "pause": pause, "total": controller + broadcast + pause}
    return {
        "bytes": nbytes, "engines": engines, "gpus": engines * each, "gpus_per_engine": each, "within_a_host": each <= _HOST_GPUS,
        "tensors": tensors, **{name: round(value, 4) for name, value in seconds.items()},
    }  # fmt: skip


def beside(measured: Rates) -> list[dict[str, Any]]:
    """Others' claims, and the model for the same bytes and engines, by link."""
    return [
        {**asdict(claim), "here": {name: simulated(measured, claim.nbytes, claim.engines, link)["total"] for name, link in LINKS.items()}}
        for claim in PUBLISHED
    ]


def grid(measured: Rates) -> list[dict[str, Any]]:
    """All sizes, bf16, over all links."""
    return [
        {"link": name, "parameters": count, **simulated(measured, 2 * count, engines, link)}
        for name, link in LINKS.items()
        for count in PARAMETERS
        for engines in ENGINES
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """With 1,000 engines, for reading."""
    lines = ["| parameters | link | GPUs an engine | controller | broadcast | engines stand still | whole call |", "|---|" + "---|" * 6]
    for row in rows:
        if row["engines"] == ENGINES[-1]:
            each = f"{row['gpus_per_engine']}{'' if row['within_a_host'] else ' (over hosts: not today)'}"
            times = f"{row['controller']:.1f} s | {row['broadcast']:.1f} s | {row['pause'] * 1e3:.0f} ms | {row['total']:.1f} s"
            lines.append(f"| {row['parameters'] / 1e9:.0f} 10^9 | {row['link']} | {each} | {times} |")
    return "\n".join(lines)


def sentence(rows: Sequence[dict[str, Any]]) -> str:
    """What README says of the largest of what was simulated."""
    last = {row["link"]: row for row in rows if (row["engines"], row["parameters"]) == (ENGINES[-1], PARAMETERS[-1])}
    one, eight, most = (last[link] for link in LINKS)
    return (
        f"{one['engines']:,} engines and 10^12 parameters in bf16: {one['total']:.0f} s through one network card of 400 Gb/s, "
        f"{eight['total']:.0f} s through eight, {most['total']:.0f} s at NVLink's rate; the controller has "
        f"{most['controller']:.0f} s of each, and engines would stand still for {most['pause'] * 1e3:.0f} ms"
    )


def draw(rows: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]], path: Path) -> None:
    """Over engines; over bytes, with others' claims; and what the largest update goes to."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    one = [row for row in rows if row["link"] == "one card a sender"]
    for count in PARAMETERS:
        some = [row for row in one if row["parameters"] == count]
        left.plot([row["engines"] for row in some], [row["total"] for row in some], marker=".", label=f"{count / 1e9:.0f}·10⁹")
    left.set(title="One card a sender, bf16 (simulated)", xlabel="engines", ylabel="s", xscale="log", yscale="log")
    left.legend(title="parameters", fontsize="small")
    for name in LINKS:
        for engines, style in ((1, ":"), (ENGINES[-1], "-")):
            some = [row for row in rows if row["link"] == name and row["engines"] == engines]
            middle.plot([row["bytes"] / 1e9 for row in some], [row["total"] for row in some], style, label=f"{name}, {engines} engine(s)")
    middle.scatter(
        [claim["nbytes"] / 1e9 for claim in claims],
        [claim["seconds"][0] for claim in claims],
        c="k",
        s=14,
        label="others' claims, no proof",
    )
    middle.set(title="Simulated, beside claims of others (other machines)", xlabel="GB of weights", ylabel="s", xscale="log", yscale="log")
    middle.legend(fontsize="x-small")
    names, last = list(LINKS), [row for row in rows if row["engines"] == ENGINES[-1] and row["parameters"] == PARAMETERS[-1]]
    below = [0.0] * len(last)
    for part in ("controller", "broadcast", "pause"):
        values = [row[part] for row in last]
        right.bar(names, values, bottom=below, label=part)
        below = [low + value for low, value in zip(below, values, strict=True)]
    right.set(title="1,000 engines, 10¹² parameters (simulated)", ylabel="s")
    right.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# --- the run -------------------------------------------------------------------------------------


def main() -> int:
    """Read, reckon, write the files, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the measured files, and of what is written")
    folder = parser.parse_args().results
    files = ("transport-nccl-h200.json", "apply-h200.json", "scale-cpu.json")
    measured = rates(*(json.loads((folder / name).read_text()) for name in files))
    rows, claims = grid(measured), beside(measured)
    about = {"simulated": True, "from": list(files), "rates": asdict(measured), "assumed": {"card": CARD, "hop": HOP, "bucket": BUCKET}}
    Record().write(folder / "simulated.json", {**about, "claims": claims, "rows": rows})
    draw(rows, claims, folder / "simulated.png")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
