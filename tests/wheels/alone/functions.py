"""Rewards and models of the smallest jobs."""


def length(record):
    return float(len(record.text) % 3)


def make(directory, config, progress):
    """Makes a model with a token for each character that the rows have."""
    from gcore_language.tiny import save_model

    save_model(directory, "llama")


def draw(directory, config, progress):
    """Makes a model that draws."""
    import torch
    from gcore_diffusion.tiny import TinyConfig, TinyNet, save_tiny

    net = TinyNet(TinyConfig(width=32, blocks=1))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_tiny(net, directory)
