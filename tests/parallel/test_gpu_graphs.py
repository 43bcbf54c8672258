"""The graphs of steps on GPUs: what crosses devices, and what cuDNN wants."""

import dataclasses
import itertools
import os

import pytest
import tensorflow as tf
import traced
from marks import slow
from networks import KINDS

from benchmarks import proofs
from benchmarks.graphs import optimized, placement
from benchmarks.graphs.operations import running
from towers.config import choices
from towers.parallel import reduce

CONVOLUTIONS = (
    "Conv2D",
    "Conv2DBackpropInput",
    "Conv2DBackpropFilter",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
)
MIN_EPSILON = 1e-5  # CUDNN_BN_MIN_EPSILON

STRATEGIES = {
    "one GPU": {"num_towers": 1},
    "auto": {"strategy": "auto"},
    "replicated": {"strategy": "replicated"},
    "model_parallel": {"strategy": "model_parallel", "group_size": 2},
}

CASES = [(name, "bfloat16") for name in KINDS]
for name in ("cnn", "resnet20", "convnext_atto", "vit_tiny"):
    CASES += [(name, "float32"), (name, "float16")]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network whose step, with the input, was traced for one GPU."""

    model: str
    precision: str
    every: list[placement.Placement]

    def of_types(self, *types: str) -> list[tf.Operation]:
        return [p.op for p in self.every if p.on_gpu and p.op.type in types]


# Module scope: the tests of a network follow each other, and then it is freed.
@pytest.fixture(scope="module", params=[CASES[-1], *(slow(x) for x in CASES[:-1])])
def network(request):
    model, precision = request.param
    trained = traced.on_gpus(
        model=model, precision=precision, num_towers=1, input="stream"
    )
    [call] = trained.calls()
    return Network(model, precision, list(placement.placements(call.graph)))


def test_convolutions_have_channels_last(network):
    some = network.of_types(*CONVOLUTIONS)
    assert some
    assert {op.get_attr("data_format") for op in some} == {b"NHWC"}
    # Winograd's convolutions, which are for CPUs, have some too.
    products = network.of_types("BatchMatMulV2")
    assert all("attention" in op.name for op in products)
    compute = {"float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}
    assert {op.outputs[0].dtype for op in some} == {compute[network.precision]}


def test_fused_batch_normalization_is_what_cudnn_takes(network):
    for op in network.of_types("FusedBatchNormV3", "FusedBatchNormGradV3"):
        assert op.get_attr("epsilon") >= MIN_EPSILON
        assert op.get_attr("U") == tf.float32
        assert op.get_attr("T") in (tf.float32, tf.bfloat16, tf.float16)
        assert op.get_attr("data_format") == b"NHWC"


def test_xla_compiles_the_gelu_alone_without_compile_xla(network):
    compiled = {p.op.type for p in network.every if p.compiled}
    assert bool(compiled) == bool(network.of_types("Erf"))
    assert not compiled & {"Conv2D", "MatMul", "FusedBatchNormV3"}
    assert all(p.compiled for p in network.every if p.op.type == "Erf")


@pytest.mark.parametrize("compiler,most", [("none", 349), ("xla", 5)])
def test_a_step_of_one_gpu_has_few_launches(compiler, most):
    """With XLA they are the whole step, and the choice of its images."""
    fields = {"model": "resnet20", "precision": "bfloat16", "augment": "pad_crop_flip"}
    fields |= {"batch_size": 128, "num_towers": 1, "input": "resident"}
    step = optimized.optimized(traced.on_gpus(**fields, compile=compiler))
    launches = [op for op in step.on_gpus() if op.type not in proofs.NO_LAUNCH]
    assert len(launches) <= most
    assert not step.to_gpu + step.to_host


def test_muon_updates_kernels_of_one_shape_together():
    """The 19 convolutions have 6 shapes; each needs eleven products."""
    trained = traced.on_gpus(num_towers=1, model="resnet20", optimizer="muon")
    products = optimized.optimized(trained).on_gpus("MatMul", "BatchMatMulV2")
    outside = [op for op in products if "tower_0/" not in op.name]
    assert len(outside) == 11 * 6


def test_a_tower_computes_no_float64_but_single_numbers(network):
    large = {
        p.where
        for p in network.every
        for tensor in p.op.outputs
        if p.on_gpu and tensor.dtype == tf.float64 and tensor.shape.num_elements() != 1
    }
    assert not large


GUARDED = {
    "precision": "float16",
    "on_nonfinite": "skip",
    "accumulate_steps": 2,
    "schedule": "plateau",
}
PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"


@pytest.mark.parametrize(
    "model,options,transposes",
    [
        ("resnet20", {}, 0),
        slow("resnet20", {"deterministic": True}, 5 * 19),
        slow("densenet_bc_100_12", {}, 5 * 99),  # 12 channels, 36 and so on
        slow("resnet20", {"precision": "float32"}, 0),  # Grappler turns it to NCHW
    ],
)
def test_batch_normalization_in_16_bits_does_not_transpose(
    model, options, transposes, monkeypatch
):
    monkeypatch.delenv(PERSISTENT, raising=False)
    fields = {"model": model, "num_towers": 1, "precision": "bfloat16"}
    step = optimized.optimized(traced.on_gpus(**fields | options))
    is_persistent = os.environ.get(PERSISTENT) == "1"
    assert step.num_hidden_transposes(is_persistent) == transposes


AUGMENTED = {"augment": "random_resized_crop", "color_jitter": 0.4, "mixup": 0.2}
FAST_CASE = ("auto", "resident", GUARDED)


@pytest.mark.parametrize(
    "strategy,source,options",
    [
        case if case == FAST_CASE else slow(*case)
        for case in (
            *itertools.product(STRATEGIES, ["resident", "stream"], [{}, GUARDED]),
            ("one GPU", "resident", AUGMENTED),
            *(("one GPU", "resident", {"policy": x}) for x in choices.POLICIES),
        )
    ],
)
def test_neither_the_host_nor_a_gpu_waits_for_the_other(strategy, source, options):
    """No edge of an optimized step leads from the host to a GPU, or back.

    Towers that share a copy on the host are in test_crossings.
    """
    fields = {"model": "lenet", "augment": "pad_crop_flip", "input": source}
    fields |= STRATEGIES[strategy]
    step = optimized.optimized(traced.on_gpus(**fields | options))
    assert not step.to_gpu + step.to_host


def test_all_operations_of_an_nccl_all_reduce_run(monkeypatch):
    """TensorFlow prunes operations without readers, and the others wait forever.

    A tower that XLA compiles is one operation, whose vectors need names of their own.
    GPUs wait for each other only in these operations.
    """
    monkeypatch.setattr(reduce, "BUCKET_BYTES", 600_000)
    fields = {"strategy": "replicated", "all_reduce": "nccl", "num_towers": 3}
    trained = traced.on_gpus(model="lenet", **fields)
    body, trainer = traced.loop_body(trained), trained.trainer
    inspect = trainer._inspect.get_concrete_function(0, trainer.feed.batches_of(0))
    for graph in (body, inspect.graph):
        every = [op for op in graph.get_operations() if op.type == "NcclAllReduce"]
        kept = [op for op in running(graph) if op.type == "NcclAllReduce"]
        names = [op.get_attr("shared_name") for op in kept]
        assert len(kept) == len(every)
        assert set(map(names.count, names)) == {3}
    assert len(kept) > 3  # Several buckets.
    assert not [x for x in optimized.optimized(trained).between_gpus if "Nccl" in x]
