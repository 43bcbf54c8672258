"""Names of a network's variables, as in checkpoints."""

import keras


def variable_names(variables: list[keras.Variable]) -> list[str]:
    """The paths of a model's variables, such as "conv1/kernel".

    Raises:
        ValueError: two are the same, or one is the state of a random generator, which
            would make a tower depend on its history.
    """
    names = [variable.path for variable in variables]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(
            f"several variables of the model have the name {sorted(repeated)}"
        )
    for name in names:
        if "seed_generator" in name:
            raise ValueError(
                f"the model keeps a random generator, {name}: use the layers of "
                "towers.models.layers, whose noise is an input"
            )
    return names
