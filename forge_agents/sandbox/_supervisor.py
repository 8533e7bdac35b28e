"""Runs one program, isolated on request, watches it, and ends it with all its children.

The supervisor reads a marshaled request from standard input and writes a marshaled reply to standard output. A program
may run for `wall_s`. A command line ends when the standard input does. The supervisor is started by `python -I -S`, so
it has only the standard library, and imports little of it, because imports are most of the cost of a run.
"""
# Importing pathlib would take as long as everything else.
# ruff: noqa: PTH100, PTH102, PTH103, PTH110, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # the module signal imports much more
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import _isolation as isolation  # type: ignore[import-not-found]  # noqa: E402  # next to this file
from _usage import Usage  # type: ignore[import-not-found]  # noqa: E402

TICK_S = 0.02
"""Time between two measurements of the program's usage."""
_CHUNK = 1 << 16
_MAX_PATH = 200
"""Maximum length of the path of a file that is returned, in bytes. Another run accepts 255, in a folder for example."""
_SIGKILL, _SIGTERM, _SIGXCPU = 9, 15, 24
_TERMINATION_S = 2.0
"""Time that a command line that is not isolated gets after SIGTERM. A container client passes the signal on."""
_ENGINE_S = 20.0
"""Maximum time of a container engine to end the container, and again to remove it."""


