"""TensorBoard and the report of a run, in Chromium."""

import base64
import json
import pathlib
import shutil
import socket

import pytest
import small_runs
from processes import WAIT_SECS, Program

from towers import training
from towers.training import ending

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium, see CONTRIBUTING.md"),
]

# It reads commands from descriptor 3 and answers on 4.
START = "import os, sys; n, *command = sys.argv[1:]; "
START += "os.dup2(int(n), 3); os.dup2(int(n), 4); os.execv(command[0], command)"

# Without 3D TensorBoard draws its curves as SVG.
OPTIONS = "--headless=new --no-sandbox --disable-3d-apis --remote-debugging-pipe"


class Page(Program):
    """A page in Chromium, by the DevTools protocol."""

    def __init__(self, folder: pathlib.Path, width: int):
        self._socket, other = socket.socketpair()
        self._socket.settimeout(WAIT_SECS)
        self._session, self._received, self._events = {}, b"", []
        command = [CHROMIUM, *OPTIONS.split(), f"--window-size={width},1000"]
        command.append(f"--user-data-dir={folder / 'chromium'}")
        with other:
            descriptor = other.fileno()
            super().__init__(
                ["-c", START, descriptor, *command], folder, pass_fds=[descriptor]
            )
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method, **params):
        job = {"id": 1, "method": method, "params": params} | self._session
        self._socket.sendall(json.dumps(job).encode() + b"\0")
        while "id" not in (message := self._message()):
            self._events.append(message)
        assert "error" not in message, message
        return message["result"]

    def _message(self):
        while b"\0" not in self._received:
            received = self._socket.recv(1 << 20)
            assert received, self.output
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        assert "errorText" not in self._call("Page.navigate", url=address)
        self.wait_until(lambda: self.run("document.readyState") == "complete")

    def run(self, script: str):
        """The value of an expression in JavaScript."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def save(self, path: pathlib.Path) -> None:
        """Saves a picture of the page."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._socket.close()

    def errors(self) -> list[dict]:
        """Those of its console, its scripts and its requests, so far."""
        self.run("0")  # what happened before has been received
        return [
            event
            for event in self._events
            if event["method"] == "Runtime.exceptionThrown"
            or event["params"].get("type") in ("error", "assert")
            or event["params"].get("entry", {}).get("level") == "error"
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a report, summaries and evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        patch.setattr(training, "report_run", ending.report_run)
        config = small_runs.small_config(eval_every_epochs=1.0, summary_every_steps=5)
        return training.train(tmp_path_factory.mktemp("browser") / "run", config).path


# Widths of the images; 0 of those that are broken.
IMAGES = "[...document.images].map(image => image.complete ? image.naturalWidth : 0)"


@pytest.mark.parametrize("width", [1200, 480])
def test_a_browser_shows_the_curves_and_pictures_of_a_report(run, tmp_path, width):
    content = json.loads((run / "report/report.json").read_text())
    num_pictures = len(content["mistakes"]) + len(content["most_confident"])
    with Page(tmp_path, width) as page:
        page.open((run / "report/index.html").as_uri())
        page.save(tmp_path / "report.png")
        widths = page.run(IMAGES)
        # Loss, accuracy, learning rate; confusion matrix, classes, calibration; speed.
        assert len(widths) == num_pictures + 7 and min(widths) > 0
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors() == []


def test_tensorboard_shows_curves_and_pictures(run, tmp_path):
    command = ["-m", "tensorboard.main", "--logdir", run / "tensorboard", "--port=0"]
    with Program(command, tmp_path) as server, Page(tmp_path, 1200) as page:
        [address] = server.wait_for(r"http://\S+")
        page.open(address)
        names = (
            "[...document.querySelectorAll('scalar-card:has(line-chart svg path)')]"
            ".map(card => card.innerText.split('\\n').slice(0, 2).join(''))"
        )
        tags = {"curves/accuracy", "curves/loss"}
        page.wait_until(lambda: tags <= set(page.run(names)))
        page.save(tmp_path / "curves.png")
        page.open(f"{address}?tagFilter=pictures")
        page.wait_until(lambda: len(page.run(IMAGES)) == 2)
        page.wait_until(lambda: min(page.run(IMAGES)) > 0)
        page.save(tmp_path / "pictures.png")
        assert page.errors() == []
