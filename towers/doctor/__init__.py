"""Why a run is not faster: `python -m towers.doctor` with the flags of run_train.py."""
