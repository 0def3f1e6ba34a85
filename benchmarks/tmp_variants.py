"""Temporary: variants of the decode kernel, compiled in parallel, then timed one after the other."""
import importlib
import subprocess
import sys
import time

import torch

T0 = time.perf_counter()
NEW, HALF = "skim.attention.cuda.coded_kernels", "half_keys"
TASKS = [
    ("int4", NEW, (64, 1, 5, 255), 12), ("int4", HALF, (64, 1, 5, 255), 12),
    ("int8", NEW, (32, 1, 2, 168), 12), ("int4", HALF, (32, 1, 5, 168), 12),
    ("int4", HALF, (64, 1, 7, 255), 12), ("int4", HALF, (64, 1, 5, 168), 12),
    ("int4", NEW, (32, 1, 5, 168), 12), ("int8", NEW, (32, 1, 4, 168), 12),
    ("int4", HALF, (32, 1, 7, 168), 12), ("int4", HALF, (128, 2, 5, 255), 12),
    ("int4", HALF, (64, 1, 3, 255), 12), ("int4", HALF, (32, 1, 5, 128), 16),
    ("int8", NEW, (16, 1, 5, 128), 16), ("k8v4", NEW, (32, 1, 2, 168), 12),
    ("int8", NEW, (32, 1, 5, 168), 12),
]
PROGRAMS = [("int4", HALF, (64, 1, 5, 255), 8), ("int4", HALF, (64, 1, 5, 255), 16), ("int4", HALF, (64, 1, 5, 255), 24),
            ("int4", HALF, (32, 1, 5, 168), 24), ("int4", HALF, (64, 1, 5, 168), 24), ("int8", NEW, (32, 1, 2, 168), 24)]


def prepare(task):
    from skim.attention.cuda import coded_launch, metadata
    from skim.attention.cuda.launch import Config
    fmt, module, tile, programs = task
    coded_launch.decode_kernel = importlib.import_module(module).decode_kernel
    key = {"int4": ("int4", "int4"), "int8": ("int8", "int8"), "k8v4": ("int8", "int4")}[fmt]
    coded_launch.CONFIGS[key] = Config(8, *tile)
    metadata.CODED_PROGRAMS = programs


def check(index):
    import coded_kv
    task = TASKS[index]
    prepare(task)
    torch.manual_seed(0)
    pool = coded_kv.make_pool(task[0], 1, 500)
    print(f"checked {task} error {coded_kv.error_of(pool):.2e} {time.perf_counter() - T0:.1f} s", flush=True)


def main():
    jobs = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(len(TASKS))]
    import coded_kv
    torch.manual_seed(0)
    plain = coded_kv.make_pool("auto", 2, 4 * 8192 + 400)
    for job in jobs:
        try:
            job.wait(timeout=40)
        except subprocess.TimeoutExpired:
            job.kill()
    print(f"bf16 {coded_kv.time_decode(plain, 4, 131072) * 1e3:.1f} us {time.perf_counter() - T0:.1f} s", flush=True)
    del plain
    pools = {}
    for task in TASKS[:6] + PROGRAMS[:3] + TASKS[6:] + PROGRAMS[3:] + TASKS[:3]:
        fmt = task[0]
        try:
            if fmt not in pools:
                pools[fmt] = coded_kv.make_pool(fmt, 2, 4 * 8192 + 400)
            prepare(task)
            us = coded_kv.time_decode(pools[fmt], 4, 131072) * 1e3
            size = 4 * pools[fmt].stores[0].read_bytes(131072, 16)
            print(f"{fmt} {task[1].split('.')[-1]:13} {task[2]!s:16} {task[3]:3} {us:7.1f} us {size / us / 1e3:6.0f} GB/s "
                  f"{time.perf_counter() - T0:.1f} s", flush=True)
        except Exception as reason:
            print(task, "failed", type(reason).__name__, str(reason)[:200], flush=True)


if __name__ == "__main__":
    check(int(sys.argv[1])) if len(sys.argv) > 1 else main()
