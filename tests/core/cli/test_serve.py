import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from forge_agents.cli import main as cli
from forge_agents.cli import serve as serving
from forge_agents.cli.serve import RequireToken, ServeConfig, command, find_model, find_run, serve
from forge_agents.errors import ModelNotFoundError, RunFolderError
from forge_agents.testing._processes import free_port, holds_within, runs


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


def found(**options):
    return find_model(ServeConfig(**options))


def test_run_export_and_model_folder_are_served(run, tiny_llama):
    assert found(checkpoint=str(run)) == (run / "export", "guess")
    assert found(checkpoint=str(run / "export")) == (run / "export", "guess")
    assert found(checkpoint=str(tiny_llama)) == (tiny_llama, tiny_llama.name)
    assert found(checkpoint=str(run), name="mine")[1] == "mine"


def test_one_of_several_policies_is_chosen(duel):
    assert found(checkpoint=str(duel), policy="rival") == (duel / "export" / "rival", "rival")
    with pytest.raises(ModelNotFoundError, match=r"hero, rival; choose one with --policy"):
        found(checkpoint=str(duel))
    with pytest.raises(ModelNotFoundError, match="Did you mean 'rival'"):
        found(checkpoint=str(duel / "export"), policy="rivla")


def test_newest_exported_checkpoint_is_served(run, duel):
    (run / "export").rename(run / "export-step-000020")
    shutil.copytree(run / "export-step-000020", run / "export-step-000100")
    assert found(checkpoint=str(run)) == (run / "export-step-000100", "guess")
    assert found(checkpoint=str(run / "export-step-000020")) == (run / "export-step-000020", "guess")
    shutil.copytree(run / "export-step-000020", run / "export")
    assert found(checkpoint=str(run)) == (run / "export", "guess")
    (duel / "export").rename(duel / "export-step-000020")
    assert found(checkpoint=str(duel), policy="hero") == (duel / "export-step-000020" / "hero", "hero")


def test_unservable_folder_explains_what_to_do(run, tmp_path):
    with pytest.raises(ModelNotFoundError, match="leave out policy"):
        found(checkpoint=str(run), policy="hero")
    with pytest.raises(ModelNotFoundError, match=r"no exported model.*forge-agents export RUN.*trainer\.save"):
        found(checkpoint=str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        found(checkpoint=str(tmp_path / "nothing"))
    for file in (run / "export").glob("*.safetensors"):
        file.write_bytes(b"short")
    with pytest.raises(ModelNotFoundError, match="half-written"):
        found(checkpoint=str(run))


def test_model_without_a_chat_template_is_refused(run, tmp_path):
    export = run / "export"
    (export / "chat_template.jinja").unlink(missing_ok=True)
    settings = export / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"chat_template"', '"other"'))
    with pytest.raises(ValueError, match="has no chat template; give one with --chat_template"):
        found(checkpoint=str(run))
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    assert found(checkpoint=str(run), chat_template=str(template))[0] == export


def test_server_command_has_our_settings(run):
    config = ServeConfig(checkpoint=str(run), max_model_len=256, kv_cache_gb=0.5, enforce_eager=True)
    words = command(config, run / "export", "guess", ["--enable-auto-tool-choice"])
    assert words[:4] == [sys.executable, "-P", "-m", "forge_agents.serving._server"]
    assert words[4] == f"--model={run / 'export'}"
    settings = {"host": "127.0.0.1", "served-model-name": "guess", "dtype": "float32", "max-model-len": "256",
                "kv-cache-memory-bytes": "500000000", "middleware": "forge_agents.cli.serve.RequireToken"}  # fmt: skip
    assert {f"--{key}={value}" for key, value in settings.items()} < set(words)
    assert "--enforce-eager" in words
    assert words[-1] == "--enable-auto-tool-choice"
    assert not any("api-key" in word for word in words)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"checkpoint": ""}, "checkpoint is empty"),
        ({"port": 0}, "port=0"),
        ({"api_key_env": "sk-secret-token"}, "not the name of an environment variable"),
        ({"chat_template": "nowhere.jinja"}, "is not a file"),
        ({"kv_cache_gb": 0.0}, "kv_cache_gb"),
        ({"max_model_len": -1}, "max_model_len"),
    ],
)
def test_serve_settings_are_checked(options, told):
    with pytest.raises(ValueError, match=told) as caught:
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


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """``pretended(program)``: `program` runs in place of vLLM's server; returns the words it would have had."""
    started = []

    def pretend(program):
        def words(*args):
            started.append(command(*args))
            return [sys.executable, "-c", program]

        monkeypatch.setattr(serving, "command", words)
        return started

    monkeypatch.chdir(tmp_path)
    return pretend


