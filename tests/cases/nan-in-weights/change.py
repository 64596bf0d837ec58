def change(directory):
    def spoil(w):
        w["model.norm.weight"][3] = float("nan")
        return w

    weights(directory, spoil)
