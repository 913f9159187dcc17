"""The KV pool's size, and the memory and CPUs a container really has."""

from __future__ import annotations

import pytest

from firsttoken_runtime import memory

GIB = 2**30


def test_pool_says_what_it_means():
    pool = memory.pool(int(1.2 * GIB), page_tokens=16, bytes_per_token=46_080)
    assert pool.describe() == "KV pool: 1.2 GiB = 27,952 tokens in 1,747 pages"
    assert pool.bytes <= 1.2 * GIB


def test_a_pool_without_room_for_two_pages_is_refused_with_the_numbers():
    with pytest.raises(memory.PoolError, match=r"1.0 MiB .* hold 1 pages of 16 tokens.*1.4 MiB.*--kv-memory"):
        memory.pool(1 << 20, page_tokens=16, bytes_per_token=46_080)


def test_a_pool_larger_than_the_memory_that_is_left_is_refused_with_the_numbers():
    memory.must_be_there(2 * GIB, 2 * GIB)
    words = r"out of memory: 1024.0 GiB are asked .* 16.5 GiB are left .*--kv-memory"
    with pytest.raises(memory.PoolError, match=words):
        memory.must_be_there(1024 * GIB, int(16.5 * GIB))


def test_auto_on_cpu_is_a_part_of_what_is_left_and_no_more_than_a_few_long_sequences_need():
    assert memory.cpu_pool_bytes(10 * GIB, 46_080, 1_000_000) == 3 * GIB
    assert memory.cpu_pool_bytes(100 * GIB, 46_080, 8192) == 4 * 8192 * 46_080


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   8388608 kB\n")
    return tmp_path


def files(directory, **contents):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_without_cgroups_the_host_decides(root):
    assert memory.available_bytes(root) == 8 * GIB


def test_cgroup_v2_own_group_and_parents(root):
    (root / "proc/self/cgroup").write_text("0::/pods/one\n")
    group = root / "sys/fs/cgroup"
    files(
        group / "pods", memory__max=str(6 * GIB), memory__current=str(GIB), memory__stat="inactive_file 0\n"
    )
    files(group / "pods/one", memory__max="max\n", memory__current="5")
    assert memory.available_bytes(root) == 5 * GIB
    stat = f"anon 1\ninactive_file {GIB // 2}\n"
    files(group / "pods/one", memory__max=str(2 * GIB), memory__current=str(GIB), memory__stat=stat)
    assert memory.available_bytes(root) == 1.5 * GIB


def test_cgroup_v1(root):
    (root / "proc/self/cgroup").write_text("7:memory:/kubepods/x\n3:cpu,cpuacct:/kubepods/x\n0::/\n")
    # In the container's own mount the path is not there; the mount is the group.
    usage = {"memory__usage_in_bytes": str(GIB), "memory__stat": "total_inactive_file 0\n"}
    files(root / "sys/fs/cgroup/memory", memory__limit_in_bytes=str(3 * GIB), **usage)
    assert memory.available_bytes(root) == 2 * GIB
    files(root / "sys/fs/cgroup/memory", memory__limit_in_bytes="9223372036854771712", **usage)
    assert memory.available_bytes(root) == 8 * GIB


@pytest.mark.parametrize(("quota", "cpus"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 8)])
def test_cpu_quota_v2(root, monkeypatch, quota, cpus):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    (root / "proc/self/cgroup").write_text("0::/\n")
    files(root / "sys/fs/cgroup", cpu__max=quota)
    assert memory.cpu_count(root) == cpus


def test_cpu_quota_v1(root, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    (root / "proc/self/cgroup").write_text("3:cpu,cpuacct:/x\n")
    files(root / "sys/fs/cgroup/cpu", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    assert memory.cpu_count(root) == 4
    files(root / "sys/fs/cgroup/cpu", cpu__cfs_quota_us="-1")
    assert memory.cpu_count(root) == 8
