"""What a trainer asks the service for, of an offer.

Not covered: the asking (`sync`).
"""

from __future__ import annotations

import uuid
from typing import Any

import torch

from weightsync.client.source import Offer
from weightsync.errors import ConfigError
from weightsync.protocol import UpdateRequest
from weightsync.transport.local import Listener, place_of
from weightsync.transport.packing import BucketPlan, plan_buckets


def request_for(offered: Offer, seconds: float, listener: Listener | None, **about: Any) -> tuple[UpdateRequest, BucketPlan]:
    """A new update, and the plan of its buckets.

    Args:
        seconds: of the update.
        listener: where workers of this host reach this trainer, if they can.
        about: see `UpdateRequest`.

    Raises:
        ConfigError: an argument can't be.
    """
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if offered.transport == "nccl" else ""
    try:
        plan = plan_buckets(offered.manifest, offered.bucket_bytes)
        request = UpdateRequest(
            update_id=uuid.uuid4().hex,
            manifest=offered.manifest,
            bucket_bytes=plan.bucket_bytes,
            plan_hash=plan.hash,
            timeout_seconds=seconds,
            transport=offered.transport,
            torch_version=torch.__version__,
            nccl_version=nccl,
            **about,
            place=place_of(offered.device),
            socket=listener.name if listener else "",
            secret=listener.secret if listener else "",
        )
    except ValueError as exc:
        raise ConfigError(str(exc), hint="See WeightSync's arguments") from None
    return request, plan
