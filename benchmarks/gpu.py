"""All that has to be known on a machine with GPUs, in one report.

    python -m benchmarks.gpu --data_dir=DATA

Sections follow each other, the most important first, each in a process of its own: one
that fails, hangs or runs out of memory has its reason in the report, and the others
still run. Some prove something here, the others are programs of this folder:
- `placement`: whether every tower computes on its own device.
- `kernels`: whether every operation of a step has a kernel on GPUs, what the host
  launches, and which bytes cross devices; from traced graphs, so on any machine.
- `equality`, `repetition`: every strategy against one device and against itself, the
  second with deterministic kernels.
- `step`, `xla`, `no_tf32`, `towers`: `python -m benchmarks.step`.
- `input`: `python -m benchmarks.input`.
- `recipe`: `python -m benchmarks.accuracy`.

A section may take half of what is left of `--minutes`. The report grows while it is
measured. Without `--data_dir` images are synthetic. With `--device=cpu`, or where there
is no GPU, everything runs in miniature on logical devices of the CPU: its figures mean
nothing, but the program is known to work. With one GPU the proofs cut it into several
logical devices.
"""

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from benchmarks import measure, proofs
from towers.parallel.devices import configure

FOLDER = pathlib.Path(__file__).resolve().parent
# Name -> the command of a program, and that in miniature.
PROGRAMS = {
    "step": (
        "step --models=speedrun,resnet20,cnn --precisions=bfloat16,float32 "
        "--batch_size=1024 --steps=30",
        "step --models=lenet --batch_size=16 --steps=1 --rounds=1",
    ),
    "xla": (
        "step --models=speedrun,resnet20 --precisions=bfloat16 --compilers=none,xla "
        "--batch_size=1024 --steps=30",
        "step --models=lenet --compilers=none,xla --batch_size=16 --steps=1 --rounds=1",
    ),
    "no_tf32": (
        "step --models=speedrun,resnet20 --batch_size=1024 --steps=30",
        "step --models=lenet --batch_size=16 --steps=1 --rounds=1",
    ),
    "towers": (
        "step --strategies=replicated,towers,async_towers --towers=1,2,4,8 "
        "--batch_size=4096 --steps=30",
        "step --strategies=replicated,towers --towers=1,2 --batch_size=16 --steps=1 "
        "--rounds=1",
    ),
    "input": (
        "input --models=speedrun,resnet20,cnn --precision=bfloat16 --batch_size=1024",
        "input --models=lenet --batch_size=16 --steps=1 --rounds=1",
    ),
    "recipe": (
        "accuracy --config=cifar10_speedrun --precision=bfloat16",
        "accuracy --config=cifar10_speedrun --batch_size=64 --width=0.25 "
        "--max_steps=3 --tta=none",
    ),
}
SECTIONS = [*proofs.PROOFS, *PROGRAMS]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--minutes", type=float, default=20.0, help="for everything")
    parser.add_argument(
        "--output",
        help="file of the report; by default benchmarks/DATE-gpu.md on GPUs, none else",
    )
    parser.add_argument(
        "--sections",
        type=measure.names,
        default=SECTIONS,
        help=f"some of {','.join(SECTIONS)}",
    )
    parser.add_argument(
        "--logical_mb",
        type=float,
        default=3000.0,
        help="megabytes of each of the logical devices that a single GPU is cut into",
    )
    # Of the process of one proof.
    parser.add_argument("--proof", choices=proofs.PROOFS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"--sections={','.join(sorted(unknown))}: not in {SECTIONS}")
    return options


