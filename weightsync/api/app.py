"""FastAPI routes. Health, metrics, the page and the description need no token and name nothing; the rest does, whatever its path.

Every answer that is not 2xx is `{"error": {code, message, hint, …}}`, the form of
`errors.WeightSyncError`; without the token it is the code alone. Bodies are JSON
and bounded; nothing is unpickled.

Not covered: TLS (a proxy's business).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

import weightsync
from weightsync import tracing
from weightsync.api import description, examples, page
from weightsync.api.discovery import targets
from weightsync.api.health import Readiness, readiness
from weightsync.codec import decode, encode
from weightsync.errors import AuthError, InternalError, Refused, WeightSyncError
from weightsync.fleet.gate import bound, has_token
from weightsync.fleet.inside import refuse
from weightsync.protocol import MAX_VERSION, Admission, EngineStatus, FleetCheck, FleetStatus, Observation, UpdateStatus

#: How long health may wait for the controller, seconds.
_HEALTH_TIMEOUT_SECONDS = 2.0
#: Where the routes lie that need the token.
_GUARDED = "/v1"
#: All that may be asked without it, under just these names: health, metrics, the status page (which holds nothing of the fleet; a
#: root path without its slash is sent on to it), and the description of the API.
_OPEN = frozenset({"", "/", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"})


class Controller(Protocol):
    """What the API asks of the fleet; `fleet.cluster.Cluster` is the real one."""

    async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
        """Call the controller's method; raises `WeightSyncError`."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)  # else `false` would be engine 0


class CommitBody(_Body):
    """Body of a commit."""

    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400, examples=[300.0])


class AbortBody(_Body):
    """Body of an abort."""

    reason: str = Field(default="asked for", max_length=300, examples=["the training step was skipped"])


class EnginesBody(_Body):
    """Body of what some engines shall do. All engines when none is named."""

    engines: list[int] = Field(default_factory=list, max_length=1024, examples=[[0]])
    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400, examples=[300.0])


class SleepBody(EnginesBody):
    """Body of a sleep. Level 1 keeps weights on the host, level 2 drops them."""

    level: int = Field(default=1, ge=1, le=2, examples=[1])


class ScaleBody(_Body):
    """Body of a scaling: how many engines there shall be."""

    engines: int = Field(ge=1, le=1024, examples=[3])
    drain: Literal["wait", "abort"] = Field(default="wait", examples=["wait"])
    timeout_seconds: float = Field(default=60.0, gt=0, le=86_400, examples=[60.0])


