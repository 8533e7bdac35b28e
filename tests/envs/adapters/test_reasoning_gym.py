import ast
import json
import math
import queue
import threading
from pathlib import Path

import pytest
from adapter_play import plausible, play
from hostile_strings import HOSTILE_STRINGS
from team_play import begin

import forge_agents as fa
from forge_envs.adapters import scoring
from forge_envs.adapters.reasoning_gym import EXCLUDED

pytest.importorskip("reasoning_gym")

from forge_agents.runtime.threads import begin_in_thread
from forge_agents.types import Trajectory, Turn
from forge_envs.adapters.reasoning_gym import ReasoningGymScore
from forge_envs.adapters.scoring import PYTHON_SCORERS, SYMPY_SCORERS, literal, refusal


def answered(env, seed, text):
    env.reset(seed=seed)
    env.step(text)
    return env.rewards["solver"], env.infos["solver"]


def test_the_gold_answer_scores_one_and_another_less():
    env = begin(fa.make("reasoning-gym/leg_counting-v0"), 7)
    assert "legs" in env.observe("solver") and "<answer>" in env.instructions("solver")
    gold = answered(env, 7, "-1")[1]["answer"]
    assert answered(env, 7, f"I count. <answer> {gold} </answer> done")[0] == 1.0
    assert answered(env, 7, gold)[1]["outcome"] == "solved"
    reward, info = answered(env, 7, "-1")
    assert reward < 1 and info["outcome"] != "solved" and info["reasoning_gym"]["generator"] == "leg_counting"


def test_settings_and_levels_make_questions_harder():
    few = fa.make("reasoning-gym/chain_sum-v0", min_terms=2, max_terms=2)
    many = fa.make("reasoning-gym/chain_sum-v0", min_terms=9, max_terms=9)
    lengths = []
    for env in (few, many):
        env.reset(seed=1)
        lengths.append(env.observe("solver").count(" + ") + env.observe("solver").count(" - "))
    assert lengths == [1, 8]
    assert len(fa.spec("reasoning-gym/chain_sum-v0").levels) >= 3
    sizes = []
    for level in (0, 3):
        env = fa.make("reasoning-gym/chain_sum-v0", level=level)
        total = 0
        for seed in range(10):
            env.reset(seed=seed)
            total += len(env.observe("solver"))
        sizes.append(total)
    assert sizes[1] > 1.1 * sizes[0]


@pytest.mark.parametrize("wrong", [{"no_such_field": 1}, {"level": -1}, {"min_terms": 9, "max_terms": 2}])
def test_wrong_settings_are_refused_at_once(wrong):
    with pytest.raises(ValueError, match="chain_sum"):
        fa.make("reasoning-gym/chain_sum-v0", **wrong)


def test_verifier_reproduces_the_question_and_the_reward():
    env, scored = fa.make("reasoning-gym/countdown-v0"), []
    env.reset(seed=3)
    for text in ("<answer>1</answer>", f"<answer>{env._entry['answer']}</answer>"):
        reward, info = answered(env, 3, text)
        turn = Turn(agent="solver", index=0, observation="", action=text, reward=reward)
        scored.append((Trajectory(agent="solver", policy="p", turns=(turn,), info=info), reward))
    verifier = ReasoningGymScore()
    assert verifier.score([t for t, _ in scored]).tolist() == pytest.approx([r for _, r in scored])
    assert scored[1][1] == 1.0 > scored[0][1]
    assert math.isnan(verifier([Trajectory(agent="a", policy="p", turns=())])[0])


@pytest.mark.parametrize("generator", sorted(PYTHON_SCORERS | SYMPY_SCORERS))
def test_scorers_that_evaluate_see_no_code(generator, tmp_path):
    mark = tmp_path / "mark"
    env = fa.make(f"reasoning-gym/{generator}-v0")
    for text in (f"open({str(mark)!r}, 'w')", f"__import__('os').system('touch {mark}')", "9**9**9**9", "2**99999999"):
        reward, info = answered(env, 0, f"<answer>{text}</answer>")
        assert info.get("refused") and reward == 0.0, text
    assert not mark.exists()
    for seed in range(3):
        env.reset(seed=seed)
        assert answered(env, seed, f"<answer>{env._entry['answer']}</answer>")[0] == 1.0


