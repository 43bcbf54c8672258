"""Weights in both directions between our networks and those of timm, torchvision and
transformers; the preprocessing of timm's weights."""

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

try:
    torchvision = pytest.importorskip("torchvision")
except RuntimeError:
    # A torchvision for GPUs on a torch without CUDA lacks its operators, which no
    # classifier needs; its import asks for their names alone.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float least) -> Tensor")
    torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402
import torch_files  # noqa: E402
from exported import CLASS_NAMES, random_run  # noqa: E402
from PIL import Image  # noqa: E402
from timm.data import create_transform, resolve_data_config  # noqa: E402
from timm.layers import resample_abs_pos_embed  # noqa: E402

from towers.config.choices import MODELS  # noqa: E402
from towers.data.files.image import read_image  # noqa: E402
from towers.exporting.writers import write_safetensors  # noqa: E402
from towers.pretrained import hub  # noqa: E402
from towers.pretrained.initial import read_variables  # noqa: E402
from towers.pretrained.torch_names import resample_positions  # noqa: E402
from towers.pretrained.weights import open_weights  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of others
]

# Ours, the name at timm or, with a colon, at torchvision, and the sides of images.
NETWORKS = [
    ("resnet18_imagenet", "torchvision:resnet18", 96),
    ("resnet34", "resnet34", 96),
    ("resnet50", "torchvision:resnet50", 96),
    ("resnet101", "resnet101", 64),
    ("resnet152", "resnet152", 64),
    ("deit_tiny", "vit_tiny_patch16_224", 224),
    ("deit_small", "deit_small_patch16_224", 224),
    ("deit_base", "vit_base_patch16_224", 224),
    ("tf_efficientnet_lite0", "tf_efficientnet_lite0", 96),
    ("tf_efficientnet_lite4", "tf_efficientnet_lite4", 96),
    ("efficientnet_lite0", "efficientnet_lite0", 96),
    ("tf_efficientnet_b0", "tf_efficientnet_b0", 96),
    ("efficientnet_b0", "efficientnet_b0", 96),
    ("mobilenet_v3_small", "mobilenetv3_small_100", 96),
    ("mobilenet_v3_large", "mobilenetv3_large_100", 96),
    ("tf_mobilenet_v3_small", "tf_mobilenetv3_small_100", 97),
    ("tf_mobilenet_v3_large", "tf_mobilenetv3_large_100", 96),
    ("mobilenet_v4_conv_small", "mobilenetv4_conv_small", 96),
    ("mobilenet_v4_conv_medium", "mobilenetv4_conv_medium", 97),
    ("tiny_vit_5m", "tiny_vit_5m_224", 224),
    ("tiny_vit_11m", "tiny_vit_11m_224", 96),
    ("tiny_vit_21m", "tiny_vit_21m_224", 160),
    ("convnext_tiny", "convnext_tiny", 96),
    ("convnext_atto", "convnext_atto", 64),
    ("convnextv2_nano", "convnextv2_nano", 96),
    ("dinov2_small", "vit_small_patch14_dinov2", 518),
    ("dinov2_base_reg", "vit_base_patch14_reg4_dinov2", 518),
    ("dinov3_small", "vit_small_patch16_dinov3", 256),
    ("dinov3_base", "vit_base_patch16_dinov3", 256),
    ("bit_resnet50x1", "resnetv2_50x1_bit", 97),
]


def create_theirs(name, **options):
    library, _, member = name.rpartition(":")
    if library:
        return torchvision.models.get_model(member, **options).eval()
    return timm.create_model(name, **options).eval()


def draw(network):
    """Gives a network values that are as large as those of a trained one."""
    rng = torch.Generator().manual_seed(0)
    for name, values in network.state_dict().items():
        if not values.is_floating_point():
            continue
        if name.endswith("running_var"):
            values.uniform_(0.5, 1.5, generator=rng)
        elif values.ndim in (1, 3):
            mean = 0.5 if name.endswith(("weight", "gamma")) else 0.0
            values.normal_(mean, 0.1, generator=rng)
        else:
            values.normal_(0, (2 / values[0].numel()) ** 0.5, generator=rng)


def largest_difference(ours, theirs, size, images=2):
    """That of a logit, as a share of the largest."""
    inputs = np.random.default_rng(0).normal(size=(images, size, size, 3))
    inputs = inputs.astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(inputs.transpose(0, 3, 1, 2))).numpy()
    logits = ours(inputs, training=False).numpy()
    return np.abs(logits - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("ours,theirs,size", NETWORKS)
def test_logits_are_those_of_their_network_which_an_export_gives_back(
    ours, theirs, size, tmp_path
):
    network = create_theirs(theirs, num_classes=len(CLASS_NAMES))
    draw(network)
    path = str(tmp_path / "weights.pth")
    torch.save({"epoch": 3, "state_dict": network.state_dict()}, path)
    run = random_run(ours, image_shape=(size, size, 3), width=1.0)
    model = run.network()
    values = read_variables(path, ours, model)
    assert values.keys() == {variable.path for variable in model.variables}
    for variable in model.variables:
        variable.assign(values[variable.path])
    assert largest_difference(model, network, size) < 1e-4

    write_safetensors(tmp_path / "model.safetensors", model, run)
    again = create_theirs(theirs, num_classes=len(CLASS_NAMES))
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    again.load_state_dict(state, strict=True)
    for name, expected in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], expected), name


