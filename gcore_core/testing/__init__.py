"""What authors of plugins test with. Each module is imported by its own name; this one stays light."""
