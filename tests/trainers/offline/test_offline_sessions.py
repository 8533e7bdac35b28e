"""Sessions of programs with rewards of their own: each is a sample of SFT, or a side of a pair of DPO."""

import asyncio
import math

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.types import EpisodeGroup
from forge_trainers.offline.data import read_demonstrations, read_pairs
from forge_trainers.records.run_folder import RunFolder
from forge_trainers.rl.report import log_step
from forge_trainers.rl.samples import compute_advantages, make_samples
from forge_trainers.rl.scoring import score

REWARDS = {"good": 1.0, "fair": 0.5, "bad": 0.0}


async def attempts(task, client):
    """Ask twice for a word and once for another, each in a session, and the first session once more."""

    async def ask(messages, session):
        messages = [{"role": "user", "content": text} if place % 2 == 0 else {"role": "assistant", "content": text}
                    for place, text in enumerate(messages)]  # fmt: skip
        headers = {"X-Session-ID": session}
        reply = await client.chat.completions.create(model="hero", messages=messages, extra_headers=headers)
        return reply.choices[0].message.content

    first = await ask(["A word?"], "a")
    words = {"a": first, "b": await ask(["A word?"], "b"), "c": await ask(["A name?"], "c")}
    await ask(["A word?", first, "Sure?"], "a")
    return words


def by_session(task, result):
    return {"hero": {session: REWARDS[word] for session, word in result.items()}}


fa.register(
    "sessions/Attempts-v0", entry_point=fa.Program, program=attempts, agents=("hero",), reward=by_session, tasks=[{}]
)


def episode(words, seed=0):
    """An episode whose calls are answered by `words`, in order: sessions a, b, c and a again."""
    answers = iter(words.split())
    return fa.play("sessions/Attempts-v0", fa.Scripted(lambda _: next(answers), name="hero"), seed=seed)


@pytest.fixture
def sft(renderer):
    def read(data, reward=None, **settings):
        config = fa.SFTConfig(**settings)
        return read_demonstrations(data, renderer, config, policy="hero", room=200, reward=reward)

    return read


@pytest.fixture
def dpo(renderer):
    def read(data, reward=None, **settings):
        return read_pairs(data, renderer, fa.DPOConfig(**settings), policy="hero", room=200, reward=reward)

    return read


def learned(*streams):
    """The answers of streams, those of one conversation joined by a blank."""
    texts = []
    for stream in streams:
        marked = np.where(stream.mask & (stream.ids < 256), stream.ids, ord(" "))
        texts.append(" ".join(bytes(marked.astype(np.uint8)).decode().split()))
    return texts


def preferred(result):
    return [(*learned(*pair.chosen), *learned(*pair.rejected)) for pair in result.items]


def test_each_session_is_a_sample_with_its_reward(sft):
    games = [episode("good bad fair yes"), episode("bad bad bad no")]
    assert games[0].rewards == {"hero": 0.5} and games[1].rewards == {"hero": 0.0}
    everything = sft(games)
    assert learned(*everything.items) == ["good yes", "bad", "fair", "bad no", "bad", "bad"]
    chosen = sft(games, min_reward=0.5)
    assert learned(*chosen.items) == ["good yes", "fair"]
    assert chosen.counts == {"learned": 2, "below min_reward": 4, "rendered from text": 2}
    assert learned(*sft(games, best_per_group=1).items) == ["good yes"]
    assert chosen.items[1].source == "row 0, agent 'hero', session 2"
    trajectories = [game.trajectories["hero"] for game in games]
    assert learned(*sft(trajectories, min_reward=1.0).items) == ["good yes"]


