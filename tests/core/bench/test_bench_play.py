import asyncio
import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
from bench_helpers import BOLD, FIRST_FREE, KUHN, PASSIVE, TOE, fake_fleet, passive, play, run_in_loop
from fake_models import Tokens, completion
from plain_env import Plain
from process_checks import holds_within
from refusals import raises

import forge_agents as fa
from forge_agents.bench import BenchLimits, Report
from forge_agents.bench import play as playing
from forge_agents.bench.plan import lineups, seeds_of, suite_envs
from forge_agents.envs.seeds import BENCHMARKS_FROM
from forge_agents.errors import BudgetError, ModelNotFoundError, RunFolderError, UnknownIdError
from forge_agents.runtime import watchdog

ALONE = BenchLimits(max_concurrent_episodes=1)


def without_timing(report):
    return json.dumps({**report.as_json(), "timing": None})


def counts(report):
    """Number of played and of reused episodes."""
    return report.timing["played"], report.timing["reused"]


def test_each_pair_plays_each_agent_on_the_same_seeds(tmp_path):
    report = play(tmp_path)
    assert report.complete and report.planned == 9 * 6
    seeds = {}
    for record in report.records:
        seeds.setdefault(tuple(record.lineup.values()), []).append(record.seed)
    assert len(seeds) == 9 and all(row == seeds_of(0, 6) for row in seeds.values())
    rewards = {(m.player, m.other): m.reward.value for m in report.summary.meetings}
    assert rewards["bold", "passive"] == -rewards["passive", "bold"] and rewards["bold", "bold"] == 0
    against = [record for record in report.records if set(record.lineup.values()) == {"bold", "passive"}]
    chips = [seat.reward for record in against for seat in record.seats.values() if seat.player == "bold"]
    assert rewards["bold", "passive"] == pytest.approx(sum(chips) / 12) and len(chips) == 12


def test_report_does_not_depend_on_concurrency(tmp_path):
    report = play(tmp_path / "a")
    assert without_timing(report) == without_timing(play(tmp_path / "b", limits=ALONE))
    assert without_timing(report) != without_timing(play(tmp_path / "c", seed=1))


def test_played_episodes_are_reused_and_more_seeds_extend_them(tmp_path, capsys):
    play(tmp_path)
    assert capsys.readouterr().err == ""
    assert counts(play(tmp_path, progress=True)) == (0, 54)
    assert "54 episodes were played before and are not repeated" in capsys.readouterr().err
    assert counts(play(tmp_path, episodes=8)) == (18, 54)


def test_another_player_of_the_same_name_is_played_again(tmp_path):
    players = [PASSIVE, BOLD, fa.Random(seed=1), fa.Random(seed=2), PASSIVE]
    assert [counts(play(tmp_path, {"it": player}))[0] for player in players] == [6, 6, 6, 6, 0]


PROGRAM = """
import os
import sys
import time
import forge_agents as fa

def slow(observation):
    if left := int(os.environ.get("DECISIONS_UNTIL_IT_HANGS", "0")):
        os.environ["DECISIONS_UNTIL_IT_HANGS"] = str(left - 1)
        time.sleep(600 if left == 1 else 0)
    return "call" if "call" in observation else "check"

def measure(folder):
    players = {"slow": fa.Scripted(slow), "random": fa.Random()}
    return fa.benchmark(players, "forge/KuhnPoker-v0", episodes=20, out_dir=folder, progress=False)

if __name__ == "__main__":
    measure(sys.argv[1])
"""


def test_killed_benchmark_continues(tmp_path):
    script, log = tmp_path / "killed.py", tmp_path / "bench" / "episodes.jsonl"
    script.write_text(PROGRAM)
    environment = {**os.environ, "DECISIONS_UNTIL_IT_HANGS": "90"}
    killed = subprocess.Popen([sys.executable, str(script), str(log.parent)], env=environment)
    assert holds_within(60, lambda: log.exists() and log.read_bytes().count(b"\n") >= 10)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    before = log.read_text().splitlines()
    with log.open("a") as file:
        file.write('{"key": "half a li')
    spec = importlib.util.spec_from_file_location("killed", script)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    resumed = program.measure(log.parent)
    lines = log.read_text().splitlines()
    assert lines[: len(before)] == before and len(before) < 80
    keys = [json.loads(line)["key"] for line in lines if "half a li" not in line]
    assert len(keys) == len(set(keys)) == 80, "each episode was played once"
    assert resumed.complete and resumed.timing["played"] == 80 - len(before)
    assert without_timing(resumed) == without_timing(program.measure(tmp_path / "other"))


