"""Train two layers on handwritten digits with PopXL, on replicas of a pipeline of two IPUs.

    gpusim run examples/ports/popxl_digits.py
    poprun --num-instances 2 --num-replicas 4 --ipus-per-replica 2 \\
        python examples/ports/popxl_digits.py

Each layer has an IPU. While the second trains on one micro-batch, the first goes ahead with the
next one. After all micro-batches of a step, each replica updates its shard of the weights by Adam:
shards and moments are remote variables, and come to the IPU for the update only.
"""

import argparse

import numpy as np
import popdist
import popxl
from popxl import ops
from popxl.ops import collectives, var_updates
from popxl.transforms import autodiff
from popxl.transforms.autodiff import ExpectedConnectionType
from sklearn.datasets import load_digits

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class First(popxl.Module):
    def build(self, x: popxl.Tensor, features: int) -> popxl.Tensor:
        self.W = popxl.graph_input((x.shape[-1], features), x.dtype, "W")
        self.b = popxl.graph_input((features,), x.dtype, "b")
        return ops.gelu(x @ self.W + self.b)


class Second(popxl.Module):
    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        self.W = popxl.graph_input((x.shape[-1], 10), x.dtype, "W")
        self.b = popxl.graph_input((10,), x.dtype, "b")
        probabilities = ops.softmax(x @ self.W + self.b, axis=-1)
        return ops.nll_loss(probabilities, labels)


class Stage:
    """A layer, its gradient, and its parameters, all on one IPU."""

    def __init__(self, ir, ipu, layer, inputs, weights, **settings):
        self.ipu = ipu
        self.forward = ir.create_graph(layer, *inputs, **settings)
        self.parameters = [layer.W, layer.b]
        required = self.parameters if ipu == 0 else [self.forward.inputs[0], *self.parameters]
        self.backward = autodiff(self.forward, grads_required=required)
        with popxl.ipu(ipu):
            self.weights = [popxl.variable(w, name=f"W{ipu}{w.ndim}") for w in weights]
            self.sums = [
                popxl.variable(np.zeros_like(w), name=f"sum{ipu}{w.ndim}") for w in weights
            ]
            self.steps = [popxl.variable(0.0, name=f"step{ipu}{w.ndim}") for w in weights]
        self.buffers = []
        for w in weights:
            buffer = popxl.replica_sharded_buffer(w.shape, popxl.float32, entries=3)
            for entry, data in enumerate((w, np.zeros_like(w), np.zeros_like(w))):
                popxl.remote_replica_sharded_variable(
                    data, buffer, entry, name=f"{entry} of W{ipu}{w.ndim}"
                )
            self.buffers.append(buffer)

    def run(self, weights, *inputs):
        """The output, and what the gradient needs of this call apart from the weights."""
        with popxl.ipu(self.ipu):
            given = dict(zip(self.parameters, weights))
            site = ops.call_with_info(self.forward, *inputs, inputs_dict=given)
        stash = [site.graph_to_parent(tensor) for tensor in self.stashed()]
        return site.outputs[0], stash

    def expected(self):
        return zip(self.backward.graph.inputs, self.backward.expected_inputs)

    def stashed(self):
        found = [(c.fwd_tensor, c.connection_type) for _, c in self.expected()]
        forward = [tensor for tensor, kind in found if kind == ExpectedConnectionType.Fwd]
        return [tensor for tensor in forward if tensor not in self.parameters]

    def run_backward(self, weights, sums, gradient, stash):
        """Add up the gradients of the weights; return that of the input, if there is one."""
        values = dict(zip(self.stashed(), stash)) | dict(zip(self.parameters, weights))
        given = {
            tensor: values[c.fwd_tensor]
            if c.connection_type == ExpectedConnectionType.Fwd
            else gradient
            for tensor, c in self.expected()
        }
        with popxl.ipu(self.ipu):
            *before, dW, db = ops.call(self.backward.graph, inputs_dict=given)
            for total, found in zip(sums, (dW, db)):
                var_updates.accumulate_(total, found)
        return before

    def update(self, rate, micro_batches):
        """Adam on this replica's shards, and the whole weights from all replicas' shards."""
        for weight, total, step, buffer in zip(self.weights, self.sums, self.steps, self.buffers):
            with popxl.ipu(self.ipu):
                gradient = collectives.replicated_reduce_scatter(
                    total, "mean", configure_output_for_replicated_tensor_sharding=True
                )
                gradient = gradient * (1 / micro_batches)
                own, m, v = (ops.remote_load(buffer, entry) for entry in range(3))
                var_updates.accumulate_moving_average_(m, gradient, BETA1)
                var_updates.accumulate_moving_average_square_(v, gradient, BETA2)
                change = var_updates.adam_updater(
                    m, v, time_step=step, beta1=BETA1, beta2=BETA2, epsilon=EPSILON
                )
                ops.scaled_add_(own, change * rate[self.ipu], b=-1.0)
                for entry, value in enumerate((own, m, v)):
                    ops.remote_store(buffer, entry, value)
                var_updates.copy_var_update_(weight, collectives.replicated_all_gather(own))
                var_updates.accumulator_zero_(total)


