import os
import sys
from pathlib import Path

import pytest
import yaml

import forge_agents as fa
from forge_agents.bench.entrants import named_players
from forge_agents.bench.plan import BenchConfig
from forge_agents.cli.config import parse
from forge_agents.errors import UntrustedModuleError
from forge_agents.imports import restrict_modules

RUN = {
    "env": "forge/Relay-v0",
    "policies": {"team": {"model": "m", "sampling": {"temperature": 0.7}}, "rival": {"model": "n", "trainable": False}},
    "policy_mapping": {"asker": "team", "answerer": "rival"},
    "trainer": {"group_size": 4, "credit": {"scale": "none"}},
}


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(RUN | changes))
        return str(file)

    return write


def read(*words):
    return parse(fa.RunConfig, words, prog="forge-agents train", description="d")


def refused(capsys, *words):
    with pytest.raises(SystemExit) as exit_:
        read(*words)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_flags_override_yaml_and_yaml_overrides_defaults(config):
    run = read(config(), "--trainer.group_size", "16", "--trainer.learner.lr", "0.5")
    assert (run.trainer.group_size, run.trainer.learner.lr) == (16, 0.5)
    assert run.trainer.credit.scale == "none" and run.trainer.groups_per_step == fa.GRPOConfig().groups_per_step


def test_policies_are_named_by_their_key_and_assigned(config):
    seats = read(config()).players
    assert seats["asker"] == fa.Policy("m", name="team", sampling=fa.Sampling(temperature=0.7))
    assert seats["answerer"].trainable is False
    misspelt = read(config(), "--policies.tem.model", "m")
    assert misspelt.idle == ("tem is declared, but no agent uses it. Did you mean 'team'?",)


def test_a_policys_learner_settings_override_the_trainers(config):
    own = {"lr": 1e-4, "betas": [0.9, 0.99]}
    file = config(policies={"team": {"model": "m", "learner": own}, "rival": {"model": "n"}})
    run = read(file, "--trainer.learner.lr", "1e-5", "--policies.rival.learner.warmup_steps", "3")
    team, rival = (run.trainer.learner_of(run.policies[name]) for name in ("team", "rival"))
    assert (team.lr, team.betas, team.warmup_steps) == (1e-4, (0.9, 0.99), 0)
    assert (rival.lr, rival.warmup_steps) == (1e-5, 3)
    assert run.policies["team"] == fa.Policy("m", name="team", learner={"lr": 1e-4, "betas": (0.9, 0.99)})
    assert read(file, "--policies.team.learner.lr", "2e-4").policies["team"].learner["lr"] == 2e-4


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"lrr": 1e-4}, "policies.team.learner.lrr is no setting. Did you mean 'policies.team.learner.lr'"),
        ({"lr": "high"}, "lr is high. Expected a number"),
        ({"lr": -1}, "policy 'team': lr=-1.0"),
        ({"threads": 2}, "policies.team.learner.threads is no setting"),
        ({"loss": "gspo"}, "policy 'team': learner.loss='gspo' has max_resamples=0"),
    ],
)
def test_learner_settings_of_a_policy_that_do_not_hold_are_refused(config, capsys, learner, message):
    file = config(policies={"team": {"model": "m", "learner": learner}, "rival": {"model": "n"}})
    assert message in refused(capsys, file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 2.5}, "steps is 2.5. Expected a whole number."),
        ({"trainer": {"learner": {"lr": "high"}}}, "trainer.learner.lr is high. Expected a number or null."),
        ({"trainer": {"preflight": "maybe"}}, "trainer.preflight is maybe. Expected true or false."),
        ({"policies": {"team": "m"}}, "policies.team is the text 'm'. Expected a mapping of settings."),
        ({"policies": {"team": {"model": "m", "lora": 8}}}, "policies.lora is 8. Expected a mapping of settings or"),
        ({"policy_mapping": ["team"]}, "policy_mapping is ['team']. Expected a text or a mapping."),
    ],
)
def test_value_of_another_kind_is_refused_in_plain_words(config, capsys, settings, message):
    error = refused(capsys, config(**settings))
    assert message in error and "Parser key" not in error and "class '" not in error


