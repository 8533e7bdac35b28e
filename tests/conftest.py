"""Shared by all tests: few threads, no hub, tiny models, a chat server, and a check for processes left behind."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
from process_checks import command_of

from forge_agents import imports
from forge_agents.runtime.processes import with_variable

# The suite draws the same examples every time, however long a busy machine takes over one;
# `pytest --hypothesis-profile=default` searches for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

SESSION_VARIABLE = "FORGE_AGENTS_TEST_SESSION"

# Set before any library is imported, because some read them only then.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in ("COLUMNS", "LINES"):  # the size of the terminal changes no output
    os.environ.pop(name, None)
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has the mark of the session that started it
    os.environ[SESSION_VARIABLE] = secrets.token_hex(8)  # children inherit it, grandchildren too
os.umask(0o022)  # programs of other users read files that tests write
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores Ctrl-C for what it starts with "&"
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_models(family="qwen3", tied=False)``: the folder of that tiny model, written once a session. Read-only."""
    from forge_agents.models.tiny import tiny_model

    made: dict[str, Path] = {}

    def folder(**options: object) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp("tiny"), **options)  # type: ignore[arg-type]
        return made[key]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: Callable[..., Path]) -> Path:
    """A tiny Llama model, float32, tied embeddings. Read-only."""
    return tiny_models(family="llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_models: Callable[..., Path]) -> Path:
    """A tiny Qwen3 model, float32, tied embeddings. Read-only."""
    return tiny_models(family="qwen3")


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Path) -> Any:
    """The tokenizer of `tiny_llama`. Do not change it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="session")
def renderer(tiny_llama: Path) -> Any:
    """The renderer of `tiny_llama`."""
    from forge_agents.rollout.rendering import Renderer

    return Renderer.of(tiny_llama)


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """``load_example("tool_use")``: a module made anew from that file in examples/, which actors can import, too."""
    folder = Path(__file__).parents[1] / "examples"
    monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True)
def _environments_of_the_test() -> Iterator[None]:
    """The search path, the modules of `init`'s folders and the ids ``my/...`` last no longer than the test."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    imports._user_folders.clear()
    for name in ("my_env", "my_reward"):
        sys.modules.pop(name, None)
    if registry := sys.modules.get("forge_agents.envs.registry"):
        for own in [id_ for id_ in registry._specs if id_.startswith("my/")]:
            del registry._specs[own]


class ChatServer(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers what ``reply(request)`` says.

    A text is the model's answer, a mapping or bytes are the whole body, ``(status, body)`` adds the status.
    """

    daemon_threads = True

    def __init__(self, reply: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.headers_seen: list[dict[str, str]] = []
        self.under_way, self.most, self.lock = 0, 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def endpoint(self) -> Any:
        return self.endpoint_with()

    def endpoint_with(self, **options: Any) -> Any:
        """``fa.Endpoint`` of this server."""
        from forge_agents.policy import Endpoint

        return Endpoint(self.url, "stub", **options)

    def wait_for_company(self, number: int) -> None:
        """Return when so many requests have been under way at once, and a moment later, for more of them to come."""
        deadline = time.monotonic() + 30
        while self.most < number and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class _ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append(request)
            server.headers_seen.append({name.lower(): value for name, value in self.headers.items()})
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            reply = server.reply(request)
        finally:
            with server.lock:
                server.under_way -= 1
        status, body = reply if isinstance(reply, tuple) else (200, reply)
        if isinstance(body, str):
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": body}}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice],
                    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}}  # fmt: skip
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        if status == 429:
            self.send_header("Retry-After-Ms", "20")
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def serve_chat() -> Iterator[Callable[..., ChatServer]]:
    """``serve_chat(reply)``: a `ChatServer` on loopback that ends with the test."""
    servers = []

    def start(reply: Callable[[dict[str, Any]], Any]) -> ChatServer:
        server = ChatServer(reply)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module", autouse=True)
def _objects_of_earlier_files() -> Iterator[None]:
    """The living objects of earlier files are excluded from garbage collection, too."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Objects of imported modules are excluded from garbage collection in all tests, and later ones are visited rarely.

    With Python's own threshold, garbage collection takes 6 % of the tests' CPU time. Each file ends with a collection.

    The next run reads compiled test files, also where PYTHONDONTWRITEBYTECODE is set. Their compilation takes a third
    of the collection.
    """
    gc.disable()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        with imports.with_lazy_package_names():
            return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow files first, so that none is left for the end when workers share them. End-to-end tests are slow."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("e2e" not in item.path.parts, item.path not in slow))


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test run that leaves processes behind has failed, and cleans up after itself."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if workers := sys.modules.get("forge_agents.envs.workers.env"):
        workers.shutdown()  # idle workers stay for the next environment
    deadline = time.monotonic() + 15
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for pid, command in left.items():
        if reporter is not None:
            reporter.write_line(f"process left behind: {pid} {command}", red=True)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind() -> dict[int, str]:
    """Command lines of living processes, by id, that carry this session's mark."""
    marked = with_variable(SESSION_VARIABLE, os.environ[SESSION_VARIABLE])
    commands = {process.pid: command_of(process.pid) for process in marked if process.pid != os.getpid()}
    # Python's own tracker of shared memory ends with this process; zombies have no command line.
    tracker = "multiprocessing.resource_tracker"
    return {pid: command for pid, command in commands.items() if command and tracker not in command}
