import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import forge_agents as fa
from forge_agents.bench import BenchLimits, Report
from forge_agents.bench import play as playing
from forge_agents.bench.entrants import read_player
from forge_agents.bench.fingerprints import player_facts
from forge_agents.bench.plan import lineups, seeds_of, suite_envs
from forge_agents.envs.seeds import BENCHMARKS_FROM
from forge_agents.errors import BudgetError, ModelNotFoundError, RunFolderError, UnknownIdError
from forge_agents.rollout.players import PolicyEngine
from forge_agents.types import Completion

KUHN = "forge/KuhnPoker-v0"


def passive(observation):
    return "call" if "call" in observation else "check"


def bold(observation):
    return "call" if "call" in observation else "bet"


PLAYERS = {"passive": fa.Scripted(passive), "bold": fa.Scripted(bold), "random": fa.Random()}


def play(folder, players=PLAYERS, suite=KUHN, **more):
    return fa.benchmark(players, suite, out_dir=folder, progress=False, **{"episodes": 6, **more})


def without_timing(report):
    return json.dumps({**report.as_json(), "timing": None})


def test_each_pair_plays_each_agent_on_the_same_seeds(tmp_path):
    report = play(tmp_path)
    assert report.complete and report.planned == 9 * 6
    seeds = {tuple(r.lineup.values()): [] for r in report.records}
    for record in report.records:
        seeds[tuple(record.lineup.values())].append(record.seed)
    assert len(seeds) == 9 and all(found == seeds_of(0, 6) for found in seeds.values())
    met = {(m.player, m.other): m.reward.value for m in report.summary.meetings}
    assert met["bold", "passive"] == -met["passive", "bold"] and met["bold", "bold"] == 0
    by_hand = [r.seats[s].reward for r in report.records for s, n in r.lineup.items() if n == "bold"]
    against = [r for r in report.records if set(r.lineup.values()) == {"bold", "passive"}]
    chips = [r.seats[s].reward for r in against for s, n in r.lineup.items() if n == "bold"]
    assert met["bold", "passive"] == pytest.approx(sum(chips) / 12) and len(by_hand) == 6 * 6


def test_report_does_not_depend_on_concurrency(tmp_path):
    one = play(tmp_path / "a")
    two = play(tmp_path / "b", limits=BenchLimits(max_concurrent_episodes=1))
    assert without_timing(one) == without_timing(two)
    assert without_timing(one) != without_timing(play(tmp_path / "c", seed=1))


def test_played_episodes_are_reused_and_more_seeds_extend_them(tmp_path, capsys):
    play(tmp_path)
    assert capsys.readouterr().err == ""
    again = fa.benchmark(PLAYERS, KUHN, episodes=6, out_dir=tmp_path)
    assert (again.timing["played"], again.timing["reused"]) == (0, 54)
    assert "54 episodes were played before and are not repeated" in capsys.readouterr().err
    more = play(tmp_path, episodes=8)
    assert (more.timing["played"], more.timing["reused"]) == (18, 54)


def test_another_player_of_the_same_name_is_played_again(tmp_path):
    play(tmp_path, {"it": fa.Scripted(passive)})
    assert play(tmp_path, {"it": fa.Scripted(bold)}).timing["played"] == 6
    assert play(tmp_path, {"it": fa.Random(seed=1)}).timing["played"] == 6
    assert play(tmp_path, {"it": fa.Random(seed=2)}).timing["played"] == 6
    assert play(tmp_path, {"it": fa.Scripted(passive)}).timing["played"] == 0


PROGRAM = """
import os
import sys
import time
import forge_agents as fa
from forge_agents.bench import BenchLimits
from forge_agents.bench import Report

def slow(observation):
    time.sleep(float(os.environ.get("SLOW_S", "0")))
    return "call" if "call" in observation else "check"

def measure(folder):
    players = {"slow": fa.Scripted(slow), "random": fa.Random()}
    return fa.benchmark(players, "forge/KuhnPoker-v0", episodes=20, out_dir=folder, progress=False)

if __name__ == "__main__":
    measure(sys.argv[1])
"""


