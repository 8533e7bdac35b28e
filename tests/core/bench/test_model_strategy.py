"""Strategies of a model, with the tokenizer of a tiny one and an engine with given probabilities."""

import asyncio
import itertools
import math
from dataclasses import replace

import pytest
from bench_helpers import KUHN, ZeroSum, fake_fleet, play
from refusals import raises

import forge_agents as fa
from forge_agents.bench import play as playing
from forge_agents.bench.exploitability import (
    Exploitability,
    actions_of,
    exploited,
    model_exploitability,
    model_strategy,
)
from forge_agents.bench.game_tree import ILLEGAL, GameTree, InformationSet, average_strategy, exploitability
from forge_agents.errors import ForgeError, LateAnswerError
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.types import Completion

POLICY = fa.Policy("some-model", name="hero", sampling=fa.Sampling(temperature=0.5, max_tokens=16))


@pytest.fixture(scope="module")
def kuhn():
    return GameTree(KUHN)


class Engine:
    """Writes one character a token, each text with ``chance(prompt, text)``, in the form `wording`."""

    max_model_len = 4096

    def __init__(self, renderer, chance, wording="{}"):
        self.renderer, self.chance, self.wording = renderer, chance, wording
        self.prompts, self.requests = [], itertools.count()

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


def equilibrium(prompt, text):
    """player_0 never bets, calls with King and a third of the Queens. player_1 bluffs and calls a third of the time."""
    question = prompt.rsplit("Your card", 1)[1]
    card = next(name for name in ("Jack", "Queen", "King") if name in question)
    bet = 0.0 if "Moves: none" in question else {"Jack": 1 / 3, "Queen": 0.0, "King": 1.0}[card]
    call = {"Jack": 0.0, "Queen": 1 / 3, "King": 1.0}[card]
    chances = {"check": 1 - bet, "bet": bet} if "check or bet" in question else {"call": call, "fold": 1 - call}
    return chances.get(text, 0.0)


def mute(prompt, text):
    return float(text == "umm")


@pytest.fixture
def strategy(renderer):
    """``strategy(game, engine, policy, samples=)``: the strategy of a model behind an engine."""

    def measure(game, engine, policy=POLICY, **options):
        return asyncio.run(model_strategy(game, policy, PolicyEngine(engine, renderer), **options))

    return measure


def test_exact_probabilities_cover_all_information_sets(kuhn, renderer, strategy):
    engine = Engine(renderer, equilibrium)
    model = strategy(kuhn, engine)
    assert len(model.table) == 12 and model.illegal == 0
    observation = "Your card: Queen. Moves: opponent bet. Your move: call or fold?"
    queen = InformationSet("player_1", (), observation, ("call", "fold"))
    assert model.table[queen] == pytest.approx({"call": 1 / 3, "fold": 2 / 3})
    assert exploitability(kuhn, model.table) == pytest.approx(0, abs=1e-9)
    later = [prompt for prompt in engine.prompts if "you check, opponent bet" in prompt]
    assert len(later) == 3
    for prompt in later:
        before, _, after = prompt.partition("Moves: none. Your move: check or bet?")
        assert "You play Kuhn poker" in before and after.index("check") < after.index("opponent bet")


def test_game_interprets_free_answers(kuhn, renderer):
    engine = Engine(renderer, equilibrium, wording="I {}!")
    value, illegal = asyncio.run(model_exploitability(kuhn, POLICY, PolicyEngine(engine, renderer), samples=400))
    assert value == pytest.approx(0, abs=0.04) and illegal == 0
    later = [prompt for prompt in engine.prompts if "you check, opponent bet" in prompt]
    assert len(later) == 1200 and all("I check!" in prompt for prompt in later), "after the model's own words"


@pytest.mark.parametrize("samples", [0, 20])
def test_earlier_turns_are_not_in_the_prompt_of_a_policy_that_reads_only_the_newest(kuhn, renderer, strategy, samples):
    engine = Engine(renderer, equilibrium)
    strategy(kuhn, engine, replace(POLICY, context="newest"), samples=samples)
    later = [prompt for prompt in engine.prompts if "you check, opponent bet" in prompt]
    assert len(later) == 3 * max(1, samples)
    assert all("You play Kuhn poker" in prompt and "check or bet?" not in prompt for prompt in later)


