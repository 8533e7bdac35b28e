"""Helpers to play games by functions or oracles."""

import forge_agents as fa


def begin(env, seed=0):
    """Start an episode. Returns the environment."""
    env.reset(seed=seed)
    return env


def act(env, *texts):
    """Play actions in order."""
    for text in texts:
        env.step(text)


def play(env, team, seed):
    """Play an episode with actions ``team(seen, agent)``. Returns the common reward."""
    env.reset(seed=seed)
    rewards = dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        seen, reward, terminated, truncated, _ = env.last()
        rewards[agent] += reward
        env.step(None if terminated or truncated else team(seen, agent))
    assert len(set(rewards.values())) == 1
    return rewards[env.possible_agents[0]]


def with_oracle(env_id, oracle):
    """Register the same environment with another oracle. Returns its id."""
    spec = fa.spec(env_id)
    new = f"tests/{spec.name.partition('/')[2]}-{oracle.__name__}-v0"
    fa.register(new, entry_point=spec.entry_point, levels=spec.levels, tags=spec.tags, oracle=oracle, **spec.kwargs)
    return new


def shown(env_id, seed, oracle=None, level=None, **arguments):
    """Play an episode by the environment's oracle or `oracle`. Returns the environment and the common reward."""
    env_id = with_oracle(env_id, oracle) if oracle is not None else env_id
    env = fa.make(env_id if level is None else f"{env_id}@{level}", **arguments)
    episode = fa.play(env, fa.Oracle(), seed=seed)
    assert episode.error is None, episode.error
    (reward,) = set(episode.rewards.values())
    return env, reward
