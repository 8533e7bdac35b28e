"""Models that answer programs where no episode is played, in the way in which they were trained.

In: policies, their engines, calls. Out: replies, any number at once. Waits for engines, which keep their own deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from forge_agents.envs.env import CONVERSATION
from forge_agents.errors import ActorDiedError, LateAnswerError, StallError
from forge_agents.policy import Policy, Sampling
from forge_agents.programs.calls import Call, RefusedError, Reply, reply_to, shown
from forge_agents.programs.gateway import Gateway, Question, Session, _Histories, _Waiting
from forge_agents.rollout.players import ContextFullError, ModelPlayer, PolicyEngine

_HELD_TOKENS = 20_000_000
"""Of all conversations that are remembered, prompts counted whole: some hundred megabytes."""
_ONES_TOKENS = _HELD_TOKENS // 8
"""Of one of them: where it branches without end, the others would be forgotten."""


@dataclass(slots=True, eq=False)
class _Talk:
    """A conversation, and all that branched off it."""

    seat: str
    player: ModelPlayer
    answers: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Of each answer that may be gone on from its mark, and its tokens with those of the prompt; by decision, what was
    said or gone on from last at the end."""
    decided: int = 0
    """Decisions of its player, those that failed afterwards included."""
    tokens: int = 0


class Standing(Session):
    """Answers every call of whoever has its token with a policy, as the call's turn would be answered in an episode.

    What a model reads is what it read in training: tools and forms in the system prompt, no thought of another, and of
    an answer that a call goes on from the tokens that were sampled. Conversations are remembered up to a number of
    tokens, those of the longest silence forgotten first, and of one that takes more than its share the answers that
    were of no use for the longest time; what is not known is read as it stands.

    Nobody learns from these answers, so that wishes about sampling are followed. What a call does not say is the
    policy's, and its limit of tokens is the most that a call gets.

    Make it in the loop of the engines.

    Args:
        gateway: The server.
        models: Policies by the names that programs ask for.
        policies: The policies, by name.
        engines: Their engines and renderers, by policy name.
        token: What requests must bring; empty makes one.
    """

    _where, _over = "nobody here", "the server is ending"

    def __init__(
        self,
        gateway: Gateway,
        models: Mapping[str, str],
        policies: Mapping[str, Policy],
        engines: Mapping[str, PolicyEngine],
        *,
        token: str = "",
    ) -> None:
        super().__init__(gateway, models, token=token)
        self._policies, self._policy_engines = policies, engines
        self._engines = asyncio.get_running_loop()
        self._known: _Histories[tuple[_Talk, int]] = _Histories()
        self._talks: dict[_Talk, None] = {}  # by their last answer, the oldest first
        self._tokens = 0
        self._works: set[Future[None]] = set()
        self.failed: asyncio.Future[None] = self._engines.create_future()
        """Ends with the error of an engine that is gone for good."""
        gateway._admit(self)

    async def drained(self, timeout_s: float) -> None:
        """Refuse new calls, and wait until those under way are answered, or `timeout_s` is over."""
        self._closed = True
        if self._works:
            await asyncio.wait(map(asyncio.wrap_future, list(self._works)), timeout=timeout_s)

    def _ask(self, call: Call, loop: asyncio.AbstractEventLoop) -> _Waiting:
        asked = self._waiting(call, loop)
        try:
            own = _wished(self._policies[asked.seat].sampling, call)
        except BaseException:  # else it would count among those that wait
            self._open.discard(asked)
            raise
        work = asyncio.run_coroutine_threadsafe(self._answered(asked, call, own), self._engines)
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        asked.answered.add_done_callback(lambda _: work.cancel())  # the program may have hung up
        return asked

    async def _answered(self, asked: _Waiting, call: Call, own: Sampling) -> None:
        ended: Reply | RefusedError
        try:
            ended = await self._reply(asked.seat, call, own)
        except ContextFullError as full:
            ended = RefusedError(f"maximum context length: {full}", code="context_length_exceeded")
        except (LateAnswerError, StallError) as late:
            ended = RefusedError(str(late), status=504, code="timeout")
        except ActorDiedError as gone:
            if not self.failed.done():  # before the answer, after which others look
                self.failed.set_exception(gone)
            ended = RefusedError(str(gone), status=503, code="unavailable")
        except Exception as error:  # noqa: BLE001  # the boundary: the program hears it
            ended = RefusedError(f"failed: {shown(error)}", status=500, code="failed")
        finally:  # before the answer, too: who has heard it waits no more
            self._open.discard(asked)
        asked.end(ended)

    async def _reply(self, seat: str, call: Call, own: Sampling) -> Reply:
        found, new, mark = self._known.place(seat, call)
        talk, after = found or (_Talk(seat, self._player(seat)), None)
        if after is not None:  # so that the root of many branches is not the first to be forgotten
            talk.answers[after] = talk.answers.pop(after)
        number, self._number = self._number, self._number + 1
        told = Question(seat=seat, call=call, number=number, after=after, new=new).conversation()
        told.pop("asked", None)  # `own` has them
        rng_key = str(call.asked["seed"]) if "seed" in call.asked else None
        decision = await talk.player.decide("", {CONVERSATION: told}, own=own, rng_key=rng_key)
        at, talk.decided = talk.decided, talk.decided + 1  # nothing was awaited since the player took note of it
        decision = decision.published(told["tools"])
        reply = reply_to(call, number, decision.action, decision.about())
        tokens = len(decision.prompt_ids) + len(decision.response_ids)
        talk.answers[at] = self._known.answered(mark, reply.said, (talk, at)), tokens
        self._remember(talk, tokens)
        return reply

    def _player(self, seat: str) -> ModelPlayer:
        policy, live = self._policies[seat], self._policy_engines[seat]
        return ModelPlayer(
            live,
            live.renderer,
            policy.sampling,
            "",
            keep_reasoning=policy.keep_reasoning,
            context=policy.context,
        )

    def _remember(self, talk: _Talk, tokens: int) -> None:
        """Keep `talk` as the latest, and forget what is oldest where there are too many tokens."""
        self._talks.pop(talk, None)
        self._talks[talk] = None
        talk.tokens += tokens
        self._tokens += tokens
        while talk.tokens > _ONES_TOKENS and len(talk.answers) > 1:
            self._forget_answer(talk)
        while self._tokens > _HELD_TOKENS and len(self._talks) > 1:
            oldest = next(iter(self._talks))
            del self._talks[oldest]
            while oldest.answers:
                self._forget_answer(oldest)

    def _forget_answer(self, talk: _Talk) -> None:
        """Forget the answer of a conversation that was of no use for the longest time."""
        number = next(iter(talk.answers))
        mark, tokens = talk.answers.pop(number)
        talk.tokens -= tokens
        self._tokens -= tokens
        self._known.forget(talk.seat, mark, (talk, number))
        talk.player.forget(number)


def _wished(own: Sampling, call: Call) -> Sampling:
    """How a call is answered: as the policy samples, and as the call says."""
    known = {name: value for name, value in call.asked.items() if hasattr(own, name)}
    if unknown := sorted(call.asked.keys() - known - {"seed"}):
        raise RefusedError(f"{', '.join(unknown)} is not supported here; leave it out")
    try:
        return replace(own, **known)
    except OverflowError:
        raise RefusedError(f"a number of {shown(known)} is too large; leave it out") from None
    except (TypeError, ValueError) as cause:
        raise RefusedError(str(cause)) from None
