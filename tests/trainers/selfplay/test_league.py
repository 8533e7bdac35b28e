"""Matches of a league, and a league with fake engines and learners."""

import asyncio
import dataclasses
import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from fake_processes import sampled_turn

import forge_agents as fa
from forge_agents.cli.config import parse
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.types import Episode, EpisodeError, EpisodeGroup, Trajectory
from forge_trainers.rl.league_policies import LeaguePolicies, policies_of
from forge_trainers.rl.metrics import summarize
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.samples import credit_groups
from forge_trainers.rl.scoring import score
from forge_trainers.rl.tasks import Task
from forge_trainers.selfplay.league import LeagueConfig, Match, draw_matches, evaluation_matches, margins_of
from forge_trainers.selfplay.matchmaking import Standings, result_of

AGENTS = ("player_0", "player_1")
HERO = fa.Policy("some-model", name="hero")
RANDOM = fa.Random()


def standings(snapshots=2):
    one = Standings(anchors=("random",), start="hero-000000")
    for version in range(1, snapshots + 1):
        one.add(f"hero-{version:06d}", version)
    return one


def episode(policies, rewards, *, error=None, seed=0):
    """Return an episode in which each agent sampled one token, 7 times its index."""
    trajectories = {
        agent: Trajectory(agent=agent, policy=policy, turns=(sampled_turn(agent, at, reward, policy, (7 * at,)),))
        for at, (agent, policy, reward) in enumerate(zip(AGENTS, policies, rewards, strict=True))
    }
    failed = EpisodeError(where="step", kind="E", message="") if error else None
    return Episode(env_id="duel", seed=seed, trajectories=trajectories, error=failed)


def group(*episodes):
    return EpisodeGroup(env_id="duel", seed=0, episodes=episodes)


def test_opponents_are_met_from_every_agent_equally_often():
    settings = LeagueConfig(self_play=0.0, opponents_per_step=2, opponents="uniform")
    for step in range(8):
        matches = draw_matches(standings(), settings, AGENTS, 8, key=(3, step, 0))
        met = Counter((match.opponent, match.agent) for match in matches)
        assert len(matches) == 8 and all(met[name, "player_0"] == met[name, "player_1"] for name, _ in met)


def test_policy_changes_agent_from_step_to_step():
    settings = LeagueConfig(self_play=0.0, opponents_per_step=1)
    seats = [draw_matches(standings(), settings, AGENTS, 1, key=(0, step, 0))[0].agent for step in range(4)]
    assert seats == ["player_0", "player_1", "player_0", "player_1"]


def test_matches_depend_only_on_the_key():
    settings = LeagueConfig(self_play=0.35)
    drawn = [draw_matches(standings(), settings, AGENTS, 50, key=(1, step, 0)) for step in range(20)]
    assert drawn == [draw_matches(standings(), settings, AGENTS, 50, key=(1, step, 0)) for step in range(20)]
    alone = np.mean([not match.opponent for step in drawn for match in step])
    assert alone == pytest.approx(0.35, abs=0.05)
    assert len({match.opponent for step in drawn for match in step}) == 5
    assert all(len({m.opponent for m in step if m.opponent}) <= 2 for step in drawn)


def test_match_assigns_players():
    assert Match(opponent="x", agent="player_1").players(AGENTS, "hero") == {"player_0": "x", "player_1": "hero"}
    assert Match(opponent="", agent="").players(AGENTS, "hero") == {"player_0": "hero", "player_1": "hero"}
    assert [(m.opponent, m.agent) for m in evaluation_matches(fa.League(HERO, anchors=(RANDOM,)), AGENTS, 3)] == [
        ("random", "player_0"),
        ("random", "player_1"),
        ("random", "player_0"),
    ]
    assert {m.opponent for m in evaluation_matches(fa.League(HERO), AGENTS, 2)} == {"hero-000000"}
    assert fa.League(HERO, anchors=(fa.Random(name="hero-0"),)).start == "hero-000000"


