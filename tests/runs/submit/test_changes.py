"""Changes of a draft against the run that it was cloned from."""

from __future__ import annotations

from dataclasses import replace

from runs.submit.changes import FieldChange
from runs.submit.changes import changes as changes_of
from runs.submit.run_draft import PoolDraft, RunDraft, local_demo


def changes(before: RunDraft, after: RunDraft) -> list[FieldChange]:
    return changes_of(before.to_dict(), after.to_dict())


def test_equal_drafts_have_no_changes_whatever_their_names() -> None:
    demo = local_demo()
    assert changes(demo, replace(demo, name="Another", rendezvous="file:///tmp/x")) == []


def test_each_changed_field_has_its_label_and_both_values() -> None:
    demo = local_demo()
    changed = replace(
        demo,
        settings=replace(demo.settings, inner_lr=1e-3),
        workload=replace(demo.workload, size="micro"),
        pools=(replace(demo.pools[0], spot=True),),
        budget_usd=2.0,
    )
    assert changes(demo, changed) == [
        FieldChange(
            field="settings.inner_lr", label="Inner learning rate", before=3e-3, after=1e-3
        ),
        FieldChange(field="workload.size", label="Size", before="demo", after="micro"),
        FieldChange(field="pools.0.spot", label="Pool 1: spot", before=False, after=True),
        FieldChange(field="budget_usd", label="Budget", before=0.0, after=2.0),
    ]


def test_an_added_pool_has_nothing_before() -> None:
    demo = local_demo()
    added = replace(demo, pools=(*demo.pools, PoolDraft(backend="modal", hardware="H100")))
    rows = {change.field: change for change in changes(demo, added)}
    assert (rows["pools.1.backend"].before, rows["pools.1.backend"].after) == (None, "modal")
    assert "settings.num_replicas" not in rows
