"""Servers that refuse a setting, and errors that arrive with status 200."""

import json
import logging
import time

import pytest

import forge_agents as fa
from forge_agents.errors import EndpointError
from forge_agents.rollout.refusals import named_field, parsed, status_of

from .fakes import ask_all, completion  # noqa: TID252 (tests are no installed package)


def ask(endpoint, **options):
    return [reply.text for reply in ask_all(endpoint, **options)]


def openai_refusal(name, said="Unsupported parameter: '{name}' is not supported with this model."):
    error = {"message": said.format(name=name), "type": "invalid_request_error", "param": name,
             "code": "unsupported_parameter"}  # fmt: skip
    return 400, {"error": error}


def test_only_non_default_settings_and_the_limit_are_sent(serve_chat):
    server = serve_chat(lambda request: "3")
    ask(server.endpoint)
    assert server.requests[0].keys() == {"model", "messages", "max_tokens"}


def reasoning_model(request):
    """Answers as o1, o3 and gpt-5 do: none of these fields, and the limit by its newer name."""
    for name in ("max_tokens", "top_p", "presence_penalty", "stop"):
        if name in request:
            hint = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
            return openai_refusal(name, "Unsupported parameter: '{name}' is not supported with this model." + hint)
    if request.get("temperature", 1) != 1:
        message = "Unsupported value: '{name}' does not support 0.5 with this model. Only the default (1) is supported."
        return openai_refusal("temperature", message)
    return f"{request['max_completion_tokens']} apples. 4 pears."


def vllm(request):
    if "top_k" in request:
        return 400, {"object": "error", "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'top_k')}]"}
    return "3"


def fastapi(request):
    if "min_p" in request:
        return 422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "min_p"], "msg": "Extra inputs are ..."}]}
    return "3"


def anthropic(request):
    if {"temperature", "top_p"} <= request.keys():
        message = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
        return 400, {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    return "3"


def azure(request):
    if "repetition_penalty" in request:
        return 400, {"error": {"message": "Unrecognized request argument supplied: repetition_penalty", "param": None}}
    return "3"


def in_the_body(request):
    """The same refusal with status 200."""
    status, body = openai_refusal("top_p")
    return (200, {"error": {**body["error"], "code": status}}) if "top_p" in request else "3"


@pytest.mark.parametrize(
    "case",
    [
        (reasoning_model, {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "max_tokens": 5, "stop": (".",)},
         ["top_p", "presence_penalty", "stop", "temperature", "max_tokens"], {"max_completion_tokens": 5}),
        (vllm, {"top_k": 5}, ["top_k"], {"max_tokens": 64}),
        (fastapi, {"min_p": 0.1}, ["min_p"], {"max_tokens": 64}),
        (anthropic, {"temperature": 0.5, "top_p": 0.9}, ["top_p"], {"max_tokens": 64, "temperature": 0.5}),
        (azure, {"repetition_penalty": 1.1}, ["repetition_penalty"], {"max_tokens": 64}),
        (in_the_body, {"top_p": 0.9}, ["top_p"], {"max_tokens": 64}),
    ],
)  # fmt: skip
def test_refused_setting_is_omitted_with_one_warning(serve_chat, caplog, case):
    reply, sampling, left_out, last = case
    server = serve_chat(reply)
    endpoint = server.endpoint_with(sampling=fa.Sampling(**sampling))
    caplog.set_level(logging.WARNING)
    assert ask(endpoint, times=2) == ["5 apples" if "stop" in sampling else "3"] * 2
    ask(endpoint)  # another event loop, as of another call of fa.play
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(left_out) and len(server.requests) == len(left_out) + 3
    for name in left_out:
        assert sum(f"does not accept {name}, which is omitted from now on" in line for line in lines) == 1
    sent = {name: value for name, value in server.requests[-1].items() if name not in ("model", "messages")}
    assert sent == last


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"error": {"message": "max_tokens is too large: 9000. This model supports at most 4096"}}', None),
        ('{"error": {"message": "unsupported max_tokens: the maximum context length is 4"}}', None),
        ('{"error": {"message": "Please stop: unsupported content"}}', None),
        ('{"error": {"message": "no such field", "param": "top_p"}}', "top_p"),
        ('{"error": {"message": "unexpected keyword argument \'max_tokens\'"}}', "max_tokens"),
        ("unknown field top_p_min", None),
        ('{"error": {"message": "messages[0] is empty", "param": "messages"}}', None),
        ('{"error": {"message": "x", "param": ["temperature"], "code": 400}}', "temperature"),
    ],
)  # fmt: skip
def test_only_an_unaccepted_field_counts_as_named(body, name):
    assert named_field(body, {name: [name] for name in ("top_p", "stop", "temperature", "max_tokens")}) == name


