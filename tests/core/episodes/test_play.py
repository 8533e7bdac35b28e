"""`fa.play`: one game from any Python."""

import asyncio
import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fake_models import Tokens, completion
from plain_env import Plain
from refusals import raises
from rich.console import Console

import forge_agents as fa
from forge_agents.errors import ModelNotFoundError, NotReadyError
from forge_agents.rollout import players
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.terminal import Terminal
from forge_agents.runtime.startup import track
from forge_agents.serving.fleet import Fleet

KUHN = "forge/KuhnPoker-v0"
TEAM = fa.Policy("m", name="team")


class Count(Plain):
    """Two agents act five times together."""

    possible_agents = ["a", "b"]
    closed = 0

    def setup(self, rng):
        self.said = 0

    def observe_text(self, agent):
        return f"{self.said} said"

    def act(self, agent, action):
        self.said += 1
        if action == "break":
            raise RuntimeError("broken by a player\x1b[2J")
        return fa.Outcome(done=self.said == 5)

    def close(self):
        type(self).closed += 1


@pytest.fixture
def fleets(monkeypatch):
    """Engines that answer "ok" and record requests. ``fleets`` has the models of each start."""
    starts = []

    class Engine:
        max_model_len = 100

        async def generate(self, prompt_ids, sampling, *, choices=(), seed=None):
            starts.append(seed)
            return completion(1)

    class Ok(Tokens):
        def text(self, response_ids):
            return "ok"

    class Up:
        def __init__(self, policies):
            self.policy_engines = {name: PolicyEngine(Engine(), Ok()) for name in policies}

        async def stop(self):
            starts.extend(["stop"] if self.policy_engines else [])

    async def start(policies, config):
        if "missing" in policies:
            raise ModelNotFoundError("no such model")
        starts.extend([("start", list(policies), config.enforce_eager)] if policies else [])
        for name in policies:
            with track("engine", name, "as a real one says it", on="here"):
                pass
        return Up(policies)

    monkeypatch.setattr(Fleet, "start", start)
    return starts


def test_seed_repeats_the_episode_whatever_its_type():
    one = fa.play(KUHN, fa.Random(), seed=3)
    named = {"player_0": fa.Random(), "player_1": fa.Random()}
    for env in (fa.spec(KUHN), fa.make(KUHN), lambda: fa.make(KUHN)):
        again = fa.play(env, named, seed=3)
        assert (again.turns, again.env_id, again.error) == (one.turns, KUHN, None)
    counted = fa.play(KUHN, named, seed=np.int64(3))
    assert counted.turns == one.turns and fa.Episode.from_json(counted.to_json()) == counted
    bare = fa.play(fa.spec(KUHN).load(), named, seed=3)
    assert (bare.turns, bare.env_id) == (one.turns, "KuhnPoker"), "a class that knows no id is called by its name"
    assert one.seed == 3 and len({fa.play(KUHN, fa.Random(), seed=seed).turns[0].observation for seed in range(6)}) > 1


def test_scripted_policies_arguments_and_turn_limits():
    relay = fa.play("forge/Relay-v0", fa.Scripted(lambda seen: "5"), env_args={"max_number": 5}, seed=1)
    assert relay.error is None and fa.play(fa.spec("forge/Relay-v0"), fa.Random(), env_args={"max_number": 5})
    assert len(fa.play(Count, fa.Random()).turns) == 5
    cut = fa.play(Count, fa.Random(), max_turns=2)
    assert (len(cut.turns), cut.end_reason, cut.env_id) == (2, "turn_limit", "Count")


def test_created_environments_are_closed_and_given_ones_stay_open():
    before, mine = Count.closed, Count()
    fa.play(mine, fa.Random())
    assert Count.closed == before
    fa.play(Count, fa.Random())
    assert Count.closed == before + 1
    raises(ValueError, "agent 'b' has no policy", fa.play, Count, {"a": fa.Random()})
    assert Count.closed == before + 2


def test_failure_is_recorded_and_turns_are_kept():
    with pytest.warns(RuntimeWarning, match=r"^Count failed in step, RuntimeError: .*broken by a player") as warned:
        episode = fa.play(Count, {"a": fa.Scripted(lambda seen: "x"), "b": fa.Scripted(lambda seen: "break")})
    assert warned[0].filename == __file__ and "\x1b" not in str(warned[0].message)
    assert (episode.error.where, episode.error.kind, len(episode.turns)) == ("step", "RuntimeError", 2)
    assert "failed in step" in str(episode) and "broken by a player" in str(episode)
    assert "During handling" not in episode.error.trace


def test_play_works_inside_a_running_loop():
    async def cell():
        return fa.play(KUHN, fa.Random(), seed=3)

    assert asyncio.run(cell()).turns == fa.play(KUHN, fa.Random(), seed=3).turns


def test_endpoint_and_person_play(serve_chat, monkeypatch):
    server = serve_chat(lambda request: "fold")
    read, write = os.pipe()
    os.write(write, b"bet\n")
    os.close(write)
    shown = Terminal(Console(file=io.StringIO(), width=100), read)
    monkeypatch.setattr(players, "terminal", lambda: shown)
    episode = fa.play(KUHN, {"player_0": fa.Human(), "player_1": fa.Endpoint(server.url, "stub")})
    os.close(read)
    assert [turn.action for turn in episode.turns] == ["bet", "fold"] and episode.rewards["player_0"] == 1
    assert "Your card" in shown.console.file.getvalue()


