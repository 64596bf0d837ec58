def change(directory):
    settings(
        directory,
        "config.json",
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
    )
