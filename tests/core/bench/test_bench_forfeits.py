"""An agent forfeits if its illegal decision ended the game, and not if play continued after it."""

import math
from dataclasses import replace

import pytest
from bench_helpers import BOLD, play
from plain_env import Plain, PlainRound

import forge_agents as fa
from forge_agents.bench.records import Record, forfeits_of
from forge_agents.bench.verdicts import failing_players
from forge_agents.envs.env import acts_together
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.wrappers import RewardScale

SLIPS = "bad"


RACE = "bench/Race-v0"


@fa.register(RACE, max_turns=9, tags=("2p",))
class Race(Plain):
    """Three moves each. An illegal move is lost but does not end the game."""

    possible_agents = ["a", "b"]

    def setup(self, rng):
        self.moved = dict.fromkeys(self.agents, 0)
        self.left = 6

    def observe_text(self, agent):
        return f"{self.left} left"

    def act(self, agent, action):
        self.left -= 1
        info = {agent: {"illegal": "bad is bad"} if action == SLIPS else {}}
        self.moved[agent] += action != SLIPS
        if self.left:
            return fa.Outcome(info=info)
        ahead = self.moved["a"] - self.moved["b"]
        return fa.Outcome(rewards={"a": float(ahead > 0), "b": float(ahead < 0)}, done=True, info=info)


def seats(a, b, **settings):
    """Return the records of a race in which agents slip where they have a 1."""

    def says(slips):
        left = iter(slips)
        return fa.Scripted(lambda seen: SLIPS if next(left) else "good")

    episode = fa.play(RACE, {"a": says(a), "b": says(b)}, env_args=settings)
    assert episode.error is None, episode.error
    return Record.of(episode, key="", sample=0, lineup={"a": "x", "b": "y"}).seats


@pytest.mark.parametrize(
    ("a", "b", "invalid", "forfeit"),
    [
        ((1, 0, 0), (0, 0, 0), (1, 0), (False, False)),
        ((1, 0, 0), (0, 0, 1), (1, 1), (False, False)),  # the game went on after the first: it does after all
        ((0, 1, 0), (0, 0, 0), (1, 0), (False, False)),
        ((0, 0, 1), (0, 0, 0), (1, 0), (False, False)),  # the other decided after it
        ((0, 0, 0), (0, 0, 1), (0, 1), (False, True)),  # it ended with it; that it would have anyway, nobody says
    ],
)
def test_final_illegal_decision_is_a_forfeit(a, b, invalid, forfeit):
    result = seats(a, b)
    assert tuple(seat.invalid for seat in result.values()) == invalid
    assert tuple(seat.forfeit for seat in result.values()) == forfeit


def test_repeated_illegal_decisions_end_in_a_forfeit():
    result = seats((0, 1, 1, 1), (0, 0, 0), invalid_action="ask")
    assert (result["a"].invalid, result["a"].forfeit, result["b"].forfeit) == (3, True, False)


