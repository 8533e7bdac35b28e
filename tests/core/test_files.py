"""Files of ours are written whole, and only as readable as the user's umask allows."""

import fcntl
import json
import os
import shutil
import signal
import stat
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_agents.bench.records import EpisodeLog
from forge_agents.errors import RunFolderError
from forge_agents.files import (
    atomic_writer,
    cache_folder,
    check_plain_files,
    find_damage,
    lock_file,
    warn_of_other_writers,
    write_atomic,
)
from forge_agents.policy import Policy
from forge_agents.programs.traces import import_traces
from forge_trainers.records.run_folder import RunFolder, hashes_of_models


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
    expected = {path.name: oct(0o600 if path.name == ".lock" else mode) for path in files}  # others would hold the lock
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == expected


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


def test_file_that_a_running_training_renames_is_no_damage(tmp_path, monkeypatch):
    scandir = os.scandir

    def renamed_meanwhile(folder):
        entries = list(scandir(folder))
        (tmp_path / ".plan.yaml.draft").rename(tmp_path / "plan.yaml")
        return entries

    (tmp_path / ".plan.yaml.draft").touch()
    monkeypatch.setattr(os, "scandir", renamed_meanwhile)
    check_plain_files(tmp_path)


@pytest.mark.parametrize(("chunk_bytes", "says"), [(-1, "chunk_bytes=-1 of the checksums"), (0, "almost none are on")])
def test_checksums_of_a_stranger_do_not_read_a_file_that_is_not_on_the_disk(tmp_path, chunk_bytes, says):
    sparse = tmp_path / "weights"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    with pytest.raises(ValueError, match=says):
        find_damage(tmp_path, {"weights": [1 << 40, 1]}, chunk_bytes=chunk_bytes)


def test_file_with_many_names_is_compared_once(tmp_path, monkeypatch):
    """Tools that save space link equal files, such as the metadata of two policies."""
    (tmp_path / "p").write_bytes(b"weights")
    (tmp_path / "q").hardlink_to(tmp_path / "p")
    sums, calls, crc32 = [7, zlib.crc32(b"weights")], [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *data: calls.append(data) or crc32(*data))
    assert not find_damage(tmp_path, {"p": sums, "q": sums, "./q": sums}, chunk_bytes=0) and len(calls) == 1
    assert "q has CRC-32" in find_damage(tmp_path, {"p": sums, "q": [7, 0]}, chunk_bytes=0)


def test_folder_that_others_can_change_is_named_once(tmp_path, monkeypatch, caplog):
    private, shared, open_ = (tmp_path / name for name in ("private", "shared", "open"))
    for folder, mode in ((private, 0o775), (shared, 0o1777), (open_, 0o777)):
        folder.mkdir()
        folder.chmod(mode)
        (folder / "run").mkdir(mode=0o755)
    (private / "link").symlink_to(open_ / "run")

    def warned(folder):
        caplog.clear()
        warn_of_other_writers(folder)
        return caplog.text

    assert not warned(private / "run") and not warned(shared / "run") and not warned(tmp_path / "missing")
    (private / "open").mkdir()
    (private / "open").chmod(0o777)
    for folder in (open_ / "run", private / "link"):
        assert f"{open_} has mode 777, so other users can replace files of {folder}" in warned(folder)
        assert not warned(folder), "once"
    assert f"{private / 'open'} has mode 777" in warned(private / "open")
    warn_of_other_writers.cache_clear()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    (shared / "run").chmod(0o700)
    text = warned(shared / "run" / "seed-0")
    assert (f"{shared / 'run'} is of user {owner}" in text) == bool(owner), "root may change everything anyway"
    assert not warned(private / "run"), "its parent is not open to others"


