"""All that has to be known on a machine with GPUs, in ten minutes.

    python -m benchmarks.gpu --data_dir=DATA

Sections follow each other, the most important first, each in a process of its own: one
that fails, hangs or runs out of memory has its reason in the report, and the others
still run. Each has its part of `--minutes`, and begins no measurement that would pass
it; what it leaves is for the others. The report grows while it is measured, so that one
that is cut short holds all that was known by then. Without `--data_dir` images are
synthetic.

With `--device=cpu`, or where there is no GPU, everything runs in miniature on logical
devices of the CPU: its figures mean nothing, but the program is known to work.
"""

import argparse
import dataclasses
import importlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import tensorflow as tf

from benchmarks import measure
from benchmarks.setting import LEFT_OUT, Setting, reason
from towers.parallel.devices import configure

FOLDER = pathlib.Path(__file__).resolve().parent
LEAST_SECS = 10.0  # to start a process and measure anything


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        title: in the report.
        target: "module:function"; the function takes a `Setting` and returns whether
            something is amiss.
        share: of the time that is left, next to those of the sections after it.
    """

    title: str
    target: str
    share: float


SECTIONS = {
    "placement": Section("Placement of an executed step", "proofs:placement", 1),
    "equality": Section("Equality with one device", "proofs:equality", 1.5),
    "alternatives": Section("Alternatives of a step", "speeds:alternatives", 2),
    "shares": Section("A step against the matrix rate", "speeds:shares", 1.5),
    "input": Section("Streamed and resident input", "speeds:streamed_and_resident", 1),
    "scaling": Section("Scaling", "speeds:scaling", 1.5),
    "recipe": Section("A recipe", "speeds:recipe", 1.5),
    "repetition": Section("With deterministic kernels", "proofs:repetition", 1),
    "waiting": Section("What the host does in a step", "kernels:waiting", 1),
}


class Report:
    """Lines that are printed, and written to a file, as they come."""

    def __init__(self, path: pathlib.Path | None):
        self._file = path.open("w") if path else None

    def write(self, line: str) -> None:
        print(line, flush=True)
        if self._file:
            print(line, file=self._file, flush=True)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument(
        "--output",
        help="file of the report; by default benchmarks/DATE-gpu.md on GPUs, none else",
    )
    parser.add_argument(
        "--sections",
        type=measure.names,
        default=list(SECTIONS),
        help=f"some of {','.join(SECTIONS)}",
    )
    parser.add_argument(
        "--logical_mb",
        type=float,
        default=3000.0,
        help="megabytes of each of the logical devices that a single GPU is cut into",
    )
    # Of the process of one section.
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"--sections={','.join(sorted(unknown))}: not in {list(SECTIONS)}")
    return options


def run_section(options: argparse.Namespace) -> bool:
    """Runs a section in this process; returns whether something is amiss."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow or a training prints is not of the report
    tf.get_logger().setLevel("ERROR")  # every trainer traces a step of its own
    setting = Setting(
        device=options.device,
        write=lambda line: print(line, file=lines, flush=True),
        ends_at=time.monotonic() + options.seconds,
        data_dir=options.data_dir,
        logical_mb=options.logical_mb,
    )
    module, name = SECTIONS[options.section].target.split(":")
    try:
        module = importlib.import_module(f"benchmarks.{module}")
        return getattr(module, name)(setting)
    except Exception as error:
        traceback.print_exc()
        setting.write(f"Not measured: {reason(error)}\n")
        return True


def start_section(
    name: str, options: argparse.Namespace, secs: float, write: Callable[[str], None]
) -> str:
    """Runs a section in a process of its own, at most half as long again as `secs`.

    Returns:
        How it ended.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", f"--section={name}"]
    command += [f"--seconds={secs}", f"--device={options.device}"]
    command += [f"--data_dir={options.data_dir}", f"--logical_mb={options.logical_mb}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=FOLDER.parent
    )
    killed = threading.Event()

    def kill():
        killed.set()
        process.kill()

    timer = threading.Timer(1.5 * secs, kill)
    timer.start()
    some_left = ""
    try:
        for line in process.stdout:
            write(line.rstrip("\n"))
            if line.startswith(LEFT_OUT):
                some_left = ", some left out"
        status = process.wait()
    finally:
        timer.cancel()
        process.kill()  # where this one is stopped
    if killed.is_set():
        return "cut short: no time left"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    ended = {0: "nothing amiss", 1: "AMISS, see there"}.get(status, f"status {status}")
    return ended + some_left


def run_sections(
    options: argparse.Namespace,
    report: Report,
    run: Callable[..., str] = start_section,
) -> dict[str, str]:
    """Runs the sections in their order while time is left; name -> how it ended."""
    ends_at = time.monotonic() + 60 * options.minutes
    names = [name for name in SECTIONS if name in options.sections]
    results = {}
    for place, name in enumerate(names):
        left = ends_at - time.monotonic()
        shares = [SECTIONS[other].share for other in names[place:]]
        secs = left * shares[0] / sum(shares)
        report.write(f"\n## {SECTIONS[name].title}\n")
        if secs < LEAST_SECS:
            results[name] = f"not started: {secs:.0f} s left for it"
        else:
            print(f"{name}: at most about {secs:.0f} s", file=sys.stderr, flush=True)
            started = time.monotonic()
            # The last ones may take no more than there is.
            ended = run(name, options, min(secs, left / 1.5), report.write)
            results[name] = f"{ended}, {time.monotonic() - started:.0f} s"
        report.write(f"{name}: {results[name]}.")
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def graphics() -> str:
    """Driver, memory of the GPUs and TensorFlow's build, as far as they are known."""
    info = tf.sysconfig.get_build_info()
    build = [f"{k} {info[k]}" for k in ("cuda_version", "cudnn_version") if k in info]
    lines = [f"- TensorFlow's build: {', '.join(build) or 'without CUDA'}"]
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,memory.total,driver_version"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            lines += [f"- GPU: {line}" for line in done.stdout.strip().splitlines()]
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(f"- nvidia-smi: {reason(error)}")
    return "\n".join(lines)


def output_path(options: argparse.Namespace) -> pathlib.Path | None:
    """The file of the report; that of an earlier run of the day stays as it is."""
    if options.output:
        return pathlib.Path(options.output)
    if options.device == "cpu":
        return None
    path = FOLDER / time.strftime("%Y-%m-%d-gpu.md")
    return (
        path.with_stem(f"{path.stem}-{time.strftime('%H%M')}")
        if path.exists()
        else path
    )


def main() -> None:
    options = parse_options()
    if options.section:
        sys.exit(run_section(options))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the section too
    options.device = configure(options.device, 0).kind.lower()
    path = output_path(options)
    report = Report(path)
    report.write(f"{measure.report_head('On GPUs')}{graphics()}")
    if options.device == "cpu":
        report.write("\nIn miniature, on logical devices of the CPU.")
    results = run_sections(options, report)
    report.write(f"\n## Summary\n\n{measure.table_head('section | result')}")
    for name, result in results.items():
        report.write(measure.table_row(name, result))
    if path:
        print(f"written to {path}", file=sys.stderr)
    sys.exit(any("nothing amiss" not in result for result in results.values()))


if __name__ == "__main__":
    measure.run(main)
