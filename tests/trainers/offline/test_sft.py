"""Supervised fine-tuning, the learner's real core in this process: what it learns, measures, saves and continues."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import yaml

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.errors import RunFolderError
from forge_agents.rollout.rendering import Renderer
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.offline import trainer as offline
from forge_trainers.offline.config import WarmStart


@pytest.fixture(autouse=True)
def starts(learner_here):
    """Counts the learners started, which are in this process."""
    return learner_here


@pytest.fixture
def trainer(tiny_llama, tmp_path):
    def trainer(name="run", *, model=tiny_llama, lr=3e-3, learner=None, **settings):
        config = LearnerConfig(lr=lr, threads=1, compute_dtype="float32", **(learner or {}))
        settings = {"batch_size": 8, "learner": config, "seed": 3} | settings
        return fa.SFTTrainer(fa.Policy(str(model), name="hero"), fa.SFTConfig(**settings), tmp_path / name)

    return trainer


def chats(count, start=0):
    def chat(i):
        question, answer = {"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}{i}!"}
        return {"messages": [question, answer]}

    return [chat(i) for i in range(start, start + count)]


def ragged(count):
    """Conversations of different length, some with two answers."""
    rows = chats(count)
    for i, row in enumerate(rows[::2]):
        again = [{"role": "user", "content": "x" * i}, {"role": "assistant", "content": "yz" * (i + 1)}]
        row["messages"] = row["messages"] + again
    return rows


def hf_loss(model, rows):
    """Mean cross-entropy of the answers' tokens, conversation by conversation, with transformers, and its gradient."""
    from transformers import AutoModelForCausalLM

    hf, renderer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), Renderer.of(model)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        ids, labels, output = (), [], ()
        for question, answer in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            text, prompt = question["content"], ids[: len(ids) - len(output)]
            prompt_ids = renderer.extend(prompt, output, text) if ids else renderer.start("", text)
            output = renderer.answer(answer["content"])
            labels += [-100] * (len(prompt_ids) - len(ids)) + list(output)
            ids = (*prompt_ids, *output)
        ids, labels = torch.tensor(ids), torch.tensor(labels)
        logits = hf(ids[None]).logits[0, :-1].double()
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        tokens += int((labels >= 0).sum())
    loss = total / tokens
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in hf.parameters()))
    return float(loss.detach()), norm, tokens


