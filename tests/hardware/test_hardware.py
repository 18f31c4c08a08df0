"""Device profiles: the files, the times they model, and measuring."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError

from checkflow import hardware
from checkflow.errors import FormatError, InputError
from checkflow.graph import Graph, Op
from checkflow.hardware import measure
from checkflow.hardware.profile import Efficiency, PeakFlops, Profile

TOY = Profile(
    name="toy",
    description="round numbers",
    peak_flops_per_s=PeakFlops(float32=1000, float16=4000, bfloat16=2000, float64=500),
    memory_bandwidth_bytes_per_s=100,
    memory_bytes=1 << 20,
    launch_latency_ns=7,
    link_bandwidth_bytes_per_s=30,
    efficiency=Efficiency(compute=0.5, memory=0.8, link=0.9),
    source="made up",
)
GOOD = yaml.safe_dump(TOY.model_dump(), sort_keys=False)


def op(flops: int, traffic_bytes: int, dtype: str = "float32") -> Op:
    return Op("aten.op.default", (), (), flops, traffic_bytes, dtype, time_ns=0)


# The files


def test_bundled_devices() -> None:
    """The registry is the folder, and a file's name is its device's."""
    assert hardware.NAMES == ("a100-40gb", "a100-80gb", "h100", "h200", "rtx3090", "v100s")
    assert tuple(hardware.load_profile(name).name for name in hardware.NAMES) == hardware.NAMES


def test_one_set_of_assumptions_for_all_bundled_devices() -> None:
    """Efficiencies and launch latency are no property of a device."""
    profiles = [hardware.load_profile(name) for name in hardware.NAMES]
    assert {(p.efficiency, p.launch_latency_ns) for p in profiles} == {
        (Efficiency(compute=0.7, memory=0.8, link=0.8), 5000)
    }


@pytest.mark.parametrize(
    ("name", "giga_transfers"),
    [("v100s", 8), ("rtx3090", 16), ("a100-40gb", 16), ("a100-80gb", 16), ("h100", 32), ("h200", 32)],
)
def test_the_link_is_sixteen_lanes_of_pcie(name: str, giga_transfers: int) -> None:
    """Nominal: each lane carries 128 bits in 130 transfers, in one direction. Reached: 0.8 of it."""
    nominal = giga_transfers * 10**9 * 16 * 128 / 130 / 8
    profile = hardware.load_profile(name)
    assert profile.link_bandwidth_bytes_per_s == pytest.approx(nominal, rel=1e-4)
    assert hardware.link_bytes_per_s(profile) == pytest.approx(0.8 * nominal, rel=1e-4)


def test_a_path_names_a_profile_too(tmp_path: Path) -> None:
    """Any YAML file will do, whatever its suffix."""
    for path in (tmp_path / "mine.yaml", tmp_path / "mine"):
        path.write_text(GOOD)
        assert hardware.load_profile(str(path)) == TOY


def test_an_unknown_device_is_an_input_error() -> None:
    """The message lists the devices and says that a path works too."""
    with pytest.raises(InputError, match=r"'rtx9999' is not known; choose one of a100-40gb, .*v100s, or give the path"):
        hardware.load_profile("rtx9999")


@pytest.mark.parametrize("missing", ["missing.yaml", "folder/missing"])
def test_a_missing_file_is_an_input_error(tmp_path: Path, missing: str) -> None:
    """It is named."""
    with pytest.raises(InputError, match=f"{missing}: cannot be read"):
        hardware.load_profile(str(tmp_path / missing))


def test_a_folder_is_an_input_error(tmp_path: Path) -> None:
    """It cannot be read."""
    with pytest.raises(InputError, match="cannot be read"):
        hardware.load_profile(str(tmp_path))


def replaced(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the document: input should be an object"),
        ("- a\n- b\n", "the document: input should be an object"),
        ("just text", "the document: input should be an object"),
        ("name: [", "is not YAML"),
        ("name: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("a: &a [*a]", "holds a value that is no text or number"),
        ("? {a: b}\n: c", "is not YAML"),
        (f"x: {'9' * 5000}", "is not YAML"),
        (f"{'[' * 5000}", "is not YAML"),
        (GOOD + "name: twice\n", "a key stands twice"),
        (replaced("name: toy", "name: 2024-01-01"), "holds a value that is no text or number"),
        (replaced("name: toy\n", ""), "field name: field required"),
        (replaced("name: toy", "name: ''"), "field name: string should have at least 1"),
        (replaced("name: toy", "name: 3090"), "field name: input should be a valid string"),
        (replaced("name: toy", "title: toy\nname: toy"), "field title: extra inputs are not permitted"),
        (replaced("memory_bandwidth_bytes_per_s: 100\n", ""), "field memory_bandwidth_bytes_per_s: field required"),
        (replaced("bytes_per_s: 100", "bytes_per_s: -100"), "field memory_bandwidth_bytes_per_s: .*greater than 0"),
        (replaced("bytes_per_s: 100", "bytes_per_s: 0"), "field memory_bandwidth_bytes_per_s: .*greater than 0"),
        (replaced("bytes_per_s: 100", "bytes_per_s: 100GB/s"), "field memory_bandwidth_bytes_per_s: .*valid integer"),
        (replaced("bytes_per_s: 100", "bytes_per_s: 1.5"), "field memory_bandwidth_bytes_per_s: .*valid integer"),
        (replaced("bytes_per_s: 100", "bytes_per_s: true"), "field memory_bandwidth_bytes_per_s: .*valid integer"),
        (replaced("bytes_per_s: 100", "bytes_per_s: null"), "field memory_bandwidth_bytes_per_s: .*valid integer"),
        (replaced("bytes_per_s: 100", "bytes_per_s: .inf"), "field memory_bandwidth_bytes_per_s: "),
        (replaced("launch_latency_ns: 7", "launch_latency_ns: .nan"), "field launch_latency_ns: "),
        (replaced("  float64: 500\n", ""), "field peak_flops_per_s.float64: field required"),
        (replaced("  float64: 500\n", "  float64: -1\n"), "field peak_flops_per_s.float64: .*greater than 0"),
        (replaced("  float64: 500\n", "  float64: 500\n  int8: 9\n"), "field peak_flops_per_s.int8: extra inputs"),
        (replaced("  link: 0.9\n", "  link: 1.1\n"), "field efficiency.link: .*less than or equal to 1"),
        (replaced("  link: 0.9\n", "  link: 0.0\n"), "field efficiency.link: .*greater than 0"),
        (replaced("  link: 0.9\n", "  link: .nan\n"), "field efficiency.link: "),
        (replaced("  link: 0.9\n", "  link: '0.9'\n"), "field efficiency.link: .*valid number"),
    ],
)
def test_a_malformed_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """One line that names the file and the field."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(FormatError, match=message) as caught:
        hardware.load_profile(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A binary file is no profile."""
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="is not UTF-8"):
        hardware.load_profile(str(path))


def test_a_written_profile_reads_back(tmp_path: Path) -> None:
    """Equal, with a comment on top and nothing left beside it."""
    path = tmp_path / "here.yaml"
    hardware.write_profile(path, TOY)
    assert hardware.load_profile(str(path)) == TOY
    assert path.read_text().startswith("# A device profile")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", hardware.NAMES)
def test_a_bundled_name_is_taken_for_one_devices_figures(name: str, tmp_path: Path) -> None:
    """A copy may say other things of itself; with other figures it needs another name."""
    bundled, path = hardware.load_profile(name), tmp_path / "copy.yaml"
    copied = bundled.model_copy(update={"description": "the one in our cellar"})
    hardware.write_profile(path, copied)
    assert hardware.load_profile(str(path)) == copied
    for changed in ({"launch_latency_ns": 4000}, {"efficiency": Efficiency(compute=0.5, memory=0.8, link=0.8)}):
        hardware.write_profile(path, bundled.model_copy(update=changed))
        with pytest.raises(FormatError, match=rf"copy\.yaml: field name: '{name}' is .*; give it a name of its own$"):
            hardware.load_profile(str(path))
        hardware.write_profile(path, bundled.model_copy(update={"name": "mine", **changed}))
        assert hardware.load_profile(str(path)).name == "mine"


def test_an_unwritable_output_is_an_input_error(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(InputError, match=r"here\.yaml: cannot be written"):
        hardware.write_profile(tmp_path / "missing" / "here.yaml", TOY)


def test_profiles_are_frozen() -> None:
    """A profile is a value."""
    with pytest.raises(ValidationError):
        TOY.name = "other"


# The roofline


@pytest.mark.parametrize(
    ("operator", "expected_ns"),
    [
        (op(0, 0), 0),  # an allocation launches nothing
        (op(5, 0), 10_000_000),  # 5 / (1000 * 0.5) s
        (op(0, 8), 100_000_000),  # 8 / (100 * 0.8) s
        (op(5, 8), 100_000_000),  # bound by memory
        (op(500, 8), 1_000_000_000),  # bound by arithmetic
        (op(500, 0, "float16"), 250_000_000),
        (op(500, 0, "bfloat16"), 500_000_000),
        (op(500, 0, "float64"), 2_000_000_000),
        (op(500, 0, "complex128"), 2_000_000_000),
        (op(500, 0, "int64"), 1_000_000_000),  # as float32
        (op(0, 1), 12_500_000),
    ],
)
def test_roofline(operator: Op, expected_ns: int) -> None:
    """The largest of the three terms, each worked out by hand."""
    assert hardware.operator_time_ns(operator, TOY) == expected_ns


def test_no_kernel_is_shorter_than_its_launch() -> None:
    """An operator that moves a byte takes the launch latency at least."""
    slow = TOY.model_copy(update={"launch_latency_ns": 20_000_000})
    assert hardware.operator_time_ns(op(0, 1), slow) == 20_000_000


def test_times_are_rounded_up() -> None:
    """A fraction of a nanosecond counts as one."""
    fast = TOY.model_copy(update={"memory_bandwidth_bytes_per_s": 3 * 10**9, "launch_latency_ns": 1})
    assert hardware.operator_time_ns(op(0, 12), fast) == 5  # 12 bytes at 2.4 GB/s
    assert hardware.operator_time_ns(op(0, 13), fast) == 6


def test_a_slow_device_has_a_rate() -> None:
    """An efficiency that would round a rate to zero leaves one a second."""
    slow = TOY.model_copy(update={"link_bandwidth_bytes_per_s": 1, "efficiency": TOY.efficiency})
    slow = slow.model_copy(update={"efficiency": Efficiency(compute=0.1, memory=0.1, link=0.1)})
    assert hardware.link_bytes_per_s(slow) == 1


def test_retime_sets_every_operators_time() -> None:
    """The graph carries the times and the device's name, and is otherwise the same."""
    ops = (op(0, 0), op(5, 0), op(0, 8))
    graph = Graph("toy", (), "", "cpu", ops, (), ())
    timed = hardware.retime(graph, TOY)
    assert [each.time_ns for each in timed.ops] == [0, 10_000_000, 100_000_000]
    assert timed.device == "toy"
    assert timed.retimed("", [0, 0, 0]) == graph


# Measuring


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and times small enough for a test."""
    monkeypatch.setattr(measure, "RUN_S", 0.001)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "LARGEST_SIDE", 256)


@pytest.mark.usefixtures("quick")
def test_measuring_this_cpu_gives_a_profile(tmp_path: Path) -> None:
    """It is valid, says that nothing is lost to efficiency, tells its progress, and can be written and read."""
    told: list[str] = []
    profile = measure.measure_profile("here", "cpu", progress=told.append)
    assert len(told) == 7 and "measuring the link" in told
    assert profile.efficiency == Efficiency(compute=1.0, memory=1.0, link=1.0)
    assert profile.name == "here" and torch.__version__ in profile.source
    assert profile.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    hardware.write_profile(tmp_path / "here.yaml", profile)
    assert hardware.load_profile(str(tmp_path / "here.yaml")) == profile


@pytest.mark.usefixtures("quick")
def test_rates_follow_from_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half a second for everything, each figure is its work in half a second."""
    calls: list[int] = []

    def median(run: object, threads: int) -> float:
        assert callable(run)
        run()
        calls.append(threads)
        return 0.5

    monkeypatch.setattr(measure, "_median_s", median)
    profile = measure.measure_profile("here", "cpu")
    assert profile.peak_flops_per_s.float32 == profile.peak_flops_per_s.float16 == 2 * 2 * 256**3
    assert profile.memory_bandwidth_bytes_per_s == 2 * 2 * (1 << 20)
    assert profile.link_bandwidth_bytes_per_s == 2 * (1 << 20)
    assert profile.launch_latency_ns == 500_000_000
    assert calls == [torch.get_num_threads()] * 6 + [1]


def test_the_median_time_is_one_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no shorter than the shortest call, and shorter than all the calls together."""
    monkeypatch.setattr(measure, "RUN_S", 0.05)
    durations: list[float] = []

    def nap() -> None:
        started = time.perf_counter()
        time.sleep(0.002)
        durations.append(time.perf_counter() - started)

    median = measure._median_s(nap, threads=1)
    assert min(durations) <= median < sum(durations)


def test_an_unnamed_profile_is_an_input_error() -> None:
    """The name goes into graphs and schedules."""
    with pytest.raises(InputError, match="name: is empty"):
        measure.measure_profile("", "cpu")


def test_a_measured_profile_is_not_named_as_a_bundled_one() -> None:
    with pytest.raises(InputError, match="name: 'h100' is a bundled device's; give the profile a name of its own"):
        measure.measure_profile("h100", "cpu")


def test_an_unknown_kind_of_device_is_an_input_error() -> None:
    """The choices are named."""
    with pytest.raises(InputError, match="'tpu' cannot be measured; choose cpu or cuda"):
        measure.measure_profile("here", "tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_measuring_cuda_without_one_is_an_input_error() -> None:
    """It says that there is none."""
    with pytest.raises(InputError, match="no CUDA device"):
        measure.measure_profile("here", "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_cuda_gives_a_profile() -> None:
    """The link is slower than the device's memory, and arithmetic in half precision faster than in double."""
    profile = measure.measure_profile("here", "cuda")
    assert profile.link_bandwidth_bytes_per_s < profile.memory_bandwidth_bytes_per_s
    assert profile.peak_flops_per_s.float16 > profile.peak_flops_per_s.float64
    assert profile.memory_bytes == torch.cuda.get_device_properties(0).total_memory
