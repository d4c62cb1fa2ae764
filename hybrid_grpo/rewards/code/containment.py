"""How a process gives up its rights, for good, before it runs a program that nobody has read.

The Linux kernel offers each of these protections without any privilege:

    seccomp      a list of the system calls that stay allowed (man 2 seccomp): none starts a process or thread, opens
                 a connection, signals or debugs another process, or mounts anything
    landlock     a list of the folders that can be read, and the one that can be written (man 7 landlock)
    rlimits      CPU time, address space, open files, bytes of a file (man 2 setrlimit)
    user         if the caller is root: another user's id, or, if that user could not read Python's library, root
                 without any of root's privileges (man 7 capabilities)

`Kernel.find` tries which of them work here. `Containment` applies them, and raises if one fails that worked when it
was tried. Standard library only: this runs in a process without site-packages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import stat
import struct
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

PROTECTIONS = {
    "reads": "of the files of this machine, only the libraries of Python and the system can be read",
    "writes": "nothing can be written but the program's own folder",
    "network": "no socket can be opened",
    "processes": "no process or thread can be started, and no other process be signalled or looked into",
    "privileges": "the program has none of root's privileges",
}
"""The protections that can be required, each with what it promises."""


@dataclass(frozen=True)
class Limits:
    """Limits that hold for one program."""

    memory_mb: int = 512
    """MiB of address space, Python itself included."""
    cpu_s: int = 10
    """Seconds of CPU time after which the kernel ends the program; a whole number."""
    output_kb: int = 1024
    """KiB of standard output, and of any other file."""
    disk_mb: int = 16
    """MiB of all files in its folder; 0: the program has no folder, and cannot write at all."""
    files: int = 200
    """Files and folders in its folder."""


@dataclass(frozen=True)
class Kernel:
    """The protections that this kernel offers to this user."""

    seccomp: bool
    landlock: int
    """Version of its interface; 0: none."""
    user: int | None
    """Id of the user that programs run as; None: the caller, without privileges."""

    @classmethod
    def find(cls, without: Iterable[str] = ()) -> Kernel:
        """Try which protections work, but for those in `without`: `seccomp`, `landlock`, `user`."""
        seccomp = "seccomp" not in without and platform.machine() in _ARCHITECTURES
        seccomp = seccomp and _works(lambda: _Filter(writing=True).install())
        landlock = 0 if "landlock" in without else max(0, _syscall(_LANDLOCK_CREATE, None, 0, 1, check=False))
        if not _works(lambda: _syscall(_LANDLOCK_RESTRICT, _file_rules(landlock, None), 0)):
            landlock = 0
        user = None
        if os.getuid() == 0 and "user" not in without:
            # An id that nobody else uses, so that two programs cannot reach each other. The second one is for
            # containers that have only 65536 ids.
            users = (0x7A000000 + os.getpid() % 0x1000000, 64000 + os.getpid() % 1000)
            user = next((uid for uid in users if _works(partial(_read_as, uid))), None)
        return cls(seccomp, landlock, user)

    def protections(self) -> dict[str, str]:
        """The PROTECTIONS that are in force, each with the means."""
        landlock = self.landlock and f"landlock {self.landlock}"
        found = {
            "reads": landlock,
            # Landlock does not cover the mode, owner and times of files; seccomp does.
            "writes": self.seccomp and (landlock or "seccomp, which leaves no writable folder"),
            "network": self.seccomp and "seccomp",
            "processes": self.seccomp and "seccomp",
            "privileges": f"user {self.user}" if self.user else "no capabilities",
        }
        return {name: how for name, how in found.items() if how}

    @property
    def writable(self) -> bool:
        """Whether a program can be given a folder to write to, and no other place."""
        return bool(self.landlock) or not self.seccomp

    def adopt(self) -> None:
        """Make this process the parent of processes that its descendants leave behind."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Containment:
    """The protections, prepared for processes forked from this one; `folder` is the only place they may write to."""

    def __init__(self, kernel: Kernel, folder: str) -> None:
        self._kernel = kernel
        self._rules = {
            writing: _file_rules(kernel.landlock, folder if writing else None)
            for writing in (True, False)
            if kernel.landlock
        }
        self._calls = {writing: _Filter(writing) for writing in (True, False) if kernel.seccomp}

    def enter(self, limits: Limits, *, writing: bool) -> None:
        """Contain this process, for good; `writing` says whether it may write to the folder.

        Raises:
            OSError: the kernel refuses a protection that worked when it was tried.
        """
        _limit(limits)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self._rules:
            _syscall(_LANDLOCK_RESTRICT, self._rules[writing], 0)
        _become(self._kernel.user)
        # Only now: changing the user resets it.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._calls:
            self._calls[writing].install()


