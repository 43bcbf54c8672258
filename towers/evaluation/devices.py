"""The devices of an evaluation or a prediction."""

from collections.abc import Callable

from towers.config import Config
from towers.parallel import devices as parallel_devices
from towers.parallel.devices import Devices
from towers.run.folder import RunFolder


def configure(config: Config, folder: RunFolder, say: Callable[[str], None]) -> Devices:
    """Those of the options; the CPU where a training of the run holds the GPUs.

    Args:
        config: of the evaluation.
        folder: of the run.
        say: takes a line for the user.

    Raises:
        ConfigError: the machine does not have them.
    """
    device, holder = config.device, folder.holder()
    if device == "auto" and holder and holder.get("device") == "GPU":
        say(
            f"process {holder.get('pid', '?')} trains this run on the GPUs, so the "
            "evaluation runs on the CPU"
        )
        device = "cpu"
    devices = parallel_devices.configure(
        device, config.num_towers, config.device_order, config.device_memory_mb
    )
    for remark in devices.remarks:
        say(remark)
    return devices
