"""Rows: prompts that are repeated, and keys that say or may say what is learned."""

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.rollout.rendering import Renderer
from forge_trainers.offline.data import read_demonstrations, read_pairs


@pytest.fixture
def sft(renderer):
    def sft(*rows, **settings):
        return read_demonstrations(rows, renderer, fa.SFTConfig(**settings), policy="hero", room=500)

    return sft


@pytest.fixture
def dpo(renderer):
    def dpo(*rows, **settings):
        return read_pairs(rows, renderer, fa.DPOConfig(**settings), policy="hero", room=500)

    return dpo


def content(result):
    """Return digests of a data set's items."""
    return [item.content for item in result.items]


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


# ---- prompts that stand twice

ASKED = "What is 2 + 2?"
SUM = "2 + 2 ="
LONG = chat("sBe brief.", "uone", "atwo", "uthree")
WITH_SYSTEM = chat("sBe brief.", f"u{ASKED}")
REPEATED = [  # the prompt, an answer that repeats it, and both as they should be read
    (ASKED, f"{ASKED} 4", (ASKED, "4")),
    (ASKED, f"{ASKED}4", (ASKED, "4")),
    (SUM, f"{SUM} 4", (SUM, "4")),
    (f"{ASKED}\n", "\n What is\t2 + 2?\n\n4", (f"{ASKED}\n", "4")),
    ("Human: hi\n\nAssistant:", "Human: hi\n\nAssistant: hello", ("Human: hi\n\nAssistant:", "hello")),
    (ASKED, chat(f"u{ASKED}", "a4"), (ASKED, "4")),
    (chat(f"u{ASKED}"), f"{ASKED} 4", (ASKED, "4")),
    (ASKED, chat("sBe brief.", f"u{ASKED}", "a4"), (WITH_SYSTEM, "4")),
    (LONG, [*LONG, *chat("afour")], (LONG, "four")),
    (LONG, chat("uone", "atwo", "uthree", "afour"), (LONG, "four")),
    (LONG, chat("uthree", "afour"), (LONG, "four")),
    (LONG, chat("u three\n", "afour"), (LONG, "four")),
    (LONG, chat("atwo", "uthree", "afour", "ufive", "asix"), (LONG, chat("afour", "ufive", "asix"))),
]


@pytest.mark.parametrize(("prompt", "repeated", "expected"), REPEATED)
def test_prompt_repeated_in_the_completion_or_both_sides_of_a_pair_is_read_once(sft, dpo, prompt, repeated, expected):
    result = sft({"prompt": prompt, "completion": repeated})
    assert content(result) == content(sft({"prompt": expected[0], "completion": expected[1]}))

    def worse(answer):
        return f"{answer} or 5" if isinstance(answer, str) else [*answer[:-1], *chat("a5")]

    result = dpo({"prompt": prompt, "chosen": repeated, "rejected": worse(repeated)})
    side = worse(expected[1]) if isinstance(repeated, str) or not isinstance(expected[1], str) else "5"
    assert content(result) == content(dpo({"prompt": expected[0], "chosen": expected[1], "rejected": side}))


def test_prompt_repeated_by_one_side_of_a_pair_is_read_once(dpo):
    expected = content(dpo({"prompt": ASKED, "chosen": "4", "rejected": "5"}))
    assert content(dpo({"prompt": ASKED, "chosen": f"{ASKED} 4", "rejected": "5"})) == expected
    assert content(dpo({"prompt": ASKED, "chosen": "4", "rejected": chat(f"u{ASKED}", "a5")})) == expected


