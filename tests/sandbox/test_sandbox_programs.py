"""Programs in the sandbox, friendly and hostile, in every form of isolation that this machine allows."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from sandbox_tools import MODES, control_groups, descendants

from akl_dist.sandbox.client import Sandbox
from akl_dist.sandbox.limits import MIB, Limits
from akl_dist.sandbox.probe import prove

LIMITS = Limits(
    wall_s=5.0, cpu_s=5, memory_bytes=256 * MIB, processes=16, file_bytes=4 * MIB, folder_bytes=8 * MIB, output_bytes=256 << 10
)
pytestmark = pytest.mark.skipif(not MODES, reason="this machine allows no isolation")


@pytest.fixture(scope="module", params=MODES or ["none"])
def sandbox(request):
    with Sandbox(modes=(request.param,), packages=("numpy",)) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every program: no process below the supervisor, no new descriptors here (a session has four; other threads of this
    process, such as Ray's of an earlier module, open and close one now and then)."""
    sandbox = request.getfixturevalue("sandbox")
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert descendants(sandbox.pid) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def run(sandbox, source, **options):
    return sandbox.run_script(
        source, limits=replace(LIMITS, **{k: v for k, v in options.items() if k != "stdin"}), stdin=options.get("stdin", b"")
    )


def test_every_restriction_is_proved(sandbox):
    prove(sandbox)


def test_a_program_reads_and_writes(sandbox):
    source = "import sys\nname = input()\nprint('hello', name)\nprint('aside', file=sys.stderr)\nsys.exit(int(input()))"
    finished = run(sandbox, source, stdin="Zoë\n3\n".encode())
    assert (finished.stdout.decode(), finished.stderr.decode()) == ("hello Zoë\n", "aside\n")
    assert (finished.ended.status, finished.ended.limit) == (3, "")


def test_standard_input_in_every_way(sandbox):
    for read in ("sys.stdin.buffer.read()", "open(0, 'rb').read()", "os.read(0, 100)", "open('/dev/stdin', 'rb').read()"):
        finished = run(sandbox, f"import os, sys\nprint({read}.decode()[::-1])", stdin=b"abc")
        if "/dev/stdin" in read and b"FileNotFoundError" in finished.stderr:
            continue  # a user namespace without a /proc of its own
        assert finished.stdout == b"cba\n", (read, finished.stderr)


def test_long_input_and_a_program_that_ignores_it(sandbox):
    data = b"x" * (4 << 20)
    assert run(sandbox, "import sys; print(len(sys.stdin.read()))", stdin=data).stdout == b"4194304\n"
    assert run(sandbox, "print('done')", stdin=data).stdout == b"done\n"


def test_packages_and_temporary_files(sandbox):
    source = (
        "import numpy, tempfile, os\nf = tempfile.NamedTemporaryFile('w+')\nf.write('kept')\nf.seek(0)\n"
        "print(int(numpy.arange(4).sum()), f.read(), os.path.expanduser('~'))"
    )
    finished = run(sandbox, source, memory_bytes=1024 * MIB)
    assert finished.stdout == b"6 kept /box\n", finished.stderr


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("while True: pass", "time_limit"),
        ("import time; time.sleep(10 ** 6)", "time_limit"),
        (
            "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except OSError: pass\nwhile True: pass",
            "time_limit",
        ),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: continue", "time_limit"),
        ("class D:\n    def __del__(self):\n        while True: pass\nd = D()", "time_limit"),
        ("import atexit, time\natexit.register(time.sleep, 1000)", "time_limit"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()", "time_limit"),
        ("import os, time\nos.close(1); os.close(2); os.close(0)\ntime.sleep(1000)", "time_limit"),
        ("while True: print('x' * 4096)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 65536)", "output"),
    ],
)
def test_limits_end_a_program(sandbox, source, limit):
    start = time.monotonic()
    finished = run(sandbox, source, wall_s=0.6)
    assert finished.ended.limit == limit
    assert time.monotonic() - start < 4.0
    assert len(finished.stdout) + len(finished.stderr) <= 2 * LIMITS.output_bytes


