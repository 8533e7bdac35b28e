import json

import pytest

from forge_agents.cli import main as cli
from forge_agents.programs.calls import ChatMessage, FunctionCall

from .helpers import imported  # noqa: TID252 (tests are no installed package)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
SAID = {"role": "assistant", "content": "It is 2."}
TEXT_OF_CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = [("user", "1 + 1?"), ("assistant", TEXT_OF_CALL), ("user", "<tool_response>\n2\n</tool_response>"),
         ("assistant", "It is 2.")]  # fmt: skip


def in_parts(message):
    """A message as OpenTelemetry's conventions have it."""
    if message["role"] == "tool":
        response = {"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}
        return {"role": "tool", "parts": [response]}
    parts = [{"type": "text", "content": message["content"]}]
    for call in message.get("tool_calls", ()):
        named = call["function"]
        arguments = json.loads(named["arguments"])  # an object here, a text in OpenAI's
        parts.append({"type": "tool_call", "id": call["id"], "name": named["name"], "arguments": arguments})
    return {"role": message["role"], "parts": parts}


def conventions(asked, answer, **more):
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "solver",
        "gen_ai.system_instructions": json.dumps(in_parts(asked[0])["parts"]),
        "gen_ai.input.messages": json.dumps([in_parts(message) for message in asked[1:]]),
        "gen_ai.tool.definitions": json.dumps([{"type": "function", **ADD}]),
        **more,
    }
    if answer:
        told["gen_ai.output.messages"] = json.dumps([{**in_parts(answer), "finish_reason": "stop"}])
    return told


def openinference(asked, answer):
    told = {"openinference.span.kind": "LLM", "llm.model_name": "solver"}
    told["llm.tools.0.tool.json_schema"] = json.dumps({"type": "function", "function": ADD})
    for way, messages in (("input", asked), ("output", [answer])):
        for at, message in enumerate(messages):
            name = f"llm.{way}_messages.{at}.message"
            told |= {f"{name}.{key}": message[key] for key in ("role", "content", "tool_call_id") if key in message}
            for number, call in enumerate(message.get("tool_calls", ())):
                each = f"{name}.tool_calls.{number}.tool_call"
                told |= {f"{each}.id": call["id"], **{f"{each}.function.{k}": v for k, v in call["function"].items()}}
    return told


def openllmetry(asked, answer):
    told = {"gen_ai.request.model": "solver"}
    told |= {f"llm.request.functions.0.{key}": value for key, value in ADD.items()}
    told["llm.request.functions.0.parameters"] = json.dumps(ADD["parameters"])
    for way, messages in (("prompt", asked), ("completion", [answer])):
        for at, message in enumerate(messages):
            name = f"gen_ai.{way}.{at}"
            told |= {f"{name}.{key}": message[key] for key in ("role", "content", "tool_call_id") if key in message}
            for number, call in enumerate(message.get("tool_calls", ())):
                each = f"{name}.tool_calls.{number}"
                told |= {f"{each}.id": call["id"], **{f"{each}.{k}": v for k, v in call["function"].items()}}
    return told


def export(*spans, events=()):
    """Spans as an OTLP exporter writes them."""

    def typed(value):
        return {"intValue": str(value)} if type(value) is int else {"doubleValue" if type(value) is float else
                                                                   "stringValue": value}  # fmt: skip

    def attributes(told):
        return [{"key": key, "value": typed(value)} for key, value in told.items()]

    marked = [{"name": e["name"], "attributes": attributes(e["attributes"])} for e in events]
    written = [{"spanId": "ab", "name": "chat", "attributes": attributes(span), "events": marked} for span in spans]
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": written}]}]}


