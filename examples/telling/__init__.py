"""An environment of verifiers 0.4 with two roles: a teller reads a digit, and guessers read only what the teller says.

`examples/verifiers_v1.py` trains both roles. Each of two guessers is a trace with its own reward. The teller gets their
mean.
"""

import httpx
import verifiers.v1 as vf


class DigitData(vf.TaskData):
    digit: int


class DigitTask(vf.Task[DigitData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.agent.name == "guesser" and trace.last_reply.strip(" .") == str(self.data.digit))


class Digits(vf.Taskset[DigitTask, vf.TasksetConfig]):
    """A hundred tasks."""

    def load(self):
        for number in range(100):
            prompt = f"Item {number} has the digit {number % 10}. Tell your partner the digit."
            yield DigitTask(DigitData(prompt=prompt, digit=number % 10), self.config.task)


class Ask(vf.Harness[vf.HarnessConfig]):
    """One question in this process, without the program of its own that the library's harnesses start for a trace."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # noqa: PLR0917
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=600) as client:
            response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(0 if response.is_success else 1, "", response.text)


class TellingConfig(vf.EnvConfig):
    teller: vf.AgentConfig = vf.AgentConfig()
    guesser: vf.AgentConfig = vf.AgentConfig()


class Telling(vf.Env[TellingConfig]):
    """The teller, then the guessers."""

    async def run(self, task, agents):
        told = await agents.teller.run(task)
        prompt = f"Your partner says: {told.last_reply}\nAnswer with the digit only."
        guess = DigitTask(task.data.model_copy(update={"prompt": prompt}), task.config)
        for _ in range(2):
            await agents.guesser.run(guess)

    async def finalize(self, task, episode):
        teller, *guessers = episode.traces
        teller.record_reward("understood", sum(trace.reward for trace in guessers) / len(guessers))


__all__ = ["Ask", "Digits", "Telling"]