class UnpinBody(_Body):
    """Body of an unpinning."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$", examples=["eval"])


class PinBody(UnpinBody):
    """Body of a pin: a version that so many engines serve now."""

    version: int = Field(ge=0, le=MAX_VERSION, examples=[120])
    engines: int = Field(default=1, ge=1, le=1024, examples=[1])


def build(controller: Controller, token: Callable[[], str], min_ready: int, max_request_bytes: int, control_seconds: float) -> FastAPI:
    """The application.

    Args:
        controller: the fleet.
        token: returns the bearer token that is valid now.
        min_ready: for `/readyz`.
        max_request_bytes: largest body.
        control_seconds: deadline of calls that should be quick.
    """
    app = FastAPI(title="weightsync", version=weightsync.__version__, description="In-place weight sync for vLLM fleets")
    app.add_middleware(_Guard, token=token, limit=max_request_bytes)
    _handle_errors(app)
    app.include_router(page.router)
    app.include_router(_health_routes(controller, min_ready))
    guarded = APIRouter(prefix=_GUARDED, dependencies=[Security(description.BEARER)], responses=description.ERRORS)
    _fleet_routes(guarded, controller, control_seconds)
    _order_routes(guarded, controller, control_seconds)
    _update_routes(guarded, controller, control_seconds)
    _sample_routes(guarded, controller, control_seconds)
    app.include_router(guarded)
    return app


def _health_routes(controller: Controller, min_ready: int) -> APIRouter:
    router = APIRouter(responses=description.ERRORS)

    @router.get("/livez", summary="This process answers")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @router.get(
        "/readyz",
        summary="Enough engines serve the committed version",
        responses={200: {"model": Readiness}, 503: {"model": Readiness, "description": "not ready, with reason codes"}},
    )
    async def readyz() -> JSONResponse:
        try:
            status = decode(FleetStatus, await controller.ask("status", timeout_seconds=_HEALTH_TIMEOUT_SECONDS))
        except WeightSyncError as exc:
            return JSONResponse({"ready": False, "reasons": [f"controller_{exc.code}"], "engines": {}}, 503)
        verdict = readiness(status, min_ready)
        return JSONResponse(encode(verdict), 200 if verdict.ready else 503)

    @router.get("/metrics", summary="Prometheus text", response_class=PlainTextResponse, responses=description.ERRORS_AS_JSON)
    async def metrics() -> PlainTextResponse:
        text = await controller.ask("metrics", timeout_seconds=_HEALTH_TIMEOUT_SECONDS)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


#: Of routes that answer with the fleet's status.
_STATUS: dict[str, Any] = {"response_model": None, "responses": description.answer(FleetStatus, examples.STATUS)}


def _fleet_routes(router: APIRouter, controller: Controller, seconds: float) -> None:
    @router.get("/status", summary="The fleet in one look", **_STATUS)
    async def status() -> dict[str, Any]:
        return dict(await controller.ask("status", timeout_seconds=seconds))

    @router.get(
        "/engines",
        summary="Address, version and state of every engine",
        response_model=None,
        responses=description.answer(list[EngineStatus], [examples.ENGINE]),
    )
    async def engines() -> list[dict[str, Any]]:
        return list((await controller.ask("status", timeout_seconds=seconds))["engines"])

    @router.get(
        "/engines/{ordinal}/contract",
        summary="What an engine's workers sealed of the memory that captured graphs read, and what became of it",
        response_model=None,
        responses=description.answer(description.EngineContract, examples.CONTRACT),
    )
    async def contract(ordinal: Annotated[int, Path(ge=0, le=MAX_VERSION, examples=[0])]) -> dict[str, Any]:
        return dict(await controller.ask("contract", ordinal, timeout_seconds=2 * seconds))

    @router.post(
        "/check",
        summary="Have engines digest their live weights anew, while they serve, and compare them with what was sent",
        response_model=None,
        responses=description.answer(FleetCheck, examples.CHECK),
    )
    async def check(body: EnginesBody) -> dict[str, Any]:
        most = body.timeout_seconds + 2 * seconds
        return dict(await controller.ask("check", body.engines, body.timeout_seconds, timeout_seconds=most))

    @router.get(
        "/targets",
        summary="The same as a Prometheus HTTP service-discovery document",
        response_model=None,
        responses=description.answer(list[description.TargetGroup], [examples.TARGET]),
    )
    async def discovery() -> list[dict[str, Any]]:
        return targets(decode(FleetStatus, await controller.ask("status", timeout_seconds=seconds)))


def _order_routes(router: APIRouter, controller: Controller, seconds: float) -> None:
    @router.post("/sleep", summary="Have engines give their GPU's memory back; answers with the fleet's status", **_STATUS)
    async def sleep(body: SleepBody) -> dict[str, Any]:
        return await rest(body, body.level)

    @router.post("/wake", summary="Have engines take it again; answers with the fleet's status", **_STATUS)
    async def wake(body: EnginesBody) -> dict[str, Any]:
        return await rest(body, 0)

    @router.post(
        "/pause", summary="Have engines generate nothing until they are resumed; updates go on; answers with the fleet's status", **_STATUS
    )
    async def pause(body: EnginesBody) -> dict[str, Any]:
        return await halt("pause", body)

    @router.post("/resume", summary="Have paused engines go on; answers with the fleet's status", **_STATUS)
    async def resume(body: EnginesBody) -> dict[str, Any]:
        return await halt("resume", body)

    @router.post(
        "/scale", summary="Add engines, or take some away; answers with the fleet's status while those that come are starting", **_STATUS
    )
    async def scale(body: ScaleBody) -> dict[str, Any]:
        # Behind an update under way, the draining, and the end of processes.
        most = body.timeout_seconds + 4 * seconds
        return dict(await controller.ask("scale", body.engines, body.drain, body.timeout_seconds, timeout_seconds=most))

    @router.post("/pin", summary="Hold engines at a version that they serve, and leave them out of updates; the fleet's status", **_STATUS)
    async def pin(body: PinBody) -> dict[str, Any]:
        return dict(await controller.ask("pin", body.name, body.version, body.engines, timeout_seconds=4 * seconds))

    @router.post("/unpin", summary="Let the engines of a pin take updates again; answers with the fleet's status", **_STATUS)
    async def unpin(body: UnpinBody) -> dict[str, Any]:
        return dict(await controller.ask("unpin", body.name, timeout_seconds=4 * seconds))

    async def halt(order: str, body: EnginesBody) -> dict[str, Any]:
        most = body.timeout_seconds + seconds
        return dict(await controller.ask(order, body.engines, body.timeout_seconds, timeout_seconds=most))

    async def rest(body: EnginesBody, level: int) -> dict[str, Any]:
        most = body.timeout_seconds + seconds
        return dict(await controller.ask("rest", body.engines, level, body.timeout_seconds, timeout_seconds=most))


def _update_routes(router: APIRouter, controller: Controller, seconds: float) -> None:
    shown: dict[str, Any] = {"response_model": None, "responses": description.answer(UpdateStatus, examples.UPDATE)}
    listed = description.answer(list[UpdateStatus], [examples.UPDATE])
    admitted = description.answer(Admission, examples.ADMISSION, 201)
    about = description.body("An UpdateRequest (`weightsync.protocol`); `weightsync.WeightSync` makes it", examples.REQUEST)

    @router.get("/updates", summary="Updates, newest first", response_model=None, responses=listed)
    async def updates(limit: Annotated[int, Query(ge=1, le=10_000, examples=[12])] = 10_000) -> list[dict[str, Any]]:
        return list(await controller.ask("updates", limit, timeout_seconds=seconds))

    @router.get("/updates/{update_id}", summary="One update", **shown)
    async def update(update_id: str) -> dict[str, Any]:
        return dict(await controller.ask("update", update_id, timeout_seconds=seconds))

    @router.post("/updates", summary="Begin an update", status_code=201, response_model=None, responses=admitted, openapi_extra=about)
    async def begin(request: Request) -> dict[str, Any]:
        trace = tracing.valid(request.headers.get("traceparent", ""))
        return dict(await controller.ask("begin", await _json(request, "UpdateRequest"), trace, timeout_seconds=4 * seconds))

    @router.post("/updates/{update_id}/commit", summary="Wait until staged, apply everywhere, answer with the verdicts", **shown)
    async def commit(update_id: str, body: Annotated[CommitBody, Depends(_commit_body)]) -> dict[str, Any]:
        return dict(await controller.ask("commit", update_id, body.timeout_seconds, timeout_seconds=body.timeout_seconds + seconds))

    @router.post("/updates/{update_id}/abort", summary="End an update that has not been applied", **shown)
    async def abort(update_id: str, body: AbortBody | None = None) -> dict[str, Any]:
        return dict(await controller.ask("abort", update_id, (body or AbortBody()).reason, timeout_seconds=2 * seconds))


def _sample_routes(router: APIRouter, controller: Controller, seconds: float) -> None:
    observed = description.answer(Observation, examples.OBSERVATION)
    samples = description.body("Tallies (`weightsync.protocol`); `WeightSync.observe` makes them", examples.TALLIES)
    said = "What a trainer's samples say of the engines: sums; answers with means, and who stands out"

    @router.post("/observe", summary=said, response_model=None, responses=observed, openapi_extra=samples)
    async def observe(request: Request) -> dict[str, Any]:
        return dict(await controller.ask("observe", await _json(request, "Tallies"), timeout_seconds=seconds))


async def _json(request: Request, message: str) -> Any:
    """A body that is no pydantic model: the controller decodes it once, by the same code as every other message."""
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as exc:
        raise Refused(f"the body is not JSON: {exc}", hint=f"Send {message}") from None


def _commit_body(body: CommitBody | None = None) -> CommitBody:
    return body or CommitBody()


def _handle_errors(app: FastAPI) -> None:
    def answer(request: Request, error: WeightSyncError) -> JSONResponse:
        if _route(request.scope) in _OPEN:
            # Health and metrics need no token, so no text, which may name addresses or models.
            error = WeightSyncError.from_dict({"code": error.code, "message": error.code, "retryable": error.retryable})
        return JSONResponse({"error": error.to_dict()}, error.http_status, headers={"retry-after": "1"} if error.retryable else None)

    @app.exception_handler(WeightSyncError)
    async def ours(request: Request, exc: WeightSyncError) -> JSONResponse:
        return answer(request, exc)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, exc: RequestValidationError) -> JSONResponse:
        text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()[:5])
        return JSONResponse({"error": Refused(f"the request is not valid: {text}").to_dict()}, 422)

    @app.exception_handler(HTTPException)
    async def http(request: Request, exc: HTTPException) -> JSONResponse:
        headers = {"allow": ", ".join(_methods(app, request))} if exc.status_code == 405 else None
        return JSONResponse({"error": Refused(str(exc.detail)).to_dict()}, exc.status_code, headers=headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, exc: Exception) -> JSONResponse:
        return answer(request, InternalError(f"{type(exc).__name__}: {exc}"))


def _methods(app: FastAPI, request: Request) -> list[str]:
    """What may be asked of a path; starlette itself names the methods of the first route alone."""
    matching = (route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


def _route(scope: Any) -> str:
    """The path that routes are found by: behind a proxy, or mounted in another application, the root path is no part of it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path


class _Guard:
    """ASGI middleware, before anything is read: the token, and a limit to the body, announced or not."""

    def __init__(self, app: Any, token: Callable[[], str], limit: int) -> None:
        self._app, self._token, self._limit = app, token, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _route(scope) not in _OPEN and not has_token(scope, self._token().encode()):
            error: WeightSyncError = AuthError(
                "missing or wrong bearer token",
                hint="Send `Authorization: Bearer <token>`; `weightsync serve` prints where the token is kept",
            )
            await refuse(error, send)
        elif (bounded := await bound(scope, receive, self._limit)) is None:
            error = Refused(f"the request is larger than {self._limit} bytes", hint="Raise api.max_request_bytes if the manifest needs it")
            await refuse(error, send, 413)
        else:
            await self._app(scope, bounded, send)
