import asyncio
import os
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from process_checks import free_port
from refusals import raises

from forge_agents.bench.entrants import read_player
from forge_agents.cli import serve as serving
from forge_agents.cli.serve import ServeConfig, serve
from forge_agents.cli.served import find_policies
from forge_agents.errors import ForgeError, ModelNotFoundError, RunFolderError
from forge_agents.models.fingerprint import sampled_hash


@pytest.fixture
def run(tiny_llama, tmp_path):
    """A run that trained one model."""
    shutil.copytree(tiny_llama, tmp_path / "guess" / "export")
    (tmp_path / "guess" / "config.yaml").write_text("env: [x]\n")
    return tmp_path / "guess"


@pytest.fixture
def duel(tiny_llama, tmp_path):
    """A run that trained two policies."""
    for name in ("hero", "rival"):
        shutil.copytree(tiny_llama, tmp_path / "duel" / "export" / name)
    return tmp_path / "duel"


def models(checkpoint, **options):
    """Folders of the served models by policy, and the names in requests."""
    served = find_policies(str(checkpoint), **options)
    return {name: policy.model for name, policy in served.policies.items()}, served.names


def test_run_export_and_model_folder_are_served(run, tiny_llama):
    export = {"guess": str(run / "export")}
    assert models(run) == models(run / "export") == (export, {"guess": "guess"})
    assert models(run, name="mine") == (export, {"mine": "guess", "guess": "guess"})
    folders, names = models(tiny_llama)
    assert list(folders.values()) == [str(tiny_llama)] and tiny_llama.name in names


def test_policies_of_an_export_are_served_together_or_alone(duel):
    folders = {name: str(duel / "export" / name) for name in ("hero", "rival")}
    assert models(duel) == models(duel / "export") == (folders, {"hero": "hero", "rival": "rival"})
    alone, names = models(duel, policy="rival", name="mine")
    assert alone == {"rival": folders["rival"]} and names == {"mine": "rival", "rival": "rival"}
    with pytest.raises(ModelNotFoundError, match="hero, rival. Choose one with --policy. Did you mean 'rival'"):
        models(duel / "export", policy="rivla")
    raises(ValueError, "name='mine' is none of the names .* hero, rival", models, duel, name="mine")


def test_newest_exported_checkpoint_is_served(run, duel):
    (run / "export").rename(run / "export-step-000020")
    shutil.copytree(run / "export-step-000020", run / "export-step-000100")
    assert models(run)[0] == {"guess": str(run / "export-step-000100")}
    assert models(run / "export-step-000020")[0] == {"guess": str(run / "export-step-000020")}
    shutil.copytree(run / "export-step-000020", run / "export")
    assert models(run)[0] == {"guess": str(run / "export")}
    (duel / "export").rename(duel / "export-step-000020")
    assert models(duel, policy="hero")[0] == {"hero": str(duel / "export-step-000020" / "hero")}


def test_unservable_folder_explains_what_to_do(run, tmp_path):
    raises(ModelNotFoundError, "holds the policies guess", models, run, policy="hero")
    raises(ModelNotFoundError, r"no exported model.*forge-agents export RUN.*trainer\.save", models, tmp_path)
    raises(ModelNotFoundError, "does not exist", models, tmp_path / "nothing")
    for file in (run / "export").glob("*.safetensors"):
        file.write_bytes(b"short")
    raises(ModelNotFoundError, "half-written", models, run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": ""}, "checkpoint is empty"),
        ({"port": 0}, "port=0"),
        ({"api_key_env": "sk-secret-token"}, "not the name of an environment variable"),
        ({"kv_cache_gb": 0.0}, "kv_cache_gb"),
        ({"max_model_len": -1}, "max_model_len"),
    ],
)
def test_serve_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        ServeConfig(**{"checkpoint": "x", **options})
    assert "sk-secret" not in str(caught.value)


