"""Each name of gpusim/jax/private.py does what gpusim takes it to do, on this process's devices.

`test_private.py` runs these functions in a child of four devices. Each name stands in one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

from gpusim.jax import private
from gpusim.jax.partitioned.compiling import partition
from tests.jax.devices import DEVICES, MESH, SPLIT, mapped

X = np.arange(DEVICES * 4, dtype=np.float32).reshape(DEVICES, 4)
GRID = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(2, -1), ("x", "y"))


def primitive_of(name: str) -> Any:
    """A primitive of one array, with a result of its type."""
    primitive = private.Primitive(name)
    primitive.def_abstract_eval(lambda x, **params: x)
    primitive.def_impl(lambda x, **params: private.apply_primitive(primitive, x, **params))
    return primitive


def lowered_by(rule: Callable[..., Any], **options: Any) -> Any:
    """A new primitive with a lowering."""
    primitive = primitive_of("probe")
    private.register_lowering(primitive, rule, **options)
    return primitive


def contexts_of(function: Callable[[Any, Any], Any], mesh: Any = MESH, **options: Any) -> list[Any]:
    """The contexts in which a rule is called where a program of one device calls a primitive."""
    found = []

    def rule(ctx: Any, x: Any, **params: Any) -> list[Any]:
        found.append(ctx)
        return [x]

    primitive = lowered_by(rule, cacheable=False)  # else the context is of no line
    axes = P(mesh.axis_names)
    program = jax.shard_map(
        lambda x: function(primitive, x),
        **{"mesh": mesh, "in_specs": axes, "out_specs": axes, "check_vma": False, **options},
    )
    jax.jit(program).lower(X)
    return found


# ---------------------------------------------------------------- tables


def rules_of_a_platform_take_the_place_of_others() -> None:
    assert {"cpu", "cuda", "rocm", "tpu"} <= {*private.platform_lowerings}
    primitive = lowered_by(lambda ctx, x: [x])
    assert primitive in private.lowerings and private.lowerings[primitive].rule is not None
    plain = jax.jit(primitive.bind).lower(X).as_text()
    twice = private.lower_function(lambda x: 2 * x, multiple_results=False)
    private.register_lowering(primitive, twice, platform="cpu")
    assert private.platform_lowerings["cpu"][primitive].rule is twice
    jax.clear_caches()
    np.testing.assert_array_equal(jax.jit(primitive.bind)(X), 2 * X)
    cuda = jax.jit(primitive.bind).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "multiply" not in cuda
    del private.platform_lowerings["cpu"][primitive]
    jax.clear_caches()
    assert jax.jit(primitive.bind).lower(X).as_text() == plain


def uncacheable_primitives_are_lowered_for_each_call() -> None:
    for cacheable in (True, False):
        found = []

        def rule(ctx: Any, x: Any, found: list[Any] = found) -> list[Any]:
            found.append(ctx)
            return [x]

        primitive = lowered_by(rule, platform="cpu", cacheable=cacheable)
        assert (primitive in private.uncacheable) == (not cacheable)
        jax.jit(lambda x, p=primitive: p.bind(x) + p.bind(x + 1)).lower(X)
        assert len(found) == (1 if cacheable else 2)


def a_function_is_a_rule() -> None:
    one = lowered_by(private.lower_function(lambda x, *, k: x * k, multiple_results=False))
    np.testing.assert_array_equal(jax.jit(lambda x: one.bind(x, k=3))(X), 3 * X)
    several = private.lower_function(lambda x, *, k: [x, x + k], multiple_results=True)
    pair = private.Primitive("pair")
    pair.multiple_results = True
    pair.def_abstract_eval(lambda x, *, k: [x, x])
    private.register_lowering(pair, several)
    np.testing.assert_array_equal(jax.jit(lambda x: pair.bind(x, k=3))(X)[1], X + 3)


def tables_of_transformations_are_jaxs() -> None:
    """Derivatives, transposes and rules under vmap that stand in the tables are called."""
    primitive = lowered_by(private.lower_function(lambda x: x, multiple_results=False))
    seen: list[Any] = []

    def jvp(primals: Any, tangents: Any) -> Any:
        seen.append(("jvp", type(tangents[0]) is private.Zero))
        return primitive.bind(*primals), primitive.bind(*tangents)

    def transpose(ct: Any, x: Any) -> Any:
        seen.append(("transpose", private.is_undefined_primal(x), x.aval.shape))
        return (7 * ct,)

    def batch(axis_data: Any, values: Any, dims: Any) -> Any:
        seen.append(("batch", axis_data.name, axis_data.size, dims))
        front = private.bdim_at_front(values[0], dims[0], axis_data.size)
        return primitive.bind(front), 0

    private.jvps[primitive] = jvp
    private.transposes[primitive] = transpose
    private.batchers[primitive] = batch
    gradient = jax.grad(lambda x: primitive.bind(x).sum())(X)
    np.testing.assert_array_equal(gradient, 7 * np.ones_like(X))
    assert seen == [("jvp", False), ("transpose", True, X.shape)]
    seen.clear()
    found = jax.vmap(primitive.bind, in_axes=1, axis_name="b")(X)
    np.testing.assert_array_equal(found, X.T)
    assert seen == [("batch", "b", 4, (1,))]
    np.testing.assert_array_equal(private.bdim_at_front(X[0], None, 3), np.stack([X[0]] * 3))


def linear_primitives_have_a_transpose() -> None:
    primitive = lowered_by(private.lower_function(lambda x, *, k: x * k, multiple_results=False))
    private.set_linear(primitive, lambda ct, x, *, k: (primitive.bind(ct, k=k),))
    value, tangent = jax.jvp(lambda x: primitive.bind(x, k=3.0), (X,), (X + 1,))
    np.testing.assert_array_equal((value, tangent), (3 * X, 3 * X + 3))
    gradient = jax.grad(lambda x: primitive.bind(x, k=3.0).sum())(X)
    np.testing.assert_array_equal(gradient, np.full_like(X, 3))


def values_of_transposes() -> None:
    aval = jax.typeof(jnp.ones((2, 3)))
    assert private.UndefinedPrimal(aval).aval is aval
    assert private.is_undefined_primal(private.UndefinedPrimal(aval))
    assert not private.is_undefined_primal(X)
    zero = private.p2tz(X)
    assert type(zero) is private.Zero
    np.testing.assert_array_equal(private.instantiate_zeros(zero), np.zeros_like(X))
    assert private.instantiate_zeros(X) is X


# ---------------------------------------------------------------- calls in a program


def a_custom_call_is_as_it_is_made() -> None:
    def rule(ctx: Any, x: Any) -> Any:
        (aval,) = ctx.avals_out
        call = private.custom_call(
            "gpusim_probe",
            result_types=[private.type_of_aval(ctx.module_context, aval)],
            operands=[private.partition_id(), x],
            backend_config={"call": private.ir.StringAttr.get("its text")},
            api_version=4,
            has_side_effect=True,
            operand_layouts=[[], [1, 0]],
            result_layouts=[[1, 0]],
        )
        return call.results

    text = jax.jit(lowered_by(rule).bind).lower(X).as_text()
    assert "stablehlo.custom_call @gpusim_probe" in text
    for part in (
        'call = "its text"',
        "has_side_effect = true",
        "operand_layouts = [dense<> : tensor<0xindex>, dense<[1, 0]>",
        f"(tensor<ui32>, tensor<{DEVICES}x4xf32>) -> tensor<{DEVICES}x4xf32>",
    ):
        assert part in text, (part, text)


def a_device_has_its_number_in_the_program() -> None:
    """The place in the program's mesh, which is not JAX's number of the device."""
    number = private.Primitive("number")
    number.def_abstract_eval(lambda: jax.typeof(np.uint32(0)))
    private.register_lowering(number, lambda ctx: [private.partition_id()])
    backwards = jax.sharding.Mesh(np.array(jax.devices())[::-1], ("i",))
    found = mapped(lambda x: number.bind() + 0 * x.astype(np.uint32), mesh=backwards)(X[:, 0])
    np.testing.assert_array_equal(found, np.arange(DEVICES))


def contexts_know_axes_and_groups() -> None:
    (ctx,) = contexts_of(lambda primitive, x: primitive.bind(x), GRID)
    context = ctx.module_context.axis_context
    assert isinstance(context, private.SPMDAxisContext)
    assert context.mesh.axis_names == ("x", "y") and context.manual_axes == {"x", "y"}
    half = DEVICES // 2
    rows = np.arange(DEVICES).reshape(2, half)

    def groups(names: Any, given: Any = None) -> Any:
        found = private.replica_groups(context, names, given)
        return [[int(member) for member in group] for group in found]

    assert groups(("y",)) == rows.tolist()
    assert groups(("x",)) == rows.T.tolist()
    assert groups(("x", "y")) == [[*range(DEVICES)]]
    assert groups(("y", "x")) == [rows.T.reshape(-1).tolist()]
    ends = [[half - 1, 0]]
    assert groups(("y",), ends) == rows[:, ends[0]].tolist()
    assert private.canonical_groups(None) is None
    assert private.canonical_groups([[0, 1], [2]]) == ((0, 1), (2,))
    (ctx,) = contexts_of(
        lambda primitive, x: primitive.bind(x),
        GRID, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"),
    )  # fmt: skip
    assert ctx.module_context.axis_context.manual_axes == {"x"}


def lines_are_the_programs() -> None:
    def call(primitive: Any, x: Any) -> Any:
        return primitive.bind(x)  # here

    (ctx,) = contexts_of(call)
    lines = Path(__file__).read_text().splitlines()
    (here,) = (k for k, text in enumerate(lines, 1) if text.endswith("  # here"))
    assert private.site_of(ctx.traceback) == f"{__file__}:{here}", private.site_of(ctx.traceback)
    assert private.site_of(None) == "unknown line"
    # A file that is left out: the line is that of its caller.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "library.py"
        path.write_text("def call(primitive, x):\n    return primitive.bind(x)\n")
        library: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), library)
        (ctx,) = contexts_of(library["call"])
        assert private.site_of(ctx.traceback) == f"{path}:2", private.site_of(ctx.traceback)
        private.exclude_file(str(path))
        (ctx,) = contexts_of(lambda primitive, x: library["call"](primitive, x))
        assert private.site_of(ctx.traceback).startswith(f"{__file__}:")


# ---------------------------------------------------------------- primitives and types


def primitives_in(function: Callable[[Any], Any], check: bool) -> set[Any]:
    """The primitives that a function of one device binds."""
    found: set[Any] = set()

    def look(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            found.add(equation.primitive)
            for value in equation.params.values():
                if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
                    look(getattr(value, "jaxpr", value))

    whole = jax.shard_map(function, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=check)
    look(jax.make_jaxpr(whole)(X).jaxpr)
    return found


def functions_of_lax_bind_these_primitives() -> None:
    def varying(x: Any) -> Any:
        return lax.pcast(x, "i", to="varying")

    def unreduced(x: Any) -> Any:
        return lax.pcast(x, "i", to="unreduced")

    def scattered(x: Any) -> Any:
        return lax.psum_scatter(x.T, "i", tiled=True)

    def ragged(x: Any) -> Any:
        index = jnp.arange(DEVICES)
        return lax.ragged_all_to_all(x, x, *[index] * 4, axis_name="i")

    for primitive, function, check in (
        (private.psum_p, lambda x: lax.psum(x, "i"), False),
        (private.psum_invariant_p, lambda x: varying(lax.psum(x, "i")), True),
        (private.pmax_p, lambda x: lax.pmax(x, "i"), False),
        (private.pmin_p, lambda x: lax.pmin(x, "i"), False),
        (private.reduce_scatter_p, scattered, False),
        (private.ragged_p, ragged, False),
        (private.unreduced_psum_p, lambda x: varying(lax.psum(unreduced(x), "i")), True),
        (
            private.unreduced_reduce_scatter_p,
            lambda x: lax.psum_scatter(unreduced(x.T), "i", tiled=True),
            True,
        ),
    ):
        assert primitive in primitives_in(function, check), primitive
        assert primitive in private.lowerings


def reductions_of_axes() -> None:
    for function, expected in (
        (private.reduce_sum, X.sum(0)),
        (private.reduce_max, X.max(0)),
        (private.reduce_min, X.min(0)),
    ):
        np.testing.assert_array_equal(function(jnp.array(X), [0]), expected)


def primitives_run_by_themselves() -> None:
    primitive = primitive_of("by itself")
    private.register_lowering(
        primitive, private.lower_function(lambda x: x + 1, multiple_results=False)
    )
    np.testing.assert_array_equal(primitive.bind(jnp.array(X)), X + 1)
    traced = []
    jax.jit(lambda x: traced.append(isinstance(x, private.Tracer)))(X)
    assert traced == [True] and not isinstance(jnp.array(X), private.Tracer)


def within(function: Callable[[Any], Any], *, check: bool) -> Any:
    """The result of a function as it is traced on one device."""
    found = []

    def local(x: Any) -> Any:
        found.append(function(x))
        return x

    whole = jax.shard_map(local, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=check)
    jax.jit(whole).lower(X)
    return found[0]


def axes_are_known_where_they_are_bound() -> None:
    assert within(lambda x: private.axis_size("i", None), check=False) == DEVICES
    pairs = [[k, k + 1] for k in range(0, DEVICES, 2)]
    assert within(lambda x: private.axis_size("i", pairs), check=False) == 2
    within(lambda x: private.check_axis_names(("i", 0), "psum"), check=False)
    try:
        private.check_axis_names(("i",), "psum")
    except NameError as error:
        assert "unbound axis name: i" in str(error) and "psum" in str(error)
    else:
        raise AssertionError("unbound")
    assert private.skip_one_sized_axes(("i", "j", 0)) == ("i", "j", 0)
    one = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, -1), ("x", "y"))
    with jax.set_mesh(one):
        skipped = private.skip_one_sized_axes(("x", "y"))
    assert skipped in (("x", "y"), ("y",))  # as jax_remove_size_one_mesh_axis_from_type says


def types_say_which_values_vary() -> None:
    for check in (False, True):
        assert within(lambda x: private.checks_types(), check=check) is check
    assert within(lambda x: private.casts_types(), check=True) in (True, False)

    def states(x: Any) -> Any:
        same = jnp.zeros(3)
        cast = private.pvary(same, ("i",))
        moved = private.collective_pvary(("i",), same)
        values = (x, same, cast, moved, lax.pcast(x, "i", to="unreduced"))
        return [private.state_over(jax.typeof(value), ("i",), "probe") for value in values]

    assert within(states, check=True) == [
        "varying", "invarying", "varying", "varying", "unreduced"
    ]  # fmt: skip
    assert within(lambda x: private.collective_pvary(("i",), x) is x, check=False)


def types_of_reductions() -> None:
    def plain(x: Any) -> Any:
        return private.reduction_type(jax.typeof(x), axes=("i",), axis_index_groups=None)

    (aval,), effects = within(lambda x: of_one(plain(x)), check=False)
    assert (aval.shape, aval.dtype) == ((1, 4), np.float32)
    assert effects == {private.NamedAxisEffect("i")} != {private.NamedAxisEffect("j")}

    def typed(x: Any) -> Any:
        return private.invariant_reduction_type("pmean", jax.typeof(x), axes=("i",))

    (aval,), effects = within(lambda x: of_one(typed(x)), check=True)
    assert aval.shape == (1, 4) and not aval.mat.varying
    assert effects == {private.NamedAxisEffect("i")}


def of_one(found: Any) -> Any:
    avals, effects = found
    return (avals if isinstance(avals, (list, tuple)) else [avals]), effects


# ---------------------------------------------------------------- compilation


def compiled(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The arguments of `compile_or_get_cached` as a program is compiled."""
    found = []
    jax_compile = private.compiler.compile_or_get_cached

    def note(*given: Any, **named: Any) -> Any:
        executable = jax_compile(*given, **named)
        found.append((given, named, executable))
        return executable

    private.compiler.compile_or_get_cached = note
    try:
        jax.jit(function).lower(*arguments).compile()
    finally:
        private.compiler.compile_or_get_cached = jax_compile
    return found