def test_settings_of_a_stranger_run_no_code_and_open_no_file(tmp_path):
    mark = tmp_path / "mark"
    call = f"simplify.__globals__['__builtins__']['__import__']('os').system('touch {mark}')"
    settings = [
        ("simple_integration", "symbols", [call]),
        ("intermediate_integration", "symbols", (call,)),
        ("simple_integration", "symbols", ["xy"]),
        ("polynomial_multiplication", "variables", [call]),
        ("polynomial_multiplication", "variables", ["x", "exit"]),
        ("basic_arithmetic", "operators", ["+", f"+__import__('os').system('touch {mark}')+"]),
        ("simple_equations", "operators", {"+": "f(1)"}),
        ("basic_arithmetic", "operators", ["**"]),
        ("spell_backward", "data_file", "/etc/passwd"),
        ("spell_backward", "data_file", "../../secret.txt"),
        ("aiw", "male_names", ["a"] * 10_001),
    ]
    for generator, name, value in settings:
        with pytest.raises(ValueError, match=rf"{generator}: {name}(=.* is refused| has more than)"):
            fa.make(f"reasoning-gym/{generator}-v0", **{name: value})
        source = {"generator": generator, "level": None, "settings": {name: value}, "seed": 1}
        turn = Turn(agent="solver", index=0, observation="", action="x", reward=0.0)
        stored = Trajectory(agent="solver", policy="p", turns=(turn,), info={"reasoning_gym": source})
        with pytest.raises(ValueError, match=f"{generator}: {name}"):
            ReasoningGymScore().score([stored])
    assert not mark.exists()


def test_ordinary_texts_are_settings():
    for generator, settings in {
        "simple_integration": {"symbols": ("y", "Z"), "operators": ("-",)},
        "caesar_cipher": {"delimiter": "."},
        "spell_backward": {"data_file": "words3to10.txt"},
        "aiw": {"male_names": ["Jean-Luc", "O'Neill", "Zoë"]},
        "time_intervals": {"task_types": ["time_ms"]},
    }.items():
        begin(fa.make(f"reasoning-gym/{generator}-v0", **settings), 1)


def hostile_answers(code):
    """Code that exceeds the limits of a syntax check, and computations without end."""
    deep = ("-" * 2972 + code, "(" * 150 + code + ")" * 150, "[" * 90 + code + "]" * 90, "not " * 4000 + code)
    plain = (
        code,
        f"[{code}]",
        f"({code},)",
        f"{{'a': {code}}}",
        f"f'{{{code}}}'",
        f"lambda: {code}",
        f"[{code} for x in [1]]",
    )
    numbers = ("9**9**9", "9" * 6000, "1e1000000", "1e9_999_999", "1/1e9999999", "9**(99*999*999)", "N(pi, 99999999)")
    sizes = (
        "[" * 5000,
        '{"a":' * 3000,
        "-" * 20_000,
        "1" + "+1" * 9000,
        "R99999999 U",
        "[[0]]*99999999",
        "A B C " * 3000,
    )
    return (*plain, *deep, *numbers, *sizes, "x.__class__", "(a+)+$" * 50, "~" * 15_000 + "A", "pour A->B\n" * 2000)


def test_no_answer_runs_or_stalls_any_generator(tmp_path):
    mark = tmp_path / "mark"
    answers = hostile_answers(f"__import__('os').system('touch {mark}')")
    for env_id in fa.list_envs("reasoning-gym"):
        env = begin(fa.make(env_id), 1)
        for text in answers:
            env._answered = False
            info = env.act("solver", f"<answer>{text}</answer>").info["solver"]
            assert 0.0 <= info["score"] <= 1.0
            assert not mark.exists(), f"{env_id} ran {text[:60]!r}"
            assert "broke its limits" not in info.get("error", ""), f"{env_id} and {text[:60]!r}: {info['error']}"


