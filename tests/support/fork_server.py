"""Fork server for role processes: a cluster's start costs a quarter of the CPU time, which is imports.

Within `ForkServer.used()` `subprocess.Popen` forks `python -m ROLE` and two commands from one that imported them.
The fork is a child of the caller, as a started process would be: same pid, pipes, environment, session and command
line. A worker's engine process is forked too, and is a child of its worker. Other commands are started as ever.

TANDEM_PLAIN_START=1 turns this off. Tests of the start itself do not use it: tests/helm, `tandem up`, roles by hand.
"""

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

ROLES = {name: f"{name}.program" for name in ("router", "decode_worker", "prefill_worker", "preprocessor")}
COMMANDS = ROLES | {"tandem.cli": "tandem.cli.main", "tandem.doctor.peer": "tandem.doctor.peer"}
"""Modules that are run by `python -m`, and the module with the `main` of each."""
WORKERS = (ROLES["prefill_worker"], ROLES["decode_worker"])
SIM = 'engine="sim"'
"""Setting of a worker that needs no torch."""
TORCH = "engine.backends.torch.runner"
ENGINE = "engine.process.engine_process"
SPACE = 1 << 15
"""Bytes of the fork server's command line, which the forks overwrite with their own."""
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x8000
MAX_REQUEST = 1 << 20

Fork = Callable[[dict[str, Any], list[int]], int]
"""Fork a process for a request, with these standard streams or descriptors; returns its pid."""


# ------------------------------------------------------------------------------------------------ caller's side


class ForkServer:
    """Processes that have imported the roles, one with torch and one without; each starts with its first use."""

    def __init__(self) -> None:
        self._servers: dict[bool, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._lock = threading.Lock()
        supported = os.uname().machine in SYS_CLONE and sys.version_info < (3, 14)
        self._on = supported and not os.environ.get("TANDEM_PLAIN_START")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Fork the role processes that are started within the block."""
        if not self._on:
            yield
            return
        before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        subprocess.Popen._execute_child = _forking(before, _program_of, self._fork)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            subprocess.Popen._execute_child = before  # type: ignore[attr-defined]

    def close(self) -> None:
        for link, process in self._servers.values():
            link.close()
            process.wait()

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        with_torch = request["program"] in WORKERS and SIM not in request["arguments"]
        with self._lock:
            if with_torch not in self._servers:
                self._servers[with_torch] = self._start(with_torch)
            return _ask(self._servers[with_torch][0], request, fds)

    def _start(self, with_torch: bool) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(other.fileno()), TORCH if with_torch else "", "x" * SPACE]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=environment)
        other.close()
        return own, process


def _program_of(args: Sequence[str]) -> str | None:
    is_known = len(args) >= 3 and args[:2] == [sys.executable, "-m"] and args[2] in COMMANDS
    return COMMANDS[args[2]] if is_known else None


def _ask(link: socket.socket, request: dict[str, Any], fds: list[int]) -> int:
    socket.send_fds(link, [json.dumps(request).encode()], fds)
    return int(link.recv(64))


def _forking(otherwise: Any, program_of: Callable[[Sequence[str]], str | None], fork: Fork) -> Any:
    """Return a `Popen._execute_child` that forks the commands for which `program_of` names a module."""

    def execute_child(self: Any, args: Any, *rest: Any) -> None:
        (_, _, _, pass_fds, cwd, env, _, _, shell, *pipes, _, _, _, _, _, session, _) = rest
        program = None if shell or isinstance(args, str | bytes) else program_of([os.fsdecode(arg) for arg in args])
        if program is None:
            otherwise(self, args, *rest)
            return
        stdin, _, _, stdout, _, stderr = pipes
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        request = {
            "program": program,
            "arguments": [os.fsdecode(arg) for arg in args],
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
            "directory": os.fsdecode(cwd or os.getcwd()),
            "session": bool(session),
            "passed": len(pass_fds),
        }
        self.pid = fork(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)

    return execute_child


# -------------------------------------------------------------------------------------------------- server's side


def serve(link: socket.socket, more: str) -> None:
    """Import the roles and `more`, then fork one process for each request until the caller is gone."""
    for program in (*COMMANDS.values(), ENGINE, more):
        if program:
            import_module(program)
    gc.collect()
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(link, MAX_REQUEST, 16)
        if not message:
            return
        request = json.loads(message)
        pid = _fork_sibling()
        if pid == 0:
            link.close()
            _become(request, fds)
            if request["program"] in WORKERS:
                _prestart_engine()
            _run(request["program"], request["arguments"][3:])
        for fd in fds:
            os.close(fd)
        link.send(str(pid).encode())


def _fork_sibling() -> int:
    """Fork a process whose parent is this process's parent; return its pid, or 0 in the fork."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    syscall = ctypes.PyDLL(None).syscall
    pid = int(syscall(SYS_CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("clone failed")
    return pid


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Take over the request's streams, environment, directory, session and command line."""
    if request["session"]:
        os.setsid()
    for place, fd in enumerate(fds[:3]):
        os.dup2(fd, place)
    for fd in fds[:3]:
        if fd > 2:
            os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    _set_command_line(request["arguments"])


def _set_command_line(arguments: Sequence[str]) -> None:
    """Overwrite this process's arguments in memory, which /proc/PID/cmdline shows."""
    with open("/proc/self/stat") as file:
        start, end = (int(field) for field in file.read().rpartition(")")[2].split()[45:47])
    line = b"\0".join(os.fsencode(argument) for argument in arguments) + b"\0"
    ctypes.memmove(start, line[: end - start].ljust(end - start, b"\0"), end - start)


def _run(program: str, arguments: Sequence[str]) -> None:
    """Run the program as `cluster.launch` does, and end the process without freeing every imported module."""
    from cluster.launch import launch

    sys.argv = [program, *arguments]
    code = 1
    try:
        code = launch(program)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prestart_engine() -> None:
    """Fork a child that becomes this worker's engine process when the worker starts one."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        own.close()
        message, fds, _, _ = socket.recv_fds(other, MAX_REQUEST, 16)
        if not message:
            os._exit(0)
        other.send(str(os.getpid()).encode())
        other.close()
        request = json.loads(message)
        _become(request, fds)
        _run(ENGINE, [str(fds[-1])])
    other.close()
    unused = [child]

    def program_of(args: Sequence[str]) -> str | None:
        is_engine = list(args[:4]) == [sys.executable, "-m", "cluster.launch", ENGINE]
        return ENGINE if is_engine and unused else None

    def fork(request: dict[str, Any], fds: list[int]) -> int:
        unused.clear()
        try:
            return _ask(own, request, fds)
        finally:
            own.close()

    subprocess.Popen._execute_child = _forking(  # type: ignore[attr-defined]
        subprocess.Popen._execute_child,  # type: ignore[attr-defined]
        program_of,
        fork,
    )


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, sys.argv[2])