def test_answers_that_begin_with_their_prompt_are_counted(sft, dpo):
    result = sft({"prompt": ASKED, "completion": f"{ASKED} 4"}, {"prompt": ASKED, "completion": "4"})
    assert result.counts == {"learned": 2, "answers without the prompt that they repeated": 1}
    result = dpo({"prompt": "one", "chosen": "one two", "rejected": "one three"})
    assert result.counts["answers without the prompt that they repeated"] == 2
    result = sft({"prompt": "Hi", "completion": "Hi there!"}, {"prompt": "Hi", "completion": "Hello!"})
    assert result.counts == {"learned": 2, "answers that begin with a prompt of one word": 1}


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Hi", "Hi there! How can I help you?"),
        ("Hello", "Hello! How can I help you?"),
        ("The sky", "The skyline is gray."),
        ("Say hi", "Say hi!"),
        ("Repeat after me", "Repeat after me"),
        ("What is 2 + 2?", "2 + 2 is 4."),
        ("What is 2 + 2?", "You ask: What is 2 + 2? It is 4."),
        (chat("uone", "aone", "uone"), "one"),
    ],
)
def test_answer_with_words_of_its_prompt_is_learned_whole(sft, dpo, prompt, answer):
    result = sft({"prompt": prompt, "completion": answer})
    requests = chat(f"u{prompt}") if isinstance(prompt, str) else prompt
    assert content(result) == content(sft({"prompt": requests, "completion": chat(f"a{answer}")}))
    pair = dpo({"prompt": prompt, "chosen": answer, "rejected": "no"})
    assert content(pair) == content(dpo({"prompt": requests, "chosen": chat(f"a{answer}"), "rejected": "no"}))


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        (chat("uone", "atwo", "uthree"), chat("uone", "afour")),
        (chat("sBe brief.", "uone"), chat("sBe long.", "uone", "atwo")),
    ],
)
def test_answer_that_begins_like_the_prompt_and_differs_is_refused(sft, prompt, completion):
    with pytest.raises(ValueError, match="row 0: 'completion' begins as 'prompt' does and differs from it"):
        sft({"prompt": prompt, "completion": completion})


def test_answers_that_differ_in_blanks_only_make_a_pair(dpo):
    (pair,) = dpo({"prompt": "code", "chosen": "if a:\n    b", "rejected": "if a:\n b"}).items
    assert pair.chosen[0].content != pair.rejected[0].content


def test_texts_without_a_prompt_are_refused(dpo):
    with pytest.raises(ValueError, match="Expected 'prompt' next to answers that are texts"):
        dpo({"system": "Be brief.", "question": "one", "chosen": "two", "rejected": "three"})


# ---- which answers are learned


def marked(key, *values):
    """Three questions and answers, of which the answers carry these values of a key, or None."""
    messages = []
    for number, value in enumerate(values):
        answer = {"role": "assistant", "content": f"answer {number}"}
        messages += [{"role": "user", "content": f"question {number}"}, {**answer, key: value}]
    return messages


def taught(item):
    text = bytes(token for token in item.ids[item.mask].tolist() if token < 256).decode()
    return [part for part in text.split("answer ") if part]


FLAGS = ("weight", "loss", "train", "training", "trainable", "learn", "loss_mask", "step_loss_mask", "loss_weight")


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize(("off", "on"), [(0, 1), (False, True), (0.0, 1.0), (0, None), (np.False_, np.int64(1))])
def test_an_answer_that_is_marked_as_not_learned_is_read_and_not_learned(sft, key, off, on):
    result = sft({"messages": marked(key, off, on, off, on)})
    (item,) = result.items
    assert taught(item) == ["1", "3"]
    assert b"answer 0" in bytes(token for token in item.ids.tolist() if token < 256)
    completion = {"prompt": "first", "completion": marked(key, on, off)}
    assert taught(sft(completion).items[0]) == ["0"]


@pytest.mark.parametrize("key", FLAGS)
def test_rows_without_an_answer_to_learn_are_left_out_and_counted(sft, dpo, key):
    good = {"messages": chat("uone", "atwo")}
    rows = [{"messages": marked(key, 0)}, good, {"messages": chat("uone", "atwo"), key: False}]
    result = sft(*rows)
    assert result.counts == {"learned": 1, "marked as not to be learned": 2}
    assert content(result) == content(sft(good))
    pair = {"prompt": "one", "chosen": "two", "rejected": "three"}
    assert dpo(pair, {**pair, key: 0}).counts == {"learned": 1, "marked as not to be learned": 1}
    with pytest.raises(ValueError, match="nothing is left to learn .1 marked as not to be learned"):
        sft(rows[0])


