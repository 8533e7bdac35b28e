import http.client
import re
import signal
import subprocess
import sys

import pytest
from viewer_runs import TOKEN, episode, metrics, write_lines

from forge_agents.cli import main as cli
from forge_agents.viewer import server as server_module


@pytest.fixture
def server(serve, run_folder):
    return serve(run_folder)


def test_the_page_and_its_files_are_served(server):
    status, headers, body = server.get()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert 'src="static/app.js"' in body
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css")):
        status, headers, body = server.get(f"static/{name}")
        assert (status, headers["content-type"].split(";")[0]) == (200, kind) and body
    assert server.get("static/nothing.js")[0] == 404


@pytest.mark.parametrize("path", ["static/..%2fapp.py", "static/%2e%2e/app.py", "static/../../cli.py", "static/%00.js"])
def test_files_outside_the_page_are_not_served(server, path):
    assert server.get(path)[0] in (404, 400, 422)


@pytest.mark.parametrize(
    "path", ["", "/", "/api/runs", "/static/app.js", "/wrong-token/", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "/%73ecret/"]
)
def test_requests_without_the_token_are_refused(server, path):
    status, headers, body = server.get(url=f"http://127.0.0.1:{server.port}{path}")
    assert status == 403
    assert TOKEN not in body and "first" not in body
    assert headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "", "localhost.evil"])
def test_foreign_host_names_are_refused_even_with_the_token(server, host):
    assert server.get(host=host)[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:1", "[::1]:80", "localhost"])
def test_forwarded_ports_are_fine(server, host):
    assert server.get(host=host)[0] == 200


def test_two_host_headers_are_refused(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("GET", f"/{TOKEN}/", skip_host=True)
    connection.putheader("Host", "127.0.0.1")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status in (400, 403)
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_server_is_read_only(server, method):
    assert server.get("api/runs", method=method)[0] == 405


def test_responses_have_security_headers(server):
    for path in ("", "api/runs", "static/app.js", "api/runs/0/episodes/1"):
        headers = server.get(path, Origin="http://evil.example")[1]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
        assert "frame-ancestors 'none'" in policy and "require-trusted-types-for 'script'" in policy
        assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
        assert (headers["cache-control"], headers["cross-origin-resource-policy"]) == ("no-store", "same-origin")
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert headers["server"] is None or "uvicorn" in headers["server"]


def test_episodes_are_found_and_opened(server):
    status, _, result = server.get("api/runs/0/episodes?text=zebra&sort=oldest&limit=1")
    assert (status, result["total"], result["rows"][0]["seed"]) == (200, 1, 22)
    _, _, one = server.get(f"api/runs/0/episodes/{result['rows'][0]['n']}")
    assert one["turns"][0]["action"] == "zebra crossing a 0"


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("api/runs/7/metrics", 404, "there is no run 7"),
        ("api/runs/-1/metrics", 404, "there is no run -1"),
        ("api/runs/0/episodes/999", 404, "there is no episode 999"),
        ("api/runs/0/episodes?sort=worst", 400, "Known are newest"),
        ("api/runs/0/episodes?limit=100000", 400, "limit 0 to 500"),
        ("api/runs/0/episodes?reward_from=much", 422, "float"),
        ("api/runs/0/nothing", 422, "metrics"),
        ("reports/0/verifiers", 409, "no verifiers"),
        ("docs", 404, "Not Found"),
        ("openapi.json", 404, "Not Found"),
    ],
)
def test_missing_items_are_reported(server, path, status, message):
    result = server.get(path)
    assert result[0] == status and message in str(result[2])


def test_appended_data_appear(server, run_folder):
    before = server.get("api/runs")[2]["runs"][0]
    write_lines(run_folder / "metrics.jsonl", metrics(1, start=3))
    write_lines(run_folder / "episodes.jsonl", [episode(seed=77)])
    for _ in range(200):
        after = server.get("api/runs")[2]["runs"][0]
        if after["episodes"]["episodes"] == 7:
            break
    assert (after["steps"], after["episodes"]["episodes"]) == (4, 7) and after["stamp"] != before["stamp"]
    assert server.get("api/runs/0/metrics")[2]["step"] == [0, 1, 2, 3]


def test_the_command_prints_an_address_and_ends_with_ctrl_c(server, run_folder):
    command = [sys.executable, "-m", "forge_agents.cli.main", "view", str(run_folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output = "".join(process.stdout.readline() for _ in range(3))
        url = re.search(r"http://127\.0\.0\.1:\d+/([\w-]{32,})/\n", output)
        status, _, body = server.get(url=url[0].strip() + "api/runs")
        assert (status, body["runs"][0]["name"]) == (200, "first")
        assert server.get(url=url[0].strip().replace(url[1], "x" * 32))[0] == 403
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    assert url[1] not in rest + complaints and complaints == ""


def test_view_command_reports_errors(tmp_path, run_folder, capsys):
    assert cli.main(["view", str(tmp_path / "nothing")]) == 1
    assert "is not a folder. Give the out_dir of a run" in capsys.readouterr().err
    (tmp_path / "train.yaml").write_text("")
    assert cli.main(["view", str(tmp_path / "train.yaml")]) == 1
    assert "Did you mean" not in capsys.readouterr().err
    assert cli.main(["view", str(run_folder), "--out", str(tmp_path / "p.html"), "--episodes", "-1"]) == 1
    assert "episodes=-1" in capsys.readouterr().err
    assert cli.main(["view", str(run_folder), "--out", str(tmp_path / "p.html"), "--episodes", "2"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert page.count("zebra crossing a 0") == 1 and "word0" not in page


def test_port_in_use_is_reported(server, run_folder, capsys):
    assert cli.main(["view", str(run_folder), "--port", str(server.port)]) == 1
    assert f"port {server.port} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_port_out_of_range_is_refused(run_folder, port, capsys):
    assert cli.main(["view", str(run_folder), "--port", port]) == 1
    assert f"port={port} must be in [0, 65535]" in capsys.readouterr().err


def test_name_of_a_run_does_not_look_like_the_address(run_folder, monkeypatch):
    folder = run_folder.rename(run_folder.with_name("run\nopen   http:127.0.0.1"))
    monkeypatch.setattr(server_module.Server, "run", lambda self, sockets: None)
    lines = []
    server_module.serve_page([folder], port=0, say=lines.append)
    assert [line.startswith("open") for line in "\n".join(lines).splitlines()] == [False, True, False]
