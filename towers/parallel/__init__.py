"""Ways of being parallel: devices, towers, gradients, and one strategy a file."""

from towers.parallel.asynchronous import AsyncTowers
from towers.parallel.model_parallel import ModelParallel
from towers.parallel.replicated import Replicated
from towers.parallel.towers import Towers

STRATEGIES = {
    "towers": Towers,
    "async_towers": AsyncTowers,
    "replicated": Replicated,
    "model_parallel": ModelParallel,
}
