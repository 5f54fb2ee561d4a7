"""Two kinds of engine that meet the corruptions of `corruption_cases`, each in a process of its own.

Functions whose first argument is `state` run in the engine's process (`tests.peers.Peer`).

`ours` is an engine with weightsync, driven step by step as a trainer and a controller drive it (`tests.bench.Bench`). Behind every update
that was taken its live storage is read again (`weightsync check`), and it is probed: prompts and tokens of the fleet's probe
(`fleet.scores`), judged by the controller's own rules (`fleet.compared`) against two engines of that version, for which answers
of cold engines stand.

`stock` is vLLM's engine without weightsync. It reloads by `reload_weights`, which checks nothing.

Not covered: CUDA. On a CPU nothing is captured: what a graph would read is the memory where a parameter lay at the start.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.corruption_cases import CASES
from benchmarks.corruption_site import Made, Site, Tensors
from tests import bench, faulty
from tests.bench import Bench, Fault, Way
from weightsync.check.contents import fingerprint
from weightsync.check.engine import OURS, generate
from weightsync.client.sender import Sender
from weightsync.fleet import scores
from weightsync.fleet.compared import Baselines, from_most
from weightsync.storage.adopt import Adoption
from weightsync.transport.digest import as_bytes
from weightsync.transport.packing import Bucket
from weightsync.worker import staging

PROMPTS, SAMPLED = faulty.PROMPTS, 24
#: Updates without corruption before the first with one: a plan is learned, and the probe's baseline is there.
WARM = 6
#: Which of three engines of one version is under test; the others are right.
_TESTED = 2
#: What SGLang's checker leaves out (see `corruption`): buffers outside checkpoints, and scales of the KV cache.
_NOT_CHECKED = ("cos_sin_cache", "inv_freq", "freqs_cis", "_weight_fp32", "_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_STAGES = {"manifest_refused": "manifest", "digest_mismatch": "digest", "bad_values": "values", "apply_failed": "loading"}


def other(letter: str) -> str:
    """The weights that an engine does not hold."""
    return "b" if letter == "a" else "a"


def draw(kind: str, case: str, seed: int, held: Tensors, target: Tensors, model: Any, others: Tensors) -> Made | None:
    """A corruption; the same for every engine."""
    return CASES[case][1](Site(held, target, random.Random(f"{kind}, {case}, {seed}"), model, others))


def look(state: dict[str, Any]) -> dict[str, Any]:
    """What the engine says and holds (`faulty.look`), its answers to the probe, and copies of its live parameters."""
    live = {name: parameter.detach().clone() for name, parameter in state["model"].named_parameters()}
    return {**_look(state), "scores": score(state["llm"]), "live": live, "samples": generate(state["llm"], PROMPTS, SAMPLED)}


_look = faulty.look


def score(llm: Any) -> list[dict[str, float]]:
    """What `fleet.scores` asks of an engine, here of one without a loop."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    vocabulary = int(llm.llm_engine.vllm_config.model_config.get_vocab_size())
    bias = {scores.tokens(vocabulary, 1, seed=scores._PROMPTS)[0]: scores._BIAS}
    asked = {"max_tokens": scores._STEPS, "logprobs": scores._TOP, "logit_bias": bias}
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **asked)
    found = []
    for seed in range(scores._PROMPTS):
        prompt = TokensPrompt(prompt_token_ids=scores.tokens(vocabulary, scores._PROMPT_TOKENS, seed))
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        found += [{str(token): float(entry.logprob) for token, entry in at.items()} for at in output.logprobs]
    return found


def captured(model: Any) -> Tensors:
    """What a graph that was captured now would go on reading: parameters by where they lie."""
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.numel()}


def stale_in(read: Tensors, model: Any) -> list[str]:
    """Parameters of which a graph reads other bytes than the model has."""
    now = dict(model.named_parameters())
    return [name for name, old in read.items() if not torch.equal(as_bytes(old), as_bytes(now[name].data.contiguous()))]


# --- an engine with weightsync -------------------------------------------------------------------


def start_ours(state: dict[str, Any], kind: str, folders: dict[str, Path], arguments: dict[str, Any]) -> dict[str, Any]:
    """Cold engines' answers, and an engine that has taken a few updates; returns samples of the cold ones and false alarms."""
    with patch.object(faulty, "look", look):
        cold = faulty.start(state, folders, arguments, OURS)
    state.update(kind=kind, cold=cold, held="a", limits=Baselines(), read=captured(state["model"]))
    alarms = [heal_ours(state, other(state["held"]), number % 2 == 0) for number in range(WARM)]
    return {"samples": {letter: seen["samples"] for letter, seen in cold.items()}, "clean": alarms}


