"""The graphs of the networks as cuDNN wants them: layouts, channels, types."""

import dataclasses

import pytest
import tensorflow as tf
import traced
from marks import slow

from towers.config import choices
from towers.parallel import placement
from towers.parallel.devices import Devices
from towers.parallel.kernels import find_kernel, host_arguments

CONVOLUTIONS = (
    "Conv2D",
    "Conv2DBackpropInput",
    "Conv2DBackpropFilter",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
)
LEAST_EPSILON = 1e-5  # CUDNN_BN_MIN_EPSILON

# Channels that are no multiple of 8, for which tensor cores are not used in full: the
# colors of the images, and LeNet as published.
COLORS, LENET = {3}, {20, 50}


FAST = [("cnn", "float32"), ("speedrun", "bfloat16"), ("resnet20", "float16")]


def networks_and_precisions():
    for model in choices.MODELS:
        if model.endswith(choices.FAMILY):
            continue
        for precision in choices.PRECISIONS:
            if (model, precision) in FAST:
                yield pytest.param((model, precision), id=f"{model}-{precision}")
            else:
                yield slow((model, precision), id=f"{model}-{precision}")


@dataclasses.dataclass(frozen=True)
class Network:
    """A network whose step was traced for one GPU.

    Attributes:
        every: all operations of the step, with the input.
    """

    model: str
    precision: str
    every: list[placement.Placement]

    def of_types(self, *types: str) -> list[tf.Operation]:
        """The operations of some types on the GPU."""
        return [p.op for p in self.every if p.on_gpu and p.op.type in types]


# Of the module, so that the tests of a network follow each other and it is then freed.
@pytest.fixture(scope="module", params=list(networks_and_precisions()))
def network(request):
    model, precision = request.param
    trained = traced.on_gpus(
        model=model, precision=precision, num_towers=1, input="stream"
    )
    [call] = trained.trainer.calls()
    return Network(model, precision, list(placement.placements(call.graph)))


def test_convolutions_have_channels_last(network):
    some = network.of_types(*CONVOLUTIONS)
    assert some
    assert {op.get_attr("data_format") for op in some} == {b"NHWC"}
    compute = {"float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}
    assert {op.outputs[0].dtype for op in some} == {compute[network.precision]}


def test_channels_are_multiples_of_eight(network):
    odd = set()
    for op in network.of_types("Conv2D"):
        *_, channels, filters = op.inputs[1].shape
        odd |= {n for n in (channels, filters) if n % 8}
    assert odd == (COLORS | LENET if network.model == "lenet" else COLORS)


@pytest.mark.parametrize("kind,num_gpus", [("CPU", 2), ("GPU", 0)])
@pytest.mark.parametrize(
    "fields",
    [
        {"model": "speedrun", "early_sizes": "24:0.5"},
        {"model": "cnn", "width": 2.0, "strategy": "model_parallel", "group_size": 2},
    ],
)
def test_the_towers_and_not_the_machine_decide_how_to_convolve(
    monkeypatch, fields, kind, num_gpus
):
    """On a CPU by Winograd, as products of many matrices; a GPU has convolutions."""
    cpus = tf.config.list_physical_devices("CPU")
    gpus = [tf.config.PhysicalDevice(f"GPU:{i}", "GPU") for i in range(num_gpus)]
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else cpus
    )
    devices = Devices(kind, (f"/{kind}:0", f"/{kind}:1"))
    trained = traced.on_gpus(devices, input="stream", **fields)
    for call in [*trained.trainer.calls(), trained.evaluation()]:
        types = {p.op.type for p in placement.placements(call.graph, call.device)}
        assert ("BatchMatMulV2" in types) == (kind == "CPU")


def test_fused_batch_normalization_is_what_cudnn_takes(network):
    for op in network.of_types("FusedBatchNormV3", "FusedBatchNormGradV3"):
        assert op.get_attr("epsilon") >= LEAST_EPSILON
        assert op.get_attr("U") == tf.float32
        assert op.get_attr("T") in (tf.float32, tf.bfloat16, tf.float16)
        assert op.get_attr("data_format") == b"NHWC"


def test_a_tower_computes_no_float64_but_scalars(network):
    large = {
        p.where
        for p in network.every
        for tensor in p.op.outputs
        if p.on_gpu and tensor.dtype == tf.float64 and tensor.shape.rank != 0
    }
    assert not large


def test_float64_of_an_evaluation_is_one_number_for_each_image_or_class():
    """Exact counts over any number of images, and the mean of logits in 16 bits."""
    trained = traced.on_gpus(num_towers=1, precision="float16", tta="translate")
    size, classes = trained.config.batch_size, 10
    shapes = {
        tuple(tensor.shape)
        for p in placement.placements(trained.evaluation().graph)
        for tensor in p.op.outputs
        if p.on_gpu and tensor.dtype == tf.float64
    }
    assert shapes == {(), (size,), (size, classes)}


def test_only_the_finite_check_waits_for_a_gpu(network):
    """A condition that a GPU computes is waited for by the host."""
    [check] = waiting(network.every)
    assert check.op.inputs[0].op.type == "IsFinite"
    assert check.op.inputs[0].shape == []


@pytest.mark.parametrize("precision", ["float32", slow("float16")])
def test_skipping_a_step_waits_for_nothing_else(precision):
    trained = traced.on_gpus(
        model="lenet", precision=precision, input="stream", on_nonfinite="skip"
    )
    [call] = trained.trainer.calls()
    every = list(placement.placements(call.graph))
    [check] = waiting(every)
    assert check.op.inputs[0].op.type == "IsFinite"
    branches = [p for p in every if p.op.type in ("If", "StatelessIf")]
    assert len(branches) > 1  # may it be skipped?


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_no_loop_asks_a_gpu_whether_to_go_on(accumulate_steps):
    trained = traced.on_gpus(accumulate_steps=accumulate_steps, input="stream")
    [call] = trained.trainer.calls()
    conditions = [
        p
        for p in placement.placements(call.graph)
        if p.path and p.path[-1].endswith(".cond") and p.op.type != "Placeholder"
    ]
    loops = {p.path for p in conditions}
    assert len(loops) == accumulate_steps
    on_gpu = [p for p in conditions if p.on_gpu and p.op.type != "Const"]
    assert not [p.where for p in on_gpu if is_computed_on_a_gpu(p.op)]


def test_making_a_resident_batch_waits_for_no_gpu():
    trained = traced.on_gpus(input="resident")
    [call] = trained.trainer.calls()
    [check] = waiting(list(placement.placements(call.graph)))
    assert check.op.inputs[0].op.type == "IsFinite"


def waiting(every):
    """The branches whose condition depends on what a GPU computes."""
    known = {(p.path, p.op.name): p for p in every}
    branches = [p for p in every if p.op.type in ("If", "StatelessIf")]
    return [p for p in branches if depends_on_a_gpu(p, known)]


def depends_on_a_gpu(branch, known):
    pending, seen = [branch.op.inputs[0].op], set()
    while pending:
        op = pending.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if known[branch.path, op.name].on_gpu and is_computed_on_a_gpu(op):
            return True
        pending += [tensor.op for tensor in op.inputs]
    return False


def is_computed_on_a_gpu(op):
    """False where its results lie in host memory, as most int32 does."""
    if op.type in ("Placeholder", "Const"):
        return False
    kernel = find_kernel(op)
    return len(host_arguments(op, kernel)[1]) < len(op.outputs)
