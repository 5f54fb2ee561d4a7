"""The command line: `serve | demo | status | push | abort | scale | pin | unpin | pause | resume | check | stop`.

Settings of `serve` are flags made from `config.Settings` (`--engine.model`,
`--api.port`, …). Heavy imports happen in the command that needs them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import weightsync
from weightsync import config
from weightsync.errors import ConfigError, InternalError, Refused, WeightSyncError
from weightsync.sections import ApiSettings

if typing.TYPE_CHECKING:
    from weightsync.client import WeightSync
    from weightsync.protocol import FleetStatus
    from weightsync.results import SyncReport


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 failed, 2 wrong use; of `status` 3 when not all engines serve."""
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if getattr(args, "verbose", False) else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return int(args.run(args))
    except ConfigError as exc:
        print(f"weightsync: {exc}", file=sys.stderr)
        return 2
    except WeightSyncError as exc:
        print(f"weightsync: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads has seen enough; what Python would flush at its end has nowhere to go either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weightsync", description="Weight sync from RL trainers to fleets of vLLM engines.")
    parser.add_argument("--version", action="version", version=f"weightsync {weightsync.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start (or adopt) a fleet and serve its API")
    serve.add_argument("--config", type=Path, help="TOML file with these keys")
    serve.add_argument("--verbose", action="store_true", help="log what happens")
    _add_settings(serve)
    serve.set_defaults(run=_serve)

    from weightsync.demo.run import add_arguments, run

    demo = commands.add_parser("demo", help="the whole loop on this machine, on CPUs or GPUs: GRPO on a toy task")
    add_arguments(demo)
    demo.set_defaults(run=run)

    _add_status(commands)

    _add_updates(commands)

    scale = commands.add_parser("scale", help="add engines to a fleet, or take some away, while training goes on")
    scale.add_argument("engines", type=int, help="how many there shall be")
    scale.add_argument("--drain", choices=("wait", "abort"), default="wait", help="requests of engines that go (default %(default)s)")
    scale.add_argument("--timeout", type=float, default=60.0, help="how long an engine may take to drain, seconds (default 60)")
    scale.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long until all serve the fleet's version")
    _add_client(scale)
    scale.set_defaults(run=_scale)

    _add_pins(commands)
    _add_halts(commands)

    about = "have the fleet's engines read their live weights again; with --model start one and find out whether it follows its weights"
    check = commands.add_parser("check", help=about, description=about)
    check.add_argument(
        "--engine", type=int, action="append", default=[], help="ordinal, without --model: check this one; all when not given"
    )
    check.add_argument("--model", type=Path, help="folder of the checkpoint")
    second = check.add_mutually_exclusive_group()
    second.add_argument("--other", type=Path, help="folder of other weights of the same model; without it values stay unproven")
    second.add_argument("--identity", action="store_true", help="only send the engine its own weights: they must change nothing")
    check.add_argument("--strict", action="store_true", help="take a repair of captured storage for a failure")
    check.add_argument("--engine-args", default="{}", metavar="JSON", help="further arguments of vLLM, as a JSON object")
    check.add_argument("--timeout", type=float, default=1800.0, help="deadline of each engine, seconds (default 1800)")
    check.add_argument("--json", action="store_true", help="the report as JSON")
    _add_client(check)
    check.set_defaults(run=_check)

    stop = commands.add_parser("stop", help="end a fleet that an earlier `serve` left behind")
    stop.add_argument("--fleet", default="default")
    stop.add_argument("--state_dir", type=Path, default=config.default_state_dir())
    stop.set_defaults(run=_stop)
    return parser


