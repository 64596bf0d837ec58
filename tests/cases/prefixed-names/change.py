def change(directory):
    weights(directory, lambda w: {f"base_model.model.{name}": tensor for name, tensor in w.items()})
