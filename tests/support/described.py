"""Networks of `towers.models` for the oracle, written from the papers."""

from engines.oracle import INPUT, layer, plain


def _join(found, name, shortcut, rate=0.0, place=""):
    """Append the end of a residual branch: stochastic depth and the sum."""
    if rate:
        found.append(layer("stochastic_depth", f"{name}_depth{place}", rate=rate))
    found.append(layer("add", f"{name}_add{place}", (shortcut, found[-1].name)))


def cnn() -> list:
    norm = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9, "beta": 0.75}
    return [
        *plain("conv:conv1 relu:relu1"),
        layer("max_pool", "pool1", size=3, stride=2),
        layer("local_response_norm", "norm1", **norm),
        *plain("conv:conv2 relu:relu2"),
        layer("local_response_norm", "norm2", **norm),
        layer("max_pool", "pool2", size=3, stride=2),
        *plain("flatten:flatten dense:local3 relu:relu3 dense:local4 relu:relu4"),
        layer("dense", "softmax_linear"),
    ]


def lenet() -> list:
    pool = {"size": 2, "stride": 2, "padding": "valid"}
    return [
        layer("conv", "conv1", padding="valid"),
        layer("relu", "relu1"),
        layer("average_pool", "pool1", **pool),
        layer("conv", "conv2", padding="valid"),
        layer("relu", "relu2"),
        layer("average_pool", "pool2", **pool),
        *plain("flatten:flatten dense:fc3 relu:relu3 dense:fc4"),
    ]


def alexnet(columns: int, large: bool = False) -> list:
    norm = {"depth_radius": 2, "bias": 2.0, "alpha": 1e-4, "beta": 0.75}
    pool = {"size": 3, "stride": 2, "padding": "valid"}
    first = plain("conv:conv1")
    if large:
        first = [
            layer("pad", "pad1", rows=(1, 2), columns=(1, 2)),
            layer("conv", "conv1", stride=4, padding="valid"),
        ]
    return [
        *first,
        layer("relu", "relu1"),
        layer("local_response_norm", "norm1", **norm, groups=columns),
        layer("max_pool", "pool1", **pool),
        layer("conv", "conv2", groups=columns),
        layer("relu", "relu2"),
        layer("local_response_norm", "norm2", **norm, groups=columns),
        layer("max_pool", "pool2", **pool),
        *plain("conv:conv3 relu:relu3"),
        layer("conv", "conv4", groups=columns),
        layer("relu", "relu4"),
        layer("conv", "conv5", groups=columns),
        layer("relu", "relu5"),
        layer("max_pool", "pool5", **pool),
        *plain("flatten:flatten dense:fc6 relu:relu6"),
        layer("dropout", "dropout6", rate=0.5),
        *plain("dense:fc7 relu:relu7"),
        layer("dropout", "dropout7", rate=0.5),
        layer("dense", "fc8"),
    ]


def _norm(name, inputs=()):
    return layer("batch_norm", name, inputs, momentum=0.9, epsilon=1.001e-5)


def _conv3x3(name, stride=1):
    """Return a convolution; with a stride it is padded by one pixel on every side."""
    if stride == 1:
        return [layer("conv", name)]
    return [
        layer("pad", f"{name}_pad", rows=(1, 1), columns=(1, 1)),
        layer("conv", name, stride=stride, padding="valid"),
    ]


def _last():
    return [layer("global_average_pool", "pool"), layer("dense", "logits")]


