"""Fit of models into GPUs, proposed changes, and the table in the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.cli.config import parse
from forge_agents.cli.main import main
from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.runtime import mesh
from forge_agents.runtime.cluster import Cluster
from forge_agents.serving.memory import adapter_weights
from forge_trainers.forecast.fit import Fit, _preview, _size_of, fit_gpus
from forge_trainers.forecast.simulate import Hardware
from forge_trainers.run import placement
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.dry_run import dry_run
from forge_trainers.run.parts import OwnEngine
from forge_trainers.run.placement import Placement
from forge_trainers.run.plan import compute_processes, meshes_of

PAGE = Path(__file__).parents[3] / "docs" / "hardware.md"
SETTINGS = ProcessConfig(engine=fa.EngineConfig(max_model_len=8192))
TEAM_POLICY = {"policy": fa.Policy("model", name="policy")}
TEAM = "env: forge/Relay-v0\npolicies: {team: {model: tiny-random}}\n"
POKER = "env: forge/KuhnPoker-v0\npolicies: {team: {model: tiny-random}}\npolicy_mapping: team\n"


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``simulate(file, *words, status=0)``: what the command prints about a run's file."""

    def run(file: str, *words: str, status: int = 0) -> str:
        (tmp_path / "train.yaml").write_text(file)
        try:
            code = main(["simulate", str(tmp_path / "train.yaml"), *words])
        except SystemExit as end:
            code = end.code
        assert code == status
        printed = capsys.readouterr()
        return " ".join((printed.out or printed.err).split())

    return run


def fit(settings: ProcessConfig, model: str | Mapping[str, str], hardware: Hardware, **more: Any) -> Fit:
    """The fit of a run, by default with one policy on this host. A mapping has models by policy."""
    given = {"policies": TEAM_POLICY, "hosts": fa.Hosts(), **more}
    if not isinstance(model, str):
        policies = given["policies"].items()
        given["policies"] = {name: replace(policy, model=model.get(name, policy.model)) for name, policy in policies}
        model = ""
    return fit_gpus(settings, model, hardware, **given)


def row(name: str, found: Fit) -> str:
    """A line of the docs' table."""
    cells = [name]
    for role in ("learner", "engines"):
        own = [one for one in found.placement.processes if one.slot.role == role]
        tp = f" of {max(one.slot.rank for one in own) + 1}" if role == "engines" and own[-1].slot.rank else ""
        many = f"{len({one.slot.name for one in own})}{tp}" if role == "engines" else str(len(own))
        cells += [many, f"{own[0].bytes / 1e9:.1f}"]
    how = "an adapter" if "Policy.lora" in found.changes else "all weights"
    (learner,) = found.placement.learners.values()
    recomputed = {"none": "", "selective": ", recomputed in part", "full": ", recomputed"}
    how += recomputed[learner.activation_checkpointing or ""]
    return f"| {cells[0]} | {how} | {' | '.join(cells[1:])} |"


@pytest.mark.parametrize("name", list(SHAPES))
def test_docs_table_of_eight_gpus_matches_the_code(name):
    assert row(name, fit(SETTINGS, name, Hardware(gpus=8))) in PAGE.read_text().splitlines()


@pytest.mark.parametrize(
    ("section", "model", "gpus"), [("One node with several GPUs", "8b", 8), ("Several hosts", "32b", 64)]
)
def test_documented_settings_fit(section, model, gpus, tmp_path):
    text = PAGE.read_text().partition(f"\n## {section}\n")[2]
    settings = text.partition("```yaml\n")[2].partition("```")[0]
    file = tmp_path / "train.yaml"
    file.write_text(
        f"policies: {{team: {{model: tiny-random}}}}\npolicy_mapping: team\nenv: forge/Relay-v0\n{settings}"
    )
    run: Any = parse(fa.RunConfig, [str(file)], prog="train", description="")
    result = fit(run.trainer, model, Hardware(gpus=gpus), policies=run.models, hosts=run.mesh)
    assert not result.changes and result.used == gpus
    each = {one.slot.role: one.bytes for one in result.placement.processes}
    if section == "Several hosts":
        output = f"take {each['learner'] / 1e9:.1f} of 80 GB here and the engines' {each['engines'] / 1e9:.1f}."
        assert output in " ".join(text.split())


