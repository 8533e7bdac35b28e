import asyncio
import copy
import logging
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
from adapter_play import play
from hostile_strings import HOSTILE_STRINGS
from team_play import begin

import forge_agents as fa
from forge_agents.envs import registry

if not registry._is_installed("verifiers"):
    pytest.skip("verifiers is not installed", allow_module_level=True)

from datasets import Dataset

import verifiers as vf
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_envs.adapters import verifiers_rollout
from forge_envs.adapters.verifiers import wrap


def rows(*entries):
    return Dataset.from_list(list(entries))


def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


async def brief(completion):
    await asyncio.sleep(0)
    return float(len(completion[-1]["content"]) < 10)


SUMS = rows(*({"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(5)))


def sums(funcs=(right, brief), weights=(1.0, 0.5), **options):
    rubric = vf.Rubric(funcs=list(funcs), weights=list(weights))
    return vf.SingleTurnEnv(dataset=SUMS, system_prompt="Add.", rubric=rubric, **options)


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["number"] = random.randrange(100)
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "wait":
            await asyncio.sleep(60)
        if said == "broken":
            raise KeyError("broken")
        if said == "sandbox":
            raise vf.InfraError("the sandbox is gone")
        if said == str(state["number"]):
            state["final_env_response"] = [vf.UserMessage(content="Yes!")]
            return state["final_env_response"]
        return [vf.UserMessage(content="lower" if said.isascii() and said.isdigit() else "A number, please.")]


def found(state):
    return float(state["final_env_response"] is not None)


def guess(**options):
    start = rows({"prompt": [{"role": "user", "content": "Guess."}], "answer": ""})
    return Guess(dataset=start, rubric=vf.Rubric(funcs=[found]), **({"max_turns": 6} | options))


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


def adding():
    def five(completion):
        return float(completion[-1]["content"] == "5")

    return vf.ToolEnv(tools=[add], dataset=SUMS, max_turns=4, rubric=vf.Rubric(funcs=[five]))


def played(env, *texts, seed=0):
    """Play texts in order. Returns the last reward and info."""
    env.reset(seed=seed)
    for text in texts:
        env.step(text)
    return env.rewards["agent"], env.infos["agent"]


def test_one_answer_gets_the_weighted_sum_of_the_rubric():
    env = begin(wrap(sums()))
    assert env.instructions("agent") == "Add." and env.observe("agent").endswith("?")
    number = int(env.observe("agent").split()[0])
    env.step(f" {2 * number} ")
    info = env.infos["agent"]
    assert env.rewards["agent"] == 1.5 and env.terminations["agent"] and info["answer"] == str(2 * number)
    assert info["metrics"]["right"] == 1.0 and info["metrics"]["brief"] == 1.0 and "error" not in info
    reward, info = played(env, "I do not know, sorry")
    assert reward == 0.0 and info["metrics"]["right"] == 0.0


def test_a_metric_cannot_take_the_place_of_the_reward():
    def reward(completion):
        return 0.25

    total, info = played(wrap(sums(funcs=(reward, brief), weights=(2.0, 1.0))), "4")
    assert total == 1.5 and info["metrics"]["reward"] == 0.25


def test_seeds_choose_rows_of_the_split():
    both = vf.SingleTurnEnv(dataset=SUMS, eval_dataset=rows({"question": "7?"}), rubric=vf.Rubric(funcs=[brief]))
    training, evaluation = wrap(both), wrap(both, split="eval")
    seen = set()
    for seed in range(30):
        training.reset(seed=seed)
        evaluation.reset(seed=seed)
        seen.add(training.observe("agent"))
        assert evaluation.observe("agent") == "7?"
    assert seen == set(SUMS["question"])


def test_evaluations_play_rows_that_training_does_not_play():
    many = rows(*({"question": f"{n}?"} for n in range(40)))
    own_eval = vf.SingleTurnEnv(dataset=many, eval_dataset=rows({"question": "Eval?"}), rubric=vf.Rubric(funcs=[brief]))
    for env, expected in ((vf.SingleTurnEnv(dataset=many, rubric=vf.Rubric(funcs=[brief])), 8), (own_eval, 1)):
        wrapped, seen = wrap(env), {}
        for start in (0, HELD_OUT_FROM):
            seen[start] = set()
            for seed in range(start, start + 40):
                wrapped.reset(seed=seed)
                seen[start].add(wrapped.observe("agent"))
        assert len(seen[HELD_OUT_FROM]) == expected and not seen[0] & seen[HELD_OUT_FROM]
        assert len(seen[0]) == (32 if expected == 8 else 40)


def test_a_game_goes_on_until_its_own_end():
    env = begin(wrap(guess(max_turns=-1)), 3)
    replies = []
    for number in range(100):
        env.step(str(number))
        replies.append(env.observe("agent"))
        if env.terminations["agent"]:
            break
    assert replies[-1] == "Yes!" and set(replies[:-1]) == {"lower"} and env.rewards["agent"] == 1.0
    assert env.infos["agent"]["stop_condition"] == "has_final_env_response"
    short = begin(wrap(guess(max_turns=2)), 3)
    short.step("no number")
    assert short.observe("agent") == "A number, please." and not short.terminations["agent"]
    short.step("no number")
    assert short.rewards["agent"] == 0.0 and short.infos["agent"]["stop_condition"] == "max_turns_reached"


def test_calls_reach_the_tools_and_results_come_back():
    env = begin(wrap(adding()))
    assert '"name": "add"' in env.instructions("agent") and "<tool_call>" in env.instructions("agent")
    env.step('I add. <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>')
    assert env.observe("agent") == "<tool_response>\n5\n</tool_response>"
    env.step('<tool_call>{"name": "subtract", "arguments": {}}</tool_call>')
    assert "subtract" in env.observe("agent") and not env.terminations["agent"]
    env.step("5")
    info = env.infos["agent"]
    assert env.rewards["agent"] == 1.0 and info["stop_condition"] == "no_tools_called"
    assert info["metrics"]["total_tool_calls"] == 2.0 and info["metrics"]["add_calls"] == 1.0


def test_episodes_run_within_an_event_loop_and_side_by_side():
    async def run():
        game = guess()
        envs = [wrap(game) for _ in range(20)]
        for env in envs:
            env.reset(seed=1)
        for turn in range(6):
            for place, env in enumerate(envs):
                assert not env.terminations["agent"]
                env.step("no number" if place % 2 else str(1000 + turn))
                assert turn == 5 or env.observe("agent") == ("A number, please." if place % 2 else "lower")
        return {env.infos["agent"]["stop_condition"] for env in envs}

    assert asyncio.run(run()) == {"max_turns_reached"}


def test_a_conversation_is_shown_role_by_role():
    shots = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    env = begin(wrap(sums(few_shot=shots)))
    assert env.observe("agent").startswith("[user]\n1 + 1?\n\n[assistant]\n2\n\n[user]\n")


def test_groups_route_each_row_to_its_environment():
    env = wrap(vf.EnvGroup([sums(), guess()], env_names=["sums", "guess"]))
    met = set()
    for seed in range(12):
        env.reset(seed=seed)
        met.add(env.observe("agent") == "Guess.")
        env.step("4")
        assert env.terminations["agent"] == (env.infos["agent"].get("stop_condition") is not None)
    assert met == {True, False}


@pytest.mark.parametrize("make", [sums, guess, adding])
def test_the_contract_is_kept(make):
    inside = make()
    assert fa.check_env(lambda: wrap(inside), level="adapter", episodes=4).ok


def test_global_generators_are_not_used():
    def choose(env, agent, rng):
        return str(rng.randrange(100))

    game = guess()
    random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    episode = play(wrap(game), 1, choose)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    random.seed(77)
    assert play(wrap(game), 1, choose) == episode


def test_a_fork_plays_on_alone():
    env = begin(wrap(guess()), 3)
    number = next(n for n in range(100) if _is(env, n))
    env.step("no number")
    fork = copy.deepcopy(env)
    fork.step(str(number))
    assert fork.rewards["agent"] == 1.0 and not env.terminations["agent"]
    env.step("no number")
    assert env.observe("agent") == "A number, please." and env.num_turns == fork.num_turns == 2


def _is(env, number):
    fork = env.fork()
    fork.step(str(number))
    fork.close()
    return fork.terminations["agent"]


@pytest.mark.parametrize(("text", "told"), [("broken", "KeyError: 'broken'"), ("wait", "gave no answer within 0.3 s")])
def test_an_exception_or_a_missed_deadline_is_data(text, told):
    env = begin(wrap(guess(), error_reward=-1.0))
    if text == "wait":
        env._rollout._timeout_s = 0.3  # of this answer alone
    started = time.monotonic()
    env.step(text)
    assert env.rewards["agent"] == -1.0 and env.terminations["agent"] and told in env.infos["agent"]["error"]
    assert time.monotonic() - started < 30
    env.reset(seed=0)
    env.step("no number")
    assert env.observe("agent") == "A number, please."


@pytest.mark.parametrize("prefix", ["", "[actor=<root>] [actor=<root>] "], ids=["plain", "with Monarch"])
def test_errors_that_the_library_scores_are_told(prefix, monkeypatch):
    def prefixed(record):
        record.msg = f"{prefix}{record.msg}"
        return True

    monkeypatch.setattr(verifiers_rollout._handler, "filters", [prefixed])
    _, info = played(wrap(guess()), "sandbox")
    assert info["stop_condition"] == "has_error" and info["error"] == "InfraError('the sandbox is gone')"

    def careless(completion):
        raise ValueError("no such key")

    reward, info = played(wrap(sums(funcs=(brief, careless), weights=(1.0, 1.0))), "4")
    assert reward == 1.0 and "careless: no such key" in info["error"]

    def nothing(completion):
        return float("nan")

    reward, info = played(wrap(sums(funcs=(nothing,), weights=(1.0,)), error_reward=-0.5), "4")
    assert reward == -0.5 and "score is nan" in info["error"]


def test_warnings_of_the_library_are_still_heard_once(capsys, monkeypatch):
    logger = logging.getLogger("verifiers")
    wrap(sums()).reset(seed=0)
    assert verifiers_rollout._handler in logger.handlers
    for others in ([], [logging.StreamHandler(sys.stderr)]):
        monkeypatch.setattr(logger, "handlers", [verifiers_rollout._handler, *others])
        logging.getLogger("verifiers.somewhere").warning("take care")
        assert capsys.readouterr().err.count("take care") == 1


def test_environment_without_requests_fails_at_reset():
    class Closed(Guess):
        async def setup_state(self, state):
            raise vf.InfraError("closed today")

    env = wrap(Closed(dataset=SUMS, rubric=vf.Rubric(funcs=[brief])))
    with pytest.raises(RuntimeError, match="closed today"):
        env.reset(seed=0)


def test_giving_an_episode_up_cleans_it_up():
    cleaned = []

    class Tidy(Guess):
        @vf.cleanup
        async def tidy(self, state):
            cleaned.append(state["number"])

    env = begin(begin(wrap(Tidy(dataset=SUMS, rubric=vf.Rubric(funcs=[brief])))), 1)
    assert len(cleaned) == 1
    env.close()
    assert len(cleaned) == 2
    env.reset(seed=2)
    del env
    deadline = time.monotonic() + 60
    while len(cleaned) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(cleaned) == 3


@pytest.mark.parametrize("make", [sums, guess, adding])
def test_hostile_texts_are_messages_like_others(make):
    env = begin(wrap(make()))
    for text in HOSTILE_STRINGS:
        env.step(text)
        assert env.observation_space("agent").contains(env.observe("agent"))
        assert "error" not in env.infos["agent"]
        if env.terminations["agent"]:
            env.reset(seed=0)
    env.close()


def test_a_parser_of_the_library_keeps_a_time_limit(monkeypatch):
    from forge_envs.adapters import patterns

    monkeypatch.setitem(patterns._LIMITS, "timeout", 0.2)
    parser = vf.XMLParser(["answer"])

    def right_tag(completion):
        return float(parser.parse_answer(completion) == "4")

    env = wrap(sums([right_tag], [1.0]))
    for text in ("<answer> 4 </answer>", "<answer>" + " " * 20_000):
        env.reset(seed=0)
        started = time.process_time()
        env.step(text)
        assert env.terminations["agent"]
        assert time.process_time() - started < 20  # `re` takes minutes
    env.close()


class Judge:
    """The part of an OpenAI client that a judge rubric uses."""

    def __init__(self):
        self.chat = self.completions = self
        self.asked = []

    async def create(self, model, messages, **options):
        self.asked.append(messages[0]["content"])
        word = type("Word", (), {"content": "yes"})
        return type("Answer", (), {"choices": [type("Choice", (), {"message": word})]})


def test_a_judge_needs_a_client(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    async def judged(judge, prompt, completion, answer):
        return float("yes" in await judge(prompt, completion, answer))

    rubric = vf.JudgeRubric()
    rubric.add_reward_func(judged)
    inside = vf.SingleTurnEnv(dataset=SUMS, rubric=rubric)
    with pytest.raises(ValueError, match="judge_client"):
        wrap(inside)
    client = Judge()
    assert played(wrap(inside, judge_client=client), "four")[0] == 1.0
    assert len(client.asked) == 1 and "four" in client.asked[0]


def test_what_cannot_be_wrapped_is_refused():
    def best(completions):
        return [1.0 for _ in completions]

    with pytest.raises(ValueError, match="group of rollouts"):
        wrap(sums(funcs=(brief, best)))
    with pytest.raises(TypeError, match="got Dataset"):
        wrap(SUMS)
    with pytest.raises(ValueError, match="split='test'"):
        wrap(sums(), split="test")


MODULE = """
import verifiers as vf
from datasets import Dataset

def load_environment(word="yes", judge=False):
    data = Dataset.from_list([{"question": f"Say {word}.", "answer": word}])
    def said(completion, answer):
        return float(completion[-1]["content"] == answer)
    rubric = vf.JudgeRubric() if judge else vf.Rubric(funcs=[said])
    return vf.SingleTurnEnv(dataset=data, rubric=rubric)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "say_it.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "say_it", raising=False)


def test_installed_modules_are_made_by_name(module):
    handler = signal.getsignal(signal.SIGTERM)
    env = fa.make("verifiers/say-it-v0", env_args={"word": "no"})
    assert signal.getsignal(signal.SIGTERM) is handler
    env.reset(seed=0)
    assert env.observe("agent") == "Say no."
    env.step("no")
    assert env.rewards["agent"] == 1.0
    assert fa.spec("verifiers/say_it").id == "verifiers/say-it-v0"
    again, other = fa.make("verifiers/say-it", env_args={"word": "no"}), fa.make("verifiers/say-it")
    assert again.unwrapped._env() is env.unwrapped._env() is not other.unwrapped._env()
    assert fa.check_env("verifiers/say-it-v0", episodes=2).level == "adapter"


def test_a_module_whose_judge_has_no_key_says_what_to_do(module, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="env_args, or set OPENAI_API_KEY"):
        fa.make("verifiers/say-it-v0", env_args={"judge": True})


def test_only_modules_with_an_environment_have_ids():
    for name in ("no-such-module", "json", "no such", "os.path"):
        with pytest.raises(fa.errors.UnknownIdError):
            fa.make(f"verifiers/{name}-v0")


def test_without_the_library_the_command_is_named(tmp_path, monkeypatch):
    (tmp_path / "a_mere_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not registry._is_installed("a_mere_folder") and registry._is_installed("verifiers")
    monkeypatch.setattr(registry, "_is_installed", lambda package: False)
    with pytest.raises(ImportError, match=r"verifiers/.*pip install 'forge-agents-rl\[verifiers\]'"):
        fa.make("verifiers/never-made-v0")


def test_code_that_blocks_costs_one_episode(monkeypatch):
    monkeypatch.setattr(verifiers_rollout, "_LATE_S", 0.2)

    released = threading.Event()

    class Blocking(Guess):
        async def env_response(self, messages, state, **kwargs):
            released.wait(60)  # holds its event loop, as careless code does
            return [vf.UserMessage(content="I slept.")]

    bystander = begin(wrap(guess()))
    env = begin(wrap(Blocking(dataset=SUMS, rubric=vf.Rubric(funcs=[brief]))))
    env._rollout._timeout_s = 0.1  # of this answer alone
    env.step("4")
    assert "blocked its event loop" in env.infos["agent"]["error"]
    env.reset(seed=0)
    assert env.observe("agent").endswith("?")
    threading.Timer(0.5, released.set).start()
    bystander.step("no number")
    assert bystander.observe("agent") == "A number, please." and released.is_set()
