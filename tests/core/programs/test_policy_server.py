"""Policies that answer programs outside of episodes: the same prompts as in training, and nothing for ever."""

import asyncio
import http.client
import json
import re
import threading

import pytest
from openai import BadRequestError, OpenAI

import forge_agents as fa
from forge_agents.errors import ActorDiedError
from forge_agents.programs import calls
from forge_agents.programs import policy_server as module
from forge_agents.programs.gateway import Gateway
from forge_agents.programs.policy_server import PolicyServer
from forge_agents.rollout import episode as rollout
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.runtime.threads import LoopThread
from forge_agents.types import Completion, VersionSpan

from .helpers import asked, request  # noqa: TID252 (tests are no installed package)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SAYS = [
    f"<think>one and one</think>I add. {CALL}", "It is 2.", "<think>hm</think>Two", "a", "A", "<think>cut", "fine", "b",
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Says:
    """An engine that says one text after another, and notes what it read and how it was to sample."""

    max_model_len = 4000

    def __init__(self, renderer, texts=SAYS):
        self.tokenizer, self.texts, self.read, self.asked = renderer._tokenizer, list(texts), [], []
        self.more = []
        self.error = self.gate = None
        self.cancelled = threading.Event()
        self.waiting = threading.Semaphore(0)

    async def generate(self, prompt_ids, sampling, **more):
        self.read.append(prompt_ids)
        self.asked.append(sampling)
        self.more.append(more)
        self.waiting.release()
        if self.error:
            raise self.error
        try:
            if self.gate:
                await asyncio.wait_for(asyncio.to_thread(self.gate.wait, 200), 200)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        said = self.texts[(len(self.read) - 1) % len(self.texts)]
        ids = (*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id)
        span = VersionSpan(version=0, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", versions=(span,))


@pytest.fixture
def serve(renderer):
    """``serve(engine)``: a server session of the policy "p", also called "planner" and "gpt-4o"."""
    engines, opened = LoopThread("engines"), []

    def start(engine, **policy):
        own = fa.Policy("tiny", name="p", **policy)

        async def make():
            served = {"p": PolicyEngine(engine, renderer)}
            opened.append(PolicyServer(gateway, dict.fromkeys(("p", "planner", "gpt-4o"), "p"), {"p": own}, served))
            return opened[-1]

        return engines.run(make(), timeout_s=20, what="a start")

    with Gateway() as gateway:
        yield start
        for session in opened:
            session.close()
    engines.close()


def program(task, client):
    """Use tools, continue a conversation, open a second one, and rewrite a history."""

    def ask(messages, **more):
        reply = client.chat.completions.create(model="planner", messages=messages, **more).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        return reply

    main = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    called = ask(main, tools=TOOLS).tool_calls[0]
    main.append({"role": "tool", "tool_call_id": called.id, "content": "2"})
    ask(main, tools=TOOLS)
    beside = [*main, {"role": "user", "content": "In words."}]
    ask(beside, tools=TOOLS)
    main.append({"role": "user", "content": "A letter, please."})
    ask(main, tools=TOOLS)
    edited = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "3"}]
    edited.append({"role": "user", "content": "No."})
    ask(edited)
    ask([{"role": "user", "content": "x" * 3000}])  # fills most of the context
    beside.append({"role": "user", "content": "Once more."})
    ask(beside, tools=TOOLS, response_format={"type": "json_object"})  # another system prompt: not known
    return 1.0


@pytest.mark.parametrize("keep_reasoning", ["all", "turn", "none"])
def test_served_prompts_equal_those_of_training(renderer, serve, keep_reasoning):
    trained, served = Says(renderer), Says(renderer)
    policy = fa.Policy("tiny", name="p", keep_reasoning=keep_reasoning)
    env = fa.Program(program, agents=("planner",))
    episode = asyncio.run(
        rollout.play(env, {"planner": policy}, seed=0, engines={"p": PolicyEngine(trained, renderer)}, max_turns=64)
    )
    assert episode.error is None and episode.rewards == {"planner": 1.0}, episode
    turns = episode.turns
    assert [turn.branch for turn in turns] == [0, 0, 0, 1, 2, 3, 4]
    assert [turn.forked_from for turn in turns] == [None, None, None, 1, None, None, None]
    # read once, where the answer was given; counted over the episode, as tools of our own are
    assert [len(turn.tool_calls) for turn in turns] == [1, 0, 0, 0, 0, 0, 0]
    assert [turn.info.get("tool_calls", 0) for turn in turns] == [1] * 7

    session = serve(served, keep_reasoning=keep_reasoning)
    with OpenAI(base_url=session.url, api_key=session.token, max_retries=0) as client:
        assert program(None, client) == 1.0
    assert served.read == trained.read
    # what a server that renders messages would have read: the thought and the tokens of the answer are not in them
    assert len(served.read[1]) > 0 and ("one and one" in renderer.text(served.read[1])) == (keep_reasoning != "none")


