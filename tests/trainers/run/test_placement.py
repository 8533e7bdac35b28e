"""Learners and engines on GPUs that are only numbers: who is where, with how much memory, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.errors import HostError
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.cluster import Cluster
from forge_agents.runtime.host_process import HostFacts
from forge_agents.runtime.hosts import ProcessSlot
from forge_agents.serving.config import EnginePlan
from forge_agents.serving.memory import OVERHEAD_BYTES, Footprint, adapter_weights, check_cache, kv_bytes
from forge_trainers.learner.memory import learner_bytes
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.run import placement
from forge_trainers.run.parts import ATTENTION_TARGETS, Compute, Part, check_parts
from forge_trainers.run.placement import host_doubts, place, place_here

H100 = 80_000_000_000


def fixed_bytes(size):
    """Memory of an engine without its cache."""
    return sum(Footprint(size=size).fixed(fa.EngineConfig()).values())


def hero(folder, learner):
    """The learner and the engine of a policy."""
    return [
        Compute(name=name, policies=("hero",), folder=folder, ranks=1, learner=plan)
        for name, plan in (("hero-learner", learner), ("hero", None))
    ]


def on(gpus, wants, each=H100):
    layout = Cluster(fa.Hosts(), lambda: "here", [("", role, procs) for role, procs in wants.items()])
    ids = tuple(map(str, range(gpus)))
    layout._here.facts = HostFacts(
        hostname="node", gpus=ids, cores=frozenset({0}), memory_domain="", gpu_bytes=(each,) * gpus
    )
    return layout.preview


def placed(model, gpus, *, ranks=1, replicas=1, engine=None, each=H100, turns=False, **learner):
    size, engine = ModelSize.named(model), engine or fa.EngineConfig(max_model_len=8192)
    parts = [
        Part(name="hero-learner", ranks=ranks, size=size, learner=LearnerPlan(**learner)),
        *(Part(name=f"hero-{i}", ranks=engine.tp, size=size) for i in range(replicas)),
    ]
    return place(parts, engine, on(gpus, {"learner": ranks, "engines": replicas * engine.tp}, each), turns=turns)


@pytest.mark.parametrize(
    ("model", "billions"), [("0.6b", 0.596), ("8b", 8.19), ("32b", 32.76), ("70b", 70.55), ("30b-a3b", 30.53)]
)
def test_a_well_known_model_has_the_weights_that_its_maker_counts(model, billions):
    assert ModelSize.named(model).weights / 1e9 == pytest.approx(billions, rel=2e-3)


def test_two_gpus_serve_learner_and_engine():
    result = placed("0.6b", 2)
    assert [(one.slot.name, one.slot.gpu) for one in result.processes] == [("hero-learner", "0"), ("hero-0", "1")]
    assert result.engines["hero-0"].gpu_memory_utilization is None  # it has its own: vLLM measures what it may take
    lines = result.lines()
    assert lines[0].split() == ["process", "ranks", "GPUs", "GB", "of", "each", "parts"]
    assert lines[1].startswith("hero-learner") and "1 of this host" in lines[2]
    row = r"engine hero-0 +1 +1 of .* 72.0 of 80.0  weights 1.2, activations 0.4, overhead 2.5, cache"
    assert re.match(row, lines[2])


def test_engine_takes_what_the_learner_leaves_on_one_gpu():
    result = placed("0.6b", 1)
    assert {one.slot.gpu for one in result.processes} == {"0"}
    assert 0.5 < result.engines["hero-0"].gpu_memory_utilization < 0.95
    assert sum(one.bytes for one in result.processes) <= 0.951 * H100
    size = ModelSize.named("0.6b")
    left = 0.95 * H100 - sum(learner_bytes(size, LearnerPlan()).values())
    beside = fixed_bytes(size)
    assert result.engines["hero-0"].kv_cache_gb == pytest.approx((left - beside) / 1e9, abs=0.01)


def test_every_adapter_of_an_engine_counts_as_the_largest():
    size = ModelSize.named("0.6b")

    def beside(*loras):
        part = Part(name="hero", ranks=1, size=size, adapters=loras)
        return place([part], fa.EngineConfig(), on(1, {"engines": 1})).processes[0].parts.get("adapters", 0)

    one = 2 * adapter_weights(size, fa.LoRA(rank=64))
    assert (beside(), beside(fa.LoRA(rank=64)), beside(fa.LoRA(rank=33))) == (0, one, one)  # as vLLM rounds it
    assert beside(fa.LoRA(rank=64, targets=("q_proj",)), fa.LoRA(rank=2)) == 2 * one


def test_float32_model_takes_twice_the_memory():
    part = Part(name="hero", ranks=1, size=ModelSize.named("0.6b"), dtype="float32")
    weights = {
        dtype: place([part], fa.EngineConfig(dtype=dtype), on(1, {"engines": 1})).processes[0].parts["weights"]
        for dtype in ("auto", "float32", "bfloat16")
    }
    assert weights["auto"] == weights["float32"] == 2 * weights["bfloat16"]


def test_misfit_is_refused_with_the_arithmetic():
    with pytest.raises(HostError, match=r"GPU 0 of .* has 80.0 GB, .*hero-learner expects 1\d\d.\d GB \(weights 32.8"):
        placed("8b", 1)
    with pytest.raises(HostError, match=r"engine hero-0 expects \d+.\d GB \(weights 141.\d.*raise engine.tp"):
        placed("70b", 65, ranks=64, activation_checkpointing="full")


def test_cache_holds_one_conversation():
    result = placed("8b", 8, ranks=4, replicas=4, engine=fa.EngineConfig())
    engine = next(one for one in result.processes if one.slot.role == "engines")
    size = ModelSize.named("8b")
    assert kv_bytes(size, size.context) == pytest.approx(40960 * 2 * 36 * 8 * 128 * 2, rel=0.02)  # 6 GB: over 1
    assert engine.parts["cache"] > kv_bytes(size, size.context)


def test_large_model_is_split_over_ranks():
    result = placed("32b", 8, ranks=4, replicas=2, engine=fa.EngineConfig(tp=2, max_model_len=8192),
                   lora=fa.LoRA(), activation_checkpointing="full")  # fmt: skip
    assert [one.slot.gpu for one in result.processes] == list("01234567")
    assert all(one.bytes <= H100 for one in result.processes)


def test_gpu_of_unknown_memory_is_used():
    size = ModelSize.named("70b")
    seats = on(1, {"learner": 1}, each=0)
    learner = Part(name="hero-learner", ranks=1, size=size, learner=LearnerPlan())
    assert [one.slot.gpu for one in place([learner], fa.EngineConfig(), seats).processes] == ["0"]


def test_requested_share_of_a_gpu_must_be_free():
    with pytest.raises(
        HostError, match=r"GPU 0 .* 76.0 .*lower gpu_memory_utilization=0.9 of engine hero-0, .*takes 72"
    ):
        placed("0.6b", 1, engine=fa.EngineConfig(max_model_len=8192, gpu_memory_utilization=0.9))
    assert placed("0.6b", 1, engine=fa.EngineConfig(max_model_len=8192, gpu_memory_utilization=0.5))


def test_refusal_names_the_requested_share():
    with pytest.raises(HostError, match=r"engine.kv_cache_gb 100\.0\)\. To make it fit, lower engine.kv_cache_gb or"):
        placed("0.6b", 2, engine=fa.EngineConfig(max_model_len=8192, kv_cache_gb=100))
    with pytest.raises(HostError, match=r"0\.8 may .*raise gpu_memory_utilization=0\.01 of engine .*raise engine.tp"):
        placed("0.6b", 2, engine=fa.EngineConfig(max_model_len=8192, gpu_memory_utilization=0.01))


def test_engines_share_the_rest_of_a_gpu_evenly():
    small, large, settings = ModelSize.named("0.6b"), ModelSize.named("8b"), fa.EngineConfig(max_model_len=8192)
    learner = LearnerPlan(lora=fa.LoRA(), activation_checkpointing="full")
    seats = [("learner", "0"), ("small", "0"), ("large", "1"), ("other", "1")]

    def seated(meshes):
        names = {name: role for name, role, _ in meshes}
        return [
            ProcessSlot(name=name, role=names[name], rank=0, host="node", gpu=gpu, gpu_bytes=H100)
            for name, gpu in seats
        ]

    result = place(
        [
            Part(name="learner", ranks=1, size=large, learner=learner),
            Part(name="small", ranks=1, size=small),
            Part(name="large", ranks=1, size=large),
            Part(name="other", ranks=1, size=small),
        ],
        settings,
        seated,
    )
    fixed = {size: fixed_bytes(size) for size in (small, large)}
    least = {size: kv_bytes(size, 8192) for size in (small, large)}
    even = (0.95 * H100 - sum(fixed.values()) - sum(least.values())) / 2
    beside = 0.95 * H100 - sum(learner_bytes(large, learner).values()) - fixed[small]
    cache = {name: 1e9 * (config.kv_cache_gb or 0) for name, config in result.engines.items()}
    assert cache["large"] == pytest.approx(least[large] + even, abs=1e7)
    # one model's have the same settings: the smaller room counts
    assert cache["small"] == cache["other"] == pytest.approx(min(beside, least[small] + even), abs=1e7)
    assert sum(one.bytes for one in result.processes if one.slot.gpu == "1") <= 0.951 * H100


def test_large_and_small_engine_share_a_gpu():
    parts = [Part(name=name, ranks=1, size=ModelSize.named(name)) for name in ("32b", "0.6b")]
    seats = on(1, {"engines": 2})
    result = place(parts, fa.EngineConfig(max_model_len=2048), seats)
    large, little = result.processes
    assert large.bytes > 0.8 * H100 > 0.2 * H100 > little.bytes and large.bytes + little.bytes <= 0.951 * H100
    with pytest.raises(HostError, match=r"of which 76\.0 may be used: engine 32b .*; engine 0\.6b expects"):
        place(parts, fa.EngineConfig(max_model_len=16384), seats)


def test_engine_alone_on_a_gpu_is_not_limited():
    parts = [
        Part(name="learner", ranks=1, size=ModelSize.named("0.6b"), learner=LearnerPlan()),
        Part(name="large", ranks=1, size=ModelSize.named("8b")),
        Part(name="small", ranks=1, size=ModelSize.named("0.6b")),
    ]
    each = 29_800_000_000
    result = place(parts, fa.EngineConfig(max_model_len=40960), on(2, {"learner": 1, "engines": 2}, each))
    gpus = {one.slot.name: one.slot.gpu for one in result.processes}
    assert gpus == {"learner": "0", "large": "1", "small": "0"}
    assert result.engines["large"].gpu_memory_utilization is result.engines["large"].kv_cache_gb is None
    assert 4 < (result.engines["small"].kv_cache_gb or 0) < 6


def test_colocated_run_takes_turns_if_needed():
    small, whole = 24_000_000_000, {"activation_checkpointing": "none"}
    with pytest.raises(HostError, match=r"22\.8 may .*hero-learner expects 18\.9 GB.*hero-0 expects .*; set colocate"):
        placed("0.6b", 1, each=small, **whole)
    result = placed("0.6b", 1, each=small, turns=True, **whole)
    learner, engine = result.processes
    assert result.engines["hero-0"].sleeps and learner.slot.gpu == engine.slot.gpu == "0"
    assert learner.bytes + OVERHEAD_BYTES <= 0.95 * small  # beside an engine that sleeps
    assert engine.bytes + OVERHEAD_BYTES == pytest.approx(0.95 * small, rel=1e-3)  # beside a learner that is parked
    assert not placed("0.6b", 1, turns=True).engines["hero-0"].sleeps  # it fits as it is
    assert not placed("0.6b", 2, each=small, turns=True).engines["hero-0"].sleeps  # each has its own
    assert not placed("0.6b", 1, each=small, turns=True).engines["hero-0"].sleeps  # some of it is recomputed
    with pytest.raises(HostError, match=r"80.0 GB, .*: hero-learner expects 1\d\d.*; 1 sleeping engine expects 2\.5"):
        placed("8b", 1, turns=True)


def test_learner_recomputes_as_little_as_possible():
    def recomputed(model, ranks, **settings):
        result = placed(model, 2 * ranks, ranks=ranks, replicas=ranks, **settings)
        how = result.learners["hero-learner"].activation_checkpointing
        learner = result.processes[0]
        size = ModelSize.named(model)
        assert learner.bytes == sum(learner_bytes(size, result.learners["hero-learner"], ranks=ranks).values())
        return how

    assert recomputed("0.6b", 1) == "none"
    longer = {"max_sample_tokens": 8192}
    assert recomputed("8b", 4, **longer) == "selective"
    assert recomputed("8b", 4, max_sample_tokens=16384) == "full"
    assert recomputed("8b", 4, **longer, activation_checkpointing="full") == "full"
    with pytest.raises(HostError, match=r"hero-learner expects \d+.*shards the learner, set learner.activation_check"):
        recomputed("8b", 4, **longer, activation_checkpointing="none")
    with pytest.raises(HostError, match=r"hero-learner expects 1\d\d.*shards the learner, lower learner.max_tokens"):
        recomputed("8b", 1)
    assert recomputed("0.6b", 1, each=24_000_000_000) == "none"


@pytest.mark.parametrize(
    ("gigabytes", "ranks", "learners", "decided"),
    [
        (25, 1, 1, (4096, 1024)),
        (23, 1, 1, (4096, 256)),
        (17, 1, 1, (2048, 1024)),
        (15, 1, 1, (2048, 256)),
        (25, 2, 1, (2048, 256)),
        (25, 1, 2, (2048, 256)),
        (50, 1, 2, (4096, 1024)),
    ],
)
def test_learners_on_cpu_share_half_of_the_memory(monkeypatch, gigabytes, ranks, learners, decided):
    monkeypatch.setattr(placement, "total_bytes", lambda: gigabytes * 10**9)
    size = ModelSize.of(Path(placement.models.resolve("smollm2-135m-instruct")))
    names = [f"hero-{i}-learner" for i in range(learners)]
    parts = [Part(name=name, ranks=ranks, size=size, learner=LearnerPlan()) for name in names]
    rehearse = on(0, {"learner": ranks * learners})
    for own in place(parts, fa.EngineConfig(), rehearse).learners.values():
        assert (own.max_tokens_per_microbatch, own.loss_chunk_tokens) == decided
        assert own.activation_checkpointing == "none"

    def elsewhere(meshes):
        return [replace(seat, host="learner-0 (node)") for seat in rehearse(meshes)]

    for own in place(parts, fa.EngineConfig(), elsewhere).learners.values():
        assert (own.max_tokens_per_microbatch, own.loss_chunk_tokens) == (2048, 256)


@pytest.mark.parametrize(("gigabytes", "decided"), [(25, (4096, 1024)), (4, (2048, 256))])
def test_passes_on_cpu_follow_the_host_memory(monkeypatch, gigabytes, decided):
    output = []
    layout = on(0, {"learner": 1, "engines": 1}).__self__
    monkeypatch.setattr(mesh, "_cluster", lambda: layout)
    monkeypatch.setattr(startup, "say", output.append)
    monkeypatch.setattr(placement, "total_bytes", lambda: gigabytes * 10**9)
    folder = Path(placement.models.resolve("smollm2-135m-instruct"))
    learner, engine = LearnerPlan(model=str(folder)), fa.EngineConfig(max_num_seqs=3)
    engines, learners = place_here(hero(folder, learner), engine=engine)
    own = learners["hero-learner"]
    assert (own.max_tokens_per_microbatch, own.loss_chunk_tokens, own.activation_checkpointing) == (*decided, "none")
    assert engines == {"hero": EnginePlan.of(engine)}
    assert [line.partition(":")[0] for line in output] == ["hero-learner, by memory"] * (decided != (2048, 256))


def test_passes_grow_on_exclusive_gpus():
    def chosen(model, gpus, **settings):
        own = placed(model, gpus, **settings).learners["hero-learner"]
        return own.max_tokens_per_microbatch, own.loss_chunk_tokens

    assert chosen("0.6b", 2) == (8192, 1024)
    assert chosen("0.6b", 1) == (2048, 256)  # an engine takes what is left
    assert chosen("0.6b", 2, each=40_000_000_000) == (4096, 512)
    assert chosen("0.6b", 2, each=24_000_000_000) == (2048, 256)
    assert chosen("0.6b", 2, each=0) == (2048, 256)  # nobody knows
    assert chosen("0.6b", 1, max_sample_tokens=5000) == (4096, 256)  # room that a sample needs anyway
    assert chosen("0.6b", 2, compile=True) == (2048, 1024)  # whose rows are padded to an eighth of a pass
    assert chosen("0.6b", 2, max_tokens_per_microbatch=3000) == (3000, 1024)
    assert chosen("0.6b", 2, loss_chunk_tokens=7) == (8192, 7)
    assert chosen("0.6b", 4, ranks=2, tp=2, each=40_000_000_000) == (8192, 1024)  # of half of the vocabulary


def test_memory_driven_settings_are_shown_and_keep_the_loss():
    requests = LearnerPlan(loss="dr_grpo", loss_chunk_tokens=300)
    result = placed("0.6b", 2, loss="dr_grpo", loss_chunk_tokens=300)
    own = result.learners["hero-learner"]
    assert own.loss_settings == requests.loss_settings and own.loss_settings.length_constant == 2048
    assert result.chosen({"hero-learner": requests}) == [
        "hero-learner, by memory: max_tokens_per_microbatch 8192, activation_checkpointing none"
    ]
    assert placed("0.6b", 1).chosen({"hero-learner": LearnerPlan()}) == []  # as small as can be
    output = LearnerPlan(max_tokens_per_microbatch=4096, loss_chunk_tokens=7, activation_checkpointing="none")
    assert place([Part(name="hero-learner", ranks=1, size=ModelSize.named("0.6b"), learner=output)], fa.EngineConfig(),
                 on(1, {"learner": 1})).chosen({"hero-learner": output}) == []  # fmt: skip


def test_colocation_excludes_asynchronous_rollouts():
    with pytest.raises(ValueError, match="lets engines and learner compute in turns, and max_staleness=1"):
        fa.GRPOConfig(colocate=True, max_staleness=1)


class Judging:
    """A judge's engine that only notes what it is told."""

    running = False

    def __init__(self, name, model, **settings):
        self.name, self.model, self.config = name, str(model), fa.EngineConfig(**settings)
        self.told: tuple[str, fa.EngineConfig] | None = None

    def place(self, name, config):
        self.told = (name, config)