@pytest.mark.parametrize(("name", "value", "played"), [("max_episodes", 7, 7), ("max_seconds", 1e-9, 0)])
def test_limit_stops_cleanly_and_the_next_call_continues(tmp_path, name, value, played):
    part = play(tmp_path, limits=BenchLimits(**{name: value}, max_concurrent_episodes=2))
    assert not part.complete and part.stopped.startswith(f"{name}=") and len(part.records) == played
    assert part.missing == 54 - played and f"INCOMPLETE: {part.missing} of 54" in part.markdown()
    assert play(tmp_path, limits=BenchLimits(max_episodes=54)).complete


@contextlib.contextmanager
def full_disk(room=0):
    """No file can grow beyond `room` bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_ends_a_benchmark_with_the_file_and_keeps_its_episodes(tmp_path):
    part = play(tmp_path, limits=BenchLimits(max_episodes=7, max_concurrent_episodes=1))
    kept = r"cannot be written .* finished episodes are kept"
    with full_disk(), pytest.raises(RunFolderError, match=rf"board\.json {kept}"):
        play(tmp_path, limits=BenchLimits(max_seconds=1e-9))
    log = tmp_path / "episodes.jsonl"
    with full_disk(log.stat().st_size + 100), pytest.raises(RunFolderError, match=rf"episodes\.jsonl {kept}"):
        play(tmp_path)
    assert not log.read_text().endswith("\n")
    with full_disk(), pytest.raises(RunFolderError, match=r"episodes\.jsonl cannot be written"):
        play(tmp_path)
    whole = play(tmp_path)
    assert whole.complete and whole.timing["reused"] == len(part.records) == 7


def test_failed_episodes_are_counted_separately_and_repeated(tmp_path):
    state = tmp_path / "broken"
    state.touch()

    def moody(observation):
        if state.exists():
            raise RuntimeError("no mood")
        return "check"

    players = {"moody": fa.Scripted(moody), "random": fa.Random()}
    part = play(tmp_path, players)
    cell = next(cell for cell in part.summary.cells if cell.player == "moody")
    assert cell.failed > 0 and not part.complete and not part.missing
    assert any("no mood" in record.error for record in part.records) and "episodes failed" in part.markdown()
    state.unlink()
    whole = play(tmp_path, players)
    assert whole.complete and whole.timing["played"] == sum(bool(record.error) for record in part.records)


def test_repeated_failures_stop_a_benchmark(tmp_path):
    def broken(observation):
        raise OSError("gone")

    limits = BenchLimits(max_concurrent_episodes=4)
    report = play(tmp_path, {"broken": fa.Scripted(broken)}, episodes=200, limits=limits)
    assert "32 episodes of broken in a row failed" in report.stopped and "OSError: gone" in report.stopped
    assert report.missing >= 200 - 32 - 4


def test_script_that_blocks_the_thread_costs_its_episodes_only(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "BLOCK_TIMEOUT_S", 0.5)
    fa.register("test/Question-v0", Plain, max_turns=2)
    players = {"stuck": fa.Scripted(lambda seen: time.sleep(3600)), "quick": fa.Scripted(lambda seen: "x")}
    report = fa.benchmark(players, "test/Question-v0", episodes=1, out_dir=tmp_path, progress=False)
    stuck, quick = sorted(report.records, key=lambda record: "quick" in record.lineup.values())
    assert quick.error == "" and "blocked the controller's thread" in stuck.error  # an hour without the watchdog


def test_unreachable_endpoint_stops_the_benchmark(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        down = fa.Endpoint(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", "m", retries=0, timeout_s=5)
        report = play(tmp_path, {"down": down, "random": fa.Random()}, episodes=60)
    assert report.stopped.startswith("32 episodes of down in a row failed, the last with policy: EndpointError")
    good = [record for record in report.records if not record.error]
    assert good and all(set(record.lineup.values()) == {"random"} for record in good) and report.missing > 0


def failing(calls, error):
    """A passive player whose call after that many raises an error."""
    seen = []

    def player(observation):
        seen.append(observation)
        if len(seen) == calls + 1:
            raise error
        return passive(observation)

    return fa.Scripted(player)


def test_spent_endpoint_budget_stops_cleanly(tmp_path):
    report = play(tmp_path, {"pays": failing(9, BudgetError("max_requests=9 is spent"))}, limits=ALONE)
    assert report.stopped == "max_requests=9 is spent" and 0 < len(report.records) < 6
    assert not any(record.error for record in report.records)


def test_interrupted_benchmark_keeps_its_episodes(tmp_path):
    players = {"stops": failing(7, KeyboardInterrupt()), "random": fa.Random()}
    raises(KeyboardInterrupt, "keeps what was played: run it again", play, tmp_path, players, limits=ALONE)
    rest = play(tmp_path, players)
    assert rest.complete and rest.timing["reused"] > 0


def test_samples_of_a_random_player_differ(tmp_path):
    report = play(tmp_path, {"random": fa.Random()}, "gymnasium/FrozenLake-v1", samples=8, episodes=4)
    (cell,) = report.summary.cells
    assert set(cell.pass_at_k) == {1, 2, 4, 8} and cell.pass_at_k[1].value == pytest.approx(cell.success.value)
    first_seed = report.records[0].seed
    assert len({r.seats["player"].decisions for r in report.records if r.seed == first_seed}) > 1


def test_cooperative_games_are_scored_by_teams_of_one_player(tmp_path):
    report = play(tmp_path, {"a": fa.Random(), "b": fa.Random(seed=1)}, "forge/TreasureHunt-v0", episodes=3)
    assert [cell.episodes for cell in report.summary.cells] == [3, 3]
    assert not report.summary.ratings and len(report.summary.meetings) == 4


def test_illegal_actions_are_distinguished_from_losses(tmp_path):
    report = play(tmp_path, {"mute": fa.Scripted(lambda seen: ""), "first": FIRST_FREE}, [TOE])
    mute, first = report.summary.cells
    assert (mute.invalid.value, mute.forfeit.value, mute.success.value, mute.reward.value) == (1, 1, 0, -1)
    assert (first.invalid.value, first.forfeit.value, first.success.value) == (0, 0, 0), "nothing was won"
    assert report.summary.ratings["mute"].value < report.summary.ratings["first"].value, "a forfeit loses the deal"
    sort = play(tmp_path, {"mute": fa.Scripted(lambda seen: "x")}, "forge/AlphabetSort-v0").summary.cells[0]
    assert (sort.decisions.value, sort.success.value, sort.reward.value) == (3, 0, 0)


def test_line_ups():
    assert lineups(["a", "b"], ["s"]) == [{"s": "a"}, {"s": "b"}]
    three = lineups(["a", "b"], ["x", "y", "z"])
    assert len(three) == 2 + 6 and {"x": "b", "y": "a", "z": "b"} in three
    fixed = [tuple(lineup.values()) for lineup in lineups(["a", "b"], ["x", "y"], swap_agents=False)]
    assert fixed == [("a", "a"), ("b", "b"), ("a", "b")]
    assert len(lineups(["a", "b", "c"], ["x", "y"])) == 9


def test_seeds_are_no_training_seeds_and_are_nested():
    seeds = seeds_of(3, 200)
    assert len(set(seeds)) == 200 and min(seeds) >= BENCHMARKS_FROM and max(seeds) < 2**32
    assert seeds_of(3, 20) == seeds_of(3, 20, KUHN) == seeds[:20] and not set(seeds) & set(seeds_of(4, 200))
    levels = [set(seeds_of(3, 200, f"forge/Relay-v0@{level}")) for level in (1, 2)]
    assert not levels[0] & levels[1] and not levels[0] & set(seeds), "the same deal at two levels is one deal"


@pytest.mark.parametrize(
    "change",
    [
        {"env": TOE}, {"seed": 1}, {"sample": "0"}, {"lineup": {"player_0": "bold", "player_1": "bold"}},
        {"error": ["x"]},
        {"reward": "5"}, {"reward": float("inf")}, {"tokens": -5}, {"player": "stranger"}, {"success": 1},
    ],
    ids=str,
)  # fmt: skip
def test_records_of_a_stranger_are_played_again(tmp_path, capsys, change):
    report = play(tmp_path)
    rows = list(map(json.loads, (tmp_path / "episodes.jsonl").read_text().splitlines()))
    changed = [row for row in rows if row["lineup"] == {"player_0": "passive", "player_1": "bold"}]
    for row in changed:
        for part in [row] if change.keys() <= row.keys() else row["seats"].values():
            part.update(change)
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = play(tmp_path, progress=True)
    assert without_timing(again) == without_timing(report)
    assert f"{len(changed)} lines of the log could not be read" in " ".join(capsys.readouterr().err.split())
    Report.load(tmp_path / "board.json")


def test_two_benchmarks_do_not_share_a_folder(tmp_path):
    def nested(observation):
        raises(RunFolderError, "another benchmark writes", play, tmp_path, {"x": fa.Random()})
        return passive(observation)

    assert play(tmp_path, {"nested": fa.Scripted(nested)}, episodes=1).complete
    (tmp_path / "file").touch()
    raises(RunFolderError, "cannot be written", play, tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"suite": "core-v2"}, UnknownIdError, "Did you mean 'core-v1'"),
        ({"suite": ["forge/KuhnPokr-v0"]}, UnknownIdError, "KuhnPoker"),
        ({"players": {"x": 3}}, TypeError, "player 'x' is a int"),
        ({"players": [fa.Random()]}, TypeError, "must be a mapping"),
        ({"players": {"a b": fa.Random()}}, ValueError, "policy name 'a b'"),
        ({"players": {"x": "no-such-model"}}, ModelNotFoundError, "no-such-model"),
        ({"episodes": 0}, ValueError, "episodes=0"),
        ({"limits": {"max_tokens": 0}}, ValueError, "max_tokens=0 must be above 0"),
        ({"limits": {"max_cost": 0}}, ValueError, "max_cost=0 must be above 0"),
        ({"limits": {"max_cost": 1}}, ValueError, "max_cost=1 and no player has a price"),
        ({"players": {"x": "http://127.0.0.1:1/v1"}}, ValueError, "after a #"),
        ({"players": {"x": "textwrap:dedant"}}, ValueError, "Did you mean 'dedent'"),
        ({"players": {"x": "no_such_module_here:f"}}, ValueError, "no_such_module_here"),
        ({"players": {"x": "randm"}}, ValueError, "player .randm. is neither .* Did you mean .random."),
    ],
)
def test_invalid_benchmark_arguments_are_explained(tmp_path, arguments, error, message):
    raises(error, message, play, tmp_path, **arguments)
    raises(ValueError, "no players", fa.benchmark, {}, out_dir=tmp_path)


@pytest.mark.parametrize("name", ["episodes", "samples", "exploitability_samples"])
def test_numbers_of_episodes_are_bounded_before_they_are_listed(name, tmp_path):
    raises(ValueError, f"{name}=1000000000 must be at most 1000000", play, tmp_path, **{name: 10**9})
    product = {"episodes": 1000, "samples": 1000}
    raises(ValueError, "9 line-ups must be at most 1000000 episodes, got 9000000", play, tmp_path, **product)


def test_benchmark_runs_inside_a_running_loop(tmp_path):
    assert run_in_loop(lambda: play(tmp_path, episodes=1)).complete


class Words(Tokens):
    """A renderer whose tokens are moves."""

    def text(self, response_ids):
        return ("check", "bet", "call", "fold")[response_ids[0]]


class Sampler:
    """An engine that answers in any order, by the request's seed."""

    max_model_len = 99

    def __init__(self, seeds):
        self.seeds = seeds

    async def generate(self, prompt_ids, sampling, *, choices=(), seed):
        self.seeds.append(seed)
        await asyncio.sleep(seed % 7 / 2000)
        return completion(seed % 4)


