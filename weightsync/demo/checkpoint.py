"""The demo's checkpoint: a small Qwen3 of random weights, with a tokenizer, as vLLM loads it.

About 3 million parameters, bfloat16, one safetensors file, plus config, generation
config and a word-level tokenizer over `task.vocabulary()`. The same seed gives the
same bytes.

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
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from weightsync.demo import task

WEIGHTS_FILE = "model.safetensors"
#: Longest prompt and completion together, tokens.
MAX_LENGTH = 2048
#: Spread of the random weights. With the usual 0.02 a model this narrow answers every prompt alike.
INIT_STD = 0.05
#: Spread of the part that all words of a topic have in common.
TOPIC_STD = 0.05
CHAT_TEMPLATE = "<bos>{% for message in messages %} {{ message['content'] }}{% endfor %}"


def demo_config(*, tie_word_embeddings: bool = False) -> Qwen3Config:
    """The shape of the demo's model."""
    return Qwen3Config(
        vocab_size=task.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=INIT_STD,
        bos_token_id=task.BOS,
        eos_token_id=task.EOS,
        pad_token_id=task.PAD,
        dtype="bfloat16",
    )


def build_checkpoint(folder: Path, seed: int, *, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of random weights into `folder` (made if missing); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(demo_config(tie_word_embeddings=tie_word_embeddings))
        _relate_words(model)
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    GenerationConfig(bos_token_id=task.BOS, eos_token_id=task.EOS, pad_token_id=task.PAD).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    write_weights(folder, checkpoint_tensors(model))
    return folder


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights under the checkpoint's names, cast to bfloat16.

    A head tied to the embedding is the same tensor twice in a state dict and once in a
    checkpoint, so it is left out here.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


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
def _relate_words(model: Qwen3ForCausalLM) -> None:
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
