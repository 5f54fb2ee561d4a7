"""Settings: which source wins, what a slip is answered with, and that secrets stay secret."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from weightsync import config, sections
from weightsync.config import Settings, load
from weightsync.errors import ConfigError
from weightsync.fleet.placement import engine_options
from weightsync.fleet.vllm_api import engine_arguments, worker_arguments

SECRET = "hunter2-do-not-print"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("WEIGHTSYNC_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "weightsync.toml"
    path.write_text(text)
    return path


def refused(flags: dict[str, Any], file: Path | None = None) -> str:
    """What `load` complains of, all of it."""
    with pytest.raises(ConfigError) as caught:
        load(flags, file)
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__, "pydantic's own error shows what was given"
    return json.dumps(error.to_dict(), ensure_ascii=False) + str(error) + repr(error)


# --- order -------------------------------------------------------------------------------------


def test_defaults_are_used_when_nothing_is_given(model: str) -> None:
    settings = load({"engine.model": model})
    assert settings.engine.count == 1
    assert settings.api.port == 8517
    assert settings.api.token is None
    assert settings.sync.require is None
    assert settings.namespace == "weightsync-default"


def test_flags_win_over_environment_over_file_over_defaults(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, "[engine]\ncount = 2\nmax_num_seqs = 2\nmax_model_len = 222\n[sync]\nhistory = 2\n[api]\nport = 2\n")
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__COUNT", "3")
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__MAX_NUM_SEQS", "3")
    monkeypatch.setenv("WEIGHTSYNC_API__PORT", "3")
    settings = load({"engine.model": model, "engine.count": "4", "api.port": "4"}, file)
    assert (settings.engine.count, settings.api.port) == (4, 4)
    assert settings.engine.max_num_seqs == 3
    assert (settings.engine.max_model_len, settings.sync.history) == (222, 2)
    assert settings.sync.control_timeout_seconds == 30.0


def test_each_source_alone_can_give_everything(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({}, toml(tmp_path, f'fleet = "blue"\n[engine]\nmodel = "{model}"\n')).fleet == "blue"
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__MODEL", model)
    monkeypatch.setenv("WEIGHTSYNC_FLEET", "green")
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__EXTRA", '{"seed": 7}')
    settings = load({})
    assert (settings.fleet, settings.engine.extra) == ("green", {"seed": 7})


def test_objects_in_flags_are_json_and_the_rest_is_text() -> None:
    assert config.parse_value("engine.extra", '{"seed": 7}') == {"seed": 7}
    assert config.parse_value("engine.extra", "[1]") == [1]
    assert config.parse_value("engine.count", "3") == "3"
    assert config.parse_value("fleet", "true") == "true"


# --- complaints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("engine.count", "zero", ["engine.count: got 'zero', want", "integer"]),
        ("engine.count", 0, ["engine.count: got 0, want", "greater than or equal to 1"]),
        ("engine.device", "tpu", ["engine.device: got 'tpu', want 'auto', 'cpu' or 'cuda'"]),
        ("engine.model", "/nowhere", ["engine.model: got '/nowhere', want a folder that holds config.json"]),
        ("engine.frozen", "visual.*", ["engine.frozen: got 'visual.*', want a list of patterns, such as [\"visual.*\"]"]),
        ("engine.strict", "maybe", ["engine.strict: got 'maybe', want", "boolean"]),
        ("engine.unknown_vllm", "ignore", ["engine.unknown_vllm: got 'ignore', want 'refuse' or 'observe'"]),
        ("api.port", 70_000, ["api.port: got 70000, want less than or equal to 65535"]),
        ("api.max_request_bytes", 1, ["api.max_request_bytes: got 1, want"]),
        ("sync.require", 0, ["sync.require: got 0, want"]),
        ("sync.rendezvous_timeout_seconds", -1, ["sync.rendezvous_timeout_seconds: got -1, want greater than 0"]),
        ("fleet", "Blue Team", ["fleet: got 'Blue Team', want lower-case letters, digits"]),
        ("fleet", "../x", ["fleet: got '../x', want lower-case letters, digits"]),
        ("engine", "text", ["engine: got 'text', want"]),
    ],
)
def test_a_wrong_value_is_answered_with_key_got_and_want(model: str, key: str, value: Any, words: list[str]) -> None:
    flags = {key: value} if key == "engine" else {"engine.model": model, key: value}
    text = refused(flags)
    for word in words:
        assert word in text


def test_every_wrong_key_is_named_at_once(model: str) -> None:
    text = refused({"engine.model": model, "engine.count": 0, "sync.history": 0, "api.port": -1})
    for key in ("engine.count", "sync.history", "api.port"):
        assert f"{key}: got" in text


def test_what_is_missing_is_named() -> None:
    assert "engine.model: not given" in refused({})
    assert "engine.model: not given" in refused({"engine.count": 1})


@pytest.mark.parametrize("key", ["engine.modle", "egnine.model", "api.prot", "sync.x.y", "colour"])
def test_an_unknown_flag_is_named(model: str, key: str) -> None:
    text = refused({"engine.model": model, key: "1"})
    assert "no such key" in text
    assert key.split(".")[0] in text


@pytest.mark.parametrize(
    ("text", "key"), [("colour = 1", "colour"), ("[engine]\ncuont = 1", "engine.cuont"), ("[snyc]\nhistory = 1", "snyc")]
)
def test_an_unknown_key_of_the_file_is_named(model: str, tmp_path: Path, text: str, key: str) -> None:
    assert f"{key}: no such key" in refused({"engine.model": model}, toml(tmp_path, text))


@pytest.mark.parametrize(
    "variable",
    [
        "WEIGHTSYNC_ENGINE_COUNT",
        "WEIGHTSYNC_COUNT",
        "WEIGHTSYNC_ENGNIE__COUNT",
        "WEIGHTSYNC_ENGINE__CUONT",
        "WEIGHTSYNC_",
        "WEIGHTSYNC___COUNT",
    ],
)
def test_a_slip_in_a_variables_name_is_not_passed_over(model: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")
    assert "no such key" in refused({"engine.model": model})


def test_a_variable_that_should_hold_json_and_does_not_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__EXTRA", "{seed: 7}")
    text = refused({"engine.model": model})
    assert "environment" in text
    assert "extra" in text or "engine" in text


def test_a_variable_of_another_program_is_none_of_our_business(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNCED", "1")
    monkeypatch.setenv("ENGINE__COUNT", "9")
    assert load({"engine.model": model}).engine.count == 1


def test_a_file_that_is_not_there_or_not_toml_is_named(model: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert str(missing) in refused({"engine.model": model}, missing)
    assert "not TOML" in refused({"engine.model": model}, toml(tmp_path, "engine = ["))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"fleet = '\xff\xfe'")
    assert "not TOML" in refused({"engine.model": model}, binary)
    assert str(tmp_path) in refused({"engine.model": model}, tmp_path)


def test_a_flag_that_is_no_json_is_named() -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra: got '\{seed: 7\}', want JSON"):
        config.parse_value("engine.extra", "{seed: 7}")


@pytest.mark.parametrize(
    "key", ["worker_extension_cls", "weight_transfer_config", "distributed_executor_backend", "model", "skip_tokenizer_init"]
)
def test_extra_leaves_alone_what_weightsync_sets(model: str, key: str) -> None:
    text = refused({"engine.model": model, "engine.extra": {key: "x", "seed": 1}})
    assert "engine.extra: got an object with" in text
    assert f"other than {key}, which weightsync sets itself" in text


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
@pytest.mark.parametrize("value", [2, "2", None, 0, 1])
def test_extra_leaves_the_number_of_workers_to_the_settings(model: str, kind: str, value: Any) -> None:
    assert f"engine.{kind}_parallel_size" in refused({"engine.model": model, "engine.extra": {f"{kind}_parallel_size": value}})


@pytest.mark.parametrize("extra", [{"nnodes": 2}, {"data_parallel_rank": 1}, {"data_parallel_external_lb": True}])
def test_extra_keeps_an_engine_on_one_node(model: str, extra: dict[str, Any]) -> None:
    assert "lives on one node" in refused({"engine.model": model, "engine.extra": extra})


def test_extra_refuses_experts_that_move(model: str) -> None:
    assert "enable_eplb" in refused({"engine.model": model, "engine.extra": {"enable_eplb": True}})


@pytest.mark.parametrize("extra", [{"enable_expert_parallel": True}, {"enable_eplb": False}, {"max_loras": "two"}])
def test_extra_passes_on_what_only_vllm_can_judge(model: str, extra: dict[str, Any]) -> None:
    assert load({"engine.model": model, "engine.extra": extra}).engine.extra == extra


PARALLEL = {"tensor": 2, "pipeline": 3, "data": 2}


def test_an_engine_of_several_workers_says_so_to_vllm_and_reserves_a_gpu_for_each(model: str) -> None:
    sizes = {f"{kind}_parallel_size": size for kind, size in PARALLEL.items()}
    settings = load({"engine.model": model, "engine.device": "cuda", "engine.count": 2, **{f"engine.{k}": v for k, v in sizes.items()}})
    assert settings.engine.workers == 12
    assert sizes.items() <= engine_arguments(settings.engine).items()
    options = engine_options(settings, 1)
    assert (options["num_gpus"], options["name"]) == (12, "engine-1")
    alone = load({"engine.model": model, "engine.device": "cuda"})
    assert alone.engine.workers == engine_options(alone, 0)["num_gpus"] == 1
    assert not sizes.keys() & engine_arguments(alone.engine).keys(), "vLLM hashes what it is given"


def test_workers_of_an_engine_on_a_cpu_share_its_cores(model: str) -> None:
    flags = {"engine.model": model, "engine.device": "cpu", "engine.cpus": 5, "engine.tensor_parallel_size": 2}
    options = engine_options(load(flags), 0)
    assert options["num_gpus"] == 0 and options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("gpus", [0, 0.5, 1, 3, 12.5])
def test_gpus_that_are_not_one_for_each_worker_are_refused(model: str, gpus: float) -> None:
    flags = {"engine.model": model, "engine.tensor_parallel_size": 2, "engine.data_parallel_size": 2}
    said = refused(flags | {"engine.gpus": gpus})
    assert f"engine.gpus: got {gpus:g}, want 4 or nothing" in said and "tensor 2 x pipeline 1 x data 2" in said
    assert load(flags | {"engine.gpus": 4}).engine.gpus == 4
    assert load({"engine.model": model, "engine.gpus": gpus}).engine.gpus == gpus


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "two"])
def test_sizes_that_are_no_number_of_workers_are_refused(model: str, kind: str, size: Any) -> None:
    assert f"engine.{kind}_parallel_size" in refused({"engine.model": model, f"engine.{kind}_parallel_size": size})


def test_what_the_worker_is_told_comes_from_the_settings_and_leaves_other_additions_alone(model: str) -> None:
    extra = {"additional_config": {"theirs": 1}}
    assert worker_arguments(load({"engine.model": model}).engine)["additional_config"] == {}
    assert worker_arguments(load({"engine.model": model, "engine.extra": extra}).engine)["additional_config"] == {"theirs": 1}
    settings = load({"engine.model": model, "engine.extra": extra, "engine.strict": "true", "engine.unknown_vllm": "observe"})
    told = worker_arguments(settings.engine)["additional_config"]
    assert told == {"theirs": 1, "weightsync": {"strict": True, "unknown_vllm": "observe"}}
    frozen = worker_arguments(load({"engine.model": model, "engine.frozen": ["visual.*"]}).engine)["additional_config"]
    assert frozen == {"weightsync": {"strict": False, "unknown_vllm": "refuse", "frozen": ["visual.*"]}}
    assert "engine.strict and engine.unknown_vllm" in refused({"engine.model": model, "engine.extra": {"additional_config": told}})


def test_settings_cannot_be_changed(model: str) -> None:
    settings = load({"engine.model": model})
    for section in (settings, settings.engine, settings.api):
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, next(iter(type(section).model_fields)), None)


# --- secrets -----------------------------------------------------------------------------------


def test_the_token_is_not_in_any_printed_form(model: str) -> None:
    settings = load({"engine.model": model, "api.token": SECRET})
    assert settings.api.token is not None
    assert settings.api.token.get_secret_value() == SECRET
    for text in (repr(settings), str(settings), repr(settings.api), str(settings.model_dump()), settings.model_dump_json()):
        assert SECRET not in text


@pytest.mark.parametrize("token", [[SECRET], {"value": SECRET}, f"{SECRET} with a space", f"{SECRET}\n", f"é{SECRET}"], ids=str)
def test_a_bad_token_is_not_shown_in_the_complaint(model: str, token: Any) -> None:
    text = refused({"engine.model": model, "api.token": token})
    assert "api.token" in text
    assert SECRET not in text


def test_a_bad_token_in_environment_and_file_is_not_shown(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SECRET not in refused({"engine.model": model}, toml(tmp_path, f'[api]\ntoken = ["{SECRET}"]'))
    assert SECRET not in refused({"engine.model": model}, toml(tmp_path, f'[api]\ntoekn = "{SECRET}"'))
    assert SECRET not in refused({"engine.model": model}, toml(tmp_path, f'api = "{SECRET}"'))
    monkeypatch.setenv("WEIGHTSYNC_API", f'{{"token": "{SECRET}')
    assert SECRET not in refused({"engine.model": model})
    monkeypatch.setenv("WEIGHTSYNC_API", f'{{"token": ["{SECRET}"]}}')
    assert SECRET not in refused({"engine.model": model})


def test_a_secret_among_the_extra_arguments_is_not_shown_in_the_complaint(model: str) -> None:
    assert SECRET not in refused({"engine.model": model, "engine.extra": {"hf_token": SECRET, "model": "x"}})


@pytest.mark.parametrize("token", ["[abc", "{abc", '{"a": 1}'])
def test_a_token_that_looks_like_json_is_a_token(token: str) -> None:
    assert config.parse_value("api.token", token) == token


def test_an_empty_token_is_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_API__TOKEN", "")
    assert not load({"engine.model": model}).api.token


# --- on its way to an actor ---------------------------------------------------------------------


def test_settings_survive_dump_and_restore(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "engine.model": model,
        "engine.extra": {"seed": 1, "nested": {"a": [1, 2]}},
        "engine.gpus": 0.5,
        "api.token": SECRET,
        "sync.require": 2,
        "fleet": "blue",
        "state_dir": "/tmp/somewhere",
    }
    settings = load(flags)
    data = config.dump(settings)
    # An actor's environment is another one and may even be wrong.
    monkeypatch.setenv("WEIGHTSYNC_FLEET", "green")
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__COUNT", "not a number")
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__EXTRA", '{"seed": 2, "more": 1}')
    monkeypatch.setenv("WEIGHTSYNC_ENGINE__COLOUR", "blue")
    again = config.restore(json.loads(json.dumps(data)))
    assert isinstance(again, Settings)
    assert again.model_dump() == settings.model_dump()
    assert again.api.token is not None
    assert again.api.token.get_secret_value() == SECRET
    assert again.home == Path("/tmp/somewhere/blue")


def test_settings_without_a_token_survive_dump_and_restore(model: str) -> None:
    settings = load({"engine.model": model})
    assert config.restore(config.dump(settings)).api.token is None


def test_the_state_folder_follows_home(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load({"engine.model": model}).home == Path("/home/someone/.weightsync/default")


def test_without_home_the_state_folder_is_still_this_users_own(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert load({"engine.model": model}).home == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".weightsync/default"


def test_every_setting_says_what_it_is() -> None:
    for section in (sections.EngineSettings, sections.ApiSettings, sections.SyncSettings, sections.RaySettings):
        for key, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{key} has no docstring, so --help has none"


@pytest.mark.parametrize(("key", "value"), [("sync.rollback", "host"), ("sync.verify_stored", "true"), ("sync.min_available", "1")])
def test_what_needs_staged_bytes_is_refused_without_staging(model: str, key: str, value: str) -> None:
    given = {"engine.model": model, "engine.count": "2", key: value}
    assert f"{key}: got" in refused({**given, "sync.stage": "none"})
    assert config.load({**given, "sync.stage": "host"})


@pytest.mark.parametrize(("count", "least", "taken"), [(1, 0, True), (1, 1, False), (4, 3, True), (4, 4, False), (4, 9, False)])
def test_one_engine_must_be_left_to_write(model: str, count: int, least: int, taken: bool) -> None:
    given = {"engine.model": model, "engine.count": str(count), "sync.min_available": str(least)}
    if taken:
        assert load(given).sync.min_available == least
    else:
        assert f"sync.min_available: got {least}, want fewer than the {count} of engine.count" in refused(given)