def test_several_hosts_are_those_of_the_mesh():
    nodes = fa.Hosts(kind="slurm", hosts={"learner": 4, "engines": 4})
    result = fit(SETTINGS, "32b", Hardware(gpus=64), hosts=nodes)
    assert [result.changes[key] for key in ("learner_procs", "engine.replicas", "engine.tp")] == [32, 16, 2]
    with pytest.raises(ValueError, match=r"gpus=64 is more than one host has \(gpus_per_host=8\).* Set mesh.kind"):
        fit(SETTINGS, "32b", Hardware(gpus=64))
    with pytest.raises(HostError, match="16 ranks of one engine need a GPU each, and engines-0 .* has 8"):
        _preview(Hardware(gpus=64), nodes, [("hero", "engines", 16)])


def test_misfit_lists_changes_and_reasons():
    result = fit(SETTINGS, "8b", Hardware(gpus=8))
    assert re.match(r"GPU 0 of this host .* has 80.0 GB, .* used: policy-learner expects 14", result.problem)
    assert result.changes == {"learner_procs": 4, "engine.replicas": 4}
    changed = ProcessConfig(learner_procs=4, engine=fa.EngineConfig(max_model_len=8192, replicas=4))
    as_changed = fit(changed, "8b", Hardware(gpus=8))
    assert as_changed.changes == {}
    # what is left to memory comes to the same, said or not
    assert as_changed.placement.learners == result.placement.learners
    assert as_changed.json()["learners"]["policy-learner"]["activation_checkpointing"] == "selective"
    requested = replace(SETTINGS, learner=fa.LearnerConfig(activation_checkpointing="none"))
    result = fit(requested, "8b", Hardware(gpus=8))
    assert "policy-learner expects 22" in result.problem
    assert result.changes["learner.activation_checkpointing"] == "selective"


def test_colocated_run_fits_into_shared_gpus():
    gpus = Hardware(gpus=2, gpu_gb=17)
    engine = fa.EngineConfig(max_model_len=2048, replicas=2)
    learner = fa.LearnerConfig(activation_checkpointing="none")
    settings = replace(SETTINGS, learner_procs=2, engine=engine, learner=learner)
    assert fit(settings, "0.6b", gpus).changes
    result = fit(replace(settings, colocate=True), "0.6b", gpus)
    assert not result.changes and result.placement.engines["policy-0"].sleeps
    assert sorted(one.slot.gpu for one in result.placement.processes) == ["0", "0", "1", "1"]
    with pytest.raises(HostError, match=r"3 ranks of one learner need a GPU each, and this host .* has 2"):
        _preview(gpus, fa.Hosts(), [("learner", "learner", 3)])


def test_engine_uses_the_stored_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(placement.models, "resolve", Path)

    def weights(**said: str) -> int:
        (tmp_path / "config.json").write_text(json.dumps({**SHAPES["0.6b"], **said}))
        return fit(SETTINGS, str(tmp_path), Hardware(gpus=2)).placement.processes[1].parts["weights"]

    assert weights(dtype="float32") == 2 * weights(dtype="bfloat16") == 2 * weights()


def test_70b_model_never_fits_into_one_gpu():
    with pytest.raises(HostError, match="take more GPUs or larger ones"):
        fit(SETTINGS, "70b", Hardware(gpus=1))


