"""Levels of an environment, and their shares in a curriculum."""

import asyncio
import itertools
import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.errors import ArgumentError, UnknownIdError
from forge_agents.rollout import Rollout
from forge_agents.testing import check_levels
from forge_agents.types import Episode, EpisodeError, Trajectory
from forge_trainers.rl.curriculum import Curriculum, CurriculumConfig, Progress
from forge_trainers.rl.scoring import score
from forge_trainers.rl.tasks import TaskSampler

FACES = (2, 4, 8, 16)
WINDS = ("north", "east", "south", "west")


@fa.register("test/Dice-v0", max_turns=1, levels=[{"faces": faces} for faces in FACES])
class Dice(fa.TurnEnv):
    """Guess a die. The observation reveals results below `known`."""

    possible_agents = ["gambler"]

    def __init__(self, faces=6, pay=1.0, top=None):
        super().__init__()
        self.faces, self.pay, self.max_reward = faces, pay, top

    def setup(self, rng):
        self.shown = int(rng.integers(self.faces))

    def instructions(self, agent):
        return "Guess."

    def observe_text(self, agent):
        return f"a die of {self.faces} faces"

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: self.pay * (action == str(self.shown))}, done=True)


@fa.register("test/Fine-v0", max_turns=1, levels=[{"faces": faces} for faces in FACES])
class Fine(Dice):
    """Every wrong answer has a negative reward, and no answer a positive one."""

    def __init__(self, faces):
        super().__init__(faces, top=-0.5)

    def act(self, agent, action):
        wrong = action != str(self.shown)
        return fa.Outcome(rewards={agent: -0.5 - 0.5 * wrong}, done=True)


def groups_of(env_id, wins, seed=0):
    """Return a scored group of `env_id` with the given wins."""
    env = fa.make(env_id)
    env.reset(seed=seed)
    answers = iter([str(env.shown) if won else "none" for won in wins])
    me = fa.Scripted(lambda _: next(answers), name="me")
    rollout = Rollout(make_env=lambda: fa.make(env_id), env_id=env_id, policies=me)
    return asyncio.run(score([asyncio.run(rollout.group(seed, len(wins)))]))


_fresh = itertools.count(1000)


def record(progress, plan, level, wins, *, seed=None, top=None):
    """Record a group of a seed, by default of a new one."""
    seed = next(_fresh) if seed is None else seed
    env_id = f"test/Dice-v0@{level}"
    return progress.record(plan, groups_of(env_id, wins, seed), {"me"}, {env_id: top})


def test_an_id_names_the_environment_at_a_level():
    assert fa.spec("test/Dice-v0").levels == tuple({"faces": faces} for faces in FACES)
    hard = fa.spec("test/Dice@3")
    assert (hard.id, hard.name, hard.version, hard.kwargs) == ("test/Dice-v0@3", "test/Dice", 0, {"faces": 8})
    env = fa.make("test/Dice-v0@3")
    assert env.faces == 8 and env.spec.id == "test/Dice-v0@3" and fa.make("test/Dice-v0").faces == 6
    assert fa.make("test/Dice-v0@3", faces=5).faces == 5
    for wrong in ("test/Dice-v0@0", "test/Dice-v0@5"):
        with pytest.raises(UnknownIdError, match=r"has levels 1 to 4"):
            fa.make(wrong)
    with pytest.raises(UnknownIdError, match="registered without levels"):
        fa.make("forge/KuhnPoker-v0@1")
    with pytest.raises(ValueError, match=r"'test/Other-v0@2' has a level. Register 'test/Other-v0' with levels="):
        fa.register("test/Other-v0@2", entry_point=Dice)


def test_levels_are_valid_ids(tmp_path):
    guess = {"one": fa.Scripted(lambda _: "1", name="one")}
    ids = ["test/Dice-v0@1", "test/Dice-v0@4"]
    report = fa.benchmark(guess, ids, episodes=40, out_dir=tmp_path, progress=False)
    won = [np.mean([r.seats["gambler"].reward for r in report.records if r.env == env_id]) for env_id in ids]
    assert 0.25 < won[0] < 0.75 and won[1] < 0.2
    drawn = TaskSampler({"test/Dice-v0@1": 3.0, "test/Dice-v0@4": 1.0}).tasks(0, 0, 200)
    assert sum(task.env_id == "test/Dice-v0@1" for task in drawn) in range(120, 180)


