import asyncio

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.errors import ActorDiedError, ArgumentError, LateAnswerError
from forge_agents.rollout.episode import play
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rollout import Rollout
from forge_agents.types import Completion, VersionSpan


class Count(fa.TurnEnv):
    """Two seats; each says a number; reward is the number said, paid when the other has moved."""

    possible_agents = ["a", "b"]

    def setup(self, rng):
        self.said = []

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return f"said {self.said}"

    def act(self, agent, action):
        self.said.append(int(action))
        return fa.Outcome(rewards={agent: float(action)}, done=len(self.said) == 4)


class Echo:
    """An engine that answers with the prompt's length as one token."""

    def __init__(self, max_model_len=1000):
        self.max_model_len, self.prompts = max_model_len, []

    async def generate(self, prompt_ids, sampling):
        self.prompts.append(prompt_ids)
        await asyncio.sleep(0)
        return Completion(
            token_ids=(7,), logprobs=(-0.5,), finish_reason="stop", versions=(VersionSpan(version=3, start=0, end=1),)
        )


class Digits:
    """A renderer whose tokens are easy to follow."""

    stop_ids = ()

    def begin(self, messages):
        return (1, 2)

    def go_on(self, prompt_ids, response_ids, messages):
        return (*prompt_ids, *response_ids, 9)

    def sections(self, response_ids):
        return "", "", str(response_ids[0])


def run(env, policies, **kwargs):
    return asyncio.run(play(env, policies, seed=5, env_id="t", **kwargs))


def test_turns_carry_their_own_rewards_in_global_order():
    two, three = fa.Scripted(lambda o: "2", name="two"), fa.Scripted(lambda o: "3", name="three")
    episode = run(Count(), {"a": two, "b": three})
    assert [(t.agent, t.index, t.reward, t.policy) for t in episode.turns] == [
        ("a", 0, 2, "two"),
        ("b", 1, 3, "three"),
        ("a", 2, 2, "two"),
        ("b", 3, 3, "three"),
    ]
    assert episode.rewards == {"a": 4, "b": 6}
    assert episode.end_reason == "terminated" and episode.error is None
    assert [t.terminated for t in episode.trajectories["a"].turns] == [False, True]
    assert episode.trajectories["a"].instructions == "You are a."


def test_tokens_of_a_model_are_unchanged():
    engine = Echo()
    model = fa.Policy("m", name="m")
    episode = run(Count(), {"a": model, "b": model}, engines={"m": PolicyEngine(engine, Digits())})
    first, second = episode.trajectories["a"].turns
    assert (first.prompt_ids, first.response_ids, first.logprobs) == ((1, 2), (7,), (-0.5,))
    assert second.prompt_ids == (1, 2, 7, 9)
    assert first.versions[0].version == 3 and first.action == "7"


def test_empty_response_is_an_empty_action():
    class Silent(Echo):
        async def generate(self, prompt_ids, sampling):
            return Completion(token_ids=(), logprobs=(), finish_reason="stop", versions=())

    class Blank(Digits):
        def sections(self, response_ids):
            return "", "", ""

    class Tolerant(Count):
        def act(self, agent, action):
            self.said.append(action)
            return fa.Outcome(done=len(self.said) == 4)

    model = fa.Policy("m", name="m")
    episode = run(Tolerant(), {"a": model, "b": model}, engines={"m": PolicyEngine(Silent(), Blank())})
    assert [t.action for t in episode.turns] == [""] * 4 and episode.error is None


@pytest.mark.parametrize("where", ["reset", "step", "observe"])
def test_environment_error_is_recorded(where):
    class Broken(Count):
        def setup(self, rng):
            super().setup(rng)
            if where == "reset":
                raise RuntimeError("boom")

        def act(self, agent, action):
            if where == "step" and len(self.said) == 1:
                raise RuntimeError("boom")
            return super().act(agent, action)

        def observe_text(self, agent):
            if where == "observe" and len(self.said) == 1:
                raise RuntimeError("boom")
            return super().observe_text(agent)

    episode = run(Broken(), fa_seats("1"))
    assert (episode.error.kind, episode.error.message, episode.end_reason) == ("RuntimeError", "boom", "error")
    assert "boom" in episode.error.trace
    assert len(episode.turns) == (0 if where == "reset" else 2 if where == "step" else 1) or where == "observe"


def fa_seats(action):
    return {"a": fa.Scripted(lambda o: action), "b": fa.Scripted(lambda o: action)}


def test_numpy_values_of_infos_are_kept():
    told = {"illegal": np.False_, "success": np.True_, "depth": np.int64(3), "answers": np.array(["5", "6"])}
    told |= {"either": {2, 1}, "seen": {(0, 1): 2}, (1, 2): "cell"}

    class Told(fa.TurnEnv):
        possible_agents = ("a",)

        def setup(self, rng):
            pass

        def instructions(self, agent):
            return ""

        def observe_text(self, agent):
            return ""

        def act(self, agent, action):
            return fa.Outcome(rewards={"a": 1.0}, done=True, info={"a": told})

    episode = asyncio.run(play(Told(), {"a": fa.Random()}, seed=1))
    assert episode.error is None
    assert episode.trajectories["a"].info == {
        "illegal": False,
        "success": True,
        "depth": 3,
        "answers": ["5", "6"],
        "either": [1, 2],
        "seen": "{(0, 1): 2}",
        "(1, 2)": "cell",
    }


