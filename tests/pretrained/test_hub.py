"""Weights by name: from a local server of the Hub's paths, torchvision's, a folder."""

import hashlib
import http.server
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from containers import Server, serving
from exported import random_run
from PIL import Image
from processes import run
from safetensors.numpy import save_file

from towers.cli.recipes import RECIPES, config_of_flags
from towers.config import FIELDS, Config
from towers.config.choices import MODELS
from towers.errors import ConfigError, DataError
from towers.exporting.writers import write_safetensors
from towers.models.create import create_model
from towers.pretrained import hub
from towers.pretrained.initial import open_source
from towers.pretrained.standardization import with_options_of_weights

NAME, COMMIT, TOKEN = "timm/deit_tiny_patch16_224", "c0ffee" + "0" * 34, "hf_secret"
PREPROCESSING = {
    "input_size": [3, 224, 224],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}
CONFIG = {"architecture": "deit_tiny_patch16_224", "pretrained_cfg": PREPROCESSING}

# Prints the options and the file of named weights, or an error as the programs do. What
# is tried again is tried at once.
LOOK_UP = """
import json, sys, time
time.sleep = lambda secs: None
from towers import console, errors
from towers.pretrained import hub
try:
    options, file = hub.options_of_weights(sys.argv[1]), hub.fetch(sys.argv[1])
except errors.TowersError as error:
    sys.exit(errors.report("program", error))
console.flush()
print(json.dumps([options, file]))
"""


class HubRequest(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if "/resolve/" not in self.path:
            return self.answer(404, {})
        owner, name, _, revision, file = self.path.strip("/").split("/")
        path, server = self.server.folder / owner / name / file, self.server
        host = self.headers["Host"].partition(":")[0]
        about = self.headers["Range"], self.headers["Authorization"]
        server.requests.append((self.command, host, file, *about))
        status, kind = server.refused.get(file, (0, ""))
        if file == hub.WEIGHTS and revision != COMMIT:  # main has moved on
            status, kind = 404, "RevisionNotFound"
        elif not status and not path.is_file():
            status, kind = 404, "EntryNotFound"
        if status:
            return self.answer(status, {"X-Error-Code": kind})
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        if file == hub.WEIGHTS:
            etag = server.etag or etag
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        if server.moves and file == hub.WEIGHTS and host == "127.0.0.1":
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            headers["Location"] = f"http://localhost:{server.server_port}{self.path}"
            return self.answer(302, headers)
        if wanted := self.headers["Range"]:
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = (
                f"bytes {first}-{len(content) - 1}/{len(content)}"
            )
            return self.answer(206, headers, content[first:])
        return self.answer(200, headers, content)

    def do_HEAD(self):
        self.do_GET()

    def answer(self, status, headers, content=b""):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: self.server.cut_after])
            if self.server.cut_after and self.path.endswith(hub.WEIGHTS):
                self.server.cut_after, self.close_connection = None, True

    def log_message(self, *_):
        pass


class Hub(Server):
    """A server of OWNER/NAME/FILE under the paths of the Hub.

    Attributes:
        requests: (method, name of the host, file, range, authorization) of each one.
        refused: name of a file -> status, and the kind of error in the Hub's header.
        cut_after: number of bytes after which the next body of weights ends.
        etag: of the weights, in place of their SHA-256.
        moves: whether weights are on another host.
    """

    handler = HubRequest
    cut_after, etag, moves = None, None, False

    def __init__(self, folder):
        super().__init__(folder)
        self.refused = {}

    def bodies(self):
        return [x for x in self.requests if x[0] == "GET" and x[2] == hub.WEIGHTS]


def write_repository(folder, **config):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {"head.weight": rng.normal(size=(100, 1000)).astype(np.float32)}
    save_file(arrays, folder / hub.WEIGHTS)
    (folder / hub.CONFIG).write_text(json.dumps(CONFIG | config))
    return folder


@pytest.fixture
def server(tmp_path):
    write_repository(tmp_path / f"{NAME}.fb_in1k")
    with serving(tmp_path, Hub) as server:
        yield server


