"""Direct preference optimisation, the learner's real core in this process."""

import dataclasses

import pytest
import torch

import forge_agents as fa
from forge_agents.errors import HostError
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Episode, Trajectory, Turn
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.offline.data import read_pairs

BETA = 0.3


@pytest.fixture(autouse=True)
def starts(learner_here):
    return learner_here


@pytest.fixture
def trainer(tiny_llama, tmp_path):
    def trainer(name="run", *, lr=1e-3, learner=None, **settings):
        config = LearnerConfig(lr=lr, threads=1, compute_dtype="float32", **(learner or {}))
        settings = {"batch_size": 6, "beta": BETA, "learner": config, "seed": 3} | settings
        return fa.DPOTrainer(fa.Policy(str(tiny_llama), name="hero"), fa.DPOConfig(**settings), tmp_path / name)

    return trainer


def preferences(count, start=0):
    return [
        {"prompt": f"{i}?", "chosen": f"{i}!" + "a" * (i % 3), "rejected": "b" * (i % 5 + 1)}
        for i in range(start, start + count)
    ]


def hf_dpo(model, start, rows):
    """Mean loss of the pairs and the norm of its gradient, with transformers, pair by pair."""
    from transformers import AutoModelForCausalLM

    renderer = Renderer.of(start)
    policy, reference = (AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in (model, start))

    def logprob(hf, question, answer):
        prompt_ids, output = renderer.start("", question), renderer.answer(answer)
        logits = hf(torch.tensor([[*prompt_ids, *output]])).logits[0].double()
        return torch.log_softmax(logits, -1)[len(prompt_ids) - 1 : -1].gather(1, torch.tensor(output)[:, None]).sum()

    losses = []
    for row in rows:
        with torch.no_grad():
            old = [logprob(reference, row["prompt"], row[side]) for side in ("chosen", "rejected")]
        new = [logprob(policy, row["prompt"], row[side]) for side in ("chosen", "rejected")]
        losses.append(-torch.nn.functional.logsigmoid(BETA * ((new[0] - old[0]) - (new[1] - old[1]))))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = sum(float(p.grad.double().square().sum()) for p in policy.parameters()) ** 0.5
    return float(loss.detach()), norm


@pytest.mark.parametrize("room", [2048, 70])
def test_loss_and_gradient_equal_those_of_transformers(trainer, tiny_llama, tmp_path, room):
    rows = preferences(6)
    with trainer(learner={"max_tokens_per_microbatch": room}) as run:
        run.fit(rows, steps=2)
        run.save(tmp_path / "moved")
        first, _, third = run.fit(rows, steps=3).metrics
    loss, norm = hf_dpo(tmp_path / "moved", tiny_llama, rows)
    assert first["train/loss"] == pytest.approx(0.6931472, abs=1e-6)  # log 2: nothing has moved yet
    assert loss < 0.6
    assert third["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert third["learner/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_held_out_preferences_are_learned_and_the_control_stays(trainer):
    with trainer("learns", eval_share=0.25) as run:
        learned = run.fit(preferences(40), steps=8).metrics[-1]
    with trainer("control", lr=0.0, eval_share=0.25) as run:
        still = run.fit(preferences(40), steps=2).metrics[-1]
    assert learned["eval/accuracy"] > 0.9
    assert learned["eval/margin"] > 0.5
    assert still["eval/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert still["eval/margin"] == 0.0


def test_default_rate_is_that_of_preferences(tiny_llama, tmp_path, starts):
    policy, config = fa.Policy(str(tiny_llama), name="hero"), fa.DPOConfig(learner=LearnerConfig(threads=1))
    with fa.DPOTrainer(policy, config, tmp_path) as run:
        (row,) = run.fit(preferences(4), steps=1).metrics
    assert row["learner/lr"] == starts[0].core.config.lr == 5e-6


def test_a_resumed_run_compares_with_the_same_start_model(trainer, starts):
    def comparable(rows):
        return [{k: v for k, v in row.items() if k.startswith(("train/", "learner/grad"))} for row in rows]

    with trainer("whole") as run:
        whole = run.fit(preferences(20), steps=4).metrics
    with trainer("broken") as run:
        run.fit(preferences(20), steps=2)
    with trainer("broken") as run:
        broken = run.fit(preferences(20), steps=4).metrics
    assert comparable(broken) == comparable(whole)
    assert all(
        torch.equal(starts[-1].core.hf_state_dict(dtype=torch.float32)[name], value)
        for name, value in starts[0].core.hf_state_dict(dtype=torch.float32).items()
    )


def test_new_data_to_measure_restarts_the_learner(trainer, starts):
    with trainer() as run:
        run.fit(preferences(12), steps=2)
        result = run.fit(preferences(12), eval_dataset=preferences(4, start=50), steps=3).metrics
    assert len(starts) == 2
    assert [row["step"] for row in result] == [1, 2, 3]
    assert result[-1]["eval/margin"] != 0.0


# ---- what is read


def pairs(data, renderer, **settings):
    return read_pairs(data, renderer, fa.DPOConfig(**settings), policy="hero", room=100)


def answers(streams):
    return [bytes(token for token in stream.ids[stream.mask].tolist() if token < 256).decode() for stream in streams]


def test_rows_may_repeat_their_prompt(renderer):
    requests = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}]
    more = {"role": "user", "content": "two"}
    whole = {
        side: [*requests, more, {"role": "assistant", "content": word}]
        for side, word in (("chosen", "good"), ("rejected", "bad"))
    }
    apart = {"prompt": [*requests, more], "chosen": "good", "rejected": "bad"}
    first, second = pairs([whole, apart], renderer).items
    assert first.content == second.content
    assert answers(first.chosen) == ["good"]
    assert answers(first.rejected) == ["bad"]