@pytest.mark.parametrize(
    ("members", "primary", "is_reported"),
    [([], [], False), (["me", "root"], [], False), (["ann"], [], True), ([], ["ann"], True), (None, [], True)],
)
def test_folder_of_a_group_with_other_members_is_reported(
    tmp_path, monkeypatch, caplog, *, members, primary, is_reported
):
    def groups(gid):
        if members is None:
            raise KeyError
        return SimpleNamespace(gr_mem=members if gid == 4242 else [])

    users = [SimpleNamespace(pw_name="me", pw_gid=4242), *(SimpleNamespace(pw_name=p, pw_gid=4242) for p in primary)]
    monkeypatch.setattr("grp.getgrgid", groups)
    monkeypatch.setattr("pwd.getpwall", lambda: users)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: users[0])
    true_stat = Path.stat

    def with_group(path, **options):
        fields = list(true_stat(path, **options))
        return os.stat_result((*fields[:5], 4242 if path == tmp_path / "group" else 0, *fields[6:]))

    monkeypatch.setattr(Path, "stat", with_group)
    (tmp_path / "group" / "run").mkdir(parents=True)
    (tmp_path / "group").chmod(0o775)
    warn_of_other_writers(tmp_path / "group" / "run")
    assert (f"{tmp_path / 'group'} has mode 775, so other users can replace" in caplog.text) == is_reported


def test_runs_and_models_in_folders_of_others_are_reported(tmp_path, tiny_llama, caplog):
    tmp_path.chmod(0o777)
    RunFolder(tmp_path / "run", {}).close()
    with EpisodeLog(tmp_path / "games"):
        pass
    hashes_of_models({"hero": Policy(str(shutil.copytree(tiny_llama, tmp_path / "model")))})
    for name in ("run", "games", "model"):
        assert f"can replace files of {tmp_path / name} while" in caplog.text
    tmp_path.chmod(0o700)


def test_forked_child_that_lives_longer_does_not_hold_a_lock(tmp_path):
    lock, (reader, writer) = lock_file(tmp_path / "x.lock"), os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, b"x")
        signal.pause()
    try:
        assert os.read(reader, 1) == b"x"
        with pytest.raises(BlockingIOError):
            lock_file(tmp_path / "x.lock")  # the child gave up its copy, not the lock
        lock.close()
        lock_file(tmp_path / "x.lock").close()
    finally:
        os.close(writer)
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_only_the_user_can_open_a_lock(tmp_path):
    (tmp_path / "x.lock").touch(0o644)
    for _ in range(2):
        with lock_file(tmp_path / "x.lock"):
            assert stat.S_IMODE((tmp_path / "x.lock").stat().st_mode) == 0o600
            with pytest.raises(BlockingIOError):
                lock_file(tmp_path / "x.lock")
    (tmp_path / "link.lock").symlink_to(tmp_path / "x.lock")
    with pytest.raises(OSError, match="Too many levels"):
        lock_file(tmp_path / "link.lock")


def test_a_lock_on_the_episodes_of_a_benchmark_keeps_no_one_out(tmp_path):
    with EpisodeLog(tmp_path):
        pass
    with (tmp_path / "episodes.jsonl").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with EpisodeLog(tmp_path):
            assert stat.S_IMODE((tmp_path / ".episodes.lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a folder", "dangling link", "/dev/null", "/dev/stdout"])
def test_only_files_are_replaced(tmp_path, monkeypatch, kind):
    """`--out /dev/null` of root, or `json: /dev/null` in a stranger's file, replaced the device by the report."""
    path, devices, replace = tmp_path / "page.html", Path("/dev"), Path.replace

    def guarded(draft, target):
        assert Path(target).parent != devices, "a device would be replaced"
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", guarded)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind.startswith("/dev/"):
        path = Path(kind)
    else:
        path.symlink_to(tmp_path if kind == "link to a folder" else tmp_path / "missing")
    before = path.lstat()
    for write in (write_atomic, lambda path, text: write_atomic(path, text, replaces="mine")):
        with pytest.raises(RunFolderError, match="is no file, and would be replaced by one. Choose another name"):
            write(path, "text")
    assert os.path.samestat(path.lstat(), before) and [file.name for file in tmp_path.iterdir()] in ([], ["page.html"])