def pairs_of(messages):
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("written", [conventions, openinference, openllmetry])
@pytest.mark.parametrize("order", [1, -1])
def test_calls_of_a_conversation_are_one_row_in_any_order(tmp_path, written, order):
    spans = [written(ASKED, CALLED), written([*ASKED, CALLED, RESULT], SAID)][::order]
    done, (row,), messages = imported(tmp_path, *map(export, spans))
    assert (done.rows, done.answers, dict(done.skipped), messages) == (1, 2, {"repeated in another": 1}, [])
    system, *rest = pairs_of(row["messages"])
    assert system[1].startswith("Be brief.\n\n# Tools") and '"name": "add"' in system[1]
    assert rest == TEXTS and list(row) == ["messages"]


def test_answer_shared_by_conversations_is_learned_once(tmp_path):
    def after(question):
        return [*ASKED, SAID, {"role": "user", "content": question}], {"role": "assistant", "content": f"To {question}"}

    spans = [conventions(ASKED, SAID), *(conventions(*after(question)) for question in "xyz")]
    done, rows, _ = imported(tmp_path, *map(export, spans))
    assert (done.rows, done.answers) == (3, 4)
    learned = [m for row in rows for m in row.get("completion", row.get("messages")) if m["role"] == "assistant"]
    assert sorted(message["content"] for message in learned) == ["It is 2.", "To x", "To y", "To z"]


def test_calls_are_compared_by_all_digits_of_numbers(tmp_path):
    def asks(arguments):
        call = {**CALL, "function": {"name": "add", "arguments": arguments}}
        return {**CALLED, "tool_calls": [call]}

    digits = [asks('{"id": 1234567890123456789}'), asks('{"id": 1234567890123456790}')]
    done, _, _ = imported(tmp_path, *(export(openllmetry(ASKED, one)) for one in digits))
    assert (done.rows, done.skipped) == (2, {})
    same = [asks('{"b": -0.0, "a": 2.0}'), asks('{"a": 2, "b": 0}')]
    done, _, _ = imported(tmp_path, *(export(openllmetry(ASKED, one)) for one in same))
    assert (done.rows, done.skipped) == (1, {"repeated in another": 1})


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning_content": "hm", "content": [{"type": "text", "text": "It is 2."}]},
        {"reasoning_content": {"odd": 1}, "reasoning": "", "thinking": "hm", "content": "It is 2."},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "It is 2."}]},
        {"content": [{"type": "thinking", "thinking": [{"text": "hm"}]}, {"type": "text", "text": "It is 2."}]},
    ],
)
def test_reasoning_precedes_the_answer(tmp_path, answer):
    row = {"messages": [*ASKED, {"role": "assistant", **answer}]}
    odd = {"messages": [*ASKED, {"role": "assistant", **answer, "content": [{"type": "image_url"}]}]}
    _, (row,), (heard,) = imported(tmp_path, "\ufeff" + json.dumps(row), odd)
    assert row["messages"][-1]["content"] == "<think>\nhm\n</think>\n\nIt is 2."
    assert "messages[2]: a part of type 'image_url'" in heard


USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
CALLED_THINKING = f"<think>\nhm\n</think>\n\n{TEXT_OF_CALL}"


def of_anthropic_by_openllmetry(followed):
    """A span of Anthropic's messages, as OpenLLMetry writes parts and thoughts."""
    told = {"gen_ai.request.model": "solver", "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Be brief.",
            "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "1 + 1?"}  # fmt: skip
    told |= {f"llm.request.functions.0.{key}": ADD[key] for key in ("name", "description")}
    told["llm.request.functions.0.input_schema"] = json.dumps(SCHEMA)
    if not followed:
        told |= {"gen_ai.completion.0.finish_reason": "tool_use", "gen_ai.completion.0.role": "thinking",
                 "gen_ai.completion.0.content": "hm", "gen_ai.completion.1.role": "assistant",
                 "gen_ai.completion.1.content": "I add.", "gen_ai.completion.1.tool_calls.0.id": "c1",
                 "gen_ai.completion.1.tool_calls.0.name": "add",
                 "gen_ai.completion.1.tool_calls.0.arguments": '{"a": 1}'}  # fmt: skip
        return told
    said = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I add."}, USE]
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}]
    told |= {"gen_ai.prompt.2.role": "assistant", "gen_ai.prompt.2.content": json.dumps(said),
             "gen_ai.prompt.2.tool_calls.0.id": "c1", "gen_ai.prompt.2.tool_calls.0.name": "add",
             "gen_ai.prompt.2.tool_calls.0.arguments": '{"a": 1}',  # newer ones write it twice
             "gen_ai.prompt.3.role": "user", "gen_ai.prompt.3.content": json.dumps(result)}  # fmt: skip
    return told | {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "It is 2."}