@pytest.fixture
def small_judge(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["0.6b"]))
    return tmp_path


@pytest.fixture
def node(monkeypatch):
    """Places a learner, an engine and judges on that many GPUs. Returns the printed lines."""

    def placed_with(gpus, judges, folder, **settings):
        wants = {"learner": 1, "engines": 1, "judges": len(judges)}
        output = []
        layout = on(gpus, wants).__self__
        monkeypatch.setattr(mesh, "_cluster", lambda: layout)
        monkeypatch.setattr(startup, "say", output.append)
        monkeypatch.setattr(placement, "available_bytes", lambda: 1 << 50)
        monkeypatch.setattr(placement.models, "resolve", Path)
        learner = LearnerPlan(model=str(folder), max_sample_tokens=2048)
        engine = fa.EngineConfig(max_model_len=8192)
        place_here(hero(folder, learner), engine=engine, judges=judges, **settings)
        return [line for line in output if "by memory" not in line]

    return placed_with


def cells(lines):
    """Name, GPU and GB of each row of the table."""
    rows = [re.split(r"\s{2,}", line) for line in lines[1:]]
    return [(name, gpus.split()[0], float(memory.split()[0])) for name, _, gpus, memory, _ in rows]


def test_judges_have_own_gpus_or_share(node, small_judge):
    judges = [Judging("judge", small_judge, max_model_len=4096) for _ in range(2)]
    assert [row[:3] for row in cells(node(4, judges, small_judge))] == [
        ("hero-learner", "0", 35.8), ("engine hero", "1", 72.0),
        ("judge judge", "2", 72.0), ("judge judge-2", "3", 72.0),
    ]  # fmt: skip
    assert [told[1].gpu_memory_utilization for judge in judges if (told := judge.told)] == [None, None]
    node(3, judges, small_judge)
    assert all(judge.told is not None for judge in judges)
    configs = [told[1] for judge in judges if (told := judge.told)]
    assert [config.gpu_memory_utilization for config in configs] == [0.475, 0.475]  # both on the third
    fixed = fixed_bytes(ModelSize.named("0.6b"))
    assert configs[0].kv_cache_gb == pytest.approx((0.475 * H100 - fixed) / 1e9, abs=0.01)


