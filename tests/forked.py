"""Python processes for tests without the seconds that importing torch takes: each is forked from one that has done so.

`run` is `subprocess.run` for `[sys.executable, "-c" or "-m", ...]`. What it starts is a process of its own in
all but three things: modules are already imported, hashes of strings have the server's seed, and `/proc` shows the
server's command line. A test about one of these starts a real process.
"""

import array
import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = ("torch._dynamo", "torch._inductor.config", "torch.distributed.fsdp", "torch.distributed.checkpoint",
             "torch.utils.data", *(f"fault_tolerant_transformer_lab.{name}" for name in (
                 "cli", "crashes", "equivalence", "larger_state", "launch", "lora", "script_proof", "training")))
STARTING_S = 300  # for an answer of the server, which may still be importing beside much other work
AT_START = ("OMP_", "MKL_", "KMP_", "GOMP_", "PYTHON", "LD_", "MALLOC_", "TORCH", "CUBLAS_")  # read once, at the start


class Server:
    """A process that has imported torch, and forks."""

    def __init__(self, env: dict[str, str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], env=env,
                                        pass_fds=[theirs.fileno()])
        theirs.close()

    def run(self, request: dict[str, Any], files: list[Any], timeout: float) -> int:
        """Run one process to its end and give its status, as `subprocess` does."""
        descriptors = array.array("i", [file.fileno() for file in files])
        self.socket.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        self.socket.settimeout(STARTING_S)
        pid = int(self.socket.recv(64))
        self.socket.settimeout(timeout)
        try:
            return int(self.socket.recv(64))
        except TimeoutError:
            os.kill(pid, 9)
            self.socket.settimeout(STARTING_S)
            self.socket.recv(64)
            raise


SERVERS: dict[str, Server] = {}


def _server(env: dict[str, str]) -> Server:
    """The server whose variables of the start are these."""
    key = json.dumps({name: env[name] for name in sorted(env) if name.startswith(AT_START)})
    if key not in SERVERS:
        SERVERS[key] = Server(env)
        atexit.register(SERVERS[key].socket.close)
    return SERVERS[key]


def run(arguments: list[str], *, cwd: Path | str | None = None, env: dict[str, str] | None = None,
        timeout: float = 900) -> "subprocess.CompletedProcess[str]":
    """Run a Python process to its end, with what it says as text."""
    env = {**os.environ} if env is None else env
    request = {"arguments": [str(word) for word in arguments[1:]], "cwd": str(cwd or os.getcwd()), "env": env}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        try:
            status = _server(env).run(request, [nothing, out, err], timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(arguments, timeout) from None
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(arguments, status, *texts)


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request; in the child, return it."""
    while True:
        message, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(64))
        if not message:
            os._exit(0)
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        if pid := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(pid).encode())
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            continue
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        connection.close()
        return json.loads(message)


def _become(request: dict[str, Any]) -> None:
    """Run a program in this process, as `python` would."""
    first, *rest = request["arguments"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        file = open(descriptor, mode, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))


def _end(error: BaseException | None) -> NoReturn:
    """End this process with the status of `python`, but without taking all modules down, whose pages are shared."""
    code = error.code if isinstance(error, SystemExit) else None if error is None else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    elif error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    status = 0 if code is None else code if isinstance(code, int) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    os._exit(status & 0xFF)


if __name__ == "__main__":
    for _name in PRELOADED:
        __import__(_name)
    gc.freeze()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _become(_asked)
    except BaseException as _error:
        _end(_error)
    _end(None)
