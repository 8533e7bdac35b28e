import pytest

import forge_agents as fa
from forge_agents.bench.plan import BenchConfig, BenchSampling
from forge_agents.cli import main as cli
from forge_agents.envs import registry
from forge_agents.envs.registry import SuiteDefaults

SORT = "forge/AlphabetSort-v0"


@pytest.fixture
def short(monkeypatch):
    """A suite of one environment that is played its own way."""
    fa.list_suites()  # loads those that come with the package
    monkeypatch.setattr(registry, "_suites", dict(registry._suites))
    fa.register_suite("short-v0", [SORT], episodes=2, seed=5, swap_seats=False, max_tokens=9)
    return "short-v0"


def play(folder, suite, players=None, **more):
    return fa.benchmark(players or {"random": fa.Random()}, suite, out_dir=folder, progress=False, **more)


def test_a_suite_is_played_as_it_says_where_the_caller_says_nothing(short, tmp_path):
    report = play(tmp_path, short)
    own = {"episodes": 2, "seed": 5, "swap_seats": False}
    assert {name: report.settings[name] for name in own} == own and report.planned == 2
    assert report.settings["suite_defaults"] == {**own, "max_tokens": 9}
    assert "Not as the suite says" not in report.markdown()
    again = fa.Report.load(report.save(tmp_path / "board.json"))
    assert again.settings == report.settings


def test_the_first_line_of_a_report_names_every_departure(short, tmp_path, serve_chat):
    server = serve_chat(lambda request: "a")
    players = {"a": server.endpoint_with(sampling=fa.Sampling(max_tokens=7)), "b": f"{server.url}#stub"}
    report = play(tmp_path, short, players, episodes=1, seed=0, swap_seats=True)
    assert (report.settings["episodes"], report.settings["seed"], report.settings["swap_seats"]) == (1, 0, True)
    assert {request["max_tokens"] for request in server.requests} == {7, 9}, "the suite's, of players in words"
    said = (
        "Not as the suite says: episodes 1 instead of 2; seed 0 instead of 5; swap_seats True instead of False; "
        "max_tokens 7 instead of 9 for a"
    )
    page = report.html(tmp_path / "r.html").read_text()
    assert said in page and said.replace("_", "\\_") in report.markdown() and said in " ".join(report.table().split())


def test_environments_by_id_and_reports_of_other_versions_depart_from_nothing(short, tmp_path):
    report = play(tmp_path, SORT, episodes=1)
    assert "suite_defaults" not in report.settings and "Not as" not in report.markdown()
    assert registry.suite_defaults(SORT) == SuiteDefaults() == SuiteDefaults(episodes=64, seed=0, max_tokens=64)


def test_the_command_takes_from_the_suite_what_is_not_said(short, tmp_path, serve_chat):
    server = serve_chat(lambda request: "a")
    words = ["bench", "--suite", short, "--players.a", f"{server.url}#stub", "--sampling.temperature", "0.5"]
    assert cli.main([*words, "--out_dir", str(tmp_path)]) == 0
    assert {(r["max_tokens"], r["temperature"]) for r in server.requests} == {(9, 0.5)}
    assert fa.Report.load(tmp_path / "board.json").settings["seed"] == 5
    config = BenchConfig(players={"a": "http://h/v1#m"}, suite=short, sampling=BenchSampling(max_tokens=3))
    assert config.entrants()["a"].sampling.max_tokens == 3
    with pytest.raises(ValueError, match="max_tokens=0 leaves no room"):
        BenchSampling(max_tokens=0)


def test_what_makes_no_sense_or_is_taken_is_refused(short):
    with pytest.raises(ValueError, match=r"'short-v0' is already .*episodes=2.*choose another name"):
        fa.register_suite("short-v0", [SORT])
    fa.register_suite("short-v0", [SORT], episodes=2, seed=5, swap_seats=False, max_tokens=9)
    for wrong in ({"episodes": 0}, {"seed": -1}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* of a suite must be at least"):
            fa.register_suite("wrong-v0", [SORT], **wrong)


def test_the_suites_that_come_with_the_package():
    found = {name: registry.suite_defaults(name) for name in ("core-v1", "reasoning-v1", "tools-v1", "text-games-v1")}
    assert [own.episodes for own in found.values()] == [32, 16, 12, 12]
    assert [name for name, own in found.items() if not own.swap_seats] == ["tools-v1"]
    assert found["reasoning-v1"].max_tokens == 256 and all(own.seed == 0 for own in found.values())
