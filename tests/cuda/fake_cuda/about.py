"""python -m tests.cuda.fake_cuda tests.cuda.fake_cuda.about: the devices, and an array from one."""

from __future__ import annotations

if __name__ == "__main__":
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(name, cupy.cuda.runtime.getDeviceCount(), cupy.arange(3).tolist())
