"""WORD_DUEL as an environment of verifiers: models play the agents in `Roles`, and `PLAYERS` act for the others."""

import contextlib

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

import forge_agents as fa
from forge_agents.envs.env import may_be_silent
from forge_agents.errors import PlayerLeftError
from forge_agents.rollout.episode import play

ID = "WORD_DUEL"
PLAYERS = {"player_1": fa.Random()}  # or fa.Oracle(), fa.Scripted(function), fa.Endpoint(url, model)


class Roles(vf.EnvConfig):
    """Agents that models play, with a reward each. An agent that moves here leaves `PLAYERS`."""

    player_0: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class Seeds(vf.TasksetConfig):
    tasks: int = 1000
    """Number of tasks, with a seed of the environment each."""


class SeedData(vf.TaskData):
    seed: int


async def episode(env, seed, model):
    """Play an episode, in which `model` acts for agents that are not in `PLAYERS`."""
    players = {agent: PLAYERS.get(agent, model) for agent in env.possible_agents}
    return await play(env, players, seed=seed, max_turns=env.spec.max_turns or 1000)


class SeedTask(vf.Task[SeedData]):
    async def validate(self, runtime):
        """Whether an episode with random play in place of models has no error."""
        with contextlib.closing(fa.make(ID)) as env:
            return (await episode(env, self.data.seed, fa.Random())).error is None


class Games(vf.Taskset[SeedTask, Seeds]):
    """Episodes with the seeds 0, 1, ..."""

    def load(self):
        return [SeedTask(SeedData(seed=seed), self.config.task) for seed in range(self.config.tasks)]


class Game(vf.Env[Roles]):
    """Plays an episode. A role has the total reward of its agent."""

    async def run(self, task, agents):
        env, interactions, ended = fa.make(ID), {}, set()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(env.close)

            async def act(observation, agent):
                if agent not in interactions:
                    instructions = getattr(env, "instructions", lambda agent: "")(agent)
                    seen = task.with_system_prompt(instructions or None)
                    interactions[agent] = await stack.enter_async_context(getattr(agents, agent).interaction(seen))
                if agent not in ended:
                    segment = await interactions[agent].turn(observation)
                    if not segment.terminated:
                        return segment.last_reply
                    ended.add(agent)
                if may_be_silent(env):  # a model that ends early in a game loses it
                    return ""
                raise PlayerLeftError(f"the model of {agent!r} ended early")

            played = await episode(env, task.data.seed, fa.Scripted(act, name="model"))
        if played.error is not None and played.error.kind != PlayerLeftError.__name__:
            raise RuntimeError(f"the environment failed in {played.error.where}: {played.error.message}")
        for agent, interaction in interactions.items():
            interaction.trace.record_reward("game", played.rewards[agent])


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks the model in this process, without the program that other harnesses start for each turn."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # noqa: PLR0917
        system, messages = self.resolve_prompt(data)
        messages = ([{"role": "system", "content": system}] if system else []) + [message_to_wire(m) for m in messages]
        async with httpx.AsyncClient(timeout=600, headers={"Authorization": f"Bearer {secret}"}) as client:
            body = {"model": ctx.model, "messages": messages}
            response = await client.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(0 if response.is_success else 1, "", response.text)


__all__ = ["Chat", "Game", "Games"]
