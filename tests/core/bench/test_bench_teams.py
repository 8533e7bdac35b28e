"""Teams as players, with a policy for each agent, and programs, whose agents are partners."""

import contextlib
import json

import pytest
from bench_helpers import KUHN, PASSIVE, exported, play
from plain_env import Plain

import forge_agents as fa
from forge_agents.bench import Report
from forge_agents.bench import play as playing
from forge_agents.bench.entrants import Team, named_players
from forge_agents.bench.plan import BenchConfig, suite_envs
from forge_agents.cli import main as cli


@fa.register("bench/Signal-v0", max_turns=2, tags=("2p", "cooperative"))
class Signal(Plain):
    """The sender reads a digit, the receiver must name it."""

    possible_agents = ["sender", "receiver"]

    def setup(self, rng):
        self.digit, self.sent = int(rng.integers(10)), ""

    def observe_text(self, agent):
        return str(self.digit) if agent == "sender" else self.sent

    def act(self, agent, action):
        if agent == "sender":
            self.sent = action
            return fa.Outcome()
        right = float(action == str(self.digit))
        return fa.Outcome(rewards={"sender": right, "receiver": right}, done=True)


async def relay(task, client):
    """A program with two roles that ask in turn."""
    for role in ("planner", "coder"):
        requests = [{"role": "user", "content": f"{role}: {task}"}]
        done = await client.chat.completions.create(model=role, messages=requests)
    return done.choices[0].message.content


def register_relay(id_, **more):
    fa.register(
        id_,
        entry_point=fa.Program,
        program=relay,
        agents=("planner", "coder"),
        tasks=list(range(20)),
        reward=lambda task, result: float(result == f"coder: {task}"),
        **more,
    )


register_relay("bench/RelayTeam-v0")
register_relay("bench/RelayRivals-v0", tags=("2p", "competitive"))


def echo(observation):
    return observation


def test_a_mapping_from_agent_to_policy_is_one_player(tmp_path):
    deaf = {"sender": fa.Scripted(echo), "receiver": fa.Scripted(lambda seen: "x")}
    team = {"sender": fa.Scripted(echo), "receiver": fa.Scripted(echo)}
    report = play(tmp_path, {"team": team, "deaf": deaf}, "bench/Signal-v0")
    success = {cell.player: cell.success.value for cell in report.summary.cells}
    assert success == {"team": 1.0, "deaf": 0.0}
    assert report.players["deaf"]["type"] == "Team" and set(report.players["deaf"]["agents"]) == {"sender", "receiver"}
    assert "Team: sender Scripted echo" in report.markdown()
    assert Report.load(report.save(tmp_path / "board.json")).summary.overall == report.summary.overall


def test_a_team_takes_every_agent_of_a_game_of_rivals(tmp_path):
    bold = {"player_0": fa.Scripted(lambda seen: "bet"), "player_1": fa.Scripted(lambda seen: "fold")}
    report = play(tmp_path, {"bold": bold, "random": "random"})
    assert {("bold", "random"), ("random", "bold")} <= {tuple(record.lineup.values()) for record in report.records}
    assert set(report.exploitability[KUHN]) == {"random"}  # its strategy writes illegal moves, and a warning says so


def test_exploitability_of_a_scripted_team_follows_its_agents(tmp_path):
    team = {"player_0": PASSIVE, "player_1": PASSIVE}
    values = play(tmp_path, {"team": team, "one": PASSIVE}).exploitability[KUHN]
    assert values["team"] == pytest.approx(values["one"]) and values["one"] > 0