def test_sampling_settings_apply_and_limits_only_shrink(renderer, serve):
    engine = Says(renderer, ["a"])
    session = serve(engine, sampling=fa.Sampling(temperature=0.7, max_tokens=9, stop=("!",)))
    for more in ({}, {"temperature": 0, "top_p": 0.5, "max_tokens": 4, "stop": "?"}, {"max_tokens": 99}):
        assert request(session, body=asked(**more))[0] == 200
    own, wished, more = engine.asked
    assert (own.temperature, own.top_p, own.max_tokens, own.stop) == (0.7, 1.0, 9, ("!",))
    assert (wished.temperature, wished.top_p, wished.max_tokens, wished.stop) == (0, 0.5, 4, ("!", "?"))
    assert (more.temperature, more.max_tokens) == (0.7, 9)
    for wrong, says in (
        ({"temperature": 9}, "temperature=9 is outside"),
        ({"temperature": "hot"}, "temperature='hot'. Send a number"),
        ({"temperature": 10**400}, "must be at most 9223372036854775807"),
        ({"top_k": 10**400}, "must be at most 9223372036854775807"),
        ({"temperature": [1]}, "temperature=[1]. Send a number"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported here"),
        ({"top_k": 2.5}, "top_k=2.5. Send a whole number"),
        ({"seed": 0.5}, "seed=0.5. Send a whole number"),
    ):
        status, body = request(session, body=asked(**wrong))
        assert status == 400 and says in body["error"]["message"], body
    assert len(engine.read) == 3 and not session._pending


def test_response_reports_stop_text_and_reasoning_tokens(renderer, serve):
    engine = Says(renderer, ["<think>no!</think>Yes! And", "Yes."])
    session = serve(engine, sampling=fa.Sampling(stop=("#",)))
    said = {"model": "p", "max_tokens": 9, "messages": [{"role": "user", "content": "-"}], "stop_sequences": ["A", "!"]}
    heard = [request(session, path="/v1/messages", body=said)[1] for _ in range(2)]
    ended = [(each["stop_reason"], each["stop_sequence"]) for each in heard]
    assert ended == [("stop_sequence", "!"), ("end_turn", None)]
    assert heard[0]["content"][0]["text"] == "Yes"
    thought = len(renderer._encode("<think>no!</think>"))
    usage = request(session, body=asked())[1]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == thought < usage["completion_tokens"]


def test_seed_is_reproducible_and_top_k_may_be_minus_one(renderer, serve):
    engine = Says(renderer, ["a"])
    session = serve(engine)
    for more in ({"seed": 7}, {"seed": 7.0, "top_k": -1}, {"seed": 8}, {}):
        assert request(session, body=asked(**more))[0] == 200
    first, same, other, none = (more.get("seed") for more in engine.more)
    assert first == same != other and None not in (first, other) and none is None
    assert engine.asked[1].top_k == 0


def test_token_and_model_are_checked(renderer, serve):
    session = serve(Says(renderer))
    assert request(session, path="/health", method="GET", token="")[0] == 200
    assert request(session, body=asked(), token="another")[0] == 401
    assert request(session, path="/v1/models", method="GET", token="")[0] == 401
    names = [each["id"] for each in request(session, path="/v1/models", method="GET")[1]["data"]]
    assert names == ["p", "planner", "gpt-4o"]
    status, body = request(session, body=asked(model="coder"))
    assert status == 404
    assert "this server has no model 'coder'. Send one of p, planner" in body["error"]["message"]
    for path in ("/v1/responses", "/v1/messages"):
        status, body = request(session, path=path, body={**asked(model="gpt-4o"), "input": "Hi", "max_tokens": 5})
        assert status == 200, body


def test_calls_run_concurrently_and_disconnected_ones_are_dropped(renderer, serve):
    engine = Says(renderer, ["a"])
    engine.gate = threading.Event()
    session, heard = serve(engine), []
    both = [threading.Thread(target=lambda: heard.append(request(session, body=asked())[0])) for _ in range(2)]
    for one in both:
        one.start()
    assert all(engine.waiting.acquire(timeout=60) for _ in both), "both are with the engine at once"
    leaves = http.client.HTTPConnection(session.url.split("/")[2])
    headers = {"authorization": f"Bearer {session.token}"}
    leaves.request("POST", "/v1/chat/completions", json.dumps(asked()), headers)
    assert engine.waiting.acquire(timeout=60)
    leaves.close()
    assert engine.cancelled.wait(60), "nobody waits for it any more"
    engine.gate.set()
    for one in both:
        one.join(60)
    assert heard == [200, 200] and not session._pending


def test_full_context_and_dead_engine_are_reported(renderer, serve):
    engine = Says(renderer)
    session = serve(engine)
    with (
        OpenAI(base_url=session.url, api_key=session.token, max_retries=0) as client,
        pytest.raises(BadRequestError, match="maximum context length") as full,
    ):
        client.chat.completions.create(**asked("x" * 9000))
    assert full.value.code == "context_length_exceeded" and not session.failed.done()
    engine.error = RuntimeError("odd")
    assert request(session, body=asked())[0] == 500 and not session.failed.done()
    engine.error = ActorDiedError("the engine is gone", "p")
    assert request(session, body=asked())[0] == 503
    with pytest.raises(ActorDiedError, match="the engine is gone"):
        session.failed.result()


def test_calls_continue_their_own_answers_after_a_failure(renderer, serve, monkeypatch):
    engine = Says(renderer, ["<think>first</think>a", "<think>lost</think>b", "<think>third</think>c", "d"])
    session, make_response = serve(engine), module.make_response
    messages = [{"role": "user", "content": "1"}]

    def ask():
        status, body = request(session, body={"model": "p", "messages": messages})
        if status == 200:
            messages.extend((body["choices"][0]["message"], {"role": "user", "content": "on"}))
        return status

    def failing(call, number, action, about):
        if action == "b":
            raise ZeroDivisionError
        return make_response(call, number, action, about)

    monkeypatch.setattr(module, "make_response", failing)
    assert [ask() for _ in range(4)] == [200, 500, 200, 200]
    read = renderer.text(engine.read[-1])
    assert "third" in read and "lost" not in read


def test_least_recently_used_conversation_is_evicted(renderer, serve, monkeypatch):
    engine = Says(renderer, ["<think>hm</think>a"])
    session = serve(engine)
    one, two = ([{"role": "user", "content": text}] for text in ("first", "second"))

    def ask(messages):
        reply = request(session, body={"model": "p", "messages": messages})[1]["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": "on"}]

    ask(one)
    monkeypatch.setattr(module, "_MAX_TOKENS", 3 * session._tokens)
    ask(two)
    ask(one)  # goes on; the other is the oldest now, and there is no room for it
    assert "hm" in renderer.text(engine.read[-1]) and len(session._conversations) == 1
    ask(two)
    assert "hm" not in renderer.text(engine.read[-1]) and "second" in renderer.text(engine.read[-1])
    ask(two)
    assert "hm" in renderer.text(engine.read[-1])
    assert len(session._conversations) == 1 and session._tokens == sum(talk.tokens for talk in session._conversations)
    expected = session._index
    assert sum(map(len, expected._answers.values())) == sum(len(talk.answers) for talk in session._conversations) == 2
    assert sum(map(len, expected._unused.values())) == 1


