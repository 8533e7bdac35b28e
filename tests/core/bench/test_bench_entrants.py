"""Players as text: short forms, folders of runs, and their names."""

import pytest
from bench_helpers import exported
from refusals import raises

import forge_agents as fa
from forge_agents import safe_yaml
from forge_agents.bench.entrants import read_player, short_names
from forge_agents.bench.plan import BenchConfig
from forge_agents.cli.play import PlayConfig


def test_players_from_text():
    assert read_player("random") == fa.Random() and read_player("human") == fa.Human()
    endpoint = read_player("http://127.0.0.1:1/v1#some-model", fa.Sampling(temperature=0))
    assert (endpoint.url, endpoint.model, endpoint.sampling.temperature) == ("http://127.0.0.1:1/v1", "some-model", 0)
    assert read_player("smollm2-135m-instruct") == fa.Policy("smollm2-135m-instruct")
    assert read_player("textwrap:dedent").fn("  x") == "x"


def test_run_folder_is_its_exported_players(tmp_path):
    one, team = exported(tmp_path / "one", "export"), exported(tmp_path / "team", "export/asker", "export/answerer")
    assert read_player(one) == read_player(f"{one}/export") == fa.Policy(f"{one}/export")
    raises(ValueError, r"has 2 models, and .*config.yaml does not say which agents they act", read_player, team)
    seats = {"player_0": "asker", "player_1": "answerer", "player_2": "frozen", "player_3": "asker"}
    exported(tmp_path / "team", policy_mapping=seats)
    result = read_player(team, fa.Sampling(max_tokens=9))
    models = {agent: policy.model for agent, policy in result.policies.items()}
    assert models == {agent: f"{team}/export/{name}" for agent, name in seats.items() if name != "frozen"}
    assert all(policy.sampling.max_tokens == 9 for policy in result.policies.values())
    assert read_player(f"{team}/export", fa.Sampling(max_tokens=9)) == result
    assert read_player(f"{team}/export/asker") == fa.Policy(f"{team}/export/asker")
    checkpoint = exported(tmp_path / "team/export-step-000002", "asker", "answerer")
    assert read_player(checkpoint).policies["player_1"].model == f"{checkpoint}/answerer"


def test_exported_model_reads_the_prompts_of_its_training(tmp_path):
    newest = {"thinking": "off", "keep_reasoning": "turn", "context": "newest"}
    rows = {"a": {**newest, "trainable": True, "constrain_actions": True}, "frozen": {"context": "window"}}
    one = exported(tmp_path / "one", "export", "base", "export-step-000004", policies=rows)
    sft = exported(tmp_path / "sft", "export", policy=rows["a"])
    rows["b"] = {"context": "summarize", "trainable": True}
    team = exported(tmp_path / "team", "export/b", policies=rows, policy_mapping={"player_0": "b"})
    for run in (one, sft):
        export = f"{run}/export"
        assert read_player(run) == read_player(export) == fa.Policy(export, **newest)
        assert PlayConfig(env="e", model=export).other == fa.Policy(export, name="model", trainable=False, **newest)
    assert read_player(f"{one}/export-step-000004").context == "newest"
    assert read_player(f"{one}/base").context == "end"
    expected = fa.Policy(f"{team}/export/b", context="summarize")
    assert read_player(team).policies == {"player_0": expected} and read_player(f"{team}/export/b") == expected


def test_settings_of_a_run_are_read_once_for_all_its_agents(tmp_path, monkeypatch):
    read, texts = safe_yaml.read_stream, []

    def counted(stream, *, name):
        texts.append(name)
        return read(stream, name=name)

    monkeypatch.setattr(safe_yaml, "read_stream", counted)
    for context in ("newest", "window"):  # a changed file is read again
        mapping = {f"player_{number}": "p" for number in range(300)}
        rows = {"p": {"trainable": True, "context": context}}
        team = read_player(exported(tmp_path, "export/p", policies=rows, policy_mapping=mapping))
        assert len(team.policies) == 300 and {policy.context for policy in team.policies.values()} == {context}
    assert texts == [str(tmp_path / "config.yaml")] * 2


@pytest.mark.parametrize("folder", ["export", "checkpoints/step-000002"])
def test_run_without_export_explains_how_to_export(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    hint = f"has not exported a model yet.*agents export {tmp_path} --out {tmp_path}/export"
    raises(ValueError, hint, read_player, str(tmp_path))


def test_short_names_are_the_differing_ends():
    assert short_names(["runs/pop/seed-0/", "runs/pop/seed-1/export", "random"]) == {
        "seed-0": "runs/pop/seed-0/", "seed-1": "runs/pop/seed-1/export", "random": "random",
    }  # fmt: skip
    assert list(short_names(["a/export/hero", "b/export/hero"])) == ["a-hero", "b-hero"]
    assert list(short_names(["http://h:1/v1#qwen-1.5", "m.n:fn"])) == ["qwen-1-5", "fn"]
    assert short_names([]) == {}
    raises(ValueError, "once, got random, random", short_names, ["random", "random"])
    raises(ValueError, r"cannot be told apart by name, got a.b, a-b. Use --players.NAME", short_names, ["a.b", "a-b"])
    with pytest.raises(ValueError, match=r"would be called 'a', .*--players.NAME x/a"):
        BenchConfig(players={"a": "random"}, cross_play=["x/a"]).entrants()