def test_killed_benchmark_continues(tmp_path):
    script, folder = tmp_path / "killed.py", tmp_path / "bench"
    script.write_text(PROGRAM)
    log = folder / "episodes.jsonl"
    first = subprocess.Popen([sys.executable, str(script), str(folder)], env={**os.environ, "SLOW_S": "0.02"})
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= 10) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    kept = log.read_text().splitlines()
    with log.open("a") as file:
        file.write('{"key": "half a li')
    spec = importlib.util.spec_from_file_location("killed", script)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    resumed = program.measure(folder)
    lines = log.read_text().splitlines()
    assert lines[: len(kept)] == kept and len(kept) < 80
    keys = [json.loads(line)["key"] for line in lines if "half a li" not in line]
    assert len(keys) == len(set(keys)) == 80, "each episode was played once"
    assert resumed.complete and resumed.timing["played"] == 80 - len(kept)
    assert without_timing(resumed) == without_timing(program.measure(tmp_path / "other"))


@pytest.mark.parametrize("limits", [{"max_episodes": 7}, {"max_seconds": 1e-9}])
def test_limit_stops_cleanly_and_the_next_call_continues(tmp_path, limits):
    part = play(tmp_path, limits=BenchLimits(**limits, max_concurrent_episodes=2))
    name = next(iter(limits))
    assert not part.complete and part.stopped.startswith(f"{name}=") and part.missing == 54 - len(part.records)
    assert len(part.records) == limits.get("max_episodes", 0)
    assert f"INCOMPLETE: {part.missing} of 54" in part.markdown()
    assert play(tmp_path).complete


def test_sufficient_limit_completes_the_benchmark(tmp_path):
    assert play(tmp_path, limits=BenchLimits(max_episodes=54)).complete


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

    report = play(
        tmp_path, {"broken": fa.Scripted(broken)}, episodes=200, limits=BenchLimits(max_concurrent_episodes=4)
    )
    assert "32 episodes of broken in a row failed" in report.stopped and "OSError: gone" in report.stopped
    assert report.missing >= 200 - 32 - 4


def test_samples_of_a_random_player_differ(tmp_path):
    report = play(tmp_path, {"random": fa.Random()}, "gymnasium/FrozenLake-v1", samples=8, episodes=4)
    (cell,) = report.summary.cells
    assert set(cell.pass_at_k) == {1, 2, 4, 8} and cell.pass_at_k[1].value == pytest.approx(cell.success.value)
    lengths = {r.seats["player"].decisions for r in report.records if r.seed == report.records[0].seed}
    assert len(lengths) > 1


def test_cooperative_games_are_scored_by_teams_of_one_player(tmp_path):
    report = play(tmp_path, {"a": fa.Random(), "b": fa.Random(seed=1)}, "forge/TreasureHunt-v0", episodes=3)
    assert [cell.episodes for cell in report.summary.cells] == [3, 3]
    assert not report.summary.ratings and len(report.summary.meetings) == 4


def test_illegal_actions_are_distinguished_from_losses(tmp_path):
    players = {"mute": fa.Scripted(lambda seen: ""), "first": fa.Scripted(lambda seen: seen.split("Free: ")[1][0])}
    report = play(tmp_path, players, ["forge/TicTacToe-v0"])
    mute, first = report.summary.cells
    assert mute.invalid.value == 1 and mute.forfeit.value == 1 and mute.success.value == 0 and mute.reward.value == -1
    assert first.invalid.value == 0 and first.forfeit.value == 0 and first.success.value == 0, "nothing was won"
    assert not report.summary.ratings, "a rival's forfeit is no win"
    sort = play(tmp_path, {"mute": fa.Scripted(lambda seen: "x")}, "forge/AlphabetSort-v0").summary.cells[0]
    assert sort.decisions.value == 3 and sort.success.value == 0 and sort.reward.value == 0