def of_anthropic_by_openinference(followed):
    """The same, as OpenInference writes it."""

    def called(name):
        parts = [{"type": "reasoning", "text": "hm", "signature": "x"}, {"type": "text", "text": "I add."},
                 {"type": "text"}, {"type": "tool_use"}]  # fmt: skip
        told = {f"{name}.message.contents.{at}.message_content.{key}": value for at, part in enumerate(parts)
                for key, value in part.items()}  # fmt: skip
        call = f"{name}.message.tool_calls.0.tool_call"
        told |= {f"{call}.id": "c1", f"{call}.function.name": "add", f"{call}.function.arguments": '{"a": 1}'}
        return told | {f"{name}.message.role": "assistant"}

    told = openinference(ASKED, SAID)
    if not followed:
        return {key: value for key, value in told.items() if "output" not in key} | called("llm.output_messages.0")
    result = "llm.input_messages.3.message"
    told |= {f"{result}.role": "user", f"{result}.tool_call_id": "c1",
             f"{result}.contents.1.message_content.type": "text", f"{result}.contents.1.message_content.text": "So?",
             }  # fmt: skip
    told[f"{result}.content"] = json.dumps([{"type": "text", "text": "2"}])
    return told | called("llm.input_messages.2")


@pytest.mark.parametrize("written", [of_anthropic_by_openllmetry, of_anthropic_by_openinference])
def test_anthropic_spans_are_read_as_by_the_gateway(tmp_path, written):
    done, (row,), messages = imported(tmp_path, export(written(False)), export(written(True)))
    assert (done.answers, dict(done.skipped), messages) == (2, {"repeated in another": 1}, [])
    system, question, called, *rest = pairs_of(row["messages"])
    assert json.dumps(SCHEMA) in system[1] and (question[1], called[1]) == ("1 + 1?", CALLED_THINKING)
    beside = [("user", "So?")] if written is of_anthropic_by_openinference else []
    assert rest == [TEXTS[2], *beside, TEXTS[3]]


def test_parts_in_json_text_are_parsed(tmp_path):
    parts = json.dumps([{"type": "text", "text": "1 + 1?"}, {"type": "text", "text": "Well?"}])
    odd = '[{"type": "cat"}]'
    for content, read in ((parts, "1 + 1?\nWell?"), (odd, odd), ('[{"type": "text"', '[{"type": "text"')):
        requests = [{"role": "user", "content": content}]
        _, (row,), _ = imported(tmp_path, export(openllmetry(requests, {"role": "assistant", "content": parts})))
        assert [text.rpartition("\n\n")[2] for _, text in pairs_of(row["messages"])][-2:] == [read, parts]
    picture = json.dumps([{"type": "text", "text": "-"}, {"type": "image_url", "image_url": {"url": "-"}}])
    with pytest.raises(ValueError, match="1 unreadable"):
        imported(tmp_path, export(openllmetry([{"role": "user", "content": picture}], SAID)))