def episode(word, reward, *, seed=0):
    turn = Turn(agent="player_0", index=0, observation="look", action=word, reward=reward, policy="hero")
    own = Trajectory(agent="player_0", policy="hero", turns=(turn,), env_id="e", seed=seed)
    other = dataclasses.replace(own, agent="player_1", policy="rival")
    return Episode(env_id="e", seed=seed, trajectories={"player_0": own, "player_1": other})


def test_best_episode_of_a_group_is_preferred_to_the_worst(renderer):
    played = [episode("b", 0.5), episode("c", 0.9), episode("a", 0.1), episode("x", 1.0, seed=1)]
    result = pairs([*played, episode("y", 1.0, seed=1)], renderer)
    (pair,) = result.items
    assert (answers(pair.chosen), answers(pair.rejected)) == (["c"], ["a"])
    assert result.counts == {"learned": 1, "groups without a difference": 1, "rendered from text": 2}
    with pytest.raises(ValueError, match="nothing is left to learn.*2 groups without a difference"):
        pairs([*played, episode("y", 1.0, seed=1)], renderer, min_difference=0.8)


QUESTION = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, "row 0 has the keys.*Did you mean 'rejected'"),
        ({"prompt": "a", "chosen": QUESTION, "rejected": "b"}, "row 0: 'chosen' has no assistant message of its own"),
    ],
)
def test_a_malformed_pair_is_named(renderer, row, message):
    with pytest.raises(ValueError, match=message):
        pairs([row], renderer)


def test_a_pair_that_is_too_long_is_named_dropped_and_counted(renderer, caplog):
    long = {"prompt": "a", "chosen": "b" * 99, "rejected": "c"}
    result = pairs([{"prompt": "a", "chosen": "b", "rejected": "c"}, long], renderer)
    assert result.counts == {"learned": 1, "too long": 1} and "row 1, chosen has 1" in caplog.text
    with pytest.raises(ValueError, match=r"row 0, chosen has 1.. tokens, the learner takes at most 100"):
        pairs([long], renderer, too_long="error")


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"min_difference": -1.0}, {"batch_size": 0}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        fa.DPOConfig(**settings)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_memory_that_is_expected_counts_the_longest_sample(trainer, tiny_llama, tmp_path, monkeypatch, kind):
    counted = []

    def place_here(meshes):
        counted.extend(each.learner.max_sample_tokens for each in meshes)
        raise HostError("too long")

    monkeypatch.setattr("forge_trainers.offline.trainer.place_here", place_here)
    rows = [{"prompt": "1?", "chosen": "a", "rejected": "b"}, {"prompt": "2?", "chosen": "c", "rejected": "d" * 200}]
    if kind == "dpo":
        runs, output = trainer(), "d" * 200
    else:
        runs, output = fa.SFTTrainer(fa.Policy(str(tiny_llama), name="hero"), out_dir=tmp_path / "sft"), "d" * 300
        rows = [{"prompt": row["prompt"], "completion": "d" * 300} for row in rows]
    with runs, pytest.raises(HostError, match="too long"):
        runs.fit(rows)
    renderer = Renderer.of(tiny_llama)
    assert counted == [len(renderer.start("", "2?")) + len(renderer.answer(output))]