@pytest.fixture
def sampled(monkeypatch, tiny_llama):
    """Two players of one model, and the seeds of their requests."""
    seeds = []
    monkeypatch.setattr(playing, "_fleet", fake_fleet(lambda name: Sampler(seeds), Words()))
    return {"one": fa.Policy(str(tiny_llama)), "two": fa.Policy(str(tiny_llama))}, seeds


def test_model_samples_do_not_depend_on_concurrency(sampled, tmp_path):
    players, seeds = sampled
    report = play(tmp_path / "a", players)
    assert len(set(seeds)) == len(seeds) > 24, "every turn of every agent of every episode has its own seed"
    assert without_timing(report) == without_timing(play(tmp_path / "b", players, limits=ALONE))
    first, second = report.summary.cells
    assert first.tokens == first.decisions and first.tokens.value > 0
    assert first.reward != second.reward and 0 < first.invalid.value < 1


def test_token_limit_counts_sampled_tokens(sampled, tmp_path):
    players, _ = sampled
    part = play(tmp_path, players, limits=BenchLimits(max_tokens=10, max_concurrent_episodes=1))
    tokens = sum(seat.tokens for record in part.records for seat in record.seats.values())
    assert part.stopped == "max_tokens=10 was reached" and 10 <= tokens <= 12
    assert play(tmp_path, players).complete


