import copy
import pickle
import re
import subprocess
import sys
import warnings

import pytest
from plain_env import Plain
from refusals import raises

import forge_agents as fa
from forge_agents.envs import registry
from forge_agents.envs.spec import split_id
from forge_agents.errors import ForgeError, UnknownIdError

pytestmark = pytest.mark.usefixtures("own_registry")


class Guess(Plain):
    def __init__(self, top=3):
        super().__init__()
        self.top = top

    def setup(self, rng):
        self.number = int(rng.integers(self.top))

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: float(action == str(self.number))})


def test_a_decorated_class_is_made_with_its_spec_and_defaults():
    assert fa.register("t/Guess-v0", max_turns=4, tags=("1p",), top=7)(Guess) is Guess
    env = fa.make("t/Guess-v0")
    assert type(env) is Guess and env.top == 7 and env.max_turns == 4
    assert (env.spec.id, env.spec.tags, env.spec.version, env.spec.name) == ("t/Guess-v0", ("1p",), 0, "t/Guess")
    assert fa.make("t/Guess-v0", top=2).spec.kwargs == {"top": 2}
    assert fa.spec("t/Guess-v0").kwargs == {"top": 7}
    assert Guess().spec.max_turns == 4, "a class made directly knows its limit"


def test_making_an_environment_again_parses_no_id():
    """It compares the version with those of all ids, of which installed libraries have hundreds."""
    fa.make("forge/KuhnPoker-v0")
    misses = split_id.cache_info().misses
    fa.make("forge/KuhnPoker-v0")
    assert split_id.cache_info().misses == misses


def test_max_turns_of_make_wins():
    fa.register("t/Guess-v0", entry_point=Guess, max_turns=4)
    env = fa.make("t/Guess-v0", max_turns=1)
    env.reset(seed=0)
    env.step("x")
    assert env.truncations == {"a": True} and env.spec.max_turns == 1


@pytest.mark.parametrize(("entry_point", "kind"), [(lambda: None, "NoneType"), (dict, "dict")])
@pytest.mark.parametrize("max_turns", [None, 3])
def test_entry_point_that_makes_no_environment_is_named(entry_point, kind, max_turns):
    fa.register("t/Nothing-v0", entry_point=entry_point, max_turns=max_turns)
    raises(TypeError, rf"t/Nothing-v0 made a {kind}, which is not a PettingZoo environment", fa.make, "t/Nothing-v0")


def test_a_string_entry_point_is_imported_on_make_only():
    fa.register("t/Late-v0", entry_point="no_such_module:Env")
    assert "t/Late-v0" in fa.list_envs()
    raises(ModuleNotFoundError, "no_such_module", fa.make, "t/Late-v0")
    fa.register("t/Wrong-v0", entry_point="forge_envs.teams.relay:Rely")
    raises(ForgeError, "Did you mean 'Relay'", fa.make, "t/Wrong-v0")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("forge/KuhnPokr-v0", "forge/KuhnPoker-v0"),
        ("kuhnpoker", "forge/KuhnPoker-v0"),
        ("forge/relay-v0", "forge/Relay-v0"),
        ("Relay-v0", "forge/Relay-v0"),
        ("forge/Relay-v9", "forge/Relay-v0"),
    ],
)
def test_unknown_ids_suggest_near_ones(wrong, near):
    raises(UnknownIdError, near, fa.make, wrong)
    with pytest.raises(KeyError):
        fa.spec(wrong)


