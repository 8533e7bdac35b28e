"""The preflight check: errors found before engines start, and no effect on a valid run."""

import asyncio
import json
import random
import re
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_processes import Processes as FakeProcesses
from refusals import raises

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.errors import MissingExtraError, PreflightError, RunFolderError
from forge_agents.runtime import mesh
from forge_agents.runtime.cluster import Cluster
from forge_agents.runtime.host_process import HostFacts
from forge_trainers.rl import preflight
from forge_trainers.rl.trainer import GRPOTrainer
from forge_trainers.run import checkpoints
from forge_trainers.run.processes import Processes

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


class EnginesError(Exception):
    """Stands for the start of processes."""


class World(fa.TurnEnv):
    """Two agents with one turn each."""

    possible_agents = ["player_0", "player_1"]
    seeds: list = []

    def __init__(self, message="Say something.", seen="Now."):
        super().__init__()
        self.told, self.seen = message, seen

    def reset(self, seed=None, options=None):
        type(self).seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def setup(self, rng):
        self.luck = random.random()

    def instructions(self, agent):
        return self.told

    def observe_text(self, agent):
        return self.seen

    def act(self, agent, action):
        return (
            fa.Outcome() if agent == "player_0" else fa.Outcome(rewards={"player_0": 1.0, "player_1": 0.5}, done=True)
        )


@pytest.fixture
def tried(tmp_path, tiny_llama, monkeypatch, capsys):
    """``tried(env, reward, **config)`` returns the output of `fit` until engines would start."""

    async def start(*args, **kwargs):
        raise EnginesError

    monkeypatch.setattr(Processes, "start", start)
    monkeypatch.setattr(World, "seeds", [])
    monkeypatch.setattr(preflight, "BUDGET_S", 60.0)  # a busy machine may need long for two episodes

    def run(env=World, reward=None, *, seats=None, evaluate=False, env_args=None, **config):
        config.setdefault("engine", fa.EngineConfig(max_model_len=256))
        policy = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=16))
        with GRPOTrainer(seats or policy, reward, fa.GRPOConfig(**config), tmp_path / "run") as trainer:
            call = partial(trainer.evaluate, reward=reward) if evaluate else partial(trainer.fit, steps=1)
            with pytest.raises(EnginesError):
                call(env, env_args=env_args)
        return capsys.readouterr().err

    return run


def line_of(what, text):
    """Return file and line of the first `text` after the definition of `what`."""
    lines = Path(__file__).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if re.match(rf"(async )?(def|class) {what.__name__}\b", line))
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if n > start and text in line)}"


def test_valid_run_passes_preflight_in_two_lines(tried, tmp_path):
    requests = []

    def reward(trajectories):
        requests.append(trajectories)
        return [t.reward for t in trajectories]

    random.seed(5)
    drawn, _ = random.random(), random.seed(5)
    said = tried(reward=reward)
    assert said.splitlines()[0] == f"World with team; {tmp_path / 'run'}"
    assert "preflight: 2 episodes of random players took" in said and "skipped" not in said
    assert [t.policy for t in requests[0]] == ["team"] * 4 and [t.reward for t in requests[0]] == [1.0, 0.5] * 2
    assert World.seeds == [preflight.SEED] * 2 and preflight.SEED < HELD_OUT_FROM  # a training seed
    assert random.random() == drawn  # the random state is restored


def test_first_prompts_use_the_reasoning_setting(tried, tiny_llama):
    with pytest.raises(ValueError, match="thinking='off'.*has no switch for it"):  # before engines start
        tried(seats=fa.Policy(str(tiny_llama), name="team", thinking="off"))


def test_it_can_be_left_out(tried):
    def wrong(trajectories):
        raise AssertionError

    assert "preflight" not in tried(reward=wrong, preflight=False)
    assert not World.seeds


