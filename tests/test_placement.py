"""Which engines fit on which nodes, where the controller goes, and what address is told.

Not covered: what Ray does with them (`test_two_hosts.py`).
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from weightsync import config
from weightsync.errors import ConfigError
from weightsync.fleet.placement import beyond_reach, listen, own_address, pinned_to, require_gpus
from weightsync.sections import EngineSettings


def nodes(*gpus: int) -> list[dict[str, Any]]:
    """One node for each number of GPUs, and one more that is gone."""
    alive = [{"Alive": True, "Resources": {"CPU": 4.0} | ({"GPU": float(count)} if count else {})} for count in gpus]
    return [*alive, {"Alive": False, "Resources": {"GPU": 64.0}}]


def settings(count: int) -> EngineSettings:
    return EngineSettings.model_construct(count=count)


@pytest.mark.parametrize(
    ("count", "gpus", "there"),
    [(1, 0, ()), (9, 0, (0,)), (2, 1, (2,)), (2, 4, (8,)), (2, 4, (4, 0, 4)), (3, 0.3, (1,)), (6, 0.3, (1, 1)), (10, 0.1, (1,))],
)
def test_what_fits_is_taken(count: int, gpus: float, there: tuple[int, ...]) -> None:
    require_gpus(settings(count), gpus, nodes(*there), may_grow=False)


@pytest.mark.parametrize(
    ("count", "gpus", "there", "most"),
    [(1, 1, (0,), 0), (3, 1, (2,), 2), (2, 4, (6,), 1), (1, 2, (1, 1), 0), (4, 0.3, (1,), 3), (3, 0.6, (1, 1), 2)],
)
def test_what_does_not_fit_is_refused_with_what_there_is(count: int, gpus: float, there: tuple[int, ...], most: int) -> None:
    with pytest.raises(ConfigError, match=f"got {count}, want at most {most}: .*{gpus:g}.*{list(there)}".replace("[", r"\[")):
        require_gpus(settings(count), gpus, nodes(*there), may_grow=False)


def test_a_cluster_that_may_grow_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require_gpus(settings(2), 8, nodes(8), may_grow=True)
    assert "want at most 1" in caplog.text


def at(*addresses: str, gone: str = "") -> list[dict[str, Any]]:
    return [{"Alive": address != gone, "NodeManagerAddress": address} for address in addresses]


@pytest.mark.parametrize(
    ("store_host", "there", "node"),
    [
        ("10.0.0.2", at("10.0.0.1", "10.0.0.2", "10.0.0.3"), "10.0.0.2"),
        ("127.0.0.1", at("10.0.0.1", "10.0.0.2"), "10.0.0.1"),  # reached on the machine of `serve` alone
        ("localhost", at("127.0.0.1"), "127.0.0.1"),
        ("192.168.7.7", at("10.0.0.1", "10.0.0.2"), "10.0.0.1"),  # a second network of that machine
        ("10.0.0.2", at("10.0.0.1", "10.0.0.2", gone="10.0.0.2"), "10.0.0.1"),
    ],
)
def test_the_controller_goes_where_its_stores_address_is(store_host: str, there: list[dict[str, Any]], node: str) -> None:
    """It reserves nothing: Ray put it on another node, where it could not open the store."""
    assert pinned_to(store_host, there, own="10.0.0.1" if len(there) > 1 else "127.0.0.1") == {f"node:{node}": 0.001}


def test_an_address_to_listen_on_is_not_told_as_one_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.5")
    assert [own_address(host) for host in ("0.0.0.0", "::", "127.0.0.1", "10.0.0.7")] == ["10.0.0.5", "10.0.0.5", "127.0.0.1", "10.0.0.7"]


def test_loopback_addresses_are_pointed_out_where_engines_may_be_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    usual = config.load({"engine.model": tmp_path})
    said = beyond_reach(usual, at("10.0.0.1", "10.0.0.2"))
    assert [text.partition(",")[0] for text in said] == ["api.host is 127.0.0.1", "sync.store_host is 127.0.0.1"]
    assert beyond_reach(usual, at("10.0.0.1", "10.0.0.2", gone="10.0.0.2")) == []
    right = config.load({"engine.model": tmp_path, "api.host": "0.0.0.0", "sync.store_host": "10.0.0.1"})
    assert beyond_reach(right, at("10.0.0.1", "10.0.0.2")) == []


def test_an_engine_says_which_setting_keeps_it_from_listening_on_its_node(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    elsewhere = config.load({"engine.model": tmp_path, "api.host": "192.0.2.1"})
    with pytest.raises(ConfigError, match=r"api\.host: got '192\.0\.2\.1', want 0\.0\.0\.0, or .*; here are .*lo \(127\.0\.0\.1"):
        listen(elsewhere, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine\.port_base: got {port - 3}, want one of which port {port} is free"):
            listen(config.load({"engine.model": tmp_path, "engine.port_base": port - 3}), 3)
    with listen(config.load({"engine.model": tmp_path}), 3) as free:
        assert free.getsockname()[1] > 0
