import json

import bench_helpers
import pytest
from bench_helpers import KUHN, SORT
from refusals import raises

import forge_agents as fa
from forge_agents.bench import Report
from forge_agents.bench.plan import BenchConfig, BenchSampling
from forge_agents.cli import main as cli
from forge_agents.envs import registry
from forge_agents.envs.registry import SuiteDefaults
from forge_agents.errors import ForgeError


@pytest.fixture
def short(monkeypatch):
    """A suite of one environment with its own defaults."""
    fa.list_suites()  # loads those that come with the package
    monkeypatch.setattr(registry, "_suites", dict(registry._suites))
    fa.register_suite("short-v0", [SORT], episodes=2, seed=5, swap_agents=False, max_tokens=9)
    return "short-v0"


def play(folder, suite, players=None, **options):
    options = {"episodes": None, **options}
    return bench_helpers.play(folder, players or {"random": fa.Random()}, suite, **options)


def test_suite_defaults_apply(short, tmp_path):
    report = play(tmp_path, short)
    defaults = {"episodes": 2, "seed": 5, "swap_agents": False}
    assert {name: report.settings[name] for name in defaults} == defaults and report.planned == 2
    assert report.settings["suite_defaults"] == {**defaults, "max_tokens": 9}
    assert "Differs from the suite" not in report.markdown()
    assert Report.load(report.save(tmp_path / "board.json")).settings == report.settings


def test_headline_names_every_departure_from_the_suite(short, tmp_path, serve_chat):
    server = serve_chat(lambda request: "a")
    players = {"a": server.endpoint_with(sampling=fa.Sampling(max_tokens=7)), "b": f"{server.url}#stub"}
    report = play(tmp_path, short, players, episodes=1, seed=0, swap_agents=True)
    assert (report.settings["episodes"], report.settings["seed"], report.settings["swap_agents"]) == (1, 0, True)
    assert {request["max_tokens"] for request in server.requests} == {7, 9}, "the suite's, of players in words"
    departures = (
        "Differs from the suite: episodes 1 instead of 2; seed 0 instead of 5; swap_agents True instead of False; "
        "max_tokens 7 instead of 9 for a"
    )
    page = report.html(tmp_path / "r.html").read_text()
    assert departures in page and departures.replace("_", "\\_") in report.markdown()
    assert departures in " ".join(report.table().split())


def test_single_environments_have_no_departures(short, tmp_path):
    report = play(tmp_path, SORT, episodes=1)
    assert "suite_defaults" not in report.settings and "Not as" not in report.markdown()
    assert registry.suite_defaults(SORT) == SuiteDefaults() == SuiteDefaults(episodes=64, seed=0, max_tokens=64)


def test_command_uses_suite_defaults(short, tmp_path, serve_chat):
    server = serve_chat(lambda request: "a")
    words = ["bench", "--suite", short, "--players.a", f"{server.url}#stub", "--sampling.temperature", "0.5"]
    assert cli.main([*words, "--out_dir", str(tmp_path)]) == 0
    assert {(r["max_tokens"], r["temperature"]) for r in server.requests} == {(9, 0.5)}
    assert Report.load(tmp_path / "board.json").settings["seed"] == 5
    config = BenchConfig(players={"a": "http://h/v1#m"}, suite=short, sampling=BenchSampling(max_tokens=3))
    assert config.entrants()["a"].sampling.max_tokens == 3
    raises(ValueError, "max_tokens=0 leaves no room", BenchSampling, max_tokens=0)


