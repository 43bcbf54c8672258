#!/bin/sh
# Optuna 5.0.0: a study in a database that is continued with the same seeded sampler proposes
# the parameters of its first trials again, as long as the sampler draws at random: the first ten
# trials of TPESampler, all of RandomSampler. No message says that a trial is a duplicate.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet optuna==5.0.0
cat > case.py <<'PYTHON'
import optuna

print("optuna", optuna.__version__)
optuna.logging.set_verbosity(optuna.logging.WARNING)


def go_on(sampler, name):
    study = optuna.create_study(
        storage="sqlite:///study.db",
        study_name=name,
        load_if_exists=True,
        sampler=sampler(seed=0),
    )
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    return [round(trial.params["x"], 3) for trial in study.trials]


for sampler in (optuna.samplers.TPESampler, optuna.samplers.RandomSampler):
    for _ in range(2):
        seen = go_on(sampler, sampler.__name__)
    print(sampler.__name__, "two calls of three trials:", seen)
    assert len(seen) == 6 and seen[:3] == seen[3:], "this has changed"
PYTHON
venv/bin/python case.py
