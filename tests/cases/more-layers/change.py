def change(directory):
    settings(directory, "config.json", num_hidden_layers=3)