def test_preflight_of_an_evaluation_uses_its_reward(tried):
    with pytest.raises(PreflightError, match="reward wrong"):
        tried(reward=wrong, evaluate=True)


def wrong(trajectories):
    return [t.rewarded for t in trajectories]


def scores_one(one):
    return one.reward


def scores_any(one):
    return 0.5


def returns_nothing(one):
    pass


def by_episode(trajectories):
    return [0.0] * (len(trajectories) // 2)


def in_words(trajectory):
    return "good"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (wrong, ["AttributeError", "'rewarded'", line_of(wrong, "t.rewarded")]),
        (scores_one, ["scores one trajectory", "call its parameter `trajectory`", line_of(scores_one, "def")]),
        (scores_any, ["scores one trajectory", line_of(scores_any, "def")]),
        (by_episode, ["shape (2,) for 4 trajectories", "Return one number each", line_of(by_episode, "def")]),
        (returns_nothing, [f"returns_nothing(one) at {__file__}", "fails: ValueError", "Return one number each"]),
        (in_words, ["returned no number", "'good'", "or None to abstain", line_of(in_words, "def")]),
        (fa.MultiReward({"good": scores_one, "other": by_episode}), ["reward scores_one"]),
        (0.5 * fa.Rule(lambda t: 7.0, name="seven"), ["reward seven", "with 7.0. Scale scores to [0, 1]"]),
        (fa.EnvReward(high=0.5), ["reward env_reward", "EnvReward(low=0, high=1)"]),
        (fa.Ensemble([fa.EnvReward(high=0.5), lambda trajectory: 1.0]), ["pays", "EnvReward(low=0, high=1)"]),
        (fa.Ensemble([lambda trajectory: 3.0, fa.EnvReward()]), ["with 3.0. Scale scores to [0, 1]"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_reward_is_refused_before_engines_start(tried, tmp_path, reward, message):
    with pytest.raises(PreflightError) as error:
        tried(reward=reward)
    assert all(text in str(error.value) for text in message), str(error.value)
    assert not (tmp_path / "run").exists()


def test_reward_that_fails_on_random_text_is_reported(tried):
    def reads_json(trajectories):
        return [json.loads(t.turns[-1].action)["answer"] for t in trajectories]

    def reads_what_is_a_list(trajectories):
        return [json.loads("[1]").get("answer") for _ in trajectories]

    assert "may on a model's: AttributeError: 'list' object" in tried(reward=reads_what_is_a_list)
    said = tried(reward=reads_json)
    assert re.search(r"reward reads_json\(trajectories\) at .* fails on random play, and may on a model's: JSON", said)


@pytest.mark.parametrize("given", [[float("nan")] * 4, [None] * 4, np.full(4, np.nan)])
def test_reward_may_abstain_from_random_play(tried, given):
    said = tried(reward=lambda trajectories: given)
    assert "failed" not in said and "abstains from all 4 trajectories of random play, whose info has " in said


def test_missing_info_of_a_verifier_is_reported_with_available_info(tried):
    def right(completion, gold):
        return completion == gold

    said = tried(reward=fa.Ensemble([fa.Rule(right), fa.Rule(lambda trajectory: 1.0, name="kind")]))
    where = f"right(completion, gold) at {__file__}:{right.__code__.co_firstlineno}"
    assert "reward right fails on 4 of 4 trajectories of random play: trajectory.info has no 'gold', " in said
    assert f"which {where} takes. It has " in said


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
def test_verifier_that_ends_the_program_abstains_from_random_play(tried, kind):
    def ends(trajectory):
        raise kind(4)

    said = tried(reward=fa.Ensemble([fa.Rule(ends), fa.Rule(lambda trajectory: 1.0, name="kind")]))
    assert f"reward ends fails on random play, and may on a model's: {kind.__name__}: 4" in said


class Scorer:
    name = "scorer"

    def __call__(self, trajectories):
        return [1.0]


def test_error_of_a_reward_object_names_the_users_line(tried):
    with pytest.raises(PreflightError) as error:
        tried(reward=Scorer())
    assert line_of(Scorer, "def") in str(error.value) and "rewards.py" not in str(error.value)


class Counts(fa.Rule):
    """A verifier with a state."""

    def __init__(self):
        super().__init__(lambda t: 1.0, name="counts")
        object.__setattr__(self, "seen", np.zeros(1))

    def score(self, trajectories):
        self.seen[0] += len(trajectories)
        return super().score(trajectories)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        object.__setattr__(self, "seen", np.array(state["seen"]))


def test_preflight_restores_the_reward_state(tried):
    counts = Counts()
    judge = fv.Judge("smollm2-135m-instruct", "Is it good?")
    fails = fa.Rule(lambda t: t.nothing, name="fails")
    ensemble = fa.Ensemble([counts, fails, judge])
    before = {key: value.copy() for key, value in ensemble.state_dict().items()}
    said = tried(reward=ensemble)
    assert "skipped rewards that need a model or a sandbox: judge" in said and judge.usage.questions == 0
    assert "reward fails fails on random play, and may on a model's: AttributeError" in said and __file__ in said
    after = ensemble.state_dict()
    assert counts.seen[0] == 0 and before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_reward_state_keeps_its_types(tried):
    class Scale:
        name, calls = "scale", 3

        def __call__(self, trajectories):
            self.calls += 1
            return [1.0] * len(trajectories)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    reward = Scale()
    tried(reward=reward)
    assert type(reward.calls) is int and reward.calls == 3


def test_function_with_judges_is_not_called_in_preflight(tried):
    def reward(trajectories):
        pytest.fail("its judges would start")

    reward.judges = [fv.Judge("tiny-random", "Is it polite?")]
    assert "skipped rewards that need a model or a sandbox: reward" in tried(reward=reward)


def test_undeclared_judge_gets_no_gpu_before_placement(tried, monkeypatch):
    facts = HostFacts(hostname="here", gpus=("0",), cores=frozenset({0}), memory_domain="", gpu_bytes=(80_000_000_000,))
    layout = Cluster(fa.Hosts(), lambda: "here")
    layout._here.facts = facts
    monkeypatch.setattr(mesh, "_cluster", lambda: layout)
    judge = fv.Judge("tiny-random", "Is it polite?")
    said = tried(reward=judge.score)
    assert "would take 90% of a GPU that it shares with the processes that a run is about to start" in said
    assert "my_reward.judges = [my_judge]" in said
    assert mesh.gpu_neighbors("judge", "judges", 1) == []


def test_slow_reward_finishes_before_it_is_called_again(tried, monkeypatch):
    ended, begun, play = [], threading.Event(), preflight.Preflight._play

    async def play_without_hurry(self, until):
        groups = await play(self, until)
        monkeypatch.setattr(preflight, "BUDGET_S", 0.2)
        return groups

    def slow(trajectories):
        begun.wait(300)  # loading the tokenizer may import transformers first
        ended.append("reward")
        return [0.0] * (len(trajectories) - 1)

    async def start(*args, **kwargs):
        ended.append("engines")
        begun.set()
        return FakeProcesses()

    monkeypatch.setattr(Processes, "start", start)
    monkeypatch.setattr(preflight.Preflight, "_play", play_without_hurry)
    with pytest.raises(PreflightError, match=r"shape \(3,\) for 4 trajectories"):
        tried(reward=slow)
    assert ended[:2] == ["engines", "reward"]


class Uncopyable(World):
    def __deepcopy__(self, memo):
        raise OSError("no copies")


def test_environment_that_cannot_be_copied_is_refused_with_counterfactual_credit(tried):
    credit = fa.Credit(baseline="counterfactual")
    with pytest.raises(
        PreflightError, match=r"Uncopyable cannot be copied \(OSError: no copies\), and credit.baseline"
    ):
        tried(Uncopyable, credit=credit)
    assert "preflight: 2 episodes" in tried(Uncopyable)
    assert "preflight: 2 episodes" in tried(World, credit=credit)


class BreaksAtOnce(World):
    def observe_text(self, agent):
        return self.no_such_thing


class BreaksByMistake(World):
    def act(self, agent, action):
        return no_such_name  # noqa: F821


class BreaksByWords(World):
    def act(self, agent, action):
        return fa.Outcome(rewards={agent: int("x")})


class BreaksContract(World):
    def act(self, agent, action):
        return {agent: 1.0}


class RewardsNobody(World):
    def act(self, agent, action):
        return fa.Outcome(rewards={"player_00": 1.0})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (BreaksContract, "returned dict. Return an Outcome"),
        (RewardsNobody, "has 'player_00'.*Did you mean 'player_0'"),
    ],
)
def test_environment_that_violates_the_contract_is_refused(tried, env, message):
    with pytest.raises(PreflightError, match=message):
        tried(env=env)


@pytest.mark.parametrize(("env", "text"), [(BreaksAtOnce, "self.no_such_thing"), (BreaksByMistake, "no_such_name")])
def test_broken_environment_is_refused_with_its_line(tried, env, text):
    with pytest.raises(PreflightError, match="episodes of random players failed|fails before any decision") as error:
        tried(env=env)
    assert line_of(env, text) in str(error.value)


class BreaksWithSomeSeeds(World):
    def setup(self, rng):
        if self.seeds[-1] > preflight.SEED - 3:
            raise RuntimeError("fragile")


def test_preflight_tries_several_seeds(tried):
    assert "2 episodes of random players took" in tried(env=BreaksWithSomeSeeds)
    assert BreaksWithSomeSeeds.seeds[-2:] == [preflight.SEED - 3] * 2


def test_environment_that_fails_on_random_text_is_reported(tried):
    said = tried(env=BreaksByWords)
    assert "2 of 2 episodes of random players failed in BreaksByWords, as a model's may: step: ValueError" in said
    assert line_of(BreaksByWords, 'int("x")') in said and "Let the game accept any text" in said


def mistaken():
    return no_such_name  # noqa: F821


def asks_and(then):
    def program(task, client):
        client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "-"}])
        return then()

    return partial(fa.Program, program)


