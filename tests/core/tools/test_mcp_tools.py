import asyncio
import contextlib
import copy
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_servers import served

from forge_agents.envs.env import Outcome
from forge_agents.runtime import peers
from forge_agents.tools import ToolCall, mcp, run_tool
from forge_agents.tools.env import ToolEnv
from forge_agents.tools.mcp import McpServerError, mcp_tools

pytest.importorskip("mcp")

SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shelf")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fail(why: str) -> str:
    "Fail."
    raise ToolError(why)

@server.tool()
async def sleep(seconds: float) -> str:
    "Sleep."
    import anyio
    await anyio.sleep(seconds)
    return "awake"

@server.tool()
def pid() -> int:
    "Tell the process."
    return os.getpid()

if __name__ == "__main__":
    server.run("stdio")
"""


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "shelf.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def tools(script):
    """Calls of ``sleep`` have a short time limit, the others a long one."""
    make = mcp._Connection._tool

    def limited(connection, definition, call_s):
        return make(connection, definition, 0.5 if definition.name == "sleep" else call_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mcp._Connection, "_tool", limited)
        with mcp_tools([sys.executable, str(script)], connect_s=100.0, call_s=60.0) as result:
            yield result


def test_stdio_server_tools_have_its_schemas(tools):
    by_name = {tool.name: tool for tool in tools}
    assert set(by_name) == {"add", "fail", "sleep", "pid"}
    assert by_name["add"].description == "Add two numbers."
    assert by_name["add"].parameters["required"] == ["a"]
    assert by_name["add"].parameters["properties"]["b"]["type"] == "integer"


def test_calls_reach_the_server(tools):
    result = run_tool(tools, call("add", a=2, b=40))
    assert (result.ok, result.content) == (True, "42")
    assert run_tool(tools, call("add", a=2)).content == "3"


def test_invalid_calls_and_failing_tools_are_error_texts(tools):
    assert "argument 'a' of add is 'x'" in run_tool(tools, call("add", a="x")).content
    failed = run_tool(tools, call("fail", why="because"))
    assert not failed.ok and "because" in failed.content


def test_call_after_a_late_call_works(tools):
    started = time.monotonic()
    late = run_tool(tools, call("sleep", seconds=60))
    assert not late.ok and "shelf.py" in late.content and time.monotonic() - started < 30
    assert run_tool(tools, call("add", a=1)).ok


def test_forks_of_an_environment_share_the_server(tools):
    class Adder(ToolEnv):
        possible_agents = ("adder",)

        def setup(self, rng):
            self.numbers = rng.integers(100, size=2).tolist()

        def tools(self, agent):
            return tools

        def instructions(self, agent):
            return self.tool_help(agent)

        def observe_text(self, agent):
            return str(self.numbers)

        def act(self, agent, action):
            return Outcome(rewards={agent: float(action == str(sum(self.numbers)))}, done=True)

    env = Adder(tool_format="plain")
    env.reset(seed=0)
    fork = copy.deepcopy(env)
    for game in (env, fork):
        game.step("CALL add(a={}, b={})".format(*game.numbers))
        game.step(game.observe("adder"))
        assert game.rewards == {"adder": 1.0}


def test_dead_server_is_an_error_text_and_one_warning(script, caplog):
    with mcp_tools([sys.executable, str(script)], connect_s=100.0, call_s=60.0) as tools:
        os.kill(int(run_tool(tools, call("pid")).content), signal.SIGKILL)
        for _ in range(4):
            gone = run_tool(tools, call("add", a=1))
            assert not gone.ok and "shelf.py" in gone.content
    closed = run_tool(tools, call("add", a=1))
    assert not closed.ok and "closed" in closed.content
    warned = [record.message for record in caplog.records if record.name == mcp.__name__]
    assert len(warned) == 1 and "shelf.py' was lost. All further calls of its tools fail" in warned[0]


REPEATS = r"""
import json, sys

as_bytes = sys.argv[1] == "bytes"
odd = "\udcff" if as_bytes else "\ud83d"
for line in sys.stdin:
    request = json.loads(line)
    given = request.get("params") or {}
    result = {"tools": [{"name": "read", "description": "a" if as_bytes else odd, "inputSchema": {"type": "object"}}]}
    if request["method"] == "initialize":
        about = {"name": "s", "version": "1"}
        result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    elif request["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": given["arguments"]["text"] + odd}]}
    if "id" in request:
        answer = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}, ensure_ascii=not as_bytes)
        sys.stdout.buffer.write(answer.encode("utf-8", "surrogateescape") + b"\n")
        sys.stdout.buffer.flush()
