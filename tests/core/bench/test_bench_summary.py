import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from bench_helpers import FIRST_FREE, TOE, WordGame, play

import forge_agents as fa
from forge_agents.bench.plan import SuiteEnv
from forge_agents.bench.records import AgentRecord, Record, reported_success
from forge_agents.bench.sections import incomplete
from forge_agents.bench.summary import _games, summarize
from forge_agents.bench.verdicts import is_won_or_lost, is_zero_sum, judged


def record(seed, lineup, rewards, *, env="bench/Two-v0", forfeit=None, success=False):
    seats = {
        seat: AgentRecord(
            player=lineup[seat],
            reward=reward,
            success=None if success is None else success and reward > 0,
            decisions=1,
            invalid=0,
            forfeit=forfeit == seat,
            cut_off=0,
            tokens=0,
            prompt_tokens=0,
        )
        for seat, reward in rewards.items()
    }
    key = f"{env}{seed}{lineup}"
    return Record(key=key, env=env, seed=seed, sample=0, lineup=lineup, seats=seats, end="terminated", error="")


TWO = SuiteEnv(id="bench/Two-v0", seats=("x", "y"), kind="competitive", max_turns=None)
HERE, THERE = {"x": "one", "y": "two"}, {"x": "two", "y": "one"}


def test_game_is_a_deal_played_as_both_agents():
    """The hand of agent x is worth 5. Player "one" earns 6 with it and loses 4 without it, in every deal."""
    records = []
    for seed in range(10):
        records += [record(seed, HERE, {"x": 6.0, "y": -6.0}), record(seed, THERE, {"x": 4.0, "y": -4.0})]
    rated = summarize(records, [TWO], ("one", "two")).ratings
    assert rated["one"].games == 10 and rated["one"].low > rated["two"].high
    missing = summarize(records[:-1], [TWO], ("one", "two")).ratings
    assert missing["one"].games == 9, "half a deal is no game"


def test_each_sample_of_a_deal_is_a_game():
    """Player "one" wins one of three samples of each deal, so it loses two thirds of the games."""

    def sample(seed, number):
        won = 1.0 if number == 0 else -1.0
        rewards = ({"x": won, "y": -won}, {"x": -won, "y": won})
        return [replace(record(seed, *each), sample=number) for each in zip((HERE, THERE), rewards, strict=True)]

    records = [one for seed in range(8) for number in range(3) for one in sample(seed, number)]
    rated = summarize(records, [TWO], ("one", "two")).ratings
    assert rated["one"].games == 24 and rated["one"].value < rated["two"].value
    (cell, _) = summarize(records, [TWO], ("one", "two")).cells
    assert cell.reward.value == pytest.approx(-1 / 3)


def test_forfeit_of_an_opponent_is_no_success():
    paid = [record(seed, HERE, {"x": 1.0, "y": -1.0}, forfeit="y", success=True) for seed in range(8)]
    summary = summarize(paid, [TWO], ("one", "two"))
    one, two = summary.cells
    assert one.success.value == 0 and two.forfeit.value == 1 and not summary.ratings
    won = [
        record(seed, lineup, {seat: 1.0 if name == "one" else -1.0 for seat, name in lineup.items()}, success=True)
        for seed in range(8)
        for lineup in (HERE, THERE)
    ]
    earned = summarize(won, [TWO], ("one", "two"))
    assert earned.cells[0].success.value == 1 and earned.ratings["one"].games == 8


def test_player_that_forfeits_loses_the_deal():
    """Player "two" makes an illegal move, which costs it less than a loss, in each deal that it would not win."""
    records = []
    for seed in range(12):
        records.append(record(seed, HERE, {"x": -1.0, "y": 1.0}))
        evades = seed >= 4
        rewards = {"x": 0.0, "y": 0.0} if evades else {"x": 1.0, "y": -1.0}
        records.append(record(seed, THERE, rewards, forfeit="x" if evades else None))
    assert [game.score for game in _games(records)] == [0.0] * 4 + [1.0] * 8
    rated = summarize(records, [TWO], ("one", "two")).ratings
    assert rated["one"].games == 12 and rated["one"].value > rated["two"].value
    both = [record(0, lineup, {"x": 0.0, "y": 0.0}, forfeit="x") for lineup in (HERE, THERE)]
    assert not list(_games(both))


