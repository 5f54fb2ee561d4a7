"""The Dockerfile and what it is made of, without a container engine: linted, its lock files, and its stand-in for a compiler.

Not covered: building the image, and running it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Each build stage by its name, comments and line breaks taken out.
STAGES = {
    found[1]: re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", found[0], flags=re.MULTILINE))
    for found in re.finditer(r"^FROM \S+ AS (\w+)\n(?:(?!^FROM ).*\n)*", DOCKERFILE, re.MULTILINE)
}
HASHED = ("cuda.lock", "build.lock")


def locked(name: str) -> dict[str, str]:
    """What a lock file pins, one block of text each, by name."""
    blocks = re.split(r"^(?=[a-z0-9])", (ROOT / "requirements" / name).read_text(), flags=re.IGNORECASE | re.MULTILINE)
    return {re.split("==| ", block)[0].lower(): block for block in blocks if not block.startswith("#")}


def test_hadolint_has_nothing_against_it() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", HASHED)
def test_every_pin_has_hashes_and_no_lock_names_an_index(name: str) -> None:
    pins = locked(name)
    assert pins
    for block in pins.values():
        assert re.match(r"[\w.-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+$", block), block
    assert not re.search(r"^\s*-(?!-hash)|://", (ROOT / "requirements" / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "cuda.lock",
            [*PROJECT["project"]["dependencies"], *(PROJECT["project"]["optional-dependencies"][e] for e in ("service", "cuda"))],
        ),
        ("build.lock", PROJECT["build-system"]["requires"]),
    ],
)
def test_locks_hold_what_the_project_asks_for(name: str, wanted: list[str | list[str]]) -> None:
    pins = locked(name)
    for text in [text for part in wanted for text in ([part] if isinstance(part, str) else part)]:
        requirement = Requirement(text)
        if requirement.name != "weightsync":
            version = re.search(r"==(\S+)", pins[requirement.name.lower().replace("_", "-")])
            assert version and requirement.specifier.contains(version[1]), text


def test_the_chart_tells_kuberay_which_ray_the_image_has() -> None:
    version = re.search(r"==(\S+)", locked("cuda.lock")["ray"])
    assert version and f'  version: "{version[1]}"\n' in (ROOT / "deploy/helm/weightsync/values.yaml").read_text()


def test_the_image_is_the_last_stage_and_holds_no_build_tools() -> None:
    assert list(STAGES) == ["uv", "cpu", "build", "cuda"]
    assert re.search(r"install [^&]*\bgcc\b", STAGES["build"])
    assert not re.search(r"\b(gcc|g\+\+|make|git|cmake|ninja|nvcc|pip|uv|\S+-dev|build-essential)\b", STAGES["cuda"])
    assert re.search(r"FROM nvidia/cuda:", STAGES["cuda"])


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_what_runs_is_no_root_and_the_charts_user(stage: str) -> None:
    users = re.findall(r"^USER (.*)$", STAGES[stage], re.MULTILINE)
    assert users == ["10001:10001"]
    values = (ROOT / "deploy/helm/weightsync/values.yaml").read_text()
    assert "runAsUser: 10001\n" in values and "runAsGroup: 10001\n" in values
    assert "--uid 10001" in STAGES[stage]


def test_the_image_says_what_it_is_and_whether_it_lives() -> None:
    assert f"ARG VERSION={PROJECT['project']['version']}\n" in DOCKERFILE
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", STAGES["cuda"]))
    assert {"title", "description", "licenses", "version", "revision"} == labels
    assert re.search(r"^HEALTHCHECK .*--start-period=30m.*wget .*/livez", STAGES["cuda"], re.MULTILINE)
    assert "wget" in re.search(r"apt-get install ([^&]*)", STAGES["cuda"])[1]  # type: ignore[index]


def test_only_what_was_locked_is_installed_and_only_what_was_installed_is_copied() -> None:
    installs = re.findall(r"uv (?:pip install|build) [^&\n]*", STAGES["build"])
    assert len(installs) == 3
    for command in installs:
        assert "--require-hashes" in command or "--no-deps" in command
    assert re.findall(r"^COPY (.*)$", STAGES["cuda"], re.MULTILINE) == ["--from=build /opt/weightsync /opt/weightsync"]


def test_the_image_serves_to_others_by_itself() -> None:
    stage = STAGES["cuda"]
    env = dict(found.split("=", 1) for found in re.search(r"^ENV (.*)$", stage, re.MULTILINE)[1].split())  # type: ignore[index]
    assert env["PATH"].startswith("/opt/weightsync/bin:") and env["WEIGHTSYNC_API__HOST"] == "0.0.0.0"
    assert env["CC"] == "/opt/weightsync/lib/triton/cc" and "triton.sh /opt/weightsync" in STAGES["build"]
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "it would compile"
    assert {"ibverbs-providers", "libibverbs1", "python3"} <= set(re.search(r"apt-get install ([^&]*)", stage)[1].split())  # type: ignore[index]
    assert 'ENTRYPOINT ["weightsync"]' in stage and 'CMD ["serve"]' in stage and "EXPOSE 8517" in stage
    assert "--create-home" in stage, "Ray and vLLM write there"
    assert re.search(r"^FROM nvidia/cuda:\$\{CUDA\}-(base|runtime)-", stage, re.MULTILINE), "no devel: it has compilers"


def test_the_demo_is_installed_as_make_does_it() -> None:
    assert re.search(r"^RUN make setup ", STAGES["cpu"], re.MULTILINE) and 'CMD ["make", "demo"]' in STAGES["cpu"]


def test_what_is_copied_is_there_and_not_left_out() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for sources in re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists() and source not in ignored


def test_the_stand_in_for_a_compiler_gives_what_was_compiled_and_nothing_else(tmp_path: Path) -> None:
    there, new, out = tmp_path / "triton", tmp_path / "new", tmp_path / "out.so"
    there.mkdir()
    new.mkdir()
    shutil.copy(ROOT / "deploy/image/cc.sh", there / "cc")
    (there / "driver.c").write_text("one")
    (there / "driver.so").write_text("compiled")

    def compiles(source: Path) -> subprocess.CompletedProcess[str]:
        command = [there / "cc", source, "-O3", "-shared", "-fPIC", "-o", out, "-l:libcuda.so.1", "-I/usr/include"]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=20)

    (new / "driver.c").write_text("another")
    done = compiles(new / "driver.c")
    assert done.returncode == 1 and "no compiler" in done.stderr and not out.exists()
    (new / "driver.c").write_text("one")
    assert compiles(new / "driver.c").returncode == 0 and out.read_text() == "compiled"