def test_illegal_answers_are_counted_separately(kuhn, renderer, strategy):
    def half(prompt, text):
        return 0.5 if text == "umm" else equilibrium(prompt, text) / 2

    model = strategy(kuhn, Engine(renderer, half), samples=200)
    assert model.illegal == pytest.approx(0.5, abs=0.05)
    assert all(row[ILLEGAL] == pytest.approx(0.5, abs=0.15) for row in model.table.values())
    assert exploitability(kuhn, model.table) > 0.5, "half of its first answers lose the ante"
    model = strategy(kuhn, Engine(renderer, mute), samples=4)
    assert model.illegal == 1 and all(row[ILLEGAL] == 1 for row in model.table.values())
    assert exploitability(kuhn, model.table) == 1, "each game costs the ante"
    average = average_strategy(kuhn, [model.table, lambda agent, seen, legal: {legal[0]: 1.0}])
    assert {row[ILLEGAL] for info_set, row in average.items() if not info_set.past} == {0.5}


def test_illegal_answers_are_left_out_of_a_game_that_goes_on_after_them(renderer, strategy):
    fa.register("model-strategy-test/Again-v0", max_turns=4)(Again)
    game = GameTree("model-strategy-test/Again-v0")
    assert game.endless == set(game.info_sets)

    def chance(prompt, text):
        return {"check": 0.0, "umm": 0.5}.get(text, 0.0)

    model = strategy(game, Engine(renderer, chance), samples=8)
    assert model.illegal == 1 and {tuple(row.values()) for row in model.table.values()} == {(0.5, 0.5)}
    raises(ValueError, "Expected probabilities", exploitability, game, lambda agent, seen, legal: {ILLEGAL: 1.0})


def test_benchmark_names_models_with_illegal_answers(monkeypatch, renderer, tiny_llama, tmp_path, caplog):
    monkeypatch.setattr(playing, "_fleet", fake_fleet(lambda name: Playing(renderer, mute), renderer, []))
    free = fa.Policy(str(tiny_llama), sampling=POLICY.sampling)
    report = play(tmp_path, {"mute": free, "random": fa.Random()}, episodes=1, exploitability_samples=4)
    assert report.exploitability[KUHN] == {"mute": 1.0, "random": pytest.approx(11 / 24)}
    assert f"100 % of the answers of mute in {KUHN} are illegal. Its exploitability includes" in caplog.text
    assert "illegal ones included" in report.markdown()


def test_the_same_weights_give_the_same_samples(kuhn, renderer, strategy):
    first, second = (strategy(kuhn, Engine(renderer, equilibrium), samples=16) for _ in range(2))
    assert first == second


class Again(ZeroSum):
    def step(self, action):
        if action in self.sides:
            super().step(action)


class Beginning(ZeroSum):
    sides = ("heads", "heads up")


class Unseen(ZeroSum):
    """Rock, paper, scissors. No observation tells the choices."""

    sides = ("rock", "paper", "scissors")

    def lead(self):
        first, second = (self.sides.index(word.strip(".").lower()) for word in self.words)
        return (0.0, 1.0, -1.0)[(first - second) % 3]

    def act(self, agent, action):
        assert action.strip(".").lower() in self.sides
        return super().act(agent, action)


def test_choice_that_no_observation_tells_is_known_by_later_turns():
    fa.register("model-strategy-test/Unseen-v0", max_turns=2)(Unseen)
    game = GameTree("model-strategy-test/Unseen-v0")
    answers = [("", "Paper."), ("", "scissors"), ("", "ROCK")]
    for info_set in game.info_sets:
        assert actions_of(game, info_set, answers) == ["paper", "scissors", "rock"]
    # player_1 chooses in three games. In the first of them paper and scissors could have had the same outcome
    assert [len(games) for games in game.info_sets.values()] == [1, 3]


def test_actions_without_different_outcomes_are_one():
    class Same(Unseen):
        def lead(self):
            return 0.0

    fa.register("model-strategy-test/Same-v0", max_turns=2)(Same)
    game = GameTree("model-strategy-test/Same-v0")
    assert {tuple(actions_of(game, info_set, [("", "paper")])) for info_set in game.info_sets} == {("rock",)}


@pytest.fixture(scope="module")
def pennies():
    fa.register("model-strategy-test/Pennies-v0", max_turns=2)(ZeroSum)
    fa.register("model-strategy-test/Beginning-v0", max_turns=2)(Beginning)
    return GameTree("model-strategy-test/Pennies-v0")


def test_actions_with_a_common_prefix_are_distinguished(pennies, renderer, strategy):
    chances = {"heads": 0.3, "help": 0.7}

    def chance(prompt, rest):
        return next(chances[word] for word in chances if word.endswith(rest))

    model = strategy(pennies, Engine(renderer, chance))
    assert all(row == pytest.approx(chances) for row in model.table.values())
    assert exploitability(pennies, model.table) == pytest.approx(0.4)


def test_unsupported_strategies_are_refused(pennies, renderer, strategy):
    engine = Engine(renderer, lambda prompt, text: 0.5)
    raises(ForgeError, "'heads' is a prefix of another", strategy, "model-strategy-test/Beginning-v0", engine)
    raises(ValueError, "samples=-1", strategy, pennies, engine, samples=-1)
    raises(ValueError, "sum to 1 over heads, help", exploitability, pennies, {})


