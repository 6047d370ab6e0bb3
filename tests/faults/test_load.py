"""Load in short: 64 clients beside 50 updates. `make load` is the long form."""

from __future__ import annotations

import pytest

from tests.faults.load import on_new_stand


@pytest.mark.timeout(180)
def test_clients_see_no_error_and_no_disorder_while_updates_go_on(parent, faults_model, faults_dir):
    load = on_new_stand(parent, faults_model, faults_dir, num_updates=50, num_clients=64)
    assert load.updates.total() == 50
    assert len(load.updates) == 5
    assert load.counts["length"] > 0
    assert load.counts["cancelled"] > 0
    assert load.counts["abort asked for"] > 0
