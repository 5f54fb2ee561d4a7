"""The demo's parts that need no engine: task, GRPO, checkpoint, result, processes."""

from __future__ import annotations

import io
import json
import math
import os
import queue
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tests.checkpoints import KINDS, build
from weightsync.client.quantize import from_int8_channel, int8_channel
from weightsync.demo import MODELS, formats, grpo, processes, summary, task
from weightsync.demo.checkpoint import WEIGHTS_FILE, build_checkpoint, checkpoint_tensors, save_like
from weightsync.demo.place import divide
from weightsync.demo.view import View, draw

# --- task ----------------------------------------------------------------------------------------


def test_vocabulary_and_topics_agree() -> None:
    words = task.vocabulary()
    assert len(words) == len(set(words)) == task.VOCAB_SIZE
    for token, word in enumerate(words):
        topic = task.topic_of(token)
        assert (word in task.SPECIAL_WORDS) if topic is None else word.startswith(task.TOPICS[topic])
    assert task.topic_of(task.VOCAB_SIZE) is None


def test_prompts_ask_for_each_topic_equally_often() -> None:
    prompts = task.make_prompts(8, random.Random(0))
    assert all(len(prompt) == 1 + task.PROMPT_WORDS and prompt[0] == task.BOS for prompt in prompts)
    topics = [{task.topic_of(token) for token in prompt[1:]} for prompt in prompts]
    assert topics == [{0}, {1}, {2}, {3}] * 2


def test_reward_is_the_share_of_what_could_have_been_said() -> None:
    prompt = task.make_prompts(1, random.Random(0))[0]
    same, other = prompt[-1], 8 + task.WORDS_PER_TOPIC
    assert task.reward(prompt, [same] * 4, 4) == 1.0
    assert task.reward(prompt, [same, other, other, task.EOS], 4) == 0.25
    assert task.reward(prompt, [same, task.EOS], 8) == 0.125  # stopping early earns nothing
    with pytest.raises(ValueError, match="no topic"):
        task.reward([task.BOS], [same], 4)


# --- GRPO ----------------------------------------------------------------------------------------


def test_advantages_are_relative_to_the_group() -> None:
    advantages = grpo.group_advantages(torch.tensor([[0.0, 1.0], [5.0, 7.0], [3.0, 3.0]]))
    assert torch.allclose(advantages, torch.tensor([[-1.0, 1.0], [-1.0, 1.0], [0.0, 0.0]]), atol=1e-3)


def test_loss_at_ratio_one_is_minus_the_mean_advantage() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss = grpo.clipped_loss(logprobs, logprobs.clone(), torch.tensor([2.0, -1.0]), mask)
    assert float(loss) == pytest.approx(-(2 + 2 - 1) / 3)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "has_gradient"),
    [(1.0, 0.0, True), (1.0, 0.5, False), (1.0, -0.5, True), (-1.0, 0.5, True), (-1.0, -0.5, False)],
)
def test_clipping_stops_the_gradient_only_where_the_ratio_went_the_wanted_way(
    advantage: float, log_ratio: float, has_gradient: bool
) -> None:
    old = torch.tensor([[-2.0]])
    new = (old + log_ratio).requires_grad_()
    grpo.clipped_loss(new, old, torch.tensor([advantage]), torch.ones(1, 1)).backward()
    assert new.grad is not None
    assert bool(new.grad.abs().sum() > 0) == has_gradient


def test_token_logprobs_speak_of_the_next_token() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = 10.0
    result = grpo.token_logprobs(logits, torch.tensor([[1, 2, 3]]))
    assert result.shape == (1, 2)
    assert result[0, 0] > -0.01
    assert float(result[0, 1]) == pytest.approx(-math.log(4))


def sample(prompt: list[int], completion: list[int], reward: float = 0.0) -> grpo.Sample:
    return grpo.Sample(tuple(prompt), tuple(completion), tuple(-float(token) for token in completion), reward)


