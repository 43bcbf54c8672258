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
        folder: with `train/CLASS/*.jpg`.
        size: height and width of the images.
        batch_size: of the batches.

    Attributes:
        versions: of torch, torchvision and Pillow.
    """

    def __init__(self, python: str, folder: pathlib.Path, size: int, batch_size: int):
        self._process = subprocess.Popen(
            [python, __file__, str(folder), str(size), str(batch_size)],
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


def serve(folder: str, size: int, batch_size: int) -> None:
    import PIL
    import torch
    import torchvision
    from torchvision import datasets, transforms

    images = datasets.ImageFolder(
        os.path.join(folder, "train"),
        transforms.Compose(
            [
                transforms.Resize(size),
                transforms.CenterCrop(size),
                transforms.PILToTensor(),
            ]
        ),
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
    versions = torch.__version__, torchvision.__version__, PIL.__version__
    print(json.dumps(" ".join(versions)), flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            next(batches)
        print("drawn", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
