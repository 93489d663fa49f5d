"""Fork server for the processes of tests: starting one costs a quarter of the CPU time or less, which is imports.

Within `ForkServer.used()` `subprocess.Popen` forks `python -m ROLE`, two commands, programs of vLLM's environment and
`vllm serve` from processes that imported them. The fork is a child of the caller, as a started process would be: same
pid, pipes, environment, session and command line. What it starts in turn is forked, too: a worker's engine, an engine's
ranks, a router's process of files and batches. Forks that run vLLM alone come from a process without Tandem's engine.
Other commands are started as ever. A worker on vLLM runs in vLLM's environment then, as where both share one.

TANDEM_PLAIN_START=1 turns this off. Tests of the start itself do not use it: tests/helm, `tandem up`, roles by hand,
and those with the fixture `plain_start`.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

WITH_ENGINES = {
    name: f"{name}.program" for name in ("decode_worker", "prefill_worker", "encode_worker", "preprocessor")
}
COMMANDS = WITH_ENGINES | {
    "batches": "batches.program",
    "router": "router.program",
    "tandem.cli": "tandem.cli.main",
    "tandem.doctor.peer": "tandem.doctor.peer",
}
"""Modules that are run by `python -m`, and the module with the `main` of each."""
WORKERS = ("decode_worker", "prefill_worker")
LAUNCH = "cluster.launch"
"""Module that runs another one by its name."""
LAUNCHED = re.compile(r"engine\.process\..*|(preprocessor|encode_worker)\.child")
"""Programs that it runs and that are forked: engines, their ranks and media processors."""
VLLM_PYTHONS = re.compile(r".*/(\.venv-vllm[^/]*/bin|tests/support/[^/]+)/python[\w-]*")
STOCK_PROGRAM = re.compile(r"support\..*")
"""Programs of tests that run vLLM itself, in its environment."""
VLLM_COMMAND = re.compile(r"(.*/\.venv-vllm[^/]*/bin)/vllm")
REGISTRY = "vllm.model_executor.models.registry"
"""Program by which vLLM reads a model's class, in a process that may die of it."""
SIM, VLLM = 'engine="sim"', 'engine="vllm"'
"""Settings of workers that need no torch, and of those that start vLLM."""
VLLM_PYTHON = "vllm_python="
ENGINE = "engine.process.engine_process"
OF_KINDS = {
    "roles": (ENGINE,),
    "torch": (ENGINE, "engine.backends.torch.runner"),
    "vllm": (
        "engine.process.vllm.process",
        "engine.process.vllm.node",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.multiproc_executor",
    ),
    "stock": (
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.multiproc_executor",
    ),
}
"""Modules besides the roles that a server of each kind imports."""
SPACE = 1 << 15
"""Bytes of the fork server's command line, which the forks overwrite with their own."""
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x8000
MAX_REQUEST, MAX_FDS = 1 << 20, 64
SPAWNED = "spawn_main"
"""Program of a process that `multiprocessing` spawns."""
HEDGE_S = 60.0
"""Seconds of silence after which borrowers compute blocks themselves: a lender that steps slowly on a busy
machine is not silent. Hedging has its own tests, by virtual time."""
GIVEN = "TANDEM_FORK_SERVER_GIVEN"
"""Variable with the environment that an interpreter was started with; a script in its place may change it."""
PACKAGES = sysconfig.get_path("purelib")

Fork = Callable[[dict[str, Any], list[int]], int]
"""Fork a process for a request, with these standard streams or descriptors; returns its pid."""


# ------------------------------------------------------------------------------------------------ caller's side


class ForkServer:
    """Processes that have imported what they fork, for each interpreter and kind; each starts with its first use."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str], tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._lock = threading.Lock()
        supported = os.uname().machine in SYS_CLONE and sys.version_info < (3, 14)
        on_gpu = "TANDEM_VLLM_ON_GPU" in os.environ  # a fork must not share what CUDA set up
        self._on = supported and not on_gpu and not os.environ.get("TANDEM_PLAIN_START")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Fork the processes that are started within the block."""
        if not self._on:
            yield
            return
        with _executed_by(_forking(_EXECUTE_CHILD, _program_of, self._fork)):
            yield

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Start processes within the block as users do, although `used` surrounds it."""
        with _executed_by(_EXECUTE_CHILD):
            yield

    def close(self) -> None:
        for link, process in self._servers.values():
            link.close()
            process.wait()

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        server = _server_for(request["arguments"])
        with self._lock:
            if server not in self._servers:
                self._servers[server] = self._start(*server)
            return _ask(self._servers[server][0], request, fds)

    def _start(self, python: str, kind: str) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
        if kind in ("vllm", "stock"):
            from engine.backends.vllm.kind import libraries_of

            environment |= libraries_of(Path(python), environment)
        given = json.dumps(environment)
        command = [python, __file__, str(other.fileno()), python, kind, PACKAGES, "x" * SPACE]
        environment[GIVEN] = given
        process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=environment)
        other.close()
        return own, process


_EXECUTE_CHILD: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # noqa: SLF001 - Popen has no other hook


@contextmanager
def _executed_by(execute_child: Any) -> Iterator[None]:
    popen: Any = subprocess.Popen
    before, popen._execute_child = popen._execute_child, execute_child  # noqa: SLF001 - Popen has no other hook
    try:
        yield
    finally:
        popen._execute_child = before  # noqa: SLF001 - Popen has no other hook


def _program_of(args: Sequence[str]) -> str | None:
    """Return the module whose `main` the command runs, or the script that it is, if it is forked."""
    if len(args) < 3:
        return None
    if _is_stock(args):
        return args[0] if VLLM_COMMAND.fullmatch(args[0]) else args[2]
    if args[1] != "-m":
        return None
    if args[0] == sys.executable:
        return COMMANDS.get(args[2]) or _launched(args)
    return _launched(args) if VLLM_PYTHONS.fullmatch(args[0]) else None


def _is_stock(args: Sequence[str]) -> bool:
    """Return whether a command runs vLLM without Tandem's engine."""
    if VLLM_COMMAND.fullmatch(args[0]):
        return args[1] == "serve"
    return bool(VLLM_PYTHONS.fullmatch(args[0]) and args[1] == "-m" and STOCK_PROGRAM.fullmatch(args[2]))