def test_collate_puts_engine_logprobs_where_the_model_predicts_them() -> None:
    batch = grpo.collate([sample([7, 8], [3, 4, 5], 1.0), sample([7, 8], [6], 0.0)], group_size=2, pad=0)
    assert batch.input_ids.tolist() == [[7, 8, 3, 4, 5], [7, 8, 6, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert batch.engine_logprobs.tolist() == [[0, -3, -4, -5], [0, -6, 0, 0]]
    assert batch.advantages.tolist() == pytest.approx([1.0, -1.0], abs=1e-3)


@pytest.fixture(scope="module")
def start_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint", seed=3)


def own_samples(model: Qwen3ForCausalLM, prompts: list[list[int]], max_tokens: int) -> list[grpo.Sample]:
    """Rollouts by the model itself, with its own log-probabilities and the task's reward."""
    ids, logprobs = torch.tensor(prompts), []
    with torch.no_grad():
        for _ in range(max_tokens):
            step = torch.log_softmax(model(input_ids=ids).logits[:, -1].float(), dim=-1)
            token = torch.multinomial(step.exp(), 1)
            logprobs.append(step.gather(1, token))
            ids = torch.cat([ids, token], dim=1)
    said = ids[:, len(prompts[0]) :].tolist()
    rows = torch.cat(logprobs, dim=1).tolist()
    return [
        grpo.Sample(tuple(p), tuple(c), tuple(row), task.reward(p, c, max_tokens)) for p, c, row in zip(prompts, said, rows, strict=True)
    ]


def test_gap_is_nothing_for_own_samples_and_shows_a_wrong_weight(start_folder: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(start_folder, dtype=torch.float32)
    learner = grpo.Learner(model, lr=1e-4)
    prompts = [prompt for prompt in task.make_prompts(2, random.Random(0)) for _ in range(2)]
    batch = grpo.collate(own_samples(model, prompts, 4), group_size=2, pad=task.PAD)
    sent = formats.from_checkpoint(checkpoint_tensors(model), "qwen3")
    assert learner.logprob_gap(batch, sent) < 1e-3
    name = "model.layers.0.mlp.down_proj.weight"
    assert learner.logprob_gap(batch, sent | {name: sent[name] * 2}) > 0.05
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    assert learner.logprob_gap(batch, sent) < 1e-3  # a later step of the trainer's does not count


def test_grpo_learns_the_task(start_folder: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(start_folder, dtype=torch.float32)
    learner, rng, rewards = grpo.Learner(model, lr=1.5e-4), random.Random(0), []
    for _ in range(summary.STEPS_TO_LEARN):
        prompts = [prompt for prompt in task.make_prompts(8, rng) for _ in range(8)]
        samples = own_samples(model, prompts, 8)
        rewards.append(sum(s.reward for s in samples) / len(samples))
        learner.step(grpo.collate(samples, group_size=8, pad=task.PAD))
    assert summary.gain(rewards) >= summary.MIN_GAIN


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_is_a_function_of_the_seed(start_folder: Path, tmp_path: Path) -> None:
    again = build_checkpoint(tmp_path / "again", seed=3)
    other = build_checkpoint(tmp_path / "other", seed=4)
    assert (again / WEIGHTS_FILE).read_bytes() == (start_folder / WEIGHTS_FILE).read_bytes()
    assert (other / WEIGHTS_FILE).read_bytes() != (start_folder / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_trainer_offers_just_what_the_checkpoint_holds(tied: bool, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "start", seed=1, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    offered, held = checkpoint_tensors(model), load_file(folder / WEIGHTS_FILE)
    assert offered.keys() == held.keys()
    assert ("lm_head.weight" in held) != tied
    assert all(torch.equal(offered[name], held[name]) and offered[name].dtype == torch.bfloat16 for name in held)
    saved = save_like(folder, tmp_path / "saved", offered)
    assert {path.name for path in saved.iterdir()} == {path.name for path in folder.iterdir()}
    assert load_file(saved / WEIGHTS_FILE).keys() == held.keys()


@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_sent_as_its_checkpoint_is_and_comes_back(model: str, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "start", seed=1, model=model)
    master = folder if model != "int8" else build_checkpoint(tmp_path / "trainer", seed=1)
    trained = AutoModelForCausalLM.from_pretrained(master, dtype=torch.float32)
    held, sent = load_file(folder / WEIGHTS_FILE), checkpoint_tensors(trained, model)
    assert {name: (t.shape, t.dtype) for name, t in sent.items()} == {name: (t.shape, t.dtype) for name, t in held.items()}
    state, back = trained.state_dict(), formats.from_checkpoint(sent, model)
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        if model == "int8" and name.endswith("_proj.weight"):
            assert bool(((tensor - state[name]).abs() <= sent[f"{name}_scale"] * 0.5001).all())
        else:
            assert torch.equal(tensor, state[name])


def test_int8_takes_each_row_to_the_full_range_as_other_checkpoints_do(tmp_path: Path) -> None:
    weight = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [-1e-3, 5e-4, 0.0]], dtype=torch.bfloat16)
    quantised, scale = int8_channel(weight)
    assert (quantised.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (3, 1))
    assert quantised.tolist() == [[0, 0, 0], [64, -127, 32], [-127, 64, 0]]
    assert torch.equal(from_int8_channel(quantised, scale)[0], torch.zeros(3))
    dense, known = (load_file(build(kind, tmp_path / kind, 1) / "model.safetensors") for kind in ("qwen3", "int8-channel"))
    name = "model.layers.1.mlp.gate_proj.weight"
    quantised, scale = int8_channel(dense[name])
    assert torch.equal(quantised, known[name]) and torch.equal(scale, known[f"{name}_scale"])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_does_not_look_like_a_sound_one_in_int8(broken: float) -> None:
    back = from_int8_channel(*int8_channel(torch.tensor([[1.0, broken, 2.0], [1.0, 2.0, 3.0]])))
    assert not back[0].isfinite().any() and back[1].isfinite().all()


def test_tokenizer_speaks_the_task(start_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start_folder)
    prompt = task.make_prompts(1, random.Random(0))[0]
    assert tokenizer(tokenizer.decode(prompt))["input_ids"] == prompt
    assert tokenizer.eos_token_id == task.EOS


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_checkpoints_are_functions_of_the_seed(kind: str, tmp_path: Path) -> None:
    first, again, other = (build(kind, tmp_path / name, seed) / "model.safetensors" for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert first.stat().st_size < 4e6


# --- result and view -----------------------------------------------------------------------------


def line(step: int, reward: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "reward": reward,
        "logprob_gap": None if reward is None else 0.01 * step,
        "version": step + 1,
        "bytes": 5_000_000,
        "seconds": {"sync": 0.05} | ({} if reward is None else {"rollout": 0.5, "train": 0.4}),
        "sync_seconds": {"receive": 0.02, "apply": 0.03, "total": 0.05},
        "pause_seconds": 0.031,
        "stored_tensors": 0,
    }


LINES = [line(0, None), *(line(step, 0.2 + 0.05 * step) for step in range(1, 11))]
COLD = {"tokens": [[1, 2], [3, 4]], "logprobs": [[-0.5, -0.25], [-1.0, -2.0]]}
FLEET = {"version": 11, "max_tokens": 2, "prompts": [[1], [2]], "engines": [{"engine": n, "version": 11, **COLD} for n in range(2)]}


def test_summary_of_a_good_run() -> None:
    result = summary.summarise(LINES, FLEET, [COLD], steps=10)
    assert result["ok"] and result["cold_equal"]
    assert (result["engines"], result["steps"], len(result["reward"]), len(result["updates"])) == (2, 10, 10, 11)
    assert result["gain"] == pytest.approx(0.25)
    assert result["max_logprob_gap"] == pytest.approx(0.1)
    seconds = LINES[0]["sync_seconds"]
    assert result["updates"][0] == {"version": 1, "bytes": 5_000_000, "seconds": seconds, "pause_seconds": 0.031, "stored_tensors": 0}
    json.dumps(result)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [[1, 2], [3, 5]]}, "engine 1, prompt 1: other tokens"),
        ({"logprobs": [[-0.5, -0.25 - 2**-24], [-1.0, -2.0]]}, "engine 1, prompt 0: log-probabilities differ by up to 5.96e-08"),
        ({"version": 10}, "engine 1 holds version 10, not 11"),
    ],
)
def test_one_engine_that_differs_in_one_bit_fails_the_run(change: dict[str, Any], said: str) -> None:
    fleet = FLEET | {"engines": [FLEET["engines"][0], FLEET["engines"][1] | change]}  # type: ignore[index]
    result = summary.summarise(LINES, fleet, [COLD], steps=10)
    assert not result["ok"] and not result["cold_equal"]
    assert result["differences"] == [said]


def _off(by: float) -> dict[str, Any]:
    return COLD | {"logprobs": [[-0.5, -0.25 + by], [-1.0, -2.0]]}


@pytest.mark.parametrize(("colds", "by", "equal"), [((0.0, 0.01), 0.02, True), ((0.0, 0.01), 0.03, False), ((0.0, 0.0), 1e-9, False)])
def test_engines_may_differ_from_cold_ones_as_far_as_these_do_among_themselves(colds: tuple[float, ...], by: float, equal: bool) -> None:
    fleet = FLEET | {"engines": [{"engine": 0, "version": 11, **_off(by)}]}
    cold = [_off(distance) for distance in colds]
    assert summary.spread(cold) == pytest.approx(max(colds))
    assert summary.summarise(LINES, fleet, cold, steps=10)["cold_equal"] == equal
    other = fleet | {"engines": [{"engine": 0, "version": 11, **COLD, "tokens": [[1, 9], [3, 4]]}]}
    assert summary.differences(other, cold) == ["engine 0, prompt 0: other tokens"]


def test_what_cold_engines_say_behind_their_first_difference_is_no_spread() -> None:
    other = {"tokens": [[7, 2], [3, 4]], "logprobs": [[-9.0, -8.0], [-1.0, -2.0]]}
    assert summary.spread([COLD, other]) == 0


def test_gpus_are_divided_between_engines_and_trainer() -> None:
    assert divide(2, 0).device == "cpu" and divide(2, 0).flags["engine.device"] == "cpu" and divide(2, 0).cold_args["enforce_eager"]
    shared = [(divide(engines, gpus).gpus, divide(engines, gpus).trainer) for engines, gpus in ((2, 1), (3, 2), (3, 1), (2, 2), (2, 8))]
    assert shared == [(0.5, "cuda:0"), (0.5, "cuda:0"), (0.33, "cuda:0"), (1.0, "cuda:0"), (1.0, "cuda:7")]
    place = divide(1, 1)
    assert not place.cold_args["enforce_eager"] and place.flags["sync.verify_stored"] == "true"
    assert json.loads(place.flags["engine.extra"]).items() <= place.cold_args.items(), "both kinds of engine are started alike"


def test_a_run_that_did_not_learn_fails_from_ten_steps_on() -> None:
    flat = [line(0, None), *(line(step, 0.25) for step in range(1, 11))]
    assert not summary.summarise(flat, FLEET, [COLD], steps=10)["ok"]
    assert summary.summarise(flat[:4], FLEET, [COLD], steps=3)["ok"]
    assert not summary.summarise(flat[:3], FLEET, [COLD], steps=3)["ok"]  # a step is missing
    assert not summary.summarise(flat[:4], FLEET | {"engines": []}, [COLD], steps=3)["ok"]


@pytest.mark.parametrize("plain", [True, False])
def test_view_shows_every_line(plain: bool) -> None:
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=not plain, width=200), plain=plain)
    with view.table():
        for each in LINES:
            view.add(each)
    assert "receive 20 apply 30" in out.getvalue()
    assert "0.700" in out.getvalue()