def vit_of_torchvision():
    return torchvision.models.VisionTransformer(
        224, 16, 12, 3, 192, 768, num_classes=len(CLASS_NAMES)
    )


def vit_of_transformers():
    class Logits(transformers.ViTForImageClassification):
        def forward(self, images):
            return super().forward(images).logits

    config = transformers.ViTConfig(
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=len(CLASS_NAMES),
    )
    return Logits(config)


@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize("create", [vit_of_torchvision, vit_of_transformers])
def test_a_vit_of_other_names_has_its_logits(create, is_published, tmp_path):
    network = create().eval()
    draw(network)
    path = str(tmp_path / "model.safetensors")
    if create is vit_of_transformers and is_published:
        network.save_pretrained(tmp_path)  # by other names than its state dict's
    else:
        state = network.state_dict()
        if is_published:  # before torchvision renamed them
            for new, old in ("mlp.0", "mlp.linear_1"), ("mlp.3", "mlp.linear_2"):
                state = {name.replace(new, old): x for name, x in state.items()}
        safetensors.torch.save_file(state, path)
    run = random_run("deit_tiny", image_shape=(224, 224, 3), width=1.0)
    model = run.network()
    values = read_variables(path, "deit_tiny", model)
    assert values.keys() == {variable.path for variable in model.variables}
    for variable in model.variables:
        variable.assign(values[variable.path])
    assert largest_difference(model, network, 224) < 1e-4


PRETRAINED = [name for name, row in MODELS.items() if row.pretrained]


@pytest.mark.parametrize("name", PRETRAINED)
def test_images_are_read_as_by_timm(name):
    row = MODELS[name].pretrained
    theirs = timm.get_pretrained_cfg(row.timm)
    settings = resolve_data_config(pretrained_cfg=theirs.to_dict())
    transform = create_transform(**settings)
    side = int(row.size / row.crop)  # of the resized image, twice as large in the file
    pixels = np.random.default_rng(0).integers(0, 256, (2 * side, 4 * side, 3))
    image = Image.fromarray(pixels.astype(np.uint8))
    file = io.BytesIO()
    image.save(file, "PNG")
    *rest, standardize = transform.transforms
    for step in rest:
        image = step(image)
    expected = np.asarray(image).transpose(1, 2, 0) * 255
    read = read_image(
        file.getvalue(),
        (row.size, row.size, 3),
        center_crop=row.size / side,
        interpolation=row.interpolation,
    )
    assert theirs.crop_pct == row.crop and theirs.interpolation == row.interpolation
    if (side - row.size) % 2 == 0:  # else timm's crop is half a pixel off the middle
        assert np.abs(read - expected).max() <= 1 + 1e-3
    if "lite" not in name or name == "efficientnet_lite0":
        np.testing.assert_allclose(row.mean, standardize.mean, atol=1e-6)
        np.testing.assert_allclose(row.std, standardize.std, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("grid", [(10, 10), (24, 24), (9, 16)])
def test_positions_are_resampled_as_by_timm(grid, num_tokens):
    rng = torch.Generator().manual_seed(0)
    positions = torch.randn(1, 196 + num_tokens, 8, generator=rng)
    options = {"num_prefix_tokens": num_tokens}
    [expected] = resample_abs_pos_embed(positions, list(grid), **options).numpy()
    result = resample_positions(positions[0].numpy(), grid, num_tokens)
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ],
)
def test_any_view_that_torch_saves_is_read(dtype, tmp_path):
    whole = torch.arange(24.0).reshape(4, 6).to(getattr(torch, dtype))
    views = {"a": whole[1:3, 2:].T, "b": whole, "c": whole[:0]}
    if whole.is_floating_point():
        views["b"] = torch.nn.Parameter(whole)
    torch.save(views, tmp_path / "a.pth")
    with open_weights(str(tmp_path / "a.pth")) as weights:
        for name, view in views.items():
            expected = view.detach().float().numpy()
            values = np.float32(weights.named[name].read())
            np.testing.assert_array_equal(values, expected)


def test_torch_reads_the_files_of_the_tests(tmp_path):
    whole = np.arange(24, dtype=np.float32)
    views = {"a": torch_files.Tensor(whole, 3, (4, 2), (1, 6)), "b": 3}
    torch_files.save(views, tmp_path / "a.pth")
    values = torch.load(tmp_path / "a.pth", weights_only=True)
    expected = whole[3:15].reshape(2, 6)[:, :4].T
    np.testing.assert_array_equal(values["a"].numpy(), expected)
    assert values["b"] == 3


@pytest.mark.parametrize("name", hub._OF_TORCHVISION)
def test_weights_by_the_name_of_torchvision_are_its_own(name):
    model, _, tag = name.partition(".")
    weights = torchvision.models.get_model_weights(model)[tag]
    ours, file, _ = hub._OF_TORCHVISION[name]
    assert weights.url == hub.PYTORCH + file
    theirs, options = (
        weights.transforms(),
        hub.options_of_weights(f"torchvision/{name}"),
    )
    assert [options["image_size"]] == theirs.crop_size
    assert options["center_crop"] == theirs.crop_size[0] / theirs.resize_size[0]
    assert options["interpolation"] == theirs.interpolation.value
    moments = [",".join(map(repr, x)) for x in (theirs.mean, theirs.std)]
    assert options["standardize"] == ":".join(moments)
    assert ours in MODELS