@pytest.mark.parametrize("room", [2048, 80])
def test_the_loss_and_its_gradient_equal_those_of_transformers(trainer, tiny_llama, room):
    rows = ragged(12)
    with trainer(batch_size=12, lr=0.0, learner={"max_tokens_per_microbatch": room}) as run:
        measured = run.evaluate(rows)
        (row,) = run.fit(rows, steps=1).metrics
    loss, norm, tokens = hf_loss(tiny_llama, rows)
    assert row["learner/microbatches"] > (2 if room == 80 else 0)
    assert not {name for name in row if "ratio" in name or "clip" in name or "gap" in name or "kl" in name}
    assert row["train/loss"] == pytest.approx(loss, abs=1e-5)
    assert row["learner/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (row["loss_tokens"], measured.tokens) == (tokens, tokens)
    assert measured.loss == pytest.approx(loss, abs=1e-5)
    assert measured.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_held_out_perplexity_falls_and_the_control_stays(trainer, tmp_path, capsys):
    with trainer("learns", eval_share=0.25, eval_every=5) as run:
        start = run.evaluate(chats(64)).perplexity
        result = run.fit(chats(64), steps=10)
        exported = run.evaluate(chats(64)).loss
    assert "data: 48 learned, 16 held out\n" in capsys.readouterr().out
    assert "learned: 48" in (result.out_dir / "config.yaml").read_text()
    with trainer("control", lr=0.0, eval_share=0.25, eval_every=5) as run:
        still = run.fit(chats(64), steps=6).metrics
    measured = {row["step"]: row["eval/perplexity"] for row in result.metrics if "eval/perplexity" in row}
    assert list(measured) == [5, 10]
    assert measured[10] < measured[5] < 0.5 * start
    unchanged = [row["eval/loss"] for row in still if "eval/loss" in row]
    assert len(unchanged) == 2
    assert unchanged[0] == unchanged[1]
    assert {"config.yaml", "metrics.jsonl", "loss.png", "tensorboard", "export", "checkpoints"} <= {
        path.name for path in result.out_dir.iterdir()
    }
    with trainer("exported", model=result.export) as run:  # as GRPO would start from it
        assert run.evaluate(chats(64)).loss == pytest.approx(exported, abs=1e-5)


@pytest.mark.parametrize("change", [{"batch_size": 4}, {"seed": 1}, {"eval_share": 0.25}])
def test_resume_refuses_settings_that_change_the_rows_of_a_step(trainer, change):
    with trainer("run", checkpoint_every=1) as run:
        run.fit(ragged(20), steps=1)
    with (
        trainer("run", **change) as run,
        pytest.raises(RunFolderError, match=f"trainer.{min(change)} is .* cannot change when a run is resumed"),
    ):
        run.fit(ragged(20), steps=2)


def test_resume_tells_which_settings_have_changed(trainer, capsys):
    with trainer("run", checkpoint_every=1) as run:
        run.fit(ragged(20), steps=1)
    with trainer("run", lr=3e-4) as run:
        run.fit(ragged(20), eval_dataset=chats(4), steps=2)
    with trainer("run") as run:
        run.fit(ragged(20), eval_dataset=chats(5), steps=3)
    first, second = (line for line in capsys.readouterr().out.splitlines() if "settings have changed" in line)
    assert "steps: 1 -> 2; trainer.learner.lr:" in first and "eval_dataset: None -> " in first
    assert re.search("eval_dataset: [0-9a-f]{64} -> [0-9a-f]{64}", second)


def test_a_resumed_run_is_bit_equal_to_one_without_a_break(trainer):
    def comparable(rows):
        fast = ("time/", "tokens_per_s")
        return [
            {k: v for k, v in row.items() if not k.startswith(fast) and not k.endswith(("_s", "_bytes", "mfu"))}
            for row in rows
        ]

    rows = ragged(20)
    with trainer("whole", learner={"warmup_steps": 3}) as run:
        whole = run.fit(rows, steps=6)
        expected = run._learner.core.hf_state_dict(dtype=torch.float32)
    with trainer("broken", learner={"warmup_steps": 3}, checkpoint_every=2) as run:
        run.fit(rows, steps=4)
    with trainer("broken", learner={"warmup_steps": 3}) as run:
        broken = run.fit(rows, steps=6)
        result = run._learner.core.hf_state_dict(dtype=torch.float32)
    assert comparable(broken.metrics) == comparable(whole.metrics)
    assert [row["step"] for row in broken.metrics] == list(range(1, 7))
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_a_run_is_not_continued_on_other_data(trainer):
    with trainer() as run:
        run.fit(chats(8), steps=1)
    with trainer() as run, pytest.raises(RunFolderError, match="holds a run on other data"):
        run.fit(chats(8, start=1), steps=2)
    (run.out_dir / "data.sha256").write_bytes(b"\xff")  # damaged
    with trainer() as run, pytest.raises(RunFolderError, match="holds a run on other data"):
        run.fit(chats(8), steps=2)


def test_epoch_has_every_row_once_in_a_new_order():
    config = fa.SFTConfig(batch_size=4, seed=5)
    steps = [offline.rows_of(step, 10, config) for step in range(5)]
    flat = [row for step in steps for row in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:] != list(range(10))
    assert offline.rows_of(3, 10, config) == steps[3]
    assert offline.rows_of(0, 10, fa.SFTConfig(batch_size=4, seed=6)) != steps[0]
    assert sorted(offline.rows_of(0, 2, config)) == [0, 0, 1, 1]


def test_epochs_give_the_number_of_steps(trainer):
    with trainer(lr=0.0) as run:
        rows = run.fit(chats(12), epochs=2).metrics
    assert [row["epoch"] for row in rows] == pytest.approx([8 / 12, 16 / 12, 2.0])


def test_held_out_rows_are_never_trained_on():
    items = list(range(40))
    learned, held_out = offline.split(items, fa.SFTConfig(eval_share=0.25, seed=1))
    assert len(held_out) == 10
    assert sorted(learned + held_out) == items
    assert held_out != offline.split(items, fa.SFTConfig(eval_share=0.25, seed=2))[1]
    with pytest.raises(ValueError, match="eval_share=0.1 of 3 items is 0"):
        offline.split(items[:3], fa.SFTConfig(eval_share=0.1))


def test_held_out_rows_that_are_also_learned_are_counted(trainer, capsys, caplog):
    with trainer(lr=0.0) as run:
        run.fit(chats(8), eval_dataset=chats(8, start=5), steps=1)
    assert "data: 8 learned, 8 held out, 3 held out and learned\n" in capsys.readouterr().out
    assert "3 of 8 held-out items are equal to training items" in caplog.text


def test_bad_input_ends_before_a_learner_starts(trainer, tmp_path, starts):
    with trainer() as run:
        with pytest.raises(ValueError, match="the dataset is empty"):
            run.fit([])
        with pytest.raises(ValueError, match="row 1 has no assistant message"):
            run.fit([*chats(1), {"messages": [{"role": "user", "content": "?"}]}])
        long = {"messages": [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y"}]}
        with pytest.raises(ValueError, match=r"nothing is left to learn \(1 too long\)"):
            run.fit([long])
        with pytest.raises(ValueError, match="steps=0 trains nothing"):
            run.fit(chats(1), steps=0)
        with pytest.raises(RuntimeError, match="Call fit first"):
            run.save(tmp_path / "none")
    with (
        trainer(max_sample_tokens=9000, too_long="error") as run,
        pytest.raises(ValueError, match="at most 4096"),  # the model's context
    ):
        run.fit([long])
    with trainer(eval_share=0.5) as run, pytest.raises(ValueError, match="Give one"):
        run.fit(chats(4), eval_dataset=chats(4))
    with pytest.raises(TypeError, match=r"policy must be Policy\(\.\.\.\), got str"):
        fa.SFTTrainer("hero")
    assert starts == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"eval_share": 1.0}, "eval_share=1.0 is outside"),
        ({"eval_every": -1}, "eval_every=-1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": 2**32}, "seed=4294967296 must be at least 0 and below"),
        ({"best_per_group": 0}, "best_per_group=0 leaves nothing"),
        ({"too_long": "cut"}, "too_long='cut'. Choose one of 'error', 'drop'"),
        ({"stage_timeout_s": 0.0}, "every wait has a timeout"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fa.SFTConfig(**settings)
    with pytest.raises(TypeError, match="min_reward='1e-1' is a text"):  # as YAML reads it
        fa.SFTConfig(min_reward="1e-1")


def yaml_of(tmp_path, tiny_llama, *extra):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats(8)))
    file = tmp_path / "sft.yaml"
    lines = [
        f"policy: {{model: {tiny_llama}, name: hero}}",
        f"data: {data}",
        "epochs: 2",
        f"out_dir: {tmp_path / 'run'}",
        "trainer: {batch_size: 4, learner: {lr: 1.0e-3, threads: 1, compute_dtype: float32}}",
    ]
    file.write_text("\n".join([*lines, *extra]) + "\n")
    return file


