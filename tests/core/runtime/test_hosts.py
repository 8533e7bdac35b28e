"""Settings of hosts, placement of processes on them, jobs of schedulers, and the examples."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_checks import ended_within
from refusals import raises

import forge_agents as fa
from forge_agents.envs.workers import env as workers
from forge_agents.errors import HostError
from forge_agents.private_folder import private_folder
from forge_agents.runtime import _monarch, host_process, jobs, mesh
from forge_agents.runtime import allocation as allocation_module
from forge_agents.runtime.allocation import Host, gpus_per_node
from forge_agents.runtime.cluster import Cluster
from forge_agents.runtime.host_process import HostFacts
from forge_agents.runtime.hosts import parse_cores
from forge_agents.runtime.jobs import gpus_of_processes
from forge_agents.runtime.machine import gpu_bytes, visible_gpus

pytestmark = pytest.mark.anyio


ATTACH = {"kind": "attach", "workers": {"engines": ("tcp://n:1",)}}
TLS = {"kind": "attach", "workers": {"engines": ("tls://n:1",)}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "slrum"}, r"kind='slrum'.*Did you mean 'slurm'"),
        ({"kind": "process"}, "kind='process' of the mesh has no hosts"),
        ({"kind": "process", "hosts": {"spare": 2}}, "has no hosts"),
        ({"kind": "attach"}, r"no hosts. Set e.g. workers: {engines: \[tcp://node1:26600\]}"),
        ({"kind": "process", "hosts": {"engine": 1}}, r"names 'engine'. Its roles are .*Did you mean 'engines'"),
        ({"kind": "process", "hosts": {"engines": 0}}, "gives engines 0. Give 1 to 10000"),
        ({"kind": "process", "hosts": {"engines": 10**9}}, "gives engines 1000000000. Give 1 to 10000"),
        ({"gpus": {"engines": 10**9}}, "gives engines 1000000000. Give 1 to 10000"),
        ({"cpus": {"engines": "0-3000000000"}}, "cpus '0-3000000000' of the mesh"),
        ({"hosts": {"engines": 2}}, "kind='local' of the mesh is this host alone"),
        ({"partition": "gpu"}, "partition of the mesh is for kind='slurm' and kind is 'local'"),
        (
            {"kind": "kubernetes", "hosts": {"engines": 1}},
            "needs a namespace. Set one that has the pods of this run only",
        ),
        ({"kind": "slurm", "hosts": {"engines": 1}, "namespace": "x"}, "namespace of the mesh is for kind='kubernet"),
        ({"kind": "attach", "workers": {"engines": ("node1",)}}, "'node1'. Write an address as 'tcp://node1:26600'"),
        ({"kind": "attach", "workers": {"engines": ("ipc:///x@tcp://node1:1",)}}, "Write an address as"),
        ({"kind": "slurm", "hosts": {"engines": 1}, "address": "node0"}, "Write an address as"),
        ({"cpus": {"engines": "3-1"}}, "cpus '3-1' of the mesh"),
        ({"gpus": {"envs": 1}}, "gpus of the mesh names 'envs'. Its roles are learner"),
        ({"cpus": {"env": "0"}}, "cpus of the mesh names 'env'.*Did you mean 'envs'"),
        ({"heartbeat_timeout_s": 0.0}, "heartbeat_timeout_s=0.0 of the mesh must be positive"),
        *(
            ({"kind": "slurm", "hosts": {"engines": 1}, name: "a\ntouch b"}, rf"{name}='a.ntouch b' of the mesh")
            for name in ("partition", "account", "qos", "time_limit")
        ),
        *(
            ({"kind": "slurm", "hosts": {"engines": 1}, "slurm_args": (text,)}, "slurm_args of the mesh hold ")
            for text in (
                "--x\ntouch b",
                "--comment=a b",
                "-o/tmp/x",
                "x",
                "--wrap=id",
                "--out=/home/me/.bashrc",
                "--er=x",
                "--export=ALL,LD_PRELOAD=/tmp/x.so",
                "--container-image=x",
                "--bbf=x",
                "--mail-user=me@x",
                "--nodelist=/home/me/.netrc",
                "--mem='0'",
            )
        ),
        ({**ATTACH, "hosts": {"engines": 2}}, "asks for 2 engines hosts and workers names 1"),
        ({**ATTACH, "certificate": "c"}, "write all addresses as 'tls://node1:26600'"),
        (TLS, "certificate='' of the mesh does not fit the addresses tls://n:1"),
        ({**TLS, "certificate": "c", "address": "tcp://n:2"}, "does not fit the addresses tcp://n:2, tls://n:1"),
        (
            {"kind": "process", "hosts": {"engines": 1}, "certificate": "c"},
            "certificate of the mesh is for kind='attach' and kind is 'process'",
        ),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    raises((ValueError, HostError), message, fa.Hosts, **settings)


def test_usual_options_of_slurm_are_accepted() -> None:
    args = (
        "--constraint=[h100*2|a100&ib]",
        "--gres=gpu:h100:8",
        "--exclusive",
        "--reservation=lab_1",
        "--mem=0",
    )
    hosts = fa.Hosts(
        kind="slurm", hosts={"engines": 1}, partition="gpu,long", time_limit="1-00:00:00", qos="a.b", slurm_args=args
    )
    assert (hosts.partition, hosts.time_limit, hosts.qos) == ("gpu,long", "1-00:00:00", "a.b")
    assert hosts.slurm_args == args


def test_hosts_are_counted_by_their_addresses() -> None:
    hosts = fa.Hosts(kind="attach", workers={"engines": ("tcp://a:1", "tcp://b:1"), "learner": ("tcp://c:1",)})
    assert hosts.counts == {"engines": 2, "learner": 1}


@pytest.mark.parametrize(("text", "cores"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 2 , 1", {1, 2})])
def test_cores_are_read_as_linux_writes_them(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


def test_processes_must_fit_hosts_and_gpus() -> None:
    hosts = fa.Hosts(kind="slurm", hosts={"learner": 2, "engines": 2}, gpus={"learner": 4, "engines": 2})
    hosts.check_processes("learner", 8, each=8)
    hosts.check_processes("engines", 4)
    with pytest.raises(ValueError, match="3 processes of one learner cannot be spread evenly over 2 hosts"):
        hosts.check_processes("learner", 3, each=3)
    with pytest.raises(ValueError, match="5 processes of engines need a GPU each and the mesh gives engines 2 x 2"):
        hosts.check_processes("engines", 5)


def test_hosts_are_read_from_yaml(tmp_path: Path) -> None:
    from forge_agents.cli.config import parse

    file = tmp_path / "run.yaml"
    file.write_text(
        "env: forge/Relay-v0\npolicies: {team: {model: smollm2-135m-instruct}}\n"
        "mesh: {kind: slurm, hosts: {learner: 1, engines: 4}, partition: gpu, gpus: {engines: 8}}\n"
    )
    run = parse(fa.RunConfig, [str(file), "--mesh.account", "lab"], prog="train", description="")
    assert run.mesh == fa.Hosts(
        kind="slurm", hosts={"learner": 1, "engines": 4}, partition="gpu", gpus={"engines": 8}, account="lab"
    )


# ---- what a host has


@pytest.mark.parametrize(
    ("variable", "observed"),
    [
        ("", ()), ("-1", ()), ("NoDevFiles", ()), ("0, 1", ("0", "1")), ("2,-1,3", ("2",)), ("1,,2", ("1",)),
        ("GPU-8932f937,MIG-c7384736-a75d", ("GPU-8932f937", "MIG-c7384736-a75d")),
    ],
)  # fmt: skip
def test_visible_gpus_match_cuda(monkeypatch: pytest.MonkeyPatch, variable: str, observed: tuple[str, ...]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == observed


NVIDIA_SMI = """#!/bin/sh
if [ "$1" = -L ]; then
  echo 'GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-99990000-1)'
  echo '  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-a75d)'
  echo '  MIG 1g.10gb+me  Device  1: (UUID: MIG-d0000000-0000)'
  exit
