"""An environment and its agent of one's own, in about 30 lines: name a word that ends like another one.

    workbench run cpu_smoke environment.name=examples/rhyme.py:Rhyme

The agent holds an ordinary OpenAI client. What it must do is send the model's answers back as they were served (`say`
appends them so), and set no sampling values: they are the recipe's.
"""

import random

from workbench.campaign.environments.base import AgentResult, Reward, Task, say, take_options

WORDS = ["light", "stone", "train", "cloud", "spring", "table"]


class Rhyme:
    name, min_calls = "rhyme", 2

    def __init__(self, options):
        self.options = take_options(self.name, options, letters=3)  # the options there are, with their defaults

    def task(self, seed):
        return Task(f"rhyme-{seed}", seed, {"word": random.Random(seed).choice(WORDS)})

    async def run(self, client, model, task, rng):
        messages = [{"role": "user", "content": f"Say one word that rhymes with {task.data['word']}."}]
        answer, response = await say(client, model, messages)
        if not self._rhymes(task, answer):
            messages.append({"role": "user", "content": f"It must end in …{self._ending(task)}. One word:"})
        else:
            messages.append({"role": "user", "content": "Good. Another one:"})
        answer, response = await say(client, model, messages)
        return AgentResult(response, messages)  # the response names the call that ended the trajectory

    def reward(self, task, result):
        said = [message["content"] for message in result.transcript if message["role"] == "assistant"]
        parts = {f"turn_{turn}": float(self._rhymes(task, answer)) for turn, answer in enumerate(said, 1)}
        return Reward(sum(parts.values()) / 2, parts)

    def _ending(self, task):
        return task.data["word"][-self.options["letters"] :]

    def _rhymes(self, task, answer):
        word = answer.strip().strip(".!").lower()
        return word.isalpha() and word.endswith(self._ending(task)) and word != task.data["word"]