def one_function_compiles_all_programs() -> None:
    def total(x: Any) -> Any:
        return x.sum(0) * 17

    ((given, _, executable),) = compiled(total, jax.device_put(X, SPLIT))
    backend, module, devices, options, callbacks, executable_devices = given[:6]
    assert backend.platform == "cpu" and devices.size == DEVICES and len(callbacks) == 0
    assert list(executable_devices) == list(devices.flat)
    assert options.num_partitions == DEVICES
    assert isinstance(module, private.ir.Module)
    assert any("all-reduce" in each.to_string() for each in executable.hlo_modules())
    again = private.compile_alone(backend, module, executable_devices, options, callbacks)
    assert any("all-reduce" in each.to_string() for each in again.hlo_modules())


def partitioned(function: Callable[..., Any], *arguments: Any) -> tuple[Any, bytes]:
    ((given, _, _),) = compiled(function, *arguments)
    backend, module, _, options, callbacks, executable_devices = given[:6]
    program = partition(backend, module, executable_devices, options, callbacks)
    assert program is not None
    return module, program


def partitioned_programs_are_read() -> None:
    def total(x: Any, y: Any) -> Any:
        return x.sum(0) * 17, x + y

    module, program = partitioned(total, jax.device_put(X, SPLIT), jax.device_put(X, SPLIT))
    found = private.program_of(program)
    assert "all-reduce(" in found.to_string()
    with module.context:
        read = private.ir.Module.parse(private.stablehlo_of(program), module.context)
        assert "stablehlo.all_reduce" in str(read) and f"tensor<1x{X.shape[1]}xf32>" in str(read)
    arguments, results = private.shardings_of(found)
    assert [type(each) for each in arguments] == [private.HloSharding] * 2
    split = [DEVICES, 1]
    assert [each.tile_assignment_dimensions() for each in arguments] == [split, split]
    assert results[0].is_replicated() and not results[1].is_replicated()
    assert results[1].tile_assignment_devices() == [*range(DEVICES)]
    _, program = partitioned(lambda x: x.sum(), jax.device_put(X, SPLIT))
    _, (only,) = private.shardings_of(private.program_of(program))
    assert only.is_replicated()


