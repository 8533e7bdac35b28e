import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_agents as fa
from forge_agents.runtime.hosts import Hosts
from forge_trainers.run.plan import share_threads, threads_of

COUNTS = st.integers(1, 9)


@given(cores=st.integers(1, 64), engines=COUNTS, ranks=st.integers(0, 9), overlap=st.booleans())
def test_threads_never_exceed_the_cores(cores, engines, ranks, overlap):
    threads = share_threads(cores, engines=engines, ranks=ranks, overlap=overlap)
    engine, learner = threads.engine, threads.learner
    assert all(share is None or 1 <= share < cores for share in (engine, learner))
    engine, learner = engine or cores, learner or cores
    room = cores // 2 if overlap and ranks else cores
    assert engines * engine <= max(room, engines)
    assert ranks * learner <= max(cores - room if overlap else cores, ranks)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None)),
        ({"overlap": True}, (4, 4)),
        ({"overlap": True, "ranks": 0}, (None, None)),
        ({"overlap": True, "engines": 2, "ranks": 4}, (2, 1)),
        ({"engines": 2}, (4, None)),
        ({"engines": 0}, (None, None)),  # nobody in any seat is a model
        ({"ranks": 3}, (None, 2)),
    ],
)
def test_shares(settings, expected):
    threads = share_threads(8, **{"engines": 1, "ranks": 1, "overlap": False, **settings})
    assert (threads.engine, threads.learner) == expected


def test_cores_are_divided_only_among_processes_without_threads_setting(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def threads(engines=1, learners=1, **settings):
        config = fa.GRPOConfig(**settings)
        threads = threads_of(config, Hosts(), engines=engines, learners=learners)
        return config.engine.threads or threads.engine, config.learner.threads or threads.learner

    assert threads() == (None, None)  # each has the host for itself
    assert threads(max_staleness=1) == (4, 4)
    assert threads(max_staleness=1, engine=fa.EngineConfig(threads=7)) == (7, 4)
    assert threads(max_staleness=1, learner=fa.LearnerConfig(threads=3)) == (4, 3)
    assert threads(engines=2, learners=2) == (4, 4)
    assert threads(engine=fa.EngineConfig(replicas=4), learner_procs=2) == (2, 4)
