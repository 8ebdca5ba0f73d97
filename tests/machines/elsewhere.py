"""Windows's and macOS's standard library, played on Linux: what is not there is hidden.

python -m tests.machines.elsewhere PLATFORM[+PACKAGE...] PROGRAM.py [WORD...] runs a program so. It
hides the modules, functions and constants that CPython does not have there, files below /proc and
/sys, the C library without a name, and says that the platform is another. On Windows text is in
cp1252 where no encoding is given. It shows what `gpusim` asks for that would not be there; that all
else works on these systems it cannot show. Packages and modules of the standard library are loaded
before, as theirs are made for the platform.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import locale
import mmap
import os
import re
import runpy
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["HIDDEN", "MODULES", "NAMES", "play"]

PACKAGES = ("numpy", "ml_dtypes", "optree", "filelock", "numpy.lib.format")
STANDARD = (
    *("asyncio", "argparse", "atexit", "concurrent.futures", "csv", "ctypes.util", "dataclasses"),
    *("faulthandler", "fnmatch", "html", "json", "logging", "multiprocessing.connection"),
    *("multiprocessing.context", "multiprocessing.queues", "multiprocessing.util", "pathlib"),
    *("pickle", "platform", "selectors", "shutil", "socketserver", "statistics", "subprocess"),
    *("tempfile", "textwrap", "tomllib", "traceback", "unittest", "urllib.parse", "uuid"),
    *(
        "mimetypes",
        "http.server",
        "importlib.metadata",
        "zipfile",
        "sysconfig",
        "inspect",
        "doctest",
        "difflib",
        "pdb",
    ),
)
#: Modules that are loaded with a package: Windows's and macOS's own import others.
WITH = {
    "torch": (
        *("torch.distributed.checkpoint.filesystem", "torch.distributed.elastic.multiprocessing"),
        *("torch.distributed.launcher.api", "torch.distributed.tensor", "torch.multiprocessing"),
        *("torch.distributed.run", "torch.distributed.fsdp", "torch._dynamo", "urllib.request"),
        *("torch.utils.checkpoint", "torch.distributed.nn", "torch.distributed.tensor.parallel"),
    )
}
OF_POSIX = ("fcntl", "grp", "pwd", "pty", "resource", "syslog", "termios", "tty", "curses")
#: Modules that are not there.
MODULES = {"windows": (*OF_POSIX, "posix", "_posixsubprocess", "readline"), "macos": ("spwd",)}
_SCHEDULER = "sched_|getcpu|setns|unshare|eventfd|memfd_create|MFD_|EFD_|pidfd_open|CLONE_"
#: Names that are not there, as regular expressions.
NAMES: dict[str, dict[ModuleType, str]] = {
    "windows": {
        os: f"({_SCHEDULER}|fork|forkpty|register_at_fork|wait$|wait3|wait4|waitid|W[A-Z]+$|P_PID"
        "|getuid|geteuid|getgid|getegid|getgroups|getpgid|getpgrp|getsid|setuid|setgid|setsid"
        "|setpgid|setpriority|getpriority|killpg|uname|mkfifo|mknod|chown|fchown|lchown|chroot"
        "|fchmod|fchdir|openpty|pipe2|pread|pwrite|preadv|pwritev|readv|writev|sendfile"
        "|posix_|statvfs|fstatvfs|sysconf|confstr|getloadavg|O_NOFOLLOW|O_NONBLOCK|O_CLOEXEC"
        "|O_DIRECTORY|O_SYNC|O_PATH|O_TMPFILE|nice|ctermid|copy_file_range|splice|sync$|lockf"
        "|get_blocking|set_blocking|major|minor|fdatasync|fpathconf|pathconf|environb|getenvb)",
        signal: "(SIG(KILL|USR|ALRM|HUP|CHLD|CLD|BUS|QUIT|CONT|STOP|TSTP|TT|PIPE|POLL|PROF|PWR|RT"
        "|STKFLT|SYS|TRAP|URG|VTALRM|WINCH|XCPU|XFSZ|IO)|SIG_BLOCK|SIG_UNBLOCK|SIG_SETMASK|alarm"
        "|setitimer|getitimer|ITIMER|pthread_|sigwait|sigpending|sigtimedwait|siginterrupt|pause"
        "|pidfd)",
        socket: "(AF_UNIX|AF_PACKET|AF_NETLINK|SCM_|CMSG_|MSG_DONTWAIT|MSG_NOSIGNAL|SOCK_CLOEXEC"
        "|SOCK_NONBLOCK|SO_PEERCRED|SO_REUSEPORT|send_fds|recv_fds|sethostname)",
        select: "(poll|epoll|EPOLL|POLL)",
        mmap: "(MAP_|MADV_|PROT_)",
        time: "(clock_|CLOCK_|pthread_|tzset)",
        threading: "pthread_",
        locale: "nl_langinfo",
    },
    "macos": {
        os: f"({_SCHEDULER}|posix_fa|O_PATH|O_TMPFILE|copy_file_range|splice|getres|setres|waitid"
        "|pipe2|P_PIDFD|getrandom|GRND_)",
        signal: "(SIG(CLD|POLL|PWR|RT|STKFLT)|sigwaitinfo|sigtimedwait|pidfd)",
        socket: "(AF_PACKET|AF_NETLINK|SOCK_CLOEXEC|SOCK_NONBLOCK|SO_PEERCRED)",
        select: "(epoll|EPOLL)",
        mmap: "(MADV_REMOVE|MADV_DONTFORK|MADV_HUGEPAGE|MADV_POPULATE|MAP_POPULATE)",
        time: "(pthread_getcpuclockid|CLOCK_BOOTTIME|CLOCK_TAI)",
    },
}
#: Methods of socket.socket that are not there.
METHODS = {"windows": ("sendmsg", "recvmsg", "recvmsg_into", "sendmsg_afalg"), "macos": ()}
PLATFORM = {"windows": "win32", "macos": "darwin"}
#: Folders whose files are not there.
HIDDEN = ("/proc", "/sys", "/dev/shm")


class _Blocked:
    """An import hook: the modules of another system are not found."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = {*names}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def play(system: str) -> None:
    """Hide what `system`, "windows" or "macos", lacks, in this process from now on."""
    for name in (*PACKAGES, *STANDARD):
        importlib.import_module(name)
    sysconfig.get_config_vars()
    for name in MODULES[system]:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Blocked(MODULES[system]))  # type: ignore[arg-type]
    for module in NAMES[system]:
        _keep_for_libraries(module)
    for module, pattern in NAMES[system].items():
        for name in [name for name in vars(module) if re.match(pattern, name)]:
            delattr(module, name)
    for name in METHODS[system]:
        _lacks(socket.socket, name)
    _without_files()
    _without_c_library(system)
    sys.platform = PLATFORM[system]
    if system == "windows":
        _with_windows_texts()


