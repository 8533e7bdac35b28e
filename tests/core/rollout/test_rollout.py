import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from plain_env import Plain, PlainRound

import forge_agents as fa
from forge_agents.bench.records import forfeits_of
from forge_agents.errors import ActorDiedError, ArgumentError, LateAnswerError
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rollout import Rollout

from .fakes import Count, Engine  # noqa: TID252 (tests are no installed package)

MODEL = fa.Policy("m", name="m")


class AnyText(Count):
    """As `Count`, for answers of any text and without rewards."""

    def act(self, agent, action):
        self.numbers.append(action)
        return fa.Outcome(done=len(self.numbers) == 4)


class OneTurn(Plain):
    """One agent decides once. `outcome`, `prompt` and `observation` are what the environment returns."""

    outcome, prompt, observation = fa.Outcome(done=True), "", ""

    def instructions(self, agent):
        return self.prompt

    def observe(self, agent):
        return self.observation

    def act(self, agent, action):
        return self.outcome


def run(env, policies, **options):
    policies = policies if isinstance(policies, dict) else dict.fromkeys(env.possible_agents, policies)
    return asyncio.run(play(env, policies, seed=5, env_id="t", **options))


def run_model(engine, env=None, policy=MODEL, **options):
    """An episode in which one model plays all agents."""
    return run(env or Count(), policy, engines={"m": PolicyEngine(engine, engine)}, **options)


def says(action, name="scripted"):
    return fa.Scripted(lambda observation: action, name=name)


def test_turns_carry_their_own_rewards_in_global_order():
    episode = run(Count(), {"a": says("2", "two"), "b": says("3", "three")})
    turns = [("a", 0, 2, "two"), ("b", 1, 3, "three"), ("a", 2, 2, "two"), ("b", 3, 3, "three")]
    assert [(t.agent, t.index, t.reward, t.policy) for t in episode.turns] == turns
    assert episode.rewards == {"a": 4, "b": 6}
    assert episode.end_reason == "terminated" and episode.error is None
    assert [t.terminated for t in episode.trajectories["a"].turns] == [False, True]
    assert episode.trajectories["a"].instructions == "You are a."


def test_tokens_of_a_model_are_unchanged():
    first, second = run_model(Engine()).trajectories["a"].turns
    assert (first.prompt_ids, first.response_ids, first.logprobs) == ((1, 2), (7,), (-0.5,))
    assert second.prompt_ids == (1, 2, 7, 9)
    assert first.versions[0].version == 3 and first.action == "7"


def test_empty_response_is_an_empty_action():
    episode = run_model(Engine(tokens=()), AnyText())
    assert [t.action for t in episode.turns] == [""] * 4 and episode.error is None


def test_numpy_values_of_infos_are_kept():
    values = {"illegal": np.False_, "success": np.True_, "depth": np.int64(3), "answers": np.array(["5", "6"])}
    values |= {"either": {2, 1}, "seen": {(0, 1): 2}, (1, 2): "cell"}
    env = OneTurn()
    env.outcome = fa.Outcome(rewards={"a": 1.0}, done=True, info={"a": values})
    episode = run(env, fa.Random())
    assert episode.error is None
    assert episode.trajectories["a"].info == {
        "illegal": False, "success": True, "depth": 3, "answers": ["5", "6"], "either": [1, 2],
        "seen": "{(0, 1): 2}", "(1, 2)": "cell",
    }  # fmt: skip


def test_invalid_text_is_repaired_on_arrival():
    env, observations = OneTurn(), []
    env.prompt, env.observation = "i \ud83d", "o \ud83d"
    episode = run(env, fa.Scripted(lambda text: observations.append(text) or "x \ud83d"))
    trajectory = episode.trajectories["a"]
    texts = trajectory.instructions, trajectory.turns[0].observation, trajectory.turns[0].action
    assert (observations, texts) == (["o \ufffd"], ("i \ufffd", "o \ufffd", "x \ufffd"))


class Listening(Count):
    def act(self, agent, action):
        self.actions = [*getattr(self, "actions", ()), action]
        return super().act(agent, action.rpartition("\n")[2])


class Together(PlainRound):
    def setup(self, rng):
        self.actions = []

    def act_all(self, actions):
        self.actions += actions.values()
        return fa.Outcome(done=True)


