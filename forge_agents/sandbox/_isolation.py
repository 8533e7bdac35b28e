"""Linux calls that isolate a process: namespaces, mounts, capabilities, system call filter, Landlock.

The functions change the calling process or raise `OSError`. This module runs in an isolated interpreter with only the
standard library.
"""
# Importing pathlib would take as long as everything else.
# ruff: noqa: PTH102, PTH103, PTH112, PTH114, PTH115, PTH120, PTH123, PTH211

from __future__ import annotations

import _socket  # now, because the program's file tree may contain the modules of another interpreter
import ctypes
import errno
import fcntl
import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

INNER_ID = 1000
"""User and group of the program inside its namespace."""

_libc = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _CAPBSET_DROP, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 24, 22, 36, 38
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEW: NS, UTS, IPC, USER, PID, NET."""
_ANY_NAMESPACE = _NEW_NAMESPACES | 0x02000000 | 0x00000080  # also CGROUP and TIME
_NOSUID, _NODEV, _NOEXEC, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 2, 4, 8, 1, 32, 4096, 16384, 1 << 18
_WRITE = 0b10
"""Landlock's permission to write files."""
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8

# Name, number on x86_64, number on aarch64 (missing if that architecture lacks the call). These are the calls of
# Python's standard library, libc and threads, and reasonable operations on files. All other calls, present and future,
# do not exist for a program: no ptrace, mounts, namespaces, keys, BPF, io_uring, user faults or modules.
_ALLOWED = """
read:0:63 write:1:64 open:2 openat:257:56 close:3:57 stat:4 fstat:5:80 lstat:6 newfstatat:262:79 statx:332:291 poll:7
ppoll:271:73 lseek:8:62 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232
madvise:28:233 mlock:149:228 munlock:150:229 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 preadv2:327:286
pwritev2:328:287 readv:19:65 writev:20:66 access:21 faccessat:269:48 faccessat2:439:439 pipe:22 pipe2:293:59 select:23
pselect6:270:72 dup:32:23 dup2:33 dup3:292:24 ioctl:16:29 flock:73:32 fsync:74:82 fdatasync:75:83
truncate:76:45 ftruncate:77:46 fallocate:285:47 fadvise64:221:223 getdents64:217:61 getcwd:79:17 chdir:80:49
fchdir:81:50 rename:82 renameat:264:38 renameat2:316:276 mkdir:83 mkdirat:258:34 rmdir:84 creat:85 link:86
linkat:265:37 unlink:87 unlinkat:263:35 symlink:88 symlinkat:266:36 readlink:89 readlinkat:267:78 umask:95:166
sendfile:40:71 splice:275:76 tee:276:77 copy_file_range:326:285 close_range:436:436 statfs:137:43 fstatfs:138:44
getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12
flistxattr:196:13
epoll_create:213 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232 epoll_pwait:281:22 eventfd:284 eventfd2:290:19
signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 fork:57 vfork:58 execve:59:221
exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 kill:62:129 tkill:200:130 tgkill:234:131 pidfd_open:434:434
pidfd_send_signal:424:424 getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155 setpgid:109:154 getpgrp:111
setsid:112:157 getsid:124:156 set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 futex:202:98
futex_waitv:449:449 membarrier:324:283 rseq:334:293 restart_syscall:219:128 sched_yield:24:124
sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 sched_rr_get_interval:148:127 getpriority:140:141 getrlimit:97:163 setrlimit:160:164
getrusage:98:165 times:100:153 sysinfo:99:179 uname:63:160 getcpu:309:168 arch_prctl:158 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150
clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201
alarm:37 setitimer:38:103 getitimer:36:102 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138 rt_sigsuspend:130:133 sigaltstack:131:132
pause:34 getrandom:318:278 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 sendmmsg:307:269
recvmmsg:299:243 shutdown:48:210 getsockname:51:204 getpeername:52:205 getsockopt:55:209
pkey_alloc:330:289 pkey_free:331:290 pkey_mprotect:329:288 map_shadow_stack:453:453
"""
# Without namespaces, these would affect visible files and processes of the host. Landlock does not cover them.
_ALLOWED_IN_NAMESPACES = """
chmod:90 fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132 utimes:235 futimesat:261 utimensat:280:88
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16 chown:92
fchown:93:55 lchown:94 fchownat:260:54 sched_setaffinity:203:122 sched_setparam:142:118 sched_setscheduler:144:119
setpriority:141:140
"""
# Only on the loopback interface of a separate network namespace.
_ALLOWED_WITH_SOCKETS = "connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242"
_CLONE, _SOCKET, _SOCKETPAIR, _PRLIMIT = (56, 220), (41, 198), (53, 199), (302, 261)
_SYNC, _SYNCFS, _PRCTL = (162, 81), (306, 267), (157, 167)
_HARMLESS_PRCTL = (1, 2, 3, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 40)
"""Operations on names, signals, timers and orphans, and queries. Others hide a process's mappings, or rename them."""
_SETSOCKOPT, _FCNTL, _MMAP, _SECCOMP_CALL = (54, 208), (72, 25), (9, 222), (317, 277)
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _check(_libc.prctl(_PDEATHSIG, 9, 0, 0, 0), "prctl(PDEATHSIG)")