def test_the_command_line_trains_from_a_file(tiny_llama, tmp_path, capsys):
    assert cli.main(["sft", str(yaml_of(tmp_path, tiny_llama)), "--steps", "3"]) == 0
    assert f"3 steps are in {tmp_path / 'run'}" in capsys.readouterr().out
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_command_line_suggests_known_settings(tiny_llama, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["sft", str(yaml_of(tmp_path, tiny_llama, "epoch: 2"))])
    assert "Did you mean 'epochs'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["sft", "--help"])
    assert "--trainer.min_reward" in capsys.readouterr().out


def test_one_file_warms_up_and_then_plays(tiny_llama, tiny_qwen3, tmp_path, starts):
    from forge_agents.cli.config import parse

    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats(8)))
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
env: forge/Relay-v0
policies: {{hero: {{model: {tiny_llama}}}, rival: {{model: {tiny_llama}}}}}
policy_mapping: {{a: hero, b: rival}}
out_dir: {tmp_path / "run"}
warm_start:
  hero: {{data: {data}, steps: 2, trainer: {{batch_size: 4, learner: {{lr: 0.001, threads: 1}}}}}}
"""
    )
    run = parse(fa.RunConfig, [str(file)], prog="train", description="")
    assert run.warmed_up(train=False) == run
    warm = run.warmed_up()
    assert warm.policies["hero"].model == str(tmp_path / "run" / "warm-start" / "hero" / "export")
    assert warm.policies["rival"] == run.policies["rival"]
    assert warm.players["a"].model == warm.policies["hero"].model
    assert run.warmed_up(train=False) == run.warmed_up() == warm  # the second time nothing is learned again
    assert len(starts) == 1
    written = file.read_text()
    for old, new, key in (
        ("steps: 2", "steps: 3", r"warm_start\.hero\.steps was 2 .* and is 3"),
        ("lr: 0.001", "lr: 0.002", r"warm_start\.hero\.trainer\.learner\.lr was 0\.001"),
        (f"hero: {{model: {tiny_llama}}}", f"hero: {{model: {tiny_qwen3}}}", r"policies\.hero\.model was"),
    ):
        file.write_text(written.replace(old, new, 1))
        changed = parse(fa.RunConfig, [str(file)], prog="train", description="")
        with pytest.raises(RunFolderError, match=key + ".* set it back, or choose another out_dir"):
            changed.warmed_up()
    file.write_text(written.replace("batch_size: 4", "batch_size: 4, tracker: mlflow, checkpoint_every: 7"))
    assert parse(fa.RunConfig, [str(file)], prog="train", description="").warmed_up().policies == warm.policies
    data.write_text(data.read_text() * 2)
    with pytest.raises(RunFolderError, match=r"warm_start\.hero\.data was"):
        run.warmed_up()
    (tmp_path / "run" / "warm-start" / "hero" / "warm-start.json").unlink()  # an earlier version wrote none
    assert run.warmed_up() == warm
    file.write_text(written.replace("  hero: {data", "  heroo: {data"))
    with pytest.raises(SystemExit):
        parse(fa.RunConfig, [str(file)], prog="train", description="")


@pytest.fixture
def taught(monkeypatch):
    """Arguments of `fit` by the policy's name. Nothing is learned."""
    result = {}

    def fit(self, dataset, **_):
        result[self.policy.name] = dataset
        return SimpleNamespace(steps=0, out_dir=self.out_dir, curve="", export="")

    monkeypatch.setattr(fa.SFTTrainer, "fit", fit)
    return result


