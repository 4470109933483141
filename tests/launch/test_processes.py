"""Real process trees: a dead supervisor or role takes everything below it along."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

GRANDCHILD = """
    import os, subprocess, sys, time
    # a child in a session of its own, as browsers are started
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def python(source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(source), *arguments], stdout=subprocess.PIPE, text=True)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def wait_until_gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_orphans_of_a_dead_child_are_ended():
    source = """
        import signal, subprocess, sys
        from dartrl.launch.processes import adopt_orphans, child_pids, end_orphans, kill_group
        adopt_orphans()
        known = child_pids()
        role = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True, start_new_session=True)
        grandchild = int(role.stdout.readline())
        kill_group(role.pid)
        role.wait()
        print(grandchild, end_orphans(known | {role.pid}), flush=True)
    """
    with ended(python(source, textwrap.dedent(GRANDCHILD))) as supervisor:
        assert supervisor.stdout is not None
        grandchild, ended_orphans = map(int, supervisor.stdout.readline().split())
        assert ended_orphans == 1
        assert wait_until_gone(grandchild)


def test_a_role_dies_with_its_supervisor():
    role = """
        import sys, time
        from dartrl.launch.processes import die_with_parent
        die_with_parent(int(sys.argv[1]))
        print("up", flush=True)
        time.sleep(60)
    """
    source = """
        import os, subprocess, sys, time
        role = subprocess.Popen(
            [sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        role.stdout.readline()
        print(role.pid, flush=True)
        time.sleep(60)
    """
    with ended(python(source, textwrap.dedent(role))) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.send_signal(signal.SIGKILL)
        assert wait_until_gone(pid)


def test_a_role_whose_supervisor_is_gone_does_not_start():
    source = "from dartrl.launch.processes import die_with_parent\ndie_with_parent(1 << 22)\nprint('started')"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")


def test_a_process_shows_its_title():
    source = "from dartrl.launch.processes import set_title\nset_title('dartrl runner-0')\nprint(open('/proc/self/comm').read())"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert result.stdout.strip() == "dartrl runner-0"