def test_failing_program_is_refused_or_reported(tried, monkeypatch):
    with pytest.raises(PreflightError, match="failed in 2 of 2 episodes of random players: NameError") as error:
        tried(env=asks_and(mistaken))
    assert line_of(mistaken, "no_such_name") in str(error.value)
    said = tried(env=asks_and(lambda: int("x")))
    assert "failed in 2 of 2 episodes of random players, as it may with a model's answers: ValueError" in said
    assert "failed" not in tried(env=asks_and(lambda: 1.0))


def test_scripted_policy_plays_in_preflight(tried, tiny_llama):
    seats = {"player_0": fa.Policy(str(tiny_llama)), "player_1": fa.Scripted(lambda observation: observation + 1)}
    said = tried(seats=seats)
    assert "episodes of random players failed in World, as a model's may: policy: TypeError" in said
    assert "Let the game answer" not in said


class Slow(World):
    """A step takes 0.3 s. The preflight's time starts with the first one."""

    steps = 0
    since = 0.0

    def act(self, agent, action):
        type(self).since = type(self).since or time.monotonic()
        type(self).steps += 1
        time.sleep(0.3)
        return fa.Outcome()

    @classmethod
    def monotonic(cls):
        return time.monotonic() - cls.since if cls.since else 0.0


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(Slow, "steps", 0)
    monkeypatch.setattr(Slow, "since", 0.0)
    monkeypatch.setattr(preflight, "time", Slow)
    monkeypatch.setattr("forge_trainers.rl.tasks.time", SimpleNamespace(perf_counter=lambda: 0.0))  # of construction


