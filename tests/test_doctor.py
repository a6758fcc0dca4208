"""`focus doctor`: what it prints is true, and wrong attention is called wrong."""

import pytest
import torch

from focus import doctor

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_here_is_exact_and_its_kernel_is_named(dtype):
    (backend, _), (line, well) = doctor.exactness(CPU, dtype)
    assert well
    assert line.endswith(": exact")
    assert backend.endswith("/cpu-flash")


def test_wrong_attention_is_called_wrong(monkeypatch):
    right = doctor.focus_attention
    monkeypatch.setattr(doctor, "focus_attention", lambda *tensors, **given: 1.001 * right(*tensors, **given))
    *_, (line, well) = doctor.exactness(CPU, torch.float32)
    assert not well
    assert "WRONG" in line


def test_every_length_is_timed_against_full_attention():
    lines = [line for line, _ in doctor.speed(CPU, torch.float32, 0.01)]
    assert [int(line.split()[1]) for line in lines] == list(doctor.TIMED)


def test_a_scale_that_does_not_fit_says_what_is_short():
    said = {line.split(":")[0].removeprefix("scale        "): line for line, _ in doctor.fits(24.0, 50.0, 0.0)}
    assert said["laptop"].endswith(": fits")
    assert said["paper, 7B models"].endswith("needs 120 GiB of free disk (50 here), 30 GiB of GPU memory (0 here)")
    assert set(said) == set(doctor.NEEDS)


def test_the_machine_is_described():
    said = "\n".join(doctor.machine())
    assert f"torch {torch.__version__}" in said
    assert "GPU" in said