def adopt_orphans() -> None:
    """Make descendants that lose their parent children of this process."""
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl(SUBREAPER)")


def default_signals() -> None:
    """Restore the default handlers of SIGINT and SIGPIPE that the interpreter has changed."""
    for number in (2, 13):
        _libc.signal(number, None)


def outer_id() -> int:
    """Return the user and group of the program outside, if root runs the sandbox: numbers of no other process.

    Processes of one user can end each other. If this namespace has no such numbers, ``nobody`` has to do.
    """
    number = 0x70000000 + os.getpid()
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(first <= number < first + count for first, _, count in ranges):
            return 65534
    return number


def enter_namespaces(outer: int) -> None:
    """Enter new namespaces for users, mounts, processes (from the next fork on), network, IPC and host name.

    Root maps two users: itself for the setup and `outer` for the program. Other users can map only themselves.
    """
    user, group, parent = os.geteuid(), os.getegid(), os.getpid()
    if user != 0:
        _check(_libc.unshare(_NEW_NAMESPACES), "unshare")
        _write_maps("self", f"{INNER_ID} {user} 1\n", f"{INNER_ID} {group} 1\n", deny_groups=True)
        return
    ready, go = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # must stay outside, because only there may root map more than itself
        status = 1
        try:
            os.read(ready, 1)
            both = f"0 0 1\n{INNER_ID} {outer} 1\n"
            _write_maps(str(parent), both, both, deny_groups=False)
            status = 0
        finally:
            os._exit(status)
    try:
        _check(_libc.unshare(_NEW_NAMESPACES), "unshare")
    finally:
        os.write(go, b"x")
        mapped = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1]) == 0
        os.close(ready)
        os.close(go)
    if not mapped:
        raise PermissionError(errno.EPERM, "users could not be mapped into the namespace")


def leave_network() -> None:
    """Enter a new network namespace, with its loopback down. For root only. Other users need `enter_namespaces`."""
    _check(_libc.unshare(0x40000000), "unshare(NEWNET)")