ANSWERS = """
import json, os
json.dump(dict(os.environ), open("environment.json", "w"))
open(os.environ["FORGE_AGENTS_SERVER_ANSWERS"], "w").close()
"""


def test_token_is_not_on_the_command_line(run, pretended, tmp_path, monkeypatch, capfd):
    started, port = pretended(ANSWERS), str(free_port())
    monkeypatch.setenv("VLLM_API_KEY", "another")
    monkeypatch.delenv("FORGE_AGENTS_TOKEN", raising=False)
    assert cli.main(["serve", str(run), "--port", port, "--", "--seed", "3"]) == 0
    environment = json.loads((tmp_path / "environment.json").read_text())
    token, told = environment["FORGE_AGENTS_SERVER_TOKEN"], capfd.readouterr()
    assert started[0][-2:] == ["--seed", "3"]
    assert told.out.count(token) == 1 and token not in told.err and not any(token in word for word in started[0])
    assert "VLLM_API_KEY" not in environment and "started server guess" in told.err
    monkeypatch.setenv("FORGE_AGENTS_TOKEN", "a-token-of-mine")
    assert cli.main(["serve", str(run), "--port", port]) == 0
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["FORGE_AGENTS_SERVER_TOKEN"] == "a-token-of-mine"
    assert "a-token-of-mine" not in capfd.readouterr().out


def test_server_that_ends_during_startup_is_a_failure(run, pretended, capfd):
    pretended("import sys; sys.exit('no memory')")
    assert cli.main(["serve", str(run), "--port", str(free_port())]) == 1
    said = capfd.readouterr().err
    assert "no memory" in said and "is ready" not in said


NOISY = """
import os, signal, subprocess, sys, time
open("pids", "w").write(f"{os.getpid()} ")
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "a").write(str(engine.pid))
def ended(number, frame):
    print("a hundred lines", number, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, ended)
"""


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_server_ends_with_its_engines(run, tmp_path, number, answers):
    own = NOISY + "open(os.environ['FORGE_AGENTS_SERVER_ANSWERS'], 'w').close()\n" * answers + "time.sleep(600)"
    program = f"""
import signal, sys
from forge_agents.cli import serve, main
signal.signal(signal.SIGINT, signal.default_int_handler)
serve.command = lambda *given: [sys.executable, "-c", {own!r}]
sys.exit(main.main(["serve", {str(run)!r}, "--port", {str(free_port())!r}]))
"""
    words = [sys.executable, "-c", program]
    process = subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    pids = tmp_path / "pids"
    while len(pids.read_text().split() if pids.exists() else []) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    seen = ""
    while process.stdout is not None and ("started server" if answers else "starting server") not in seen:
        seen = process.stdout.readline()
        assert seen, "the server ended"
    process.send_signal(number)
    server, engine = map(int, pids.read_text().split())
    if number is signal.SIGKILL:  # the server hears of it, and its engines are its own to end
        os.kill(engine, signal.SIGKILL)
    said = process.communicate(timeout=60)[0].splitlines()
    if number is not signal.SIGKILL:
        told = "the server is stopped" if answers else "stopped before the server answered"
        stopping = "SIGINT: stopping all processes of this call; press Ctrl-C again to stop at once"
        assert [line for line in said if "hundred" not in line] == [stopping, told] * (number is signal.SIGINT)
        assert ("a hundred lines 15" in said) == answers
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert holds_within(30, lambda: not any(map(runs, (server, engine))))


