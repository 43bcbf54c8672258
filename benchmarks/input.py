"""The cost of the input: reading, augmenting and feeding a step.

    python -m benchmarks.input --data_dir=DATA

Batches are read, then augmented, then trained on, each stage while the next one is at
work on the batch before. So a step should cost as much as the slowest stage, not as
their sum. In turn in one process, with strategy `towers` and one tower:
- `compute`: on a batch that lies ready.
- `as it is`: on the stream, images from memory, augmented.
- `reading 2`: every read also takes 2 x the time of `compute`, waiting, as for a disk
  that serves one request after the other; `processing 2` and `both 2` likewise.
- `reading 2, together`: reads that may wait at the same time, as on a network.
- `decoding`: every read also decodes JPEG files and scales them down.

First with computing that only waits, as the processor does for a GPU: this shows the
overlap by itself, on any machine. Then with the tutorial's network. Where the processor
computes that, stages that need the processor too cost their time of it; a last table
gives that time: batches that are drawn without training.

    python -m benchmarks.input --data_dir=DATA --folder=ROOT

compares LeNet on CIFAR-10 from the official binary files in DATA, from the same images
in `ROOT/train/CLASS/*.jpg` and `ROOT/test/CLASS/*.jpg`, and from that folder with room
in memory for an eighth of them. Each is set up and trained for its first epoch, in
which a folder's images are decoded, one after the other; then they train in turn, and
last batches are drawn without training. Memory is the growth of the process at its peak
until the end of the first epoch.

    python -m benchmarks.input --photos=20000 --folder=ROOT --torch=PYTHON

compares how fast photos of 500x375 are decoded: by `image_folder`, by plain `tf.data`
and, where PYTHON is a Python that has torch and torchvision, by PyTorch's DataLoader;
then the wait of two towers of ResNet-18 for them. The photos are made in ROOT where it
has no `train/`. See `benchmarks/photos.py`.
"""

from benchmarks import image_folder, measure, overlap, photos


def main() -> None:
    parser = measure.create_parser(__doc__, steps=40, rounds=3)
    parser.add_argument("--wait_ms", type=float, default=50.0, help="computing")
    parser.add_argument("--folder", default="", help="with train/ and test/")
    parser.add_argument("--towers", type=int, default=2, help="with --folder")
    parser.add_argument("--photos", type=int, default=0, help="made where missing")
    parser.add_argument("--torch", default="", help="Python with torch, with --photos")
    options = parser.parse_args()
    if options.photos:
        if not options.folder:
            parser.error("--photos are made, or read, in --folder")
        return photos.compare(options)
    if options.folder and not options.data_dir:
        parser.error("--folder is compared with --data_dir, the binary files")
    if options.folder:
        return image_folder.compare(options)
    overlap.compare(options)


if __name__ == "__main__":
    measure.run(main)
