"""Signals: raised where nothing is to be saved, remembered where something is, and never lost in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lora_trainer.stopping import Stopped, StopRequest

BLOCKED = """
import ctypes, os, threading, time
import lora_trainer.stopping as stopping

stopping.PATIENCE_SECONDS = 0.1
stopping.STOP.last_words = lambda: print("last words", flush=True)
stopping.STOP.install()

def tell():
    asleep = 0
    while asleep < 20:  # the main thread has been waiting for a fifth of a second
        time.sleep(0.01)
        state = open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
    print("blocked", flush=True)

lock, lib = ctypes.create_string_buffer(64), ctypes.CDLL(None)
lib.pthread_mutex_lock(lock)
threading.Thread(target=tell, daemon=True).start()
lib.pthread_mutex_lock(lock)
"""


def test_a_signal_is_raised_at_once_unless_deferred():
    stop = StopRequest()
    with stop.deferred():
        stop._receive(signal.SIGTERM, None)
    assert stop.requested
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.check()


def test_a_signal_is_raised_only_once_so_that_the_ending_is_not_disturbed():
    stop = StopRequest()
    with pytest.raises(Stopped):
        stop._receive(signal.SIGINT, None)
    stop._receive(signal.SIGTERM, None)


def test_deferring_can_be_nested():
    stop = StopRequest()
    with stop.deferred():
        with stop.deferred():
            pass
        stop._receive(signal.SIGTERM, None)
        stop.check()
    with pytest.raises(Stopped):
        stop.check()


def test_nothing_is_raised_without_a_signal():
    StopRequest().check()


def test_a_main_thread_that_is_stuck_in_native_code_is_ended_with_its_last_words():
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "blocked\n"
    os.kill(process.pid, signal.SIGTERM)
    begin = time.monotonic()
    assert process.wait(20) == 85
    assert time.monotonic() - begin < 10
    assert process.communicate()[0] == "last words\n"
