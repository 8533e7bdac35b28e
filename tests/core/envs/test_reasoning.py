from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_agents.envs.env import visible_action
from forge_agents.envs.reasoning import join_reasoning, opens_reasoning, split_reasoning

ANALYSIS, REMARK = "<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"
NEXT, CALL = "<|end|><|start|>assistant", "<|channel|>commentary to=functions.f<|message|>{}"


@pytest.mark.parametrize(
    ("said", "thought", "answer"),
    [
        ("<think>PRIVATE</think> offer 3", "PRIVATE", "offer 3"),
        ("\n<think>\na\n</think>\n<think>b</think>\n\nc", "a\n\nb", "c"),
        ("<think>\n\n</think>\n\nc", "", "c"),
        ("<think>a <think> b</think> c", "a <think> b", "c"),
        ("<think>cut off", "cut off", ""),
        (" no tags ", "", " no tags "),
        ("A <think>tag</think> in an answer", "", "A <think>tag</think> in an answer"),
        ("a</think> b", "", "a</think> b"),
        ("<think>a</think> The tags <think> and </think>.", "a", "The tags <think> and </think>."),
        ("[THINK]a[/THINK]b", "a", "b"),
        ("<|channel>thought\na<channel|>b", "a", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "a", "b"),
        ("<|channel|>final<|message|>b", "", "b"),
        (f"{ANALYSIS}a{NEXT}{REMARK}I\nlook{NEXT}<|channel|>final<|message|>b", "a\n\nI\nlook", "b"),
        (f"{REMARK}I look{NEXT}{CALL}", "I look", CALL),
        (f"{ANALYSIS}a{NEXT}{CALL}", "a", CALL),
        (f"{REMARK}the only message<|end|>", "", f"{REMARK}the only message<|end|>"),
    ],
)
def test_a_thought_stands_before_the_answer(said, thought, answer):
    assert split_reasoning(said) == (thought, answer)


def test_text_after_an_opened_prompt_is_reasoning():
    assert split_reasoning("a</think> b", opened=True) == ("a", "b")
    assert split_reasoning("a", opened=True) == ("a", "")
    assert split_reasoning("<think>a</think> b", opened=True) == ("a", "b")


def test_closing_tag_implies_reasoning_if_the_prompt_is_unknown():
    assert split_reasoning("a</think> b", opened=None) == ("a", "b")
    assert split_reasoning("a", opened=None) == ("", "a")
    assert split_reasoning("The tags <think> and </think>.", opened=None) == ("", "The tags <think> and </think>.")


@pytest.mark.parametrize("end", ["assistant\n<think>\n", "[THINK]"])
def test_end_of_a_prompt_reveals_open_reasoning(end):
    assert opens_reasoning(f"<think>x</think>{end}")
    assert not opens_reasoning(f"{end}\n</think>\n\n") and not opens_reasoning(f"{end} user: hi")


@given(st.text().map(str.strip).filter(bool), st.text().map(str.strip))
def test_what_is_put_together_comes_apart_again(thought, answer):
    if "</think>" not in thought:
        assert split_reasoning(join_reasoning(thought, answer)) == (thought, answer)


_PIECES = st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "a", " ", "\n", "<|end|>", "◁think▷"])


@given(st.lists(_PIECES, max_size=12).map("".join), st.sampled_from([True, False, None]))
def test_any_text_can_be_split_and_plain_answers_stay_unchanged(text, opened):
    thought, answer = split_reasoning(text, opened=opened)
    assert len(thought) + len(answer) <= len(text) and answer in text
    if opened is False and not text.lstrip().startswith(("<think>", "[THINK]", "◁think▷")):
        assert (thought, answer) == ("", text)


def test_only_an_environment_that_asks_for_reasoning_observes_it():
    observing = SimpleNamespace(observes_reasoning=True, unwrapped=None)
    assert visible_action(observing, "a", "b") == join_reasoning("a", "b")
    assert visible_action(SimpleNamespace(observes_reasoning=False, unwrapped=MagicMock()), "a", "b") == "b"
    assert visible_action(MagicMock(), "a", "b") == "b"
