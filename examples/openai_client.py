"""The engines behind OpenAI's own client: `pip install openai`.

    python examples/openai_client.py [CHECKPOINT URL TOKEN_FILE]

`/v1/engines` says where each engine serves vLLM's OpenAI-compatible API; the fleet's token is its key. An answer's header
`x-weightsync-version` is the version that the engine held when the request came.

Not covered: `/v1/chat/completions`, which needs a checkpoint with a tokenizer and a chat template; the call is the same.
"""

from openai import OpenAI
from serving import fleet
from transformers import AutoModelForCausalLM

from weightsync import WeightSync

with fleet() as (checkpoint, url, token), WeightSync(url, token) as sync:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    sync.sync_weights(model)
    for engine in sync.engines():
        client = OpenAI(base_url=f"{engine.url}/v1", api_key=token)
        name = client.models.list().data[0].id
        raw = client.completions.with_raw_response.create(
            model=name, prompt=[1, 8, 9, 10], max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
        )
        choice = raw.parse().choices[0]
        print(f"engine {engine.engine}: {name!r} version {raw.headers['x-weightsync-version']} says {choice.token_ids}")
