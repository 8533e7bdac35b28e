"""Answers that repeat their prompt."""

from hypothesis import given
from hypothesis import strategies as st

from forge_agents.repeated_prompts import overlap

MESSAGES = st.lists(st.sampled_from("ab"), max_size=6)


@given(MESSAGES, MESSAGES, st.integers(0, 6))
def test_overlap_is_the_whole_prompt_or_its_longest_end(prompt, answer, instructions):
    begins = [at for at in range(instructions + 1) if prompt and answer[at : at + len(prompt)] == prompt]
    ends = [size for size in range(1, min(len(prompt), len(answer)) + 1) if prompt[-size:] == answer[:size]]
    expected = (begins[0], begins[0] + len(prompt)) if begins else (0, max(ends, default=0))
    assert overlap(prompt, answer, instructions) == expected


def test_equal_messages_are_compared_in_linear_time():
    class Message(str):
        compared = 0
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            Message.compared += 1
            return str(self) == str(other)

        def __ne__(self, other):
            return not self == other

    prompt = [Message("a") for _ in range(2000)]
    assert overlap(prompt, [*map(Message, prompt[1:]), Message("b")], 1000) == (0, 1999)
    assert overlap([Message("b"), *prompt], [Message("a") for _ in range(1999)], 1000) == (0, 1999)
    assert Message.compared < 40_000