def test_judge_on_a_shared_gpu_reduces_the_engine_cache(node, small_judge):
    judge = Judging("judge", small_judge, gpu_memory_utilization=0.25)
    rows = cells(node(2, [judge], small_judge))
    assert [gpu for _, gpu, _ in rows] == ["0", "1", "1"]
    assert rows[1][2] == pytest.approx(0.7 * 80, abs=0.1)  # 0.95 of it without the judge's quarter
    greedy = Judging("judge", small_judge, gpu_memory_utilization=0.9)
    with pytest.raises(HostError, match=r"engine hero .*; judge judge .*lower gpu_memory_utilization=0.9 of judge"):
        node(2, [greedy], small_judge)


def test_misfit_with_a_judge_lists_its_bytes(node, small_judge):
    size = ModelSize.named("0.6b")
    at_its_own = fixed_bytes(size) + kv_bytes(size, size.context)
    many = [Judging("judge", small_judge) for _ in range(10)]
    assert 10 * at_its_own > 0.95 * H100 > 10 * (at_its_own - kv_bytes(size, size.context - 4096))
    with pytest.raises(HostError, match=r"76.0 may be used: judge judge .*judge judge-10 expects .*max_model_len=4096"):
        node(3, many, small_judge)
    assert node(3, [Judging("judge", small_judge, max_model_len=4096) for _ in range(10)], small_judge)


