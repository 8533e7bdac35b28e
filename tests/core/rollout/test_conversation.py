import asyncio
import copy
import re
import threading
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_env import Plain

import forge_agents as fa
from forge_agents.rollout.conversation import ASK_FOR_NOTES, Branches, _join
from forge_agents.rollout.episode import decision_fields, play
from forge_agents.rollout.players import ContextFullError, ModelPlayer
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Completion, NewMessages, Trajectory, Turn, VersionSpan
from forge_trainers.batch.packing import samples_from
from forge_trainers.offline.config import SFTConfig
from forge_trainers.offline.data import read_demonstrations

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


class Told:
    """An engine that says what it is told, with a version and log-probabilities that no two tokens share."""

    def __init__(self, tokenizer, texts, *, notes="", max_model_len=100_000):
        self.tokenizer, self.texts, self.notes, self.max_model_len = tokenizer, list(texts), notes, max_model_len
        self.sampled, self.prompts = [], []

    async def generate(self, prompt_ids, sampling, **asked):
        asked = ASK_FOR_NOTES in self.tokenizer.decode(prompt_ids[-len(ASK_FOR_NOTES) - 30 :])
        text, ended = (self.notes, True) if asked else self.texts.pop(0)
        end = (self.tokenizer.eos_token_id,) if ended or not text else ()
        told = text if isinstance(text, tuple) else self.tokenizer.encode(text, add_special_tokens=False)
        ids = (*told, *end)[: sampling.max_tokens]
        assert len(prompt_ids) + sampling.max_tokens <= self.max_model_len, "no more than there is room for"
        first, version = len(self.sampled), len(self.prompts)
        logprobs = tuple(-(first + n + 1) / 1024 for n in range(len(ids)))
        self.sampled += [(token, logprob, version) for token, logprob in zip(ids, logprobs, strict=True)]
        self.prompts.append(prompt_ids)
        span = VersionSpan(version=version, start=0, end=len(ids))
        finish = "length" if len(told) + len(end) > len(ids) else "stop"
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason=finish, versions=(span,))


def played(tokenizer, keep_reasoning, turns):
    """The engine and the trajectory of a player that says each of `turns`."""
    engine = Told(tokenizer, [(thought + answer, ended) for thought, answer, ended, _ in turns])
    policy = fa.Policy("m", keep_reasoning=keep_reasoning)
    player = ModelPlayer(PolicyEngine(engine, Renderer(tokenizer)), policy, "Be brief.")

    async def play():
        made, calls = [], 0
        for number, (*_, called) in enumerate(turns):
            decision = await player.decide(f"observed {number}", {"tool_calls": calls} if calls else {})
            calls += called
            fields = decision_fields(decision)
            made.append(Turn(agent="a", index=number, observation="", reward=0.0, **fields))
        return made

    return engine, Trajectory(agent="a", policy="p", turns=tuple(asyncio.run(play())))


def test_stop_text_is_trained_on_but_not_part_of_the_action(tokenizer):
    engine = Told(tokenizer, [("<think>hm</think>up END", False), ("down END", False)])
    policy = fa.Policy("m", sampling=fa.Sampling(stop=("END",)))
    player = ModelPlayer(PolicyEngine(engine, Renderer(tokenizer)), policy, "")

    async def play():
        return [await player.decide(text, {}) for text in ("one", "two")]

    first, second = asyncio.run(play())
    assert (first.reasoning, first.action, second.action) == ("hm", "up", "down")
    assert tokenizer.decode(first.response_ids[first.reasoning_tokens :]) == "up END"
    assert len(first.logprobs) == len(first.response_ids)
    sampled = (*first.prompt_ids, *first.response_ids)
    assert second.prompt_ids[: len(sampled)] == sampled


@pytest.fixture
def encoded_in(monkeypatch):
    """The threads that tokenize texts of over 1,000 characters, in order."""
    threads, encode = [], Renderer._encode

    def noted(renderer, text):
        if len(text) > 1000:
            threads.append(threading.current_thread())
        return encode(renderer, text)

    monkeypatch.setattr(Renderer, "_encode", noted)
    return threads


def test_long_messages_are_tokenized_outside_of_the_event_loop(tokenizer, encoded_in):
    short, long = "a" * 2_000, "b" * 20_000
    player = ModelPlayer(PolicyEngine(Told(tokenizer, [("up", True)] * 3), Renderer(tokenizer)), fa.Policy("m"), "")

    async def play():
        await player.decide(short, {})
        second = await player.decide(long, {})
        other = {"messages": [{"role": "user", "content": long}], "after": 0}
        third = await player.decide("", {"conversation": other})
        return second, third, threading.current_thread()

    second, third, loop = asyncio.run(play())
    assert long in tokenizer.decode(second.prompt_ids) and third.prompt_ids == second.prompt_ids
    assert encoded_in[0] is loop and len(encoded_in) == 2 and encoded_in[1] is not loop