def test_id_without_version_is_the_newest_and_old_ones_warn():
    for version in (2, 10, 9):
        fa.register(f"t/Guess-v{version}", Guess)
    assert fa.spec("t/Guess").version == 10
    with pytest.warns(UserWarning, match="t/Guess-v9 is outdated: t/Guess-v10 exists"):
        fa.make("t/Guess-v9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fa.make("t/Guess").spec.version == 10


@pytest.mark.parametrize(
    "bad", ["Guess", "Guess-v0", "t/Guess", "t/Gu ess-v0", "t/Guess-v", "/Guess-v0", "t/a/b-v0", ""]
)
def test_malformed_ids_are_refused(bad):
    raises(ValueError, "namespace/Name-vN", fa.register, bad, entry_point=Guess)


def test_taken_id_is_refused_unless_the_class_has_the_same_name():
    fa.register("t/Guess-v0", entry_point=Guess)
    raises(ValueError, r"t/Guess-v1", fa.register, "t/Guess-v0", entry_point="other:Guess")
    again = type("Guess", (Guess,), {"__module__": Guess.__module__, "__qualname__": "Guess"})
    fa.register("t/Guess-v0")(again)
    assert type(fa.make("t/Guess-v0")) is again
    fa.register("t/Guess-v0", entry_point=f"{Guess.__module__}:Guess")


def test_arguments_that_the_class_does_not_take_are_named():
    fa.register("t/Guess-v0", entry_point=Guess)
    raises(TypeError, r"t/Guess-v0: .*'topp'.*It takes: top.*Did you mean 'top'", fa.make, "t/Guess-v0", topp=1)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0])
def test_turn_limits_are_positive_integers(bad):
    raises(ValueError, "max_turns", fa.register, "t/Guess-v0", entry_point=Guess, max_turns=bad)


def test_specs_travel():
    fa.register("t/Guess-v0", entry_point="forge_envs.teams.relay:Relay", max_number=4)
    spec = fa.make("t/Guess-v0").spec
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)
    assert len({spec, fa.spec("t/Guess-v0")}) == 1


def test_suites_keep_their_order_and_know_their_members():
    fa.register_suite("t-suite", ["forge/Relay-v0", "forge/KuhnPoker-v0"])
    assert registry.suite("t-suite") == ("forge/Relay-v0", "forge/KuhnPoker-v0") and "t-suite" in fa.list_suites()
    fa.register_suite("t-suite", ["forge/Relay-v0", "forge/KuhnPoker-v0"])
    raises(ValueError, "already", fa.register_suite, "t-suite", ["forge/Relay-v0"])
    raises(UnknownIdError, "core-v1", registry.suite, "core-v2")
    fa.register_suite("t-broken", ["t/Missing-v0"])
    raises(UnknownIdError, "t/Missing-v0", registry.suite, "t-broken")
    for bad in ([], ["forge/Relay-v0"] * 2, ["forge/Relay"]):
        raises(ValueError, "suite|namespace", fa.register_suite, "t-bad", bad)


def test_broken_plugin_is_reported_and_the_others_load(monkeypatch):
    class Point:
        def __init__(self, name, load):
            self.name, self.value, self.load = name, "somewhere", load

    def broken():
        raise RuntimeError("no licence")

    good = Point("good", lambda: lambda: fa.register("t/Plugin-v0", entry_point=Guess))
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [Point("bad", broken), good])
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "_broken_plugins", {})
    with pytest.warns(RuntimeWarning, match="'bad'.*no licence"):
        assert "t/Plugin-v0" in fa.list_envs()
    raises(UnknownIdError, "Plugin 'bad' failed to load: RuntimeError: no licence", fa.make, "t/Nothing-v0")


def test_registering_loads_neither_plugins_nor_pettingzoo():
    code = (
        "import sys; from forge_agents.envs import registry; registry.register('t/X-v0', entry_point='a:B');"
        "print([m for m in ('forge_envs', 'pettingzoo', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("claim", "refusal"),
    [
        ("fa.register('forge/KuhnPoker-v0', entry_point='a:B')", "already forge_envs.* e.g. my/KuhnPoker-v0"),
        ("fa.register_suite('core-v1', ['t/X-v0'])", "suite 'core-v1' is already registered with forge/.*episodes=32"),
    ],
)
def test_names_of_a_plugin_that_is_not_yet_loaded_are_refused_and_the_plugin_loads(claim, refusal):
    code = (
        f"import forge_agents as fa\ntry:\n    {claim}\nexcept ValueError as error:\n    print(error)\n"
        "print(fa.make('forge/Relay-v0'))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    refused, made = done.stdout.splitlines()
    assert re.search(refusal, refused) and made == "forge/Relay-v0"