def test_invalid_text_is_repaired_on_arrival():
    class Half(fa.TurnEnv):
        possible_agents = ("a",)

        def setup(self, rng):
            pass

        def instructions(self, agent):
            return "i \ud83d"

        def observe_text(self, agent):
            return "o"

        def observe(self, agent):
            return "o \ud83d"

        def act(self, agent, action):
            return fa.Outcome(done=True)

    seen = []
    episode = asyncio.run(play(Half(), {"a": fa.Scripted(lambda o: seen.append(o) or "x \ud83d")}, seed=1))
    trajectory = episode.trajectories["a"]
    told = trajectory.instructions, trajectory.turns[0].observation, trajectory.turns[0].action
    assert (seen, told) == (["o \ufffd"], ("i \ufffd", "o \ufffd", "x \ufffd"))


class Listening(Count):
    def act(self, agent, action):
        self.heard = [*getattr(self, "heard", ()), action]
        return super().act(agent, action.rpartition("\n")[2])


def together(game):
    class Together(fa.ParallelTurnEnv):
        possible_agents = ["a", "b"]
        observes_reasoning = game.observes_reasoning

        def setup(self, rng):
            self.heard = []

        def instructions(self, agent):
            return ""

        def observe_text(self, agent):
            return "?"

        def act_all(self, actions):
            self.heard += actions.values()
            return fa.Outcome(done=True)

    return Together()


@pytest.mark.parametrize("make", [lambda game: game(), together])
def test_environment_receives_reasoning_only_on_request(make):
    class Hearing(Listening):
        observes_reasoning = True

    thinks = fa.Scripted(lambda o: "<think>I say 1</think> 1")
    says = fa.Scripted(lambda o: "2", name="says")
    for game, first in ((Listening, "1"), (Hearing, "<think>\nI say 1\n</think>\n\n1")):
        env = make(game)
        episode = run(env, {"a": thinks, "b": says})
        assert episode.error is None and env.heard[:2] == [first, "2"]
        assert [(turn.reasoning, turn.action) for turn in episode.turns[:2]] == [("I say 1", "1"), ("", "2")]


def test_nan_reward_is_an_error_of_the_episode():
    class Nan(Count):
        def act(self, agent, action):
            super().act(agent, action)
            return fa.Outcome(rewards={agent: float("nan")})

    episode = run(Nan(), fa_seats("1"))
    assert episode.error is not None and "nan" in episode.error.message


def test_scripted_player_error_is_recorded():
    episode = run(Count(), {"a": fa.Scripted(lambda o: "1"), "b": fa.Scripted(lambda o: 1 / 0)})
    assert (episode.error.where, episode.error.kind) == ("policy", "ZeroDivisionError")
    assert [t.agent for t in episode.turns] == ["a"]


def test_dead_engine_is_raised():
    class Dead(Echo):
        async def generate(self, prompt_ids, sampling):
            raise ActorDiedError("engine m died")

    model = fa.Policy("m", name="m")
    with pytest.raises(ActorDiedError, match="engine m died"):
        run(Count(), {"a": model, "b": model}, engines={"m": PolicyEngine(Dead(), Digits())})


def test_late_answer_fails_its_episode():
    class Slow(Echo):
        async def generate(self, prompt_ids, sampling):
            raise LateAnswerError("m had 3 of at most 64 tokens")

    model = fa.Policy("m", name="m")
    episode = run(Count(), {"a": model, "b": model}, engines={"m": PolicyEngine(Slow(), Digits())})
    assert (episode.error.where, episode.error.kind) == ("policy", "LateAnswerError")
    assert "3 of at most 64 tokens" in episode.error.message


def test_turn_limit_truncates():
    episode = run(Count(), fa_seats("1"), max_turns=3)
    assert episode.end_reason == "turn_limit" and len(episode.turns) == 3
    assert episode.trajectories["b"].turns[-1].truncated


def test_full_context_ends_the_episode():
    model = fa.Policy("m", name="m")
    episode = run(Count(), {"a": model, "b": model}, engines={"m": PolicyEngine(Echo(max_model_len=4), Digits())})
    assert episode.end_reason == "context" and len(episode.turns) == 2


def test_response_is_limited_to_the_room_left():
    class Asked(Echo):
        async def generate(self, prompt_ids, sampling):
            self.max_tokens = sampling.max_tokens
            return await super().generate(prompt_ids, sampling)

    engine = Asked(max_model_len=5)
    model = fa.Policy("m", name="m", sampling=fa.Sampling(max_tokens=64))
    policies = {"a": model, "b": fa.Scripted(lambda o: "1")}
    run(Count(), policies, engines={"m": PolicyEngine(engine, Digits())}, max_turns=1)
    assert engine.max_tokens == 3


