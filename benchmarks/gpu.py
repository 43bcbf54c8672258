"""All that has to be known on a machine with a GPU, in one report, in ten minutes.

    python -m benchmarks.gpu --data_dir=DATA

Sections follow each other as `--sections` names them, each in processes of its own and
with a limit in seconds: one that fails, hangs or runs out of memory has its reason in
the report, and the others still run. The report grows while it is measured.

- `smoke`: 60 steps and an evaluation, losses against those of the CPU; kernels, how
  long the GPU is busy, and the longest gaps.
- `step`, `large`: `python -m benchmarks.step`, on images in the memory of the GPU.
- `recipe`: `python -m benchmarks.accuracy`; then the author's program, if `--torch`
  names a Python with PyTorch and `--airbench` a file airbench94_muon.py.
- `peers`: `python -m benchmarks.peers`; with PyTorch where `--torch` names a Python.
- `equality`: every strategy against one device and against itself.
- `input`: `python -m benchmarks.input`.

Not among them by default:
- `placement`: whether every tower computes on its own device.
- `kernels`: whether every operation of a step has a kernel on GPUs, what the host
  launches, and which bytes cross devices; from traced graphs, so on any machine.
- `graphs`: launches, transposes and what crosses between host and GPU in a step, as
  Grappler leaves it for an H100; on any machine.
- `repetition`: as `equality`, with deterministic kernels.
- `towers`: steps of several GPUs.

Without `--data_dir` images are synthetic. With `--device=cpu`, or where there is no
GPU, everything runs in miniature on logical devices of the CPU: its figures mean
nothing, but the program is known to work. With one GPU `equality` cuts it into several
logical devices.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from benchmarks import measure, peers, proofs
from towers.parallel.devices import configure

FOLDER = pathlib.Path(__file__).resolve().parent
FINE = "nothing amiss"


class Section(NamedTuple):
    """Commands of a section, one after the other; variables of the environment may come
    first, as in a shell.

    Attributes:
        secs: the most that they may take together.
        commands: on a GPU.
        tiny: in miniature.
    """

    secs: float
    commands: Sequence[str]
    tiny: Sequence[str]


def proof(name: str, secs: float) -> Section:
    command = f"gpu --proof={name}"
    return Section(secs, [command], [command])


STEP = "step --precisions=bfloat16"
TINY = "--batch_size=16 --steps=1 --rounds=1"
DEFAULT = {
    "smoke": proof("smoke", 70),
    "step": Section(
        150,
        [
            f"{proofs.PERSISTENT}=1 {STEP} --models=resnet20,speedrun "
            "--compilers=none,xla --batch_size=1024 --steps=30 --rounds=3",
            f"{proofs.PERSISTENT}=0 {STEP} --models=resnet20 "
            "--compilers=none --batch_size=1024 --steps=30 --rounds=3",
        ],
        [f"{proofs.PERSISTENT}=1 step --models=lenet --compilers=none,xla {TINY}"],
    ),
    "recipe": Section(
        110,
        ["accuracy --config=cifar10_speedrun --precision=bfloat16"],
        [
            "accuracy --config=cifar10_speedrun --batch_size=64 --width=0.25 "
            "--max_steps=3 --tta=none"
        ],
    ),
    "peers": Section(
        110,
        [
            "peers --models=resnet20,speedrun --precision=bfloat16 --batch_size=1024 "
            "--steps=30 --rounds=3"
        ],
        [f"peers --models=resnet20 {TINY}"],
    ),
    "equality": proof("equality", 130),
    "large": Section(
        90,
        [
            f"{STEP} --models=resnet50 --compilers=none,xla --batch_size=256 --steps=5 "
            '--rounds=3 --fields={"image_size":224}'
        ],
        [f'step --models=resnet20 {TINY} --fields={{"image_size":64}}'],
    ),
    "input": Section(
        600,
        [
            "input --models=speedrun,resnet20 --precision=bfloat16 --batch_size=1024 "
            "--rounds=3"
        ],
        [f"input --models=lenet {TINY}"],
    ),
}
SECTIONS = DEFAULT | {
    "placement": proof("placement", 300),
    "kernels": proof("kernels", 300),
    "graphs": proof("graphs", 300),
    "repetition": proof("repetition", 300),
    "towers": Section(
        300,
        [
            "step --strategies=replicated,towers,async_towers --towers=1,2,4,8 "
            "--batch_size=4096 --steps=30"
        ],
        [f"step --strategies=replicated,towers --towers=1,2 {TINY}"],
    ),
}


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--secs", type=float, default=560.0, help="for everything")
    parser.add_argument(
        "--torch", default="", help="a Python with PyTorch, for `peers` and `recipe`"
    )
    parser.add_argument(
        "--airbench", default="", help="airbench94_muon.py of its author"
    )
    parser.add_argument(
        "--output",
        help="file of the report; by default reports/DATE-gpu.md on GPUs, else none",
    )
    parser.add_argument(
        "--sections",
        type=measure.names,
        default=list(DEFAULT),
        help=f"some of {','.join(SECTIONS)}, in their order here",
    )
    parser.add_argument(
        "--logical_mb",
        type=float,
        default=3000.0,
        help="megabytes of each of the logical devices that a single GPU is cut into",
    )
    # The process of one proof has this option.
    parser.add_argument("--proof", choices=proofs.PROOFS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"--sections={','.join(sorted(unknown))}: not in {list(SECTIONS)}")
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


def commands_of(
    name: str, options: argparse.Namespace
) -> list[tuple[list[str], dict[str, str]]]:
    """Per command of a section its words, and its own variables of the environment."""
    common = [f"--device={options.device}", f"--data_dir={options.data_dir}"]
    if name == "peers" and options.torch:
        common.append(f"--torch={options.torch}")
    if name == "recipe" and not options.data_dir:
        common.append("--dataset=synthetic")
    if name in proofs.PROOFS:
        common.append(f"--logical_mb={options.logical_mb}")
    section, commands = SECTIONS[name], []
    for line in section.tiny if options.device == "cpu" else section.commands:
        words = line.split()
        variables = dict(word.split("=") for word in words if word[0].isupper())
        program, *others = words[len(variables) :]
        words = [sys.executable, "-m", f"benchmarks.{program}", *others, *common]
        commands.append((words, variables))
    if name == "recipe" and options.torch and options.airbench:
        # Another Python must not find our packages and libraries.
        python = ["env", *(f"--unset={x}" for x in peers.OURS), options.torch]
        words = [
            FOLDER / "with_torch" / "airbench.py",
            os.path.abspath(options.airbench),
        ]
        commands.append(([*python, *words, *common[:2]], {}))
    return commands


def run_section(
    name: str, options: argparse.Namespace, secs: float, write: Callable[[str], None]
) -> str:
    """Runs a section for at most so many seconds; returns how it ended."""
    ends_at = time.monotonic() + secs
    for command, variables in commands_of(name, options):
        for variable, value in variables.items():
            write(f"\n{variable}={value}:\n")
        result = run_command(command, variables, ends_at - time.monotonic(), write)
        if result != FINE:
            return result
    if name == "recipe" and not (options.torch and options.airbench):
        write("\nairbench is not measured: set --torch=PYTHON and --airbench=FILE.")
    return FINE


def run_command(
    command: Sequence[str],
    variables: dict[str, str],
    secs: float,
    write: Callable[[str], None],
) -> str:
    """Runs a program in a process of its own; returns how it ended."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER.parent,
        env=os.environ | variables,
        start_new_session=True,  # so that what it has started ends with it
    )
    killed = threading.Event()

    def kill():
        killed.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(secs, 0.0), kill)
    timer.start()
    with process:
        try:
            for line in own_lines(process.stdout):
                write(line)
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # where this one is stopped
                kill()
    if killed.is_set():
        return "cut short: no time left"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return {0: FINE, 1: "AMISS, see there"}.get(status, f"status {status}")


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
    ends_at = time.monotonic() + options.secs
    results = {}
    for name in options.sections:
        started = time.monotonic()
        write(f"\n## {name}\n")
        secs = min(SECTIONS[name].secs, ends_at - started)
        results[name] = run(name, options, secs, write)
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
            options = {"capture_output": True, "text": True, "timeout": 20}
            done = subprocess.run(command, check=False, **options)
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
    path = FOLDER / "reports" / time.strftime("%Y-%m-%d-gpu.md")
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
    sys.exit(any(FINE not in result for result in results.values()))


if __name__ == "__main__":
    measure.run(main)
