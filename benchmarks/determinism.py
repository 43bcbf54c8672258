"""How far trainings differ that should be the same: runs, towers, strategies, oneDNN.

    python -m benchmarks.determinism --data_dir=DATA

Each row is a training of a few steps in a process of its own. Its parameters are
compared with those of the first row, bit for bit and by their largest differences.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks import measure, trainers
from towers import build
from towers.config import Config

# A gradient norm that enters the update.
SPEEDRUN = {"model": "speedrun", "augment": "pad_crop_flip", "clip_norm": 1.0}

# name: environment, fields of Config
CASES = {
    "1 tower": ({}, {}),
    "1 tower, again": ({}, {}),
    "2 towers": ({}, {"num_towers": 2}),
    "2 towers, again": ({}, {"num_towers": 2}),
    "4 towers": ({}, {"num_towers": 4}),
    "2 towers, replicated": ({}, {"num_towers": 2, "strategy": "replicated"}),
    "2 towers, replicated, again": ({}, {"num_towers": 2, "strategy": "replicated"}),
    "2 towers, model_parallel": (
        {},
        {"num_towers": 2, "strategy": "model_parallel", "group_size": 2},
    ),
    "1 tower, without oneDNN": ({"TF_ENABLE_ONEDNN_OPTS": "0"}, {}),
    "speedrun, clipped, 1 tower": ({}, SPEEDRUN),
    "speedrun, clipped, 2 towers": ({}, SPEEDRUN | {"num_towers": 2}),
    "speedrun, clipped, 2 towers, again": ({}, SPEEDRUN | {"num_towers": 2}),
    "speedrun, clipped, 2 towers, replicated": (
        {},
        SPEEDRUN | {"num_towers": 2, "strategy": "replicated"},
    ),
    "speedrun, clipped, 2 towers, replicated, again": (
        {},
        SPEEDRUN | {"num_towers": 2, "strategy": "replicated"},
    ),
}
# Rows whose bits are compared with those of another row than the first.
AGAIN = ", again"


def train(options: argparse.Namespace, case: str, path: str) -> None:
    """Takes the steps of a case, and writes the state and the norms."""
    fields = measure.dataset(options)
    config = Config(
        **fields,
        batch_size=options.batch_size,
        learning_rate=0.1,
        device="cpu",
        **{"num_towers": 1} | CASES[case][1],
    )
    chosen = measure.all_devices("cpu", 4)
    trainer = trainers.create_trainer(config, build.build(config), chosen)
    norms = [trainer.train(1)["gradient_norm"] for _ in range(options.steps)]
    np.savez(path, gradient_norm=norms, **trainer.state())


def run(case: str, folder: str) -> dict[str, np.ndarray]:
    """The results of a case in a new process."""
    path = os.path.join(folder, "case.npz")
    command = [sys.executable, "-m", "benchmarks.determinism", *sys.argv[1:]]
    subprocess.run(
        [*command, "--case", case, "--path", path],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "1"} | CASES[case][0],
        stderr=subprocess.DEVNULL,
        check=True,
    )
    with np.load(path) as file:
        return dict(file)


def differences(result: dict, reference: dict) -> tuple[str, str, str]:
    """Bits, and the largest absolute and relative difference of the parameters.

    The relative one is that of a tensor to its own largest element.
    """
    names = [name for name in reference if name.startswith("params/")]
    apart = {n: np.max(np.abs(result[n] - reference[n])) for n in names}
    relative = [apart[n] / np.max(np.abs(reference[n])) for n in names]
    return (
        "equal" if is_equal(result, reference) else "differ",
        f"{max(apart.values()):.1e}",
        f"{max(relative):.1e}",
    )


def is_equal(result: dict, reference: dict) -> bool:
    """Whether all states and norms have the same bits."""
    return all(result[n].tobytes() == reference[n].tobytes() for n in reference)


def main() -> None:
    parser = measure.create_parser(__doc__, steps=12, device="cpu")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--path")
    options = parser.parse_args()
    if options.case:
        train(options, options.case, options.path)
        return
    print(measure.report_head("Differences between trainings that should be the same"))
    print(
        f"\ncnn, or speedrun with clip_norm=1, batch {options.batch_size}, "
        f"{options.steps} steps at the rate 0.1; differences of parameters to those of "
        "the first row of the network, relative ones to the largest element of the "
        "same tensor\n"
    )
    print(
        measure.table_head(
            "training | bits | absolute | relative | bits of a repetition"
        )
    )
    results, bases = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            results[case] = run(case, folder)
            first = results[case.removesuffix(AGAIN)]
            repeated = case.endswith(AGAIN)
            same = "equal" if is_equal(results[case], first) else "differ"
            base = bases.setdefault(CASES[case][1].get("model"), results[case])
            cells = differences(results[case], base)
            print(measure.table_row(case, *cells, same if repeated else ""), flush=True)


if __name__ == "__main__":
    measure.run(main)
