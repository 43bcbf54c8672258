#!/bin/sh
# Five batches an epoch, gradients accumulated over four: the update for the batch left over gets
# a quarter of its gradient in Lightning 2.6.6 and in accelerate 1.15.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 lightning==2.6.6 accelerate==1.15.0
cat > case.py <<'PYTHON'
import logging

import accelerate
import lightning
import torch
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print("lightning", lightning.__version__, "accelerate", accelerate.__version__)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_index):
        return -self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


seen = {}
off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
trainer = lightning.Trainer(
    max_epochs=1, accumulate_grad_batches=4, accelerator="cpu", **off
)
trainer.fit(module := Module(), DataLoader(torch.arange(5)))
seen["Lightning"] = module.weight.item()

helper = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
loader = DataLoader(torch.arange(5))
module = Module()
module, sgd, loader = helper.prepare(module, module.configure_optimizers(), loader)
for _ in loader:
    with helper.accumulate(module):
        helper.backward(module.training_step(None, 0))
        sgd.step()
        sgd.zero_grad()
seen["accelerate"] = module.weight.item()

print("gradients of 1, weight after two updates at a rate of 1:", seen)
assert seen == {"Lightning": 1.25, "accelerate": 1.25}, "this has changed"
PYTHON
venv/bin/python case.py