class Training:
    """The Ir that trains for one step of a number of micro-batches."""

    def __init__(self, args, weights):
        replication = "popdist" if popdist.isPopdistEnvSet() else args.replicas
        self.ir = ir = popxl.Ir(replication=replication)
        ir.num_host_transfers = args.micro_batches
        with ir.main_graph, popxl.in_sequence():
            self.images = popxl.h2d_stream((args.micro_batch, 64), popxl.float32, "images")
            self.labels = popxl.h2d_stream((args.micro_batch,), popxl.int32, "labels")
            self.losses = popxl.d2h_stream((), popxl.float32, "losses")
            self.rates = []
            for ipu in (0, 1):
                with popxl.ipu(ipu):
                    self.rates.append(popxl.variable(args.lr, popxl.float32, f"rate{ipu}"))
            x = popxl.TensorSpec((args.micro_batch, 64), popxl.float32)
            hidden = popxl.TensorSpec((args.micro_batch, args.hidden), popxl.float32)
            classes = popxl.TensorSpec((args.micro_batch,), popxl.int32)
            self.first = Stage(ir, 0, First(), [x], weights[:2], features=args.hidden)
            self.second = Stage(ir, 1, Second(), [hidden, classes], weights[2:])

            # The first micro-batch fills the pipeline.
            hidden, labels, *stash = self.fill(self.first.weights)
            inputs = [hidden, labels, stash, *self.all_weights(), *self.all_sums()]
            if args.micro_batches > 1:
                loop = ir.create_graph(self.tick, *inputs)
                hidden, labels, *stash = ops.repeat(loop, args.micro_batches - 1, *inputs)
            self.drain(hidden, labels, stash, *self.all_weights(), *self.all_sums())
            self.first.update(self.rates, args.micro_batches)
            self.second.update(self.rates, args.micro_batches)

    def all_weights(self):
        return [self.first.weights, self.second.weights]

    def all_sums(self):
        return [self.first.sums, self.second.sums]

    def fill(self, weights):
        """The first stage on the next micro-batch: its output, the labels, and its stash."""
        with popxl.ipu(0):
            x = ops.host_load(self.images)
        with popxl.ipu(1):
            labels = ops.host_load(self.labels)
        hidden, stash = self.first.run(weights, x)
        return [ops.ipu_copy(hidden, 1, 0), labels, *stash]

    def drain(self, hidden, labels, stash, first, second, first_sums, second_sums):
        """The second stage, and then the gradient of the first, on the micro-batch before."""
        loss, second_stash = self.second.run(second, hidden, labels)
        with popxl.ipu(1):
            ops.host_store(self.losses, loss)
            one = popxl.constant(1.0, popxl.float32)
        (gradient,) = self.second.run_backward(second, second_sums, one, second_stash)
        self.first.run_backward(first, first_sums, ops.ipu_copy(gradient, 0, 1), stash)

    def tick(
        self,
        hidden: popxl.Tensor,
        labels: popxl.Tensor,
        stash: list[popxl.Tensor],
        first: list[popxl.Tensor],
        second: list[popxl.Tensor],
        first_sums: list[popxl.TensorByRef],
        second_sums: list[popxl.TensorByRef],
    ):
        """Both stages at once, each on a micro-batch of its own."""
        following = self.fill(first)
        self.drain(hidden, labels, stash, first, second, first_sums, second_sums)
        return following


