"""The published clients against the gateway: their own types read all that it sends, and what they document runs."""

import contextlib
import json
import threading

import pytest
from pydantic import BaseModel, TypeAdapter

from forge_agents.errors import NotReadyError
from forge_agents.programs.calls import ChatResponse, FunctionCall, RefusedError
from forge_agents.programs.gateway import Gateway
from forge_agents.programs.protocols import PROTOCOLS

WAIT_S = 120.0
ADDS = tuple(FunctionCall(id=f"call_0_{at}", name="add", arguments=json.dumps({"a": at})) for at in range(2))
REPLIES = [
    ChatResponse(number=0, text="Hi", prompt_tokens=3, completion_tokens=2, logprobs=((5, -0.5), (6, float("-inf")))),
    ChatResponse(number=1, text=""),
    ChatResponse(number=2, text="Hi", truncated=True),
    ChatResponse(number=3, text="I add.", calls=ADDS),
    ChatResponse(number=4, text="", calls=ADDS[:1], truncated=True),
]
ASKED = [{"role": "user", "content": "1 + 1?"}]
CALLS = 'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Answer(BaseModel):
    a: int


class add(BaseModel):  # noqa: N801  # its name is the tool's
    a: int


def types_of(path):
    """Fields of an answer, and of a stream's event."""
    if path == "/v1/messages":
        types = pytest.importorskip("anthropic.types")
        return types.Message, types.RawMessageStreamEvent
    from openai.types import chat, responses

    if path == "/v1/responses":
        return responses.Response, responses.ResponseStreamEvent
    return chat.ChatCompletion, chat.ChatCompletionChunk


def unknown(value, at=""):
    """Fields that a client's types do not have."""
    if isinstance(value, BaseModel):
        yield from (f"{at}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{at}.{name}")
    for each in value if isinstance(value, list) else ():
        yield from unknown(each, at)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_responses_and_events_match_the_clients_types(path):
    of_answer, of_event = map(TypeAdapter, types_of(path))
    asked = {"model": "coder", "messages": ASKED, "input": "-", "logprobs": True}
    call = PROTOCOLS[path].read({**asked, "stream_options": {"include_usage": True}})
    for reply in REPLIES:
        sent = [(of_answer, PROTOCOLS[path].write(call, reply, 123))]
        sent += [(of_event, event) for _, event in PROTOCOLS[path].events(call, reply, 123) if event != "[DONE]"]
        for kind, body in sent:
            read = kind.validate_json(json.dumps(body), strict=True)
            more = {".name"} if body.get("type") == "response.function_call_arguments.done" else set()  # Node
            assert set(unknown(read)) <= more, body


@pytest.fixture
def answers():
    """``(session, say)``: a session that answers each call with the next of the texts that `say` was given."""
    texts = []
    with Gateway() as gateway, gateway.open({"coder": "coder"}) as session:

        def answer():
            with contextlib.suppress(NotReadyError):
                while True:
                    session.next("test", WAIT_S)
                    session.answer(texts.pop(0), {"prompt_tokens": 5, "completion_tokens": 2})

        answering = threading.Thread(target=answer)
        answering.start()
        yield session, texts.extend
        session.close()
        answering.join(WAIT_S)


