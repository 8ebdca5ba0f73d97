"""What gpusim.torch.distributed uses of torch's private interface does what it takes it to do."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import DefaultDeviceType

from gpusim.torch.distributed import launch, private, private_checks, private_groups
from gpusim.torch.distributed.accelerator import attention
from gpusim.torch.distributed.calls.store import RankStore
from gpusim.torch.distributed.private_checks import unreduced_parameters
from tests.torch.distributed_programs import start


def in_thread(function: Callable[[], Any]) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_torch_looks_up_these_names_in_its_module() -> None:
    """Replacing them there has an effect."""
    init = inspect.getsource(c10d.init_process_group)
    assert "_new_process_group_helper(" in init and "rendezvous(" in init
    assert "_new_process_group_helper(" in inspect.getsource(c10d._new_group_with_tag)
    assert "_get_default_timeout(" in init
    helper = inspect.getsource(c10d._new_process_group_helper)
    assert "not in Backend.backend_type_map" in helper and "Unknown backend type" in helper
    assert "start_processes(" in inspect.getsource(torch.multiprocessing.spawn)
    names = list(inspect.signature(c10d._new_process_group_helper).parameters)
    assert names[:4] == ["group_size", "group_rank", "global_ranks_in_group", "backend"]


def test_torch_looks_up_the_names_that_a_played_device_replaces() -> None:
    """Each in its module, at the time of the call."""
    for function, name in (
        (torch.nn.Module.to, "torch._C._nn._parse_to("),
        (torch.serialization._get_restore_location, "default_restore_location("),
        (torch.amp.autocast_mode.custom_fwd, "_cast("),
        (dist.c10d_logger._exception_logger, "_get_msg_dict("),
        (_fsdp_init, "torch._C._get_accelerator()"),
        (DefaultDeviceType.get_device_type, "DefaultDeviceType._default_device_type"),
    ):
        assert name in inspect.getsource(function), name
    helper = inspect.getsource(c10d._new_process_group_helper)
    assert hasattr(c10d, "_maybe_attach_flight_recorder") == (
        "_maybe_attach_flight_recorder(" in helper
    )


def test_torch_looks_up_what_simulated_gpus_replace() -> None:
    """Each in its module, at the time of the call, and with the arguments that are known."""
    assert [*inspect.signature(private.copies._get_stream).parameters] == ["device"]
    assert "_get_stream(target_device)" in inspect.getsource(torch.distributed.utils._recursive_to)
    for engine in private.engines:
        assert callable(engine._engine_run_backward)
    assert "_engine_run_backward(" in inspect.getsource(torch.autograd.backward)
    assert "_engine_run_backward(" in inspect.getsource(torch.autograd.grad)
    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    assert "self._passing_sync_batchnorm_handle(" in source
    source = inspect.getsource(torch.utils.checkpoint)
    assert "get_device_states(*args)" in source and '"_initialized"' in source
    assert "def _default_meta_extractor(" in source
    source = inspect.getsource(torch.optim.Optimizer._process_value_according_to_param_policy)
    assert "param.device" in source
    assert torch.rand in private.device_constructors()


def test_where_the_global_generator_is_changes_with_each_draw() -> None:
    position = private.generator_position()
    assert position is not None
    for draw in (lambda: torch.rand(1), lambda: torch.rand(700), lambda: torch.randperm(3)):
        before = position()
        torch.ones(3).sum()
        assert position() == before
        draw()
        assert position() != before


def test_random_operations_have_a_tag() -> None:
    ops: Any = torch.ops.aten
    assert private.is_random_operation(ops.normal_) and private.is_random_operation(
        ops.rand.default
    )
    assert not private.is_random_operation(ops.add) and not private.is_random_operation(torch.rand)


def test_the_modes_of_a_thread() -> None:
    with torch.device("meta") as device:
        assert len(private.function_modes()) == 1
        assert device is not None
    assert private.function_modes() == []


def test_tensors_that_hold_others() -> None:
    def use(rank: int) -> None:
        start()
        x = torch.ones(2)
        made = dist.tensor.distribute_tensor(x, dist.init_device_mesh("cpu", (2,)))
        assert private.is_dtensor(made) and private.is_wrapper(type(made))
        assert private.tensor_inside(made).data_ptr() == made.to_local().data_ptr()
        assert not private.is_wrapper(torch.Tensor) and not private.is_wrapper(torch.nn.Parameter)
        assert not private.is_dtensor(x) and private.tensor_inside(x) is None

    launch(use, 2)


def test_kernels_of_attention_have_the_arguments_that_torch_passes() -> None:
    for name, kernel in attention.KERNELS.items():
        arguments = getattr(private.aten, name).default._schema.arguments
        known = list(inspect.signature(kernel).parameters)
        assert [argument.name for argument in arguments] == known


def test_a_split_group_is_absent_where_torchs_is() -> None:
    def use(rank: int) -> Any:
        start()
        return dist.split_group(split_ranks=[[0]])

    source = inspect.getsource(c10d.split_group)
    absent = None if "return None" in source else c10d.GroupMember.NON_GROUP_MEMBER
    group, other = launch(use, 2)
    assert other is absent or other == absent
    assert group.size() == 1


def test_the_devices_of_a_group_are_there() -> None:
    """torch's broadcast of a state dict puts tensors on the first of them."""

    def use(rank: int) -> Any:
        start()
        return dist.group.WORLD._device_types[0]

    expected = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert launch(use, 1) == [expected]
    assert launch(use, 1, device="cpu") == [torch.device("cpu")]