def _add_status(commands: Any) -> None:
    codes = "exit code: 0 all engines that no pin holds serve the fleet's version; 1 the service can't be asked; 2 wrong use; 3 not all do"
    status = commands.add_parser("status", help="what each engine serves", epilog=codes)
    _add_client(status)
    status.add_argument("--json", action="store_true", help="the status as JSON")
    about = (
        "show it again and again, every SECONDS (default 2), until Ctrl-C; in a pipe, and with --json by the line, whenever it has changed"
    )
    status.add_argument("--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help=about)
    status.set_defaults(run=_status)


def _add_updates(commands: Any) -> None:
    push = commands.add_parser("push", help="sync a checkpoint folder's weights to the fleet")
    push.add_argument("checkpoint", type=Path, help="folder with safetensors files")
    push.add_argument("--update-version", type=int, help="version to give it; one above the fleet's when not given")
    whole = "all that the engine joins in a module, or none"
    push.add_argument("--scope", action="append", metavar="PATTERN", help=f"send only these, such as 'model.layers.0.*': {whole}")
    push.add_argument("--base-version", type=int, help="version that a scope builds on; the fleet's when not given")
    push.add_argument("--rewind", action="store_true", help="the version may be the fleet's or below it")
    push.add_argument("--allow-nonfinite", action="store_true", help="send NaN and infinity too")
    push.add_argument("--timeout", type=float, default=600.0, help="deadline, seconds (default 600)")
    push.add_argument("--json", action="store_true", help="the report as JSON, every engine's verdict in it")
    _add_client(push)
    push.set_defaults(run=_push)

    abort = commands.add_parser("abort", help="end an update that has not been applied; engines serve the version they had")
    abort.add_argument("update_id", help="as an error or `weightsync status` names it")
    abort.add_argument("--reason", default="asked for on the command line", help="for its trainer and the log (default: %(default)s)")
    _add_client(abort)
    abort.set_defaults(run=_abort)


def _add_pins(commands: Any) -> None:
    pin = commands.add_parser("pin", help="hold engines at a version that they serve, and leave them out of updates")
    pin.add_argument("name", help="1 to 64 letters, digits, '.', '_' or '-'")
    pin.add_argument("version", type=int, help="version that they serve now")
    pin.add_argument("--engines", type=int, default=1, help="how many (default 1)")
    _add_client(pin)
    pin.set_defaults(run=_pin)

    unpin = commands.add_parser("unpin", help="let the engines of a pin take updates again")
    unpin.add_argument("name", help="of the pin")
    _add_client(unpin)
    unpin.set_defaults(run=_unpin)


def _add_halts(commands: Any) -> None:
    for order, about in (
        ("pause", "have engines generate nothing until they are resumed, while updates go on"),
        ("resume", "have paused engines go on"),
    ):
        parser = commands.add_parser(order, help=about)
        parser.add_argument("engines", type=int, nargs="*", metavar="ENGINE", help="ordinals; all engines when none is given")
        parser.add_argument("--timeout", type=float, default=300.0, help="how long an engine may take, seconds (default 300)")
        _add_client(parser)
        parser.set_defaults(run=_halt, order=order)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for name, field in config.Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            group = parser.add_argument_group(name, section.__doc__)
            for key, inner in section.model_fields.items():
                group.add_argument(f"--{name}.{key}", default=argparse.SUPPRESS, metavar="VALUE", help=_help(inner))
        else:
            parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar="VALUE", help=_help(field))


def _help(field: Any) -> str:
    default = "" if field.is_required() or field.default_factory or field.default is None else f" (default {field.default})"
    return f"{field.description or ''}{default}".replace("%", "%%")


def _add_client(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=f"http://127.0.0.1:{ApiSettings().port}", help="the service (default %(default)s)")
    about = f"default $WEIGHTSYNC_API__TOKEN where that is set, else {_token_file()}".replace("%", "%%")
    parser.add_argument("--token-file", type=Path, help=about)


def _token_file() -> Path:
    return config.default_state_dir() / "default" / "token"


def _serve(args: argparse.Namespace) -> int:
    from weightsync.api.server import serve

    flags = {key: config.parse_value(key, value) for key, value in vars(args).items() if key not in ("run", "config", "verbose")}
    return asyncio.run(serve(config.load(flags, args.config)))


def _client(args: argparse.Namespace) -> WeightSync:
    from weightsync.client import WeightSync

    token = None if args.token_file else config.token_of_environment()
    file = args.token_file or _token_file()
    try:
        token = token or file.read_text().strip()
    except OSError as exc:
        raise ConfigError(f"--token-file: {file}: {exc.strerror}", hint="`weightsync serve` prints where it keeps the token") from None
    return WeightSync(args.url, token)


def _status(args: argparse.Namespace) -> int:
    """Exit code 3 when the fleet answers and not all serve; with `--watch` by what was seen last."""
    from weightsync.watching import Watching

    if args.watch is not None and not 0 < args.watch <= 86_400:
        raise ConfigError(f"--watch: got {args.watch:g}, want seconds, above 0 and at most a day")
    with _client(args) as client:
        watching = Watching(client.status, as_json=args.json)
        return watching.once() if args.watch is None else watching.until_ended(args.watch)


def _scale(args: argparse.Namespace) -> int:
    """Exit code 1 when `--wait` is over and not all serve."""
    from weightsync.shown import show_status

    with _client(args) as client:
        status = client.scale(args.engines, args.drain, args.timeout)
        until = time.monotonic() + args.wait
        while _late(status) and time.monotonic() < until:
            time.sleep(0.5)
            status = client.status()
    show_status(status)
    return int(bool(args.wait) and _late(status))


def _late(status: FleetStatus) -> bool:
    return status.ready < sum(not e.pinned for e in status.engines)