def test_whole_numbers_may_look_like_floats(config):
    run = read(config(steps=1e2, trainer={"group_size": 4.0}), "--trainer.groups_per_step", "2e0")
    assert (run.steps, run.trainer.group_size, run.trainer.groups_per_step) == (100, 4, 2)
    assert type(run.steps) is int


def test_only_policy_plays_every_agent(config):
    run = read(config(policies={"team": {"model": "m"}}, policy_mapping=""))
    assert run.players == fa.Policy("m", name="team")


def test_endpoints_and_people_are_assigned_by_name(config):
    server = {"url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "KEY", "sampling": {"max_tokens": 9}}
    file = config(endpoints={"server": server}, policy_mapping={"asker": "team", "answerer": "server", "c": "human"})
    run = read(file, "--send_key", "KEY@127.0.0.1:1")
    assert run.idle == ("rival is declared, but no agent uses it.",)
    assert run.players == {
        "asker": run.policies["team"],
        "answerer": fa.Endpoint(
            server["url"], "m", name="server", api_key_env="KEY", sampling=fa.Sampling(max_tokens=9)
        ),
        "c": fa.Human(),
    }


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"policy_mapping": {"asker": "tem", "answerer": "rival"}}, (), "Did you mean 'team'"),
        ({"policies": {}}, (), "policies is empty"),
        ({"policy_mapping": ""}, (), "2 policies. Map all agents"),
        ({"endpoints": {"team": {"url": "http://h", "model": "m"}}}, (), "'team' names a policy and an endpoint"),
        ({"endpoints": {"server": {"url": "h", "model": "m"}}}, (), "not an HTTP address"),
        ({}, ("--trainer.group_size", "1"), "Set group_size >= 2"),
        ({}, ("--trainer.group_size", "many"), "group_size"),
        ({"policies": {"team": {"modl": "m"}}}, (), "modl"),
        ({}, ("--policies.rival.learner.lr", "1e-4"), "trainable=False"),
        ({}, ("--policies.rival.lora.rank", "8"), "policy 'rival' has a LoRA adapter and trainable=False"),
        ({}, ("--policies.tem.learner.lr", "1e-4"), "policies.tem has no model. Set --policies.tem.model."),
        ({}, ("--policies.tem.learner.lr=1e-4",), "policies has rival, team. Did you mean 'team'?"),
        ({"policies": {"team": {"lora": {"rank": 8}}}}, (), "policies.team has no model. Set --policies.team.model."),
        ({}, ("--endpoints.rival.model", "m"), "endpoints.rival has no url. Set --endpoints.rival.url."),
        ({}, ("--endpoints.far.retries", "1"), "has no url and no model"),
    ],
)
def test_mistakes_are_refused_with_what_to_do(capsys, config, changes, words, said):
    assert said in refused(capsys, config(**changes), *words)


def test_a_name_that_is_not_the_key_of_the_policy_is_refused(config, capsys):
    message = refused(capsys, config(), "--policies.team.name", "crew")
    assert "policies.team.name='crew' has no effect" in message and "rename the key 'team'" in message
    assert read(config(), "--policies.team.name", "team").policies["team"].name == "team"


def test_flags_complete_an_entry_of_the_file(config):
    file = config(policies={"team": {"trainable": False}, "rival": {"model": "n"}})
    assert read(file, "--policies.team.model", "m", "--policies.rival.lora.rank", "8").policies["team"].model == "m"


def test_a_missing_file_is_named(capsys):
    assert "nowhere.yaml" in refused(capsys, "nowhere.yaml")