def test_an_answer_of_a_pair_that_is_not_learned_is_not_compared(dpo):
    sides = {side: [*marked("loss", 0), *chat("umore", f"a{side}")] for side in ("chosen", "rejected")}
    sides["rejected"][1]["content"] = "another"
    (pair,) = dpo(sides).items
    for side in ("chosen", "rejected"):
        (stream,) = getattr(pair, side)
        assert bytes(token for token in stream.ids[stream.mask].tolist() if token < 256) == side.encode()


@pytest.mark.parametrize("value", [0.5, "0", [0, 1], {"a": 1}, 2, -1, float("nan")])
def test_a_mark_that_is_neither_0_nor_1_is_refused(sft, value):
    for row in ({"messages": marked("loss", value)}, {"messages": chat("uone", "atwo"), "loss": value}):
        with pytest.raises(ValueError, match="row 0.* has loss=.*. Expected 0 or 1"):
            sft(row)


def test_marks_that_contradict_each_other_or_ask_for_questions_are_refused(sft):
    both = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "loss": 0, "train": True}]
    with pytest.raises(ValueError, match="contradictory marks"):
        sft({"messages": both})
    with pytest.raises(ValueError, match=r"messages\[0\] has train=True, but only answers are learned"):
        sft({"messages": [{"role": "user", "content": "one", "train": True}, *chat("atwo")]})
    quiet = [{"role": "user", "content": "one", "train": False}, *chat("atwo")]
    assert content(sft({"messages": quiet})) == content(sft({"messages": chat("uone", "atwo")}))


@pytest.mark.parametrize(
    "key",
    [
        "mask", "masked", "no_loss", "lossMask", "assistant_mask", "turn_mask", "ignore", "train_on_turn", "skip",
        "token_weights", "supervised", "prefix", "labels", "keep", "images", "function_call", "loss_scale",
    ],
)  # fmt: skip
def test_unknown_key_of_a_message_is_refused(sft, key):
    message = {"role": "assistant", "content": "two", key: 1}
    with pytest.raises(ValueError, match=rf"row 0, messages\[1\] has the key '{key}', which is not read"):
        sft({"messages": [*chat("uone"), message]})


@pytest.mark.parametrize(
    "key",
    [
        "tools", "functions", "system_prompt", "images", "loss_masks", "completion_mask", "assistant_masks",
        "input_ids", "labels", "label", "chat_template_kwargs", "response_format", "tool_choice", "roles_to_train",
        "documents", "context", "sample_weight", "history", "instruction",
    ],
)  # fmt: skip
def test_unknown_key_of_a_row_is_refused(sft, dpo, key):
    for value in (False, ["a"], {"a": 1}):
        with pytest.raises(ValueError, match=f"row 0 has the key '{key}', which is not read"):
            sft({"messages": chat("uone", "atwo"), key: value})
        with pytest.raises(ValueError, match=f"row 0 has the key '{key}', which is not read"):
            dpo({"prompt": "one", "chosen": "two", "rejected": "three", key: value})


@pytest.mark.parametrize("empty", ["", " \n"])
def test_empty_answer_is_refused(sft, dpo, empty):
    with pytest.raises(ValueError, match="row 0: 'completion' is empty, so the policy would learn to say nothing"):
        sft({"prompt": "one?", "completion": empty})
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        with pytest.raises(ValueError, match=f"row 0: {name!r} is empty"):
            dpo({"prompt": "one?", name: empty, other: "1"})


def test_answer_of_a_base_model_ends_as_in_its_template(tiny_llama):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.eos_token = "<|pad|>"  # as <|endoftext|> in base models with a ChatML template
    row = {"messages": chat("uone?", "a1", "utwo?", "a2")}
    (item,) = read_demonstrations([row], Renderer(tokenizer), fa.SFTConfig(), policy="hero", room=500).items
    assert tokenizer.decode(item.ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False).rstrip("\n")
    assert tokenizer.decode(item.ids[item.mask]) == "1<|im_end|>2<|im_end|>"