def test_short_conversations_count_by_their_memory(renderer, serve, monkeypatch):
    """20 million tokens in conversations of 27 would take 2.6 GB."""
    session = serve(Says(renderer, ["a"]))
    monkeypatch.setattr(module, "_MAX_TOKENS", 1000)
    for number in range(12):
        assert request(session, body=asked(f"{number}", model="p"))[0] == 200
    assert len(session._conversations) == 1000 // (session._tokens // len(session._conversations)) <= 7


def test_endlessly_branching_conversation_evicts_its_own_answers(renderer, serve, monkeypatch):
    engine = Says(renderer, ["<think>hm</think>a"])
    session = serve(engine)
    said = {}

    def ask(messages):
        reply = request(session, body={"model": "p", "messages": messages})[1]["choices"][0]["message"]
        said[messages[-1]["content"]] = [*messages, reply]
        return session._tokens

    def thoughts(name):
        """Number of its reasoning sections in the prompt of a call that continues the conversation."""
        ask([*said[name], {"role": "user", "content": "on"}])
        return renderer.text(engine.read[-1]).count("hm")

    first = ask([{"role": "user", "content": "other"}])
    ask([{"role": "user", "content": "root"}])
    monkeypatch.setattr(module, "_MAX_CONVERSATION_TOKENS", 8 * first)
    monkeypatch.setattr(module, "_MAX_TOKENS", 12 * first)
    for branch in range(20):
        ask([*said["root"], {"role": "user", "content": f"b{branch}"}])
    assert len(session._conversations) == 2
    for talk in session._conversations:
        assert talk.tokens == sum(tokens for _, tokens in talk.answers.values()) <= 8 * first
        remembered = sum(bool(each._turns) for each in talk.player._conversations)
        assert remembered == len(talk.answers), "the others' are let go"
    assert (thoughts("other"), thoughts("b19"), thoughts("b0")) == (1, 2, 1)