def test_imported_text_equals_the_gateways_text(tmp_path):
    from forge_agents.programs.calls import as_text
    from forge_agents.programs.protocols import PROTOCOLS

    _, (row,), _ = imported(tmp_path, export(conventions([*ASKED, CALLED, RESULT], SAID)))
    body = {"model": "-", "messages": [*ASKED, CALLED, RESULT], "tools": [{"type": "function", "function": ADD}]}
    call = PROTOCOLS["/v1/chat/completions"].read(body)
    assert row["prompt"] == as_text(call.messages, call.instructions)
    assert pairs_of(row["completion"]) == [("assistant", "It is 2.")]


def test_unrecorded_and_truncated_answers_are_not_learned(tmp_path):
    example = [*ASKED, {"role": "assistant", "content": "An example."}, {"role": "user", "content": "And 2 + 2?"}]
    done, (row,), _ = imported(tmp_path, export(conventions(example, SAID)))
    assert pairs_of(row["completion"]) == [("assistant", "It is 2.")] and done.answers == 1
    assert ("assistant", "An example.") in pairs_of(row["prompt"])
    cuts = []
    for reason in ("length", "FinishReason.MAX_TOKENS", "model_context_window_exceeded"):
        cuts.append(conventions(ASKED, SAID))
        cuts[-1]["gen_ai.output.messages"] = cuts[-1]["gen_ai.output.messages"].replace('"stop"', f'"{reason}"')
    done, rows, _ = imported(tmp_path, *map(export, cuts), export(conventions(ASKED, CALLED)))
    assert done.skipped == {"answers that were cut off": 3} and rows[0]["messages"][-1]["content"] == TEXT_OF_CALL


def test_chats_keep_reasoning_tools_and_pairs(tmp_path):
    thought = {**SAID, "reasoning_content": "Easy."}
    chat = {"messages": [*ASKED, CALLED, RESULT, thought], "tools": [{"type": "function", "function": ADD}]}
    pair = {"prompt": "1 + 1?", "chosen": [CALLED], "rejected": "3", "tools": [{"type": "function", "function": ADD}]}
    done, (first, second), messages = imported(tmp_path, chat, "", pair)
    assert pairs_of(first["messages"])[1:] == [*TEXTS[:-1], ("assistant", "<think>\nEasy.\n</think>\n\nIt is 2.")]
    assert pairs_of(second["chosen"]) == [("assistant", TEXT_OF_CALL)]
    assert pairs_of(second["rejected"]) == [("assistant", "3")] and "# Tools" in second["prompt"][0]["content"]
    assert (done.answers, messages) == (4, [])


def test_pairs_are_the_best_and_worst_answers(tmp_path):
    def scored(text, score):
        return export(conventions(ASKED, {"role": "assistant", "content": text}, helpful=score))

    spans = [scored("good", 1.0), scored("bad", 0.25), scored("fair", 0.5), export(conventions(ASKED, SAID))]
    evaluated = {"gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": 2.0}
    event = {"name": "gen_ai.evaluation.result", "attributes": evaluated}
    spans.append(export(conventions(ASKED, {"role": "assistant", "content": "best"}), events=[event]))
    done, (row,), _ = imported(tmp_path, *spans, pairs="helpful")
    assert (pairs_of(row["chosen"]), pairs_of(row["rejected"])) == ([("assistant", "best")], [("assistant", "bad")])
    assert done.skipped == {"without a number 'helpful'": 1} and pairs_of(row["prompt"])[-1] == ("user", "1 + 1?")
    with pytest.raises(ValueError, match="there is nothing to learn from: 1 conversations without a better answer"):
        imported(tmp_path, scored("same", 1.0), scored("same", 0.0), pairs="helpful")
    with pytest.raises(ValueError, match="there is nothing to learn from: 1 without a number 'score'"):
        imported(tmp_path, {"messages": [*ASKED, SAID], "score": 10**400}, pairs="score")