def test_line_ups():
    assert lineups(["a", "b"], ["s"]) == [{"s": "a"}, {"s": "b"}]
    three = lineups(["a", "b"], ["x", "y", "z"])
    assert len(three) == 2 + 6 and {"x": "b", "y": "a", "z": "b"} in three
    assert lineups(["a", "b"], ["x", "y"], swap_agents=False) == [
        {"x": "a", "y": "a"},
        {"x": "b", "y": "b"},
        {"x": "a", "y": "b"},
    ]
    assert len(lineups(["a", "b", "c"], ["x", "y"])) == 9


def test_seeds_are_no_training_seeds_and_are_nested():
    seeds = seeds_of(3, 200)
    assert len(set(seeds)) == 200 and min(seeds) >= BENCHMARKS_FROM and max(seeds) < 2**32
    assert seeds_of(3, 20) == seeds[:20] and not set(seeds) & set(seeds_of(4, 200))
    assert seeds_of(3, 20, KUHN) == seeds[:20]
    levels = [set(seeds_of(3, 200, f"forge/Relay-v0@{level}")) for level in (1, 2)]
    assert not levels[0] & levels[1] and not levels[0] & set(seeds), "the same deal at two levels is one deal"


def test_two_benchmarks_do_not_share_a_folder(tmp_path):
    def nested(observation):
        with pytest.raises(RunFolderError, match="another benchmark writes"):
            play(tmp_path, {"x": fa.Random()})
        return passive(observation)

    assert play(tmp_path, {"nested": fa.Scripted(nested)}, episodes=1).complete
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be written"):
        play(tmp_path / "file" / "below")


def test_invalid_benchmark_arguments_are_explained(tmp_path):
    with pytest.raises(UnknownIdError, match="Did you mean 'core-v1'"):
        play(tmp_path, suite="core-v2")
    with pytest.raises(UnknownIdError, match="KuhnPoker"):
        play(tmp_path, suite=["forge/KuhnPokr-v0"])
    with pytest.raises(ValueError, match="no players"):
        fa.benchmark({}, out_dir=tmp_path)
    with pytest.raises(TypeError, match="player 'x' is a int"):
        play(tmp_path, {"x": 3})
    with pytest.raises(TypeError, match="must be a mapping"):
        play(tmp_path, [fa.Random()])
    with pytest.raises(ValueError, match="policy name 'a b'"):
        play(tmp_path, {"a b": fa.Random()})
    with pytest.raises(ValueError, match="episodes=0"):
        play(tmp_path, episodes=0)
    with pytest.raises(ValueError, match="max_tokens=0 must be above 0"):
        BenchLimits(max_tokens=0)
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        play(tmp_path, {"x": "no-such-model"})


def test_players_from_text():
    assert read_player("random") == fa.Random() and read_player("human") == fa.Human()
    endpoint = read_player("http://127.0.0.1:1/v1#some-model", fa.Sampling(temperature=0))
    assert (endpoint.url, endpoint.model, endpoint.sampling.temperature) == ("http://127.0.0.1:1/v1", "some-model", 0)
    assert read_player("smollm2-135m-instruct") == fa.Policy("smollm2-135m-instruct")
    assert read_player("textwrap:dedent").fn("  x") == "x"
    with pytest.raises(ValueError, match="after a #"):
        read_player("http://127.0.0.1:1/v1")
    with pytest.raises(ValueError, match="Did you mean 'dedent'"):
        read_player("textwrap:dedant")
    with pytest.raises(ValueError, match="no_such_module_here"):
        read_player("no_such_module_here:f")


def test_benchmark_runs_inside_a_running_loop(tmp_path):
    async def notebook():
        return play(tmp_path, episodes=1)

    assert asyncio.run(notebook()).complete