ADAPTED = fa.LearnerConfig(activation_checkpointing="full")
ATTENTION = fa.LoRA(targets=("q_proj", "k_proj", "v_proj", "o_proj"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and GPUs that it fits into."""

    model: str = "0.6b"
    gpus: int
    gb: float = 80
    run: ProcessConfig
    policies: Mapping[str, fa.LoRA | None]
    judges: int = 0
    hosts: fa.Hosts = fa.Hosts()  # noqa: RUF009  # frozen


def engine(**settings: Any) -> fa.EngineConfig:
    return fa.EngineConfig(max_model_len=4096, **settings)


ALIKE = {
    "judges": Case(
        model="8b", gpus=8, policies={"a": fa.LoRA()}, judges=2,
        run=ProcessConfig(engine=engine(tp=2, replicas=2), learner_procs=2, learner=ADAPTED),
    ),
    "colocate": Case(
        gpus=2, gb=50, policies={"a": None, "b": None}, judges=1,
        run=ProcessConfig(engine=engine(), learner_procs=2, colocate=True),
    ),
    "mixture": Case(
        model="30b-a3b", gpus=8, policies={"a": ATTENTION},
        run=ProcessConfig(engine=engine(tp=2), learner_procs=4, learner=replace(ADAPTED, ep=4)),
    ),
    "adapters": Case(
        gpus=4, policies={"a": fa.LoRA(), "b": fa.LoRA()}, judges=1, hosts=fa.Hosts(gpus={"judges": 1}),
        run=ProcessConfig(engine=engine(replicas=2)),
    ),
    "hosts": Case(
        gpus=32, policies={"a": None, "b": None}, judges=1, run=ProcessConfig(engine=engine()),
        hosts=fa.Hosts(kind="slurm", hosts={"learner": 2, "engines": 1, "judges": 1}),
    ),
    "uneven": Case(
        model="8b", gpus=24, policies={"a": fa.LoRA()},
        hosts=fa.Hosts(kind="slurm", hosts={"learner": 1, "engines": 2}),
        run=ProcessConfig(engine=engine(tp=2, replicas=7), learner_procs=2, learner=ADAPTED),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_fit_matches_placement_and_dry_run(name, tmp_path, monkeypatch):
    case = ALIKE[name]
    for shape in (case.model, "0.6b"):
        (tmp_path / shape).mkdir(exist_ok=True)
        config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960, **SHAPES[shape]}
        (tmp_path / shape / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(placement.models, "resolve", Path)
    run, hosts = case.run, case.hosts
    requested = {
        name: fa.Policy(str(tmp_path / case.model), name=name, lora=lora) for name, lora in case.policies.items()
    }
    limits, chats = fa.EngineConfig(max_model_len=2048), list[OwnEngine]()
    for _ in range(case.judges):
        chat = fv.Judge(str(tmp_path / "0.6b"), "Is it so?", engine=limits).own_engine
        assert chat is not None
        chats.append(chat)
    gpus = Hardware(gpus=case.gpus, gpu_gb=case.gb)
    result = fit(run, case.model, gpus, policies=requested, hosts=hosts, judges=chats)
    assert not result.changes

    paths = {name: Path(policy.model) for name, policy in requested.items()}
    own = compute_processes(requested, paths, run)
    meshes = [*meshes_of(own), *((chat.name, "judges", 1) for chat in chats)]
    layout = Cluster(hosts, lambda: "here", meshes)
    layout.assume_hosts(8, gpu_bytes=int(case.gb * 1e9), here=8 if hosts.counts else case.gpus)
    placed: list[Placement] = []
    place = placement.place

    def noted(*given: Any, **options: Any) -> Placement:
        placed.append(place(*given, **options))
        return placed[-1]

    monkeypatch.setattr(placement, "place", noted)
    monkeypatch.setattr(mesh, "_cluster", lambda: layout)
    told, learners = placement.place_here(own, engine=run.engine, judges=chats, turns=run.colocate)

    def rows(what: Placement) -> list[Any]:
        return [(one.slot.name, one.slot.rank, one.slot.gpu, dict(one.parts)) for one in what.processes]

    assert rows(placed[-1]) == rows(result.placement)
    assert learners == result.placement.learners
    assert told == result.placement.engines and placed[-1].doubts == result.placement.doubts
    if hosts.counts:
        lines = dry_run(requested, run, hosts, gpus_per_host=8, judges=chats)
        host, placed_lines = "", []
        for line in lines:
            words = line.split(":")[0]
            host = host if words.startswith("  ") else words
            placed_lines += [f"{host}:{words}"] if ", GPU " in words else []
        seats = [one.slot for one in result.placement.processes]
        assert sorted(placed_lines) == sorted(
            f"{seat.host}:  {seat.name} rank {seat.rank}, GPU {seat.gpu}" for seat in seats
        )


def test_described_hosts_must_fit():
    hosts = fa.Hosts(kind="slurm", hosts={"learner": 2, "engines": 1})
    settings = ProcessConfig(learner_procs=4, engine=fa.EngineConfig(max_model_len=512, replicas=8))
    result = fit(settings, "0.6b", Hardware(gpus=24), hosts=hosts)
    assert not result.changes and result.used == 12
    assert [one.slot.gpu for one in result.placement.processes if one.slot.role == "learner"] == ["0", "1", "0", "1"]
    uneven = fit(replace(settings, learner_procs=3), "0.6b", Hardware(gpus=24), hosts=hosts)
    assert "3 processes of one learner cannot be spread evenly over 2 hosts" in uneven.problem
    assert uneven.changes["learner_procs"] == 16
    with pytest.raises(HostError, match="need 12 GPUs of the mesh's hosts, and there are 8"):
        fit(settings, "0.6b", Hardware(gpus=8), hosts=hosts)


def test_policies_have_separate_processes_unless_adapters_share():
    policies = {name: fa.Policy("model", name=name) for name in ("asker", "answerer")}
    settings = ProcessConfig(engine=fa.EngineConfig(max_model_len=512))
    result = fit(settings, "0.6b", Hardware(gpus=4), policies=policies)
    assert [one.slot.name for one in result.placement.processes] == [
        "asker-learner", "answerer-learner", "asker", "answerer",
    ]  # fmt: skip
    adapters = {name: replace(policy, lora=fa.LoRA(rank=64)) for name, policy in policies.items()}
    learner, engine = fit(settings, "0.6b", Hardware(gpus=4), policies=adapters).placement.processes
    weights = adapter_weights(ModelSize.named("0.6b"), fa.LoRA(rank=64))
    assert learner.slot.name == "asker-answerer-learner" and learner.parts["optimizer"] == 2 * 8 * weights
    assert engine.slot.name == "asker" and engine.parts["adapters"] == 2 * 2 * weights
    frozen = {"asker": policies["asker"], "answerer": replace(policies["answerer"], trainable=False)}
    assert len(fit(settings, "0.6b", Hardware(gpus=4), policies=frozen).placement.processes) == 3


def test_adapters_of_several_models_share_neither_engine_nor_learner():
    policies = {name: fa.Policy(f"model-{name}", name=name, lora=fa.LoRA()) for name in ("asker", "answerer")}
    result = fit(ProcessConfig(engine=fa.EngineConfig(max_model_len=512)), "0.6b", Hardware(gpus=4), policies=policies)
    assert len(result.placement.processes) == 4


def test_adapter_advice_for_a_mixture_targets_attention():
    result = fit(SETTINGS, "30b-a3b", Hardware(gpus=8))
    assert result.changes["Policy.lora"].targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    longer = ProcessConfig(engine=fa.EngineConfig(max_model_len=50_000))
    with pytest.raises(HostError, match="max_model_len=50000 is more than the 40960 tokens"):
        fit(longer, "0.6b", Hardware(gpus=8))


def test_ranks_that_cannot_split_the_model_do_not_fit():
    result = fit(replace(SETTINGS, engine=replace(SETTINGS.engine, tp=3)), "0.6b", Hardware(gpus=8))
    assert "engine.tp=3 does not divide" in result.problem and result.changes["engine.tp"] == 1
    with pytest.raises(HostError, match=r"tp=3 of the learner does not divide learner_procs=4.* change the limits"):
        fit(replace(SETTINGS, learner_procs=4, learner=fa.LearnerConfig(tp=3)), "0.6b", Hardware(gpus=8))


def test_longest_sample_is_one_pass():
    def activations(engine: fa.EngineConfig, **learner: int) -> int:
        learner = {"max_tokens_per_microbatch": 2048, **learner}
        settings = ProcessConfig(learner=fa.LearnerConfig(**learner), engine=engine)
        result = fit(settings, "0.6b", Hardware(gpus=2))
        doubts.extend(result.placement.doubts)
        return result.placement.processes[0].parts["activations"]

    doubts: list[str] = []
    short = activations(fa.EngineConfig(max_model_len=512))
    assert activations(fa.EngineConfig(max_model_len=8192)) == 4 * short
    assert activations(fa.EngineConfig(max_model_len=8192), max_tokens_per_microbatch=8192) == 4 * short
    assert not doubts
    assert activations(fa.EngineConfig()) == short  # nobody said how long conversations are
    assert len(doubts) == 1 and "one of the model's 40960 tokens would take 11" in doubts[0]


def test_model_is_given_by_shape_or_name(tiny_llama):
    assert _size_of(str(tiny_llama), "team")[0].layers == 2 and _size_of("8B", "team")[0].layers == 36


def test_simulate_command_reports_fit(simulate):
    team = TEAM.replace("tiny-random", "smollm2-135m-instruct")
    assert "it fits into 2 GPUs of 80 GB" in simulate(team, "--gpus", "2", "--model", "0.6b")
    eight = ("--gpus", "8", "--model", "0.6b")
    report = json.loads(simulate(team, *eight, "--json"))
    assert report["fits"] and [process["role"] for process in report["processes"]] == ["learner", "engines"]
    assert "the run uses 1 of them" in simulate(team, *eight, "--policies.team.trainable", "false")
    assert "cannot be combined with --measured" in simulate(team, *eight, "--measured", "runs/x", status=2)
    assert "needs --model" in simulate(team, "--gpus", "4", "--gpu_gb", "40", status=2)


def test_current_settings_are_reported_before_changes(simulate):
    text = simulate(TEAM, "--gpus", "8", "--model", "8b", "--trainer.engine.max_model_len", "8192", status=1)
    assert "learner_procs: 4" in text and "engine.replicas: 4" in text
    parts = ("does not fit with these settings", "it fits with", "expected memory with these changes")
    assert sorted(parts, key=text.index) == list(parts)
    text = simulate(TEAM, "--gpus", "2", "--model", "0.6b")
    assert "with these changes" not in text and "memory of this host (assumed): 1.2 GB (published weights 1.2)" in text


def test_host_memory_is_counted_and_checked(simulate):
    offloaded = replace(SETTINGS, learner=fa.LearnerConfig(cpu_offload=True))
    size = ModelSize.named("0.6b")
    (needs,) = fit(offloaded, "0.6b", Hardware(gpus=2)).hosts.values()
    assert needs["offloaded optimizer"] == 16 * size.weights and needs["published weights"] == 2 * size.weights
    needed_gb = sum(needs.values()) / 1e9
    assert not fit(offloaded, "0.6b", Hardware(gpus=2, host_gb=needed_gb + 0.1)).changes
    short = fit(offloaded, "0.6b", Hardware(gpus=2, host_gb=needed_gb - 0.1))
    assert "the memory of this host (assumed): up to" in short.problem and "Policy.lora" in short.changes
    with pytest.raises(HostError, match="the memory of this host"):
        fit(offloaded, "0.6b", Hardware(gpus=2, host_gb=0.1))
    with pytest.raises(ValueError, match="host_gb=0"):
        Hardware(gpus=1, host_gb=0)
    assert "the memory of this host" in simulate(TEAM, "--gpus", "2", "--model", "0.6b", "--host_gb", "1", status=1)


def test_adapter_is_advised_for_fully_trained_policies(simulate):
    policies = "{a: {model: tiny-random}, b: {model: tiny-random}, c: {model: tiny-random, lora: {rank: 4}}}"
    run = (
        f"env: forge/Relay-v0\npolicies: {policies}\npolicy_mapping: {{asker: a, answerer: b}}\n"
        "trainer: {engine: {max_model_len: 2048}}\n"
    )
    text = simulate(run, "--gpus", "4", "--gpu_gb", "80", "--model", "32b", status=1)
    assert "policies.a.lora: {rank: 16, alpha: 32}, policies.b.lora: {rank: 16, alpha: 32}" in text
    assert "policies.c" not in text


def test_judges_and_league_models_are_counted(simulate, tmp_path, capsys, monkeypatch):
    (tmp_path / "my_judge.py").write_text(
        "import forge_verifiers as fv\nreward = fv.Judge('tiny-random', 'Is it polite?', name='polite')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = f"{POKER}reward: my_judge:reward\nleague: {{anchors: [random]}}\n"
    processes = json.loads(simulate(run, "--gpus", "8", "--model", "0.6b", "--json"))["processes"]
    assert [process["role"] for process in processes] == ["learner", "engines", "engines", "judges"]
    judge = processes[-1]
    assert (judge["name"], judge["gpu"]) == ("polite", "3") and judge["bytes"]["weights"] < 2e6
    nodes = ["--mesh.kind", "slurm", "--mesh.hosts", '{"learner": 1, "engines": 1, "judges": 1}']
    assert main(["train", str(tmp_path / "train.yaml"), "--dry-run", *nodes]) == 0
    text = capsys.readouterr().out
    assert text.count("rank 0, GPU") == 4 and "judges-0 (a node of the job):\n  polite rank 0, GPU 0\n" in text


def test_reward_model_of_the_controller_is_counted(simulate, tmp_path, monkeypatch):
    (tmp_path / "my_grader.py").write_text(
        "import forge_verifiers as fv\n"
        "grader = fv.RewardModel('tiny-random', device='cuda')\n"
        "def reward(trajectories):\n    return grader(trajectories)\n"
        "reward.judges = [grader]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = f"{POKER}reward: my_grader:reward\n"
    for gpus, more in (("2", ()), ("8", ()), ("16", ("--mesh.kind", "slurm", "--mesh.hosts", '{"learner": 1}'))):
        report = json.loads(simulate(run, "--gpus", gpus, "--model", "0.6b", "--json", *more))
        model = report["processes"][-1]
        assert (model["name"], model["role"], model["gpu"]) == ("reward_model", "controller", "0")
        assert model["bytes"]["overhead"] == 2_500_000_000 and model["bytes"]["weights"] > 0
    assert "controller reward_model 1 0 of this host" in simulate(run, "--gpus", "2", "--model", "0.6b")


TWO = {name: fa.Policy(f"model-{name}", name=name) for name in ("solver", "hero-2")}
SHORT = ProcessConfig(engine=fa.EngineConfig(max_model_len=512))


def weights_of(found: Fit) -> dict[str, int]:
    """Bytes of each process, by name."""
    return {one.slot.name: one.parts["weights"] for one in found.placement.processes}


def test_policies_may_have_models_of_different_sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["0.6b"], "dtype": "float32"}))
    own = {**TWO, "hero-2": replace(TWO["hero-2"], model=str(tmp_path))}
    result = fit(replace(SHORT, learner_procs=4), {"solver": "8b"}, Hardware(gpus=10, gpus_per_host=10), policies=own)
    large, small = (ModelSize.named(name).weights for name in ("8b", "0.6b"))
    assert not result.changes
    each = {"solver-learner": large, "hero-2-learner": small, "solver": 2 * large, "hero-2": 4 * small}
    assert weights_of(result) == each, "four bytes of each weight over four ranks; an engine's as they are stored"
    served = {process.slot.name: process.policies for process in result.placement.processes}
    assert served == {name: ("hero-2" if "hero" in name else "solver",) for name in each}
    named = {"solver": "8b", "hero-2": "0.6b"}
    both = fit(replace(SHORT, learner_procs=4), named, Hardware(gpus=10, gpus_per_host=10), policies=TWO)
    assert weights_of(both) == {**each, "hero-2": 2 * small}


def test_unknown_model_is_refused(monkeypatch):
    def no_hub(model: str) -> Path:
        raise ModelNotFoundError(f"the hub has no {model!r}.")

    for way in ("config_folder", "resolve"):
        monkeypatch.setattr(placement.models, way, no_hub)
    size = r"Or give a size that needs no model \(0\.6b, 8b.*: --policies.hero-2.model 8b"
    with pytest.raises(ModelNotFoundError, match=rf"policy hero-2: the hub has no 'model-hero-2'\. {size}"):
        fit(SHORT, {"solver": "8b"}, Hardware(gpus=8), policies=TWO)
    with pytest.raises(ModelNotFoundError, match="policy solver: the hub has no 'nowhere/9b'"):
        fit(SHORT, "nowhere/9b", Hardware(gpus=8), policies=TWO)


def test_advised_adapters_of_different_models_share_no_engine():
    result = fit(SHORT, {"solver": "32b", "hero-2": "0.6b"}, Hardware(gpus=4), policies=TWO)
    assert "Policy.lora" in result.changes and len(result.placement.processes) == 4
    assert weights_of(result)["solver"] > 50 * weights_of(result)["hero-2"]


def test_candidates_suit_all_models(tmp_path):
    odd = {**SHAPES["8b"], "num_attention_heads": 6, "num_key_value_heads": 6}  # one, two, three or six ranks
    (tmp_path / "config.json").write_text(json.dumps(odd))
    sizes = {"solver": str(tmp_path), "hero-2": "32b"}
    frozen = {name: replace(policy, trainable=False) for name, policy in TWO.items()}
    four = replace(SHORT, engine=replace(SHORT.engine, tp=4))
    result = fit(four, sizes, Hardware(gpus=8, gpu_gb=60), policies=frozen)
    assert "engine.tp=4 does not divide" in result.problem
    assert result.changes["engine.tp"] == 2, "four ranks cannot share six heads, one has no room for 32 billion weights"
    mixture = {"solver": "30b-a3b", "hero-2": "8b"}
    tried = fit(SHORT, mixture, Hardware(gpus=8), policies=TWO)
    assert tried.changes["Policy.lora"] == ATTENTION
    still = {**TWO, "solver": replace(TWO["solver"], trainable=False)}
    tried = fit(SHORT, mixture, Hardware(gpus=3, gpu_gb=79), policies=still)
    assert tried.changes["Policy.lora"] == fa.LoRA(), "a mixture that does not learn gets no adapter"


@pytest.mark.parametrize(
    ("asked", "allowed"), [("full", {"full"}), ("selective", {"selective", "full"}), ("none", {"none", "selective"})]
)
def test_recomputation_is_never_reduced(asked, allowed):
    settings = replace(SETTINGS, learner=fa.LearnerConfig(activation_checkpointing=asked))
    result = fit(settings, "8b", Hardware(gpus=8))
    (learner,) = result.placement.learners.values()
    assert result.changes["learner_procs"] == 4 and learner.activation_checkpointing in allowed
    assert result.changes.get("learner.activation_checkpointing", asked) == learner.activation_checkpointing


def test_report_names_the_policies_of_processes(simulate):
    adapter = "{model: tiny-random, lora: {rank: 4}}"
    run = (
        f"env: forge/Relay-v0\npolicies: {{hero: {adapter}, hero-2: {adapter}, hero-2-1: {{model: tiny-random}}}}\n"
        "policy_mapping: {asker: hero, answerer: hero-2, third: hero-2-1}\n"
        "trainer: {engine: {max_model_len: 512, replicas: 2}}\n"
    )
    text = simulate(run, "--gpus", "8", "--model")
    assert dict(re.findall(r"((?:engine )?hero\S*) (\d) \d of this host", text)) == {
        "hero-hero-2-learner": "1",
        "hero-2-1-learner": "1",
        **dict.fromkeys(("engine hero-0", "engine hero-1", "engine hero-2-1-0", "engine hero-2-1-1"), "1"),
    }
    hosts = ("--gpus", "16", "--gpus_per_host", "16", "--trainer.learner_procs", "4")
    words = (*hosts, "--model", "--policies.hero-2-1.model", "8b", "--json")
    processes = json.loads(simulate(run, *words))["processes"]
    by_name = {process["name"]: (process["role"], process["policies"]) for process in processes}
    assert by_name["hero-hero-2-learner"] == ("learner", ["hero", "hero-2"])
    assert by_name["hero-1"] == ("engines", ["hero", "hero-2"])
    assert by_name["hero-2-1-0"] == ("engines", ["hero-2-1"])
    large = {name for name, (_, policies) in by_name.items() if "hero-2-1" in policies}
    assert {process["name"] for process in processes if process["bytes"]["weights"] > 1e9} == large


def test_league_snapshots_have_the_model_of_their_policy(simulate):
    run = f"{POKER}league: {{anchors: [random]}}\ntrainer: {{engine: {{max_model_len: 512}}}}\n"
    report = json.loads(simulate(run, "--gpus", "8", "--model", "--policies.team.model", "0.6b", "--json"))
    weights = {process["name"]: process["bytes"]["weights"] for process in report["processes"]}
    assert weights["team"] == weights["team-opponent"] == 2 * ModelSize.named("0.6b").weights


def test_judge_with_the_name_of_a_policy_is_separate():
    chat = fv.Judge("tiny-random", "Is it so?", name="hero", engine=fa.EngineConfig(max_model_len=512)).own_engine
    assert chat is not None
    result = fit(SHORT, "0.6b", Hardware(gpus=4), policies={"hero": fa.Policy("model", name="hero")}, judges=[chat])
    _, engine, judge = result.placement.processes
    assert (engine.slot.name, engine.parts["weights"]) == ("hero", 2 * ModelSize.named("0.6b").weights)
    assert judge.policies == () and judge.slot.role == "judges" and judge.parts["weights"] < 2e6


@pytest.mark.parametrize(("example", "gpus"), [("slurm", 16), ("kubernetes", 24), ("skypilot", 16)])
def test_examples_of_several_hosts_fit(example, gpus):
    words = [str(PAGE.parents[1] / "examples" / example / "train.yaml")]
    if example == "kubernetes":
        words += ["--mesh.namespace", "forge-agents"]
    if example == "skypilot":  # hosts.yaml says who they are
        words += ["--mesh.workers", '{"learner": ["tcp://node1:26600"], "engines": ["tcp://node2:26600"]}']
    run: Any = parse(fa.RunConfig, words, prog="train", description="")
    result = fit(run.trainer, "0.6b", Hardware(gpus=gpus), policies=run.models, hosts=run.mesh)
    assert not result.changes and not result.placement.doubts and result.used == gpus