class Run:
    """A program, from start to end."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.limits = request, request["limits"]
        self.strong: bool = request["namespaces"]
        self.box = "/box" if self.strong else os.path.join(request["scratch"], "box")
        self.outer: int = isolation.outer_id()
        self.user: int = isolation.INNER_ID if self.strong else self.outer
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self.limit = ""
        self.status: int | None = None
        self.cpu_s = 0.0
        self.usage = Usage(self.proc, namespaces=self.strong, tcp="port" in request)
        self.output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.report = b""
        self.child, self.channel, self.listener = 0, -1, -1
        self.tick_s: float | None = TICK_S
        self.ends: dict[int, str] = {}

    def __call__(self) -> dict[str, Any]:
        """Run the program and return the reply."""
        self._prepare()
        started = time.monotonic()
        pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "report")}
        pipes["listener"] = isolation.pair()
        self.child = os.fork()
        if self.child == 0:
            self._be_child(pipes)
        for name, (read_end, write_end) in pipes.items():
            os.close(read_end if name == "stdin" else write_end)
        self.channel = pipes["listener"][0]
        outputs = {pipes[name][0]: name for name in ("stdout", "stderr", "report")}
        self._watch(pipes["stdin"][1], outputs, started + self.limits["wall_s"])
        self._end(outputs)
        wall_s = time.monotonic() - started
        text = self.report.decode("utf-8", "replace")
        if text.startswith("!"):
            return {"failure": text[1:]}
        if text:
            self.status = int(text)
        return self._reply(wall_s)

    def _prepare(self) -> None:
        isolation.die_with_parent()
        os.umask(0o022)
        self._make_box()

    def _make_box(self) -> None:
        program = self.request["code"].encode("utf-8", "surrogateescape")
        if self.strong:
            isolation.enter_namespaces(self.outer)
            if "port" in self.request:
                isolation.lend_port(self.request["port"], self.request["channel"])
            isolation.build_root(
                self.request["readable"],
                self.request["hidden"],
                self.request["folders"],
                program,
                disk_bytes=self.limits["disk_mb"] << 20,
                num_files=self.limits["files"],
            )
        else:
            isolation.adopt_orphans()
            os.mkdir(self.box, 0o700)
            # others can look up names in the folder around it
            with open(os.open(self._program_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
                file.write(program)
            if os.geteuid() == 0:
                os.chown(self._program_path(), self.user, self.user)
        for name, content in self.request["files"].items():
            path = os.path.join(self.box, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        if os.geteuid() == 0:
            for folder, names, files in os.walk(self.box):
                for name in ("", *names, *files):
                    os.chown(os.path.join(folder, name), self.user, self.user)

    def _program_path(self) -> str:
        return "/program.py" if self.strong else os.path.join(self.request["scratch"], "program.py")

    # ---- in the child

    def _be_child(self, pipes: dict[str, tuple[int, int]]) -> None:
        """Become the program. With namespaces, become its parent, the first process of the new process namespace."""
        report = pipes["report"][1]
        try:
            isolation.die_with_parent()
            if self.strong:
                self._be_init(pipes, report)
            self._exec(pipes)
        except BaseException as error:  # noqa: BLE001  # this process has no caller, so the error goes to the parent
            os.write(report, f"!{type(error).__name__}: {error}"[:2000].encode("utf-8", "replace"))
        finally:
            os._exit(70)

    def _be_init(self, pipes: dict[str, tuple[int, int]], report: int) -> None:
        """Start the program and reap orphans until it ends. The end of this process ends all others."""
        program = os.fork()
        if program == 0:
            return
        isolation.default_signals()  # the kernel protects this process from signals that it does not handle
        for name in ("stdin", "stdout", "stderr", "listener"):
            for descriptor in pipes[name]:
                os.close(descriptor)
        while True:
            pid, status = os.wait()
            if pid == program:
                os.write(report, str(status).encode())
                os._exit(0)

    def _exec(self, pipes: dict[str, tuple[int, int]]) -> None:
        for descriptor, (name, end) in enumerate((("stdin", 0), ("stdout", 1), ("stderr", 1))):
            os.dup2(pipes[name][end], descriptor)
        os.setsid()
        os.chdir(self.box)
        self._isolate(pipes["listener"][1])
        isolation.default_signals()
        words, environment = self._words()
        os.execvpe(words[0], words, environment)  # noqa: S606

    def _isolate(self, channel: int) -> None:
        os.umask(0o077)
        processes = self.limits["processes"] + self._others()
        isolation.drop_privileges(self.user if os.geteuid() == 0 else None)
        if isolation.landlock_version():
            if self.strong:
                isolation.lock_writes([self.box, *self.request["folders"], "/dev/null"])
            else:
                readable = [path for path in self.request["readable"] if os.path.exists(path)]
                readable += [self._program_path(), "/dev/zero", "/dev/urandom"]
                isolation.lock_files(readable, [self.box, "/dev/null"])
        listener = isolation.filter_system_calls(namespaces=self.strong, sockets="port" in self.request)
        if listener is not None:
            # Descriptors in flight count per user, also those of other programs, up to the sender's limit of open files
            isolation.set_limits({"RLIMIT_NOFILE": 1 << 20})
            isolation.send_descriptor(channel, listener)
        isolation.set_limits({**self.request["rlimits"], "RLIMIT_NPROC": processes})

    def _words(self) -> tuple[list[str], dict[str, str]]:
        """The program's command line and environment."""
        python, environment = self.request["python"], self._environment()
        return [python, "-s", "-S", "-B", "-P", "-u", self._program_path()], environment

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,  # only what the interpreter needs to start; the controller's environment is not inherited
            "HOME": self.box,
            "LANG": "C.UTF-8",
            "MALLOC_ARENA_MAX": "1",  # each arena would take 64 MiB of address space
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join([self.box, *self.request["import_paths"]]),
            "TMPDIR": self.box,
        }

    def _others(self) -> int:
        """Threads that count towards the user's limit in addition to the program's own."""
        if self.strong:
            return 0 if os.geteuid() == 0 else 2  # the supervisor and the first process, which run as the same user
        user, num = os.geteuid() or self.outer, 0
        for pid in os.listdir(self.proc):
            try:
                if pid.isdigit() and os.stat(pid, dir_fd=self.proc).st_uid == user:
                    num += os.stat(f"{pid}/task", dir_fd=self.proc).st_nlink - 2
            except OSError:
                continue  # it ended in the meantime
        return num

    # ---- in the supervisor

    def _watch(self, stdin: int, outputs: dict[int, str], deadline: float) -> None:
        """Feed and read the program until it ends or exceeds a limit."""
        waiting = self.request["stdin"].encode("utf-8", "surrogateescape")
        poll = select.poll()
        for descriptor in outputs:
            poll.register(descriptor, select.POLLIN)
        os.set_blocking(stdin, False)
        poll.register(stdin, select.POLLOUT)
        for descriptor in (*self.ends, self.channel):
            poll.register(descriptor, select.POLLIN)
        looked, running = time.monotonic(), True
        while running and not self.limit:
            for descriptor, event in poll.poll(None if self.tick_s is None else self.tick_s * 1000):
                if descriptor == stdin:
                    waiting = self._feed(stdin, waiting, poll)
                elif descriptor not in outputs:
                    self._listen(descriptor, event, poll)
                elif not self._take(outputs[descriptor], os.read(descriptor, _CHUNK)):
                    poll.unregister(descriptor)
                    running = running and not (self.strong and outputs[descriptor] == "report")
            now = time.monotonic()
            if self.tick_s is not None and now - looked >= self.tick_s:
                looked = now
                self._look()
            if now >= deadline and not self.limit:
                self.limit = "wall_s"
            if not self.strong:
                self._reap()
                running = self.status is None

    def _listen(self, descriptor: int, event: int, poll: Any) -> None:
        """Receive the filter's listener, answer a request for shared memory, or end a command."""
        if descriptor in self.ends:
            self.limit = self.ends[descriptor]
            poll.unregister(descriptor)
        elif descriptor == self.channel:
            poll.unregister(descriptor)
            self.channel, listener = -1, isolation.received_descriptor(descriptor)
            if listener is not None:
                self.listener = listener
                poll.register(listener, select.POLLIN)
        elif event & select.POLLIN:
            started = time.process_time()
            isolation.answer_mapping(descriptor, self._granted)
            self.usage.sampled_cpu_s += time.process_time() - started  # this work is caused by the program
        else:  # no process with the filter is left
            poll.unregister(descriptor)

    def _granted(self, thread: int, num_bytes: int) -> bool:
        return bool(self.usage.grant(self._tree, thread, num_bytes, self.limits["memory_mb"] << 20))

    @staticmethod
    def _feed(stdin: int, waiting: bytes, poll: Any) -> bytes:
        try:
            waiting = waiting[os.write(stdin, waiting[:_CHUNK]) :]
        except BrokenPipeError:
            waiting = b""
        if not waiting:
            poll.unregister(stdin)
            os.close(stdin)
        return waiting

    def _take(self, name: str, data: bytes) -> bool:
        """Keep the output up to the limit. Returns False at the end of the pipe."""
        if name == "report":
            self.report += data
            return bool(data)
        free = (self.limits["output_kb"] << 10) - sum(map(len, self.output.values()))
        self.output[name] += data[:free]
        if len(data) > free:
            self.limit = self.limit or "output_kb"
        return bool(data)

    def _look(self) -> None:
        """Compare memory, processor time and processes of the whole tree with the limits."""
        usage, max_bytes = self.usage, self.limits["memory_mb"] << 20
        usage.look(self._tree, max_bytes)
        orphans = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = max(self.cpu_s, usage.cpu_s + orphans.ru_utime + orphans.ru_stime)
        if usage.sampled_cpu_s > 2 * self.limits["cpu_s"]:  # beyond the estimate's error: no parent was charged
            self.cpu_s = max(self.cpu_s, usage.sampled_cpu_s)
        if usage.memory_bytes > max_bytes:
            self.limit = self.limit or "memory_mb"
        elif self.cpu_s > self.limits["cpu_s"]:
            self.limit = self.limit or "cpu_s"
        elif usage.processes > self.limits["processes"] and not self.strong:  # otherwise the kernel counts
            self.limit = self.limit or "processes"

    def _tree(self) -> list[str]:
        """Processes of the program. Orphans are children of its first process, or of this one."""
        roots = [str(self.child)] if self.strong else self.usage.children(str(os.getpid()))
        return list(self.usage.tree(roots))

    def _end(self, outputs: dict[int, str]) -> None:
        """Kill the remaining processes and collect their output."""
        if self.strong:
            self._kill(self.child)
            os.waitpid(self.child, 0)
        else:
            self._kill(-self.child)
            while True:
                for process in self._tree():
                    self._kill(int(process))
                if not self._reap():
                    break
                time.sleep(TICK_S / 20)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = max(self.cpu_s, used.ru_utime + used.ru_stime)
        for descriptor, name in outputs.items():
            while self._take(name, os.read(descriptor, _CHUNK)):
                pass

    def _reap(self, *_: object) -> bool:
        """Collect the status of ended children, also of adopted orphans. Returns whether children are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self.child:
                self.status = status

    @staticmethod
    def _kill(pid: int, number: int = _SIGKILL) -> None:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            return  # it ended by itself, or the id belongs to another user by now

    def _reply(self, wall_s: float) -> dict[str, Any]:
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        # SIGXCPU is proof. The kernel counts ticks, on a busy machine more of them than were used.
        cpu_limit = code == -_SIGXCPU or (code == -_SIGKILL and self.cpu_s >= self.limits["cpu_s"] * 0.9)
        if cpu_limit and not self.limit:
            self.limit = "cpu_s"
        files = self._collect() if self.request["collect"] else {}
        return {
            **{name: bytes(data) for name, data in self.output.items()},
            "exit_code": -_SIGKILL if self.limit or code is None else code,
            "limit": self.limit,
            "wall_s": wall_s,
            "cpu_s": self.cpu_s,
            "peak_mb": self.usage.peak_bytes / 2**20,
            "files": files,
        }

    def _collect(self) -> dict[str, bytes]:
        """Regular files of the box, without links, pipes, and files too deep to be written to another folder."""
        contents: dict[str, bytes] = {}
        free, folders = self.limits["disk_mb"] << 20, [self.box]
        while folders:
            try:
                entries = list(os.scandir(folders.pop()))
            except OSError:
                continue
            for entry in entries:
                if len(os.fsencode(entry.path)) - len(self.box) > _MAX_PATH:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                data = self._content(entry.path, free) if entry.is_file(follow_symlinks=False) else None
                if data is None:
                    continue
                free -= len(data)
                if free < 0 or len(contents) >= self.limits["files"]:
                    self.limit = self.limit or "disk_mb"
                    return contents
                contents[os.path.relpath(entry.path, self.box)] = data
        return contents

    @staticmethod
    def _content(path: str, free: int) -> bytes | None:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return file.read(free + 1)
        except OSError:
            return None


class Command(Run):
    """A command line that calls models: isolated, with one port of the loopback, or free, in a folder of the host."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.tick_s = 5 * TICK_S if self.strong else None  # hundreds of them may run for hours
        self.ends = {0: "stopped"}
        if not self.strong:
            self.box = request["scratch"]

    def _prepare(self) -> None:
        # `die_with_parent` would end it with the thread that started it
        if self.strong:
            os.umask(0o022)
            self._make_box()
            return
        if not self.request["container"]:  # otherwise the cleanup of the container client would be killed with it
            isolation.adopt_orphans()
        if "port" in self.request:
            isolation.leave_network()
            isolation.lend_port(self.request["port"], self.request["channel"])

    def _isolate(self, channel: int) -> None:
        if self.strong:
            super()._isolate(channel)
        else:
            isolation.set_limits(self.request["rlimits"])

    def _words(self) -> tuple[list[str], dict[str, str]]:
        base = self._environment() if self.strong else {}
        if self.strong:  # Python must import nothing that a model's commands write into the working folder
            del base["PYTHONPATH"]
            base |= {"PYTHONNOUSERSITE": "1"}
            if self.request["import_paths"]:
                base["PYTHONPATH"] = os.pathsep.join(self.request["import_paths"])
        return self.request["words"], {**base, **self.request["environment"]}

    def _watch(self, stdin: int, outputs: dict[int, str], deadline: float) -> None:
        if not self.strong:
            try:
                self.ends[os.pidfd_open(self.child)] = ""  # only to wake up
            except OSError:  # missing on some systems that claim to be Linux
                self.tick_s = 5 * TICK_S
            if not self.request["container"]:  # without a tick, orphans would wait for the end of the program
                signal.signal(signal.SIGCHLD, self._reap)
        super()._watch(stdin, outputs, float("inf"))
        if not self.strong and self.status is None:
            self._kill(self.child, _SIGTERM)
            self._ended_within(self.child, _TERMINATION_S)

    def _end(self, outputs: dict[int, str]) -> None:
        if self.request["container"]:
            kills, removes = self.request["container"]
            if self.status is None or not os.WIFEXITED(self.status):
                self._ask_engine(kills)
            if self.status is None:
                self._ended_within(self.child, _TERMINATION_S)
            self._kill(-self.child)
            self._ask_engine(removes)  # now that no process is left that could start it
        super()._end(outputs)

    def _ask_engine(self, words: list[str]) -> None:
        """Run a command line of the container engine. Failures are ignored, because the container may have ended."""
        engine = os.fork()
        if engine == 0:
            try:
                nothing = os.open("/dev/null", os.O_RDWR)
                for descriptor in range(3):
                    os.dup2(nothing, descriptor)
                os.execvpe(words[0], words, self.request["environment"])  # noqa: S606
            finally:
                os._exit(70)
        if not self._ended_within(engine, _ENGINE_S):
            self._kill(engine)
        os.waitpid(engine, 0)

    @staticmethod
    def _ended_within(pid: int, within_s: float) -> bool:
        """Whether a child ended in time. The child can still be waited for."""
        last = time.monotonic() + within_s
        try:
            while (
                not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
                and time.monotonic() < last
            ):
                time.sleep(TICK_S)
        except ChildProcessError:  # its status is known already
            return True
        return bool(ended)

    def _look(self) -> None:
        if self.strong:
            super()._look()

    def _take(self, name: str, data: bytes) -> bool:
        """Keep the output, of standard output and error only the end."""
        if name == "report":
            return super()._take(name, data)
        self.output[name] += data
        del self.output[name][: -(self.limits["output_kb"] << 10)]
        return bool(data)


def main() -> None:
    """Read one request and write one reply."""
    request = marshal.load(sys.stdin.buffer)  # noqa: S302  # from our own process
    try:
        reply = (Command if "words" in request else Run)(request)()
    except Exception as error:  # noqa: BLE001  # the reply reports failures
        reply = {"failure": f"{type(error).__name__}: {error}"}
    try:
        marshal.dump(reply, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except OSError:  # the reader is gone
        if request.get("remove"):  # a temporary folder, which the reader would have removed
            os.execvp("rm", ["rm", "-rf", "--", request["remove"]])  # noqa: S606
    os._exit(0)


if __name__ == "__main__":
    main()
