"""Programs under settings of JAX's: partitioners, debugging, profiling and texts."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, Skip, compilations, mesh, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


def model(x: Any, w: Any) -> Any:
    """A layer with sums over both axes of the mesh."""
    h = jnp.tanh(x @ w)
    return (h - h.mean(0)).sum(1), h.max(0), (h**2).mean()


@program(jax_use_shardy_partitioner=False)
def the_older_partitioner() -> Any:
    x, w = grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    grads = jax.jit(jax.grad(lambda w, x: model(x, w)[2]))
    return jax.jit(lambda x, w: model(x, w))(x, w), grads(w, x)


@program(jax_use_shardy_partitioner=False)
def the_older_partitioner_with_constraints() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(x @ x.T, NamedSharding(over, P("y", "x")))
        z = lax.fori_loop(0, 3, lambda _, y: y - y.mean(0), y)
        return z.sum(1), z

    return f(put(values((8, 4)), over, "x", "y"))


@program(jax_use_shardy_partitioner=False)
def the_older_partitioner_with_a_partly_manual_map() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        local = lambda x: lax.psum(x.sum(1), "x")  # noqa: E731
        return jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P(), axis_names={"x"})(x)

    return f(put(values((8, 4)), over, "x", "y"))


@program(jax_debug_nans=True)
def nans_looked_for() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_check_tracer_leaks=True)
def leaks_looked_for() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_enable_checks=True)
def internal_checks() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_traceback_filtering="off")
def whole_tracebacks() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_include_full_tracebacks_in_locations=False)
def short_locations() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_traceback_in_locations_limit=0)
def no_locations() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_exec_time_optimization_effort=0.5)
def more_effort() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_disable_most_optimizations=True)
def few_optimizations() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_numpy_rank_promotion="raise")
def ranks_as_they_are() -> Any:
    f = jax.jit(lambda x: x - x.mean(0, keepdims=True))
    return f(grid(values((8, 4))))


@program(jax_hlo_source_file_canonicalization_regex=".*/tests/")
def shorter_file_names() -> Any:
    return jax.jit(lambda x, w: model(x, w))(
        grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")
    )


@program(jax_log_compiles=True)
def compilations_are_logged() -> Any:
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    listener = Listener()
    logger = logging.getLogger("jax")
    logger.addHandler(listener)
    try:
        x = grid(values((8, 4)))
        found = jax.jit(lambda x: (x * 3).sum(0))(x)
    finally:
        logger.removeHandler(listener)
    compiled = [text for text in told if text.startswith("Compiling")]
    finished = [text for text in told if "Finished XLA compilation" in text]
    return found, len(compiled), len(finished)


@program(jax_dump_ir_modes="stablehlo")
def dumped_programs() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        try:
            found = jax.jit(lambda x: (x * 5).sum(0))(grid(values((8, 4))))
        finally:
            jax.config.update("jax_dump_ir_to", "")
        texts = [path.read_text() for path in Path(folder).glob("*.mlir")]
    return found, len(texts), ["sdy.mesh" in text for text in texts]


@program
def profiling() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x: (x * 7).sum(0))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            with jax.profiler.TraceAnnotation("a step"):
                found = jax.block_until_ready(f(x))
            with jax.profiler.StepTraceAnnotation("train", step_num=1):
                again = jax.block_until_ready(f(x))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return found, again, len(files) > 0


@program
def memory_profiles() -> Any:
    total = jax.jit(lambda x: x.sum(0))(grid(values((8, 4))))
    return total, len(jax.profiler.device_memory_profile()) > 0


@program
def events_of_monitoring() -> Any:
    seen: list[str] = []

    def listen(event: str, seconds: float, **options: Any) -> None:
        seen.append(event.rpartition("/")[2])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = jax.jit(lambda x: (x * 9).sum(0))(grid(values((8, 4))))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    names = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
    return found, {name: seen.count(name) for name in names}


@program
def compile_time_values() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            n = int(jnp.sum(jnp.arange(4)))
        return x.sum(0) * n

    return f(grid(values((8, 4))))


@program
def contexts_of_users() -> Any:
    if not hasattr(jax, "make_user_context"):
        raise Skip("this JAX lacks jax.make_user_context")
    context = jax.make_user_context(default_value=0)
    f = jax.jit(lambda x: x.sum(0) * context.value)
    x = grid(values((8, 4)))
    with compilations() as count:
        with context(1):
            one = f(x)
        with context(2):
            two = f(x)
    return one, two, count


@program
def asynchronous_errors_end_one_program_only() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x: x.sum(0))
    return f(x), [np.asarray(f(x * k)) for k in range(3)]
