"""Programs, and episodes of them."""

import asyncio

import forge_agents as fa
from forge_agents.rollout.episode import play


def played(program=(), policy="solved", *, seed=3, count=None, **options):
    """The episode of a program, or a list of `count` episodes that run at the same time.

    Args:
        policy: The answer of all agents, a policy, or policies by agent.
    """
    if isinstance(policy, str):
        policy = fa.Scripted(lambda observation, answer=policy: answer)
    envs = [fa.Program(program, **options) for _ in range(count or 1)]
    agents = envs[0].possible_agents
    policies = policy if isinstance(policy, dict) else dict.fromkeys(agents, policy)

    async def run():
        return await asyncio.gather(*(play(env, policies, seed=seed + number) for number, env in enumerate(envs)))

    try:
        episodes = asyncio.run(run())
    finally:
        for env in envs:
            env.close()
    return episodes[0] if count is None else episodes


def result_of(episode):
    """The result of the program, as the agent's infos have it."""
    return episode.trajectories["agent"].info["result"]