ODD = [
    ('{"messages": [', "it is not JSON"),
    ("[" * 100_000, "it is not JSON"),
    ("7", "it is a JSON int"),
    ({"note": "-"}, "The keys are 'note'"),
    ({"messages": 7}, "the messages are '7'. Expected a list of objects"),
    ({"messages": [{"role": "narrator", "content": "-"}]}, "role 'narrator'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]}, "read text only"),
    ({"messages": [*ASKED, {"role": "assistant", "content": " "}]}, "messages[2]: the answer is empty"),
    ({"messages": [SAID]}, "begins with an answer"),
    ({"messages": ASKED}, "it contains no answer"),
    ({"prompt": "hi", "completion": None}, "it contains no answer"),
    ({"messages": None, "completion": None}, "it contains no answer"),
    ({"resourceSpans": [7]}, "its form is unknown"),
    ({"attributes": [{"key": "n", "value": {"intValue": float("inf")}}]}, "its form is unknown"),
    ({"spanId": "a", "attributes": [{"key": "gen_ai.input.messages", "value": {"stringValue": "[{"}}]}, "Expecting"),
    (export({"llm.input_messages.x.message.role": "user"}), "its form is unknown"),
    (export({"gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "blob"}]}]'}), "a part of type 'blob'"),
]


def test_unreadable_lines_are_reported_and_others_kept(tmp_path):
    good = export(conventions(ASKED, SAID))
    done, rows, messages = imported(tmp_path, *(line for line, _ in ODD), good)
    assert len(rows) == 1 and done.skipped == {"unreadable": len(ODD)}
    for number, (line, (_, why)) in enumerate(zip(messages, ODD, strict=True), 1):
        assert line.startswith(f"{tmp_path / 'in.jsonl'}:{number} is skipped: ") and why in line, line


def test_spans_without_a_conversation_are_counted_by_kind(tmp_path):
    spans = [
        {"http.method": "GET"}, {"gen_ai.request.model": "solver"}, conventions(ASKED, None),
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]"}, conventions(ASKED, SAID),
    ]  # fmt: skip
    done, rows, _ = imported(tmp_path, export(*spans))
    assert len(rows) == 1 and done.skipped == {
        "spans of other things": 1, "calls without their messages": 1, "calls without an answer": 1,
        "spans around calls": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="there is nothing to learn from: 1 calls without their messages"):
        imported(tmp_path, export({"gen_ai.request.model": "solver"}))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "nothing half-written stays"


def test_malformed_first_line_does_not_affect_others(tmp_path):
    first = json.dumps({"messages": [*ASKED, CALLED]})
    good = {"messages": [*ASKED, SAID]}
    done, rows, messages = imported(tmp_path, f"{first} rubbish", good, "{", good)
    assert [row["messages"][-1]["content"] for row in rows] == [TEXT_OF_CALL, "It is 2."]
    assert done.skipped == {"unreadable": 2, "repeated in another": 1} and ":3 is skipped" in messages[1]
    assert ":1 is skipped: it is not JSON (only the first value of the line is read" in messages[0]


def test_truncated_chats_and_rows_without_pairs_are_skipped(tmp_path):
    cut = {**SAID, "finish_reason": "length"}
    rows = [{"messages": [*ASKED, cut]}, {"prompt": "-", "completion": [cut]}]
    rows.append({"messages": [*ASKED, SAID], "finish_reason": "length"})
    done, (row,), _ = imported(tmp_path, *rows, {"messages": [*ASKED, {**SAID, "finish_reason": "stop"}]})
    assert pairs_of(row["messages"]) == [*pairs_of(ASKED), ("assistant", "It is 2.")]
    assert done.skipped == {"answers that were cut off": 3}
    sides = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    completed = {"prompt": "-", "completion": "-", "score": 1}
    done, (row,), messages = imported(tmp_path, completed, {"chosen": "-"}, sides, pairs="score")
    assert pairs_of(row["chosen"]) == [("assistant", "2")]
    assert done.skipped == {"without sides to compare": 1, "unreadable": 1}
    assert "it has only one of chosen and rejected" in messages[0]


def test_values_may_span_several_lines(tmp_path):
    spread = json.dumps({"attributes": conventions(ASKED, CALLED), "name": "chat"}, indent=2)
    second = json.dumps([{"attributes": conventions([*ASKED, CALLED, RESULT], SAID)}], indent=2)
    done, (row,), heard = imported(tmp_path, spread, second, "{")
    assert pairs_of(row["messages"])[1:] == TEXTS and done.answers == 2
    at = spread.count("\n") + second.count("\n") + 3
    assert len(heard) == 1 and f"in.jsonl:{at} is skipped" in heard[0] and "The rest of the file is not" in heard[0]


def test_command_writes_training_rows_and_escapes_output(tmp_path, capsys):
    other = conventions(ASKED, CALLED) | {"gen_ai.request.model": "planner"}
    lines = [export(conventions(ASKED, SAID)), export(other), {"\x1b[2J": 1}]
    source, out = tmp_path / "traces.jsonl", tmp_path / "data" / "chats.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    assert cli.main(["import", str(source), "--out", str(out), "--model", "solver"]) == 0
    message = capsys.readouterr()
    assert "wrote  1 conversations with 1 answers" in message.out
    assert "left out: 1 of other models, or of none that is named" in message.out
    assert f"{source}:3 is skipped" in message.err and "\x1b" not in message.err + message.out
    assert pairs_of(json.loads(out.read_text())["messages"])[-1] == ("assistant", "It is 2.")
    assert cli.main(["import", str(source), "--out", str(out)]) == 1
    assert "exists. Give another --out" in capsys.readouterr().err
    assert cli.main(["import", str(source), "--out", str(tmp_path / "x"), "--model", "solvr"]) == 1
    assert "Did you mean 'solver'?" in capsys.readouterr().err
    source.write_text("{\n" * 25)
    assert cli.main(["import", str(source), "--out", str(tmp_path / "x")]) == 1
    message = capsys.readouterr().err
    assert message.count("is skipped") == 20 and "\nand 5 more\n" in message and "there is nothing to learn" in message


def test_imported_rows_are_trained_like_others(tmp_path, renderer):
    from forge_trainers.offline.config import SFTConfig
    from forge_trainers.offline.data import read_demonstrations

    imported(tmp_path, export(conventions(ASKED, CALLED)), export(conventions([*ASKED, CALLED, RESULT], SAID)))
    result = read_demonstrations(tmp_path / "out.jsonl", renderer, SFTConfig(), policy="p", room=9999)
    (item,) = result.items
    taught = renderer.text([*item.ids[item.mask]])
    assert taught.startswith("I add.\n<tool_call>") and "It is 2." in taught and "1 + 1?" not in taught


def test_alternating_weights_make_one_row_of_the_size_of_the_chat(tmp_path):
    for count in (4, 300):
        answers = [{"role": "assistant", "content": f"{number:03}", "weight": number % 2} for number in range(count)]
        chat = {"messages": [message for answer in answers for message in (ASKED[1], answer)]}
        done, (row,), _ = imported(tmp_path, chat)
        assert (done.rows, done.answers, done.skipped) == (1, count // 2, {"answers of weight 0": count - count // 2})
        assert len(json.dumps(row)) <= len(json.dumps(chat))
        targets = [message for message in row["messages"] if message["role"] == "assistant" and "weight" not in message]
        assert [message["content"] for message in targets] == [f"{number:03}" for number in range(1, count, 2)]


def test_answer_that_calls_an_unlisted_tool_is_not_learned(tmp_path):
    tools = [{"type": "function", "function": ADD}, {"type": "computer_20250124", "name": "screen"}]
    wrong = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "sum", "arguments": "{}"}}]}
    chat = {"tools": tools, "messages": [*ASKED, wrong, RESULT, CALLED, RESULT, SAID]}
    done, (row,), _ = imported(tmp_path, chat)
    assert pairs_of(row["completion"])[0] == ("assistant", TEXT_OF_CALL) and "sum" in str(row["prompt"])
    assert done.answers == 2 and done.skipped == {"answers that call a tool which is not listed": 1}
    logged = [
        {"request": {"tools": tools, "messages": ASKED}, "response": {"choices": [{"message": message}]}}
        for message in (wrong, CALLED)
    ]
    done, (row,), _ = imported(tmp_path, *logged)
    assert row["messages"][-1]["content"] == TEXT_OF_CALL and sum(done.skipped.values()) == 1
    done, (row,), _ = imported(tmp_path, {"messages": chat["messages"]})
    assert done.answers == 3 and not done.skipped, "without a list, any tool may exist"


