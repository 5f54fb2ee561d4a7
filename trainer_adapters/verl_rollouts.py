"""verl: rollouts come from the fleet, by an agent loop that its configuration names.

    # actor_rollout_ref.rollout.agent.agent_loop_config_path, a YAML file; and …agent.default_agent_loop=fleet
    - {name: fleet, _target_: trainer_adapters.verl_rollouts.FleetAgentLoop, url: URL, token_file: FILE}

It is verl's own loop of a single turn, whose server is the fleet. Log-probabilities are the engines' (`rollout.calculate_log_probs`), and
the versions that sampled an answer are among its extra fields, as `weight_versions`.

verl imports this module by its name, so it imports verl. Tested with verl 0.9.1 on a CPU: a real loop, with an answer made up in the
fleet's place. A whole run of verl needs GPUs and was not done. Not covered: images, tools.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.workers.rollout.replica import TokenOutput

from trainer_adapters.fleet import connect
from weightsync import WeightSync, WeightSyncError

_connections: dict[tuple[str, str], WeightSync] = {}  # verl makes a loop for every prompt


class FleetServer:
    """What an agent loop asks of its server, answered by the fleet.

    Args:
        max_tokens: of an answer, where the request does not say.
    """

    def __init__(self, sync: WeightSync, max_tokens: int) -> None:
        self._sync, self._max_tokens = sync, max_tokens

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: Any = None, **_: Any
    ) -> TokenOutput:
        """One completion; parameters are vLLM's.

        Raises:
            WeightSyncError: see `WeightSync.generate`; images.
        """
        if image_data:
            raise WeightSyncError("images are not covered by this adapter")
        wanted = {name: value for name, value in sampling_params.items() if name != "logprobs" and value is not None}
        made = await asyncio.to_thread(self._sync.generate, prompt_ids, max_tokens=self._max_tokens, extra=wanted)
        spans = [(span.version, span.start, span.end) for span in made.versions]
        return TokenOutput(
            token_ids=list(made.token_ids),
            log_probs=list(made.logprobs) if sampling_params.get("logprobs") else None,
            stop_reason="aborted" if made.finish_reason == "abort" else "completed",
            extra_fields={"weight_versions": spans},
        )


class FleetAgentLoop(SingleTurnAgentLoop):
    """verl's loop of a single turn, with the fleet for its server.

    Args:
        url: the service.
        token_file: holds its token.

    Raises:
        WeightSyncError: what to change: nothing answers there, the token is wrong, the fleet has no engine.
    """

    def __init__(self, *args: Any, url: str, token_file: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (url, token_file) not in _connections:
            _connections[url, token_file] = connect(url, Path(token_file).read_text().strip())
        self.server_manager = FleetServer(_connections[url, token_file], self.response_length)
