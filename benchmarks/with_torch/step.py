"""Training steps of networks written plainly in PyTorch, and of others as timm has
them, for `benchmarks.peers`.

    PYTHON step.py NETWORK IMAGE_SIZE BATCH_SIZE STEPS PRECISION [--compile]
        [--checkpoint] [--predict]

NETWORK is one of this file, or timm/NAME. It imports no TensorFlow and no towers, and
runs in a Python of its own. It prints the number of trained parameters, then takes
STEPS for each line of standard input and prints their seconds of processor time; with
--predict they are predictions of the batch. Images lie ready, channels last; SGD with
momentum, as the other peers.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

CLASSES, SIDE = 10, 32


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Zeros(nn.Module):
    """Every other pixel, and channels of zeros on both sides."""

    def __init__(self, count, stride):
        super().__init__()
        self.pads, self.stride = (0, 0, 0, 0, count // 2, count - count // 2), stride

    def forward(self, x):
        return functional.pad(x[:, :, :: self.stride, :: self.stride], self.pads)


class Residual(nn.Module):
    """Two 3x3 convolutions, and a shortcut of 1x1 (`projects`) or of none."""

    def __init__(self, inputs, outputs, stride, projects):
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if projects and stride > 1:
            projection = conv(inputs, outputs, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))
        elif stride > 1:
            self.shortcut = Zeros(outputs - inputs, stride)

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(widths, blocks, projects):
    layers = [conv(3, widths[0], 3), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for outputs in widths:
        for _ in range(blocks):
            stride = 1 if inputs == outputs else 2
            layers.append(Residual(inputs, outputs, stride, projects))
            inputs = outputs
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(*layers, *pool)


def resnet18(side=SIDE):
    return resnet((64, 128, 256, 512), 2, projects=True)


def resnet20(side=SIDE):
    return resnet((16, 32, 64), 3, projects=False)


def cnn(side=SIDE):
    """The network of TensorFlow's CIFAR-10 tutorial."""

    def response():
        return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)

    features = side // 4
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(response(), nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), response()),
        *(nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(64 * features**2, 384)),
        *(nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, CLASSES)),
    )


def speedrun(side=SIDE):
    """airbench94 (Jordan 2024) in the widths of airbench94_muon."""

    def norm(channels):
        layer = nn.BatchNorm2d(channels, eps=1e-5, momentum=0.4)
        layer.weight.requires_grad_(False)
        return layer

    whitening = nn.Conv2d(3, 24, 2)
    whitening.weight.requires_grad_(False)
    layers, inputs = [whitening, nn.GELU()], 24
    for outputs in (64, 256, 256):
        layers += [conv(inputs, outputs, 3), nn.MaxPool2d(2), norm(outputs), nn.GELU()]
        layers += [conv(outputs, outputs, 3), norm(outputs), nn.GELU()]
        inputs = outputs
    return nn.Sequential(
        *layers, nn.MaxPool2d(3), nn.Flatten(), nn.Linear(inputs, CLASSES, bias=False)
    )


class Block(nn.Module):
    """A block of a Vision Transformer."""

    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(channels, eps=1e-6)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.norm2 = nn.LayerNorm(channels, eps=1e-6)
        self.hidden = nn.Linear(channels, 4 * channels)
        self.mlp = nn.Linear(4 * channels, channels)

    def forward(self, x):
        n, tokens, channels = x.shape
        parts = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(y.transpose(1, 2).reshape(n, tokens, channels))
        return x + self.mlp(functional.gelu(self.hidden(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches of 4x4 with fixed positions, blocks, the mean of the tokens."""

    def __init__(self, side, channels, depth, heads, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(3, channels, patch, patch)
        # Which numbers they are makes no difference to the time.
        positions = torch.randn((side // patch) ** 2, channels)
        self.register_buffer("positions", positions)
        self.blocks = nn.Sequential(*(Block(channels, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def vit_tiny(side=SIDE):
    return VisionTransformer(side, 192, 12, 3)


NETWORKS = {x.__name__: x for x in (cnn, resnet18, resnet20, speedrun, vit_tiny)}


def serve(name, image_size, batch_size, steps, precision, *flags):
    torch.manual_seed(0)
    side = int(image_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True  # PyTorch's way to choose convolutions
    if name in NETWORKS:
        model = NETWORKS[name](side)
    else:
        import timm_program  # noqa: F401  (defines what timm's imports want)
        from timm import create_model

        options = {"num_classes": CLASSES, "drop_path_rate": 0.0}
        if name.startswith(("timm/vit", "timm/deit")):
            options["img_size"] = side
        model = create_model(name.removeprefix("timm/"), **options)
        model.set_grad_checkpointing("--checkpoint" in flags)
    predicts = "--predict" in flags
    model = model.train(not predicts).to(device, memory_format=torch.channels_last)
    trained = [x for x in model.parameters() if x.requires_grad]
    print(sum(x.numel() for x in trained), flush=True)
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    network = torch.compile(model) if "--compile" in flags else model
    images = torch.randn(int(batch_size), 3, side, side)
    images = images.to(device, memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (int(batch_size),), device=device)
    casts = torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16")
    for _ in sys.stdin:
        used = time.process_time()
        for _ in range(int(steps)):
            if predicts:
                with casts, torch.inference_mode():
                    network(images)
                continue
            optimizer.zero_grad(set_to_none=True)
            with casts:
                logits = network(images)
            functional.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        print(time.process_time() - used, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