def test_games_that_a_full_context_ended_are_named_and_not_rated():
    won = [
        record(seed, lineup, {seat: 1.0 if name == "one" else -1.0 for seat, name in lineup.items()})
        for seed in range(8)
        for lineup in (HERE, THERE)
    ]
    ended = [replace(record(seed, HERE, {"x": 0.0, "y": 0.5}), end="context") for seed in (3, 4)]
    records = [each for each in won if each.seed not in (3, 4)] + ended
    records += [each for each in won if each.seed in (3, 4) and each.lineup == THERE]
    summary = summarize(records, [TWO], ("one", "two"))
    assert summary.ratings["one"].games == 6
    assert is_zero_sum(records, TWO)
    (warning,) = incomplete(SimpleNamespace(missing=0, records=records, summary=summary))
    assert warning.startswith("2 episodes ended because the context of a player was full. No rating counts them.")
    assert warning.endswith("The first: bench/Two-v0 with one, two")


def test_report_warns_if_no_pair_can_differ(tmp_path):
    players = {"random": fa.Random(), "first": FIRST_FREE, "other": fa.Random(seed=9)}
    few = play(tmp_path, players, TOE, episodes=4)
    warning = "NO PAIR CAN DIFFER: with 4 seeds none of 3 can have an adjusted p below 0.38; 7 would suffice"
    assert all(pair.p_adjusted >= 0.375 for pair in few.summary.pairs)
    assert few.markdown().index(warning) < few.markdown().index("## Players") and warning in few.table()
    many = play(tmp_path, players, TOE, episodes=7)
    assert "NO PAIR" not in many.markdown() and "in 80% of cases if it is at least 1.2 standard" in many.markdown()


def test_suite_distinguishes_players_that_environments_do_not():
    environments = [SuiteEnv(id=f"bench/Alone{k}-v0", seats=("x",), kind="single", max_turns=None) for k in range(10)]
    records = [
        record(seed, {"x": name}, {"x": float(name == "one")}, env=environment.id, success=True)
        for seed in range(2)
        for environment in environments
        for name in ("one", "two")
    ]
    summary = summarize(records, environments, ("one", "two"))
    assert all(pair.p_adjusted == 1 for pair in summary.pairs)
    (pair,) = summary.overall_pairs
    assert pair.env == "" and pair.reward.value == 1 and pair.reward.n == 20 and pair.p_adjusted < 0.001
    assert summary.overall["one"].low > 0.8 and summary.overall["two"].high < 0.2


def test_no_ratings_without_swapped_agents(tmp_path):
    players = {"one": fa.Random(), "two": fa.Random(seed=1)}
    fixed = play(tmp_path, players, TOE, episodes=8, swap_agents=False)
    assert not fixed.summary.ratings and f"AGENTS ARE NOT SWAPPED in {TOE}" in fixed.markdown()
    both = play(tmp_path, players, TOE, episodes=8)
    assert both.summary.ratings and "NOT SWAPPED" not in both.markdown()


@fa.register("bench/Prize-v0", tags=("2p", "competitive"))
class Prize(WordGame):
    """The last agent wins a prize whose value differs between episodes."""

    def setup(self, rng):
        self.words, self.prize = [], int(rng.integers(1, 100))

    def act(self, agent, action):
        outcome = super().act(agent, action)
        info = {name: {"outcome": "win" if name == "ben" else "loss"} for name in self.agents}
        return fa.Outcome(rewards={"ben": self.prize}, done=True, info=info) if outcome.done else outcome


def test_report_says_which_competitive_games_give_no_ratings(tmp_path):
    players = {"one": fa.Random(), "two": fa.Random(seed=1)}
    prize = play(tmp_path / "prize", players, "bench/Prize-v0")
    assert not prize.summary.ratings and not prize.summary.undefined
    (warning,) = prize.document().warnings
    assert warning.startswith("NO RATINGS COME FROM bench/Prize-v0: ") and "zero-sum" in warning
    assert not play(tmp_path / "toe", players, TOE).document().warnings


class Split(WordGame):
    """Both agents are paid, with a maximum that does not say who succeeded."""

    max_reward = 1.0

    def act(self, agent, action):
        outcome = super().act(agent, action)
        return fa.Outcome(rewards=dict.fromkeys(self.agents, 0.5), done=True) if outcome.done else outcome