def test_judge_stays_loaded_during_colocation(node, small_judge):
    """One GPU on which learner and engine do not fit side by side, and a judge, which does not sleep."""
    judge = Judging("judge", small_judge, max_model_len=2048)
    size, settings = ModelSize.named("0.6b"), fa.EngineConfig(max_model_len=8192)
    whole = LearnerPlan(activation_checkpointing="none")
    parts = [
        Part(name="learner", ranks=1, size=size, learner=whole),
        Part(name="hero", ranks=1, size=size),
        Part(name="judge", ranks=1, size=size, judge=EnginePlan.of(judge.config)),
    ]
    each = 28_000_000_000
    seats = on(1, {"learner": 1, "engines": 1, "judges": 1}, each)
    result = place(parts, settings, seats, turns=True)
    learner, hero, one = (process.bytes for process in result.processes)
    assert result.engines["hero"].sleeps and not result.engines["judge"].sleeps
    assert learner + OVERHEAD_BYTES + one <= 0.951 * each and OVERHEAD_BYTES + hero + one <= 0.951 * each
    with pytest.raises(HostError, match=r"learner expects .*; judge judge expects .* give judges separate GPUs"):
        place(parts, settings, on(1, {"learner": 1, "engines": 1, "judges": 1}, 25_000_000_000), turns=True)