EVALUATED = {  # where reasoning-gym 0.1.25 evaluates text: its own, or an answer, which `harmless` then knows
    "algorithmic/binary_matrix.py": "answer",
    "algorithmic/number_sorting.py": "its own",
    "algorithmic/spiral_matrix.py": "answer",
    "algorithmic/string_insertion.py": "answer",
    "algebra/intermediate_integration.py": "answer",
    "algebra/polynomial_multiplication.py": "answer",
    "algebra/simple_integration.py": "answer",
    "arithmetic/basic_arithmetic.py": "its own",
    "arithmetic/bitwise_arithmetic.py": "its own",
    "arithmetic/decimal_arithmetic.py": "its own",
    "arithmetic/gsm_symbolic/generators_00_49.py": "its own",
    "arithmetic/gsm_symbolic/generators_50_99.py": "its own",
    "coaching/curriculum_config.py": "its own",
    "code/codeio.py": "its own",
    "composite.py": "its own",
    "games/countdown.py": "answer",
    "games/n_queens.py": "answer",
    "games/puzzle24.py": "answer",
    "logic/propositional_logic.py": "answer, by a function of its own that computes nothing",
}
RISKY = ("eval", "exec", "compile", "parse_expr", "sympify", "literal_eval", "system", "Popen", "safe_load", "load")


def test_every_evaluation_in_the_library_is_known():
    import reasoning_gym

    root, result = Path(reasoning_gym.__file__).parent, set()
    for file in set(root.rglob("*.py")) - set((root / "code/contrib").rglob("*")):  # a compiler of another language
        source = file.read_text()
        if not any(f"{name}(" in source for name in (*RISKY, "parse")):
            continue  # three of four files: nothing to walk
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                owner = getattr(getattr(node.func, "value", None), "id", "")
                if (name in RISKY and owner not in ("re", "json", "Compiler")) or (name, owner) == ("parse", "ast"):
                    result.add(str(file.relative_to(root)))
    assert result == set(EVALUATED)
    answers = {Path(file).stem for file, what in EVALUATED.items() if what == "answer"}
    assert answers == PYTHON_SCORERS | SYMPY_SCORERS


def test_scorer_over_its_limits_scores_zero_and_is_restarted(monkeypatch):
    program = (
        "import sys, pickle, signal\nwhile size := sys.stdin.buffer.read(8):\n"
        "    (answer,) = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, 'big')))\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.2 if answer == 'endless' else 0)\n"
        "    while answer == 'endless': pass\n    print('[1.0, {}]', flush=True)\n"
    )
    scorer = scoring._Scorer()
    monkeypatch.setattr(scoring, "_COMMAND", (*scoring._COMMAND[:-1], program))
    assert "broke its limits" in scorer.ask("endless")[1]["error"]
    assert scorer.ask("quick") == (1.0, {})
    scorer._end()


def test_slow_answer_does_not_delay_the_score_of_another(monkeypatch):
    slow_began, other_was_scored = threading.Event(), threading.Event()

    class Scorer:
        def ask(self, source, entry, answer):
            if answer == "x":
                slow_began.set()
                assert other_was_scored.wait(60)
            return 1.0, {}

    monkeypatch.setattr(scoring, "_scorers", queue.LifoQueue())
    for _ in range(2):
        scoring._scorers.put(Scorer())
    source = {"generator": "leg_counting"}
    slow = begin_in_thread(scoring.score, source, {}, "x", name="slow")
    assert slow_began.wait(60) and scoring.score(source, {}, "y") == (1.0, {})
    other_was_scored.set()
    assert slow.result(60) == (1.0, {}) and scoring._scorers.qsize() == 2