def meshes_and_channels_are_read() -> None:
    given = jax.device_put(X, jax.NamedSharding(GRID, P("x", "y")))
    module, program = partitioned(lambda x: x.sum(0) * 29, given)
    with module.context:
        found = {}
        for operation in module.body.operations:
            if operation.operation.name == "sdy.mesh":
                mesh = private.sdy.MeshAttr(operation.operation.attributes["mesh"])
                axes = [private.sdy.MeshAxisAttr(axis) for axis in mesh.axes]
                found[tuple((axis.name, axis.size) for axis in axes)] = [*mesh.device_ids]
        assert (("x", 2), ("y", DEVICES // 2)) in found
        assert all(ids in ([], [*range(DEVICES)][::-1]) for ids in found.values()), found
        read = private.ir.Module.parse(private.stablehlo_of(program), module.context)
        channels = [
            private.hlo.ChannelHandle(each.operation.attributes["channel_handle"]).handle
            for function in read.body.operations
            if function.operation.name == "func.func"
            for each in function.operation.regions[0].blocks[0].operations
            if each.operation.name == "stablehlo.all_reduce"
        ]
    text = private.program_of(program).to_string()
    assert channels and all(f"channel_id={channel}," in text for channel in channels)


def groups_along_axes_are_read() -> None:
    module, _ = partitioned(lambda x: x.sum(0) * 31, jax.device_put(X, SPLIT))
    axes = (
        '[#stablehlo.axis_ref<name = "x">, #stablehlo.axis_ref<name = "y", sub_axis_info = (2)4>]'
    )
    with module.context:
        attribute = private.ir.Attribute.parse(
            f"#stablehlo.replica_group_mesh_axes<mesh = @its_mesh, axes = {axes}>"
        )
        groups = private.hlo.ReplicaGroupMeshAxesAttr(attribute)
        assert private.ir.FlatSymbolRefAttr(groups.mesh).value == "its_mesh"
        whole, part = (private.hlo.AxisRefAttr(axis) for axis in private.ir.ArrayAttr(groups.axes))
        assert (whole.name, whole.sub_axis_info, part.name) == ("x", None, "y")
        info = private.hlo.SubAxisInfoAttr(part.sub_axis_info)
        assert (info.pre_size, info.size) == (2, 4)


def entries_of_the_cache_are_kept_in_its_folder() -> None:
    ((given, _, _),) = compiled(lambda x: x.sum(0) * 19, jax.device_put(X, SPLIT))
    backend, module, devices, options = given[:4]
    make = partial(private.ProgramCache, backend, module, devices, options)
    without = make()
    without.put(b"entry")
    assert without.get() is None
    with TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
        try:
            assert make().get() is None
            make().put(b"entry")
            assert make().get() == b"entry"
            assert [*Path(folder).iterdir()]
            ((given, _, _),) = compiled(lambda x: x.sum(0) * 23, jax.device_put(X, SPLIT))
            assert private.ProgramCache(*given[:4]).get() is None
        finally:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()
