"""How routes are described (OpenAPI): who may ask, what errors and answers look like. Data only; nothing here decides anything.

The token itself is looked at before any route is found (`app._Guard`).
"""

from __future__ import annotations

from typing import Any

from fastapi.security import HTTPBearer
from pydantic import BaseModel

from weightsync.protocol import ContractAnswer

#: Told of every route below `/v1`.
BEARER = HTTPBearer(auto_error=False, description="The text in the file that `weightsync serve` names as `token_file`")


class Error(BaseModel):
    """What `errors.WeightSyncError.to_dict` gives."""

    code: str
    message: str
    hint: str
    update_id: str | None
    engine: int | None
    phase: str | None
    names: list[str]
    retryable: bool


class ErrorAnswer(BaseModel):
    """Every answer that is not 2xx."""

    error: Error


class EngineContract(BaseModel):
    """The storage contract of one engine, by worker."""

    engine: int
    workers: list[ContractAnswer]


class TargetGroup(BaseModel):
    """One engine, as Prometheus's HTTP service discovery takes it."""

    targets: list[str]
    labels: dict[str, str]


#: What any route may answer instead.
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorAnswer, "description": "What went wrong, what to do, and whether trying again can help"}
}
#: The same where the answer is text.
ERRORS_AS_JSON: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": ERRORS["default"]["description"],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
    }
}


def answer(model: Any, example: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """A route's answer, and an example of it.

    Args:
        model: dataclass or pydantic model, or a list of them.
        example: JSON-ready.
    """
    return {status: {"model": model, "content": {"application/json": {"example": example}}}}


def body(about: str, example: Any) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    schema = {"type": "object", "description": about}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}
