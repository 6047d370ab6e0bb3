"""`python -m rollout_engine.cli` is the `rollsync` command."""

from rollout_engine.cli.main import main

main()