def test_token_comes_from_the_environment_or_is_created(monkeypatch):
    config = ServeConfig(checkpoint="x", api_key_env="MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "a-good-token")
    assert config.token() == "a-good-token"
    monkeypatch.setenv("MY_TOKEN", "has blanks in it")
    with pytest.raises(ValueError, match="MY_TOKEN holds no usable token") as caught:
        config.token()
    assert "blanks in it" not in str(caught.value)
    monkeypatch.delenv("MY_TOKEN")
    assert len({config.token() for _ in range(3)}) == 3 and len(config.token()) >= 40


@pytest.mark.parametrize("token", ["", "a-token-of-mine"])
def test_address_and_new_token_are_printed_when_nobody_else_can_listen_there(run, monkeypatch, token):
    lines = []

    async def start(policies, config, *, tuned):
        assert (list(policies), config.max_model_len, config.max_num_seqs) == (["guess"], 99, 3)
        assert lines == ["model  guess as guess"]
        return SimpleNamespace(policy_engines={}, stop=stop)

    async def stop(*_):
        pass

    async def fail():
        raise ForgeError("an engine is lost")

    class Server:
        def __init__(self, gateway, *_, **settings):
            with pytest.raises(OSError, match="in use"):
                socket.create_server((config.host, config.port), reuse_port=False)
            assert len(settings["token"]) >= 8
            self.drain = stop

        @property
        def failed(self):
            return fail()

    monkeypatch.setattr(serving.Fleet, "start", start)
    monkeypatch.setattr(serving, "PolicyServer", Server)
    monkeypatch.setitem(os.environ, "MY_TOKEN", token)
    options = {"max_model_len": 99, "max_num_seqs": 3, "api_key_env": "MY_TOKEN"}
    config = ServeConfig(checkpoint=str(run), port=free_port(), **options)
    raises(ForgeError, "an engine is lost", serve, config, say=lines.append)
    printed = next(line for line in lines if line.startswith("token"))
    assert printed == "token  from MY_TOKEN" if token else len(printed.split()[1]) >= 40
    assert f"url    http://127.0.0.1:{config.port}/v1" in lines
    assert not any(token and token in line for line in lines)


def test_export_that_is_older_than_a_checkpoint_is_named(run, monkeypatch, caplog):
    async def start(policies, config, *, tuned):
        raise ForgeError("started")

    def served():
        lines = []
        raises(ForgeError, "started", serve, ServeConfig(checkpoint=str(run), port=free_port()), say=lines.append)
        caplog.clear()
        read_player(str(run))
        notes = [line for line in lines if line.startswith("note")]
        assert len(caplog.records) == len(notes)
        return notes

    def checkpoint(step):
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "experiment.json").touch()
        return folder

    monkeypatch.setattr(serving.Fleet, "start", start)
    assert served() == []
    os.utime(run / "export", (1, 1))
    (checkpoint("999999") / "exported").touch()
    assert served() == []
    checkpoint("1000000")
    assert len(served()) == 1 and "export is older than checkpoint step-1000000" in served()[0]
    os.utime(run / "export")
    assert served() == [], "such as after fine-tuning, which marks no checkpoint"