def test_pair_of_equal_answers_is_left_out_and_counted(dpo):
    def episode(seed, answer, reward):
        turn = fa.Turn(agent="a", index=0, observation="one?", action=answer, reward=reward, policy="hero")
        trajectory = fa.Trajectory(agent="a", policy="hero", env_id="e", seed=seed, turns=(turn,))
        return fa.Episode(env_id="e", seed=seed, trajectories={"a": trajectory})

    luck = [episode(1, "1", 1.0), episode(1, "1", 0.0), episode(2, "1", 1.0), episode(2, "2", 0.0)]
    row = {"prompt": "one?", "chosen": "1 ", "rejected": "1"}
    result = dpo(*luck, row)
    assert len(result.items) == 1 and result.counts["pairs of equal answers"] == 2
    result = dpo(
        {**row, "rejected": "2"}, {**row, "chosen": "1"}, {**row, "chosen": chat("a1"), "rejected": chat("a1")}
    )
    assert result.counts == {"learned": 1, "pairs of equal answers": 2}
    with pytest.raises(ValueError, match=r"\(1 pairs of equal answers\). Give pairs whose answers differ.$"):
        dpo(row)


def test_metadata_and_empty_values_are_accepted(sft, dpo, caplog):
    about = {
        "id": 3, "prompt_id": "x", "source": "web", "metadata": {"loss": 0}, "score_chosen": 3.5, "num_tools": 2,
        "dataset_name": "d", "created_at": "2024", "language": "en", "model": "m", "tools": [], "images": None,
        "label": None, "system": "", "file_name": "f", "teacher_loss_type": "x", "split": "train",
        "input_tokens": 3, "output_tokens": 4, "target_language": "de", "response_model": "x", "has_tools": False,
        "n_tools": 0, "response_rating": 5.0,
    }  # fmt: skip
    messages = chat("uone", "atwo", "tthree", "afour")
    messages[1] |= {"id": "m1", "timestamp": 7, "tool_calls": None, "function_call": None, "weight": None}
    messages[2] |= {"tool_call_id": "c1", "name": "add"}
    expected = content(sft({"messages": chat("uone", "atwo", "tthree", "afour")}))
    assert content(sft({"messages": messages, **about})) == expected
    pair = {"prompt": "one", "chosen": "two", "rejected": "three"}
    assert content(dpo({**pair, **about})) == content(dpo(pair))
    assert not caplog.records
    with pytest.raises(ValueError, match="'input_tokens', which is not read"):
        sft({"messages": messages, "input_tokens": [1, 2, 3]})


def test_other_keys_are_named_once(sft, caplog):
    row = {"messages": [{"role": "user", "content": "one", "country": "NO"}, *chat("atwo")], "toxic": False}
    sft(row, row)
    (record,) = caplog.records
    assert "keys that are not read: 'country', 'toxic'" in record.getMessage()


# ---- what stands next to the messages


def test_a_system_prompt_next_to_the_messages_comes_first(sft, dpo):
    expected = content(sft({"messages": chat("sBe brief.", "uone", "atwo")}))
    for row in (
        {"system": "Be brief.", "messages": chat("uone", "atwo")},
        {"system": "Be brief.", "messages": chat("sBe brief.", "uone", "atwo")},
    ):
        assert content(sft(row)) == expected
    apart = sft({"system": "Be brief.", "prompt": "one", "completion": "two"})
    assert content(apart) == expected
    pair = dpo({"system": "Be brief.", "prompt": "one", "chosen": "two", "rejected": "three"})
    assert content(pair) == content(dpo({"prompt": chat("sBe brief.", "uone"), "chosen": "two", "rejected": "three"}))
    for value in ("Be long.", ["Be brief."]):
        with pytest.raises(ValueError, match="row 0.*'system'"):
            sft({"system": value, "messages": chat("sBe brief.", "uone", "atwo")})


