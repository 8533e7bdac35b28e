"""Strategies of a model, with the tokenizer of a tiny one and an engine that plays as it is told."""

import asyncio
import contextlib
import itertools
import math
from dataclasses import replace

import pytest

import forge_agents as fa
from forge_agents.bench import play as playing
from forge_agents.bench.exploitability import (
    GameTree,
    InformationSet,
    exploitability,
    exploited,
    model_exploitability,
    model_strategy,
)
from forge_agents.errors import ForgeError, LateAnswerError
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Completion

KUHN = "forge/KuhnPoker-v0"
POLICY = fa.Policy("some-model", name="hero", sampling=fa.Sampling(temperature=0.5, max_tokens=16))


@pytest.fixture(scope="module")
def renderer(tiny_llama):
    return Renderer.of(tiny_llama)


@pytest.fixture(scope="module")
def kuhn():
    return GameTree(KUHN)


class Engine:
    """Writes one character a token. `chance(prompt, text)` is how likely it writes a text; `wording` dresses it up."""

    max_model_len = 4096

    def __init__(self, renderer, chance, wording="{}"):
        self.renderer, self.chance, self.wording = renderer, chance, wording
        self.prompts, self.asked = [], itertools.count()

    async def generate(self, prompt_ids, sampling, *, choices=(), top_logprobs=0, seed=None):
        prompt = self.renderer.text(prompt_ids)
        self.prompts.append(prompt)
        if choices:
            assert sampling.max_tokens == 1 and sampling.temperature == 0.5
            total = sum(self.chance(prompt, text) for text in choices)
            first = {}
            for text in choices:
                (token, *_) = text.encode()
                first[token] = first.get(token, 0) + self.chance(prompt, text) / total
            top = {token: math.log(p) for token, p in first.items() if p > 0}
            return self.completion((next(iter(top)),), (top,))
        at = (seed * 0.6180339887) % 1  # spreads seeds over [0, 1)
        for text in ("check", "bet", "call", "fold", "umm"):
            at -= self.chance(prompt, text)
            if at < 0:
                break
        return self.completion(tuple(self.wording.format(text).encode()))

    def completion(self, token_ids, top=()):
        logprobs = (0.0,) * len(token_ids)
        return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason="stop", versions=(), top_logprobs=top)


def last_question(prompt):
    return prompt.rsplit("Your card", 1)[1]


def equilibrium(prompt, text):
    """player_0 never bets, calls with King and a third of the Queens; player_1 bluffs and calls a third of the time."""
    asked = last_question(prompt)
    card = next(name for name in ("Jack", "Queen", "King") if name in asked)
    first = "Moves: none" in asked
    bet = 0.0 if first else {"Jack": 1 / 3, "Queen": 0.0, "King": 1.0}[card]
    call = {"Jack": 0.0, "Queen": 1 / 3, "King": 1.0}[card]
    chances = {"check": 1 - bet, "bet": bet} if "check or bet" in asked else {"call": call, "fold": 1 - call}
    return chances.get(text, 0.0)


def test_exact_probabilities_cover_all_information_sets(kuhn, renderer):
    served = PolicyEngine(Engine(renderer, equilibrium), renderer)
    found = asyncio.run(model_strategy(kuhn, POLICY, served))
    assert len(found.table) == 12 and found.illegal == 0
    queen = InformationSet(
        "player_1", (), "Your card: Queen. Moves: opponent bet. Your move: call or fold?", ("call", "fold")
    )
    assert found.table[queen] == pytest.approx({"call": 1 / 3, "fold": 2 / 3})
    assert exploitability(kuhn, found.table) == pytest.approx(0, abs=1e-9)


def test_earlier_actions_are_in_the_prompt(kuhn, renderer):
    engine = Engine(renderer, equilibrium)
    asyncio.run(model_strategy(kuhn, POLICY, PolicyEngine(engine, renderer)))
    again = [prompt for prompt in engine.prompts if "you check, opponent bet" in prompt]
    assert len(again) == 3
    for prompt in again:
        before, _, after = prompt.partition("Moves: none. Your move: check or bet?")
        assert "You play Kuhn poker" in before and after.index("check") < after.index("opponent bet")


def test_game_interprets_free_answers(kuhn, renderer):
    engine = Engine(renderer, equilibrium, wording="I {}!")
    value, illegal = asyncio.run(model_exploitability(kuhn, POLICY, PolicyEngine(engine, renderer), samples=400))
    assert value == pytest.approx(0, abs=0.04) and illegal == 0
    again = [prompt for prompt in engine.prompts if "you check, opponent bet" in prompt]
    assert len(again) == 1200 and all("I check!" in prompt for prompt in again), "it goes on from its own words"


