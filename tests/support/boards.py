"""TensorBoard's own readers."""

import subprocess
import time

import tensorflow as tf
from tensorboard import context
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)
from tensorboard.data.server_ingester import (
    ExistingServerDataIngester,
    get_server_binary,
)
from tensorboard.util.grpc_util import ChannelCredsType


def read_board(folder, kind):
    """tag -> [(step, array)], through TensorBoard's own reader."""
    events = EventAccumulator(str(folder / kind), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def wait_for_curve(folder, kind, tag, steps, secs=20):
    """Wait until TensorBoard's data server, its fast loader, has a curve's steps."""
    port_file = folder / "port"
    options = "--reload=1", "--port=0", f"--port-file={port_file}", "--die-after-stdin"
    program = [get_server_binary().path, f"--logdir={folder}", *options]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as server:
        deadline, seen, provider = time.monotonic() + secs, None, None
        while seen != steps and time.monotonic() < deadline:
            time.sleep(0.1)
            if provider is None and port_file.exists():
                address = f"localhost:{port_file.read_text().strip()}"
                provider = ExistingServerDataIngester(
                    address, channel_creds_type=ChannelCredsType.LOCAL
                ).data_provider
            if provider is not None:
                curves = provider.read_scalars(
                    context.RequestContext(),
                    experiment_id="",
                    plugin_name="scalars",
                    downsample=1000,
                )
                seen = [x.step for x in curves.get(kind, {}).get(tag, ())]
        server.stdin.close()
    assert seen == steps
