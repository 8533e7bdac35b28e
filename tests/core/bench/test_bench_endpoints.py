import re
from pathlib import Path

import pytest
import yaml
from bench_helpers import KUHN, play

import forge_agents as fa
from forge_agents.bench import BenchLimits, Report
from forge_agents.bench.entrants import named_players
from forge_agents.bench.fingerprints import player_facts
from forge_agents.bench.plan import BenchConfig
from forge_agents.cli import main as cli
from forge_agents.cli.config import parse

DOCS = Path(__file__).parents[3] / "docs"


def passive(request):
    return "call" if "call" in request["messages"][-1]["content"] else "check"


def read(*words):
    return parse(BenchConfig, words, prog="forge-agents bench", description="")


def test_documented_yaml_sets_every_endpoint_field(tmp_path, monkeypatch):
    (block,) = re.findall(r"```yml\n(.*?)```", (DOCS / "benchmark.md").read_text(), re.DOTALL)
    file = tmp_path / "bench.yaml"
    file.write_text(block)
    config = read(str(file), "--send_key", "RIVAL_KEY@api.example.org", "--endpoints.rival.max_requests", "500")
    output = yaml.safe_load(block)["endpoints"]["rival"]
    rival = config.endpoints["rival"]
    assert rival == fa.Endpoint(**{**output, "sampling": fa.Sampling(**output["sampling"])}, max_requests=500)
    assert (rival.api_key_env, rival.timeout_s, rival.sampling.max_tokens) == ("RIVAL_KEY", 30, 256)
    monkeypatch.setenv("RIVAL_KEY", "k")
    players = config.entrants()
    assert list(players) == ["random", "rival"] and players["rival"].name == "rival"


def test_missing_api_key_is_reported_before_play(monkeypatch):
    monkeypatch.delenv("RIVAL_KEY", raising=False)
    with pytest.raises(ValueError, match="'RIVAL_KEY' is not set"):
        named_players({"rival": fa.Endpoint("http://127.0.0.1:1/v1", "m", api_key_env="RIVAL_KEY")})


def test_duplicate_player_names_are_refused():
    with pytest.raises(ValueError, match="'a' names a player and an endpoint"):
        BenchConfig(players={"a": "random"}, endpoints={"a": fa.Endpoint("http://127.0.0.1:1/v1", "m")})


def test_endpoint_with_a_key_plays_from_the_shell(serve_chat, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RIVAL_KEY", "sesame")
    server = serve_chat(passive)
    rival = ["--endpoints.rival.url", server.url, "--endpoints.rival.model", "stub"]
    rival += ["--endpoints.rival.api_key_env", "RIVAL_KEY", "--endpoints.rival.sampling.max_tokens", "7"]
    words = ["bench", "--players.random", "random", *rival, "--suite", KUHN, "--episodes", "2"]
    assert cli.main([*words, "--out_dir", str(tmp_path)]) == 0
    assert {seen["authorization"] for seen in server.headers_seen} == {"Bearer sesame"}
    assert {request["max_tokens"] for request in server.requests} == {7}
    written = [path.read_text() for path in tmp_path.iterdir()] + [capsys.readouterr().out]
    assert len(written) == 4 and not any("sesame" in text for text in written)
    assert list(Report.load(tmp_path / "board.json").players) == ["random", "rival"]


def test_report_has_tokens_and_cost_of_every_player(serve_chat, tmp_path):
    server = serve_chat(passive)  # counts 10 tokens read and 2 written for every answer
    players = {
        "dear": server.endpoint_with(price_in=100.0, price_out=2000.0),
        "free": server.endpoint_with(),
        "random": fa.Random(),
    }
    report = play(tmp_path, players, episodes=4)
    requests = {name: sum(s.decisions for r in report.records for s in r.seats.values() if s.player == name)
             for name in players}  # fmt: skip
    dear = report.spent["dear"]
    assert (dear.prompt_tokens, dear.tokens) == (10 * requests["dear"], 2 * requests["dear"])
    assert dear.cost == pytest.approx(requests["dear"] * (10 * 100 + 2 * 2000) / 1e6)
    assert (report.spent["free"].cost, report.spent["random"].tokens) == (0, 0)
    again = Report.load(report.save(tmp_path / "board.json"))
    assert again.spent == report.spent and again.as_json()["spent"]["dear"]["cost"] == dear.cost
    row = f"| dear | {dear.prompt_tokens:,} | {dear.tokens:,} | {dear.cost:.4f} |"
    assert row in again.markdown() and "| free | " in again.markdown()
    assert again.players["dear"]["fingerprint"] == player_facts(server.endpoint)["fingerprint"], "a price plays nothing"


def test_cost_limit_stops_cleanly_and_counts_failed_episodes(serve_chat, tmp_path):
    price = 1e6 / 12  # of either, so that an answer costs 1
    part = play(
        tmp_path,
        {"dear": serve_chat(passive).endpoint_with(price_in=price, price_out=price)},
        episodes=4,
        limits=BenchLimits(max_cost=4.5, max_concurrent_episodes=1),
    )
    assert part.stopped == "max_cost=4.5 was reached" and 4.5 <= part.spent["dear"].cost < 8 and part.missing == 1
    answers = iter(range(10_000))
    moody = serve_chat(lambda request: passive(request) if next(answers) % 2 == 0 else (403, {"error": "no"}))
    broken = play(
        tmp_path,
        {"dear": moody.endpoint_with(price_in=price, price_out=price, retries=0)},
        episodes=4,
        limits=BenchLimits(max_cost=1.5, max_concurrent_episodes=1),
    )
    assert broken.stopped == "max_cost=1.5 was reached" and len(broken.records) == 2
    assert all(record.error for record in broken.records) and broken.spent["dear"].cost == 0