def test_documented_calls_of_openais_client_work(answers):
    import openai

    session, say = answers
    tools = [openai.pydantic_function_tool(add)]
    told = {"model": "coder", "messages": ASKED}
    with openai.OpenAI(
        base_url=session.url, api_key=session.token, max_retries=0, timeout=WAIT_S, _strict_response_validation=True
    ) as client:
        chat, responses = client.chat.completions, client.responses
        say(["Hi", "Hi", CALLS, '{"a": 3}', CALLS, "Hi", "Hi"])
        *_, last = chat.create(**told, stream=True, stream_options={"include_usage": True})
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 2)
        with chat.stream(**told) as heard:
            assert heard.get_final_completion().choices[0].message.content == "Hi"
        with chat.stream(**told, tools=tools) as heard:
            message = heard.get_final_completion().choices[0].message
            (called,) = message.tool_calls
            assert (message.content, called.id) == ("I add.", "call_2_0")
            assert called.function.parsed_arguments == add(a=1)
        assert chat.parse(**told, response_format=Answer).choices[0].message.parsed == Answer(a=3)
        assert chat.parse(**told, tools=tools).choices[0].message.tool_calls[0].function.parsed_arguments == add(a=1)
        raw = chat.with_raw_response.create(**told)
        assert raw.status_code == 200 and raw.parse().choices[0].message.content == "Hi"
        with chat.with_streaming_response.create(**told) as raw:
            assert json.loads(raw.read())["choices"][0]["message"]["content"] == "Hi"

        say(["Hi", '{"a": 3}', CALLS, '{"a": 3}', "Hi"])
        asked = {"model": "coder", "input": "1 + 1?"}
        assert responses.create(**asked).output_text == "Hi"
        assert responses.parse(**asked, text_format=Answer).output_parsed == Answer(a=3)
        assert responses.parse(**asked, tools=tools).output[1].parsed_arguments == add(a=1)
        with responses.stream(**asked, text_format=Answer) as heard:
            assert [event.type for event in heard][-1] == "response.completed"
            assert heard.get_final_response().output_parsed == Answer(a=3)
        assert responses.with_raw_response.create(**asked).parse().output_text == "Hi"

        assert [model.id for model in client.models.list()] == [client.models.retrieve("coder").id] == ["coder"]
        with pytest.raises(openai.NotFoundError) as refused:
            chat.create(**(told | {"model": "judge"}))
        error = TypeAdapter(openai.types.ErrorObject).validate_python(refused.value.body)
        assert (error.code, error.type, error.param) == ("model_not_found", "not_found_error", None)


def test_documented_calls_of_anthropics_client_work(answers):
    anthropic = pytest.importorskip("anthropic")
    session, say = answers
    told = {"model": "coder", "messages": ASKED, "max_tokens": 9}

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds one."""
        return str(a + 1)

    with anthropic.Anthropic(
        base_url=session.url.removesuffix("/v1"), api_key=session.token, max_retries=0, _strict_response_validation=True
    ) as client:
        say(["Hi", "Hi", '{"a": 3}', "Hi", CALLS, "It is 2."])
        assert client.messages.create(**told).content[0].text == "Hi"
        with client.messages.stream(**told) as heard:
            assert list(heard.text_stream) == ["Hi"]
        assert client.messages.parse(**told, output_format=Answer).parsed_output == Answer(a=3)
        assert client.messages.with_raw_response.create(**told).parse().content[0].text == "Hi"
        runs = client.beta.messages.tool_runner(**told, tools=[add])
        assert runs.until_done().content[0].text == "It is 2."
        assert [model.id for model in client.models.list()] == [client.models.retrieve("coder").id] == ["coder"]
        for wrong, kind in (({"model": "judge"}, "not_found_error"), ({"max_tokens": 0}, "invalid_request_error")):
            with pytest.raises(anthropic.APIStatusError) as refused:
                client.messages.create(**(told | wrong))
            assert TypeAdapter(anthropic.types.ErrorResponse).validate_python(refused.value.body).error.type == kind


def test_anthropics_tool_runner_resends_the_conversation_without_threads():
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds one."""
        return str(a + 1)

    with Gateway() as gateway, gateway.open({"coder": "coder"}) as session:

        def program():
            url = session.url.removesuffix("/v1")
            with anthropic.Anthropic(base_url=url, api_key=session.token, max_retries=0) as client:
                runner = client.beta.messages.tool_runner(model="coder", messages=ASKED, max_tokens=9, tools=[add])
                session.post(runner.until_done().content[0].text)

        threading.Thread(target=program, daemon=True).start()
        assert session.next("test", WAIT_S).after is None
        session.answer(CALLS)
        second = session.next("test", WAIT_S)
        assert (second.after, second.text()) == (0, "<tool_response>\n2\n</tool_response>")
        session.answer("It is 2.")
        assert session.next("test", WAIT_S) == "It is 2."


@pytest.mark.parametrize("status", [429, 503])
def test_client_retries_when_too_many_calls_wait(answers, monkeypatch, status):
    import openai

    session, say = answers
    refusals = [RefusedError("later", status=status)] * 2
    waiting = session._add_pending

    def refuses_twice(call, loop):
        if refusals:
            raise refusals.pop()
        return waiting(call, loop)

    monkeypatch.setattr(session, "_add_pending", refuses_twice)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    say(["Hi"])
    with openai.OpenAI(base_url=session.url, api_key=session.token, timeout=WAIT_S) as client:
        reply = client.chat.completions.create(model="coder", messages=ASKED)
    assert reply.choices[0].message.content == "Hi" and session.errors == ["later", "later"]