def test_the_event_loop_goes_on_while_an_answer_is_scored_in_another_process(monkeypatch):
    in_loop = []

    def score(*_):
        in_loop.append(threading.current_thread() is threading.main_thread())
        return 1.0, {}

    monkeypatch.setattr("forge_envs.adapters.reasoning_gym.score", score)
    episode = fa.play("reasoning-gym/leg_counting-v0", fa.Scripted(lambda _: "<answer>x</answer>"), seed=1)
    assert episode.rewards == {"solver": 1.0} and in_loop == [False]


def test_scorer_that_takes_long_ends_after_its_limit_whatever_the_generator(monkeypatch):
    env = begin(fa.make("reasoning-gym/leg_counting-v0"), 1)
    program = (
        "from forge_envs.adapters import reasoning_gym, scoring; from reasoning_gym.arithmetic import leg_counting\n"
        "def score(self, answer, entry):\n    while answer == '7': pass\n    return 1.0\n"
        "leg_counting.LegCountingDataset.score_answer = score\n"
        "scoring.SCORE_S = 0.3; scoring.serve(reasoning_gym.make_dataset)"
    )
    monkeypatch.setattr(scoring, "_COMMAND", (*scoring._COMMAND[:-1], program))
    scorer = scoring._Scorer()
    source, entry = env.unwrapped._source, env.unwrapped._entry
    assert "broke its limits" in scorer.ask(source, entry, "7")[1]["error"]
    assert scorer.ask(source, entry, "8") == (1.0, {})
    scorer._end()


def test_a_literal_is_read_and_nothing_else():
    assert literal("[['Q', '_'], (1, -2)]") == [["Q", "_"], (1, -2)]
    for text in ("open('x')", "[x for x in y]", "2**9", "x", "-" * 2972 + "1", "[" * 3000, "1" * 30_000):
        with pytest.raises((ValueError, SyntaxError)):
            literal(text)


MORE = (
    "a.b", "x._y", "foo(1)", "9**9**9", "1e99999", "gamma(9)", "2**(10**9)", "(x+1)**99", "tan(tan(tan(x)))", "S(1)",
    "2**(9*9*9*9*9)", "(x**9)**9", "x**sin(x)", "x if x else y", "x[0]", "'x'", "x y", "1j", "x\n+1",
)  # fmt: skip


@pytest.mark.parametrize("text", [*MORE, "x" * 3000])
def test_unsafe_formulas_are_refused(text):
    assert refusal(text, "simple_integration")


def test_moves_without_end_are_refused():
    for generator, ordinary in {"rush_hour": "A+2 B-13", "rubiks_cube": "R U2 F'"}.items():
        assert refusal("A+2000000", generator) and refusal("R999", generator)
        assert not refusal(ordinary, generator)


def test_sums_of_numbers_hold_no_functions_or_powers():
    assert refusal("(3 + 45) * 2 / (1 - 7)", "countdown") == ""
    assert refusal("exp(exp(99))", "countdown") and refusal("2**3", "countdown") and refusal("2* *3", "puzzle24")
    for formula in ("x**3/3 + sin(2*x)/2 + C", "2*(3*x - 1)**(3/2)", "x**2*y**3 - exp(x)*cos(x)**2", "E**(2*x)", "x^2"):
        assert refusal(formula, "simple_integration") == ""


def test_random_episodes_of_many_generators():
    for env_id in fa.list_envs("reasoning-gym")[::6]:
        infos = play(fa.make(env_id), 0, plausible)[-1]
        assert 0.0 <= infos["solver"]["score"] <= 1.0


@pytest.mark.parametrize("generator", ["spiral_matrix", "coin_flip", "knights_knaves", "puzzle24"])
def test_hostile_texts_are_answers_like_others(generator):
    env = fa.make(f"reasoning-gym/{generator}-v0")
    env.reset(seed=0)  # once: to draw a question of puzzle24 takes sympy longer than to score it
    for text in HOSTILE_STRINGS:
        twin = env.fork()
        twin.step(text)
        assert twin.terminations["solver"] and twin.observation_space("solver").contains(twin.observe("solver"))


def test_a_hundred_generators_are_listed():
    listed = fa.list_envs("reasoning-gym")
    assert len(listed) >= 100 and not {f"reasoning-gym/{name}-v0" for name in EXCLUDED} & set(listed)


