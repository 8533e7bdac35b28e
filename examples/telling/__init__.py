"""An environment of verifiers 0.4 with two roles: a teller reads a digit, and guessers read only what the teller says.

`examples/verifiers_v1.py` trains both roles. Half of the reward is the fraction of digits in an answer. The other half
is, for each of two guessers, a right answer, and for the teller the fraction of right answers.
"""

import httpx
import verifiers.v1 as vf


class DigitData(vf.TaskData):
    digit: int


class DigitTask(vf.Task[DigitData]):
    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        """Fraction of digits in the answer, for both roles."""
        return sum(char in "0123456789" for char in trace.last_reply) / max(1, len(trace.last_reply))


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
        right = [float(trace.last_reply == str(task.data.digit)) for trace in guessers]
        for trace, value in zip(guessers, right, strict=True):
            trace.record_reward("right", value, weight=0.5)
        teller.record_reward("understood", sum(right) / len(right), weight=0.5)


__all__ = ["Ask", "Digits", "Telling"]
