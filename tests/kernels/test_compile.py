"""Every kernel compiles for every card, alone and without defines, spills nothing, fits, and has the instructions it is for."""

import shutil

import pytest

from tools import check_kernels

pytestmark = pytest.mark.skipif(not check_kernels.has_compiler(), reason="no nvcc on PATH")


@pytest.mark.parametrize("source", check_kernels.sources(), ids=lambda path: path.stem)
def test_kernels_compile_and_fit(source, tmp_path, monkeypatch):
    """For the architecture with the least shared memory, and for the one whose machine code is looked at."""
    monkeypatch.setattr(check_kernels, "ARCHITECTURES", (86, 90))
    check(source, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("source", check_kernels.sources(), ids=lambda path: path.stem)
def test_kernels_compile_for_every_architecture_and_fit(source, tmp_path):
    check(source, tmp_path)


def check(source, tmp_path):
    made = check_kernels.compile_all(source, tmp_path / "code.fatbin")
    assert {each.architecture for each in made} == set(check_kernels.ARCHITECTURES)
    assert check_kernels.faults(made, check_kernels.launches()) == []
    if check_kernels.cuobjdump():
        assert check_kernels.slow_code(tmp_path / "code.fatbin", {each.kernel for each in made}) == []


def test_every_kernel_that_is_launched_is_in_the_file_that_it_is_looked_for_in():
    from gpu_worker.device.ops import KERNELS

    texts = {source.name: source.read_text() for source in check_kernels.sources()}
    for name, kernel in KERNELS.items():
        family = name.rstrip("0123456789")
        assert name in texts[kernel.file] or family in texts[kernel.file], f"{name} is not in {kernel.file}"


def test_code_that_spills_and_code_without_its_instruction_are_found(tmp_path, monkeypatch):
    """Bounds that allow few registers make the compiler spill; a loop of bytes has no 16-byte loads."""
    monkeypatch.setattr(check_kernels, "ARCHITECTURES", (86, 90))
    source = tmp_path / "bad.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 1) rms_norm(float* x, int n) {\n'
        "  float v[64];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) v[i] = x[i * n + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) x[i * n + threadIdx.x] = v[63 - i] * v[i] + v[(i * 7) % 64];\n"
        "}\n"
    )
    made = check_kernels.compile_all(source, tmp_path / "code.fatbin")
    found = check_kernels.faults(made, {"rms_norm": check_kernels.Launch(1024, 200 << 10)})
    assert any("spilled" in fault for fault in found) and any("shared memory" in fault for fault in found)
    assert check_kernels.faults(made, {}) != []
    if check_kernels.cuobjdump():
        assert "rms_norm: no LDG.E.128 in its machine code" in check_kernels.slow_code(tmp_path / "code.fatbin", {"rms_norm"})


def test_what_does_not_compile_is_said_in_the_compilers_words(tmp_path):
    (tmp_path / "wrong.cu").write_text("int x = ;\n")
    with pytest.raises(RuntimeError, match="expected an expression"):
        check_kernels.compile_all(tmp_path / "wrong.cu", tmp_path / "out")
    assert shutil.which("nvcc")