def _limit(limits: Limits) -> None:
    memory = limits.memory_mb << 20
    for name, value in (
        ("AS", memory),
        ("STACK", min(memory // 2, 64 << 20)),
        ("CPU", limits.cpu_s),
        ("FSIZE", max(limits.output_kb << 10, limits.disk_mb << 20)),
        ("NOFILE", 64),
        ("CORE", 0),
        ("MEMLOCK", 0),
    ):
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _become(uid: int | None) -> None:
    """Become this user, in no group (None: stay this one), and give up all capabilities."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def _read_as(uid: int) -> None:
    """Become this user, and raise if Python's modules cannot be read then."""
    _become(uid)
    for folder in _libraries():
        os.listdir(folder)


@cache
def _libraries() -> list[str]:
    """Folders of Python's own modules."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
    return [os.path.realpath(folder) for folder in sorted(filter(None, folders)) if os.path.isdir(folder)]


# ---- landlock

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _DEVICE_CALLS = 1, 2, 4, 8, 1 << 14, 1 << 15
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights to files, by version of landlock."""
_SPECIAL_FILES = 1 << 6 | 1 << 9 | 1 << 11
"""Rights to make devices and sockets."""

_READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom"),
)


def _file_rules(version: int, folder: str | None) -> int:
    """Rules for reading, and for writing to `folder`, as an open file descriptor."""
    rights = _RIGHTS[min(version, 5)]
    # TCP (from version 4), and signals and abstract sockets to processes outside (from 6): seccomp forbids more.
    attributes = struct.pack("QQQ", rights, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = _syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path in (*_READABLE, *_libraries()):
        _allow(rules, path, _READ | _LIST)
    _allow(rules, "/dev/null", _READ | _WRITE)
    if folder is not None:
        _allow(rules, folder, rights & ~(_EXECUTE | _DEVICE_CALLS | _SPECIAL_FILES))
    # Moved above the descriptors that a program is given.
    high = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(rules)
    return high


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        of_files = _READ | _WRITE | _TRUNCATE
        rights &= -1 if stat.S_ISDIR(os.fstat(place).st_mode) else of_files
        _syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


# ---- seccomp

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""By machine: the kernel's number for it, and its column in the tables below."""

_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57, close_range
    436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6
    270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2
    290 19, fstat 5 80, fstatfs 138 44, statfs 137 43, stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291, access 21
    -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80
    49, fchdir 81 50, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214, msync 26
    227, futex 202 98, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, membarrier 324 283, sched_yield 24
    124, sched_getaffinity 204 123, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127
    136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, restart_syscall 219 128, alarm
    37 -, setitimer 38 103, getitimer 36 102, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
    clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getpid 39 172, gettid 186 178, getppid 110
    173, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108
    177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getrusage 98 165, getrlimit 97 163, uname 63 160,
    sysinfo 99 179, getrandom 318 278, umask 95 166, arch_prctl 158 -, exit 60 93, exit_group 231 94, fadvise64 221 223,
    flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, sendto 44 206, recvfrom 45 207, shutdown 48 210,
    getsockopt 55 209, setsockopt 54 208, getsockname 51 204, getpeername 52 205
"""
"""System calls that are allowed with any arguments: name, number on x86-64, number on arm64."""

_ALLOWED_WRITING = """
    mkdir 83 -, mkdirat 258 34, unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316
    276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36
"""
"""Allowed in addition if there is a folder to write to. No call is listed that sets the mode, owner or times of a file,
because landlock does not restrict these."""

_ALLOWED_SOMETIMES = """
    openat 257 56, kill 62 129, tgkill 234 131, prlimit64 302 261, ioctl 16 29, fcntl 72 25, socketpair 53 199
"""
"""Allowed under `_conditions`; signals only to the process itself."""

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_step = struct.Struct("=HBBI").pack
_ALL_BITS = 0xFFFFFFFF
_CREATE_UNNAMED = 0o20000000


def _numbers(table: str) -> dict[str, int]:
    column = _ARCHITECTURES[platform.machine()][1]
    rows = (entry.split() for entry in table.replace("\n", " ").split(","))
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


def _conditions(writing: bool) -> dict[str, list[tuple[int, int, Sequence[int]]]]:
    """Conditions by call: number of an argument (32 bits wide), the bits that count, their allowed values."""
    if writing:
        # Opening for reading with O_TRUNC writes, which landlock before version 3 does not notice.
        flags = os.O_ACCMODE | os.O_TRUNC
        opening: list[tuple[int, int, Sequence[int]]] = [(2, flags, (0, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2))]
    else:
        opening = [(2, os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | _CREATE_UNNAMED, (0,))]
    return {
        "openat": opening,
        "prlimit64": [(0, _ALL_BITS, (0,))],
        # Asking whether a file is a terminal, and inheritance; not TIOCSTI, which types into a terminal.
        "ioctl": [(1, _ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
        # Duplicates, flags and locks; not F_SETOWN, which makes another process receive a file's signals.
        "fcntl": [(1, _ALL_BITS, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032))],
        # Only streams, which asyncio needs; datagrams could be sent to any address.
        "socketpair": [(0, _ALL_BITS, (1,)), (1, 0xF, (1,))],
    }


class _Filter:
    """Allows the listed system calls; all others fail with EPERM."""

    def __init__(self, writing: bool) -> None:
        allowed = _numbers(_ALLOWED) | (_numbers(_ALLOWED_WRITING) if writing else {})
        start = [_step(_LOAD, 0, 0, 4), _step(_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()][0])]
        start += [_step(_RETURN, 0, 0, _REFUSE), _step(_LOAD, 0, 0, 0)]
        for number in allowed.values():
            start += [_step(_EQUAL, 0, 1, number), _step(_RETURN, 0, 0, _ALLOW)]
        conditional = _numbers(_ALLOWED_SOMETIMES)
        for name, conditions in _conditions(writing).items():
            start += _block(conditional[name], conditions)
        self._start = b"".join(start)
        self._signals = [conditional["kill"], conditional["tgkill"]]

    def install(self) -> None:
        """Restrict this process."""
        own = [(0, _ALL_BITS, (os.getpid(),))]
        end = [step for number in self._signals for step in _block(number, own)]
        program = self._start + b"".join([*end, _step(_RETURN, 0, 0, _REFUSE)])
        code = ctypes.create_string_buffer(program)
        # struct sock_fprog: the number of steps, and their address.
        _prctl(_PR_SET_SECCOMP, 2, struct.pack("HP", len(program) // 8, ctypes.addressof(code)))


def _block(number: int, conditions: Sequence[tuple[int, int, Sequence[int]]]) -> list[bytes]:
    """Steps of the filter for a call that is allowed under conditions."""
    block = []
    for argument, mask, values in conditions:
        block += [_step(_LOAD, 0, 0, 16 + 8 * argument), _step(_AND, 0, 0, mask)]
        block += [_step(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        block += [_step(_RETURN, 0, 0, _REFUSE)]
    block += [_step(_RETURN, 0, 0, _ALLOW)]
    return [_step(_EQUAL, 0, len(block), number), *block]


# ---- the system

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object, check: bool = True) -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0 and check:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def _syscall(*arguments: object, check: bool = True) -> int:
    return _call("syscall", *arguments, check=check)


def _prctl(option: int, value: int, argument: object = 0) -> None:
    _call("prctl", option, ctypes.c_ulong(value), argument, 0, 0)


def _works(protect: Callable[[], object]) -> bool:
    """Whether `protect` succeeds, tried in a forked process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
            protect()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