def test_held_out_opponents_are_met_only_in_evaluations():
    oracle = fa.Oracle()
    league = fa.League(HERO, anchors=(RANDOM,), held_out=(oracle, RANDOM), self_play=0.0)
    assert {m.opponent for m in evaluation_matches(league, AGENTS, 4)} == {"oracle", "random"}
    assert league.fixed == (RANDOM, oracle), "each once"
    policies = policies_of(league, fa.GRPOConfig(), Path())
    assert set(policies.declared({"duel": AGENTS})) == {"hero", "hero-opponent", "random", "oracle"}
    met = {m.opponent for key in range(50) for m in draw_matches(policies.standings, league, AGENTS, 4, key=(key,))}
    assert met == {"hero-000000", "random"}


def test_margins_are_differences_of_rewards():
    played = [
        group(
            episode(("hero", "a"), (1, -1)),
            episode(("hero", "a"), (0.5, 0.5)),
            episode(("hero", "a"), (9, 0), error=True),
        ),
        group(episode(("b", "hero"), (3, 2)), episode(("b", "hero"), (-1, 1))),
        group(episode(("hero", "hero"), (1, -1))),
    ]
    assert margins_of(played, "hero") == {"a": [2, 0], "b": [-1, 2]}


def test_league_draws_opponents_by_the_rewards_of_its_games(tmp_path):
    league = LeaguePolicies(fa.League(HERO, anchors=(RANDOM,), opponents="regret"), fa.GRPOConfig(), tmp_path)
    games = [group(*(episode(("hero", "random"), (r, -r)) for r in (1, 1, -5)))]
    asyncio.run(league.record(0, games, SimpleNamespace(learners={})))
    opponents = json.loads((tmp_path / "league.json").read_text())["opponents"]
    assert {row["name"]: row["chance"] for row in opponents} == {
        "random": pytest.approx(0.95),
        "hero-000000": pytest.approx(0.05),
    }
    # differences of 2, 2 and -10, and the two draws of the prior
    assert {row["name"]: row["margin"] for row in opponents} == {"random": pytest.approx(-6 / 5), "hero-000000": 0}


def test_equal_rewards_of_sides_of_different_size_are_a_draw():
    rewards = dict.fromkeys(("p0", "p1", "p2", "p3"), 0.1)
    trajectories = {
        agent: Trajectory(agent=agent, policy="a" if at else "hero", turns=(), initial_reward=reward)
        for at, (agent, reward) in enumerate(rewards.items())
    }
    played = group(Episode(env_id="duel", seed=0, trajectories=trajectories))
    assert margins_of([played], "hero") == {"a": [0.0]}


@pytest.mark.parametrize("unit", [1.0, 1e-10, 1e6])
def test_unit_of_rewards_changes_no_result(unit):
    games = [
        episode(("hero", "a"), (unit * mine, unit * other)) for mine, other in ((0.1 + 0.2 - 0.3, 0), (2, 1), (0, 1))
    ]
    margins = margins_of([group(game) for game in games], "hero")["a"]
    assert [result_of(margin) for margin in margins] == [0.5, 1.0, 0.0]


def test_league_reward_counts_games_against_opponents():
    judged = [
        dataclasses.replace(
            group(episode(("hero", "a"), (1, -1))), rewards={"player_0": np.ones(1), "player_1": -np.ones(1)}
        ),
        dataclasses.replace(
            group(episode(("hero", "hero"), (5, -5))), rewards={"player_0": np.ones(1), "player_1": np.ones(1)}
        ),
    ]
    own = LeaguePolicies(fa.League(HERO), fa.GRPOConfig(), Path()).measured(judged)
    result = summarize(own, {"hero"})
    assert result["reward/mean"] == result["reward/hero"] == 1 and "reward/player_1" not in result


def test_league_reward_counts_games_of_a_group_whose_first_episode_failed_at_its_start():
    failed = Episode(
        env_id="duel",
        seed=0,
        trajectories={},
        error=EpisodeError(where="reset", kind="E", message=""),
        end_reason="error",
    )
    judged = asyncio.run(score([group(failed, episode(("hero", "a"), (1, -1)))], env_reward, timeout_s=10))
    own = LeaguePolicies(fa.League(HERO), fa.GRPOConfig(), Path()).measured(judged)
    assert summarize(own, {"hero"})["reward/mean"] == 1