"""
"""A server that repeats a text, and appends a byte that is no UTF-8 or the escape of half of a surrogate pair."""


@pytest.mark.parametrize(("odd", "description"), [("bytes", "a"), ("half of a pair", "\ufffd")])
def test_results_that_are_no_unicode_are_read_at_once_and_end_no_connection(tmp_path, odd, description):
    server = tmp_path / "repeats.py"
    server.write_text(REPEATS)
    with mcp_tools([sys.executable, str(server), odd], connect_s=100.0, call_s=60.0) as tools:
        assert tools[0].description == description
        began = time.monotonic()
        for text in ("one", "two"):
            result = run_tool(tools, call("read", text=text))
            assert (result.ok, result.content) == (True, f"{text}\ufffd")
        assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    "server",
    [
        ["no-such-program-at-all"],
        [sys.executable, "-c", "import sys; sys.exit('broken')"],
        "http://127.0.0.1:9/mcp",
    ],
)
def test_missing_server_error_names_it(server):
    before = set(threading.enumerate())
    name = "http://127.0.0.1:9'" if isinstance(server, str) else Path(server[0]).name
    with pytest.raises(McpServerError, match=name), mcp_tools(server):
        pass
    assert set(threading.enumerate()) <= before


SECRET = "s3cret-token"


@pytest.mark.parametrize(
    ("server", "more"),
    [
        (["no-such-program", "--token", SECRET], {}),
        ([f"/no/such/{SECRET}/program"], {}),
        ([sys.executable, "-c", "import sys; sys.exit(sys.argv)", f"--token={SECRET}"], {}),
        ([sys.executable, "-c", "import sys; sys.exit(3)"], {"env": {"TOKEN": SECRET}}),
        (f"http://127.0.0.1:9/{SECRET}/mcp?key={SECRET}", {"headers": {"Authorization": f"Bearer {SECRET}"}}),
        (f"http://user:{SECRET}@127.0.0.1:9/mcp", {}),
        (f"nonsense://{SECRET}@127.0.0.1/mcp", {}),
    ],
)
def test_errors_contain_no_tokens(server, more):
    with pytest.raises(McpServerError) as failure, mcp_tools(server, **more):
        pass
    assert SECRET not in "".join(traceback.format_exception(failure.value, chain=True))
    assert "127.0.0.1" in str(failure.value) or "program" in str(failure.value) or "python" in str(failure.value)


def test_error_text_of_a_dead_server_contains_no_tokens(script):
    with mcp_tools([sys.executable, str(script), "--token", SECRET], connect_s=100.0, call_s=60.0) as tools:
        os.kill(int(run_tool(tools, call("pid")).content), signal.SIGKILL)
        for _ in range(2):
            told = run_tool(tools, call("add", a=1))
            assert not told.ok and "shelf.py" in told.content and SECRET not in told.content


def test_errors_of_a_server_do_not_control_the_terminal(tmp_path):
    server = tmp_path / "rude.py"
    server.write_text(
        "import json, sys\n"
        "error = {'code': -1, 'message': '\\x1b]52;c;cHduZWQ=\\x07 no \\u202e'}\n"
        "for line in sys.stdin:\n"
        "    if 'id' in (request := json.loads(line)):\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': request['id'], 'error': error}), flush=True)\n"
    )
    with pytest.raises(McpServerError, match="cHduZWQ") as failure, mcp_tools([sys.executable, str(server)]):
        pass
    assert str(failure.value).isprintable()


def test_silent_server_times_out():
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(McpServerError, match="no answer within 0.5 s"), mcp_tools(silent, connect_s=0.5):
        pass


def test_tools_of_one_name_on_several_pages_are_refused(tmp_path):
    server = tmp_path / "pages.py"
    server.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    given, names = request.get('params') or {}, sys.argv[1].split() or map(str, range(5000))\n"
        "    page = {'tools': [{'name': name, 'inputSchema': {'type': 'object'}} for name in names]}\n"
        "    if request.get('method') == 'initialize':\n"
        "        about = {'name': 's', 'version': '1'}\n"
        "        page = {'protocolVersion': given['protocolVersion'], 'capabilities': {'tools': {}}}\n"
        "        page['serverInfo'] = about\n"
        "    elif 'cursor' not in given:\n"
        "        page = {'tools': [{'name': 'search', 'inputSchema': {'type': 'object'}}], 'nextCursor': '1'}\n"
        "    if 'id' in request:\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': request['id'], 'result': page}), flush=True)\n"
    )
    with mcp_tools([sys.executable, str(server), "find"]) as two:
        assert [tool.name for tool in two] == ["search", "find"]
    with (
        pytest.raises(McpServerError, match="several tools that are called 'search'"),
        mcp_tools([sys.executable, str(server), "search"]),
    ):
        pass
    with (
        pytest.raises(McpServerError, match="it lists 5001 tools or more. Expected at most 4096"),
        mcp_tools([sys.executable, str(server), ""]),
    ):
        pass


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"name": "empty"}, "it lists 4097 tools or more. Expected at most 4096"),
        ({"name": "large", "description": "a" * 3_000_000}, "its tools have more than 8 MiB"),
        ({"name": "large", "inputSchema": {"x": [[1]] * 700_000}}, "its tools have more than 8 MiB"),
    ],
    ids=["many", "descriptions", "schemas"],
)
def test_pages_of_tools_without_end_are_refused(tool, message):
    from mcp.types import ListToolsResult
    from mcp.types import Tool as McpTool

    class Client:
        pages = 0

        async def list_tools(self, cursor=None):
            assert cursor == (str(self.pages) if self.pages else None) and self.pages < 50
            self.pages += 1
            tools = [McpTool.model_validate({"inputSchema": {}, **tool})] * (1 if tool["name"] == "large" else 241)
            return ListToolsResult(tools=tools, next_cursor=str(self.pages))

    client = Client()
    with pytest.raises(ValueError, match=message):
        asyncio.run(mcp._all_tools(client))
    assert client.pages == (3 if tool["name"] == "large" else 17)


def test_patterns_of_an_output_schema_are_not_matched(tmp_path):
    """Matching this pattern takes years and holds the interpreter's lock."""
    server = tmp_path / "pattern.py"
    server.write_text(
        "import json, sys\n"
        "schema = {'type': 'object', 'properties': {'a': {'type': 'string', 'pattern': '^(a+)+$'}}}\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    kind, given = request.get('method'), request.get('params') or {}\n"
        "    result = {'content': [], 'structuredContent': {'a': 'a' * 60 + '!'}}\n"
        "    if kind == 'initialize':\n"
        "        result = {'protocolVersion': given['protocolVersion'], 'capabilities': {'tools': {}}}\n"
        "        result['serverInfo'] = {'name': 's', 'version': '1'}\n"
        "    elif kind == 'tools/list':\n"
        "        result = {'tools': [{'name': 'f', 'inputSchema': {'type': 'object'}, 'outputSchema': schema}]}\n"
        "    if 'id' in request:\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': request['id'], 'result': result}), flush=True)\n"
    )
    with mcp_tools([sys.executable, str(server)], connect_s=100.0, call_s=60.0) as tools:
        assert run_tool(tools, call("f")).content == json.dumps({"a": "a" * 60 + "!"})


