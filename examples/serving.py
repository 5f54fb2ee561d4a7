"""What the examples run against: the fleet that the command line names, or one of their own.

    python examples/X.py                              # makes a small model and serves it: one engine, no GPU needed
    python examples/X.py CHECKPOINT URL TOKEN_FILE    # a fleet that runs, and the checkpoint that its engines were started from

Words of the task that they learn (`weightsync/demo/task.py`) are token ids below 512: a CHECKPOINT needs a vocabulary of that size.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from weightsync.demo.checkpoint import build_checkpoint


@contextlib.contextmanager
def fleet(*, float32: bool = False, adapters: bool = False) -> Iterator[tuple[str, str, str]]:
    """Checkpoint, URL and token. A fleet of its own is in bfloat16, or in float32; its engines may take LoRA adapters."""
    if len(sys.argv) == 4:
        checkpoint, url, token_file = sys.argv[1:]
        yield checkpoint, url, Path(token_file).read_text().strip()
        return
    with tempfile.TemporaryDirectory() as home:
        checkpoint = str(build_checkpoint(Path(home, "checkpoint"), seed=0))
        flags = [f"--engine.model={checkpoint}", f"--state_dir={home}/state", "--api.port=0"]
        if float32:
            _widen(Path(checkpoint))
            flags.append("--engine.dtype=float32")
        if adapters:
            flags.append('--engine.extra={"enable_lora": true, "max_lora_rank": 16}')
        command = [sys.executable, "-m", "weightsync.cli", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as serve:
            try:
                ready = next((line for line in serve.stdout or () if line.startswith("weightsync ready ")), None)
                if ready is None:
                    sys.exit("the fleet did not start")
                words = dict(word.split("=", 1) for word in ready.split()[2:])
                yield checkpoint, words["url"], Path(words["token_file"]).read_text().strip()
            finally:
                serve.send_signal(signal.SIGINT)


def _widen(folder: Path) -> None:
    """Have a checkpoint in float32."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: tensor.float() for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