@pytest.mark.parametrize("setting", [{"bad_words": ("bet",)}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}])
def test_exact_probabilities_exclude_penalties(kuhn, renderer, strategy, setting):
    policy = fa.Policy("some-model", name="hero", sampling=fa.Sampling(**setting))
    with pytest.raises(ForgeError, match=f"{next(iter(setting))} of policy 'hero' depend on .*. Set samples="):
        strategy(kuhn, Engine(renderer, equilibrium), policy)
    assert strategy(kuhn, Engine(renderer, equilibrium), policy, samples=1).table
    sharp = fa.Policy("some-model", sampling=fa.Sampling(temperature=0.5, top_k=5, max_tokens=16))
    assert strategy(kuhn, Engine(renderer, equilibrium), sharp).illegal == 0


def test_training_metrics_name_several_policies(renderer):
    served = PolicyEngine(Engine(renderer, equilibrium), renderer)
    games, both = [GameTree(KUHN)], ("player_0", "player_1")
    one = asyncio.run(exploited(games, {"hero": POLICY}, {"hero": served}, samples=20, agents={"hero": both}))
    assert set(one) == {"eval/exploitability", "eval/illegal"} and 0 <= one["eval/exploitability"] < 0.3
    two = exploited(
        games,
        {"a": POLICY, "b": POLICY},
        {"a": served, "b": served},
        samples=1,
        agents=dict.fromkeys("ab", both),
    )
    assert set(asyncio.run(two)) == {f"eval/{what}/{name}" for what in ("exploitability", "illegal") for name in "ab"}


def test_training_measures_a_policy_as_the_agents_that_it_plays(kuhn, renderer):
    """Its answers as other agents never play and would say nothing about it."""

    def one_agent(agent):
        def chance(prompt, text):
            is_first = "Moves: none" in prompt  # the conversation of player_0 begins with it
            return equilibrium(prompt, text) if is_first == (agent == "player_0") else mute(prompt, text)

        return PolicyEngine(Engine(renderer, chance), renderer)

    def measured(agents, served):
        metrics = exploited([kuhn], dict.fromkeys(agents, POLICY), served, samples=600, agents=agents)
        return list(asyncio.run(metrics).values())

    served = {name: one_agent(agent) for name, agent in (("a", "player_0"), ("b", "player_1"))}
    value = -1 / 18  # of the game for player_0
    first, no_illegal, second, none = measured({"a": ["player_0"], "b": ["player_1"]}, served)
    assert (no_illegal, none) == (0, 0)
    assert first == pytest.approx(-value, abs=0.04) and second == pytest.approx(value, abs=0.04)
    both, illegal = measured({"a": ["player_0", "player_1"]}, served)
    assert both > 0.4 and illegal == 0.5
    assert measured({"a": ["dealer"]}, served) == []


def test_training_measures_exploitability_with_evaluations():
    raises(ValueError, "above 0 only with evaluations", fa.GRPOConfig, exploitability_samples=10)
    raises(ValueError, "exploitability_samples=-1", fa.GRPOConfig, exploitability_samples=-1, eval_every=5)


class Playing(Engine):
    """Also plays games for a policy that may only write legal actions."""

    async def generate(self, prompt_ids, sampling, *, choices=(), top_logprobs=0, seed=None):
        allowed = choices if top_logprobs else ()
        return await super().generate(prompt_ids, sampling, choices=allowed, top_logprobs=top_logprobs, seed=seed)


def test_benchmarks_measure_the_exploitability_of_models_once(monkeypatch, renderer, tiny_llama, tmp_path):
    starts = []
    fleet = fake_fleet(lambda name: Playing(renderer, equilibrium), renderer, starts)
    monkeypatch.setattr(playing, "_fleet", fleet)
    free = fa.Policy(str(tiny_llama), sampling=POLICY.sampling)
    players = {"free": free, "random": fa.Random(), "legal": replace(free, constrain_actions=True)}

    def measure(samples):
        return play(tmp_path, players, episodes=1, exploitability_samples=samples)

    assert measure(0).exploitability == {KUHN: {"random": pytest.approx(11 / 24)}}
    report = measure(200)
    values = report.exploitability[KUHN]
    assert list(values) == ["free", "random", "legal"] and values["random"] == pytest.approx(11 / 24)
    assert values["legal"] == pytest.approx(0, abs=1e-9) and 1e-6 < values["free"] < 0.05
    assert "For models computed from at least 200 answers" in report.markdown()
    assert "For models" not in measure(0).markdown()
    assert starts == [{"free", "legal"}] * 2
    assert measure(200).exploitability == report.exploitability and len(starts) == 2, "measured once"
    assert measure(8).exploitability[KUHN]["free"] != values["free"] and len(starts) == 3
    (tmp_path / "exploitability.json").write_text('{"half a li')
    assert measure(200).exploitability == report.exploitability and len(starts) == 4
    raises(ValueError, "exploitability_samples=-1", measure, -1)