def test_random_players_repeat_for_a_seed():
    class Echoes(Count):
        def act(self, agent, action):
            self.said.append(action)
            return fa.Outcome(done=len(self.said) == 4)

    first, again = (run(Echoes(), {"a": fa.Random(), "b": fa.Random()}) for _ in range(2))
    assert [t.action for t in first.turns] == [t.action for t in again.turns]
    assert len({t.action for t in first.turns}) > 1


def test_random_moves_differ_within_a_group_unless_shared():
    class Echoes(Count):
        def act(self, agent, action):
            self.said.append(action)
            return fa.Outcome(done=len(self.said) == 4)

    def moves(player, size=5):
        group = asyncio.run(Rollout(make_env=Echoes, env_id="t", policies=player).group(seed=5, size=size))
        return [tuple(turn.action for turn in episode.turns) for episode in group.episodes]

    own, alone = moves(fa.Random()), run(Echoes(), {"a": fa.Random(), "b": fa.Random()})
    assert len(set(own)) == 5 and moves(fa.Random()) == own and moves(fa.Random(), size=3) == own[:3]
    assert own[0] == tuple(turn.action for turn in alone.turns), "a group of one is an episode played by itself"
    assert moves(fa.Random(shared=True)) == [own[0]] * 5


def test_group_shares_the_seed_and_retries_in_a_new_environment():
    made = []

    class Flaky(Count):
        def setup(self, rng):
            super().setup(rng)
            self.number = int(rng.integers(1000))
            if len(made) == 1:
                raise RuntimeError("first one breaks")

        def observe_text(self, agent):
            return str(self.number)

    def make():
        made.append(Flaky())
        return made[-1]

    rollout = Rollout(make_env=make, env_id="t", policies=fa.Scripted(lambda o: "1"))
    group = asyncio.run(rollout.group(seed=11, size=3))
    assert len(made) == 4 and not group.failed
    assert len({e.turns[0].observation for e in group.episodes}) == 1


def test_shared_environment_instance_is_refused():
    only = Count()

    async def main():
        rollout = Rollout(make_env=lambda: only, env_id="t", policies=fa.Scripted(lambda o: "1"))
        one_by_one = await rollout.group(seed=1, size=2, limit=asyncio.Semaphore(1))
        assert [len(episode.turns) for episode in one_by_one.episodes] == [4, 4]
        with pytest.raises(TypeError, match=r"send asyncio\.Semaphore\(4\)"):
            await rollout.group(seed=1, size=2, limit=4)
        served = {"m": PolicyEngine(Echo(), Digits())}
        rollout = Rollout(make_env=lambda: only, env_id="t", policies=fa.Policy("m", name="m"), engines=served)
        with pytest.raises(ArgumentError, match="make_env of t returned one Count for two episodes"):
            await rollout.group(seed=1, size=2)
        assert len((await rollout.group(seed=1, size=1)).episodes[0].turns) == 4

    asyncio.run(main())


def test_episode_that_keeps_failing_is_reported():
    class Broken(Count):
        def setup(self, rng):
            raise RuntimeError("always")

    group = asyncio.run(Rollout(make_env=Broken, env_id="t", policies=fa.Random()).group(seed=1, size=2))
    assert len(group.failed) == 2


def test_concurrent_episodes_are_limited():
    live, most = 0, 0

    class Watched(Echo):
        async def generate(self, prompt_ids, sampling):
            nonlocal live, most
            live += 1
            most = max(most, live)
            await asyncio.sleep(0.001)
            live -= 1
            return await super().generate(prompt_ids, sampling)

    served = {"m": PolicyEngine(Watched(), Digits())}
    rollout = Rollout(make_env=Count, env_id="t", policies=fa.Policy("m", name="m"), engines=served)

    async def main():
        return await rollout.group(seed=1, size=50, limit=asyncio.Semaphore(7))

    assert len(asyncio.run(main()).episodes) == 50
    assert most == 7


def test_samples_follow_from_the_rng_key():
    seeds = []

    class Seeded(Echo):
        async def generate(self, prompt_ids, sampling, *, seed=None):
            seeds.append(seed)
            return await super().generate(prompt_ids, sampling)

    served = {"m": PolicyEngine(Seeded(), Digits())}
    rollout = Rollout(make_env=Count, env_id="t", policies=fa.Policy("m", name="m"), engines=served)

    def asked(draw):
        seeds.clear()
        asyncio.run(rollout.group(seed=1, size=2, rng_key=draw))
        return sorted(seeds)

    first = asked("0/7/0/3")
    assert len(set(first)) == 8  # two siblings, two seats, two turns each
    assert asked("0/7/0/3") == first
    assert not set(asked("0/8/0/3")) & set(first)
    asyncio.run(rollout.group(seed=1, size=2))
    assert seeds[-8:] == [None] * 8
