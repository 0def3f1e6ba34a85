"""Temporary: variants of the decode kernel, compiled in parallel, then timed one after the other."""
import importlib
import importlib.util
import os
import subprocess
import sys
import time

import torch

T0 = time.perf_counter()
NEW, OLD = "skim.attention.cuda.coded_kernels", "old_kernels"
# format, kernels, tile, programs, block size
TASKS = [
    ("int4", OLD, (64, 1, 5, 255), 12, 16), ("int4", NEW, (64, 1, 5, 255), 12, 16),
    ("int4", NEW, (64, 1, 3, 255), 12, 16), ("int4", "ahead2", (64, 1, 3, 255), 12, 16),
    ("int4", "ahead4", (64, 1, 3, 255), 12, 16), ("int4", "ahead8", (64, 1, 3, 255), 12, 16),
    ("int4", "ahead4", (64, 1, 5, 255), 12, 16), ("int4", OLD, (64, 1, 5, 255), 12, 64),
    ("int4", NEW, (64, 1, 3, 255), 12, 64), ("int4", NEW, (64, 1, 5, 255), 12, 64),
    ("int4", "ahead4", (64, 1, 3, 255), 12, 64), ("int4", "ahead16", (64, 1, 3, 255), 12, 64),
    ("int8", NEW, (32, 1, 2, 168), 12, 64), ("int4", OLD, (64, 1, 3, 255), 12, 16),
    ("int4", OLD, (64, 1, 3, 255), 12, 64),
]
PROGRAMS = [("int4", OLD, (64, 1, 5, 255), 24, 64), ("int4", NEW, (64, 1, 3, 255), 24, 64),
            ("int4", "ahead4", (64, 1, 3, 255), 8, 64), ("int4", "ahead4", (64, 1, 3, 255), 24, 64),
            ("int4", "ahead4", (64, 1, 3, 255), 8, 16), ("int8", NEW, (32, 1, 2, 168), 24, 64)]


def module_of(name):
    if not name.startswith("ahead"):
        return importlib.import_module(name)
    if name not in sys.modules:
        os.environ["AHEAD"] = name[5:]
        spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), "ahead_kernels.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def prepare(task):
    from skim.attention.cuda import coded_launch, metadata
    from skim.attention.cuda.launch import Config
    import coded_kv
    fmt, module, tile, programs, coded_kv.BLOCK_SIZE = task
    coded_launch.decode_kernel = module_of(module).decode_kernel
    key = {"int4": ("int4", "int4"), "int8": ("int8", "int8"), "k8v4": ("int8", "int4")}[fmt]
    coded_launch.CONFIGS[key] = Config(8, *tile)
    metadata.CODED_PROGRAMS = programs


def check(index):
    import coded_kv
    task = TASKS[index]
    prepare(task)
    torch.manual_seed(0)
    pool = coded_kv.make_pool(task[0], 1, 8000 // task[4])
    print(f"checked {task} error {coded_kv.error_of(pool):.2e} {time.perf_counter() - T0:.1f} s", flush=True)


def main():
    jobs = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(len(TASKS))]
    import coded_kv
    torch.manual_seed(0)
    coded_kv.BLOCK_SIZE = 64
    plain = coded_kv.make_pool("auto", 2, 4 * 2048 + 100)
    for job in jobs:
        try:
            job.wait(timeout=40)
        except subprocess.TimeoutExpired:
            job.kill()
    print(f"bf16, blocks of 64 {coded_kv.time_decode(plain, 4, 131072) * 1e3:.1f} us {time.perf_counter() - T0:.1f} s", flush=True)
    del plain
    pools = {}
    for task in TASKS + PROGRAMS + TASKS[:6] + TASKS[7:11]:
        fmt, block = task[0], task[4]
        try:
            prepare(task)
            if (fmt, block) not in pools:
                pools[fmt, block] = coded_kv.make_pool(fmt, 2, (4 * 131072 + 6400) // block)
            pool = pools[fmt, block]
            us = coded_kv.time_decode(pool, 4, 131072) * 1e3
            size = 4 * pool.stores[0].read_bytes(131072, block)
            print(f"{fmt} {task[1].split('.')[-1]:13} {task[2]!s:16} programs {task[3]:3} block {block} {us:7.1f} us {size / us / 1e3:6.0f} GB/s "
                  f"{time.perf_counter() - T0:.1f} s", flush=True)
        except Exception as reason:
            print(task, "failed", type(reason).__name__, str(reason)[:200], flush=True)


if __name__ == "__main__":
    check(int(sys.argv[1])) if len(sys.argv) > 1 else main()