def test_pairs_are_sessions_of_one_group_and_prompt(dpo):
    group = EpisodeGroup(env_id="sessions/Attempts-v0", seed=0, episodes=(
        episode("fair good fair x"), episode("bad fair fair y"),
    ))  # fmt: skip
    result = dpo([group])
    assert preferred(result) == [("good", "bad y")]
    assert result.counts == {"learned": 1, "groups without a difference": 1, "rendered from text": 2}
    assert preferred(dpo([episode("good bad fair yes"), episode("bad bad good no")])) == [
        ("good yes", "bad"),
        ("good", "fair"),
    ]
    with pytest.raises(ValueError, match="nothing is left to learn .4 groups without a difference"):
        dpo([episode("good good bad x", seed=0), episode("bad bad good y", seed=1)])


def test_another_reward_scores_each_session(sft, dpo):
    def long(trajectories):
        return np.array([float(len(t.turns)) for t in trajectories])

    games = [episode("bad bad good no")]
    assert learned(*sft(games, reward=long, min_reward=2.0).items) == ["bad no"]
    assert preferred(dpo(games, reward=long)) == [("bad no", "bad")]


def stored(folder, groups, reward=None):
    """Score and record `groups` as a step of a run does, and return the groups as they were scored."""
    scored = asyncio.run(score(groups, reward))
    samples = make_samples(compute_advantages(scored, fa.Credit(), {"hero"}), {"hero"})
    run = RunFolder(folder, {})
    log_step(run, 0, scored, samples, {}, learners={"hero": None}, keep_episodes=8)
    run.close()
    return scored


def test_a_run_folder_has_the_rewards_that_sessions_were_trained_on(sft, dpo, tmp_path):
    group = EpisodeGroup(env_id="sessions/Attempts-v0", seed=0, episodes=(
        episode("good bad fair x"), episode("bad fair fair y"),
    ))  # fmt: skip

    def reverse(trajectories):
        return np.array([1.0 - t.reward if t.turns[0].action != "fair" else math.nan for t in trajectories])

    stored(tmp_path / "env", [group])
    (first, second) = fa.load_episodes(tmp_path / "env")
    assert first["trained_session_rewards"] == [[1.0, 0.0, 0.5]] and first["trained_rewards"] == [0.5]
    assert second["trained_session_rewards"] == [[0.0, 0.5, 0.5]]
    assert learned(*sft(tmp_path / "env", min_reward=1.0).items) == ["good x"]
    stored(tmp_path / "reverse", [group], reverse)
    (first, second) = fa.load_episodes(tmp_path / "reverse")
    assert first["trained_session_rewards"][0][:2] == [0.0, 1.0] and math.isnan(first["trained_session_rewards"][0][2])
    result = sft(tmp_path / "reverse", min_reward=1.0)
    assert learned(*result.items) == ["bad", "bad y"]
    assert result.counts == {"learned": 2, "without reward": 3, "below min_reward": 1, "rendered from text": 2}
    assert preferred(dpo(tmp_path / "reverse")) == [("bad", "good x")]


def test_sessions_without_a_recorded_reward_pass_no_bound(sft, tmp_path):
    run = RunFolder(tmp_path, {})
    run.keep_episodes(0, [episode("good bad fair x")] * 2, [{"hero": 0.5}] * 2)
    run.keep_episodes(0, [episode("good bad fair x")], [{"hero": 0.5}], session_rewards=[{"hero": [1.0]}])
    run.close()
    assert fa.load_episodes(tmp_path)[0]["trained_session_rewards"] == [None]
    assert sft(tmp_path).counts == {"learned": 9, "rendered from text": 9}
    with pytest.raises(ValueError, match="nothing is left to learn .9 without reward"):
        sft(tmp_path, min_reward=0.5)


def test_whole_trajectories_are_not_compared_with_sessions(dpo):
    game = episode("good bad fair x")
    whole = game.trajectories["hero"]
    failed = fa.Trajectory(
        agent="hero", policy="hero", turns=whole.turns[:1], env_id=whole.env_id, seed=0, initial_reward=-1.0
    )
    assert preferred(dpo([whole, failed])) == [("good x", "bad")]
