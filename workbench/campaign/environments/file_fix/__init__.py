"""File fix: agentic software engineering in small. A Python file with a failing test, and tools to mend it.

    task (file, tests, one bug) ─► agent: read_file · replace · run_tests, over OpenAI tool calls ─► transcript
    transcript ─► the same edits again on a fresh copy ─► tests in the sandbox ─► reward: 1 when all pass

`files/` holds good files and their tests, `tasks` the bugs, `workspace` what the tools do, `sandbox` and `jail` how
code that a model wrote is run, `environment` the agent and its reward.
"""

from workbench.campaign.environments.file_fix.environment import FileFix

__all__ = ["FileFix"]