def test_anthropic_chat_keeps_system_prompt_tools_and_calls(tmp_path):
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}
    called = {"role": "assistant", "content": [{"type": "text", "text": "I add."}, USE]}
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages = [ASKED[1], called, {"role": "user", "content": [result]}, SAID]
    openais = {"tools": [{"type": "function", "function": ADD}], "messages": [*ASKED, CALLED, RESULT, SAID]}
    _, rows, lines = imported(tmp_path, {"system": "Be brief.", "tools": tools, "messages": messages})
    _, same, _ = imported(tmp_path, openais)
    assert rows == same and not lines and rows[0]["messages"][0]["content"].startswith("Be brief.\n\n# Tools")
    sides = {"system": "Be brief.", "prompt": "1 + 1?", "completion": "2"}
    _, (first, second), _ = imported(tmp_path, sides, {**openais, "system": "Be brief."})
    assert first["prompt"] == ASKED and second == same[0]


def test_request_options_are_in_the_system_prompt(tmp_path):
    row = {"messages": [*ASKED, SAID], "response_format": {"type": "json_object"}}
    tools = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    _, rows, (heard,) = imported(tmp_path, row, row | tools, row | {"response_format": {"type": "grammar"}})
    first, second = (row["messages"][0]["content"] for row in rows)
    assert first == "Be brief.\n\nAnswer with one JSON object and nothing else."
    assert "Answer with a function call.\n\nCall one function at a time." in second
    assert "response_format of type 'grammar'" in heard


