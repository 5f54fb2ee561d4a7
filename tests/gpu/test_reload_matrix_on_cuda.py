"""The rows of the reload matrix as tests: real vLLM engines with CUDA graphs on, after updates, against cold ones.

The core rows run by default, a few minutes on one GPU; the others are marked slow
(`make test-gpu ARGS="-m gpu"` runs all). Every row is one call of
`benchmarks.reload_matrix`, without stock vLLM, which crashes on some of them.

Not covered: stock vLLM's own results; those are in the file that the benchmark writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reload_matrix
from benchmarks.matrix_rows import ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]

#: One of each sort of repair: nothing moves, strides, whole weights, derived projections, permuted bias.
CORE = ("dense-bf16", "dense-w4a16", "moe-fp8-channel", "gpt-oss-mxfp4", "mla-bf16", "dense-gptq-marlin-bias")
#: An engine's start keeps about one core busy.
JOBS = max(2, (os.cpu_count() or 4) - 4)


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Row to result, of all rows that this run of pytest selected: they share the machine's cores."""
    chosen = [item.callspec.params["row"] for item in request.session.items if item.nodeid.startswith("tests/gpu/test_reload_matrix")]
    out = tmp_path_factory.mktemp("matrix") / "results.json"
    reload_matrix.main(["--rows", ",".join(chosen), "--jobs", str(JOBS), "--no-stock", "--out", str(out)])
    found = json.loads(Path(out).read_text())["rows"] if out.exists() else []
    yield {row["row"]: row for row in found}


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in CORE else pytest.mark.slow) for row in ROWS["cuda"]])
def test_an_engine_holds_and_says_what_a_cold_one_would_after_each_update(row: str, results: dict[str, Any]) -> None:
    result = results.get(row)
    assert result is not None, f"{row} has no result; see the output above"
    if result["verdict"] == "blocked":
        pytest.skip(f"stock vLLM does not start here: {result['evidence']['error']}")
    assert result["verdict"] == "right", result["weightsync"]["reasons"]