def test_processor_time(sandbox):
    finished = run(sandbox, "while True: pass", cpu_s=1, wall_s=20.0)
    assert finished.ended.limit == "time_limit" and finished.ended.seconds < 15


def test_memory_of_one_process(sandbox):
    finished = run(sandbox, "x = bytearray(10 ** 11)")
    assert finished.ended.status == 1 and b"MemoryError" in finished.stderr
    finished = run(sandbox, "x = []\nwhile True: x.append(bytearray(2 ** 20))")
    assert finished.ended.limit == "memory" or b"MemoryError" in finished.stderr


def test_memory_of_all_processes_together(sandbox):
    """Eight processes, each within its own limit, exceed the sandbox's."""
    if "memory" not in sandbox.controllers:
        pytest.skip("no memory control group here")
    source = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(100 * 2 ** 20)\n        time.sleep(60)\n"
        "        os._exit(0)\nfor _ in range(8): print(os.wait()[1], flush=True)"
    )
    finished = run(sandbox, source, memory_bytes=200 * MIB, wall_s=2.0)
    assert finished.ended.limit == "memory"


@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(100,)).start()\n"
        "    except RuntimeError: pass",
        "import subprocess, sys\nwhile True: subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)",
        "import os\nwhile True:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: pass",
    ],
)
def test_bombs_and_zombies(sandbox, source):
    """Fork, thread, process and zombie bombs stay small and leave nothing (the fixture looks)."""
    sizes = []
    finished = None
    import threading

    def watch():
        while finished is None:
            sizes.append(len(descendants(sandbox.pid)))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        finished = run(sandbox, source, wall_s=0.8)
    finally:
        finished = finished or False
        watcher.join()
    assert finished.ended.limit == "time_limit" or finished.ended.status != 0
    assert max(sizes) <= LIMITS.processes + 2
    assert run(sandbox, "print(1)").stdout == b"1\n"


def test_detached_daemon_is_gone(sandbox):
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for fd in range(16):\n"
        "            try: os.close(fd)\n            except OSError: pass\n        time.sleep(600)\n    os._exit(0)\nprint('left')"
    )
    finished = run(sandbox, source)
    assert finished.stdout == b"left\n" and finished.ended.seconds < 4


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.kill(-1, 9)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.killpg(0, signal.SIGKILL)",
        "import os\nfor pid in range(2, 40000):\n    if pid != os.getpid():\n"
        "        try: os.kill(pid, 9)\n        except OSError: pass",
        "import ctypes\nctypes.string_at(0)",
        'import os\nfor fd in range(3, 256):\n'
        '    try: os.write(fd, b\'{"ended": true, "status": 0}\')\n    except OSError: pass\nos._exit(7)',
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return [f()]\nf()",
    ],
)
def test_attacks_on_the_parents(sandbox, source):
    finished = run(sandbox, source, wall_s=1.0)
    assert finished.ended.limit in ("", "memory", "time_limit")
    assert run(sandbox, "print(1)").stdout == b"1\n"


def test_no_secrets_of_the_environment(sandbox, monkeypatch):
    monkeypatch.setenv("AKL_TEST_SECRET", "hunter2")
    source = (
        "import os, glob\ntext = repr(dict(os.environ))\nfor path in glob.glob('/proc/*/environ'):\n"
        "    try: text += open(path).read()\n    except OSError: pass\nprint(text)"
    )
    with Sandbox(modes=(sandbox.isolation,)) as fresh:
        for one in (sandbox, fresh):
            assert b"hunter2" not in run(one, source).stdout


