"""The pytest plugin: tests marked with `ranks`, their fixtures, and what is refused."""

from __future__ import annotations

import re

import pytest

from tests.tools.inner_runs import Run

pytest_plugins = "pytester"
pytestmark = pytest.mark.usefixtures("begun", "alone")


def test_runs_on_all_ranks(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(4)
    def test_torch(rank, world_size, tmp_path):
        assert (dist.get_rank(), dist.get_world_size(), world_size) == (rank, 4, 4)
        (tmp_path / str(rank)).touch()
        dist.barrier()
        assert len(list(tmp_path.iterdir())) == 4
        assert int(os.environ["RANK"]) == rank

    @pytest.mark.ranks(count=3, init=False)
    def test_no_init(rank):
        assert not dist.is_initialized()
        dist.init_process_group("nccl")

    @pytest.mark.ranks(3, init="nccl")
    def test_backend():
        assert dist.get_backend() == "nccl"

    @pytest.mark.ranks(3, axis="i")
    def test_lax(rank, world_size):
        assert lax.axis_index("i") == rank and world_size == 3
        assert lax.psum(np.float32(rank), "i") == 3

    @pytest.mark.ranks(2)
    class TestClass:
        def test_inside(self, rank):
            assert rank == dist.get_rank() and dist.get_world_size() == 2

        @pytest.mark.ranks(5)
        def test_closest(self):
            assert dist.get_world_size() == 5
        """
    )
    assert result.outcomes == dict.fromkeys(
        (
            "test_torch",
            "test_no_init",
            "test_backend",
            "test_lax",
            "TestClass::test_inside",
            "TestClass::test_closest",
        ),
        "PASSED",
    )


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize("axis", [None, "i"])
def test_sums_are_added_as_the_mark_says(run: Run, schedule: str, axis: str | None) -> None:
    call = (
        "(dist.all_reduce(x := torch.tensor([X[rank]], dtype=torch.float16)), x.item())[1]"
        if axis is None
        else 'lax.psum(np.float16(X[rank]), "i").item()'
    )
    result = run(
        f"""
    X = [2048, 1, 1, 1]
    MARK = dict(axis={axis!r}, schedule={schedule!r})

    @pytest.mark.ranks(4, **MARK)
    def test_linear(rank):
        assert {call} == 2048

    @pytest.mark.ranks(4, order="reverse", **MARK)
    def test_order(rank):
        assert {call} == 2052  # 2051 is halfway

    @pytest.mark.ranks(4, reduction=gpusim.Reduction(accumulate="float32"), **MARK)
    def test_reduction(rank):
        assert {call} == 2052
        """
    )
    assert result.outcomes == dict.fromkeys(
        ("test_linear", "test_order", "test_reduction"), "PASSED"
    )


def test_reduction_can_be_a_function(run: Run) -> None:
    result = run(
        """
    def choose(call):
        return "reverse" if call.operation == "all_reduce" else "linear"

    @pytest.mark.ranks(4, reduction=choose)
    def test_order(rank):
        x = torch.tensor([[2048, 1, 1, 1][rank]], dtype=torch.float16)
        dist.all_reduce(x)
        assert x == 2052
        """
    )
    assert result.outcomes == {"test_order": "PASSED"}


def test_counts_make_tests_with_readable_names(run: Run) -> None:
    body = """
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.ranks([1, 2, 4])
    def test_size(dtype, rank):
        assert dist.get_world_size() != 2

    @pytest.fixture
    def doubled(world_size):
        return 2 * world_size

    @pytest.mark.ranks([2, 3], axis="i")
    def test_lax(world_size, doubled):
        assert lax.axis_size("i") == world_size == doubled / 2
    """
    result = run(body)
    names = {
        f"test_size[ranks{n}-{dtype}]": n for n in (1, 2, 4) for dtype in ("float32", "bfloat16")
    }
    expected = {name: "FAILED" if n == 2 else "PASSED" for name, n in names.items()}
    expected |= {"test_lax[ranks2]": "PASSED", "test_lax[ranks3]": "PASSED"}
    assert result.outcomes == expected
    assert set(run(body, "-k", "ranks4").outcomes) == {name for name, n in names.items() if n == 4}
    again = run(body, "--lf").outcomes
    assert set(again) == {name for name, n in names.items() if n == 2}
    assert len(run(body, "-x").outcomes) < len(expected)


# ---------------------------------------------------------------- fixtures


def test_fixtures(run: Run) -> None:
    result = run(
        """
    evaluated = []

    @pytest.fixture
    def model():
        evaluated.append("model")
        yield torch.nn.Linear(2, 1)
        evaluated.append("end")

    @pytest.fixture
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    @pytest.fixture
    def found():
        return []

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("given", [{"x": [np.zeros(2), torch.zeros(2)]}])
    def test_copies(rank, model, optimizer, given, found):
        assert evaluated == ["model"]
        assert optimizer.param_groups[0]["params"][0] is model.weight
        with torch.no_grad():
            model.weight.fill_(rank)
        given["x"][0][0] = given["x"][1][0] = rank
        found.append(rank)
        dist.barrier()
        assert (model.weight == rank).all()
        assert given["x"][0][0] == given["x"][1][0] == rank
        assert sorted(found) == [0, 1, 2]

    def test_ended():
        assert evaluated == ["model", "end"]

    @pytest.fixture
    def computed():
        return torch.ones(3, requires_grad=True) * 2

    @pytest.mark.ranks(3)
    def test_no_copy(computed):
        pass

    @pytest.fixture
    def broken():
        raise ValueError("no data")

    @pytest.mark.ranks(3)
    def test_broken(broken):
        pass

    @pytest.fixture
    def asks(rank):
        pass

    @pytest.mark.ranks(3)
    def test_asks(asks):
        pass

    def test_unmarked(rank):
        pass

    def test_unmarked_size(world_size):
        pass
        """
    )
    expected = {"test_copies[given0]": "PASSED", "test_ended": "PASSED", "test_no_copy": "FAILED"}
    errors = ("test_broken", "test_asks", "test_unmarked", "test_unmarked_size")
    assert result.outcomes == expected | dict.fromkeys(errors, "ERROR")
    assert "the argument 'computed' has no copy for each rank" in result.section("test_no_copy")
    assert "no data" in result.section("test_broken")
    assert "can be an argument of a test only" in result.section("test_asks")
    assert "marked with pytest.mark.ranks" in result.section("test_unmarked")
    assert "marked with pytest.mark.ranks" in result.section("test_unmarked_size")


def test_a_fixture_of_the_users_own_with_the_name_rank(run: Run) -> None:
    result = run(
        """
    @pytest.fixture
    def rank():
        return "mine"

    @pytest.mark.ranks(2)
    def test_it(rank):
        assert rank == "mine"
        """
    )
    assert result.outcomes == {"test_it": "PASSED"}


def test_monkeypatch_leaves_nothing_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OTHER", "before")
    result = run(
        """
    @pytest.mark.ranks(3)
    def test_patches(rank, monkeypatch, tmp_path):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.chdir(tmp_path / str(rank))
        monkeypatch.setenv("RANK", "77")
        monkeypatch.setenv("OTHER", str(rank))
        monkeypatch.delenv("WORLD_SIZE")
        monkeypatch.setattr(unittest, "new", rank, raising=False)
        dist.barrier()
        assert os.getcwd() == str(tmp_path / str(rank))
        assert os.environ["RANK"] == "77" and os.environ["OTHER"] == str(rank)
        assert "WORLD_SIZE" not in os.environ

    def test_after():
        assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
        assert os.environ["OTHER"] == "before" and not hasattr(unittest, "new")
        """
    )
    assert result.outcomes == {"test_patches": "PASSED", "test_after": "PASSED"}


def test_capsys_by_rank(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(3)
    def test_it(rank, capsys):
        print("I am", rank)
        dist.barrier()
        print("error", rank, file=sys.stderr)
        assert capsys.readouterr() == (f"I am {rank}\\n", f"error {rank}\\n")
        assert capsys.readouterr().out == ""
        print("rest")
        assert rank != 1

    @pytest.mark.ranks(3)
    def test_threads(rank, capsys):
        thread = threading.Thread(target=lambda: print("of a thread of", rank))
        thread.start()
        thread.join()
        print("own")
        assert capsys.readouterr().out == f"of a thread of {rank}\\nown\\n"

    @pytest.mark.ranks(3)
    def test_disabled(capsys):
        with capsys.disabled():
            pass

    @pytest.mark.ranks(3)
    def test_capfd(capfd):
        pass

    @pytest.mark.ranks(3)
    def test_subtests(subtests):
        pass

    def test_after(capsys):
        print("x")
        assert capsys.readouterr().out == "x\\n"
        """
    )
    text = result.section("test_it")
    assert "rank 1 of 3 failed" in text and "ranks 0, 2 passed" in text
    assert sorted(re.findall(r"^\[rank\d\]: .*$", text, re.M)) == [
        f"[rank{n}]: rest" for n in range(3)
    ]
    assert result.outcomes["test_threads"] == "PASSED"
    assert "capsys.disabled() does not work in a rank" in result.section("test_disabled")
    assert "cannot share the fixture 'capfd'; capsys works" in result.section("test_capfd")
    assert "cannot share the fixture 'subtests'" in result.section("test_subtests")
    assert result.outcomes["test_after"] == "PASSED"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "missing 1 required positional argument: 'count'"),
        ("0", "count=0: expected an integer from 1, or a list of them"),
        ("True", "count=True: expected"),
        ("2.0", "count=2.0: expected"),
        ("[]", r"count=\[\]: expected"),
        ("[1, 'a']", "count=.*: expected"),
        ("[2, 2]", "expected different numbers of ranks"),
        ("2, ordre='ring'", "unexpected keyword argument 'ordre'"),
        ("2, order='butterfly'", "order='butterfly': expected an order"),
        ("2, order=''", "order='': expected the name of an order"),
        ("2, order=3", "order=3: expected a name"),
        ("2, order='ring', reduction='ring'", "expected one of them"),
        ("2, reduction=3", "reduction: expected a gpusim.Reduction"),
        ("2, reduction=len, axis='i'", "expected a gpusim.Reduction"),
        ("2, schedule='one'", "schedule='one': expected 'turns' or 'free'"),
        ("2, init=3", "init=3: expected True, False"),
        ("2, init=False, axis='i'", "init=False: expected no axis"),
        ("2, init=False, processes=True", "init=False: expected no processes"),
        ("2, axis=1", "axis=1: expected the name of an axis"),
        ("2, axis='i', processes=True", "axis='i': expected no processes"),
        ("2, device='tpu'", "device='tpu': expected None, 'cpu' or 'cuda'"),
        ("2, device='cpu', axis='i'", "device='cpu': expected no axis"),
        ("2, processes=1", "processes=1: expected True or False"),
        ("2, processes=True, schedule='free'", "schedule='free': expected no processes"),
    ],
)
def test_wrong_arguments_are_errors_of_the_collection(
    run: Run, arguments: str, message: str
) -> None:
    result = run(
        f"""
    @pytest.mark.ranks({arguments})
    def test_it():
        pass
        """
    )
    result.result.assert_outcomes(errors=1)
    assert "Interrupted: 1 error during collection" in result.out
    assert re.search(rf"::test_it: pytest\.mark\.ranks: .*{message}", result.out), result.out
    assert "Traceback" not in result.out


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("async def test_it(): pass", "got an async one"),
        ("@given(integers())\n    def test_it(x): pass", "hypothesis would draw other examples"),
        (
            "class TestIt(unittest.TestCase):\n        def test_it(self): pass",
            "decorate the class or the method with `@ranks(2)`, from gpusim.testing",
        ),
    ],
)
def test_tests_that_cannot_be_marked(run: Run, test: str, message: str) -> None:
    result = run(
        f"""
    from hypothesis import given
    from hypothesis.strategies import integers
    pytestmark = pytest.mark.ranks(2)

    {test}
        """
    )
    result.result.assert_outcomes(errors=1)
    assert f"pytest.mark.ranks: {message}" in result.out or message in result.out


def test_trace_is_refused(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_it(rank):
        pass
        """,
        "--trace",
    )
    assert "--trace works with one rank; use breakpoint() or --pdb" in result.out


def test_ranks_are_threads_of_pytests_process(run: Run) -> None:
    """So a test of 8 ranks starts nothing: some 50 ms with DDP on a quiet machine."""
    out = run(
        """
    @pytest.mark.ranks(8)
    def test_it(rank):
        print("PROCESS", os.getpid(), os.getppid())
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
    """,
        "-s",
    ).out
    ranks = re.findall(r"PROCESS (\d+) (\d+)", out)
    assert len(ranks) == 8 and len(set(ranks)) == 1
