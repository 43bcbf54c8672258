#!/bin/sh
# torchdata 0.11.0, PyTorch 2.13.0: a StatefulDataLoader that shuffles with a generator and
# was restored in mid-epoch has the rest of this epoch right and other orders in all later
# epochs, without workers (num_workers=0, the default); with one or two workers all are
# those of the run that was not interrupted.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import torch
import torchdata
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")


def create_loader(num_workers):
    generator = torch.Generator().manual_seed(1)
    options = {"num_workers": num_workers, "generator": generator}
    return StatefulDataLoader(range(12), batch_size=2, shuffle=True, **options)


def epoch(loader):
    return torch.cat(list(loader)).tolist()


if __name__ == "__main__":
    print("torchdata", torchdata.__version__, "torch", torch.__version__)
    seen = {}
    for num_workers in (0, 1):
        loader = create_loader(num_workers)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [epoch(batches), epoch(loader), epoch(loader)]
        loader = create_loader(num_workers)
        loader.load_state_dict(state)
        orders = [epoch(loader) for _ in range(3)]
        seen[num_workers] = [a == b for a, b in zip(orders, expected, strict=True)]
        print(num_workers, "workers, same orders:", seen[num_workers])
    assert seen[0] == [True, False, False], "this has changed"
    assert seen[1] == [True, True, True], "this has changed"
PYTHON
venv/bin/python case.py
