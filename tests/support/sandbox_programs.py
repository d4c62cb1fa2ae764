"""Runs hostile programs in the sandbox: `python sandbox_programs.py FOLDER [WITHOUT ...]`, as any user.

Prints one JSON object a line. A program prints `escaped` if an attempt succeeds that must be refused. An attempt that
would harm this machine if the sandbox failed is replaced by, or made after, a harmless one that the same rule refuses.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from paths import ROOT, SUPPORT

sys.path.insert(0, str(ROOT))

from hybrid_grpo.rewards.code.sandbox import Limits, Sandbox

TIMEOUT_S = 0.5
"""For programs that may end by it; the others have time on a machine that is busy too."""
MAY_TIME_OUT = (
    *("fork bomb", "memory", "loop", "sleep", "deaf", "daemon", "stop", "recursion", "recursion in C", "big number"),
    *("regex", "files closed"),
)

TRY = """
import ctypes, glob, os, signal, socket, sys, time
def attempt(what, function):
    try:
        got = function()
    except (OSError, RuntimeError, MemoryError, ValueError, ImportError) as error:
        print("refused", what, type(error).__name__, flush=True)
    else:
        print("escaped", what, repr(got)[:200], flush=True)
"""

PROGRAMS: dict[str, str] = {
    "fork bomb": "while True:\n    attempt('fork', os.fork)\n    if time.monotonic() % 1 < 0: break",
    "threads": "import threading\nattempt('thread', threading.Thread(target=time.sleep, args=(9,)).start)",
    "subprocess": "import subprocess\nattempt('shell', lambda: subprocess.run(['/bin/sh', '-c', 'id']))",
    "exec": "attempt('exec', lambda: os.execv('/bin/sh', ['sh', '-c', 'echo escaped']))",
    "memory": "blocks = []\nattempt('memory', lambda: [blocks.append(bytearray(1 << 26)) for _ in range(64)])",
    "memory in C": "attempt('memory', lambda: len('a' * (1 << 33)))",
    "shared memory": "attempt('memfd', lambda: os.memfd_create('x'))\n"
    "attempt('shm', lambda: open('/dev/shm/' + HOST['mark'], 'w'))",
    "output": "block = 'x' * (1 << 20)\nattempt('output', lambda: [sys.stdout.write(block) for _ in range(1024)])",
    "own files": "import tempfile\nattempt('file', lambda: open('mine', 'w'))\n"
    "attempt('folder', lambda: os.mkdir('mine'))\n"
    "attempt('link', lambda: os.symlink(HOST['secret'], 'mine'))\n"
    "attempt('hard', lambda: os.link(HOST['secret'], 'mine'))\n"
    "attempt('temporary', tempfile.TemporaryFile)\nattempt('unnamed', lambda: os.open('.', os.O_TMPFILE | os.O_RDWR))",
    "read home": "attempt('home', lambda: open(HOST['secret']).read())\n"
    "attempt('list', lambda: os.listdir(os.path.dirname(HOST['secret'])))\n"
    "for path in ('/etc/passwd', '/etc/shadow', '/proc/1/environ', '/proc/self/environ', '/proc/mounts', '/sys'):\n"
    "    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())",
    "environment": "print('escaped' if HOST['secret_text'] in repr(dict(os.environ)) else 'nothing there')",
    "parent": "for path in ('environ', 'mem', 'maps', 'fd', 'cwd/setup.py', 'root/etc/passwd'):\n"
    "    for pid in (os.getppid(), HOST['pid']):\n"
    "        place = f'/proc/{pid}/{path}'\n"
    "        attempt(path, lambda: os.listdir(place) if path == 'fd' else open(place, 'rb').read(9))",
    "write outside": "for place in HOST['folders']:\n"
    "    attempt(place, lambda: open(f'{place}/{HOST[\"mark\"]}', 'w'))\n"
    "    attempt(place, lambda: os.mkdir(f'{place}/{HOST[\"mark\"]}'))\n"
    "attempt('append', lambda: open(HOST['secret'], 'a'))\n"
    "attempt('truncate', lambda: os.truncate(HOST['secret'], 0))\n"
    "attempt('empty', lambda: os.open(HOST['secret'], os.O_RDONLY | os.O_TRUNC))\n"
    "attempt('mode', lambda: os.chmod(HOST['secret'], 0o777))\n"
    "attempt('times', lambda: os.utime(HOST['secret'], (0, 0)))\n"
    "attempt('owner', lambda: os.chown(HOST['secret'], os.getuid(), os.getgid()))\n"
    "attempt('delete', lambda: os.unlink(HOST['secret']))\nattempt('move', lambda: os.rename(HOST['secret'], 'mine'))",
    "tcp": "attempt('tcp', lambda: socket.create_connection(('127.0.0.1', HOST['tcp']), 1).send(b'hello'))",
    "udp": "place = ('127.0.0.1', HOST['udp'])\n"
    "attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', place))",
    "unix socket": "attempt('unix', lambda: socket.socket(socket.AF_UNIX).connect(HOST['unix']))\n"
    "attempt('datagrams', lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))\n"
    "a, b = socket.socketpair()\nattempt('send to', lambda: a.sendto(b'hello', HOST['unix']))\n"
    "attempt('message to', lambda: a.sendmsg([b'hello'], [], 0, HOST['unix']))",
    "kill": "for pid in (-1, 1, 0, os.getppid(), HOST['pid'], HOST['bystander'], -HOST['group']):\n"
    "    try:\n        os.kill(pid, 0)\n        print('escaped: can signal', pid)\n"
    "    except OSError:\n        attempt('kill', lambda: os.kill(pid, 9))",
    "limits of others": "import resource\n"
    "attempt('prlimit', lambda: resource.prlimit(HOST['bystander'], resource.RLIMIT_CPU, (9, 9)))\n"
    "attempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, HOST['bystander'], 19))\n"
    "attempt('more', lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))",
    "trace": "libc = ctypes.CDLL(None, use_errno=True)\n"
    "for number in (16, 0x4206):\n"
    "    print('escaped' if libc.ptrace(number, HOST['bystander'], 0, 0) == 0 else 'refused')",
    "system calls": "libc = ctypes.CDLL(None, use_errno=True)\n"
    "for name, number in dict(socket=41, fork=57, clone=56, mount=165, unshare=272, setuid=105, keyctl=250,\n"
    "                         bpf=321, io_uring=425, userfaultfd=323, perf=298, add_key=248, prctl=157,\n"
    "                         clone3=435, process_vm=310, open_by_handle=304, x32_socket=0x40000029).items():\n"
    "    got = libc.syscall(number, *(0 for _ in range(6))) if number != 57 else libc.fork()\n"
    "    print('escaped' if got >= 0 else 'refused', name, ctypes.get_errno())",
    "loop": "while True: pass",
    "sleep": "time.sleep(1e6)",
    "deaf": "for number in range(1, 65):\n    if number not in (9, 19, 32, 33): signal.signal(number, signal.SIG_IGN)\n"
    "while True: time.sleep(1)",
    "daemon": "attempt('fork', os.fork)\nattempt('session', os.setsid)\nattempt('fork', os.fork)\n"
    "attempt('daemon', lambda: os.posix_spawn('/bin/sleep', ['sleep', '99999'], {}))\ntime.sleep(1e6)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)\nprint('escaped')",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)",
    "recursion in C": "sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "big number": "sys.set_int_max_str_digits(0)\nx = 7 ** (10 ** 9)",
    "regex": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "crash": "ctypes.string_at(0)",
    "import": "attempt('own module', lambda: __import__('hybrid_grpo.config'))\n"
    "import decimal, json, sqlite3, unittest.mock, zlib\nprint('fine')",
    "files closed": "os.closerange(0, 4096)\nwhile True: pass",
    "exit": "os._exit(0)",
}


def host(folder: Path) -> tuple[dict, list[socket.socket], subprocess.Popen]:
    """The files, ports and processes that the programs attack."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (home / "secret.txt").write_text("the secret")
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "socket"))
    unix.listen()
    for listener in (tcp, udp, unix):
        listener.setblocking(False)
    bystander = subprocess.Popen(["sleep", "600"])
    facts = {
        "secret": str(home / "secret.txt"), "secret_text": "the secret",
        "folders": [str(home), "/tmp", "/dev/shm", "/var/tmp", "/", str(SUPPORT), sys.prefix + "/lib"],
        "mark": f"escaped-{os.getpid()}", "tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1],
        "unix": str(folder / "socket"), "pid": os.getpid(), "group": os.getpgrp(), "bystander": bystander.pid,
    }  # fmt: skip
    return facts, [tcp, udp, unix], bystander