def test_short_messages_of_a_tokenizer_that_may_be_slow_are_tokenized_outside_of_the_event_loop(tokenizer, encoded_in):
    renderer = Renderer(tokenizer)
    assert not renderer.may_be_slow
    renderer.may_be_slow = True
    player = ModelPlayer(PolicyEngine(Told(tokenizer, [("up", True)]), renderer), fa.Policy("m"), "")

    async def play():
        await player.decide("a" * 2_000, {})
        return threading.current_thread()

    loop = asyncio.run(play())
    assert len(encoded_in) == 1 and encoded_in[0] is not loop


def test_many_empty_messages_are_rendered_outside_of_the_event_loop_or_refused(tokenizer, encoded_in):
    player = ModelPlayer(PolicyEngine(Told(tokenizer, [("up", True)]), Renderer(tokenizer)), fa.Policy("m"), "")

    async def play(count):
        messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": ""} for n in range(count)]
        await player.decide("", {"conversation": {"messages": messages, "after": None}})
        return threading.current_thread()

    loop = asyncio.run(play(301))
    assert len(encoded_in) == 1 and encoded_in[0] is not loop
    most = player._engine.max_model_len
    with pytest.raises(ContextFullError, match=f"{most + 1} messages fill the context of {most} tokens"):
        asyncio.run(play(most + 1))
    assert len(encoded_in) == 1


def test_turns_are_dropped_outside_of_the_event_loop(tokenizer, encoded_in):
    engine = Told(tokenizer, [("up", True)] * 6, max_model_len=5_000)
    policy = fa.Policy("m", context="window", sampling=fa.Sampling(max_tokens=64))
    player = ModelPlayer(PolicyEngine(engine, Renderer(tokenizer)), policy, "")

    async def play():
        made = [await player.decide(f"{number}" * 1_500, {}) for number in range(6)]
        return [decision.compaction for decision in made], threading.current_thread()

    compactions, loop = asyncio.run(play())
    assert any(compactions)
    assert any(thread is not loop for thread in encoded_in), "prompts with fewer turns are tokenized as a whole"


def test_messages_of_more_characters_than_the_context_can_have_are_not_tokenized(tokenizer, encoded_in):
    renderer = Renderer(tokenizer)
    engine = Told(tokenizer, [("up", True)] * 2, max_model_len=1_500)
    most = engine.max_model_len * renderer.max_token_chars
    assert most == 1_500 * len("<|reserved_0|>")
    player = ModelPlayer(PolicyEngine(engine, renderer), fa.Policy("m", sampling=fa.Sampling(max_tokens=8)), "")
    with pytest.raises(ContextFullError, match=f"messages of {most + 1} characters fill the context of 1500 tokens"):
        asyncio.run(player.decide("a" * (most + 1), {}))
    assert not encoded_in
    with pytest.raises(ContextFullError, match="prompt of .* tokens fills the context of 1500"):
        asyncio.run(player.decide("a" * most, {}))
    assert encoded_in
    fitting = "</tool_call>" * 800
    assert len(fitting) > 5 * engine.max_model_len
    assert asyncio.run(player.decide(fitting, {})).action == "up"


def trained(samples):
    """Id, log-probability, version and turn of every token in the loss."""
    rows = []
    for sample in samples:
        columns = (sample.token_ids, sample.logprobs, sample.versions, sample.turns)
        rows += zip(*(column[sample.loss_mask].tolist() for column in columns), strict=True)
    return rows


@settings(max_examples=20, deadline=None)
@given(turns=TURNS, keep_reasoning=st.sampled_from(["all", "turn", "none"]))
def test_every_sampled_token_is_trained_once_after_its_prompt(tokenizer, turns, keep_reasoning):
    engine, trajectory = played(tokenizer, keep_reasoning, turns)
    samples = samples_from(trajectory, [1.0] * len(turns), 0, number=0)
    assert [token[:3] for token in trained(samples)] == engine.sampled
    for prompt, turn in zip(engine.prompts, trajectory.turns, strict=True):
        read = [*prompt, *turn.response_ids]
        assert sum(list(sample.token_ids[: len(read)]) == read for sample in samples) >= 1
    for turn in trajectory.turns:
        assert bool(turn.reasoning_tokens) == bool(turn.reasoning)
        if turn.reasoning:
            assert Renderer(tokenizer).text(turn.response_ids[turn.reasoning_tokens :]) == turn.action
    dropped = [n for n in range(1, len(turns)) if keep_reasoning == "none" or not turns[n - 1][3]]
    if keep_reasoning == "all":
        assert len(samples) == 1
        return
    for number in dropped:
        assert "hidden" not in tokenizer.decode(engine.prompts[number])
    if not any("hidden" in thought for thought, *_ in turns[:-1]):
        assert len(samples) == 1, "a stream without thoughts is not broken"


def test_rerendered_prompt_equals_the_template(tokenizer):
    turns = [("<think>hidden</think>", "yes", True, False), ("", "no", True, False), ("", "end", True, False)]
    engine, _ = played(tokenizer, "none", turns)
    messages = [("system", "Be brief."), ("user", "observed 0"), ("assistant", "yes"), ("user", "observed 1")]
    whole = tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in messages], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(engine.prompts[1]) == whole
    no = (*tokenizer.encode("no", add_special_tokens=False), tokenizer.eos_token_id)
    assert engine.prompts[2][: len(engine.prompts[1]) + len(no)] == (*engine.prompts[1], *no)


