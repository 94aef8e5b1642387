"""Presets: what a workload brings, and that settings take its place."""

from __future__ import annotations

import pytest

from headrace_router.presets import PRESETS, preset
from headrace_router.settings import RouterSettings
from headrace_router.tenants import CLASSES, Tenants


def test_every_class_has_one_and_the_most_urgent_has_the_shortest_steps() -> None:
    assert tuple(PRESETS) == CLASSES
    assert PRESETS["chat"].max_step_tokens < PRESETS["agent"].max_step_tokens < PRESETS["document"].max_step_tokens


def test_settings_take_its_place() -> None:
    given = RouterSettings(workload="agent", max_step_tokens=33, itl_target_ms=0)
    tuned = preset(given)
    assert (tuned.max_step_tokens, tuned.itl_target_ms) == (33, 0)
    assert tuned.max_queue_size == PRESETS["agent"].max_queue_size
    assert "33 tokens a step" in str(tuned)


@pytest.mark.parametrize("workload", CLASSES)
def test_requests_that_name_no_class_are_of_the_servers(workload: str) -> None:
    tenant = Tenants(workload=workload).find([])
    assert tenant.workload == workload
    assert set(tenant.classes) == set(CLASSES)
