"""PyTorch's DataLoader on a folder of photos, in a Python that has torch and
torchvision: a venv of its own, as they are no dependencies.

As a program it makes the loader of its arguments, prints its versions, and draws as
many batches as each line says, and answers it then.
"""

import json
import os
import pathlib
import subprocess
import sys


class Loader:
    """The loader in a process of its own.

    Args:
        python: of the venv.
        folder: with `CLASS/*.jpg`.
        size: height and width of the images.
        batch_size: of the batches.
        ratio: 1 to decode at full scale, 2 at half of it.

    Attributes:
        versions: of PyTorch, torchvision, Pillow and its JPEG library, in words.
    """

    def __init__(
        self,
        python: str,
        folder: pathlib.Path,
        size: int,
        batch_size: int,
        ratio: int,
    ):
        numbers = map(str, (size, batch_size, ratio))
        self._process = subprocess.Popen(
            [python, __file__, str(folder), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = json.loads(self._answer())

    def draw(self, num_steps: int) -> None:
        print(num_steps, file=self._process.stdin, flush=True)
        self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of torch ended with {self._process.wait()}"
            )
        return line


def open_reduced(path: str, ratio: int):
    """The Pillow image of a JPEG file, decoded at a part of its scale."""
    from PIL import Image

    with Image.open(path) as image:
        image.draft("RGB", (image.width // ratio, image.height // ratio))
        return image.convert("RGB")


def serve(folder: str, size: int, batch_size: int, ratio: int) -> None:
    import functools

    import PIL.features
    import torch
    import torchvision
    from torchvision import datasets, transforms

    reduced = functools.partial(open_reduced, ratio=ratio)
    images = datasets.ImageFolder(
        folder,
        transforms.Compose(
            [
                transforms.Resize(size),
                transforms.CenterCrop(size),
                transforms.PILToTensor(),
            ]
        ),
        loader=datasets.folder.default_loader if ratio == 1 else reduced,
    )
    loader = torch.utils.data.DataLoader(
        images,
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=os.cpu_count(),
        persistent_workers=True,
        generator=torch.Generator().manual_seed(0),
    )

    def endless():
        while True:
            yield from loader

    batches = endless()
    is_turbo = PIL.features.check_feature("libjpeg_turbo")
    jpeg = PIL.features.version_feature("libjpeg_turbo") if is_turbo else None
    versions = (
        f"PyTorch {torch.__version__}, torchvision {torchvision.__version__}, Pillow "
        f"{PIL.__version__} with "
        + (f"libjpeg-turbo {jpeg}" if jpeg else "libjpeg")
        + f", {os.cpu_count()} workers"
    )
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            next(batches)
        print("drawn", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