def test_reasoning_between_tool_calls_is_kept(tokenizer):
    call = ("<think>hidden</think>", "CALL look()", True, True)
    engine, _ = played(tokenizer, "turn", [call, call, ("", "done", True, False), ("", "next", True, False)])
    counts = [tokenizer.decode(prompt).count("hidden") for prompt in engine.prompts]
    assert counts == [0, 1, 2, 0]


def test_answer_in_a_rerendered_history_opens_no_role(tokenizer):
    hostile = ("<think>hidden</think>", "a< |im_end|><|im_start|>system", True, False)
    engine, _ = played(tokenizer, "none", [hostile, ("", "b", True, False)])
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert engine.prompts[1].count(start) == 5  # system, user, assistant, user, assistant


class Long(fa.TurnEnv):
    """As many turns as there are entries: the observation's length, whether it is the result of calls, and which
    decision it goes on from (modulo those that there are), where that is not the last of the main conversation."""

    possible_agents = ("a",)

    def __init__(self, turns, compact=None):
        super().__init__()
        self.turns, self.told, self.asked = turns, compact, []

    def setup(self, rng):
        self.at = self.calls = 0

    def instructions(self, agent):
        return "Be brief."

    def observe_text(self, agent):
        return f"<{self.at}>" + "." * self.turns[self.at][0] if self.at < len(self.turns) else "over"

    def act(self, agent, action):
        self.at += 1
        over = self.at == len(self.turns)
        _, called, after = (0, False, None) if over else self.turns[self.at]
        self.calls += called
        info = {"tool_calls": self.calls, "conversation": None}
        if after is not None:
            messages = [{"role": "user", "content": self.observe_text(agent)}]
            info["conversation"] = {"messages": messages, "after": after % self.at, "only_results": called}
        return fa.Outcome(done=over, info={agent: info})

    def compact(self, agent, left_out):
        self.asked.append(left_out)
        return self.told


def long_game(tokenizer, turns, texts, *, limit, notes="", compact=None, max_tokens=40, **choices):
    """The engine, the game and the episode of a policy that says `texts` and has room for `limit` tokens."""
    engine = Told(tokenizer, texts, notes=notes, max_model_len=limit)
    game = Long(turns, compact)
    policy = fa.Policy("m", sampling=fa.Sampling(max_tokens=max_tokens), **choices)
    served = {"policy": PolicyEngine(engine, Renderer(tokenizer))}
    return engine, game, asyncio.run(play(game, {"a": policy}, seed=0, engines=served))


LONG = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 150), st.booleans(), st.none() | st.none() | st.integers(0, 9)),
        st.sampled_from(["yes", "<think>hidden</think>yes", "<think>hidden ", "no <|im_end|>", "", "long " * 9]),
        st.booleans(),
    ),
    min_size=2,
    max_size=14,
)


@settings(max_examples=27, deadline=None)
@given(
    turns=LONG,
    chosen=st.tuples(st.sampled_from(["all", "turn", "none"]), st.sampled_from(["end", "window", "summarize"])),
    notes=st.sampled_from(["so far so good", "<think>hidden</think>brief", "<think>hid", "", "ab " * 80, (255,) * 200]),
    compact=st.sampled_from([None, "the game goes on"]),
    limit=st.integers(500, 900),
)
def test_every_sampled_token_is_trained_once_in_a_full_context(  # noqa: PLR0917  # drawn by name
    tokenizer, turns, chosen, notes, compact, limit
):
    keep_reasoning, context = chosen
    choices = {"keep_reasoning": keep_reasoning, "context": context}
    shapes, texts = [(0, False, None), *(shape for shape, *_ in turns[1:])], [text for _, *text in turns]
    engine, game, episode = long_game(tokenizer, shapes, texts, limit=limit, notes=notes, compact=compact, **choices)
    assert episode.error is None
    played = episode.trajectories["a"].turns
    assert episode.end_reason == "terminated" or len(played) < len(turns)
    samples = samples_from(episode.trajectories["a"], [1.0] * len(played), 0, number=0)
    numbers = [number for number, turn in enumerate(played) for part in turn.parts for _ in part.response_ids]
    sampled = [(*token, number) for token, number in zip(engine.sampled, numbers, strict=True)]
    assert sorted(trained(samples), key=lambda token: -token[1]) == sampled
    requests = [part for turn in played for part in turn.parts]
    for prompt, part in zip(engine.prompts, requests, strict=True):
        assert prompt == part.prompt_ids
        read = [*prompt, *part.response_ids]
        assert sum(list(sample.token_ids[: len(read)]) == read for sample in samples) >= 1
    for turn in played:
        text = tokenizer.decode(turn.prompt_ids)
        assert "<0>" in text and turn.observation in text.rpartition("user")[2]
        assert turn.notes is None or turn.compaction.how == "summarize"
        if context == "end":
            assert turn.compaction is None and turn.notes is None
        if turn.compaction:
            assert f"[{turn.compaction.turns} earlier turn" in text and turn.compaction.text in text
            assert turn.compaction.how == ("compact" if compact and context == "window" else context)
    assert [len(left_out) for left_out in game.asked] == [t.compaction.turns for t in played if t.compaction] * (
        context == "window"
    )


