#!/bin/sh
# MLflow 3.17.2: without a tracking URI runs go into mlflow.db, an SQLite file in the
# working folder, and no folder mlruns appears; two values of one step are both kept,
# and the last one of the highest step is the run's.
# Seen: mlflow.db; (step, value) (1, nan), (1, 2.0), (0, 1.0), the run's is 2.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet mlflow==3.17.2
cat > case.py <<'PYTHON'
import math
import os

import mlflow

print("mlflow", mlflow.__version__)
mlflow.set_experiment("e")
with mlflow.start_run() as run:
    for step, value in ((1, math.nan), (1, 2.0), (0, 1.0)):
        mlflow.log_metric("loss", value, step=step)
client = mlflow.MlflowClient()
history = [(x.step, x.value) for x in client.get_metric_history(run.info.run_id, "loss")]
files = [x for x in os.listdir(".") if x.startswith("ml")]
value = client.get_run(run.info.run_id).data.metrics["loss"]
print(mlflow.get_tracking_uri().split("//")[0], files, history, "latest:", value)
assert mlflow.get_tracking_uri().startswith("sqlite:"), "this has changed"
assert files == ["mlflow.db"] and value == 2.0, "this has changed"
assert len(history) == 3 and math.isnan(history[0][1]), "this has changed"
PYTHON
venv/bin/python case.py
