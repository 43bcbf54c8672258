"""A worker on a node of Ray, in a process of Ray's."""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence

from towers.errors import ConfigError
from towers.launch.process import Process, Share
from towers.launch.supervisor import free_ports


class RayHost:
    """Runs one worker on a node of Ray; an actor with two threads."""

    def __init__(self):
        self._ports, self.loop, self.process = contextlib.ExitStack(), None, None

    def address(self) -> str:
        """host:port for the worker; nobody else on the node is given the port."""
        import ray

        host = ray.util.get_node_ip_address()
        [port] = self._ports.enter_context(free_ports(1))
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def work(
        self,
        index: int,
        command: Sequence[str],
        folder: str,
        environ: Mapping[str, str],
        share: Share,
    ) -> tuple[int, str]:
        """Runs the worker in a folder until it ends; returns its exit code and what
        has become of it.
        """
        try:
            os.chdir(folder)
            return asyncio.run(_work(self, index, command, environ, share))
        except (OSError, ConfigError) as error:
            return ConfigError.exit_code, f"worker {index} cannot start: {error}"

    def send(self, number: int) -> None:
        """Sends the worker a signal."""
        if self.process:
            self.loop.call_soon_threadsafe(self.process.send, number)


# No method, as Ray would call all of them in a loop of its own.
async def _work(host, index, command, environ, share):
    host.loop = asyncio.get_running_loop()
    host.process = await Process.start(index, command, environ, share)
    await host.process.ended
    return host.process.code, str(host.process)