def countdown(form):
    def answer(entry):
        target, numbers = str(entry["metadata"]["target"]), "+".join(map(str, entry["metadata"]["numbers"]))
        return form.format(target, f"{target[0]}_{target[1:]}", numbers)

    return answer


@pytest.mark.parametrize(
    ("generator", "answer", "highest"),
    [
        ("coin_flip", "0", 0.2),
        ("codeio", json.dumps({"": "😀" * 1500}, ensure_ascii=False), 0.01),
        ("codeio", json.dumps({"": "\x01" * 1500}), 0.01),
        (
            "number_sorting",
            lambda entry: json.dumps([math.nan] * len(json.loads(entry["answer"].replace("'", '"')))),
            0.0,
        ),
        ("complex_arithmetic", "nan", 0.0),
        ("complex_arithmetic", "inf-nanj", 0.0),
        ("game_of_life_halting", "x", 0.0),
        ("puzzle24", "1*2*3*4", 0.01),
        ("puzzle24", lambda entry: f"({entry['answer']})*249/240", 0.01),
        ("countdown", countdown("{1} + 0_0*({2})"), 0.0),
        ("countdown", countdown("{0}e0 + 0e0*({2})"), 0.0),
        ("countdown", countdown("{0}.0 + 0.0*({2})"), 0.0),
    ],
)
def test_no_wrong_answer_is_solved(generator, answer, highest):
    for seed in (1, 2, 3, 4):
        env = begin(fa.make(f"reasoning-gym/{generator}-v0"), seed=seed)
        entry = env.unwrapped._entry
        env.step(answer(entry) if callable(answer) else answer)
        assert env.rewards["solver"] <= highest or (generator == "coin_flip" and abs(float(entry["answer"])) < 1e-4)
        again = begin(fa.make(f"reasoning-gym/{generator}-v0"), seed=seed)
        again.step(str(again.unwrapped._entry["answer"]))
        assert again.rewards["solver"] == 1


def test_moves_without_effect_solve_nothing():
    places = [f"{row}.5, {column}.5" for row in range(4) for column in range(4)]
    boxes = [{f"Agent[{at}]": f"move(box_{c}, target_{c})"} for at in places for c in ("red", "blue", "green")]
    cars = "".join(f"{car}{sign}1" for _ in range(200) for car in "ABCDEFGH" for sign in "+-")
    for generator, answer, most in (("boxnet", json.dumps(boxes), 0.05), ("rush_hour", cars, 0.01)):
        for seed in range(5):
            env = begin(fa.make(f"reasoning-gym/{generator}-v0"), seed=seed)
            env.step(answer)
            assert env.rewards["solver"] <= most


def test_moves_that_all_have_an_effect_are_scored():
    state = {"0.5_0.5": ["box_red"], "0.5_1.5": ["target_red"]}
    step = {"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])"}
    match = {"Agent[0.5, 1.5]": "move(box_red, target_red)"}
    assert scoring._all_boxes_move([step, match], state) and not scoring._all_boxes_move([match], state)
    board = "o" * 12 + "AAo" + "o" * 21
    assert scoring._all_cars_move("A+3A-1", board) and not scoring._all_cars_move("A+5", board)


def test_copies_of_the_input_and_zeros_earn_nothing():
    def board(entry):
        return json.loads(entry["question"][entry["question"].rindex("[[") :].split("]]")[0] + "]]")

    answers = {
        "game_of_life": [board, lambda entry: [[0] * len(row) for row in board(entry)]],
        "prime_factorization": [lambda entry: entry["metadata"]["number"]],
        "polynomial_equations": [lambda entry: 0],
    }
    for generator, functions in answers.items():
        parts = 0
        for seed in range(8):
            env = begin(fa.make(f"reasoning-gym/{generator}-v0"), seed)
            entry = env.unwrapped._entry
            gold = entry["answer"]
            value = json.loads(gold) if gold.replace(".", "").isdecimal() or gold.startswith("[") else gold
            for function in functions:
                twin = env.fork()
                twin.step(text := json.dumps(function(entry)))
                assert twin.rewards["solver"] == (json.loads(text) == value), (generator, seed)
            if generator == "game_of_life":
                near = json.loads(gold)
                near[0][0] = 1 - near[0][0]
                twin = env.fork()
                twin.step(json.dumps(near))
                parts += 0.5 < twin.rewards["solver"] < 1
            env.step(gold)
            assert env.rewards["solver"] == 1
        assert parts >= 6 * (generator == "game_of_life"), "an answer with one wrong cell is better than a copy"


