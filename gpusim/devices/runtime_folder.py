"""The folder of the lock files, and opening files in it without being led astray.

It is the same for all processes of a user, or one that GPUSIM_RUNTIME_DIR names.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from gpusim.devices.errors import DeviceError

__all__ = ["open_file", "open_folder", "runtime_folder"]

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block us
WAY_OUT = "name another folder with GPUSIM_RUNTIME_DIR"


def runtime_folder() -> Path:
    """Where the lock files are: $GPUSIM_RUNTIME_DIR, else a folder of this user's in /tmp.

    Not XDG_RUNTIME_DIR nor TMPDIR: they differ between a login, a cron job and a container's
    shell of the same user, who would then not see one another's IPUs in use.
    """
    named = os.environ.get("GPUSIM_RUNTIME_DIR")
    if named:
        return Path(named).absolute()
    shared = Path("/tmp")
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"gpusim-{os.getuid()}"


def open_folder(*, make: bool) -> int | None:
    """A descriptor of the runtime folder; None where it is missing and `make` is False.

    DeviceError if it is a link, or if the default folder is not this user's alone. Who names a
    folder says by its permissions who shares it.
    """
    path = runtime_folder()
    try:
        if make:
            path.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(path, FOLDER)
    except FileNotFoundError:
        if not make:
            return None
        raise DeviceError(f"{path.parent} does not exist: {WAY_OUT}") from None
    except OSError as error:  # FileExistsError: a file is there, or a link that leads nowhere
        raise DeviceError(f"{path} is no usable folder ({error.strerror}): {WAY_OUT}") from error
    if not os.environ.get("GPUSIM_RUNTIME_DIR"):
        state = os.fstat(folder)
        if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
            os.close(folder)
            raise DeviceError(f"{path} is not this user's alone: remove it, or {WAY_OUT}")
    return folder


def open_file(folder: int, name: str, *, make: bool) -> int | None:
    """A descriptor of the regular file `name` in `folder`; None if missing and `make` is False.

    A new file may be opened by whoever may write in its folder. An existing one is opened without
    O_CREAT, which Linux refuses for files of others in a sticky folder (fs.protected_regular).
    DeviceError for a link, or anything else that is no plain file.
    """
    while True:
        try:
            file = os.open(name, FILE, dir_fd=folder)
            break
        except FileNotFoundError:
            if not make:
                return None
        except OSError as error:
            raise unusable(name, error.strerror or str(error)) from error
        try:
            file = os.open(name, FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        except FileExistsError:
            continue  # another process was faster: open its file
        except OSError as error:
            raise unusable(name, error.strerror or str(error)) from error
        os.fchmod(file, os.fstat(folder).st_mode & 0o666)  # what the umask took away
        break
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(file)
        raise unusable(name, "not a plain file")
    return file


def unusable(name: str, reason: str) -> DeviceError:
    return DeviceError(f"{runtime_folder() / name} cannot be used ({reason}): {WAY_OUT}")