def test_invalid_or_duplicate_suites_are_refused(short):
    with pytest.raises(ValueError, match=r"'short-v0' is already .*episodes=2.*Choose another name"):
        fa.register_suite("short-v0", [SORT])
    fa.register_suite("short-v0", [SORT], episodes=2, seed=5, swap_agents=False, max_tokens=9)
    for wrong in ({"episodes": 0}, {"seed": -1}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* of a suite must be at least"):
            fa.register_suite("wrong-v0", [SORT], **wrong)


def test_suites_and_ids_mix_in_one_list(short, tmp_path):
    report = play(tmp_path, [short, KUHN], episodes=1)
    assert [environment.id for environment in report.environments] == [SORT, KUHN]
    assert (report.settings["suite"], report.settings["seed"]) == (f"{short}+{KUHN}", 5)
    assert play(tmp_path, f"{short}+{KUHN}", episodes=1).timing["played"] == 0, "its name says it, too"
    both = registry.suite_defaults(f"{short}+{KUHN}")
    assert both == SuiteDefaults(episodes=64, seed=5, swap_agents=True, max_tokens=64)
    assert registry.suite_defaults(f"{short}+reasoning-v1") == SuiteDefaults(episodes=16, seed=5, max_tokens=256)
    once = play(tmp_path, [short, SORT], episodes=1)
    assert [environment.id for environment in once.environments] == [SORT], "each environment counts once"
    changed = play(tmp_path, {"duel-v0": {}, KUHN: {"max_turns": 2}}, episodes=1)
    arguments = {environment.id: dict(environment.kwargs) for environment in changed.environments}
    assert arguments[KUHN] == {"max_turns": 2} and len(arguments) == 4
    alone = play(tmp_path, [short])
    assert alone.settings["suite"] == short and alone.settings["suite_defaults"]["episodes"] == 2
    raises(ValueError, "needs one or more different ids or suites", play, tmp_path, [short, short])
    (tmp_path / "mix.yaml").write_text(f"suite: [{short}, {KUHN}]\nplayers: {{random: random}}\nepisodes: 1\n")
    assert cli.main(["bench", str(tmp_path / "mix.yaml"), "--out_dir", str(tmp_path)]) == 0
    assert cli.main(["bench", "--suite", f"{short}+{KUHN}x", "--players.a", "random"]) == 1


def test_python_saves_the_same_report_as_the_command(short, tmp_path):
    report = play(tmp_path / "python", short)
    assert Report.load(tmp_path / "python" / "board.json").settings == report.settings
    words = ["bench", "--suite", short, "--players.random", "random", "--out_dir", str(tmp_path / "command")]
    assert cli.main([*words, "--json", str(tmp_path / "other.json")]) == 0
    result = {name: {file.name for file in (tmp_path / name).iterdir()} for name in ("python", "command")}
    assert result["python"] == result["command"] == {"episodes.jsonl", "board.json", ".episodes.lock"}
    assert Report.load(tmp_path / "other.json").settings == report.settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: fa.suite("core"), "there is no suite 'core'. Did you mean 'core-v1'"),
        (lambda: fa.suite("KuhnPoker"), f"there is no suite 'KuhnPoker'. Did you mean '{KUHN}'"),
        (lambda: fa.suite(KUHN), "is an environment, not a suite"),
        (lambda: fa.make("core-v1"), r"'core-v1' is a suite: fa.suite\('core-v1'\)"),
        (lambda: fa.make("core-v2"), "no environment is registered as 'core-v2'. Did you mean 'core-v1'"),
        (lambda: fa.make("my/Own-v0"), "use 'my_module:my/Own-v0'"),
        (lambda: play("x", ["duel-v0", "cor-v1"]), "there is no suite 'cor-v1'. Did you mean 'core-v1'"),
        (lambda: play("x", "duel-v0", {"r": "randm"}), "player 'randm' is neither .*Did you mean 'random'"),
    ],
)
def test_errors_suggest_suites_environments_and_players(options, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    raises((ForgeError, ValueError), message, options)


def test_the_suites_that_come_with_the_package():
    result = {name: registry.suite_defaults(name) for name in ("core-v1", "reasoning-v1", "text-games-v1")}
    assert [own.episodes for own in result.values()] == [32, 16, 12]
    assert all(defaults.swap_agents for defaults in result.values())
    assert result["reasoning-v1"].max_tokens == 256 and all(own.seed == 0 for own in result.values())


@pytest.fixture
def own_module(short, tmp_path, monkeypatch):
    """A module that registers an environment and a suite when it is imported."""
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import forge_agents as fa\n"
        "from forge_envs.games.alphabet_sort import AlphabetSort\n"
        "fa.register('my/Sort-v0', AlphabetSort, max_turns=9, tags=('1p',))\n"
        "fa.register_suite('mine-v0', ['my/Sort-v0', 'forge/KuhnPoker-v0'], episodes=2, max_tokens=9)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_suite_of_a_module_is_played_by_its_name(own_module, tmp_path):
    report = play(tmp_path / "a", f"{own_module}:mine-v0")
    assert report.settings["suite"] == "mine-v0" and report.settings["episodes"] == 2
    assert [environment.id for environment in report.environments] == ["my/Sort-v0", KUHN]
    assert play(tmp_path / "b", [f"{own_module}:mine-v0", SORT], episodes=1).settings["suite"] == f"mine-v0+{SORT}"
    assert fa.suite(f"{own_module}:mine-v0") == ("my/Sort-v0", KUHN)


@pytest.mark.parametrize("suite", ["{}:mine-v0", "{}:mine-v0+forge/AlphabetSort-v0", "{}:my/Sort-v0"])
def test_bench_takes_a_suite_or_an_environment_of_a_module(own_module, suite, tmp_path):
    words = ["bench", suite.format(own_module), "--players.r", "random", "--episodes", "1", "--out_dir", str(tmp_path)]
    assert cli.main(words) == 0
    assert Report.load(tmp_path / "board.json").complete


def test_list_and_check_take_suites_also_of_a_module(own_module, capsys):
    assert cli.main(["list", f"{own_module}:mine-v0"]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == ["my/Sort-v0", KUHN]
    assert cli.main(["list", "core-v1", f"{own_module}:my/Sort-v0", "--tag", "1p"]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [SORT, "my/Sort-v0"]
    assert cli.main(["check", f"{own_module}:mine-v0", "--episodes", "1", "--json"]) == 0
    assert [fa.spec(json.loads(line)["id"]).id for line in capsys.readouterr().out.splitlines()] == ["my/Sort-v0", KUHN]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:mine-v0", "cannot import module 'no_such_module_here'"),
        ("json:mine-v0", "there is no suite 'mine-v0'|no environment is registered as 'mine-v0'"),
        ("mine-v9", "use 'my_module:mine-v9'"),
    ],
)
def test_suites_that_a_module_does_not_have_are_named(name, message, tmp_path, capsys):
    raises(ForgeError, message, play, tmp_path, name)
    assert cli.main(["list", name]) == 1 and cli.main(["check", name]) == 1


@pytest.mark.parametrize("name", ["my:suite", "my/suite", "a+b", ""])
def test_suites_have_names_that_a_command_can_tell_from_ids_and_modules(name):
    raises(ValueError, "must consist of letters, digits", fa.register_suite, name, [SORT])