def test_worker_process_plays_the_requested_level():
    env = fa.make("forge/Relay-v0@6", isolation="process")
    try:
        env.reset(seed=1)
        here = fa.make("forge/Relay-v0@6")
        here.reset(seed=1)
        assert env.observe("asker") == here.observe("asker") and max(map(int, [here.gold])) > 18
    finally:
        env.close()


def test_levels_out_of_order_are_detected():
    means = check_levels("test/Dice-v0", fa.Scripted(lambda _: "1"), episodes=60)
    assert means[0] > 0.3 and means[-1] < 0.2
    with pytest.raises(AssertionError, match="no harder than the first"):
        check_levels("test/Dice-v0", fa.Scripted(lambda _: "none"), episodes=20)
    fa.register("test/Upside-v0", entry_point=Dice, levels=[{"faces": 64}, {"faces": 2}])
    with pytest.raises(AssertionError, match="level 2 of test/Upside-v0 is easier than level 1"):
        check_levels("test/Upside-v0", fa.Scripted(lambda _: "1"), episodes=40)


@pytest.mark.parametrize(
    ("env_id", "player"),
    [
        ("forge/Relay-v0", lambda seen: "7"),
        ("forge/AlphabetSort-v0", lambda seen: "\n".join(sorted(seen.partition(": ")[2].split(", ")))),
        ("forge/TreasureHunt-v0", lambda seen: "go " + WINDS[int(seen.split()[-1]) * 7 % 11 % 4]),
    ],
)
def test_levels_of_our_environments_are_ordered_by_difficulty(env_id, player):
    assert len(fa.spec(env_id).levels) >= 5
    check_levels(env_id, fa.Scripted(player), episodes=150)


def test_groups_go_to_levels_with_success_within_bounds():
    plan, progress = Curriculum("test/Dice-v0", explore=0.2), Progress()
    assert progress.shares(plan) == pytest.approx([0.25] * 4)  # no evidence: equal probabilities
    record(progress, plan, 1, [True] * 8)
    record(progress, plan, 2, [True, True, True, False] * 2)
    record(progress, plan, 3, [False] * 8)
    # level 4 is expected to be as hard as level 3
    assert progress.shares(plan) == pytest.approx([0.05, 0.85, 0.05, 0.05])
    record(progress, plan, 2, [True] * 64)
    assert progress.success("test/Dice-v0@2") > 0.85
    # the 8 episodes have decayed to the weight of 6: 0.5 / sqrt(6) from 1 and 0 lies between the bounds
    assert progress.shares(plan) == pytest.approx([0.05 + 0.8 / 3, 0.05, 0.05 + 0.8 / 3, 0.05 + 0.8 / 3])
    for level, won in ((1, True), (3, False), (4, False)):
        record(progress, plan, level, [won] * 64)
    assert progress.shares(plan) == pytest.approx([0.05, 0.85, 0.05, 0.05])  # no level is within bounds: the nearest


def test_team_without_success_gets_the_easiest_level():
    plan, progress = Curriculum("test/Dice-v0", explore=0.2, memory=10_000), Progress()
    for level, episodes in ((1, 400), (2, 40), (3, 30), (4, 30)):
        record(progress, plan, level, [False] * episodes)
    assert progress.shares(plan) == pytest.approx([0.85, 0.05, 0.05, 0.05]), "not those of which least is known"
    record(progress, plan, 2, [True])
    assert progress.shares(plan) == pytest.approx([0.05, 0.85, 0.05, 0.05]), "the nearest"


def test_success_rate_forgets_old_episodes():
    plan, progress = Curriculum("test/Dice-v0", memory=16), Progress()
    record(progress, plan, 1, [False] * 8)
    for _ in range(8):
        record(progress, plan, 1, [True] * 8)
    left = (1 - 1 / 16) ** 64
    weights = [(1 - 1 / 16) ** (8 * age) for age in range(9)]
    assert progress.success("test/Dice-v0@1") == pytest.approx(1 - left / sum(weights))