def _keep_for_libraries(module: ModuleType) -> None:
    """Modules that are loaded, which theirs would replace, go on with the whole module."""
    whole = ModuleType(module.__name__, module.__doc__)
    vars(whole).update(vars(module))
    for each in [*sys.modules.values()]:
        if each is not sys.modules[__name__]:
            for name, value in [*vars(each).items()]:
                if value is module:
                    vars(each)[name] = whole


def _lacks(kind: type, name: str) -> None:
    def absent(self: object) -> None:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    setattr(kind, name, property(absent))


def _without_files() -> None:
    """Opening and listing go through an audit hook; links and states do not."""

    def hidden(path: object) -> bool:
        try:
            text = os.fsdecode(path)  # type: ignore[arg-type]
        except TypeError:  # a descriptor
            return False
        return any(text == folder or text.startswith(f"{folder}/") for folder in HIDDEN)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and hidden(arguments[0]):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])

    sys.addaudithook(look)
    for name in ("readlink", "stat", "lstat"):
        setattr(os, name, _seeing(getattr(os, name), hidden))


def _seeing(call: Callable[..., Any], hidden: Callable[[object], bool]) -> Callable[..., Any]:
    def checked(path: Any, *others: Any, **named: Any) -> Any:
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *others, **named)

    return checked


def _without_c_library(system: str) -> None:
    """On Windows a library has a name; on macOS the C library lacks Linux's functions."""
    lacking = ("prctl", "sched_getcpu", "sched_getaffinity", "sched_setaffinity", "memfd_create")

    def loading(library: type) -> type:
        class Library(library):  # type: ignore[misc]
            def __init__(self, name: Any, *others: Any, **named: Any) -> None:
                if name is None and system == "windows":
                    raise TypeError("expected the name of a library, not None")
                name = None if name == "ucrtbase" else name  # Windows's C library
                super().__init__(name, *others, **named)

            def __getattr__(self, name: str) -> Any:
                if name in lacking:
                    raise AttributeError(f"dlsym: symbol not found: {name}")
                return super().__getattr__(name)

        return Library

    ctypes.CDLL, ctypes.PyDLL = loading(ctypes.CDLL), loading(ctypes.PyDLL)  # type: ignore[misc]


def _with_windows_texts() -> None:
    """Files without a named encoding, and what is printed, are in cp1252; lines end as here."""
    plain = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None,
               *others: Any, **named: Any) -> Any:  # fmt: skip
        if "b" not in mode and encoding in (None, "locale"):
            encoding = "cp1252"
        return plain(file, mode, buffering, encoding, *others, **named)

    builtins.open = io.open = opened  # type: ignore[assignment]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # As Python for Windows where output goes to a file: what cp1252 lacks is an error.
            stream.reconfigure(encoding="cp1252", errors="strict" if stream is sys.stdout else None)


def main(words: Sequence[str]) -> None:
    system, program, *rest = words
    system, *packages = system.split("+")
    for package in packages:
        for name in (package, *WITH.get(package, ())):
            importlib.import_module(name)
    play(system)
    sys.argv = [program, *rest]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