def look_up(server, name=NAME, **environ):
    home = str(server.folder / "home")
    environ = {"HF_ENDPOINT": server.url, "HF_HOME": home, "HF_TOKEN": TOKEN} | environ
    ended = run("-c", LOOK_UP, name, **environ)
    assert TOKEN not in ended.stdout + ended.stderr
    return ended


def found(ended):
    options, (path, facts) = json.loads(ended.stdout.splitlines()[-1])
    return options, path, facts


def refused(ended, exit_code):
    assert ended.returncode == exit_code, ended.stderr
    [line] = [x for x in ended.stderr.splitlines() if x.startswith("program: ")]
    assert line == ended.stderr.splitlines()[-1]
    return line


def test_a_second_fetch_asks_for_no_body_and_the_cache_needs_no_network(server):
    options, path, facts = found(look_up(server))
    content = (server.folder / f"{NAME}.fb_in1k" / hub.WEIGHTS).read_bytes()
    with open(path, "rb") as file:
        assert file.read() == content
    digest = hashlib.sha256(content).hexdigest()
    assert facts == {"revision": COMMIT, "sha256": digest}
    assert options == {
        "model": "deit_tiny",
        "image_size": "224x224",
        "center_crop": 0.9,
        "interpolation": "bicubic",
        "fit": "auto",
        "standardize": "0.485,0.456,0.406:0.229,0.224,0.225",
    }
    assert len(server.bodies()) == 1 and server.bodies()[0][-1] == f"Bearer {TOKEN}"
    server.requests.clear()
    assert found(look_up(server)) == (options, path, facts)
    assert {method for method, *_ in server.requests} == {"HEAD"}
    server.requests.clear()
    pinned = f"hf://{NAME}.fb_in1k@{COMMIT}"
    assert found(look_up(server, pinned)) == (options, path, facts)
    assert found(look_up(server, HF_HUB_OFFLINE="1")) == (options, path, facts)
    assert server.requests == []


@pytest.mark.row(64)
def test_a_fetch_that_is_cut_goes_on_where_it_ended(server):
    place = server.folder / f"{NAME}.fb_in1k" / hub.WEIGHTS
    save_file({"x": np.arange(3 * 2**20, dtype=np.float32)}, place)
    server.cut_after = 11 * 2**20  # parts of 10 MiB are kept
    _, path, facts = found(look_up(server))
    ranges = [x[3] for x in server.bodies()]
    assert ranges == [None, f"bytes={10 * 2**20}-"]
    assert facts["sha256"] == hashlib.sha256(place.read_bytes()).hexdigest()
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"]


@pytest.mark.row(64)
def test_a_file_with_another_hash_is_refused_and_fetched_again(server):
    server.etag = "0" * 64
    assert "SHA-256" in refused(look_up(server), 3)
    server.etag = None
    found(look_up(server))
    assert len(server.bodies()) == 2


@pytest.mark.row(64)
@pytest.mark.parametrize(
    "file,status,kind,exit_code,text",
    [
        (hub.CONFIG, 401, "RepoNotFound", 3, "needs HF_TOKEN"),
        (hub.CONFIG, 404, "RepoNotFound", 3, "did you mean 'timm/deit_tiny_patch16"),
        (hub.CONFIG, 403, "GatedRepo", 3, "its terms are accepted"),
        (hub.CONFIG, 404, "RevisionNotFound", 3, "no revision main"),
        ("removed", 0, "", 3, "no model.safetensors"),
        (hub.CONFIG, 503, "", 75, "--init_from=FOLDER"),
    ],
)
def test_each_refusal_of_the_server_is_a_line(
    server, file, status, kind, exit_code, text
):
    if file == "removed":  # there are pickles alone
        (server.folder / f"{NAME}.fb_in1k" / hub.WEIGHTS).unlink()
    server.refused[file] = status, kind
    line = refused(look_up(server), exit_code)
    assert text in line and f"{server.url}/{NAME}.fb_in1k" in line


