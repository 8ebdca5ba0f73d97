"""A popxl program that trains two layers on scikit-learn's digits, in four ways; and in NumPy.

Run as a script, under poprun too, it prints a digest of the weights that each way arrives at; it
takes the data from a file, as importing scikit-learn in every instance takes longer than all else.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Literal

import numpy as np

import gpusim.popxl as popxl
from gpusim import popdist
from gpusim.popxl import ops
from gpusim.popxl.ops import collectives, var_updates
from gpusim.popxl.transforms import autodiff

STEPS, REPLICAS, BATCH, HIDDEN = 6, 4, 8, 15  # 15: shards of 15 elements need padding
RATE, BETA1, BETA2, EPSILON = 1e-2, 0.9, 0.999, 1e-7

Way = Literal["all reduce", "sharded state", "remote", "remote, pipelined"]
WAYS: tuple[Way, ...] = ("all reduce", "sharded state", "remote", "remote, pipelined")
Arrays = dict[str, np.ndarray]


def data() -> tuple[np.ndarray, np.ndarray]:
    """Images (steps, replicas, batch, 64) and labels (steps, replicas, batch)."""
    if len(sys.argv) > 1 and sys.argv[1].endswith(".npz"):
        with np.load(sys.argv[1]) as saved:
            return saved["images"], saved["labels"]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    count = STEPS * REPLICAS * BATCH
    leading = STEPS, REPLICAS, BATCH
    scaled = (images[:count] / 16).astype(np.float32)
    return scaled.reshape(*leading, 64), labels[:count].astype(np.int32).reshape(leading)


def first_weights() -> Arrays:
    draw = np.random.default_rng(0).normal
    shapes = {"W1": (64, HIDDEN), "b1": (HIDDEN,), "W2": (HIDDEN, 10), "b2": (10,)}
    return {name: draw(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


# ---------------------------------------------------------------- by hand


def by_hand() -> Arrays:
    """The weights after all steps, on all replicas' batches together, in float64."""
    weights = {name: value.astype(np.float64) for name, value in first_weights().items()}
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step, (images, labels) in enumerate(zip(*data(), strict=True), start=1):
        x, y = images.reshape(-1, 64).astype(np.float64), labels.reshape(-1)
        hidden = np.maximum(x @ weights["W1"] + weights["b1"], 0)
        logits = hidden @ weights["W2"] + weights["b2"]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        d_logits = (probabilities - np.eye(10)[y]) / len(y)
        d_hidden = (d_logits @ weights["W2"].T) * (hidden > 0)
        gradients = {
            "W1": x.T @ d_hidden,
            "b1": d_hidden.sum(axis=0),
            "W2": hidden.T @ d_logits,
            "b2": d_logits.sum(axis=0),
        }
        for name, g in gradients.items():
            m[name] = BETA1 * m[name] + (1 - BETA1) * g
            v[name] = BETA2 * v[name] + (1 - BETA2) * g * g
            corrected = np.sqrt(v[name] / (1 - BETA2**step)) + EPSILON
            weights[name] -= RATE * m[name] / (1 - BETA1**step) / corrected
    return weights


# ---------------------------------------------------------------- in popxl


class Linear(popxl.Module):
    def build(self, x: popxl.Tensor, features: int) -> popxl.Tensor:
        self.W = popxl.graph_input((x.shape[-1], features), x.dtype, "W")
        self.b = popxl.graph_input((features,), x.dtype, "b")
        return x @ self.W + self.b


class Net(popxl.Module):
    def __init__(self) -> None:
        self.first, self.second = Linear(), Linear()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.second(ops.relu(self.first(x, HIDDEN)), 10)

    def inputs(self) -> dict[str, popxl.Tensor]:
        first, second = self.first, self.second
        return {"W1": first.W, "b1": first.b, "W2": second.W, "b2": second.b}


def gradients_of(
    ir: popxl.Ir, x: popxl.Tensor, labels: popxl.Tensor
) -> Callable[[dict[str, popxl.Tensor], popxl.Tensor, popxl.Tensor], dict[str, popxl.Tensor]]:
    """A function that adds the calls of the forward and the backward graph."""
    net = Net()
    forward = ir.create_graph(net, x)
    backward = autodiff(forward)
    inputs = net.inputs()

    def calls(
        weights: dict[str, popxl.Tensor], x: popxl.Tensor, labels: popxl.Tensor
    ) -> dict[str, popxl.Tensor]:
        given = {inputs[name]: weight for name, weight in weights.items()}
        site = ops.call_with_info(forward, x, inputs_dict=given)
        probabilities = ops.softmax(site.outputs[0], axis=-1)
        _, d_logits = ops.nll_loss_with_softmax_grad(probabilities, labels)
        known = backward.inputs_dict(site)
        grads = ops.call_with_info(backward.graph, d_logits, inputs_dict=known)
        found = backward.fwd_graph_ins_to_grad_parent_outs(grads)
        return {name: found[tensor] for name, tensor in inputs.items()}

    return calls


def term(
    m: popxl.TensorByRef, v: popxl.TensorByRef, step: popxl.TensorByRef, g: popxl.Tensor
) -> popxl.Tensor:
    """Adam's updater term; the moments and the step are counted on in place."""
    m = var_updates.accumulate_moving_average_(m, g, BETA1)
    v = var_updates.accumulate_moving_average_square_(v, g, BETA2)
    return var_updates.adam_updater(m, v, time_step=step, beta1=BETA1, beta2=BETA2, epsilon=EPSILON)


