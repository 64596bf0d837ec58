def change(directory):
    settings(directory, "generation_config.json", eos_token_id=[4, 128009])
