"""The devices of an evaluation, a prediction or a network that is loaded: the CPU where
a training of the run holds the GPUs."""

import contextlib
from collections.abc import Callable

from towers.config import Config
from towers.errors import ConfigError
from towers.parallel import devices as parallel_devices
from towers.parallel.devices import Devices
from towers.run.folder import RunFolder


def configure(config: Config, folder: RunFolder, say: Callable[[str], None]) -> Devices:
    """The devices of the options. ConfigError where the machine does not have them."""
    devices = parallel_devices.configure(
        _free_device(config.device, folder, say),
        config.num_towers,
        config.device_order,
        config.device_memory_mb,
    )
    for remark in devices.remarks:
        say(remark)
    return devices


def configure_one(folder: RunFolder, say: Callable[[str], None]) -> None:
    """The first GPU, if any, for a network that is called outside of towers. Devices
    that were made before stay."""
    with contextlib.suppress(ConfigError):
        parallel_devices.configure(_free_device("auto", folder, say), 1)


def _free_device(device, folder, say):
    holder = folder.holder()
    if device == "auto" and holder and holder.get("device") == "GPU":
        say(
            f"process {holder.get('pid', '?')} trains this run on the GPUs, so the "
            "evaluation runs on the CPU"
        )
        return "cpu"
    return device