def test_slow_environment_is_stopped_after_the_budget(tried, slow, monkeypatch):
    monkeypatch.setattr(preflight, "BUDGET_S", 0.5)
    said = tried(env=Slow)
    assert "Slow is slow; 0 of 2 episodes ended in 0.5 s, so it is not checked. While" in said and Slow.steps <= 4


class Blocking(World):
    def act(self, agent, action):
        time.sleep(0.3)
        return super().act(agent, action)


def test_environment_that_blocks_is_reported_with_its_place(tried, monkeypatch):
    monkeypatch.setattr(preflight, "REPORT_S", 0.1)
    said = tried(env=Blocking)
    place = f"{Path(__file__).name}:{int(line_of(Blocking, 'time.sleep').rpartition(':')[2])} act"
    assert re.search(f"preflight: Blocking has been running for 0.1 s, now at .*{place}. Code that blocks", said)
    monkeypatch.setattr(preflight, "REPORT_S", 60.0)
    assert "has been running" not in tried(env=Blocking)


def test_environments_skipped_for_time_are_reported_once(tried, slow, monkeypatch):
    monkeypatch.setattr(preflight, "BUDGET_S", 0.3)
    for number in range(4):
        fa.register(f"my/Slow{number}-v0", entry_point=Slow)
    said = tried(env={f"my/Slow{number}-v0": 1.0 for number in range(4)})
    assert "my/Slow0-v0 is slow; 0 of 2 episodes ended" in said and said.count("is slow") == 1
    assert "out of time, skipped 3 environments, the first of them my/Slow1-v0" in said


