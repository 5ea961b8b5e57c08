"""Files that are installed with the package: the tiny Qwen-VL, and pictures for the documents (not in the wheel)."""