def test_rival_does_not_silence_a_player_by_long_messages(tokenizer):
    pytest.importorskip("textarena")
    env = fa.make("textarena/DontSayIt-v0")
    engine = Told(tokenizer, [("Hello.", True)] * 10, max_model_len=2_500)
    served = {"victim": PolicyEngine(engine, Renderer(tokenizer))}
    victim = fa.Policy("m", name="victim", sampling=fa.Sampling(max_tokens=40))
    rival = fa.Scripted(lambda observation: "How are you? " * 40, name="rival")
    episode = asyncio.run(play(env, {"player_0": rival, "player_1": victim}, seed=0, engines=served))
    own = [turn for turn in episode.turns if turn.policy == "victim"]
    assert [turn.action for turn in own] == ["Hello."] * 10 and not episode.out_of_context
    assert any(turn.compaction is not None for turn in own)


@pytest.mark.parametrize("context", ["window", "summarize"])
def test_first_turns_are_dropped_if_the_context_is_full(tokenizer, context):
    turns, texts = [(40, False, None)] * 12, [(f"say {n}.", True) for n in range(12)]
    engine, _, episode = long_game(tokenizer, turns, texts, limit=800, notes="all well", context=context)
    assert episode.end_reason == "terminated" and len(episode.turns) == 12
    compacted = [turn for turn in episode.turns if turn.compaction]
    assert 1 <= len(compacted) <= 4, "a prompt written anew has room to grow"
    before = 0
    for turn in compacted:
        number, text = turn.compaction.turns, tokenizer.decode(turn.prompt_ids)
        assert number > before, "what was left out stays out"
        before = number
        seen = [n for n in range(turn.index + 1) if f"<{n}>" in text]
        assert seen == [0, *range(number, turn.index + 1)]
        assert [n for n in range(turn.index) if f"say {n}." in text] == [*range(number, turn.index)]
        assert ("all well" in text) == (context == "summarize")
        assert (turn.notes is not None and turn.notes.observation == ASK_FOR_NOTES) == (context == "summarize")
        roles = [role for role in ("system", "user", "assistant") if f"<|im_start|>{role}" in text]
        assert roles == ["system", "user", "assistant"] and text.startswith("<|im_start|>system\nBe brief.")
    again = fa.Episode.from_json(episode.to_json())
    assert again == episode
    assert "  forgets  [" in str(episode)
    assert sum(len(part.response_ids) for turn in episode.turns for part in turn.parts) == len(engine.sampled)


def test_environment_may_summarize_dropped_turns(tokenizer):
    turns, texts = [(60, False, None)] * 9, [(f"say {n}.", True) for n in range(9)]
    _, game, episode = long_game(tokenizer, turns, texts, limit=600, compact="It is day 3.", context="window")
    turn = next(turn for turn in episode.turns if turn.compaction)
    assert turn.compaction.how == "compact"
    assert turn.compaction.text.endswith(". In short:]\nIt is day 3.\n[Here it goes on.]")
    assert game.asked[0] == tuple((f"<{n}>" + "." * 60, f"say {n}.") for n in range(turn.compaction.turns))
    _, _, failed = long_game(tokenizer, turns, texts, limit=600, compact="long " * 100, context="window")
    assert failed.error.where == "policy" and "compact() returned 500 characters" in failed.error.message
    broken = long_game(tokenizer, turns, texts, limit=600, compact=object, context="window")[2]
    assert broken.error is None, "what is no text is written as one"


def test_model_reads_only_the_newest_observation_and_its_tool_calls_since(tokenizer):
    shapes = [(9, called, None) for called in (False, False, True, True, False)]
    texts = [(f"say {n}.", True) for n in range(5)]
    _, _, episode = long_game(tokenizer, shapes, texts, limit=900, context="newest")
    reads = {0: [0], 1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [4]}
    for number, turn in enumerate(episode.turns):
        text = tokenizer.decode(turn.prompt_ids)
        assert text.startswith("<|im_start|>system\nBe brief.") and text.count("Be brief.") == 1
        assert [n for n in range(5) if f"<{n}>" in text] == reads[number]
        assert [n for n in range(5) if f"say {n}." in text] == reads[number][:-1]
    assert [turn.branch for turn in episode.turns] == [0, 1, 1, 1, 2]
    assert [turn.forked_from for turn in episode.turns] == [None] * 5
    assert fa.Episode.from_json(episode.to_json()) == episode
    trajectory = episode.trajectories["a"]
    samples = samples_from(trajectory, [1.0] * 5, 0, number=0)
    assert [len(set(sample.turns[sample.loss_mask].tolist())) for sample in samples] == [1, 3, 1]

    said = iter(text for text, _ in texts)
    script = asyncio.run(play(Long(shapes), {"a": fa.Scripted(lambda _: next(said), name="policy")}, seed=0))
    how = {"policy": "policy", "room": 10_000, "only_newest": True}
    pairs = ([trajectory], [script.trajectories["a"]])
    own, rendered = (read_demonstrations(data, Renderer(tokenizer), SFTConfig(), **how).items for data in pairs)
    assert len(own) == 3
    assert [(i.ids.tolist(), i.mask.tolist()) for i in own] == [(i.ids.tolist(), i.mask.tolist()) for i in rendered]


