"""What a person sees and how a person stops: lines in a pipe, and signals that are polled."""

import ctypes
import io
import os
import signal
import time

import pytest
from rich.console import Console

from spr.experiments import progress
from spr.experiments.progress import Bar, StopRequest


def test_a_pipe_gets_readable_lines(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_EVERY", 0.0)
    monkeypatch.setattr(progress, "_REFRESH", 0.0)
    file = io.StringIO()
    with Bar(Console(file=file), "training", 200, "steps") as bar:
        bar.show(50, "score 1.0")
        time.sleep(0.01)
        bar.show(200, "score 2.0")
    first, second = file.getvalue().splitlines()
    assert first.startswith("training: 50/200, ")
    assert first.endswith("score 1.0")
    assert "200/200" in second
    assert "steps/s" in second
    assert "0:00:00 left" in second


def test_a_fast_loop_is_shown_now_and_then_and_its_end_always(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_EVERY", 0.0)
    monkeypatch.setattr(progress, "_REFRESH", 3600.0)
    file = io.StringIO()
    with Bar(Console(file=file), "training", 200, "steps") as bar:
        for step in range(1, 201):
            bar.show(step)
    (last,) = file.getvalue().splitlines()
    assert last.startswith("training: 200/200, ")


def test_a_pause_is_explained_and_does_not_count_in_the_rate(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_EVERY", 0.0)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file = io.StringIO()
    with Bar(Console(file=file), "training", 2000, "steps") as bar:
        for seconds, step in ((1.0, 100), (10.0, 1000)):
            now[0] = seconds
            bar.show(step)
        bar.pause("compiling")
        for seconds, step in ((70.0, 1001), (80.0, 1101)):  # a minute later: no rate is known at first
            now[0] = seconds
            bar.show(step)
    assert file.getvalue().splitlines() == [
        "training: 100/2,000, - left  ",
        "training: 1,000/2,000, 100.0 steps/s, 0:00:10 left  ",
        "training: compiling",
        "training: 1,001/2,000, - left  ",
        "training: 1,101/2,000, 10.0 steps/s, 0:01:30 left  ",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Bar(console, "training", 200, "steps") as bar:
        bar.show(100, "rl 1.25")
    assert "training" in file.getvalue()
    assert "rl 1.25" in file.getvalue()


def test_the_first_signal_asks_and_a_later_one_kills(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same signal, sent to the process and to its group
        assert stop.check()
        monkeypatch.setattr(progress, "_SAME_SIGNAL", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_handler_that_native_code_replaced_is_put_back():
    with StopRequest() as stop:
        ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL, behind Python's back: the next SIGTERM would kill
        assert not stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.check()