def test_a_reward_that_cannot_be_imported_is_named(config):
    with pytest.raises(ValueError, match=r"'math:nothing' cannot be imported.*package\.module:object"):
        read(config(), "--reward", "math:nothing").load_reward()
    with pytest.raises(ValueError, match="Did you mean .*'sqrt'"):
        read(config(), "--reward", "math:sqrtt").load_reward()


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda f: f.name)
def test_every_example_is_a_valid_run(file):
    run = read(str(file))
    env = fa.make(run.env, **run.env_args)
    assert env.possible_agents and run.policies and run.steps > 0
    env.close()


@pytest.mark.parametrize("flag", [["--out", "runs/mine"], ["--out=runs/mine"], ["--out_dir", "runs/mine"]])
def test_what_a_command_writes_is_out_everywhere(config, flag):
    assert read(config(), *flag).out_dir == "runs/mine"
    assert parse(BenchConfig, flag, prog="forge-agents bench", description="d").out_dir == "runs/mine"


ENDPOINT = {"url": "https://api.openai.com/v1", "model": "m", "api_key_env": "OPENAI_API_KEY"}


@pytest.fixture
def bench_file(tmp_path):
    def write(**endpoint):
        file = tmp_path / "bench.yaml"
        settings = {"suite": "core-v1", "players": {"a": "random"}, "endpoints": {"rival": {**ENDPOINT, **endpoint}}}
        file.write_text(yaml.safe_dump(settings))
        return str(file)

    return write


def read_bench(*words):
    return parse(BenchConfig, words, prog="forge-agents bench", description="d")


def test_a_key_goes_to_its_provider_and_the_console_says_so(bench_file, capsys):
    read_bench(bench_file())
    assert capsys.readouterr().err == "key    OPENAI_API_KEY goes to api.openai.com\n"
    read_bench(bench_file(url="http://127.0.0.1:8000/v1", api_key_env="FORGE_AGENTS_TOKEN"))
    assert "FORGE_AGENTS_TOKEN goes to 127.0.0.1:8000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "endpoint",
    [
        {"url": "https://stranger.example/v1"},
        {"url": "http://api.openai.com/v1"},
        {"url": "https://api.openai.com:8443/v1"},
        {"url": "https://api.openai.com.stranger.example/v1"},
        {"api_key_env": "AWS_SECRET_ACCESS_KEY"},
        {"url": "http://127.0.0.1:8000/v1"},
        {"url": "https://stranger.example/v1", "api_key_env": "FORGE_AGENTS_TOKEN"},
    ],
)
def test_a_file_sends_a_key_elsewhere_only_if_the_user_agrees(endpoint, bench_file, capsys):
    file = bench_file(**endpoint)
    variable = endpoint.get("api_key_env", "OPENAI_API_KEY")
    host = endpoint.get("url", ENDPOINT["url"]).split("/")[2]
    for words in ([], ["--send_key", f"{variable}@other.example"], ["--send_key", f"OTHER@{host}"]):
        with pytest.raises(SystemExit):
            read_bench(file, *words)
        assert f"variable {variable} to {host}. Add --send_key {variable}@{host} to allow this" in " ".join(
            capsys.readouterr().err.split()
        )
    assert read_bench(file, "--send_key", "OTHER@other.example", f"{variable}@{host}").endpoints["rival"]
    assert f"key    {variable} goes to {host}" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["tcp://stranger.example:26600", "tls://10.0.0.9:26600", "tcp://127.0.0.1:1"])
def test_a_file_names_hosts_only_if_the_user_trusts_them(address, config, capsys):
    certificate = {"certificate": "c"} if address.startswith("tls") else {}
    file = config(mesh={"kind": "attach", "workers": {"engines": [address]}, **certificate})
    host = address.split("/")[2].split(":")[0]
    for words in ([], ["--trust_host", f"not.{host}"]):
        error = " ".join(refused(capsys, file, *words).split())
        assert f"names {host} for processes of the run" in error and f"Add --trust_host {host} to allow" in error
    assert read(file, "--trust_host", "b", host).mesh.workers == {"engines": (address,)}
    of_flag = config(mesh={"kind": "attach", "address": "tcp://node0:1"})
    assert read(of_flag, "--mesh.workers", f'{{"engines": ["tcp://{host}:1"]}}').mesh.counts == {"engines": 1}