def test_blocking_client_is_reported(monkeypatch):
    held, connection = threading.Event(), mcp._Connection("stub", ())
    try:
        monkeypatch.setattr(mcp, "_STOP_TIMEOUT_S", 0.01)
        with pytest.raises(McpServerError, match=r"'stub': gave no answer .* blocks"):
            connection.open(lambda lost: held.wait(), 0.01, 1.0)
    finally:
        monkeypatch.undo()
        held.set()
        connection.close()


@pytest.fixture
def address(script):
    """The same server over streamable HTTP, on a free port of loopback, in a thread."""
    space = {"__name__": "shelf"}
    exec(compile(script.read_text(), str(script), "exec"), space)
    with served(space["server"].streamable_http_app()) as url:
        yield f"{url}/mcp"


def test_streamable_http_server_works(address):
    with mcp_tools(address, call_s=60.0, headers={"Authorization": "Bearer token"}) as tools:
        assert run_tool(tools, call("add", a=20, b=22)).content == "42"
        assert "because" in run_tool(tools, call("fail", why="because")).content


def test_server_of_another_user_gets_no_token(address, monkeypatch):
    rows = peers.tcp_rows
    monkeypatch.setattr(peers, "tcp_rows", lambda: [(*row[:3], "4711", row[4]) for row in rows()])
    with mcp_tools(address) as tools:
        assert run_tool(tools, call("add", a=20, b=22)).content == "42"
    with (
        pytest.raises(McpServerError, match="user 4711 of this machine listens on port"),
        mcp_tools(address, headers={"Authorization": "Bearer token"}),
    ):
        pass


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_encoding_that_takes_quadratic_time_is_ignored(kind):
    import httpx2

    headers = {"content-type": f"{kind}; charset=punycode"}
    response = httpx2.Response(200, headers=headers, stream=httpx2.ByteStream(b""))
    asyncio.run(mcp._read_answer(response, lost=lambda: None))
    assert response.encoding == "utf-8"


