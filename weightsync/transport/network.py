"""This machine's network as far as a rendezvous needs it: which address leads to a peer, and what there is to choose from.

Not covered: whether a peer can come back on that address, which only the rendezvous shows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

from weightsync.errors import ConfigError

#: For processes that join or host a store. torch asks for the name of every peer it connects to, and by glibc's own settings a
#: question that is lost on the way costs 5 s. Only read when a process looks up its first name.
LOOKUPS = {"RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:2")}

_SIOCGIFADDR = 0x8915  # Linux; elsewhere no IPv4 address is shown


def address_to(host: str) -> str:
    """This machine's address on the way to `host`; empty if none leads there. Nothing is sent."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: only looks the way up
            name: str = probe.getsockname()[0]
            return name
    return ""


def addresses_of(host: str) -> set[str]:
    """Every address that a name has; itself if it is one, none if it can't be looked up."""
    with contextlib.suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return set()


def way_to(host: str) -> str:
    """The address that leads to `host` and its interface, in words."""
    address = address_to(host)
    if not address:
        return f"no address of this machine ({seen()})"
    return next((f"{address} ({name})" for name, held in interfaces().items() if address.partition("%")[0] in held), address)


def is_loopback(host: str) -> bool:
    """Whether an address given as a number or as `localhost` leads to the very machine that uses it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interfaces() -> dict[str, list[str]]:
    """Network interfaces and their addresses, as far as they can be read."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        for name in found:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name in found:
                found[name].append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def seen() -> str:
    """What this machine has, in words."""
    return "here are " + ", ".join(f"{name} ({', '.join(held) or 'no address'})" for name, held in interfaces().items())


def require_interface(name: str) -> None:
    """See that there is such an interface and that it has an address; none given is right too.

    Raises:
        ConfigError: names those there are.
    """
    if name and not interfaces().get(name):
        raise ConfigError(
            f"interface: got {name!r}, want a network interface of this machine that has an address: {seen()}",
            hint="Engines take sync.interface, the trainer takes WeightSync(interface=…)",
        )