class Loading:
    """A model that the controller loads: what is read of it."""

    def __init__(self, folder, device, name="graded", batch_tokens=8192):
        self.name, self.model, self.device, self.batch_tokens = name, str(folder), device, batch_tokens


def weights_of(folder, num_bytes):
    """A file of weights of that size, which takes no disk."""
    with (folder / "model.safetensors").open("wb") as file:
        size = num_bytes - 8 - 256
        entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
        file.write((256).to_bytes(8, "little") + json.dumps({"weight": entry}).encode().ljust(256))
        file.truncate(num_bytes)


def test_models_of_the_controller_are_counted(node, small_judge):
    weights_of(small_judge, 1_200_000_000)
    models = [Loading(small_judge, "cuda:1"), Loading(small_judge, "cuda:1", "other"), Loading(small_judge, "cpu")]
    learner, engine, own = cells(node(2, [], small_judge, held=models))
    assert learner == cells(node(2, [], small_judge))[0]
    passes = 8192 * (4 * 1024 + (16 + 2 * 8) * 128 + 3 * 3072) * 2
    taken = 2 * (1_200_000_000 + passes) + OVERHEAD_BYTES  # one process
    assert own == ("controller graded, other", "1", pytest.approx(taken / 1e9, abs=0.1))
    assert engine[2] == pytest.approx((0.95 * H100 - taken) / 1e9, abs=0.1)
    with pytest.raises(HostError, match=r"graded has device cuda:2, and the controller's host has 2 GPUs"):
        node(2, [], small_judge, held=[Loading(small_judge, "cuda:2")])
    *_, unknown = node(2, [], small_judge, held=[Loading(Path("nowhere"), "cuda")])
    assert unknown.startswith("not counted: the model of graded: ")


