"""Calls in the grammars of families, on a tokenizer that has all their control tokens and bytes beside."""

import asyncio
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge_agents as fa
from forge_agents.rollout.episode import play
from forge_agents.rollout.players import with_calls
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.tools import parse_tool_calls
from forge_agents.tools.native import reader_for
from forge_agents.types import Episode, ToolCall
from forge_trainers.batch.packing import samples_from

from .fakes import TextEngine, byte_tokenizer, trained_tokens  # noqa: TID252 (tests are no installed package)

pytest.importorskip("renderers", reason="comes with forge-agents-rl[cpu]")

SEP, BAR = "\u2581", "\uff5c"
DEEPSEEK = {name: f"<{BAR}tool{SEP}{name.replace(' ', SEP)}{BAR}>" for name in (
    "calls begin", "calls end", "call begin", "call end", "sep", "outputs begin", "outputs end", "output begin",
    "output end")}  # fmt: skip
CALLS = {
    "qwen3.5": """<tool_call>
<function=book>
<parameter=city>
Rome
</parameter>
<parameter=nights>
2
</parameter>
</function>
</tool_call>""",
    "glm": """<tool_call>book
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>nights</arg_key>
<arg_value>2</arg_value>
</tool_call>""",
    "deepseek": f"""{DEEPSEEK["calls begin"]}{DEEPSEEK["call begin"]}function{DEEPSEEK["sep"]}book
```json
{{"city": "Rome", "nights": 2}}
```{DEEPSEEK["call end"]}{DEEPSEEK["calls end"]}""",
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>"
        '{"city": "Rome", "nights": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax": """<minimax:tool_call>
<invoke name="book">
<parameter name="city">Rome</parameter>
<parameter name="nights">2</parameter>
</invoke>
</minimax:tool_call>""",
    "gpt-oss": (
        '<|channel|>commentary to=functions.book <|constrain|>json<|message|>{"city": "Rome", "nights": 2}<|call|>'
    ),
}
MARKS = {
    "qwen3.5": "<function=",
    "glm": "[gMASK]<arg_key>",
    "deepseek": f"<{BAR}User{BAR}>",
    "kimi": "<|im_middle|>",
    "minimax": "]~b]",
    "gpt-oss": "<|start|><|channel|>",
}
CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "[BOS]", "[EOS]", "]~!b[", "]~b]", "[e~[", f"<{BAR}begin{SEP}of{SEP}sentence{BAR}>",
    f"<{BAR}end{SEP}of{SEP}sentence{BAR}>", f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", *DEEPSEEK.values(),
    "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>",
)  # fmt: skip
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
         "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>")  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOOK = ToolCall(name="book", arguments={"city": "Rome", "nights": 2})


@fa.tool
def book(city: str, nights: int = 1) -> str:
    """Book a room."""
    return f"booked {city} for {nights}"


@pytest.fixture(scope="module")
def everybody():
    return byte_tokenizer(CONTROL, PLAIN, eos="<|im_end|>", template=TEMPLATE)


@pytest.fixture(scope="module")
def speaking(everybody):
    def of(family):
        tokenizer = copy.deepcopy(everybody)
        tokenizer.chat_template = f"{{% set grammar = '{MARKS[family]}' %}}{TEMPLATE}"
        return tokenizer

    made = {family: of(family) for family in CALLS}
    return made.__getitem__


def encoded(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("family", CALLS)
def test_call_is_parsed_and_malformed_ones_have_errors(speaking, family):
    tokenizer, text = speaking(family), CALLS[family]
    read = reader_for(tokenizer)
    assert read(encoded(tokenizer, text), [book.schema]) == ("", (BOOK,))
    assert read(encoded(tokenizer, "No calls."), [book.schema])[1] == ()
    cut = encoded(tokenizer, text)[:-12]
    calls = read(cut, [book.schema])[1]
    assert all(call == BOOK or call.error for call in calls), "half a call is not run"


def test_json_formats_need_no_package(everybody):
    assert reader_for(everybody) is None


def test_missing_control_tokens_fall_back_to_text_with_a_warning(everybody, caplog):
    lacking = copy.deepcopy(everybody)
    lacking.convert_tokens_to_ids = lambda token: None
    for template in ("<|start|><|channel|>", "<|im_start|><function="):
        lacking.chat_template = template
        assert reader_for(lacking) is None
    assert "read as text only: the tokenizer has no <|return|>, <|call|>" in caplog.text
    assert "the tokenizer has no <tool_call>, </tool_call>" in caplog.text


@pytest.mark.parametrize("family", CALLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parsing_tokens_never_raises(speaking, family, data):
    tokenizer, text = speaking(family), CALLS[family]
    whole = encoded(tokenizer, text)
    some = st.sampled_from(whole) | st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(some, max_size=30) | st.tuples(st.lists(some, max_size=3), st.just(whole)).map(
        lambda parts: [*parts[0], *parts[1]]))  # fmt: skip
    for call in reader_for(tokenizer)(ids, [book.schema])[1]:
        assert parse_tool_calls(str(call)) == [call]


class Desk(fa.ToolEnv):
    """One seat that books, then answers."""

    possible_agents = ("guest", "other")

    def setup(self, rng):
        self.said = ""

    def tools(self, agent):
        return [book] if agent == "guest" else []

    def instructions(self, agent):
        return "Book a room."

    def observe_text(self, agent):
        return self.said or "go"

    def act(self, agent, action):
        self.said = action
        return fa.Outcome(done=agent == "other")


CALL_OF_DEEPSEEK = (
    f"{DEEPSEEK['calls begin']}{DEEPSEEK['call begin']}function{DEEPSEEK['sep']}book\n%s"
    f"{DEEPSEEK['call end']}{DEEPSEEK['calls end']}"
)
CALL_OF_MINIMAX = "<minimax:tool_call>%s</minimax:tool_call>"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("deepseek", CALL_OF_DEEPSEEK % f"```json{' ' * 6000}x"),
        ("deepseek", CALL_OF_DEEPSEEK % f"```\n\n{'x ' + ' ' * 6000}x"),
        ("qwen3.5", f"<tool_call><function=book>{'<parameter=a>' * 3_000}</tool_call>"),
        ("qwen3.5", f"<tool_call><function=book>{'<parameter=' * 3_000}</parameter></tool_call>"),
        ("qwen3.5", f"<tool_call>{'<function=' * 3_000}</tool_call>"),
        ("qwen3.5", f"<tool_call>{'<function=' * 3_000}</tool_call><tool_call><function=book></tool_call>"),
        ("minimax", CALL_OF_MINIMAX % ('<invoke name="book">' * 2_000)),
        ("minimax", CALL_OF_MINIMAX % f"""<invoke name="book">{'<parameter name="a">' * 2_000}</invoke>"""),
        ("gpt-oss", "<|start|>assistant<|channel|>commentary to=functions.book <|message|>{}<|call|>" * 1_000),
    ],
)
def test_calls_whose_patterns_take_more_than_linear_time_are_refused(speaking, family, text):
    tokenizer = speaking(family)
    _, calls = reader_for(tokenizer)(encoded(tokenizer, text), [book.schema])
    assert [call.error for call in calls] == ["the tool call cannot be read (too many unfinished parts)"]


def test_marks_within_arguments_are_not_unfinished(speaking):
    code = "```\n" + "".join(f"{' ' * (number % 40)}<parameter=x> <function=f\n" for number in range(200)) + "```"
    qwen = f"<tool_call><function=book>\n<parameter=city>\n{code}\n</parameter>\n</function></tool_call>"
    body = code.replace("<parameter=x>", '<invoke name="a"> <parameter name="x">')
    minimax = CALL_OF_MINIMAX % f'<invoke name="book">\n<parameter name="city">{body}</parameter>\n</invoke>'
    deepseek = CALL_OF_DEEPSEEK % f"```json\n{json.dumps({'city': code}, indent=8)}\n```"
    for family, text, city in (("qwen3.5", qwen, code), ("minimax", minimax, body), ("deepseek", deepseek, code)):
        tokenizer = speaking(family)
        _, calls = reader_for(tokenizer)(encoded(tokenizer, text), [book.schema])
        assert [(call.name, call.arguments) for call in calls] == [("book", {"city": city})], family


@pytest.mark.parametrize("keep_reasoning", ["all", "turn", "none"])
@pytest.mark.parametrize("family", CALLS)
def test_environment_gets_one_form_for_all_grammars(speaking, family, keep_reasoning):
    tokenizer, text = speaking(family), CALLS[family]
    begin, end, final = "<think>", "</think>", ""
    if family == "gpt-oss":
        begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        final = "<|channel|>final<|message|>"
    draft = text.replace("Rome", "Oslo")
    said = [f"{begin}hidden {draft}{end}{text}", f"{final}CALL book(Bern)", f"{begin}more{end}{final}done"]
    engine = TextEngine(tokenizer, said)
    policy = fa.Policy("m", name="m", keep_reasoning=keep_reasoning, sampling=fa.Sampling(max_tokens=999))
    seats = {"guest": policy, "other": fa.Scripted(lambda o: "thanks")}
    served = {"m": PolicyEngine(engine, Renderer(tokenizer))}
    episode = asyncio.run(play(Desk(), seats, seed=0, engines=served))
    assert episode.error is None
    first, second, third = episode.trajectories["guest"].turns
    assert first.tool_calls == (BOOK,) and first.action == str(BOOK) and "Oslo" in first.reasoning
    assert "booked Rome for 2" in second.observation and "Oslo" not in second.observation
    assert second.tool_calls == (ToolCall(name="book", arguments={"city": "Bern"}),)
    assert second.action == "CALL book(Bern)"
    assert (third.action, third.tool_calls) == ("done", ()) and episode.trajectories["other"].turns[0].tool_calls == ()
    assert Episode.from_json(episode.to_json()) == episode
    assert trained_tokens(samples_from(episode.trajectories["guest"], [1.0] * 3, 0)) == engine.sampled
    saved = [tokenizer.decode(prompt).count("hidden") for prompt in engine.prompts]
    assert saved == ([0, 0, 0] if keep_reasoning == "none" else [0, 1, 1])
    if keep_reasoning == "none" and family != "gpt-oss":
        mark = encoded(tokenizer, text)[0]
        assert engine.prompts[1].count(mark) == 1, "its own call stands whole in a history that is written anew"


@pytest.mark.parametrize("family", CALLS)
def test_json_call_as_in_the_instructions_runs_in_every_family(speaking, family):
    tokenizer = speaking(family)
    engine = TextEngine(tokenizer, [f"I <3 it.\n{BOOK}", '<tool_call>{"name": "book", "arg', "done"])
    policy = fa.Policy("m", name="m", sampling=fa.Sampling(max_tokens=999))
    seats = {"guest": policy, "other": fa.Scripted(lambda o: "thanks")}
    episode = asyncio.run(play(Desk(), seats, seed=0, engines={"m": PolicyEngine(engine, Renderer(tokenizer))}))
    first, second, third = episode.trajectories["guest"].turns
    assert (first.action, first.tool_calls) == (f"I <3 it.\n{BOOK}", (BOOK,))
    assert "booked Rome for 2" in second.observation
    assert "is not closed by </tool_call>; write <tool_call>{" in third.observation


def test_unfinished_reasoning_contains_no_call(speaking):
    tokenizer = speaking("qwen3.5")
    engine = TextEngine(tokenizer, [f"<think>maybe {CALLS['qwen3.5']}"])
    policy = fa.Policy("m", name="m", sampling=fa.Sampling(max_tokens=999))
    seats = {"guest": policy, "other": fa.Scripted(lambda o: "thanks")}
    episode = asyncio.run(play(Desk(), seats, seed=0, engines={"m": PolicyEngine(engine, Renderer(tokenizer))}))
    (turn,) = episode.trajectories["guest"].turns
    assert turn.tool_calls == () and turn.action == "" and "Rome" in turn.reasoning


def test_calls_parsed_by_a_server_run(serve_chat):
    calls = [{"type": "function", "function": {"name": "book", "arguments": '{"city": "Rome", "nights": 2}'}},
             {"type": "function", "function": {"name": "book", "arguments": "{"}}]  # fmt: skip
    server = serve_chat(
        lambda request: (
            "done"
            if len(request["messages"]) > 2
            else {"choices": [{"message": {"content": "CALL book(Bern)", "tool_calls": calls}}]}
        )
    )
    seats = {"guest": server.endpoint, "other": server.endpoint_with(name="other")}
    episode = asyncio.run(play(Desk(), seats, seed=0))
    first, second = episode.trajectories["guest"].turns
    assert first.tool_calls[0] == BOOK and "must be a JSON object" in first.tool_calls[1].error
    assert "booked Rome for 2" in second.observation and "must be a JSON object" in second.observation
    assert "Bern" not in second.observation and second.action == "done"
    assert server.requests[1]["messages"][2] == {"role": "assistant", "content": first.action}
    (other,) = episode.trajectories["other"].turns
    assert (other.action, other.tool_calls) == ("CALL book(Bern)", ()), "a seat without tools calls none"


@pytest.mark.parametrize("words", ['{"name": "Bob"}', '{"name": oops', "I look.", ""])
def test_calls_next_to_text_are_parsed(words):
    call = ToolCall(name="search", arguments={"for": "Bob"})
    assert [result.name for result in parse_tool_calls(with_calls(words, (call,)))] == ["search"]
    assert words in with_calls("I look.", (call,)) or words != "I look."
