"""A program that does what it likes with its history: every sampled token is trained once, as it was sampled."""

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge_agents as fa
from forge_agents.programs.branches import BranchIndex
from forge_agents.programs.calls import ChatMessage, ChatRequest, make_response
from forge_agents.programs.gateway import ModelCall
from forge_agents.programs.protocols import PROTOCOLS
from forge_agents.rollout.conversation import Branches
from forge_agents.rollout.episode import decision_fields, play
from forge_agents.rollout.players import ModelPlayer
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.types import Completion, Trajectory, Turn, VersionSpan
from forge_trainers.batch.packing import samples_from

CHAT = PROTOCOLS["/v1/chat/completions"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
STEPS = st.lists(
    st.tuples(
        st.integers(0, 9),  # which conversation so far it starts from, also where another call has gone on from it
        st.sampled_from("aab"),  # whom it asks, whoever has spoken there
        st.sampled_from(["go on", "edit", "truncate", "reorder", "duplicate", "drop answers", "reword", "anew"]),
        st.sampled_from(["", "<think>hidden</think>", "<think>\n\n</think>\n\n", "<think>hidden "]),
        st.sampled_from(["", "a", "b a", "  a ", "<|im_end|>", CALL, f"I add. {CALL}{CALL}"]),
        st.booleans(),  # whether the end-of-turn token was written
    ),
    min_size=1,
    max_size=8,
)


class Says:
    """An engine with given answers, in which no two tokens share a log-probability."""

    max_model_len = 100_000

    def __init__(self, tokenizer):
        self.tokenizer, self.next, self.sampled, self.read = tokenizer, ("", True), [], []

    async def generate(self, prompt_ids, sampling, **more):
        text, ended = self.next
        end = (self.tokenizer.eos_token_id,) if ended or not text else ()
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), *end)
        logprobs = tuple(-(len(self.sampled) + n + 1) / 1024 for n in range(len(ids)))
        version = len(self.read)
        self.sampled += [(token, logprob, version) for token, logprob in zip(ids, logprobs, strict=True)]
        self.read.append((prompt_ids, ids))
        span = VersionSpan(version=version, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=(span,))


def heard_by_the_model(base, what, step):
    """The messages of a call that a program makes of an earlier conversation."""
    answers = [place for place, message in enumerate(base) if message["role"] == "assistant"]
    if what == "edit":
        base = [*base[: answers[-1]], {"role": "assistant", "content": "edited"}]
    elif what == "truncate":
        base = base[2:]
        while base and base[0]["role"] == "tool":  # its call was cut off
            base = base[1:]
    elif what == "reorder":
        base = base[::-1]
    elif what == "duplicate":
        return base[:-1]
    elif what == "drop answers":
        base = [message for message in base if message["role"] != "assistant"]
    elif what == "reword":  # says the same, in other JSON
        base = [{**m, "content": as_parts(m["content"]), "name": None} for m in base]
    elif what == "anew":
        base = []
    calls = (base[-1].get("tool_calls") if base else None) or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {step}"} for call in calls]
    return [*base, *(results or [{"role": "user", "content": f"message {step}"}])]


def as_parts(content):
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, keep_reasoning=st.sampled_from(["all", "turn", "none"]))
def test_each_sampled_token_is_trained_once_for_any_edited_history(renderer, steps, keep_reasoning):
    engine = Says(renderer._tokenizer)
    policy = fa.Policy("m", keep_reasoning=keep_reasoning)
    players = {seat: ModelPlayer(PolicyEngine(engine, renderer), policy, "") for seat in "ab"}
    turns, branches, calls = {"a": [], "b": []}, {"a": Branches(), "b": Branches()}, {"a": [], "b": []}
    histories, conversations = BranchIndex(), [("", [])]
    for number, (which, seat, what, thought, answer, ended) in enumerate(steps):
        last, base = conversations[which % len(conversations)]
        messages = heard_by_the_model(base, what if base else "anew", number)
        call = CHAT.read({"model": seat, "messages": messages, "tools": TOOLS})
        after, new, mark = histories.match(seat, call)
        asked = ModelCall(agent=seat, request=call, number=number, after=after, new_messages=new)
        engine.next = thought + answer, ended
        decision = asyncio.run(players[seat].decide(asked.text(), {"conversation": asked.conversation()}))
        reply = make_response(call, number, decision.action, decision.about())
        histories.add(mark, reply.message, len(calls[seat]))
        message = CHAT.write(call, reply, 0)["choices"][0]["message"]
        conversations.append((seat, [*messages, message]))
        fields = decision_fields(decision)
        fields["branch"], forked_from = branches[seat].place(asked.conversation())
        assert forked_from in (None, after)
        turns[seat].append(Turn(agent=seat, index=number, observation="", reward=0.0, **fields))
        if last == seat and what in ("go on", "reword"):
            assert after is not None
            if keep_reasoning == "all":  # nothing that was sampled is tokenised again
                prompt, said = engine.read[calls[seat][after]]
                assert decision.prompt_ids[: len(prompt) + len(said)] == prompt + said
        calls[seat].append(number)

    trained = []
    for seat, its in turns.items():
        told = Trajectory(agent=seat, policy=seat, turns=tuple(its))
        samples = samples_from(told, [1.0] * len(its), 0) if its else []
        if keep_reasoning == "all":  # a branch is one stream
            assert len(samples) == len({turn.branch for turn in its})
        for sample in samples:
            first = {}
            for place in sample.loss_mask.nonzero()[0]:
                version = int(sample.versions[place])
                assert version in calls[seat]
                first.setdefault(version, int(place))
                trained.append((int(sample.token_ids[place]), float(sample.logprobs[place]), version))
            for version, place in first.items():  # after what the engine read, token by token
                assert tuple(sample.token_ids[:place]) == engine.read[version][0]
    assert sorted(trained) == sorted(engine.sampled)


