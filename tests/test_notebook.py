"""docs/photos.ipynb: its code runs, its figures are right, its outputs may be shown."""

import json

import pytest
from processes import ROOT, Program

CELLS = json.loads((ROOT / "docs" / "photos.ipynb").read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]

# After the cells, in their process.
CHECK = """
import tensorflow as tf
from sklearn.metrics import accuracy_score, confusion_matrix

from towers.build.builder import load_data_set

test = load_data_set(best.config, best.dataset_info).test
held_out = predict("runs/shapes", [test.location(i) for i in range(test.num_examples)])


def best_of(predicted):
    return [name for [(name, _)] in predicted.top(1)]


matrix = confusion_matrix(held_out.labels, best_of(held_out), labels=best.class_names)
np.testing.assert_array_equal(confusion, matrix)
accuracy = accuracy_score(held_out.labels, best_of(held_out))
assert accuracy == figures["test_accuracy_ema"] > 0.6
assert len(mistakes) == len(held_out.labels) - matrix.trace()

tuned_accuracy = accuracy_score(after.labels, best_of(after))
assert tuned_accuracy > accuracy_score(before.labels, best_of(before)) + 0.2
assert np.mean(correct) == tuned_accuracy
run = load_run("runs/tuned")
expected = run.model_ema(run.preprocess(images))
np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
"""


@pytest.mark.slow
def test_the_cells_run_in_order_and_their_figures_are_right(tmp_path):
    cells = ["".join(cell["source"]) for cell in CODE]
    (tmp_path / "cells.py").write_text("\n\n".join([*cells, CHECK]))
    (tmp_path / "notebook").mkdir()
    program = [tmp_path / "cells.py"]
    with Program(program, tmp_path / "notebook", {"MPLBACKEND": "Agg"}) as process:
        assert process.wait(600) == 0, process.output