def test_unreachable_endpoint_stops_the_benchmark(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        down = fa.Endpoint(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", "m", retries=0, timeout_s=5)
        report = play(tmp_path, {"down": down, "random": fa.Random()}, episodes=60)
    assert report.stopped.startswith("32 episodes of down in a row failed, the last with policy: EndpointError")
    assert not report.complete and report.missing > 0
    good = [record for record in report.records if not record.error]
    assert good and all(set(record.lineup.values()) == {"random"} for record in good)


def test_spent_endpoint_budget_stops_cleanly(tmp_path):
    spent = []

    def pays(observation):
        spent.append(observation)
        if len(spent) > 9:
            raise BudgetError("max_requests=9 is spent")
        return passive(observation)

    report = play(tmp_path, {"pays": fa.Scripted(pays)}, limits=BenchLimits(max_concurrent_episodes=1))
    assert report.stopped == "max_requests=9 is spent" and 0 < len(report.records) < 6
    assert not any(record.error for record in report.records)


def test_engine_settings_are_part_of_a_model_fingerprint(tiny_llama):
    model = fa.Policy(str(tiny_llama))
    prints = [player_facts(model, fa.EngineConfig(max_model_len=n))["fingerprint"] for n in (None, 64)]
    assert prints[0] != prints[1] and prints[0] == player_facts(model, fa.EngineConfig(threads=3))["fingerprint"]


class Words:
    """A renderer whose tokens are moves."""

    moves = ("check", "bet", "call", "fold")
    stop_ids = ()

    def start(self, instructions, observation):
        return (9,)

    def extend(self, prompt_ids, token_ids, observation):
        return (*prompt_ids, *token_ids, 9)

    def begin(self, messages):
        return (9,)

    def go_on(self, prompt_ids, token_ids, messages):
        return (*prompt_ids, *token_ids, 9)

    def parse(self, token_ids):
        return "", self.moves[token_ids[0]]

    def sections(self, token_ids):
        return "", "", self.moves[token_ids[0]]


class Sampler:
    """An engine that answers in any order, by the request's seed."""

    max_model_len = 99

    def __init__(self, seeds):
        self.seeds = seeds

    async def generate(self, prompt_ids, sampling, *, choices=(), seed):
        self.seeds.append(seed)
        await asyncio.sleep(seed % 7 / 2000)
        return Completion(token_ids=(seed % 4,), logprobs=(0.0,), finish_reason="stop", versions=())


@pytest.fixture
def sampled(monkeypatch, tiny_llama):
    asked = []

    @contextlib.asynccontextmanager
    async def fleet(models, config):
        yield {name: PolicyEngine(Sampler(asked), Words()) for name in models}

    monkeypatch.setattr(playing, "_fleet", fleet)
    return {"one": fa.Policy(str(tiny_llama)), "two": fa.Policy(str(tiny_llama))}, asked


def test_model_samples_do_not_depend_on_concurrency(sampled, tmp_path):
    sampled, asked = sampled
    one = play(tmp_path / "a", sampled)
    assert len(set(asked)) == len(asked) > 24, "every turn of every seat of every episode draws for itself"
    two = play(tmp_path / "b", sampled, limits=BenchLimits(max_concurrent_episodes=1))
    assert without_timing(one) == without_timing(two)
    first, second = one.summary.cells
    assert first.tokens == first.decisions and first.tokens.value > 0
    assert first.reward != second.reward, "two players are two draws"
    assert 0 < first.invalid.value < 1


def test_token_limit_counts_sampled_tokens(sampled, tmp_path):
    sampled, _ = sampled
    part = play(tmp_path, sampled, limits=BenchLimits(max_tokens=10, max_concurrent_episodes=1))
    written = sum(seat.tokens for record in part.records for seat in record.seats.values())
    assert part.stopped == "max_tokens=10 was reached" and 10 <= written <= 12
    assert play(tmp_path, sampled).complete


def test_interrupted_benchmark_keeps_its_episodes(tmp_path):
    seen = []

    def stops(observation):
        seen.append(observation)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return passive(observation)

    players = {"stops": fa.Scripted(stops), "random": fa.Random()}
    with pytest.raises(KeyboardInterrupt, match="keeps what was played: run it again"):
        play(tmp_path, players, limits=BenchLimits(max_concurrent_episodes=1))
    rest = play(tmp_path, players)
    assert rest.complete and rest.timing["reused"] > 0


def test_teams_meet_as_teams(tmp_path):
    (environment,) = suite_envs({"forge/CodewordsDuel-v0": {}})
    assert environment.sides == (("red_master", "red_guesser"), ("blue_master", "blue_guesser"))
    assert len(lineups(["a", "b"], environment.sides)) == 4
    players = {"oracle": fa.Oracle(), "random": fa.Random()}
    report = play(tmp_path, players, "forge/CodewordsDuel-v0", episodes=6)
    oracle, random = report.summary.cells
    assert (oracle.reward.value, random.reward.value, oracle.success.value) == (1, -1, 1)
    (best, worst) = (next(m for m in report.summary.meetings if (m.player, m.other) == pair)
                     for pair in (("oracle", "random"), ("random", "oracle")))  # fmt: skip
    assert set(best.seats) == set(environment.seats) and worst.seats["blue_guesser"].value == -1
    assert {bound.player: bound.reward.value for bound in report.summary.bounds} == {"oracle": -1, "random": 1}
    again = Report.load(report.save(tmp_path / "board.json"))
    assert again.environments[0].sides == environment.sides


def test_sides_contain_each_agent_once():
    with pytest.raises(ValueError, match=r"each of its agents, ann, ben, belongs to one side"):
        suite_envs({"bench/OneSided-v0": {}})


@fa.register("bench/OneSided-v0", max_turns=2)
class OneSided(fa.TurnEnv):
    possible_agents = ["ann", "ben"]
    sides = [["ann"]]


def test_sides_work_in_processes_and_exclude_role_shuffle():
    (far,) = suite_envs({"forge/CodewordsDuel-v0": {"isolation": "process"}})
    assert far.sides == (("red_master", "red_guesser"), ("blue_master", "blue_guesser"))
    with pytest.raises(ValueError, match="role_shuffle reassigns the agents of forge/CodewordsDuel-v0"):
        suite_envs({"forge/CodewordsDuel-v0": {"role_shuffle": True}})
    assert suite_envs({"forge/KuhnPoker-v0": {"role_shuffle": True}})[0].sides == (("player_0",), ("player_1",))


def test_other_attributes_called_sides_are_ignored():
    fa.register("bench/Die-v0", max_turns=2)(type("Die", (OneSided,), {"sides": 6}))
    assert suite_envs({"bench/Die-v0": {}})[0].sides == (("ann",), ("ben",))


@fa.register("bench/Pairs-v0", max_turns=4, tags=("4p", "mixed-motive"))
class Pairs(fa.TurnEnv):
    """Two pairs; each seat's good word pays its pair 1, each bad one costs it 1."""

    possible_agents = ["a", "b", "c", "d"]
    sides = [["a", "b"], ["c", "d"]]

    def setup(self, rng):
        self.said = {}

    def instructions(self, agent):
        return "Speak well."

    def observe_text(self, agent):
        return "now"

    def act(self, agent, action):
        self.said[agent] = 1.0 if action == "good" else -1.0
        if len(self.said) < 4:
            return fa.Outcome()
        paid = {seat: sum(self.said[each] for each in side) for side in self.sides for seat in side}
        ahead = paid["a"] - paid["c"]
        return fa.Outcome(rewards={seat: ahead if seat in "ab" else -ahead for seat in paid}, done=True)


def test_pairs_have_partners_and_one_of_two_like_pairs_wins(tmp_path):
    players = {"good": fa.Scripted(lambda seen: "good"), "bad": fa.Scripted(lambda seen: "bad")}
    report = play(tmp_path, players, "bench/Pairs-v0", episodes=3)
    good, bad = report.summary.teamwork
    assert (good.crossed.value, bad.crossed.value, good.alone.value) == (4.0, -4.0, 0.0)
    halves = iter(["good", "good", "bad", "bad"] * 8)
    alone = play(tmp_path / "alone", {"mixed": fa.Scripted(lambda seen: next(halves))}, "bench/Pairs-v0", episodes=4,
                 limits=BenchLimits(max_concurrent_episodes=1))  # fmt: skip
    assert alone.summary.cells[0].success.value == 0.5, "of two pairs of one player one won"
