"""Logs of requests: each answer is learned once, whatever form the log has."""

import json

import pytest

from . import helpers  # noqa: TID252 (tests are no installed package)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": ADD}
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def calling(arguments, text="I add."):
    function = {"name": "add", "arguments": arguments}
    return said(text, tool_calls=[{"id": "c1", "type": "function", "function": function}])


def imported(folder, *values, **options):
    """The rows that are made of these values, what was left out, and what was said."""
    result, rows, lines = helpers.imported(folder, *values, **options)
    return rows, dict(result.skipped), lines


def learned(rows):
    """The texts of answers that are learned of rows."""
    parts = [row.get("completion", row.get("messages")) for row in rows]
    return [message["content"] for part in parts for message in part if message["role"] == "assistant"]


# ---- histories that grow

ONE = [SYSTEM, user("one"), said("1")]
TWO = [*ONE, user("two"), said("2")]
THREE = [*TWO, user("three"), said("3")]


def as_chat(messages):
    return {"messages": messages}


def as_request(messages):
    return {"request": {"messages": messages[:-1]}, "response": {"choices": [{"message": messages[-1]}]}}


@pytest.mark.parametrize("written", [as_chat, as_request])
@pytest.mark.parametrize("order", [(ONE, TWO, THREE), (THREE, TWO, ONE), (TWO, THREE, ONE, THREE)])
def test_answers_of_a_growing_history_form_one_row(tmp_path, written, order):
    rows, left, messages = imported(tmp_path, *map(written, order))
    assert rows == [{"messages": THREE}] and not messages
    assert left == {"repeated in another": len(order) - 1}


@pytest.mark.parametrize("written", [as_chat, as_request])
def test_branches_share_their_first_answers(tmp_path, written):
    other = [*ONE, user("other"), said("9")]
    chats = [ONE, TWO, other] if written is as_request else [TWO, other]
    rows, _, _ = imported(tmp_path, *map(written, chats))
    assert sorted(learned(rows)) == ["1", "2", "9"]
    assert rows[-1] == {"prompt": other[:-1], "completion": other[-1:]}


def test_same_answer_to_another_prompt_is_learned(tmp_path):
    chats = [ONE, ONE[1:], [SYSTEM, user("uno"), said("1")], [{**SYSTEM, "content": "Be long."}, *ONE[1:]]]
    rows, left, _ = imported(tmp_path, *map(as_chat, chats))
    assert learned(rows) == ["1"] * 4 and left == {}


# ---- forms of logs