# ---- what the model reads of a result

CONTENTS = """
import sys
from mcp.server.mcpserver import MCPServer
from mcp.types import (
    AudioContent, BlobResourceContents, CallToolResult, EmbeddedResource, ImageContent, ResourceLink, TextContent,
    TextResourceContents,
)

server = MCPServer("contents")
URI = "file:///notes.md"
TEXT = TextContent(type="text", text="before")

def embedded(kind, **about):
    return EmbeddedResource(type="resource", resource=kind(**about))

NOTES = embedded(TextResourceContents, uri=URI, mime_type="text/markdown", text="# Notes")
EMPTY = embedded(TextResourceContents, uri=URI, text="")
BLOB = embedded(BlobResourceContents, uri="file:///a.pdf", mime_type="application/pdf", blob="AA==")
LINK = ResourceLink(
    type="resource_link", uri="file:///b.txt", name="b", description="the letter b", mime_type="text/plain"
)
IMAGE = ImageContent(type="image", data="AA==", mime_type="image/png")
AUDIO = AudioContent(type="audio", data="AA==", mime_type="audio/wav")
TABLE = {"rows": [1, 2], "name": "caf\\u00e9"}
RESULTS = {
    "text": dict(content=[TEXT]),
    "resource": dict(content=[NOTES]),
    "both": dict(content=[TEXT, NOTES, IMAGE]),
    "structured": dict(content=[], structured_content=TABLE),
    "structured and text": dict(content=[TEXT], structured_content=TABLE),
    "structured and its text": dict(
        content=[TextContent(type="text", text='{"name": "caf\\u00e9",\\n "rows": [1, 2]}')], structured_content=TABLE
    ),
    "wrapped value and its text": dict(content=[TEXT], structured_content={"result": "before"}),
    "structured and resource": dict(content=[NOTES], structured_content=TABLE),
    "structured and empty resource": dict(content=[EMPTY], structured_content=TABLE),
    "structured and image": dict(content=[IMAGE], structured_content=TABLE),
    "structured empty": dict(content=[], structured_content={}),
    "blob": dict(content=[BLOB]),
    "link": dict(content=[LINK]),
    "image": dict(content=[IMAGE, AUDIO]),
    "nothing": dict(content=[]),
    "failed resource": dict(content=[NOTES], is_error=True),
    "failed structured": dict(content=[], structured_content={"code": 7}, is_error=True),
    "failed": dict(content=[], is_error=True),
}

@server.tool()
def give(kind: str) -> CallToolResult:
    "Give."
    return CallToolResult(**RESULTS[kind])

server.run("stdio")
"""


@pytest.fixture(scope="module")
def give(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "contents.py"
    path.write_text(CONTENTS)
    with mcp_tools([sys.executable, str(path)], connect_s=100.0, call_s=60.0) as result:
        yield lambda kind: run_tool(result, call("give", kind=kind))


TABLE = '{"rows": [1, 2], "name": "caf\u00e9"}'


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("text", "before"),
        ("resource", "# Notes"),
        ("both", "before\n# Notes\n[image, image/png]"),
        ("structured", TABLE),
        ("structured and text", f"before\n{TABLE}"),
        ("structured and resource", f"# Notes\n{TABLE}"),
        ("structured and its text", '{"name": "caf\u00e9",\n "rows": [1, 2]}'),
        ("wrapped value and its text", "before"),
        ("structured and empty resource", f"[resource, file:///notes.md]\n{TABLE}"),
        ("structured and image", f"[image, image/png]\n{TABLE}"),
        ("structured empty", "{}"),
        ("blob", "[resource, file:///a.pdf, application/pdf]"),
        ("link", "[resource, b, file:///b.txt, text/plain, the letter b]"),
        ("image", "[image, image/png]\n[audio, audio/wav]"),
        ("nothing", ""),
    ],
)
def test_result_contains_texts_resources_and_structured_content(give, kind, content):
    result = give(kind)
    assert (result.ok, result.content) == (True, content)