def _zeros_shortcut(name, channels):
    """Return every other pixel, with channels doubled by zeros on both sides."""
    more = (channels // 2, channels - channels // 2)
    return [
        layer("average_pool", f"{name}_subsample", size=1, stride=2),
        layer("pad", f"{name}_zeros", channels=more),
    ]


def _conv_shortcut(name, _):
    conv = f"{name}_shortcut_conv"
    return [layer("conv", conv, stride=2), _norm(f"{name}_shortcut_norm")]


def _resnet(num_stages, num_blocks, channels, shortcut_fn):
    found = [layer("conv", "stem_conv"), _norm("stem_norm"), layer("relu", "stem_relu")]
    for stage in range(1, num_stages + 1):
        for block in range(1, num_blocks + 1):
            name, last = f"stage{stage}_block{block}", found[-1].name
            stride, shortcut = 1, last
            if stage > 1 and block == 1:
                stride = 2
                found += shortcut_fn(name, channels * 2 ** (stage - 2))
                shortcut = found[-1].name
            first, *rest = _conv3x3(f"{name}_conv1", stride)
            found += [
                first._replace(inputs=(last,)),
                *rest,
                _norm(f"{name}_norm1"),
                *plain(f"relu:{name}_relu1 conv:{name}_conv2"),
                _norm(f"{name}_norm2"),
            ]
            _join(found, name, shortcut)
            found.append(layer("relu", f"{name}_relu2"))
    return found + _last()


def cifar_resnet(depth: int, channels: int) -> list:
    """Return a CIFAR ResNet of 6n + 2 layers, with `channels` in the first stage."""
    return _resnet(3, (depth - 2) // 6, channels, _zeros_shortcut)


def resnet18() -> list:
    return _resnet(4, 2, 0, _conv_shortcut)


def imagenet_resnet(
    blocks: tuple[int, ...], sizes: tuple[int, ...], stochastic_depth: float = 0.0
) -> list:
    """Return a ResNet with `blocks` per stage and kernel `sizes` per block."""
    found = [
        layer("pad", "stem_conv_pad", rows=(3, 3), columns=(3, 3)),
        layer("conv", "stem_conv", stride=2, padding="valid"),
        _norm("stem_norm"),
        layer("relu", "stem_relu"),
        layer("pad", "stem_pool_pad", rows=(1, 1), columns=(1, 1)),
        layer("max_pool", "stem_pool", size=3, stride=2, padding="valid"),
    ]
    places = [
        (stage, block)
        for stage, count in enumerate(blocks, start=1)
        for block in range(1, count + 1)
    ]
    for index, (stage, block) in enumerate(places, start=1):
        name, last = f"stage{stage}_block{block}", found[-1].name
        stride = 2 if stage > 1 and block == 1 else 1
        shortcut = last
        if block == 1 and (stage > 1 or 1 in sizes):
            shortcut = f"{name}_shortcut_norm"
            conv = f"{name}_shortcut_conv"
            found += [layer("conv", conv, stride=stride), _norm(shortcut)]
        branch = []
        for i, size in enumerate(sizes, start=1):
            conv, own = f"{name}_conv{i}", stride if i == sizes.index(3) + 1 else 1
            branch += [layer("conv", conv)] if size == 1 else _conv3x3(conv, own)
            branch += [_norm(f"{name}_norm{i}"), layer("relu", f"{name}_relu{i}")]
        first, *rest, last_relu = branch
        found += [first._replace(inputs=(last,)), *rest]
        _join(found, name, shortcut, stochastic_depth * index / len(places))
        found.append(last_relu)
    return found + _last()


def wide_resnet(depth: int, dropout: float) -> list:
    found = [layer("conv", "stem_conv")]
    for stage in (1, 2, 3):
        for block in range(1, (depth - 4) // 6 + 1):
            name, shortcut = f"stage{stage}_block{block}", found[-1].name
            stride = 2 if stage > 1 and block == 1 else 1
            found += [_norm(f"{name}_norm1"), layer("relu", f"{name}_relu1")]
            if block == 1:
                found.append(layer("conv", f"{name}_shortcut", stride=stride))
                shortcut = f"{name}_shortcut"
            first, *rest = _conv3x3(f"{name}_conv1", stride)
            found += [
                first._replace(inputs=(f"{name}_relu1",)),
                *rest,
                _norm(f"{name}_norm2"),
                layer("relu", f"{name}_relu2"),
                layer("dropout", f"{name}_dropout", rate=dropout),
                layer("conv", f"{name}_conv2"),
            ]
            _join(found, name, shortcut)
    return [*found, _norm("last_norm"), layer("relu", "last_relu"), *_last()]


def speedrun(depth: int, momentum: float) -> list:
    found = [layer("conv", "whitening", padding="valid"), layer("gelu", "gelu0")]
    for group in (1, 2, 3):
        for place in range(1, depth + 1):
            name = f"{group}_{place}"
            found.append(layer("conv", f"conv{name}"))
            if place == 1:
                pool = {"size": 2, "stride": 2, "padding": "valid"}
                found.append(layer("max_pool", f"pool{group}", **pool))
            norm = {"momentum": momentum, "epsilon": 1.001e-5}
            found.append(layer("batch_norm", f"norm{name}", **norm))
            if place == 3:
                both = (f"norm{name}", f"gelu{group}_1")
                found.append(layer("add", f"add{group}", both))
            found.append(layer("gelu", f"gelu{name}"))
    return [*found, layer("global_max_pool", "pool"), layer("dense", "logits")]


def convmixer(depth: int, channels: int) -> list:
    def active(name, inputs, **options):
        return [
            layer("conv", name, inputs, **options),
            layer("gelu", f"{name}_gelu"),
            _norm(f"{name}_norm"),
        ]

    found = active("patches", (INPUT,), stride=2, padding="valid")
    for block in range(1, depth + 1):
        name, last = f"block{block}", found[-1].name
        found += active(f"{name}_pixels", (last,), groups=channels)
        _join(found, name, last)
        found += active(f"{name}_channels", ())
    return found + _last()


def _convolved(
    name, activation, as_tensorflow, inputs=(), size=1, stride=1, kind="conv"
):
    """Return a convolution, its normalization and an activation."""
    found, padding = [], "same"
    if stride > 1 and not as_tensorflow:
        edges = (size // 2, size // 2)
        found = [layer("pad", f"{name}_pad", inputs, rows=edges, columns=edges)]
        inputs, padding = (), "valid"
    found.append(layer(kind, name, inputs, stride=stride, padding=padding))
    norm = {"momentum": 0.9, "epsilon": 1.001e-5}
    if as_tensorflow:
        norm = {"momentum": 0.99, "epsilon": 1e-3}
    found.append(layer("batch_norm", f"{name}_norm", **norm))
    return found + ([layer(activation, f"{name}_{activation}")] if activation else [])


def _inverted_residuals(found, stages, rate, as_tensorflow, gate, squeeze=None):
    """Append blocks of (size, stride, expanded, squeezed, shortcut, activation)."""
    found, index = list(found), 0
    for stage, blocks in enumerate(stages, start=1):
        for block, row in enumerate(blocks, start=1):
            size, stride, is_expanded, is_squeezed, has_shortcut, activation = row
            name, last, index = f"stage{stage}_block{block}", found[-1].name, index + 1
            form = (activation, as_tensorflow)
            if is_expanded:
                found += _convolved(f"{name}_expand", *form)
            depthwise = {"size": size, "stride": stride, "kind": "depthwise"}
            found += _convolved(f"{name}_depthwise", *form, **depthwise)
            if is_squeezed:
                inner, inside = found[-1].name, squeeze or activation
                found += [
                    layer("global_average_pool", f"{name}_pool"),
                    layer("pixel", f"{name}_squeeze"),
                    layer(inside, f"{name}_squeeze_{inside}"),
                    layer("pixel", f"{name}_excite"),
                    layer(gate, f"{name}_excite_{gate}"),
                ]
                gates = found[-1].name
                found.append(layer("multiply", f"{name}_multiply", (inner, gates)))
            found += _convolved(f"{name}_project", None, as_tensorflow)
            if has_shortcut:
                _join(found, name, last, rate * index / sum(map(len, stages)))
    return found


def efficientnet(
    counts: tuple[int, ...],
    activation: str,
    dropout: float = 0.0,
    rate: float = 0.0,
    as_tensorflow: bool = False,
) -> list:
    """Return stages of `counts` blocks; SiLU implies squeeze-and-excitation."""
    sizes, strides, stages = (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), []
    for stage, count in enumerate(counts):
        first = (sizes[stage], strides[stage], stage > 0, activation == "silu", False)
        others = (sizes[stage], 1, stage > 0, activation == "silu", True)
        rows = [first] + [others] * (count - 1)
        stages.append([(*row, activation) for row in rows])
    form = (activation, as_tensorflow)
    found = _convolved("stem", *form, (INPUT,), 3, stride=2)
    found = _inverted_residuals(found, stages, rate, as_tensorflow, "sigmoid")
    pool, logits = _last()
    drops = [layer("dropout", "dropout", rate=dropout)] if dropout else []
    return [*found, *_convolved("head", *form), pool, *drops, logits]


def mobilenet_v3(as_tensorflow: bool, dropout: float, rate: float) -> list:
    """Return MobileNetV3 small."""
    relu, hard = "relu", "hard_silu"
    stages = [
        [(3, 2, False, True, False, relu)],
        [(3, 2, True, False, False, relu), (3, 1, True, False, True, relu)],
        [(5, 2, True, True, False, hard)] + 2 * [(5, 1, True, True, True, hard)],
        [(5, 1, True, True, False, hard), (5, 1, True, True, True, hard)],
        [(5, 2, True, True, False, hard)] + 2 * [(5, 1, True, True, True, hard)],
    ]
    found = _convolved("stem", hard, as_tensorflow, (INPUT,), 3, stride=2)
    gate = ("hard_sigmoid", relu)
    found = _inverted_residuals(found, stages, rate, as_tensorflow, *gate)
    return [
        *found,
        *_convolved("stage6_conv", hard, as_tensorflow),
        layer("global_average_pool", "pool"),
        layer("pixel", "hidden"),
        layer(hard, "hidden_hard_silu"),
        layer("dropout", "dropout", rate=dropout),
        layer("dense", "logits"),
    ]


def mobilenet_v4(dropout: float, rate: float) -> list:
    """Return MobileNetV4 conv small."""
    rows = {3: [(5, 5), (0, 3), (0, 3), (0, 3), (0, 3), (3, 0)]}
    rows[4] = [(3, 3), (5, 5), (0, 5), (0, 5), (0, 3), (0, 3)]
    found = _convolved("stem", "relu", False, (INPUT,), 3, stride=2)
    for stage in (1, 2):
        found += _convolved(f"stage{stage}_block1", "relu", False, (), 3, stride=2)
        found += _convolved(f"stage{stage}_block2", "relu", False)
    for stage, blocks in rows.items():
        for block, (first, second) in enumerate(blocks, start=1):
            name, last = f"stage{stage}_block{block}", found[-1].name
            stride = 2 if block == 1 else 1
            if first:
                depthwise = {"size": first, "kind": "depthwise"}
                found += _convolved(f"{name}_start", None, False, **depthwise)
            found += _convolved(f"{name}_expand", "relu", False)
            if second:
                depthwise = {"size": second, "kind": "depthwise", "stride": stride}
                found += _convolved(f"{name}_depthwise", "relu", False, **depthwise)
            found += _convolved(f"{name}_project", None, False)
            if stride == 1:
                _join(found, name, last, rate * (block + 6 * (stage - 3)) / 12)
    found += _convolved("stage5_block1", "relu", False)
    found.append(layer("global_average_pool", "pool"))
    found += [layer("pixel", "hidden"), _norm("hidden_norm")]
    found += [layer("relu", "hidden_relu"), layer("dropout", "dropout", rate=dropout)]
    return [*found, layer("dense", "logits")]


def tiny_vit(
    sides: tuple[int, int], window: int, heads: int, dropout: float, rate: float
) -> list:
    """Return TinyViT of one block of convolutions and one with attention.

    `sides` are the height and width of the images with attention.
    """

    def convolved(name, activation="gelu", size=1, stride=1, **options):
        if size == 3:
            options |= {"kind": "depthwise", "size": 3}
        return _convolved(name, activation, False, stride=stride, **options)

    def norm(name, inputs=()):
        return layer("layer_norm", name, inputs, epsilon=1e-5)

    def bottleneck(scope, stride=1):
        found = convolved(f"{scope}_conv1") + convolved(
            f"{scope}_conv2", "gelu", 3, stride
        )
        return found + convolved(f"{scope}_conv3", None)

    found = _convolved("stem_conv1", "gelu", False, (INPUT,), 3, stride=2)
    found += _convolved("stem_conv2", None, False, (), 3, stride=2)
    found += bottleneck("stage1_block1")
    name = "stage1_block1"
    _join(found, name, "stem_conv2_norm", rate / 2)
    found += [layer("gelu", f"{name}_gelu"), *bottleneck("stage2_merge", stride=2)]
    name, edges = "stage2_block1", [(0, -side % window) for side in sides]
    found += [
        layer("pad", f"{name}_pad", rows=edges[0], columns=edges[1]),
        norm(f"{name}_norm1"),
        layer("dense", f"{name}_qkv"),
        layer("window_attention", f"{name}_attention", heads=heads, size=window),
        layer("crop", f"{name}_crop", height=sides[0], width=sides[1]),
        layer("dense", f"{name}_out"),
    ]
    _join(found, name, "stage2_merge_conv3_norm", rate, 1)
    found += convolved(f"{name}_local", None, 3)
    found.append(norm(f"{name}_norm2"))
    found += plain(f"dense:{name}_hidden gelu:{name}_gelu dense:{name}_mlp")
    _join(found, name, f"{name}_local_norm", rate, 2)
    return [
        *found,
        layer("global_average_pool", "pool"),
        norm("last_norm"),
        layer("dropout", "dropout", rate=dropout),
        layer("dense", "logits"),
    ]


def convnext(
    depths: tuple[int, ...], dropout: float = 0.0, rate: float = 0.0, version: int = 1
) -> list:
    def norm(name, inputs=()):
        return layer("layer_norm", name, inputs, epsilon=1e-6)

    found, index = [layer("conv", "stem", stride=4, padding="valid")], 0
    found.append(norm("stem_norm"))
    for stage, depth in enumerate(depths, start=1):
        if stage > 1:
            reduce = f"stage{stage}_reduce"
            found.append(norm(f"{reduce}_norm"))
            found.append(layer("conv", reduce, stride=2, padding="valid"))
        for block in range(1, depth + 1):
            name, last, index = f"stage{stage}_block{block}", found[-1].name, index + 1
            found += [
                layer("depthwise", f"{name}_depthwise"),
                norm(f"{name}_norm"),
                *plain(f"dense:{name}_hidden gelu:{name}_gelu"),
                *([layer("response_norm", f"{name}_response")] if version == 2 else []),
                layer("dense", f"{name}_out"),
                *([layer("layer_scale", f"{name}_scale")] if version == 1 else []),
            ]
            _join(found, name, last, rate * index / sum(depths))
    found += [layer("global_average_pool", "pool"), norm("last_norm")]
    if dropout:
        found.append(layer("dropout", "dropout", rate=dropout))
    return [*found, layer("dense", "logits")]


def vgg(stages: tuple[int, ...], dropout: float) -> list:
    """Return a VGG; `stages` are numbers of convolutions."""
    found = []
    for stage, count in enumerate(stages, start=1):
        for place in range(1, count + 1):
            name = f"{stage}_{place}"
            found += [layer("conv", f"conv{name}"), _norm(f"norm{name}")]
            found.append(layer("relu", f"relu{name}"))
        found.append(layer("max_pool", f"pool{stage}", size=2, stride=2))
    pool, logits = _last()
    return [*found, pool, layer("dropout", "dropout", rate=dropout), logits]


def densenet(num_layers: int, dropout: float) -> list:
    """Return three dense blocks of `num_layers` layers."""

    def active_conv(name, inputs=()):
        return [
            _norm(f"{name}_norm", inputs),
            layer("relu", f"{name}_relu"),
            layer("conv", f"{name}_conv"),
            layer("dropout", f"{name}_dropout", rate=dropout),
        ]

    found = [layer("conv", "stem_conv")]
    for block in (1, 2, 3):
        if block > 1:
            name = f"transition{block - 1}"
            found += active_conv(name)
            found.append(layer("average_pool", f"{name}_pool", size=2, stride=2))
        for place in range(1, num_layers + 1):
            name, last = f"block{block}_layer{place}", found[-1].name
            found += active_conv(f"{name}_bottleneck") + active_conv(name)
            found.append(layer("concatenate", f"{name}_concat", (last, found[-1].name)))
    return [*found, _norm("last_norm"), layer("relu", "last_relu"), *_last()]


def vit(
    depth: int,
    heads: int,
    pool: str = "global_average_pool",
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    patch: int = 4,
    registers: int = 0,
    has_scales: bool = False,
    grid: tuple[int, int] | None = None,
) -> list:
    """Return a ViT; with a `grid` of patches it is DINOv3's."""
    epsilon = 1e-5 if grid else 1e-6

    def dropped(name):
        return [layer("dropout", name, rate=dropout)] if dropout else []

    def branch_ends(name, place):
        scales = [layer("layer_scale", f"{name}_scale{place}")] if has_scales else []
        return dropped(f"{name}_dropout{place}") + scales

    found = [layer("conv", "patches", stride=patch, padding="valid")]
    found.append(layer("tokens", "tokens", has_positions=not grid))
    if registers:
        found += [layer("prefix", "registers"), layer("prefix", "class")]
    found += dropped("tokens_dropout")
    for block in range(1, depth + 1):
        name, last = f"block{block}", found[-1].name
        rate = stochastic_depth * block / depth
        parts = tuple(f"{name}_{part}" for part in ("query", "key", "value"))
        found += [
            layer("layer_norm", f"{name}_norm1", epsilon=epsilon),
            *(layer("dense", part, (f"{name}_norm1",)) for part in parts),
            layer("attention", f"{name}_attention", parts, heads=heads, grid=grid),
            layer("dense", f"{name}_out"),
            *branch_ends(name, 1),
        ]
        _join(found, name, last, rate, 1)
        found += [
            layer("layer_norm", f"{name}_norm2", epsilon=epsilon),
            *plain(f"dense:{name}_hidden gelu:{name}_gelu"),
            *dropped(f"{name}_hidden_dropout"),
            layer("dense", f"{name}_mlp"),
            *branch_ends(name, 2),
        ]
        _join(found, name, f"{name}_add1", rate, 2)
    found.append(layer("layer_norm", "last_norm", epsilon=epsilon))
    if grid:
        found.append(layer("last_tokens", "last_patches", first=1 + registers))
    return [*found, layer(pool, "pool"), layer("dense", "logits")]


def bit(depths: tuple[int, ...], groups: tuple[int, ...], rate: float) -> list:
    """Return BiT with groups of the stem, and inner and outer ones of each stage."""

    def conv(name, size, stride=1, inputs=()):
        if stride == 1:
            return [layer("standardized_conv", name, inputs)]
        edge, strided = (size // 2, size // 2), {"stride": stride, "padding": "valid"}
        return [
            layer("pad", f"{name}_pad", inputs, rows=edge, columns=edge),
            layer("standardized_conv", name, **strided),
        ]

    def active(name, count, inputs=()):
        norm = layer("group_norm", name, inputs, groups=count, epsilon=1e-5)
        return [norm, layer("relu", name.replace("norm", "relu"))]

    found = [
        *conv("stem_conv", 7, 2, (INPUT,)),
        layer("pad", "stem_pool_pad", rows=(1, 1), columns=(1, 1)),
        layer("max_pool", "stem_pool", size=3, stride=2, padding="valid"),
    ]
    last, index = groups[0], 0
    for stage, depth in enumerate(depths, start=1):
        inner, outer = groups[2 * stage - 1 : 2 * stage + 1]
        for block in range(1, depth + 1):
            name, index = f"stage{stage}_block{block}", index + 1
            shortcut = found[-1].name
            stride = 2 if stage > 1 and block == 1 else 1
            found += active(f"{name}_norm1", last)
            if block == 1:
                found += conv(f"{name}_shortcut", 1, stride)
                shortcut, last = found[-1].name, outer
            found += [
                *conv(f"{name}_conv1", 1, inputs=(f"{name}_relu1",)),
                *active(f"{name}_norm2", inner),
                *conv(f"{name}_conv2", 3, stride),
                *active(f"{name}_norm3", inner),
                *conv(f"{name}_conv3", 1),
            ]
            _join(found, name, shortcut, rate * index / sum(depths))
    return [*found, *active("last_norm", last), *_last()]
