"""Plans of packages and shapes, as tables and as a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader import open_package
from estream_packer.decode_tables import decode_lines, energy_texts
from estream_packer.frontier_picture import frontier_svg
from estream_packer.planning import (
    FIGURES,
    Planned,
    find_profile,
    find_workload,
    notices,
    package_workload,
    plan_prompts,
    seconds_text,
)
from estream_spec.constants import SectionType
from estream_spec.energy import EnergySpent
from estream_spec.errors import LinkError, MalformedError, PackError
from estream_spec.prefetch_router import encode_prefetch_router
from estream_spec.profile import Curve, DeviceProfile, EnergyFigures, ExpertTimes, encode_profile
from estream_spec.profiles import shipped_profile
from estream_spec.shapes import SHAPES
from estream_spec.sizes import bytes_text
from fixtures.estream import device
from fixtures.packages import Draft, Section
from fixtures.packed import PackageFactory
from fixtures.prefetching import prefetch_router_for

SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30


def planned(*prompts: int, memory: int = 3 * GIB) -> Planned:
    return plan_prompts("olmoe-1b-7b", device(), memory, prompts)


def test_shape_is_stored_as_build_does_it() -> None:
    name, workload = find_workload("olmoe-1b-7b")
    assert name == "olmoe-1b-7b"
    assert workload.expert_counts == (64,) * 16
    assert workload.expert_bytes == pytest.approx(16 * 64 * 3 * 2048 * 1024 * 4.25 / 8, rel=0.01)
    dense = 16 * 4 * 2048**2 + 2048 * 50304
    assert workload.dense_bytes == pytest.approx(dense, rel=0.05)


def test_package_is_planned_as_it_is(packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        workload = package_workload(package)
        experts = package.experts.table
        assert workload.expert_bytes == sum(each.count * each.record_length for each in experts.ranges)
        embedding = package.dense.table.ranges[0].record_length
        assert workload.dense_bytes == sum(each.record_length for each in package.dense.table.ranges) - embedding
    assert find_workload(str(packed()))[1] == workload


def test_prefetch_router_of_a_package_counts_as_it_was_measured(tmp_path: Path) -> None:
    draft = Draft()
    with open_package(draft.seal()) as package:
        router = prefetch_router_for(package)
        counts = package.manifest.model.expert_counts
        assert package_workload(package).needed is None
    draft.sections.append(Section(SectionType.PREFETCH_ROUTER, encode_prefetch_router(router)))
    path = tmp_path / "with-router.emoe"
    path.write_bytes(draft.seal())
    needed = find_workload(str(path))[1].needed
    assert needed is not None
    for count, ranks in zip(counts, needed, strict=True):
        assert ranks == pytest.approx(np.linspace(1, 0, count))
    plans = plan_prompts(str(path), shipped_profile("ufs-4.0"), GIB, [4])
    assert plans.predicted
    assert list(decode_lines(plans))[-1] == "exact: figures of the prefetch router are as measured when it was trained"


def test_tied_embedding_stays_in_memory(packed: PackageFactory) -> None:
    with open_package(packed("tied")) as package:
        ranges = package.dense.table.ranges
        assert package_workload(package).dense_bytes == sum(each.record_length for each in ranges)


def test_unknown_model_lists_the_shapes() -> None:
    with pytest.raises(PackError, match="no such package") as caught:
        find_workload("olmoe")
    assert caught.value.hint == f"shapes are {', '.join(SHAPES)}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_can_be_planned(name: str) -> None:
    planned = plan_prompts(name, shipped_profile("snapdragon-8-elite"), 8 << 30, [64])
    assert planned.expert_bytes > planned.dense_bytes > 0
    assert planned.plans[0].choice.time_s > 0


def test_profile_is_found_by_name_or_file(tmp_path: Path, packed: PackageFactory) -> None:
    assert find_profile("ufs-4.0") == shipped_profile("ufs-4.0")
    path = tmp_path / "phone.json"
    path.write_bytes(encode_profile(device()))
    assert find_profile(str(path)) == device()
    path.write_bytes(b"{}")
    with pytest.raises(MalformedError, match="missing required field `name`"):
        find_profile(str(path))
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(MalformedError, match="profile has more than 1 MiB"):
        find_profile(str(path))
    with pytest.raises(PackError, match="is a package, expected a device profile"):
        find_profile(str(packed()))
    with pytest.raises(PackError, match="no such file") as caught:
        find_profile(str(tmp_path / "none"))
    assert caught.value.hint is not None
    assert "snapdragon-8-elite-gen-5" in caught.value.hint


def test_prompt_beyond_the_context_and_too_little_memory_are_refused() -> None:
    with pytest.raises(PackError, match="prompt of 4097 tokens, expected at most the model's 4096"):
        planned(1, 4097)
    with pytest.raises(LinkError, match="expected at least"):
        planned(512, memory=1 << 20)


def test_figures_that_are_only_estimated_are_named() -> None:
    neutral = plan_prompts("olmoe-1b-7b", shipped_profile("ufs-4.0"), GIB, [64]).estimated
    assert {"experts.flops", "energy.idle"} <= set(neutral)
    assert "read_rates" not in neutral


@pytest.mark.parametrize(
    ("measured", "told"), [((128,), True), ((511, 1023), False), ((512,), False), ((2048,), False), ((2049,), True)]
)
def test_computing_measured_with_experts_of_another_size_is_told(measured: tuple[float, ...], told: bool) -> None:
    flops = Curve(at=measured, values=(1e12,) * len(measured), basis="measured", source="a test")
    experts = replace(device().experts, flops=flops)
    for basis, expected in ((experts, told), (replace(experts, flops=replace(flops, basis="estimated")), False)):
        plans = plan_prompts("olmoe-1b-7b", replace(device(), experts=basis), 3 * GIB, [64])
        found = [each for each in notices(plans) if "this model's have 1024" in each]
        assert len(found) == expected
        assert all(f"with experts of {measured[0]} rows" in each for each in found)


def test_figures_are_told_in_words() -> None:
    fields = [
        *(
            name
            for name in DeviceProfile.__struct_fields__
            if name not in {"name", "about", "experts", "npu", "energy"}
        ),
        *(f"experts.{name}" for name in ExpertTimes.__struct_fields__),
        *(f"energy.{name}" for name in EnergyFigures.__struct_fields__),
    ]
    assert sorted(FIGURES) == sorted(fields)
    plans = plan_prompts("olmoe-1b-7b", device(), 3 * GIB, [64])
    words = "reading, computing of all else in a layer, computing of the head, computing of experts"
    assert list(notices(plans)) == [f"estimated figures of fit: {words}"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12.3 ms"), (0.9994, "999.4 ms"), (1.234, "1.23 s"), (0, "0.0 ms")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("joules", "time_s", "texts"),
    [(2.345, 2.0, ("2.35 J", "4.69 J s")), (0.0123, 0.05, ("12.3 mJ", "615.0 µJ s")), (0, 1, ("0.0 mJ", "0.0 mJ s"))],
)
def test_energies(joules: float, time_s: float, texts: tuple[str, str]) -> None:
    assert energy_texts(EnergySpent(read_j=joules, memory_j=0, compute_j=0, idle_j=0), time_s) == texts


def test_bytes() -> None:
    texts = ["1023 bytes", "48.0 KiB", "5.0 MiB", "1.50 GiB"]
    assert [bytes_text(count) for count in (1023, 48 << 10, 5 << 20, 3 << 29)] == texts


def test_picture_draws_each_frontier_and_choice() -> None:
    plans = planned(1, 512, 4096, memory=2 * GIB)
    picture = ElementTree.fromstring(frontier_svg(plans))
    marks = picture.findall(f"{SVG}circle")
    assert len(marks) == sum(len(plan.frontier) + 1 for plan in plans.plans)
    hollow = [mark for mark in marks if mark.get("fill") == "#ffffff"]
    above = [each for plan in plans.plans for each in plan.frontier if each.arena_bytes > plan.arena_cap]
    assert len(hollow) == len(above) > 0
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"1 tokens", "512 tokens", "4,096 tokens"} <= set(texts)


@pytest.mark.parametrize("count", [1, 3, 13])
def test_labels_of_a_picture_do_not_overlap_and_stay_inside(count: int) -> None:
    picture = ElementTree.fromstring(frontier_svg(planned(*range(64, 64 + count))))
    places = sorted(
        float(text.get("y", 0)) for text in picture.iter(f"{SVG}text") if (text.text or "").endswith(" tokens")
    )
    assert len(places) == count
    assert all(later - earlier > 31.9 for earlier, later in pairwise(places))
    assert places[0] > 50
    assert places[-1] + 14 < float(picture.get("height", 0)) - 60


def test_picture_escapes_names() -> None:
    plans = planned(64)
    odd = Planned(
        **{field: getattr(plans, field) for field in plans.__struct_fields__ if field != "model"}, model='<&"\x01'
    )
    assert '<&"\\x01' in (ElementTree.fromstring(frontier_svg(odd)).findtext(f"{SVG}title") or "")
