"""A black box as agent: a program of its own that is only given OPENAI_BASE_URL, trained on without being changed.

    workbench run cpu_smoke environment.name=examples/black_box.py:BlackBox

Its standard output is its last answer. That text is the witness of which call ended the trajectory: the gateway knows
the fingerprint of everything it served, so no id has to come out of the box. An answer that two different calls gave
names neither; such a rollout has no vote. An agent that can print the id of its last response should: see `response`.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

from workbench.campaign.environments.base import AgentResult, Reward, Task, take_options

AGENT = Path(__file__).with_name("anyones_agent.py")


class BlackBox:
    name, min_calls = "black_box", 2

    def __init__(self, options):
        self.options = take_options(self.name, options, timeout_s=60.0)

    def task(self, seed):
        thing = random.Random(seed).choice(["river", "mountain", "planet", "metal"])
        return Task(f"black-box-{seed}", seed, {"question": f"Name a {thing}."})

    async def run(self, client, model, task, rng):
        environment = {**os.environ, "OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": "unused"}
        agent = await asyncio.create_subprocess_exec(
            sys.executable, str(AGENT), task.data["question"],
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self.options["timeout_s"]):
                out, err = await agent.communicate()
        except TimeoutError:
            return AgentResult(None, [], error=f"the agent did not end within {self.options['timeout_s']:g} s")
        finally:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
        if agent.returncode:
            return AgentResult(None, [], error=f"the agent ended with {agent.returncode}: {err.decode()[-300:]}")
        answer = {"role": "assistant", "content": out.decode()}
        return AgentResult(response={"choices": [{"message": answer}]}, transcript=[answer])

    def reward(self, task, result):
        return Reward(float(0 < len(result.transcript[-1]["content"].split()) <= 3) if result.transcript else 0.0)