def test_report_says_that_the_maximum_defines_no_success_among_rivals(tmp_path):
    fa.register("bench/Split-v0", entry_point=Split, tags=("mixed-motive",))
    split = play(tmp_path, {"one": fa.Random(), "two": fa.Random(seed=1)}, "bench/Split-v0")
    (warning,) = (each for each in split.document().warnings if each.startswith("NO SUCCESS"))
    assert warning == (
        "NO SUCCESS IS DEFINED in bench/Split-v0: compare rewards there. An environment defines success by "
        "info['success'] or info['outcome'] at its end. A game of one agent or of partners may define it by "
        "max_reward, and a competitive game by wins and losses"
    )


def episode(rewards, infos):
    trajectories = {
        seat: fa.Trajectory(agent=seat, policy=seat, turns=(), initial_reward=reward, info=infos.get(seat, {}))
        for seat, reward in rewards.items()
    }
    return fa.Episode(env_id="bench/Two-v0", seed=1, trajectories=trajectories)


def test_agent_that_left_early_has_not_won():
    rewards = {"x": 2.0, "y": -1.0}
    assert reported_success(episode(rewards, {"y": {"outcome": "win"}})) == {"x": False, "y": True}
    assert reported_success(episode(rewards, {})) == {"x": None, "y": None}
    assert reported_success(episode(rewards, {"y": {"success": False}})) == {"x": None, "y": False}
    together = {"x": 1.0, "y": 1.0}
    assert reported_success(episode(together, {"y": {"success": True}})) == {"x": None, "y": True}


# ---- where success is defined


def paid(*pairs, kind="competitive", **environment):
    """Records of both agents' rewards, from both line-ups in turn, and their environment."""
    records = [
        record(seed, (HERE, THERE)[seed % 2], {"x": x, "y": y}, success=None) for seed, (x, y) in enumerate(pairs)
    ]
    return records, SuiteEnv(id="bench/Two-v0", seats=("x", "y"), kind=kind, max_turns=None, **environment)


DILEMMA = (3.0, 3.0), (0.0, 5.0), (5.0, 0.0), (1.0, 1.0)
HUNT = (4.0, 4.0), (0.0, 3.0), (3.0, 0.0), (2.0, 2.0)
CHICKEN = (0.0, 0.0), (-1.0, 1.0), (1.0, -1.0), (-10.0, -10.0)
PIE = (0.7, 0.3), (0.4, 0.6), (0.0, 0.0), (0.5, 0.5)