@pytest.mark.parametrize("seats", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("rounds", [1, 2])
def test_simultaneous_play_ends_with_a_round(seats, rounds):
    class Round(PlainRound):
        possible_agents = seats

        def setup(self, rng):
            self.round = 0

        def act_all(self, actions):
            self.round += 1
            out = [agent for agent, text in actions.items() if text == SLIPS]
            info = {agent: {"illegal": "bad is bad"} for agent in out}
            return fa.Outcome(info=info, done=True if self.round == rounds else out)

    slip = {"a": fa.Scripted(lambda seen: SLIPS), "b": fa.Scripted(lambda seen: "good")}
    episode = fa.play(Round(), slip, seed=1)
    assert forfeits_of(episode, together=True) == ({"a"} if rounds == 1 else set())
    assert acts_together(RewardScale(turn_based(Round()), 2.0)) and not acts_together(Race())
    output = {agent: replace(one, info={"forfeits": [agent]}) for agent, one in episode.trajectories.items()}
    assert forfeits_of(replace(episode, trajectories=output), together=True) == {"a", "b"}


def says_nothing(when):
    """Commons player that takes a fair share, but acts illegally in one season."""

    def played(seen):
        return "Good morning." if f"Seasons left: {when}" in seen else "take 1"

    return fa.Scripted(played)


@pytest.mark.parametrize("when", [8, 1])
def test_a_lake_outlives_a_season_without_a_number(when):
    episode = fa.play("forge/Commons-v0@1", {"player_0": says_nothing(when), "player_1": fa.Oracle()}, seed=1)
    result = Record.of(episode, key="", sample=0, lineup={"player_0": "x", "player_1": "y"}).seats
    assert (result["player_0"].invalid, result["player_0"].decisions) == (1, 8)
    assert not any(seat.forfeit for seat in result.values())


def picky(observation):
    """Player of Kuhn poker that fails in place of folding a Jack."""
    if "fold" in observation and "Jack" in observation:
        raise OSError("server down")
    return "fold" if "fold" in observation else "check"


@pytest.mark.parametrize("env", [("forge/KuhnPoker-v0",), ("forge/KuhnPoker-v0", "forge/LeducPoker-v0")])
def test_player_that_chooses_its_games_by_failing_has_no_results(env, tmp_path):
    players = {"bold": BOLD, "picky": fa.Scripted(picky), "random": fa.Random()}
    report = play(tmp_path, players, list(env), episodes=12)
    failed = [record for record in report.records if record.error]
    assert failed and all(record.fault == "picky" and not record.seats for record in failed)
    bold, of_picky, random = (cell for cell in report.summary.cells if cell.env == env[0])
    assert of_picky.failed > 3 and of_picky.episodes == 0 and math.isnan(of_picky.success.value)
    assert math.isnan(of_picky.reward.value) and math.isnan(report.summary.overall["picky"].value)
    assert bold.episodes == random.episodes == 24 and bold.failed > 0, "games against picky are left out"
    kuhn = report.summary.failing[env[0]]
    assert kuhn == {"picky": f"{sum(r.env == env[0] for r in failed)} of 60"}
    assert not any("picky" in (pair.first, pair.second) for pair in report.summary.pairs if pair.env == env[0])
    text = report.markdown()
    assert f"by failures of picky ({len(failed)})" in text and "| failures |" in text
    assert (
        f"NO RESULTS OF picky IN {env[0]}: it failed, or the environment on its answer, in {kuhn['picky']} games"
        in text
    )


@pytest.mark.parametrize("late", [True, False], ids=["in lost positions", "at the start"])
def test_failures_after_a_decision_count_in_games_that_are_played_again(late, tmp_path):
    """A player could have each game that it does not like repeated, until it wins."""
    down = tmp_path / "down"  # a variable would change the player's hash
    down.touch()

    def answer(observation):
        if down.exists() and ("opponent bet" in observation) == late and "Queen" not in observation:
            raise OSError("server down")
        return "fold" if "fold" in observation else "check"

    # as the first player, it has checked before it hears of a bet
    players, suite = {"bold": BOLD, "server": fa.Scripted(answer)}, ["forge/KuhnPoker-v0"]
    first = play(tmp_path / "bench", players, suite, episodes=12)
    failed = [record for record in first.records if record.error]
    assert len(failed) > 3 and "NO RESULTS OF server" in str(first)
    left = {record.leavers for record in failed if record.lineup["player_0"] == "server"}
    assert left == {("server",) if late else ()}
    down.unlink()
    again = play(tmp_path / "bench", players, suite, episodes=12)
    assert not any(record.error for record in again.records)
    assert ("NO RESULTS OF server" in str(again)) is late
    assert bool(again.summary.failing) is late
    counts = [sum("server" in record.leavers for record in report.records) for report in (first, again)]
    assert counts[0] == counts[1] and bool(counts[0]) is late


_outages: list[str] = []


@fa.register("bench/Flaky-v0", max_turns=9, tags=("2p",))
class Flaky(Race):
    def act(self, agent, action):
        if self.left == 3 and "environment" in _outages:
            raise ConnectionError(_outages.pop())
        return super().act(agent, action)


@pytest.mark.parametrize("where", ["environment", "player"])
def test_game_is_played_again_after_an_outage_of_its_environment_but_not_of_a_player(where, tmp_path):
    def answer(observation):
        if observation in ("3 left", "4 left") and "player" in _outages:  # its second decision
            raise ConnectionError(_outages.pop())
        return "good"

    _outages[:] = [where]
    players = {"steady": fa.Scripted(lambda observation: "good"), "server": fa.Scripted(answer)}
    report = play(tmp_path, players, ["bench/Flaky-v0"], episodes=4)
    leavers = [record.leavers for record in report.records if record.error]
    assert leavers == [("server",)] * (where == "player") and not _outages


class High(Plain):
    """The larger number wins. A text that is no number, or that is too long to be shown, makes it fail."""

    possible_agents = ("alice", "bob")
    max_observation_chars = 100

    def setup(self, rng):
        self.numbers, self.said = rng.permutation(20)[:2], []

    def observe_text(self, agent):
        return f"{self.numbers[self.possible_agents.index(agent)]} after {' '.join(self.said)}"

    def act(self, agent, action):
        self.said.append(action)
        first = int(action.split()[0])
        self.lead = first if len(self.said) == 1 else self.lead - first
        if len(self.said) < 2:
            return fa.Outcome()
        reward = 1.0 if self.lead > 0 else -1.0
        return fa.Outcome(rewards={"alice": reward, "bob": -reward}, done=True)


class HighAtOnce(PlainRound):
    possible_agents = ("alice", "bob")

    def setup(self, rng):
        self.numbers = dict(zip(self.possible_agents, rng.permutation(20)[:2].tolist(), strict=True))

    def observe_text(self, agent):
        return f"{self.numbers[agent]} after"

    def act_all(self, actions):
        number = {agent: int(action) for agent, action in actions.items()}
        reward = 1.0 if number["alice"] > number["bob"] else -1.0
        return fa.Outcome(rewards={"alice": reward, "bob": -reward}, done=True)


@pytest.mark.parametrize(("env", "answer"), [(High, "I pass"), (High, "{} " + "x" * 200), (HighAtOnce, "I pass")])
def test_player_that_makes_the_environment_fail_has_no_results(env, answer, tmp_path):
    env_id = f"bench/{env.__name__}-v0"
    fa.register(env_id, entry_point=env, tags=("2p", "zero-sum"))

    def honest(observation):
        return observation.split()[0]

    def cheat(observation):
        number = honest(observation)
        return answer.format(number) if int(number) < 8 else number

    players = {"honest": fa.Scripted(honest), "fair": fa.Scripted(honest), "cheat": fa.Scripted(cheat)}
    report = play(tmp_path, players, [env_id], episodes=16)
    failed = [record for record in report.records if record.error]
    assert failed and all("cheat" in record.leavers for record in failed)
    assert "cheat" in report.summary.failing[env_id]
    assert math.isnan(report.summary.overall["cheat"].value)
    if env is High:  # with decisions at once, all are named
        assert list(report.summary.failing[env_id]) == ["cheat"] == list(failed[0].leavers)


def test_failures_of_the_environment_and_rare_ones_leave_a_player_its_results():
    def game(seed, fault="", error=""):
        row = {"key": "", "env": RACE, "sample": 0, "lineup": {"a": "x", "b": "y"}, "seats": {}, "end": ""}
        return Record(**row, seed=seed, error=error, fault=fault)

    rare = [game(seed) for seed in range(19)] + [game(19, "x", "policy: OSError: gone")]
    assert failing_players(rare) == {} and failing_players(rare[1:]) == {"x": "1 of 19"}
    assert failing_players([game(0, "", "step: KeyError: 1")]) == {}