class _Altered(Sender):
    """Between the digest and the worker bytes become those of other tensors."""

    def __init__(self, *given: Any, arrives: Tensors) -> None:
        super().__init__(*given)
        self._arrives = [as_bytes(arrives[spec.name]) for spec in self._offer.manifest.tensors]

    def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
        packed = super()._pack(bucket, window)
        for piece in bucket.pieces:
            run = self._arrives[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            window[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(run)
        return packed


def attempt_ours(state: dict[str, Any], case: str, seed: int, stored: bool) -> dict[str, Any] | None:
    """One update with a corruption: by what it was told, in which words, and what is true.

    Args:
        stored: whether `sync.verify_stored` is on.

    Returns:
        None where this kind of model can't have it.
    """
    bench_, held, target = state["bench"], state["held"], other(state["held"])
    tensors, others = state["tensors"], state["cold"][held]["live"]
    made = draw(state["kind"], case, seed, tensors[held], tensors[target], state["model"], others)
    if made is None:
        return None
    if made.before is not None:
        made.before()
    repaired = _repaired(bench_)
    report = bench_.update(tensors[target], _fault(made), Way(compared=stored))
    said, stage = _error_of(report), ""
    if report["state"] != "verified":
        stage = _stage(report)
    else:
        state["held"] = target
        if found := [path for path, count in _repaired(bench_).items() if count > repaired.get(path, 0) and _names(made, path)]:
            stage, said = "repaired", f"repaired: {', '.join(found)}"
        else:
            stage, said = _behind(state, made, target)
    seen = _truth(state, target, made) if report["state"] == "verified" else {"wrong": False, "samples": None}
    about = {"names": list(made.names), "stored": stored, "values": made.values}
    return {"stage": stage, "said": said[:300], "named": _names(made, said), **about, **seen}


def _fault(made: Made) -> Fault:
    """As `tests.bench` takes it."""
    given: dict[str, Any] = {}
    if made.offered is not None:
        given["offered"] = lambda _: made.offered
    if made.arrives is not None:
        kind = functools.partial(_Altered, arrives=made.arrives)
        given["sender"] = lambda *to: bench.send(*to, kind=kind)  # type: ignore[arg-type]
    if made.stream or made.loaded or made.blind or made.loading is not nullcontext:
        given["worker"] = lambda bench_, _: _around(bench_, made)
    return Fault(**given)


@contextlib.contextmanager
def _around(bench_: Bench, made: Made) -> Iterator[None]:
    guard, stream = bench_.applier._guard, staging.Staged.stream
    repair = guard.repair

    def repairs() -> Any:
        if made.loaded is not None:
            made.loaded()
        return Adoption() if made.blind else repair()

    with contextlib.ExitStack() as here:
        here.enter_context(made.loading())
        if (change := made.stream) is not None:
            here.enter_context(patch.object(staging.Staged, "stream", lambda self, taken: change(stream(self, taken))))
        here.enter_context(patch.object(guard, "repair", repairs))
        yield


def _error_of(report: dict[str, Any]) -> str:
    error = report["error"] or {"message": "", "names": []}
    return " ".join([error["message"], *map(str, error["names"])])


def _stage(report: dict[str, Any]) -> str:
    code, message = report["error"]["code"], report["error"]["message"]
    if code == "verdict_not_ok":
        return "stored" if "stored as they were sent" in message else "contract"
    return _STAGES.get(code, code)


def _repaired(bench_: Bench) -> dict[str, int]:
    return {path: sum(counts.values()) for path, counts in bench_.call("contract")["contract"]["repaired"].items()}


def _names(made: Made, said: str) -> bool:
    """Whether something that is corrupted is named."""
    return any(name in said for name in made.names)


def _behind(state: dict[str, Any], made: Made, target: str) -> tuple[str, str]:
    """What tells of a corruption behind a verdict that was right, or seemed so: a check of live storage, the probe."""
    found = _check(state["bench"])
    if made.late is not None:
        made.late()
        found = _check(state["bench"])
    if told := [*found["differs"], *found["faults"]]:
        return "live check", "; ".join(told)
    if not made.everywhere and (said := _probe(state, target)):
        return "probe", said
    return "", ""


def _check(bench_: Bench) -> dict[str, Any]:
    found = bench_.call("check", True)
    while not found["done"] and not found["error"]:
        found = bench_.call("check", False)
    assert not found["error"], found["error"]
    return found


def _probe(state: dict[str, Any], target: str) -> str:
    """What the controller's rules say of this engine beside two that hold the target; empty when it is in its limits."""
    right = state["cold"][target]["scores"]
    values = from_most({0: right, 1: right, _TESTED: score(state["llm"])})
    named, said = state["limits"].judge(values, {"engines": values, "graphs": {}})
    return "; ".join(said) if _TESTED in named else ""


def _truth(state: dict[str, Any], target: str, made: Made) -> dict[str, Any]:
    """Whether the engine is another one than a cold one, whatever was told; and what it samples, for `observe`."""
    now, want = faulty.look(state), state["cold"][target]
    wrong = any(now[part] != want[part] for part in ("outputs", "registered", "owned")) or bool(stale_in(state["read"], state["model"]))
    return {"wrong": wrong, "samples": generate(state["llm"], PROMPTS, SAMPLED) if made.values else None}


def heal_ours(state: dict[str, Any], target: str, stored: bool) -> dict[str, Any]:
    """An update without corruption: what was told of it, which would be a false alarm, and whether all is right behind it."""
    report = state["bench"].update(state["tensors"][target], None, Way(compared=stored))
    alarms = [] if report["state"] == "verified" else [_error_of(report)]
    if not alarms:
        found = _check(state["bench"])
        alarms = [*found["differs"], *found["faults"], *filter(None, [_probe(state, target)])]
    state["held"] = target
    if report["state"] != "verified":  # it serves nothing: what its kernels hold may not even be run
        return {"alarms": alarms, "right": False, "different": []}
    now, want = faulty.look(state), state["cold"][target]
    different = [path for part in ("registered", "owned") for path in want[part] if now[part].get(path) != want[part][path]]
    different += stale_in(state["read"], state["model"])
    return {"alarms": alarms, "right": now["outputs"] == want["outputs"] and not different, "different": different[:5]}


# --- stock vLLM ----------------------------------------------------------------------------------


def start_stock(state: dict[str, Any], kind: str, folders: dict[str, Path], arguments: dict[str, Any]) -> dict[str, Any]:
    """An engine without weightsync on `a`; what it answers behind reloads without corruption."""
    import vllm
    from safetensors.torch import load_file

    from weightsync.worker import tiles

    tiles.ask()
    state["llm"] = llm = vllm.LLM(model=str(folders["a"]), **arguments)
    state["model"] = llm.collective_rpc(lambda worker: worker.get_model())[0]
    state["tensors"] = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}
    state.update(kind=kind, clean={}, live={}, answers={})
    repeats = True
    for letter in "baba":
        _reload(state, state["tensors"][letter])
        said = generate(llm, PROMPTS, faulty.MAX_TOKENS)
        repeats = repeats and state["answers"].get(letter, said) == said
        state["clean"][letter], state["answers"][letter] = sums(state["model"]), said
        state["live"][letter] = {name: parameter.detach().clone() for name, parameter in state["model"].named_parameters()}
    state["read"], state["repeats"] = captured(state["model"]), repeats  # INT8 kernels of a stock engine read memory that was given back
    return {"sums": state["clean"], "repeats": repeats}


def _reload(state: dict[str, Any], tensors: Any) -> None:
    pairs = tensors.items() if isinstance(tensors, dict) else tensors
    state["llm"].collective_rpc(lambda worker, sent: worker.reload_weights(weights_iterator=sent), args=(iter(pairs),))


def sums(model: Any) -> dict[str, str]:
    """Checksums of live parameters and buffers, as SGLang's checker has them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: fingerprint(tensor) for name, tensor in named if not any(part in name for part in _NOT_CHECKED)}


def attempt_stock(state: dict[str, Any], case: str, seed: int, held: str) -> dict[str, Any] | None:
    """One reload with a corruption, from `held` to the other weights: what was raised, what is true, and the checksums."""
    target = other(held)
    tensors = state["tensors"]
    made = draw(state["kind"], case, seed, tensors[held], tensors[target], state["model"], state["live"][held])
    if made is None:
        return None
    raised = _corrupted(state, made, tensors[target])
    if raised:
        return {"raised": raised, "sums": {}, "wrong": True, "everywhere": made.everywhere}
    found = sums(state["model"])
    wrong = found != state["clean"][target] or bool(stale_in(state["read"], state["model"]))
    if not wrong and state["repeats"]:
        wrong = generate(state["llm"], PROMPTS, faulty.MAX_TOKENS) != state["answers"][target]
    return {"raised": "", "sums": found, "wrong": wrong, "everywhere": made.everywhere}


def rehearse(state: dict[str, Any], case: str, seed: int, held: str) -> str | None:
    """SGLang's rehearsal with a corruption: snapshot, reset, the same weights again, compare; what it says, empty when all is equal."""
    tensors, model = state["tensors"], state["model"]
    made = draw(state["kind"], case, seed, tensors[other(held)], tensors[held], model, state["live"][other(held)])
    if made is None:
        return None
    snapshot = sums(model)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in snapshot:
                whole = not tensor.is_floating_point()
                tensor.data.copy_(torch.randint(-128, 128, tensor.shape) if whole else torch.rand(tensor.shape))
    if raised := _corrupted(state, made, tensors[held]):
        return f"raised: {raised}"
    now = sums(model)
    return ", ".join(name for name in snapshot if now.get(name) != snapshot[name])


def _corrupted(state: dict[str, Any], made: Made, target: Tensors) -> str:
    """A reload with a corruption; what it raised."""
    arrives: Any = made.arrives or made.offered or target
    pairs = iter(arrives.items())
    if made.before is not None:
        made.before()
    try:
        with made.loading():
            _reload(state, made.stream(pairs) if made.stream is not None else pairs)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"[:200]
    for step in (made.loaded, made.late):
        if step is not None:
            step()
    return ""


def heal_stock(state: dict[str, Any], target: str) -> bool:
    """A reload without corruption; whether live parameters are what they are behind one, and where graphs read them."""
    try:
        _reload(state, state["tensors"][target])
    except Exception:
        return False
    return sums(state["model"]) == state["clean"][target] and not stale_in(state["read"], state["model"])
