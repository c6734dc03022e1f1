"""`python -m workbench.gateway SOCKET`: see `child`."""

import sys

from workbench.gateway.child import main

sys.exit(main(sys.argv[1:]))