def test_success_rates_decay_to_one_episode_at_least():
    plan, progress = Curriculum("test/Dice-v0", memory=16), Progress()
    record(progress, plan, 2, [False] * 8)
    for _ in range(3):
        record(progress, plan, 1, [True] * 8)
    left = 8 * (1 - 1 / 16) ** 24
    record(progress, plan, 2, [True] * 2)
    left *= (1 - 1 / 16) ** 2
    assert progress.success("test/Dice-v0@2") == pytest.approx(2 / (2 + left))
    for _ in range(2):
        record(progress, plan, 1, [True] * 160)
    assert progress.success("test/Dice-v0@2") == pytest.approx(2 / (2 + left))  # the weight of one episode
    record(progress, plan, 2, [False])
    assert progress.success("test/Dice-v0@2") == pytest.approx(2 / (2 + left) / 2)


def test_metrics_report_level_and_success():
    plan, progress = Curriculum("test/Dice-v0"), Progress()
    success = {"curriculum/success/test/Dice-v0@3": 0.5}
    assert record(progress, plan, 3, [True, False]) == {"curriculum/level": 3.0} | success
    assert progress.record(plan, [], {"me"}, {}) == success


def test_success_is_a_fraction_of_max_reward(caplog):
    plan, progress = Curriculum("test/Dice-v0"), Progress()
    with caplog.at_level(logging.WARNING):
        record(progress, plan, 1, [True, True], top=4.0)
        assert progress.success("test/Dice-v0@1") == 0.25 and not caplog.records
        record(progress, plan, 2, [True, False], top=0.5)
        record(progress, plan, 2, [True, False], top=0.5)
    assert progress.success("test/Dice-v0@2") == 0.5
    (message,) = caplog.records
    assert "lie between 0 and 2 times the maximum" in message.getMessage()


@pytest.mark.parametrize("top", [0.0, -0.5, float("inf")])
def test_curriculum_refuses_invalid_max_rewards(tmp_path, top):
    trainer = fa.GRPOTrainer(fa.Policy("nowhere", name="me"), out_dir=tmp_path / "run")
    with pytest.raises(ArgumentError, match=rf"max_reward={top:g} of test/Dice-v0@1 .* Shift the rewards"):
        trainer.fit(fa.Curriculum("test/Dice-v0"), steps=1, env_args={"top": top})
    assert not (tmp_path / "run").exists()


def test_success_without_max_reward_is_the_reward():
    easy, *_, hard = check_levels("test/Fine-v0", fa.Scripted(lambda _: "1"), episodes=60)
    assert -1 <= hard < easy <= -0.5


def test_success_counts_trained_agents_without_failures():
    plan, progress = Curriculum("test/Dice-v0"), Progress()
    groups = groups_of("test/Dice-v0@1", [True, True])
    progress.record(plan, groups, {"somebody else"}, {})
    with pytest.raises(KeyError):
        progress.success("test/Dice-v0@1")


def test_success_leaves_out_agents_that_miss_an_episode():
    env_id = "test/Dice-v0@1"
    (played,) = groups_of(env_id, [True, False])
    failure = EpisodeError(where="make", kind="E", message="")
    failed = Episode(env_id=env_id, seed=0, trajectories={}, error=failure, end_reason="error")
    guest = Trajectory(agent="guest", policy="me", turns=(), initial_reward=1.0)
    joined = replace(played.episodes[1], trajectories={**played.episodes[1].trajectories, "guest": guest})
    (scored,) = asyncio.run(score([replace(played, episodes=(played.episodes[0], joined, failed))]))
    progress = Progress()
    progress.record(Curriculum("test/Dice-v0"), [scored], {"me"}, {})
    assert progress.success(env_id) == (1 + 0.5) / 2


