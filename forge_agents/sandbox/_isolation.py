"""Linux calls that shut a process in: namespaces, mounts, capabilities, system call filter, Landlock.

In: paths and limits. Out: nothing; the calling process is changed, or `OSError`. Waits for nothing.
Stand-alone: it runs in an isolated interpreter that sees the standard library only.
"""
# Importing pathlib takes as long as all the rest.
# ruff: noqa: PTH102, PTH103, PTH112, PTH114, PTH115, PTH120, PTH123, PTH211

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

INNER_ID = 1000
"""User and group of the program as it sees itself."""
OUTER_ID = 65534
"""User and group that root lends to the program: nobody's."""

_libc = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 22, 36, 38
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEW: NS, UTS, IPC, USER, PID, NET."""
_ANY_NAMESPACE = _NEW_NAMESPACES | 0x02000000 | 0x00000080  # also CGROUP and TIME
_NOSUID, _NODEV, _NOEXEC, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 2, 4, 8, 1, 32, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8

# Name -> number on x86_64, aarch64; -1 where an architecture lacks it.
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "personality": (135, 92),
    "sethostname": (170, 161),
}
# Landlock does not cover these, so they are denied where files of the host are in sight.
_DENIED_ON_HOST_FILES = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def die_with_parent() -> None:
    """The kernel kills this process as soon as its parent ends."""
    _check(_libc.prctl(_PDEATHSIG, 9, 0, 0, 0), "prctl(PDEATHSIG)")


def adopt_orphans() -> None:
    """Descendants that lose their parent become children of this process."""
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl(SUBREAPER)")


def default_signals() -> None:
    """Undo what the interpreter does on SIGINT and SIGPIPE."""
    for number in (2, 13):
        _libc.signal(number, None)


def enter_namespaces() -> None:
    """Own users, mounts, processes (from the next fork on), network, IPC and host name.

    Root maps two users, itself to set things up and nobody for the program; other users can map but themselves.
    """
    user, group, parent = os.geteuid(), os.getegid(), os.getpid()
    if user != 0:
        _check(_libc.unshare(_NEW_NAMESPACES), "unshare")
        _write_maps("self", f"{INNER_ID} {user} 1\n", f"{INNER_ID} {group} 1\n", deny_groups=True)
        return
    ready, go = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # must stay outside: only there may root map more than itself
        status = 1
        try:
            os.read(ready, 1)
            both = f"0 0 1\n{INNER_ID} {OUTER_ID} 1\n"
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


def _write_maps(pid: str, users: str, groups: str, *, deny_groups: bool) -> None:
    texts = {"setgroups": "deny"} if deny_groups else {}
    for name, text in {**texts, "uid_map": users, "gid_map": groups}.items():
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(result, f"mount {kind or 'bind'} {source} on {target}")


def _bind(source: str, target: str, attributes: int) -> None:
    _mount(source, target, "", _BIND | _REC)
    sizes = struct.pack("=4Q", attributes, 0, 0, 0)
    _check(_libc.syscall(442, -100, target.encode(), 0x8000, sizes, len(sizes)), f"mount_setattr {target}")


def build_root(readable: list[str], hidden: list[str], program: bytes, *, disk_bytes: int, num_files: int) -> None:
    """A new file tree: `readable` paths read-only, `hidden` ones empty, /dev/null and kin, /program.py, and /box.

    /box is the one place that can be written: memory-backed, bounded in bytes and in number of files.
    """
    stage = "/proc"  # exists everywhere, and nothing below it is wanted inside
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", stage, "tmpfs", _NOSUID | _NODEV, "size=16m,mode=0755")
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
    for device in ("null", "zero", "urandom"):
        _place(f"/dev/{device}", f"{stage}/dev/{device}")
        _bind(f"/dev/{device}", f"{stage}/dev/{device}", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NOEXEC)
    with open(f"{stage}/program.py", "wb") as file:
        file.write(program)
    os.mkdir(f"{stage}/box")
    owner = f"uid={INNER_ID},gid={INNER_ID},mode=0700"
    options = f"size={disk_bytes},nr_inodes={num_files + 1},{owner}"
    _mount("tmpfs", f"{stage}/box", "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    os.chdir(stage)
    number = 155 if os.uname().machine == "x86_64" else 41
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", 2), "umount2")
    os.chdir("/")
    _mount("none", "/", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _place(path: str, target: str) -> None:
    """Something to mount `path` on."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def set_limits(limits: dict[str, int]) -> None:
    """Soft and hard limits by their names in `resource`, e.g. ``{"RLIMIT_CORE": 0}``; never above what was allowed."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))


def drop_privileges(user: int | None) -> None:
    """No capability now or after any later exec.

    Args:
        user: User and group to become, in no other group; None to stay the same, as only root can change.
    """
    for capability in range(64):
        if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # beyond the last one, or an ordinary user without namespaces, who has none to lose
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    _check(_libc.capset(header, nothing), "capset")
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def filter_system_calls(*, host_files: bool) -> None:
    """Refuse calls that no ordinary program needs, new namespaces, and sockets other than local ones.

    Nothing is filtered on processors whose call numbers are not known here.

    Args:
        host_files: Whether files of the host are in sight: then their modes, owners and times are kept, too.
    """
    if os.uname().machine not in _ARCHITECTURES:
        return
    column, architecture = _ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, back = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse, unknown = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (back, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (back, 0, 0, refuse)]  # the 32-bit calls of x86_64
    for numbers in [*_DENIED.values(), *(_DENIED_ON_HOST_FILES.values() if host_files else ())]:
        if numbers[column] >= 0:
            code += [(equal, 0, 1, numbers[column]), (back, 0, 0, refuse)]
    code += [(equal, 0, 1, _CLONE3[column]), (back, 0, 0, unknown)]  # its flags are out of reach; libc then uses clone
    code += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, _ANY_NAMESPACE & ~0xFF)]
    code += [(back, 0, 0, refuse), (back, 0, 0, allow)]
    code += [(equal, 0, 4, _SOCKET[column]), (load, 0, 0, 16), (equal, 0, 1, 1), (back, 0, 0, allow)]
    code += [(back, 0, 0, refuse), (back, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    pointer = struct.pack("@HP", len(code), ctypes.addressof(program))
    _check(_libc.prctl(_SECCOMP, 2, pointer, 0, 0), "prctl(SECCOMP)")


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 where there is none."""
    return max(0, int(_libc.syscall(444, None, 0, 1)))


def lock_files(readable: list[str], writable: list[str]) -> None:
    """From now on read below `readable` only, write below `writable` only, and signal own descendants only (6.12+)."""
    version = landlock_version()
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    read = 0b1101  # execute, read files, list folders
    scope = 0b11 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("=3Q", rights, 0b11 if version >= 4 else 0, scope)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = int(_libc.syscall(444, attributes, size, 0))
    _check(ruleset, "landlock_create_ruleset")
    for path in [*readable, *writable]:
        allowed = rights if path in writable else read
        descriptor = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            allowed &= 0b101 | (0b10 if path.startswith("/dev/") else 0)
        rule = struct.pack("=Qi", allowed, descriptor)
        _check(_libc.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(descriptor)
    _check(_libc.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