# ---- sides


def test_teams_meet_as_teams(tmp_path):
    (environment,) = suite_envs({"forge/CodewordsDuel-v0": {}})
    assert environment.sides == (("red_master", "red_guesser"), ("blue_master", "blue_guesser"))
    assert len(lineups(["a", "b"], environment.sides)) == 4
    report = play(tmp_path, {"oracle": fa.Oracle(), "random": fa.Random()}, "forge/CodewordsDuel-v0")
    oracle, random = report.summary.cells
    assert (oracle.reward.value, random.reward.value, oracle.success.value) == (1, -1, 1)
    agents = {(m.player, m.other): m.seats for m in report.summary.meetings}
    assert set(agents["oracle", "random"]) == set(environment.seats)
    assert agents["random", "oracle"]["blue_guesser"].value == -1
    assert {bound.player: bound.reward.value for bound in report.summary.bounds} == {"oracle": -1, "random": 1}
    assert Report.load(report.save(tmp_path / "board.json")).environments[0].sides == environment.sides


@fa.register("bench/OneSided-v0", max_turns=2)
class OneSided(fa.TurnEnv):
    possible_agents = ["ann", "ben"]
    sides = [["ann"]]


def test_sides_contain_each_agent_once():
    raises(ValueError, r"Each of its agents, ann, ben, belongs to one side", suite_envs, {"bench/OneSided-v0": {}})
    fa.register("bench/Die-v0", max_turns=2)(type("Die", (OneSided,), {"sides": 6}))
    assert suite_envs({"bench/Die-v0": {}})[0].sides == (("ann",), ("ben",)), "another attribute of this name"