def test_port_in_use_is_reported_before_startup(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .*choose another --port"):
            serve(ServeConfig(checkpoint=str(run), port=port), say=lambda line: None)


def test_unsupported_head_size_is_reported_before_startup(tiny_models):
    narrow = tiny_models(settings={"head_dim": 16})
    with pytest.raises(ValueError, match=r"heads of 16 channels, and on CPU vLLM .* 32, 48, 64"):
        serve(ServeConfig(checkpoint=str(narrow)), say=lambda line: None)


def answer(middleware, scope):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(middleware(scope, None, send))
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", [(b"authorization", b"Bearer right-token")], 200),
        ("/v1/models", [(b"authorization", b"bearer right-token")], 200),
        ("/v1/models", [], 401),
        ("/v1/models", [(b"authorization", b"Bearer wrong")], 401),
        ("/v1/models", [(b"authorization", b"Basic right-token")], 401),
        ("/v1/models", [(b"authorization", b"Bearer right-token"), (b"authorization", b"Bearer x")], 401),
        ("/v1/messages", [(b"x-api-key", b"right-token")], 200),
        ("/v1/messages", [(b"x-api-key", b"wrong")], 401),
        ("/v1/messages", [(b"x-api-key", b"right-token"), (b"authorization", b"Bearer x")], 401),
        ("/invocations", [], 401),
        ("/tokenize", [(b"authorization", b"Bearer \xff\xfe")], 401),
        ("/metrics", [], 401),
        ("/health/../v1/models", [], 401),
        ("/health", [], 200),
    ],
)
def test_every_path_except_health_needs_the_token(monkeypatch, path, headers, status):
    monkeypatch.setenv("FORGE_AGENTS_SERVER_TOKEN", "right-token")

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    guarded = RequireToken(app)
    assert answer(guarded, {"type": "http", "path": path, "headers": headers, "method": "GET"}) == status
    assert answer(guarded, {"type": "http", "path": path, "headers": headers, "method": "OPTIONS"}) == status
    assert answer(guarded, {"type": "websocket", "path": path, "headers": headers}) == {200: 200, 401: 1008}[status]


def test_wrong_key_is_refused_in_the_format_of_the_protocol(monkeypatch):
    monkeypatch.setenv("FORGE_AGENTS_SERVER_TOKEN", "right-token")
    bodies = []

    async def send(message):
        bodies.append(message.get("body"))

    for headers in ([(b"authorization", b"Bearer wrong")], []):
        asyncio.run(RequireToken(None)({"type": "http", "path": "/v1/models", "headers": headers}, None, send))
    wrong, missing = (json.loads(body) for body in bodies if body)
    assert (wrong["type"], wrong["error"]["type"], wrong["error"]["code"]) == (
        "error", "authentication_error", "invalid_api_key"
    )  # fmt: skip
    assert wrong["error"]["message"].startswith("invalid API key: send the key")
    assert missing["error"]["message"].startswith("no API key: send the key")


def test_server_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv("FORGE_AGENTS_SERVER_TOKEN", raising=False)
    with pytest.raises(ValueError, match="forge-agents serve"):
        RequireToken(None)


POLICY = {"name": "hero", "sampling": {"max_tokens": 9, "stop": ["!"]}, "trainable": True, "lora": None}


def settings(tiny_llama, **more):
    policies = {
        "hero": {**POLICY, "model": str(tiny_llama), "keep_reasoning": "none"},
        "rival": {**POLICY, "model": str(tiny_llama), "name": "rival", "lora": {"rank": 4}},
        "fixed": {**POLICY, "model": str(tiny_llama), "name": "fixed", "trainable": False},
    }
    seats = {"planner": "hero", "coder": "rival", "gpt-4o": "rival", "rival": "hero", "other": "random"}
    engine = {"max_model_len": 64, "dtype": "float32", "tp": 8}
    return {"policies": policies, "policy_mapping": seats, "trainer": {"engine": engine}, **more}


def write_settings(folder, content):
    text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    (folder / "config.yaml").write_text(text)