def test_a_file_and_the_command_line_take_games_of_an_oracle(tiny_llama, tmp_path, taught, capsys):
    words = ["--policy.model", str(tiny_llama), "--policy.name", "hero", "--out_dir", str(tmp_path)]
    assert cli.main(["sft", "--data", "forge/Relay-v0@1", "--games", "3", "--trainer.seed", "5", *words]) == 0
    shown = fa.demonstrations("forge/Relay-v0@1", 3, seed=5)
    assert [game.turns for game in taught["hero"]] == [game.turns for game in shown]
    assert cli.main(["sft", "--data", "forge/Debate-v0", "--games", "3", *words]) == 1
    assert "forge/Debate-v0 has no oracle" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["sft", "--data", "forge/Relay-v0", "--games", "0", *words])
    assert "games=0 shows nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["sft", "--data", "chats.jsonl", "--env_args.max_number", "9", *words])
    assert "Set their number with games" in capsys.readouterr().err


def test_warm_start_imitates_the_agents_of_the_policy(tiny_llama, tmp_path, taught):
    def run(**changed):
        model = fa.Policy(str(tiny_llama))
        plan = {"env": "forge/Codewords-v0@3", "policies": {"one": model, "two": model}, "out_dir": str(tmp_path),
                "policy_mapping": {"master": "one", "guesser": "two"}}  # fmt: skip
        return fa.RunConfig(**plan | changed)

    games = WarmStart(data="forge/Codewords-v0@1", games=2, env_args={"others": 5})
    run(warm_start={"one": games, "two": WarmStart(data="forge/Relay-v0", games=1)}).warmed_up()
    assert [list(game.trajectories) for game in taught["one"]] == [["master"]] * 2
    assert {game.env_id for game in taught["one"]} == {"forge/Codewords-v0@1"}
    assert list(taught["two"][0].trajectories) == ["asker", "answerer"], "another game's seats are all imitated"
    taught.clear()
    for wrong in (
        run(warm_start={"one": games, "two": WarmStart(data="forge/Debate-v0", games=1)}),
        run(
            env="forge/Debate-v0",
            policy_mapping={"pro": "one", "con": "two", "judge": "oracle"},
            warm_start={"one": games},
        ),
    ):
        with pytest.raises(ValueError, match="forge/Debate-v0 has no oracle"):
            wrong.warmed_up()
    assert not taught, "it is told before anything is learned"


@pytest.mark.parametrize(("lora", "rate"), [(None, 5e-5), (fa.LoRA(rank=4), 5e-4)])
def test_default_rate_is_used_shown_and_recorded(tiny_llama, tmp_path, capsys, lora, rate):
    policy = fa.Policy(str(tiny_llama), name="hero", lora=lora)
    config = fa.SFTConfig(batch_size=4, learner=LearnerConfig(threads=1))
    with fa.SFTTrainer(policy, config, tmp_path) as run:
        (row,) = run.fit(chats(4), steps=1).metrics
    assert row["learner/lr"] == rate
    assert f"lr {rate:g}, the default for" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["learner"]["lr"] == rate


def test_rate_that_cannot_move_the_weights_is_warned_of(tiny_models, tmp_path, capsys):
    policy = fa.Policy(str(tiny_models(family="llama", dtype="bfloat16")), name="hero")
    config = fa.SFTConfig(batch_size=4, learner=LearnerConfig(lr=1e-9, threads=1))
    with fa.SFTTrainer(policy, config, tmp_path) as run:
        run.fit(chats(4), steps=1)
    assert "lr=1e-09 is too low to train all weights" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"num_minibatches": 2}])
def test_several_optimizer_steps_per_batch_are_for_rollouts(settings):
    for kind in (fa.SFTConfig, fa.DPOConfig):
        with pytest.raises(ValueError, match="are for batches of rollouts. Here set epochs of fit, and batch_size"):
            kind(learner=LearnerConfig(**settings))