ASKED = [SYSTEM, user("1 + 1?")]
OPENAI = {"model": "m", "messages": ASKED, "tools": [TOOL], "temperature": 0.2, "stream": False}
CALL = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
COMPLETION = {
    "id": "x", "object": "chat.completion", "model": "m-1",
    "choices": [{"index": 0, "finish_reason": "tool_calls",
                 "message": {"role": "assistant", "content": "I add.", "tool_calls": CALL, "refusal": None}}],
    "usage": {"total_tokens": 3},
}  # fmt: skip
ANTHROPIC = {
    "model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [user("1 + 1?")],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}  # fmt: skip
MESSAGE = {
    "id": "x", "type": "message", "role": "assistant", "model": "m-1", "stop_reason": "tool_use",
    "content": [{"type": "text", "text": "I add."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
    "usage": {"input_tokens": 1},
}  # fmt: skip
RESPONSES = {
    "model": "m", "instructions": "Be brief.", "input": "1 + 1?",
    "tools": [{**ADD, "type": "function"}],
}  # fmt: skip
OUTPUT = {
    "id": "x", "object": "response", "model": "m-1", "status": "completed", "error": None,
    "output": [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
    ],
}  # fmt: skip
CALLED = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "row",
    [
        {"request": OPENAI, "response": COMPLETION},
        {"request": ANTHROPIC, "response": MESSAGE},
        {"request": RESPONSES, "response": OUTPUT},
        {"request": json.dumps(OPENAI), "response": json.dumps(COMPLETION)},
        {"request": {"url": "/v1", "body": OPENAI}, "response": {"status": 200, "body": json.dumps(COMPLETION)}},
        {"request_body": ANTHROPIC, "response_body": MESSAGE},
        {"input": OPENAI, "output": COMPLETION["choices"][0]["message"]},
        {**OPENAI, "response": COMPLETION},
        {**OPENAI, **COMPLETION},
        {"request": OPENAI, "response": COMPLETION["choices"][0]["message"]},
        {"request": OPENAI, "response": COMPLETION, "error": None, "id": 7},
    ],
)
def test_request_and_response_form_a_conversation(tmp_path, row):
    rows, left, messages = imported(tmp_path, row)
    assert not left and not messages
    ((system, question, answer),) = (row["messages"] for row in rows)
    assert system["content"].startswith("Be brief.\n\n# Tools") and '"name": "add"' in system["content"]
    assert (question, answer) == (user("1 + 1?"), said(CALLED))


def test_plain_texts_are_a_question_and_an_answer(tmp_path):
    rows, _, _ = imported(tmp_path, {"request": "1 + 1?", "response": "2"}, {"request": ASKED, "response": "2"})
    assert [row["messages"] for row in rows] == [[user("1 + 1?"), said("2")], [*ASKED, said("2")]]


def test_only_the_answer_of_a_request_is_learned(tmp_path):
    history = [*ASKED, said("An example."), user("2 + 2?")]
    rows, _, _ = imported(tmp_path, {"request": {"messages": history}, "response": "4"})
    assert rows == [{"prompt": history, "completion": [said("4")]}]


def test_reasoning_of_a_response_precedes_its_answer(tmp_path):
    thinking = {**MESSAGE, "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "2"}]}
    reasoning = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, OUTPUT["output"][0]]
    chat = {"choices": [{"message": said("2", reasoning_content="hm"), "finish_reason": "stop"}]}
    rows, _, messages = imported(
        tmp_path,
        {"request": {**ANTHROPIC, "tools": []}, "response": {**thinking, "stop_reason": "end_turn"}},
        {"request": {**RESPONSES, "tools": []}, "response": {**OUTPUT, "output": reasoning}},
        {"request": {"messages": [user("other")]}, "response": chat},
    )
    assert learned(rows) == [f"<think>\nhm\n</think>\n\n{text}" for text in ("2", "I add.", "2")] and not messages


def test_openais_responses_keep_calls_and_results(tmp_path):
    items = [
        user("1 + 1?"), *OUTPUT["output"],
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]  # fmt: skip
    answer = {"status": "completed", "output": [{"type": "message", "role": "assistant", "content": "It is 2."}]}
    rows, _, _ = imported(tmp_path, {"request": {"input": items}, "response": answer})
    assert rows[0]["prompt"] == [user("1 + 1?"), said(CALLED), user("<tool_response>\n2\n</tool_response>")]
    assert learned(rows) == ["It is 2."]


def responses_row(*items, **request):
    return {"request": {"input": "1 + 1?", **request}, "response": {"status": "completed", "output": list(items)}}


def written(text, **more):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def test_response_of_reasoning_alone_is_skipped(tmp_path):
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    history = responses_row({"type": "reasoning", "content": "odd"}, input=[user("0?"), said("0"), user("1?")])
    rows, left, heard = imported(tmp_path, responses_row(reasoning), history, responses_row(written("2"), written("!")))
    assert learned(rows) == ["2\n!"] and left == {"unreadable": 2} and "no answer" in heard[0]


def test_instructions_precede_a_system_message_of_the_input(tmp_path):
    rows, _, _ = imported(tmp_path, responses_row(written("2"), instructions="Add.", input=[SYSTEM, user("1 + 1?")]))
    system = [message["content"] for message in rows[0]["messages"] if message["role"] == "system"]
    assert system == ["Add.", "Be brief."]


def test_marks_of_items_are_followed_or_rejected(tmp_path):
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "weight": 0}
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    rows, left, messages = imported(
        tmp_path,
        as_chat([user("one"), written("bad", weight=0), user("two"), written("good")]),
        as_chat([user("three"), written("masked", masked=True)]),
        as_chat([user("four"), call, result, said("4")]),
    )
    assert learned(rows) == ["good"] and left == {"answers of weight 0": 1, "unreadable": 2}
    assert "'masked'" in messages[0] and "marked" in messages[1]


def test_reasoning_next_to_blocks_of_tools_is_kept(tmp_path):
    blocks = [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}]
    for role in ("user", "tool"):
        result = {"role": role, "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]}
        chat = [user("1?"), said(blocks, reasoning_content="Deep."), result, said("2")]
        rows, _, _ = imported(tmp_path, as_chat(chat))
        assert learned(rows)[0].startswith("<think>\nDeep.\n</think>")


def test_tools_and_format_are_in_the_system_prompt(tmp_path):
    form = {"type": "json_object"}
    bodies = [
        ({**OPENAI, "tools": [], "response_format": form}, "2"),
        ({**RESPONSES, "tools": [], "text": {"format": form}}, "3"),
        ({**ANTHROPIC, "tools": [], "output_config": {"format": form}}, "4"),
    ]
    rows, _, _ = imported(tmp_path, *({"request": body, "response": answer} for body, answer in bodies))
    told = {row["messages"][0]["content"] for row in rows}
    assert len(rows) == 3 and told == {"Be brief.\n\nAnswer with one JSON object and nothing else."}
    alone = {**ANTHROPIC, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    (row,), _, _ = imported(tmp_path, {"request": alone, "response": MESSAGE})
    assert row["messages"][0]["content"].endswith("Answer with a function call.\n\nCall one function at a time.")


def test_failed_and_truncated_responses_are_skipped_and_counted(tmp_path):
    cut = {"choices": [{"message": said("tw"), "finish_reason": "length"}]}
    long = {**MESSAGE, "stop_reason": "max_tokens"}
    rows, left, messages = imported(
        tmp_path,
        {"request": OPENAI, "response": {"error": {"message": "no"}}},
        {"request": OPENAI, "response": {"status": 500, "body": "Internal error"}},
        {"request": OPENAI, "error": "timeout", "response": None},
        {"request": OPENAI, "response": cut},
        {"request": ANTHROPIC, "response": long},
        {"request": RESPONSES, "response": {**OUTPUT, "status": "incomplete"}},
        {"request": RESPONSES, "response": {**OUTPUT, "status": "failed"}},
        {"request": RESPONSES, "response": OUTPUT, "status_code": 429},
        {"request": {"input": "one"}, "response": {**OUTPUT, "output": [written("1")]}, "status": 200},
        {"request": OPENAI, "response": "2"},
    )
    assert learned(rows) == ["1", "2"] and not messages
    assert left == {"requests that failed": 4, "answers that were cut off": 4}


def test_choices_are_answers_to_the_same_request(tmp_path):
    both = {"choices": [{"message": said(text), "finish_reason": "stop"} for text in ("2", "two")]}
    rows, _, _ = imported(tmp_path, {"request": {"messages": ASKED}, "response": both})
    assert learned(rows) == ["2", "two"]
    both["choices"] *= 65
    one = {"choices": both["choices"][:1]}
    log = [{"request": {"messages": ASKED}, "response": response} for response in (both, one)]
    rows, left, messages = imported(tmp_path, *log)
    assert learned(rows) == ["2"] and left == {"unreadable": 1}
    assert "it has 130 answers. Expected at most 128" in messages[0]


def test_requests_are_selected_by_model_and_paired_by_score(tmp_path):
    log = [{"request": {**OPENAI, "model": name}, "response": name} for name in ("solver", "planner")]
    rows, left, _ = imported(tmp_path, *log, model="planner")
    assert learned(rows) == ["planner"] and left == {"of other models, or of none that is named": 1}
    scored = [{"request": OPENAI, "response": text, "helpful": score} for text, score in (("2", 1.0), ("3", 0.0))]
    (row,), _, _ = imported(tmp_path, *scored, pairs="helpful")
    assert (row["chosen"], row["rejected"]) == ([said("2")], [said("3")])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"request": {"prompt": "hi"}, "response": "2"}, "the request has the keys 'prompt'. Expected messages"),
        ({"request": 7, "response": "2"}, "the request is '7'. Expected an object with messages"),
        ({"request": OPENAI, "response": {"choices": [{"delta": {}}]}}, "a part of a stream"),
        ({"request": OPENAI, "response": {"choices": [{"text": "2"}]}}, "has no message"),
        ({"request": OPENAI, "response": "data: {}"}, "is a text that is not JSON"),
        ({"request": OPENAI, "response": [COMPLETION]}, "the response is a list, as streams are logged"),
        ({"request": OPENAI, "response": {"text": "2"}}, "the response has the keys 'text'. Expected choices"),
        ({"request": {**RESPONSES, "previous_response_id": "x"}, "response": OUTPUT}, "previous_response_id"),
        ({"request": OPENAI, "response": ""}, "the answer is empty"),
        ({"request": {**OPENAI, "functions": [ADD]}, "response": "2"}, "the request has functions, which is not"),
        ({"request": {"messages": [{**user("x"), "images": ["y"]}]}, "response": "2"}, "has the key 'images'"),
        ({"response": COMPLETION, "custom_id": "x"}, "a request with its response. The keys are"),
    ],
)
def test_unreadable_log_is_reported_with_its_line(tmp_path, row, message):
    rows, left, (heard,) = imported(tmp_path, {"request": OPENAI, "response": "2"}, row)
    assert len(rows) == 1 and left == {"unreadable": 1}
    assert "in.jsonl:2 is skipped: " in heard and message in heard