def _launched(args: Sequence[str]) -> str | None:
    is_launched = len(args) >= 4 and args[1:3] == ["-m", LAUNCH] and LAUNCHED.fullmatch(args[3])
    return args[3] if is_launched else None


def _has_batches(args: Sequence[str]) -> bool:
    """Return whether a router starts a process of files and batches."""
    return args[2] == "router" and any(arg.startswith("batches_folder=") for arg in args)


def _server_for(args: Sequence[str]) -> tuple[str, str]:
    """Return the interpreter and the kind of the server that forks a command."""
    if _is_stock(args):
        command = VLLM_COMMAND.fullmatch(args[0])
        return f"{command[1]}/python" if command else args[0], "stock"
    if args[2] == LAUNCH:
        return args[0], "torch" if args[0] == sys.executable else "vllm"
    if args[2] not in WITH_ENGINES:
        return sys.executable, "roles"
    if VLLM in args:
        pythons = [arg.removeprefix(VLLM_PYTHON) for arg in args if arg.startswith(VLLM_PYTHON)]
        return (json.loads(pythons[0]), "vllm") if pythons else (sys.executable, "roles")
    return sys.executable, "roles" if SIM in args or args[2] not in WORKERS else "torch"


def _ask(link: socket.socket, request: dict[str, Any], fds: list[int]) -> int:
    socket.send_fds(link, [json.dumps(request).encode()], fds)
    return int(link.recv(64))


def _forking(otherwise: Any, program_of: Callable[[Sequence[str]], str | None], fork: Fork) -> Any:
    """Return a `Popen._execute_child` that forks the commands for which `program_of` names a module."""

    def execute_child(self: Any, args: Any, *rest: Any) -> None:
        (_, _, _, pass_fds, cwd, env, _, _, shell, *pipes, _, _, _, _, _, session, _) = rest
        arguments = [] if shell or isinstance(args, str | bytes) else [os.fsdecode(arg) for arg in args]
        program = program_of(arguments)
        if program is None:
            otherwise(self, args, *rest)
            return
        stdin, _, _, stdout, _, stderr = pipes
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        passed = sorted(pass_fds)
        self.pid = fork(_request(program, arguments, passed, env, cwd, bool(session)), [*streams, *passed])
        self._child_created = True
        self._close_pipe_fds(*pipes)

    return execute_child


def _request(
    program: str,
    arguments: list[str],
    passed: Sequence[int],
    environment: Any = None,
    directory: Any = None,
    session: bool = False,
) -> dict[str, Any]:
    environment = os.environ if environment is None else environment
    return {
        "program": program,
        "arguments": arguments,
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
        "directory": os.fsdecode(directory or os.getcwd()),
        "session": session,
        "passed": list(passed),
    }


# -------------------------------------------------------------------------------------------------- server's side


