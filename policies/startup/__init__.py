"""A folder for PYTHONPATH: what it holds runs when a Python process starts."""