def board_filled(entry, *, wrong=()):
    """Return the board with 2 in each empty cell, or the solution with 2 in the wrong cells."""
    board = entry["metadata"]["solution"] if wrong else entry["metadata"]["puzzle"]
    cells = [[2 if (row, at) in wrong else cell or 2 for at, cell in enumerate(line)] for row, line in enumerate(board)]
    return "\n".join(" ".join(map(str, line)) for line in cells)


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("sudoku", board_filled),
        ("mini_sudoku", board_filled),
        ("futoshiki", board_filled),
        ("word_sorting", lambda entry: ", ".join(entry["metadata"]["original_words"])),
        ("time_intervals", lambda _: "12:00:00"),
        ("rectangle_count", lambda _: "4"),
    ],
)
def test_guesses_and_given_cells_earn_nothing(generator, answer):
    for seed in range(4):
        env = begin(fa.make(f"reasoning-gym/{generator}-v0"), seed)
        entry, twin = env.unwrapped._entry, env.fork()
        twin.step(answer(entry))
        assert twin.rewards["solver"] == 0 or answer(entry) == entry["answer"]
        if generator.endswith("sudoku"):
            twin = env.fork()
            twin.step(board_filled(entry, wrong={(0, 0), (0, 1)}))
            assert 0.3 < twin.rewards["solver"] < 1, "most of the empty cells are right"
        env.step(entry["answer"])
        assert env.rewards["solver"] == 1


def test_a_copy_of_the_string_answers_few_questions_of_string_insertion():
    env, copies = fa.make("reasoning-gym/string_insertion-v0"), 0
    for seed in range(40):
        string = begin(env, seed).unwrapped._entry["metadata"]["string"]
        reward, info = answered(env, seed, string)
        copies += reward == 1
        assert ReasoningGymScore()._grade(trajectory_of(string, info)) == reward
    assert 4 <= copies <= 14  # 88 % without the redraw


def trajectory_of(text, info):
    turn = Turn(agent="solver", index=0, observation="q", action=text, reward=0.0, policy="p")
    return Trajectory(agent="solver", policy="p", turns=(turn,), env_id="e", info=info)


@pytest.mark.parametrize(("generator", "level"), [("polynomial_multiplication", 3), ("polynomial_multiplication", 2)])
def test_long_right_answers_are_read(generator, level):
    env = fa.make(f"reasoning-gym/{generator}-v0", level=level)
    lengths = []
    for seed in range(3):
        gold = begin(env, seed).unwrapped._entry["answer"]
        lengths.append(len(gold))
        assert answered(env, seed, gold)[0] == 1
        assert answered(env, seed, gold.replace("2", "3", 1))[0] == 0
    assert max(lengths) > 1000


def test_hexadecimal_answer_is_no_number_with_an_exponent():
    assert refusal("0x7e316868", "bitwise_arithmetic") == refusal("3e40217", "base_conversion") == ""
    assert refusal("3e40217", "chain_sum")


def test_all_listed_levels_can_be_made():
    for env_id in fa.list_envs("reasoning-gym"):
        for level in range(1, len(fa.spec(env_id).levels) + 1):
            fa.make(f"{env_id}@{level}")
    names = ("caesar_cipher", "knight_swap", "modulo_grid", "survo", "chain_sum")
    assert [len(fa.spec(f"reasoning-gym/{name}-v0").levels) for name in names] == [2, 0, 3, 2, 4]