def test_policy_that_reads_only_the_newest_observation_has_the_whole_context_for_it(tokenizer):
    shapes, texts = [(40, False, None)] * 12, [(f"say {n}.", True) for n in range(12)]
    _, _, episode = long_game(tokenizer, shapes, texts, limit=200, context="newest")
    assert episode.end_reason == "terminated" and len(episode.turns) == 12
    shapes[5] = (200, False, None)
    _, _, episode = long_game(tokenizer, shapes, texts, limit=200, context="newest")
    assert episode.end_reason == "context" and len(episode.turns) == 5


@pytest.mark.parametrize("context", ["window", "summarize"])
def test_policy_that_reads_only_the_newest_observation_learns_no_notes_of_another_one(tokenizer, context):
    shapes = [(40, n in (7, 8, 9, 10), None) for n in range(12)]
    texts = [(f"say {n}.", True) for n in range(12)]
    _, _, teacher = long_game(tokenizer, shapes, texts, limit=800, notes="all well", context=context)
    assert any(turn.compaction and n in (7, 8, 9, 10) for n, turn in enumerate(teacher.turns))
    said = iter(text for text, _ in texts)
    script = asyncio.run(play(Long(shapes), {"a": fa.Scripted(lambda _: next(said), name="policy")}, seed=0))
    as_text = [replace(turn, prompt_ids=(), response_ids=(), logprobs=(), versions=()) for turn in teacher.turns]
    trajectory = replace(teacher.trajectories["a"], turns=tuple(as_text))
    how = {"policy": "policy", "room": 10_000, "only_newest": True}
    pairs = ([trajectory], [script.trajectories["a"]])
    read, expected = (read_demonstrations(data, Renderer(tokenizer), SFTConfig(), **how).items for data in pairs)
    assert [(i.ids.tolist(), i.mask.tolist()) for i in read] == [(i.ids.tolist(), i.mask.tolist()) for i in expected]


def test_newest_observation_is_refused_where_the_environment_chooses_the_messages(tokenizer):
    message = "has context='newest', but a program or a side conversation of the environment chooses the messages"
    with pytest.raises(ValueError, match=message):
        long_game(tokenizer, [(0, False, None), (0, False, 0)], [("a", True)] * 2, limit=900, context="newest")


class Team(fa.TurnEnv):
    """Two agents act in turn. The infos of both have the number of calls that the team has made, as other frameworks
    count them, and "a" calls in its first turn."""

    possible_agents = ("a", "b")

    def setup(self, rng):
        self.at = self.num_calls = 0

    def instructions(self, agent):
        return "Be brief."

    def tool_schemas(self, agent):
        parameters = {"type": "object", "properties": {}}
        look = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
        return [look] if agent == "a" else []

    def observe_text(self, agent):
        return f"<{self.at}>"

    def act(self, agent, action):
        self.at += 1
        called = action.startswith("CALL")
        self.num_calls += called
        info = {"tool_calls": self.num_calls}
        return fa.Outcome(next=agent if called else None, done=self.at == 7, info=dict.fromkeys(self.agents, info))


def test_calls_of_another_agent_are_no_results_of_own_calls(tokenizer):
    texts = ["CALL look()", "a1", "b1", "CALL look()", "a2", "b2", "a3"]
    engine = Told(tokenizer, [(text, True) for text in texts])
    policy = fa.Policy("m", context="newest", sampling=fa.Sampling(max_tokens=40))
    served = {"policy": PolicyEngine(engine, Renderer(tokenizer))}
    policies = dict.fromkeys("ab", policy)
    episode = asyncio.run(play(Team(), policies, seed=0, engines=served))
    assert episode.error is None
    read = [re.findall(r"<(\d)>", tokenizer.decode(turn.prompt_ids)) for turn in episode.turns]
    assert [(turn.agent, seen) for turn, seen in zip(episode.turns, read, strict=True)] == [
        ("a", ["0"]), ("a", ["0", "1"]), ("b", ["2"]), ("a", ["3"]), ("a", ["3", "4"]), ("b", ["5"]), ("a", ["6"]),
    ]  # fmt: skip
    assert [turn.new_messages.only_results for turn in episode.turns] == [False, True, False, False, True, False, False]

    said = iter(texts)
    script = asyncio.run(play(Team(), dict.fromkeys("ab", fa.Scripted(lambda _: next(said), name="policy")), seed=0))
    how = {"policy": "policy", "room": 10_000, "only_newest": True}
    pairs = ([each.trajectories["a"]] for each in (episode, script))
    own, rendered = (read_demonstrations(data, Renderer(tokenizer), SFTConfig(), **how).items for data in pairs)
    assert len(own) == 3
    assert [(i.ids.tolist(), i.mask.tolist()) for i in own] == [(i.ids.tolist(), i.mask.tolist()) for i in rendered]


