"""Examples that compare runs: their arms, demonstrations, measures and tables."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.models.families import inspect_model
from forge_agents.rollout import Rollout
from forge_agents.rollout.rendering import Renderer


def read_json(file):
    return json.loads(file.read_text())


def test_run_is_measured_before_and_after_and_not_repeated(load_example, trainers, tmp_path):
    study = load_example("_study")
    config = fa.GRPOConfig(learner=fa.LearnerConfig(lr=0.1))
    sizes = {"steps": 2, "episodes": 4}
    policy = fa.Policy("m", name="team")
    result = study.train(policy, "Game-v1", config, tmp_path / "run", columns=("none",), arm="a", seed=3, **sizes)
    assert result == read_json(tmp_path / "run/result.json") == {
        "arm": "a", "seed": 3, "before": [0.1, 0.0], "after": [pytest.approx(0.3), 0.0],
        "curve": [[0, 0.1], [1, 0.2], [2, 0.2]], "seconds": 4.0, "none": [None, None],
    }  # fmt: skip
    study.train(policy, "Game-v1", config, tmp_path / "run", **sizes)
    assert len(trainers) == 1
    (tmp_path / "run/result.json").unlink()
    study.train(policy, "Game-v2", config, tmp_path / "run", **sizes)
    assert trainers[1].evaluated == ["Game-v2"], "an interrupted run keeps its first measurement"


def test_runs_become_a_table_and_a_plot(load_example, tmp_path, capsys):
    curves = {0: [[0, 0.1], [1, 0.2]], 1: [[0, 0.1], [1, 0.3], [2, 0.4]]}
    results = [
        {"arm": "a", "seed": seed, "before": [0.1, 0.05], "after": [0.9, 0.04], "curve": curve}
        for seed, curve in curves.items()
    ]
    columns = {"points": lambda result: str(len(result["curve"]))}
    load_example("_study").show(results, {"a": "the arm", "b": "none"}, tmp_path / "p.png", title="T", columns=columns)
    printed = capsys.readouterr().out
    assert table_rows(printed)[-1] == ["the arm", "1", "0.100 ± 0.050", "0.900 ± 0.040", "3"]
    assert (tmp_path / "p.png").stat().st_size > 10_000


def table_rows(printed):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]


# ---- demonstrations


def test_sorter_demonstrations_are_perfect_and_not_among_training_seeds(load_example):
    from forge_trainers.rl.tasks import TaskSampler

    example = load_example("algorithms")
    for seed in range(2**30, 2**30 + 20):
        env = fa.make(example.ENV_ID, **example.ENV_ARGS)
        env.reset(seed=seed)
        earned = 0.0
        for message in example.demonstration(seed)["messages"]:
            if message["role"] == "assistant":
                env.step(message["content"])
                earned += env.rewards["sorter"]
        assert earned == 2
    training = {task.seed for step in range(20) for task in TaskSampler(example.ENV_ID).tasks(0, step, 8)}
    shown = {2**30 + 1000 * seed + number for seed in range(3) for number in range(example.NUM_CHATS)}
    assert not training & shown
    assert len({str(example.demonstration(seed)) for seed in sorted(shown)[:10]}) == 10


def test_adder_demonstrations_have_reasoning_that_the_environment_does_not_see(load_example):
    example = load_example("think_then_answer")
    assert example.teacher("7 + 8 + 1 + 9 + 5") == "<think>7+8=15\n15+1=16\n16+9=25\n25+5=30</think>30"
    assert example.teacher("7 + 8 + 1 + 9 + 5", plain=True) == "30"
    reasoning, plain = (example.demonstrations(3, 4, plain) for plain in (False, True))
    assert [t.reward for t in (*reasoning, *plain)] == [1.0] * 8
    texts = [[(t.turns[0].observation, t.turns[0].action) for t in shown] for shown in (reasoning, plain)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4, "both have the same questions"
    assert all(t.turns[0].reasoning.count("=") == 4 for t in reasoning)
    assert not any(t.turns[0].reasoning for t in plain)
    assert {t.turns[0].observation for t in example.demonstrations(4, 4)}.isdisjoint(dict(texts[0]))


def test_every_legal_poker_action_is_imitated_once(load_example):
    rows = load_example("self_play").answers()
    assert len(rows) == 24 and {row["completion"] for row in rows} == {"check", "bet", "call", "fold"}
    longest = max(rows, key=lambda row: len(row["prompt"]))
    assert [message["role"] for message in longest["prompt"]] == ["system", "user", "assistant", "user"]
    assert longest["prompt"][2]["content"] == "check" and "opponent bet" in longest["prompt"][3]["content"]


def test_finished_imitation_and_self_play_are_not_repeated(load_example, tmp_path):
    (tmp_path / "divergence-3").mkdir()
    (tmp_path / "divergence-3/result.json").write_text('{"curve": [[10, 0.3, 0.1, 0.0]]}')
    result = load_example("self_play").train("some-model", 3, SimpleNamespace(out=tmp_path))
    assert result["curve"] == [[10, 0.3, 0.1, 0.0]]
    (tmp_path / "export").mkdir()
    policy = load_example("_study").after_sft(fa.Policy("m", name="p"), tmp_path, None, None)
    assert (policy.model, policy.name) == (str(tmp_path / "export"), "p")


# ---- arms


def test_levels_of_training_are_compared_on_all_levels(load_example, trainers, tmp_path, capsys):
    module = load_example("curriculum")
    words = ["--seeds", "0", "--steps", "4", "--eval-every", "2", "--lr", "0.01", "--levels", "1", "2"]
    words += ["--control-steps", "2", "--out", str(tmp_path)]
    for _ in range(2):  # finished runs are not repeated
        module.main(words)
    levels = ["forge/Relay-v0@1", "forge/Relay-v0@2"]
    assert [run.trained[0] for run in trainers] == [
        fa.Curriculum(levels), dict.fromkeys(levels, 1.0), *levels, dict.fromkeys(levels, 1.0)
    ]  # fmt: skip
    assert all(run.evaluated == levels * (run.done // 2 + 1) for run in trainers)
    result = read_json(tmp_path / "curriculum-0/result.json")
    assert result["curve"][-1] == pytest.approx([4, 0.14, 0.24]) and result["seconds"] == 8
    assert read_json(tmp_path / "control-0/result.json")["curve"][-1] == [2, 0.1, 0.2]
    assert (tmp_path / "curriculum.png").stat().st_size and "control" in capsys.readouterr().out


def test_agents_are_rewarded_for_their_own_sums_and_compared_by_role_or_together(
    load_example, trainers, tmp_path, capsys
):
    module = load_example("role_credit")
    fa.check_env(module.ENV_ID)
    env = fa.make(module.ENV_ID)
    env.reset(seed=3)
    sums = {agent: sum(numbers) for agent, numbers in env.unwrapped.numbers.items()}
    texts = {"clerk": f"9, no: {sums['clerk']}", "accountant": f"{sums['accountant']} or 1"}
    players = {agent: fa.Scripted(lambda _, text=text: text) for agent, text in texts.items()}
    assert fa.play(module.ENV_ID, players, seed=3).rewards == {"clerk": 1.0, "accountant": 0.0}
    for _ in range(2):  # finished runs are not repeated
        module.main(["--seeds", "1", "--steps", "4", "--eval-every", "2", "--lr", "0.1", "--out", str(tmp_path)])
    assert [run.config.credit.by for run in trainers] == [("seed", "role"), ("seed",)]
    result = read_json(tmp_path / "all-agents-1/result.json")
    assert result["curve"][-1] == [4, 0.4, {"clerk": 0.4, "accountant": 0.2}] and result["grad_norm"] == 2
    assert (tmp_path / "role_credit.png").stat().st_size and "0.00 to 0.20" in capsys.readouterr().out


def test_team_is_distilled_into_one_policy(load_example, trainers, tmp_path, capsys):
    module = load_example("distill_team")
    for env_id in ("example/Questions-v0", "example/Letters-v0"):
        fa.check_env(env_id)
    texts = {"adder": "a1b2", "comparer": "ABCd", "reader": "abc"}
    players = {agent: fa.Scripted(lambda _, text=text: text) for agent, text in texts.items()}
    rewards = fa.play("example/Letters-v0", players, seed=3).rewards
    assert rewards == {"adder": 0.5, "comparer": 0.75, "reader": 1.0}
    right = {
        r"Calculate (.) \+ (.)\. Write the result as a number\.": sum,
        r"Which is larger, (.) or (.)\?": max,
        r"Write the second of these numbers: ., (.)\.": sum,
    }

    def answer(observation):
        ((pattern, function),) = [item for item in right.items() if re.fullmatch(item[0], observation)]
        return str(function([*map(int, re.fullmatch(pattern, observation).groups())]))

    assert set(fa.play("example/Questions-v0", fa.Scripted(answer), seed=3).rewards.values()) == {1.0}
    for _ in range(2):  # finished runs are not repeated
        module.main(["--tiny", "--seeds", "1", "--steps", "4", "--lr", "0.1", "--out", str(tmp_path)])
    team, *students = trainers
    assert set(team.learners) == set(module.AGENTS) and [run.done for run in trainers] == [4, 8, 12, 2]
    distilled, grpo, control = (run.config for run in students)
    assert distilled.learner.teachers == {agent: str(tmp_path / "team-1/export" / agent) for agent in module.AGENTS}
    assert distilled.learner.loss == control.learner.loss == "distill" and grpo.learner.loss == "dapo"
    assert (distilled.group_size * distilled.groups_per_step, control.learner.lr) == (64, 0.0)
    assert read_json(tmp_path / "distilled-1/result.json")["after"] == [pytest.approx(0.8), 0.0]
    assert "a team in one model" in capsys.readouterr().out


def test_each_trained_agent_is_evaluated_with_each_customer(load_example, trainers, tmp_path):
    module = load_example("other_customer")
    (tmp_path / "imitated-0/export").mkdir(parents=True)
    module.main(["--seeds", "0", "--steps", "2", "--out", str(tmp_path)])
    fixed, both, *evaluations = trainers
    assert list(fixed.learners) == ["agent"] and set(both.learners) == {"agent", "customer"}
    start, fixed_agent, agent, customer = (
        str(tmp_path / place)
        for place in ("imitated-0/export", "fixed-0/export", "trained-0/export/agent", "trained-0/export/customer")
    )
    assert fixed.policies["customer"].model == both.policies["agent"].model == start
    pairs = [
        (run.policies["agent"].model, getattr(run.policies["customer"], "model", run.policies["customer"].name))
        for run in evaluations
    ]
    assert pairs == [(one, other) for one in (start, fixed_agent, agent) for other in (start, customer, "oracle")]
    assert not any(run.learners for run in evaluations)


def test_league_and_mirror_are_evaluated_against_minimax(load_example, trainers, tmp_path, capsys, monkeypatch):
    module = load_example("league")
    monkeypatch.setattr(module, "meetings", lambda player, args: "meetings")
    (tmp_path / "taught/export").mkdir(parents=True)
    for _ in range(2):  # finished runs are not repeated
        module.main(["--seeds", "0", "1", "--steps", "4", "--control-steps", "2", "--out", str(tmp_path)])
    names = [f"{arm}-{seed}" for arm in ("regularized", "mirror", "league") for seed in (0, 1)]
    assert [run.folder.name for run in trainers] == [*names, "control"]
    assert [run.policies.self_play for run in trainers] == [1.0, 1.0, 1.0, 1.0, 0.35, 0.35, 1.0]
    assert [run.config.learner.reference for run in trainers] == [60, 60, *["start"] * 4, 60]
    assert {run.config.learner.kl_coef for run in trainers[:2]} == {0.4}
    assert {run.policies.policy.context for run in trainers} == {"newest"}, "also after imitation"
    assert {run.policies.held_out for run in trainers} == {(fa.Oracle(),)}
    assert [(run.config.learner.lr > 0, run.done) for run in trainers] == [(True, 4)] * 6 + [(False, 2)]
    curve = read_json(tmp_path / "mirror-1/result.json")["curve"]
    assert [row[:2] for row in curve] == [[0, 0.0]] + [[n + 1, pytest.approx(0.002)] for n in range(4)]
    assert (tmp_path / "league.png").stat().st_size and "against minimax" in capsys.readouterr().out
    (tmp_path / "control/result.json").unlink()
    module.main(["--seeds", "0", "1", "--steps", "4", "--control-steps", "2", "--out", str(tmp_path)])
    assert trainers[-1].done == 2 and trainers[-1].evaluated == [], "an interrupted run keeps its first measurement"


def test_policies_of_the_league_meet_minimax_and_each_other(load_example, tmp_path, monkeypatch):
    module = load_example("league")
    monkeypatch.setattr(module, "replace", lambda player, model, name: fa.Oracle(name=name))
    (tmp_path / "mirror-3/league/player-000060").mkdir(parents=True)
    args = SimpleNamespace(arms=["mirror"], seeds=[3], out=tmp_path, episodes=6)
    table = module.meetings(fa.Scripted(lambda seen: seen[-1], name="before"), args)
    players, *columns = ([*column.cells] for column in table.columns)
    assert players == ["random", "minimax", "before", "step-60", "mirror"]
    cells = {(one, other): columns[j][i] for i, one in enumerate(players) for j, other in enumerate(players)}
    assert cells["minimax", "mirror"] == cells["mirror", "minimax"] == "0 100 0"
    won, drawn, lost = map(int, cells["mirror", "random"].split())
    assert lost == 0 and won > 50 and won + drawn in (99, 100, 101)
    assert cells["random", "mirror"] == f"0 {drawn} {won}" and cells["mirror", "mirror"] == "0 0 0"


def test_board_reaches_the_model_as_nine_signs(load_example, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = load_example("league")
    folder = module.untaught(tmp_path / "start")
    assert 500_000 < AutoModelForCausalLM.from_pretrained(folder).num_parameters() < 2_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer, env = Renderer(tokenizer), fa.make(module.GAME)
    env.reset(seed=0)
    prompt = renderer.start(env.instructions("player_1"), env.observe("player_1"))
    assert tokenizer.decode(prompt) == "036147258<|im_start|>", "rules do not reach the model"
    for own, other in ("40", "17", "62", "53"):
        env.step(own)
        env.step(other)
        prompt = renderer.extend(prompt, (*tokenizer.encode(own), renderer.eos_id), env.observe("player_1"))
    assert tokenizer.decode(prompt)[-21:] == "OOXXXOOX8<|im_start|>"
    assert len(prompt) == 5 * 10 + 4 * 2, "the longest game fits into the context of 128 tokens"


# ---- tables


@pytest.fixture(scope="module")
def tables():
    return {}


def game_of(load_example, tables, name):
    module = load_example("self_play_tables")
    return module, tables.setdefault(name, module.Game(module.SETUPS[name].env_id))


def test_positions_of_poker_and_of_a_board_are_those_of_the_environments(load_example, tables):
    module, kuhn = game_of(load_example, tables, "kuhn")
    assert (len(kuhn.rows), len(kuhn.place)) == (12, 54)
    even = kuhn.strategy(np.zeros(kuhn.legal.shape))
    assert kuhn.measure([even]) == pytest.approx(11 / 24)
    first, second = np.zeros_like(even), np.zeros_like(even)
    first[:, 1] = second[:, 0] = 1  # always bet or fold, always check or call
    assert kuhn.shares(first, second).tolist() == pytest.approx([0.5, 0, 0.5])
    assert kuhn.shares(first, first).tolist() == pytest.approx([1, 0, 0]), "every bet is folded to"
    _, board = game_of(load_example, tables, "tictactoe")
    assert len(board.rows) == 4520  # positions in which a player moves
    assert module.results(board, board.optimal(), board.optimal()) == pytest.approx([0, 1, 0])
    assert board.measure([board.optimal()]) == pytest.approx(0)
    even = board.strategy(np.zeros(board.legal.shape))
    wins, _, losses = board.shares(even, even)
    assert (wins, losses) == pytest.approx((0.585, 0.288), abs=1e-3)  # known of random play
    assert module.score(board, board.optimal(), even) > 0.8


def test_games_of_tables_are_sampled_by_their_strategies(load_example, tables):
    _, kuhn = game_of(load_example, tables, "kuhn")
    even, rng = kuhn.strategy(np.zeros(kuhn.legal.shape)), np.random.default_rng(0)
    roots = rng.choice(kuhn.roots, size=20_000, p=kuhn.chances)
    (number, place, action), rewards = kuhn.play(even[None], np.zeros((20_000, 2), int), roots, rng)
    wins, _, losses = kuhn.shares(even, even)
    assert np.mean(rewards > 0) == pytest.approx(wins, abs=0.01) and np.mean(rewards < 0) == pytest.approx(
        losses, abs=0.01
    )
    assert (
        np.mean(action) == pytest.approx(0.5, abs=0.01)
        and set(number) == set(range(20_000))
        and set(place) == set(range(12))
    )


def test_advantages_of_tables_leave_out_opponents_and_equal_rewards(load_example):
    module = load_example("self_play_tables")
    own = np.array([[True, True]] * 2 + [[True, False]] * 2 + [[True, True]] * 2)
    advantages = module.advantages_of(np.array([1.0, -1.0, 2.0, 0.0, 1.0, 1.0]), own, 2)
    nan = np.nan
    np.testing.assert_array_equal(advantages, [[1, -1], [-1, 1], [1, nan], [-1, nan], [nan, nan], [nan, nan]])


def test_gradient_of_tables_is_that_of_finite_differences(load_example, tables):
    module, kuhn = game_of(load_example, tables, "kuhn")
    logits = np.random.default_rng(0).normal(size=kuhn.legal.shape)
    place, action, weight = np.array([0, 3, 3]), np.array([1, 0, 1]), np.array([0.5, -2.0, 1.0])

    def loss(values):
        return np.mean(weight * np.log(kuhn.strategy(values)[place, action]))

    gradient = module.gradient_of(kuhn.strategy(logits), place, action, weight)
    for at in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[at] = 1e-6
        assert gradient[at] == pytest.approx((loss(logits + step) - loss(logits - step)) / 2e-6, abs=1e-6)


def test_divergence_from_a_moving_reference_makes_tables_converge(load_example, tmp_path, capsys):
    module = load_example("self_play_tables")
    words = ["kuhn", "--seeds", "0", "--out", str(tmp_path), "--arms", "regret"]
    module.main([*words, "--steps", "60"])
    words += ["regularized", "mirror", "regularized-control", "--steps", "1200"]
    for _ in range(2):  # finished runs are not repeated
        module.main(words)
    runs = {arm: read_json(tmp_path / f"kuhn-{arm}-0/result.json") for arm in module.ARMS if arm != "league"}
    after = {arm: run["after"][0] for arm, run in runs.items()}
    assert after["regularized"] < 0.6 * after["mirror"] < after["regularized-control"] == pytest.approx(11 / 24)
    assert runs["regularized"]["points"][-1] == [1200, after["regularized"]]
    assert runs["regularized"]["average"] < 0.05
    assert (tmp_path / "self_play_tables.png").stat().st_size and "kuhn-regret" in capsys.readouterr().out


# ---- measures


def test_time_to_a_reward_is_interpolated(load_example):
    seconds_to = load_example("asynchronous").seconds_to
    curve = [[0.0, 0.1], [30.0, 0.5], [60.0, 0.4], [90.0, 0.9]]
    assert [seconds_to(curve, reward) for reward in (0.3, 0.5, 0.65, 0.1)] == pytest.approx([15, 30, 75, 0])
    assert seconds_to(curve, 0.95) is None


def test_policy_lags_are_compared_over_time(load_example, tmp_path, monkeypatch, capsys):
    example = load_example("asynchronous")
    for staleness in (0, 1):
        folder = tmp_path / f"relay-staleness-{staleness}-3"
        folder.mkdir()
        columns = {"time/step_s": [40 + 20 * staleness, 8.25], "idle/engines": [0.125] * 2, "idle/learner": [0.5] * 2}
        columns |= {"staleness/max": [staleness, 0], "eval/reward": [0.9, None]}
        result = {"arm": example.label(staleness, 1), "seed": 3, "before": [0.1, 0.05], "after": [0.9, 0.04], **columns}
        (folder / "result.json").write_text(json.dumps(result))
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--seeds", "3", "--out", str(tmp_path)]
    example.main(["--staleness", "0", "1", *words])
    rows = table_rows(capsys.readouterr().out)
    assert ["staleness 0", "3", "0.100 ± 0.050", "0.900 ± 0.040", "30", "24.1", "12%", "50%", "0"] in rows
    assert ["staleness 1", "3", "0.100 ± 0.050", "0.900 ± 0.040", "45", "34.1", "12%", "50%", "1"] in rows
    example.main(["--staleness", "0", *words, "--reward", "0.95"])
    assert "never" in capsys.readouterr().out
    assert (tmp_path / "asynchronous.png").stat().st_size > 10_000


def question(observation):
    return observation.splitlines()[-2].removeprefix("Question: ")


@pytest.mark.parametrize(
    ("asker", "shares"),
    [
        (lambda text: f"CALL calculator({question(text)})" if "Answer:" in text else text, [1, 1, 1]),
        (lambda text: "CALL calculator(2 + 3)" if "Answer:" in text else text, [1, 0, 0]),
        (lambda text: "CALL calculator(two)" if "Answer:" in text else "5", [0, 0, 0]),
        (lambda text: str(sum(map(int, question(text).split(" + ")))), [0, 0, 1]),
    ],
)
def test_tool_measures_distinguish_calls_right_calls_and_right_answers(load_example, asker, shares):
    def evaluate(env_id, episodes):
        echo = fa.Scripted(lambda text: text, name="echo")
        policies = {"asker": fa.Scripted(asker), "answerer": echo}
        rollout = Rollout(make_env=lambda: fa.make(env_id), env_id=env_id, policies=policies)
        groups = [asyncio.run(rollout.group(seed, 1)) for seed in range(episodes)]
        return SimpleNamespace(episodes=[group.episodes[0] for group in groups])

    example = load_example("tool_use")
    measures = example.measure(SimpleNamespace(evaluate=evaluate), 6)
    assert [share for share, _, _ in measures] == shares
    assert all(0 <= low <= share <= high <= 1 for share, low, high in measures)


def test_tool_table_has_trained_run_and_control(load_example, tmp_path, monkeypatch, capsys):
    example, calls = load_example("tool_use"), []
    share, low, high = example.interval([1.0] * 8 + [0.0] * 32)
    assert (share, round(low, 3), round(high, 3)) == (0.2, 0.105, 0.348)  # Wilson's interval

    def run(folder, args, *, steps, lr):
        calls.append((folder.name, steps, lr))
        folder.mkdir()
        return [example.interval([0.0, 1.0])] * 3, [example.interval([1.0, 1.0])] * 3

    monkeypatch.setattr(example, "run", run)
    example.main(["--steps", "3", "--out", str(tmp_path)])
    assert calls == [("trained", 3, 2e-5), ("control", 10, 0.0)]
    assert "control, lr 0" in capsys.readouterr().out
    result = read_json(tmp_path / "control" / "result.json")
    assert (result["arm"], result["seed"], result["before"][0], result["after"][0]) == ("control", 0, 0.5, 1.0)


def test_tiny_model_of_a_family_imitates_the_games_that_it_is_trained_on(load_example, tmp_path, monkeypatch):
    example = load_example("two_policies")
    imitated, trained = [], []

    def after_sft(policy, _folder, config, examples, *, epochs):
        imitated.append((policy, config.learner.lr, examples(), epochs))
        return policy

    monkeypatch.setattr(example._study, "after_sft", after_sft)
    monkeypatch.setattr(example._study, "train", lambda *args, **options: trained.append((args[0], options)))
    monkeypatch.setattr(example._study, "show", lambda *_args, **_options: None)
    sizes = ["--max-number=2", "--games=8", "--epochs=3", "--imitation-lr=3e-3", "--control-steps=0", "--seeds=0"]
    example.main(["--family=qwen3_5", *sizes, "--kind=full", "--share=all", f"--out={tmp_path}"])
    (policy, lr, games, epochs), (team, options) = imitated[0], trained[0]
    assert inspect_model(Path(policy.model)).family.name == "qwen3_5" and (lr, epochs) == (3e-3, 3)
    assert {turn.action for game in games for turn in game.turns} <= {"2", "3", "4"}  # without calls of a tool
    assert options["env_args"] == {"max_number": 2, "tool": False}
    assert {each.name for each in team.values()} == {"team"} and len(team) == 2


def test_counterfactual_credit_learns_next_to_a_random_player_and_costs_its_alternatives(
    load_example, tmp_path, monkeypatch, capsys
):
    example = load_example("counterfactual_credit")
    arms = list(example.ARMS)
    curves = [example.train("guest", example.ARMS[arm], (256, 16), seed=0, tokens=6400) for arm in (arms[3], arms[4])]
    tokens, rewards = zip(*(curve[-1] for curve in curves), strict=True)
    assert tokens == (25 * 6 * 8 * 5, 25 * 17 * (5 + 4 + 3 + 2 + 1))  # 6 groups of 8; 17 episodes and alternatives
    assert rewards[0] < 0.35 and 0.38 < rewards[1] < 0.4
    monkeypatch.setattr(example, "RATES", (8,))
    example.main(["--teams", "expedition", "--seeds", "0", "--tokens", "2048", "--out", str(tmp_path)])
    rows = table_rows(capsys.readouterr().out)
    assert [row[2] for row in rows if row[0] in arms] == ["8"] * 7 + ["0"] and (tmp_path / "expedition.png").exists()
