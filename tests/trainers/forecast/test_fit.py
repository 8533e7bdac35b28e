"""Whether a model fits into GPUs, what to change where it does not, and the table of it in the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.cli.main import main
from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_trainers.forecast.fit import Fit, Gpus, fit_gpus, size_of
from forge_trainers.run.config import ProcessConfig

PAGE = Path(__file__).parents[3] / "docs" / "one-node.md"
SETTINGS = ProcessConfig(engine=fa.EngineConfig(max_model_len=8192))


def row(name: str, found: Fit) -> str:
    """A line of the docs' table."""
    cells = [name]
    for role in ("learner", "engines"):
        own = [one for one in found.placement.processes if one.seat.role == role]
        parts = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in own[0].parts.items() if count >= 5e7)
        tp = f" of {max(one.seat.rank for one in own) + 1}" if role == "engines" and own[-1].seat.rank else ""
        many = f"{len({one.seat.name for one in own})}{tp}" if role == "engines" else str(len(own))
        cells += [many, f"{own[0].bytes / 1e9:.1f}", parts]
    how = "an adapter" if "Policy.lora" in found.changes else "all weights"
    recomputed = found.changes.get("learner.activation_checkpointing")
    return f"| {cells[0]} | {how}{', recomputed' if recomputed else ''} | {' | '.join(cells[1:])} |"


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_docs_table_of_a_node_of_eight_is_the_codes_own_arithmetic(name: str) -> None:
    assert row(name, fit_gpus(SETTINGS, ModelSize.named(name), Gpus(count=8))) in PAGE.read_text().splitlines()


def test_what_does_not_fit_says_what_to_change_and_why() -> None:
    found = fit_gpus(SETTINGS, ModelSize.named("8b"), Gpus(count=8))
    assert "GPU 0 of host 0 has 80.0 GB and learner expects 16" in found.problem
    assert found.changes == {"learner_procs": 4, "engine.replicas": 4}
    changed = ProcessConfig(learner_procs=4, engine=fa.EngineConfig(max_model_len=8192, replicas=4))
    assert fit_gpus(changed, ModelSize.named("8b"), Gpus(count=8)).changes == {}


def test_a_run_that_takes_turns_fits_into_gpus_that_it_shares() -> None:
    gpus = Gpus(count=2, memory_gb=17)
    settings = replace(SETTINGS, learner_procs=2, engine=replace(SETTINGS.engine, replicas=2))
    assert fit_gpus(settings, "0.6b", gpus).changes
    found = fit_gpus(replace(settings, colocate=True), "0.6b", gpus)
    assert not found.changes and found.placement.engine.sleeps
    assert sorted(one.seat.gpu for one in found.placement.processes) == ["0", "0", "1", "1"]
    with pytest.raises(HostError, match="3 ranks of learner want a GPU each, and there are 2"):
        gpus.rehearse([("learner", "learner", 3)], share=True)


def test_nothing_makes_seventy_billion_weights_fit_into_one_gpu() -> None:
    with pytest.raises(HostError, match="take more GPUs or larger ones"):
        fit_gpus(SETTINGS, ModelSize.named("70b"), Gpus(count=1))


def test_an_engines_ranks_stay_on_one_host() -> None:
    seats = Gpus(count=16).rehearse([("learner", "learner", 6), ("engine", "engines", 4)])
    assert {seat.host for seat in seats if seat.role == "engines"} == {"host 1"}
    with pytest.raises(HostError, match="want 12 GPUs, one each, and there are 8"):
        Gpus(count=8).rehearse([("learner", "learner", 6), ("engine", "engines", 4)])


def test_a_model_is_named_by_its_shape_or_as_a_policy_names_it(tiny_llama: Path) -> None:
    assert size_of(str(tiny_llama)).layers == 2 and size_of("8B").layers == 36
    with pytest.raises(ModelNotFoundError, match=r"known: 0\.6b, 8b"):
        ModelSize.named("9b")


def test_the_command_says_yes_or_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("policies: {team: {model: smollm2-135m-instruct}}\nseats: team\nenv: forge/Relay-v0\n")
    assert main(["simulate", str(file), "--gpus", "2", "--model", "0.6b"]) == 0
    assert "it fits into 2 GPUs of 80 GB" in capsys.readouterr().out
    assert main(["simulate", str(file), "--gpus", "8", "--model", "8b", "--trainer.engine.max_model_len", "8192"]) == 1
    said = capsys.readouterr().out
    assert "learner_procs: 4" in said and "engine.replicas: 4" in said