class Dear(World):
    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        time.sleep(0.1)


def test_expensive_environments_are_not_made_again(tried, monkeypatch):
    monkeypatch.setattr(preflight, "BUDGET_S", 0.05)
    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: 0.0))  # the time is never up
    assert re.search(r"skipped Dear, which takes \d+ s to construct", tried(env=Dear))
    assert Dear.made == 1  # to get its agents


def test_environments_in_worker_processes_are_skipped(tried):
    said = tried(env="forge/Repair-v0")
    assert "skipped forge/Repair-v0, which runs in worker processes" in said


def test_first_prompt_that_fills_the_context_is_refused(tried):
    with pytest.raises(PreflightError, match="context of 256 tokens") as error:
        tried(env_args={"message": "x" * 300})
    # one token per byte: 300 of instructions, plus the template
    assert re.search(r"has 3\d\d tokens, 3[01]\d of them instructions \(player_0 in World\)", str(error.value))
    said = tried(env_args={"message": "x" * 215})
    assert re.search(r"leaves (\d|1[0-5]|none) of max_tokens=16 for the first answer", said)
    assert "of max_tokens=16" not in tried(env_args={"message": "x" * 100})


@pytest.mark.parametrize(("context", "fits", "fills"), [("window", 430, 470), ("summarize", 20, 180)])
def test_conversation_that_cannot_continue_is_reported(tried, tiny_llama, context, fits, fills):
    def said(message, context):
        team = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=16), context=context)
        engine = fa.EngineConfig(max_model_len=512)
        return tried(env_args={"message": "x" * message}, seats=team, engine=engine)

    assert f"context='{context}' cannot continue" in said(fills, context)
    assert "cannot continue" not in said(fits, context)
    assert "cannot continue" not in said(fills, "end")