@pytest.mark.parametrize("word", ["logprobs", "top_logprobs"])
def test_optional_field_is_known_by_any_of_its_names(serve_chat, word):
    server = serve_chat(lambda request: openai_refusal(word) if "logprobs" in request else "3")
    optional = {"logprobs": {"logprobs": True, "top_logprobs": 5}}
    assert ask(server.endpoint, optional=optional) == ["3"] and "top_logprobs" not in server.requests[-1]


def test_limit_refused_under_both_names_is_omitted(serve_chat, caplog):
    def reply(request):
        limit = next((name for name in ("max_tokens", "max_completion_tokens") if name in request), None)
        return openai_refusal(limit) if limit else "3"

    server = serve_chat(reply)
    assert ask(server.endpoint) == ["3"] and server.requests[-1].keys() == {"model", "messages"}
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "Provider returned error", "code": 502}},  # OpenRouter
        {"error": {"message": "Overloaded", "type": "overloaded_error"}},
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},  # Anthropic
        {"object": "error", "message": "engine is busy", "type": "InternalServerError", "code": 500},  # vLLM
        {"error": "upstream connect error"},
        {"choices": []},
        {"choices": None, "id": "1"},
        completion("", finish_reason="error", error={"code": 503, "message": "Provider disconnected"}),
        {**completion("half an ans"), "error": {"code": 502, "message": "Provider disconnected"}},
        {"detail": "temporarily unavailable"},
        {"code": 50001, "msg": "system busy"},
        b"",
        b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"error": {"code": 502, "message": "gone"}}\n\n',
    ],
)
def test_error_with_status_200_is_retried(serve_chat, body):
    server = serve_chat(lambda request: body if len(server.requests) == 1 else "3")
    assert ask(server.endpoint_with(retries=1)) == ["3"] and len(server.requests) == 2
    sent = body if isinstance(body, bytes) else None
    assert sent is None or status_of(sent.decode(), parsed(sent.decode())) == 502


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "Incorrect API key provided: sk-1", "code": "invalid_api_key"}, 401),
        ({"message": "The model `gpt-9` does not exist or you lack access.", "code": "model_not_found"}, 404),
        ({"message": "No auth credentials found", "code": 401}, 401),
        ("model 'llama9' not found", 404),
        ({"message": "Insufficient credits", "code": 402}, 402),
        ({"type": "permission_error", "message": "Your key may not use this model"}, 403),
        ({"type": "authentication_error", "message": "invalid x-api-key"}, 401),
    ],
)
def test_permanent_error_with_status_200_is_not_retried(serve_chat, error, status):
    server = serve_chat(lambda request: {"error": error})
    with pytest.raises(EndpointError, match="answered with status 200 and an error") as caught:
        ask(server.endpoint_with(retries=3))
    assert caught.value.status == status and len(server.requests) == 1


@pytest.mark.parametrize("blank", [" ", "_"])
def test_error_of_many_blanks_takes_linear_time(blank):
    def seconds(number):
        error = {"error": {"message": "missing" + blank * number}}
        body, start = json.dumps(error), time.process_time()
        assert status_of(body, error) == 502
        return time.process_time() - start

    assert min(seconds(9600) for _ in range(5)) < 64 * min(seconds(600) for _ in range(5)), "16 times, not 256 times"


def test_too_long_conversation_may_have_status_200(serve_chat):
    said = {"error": {"message": "This model's maximum context length is 8 tokens", "code": None}}
    with pytest.raises(EndpointError) as caught:
        ask(serve_chat(lambda request: said).endpoint)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [completion(), {**completion(), "error": None}, completion("Invalid api key", error=None), {"choices": [{}]}],
)
def test_completion_about_errors_is_no_error(body):
    assert status_of(json.dumps(body), body) is None


def test_events_without_end_are_not_parsed(monkeypatch):
    """A quotation mark in one event hides the brackets of the next from the limit of a body's values."""
    lengths, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: lengths.append(len(text)) or loads(text))
    many = "data: [" + "[]," * 5000 + "[]]\n"
    assert status_of('data: "\n' + many + "data: [[]]\n" * 1000 + 'data: {"error": {"code": 429}}', None) is None
    assert len(lengths) == 100 and max(lengths) < 10
    assert status_of(many + "data: {}\n" * 98 + 'data: {"error": {"code": 429}}', None) == 429