@pytest.mark.parametrize("unit", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("rewards", [DILEMMA, HUNT, CHICKEN, PIE, ((1.0, 1.0), (0.5, 0.5), (0.0, 0.0))])
@pytest.mark.parametrize("kind", ["competitive", "mixed"])
def test_general_sum_game_has_no_success_or_ratings(rewards, kind, unit):
    records, environment = paid(*[(unit * x, unit * y) for x, y in rewards] * 4, kind=kind)
    summary = summarize(records, [environment], ("one", "two"))
    assert not is_zero_sum(records, environment) and not is_won_or_lost(records, environment)
    assert summary.undefined == (environment.id,) and not summary.ratings and not summary.bounds
    assert all(str(cell.success.value) == "nan" and cell.reward.n for cell in summary.cells)
    assert all(str(rate.value) == "nan" for rate in summary.overall.values())


@pytest.mark.parametrize(
    ("rewards", "zero_sum"),
    [
        (((1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)), True),
        (((6.0, -6.0), (-2.5, 2.5), (1.0, -1.0)), True),
        (((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)), True),  # adds up to 1
        (((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)), False),  # pays a win alone
        (((3.0, 0.0), (0.0, 3.0), (1.0, 1.0)), False),  # as in a league of football
    ],
)
def test_won_or_lost_games_have_success_and_ratings(rewards, zero_sum):
    records, environment = paid(*rewards * 4)
    assert is_won_or_lost(records, environment) and is_zero_sum(records, environment) == zero_sum
    won = {(row.seed, seat): row.seats[seat].success for row in judged(records, environment) for seat in row.seats}
    pairs = enumerate(rewards * 4)
    assert won == {(seed, seat): pair[at] > pair[1 - at] for seed, pair in pairs for at, seat in enumerate("xy")}
    summary = summarize(records, [environment], ("one", "two"))
    assert summary.undefined == () and bool(summary.bounds) == zero_sum


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_unit_of_rewards_changes_no_verdict(unit):
    """The sum of 0.1 and 0.2 is not 0.3, and a difference of 1e-9 is a win where no reward is larger."""
    rewards = (1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (0.1 + 0.2 - 0.3, 0.0), (0.5, -0.5)
    records, environment = paid(*[(unit * x, unit * y) for x, y in rewards for _ in range(2)])
    assert is_zero_sum(records, environment)
    won = [[seat.success for seat in row.seats.values()] for row in judged(records, environment)[::2]]
    draw = [False, False]
    assert won == [[True, False], [False, True], draw, draw, [True, False]]
    deals = (3.0, 1.0), (1.0, 3.0), (0.1 + 0.2, 0.3)  # the rewards of one and two as x, with 0 as y
    played = [
        record(seed, lineup, {"x": unit * reward, "y": 0.0})
        for seed, pair in enumerate(deals)
        for lineup, reward in zip((HERE, THERE), pair, strict=True)
    ]
    assert [game.score for game in _games(played)] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("most", "rewards", "solved"), [(1e-9, (1e-9, 0.0), 0.5), (1e-9, (0.0, 5e-10), 0.0), (0.0, (0.0, -1e-9), 0.5)]
)
def test_small_maximum_is_reached_only_by_the_maximum(most, rewards, solved):
    environment = SuiteEnv(id="bench/Two-v0", seats=("x",), kind="single", max_turns=None, max_reward=most)
    rows = [record(n, {"x": "one"}, {"x": reward}, success=None) for n, reward in enumerate(rewards)]
    assert summarize(rows, [environment], ("one",)).cells[0].success.value == solved


def test_zero_sum_tag_and_reported_success_are_kept():
    draws, environment = paid(*[(0.0, 0.0)] * 4, zero_sum=True)
    assert is_zero_sum(draws, environment)
    assert summarize(draws, [environment], ("one", "two")).cells[0].success.value == 0
    records, environment = paid(*DILEMMA)
    reported = [
        replace(row, seats={name: replace(seat, success=seat.reward >= 3) for name, seat in row.seats.items()})
        for row in records
    ]
    assert summarize(reported, [environment], ("one", "two")).undefined == ()


def test_forfeits_are_excluded_from_reward_rules():
    records, environment = paid(*((1.0, -1.0), (-1.0, 1.0)) * 4)
    crash = [record(99, HERE, {"x": -1.0, "y": 0.0}, forfeit="x", success=None)]
    assert is_zero_sum([*records, *crash], environment)


@pytest.mark.parametrize("kind", ["single", "cooperative"])
def test_task_is_solved_by_the_maximum_reward(kind):
    seats = ("x",) if kind == "single" else ("x", "y")

    def success(rewards, most):
        environment = SuiteEnv(id="bench/Two-v0", seats=seats, kind=kind, max_turns=None, max_reward=most)
        lineup = dict.fromkeys(seats, "one")
        rows = [record(n, lineup, dict.fromkeys(seats, r), success=None) for n, r in enumerate(rewards)]
        return summarize(rows, [environment], ("one",)).cells[0].success.value

    assert success([1.0, 1.0, 0.5, 0.0], None) == 0.5
    assert success([20.0, 1.0, 20.0, 20.0], 20.0) == 0.75
    assert str(success([37.0, 1.0, 0.0, 2.0], None)) == "nan"  # scores without a known most


def test_undefined_success_is_reported_and_excluded():
    records, environment = paid(*DILEMMA * 4)
    task = SuiteEnv(id="bench/Task-v0", seats=("x",), kind="single", max_turns=None)
    solved = [record(n, {"x": who}, {"x": 1.0}, env=task.id, success=None) for n in range(8) for who in ("one", "two")]
    assert summarize([*records, *solved], [environment, task], ("one", "two")).overall["one"].value == 1.0


def test_many_agents_take_linear_time():
    """A report of 1,000 agents in a stranger's file took minutes."""

    def seconds(number):
        agents = tuple(map(str, range(number)))
        environment = SuiteEnv(id="bench/Two-v0", seats=agents, kind="competitive", max_turns=None, zero_sum=True)
        lineup, rewards = dict.fromkeys(agents, "one"), {agent: float(len(agent)) for agent in agents}
        records = [record(seed, lineup, rewards, success=None) for seed in range(4)]
        start = time.process_time()
        summarize(records, [environment], ("one",))
        return time.process_time() - start

    seconds(2)  # imports scipy
    assert min(seconds(2000) for _ in range(3)) < 25 * min(seconds(250) for _ in range(3)), "8 times, not 64 times"