def test_each_thread_that_enters_has_a_world_of_its_own() -> None:
    original = c10d._world
    world = private_groups.RanksWorld(original)

    def own() -> tuple[Any, ...]:
        world.enter()
        world.group_count = 7
        world.pg_names["group"] = "name"
        return world.group_count, world.default_pg, dict(world.pg_names)

    assert in_thread(own) == (7, None, {"group": "name"})
    assert in_thread(own) == (7, None, {"group": "name"})
    assert world.group_count == original.group_count != 7
    assert world.pg_names is original.pg_names and not original.pg_names


def test_the_world_has_all_that_torch_keeps_in_it() -> None:
    """An attribute that is no property would be shared by all ranks."""
    world = c10d._World()
    kept = {name.lstrip("_") for name in vars(world)}
    properties = {n for n, v in vars(c10d._World).items() if isinstance(v, property)}
    assert kept <= properties


def test_a_launch_puts_everything_back() -> None:
    before = (c10d._world, c10d._new_process_group_helper, c10d.rendezvous, sys.excepthook)

    def program(rank: int) -> None:
        start()
        if rank == 1:
            raise ValueError

    with pytest.raises(RuntimeError):
        launch(program, 2)
    assert before == (c10d._world, c10d._new_process_group_helper, c10d.rendezvous, sys.excepthook)


@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_the_ddp_module_that_runs_is_the_ranks_own(schedule: str) -> None:
    """Ranks that change inside of a forward leave torch's class attribute set, unless restored."""

    ddp: Any = torch.nn.parallel.DistributedDataParallel

    class Meeting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.barrier()
            seen.append(ddp._active_ddp_module)
            return super().forward(x)

    def program(rank: int) -> None:
        start()
        model = torch.nn.parallel.DistributedDataParallel(Meeting(2, 1))
        model(torch.ones(1, 2))
        if schedule == "turns":
            assert seen.pop() is model and ddp._active_ddp_module is None

    seen: list[Any] = []
    launch(program, 3, schedule=schedule)
    assert ddp._active_ddp_module is None


def test_names_of_groups_belong_to_the_thread() -> None:
    """C++ finds a group by its name, in a registry that isolation gives each thread."""
    import torch.distributed._functional_collectives as functional

    def program(rank: int) -> float:
        start()
        return float(functional.all_reduce(torch.tensor(1.0 + rank), "sum", dist.group.WORLD))

    assert launch(program, 3) == [6.0] * 3


def test_the_backend_of_a_group_is_the_one_that_was_asked_for() -> None:
    """torch and scripts choose by it: gloo's and NCCL's gradients of an all-gather differ."""

    def program(rank: int) -> list[str]:
        found = []
        for backend in ("gloo", "nccl", "gpusim", "cpu:gloo,cuda:nccl", None):
            dist.init_process_group(backend)
            group = dist.new_group([0, 1])
            found += [dist.get_backend(), dist.get_backend(group)]
            assert type(dist.group.WORLD).__name__ == "RankGroup"
            dist.destroy_process_group()
        return found

    asked = ["gloo", "nccl", "gpusim", "cpu:gloo,cuda:nccl", "undefined"]
    for found in launch(program, 2):
        assert found[::2] == asked and found[1::2] == asked


def test_functions_do_not_remember_a_ranks_group() -> None:
    import torch.distributed.nn.functional as functional
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for function in (functional.all_reduce, functional.all_gather, ZeroRedundancyOptimizer):
        for name in ("group", "process_group"):
            parameter = inspect.signature(function).parameters.get(name)
            assert parameter is None or parameter.default is None