def test_picture_is_drawn(tmp_path: Path) -> None:
    draw(LINES, tmp_path / "demo.png")
    draw(LINES[:1], tmp_path / "short.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


# --- processes -----------------------------------------------------------------------------------


def start(code: str, folder: Path, **options: Any) -> tuple[processes.Child, queue.SimpleQueue[tuple[str, str | None]]]:
    events: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
    return processes.Child("it", [sys.executable, "-c", code], logs=folder, events=events, **options), events


def test_child_gives_lines_and_keeps_a_log(tmp_path: Path) -> None:
    code = "import sys; print('one', flush=True); sys.stderr.write('bad\\n'); print('two', flush=True); sys.exit(3)"
    child, events = start(code, tmp_path)
    deadline = time.monotonic() + 20
    assert [processes.wait_for(events, deadline) for _ in range(3)] == [("it", "one"), ("it", "two"), ("it", None)]
    child.stop()
    assert sorted(child.log.read_text().split()) == ["bad", "one", "two"]
    assert "exit code 3" in str(child.failed("ended")) and "bad" in str(child.failed("ended"))


def test_stop_goes_on_to_the_next_signal_and_takes_the_group_along(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True); time.sleep(60)"
    )
    child, events = start(code, tmp_path, stop_signals=((signal.SIGINT, 0.3), (signal.SIGTERM, 5.0)))
    event = processes.wait_for(events, time.monotonic() + 20)
    assert event is not None and event[1] is not None
    child.stop()
    assert child.process.returncode == -signal.SIGTERM
    status = Path(f"/proc/{event[1]}/stat")
    deadline = time.monotonic() + 5
    # An orphan may stay a zombie where nothing reaps it.
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_interrupts_wait_until_a_held_block_ends() -> None:
    reached, before = False, signal.getsignal(signal.SIGINT)  # a shell's background job has it ignored
    with processes.Interrupts() as interrupts:
        with pytest.raises(processes.Interrupted) as caught, interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            reached = True
        assert reached and caught.value.signum == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)  # the ending is under way
    with processes.Interrupts() as interrupts:
        with pytest.raises(processes.Interrupted):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with processes.Interrupts() as interrupts:
        interrupts.ignore()
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked with prctl")
def test_child_is_told_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = """
import queue, signal, sys, time
from pathlib import Path
from weightsync.demo.processes import Child
child = '''
import signal, sys, time
from pathlib import Path
def told(*_):
    Path("told").touch()
    sys.exit()
signal.signal(signal.SIGINT, told)
Path("ready").touch()
time.sleep(60)
'''
Child("it", [sys.executable, "-c", child], logs=Path("."), events=queue.SimpleQueue(), stop_signals=((signal.SIGINT, 1.0),))
time.sleep(60)
"""
    root = str(Path(processes.__file__).resolve().parents[2])
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root})
    try:
        assert appears(tmp_path / "ready")
    finally:
        parent.kill()
        parent.wait()
    assert appears(tmp_path / "told")


def appears(path: Path, seconds: float = 30.0) -> bool:
    """Whether `path` is there, now or soon."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.exists()
