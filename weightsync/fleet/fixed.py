"""Settings that live engines keep as they were started: a `serve` that finds a fleet goes on with it only if it asks for the same. Pure.

Not covered: `engine.count`, since a fleet may have been scaled, and settings that `serve` and the controller alone read, which may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import weightsync
from weightsync import config

#: As (section, keys); without keys the whole of it.
FIXED: dict[str, tuple[str, ...]] = {
    "engine": (),
    "ray": (),
    "api": ("host", "max_request_bytes"),
    "sync": ("caches", "stage", "rollback", "verify_stored", "local", "retain_folder", "in_flight", "new_requests"),
}


def fixed(settings: config.Settings) -> dict[str, Any]:
    """Their values by section and key, a hash of the token as `token`, and the `release` of weightsync whose code runs."""
    data = config.dump(settings)
    token = hashlib.sha256(str(data["api"]["token"]).encode()).hexdigest()
    del data["engine"]["count"]
    kept = {section: {key: data[section][key] for key in keys or data[section]} for section, keys in FIXED.items()}
    return {**kept, "token": token, "release": weightsync.__version__}


def differences(wanted: Mapping[str, Any], running: Mapping[str, Any], sections: Collection[str] = tuple(FIXED)) -> list[str]:
    """What a fleet was started with and is not asked for, in words.

    Args:
        wanted, running: from `fixed`; either may lack keys that the other one's release of weightsync has.
        sections: that are looked at, beside the token.
    """
    differ = [
        f"{section}.{key}: the running fleet has {running.get(section, {}).get(key)!r}, asked for {value!r}"
        for section in sections
        for key, value in wanted[section].items()
        if running.get(section, {}).get(key) != value
    ]
    if wanted["token"] != running.get("token"):
        differ.append("api.token: the running engines have another one")
    if wanted["release"] != (other := running.get("release")):
        differ.append(f"the running engines are of weightsync {other or '(unknown)'}, this is {wanted['release']}")
    return differ
