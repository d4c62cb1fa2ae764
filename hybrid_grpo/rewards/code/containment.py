"""Makes a process irrevocably give up its rights before it runs an untrusted program.

The Linux kernel offers these protections to unprivileged processes (docs/rewards/code.md says what they promise):

    seccomp      forbids system calls that start a process, open a connection, send a signal or trace
    landlock     limits the folders that can be read, and lets nothing be written to (man 7 landlock)
    rlimits      limit CPU time, address space, open files and the size of the output (man 2 setrlimit)
    user         if the caller is root: changes to another user, or gives up root's capabilities (man 7 capabilities)

`Containment` finds out which of them work on this machine, applies these, and raises an error if one has stopped
working. This module uses only the standard library, because it runs in a process without site-packages.
"""

import ctypes
import errno
import fcntl
import math
import os
import platform
import resource
import signal
import stat
import struct
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

PROTECTIONS = {
    "reads": "of the files of this machine, only the libraries of Python and the system can be read",
    "writes": "no file can be written",
    "network": "no socket can be opened",
    "processes": "no process or thread can be started, and no other process can be signaled or inspected",
    "privileges": "the program has none of root's privileges",
}
"""The protections that can be required, and what each of them promises."""

_OUTPUT_BYTES = 16 << 20
"""Size that standard output, or standard error, may reach; writing more fails."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    timeout_s: float = 10.0
    """Seconds after which the program is killed. The limit of CPU time is one second higher."""
    memory_mb: int = 512
    """MiB of address space, including Python itself."""
    output_kb: int = 1024
    """KiB of standard output, and of standard error, that are returned; the rest is dropped."""


class Containment:
    """The protections that this kernel offers to this user, applied to processes that are forked from this process.
    Tests leave some out: `without` `seccomp`, `landlock` or `user`."""

    def __init__(self, without: Iterable[str] = ()) -> None:
        version = -1 if "landlock" in without else _syscall(_LANDLOCK_CREATE, None, 0, 1, check=False)
        landlock = version > 0 and _works(lambda: _syscall(_LANDLOCK_RESTRICT, _file_rules(version), 0))
        self._landlock = f"landlock {version}" if landlock else ""
        self._rules = _file_rules(version) if landlock else None
        has_filters = "seccomp" not in without and platform.machine() in _ARCHITECTURES
        self._filter = _filter(opens_to_write=landlock) if has_filters else b""
        self.seccomp = has_filters and _works(lambda: _install(self._filter))
        if not self.seccomp:
            # Processes that a program leaves behind become children of this process, which can then kill them.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._user = None
        """Id of the user that programs run as; None if they run as the caller, without privileges."""
        if os.getuid() == 0 and "user" not in without:
            # Unique, so that two programs cannot reach each other. The second is for containers with only 65536 ids.
            users = (0x7A000000 + os.getpid() % 0x1000000, 64000 + os.getpid() % 1000)
            self._user = next((uid for uid in users if _works(partial(_read_as, uid))), None)

    @property
    def protections(self) -> dict[str, str]:
        """The PROTECTIONS in force, each with the means that enforces it."""
        seccomp = "seccomp" if self.seccomp else ""
        found = {
            "reads": self._landlock,
            # Landlock does not cover the mode, owner and times of files; seccomp does.
            "writes": seccomp,
            "network": seccomp,
            "processes": seccomp,
            "privileges": f"user {self._user}" if self._user else "no capabilities",
        }
        return {name: how for name, how in found.items() if how}

    def enter(self, limits: Limits) -> None:
        """Contain this process irrevocably. Raises OSError if the kernel refuses a protection that worked before."""
        _limit(limits)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self._rules is not None:
            _syscall(_LANDLOCK_RESTRICT, self._rules, 0)
        _become(self._user)
        # After `_become`, which resets it.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.seccomp:
            _install(self._filter)


def _limit(limits: Limits) -> None:
    memory = limits.memory_mb << 20
    for name, value in (
        ("AS", memory), ("STACK", min(memory // 2, 64 << 20)), ("CPU", math.ceil(limits.timeout_s) + 1),
        ("FSIZE", max(limits.output_kb << 10, _OUTPUT_BYTES)), ("NOFILE", 64), ("CORE", 0), ("MEMLOCK", 0),
    ):  # fmt: skip
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _become(uid: int | None) -> None:
    """Give up all capabilities. Unless `uid` is None, first switch to that user and leave all supplementary groups."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def _read_as(uid: int) -> None:
    """Switch to this user; raises OSError if that user cannot read Python's modules."""
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
_WRITE, _READ, _LIST = 2, 4, 8
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Bit mask of all rights to files, by Landlock version."""

_READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom"),
)


def _file_rules(version: int) -> int:
    """Return a file descriptor of Landlock rules that allow reading libraries, and writing to /dev/null alone."""
    rights = _RIGHTS[min(version, 5)]
    # TCP (from version 4), and signals and abstract sockets to processes outside (from 6): seccomp forbids more.
    attributes = struct.pack("QQQ", rights, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = _syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path in (*_READABLE, *_libraries()):
        _allow(rules, path, _READ | _LIST)
    _allow(rules, "/dev/null", _READ | _WRITE)
    # Above the descriptors that a program is given.
    high = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(rules)
    return high


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights &= -1 if stat.S_ISDIR(os.fstat(place).st_mode) else _READ | _WRITE
        _syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


# ---- seccomp

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""For each kind of machine, the kernel's number for its architecture, and its column in system_calls.ini."""
_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_step = struct.Struct("=HBBI").pack
_ALL_BITS = 0xFFFFFFFF
_CREATE_UNNAMED = 0o20000000