# ---- prompts that stand twice


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_prompt_repeated_by_an_answer_is_written_once(tmp_path, tools):
    question = user("What is 1 + 1?")
    rows = [
        {"prompt": "What is 1 + 1?", "completion": "What is 1 + 1? 2"},
        {"prompt": [question], "completion": [{**question, "content": " What is\n1 + 1? "}, said("2")]},
        {"prompt": [SYSTEM, question], "completion": [SYSTEM, question, said("2")]},
        {"prompt": [SYSTEM, question], "completion": [question, said("2")]},
        {"prompt": "What is 1 + 1?", "completion": [question, said("2")], "system": "Be brief."},
        {"prompt": "What is 1 + 1?", "completion": "2"},
    ]
    made, _, messages = imported(tmp_path, *({**row, "tools": tools} for row in rows))
    assert [row["completion"] for row in made] == [[said("2")]] * len(rows) and not messages
    assert all(json.dumps(row).count("What is 1 + 1?") == 1 for row in made)
    sides = {"prompt": "What is 1 + 1?", "chosen": "What is 1 + 1? 2", "rejected": [question, said("3")]}
    (row,), _, _ = imported(tmp_path, {**sides, "tools": tools})
    assert (row["chosen"], row["rejected"]) == ([said("2")], [said("3")])