def test_misfit_with_controller_models_lists_their_bytes(node, small_judge):
    weights_of(small_judge, 70_000_000_000)
    loads = [Loading(small_judge, "cuda")]  # where the learner is
    with pytest.raises(HostError, match=r"learner expects .*; controller graded expects 72\.8 .* \(device=\"cuda:1\""):
        node(2, [], small_judge, held=loads)
    with pytest.raises(HostError, match=r"learner expects .*; controller graded expects .*batch_tokens; set colocate"):
        node(1, [], small_judge, held=loads)
    assert node(3, [], small_judge, held=[Loading(small_judge, "cuda:2")])
    weights_of(small_judge, 75_000_000_000)
    with pytest.raises(HostError, match=r"GPU 2 of .* has 80.0 GB, .*: controller graded expects 77\.8 .* elsewhere"):
        node(3, [], small_judge, held=[Loading(small_judge, "cuda:2")])


def test_running_processes_on_gpus_are_reported(node, small_judge, monkeypatch):
    monkeypatch.setattr(mesh, "running_on", lambda places: ["polite"] if places else [])
    *_, told = node(2, [], small_judge)
    assert told == "not counted: polite, which runs already on a GPU of this run"


def test_short_host_memory_is_reported():
    size, engine = ModelSize.named("70b"), fa.EngineConfig(max_model_len=8192, tp=4)
    engines = [Part(name=f"hero-{i}", ranks=4, size=size) for i in range(2)]
    whole = Part(name="hero-learner", ranks=64, size=size, learner=LearnerPlan(activation_checkpointing="full"))
    rival = Part(name="rival", ranks=4, size=size)
    parts = [whole, *engines, rival]
    result = place(parts, engine, on(80, {"learner": 64, "engines": 12}))
    each = 2 * size.weights
    assert host_doubts(parts, result, free=each) == []  # whoever reads them, they are there once
    (told,) = host_doubts(parts, result, free=each - 1)
    assert "(published weights 141.1) and 141.1 are free" in told
    exact = replace(whole, learner=LearnerPlan(compute_dtype="float32"))  # and travels as it is computed
    assert "(published weights 282.2)" in host_doubts([exact, *engines], result, free=0)[0]
    adapter = replace(whole, learner=LearnerPlan(lora=fa.LoRA(), activation_checkpointing="full"))
    assert host_doubts([adapter, *engines], result, free=0) == []  # its bytes are few
    small = ModelSize.named("0.6b")
    settings = LearnerPlan(activation_checkpointing="none")
    learner = Part(name="hero-learner", ranks=1, size=small, learner=settings)
    parts = [learner, Part(name="hero", ranks=1, size=small)]
    turns = place(parts, fa.EngineConfig(max_model_len=8192), on(1, {}, 24_000_000_000), turns=True)
    parked = (4 + 8 + 2) * small.weights
    (told,) = host_doubts(parts, turns, free=0)
    assert f"colocated processes {parked / 1e9:.1f})" in told