@pytest.mark.parametrize(
    ("mesh", "host"),
    [
        ({"kind": "kubernetes", "namespace": "strangers"}, "strangers"),
        ({"kind": "slurm", "address": "tcp://0.0.0.0:26601"}, "0.0.0.0"),
        ({"kind": "slurm", "address": "tcp://0:26601"}, "0"),
        ({"kind": "slurm", "address": "tcp://0x0:26601"}, "0x0"),
    ],
)
def test_a_file_names_a_namespace_or_all_networks_only_if_the_user_trusts_them(mesh, host, config, capsys):
    file = config(mesh={**mesh, "hosts": {"engines": 1}})
    error = " ".join(refused(capsys, file).split())
    assert f"names {host} for processes of the run" in error and f"Add --trust_host {host} to allow" in error
    refused(capsys, file, "--trust_host", f"not-{host}")


@pytest.mark.parametrize("engines", ["!!set {tcp://x:1}", "!!omap [{tcp://x:1: 1}]", "!!binary dGNwOi8veDox"])
def test_a_file_has_no_values_that_the_check_of_hosts_would_miss(engines, config, capsys):
    file = Path(config())
    file.write_text(f"{file.read_text()}mesh: {{kind: attach, workers: {{engines: {engines}}}}}\n")
    assert "could not determine a constructor for the tag" in refused(capsys, str(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("program", ["sh", "-c", "id"]),
        ("sandbox", None),
        ("allow_weaker", True),
        ("image", "x"),
        ("command", ["sh", "-c", "id", "{port}"]),
    ],
)
def test_a_file_does_not_choose_what_an_environment_runs(name, value, config, capsys):
    error = " ".join(refused(capsys, config(env_args={name: value})).split())
    assert f"sets env_args.{name}, which chooses what runs on this machine" in error
    assert read(config(env_args={"tasks": [1]}), f"--env_args.{name}", "x").env_args == {"tasks": [1], name: "x"}


@pytest.mark.parametrize("form", ["{}", "file:{}", "../{}", "$PRIVATE", "token.txt"])
def test_environments_of_a_file_read_no_files_elsewhere(form, config, capsys, tmp_path, monkeypatch):
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    elsewhere.mkdir()
    private = elsewhere / "token.txt"
    for file in (private, tmp_path / "mine.txt", elsewhere / "tasks.jsonl"):
        file.touch()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("PRIVATE", str(private))
    path = form.format(f"{elsewhere.name}/token.txt" if form.startswith("..") else private)
    for arguments in ({"data_file": path}, {"a": ["x", {"b": path}]}):
        error = " ".join(refused(capsys, config(env_args=arguments)).split())
        assert f"to {path}, a file outside of its folder" in error and "with the flag --env_args." in error
    assert read(config(), "--env_args.data_file", path).env_args == {"data_file": path}
    allowed = {"data_file": "mine.txt", "tasks": "tasks.jsonl", "word": "x" * 5000, "number": 3}
    assert read(config(env_args=allowed)).env_args == allowed