@cache
def _system_calls() -> dict[str, dict[str, int]]:
    """Return the numbers of the system calls on this machine, by section of system_calls.ini and then by name."""
    file = ConfigParser()
    file.read_string(Path(__file__).with_name("system_calls.ini").read_text())
    column = _ARCHITECTURES[platform.machine()][1]
    numbers = {
        section: {name: row.split()[column] for name, row in file[section].items()} for section in file.sections()
    }
    return {
        section: {n: int(number) for n, number in calls.items() if number != "-"} for section, calls in numbers.items()
    }


def _conditions(opens_to_write: bool) -> dict[str, list[tuple[int, int, Sequence[int]]]]:
    """Return the conditions of each conditional system call: (index of a 32-bit argument, mask, allowed values)."""
    if opens_to_write:  # landlock decides what
        # Opening for reading with O_TRUNC writes, which landlock before version 3 does not notice.
        flags = os.O_ACCMODE | os.O_TRUNC
        opening: list[tuple[int, int, Sequence[int]]] = [(2, flags, (0, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2))]
    else:
        opening = [(2, os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | _CREATE_UNNAMED, (0,))]
    return {
        "openat": opening,
        "prlimit64": [(0, _ALL_BITS, (0,))],
        # Whether a file is a terminal, and inheritance; not TIOCSTI, which types into a terminal.
        "ioctl": [(1, _ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
        # Duplicates, flags and locks; not F_SETOWN, which makes another process receive a file's signals.
        "fcntl": [(1, _ALL_BITS, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032))],
        # Only streams, which asyncio needs; datagrams could be sent to any address.
        "socketpair": [(0, _ALL_BITS, (1,)), (1, 0xF, (1,))],
    }


def _filter(*, opens_to_write: bool) -> bytes:
    """Return the part of the seccomp filter that allows the system calls of system_calls.ini, except signals."""
    calls = _system_calls()
    steps = [_step(_LOAD, 0, 0, 4), _step(_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()][0])]
    steps += [_step(_RETURN, 0, 0, _REFUSE), _step(_LOAD, 0, 0, 0)]
    for number in calls["always"].values():
        steps += [_step(_EQUAL, 0, 1, number), _step(_RETURN, 0, 0, _ALLOW)]
    for name, conditions in _conditions(opens_to_write).items():
        steps += _block(calls["conditional"][name], conditions)
    return b"".join(steps)


def _install(steps: bytes) -> None:
    """Make system calls fail with EPERM, except those that `steps` allow and signals to this process itself."""
    own = [(0, _ALL_BITS, (os.getpid(),))]
    signals = [step for name in ("kill", "tgkill") for step in _block(_system_calls()["conditional"][name], own)]
    program = steps + b"".join([*signals, _step(_RETURN, 0, 0, _REFUSE)])
    code = ctypes.create_string_buffer(program)
    # struct sock_fprog: number of steps, address.
    _prctl(_PR_SET_SECCOMP, 2, struct.pack("HP", len(program) // 8, ctypes.addressof(code)))


def _block(number: int, conditions: Sequence[tuple[int, int, Sequence[int]]]) -> list[bytes]:
    """Return the part of the filter that allows one system call if its arguments meet all conditions."""
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
    """Whether `protect` succeeds in a forked process."""
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
