"""The process between a pool and its Lean children: started as a script, `python -I -S _supervisor.py FD PARENT_PID`.

It spawns children with limits and an environment of their own, watches their memory, drains their stderr, and sees to it that nothing of
them is left: after a kill, after a child's own death, and when the parent is gone, however that came about. The parent is watched twice:
its socket ends, and its pidfd becomes readable (a fork of the trainer may hold the socket open). Descendants that call setsid or fork
twice come back here, because this process is their subreaper; a process that has no living Lean child above it is killed at sight.

Messages are JSON objects, one a packet. In: spawn (id, command, environment, directory, memory, address_space, file), kill (id). Out:
spawned (id, pid; with the child's stdin and stdout as file descriptors), gone (id, code, why, peak, stderr). One thread; all sizes in
bytes."""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

TICK_S = 0.02  # memory fills at 2.4 GiB/s: 49 MiB a tick
WALK_TICKS = 5  # how often the process trees are looked through for new processes: a REPL starts none
BUSY_TICK_S = 0.003  # while something is being killed
STDERR_KEPT = 4096
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_LANDLOCK = 444  # landlock_create_ruleset; add_rule and restrict_self follow; one number on all architectures
_libc = ctypes.CDLL(None, use_errno=True)


class Worker:
    """One Lean child and what is known of it."""

    def __init__(self, number: int, pid: int, stderr: int, memory: int):
        self.number, self.pid, self.stderr, self.memory = number, pid, stderr, memory
        self.status: int | None = None
        self.why = ""
        self.peak = 0
        self.tail = b""
        self.wanted = False  # the parent waits for its end
        self.members: dict[int, int] = {}  # its processes, each with an open /proc/<pid>/statm
        self.walk()

    def walk(self) -> None:
        """Looks for processes that are new in the tree or gone from it."""
        pids = tree(self.pid)
        for pid in set(self.members) - set(pids):
            os.close(self.members.pop(pid))
        for pid in set(pids) - set(self.members):
            with suppress(OSError):
                self.members[pid] = os.open(f"/proc/{pid}/statm", os.O_RDONLY)

    def resident(self) -> int:
        """Resident bytes of the tree, pages shared with files or between its processes included."""
        total = 0
        for fd in self.members.values():
            with suppress(OSError, IndexError):  # gone since
                total += int(os.pread(fd, 200, 0).split()[1])
        return total * _PAGE

    def forget(self) -> None:
        """Closes what is open on the tree."""
        while self.members:
            os.close(self.members.popitem()[1])


# Processes, by /proc.

_HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def children(pid: int) -> list[int]:
    """Direct children of a process, over all its threads."""
    found: list[int] = []
    if not _HAS_CHILDREN:
        return _children_by_scan(pid)
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _children_by_scan(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(name))
    return found


def tree(pid: int) -> list[int]:
    """A process and its descendants, the process first."""
    found = [pid]
    for known in found:  # grows while it is walked
        found += [child for child in children(known) if child not in found]
    return found


