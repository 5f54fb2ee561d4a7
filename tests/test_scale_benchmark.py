"""The benchmarks of scale: their arithmetic. What they measure, and what is simulated from it, is in `benchmarks/results`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale, simulate
from benchmarks.simulate import Rates, gpus, simulated, tensors_of

#: Round numbers: 100 GB/s, 1 ms a bucket.
RATES = Rates(byte=1e-11, bucket=1e-3, share=0.5, write=1e-12, prove=1e-6, fixed=0.1, engine=0.01, tensor=1e-5, both=1e-6)


def test_control_is_what_neither_broadcast_nor_loading_took() -> None:
    assert scale.control({"total": 5.0, "broadcast": 1.0, "await_pack": 0.5, "apply": 2.0, "verify": 0.25, "admit": 0.1}) == 1.25
    found = scale.summed([{"total": 3.0, "broadcast": 1.0}, {"total": 1.0, "broadcast": 0.5}, {"total": 2.0, "broadcast": 1.0}])
    assert found["updates"] == 3 and found["total"] == {"median": 2.0, "least": 1.0, "most": 3.0} and found["control"]["median"] == 1.0


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_an_exponent_is_the_power_by_which_something_grows(power: float) -> None:
    assert scale.exponent((1, 2, 3, 4), [3.0 * count**power for count in (1, 2, 3, 4)]) == pytest.approx(power, abs=1e-3)


def test_a_line_has_its_slope_and_says_how_much_of_what_is_seen_it_explains() -> None:
    assert scale.line((1, 2, 4), (12.0, 14.0, 18.0)) == {"slope": pytest.approx(2.0), "intercept": pytest.approx(10.0), "r2": 1.0}
    assert scale.line((1, 2, 3, 4), (1.0, 8.0, 1.0, 8.0))["r2"] < 0.7


def test_a_plane_is_found_again_and_no_term_of_it_is_below_nothing() -> None:
    points = [(x, y) for x in (1, 2, 4) for y in (8, 400, 10_000)]
    found = scale.plane([(x, y, 0.05 + 0.01 * x + 2e-5 * y + 3e-6 * x * y) for x, y in points])
    assert found == {name: pytest.approx(want, rel=1e-6) for name, want in zip(found, (0.05, 0.01, 2e-5, 3e-6), strict=True)}
    falling = scale.plane([(x, y, 0.2 - 0.01 * x + 1e-5 * y) for x, y in points])
    assert falling["by_engine"] == 0.0 and min(falling.values()) >= 0.0 and falling["by_tensor"] > 0


def row(engines: int, tensors: int, megabytes: int, seconds: float, sort: str = "receivers") -> dict[str, Any]:
    about = {"sort": sort, "engines": engines, "tensors": tensors, "bytes": megabytes * 1_000_000}
    spread = {"median": seconds, "least": seconds, "most": seconds}
    return {**about, "control": spread, "total": spread} | ({"cpu": {"controller": seconds}} if sort == "receivers" else {})


@pytest.mark.parametrize(("power", "reached"), [(0.5, True), (1.1, False)])
def test_goals_are_judged_by_the_rows_that_they_are_about(power: float, reached: bool) -> None:
    rows = [row(count, 8, 1, 0.1 * count**power) for count in (1, 2, 3, 4)]
    rows += [row(1, tensors, 64, 0.5 + 1e-5 * tensors) for tensors in (100, 400, 20_000)]
    rows += [row(1, 400, megabytes, 0.44 + 1e-3 * megabytes) for megabytes in (16, 512)]
    rows += [row(4, 10_000, 1, 9.0), *(row(count, 25, 1, 0.3, "engines") for count in (1, 2))]
    python = {"planned": {"median": 2.0}, "layerwise": {"median": 100.0}}
    found = scale.fitted(rows, python)
    assert found["control_exponent"] == pytest.approx(power, abs=1e-3) and found["reached"]["control_exponent"] is reached
    assert found["microseconds_per_tensor"] == 10.0 and found["seconds_per_gigabyte"] == pytest.approx(1.0, rel=0.01)
    assert found["reached"]["bytes_r2"] and found["reached"]["planned_microseconds"]
    assert len(scale.table(rows, found, python).splitlines()) == 2 + len(rows) + 3


def test_experts_of_few_bytes_are_as_many_as_asked_for() -> None:
    settings, shapes = scale.experts(layers=2, experts=8)
    names = [name for name in shapes if ".experts." in name]
    assert len(names) == 2 * 8 * 3 and settings["num_experts"] == 8
    assert {shapes[name] for name in names} == {(32, 64), (64, 32)} and shapes["model.layers.1.mlp.gate.weight"] == (8, 64)


def test_rates_are_read_off_the_files() -> None:
    def transport(mb: int, way: str = "all") -> dict[str, Any]:
        size = mb * 2**20
        return {
            "bucket_mb": mb,
            "way": way,
            "of_bare": 0.1 * math.log2(mb),
            "gigabytes_per_second": {"median": size / (1e-3 + size * 1e-11) / 1e9},
        }

    parts = [{"apply": 900.0, "verify": 90.0}, {"apply": 8.0, "verify": 2.0}, {"apply": 10.0, "verify": 4.0}, {"apply": 9.0, "verify": 3.0}]
    applied = {"rows": [{"case": "fp8"}, {"case": "bf16", "bytes": 1e10, "tensors": 1000, "parts_ms": parts}]}
    cpu = {"fixed": 9.0, "by_engine": 0.01, "by_tensor": 1e-5, "by_both": 1e-6}
    rows = [row(2, 8, 1, 0.2), row(1, 400, 64, 0.9), row(1, 8, 1, 0.1)]
    found = simulate.rates(
        {"rows": [transport(64), transport(256), transport(1024), transport(64, "bare")]},
        applied,
        {"fits": {"controller_cpu": cpu}, "rows": rows},
    )
    assert found.byte == pytest.approx(1e-11) and found.bucket == pytest.approx(1e-3) and found.share == pytest.approx(1.0)
    assert found.write == pytest.approx(9e-3 / 1e10) and found.prove == pytest.approx(3e-6)
    assert (found.fixed, found.engine, found.tensor, found.both) == (0.1, 0.01, 1e-5, 1e-6)


@pytest.mark.parametrize(("nbytes", "count"), [(16e9, 1), (63e9, 1), (64e9, 2), (470e9, 8), (2e12, 32)])
def test_an_engine_has_as_many_gpus_as_hold_weights_and_what_is_staged(nbytes: float, count: int) -> None:
    assert gpus(nbytes) == count


def test_an_update_is_the_controllers_work_the_broadcast_and_the_pause() -> None:
    nbytes = 64 * 2.0**30  # one GPU is not enough
    found = simulated(RATES, nbytes, 3, math.inf)
    tensors, levels = tensors_of(nbytes), 3  # six workers and a trainer
    assert tensors == 1024 and (found["gpus"], found["within_a_host"]) == (6, True)
    assert found["controller"] == pytest.approx(0.1 + 0.03 + tensors * 1e-5 + 3 * tensors * 1e-6, abs=1e-4)
    assert found["broadcast"] == pytest.approx(nbytes * 1e-11 + 64 * (1e-3 + levels * simulate.HOP), abs=1e-4)
    assert found["pause"] == pytest.approx(nbytes / 2 * 1e-12 + tensors * 1e-6, abs=1e-4)
    assert found["total"] == pytest.approx(found["controller"] + found["broadcast"] + found["pause"], abs=2e-4)


def test_a_byte_takes_what_the_slower_of_card_and_measured_rate_takes() -> None:
    slow, fast = (simulated(RATES, 1e12, 1, link)["broadcast"] for link in (simulate.CARD, math.inf))
    assert slow == pytest.approx(1e12 / (simulate.CARD * RATES.share), rel=0.1) and fast == pytest.approx(10.0, rel=0.12)
    assert simulated(RATES, 1e12, 1, 1e15)["broadcast"] == fast


def test_nothing_gets_less_with_more_engines_or_parameters() -> None:
    rows = simulate.grid(RATES)
    assert len(rows) == len(simulate.LINKS) * len(simulate.PARAMETERS) * len(simulate.ENGINES)
    at = {(one["link"], one["parameters"], one["engines"]): one["total"] for one in rows}
    for (link, count, engines), seconds in at.items():
        assert all(other >= seconds for (l2, p2, e2), other in at.items() if l2 == link and p2 >= count and e2 >= engines)
    assert len(simulate.table(rows).splitlines()) == 2 + len(simulate.LINKS) * len(simulate.PARAMETERS)
    assert all(set(claim["here"]) == set(simulate.LINKS) and claim["seconds"][0] > 0 for claim in simulate.beside(RATES))


def test_the_simulation_runs_on_the_files_that_are_there(tmp_path: Path) -> None:
    for name in ("transport-nccl-h200.json", "apply-h200.json", "scale-cpu.json"):
        (tmp_path / name).write_text((simulate.RESULTS / name).read_text())
    command = [sys.executable, "-m", "benchmarks.simulate", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads((tmp_path / "simulated.json").read_text())
    assert made["simulated"] is True and made["rows"] == json.loads((simulate.RESULTS / "simulated.json").read_text())["rows"]
    assert (tmp_path / "simulated.png").stat().st_size > 10_000


def test_the_readme_says_what_the_files_say() -> None:
    readme = (scale.RESULTS.parents[1] / "README.md").read_text()
    measured, reckoned = (json.loads((scale.RESULTS / name).read_text()) for name in ("scale-cpu.json", "simulated.json"))
    again = {**measured, "fits": scale.fitted(measured["rows"], measured["python"])}
    assert scale.sentence(measured) == scale.sentence(again) and again["fits"]["reached"] == measured["fits"]["reached"]
    assert scale.sentence(measured) in readme and simulate.sentence(reckoned["rows"]) in readme


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_benchmark_of_scale_runs_through() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.scale", "--quick"], capture_output=True, text=True, env=dict(os.environ))
    assert "Python a tensor" in done.stdout, done.stderr[-3000:]