def test_many_equal_conversations_are_matched_in_constant_time_each():
    class Answer(int):
        hashed = 0

        def __hash__(self):
            Answer.hashed += 1
            return int(self)

    question, reply = ChatMessage(role="user", text="a"), ChatMessage(role="assistant", text="b")
    asked, continued = (ChatRequest(model="m", messages=each) for each in ((question,), (question, reply, question)))
    index = BranchIndex()
    for number in range(1000):
        _, new, mark = index.match("a", asked)
        assert new == (question,)
        known = index.add(mark, reply, Answer(number))
    Answer.hashed = 0
    assert [index.match("a", continued)[:2] for _ in range(1000)] == [(number, (question,)) for number in range(1000)]
    assert index.match("a", continued)[0] == 999, "all are continued already: the last"
    assert index.match("b", continued)[0] is None, "another agent"
    for number in range(999, 0, -1):
        index.remove(known, Answer(number))
    assert Answer.hashed < 10_000
    assert index.match("a", continued)[0] == 0
    index.remove(known, Answer(0))
    assert index.match("a", continued)[0] is None


class SaysAnything(Says):
    """Engine with random answers after a delay. Weights arrive in the middle of an answer."""

    def __init__(self, tokenizer, draws):
        super().__init__(tokenizer)
        self.draws, self.before = draws, {}

    async def generate(self, prompt_ids, sampling, **more):
        await asyncio.sleep(self.draws.random() / 100)
        thought = self.draws.choice(["", "", "<think>hm</think>", "<think>hm "])
        text = thought + self.draws.choice(["", "a", " b a ", "yes", "yes", CALL, f"I add. {CALL}{CALL}"])
        self.next = text, self.draws.random() < 0.8
        first = len(self.sampled)
        done = await super().generate(prompt_ids, sampling)
        ids, version = done.token_ids[: sampling.max_tokens], 2 * len(self.read)
        at = self.draws.randint(0, len(ids))
        self.sampled[first:] = [
            (token, logprob, version + (place >= at))
            for place, (token, logprob) in enumerate(zip(ids, done.logprobs, strict=False))
        ]
        self.before |= {logprob: (*prompt_ids, *ids[:n]) for n, (_, logprob, _) in enumerate(self.sampled[first:])}
        parts = ((version, 0, at), (version + 1, at, len(ids)))
        spans = tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in parts if end > start)
        cut = len(ids) < len(done.token_ids)
        return Completion(
            token_ids=ids, logprobs=done.logprobs[: len(ids)], finish_reason="length" if cut else "stop", versions=spans
        )


@pytest.mark.parametrize("seed", range(3))
def test_retried_parallel_calls_are_trained_once_each(renderer, seed):
    draws, heard = random.Random(seed), []

    async def program(task, client):
        conversations = [[]]

        async def ask(step):
            base, what = draws.choice(conversations), draws.choice(["go on"] * 4 + ["edit", "truncate", "duplicate"])
            messages = heard_by_the_model(base, what if base else "anew", step)
            wishes = {"max_tokens": draws.randint(1, 9)} if draws.random() < 0.3 else {}
            body = {"model": draws.choice("aab"), "messages": messages, "tools": TOOLS, **wishes}
            for patience in draws.sample([None, None, 0.003, 0.03], 4):
                with contextlib.suppress(TimeoutError):
                    answer = await asyncio.wait_for(client.chat.completions.create(**body), patience)
                    conversations.append([*messages, answer.choices[0].message.model_dump()])
                    heard.append((messages, answer))
                    return

        async def works(worker):
            for step in range(4):
                await ask(10 * worker + step)

        await asyncio.gather(*map(works, range(4)))
        return {"a": 1.0, "b": 2.0}

    engine = SaysAnything(renderer._tokenizer, random.Random(seed))
    saved, sampling = ("all", "turn", "none")[seed], fa.Sampling(max_tokens=99)
    policy = fa.Policy("tiny", name="p", keep_reasoning=saved, sampling=sampling)
    env = fa.Program(program, agents=("a", "b"))
    episode = asyncio.run(play(env, dict.fromkeys("ab", policy), seed=0, engines={"p": PolicyEngine(engine, renderer)}))
    assert episode.error is None, episode.error
    assert episode.rewards == {"a": 1.0, "b": 2.0} and len(heard) > 5
    trained = []
    for told in episode.trajectories.values():
        for sample in samples_from(told, [1.0] * len(told.turns), 0):
            for place in sample.loss_mask.nonzero()[0]:
                assert tuple(sample.token_ids[:place]) == engine.before[float(sample.logprobs[place])]
                named = int(sample.token_ids[place]), float(sample.logprobs[place]), int(sample.versions[place])
                trained.append(named)
    assert sorted(trained) == sorted(engine.sampled)
    for messages, answer in heard:  # and each heard the answer to what it said
        turn, choice = episode.turns[int(answer.id.partition("-")[2])], answer.choices[0]
        assert (turn.agent, len(turn.response_ids)) == (answer.model, answer.usage.completion_tokens)
        assert turn.action.startswith(choice.message.content or "")
        read, at = renderer._tokenizer.decode(list(turn.prompt_ids)), 0
        for message in messages:
            said = (message["content"] or "").strip()
            at = read.find(said, at) + len(said)
            assert at >= len(said), messages