def test_sides_work_in_processes_and_exclude_role_shuffle():
    (remote,) = suite_envs({"forge/CodewordsDuel-v0": {"isolation": "process"}})
    assert remote.sides == (("red_master", "red_guesser"), ("blue_master", "blue_guesser"))
    with pytest.raises(ValueError, match="role_shuffle reassigns the agents of forge/CodewordsDuel-v0"):
        suite_envs({"forge/CodewordsDuel-v0": {"role_shuffle": True}})
    assert suite_envs({KUHN: {"role_shuffle": True}})[0].sides == (("player_0",), ("player_1",))


@fa.register("bench/Pairs-v0", max_turns=4, tags=("4p", "mixed-motive"))
class Pairs(Plain):
    """Two pairs. Each agent's good word pays its pair 1, each bad one costs it 1."""

    possible_agents = ["a", "b", "c", "d"]
    sides = [["a", "b"], ["c", "d"]]

    def setup(self, rng):
        self.words = {}

    def act(self, agent, action):
        self.words[agent] = 1.0 if action == "good" else -1.0
        if len(self.words) < 4:
            return fa.Outcome()
        lead = sum(word if agent in "ab" else -word for agent, word in self.words.items())
        return fa.Outcome(rewards={agent: lead if agent in "ab" else -lead for agent in self.words}, done=True)


def test_pairs_have_partners_and_one_of_two_like_pairs_wins(tmp_path):
    players = {"good": fa.Scripted(lambda seen: "good"), "bad": fa.Scripted(lambda seen: "bad")}
    good, bad = play(tmp_path, players, "bench/Pairs-v0", episodes=3).summary.teamwork
    assert (good.crossed.value, bad.crossed.value, good.alone.value) == (4.0, -4.0, 0.0)
    words = iter(["good", "good", "bad", "bad"] * 8)
    mixed = {"mixed": fa.Scripted(lambda seen: next(words))}
    alone = play(tmp_path / "alone", mixed, "bench/Pairs-v0", episodes=4, limits=ALONE)
    assert alone.summary.cells[0].success.value == 0.5, "of two pairs of one player one won"