class State:
    """Weights and Adam's state as variables, whole or in shards, on the chip or off it."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.variables: dict[str, popxl.Variable] = {}
        self.m: dict[str, popxl.Tensor] = {}
        self.v: dict[str, popxl.Tensor] = {}
        self.steps: dict[str, popxl.Tensor] = {}
        self.buffers: dict[str, popxl.RemoteBuffer] = {}
        for name, value in first_weights().items():
            self._add(name, value)

    def _add(self, name: str, value: np.ndarray) -> None:
        zeros = np.zeros_like(value)
        if self.way.startswith("remote"):
            buffer = self.buffers[name] = popxl.remote_buffer(value.shape, popxl.float32, 3)
            for entry, data in enumerate((value, zeros, zeros)):
                made = popxl.remote_variable(data, buffer, entry, name=f"{name} {entry}")
                self.variables.setdefault(name, made)
        else:
            self.variables[name] = popxl.variable(value, name=name)
            for kept in (self.m, self.v):
                if self.way == "sharded state":
                    kept[name] = popxl.replica_sharded_variable(zeros)[1]
                else:
                    kept[name] = popxl.variable(zeros)
        self.steps[name] = popxl.variable(0.0, name=f"{name} step")

    def load(self) -> dict[str, popxl.Tensor]:
        """The weights, for one step."""
        if not self.buffers:
            return dict(self.variables)
        for name, buffer in self.buffers.items():
            self.m[name], self.v[name] = (ops.remote_load(buffer, entry) for entry in (1, 2))
        return {name: ops.remote_load(buffer, 0) for name, buffer in self.buffers.items()}

    def update(self, name: str, weight: popxl.Tensor, gradient: popxl.Tensor) -> None:
        """One step of Adam on the mean of the replicas' gradients."""
        if self.way == "sharded state":
            reduced = collectives.replicated_reduce_scatter(
                gradient, "mean", configure_output_for_replicated_tensor_sharding=True
            )
        else:
            reduced = collectives.replicated_all_reduce(gradient, "mean")
        state = self.m[name], self.v[name], self.steps[name]
        graph = popxl.gir().create_graph(term, *state, reduced)
        (x,) = ops.call(graph, *state, reduced)
        if self.way == "sharded state":
            x = collectives.replicated_all_gather(x)
        weight = ops.scaled_add_(weight, x, b=-RATE)
        if self.buffers:
            for entry, value in enumerate((weight, *state[:2])):
                ops.remote_store(self.buffers[name], entry, value)


def train(
    way: Way, replication: int | Literal["popdist"] = REPLICAS, *, one_by_one: bool = False
) -> Arrays:
    """The weights after all steps; fewer replicas have larger batches."""
    ir = popxl.Ir(replication=replication)
    ir.num_host_transfers = STEPS
    batch = REPLICAS * BATCH // ir.replication_factor
    ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence():
        images = popxl.h2d_stream((batch, 64), popxl.float32, "images")
        classes = popxl.h2d_stream((batch,), popxl.int32, "labels")
        state = State(way)
        x, labels = ops.host_load(images), ops.host_load(classes)
        calls = gradients_of(ir, x, labels)

        def step(x: popxl.Tensor, labels: popxl.Tensor) -> None:
            weights = state.load()
            gradients = calls(weights, x, labels)
            for name, weight in weights.items():
                state.update(name, weight, gradients[name])

        def step_and_load(
            x: popxl.Tensor, labels: popxl.Tensor, steps: list[popxl.TensorByRef]
        ) -> tuple[popxl.Tensor, popxl.Tensor]:
            """A step of the pipeline: it trains on one batch, and loads the next."""
            state.steps = dict(zip(state.variables, steps, strict=True))
            following = ops.host_load(images), ops.host_load(classes)
            step(x, labels)
            return following

        if way == "remote, pipelined":
            steps = list(state.steps.values())
            loop = ir.create_graph(step_and_load, x, labels, steps)
            x, labels = ops.repeat(loop, STEPS - 1, x, labels, steps)
            state.steps = dict(zip(state.variables, steps, strict=True))
            step(x, labels)
        else:
            step(x, labels)
            for _ in range(STEPS - 1):
                step(ops.host_load(images), ops.host_load(classes))
    leading = STEPS, ir.replication_factor, batch
    all_images, all_labels = (each.reshape(*leading, *each.shape[3:]) for each in data())
    first = popdist.getReplicaIndexOffset() if replication == "popdist" else 0
    own = slice(first, first + ir.instance_replication_factor)
    given = {images: all_images[:, own], classes: all_labels[:, own]}
    if ir.instance_replication_factor == 1:
        given = {stream: value[:, 0] for stream, value in given.items()}
    with popxl.Session(ir, "ipu_hw") as session:
        session.run(given)
    return {name: session.get_tensor_data(tensor) for name, tensor in state.variables.items()}


def digest(weights: Arrays) -> str:
    return hashlib.sha256(b"".join(value.tobytes() for value in weights.values())).hexdigest()


if __name__ == "__main__":
    popdist.init()
    digests = [digest(train(way, "popdist")) for way in WAYS]
    print(popdist.getInstanceIndex(), *digests, file=sys.stdout, flush=True)