@pytest.mark.parametrize(
    "source",
    [
        "open('../escaped', 'w')",
        "import os\nos.symlink('/', 'up')\nopen('up/escaped', 'w')",
        "import os\nos.symlink('/etc/passwd', 'passwd')\nopen('passwd').read()",
        "import os\nos.link('/akl/akl_dist/sandbox/inside/codec.py', 'codec.py')",
        "import os\nos.mkdir('old')\nos.chroot('old')",
        "import os\nos.remove('/dev/null')",
        "import os\nos.chmod('/usr/lib', 0o777)",
        "import os\nos.mknod('disk', 0o60666, os.makedev(254, 0))",
        "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/usr', b'tmpfs', 0, None) == 0",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import os, signal\nopen('/proc/1/mem', 'rb').read(1)",
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)",
        "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=1)",
        "import socket\nassert not socket.getaddrinfo('example.org', 80)",
        "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "import socket\nsocket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK: to the host of a virtual machine",
        "open('/proc/self/autogroup', 'w').write('19')",
        "open('/proc/self/comm', 'w').write('x')",
        "import os\nos.setuid(0)",
        "import os\nos.nice(5)",
        "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
        "import os\nos.execv('/bin/sh', ['sh'])",
        "open('big', 'wb').write(b'x' * (5 << 20))",
        "for n in range(10 ** 6): open(f'f{n}', 'w')",
        "kept = [open('/dev/null') for _ in range(100)]",
    ],
)
def test_refused(sandbox, source):
    """Each of these ends in an exception inside the program."""
    finished = run(sandbox, source)
    assert finished.ended.status == 1 and b"rror" in finished.stderr, (finished.ended, finished.stderr)


def test_the_next_program_sees_nothing_of_the_last(sandbox):
    """Files, memory segments, paths, site customisation and abstract sockets end with their program."""
    mark = (
        "import os, sys, site, ctypes, socket\nopen('left', 'w').write('x')\nopen('/tmp/left', 'w').write('x')\n"
        "open('sitecustomize.py', 'w').write('print(\"infected\")')\nsys.path.insert(0, '/evil')\n"
        "for folder in (*sys.path, '/dev/shm', '/var/tmp', site.getusersitepackages()):\n"
        "    try:\n        os.makedirs(folder, exist_ok=True)\n"
        "        open(folder + '/usercustomize.py', 'w').write('print(\"infected\")')\n"
        "    except OSError: pass\n"
        "libc = ctypes.CDLL(None)\nid_ = libc.shmget(4711, 4096, 0o1666)\n"
        "s = socket.socket(socket.AF_UNIX)\ns.bind('\\0left')\ns.listen()\n"
        "libc.syscall(248, b'user', b'left', b'x', 1, -4)\nprint(id_ >= 0)"
    )
    look = (
        "import os, sys, ctypes, socket\nlibc = ctypes.CDLL(None)\ns = socket.socket(socket.AF_UNIX)\n"
        "print(os.listdir('.'), os.listdir('/tmp'), '/evil' in sys.path, "
        "libc.shmget(4711, 4096, 0), s.connect_ex('\\0left') == 0,\n"
        "      libc.syscall(249, b'user', b'left', None, 0))"
    )
    assert run(sandbox, mark).stdout.endswith(b"True\n")
    assert run(sandbox, look).stdout == b"['main.py'] ['main.py'] False -1 False -1\n"


def test_control_groups_go_with_their_sandbox(sandbox):
    with Sandbox(modes=(sandbox.isolation,)) as fresh:
        pid = fresh.pid
        assert bool(control_groups(pid)) == bool(fresh.controllers)
    assert control_groups(pid) == []


def test_many_programs_leave_nothing(sandbox):
    """Descriptors of the supervisor and of this process, and processes, are as before (the fixture counts ours)."""
    count = len(os.listdir(f"/proc/{sandbox.pid}/fd"))
    for number in range(40):
        assert run(sandbox, f"print({number})").stdout == f"{number}\n".encode()
    assert len(os.listdir(f"/proc/{sandbox.pid}/fd")) == count
