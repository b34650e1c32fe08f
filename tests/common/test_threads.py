"""How threads wait, and how many there are: as the machine allows, and never against what the user has set."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from spr.common import hardware, threads
from spr.common.errors import UserError


def python(code, **environment):
    plain = {name: value for name, value in os.environ.items() if name not in threads._BY_USER}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env=plain | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


SHOW = "import os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"


def test_threads_wait_asleep_from_the_first_import_on():
    assert python(f"import spr; {SHOW}") == ("10000 None", "")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    code = f"import spr, sys; sys.argv = ['', {SHOW!r}]; {child}"
    assert python(code)[0] == "10000 None"


def test_what_the_user_has_set_stays():
    assert python(f"import spr; {SHOW}", GOMP_SPINCOUNT="7")[0] == "7 None"
    assert python(f"import spr; {SHOW}", OMP_WAIT_POLICY="active")[0] == "None active"


@pytest.mark.slow
def test_where_pytorch_was_there_first_it_is_said_once():
    code = "import torch; torch.cuda.is_available = lambda: False; import spr, spr; from spr.common import threads"
    _, said = python(code)
    assert said.count("PyTorch was imported before spr") == 1
    assert "PyTorch was" not in python("import torch; torch.cuda.is_available = lambda: True; import spr")[1]


def test_nothing_is_said_where_it_is_not_too_late(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {}
        threads.set_wait_policy(found)
    assert found == threads._SHORT_SPIN


def test_bf16_on_a_cpu_is_for_processors_that_compute_it(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    for flags, can in (("fpu avx512_bf16 vme", True), ("fpu amx_bf16", True), ("fpu avx512f", False)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        if can:
            assert hardware.choose_precision("bf16", torch.device("cpu")) == "bf16"
        else:
            with pytest.raises(UserError, match="AVX512-BF16 or AMX"):
                hardware.choose_precision("bf16", torch.device("cpu"))
    assert hardware.choose_precision("auto", torch.device("cpu")) == "fp32"


def test_an_environment_goes_back_to_what_the_user_set():
    usual = {"HOME": "/home", "OMP_NUM_THREADS": "2"}
    ours = dict(usual)
    threads.set_wait_policy(ours)
    assert threads.as_the_user_set(ours) == usual
    assert threads.as_the_user_set(usual | {"GOMP_SPINCOUNT": "7"}) == usual | {"GOMP_SPINCOUNT": "7"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/job", "sys/job/cpu.max": "150000 100000"}, [1.5]),
        ({"proc/self/cgroup": "0::/job", "sys/job/cpu.max": "max 100000", "sys/cpu.max": "400000 100000"}, [4.0]),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n0::/",
                "sys/cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n",
                "sys/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            [0.5],
        ),
        (
            {"proc/self/cgroup": "3:cpu:/\n", "sys/cpu/cpu.cfs_quota_us": "-1", "sys/cpu/cpu.cfs_period_us": "100000"},
            [],
        ),
        ({}, []),
    ],
)
def test_quotas_of_groups_limit_the_cores(tmp_path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(hardware._core_quotas(tmp_path / "proc", tmp_path / "sys")) == expected
    monkeypatch.setattr(hardware, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(hardware, "_CGROUPS", tmp_path / "sys")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert hardware.cores() == max(1, int(min([8, *expected])))
