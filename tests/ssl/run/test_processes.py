import sys

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from nestling.ssl.errors import UserError
from nestling.ssl.run import processes


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 is legal on a GPU")
def test_fp16_without_a_gpu_is_refused_with_what_works():
    with pytest.raises(UserError, match=r"train\.precision=fp16.*bf16 and fp32"):
        processes.resolved_precision("fp16")


def test_auto_is_bf16_only_where_the_device_multiplies_it():
    expected = "bf16" if processes.multiplies_bf16() else "fp32"
    assert processes.resolved_precision("auto") == expected
    assert processes.resolved_precision("bf16") == "bf16"


@pytest.mark.skipif(torch.cuda.is_available() or sys.platform != "linux", reason="reads the CPU's flags")
def test_a_cpu_multiplies_bf16_where_its_flags_say_so():
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    if torch.backends.cpu.get_cpu_capability() in ("AVX512", "AMX"):
        assert processes.multiplies_bf16() == ("avx512_bf16" in flags or "amx_bf16" in flags)
    else:
        assert not processes.multiplies_bf16()


def test_processes_that_did_not_join_are_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    PartialState()  # alone, before the launcher's variables were looked at
    with pytest.raises(UserError, match=r"WORLD_SIZE=3 processes, but 1 joined"):
        processes.join()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["tensorbord"], "unknown tracker tensorbord; there are .*tensorboard"),
        (["comet_ml"], "not installed"),
    ],
)
def test_a_tracker_that_would_log_nowhere_is_refused(names, sentence):
    with pytest.raises(UserError, match=sentence):
        processes.check_trackers(names)


def test_the_launchers_choice_of_the_cpu_holds_for_precision_and_loaders(monkeypatch):
    from nestling.ssl.data.loader import default_workers

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not processes.computes_on_cpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert processes.computes_on_cpu()
    assert default_workers() == 0
    with pytest.raises(UserError, match="fp16"):
        processes.resolved_precision("fp16")


@pytest.mark.parametrize(("started", "expected"), [(1, 2), (4, 8), (2, 1)])
def test_another_number_of_processes_than_expected_is_refused(monkeypatch, started, expected):
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(UserError, match=f"expect_world_size={expected}, but the launcher started {started}"):
        processes.check_world_size(expected)
    processes.check_world_size(started)
    processes.check_world_size(None)


@pytest.mark.parametrize(
    ("said", "is_gone"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:23416", True),
        ("[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for recv operation", True),
        (
            "NCCL error in: ProcessGroupNCCL.cpp, ncclRemoteError: A call failed possibly due to a network "
            "error or a remote process exiting prematurely. Connection closed by remote peer node2<51562>",
            True,
        ),
        ("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_what_the_transports_say_of_a_process_that_is_gone_is_known(said, is_gone):
    assert bool(processes.GONE.search(said)) == is_gone


def test_an_error_of_a_lone_process_is_its_own():
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"), processes.gone_explained():
        raise RuntimeError("Connection closed by peer")