def test_informative_seeds_are_replayed_and_least_informative_are_dropped():
    plan, progress = Curriculum("test/Dice-v0", replay=0.5, max_seeds=2, explore=1.0), Progress()
    record(progress, plan, 1, [True, False], seed=11)
    record(progress, plan, 2, [True, False, False, False], seed=12)
    record(progress, plan, 3, [False, False], seed=13)  # no win: not informative
    sampler = TaskSampler(plan, progress=progress)
    old = [task.seed for task in sampler.tasks(0, 0, 400) if task.seed < 100]
    assert len(old) == pytest.approx(200, abs=30)
    assert old.count(11) / len(old) == pytest.approx(0.25 / (0.25 + 3 / 16), abs=0.1)
    record(progress, plan, 3, [True, True, False], seed=14)
    assert {task.seed for task in sampler.tasks(0, 1, 200)} & {11, 12, 13, 14} == {11, 14}
    record(progress, plan, 1, [True, True], seed=11)  # solved
    assert {task.seed for task in sampler.tasks(0, 2, 200)} & {11, 12, 13, 14} == {14}


def test_replayed_seeds_do_not_count_as_success():
    plan, progress = Curriculum("test/Dice-v0", replay=0.5), Progress()
    for seed in range(10):
        record(progress, plan, 1, [seed == 0, False], seed=seed)
    before = progress.success("test/Dice-v0@1")
    result = [record(progress, plan, 1, wins, seed=0) for wins in ([True, True], [True, False])]
    assert before == pytest.approx(0.05, abs=0.01)
    assert result[0]["curriculum/success/test/Dice-v0@1"] == before, "it was chosen, because it can be won"
    assert result[1]["curriculum/success/test/Dice-v0@1"] > before, "solved, it was forgotten: a seed like others"
    assert progress.replayed(replace(plan, replay=0.99), np.random.default_rng(1)) == ("test/Dice-v0@1", 0)
    before = progress.success("test/Dice-v0@1")
    state, progress = progress.state_dict(), Progress()
    progress.load_state_dict(state)  # resumed: the seed is known as one that was replayed
    late = [record(progress, plan, 1, [True, True], seed=0) for _ in range(2)]  # drawn twice before the first result
    assert {row["curriculum/success/test/Dice-v0@1"] for row in late} == {before}


def test_resumed_curriculum_draws_the_same_tasks():
    plan, progress = Curriculum("test/Dice-v0", replay=0.3), Progress()
    record(progress, plan, 1, [True] * 8, seed=1)
    record(progress, plan, 2, [True, False] * 4, seed=2)
    resumed = Progress()
    resumed.load_state_dict(progress.state_dict())
    first, second = (TaskSampler(plan, progress=one) for one in (progress, resumed))
    assert first.tasks(3, 7, 50) == second.tasks(3, 7, 50) != first.tasks(3, 8, 50)
    progress._replayed = {(f"test/Dice-v0@{number % 4}", number) for number in range(50)}
    saved = progress.state_dict()  # in one order, also in other processes
    assert saved["replayed_seeds"].tolist() == sorted(range(50), key=lambda number: (number % 4, number))
    empty = Progress()
    empty.load_state_dict(Progress().state_dict())
    assert empty.shares(plan) == pytest.approx([0.25] * 4)


@fa.register("test/Listed-v0", max_turns=1, levels=[{"faces": 2}, {"faces": 4}])
class Listed(Dice):
    num_training_tasks = 20


@pytest.mark.parametrize("replay", [0.0, 0.3])
def test_all_tasks_of_each_level_are_drawn_before_any_is_repeated(replay):
    plan, progress = Curriculum("test/Listed-v0", replay=replay, explore=0.3), Progress()
    sampler, drawn = TaskSampler(plan, progress=progress), {}

    def sample(step):
        drawn[step] = sampler.tasks(0, step, 4)

    for step in range(80):
        if step == 40:  # resumed after 39 steps; the step that was sampled ahead is sampled again
            state, progress = progress.state_dict(), Progress()
            progress.load_state_dict(state)
            sampler = TaskSampler(plan, progress=progress)
            assert sampler.tasks(0, step - 2, 4) == drawn[step - 2]  # a late group of the last trained step
            sample(step - 1)
        sample(step)
        if step:  # each step is sampled before the last one is trained
            groups = [groups_of(t.env_id, [t.env_id[-1] == "1", t.seed % 3 == 0], t.seed) for t in drawn[step - 1]]
            progress.record(plan, [group for pair in groups for group in pair], {"me"}, {})
    for level in (1, 2):
        seeds = {t.seed for step in drawn for t in drawn[step] if t.env_id == f"test/Listed-v0@{level}"}
        count = Counter(seed % 20 for seed in seeds)
        assert len(count) == 20 and max(count.values()) - min(count.values()) <= 1, count


