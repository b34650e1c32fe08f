"""How threads wait, and how many there are: as the machine allows, and never against what the user has set."""

import os
import subprocess
import sys
import warnings

import pytest

from spr.common import hardware, threads


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
    assert python(f"import spr; {SHOW}") == ("1000 None", "")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    code = f"import spr, sys; sys.argv = ['', {SHOW!r}]; {child}"
    assert python(code)[0] == "1000 None"


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