def test_opponent_that_fails_is_recorded_and_other_failures_are_no_results():
    def failed(agent):
        error = EpisodeError(where="policy", kind="EndpointError", message="gone", agent=agent)
        return dataclasses.replace(episode(("hero", "rival"), (0, 0)), error=error)

    games = [failed("player_1"), failed("player_0"), failed(""), episode(("hero", "rival"), (-1, 1))]
    assert games[0].failed_policy == "rival" and games[2].failed_policy == ""
    assert margins_of([group(game) for game in games], "hero") == {"rival": [pytest.approx(np.nan, nan_ok=True), -2.0]}


def test_opponents_tokens_never_enter_the_loss():
    versus = group(episode(("hero", "hero-000002"), (1, -1)), episode(("hero", "hero-000002"), (-1, 1)))
    swapped = group(episode(("hero-000002", "hero"), (1, -1)), episode(("hero-000002", "hero"), (-1, 1)))
    judged = asyncio.run(score([versus, swapped], env_reward, timeout_s=10))
    samples = credit_groups(judged, fa.GRPOConfig().credit_rule, ["hero"])
    assert set(samples.samples) == {"hero"}
    output = [[i for i, m in zip(s.token_ids, s.loss_mask, strict=True) if m] for s in samples.samples["hero"]]
    assert output == [[0], [0], [7], [7]], (
        "player_0's token where the policy has that seat, player_1's where it has the other"
    )


def declared(league, agents=None):
    return policies_of(league, fa.GRPOConfig(), Path()).declared(agents or {"duel": AGENTS})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fa.League(fa.Policy("m", trainable=False)), "a league needs a policy that learns, policy 'policy'"),
        (lambda: fa.League(HERO, pool=1), "pool=1 of the league must be at least 2"),
        (lambda: fa.League(HERO, snapshot_every=0), "snapshot_every=0"),
        (lambda: fa.League(HERO, opponents_per_step=0), "opponents_per_step=0"),
        (lambda: fa.League(HERO, self_play=1.1), "a probability, in"),
        (lambda: fa.League(HERO, self_play=1, opponents="regret"), "opponents='regret' has no effect with self_play=1"),
        (lambda: fa.League(HERO, self_play=1, opponents_per_step=1), "opponents_per_step=1 has no effect"),
        (lambda: fa.League(HERO, opponents="pfps"), "Did you mean 'pfsp'"),
        (lambda: fa.League(HERO, anchors=(fa.Policy("m", name="x"),)), "'x' of anchors is trainable"),
        (lambda: fa.League(HERO, anchors=(fa.Random(name="hero-000005"),)), "'hero-000005' of anchors has a name of"),
        (lambda: fa.League(HERO, held_out=(fa.Random(name="hero-000000"),)), "'hero-000000' of held_out has a name of"),
        (lambda: declared(fa.League(HERO, anchors=(RANDOM, RANDOM))), "different names"),
        (lambda: declared(fa.League(HERO, anchors=(fa.Random(name="hero"),))), "two policies .* are called 'hero'"),
        (lambda: declared(fa.League(HERO), {"duel": AGENTS, "solo": ("a",)}), "of a league need the same agents"),
        (lambda: draw_matches(standings(), LeagueConfig(), ("solo",), 4, key=(0, 0, 0)), "has only solo"),
    ],
)
def test_invalid_league_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_anchors_are_policies():
    with pytest.raises(TypeError, match=r"policy must be Policy\(\.\.\.\), got Random"):
        fa.League(fa.Random())
    with pytest.raises(TypeError, match="anchors must hold policies, got str"):
        fa.League(HERO, anchors=("random",))


def run_config(tmp_path, *words, text=""):
    file = tmp_path / "run.yaml"
    file.write_text("env: forge/KuhnPoker-v0\npolicies: {hero: {model: some-model}}\n" + text)
    return parse(fa.RunConfig, [str(file), *words], prog="forge-agents train", description="d")


def test_a_file_declares_a_league(tmp_path, capsys):
    league = "league: {opponents: near, pool: 3, anchors: [random]}\n"
    assert run_config(tmp_path, "--league.pool", "4", text=league).players == fa.League(
        HERO, opponents="near", pool=4, anchors=(RANDOM,)
    )
    for words, output in (
        (["--league.anchors", "[randm]"], "Did you mean 'random'"),
        (["--policy_mapping", "random"], "a league needs a policy that learns"),
        (["--policy_mapping", "{player_0: hero, player_1: hero}"], "a league chooses the players"),
    ):
        with pytest.raises(SystemExit):
            run_config(tmp_path, *words, text=league)
        assert output in capsys.readouterr().err