def _push(args: argparse.Namespace) -> int:
    """Engines that did not commit are named on standard error, where `sync.require` let the update succeed without them."""
    from safetensors.torch import load_file

    from weightsync.shown import Sending

    files = sorted(args.checkpoint.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"checkpoint: got {args.checkpoint}, want a folder with safetensors files")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    with _client(args) as client, Sending() as progress:
        report = client.sync_weights(
            tensors,
            args.update_version,
            timeout_seconds=args.timeout,
            progress=progress,
            allow_nonfinite=args.allow_nonfinite,
            rewind=args.rewind,
            scope=args.scope,
            base_version=args.base_version,
        )
    _tell(report, args.json)
    return 0


def _tell(report: SyncReport, as_json: bool) -> None:
    import json

    from weightsync.codec import encode

    for lost in () if as_json else report.sent_again:
        print(f"engine {lost.engine} was lost after {lost.seconds:.2f} s ({lost.error['code']}): sent again to the others")
    for verdict in report.verdicts:
        if not verdict.committed:
            error = WeightSyncError.from_dict(verdict.error or InternalError("it gave no reason").to_dict())
            print(f"engine {verdict.engine} did not commit and is {verdict.state}: {error.code}: {error}", file=sys.stderr)
    size, took = f"{report.tensors} tensors, {report.nbytes} bytes", report.seconds["total"]
    said = f"version {report.version}: {size} in {took:.2f} s, engines paused {report.pause_seconds * 1000:.0f} ms"
    print(json.dumps(encode(report)) if as_json else said)


def _abort(args: argparse.Namespace) -> int:
    from weightsync.protocol import UpdateState

    with _client(args) as client:
        update = client.abort(args.update_id, args.reason)
    if update.state != UpdateState.ABORTED:
        raise Refused(f"update {update.update_id} to version {update.version} has ended ({update.state}): there is nothing to abort")
    print(f"update {update.update_id} to version {update.version} is aborted: {(update.error or {}).get('message', 'no reason is known')}")
    return 0


def _pin(args: argparse.Namespace) -> int:
    with _client(args) as client:
        status = client.pin(args.name, args.version, args.engines)
    held = ", ".join(str(e.engine) for e in status.engines if e.pinned == args.name)
    print(f"pinned as {args.name}: version {args.version} on engine {held}")
    return 0


def _unpin(args: argparse.Namespace) -> int:
    with _client(args) as client:
        held = [str(e.engine) for e in client.engines() if e.pinned == args.name]
        status = client.unpin(args.name)
    others = ", ".join(sorted({e.pinned for e in status.engines if e.pinned})) or "none"
    print(f"unpinned: engine {', '.join(held)}" if held else f"no engine was pinned as {args.name}; pins: {others}")
    return 0


def _halt(args: argparse.Namespace) -> int:
    with _client(args) as client:
        status = (client.pause if args.order == "pause" else client.resume)(args.engines, args.timeout)
    paused = ", ".join(str(e.engine) for e in status.engines if e.paused)
    print(f"paused: engine {paused}" if paused else "no engine is paused")
    return 0


def _check_fleet(args: argparse.Namespace) -> int:
    """Exit code 1 when something stands against an engine, or one could not be checked."""
    import json

    from weightsync.codec import encode
    from weightsync.shown import show_check

    if args.other or args.identity or args.strict or args.engine_args != "{}":
        raise ConfigError("--other, --identity, --strict and --engine-args go with --model")
    with _client(args) as client:
        found = client.check(args.engine, args.timeout)
    if args.json:
        print(json.dumps(encode(found)))
    else:
        show_check(found)
    return int(not found.ok)


def _check(args: argparse.Namespace) -> int:
    if args.model is None:
        return _check_fleet(args)
    if args.engine:
        raise ConfigError("--engine goes without --model: it is one of the fleet's engines")
    import json

    from rich.console import Console

    from weightsync.check.run import check, require_ok
    from weightsync.check.show import show

    try:
        engine_args = json.loads(args.engine_args)
    except ValueError:
        engine_args = None
    if not isinstance(engine_args, dict):
        raise ConfigError(f"--engine-args: got {args.engine_args!r}, want a JSON object")
    report = check(
        args.model,
        args.other,
        strict=args.strict,
        identity=args.identity,
        engine_args=engine_args,
        timeout_seconds=args.timeout,
        say=lambda text: print(f"weightsync: starting {text}", file=sys.stderr, flush=True),
    )
    if args.json:
        print(json.dumps(report))
    else:
        show(report, Console())
    require_ok(report)
    return 0


def _stop(args: argparse.Namespace) -> int:
    from weightsync.fleet.cluster import stop_left_fleet

    found = asyncio.run(stop_left_fleet(args.state_dir / args.fleet))
    print("stopped" if found else "no fleet was left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
