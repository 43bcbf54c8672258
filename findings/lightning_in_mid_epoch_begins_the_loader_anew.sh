#!/bin/sh
# Lightning 2.6.6: a training continued from a checkpoint in the middle of an epoch counts on from
# its batch, but begins the loader anew: the first images of the epoch are seen twice, the
# last ones never. A warning says that this "can cause unreliable results".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 lightning==2.6.6
cat > case.py <<'PYTHON'
import logging
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print("lightning", lightning.__version__)
off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, batch_index):
        self.seen.append((self.current_epoch, batch_index, int(batch[0])))
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train(steps, **start):
    module = Module()
    saver = ModelCheckpoint(".", "half", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[saver], accelerator="cpu", **off
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.arange(10)), **start)
    warned = [str(w.message) for w in caught if "resum" in str(w.message)]
    return module.seen, warned


before, _ = train(4)
after, warned = train(10, ckpt_path="half.ckpt")
print("epoch, batch, image before:", before)
print("epoch, batch, image after:", after, *warned)
assert [x[:2] for x in after] == [(0, i) for i in range(4, 10)], "this has changed"
assert [x[2] for x in after] == [0, 1, 2, 3, 4, 5], "this has changed"
PYTHON
venv/bin/python case.py