fi
echo '0, GPU-8932f937-d72c, 81559, [N/A]'
echo '1, GPU-8932aaaa-0001, 40960, Disabled'
echo '2, GPU-99990000-1, 81559, Enabled'
"""


@pytest.mark.parametrize(
    ("gpus", "result"),
    [
        (("1", "0"), (40960 << 20, 81559 << 20)),
        (("GPU-8932f937-d72c",), (81559 << 20,)),
        (("GPU-8932a",), (40960 << 20,)),  # CUDA takes the beginning of a name, if it is one GPU's
        (("GPU-8932",), ()),
        (("MIG-c7384736-a75d", "MIG-d0000000-0000", "0"), (40_000_000_000, 10_000_000_000, 81559 << 20)),
        (("2",), ()),  # one of its parts
        (("7",), ()),
    ],
)
def test_gpu_memory_is_found_by_every_kind_of_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: tuple[str, ...], result: tuple[int, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_bytes(gpus) == result


# ---- placing, on hosts that are only names


class Machines:
    """Stands for Monarch's host mesh: says which hosts a slice holds."""

    def __init__(self, role: str, numbers: range) -> None:
        self.role, self.numbers = role, numbers

    def slice(self, hosts: slice) -> Machines:
        return Machines(self.role, self.numbers[hosts])


def laid_out(has: int = 8, wants: dict[str, int] | None = None, **settings: Any) -> Cluster:
    config = fa.Hosts(**{"kind": "process", **settings})
    layout = Cluster(config, lambda: "here", [("", role, procs) for role, procs in (wants or {}).items()])
    facts = HostFacts(hostname="head", gpus=tuple(map(str, range(has))), cores=frozenset({0, 1}), memory_domain="head")
    layout._here.facts = facts
    if config.kind != "local":
        layout.machines = {role: Machines(role, range(count)) for role, count in config.counts.items()}
    for role, count in config.counts.items():
        for i in range(count):
            host = Host(name=f"{role}-{i}", role=role, number=i, machine=Machines(role, range(i, i + 1)), agent=True)
            host.facts = replace(facts, hostname=f"node-{role}-{i}", memory_domain="there")
            layout.hosts.append(host)
    return layout


def names(spot: Any) -> list[str]:
    return [host.name for host in spot.hosts]


def test_replicas_spread_over_their_hosts_and_take_a_gpu_each() -> None:
    layout = laid_out(hosts={"engines": 2, "learner": 1}, gpus={"engines": 2})
    spots = [layout.allocate("engines", 1) for _ in range(4)]
    assert [names(spot) for spot in spots] == [["engines-0"], ["engines-1"], ["engines-0"], ["engines-1"]]
    assert [spot.gpus for spot in spots] == [("0",), ("0",), ("1",), ("1",)]
    spots[1].release()
    again = layout.allocate("engines", 1)
    assert (names(again), again.gpus) == (["engines-1"], ("0",))


def test_a_learner_spreads_over_its_hosts_and_sees_one_gpu_a_rank() -> None:
    layout = laid_out(hosts={"learner": 2}, gpus={"learner": 4})
    spot = layout.allocate("learner", 8)
    assert names(spot) == ["learner-0", "learner-1"]
    assert (spot.each, spot.gpus, spot.is_remote) == (4, ("0", "1", "2", "3"), True)
    assert list(spot.machines.numbers) == [0, 1]


def test_store_is_on_the_learners_host_by_default() -> None:
    assert names(laid_out(hosts={"learner": 2, "engines": 1}).allocate("store", 1)) == ["learner-0"]
    assert names(laid_out(hosts={"learner": 2, "store": 1}).allocate("store", 1)) == ["store-0"]


def test_role_without_hosts_is_on_the_controllers_host() -> None:
    spot = laid_out(hosts={"engines": 1}).allocate("judges", 1)
    assert (names(spot), spot.machines, spot.is_remote) == (["this host"], "here", False)


def test_roles_on_one_host_get_consecutive_gpus() -> None:
    layout = laid_out(kind="local", gpus={"engines": 2, "learner": 3})
    layout.check()
    assert layout.allocate("learner", 3).gpus == ("0", "1", "2")
    assert [layout.allocate("engines", 1).gpus for _ in range(2)] == [("3",), ("4",)]