def test_run_is_served_as_its_policies_were_trained(duel, tiny_llama):
    (duel / "export" / "rival" / "adapter").mkdir()
    write_settings(duel, settings(tiny_llama))
    found = find_run(ServeConfig(checkpoint=str(duel)))
    assert (found.engine.max_model_len, found.engine.dtype, found.engine.tp) == (64, "float32", 1)
    assert found.adapters == {"rival": duel / "export" / "rival" / "adapter"}
    hero, rival, fixed = (found.policies[name] for name in ("hero", "rival", "fixed"))
    assert (hero.model, rival.model, fixed.model) == (str(duel / "export" / "hero"), *[str(tiny_llama)] * 2)
    assert (hero.keep_reasoning, hero.sampling.max_tokens, hero.sampling.stop) == ("none", 9, ("!",))
    assert hero.lora is None and rival.lora.rank == 4
    # a seat comes before a policy of the same name, and whoever is no model is not asked
    assert found.names == {
        "hero": "hero", "rival": "hero", "fixed": "fixed", "planner": "hero", "coder": "rival", "gpt-4o": "rival",
    }
    with pytest.raises(ValueError, match=r"name='mine' is none of .*: hero, rival, fixed, planner"):
        find_run(ServeConfig(checkpoint=str(duel), name="mine"))
    moved = settings(tiny_llama)
    for policy in moved["policies"].values():
        policy["model"] = str(duel / "elsewhere")
    write_settings(duel, moved)
    again = find_run(ServeConfig(checkpoint=str(duel)))  # exports hold all that was learned
    assert again.adapters == {} and again.policies["rival"].model == str(duel / "export" / "rival")
    assert "elsewhere" in again.missing["fixed"] and again.policies.keys() == {"hero", "rival"}
    assert "fixed" not in again.names
    write_settings(duel, settings(tiny_llama))
    shutil.rmtree(duel / "export" / "rival" / "adapter")
    again = find_run(ServeConfig(checkpoint=str(duel)))
    assert again.adapters == {} and again.policies["rival"].model == str(duel / "export" / "rival")
    shutil.rmtree(duel / "export" / "rival")
    with pytest.raises(ModelNotFoundError, match="no model of the trained policy rival"):
        find_run(ServeConfig(checkpoint=str(duel)))


def test_run_of_one_policy_has_the_name_of_its_folder(run, tiny_llama):
    write_settings(run, {"policies": {"hero": {**POLICY, "model": str(tiny_llama)}}})
    assert find_run(ServeConfig(checkpoint=str(run))).names == {"hero": "hero", "guess": "hero"}
    assert find_run(ServeConfig(checkpoint=str(run), name="mine")).names == {"hero": "hero", "mine": "hero"}
    assert find_run(ServeConfig(checkpoint=str(run / "export"))) is None, "an export is a model"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"policies": {"a": {**POLICY, "model": "m", "sampling": {"max_tokens": 0}}}}, "max_tokens=0"),
        ({"policies": {"a": {**POLICY, "model": "m", "spell": 1}}}, "unknown: spell"),
        ({"policies": {"a": {"model": "m"}}}, "'sampling'"),
        ({"policies": {"../../other": {**POLICY, "model": "m"}}}, "'../../other' with name 'hero'"),
        ({"policies": {"a": 1}}, "as this version does"),
        ({"policies": {"a\x1b[2J": {**POLICY, "model": "m", "\x1b[31m": 1}}}, r"\\x1b\[31m"),
    ],
)
def test_unknown_run_settings_are_refused_and_escaped(run, content, says):
    write_settings(run, content)
    with pytest.raises(RunFolderError, match=says) as refused:
        find_run(ServeConfig(checkpoint=str(run)))
    assert "\x1b" not in str(refused.value) and "export instead" in str(refused.value)


@pytest.mark.parametrize("content", ["", "{", "- 1", "policies: 1", "a: !!python/object/apply:os.abort []"])
def test_settings_without_policies_serve_a_model(run, content):
    write_settings(run, content)
    assert find_run(ServeConfig(checkpoint=str(run))) is None
