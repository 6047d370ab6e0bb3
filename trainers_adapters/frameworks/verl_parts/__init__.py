"""What verl runs of ours; these modules import verl.

verl is imported here first: that loads our entry point, which imports all of these modules, so whichever of
them a process wants first (Ray's do so when they unpickle), none is found half imported.
"""

import verl as verl
