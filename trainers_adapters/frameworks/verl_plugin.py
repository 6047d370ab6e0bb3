"""The entry point of group `verl.plugins`: importing it registers. verl keeps quiet about plugins that fail,
so this one says what is wrong before it fails.
"""

from __future__ import annotations

import logging

from trainers_adapters.frameworks.verl import register

try:
    register()
except Exception as error:
    logging.getLogger(__name__).error("rollsync is not registered with verl: %s", error)
    raise