@pytest.mark.parametrize("path", ["../data/../../../../token.txt", "data/../../token.txt", "..", "..\\token.txt"])
def test_paths_that_climb_are_refused_because_libraries_look_elsewhere(path, config, capsys, tmp_path):
    imitation = {"data": "chats.jsonl", "env_args": {"data_file": path}}
    for settings in ({"env_args": {"data_file": path}}, {"warm_start": {"team": imitation}}):
        error = " ".join(refused(capsys, config(**settings)).split())
        assert f"sets env_args.data_file to {path}, a file outside of its folder" in error
    harmless = {"words": ["a..b", "wait ...", "either../or"]}
    assert read(config(env_args=harmless)).env_args == harmless


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder outside of that of the settings file, and the current folder. The file's own folder leads to it."""
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    for folder in (elsewhere / "private", tmp_path / "game", tmp_path / "data"):
        folder.mkdir(parents=True)
    (elsewhere / "private/x.txt").touch()
    (tmp_path / "link.txt").symlink_to(elsewhere / "private/x.txt")
    (tmp_path / "links").symlink_to(elsewhere / "private")
    (tmp_path / "data/rows.arrow").symlink_to(elsewhere / "private/x.txt")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(elsewhere)
    return elsewhere


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("config", "game"),  # in the folder of the file: a library would read what its files name
        ("config", "OWN/game"),
        ("config", "private"),
        ("config", "."),
        ("config", "/"),
        ("config", "link.txt"),
        ("config", "links/x"),  # links/x.txt is elsewhere
        ("config", "pipe"),
        ("config", "/etc/passwd_of_nobody"),  # the library may add ".txt"
        ("config", "/pro"),
        ("config", "/proc/*/environ"),
        ("config", "private/*.txt"),
        ("config", "~/notes"),
        ("tasks", "/etc"),
        ("tasks", "data"),
    ],
)
def test_folders_and_beginnings_of_paths_in_a_file_are_refused(name, path, config, capsys, elsewhere):
    assert elsewhere == Path.cwd()
    path = path.replace("OWN", str(Path(config()).parent))
    for value in (path, {"b": [{path: 1}]}):
        error = " ".join(refused(capsys, config(env_args={name: value})).split())
        assert f"sets env_args.{name} to {path}, a file outside of its folder, or not a" in error
        assert f"with the flag --env_args.{name} to allow this" in error


def test_texts_that_are_no_paths_and_files_of_the_folder_are_arguments(config, tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/part.arrow").touch()
    (tmp_path / "words.json").touch()
    monkeypatch.chdir(tmp_path)
    texts = ["/no_think", "yes/no", "...", "~nobody-here/x", "$UNSET/x", "a/" * 50_000, "\\", "*", "x\ty", "rows2"]
    allowed = {"texts": texts, "words": "words.json", "own": str(tmp_path / "words.json"), "tasks": "rows", "": ""}
    assert read(config(env_args=allowed)).env_args == allowed


def test_a_warm_start_of_a_file_does_not_choose_what_an_environment_runs(config, capsys):
    imitation = {"data": "forge/Relay-v0", "games": 3, "env_args": {"program": ["sh", "-c", "id"]}}
    file = config(warm_start={"team": imitation})
    assert "sets env_args.program, which chooses what runs" in " ".join(refused(capsys, file).split())


def test_environments_of_a_file_connect_only_to_trusted_hosts(config, capsys):
    file = config(env_args={"url": "http://169.254.169.254/latest"})
    assert "Add --trust_host 169.254.169.254 to allow" in " ".join(refused(capsys, file).split())
    assert read(file, "--trust_host", "169.254.169.254").env_args


@pytest.mark.parametrize(
    "text",
    [
        *(
            "http://10.0.0.7/a b",
            "http://10.0.0.7/a\tb",
            "ht\ntp://10.0.0.7/\n",
            "\x1f http://10.0.0.7:80",
            "//10.0.0.7/x",
        ),
        *("see ws://10.0.0.7/x", "http://good/x http://10.0.0.7", "http://good\\@10.0.0.7/", "10.0.0.7:8000"),
        *("http://user:good@10.0.0.7:1/", "10.0.0.7:8000/path with blanks", "HTTP://10.0.0.7?://good"),
    ],
)
def test_every_form_of_an_address_in_a_file_needs_trust(config, capsys, text):
    file = config(env_args={"url": text})
    message = " ".join(refused(capsys, file, "--trust_host=good").split())
    assert "to a server on 10.0.0.7. Add --trust_host 10.0.0.7 to allow" in message
    assert read(file, "--trust_host", "10.0.0.7", "good").env_args == {"url": text}


def test_texts_without_an_address_need_no_trust(config):
    texts = ["1:30", "a//b", "16:9", "x.y", "step 1: go", "::", "C:\\x"]
    assert read(config(env_args={"texts": texts})).env_args == {"texts": texts}


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    """A module of the user, with a function of its own and one that runs commands."""
    (tmp_path / "of_mine.py").write_text("from subprocess import getoutput\ndef move(observation): return 'pass'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_mine"
    restrict_modules([])


def bench_of(tmp_path, **settings):
    file = tmp_path / "bench.yaml"
    file.write_text(yaml.safe_dump({"suite": "forge/KuhnPoker-v0", "players": {"a": "random"}} | settings))
    return str(file)


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"players": {"x": "subprocess:getoutput"}}, "subprocess"),
        ({"players": {"x": {"player_0": "os:system", "player_1": "random"}}}, "os"),
        ({"players": {}, "cross_play": ["random", "of_mine:getoutput"]}, "subprocess"),
        ({"players": {"x": "numpy:array"}}, "numpy"),
        ({"suite": "this:forge/KuhnPoker-v0"}, "this"),
        ({"suite": "forge/KuhnPoker-v0+venv.__main__:x/Y-v0"}, "venv"),
    ],
)
def test_a_file_names_no_code_of_installed_packages(settings, package, my_module, tmp_path):
    config = read_bench(bench_of(tmp_path, **settings))
    with pytest.raises(UntrustedModuleError, match=f"names code of {package}, .* Add --trust_module {package} to"):
        fa.benchmark(config.entrants(), config.suite, out_dir=tmp_path / "out")