def test_port_in_use_is_reported_before_startup(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .*Choose another --port"):
            serve(ServeConfig(checkpoint=str(run), port=port), say=lambda line: None)


def test_names_of_a_run_do_not_control_the_terminal(run, monkeypatch):
    async def start(policies, config, *, tuned):
        raise ForgeError("started")

    monkeypatch.setattr(serving.Fleet, "start", start)
    policy = {"model": str(run / "export"), "name": "hero", "sampling": {}, "trainable": True}
    settings = {"policies": {"hero": policy}, "policy_mapping": {"\x1b]0;x\a": "hero"}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = []
    raises(ForgeError, "started", serve, ServeConfig(checkpoint=str(run), port=free_port()), say=lines.append)
    assert any("\\x1b]0;x\\x07" in line for line in lines) and not any("\x1b" in line for line in lines)


POLICY = {"name": "hero", "sampling": {"max_tokens": 9, "stop": ["!"]}, "trainable": True, "lora": None}


@pytest.fixture
def settings(tiny_llama):
    policies = {
        "hero": {**POLICY, "model": str(tiny_llama), "keep_reasoning": "none"},
        "rival": {**POLICY, "model": str(tiny_llama), "name": "rival", "lora": {"rank": 4}},
        "fixed": {**POLICY, "model": str(tiny_llama), "name": "fixed", "trainable": False},
    }
    mapping = {"planner": "hero", "coder": "rival", "gpt-4o": "rival", "rival": "hero", "other": "random"}
    engine = {"max_model_len": 64, "dtype": "float32", "tp": 8}
    return {"policies": policies, "policy_mapping": mapping, "trainer": {"engine": engine}}


def write_settings(folder, content):
    text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    (folder / "config.yaml").write_text(text)


def test_run_is_served_as_its_policies_were_trained(duel, tiny_llama, settings):
    (duel / "export" / "rival" / "adapter").mkdir()
    write_settings(duel, settings)
    served = find_policies(str(duel))
    assert (served.engine.max_model_len, served.engine.dtype, served.engine.tp) == (64, "float32", 1)
    assert served.adapters == {"rival": duel / "export" / "rival" / "adapter"}
    hero, rival, fixed = (served.policies[name] for name in ("hero", "rival", "fixed"))
    assert (hero.model, rival.model, fixed.model) == (str(duel / "export" / "hero"), *[str(tiny_llama)] * 2)
    assert (hero.keep_reasoning, hero.sampling.max_tokens, hero.sampling.stop) == ("none", 9, ("!",))
    assert hero.lora is None and rival.lora.rank == 4
    # an agent comes before a policy of the same name, and players without a model are left out
    assert served.names == {
        "hero": "hero",
        "rival": "hero",
        "fixed": "fixed",
        "planner": "hero",
        "coder": "rival",
        "gpt-4o": "rival",
    }
    raises(ValueError, r"name='mine' is none of .*: hero, rival, fixed, planner", find_policies, str(duel), name="mine")
    shutil.rmtree(duel / "export" / "rival" / "adapter")
    served = find_policies(str(duel))
    assert served.adapters == {} and served.policies["rival"].model == str(duel / "export" / "rival")
    shutil.rmtree(duel / "export" / "rival")
    raises(ModelNotFoundError, "no model of the trained policy rival", find_policies, str(duel))


def test_adapter_is_served_only_on_the_model_that_it_was_trained_on(duel, settings, tiny_llama):
    adapter = duel / "export" / "rival" / "adapter"
    adapter.mkdir()
    for recorded, folder in ((sampled_hash(tiny_llama), tiny_llama), ("0" * 16, duel / "export" / "rival")):
        write_settings(duel, {**settings, "weights": {"rival": recorded}})
        served = find_policies(str(duel))
        assert served.adapters == ({"rival": adapter} if folder == tiny_llama else {})
        assert served.policies["rival"].model == str(folder), "the weights of the export include the adapter"


def test_run_without_its_base_models_serves_its_exports(duel, settings):
    (duel / "export" / "rival" / "adapter").mkdir()
    for policy in settings["policies"].values():
        policy["model"] = str(duel / "elsewhere")
    write_settings(duel, settings)
    served = find_policies(str(duel))
    assert served.adapters == {} and served.policies["rival"].model == str(duel / "export" / "rival")
    assert "elsewhere" in served.missing["fixed"] and served.policies.keys() == {"hero", "rival"}
    assert "fixed" not in served.names
    with pytest.raises(ModelNotFoundError, match="the model of policy fixed is missing: .*elsewhere"):
        find_policies(str(duel), policy="fixed")


def test_models_that_a_run_names_are_not_downloaded(duel, settings, monkeypatch):
    asked = []

    def cached_only(name: str, **options):
        asked.append(options.get("local_files_only", False))
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached_only)
    settings["policies"]["fixed"]["model"] = "stranger/670b"
    write_settings(duel, settings)
    missing = find_policies(str(duel)).missing["fixed"]
    assert missing.endswith("Download it with `forge-agents list --models stranger/670b --download`")
    assert asked and all(asked)


def test_folder_of_models_with_any_names_is_served(tiny_llama, tmp_path):
    for name in ("Tiny-1.5", "Tiny-1-5"):
        shutil.copytree(tiny_llama, tmp_path / name)
    assert sorted(models(tmp_path)[1]) == ["Tiny-1-5", "Tiny-1-5-2"]


def test_run_of_one_policy_has_the_name_of_its_folder(run, tiny_llama):
    write_settings(run, {"policies": {"hero": {**POLICY, "model": str(tiny_llama)}}})
    assert models(run)[1] == {"hero": "hero", "guess": "hero"}
    assert models(run, name="mine")[1] == {"hero": "hero", "mine": "hero"}
    assert models(run / "export")[1] == {"guess": "guess"}, "an export is a model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"policies": {"a": {**POLICY, "model": "m", "sampling": {"max_tokens": 0}}}}, "max_tokens=0"),
        ({"policies": {"a": {**POLICY, "model": "m", "spell": 1}}}, "unknown: spell"),
        ({"policies": {"a": {"model": "m"}}}, "'sampling'"),
        ({"policies": {"../../other": {**POLICY, "model": "m"}}}, "'../../other' with name 'hero'"),
        ({"policies": {"a": 1}}, "as this version does"),
        ({"policies": {"a\x1b[2J": {**POLICY, "model": "m", "\x1b[31m": 1}}}, r"\\x1b\[31m"),
    ],
)
def test_unknown_run_settings_are_refused_and_escaped(run, content, message):
    write_settings(run, content)
    with pytest.raises(RunFolderError, match=message) as refused:
        find_policies(str(run))
    assert "\x1b" not in str(refused.value) and "export instead" in str(refused.value)


@pytest.mark.parametrize("content", ["", "{", "- 1", "policies: 1", "a: !!python/object/apply:os.abort []"])
def test_settings_without_policies_serve_a_model(run, content):
    write_settings(run, content)
    assert models(run) == ({"guess": str(run / "export")}, {"guess": "guess"})


def test_sigterm_ends_the_server_although_many_calls_wait_for_its_loop():
    """asyncio's own handlers lose a signal while hundreds of calls of other threads wait."""

    async def work():
        loop = asyncio.get_running_loop()

        def flood():
            for _ in range(5000):
                loop.call_soon_threadsafe(int)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=flood)
        thread.start()
        thread.join()  # the loop is busy meanwhile
        await asyncio.sleep(30)

    async def short():
        pass

    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    assert asyncio.run(serving._until_terminated(work())) and time.monotonic() - start < 20
    assert not asyncio.run(serving._until_terminated(short())) and signal.getsignal(signal.SIGTERM) is before