class Inference:
    """The Ir that counts the digits which are classified right."""

    def __init__(self, args, images, labels):
        self.data = images, labels.astype(np.int32)
        self.ir = popxl.Ir()
        with self.ir.main_graph:
            self.images = popxl.h2d_stream(images.shape, popxl.float32, "images")
            self.classes = popxl.d2h_stream(labels.shape, popxl.int32, "classes")
            shapes = [(64, args.hidden), (args.hidden,), (args.hidden, 10), (10,)]
            self.weights = [popxl.variable(np.zeros(shape, np.float32)) for shape in shapes]
            W1, b1, W2, b2 = self.weights
            x = ops.host_load(self.images)
            scores = ops.gelu(x @ W1 + b1) @ W2 + b2
            ops.host_store(self.classes, ops.cast(ops.argmax(scores, dim=-1), popxl.int32))

    def accuracy(self, weights):
        with popxl.Session(self.ir, "ipu_model") as session:
            session.write_variables_data(dict(zip(self.weights, weights)))
            found = session.run({self.images: self.data[0]})[self.classes]
        return float(np.mean(found == self.data[1]))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a replica, in a step")
    parser.add_argument("--hidden", type=int, default=49, help="shards of it need padding")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args(arguments)

    popdist.init()
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    draw = np.random.default_rng(0)
    order = draw.permutation(len(images))
    training, held_out = order[:1437], order[1437:]
    weights = [
        draw.normal(0, 64**-0.5, (64, args.hidden)).astype(np.float32),
        np.zeros(args.hidden, np.float32),
        draw.normal(0, args.hidden**-0.5, (args.hidden, 10)).astype(np.float32),
        np.zeros(10, np.float32),
    ]

    program = Training(args, weights)
    replicas, local = program.ir.replication_factor, program.ir.instance_replication_factor
    offset = popdist.getReplicaIndexOffset()
    shape = args.micro_batches, replicas, args.micro_batch
    batch = int(np.prod(shape))
    with popxl.Session(program.ir, "ipu_hw") as session:
        for epoch in range(args.epochs):
            rate = np.float32(args.lr * 0.5 * (1 + np.cos(np.pi * epoch / args.epochs)))
            session.write_variables_data(dict.fromkeys(program.rates, rate))
            losses = []
            dealt = draw.permutation(training)
            for start in range(0, len(dealt) - batch + 1, batch):
                chosen = dealt[start : start + batch].reshape(shape)[:, offset : offset + local]
                if local == 1:
                    chosen = chosen[:, 0]
                outputs = session.run(
                    {
                        program.images: images[chosen],
                        program.labels: labels[chosen].astype(np.int32),
                    }
                )
                losses.append(outputs[program.losses].mean())
            if popdist.getInstanceIndex() == 0:
                print(f"epoch {epoch}: loss {np.mean(losses):.3f}", flush=True)
        trained = session.get_tensors_data(program.first.weights + program.second.weights)
    if popdist.getInstanceIndex() == 0:
        inference = Inference(args, images[held_out], labels[held_out])
        values = [trained[tensor] for tensor in program.first.weights + program.second.weights]
        print(f"{inference.accuracy(values):.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