def test_long_requests_are_read_and_hashed_outside_of_all_event_loops(renderer, serve, monkeypatch):
    """A request of 6 MB took half a second of the engines' loop before it was refused, during which no token came."""
    engine, threads = Says(renderer, ["a"]), []
    session = serve(engine)
    for name in ("continued_digest", "_texts"):
        function = getattr(calls, name)

        def noted(*args, function=function):
            threads.append((function.__name__, threading.current_thread().name))
            return function(*args)

        monkeypatch.setattr(calls, name, noted)
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n}"} for n in range(1001)]
    for content, error in (("x" * 9, "prompt of"), ("x" * 100_000, "messages of 10.* characters fill the context")):
        messages[0]["content"] = content
        status, answer = request(session, body={"model": "p", "messages": messages})
        assert status == 400 and re.search(f"maximum context length: {error}", answer["error"]["message"]), answer
    assert {name for name, _ in threads} == {"continued_digest", "_texts"}
    assert {thread for _, thread in threads} == {"request"}
    assert not engine.read


def long_talk(task, client):
    """A conversation that outgrows a small context, beside another that does not."""
    main, said = [{"role": "system", "content": "Be brief."}], []
    for turn in range(8):
        main.append({"role": "user", "content": f"<{turn}> " + "x" * 60})
        beside = [{"role": "user", "content": f"beside {turn}"}]
        for messages in (main, beside):
            reply = client.chat.completions.create(model="planner", messages=messages)
            said.append(reply.choices[0].message.content)
        main.append({"role": "assistant", "content": said[-2]})
    return 1.0


@pytest.mark.parametrize("context", ["end", "window", "summarize"])
def test_full_context_is_handled_as_the_policy_says(renderer, serve, context):
    engine = Says(renderer, ["<think>hm</think>fine"])
    engine.max_model_len = 700
    policy = fa.Policy("tiny", name="p", context=context, sampling=fa.Sampling(max_tokens=20))
    env = fa.Program(long_talk, agents=("planner",), tasks=["a talk"], error_reward=-1.0)
    served = {"p": PolicyEngine(engine, renderer)}
    episode = asyncio.run(rollout.play(env, {"planner": policy}, seed=0, engines=served, max_turns=64))
    assert episode.error is None and max(map(len, engine.read)) < 700
    turns = episode.turns
    left_out = [turn.compaction.how for turn in turns if turn.compaction]
    if context == "end":
        assert episode.out_of_context and episode.rewards == {"planner": -1.0} and not left_out
        info = episode.trajectories["planner"].info
        assert (info["task"], info["cut"]) == ("a talk", "the context of planner is full")
        return
    assert episode.end_reason == "terminated" and episode.rewards == {"planner": 1.0}
    assert left_out and set(left_out) == {context} and {turn.branch for turn in turns if turn.compaction} == {0}
    assert all((turn.notes is not None) == (context == "summarize") for turn in turns if turn.compaction)
    last = renderer.text(engine.read[-2])  # the first and the last that were said, and a mark between them
    assert "Be brief." in last and "<0>" in last and "<7>" in last and "<1>" not in last and "left out here" in last
