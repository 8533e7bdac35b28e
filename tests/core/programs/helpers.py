"""Episodes of programs, and requests as programs send them."""

import asyncio
import http.client
import json

import forge_agents as fa
from forge_agents.programs.traces import import_traces
from forge_agents.rollout.episode import play

WAIT_S = 120.0
"""For what comes at once, also on a machine where others are at work."""


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


def request(session, path="/v1/chat/completions", *, body=None, method="POST", headers=None, token=None):
    """Return status and JSON of a request. An empty `token` sends none."""
    host = session.url.split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=WAIT_S)
    given = {"authorization": f"Bearer {session.token if token is None else token}"} if token != "" else {}
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, text if method == "POST" else None, {**given, **(headers or {})})
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    kind = answer.headers.get("content-type", "")
    return answer.status, json.loads(said) if "json" in kind else said.decode()


def asked(text="Hello.", model="planner", **more):
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def imported(folder, *values, **options):
    """The result of an import of these lines, its rows, and the messages about it."""
    folder.mkdir(exist_ok=True)
    source, out, lines = folder / "in.jsonl", folder / "out.jsonl", []
    source.write_text("".join(f"{v if isinstance(v, str) else json.dumps(v)}\n" for v in values))
    out.unlink(missing_ok=True)
    result = import_traces([source], out, say=lines.append, **options)
    return result, [json.loads(line) for line in out.read_text().splitlines()], lines