def test_policies_of_a_team_have_engines_of_their_own_and_equal_ones_share(tmp_path, monkeypatch, tiny_llama):
    model = fa.Policy(str(tiny_llama))
    other = fa.Policy(str(tiny_llama), sampling=fa.Sampling(temperature=0.5))
    players = {
        "mixed": {"player_0": model, "player_1": other},
        "twin": {"player_0": model, "player_1": model},
        "one": model,
    }
    named = named_players(players)
    assert [policy.name for policy in named["mixed"].policies.values()] == ["mixed-player_0", "mixed-player_1"]
    assert {policy.name for policy in named["twin"].policies.values()} == {"twin-player_0"}
    assert named["one"].name == "one"
    started = []

    @contextlib.asynccontextmanager
    async def fleet(models, config):
        started.extend(models)
        raise InterruptedError
        yield

    monkeypatch.setattr(playing, "_fleet", fleet)
    with pytest.raises(InterruptedError):
        play(tmp_path, players)
    assert sorted(started) == ["mixed-player_0", "mixed-player_1", "one", "twin-player_0"]


def test_a_run_with_a_policy_for_each_agent_is_one_player(tmp_path):
    run = exported(
        tmp_path / "run",
        "export/asker",
        "export/answerer",
        policy_mapping={"sender": "asker", "receiver": "answerer", "gpt-4o": "asker"},
    )
    team = named_players({"crew": run}, fa.Sampling(max_tokens=5))["crew"]
    assert isinstance(team, Team) and team.policies["receiver"].model.endswith("export/answerer")
    mixed = named_players({"mixed": {"sender": run, "receiver": "random"}})["mixed"]
    assert mixed.policies["sender"].model.endswith("export/asker") and isinstance(mixed.policies["receiver"], fa.Random)


@pytest.mark.parametrize(
    ("player", "error", "message"),
    [
        ({"sender": "random"}, ValueError, "has no policy for agent 'receiver' of bench/Signal-v0, only for sender"),
        (
            {"sender": "random", "receiver": "random", "player_7": "random"},
            ValueError,
            "'player_7', and the agents are sender",
        ),
        ({"sender": "random", "receiver": 3}, TypeError, "agent 'receiver' of player 'crew' is a int"),
        ({0: "random"}, TypeError, "Its keys must be names of agents"),
        ({}, ValueError, "player 'crew' is an empty mapping"),
    ],
)
def test_a_mapping_that_makes_no_player_is_refused(tmp_path, player, error, message):
    with pytest.raises(error, match=message):
        play(tmp_path, {"crew": player}, "bench/Signal-v0")


def test_a_run_that_plays_other_agents_is_refused(tmp_path):
    run = exported(
        tmp_path / "run",
        "export/asker",
        "export/answerer",
        policy_mapping={"player_0": "asker", "player_1": "answerer"},
    )
    (tmp_path / "run/export/asker/config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    with pytest.raises(ValueError, match="has no policy for agent 'sender'"):
        playing.check_agents(named_players({"crew": run}), {"bench/Signal-v0": ("sender", "receiver")})


def test_a_command_line_gives_a_policy_for_each_agent(tmp_path, capsys):
    config = tmp_path / "bench.yaml"
    config.write_text(
        "players:\n  crew: {sender: random, receiver: oracle}\n  lone: random\nsuite: bench/Signal-v0\nepisodes: 2\n"
    )
    assert BenchConfig(players={"crew": {"sender": "random", "receiver": "random"}}).entrants()["crew"].name == "crew"
    assert cli.main(["bench", "--config", str(config), "--out_dir", str(tmp_path / "out")]) != 0
    assert "oracle" in capsys.readouterr().err  # it was read: bench/Signal-v0 has no oracle


def test_agents_of_a_program_are_partners_unless_it_says_otherwise(tmp_path):
    kinds = {id_: suite_envs({id_: {}})[0].kind for id_ in ("bench/RelayTeam-v0", "bench/RelayRivals-v0")}
    assert kinds == {"bench/RelayTeam-v0": "cooperative", "bench/RelayRivals-v0": "competitive"}
    report = play(tmp_path, {"script": fa.Scripted(echo), "random": fa.Random()}, "bench/RelayTeam-v0")
    script, random = report.summary.cells
    assert (script.success.value, random.success.value) == (1.0, 0.0)
    assert not report.summary.ratings and not report.summary.bounds and not report.exploitability
    assert "Exploitability" not in report.markdown()