def test_cpp_calls_a_store_of_python() -> None:
    """torch puts a prefix before the keys, in C++."""

    def program(rank: int) -> tuple[Any, ...]:
        start()
        store = c10d._get_default_store()
        counted = store.add("count", 2)
        if rank == 0:
            store.set("key", "value")
        value = store.get("key")
        dist.barrier()
        return counted, value, store.check(["key"]), store.check(["other"]), store.add("count", 0)

    found = launch(program, 3)
    assert sorted(each[0] for each in found) == [2, 4, 6]
    assert [each[1:] for each in found] == [(b"value", True, False, 6)] * 3
    assert issubclass(RankStore, dist.Store)


def test_a_barrier_after_init_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")

    def program(rank: int) -> int:
        start()
        dist.new_group([0, 2])
        return dist.get_rank()

    assert launch(program, 3) == [0, 1, 2]


def test_cpp_that_holds_a_work_alone_can_wait_for_it() -> None:
    """DDP's join hands a work to C++, which does not keep the Python object alive."""

    def program(rank: int) -> float:
        start()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        with model.join():
            for _ in range(1 + rank):
                model(torch.ones(1, 2)).sum().backward()
        return float(next(model.parameters()).grad.sum())

    assert len(launch(program, 2)) == 2


def test_a_tensor_of_a_call_lives_until_all_have_read_it() -> None:
    """C++ drops the input of a functional collective as soon as the call has been posted."""
    import torch.distributed._functional_collectives as functional

    def program(rank: int) -> torch.Tensor:
        start()
        group = dist.group.WORLD
        assert group is not None
        found = functional.all_gather_tensor(torch.full((50_000,), float(rank)), 0, group)
        torch.full((50_000,), -1.0)  # takes memory that is free
        return found.reshape(3, -1)[:, ::10_000] * 1

    expected = torch.arange(3.0)[:, None].expand(3, 5)
    assert all(torch.equal(found, expected) for found in launch(program, 3))


def test_ranks_have_meshes_of_their_own() -> None:
    """DTensor finds local shapes in caches by the mesh, of which torch has one for a process."""
    from torch.distributed.device_mesh import init_device_mesh

    def program(rank: int) -> tuple[Any, int]:
        start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return mesh["a"], mesh["a"]._thread_id

    first, second = launch(program, 4), launch(program, 4)
    meshes = [mesh for mesh, _ in (*first, *second)]
    assert len({number for _, number in (*first, *second)}) == 8
    assert all(a != b for i, a in enumerate(meshes) for b in meshes[:i])


def test_the_memory_of_the_generator_is_its_state() -> None:
    """It changes with each draw and seed, and with nothing else."""
    memory = private.generator_memory()
    assert memory is not None
    before = torch.get_rng_state()
    try:
        torch.manual_seed(3)
        first = memory.raw
        state = torch.get_rng_state()
        assert memory.raw == first
        seen = {first}
        for draw in (
            lambda: torch.rand(1),
            lambda: torch.randn((), dtype=torch.float64),
            lambda: torch.randn((), dtype=torch.float64),  # that is left over
            lambda: torch.rand(623),
            lambda: torch.manual_seed(4),
        ):
            draw()
            assert memory.raw not in seen
            seen.add(memory.raw)
        torch.set_rng_state(state)
        assert memory.raw[20:2516] == first[20:2516]
    finally:
        torch.set_rng_state(before)


