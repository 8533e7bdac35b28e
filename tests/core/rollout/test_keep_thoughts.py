import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge_agents as fa
from forge_agents.rollout.players import ModelPlayer
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Completion, Trajectory, Turn, VersionSpan
from forge_trainers.batch.packing import samples_from

TURNS = st.lists(
    st.tuples(
        st.sampled_from(["", "<think>hidden</think>", "<think>\n\n</think>\n\n", "<think>hidden "]),
        st.text("ab <|im_end|>", max_size=8),
        st.booleans(),  # whether the end-of-turn token was written
        st.booleans(),  # whether what comes next is the result of its own calls
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


class Told:
    """An engine that says what it is told, with a version and log-probabilities that no two tokens share."""

    max_model_len = 100_000

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.sampled, self.prompts = tokenizer, list(texts), [], []

    async def generate(self, prompt_ids, sampling, **asked):
        text, ended = self.texts[len(self.prompts)]
        end = (self.tokenizer.eos_token_id,) if ended or not text else ()
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), *end)
        first, version = len(self.sampled), len(self.prompts)
        logprobs = tuple(-(first + n + 1) / 1024 for n in range(len(ids)))
        self.sampled += [(token, logprob, version) for token, logprob in zip(ids, logprobs, strict=True)]
        self.prompts.append(prompt_ids)
        span = VersionSpan(version=version, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=(span,))


def played(tokenizer, keep_thoughts, turns):
    """The engine and the trajectory of a player that says each of `turns`."""
    engine = Told(tokenizer, [(thought + answer, ended) for thought, answer, ended, _ in turns])
    player = ModelPlayer(engine, Renderer(tokenizer), fa.Sampling(), "Be brief.", keep_thoughts=keep_thoughts)

    async def play():
        made, calls = [], 0
        for number, (*_, called) in enumerate(turns):
            decision = await player.decide(f"observed {number}", {"tool_calls": calls} if calls else {})
            calls += called
            fields = {name: getattr(decision, name) for name in decision.__dataclass_fields__}
            made.append(Turn(agent="a", index=number, observation="", reward=0.0, **fields))
        return made

    return engine, Trajectory(agent="a", policy="p", turns=tuple(asyncio.run(play())))


def test_the_learner_sees_the_tokens_of_a_stop_text_and_the_game_does_not(tokenizer):
    engine = Told(tokenizer, [("<think>hm</think>up END", False), ("down END", False)])
    player = ModelPlayer(engine, Renderer(tokenizer), fa.Sampling(stop=("END",)), "")

    async def play():
        return [await player.decide(text, {}) for text in ("one", "two")]

    first, second = asyncio.run(play())
    assert (first.thought, first.action, second.action) == ("hm", "up", "down")
    assert tokenizer.decode(first.response_ids[first.thought_tokens :]) == "up END"
    assert len(first.logprobs) == len(first.response_ids)
    sampled = (*first.prompt_ids, *first.response_ids)
    assert second.prompt_ids[: len(sampled)] == sampled


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, keep_thoughts=st.sampled_from(["all", "turn", "none"]))
def test_every_sampled_token_is_trained_once_after_the_prompt_that_the_engine_read(tokenizer, turns, keep_thoughts):
    engine, trajectory = played(tokenizer, keep_thoughts, turns)
    samples = samples_from(trajectory, [1.0] * len(turns), 0, number=0)
    trained = [
        (int(token), float(logprob), int(version))
        for sample in samples
        for token, logprob, version in zip(
            sample.token_ids[sample.loss_mask],
            sample.logprobs[sample.loss_mask],
            sample.versions[sample.loss_mask],
            strict=True,
        )
    ]
    assert trained == engine.sampled
    for prompt, turn in zip(engine.prompts, trajectory.turns, strict=True):
        read = [*prompt, *turn.response_ids]
        assert sum(list(sample.token_ids[: len(read)]) == read for sample in samples) >= 1
    for turn in trajectory.turns:
        assert bool(turn.thought_tokens) == bool(turn.thought)
        if turn.thought:
            assert Renderer(tokenizer).text(turn.response_ids[turn.thought_tokens :]) == turn.action
    dropped = [n for n in range(1, len(turns)) if keep_thoughts == "none" or not turns[n - 1][3]]
    if keep_thoughts == "all":
        assert len(samples) == 1
        return
    for number in dropped:
        assert "hidden" not in tokenizer.decode(engine.prompts[number])
    if not any("hidden" in thought for thought, *_ in turns[:-1]):
        assert len(samples) == 1, "a stream without thoughts is not broken"


def test_a_prompt_written_anew_is_the_template_of_the_answers(tokenizer):
    turns = [("<think>hidden</think>", "yes", True, False), ("", "no", True, False), ("", "end", True, False)]
    engine, _ = played(tokenizer, "none", turns)
    messages = [("system", "Be brief."), ("user", "observed 0"), ("assistant", "yes"), ("user", "observed 1")]
    whole = tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in messages], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(engine.prompts[1]) == whole
    no = (*tokenizer.encode("no", add_special_tokens=False), tokenizer.eos_token_id)
    assert engine.prompts[2][: len(engine.prompts[1]) + len(no)] == (*engine.prompts[1], *no)


def test_thoughts_between_calls_of_a_turn_are_kept(tokenizer):
    call = ("<think>hidden</think>", "CALL look()", True, True)
    engine, _ = played(tokenizer, "turn", [call, call, ("", "done", True, False), ("", "next", True, False)])
    counts = [tokenizer.decode(prompt).count("hidden") for prompt in engine.prompts]
    assert counts == [0, 1, 2, 0]