def test_late_groups_of_a_run_that_is_resumed_with_more_groups_are_not_counted_again():
    progress, plan = Progress(), Curriculum("test/Listed-v0")
    sampler = TaskSampler(plan, progress=progress)
    sampler.tasks(0, 0, 4)
    progress.record(plan, [], {"me"}, {})
    before = progress.collected_before(1)
    assert sum(before.values()) == 4 and len(sampler.tasks(0, 0, 6)) == 6
    assert progress.collected_before(1) == before


def test_run_file_declares_a_curriculum():
    plan = {"policies": {"me": fa.Policy("nowhere")}, "curriculum": CurriculumConfig()}
    easy, hard = ids = ["test/Dice-v0@1", "test/Dice-v0@3"]
    listed, weighed = fa.RunConfig(env=ids, **plan), fa.RunConfig(env={easy: 1.0, hard: 1.0}, **plan)
    assert listed == weighed and listed.played.env_ids == tuple(ids) and listed.suite == f"{easy}+{hard}"
    assert fa.RunConfig(env="test/Dice-v0", **plan).suite == "+".join(f"test/Dice-v0@{n}" for n in (1, 2, 3, 4))
    plain = fa.RunConfig(env="test/Dice-v0", policies=plan["policies"])
    assert plain.suite == plain.played == "test/Dice-v0"
    played = replace(plain, curriculum=CurriculumConfig(replay=0.25)).played
    assert played == Curriculum("test/Dice-v0", replay=0.25)
    for wrong in ([], [easy, easy]):
        with pytest.raises(ValueError, match=r"Name one id or more, each once"):
            fa.RunConfig(env=wrong, **plan)


def test_held_out_seeds_are_of_all_levels():
    tasks = TaskSampler(Curriculum("test/Dice-v0")).held_out(8)
    assert [task.env_id for task in tasks] == [f"test/Dice-v0@{level}" for level in (1, 2, 3, 4)] * 2
    assert [task.seed for task in tasks] == list(range(HELD_OUT_FROM, HELD_OUT_FROM + 8))


def test_invalid_curriculum_is_refused():
    with pytest.raises(ArgumentError, match="has no levels"):
        TaskSampler(Curriculum("forge/KuhnPoker-v0"))
    with pytest.raises(ArgumentError, match="two or more different ids"):
        TaskSampler(Curriculum(["test/Dice-v0@1", "test/Dice-v0@1"]))
    with pytest.raises(ArgumentError, match="level 1 of test/Dice-v0 sets faces"):
        TaskSampler(Curriculum("test/Dice-v0"), {"faces": 3})
    assert TaskSampler(Curriculum("test/Dice-v0"), {"pay": 2.0}).make("test/Dice-v0@2").pay == 2.0
    with pytest.raises(ValueError, match="0 <= low < high <= 1"):
        Curriculum("test/Dice-v0", low=0.5, high=0.5)
    with pytest.raises(ValueError, match="explore=0"):
        Curriculum("test/Dice-v0", explore=0)


def test_generators_of_reasoning_gym_have_levels():
    pytest.importorskip("reasoning_gym")
    assert len(fa.spec("reasoning-gym/chain_sum-v0").levels) == 4
    easy, hard = (fa.make(f"reasoning-gym/chain_sum-v0@{level}") for level in (1, 4))
    easy.reset(seed=1)
    hard.reset(seed=1)
    assert len(hard.observe("solver")) > len(easy.observe("solver"))