@pytest.mark.row(64)
def test_the_token_goes_to_the_hub_alone(server):
    server.moves = True
    _, path, _ = found(look_up(server))
    assert os.path.getsize(path) > 100_000
    by_host = {host: authorization for _, host, _, _, authorization in server.requests}
    assert by_host == {"127.0.0.1": f"Bearer {TOKEN}", "localhost": None}


@pytest.mark.row(64)
def test_without_a_network_the_line_names_the_file_and_its_place(server):
    line = refused(look_up(server, HF_HUB_OFFLINE="1"), 75)
    url = f"{server.url}/{NAME}.fb_in1k/resolve/main/config.json"
    assert url in line and "--init_from=FOLDER" in line and "HF_HUB_OFFLINE" in line
    assert server.requests == []


def local(tmp_path, **config):
    return str(write_repository(tmp_path / "local", **config))


def test_a_folder_like_a_repository_decides_the_options_of_a_run(tmp_path):
    facts = PREPROCESSING | {"input_size": [3, 256, 320], "mean": [0.5], "std": [0.25]}
    facts |= {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}
    names = {"1": "dog", "0": "cat"}
    path = local(tmp_path, pretrained_cfg=facts, label_names=names)
    unset = Config(dataset="image_folder", init_from=path)
    config = with_options_of_weights(unset, None)
    values = {
        x: getattr(config, x) for x in FIELDS if x in hub.options_of_weights(path)
    }
    assert values == {
        "model": "deit_tiny",
        "image_size": "256x320",
        "center_crop": 1.0,
        "interpolation": "bilinear",
        "fit": "stretch",
        "standardize": "0.5:0.25",
    }
    network = create_model("lenet", image_shape=(28, 28, 1), num_classes=2)
    trainer = SimpleNamespace(model=network)
    with open_source(path, "lenet", {}, trainer) as weights:
        assert weights.class_names == ("cat", "dog")
    given = {"image_size": 96, "center_crop": 0.5, "standardize": "data", "fit": "crop"}
    given |= {"interpolation": "bicubic", "model": "deit_tiny"}
    config = Config(dataset="image_folder", init_from=path, **given)
    assert with_options_of_weights(config, None) == config


def test_the_weights_of_a_command_replace_what_its_recipe_has(tmp_path):
    path = local(tmp_path)
    flags = {"dataset": "image_folder", "init_from": path}

    def command(**more):
        options = {"weights_options": hub.options_of_weights}
        return config_of_flags(None, RECIPES, flags | more, **options)

    config, origins = command().config, command().origins
    assert (config.model, config.image_size) == ("deit_tiny", 224)
    assert {origins["model"], origins["image_size"]} == {"the trained weights"}
    assert config.linear_probe and config.center_crop == 0
    assert with_options_of_weights(config, None).center_crop == 0.9
    cropped = command(center_crop=0.5, image_size=96).config
    assert (cropped.center_crop, cropped.image_size) == (0.5, 96)
    assert command(fit="pad").config.center_crop == 0
    with pytest.raises(ConfigError, match="--model=deit_tiny"):
        command(model="resnet50")
    other = Config(model="deit_tiny", init_from=path, image_size=64)
    stored = config_of_flags(
        None, RECIPES, flags, "run", lambda _: other, weights_options=lambda *_: 1 / 0
    )
    assert stored.config.image_size == 64


def test_a_network_that_contradicts_the_weights_is_refused(tmp_path):
    path = local(tmp_path)
    with pytest.raises(ConfigError, match=r"resnet50.*deit_tiny_patch16_224.*=deit_ti"):
        hub.options_of_weights(path, "resnet50")
    assert hub.options_of_weights(path, "net.py:create")["model"] == "net.py:create"
    (tmp_path / "local" / hub.CONFIG).write_text('{"architecture": "seresnet50"}')
    with pytest.raises(ConfigError, match=r"seresnet50.*--model=NAME"):
        hub.options_of_weights(path)
    options = hub.options_of_weights(path, "deit_small")
    assert (options["model"], options["center_crop"]) == ("deit_small", 0.9)
    (tmp_path / "local" / hub.CONFIG).write_text("[]")
    with pytest.raises(DataError, match=r"config.json"):
        hub.options_of_weights(path)


