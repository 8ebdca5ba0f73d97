"""PopTorch's names for gpusim's modules: by import, under `gpusim run`, in pytest, under poprun.

Everything runs in processes of its own: what is imported here would stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gpusim
from gpusim import aliases
from tests.oracles.budget import budget
from tests.oracles.environment import environment_outside_launchers
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable,)
RUN = (sys.executable, "-m", "gpusim", "run")


def process(
    *command: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    environ = environment_outside_launchers()
    environ |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=PATIENCE
    )


def output(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    done = process(*command, cwd=cwd, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


# Forks for each list of arguments and does what the command `gpusim` does: importing it once saves
# most of the time. Standard output and error go to files named by the list's number.
EACH = """
import json, os, signal, sys
from gpusim.tools import cli

folder, lists = sys.argv[1], json.loads(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)
statuses = []
for i, arguments in enumerate(lists):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(f"{folder}/{i}.{number}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["gpusim", "run", *arguments]
        sys.exit(cli.main())
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""


def run_each(folder: Path, lists: list[list[str]]) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of `gpusim run` in that folder with each of the lists."""
    results = folder / "results"
    results.mkdir()
    (results / "each.py").write_text(EACH)
    script = (str(results / "each.py"), str(results), json.dumps(lists))
    codes = json.loads(output(sys.executable, *script, cwd=folder))
    texts = [[(results / f"{i}.{n}").read_text() for n in (1, 2)] for i in range(len(codes))]
    return [(code, out, errors) for code, (out, errors) in zip(codes, texts, strict=True)]


SAME = """
import importlib, sys, types
import popdist, poptorch
import popdist.poptorch
import poptorch.options, poptorch.enums as enums
from poptorch.options import _DistributedOptions, TensorLocationSettings
from popdist import getNumTotalReplicas
import gpusim.popdist.poptorch, gpusim.poptorch.options.training

assert poptorch is gpusim.poptorch is sys.modules["poptorch"]
assert popdist is gpusim.popdist and popdist.poptorch is gpusim.popdist.poptorch
assert poptorch.options is gpusim.poptorch.options and enums is gpusim.poptorch.enums
assert importlib.import_module("poptorch.options.training") is gpusim.poptorch.options.training
assert issubclass(popdist.poptorch.Options, poptorch.Options)
assert poptorch.__name__ == poptorch.__spec__.name == "gpusim.poptorch"
assert poptorch.__spec__.loader is poptorch.__loader__
assert importlib.reload(enums) is gpusim.poptorch.enums
copies = [name for name in sys.modules if name.partition(".")[0] in ("poptorch", "popdist")]
assert all(sys.modules[name] is sys.modules["gpusim." + name] for name in copies)
"""


# ---------------------------------------------------------------- by import


def test_names_mean_the_same_module_objects() -> None:
    output(sys.executable, "-W", "error", "-c", "import gpusim.aliases\n" + SAME)


# Imports every module below the packages under its alias, in several orders, each in a new process,
# and says what it has changed of the packages' public names.
ORDERS = """
import importlib, os, pkgutil, random, sys
import gpusim.aliases

def below(name):
    module = importlib.import_module("gpusim." + name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if found.name != "__main__":
            yield f"{name}.{found.name}"
            yield from below(f"{name}.{found.name}")

for name in gpusim.aliases.aliased():
    list(below(name))
roots = tuple(f"gpusim.{name}" for name in gpusim.aliases.aliased())
paths = [name[7:] for name in sys.modules if name.startswith(roots) and name not in roots]
packages = [sys.modules[name] for name in sys.modules if name.startswith(roots)]
public = [
    (package, name, getattr(package, name))
    for package in packages for name in getattr(package, "__all__", ())
]
assert len(paths) > 250 and len(public) > 1000, (len(paths), len(public))
for order in range(int(sys.argv[1])):
    random.Random(order).shuffle(paths)
    if not os.fork():
        for path in paths:
            assert importlib.import_module(path) is sys.modules["gpusim." + path], path
        for package, name, value in public:
            if getattr(package, name) is not value:
                print(order, package.__name__, name, getattr(package, name), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_importing_modules_by_their_aliases_hides_no_public_name() -> None:
    assert output(sys.executable, "-c", ORDERS, str(budget(50))) == ""


def test_without_the_aliases_there_are_no_such_names() -> None:
    done = process(sys.executable, "-c", "import gpusim, gpusim.poptorch, poptorch")
    assert "ModuleNotFoundError: No module named 'poptorch'" in done.stderr


def test_the_second_import_does_nothing() -> None:
    program = """
import sys, gpusim.aliases
before = list(sys.meta_path), list(sys.path)
gpusim.aliases.install()
assert before == (sys.meta_path, sys.path)
"""
    output(sys.executable, "-c", program)


def test_what_gpusim_has_not_is_not_found() -> None:
    program = """
import gpusim.aliases as a, importlib, importlib.util
for name in ("poptorch.nothing", "popdist.nothing.at_all", "gpusim_nothing"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert str(error) == f"No module named {name.removesuffix('.at_all')!r}", error
    else:
        raise AssertionError(name)
for name in set(a.NAMES) - set(a.aliased()):
    assert importlib.util.find_spec(name) is None, name
"""
    output(sys.executable, "-c", program)


@pytest.mark.rule
def test_each_alias_has_a_file_for_processes_started_anew() -> None:
    files = {path.stem for path in Path(aliases.STAND_INS).glob("*.py")} - {"__init__"}
    assert files == set(aliases.aliased())


def test_an_installed_package_is_hidden_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "poptorch").mkdir()
    (tmp_path / "poptorch" / "__init__.py").write_text("real = True")
    program = "import gpusim.aliases, poptorch; print(hasattr(poptorch, 'real'))"
    done = process(sys.executable, "-c", program, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert f"AliasWarning: poptorch means gpusim.poptorch; the one installed at {tmp_path}" in (
        done.stderr
    )
    assert done.stderr.count("AliasWarning") == 1


def test_an_imported_package_stays_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "poptorch.py").write_text("real = True")
    program = "import poptorch, gpusim.aliases, poptorch as p; print(p.real, p is poptorch)"
    done = process(sys.executable, "-c", program, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert (done.returncode, done.stdout) == (0, "True True\n")
    assert "AliasWarning: poptorch was imported before gpusim.aliases, from " in done.stderr


def test_nothing_heavy_is_loaded() -> None:
    program = """
import sys, gpusim.aliases, poptorch, popdist.poptorch
poptorch.Options()
assert not {"torch", "mpi4py", "cupy", "jax"} & set(sys.modules)
"""
    output(sys.executable, "-c", program)


def test_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import poptorch\ndef test_it(): poptorch.Options()\n")
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error")
    assert "1 passed" in output(*pytest_, "-p", "gpusim.aliases", "test_it.py", cwd=tmp_path)


# ---------------------------------------------------------------- gpusim run


def test_run_gives_a_program_the_names(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SAME + "print('ran')")
    assert output(*RUN, str(tmp_path / "program.py")) == "ran\n"


ABOUT = """
import sys
if __name__ == "__main__":
    print(sys.argv, sys.path[0], __name__, __file__, __package__, __builtins__)
    print(__spec__ and (__spec__.name, __spec__.origin), __cached__, type(__loader__).__name__)
    print(sys.modules["__main__"].__dict__ is globals())
    print(sorted(globals().keys() - {"__annotations__"}))  # Python 3.14 makes those when asked
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The same program as a file, a module, a package, a folder and an archive."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for place in ("about.py", "package/__main__.py", "package/inner.py"):
        (tmp_path / place).write_text(ABOUT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(ABOUT)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", ABOUT)
    (tmp_path / "folder" / "link.py").symlink_to(tmp_path / "about.py")
    return tmp_path


SEEN = [
    ["about.py"],
    ["about.py", "-m", "--help", "--", "run"],
    ["folder/../about.py", "x"],
    ["folder/link.py"],
    ["folder", "x"],
    ["archive.zip", "x"],
    ["-m", "about", "-x", "--version"],
    ["-mabout", "-x"],
    ["-m", "package", "x"],
    ["-m", "package.inner"],
]


def test_a_program_sees_what_python_shows_it(programs: Path) -> None:
    for arguments, done in zip(SEEN, run_each(programs, SEEN), strict=True):
        expected = process(*PYTHON, *arguments, cwd=programs)
        assert done == (0, expected.stdout, expected.stderr), arguments


ENDS = {
    "nothing": "print('x')",
    "code": "raise SystemExit(7)",
    "text": "import sys; sys.exit('no such thing')",
    "error": "def f(): return 1 / 0\n\nf()",
    "chained": "try:\n    [][1]\nexcept IndexError as e:\n    raise ValueError('x') from e",
    "syntax": "x = = 1",
    "missing": "import no_such_module",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)",
    "known": "raise ValueError('which gpusim demo would print')",
    "hook": "import sys\nsys.excepthook = lambda *e: print('hook', e[0].__name__)\n1 / 0",
    "exits": "import atexit\natexit.register(print, 'bye')\nraise OSError('x')",
    "thread": "import threading\nthreading.Timer(0.05, lambda: print('late')).start()",
    "null": "x = '\\0'; exec('\\0')",
}


def test_a_program_ends_as_under_python(tmp_path: Path) -> None:
    for end, program in ENDS.items():
        (tmp_path / f"{end}_.py").write_text(program)
    for end, done in zip(ENDS, run_each(tmp_path, [[f"{end}_.py"] for end in ENDS]), strict=True):
        expected = process(*PYTHON, f"{end}_.py", cwd=tmp_path)
        assert done == (expected.returncode, expected.stdout, expected.stderr), end


CANNOT: list[tuple[list[str], int, str]] = [
    (["nothing.py"], 2, "gpusim run: can't open file "),
    (["-m", "nothing"], 1, "gpusim run: No module named nothing\n"),
    (["-m", "json"], 1, "gpusim run: No module named json.__main__"),
    (["-m", "json.nothing.more"], 1, "gpusim run: No module named json.nothing"),
    (["-m", ".relative"], 1, "gpusim run: Relative module names not supported\n"),
    (["-m", "sys"], 1, "gpusim run: No code object available for sys\n"),
    ([], 2, "usage: gpusim run [OPTIONS] (-m MODULE | SCRIPT) ..."),
    (["-m"], 2, "usage: gpusim run"),
    (["-x", "program.py"], 2, "usage: gpusim "),
    (["empty"], 1, "gpusim run: can't find '__main__' module in 'empty'"),
]


def test_what_cannot_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run_each(tmp_path, [arguments for arguments, *_ in CANNOT])
    for (arguments, expected, message), (code, out, errors) in zip(CANNOT, done, strict=True):
        assert (code, out) == (expected, ""), arguments
        assert errors.startswith(message), arguments


def test_a_module_that_lacks_another_shows_which(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import no_such_module")
    (tmp_path / "broken" / "__main__.py").write_text("")
    done = process(*RUN, "-m", "broken", cwd=tmp_path)
    assert done.returncode == 1 and "program.py" not in done.stderr
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")


# Starts processes in all ways. Each finds the names, and a module on the user's own PYTHONPATH.
PROCESSES = """
import multiprocessing, subprocess, sys
import poptorch, popdist.poptorch

CHILD = '''
import sys, poptorch, popdist.poptorch, popxl.ops, popart, own
print(poptorch.__name__, popxl.__name__, popart.__name__, own.value)
if sys.argv[1:]:
    import subprocess
    command = [sys.executable, "-c", sys.argv[1]]
    print(subprocess.run(command, capture_output=True, text=True).stdout)
'''

def mode(number):
    import own, popxl
    return poptorch.OutputMode(number), "popdist.poptorch" in sys.modules, popxl.Ir, own.value

if __name__ == "__main__":
    for method in sys.argv[1:]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(mode, [1]))
    print(subprocess.run([sys.executable, "-c", CHILD, CHILD], check=True, capture_output=True,
                         text=True, cwd="/").stdout)
"""
POOL = " [(<OutputMode.EveryN: 1>, True, <class 'gpusim.popxl.ir.Ir'>, 'mine')]"
CHILD = "gpusim.poptorch gpusim.popxl gpusim.popart mine"


@pytest.fixture
def starting(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a program that starts processes, and a PYTHONPATH of the user's own."""
    (tmp_path / "program.py").write_text(PROCESSES)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text("value = 'mine'")
    return tmp_path, f"{ROOT}{os.pathsep}{tmp_path / 'mine'}"


def test_processes_that_a_program_starts_have_the_names(starting: tuple[Path, str]) -> None:
    folder, path = starting
    methods = ["fork", "forkserver", "spawn"]
    lines = output(*RUN, "program.py", *methods, cwd=folder, PYTHONPATH=path).split("\n")
    assert [line.partition(" ")[0] for line in lines[:3]] == methods
    assert all(line.endswith(POOL) for line in lines[:3])
    assert [line for line in lines[3:] if line] == [CHILD, CHILD]  # a child, and a child of it


def test_children_have_the_gpusim_of_the_program_wherever_it_is_installed(tmp_path: Path) -> None:
    """A program in the repository has gpusim on its path, and its children do not."""
    show = "import poptorch, popxl, sys; print(popxl.__file__, len(sys.path))"
    program = f"""
import gpusim.aliases, popxl, os, subprocess, sys
print(popxl.__file__, flush=True)
os.chdir("/")
subprocess.run([sys.executable, "-c", {show!r}], check=True)
subprocess.run([sys.executable, "-c", "import sys; print(len(sys.path))"], check=True)
"""
    lines = output(sys.executable, "-c", program, cwd=ROOT, PYTHONPATH="").split("\n")
    own, (child, _, entries), entries_without = lines[0], lines[1].partition(" "), lines[2]
    assert own == child == str(ROOT / "gpusim" / "popxl" / "__init__.py")
    assert entries == entries_without  # the path is as it was


def test_the_users_own_path_stays_behind_the_stand_ins(tmp_path: Path) -> None:
    """Children have the names that the program has, as an installed package's name is hidden."""
    (tmp_path / "poptorch.py").write_text("real = True")
    program = """
import gpusim.aliases, os, subprocess, sys
first = os.environ["PYTHONPATH"].split(os.pathsep)
print(first[0] == gpusim.aliases.STAND_INS, first[1:] == sys.argv[1].split(os.pathsep))
subprocess.run([sys.executable, "-c", "import poptorch; print(poptorch.__name__)"], check=True)
"""
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = process(sys.executable, "-c", program, path, cwd=tmp_path.parent, PYTHONPATH=path)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True", "gpusim.poptorch"])


def test_a_safe_path_has_no_folder_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("there = True")
    (tmp_path / "program.py").write_text("import beside")
    safe = (sys.executable, "-P", "-m", "gpusim", "run")
    for command, code in ((RUN, 0), (safe, 1)):
        assert process(*command, str(tmp_path / "program.py")).returncode == code


DISTRIBUTED = """
import popdist
import popdist.poptorch
options = popdist.poptorch.Options()
print(options.Distributed.processId, options.Distributed.numProcesses, options.replication_factor)
"""


POPRUN = (sys.executable, "-m", "gpusim.tools.launch", "--num-instances", "2")


@pytest.mark.parametrize("command", [RUN, PYTHON], ids=["gpusim run", "python"])
def test_two_instances_under_poprun(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(DISTRIBUTED)
    shown = process(*POPRUN, "--num-replicas", "8", *command, "program.py", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert {line[-5:] for line in shown.stdout.splitlines()} == {"0 2 4", "1 2 4"}


def test_instances_start_processes_and_keep_the_path_they_are_given(
    starting: tuple[Path, str],
) -> None:
    folder, path = starting
    words = ("--mpi-local-args", f"-x PYTHONPATH={path}", *PYTHON, "program.py", "spawn")
    shown = process(*POPRUN, *words, cwd=folder)
    assert shown.returncode == 0, shown.stderr
    lines = [line.partition("<stdout>: ")[2] or line for line in shown.stdout.splitlines()]
    assert sum(line.endswith(POOL) for line in lines) == 2
    assert sum(line.endswith(CHILD) for line in lines) == 4


def test_gpusim_itself_is_the_one_of_this_repository() -> None:
    assert Path(gpusim.__file__).parent.parent == ROOT