@pytest.mark.parametrize(
    ("has", "settings", "learner", "engines"),
    [
        (8, {}, ("0", "1"), ["2", "3", "4"]),  # nobody shares where there are enough
        (5, {}, ("0", "1"), ["2", "3", "4"]),
        (4, {}, ("0", "1"), ["0", "1", "2"]),  # too few: each takes those with the fewest processes
        (8, {"gpus": {"learner": 4}}, ("0", "1"), ["4", "5", "6"]),
        (8, {"gpus": {"engines": 6}}, ("0", "1"), ["2", "3", "4"]),
    ],
)
def test_gpus_are_divided_by_default(
    has: int, settings: dict[str, Any], learner: tuple[str, ...], engines: list[str]
) -> None:
    layout = laid_out(has, {"learner": 2, "engines": 3}, kind="local", **settings)
    assert layout.allocate("learner", 2).gpus == learner
    spots = [layout.allocate("engines", 1) for _ in range(3)]
    spots.sort(key=lambda spot: spot.gpus)
    assert [spot.gpus for spot in spots] == [(part,) for part in engines] or has == 4
    spots[1].release()
    assert layout.allocate("engines", 1).gpus == spots[1].gpus  # an engine that died comes back where it was


def test_one_gpu_is_shared_by_roles_but_not_by_ranks() -> None:
    layout = laid_out(1, {"learner": 1, "engines": 1}, kind="local")
    assert layout.allocate("learner", 1).gpus == layout.allocate("engines", 1).gpus == ("0",)
    with pytest.raises(HostError, match="2 ranks of one learner need a GPU each, and this host .* has 1 for them"):
        layout.allocate("learner", 2)


def test_judges_stay_off_the_learners_gpu() -> None:
    layout = laid_out(2, {"learner": 1, "engines": 1}, kind="local")
    spots = [layout.allocate(role, 1).gpus for role in ("learner", "engines", "judges")]
    assert spots == [("0",), ("1",), ("1",)]
    assert laid_out(3, {"learner": 1, "engines": 1}, kind="local").allocate("judges", 1).gpus == ("2",)
    counted = laid_out(4, {"learner": 1, "engines": 2, "judges": 2}, kind="local")
    assert [counted.allocate(role, 1).gpus for role in ("learner", "engines", "engines", "judges", "judges")] == [
        ("0",), ("1",), ("2",), ("3",), ("3",),
    ]  # fmt: skip
    assert layout.allocate("store", 1).gpus == ()


@pytest.mark.parametrize(
    ("hosts", "value", "has", "observed"),
    [
        ({"learner": 1, "engines": 2}, {}, 8, ["0,1", "2,3", "4,5"]),
        ({"learner": 1, "engines": 1}, {"learner": 3}, 8, ["0,1,2", "3,4,5,6,7"]),
        ({"engines": 1}, {}, 2, ["1"]),  # the learner is on the controller's
        ({"engines": 2}, {"learner": 2}, 8, ["2,3,4", "5,6,7"]),
        ({"learner": 1, "engines": 2}, {}, 2, []),  # they share
        ({"learner": 1, "engines": 2}, {}, 0, []),
        ({"learner": 1, "store": 1, "engines": 1}, {}, 2, ["0", "1"]),
    ],
)
def test_process_hosts_divide_local_gpus(
    hosts: dict[str, int], value: dict[str, int], has: int, observed: list[str]
) -> None:
    config = fa.Hosts(kind="process", hosts=hosts, gpus=value)
    assert [",".join(part) for part in gpus_of_processes(config, tuple(map(str, range(has)))).values()] == observed


def test_engines_outside_a_run_take_a_gpu_each() -> None:
    layout = laid_out(4, kind="local")
    assert [layout.allocate("engines", 1).gpus for _ in range(4)] == [("0",), ("1",), ("2",), ("3",)]


def test_ranks_of_an_engine_are_on_one_host() -> None:
    layout = laid_out(4, {"engines": 8}, hosts={"engines": 2})
    spots = [layout.allocate("engines", 2) for _ in range(4)]
    assert [(names(spot), spot.gpus) for spot in spots] == [
        (["engines-0"], ("0", "1")),
        (["engines-1"], ("0", "1")),
        (["engines-0"], ("2", "3")),
        (["engines-1"], ("2", "3")),
    ]


def with_gpus(layout: Cluster, *gpus: tuple[str, ...]) -> Cluster:
    """The same hosts, with these GPUs one after the other."""
    for host, local in zip(layout.hosts, gpus, strict=True):
        host.facts = replace(host.facts, gpus=local)  # type: ignore[type-var]
    return layout


def test_each_host_of_a_learner_sees_gpus_by_its_own_names() -> None:
    layout = with_gpus(laid_out(hosts={"learner": 2}), ("GPU-a", "GPU-b"), ("GPU-c", "GPU-d"))
    spot = layout.allocate("learner", 4)
    assert spot.gpus_by_host == (("GPU-a", "GPU-b"), ("GPU-c", "GPU-d"))
    assert [seat.gpu for seat in layout.preview([("hero", "learner", 4)])] == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    spot.release()
    assert layout.allocate("learner", 2).gpus_by_host == (("GPU-a",), ("GPU-c",))


def test_host_with_fewer_gpus_than_the_others_is_refused() -> None:
    layout = with_gpus(laid_out(hosts={"learner": 2}), ("0", "1", "2", "3"), ("0", "1"))
    with pytest.raises(HostError, match=r"4 ranks of one learner need a GPU each, and learner-1 .* has 2 for them"):
        layout.allocate("learner", 8)
    assert layout.allocate("learner", 4).each == 2
    with_gpus(layout, ("0", "1"), ())
    raises(HostError, r"learner-1 .* has no GPU, but other hosts of this learner have", layout.allocate, "learner", 4)


def test_hosts_take_as_many_engines_as_they_have_gpus() -> None:
    layout = with_gpus(laid_out(wants={"engines": 6}, hosts={"engines": 2}), ("0", "1"), ("0", "1", "2", "3"))
    spots = [layout.allocate("engines", 1) for _ in range(6)]
    assert sorted((*names(spot), *spot.gpus) for spot in spots) == [
        ("engines-0", "0"), ("engines-0", "1"),
        ("engines-1", "0"), ("engines-1", "1"), ("engines-1", "2"), ("engines-1", "3"),
    ]  # fmt: skip
    layout = with_gpus(laid_out(wants={"engines": 4}, hosts={"engines": 2}), ("0", "1"), ("0", "1", "2", "3"))
    assert names(layout.allocate("engines", 4)) == ["engines-1"]  # the first has too few for one of four ranks