@pytest.mark.parametrize("name", [k for k, row in MODELS.items() if row.pretrained])
def test_the_network_of_each_name_of_timm_is_known(name, tmp_path):
    timm = MODELS[name].pretrained.timm.partition(".")[0]
    assert hub.options_of_weights(local(tmp_path, architecture=timm))["model"] == name


def test_names_of_torchvision_are_fetched_into_the_cache_of_pytorch(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("TOWERS_CACHE_DIR", str(tmp_path / "cache"))
    digest = hashlib.sha256(b"weights").hexdigest()
    row = "resnet50", f"resnet50-{digest[:8]}.pth", 232
    monkeypatch.setitem(hub._OF_TORCHVISION, "resnet50.IMAGENET1K_V2", row)
    name, place = "torchvision/resnet50.IMAGENET1K_V2", tmp_path / row[1]
    cached = tmp_path / "torch/hub/checkpoints" / row[1]
    with serving(tmp_path) as server:
        monkeypatch.setattr(hub, "PYTORCH", f"{server.url}/")
        with pytest.raises(DataError, match=str(cached)):
            hub.fetch(name)
        place.write_bytes(b"other")
        with pytest.raises(DataError, match="SHA-256"):
            hub.fetch(name)
        place.write_bytes(b"weights")
        assert hub.fetch(name)[0] == str(cached)
    assert hub.fetch(name)[1]["sha256"] == digest
    assert cached.read_bytes() == b"weights"
    options = hub.options_of_weights(name)
    assert (options["model"], options["center_crop"]) == ("resnet50", 224 / 232)
    with pytest.raises(ConfigError, match=r"did you mean 'resnet50.IMAGENET1K_V2'"):
        hub.look_up("torchvision/resnet50.IMAGENET1K_V3")


@pytest.mark.row(64)
@pytest.mark.slow
def test_one_flag_is_enough_and_a_run_goes_on_without_the_network(server):
    folder = server.folder / "timm/mobilenetv3_small_100.lamb_in1k"
    facts = PREPROCESSING | {"input_size": [3, 32, 32], "crop_pct": 0.875}
    config = {"architecture": "mobilenetv3_small_100", "pretrained_cfg": facts}
    write_repository(folder, **config)
    trained = random_run("mobilenet_v3_small", width=1.0)
    write_safetensors(folder / hub.WEIGHTS, trained.network(), trained)
    rng = np.random.default_rng(0)
    for name, number in np.ndindex(2, 12):
        path = server.folder / f"photos/{name}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (40, 36, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    environ = {"HF_ENDPOINT": server.url, "HF_HOME": str(server.folder / "home")}
    photos, workdir = f"--data_dir={server.folder}/photos", server.folder / "run"
    command = "run_train.py", photos, f"--workdir={workdir}", "--noreport"
    name = "timm/mobilenetv3_small_100.lamb_in1k"
    first = run(*command, f"--init_from={name}", "--max_steps=1", **environ)
    assert first.returncode == 0, first.stderr
    digest = hashlib.sha256((folder / hub.WEIGHTS).read_bytes()).hexdigest()
    assert digest in first.stdout and COMMIT in first.stdout
    config = json.loads((workdir / "config.json").read_text())
    assert config["init_from"] == name and config["model"] == "mobilenet_v3_small"
    assert config["image_size"] == 32 and config["center_crop"] == 0.875
    server.refused = {hub.CONFIG: (404, "RepoNotFound")}
    shutil.rmtree(server.folder / "home")
    second = run(*command, f"--init_from={name}", "--max_steps=2", **environ)
    assert second.returncode == 0 and "restored step 1" in second.stdout
    state = workdir / "checkpoints/step-00000002/trainer_state.json"
    weights = json.loads(state.read_text())["weights"]
    assert weights == {"revision": COMMIT, "sha256": digest}
    image = str(server.folder / "photos/0/0.png")
    for command in (["run_eval.py"], ["run_predict.py", image]):
        ended = run(*command, f"--workdir={workdir}", **environ)
        assert ended.returncode == 0, ended.stderr
