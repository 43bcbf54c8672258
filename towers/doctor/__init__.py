"""Why a run is not faster: `python -m towers.doctor` with the options of a run."""