def test_killed_benchmark_keeps_measured_exploitability(monkeypatch, renderer, tiny_llama, tmp_path):
    starts, alive = [], {"first"}

    class Mortal(Playing):
        def __init__(self, name):
            super().__init__(renderer, equilibrium)
            self.name = name

        async def generate(self, prompt_ids, sampling, *, top_logprobs=0, **options):
            if top_logprobs and self.name not in alive:
                raise ForgeError("the engine died")
            return await super().generate(prompt_ids, sampling, top_logprobs=top_logprobs, **options)

    monkeypatch.setattr(playing, "_fleet", fake_fleet(Mortal, renderer, starts))
    policy = fa.Policy(str(tiny_llama), sampling=POLICY.sampling, constrain_actions=True)
    players = {"first": policy, "second": replace(policy, sampling=fa.Sampling(temperature=0.5, max_tokens=17))}
    raises(ForgeError, "the engine died", play, tmp_path, players, episodes=1, exploitability_samples=1)
    alive.add("second")
    report = play(tmp_path, players, episodes=1, exploitability_samples=1)
    assert starts == [{"first", "second"}, {"second"}] and report.timing["played"] == 0
    assert set(report.exploitability[KUHN]) == {"first", "second"}


class Slow(Engine):
    """Gives every `nth` free answer too late."""

    nth = 4

    async def generate(self, prompt_ids, sampling, **options):
        assert len(prompt_ids) + sampling.max_tokens <= self.max_model_len
        if not next(self.requests) % self.nth:
            raise LateAnswerError("too late")
        return await super().generate(prompt_ids, sampling, **options)


def test_late_answer_is_dropped_and_reported(kuhn, renderer, strategy, caplog):
    model = strategy(kuhn, Slow(renderer, equilibrium), samples=200)
    assert model.illegal == 0 and exploitability(kuhn, model.table) == pytest.approx(0, abs=0.06)
    assert "hero gave 600 of 2400 free answers too late" in caplog.text


def test_model_without_an_answer_costs_no_report(monkeypatch, renderer, tiny_llama, tmp_path, caplog):
    engine, measure = Playing(renderer, equilibrium), Exploitability.measure

    async def too_late(*args, **options):
        raise LateAnswerError("too late")

    async def measure_late(self, served):
        monkeypatch.setattr(engine, "generate", too_late)
        await measure(self, served)

    monkeypatch.setattr(Exploitability, "measure", measure_late)
    monkeypatch.setattr(playing, "_fleet", fake_fleet(lambda name: engine, renderer, []))
    players = {"late": fa.Policy(str(tiny_llama), sampling=POLICY.sampling), "random": fa.Random()}
    report = play(tmp_path, players, episodes=1, exploitability_samples=2)
    assert report.complete and report.exploitability == {KUHN: {"random": pytest.approx(11 / 24)}}
    assert "late gave none of 24 free answers" in caplog.text


def test_benchmark_refuses_unsupported_sampling_before_it_plays(monkeypatch, renderer, tiny_llama, tmp_path):
    starts = []
    monkeypatch.setattr(playing, "_fleet", fake_fleet(lambda name: Playing(renderer, equilibrium), renderer, starts))
    free = fa.Policy(str(tiny_llama), sampling=fa.Sampling(max_tokens=16, max_reasoning_tokens=4))
    legal = fa.Policy(str(tiny_llama), sampling=fa.Sampling(presence_penalty=0.5), constrain_actions=True)
    for policy, setting in ((free, "max_reasoning_tokens=4"), (legal, "presence_penalty")):
        raises(ForgeError, setting, play, tmp_path, {"model": policy}, episodes=1, exploitability_samples=2)
    assert not starts, "the episodes would be played in vain"


def test_missing_answers_do_not_end_training(renderer, caplog):
    late, full = Slow(renderer, equilibrium), Engine(renderer, equilibrium)
    late.nth, full.max_model_len = 1, 8
    for engine in (late, full):
        result = asyncio.run(
            exploited(
                [GameTree(KUHN)],
                {"hero": POLICY},
                {"hero": PolicyEngine(engine, renderer)},
                samples=3,
                agents={"hero": ("player_0", "player_1")},
            )
        )
        assert all(math.isnan(value) for value in result.values())
    assert caplog.text.count("hero gave none of 36 free answers") == 2
