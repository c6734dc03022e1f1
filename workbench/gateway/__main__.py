"""`python -m workbench.gateway`: see `process`."""

import sys

from workbench.gateway.process import main

sys.exit(main())
