"""Files of ours are written whole, and only as readable as the user's umask allows."""

import json
import os
import stat
from pathlib import Path

import pytest

from forge_agents.files import atomic_writer, cache_folder, find_damage, write_atomic
from forge_agents.programs.traces import import_traces
from forge_trainers.records.run_folder import RunFolder


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_files_have_the_permissions_that_the_umask_allows(umask, tmp_path, mask, mode):
    umask(mask)
    write_atomic(tmp_path / "new" / "report.json", "{}")
    call = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(call) + "\n")
    import_traces([tmp_path / "chats.jsonl"], tmp_path / "new" / "rows.jsonl")
    run = RunFolder(tmp_path / "run", {"a": 1})
    run.log(1, {"reward/mean": 1.0})
    run.log(2, {"reward/mean": 1.0})
    run.rewind(1)
    run.end(1, "solved", "solved")
    run.plot_rewards(["hero"])
    run.close()
    files = [path for folder in ("new", "run") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert {"report.json", "rows.jsonl", "config.yaml", "metrics.jsonl", "ending.json", "reward.png"} <= {
        path.name for path in files
    }
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {p.name: oct(mode) for p in files}


def test_no_other_user_can_replace_models_in_the_cache(umask, tmp_path, monkeypatch):
    umask(0)
    monkeypatch.delenv("FORGE_AGENTS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        folder = cache_folder()
        assert folder == tmp_path / "cache" / "forge_agents"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert cache_folder() == Path("/proc/none/forge_agents")  # not writable


def test_failed_write_keeps_the_old_file(tmp_path):
    write_atomic(tmp_path / "a.txt", "old")

    def fail():
        with atomic_writer(tmp_path / "a.txt") as file:
            file.write("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "a.txt").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_replaced_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    write_atomic(tmp_path / "report.html", "new")
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "report.html").is_symlink()


@pytest.mark.parametrize(("chunk_bytes", "says"), [(-1, "chunk_bytes=-1 of the checksums"), (0, "almost none are on")])
def test_checksums_of_a_stranger_do_not_read_a_file_that_is_not_on_the_disk(tmp_path, chunk_bytes, says):
    sparse = tmp_path / "weights"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    with pytest.raises(ValueError, match=says):
        find_damage(tmp_path, {"weights": [1 << 40, 1]}, chunk_bytes=chunk_bytes)