def test_running_or_unknown_judges_are_reported(node, small_judge):
    running = Judging("first", small_judge)
    running.running = True
    *_, one, other = node(4, [running, Judging("second", "no-such-model")], small_judge)
    assert one == "not counted: the engine of first, which runs already"
    assert other.startswith("not counted: the engine of second: ")
    assert running.told is None


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (4, {"tp": 3}, "tp=3 of the learner does not divide learner_procs=4"),
        (4, {"tp": 2, "dp_replicate": 4}, r"dp_replicate=4 \* tp=2 of the learner does not divide learner_procs=4"),
        (16, {"tp": 16}, "learner.tp=16 does not divide the model's num_key_value_heads=8"),
        (4, {"ep": 4}, "learner.ep=4 spreads experts, and the model has none"),
    ],
)
def test_invalid_ranks_are_refused_before_startup(ranks, settings, message):
    size = ModelSize.named("8b")
    learner = Part(name="hero-learner", ranks=ranks, size=size, learner=LearnerPlan(**settings))
    with pytest.raises(ValueError, match=message):
        check_parts([learner], fa.EngineConfig())
    with pytest.raises(ValueError, match="engine.tp=3 does not divide the 32 query and 8 key heads of hero"):
        check_parts([Part(name="hero", ranks=3, size=size)], fa.EngineConfig())