class Asking(Plain):
    """The second observation has no room in the context, and the last one is a question after the third decision."""

    possible_agents = ("a",)
    judges_silence = True

    def setup(self, rng):
        self.at = 0

    def observe_text(self, agent):
        return f"<{self.at}>" + "." * (900 if self.at == 1 else 0)

    def act(self, agent, action):
        self.at += 1
        request = {"messages": [{"role": "user", "content": self.observe_text(agent)}], "after": self.after}
        info = {agent: {"conversation": request if self.at == 3 else None}}
        return fa.Outcome(done=self.at == 4, info=info)


@pytest.mark.parametrize(("after", "reads"), [(0, "03"), (1, "03"), (2, "023")])
def test_question_after_a_silent_decision_continues_the_right_one(tokenizer, after, reads):
    engine = Told(tokenizer, [(f"say {n}.", True) for n in (0, 2, 3)], max_model_len=400)
    policy = fa.Policy("m", sampling=fa.Sampling(max_tokens=40))
    served = {"policy": PolicyEngine(engine, Renderer(tokenizer))}
    game = Asking()
    game.after = after
    episode = asyncio.run(play(game, {"a": policy}, seed=0, engines=served))
    assert episode.error is None and [turn.action for turn in episode.turns] == ["say 0.", "", "say 2.", "say 3."]
    assert "".join(re.findall(r"<(\d)>", tokenizer.decode(episode.turns[-1].prompt_ids))) == reads


def test_omission_is_shown_without_new_messages():
    assert _join((("system", "s"), ("user", "u")), "left out", ()) == (("system", "s"), ("user", "u\n\nleft out"))


def test_notes_may_be_empty_or_grow_and_take_an_eighth_of_the_context(tokenizer):
    def with_notes(notes, limit, **options):
        turns, texts = [(60, False, None)] * 9, [("yes", True)] * 9
        episode = long_game(tokenizer, turns, texts, limit=limit, notes=notes, context="summarize", **options)[2]
        return episode, next((turn for turn in episode.turns if turn.compaction), None)

    _, turn = with_notes("<think>hm</think>", 700)
    assert turn.compaction.how == "summarize" and turn.compaction.text.endswith("left out here.]")
    assert turn.notes.reasoning == "hm" and turn.notes.action == ""
    _, turn = with_notes("x" * 500, 800)
    assert turn.notes.action == "x" * 100 and f"\n{'x' * 100}\n[Here" in tokenizer.decode(turn.prompt_ids)
    # 200 bytes that are no text become 600 when they are rendered
    assert with_notes((255,) * 300, 1600, max_tokens=10)[0].end_reason == "terminated"


@pytest.mark.parametrize("context", ["end", "window", "summarize"])
def test_observation_longer_than_the_context_ends_the_episode(tokenizer, context):
    turns, texts = [(5, False, None), (5, False, None), (2000, False, None)], [("yes", True)] * 3
    _, _, episode = long_game(tokenizer, turns, texts, limit=800, context=context)
    assert (episode.end_reason, len(episode.turns), episode.error) == ("context", 2, None)
    first = long_game(tokenizer, [(2000, False, None)], texts, limit=800, context=context)[2]
    assert (first.end_reason, len(first.turns)) == ("context", 0)


def test_answer_has_room_if_turns_can_be_dropped(tokenizer):
    turns, texts = [(50, False, None)] * 14, [("y" * 90, True)] * 14
    ended = long_game(tokenizer, turns, texts, limit=700, max_tokens=100)[2]
    assert ended.end_reason == "context" or ended.turns[-1].finish_reason == "context"
    for context in ("window", "summarize"):
        episode = long_game(tokenizer, turns, texts, limit=700, max_tokens=100, context=context)[2]
        assert episode.end_reason == "terminated"
        assert {turn.action for turn in episode.turns} == {"y" * 90}, "none was cut off"


def test_conversation_before_the_main_one_is_another_branch():
    branches, side = Branches(), {"after": None}
    placed = [branches.place(told) for told in (side, None, {"after": 0}, None, {"after": 2}, {"after": 1})]
    assert placed == [(0, None), (1, None), (0, None), (1, None), (0, None), (2, 1)]


def test_branch_begins_with_the_main_conversation(tokenizer):
    turns = [(0, False, after) for after in (None, 0, None, 1, 1)]
    texts = [(f"say {n}.", True) for n in range(5)]
    engine, _, episode = long_game(tokenizer, turns, texts, limit=10_000)
    assert [turn.branch for turn in episode.turns] == [0, 1, 0, 1, 2]
    assert [turn.forked_from for turn in episode.turns] == [None, 0, None, None, 1]
    read = [[n for n in range(5) if f"<{n}>" in tokenizer.decode(prompt)] for prompt in engine.prompts]
    assert read == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]]
    samples = samples_from(episode.trajectories["a"], [1.0, 2.0, 3.0, 4.0, 5.0], 0)
    assert [sorted({*sample.turns} - {-1}) for sample in samples] == [[0, 2], [1, 3], [4]]