class Learner:
    """A learner that exports its version."""

    def __init__(self):
        self.version = 0

    async def export(self, folder, **_):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(str(self.version))


class League(LeaguePolicies):
    """Loads no weights, and records the snapshots."""

    def __init__(self, *args):
        super().__init__(*args)
        self.loads, self._engine._load = [], self._load

    async def _load(self, slot, name, version, processes, by):
        if name != slot.snapshot:
            self.loads.append(name)
            slot.snapshot = name


def season(folder, steps, *, pool=3, resume=False):
    """Run steps with fakes and random results. Checkpoints every 4 steps."""
    folder.mkdir(exist_ok=True)
    config = fa.GRPOConfig(checkpoint_every=4, groups_per_step=6)
    declared = fa.League(HERO, snapshot_every=2, pool=pool, anchors=(RANDOM,), opponents_per_step=2)
    league, learner = League(declared, config, folder), Learner()

    async def with_store(load):
        return await load("store")

    served = {"hero": PolicyEngine("engine", None), "hero-opponent": PolicyEngine("engine 2", None)}
    processes = SimpleNamespace(policy_engines=served, learners={"hero": learner}, with_store=with_store)
    saved = sorted((folder / "checkpoints").glob("step-*")) if resume else []
    games = []

    async def play(task, seats, served):
        names = tuple(seats[agent].name for agent in AGENTS)
        assert all(name in served or name == "random" for name in names)
        games.append((task.number, names))
        luck = np.random.default_rng([task.seed, *map(len, names)]).integers(-1, 2, size=4)
        return group(*(episode(names, (float(r), -float(r))) for r in luck))

    async def train():
        first, rows = int(saved[-1].name[5:]) if saved else 0, []
        if saved:
            with np.load(saved[-1] / "league.npz", allow_pickle=False) as state:
                league.load_state_dict(dict(state))
            learner.version = first
        for step in range(first, steps):
            tasks = [Task(env_id="duel", seed=100 * step + i, agents=AGENTS, number=i) for i in range(6)]
            groups = await league.collect(tasks, play, processes, step=step, resample=0)
            learner.version += 1
            rows.append(await league.record(step, await score(groups, env_reward, timeout_s=10), processes))
            if (step + 1) % 4 == 0:
                checkpoint = folder / f"checkpoints/step-{step + 1:06d}"
                checkpoint.mkdir(parents=True)
                np.savez(checkpoint / "league.npz", allow_pickle=False, **league.state_dict())
                for old in sorted(checkpoint.parent.iterdir())[:-2]:
                    shutil.rmtree(old)
        return rows

    return league, asyncio.run(train()), games


def test_killed_league_resumes_equal(tmp_path):
    whole, _, games = season(tmp_path / "whole", 20)
    season(tmp_path / "killed", 18)  # the last checkpoint is that of step 16
    again, _, later = season(tmp_path / "killed", 20, resume=True)
    assert sorted(later) == sorted(games[-len(later) :]) and len(later) == 4 * 6
    for key, value in whole.state_dict().items():
        np.testing.assert_array_equal(value, again.state_dict()[key])
    assert (tmp_path / "killed/league.json").read_text() == (tmp_path / "whole/league.json").read_text()


def test_snapshots_that_no_checkpoint_names_are_deleted(tmp_path):
    league, _, _ = season(tmp_path, 24)
    there = {path.name for path in (tmp_path / "league").iterdir()}
    pool = {one.name for one in league.standings.opponents if one.version > 0}
    assert len(pool) == 2 and pool <= there
    assert there.isdisjoint({"hero-000002", "hero-000004", "hero-000006", "hero-000008"})