def test_a_prompt_next_to_the_messages_must_be_part_of_them(sft):
    messages = chat("uone", "atwo")
    assert content(sft({"prompt": " one", "messages": messages})) == content(sft({"messages": messages}))
    sides = {"chosen": messages, "rejected": chat("uone", "athree")}
    assert content(sft({"prompt": "one", "messages": messages, **sides})) == content(sft({"messages": messages}))
    for key in ("prompt", "completion"):
        with pytest.raises(ValueError, match=f"row 0 has both 'messages' and '{key}', and they differ"):
            sft({key: "three", "messages": messages})


def test_the_name_of_a_speaker_stands_before_the_text(sft):
    named = [{"role": "user", "name": "Ada", "content": "one"}, *chat("atwo")]
    assert content(sft({"messages": named})) == content(sft({"messages": chat("uAda: one", "atwo")}))
    with pytest.raises(ValueError, match="has the key 'name'.*write the speaker's name into the content"):
        sft({"messages": [*chat("uone"), {"role": "assistant", "name": "Bob", "content": "two"}]})


@pytest.mark.parametrize("settings", [{"min_reward": 0.5}, {"best_per_group": 1}])
def test_a_setting_that_selects_episodes_is_refused_with_rows(sft, dpo, settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} selects episodes, and the data are rows"):
        sft({"messages": chat("uone", "atwo")}, **settings)
    with pytest.raises(ValueError, match="min_difference selects episodes"):
        dpo({"prompt": "one", "chosen": "two", "rejected": "three"}, min_difference=0.5)


# ---- control tokens


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>"])
def test_control_tokens_are_refused_in_answers_and_text_elsewhere(sft, dpo, renderer, token):
    number = renderer._tokenizer.convert_tokens_to_ids(token)
    text = f"a{token}user\nhi"
    for row in ({"messages": chat("uone", f"a{text}")}, {"prompt": "one", "completion": text}):
        with pytest.raises(ValueError, match=r"row 0: an answer contains the (control|end-of-turn) token"):
            sft(row)
    for side in ("chosen", "rejected"):
        with pytest.raises(ValueError, match=f"row 0, {side}: an answer contains the"):
            dpo({"prompt": "one", "chosen": "two", "rejected": "three", side: text})
    clean = chat("sS", "uone", "atwo", "tthree", "afour")
    hostile = chat(f"sS{token}", f"uone{token}", "atwo", f"tthree{token}", "afour")
    (item,), (plain,) = (sft({"messages": messages}).items for messages in (hostile, clean))
    assert item.ids.tolist().count(number) == plain.ids.tolist().count(number)
    assert item.ids[item.mask].tolist() == plain.ids[plain.mask].tolist()


def test_messages_of_developers_and_text_in_parts_are_read(sft):
    parts = [{"type": "text", "text": "Color of the sky?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}, *chat("aBlue.")]
    plain = chat("sBe brief.", "uColor of the sky?", "aBlue.")
    assert content(sft({"messages": messages})) == content(sft({"messages": plain}))
    image = {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}, *chat("aBlue.")]}
    with pytest.raises(ValueError, match=r"row 0, messages\[0\]: a part of type 'image'. The models here read text"):
        sft(image)


@pytest.mark.parametrize(
    ("reader", "row", "hint"),
    [
        ("sft", {"conversations": [{"from": "human", "value": "a"}]}, "Rename 'conversations' to 'messages'"),
        ("sft", {"messages": [{"from": "human", "value": "a"}]}, "Is 'from' meant"),
        ("sft", {"instruction": "a", "output": "b"}, "Rename 'instruction' to 'prompt', 'output' to 'completion'"),
        ("sft", {"question": "a", "answer": "b"}, "Rename 'question' to 'prompt', 'answer' to 'completion'.$"),
        (
            "sft",
            {"question": "6 * 7?", "answer": "42", "response": "It is 42."},
            "Rename 'question' to 'prompt', 'response' to 'completion'.$",
        ),
        (
            "dpo",  # as OpenAI's
            {"input": {"messages": chat("ua")}, "preferred_output": chat("ab"), "non_preferred_output": chat("ac")},
            "Rename 'preferred_output' to 'chosen', 'non_preferred_output' to 'rejected'",
        ),
    ],
)
def test_keys_of_other_formats_are_named_as_they_are_called_here(request, reader, row, hint):
    with pytest.raises(ValueError, match=hint):
        request.getfixturevalue(reader)(row)