def test_messages_in_events_are_read_once(tmp_path):
    told = conventions(ASKED, SAID)
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in told.items()]
    event = "gen_ai.client.inference.operation.details"
    record = {"timeUnixNano": "1", "eventName": event, "attributes": attributes}
    span = {"spanId": "1", "attributes": {"gen_ai.operation.name": "chat"}}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record, {"body": {"stringValue": "other"}}]}]}]}
    done, (row,), messages = imported(tmp_path, logs, span | {"events": [{"name": event, "attributes": told}]}, span)
    assert [message["content"] for message in row["messages"][1:]] == ["1 + 1?", "It is 2."] and not messages
    assert done.skipped == {
        "repeated in another": 1, "spans of other things": 1, "calls without their messages": 1
    }  # fmt: skip


def test_legacy_function_call_is_rejected(tmp_path):
    old = {"role": "assistant", "content": "I add.", "function_call": CALL["function"]}
    _, rows, messages = imported(tmp_path, {"messages": [*ASKED, old]}, {"messages": [*ASKED, SAID]})
    assert len(rows) == 1 and "messages[2]: function_call is not supported here. Send tool_calls" in messages[0]


def test_large_floats_do_not_lengthen_the_key_of_a_message():
    """1e308 has 309 digits. 2.0 still equals 2."""
    calls = [FunctionCall(id="1", name="f", arguments=json.dumps(values)) for values in ([2.0, 1e308], [2, 1e308])]
    keys = [ChatMessage(role="assistant", text="", calls=(call,)).key for call in calls]
    assert keys[0] == keys[1] and len(keys[0]) < 100