def private(pid: int) -> int:
    """Resident bytes that no file backs: anonymous and shared memory, not the mapped .olean files."""
    total = 0
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def kill_tree(root: int) -> None:
    """Stops a process and its descendants so that they cannot fork away, then kills them."""
    seen: list[int] = []
    for _ in range(50):
        fresh = [pid for pid in tree(root) if pid not in seen]
        if not fresh:
            break
        for pid in fresh:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        seen += fresh
    for pid in seen:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class Supervisor:
    """The event loop. `workers` holds every child until its end has been told to the parent."""

    def __init__(self, channel: socket.socket, parent: int):
        self.channel = channel
        self.workers: dict[int, Worker] = {}
        self.by_pid: dict[int, Worker] = {}
        self.by_stderr: dict[int, Worker] = {}
        self.strays = False
        self.poller = select.poll()
        self.poller.register(channel, select.POLLIN)
        self.parent_fd = self._watch(parent)

    def _watch(self, parent: int) -> int:
        try:
            fd = os.pidfd_open(parent)
        except OSError:
            return -1  # a kernel before 5.3 or a sandbox without it: the socket's end alone tells
        self.poller.register(fd, select.POLLIN)
        return fd

    def run(self) -> None:
        next_look, ticks = 0.0, 0
        while True:
            busy = self.strays or any((w.wanted or w.why) and w.status is None for w in self.workers.values())
            wait = BUSY_TICK_S if busy else TICK_S if self.workers else None
            for fd, _ in self.poller.poll(None if wait is None else wait * 1000):
                if fd == self.channel.fileno():
                    if not self._message():
                        return
                elif fd == self.parent_fd:
                    return
                else:
                    self._drain(fd)
            self._reap()
            now = time.monotonic()
            if now >= next_look or busy or self.strays:
                next_look, ticks = now + TICK_S, ticks + 1
                self._look(busy or self.strays or ticks % WALK_TICKS == 0)
            self._tell()

    def _message(self) -> bool:
        try:
            packet = self.channel.recv(1 << 20)
        except OSError:
            return False
        if not packet:
            return False
        message = json.loads(packet)
        if message["op"] == "spawn":
            self._spawn(message)
        elif message["op"] == "kill":
            worker = self.workers.get(message["id"])
            if worker:
                worker.wanted = True
                if worker.status is None:
                    worker.why = worker.why or "asked"
                    kill_tree(worker.pid)
        return True

    def _spawn(self, message: dict[str, Any]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = pipes
        supervisor = os.getpid()
        pid = os.fork()
        if not pid:
            _become(message, supervisor, in_read, out_write, err_write)
        for fd in (in_read, out_write, err_write):
            os.close(fd)
        os.set_blocking(err_read, False)
        worker = Worker(message["id"], pid, err_read, message["memory"])
        self.workers[worker.number] = self.by_pid[pid] = self.by_stderr[err_read] = worker
        self.poller.register(err_read, select.POLLIN)
        answer = json.dumps({"op": "spawned", "id": worker.number, "pid": pid}).encode()
        socket.send_fds(self.channel, [answer], [in_write, out_read])
        os.close(in_write)
        os.close(out_read)

    def _drain(self, fd: int) -> None:
        worker = self.by_stderr[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if data:
            worker.tail = (worker.tail + data)[-STDERR_KEPT:]
        else:
            self._close_stderr(worker)

    def _close_stderr(self, worker: Worker) -> None:
        if self.by_stderr.pop(worker.stderr, None):
            self.poller.unregister(worker.stderr)
            os.close(worker.stderr)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            worker = self.by_pid.pop(pid, None)
            if worker:
                worker.status = status
                worker.peak = max(worker.peak, usage.ru_maxrss * 1024)
                self.strays = True  # what it left behind is ours now

    def _look(self, walk: bool) -> None:
        """Memory of each child's tree against its cap; and, when it walks, nobody without a living Lean child above."""
        if walk:
            lost = [pid for pid in children(os.getpid()) if pid not in self.by_pid]
            for pid in lost:
                kill_tree(pid)
            self.strays = bool(lost)
        for worker in self.by_pid.values():
            if worker.why:
                kill_tree(worker.pid)  # a fork that raced the first kill
                continue
            if walk:
                worker.walk()
            total = worker.resident()
            worker.peak = max(worker.peak, total)
            if total > worker.memory and sum(map(private, worker.members)) > worker.memory:
                worker.why = "memory"
                kill_tree(worker.pid)

    def _tell(self) -> None:
        if self.strays:
            return
        for worker in [w for w in self.workers.values() if w.wanted and w.status is not None]:
            if worker.stderr in self.by_stderr:
                self._drain(worker.stderr)
                self._close_stderr(worker)
            worker.forget()
            del self.workers[worker.number]
            told = {
                "op": "gone",
                "id": worker.number,
                "code": os.waitstatus_to_exitcode(worker.status or 0),
                "why": worker.why,
                "peak": worker.peak,
            }
            told["stderr"] = worker.tail.decode("utf-8", "replace")
            with suppress(OSError):
                self.channel.send(json.dumps(told).encode())

    def end(self) -> None:
        """Kills until no descendant is left."""
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            for pid in children(os.getpid()):
                kill_tree(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)


class _Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr of linux/landlock.h."""

    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr of linux/landlock.h."""

    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _confine() -> None:
    """Landlock, where the kernel has it (5.13; more with each version): no file is made, written, cut or removed but /dev/null; no TCP; no
    signal to a process outside, and no ptrace of one. The limits and the watchdog hold without it."""
    version = _libc.syscall(_LANDLOCK, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return
    write, changes = 1 << 1, sum(1 << bit for bit in range(4, 13))
    rules = _Ruleset(write | changes | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0))
    rules.net = 3 if version >= 4 else 0
    rules.scoped = 3 if version >= 6 else 0
    size = 8 if version < 4 else 16 if version < 6 else 24
    fd = _libc.syscall(_LANDLOCK, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    if fd < 0:
        return
    null = os.open("/dev/null", os.O_PATH)
    beneath = _Beneath(write, null)
    _libc.syscall(_LANDLOCK + 1, ctypes.c_int(fd), ctypes.c_int(1), ctypes.byref(beneath), ctypes.c_uint32(0))
    _libc.syscall(_LANDLOCK + 2, ctypes.c_int(fd), ctypes.c_uint32(0))
    os.close(null)
    os.close(fd)


def _become(message: dict[str, Any], supervisor: int, stdin: int, stdout: int, stderr: int) -> None:
    """In the fork: limits, descriptors, environment, and the child's program. Does not return."""
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(127)
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        for limit, size in (
            (resource.RLIMIT_AS, message["address_space"]),
            (resource.RLIMIT_FSIZE, message["file"]),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(limit)[1]
            size = size if hard == resource.RLIM_INFINITY else min(size, hard)
            resource.setrlimit(limit, (size, size))
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the machine runs out, Lean goes first and not the trainer
        _confine()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(message["directory"])
        os.execve(message["command"][0], message["command"], message["environment"])
    except BaseException as trouble:  # whatever it was, the fork must not go on as a second supervisor
        os.write(2, f"cannot start: {trouble}".encode())
    os._exit(127)


def main() -> None:
    """Runs until the parent is gone, then leaves nothing."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    parent = int(sys.argv[2])
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    supervisor = Supervisor(channel, parent)
    try:
        if os.getppid() == parent:
            supervisor.run()
    finally:
        supervisor.end()
        os._exit(0)


if __name__ == "__main__":
    main()