def test_policy_gets_an_engine_for_one_episode(fleets, capsys):
    team = fa.Policy("tiny")
    first, again = (fa.play(Count, {"a": team, "b": fa.Random()}, seed=4) for _ in range(2))
    assert [turn.policy for turn in first.turns][:2] == ["policy", "random"] and first.turns[0].action == "ok"
    assert fleets.count(("start", ["tiny"], True)) == fleets.count("stop") == 2
    seeds = [one for one in fleets if isinstance(one, int)]
    assert len(seeds) == 6 and seeds[:3] == seeds[3:] and len(set(seeds)) == 3, "the seed names what models draw"
    assert "starting engine tiny: as a real one says it, on here" in capsys.readouterr().err
    assert [turn.action for turn in first.turns] == [turn.action for turn in again.turns]
    assert {turn.policy for turn in fa.play(Count, {"a": fa.Policy("tiny"), "b": fa.Policy("big")}).turns} == {"a", "b"}


def test_policies_on_a_shared_engine_have_their_own_reasoning_setting(fleets):
    team, quiet = fa.Policy("tiny", name="team"), fa.Policy("tiny", name="quiet", thinking="off")
    with fa.Engines(team, quiet) as engines:
        served = {}

        async def game(found):
            served.update(found)

        engines.run([team, quiet], game)
        assert served["team"] is not served["quiet"]
    message = "'quiet' plays tiny with thinking off, and these engines serve tiny. Name it"
    with fa.Engines(team) as engines, pytest.raises(ValueError, match=message):
        fa.play(Count, quiet, engines=engines)


def test_running_engines_play_many_episodes(fleets):
    team, rival = fa.Policy("tiny", name="team"), fa.Policy("big", name="rival")
    other = fa.Policy("tiny", name="other", sampling=fa.Sampling(max_tokens=3))
    engines = fa.Engines(team, rival, config=fa.EngineConfig(enforce_eager=False))
    raises(NotReadyError, "these engines are not running", fa.play, Count, team, engines=engines)
    with engines:
        assert {turn.action for turn in fa.play(Count, {"a": team, "b": rival}, engines=engines).turns} == {"ok"}
        assert fa.play(Count, other, engines=engines).turns[0].policy == "other"
        assert fa.play(Count, fa.Random(), engines=engines).error is None
        with pytest.raises(ValueError, match=r"'new' plays huge, and these engines serve tiny, big.*fa\.Engines"):
            fa.play(Count, fa.Policy("huge", name="new"), engines=engines)
    assert [one for one in fleets if not isinstance(one, int)] == [("start", ["tiny", "big"], False), "stop"]

    async def cell():
        with fa.Engines(team) as engines:
            return [fa.play(Count, team, seed=seed, engines=engines) for seed in range(2)]

    assert [episode.turns[0].action for episode in asyncio.run(cell())] == ["ok", "ok"] and fleets[-1] == "stop"

    async def later():
        return fa.play(Count, team, engines=engines)

    with fa.Engines(team) as engines, ThreadPoolExecutor(4) as threads:
        many = list(threads.map(lambda seed: fa.play(Count, team, seed=seed, engines=engines), range(8)))
        assert [episode.seed for episode in many] == [*range(8)], "threads take turns"
        assert asyncio.run(later()).error is None and fa.play(Count, team, engines=engines).error is None
    with pytest.raises(ModelNotFoundError, match="no such model"), fa.Engines(fa.Policy("missing")):
        pytest.fail("an engine that cannot start serves nothing")


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda: fa.play("forge/KuhnPokr-v0", fa.Random()), KeyError, "Did you mean 'forge/KuhnPoker-v0'"),
        (lambda: fa.play("core-v1", fa.Random()), KeyError, "'core-v1' is a suite"),
        (lambda: fa.play(3, fa.Random()), TypeError, "a game is an environment's id.* got int"),
        (lambda: fa.play(dict, fa.Random()), TypeError, "got dict. fa.wrap"),
        (lambda: fa.play(Count(), fa.Random(), env_args={"n": 1}), TypeError, "existing environment"),
        (lambda: fa.play("forge/Relay-v0", fa.Random(), env_args={"n": 1}), TypeError, "It takes: max_number"),
        (lambda: fa.play(KUHN, fa.Random), TypeError, r"the class Random: write Random\(\)"),
        (lambda: fa.play(KUHN, "random"), TypeError, "got str 'random'"),
        (lambda: fa.play(KUHN, {"player_0": fa.Random(), "player_9": fa.Random()}), ValueError, "no agent 'player_9'"),
        (
            lambda: fa.play(KUHN, {"player_0": TEAM, "player_1": replace(TEAM, model="n")}),
            ValueError,
            "two different policies",
        ),
        (lambda: fa.play(KUHN, fa.Random(), max_turns=0), ValueError, "max_turns=0 plays nothing"),
        (lambda: fa.play(KUHN, fa.Random(), seed=-1), ValueError, "seed=-1 is no seed"),
        (lambda: fa.play(KUHN, fa.Random(), engines=0), TypeError, r"engines=0 is not an fa\.Engines"),
        (lambda: fa.play(KUHN, TEAM, engines=fa.Engines), TypeError, r"engines=<class .* is not an fa\.Engines"),
        (lambda: fa.play(KUHN, fa.Random(), seed=None), TypeError, "seed=None must be a whole number"),
    ],
)
def test_invalid_arguments_are_refused(wrong, kind, message):
    raises(kind, message, wrong)
