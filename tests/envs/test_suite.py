import sys
from subprocess import run

import pytest

import forge_agents as fa
from forge_agents.envs import registry
from forge_agents.testing import check_env

CORE = ("forge/KuhnPoker-v0", "forge/Relay-v0", "forge/AlphabetSort-v0")


def test_the_core_suite_holds_our_environments():
    assert registry.suite("core-v1") == CORE
    assert set(CORE) <= set(fa.list_envs())
    assert "forge/KuhnPoker-v0" in fa.list_envs(tag="zero-sum") and "forge/Relay-v0" not in fa.list_envs(tag="zero-sum")


@pytest.mark.parametrize("env_id", CORE)
def test_our_environments_keep_the_contract(env_id):
    assert check_env(env_id, episodes=20).ok


@pytest.mark.parametrize("env_id", CORE)
def test_two_live_environments_do_not_disturb_each_other(env_id):
    def texts(env, seen):
        for agent in env.agent_iter(50):
            observation, _, terminated, truncated, info = env.last()
            seen.append((agent, str(observation), str(info)))
            yield
            env.step(None if terminated or truncated else "check 7 Anna")

    def start(seed):
        env, seen = fa.make(env_id), []
        env.reset(seed=seed)
        return texts(env, seen), seen

    playing, alone = start(3)
    list(playing)
    (playing, beside), (neighbour, _) = start(3), start(4)
    for _ in playing:
        next(neighbour, None)
    assert beside == alone and len(alone) > 1


def test_listing_imports_no_environment():
    ours = "[m for m in sys.modules if 'forge_envs.' in m and 'adapters' not in m]"
    code = f"import sys, forge_agents as fa; fa.list_envs(); print({ours})"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