def test_killed_deletion_leaves_no_part_of_a_snapshot_under_its_name(tmp_path, monkeypatch):
    league, _, _ = season(tmp_path, 24)
    snapshot, rest = tmp_path / "league/hero-000002", tmp_path / "league/.replaced-hero-000002"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).touch()

    def killed(path, **_):
        if path.exists():
            (path / "config.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        league._delete_unused()
    monkeypatch.undo()
    assert not snapshot.exists() and [file.name for file in rest.iterdir()] == ["model.safetensors"]
    league._delete_unused()
    assert not rest.exists()


def test_only_snapshots_are_deleted_from_the_league_folder(tmp_path):
    mine = tmp_path / "mine"
    others = ("documents", "hero-notes", "rival-000002")
    for name in others:
        (mine / name).mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/league").symlink_to(mine)
    (mine / ".unfinished-hero-000002").mkdir()  # of a killed export
    (mine / "hero-000003").symlink_to(tmp_path / "run")
    season(tmp_path / "run", 24)
    assert all((mine / name).is_dir() for name in others) and (tmp_path / "run/league.json").exists()
    assert not (mine / ".unfinished-hero-000002").exists() and not (mine / "hero-000002").exists()


@pytest.mark.parametrize(
    "state", [{"names": np.array(3)}, {"names": np.array(["a"] * 3, "S1")}, {"other": np.zeros(1)}]
)
def test_foreign_file_among_the_checkpoints_does_not_end_a_league(tmp_path, state):
    (tmp_path / "checkpoints/backup").mkdir(parents=True)
    np.savez(tmp_path / "checkpoints/backup/league.npz", **state)
    season(tmp_path, 8)
    assert (tmp_path / "league/hero-000004").is_dir()


def test_step_loads_each_snapshot_once(tmp_path):
    league, rows, games = season(tmp_path, 12)
    assert sorted(number for number, _ in games) == sorted(list(range(6)) * 12)
    assert len(league.loads) <= 2 * 12
    sides = Counter(name for _, names in games for name in names)
    assert sides["hero"] > sides["random"] > 0 and len(sides) >= 4
    assert rows[-1]["league/opponents"] == 4 and 0 <= rows[-1]["league/win_rate"] <= 1


def test_league_table_lists_all_opponents(tmp_path):
    season(tmp_path, 4)
    table = json.loads((tmp_path / "league.json").read_text())
    assert {(row["name"], row["kind"], row["version"]) for row in table["opponents"]} == {
        ("hero-000000", "start", 0),
        ("random", "anchor", None),
        ("hero-000002", "snapshot", 2),
        ("hero-000004", "snapshot", 4),
    }
    assert sum(row["chance"] for row in table["opponents"]) == pytest.approx(1)
    assert table["step"] == 4 and table["rating"] > 0


def test_a_missing_snapshot_is_named(tmp_path):
    season(tmp_path, 4)
    shutil.rmtree(tmp_path / "league/hero-000004")
    with pytest.raises(ValueError, match="hero-000004 of the league is missing"):
        season(tmp_path, 8, resume=True)


def test_unchanged_policy_is_not_a_new_opponent(tmp_path):
    league, learner = League(fa.League(HERO, snapshot_every=1), fa.GRPOConfig(), tmp_path), Learner()
    asyncio.run(league.record(0, [], SimpleNamespace(learners={"hero": learner})))
    assert [one.name for one in league.standings.opponents] == ["hero-000000"]


def test_snapshot_newer_than_the_policy_is_named(tmp_path):
    league, learner = League(fa.League(HERO, snapshot_every=1), fa.GRPOConfig(), tmp_path), Learner()
    league.standings.add("hero-000009", 9)
    with pytest.raises(ValueError, match="'hero-000009' of the league has version 9, but the policy only 0"):
        asyncio.run(league.record(0, [], SimpleNamespace(learners={"hero": learner})))


def test_evaluation_covers_anchors_agents_and_environments(tmp_path):
    """Environments, anchors and agents must not alternate in step: two of each would give two of eight games."""
    anchors = (RANDOM, fa.Random(name="other"))
    league = League(fa.League(HERO, anchors=anchors), fa.GRPOConfig(), tmp_path)
    games = Counter()

    async def play(task, seats, served):
        games[task.env_id, *(seats[agent].name for agent in AGENTS)] += 1
        return group(episode(tuple(seats[agent].name for agent in AGENTS), (1, -1)))

    tasks = [Task(env_id=f"duel-{i % 2}", seed=i, agents=AGENTS, number=i) for i in range(16)]
    asyncio.run(league.collect(tasks, play, SimpleNamespace(policy_engines={"hero": PolicyEngine("engine", None)})))
    names = [pair for anchor in ("random", "other") for pair in (("hero", anchor), (anchor, "hero"))]
    assert games == {(f"duel-{n}", *pair): 2 for n in range(2) for pair in names}


def test_late_groups_that_are_collected_again_have_the_players_of_their_step(tmp_path):
    """Groups of self-play are the last of a step. Alone, they met opponents."""
    declared = fa.League(HERO, anchors=(RANDOM,), opponents_per_step=3)
    league, players = League(declared, fa.GRPOConfig(groups_per_step=8), tmp_path), {}

    async def play(task, seats, served):
        names = tuple(seats[agent].name for agent in AGENTS)
        players.setdefault(task.number, []).append(names)
        return group(episode(names, (1, -1)))

    async def with_store(load):
        return await load("store")

    served = {"hero": PolicyEngine("engine", None), "hero-opponent": PolicyEngine("engine 2", None)}
    processes = SimpleNamespace(policy_engines=served, with_store=with_store)
    tasks = [Task(env_id="duel", seed=i, agents=AGENTS, number=i) for i in range(8)]
    for step, late in ((1, [7]), (2, [5, 6]), (3, [0, 4, 7])):
        players.clear()
        asyncio.run(league.collect(tasks, play, processes, step=step))
        asyncio.run(league.collect([tasks[number] for number in late], play, processes, step=step))
        assert all(again == [first] for first, *again in map(players.get, late))


def test_snapshots_are_packed_in_another_thread(tmp_path, tiny_llama, monkeypatch):
    from forge_agents.weights import Publisher

    packed_by, loaded = [], []
    monkeypatch.setattr(Publisher, "_pack", lambda *_: packed_by.append(threading.current_thread()))

    class Store:  # in memory
        name, place, heartbeat_timeout_s = "weights", "elsewhere", 10.0
        values: ClassVar = {}

        def publisher(self, name, **options):
            return Publisher(self, name, **options)

        def client(self):
            return self

        async def keys(self, prefix):
            return [key for key in self.values if key.startswith(prefix)]

        async def get(self, key):
            return self.values[key]

        async def put(self, key, value):
            self.values[key] = value

    class Storage:
        ref = Store()

    async def load_weights(version, *, adapter, timeout_s):
        assert adapter == ""
        loaded.append(version)

    shutil.copytree(tiny_llama, tmp_path / "league/hero-000001")
    league = LeaguePolicies(fa.League(replace(HERO, model=str(tiny_llama))), fa.GRPOConfig(), tmp_path)
    engine = PolicyEngine(SimpleNamespace(load_weights=load_weights), None)
    processes = SimpleNamespace(policy_engines={"hero-opponent": engine}, with_store=lambda load: load(Storage()))
    served = asyncio.run(league._engine.serve({"hero-000001": 1}, processes))["hero-000001"].snapshot
    assert served.version == 1 and loaded == [served.load]
    assert threading.main_thread() not in packed_by and len(packed_by) == 1


def test_opponent_that_fails_is_named_once(tmp_path, caplog):
    error = EpisodeError(where="policy", kind="EndpointError", message="gone", agent="player_1")
    failed = dataclasses.replace(episode(("hero", "random"), (0, 0)), error=error)
    played = [group(failed, failed, failed, episode(("hero", "random"), (1, -1)))]
    league = LeaguePolicies(fa.League(HERO, anchors=[fa.Random()], snapshot_every=100), fa.GRPOConfig(), tmp_path)
    for step in range(2):
        metrics = asyncio.run(league.record(step, played, None))
    assert metrics["league/win_rate"] == metrics["league/win_rate/random"] == 1.0
    assert caplog.text.count("opponent random failed in 3 of 4 games up to step 1.") == 1
    assert caplog.text.count(" failed in ") == 1
    # the policy won the one game by 2: a failed game counts as won by as much
    (random,) = (one for one in league.standings.opponents if one.name == "random")
    assert random.recent_score == random.recent_games and random.recent_margin == 2 * random.recent_games