@pytest.mark.parametrize("kind", [Listening, Together])
@pytest.mark.parametrize(("observes", "first"), [(False, "1"), (True, "<think>\nI say 1\n</think>\n\n1")])
def test_environment_receives_reasoning_only_on_request(kind, observes, first):
    env = kind()
    env.observes_reasoning = observes
    episode = run(env, {"a": says("<think>I say 1</think> 1"), "b": says("2", "other")})
    assert episode.error is None and env.actions[:2] == [first, "2"]
    assert [(turn.reasoning, turn.action) for turn in episode.turns[:2]] == [("I say 1", "1"), ("", "2")]


def test_scripted_player_may_be_a_coroutine_function():
    async def two(observation, agent):
        await asyncio.sleep(0)
        return "2" if agent == "a" else 2

    assert run(Count(), {"a": fa.Scripted(two), "b": says("3")}).rewards == {"a": 4, "b": 6}
    error = run(Count(), fa.Scripted(two)).error
    assert error.message == "Scripted policy 'scripted' returned int for 'b'. Return a str"


def test_scripted_player_error_is_recorded():
    episode = run(Count(), {"a": says("1"), "b": fa.Scripted(lambda o: 1 / 0)})
    assert (episode.error.where, episode.error.kind) == ("policy", "ZeroDivisionError")
    assert [t.agent for t in episode.turns] == ["a"]


@pytest.mark.parametrize("method", ["reset", "observe_text", "act"])
@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_environment_that_ends_or_cancels_something_fails_its_episode(method, kind):
    def fail(*args, **options):
        raise kind("of a library")

    error = run(type("Failing", (Count,), {method: fail})(), says("1")).error
    assert (error.kind, error.message) == (kind.__name__, "of a library")


@pytest.mark.parametrize("is_async", [False, True])
def test_player_that_ends_the_program_fails_its_episode(is_async):
    async def end(observation):
        raise SystemExit("of a library")

    player = fa.Scripted(end if is_async else lambda observation: end(observation).send(None))
    error = run(Count(), player).error
    assert (error.where, error.kind, error.message) == ("policy", "SystemExit", "of a library")


def test_environment_that_fails_for_an_unknown_attribute_fails_its_episode():
    class Failing(Count):
        def __getattr__(self, name):
            if name == "off_loop":
                raise KeyError(name)
            raise AttributeError(name)

    assert run(Failing(), says("1")).error.kind == "KeyError"


def fails_with(error):
    def fail(sampling, seed):
        raise error

    return Engine(on_request=fail)


def test_dead_engine_is_raised_and_late_answer_fails_its_episode():
    with pytest.raises(ActorDiedError, match="engine m died"):
        run_model(fails_with(ActorDiedError("engine m died")))
    episode = run_model(fails_with(LateAnswerError("m had 3 of at most 64 tokens")))
    assert (episode.error.where, episode.error.kind) == ("policy", "LateAnswerError")
    assert "3 of at most 64 tokens" in episode.error.message


def test_full_context_ends_the_episode():
    episode = run_model(Engine(max_model_len=4))
    assert episode.end_reason == "context" and len(episode.turns) == 2


class Duel(Count):
    """Whoever gives no number loses."""

    def act(self, agent, action):
        if action.isdecimal():
            return super().act(agent, action)
        rewards = {each: -1.0 if each == agent else 1.0 for each in self.agents}
        return fa.Outcome(rewards=rewards, done=True, info={agent: {"illegal": f"{action!r} is no number"}})


@pytest.mark.parametrize("tags", [("2p", "zero-sum"), ("competitive",), ("2p",)])
def test_full_context_ends_no_game_with_rivals(tags):
    """Otherwise a player could end each game that it is about to lose as a draw, or fill the context of its rival."""
    env = Duel()
    env.spec = SimpleNamespace(tags=tags, max_turns=None)
    episode = run_model(Engine(max_model_len=4), env)
    dropped = [turn.compaction is not None for turn in episode.turns]
    if tags == ("2p",):
        assert episode.end_reason == "context" and dropped == [False, False]
    else:
        assert episode.end_reason == "terminated" and dropped == [False, False, True, True]
        assert not episode.out_of_context and episode.rewards == {"a": 14.0, "b": 14.0}


def test_player_whose_context_has_no_room_for_one_observation_gives_an_empty_answer():
    env = Duel()
    env.spec = SimpleNamespace(tags=("zero-sum",), max_turns=None)
    episode = run_model(Engine(max_model_len=2), env)
    assert episode.error is None and episode.out_of_context
    assert episode.end_reason == "terminated" and episode.rewards == {"a": -1.0, "b": 1.0}
    (turn,) = episode.turns
    assert (turn.agent, turn.action, turn.finish_reason, turn.response_ids) == ("a", "", "context", ())
    assert forfeits_of(episode) == {"a"}