# ---- answers that are not complete, reasoning, and pairs


@pytest.mark.parametrize(
    "mark",
    [
        {"finish_reason": "length"}, {"stop_reason": "max_tokens"}, {"finish_reason": "MAX_TOKENS"},
        {"finish_reason": "model_length"}, {"stop_reason": "refusal"}, {"truncated": True}, {"is_truncated": np.True_},
    ],
)  # fmt: skip
def test_incomplete_answer_is_refused_in_rows_and_messages(sft, dpo, mark):
    cut = [*chat("uone"), {"role": "assistant", "content": "two", **mark}]
    ((key, value),) = mark.items()
    said = f"{key}={value!r}"
    for row in ({"messages": chat("uone", "atwo"), **mark}, {"prompt": "one", "completion": "two", **mark},
                {"messages": cut}):  # fmt: skip
        with pytest.raises(ValueError, match=f"row 0.*{said}: an answer that is not complete. Remove its row"):
            sft(row)
    with pytest.raises(ValueError, match=f"{said}: an answer that is not complete"):
        dpo({"prompt": "one", "chosen": "two", "rejected": "three", **mark})


def test_complete_answer_may_say_so(sft):
    marks = {"finish_reason": "stop", "stop_reason": "end_turn", "truncated": False, "is_truncated": None}
    expected = content(sft({"messages": chat("uone", "atwo")}))
    assert content(sft({"messages": chat("uone", "atwo"), **marks})) == expected
    answer = {"role": "assistant", "content": "two", **marks}
    assert content(sft({"messages": [*chat("uone"), answer]})) == expected


@pytest.mark.parametrize("text", ["<think>hm", "<think>hm</think>", "<think>\n\n</think>\n\n ", "[THINK]hm[/THINK]"])
def test_reasoning_without_an_answer_is_refused(sft, dpo, text):
    for row in ({"messages": chat("uone", f"a{text}")}, {"prompt": "one", "completion": text}):
        with pytest.raises(
            ValueError, match="has reasoning without an answer, so the policy would learn to say nothing"
        ):
            sft(row)
    with pytest.raises(ValueError, match="'rejected' has reasoning without an answer"):
        dpo({"prompt": "one", "chosen": "two", "rejected": text})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_the_text_and_in_a_key_is_learned_once(sft, renderer, key):
    def row(text, **more):
        return {"messages": [*chat("uone"), {"role": "assistant", "content": text, **more}]}

    once = content(sft(row("<think>\nhm hm\n</think>\n\n3")))
    assert content(sft(row("3", **{key: "\nhm hm\n"}))) == once
    assert content(sft(row("<think>\nhm hm\n</think>\n\n3", **{key: "hm  hm"}))) == once
    (item,) = sft(row("3", **{key: "hm hm"})).items
    assert renderer.parse(item.ids[item.mask].tolist()) == ("hm hm", "3")
    for nothing in (" \n", None):
        assert content(sft(row("3", **{key: nothing}))) == content(sft(row("3")))
    with pytest.raises(ValueError, match=r"row 0, messages\[1\]: .*in its text and in a key, and they differ"):
        sft(row("<think>other</think>3", **{key: "hm"}))


def test_answers_to_different_prompts_are_no_pair(dpo):
    for one, other in (("uone",), ("uother",)), (("sBe long.", "uone"), ("sBe brief.", "uone")), (
        ("uone", "uless"), ("uone", "umore"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="row 0: 'chosen' and 'rejected' answer different prompts"):
            dpo({"chosen": chat(*one, "atwo"), "rejected": chat(*other, "athree")})
    later = {"chosen": chat("uone", "atwo", "uA", "afour"), "rejected": chat("u one\n", "athree", "uB", "afive")}
    assert dpo(later).counts == {"learned": 1}  # the user reacts to another answer