class Server:
    """Server in a process that has imported what it forks."""

    def __init__(self, python: str, kind: str, packages: str) -> None:
        """Import the modules of a kind; `packages` is the folder of the tests' own packages."""
        given = json.loads(os.environ.pop(GIVEN))
        self._python, self._kind = python, kind
        self._changed = {name: value for name, value in os.environ.items() if given.get(name) != value}
        self._removed = given.keys() - os.environ.keys()
        if kind == "vllm":
            self._import_vllm(packages)
        else:
            roles = () if kind == "stock" else COMMANDS.values()
            for module in (*roles, *OF_KINDS[kind]):
                import_module(module)
        if kind != "stock":
            borrowers: Any = import_module("loans.borrower_manager")
            borrowers.HEDGE_AFTER_S = borrowers.HEDGE_UNMEASURED_S = HEDGE_S
        gc.collect()
        gc.freeze()

    def _import_vllm(self, packages: str) -> None:
        """Import vLLM, then the roles, which may need packages of the tests' environment."""
        from engine.backends.vllm.arguments import set_environment

        set_environment()
        for module in OF_KINDS["vllm"]:
            import_module(module)
        sys.path.append(packages)
        for module in WITH_ENGINES.values():
            import_module(module)
        sys.path.remove(packages)

    def serve(self, link: socket.socket) -> None:
        """Fork one process for each request until the caller is gone."""
        while True:
            message, fds, _, _ = socket.recv_fds(link, MAX_REQUEST, MAX_FDS)
            if not message:
                return
            request = json.loads(message)
            pid = _fork_sibling()
            if pid == 0:
                link.close()
                self._run(request, fds)
            for fd in fds:
                os.close(fd)
            link.send(str(pid).encode())

    def _run(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        """Be the process that was asked for."""
        program, arguments = request["program"], request["arguments"]
        if request["session"]:
            os.setsid()  # first: who kills the process's group means those that it starts, too
        is_launched = arguments[2] == LAUNCH
        is_stock = self._kind == "stock"
        on_vllm = self._kind in ("vllm", "stock")
        forks = is_launched or on_vllm or arguments[2] in WORKERS or _has_batches(arguments)
        if program != SPAWNED and forks:
            self._fork_for_this_process(fds)
        _become(request, fds)
        if is_launched or is_stock:
            os.environ.update(self._changed)
            for name in self._removed:
                os.environ.pop(name, None)
        elif program != SPAWNED:
            sys.executable = arguments[0]
        code = 1
        try:
            if program == SPAWNED:
                sys.argv = ["-c", "--multiprocessing-fork"]
                exec(arguments[-2], {})
            if is_stock or program == REGISTRY:
                _run_as_main(program, request)
                sys.exit(0)
            from cluster.launch import launch

            sys.argv = [program, *arguments[4 if is_launched else 3 :]]
            code = launch(program)
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()  # noqa: SLF001 - os._exit runs none, and nothing public does
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _fork_for_this_process(self, fds: list[int]) -> None:
        """Have the engine process, or the ranks, that this process starts forked by a child that stays as it is now."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        cores = os.sched_getaffinity(0)
        if os.fork() == 0:
            os.sched_setaffinity(0, cores)  # Intel's OpenMP binds a fork to one core
            own.close()
            for fd in fds:
                os.close(fd)
            self.serve(other)
            os._exit(0)
        other.close()
        lock = threading.Lock()

        def fork(request: dict[str, Any], fds: list[int]) -> int:
            with lock:
                return _ask(own, request, fds)

        def program_of(args: Sequence[str]) -> str | None:
            if not args or args[0] not in (sys.executable, self._python):
                return None
            if args[1:3] == ["-m", REGISTRY]:
                return REGISTRY
            return COMMANDS["batches"] if args[1:3] == ["-m", "batches"] else _launched(args)

        popen: Any = subprocess.Popen
        popen._execute_child = _forking(popen._execute_child, program_of, fork)  # noqa: SLF001 - Popen has no other hook
        spawn_otherwise: Any = util.spawnv_passfds

        def spawn(path: Any, args: Sequence[Any], passed: Sequence[int]) -> int:
            arguments = [os.fsdecode(arg) for arg in args]
            if "spawn_main(" not in arguments[-2]:
                return int(spawn_otherwise(path, args, passed))
            return fork(_request(SPAWNED, arguments, passed), [0, 1, 2, *passed])

        util.spawnv_passfds = spawn  # type: ignore[assignment]


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
    """Take over the request's streams, descriptors, environment, directory and command line."""
    places = [0, 1, 2, *request["passed"]]
    above = max(places) + len(fds)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for place, copy in zip(places, copies, strict=True):
        os.dup2(copy, place)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    _set_command_line(request["arguments"])


def _run_as_main(program: str, request: dict[str, Any]) -> None:
    """Run a script, or a module with `-m`, as its interpreter would."""
    arguments, path = request["arguments"], request["environment"].get("PYTHONPATH", "")
    sys.path[1:1] = [entry for entry in path.split(":") if entry and entry not in sys.path]
    if program == arguments[0]:
        sys.argv = list(arguments)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.argv = [program, *arguments[3:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _set_command_line(arguments: Sequence[str]) -> None:
    """Overwrite this process's arguments in memory, which /proc/PID/cmdline shows."""
    with open("/proc/self/stat") as file:
        start, end = (int(field) for field in file.read().rpartition(")")[2].split()[45:47])
    line = b"\0".join(os.fsencode(argument) for argument in arguments) + b"\0"
    ctypes.memmove(start, line[: end - start].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Server(*sys.argv[2:5]).serve(control)
    os._exit(0)  # modules of vLLM's environment print reports where an interpreter ends in order
