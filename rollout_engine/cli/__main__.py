"""`python -m rollout_engine.cli` is the `rollsync` command."""

import sys

from rollout_engine.cli.main import main

sys.exit(main())