def prove(options: argparse.Namespace) -> bool:
    """Runs a proof in this process; returns whether something is amiss."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow or a training prints is not of the report
    tf.get_logger().setLevel("ERROR")  # every trainer traces a step of its own
    setting = proofs.Setting(
        device=options.device,
        write=lambda line: print(line, file=lines, flush=True),
        data_dir=options.data_dir,
        logical_mb=options.logical_mb,
    )
    return proofs.PROOFS[options.proof](setting)


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    """The module and the arguments of a section."""
    common = [f"--device={options.device}", f"--data_dir={options.data_dir}"]
    if name in proofs.PROOFS:
        own = ["gpu", f"--proof={name}", f"--logical_mb={options.logical_mb}"]
    else:
        own = PROGRAMS[name][options.device == "cpu"].split()
    if name == "recipe" and not options.data_dir:
        own.append("--dataset=synthetic")
    return [f"benchmarks.{own[0]}", *own[1:], *common]


def run_section(
    name: str, options: argparse.Namespace, secs: float, write: Callable[[str], None]
) -> str:
    """Runs a section in a process of its own, for at most so many seconds; returns how
    it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command_of(name, options)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER.parent,
        env=os.environ | ({"NVIDIA_TF32_OVERRIDE": "0"} if name == "no_tf32" else {}),
    )
    killed = threading.Event()

    def kill():
        killed.set()
        process.kill()

    timer = threading.Timer(secs, kill)
    timer.start()
    with process:
        try:
            for line in own_lines(process.stdout):
                write(line)
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()  # where this one is stopped
    if killed.is_set():
        return "cut short: no time left"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return {0: "nothing amiss", 1: "AMISS, see there"}.get(status, f"status {status}")


def own_lines(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a program's report without what the whole report says once."""
    once = ("# ", "- date:", "- machine:", "- versions:")
    return (line.rstrip("\n") for line in lines if not line.startswith(once))


def run_sections(
    options: argparse.Namespace,
    write: Callable[[str], None],
    run: Callable[..., str] = run_section,
) -> dict[str, str]:
    """Runs the sections in their order while time is left; name -> how it ended."""
    ends_at = time.monotonic() + 60 * options.minutes
    results = {}
    for name in (name for name in SECTIONS if name in options.sections):
        started = time.monotonic()
        write(f"\n## {name}\n")
        results[name] = run(name, options, max(1.0, (ends_at - started) / 2), write)
        results[name] += f", {time.monotonic() - started:.0f} s"
        write(f"\n{name}: {results[name]}.")
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def graphics() -> str:
    """Driver, memory of the GPUs and TensorFlow's build, as far as they are known."""
    info = tf.sysconfig.get_build_info()
    cuda = [f"{k} {info[k]}" for k in ("cuda_version", "cudnn_version") if k in info]
    lines = [f"- TensorFlow's build: {', '.join(cuda) or 'without CUDA'}"]
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,memory.total,driver_version"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            lines += [f"- GPU: {line}" for line in done.stdout.strip().splitlines()]
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(f"- nvidia-smi: {proofs.reason(error)}")
    return "\n".join(lines)


def output_path(options: argparse.Namespace) -> pathlib.Path:
    """The file of the report; that of an earlier run of the day stays as it is."""
    if options.output:
        return pathlib.Path(options.output)
    if options.device == "cpu":
        return pathlib.Path(os.devnull)
    path = FOLDER / time.strftime("%Y-%m-%d-gpu.md")
    if path.exists():
        path = path.with_stem(f"{path.stem}-{time.strftime('%H%M')}")
    return path


def main() -> None:
    options = parse_options()
    if options.proof:
        sys.exit(prove(options))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the section too
    options.device = configure(options.device, 0).kind.lower()
    with output_path(options).open("w") as file:

        def write(line):
            for place in (sys.stdout, file):
                print(line, file=place, flush=True)

        write(f"{measure.report_head('On GPUs')}{graphics()}")
        if options.device == "cpu":
            write("\nIn miniature, on logical devices of the CPU.")
        results = run_sections(options, write)
        write(f"\n## Summary\n\n{measure.table_head('section | result')}")
        for name, result in results.items():
            write(measure.table_row(name, result))
    sys.exit(any("nothing amiss" not in result for result in results.values()))


if __name__ == "__main__":
    measure.run(main)
