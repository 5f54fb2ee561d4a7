"""A fresh vLLM engine as the oracle: what would an engine that loads this checkpoint from disk say?

`python -m weightsync.demo.cold` imports vLLM at once and then reads jobs from its
standard input, so the import overlaps with whatever its parent does meanwhile.
One JSON object per line in, one per line out, in order, until the input ends:

    job     {"model": "/a/checkpoint", "prompts": [[1, 9, 8], …], "max_tokens": 8, "engine_args": {…}}
    result  {"ok": true, "tokens": [[…], …], "logprobs": [[…], …], "seconds": {"load": 2.1, "generate": 0.2}}
            {"ok": false, "error": "ValueError: …"}

Each job gets an engine of its own, in this process, torn down afterwards. Prompts
run greedily and one at a time, because the size of a batch may pick other kernels
and so other last bits; log-probabilities are nats as JSON numbers, which keep a
float exact. Standard output carries results alone; all else goes to standard error.

`ColdEngine` is the parent's handle on such a process; `cold_outputs` is one job
in this process, which must then host nothing else: vLLM's CPU worker patches torch.

Not covered: a checkpoint whose load kills the process; the handle raises then, and
the jobs behind it need a new one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from weightsync.check.environment import ENGINE_ENV

#: For the process that hosts the engine; set before vLLM is imported.
COLD_ENV = ENGINE_ENV["cpu"]

#: Used where a job's `engine_args` don't say otherwise.
DEFAULT_ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "worker_extension_cls": "weightsync.demo.cold_worker.ColdWorker",
}


def cold_outputs(
    model_path: Path | str, prompts: Sequence[Sequence[int]], max_tokens: int, engine_args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a new engine and continue each prompt greedily; a job's result without `ok`.

    Args:
        model_path: folder of the checkpoint.
        prompts: token ids.
        max_tokens: length of every completion; the end token does not end one.
        engine_args: vLLM's, over `DEFAULT_ENGINE_ARGS`.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    llm = LLM(model=str(model_path), **{**DEFAULT_ENGINE_ARGS, **(engine_args or {})})
    loaded = time.perf_counter()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        for prompt in prompts:
            output = llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)[0].outputs[0]
            ids = list(output.token_ids)
            assert output.logprobs is not None
            tokens.append(ids)
            logprobs.append([float(position[token].logprob) for position, token in zip(output.logprobs, ids, strict=True)])
        generated = time.perf_counter()
    finally:
        # In-process engines share one distributed group; the next LLM() needs the place free.
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm
        _forget_engine()
    return {"tokens": tokens, "logprobs": logprobs, "seconds": {"load": loaded - began, "generate": generated - loaded}}


def _forget_engine() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


class ColdEngine:
    """A cold-engine process, started at once; use as a context manager.

    Args:
        log: file that gets its standard error; the parent's own when None.
        python: the interpreter.
        env: variables over this process's own.
    """

    def __init__(self, log: Path | None = None, python: str = sys.executable, env: Mapping[str, str] = COLD_ENV) -> None:
        with contextlib.ExitStack() as stack:
            errors: IO[bytes] | None = stack.enter_context(log.open("wb")) if log else None
            self.process = subprocess.Popen(
                [python, "-m", "weightsync.demo.cold"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def outputs(
        self, model_path: Path | str, prompts: Sequence[Sequence[int]], max_tokens: int, engine_args: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """`cold_outputs` in the process: `submit`, then `result`."""
        self.submit(model_path, prompts, max_tokens, engine_args)
        return self.result()

    def submit(
        self, model_path: Path | str, prompts: Sequence[Sequence[int]], max_tokens: int, engine_args: Mapping[str, Any] | None = None
    ) -> None:
        """Hand in a job; its answer comes from `result`, jobs being answered in order."""
        assert self.process.stdin is not None
        job = {
            "model": str(model_path),
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "engine_args": dict(engine_args or {}),
        }
        with contextlib.suppress(BrokenPipeError):  # a dead process shows when its answer is asked for
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def result(self, timeout_seconds: float = 300.0) -> dict[str, Any]:
        """The answer to the oldest job that has none yet, as `cold_outputs` gives it.

        Raises:
            RuntimeError: the engine could not load or run the checkpoint, the process died, or time is up.
        """
        assert self.process.stdout is not None
        # One line per answer, and each is read whole: nothing can wait in the buffer behind select's back.
        if not select.select([self.process.stdout], [], [], timeout_seconds)[0]:
            raise RuntimeError(f"the cold engine gave no answer in {timeout_seconds:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the cold engine's process ended with code {self.process.wait()}")
        result: dict[str, Any] = json.loads(line)
        if not result.pop("ok"):
            raise RuntimeError(f"the cold engine failed: {result['error']}")
        return result

    def close(self) -> None:
        """End the process: its input ends, and it is killed if that does not suffice."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(timeout=2)  # while it loads a model it does not look at its input
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> ColdEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _answer(line: str) -> dict[str, Any]:
    try:
        job = json.loads(line)
        return {"ok": True, **cold_outputs(job["model"], job["prompts"], job["max_tokens"], job.get("engine_args"))}
    except Exception as error:  # one bad checkpoint must not end the oracle for the others
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve jobs until the input ends."""
    # vLLM and its libraries print on file descriptor 1: keep it for results, give them 2.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # noqa: F401

    for line in sys.stdin:
        if line.strip():
            print(json.dumps(_answer(line)), file=results, flush=True)
    results.flush()
    os._exit(0)  # vLLM's threads can hold up an ordinary exit


if __name__ == "__main__":
    main()
