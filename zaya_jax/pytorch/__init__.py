"""To and from PyTorch: names, tensor files, whole model directories of transformers."""
