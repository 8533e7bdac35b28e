import pytest

import forge_agents as fa


@pytest.fixture
def example(load_example):
    return load_example("algorithms")


def test_demonstrations_earn_all_that_can_be_earned(example):
    for seed in range(2**30, 2**30 + 20):
        answers = [m["content"] for m in example.demonstration(seed)["messages"] if m["role"] == "assistant"]
        env = fa.make(example.ENV_ID, **example.ENV_ARGS)
        env.reset(seed=seed)
        earned = 0.0
        for answer in answers:
            env.step(answer)
            earned += env.rewards["sorter"]
        assert earned == len(answers) == 2


def test_demonstrations_come_from_seeds_that_no_run_plays(example):
    from forge_trainers.rl.tasks import TaskSampler

    played = {task.seed for step in range(20) for task in TaskSampler(example.ENV_ID).tasks(0, step, 8)}
    shown = {2**30 + 1000 * seed + number for seed in range(3) for number in range(example.NUM_CHATS)}
    assert not played & shown
    assert len({str(example.demonstration(seed)) for seed in sorted(shown)[:10]}) == 10