def test_a_file_names_code_of_the_user_and_flags_name_any(my_module, tmp_path):
    file = bench_of(tmp_path, players={"x": f"{my_module}:move"})
    (player,) = named_players(read_bench(file).entrants()).values()
    assert player("", "player_0") == "pass"
    config = read_bench(file, "--players", '{"x": "textwrap:dedent"}')
    assert named_players(config.entrants())["x"].fn.__name__ == "dedent"
    trusted = read_bench(bench_of(tmp_path, players={"x": "textwrap:dedent"}), "--trust_module", "textwrap")
    assert named_players(trusted.entrants())["x"].fn.__name__ == "dedent"
    for function in ("forge_agents.imports:is_library", "forge_agents.envs.registry:_is_installed"):
        with pytest.raises(UntrustedModuleError, match="which is no function of a player"):
            named_players(read_bench(bench_of(tmp_path, players={"x": function})).entrants())


def test_a_file_names_no_functions_of_another_kind_and_no_programs(my_module, tmp_path):
    text = (
        "from numpy import load\nfrom shutil import disk_usage\nfrom functools import cache\nask = cache(disk_usage)\n"
    )
    (tmp_path / "of_mine_odd.py").write_text(text)
    for place, package in (("of_mine_odd:load", "numpy"), ("of_mine_odd:ask", "shutil")):
        with pytest.raises(UntrustedModuleError, match=f"names code of {package}, .* Add --trust_module {package} to"):
            named_players(read_bench(bench_of(tmp_path, players={"x": place})).entrants())
    (tmp_path / "of_mine_too").mkdir()
    (tmp_path / "of_mine_too/__main__.py").write_text("raise AssertionError('a program began')")
    for module in ("of_mine_too.__main__", "of_mine_too.__main__.x", "forge_agents.__main__"):
        package = module.partition(".")[0]
        config = read_bench(bench_of(tmp_path, suite=f"{module}:forge/KuhnPoker-v0"))
        with pytest.raises(UntrustedModuleError, match=f"a program. Add --trust_module {package} to allow this"):
            fa.benchmark(config.entrants(), config.suite, out_dir=tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "this:forge/Relay-v0"},
        {"reward": "shutil:rmtree"},
        {"trainer": {"credit": "this:s"}},
        {"trainer": {"tracker": "this:s"}},
        {"trainer": {"engine": {"routing": "this:s"}}},
        {"trainer": {"learner": {"loss": "this:s"}}},
    ],
)
def test_settings_of_a_run_name_no_code_of_installed_packages(changes, config, capsys):
    try:
        run = read(config(**changes))
        run.load_reward()
        fa.make(run.played)
    except (UntrustedModuleError, ValueError) as error:
        message = str(error)
    except SystemExit:
        message = capsys.readouterr().err
    else:
        message = ""
    assert "names code of" in message and "to allow this" in " ".join(message.split())
    assert "this" not in sys.modules
    restrict_modules([])