# ---- arguments of calls


@pytest.mark.parametrize("arguments", ["not json", '{"a": 1', "[1]", "7", '"a"', "null", '{"a": NaN}', '{"a": 1} {}'])
def test_arguments_other_than_a_json_object_are_rejected(tmp_path, arguments):
    good, bad = {"messages": [*ASKED, said("2")]}, [*ASKED, calling(arguments)]
    blocks = {**MESSAGE, "content": [{**MESSAGE["content"][1], "input": arguments}]}
    logs = [
        {"messages": bad},
        {"request": {"messages": ASKED}, "response": {"choices": [{"message": bad[-1]}]}},
        {"request": ANTHROPIC, "response": blocks},
        {"prompt": ASKED, "completion": bad[-1:]},
        {"prompt": ASKED, "chosen": bad[-1:], "rejected": "3"},
    ]
    rows, left, messages = imported(tmp_path, good, *logs)
    assert learned(rows) == ["2"] and left == {"unreadable": len(logs)}
    assert all("the arguments of 'add' are" in line for line in messages)
    assert "not json" not in json.dumps(rows)


@pytest.mark.parametrize("arguments", ["", " ", "{}", {}, None])
def test_call_without_arguments_is_kept(tmp_path, arguments):
    ((row,), left, heard) = imported(tmp_path, {"messages": [*ASKED, calling(arguments)]})
    assert row["messages"][-1]["content"].endswith('{"name": "add", "arguments": {}}\n</tool_call>')
    assert not left and not heard


# ---- keys that say what is learned


@pytest.mark.parametrize("key", ["weight", "loss", "train", "loss_mask"])
def test_answers_marked_as_unlearned_are_not_learned(tmp_path, key):
    chat = [SYSTEM, user("one"), said("1", **{key: 0}), user("two"), said("2", **{key: 1})]
    rows, left, heard = imported(tmp_path, {"messages": chat})
    assert learned(rows) == ["2"] and left == {"answers of weight 0": 1} and not heard
    blocks = [{"type": "text", "text": "1"}, MESSAGE["content"][1]]
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]
    rows, _, heard = imported(tmp_path, {"messages": [user("one"), said(blocks, **{key: 0}), user(result), said("2")]})
    assert learned(rows) == ["2"] and "<tool_call>" in rows[0]["prompt"][1]["content"] and not heard
    row = {"messages": ONE, key: False}
    rows, left, _ = imported(tmp_path, row, {"messages": TWO})
    assert left == {"marked as not to be learned": 1}
    rows, _, (heard,) = imported(tmp_path, {"prompt": "one", "completion": [said("1", **{key: 0})]}, {"messages": ONE})
    assert learned(rows) == ["1"] and "marked as not to be learned. Write it as messages" in heard


