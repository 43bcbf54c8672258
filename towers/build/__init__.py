"""From a Config to the parts of a run: data, network, update, feed, trainer."""