def test_environment_that_judges_silence_gets_an_empty_answer_and_gives_its_infos():
    class Graded(Count):
        judges_silence = True

        def act(self, agent, action):
            self.numbers.append(action)
            return fa.Outcome(done=not action, info={agent: {"answer": "42"}})

    episode = run_model(Engine(max_model_len=4), Graded())
    assert [turn.action for turn in episode.turns] == ["7", "7", ""] and episode.out_of_context
    assert episode.trajectories["a"].info["answer"] == "42" and episode.end_reason == "terminated"


def test_full_context_loses_a_classic_game():
    episode = run_model(Engine(max_model_len=2), fa.make("pettingzoo/tictactoe-v3"))
    assert [(turn.agent, turn.action) for turn in episode.turns] == [("player_1", "")]
    assert episode.rewards == {"player_1": -1.0, "player_2": 0.0} and forfeits_of(episode) == {"player_1"}


def test_response_is_limited_to_the_room_left():
    limits = []
    engine = Engine(max_model_len=5, on_request=lambda sampling, seed: limits.append(sampling.max_tokens))
    run_model(engine, policy=fa.Policy("m", name="m", sampling=fa.Sampling(max_tokens=64)), max_turns=1)
    assert limits == [3]


def test_random_moves_repeat_for_a_seed_and_differ_within_a_group_unless_shared():
    def actions(episode):
        return tuple(turn.action for turn in episode.turns)

    def moves(player, size=5):
        group = asyncio.run(Rollout(make_env=AnyText, env_id="t", policies=player).group(seed=5, size=size))
        return list(map(actions, group.episodes))

    each, alone = moves(fa.Random()), actions(run(AnyText(), fa.Random()))
    assert actions(run(AnyText(), fa.Random())) == alone and len(set(alone)) > 1
    assert len(set(each)) == 5 and moves(fa.Random()) == each and moves(fa.Random(), size=3) == each[:3]
    assert each[0] == alone, "a group of one is an episode played by itself"
    assert moves(fa.Random(shared=True)) == [each[0]] * 5


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

    group = asyncio.run(Rollout(make_env=make, env_id="t", policies=says("1")).group(seed=11, size=3))
    assert len(made) == 4 and not group.failed
    assert len({e.turns[0].observation for e in group.episodes}) == 1


def model_rollout(engine, make_env=Count):
    return Rollout(make_env=make_env, env_id="t", policies=MODEL, engines={"m": PolicyEngine(engine, engine)})


def test_shared_environment_instance_is_refused():
    only = Count()

    async def main():
        rollout = Rollout(make_env=lambda: only, env_id="t", policies=says("1"))
        one_by_one = await rollout.group(seed=1, size=2, limit=asyncio.Semaphore(1))
        assert [len(episode.turns) for episode in one_by_one.episodes] == [4, 4]
        with pytest.raises(TypeError, match=r"Send asyncio\.Semaphore\(4\)"):
            await rollout.group(seed=1, size=2, limit=4)
        rollout = model_rollout(Engine(), lambda: only)
        with pytest.raises(ArgumentError, match="make_env of t returned one Count for two episodes"):
            await rollout.group(seed=1, size=2)
        assert len((await rollout.group(seed=1, size=1)).episodes[0].turns) == 4

    asyncio.run(main())


def test_concurrent_episodes_are_limited():
    live, most = 0, 0

    class Watched(Engine):
        async def generate(self, prompt_ids, sampling):
            nonlocal live, most
            live += 1
            most = max(most, live)
            completion = await super().generate(prompt_ids, sampling)
            live -= 1
            return completion

    async def main():
        return await model_rollout(Watched()).group(seed=1, size=50, limit=asyncio.Semaphore(7))

    assert len(asyncio.run(main()).episodes) == 50
    assert most == 7


def test_samples_follow_from_the_rng_key():
    seeds = []
    rollout = model_rollout(Engine(on_request=lambda sampling, seed: seeds.append(seed)))

    def requested(rng_key):
        seeds.clear()
        asyncio.run(rollout.group(seed=1, size=2, rng_key=rng_key))
        return list(seeds)

    first = sorted(requested("0/7/0/3"))
    assert len(set(first)) == 8  # two episodes, two agents, two turns each
    assert sorted(requested("0/7/0/3")) == first
    assert not set(requested("0/8/0/3")) & set(first)
    assert requested(None) == [None] * 8
