"""Examples of answers and of a request, for the description of the API. Data only; a test decodes each."""

from __future__ import annotations

from typing import Any

from weightsync.protocol import PROTOCOL_VERSION

#: `GET /v1/engines/0/contract` of an engine with captured graphs.
CONTRACT: dict[str, Any] = {
    "engine": 0,
    "workers": [
        {
            "rank": 0,
            "contract": {
                "vllm_version": "0.33.0",
                "device": "cuda:0",
                "strict": False,
                "graphs": 30,
                "nodes": {"kernel": 12900},
                "nodes_unread": {},
                "outside": {},
                "graph_host_bytes": 41943040,
                "slots": {"weight": 1, "derived": 0, "static": 0, "scratch": 1, "engine": 0, "anonymous": 0},
                "nbytes": {"weight": 8192, "derived": 0, "static": 0, "scratch": 1024, "engine": 0, "anonymous": 0},
                "named": [
                    {
                        "name": "model.model.norm.weight",
                        "kind": "weight",
                        "nbytes": 8192,
                        "address": 139872043008000,
                        "paths": 1,
                        "kernel": "rms_norm_kernel",
                        "where": "",
                    }
                ],
                "anonymous": [],
                "left_out": 1,
                "possibly_derived": 0,
                "repaired": {"model.model.layers.0.mlp.experts.w13_scale": {"adopted": 12, "refreshed": 12}},
                "repaired_left_out": 0,
                "lost": [],
                "faults": [],
                "unproven": [],
                "truncated": [],
                "seals": 1,
                "checks": 12,
                "seconds": {"census": 0.05, "owners": 0.7, "seal": 0.1, "repair": 0.002, "check": 0.002},
            },
            "error": None,
        }
    ],
}

_PHASES = {"pause": 0.01, "apply": 0.42, "verify": 0.16, "resume": 0.02}
#: `GET /v1/updates/UPDATE_ID` of one that has committed.
UPDATE: dict[str, Any] = {
    "update_id": "3f2b8c1e9d6a4f0b8c7d5e6f7a8b9c0d",
    "version": 120,
    "state": "committed",
    "tensors": 399,
    "nbytes": 16381470720,
    "began_unix_seconds": 1764500000.0,
    "ended_unix_seconds": 1764500001.9,
    "seconds": {"admit": 0.03, "receive": 1.1, **_PHASES, "commit": 0.65},
    "verdicts": [
        {
            "engine": 0,
            "committed": True,
            "version": 120,
            "state": "serving",
            "pause_seconds": 0.61,
            "seconds": {"receive": 1.0, **_PHASES},
            "checks": {"addresses": 412, "adopted": 0},
            "error": None,
            "ranks": {"0": "verified"},
        }
    ],
    "error": None,
    "rewind": False,
}

#: One of `GET /v1/engines`.
ENGINE: dict[str, Any] = {
    "engine": 0,
    "state": "serving",
    "version": 120,
    "update_id": "3f2b8c1e9d6a4f0b8c7d5e6f7a8b9c0d",
    "url": "http://10.0.0.7:40001",
    "model": "policy",
    "workers": 1,
    "vllm_version": "0.33.0",
    "reason": "",
    "rewinds": 0,
    "retained": None,
    "pinned": "",
    "failed": None,
    "paused": False,
    "committed_unix_seconds": 1764500001.8,
    "slots": {"weight": 399, "derived": 13},
    "memory": {"staging": 0, "rollback": 0},
    "adapter": "",
}

#: `GET /v1/status`, and what orders answer.
STATUS: dict[str, Any] = {
    "fleet": "default",
    "committed_version": 120,
    "ready": 1,
    "engines": [ENGINE],
    "update": UPDATE,
    "protocol_version": PROTOCOL_VERSION,
    "rewinds": 0,
}

#: One of `GET /v1/targets`.
TARGET: dict[str, Any] = {
    "targets": ["10.0.0.7:40001"],
    "labels": {"__meta_weightsync_engine": "0", "__meta_weightsync_version": "120", "__meta_weightsync_ready": "true"},
}

#: Body of `POST /v1/updates`. `WeightSync` makes it; the bytes go by broadcast, not by HTTP.
REQUEST: dict[str, Any] = {
    "update_id": "7a1c3e5f9b8d4c2ea0f1b2c3d4e5f607",
    "trainer_id": "trainer-0",
    "version": 121,
    "manifest": {"tensors": [{"name": "model.norm.weight", "dtype": "bfloat16", "shape": [4096]}]},
    "bucket_bytes": 67108864,
    "plan_hash": "of the bucket plan",
    "timeout_seconds": 300.0,
    "transport": "gloo",
    "torch_version": "2.13.0",
    "protocol_version": PROTOCOL_VERSION,
}

#: What it is answered with.
ADMISSION: dict[str, Any] = {
    "update_id": "7a1c3e5f9b8d4c2ea0f1b2c3d4e5f607",
    "version": 121,
    "communicator": {
        "host": "10.0.0.2",
        "port": 29500,
        "generation": 1764499000123,
        "world_size": 2,
        "members": {"0": 1},
        "transport": "gloo",
        "local": {},
    },
    "engines": [0],
    "staged": True,
}

#: `POST /v1/check`.
CHECK: dict[str, Any] = {
    "committed_version": 120,
    "ok": True,
    "engines": [
        {
            "engine": 0,
            "version": 120,
            "ok": True,
            "workers": [
                {
                    "rank": 0,
                    "update_id": "3f2b8c1e9d6a4f0b8c7d5e6f7a8b9c0d",
                    "done": True,
                    "equal": 399,
                    "unchanged": 0,
                    "first_seen": 0,
                    "unreadable": 0,
                    "differs": [],
                    "faults": [],
                    "left_out": 0,
                    "slots": 412,
                    "nbytes": 16381470720,
                    "seconds": 0.05,
                    "error": None,
                }
            ],
            "error": None,
        }
    ],
}

#: Body of `POST /v1/observe`: sums over what engine 0 sampled from version 120.
TALLIES: dict[str, Any] = {
    "tallies": [{"engine": 0, "version": 120, "tokens": 4096, "difference": 21.3, "k1": -0.4, "k3": 0.35, "largest": 0.21}]
}

#: What it is answered with.
OBSERVATION: dict[str, Any] = {
    "engines": [{"engine": 0, "behind": "0", "tokens": 4096, "difference": 0.0052, "k1": -0.0001, "k3": 0.00009, "largest": 0.21}],
    "named": [],
    "unknown": [],
}