def test_preview_takes_no_places() -> None:
    layout = laid_out(2, {"learner": 1, "engines": 2}, hosts={"engines": 1})
    layout._here.facts = replace(layout._here.facts, gpu_bytes=(80, 40))  # type: ignore[type-var]
    meshes = [("hero-learner", "learner", 1), ("hero-0", "engines", 1), ("hero-1", "engines", 1)]
    for _ in range(2):
        seats = layout.preview(meshes)
        assert [(seat.name, seat.host, seat.gpu, seat.gpu_bytes) for seat in seats] == [
            ("hero-learner", "this host (head)", "0", 80),
            ("hero-0", "engines-0 (node-engines-0)", "0", 0),
            ("hero-1", "engines-0 (node-engines-0)", "1", 0),
        ]


def test_reserved_places_survive_restarts_in_any_order() -> None:
    layout = laid_out(2, {"learner": 1, "engines": 2}, kind="local")
    meshes = [("learner", "learner", 1), ("large", "engines", 1), ("small", "engines", 1)]
    rehearsed = {seat.name: (seat.gpu,) for seat in layout.preview(meshes)}
    assert rehearsed == {"learner": ("0",), "large": ("1",), "small": ("0",)}
    layout.reserve(meshes)
    spots = {name: layout.allocate(role, procs, name) for name, role, procs in (*meshes[1:], meshes[0])}
    assert {name: spot.gpus for name, spot in spots.items()} == rehearsed
    for name in ("large", "small"):
        spots[name].release()
    assert layout.allocate("engines", 1, "small").gpus == ("0",)
    assert layout.allocate("engines", 1, "large").gpus == ("1",)
    assert layout.reserved_on({("this host (head)", "0")}) == ["learner", "small"]
    assert layout.allocate("engines", 1, "another").gpus == ("1",)  # a place is taken while its process is dead, too


def test_reservation_on_a_lost_host_is_dropped() -> None:
    layout = laid_out(2, hosts={"engines": 2})
    layout.reserve([("one", "engines", 1), ("two", "engines", 1)])
    assert names(layout.allocate("engines", 1, "two")) == ["engines-1"]
    layout.lose(layout.hosts[1], "gone")
    again = layout.allocate("engines", 1, "two")
    assert (names(again), again.gpus) == (["engines-0"], ("1",))