def test_unsupported_model_settings_are_refused_before_startup(monkeypatch, tiny_models):
    mixture, engine = ModelSize.named("30b-a3b"), Part(name="hero", ranks=1, size=ModelSize.named("8b"))
    with pytest.raises(ValueError, match="max_model_len=40961 is more than the 40960 tokens that hero has"):
        check_parts([engine], fa.EngineConfig(max_model_len=40961))
    check_parts([engine], fa.EngineConfig(max_model_len=40960))
    # 36 layers, keys and values of 8 heads of 128, two bytes each: 147,456 a token
    check_cache(engine.size, fa.EngineConfig(max_model_len=1000, kv_cache_gb=0.1475), "hero", dtype="bfloat16")
    with pytest.raises(ValueError, match="0.147 holds 996 tokens of hero, and a conversation may have 1000"):
        check_cache(engine.size, fa.EngineConfig(max_model_len=1000, kv_cache_gb=0.147), "hero", dtype="bfloat16")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_parts([engine], fa.EngineConfig(max_model_len=40961))

    def learner(size, lora):
        return Part(name="hero-learner", ranks=1, size=size, learner=LearnerPlan(lora=lora))

    with pytest.raises(ValueError, match=r"hero-learner: .* cannot be adapted. Set LoRA\(targets=\('q_proj', 'k_proj'"):
        check_parts([learner(mixture, fa.LoRA())], fa.EngineConfig())
    latent = ModelSize.of(tiny_models(family="deepseek_v3"))
    with pytest.raises(
        ValueError, match=r"of this mixture .* file lora: {targets: \[q_proj, k_proj, v_proj, o_proj\]}"
    ):
        check_parts([learner(latent, fa.LoRA())], fa.EngineConfig())
    check_parts([learner(latent, fa.LoRA(targets=ATTENTION_TARGETS))], fa.EngineConfig())
    dense_first = ModelSize.from_config({**SHAPES["30b-a3b"], "mlp_only_layers": [0]})
    check_parts([learner(dense_first, fa.LoRA())], fa.EngineConfig())  # the learner takes those that there are
    assert mixture.weights - dense_first.weights == 3 * 2048 * (128 * 768 - 6144) + 2048 * 128
    attention = adapter_weights(mixture, fa.LoRA(targets=ATTENTION_TARGETS))
    assert adapter_weights(mixture, fa.LoRA()) == attention
    assert adapter_weights(dense_first, fa.LoRA(rank=1)) == attention // 16 + 3 * (2048 + 6144)


@pytest.mark.parametrize(("gpus", "refused"), [(0, True), (2, False)])
def test_unsupported_heads_are_refused_before_startup(node, tmp_path, gpus, refused):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["0.6b"], "head_dim": 16}))
    refusal = pytest.raises(ValueError, match=r"^hero has heads of 16 channels, and on CPU vLLM .* for 32, 48, 64")
    with refusal if refused else contextlib.nullcontext():
        node(gpus, [], tmp_path)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({}, 1000),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1000),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4000),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 1000),
    ],
)
def test_engine_uses_the_context_of_the_model(rope, context):
    assert ModelSize.from_config({**SHAPES["8b"], "max_position_embeddings": 1000, **rope}).context == context