def test_illegal_answers_are_counted_separately(kuhn, renderer):
    def half(prompt, text):
        return 0.5 if text == "umm" else equilibrium(prompt, text) / 2

    found = asyncio.run(model_strategy(kuhn, POLICY, PolicyEngine(Engine(renderer, half), renderer), samples=200))
    assert found.illegal == pytest.approx(0.5, abs=0.05)
    assert exploitability(kuhn, found.table) == pytest.approx(0, abs=0.06)
    mute = PolicyEngine(Engine(renderer, lambda prompt, text: float(text == "umm")), renderer)
    found = asyncio.run(model_strategy(kuhn, POLICY, mute, samples=4))
    assert found.illegal == 1 and exploitability(kuhn, found.table) == pytest.approx(11 / 24), "nothing said: even play"


def test_the_same_weights_give_the_same_samples(kuhn, renderer):
    served = PolicyEngine(Engine(renderer, equilibrium), renderer)
    first, second = (asyncio.run(model_strategy(kuhn, POLICY, served, samples=16)) for _ in range(2))
    assert first == second


class Pennies(fa.TurnEnv):
    """Both name a side unseen; player_0 wins where they agree."""

    possible_agents = ("player_0", "player_1")
    sides = ("heads", "help")

    def setup(self, rng):
        self.said = []

    def instructions(self, agent):
        return ""

    def legal_actions(self, agent):
        return self.sides

    def openings(self):
        game = type(self)()
        game.reset(seed=0)
        yield 1.0, game

    def observe_text(self, agent):
        return "Your side?"

    def act(self, agent, action):
        self.said.append(action)
        if len(self.said) < 2:
            return fa.Outcome()
        won = 1.0 if self.said[0] == self.said[1] else -1.0
        return fa.Outcome(rewards={"player_0": won, "player_1": -won}, done=True)


class Beginning(Pennies):
    sides = ("heads", "heads up")


@pytest.fixture(scope="module")
def pennies():
    fa.register("model-strategy-test/Pennies-v0", max_turns=2)(Pennies)
    fa.register("model-strategy-test/Beginning-v0", max_turns=2)(Beginning)
    return GameTree("model-strategy-test/Pennies-v0")


def test_actions_with_a_common_prefix_are_distinguished(pennies, renderer):
    chances = {"heads": 0.3, "help": 0.7}

    def chance(prompt, left):  # what is left of the two words
        whole = next(word for word in chances if word.endswith(left))
        return chances[whole]

    found = asyncio.run(model_strategy(pennies, POLICY, PolicyEngine(Engine(renderer, chance), renderer)))
    assert all(row == pytest.approx(chances) for row in found.table.values())
    assert exploitability(pennies, found.table) == pytest.approx(0.4)


def test_unsupported_strategies_are_refused(pennies, renderer):
    served = PolicyEngine(Engine(renderer, lambda prompt, text: 0.5), renderer)
    with pytest.raises(ForgeError, match="'heads' is a prefix of another"):
        asyncio.run(model_strategy("model-strategy-test/Beginning-v0", POLICY, served))
    with pytest.raises(ValueError, match="samples=-1"):
        asyncio.run(model_strategy(pennies, POLICY, served, samples=-1))
    with pytest.raises(ValueError, match="sum to 1 over heads, help"):
        exploitability(pennies, {})


