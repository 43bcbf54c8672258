"""Training steps of tf_cnn_benchmarks, for `benchmarks.peers`.

    python step.py NETWORK IMAGE_SIZE BATCH_SIZE STEPS CLONE

CLONE is a clone of github.com/tensorflow/benchmarks, which stays as it is. The program
builds its network and trains it in its own loop, in float32 on a CPU. Not its defaults
are `use_tf_layers`, because TensorFlow has no `tf.layers` any more, the layout, which a
CPU needs, and SGD with momentum and without weight decay, as the other peers.

This prints the number of trained parameters, then lets the program take so many steps
for each line of standard input and prints their seconds of processor time.
"""

import os
import sys
import time
import types

# Ours -> the data set and the name there. Its resnet50 has its strides elsewhere.
NETWORKS = {
    "cnn": ("cifar10", "alexnet"),  # that of TensorFlow's tutorial
    "resnet20": ("cifar10", "resnet20"),
    "resnet32": ("cifar10", "resnet32"),
    "resnet44": ("cifar10", "resnet44"),
    "resnet56": ("cifar10", "resnet56"),
    "resnet110": ("cifar10", "resnet110"),
    "resnet50": ("imagenet", "resnet50_v1.5"),
}


def serve(name, image_size, batch_size, steps, clone):
    if name not in NETWORKS:
        sys.exit(f"tf_cnn_benchmarks has none of {name}, but of {', '.join(NETWORKS)}")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints is not an answer
    data_name, model = NETWORKS[name]
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.join(clone, "scripts", "tf_cnn_benchmarks"))
    # It needs TensorFlow 1, or tf_keras.
    deepspeech = types.SimpleNamespace(DeepSpeech2Model=None)
    sys.modules["models.experimental.deepspeech"] = deepspeech
    import benchmark_cnn
    import datasets
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    params = benchmark_cnn.make_params(
        model=model,
        device="cpu",
        local_parameter_device="cpu",
        data_format="NHWC",
        variable_update="parameter_server",
        batch_size=int(batch_size),
        optimizer="momentum",
        init_learning_rate=0.01,
        weight_decay=0.0,
        use_tf_layers=False,
        num_warmup_batches=0,
        num_batches=10**9,
    )
    params = benchmark_cnn.setup(params)
    dataset = datasets.create_dataset(data_dir=None, data_name=data_name)
    dataset.num_classes = 10
    program = benchmark_cnn.BenchmarkCNN(params, dataset)
    program.model.image_size = int(image_size)

    def commands():
        num_params = sum(x.shape.num_elements() for x in tf.trainable_variables())
        print(num_params, file=answers, flush=True)
        for _ in sys.stdin:
            used = time.process_time()
            yield from range(int(steps))
            print(time.process_time() - used, file=answers, flush=True)
        sys.exit()

    def step_on_command(*args, **options):
        next(command)
        return benchmark_one_step(*args, **options)

    command, benchmark_one_step = commands(), benchmark_cnn.benchmark_one_step
    benchmark_cnn.benchmark_one_step = step_on_command
    program.run()


if __name__ == "__main__":
    serve(*sys.argv[1:])