def test_keys_that_may_change_learning_are_rejected(tmp_path):
    good = {"messages": ONE, "id": 1, "temperature": 0.5}
    rows, left, messages = imported(
        tmp_path, good, {"messages": TWO, "images": ["x"]}, {"messages": [user("one"), said("1", mask=1)]}
    )
    assert learned(rows) == ["1"] and left == {"unreadable": 2}
    assert "the row has the key 'images'" in messages[0] and "messages[1] has the key 'mask'" in messages[1]
    assert messages[2] == "ignored keys: 'temperature'"


@pytest.mark.parametrize("key", ["weight", "train", "loss", "loss_mask"])
@pytest.mark.parametrize("where", ["row", "answer"])
def test_request_marked_as_unlearned_is_skipped(tmp_path, key, where):
    def logged(question, **marks):
        row, answer = (marks, {}) if where == "row" else ({}, marks)
        response = {"choices": [{"message": said("yes", **answer), "finish_reason": "stop"}]}
        return {"request": {"messages": [user(question)]}, "response": response, **row}

    rows, left, _ = imported(tmp_path, logged("bad", **{key: 0}), logged("good", **{key: 1}))
    assert rows == [{"messages": [user("good"), said("yes")]}] and left == {"marked as not to be learned": 1}


def test_answer_in_request_and_response_is_learned_once(tmp_path):
    rows, left, _ = imported(tmp_path, {"messages": [user("one"), said("1")], "response": "1"})
    assert rows == [{"messages": [user("one"), said("1")]}] and not left


def test_answer_begun_by_the_request_is_rejected(tmp_path):
    def logged(*messages):
        response = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "1"}]}
        return {"request": {"messages": list(messages)}, "response": response}

    rows, left, lines = imported(tmp_path, logged(user("one"), said("The answer is")), logged(user("one")))
    assert rows == [{"messages": [user("one"), said("1")]}] and left == {"unreadable": 1}
    assert "the request ends with the beginning of the answer" in lines[0]


def test_contradicting_system_prompts_are_rejected(tmp_path):
    rows, left, messages = imported(
        tmp_path, {"system": "Be long.", "messages": ONE}, {"system": "Be  brief.", "messages": ONE}
    )
    assert rows == [{"messages": ONE}] and left == {"unreadable": 1} and "they differ" in messages[0]


def test_recorded_reasoning_is_learned_once_and_needs_an_answer(tmp_path):
    def logged(text, reasoning):
        answer = said(text, reasoning_content=reasoning)
        return {"request": {"messages": [user(text)]}, "response": {"choices": [{"message": answer}]}}

    tagged = "<think>\nhm\n</think>\n\n3"
    rows, left, heard = imported(
        tmp_path, logged(tagged, "hm\n"), logged("<think>other</think>4", "hm"), logged("<think>hm</think>", None)
    )
    assert [row["messages"][1] for row in rows] == [said(tagged)] and left == {"unreadable": 2}
    assert "in its text and in a key, and they differ" in heard[0] and "the answer is empty" in heard[1]


@pytest.mark.parametrize("end", ["refusal", "pause_turn", "model_length", "FinishReason.MAX_TOKENS"])
def test_incomplete_answers_of_any_api_are_left_out(tmp_path, end):
    def logged(end):
        answer = {"role": "assistant", "content": [{"type": "text", "text": end}], "stop_reason": end}
        return {"request": {"messages": ONE[:1]}, "response": {"type": "message", **answer}}

    rows, left, _ = imported(tmp_path, logged(end), logged("end_turn"), {"messages": ONE, "stop_reason": end})
    assert learned(rows) == ["end_turn"] and left == {"answers that were cut off": 2}


def test_json_inside_a_text_has_the_same_limits_as_a_row(tmp_path):
    request = '{"messages": [' + '{"":0},' * 500_000 + "{}]}"
    rows, left, heard = imported(tmp_path, {"request": request, "response": "x"}, {"messages": ONE})
    assert rows == [{"messages": ONE}] and left == {"unreadable": 1} and "more than 500000" in heard[0]
