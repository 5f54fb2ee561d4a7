"""Examples of answers, for the description of the API. Data only; a test decodes each."""

from __future__ import annotations

from typing import Any

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