def test_exact_probabilities_exclude_penalties(kuhn, renderer):
    served = PolicyEngine(Engine(renderer, equilibrium), renderer)
    for shaping in ({"bad_words": ("bet",)}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        counting = fa.Policy("some-model", name="hero", sampling=fa.Sampling(**shaping))
        with pytest.raises(ForgeError, match=f"{next(iter(shaping))} of policy 'hero' depend on .*; set samples="):
            asyncio.run(model_strategy(kuhn, counting, served))
        assert asyncio.run(model_strategy(kuhn, counting, served, samples=1)).table
    sharp = fa.Policy("some-model", sampling=fa.Sampling(temperature=0.5, top_k=5, max_tokens=16))
    assert asyncio.run(model_strategy(kuhn, sharp, served)).illegal == 0


def test_training_metrics_name_several_policies(renderer):
    served = PolicyEngine(Engine(renderer, equilibrium), renderer)
    one = asyncio.run(exploited([KUHN], {"hero": POLICY}, {"hero": served}, samples=20))
    assert set(one) == {"eval/exploitability", "eval/illegal"} and 0 <= one["eval/exploitability"] < 0.3
    two = asyncio.run(exploited([KUHN], {"a": POLICY, "b": POLICY}, {"a": served, "b": served}, samples=1))
    assert set(two) == {f"eval/{what}/{name}" for what in ("exploitability", "illegal") for name in "ab"}


def test_training_measures_exploitability_with_evaluations():
    with pytest.raises(ValueError, match="above 0 only with evaluations"):
        fa.GRPOConfig(exploitability_samples=10)
    with pytest.raises(ValueError, match="exploitability_samples=-1"):
        fa.GRPOConfig(exploitability_samples=-1, eval_every=5)


class Playing(Engine):
    """Also plays games for a policy that may only write legal actions."""

    async def generate(self, prompt_ids, sampling, *, choices=(), top_logprobs=0, seed=None):
        allowed = choices if top_logprobs else ()
        return await super().generate(prompt_ids, sampling, choices=allowed, top_logprobs=top_logprobs, seed=seed)


def test_benchmarks_measure_the_exploitability_of_models_once(monkeypatch, renderer, tiny_llama, tmp_path):
    started = []

    @contextlib.asynccontextmanager
    async def fleet(models, config):
        started.append(set(models))
        yield {name: PolicyEngine(Playing(renderer, equilibrium), renderer) for name in models}

    def play(samples, **more):
        return fa.benchmark(
            {"free": free, "random": fa.Random(), "legal": replace(free, constrain_actions=True)}, [KUHN], episodes=1,
            exploitability_samples=samples, out_dir=tmp_path, progress=False, **more,
        )  # fmt: skip

    monkeypatch.setattr(playing, "_fleet", fleet)
    free = fa.Policy(str(tiny_llama), sampling=POLICY.sampling)
    assert play(0).exploitability == {KUHN: {"random": pytest.approx(11 / 24)}}
    measured = play(200)
    found = measured.exploitability[KUHN]
    assert list(found) == ["free", "random", "legal"] and found["random"] == pytest.approx(11 / 24)
    assert found["legal"] == pytest.approx(0, abs=1e-9) and 1e-6 < found["free"] < 0.05
    assert "For models computed from at least 200 answers" in measured.markdown()
    assert "For models" not in play(0).markdown()
    assert started == [{"free", "legal"}] * 2
    assert play(200).exploitability == measured.exploitability and len(started) == 2, "nothing is asked again"
    assert play(8).exploitability[KUHN]["free"] != found["free"] and len(started) == 3
    (tmp_path / "exploitability.json").write_text('{"half a li')
    assert play(200).exploitability == measured.exploitability and len(started) == 4
    with pytest.raises(ValueError, match="exploitability_samples=-1"):
        play(-1)


def test_killed_benchmark_keeps_measured_exploitability(monkeypatch, renderer, tiny_llama, tmp_path):
    started, alive = [], {"first"}

    @contextlib.asynccontextmanager
    async def fleet(models, config):
        started.append(set(models))
        yield {name: PolicyEngine(Mortal(name in alive, renderer, equilibrium), renderer) for name in models}

    class Mortal(Playing):
        def __init__(self, lives, *more):
            super().__init__(*more)
            self.lives = lives

        async def generate(self, prompt_ids, sampling, *, choices=(), top_logprobs=0, seed=None):
            if top_logprobs and not self.lives:
                raise ForgeError("the engine died")
            return await super().generate(prompt_ids, sampling, choices=choices, top_logprobs=top_logprobs, seed=seed)

    monkeypatch.setattr(playing, "_fleet", fleet)
    policy = fa.Policy(str(tiny_llama), sampling=POLICY.sampling, constrain_actions=True)
    players = {"first": policy, "second": replace(policy, sampling=fa.Sampling(temperature=0.5, max_tokens=17))}

    def play():
        return fa.benchmark(players, [KUHN], episodes=1, exploitability_samples=1, out_dir=tmp_path, progress=False)

    with pytest.raises(ForgeError, match="the engine died"):
        play()
    alive.add("second")
    report = play()
    assert started == [{"first", "second"}, {"second"}] and report.timing["played"] == 0
    assert set(report.exploitability[KUHN]) == {"first", "second"}


class Slow(Engine):
    """Gives every `nth` free answer too late."""

    nth = 4

    async def generate(self, prompt_ids, sampling, **options):
        assert len(prompt_ids) + sampling.max_tokens <= self.max_model_len
        if not next(self.asked) % self.nth:
            raise LateAnswerError("too late")
        return await super().generate(prompt_ids, sampling, **options)


def test_late_answer_is_dropped_and_reported(kuhn, renderer, caplog):
    served = PolicyEngine(Slow(renderer, equilibrium), renderer)
    found = asyncio.run(model_strategy(kuhn, POLICY, served, samples=200))
    assert found.illegal == 0 and exploitability(kuhn, found.table) == pytest.approx(0, abs=0.06)
    assert "hero gave 600 of 2400 free answers too late" in caplog.text


def test_missing_answers_do_not_end_training(renderer, caplog):
    late, full = Slow(renderer, equilibrium), Engine(renderer, equilibrium)
    late.nth, full.max_model_len = 1, 8
    for engine in (late, full):
        found = asyncio.run(exploited([KUHN], {"hero": POLICY}, {"hero": PolicyEngine(engine, renderer)}, samples=3))
        assert all(math.isnan(value) for value in found.values())
    assert caplog.text.count("hero gave none of 36 free answers") == 2