@pytest.mark.parametrize(
    ("kind", "content"),
    [("failed resource", "# Notes"), ("failed structured", '{"code": 7}'), ("failed", "give failed")],
)
def test_failed_call_contains_the_reason(give, kind, content):
    result = give(kind)
    assert (result.ok, result.content) == (False, f"Error: {content}")


def test_response_without_end_is_refused():
    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
                    while True:
                        connection.sendall(b" " * (1 << 20))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        with (
            pytest.raises(McpServerError, match="the response has more than 32 MiB"),
            mcp_tools(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"),
        ):
            pass
        listener.shutdown(socket.SHUT_RDWR)


class Flaky(BaseHTTPRequestHandler):
    """A server whose tool answers as its argument says."""

    protocol_version = "HTTP/1.1"
    answers = {
        "endless": b" " * (33 << 20),
        "values": b'{"type":"text"},' * 50_001,
        "encoded": b"{}",
        "broken off": b"{",
    }

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        how = request.get("params", {}).get("arguments", {}).get("how")
        if request["method"] == "initialize":
            result = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "flaky", "version": "1"}
        elif request["method"] == "tools/list":
            schema = {"type": "object", "properties": {"how": {"type": "string"}}}
            result = {"tools": [{"name": "act", "inputSchema": schema}]}
        else:
            result = {"content": [{"type": "text", "text": "fine"}]}
        if how == "no HTTP":
            self.wfile.write(b"HTTP/9.9 no\r\n\r\n")
            self.close_connection = True
            return
        body = json.dumps({"jsonrpc": "2.0", "id": request.get("id"), "result": result}).encode()
        if how in ("endless", "encoded", "broken off"):
            body = self.answers[how]
        elif how == "values":
            body = body.replace(b'{"type": "text", "text": "fine"}', self.answers[how][:-1])
        self.send_response(200 if "id" in request else 202)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body) + (how == "broken off")))
        if how == "encoded":
            self.send_header("content-encoding", "br")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = how == "broken off"

    def do_GET(self):
        self.send_error(405)

    def log_message(self, *words):
        pass


@pytest.fixture
def flaky():
    with ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("endless", "the response has more than 32 MiB"),
        ("values", "the answer has more than 100000 values"),
        ("encoded", "the response has another compression than gzip"),
        ("broken off", "without sending complete message body"),
        ("no HTTP", "Connection closed"),
    ],
)
def test_one_bad_answer_does_not_end_the_connection(flaky, how, reason):
    """A model may cause the answer, and the tools of all episodes share the connection."""
    with mcp_tools(f"http://127.0.0.1:{flaky.server_port}/mcp", connect_s=60.0, call_s=60.0) as tools:
        bad = run_tool(tools, call("act", how=how))
        assert not bad.ok and reason in bad.content
        assert run_tool(tools, call("act", how="well")).content == "fine"


def test_session_that_a_restarted_server_forgot_is_opened_again(flaky, monkeypatch):
    """The server refuses each request of a session that it does not know."""
    sessions, act, end = set(), Flaky.do_POST, Flaky.end_headers

    def end_headers(self):
        if "mcp-session-id" not in self.headers:
            sessions.add(f"session-{len(sessions)}")
            self.send_header("mcp-session-id", f"session-{len(sessions) - 1}")
        end(self)

    def answer(self):
        is_known = self.headers.get("mcp-session-id") in {None, *sessions} - forgotten
        act(self) if is_known else self.send_error(404)

    forgotten = set()
    monkeypatch.setattr(Flaky, "end_headers", end_headers)
    monkeypatch.setattr(Flaky, "do_POST", answer)
    with mcp_tools(f"http://127.0.0.1:{flaky.server_port}/mcp", connect_s=60.0, call_s=60.0) as tools:
        assert run_tool(tools, call("act", how="well")).content == "fine"
        forgotten |= sessions
        assert not run_tool(tools, call("act", how="well")).ok
        assert run_tool(tools, call("act", how="well")).content == "fine"
    assert sessions - forgotten