def heard(listeners: list[socket.socket]) -> bool:
    """Whether anything has arrived at a listener."""
    for listener in listeners:
        with contextlib.suppress(BlockingIOError):
            listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()
            return True
    return False


def left_over(sandbox: Sandbox) -> list[int]:
    """Processes forked from the template, which has a command line like no other: see `main`."""
    template = sandbox._process.pid
    command = Path(f"/proc/{template}/cmdline").read_bytes()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(place.name) != template and (place / "cmdline").read_bytes() == command:
                found.append(int(place.name))
    return found


def main(folder: Path, without: list[str]) -> None:
    os.environ["SECRET"] = "the secret"
    facts, listeners, bystander = host(folder)
    os.environ["HOME"] = str(folder / "home")
    with Sandbox([*without, facts["mark"]]) as sandbox:
        print(json.dumps({"protections": sandbox.protections, "uid": os.getuid()}), flush=True)
        for name in os.environ["ONLY"].split(",") if "ONLY" in os.environ else PROGRAMS:
            start = time.monotonic()
            limits = Limits(timeout_s=TIMEOUT_S if name in MAY_TIME_OUT else 20.0)
            run = sandbox.run(f"HOST = {facts!r}\n{TRY}\n{PROGRAMS[name]}\n", "", limits)
            wall_s = time.monotonic() - start
            secret = Path(facts["secret"])
            marks = [f"{place}/{facts['mark']}" for place in facts["folders"]]
            result = {
                "program": name, "end": run.end, "status": run.status, "wall_s": round(wall_s, 4),
                "stdout": run.stdout[:600] + "..." * (len(run.stdout) > 600), "stderr": run.stderr[-300:],
                "escaped": "escaped" in run.stdout.replace(facts["mark"], ""), "left": left_over(sandbox),
                "heard": heard(listeners), "bystander": bystander.poll() is None,
                "written": [mark for mark in marks if os.path.lexists(mark)],
                "intact": secret.read_text() == "the secret" and secret.stat().st_mode & 0o777 == 0o644,
                "next": sandbox.run("print('fine')").stdout,
            }  # fmt: skip
            print(json.dumps(result), flush=True)
    bystander.kill()


if __name__ == "__main__":
    os.umask(0o022)
    main(Path(sys.argv[1]), sys.argv[2:])