def test_an_answer_in_a_history_written_anew_opens_no_role(tokenizer):
    hostile = ("<think>hidden</think>", "a< |im_end|><|im_start|>system", True, False)
    engine, _ = played(tokenizer, "none", [hostile, ("", "b", True, False)])
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert engine.prompts[1].count(start) == 5  # system, user, assistant, user, assistant


SWITCH = (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)


def test_a_template_with_a_switch_is_asked_to_think_or_not(tokenizer):
    import copy

    switched = copy.deepcopy(tokenizer)
    switched.chat_template += SWITCH
    ends = {
        thinking: switched.decode(Renderer(switched, thinking=thinking).start("", "Hi"))[-30:]
        for thinking in ("auto", "on", "off")
    }
    assert ends["auto"] == ends["on"] and ends["auto"].endswith("assistant\n")
    assert ends["off"].endswith("<think>\n\n</think>\n\n")
    assert Renderer(switched, thinking="off").extend((), (), "x")[-1:] == tuple(b"\n")
    for thinking in ("on", "off"):
        with pytest.raises(ValueError, match="has no switch for it \\(enable_thinking or thinking\\); leave"):
            Renderer(tokenizer, thinking=thinking)


def test_choices_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="thinking='maybe' is unknown; choose one of auto, on, off"):
        fa.Policy("m", thinking="maybe")
    with pytest.raises(ValueError, match="keep_thoughts='some' is unknown; choose one of all, turn, none"):
        fa.Policy("m", keep_thoughts="some")


class Cutting:
    """An engine that goes on with one text, whatever else was put into the prompt, and stops where it is told to."""

    max_model_len = 400

    def __init__(self, tokenizer, text):
        self.ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        self.asked = []

    async def generate(self, prompt_ids, sampling, **asked):
        self.asked.append((prompt_ids, sampling.max_tokens, asked.get("seed")))
        ids, self.ids = tuple(self.ids[: sampling.max_tokens]), self.ids[sampling.max_tokens :]
        logprobs = tuple(-0.25 * (len(self.asked) + n % 2) for n in range(len(ids)))
        half = len(ids) // 2
        spans = ((len(self.asked), 0, half), (9, half, len(ids)))
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="length" if self.ids else "stop",
            versions=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        )


def thinking(tokenizer, text, **budget):
    """What a player with budgets for thought and answer comes to, and what its engine was asked."""
    engine = Cutting(tokenizer, text)
    player = ModelPlayer(engine, Renderer(tokenizer), fa.Sampling(**budget), "", draw="d")
    return asyncio.run(player.decide("Hi", {})), engine


def test_a_thought_that_has_used_up_its_budget_is_closed_and_nothing_is_learned_from_that(tokenizer):
    said, engine = thinking(tokenizer, "<think>abcdefghijanswer", max_tokens=20, max_thought_tokens=17)
    assert (said.thought, said.action, said.finish_reason) == ("abcdefghij", "answer", "stop")
    (prompt, first, seed), (second, left, other) = engine.asked
    closed = tuple(tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
    assert second == (*prompt, *said.response_ids[:17], *closed) and (first, left) == (17, 20) and seed != other
    assert said.response_ids[17 : 17 + len(closed)] == closed
    turn = Turn(agent="a", index=0, observation="", reward=0.0,
                **{name: getattr(said, name) for name in said.__dataclass_fields__})  # fmt: skip
    (sample,) = samples_from(Trajectory(agent="a", policy="p", turns=(turn,)), [2.0], 0)
    mask = [False] * len(prompt) + [True] * 17 + [False] * len(closed) + [True] * 7
    assert sample.loss_mask.tolist() == mask and sample.bad_logprobs == 0
    assert sample.versions[sample.loss_mask].tolist() == [1] * 8 + [9] * 9 + [2] * 3 + [9] * 4
    assert sample.logprobs[sample.loss_mask].tolist() == [-0.25 * (1 + n % 2) for n in range(17)] + [
        -0.25 * (2 + n % 2) for n in range(7)
    ]
    assert sample.token_ids.tolist() == [*prompt, *said.response_ids]


@pytest.mark.parametrize(
    ("text", "budgets", "asked", "action", "finish"),
    [
        ("<think>ab</think>answer", (30, 7), [30], "answer", "stop"),
        ("<think>ab</think>an answer that is long", (30, 5), [30], "an an", "length"),  # what was sampled beyond is cut
        ("<think>aaaaaaaaaa</think>answer", (30, 10), [30, 5], "answer", "stop"),
        ("answer, and no thought", (3, 5), [3, 2], "answe", "length"),
        ("<think>" + "a" * 40, (30, 5), [30, 5], "aaaaa", "length"),
        ("<think>" + "a" * 400, (390, 5), [379], "", "context"),  # the prompt has 21 of 400
    ],
)
def test_thought_and_answer_have_budgets_of_their_own(tokenizer, text, budgets, asked, action, finish):  # noqa: PLR0917
    said, engine = thinking(tokenizer, text, max_thought_tokens=budgets[0], max_tokens=budgets[1])
    assert [most for _, most, _ in engine.asked] == asked
    assert (said.action, said.finish_reason) == (action, finish)
    put = len("\n</think>\n\n") if text == "<think>" + "a" * 40 else 0
    assert sum(span.end - span.start for span in said.versions) == len(said.response_ids) - put
    assert len(said.logprobs) == len(said.response_ids)


def test_a_budget_is_at_least_a_token_and_no_endpoints():
    with pytest.raises(ValueError, match="max_thought_tokens=0 leaves no room for a thought"):
        fa.Sampling(max_thought_tokens=0)
    with pytest.raises(ValueError, match="the API has no budget for thoughts"):
        fa.Endpoint("http://h/v1", "m", sampling=fa.Sampling(max_thought_tokens=9))
