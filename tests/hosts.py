"""Hosts of our own making: network namespaces of this machine, joined by a switch.

Each has one network interface, `eth0`, with an address that is not loopback, and its own loopback. Files,
shared memory and process ids are this machine's. A link can be cut at the switch, as when a cable is pulled:
the host keeps its address and interface, and what is sent goes nowhere, without a word.

Not covered: a way out (there is no default route, and names can't be asked for), loss and delay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.fleets import wait_until
from weightsync.fleet import own_ray

SUBNET = "10.203.0"
RAY_PORT = 6379
#: Of the Ray that tests start on these hosts.
RAY_TOKEN = "0123456789abcdef" * 4
_IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
_CLONE_NEWNET = 0x40000000
_ROOT = Path(__file__).resolve().parent.parent


def why_not() -> str:
    """Why no hosts can be made on this machine; empty when they can."""
    if not _IP or shutil.which("nsenter") is None:
        return "needs ip (iproute2) and nsenter (util-linux)"
    name = f"weightsync-{os.getpid()}-probe"
    made = subprocess.run([_IP, "netns", "add", name], capture_output=True, text=True)
    try:
        if made.returncode == 0:
            made = subprocess.run([_IP, "-n", name, "link", "add", "switch", "type", "bridge"], capture_output=True, text=True)
        return f"needs root and network namespaces: {made.stderr.strip()}" if made.returncode else ""
    finally:
        subprocess.run([_IP, "netns", "del", name], capture_output=True)


def enter(_: object, namespace: str) -> None:
    """Move the calling thread, and those that it starts from now on, to a host (for `peers.Peer`)."""
    handle = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(handle)


class Network:
    """Hosts and their switch; a context that leaves neither processes nor namespaces.

    Args:
        hosts: their names, one letter each; the first has the address 10.203.0.1.
    """

    def __init__(self, hosts: str) -> None:
        self._hosts, self._names = hosts, {host: f"weightsync-{os.getpid()}-{host}" for host in ("switch", *hosts)}
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        _sweep()
        try:
            for name in self._names.values():
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            switch = self._names["switch"]
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            for host in self._hosts:
                name = self._names[host]
                _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"to-{host}", "netns", switch)
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", switch, "link", "set", f"to-{host}", "master", "switch")
                self.mend(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._hosts.index(host) + 1}"

    def namespace(self, host: str) -> str:
        """The file that stands for a host's network."""
        return f"/run/netns/{self._names[host]}"

    def on(self, host: str) -> list[str]:
        """What a command line begins with to run on a host; the process id stays the same."""
        return ["nsenter", f"--net={self.namespace(host)}"]

    def cut(self, host: str) -> None:
        """Pull the cable."""
        _ip("-n", self._names["switch"], "link", "set", f"to-{host}", "down")

    def mend(self, host: str) -> None:
        _ip("-n", self._names["switch"], "link", "set", f"to-{host}", "up")

    def processes(self, host: str) -> list[int]:
        """Every process on a host."""
        return _processes(self._names[host])

    def start_ray(self, host: str, folder: Path, cpus: int, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a Ray node as `weightsync serve` starts one, and wait until it is there; the first host's is the head.

        Args:
            folder: for its files, with a short path (sockets lie there).
        """
        head = host == self._hosts[0]
        role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if head else [f"--address={self.ray_address}"]
        command = [
            *self.on(host), sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block", "--disable-usage-stats",
            f"--node-ip-address={self.address(host)}", f"--num-cpus={cpus}", f"--object-store-memory={80 << 20}", f"--temp-dir={folder}",
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "ray.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=_ROOT,
                env={**os.environ, **ray_environment(), **(env or {})},
            )  # fmt: skip
        self._children.append(child)
        wait_until(lambda: b"Ray runtime started" in log.read_bytes() or child.poll() is not None, 60, "a Ray node")
        assert child.poll() is None, log.read_text()
        return child

    @property
    def ray_address(self) -> str:
        return f"{self.address(self._hosts[0])}:{RAY_PORT}"

    def close(self) -> None:
        """End every process on these hosts, and take them down."""
        _remove(list(self._names.values()))
        for child in self._children:
            child.wait(10)


def ray_environment() -> dict[str, str]:
    """Variables of every process that is part of this Ray or joins it."""
    return {**own_ray.environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}


def _processes(name: str) -> list[int]:
    found = subprocess.run([_IP, "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def _remove(names: Sequence[str]) -> None:
    """Take namespaces down, with every process in them."""
    until = time.monotonic() + 20
    while (left := [pid for name in names for pid in _processes(name)]) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for name in names:
        subprocess.run([_IP, "netns", "del", name], capture_output=True)


def _sweep() -> None:
    """Remove what a run that was killed has left."""
    for file in Path("/run/netns").glob("weightsync-*-*"):
        if not Path(f"/proc/{file.name.split('-')[1]}").exists():
            _remove([file.name])


def _ip(*arguments: str) -> None:
    done = subprocess.run([_IP, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