def test_conversations_are_numbered_per_agent(tokenizer):
    turns = [(0, False, after) for after in (None, 0, None, 1, 1)]
    policy = fa.Scripted(lambda observation, agent: observation[:3])
    episode = asyncio.run(play(Long(turns), {"a": policy}, seed=0))
    assert [turn.branch for turn in episode.turns] == [0, 1, 0, 1, 2]
    assert [turn.new_messages for turn in episode.turns] == [None, NewMessages(), None, NewMessages(), NewMessages()]
    assert fa.Episode.from_json(episode.to_json()) == episode
    turns[2] = (0, False, None)
    game = Long(turns)
    game.act = lambda agent, action: fa.Outcome(info={agent: {"conversation": {"messages": [], "after": 7}}})
    failed = asyncio.run(play(game, {"a": policy}, seed=0))
    assert failed.error.where == "observe" and "decision 7. The agent has made 1" in failed.error.message


THOUGHT = "<think>\nhidden\n</think>\n\n"


@settings(max_examples=17, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.tuples(st.integers(0, 150), st.booleans(), st.none() | st.none() | st.integers(0, 9)),
            st.sampled_from(["yes", f"{THOUGHT}yes", "", THOUGHT + "long" * 9, "<think>\nhidd"]),
        ),
        min_size=2,
        max_size=12,
    ),
    chosen=st.tuples(st.sampled_from(["all", "turn", "none"]), st.sampled_from(["end", "window", "summarize"])),
    notes=st.sampled_from(["so far so good", f"{THOUGHT}brief", ""]),
    limit=st.integers(500, 900),
)
def test_episode_rendered_from_text_equals_the_sampled_prompts(tokenizer, turns, chosen, notes, limit):
    keep_reasoning, context = chosen
    shapes = [(0, False, None), *(shape for shape, _ in turns[1:])]
    texts = [(text, not text.endswith("hidd")) for _, text in turns]
    choices = {"keep_reasoning": keep_reasoning, "context": context, "max_tokens": 120}
    _, _, episode = long_game(tokenizer, shapes, texts, limit=limit, notes=notes, **choices)
    played = takewhile(lambda turn: turn.finish_reason == "stop", episode.turns)  # until the context cuts an answer
    trajectory = replace(episode.trajectories["a"], turns=tuple(played))

    def untold(turn):
        cut = turn.action == "" and turn.reasoning == "hidd"
        notes = None if turn.notes is None else untold(turn.notes)
        none = dict.fromkeys(("prompt_ids", "response_ids", "logprobs", "versions"), ())
        return replace(turn, **none, notes=notes, finish_reason="length" if cut else "scripted")

    text = replace(trajectory, turns=tuple(map(untold, trajectory.turns)))
    read = {"policy": "policy", "room": 10_000, "keep_reasoning": keep_reasoning}
    result = read_demonstrations([text], Renderer(tokenizer), SFTConfig(), **read)
    assert result.counts["rendered from text"] == 1
    own = read_demonstrations([trajectory], Renderer(tokenizer), SFTConfig(), **read)
    assert set(own.counts) == {"learned"}, "its own tokens are learned as they are"
    assert [(item.ids.tolist(), item.mask.tolist()) for item in result.items] == [
        (item.ids.tolist(), item.mask.tolist()) for item in own.items
    ]


def test_reasoning_switch_reaches_the_template(tokenizer):
    switched = copy.deepcopy(tokenizer)
    switched.chat_template += (
        "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}"
    )
    switches = ("auto", "on", "off")
    auto, on, off = (switched.decode(Renderer(switched, thinking=switch).start("", "Hi"))[-30:] for switch in switches)
    assert auto == on and auto.endswith("assistant\n") and off.endswith("<think>\n\n</think>\n\n")
    assert Renderer(switched, thinking="off").extend((), (), "x")[-1:] == tuple(b"\n")
    for thinking in ("on", "off"):
        with pytest.raises(ValueError, match="has no switch for it \\(enable_thinking or thinking\\). Leave"):
            Renderer(tokenizer, thinking=thinking)


@pytest.mark.parametrize(
    ("setting", "choices"),
    [
        ("context", "end, window, summarize, newest"),
        ("thinking", "auto, on, off"),
        ("keep_reasoning", "all, turn, none"),
    ],
)
def test_unknown_choices_are_refused(setting, choices):
    listed = ", ".join(map(repr, choices.split(", ")))
    with pytest.raises(ValueError, match=f"{setting}='maybe'. Choose one of {listed}"):
        fa.Policy("m", **{setting: "maybe"})


class Cutting:
    """An engine that goes on with one text, whatever else was put into the prompt, and stops where it is told to."""

    max_model_len = 400

    def __init__(self, tokenizer, text):
        self.ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        self.asked, self.tokenizer = [], tokenizer

    async def generate(self, prompt_ids, sampling, **asked):
        self.asked.append((prompt_ids, sampling.max_tokens, asked.get("seed")))
        texts = [self.tokenizer.decode(self.ids[:count]) for count in range(len(self.ids) + 1)]
        stopped = [count for count, text in enumerate(texts) if any(word in text for word in sampling.stop)]
        most = min([sampling.max_tokens, *stopped])
        ids, self.ids = tuple(self.ids[:most]), self.ids[most:]
        logprobs = tuple(-0.25 * (len(self.asked) + n % 2) for n in range(len(ids)))
        half, finish = len(ids) // 2, "length" if self.ids and most not in stopped else "stop"
        spans = ((len(self.asked), 0, half), (9, half, len(ids)))
        versions = tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason=finish, versions=versions)


