"""PopXL's ops of neural networks: products, convolutions, pools, norms, losses, images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gpusim.popxl as popxl
from gpusim.popxl import fp8_utils, ops
from tests.popxl import popxl_cases
from tests.popxl.popxl_cases import HALF, SINGLE, Case, Floats, Integers


def case(name, build, reference, *inputs, **options):
    return Case(name, build, inputs, reference, **options)


def product(lhs, rhs):
    return case(f"matmul of {lhs} and {rhs}", ops.matmul, torch.matmul, Floats(lhs), Floats(rhs))


PRODUCTS = [
    product((3, 4), (4, 5)),
    product((2, 3, 4), (4, 5)),
    product((4,), (4, 5)),
    product((2, 3, 4), (4,)),
    product((4,), (4,)),
    product((5, 1, 3, 4), (2, 4, 2)),
    case("@ of attention", lambda q, k, v: ops.softmax(q @ k.transpose((0, 2, 1)), -1) @ v,
         lambda q, k, v: (q @ k.transpose(1, 2)).softmax(-1) @ v,
         Floats((2, 7, 4)), Floats((2, 7, 4)), Floats((2, 7, 3)), scale=3),
]  # fmt: skip


def padded(t, padding):
    rank = t.dim() - 2
    pairs = [(padding[i], padding[i + rank]) for i in range(rank)]
    return F.pad(t, [n for pair in reversed(pairs) for n in pair])


IMAGE, WEIGHT = Floats((2, 4, 7, 6)), Floats((6, 4, 3, 2))

CONVOLUTIONS = [
    case("conv", ops.conv, F.conv2d, IMAGE, WEIGHT),
    case("conv of a line", ops.conv, F.conv1d, Floats((2, 3, 9)), Floats((5, 3, 4))),
    case("conv of a volume", ops.conv, F.conv3d, Floats((1, 2, 4, 5, 3)), Floats((3, 2, 2, 3, 1))),
    case("conv with stride, padding and dilation",
         lambda t, w: ops.conv(t, w, (2, 1), (1, 0, 2, 1), (1, 2)),
         lambda t, w: F.conv2d(padded(t, (1, 0, 2, 1)), w, None, (2, 1), 0, (1, 2)),
         IMAGE, WEIGHT),
    case("conv in groups", lambda t, w: ops.conv(t, w, groups=2),
         lambda t, w: F.conv2d(t, w, groups=2), IMAGE, Floats((6, 2, 3, 2))),
    case("conv, padded to the same shape", lambda t, w: ops.conv(t, w, pad_type="same_upper"),
         lambda t, w: F.conv2d(padded(t, (1, 0, 1, 1)), w), IMAGE, WEIGHT),
    case("conv, same_lower", lambda t, w: ops.conv(t, w, pad_type="same_lower"),
         lambda t, w: F.conv2d(padded(t, (1, 1, 1, 0)), w), IMAGE, WEIGHT),
    case("conv_transpose", ops.conv_transpose, F.conv_transpose2d, IMAGE, Floats((4, 3, 2, 3))),
    case("conv_transpose with everything",
         lambda t, w: ops.conv_transpose(t, w, (2, 3), (1, 0, 1, 0), (2, 1), 2,
                                         output_padding=(1, 2)),
         lambda t, w: F.conv_transpose2d(t, w, None, (2, 3), (1, 0), (1, 2), 2, (2, 1)),
         IMAGE, Floats((4, 3, 2, 3))),
    case("conv_transpose to a shape",
         lambda t, w: ops.conv_transpose(t, w, (2, 2), output_shape=(13, 11)),
         lambda t, w: F.conv_transpose2d(t, w, None, (2, 2))[:, :, 1:, 1:],
         IMAGE, Floats((4, 3, 2, 2))),
    case("conv_transpose to a larger shape",
         lambda t, w: ops.conv_transpose(t, w, output_shape=(2, 3, 8, 8)),
         lambda t, w: F.pad(F.conv_transpose2d(t, w), (1, 1, 1, 0)), IMAGE, Floats((4, 3, 1, 1))),
]  # fmt: skip

APART = Floats((2, 3, 7, 6), apart=True)

POOLS = [
    case("average_pool", lambda t: ops.average_pool(t, (3, 2)),
         lambda t: F.avg_pool2d(t, (3, 2), 1), IMAGE),
    case("average_pool, padded", lambda t: ops.average_pool(t, (3, 3), (2, 2), (1, 1, 1, 1)),
         lambda t: F.avg_pool2d(t, 3, 2, 1, False, False), IMAGE),
    case("average_pool, rounded up",
         lambda t: ops.average_pool(t, (2, 2), (3, 3), ceil_mode=True),
         lambda t: F.avg_pool2d(t, 2, 3, 0, True, False), IMAGE),
    case("average_pool of a line", lambda t: ops.average_pool(t, (3,), padding=(1, 1)),
         lambda t: F.avg_pool1d(t, 3, 1, 1, False, False), Floats((2, 3, 8))),
    case("max_pool", lambda t: ops.max_pool(t, (2, 2), (2, 2)), lambda t: F.max_pool2d(t, 2),
         APART),
    case("max_pool, padded and spread",
         lambda t: ops.max_pool(t, (3, 2), (2, 1), (1, 1, 1, 1), dilation=(1, 2), ceil_mode=True),
         lambda t: F.max_pool2d(t, (3, 2), (2, 1), (1, 1), (1, 2), True), APART),
    case("max_pool of a volume", lambda t: ops.max_pool(t, (2, 2, 2), auto_pad="valid"),
         lambda t: F.max_pool3d(t, 2, 1), Floats((1, 2, 3, 4, 3), apart=True)),
]  # fmt: skip


def group_norm(t, weight, bias, groups):
    return F.group_norm(t, groups, weight, bias)


NORMS = [
    case("softmax", lambda t: ops.softmax(t, 1), lambda t: t.softmax(1), Floats((3, 5, 2))),
    case("group_norm", lambda t, w, b: ops.group_norm(t, w, b, 2),
         lambda t, w, b: F.group_norm(t, 2, w, b), IMAGE, Floats((4,)), Floats((4,)), scale=4),
    case("layer_norm", ops.layer_norm, lambda t, w, b: F.layer_norm(t, (8,), w, b),
         Floats((5, 8)), Floats((8,)), Floats((8,)), scale=4),
    case("batch_norm_inference", lambda t, s, b, m, v: ops.batch_norm_inference(t, s, b, m, v),
         lambda t, s, b, m, v: F.batch_norm(t, m, v, s, b), IMAGE, Floats((4,)), Floats((4,)),
         Floats((4,), wanted=False), Floats((4,), 0.5, 2, wanted=False), scale=3),
]  # fmt: skip

LOGITS, LABELS = Floats((6, 5)), Integers((6,), 0, 5)


def loss(**options):
    return lambda t, labels: ops.nll_loss(ops.softmax(t, -1), labels, **options)


def cross(**options):
    return lambda t, labels: F.cross_entropy(t, labels, **options)


LOSSES = [
    case("nll_loss", loss(), cross(), LOGITS, LABELS, scale=3),
    case("nll_loss as a sum", loss(reduction="sum"), cross(reduction="sum"), LOGITS, LABELS,
         scale=3),
    case("nll_loss of each", loss(reduction="none"), cross(reduction="none"), LOGITS, LABELS,
         scale=3),
    case("nll_loss without a label", loss(ignore_index=2), cross(ignore_index=2), LOGITS, LABELS,
         scale=3),
    case("nll_loss of logarithms",
         lambda t, labels: ops.nll_loss(t, labels, log_prob=True, reduction="sum"),
         lambda t, labels: F.nll_loss(t, labels, reduction="sum"), LOGITS, LABELS),
    case("nll_loss of more axes", loss(),
         lambda t, labels: F.cross_entropy(t.reshape(-1, 4), labels.reshape(-1)),
         Floats((2, 3, 4)), Integers((2, 3), 0, 4), scale=3),
]  # fmt: skip


def resized(mode, **options):
    def build(t):
        return ops.interpolate(t, (1.0, 1.0, 2.0, 1.5), mode, **options)

    return build


def interpolated(mode, **options):
    def reference(t):
        return F.interpolate(t, scale_factor=(2.0, 1.5), mode=mode, **options)

    return reference


def roi_align(t, rois, images):
    """By PyTorch's grid_sample: a bin's points one by one."""
    out = []
    for roi, image in zip(rois.tolist(), images.tolist(), strict=True):
        x1, y1, x2, y2 = (0.5 * place for place in roi)
        ys = y1 + (torch.arange(6) + 0.5) * max(y2 - y1, 1) / 6
        xs = x1 + (torch.arange(4) + 0.5) * max(x2 - x1, 1) / 4
        places = torch.stack(torch.meshgrid(ys, xs, indexing="ij")[::-1], -1).double()
        size = torch.tensor([t.shape[3] - 1, t.shape[2] - 1])
        grid = places.clip(torch.zeros(2), size) / size * 2 - 1
        points = F.grid_sample(t[image][None], grid[None], align_corners=True)
        out.append(F.avg_pool2d(points, 2))
    return torch.cat(out)


SQUARES = Floats((1, 2, 4, 6))
IMAGES = [
    case("interpolate to the nearest", resized("nearest", nearest_mode="floor",
                                               coordinate_transformation_mode="asymmetric"),
         interpolated("nearest"), SQUARES),
    case("interpolate to the nearest centre", resized("nearest", nearest_mode="round_prefer_ceil"),
         interpolated("nearest-exact"), SQUARES),
    case("interpolate linearly", resized("linear"), interpolated("bilinear"), SQUARES),
    case("interpolate between corners",
         resized("linear", coordinate_transformation_mode="align_corners"),
         interpolated("bilinear", align_corners=True), SQUARES),
    case("interpolate by cubics", resized("cubic"), interpolated("bicubic"), SQUARES, scale=2),
    case("interpolate a line to fewer", lambda t: ops.interpolate(t, (1.0, 1.0, 0.3), "linear"),
         lambda t: F.interpolate(t, scale_factor=0.3, mode="linear"), Floats((2, 2, 10))),
    case("roi_align", lambda t, r, i: ops.roi_align(t, r, i, (3, 2), 0.5, 2), roi_align,
         Floats((2, 3, 8, 9)), Floats((4, 4), 1, 15, wanted=False), Integers((4,), 0, 2), scale=6),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("case", PRODUCTS + CONVOLUTIONS + POOLS + NORMS + LOSSES + IMAGES, ids=str)
def test_values_and_gradients_are_pytorchs(case, dtype):
    popxl_cases.check(case, dtype)


def constants(build, *arrays, seeds=None):
    """What a program makes of constants, and of a seed for each of its replicas."""
    replicas = 1 if seeds is None else len(seeds)
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        given = [popxl.constant(array) for array in arrays]
        feeds = {}
        if seeds is not None:
            stream = popxl.h2d_stream((2,), popxl.uint32)
            given.append(ops.host_load(stream))
            feeds[stream] = np.squeeze(np.asarray(seeds, np.uint32))
        streams = [popxl_cases.stored(t) for t in popxl_cases.listed(build(*given))]
    with popxl.Session(ir, "ipu_model") as session:
        results = session.run(feeds)
    return [results[stream] for stream in streams]


def test_the_direct_gradient_is_that_of_loss_and_softmax():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 5)).astype(np.float32), rng.integers(0, 5, 6, np.int32)
    found, gradient = constants(
        lambda t, i: ops.nll_loss_with_softmax_grad(ops.softmax(t, 1), i, 3.0, 2), logits, labels
    )
    t = torch.tensor(logits, requires_grad=True)
    wanted = F.cross_entropy(t, torch.tensor(labels, dtype=torch.int64), ignore_index=2)
    (slope,) = torch.autograd.grad(wanted, t, torch.tensor(3.0))
    np.testing.assert_allclose(found, wanted.item(), 1e-5)
    np.testing.assert_allclose(gradient, slope, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_probability_of_zero_has_a_finite_loss(dtype):
    (found,) = constants(ops.nll_loss, np.array([[0, 1]], dtype), np.array([0], np.int32))
    assert np.isfinite(found) and found > 9


# Random numbers

SEEDS = [[1, 2], [1, 2], [3, 4], [5, 0]]


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
def test_replicas_with_equal_seeds_draw_equal_numbers_and_others_do_not(dtype):
    def build(seed):
        return ops.random_uniform(seed, (50,), -1, 3, dtype), ops.random_normal(
            seed, (50,), 2, 0.5, dtype
        )

    for found in constants(build, seeds=SEEDS):
        assert found.dtype == dtype.as_numpy()
        assert (found[0] == found[1]).all() and (found[0] != found[2]).any()
        again = constants(build, seeds=SEEDS[2:3])
        assert any(np.array_equal(found[2], each) for each in again)


def test_random_numbers_have_the_distribution_that_is_asked_for():
    uniform, normal = constants(
        lambda s: (ops.random_uniform(s, (20000,), -1, 3), ops.random_normal(s, (20000,), 2, 0.5)),
        seeds=[[7, 7]],
    )
    assert -1 <= uniform.min() < -0.99 and 2.99 < uniform.max() < 3
    assert abs(uniform.mean() - 1) < 5 * 4 / 12**0.5 / 20000**0.5
    assert abs(normal.mean() - 2) < 5 * 0.5 / 20000**0.5
    assert abs(normal.std() - 0.5) < 5 * 0.5 / 40000**0.5


def test_dropout_drops_what_its_seed_says_and_so_does_its_gradient():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        seeds = popxl.h2d_stream((2,), popxl.uint32)
        graph = ir.create_graph(
            lambda t, s: ops.dropout(t, s, 0.25),
            popxl.TensorSpec((4000,), SINGLE),
            popxl.TensorSpec((2,), popxl.uint32),
        )
        info = popxl.transforms.autodiff(graph)
        ones = popxl.constant(np.ones(4000, np.float32))
        call = ops.call_with_info(graph, ones, ops.host_load(seeds))
        (slope,) = ops.call(info.graph, ones, inputs_dict=info.inputs_dict(call))
        streams = [popxl_cases.stored(t) for t in (call.outputs[0], slope)]
    with popxl.Session(ir, "ipu_model") as session:
        results = session.run({seeds: np.array(SEEDS, np.uint32)})
    kept, gradient = (results[stream] for stream in streams)
    assert set(np.unique(kept)) == {0.0, np.float32(1 / 0.75)}
    assert abs((kept == 0).mean(axis=1) - 0.25).max() < 5 * (0.25 * 0.75 / 4000) ** 0.5
    assert np.array_equal(kept, gradient)
    assert np.array_equal(kept[0], kept[1]) and not np.array_equal(kept[0], kept[2])


def test_shaped_dropout_drops_whole_rows():
    (kept,) = constants(
        lambda t, s: ops.shaped_dropout(t, s, (200, 1), 0.5),
        np.ones((200, 3), np.float32),
        seeds=[[1, 1]],
    )
    assert set(np.unique(kept)) == {0.0, 2.0} and (kept == kept[:, :1]).all()


def test_split_seeds_are_unlike_each_other_and_the_same_every_time():
    first, second, third = constants(lambda s: ops.split_random_seed(s, 3), seeds=[[1, 2]])
    assert len({tuple(seed.tolist()) for seed in (first, second, third, np.array([1, 2]))}) == 4
    (again,) = constants(
        lambda s: ops.create_random_seed(s, popxl.constant(1, popxl.uint32)), seeds=[[1, 2]]
    )
    assert again.tolist() == second.tolist()


def test_what_is_no_seed_is_refused():
    with popxl.Ir().main_graph:
        seed = popxl.constant([1, 2], popxl.int32)
        with pytest.raises(ValueError, match=r"seed Tensor must be shape=\(2,\) dtype=uint32"):
            ops.random_uniform(seed, (3,))
        with pytest.raises(ValueError, match=r"seed Tensor must be shape=\(2,\) dtype=uint32"):
            ops.split_random_seed(seed)
        with pytest.raises(ValueError, match="ratio of dropped elements"):
            seed = popxl.constant([1, 2], popxl.uint32)
            ops.dropout(popxl.constant([1.0]), seed, 1.0)


# 8-bit floats

FLOAT8 = [popxl.float8_143, popxl.float8_152]


@pytest.mark.parametrize("float8", FLOAT8, ids=["143", "152"])
@pytest.mark.parametrize("scale", [-4, 0, 3])
def test_casts_on_the_device_are_those_of_the_host(float8, scale):
    given = np.random.default_rng(0).normal(0, 2, 300).astype(np.float16)
    ir = popxl.Ir()
    with ir.main_graph:
        log2_scale = popxl.constant(scale, popxl.int32)
        eighths = ops.pow2scale_cast_to_fp8(popxl.constant(given), log2_scale, float8)
        back = ops.pow2scale_cast_from_fp8(eighths, log2_scale, HALF)
        streams = [popxl_cases.stored(eighths), popxl_cases.stored(back)]
    with popxl.Session(ir) as session:
        results = session.run()
    wanted = fp8_utils.host_pow2scale_cast_to_fp8(given, float8, scale)
    np.testing.assert_array_equal(results[streams[0]].view(np.uint8), wanted.view(np.uint8))
    np.testing.assert_array_equal(
        results[streams[1]], fp8_utils.host_pow2scale_cast_from_fp8(wanted, HALF, scale)
    )


@pytest.mark.parametrize("float8", FLOAT8, ids=["143", "152"])
def test_products_of_8_bit_floats_are_scaled(float8):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.normal(size=(3, 8)), rng.normal(size=(8, 2))
    image, weight = rng.normal(size=(1, 2, 5, 5)), rng.normal(size=(3, 2, 3, 3))
    exact = [x.astype(float8.as_numpy()).astype(np.float64) for x in (lhs, rhs, image, weight)]
    ir = popxl.Ir()
    with ir.main_graph:
        scale = popxl.constant(2, popxl.int32)
        tensors = [popxl.constant(x, float8) for x in (lhs, rhs, image, weight)]
        turned = [popxl.constant(weight.swapaxes(0, 1), float8)]
        made = [
            ops.matmul_pow2scaled(*tensors[:2], scale),
            ops.conv_pow2scaled(*tensors[2:], scale),
            ops.conv_transpose_pow2scaled(tensors[2], *turned, scale),
        ]
        streams = [popxl_cases.stored(t) for t in made]
    with popxl.Session(ir) as session:
        results = [session.run()[stream] for stream in streams]
    image, weight = torch.tensor(exact[2]), torch.tensor(exact[3])
    wanted = [
        exact[0] @ exact[1] * 4,
        F.conv2d(image, weight) * 4,
        F.conv_transpose2d(image, weight.swapaxes(0, 1)) * 4,
    ]
    for mine, theirs in zip(results, wanted, strict=True):
        assert mine.dtype == np.float16
        np.testing.assert_allclose(mine, theirs, 2e-3, 2e-2)


@pytest.mark.parametrize("float8", FLOAT8, ids=["143", "152"])
@pytest.mark.parametrize("power", [-18, 0, 12])
def test_the_scale_of_least_error_keeps_numbers_in_range(float8, power):
    given = np.random.default_rng(0).normal(0, 2.0**power, 1000).astype(np.float32)
    metric, scale = fp8_utils.host_fp8_mse_scale(given, float8)
    assert 0 < metric < np.mean(given.astype(np.float64) ** 2)
    assert scale == fp8_utils.host_fp8_mse_scale_pb(given, float8)

    def error(log2_scale):
        eighths = fp8_utils.host_pow2scale_cast_to_fp8(given, float8, log2_scale)
        back = fp8_utils.host_pow2scale_cast_from_fp8(eighths, popxl.float32, -log2_scale)
        return float(((back - given) ** 2).mean())

    every = [error(each) for each in range(-31, 32)]
    assert error(scale) <= 2 * min(each for each in every if not np.isnan(each))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_scale_is_0_where_the_numbers_fill_the_format(dtype):
    for ends, float8 in (([0.00098, 240], FLOAT8[0]), ([2**-17, 57344], FLOAT8[1])):
        given = np.array(ends).astype(dtype)
        assert fp8_utils.host_fp8_mse_scale(given, float8)[1] == 0
        assert fp8_utils.host_fp8_mse_scale(given * dtype(0.5), float8)[1] in (0, 1)
    source = fp8_utils.ieee_fp16_denorms if dtype is np.float16 else fp8_utils.ieee_fp32_no_denorms
    candidate = fp8_utils.CandidateConfig(
        FLOAT8[1], fp8_utils.ieee_fp32_no_denorms, fp8_utils.float8_152_def, dtype
    )
    assert candidate.quantisation_error == 4.0 ** (2 - source.num_mantissa_bits)


def test_casts_round_to_zero_and_pass_gradients_on():
    popxl_cases.check(
        Case("cast there and back", lambda t: ops.cast(ops.cast(t, popxl.float16), SINGLE),
             [Floats((4,))], lambda t: t.half().double(), scale=100), SINGLE)  # fmt: skip
    (found,) = constants(lambda t: ops.cast(t, popxl.int32), np.array([1.7, -1.7], np.float32))
    assert found.tolist() == [1, -1]


ERRORS = [
    (lambda t: ops.matmul(t, t), ValueError, "cannot be multiplied as matrices"),
    (lambda t: ops.matmul(t, t, partials_type=popxl.int32), ValueError, "must be float16 or float"),
    (lambda t: ops.matmul_pow2scaled(t, t, t), TypeError, "Scaled matmul operands"),
    (lambda t: ops.conv_pow2scaled(t, t, t), TypeError, "Scaled conv operands"),
    (lambda t: ops.conv(t, t), ValueError, "needs data"),
    (lambda t: ops.conv(t, t, pad_type="full"), ValueError, "pad type full is not valid"),
    (lambda t: ops.max_pool(t, (2,), out_pads=(1,)), NotImplementedError, "out_pads"),
    (lambda t: ops.nll_loss(t, t), ValueError, "labels must have the shape"),
    (lambda t: ops.nll_loss(t, t, reduction="max"), ValueError, "Must choose from: mean, sum, no"),
    (lambda t: ops.softmax(t, 2), ValueError, "axis 2 is out of range"),
    (lambda t: ops.group_norm(t, t, t, 2), ValueError, "do not split into 2 groups"),
    (lambda t: ops.interpolate(t, (1, 1), "area"), ValueError, "interpolate type area is not"),
    (lambda t: ops.cast(t, popxl.float8_143), TypeError, "please consider pow2scale_cast_to_fp8"),
    (lambda t: ops.pow2scale_cast_to_fp8(t, t, popxl.float8_143), ValueError, "a scalar tensor"),
    (lambda t: ops.pow2scale_cast_to_fp8(t, ops.sum(t), popxl.float8_143), TypeError, "int32"),
    (lambda t: ops.code_copy(None, "executable", "buffer"), NotImplementedError, "not yet"),
]


@pytest.mark.parametrize(("build", "error", "text"), ERRORS)
def test_what_cannot_be_done_is_an_error_that_says_why(build, error, text):
    with popxl.Ir().main_graph:
        t = popxl.constant(np.zeros((1, 3), np.float32))
        with pytest.raises(error, match=text):
            build(t)
