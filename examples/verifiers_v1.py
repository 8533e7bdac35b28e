"""Environments of verifiers 0.4 (PrimeIntellect), also with several roles, in the Python where it is installed.

A process of that Python plays the library's own episodes, with its tools and rewards, so that its libraries and ours
need not agree. Every role is an agent with its own policy, and each trace of a role has its own reward. Roles that the
environment does not train are frozen.

    python examples/verifiers_v1.py PYTHON TASKSET [--env best-of-n] [--tasks 100] [--steps 20] [--lr 3e-4]

The folder `telling` is an environment with two roles. A control has learning rate 0:

    python examples/verifiers_v1.py PYTHON telling [--lr 0] [--seed 0]
"""

import asyncio
import itertools
import json
import os
import queue
import subprocess
import sys
import threading

# ---- where verifiers is installed


def environment(taskset, env_id):
    """The environment, and its roles, each with whether the library trains it."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

    ids = {"id": env_id, "taskset": {"id": taskset}}
    fields = agent_config_fields(resolve_env_config(ids))
    seats = {role: {"model": role, "client": None, "runtime": {"type": "subprocess"}} for role in fields}
    for role, field in fields.items():
        if field.harness is None and default_harness_id(taskset) == "bash":
            seats[role]["harness"] = {"id": "null"}  # a chat with tools, without a shell
    env = load_environment(resolve_env_config(ids | seats))
    agents = vf.Agents(env.config)
    asyncio.run(env.setup(agents))
    return env, {role: getattr(agents, role).trainable for role in seats}


async def episode(env, roles, request):
    """Play one episode. Its result are rewards by role and trace: the library sends a trace's id as X-Session-ID."""
    import verifiers.v1 as vf

    traces, variable = [], f"KEY_{request['number']}"
    os.environ[variable] = request["key"]
    gateway = vf.EvalClientConfig(base_url=request["url"], api_key_var=variable)
    task = next(iter(env.taskset.include(idx=[str(request["task"])])), None)
    if task is None:
        raise ValueError(f"the taskset has no task {request['task']}. Pass fewer --tasks")
    try:
        done = await env.run_episode(task, vf.ModelContext(model="", client=gateway), on_trace=traces.append)
    finally:
        del os.environ[variable]
    if not done.ok:
        raise RuntimeError([*done.errors, *(error for trace in done.traces for error in trace.errors)])
    asked = [trace for trace in traces if trace.num_turns]
    return {role: {trace.id: trace.reward for trace in asked if trace.agent.name == role} for role in roles}


async def serve(taskset, env_id):
    """Answer each line of standard input, a request, with a line."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library and its processes may print
    env, roles = await asyncio.to_thread(environment, taskset, env_id)
    print(json.dumps(roles), file=output, flush=True)

    async def answer(request):
        try:
            result = {"rewards": await episode(env, roles, request)}
        except Exception as error:  # noqa: BLE001  # the boundary: only this episode fails
            result = {"error": repr(error)}
        print(json.dumps({"number": request["number"], **result}), file=output, flush=True)

    async with env.serving(), asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(answer(json.loads(line)))


# ---- here


class Verifiers:
    """The process of the library, as a program: episodes of several threads share it."""

    def __init__(self, python, taskset, env_id=""):
        command = [python, __file__, "--serve", taskset, env_id]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        roles = self._process.stdout.readline()
        if not roles:
            raise RuntimeError(f"{python} ended before it served {taskset!r}. Its last lines on the console say why")
        self.roles = json.loads(roles)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._results = {}
        threading.Thread(target=self._read, daemon=True).start()

    def __call__(self, task, client):
        result, number = queue.SimpleQueue(), next(self._numbers)
        request = {"number": number, "task": task, "url": str(client.base_url), "key": client.api_key}
        self._results[number] = result
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = result.get()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["rewards"]

    def _read(self):
        for line in self._process.stdout:
            answer = json.loads(line)
            self._results.pop(answer["number"]).put(answer)
        for result in list(self._results.values()):
            result.put({"error": "the process of verifiers has ended"})

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def register(program, tasks):
    import forge_agents as fa

    agents = tuple(program.roles)
    fa.register("my/Verifiers-v0", entry_point=fa.Program, program=program, agents=agents, tasks=tasks, timeout_s=300)


def policies(roles, model, rank, sampling):
    import forge_agents as fa

    lora = fa.LoRA(rank=rank, alpha=2 * rank) if rank else None
    return {
        role: fa.Policy(model, name=role, trainable=trainable, lora=lora if trainable else None, sampling=sampling)
        for role, trainable in roles.items()
    }


def main():
    import _study

    parser = _study.parser(__doc__, seed=0, steps=20, lr=3e-4, episodes=40, max_tokens=24, out="runs/verifiers_v1")
    parser.add_argument("python", help="the Python in which verifiers is installed")
    parser.add_argument("taskset", help="name of a taskset of the library")
    parser.add_argument("--env", default="", help="name of an environment of the library that plays the taskset")
    parser.add_argument("--tasks", type=int, default=100, help="number of tasks; a fifth is held out")
    parser.add_argument("--rank", type=int, default=16, help="rank of the roles' adapters; 0: all weights")
    parser.add_argument("--groups", type=int, default=4, help="groups of four episodes in a step")
    args = parser.parse_args()
    import forge_agents as fa

    program = Verifiers(args.python, args.taskset, args.env)
    register(program, range(args.tasks))
    team = policies(program.roles, args.model, args.rank, fa.Sampling(max_tokens=args.max_tokens))
    config = fa.GRPOConfig(
        seed=args.seed,
        max_resamples=0,
        groups_per_step=args.groups,
        group_size=4,
        learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=512, enforce_eager=True),
    )
    with fa.GRPOTrainer(team, config=config, out_dir=args.out) as trainer:
        before = trainer.evaluate("my/Verifiers-v0", episodes=args.episodes)
        trainer.fit("my/Verifiers-v0", steps=args.steps)
        after = trainer.evaluate("my/Verifiers-v0", episodes=args.episodes)
    for name, result in (("before", before), ("after", after)):
        print(f"{name}: held-out reward {result.reward:.3f} +/- {result.ci:.3f} (95 %)")
    program.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[2:])) if sys.argv[1:2] == ["--serve"] else main()