def test_chat_template_that_refuses_is_reported(tried, tiny_llama, tmp_path):
    import shutil

    refusing = shutil.copytree(tiny_llama, tmp_path / "refusing")
    settings = json.loads((refusing / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('System role not supported') }}"
    (refusing / "tokenizer_config.json").write_text(json.dumps(settings))
    (refusing / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(PreflightError, match=r"policy .* cannot play: .* refuses a conversation of user \(System role"):
        tried(seats=fa.Policy(str(refusing)))


def test_disk_without_room_for_checkpoints_is_refused_or_warned_of(tried, monkeypatch, tiny_llama):
    weights = sum(np.prod(shape) for shape in _shapes(tiny_llama))
    one = 12 * weights + (tiny_llama / "model.safetensors").stat().st_size

    def has(free):
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: type("", (), {"free": int(free)}))

    has(one - 1)
    with pytest.raises(RunFolderError, match="GB free. One checkpoint takes"):
        tried()
    has(one)
    assert "lower keep_checkpoints, or free some space" in tried()
    has(one + 3 * 12 * weights)
    assert "keep_checkpoints" not in tried()
    moving = fa.LearnerConfig(kl_coef=0.1, reference=5)  # two bytes for each weight of the reference
    has(one + 2 * weights - 1)
    with pytest.raises(RunFolderError, match="GB free. One checkpoint takes"):
        tried(learner=moving)
    has(one + 2 * weights)
    assert "lower keep_checkpoints" in tried(learner=moving)


def _shapes(folder):
    from forge_agents.models.resolve import safetensors_header

    return [entry["shape"] for entry in safetensors_header(folder / "model.safetensors").values()]


def test_missing_tracker_is_reported_before_the_start(tried, monkeypatch, tmp_path):
    monkeypatch.setattr("forge_trainers.records.trackers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[mlflow\]"):
        tried(tracker="mlflow")
    assert not (tmp_path / "run").exists()


def test_preflight_of_a_league_uses_its_policy(tried, tiny_llama):
    requests = []

    def reward(trajectories):
        requests.extend(trajectories)
        return [0.0] * len(trajectories)

    tried(seats=fa.League(fa.Policy(str(tiny_llama), name="hero")), reward=reward)
    assert {t.policy for t in requests} == {"hero"} and len(requests) == 4


def test_oracle_is_refused_without_a_scripted_policy(tried, tiny_llama):
    team = fa.Policy(str(tiny_llama), name="team")
    requests = []
    for seats in ({"player_0": team, "player_1": fa.Oracle()}, fa.League(team, anchors=(fa.Oracle(),))):
        with pytest.raises(ValueError, match="World has no oracle.*forge/Codewords-v0"):
            tried(seats=seats)
        assert not World.seeds

        def oracle(*_):
            return lambda seen: requests.append(seen) or "x"

        fa.register("preflight/World-v0", entry_point=World, oracle=oracle)
        tried("preflight/World-v0", seats=seats)
        World.seeds.clear()
    assert requests == ["Now."] * 2, "a league's policy sits everywhere"


def test_a_running_loop_is_no_obstacle(tried):
    async def inside():
        return tried()

    assert "2 episodes" in asyncio.run(inside())


class EndsAtOnce(World):
    """The first action of player_0 ends the game, as an illegal action does."""

    def act(self, agent, action):
        message = {seat: {"forfeits": ["player_0"]} for seat in self.agents}
        return fa.Outcome(rewards={"player_0": -1.0, "player_1": 1.0}, done=True, info=message)


def test_preflight_reports_policies_without_turns(tried, tiny_llama):
    seats = {
        "player_0": fa.Random(),
        "player_1": fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=16)),
    }
    said = " ".join(tried(env=EndsAtOnce, seats=seats).split())
    assert (
        "preflight: EndsAtOnce: policy team had no turn in 2 episodes, which were ended 2 by player_0 (random)" in said
    )
    assert "no turn" not in tried(env=World, seats=seats)


def test_run_without_a_trainable_policy_is_refused_before_anything_is_tried(tried, tiny_llama, tmp_path, capsys):
    frozen = fa.Policy(str(tiny_llama), name="team", trainable=False)
    raises(ValueError, r"no agent has a trainable policy. Give at least one fa.Policy", tried, seats=frozen)
    assert "preflight" not in capsys.readouterr().err and not (tmp_path / "run").exists()