@pytest.mark.parametrize(
    "changes",
    [
        {"env_args": {"x": {"class_path": "os.mkdir", "init_args": {"path": "made"}}}},
        {"env_args": {"x": [{"y": {"class_path": "os.mkdir", "init_args": {"path": "made"}}}]}},
        {"env_args": {"class_path": "os.mkdir", "init_args": {"path": "made"}}},
        {"env_args": {"x": {"class_path": "this.s"}}},
        {"policies": {"team": {"class_path": "this.s"}}},
        {"trainer": {"credit": {"class_path": "this.s"}}},
        {"trainer": {"credit": "this"}},
        {"trainer": {"credit": "this.s"}},
        {"trainer": {"tracker": "this"}},
        {"trainer": {"engine": {"routing": "this.s"}}},
        {"trainer": {"learner": {"loss": "this"}}},
        {"reward": "this"},
        {"reward": "this:"},
        {"reward": "..this:s"},
    ],
    ids=str,
)
def test_settings_call_nothing_and_import_no_module_without_an_object(changes, config, tmp_path, monkeypatch, capsys):
    def use():
        run = read(config(**changes))
        run.load_reward()
        fa.make(run.played, **run.env_args)

    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError, TypeError)):
        use()
    assert "this" not in sys.modules and not (tmp_path / "made").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_settings_written_as_a_text_are_refused(inside, bench_file, capsys):
    """The parser would read the text as YAML, unseen by the check of keys."""
    file = Path(bench_file(url="https://stranger.example/v1", api_key_env="AWS_SECRET_ACCESS_KEY"))
    settings = yaml.safe_load(file.read_text())
    endpoints = settings["endpoints"]
    settings["endpoints"] = {name: str(each) for name, each in endpoints.items()} if inside else str(endpoints)
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit):
        read_bench(str(file))
    assert "is the text" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"\x1b]0;x\a\u202e": 1}, {"steps": "\x1b]0;x\a\u202e"}])
def test_errors_show_no_control_characters_of_a_file(settings, config, capsys):
    error = refused(capsys, config(**settings))
    assert "\\x1b]0;x\\x07\\u202e" in error and "\x1b" not in error and "\u202e" not in error


def test_a_file_cannot_agree_for_the_user(bench_file, capsys):
    file = Path(bench_file(url="https://stranger.example/v1"))
    file.write_text(file.read_text() + "send_key: [OPENAI_API_KEY@stranger.example]\n")
    with pytest.raises(SystemExit):
        read_bench(str(file))
    assert "send_key" in capsys.readouterr().err


def test_a_key_that_the_user_names_on_the_command_line_is_agreed_to(bench_file, capsys):
    file = bench_file(url="https://stranger.example/v1", api_key_env="")
    assert read_bench(file, "--endpoints.rival.api_key_env", "RIVAL_KEY").endpoints["rival"].api_key_env == "RIVAL_KEY"
    assert "RIVAL_KEY goes to stranger.example" in capsys.readouterr().err