def test_call_after_a_blocked_connection_attempt_uses_no_lost_client(monkeypatch):
    free, connection = threading.Event(), mcp._Connection("stub", ())
    connection._client = SimpleNamespace()
    connection._connect = lambda: connection._begin(lambda lost: free.wait(), 0.01)
    connection._ended.set()
    try:
        monkeypatch.setattr(mcp, "_STOP_TIMEOUT_S", 0.01)
        with pytest.raises(ValueError, match="blocks"):
            connection._connected()
        with pytest.raises(ValueError, match="was lost"):
            connection._connected()
    finally:
        monkeypatch.undo()
        free.set()
        connection.close()


def test_lost_connection_is_not_opened_again_for_each_call(flaky, monkeypatch):
    opened, begin = [], mcp._Connection._begin
    monkeypatch.setattr(mcp._Connection, "_begin", lambda self, *args: opened.append(0) or begin(self, *args))
    with mcp_tools(f"http://127.0.0.1:{flaky.server_port}/mcp", connect_s=60.0, call_s=60.0) as tools:
        assert "Connection closed" in run_tool(tools, call("act", how="no HTTP")).content
        monkeypatch.setattr(Flaky, "do_POST", lambda self: self.send_error(500))
        assert "Start it by hand" in run_tool(tools, call("act", how="well")).content
        assert "was lost" in run_tool(tools, call("act", how="well")).content
        assert len(opened) == 2
        monkeypatch.undo()
        monkeypatch.setattr(mcp, "_RECONNECT_S", 0.0)
    closed = run_tool(tools, call("act", how="well"))
    assert not closed.ok and "is closed" in closed.content


@pytest.mark.parametrize(
    ("result", "accepted"),
    [
        ({"content": [{"type": "text"}] * 33_333}, True),
        ({"content": [{"type": "text"}] * 50_001}, False),
        ({"content": [{"type": "resource_link", "icons": [{}] * 100_001}]}, False),
        ({"content": [], "structuredContent": {"rows": [[1]] * 200_000}}, True),
        ({"tools": [{"name": "a", "inputSchema": {"properties": {str(n): {} for n in range(100_001)}}}]}, True),
        ({"tools": [{"name": "a", "annotations": {str(n): {} for n in range(100_001)}}]}, False),
    ],
)
def test_answers_of_many_checked_values_are_refused(result, accepted):
    """Values outside of schemas and structured content, which the library compares with its own classes."""
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCError, JSONRPCResponse

    message = SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=7, result=result))
    bounded = mcp._bounded(message)
    assert (bounded is message) == accepted
    if not accepted:
        assert isinstance(bounded.message, JSONRPCError) and bounded.message.id == 7


def test_a_server_that_pings_without_end_fills_no_memory(monkeypatch):
    """Only answers pass, and one ping in a time."""

    async def messages():
        for method in ("ping", "notifications/message", "ping", "roots/list", None):
            yield SimpleNamespace(message=SimpleNamespace(method=method))
        yield ValueError("of the library")

    async def passed():
        read = [message async for message in mcp._Answers(messages(), lambda: None)]
        return [message if isinstance(message, ValueError) else message.message.method for message in read]

    first, second, third = asyncio.run(passed())
    assert (first, second) == ("ping", None) and isinstance(third, ValueError)
    monkeypatch.setattr(mcp, "_PING_S", 0.0)
    assert asyncio.run(passed())[:3] == ["ping", "ping", None]


def test_long_text_next_to_structured_content_is_not_parsed(monkeypatch):
    """JSON of ten million lists in a text took 0.9 GB, and 10 s in which no other thread ran."""
    parsed = []
    monkeypatch.setattr(mcp, "bounded_json", lambda text: parsed.append(text) or json.loads(text))
    assert not mcp._contain(["[" + "[]," * 1000 + "0]"], {"a": 1})
    assert parsed == []
    assert mcp._contain([json.dumps({"a": [1, 2]}, indent=4)], {"a": [1, 2]})