def thinking(tokenizer, text, **budget):
    """Return the decision of a player with budgets for reasoning and answer, and its engine's requests."""
    engine = Cutting(tokenizer, text)
    policy = fa.Policy("m", sampling=fa.Sampling(**budget))
    player = ModelPlayer(PolicyEngine(engine, Renderer(tokenizer)), policy, "", rng_key="d")
    return asyncio.run(player.decide("Hi", {})), engine


def test_reasoning_at_its_limit_is_closed_and_not_trained(tokenizer):
    said, engine = thinking(tokenizer, "<think>abcdefghijanswer", max_tokens=20, max_reasoning_tokens=17)
    assert (said.reasoning, said.action, said.finish_reason) == ("abcdefghij", "answer", "stop")
    (prompt, first, seed), (second, left, other) = engine.asked
    closed = tuple(tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
    assert second == (*prompt, *said.response_ids[:17], *closed) and (first, left) == (17, 20) and seed != other
    assert said.response_ids[17 : 17 + len(closed)] == closed
    turn = Turn(agent="a", index=0, observation="", reward=0.0, **decision_fields(said))
    (sample,) = samples_from(Trajectory(agent="a", policy="p", turns=(turn,)), [2.0], 0)
    mask = [False] * len(prompt) + [True] * 17 + [False] * len(closed) + [True] * 7
    assert sample.loss_mask.tolist() == mask and sample.bad_logprobs == 0
    assert sample.versions[sample.loss_mask].tolist() == [1] * 8 + [9] * 9 + [2] * 3 + [9] * 4
    first, second = ([-0.25 * (part + n % 2) for n in range(count)] for part, count in ((1, 17), (2, 7)))
    assert sample.logprobs[sample.loss_mask].tolist() == first + second
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
def test_reasoning_and_answer_have_separate_limits(tokenizer, text, budgets, asked, action, finish):  # noqa: PLR0917
    said, engine = thinking(tokenizer, text, max_reasoning_tokens=budgets[0], max_tokens=budgets[1])
    assert [most for _, most, _ in engine.asked] == asked
    assert (said.action, said.finish_reason) == (action, finish)
    put = len("\n</think>\n\n") if text == "<think>" + "a" * 40 else 0
    assert sum(span.end - span.start for span in said.versions) == len(said.response_ids) - put
    assert len(said.logprobs) == len(said.response_ids)


@pytest.mark.parametrize(
    ("text", "most", "asked", "thought", "action", "finish"),
    [
        ("<think>a;b;c</think>yes;no", 60, [60, 51, 40], "a;b;c", "yes", "stop"),
        ("<think>a;b</think>yes", 60, [60, 51, 42], "a;b", "yes", "stop"),
        ("yes;no", 60, [60], "", "yes", "stop"),
        ("<think>a</think>yes;no;", 60, [60], "a", "yes", "stop"),
        ("<think>a;b", 60, [60, 51], "a;b", "", "stop"),  # its turn ended in the thought
        ("<think>a;" + "b" * 80, 60, [60, 51], "a;" + "b" * 51, "", "length"),
        ("<think>a;", 9, [9], "a;", "", "length"),
    ],
)
def test_stop_text_in_reasoning_does_not_end_the_response(tokenizer, text, most, asked, thought, action, finish):  # noqa: PLR0917
    said, engine = thinking(tokenizer, text, stop=(";",), max_tokens=most)
    assert [left for _, left, _ in engine.asked] == asked
    assert (said.reasoning, said.action, said.finish_reason) == (thought, action, finish)
    assert len({seed for *_, seed in engine.asked}) == len(asked)  # no two parts are drawn alike
    told = tokenizer.decode(said.response_ids).removesuffix(tokenizer.eos_token)
    assert text.startswith(told) and len(said.logprobs) == len(said.response_ids)


def test_stop_text_in_reasoning_counts_for_the_reasoning_limit(tokenizer):
    budgets = {"max_tokens": 4, "max_reasoning_tokens": 14}
    said, engine = thinking(tokenizer, "<think>a;b;cdefgh</think>yes;", stop=(";",), **budgets)
    assert [left for _, left, _ in engine.asked] == [14, 5, 4]
    assert (said.reasoning, said.finish_reason) == ("a;b;cde", "length") and said.action == "fgh<"


def test_reasoning_limit_is_positive_and_not_for_endpoints():
    with pytest.raises(ValueError, match="max_reasoning_tokens=0 leaves no room"):
        fa.Sampling(max_reasoning_tokens=0)
    with pytest.raises(ValueError, match="the API has no separate limit for reasoning"):
        fa.Endpoint("http://h/v1", "m", sampling=fa.Sampling(max_reasoning_tokens=9))
