"""Workers in several processes: who they are, how they connect, sums over all."""