def test_gpu_order_matches_nvidia_smi() -> None:
    assert mesh.mesh_variables((), None, 2).keys().isdisjoint({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
    result = mesh.mesh_variables(("1", "3"), {"A": "b"}, None)
    assert result == {"A": "b", "CUDA_VISIBLE_DEVICES": "1,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("settings", [{"kind": "local"}, {"hosts": {"engines": 1, "learner": 1}}])
def test_more_gpus_than_a_host_has_are_refused(settings: dict[str, Any]) -> None:
    expected = {"learner": 2, "engines": 3} if settings.get("kind") == "local" else {"learner": 2, "engines": 5}
    layout = laid_out(has=4, **settings)
    layout.config = fa.Hosts(**{"kind": "process", **settings}, gpus=expected)
    raises(HostError, r"the mesh asks for 5 GPUs on .* and it has 4. Lower gpus", layout.check)


def test_missing_cores_are_refused() -> None:
    assert laid_out(hosts={"engines": 1}, cpus={"engines": "1"}).allocate("engines", 1).cores == {1}
    with pytest.raises(HostError, match=r"bind engines to 0-2 and engines-0 \(node-engines-0\) has no core 2"):
        laid_out(hosts={"engines": 1}, cpus={"engines": "0-2"}).check()


async def test_workers_are_bound_to_their_cores_during_a_run() -> None:
    def cores_of_a_worker() -> set[int]:
        worker = workers.pool().borrow("test")
        worker.call("close", 0, timeout_s=200)
        assert worker.pid is not None
        result = os.sched_getaffinity(worker.pid)
        workers.pool().give_back(worker)
        return result

    every, part = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    config = fa.Hosts(cpus={"envs": str(part)})
    assert cores_of_a_worker() == every
    await mesh.launch_hosts(config)
    assert cores_of_a_worker() == {part}
    await mesh.end_hosts(config)
    assert cores_of_a_worker() == every
    with pytest.raises(HostError, match=r"bind envs to 4095 and this host .* has no core 4095"):
        await mesh.launch_hosts(fa.Hosts(cpus={"envs": "4095"}))
    workers.shutdown()


def test_lost_host_is_replaced_by_role_then_spare_then_others() -> None:
    layout = laid_out(hosts={"engines": 2, "spare": 1, "learner": 1})
    output: list[str] = []
    learner = layout.allocate("learner", 1)
    learner.hosts[0].listeners.append(output.append)
    by_name = {host.name: host for host in layout.hosts}
    layout.lose(by_name["engines-0"], "gone")
    assert [names(layout.allocate("engines", 1)) for _ in range(2)] == [["engines-1"], ["engines-1"]]
    layout.lose(by_name["learner-0"], "power cut")
    layout.lose(by_name["learner-0"], "again")
    assert output == ["power cut"] and learner.lost == "power cut"
    assert names(layout.allocate("learner", 1)) == ["spare-0"]
    layout.lose(by_name["spare-0"], "gone")
    assert names(layout.allocate("learner", 1)) == ["engines-1"]
    layout.lose(by_name["engines-1"], "gone, too")
    raises(HostError, r"no host is left for learner: .*gone, too", layout.allocate, "learner", 1)


def test_environments_go_to_the_host_with_most_free_cores() -> None:
    layout = laid_out(hosts={"envs": 2, "spare": 1})
    facts = layout.hosts[0].facts
    assert facts is not None
    layout.hosts[0].facts = replace(facts, cores=frozenset(range(8)))
    assert layout.capacity("envs") == 8 + 4  # that one has two cores, and four places as any
    where = [names(layout.allocate("envs", 1))[0] for _ in range(12)]
    assert (where.count("envs-0"), where.count("envs-1")) == (8, 4)
    for host in layout.hosts[:2]:
        layout.lose(host, "gone")
    assert names(layout.allocate("envs", 1)) == ["this host"] and layout.capacity("envs") == 4


def test_connection_without_a_secret_is_closed() -> None:
    async def main() -> None:
        layout = laid_out(hosts={"envs": 1})
        server = await asyncio.start_server(layout._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        secret = "a" * 32
        line = layout._expected[secret] = asyncio.get_running_loop().create_future()

        async def knock(message: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(message + b"\n")
            remaining.append(writer)
            return reader

        remaining: list[asyncio.StreamWriter] = []
        for message in (b"0" * 32, b"\xff" * 32, b"a" * 31 + b"x"):
            assert await asyncio.wait_for((await knock(message)).read(1), 60) == b""
        assert not line.done()
        await knock(secret.encode())
        await asyncio.wait_for(line, 60)
        assert await asyncio.wait_for((await knock(secret.encode())).read(1), 60) == b""  # a secret opens once
        for writer in remaining:
            writer.close()
        server.close()

    asyncio.run(main())


async def test_strangers_do_not_keep_a_host_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_agents.runtime.cluster._MAX_STRANGERS", 8)
    monkeypatch.setattr("forge_agents.runtime.cluster._SECRET_TIMEOUT_S", 600)
    layout = laid_out(hosts={"envs": 1})
    server = await asyncio.start_server(layout._accept, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    strangers = [await asyncio.open_connection(*address) for _ in range(20)]
    arrived = layout._expected["secret"] = asyncio.get_running_loop().create_future()
    agent = await asyncio.wait_for(asyncio.to_thread(host_process._connect, address, "secret"), 60)
    assert arrived.done()
    for reader, _ in strangers[:13]:  # the oldest of them made room for the others and the agent
        assert await asyncio.wait_for(reader.read(1), 60) == b""
    assert not any(reader.at_eof() for reader, _ in strangers[13:])
    agent.close()
    for _, writer in strangers:
        writer.close()
    server.close()


def test_host_agent_connects_again_if_its_secret_is_not_read() -> None:
    secrets = []

    def serve(listener: socket.socket) -> None:
        for answer in (b"", b"", host_process.ANSWER):
            connection = listener.accept()[0]
            with connection:
                secrets.append(connection.recv(64))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        host_process._connect(listener.getsockname(), "secret").close()
        server.join(60)
        address = listener.getsockname()
    assert secrets == [b"secret\n"] * 3
    with pytest.raises(ConnectionRefusedError):  # at once
        host_process._connect(address, "secret")


@pytest.mark.parametrize(("end", "reason"), [("silence", "no heartbeat for 0.2 s"), ("eof", "connection ended")])
async def test_host_is_lost_if_its_heartbeats_or_its_connection_end(
    end: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_agents.runtime.cluster._TICK_S", 0.05)
    layout, reader, reasons = laid_out(hosts={"envs": 1}, heartbeat_timeout_s=0.2), asyncio.StreamReader(), list[str]()
    layout.hosts[0].listeners.append(reasons.append)
    watching = asyncio.ensure_future(layout._watch(layout.hosts[0], reader))
    for _ in range(10):
        reader.feed_data(b".")
        await asyncio.sleep(0.05)
    assert not watching.done() and reasons == []
    if end == "eof":
        reader.feed_eof()
    await asyncio.wait_for(watching, 20)
    assert len(reasons) == 1 and reason in reasons[0]


NEVER_CLOSED = """
import asyncio
import forge_agents as fa
from forge_agents.runtime.cluster import Cluster
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.runtime.jobs import Job

cluster = Cluster(fa.Hosts(kind="process", hosts={"engines": 1}), lambda: None)
cluster._job = Job(meshes={}, end=lambda: print("job ended", flush=True))
runner = LoopRunner(cluster.end)
runner.run(asyncio.to_thread(print, "trained"))
"""


def test_job_of_the_hosts_ends_at_the_exit_of_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_CLOSED], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("trained\njob ended\n", "")


def test_host_process_may_open_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections of strangers would otherwise fill the usual limit of 1,024."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits: list[int] = []
    monkeypatch.setattr(sys, "argv", ["host", "--address", "ipc:///tmp/x"])
    served = lambda **_: limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # noqa: E731
    monkeypatch.setattr(host_process, "run_worker_loop_forever", served)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        host_process.main()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == [65535 if hard == resource.RLIM_INFINITY else min(hard, 65535)]


def test_sockets_and_logs_of_host_processes_are_in_the_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    program = [sys.executable, "-c", "input()"]
    monkeypatch.setattr(jobs, "_host_process", lambda *_: subprocess.Popen(program, stdin=-1, start_new_session=True))
    monkeypatch.setattr(_monarch, "new_host_address", lambda address: address)
    monkeypatch.setattr(_monarch, "attach", lambda role, addresses: addresses)
    job = jobs._processes(fa.Hosts(kind="process", hosts={"engines": 2}), {})
    folders = {Path(address.removeprefix("ipc://")).parent for address in job.meshes["engines"]}
    (folder,) = folders
    assert folder.is_dir() and folder.parent == private_folder()  # swept if this process is killed
    job.end()
    assert not folder.exists()


def test_learner_uses_a_divisor_of_its_ranks_after_host_loss() -> None:
    layout = laid_out(hosts={"learner": 4})
    layout.lose(layout.hosts[0], "gone")
    spot = layout.allocate("learner", 4)  # three live; four ranks go on two of them
    assert (names(spot), spot.each, list(spot.machines.numbers)) == (["learner-1", "learner-2"], 2, [1, 2])


# ---- schedulers that are not there


def test_missing_gpus_fail_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HostError, match="asks for 1 GPUs on this host .* and it has 0"):
        asyncio.run(mesh.launch_hosts(fa.Hosts(gpus={"engines": 1})))


def test_slurm_needs_its_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="needs sbatch and squeue and scancel on the path"):
        asyncio.run(mesh.launch_hosts(fa.Hosts(kind="slurm", hosts={"engines": 1})))


SBATCH = """#!/bin/sh
cat > "$FAKE_SLURM/script"
echo "Submitted batch job 77"
"""
SQUEUE = """#!/bin/sh
echo "squeue $*" >> "$FAKE_SLURM/calls"
echo '{"jobs": [{"job_state": ["FAILED"]}]}'
"""
SCANCEL = """#!/bin/sh
echo "scancel $*" >> "$FAKE_SLURM/calls"
"""
SUBMIT = """
import asyncio, sys
import forge_agents as fa
from forge_agents.envs.workers import env as workers
from forge_agents.runtime import mesh
from forge_agents.errors import HostError
hosts = fa.Hosts(kind="slurm", hosts={"learner": 1, "engines": 4}, partition="gpu", account="lab", qos="high",
                 time_limit="02:00:00", gpus={"learner": 8, "engines": 4}, slurm_args=("--constraint=h100",),
                 address="tcp://127.0.0.1:0", start_timeout_s=100)
try:
    asyncio.run(mesh.launch_hosts(hosts))
except HostError as error:
    print(error)
"""


def submit(folder: Path, script: str = SUBMIT, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run a script with stand-ins for Slurm's programs."""
    (folder / "bin").mkdir(parents=True)
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL, **programs}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip


HUNG = {
    "sbatch": r"mesh: sbatch did not answer within 2 s\. If squeue shows a job forge-agents_\d+, cancel it",
    "squeue": r"mesh: squeue --job 77 --json did not answer within 2 s",
    "scancel": r"Failed to cancel SLURM job 77: scancel 77 did not answer within 2 s\. The job may still run",
}


def test_slurm_command_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    hung = '#!/bin/sh\nsleep 600 &\necho $! > "$FAKE_SLURM/pid"\nwait\n'  # sleep keeps the output open
    limit = "from forge_agents.runtime import schedulers\nschedulers._COMMAND_TIMEOUT_S = 2.0\n"
    with ThreadPoolExecutor() as pool:
        ends = {name: pool.submit(submit, tmp_path / name, limit + SUBMIT, **{name: hung}) for name in HUNG}
    for name, error in HUNG.items():
        output = ends[name].result().stdout + ends[name].result().stderr
        assert re.search(error, output), output
        assert ended_within([int((tmp_path / name / "pid").read_text())], 10)


def test_slurm_job_has_the_requested_options(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert "kind='slurm' of the mesh: SLURM job is no longer active" in done.stdout, done.stderr
    assert "requested hosts: {'learner': 1, 'engines': 4}" in done.stdout
    script = (tmp_path / "script").read_text()
    requested = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {
        "--nodes=5", "--ntasks-per-node=1", "--time=02:00:00", "--gpus-per-node=8", "--partition=gpu", "--account=lab",
        "--qos=high", "--exclusive", "--constraint=h100",
    } <= requested  # fmt: skip
    assert any(line.startswith("--job-name=forge-agents") for line in requested)
    assert f"srun {sys.executable} -P -c" in script and "run_worker_loop_forever" in script
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel 77"  # nothing is left in the queue


def test_slurm_job_requests_gpus_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_module, "version", lambda name: "2.13.0")
    meshes = [("weights", "store", 1), ("hero-learner", "learner", 8), *((f"hero-{i}", "engines", 2) for i in range(3))]
    two_and_two = {"kind": "slurm", "hosts": {"learner": 2, "engines": 2}}

    def requested(**settings: Any) -> int | None:
        return gpus_per_node(fa.Hosts(**two_and_two, **settings), meshes)

    assert requested() == 4  # four ranks of the learner on each of its hosts, two engines of two ranks on one of theirs
    assert requested(gpus={"engines": 8}) == 8
    assert requested(slurm_args=("--gres=gpu:h100:8",)) is None
    assert gpus_per_node(fa.Hosts(kind="slurm", hosts={"engines": 1}), meshes) == 6
    monkeypatch.setattr(allocation_module, "version", lambda name: "2.13.0+cpu")
    assert requested() is None and requested(gpus={"learner": 4}) == 4


# ---- the examples

EXAMPLES = Path(__file__).parents[3] / "examples"


def read_run(*words: str) -> Any:
    from forge_agents.cli.config import parse

    return parse(fa.RunConfig, words, prog="train", description="")


def test_slurm_example_fits_its_hosts() -> None:
    run = read_run(str(EXAMPLES / "slurm" / "train.yaml"))
    assert (run.mesh.kind, run.mesh.counts) == ("slurm", {"learner": 1, "engines": 1})
    run.mesh.check_processes("engines", run.trainer.engine.replicas)
    run.mesh.check_processes("learner", run.trainer.learner_procs, each=run.trainer.learner_procs)


def test_slurm_script_starts_hosts_and_controller(tmp_path: Path) -> None:
    note = '#!/bin/sh\nprintf "%s\\n" "$0" "$@" > "$NOTES/$(basename "$0").$$"\n'
    # the script ends what it has started with the controller; a busy machine may not have begun it by then
    patient = note + 'until [ "$(ls "$NOTES" | grep -c srun)" = 2 ]; do sleep 0.05; done\n'
    stubs = {"scontrol": "#!/bin/sh\necho node1\necho node2\n", "srun": note, "forge-agents": patient, "python": note}
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "notes").mkdir()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "FORGE_AGENTS_BIN": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(EXAMPLES.parent),
    }
    subprocess.run(["bash", str(EXAMPLES / "slurm" / "two_nodes.sh")], env=environment, check=True, timeout=300)
    notes = [file.read_text().splitlines() for file in (tmp_path / "notes").glob("*")]
    hosts = sorted(words[-1] for words in notes if words[0].endswith("srun"))
    assert hosts == [f"tcp://node{i}:26600@tcp://0.0.0.0:26600" for i in (1, 2)]
    (controller,) = (words for words in notes if words[0].endswith("forge-agents"))
    assert controller[1] == "train"
    run = read_run(str(EXAMPLES.parent / controller[2]), *controller[3:])
    assert run.mesh == fa.Hosts(
        kind="attach",
        hosts={"learner": 1, "engines": 1},
        gpus={"learner": 8, "engines": 8},
        workers={"learner": ("tcp://node1:26600",), "engines": ("tcp://node2:26600",)},
        address="tcp://node1:26601",
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_nodes_are_hosts_and_the_first_has_the_controller(tmp_path: Path, rank: int) -> None:
    import yaml

    script = yaml.safe_load((EXAMPLES / "skypilot" / "hosts.yaml").read_text())["run"]
    note = '#!/bin/sh\nprintf "%s\\n" "$@" > "$NOTES/$(basename "$0")"\n'
    for name in ("forge-agents", "python"):
        (tmp_path / name).write_text(note)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "NOTES": str(tmp_path / "notes"), "FORGE_AGENTS_BIN": str(tmp_path),
                   "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": str(rank),
                   "FORGE_AGENTS_SHARED": str(tmp_path / "shared")}  # fmt: skip
    (tmp_path / "notes").mkdir()
    subprocess.run(["bash", "-c", f"{script}\nwait"], env=environment, cwd=EXAMPLES.parent, check=True, timeout=300)
    host = (tmp_path / "notes" / "python").read_text().splitlines()
    assert host[-1] == f"tcp://10.0.0.{rank + 1}:26600@tcp://0.0.0.0:26600"
    folder = read_run(str(EXAMPLES / "skypilot" / "train.yaml"), "--mesh.workers", WORKERS).out_dir
    assert (tmp_path / "shared" / Path(folder).relative_to("/shared")).is_dir(), "on each node before it is looked for"
    controller = tmp_path / "notes" / "forge-agents"
    assert controller.exists() == (rank == 0)
    if rank == 0:
        words = controller.read_text().splitlines()
        run = read_run(str(EXAMPLES.parent / words[1]), *words[2:])
        assert run.mesh.workers == {"learner": ("tcp://10.0.0.1:26600",), "engines": ("tcp://10.0.0.2:26600",)}
        assert run.mesh.address == "tcp://10.0.0.1:26601"


WORKERS = '{"learner": ["tcp://10.0.0.1:26600"], "engines": ["tcp://10.0.0.2:26600"]}'


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        (["slurm/train.yaml"], {"learner-0 (a node of the job)": 9, "engines-0 (a node of the job)": 8}),
        (
            ["kubernetes/train.yaml", "--mesh.namespace", "forge-agents"],
            {"learner-0 (a pod)": 9, "engines-0 (a pod)": 8, "engines-1 (a pod)": 8},
        ),
        (
            ["skypilot/train.yaml", "--mesh.workers", WORKERS],
            {"learner-0 (tcp://10.0.0.1:26600)": 9, "engines-0 (tcp://10.0.0.2:26600)": 8},
        ),
    ],
)
def test_dry_run_of_examples_lists_every_process(
    words: list[str], hosts: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    from forge_agents.cli.main import main

    assert main(["train", str(EXAMPLES / words[0]), *words[1:], "--dry-run"]) == 0
    message, _, doubts = capsys.readouterr().out.partition("Judges and workers")
    lines = message.splitlines()
    assert f"--gpus {sum(hosts.values()) - 1} --model" in doubts, "all but the store have a GPU"
    result: dict[str, list[str]] = {}
    host = ""
    for line in lines:
        if line.startswith("  "):
            result[host].append(line)
        else:
            host = line.removesuffix(":")
            result[host] = []
    assert {host: len(local) for host, local in result.items()} == hosts
    weights, *ranks = result[next(iter(hosts))]
    assert weights == "  weights rank 0"
    assert ranks == [f"  team-learner rank {number}, GPU {number}" for number in range(len(ranks))]
    for local in [*result.values()][1:]:
        assert [line.partition(" rank ")[2] for line in local] == [f"0, GPU {number}" for number in range(len(local))]


def test_dry_run_refuses_processes_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    from forge_agents.cli.main import main

    slurm = str(EXAMPLES / "slurm" / "train.yaml")
    assert main(["train", slurm, "--dry-run", "--trainer.engine.replicas", "9"]) != 0
    assert "9 processes of engines need a GPU each and the mesh gives engines 1 x 8" in capsys.readouterr().err


def test_dry_run_assumes_the_given_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_agents.cli.main import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.yaml").write_text(
        "env: forge/Relay-v0\npolicies: {team: {model: tiny-random}}\n"
        "trainer: {learner_procs: 2, engine: {replicas: 3}}\n"
    )
    words = ["train", str(tmp_path / "train.yaml"), "--dry-run"]

    def gpus(*more: str) -> list[str]:
        assert main([*words, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        threads = [line for line in lines if re.fullmatch(r" +threads: \d+", line)]
        assert not (threads and any(", GPU " in line for line in lines)), "cores are not divided next to GPUs"
        return [line.strip() for line in lines if ", GPU " in line]

    assert gpus() == []
    learner = ["team-learner rank 0, GPU 0", "team-learner rank 1, GPU 1"]
    assert gpus("--gpus_per_host", "8") == [*learner, *(f"team-{i} rank 0, GPU {2 + i}" for i in range(3))]
    shared = [f"team-{i} rank 0, GPU {(2 + i) % 3}" for i in range(3)]
    assert gpus("--gpus_per_host", "3") == [*learner, *shared], "each takes the GPU with the fewest"
    # the controller's own host, where others are described
    requested = ["--mesh.kind", "attach", "--mesh.workers", '{"engines": ["tcp://10.0.0.2:26600"]}']
    assert gpus(*requested) == [f"team-{i} rank 0, GPU {i}" for i in range(3)]
    assert gpus(*requested, "--gpus_per_host", "4")[:2] == learner
    assert main([*words, "--mesh.gpus.learner", "2"]) == 1
    message = capsys.readouterr().err
    for text in ("asks for 2 GPUs on this host", "it has 0", "With --gpus_per_host a dry run"):
        assert text in message
    assert gpus("--mesh.gpus.learner", "2", "--gpus_per_host", "8")[:2] == learner
    for wrong, why in ((["--gpus_per_host", "-1"], "at least 0"), (["--gpus_per_host", "8"], "needs --dry-run")):
        with pytest.raises(SystemExit):
            main([*(words if "at least 0" in why else words[:2]), *wrong])
        assert why in capsys.readouterr().err


def test_kubernetes_manifest_matches_the_run() -> None:
    import kubernetes_validate  # type: ignore[import-untyped]
    import yaml

    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "hosts.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**documents[0], "spec": {"accessModes": "ReadWriteMany"}}, "1.31", strict=True)

    (job,) = (item for item in documents if item["kind"] == "Job")
    *command, file, key, namespace, address_key, address = (
        word.replace("$(POD_IP)", "10.0.0.7") for word in job["spec"]["template"]["spec"]["containers"][0]["command"]
    )
    assert [*command, file] == ["forge-agents", "train", "/config/train.yaml"]
    run = read_run(str(EXAMPLES / "kubernetes" / "train.yaml"), key, namespace, address_key, address)
    assert run.mesh.address == address
    sets = {item["metadata"]["name"]: item["spec"] for item in documents if item["kind"] == "StatefulSet"}
    assert {role: spec["replicas"] for role, spec in sets.items()} == run.mesh.counts
    for role, spec in sets.items():
        labels = spec["template"]["metadata"]["labels"]  # what Monarch selects pods by
        assert labels["app.kubernetes.io/name"] == "monarch-worker" and labels["monarch.pytorch.org/mesh-name"] == role
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == run.mesh.gpus[role]
    assert {item["metadata"]["namespace"] for item in documents} == {run.mesh.namespace}
    run.mesh.check_processes("engines", run.trainer.engine.replicas)


PODS = """
import sys, types
from unittest.mock import MagicMock
from types import SimpleNamespace as Record

def pod(name, rank, phase="Running"):
    labels = {"apps.kubernetes.io/pod-index": rank}
    status = Record(phase=phase, pod_ip="127.0.0.1", conditions=[Record(type="Ready", status="True")])
    return Record(metadata=Record(name=name, labels=labels), status=status, spec=Record(containers=[Record(env=None)]))

pods = [pod("engines-0", "0"), pod("engines-1", "1"), pod("old-1", "1", "Failed")]
kubernetes = MagicMock()
kubernetes.watch.Watch.return_value.stream.side_effect = lambda *words, **options: [
    {"type": "ADDED", "object": pod} for pod in pods
]
kubernetes.client.CoreV1Api.return_value.list_namespaced_pod.return_value = Record(items=pods)
kubernetes.client.rest.ApiException = type("ApiException", (Exception,), {})
parts = (".client.rest", ".config.config_exception", ".config.exec_provider", ".config.kube_config")
for name in ("", ".client", ".config", ".watch", *parts):
    sys.modules["kubernetes" + name] = eval("kubernetes" + name)

import forge_agents as fa
from forge_agents.errors import HostError
from forge_agents.runtime.jobs import start_job
hosts = fa.Hosts(kind="kubernetes", namespace="lab", hosts={"engines": 2}, address="tcp://127.0.0.1:0")
job = start_job(hosts, {}, gpus_per_node=None)
job.end()
print("ended", list(job.meshes))
pods.insert(1, pod("other-0", "0"))
try:
    start_job(hosts, {}, gpus_per_node=None)
except HostError as error:
    print(error)
"""


def test_two_pods_of_one_rank_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", PODS], capture_output=True, text=True, timeout=300, check=False)
    refused = "pods engines-0 and other-0 of namespace 'lab' both have rank 0 of engines."
    assert done.stdout.startswith(f"ended ['engines']\n{refused}"), done.stdout + done.stderr


def test_missing_kubernetes_client_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(
        HostError, match=r"kind='kubernetes' of the mesh: .*pip install 'forge-agents-rl\[kubernetes\]'"
    ):
        asyncio.run(mesh.launch_hosts(fa.Hosts(kind="kubernetes", namespace="x", hosts={"engines": 1})))


def test_gpu_neighbors_of_the_next_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = laid_out(has=2, wants={"learner": 1, "engines": 1}, kind="local")
    monkeypatch.setattr(mesh, "_cluster", lambda: layout)
    taken = {
        number: SimpleNamespace(name=name, allocation=layout.allocate(role, 1))
        for number, (name, role) in enumerate([("hero-learner", "learner"), ("hero", "engines")])
    }
    monkeypatch.setattr(mesh, "_spawned", taken)
    assert mesh.gpu_neighbors("judge", "judges", 1) == ["hero"]  # no GPU is left: it goes to the engines'
    layout._here.facts = replace(layout._here.facts, gpus=("0", "1", "2"))  # type: ignore[type-var]
    assert mesh.gpu_neighbors("judge", "judges", 1) == []
    layout._here.facts = replace(layout._here.facts, gpus=())  # type: ignore[type-var]
    assert mesh.gpu_neighbors("judge", "judges", 1) == []


def test_dry_run_refuses_ranks_that_cannot_share_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_agents.cli.main import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "train.yaml"
    file.write_text("env: forge/Relay-v0\npolicies: {team: {model: tiny-random}}\n")
    words = ["train", str(file), "--dry-run"]
    for wrong, why in (
        (["--trainer.engine.tp", "3"], "engine.tp=3 does not divide the 4 query and 2 key heads of team"),
        (["--trainer.learner_procs", "3", "--trainer.learner.tp", "3"], "learner.tp=3 does not divide"),
        (["--env", "forge/Realy-v0"], "Did you mean 'forge/Relay-v0'"),
    ):
        assert main([*words, *wrong]) == 1
        output = capsys.readouterr()
        assert why in output.err and "run_process" not in output.out

    def doubts(*more: str) -> list[str]:
        assert main([*words, *more]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "not checked" in line]

    assert doubts() == []
    replicas = ["--gpus_per_host", "8", "--trainer.engine.replicas", "3"]
    assert len(memory := doubts(*replicas)) == 1 and "`forge-agents simulate` with --gpus 4 --model" in memory[0]
    elsewhere = tmp_path / "of-the-cluster"
    models = {"tiny-randm": "Did you mean 'tiny-random'?", str(elsewhere): "that ranks can share it."}
    for model, end in models.items():
        (output,) = doubts("--policies.team.model", model, "--trainer.engine.tp", "3")
        assert f"{model} is not on this machine" in output and output.endswith(end)
