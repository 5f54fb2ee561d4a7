"""The demo's checkpoints: a small Qwen3 of random weights, with a tokenizer, as vLLM loads it.

Dense or with experts in bfloat16, or dense in INT8 (`weightsync.demo.MODELS`). Three to four million
parameters in one safetensors file, plus config, generation config and a word-level tokenizer
over `task.vocabulary()`. The same seed gives the same bytes.

Not covered: trained weights, and checkpoints in several files. Other kinds of
model, for tests, are in `tests/checkpoints.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from weightsync.demo import formats, task

WEIGHTS_FILE = "model.safetensors"
#: Longest prompt and completion together, tokens.
MAX_LENGTH = 2048
#: Spread of the random weights. With the usual 0.02 a model this narrow answers every prompt alike.
INIT_STD = 0.05
#: Spread of the part that all words of a topic have in common.
TOPIC_STD = 0.05
CHAT_TEMPLATE = "<bos>{% for message in messages %} {{ message['content'] }}{% endfor %}"


def demo_config(model: str = "qwen3", *, tie_word_embeddings: bool = False) -> Qwen3Config | Qwen3MoeConfig:
    """The shape of a model in `weightsync.demo.MODELS`; INT8 is a matter of the weights' form alone."""
    shape = {
        "vocab_size": task.VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": tie_word_embeddings,
        "initializer_range": INIT_STD,
        "bos_token_id": task.BOS,
        "eos_token_id": task.EOS,
        "pad_token_id": task.PAD,
        "dtype": "bfloat16",
    }
    if model != "qwen3-moe":
        return Qwen3Config(**shape)
    return Qwen3MoeConfig(**shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)


def build_checkpoint(folder: Path, seed: int, model: str = "qwen3", *, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of random weights into `folder` (made if missing); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(demo_config(model, tie_word_embeddings=tie_word_embeddings), dtype=torch.float32)
        _relate_words(made)
    made.config.architectures = [type(made).__name__]
    made.config.dtype = "bfloat16"
    if model == "int8":
        made.config.quantization_config = formats.INT8_CONFIG
    made.config.save_pretrained(folder)
    GenerationConfig(bos_token_id=task.BOS, eos_token_id=task.EOS, pad_token_id=task.PAD).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    write_weights(folder, checkpoint_tensors(made, model))
    return folder


def checkpoint_tensors(made: PreTrainedModel, model: str = "qwen3") -> dict[str, torch.Tensor]:
    """A model's weights as the checkpoint of a kind in `weightsync.demo.MODELS` has them.

    A head tied to the embedding is the same tensor twice in a state dict and once in a
    checkpoint, so it is left out here.
    """
    state = made.state_dict()
    if getattr(made.config, "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    return formats.to_checkpoint(state, model)


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` as the folder's one safetensors file."""
    save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def save_like(source: Path, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint with `tensors` as weights and all other files of `source`; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy2(path, folder / path.name)
    write_weights(folder, tensors)
    return folder


@torch.no_grad()
def _relate_words(model: PreTrainedModel) -> None:
    """Give the words of one topic a common part, in the embedding and (unrelated to it) in the head.

    Trained models have such clusters. Without them a policy would have to learn 500 words one
    by one, which takes more rollouts than a demo has. What leads from a topic that was read to
    the same topic spoken is not given: that is what the demo's training finds.
    """
    topics = torch.tensor([-1 if (topic := task.topic_of(token)) is None else topic for token in range(task.VOCAB_SIZE)])
    words = topics >= 0
    tables = {id(layer.weight): layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    for weight in tables.values():
        common = torch.randn(len(task.TOPICS), weight.shape[1]) * TOPIC_STD
        weight[words] += common[topics[words]]


def _tokenizer() -> PreTrainedTokenizerFast:
    """Knows the words of `task.vocabulary()`, separated by blanks."""
    special = task.SPECIAL_WORDS
    words = {word: index for index, word in enumerate(task.vocabulary())}
    tokenizer = Tokenizer(WordLevel(words, unk_token=special[task.UNK]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[task.BOS],
        eos_token=special[task.EOS],
        unk_token=special[task.UNK],
        pad_token=special[task.PAD],
        model_max_length=MAX_LENGTH,
        chat_template=CHAT_TEMPLATE,
    )