def test_torch_has_the_settings_that_ranks_exchange() -> None:
    """Those of a launch are put back, and dictionaries are copies."""
    import pkgutil

    owners = {name: pkgutil.resolve_name(name) for name in private.ATTRIBUTES}
    before = [getattr(owners[o], n) for o, names in private.ATTRIBUTES.items() for n in names]
    flags = [read() for _, read, _ in private.FLAGS]
    launch(lambda rank: [torch.nn.Linear(1, 1)(torch.ones(1)), start()] and None, 2)
    after = [getattr(owners[o], n) for o, names in private.ATTRIBUTES.items() for n in names]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert [read() for _, read, _ in private.FLAGS] == flags
    for _, read, write in private.FLAGS:  # what is read can be set
        write(read())
    known = {n for n in vars(torch.nn.modules.module) if n.startswith("_global_")}
    assert known == set(private.ATTRIBUTES["torch.nn.modules.module"])
    planner = owners["torch.distributed.checkpoint.planner:SavePlanner"]
    kept = {n for n, v in vars(planner).items() if n.startswith("_cached_") and type(v) is dict}
    assert kept == set(private.ATTRIBUTES["torch.distributed.checkpoint.planner:SavePlanner"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_programs_have_the_values_of_eager_ones(backend: str) -> None:
    """Dynamo does not trace into groups, which DDP's reducer calls while Dynamo's frames run."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.fsdp import fully_shard

    def sums(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(2 * x, "sum", dist.group.WORLD)
        y = x + 1
        dist.all_reduce(y)
        return total + y

    def train(compiled: bool, wrap: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)]
        model = wrap(torch.nn.Sequential(*layers))
        called = torch.compile(model, backend=backend) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            called(torch.ones(2, 4) * (dist.get_rank() + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [getattr(p, "full_tensor", p.clone)().detach() for p in model.parameters()]

    def program(rank: int) -> None:
        start()
        x = torch.arange(4.0) + rank
        torch.testing.assert_close(torch.compile(sums, backend=backend)(x), sums(x))
        for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
            for one, other in zip(train(True, wrap), train(False, wrap), strict=True):
                torch.testing.assert_close(one, other)

    launch(program, 2)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("tcp://localhost:7?rank=1&world_size=3", "port 7"),
        ("tcp://127.0.0.1:7?rank=1&world_size=3", "port 7"),
        ("file:///no/./such?rank=1&world_size=3", "file /no/such"),
        ("env://", "port 9"),
    ],
)
def test_rendezvous_names_where_ranks_meet(
    url: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes its stores by `_create_c10d_store` and `FileStore`, as it finds them in its module.

    No rank 0 is there to connect to.
    """
    variables = {"MASTER_ADDR": "::1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = private.meeting._create_c10d_store, private.meeting.FileStore
    with private_groups.stores_are_met() as keys:
        _, rank, size = next(iter(dist.rendezvous(url)))
    assert (rank, size, keys) == (1, 3, [key])
    assert before == (private.meeting._create_c10d_store, private.meeting.FileStore)


def test_fsdp1_keeps_its_profiler_in_containers_of_a_class() -> None:
    for owner, name in private.SHARED_STATES:
        assert isinstance(vars(owner)[name], (dict, set)) and not vars(owner)[name]
    profiler = private.SHARED_STATES[0][0]
    with profiler.profile("x"):
        assert profiler.profiling == {"x"}
    assert "x" in profiler.results
    profiler.reset()


def test_all_ways_to_register_operators_are_known() -> None:
    """Those that torch.library and its classes have, apart from those that only read."""
    reads = {"get_ctx", "get_kernel", "infer_schema", "fallthrough_kernel", "wrap_triton"}
    known = {owner: set(names) for owner, names in private.REGISTERING}
    public = {*torch.library.__all__, "register_autograd", "register_kernel"}
    assert known[torch.library] >= public - reads - {"Library", "impl_abstract"}
    by_library = {"define", "impl", "fallback", "_register_fake", "__init__"}
    assert by_library <= known[torch.library.Library]
    definition = private.REGISTERING[1][0]
    registering = {name for name in vars(definition) if name.startswith("register_")}
    assert registering - {"register_effect"} <= known[definition]


def test_safe_globals_are_added_by_a_function_that_is_looked_up() -> None:
    names = torch.serialization.add_safe_globals.__code__.co_names
    assert names == ("_weights_only_unpickler", "_add_safe_globals")
    torch.serialization.add_safe_globals([complex])
    assert complex in private.unpickler._marked_safe_globals_set
    private.unpickler._remove_safe_globals([complex])


def test_print_options_are_changed_in_their_place() -> None:
    options = torch._tensor_str.PRINT_OPTS
    assert type(options) is private.PrintOptions
    before = options.precision
    torch.set_printoptions(precision=7)
    assert torch._tensor_str.PRINT_OPTS is options and options.precision == 7
    torch.set_printoptions(precision=before)


def test_functional_collectives_are_looked_up_in_their_module() -> None:
    for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor"):
        assert callable(getattr(private.functional, name))
    assert private.functional is torch.distributed._functional_collectives


def test_new_group_makes_its_group_by_a_function_of_the_module() -> None:
    owner, name = private_groups.GROUP_MAKER
    assert owner is c10d and f"return {name}(" in inspect.getsource(c10d.new_group)
    names = list(inspect.signature(getattr(owner, name)).parameters)
    assert names.index("ranks") == 0 and names.index("use_local_synchronization") == 5


def test_function_modes_do_not_see_calls_in_a_block() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, *rest: Any) -> Any:
            seen.append(function)
            return function(*rest[1], **(rest[2] if len(rest) > 2 else {}))

    x = torch.ones(2)
    with Mode():
        with private.without_function_modes():
            x.stride()
            with private.without_function_modes():
                x.numel()
            x.stride()
        assert not seen
        x.numel()
    assert len(seen) == 1


def test_gradients_of_fsdp2_that_wait_are_found() -> None:
    """In the attributes that `unreduced_parameters` reads."""

    def run(rank: int) -> list[list[str]]:
        dist.init_process_group()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        fully_shard(model[0], mp_policy=policy)
        fully_shard(model)
        found = []
        for on in (False, True):
            model.set_requires_gradient_sync(on)
            model(torch.ones(1, 4)).sum().backward()
            found.append(sorted(name for name, _ in unreduced_parameters(model)))
        return found

    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert launch(run, 2) == [[names, []]] * 2


def test_fake_tensors_are_told_apart() -> None:
    mode = torch._subclasses.FakeTensorMode()
    assert private.is_fake(type(mode.from_tensor(torch.ones(2))))
    assert not private.is_fake(torch.Tensor) and not private.is_fake(torch.nn.Parameter)


class Noting(TorchDispatchMode):
    """A mode that notes which operators come to it."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(f"{self.name} {operator.__name__}")
        return operator(*args, **(kwargs or {}))


def test_a_mode_is_put_below_the_programs() -> None:
    """It sees operators last, and the others end as they began; flags do not say that it is on."""
    x, seen = torch.ones(2), list[str]()
    own, first, last = (Noting(name, seen) for name in ("own", "first", "last"))
    flags = [read() for what, read, _ in private.FLAGS if what.startswith("modes")]
    with first:
        private.put_mode_below(own)
        with last:
            x + 1
        x * 2
    assert private.has_mode(own) and not private.has_mode(first)
    assert [read() for what, read, _ in private.FLAGS if what.startswith("modes")] == flags
    x - 3
    private.take_mode_out(own)
    names = ["last add.Tensor", "first add.Tensor", "own add.Tensor", "first mul.Tensor"]
    assert seen == [*names, "own mul.Tensor", "own sub.Tensor"]


def test_a_mode_is_taken_out_from_below_the_programs() -> None:
    x, seen = torch.ones(2), list[str]()
    own, other = Noting("own", seen), Noting("other", seen)
    private.put_mode_below(own)
    with other:
        private.take_mode_out(own)
        assert not private.has_mode(own) and private.has_mode(other)
        private.take_mode_out(own)  # nothing is there to be taken
        x + 1
    x * 2
    assert seen == ["other add.Tensor"]


def test_torchs_own_modes_stay_above() -> None:
    x, seen = torch.ones(2), list[str]()
    own = Noting("own", seen)
    with torch._subclasses.FakeTensorMode() as mode:
        private.put_mode_below(own)
        fake: Any = torch.ones(2) + 1
        assert private.is_fake(type(fake)) and private.has_mode(own)
        private.take_mode_out(own)
    assert not private.has_mode(own) and not private.has_mode(mode)
    x + 1


def test_a_block_without_modes_and_derivatives() -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("function")
            return function(*args, **(kwargs or {}))

    with Noting("mode", seen), Functions():
        with private.without_modes():
            assert not (x * 2).requires_grad and not seen
        assert (x * 2).requires_grad
    assert seen == ["function", "mode mul.Tensor", "function"]


@pytest.mark.parametrize("puts", [True, False], ids=["put", "taken out"])
def test_modes_are_asked_after_inference(puts: bool) -> None:
    """Also if one was put on the stack in the block, or taken from it."""
    x, seen = torch.ones(2), list[str]()
    own = Noting("own", seen)
    if not puts:
        private.put_mode_below(own)
    with torch.inference_mode():
        (private.put_mode_below if puts else private.take_mode_out)(own)
    private.mend_mode_key()
    x + 1
    assert seen == (["own add.Tensor"] if puts else [])
    if puts:
        private.take_mode_out(own)
    x + 1
    assert len(seen) == puts


def test_backward_passes_are_known_in_their_hooks() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[bool]()

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Any) -> Any:
            return value * 2

        @staticmethod
        def backward(context: Any, *given: Any) -> Any:
            seen.append(private_checks.runs_backward())
            return given[0]

    x.register_hook(lambda _: seen.append(private_checks.runs_backward()))
    loss = Own.apply(x).sum()
    assert not private_checks.runs_backward()
    loss.backward()
    assert seen == [True, True] and not private_checks.runs_backward()


def test_the_compiler_is_imported_where_functions_are_compiled() -> None:
    assert inspect.getmodule(importlib.import_module(private_checks.COMPILER).compile_fx)
    assert "compile_fx(" in inspect.getsource(importlib.import_module("torch._inductor").compile)
    source = inspect.getsource(importlib.import_module("torch._dynamo.backends.inductor"))
    assert "from torch._inductor.compile_fx import compile_fx" in source