def _write_maps(pid: str, users: str, groups: str, *, deny_groups: bool) -> None:
    texts = {"setgroups": "deny"} if deny_groups else {}
    for name, text in {**texts, "uid_map": users, "gid_map": groups}.items():
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def lend_port(port: int, channel: int) -> None:
    """Bring up the loopback of this network namespace and send a listening socket of it over `channel`.

    The receiver can serve this namespace from anywhere, because a socket stays in the namespace where it was made.
    """
    import socket

    with socket.socket() as listener, socket.socket(fileno=channel) as sender:
        fcntl.ioctl(listener, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        socket.send_fds(sender, [b"."], [listener.fileno()])


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(result, f"mount {kind or 'bind'} {source} on {target}")


def _bind(source: str, target: str, attributes: int) -> None:
    _mount(source, target, "", _BIND | _REC)
    sizes = struct.pack("=4Q", attributes, 0, 0, 0)
    _check(_libc.syscall(442, -100, target.encode(), 0x8000, sizes, len(sizes)), f"mount_setattr {target}")


def build_root(
    readable: list[str], hidden: list[str], folders: list[str], program: bytes, *, disk_bytes: int, num_files: int
) -> None:
    """Build a new file tree.

    `readable` paths are read-only and `hidden` ones empty. There are devices such as /dev/null, /program.py and /box.

    A mapping of /dev/zero opened for writing is shared memory that no counter includes, so /dev/zero exists only if
    `lock_writes` can prevent that.

    /box is the only writable folder. The folder is in memory, with a limited number of bytes and files. Each of
    `folders`, such as /app, is a bind mount of a folder in it, such as /box/app.
    """
    stage = "/proc"  # exists everywhere, and nothing below it is needed inside
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", stage, "tmpfs", _NOSUID | _NODEV, "size=16m,mode=0755")
    os.mkdir(f"{stage}/box")
    owner = f"uid={INNER_ID},gid={INNER_ID},mode=0700"
    options = f"size={disk_bytes},nr_inodes={num_files + 1},{owner}"
    _mount("tmpfs", f"{stage}/box", "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    for path in folders:  # first, because readable paths may lie in one
        os.makedirs(f"{stage}/box{path}")
        os.makedirs(stage + path)
        _mount(f"{stage}/box{path}", stage + path, "", _BIND)
    for path in readable:
        target = stage + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        _place(path, target)
        _bind(path, target, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in hidden:
        _mount("tmpfs", stage + path, "tmpfs", _NOSUID | _NODEV | _NOEXEC | _RDONLY, "size=4k,mode=0555")
    for device in ("null", "urandom", *(["zero"] if landlock_version() else [])):
        _place(f"/dev/{device}", f"{stage}/dev/{device}")
        _bind(f"/dev/{device}", f"{stage}/dev/{device}", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NOEXEC)
    with open(f"{stage}/program.py", "wb") as file:
        file.write(program)
    os.chdir(stage)
    number = 155 if os.uname().machine == "x86_64" else 41
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", 2), "umount2")
    os.chdir("/")
    _mount("none", "/", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _place(path: str, target: str) -> None:
    """Create a mount point for `path`."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def set_limits(limits: dict[str, int]) -> None:
    """Set soft and hard limits by their names in `resource`, e.g. ``{"RLIMIT_CORE": 0}``, never above the present ones.

    The hard limit of processor time is one second higher, so that the kernel ends a program by SIGXCPU, a signal that
    tells the reason.
    """
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = value + (name == "RLIMIT_CPU")
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (min(value, most), most))


def drop_privileges(user: int | None) -> None:
    """Drop all capabilities, also for any later exec.

    Args:
        user: New user and only group. None keeps the user, because only root can change.
    """
    for capability in range(64):
        if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # beyond the last one, or an ordinary user without namespaces, who has no capabilities
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    _check(_libc.capset(header, nothing), "capset")
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def filter_system_calls(*, namespaces: bool, sockets: bool = False) -> int | None:
    """Allow only the calls that ordinary programs need, for this process and its children.

    The only sockets are pairs of connected streams, plus TCP and UDP on request, because Unix sockets are not limited
    by a network namespace. Buffers of sockets and pipes keep their default sizes. Shared anonymous memory must be
    granted, because no file of /proc shows how much of it exists. On processors with unknown call numbers, no call is
    filtered.

    Args:
        namespaces: Whether the process has its own mounts and process ids. Otherwise it may not change modes, owners,
            times and priorities, because it could do so outside.
        sockets: Whether it may use TCP and UDP, in a network namespace with only a loopback.

    Returns:
        Descriptor for `answer_mapping` to grant shared anonymous memory. None: such memory is refused, because this
        kernel or an outer filter allows no listener.
    """
    if os.uname().machine not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[os.uname().machine]
    try:
        return _install(_filter(column, architecture, namespaces=namespaces, sockets=sockets, shared=_ASK), column)
    except OSError:
        refused = _ERRNO | errno.ENOMEM
        code = _filter(column, architecture, namespaces=namespaces, sockets=sockets, shared=refused)
        pointer, _keep = _program(code)
        _check(_libc.prctl(_SECCOMP, 2, pointer, 0, 0), "prctl(SECCOMP)")
        return None


def _program(code: list[tuple[int, int, int, int]]) -> tuple[bytes, object]:
    """A filter in the kernel's format, and the buffer that it points to."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    return struct.pack("@HP", len(code), ctypes.addressof(program)), program


def _install(code: list[tuple[int, int, int, int]], column: int) -> int:
    """Install a filter with a listener. Returns the listener's descriptor."""
    pointer, _keep = _program(code)
    listener = int(_libc.syscall(_SECCOMP_CALL[column], 1, 8, pointer))
    _check(listener, "seccomp(NEW_LISTENER)")
    return listener


def _filter(
    column: int, architecture: int, *, namespaces: bool, sockets: bool, shared: int
) -> list[tuple[int, int, int, int]]:
    """Instructions: operation, jump if true, jump if false, operand. Only low halves of arguments are compared."""
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    unknown = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)  # libc falls back, as on an older kernel
    first, second, third, fourth = ((_LOAD, 0, 0, 16 + 8 * n) for n in range(4))
    internet = [
        *(first, (_EQUAL, 1, 0, 2), (_EQUAL, 0, 9, 10)),  # IPv4, IPv6
        *(second, (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1), (_EQUAL, 0, 5, 2)),  # streams, datagrams
        *(third, (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, 6), (_EQUAL, 0, 1, 17), allow, refuse),  # TCP, UDP
    ]
    cases = {
        _CLONE: [first, (_ANY_BIT, 0, 1, _ANY_NAMESPACE & ~0xFF), refuse, allow],
        _SOCKET: internet if sockets else [refuse],
        _SOCKETPAIR: [first, (_EQUAL, 0, 4, 1), second, (_AND, 0, 0, 0xF), (_EQUAL, 0, 1, 1), allow, refuse],
        _PRLIMIT: [first, (_EQUAL, 0, 1, 0), allow, refuse],
        _SETSOCKOPT: [  # buffer sizes are hints, and the kernel also limits them silently
            *(second, (_EQUAL, 0, 6, 1), third, (_EQUAL, 3, 0, 7), (_EQUAL, 2, 0, 8), (_EQUAL, 1, 0, 32)),
            *((_EQUAL, 0, 1, 33), (_RETURN, 0, 0, _ERRNO), allow),
        ],
        # These would wait for all file systems of the machine, and nothing could end the program meanwhile.
        **{number: [(_RETURN, 0, 0, _ERRNO)] for number in (_SYNC, _SYNCFS)},
        _PRCTL: [
            *(first, *((_EQUAL, len(_HARMLESS_PRCTL) - at, 0, number) for at, number in enumerate(_HARMLESS_PRCTL))),
            *((_RETURN, 0, 0, _ERRNO | errno.EINVAL), allow),
        ],
        _FCNTL: [  # no leases, which stop other processes that open the file, no owners of signals, no larger pipes
            *(second, (_AT_LEAST, 0, 7, 8), (_EQUAL, 6, 0, 36), (_EQUAL, 5, 0, 37), (_EQUAL, 4, 0, 38)),
            *((_EQUAL, 3, 0, 1030), (_AT_LEAST, 0, 1, 1032), (_ABOVE, 0, 1, 1034), refuse, allow),
        ],
        _MMAP: [  # MAP_HUGETLB, of the host's pool; MAP_SHARED with MAP_ANONYMOUS
            *(fourth, (_ANY_BIT, 0, 1, 0x40000), refuse),
            *((_AND, 0, 0, 0x21), (_EQUAL, 0, 1, 0x21), (_RETURN, 0, 0, shared), allow),
        ],
    }
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0, 1, 0x40000000), unknown]  # the 32-bit calls of x86_64
    for numbers, block in cases.items():
        code += [(_EQUAL, 0, len(block), numbers[column]), *block]
    calls = _ALLOWED + _ALLOWED_IN_NAMESPACES * namespaces + _ALLOWED_WITH_SOCKETS * sockets
    for low, high in _ranges(calls, column):
        code += [(_AT_LEAST, 0, 2, low), (_ABOVE, 1, 0, high), allow]
    return [*code, unknown]


def pair() -> tuple[int, int]:
    """Return two connected sockets, for `received_descriptor` and `send_descriptor`."""
    ends = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    return ends[0].detach(), ends[1].detach()


def send_descriptor(channel: int, descriptor: int) -> None:
    """Send a descriptor to the process at the other end of a pair of sockets, and close both here."""
    pair = _socket.socket(fileno=channel)
    pair.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", descriptor))])
    pair.close()
    os.close(descriptor)


def received_descriptor(channel: int) -> int | None:
    """Return the descriptor from `send_descriptor`, or None if none was sent. Closes `channel`."""
    pair = _socket.socket(fileno=channel)
    _, parts, _, _ = pair.recvmsg(1, _socket.CMSG_SPACE(4))
    pair.close()
    return int(struct.unpack("i", parts[0][2])[0]) if parts else None


def answer_mapping(listener: int, granted: Callable[[int, int], bool]) -> None:
    """Answer one request for shared anonymous memory: continue the call if it is `granted`, else fail it.

    `granted` gets the thread and the number of bytes, which is an argument in a register, so no other thread of the
    program can change it in between.
    """
    request = bytearray(80)
    try:
        fcntl.ioctl(listener, 0xC0502100, request)  # SECCOMP_IOCTL_NOTIF_RECV
    except OSError:
        return  # the program was killed in the meantime
    key, thread, _, _, _, _, _, size = struct.unpack_from("=QIIiIQQQ", request)
    go_on = granted(thread, size)
    answer = struct.pack("=QqiI", key, 0, 0 if go_on else -errno.ENOMEM, int(go_on))
    try:
        fcntl.ioctl(listener, 0xC0182101, bytearray(answer))  # SECCOMP_IOCTL_NOTIF_SEND
    except OSError:
        return  # as above


def _ranges(calls: str, column: int) -> list[tuple[int, int]]:
    """Merge call numbers into ranges, given by first and last."""
    ranges: list[tuple[int, int]] = []
    entries = (call.split(":")[1:] for call in calls.split())
    for number in sorted(int(entry[column]) for entry in entries if len(entry) > column):
        low = ranges.pop()[0] if ranges and ranges[-1][1] == number - 1 else number
        ranges.append((low, number))
    return ranges


def landlock_version() -> int:
    """Return the version of the kernel's Landlock, or 0 if there is none."""
    return max(0, int(_libc.syscall(444, None, 0, 1)))


def lock_files(readable: list[str], writable: list[str]) -> None:
    """Restrict reads to `readable`, writes to `writable`, and signals to descendants (kernel 6.12 or newer)."""
    version = landlock_version()
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    read = 0b1101  # execute, read files, list folders
    scope = 0b11 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("=3Q", rights, 0b11 if version >= 4 else 0, scope)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    _lock(attributes[:size], [*((path, read) for path in readable), *((path, rights) for path in writable)])


def lock_writes(writable: list[str]) -> None:
    """Restrict opening files for writing to `writable`."""
    _lock(struct.pack("=Q", _WRITE), [(path, _WRITE) for path in writable])


def _lock(attributes: bytes, rules: list[tuple[str, int]]) -> None:
    ruleset = int(_libc.syscall(444, attributes, len(attributes), 0))
    _check(ruleset, "landlock_create_ruleset")
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH)
        allowed = rights if os.path.isdir(path) else rights & (0b101 | _WRITE)
        rule = struct.pack("=Qi", allowed, descriptor)
        _check(_libc.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(descriptor)
    _check(_libc.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
