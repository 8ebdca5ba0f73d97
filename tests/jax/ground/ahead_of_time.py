"""Programs lowered and compiled before they are called, their texts, costs and layouts."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding

from tests.jax.ground import P, compilations, error, mesh, needs, needs_module, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


def sharded(shape: tuple[int, ...], *spec: Any, dtype: Any = np.float32) -> Any:
    """The type of an array on a mesh of 4 by 2."""
    sharding = NamedSharding(mesh((4, 2), ("x", "y")), P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@program
def compiled_from_types() -> Any:
    f = jax.jit(lambda x, w: (x @ w, x.sum(0)))
    compiled = f.lower(sharded((8, 4), "x", "y"), sharded((4, 6), "y")).compile()
    return compiled(grid(values((8, 4))), grid(values((4, 6), seed=1), "y"))


@program
def compiled_once_and_called_often() -> Any:
    compiled = jax.jit(lambda x: x - x.mean(0)).lower(sharded((8, 4), "x", "y")).compile()
    x = grid(values((8, 4)))
    with compilations() as count:
        for _ in range(4):
            x = compiled(x)
    return x, count


@program
def shardings_of_the_compiled() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(
        lambda x, y: {"a": x.sum(0), "b": (x @ y, x)},
        out_shardings={"a": None, "b": (NamedSharding(over, P("y")), None)},
    )
    compiled = f.lower(sharded((8, 4), "x", "y"), values((4, 4))).compile()
    return str(compiled.input_shardings), str(compiled.output_shardings), str(compiled.out_info)


@program
def stages_in_full() -> Any:
    traced = jax.jit(lambda x: (x.sum(0), x @ x.T)).trace(grid(values((8, 4))))
    lowered = traced.lower()
    compiled = lowered.compile()
    info = (
        str(traced.out_info),
        str(lowered.out_info),
        str(lowered.in_avals),
        str(compiled.in_avals),
    )
    return compiled(grid(values((8, 4)))), info, str(lowered.args_info), str(compiled.in_tree)


@program
def lowered_text() -> Any:
    lowered = jax.jit(lambda x: x.sum(0)).lower(grid(values((8, 4))))
    text = lowered.as_text()
    return text, len(lowered.as_text("hlo")) > 0, lowered.compiler_ir("stablehlo") is not None


@program
def compiled_text() -> Any:
    compiled = jax.jit(lambda x: x.sum(0)).lower(grid(values((8, 4)))).compile()
    text = compiled.as_text()
    return type(text).__name__, "num_partitions=8" in text, "ENTRY" in text


@program
def costs() -> Any:
    x, w = grid(values((8, 16))), grid(values((16, 4), seed=1), "y")
    lowered = jax.jit(lambda x, w: (jnp.tanh(x) @ w).sum(0)).lower(x, w)
    compiled = lowered.compile()
    before, after = lowered.cost_analysis(), compiled.cost_analysis()
    memory = compiled.memory_analysis()
    return before, type(after).__name__, after["flops"] > 0, (
        memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes,
    )  # fmt: skip


@program
def runtime_executables() -> Any:
    compiled = jax.jit(lambda x: x.sum(0)).lower(grid(values((8, 4)))).compile()
    executable = compiled.runtime_executable()
    return type(executable).__name__, len(executable.local_devices()), len(executable.hlo_modules())


@program
def static_arguments() -> Any:
    names = ("axis", "scale")
    f = jax.jit(lambda x, axis, scale=1: x.sum(axis) * scale, static_argnames=names)
    x = grid(values((8, 4)))
    compiled = f.lower(x, 0, scale=3).compile()
    return compiled(x), f(x, 1), f(x, axis=0), f(x, None, scale=2)


@program
def names_of_arguments() -> Any:
    f = jax.jit(lambda x, *, w, b=None: (x @ w).sum(0) if b is None else (x @ w + b).sum(0))
    x, w = grid(values((8, 4))), grid(values((4, 6), seed=1), "y")
    compiled = f.lower(x, w=w, b=1.0).compile()
    return compiled(x, w=w, b=1.0), error(compiled, x, w=w), f.lower(x, w=w).compile()(x, w=w)


@program
def types_without_shardings() -> Any:
    f = jax.jit(lambda x, y: (x * 2, (y * 2).sum(0)))
    compiled = f.lower(
        sharded((8, 4), "x", "y"), jax.ShapeDtypeStruct((8, 4), np.float32)
    ).compile()
    return compiled(grid(values((8, 4))), values((8, 4)))


@program
def unused_arguments_of_the_compiled() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x, y, z: z.sum(0))
    compiled = f.lower(x, 1.0, x).compile()
    return compiled(x, 1.0, x), len(compiled.input_shardings[0])


@program
def options_of_the_compiler() -> Any:
    x = grid(values((8, 4)))
    options = {"xla_embed_ir_in_executable": True, "xla_cpu_enable_fast_min_max": False}
    lowered = jax.jit(lambda x: (x.sum(0), x.max())).lower(x)
    return (
        lowered.compile(options)(x),
        jax.jit(lambda x: x.sum(0), compiler_options=options)(x),
        error(lowered.compile, {"no_such_option": 1}).partition("\n")[0],
        error(lowered.compile, {"xla_cpu_enable_fast_min_max": "text"}).partition("\n")[0],
    )


@program
def options_that_dump() -> Any:
    x = grid(values((8, 4)))
    with tempfile.TemporaryDirectory() as name:
        options = {"xla_dump_to": name, "xla_dump_hlo_as_text": True}
        found = jax.jit(lambda x: x.sum(0)).lower(x).compile(options)(x)
        files = sorted({path.suffix for path in Path(name).iterdir()})
    return found, ".txt" in files


@program
def executables_that_are_serialized() -> Any:
    from jax.experimental import serialize_executable

    x = grid(values((8, 4)))
    compiled = jax.jit(lambda x: x * 2 + x.sum(0)).lower(x).compile()
    try:
        packed = serialize_executable.serialize(compiled)
    except Exception as failed:
        return type(failed).__name__, compiled(x)
    return serialize_executable.deserialize_and_load(*packed)(x), compiled(x)


@program
def exported_and_called() -> Any:
    x = grid(values((8, 4)))
    exported = export.export(jax.jit(lambda x: (x.sum(0), x @ x.T)))(x)
    return (
        jax.jit(exported.call)(x), exported.nr_devices, str(exported.in_avals), exported.platforms,
        error(jax.jit(exported.call), values((8, 4))).partition(":")[0],
    )  # fmt: skip


@program
def exported_to_bytes_and_back() -> Any:
    needs_module("flatbuffers")
    x = grid(values((8, 4)))
    exported = export.export(jax.jit(lambda x: (x.sum(0), x @ x.T)))(x)
    return jax.jit(export.deserialize(exported.serialize()).call)(x)


@program
def exported_with_a_gradient() -> Any:
    x = grid(values((8, 4)))
    exported = export.export(jax.jit(lambda x: (jnp.tanh(x) ** 2).sum(0)))(x)
    needs_module("flatbuffers")
    back = export.deserialize(exported.serialize(vjp_order=1))
    return jax.jit(jax.grad(lambda x: back.call(x).sum()))(x), exported.vjp().nr_devices


@program
def exported_for_an_abstract_mesh() -> Any:
    sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("x", "y"))
    kind = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    try:
        exported = export.export(jax.jit(lambda x: x.sum(0)), platforms=["cpu"])(kind)
    except ValueError as failed:
        return type(failed).__name__
    return jax.jit(exported.call)(grid(values((8, 4))))


@program
def exported_with_symbolic_lengths() -> Any:
    x = grid(values((8, 4)))
    shape = export.symbolic_shape("8*n, 4")
    sharding = NamedSharding(mesh((4, 2), ("x", "y")), P("x", "y"))
    kind = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    exported = export.export(jax.jit(lambda x: x.sum(0) / x.shape[0]))(kind)
    return jax.jit(exported.call)(x), jax.jit(exported.call)(grid(values((16, 4))))


@program
def exported_in_a_larger_program() -> Any:
    x = grid(values((8, 4)))
    exported = export.export(jax.jit(lambda x: x - x.mean(0)))(x)
    return jax.jit(lambda x: exported.call(jnp.sin(x)).sum(1) + x.sum())(x)


@program
def shapes_without_running() -> Any:
    f = jax.jit(lambda x: {"a": x.sum(0), "b": [x @ x.T]})
    with compilations() as count:
        found = str(jax.eval_shape(f, sharded((8, 4), "x", "y")))
    return found, count, str(jax.make_jaxpr(f)(grid(values((8, 4)))))


@program
def layouts_asked_for() -> Any:
    x = grid(values((8, 6)))
    columns = Format(Layout(major_to_minor=(1, 0)), x.sharding)
    moved = jax.device_put(x, columns)
    f = jax.jit(lambda x: (x * 2, x.sum(0), x @ x.T))
    kept = jax.jit(lambda x: x - x.mean(0), out_shardings=columns)(x)
    return f(moved), str(kept.format.layout), kept, moved


@program
def layouts_of_arguments() -> Any:
    over = mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(over, P("x", "y"))
    columns = Format(Layout(major_to_minor=(1, 0)), sharding)
    f = jax.jit(lambda x: (x.sum(0), x.T), in_shardings=columns)
    compiled = f.lower(jax.ShapeDtypeStruct((8, 6), np.float32)).compile()
    x = jax.device_put(values((8, 6)), columns)
    return (
        f(x),
        compiled(x),
        str(compiled.input_formats),
        error(compiled, grid(values((8, 6))))[:30],
    )


@program
def layouts_chosen_by_the_compiler() -> Any:
    over = mesh((4, 2), ("x", "y"))
    automatic = Format(Layout.AUTO, NamedSharding(over, P("x", "y")))
    f = jax.jit(lambda x: x.T * x.sum(), in_shardings=automatic, out_shardings=automatic)
    compiled = f.lower(jax.ShapeDtypeStruct((8, 8), np.float32)).compile()
    x = jax.device_put(values((8, 8)), compiled.input_formats[0][0])
    return compiled(x), str(compiled.output_formats)


@program
def layout_constraints() -> Any:
    needs("jax.experimental.layout.with_layout_constraint")
    from jax.experimental.layout import with_layout_constraint

    @jax.jit
    def f(x: Any) -> Any:
        y = with_layout_constraint(x @ x.T, Layout(major_to_minor=(1, 0)))
        return y, y.sum(0)

    return f(grid(values((8, 4))))


@program
def donated_layouts() -> Any:
    x = grid(values((8, 6)))
    columns = Format(Layout(major_to_minor=(1, 0)), x.sharding)
    f = jax.jit(lambda x: x - x.mean(0), donate_argnums=0, out_shardings=columns)
    moved = jax.device_put(x, columns)
    found = f(moved)
    return found, moved.is_deleted()


@program
def analysis_of_the_traced() -> Any:
    f = jax.jit(lambda x: jax.jit(jnp.sum)(x) + x.mean())
    traced = f.trace(grid(values((8, 4))))
    return str(traced.jaxpr), traced.fun_name, lax.psum(1, ()) == 1


@program
def partial_functions_and_methods() -> Any:
    class Model:
        scale = 3.0

        @partial(jax.jit, static_argnums=0)
        def total(self, x: Any) -> Any:
            return (x * self.scale).sum(0)

    x = grid(values((8, 4)))
    f = jax.jit(partial(lambda s, x: s * x.mean(1), 2.0))
    return Model().total(x), f(x), jax.jit(Model().total)(x)
