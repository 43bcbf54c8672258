"""What towers takes of the private parts of TensorFlow and Keras is still there."""

import keras
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.lite.tools import flatbuffer_utils
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps, config
from tensorflow.python.grappler import tf_optimizer

DENSE = keras.layers.Dense(1)
GRAPH = tf.Graph()
FUNC_GRAPH = tf.function(lambda: tf.constant(1.0)).get_concrete_function().graph
NETWORK = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
OWNERS = {
    "_flatten_layers": DENSE,
    "_inbound_nodes": DENSE,
    "_outbound_nodes": DENSE,
    "_seed_generators": keras.layers.LSTM(1),
    "_get_noise_shape": keras.layers.SpatialDropout1D(0.5),
    "_keras_history": NETWORK.outputs[0],
    "_run_through_graph": keras.Model(NETWORK.inputs, NETWORK.outputs),
    "_nodes_by_depth": keras.Model(NETWORK.inputs, NETWORK.outputs),
    "_keras_mask": keras.layers.Masking()(keras.Input((2, 1))),
    "_path": NETWORK.variables[0],
    "_initializer": NETWORK.variables[0],
    "_deferred_initialize": NETWORK.variables[0],
    "_functions": FUNC_GRAPH,
    "_add_function_recursive": GRAPH,
    "_device_function_stack": GRAPH,
    "_add_control_dependencies": FUNC_GRAPH,
    "AutomaticControlDependencies": auto_control_deps,
    "ops_which_must_run": auto_control_deps.AutomaticControlDependencies(),
    "is_op_determinism_enabled": config,
    "OptimizeGraph": tf_optimizer,
    "xla_optimization_barrier": gen_xla_ops,
    "coordination_config_pb2": context,
    "configure_coordination_service": context.context(),
    "set_config_key_value": context.context(),
    "get_config_key_value": context.context(),
    "report_error_to_cluster": context.context(),
    "read_model_from_bytearray": flatbuffer_utils,
    "convert_object_to_bytearray": flatbuffer_utils,
}


@pytest.mark.parametrize("name", OWNERS)
def test_no_private_part_has_moved(name):
    owner = OWNERS[name]
    assert hasattr(owner, name), f"{type(owner).__name__} has no {name} any more"
