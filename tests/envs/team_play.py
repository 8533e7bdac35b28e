"""Playing a game whose seats share one reward."""


def play(env, team, seed):
    """Play an episode; ``team(seen, agent)`` says what a seat does. Returns the reward that all seats got."""
    env.reset(seed=seed)
    rewards = dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        seen, reward, terminated, truncated, _ = env.last()
        rewards[agent] += reward
        env.step(None if terminated or truncated else team(seen, agent))
    assert len(set(rewards.values())) == 1
    return rewards[env.possible_agents[0]]
