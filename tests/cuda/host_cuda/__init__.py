"""The CUDA sources compiled for this machine and run as loops: a device without a GPU.
Only the header beside this file stands between them and g++."""
