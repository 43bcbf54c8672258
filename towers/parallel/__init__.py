"""Ways of being parallel: devices, towers, gradients, and one strategy a file."""

from towers.parallel.towers import Towers

STRATEGIES = {"towers": Towers}
